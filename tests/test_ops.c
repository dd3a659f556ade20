/* One op-versus-reference harness for every backend: test_ops BACKEND [THREADS [OPERATION]], BACKEND cpu[:isa], cuda,
 * cuda:plain (dense products by a plain kernel in place of the library, with which a race checker breaks off) or
 * cuda:bare (moreover grouped products in clusters of one block)
 *
 * Each op runs on odd sizes in both activation types; every output is poisoned with NaN before the call and has guard
 * bytes on both sides; results are compared with a plain double-precision formula written here, from the documents, not
 * from the kernels. Exit 0 all passed, 1 something failed (named), 77 the backend or the device is not there. */
#include "kernels/ops.h"
#include "kernels/cpu/cpu.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- harness --------------------------------------------------------------------------------------------------------
 */

enum { GUARD = 256, MAX_BUFS = 64 };

typedef struct {
    void *dev;      /* what the op gets, behind GUARD bytes */
    uint64_t bytes; /* without guards */
    int bf;
} buf;

typedef struct {
    sl_ops *ops;
    int bf;
    const char *label;   /* backend */
    sl_cuda_force force; /* cuda:plain, cuda:bare */
    int checks, fails;
    uint64_t rng;
    buf bufs[MAX_BUFS];
    int n_bufs;
    void *ws; /* workspace, behind nothing */
    sl_err err;
} T_;

