#include "kernels/cpu/cpu.h"

typedef struct {
    sl_cpu *c;
    void *out;
    const void *g, *u;
    int64_t g_stride, u_stride, T, I;
    int kind;
    float limit;
} glu_job;

static void glu_part(void *arg, int tid, int threads) {
    glu_job *j = arg;
    long lo, hi;
    sl_pool_part(j->T, 1, tid, threads, &lo, &hi);
    for (int64_t t = lo; t < hi; t++)
        j->c->isa->glu_row(sl_cpu_at(j->c, j->out, t * j->I), sl_cpu_at(j->c, j->g, t * j->g_stride),
                           sl_cpu_at(j->c, j->u, t * j->u_stride), j->I, j->kind, j->limit, j->c->bf);
}

int sl_cpu_glu(void *ctx, void *out, const void *g, int64_t g_stride, const void *u, int64_t u_stride, int64_t T,
               int64_t I, sl_glu_kind kind, float limit, sl_err *err) {
    sl_cpu *c = ctx;
    if (I < 1 || T < 0 || (unsigned)kind > SL_GLU_CLAMP)
        return sl_err_set(err, SL_EINTERNAL, "glu: %lld rows of %lld, kind %d", (long long)T, (long long)I, (int)kind);
    glu_job j = {c, out, g, u, g_stride, u_stride, T, I, (int)kind, limit};
    sl_pool_run(c->pool, glu_part, &j);
    return 0;
}
