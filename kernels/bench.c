#include "kernels/bench.h"
#include "kernels/cpu/cpu.h"
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* One thread: its own processor time, so that a busy machine does not count. More: the wall clock. */
static double now(int threads) {
    struct timespec t;
    clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- peers, if they are installed
 * ------------------------------------------------------------------------------------ */

typedef void (*sgemm_fn)(const char *, const char *, const int *, const int *, const int *, const float *,
                         const float *, const int *, const float *, const int *, const float *, float *, const int *);
typedef int (*dnnl_sgemm_fn)(char, char, int64_t, int64_t, int64_t, float, const float *, int64_t, const float *,
                             int64_t, float, float *, int64_t);
typedef void (*set_threads_fn)(int);

typedef struct {
    void *blas_lib, *dnnl_lib;
    sgemm_fn sgemm;
    dnnl_sgemm_fn dnnl_sgemm;
} peers;

static void *symbol(void *lib, const char *name) {
    return lib ? dlsym(lib, name) : NULL;
}

static void peers_open(peers *p, int threads) {
    static const char *const blas[] = {"libopenblas.so.0", "libopenblas.so"}, *const dnnl[] = {"libdnnl.so.3",
                                                                                               "libdnnl.so.2"};
    set_threads_fn set;
    memset(p, 0, sizeof *p);
    for (int i = 0; i < 2 && !p->blas_lib; i++) p->blas_lib = dlopen(blas[i], RTLD_NOW | RTLD_LOCAL);
    for (int i = 0; i < 2 && !p->dnnl_lib; i++) p->dnnl_lib = dlopen(dnnl[i], RTLD_NOW | RTLD_LOCAL);
    p->sgemm = (sgemm_fn)symbol(p->blas_lib, "sgemm_");
    p->dnnl_sgemm = (dnnl_sgemm_fn)symbol(p->dnnl_lib, "dnnl_sgemm");
    if ((set = (set_threads_fn)symbol(p->blas_lib, "openblas_set_num_threads"))) set(threads);
    if ((set = (set_threads_fn)symbol(p->dnnl_lib, "omp_set_num_threads"))) set(threads); /* found in its OpenMP */
}

/* ---- one shape
 * --------------------------------------------------------------------------------------------------------- */

typedef struct {
    sl_mat w;
    void *data, *scale;
    void *x, *out;         /* activations of the backend's type */
    float *xf, *wf, *outf; /* the peers' */
} shape;

static void shape_free(shape *s) {
    free(s->data);
    free(s->scale);
    free(s->x);
    free(s->out);
    free(s->xf);
    free(s->wf);
    free(s->outf);
}

static uint32_t next(uint64_t *s) {
    *s = *s * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*s >> 33);
}

/* Random weights: any bytes are a valid matrix of a block format once its scales are small numbers, not denormals. */
static void fill_weights(shape *s, uint64_t bytes, uint64_t scales) {
    uint64_t seed = 7;
    uint8_t *d = s->data, *sc = s->scale;
    for (uint64_t i = 0; i < bytes; i++) d[i] = (uint8_t)next(&seed);
    if (s->w.fmt == SL_W_F32)
        for (uint64_t i = 0; i < bytes / 4; i++) ((float *)s->data)[i] = (float)next(&seed) * 0x1p-31f - 0.5f;
    if (s->w.fmt == SL_W_BF16 || s->w.fmt == SL_W_F16)
        for (uint64_t i = 0; i < bytes / 2; i++)
            ((uint16_t *)s->data)[i] = (uint16_t)(0x3800u | (next(&seed) & 0x83ffu));
    for (uint64_t i = 0; i < scales; i++) sc[i] = s->w.fmt == SL_W_MXFP4 ? 120 : (i & 1) ? 0x3c : 0x10;
    if (s->w.fmt == SL_W_FP8)
        for (uint64_t i = 0; i < scales / 4; i++) ((float *)s->scale)[i] = 0.01f;
    if (s->w.fmt < SL_W_Q8_0) return;
    uint64_t block = sl_wfmt_row_bytes(s->w.fmt, (int64_t)sl_wfmt_block(s->w.fmt));
    for (uint64_t b = 0; b + block <= bytes; b += block) {
        uint64_t at = s->w.fmt == SL_W_Q6_K ? 208 : 0;
        if (s->w.fmt == SL_W_MXFP4_GGUF)
            d[b] = 120;
        else
            d[b + at + 1] = 0x2c; /* half-precision 2^-4 .. 2^-3 */
        if (s->w.fmt == SL_W_Q4_1 || s->w.fmt == SL_W_Q5_1 || s->w.fmt == SL_W_Q4_K || s->w.fmt == SL_W_Q5_K)
            d[b + 3] = 0x2c;
    }
}

