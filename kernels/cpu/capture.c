#include "kernels/cpu/cpu.h"

typedef struct {
    sl_cpu *c;
    uint64_t *sums;
    uint32_t *nonfinite;
    const void *x;
    int64_t T, H, rows, chunks;
} print_job;

static void print_part(void *arg, int tid, int threads) {
    print_job *j = arg;
    long lo, hi;
    sl_pool_part(j->chunks, 1, tid, threads, &lo, &hi);
    for (int64_t i = lo; i < hi; i++) {
        int64_t t0 = i * j->rows, n = j->T - t0 < j->rows ? j->T - t0 : j->rows;
        uint64_t bytes = (uint64_t)(n * j->H) * sl_cpu_esz(j->c), a = 0, b = 0;
        uint32_t bad = 0;
        j->c->isa->fingerprint(sl_cpu_at(j->c, j->x, t0 * j->H), 0, bytes, j->c->bf, &a, &b, &bad);
        j->sums[i] = b ^ (a << 32 | a >> 32) ^ (bytes * 0x9e3779b97f4a7c15u);
        j->nonfinite[i] = bad;
    }
}

int sl_cpu_fingerprint(void *ctx, uint64_t *sums, uint32_t *nonfinite, const void *x, int64_t T, int64_t H,
                       int64_t chunk_rows, sl_err *err) {
    sl_cpu *c = ctx;
    if (T < 0 || H < 1 || chunk_rows < 1)
        return sl_err_set(err, SL_EINTERNAL, "fingerprint: %lld rows of %lld in chunks of %lld", (long long)T,
                          (long long)H, (long long)chunk_rows);
    print_job j = {c, sums, nonfinite, x, T, H, chunk_rows, (T + chunk_rows - 1) / chunk_rows};
    sl_pool_run(c->pool, print_part, &j);
    return 0;
}
