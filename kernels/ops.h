/* ops: the operations of the forward pass, one table a backend. kernels/cpu and kernels/cuda implement it, one
 * op-versus-reference harness (tests/test_ops.c) tests both.
 *
 * Conventions. T tokens of a micro-batch, H width. Activations are row-major [T, width] in the backend's activation
 * type (ops->act: SL_F32 for --precision f32, else SL_BF16), accumulation is always f32. Weights are [out n, in k]
 * row-major, y = x * W^T. Packed sequences: cu[0..S] are token offsets, cu[0] = 0, cu[S] = T, no padding. Positions
 * restart at 0 in every sequence. Device pointers are plain pointers; on the CPU device == host. Every call is
 * asynchronous in the backend's one compute stream (CPU: done on return) and returns 0 or an SL_E* code with *err set.
 * The order of float operations does not depend on timing: the same call on the same data gives the same bits.
 *
 * Rounding (bf16): inputs and outputs of every op are bf16, inside is f32, except where a family's reference rounds
 * in between (models.md 0.3): that is the `kind` of the op. */
#ifndef SL_KERNELS_OPS_H
#define SL_KERNELS_OPS_H
#include "ipc/err.h"
#include <stdint.h>
#include <stdbool.h>

typedef enum { SL_F32, SL_BF16, SL_F16, SL_DTYPE_N } sl_dtype;

/* Storage formats of a weight matrix. */
typedef enum {
    SL_W_F32,
    SL_W_BF16,
    SL_W_F16,
    SL_W_INT4,  /* compressed-tensors pack-quantized: 8 nibbles an int32 along k, LSB first, u = q + 8; scale [n,
                   k/group] */
    SL_W_FP8,   /* e4m3fn + f32 scale per 128x128 block, multiplied */
    SL_W_MXFP4, /* blocks u8 [n, k/32, 16] adjacent nibbles, scales u8 [n, k/32] (gpt-oss) */
    SL_W_Q8_0,
    SL_W_Q4_0,
    SL_W_Q4_1,
    SL_W_Q5_0,
    SL_W_Q5_1,
    SL_W_Q4_K,
    SL_W_Q5_K,
    SL_W_Q6_K,
    SL_W_MXFP4_GGUF, /* 17-byte blocks, split-half nibbles */
    SL_W_N
} sl_wfmt;
const char *sl_wfmt_name(sl_wfmt f);
/* Bytes of one row of k elements (scales not counted for INT4/FP8/MXFP4); 0 when k does not fit the block. */
uint64_t sl_wfmt_row_bytes(sl_wfmt f, int64_t k);
uint32_t sl_wfmt_block(sl_wfmt f); /* elements a block along k: 1, 8, 32, 256 */

/* One weight matrix, or `count` equal ones back to back (experts). A rank's slice is a matrix of its own: data, scale
 * and zero point at the slice's own first element. */
typedef struct sl_mat {
    sl_wfmt fmt;
    int64_t n, k;  /* out, in */
    int64_t count; /* 1, or experts held by this rank; matrix e starts at data + e*stride (scale: + e*scale_stride) */
    const void *data;
    uint64_t row_bytes; /* distance of two rows of data */
    uint64_t stride;
    const void *scale;     /* INT4: scale_dtype [n, k/group]; FP8: f32 [ceil]; MXFP4: u8 [n, k/32]; else NULL */
    uint64_t scale_row;    /* distance in elements of two scale rows */
    uint64_t scale_stride; /* bytes */
    const void *zero;      /* INT4 asymmetric: packed zero points (int32, 8 rows a word along n), or NULL */
    sl_dtype scale_dtype;
    int32_t group;        /* INT4 group size */
    int32_t n_off, k_off; /* FP8: where the slice starts within its first 128-block (0..127) */
    uint8_t row_perm; /* 1: rows are in llama-GGUF interleaved order per head of `perm_dim` rows: row 2i is i, 2i+1 is
                         i+perm_dim/2 */
    int32_t perm_dim;
} sl_mat;

typedef struct sl_vec { /* norm weight, bias, sinks: always f32 on the device, n elements; data NULL = absent */
    const float *data;
    int64_t n;
} sl_vec;

typedef enum {
    SL_NORM_LLAMA, /* y = round(x * rsqrt(mean x^2 + eps)); out = round(y * w)     (Llama, Qwen, DeepSeek, Kimi) */
    SL_NORM_F32,   /* out = round(x * rsqrt(..) * w), one rounding                  (gpt-oss) */
    SL_NORM_GEMMA  /* out = round(x * rsqrt(..) * (1 + w)), one rounding            (Gemma 3) */
} sl_norm_kind;
typedef enum { SL_ROPE_HALF, SL_ROPE_INTERLEAVED } sl_rope_kind; /* pairs (i, i+d/2) or (2i, 2i+1) */
typedef enum {
    SL_GLU_SILU, /* silu(g) * u */
    SL_GLU_GELU, /* gelu_tanh(g) * u */
    SL_GLU_CLAMP /* gpt-oss: g = min(g, limit), u = clamp(u, +-limit), (u + 1) * g * sigmoid(1.702 g) */
} sl_glu_kind;

