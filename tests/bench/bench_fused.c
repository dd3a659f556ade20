/* bench_fused [TOKENS]: operations of the CUDA backend that do two things at once against the two, on the shapes of
 * Llama-3.1-8B and of DeepSeek-V2-Lite's dense layer, random bf16. One JSON line a pair: microseconds of either (median
 * of nine, turn about) and their ratio. Exit 77: no GPU. */
#include "kernels/ops.h"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { ROUNDS = 9 };

typedef struct rig {
    sl_ops *ops;
    int64_t T, H, I;
    void *h, *x, *part, *out, *mid, *scratch; /* [T, H] x 4, [T, I] x 2 */
    float *norm;
    sl_mat o, gate, up, down; /* [H, H], [I, H] twice, side by side, [H, I] */
    uint64_t key;             /* of the random data made last */
    sl_err err;
} rig;

static void need(rig *r, int rc, const char *what) {
    if (!rc) return;
    fprintf(stderr, "%s: %s\n", what, r->err.msg);
    exit(1);
}
static void *random_bf16(rig *r, int64_t rows, int64_t cols, float dev) {
    void *p;
    sl_fill f = {.kind = SL_FILL_BF16,
                 .key = ++r->key,
                 .dev = dev,
                 .e_n = 1,
                 .full_rows = rows,
                 .rows = rows,
                 .full_units = cols,
                 .units = cols};
    need(r, r->ops->alloc(r->ops->ctx, &p, (uint64_t)(rows * cols) * 2, "bench", &r->err), "alloc");
    need(r, r->ops->fill(r->ops->ctx, p, &f, &r->err), "fill");
    return p;
}
static sl_mat matrix(void *p, int64_t n, int64_t k) {
    return (sl_mat){.fmt = SL_W_BF16,
                    .n = n,
                    .k = k,
                    .count = 1,
                    .data = p,
                    .row_bytes = (uint64_t)k * 2,
                    .stride = (uint64_t)(n * k) * 2};
}

/* ---- the pairs: [0] apart, [1] together ---- */

static int add_then_norm(rig *r) {
    int rc = r->ops->add(r->ops->ctx, r->h, r->part, r->T * r->H, &r->err);
    return rc ? rc
              : r->ops->rmsnorm(r->ops->ctx, r->out, r->H, r->h, r->H, r->T, 1, r->H, r->norm, 1e-5f, SL_NORM_LLAMA,
                                &r->err);
}
static int add_norm(rig *r) {
    return r->ops->add_norm(r->ops->ctx, r->h, r->part, r->out, r->T, r->H, r->norm, 1e-5f, SL_NORM_LLAMA, &r->err);
}
static int product_then_add(rig *r, const void *x, const sl_mat *w) {
    int rc = r->ops->linear(r->ops->ctx, r->part, w->n, x, w->k, r->T, w, NULL, &r->err);
    return rc ? rc : r->ops->add(r->ops->ctx, r->h, r->part, r->T * w->n, &r->err);
}
static int o_then_add(rig *r) {
    return product_then_add(r, r->x, &r->o);
}
static int o_add(rig *r) {
    return r->ops->linear_add(r->ops->ctx, r->h, r->H, r->x, r->H, r->T, &r->o, &r->err);
}
static int down_then_add(rig *r) {
    return product_then_add(r, r->mid, &r->down);
}
static int down_add(rig *r) {
    return r->ops->linear_add(r->ops->ctx, r->h, r->H, r->mid, r->I, r->T, &r->down, &r->err);
}
static int glu(rig *r, int force) {
    sl_ops_cuda_force(r->ops, (sl_cuda_force){.glu = force});
    return r->ops->glu_linear(r->ops->ctx, r->mid, r->scratch, r->x, r->H, r->T, &r->gate, &r->up, SL_GLU_SILU, 0,
                              &r->err);
}
static int glu_apart(rig *r) {
    return glu(r, -1);
}
static int glu_together(rig *r) {
    return glu(r, 1);
}

