#include "kernels/cpu/isa.h"
#include "kernels/cpu/vec.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

/* The tile fills the register file: accumulators, two panel vectors, one broadcast. */
#if VL == 16
#define MR 12
#else
#define MR 6
#endif
#define NR (2 * VL)

/* ---- C[R x NR] (+)= A * panel -------------------------------------------------------------------------------------
 */

INLINE void mm_f32_r(const int R, float *c, int64_t ldc, const float *a, int64_t lda, const float *b, int64_t k,
                     int add) {
    vf acc[MR][2];
    UNROLL(12)
    for (int i = 0; i < R; i++) {
        acc[i][0] = (vf){};
        acc[i][1] = (vf){};
    }
    for (int64_t p = 0; p < k; p++) {
        vf b0 = vf_load(b), b1 = vf_load(b + VL);
        b += NR;
        UNROLL(12)
        for (int i = 0; i < R; i++) {
            vf x = vf_set(a[i * lda + p]);
            acc[i][0] += x * b0;
            acc[i][1] += x * b1;
        }
    }
    UNROLL(12)
    for (int i = 0; i < R; i++) {
        if (add) {
            acc[i][0] += vf_load(c + i * ldc);
            acc[i][1] += vf_load(c + i * ldc + VL);
        }
        vf_store(c + i * ldc, acc[i][0]);
        vf_store(c + i * ldc + VL, acc[i][1]);
    }
}

static void FN(mm_f32)(float *c, int64_t ldc, const float *a, int64_t lda, int32_t rows, const float *b, int64_t k,
                       int add) {
    switch (rows) {
#if MR == 12
    case 12:
        mm_f32_r(12, c, ldc, a, lda, b, k, add);
        break;
    case 11:
        mm_f32_r(11, c, ldc, a, lda, b, k, add);
        break;
    case 10:
        mm_f32_r(10, c, ldc, a, lda, b, k, add);
        break;
    case 9:
        mm_f32_r(9, c, ldc, a, lda, b, k, add);
        break;
    case 8:
        mm_f32_r(8, c, ldc, a, lda, b, k, add);
        break;
    case 7:
        mm_f32_r(7, c, ldc, a, lda, b, k, add);
        break;
#endif
    case 6:
        mm_f32_r(6, c, ldc, a, lda, b, k, add);
        break;
    case 5:
        mm_f32_r(5, c, ldc, a, lda, b, k, add);
        break;
    case 4:
        mm_f32_r(4, c, ldc, a, lda, b, k, add);
        break;
    case 3:
        mm_f32_r(3, c, ldc, a, lda, b, k, add);
        break;
    case 2:
        mm_f32_r(2, c, ldc, a, lda, b, k, add);
        break;
    case 1:
        mm_f32_r(1, c, ldc, a, lda, b, k, add);
        break;
    default:
        break;
    }
}

#ifdef __AVX512BF16__
INLINE __m512bh pair_set(const uint16_t *a) {
    int32_t w;
    memcpy(&w, a, 4);
    return (__m512bh)_mm512_set1_epi32(w);
}

INLINE void mm_bf16_r(const int R, float *c, int64_t ldc, const uint16_t *a, int64_t lda, const uint16_t *b, int64_t k,
                      int add) {
    __m512 acc[MR][2];
    UNROLL(12)
    for (int i = 0; i < R; i++) {
        acc[i][0] = _mm512_setzero_ps();
        acc[i][1] = _mm512_setzero_ps();
    }
    int64_t p = 0;
    for (; p + 1 < k; p += 2) {
        __m512bh b0 = (__m512bh)_mm512_loadu_si512(b), b1 = (__m512bh)_mm512_loadu_si512(b + 32);
        b += 64;
        UNROLL(12)
        for (int i = 0; i < R; i++) {
            __m512bh x = pair_set(a + i * lda + p);
            acc[i][0] = _mm512_dpbf16_ps(acc[i][0], x, b0);
            acc[i][1] = _mm512_dpbf16_ps(acc[i][1], x, b1);
        }
    }
    if (p < k) { /* the odd last element: its neighbour may not be ours to read */
        __m512bh b0 = (__m512bh)_mm512_loadu_si512(b), b1 = (__m512bh)_mm512_loadu_si512(b + 32);
        UNROLL(12)
        for (int i = 0; i < R; i++) {
            __m512bh x = (__m512bh)_mm512_set1_epi32(a[i * lda + p]);
            acc[i][0] = _mm512_dpbf16_ps(acc[i][0], x, b0);
            acc[i][1] = _mm512_dpbf16_ps(acc[i][1], x, b1);
        }
    }
    UNROLL(12)
    for (int i = 0; i < R; i++) {
        if (add) {
            acc[i][0] = _mm512_add_ps(acc[i][0], _mm512_loadu_ps(c + i * ldc));
            acc[i][1] = _mm512_add_ps(acc[i][1], _mm512_loadu_ps(c + i * ldc + VL));
        }
        _mm512_storeu_ps(c + i * ldc, acc[i][0]);
        _mm512_storeu_ps(c + i * ldc + VL, acc[i][1]);
    }
}