typedef struct sl_attn {
    int32_t heads, kv_heads; /* of this rank; heads % kv_heads == 0; query head h uses kv head h / (heads / kv_heads) */
    int32_t dqk, dv;         /* per head */
    float scale;
    int32_t window;     /* 0 = full causal; w: token i sees j with i - w < j <= i */
    const float *sinks; /* [heads] or NULL: a logit that joins the softmax's denominator only */
    int64_t q_stride, k_stride, v_stride,
        o_stride;                         /* elements between two tokens; heads are contiguous (stride dqk / dv) */
    int64_t k_head_stride, v_head_stride; /* elements between two kv heads (MLA: v sits inside kv_b's output) */
} sl_attn;

typedef enum {
    SL_SCORE_SOFTMAX,
    SL_SCORE_SIGMOID,
    SL_SCORE_SOFTMAX_TOPK /* gpt-oss: softmax over the chosen k only */
} sl_score_kind;
typedef struct sl_router {
    int32_t experts, top_k;
    sl_score_kind score;
    const float *bias;           /* selection bias (e_score_correction_bias) [experts] or NULL */
    const float *logit_bias;     /* added to the logits (gpt-oss router.bias) or NULL */
    int32_t n_group, topk_group; /* 1, 1 = none */
    int32_t group_score_top2;    /* 1: group score = sum of its two best (V3), 0: its max (V2) */
    int32_t renorm;              /* weights /= sum + 1e-20 */
    float scale;                 /* weights *= scale */
    int32_t bf16_logits;         /* Qwen3-MoE: logits rounded to bf16 (ignored in f32) */
    int32_t bf16_weights;        /* Qwen3-MoE: weights rounded to bf16 (ignored in f32) */
} sl_router;                     /* ties: the lower expert index wins */

typedef struct sl_moe {
    int32_t experts;      /* all */
    int32_t first, local; /* this rank holds experts [first, first+local) whole (EP), or all of them sliced (TP) */
    int32_t top_k;
    const int32_t *place;  /* [local]: expert first + e is matrix place[e] of gate, up and down; NULL: matrix e (biases:
                              always e) */
    sl_mat gate, up, down; /* count == local; gate_up fused when up.data == NULL and gate.n == 2*I */
    int32_t gate_up_interleaved; /* fused rows alternate gate, up (gpt-oss), else first half gate, second half up */
    sl_vec gate_bias, up_bias,
        down_bias; /* [local, I], [local, I] (fused: gate_bias [local, 2I]), [local, H] or absent */
    sl_glu_kind glu;
    float limit;
    int32_t bias_scale_rank0; /* TP-sliced: down_bias only where this is 1 */
    int32_t bf16_accumulate; /* Qwen3-MoE: each weighted expert output rounded to bf16, summed in ascending expert order
                                in bf16 */
} sl_moe;

/* Random weights made in place (stages/compute/random.h says what each element is). Unit u of row r of matrix e has the
 * index i = ((e0 + e) * full_rows + row0 + r) * full_units + unit0 + u; units lie tight at dst in the order e, r, u. */
typedef enum {
    SL_FILL_F32,
    SL_FILL_BF16,      /* dev * normal(i) */
    SL_FILL_WORDS,     /* 8 random bytes */
    SL_FILL_SCALE_BF16 /* dev * (0.75 + 0.5 * uniform(i)) */
} sl_fill_kind;
typedef struct sl_fill {
    sl_fill_kind kind;
    uint64_t key;
    float dev;
    int64_t e0, e_n, full_rows, row0, rows, full_units, unit0, units;
} sl_fill;

typedef struct sl_ops sl_ops;
struct sl_ops {
    const char *name; /* "cpu" or "cuda" */
    sl_dtype act;
    void *ctx;

    /* memory */
    int (*alloc)(void *ctx, void **p, uint64_t bytes, const char *what,
                 sl_err *err); /* 256-byte aligned; contents undefined */
    void (*free)(void *ctx, void *p);
    int (*upload)(void *ctx, void *dst, const void *src, uint64_t bytes, sl_err *err);   /* host -> device, ordered */
    int (*download)(void *ctx, void *dst, const void *src, uint64_t bytes, sl_err *err); /* device -> host, waits */
    int (*sync)(void *ctx, sl_err *err);

