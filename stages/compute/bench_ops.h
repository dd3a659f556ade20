/* bench_ops: single operations at a given size, timed alone: what the fractions of a forward pass are made of. Operands
 * are random. Each of `repeat` measurements runs the operation `inner` times and waits once. */
#ifndef SL_COMPUTE_BENCH_OPS_H
#define SL_COMPUTE_BENCH_OPS_H
#include "kernels/ops.h"

#define SL_BENCH_OP_RUNS 64
typedef struct sl_bench_op_opts {
    int backend, precision, threads; /* sl_backend_id, sl_precision */
    int32_t repeat, inner;
    int64_t tokens;         /* gemm, moe, allreduce */
    int64_t width, out;     /* gemm: k and n; moe: H and the experts' I; allreduce: elements a token */
    int32_t rows, length;   /* attention: sequences and their length .. */
    const int32_t *lengths; /* .. or each one's own, [rows], `length` the longest; NULL: all `length` */
    int32_t heads, kv_heads, dqk, dv, window;
    int32_t experts, top_k, shared; /* moe; shared: experts that every token uses (one product of shared * I) */
    int fmt;                        /* moe: SL_W_BF16 or SL_W_INT4 */
    int32_t ranks;                  /* allreduce */
    int how;                        /* allreduce: SL_SUMS_* (collective.h) */
} sl_bench_op_opts;

typedef struct sl_bench_op_result {
    double seconds[SL_BENCH_OP_RUNS]; /* of one operation, ascending */
    int32_t runs;
    double flop, bytes;    /* useful work of one operation: what the floor counts */
    double ceiling_flop_s; /* a large dense product in the same process; 0: not measured */
    const char *how;       /* allreduce: sl_coll.how */
} sl_bench_op_result;

/* What one large dense product reaches here (device 0): the ceiling of everything made of products. */
int sl_bench_ceiling(double *flop_s, int backend, int precision, int threads, sl_err *err);
/* Causal attention over rows of tokens, side by side without padding. flop counts the causal half. */
int sl_bench_attention(sl_bench_op_result *r, const sl_bench_op_opts *o, sl_err *err);
/* out[tokens, out] = x[tokens, width] * W^T */
int sl_bench_gemm(sl_bench_op_result *r, const sl_bench_op_opts *o, sl_err *err);
/* A whole block: router, permutation, experts, weighted sum, shared expert, sum of both. flop: products only. */
int sl_bench_moe(sl_bench_op_result *r, const sl_bench_op_opts *o, sl_err *err);
/* Sum over `ranks` ranks (bench_ranks.h; a GPU each when there are enough, else sums go through the host). bytes: of
 * one rank's buffer. */
int sl_bench_allreduce(sl_bench_op_result *r, const sl_bench_op_opts *o, sl_err *err);
#endif
