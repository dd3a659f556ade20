/* forward against the reference: `test_forward GOLDEN/FAMILY` loads the checkpoint through the loader, runs the golden
 * rows with tensor-parallel ranks as threads that share the shared-memory collective, and compares every state. f32:
 * every width up to 8 that the model allows, experts whole and sliced; |ours - ref| / |ref| <= 2e-5 a row and state;
 *        all ranks bit-identical; a row alone, in reversed order and in small micro-batches within 1e-5 of the full
 * batch bf16: widths 1, 2, 4: inside the band that the reference's own bf16 shows (band.json, rule of compare.py) NLL:
 * against a plain sum over the reference's final states and the checkpoint's lm_head `test_forward GOLDEN/FAMILY probe`
 * prints the error of every state instead of judging. */
#include "stages/compute/forward.h"
#include <jansson.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_ROWS 64
#define MAX_TP   8

typedef struct golden {
    int rows, n, H; /* rows, layers, width */
    int64_t T[MAX_ROWS], tokens;
    int32_t *ids[MAX_ROWS];
    float *states[MAX_ROWS]; /* [n+1, T, H] */
    float *final[MAX_ROWS];  /* [T, H] */
    uint8_t *file;
} golden;

static int failures;
#define FAIL(...)                                                                                                      \
    do {                                                                                                               \
        failures++;                                                                                                    \
        printf("FAIL: " __VA_ARGS__);                                                                                  \
        printf("\n");                                                                                                  \
    } while (0)

static uint8_t *slurp(const char *path, size_t *n) {
    FILE *f = fopen(path, "rb");
    if (!f) return NULL;
    fseek(f, 0, SEEK_END);
    long len = ftell(f);
    rewind(f);
    uint8_t *b = malloc((size_t)len + 1);
    *n = fread(b, 1, (size_t)len, f);
    fclose(f);
    return b;
}

static void *tensor(const golden *g, json_t *head, uint64_t base, const char *kind, int row, json_t **shape) {
    char name[64];
    snprintf(name, sizeof name, "%s.%d", kind, row);
    json_t *t = json_object_get(head, name);
    if (!t) return NULL;
    *shape = json_object_get(t, "shape");
    return g->file + base + json_integer_value(json_array_get(json_object_get(t, "data_offsets"), 0));
}

static int load_golden(golden *g, const char *dir) {
    char path[1024];
    size_t size = 0;
    snprintf(path, sizeof path, "%s/golden.safetensors", dir);
    g->file = slurp(path, &size);
    if (!g->file) return -1;
    uint64_t hn;
    memcpy(&hn, g->file, 8);
    json_t *head = json_loadb((char *)g->file + 8, hn, 0, NULL), *shape = NULL;
    for (int r = 0; r < MAX_ROWS; r++) {
        int64_t *ids = tensor(g, head, 8 + hn, "ids", r, &shape);
        if (!ids) break;
        g->T[r] = json_integer_value(json_array_get(shape, 0));
        g->ids[r] = malloc((size_t)g->T[r] * 4);
        for (int64_t t = 0; t < g->T[r]; t++) g->ids[r][t] = (int32_t)ids[t];
        g->states[r] = tensor(g, head, 8 + hn, "states", r, &shape);
        g->n = (int)json_integer_value(json_array_get(shape, 0)) - 1;
        g->H = (int)json_integer_value(json_array_get(shape, 2));
        g->final[r] = tensor(g, head, 8 + hn, "final", r, &shape);
        g->tokens += g->T[r];
        g->rows = r + 1;
    }
    json_decref(head);
    return g->rows && g->states[g->rows - 1] ? 0 : -1;
}

/* ---- one run: some rows in some order, tp threads ---- */
typedef struct setup {
    const char *dir;
    int tp, split, micro, threads, late; /* late: sums happen when they are waited for, batches are cut in two */
    sl_dtype act;
    int rows, order[MAX_ROWS];
} setup;

