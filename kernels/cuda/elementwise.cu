/* elementwise: RMSNorm, residual add, RoPE, MLA's key assembly, gated activations. All are memory-bound:
 * 16-byte accesses, one pass, f32 inside. Reference math and rounding: kernels/ops.h. */
#include "kernels/cuda/context.h"

/* ---------------------------------------------------------------- kernels */

template <class T> __device__ __forceinline__ float norm_one(float y, float wt, int kind) {
    if (kind == SL_NORM_LLAMA) return rnd<T>(y) * rnd<T>(wt);
    return kind == SL_NORM_GEMMA ? y * (1.f + wt) : y * wt;
}

/* Sum over a block of NT threads, the same bits in every thread: warps by shuffles, then in the order of the warps.
 * Once a kernel: its shared memory is not freed for a second call. */
template <int NT> __device__ __forceinline__ float block_sum(float x) {
    __shared__ float part[NT / 32];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int i = 0; i < NT / 32; i++) sum += part[i];
    return sum;
}

/* One block of NT threads a (token, group); VEC elements a thread and step. Values are kept in registers between the
 * passes when they fit (PER steps), else read again. */
template <class T, int NT, int VEC>
__global__ void __launch_bounds__(NT) rmsnorm_kernel(T *out, int64_t os, const T *x, int64_t xs, int groups, int64_t d,
                                                     const float *w, float eps, int kind) {
    const int64_t t = blockIdx.x / groups, g = blockIdx.x % groups;
    const T *src = x + t * xs + g * d;
    T *dst = out + t * os + g * d;
    float sum = 0;
    for (int64_t i = threadIdx.x * VEC; i < d; i += NT * VEC) {
        if constexpr (VEC == 8) {
            float v[8];
            load8(src + i, v);
#pragma unroll
            for (int j = 0; j < 8; j++) sum = fmaf(v[j], v[j], sum);
        } else {
            float v = to_f<T>(src[i]);
            sum = fmaf(v, v, sum);
        }
    }
    const float r = rsqrtf(block_sum<NT>(sum) / (float)d + eps);
    auto one = [&](float v, float wt) { return norm_one<T>(v * r, wt, kind); };
    for (int64_t i = threadIdx.x * VEC; i < d; i += NT * VEC) { /* the row is in L1 or L2 now */
        if constexpr (VEC == 8) {
            float v[8], wt[8];
            load8(src + i, v), load8(w + i, wt);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = one(v[j], wt[j]);
            store8(dst + i, v);
        } else {
            dst[i] = from_f<T>(one(to_f<T>(src[i]), w[i]));
        }
    }
}

/* h = round(h + part), out = norm(h): a block of NT threads a row, which it holds in registers in between (PER vectors
 * of 8 a thread, d <= NT * PER * 8). Both loads of all vectors are under way before the first is used. The sum of
 * squares runs in the order of rmsnorm_kernel with as many threads: the same bits. */
template <class T, int NT, int PER>
__global__ void __launch_bounds__(NT)
    add_norm_kernel(T *h, const T *part, T *out, int64_t d, const float *w, float eps, int kind) {
    const int64_t row = blockIdx.x * d;
    float v[PER][8];
    float sum = 0;
#pragma unroll
    for (int s = 0; s < PER; s++) {
        const int64_t i = (s * NT + (int)threadIdx.x) * 8;
        if (i >= d) continue;
        float p[8];
        load8(h + row + i, v[s]), load8(part + row + i, p);
#pragma unroll
        for (int j = 0; j < 8; j++) v[s][j] = rnd<T>(v[s][j] + p[j]);
    }
#pragma unroll
    for (int s = 0; s < PER; s++) {
        const int64_t i = (s * NT + (int)threadIdx.x) * 8;
        if (i >= d) continue;
        store8(h + row + i, v[s]);
#pragma unroll
        for (int j = 0; j < 8; j++) sum = fmaf(v[s][j], v[s][j], sum);
    }
    const float r = rsqrtf(block_sum<NT>(sum) / (float)d + eps);
#pragma unroll
    for (int s = 0; s < PER; s++) {
        const int64_t i = (s * NT + (int)threadIdx.x) * 8;
        if (i >= d) continue;
        float wt[8];
        load8(w + i, wt);
#pragma unroll
        for (int j = 0; j < 8; j++) v[s][j] = norm_one<T>(v[s][j] * r, wt[j], kind);
        store8(out + row + i, v[s]);
    }
}