static int shape_make(shape *s, const sl_bench_gemm_row *r, sl_err *err) {
    const uint64_t row = sl_wfmt_row_bytes(r->fmt, r->k), mk = (uint64_t)(r->m * r->k), nk = (uint64_t)(r->n * r->k);
    memset(s, 0, sizeof *s);
    if (!row || r->m < 1 || r->n < 1)
        return sl_err_set(err, SL_EUSAGE, "a %s weight cannot have rows of %lld elements (blocks of %u)",
                          sl_wfmt_name(r->fmt), (long long)r->k, sl_wfmt_block(r->fmt));
    const uint64_t scales = nk / 8 + 4096, mn = (uint64_t)(r->m * r->n);
    s->data = malloc(row * (uint64_t)r->n);
    s->scale = malloc(scales);
    s->x = malloc(mk * 4);
    s->out = malloc(mn * 4);
    s->xf = malloc(mk * 4);
    s->wf = malloc(nk * 4);
    s->outf = malloc(mn * 4);
    if (!s->data || !s->scale || !s->x || !s->out || !s->xf || !s->wf || !s->outf) {
        shape_free(s);
        return sl_err_set(err, SL_ETEMP, "no memory for a product of %lld x %lld x %lld", (long long)r->m,
                          (long long)r->n, (long long)r->k);
    }
    s->w = (sl_mat){.fmt = r->fmt,
                    .n = r->n,
                    .k = r->k,
                    .count = 1,
                    .data = s->data,
                    .row_bytes = row,
                    .scale = s->scale,
                    .scale_row = (uint64_t)(r->k + 31) / 32,
                    .scale_dtype = SL_BF16,
                    .group = 32};
    fill_weights(s, row * (uint64_t)r->n, scales);
    uint64_t seed = 3;
    for (uint64_t i = 0; i < mk; i++) s->xf[i] = (float)next(&seed) * 0x1p-31f - 0.5f;
    for (uint64_t i = 0; i < nk; i++) s->wf[i] = (float)next(&seed) * 0x1p-31f - 0.5f;
    return 0;
}

static void run_peers(const peers *p, const shape *s, sl_bench_gemm_row *r, double flops) {
    const int m = (int)r->m, n = (int)r->n, k = (int)r->k;
    const float one = 1, zero = 0;
    double t;
    if (p->sgemm) {
        t = now(r->threads);
        p->sgemm("T", "N", &n, &m, &k, &one, s->wf, &k, s->xf, &k, &zero, s->outf, &n);
        t = flops / (now(r->threads) - t) * 1e-9;
        if (t > r->openblas) r->openblas = t;
    }
    if (p->dnnl_sgemm) {
        t = now(r->threads);
        p->dnnl_sgemm('N', 'T', m, n, k, 1.0f, s->xf, k, s->wf, k, 0.0f, s->outf, n);
        t = flops / (now(r->threads) - t) * 1e-9;
        if (t > r->onednn) r->onednn = t;
    }
}

static int run_shape(sl_ops *ops, const peers *p, sl_bench_gemm_row *r, int runs, sl_err *err) {
    shape s;
    int rc = shape_make(&s, r, err);
    if (rc) return rc;
    const sl_cpu *c = ops->ctx;
    const double flops = 2.0 * (double)r->m * (double)r->n * (double)r->k;
    if (r->act == SL_BF16)
        c->isa->to_bf16(s.x, s.xf, r->m * r->k);
    else
        memcpy(s.x, s.xf, (uint64_t)(r->m * r->k) * 4);
    for (int i = 0; i < runs && !rc; i++) {
        double t = now(r->threads);
        rc = ops->linear(ops->ctx, s.out, r->n, s.x, r->k, r->m, &s.w, NULL, err);
        t = flops / (now(r->threads) - t) * 1e-9;
        if (t > r->gflops) r->gflops = t;
        run_peers(p, &s, r, flops);
    }
    shape_free(&s);
    return rc;
}

/* ---- peak
 * -------------------------------------------------------------------------------------------------------------- */

typedef struct {
    const sl_isa *isa;
    int64_t n;
    double flops[1024];
} peak_job;

static void peak_part(void *arg, int tid, int threads) {
    peak_job *j = arg;
    (void)threads;
    j->flops[tid] = j->isa->peak(j->n);
}

static double measure_peak(sl_cpu *c) {
    peak_job *j = calloc(1, sizeof *j);
    double best = 0;
    if (!j) return 0;
    j->isa = c->isa;
    j->n = 1000000;
    for (int i = 0; i < 5; i++) {
        double t = now(c->threads), sum = 0;
        sl_pool_run(c->pool, peak_part, j);
        t = now(c->threads) - t;
        for (int k = 0; k < c->threads; k++) sum += j->flops[k];
        if (sum / t > best) best = sum / t;
    }
    free(j);
    return best * 1e-9;
}

int sl_bench_gemm(sl_bench_gemm_row *rows, int max, const sl_bench_gemm_opts *o, const char **isa_name, sl_err *err) {
    static const int64_t shapes[][3] = {{512, 576, 576},   {512, 192, 576},   {512, 1536, 576},  {512, 576, 1536},
                                        {2048, 1536, 576}, {2048, 576, 1536}, {512, 4096, 4096}, {512, 1024, 4096}};
    const int count = o->m ? 1 : (int)(sizeof shapes / sizeof *shapes);
    sl_ops *ops;
    peers p;
    if (o->runs < 1) return sl_err_set(err, SL_EUSAGE, "%d runs asked for, expected at least 1", o->runs);
    int rc = sl_ops_cpu_create_isa(&ops, o->threads, o->act, o->isa, err);
    if (rc) return rc;
    sl_cpu *c = ops->ctx;
    if (isa_name) *isa_name = c->isa->name;
    peers_open(&p, o->threads);
    double peak = measure_peak(c);
    int n = 0;
    for (int i = 0; i < count && n < max; i++) {
        sl_bench_gemm_row *r = &rows[n];
        *r = (sl_bench_gemm_row){.threads = o->threads, .act = o->act, .fmt = o->fmt, .peak = peak};
        r->m = o->m ? o->m : shapes[i][0];
        r->n = o->m ? o->n : shapes[i][1];
        r->k = o->m ? o->k : shapes[i][2];
        if (!o->m && !sl_wfmt_row_bytes(o->fmt, r->k)) continue; /* 576 is not a multiple of every block */
        if ((rc = run_shape(ops, &p, r, o->runs, err))) break;
        n++;
    }
    ops->destroy(ops);
    return rc ? rc : n;
}