typedef struct rank_run {
    const setup *s;
    const golden *g;
    int rank, fd, rc;
    sl_err err;
    sl_ops *ops;
    float *out; /* [n+2][tokens][H], tokens in the order of the run */
    int64_t tokens;
    double nll[MAX_ROWS], ref_nll[MAX_ROWS];
} rank_run;

static int keep(void *arg, int32_t k, const void *states, int64_t n, sl_err *err) {
    rank_run *r = arg;
    int64_t elems = n * r->g->H;
    float *out = r->out + (int64_t)k * r->tokens * r->g->H;
    if (n != r->tokens)
        return sl_err_set(err, SL_EINTERNAL, "sink got %lld tokens, expected %lld", (long long)n, (long long)r->tokens);
    if (r->ops->act == SL_F32) return r->ops->download(r->ops->ctx, out, states, (uint64_t)elems * 4, err);
    uint16_t *b = malloc((size_t)elems * 2);
    int rc = r->ops->download(r->ops->ctx, b, states, (uint64_t)elems * 2, err);
    for (int64_t i = 0; i < elems; i++) {
        uint32_t u = (uint32_t)b[i] << 16;
        memcpy(&out[i], &u, 4);
    }
    free(b);
    return rc;
}

static float head_at(const sl_mat *m, int64_t row, int64_t col) {
    const uint8_t *p = (const uint8_t *)m->data + (uint64_t)row * m->row_bytes;
    float f = 0;
    if (m->fmt == SL_W_F32) memcpy(&f, p + col * 4, 4);
    if (m->fmt == SL_W_BF16) {
        uint16_t h;
        memcpy(&h, p + col * 2, 2);
        uint32_t u = (uint32_t)h << 16;
        memcpy(&f, &u, 4);
    }
    return f;
}

/* Mean next-token NLL of golden row `g_row` from the reference's final states. */
static double plain_nll(const golden *g, int g_row, const sl_mat *head) {
    if ((head->fmt != SL_W_F32 && head->fmt != SL_W_BF16) || g->T[g_row] < 2) return NAN;
    double sum = 0, *logit = malloc((size_t)head->n * sizeof *logit);
    for (int64_t t = 0; t + 1 < g->T[g_row]; t++) {
        double z = 0, top = -INFINITY;
        for (int64_t v = 0; v < head->n; v++) {
            double d = 0;
            for (int i = 0; i < g->H; i++) d += (double)g->final[g_row][t * g->H + i] * (double)head_at(head, v, i);
            logit[v] = d;
            top = d > top ? d : top;
        }
        for (int64_t v = 0; v < head->n; v++) z += exp(logit[v] - top);
        sum += top + log(z) - logit[g->ids[g_row][t + 1]];
    }
    free(logit);
    return sum / (double)(g->T[g_row] - 1);
}

static int run_rows(rank_run *r, sl_model *m, sl_coll *coll) {
    const setup *s = r->s;
    sl_capture caps[SL_MAX_CAPTURES];
    for (int k = 0; k <= r->g->n; k++) caps[k] = (sl_capture){.hidx = (uint32_t)k};
    caps[r->g->n + 1] = (sl_capture){.hidx = (uint32_t)r->g->n, .final_norm = 1};
    sl_forward_row rows[MAX_ROWS];
    int64_t longest = 1, at = 0;
    int32_t *ids = malloc((size_t)r->tokens * 4);
    for (int i = 0; i < s->rows; i++) {
        int64_t T = r->g->T[s->order[i]];
        rows[i] = (sl_forward_row){.t0 = at, .T = T};
        memcpy(ids + at, r->g->ids[s->order[i]], (size_t)T * 4);
        at += T;
        longest = T > longest ? T : longest;
        r->nll[i] = r->rank == 0 ? 0 : -1;
    }
    sl_forward_opts o = {.batch_tokens = r->tokens,
                         .micro_tokens = s->micro,
                         .max_length = longest,
                         .max_rows = MAX_ROWS,
                         .captures = caps,
                         .n_captures = r->g->n + 2};
    sl_forward *f = NULL;
    int rc = sl_forward_create(&f, m, r->ops, coll, &o, &r->err);
    for (int pass = 0; pass < 2 && !rc; pass++) { /* twice: a batch must not depend on what the last one left behind */
        for (int i = 0; i < s->rows; i++) r->nll[i] = r->rank == 0 ? 0 : -1;
        rc = sl_forward_run(f, ids, rows, s->rows, r->nll, keep, r, &r->err);
    }
    if (!rc && r->rank == 0 && r->ops->act == SL_F32 && s->tp == 1) {
        sl_mat head = m->lm_head; /* a host copy: on a GPU the weights are not readable here */
        void *copy = malloc((size_t)head.n * head.row_bytes);
        rc = r->ops->download(r->ops->ctx, copy, head.data, (uint64_t)head.n * head.row_bytes, &r->err);
        head.data = copy;
        for (int i = 0; i < s->rows && !rc; i++) r->ref_nll[i] = plain_nll(r->g, s->order[i], &head);
        free(copy);
    }
    sl_forward_destroy(f);
    free(ids);
    return rc;
}

