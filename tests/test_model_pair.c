/* Two files of one model must give the same states: `test_model_pair A B TOL` loads both, runs the same two rows in f32
 * and compares every state; B also at its widest tensor-parallel width up to 4 and with its experts sliced, slices put
 * together by an all-reduce. With A a golden checkpoint and B the GGUF that tests/tools/make_gguf.py made of it, this
 * tests names, row order, metadata, block formats and slicing of the GGUF path against code that was written apart from
 * it. */
#include "ipc/boot.h"
#include "stages/compute/forward.h"
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ROW0 = 41, ROW1 = 9, TOKENS = ROW0 + ROW1 };

typedef struct run {
    const char *model;
    int rank, tp, split, fd, rc, n, H, states;
    float *out; /* rank 0: [n+1][TOKENS][H] */
    sl_err err;
} run;

static int keep(void *arg, int32_t k, const void *states, int64_t n, sl_err *err) {
    run *r = arg;
    (void)err;
    r->states++;
    if (r->rank == 0) memcpy(r->out + (int64_t)k * TOKENS * r->H, states, (size_t)(n * r->H) * 4);
    return 0;
}

static int forward(run *r, sl_model *m, sl_ops *ops, sl_coll *coll) {
    sl_capture caps[SL_MAX_CAPTURES];
    int32_t ids[TOKENS];
    for (int i = 0; i < TOKENS; i++) ids[i] = (i * 37 + 11) % m->spec.vocab;
    for (int k = 0; k <= r->n; k++) caps[k] = (sl_capture){.hidx = (uint32_t)k};
    sl_forward_row rows[2] = {{0, ROW0}, {ROW0, ROW1}};
    sl_forward_opts o = {
        .batch_tokens = TOKENS, .max_length = ROW0, .max_rows = 2, .captures = caps, .n_captures = r->n + 1};
    sl_forward *f = NULL;
    int rc = sl_forward_create(&f, m, ops, coll, &o, &r->err);
    if (!rc) rc = sl_forward_run(f, ids, rows, 2, NULL, keep, r, &r->err);
    sl_forward_destroy(f);
    return rc;
}

static void *rank_main(void *arg) {
    run *r = arg;
    sl_ops *ops = NULL;
    sl_model *m = NULL;
    sl_coll *coll = NULL;
    sl_spec *s = calloc(1, sizeof *s);
    r->rc = sl_spec_load(s, r->model, 0, &r->err);
    r->n = s->n_layers;
    r->H = s->width;
    if (!r->rc) r->rc = sl_ops_cpu_create(&ops, 1, SL_F32, &r->err);
    sl_load_opts o = {.model = r->model,
                      .rank = r->rank,
                      .tp = r->tp,
                      .expert_split = r->split,
                      .top_layer = r->n,
                      .want_head = 1,
                      .random_format = -1};
    if (!r->rc) r->rc = sl_model_load(&m, &o, ops, &r->err);
    if (!r->rc && r->rank == 0) r->out = calloc((size_t)(r->n + 1) * TOKENS * (size_t)r->H, 4);
    if (!r->rc)
        r->rc = r->tp > 1 ? sl_coll_shm_open(&coll, r->fd, r->rank, r->tp, 1, ops, &r->err)
                          : sl_coll_none_open(&coll, &r->err);
    if (!r->rc) r->rc = forward(r, m, ops, coll);
    if (coll) coll->destroy(coll);
    if (m) sl_model_free(m, ops);
    if (ops) ops->destroy(ops);
    sl_spec_free(s);
    free(s);
    return NULL;
}

static float *states_of(const char *model, int tp, int split, int *n, int *H) {
    run r[8] = {{0}};
    pthread_t th[8];
    sl_err err = {0};
    int fd = tp > 1 ? sl_coll_shm_create_region(tp, 1 << 16, &err) : -1;
    for (int i = 0; i < tp; i++) {
        r[i] = (run){.model = model, .rank = i, .tp = tp, .split = split, .fd = fd};
        pthread_create(&th[i], NULL, rank_main, &r[i]);
    }
    for (int i = 0; i < tp; i++) pthread_join(th[i], NULL);
    if (fd >= 0) close(fd);
    for (int i = 0; i < tp; i++)
        if (r[i].rc) {
            printf("FAIL: %s, rank %d of %d: %s\n", model, i, tp, r[i].err.msg);
            exit(1);
        }
    *n = r[0].n;
    *H = r[0].H;
    if (r[0].states != r[0].n + 1) exit(1);
    return r[0].out;
}

static double worst(const float *a, const float *b, int n, int H) {
    double top = 0;
    for (int k = 0; k <= n; k++) {
        double num = 0, den = 0;
        for (int i = 0; i < TOKENS * H; i++) {
            double x = a[(int64_t)k * TOKENS * H + i], y = b[(int64_t)k * TOKENS * H + i];
            num += (x - y) * (x - y);
            den += y * y;
        }
        double e = sqrt(num / den);
        if (!(e <= top)) top = e;
    }
    return top;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    double tol = atof(argv[3]);
    int n, H, n2, H2, bad = 0;
    float *a = states_of(argv[1], 1, SL_EXPERTS_AUTO, &n, &H);
    sl_spec *s = calloc(1, sizeof *s);
    sl_err err = {0};
    if (sl_spec_load(s, argv[2], 0, &err)) {
        printf("FAIL: %s\n", err.msg);
        return 1;
    }
    for (int split = SL_EXPERTS_AUTO; split <= SL_EXPERTS_TP; split += SL_EXPERTS_TP) {
        int w[8], nw = sl_spec_widths(s, split, 4, w);
        for (int i = 0; i<nw; i += nw> 1 ? nw - 1 : 1) {
            float *b = states_of(argv[2], w[i], split, &n2, &H2);
            double e = n == n2 && H == H2 ? worst(b, a, n, H) : INFINITY;
            printf("%s tp %d split %d: worst %.3g\n", argv[2], w[i], split, e);
            bad |= !(e <= tol);
            free(b);
        }
        if (!s->experts) break;
    }
    free(a);
    sl_spec_free(s);
    free(s);
    puts(bad ? "FAILED" : "OK");
    return bad;
}
