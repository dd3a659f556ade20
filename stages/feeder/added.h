/* added: tokens that are cut out of the text before anything else ("added_tokens"), special or not.
 *
 * Two sets, as the reference has them: tokens searched in the text as written, and tokens searched after normalization
 * ("normalized": true). Matching is leftmost, then longest. Flags: single_word (no word character may touch it),
 * lstrip/rstrip (it swallows the white space before/after it). */
#ifndef SL_FEEDER_ADDED_H
#define SL_FEEDER_ADDED_H
#include "ipc/err.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SL_ADDED_MAX_BYTES 1024 /* longest added token; bounds the search per byte of text */

typedef struct sl_added_token {
    char *s; /* as written, NUL-terminated; owned by the set */
    uint32_t n;
    int32_t id;
    bool special, single_word, lstrip, rstrip, normalized;
} sl_added_token;
typedef struct sl_added sl_added;

sl_added *sl_added_new(void);
void sl_added_free(sl_added *a);
/* Copies t; `find` is what is searched for (the token's own text, or its normalized form). SL_ECONFIG: empty or too
 * long. Of two tokens that search for the same bytes in the same set the later wins. */
int sl_added_put(sl_added *a, const sl_added_token *t, const char *find, size_t n_find, sl_err *err);
size_t sl_added_count(const sl_added *a);
const sl_added_token *sl_added_at(const sl_added *a, size_t i);
const sl_added_token *sl_added_by_id(const sl_added *a, int32_t id); /* NULL */
const sl_added_token *sl_added_named(const sl_added *a, const char *s);
bool sl_added_any(const sl_added *a, bool normalized);

typedef struct sl_added_scan { /* start zeroed */
    size_t pos;                /* search goes on here */
    size_t done;               /* text before this is spoken for */
} sl_added_scan;
typedef struct sl_added_hit {
    const sl_added_token *t;
    size_t a, b; /* range it stands for, stripped white space included; a may be below the previous hit's b only if text
                    is shared */
} sl_added_hit;
/* Next token in s[0..n) of the set; false at the end. Plain text before it is [scan->done before the call, hit->a).
 * With parse_special false, special tokens count as text. */
bool sl_added_next(const sl_added *a, bool normalized, const char *s, size_t n, bool parse_special, sl_added_scan *scan,
                   sl_added_hit *hit);
#endif