static int on_gpu; /* "cuda" on the command line: every rank on device 0, sums through the host */
static int bare;   /* "cuda:bare": without the library and without clusters (sl_cuda_force) */
static int open_ops(rank_run *r, const setup *s) {
#ifdef SL_HAVE_CUDA
    if (on_gpu) {
        int rc = sl_ops_cuda_create(&r->ops, 0, s->act, &r->err);
        if (!rc) sl_ops_cuda_force(r->ops, (sl_cuda_force){.one_cta = bare, .plain = bare});
        return rc;
    }
#endif
    return sl_ops_cpu_create(&r->ops, s->threads, s->act, &r->err);
}

/* Sums that run beside compute, at their latest: nothing is there before wait. */
typedef struct late_coll {
    sl_coll real, *inner;
    struct {
        void *h, *part;
        int64_t n;
    } todo[SL_COLL_FLIGHT];
    uint64_t begun;
} late_coll;
static int late_reduce(sl_coll *c, void *h, void *part, int64_t n, uint64_t *ticket, sl_err *err) {
    late_coll *l = c->impl;
    (void)err;
    *ticket = l->begun++;
    l->todo[*ticket % SL_COLL_FLIGHT].h = h;
    l->todo[*ticket % SL_COLL_FLIGHT].part = part;
    l->todo[*ticket % SL_COLL_FLIGHT].n = n;
    return 0;
}
static int late_wait(sl_coll *c, uint64_t ticket, sl_err *err) {
    late_coll *l = c->impl;
    uint64_t t, i = ticket % SL_COLL_FLIGHT;
    int rc = l->inner->reduce(l->inner, l->todo[i].h, l->todo[i].part, l->todo[i].n, &t, err);
    return rc ? rc : l->inner->wait(l->inner, t, err);
}
static sl_coll *make_late(late_coll *l, sl_coll *inner) {
    l->inner = inner;
    l->real = *inner;
    l->real.impl = l;
    l->real.overlaps = 1;
    l->real.reduce = late_reduce;
    l->real.wait = late_wait;
    return &l->real;
}

static void *rank_main(void *arg) {
    rank_run *r = arg;
    late_coll late = {0};
    const setup *s = r->s;
    sl_model *m = NULL;
    sl_coll *coll = NULL;
    sl_load_opts lo = {.model = s->dir,
                       .rank = r->rank,
                       .tp = s->tp,
                       .expert_split = s->split,
                       .top_layer = r->g->n,
                       .want_head = 1,
                       .random_format = -1};
    r->rc = open_ops(r, s);
    if (!r->rc) r->rc = sl_model_load(&m, &lo, r->ops, &r->err);
    if (!r->rc)
        r->rc = s->tp == 1 ? sl_coll_none_open(&coll, &r->err)
                           : sl_coll_shm_open(&coll, r->fd, r->rank, s->tp, 1, r->ops, &r->err);
    if (!r->rc) r->rc = run_rows(r, m, s->late ? make_late(&late, coll) : coll);
    if (r->rc) { /* the other ranks would wait for ever */
        printf("FAIL: rank %d of %d: %s\n", r->rank, s->tp, r->err.msg);
        fflush(stdout);
        _exit(1);
    }
    coll->destroy(coll);
    sl_model_free(m, r->ops);
    r->ops->destroy(r->ops);
    return NULL;
}

