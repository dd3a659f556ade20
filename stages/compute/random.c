#include "stages/compute/random.h"

#include <math.h>
#include <string.h>
#include <xxhash.h>

static uint64_t mix(uint64_t x) { /* a counter-based generator: a bijection with good avalanche */
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}
static uint64_t draw(uint64_t key, uint64_t i) {
    return mix(key + i * UINT64_C(0xd1342543de82ef95));
}
static float uniform(uint64_t x) {
    return (float)(x >> 40) * 0x1p-24f;
}
static float normal(uint64_t x) { /* the sum of four uniforms: bounded tails are as good for a benchmark */
    int32_t s = (int32_t)(x & 0xffff) + (int32_t)(x >> 16 & 0xffff) + (int32_t)(x >> 32 & 0xffff) + (int32_t)(x >> 48);
    return (float)(s - 131070) * (1.7320508f / 65536.0f);
}

static uint16_t to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
static uint16_t to_f16(float f) { /* finite, |f| < 65504 */
    uint16_t sign = f < 0 ? 0x8000 : 0;
    float a = fabsf(f);
    if (a < 0x1p-14f) return (uint16_t)(sign | (uint16_t)lrintf(a * 0x1p24f));
    int e;
    float m = frexpf(a, &e); /* [0.5, 1) */
    return (uint16_t)(sign + ((uint16_t)(e + 14) << 10) + (uint16_t)lrintf((m - 0.5f) * 2048));
}
static void put16(uint8_t *p, uint16_t v) {
    memcpy(p, &v, 2);
}

uint64_t sl_random_key(uint64_t seed, const char *name, int part) {
    return XXH3_64bits_withSeed(name, strlen(name), seed + (uint64_t)part * 0x10001);
}

static float deviation(const sl_want_item *it) {
    return it->role == SL_ROLE_EMBED ? 0.02f : 1.0f / sqrtf((float)it->k);
}

static void floats(sl_wfmt fmt, float dev, uint64_t key, uint64_t first, int64_t n, uint8_t *out) {
    for (int64_t i = 0; i < n; i++) {
        float v = dev * normal(draw(key, first + (uint64_t)i));
        if (fmt == SL_W_F32)
            memcpy(out + 4 * i, &v, 4);
        else
            put16(out + 2 * i, fmt == SL_W_BF16 ? to_bf16(v) : to_f16(v));
    }
}

static void fill_bytes(uint64_t key, uint64_t id, uint8_t *b, size_t n) {
    for (size_t j = 0; j < n; j += 8) {
        uint64_t x = draw(key, id * 64 + j / 8);
        memcpy(b + j, &x, n - j < 8 ? n - j : 8);
    }
}

/* Root mean square of the codes of a GGUF block with its scale 1, and the minimum that centres codes without a sign. */
static const struct {
    float rms, centre;
} codes[SL_W_N] = {
    [SL_W_Q8_0] = {74, 0},        [SL_W_Q4_0] = {4.6f, 0},   [SL_W_Q4_1] = {4.6f, -7.5f}, [SL_W_Q5_0] = {9.2f, 0},
    [SL_W_Q5_1] = {9.2f, -15.5f}, [SL_W_Q4_K] = {255, 7.5f}, [SL_W_Q5_K] = {520, 15.5f},  [SL_W_Q6_K] = {1369, 0},
};
static uint8_t mx_exponent(float dev, uint64_t x) {
    return (uint8_t)(127 + (int)lrintf(log2f(dev / 2.93f)) + (int)(x & 1));
}

static void gguf_block(sl_wfmt fmt, float dev, uint64_t key, uint64_t id, uint8_t *b) {
    size_t n = sl_wfmt_row_bytes(fmt, sl_wfmt_block(fmt));
    fill_bytes(key, id, b, n);
    uint64_t x = draw(~key, id);
    if (fmt == SL_W_MXFP4_GGUF) {
        b[0] = mx_exponent(dev, x);
        return;
    }
    float d = dev / codes[fmt].rms * (0.75f + 0.5f * uniform(x));
    put16(fmt == SL_W_Q6_K ? b + 208 : b, to_f16(d));
    if (codes[fmt].centre != 0) put16(b + 2, to_f16(d * codes[fmt].centre));
}

