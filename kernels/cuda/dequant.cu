/* dequant: any storage format to the activation type, once per layer and batch, into the caller's scratch. Formats and
 * their layouts: kernels/ops.h and README "Formats". Products are taken in f32 and rounded once, to the
 * activation type; on the f32 path they stay as they are.
 *
 * 80% of an INT4 pass is the bf16 store, so a thread turns one 4-byte word into one 16-byte store and has four words in
 * flight (measured 0.94 of a device copy on 48 experts of 4096 x 7168). */
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include "kernels/cuda/context.h"

struct DqArgs { /* a sl_mat, as kernels take it */
    const uint8_t *data;
    const uint8_t *scale;
    const int32_t *zero;
    int64_t n, k, row_bytes, stride, scale_row, scale_stride;
    int group, scale_dtype, n_off, k_off, perm_dim;
};

/* ---------------------------------------------------------------- kernels */

__device__ __forceinline__ int64_t logical_row(int64_t s, int perm) { /* where storage row s belongs */
    if (!perm) return s;
    const int64_t j = s % perm;
    return s - j + (j & 1 ? j / 2 + perm / 2 : j / 2);
}
__device__ __forceinline__ int64_t storage_row(int64_t r, int perm) { /* the other way round */
    if (!perm) return r;
    const int64_t j = r % perm;
    return r - j + (j < perm / 2 ? 2 * j : 2 * (j - perm / 2) + 1);
}
__device__ __forceinline__ float scale_at(const uint8_t *p, int64_t i, int dtype) {
    if (dtype == SL_F32) return reinterpret_cast<const float *>(p)[i];
    if (dtype == SL_F16) return __half2float(reinterpret_cast<const __half *>(p)[i]);
    return __bfloat162float(reinterpret_cast<const bf16 *>(p)[i]);
}
__device__ __forceinline__ float half_at(const uint8_t *p) {
    return __half2float(__ushort_as_half((unsigned short)(p[0] | p[1] << 8)));
}
__constant__ float fp4_values[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};