/* Runs s; out of rank 0 is returned, other ranks must equal it bit for bit. */
static rank_run run(const setup *s, const golden *g) {
    rank_run r[MAX_TP] = {0};
    pthread_t t[MAX_TP];
    int64_t tokens = 0;
    for (int i = 0; i < s->rows; i++) tokens += g->T[s->order[i]];
    size_t bytes = (size_t)(g->n + 2) * (size_t)tokens * (size_t)g->H * 4;
    sl_err err = {0};
    int fd = s->tp > 1 ? sl_coll_shm_create_region(s->tp, 1000, &err) : -1; /* small, so that reductions are cut */
    for (int i = 0; i < s->tp; i++) {
        r[i] = (rank_run){.s = s, .g = g, .rank = i, .fd = fd, .tokens = tokens, .out = malloc(bytes)};
        pthread_create(&t[i], NULL, rank_main, &r[i]);
    }
    for (int i = 0; i < s->tp; i++) pthread_join(t[i], NULL);
    for (int i = 1; i < s->tp; i++) {
        if (memcmp(r[0].out, r[i].out, bytes)) FAIL("tp %d: rank %d differs from rank 0", s->tp, i);
        free(r[i].out);
    }
    if (fd >= 0) close(fd);
    return r[0];
}

static const float *ref_state(const golden *g, int row, int k) {
    return k <= g->n ? g->states[row] + (int64_t)k * g->T[row] * g->H : g->final[row];
}

