/* gemm: out[M, n] = x[M, k] * W^T (+ bias), W in any storage format, in place.
 *
 * W is never held in a second form. Each thread takes a range of W's rows, turns one cache-sized block of them at a
 * time into panels (kernels/cpu/isa.h) in its own scratch, dequantizing on the way, and runs all M rows over the block.
 * An element's sum has one order whatever M, the number of threads and the cut into blocks of columns, so a row's batch
 * mates never change its bits.
 *
 * Why not a library. GFLOP/s of one thread of a Xeon with AVX512_BF16 and without AMX (multiply-add peak 175); ours
 * reads bf16 weights in place:
 *
 *     M     n     k | ours bf16  ours f32 | oneDNN 2.6 bf16  oneDNN f32 | OpenBLAS 0.3.21 f32 (told the processor)
 *   512   576   576 |    151        154   |       89            160     |     34 (156)
 *   512   192   576 |    152        154   |       90            172     |     33 (149)
 *   512  1536   576 |    146        154   |       88            157     |     33 (156)
 *   512   576  1536 |    140        157   |       90            158     |     33 (152)
 *  2048  1536   576 |    155        157   |       87            152     |     33 (156)
 *
 * - VDPBF16PS does 64 operations every second cycle there, f32 multiply-adds 64 every cycle. So oneDNN's bf16, and our
 * own dot kernel (84), stay at half of what bf16 widened to f32 panels reaches. sl_isa_pick takes the dot kernel on
 * AMD, whose dot product has full rate.
 * - oneDNN's f32 is up to 13 % faster than our bf16 path, but wants the weights as f32: twice the memory of bf16, seven
 * times that of INT4. OpenBLAS 0.3.21 does not know the processor and falls back to SSE2.
 * - Other formats (M 512, n = k = 2048): Q8_0 135, Q4_0 131, Q4_K 133, Q6_K 119, INT4 134, FP8 121, MXFP4 132, F16 135.
 * sl_bench_gemm (kernels/bench.h) repeats the measurement. */
#ifndef SL_CPU_GEMM_H
#define SL_CPU_GEMM_H
#include "kernels/ops.h"

struct sl_cpu;

#define SL_GEMM_KC      2048       /* k of one block, a multiple of every format's block */
#define SL_GEMM_KC_F32  1024       /* the same for f32 activations: shorter chains of sums, for the sake of precision */
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
