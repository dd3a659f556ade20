/* tokenizer_internal: what the loaders fill in and the encoder reads. Not for users of tokenizer.h. */
#ifndef SL_FEEDER_TOKENIZER_INTERNAL_H
#define SL_FEEDER_TOKENIZER_INTERNAL_H
#include "stages/feeder/added.h"
#include "stages/feeder/bpe.h"
#include "stages/feeder/normalize.h"
#include "stages/feeder/pretok.h"
#include "stages/feeder/tokenizer.h"

#define SL_TOK_MAX_NORM  8
#define SL_TOK_MAX_EXTRA 8 /* ids before or after a text */

struct sl_tokenizer {
    const char *kind;
    char hash[33];
    uint64_t salt; /* of the same bytes: tells caches of different tokenizers apart */
    sl_bpe *bpe;
    sl_pretok *pretok;
    sl_added *added;
    const sl_added_token **added_of; /* by id, NULL entries; [0, vocab) */
    int32_t vocab;
    sl_norm_step norm[SL_TOK_MAX_NORM];
    int n_norm;
    int32_t before[SL_TOK_MAX_EXTRA], after[SL_TOK_MAX_EXTRA]; /* with add_special */
    int n_before, n_after;
    bool chunked;        /* tiktoken: the wrapper's chunks */
    uint8_t *not_before; /* bitmap of characters that some token has before the mark: no cut there; NULL = never cut */
    bool no_plain;       /* tests: patterns stay on pcre2 */
};

/* Loaders fill t's parts up to, not including, sl_bpe_finish and sl_pretok_finish, which they also call. */
int sl_tokenizer_from_json(sl_tokenizer *t, const char *text, size_t n, sl_err *err);
/* tokenizer_config.json's add_bos_token, for the classes that honour it. */
int sl_tokenizer_apply_config(sl_tokenizer *t, const char *text, size_t n, sl_err *err);
int sl_tokenizer_from_tiktoken(sl_tokenizer *t, const char *model, size_t n, const char *config, size_t n_config,
                               sl_err *err);
int sl_tokenizer_from_gguf(sl_tokenizer *t, const char *path, sl_err *err);
/* Same, from memory (fuzzers). */
struct sl_gguf;
int sl_tokenizer_from_gguf_open(sl_tokenizer *t, const struct sl_gguf *g, sl_err *err);

/* Helpers of the loaders. */
sl_tokenizer *sl_tokenizer_alloc(void);
int sl_tokenizer_seal(sl_tokenizer *t, sl_err *err); /* after a loader: id tables */
/* The byte behind a character of the byte-level alphabet, -1 when it is none. */
int sl_bytelevel_byte(uint32_t cp);
/* Decode a byte-level string into out (n bytes suffice); -1 when a character is outside the alphabet. */
long sl_bytelevel_decode(const char *s, size_t n, char *out);
int sl_tokenizer_add_norm(sl_tokenizer *t, sl_norm_kind kind, const char *find, size_t nf, bool literal,
                          const char *with, size_t nw, sl_err *err);
/* Put an added token; when normalized, its search form goes through t's normalizers. */
int sl_tokenizer_add_added(sl_tokenizer *t, const sl_added_token *tok, sl_err *err);
/* Find which characters stand before `mark` inside tokens, so that longer texts may be cut before other marks. */
int sl_tokenizer_find_cuts(sl_tokenizer *t, sl_err *err);
#endif