    /* Prepare a matrix for `linear`/`moe`: dequantize / repack into `scratch` (scratch_bytes tells how much, 0 = used
     * in place). Done once per layer and batch, then every micro-batch uses it. *out is the matrix to pass on. */
    uint64_t (*prepare_bytes)(void *ctx, const sl_mat *w);
    int (*prepare)(void *ctx, sl_mat *out, const sl_mat *w, void *scratch, sl_err *err);

    int (*embed)(void *ctx, void *out, const int32_t *ids_dev, int64_t T, const sl_mat *table, float scale,
                 sl_err *err); /* out[T,H]; scale rounded to act first (Gemma), 1 = none */
    /* out[T, d] = norm(x[T, d]); rows `x_stride`/`out_stride` elements apart; `groups` norms of width d side by side in
     * a row (q/k norm per head): row r, group g at r*stride + g*d */
    int (*rmsnorm)(void *ctx, void *out, int64_t out_stride, const void *x, int64_t x_stride, int64_t T, int64_t groups,
                   int64_t d, const float *w, float eps, sl_norm_kind kind, sl_err *err);
    int (*add)(void *ctx, void *h, const void *a, int64_t n, sl_err *err); /* h = round(h + a) */
    /* out[T, n] = x[T, k] * W^T (+ bias) ; rows of x / out x_stride / out_stride apart */
    int (*linear)(void *ctx, void *out, int64_t out_stride, const void *x, int64_t x_stride, int64_t T, const sl_mat *w,
                  const float *bias, sl_err *err);
    /* rotate the `rope_dim` elements at offset `off` of each of `heads` heads (head_stride apart) in place; cs = f32
     * [maxpos, rope_dim/2, 2] (cos, sin), pos[T] int32 on the device */
    int (*rope)(void *ctx, void *x, int64_t stride, int64_t T, int32_t heads, int64_t head_stride, int32_t off,
                int32_t rope_dim, const float *cs, const int32_t *pos_dev, sl_rope_kind kind, sl_err *err);
    /* MLA: k[T, heads, nope + rope] from kv[T, heads, nope + v] (k_nope first) and k_pe[T, rope] (pe_stride apart) */
    int (*mla_k)(void *ctx, void *k, const void *kv, const void *k_pe, int64_t pe_stride, int64_t T, int32_t heads,
                 int32_t nope, int32_t rope, int32_t v, sl_err *err);
    int (*attention)(void *ctx, void *o, const void *q, const void *k, const void *v, const int32_t *cu_host, int32_t S,
                     const sl_attn *a, sl_err *err);
    /* out[T, I] = glu(g[T, I], u[T, I]) */
    int (*glu)(void *ctx, void *out, const void *g, int64_t g_stride, const void *u, int64_t u_stride, int64_t T,
               int64_t I, sl_glu_kind kind, float limit, sl_err *err);
    /* router: logits in f32 from x and gate [E, H]; idx[T, top_k] int32, w[T, top_k] f32 on the device */
    int (*route)(void *ctx, int32_t *idx, float *w, const void *x, int64_t T, int64_t H, const sl_mat *gate,
                 const sl_router *r, sl_err *err);
    /* out[T, H] = sum over this rank's experts of w * expert(x) (out is overwritten; tokens with no local expert get 0)
     */
    int (*moe)(void *ctx, void *out, const void *x, int64_t T, int64_t H, const int32_t *idx, const float *w,
               const sl_moe *m, sl_err *err);
    uint64_t (*moe_bytes)(void *ctx, int64_t T, int64_t H,
                          const sl_moe *m); /* internal workspace this needs; taken from set_workspace */
    int (*set_workspace)(void *ctx, void *ws, uint64_t bytes, sl_err *err);
    uint64_t (*workspace_bytes)(void *ctx, int64_t T, int64_t max_seq, int64_t H, int64_t widest,
                                const sl_attn *a); /* other ops' own needs at most */

    /* teacher NLL of one row: logits = x[T, H] (already final-normed) * head^T; *nll_host = mean over t < T-1 of -log
     * softmax(logits[t])[ids[t+1]]. Waits. */
    int (*nll)(void *ctx, double *nll_host, const void *x, int64_t T, int64_t H, const int32_t *ids_dev,
               const sl_mat *head, sl_err *err);

