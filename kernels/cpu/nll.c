/* Teacher NLL of one row, in blocks of rows and of the vocabulary, so that T x V logits never exist. */
#include "kernels/cpu/cpu.h"
#include <math.h>

enum { ROWS = 480, VOCAB = 2048 };

typedef struct {
    sl_cpu *c;
    const float *logits; /* [rows, VOCAB] */
    int64_t rows, v0, vn;
    const int32_t *target; /* of row 0 */
    double *m, *l, *hit;
} lse_job;

static void lse_part(void *arg, int tid, int threads) {
    lse_job *j = arg;
    long lo, hi;
    sl_pool_part(j->rows, 1, tid, threads, &lo, &hi);
    for (int64_t t = lo; t < hi; t++) {
        const float *x = j->logits + t * VOCAB;
        int64_t id = j->target[t] - j->v0;
        if (id >= 0 && id < j->vn) j->hit[t] = (double)x[id];
        j->c->isa->lse_step(x, j->vn, &j->m[t], &j->l[t]);
    }
}

int sl_cpu_nll(void *ctx, double *nll, const void *x, int64_t T, int64_t H, const int32_t *ids, const sl_mat *head,
               sl_err *err) {
    sl_cpu *c = ctx;
    float *logits;
    double m[ROWS], l[ROWS], hit[ROWS], sum = 0;
    int rc = sl_mat_check(head, "nll", H, err);
    if (rc) return rc;
    if (T < 2) {
        *nll = NAN;
        return 0;
    }
    for (int64_t t = 1; t < T; t++)
        if (ids[t] < 0 || ids[t] >= head->n)
            return sl_err_set(err, SL_EDATA, "nll: token %lld has id %d, the head has 0..%lld", (long long)t, ids[t],
                              (long long)head->n - 1);
    rc = sl_cpu_own(c, (uint64_t)ROWS * VOCAB * 4, &logits, err);
    if (rc) return rc;
    for (int64_t t0 = 0; t0 < T - 1; t0 += ROWS) {
        int64_t rows = T - 1 - t0 < ROWS ? T - 1 - t0 : ROWS;
        for (int64_t t = 0; t < rows; t++) {
            m[t] = -INFINITY;
            l[t] = 0;
            hit[t] = 0;
        }
        for (int64_t v = 0; v < head->n; v += VOCAB) {
            int64_t vn = head->n - v < VOCAB ? head->n - v : VOCAB;
            sl_gemm g = {.out = logits,
                         .out_stride = VOCAB,
                         .out_f32 = 1,
                         .x = sl_cpu_at(c, x, t0 * H),
                         .x_stride = H,
                         .M = rows,
                         .w = head,
                         .n0 = v,
                         .n1 = v + vn,
                         .n_step = 1};
            sl_gemm_run(c, &g);
            lse_job j = {c, logits, rows, v, vn, ids + t0 + 1, m, l, hit};
            sl_pool_run(c->pool, lse_part, &j);
        }
        for (int64_t t = 0; t < rows; t++) sum += m[t] + log(l[t]) - hit[t];
    }
    *nll = sum / (double)(T - 1);
    return 0;
}
