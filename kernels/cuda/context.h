/* context: what the CUDA backend's operations share. One context a process and device; every launcher in this folder
 * takes it first. Launchers return 0 or an SL_E* code with the CUDA error, the expression and the place in *err. */
#ifndef SL_CUDA_CONTEXT_H
#define SL_CUDA_CONTEXT_H
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <cstdint>
#include <vector>
extern "C" {
#include "kernels/ops.h"
}

using bf16 = __nv_bfloat16;

struct SlAttnTiles; /* attention.cuh: cached work lists */
struct SlGemmCache; /* gemm.cu: chosen cuBLASLt algorithms */

struct SlCuda {
    int device = 0, sms = 0, cc = 0; /* cc: 90 for sm_90 */
    sl_dtype act = SL_BF16;
    cudaStream_t stream = nullptr; /* compute: everything is ordered here */
    cudaStream_t copy = nullptr;   /* device to host copies of captured states */
    cublasLtHandle_t lt = nullptr;
    void *lt_ws = nullptr; /* cuBLASLt's workspace */
    size_t lt_ws_bytes = 0;
    int *counters = nullptr; /* zeroed ints of the persistent kernels (each leaves its own at zero) */
    char *ws = nullptr;      /* caller's workspace: moe */
    uint64_t ws_bytes = 0;
    SlAttnTiles *tiles = nullptr;
    SlGemmCache *gemms = nullptr;
    int *dense_off = nullptr; /* device: 0, dense_rows: a dense product as a grouped one of a single expert */
    int64_t dense_rows = -1;
    sl_cuda_force force = {};
    std::vector<cudaEvent_t> events; /* ring of copy tickets */
    uint64_t tickets = 0, copies_waited = 0;
    cudaEvent_t compute_mark = nullptr;
    cudaEvent_t uploads[64] = {}; /* of upload tickets, ticket % 64; made when first used */
    uint64_t last_upload = 0;
    uint64_t last_copy = 0; /* newest ticket: the next write to a captured buffer waits for it on the device */
    void *fp_dev = nullptr; /* fingerprint partials and results */
    uint64_t fp_cap = 0;
    float *nll_dev = nullptr;
    uint64_t nll_cap = 0, head_cap = 0;
    char *route_dev = nullptr; /* router's workspace when the caller set none */
    uint64_t route_cap = 0;
    void *head_dev = nullptr; /* lm_head in the activation type, when the file has another */
};