/* One decoder a format: `unit` neighbouring elements of row r from element k0. */
struct DqPlainF32 {
    static constexpr int UNIT = 8;
    __device__ static void get(const DqArgs &a, const uint8_t *row, const uint8_t *, int64_t, int64_t k0, float *v) {
        for (int i = 0; i < 8; i++) v[i] = k0 + i < a.k ? reinterpret_cast<const float *>(row)[k0 + i] : 0;
    }
};
struct DqPlainBf16 {
    static constexpr int UNIT = 8;
    __device__ static void get(const DqArgs &a, const uint8_t *row, const uint8_t *, int64_t, int64_t k0, float *v) {
        for (int i = 0; i < 8; i++)
            v[i] = k0 + i < a.k ? __bfloat162float(reinterpret_cast<const bf16 *>(row)[k0 + i]) : 0;
    }
};
struct DqPlainF16 {
    static constexpr int UNIT = 8;
    __device__ static void get(const DqArgs &a, const uint8_t *row, const uint8_t *, int64_t, int64_t k0, float *v) {
        for (int i = 0; i < 8; i++)
            v[i] = k0 + i < a.k ? __half2float(reinterpret_cast<const __half *>(row)[k0 + i]) : 0;
    }
};
struct DqInt4 {
    static constexpr int UNIT = 8;
    __device__ static void get(const DqArgs &a, const uint8_t *row, const uint8_t *scale, int64_t r, int64_t k0,
                               float *v) {
        const uint32_t w = reinterpret_cast<const uint32_t *>(row)[k0 / 8];
        const int64_t g0 = k0 / a.group;
        for (int i = 0; i < 8; i++) {
            const int64_t g = a.group % 8 == 0 ? g0 : (k0 + i) / a.group;
            int zp = 8;
            if (a.zero)
                zp = (reinterpret_cast<const uint32_t *>(a.zero)[(r / 8) * a.scale_row + g] >> (4 * (r % 8))) & 15;
            v[i] = ((float)((int)(w >> (4 * i) & 15) - zp) * scale_at(scale, r * a.scale_row + g, a.scale_dtype));
        }
    }
};
struct DqFp8 {
    static constexpr int UNIT = 8;
    __device__ static void get(const DqArgs &a, const uint8_t *row, const uint8_t *scale, int64_t r, int64_t k0,
                               float *v) {
        const float *s = reinterpret_cast<const float *>(scale) + (r + a.n_off) / 128 * a.scale_row;
        for (int i = 0; i < 8; i++) {
            if (k0 + i >= a.k) {
                v[i] = 0;
                continue;
            }
            const __half_raw h = __nv_cvt_fp8_to_halfraw(row[k0 + i], __NV_E4M3);
            v[i] = (__half2float(__half(h)) * s[(k0 + i + a.k_off) / 128]);
        }
    }
};
struct DqMxfp4 {
    static constexpr int UNIT = 32;
    __device__ static void get(const DqArgs &a, const uint8_t *row, const uint8_t *scale, int64_t r, int64_t k0,
                               float *v) {
        const float s = exp2f((float)scale[r * a.scale_row + k0 / 32] - 127.f);
        for (int i = 0; i < 16; i++) {
            const uint8_t b = row[k0 / 2 + i];
            v[2 * i] = fp4_values[b & 15] * s, v[2 * i + 1] = fp4_values[b >> 4] * s;
        }
    }
};
/* GGUF blocks of 32. */
template <int FMT> struct DqGguf32 {
    static constexpr int UNIT = 32;
    __device__ static void get(const DqArgs &, const uint8_t *row, const uint8_t *, int64_t, int64_t k0, float *v) {
        constexpr int BYTES = FMT == SL_W_Q8_0   ? 34
                              : FMT == SL_W_Q4_0 ? 18
                              : FMT == SL_W_Q4_1 ? 20
                              : FMT == SL_W_Q5_0 ? 22
                              : FMT == SL_W_Q5_1 ? 24
                                                 : 17;
        const uint8_t *b = row + k0 / 32 * BYTES;
        if (FMT == SL_W_MXFP4_GGUF) {
            const float s = exp2f((float)b[0] - 127.f);
            for (int i = 0; i < 16; i++)
                v[i] = fp4_values[b[1 + i] & 15] * s, v[i + 16] = fp4_values[b[1 + i] >> 4] * s;
            return;
        }
        const float d = half_at(b);
        if (FMT == SL_W_Q8_0) {
            for (int i = 0; i < 32; i++) v[i] = d * (float)(int8_t)b[2 + i];
            return;
        }
        const bool five = FMT == SL_W_Q5_0 || FMT == SL_W_Q5_1, min = FMT == SL_W_Q4_1 || FMT == SL_W_Q5_1;
        const float m = min ? half_at(b + 2) : 0;
        const uint8_t *q = b + (min ? 4 : 2);
        uint32_t qh = 0;
        if (five) {
            qh = q[0] | q[1] << 8 | q[2] << 16 | (uint32_t)q[3] << 24;
            q += 4;
        }
        const int off = FMT == SL_W_Q4_0 ? 8 : FMT == SL_W_Q5_0 ? 16 : 0;
        for (int i = 0; i < 16; i++) {
            const int lo = (q[i] & 15) | (int)(qh >> i & 1) << 4, hi = q[i] >> 4 | (int)(qh >> (i + 16) & 1) << 4;
            v[i] = d * (float)(lo - off) + m, v[i + 16] = d * (float)(hi - off) + m;
        }
    }
};
/* GGUF blocks of 256, 32 elements at a time. */
__device__ __forceinline__ void k_scale(const uint8_t *s, int j, int *sc, int *mn) {
    if (j < 4) {
        *sc = s[j] & 63, *mn = s[j + 4] & 63;
        return;
    }
    *sc = (s[j + 4] & 15) | s[j - 4] >> 6 << 4, *mn = s[j + 4] >> 4 | s[j] >> 6 << 4;
}
template <int FMT> struct DqGguf256 {
    static constexpr int UNIT = 32;
    __device__ static void get(const DqArgs &, const uint8_t *row, const uint8_t *, int64_t, int64_t k0, float *v) {
        constexpr int BYTES = FMT == SL_W_Q4_K ? 144 : FMT == SL_W_Q5_K ? 176 : 210;
        const uint8_t *b = row + k0 / 256 * BYTES;
        const int j = (int)(k0 % 256 / 32); /* which 32 of the 256 */
        if (FMT == SL_W_Q6_K) {
            const int half = j / 4, quarter = j % 4; /* 128 values a half; quarter picks the bit fields */
            const uint8_t *ql = b + half * 64 + (quarter & 1) * 32, *qh = b + 128 + half * 32;
            const int8_t *sc = reinterpret_cast<const int8_t *>(b + 192) + half * 8 + quarter * 2;
            const float d = half_at(b + 208);
            for (int l = 0; l < 32; l++) {
                const int lo = quarter < 2 ? ql[l] & 15 : ql[l] >> 4, q = lo | (qh[l] >> (2 * quarter) & 3) << 4;
                v[l] = d * (float)sc[l / 16] * (float)(q - 32);
            }
            return;
        }
        int sc, mn;
        k_scale(b + 4, j, &sc, &mn);
        const float d = half_at(b) * (float)sc, m = half_at(b + 2) * (float)mn;
        const uint8_t *qs = b + (FMT == SL_W_Q5_K ? 48 : 16) + j / 2 * 32, *qh = b + 16;
        for (int l = 0; l < 32; l++) {
            int q = j & 1 ? qs[l] >> 4 : qs[l] & 15;
            if (FMT == SL_W_Q5_K) q |= (qh[l] >> j & 1) << 4;
            v[l] = d * (float)q - m;
        }
    }
};

