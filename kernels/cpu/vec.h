/* vec: the vector type of the instruction set that a file is compiled for, on GNU vector extensions. Private to
 * isa_*.c. */
#ifndef SL_CPU_VEC_H
#define SL_CPU_VEC_H
#include <stdint.h>
#include <string.h>

#define SL_CAT2(a, b) a##_##b
#define SL_CAT(a, b)  SL_CAT2(a, b)
#define FN(name)      SL_CAT(name, SL_ISA)

#if defined(__AVX512F__)
#define VL 16
#elif defined(__AVX2__)
#define VL 8
#else
#define VL 4
#endif

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));

#define INLINE static inline __attribute__((always_inline, unused))
/* "omp simd"-free unrolling that both compilers take */
#ifdef __clang__
#define UNROLL(n) _Pragma("unroll")
#else
#define PRAGMA_(x) _Pragma(#x)
#define UNROLL(n)  PRAGMA_(GCC unroll n)
#endif

INLINE vf vf_load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void vf_store(float *p, vf v) {
    memcpy(p, &v, sizeof v);
}
INLINE vf vf_set(float x) {
    return x - (vf){}; /* x - 0 is x for every x, so this is a plain broadcast */
}
INLINE vf vf_bits(vu u) {
    return (vf)u;
}
INLINE vf vf_max(vf a, vf b) {         /* b when a is NaN's equal: a NaN in either position never hides */
    vi m = (vi)(a > b) | (vi)(a != a); // NOLINT(misc-redundant-expression): NaN
    return (vf)(((vi)a & m) | ((vi)b & ~m));
}
INLINE vf vf_min(vf a, vf b) {
    vi m = (vi)(a < b) | (vi)(a != a); // NOLINT(misc-redundant-expression): NaN
    return (vf)(((vi)a & m) | ((vi)b & ~m));
}
INLINE vf vf_sel(vi m, vf a, vf b) {
    return (vf)(((vi)a & m) | ((vi)b & ~m));
}
/* Lanes i ^ 1, i ^ 2, ... of v: butterflies for reductions, a fixed tree. */
#if VL == 16
#define LANES(a, b, c, d)                                                                                              \
    a, b, c, d, (a) + 4, (b) + 4, (c) + 4, (d) + 4, (a) + 8, (b) + 8, (c) + 8, (d) + 8, (a) + 12, (b) + 12, (c) + 12,  \
        (d) + 12
#define FLIP8(v) __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define FLIP4(v) __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#elif VL == 8
#define LANES(a, b, c, d) a, b, c, d, (a) + 4, (b) + 4, (c) + 4, (d) + 4
#define FLIP4(v)          __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3)
#else
#define LANES(a, b, c, d) a, b, c, d
#endif
INLINE float vf_sum(vf v) {
#if VL == 16
    v += FLIP8(v);
#endif
#if VL >= 8
    v += FLIP4(v);
#endif
    v += __builtin_shufflevector(v, v, LANES(2, 3, 0, 1));
    v += __builtin_shufflevector(v, v, LANES(1, 0, 3, 2));
    return v[0];
}
INLINE float vf_hmax(vf v) { /* NaN lanes are passed over unless all are NaN */
    vf t;
#if VL == 16
    t = FLIP8(v);
    v = vf_sel(t > v, t, v);
#endif
#if VL >= 8
    t = FLIP4(v);
    v = vf_sel(t > v, t, v);
#endif
    t = __builtin_shufflevector(v, v, LANES(2, 3, 0, 1));
    v = vf_sel(t > v, t, v);
    t = __builtin_shufflevector(v, v, LANES(1, 0, 3, 2));
    v = vf_sel(t > v, t, v);
    return v[0];
}

/* bf16 -> f32 */
INLINE vf vf_from_bf16(const uint16_t *p) {
    vh h;
    memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
}
/* f32 -> bf16, nearest even; a NaN stays a quiet NaN */
INLINE vh vh_from_vf(vf v) {
    vu u = (vu)v;
    vu r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    vu q = (u >> 16) | 0x40u;
    vu m = (vu)(v != v); // NOLINT(misc-redundant-expression): NaN
    return __builtin_convertvector((q & m) | (r & ~m), vh);
}
INLINE void vf_store_bf16(uint16_t *p, vf v) {
    vh h = vh_from_vf(v);
    memcpy(p, &h, sizeof h);
}
INLINE vf vf_round_bf16(vf v) { /* the value after a trip through bf16 */
    vu u = (vu)v;
    vu r = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
    vu m = (vu)(v != v); // NOLINT(misc-redundant-expression): NaN
    return (vf)((u & m) | (r & ~m));
}

INLINE float f_from_bf16(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
INLINE uint16_t bf16_from_f(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
INLINE float f_round_bf16(float f) {
    return f_from_bf16(bf16_from_f(f));
}
INLINE float f_from_f16(uint16_t h) {
    uint32_t s = (uint32_t)(h & 0x8000u) << 16, e = (h >> 10) & 31u, m = h & 0x3ffu, u;
    float f;
    if (e == 0) { /* zero and subnormal: m * 2^-24 */
        f = (float)m * 0x1p-24f;
        return s ? -f : f;
    }
    u = e == 31 ? s | 0x7f800000u | (m << 13) : s | ((e + 112u) << 23) | (m << 13);
    memcpy(&f, &u, 4);
    return f;
}

/* Load and store n <= VL elements of either activation type; lanes beyond n are `fill`. */
INLINE vf act_load(const void *p, int64_t i, int bf) {
    return bf ? vf_from_bf16((const uint16_t *)p + i) : vf_load((const float *)p + i);
}
INLINE void act_store(void *p, int64_t i, vf v, int bf) {
    if (bf)
        vf_store_bf16((uint16_t *)p + i, v);
    else
        vf_store((float *)p + i, v);
}
INLINE vf act_load_n(const void *p, int64_t i, int64_t n, int bf, float fill) {
    float x[VL];
    for (int j = 0; j < VL; j++) {
        if (j >= n)
            x[j] = fill;
        else
            x[j] = bf ? f_from_bf16(((const uint16_t *)p)[i + j]) : ((const float *)p)[i + j];
    }
    return vf_load(x);
}
INLINE void act_store_n(void *p, int64_t i, vf v, int64_t n, int bf) {
    float x[VL];
    vf_store(x, v);
    for (int j = 0; j < n; j++) {
        if (bf)
            ((uint16_t *)p)[i + j] = bf16_from_f(x[j]);
        else
            ((float *)p)[i + j] = x[j];
    }
}

/* e^x, about 1 ulp for normal results; below -87 it is 0, above 88.7 it is +inf, NaN stays NaN. */
INLINE vf vf_exp(vf x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits */
    vi low = x<-87.0f, high = x> 88.7f;
    vf c = vf_sel(low, vf_set(-87.0f), vf_sel(high, vf_set(88.0f), x));
    vf t = c * 1.44269504088896341f + magic;
    vf n = t - magic;
    vf r = c - n * 0.693145751953125f;
    r = r - n * 1.42860682030941723e-6f;
    vf p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    vi e = ((vi)t - (vi)vf_set(magic) + 127) << 23;
    vf y = p * (vf)e;
    vf inf = vf_bits((vu){} + 0x7f800000u);
    return vf_sel(low, (vf){}, vf_sel(high, inf, y));
}
#endif
