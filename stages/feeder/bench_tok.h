/* bench_tok: how fast one thread turns text into ids. */
#ifndef SL_FEEDER_BENCH_TOK_H
#define SL_FEEDER_BENCH_TOK_H
#include "ipc/err.h"
#include "stages/feeder/tokenizer.h"

typedef struct sl_bench_tok {
    double seconds;  /* of the fastest round */
    double mb_per_s; /* 10^6 bytes of text a second, fastest round */
    double tokens_per_s;
    uint64_t bytes, tokens; /* of one round */
    uint64_t work;          /* merge look-ups of the last round */
    int rounds;
} sl_bench_tok;

/* Encode n texts (text[i], len[i] bytes) `rounds` (>= 1) times on the calling thread; fails as encoding fails. */
int sl_bench_tokenize(const sl_tokenizer *t, const char *const *text, const size_t *len, size_t n, int rounds,
                      sl_bench_tok *out, sl_err *err);
#endif
