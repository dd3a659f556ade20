#include "stages/compute/bench_ops.h"
#include "ipc/boot.h"
#include "ipc/metrics.h"
#include "stages/compute/bench_ranks.h"
#include "stages/compute/collective.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        int rc_ = (call);                                                                                              \
        if (rc_) return rc_;                                                                                           \
    } while (0)

typedef struct bench {
    const sl_bench_op_opts *o;
    sl_ops *ops;
    uint64_t es;
    uint64_t key;
    void *mem[32];
    int n_mem;
    /* operands, as each kind needs them */
    void *x, *out, *k, *v, *part, *hidden, *hidden2;
    int32_t *cu, *idx;
    float *weight;
    sl_attn attn;
    sl_mat w, gate, up, down, router;
    sl_moe moe;
    sl_router route;
} bench;

static int open_ops(sl_ops **ops, const sl_bench_op_opts *o, int device, sl_err *err) {
    sl_dtype act = o->precision == SL_PREC_F32 ? SL_F32 : SL_BF16;
    if (o->backend == SL_BACKEND_CPU) return sl_ops_cpu_create(ops, o->threads, act, err);
#ifdef SL_HAVE_CUDA
    return sl_ops_cuda_create(ops, device, act, err);
#else
    (void)device;
    return sl_err_set(err, SL_ECONFIG, "bench: this program was built without that backend");
#endif
}

static int get(bench *b, void *p, uint64_t bytes, const char *what, sl_err *err) {
    void *m = NULL;
    if (b->n_mem == 32) return sl_err_set(err, SL_EINTERNAL, "bench: too many buffers");
    TRY(b->ops->alloc(b->ops->ctx, &m, bytes, what, err));
    b->mem[b->n_mem++] = m;
    memcpy(p, &m, sizeof m);
    return 0;
}

/* ---- random operands ---- */
static float normal(uint64_t *x) {
    float s = 0;
    for (int i = 0; i < 4; i++) {
        *x ^= *x << 13, *x ^= *x >> 7, *x ^= *x << 17;
        s += (float)(*x >> 40) * 0x1p-24f - 0.5f;
    }
    return s * 1.7320508f;
}