template <class T> __global__ void add_kernel(T *h, const T *a, int64_t n8, int64_t n) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n8; i += (int64_t)gridDim.x * blockDim.x) {
        float x[8], y[8];
        load8(h + i * 8, x), load8(a + i * 8, y);
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] += y[j];
        store8(h + i * 8, x);
    }
    if (blockIdx.x == 0)
        for (int64_t i = n8 * 8 + threadIdx.x; i < n; i += blockDim.x) h[i] = from_f<T>(to_f<T>(h[i]) + to_f<T>(a[i]));
}

/* One thread a (token, head, pair). */
template <class T>
__global__ void rope_kernel(T *x, int64_t stride, int heads, int64_t head_stride, int off, int half, const float2 *cs,
                            const int32_t *pos, int interleaved, int64_t n) {
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i >= n) return;
    const int p = (int)(i % half);
    const int64_t th = i / half, t = th / heads, h = th % heads;
    T *v = x + t * stride + h * head_stride + off;
    const float2 c = cs[(int64_t)pos[t] * half + p];
    T *pa = v + (interleaved ? 2 * p : p), *pb = v + (interleaved ? 2 * p + 1 : p + half);
    const float a = to_f<T>(*pa), b = to_f<T>(*pb);
    *pa = from_f<T>(a * c.x - b * c.y);
    *pb = from_f<T>(b * c.x + a * c.y);
}

/* The same for 16-byte accesses: 8 pairs a thread (interleaved: 4, which are 8 neighbours). */
template <class T, bool IL>
__global__ void rope_vec_kernel(T *x, int64_t stride, uint32_t heads, int64_t head_stride, int off, uint32_t half,
                                const float2 *cs, const int32_t *pos, uint32_t n) {
    constexpr int P = IL ? 4 : 8;
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const uint32_t per = half / P, th = i / per, p = (i - th * per) * P, t = th / heads, h = th - t * heads;
    T *v = x + t * stride + h * head_stride + off + (IL ? 2 * p : p);
    const float4 *row = reinterpret_cast<const float4 *>(cs + (int64_t)pos[t] * half + p);
    float c[P], s[P];
#pragma unroll
    for (int j = 0; j < P / 2; j++) {
        const float4 f = row[j];
        c[2 * j] = f.x, s[2 * j] = f.y, c[2 * j + 1] = f.z, s[2 * j + 1] = f.w;
    }
    if constexpr (IL) {
        float a[8];
        load8(v, a);
#pragma unroll
        for (int j = 0; j < P; j++) {
            const float u = a[2 * j], w = a[2 * j + 1];
            a[2 * j] = u * c[j] - w * s[j], a[2 * j + 1] = w * c[j] + u * s[j];
        }
        store8(v, a);
    } else {
        float a[8], b[8];
        load8(v, a), load8(v + half, b);
#pragma unroll
        for (int j = 0; j < P; j++) {
            const float u = a[j], w = b[j];
            a[j] = u * c[j] - w * s[j], b[j] = w * c[j] + u * s[j];
        }
        store8(v, a), store8(v + half, b);
    }
}

/* k[t][h] = kv[t][h][0..nope) ‖ k_pe[t]; one thread an element (VEC of them). */
template <class T, int VEC>
__global__ void mla_k_kernel(T *k, const T *kv, const T *pe, int64_t pe_stride, int heads, int nope, int rope, int v,
                             int64_t n) {
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    const int dk = nope + rope, per = dk / VEC;
    if (i >= n) return;
    int e;
    int64_t th, t;
    if (n < (1ll << 31)) {
        const uint32_t j = (uint32_t)i, q = j / (uint32_t)per;
        e = (int)(j - q * (uint32_t)per) * VEC, th = q, t = q / (uint32_t)heads;
    } else {
        e = (int)(i % per) * VEC, th = i / per, t = th / heads;
    }
    const T *src = e < nope ? kv + th * (nope + v) + e : pe + t * pe_stride + (e - nope);
    T *dst = k + th * dk + e;
    if constexpr (VEC == 8) {
        float f[8];
        load8(src, f), store8(dst, f);
    } else {
        *dst = *src;
    }
}