#define OK(t, call)                                                                                                    \
    do {                                                                                                               \
        (t)->err.msg[0] = 0;                                                                                           \
        if ((call) != 0) {                                                                                             \
            fprintf(stderr, "%s:%d: %s\n  %s\n", __FILE__, __LINE__, #call, (t)->err.msg);                             \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static void fail(T_ *t, const char *fmt, ...) {
    va_list ap;
    if (t->fails++ > 40) return;
    fprintf(stderr, "FAIL %s %s: ", t->label, t->bf ? "bf16" : "f32");
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
}

static uint32_t rnd(T_ *t) { /* splitmix64 */
    uint64_t z = t->rng += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)((z ^ z >> 31) >> 32);
}
static double uni(T_ *t) { /* (-1, 1) */
    return ((double)rnd(t) + 0.5) / 2147483648.0 - 1.0;
}

static float bf_value(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static uint16_t bf_bits(double d) { /* nearest even, through f32 as every kernel does */
    float f = (float)d;
    uint32_t u;
    memcpy(&u, &f, 4);
    if (isnan(f)) return 0x7fc0;
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
static double bfr(double d) {
    return (double)bf_value(bf_bits(d));
}
static double rn(const T_ *t, double d) { /* to the activation type */
    return t->bf ? bfr(d) : (double)(float)d;
}
static double f16_value(uint16_t h) {
    int e = h >> 10 & 31, m = h & 1023;
    double v = e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
    return h & 0x8000 ? -v : v;
}

/* Poisoned device memory with guards. */
static void *dev_new(T_ *t, uint64_t bytes) {
    void *p;
    uint8_t *host = malloc(bytes + 2 * GUARD);
    if (t->n_bufs == MAX_BUFS || !host) abort();
    OK(t, t->ops->alloc(t->ops->ctx, &p, bytes + 2 * GUARD, "test", &t->err));
    memset(host, 0xff, bytes + 2 * GUARD); /* NaN in bf16 and in f32 */
    memset(host, 0xa5, GUARD);
    memset(host + GUARD + bytes, 0xa5, GUARD);
    OK(t, t->ops->upload(t->ops->ctx, p, host, bytes + 2 * GUARD, &t->err));
    OK(t, t->ops->sync(t->ops->ctx, &t->err));
    free(host);
    t->bufs[t->n_bufs++] = (buf){(uint8_t *)p + GUARD, bytes, 0};
    return (uint8_t *)p + GUARD;
}
static void *dev_put(T_ *t, const void *src, uint64_t bytes) {
    void *p = dev_new(t, bytes);
    OK(t, t->ops->upload(t->ops->ctx, p, src, bytes, &t->err));
    OK(t, t->ops->sync(t->ops->ctx, &t->err));
    return p;
}
static void dev_get(T_ *t, void *dst, const void *src, uint64_t bytes) {
    OK(t, t->ops->download(t->ops->ctx, dst, src, bytes, &t->err));
}
/* Check all guards and free all device memory of the case. */
static void done(T_ *t, const char *what) {
    for (int i = 0; i < t->n_bufs; i++) {
        buf *b = &t->bufs[i];
        uint8_t *h = malloc(b->bytes + 2 * GUARD);
        int bad = 0;
        dev_get(t, h, (uint8_t *)b->dev - GUARD, b->bytes + 2 * GUARD);
        for (int j = 0; j < GUARD; j++) bad |= h[j] != 0xa5 || h[GUARD + b->bytes + (uint64_t)j] != 0xa5;
        if (bad) fail(t, "%s: wrote outside buffer %d of %llu bytes", what, i, (unsigned long long)b->bytes);
        free(h);
        t->ops->free(t->ops->ctx, (uint8_t *)b->dev - GUARD);
    }
    t->n_bufs = 0;
}

static uint64_t esz(const T_ *t) {
    return t->bf ? 2 : 4;
}
/* Upload doubles that are representable in the activation type. */
static void *act_put(T_ *t, const double *x, int64_t n) {
    void *h = malloc((uint64_t)n * 4 + 4), *p;
    for (int64_t i = 0; i < n; i++) {
        if (t->bf)
            ((uint16_t *)h)[i] = bf_bits(x[i]);
        else
            ((float *)h)[i] = (float)x[i];
    }
    p = dev_put(t, h, (uint64_t)n * esz(t));
    free(h);
    return p;
}
static double *act_get(T_ *t, const void *p, int64_t n) {
    void *h = malloc((uint64_t)n * 4 + 4);
    double *x = malloc((uint64_t)n * 8 + 8);
    dev_get(t, h, p, (uint64_t)n * esz(t));
    for (int64_t i = 0; i < n; i++) x[i] = t->bf ? (double)bf_value(((uint16_t *)h)[i]) : (double)((float *)h)[i];
    free(h);
    return x;
}
static double *random_act(T_ *t, int64_t n, double scale) {
    double *x = malloc((uint64_t)n * 8 + 8);
    for (int64_t i = 0; i < n; i++) x[i] = rn(t, uni(t) * scale);
    return x;
}
static float *dev_floats(T_ *t, const double *x, int64_t n) {
    float *h = malloc((uint64_t)n * 4 + 4), *p;
    for (int64_t i = 0; i < n; i++) h[i] = (float)x[i];
    p = dev_put(t, h, (uint64_t)n * 4);
    free(h);
    return p;
}

/* NMSE and largest error in units of the reference's root mean square. bf16 results carry roundings of 2^-9 at each of
 * a few places; `loose` multiplies the limits of ops that round more often inside. */
static void compare(T_ *t, const double *got, const double *ref, int64_t n, double loose, const char *fmt, ...) {
    char what[256];
    va_list ap;
    double se = 0, sr = 0, worst = 0, peak = 0, rms;
    int64_t at = 0;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    t->checks++;
    for (int64_t i = 0; i < n; i++) {
        double d = got[i] - ref[i];
        if (isnan(got[i]) && !isnan(ref[i])) {
            fail(t, "%s: element %lld of %lld was not written or is NaN, expected %g", what, (long long)i, (long long)n,
                 ref[i]);
            return;
        }
        se += d * d;
        sr += ref[i] * ref[i];
        if (fabs(ref[i]) > peak) peak = fabs(ref[i]);
    }
    rms = sqrt(sr / (double)(n ? n : 1)) + 1e-30;
    for (int64_t i = 0; i < n; i++) {
        double d = fabs(got[i] - ref[i]) / (fabs(ref[i]) + rms);
        if (d > worst) worst = d, at = i;
    }
    double lim_nmse = (t->bf ? 8e-6 : 2e-12) * loose * loose, lim_max = (t->bf ? 8e-3 : 5e-6) * loose;
    /* one rounding of the largest element the other way is always allowed: it decides the sum of a small result */
    if (se > lim_nmse * sr + (t->bf ? peak * peak * 0x1p-14 : 0) + 1e-30 || worst > lim_max)
        fail(t, "%s: NMSE %.3g (limit %.3g), worst %.3g (limit %.3g) at %lld of %lld: %.9g, expected %.9g", what,
             sr > 0 ? se / sr : se, lim_nmse, worst, lim_max, (long long)at, (long long)n, got[at], ref[at]);
}

/* ---- weights of every format, and their independent reading
 * ----------------------------------------------------------- */

typedef struct {
    sl_mat m; /* host pointers */
    uint8_t *data, *scale;
    uint32_t *zero;
    uint64_t data_bytes, scale_bytes, zero_bytes;
} wt;

static uint16_t f16_small(T_ *t) { /* a random f16 of magnitude about 2^-4 .. 2^-2, either sign; sometimes subnormal */
    uint32_t r = rnd(t);
    if (r % 29 == 0) return (uint16_t)(r >> 8 & 0x83ff);
    return (uint16_t)((r & 0x8000) | (11 + r % 3) << 10 | (r >> 17 & 1023));
}

/* Random bytes, with the half-precision scales of the block formats made sane. */
static void fill_blocks(T_ *t, wt *w) {
    static const struct {
        sl_wfmt f;
        int bytes, at, n;
    } halves[] = {{SL_W_Q8_0, 34, 0, 1}, {SL_W_Q4_0, 18, 0, 1},  {SL_W_Q4_1, 20, 0, 2},  {SL_W_Q5_0, 22, 0, 1},
                  {SL_W_Q5_1, 24, 0, 2}, {SL_W_Q4_K, 144, 0, 2}, {SL_W_Q5_K, 176, 0, 2}, {SL_W_Q6_K, 210, 208, 1}};
    for (uint64_t i = 0; i < w->data_bytes; i++) w->data[i] = (uint8_t)rnd(t);
    for (size_t h = 0; h < sizeof halves / sizeof *halves; h++) {
        if (halves[h].f != w->m.fmt) continue;
        for (uint64_t b = 0; b + (uint64_t)halves[h].bytes <= w->data_bytes; b += (uint64_t)halves[h].bytes)
            for (int i = 0; i < halves[h].n; i++) {
                uint16_t v = f16_small(t);
                memcpy(w->data + b + (uint64_t)(halves[h].at + 2 * i), &v, 2);
            }
    }
    if (w->m.fmt == SL_W_MXFP4_GGUF)
        for (uint64_t b = 0; b < w->data_bytes; b += 17) w->data[b] = (uint8_t)(120 + rnd(t) % 8);
    if (w->m.fmt == SL_W_FP8)
        for (uint64_t b = 0; b < w->data_bytes; b++)
            if ((w->data[b] & 0x7f) == 0x7f) w->data[b] &= 0xbf;
}

static void fill_plain(T_ *t, wt *w) {
    uint64_t n = (uint64_t)(w->m.n * w->m.k * w->m.count);
    for (uint64_t i = 0; i < n; i++) {
        float f = (float)uni(t);
        if (w->m.fmt == SL_W_F32)
            memcpy(w->data + 4 * i, &f, 4);
        else if (w->m.fmt == SL_W_BF16)
            ((uint16_t *)(void *)w->data)[i] = bf_bits((double)f);
        else
            ((uint16_t *)(void *)w->data)[i] = f16_small(t);
    }
}

typedef struct {
    int group, zero, n_off, k_off, perm_dim;
    sl_dtype scale_dtype;
} wt_opts;

static void fill_scales(T_ *t, wt *w, const wt_opts *o) {
    sl_mat *m = &w->m;
    uint64_t rows = (uint64_t)m->n, cols = (uint64_t)m->k / 32, e = 1;
    if (m->fmt == SL_W_INT4) {
        m->group = o->group;
        m->scale_dtype = o->scale_dtype;
        cols = (uint64_t)((m->k + o->group - 1) / o->group);
        e = o->scale_dtype == SL_F32 ? 4 : 2;
    }
    if (m->fmt == SL_W_FP8) {
        m->n_off = o->n_off;
        m->k_off = o->k_off;
        rows = (uint64_t)(o->n_off + m->n + 127) / 128;
        cols = (uint64_t)(o->k_off + m->k + 127) / 128;
        e = 4;
    }
    m->scale_row = cols + 1; /* one to spare: a slice of a wider matrix */
    m->scale_stride = rows * m->scale_row * e;
    w->scale_bytes = m->scale_stride * (uint64_t)m->count;
    m->scale = w->scale = malloc(w->scale_bytes);
    for (uint64_t i = 0; i < w->scale_bytes / e; i++) {
        float f = (float)(uni(t) * 0.1);
        uint16_t h = m->scale_dtype == SL_F16 ? f16_small(t) : bf_bits((double)f);
        if (e == 4)
            memcpy(w->scale + 4 * i, &f, 4);
        else if (e == 2)
            memcpy(w->scale + 2 * i, &h, 2);
        else
            w->scale[i] = (uint8_t)(120 + rnd(t) % 8);
    }
    if (m->fmt == SL_W_INT4 && o->zero) {
        w->zero_bytes = (uint64_t)m->count * ((uint64_t)m->n + 7) / 8 * m->scale_row * 4;
        m->zero = w->zero = malloc(w->zero_bytes);
        for (uint64_t i = 0; i < w->zero_bytes / 4; i++) w->zero[i] = rnd(t);
    }
}

static wt make_wt(T_ *t, sl_wfmt f, int64_t count, int64_t n, int64_t k, const wt_opts *o) {
    static const wt_opts none = {.group = 32, .scale_dtype = SL_BF16};
    wt w = {0};
    if (!o) o = &none;
    w.m = (sl_mat){.fmt = f, .n = n, .k = k, .count = count, .row_bytes = sl_wfmt_row_bytes(f, k)};
    w.m.stride = (uint64_t)n * w.m.row_bytes;
    w.data_bytes = w.m.stride * (uint64_t)count;
    w.m.data = w.data = malloc(w.data_bytes + 4);
    if (o->perm_dim) {
        w.m.row_perm = 1;
        w.m.perm_dim = o->perm_dim;
    }
    if (f <= SL_W_F16)
        fill_plain(t, &w);
    else
        fill_blocks(t, &w);
    if (f == SL_W_INT4 || f == SL_W_FP8 || f == SL_W_MXFP4) fill_scales(t, &w, o);
    return w;
}

static sl_mat dev_wt(T_ *t, const wt *w) {
    sl_mat m = w->m;
    m.data = dev_put(t, w->data, w->data_bytes);
    if (w->scale) m.scale = dev_put(t, w->scale, w->scale_bytes);
    if (w->zero) m.zero = dev_put(t, w->zero, w->zero_bytes);
    return m;
}
static void free_wt(wt *w) {
    free(w->data);
    free(w->scale);
    free(w->zero);
}

static double e2m1(int q) {
    int e = q >> 1 & 3, m = q & 1;
    double v = e ? ldexp(2 + m, e - 2) : m * 0.5;
    return q & 8 ? -v : v;
}
static double e4m3(int b) {
    int e = b >> 3 & 15, m = b & 7;
    double v = e ? ldexp(8 + m, e - 10) : ldexp(m, -9);
    return b & 0x80 ? -v : v;
}
static int get16(const uint8_t *p) {
    return p[0] + 256 * p[1];
}

/* Element c of a K-quant row: superblock of 256, element i of it. Bit fields read one by one. */
static double k_quant(const sl_mat *m, const uint8_t *row, int64_t c) {
    int i = (int)(c % 256), sub = i / 32, j = i % 32;
    if (m->fmt == SL_W_Q6_K) {
        const uint8_t *b = row + c / 256 * 210;
        int half = i / 128, q = i % 128, quarter = q / 32, l = q % 32;
        int lo = b[64 * half + (quarter & 1) * 32 + l] >> (quarter >= 2 ? 4 : 0) & 15;
        int hi = b[128 + 32 * half + l] >> (2 * quarter) & 3;
        int sc = (int8_t)b[192 + 8 * half + 2 * quarter + l / 16];
        return f16_value((uint16_t)get16(b + 208)) * sc * (lo + 16 * hi - 32);
    }
    int five = m->fmt == SL_W_Q5_K;
    const uint8_t *b = row + c / 256 * (five ? 176 : 144), *s = b + 4;
    const uint8_t *qs = b + (five ? 48 : 16) + sub / 2 * 32;
    int sc = sub < 4 ? s[sub] % 64 : s[sub + 4] % 16 + s[sub - 4] / 64 * 16;
    int mn = sub < 4 ? s[sub + 4] % 64 : s[sub + 4] / 16 + s[sub] / 64 * 16;
    int q = sub % 2 ? qs[j] / 16 : qs[j] % 16;
    if (five && b[16 + j] >> sub & 1) q += 16;
    return f16_value((uint16_t)get16(b)) * sc * q - f16_value((uint16_t)get16(b + 2)) * mn;
}

static double block32(const sl_mat *m, const uint8_t *row, int64_t c) {
    int i = (int)(c % 32);
    const uint8_t *b;
    int nib, bit;
    switch (m->fmt) {
    case SL_W_Q8_0:
        b = row + c / 32 * 34;
        return f16_value((uint16_t)get16(b)) * (int8_t)b[2 + i];
    case SL_W_Q4_0:
        b = row + c / 32 * 18;
        nib = i < 16 ? b[2 + i] % 16 : b[2 + i - 16] / 16;
        return f16_value((uint16_t)get16(b)) * (nib - 8);
    case SL_W_Q4_1:
        b = row + c / 32 * 20;
        nib = i < 16 ? b[4 + i] % 16 : b[4 + i - 16] / 16;
        return f16_value((uint16_t)get16(b)) * nib + f16_value((uint16_t)get16(b + 2));
    case SL_W_Q5_0:
        b = row + c / 32 * 22;
        nib = i < 16 ? b[6 + i] % 16 : b[6 + i - 16] / 16;
        bit = b[2 + i / 8] >> i % 8 & 1;
        return f16_value((uint16_t)get16(b)) * (nib + 16 * bit - 16);
    case SL_W_Q5_1:
        b = row + c / 32 * 24;
        nib = i < 16 ? b[8 + i] % 16 : b[8 + i - 16] / 16;
        bit = b[4 + i / 8] >> i % 8 & 1;
        return f16_value((uint16_t)get16(b)) * (nib + 16 * bit) + f16_value((uint16_t)get16(b + 2));
    default: /* MXFP4_GGUF */
        b = row + c / 32 * 17;
        return e2m1(i < 16 ? b[1 + i] % 16 : b[1 + i - 16] / 16) * ldexp(1, b[0] - 127);
    }
}

static double scale_of(const wt *w, int64_t e, uint64_t i) {
    const uint8_t *p = w->scale + (uint64_t)e * w->m.scale_stride;
    float f;
    if (w->m.fmt == SL_W_FP8 || w->m.scale_dtype == SL_F32) {
        memcpy(&f, p + 4 * i, 4);
        return (double)f;
    }
    return w->m.scale_dtype == SL_F16 ? f16_value((uint16_t)get16(p + 2 * i))
                                      : (double)bf_value((uint16_t)get16(p + 2 * i));
}

/* Value of logical row r, column c of matrix e. */
static double wval(const wt *w, int64_t e, int64_t r, int64_t c) {
    const sl_mat *m = &w->m;
    if (m->row_perm) {
        int64_t d = m->perm_dim, i = r % d;
        r = r / d * d + (i < d / 2 ? 2 * i : 2 * i + 1 - d);
    }
    const uint8_t *row = w->data + (uint64_t)e * m->stride + (uint64_t)r * m->row_bytes;
    float f;
    int q;
    switch (m->fmt) {
    case SL_W_F32:
        memcpy(&f, row + 4 * c, 4);
        return (double)f;
    case SL_W_BF16:
        return (double)bf_value((uint16_t)get16(row + 2 * c));
    case SL_W_F16:
        return f16_value((uint16_t)get16(row + 2 * c));
    case SL_W_INT4:
        q = row[c / 2] >> (c % 2 * 4) & 15;
        q -= w->zero ? (int)(w->zero[((uint64_t)e * ((uint64_t)m->n + 7) / 8 + (uint64_t)r / 8) * m->scale_row +
                                     (uint64_t)(c / m->group)] >>
                                 (r % 8 * 4) &
                             15)
                     : 8;
        return q * scale_of(w, e, (uint64_t)r * m->scale_row + (uint64_t)(c / m->group));
    case SL_W_FP8:
        return e4m3(row[c]) *
               scale_of(w, e, (uint64_t)((r + m->n_off) / 128) * m->scale_row + (uint64_t)((c + m->k_off) / 128));
    case SL_W_MXFP4:
        q = row[c / 2] >> (c % 2 * 4) & 15;
        return e2m1(q) *
               ldexp(1,
                     w->scale[(uint64_t)e * m->scale_stride + (uint64_t)r * m->scale_row + (uint64_t)(c / 32)] - 127);
    case SL_W_Q4_K:
    case SL_W_Q5_K:
    case SL_W_Q6_K:
        return k_quant(m, row, c);
    default:
        return block32(m, row, c);
    }
}

/* The value that a product with activations of this type sees. */
static double wact(const T_ *t, const wt *w, int64_t e, int64_t r, int64_t c) {
    double v = wval(w, e, r, c);
    return t->bf ? bfr(v) : v;
}

/* ---- formats
 * ---------------------------------------------------------------------------------------------------------- */

static void test_formats(T_ *t) {
    static const struct {
        sl_wfmt f;
        int64_t k, bytes;
    } rows[] = {{SL_W_F32, 7, 28},   {SL_W_BF16, 7, 14},        {SL_W_F16, 3, 6},      {SL_W_INT4, 64, 32},
                {SL_W_INT4, 63, 0},  {SL_W_FP8, 5, 5},          {SL_W_MXFP4, 64, 32},  {SL_W_MXFP4, 48, 0},
                {SL_W_Q8_0, 64, 68}, {SL_W_Q4_0, 64, 36},       {SL_W_Q4_1, 64, 40},   {SL_W_Q5_0, 64, 44},
                {SL_W_Q5_1, 64, 48}, {SL_W_Q4_K, 512, 288},     {SL_W_Q5_K, 256, 176}, {SL_W_Q6_K, 256, 210},
                {SL_W_Q6_K, 128, 0}, {SL_W_MXFP4_GGUF, 32, 17}, {SL_W_N, 32, 0},       {SL_W_BF16, 0, 0}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        t->checks++;
        if (sl_wfmt_row_bytes(rows[i].f, rows[i].k) != (uint64_t)rows[i].bytes)
            fail(t, "row of %lld %s: %llu bytes, expected %lld", (long long)rows[i].k, sl_wfmt_name(rows[i].f),
                 (unsigned long long)sl_wfmt_row_bytes(rows[i].f, rows[i].k), (long long)rows[i].bytes);
    }
}

/* embed reads single rows: the value of every element of every format, to the last bit where the format defines one. */
static void test_embed_one(T_ *t, sl_wfmt f, int64_t n, int64_t k, const wt_opts *o, double scale) {
    wt w = make_wt(t, f, 1, n, k, o);
    sl_mat m = dev_wt(t, &w);
    int32_t ids[19];
    double *ref = malloc((uint64_t)(19 * k) * 8), s = t->bf ? bfr(scale) : (double)(float)scale;
    for (int i = 0; i < 19; i++) {
        ids[i] = i == 0 ? 0 : i == 1 ? (int32_t)n - 1 : (int32_t)(rnd(t) % (uint32_t)n);
        for (int64_t c = 0; c < k; c++) ref[i * k + c] = rn(t, wact(t, &w, 0, ids[i], c) * s);
    }
    void *out = dev_new(t, (uint64_t)(19 * k) * esz(t)), *di = dev_put(t, ids, sizeof ids);
    OK(t, t->ops->embed(t->ops->ctx, out, di, 19, &m, (float)scale, &t->err));
    double *got = act_get(t, out, 19 * k);
    t->checks++;
    for (int64_t i = 0; i < 19 * k; i++) {
        /* affine block formats add two products: the two roundings may fuse */
        int exact = f != SL_W_Q4_1 && f != SL_W_Q5_1 && f != SL_W_Q4_K && f != SL_W_Q5_K && f != SL_W_Q6_K;
        double tol = exact ? 0 : t->bf ? 0.008 * fabs(ref[i]) + 1e-6 : 4e-7 * (fabs(ref[i]) + 1);
        if (!(fabs(got[i] - ref[i]) <= tol)) {
            fail(t, "embed %s [%lld, %lld]: row %d element %lld is %.9g, expected %.9g", sl_wfmt_name(f), (long long)n,
                 (long long)k, ids[i / k], (long long)(i % k), got[i], ref[i]);
            break;
        }
    }
    free(ref);
    free(got);
    free_wt(&w);
    done(t, "embed");
}

static int64_t k_for(sl_wfmt f, int64_t want) {
    int64_t b = sl_wfmt_block(f);
    return (want + b - 1) / b * b;
}

static const wt_opts int4_cases[] = {{.group = 32, .scale_dtype = SL_BF16},
                                     {.group = 128, .scale_dtype = SL_BF16},
                                     {.group = 24, .scale_dtype = SL_F16},
                                     {.group = 32, .zero = 1, .scale_dtype = SL_BF16},
                                     {.group = 1 << 20, .zero = 1, .scale_dtype = SL_F32}};
static const wt_opts fp8_cases[] = {{0}, {.n_off = 100, .k_off = 64}, {.n_off = 127, .k_off = 127}};

static void test_embed(T_ *t) {
    for (int f = 0; f < SL_W_N; f++) test_embed_one(t, (sl_wfmt)f, 40, k_for((sl_wfmt)f, 37), NULL, 1);
    for (int f = 0; f < SL_W_N; f++) test_embed_one(t, (sl_wfmt)f, 24, k_for((sl_wfmt)f, 2300), NULL, 1);
    for (size_t i = 0; i < sizeof int4_cases / sizeof *int4_cases; i++)
        test_embed_one(t, SL_W_INT4, 37, 360, &int4_cases[i], 1);
    for (size_t i = 0; i < sizeof fp8_cases / sizeof *fp8_cases; i++)
        test_embed_one(t, SL_W_FP8, 200, 301, &fp8_cases[i], 1);
    test_embed_one(t, SL_W_Q8_0, 64, 64, &(wt_opts){.perm_dim = 16}, 1);
    test_embed_one(t, SL_W_BF16, 96, 33, &(wt_opts){.perm_dim = 32}, 1);
    test_embed_one(t, SL_W_BF16, 50, 640, NULL, sqrt(640));
    /* an id outside the table is refused */
    wt w = make_wt(t, SL_W_BF16, 1, 10, 8, NULL);
    sl_mat m = dev_wt(t, &w);
    int32_t bad[2] = {3, 10};
    if (!strcmp(t->ops->name, "cpu")) {
        t->checks++;
        if (t->ops->embed(t->ops->ctx, dev_new(t, 64), dev_put(t, bad, 8), 2, &m, 1, &t->err) != SL_EDATA)
            fail(t, "embed took an id outside the table");
    }
    free_wt(&w);
    done(t, "embed bad id");
}

/* ---- linear
 * ----------------------------------------------------------------------------------------------------------- */

static sl_mat prepared(T_ *t, const sl_mat *m) {
    sl_mat p;
    uint64_t need = t->ops->prepare_bytes(t->ops->ctx, m);
    OK(t, t->ops->prepare(t->ops->ctx, &p, m, need ? dev_new(t, need) : NULL, &t->err));
    return p;
}

static void test_linear_one(T_ *t, sl_wfmt f, int64_t T, int64_t n, int64_t k, const wt_opts *o, int bias) {
    wt w = make_wt(t, f, 1, n, k, o);
    sl_mat dm = dev_wt(t, &w), m = prepared(t, &dm);
    int64_t xs = k + 5, os = n + 3;
    double *x = random_act(t, T * xs, 1), *b = malloc((uint64_t)n * 8), *ref = malloc((uint64_t)(T * n) * 8);
    double *wv = malloc((uint64_t)k * 8), *got, *g2;
    for (int64_t i = 0; i < n; i++) b[i] = (double)(float)uni(t);
    for (int64_t r = 0; r < n; r++) {
        for (int64_t c = 0; c < k; c++) wv[c] = wact(t, &w, 0, r, c);
        for (int64_t i = 0; i < T; i++) {
            double s = bias ? b[r] : 0;
            for (int64_t c = 0; c < k; c++) s += x[i * xs + c] * wv[c];
            ref[i * n + r] = rn(t, s);
        }
    }
    void *dx = act_put(t, x, T * xs), *out = dev_new(t, (uint64_t)(T * os) * esz(t));
    float *db = bias ? dev_floats(t, b, n) : NULL;
    OK(t, t->ops->linear(t->ops->ctx, out, os, dx, xs, T, &m, db, &t->err));
    got = act_get(t, out, T * os);
    for (int64_t i = 0; i < T; i++) {
        for (int64_t c = n; c < os; c++)
            if (!isnan(got[i * os + c]) && i < T - 1) {
                fail(t, "linear wrote between its rows");
                i = T;
                break;
            }
        if (i < T) memmove(got + i * n, got + i * os, (uint64_t)n * 8);
    }
    compare(t, got, ref, T * n, 1, "linear %s T %lld n %lld k %lld", sl_wfmt_name(f), (long long)T, (long long)n,
            (long long)k);
    /* a row's result does not depend on the rows around it (CUDA: cuBLASLt chooses by the number of rows, so there it
     * may) */
    if (T > 2 && !strcmp(t->ops->name, "cpu")) {
        void *one = dev_new(t, (uint64_t)n * esz(t));
        int64_t r = T * 2 / 3;
        OK(t, t->ops->linear(t->ops->ctx, one, n, (uint8_t *)dx + (uint64_t)(r * xs) * esz(t), xs, 1, &m, db, &t->err));
        g2 = act_get(t, one, n);
        t->checks++;
        if (memcmp(g2, got + r * n, (uint64_t)n * 8))
            fail(t, "linear %s T %lld n %lld k %lld: row %lld alone differs in its bits", sl_wfmt_name(f), (long long)T,
                 (long long)n, (long long)k, (long long)r);
        free(g2);
    }
    free(x), free(b), free(ref), free(wv), free(got);
    free_wt(&w);
    done(t, "linear");
}

static void test_linear(T_ *t) {
    static const int64_t sizes[][3] = {{1, 1, 1},      {1, 33, 37},  {3, 17, 64},
                                       {17, 100, 130}, {13, 64, 96}, {61, 70, 257}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int f = 0; f < 3; f++)
            test_linear_one(t, (sl_wfmt)f, sizes[i][0], sizes[i][1], sizes[i][2], NULL, (int)i & 1);
    for (int f = 3; f < SL_W_N; f++) {
        test_linear_one(t, (sl_wfmt)f, 17, 45, k_for((sl_wfmt)f, 200), NULL, 0);
        test_linear_one(t, (sl_wfmt)f, 1, 32, k_for((sl_wfmt)f, 2304), NULL, 1);
    }
    test_linear_one(t, SL_W_BF16, 5, 200, 2049, NULL, 0); /* k cut, the last piece one element */
    test_linear_one(t, SL_W_Q4_K, 3, 600, 4608, NULL, 0);
    test_linear_one(t, SL_W_BF16, 1000, 40, 2112, NULL, 1); /* more rows than a block when k is cut */
    test_linear_one(t, SL_W_BF16, 4, 1100, 576, NULL, 0);   /* more columns than a block */
    for (size_t i = 0; i < sizeof int4_cases / sizeof *int4_cases; i++)
        test_linear_one(t, SL_W_INT4, 7, 50, 2640, &int4_cases[i], 0);
    for (size_t i = 0; i < sizeof fp8_cases / sizeof *fp8_cases; i++)
        test_linear_one(t, SL_W_FP8, 7, 200, 2301, &fp8_cases[i], 0);
    test_linear_one(t, SL_W_Q8_0, 5, 128, 64, &(wt_opts){.perm_dim = 64}, 0);
    test_linear_one(t, SL_W_BF16, 5, 96, 48, &(wt_opts){.perm_dim = 32}, 1);
}

/* out = round(out + x * W^T), once: also the first time, when the backend may try several ways of doing it. */
static void test_linear_add_one(T_ *t, int64_t T, int64_t n, int64_t k, int64_t gap) {
    wt w = make_wt(t, SL_W_BF16, 1, n, k, NULL);
    sl_mat dm = dev_wt(t, &w), m = prepared(t, &dm);
    int64_t xs = k + gap, os = n + gap;
    double *x = random_act(t, T * xs, 1), *h = random_act(t, T * os, 8), *ref = malloc((uint64_t)(T * os) * 8);
    double *wv = malloc((uint64_t)k * 8), *got[2];
    memcpy(ref, h, (uint64_t)(T * os) * 8);
    for (int64_t r = 0; r < n; r++) {
        for (int64_t c = 0; c < k; c++) wv[c] = wact(t, &w, 0, r, c);
        for (int64_t i = 0; i < T; i++) {
            double s = h[i * os + r];
            for (int64_t c = 0; c < k; c++) s += x[i * xs + c] * wv[c];
            ref[i * os + r] = rn(t, s);
        }
    }
    void *dx = act_put(t, x, T * xs);
    for (int i = 0; i < 2; i++) {
        void *out = act_put(t, h, T * os);
        if (t->ops->linear_add) {
            OK(t, t->ops->linear_add(t->ops->ctx, out, os, dx, xs, T, &m, &t->err));
        } else { /* what a caller does instead: one rounding more */
            void *part = dev_new(t, (uint64_t)(T * os) * esz(t));
            OK(t, t->ops->linear(t->ops->ctx, part, os, dx, xs, T, &m, NULL, &t->err));
            for (int64_t r = 0; r < T; r++) {
                uint64_t at = (uint64_t)(r * os) * esz(t);
                OK(t, t->ops->add(t->ops->ctx, (uint8_t *)out + at, (uint8_t *)part + at, n, &t->err));
            }
        }
        got[i] = act_get(t, out, T * os);
    }
    compare(t, got[0], ref, T * os, t->ops->linear_add ? 1 : 1.5, "linear_add T %lld n %lld k %lld", (long long)T,
            (long long)n, (long long)k);
    t->checks++;
    if (memcmp(got[0], got[1], (uint64_t)(T * os) * 8))
        fail(t, "linear_add T %lld n %lld k %lld: the second call gives other bits", (long long)T, (long long)n,
             (long long)k);
    free(x), free(h), free(ref), free(wv), free(got[0]), free(got[1]);
    free_wt(&w);
    done(t, "linear_add");
}

static void test_linear_add(T_ *t) {
    test_linear_add_one(t, 1, 1, 1, 0);
    test_linear_add_one(t, 3, 17, 37, 5);
    test_linear_add_one(t, 13, 64, 96, 0);
    test_linear_add_one(t, 33, 72, 264, 8);
    test_linear_add_one(t, 300, 512, 256, 0);
}

/* ---- row ops
 * ----------------------------------------------------------------------------------------------------------- */

static void test_norm_one(T_ *t, int64_t T, int64_t groups, int64_t d, int kind, double scale) {
    int64_t xs = groups * d + 3, os = groups * d + 1;
    double *x = random_act(t, T * xs, scale), *w = malloc((uint64_t)d * 8), *ref = malloc((uint64_t)(T * os) * 8);
    for (int64_t i = 0; i < d; i++) w[i] = bfr(uni(t) + 0.5);
    for (int64_t i = 0; i < T * os; i++) ref[i] = 0;
    for (int64_t r = 0; r < T * groups; r++) {
        const double *p = x + r / groups * xs + r % groups * d;
        double s = 0;
        for (int64_t i = 0; i < d; i++) s += p[i] * p[i];
        s = 1 / sqrt(s / (double)d + (double)1e-5f);
        for (int64_t i = 0; i < d; i++) {
            double y = p[i] * s;
            if (kind == SL_NORM_LLAMA && t->bf) y = bfr(y);
            ref[r / groups * os + r % groups * d + i] = rn(t, kind == SL_NORM_GEMMA ? y * (1 + w[i]) : y * w[i]);
        }
    }
    void *out = dev_new(t, (uint64_t)(T * os) * esz(t)), *dx = act_put(t, x, T * xs);
    float *dw = dev_floats(t, w, d);
    OK(t, t->ops->rmsnorm(t->ops->ctx, out, os, dx, xs, T, groups, d, dw, 1e-5f, (sl_norm_kind)kind, &t->err));
    double *got = act_get(t, out, T * os);
    for (int64_t i = 0; i < T; i++)
        if (isnan(got[i * os + os - 1])) got[i * os + os - 1] = 0; /* the gap stays poisoned */
    compare(t, got, ref, T * os, 1, "rmsnorm kind %d T %lld groups %lld d %lld", kind, (long long)T, (long long)groups,
            (long long)d);
    /* in place */
    OK(t, t->ops->rmsnorm(t->ops->ctx, dx, xs, dx, xs, T, groups, d, dw, 1e-5f, (sl_norm_kind)kind, &t->err));
    double *in = act_get(t, dx, T * xs);
    t->checks++;
    for (int64_t r = 0; r < T; r++)
        for (int64_t i = 0; i < groups * d; i++)
            if (in[r * xs + i] != got[r * os + i]) {
                fail(t, "rmsnorm in place differs");
                r = T;
                break;
            }
    free(x), free(w), free(ref), free(got), free(in);
    done(t, "rmsnorm");
}

static void test_norm(T_ *t) {
    for (int kind = 0; kind < 3; kind++) {
        test_norm_one(t, 1, 1, 576, kind, 3);
        test_norm_one(t, 3, 1, 37, kind, 1);
        test_norm_one(t, 17, 5, 64, kind, 50);
        test_norm_one(t, 4, 2, 7, kind, 0.01);
    }
}

/* add and rmsnorm, in one call or in two. */
static void add_norm(T_ *t, int fused, void *h, void *part, void *out, int64_t T, int64_t d, const float *w,
                     sl_norm_kind kind) {
    if (fused) {
        OK(t, t->ops->add_norm(t->ops->ctx, h, part, out, T, d, w, 1e-5f, kind, &t->err));
        return;
    }
    OK(t, t->ops->add(t->ops->ctx, h, part, T * d, &t->err));
    OK(t, t->ops->rmsnorm(t->ops->ctx, out, d, h, d, T, 1, d, w, 1e-5f, kind, &t->err));
}

static void test_add_norm_one(T_ *t, int64_t T, int64_t d, int kind, int into_part) {
    int64_t n = T * d;
    double *a = random_act(t, n, 3), *b = random_act(t, n, 2), *w = malloc((uint64_t)d * 8);
    double *sum = malloc((uint64_t)n * 8), *ref = malloc((uint64_t)n * 8), *got[4];
    for (int64_t i = 0; i < d; i++) w[i] = bfr(uni(t) + 0.5);
    for (int64_t i = 0; i < n; i++) sum[i] = rn(t, a[i] + b[i]);
    for (int64_t r = 0; r < T; r++) {
        double s = 0;
        for (int64_t i = 0; i < d; i++) s += sum[r * d + i] * sum[r * d + i];
        s = 1 / sqrt(s / (double)d + (double)1e-5f);
        for (int64_t i = 0; i < d; i++) {
            double y = sum[r * d + i] * s;
            if (kind == SL_NORM_LLAMA && t->bf) y = bfr(y);
            ref[r * d + i] = rn(t, kind == SL_NORM_GEMMA ? y * (1 + w[i]) : y * w[i]);
        }
    }
    float *dw = dev_floats(t, w, d);
    for (int fused = 0; fused < 2; fused++) { /* a backend without the operation passes with the two calls alone */
        void *h = act_put(t, a, n), *part = act_put(t, b, n);
        void *out = into_part ? part : dev_new(t, (uint64_t)n * esz(t));
        add_norm(t, fused && t->ops->add_norm, h, part, out, T, d, dw, (sl_norm_kind)kind);
        got[2 * fused] = act_get(t, h, n);
        got[2 * fused + 1] = act_get(t, out, n);
        compare(t, got[2 * fused], sum, n, 0.2, "add_norm, sum, T %lld d %lld", (long long)T, (long long)d);
        compare(t, got[2 * fused + 1], ref, n, 1, "add_norm kind %d T %lld d %lld", kind, (long long)T, (long long)d);
    }
    t->checks++;
    if (memcmp(got[0], got[2], (uint64_t)n * 8) || memcmp(got[1], got[3], (uint64_t)n * 8))
        fail(t, "add_norm kind %d T %lld d %lld: other bits than add and rmsnorm", kind, (long long)T, (long long)d);
    free(a), free(b), free(w), free(sum), free(ref);
    for (int i = 0; i < 4; i++) free(got[i]);
    done(t, "add_norm");
}

static void test_add_norm(T_ *t) {
    static const int64_t d[] = {8, 37, 512, 576, 1029, 2048, 2056, 4096, 7168, 8200, 16384, 16392};
    for (int kind = 0; kind < 3; kind++)
        for (size_t i = 0; i < sizeof d / sizeof *d; i++) test_add_norm_one(t, i % 3 ? 5 : 1, d[i], kind, (int)i & 1);
}

static void test_add_glu(T_ *t) {
    static const int64_t sizes[][2] = {{1, 1}, {3, 33}, {17, 576}, {5, 1029}};
    for (size_t s = 0; s < 4; s++) {
        int64_t T = sizes[s][0], I = sizes[s][1], n = T * I, gs = I + 2, us = I + 7;
        double *a = random_act(t, n, 4), *b = random_act(t, n, 4), *ref = malloc((uint64_t)n * 8), *got;
        void *h = act_put(t, a, n);
        for (int64_t i = 0; i < n; i++) ref[i] = rn(t, a[i] + b[i]);
        OK(t, t->ops->add(t->ops->ctx, h, act_put(t, b, n), n, &t->err));
        got = act_get(t, h, n);
        compare(t, got, ref, n, 0.2, "add %lld", (long long)n);
        free(a), free(b), free(got);
        for (int kind = 0; kind < 3; kind++) {
            double *g = random_act(t, T * gs, kind == SL_GLU_CLAMP ? 12 : 6), *u = random_act(t, T * us, 9);
            g[0] = rn(t, -120), u[0] = rn(t, 3);
            for (int64_t i = 0; i < n; i++) {
                double x = g[i / I * gs + i % I], y = u[i / I * us + i % I], act;
                if (kind == SL_GLU_CLAMP) {
                    x = x > 7 ? 7 : x;
                    y = y > 7 ? 7 : y < -7 ? -7 : y;
                    ref[i] = rn(t, (y + 1) * x / (1 + exp(-1.702 * x)));
                    continue;
                }
                act = kind == SL_GLU_SILU ? x / (1 + exp(-x))
                                          : 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
                ref[i] = rn(t, (t->bf ? bfr(act) : act) * y);
            }
            void *out = dev_new(t, (uint64_t)n * esz(t));
            OK(t, t->ops->glu(t->ops->ctx, out, act_put(t, g, T * gs), gs, act_put(t, u, T * us), us, T, I,
                              (sl_glu_kind)kind, 7.0f, &t->err));
            got = act_get(t, out, n);
            compare(t, got, ref, n, 1, "glu kind %d T %lld I %lld", kind, (long long)T, (long long)I);
            free(g), free(u), free(got);
        }
        free(ref);
        done(t, "add, glu");
    }
}

static void test_rope_one(T_ *t, int64_t T, int32_t heads, int64_t hs, int32_t off, int32_t dim, int kind) {
    int64_t stride = heads * hs + 2, maxpos = 40;
    double *x = random_act(t, T * stride, 2), *cs = malloc((uint64_t)(maxpos * dim) * 8),
           *ref = malloc((uint64_t)(T * stride) * 8);
    int32_t *pos = malloc((uint64_t)T * 4);
    for (int64_t p = 0; p < maxpos; p++)
        for (int i = 0; i < dim / 2; i++) {
            double ang = (double)p * pow(10000, -2.0 * i / dim);
            cs[p * dim + 2 * i] = (double)(float)cos(ang);
            cs[p * dim + 2 * i + 1] = (double)(float)sin(ang);
        }
    memcpy(ref, x, (uint64_t)(T * stride) * 8);
    for (int64_t r = 0; r < T; r++) {
        pos[r] = (int32_t)(rnd(t) % (uint32_t)maxpos);
        for (int h = 0; h < heads; h++)
            for (int i = 0; i < dim / 2; i++) {
                int64_t base = r * stride + h * hs + off;
                int64_t ia = base + (kind == SL_ROPE_HALF ? i : 2 * i),
                        ib = base + (kind == SL_ROPE_HALF ? i + dim / 2 : 2 * i + 1);
                double c = cs[pos[r] * dim + 2 * i], s = cs[pos[r] * dim + 2 * i + 1];
                ref[ia] = rn(t, x[ia] * c - x[ib] * s);
                ref[ib] = rn(t, x[ib] * c + x[ia] * s);
            }
    }
    void *dx = act_put(t, x, T * stride);
    OK(t, t->ops->rope(t->ops->ctx, dx, stride, T, heads, hs, off, dim, dev_floats(t, cs, maxpos * dim),
                       dev_put(t, pos, (uint64_t)T * 4), (sl_rope_kind)kind, &t->err));
    double *got = act_get(t, dx, T * stride);
    compare(t, got, ref, T * stride, 1, "rope kind %d T %lld heads %d dim %d", kind, (long long)T, heads, dim);
    free(x), free(cs), free(ref), free(pos), free(got);
    done(t, "rope");
}

static void test_rope(T_ *t) {
    for (int kind = 0; kind < 2; kind++) {
        test_rope_one(t, 1, 1, 64, 0, 64, kind);
        test_rope_one(t, 17, 3, 64, 0, 64, kind);
        test_rope_one(t, 5, 4, 192, 128, 64, kind); /* MLA queries */
        test_rope_one(t, 3, 1, 64, 0, 6, kind);
        test_rope_one(t, 9, 2, 40, 0, 40, kind);
    }
    /* mla_k: pieces in their places */
    int64_t T = 7, heads = 3, nope = 16, rope = 8, v = 12, pes = 20;
    double *kv = random_act(t, T * heads * (nope + v), 1), *pe = random_act(t, T * pes, 1), *got;
    void *k = dev_new(t, (uint64_t)(T * heads * (nope + rope)) * esz(t));
    OK(t, t->ops->mla_k(t->ops->ctx, k, act_put(t, kv, T * heads * (nope + v)), act_put(t, pe, T * pes), pes, T,
                        (int)heads, (int)nope, (int)rope, (int)v, &t->err));
    got = act_get(t, k, T * heads * (nope + rope));
    t->checks++;
    for (int64_t i = 0; i < T * heads * (nope + rope); i++) {
        int64_t tok = i / (heads * (nope + rope)), h = i / (nope + rope) % heads, j = i % (nope + rope);
        double want = j < nope ? kv[(tok * heads + h) * (nope + v) + j] : pe[tok * pes + j - nope];
        if (got[i] != want) {
            fail(t, "mla_k: element %lld", (long long)i);
            break;
        }
    }
    free(kv), free(pe), free(got);
    done(t, "mla_k");
}

/* ---- attention
 * ---------------------------------------------------------------------------------------------------------- */

typedef struct {
    int32_t heads, kv_heads, dqk, dv, window;
    int sinks, mla; /* mla: k is contiguous, v sits inside kv_b's output behind nope values */
    int32_t lens[8];
} attn_case;

static void attn_ref(const T_ *t, const attn_case *c, const sl_attn *a, const double *q, const double *k,
                     const double *v, const double *sinks, int64_t t0, int64_t L, int h, int64_t i, double *out) {
    int kh = h / (c->heads / c->kv_heads);
    double *s = malloc((uint64_t)L * 8), m = sinks ? sinks[h] : -INFINITY, l = 0;
    int64_t lo = c->window && i - c->window + 1 > 0 ? i - c->window + 1 : 0;
    for (int64_t j = lo; j <= i; j++) {
        s[j] = 0;
        for (int d = 0; d < c->dqk; d++)
            s[j] += q[(t0 + i) * a->q_stride + h * c->dqk + d] * k[(t0 + j) * a->k_stride + kh * a->k_head_stride + d];
        s[j] *= (double)a->scale;
        if (s[j] > m) m = s[j];
    }
    for (int64_t j = lo; j <= i; j++) l += s[j] = exp(s[j] - m);
    if (sinks) l += exp(sinks[h] - m);
    for (int d = 0; d < c->dv; d++) {
        double o = 0;
        for (int64_t j = lo; j <= i; j++) o += s[j] * v[(t0 + j) * a->v_stride + kh * a->v_head_stride + d];
        out[(t0 + i) * a->o_stride + h * c->dv + d] = rn(t, o / l);
    }
    free(s);
}

static void set_ws(T_ *t, uint64_t bytes) {
    if (t->ws) t->ops->free(t->ops->ctx, t->ws);
    t->ws = NULL;
    OK(t, t->ops->alloc(t->ops->ctx, &t->ws, bytes + 256, "workspace", &t->err));
    OK(t, t->ops->set_workspace(t->ops->ctx, t->ws, bytes, &t->err));
}

static void test_attn_one(T_ *t, const attn_case *c) {
    int32_t cu[9] = {0}, S = 0, max = 0;
    while (S < 8 && c->lens[S]) {
        cu[S + 1] = cu[S] + c->lens[S];
        if (c->lens[S] > max) max = c->lens[S];
        S++;
    }
    int64_t T = cu[S];
    sl_attn a = {.heads = c->heads,
                 .kv_heads = c->kv_heads,
                 .dqk = c->dqk,
                 .dv = c->dv,
                 .window = c->window,
                 .scale = (float)(1 / sqrt(c->dqk)),
                 .k_head_stride = c->dqk,
                 .v_head_stride = c->dv};
    a.q_stride = c->heads * c->dqk + 6;
    a.o_stride = c->heads * c->dv;
    a.k_stride = c->kv_heads * c->dqk;
    a.v_stride = c->kv_heads * c->dv;
    if (c->mla) {
        a.v_head_stride = c->dv + 24;
        a.v_stride = c->kv_heads * a.v_head_stride;
    }
    double *q = random_act(t, T * a.q_stride, 3), *k = random_act(t, T * a.k_stride, 3),
           *v = random_act(t, T * a.v_stride, 1);
    double *ref = malloc((uint64_t)(T * a.o_stride) * 8), *got, sinks[64];
    for (int h = 0; h < c->heads; h++) sinks[h] = (double)(float)(uni(t) * 3);
    if (c->sinks) a.sinks = dev_floats(t, sinks, c->heads);
    for (int s = 0; s < S; s++)
        for (int h = 0; h < c->heads; h++)
            for (int64_t i = 0; i < c->lens[s]; i++)
                attn_ref(t, c, &a, q, k, v, c->sinks ? sinks : NULL, cu[s], c->lens[s], h, i, ref);
    set_ws(t, t->ops->workspace_bytes(t->ops->ctx, T, max, c->heads * c->dqk, c->heads * c->dqk, &a));
    void *dq = act_put(t, q, T * a.q_stride), *dk = act_put(t, k, T * a.k_stride), *dv = act_put(t, v, T * a.v_stride);
    void *o = dev_new(t, (uint64_t)(T * a.o_stride) * esz(t));
    OK(t, t->ops->attention(t->ops->ctx, o, dq, dk, dv, cu, S, &a, &t->err));
    got = act_get(t, o, T * a.o_stride);
    compare(t, got, ref, T * a.o_stride, 2, "attention %d/%d heads dqk %d dv %d window %d sinks %d T %lld of %d",
            c->heads, c->kv_heads, c->dqk, c->dv, c->window, c->sinks, (long long)T, S);
    /* a sequence alone gives the same bits as among others */
    void *one = dev_new(t, (uint64_t)(c->lens[S - 1] * a.o_stride) * esz(t));
    int32_t cu1[2] = {0, c->lens[S - 1]};
    uint64_t t0 = (uint64_t)cu[S - 1] * esz(t);
    OK(t, t->ops->attention(t->ops->ctx, one, (uint8_t *)dq + t0 * (uint64_t)a.q_stride,
                            (uint8_t *)dk + t0 * (uint64_t)a.k_stride, (uint8_t *)dv + t0 * (uint64_t)a.v_stride, cu1,
                            1, &a, &t->err));
    double *g1 = act_get(t, one, c->lens[S - 1] * a.o_stride);
    t->checks++;
    if (memcmp(g1, got + cu[S - 1] * a.o_stride, (uint64_t)(c->lens[S - 1] * a.o_stride) * 8))
        fail(t, "attention: a sequence alone differs in its bits");
    free(q), free(k), free(v), free(ref), free(got), free(g1);
    done(t, "attention");
}

static void test_attention(T_ *t) {
    static const attn_case cases[] = {
        {1, 1, 8, 8, 0, 0, 0, {1}},
        {4, 2, 64, 64, 0, 0, 0, {3, 1, 17, 33}},
        {9, 3, 64, 64, 0, 0, 0, {300, 5, 129}},
        {2, 1, 128, 128, 0, 0, 0, {1, 256, 257}},
        {4, 4, 24, 16, 0, 0, 1, {40, 7, 270}}, /* MLA shapes: dqk != dv, v strided */
        {2, 2, 192, 128, 0, 0, 1, {130}},
        {4, 1, 64, 64, 16, 1, 0, {50, 1, 300}}, /* gpt-oss: window and sinks */
        {2, 1, 32, 32, 1, 0, 0, {20, 260}},
        {2, 1, 256, 256, 128, 0, 0, {400, 12}},
        {3, 3, 20, 36, 0, 1, 0, {15, 290}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) test_attn_one(t, &cases[i]);
}

/* ---- routing and experts
 * -------------------------------------------------------------------------------------------------- */

static int better(const double *v, int i, int j) { /* i before j */
    return v[i] > v[j] || (v[i] == v[j] && i < j);
}
static void ref_topk(const double *v, int n, int k, int *out) {
    for (int i = 0; i < k; i++) {
        int best = -1;
        for (int e = 0; e < n; e++) {
            int taken = 0;
            for (int j = 0; j < i; j++) taken |= out[j] == e;
            if (!taken && (best < 0 || better(v, e, best))) best = e;
        }
        out[i] = best;
    }
}

static void ref_route(const T_ *t, const sl_router *r, const double *bias, double *l, int *idx, double *w) {
    int E = r->experts, k = r->top_k, per = E / r->n_group, keep[64];
    double c[512], g[64], m = -INFINITY, sum = 0;
    for (int e = 0; e < E; e++) {
        if (r->bf16_logits && t->bf) l[e] = bfr(l[e]);
        if (l[e] > m) m = l[e];
    }
    if (r->score == SL_SCORE_SOFTMAX) {
        for (int e = 0; e < E; e++) sum += exp(l[e] - m);
        for (int e = 0; e < E; e++) l[e] = exp(l[e] - m) / sum;
    } else if (r->score == SL_SCORE_SIGMOID) {
        for (int e = 0; e < E; e++) l[e] = 1 / (1 + exp(-l[e]));
    }
    for (int e = 0; e < E; e++) c[e] = l[e] + (bias ? bias[e] : 0);
    if (r->n_group > 1) {
        for (int i = 0; i < r->n_group; i++) {
            double b1 = -INFINITY, b2 = -INFINITY;
            for (int e = i * per; e < (i + 1) * per; e++) {
                if (c[e] > b1) {
                    b2 = b1;
                    b1 = c[e];
                } else if (c[e] > b2) {
                    b2 = c[e];
                }
            }
            g[i] = r->group_score_top2 ? b1 + b2 : b1;
        }
        ref_topk(g, r->n_group, r->topk_group, keep);
        for (int e = 0; e < E; e++) {
            int in = 0;
            for (int i = 0; i < r->topk_group; i++) in |= keep[i] == e / per;
            if (!in) c[e] = -INFINITY;
        }
    }
    ref_topk(c, E, k, idx);
    sum = 0;
    for (int i = 0; i < k; i++) w[i] = r->score == SL_SCORE_SOFTMAX_TOPK ? exp(l[idx[i]] - m) : l[idx[i]];
    for (int i = 0; i < k; i++) sum += w[i];
    for (int i = 0; i < k; i++) {
        if (r->renorm || r->score == SL_SCORE_SOFTMAX_TOPK) w[i] /= sum;
        w[i] *= (double)r->scale;
        if (r->bf16_weights && t->bf) w[i] = bfr(w[i]);
    }
}

/* Inputs are small multiples of a power of two, so logits are exact, ties are real, and the choice must be equal. */
static void test_route_one(T_ *t, sl_router r, int64_t T, int64_t H, sl_wfmt f, int bias, int logit_bias) {
    wt w = make_wt(t, f, 1, r.experts, H, NULL);
    double *x = random_act(t, T * H, 1), *b = malloc(512 * 8), *lb = malloc(512 * 8), *l = malloc(512 * 8);
    for (int64_t i = 0; i < r.experts * H; i++) {
        float g = (float)((int)(rnd(t) % 9) - 4) / 16;
        if (f == SL_W_F32)
            memcpy(w.data + 4 * i, &g, 4);
        else
            ((uint16_t *)(void *)w.data)[i] = bf_bits((double)g);
    }
    for (int64_t i = 0; i < T * H; i++) x[i] = ((int)(rnd(t) % 5) - 2) / 2.0;
    for (int e = 0; e < r.experts; e++) {
        b[e] = (double)(float)(uni(t) * 0.3);
        lb[e] = ((int)(rnd(t) % 9) - 4) / 4.0;
    }
    if (bias) r.bias = dev_floats(t, b, r.experts);
    if (logit_bias) r.logit_bias = dev_floats(t, lb, r.experts);
    sl_mat dm = dev_wt(t, &w), m = prepared(t, &dm);
    int64_t n = T * r.top_k;
    int32_t *di = dev_new(t, (uint64_t)n * 4), *idx = malloc((uint64_t)n * 4);
    float *dw = dev_new(t, (uint64_t)n * 4), *wv = malloc((uint64_t)n * 4);
    OK(t, t->ops->route(t->ops->ctx, di, dw, act_put(t, x, T * H), T, H, &m, &r, &t->err));
    dev_get(t, idx, di, (uint64_t)n * 4);
    dev_get(t, wv, dw, (uint64_t)n * 4);
    t->checks++;
    for (int64_t i = 0; i < T; i++) {
        int ri[64];
        double rw[64];
        for (int e = 0; e < r.experts; e++) {
            l[e] = logit_bias ? lb[e] : 0;
            for (int64_t c = 0; c < H; c++) l[e] += x[i * H + c] * wval(&w, 0, e, c);
        }
        ref_route(t, &r, bias ? b : NULL, l, ri, rw);
        for (int j = 0; j < r.top_k; j++) {
            int at = -1;
            for (int q = 0; q < r.top_k; q++)
                if (idx[i * r.top_k + q] == ri[j]) at = q;
            double tol = r.bf16_weights && t->bf ? 0.008 : 3e-6;
            if (at < 0 || !(fabs((double)wv[i * r.top_k + at] - rw[j]) <= tol * fabs(rw[j]) + 1e-9)) {
                fail(t, "route E %d k %d score %d: token %lld expert %d weight %g: %s", r.experts, r.top_k,
                     (int)r.score, (long long)i, ri[j], rw[j], at < 0 ? "not chosen" : "other weight");
                i = T;
                break;
            }
        }
    }
    free(x), free(b), free(lb), free(l), free(idx), free(wv);
    free_wt(&w);
    done(t, "route");
}

static void test_route(T_ *t) {
    sl_router plain = {.experts = 16, .top_k = 4, .score = SL_SCORE_SOFTMAX, .n_group = 1, .topk_group = 1, .scale = 1};
    sl_router r = plain;
    test_route_one(t, r, 17, 64, SL_W_BF16, 0, 0);
    test_route_one(t, r, 1, 33, SL_W_F32, 0, 0);
    r.top_k = 1;
    test_route_one(t, r, 3, 40, SL_W_BF16, 0, 0);
    r = plain; /* Qwen3-MoE */
    r.renorm = r.bf16_logits = r.bf16_weights = 1;
    r.experts = 128, r.top_k = 8;
    test_route_one(t, r, 300, 48, SL_W_BF16, 0, 0);
    r = plain; /* Kimi-K2, DeepSeek-V3 */
    r.score = SL_SCORE_SIGMOID, r.renorm = 1, r.scale = 2.827f, r.experts = 384, r.top_k = 8;
    test_route_one(t, r, 20, 64, SL_W_BF16, 1, 0);
    r.experts = 64, r.n_group = 8, r.topk_group = 4, r.group_score_top2 = 1;
    test_route_one(t, r, 40, 64, SL_W_BF16, 1, 0);
    r = plain; /* DeepSeek-V2 */
    r.experts = 40, r.n_group = 8, r.topk_group = 3, r.top_k = 6, r.scale = 16;
    test_route_one(t, r, 40, 64, SL_W_F32, 0, 0);
    r = plain; /* gpt-oss */
    r.score = SL_SCORE_SOFTMAX_TOPK;
    r.experts = 32;
    test_route_one(t, r, 17, 64, SL_W_BF16, 0, 1);
}

typedef struct {
    sl_wfmt f;
    int64_t T, H, I;
    int experts, first, local, top_k, fused, interleaved, bias, glu, bf16_acc, rank0;
} moe_case;

static double ref_glu(const T_ *t, int kind, double g, double u) {
    double a;
    if (kind == SL_GLU_CLAMP) {
        g = g > 7 ? 7 : g;
        u = u > 7 ? 7 : u < -7 ? -7 : u;
        return rn(t, (u + 1) * g / (1 + exp(-1.702 * g)));
    }
    a = g / (1 + exp(-g));
    return rn(t, (t->bf ? bfr(a) : a) * u);
}

/* out += weight * expert e (local) of row x */
static void ref_expert(const T_ *t, const moe_case *c, const wt *g, const wt *u, const wt *d, const double *gb,
                       const double *ub, const double *db, const double *x, int e, double w, double *out) {
    double *mid = malloc((uint64_t)c->I * 8);
    for (int64_t i = 0; i < c->I; i++) {
        int64_t gr = c->fused ? (c->interleaved ? 2 * i : i) : i,
                ur = c->fused ? (c->interleaved ? 2 * i + 1 : c->I + i) : i;
        double a = 0, b = 0;
        if (c->bias) {
            a = c->fused ? gb[e * 2 * c->I + gr] : gb[e * c->I + gr];
            b = c->fused ? gb[e * 2 * c->I + ur] : ub[e * c->I + ur];
        }
        for (int64_t k = 0; k < c->H; k++) {
            a += x[k] * wact(t, g, e, gr, k);
            b += x[k] * wact(t, c->fused ? g : u, e, ur, k);
        }
        mid[i] = ref_glu(t, c->glu, rn(t, a), rn(t, b));
    }
    for (int64_t h = 0; h < c->H; h++) {
        double y = c->bias && c->rank0 ? db[e * c->H + h] : 0;
        for (int64_t i = 0; i < c->I; i++) y += mid[i] * wact(t, d, e, h, i);
        y = rn(t, y) * w;
        if (c->bf16_acc && t->bf)
            out[h] = bfr(out[h] + bfr(y));
        else
            out[h] += y;
    }
    free(mid);
}

/* gate and up as the two halves of one matrix. `way`: sl_cuda_force.glu */
static void test_glu_linear_one(T_ *t, int64_t T, int64_t I, int64_t k, int64_t gap, int kind, int way) {
    wt w = make_wt(t, SL_W_BF16, 1, 2 * I, k, NULL);
    sl_mat dm = dev_wt(t, &w), g = prepared(t, &dm), u;
    int64_t xs = k + gap;
    double *x = random_act(t, T * xs, 0.5), *ref = malloc((uint64_t)(T * I) * 8), *got;
    g.n = I, g.stride = (uint64_t)I * g.row_bytes;
    u = g;
    u.data = (const uint8_t *)g.data + g.stride;
    for (int64_t i = 0; i < T; i++)
        for (int64_t r = 0; r < I; r++) {
            double a = 0, b = 0;
            for (int64_t c = 0; c < k; c++) {
                a += x[i * xs + c] * wact(t, &w, 0, r, c);
                b += x[i * xs + c] * wact(t, &w, 0, I + r, c);
            }
            ref[i * I + r] = ref_glu(t, kind, rn(t, a), rn(t, b));
        }
    void *out = dev_new(t, (uint64_t)(T * I) * esz(t)), *s = dev_new(t, (uint64_t)(T * I) * esz(t));
    void *dx = act_put(t, x, T * xs);
#ifdef SL_HAVE_CUDA
    t->force.glu = way;
    if (!strcmp(t->ops->name, "cuda")) sl_ops_cuda_force(t->ops, t->force);
#endif
    if (t->ops->glu_linear) {
        OK(t, t->ops->glu_linear(t->ops->ctx, out, s, dx, xs, T, &g, &u, (sl_glu_kind)kind, 7, &t->err));
    } else {
        OK(t, t->ops->linear(t->ops->ctx, out, I, dx, xs, T, &g, NULL, &t->err));
        OK(t, t->ops->linear(t->ops->ctx, s, I, dx, xs, T, &u, NULL, &t->err));
        OK(t, t->ops->glu(t->ops->ctx, out, out, I, s, I, T, I, (sl_glu_kind)kind, 7, &t->err));
    }
    got = act_get(t, out, T * I);
    compare(t, got, ref, T * I, 2, "glu_linear kind %d way %d T %lld I %lld k %lld", kind, way, (long long)T,
            (long long)I, (long long)k);
    free(x), free(ref), free(got);
    free_wt(&w);
    done(t, "glu_linear");
}

static void test_glu_linear(T_ *t) {
    test_glu_linear_one(t, 3, 17, 37, 0, SL_GLU_SILU, 0);
    test_glu_linear_one(t, 5, 32, 64, 3, SL_GLU_SILU, 0);
    test_glu_linear_one(t, 9, 40, 64, 0, SL_GLU_CLAMP, 0);
    for (int way = -1; way < 2; way++) {
        test_glu_linear_one(t, 1, 8, 64, 0, SL_GLU_SILU, way);
        test_glu_linear_one(t, 17, 24, 72, 0, SL_GLU_SILU, way);
        test_glu_linear_one(t, 300, 136, 192, 0, SL_GLU_SILU, way); /* more than a tile both ways, and left-overs */
    }
    if (strcmp(t->ops->name, "cuda") != 0) return;
    /* More tiles than the chip holds at once, next to no work in each: one tile's results go out while the next is
     * ready. 64 and 192 rows: an odd number of whole panels. */
    test_glu_linear_one(t, 64, 9216 * 2, 8, 0, SL_GLU_SILU, 1);
    test_glu_linear_one(t, 192, 9216 * 2, 8, 0, SL_GLU_SILU, 1);
}

static void test_moe_one(T_ *t, const moe_case *c) {
    wt g = make_wt(t, c->f, c->local, c->fused ? 2 * c->I : c->I, c->H, NULL),
       u = make_wt(t, c->f, c->local, c->I, c->H, NULL);
    wt d = make_wt(t, c->f, c->local, c->H, c->I, NULL);
    int64_t nb = c->local * c->I;
    double *x = random_act(t, c->T * c->H, 0.5), *gb = malloc((uint64_t)nb * 16 + 8),
           *ub = malloc((uint64_t)nb * 8 + 8);
    double *db = malloc((uint64_t)(c->local * c->H) * 8), *ref = calloc((uint64_t)(c->T * c->H), 8), *got;
    int32_t *idx = malloc((uint64_t)(c->T * c->top_k) * 4);
    double *w = malloc((uint64_t)(c->T * c->top_k) * 8);
    for (int64_t i = 0; i < 2 * nb; i++) gb[i] = (double)(float)uni(t);
    for (int64_t i = 0; i < nb; i++) ub[i] = (double)(float)uni(t);
    for (int64_t i = 0; i < c->local * c->H; i++) db[i] = (double)(float)uni(t);
    for (int64_t i = 0; i < c->T; i++) { /* distinct experts; expert 1 is nobody's choice */
        for (int j = 0; j < c->top_k; j++) {
            int again;
            do {
                int e = (int)(rnd(t) % (uint32_t)c->experts);
                again = e == 1;
                for (int q = 0; q < j; q++) again |= idx[i * c->top_k + q] == e;
                idx[i * c->top_k + j] = e;
            } while (again);
            w[i * c->top_k + j] = bfr(0.1 + fabs(uni(t)));
        }
        for (int e = 0; e < c->local; e++)
            for (int j = 0; j < c->top_k; j++)
                if (idx[i * c->top_k + j] == c->first + e)
                    ref_expert(t, c, &g, &u, &d, gb, ub, db, x + i * c->H, e, w[i * c->top_k + j], ref + i * c->H);
    }
    for (int64_t i = 0; i < c->T * c->H; i++) ref[i] = rn(t, ref[i]);
    sl_mat dg = dev_wt(t, &g), du = dev_wt(t, &u), dd = dev_wt(t, &d);
    sl_moe m = {.experts = c->experts,
                .first = c->first,
                .local = c->local,
                .top_k = c->top_k,
                .gate = prepared(t, &dg),
                .down = prepared(t, &dd),
                .gate_up_interleaved = c->interleaved,
                .glu = (sl_glu_kind)c->glu,
                .limit = 7,
                .bias_scale_rank0 = c->rank0,
                .bf16_accumulate = c->bf16_acc};
    if (!c->fused) m.up = prepared(t, &du);
    if (c->bias) {
        m.gate_bias = (sl_vec){dev_floats(t, gb, c->fused ? 2 * nb : nb), c->fused ? 2 * nb : nb};
        if (!c->fused) m.up_bias = (sl_vec){dev_floats(t, ub, nb), nb};
        m.down_bias = (sl_vec){dev_floats(t, db, c->local * c->H), c->local * c->H};
    }
    set_ws(t, t->ops->moe_bytes(t->ops->ctx, c->T, c->H, &m));
    void *out = dev_new(t, (uint64_t)(c->T * c->H) * esz(t));
    OK(t,
       t->ops->moe(t->ops->ctx, out, act_put(t, x, c->T * c->H), c->T, c->H,
                   dev_put(t, idx, (uint64_t)(c->T * c->top_k) * 4), dev_floats(t, w, c->T * c->top_k), &m, &t->err));
    got = act_get(t, out, c->T * c->H);
    /* On the GPU an expert's product is rounded before its bias is added, as transformers does: one rounding more. */
    double loose = c->bias && !strcmp(t->ops->name, "cuda") ? 2.5 : 2;
    compare(t, got, ref, c->T * c->H, loose, "moe %s T %lld H %lld I %lld experts %d+%d of %d fused %d",
            sl_wfmt_name(c->f), (long long)c->T, (long long)c->H, (long long)c->I, c->first, c->local, c->experts,
            c->fused);
    free(x), free(gb), free(ub), free(db), free(ref), free(idx), free(w), free(got);
    free_wt(&g), free_wt(&u), free_wt(&d);
    done(t, "moe");
}

static void test_moe(T_ *t) {
    static const moe_case cases[] = {
        {SL_W_BF16, 17, 48, 40, 8, 0, 8, 2, 0, 0, 0, SL_GLU_SILU, 0, 0},
        {SL_W_BF16, 1, 33, 17, 4, 0, 4, 2, 0, 0, 0, SL_GLU_SILU, 0, 0},
        {SL_W_INT4, 19, 64, 96, 8, 4, 4, 3, 0, 0, 0, SL_GLU_SILU, 0, 0},  /* EP: half of the experts */
        {SL_W_MXFP4, 9, 64, 32, 6, 0, 6, 2, 1, 1, 1, SL_GLU_CLAMP, 0, 1}, /* gpt-oss */
        {SL_W_BF16, 9, 40, 24, 6, 0, 6, 2, 1, 0, 1, SL_GLU_CLAMP, 0, 0},  /* a rank without the down bias */
        {SL_W_BF16, 9, 40, 24, 6, 0, 6, 2, 0, 0, 1, SL_GLU_SILU, 0, 1},
        {SL_W_BF16, 21, 64, 32, 8, 0, 8, 4, 0, 0, 0, SL_GLU_SILU, 1, 0}, /* Qwen3-MoE */
        {SL_W_FP8, 7, 160, 130, 4, 2, 2, 2, 0, 0, 0, SL_GLU_SILU, 0, 0},
        {SL_W_INT4, 70, 256, 256, 4, 0, 4, 2, 0, 0, 0, SL_GLU_SILU, 0, 0}, /* columns in whole 256: K2.5's kernel */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) test_moe_one(t, &cases[i]);
}

/* ---- nll, fingerprint, memory
 * ---------------------------------------------------------------------------------------------- */

static void test_nll_one(T_ *t, int64_t T, int64_t H, int64_t V, sl_wfmt f) {
    wt w = make_wt(t, f, 1, V, H, NULL);
    sl_mat dm = dev_wt(t, &w), m = prepared(t, &dm);
    double *x = random_act(t, T * H, 0.7), ref = 0, got = NAN, *wv = malloc((uint64_t)(V * H) * 8);
    int32_t *ids = malloc((uint64_t)T * 4);
    for (int64_t i = 0; i < V * H; i++) wv[i] = wact(t, &w, 0, i / H, i % H);
    for (int64_t i = 0; i < T; i++) ids[i] = (int32_t)(rnd(t) % (uint32_t)V);
    ids[T - 1] = (int32_t)V - 1;
    for (int64_t i = 0; i + 1 < T; i++) {
        double mx = -INFINITY, sum = 0, hit = 0;
        for (int64_t v = 0; v < V; v++) {
            double l = 0;
            for (int64_t k = 0; k < H; k++) l += x[i * H + k] * wv[v * H + k];
            if (v == ids[i + 1]) hit = l;
            sum = l > mx ? sum * exp(mx - l) + 1 : sum + exp(l - mx);
            if (l > mx) mx = l;
        }
        ref += mx + log(sum) - hit;
    }
    ref /= (double)(T - 1);
    OK(t, t->ops->nll(t->ops->ctx, &got, act_put(t, x, T * H), T, H, dev_put(t, ids, (uint64_t)T * 4), &m, &t->err));
    t->checks++;
    if (T > 1 && !(fabs(got - ref) <= (t->bf ? 2e-3 : 1e-5) * (1 + fabs(ref))))
        fail(t, "nll T %lld V %lld: %.9g, expected %.9g", (long long)T, (long long)V, got, ref);
    if (T == 1 && !isnan(got)) fail(t, "nll of one token is %g, expected NaN", got);
    free(x), free(wv), free(ids);
    free_wt(&w);
    done(t, "nll");
}

static void test_capture(T_ *t) {
    int64_t T = 23, H = 37, rows = 5, chunks = 5, n = T * H;
    double *x = random_act(t, n, 1);
    void *dx = act_put(t, x, n);
    uint8_t *h = malloc((uint64_t)n * esz(t)), *copy = malloc((uint64_t)n * esz(t));
    uint64_t sums[5], ticket;
    uint32_t bad[5], want_bad[5] = {2, 0, 0, 1, 1};
    int is_done = 0;
    dev_get(t, h, dx, (uint64_t)n * esz(t));
    static const struct {
        int64_t at;
        uint32_t bits;
    } plant[] = {{0, 0x7f800000u}, {100, 0xffc00000u}, {3 * 5 * 37 + 7, 0xff800000u}, {23 * 37 - 1, 0x7fc10000u}};
    for (size_t i = 0; i < 4; i++) {
        if (t->bf)
            ((uint16_t *)(void *)h)[plant[i].at] = (uint16_t)(plant[i].bits >> 16);
        else
            memcpy(h + 4 * plant[i].at, &plant[i].bits, 4);
    }
    OK(t, t->ops->upload(t->ops->ctx, dx, h, (uint64_t)n * esz(t), &t->err));
    OK(t, t->ops->fingerprint(t->ops->ctx, sums, bad, dx, T, H, rows, &t->err));
    OK(t, t->ops->capture_copy(t->ops->ctx, copy, dx, (uint64_t)n * esz(t), &ticket, &t->err));
    OK(t, t->ops->capture_wait(t->ops->ctx, ticket, &t->err));
    OK(t, t->ops->capture_done(t->ops->ctx, ticket, &is_done, &t->err));
    t->checks++;
    if (!is_done || memcmp(copy, h, (uint64_t)n * esz(t)))
        fail(t, "capture_copy: other bytes, or not done after the wait");
    for (int64_t c = 0; c < chunks; c++) {
        int64_t r = T - c * rows < rows ? T - c * rows : rows;
        uint64_t bytes = (uint64_t)(r * H) * esz(t), a = 0, b = 0, i = 0;
        const uint8_t *p = h + (uint64_t)(c * rows * H) * esz(t);
        for (uint64_t o = 0; o < bytes; o += 4) {
            uint64_t w = (uint64_t)get16(p + o) + (o + 2 < bytes ? (uint64_t)get16(p + o + 2) << 16 : 0);
            a += w;
            b += ++i * w;
        }
        t->checks++;
        if (sums[c] != (b ^ (a << 32 | a >> 32) ^ bytes * 0x9e3779b97f4a7c15u))
            fail(t, "fingerprint of chunk %lld", (long long)c);
        if (bad[c] != want_bad[c])
            fail(t, "chunk %lld has %u non-finite elements, expected %u", (long long)c, bad[c], want_bad[c]);
    }
    free(x), free(h), free(copy);
    done(t, "fingerprint");
}

/* A NaN or an infinity that enters an op must not be hidden by it. */
static void test_nan(T_ *t) {
    int64_t H = 64;
    double *x = random_act(t, 3 * H, 1);
    x[H + 5] = NAN;
    wt w = make_wt(t, SL_W_BF16, 1, 40, H, NULL);
    sl_mat dm = dev_wt(t, &w), m = prepared(t, &dm);
    void *dx = act_put(t, x, 3 * H), *out = dev_new(t, (uint64_t)(3 * 40) * esz(t)),
         *o2 = dev_new(t, (uint64_t)(3 * H) * esz(t));
    double one[64];
    for (int i = 0; i < 64; i++) one[i] = 1;
    OK(t, t->ops->linear(t->ops->ctx, out, 40, dx, H, 3, &m, NULL, &t->err));
    double *got = act_get(t, out, 120);
    t->checks += 3;
    if (isnan(got[0]) || !isnan(got[40]) || isnan(got[80])) fail(t, "linear: a NaN stays in its row");
    OK(t, t->ops->rmsnorm(t->ops->ctx, o2, H, dx, H, 3, 1, H, dev_floats(t, one, H), 1e-5f, SL_NORM_LLAMA, &t->err));
    double *g2 = act_get(t, o2, 3 * H);
    if (isnan(g2[0]) || !isnan(g2[H]) || isnan(g2[2 * H])) fail(t, "rmsnorm: a NaN stays in its row");
    OK(t, t->ops->glu(t->ops->ctx, o2, dx, H, dx, H, 3, H, SL_GLU_SILU, 0, &t->err));
    double *g3 = act_get(t, o2, 3 * H);
    if (isnan(g3[H]) || !isnan(g3[H + 5])) fail(t, "glu hides a NaN");
    free(x), free(got), free(g2), free(g3);
    free_wt(&w);
    done(t, "nan");
}

/* ---- main
 * ------------------------------------------------------------------------------------------------------------------ */

static int open_backend(T_ *t, const char *name, sl_dtype act, int threads) {
    if (!strncmp(name, "cpu", 3)) {
        const char *isa = name[3] == ':' ? name + 4 : NULL;
        return sl_ops_cpu_create_isa(&t->ops, threads, act, isa, &t->err);
    }
#ifdef SL_HAVE_CUDA
    if (!strcmp(name, "cuda") || !strcmp(name, "cuda:plain") || !strcmp(name, "cuda:bare")) {
        int rc = sl_ops_cuda_create(&t->ops, 0, act, &t->err);
        t->force = (sl_cuda_force){.plain = name[4] == ':', .one_cta = !strcmp(name, "cuda:bare")};
        if (!rc) sl_ops_cuda_force(t->ops, t->force);
        return rc;
    }
#endif
    return sl_err_set(&t->err, SL_EUSAGE, "backend '%s' is not in this build", name);
}

static void test_nll(T_ *t) {
    test_nll_one(t, 1, 16, 50, SL_W_BF16);
    test_nll_one(t, 2, 40, 33, SL_W_F32);
    test_nll_one(t, 500, 24, 2100, SL_W_BF16);
}

static const struct {
    const char *name;
    void (*run)(T_ *);
} ops[] = {{"formats", test_formats},
           {"embed", test_embed},
           {"linear", test_linear},
           {"norm", test_norm},
           {"add_glu", test_add_glu},
           {"rope", test_rope},
           {"attention", test_attention},
           {"route", test_route},
           {"moe", test_moe},
           {"nll", test_nll},
           {"capture", test_capture},
           {"nan", test_nan},
           {"linear_add", test_linear_add},
           {"add_norm", test_add_norm},
           {"glu_linear", test_glu_linear}};

int main(int argc, char **argv) {
    const char *backend = argc > 1 ? argv[1] : "cpu", *only = argc > 3 ? argv[3] : NULL;
    int threads = argc > 2 ? atoi(argv[2]) : 3, ran = 0, fails = 0, checks = 0;
    for (int act = 0; act < 2; act++) {
        T_ *t = calloc(1, sizeof *t);
        t->label = backend;
        t->bf = act;
        t->rng = 1234 + (uint64_t)act;
        int rc = open_backend(t, backend, act ? SL_BF16 : SL_F32, threads);
        if (rc) {
            fprintf(stderr, "SKIPPED %s %s: %s\n", backend, act ? "bf16" : "f32", t->err.msg);
            free(t);
            continue;
        }
        ran++;
        for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
            if (!only || !strcmp(only, ops[i].name)) ops[i].run(t);
        if (t->ws) t->ops->free(t->ops->ctx, t->ws);
        t->ops->destroy(t->ops);
        fails += t->fails;
        checks += t->checks;
        free(t);
    }
    printf("%s: %d checks, %d failures\n", backend, checks, fails);
    if (ran && !checks) return fprintf(stderr, "there is no operation '%s'\n", only), 1;
    return fails ? 1 : ran ? 0 : 77;
}