static void FN(mm_bf16)(float *c, int64_t ldc, const uint16_t *a, int64_t lda, int32_t rows, const uint16_t *b,
                        int64_t k, int add) {
    switch (rows) {
    case 12:
        mm_bf16_r(12, c, ldc, a, lda, b, k, add);
        break;
    case 11:
        mm_bf16_r(11, c, ldc, a, lda, b, k, add);
        break;
    case 10:
        mm_bf16_r(10, c, ldc, a, lda, b, k, add);
        break;
    case 9:
        mm_bf16_r(9, c, ldc, a, lda, b, k, add);
        break;
    case 8:
        mm_bf16_r(8, c, ldc, a, lda, b, k, add);
        break;
    case 7:
        mm_bf16_r(7, c, ldc, a, lda, b, k, add);
        break;
    case 6:
        mm_bf16_r(6, c, ldc, a, lda, b, k, add);
        break;
    case 5:
        mm_bf16_r(5, c, ldc, a, lda, b, k, add);
        break;
    case 4:
        mm_bf16_r(4, c, ldc, a, lda, b, k, add);
        break;
    case 3:
        mm_bf16_r(3, c, ldc, a, lda, b, k, add);
        break;
    case 2:
        mm_bf16_r(2, c, ldc, a, lda, b, k, add);
        break;
    case 1:
        mm_bf16_r(1, c, ldc, a, lda, b, k, add);
        break;
    default:
        break;
    }
}
#endif

/* ---- packing ------------------------------------------------------------------------------------------------------
 */

/* Transpose of a VL x VL tile of 32-bit words by log2(VL) rounds of two-source permutes. */
INLINE void tile_transpose(vu r[VL]) {
    for (int w = VL / 2; w > 0; w /= 2) {
        vu t[VL];
        UNROLL(16)
        for (int i = 0; i < VL; i++) {
            vi lo, hi;
            for (int j = 0; j < VL; j++) { /* constants after unrolling */
                lo[j] = (j & w) ? VL + (j ^ w) : j;
                hi[j] = (j & w) ? VL + j : (j ^ w);
            }
            int partner = i ^ w;
            if (i & w) continue;
#ifdef __clang__
            for (int j = 0; j < VL; j++) {
                t[i][j] = (j & w) ? r[partner][j ^ w] : r[i][j];
                t[partner][j] = (j & w) ? r[partner][j] : r[i][j ^ w];
            }
#else
            t[i] = __builtin_shuffle(r[i], r[partner], (vu)lo);
            t[partner] = __builtin_shuffle(r[i], r[partner], (vu)hi);
#endif
        }
        UNROLL(16)
        for (int i = 0; i < VL; i++) r[i] = t[i];
    }
}

static void FN(pack_f32)(float *dst, const float *src, int64_t ld, int32_t n, int64_t k) {
    for (int h = 0; h < 2; h++) {
        int32_t cols = n - h * VL;
        int64_t p = 0;
        if (cols >= VL) {
            for (; p + VL <= k; p += VL) {
                vu r[VL];
                for (int i = 0; i < VL; i++) memcpy(&r[i], src + (h * VL + i) * ld + p, sizeof r[i]);
                tile_transpose(r);
                for (int i = 0; i < VL; i++) memcpy(dst + (p + i) * NR + h * VL, &r[i], sizeof r[i]);
            }
        }
        for (; p < k; p++)
            for (int i = 0; i < VL; i++) dst[p * NR + h * VL + i] = i < cols ? src[(h * VL + i) * ld + p] : 0.0f;
    }
}

static void FN(pack_f32_from_bf16)(float *dst, const uint16_t *src, int64_t ld, int32_t n, int64_t k) {
    for (int h = 0; h < 2; h++) {
        int32_t cols = n - h * VL;
        int64_t p = 0;
        if (cols >= VL) {
            for (; p + VL <= k; p += VL) {
                vu r[VL];
                for (int i = 0; i < VL; i++) r[i] = (vu)vf_from_bf16(src + (h * VL + i) * ld + p);
                tile_transpose(r);
                for (int i = 0; i < VL; i++) memcpy(dst + (p + i) * NR + h * VL, &r[i], sizeof r[i]);
            }
        }
        for (; p < k; p++)
            for (int i = 0; i < VL; i++)
                dst[p * NR + h * VL + i] = i < cols ? f_from_bf16(src[(h * VL + i) * ld + p]) : 0.0f;
    }
}

static void FN(pack_v_f32)(float *dst, const float *src, int64_t ld, int32_t n, int64_t k) {
    for (int64_t p = 0; p < k; p++)
        for (int i = 0; i < NR; i++) dst[p * NR + i] = i < n ? src[p * ld + i] : 0.0f;
}