static int fill_host(bench *b, void *dst, const sl_fill *f, sl_err *err) {
    uint64_t n = (uint64_t)(f->e_n * f->rows * f->units), x = f->key | 1;
    uint64_t unit = f->kind == SL_FILL_F32 ? 4 : f->kind == SL_FILL_WORDS ? 8 : 2;
    uint8_t *h = malloc(n * unit);
    if (!h) return sl_err_set(err, SL_ETEMP, "bench: out of memory");
    for (uint64_t i = 0; i < n; i++) {
        float v = f->dev * (f->kind == SL_FILL_SCALE_BF16 ? 1 : normal(&x));
        uint32_t u;
        memcpy(&u, &v, 4);
        uint16_t half = (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        memcpy(h + i * unit, f->kind == SL_FILL_WORDS ? (void *)&x : unit == 4 ? (void *)&v : (void *)&half, unit);
    }
    int rc = b->ops->upload(b->ops->ctx, dst, h, n * unit, err);
    if (!rc) rc = b->ops->sync(b->ops->ctx, err);
    free(h);
    return rc;
}

static int fill(bench *b, void *dst, sl_fill_kind kind, float dev, int64_t e, int64_t rows, int64_t units,
                sl_err *err) {
    sl_fill f = {.kind = kind,
                 .key = b->key += 0x9e3779b97f4a7c15ull,
                 .dev = dev,
                 .e_n = e,
                 .full_rows = rows,
                 .rows = rows,
                 .full_units = units,
                 .units = units};
    return b->ops->fill ? b->ops->fill(b->ops->ctx, dst, &f, err) : fill_host(b, dst, &f, err);
}

static int activations(bench *b, void *p, int64_t rows, int64_t width, sl_err *err) {
    void *m = NULL;
    TRY(get(b, &m, (uint64_t)(rows * width) * b->es, "activations", err));
    memcpy(p, &m, sizeof m);
    return fill(b, m, b->es == 4 ? SL_FILL_F32 : SL_FILL_BF16, 1, 1, rows, width, err);
}

static int matrix(bench *b, sl_mat *m, sl_wfmt fmt, int64_t n, int64_t k, int64_t count, sl_err *err) {
    if (fmt == SL_W_BF16 && b->es == 4) fmt = SL_W_F32;
    *m = (sl_mat){.fmt = fmt, .n = n, .k = k, .count = count, .row_bytes = sl_wfmt_row_bytes(fmt, k)};
    m->stride = (uint64_t)n * m->row_bytes;
    void *data = NULL, *scale = NULL;
    TRY(get(b, &data, m->stride * (uint64_t)count, "weights", err));
    m->data = data;
    float dev = 1 / sqrtf((float)k);
    if (fmt != SL_W_INT4) return fill(b, data, fmt == SL_W_F32 ? SL_FILL_F32 : SL_FILL_BF16, dev, count, n, k, err);
    m->group = 32, m->scale_dtype = SL_BF16, m->scale_row = (uint64_t)k / 32;
    m->scale_stride = (uint64_t)n * m->scale_row * 2;
    TRY(get(b, &scale, m->scale_stride * (uint64_t)count, "scales", err));
    m->scale = scale;
    TRY(fill(b, data, SL_FILL_WORDS, 1, count, n, k / 16, err));
    return fill(b, scale, SL_FILL_SCALE_BF16, dev / 4.6f, count, n, k / 32, err);
}

/* ---- timing ---- */
static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int time_it(bench *b, int (*op)(bench *, sl_err *), sl_bench_op_result *r, sl_err *err) {
    int32_t inner = b->o->inner < 1 ? 1 : b->o->inner;
    for (int32_t i = -1; i < b->o->repeat; i++) { /* the first is not counted */
        uint64_t t0 = sl_now_ns();
        for (int32_t j = 0; j < inner; j++) TRY(op(b, err));
        TRY(b->ops->sync(b->ops->ctx, err));
        if (i >= 0) r->seconds[i] = (double)(sl_now_ns() - t0) / 1e9 / inner;
    }
    r->runs = b->o->repeat;
    qsort(r->seconds, (size_t)r->runs, sizeof *r->seconds, by_value);
    return 0;
}

static int product(bench *b, sl_err *err) {
    return b->ops->linear(b->ops->ctx, b->out, b->w.n, b->x, b->w.k, b->o->tokens, &b->w, NULL, err);
}

/* The same seconds of a large product, so that both see the same clocks. */
static int ceiling(const sl_bench_op_opts *o, sl_bench_op_result *r, sl_err *err) {
    int64_t n = o->backend == SL_BACKEND_CPU ? 1024 : 8192;
    sl_bench_op_opts big = {.backend = o->backend,
                            .precision = o->precision,
                            .threads = o->threads,
                            .tokens = n,
                            .repeat = 5,
                            .inner = o->backend == SL_BACKEND_CPU ? 1 : 20};
    bench b = {.o = &big, .key = 99, .es = o->precision == SL_PREC_F32 ? 4 : 2};
    sl_bench_op_result c = {0};
    int rc = open_ops(&b.ops, o, 0, err);
    if (!rc) rc = activations(&b, &b.x, n, n, err);
    if (!rc) rc = activations(&b, &b.out, n, n, err);
    if (!rc) rc = matrix(&b, &b.w, SL_W_BF16, n, n, 1, err);
    if (!rc) rc = time_it(&b, product, &c, err);
    if (!rc) r->ceiling_flop_s = 2 * (double)n * (double)n * (double)n / c.seconds[c.runs / 2];
    for (int i = 0; i < b.n_mem; i++) b.ops->free(b.ops->ctx, b.mem[i]);
    if (b.ops) b.ops->destroy(b.ops);
    return rc;
}

typedef struct kind {
    int (*prepare)(bench *, sl_bench_op_result *, sl_err *);
    int (*op)(bench *, sl_err *);
} kind;

static int run(const kind *k, sl_bench_op_result *r, const sl_bench_op_opts *o, sl_err *err) {
    memset(r, 0, sizeof *r);
    if (o->repeat < 1 || o->repeat > SL_BENCH_OP_RUNS)
        return sl_err_set(err, SL_EUSAGE, "bench: repeat must be 1..%d", SL_BENCH_OP_RUNS);
    bench b = {.o = o, .key = 1, .es = o->precision == SL_PREC_F32 ? 4 : 2};
    int rc = open_ops(&b.ops, o, 0, err);
    if (!rc) rc = k->prepare(&b, r, err);
    if (!rc) rc = time_it(&b, k->op, r, err);
    for (int i = 0; i < b.n_mem; i++) b.ops->free(b.ops->ctx, b.mem[i]);
    if (b.ops) b.ops->destroy(b.ops);
    free(b.cu);
    return rc ? rc : ceiling(o, r, err);
}

int sl_bench_ceiling(double *flop_s, int backend, int precision, int threads, sl_err *err) {
    sl_bench_op_opts o = {.backend = backend, .precision = precision, .threads = threads};
    sl_bench_op_result r = {0};
    int rc = ceiling(&o, &r, err);
    *flop_s = r.ceiling_flop_s;
    return rc;
}

/* ---- gemm ---- */
static int prepare_gemm(bench *b, sl_bench_op_result *r, sl_err *err) {
    const sl_bench_op_opts *o = b->o;
    TRY(activations(b, &b->x, o->tokens, o->width, err));
    TRY(activations(b, &b->out, o->tokens, o->out, err));
    TRY(matrix(b, &b->w, SL_W_BF16, o->out, o->width, 1, err));
    r->flop = 2.0 * (double)o->tokens * (double)o->width * (double)o->out;
    r->bytes = (double)b->es * (double)(o->tokens * (o->width + o->out) + o->width * o->out);
    return 0;
}
int sl_bench_gemm(sl_bench_op_result *r, const sl_bench_op_opts *o, sl_err *err) {
    return run(&(kind){prepare_gemm, product}, r, o, err);
}

/* ---- attention ---- */
static int prepare_attention(bench *b, sl_bench_op_result *r, sl_err *err) {
    const sl_bench_op_opts *o = b->o;
    int64_t T = 0;
    double pairs = 0;
    if (o->kv_heads < 1 || o->heads % o->kv_heads)
        return sl_err_set(err, SL_EUSAGE, "bench: %d heads are no multiple of %d kv heads", o->heads, o->kv_heads);
    b->attn = (sl_attn){.heads = o->heads,
                        .kv_heads = o->kv_heads,
                        .dqk = o->dqk,
                        .dv = o->dv,
                        .scale = 1 / sqrtf((float)o->dqk),
                        .window = o->window,
                        .q_stride = (int64_t)o->heads * o->dqk,
                        .k_stride = (int64_t)o->kv_heads * o->dqk,
                        .v_stride = (int64_t)o->kv_heads * o->dv,
                        .o_stride = (int64_t)o->heads * o->dv,
                        .k_head_stride = o->dqk,
                        .v_head_stride = o->dv};
    b->cu = malloc(((size_t)o->rows + 1) * sizeof *b->cu);
    if (!b->cu) return sl_err_set(err, SL_ETEMP, "bench: out of memory");
    for (int32_t i = 0; i < o->rows; i++) {
        double n = o->lengths ? o->lengths[i] : o->length, w = o->window;
        b->cu[i] = (int32_t)T;
        T += (int64_t)n;
        pairs += w && w < n ? w * (n - 0.5 * w) : 0.5 * n * n;
    }
    b->cu[o->rows] = (int32_t)T;
    TRY(activations(b, &b->x, T, b->attn.q_stride, err));
    TRY(activations(b, &b->k, T, b->attn.k_stride, err));
    TRY(activations(b, &b->v, T, b->attn.v_stride, err));
    TRY(activations(b, &b->out, T, b->attn.o_stride, err));
    r->flop = 2.0 * o->heads * pairs * (o->dqk + o->dv);
    r->bytes =
        (double)b->es * (double)T * (double)(b->attn.q_stride + b->attn.k_stride + b->attn.v_stride + b->attn.o_stride);
    return 0;
}
static int op_attention(bench *b, sl_err *err) {
    return b->ops->attention(b->ops->ctx, b->out, b->x, b->k, b->v, b->cu, b->o->rows, &b->attn, err);
}
int sl_bench_attention(sl_bench_op_result *r, const sl_bench_op_opts *o, sl_err *err) {
    return run(&(kind){prepare_attention, op_attention}, r, o, err);
}

/* ---- moe ---- */
static int prepare_moe(bench *b, sl_bench_op_result *r, sl_err *err) {
    const sl_bench_op_opts *o = b->o;
    int64_t T = o->tokens, H = o->width, I = o->out, shared = I * o->shared;
    sl_moe *m = &b->moe;
    *m = (sl_moe){.experts = o->experts, .local = o->experts, .top_k = o->top_k, .glu = SL_GLU_SILU};
    TRY(activations(b, &b->x, T, H, err));
    TRY(activations(b, &b->out, T, H, err));
    TRY(matrix(b, &m->gate, (sl_wfmt)o->fmt, I, H, o->experts, err));
    TRY(matrix(b, &m->up, (sl_wfmt)o->fmt, I, H, o->experts, err));
    TRY(matrix(b, &m->down, (sl_wfmt)o->fmt, H, I, o->experts, err));
    TRY(matrix(b, &b->router, SL_W_BF16, o->experts, H, 1, err));
    if (shared) {
        TRY(matrix(b, &b->gate, SL_W_BF16, shared, H, 1, err));
        TRY(matrix(b, &b->up, SL_W_BF16, shared, H, 1, err));
        TRY(matrix(b, &b->down, SL_W_BF16, H, shared, 1, err));
        TRY(activations(b, &b->part, T, H, err));
        TRY(activations(b, &b->hidden, T, shared, err));
        TRY(activations(b, &b->hidden2, T, shared, err));
    }
    TRY(get(b, &b->idx, (uint64_t)(T * o->top_k) * 4, "choices", err));
    TRY(get(b, &b->weight, (uint64_t)(T * o->top_k) * 4, "choices", err));
    b->route = (sl_router){.experts = o->experts,
                           .top_k = o->top_k,
                           .score = SL_SCORE_SIGMOID,
                           .n_group = 1,
                           .topk_group = 1,
                           .renorm = 1,
                           .scale = 1};
    sl_mat *mats[] = {&m->gate, &m->up, &m->down};
    for (unsigned i = 0; i < 3; i++) { /* formats that are expanded once a batch: outside the timing */
        uint64_t need = b->ops->prepare_bytes(b->ops->ctx, mats[i]);
        void *scratch = NULL;
        if (need) TRY(get(b, &scratch, need, "prepared weights", err));
        sl_mat raw = *mats[i];
        TRY(b->ops->prepare(b->ops->ctx, mats[i], &raw, scratch, err));
    }
    uint64_t ws = b->ops->moe_bytes(b->ops->ctx, T, H, m);
    void *w = NULL;
    TRY(get(b, &w, ws, "workspace", err));
    TRY(b->ops->set_workspace(b->ops->ctx, w, ws, err));
    double k = o->top_k, t = (double)T;
    r->flop = 2 * t * (double)H * ((double)o->experts + 3 * (k * (double)I + (double)shared));
    r->bytes = (double)b->es * t * (double)H * 2 +
               3.0 * (double)o->experts * (double)I * (double)H * (o->fmt == SL_W_INT4 ? 0.5625 : 2);
    return 0;
}
static int op_moe(bench *b, sl_err *err) {
    const sl_ops *p = b->ops;
    int64_t T = b->o->tokens, H = b->o->width, S = b->gate.n;
    TRY(p->route(p->ctx, b->idx, b->weight, b->x, T, H, &b->router, &b->route, err));
    TRY(p->moe(p->ctx, b->out, b->x, T, H, b->idx, b->weight, &b->moe, err));
    if (!b->gate.data) return 0;
    TRY(p->linear(p->ctx, b->hidden, S, b->x, H, T, &b->gate, NULL, err));
    TRY(p->linear(p->ctx, b->hidden2, S, b->x, H, T, &b->up, NULL, err));
    TRY(p->glu(p->ctx, b->hidden, b->hidden, S, b->hidden2, S, T, S, SL_GLU_SILU, 0, err));
    if (p->linear_add) return p->linear_add(p->ctx, b->out, H, b->hidden, S, T, &b->down, err);
    TRY(p->linear(p->ctx, b->part, H, b->hidden, S, T, &b->down, NULL, err));
    return p->add(p->ctx, b->out, b->part, T * H, err);
}
int sl_bench_moe(sl_bench_op_result *r, const sl_bench_op_opts *o, sl_err *err) {
    return run(&(kind){prepare_moe, op_moe}, r, o, err);
}

/* ---- allreduce ---- */
typedef struct reduce_arg {
    const sl_bench_op_opts *o;
    int fd;
} reduce_arg;

/* Onto a residual, as the forward pass does; the ring's bare sum is NCCL's best. */
static int time_sums(bench *b, sl_coll *c, sl_bench_op_result *r, sl_err *err) {
    int64_t n = b->o->tokens * b->o->width;
    TRY(activations(b, &b->x, b->o->tokens, b->o->width, err));
    TRY(activations(b, &b->out, b->o->tokens, b->o->width, err));
    if (c->scratch_bytes(c, n)) TRY(get(b, &c->scratch, c->scratch_bytes(c, n), "the ranks' sums", err));
    if (c->memory) TRY(c->memory(c, b->x, (uint64_t)n * b->es, err));
    if (c->memory) TRY(c->memory(c, b->out, (uint64_t)n * b->es, err));
    r->how = c->how;
    TRY(b->ops->sync(b->ops->ctx, err));
    for (int32_t i = -1; i < b->o->repeat; i++) {
        uint64_t ticket = 0;
        TRY(c->barrier(c, err));
        uint64_t t0 = sl_now_ns();
        for (int32_t j = 0; j < b->o->inner; j++)
            TRY(c->reduce(c, b->o->how == SL_SUMS_RING ? NULL : b->out, b->x, n, &ticket, err));
        TRY(c->wait(c, ticket, err));
        TRY(b->ops->sync(b->ops->ctx, err));
        if (i >= 0) r->seconds[i] = (double)(sl_now_ns() - t0) / 1e9 / b->o->inner;
    }
    return c->barrier(c, err); /* nobody frees what another still reads */
}

static int reduce_rank(void *arg, int rank, void *result, sl_err *err) {
    const reduce_arg *a = arg;
    const sl_bench_op_opts *o = a->o;
    bench b = {.o = o, .key = (uint64_t)rank + 1, .es = o->precision == SL_PREC_F32 ? 4 : 2};
    sl_coll *c = NULL;
    int gpus = 0;
#ifdef SL_HAVE_CUDA
    if (o->backend == SL_BACKEND_CUDA) gpus = sl_ops_cuda_devices();
#endif
    int rc = open_ops(&b.ops, o, gpus ? rank % gpus : 0, err);
    if (!rc) rc = sl_coll_shm_open(&c, a->fd, rank, o->ranks, 1, b.ops, err);
#ifdef SL_HAVE_NCCL
    char note[256];
    if (!rc && gpus >= o->ranks) rc = sl_coll_gpu_open(&c, c, b.ops, o->how, note, err);
#endif
    if (!rc) rc = time_sums(&b, c, result, err);
    if (c) c->destroy(c);
    for (int i = 0; i < b.n_mem; i++) b.ops->free(b.ops->ctx, b.mem[i]);
    if (b.ops) b.ops->destroy(b.ops);
    return rc;
}

int sl_bench_allreduce(sl_bench_op_result *r, const sl_bench_op_opts *o, sl_err *err) {
    memset(r, 0, sizeof *r);
    if (o->ranks < 2 || o->ranks > SL_BENCH_RANKS || o->repeat < 1 || o->repeat > SL_BENCH_OP_RUNS || o->inner < 1)
        return sl_err_set(err, SL_EUSAGE, "bench: allreduce takes 2 to %d ranks and 1..%d repeats", SL_BENCH_RANKS,
                          SL_BENCH_OP_RUNS);
    sl_bench_op_result *all = calloc((size_t)o->ranks, sizeof *all);
    if (!all) return sl_err_set(err, SL_ETEMP, "bench: out of memory");
    reduce_arg a = {.o = o, .fd = sl_coll_shm_create_region(o->ranks, o->tokens * o->width, err)};
    int rc = a.fd < 0 ? err->code : sl_bench_ranks_run(o->ranks, reduce_rank, &a, all, sizeof *all, err);
    if (a.fd >= 0) close(a.fd);
    *r = all[0];
    free(all);
    r->runs = o->repeat;
    r->bytes = (double)(o->tokens * o->width) * (o->precision == SL_PREC_F32 ? 4 : 2);
    qsort(r->seconds, (size_t)r->runs, sizeof *r->seconds, by_value);
    return rc;
}
