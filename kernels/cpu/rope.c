#include "kernels/cpu/cpu.h"
#include <string.h>

typedef struct {
    sl_cpu *c;
    void *x;
    int64_t stride, T, head_stride;
    int32_t heads, off, dim;
    const float *cs;
    const int32_t *pos;
    int kind;
} rope_job;

static void rope_part(void *arg, int tid, int threads) {
    rope_job *j = arg;
    long lo, hi;
    sl_pool_part(j->T, 1, tid, threads, &lo, &hi);
    for (int64_t t = lo; t < hi; t++)
        for (int32_t h = 0; h < j->heads; h++)
            j->c->isa->rope_row(sl_cpu_at(j->c, j->x, t * j->stride + h * j->head_stride + j->off),
                                j->cs + (int64_t)j->pos[t] * j->dim, j->dim / 2, j->kind, j->c->bf);
}

int sl_cpu_rope(void *ctx, void *x, int64_t stride, int64_t T, int32_t heads, int64_t head_stride, int32_t off,
                int32_t rope_dim, const float *cs, const int32_t *pos, sl_rope_kind kind, sl_err *err) {
    sl_cpu *c = ctx;
    if (rope_dim < 2 || rope_dim % 2 || heads < 1 || (unsigned)kind > SL_ROPE_INTERLEAVED)
        return sl_err_set(err, SL_EINTERNAL, "rope: %d dimensions of %d heads, kind %d", rope_dim, heads, (int)kind);
    rope_job j = {c, x, stride, T, head_stride, heads, off, rope_dim, cs, pos, (int)kind};
    sl_pool_run(c->pool, rope_part, &j);
    return 0;
}

typedef struct {
    sl_cpu *c;
    void *k;
    const void *kv, *k_pe;
    int64_t pe_stride, T;
    int32_t heads, nope, rope, v;
} mla_job;

static void mla_part(void *arg, int tid, int threads) {
    mla_job *j = arg;
    const size_t e = sl_cpu_esz(j->c);
    const int64_t kd = j->nope + j->rope, kvd = j->nope + j->v;
    long lo, hi;
    sl_pool_part(j->T, 1, tid, threads, &lo, &hi);
    for (int64_t t = lo; t < hi; t++)
        for (int64_t h = 0; h < j->heads; h++) {
            int64_t at = (t * j->heads + h) * kd;
            memcpy(sl_cpu_at(j->c, j->k, at), sl_cpu_at(j->c, j->kv, (t * j->heads + h) * kvd), (size_t)j->nope * e);
            memcpy(sl_cpu_at(j->c, j->k, at + j->nope), sl_cpu_at(j->c, j->k_pe, t * j->pe_stride),
                   (size_t)j->rope * e);
        }
}

int sl_cpu_mla_k(void *ctx, void *k, const void *kv, const void *k_pe, int64_t pe_stride, int64_t T, int32_t heads,
                 int32_t nope, int32_t rope, int32_t v, sl_err *err) {
    sl_cpu *c = ctx;
    if (heads < 1 || nope < 0 || rope < 0 || v < 0)
        return sl_err_set(err, SL_EINTERNAL, "mla_k: %d heads of %d + %d, v %d", heads, nope, rope, v);
    mla_job j = {c, k, kv, k_pe, pe_stride, T, heads, nope, rope, v};
    sl_pool_run(c->pool, mla_part, &j);
    return 0;
}