/* Worst relative error over rows and states of a run against the reference. */
static double judge(const setup *s, const golden *g, const rank_run *r, double tol, int print) {
    double worst = 0;
    int64_t at = 0;
    for (int i = 0; i < s->rows; i++) {
        int row = s->order[i];
        for (int k = 0; k <= g->n + 1; k++) {
            const float *a = r->out + ((int64_t)k * r->tokens + at) * g->H, *b = ref_state(g, row, k);
            double num = 0, den = 0;
            for (int64_t j = 0; j < g->T[row] * g->H; j++) {
                double d = (double)a[j] - (double)b[j];
                num += d * d;
                den += (double)b[j] * (double)b[j];
            }
            double rel = sqrt(num / fmax(den, 1e-30));
            if (print) printf("  row %d H[%d] %.3g\n", row, k, rel);
            if (!(rel <= tol) && !print)
                FAIL("tp %d split %d row %d state %d: relative error %.3g > %g", s->tp, s->split, row, k, rel, tol);
            if (!(rel <= worst)) worst = rel;
        }
        at += g->T[row];
    }
    return worst;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* compare.py --band */
static double judge_band(const setup *s, const golden *g, const rank_run *r, json_t *band, int print) {
    double worst = 0, *e = malloc((size_t)g->tokens * sizeof *e);
    for (int k = 0; k <= g->n + 1; k++) {
        int64_t at = 0, n = 0;
        for (int i = 0; i < s->rows; i++) {
            int row = s->order[i];
            for (int64_t t = 0; t < g->T[row]; t++) {
                const float *a = r->out + ((int64_t)k * r->tokens + at + t) * g->H,
                            *b = ref_state(g, row, k) + t * g->H;
                double num = 0, den = 0;
                for (int j = 0; j < g->H; j++)
                    num += pow((double)a[j] - (double)b[j], 2), den += (double)b[j] * (double)b[j];
                e[n++] = sqrt(num / fmax(den, 1e-30));
            }
            at += g->T[row];
        }
        qsort(e, (size_t)n, sizeof *e, by_value);
        json_t *bk = json_array_get(band, (size_t)k);
        double m = e[n / 2], q = e[n * 3 / 4], bm = 1.3 * json_number_value(json_object_get(bk, "median")) + .002,
               bq = 1.3 * json_number_value(json_object_get(bk, "p75")) + .004;
        if (print)
            printf("  H[%d] median %.4f (band %.4f) p75 %.4f (band %.4f)\n", k, m, bm, q, bq);
        else if (!(m <= bm && q <= bq))
            FAIL("tp %d state %d: median %.4f (band %.4f), 75 %% %.4f (band %.4f)", s->tp, k, m, bm, q, bq);
        worst = fmax(worst, fmax(m / bm, q / bq));
    }
    free(e);
    return worst;
}

static setup all_rows(const char *dir, const golden *g, int tp, int split, sl_dtype act) {
    setup s = {.dir = dir, .tp = tp, .split = split, .act = act, .rows = g->rows, .threads = 1};
    for (int i = 0; i < g->rows; i++) s.order[i] = i;
    return s;
}

static void check_nll(const setup *s, const rank_run *r) {
    int compared = 0;
    for (int i = 0; i < s->rows; i++) {
        if (r->g->T[s->order[i]] < 2) {
            if (r->nll[i] == r->nll[i]) FAIL("row %d of one token has NLL %g", s->order[i], r->nll[i]);
            continue;
        }
        if (!isfinite(r->nll[i])) FAIL("row %d has NLL %g", s->order[i], r->nll[i]);
        if (r->ref_nll[i] != r->ref_nll[i]) continue;
        compared++;
        if (fabs(r->nll[i] - r->ref_nll[i]) > 2e-4 * r->ref_nll[i])
            FAIL("row %d: NLL %.6f, reference %.6f", s->order[i], r->nll[i], r->ref_nll[i]);
    }
    printf("nll: %d rows compared\n", compared);
}

/* Rows in other company: alone, reversed, cut into micro-batches, two threads. */
static void check_company(const char *dir, const golden *g, const rank_run *full) {
    double worst = 0;
    setup rev = all_rows(dir, g, 1, 0, SL_F32);
    for (int i = 0; i < g->rows; i++) rev.order[i] = g->rows - 1 - i;
    rev.micro = 40;
    rev.threads = 2;
    for (int which = -1; which < g->rows; which++) {
        setup one = rev;
        if (which >= 0) one.rows = 1, one.order[0] = which;
        rank_run r = run(&one, g);
        int64_t at = 0;
        for (int i = 0; i < one.rows; at += g->T[one.order[i++]]) {
            int64_t full_at = 0;
            for (int j = 0; j < one.order[i]; j++) full_at += g->T[j];
            for (int k = 0; k <= g->n + 1; k++) {
                const float *a = r.out + ((int64_t)k * r.tokens + at) * g->H,
                            *b = full->out + ((int64_t)k * full->tokens + full_at) * g->H;
                double num = 0, den = 0;
                for (int64_t j = 0; j < g->T[one.order[i]] * g->H; j++) {
                    num += pow((double)a[j] - (double)b[j], 2);
                    den += (double)b[j] * (double)b[j];
                }
                double rel = sqrt(num / fmax(den, 1e-30));
                if (!(rel <= 1e-5))
                    FAIL("row %d %s state %d: %.3g from the full batch", one.order[i], which < 0 ? "reversed" : "alone",
                         k, rel);
                if (!(rel <= worst)) worst = rel;
            }
        }
        free(r.out);
    }
    printf("company: worst %.3g\n", worst);
}

/* Overlapped sums: the same bits as sums that are there at once, in f32. */
static void check_late(const setup *s, const golden *g) {
    setup l = *s;
    rank_run at_once = run(&l, g);
    l.late = 1;
    rank_run r = run(&l, g);
    size_t bytes = (size_t)(g->n + 2) * (size_t)r.tokens * (size_t)g->H * 4;
    if (on_gpu) /* halves may be computed by another algorithm of cuBLASLt */
        printf("f32 tp %d, %d rows overlapped: worst %.3g\n", s->tp, s->rows, judge(&l, g, &r, 5e-5, 0));
    else if (memcmp(r.out, at_once.out, bytes))
        FAIL("tp %d, %d rows: overlapped sums differ from sums at once", s->tp, s->rows);
    free(r.out);
    free(at_once.out);
}

static void check_widths(const char *dir, const golden *g, const sl_spec *spec, int probe) {
    int splits[] = {SL_EXPERTS_EP, SL_EXPERTS_TP}, n_splits = spec->experts ? 2 : 1;
    for (int i = 0; i < n_splits; i++) {
        int widths[MAX_TP], n = sl_spec_widths(spec, splits[i], MAX_TP, widths);
        if (n < 1) FAIL("no tensor-parallel width is allowed");
        for (int w = 0; w < n; w++) {
            setup s = all_rows(dir, g, widths[w], splits[i], SL_F32);
            rank_run r = run(&s, g);
            printf("f32 tp %d experts %s: worst %.3g\n", widths[w], splits[i] == SL_EXPERTS_EP ? "whole" : "sliced",
                   judge(&s, g, &r, on_gpu ? 5e-5 : 2e-5, probe));
            for (int rows = g->rows; rows > 0 && widths[w] == 2; rows--) { /* even halves, uneven ones, a row cut */
                setup some = s;
                some.rows = rows;
                check_late(&some, g);
            }
            if (widths[w] == 1 && i == 0) {
                check_nll(&s, &r);
                if (!probe) check_company(dir, g, &r);
            }
            free(r.out);
        }
    }
}

int main(int argc, char **argv) {
    if (argc < 2) return fprintf(stderr, "usage: test_forward GOLDEN/FAMILY [probe|cuda|cuda:bare]\n"), 2;
    const char *dir = argv[1], *family = strrchr(dir, '/') ? strrchr(dir, '/') + 1 : dir;
    int probe = argc > 2 && !strcmp(argv[2], "probe");
    bare = argc > 2 && !strcmp(argv[2], "cuda:bare");
    on_gpu = bare || (argc > 2 && !strcmp(argv[2], "cuda"));
#ifdef SL_HAVE_CUDA
    if (on_gpu && !sl_ops_cuda_devices()) return printf("SKIP: no CUDA device\n"), 77;
#else
    if (on_gpu) return printf("SKIP: this build has no CUDA backend\n"), 77;
#endif
    golden g = {0};
    if (load_golden(&g, dir)) return printf("SKIP: no golden states in %s\n", dir), 77;
    sl_spec *spec = calloc(1, sizeof *spec);
    sl_err err = {0};
    if (sl_spec_load(spec, dir, 0, &err)) return printf("FAIL: %s\n", err.msg), 1;
    check_widths(dir, &g, spec, probe);
    char path[1024];
    snprintf(path, sizeof path, "%s/../band.json", dir);
    json_t *bands = json_load_file(path, 0, NULL), *band = json_object_get(bands, family);
    if (!band) FAIL("no band for %s in %s", family, path);
    for (int tp = 1; tp <= (on_gpu ? 8 : 4) && band; tp *= 2) {
        if (sl_spec_check_tp(spec, SL_EXPERTS_AUTO, tp, &err)) continue;
        setup s = all_rows(dir, &g, tp, SL_EXPERTS_AUTO, SL_BF16);
        rank_run r = run(&s, &g);
        printf("bf16 tp %d: worst %.3g of the band\n", tp, judge_band(&s, &g, &r, band, probe));
        free(r.out);
    }
    json_decref(bands);
    sl_spec_free(spec);
    free(spec);
    for (int r = 0; r < g.rows; r++) free(g.ids[r]);
    free(g.file);
    printf("%s: %s\n", family, failures ? "FAILED" : "OK");
    return failures ? 1 : 0;
}
