/* pretok: cuts a text into the pieces that byte-pair encoding never merges across (the "pre_tokenizer" of
 * tokenizer.json).
 *
 * Steps are added in order, then _finish recognises well-known sequences and picks plain code for them (match.h); all
 * else runs step by step over a list of pieces. Immutable afterwards; each thread brings its own scratch. */
#ifndef SL_FEEDER_PRETOK_H
#define SL_FEEDER_PRETOK_H
#include "ipc/err.h"
#include "stages/feeder/normalize.h"
#include "stages/feeder/regex.h"

typedef enum { SL_SPLIT_REMOVED, SL_SPLIT_ISOLATED, SL_SPLIT_PREVIOUS, SL_SPLIT_NEXT, SL_SPLIT_CONTIGUOUS } sl_split;
typedef enum { SL_PREFIX_NEVER, SL_PREFIX_FIRST, SL_PREFIX_ALWAYS } sl_prefix;

typedef struct sl_pretok sl_pretok;
typedef struct sl_pretok_scratch sl_pretok_scratch;

sl_pretok *sl_pretok_new(void);
void sl_pretok_free(sl_pretok *t);
/* Behaviour by its name in tokenizer.json ("Isolated", ...); -1 when there is none such. */
int sl_split_named(const char *name);
/* Steps. SL_ECONFIG names what is not understood; SL_ETEMP. */
int sl_pretok_add_split(sl_pretok *t, const char *pattern, size_t n, bool literal, sl_split how, bool invert,
                        sl_err *err);
int sl_pretok_add_digits(sl_pretok *t, bool individual, sl_err *err);
int sl_pretok_add_punctuation(sl_pretok *t, sl_split how, sl_err *err);
int sl_pretok_add_whitespace(sl_pretok *t, sl_err *err); /* WhitespaceSplit */
int sl_pretok_add_bytelevel(sl_pretok *t, bool add_prefix_space, bool use_regex,
                            sl_err *err); /* must be the last step */
int sl_pretok_add_metaspace(sl_pretok *t, const char *mark, size_t n, sl_prefix prefix, bool split, sl_err *err);
/* `plain` false keeps every pattern on pcre2 (for tests that compare the two). */
int sl_pretok_finish(sl_pretok *t, bool plain, sl_err *err);
bool sl_pretok_bytelevel(const sl_pretok *t); /* pieces are bytes, not characters */
bool sl_pretok_plain(const sl_pretok *t);     /* a recognised sequence: no regular expressions run */

sl_pretok_scratch *sl_pretok_scratch_new(void);
void sl_pretok_scratch_free(sl_pretok_scratch *s);

/* A piece: bytes s[0..n); `at` is its offset in the text given to _run. When a step rewrote the text (`map` set), at is
 * its offset in the rewritten text: sl_rewrite_map(map), then map->under and so on lead back. Return 0 to go on. */
typedef int (*sl_piece_fn)(void *ctx, const char *s, size_t n, size_t at, const sl_rewrite *map, sl_err *err);
/* Cut text[0..n), valid UTF-8. `at_start`: it stands at the start of the row (Metaspace's "first"). */
int sl_pretok_run(const sl_pretok *t, sl_pretok_scratch *s, const char *text, size_t n, bool at_start, bool want_map,
                  sl_piece_fn fn, void *ctx, sl_err *err);
#endif