static void FN(pack_v_f32_from_bf16)(float *dst, const uint16_t *src, int64_t ld, int32_t n, int64_t k) {
    for (int64_t p = 0; p < k; p++) {
        if (n == NR) {
            vf_store(dst + p * NR, vf_from_bf16(src + p * ld));
            vf_store(dst + p * NR + VL, vf_from_bf16(src + p * ld + VL));
        } else {
            for (int i = 0; i < NR; i++) dst[p * NR + i] = i < n ? f_from_bf16(src[p * ld + i]) : 0.0f;
        }
    }
}

#ifdef __AVX512BF16__
static void FN(pack_bf16)(uint16_t *dst, const uint16_t *src, int64_t ld, int32_t n, int64_t k) {
    for (int h = 0; h < 2; h++) {
        int32_t cols = n - h * VL;
        int64_t p = 0;
        if (cols >= VL) {
            for (; p + 2 * VL <= k; p += 2 * VL) {
                vu r[VL];
                for (int i = 0; i < VL; i++) memcpy(&r[i], src + (h * VL + i) * ld + p, sizeof r[i]);
                tile_transpose(r);
                for (int i = 0; i < VL; i++) memcpy(dst + ((p / 2 + i) * NR + h * VL) * 2, &r[i], sizeof r[i]);
            }
        }
        for (; p < k; p += 2)
            for (int i = 0; i < VL; i++) {
                uint16_t *d = dst + (p / 2 * NR + h * VL + i) * 2;
                const uint16_t *s = src + (h * VL + i) * ld + p;
                d[0] = i < cols ? s[0] : 0;
                d[1] = i < cols && p + 1 < k ? s[1] : 0;
            }
    }
}

static void FN(pack_v_bf16)(uint16_t *dst, const uint16_t *src, int64_t ld, int32_t n, int64_t k) {
    for (int64_t p = 0; p < k; p += 2) {
        uint16_t *d = dst + p * NR;
        const uint16_t *s0 = src + p * ld, *s1 = p + 1 < k ? s0 + ld : NULL;
        for (int i = 0; i < NR; i++) {
            d[2 * i] = i < n ? s0[i] : 0;
            d[2 * i + 1] = i < n && s1 ? s1[i] : 0;
        }
    }
}
#endif

/* ---- peak: what the multiply-add units do when nothing is loaded ---- */

static double FN(peak)(int64_t n) {
    vf a[12];
    volatile float in = 1.0f;
    vf x = vf_set(in * 0.999f), y = vf_set(in * 0.001f);
    UNROLL(12)
    for (int i = 0; i < 12; i++) a[i] = vf_set(in + (float)i);
    for (int64_t r = 0; r < n; r++) {
        UNROLL(12)
        for (int i = 0; i < 12; i++) a[i] = a[i] * x + y;
    }
    vf s = {};
    UNROLL(12)
    for (int i = 0; i < 12; i++) s += a[i];
    in = s[0];
    return (double)n * 12 * VL * 2;
}

/* ---- the table ----------------------------------------------------------------------------------------------------
 */

#define STR2(x) #x
#define STR(x)  STR2(x)
#include "kernels/cpu/isa_rows.h"

const sl_isa FN(sl_isa) = {
    .name = STR(SL_ISA),
    .mr = MR,
    .nr = NR,
    .mm_f32 = FN(mm_f32),
    .pack_f32 = FN(pack_f32),
    .pack_f32_from_bf16 = FN(pack_f32_from_bf16),
    .pack_v_f32 = FN(pack_v_f32),
    .pack_v_f32_from_bf16 = FN(pack_v_f32_from_bf16),
#ifdef __AVX512BF16__
    .bf16_dot = 1,
    .mm_bf16 = FN(mm_bf16),
    .pack_bf16 = FN(pack_bf16),
    .pack_v_bf16 = FN(pack_v_bf16),
#endif
    .to_f32 = FN(sl_row_to_f32),
    .to_bf16 = FN(sl_row_to_bf16),
    .finish_f32 = FN(sl_row_finish_f32),
    .finish_bf16 = FN(sl_row_finish_bf16),
    .softmax_step = FN(sl_row_softmax_step),
    .scale_f32 = FN(sl_row_scale_f32),
    .axpy_f32 = FN(sl_row_axpy_f32),
    .lse_step = FN(sl_row_lse_step),
    .norm_row = FN(sl_row_norm),
    .glu_row = FN(sl_row_glu),
    .add_row = FN(sl_row_add),
    .scale_row = FN(sl_row_scale),
    .rope_row = FN(sl_row_rope),
    .fingerprint = FN(sl_row_fingerprint),
    .dequant = FN(sl_row_dequant),
    .peak = FN(peak),
};
