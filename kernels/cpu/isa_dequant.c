#include "kernels/cpu/isa.h"
#include "kernels/cpu/vec.h"
#include "kernels/cpu/isa_rows.h"
#if VL > 4
#include <immintrin.h>
#endif

INLINE uint16_t rd16(const uint8_t *p) {
    return (uint16_t)(p[0] | p[1] << 8);
}
INLINE float rd_f16(const uint8_t *p) {
    return f_from_f16(rd16(p));
}

/* ---- GGUF blocks: one block of bytes at b becomes 32 or 256 floats at y --------------------------------------------
 */

INLINE void q8_0(float *y, const uint8_t *b) {
    float d = rd_f16(b);
    for (int j = 0; j < 32; j++) y[j] = d * (float)(int8_t)b[2 + j];
}
INLINE void q4_0(float *y, const uint8_t *b) {
    float d = rd_f16(b);
    for (int j = 0; j < 16; j++) {
        y[j] = d * (float)((b[2 + j] & 15) - 8);
        y[j + 16] = d * (float)((b[2 + j] >> 4) - 8);
    }
}
INLINE void q4_1(float *y, const uint8_t *b) {
    float d = rd_f16(b), m = rd_f16(b + 2);
    for (int j = 0; j < 16; j++) {
        y[j] = d * (float)(b[4 + j] & 15) + m;
        y[j + 16] = d * (float)(b[4 + j] >> 4) + m;
    }
}
INLINE void q5(float *y, const uint8_t *qh, const uint8_t *qs, float d, float m, int off) {
    uint32_t h = (uint32_t)rd16(qh) | (uint32_t)rd16(qh + 2) << 16;
    for (int j = 0; j < 16; j++) {
        int lo = (qs[j] & 15) | (int)((h >> j) & 1) << 4;
        int hi = (qs[j] >> 4) | (int)((h >> (j + 16)) & 1) << 4;
        y[j] = d * (float)(lo - off) + m;
        y[j + 16] = d * (float)(hi - off) + m;
    }
}
/* 6-bit scale and minimum j of the 12 bytes shared by Q4_K and Q5_K */
INLINE void k_scale(const uint8_t *s, int j, int *sc, int *mn) {
    if (j < 4) {
        *sc = s[j] & 63;
        *mn = s[j + 4] & 63;
    } else {
        *sc = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        *mn = (s[j + 4] >> 4) | (s[j] >> 6) << 4;
    }
}
INLINE void q45_k(float *y, const uint8_t *b, int five) {
    float d = rd_f16(b), dmin = rd_f16(b + 2);
    const uint8_t *qh = b + 16, *qs = five ? b + 48 : b + 16;
    for (int g = 0; g < 4; g++) {
        int s0, m0, s1, m1;
        k_scale(b + 4, 2 * g, &s0, &m0);
        k_scale(b + 4, 2 * g + 1, &s1, &m1);
        float d0 = d * (float)s0, d1 = d * (float)s1, n0 = dmin * (float)m0, n1 = dmin * (float)m1;
        for (int j = 0; j < 32; j++) {
            int lo = qs[32 * g + j] & 15, hi = qs[32 * g + j] >> 4;
            if (five) {
                lo |= ((qh[j] >> (2 * g)) & 1) << 4;
                hi |= ((qh[j] >> (2 * g + 1)) & 1) << 4;
            }
            y[64 * g + j] = d0 * (float)lo - n0;
            y[64 * g + 32 + j] = d1 * (float)hi - n1;
        }
    }
}
INLINE void q6_k(float *y, const uint8_t *b) {
    float d = rd_f16(b + 208);
    for (int n = 0; n < 2; n++) {
        const uint8_t *ql = b + 64 * n, *qh = b + 128 + 32 * n;
        const int8_t *sc = (const int8_t *)b + 192 + 8 * n;
        float *o = y + 128 * n;
        for (int l = 0; l < 32; l++) {
            int is = l / 16;
            int v1 = (ql[l] & 15) | (qh[l] & 3) << 4, v2 = (ql[l + 32] & 15) | ((qh[l] >> 2) & 3) << 4;
            int v3 = (ql[l] >> 4) | ((qh[l] >> 4) & 3) << 4, v4 = (ql[l + 32] >> 4) | (qh[l] >> 6) << 4;
            o[l] = d * (float)sc[is] * (float)(v1 - 32);
            o[l + 32] = d * (float)sc[is + 2] * (float)(v2 - 32);
            o[l + 64] = d * (float)sc[is + 4] * (float)(v3 - 32);
            o[l + 96] = d * (float)sc[is + 6] * (float)(v4 - 32);
        }
    }
}