static const struct {
    const char *what;
    int (*way[2])(rig *);
    int inner;
} pairs[] = {{"add and norm", {add_then_norm, add_norm}, 40},
             {"o product and add", {o_then_add, o_add}, 20},
             {"down product and add", {down_then_add, down_add}, 8},
             {"gate, up and activation", {glu_apart, glu_together}, 4}};

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}
static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(rig *r, const char *shape) {
    for (size_t p = 0; p < sizeof pairs / sizeof *pairs; p++) {
        double us[2][ROUNDS];
        for (int i = -2; i < 2 * ROUNDS; i++) { /* the first of either warms up and chooses algorithms */
            double t0 = now_us();
            for (int j = 0; j < pairs[p].inner; j++) need(r, pairs[p].way[i & 1](r), pairs[p].what);
            need(r, r->ops->sync(r->ops->ctx, &r->err), "sync");
            if (i >= 0) us[i & 1][i / 2] = (now_us() - t0) / pairs[p].inner;
        }
        for (int w = 0; w < 2; w++) qsort(us[w], ROUNDS, sizeof *us[w], by_value);
        double apart = us[0][ROUNDS / 2], together = us[1][ROUNDS / 2];
        printf("{\"shape\": \"%s\", \"tokens\": %lld, \"what\": \"%s\", \"apart_us\": %.1f, \"together_us\": %.1f, "
               "\"ratio\": %.4f}\n",
               shape, (long long)r->T, pairs[p].what, apart, together, apart / together);
        fflush(stdout);
    }
}

static void run_shape(sl_ops *ops, const char *shape, int64_t T, int64_t H, int64_t I) {
    rig r = {.ops = ops, .T = T, .H = H, .I = I};
    void *norm;
    sl_fill f = {
        .kind = SL_FILL_F32, .key = 99, .dev = 1, .e_n = 1, .full_rows = 1, .rows = 1, .full_units = H, .units = H};
    need(&r, ops->alloc(ops->ctx, &norm, (uint64_t)H * 4, "norm", &r.err), "alloc");
    need(&r, ops->fill(ops->ctx, norm, &f, &r.err), "fill");
    r.norm = norm;
    r.h = random_bf16(&r, T, H, 1);
    r.x = random_bf16(&r, T, H, 1);
    r.part = random_bf16(&r, T, H, 1);
    r.out = random_bf16(&r, T, H, 1);
    r.mid = random_bf16(&r, T, I, 1);
    r.scratch = random_bf16(&r, T, I, 1);
    r.o = matrix(random_bf16(&r, H, H, 0.001f), H, H); /* small: h is added to many times */
    r.gate = matrix(random_bf16(&r, 2 * I, H, 0.02f), I, H);
    r.up = matrix((uint8_t *)(uintptr_t)r.gate.data + r.gate.stride, I, H);
    r.down = matrix(random_bf16(&r, H, I, 0.001f), H, I);
    measure(&r, shape);
    void *all[] = {norm,
                   r.h,
                   r.x,
                   r.part,
                   r.out,
                   r.mid,
                   r.scratch,
                   (void *)(uintptr_t)r.o.data,
                   (void *)(uintptr_t)r.gate.data,
                   (void *)(uintptr_t)r.down.data};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) ops->free(ops->ctx, all[i]);
}

int main(int argc, char **argv) {
    int64_t T = argc > 1 ? atoll(argv[1]) : 16384;
    sl_err err = {0};
    sl_ops *ops;
    if (!sl_ops_cuda_devices()) return printf("SKIP: no CUDA device\n"), 77;
    if (T < 1) return fprintf(stderr, "usage: bench_fused [TOKENS]\n"), 2;
    if (sl_ops_cuda_create(&ops, 0, SL_BF16, &err)) return fprintf(stderr, "%s\n", err.msg), 1;
    run_shape(ops, "Llama-3.1-8B", T, 4096, 14336);
    run_shape(ops, "DeepSeek-V2-Lite dense", T, 2048, 10944);
    ops->destroy(ops);
    return 0;
}