/* Formats "what (cuda error) at file:line" into err. Out of memory is SL_ETEMP, everything else SL_EINTERNAL. */
int sl_cuda_fail(sl_err *err, cudaError_t e, const char *what, const char *file, int line);
#define SL_CU(x)                                                                                                       \
    do {                                                                                                               \
        cudaError_t e_ = (x);                                                                                          \
        if (e_ != cudaSuccess) return sl_cuda_fail(err, e_, #x, __FILE__, __LINE__);                                   \
    } while (0)
#define SL_LAUNCHED(what) SL_CU(cudaGetLastError())

/* ---- small device helpers, used by several kernels ---- */
template <class T> __device__ __forceinline__ float to_f(T x);
template <> __device__ __forceinline__ float to_f<float>(float x) {
    return x;
}
template <> __device__ __forceinline__ float to_f<bf16>(bf16 x) {
    return __bfloat162float(x);
}
template <class T> __device__ __forceinline__ T from_f(float x);
template <> __device__ __forceinline__ float from_f<float>(float x) {
    return x;
}
template <> __device__ __forceinline__ bf16 from_f<bf16>(float x) {
    return __float2bfloat16_rn(x);
}
/* Round to the activation type and back: where a family's reference rounds in the middle of an op. */
template <class T> __device__ __forceinline__ float rnd(float x) {
    return to_f<T>(from_f<T>(x));
}

/* Eight neighbouring elements, 16-byte aligned. */
__device__ __forceinline__ void load8(const bf16 *p, float (&v)[8]) {
    uint4 u = *reinterpret_cast<const uint4 *>(p);
    const uint32_t w[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
        v[2 * i] = __uint_as_float(w[i] << 16), v[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
}
__device__ __forceinline__ void load8(const float *p, float (&v)[8]) {
    float4 a = *reinterpret_cast<const float4 *>(p), b = *reinterpret_cast<const float4 *>(p + 4);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
__device__ __forceinline__ void store8(bf16 *p, const float (&v)[8]) {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w[i]) : "f"(v[2 * i + 1]), "f"(v[2 * i]));
    *reinterpret_cast<uint4 *>(p) = make_uint4(w[0], w[1], w[2], w[3]);
}
__device__ __forceinline__ void store8(float *p, const float (&v)[8]) {
    *reinterpret_cast<float4 *>(p) = make_float4(v[0], v[1], v[2], v[3]);
    *reinterpret_cast<float4 *>(p + 4) = make_float4(v[4], v[5], v[6], v[7]);
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int o = 16; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
    return x;
}
static inline bool aligned16(const void *p) {
    return ((uintptr_t)p & 15) == 0;
}

/* ---- launchers, one file each ---- */
/* elementwise.cu */
int sl_cuda_rmsnorm(SlCuda *c, void *out, int64_t os, const void *x, int64_t xs, int64_t T, int64_t groups, int64_t d,
                    const float *w, float eps, sl_norm_kind kind, sl_err *err);
int sl_cuda_add(SlCuda *c, void *h, const void *a, int64_t n, sl_err *err);
int sl_cuda_add_norm(SlCuda *c, void *h, const void *part, void *out, int64_t T, int64_t d, const float *w, float eps,
                     sl_norm_kind kind, sl_err *err);
int sl_cuda_rope(SlCuda *c, void *x, int64_t stride, int64_t T, int32_t heads, int64_t head_stride, int32_t off,
                 int32_t rope_dim, const float *cs, const int32_t *pos, sl_rope_kind kind, sl_err *err);
int sl_cuda_mla_k(SlCuda *c, void *k, const void *kv, const void *k_pe, int64_t pe_stride, int64_t T, int32_t heads,
                  int32_t nope, int32_t rope, int32_t v, sl_err *err);
int sl_cuda_glu(SlCuda *c, void *out, const void *g, int64_t gs, const void *u, int64_t us, int64_t T, int64_t I,
                sl_glu_kind kind, float limit, sl_err *err);
/* dequant.cu: any format to the activation type (float or bf16), `count` matrices; row permutation undone */
uint64_t sl_cuda_prepare_bytes(SlCuda *c, const sl_mat *w);
int sl_cuda_prepare(SlCuda *c, sl_mat *out, const sl_mat *w, void *scratch, sl_err *err);
/* out[T, k] = table[ids] in any format, scaled (scale rounded to the activation type first; 1 = none) */
int sl_cuda_embed(SlCuda *c, void *out, const int32_t *ids, int64_t T, const sl_mat *table, float scale, sl_err *err);
/* `w` as the products take it: itself when it is in the activation type already, else converted into `scratch`, which
 * must hold n * k elements of the activation type. */
int sl_cuda_as_act(SlCuda *c, sl_mat *out, const sl_mat *w, void *scratch, sl_err *err);
/* random.cu */
int sl_cuda_fill(SlCuda *c, void *dst, const sl_fill *f, sl_err *err);
/* gemm.cu */
int sl_cuda_gemm_open(SlCuda *c, sl_err *err);
void sl_cuda_gemm_close(SlCuda *c);
int sl_cuda_linear(SlCuda *c, void *out, int64_t os, const void *x, int64_t xs, int64_t T, const sl_mat *w,
                   const float *bias, sl_err *err);
int sl_cuda_linear_add(SlCuda *c, void *out, int64_t os, const void *x, int64_t xs, int64_t T, const sl_mat *w,
                       sl_err *err);
int sl_cuda_glu_linear(SlCuda *c, void *out, void *scratch, const void *x, int64_t xs, int64_t T, const sl_mat *gate,
                       const sl_mat *up, sl_glu_kind kind, float limit, sl_err *err);
/* out f32 [T, n] from x (act) and w (act): router and teacher logits */
int sl_cuda_linear_f32out(SlCuda *c, float *out, int64_t os, const void *x, int64_t xs, int64_t T, const sl_mat *w,
                          sl_err *err);
/* attention.cu (dispatch), attention_mma.cu, attention_wgmma.cu, attention_plain.cu */
int sl_cuda_attention(SlCuda *c, void *o, const void *q, const void *k, const void *v, const int32_t *cu, int32_t S,
                      const sl_attn *a, sl_err *err);
int sl_cuda_attention_open(SlCuda *c, sl_err *err);
void sl_cuda_attention_close(SlCuda *c);
/* grouped_gemm.cu: C[rows, n] = A * W_e^T for the rows off[e]..off[e+1] of each expert; sm_90 only (grouped_ok says) */
struct SlGrouped {
    const sl_mat *w;  /* plain: one matrix list; glu: gate */
    const sl_mat *up; /* NULL = plain; else fused SwiGLU with w as gate */
    const int *off;   /* device [E+1] */
    const void *a;    /* [m, k] bf16 */
    void *c;          /* [m, n] bf16 */
    int64_t m;        /* rows in all (upper bound known to the host) */
};
bool sl_cuda_grouped_ok(const SlCuda *c, const sl_mat *w, const sl_mat *up);
int sl_cuda_grouped(SlCuda *c, const SlGrouped *g, sl_err *err);
/* moe.cu */
int sl_cuda_route(SlCuda *c, int32_t *idx, float *w, const void *x, int64_t T, int64_t H, const sl_mat *gate,
                  const sl_router *r, sl_err *err);
int sl_cuda_moe(SlCuda *c, void *out, const void *x, int64_t T, int64_t H, const int32_t *idx, const float *w,
                const sl_moe *m, sl_err *err);
uint64_t sl_cuda_moe_bytes(SlCuda *c, int64_t T, int64_t H, const sl_moe *m);
/* nll.cu, capture.cu */
int sl_cuda_nll(SlCuda *c, double *nll, const void *x, int64_t T, int64_t H, const int32_t *ids, const sl_mat *head,
                sl_err *err);
int sl_cuda_fingerprint(SlCuda *c, uint64_t *sums, uint32_t *nonfinite, const void *x, int64_t T, int64_t H,
                        int64_t chunk_rows, sl_err *err);
int sl_cuda_capture_copy(SlCuda *c, void *host, const void *dev, uint64_t bytes, uint64_t *ticket, sl_err *err);
int sl_cuda_capture_done(SlCuda *c, uint64_t ticket, int *done, sl_err *err);
int sl_cuda_capture_wait(SlCuda *c, uint64_t ticket, sl_err *err);
#endif