static const float fp4[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

INLINE float e8m0(uint8_t e) { /* 2^(e-127); e = 0 is the subnormal 2^-127, 255 would be NaN by the format: inf here */
    uint32_t u = e ? (uint32_t)e << 23 : 0x00400000u;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

/* ---- HF formats ---------------------------------------------------------------------------------------------------
 */

INLINE float scale_at(const sl_mat *w, const uint8_t *base, int64_t i) {
    const uint8_t *p;
    float f;
    if (w->scale_dtype == SL_F32) {
        memcpy(&f, base + 4 * i, 4);
        return f;
    }
    p = base + 2 * i;
    return w->scale_dtype == SL_F16 ? rd_f16(p) : f_from_bf16(rd16(p));
}

typedef uint8_t vb __attribute__((vector_size(VL)));

/* The VL nibbles that start at p, low nibble first. */
INLINE vi nibbles(const uint8_t *p) {
    vu v, shift;
    for (unsigned i = 0; i < VL; i++) shift[i] = 4 * (i % 8);
#if VL == 16
    uint64_t word;
    memcpy(&word, p, 8);
    vu lo = (vu){} + (uint32_t)word, hi = (vu){} + (uint32_t)(word >> 32);
    v = __builtin_shufflevector(lo, hi, 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31);
#elif VL == 8
    uint32_t word;
    memcpy(&word, p, 4);
    v = (vu){} + word;
#else
    uint16_t word;
    memcpy(&word, p, 2);
    v = (vu){} + word;
#endif
    return (vi)((v >> shift) & 15u);
}

/* One nibble minus its zero point times the group's scale. */
static void int4(float *dst, const sl_mat *w, int64_t e, int64_t row, int64_t k0, int64_t kn) {
    const uint8_t *q = (const uint8_t *)w->data + (uint64_t)e * w->stride + (uint64_t)row * w->row_bytes;
    const uint8_t *sc = (const uint8_t *)w->scale + (uint64_t)e * w->scale_stride;
    const uint8_t *zp = NULL;
    if (w->zero) /* packed along n: word [n/8][scale_row], nibble n%8 */
        zp = (const uint8_t *)w->zero +
             ((uint64_t)e * ((uint64_t)(w->n + 7) / 8) + (uint64_t)row / 8) * w->scale_row * 4;
    for (int64_t k = k0; k < k0 + kn;) {
        int64_t g = k / w->group, end = (g + 1) * w->group;
        if (end > k0 + kn) end = k0 + kn;
        float s = scale_at(w, sc, row * (int64_t)w->scale_row + g);
        int32_t z = 8;
        if (zp) {
            uint32_t word;
            memcpy(&word, zp + 4 * g, 4);
            z = (int32_t)(word >> (4 * (row % 8)) & 15u);
        }
        for (; (k & 1) == 0 && k + VL <= end; k += VL)
            vf_store(dst + (k - k0), __builtin_convertvector(nibbles(q + k / 2) - z, vf) * s);
        for (; k < end; k++) dst[k - k0] = (float)((q[k / 2] >> (4 * (k & 1)) & 15) - z) * s;
    }
}

/* e4m3fn: bias 7, no infinity, 0x7f and 0xff are NaN. The significand is an integer of 4 bits, so integer and power of
 * two are exact and no step meets a denormal float. */
INLINE vf e4m3(vu b) {
    vi e = (vi)(b >> 3 & 15u), m = (vi)(b & 7u), normal = e != 0;
    vf v = __builtin_convertvector(m + (normal & 8), vf) * (vf)((e + normal + (128 - 10)) << 23);
    v = (vf)((vu)v | (b & 0x80u) << 24);
    return vf_sel((b & 0x7fu) == 0x7fu, vf_bits((vu){} + 0x7fc00000u), v);
}
static void fp8(float *dst, const sl_mat *w, int64_t e, int64_t row, int64_t k0, int64_t kn) {
    const uint8_t *q = (const uint8_t *)w->data + (uint64_t)e * w->stride + (uint64_t)row * w->row_bytes;
    const uint8_t *sc = (const uint8_t *)w->scale + (uint64_t)e * w->scale_stride;
    int64_t srow = (row + w->n_off) / 128;
    for (int64_t k = k0; k < k0 + kn;) {
        int64_t c = (k + w->k_off) / 128, end = (c + 1) * 128 - w->k_off;
        float s;
        if (end > k0 + kn) end = k0 + kn;
        memcpy(&s, sc + 4 * ((uint64_t)srow * w->scale_row + (uint64_t)c), 4);
        for (; k < end; k += VL) {
            int64_t n = end - k < VL ? end - k : VL;
            vb b = {};
            memcpy(&b, q + k, (size_t)n);
            vf v = e4m3(__builtin_convertvector(b, vu)) * s;
            if (n == VL)
                vf_store(dst + (k - k0), v);
            else
                act_store_n(dst, k - k0, v, n, 0);
        }
        k = end;
    }
}

/* e2m1 doubled is one of 0 1 2 3 4 6 8 12: an integer of 2 bits shifted by its exponent. */
INLINE vf e2m1(vi q, float half) {
    vi e = q >> 1 & 3, normal = e != 0;
    vf v = __builtin_convertvector(((q & 1) + (normal & 2)) << (e + normal), vf) * half;
    return (vf)((vi)v ^ (q & 8) << 28);
}
static void mxfp4(float *dst, const sl_mat *w, int64_t e, int64_t row, int64_t k0, int64_t kn) {
    const uint8_t *q = (const uint8_t *)w->data + (uint64_t)e * w->stride + (uint64_t)row * w->row_bytes + k0 / 2;
    const uint8_t *sc =
        (const uint8_t *)w->scale + (uint64_t)e * w->scale_stride + (uint64_t)row * w->scale_row + k0 / 32;
    for (int64_t b = 0; b < kn / 32; b++)
        for (int j = 0; j < 32; j += VL)
            vf_store(dst + 32 * b + j, e2m1(nibbles(q + 16 * b + j / 2), e8m0(sc[b]) * 0.5f));
}

static void f16(float *dst, const uint8_t *p, int64_t n) {
    int64_t i = 0;
#if VL == 16
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(dst + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(p + 2 * i))));
#elif VL == 8
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(p + 2 * i))));
#endif
    for (; i < n; i++) dst[i] = rd_f16(p + 2 * i);
}