static void scales(const sl_want_item *it, uint64_t key, int64_t e, int64_t row, uint8_t *out) {
    int64_t span = it->fmt == SL_W_INT4 ? it->group : it->fmt == SL_W_FP8 ? 128 : 32, cols = (it->k + span - 1) / span;
    int64_t rows = it->fmt == SL_W_FP8 ? (it->n + 127) / 128 : it->n, c0 = it->k0 / span,
            c1 = (it->k1 + span - 1) / span;
    for (int64_t c = c0; c < c1; c++) {
        uint64_t x = draw(key, (uint64_t)((e * rows + row) * cols + c));
        float u = 0.75f + 0.5f * uniform(x), v = deviation(it) / 0.75f * u;
        if (it->fmt == SL_W_INT4)
            put16(out + 2 * (c - c0), to_bf16(deviation(it) / 4.6f * u));
        else if (it->fmt == SL_W_FP8)
            memcpy(out + 4 * (c - c0), &v, 4);
        else
            out[c - c0] = mx_exponent(deviation(it), x);
    }
}

void sl_random_row(const sl_want_item *it, uint64_t key, int part, int64_t e, int64_t row, void *dst) {
    uint8_t *out = dst;
    uint64_t first = (uint64_t)((e * it->n + row) * it->k + it->k0);
    int64_t kn = it->k1 - it->k0, block = (int64_t)sl_wfmt_block(it->fmt);
    if (part == SL_PART_SCALE) {
        scales(it, key, e, row, out);
        return;
    }
    switch (it->fmt) {
    case SL_W_F32:
    case SL_W_BF16:
    case SL_W_F16:
        floats(it->fmt, deviation(it), key, first, kn, out);
        break;
    case SL_W_INT4:
        for (int64_t i = 0; i < kn; i += 16) {
            uint64_t x = draw(key, (first + (uint64_t)i) / 16);
            memcpy(out + i / 2, &x, 8);
        }
        break;
    case SL_W_FP8: /* sign, exponent field 4..7, any mantissa: 2^-3 to 1.875 */
        for (int64_t i = 0; i < kn; i++) {
            uint64_t x = draw(key, first + (uint64_t)i);
            out[i] = (uint8_t)((x & 0x80) | 0x20 | (x & 0x1f));
        }
        break;
    case SL_W_MXFP4:
        for (int64_t i = 0; i < kn; i += 32) fill_bytes(key, (first + (uint64_t)i) / 32, out + i / 2, 16);
        break;
    default:
        for (int64_t i = 0; i < kn; i += block)
            gguf_block(it->fmt, deviation(it), key, (first + (uint64_t)i) / (uint64_t)block,
                       out + sl_wfmt_row_bytes(it->fmt, block) * (uint64_t)(i / block));
        break;
    }
}

int sl_random_fill(sl_fill *f, const sl_want_item *it, uint64_t key, int part) {
    int64_t span = 1;
    *f = (sl_fill){.key = key,
                   .dev = deviation(it),
                   .e0 = it->e0,
                   .e_n = it->e1 - it->e0,
                   .full_rows = it->n,
                   .row0 = it->n0,
                   .rows = it->n1 - it->n0};
    if (part == SL_PART_DATA && (it->fmt == SL_W_F32 || it->fmt == SL_W_BF16))
        f->kind = it->fmt == SL_W_F32 ? SL_FILL_F32 : SL_FILL_BF16;
    else if (part == SL_PART_DATA && it->fmt == SL_W_INT4)
        f->kind = SL_FILL_WORDS, span = 16;
    else if (part == SL_PART_SCALE && it->fmt == SL_W_INT4 && it->scale_dtype == SL_BF16)
        f->kind = SL_FILL_SCALE_BF16, span = it->group, f->dev /= 4.6f;
    else
        return 0;
    if (it->k % span || it->k0 % span || it->k1 % span) return 0;
    f->full_units = it->k / span, f->unit0 = it->k0 / span, f->units = (it->k1 - it->k0) / span;
    return 1;
}

float sl_random_vec(const sl_want_item *it, uint64_t key, uint64_t i, float neutral) {
    float g = normal(draw(key, i));
    if (it->role == SL_ROLE_NORM) return neutral + 0.1f * g;
    return it->role == SL_ROLE_SINK ? g : 0.02f * g;
}
