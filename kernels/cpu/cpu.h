/* cpu: the CPU backend's context, shared by the files of kernels/cpu. Everybody else uses kernels/ops.h. */
#ifndef SL_CPU_CPU_H
#define SL_CPU_CPU_H
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/pool.h"

typedef struct sl_cpu {
    sl_ops ops; /* first: what callers hold */
    const sl_isa *isa;
    sl_pool *pool;
    int threads;
    int bf;                 /* activations are bf16 */
    uint8_t *scratch[1024]; /* one a thread, SL_GEMM_SCRATCH bytes */
    int64_t b_bytes;        /* panels of one block of W, SL_GEMM_B_BYTES at most */
    uint8_t *ws;            /* the caller's workspace */
    uint64_t ws_bytes;
    float *own; /* small buffer of route and nll, grown when needed */
    uint64_t own_bytes;
} sl_cpu;

static inline uint64_t sl_cpu_esz(const sl_cpu *c) {
    return c->bf ? 2 : 4;
}
static inline uint64_t sl_cpu_up(uint64_t x) { /* to a cache line */
    return (x + 63) & ~(uint64_t)63;
}
static inline void *sl_cpu_at(const sl_cpu *c, const void *p, int64_t elements) {
    return (uint8_t *)(uintptr_t)p + elements * (int64_t)sl_cpu_esz(c);
}

/* As sl_ops_cpu_create with a named instruction set ("base", "avx2", "avx512", "avx512bf16"; NULL = the best for this
 * processor). SL_EUSAGE when the processor lacks it. For tests and measurements. */
int sl_ops_cpu_create_isa(sl_ops **out, int threads, sl_dtype act, const char *isa, sl_err *err);

/* At least `bytes` of the context's own buffer: SL_ETEMP without memory. Contents are lost by the next call. */
int sl_cpu_own(sl_cpu *c, uint64_t bytes, float **out, sl_err *err);
/* The first `bytes` of the workspace; SL_EINTERNAL when the caller gave less than the op's *_bytes function says. */
int sl_cpu_ws(sl_cpu *c, uint64_t bytes, const char *op, uint8_t **out, sl_err *err);

/* The table's entries, one file each. */
int sl_cpu_embed(void *ctx, void *out, const int32_t *ids, int64_t T, const sl_mat *table, float scale, sl_err *err);
int sl_cpu_rmsnorm(void *ctx, void *out, int64_t out_stride, const void *x, int64_t x_stride, int64_t T, int64_t groups,
                   int64_t d, const float *w, float eps, sl_norm_kind kind, sl_err *err);
int sl_cpu_add(void *ctx, void *h, const void *a, int64_t n, sl_err *err);
int sl_cpu_linear(void *ctx, void *out, int64_t out_stride, const void *x, int64_t x_stride, int64_t T, const sl_mat *w,
                  const float *bias, sl_err *err);
int sl_cpu_rope(void *ctx, void *x, int64_t stride, int64_t T, int32_t heads, int64_t head_stride, int32_t off,
                int32_t rope_dim, const float *cs, const int32_t *pos, sl_rope_kind kind, sl_err *err);
int sl_cpu_mla_k(void *ctx, void *k, const void *kv, const void *k_pe, int64_t pe_stride, int64_t T, int32_t heads,
                 int32_t nope, int32_t rope, int32_t v, sl_err *err);
int sl_cpu_attention(void *ctx, void *o, const void *q, const void *k, const void *v, const int32_t *cu, int32_t S,
                     const sl_attn *a, sl_err *err);
uint64_t sl_cpu_attention_bytes(const sl_cpu *c, int64_t max_seq, const sl_attn *a);
int sl_cpu_glu(void *ctx, void *out, const void *g, int64_t g_stride, const void *u, int64_t u_stride, int64_t T,
               int64_t I, sl_glu_kind kind, float limit, sl_err *err);
int sl_cpu_route(void *ctx, int32_t *idx, float *w, const void *x, int64_t T, int64_t H, const sl_mat *gate,
                 const sl_router *r, sl_err *err);
int sl_cpu_moe(void *ctx, void *out, const void *x, int64_t T, int64_t H, const int32_t *idx, const float *w,
               const sl_moe *m, sl_err *err);
uint64_t sl_cpu_moe_bytes(void *ctx, int64_t T, int64_t H, const sl_moe *m);
int sl_cpu_nll(void *ctx, double *nll, const void *x, int64_t T, int64_t H, const int32_t *ids, const sl_mat *head,
               sl_err *err);
int sl_cpu_fingerprint(void *ctx, uint64_t *sums, uint32_t *nonfinite, const void *x, int64_t T, int64_t H,
                       int64_t chunk_rows, sl_err *err);
#endif