/* ---- dispatch -----------------------------------------------------------------------------------------------------
 */

static void gguf(float *dst, sl_wfmt fmt, const uint8_t *b, int64_t blocks) {
    switch (fmt) {
    case SL_W_Q8_0:
        for (int64_t i = 0; i < blocks; i++) q8_0(dst + 32 * i, b + 34 * i);
        break;
    case SL_W_Q4_0:
        for (int64_t i = 0; i < blocks; i++) q4_0(dst + 32 * i, b + 18 * i);
        break;
    case SL_W_Q4_1:
        for (int64_t i = 0; i < blocks; i++) q4_1(dst + 32 * i, b + 20 * i);
        break;
    case SL_W_Q5_0:
        for (int64_t i = 0; i < blocks; i++)
            q5(dst + 32 * i, b + 22 * i + 2, b + 22 * i + 6, rd_f16(b + 22 * i), 0, 16);
        break;
    case SL_W_Q5_1:
        for (int64_t i = 0; i < blocks; i++)
            q5(dst + 32 * i, b + 24 * i + 4, b + 24 * i + 8, rd_f16(b + 24 * i), rd_f16(b + 24 * i + 2), 0);
        break;
    case SL_W_Q4_K:
        for (int64_t i = 0; i < blocks; i++) q45_k(dst + 256 * i, b + 144 * i, 0);
        break;
    case SL_W_Q5_K:
        for (int64_t i = 0; i < blocks; i++) q45_k(dst + 256 * i, b + 176 * i, 1);
        break;
    case SL_W_Q6_K:
        for (int64_t i = 0; i < blocks; i++) q6_k(dst + 256 * i, b + 210 * i);
        break;
    case SL_W_MXFP4_GGUF:
        for (int64_t i = 0; i < blocks; i++, b += 17) {
            float s = e8m0(b[0]);
            for (int j = 0; j < 16; j++) {
                dst[32 * i + j] = fp4[b[1 + j] & 15] * s;
                dst[32 * i + 16 + j] = fp4[b[1 + j] >> 4] * s;
            }
        }
        break;
    default:
        break;
    }
}

void FN(sl_row_dequant)(float *dst, const sl_mat *w, int64_t e, int64_t row, int64_t k0, int64_t kn) {
    const uint8_t *r = (const uint8_t *)w->data + (uint64_t)e * w->stride + (uint64_t)row * w->row_bytes;
    switch (w->fmt) {
    case SL_W_F32:
        memcpy(dst, r + 4 * k0, (size_t)kn * 4);
        break;
    case SL_W_BF16:
        FN(sl_row_to_f32)(dst, (const uint16_t *)(const void *)r + k0, kn);
        break;
    case SL_W_F16:
        f16(dst, r + 2 * k0, kn);
        break;
    case SL_W_INT4:
        int4(dst, w, e, row, k0, kn);
        break;
    case SL_W_FP8:
        fp8(dst, w, e, row, k0, kn);
        break;
    case SL_W_MXFP4:
        mxfp4(dst, w, e, row, k0, kn);
        break;
    default:
        gguf(dst, w->fmt, r + sl_wfmt_row_bytes(w->fmt, k0), kn / (int64_t)sl_wfmt_block(w->fmt));
        break;
    }
}
