/* bench: the CPU backend's matrix product, measured beside what else could compute it and beside what the processor can
 * do.
 *
 * Every row is the best of `runs` calls, ours and the peers' in turn, on random data. OpenBLAS and oneDNN are looked
 * for at run time (the program does not link them) and multiply f32 by f32, weights converted beforehand at no charge
 * to them; ours reads the weights in their storage format. With one thread the time is that
 * thread's processor time; with more it is the wall clock's, so on a busy machine compare the ratios within a row. */
#ifndef SL_KERNELS_BENCH_H
#define SL_KERNELS_BENCH_H
#include "kernels/ops.h"

typedef struct sl_bench_gemm_row {
    int threads;
    sl_dtype act;            /* activations */
    sl_wfmt fmt;             /* weights */
    int64_t m, n, k;         /* [m, k] x [n, k]^T */
    double gflops;           /* ours, 10^9 floating point operations a second, 2mnk a product */
    double openblas, onednn; /* theirs in f32, 0 = library not found, or other activations than f32 and bf16 */
    double peak;             /* multiply-adds in registers on as many threads, GFLOP/s */
} sl_bench_gemm_row;

typedef struct sl_bench_gemm_opts {
    int threads;     /* >= 1 */
    int runs;        /* >= 1 */
    sl_dtype act;    /* SL_F32 or SL_BF16 */
    sl_wfmt fmt;     /* weights */
    const char *isa; /* "base", "avx2", "avx512", "avx512bf16", NULL = the best here */
    int64_t m, n, k; /* one shape, or 0: the shapes of a 135M and of an 8B model */
} sl_bench_gemm_opts;

/* Fills rows[0..max) and returns how many. SL_EUSAGE: a shape that the format cannot hold, an unknown instruction set;
 * SL_ETEMP: no memory. *isa_name (may be NULL): the instruction set that ran. */
int sl_bench_gemm(sl_bench_gemm_row *rows, int max, const sl_bench_gemm_opts *o, const char **isa_name, sl_err *err);
#endif