    /* capture: for each chunk of `chunk_rows` tokens of x[T, H] (contiguous): sum64 of its bytes (ipc/flow.h) and count
     * of non-finite elements, into host-visible arrays sums[c], nonfinite[c]; ready after `capture_wait`. */
    int (*fingerprint)(void *ctx, uint64_t *sums, uint32_t *nonfinite, const void *x, int64_t T, int64_t H,
                       int64_t chunk_rows, sl_err *err);
    /* Asynchronous copy of device bytes into the registered host arena, in the copy stream, after all compute so far.
     * `ticket` is set to a number that capture_wait(ticket) waits for; the source must stay unchanged until then. CPU:
     * memcpy. */
    int (*capture_copy)(void *ctx, void *host, const void *dev, uint64_t bytes, uint64_t *ticket, sl_err *err);
    int (*capture_done)(void *ctx, uint64_t ticket, int *done, sl_err *err); /* non-blocking query */
    int (*capture_wait)(void *ctx, uint64_t ticket, sl_err *err);
    int (*register_arena)(void *ctx, void *base, uint64_t bytes, sl_err *err); /* cudaHostRegister; CPU: nothing */
    /* out = round(out + x * W^T): a shared expert onto the routed sum. NULL: use linear and add. */
    int (*linear_add)(void *ctx, void *out, int64_t out_stride, const void *x, int64_t x_stride, int64_t T,
                      const sl_mat *w, sl_err *err);
    int (*fill)(void *ctx, void *dst, const sl_fill *f, sl_err *err); /* NULL: this backend has none */
    /* h = round(h + part); out = norm(h) in one pass: rows of d elements without gaps, h and part and out [T, d]. out
     * may be part itself, else the three lie apart. The same bits as add and then rmsnorm with one group. NULL: use
     * those two. */
    int (*add_norm)(void *ctx, void *h, const void *part, void *out, int64_t T, int64_t d, const float *w, float eps,
                    sl_norm_kind kind, sl_err *err);
    /* out[T, I] = glu(x[T, k] * gate^T, x * up^T), rows of x x_stride elements apart, rows of out without gaps. gate
     * and up are prepared, [I, k] each, without biases. scratch [T, I] is overwritten. Rounded as linear, linear and
     * glu are. Fastest when up lies behind gate in memory. NULL: use those three. */
    int (*glu_linear)(void *ctx, void *out, void *scratch, const void *x, int64_t x_stride, int64_t T,
                      const sl_mat *gate, const sl_mat *up, sl_glu_kind kind, float limit, sl_err *err);
    /* Pinned host memory (page-aligned, contents undefined) and copies out of it that are not waited for: in order with
     * the compute stream, `src` unchanged until upload_wait(ticket) or sync has returned. At most 64 tickets may be
     * outstanding. All four, or NULL: this backend's memory is the host's. */
    int (*host_alloc)(void *ctx, void **p, uint64_t bytes, sl_err *err); /* SL_ETEMP: the system refuses */
    void (*host_free)(void *ctx, void *p);
    int (*upload_start)(void *ctx, void *dst, const void *src, uint64_t bytes, uint64_t *ticket, sl_err *err);
    int (*upload_wait)(void *ctx, uint64_t ticket, sl_err *err);
    void (*destroy)(sl_ops *ops);
};

/* For tests: ways of doing a thing that are otherwise chosen by what is faster. Results differ in last bits at most. */
typedef struct sl_cuda_force {
    int one_cta; /* grouped products: 1: clusters of one block, without multicast */
    int plain;   /* dense products: 1: by a plain kernel, never by the library */
    int glu;     /* glu_linear: 1: the fused kernel where it serves, -1: never, 0: by timing */
} sl_cuda_force;

/* threads >= 1. act: SL_F32 or SL_BF16. */
int sl_ops_cpu_create(sl_ops **out, int threads, sl_dtype act, sl_err *err);
#ifdef SL_HAVE_CUDA
/* `device` in [0, sl_ops_cuda_devices()). SL_ECONFIG: no device, an old chip (before sm_80); SL_ETEMP: out of device
 * memory. */
int sl_ops_cuda_create(sl_ops **out, int device, sl_dtype act, sl_err *err);
int sl_ops_cuda_devices(void);               /* GPUs visible to this process; 0 also when there is no driver */
void *sl_ops_cuda_stream(const sl_ops *ops); /* its compute stream (cudaStream_t), for collectives */
/* For collectives: `stream` (a cudaStream_t of the same device) waits for all compute submitted so far and for the
 * copies of captured states. */
int sl_ops_cuda_fence(const sl_ops *ops, void *stream, sl_err *err);
/* In `stream`: out[n] = round(x[0] + x[1] + .. + x[k-1] (+ h)), added in f32 in that order; h may be NULL, out may be h
 * or any x. k is 1..SL_CUDA_SUM_MAX. */
#define SL_CUDA_SUM_MAX 64
int sl_ops_cuda_sum(const sl_ops *ops, void *stream, void *out, const void *h, const void *const *x, int k, int64_t n,
                    sl_err *err);
void sl_ops_cuda_force(sl_ops *ops, sl_cuda_force f);
#endif
#endif
