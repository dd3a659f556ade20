/* rope: the tables of sl_spec_rope_*. Everything is computed in double and rounded once to f32, except the angle, which
 * is the f32 product of position and f32 frequency, as every reference computes it. */
#include "stages/compute/spec.h"

#include <math.h>
#include <stdlib.h>

static double yarn_mscale(double factor, double m) {
    return factor <= 1 || m == 0 ? 1.0 : 0.1 * m * log(factor) + 1.0;
}

/* The dimension at which a wave makes `turns` turns over the original context. */
static double yarn_dim(const sl_rope_spec *r, double dim, double turns) {
    return dim * log(r->orig_max / (turns * 2 * M_PI)) / (2 * log(r->theta));
}

static double yarn_factor(const sl_rope_spec *r) {
    if (r->attention_factor != 0) return r->attention_factor;
    if (r->mscale != 0 && r->mscale_all_dim != 0)
        return yarn_mscale(r->factor, r->mscale) / yarn_mscale(r->factor, r->mscale_all_dim);
    return yarn_mscale(r->factor, 1);
}

static void yarn_freqs(const sl_rope_spec *r, int32_t dim, float *inv) {
    double lo = yarn_dim(r, dim, r->beta_fast), hi = yarn_dim(r, dim, r->beta_slow);
    if (r->truncate) {
        lo = floor(lo);
        hi = ceil(hi);
    }
    lo = fmax(lo, 0);
    hi = fmin(hi, dim - 1);
    if (lo == hi) hi += 0.001;
    for (int32_t i = 0; i < dim / 2; i++) {
        double f = pow(r->theta, -2.0 * i / dim), ramp = fmin(fmax((i - lo) / (hi - lo), 0), 1);
        inv[i] = (float)(f / r->factor * ramp + f * (1 - ramp));
    }
}

static double llama3_freq(const sl_rope_spec *r, double f) {
    double wave = 2 * M_PI / f;
    if (wave < r->orig_max / r->high_freq) return f;
    if (wave > r->orig_max / r->low_freq) return f / r->factor;
    double s = (r->orig_max / wave - r->low_freq) / (r->high_freq - r->low_freq);
    return (1 - s) * f / r->factor + s * f;
}

int32_t sl_spec_rope_dim(const sl_spec *s) {
    return s->attn == SL_ATTN_MLA ? s->rope_dim : s->head_dim;
}

int sl_spec_rope_freqs(const sl_spec *s, int which, float *inv, double *factor, sl_err *err) {
    if (which < 0 || which > 1) return sl_err_set(err, SL_EINTERNAL, "rope %d does not exist", which);
    const sl_rope_spec *r = &s->rope[which];
    int32_t dim = sl_spec_rope_dim(s);
    if (!(r->theta > 0) || dim < 2 || dim % 2)
        return sl_err_set(err, SL_ECONFIG, "rope of %d elements with theta %g cannot be computed", dim, r->theta);
    *factor = 1;
    if (r->scaling == SL_ROPESC_YARN) {
        yarn_freqs(r, dim, inv);
        *factor = yarn_factor(r);
    } else {
        for (int32_t i = 0; i < dim / 2; i++) {
            double f = pow(r->theta, -2.0 * i / dim);
            if (r->scaling == SL_ROPESC_LINEAR)
                f /= r->factor;
            else if (r->scaling == SL_ROPESC_LLAMA3)
                f = llama3_freq(r, f);
            inv[i] = (float)f;
        }
    }
    if (r->divide)
        for (int32_t i = 0; i < dim / 2; i++) inv[i] /= r->divide[i];
    return 0;
}

int sl_spec_rope_table(const sl_spec *s, int which, int64_t maxpos, float *out, sl_err *err) {
    int32_t half = sl_spec_rope_dim(s) / 2;
    double factor = 1;
    float *inv = calloc((size_t)(half > 0 ? half : 1), sizeof *inv);
    if (!inv) return sl_err_set(err, SL_ETEMP, "out of memory for %d rope frequencies", half);
    int rc = sl_spec_rope_freqs(s, which, inv, &factor, err);
    for (int64_t pos = 0; pos < maxpos && !rc; pos++)
        for (int32_t i = 0; i < half; i++) {
            float angle = (float)pos * inv[i];
            out[(pos * half + i) * 2] = (float)(cos(angle) * factor);
            out[(pos * half + i) * 2 + 1] = (float)(sin(angle) * factor);
        }
    free(inv);
    return rc;
}
