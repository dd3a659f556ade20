/* gemm: out[M, n] = x[M, k] * W^T (+ bias), W in any storage format, in place.
 *
 * W is never held in a second form. Each thread takes a range of W's rows, turns one cache-sized block of them at a
 * time into panels (kernels/cpu/isa.h) in its own scratch, dequantizing on the way, and runs all M rows over the block.
 */
#ifndef SL_CPU_GEMM_H
#define SL_CPU_GEMM_H
#include "kernels/ops.h"

struct sl_cpu;

#define SL_GEMM_KC      2048       /* k of one block, a multiple of every format's block */
#define SL_GEMM_KC_F32  512        /* the same for f32 activations: shorter chains of sums, for the sake of precision */
#define SL_GEMM_B_BYTES (1u << 20) /* panels of one block at most; half of the second cache where that is smaller */
#define SL_GEMM_MC      960        /* rows of one block when k is cut */
#define SL_GEMM_SCRATCH (5u << 20)

typedef struct sl_gemm {
    void *out;
    int64_t out_stride;
    int out_f32; /* 1: f32 out whatever the activation type */
    const void *x;
    int64_t x_stride;
    int64_t M;
    const sl_mat *w;
    int64_t e;              /* which of w->count */
    int64_t n0, n1, n_step; /* rows [n0, n1) of W, every n_step-th, become columns 0.. of out */
    const float *bias;      /* [number of columns] or NULL */
    int exact;              /* 1: W and x in f32 whatever the activation type (router) */
} sl_gemm;

/* Every argument was checked before (sl_gemm_check). */
void sl_gemm_run(struct sl_cpu *c, const sl_gemm *g);
/* SL_EINTERNAL with the numbers when a matrix cannot be read as it says: no data, k against block, row_bytes, scales,
 * group. */
int sl_mat_check(const sl_mat *w, const char *op, int64_t k, sl_err *err);
/* Stored row of the logical row r (row_perm). */
static inline int64_t sl_mat_row(const sl_mat *w, int64_t r) {
    if (!w->row_perm) return r;
    int64_t d = w->perm_dim, h = r / d, j = r % d;
    return h * d + (j < d / 2 ? 2 * j : 2 * (j - d / 2) + 1);
}
#endif