template <class T> __device__ __forceinline__ float glu_one(float g, float u, int kind, float limit) {
    if (kind == SL_GLU_SILU) return rnd<T>(g / (1.f + __expf(-g))) * u;
    if (kind == SL_GLU_GELU) {
        const float k = 0.7978845608028654f; /* sqrt(2 / pi) */
        return rnd<T>(0.5f * g * (1.f + tanhf(k * (g + 0.044715f * g * g * g)))) * u;
    }
    g = fminf(g, limit), u = fminf(fmaxf(u, -limit), limit);
    return (u + 1.f) * (g / (1.f + __expf(-1.702f * g)));
}
template <>
__device__ __forceinline__ float glu_one<float>(float g, float u, int kind, float limit) { /* exact exponentials */
    if (kind == SL_GLU_SILU) return g / (1.f + expf(-g)) * u;
    if (kind == SL_GLU_GELU) return 0.5f * g * (1.f + tanhf(0.7978845608028654f * (g + 0.044715f * g * g * g))) * u;
    g = fminf(g, limit), u = fminf(fmaxf(u, -limit), limit);
    return (u + 1.f) * (g / (1.f + expf(-1.702f * g)));
}

template <class T, int VEC>
__global__ void glu_kernel(T *out, const T *g, int64_t gs, const T *u, int64_t us, int64_t I, int64_t n, int kind,
                           float limit) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t t, e;
        if (n < (1ll << 31)) { /* a 64-bit division costs as much as the loads */
            const uint32_t per = (uint32_t)(I / VEC), u32 = (uint32_t)i, q = u32 / per;
            t = q, e = (int64_t)(u32 - q * per) * VEC;
        } else {
            const int64_t per = I / VEC;
            t = i / per, e = i % per * VEC;
        }
        if constexpr (VEC == 8) {
            float a[8], b[8];
            load8(g + t * gs + e, a), load8(u + t * us + e, b);
#pragma unroll
            for (int j = 0; j < 8; j++) a[j] = glu_one<T>(a[j], b[j], kind, limit);
            store8(out + t * I + e, a);
        } else {
            out[t * I + e] = from_f<T>(glu_one<T>(to_f<T>(g[t * gs + e]), to_f<T>(u[t * us + e]), kind, limit));
        }
    }
}

/* ---------------------------------------------------------------- launchers */

static inline unsigned blocks_for(int64_t n, int threads) {
    return (unsigned)((n + threads - 1) / threads);
}
static inline unsigned grid_stride(const SlCuda *c, int64_t n, int threads) {
    const int64_t want = (n + threads - 1) / threads, most = (int64_t)c->sms * 16;
    return (unsigned)(want < 1 ? 1 : want < most ? want : most);
}

template <class T>
static void norm_as(SlCuda *c, void *out, int64_t os, const void *x, int64_t xs, int64_t T_, int64_t groups, int64_t d,
                    const float *w, float eps, int kind) {
    T *o = (T *)out;
    const T *in = (const T *)x;
    const unsigned n = (unsigned)(T_ * groups);
    const bool vec = d % 8 == 0 && xs % 8 == 0 && os % 8 == 0 && aligned16(out) && aligned16(x) && aligned16(w);
    if (!vec)
        rmsnorm_kernel<T, 128, 1><<<n, 128, 0, c->stream>>>(o, os, in, xs, (int)groups, d, w, eps, kind);
    else if (d <= 512)
        rmsnorm_kernel<T, 32, 8><<<n, 32, 0, c->stream>>>(o, os, in, xs, (int)groups, d, w, eps, kind);
    else if (d <= 2048)
        rmsnorm_kernel<T, 128, 8><<<n, 128, 0, c->stream>>>(o, os, in, xs, (int)groups, d, w, eps, kind);
    else
        rmsnorm_kernel<T, 256, 8><<<n, 256, 0, c->stream>>>(o, os, in, xs, (int)groups, d, w, eps, kind);
}
int sl_cuda_rmsnorm(SlCuda *c, void *out, int64_t os, const void *x, int64_t xs, int64_t T, int64_t groups, int64_t d,
                    const float *w, float eps, sl_norm_kind kind, sl_err *err) {
    if (c->act == SL_F32)
        norm_as<float>(c, out, os, x, xs, T, groups, d, w, eps, kind);
    else
        norm_as<bf16>(c, out, os, x, xs, T, groups, d, w, eps, kind);
    SL_LAUNCHED("rmsnorm");
    return 0;
}

