#include "stages/feeder/bench_tok.h"
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int sl_bench_tokenize(const sl_tokenizer *t, const char *const *text, const size_t *len, size_t n, int rounds,
                      sl_bench_tok *out, sl_err *err) {
    memset(out, 0, sizeof *out);
    sl_tok_scratch *s = sl_tok_scratch_new();
    if (!s) return sl_err_set(err, SL_ETEMP, "out of memory");
    sl_ids ids = {0};
    int rc = 0;
    for (int r = 0; r < rounds && !rc; r++) {
        uint64_t before = sl_tok_scratch_work(s);
        out->bytes = out->tokens = 0;
        double start = now();
        for (size_t i = 0; i < n && !rc; i++) {
            ids.n = 0;
            rc = sl_tokenizer_encode(t, s, text[i], len[i], false, true, &ids, err);
            out->bytes += len[i];
            out->tokens += ids.n;
        }
        double took = now() - start;
        if (!r || took < out->seconds) out->seconds = took;
        out->work = sl_tok_scratch_work(s) - before;
        out->rounds = r + 1;
    }
    if (!rc && out->seconds > 0) {
        out->mb_per_s = (double)out->bytes / out->seconds / 1e6;
        out->tokens_per_s = (double)out->tokens / out->seconds;
    }
    free(ids.ids);
    free(ids.off);
    sl_tok_scratch_free(s);
    return rc;
}