/* One thread a unit. out [count][n][k] of T, dense. */
template <class T, class D> __global__ void dequant_kernel(T *out, const DqArgs a, int64_t units_row, int64_t units) {
    const int64_t u = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (u >= units) return;
    const int64_t k0 = u % units_row * D::UNIT, rr = u / units_row, r = rr % a.n, e = rr / a.n;
    float v[D::UNIT];
    DqArgs m = a; /* matrix e */
    if (m.zero) m.zero += e * (a.n + 7) / 8 * a.scale_row;
    D::get(m, a.data + e * a.stride + r * a.row_bytes, a.scale + e * a.scale_stride, r, k0, v);
    T *dst = out + (e * a.n + logical_row(r, a.perm_dim)) * a.k + k0;
#pragma unroll
    for (int i = 0; i < D::UNIT; i += 8) {
        if (k0 + i + 8 <= a.k && a.k % 8 == 0) {
            float w[8] = {v[i], v[i + 1], v[i + 2], v[i + 3], v[i + 4], v[i + 5], v[i + 6], v[i + 7]};
            store8(dst + i, w);
        } else {
            for (int j = i; j < i + 8; j++)
                if (k0 + j < a.k) dst[j] = from_f<T>(v[j]);
        }
    }
}

/* One block a token: row ids[t] of the table. */
template <class T, class D> __global__ void embed_kernel(T *out, const int32_t *ids, const DqArgs a, float scale) {
    const int64_t r = storage_row(ids[blockIdx.x], a.perm_dim);
    T *dst = out + (int64_t)blockIdx.x * a.k;
    const float s = rnd<T>(scale);
    for (int64_t k0 = (int64_t)threadIdx.x * D::UNIT; k0 < a.k; k0 += (int64_t)blockDim.x * D::UNIT) {
        float v[D::UNIT];
        D::get(a, a.data + r * a.row_bytes, a.scale, r, k0, v);
        for (int i = 0; i < D::UNIT && k0 + i < a.k; i++)
            dst[k0 + i] = from_f<T>(scale == 1.f ? v[i] : rnd<T>(v[i]) * s);
    }
}

/* INT4 symmetric, bf16 scales, group 32, dense rows: the shape of every K2 expert. 0x4300 | nibble is bf16 128 +
 * nibble; minus 136 is exact, so the product is the only rounding. */
