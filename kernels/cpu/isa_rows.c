#include "kernels/cpu/isa.h"
#include "kernels/cpu/vec.h"
#include "kernels/cpu/isa_rows.h"
#include <math.h>

void FN(sl_row_to_f32)(float *dst, const uint16_t *src, int64_t n) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) vf_store(dst + i, vf_from_bf16(src + i));
    for (; i < n; i++) dst[i] = f_from_bf16(src[i]);
}

void FN(sl_row_to_bf16)(uint16_t *dst, const float *src, int64_t n) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) vf_store_bf16(dst + i, vf_load(src + i));
    for (; i < n; i++) dst[i] = bf16_from_f(src[i]);
}

void FN(sl_row_finish_f32)(float *dst, const float *acc, const float *bias, int64_t n) {
    if (!bias) {
        memcpy(dst, acc, (size_t)n * 4);
        return;
    }
    for (int64_t i = 0; i < n; i++) dst[i] = acc[i] + bias[i];
}

void FN(sl_row_finish_bf16)(uint16_t *dst, const float *acc, const float *bias, int64_t n) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) {
        vf v = vf_load(acc + i);
        vf_store_bf16(dst + i, bias ? v + vf_load(bias + i) : v);
    }
    for (; i < n; i++) dst[i] = bf16_from_f(bias ? acc[i] + bias[i] : acc[i]);
}

float FN(sl_row_softmax_step)(float *s, int32_t n, int32_t lo, int32_t hi, float scale, float *m, float *l) {
    const vf ninf = vf_set(-INFINITY);
    for (int32_t i = 0; i < lo; i++) s[i] = -INFINITY;
    for (int32_t i = hi; i < n; i++) s[i] = -INFINITY;
    vf vm = ninf;
    int32_t i = 0;
    for (; i + VL <= n; i += VL) {
        vf x = vf_load(s + i);
        vm = vf_sel(x > vm, x, vm);
    }
    float mx = vf_hmax(vm);
    for (; i < n; i++) mx = s[i] > mx ? s[i] : mx;
    mx *= scale;
    float old = *m, now = mx > old ? mx : old;
    vf sum = {};
    vf sc = vf_set(scale), sub = vf_set(now);
    for (i = 0; i + VL <= n; i += VL) {
        vf p = vf_exp(vf_load(s + i) * sc - sub);
        vf_store(s + i, p);
        sum += p;
    }
    if (i < n) {
        vf p = vf_exp(act_load_n(s, i, n - i, 0, -INFINITY) * sc - sub);
        act_store_n(s, i, p, n - i, 0);
        sum += p;
    }
    float f = old == now ? 1.0f : expf(old - now); /* -inf before the first block: 0 */
    *l = *l * f + vf_sum(sum);
    *m = now;
    return f;
}

void FN(sl_row_scale_f32)(float *x, float f, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] *= f;
}

void FN(sl_row_axpy_f32)(float *y, const float *x, float f, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] += f * x[i];
}

void FN(sl_row_lse_step)(const float *x, int64_t n, double *m, double *l) {
    float mx = -INFINITY;
    for (int64_t i = 0; i < n; i++) mx = x[i] > mx || x[i] != x[i] ? x[i] : mx;
    double now = (double)mx > *m ? (double)mx : *m, sum = 0;
    vf sub = vf_set((float)now);
    int64_t i = 0;
    for (; i + VL <= n; i += VL) sum += (double)vf_sum(vf_exp(vf_load(x + i) - sub));
    if (i < n) {
        vf p = vf_exp(act_load_n(x, i, n - i, 0, -INFINITY) - sub);
        float t[VL];
        vf_store(t, p);
        for (int64_t j = 0; j < n - i; j++) sum += (double)t[j];
    }
    *l = *l * (*m == now ? 1.0 : exp(*m - now)) + sum;
    *m = now;
}

/* ---- norms --------------------------------------------------------------------------------------------------------
 */

void FN(sl_row_norm)(void *out, const void *x, const float *w, int64_t d, float eps, int kind, int bf) {
    vf s0 = {}, s1 = {};
    int64_t i = 0;
    for (; i + 2 * VL <= d; i += 2 * VL) {
        vf a = act_load(x, i, bf), b = act_load(x, i + VL, bf);
        s0 += a * a;
        s1 += b * b;
    }
    for (; i + VL <= d; i += VL) {
        vf a = act_load(x, i, bf);
        s0 += a * a;
    }
    if (i < d) {
        vf a = act_load_n(x, i, d - i, bf, 0);
        s1 += a * a;
    }
    vf r = vf_set(1.0f / sqrtf(vf_sum(s0 + s1) / (float)d + eps));
    for (i = 0; i < d; i += VL) {
        int64_t n = d - i < VL ? d - i : VL;
        vf v = n == VL ? act_load(x, i, bf) : act_load_n(x, i, n, bf, 0);
        vf g = n == VL ? vf_load(w + i) : act_load_n(w, i, n, 0, 0);
        v *= r;
        if (kind == SL_NORM_LLAMA && bf) v = vf_round_bf16(v);
        v *= kind == SL_NORM_GEMMA ? g + 1.0f : g;
        if (n == VL)
            act_store(out, i, v, bf);
        else
            act_store_n(out, i, v, n, bf);
    }
}