int sl_cuda_add(SlCuda *c, void *h, const void *a, int64_t n, sl_err *err) {
    const int64_t n8 = aligned16(h) && aligned16(a) ? n / 8 : 0;
    const unsigned g = grid_stride(c, n8 ? n8 : 1, 256);
    if (c->act == SL_F32)
        add_kernel<float><<<g, 256, 0, c->stream>>>((float *)h, (const float *)a, n8, n);
    else
        add_kernel<bf16><<<g, 256, 0, c->stream>>>((bf16 *)h, (const bf16 *)a, n8, n);
    SL_LAUNCHED("add");
    return 0;
}

/* Threads a row as rmsnorm takes them: the order of its sum depends on them. */
template <class T>
static void add_norm_as(SlCuda *c, void *h_, const void *part_, void *out_, int64_t T_, int64_t d, const float *w,
                        float eps, int kind) {
    T *h = (T *)h_, *out = (T *)out_;
    const T *part = (const T *)part_;
    const unsigned n = (unsigned)T_;
    if (d <= 512)
        add_norm_kernel<T, 32, 2><<<n, 32, 0, c->stream>>>(h, part, out, d, w, eps, kind);
    else if (d <= 2048)
        add_norm_kernel<T, 128, 2><<<n, 128, 0, c->stream>>>(h, part, out, d, w, eps, kind);
    else if (d <= 4096)
        add_norm_kernel<T, 256, 2><<<n, 256, 0, c->stream>>>(h, part, out, d, w, eps, kind);
    else if (d <= 8192)
        add_norm_kernel<T, 256, 4><<<n, 256, 0, c->stream>>>(h, part, out, d, w, eps, kind);
    else
        add_norm_kernel<T, 256, 8><<<n, 256, 0, c->stream>>>(h, part, out, d, w, eps, kind);
}
int sl_cuda_add_norm(SlCuda *c, void *h, const void *part, void *out, int64_t T, int64_t d, const float *w, float eps,
                     sl_norm_kind kind, sl_err *err) {
    if (d % 8 || d > 16384 || !aligned16(h) || !aligned16(part) || !aligned16(out) || !aligned16(w)) {
        const int rc = sl_cuda_add(c, h, part, T * d, err);
        return rc ? rc : sl_cuda_rmsnorm(c, out, d, h, d, T, 1, d, w, eps, kind, err);
    }
    if (c->act == SL_F32)
        add_norm_as<float>(c, h, part, out, T, d, w, eps, kind);
    else
        add_norm_as<bf16>(c, h, part, out, T, d, w, eps, kind);
    SL_LAUNCHED("add_norm");
    return 0;
}