__global__ void __launch_bounds__(256)
    dequant_int4_fast(const uint32_t *__restrict__ in, const bf16 *__restrict__ scale, uint4 *__restrict__ out,
                      size_t words) {
    constexpr int U = 4;
    const size_t base = (size_t)blockIdx.x * (256 * U) + threadIdx.x;
    uint32_t w[U];
    unsigned short sc[U];
#pragma unroll
    for (int i = 0; i < U; i++) {
        const size_t j = base + i * 256;
        if (j < words) w[i] = __ldcs(in + j), sc[i] = __ldg(reinterpret_cast<const unsigned short *>(scale) + j / 4);
    }
#pragma unroll
    for (int i = 0; i < U; i++) {
        const size_t j = base + i * 256;
        if (j >= words) break;
        const __nv_bfloat162 s = __bfloat162bfloat162(__ushort_as_bfloat16(sc[i])), c = __float2bfloat162_rn(136.f);
        uint32_t o[4];
#pragma unroll
        for (int b = 0; b < 4; b++) {
            const uint32_t v = w[i] >> (8 * b), x = (v & 0xF) | ((v << 12) & 0xF0000) | 0x43004300u;
            __nv_bfloat162 h = __hmul2(__hsub2(*reinterpret_cast<const __nv_bfloat162 *>(&x), c), s);
            o[b] = *reinterpret_cast<uint32_t *>(&h);
        }
        out[j] = make_uint4(o[0], o[1], o[2], o[3]);
    }
}

/* ---------------------------------------------------------------- launchers */

static DqArgs args_of(const sl_mat *w) {
    return {(const uint8_t *)w->data,
            (const uint8_t *)w->scale,
            (const int32_t *)w->zero,
            w->n,
            w->k,
            (int64_t)w->row_bytes,
            (int64_t)w->stride,
            (int64_t)w->scale_row,
            (int64_t)w->scale_stride,
            w->group,
            w->scale_dtype,
            w->n_off,
            w->k_off,
            w->row_perm ? w->perm_dim : 0};
}
struct RunMatrix { /* every element of every matrix */
    SlCuda *c;
    void *out;
    DqArgs a;
    int64_t count;
    template <class T, class D> void run() const {
        const int64_t per = (a.k + D::UNIT - 1) / D::UNIT, units = per * a.n * count;
        dequant_kernel<T, D><<<(unsigned)((units + 255) / 256), 256, 0, c->stream>>>((T *)out, a, per, units);
    }
};
struct RunRows { /* the rows of some tokens */
    SlCuda *c;
    void *out;
    DqArgs a;
    const int32_t *ids;
    int64_t tokens;
    float scale;
    template <class T, class D> void run() const {
        embed_kernel<T, D><<<(unsigned)tokens, 128, 0, c->stream>>>((T *)out, ids, a, scale);
    }
};
template <class T, class R> static int by_format(const R &r, sl_wfmt fmt, sl_err *err) {
    switch (fmt) {
    case SL_W_F32:
        r.template run<T, DqPlainF32>();
        break;
    case SL_W_BF16:
        r.template run<T, DqPlainBf16>();
        break;
    case SL_W_F16:
        r.template run<T, DqPlainF16>();
        break;
    case SL_W_INT4:
        r.template run<T, DqInt4>();
        break;
    case SL_W_FP8:
        r.template run<T, DqFp8>();
        break;
    case SL_W_MXFP4:
        r.template run<T, DqMxfp4>();
        break;
    case SL_W_Q8_0:
        r.template run<T, DqGguf32<SL_W_Q8_0>>();
        break;
    case SL_W_Q4_0:
        r.template run<T, DqGguf32<SL_W_Q4_0>>();
        break;
    case SL_W_Q4_1:
        r.template run<T, DqGguf32<SL_W_Q4_1>>();
        break;
    case SL_W_Q5_0:
        r.template run<T, DqGguf32<SL_W_Q5_0>>();
        break;
    case SL_W_Q5_1:
        r.template run<T, DqGguf32<SL_W_Q5_1>>();
        break;
    case SL_W_MXFP4_GGUF:
        r.template run<T, DqGguf32<SL_W_MXFP4_GGUF>>();
        break;
    case SL_W_Q4_K:
        r.template run<T, DqGguf256<SL_W_Q4_K>>();
        break;
    case SL_W_Q5_K:
        r.template run<T, DqGguf256<SL_W_Q5_K>>();
        break;
    case SL_W_Q6_K:
        r.template run<T, DqGguf256<SL_W_Q6_K>>();
        break;
    default:
        return sl_err_set(err, SL_ECONFIG, "weight format %d is not known to the CUDA backend", (int)fmt);
    }
    return 0;
}
static int check_block(const sl_mat *w, sl_err *err) {
    const uint32_t block = sl_wfmt_block(w->fmt);
    if (block && w->k % block == 0) return 0;
    return sl_err_set(err, SL_ECONFIG, "matrix of %lld columns in format %s: a multiple of %u is expected",
                      (long long)w->k, sl_wfmt_name(w->fmt), block);
}