/* ---- gated units --------------------------------------------------------------------------------------------------
 */

INLINE vf sigmoid(vf x) {
    return 1.0f / (1.0f + vf_exp(-x));
}

INLINE vf glu(vf g, vf u, int kind, float limit, int bf) {
    vf a;
    if (kind == SL_GLU_CLAMP) {
        g = vf_min(g, vf_set(limit));
        u = vf_max(vf_min(u, vf_set(limit)), vf_set(-limit));
        return (u + 1.0f) * (g * sigmoid(g * 1.702f));
    }
    if (kind == SL_GLU_SILU) /* exp(-x) overflows to inf for x < -88: x / inf = -0 */
        a = g / (1.0f + vf_exp(-g));
    else /* gelu_tanh(g) = g/2 (1 + tanh y) = g sigmoid(2y), y = sqrt(2/pi) (g + 0.044715 g^3) */
        a = g * sigmoid(1.5957691216057308f * (g + 0.044715f * g * g * g));
    if (bf) a = vf_round_bf16(a);
    return a * u;
}

void FN(sl_row_glu)(void *out, const void *g, const void *u, int64_t n, int kind, float limit, int bf) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) act_store(out, i, glu(act_load(g, i, bf), act_load(u, i, bf), kind, limit, bf), bf);
    if (i < n)
        act_store_n(out, i, glu(act_load_n(g, i, n - i, bf, 0), act_load_n(u, i, n - i, bf, 0), kind, limit, bf), n - i,
                    bf);
}

void FN(sl_row_add)(void *h, const void *a, int64_t n, int bf) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) act_store(h, i, act_load(h, i, bf) + act_load(a, i, bf), bf);
    if (i < n) act_store_n(h, i, act_load_n(h, i, n - i, bf, 0) + act_load_n(a, i, n - i, bf, 0), n - i, bf);
}

void FN(sl_row_scale)(void *x, float f, int64_t n, int bf) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) act_store(x, i, act_load(x, i, bf) * f, bf);
    if (i < n) act_store_n(x, i, act_load_n(x, i, n - i, bf, 0) * f, n - i, bf);
}

/* ---- rope ---------------------------------------------------------------------------------------------------------
 */

void FN(sl_row_rope)(void *x, const float *cs, int32_t half, int kind, int bf) {
    for (int32_t i = 0; i < half; i++) {
        int32_t ia = kind == SL_ROPE_HALF ? i : 2 * i, ib = kind == SL_ROPE_HALF ? i + half : 2 * i + 1;
        float c = cs[2 * i], s = cs[2 * i + 1];
        if (bf) {
            uint16_t *h = x;
            float a = f_from_bf16(h[ia]), b = f_from_bf16(h[ib]);
            h[ia] = bf16_from_f(a * c - b * s);
            h[ib] = bf16_from_f(b * c + a * s);
        } else {
            float *h = x;
            float a = h[ia], b = h[ib];
            h[ia] = a * c - b * s;
            h[ib] = b * c + a * s;
        }
    }
}

/* ---- fingerprint --------------------------------------------------------------------------------------------------
 */

/* Adds the words of `bytes` bytes, the first of which has index `first_word` in its chunk, to *a and *b (ipc/flow.h
 * sum64) and counts elements whose exponent is all ones. */
void FN(sl_row_fingerprint)(const void *x, uint64_t first_word, uint64_t bytes, int bf, uint64_t *a, uint64_t *b,
                            uint32_t *nonfinite) {
    const unsigned char *p = x;
    uint64_t n = bytes / 4, sa = 0, sb = 0;
    uint32_t bad = 0;
    for (uint64_t i = 0; i < n; i++) {
        uint32_t w;
        memcpy(&w, p + 4 * i, 4);
        sa += w;
        sb += (first_word + i + 1) * w;
        if (bf)
            bad += (uint32_t)((w & 0x7f80u) == 0x7f80u) + (uint32_t)((w & 0x7f800000u) == 0x7f800000u);
        else
            bad += (uint32_t)((w & 0x7f800000u) == 0x7f800000u);
    }
    if (bytes & 2) {
        uint16_t h;
        memcpy(&h, p + 4 * n, 2);
        sa += h;
        sb += (first_word + n + 1) * h;
        bad += (uint32_t)((h & 0x7f80u) == 0x7f80u);
    }
    *a += sa;
    *b += sb;
    *nonfinite += bad;
}
