#include "kernels/cpu/cpu.h"
#include <string.h>

typedef struct {
    sl_cpu *c;
    void *out;
    const void *x;
    int64_t out_stride, x_stride, T, groups, d;
    const float *w;
    float eps;
    int kind;
} norm_job;

static void norm_part(void *arg, int tid, int threads) {
    norm_job *j = arg;
    long lo, hi;
    sl_pool_part(j->T, 1, tid, threads, &lo, &hi);
    for (int64_t t = lo; t < hi; t++)
        for (int64_t g = 0; g < j->groups; g++)
            j->c->isa->norm_row(sl_cpu_at(j->c, j->out, t * j->out_stride + g * j->d),
                                sl_cpu_at(j->c, j->x, t * j->x_stride + g * j->d), j->w, j->d, j->eps, j->kind,
                                j->c->bf);
}

int sl_cpu_rmsnorm(void *ctx, void *out, int64_t out_stride, const void *x, int64_t x_stride, int64_t T, int64_t groups,
                   int64_t d, const float *w, float eps, sl_norm_kind kind, sl_err *err) {
    sl_cpu *c = ctx;
    if (d < 1 || groups < 1 || T < 0 || !w || (unsigned)kind > SL_NORM_GEMMA)
        return sl_err_set(err, SL_EINTERNAL, "rmsnorm: %lld rows of %lld groups of %lld, weight %p, kind %d",
                          (long long)T, (long long)groups, (long long)d, (const void *)w, (int)kind);
    norm_job j = {c, out, x, out_stride, x_stride, T, groups, d, w, eps, (int)kind};
    sl_pool_run(c->pool, norm_part, &j);
    return 0;
}

typedef struct {
    sl_cpu *c;
    void *h;
    const void *a;
    int64_t n;
} add_job;

static void add_part(void *arg, int tid, int threads) {
    add_job *j = arg;
    long lo, hi;
    sl_pool_part(j->n, 1024, tid, threads, &lo, &hi);
    if (hi > lo) j->c->isa->add_row(sl_cpu_at(j->c, j->h, lo), sl_cpu_at(j->c, j->a, lo), hi - lo, j->c->bf);
}

int sl_cpu_add(void *ctx, void *h, const void *a, int64_t n, sl_err *err) {
    (void)err;
    add_job j = {ctx, h, a, n};
    sl_pool_run(j.c->pool, add_part, &j);
    return 0;
}

typedef struct {
    sl_cpu *c;
    void *out;
    const int32_t *ids;
    int64_t T;
    const sl_mat *table;
    float scale;
} embed_job;

static void embed_part(void *arg, int tid, int threads) {
    embed_job *j = arg;
    long lo, hi;
    const int64_t H = j->table->k;
    sl_pool_part(j->T, 1, tid, threads, &lo, &hi);
    for (int64_t t = lo; t < hi; t++) {
        void *out = sl_cpu_at(j->c, j->out, t * H);
        for (int64_t k = 0; k < H; k += SL_GEMM_KC) {
            int64_t kn = H - k < SL_GEMM_KC ? H - k : SL_GEMM_KC;
            float *row = j->c->bf ? (float *)(void *)j->c->scratch[tid] : (float *)out + k;
            j->c->isa->dequant(row, j->table, 0, sl_mat_row(j->table, j->ids[t]), k, kn);
            if (j->c->bf) j->c->isa->to_bf16((uint16_t *)out + k, row, kn);
        }
        if (j->scale != 1.0f) j->c->isa->scale_row(out, j->scale, H, j->c->bf);
    }
}

int sl_cpu_embed(void *ctx, void *out, const int32_t *ids, int64_t T, const sl_mat *table, float scale, sl_err *err) {
    sl_cpu *c = ctx;
    int rc = sl_mat_check(table, "embed", table->k, err);
    if (rc) return rc;
    for (int64_t t = 0; t < T; t++)
        if (ids[t] < 0 || ids[t] >= table->n)
            return sl_err_set(err, SL_EDATA, "embed: token %lld has id %d, the vocabulary has 0..%lld", (long long)t,
                              ids[t], (long long)table->n - 1);
    if (c->bf) {
        uint16_t h;
        c->isa->to_bf16(&h, &scale, 1);
        c->isa->to_f32(&scale, &h, 1);
    }
    embed_job j = {c, out, ids, T, table, scale};
    sl_pool_run(c->pool, embed_part, &j);
    return 0;
}