int sl_cuda_embed(SlCuda *c, void *out, const int32_t *ids, int64_t T, const sl_mat *table, float scale, sl_err *err) {
    if (!T) return 0;
    int rc = check_block(table, err);
    const RunRows r = {c, out, args_of(table), ids, T, scale};
    if (!rc) rc = c->act == SL_F32 ? by_format<float>(r, table->fmt, err) : by_format<bf16>(r, table->fmt, err);
    if (rc) return sl_err_wrap(err, "embedding");
    SL_LAUNCHED("embedding");
    return 0;
}

static bool in_place(const SlCuda *c, const sl_mat *w) {
    if (w->row_perm) return false;
    if (w->fmt == (c->act == SL_F32 ? SL_W_F32 : SL_W_BF16)) return true;
    return w->count > 1 && w->fmt == SL_W_INT4 && sl_cuda_grouped_ok(c, w, nullptr); /* expanded inside the product */
}
uint64_t sl_cuda_prepare_bytes(SlCuda *c, const sl_mat *w) {
    if (!w->data || in_place(c, w)) return 0;
    return (uint64_t)w->n * w->k * w->count * (c->act == SL_F32 ? 4 : 2);
}
/* `w` dequantized into scratch, as *out. */
static int convert(SlCuda *c, sl_mat *out, const sl_mat *w, void *scratch, sl_err *err) {
    int rc = check_block(w, err);
    if (rc) return rc;
    const size_t words = (size_t)w->n * w->k / 8;
    const bool dense =
        w->row_bytes == (uint64_t)w->k / 2 && (int64_t)w->scale_row == w->k / 32 &&
        (w->count == 1 || (w->stride == (uint64_t)words * 4 && w->scale_stride == (uint64_t)words / 4 * 2));
    if (w->fmt == SL_W_INT4 && c->act == SL_BF16 && w->group == 32 && w->scale_dtype == SL_BF16 && !w->zero &&
        !w->row_perm && dense && w->k % 32 == 0) {
        const size_t all = words * w->count;
        dequant_int4_fast<<<(unsigned)((all + 1023) / 1024), 256, 0, c->stream>>>(
            (const uint32_t *)w->data, (const bf16 *)w->scale, (uint4 *)scratch, all);
    } else {
        const RunMatrix r = {c, scratch, args_of(w), w->count};
        rc = c->act == SL_F32 ? by_format<float>(r, w->fmt, err) : by_format<bf16>(r, w->fmt, err);
        if (rc) return rc;
    }
    SL_LAUNCHED("dequant");
    const int elem = c->act == SL_F32 ? 4 : 2;
    *out = *w;
    out->fmt = c->act == SL_F32 ? SL_W_F32 : SL_W_BF16;
    out->data = scratch, out->row_bytes = (uint64_t)w->k * elem, out->stride = (uint64_t)w->n * w->k * elem;
    out->scale = nullptr, out->zero = nullptr, out->row_perm = 0, out->n_off = out->k_off = 0;
    return 0;
}
int sl_cuda_prepare(SlCuda *c, sl_mat *out, const sl_mat *w, void *scratch, sl_err *err) {
    *out = *w;
    return !w->data || in_place(c, w) ? 0 : convert(c, out, w, scratch, err);
}
int sl_cuda_as_act(SlCuda *c, sl_mat *out, const sl_mat *w, void *scratch, sl_err *err) {
    *out = *w;
    return w->fmt == (c->act == SL_F32 ? SL_W_F32 : SL_W_BF16) && !w->row_perm ? 0 : convert(c, out, w, scratch, err);
}
