/* normalize: text before splitting (NFC, Replace, Prepend, in any sequence), and the map from the changed text back to
 * the original.
 *
 * An sl_rewrite is a changed text with the list of its edits: "bytes [to, to + to_n) stand for the source's [from, from
 * + from_n)"; what lies between edits is copied. Mapping an offset inside an edit gives `from`: a token that begins
 * inside a composed character, say, counts from where that character began. Everything outside edits maps exactly. */
#ifndef SL_FEEDER_NORMALIZE_H
#define SL_FEEDER_NORMALIZE_H
#include "ipc/err.h"
#include "stages/feeder/regex.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct sl_edit {
    uint32_t to, to_n, from, from_n;
} sl_edit;
typedef struct sl_rewrite { /* start zeroed; reusable */
    char *s;
    size_t n, cap;
    sl_edit *e;
    size_t n_e, cap_e;
    bool want_map; /* record edits */
    bool failed;   /* out of memory on the way */
    const struct sl_rewrite
        *under; /* the rewrite whose result is this one's source; NULL: the source is the caller's text */
} sl_rewrite;

void sl_rewrite_reset(sl_rewrite *w, bool want_map);
void sl_rewrite_copy(sl_rewrite *w, const char *s, size_t n); /* source bytes kept as they are */
void sl_rewrite_put(sl_rewrite *w, const char *s, size_t n, size_t from,
                    size_t from_n); /* s for the source's [from, from + from_n) */
void sl_rewrite_free(sl_rewrite *w);
/* Offset in the source of offset x. *cursor (start at 0) makes rising x cheap; w->want_map must have been set. */
uint32_t sl_rewrite_map(const sl_rewrite *w, size_t *cursor, uint32_t x);

typedef enum { SL_NORM_NFC, SL_NORM_REPLACE, SL_NORM_PREPEND } sl_norm_kind;
typedef struct sl_norm_step {
    sl_norm_kind kind;
    sl_regex *re; /* REPLACE with a pattern */
    char *find;   /* REPLACE with a string; owned */
    size_t find_n;
    char *with; /* REPLACE, PREPEND; owned */
    size_t with_n;
} sl_norm_step;
void sl_norm_step_free(sl_norm_step *s);

/* Write s[0..n) through one step into *w (reset first). Returns 1: *w holds the result; 0: the step changes nothing, *w
 * is unused; SL_ETEMP, SL_EDATA (a pattern's limits). */
int sl_norm_apply(const sl_norm_step *step, sl_regex_scratch *rs, const char *s, size_t n, bool want_map, sl_rewrite *w,
                  sl_err *err);
#endif