int sl_cuda_rope(SlCuda *c, void *x, int64_t stride, int64_t T, int32_t heads, int64_t head_stride, int32_t off,
                 int32_t rope_dim, const float *cs, const int32_t *pos, sl_rope_kind kind, sl_err *err) {
    const int half = rope_dim / 2, il = kind == SL_ROPE_INTERLEAVED;
    const int64_t n = T * heads * half, vectors = n / (il ? 4 : 8);
    if ((stride | head_stride | off | half) % 8 == 0 && aligned16(x) && aligned16(cs) && vectors < (1ll << 31)) {
        const unsigned b = blocks_for(vectors, 256);
        const float2 *t = (const float2 *)cs;
        if (c->act == SL_F32 && il)
            rope_vec_kernel<float, true><<<b, 256, 0, c->stream>>>((float *)x, stride, heads, head_stride, off, half, t,
                                                                   pos, (uint32_t)vectors);
        else if (c->act == SL_F32)
            rope_vec_kernel<float, false><<<b, 256, 0, c->stream>>>((float *)x, stride, heads, head_stride, off, half,
                                                                    t, pos, (uint32_t)vectors);
        else if (il)
            rope_vec_kernel<bf16, true>
                <<<b, 256, 0, c->stream>>>((bf16 *)x, stride, heads, head_stride, off, half, t, pos, (uint32_t)vectors);
        else
            rope_vec_kernel<bf16, false>
                <<<b, 256, 0, c->stream>>>((bf16 *)x, stride, heads, head_stride, off, half, t, pos, (uint32_t)vectors);
        SL_LAUNCHED("rope");
        return 0;
    }
    if (c->act == SL_F32)
        rope_kernel<float><<<blocks_for(n, 256), 256, 0, c->stream>>>((float *)x, stride, heads, head_stride, off, half,
                                                                      (const float2 *)cs, pos, il, n);
    else
        rope_kernel<bf16><<<blocks_for(n, 256), 256, 0, c->stream>>>((bf16 *)x, stride, heads, head_stride, off, half,
                                                                     (const float2 *)cs, pos, il, n);
    SL_LAUNCHED("rope");
    return 0;
}

template <class T>
static void mla_k_as(SlCuda *c, void *k, const void *kv, const void *pe, int64_t pe_stride, int64_t T_, int heads,
                     int nope, int rope, int v) {
    const bool vec = nope % 8 == 0 && rope % 8 == 0 && v % 8 == 0 && pe_stride % 8 == 0 && aligned16(k) &&
                     aligned16(kv) && aligned16(pe);
    const int64_t n = T_ * heads * (nope + rope);
    if (vec)
        mla_k_kernel<T, 8><<<blocks_for(n / 8, 256), 256, 0, c->stream>>>((T *)k, (const T *)kv, (const T *)pe,
                                                                          pe_stride, heads, nope, rope, v, n / 8);
    else
        mla_k_kernel<T, 1><<<blocks_for(n, 256), 256, 0, c->stream>>>((T *)k, (const T *)kv, (const T *)pe, pe_stride,
                                                                      heads, nope, rope, v, n);
}
int sl_cuda_mla_k(SlCuda *c, void *k, const void *kv, const void *k_pe, int64_t pe_stride, int64_t T, int32_t heads,
                  int32_t nope, int32_t rope, int32_t v, sl_err *err) {
    if (c->act == SL_F32)
        mla_k_as<float>(c, k, kv, k_pe, pe_stride, T, heads, nope, rope, v);
    else
        mla_k_as<bf16>(c, k, kv, k_pe, pe_stride, T, heads, nope, rope, v);
    SL_LAUNCHED("mla_k");
    return 0;
}

template <class T>
static void glu_as(SlCuda *c, void *out, const void *g, int64_t gs, const void *u, int64_t us, int64_t T_, int64_t I,
                   int kind, float limit) {
    const bool vec = I % 8 == 0 && gs % 8 == 0 && us % 8 == 0 && aligned16(out) && aligned16(g) && aligned16(u);
    const int64_t n = T_ * I / (vec ? 8 : 1);
    if (vec)
        glu_kernel<T, 8><<<grid_stride(c, n, 256), 256, 0, c->stream>>>((T *)out, (const T *)g, gs, (const T *)u, us, I,
                                                                        n, kind, limit);
    else
        glu_kernel<T, 1><<<grid_stride(c, n, 256), 256, 0, c->stream>>>((T *)out, (const T *)g, gs, (const T *)u, us, I,
                                                                        n, kind, limit);
}
int sl_cuda_glu(SlCuda *c, void *out, const void *g, int64_t gs, const void *u, int64_t us, int64_t T, int64_t I,
                sl_glu_kind kind, float limit, sl_err *err) {
    if (c->act == SL_F32)
        glu_as<float>(c, out, g, gs, u, us, T, I, kind, limit);
    else
        glu_as<bf16>(c, out, g, gs, u, us, T, I, kind, limit);
    SL_LAUNCHED("glu");
    return 0;
}
