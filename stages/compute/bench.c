#include "stages/compute/bench.h"
#include "stages/compute/bench_ops.h"
#include "stages/compute/bench_ranks.h"
#include "stages/compute/forward.h"
#include "ipc/metrics.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_SUMS 8192
typedef struct bench {
    const sl_bench_opts *o;
    int rank, tp, device, coll_fd;
    sl_coll real; /* the collective as it was opened, while runs leave the sums out */
    struct {
        void *h, *part;
        int64_t n;
    } sum[MAX_SUMS]; /* of the last run that left them out */
    int32_t n_sums;
    sl_ops *ops;
    sl_model *model;
    sl_coll *coll;
    sl_forward *fwd;
    sl_forward_row *rows;
    int32_t *ids;
    sl_capture captures[SL_MAX_CAPTURES];
    uint32_t hidx[SL_MAX_CAPTURES], chunk_rows;
    int want_head;
    /* capture */
    uint8_t *arena;
    uint64_t arena_bytes, es;
    uint64_t *sums, ticket;
    uint32_t *nonfinite;
} bench;

static int on_state(void *arg, int32_t k, const void *states, int64_t n, sl_err *err) {
    bench *b = arg;
    int64_t H = b->model->spec.width;
    int rc = b->ops->fingerprint(b->ops->ctx, b->sums, b->nonfinite, states, n, H, b->chunk_rows, err);
    uint64_t off = 0;
    for (int64_t t = 0; t < n && !rc; t += b->chunk_rows) {
        if (sl_chunk_owner(0, (uint32_t)k, (uint32_t)(t / b->chunk_rows), (uint32_t)b->tp) != (uint32_t)b->rank)
            continue;
        int64_t T = n - t < b->chunk_rows ? n - t : b->chunk_rows;
        uint64_t bytes = (uint64_t)(T * H) * b->es;
        if (off + bytes > b->arena_bytes) off = 0;
        rc = b->ops->capture_copy(b->ops->ctx, b->arena + off, (const uint8_t *)states + (uint64_t)(t * H) * b->es,
                                  bytes, &b->ticket, err);
        off += bytes;
    }
    return rc;
}

static int open_model(bench *b, sl_bench_result *r, sl_err *err) {
    const sl_bench_opts *o = b->o;
    sl_dtype act = o->precision == SL_PREC_F32 ? SL_F32 : SL_BF16;
    b->es = act == SL_F32 ? 4 : 2;
    sl_spec *s = calloc(1, sizeof *s);
    if (!s) return sl_err_set(err, SL_ETEMP, "bench: out of memory");
    int rc = sl_spec_load(s, o->model, 0, err), n = 0;
    if (!rc) n = sl_spec_layers(o->layers ? o->layers : "eagle3", s->n_layers, b->hidx, SL_MAX_CAPTURES, err);
    if (n < 0) rc = n;
    sl_load_opts lo = {.model = o->model,
                       .rank = b->rank,
                       .tp = b->tp,
                       .expert_split = o->expert_split,
                       .top_layer = n > 0 ? (int)b->hidx[n - 1] : 0,
                       .want_head = b->want_head,
                       .random = o->random,
                       .seed = o->seed,
                       .random_format = o->random_format};
    sl_model_plan plan = {0};
    if (!rc) rc = sl_spec_check_tp(s, o->expert_split, b->tp, err);
    if (!rc) rc = sl_model_plan_make(&plan, s, &lo, err);
    if (!rc) snprintf(r->family, sizeof r->family, "%s", s->family);
    r->params = plan.params;
    r->weight_bytes = plan.weight_bytes;
    sl_spec_free(s);
    free(s);
    for (int i = 0; i < n; i++) b->captures[i] = (sl_capture){.hidx = b->hidx[i]};
    r->n_captures = n;
    if (!rc && o->backend == SL_BACKEND_CPU) rc = sl_ops_cpu_create(&b->ops, o->threads, act, err);
#ifdef SL_HAVE_CUDA
    if (!rc && o->backend == SL_BACKEND_CUDA) rc = sl_ops_cuda_create(&b->ops, b->device, act, err);
#endif
    if (!rc && !b->ops) rc = sl_err_set(err, SL_ECONFIG, "bench: this program was built without that backend");
    uint64_t t0 = sl_now_ns();
    if (!rc) rc = sl_model_load(&b->model, &lo, b->ops, err);
    r->load_s = (double)(sl_now_ns() - t0) / 1e9;
    return rc;
}

/* Every rank of a group says whether it came this far: one alone would wait for the others for ever. */
static int all_well(bench *b, int rc, sl_err *err) {
    if (b->o->ranks < 2) return rc;
    uint64_t least = 0, most;
    sl_err why = {0};
    int agreed = b->coll->agree(b->coll, rc == 0, &least, &most, &why);
    if (rc) return rc;
    if (agreed) return sl_err_set(err, agreed, "%s", why.msg);
    return least ? 0 : sl_err_set(err, SL_ETEMP, "bench: another rank failed");
}

/* The host's sums for a group on one GPU or on CPUs, NCCL's where each rank has a GPU. `rc`: of loading. */
static int open_collective(bench *b, int rc, sl_err *err) {
    if (b->o->ranks < 2) return rc ? rc : sl_coll_none_open(&b->coll, err);
    sl_err why = {0};
    int opened = sl_coll_shm_open(&b->coll, b->coll_fd, b->rank, b->tp, 1, b->ops, &why);
    if (opened) return rc ? rc : sl_err_set(err, opened, "%s", why.msg);
    rc = all_well(b, rc, err);
#ifdef SL_HAVE_NCCL
    if (!rc && b->o->backend == SL_BACKEND_CUDA && sl_ops_cuda_devices() >= b->tp) {
        char note[256];
        rc = sl_coll_gpu_open(&b->coll, b->coll, b->ops, b->o->how, note, err);
    }
#endif
    return rc;
}

static int open_forward(bench *b, sl_bench_result *r, sl_err *err) {
    const sl_bench_opts *o = b->o;
    int64_t tokens = 0;
    for (int32_t i = 0; i < o->rows; i++) tokens += o->lengths ? o->lengths[i] : o->length;
    sl_forward_opts fo = {.batch_tokens = tokens,
                          .micro_tokens = o->micro_tokens,
                          .max_length = o->length,
                          .max_rows = o->rows,
                          .captures = b->captures,
                          .n_captures = r->n_captures};
    sl_forward_plan p;
    int rc = sl_forward_plan_make(&p, b->model, b->ops, b->coll, &fo, err);
    if (!rc) rc = sl_forward_create(&b->fwd, b->model, b->ops, b->coll, &fo, err);
    if (rc) return rc;
    r->workspace_bytes = p.total;
    r->tokens = fo.batch_tokens;
    b->chunk_rows = o->chunk_rows ? o->chunk_rows : 256;
    uint64_t chunks = (uint64_t)(r->tokens + b->chunk_rows - 1) / b->chunk_rows;
    b->arena_bytes = ((uint64_t)r->tokens * (uint64_t)b->model->spec.width * b->es + 4095) / 4096 * 4096;
    b->arena = aligned_alloc(4096, b->arena_bytes);
    b->sums = aligned_alloc(4096, (chunks * 8 + 4095) / 4096 * 4096);
    b->nonfinite = aligned_alloc(4096, (chunks * 4 + 4095) / 4096 * 4096);
    b->rows = calloc((size_t)o->rows, sizeof *b->rows);
    b->ids = calloc((size_t)r->tokens, sizeof *b->ids);
    if (!b->arena || !b->sums || !b->nonfinite || !b->rows || !b->ids)
        return sl_err_set(err, SL_ETEMP, "bench: out of memory");
    memset(b->arena, 0, b->arena_bytes);
    int64_t at = 0;
    for (int32_t i = 0; i < o->rows; i++) {
        b->rows[i] = (sl_forward_row){.t0 = at, .T = o->lengths ? o->lengths[i] : o->length};
        at += b->rows[i].T;
    }
    uint64_t x = 88172645463325252ull;
    for (int64_t t = 0; t < r->tokens; t++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        b->ids[t] = (int32_t)(x % (uint64_t)b->model->spec.vocab);
    }
    if (!o->capture) return 0;
    rc = b->ops->register_arena(b->ops->ctx, b->arena, b->arena_bytes, err);
    if (!rc) rc = b->ops->register_arena(b->ops->ctx, b->sums, (chunks * 8 + 4095) / 4096 * 4096, err);
    return rc ? rc : b->ops->register_arena(b->ops->ctx, b->nonfinite, (chunks * 4 + 4095) / 4096 * 4096, err);
}

static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int note_sum(sl_coll *c, void *h, void *part, int64_t n, uint64_t *ticket, sl_err *err) {
    bench *b = c->impl;
    *ticket = 0;
    if (b->n_sums == MAX_SUMS) return sl_err_set(err, SL_EINTERNAL, "bench: more than %d sums in a run", MAX_SUMS);
    b->sum[b->n_sums].h = h;
    b->sum[b->n_sums].part = part;
    b->sum[b->n_sums++].n = n;
    return 0;
}
static int no_wait(sl_coll *c, uint64_t ticket, sl_err *err) {
    (void)c, (void)ticket, (void)err;
    return 0;
}

typedef enum { PLAIN, CAPTURE, UNSUMMED } run_kind;
/* *sec: until the slowest rank was done; *own (or NULL): until this one was. */
static int one_run(bench *b, run_kind kind, double *sec, double *own, sl_err *err) {
    int rc = b->coll->barrier(b->coll, err);
    if (rc) return rc;
    uint64_t t0 = sl_now_ns();
    b->ticket = 0;
    if (kind == UNSUMMED) {
        b->real = *b->coll;
        b->n_sums = 0;
        b->coll->impl = b;
        b->coll->reduce = note_sum;
        b->coll->wait = no_wait;
    }
    rc = sl_forward_run(b->fwd, b->ids, b->rows, b->o->rows, NULL, kind == CAPTURE ? on_state : NULL, b, err);
    if (kind == UNSUMMED) *b->coll = b->real;
    if (!rc && b->ticket) rc = b->ops->capture_wait(b->ops->ctx, b->ticket, err);
    if (!rc) rc = b->ops->sync(b->ops->ctx, err);
    if (own) *own = (double)(sl_now_ns() - t0) / 1e9;
    if (!rc) rc = b->coll->barrier(b->coll, err);
    *sec = (double)(sl_now_ns() - t0) / 1e9;
    return rc;
}

/* The sums of one run with nothing beside them, best of three. */
static int sums_alone(bench *b, sl_bench_result *r, sl_err *err) {
    double bytes = 0;
    r->sums = b->n_sums;
    for (int i = 0; i < 3; i++) {
        int rc = b->coll->barrier(b->coll, err);
        uint64_t t0 = sl_now_ns(), ticket = 0;
        bytes = 0;
        for (int32_t k = 0; k < b->n_sums && !rc; k++) {
            rc = b->coll->reduce(b->coll, b->sum[k].h, b->sum[k].part, b->sum[k].n, &ticket, err);
            bytes += (double)b->sum[k].n * (double)b->es;
        }
        if (!rc) rc = b->coll->wait(b->coll, ticket, err);
        if (!rc) rc = b->ops->sync(b->ops->ctx, err);
        if (rc) return rc;
        double sec = (double)(sl_now_ns() - t0) / 1e9;
        if (!i || sec < r->sums_s) r->sums_s = sec;
    }
    r->sums_bus_gb_s = bytes * 2 * (b->tp - 1) / b->tp / r->sums_s / 1e9;
    return 0;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Linear parameters that one token touches on this rank (top_k of its experts), attention scores not counted. */
static double touched(const sl_model *m) {
    double n = 0;
    for (int l = 0; l < m->top_layer; l++) {
        const sl_layer_weights *w = &m->layer[l];
        const sl_mat *plain[] = {&w->q,    &w->k,    &w->v,    &w->o,  &w->q_a, &w->q_b,
                                 &w->kv_a, &w->kv_b, &w->gate, &w->up, &w->down};
        for (unsigned i = 0; i < sizeof plain / sizeof *plain; i++)
            if (plain[i]->data) n += (double)plain[i]->n * (double)plain[i]->k;
        const sl_mat *moe[] = {&w->moe.gate, &w->moe.up, &w->moe.down};
        double share = w->moe.experts ? (double)w->moe.top_k * (double)w->moe.local / (double)w->moe.experts : 0;
        for (unsigned i = 0; i < 3; i++)
            if (m->spec.layer[l].mlp == SL_MLP_MOE && moe[i]->data) n += (double)moe[i]->n * (double)moe[i]->k * share;
    }
    return n;
}

static int measure(bench *b, sl_bench_result *r, sl_err *err) {
    const sl_bench_opts *o = b->o;
    double sec, own[SL_BENCH_MAX_RUNS] = {0};
    int rc = 0;
    for (int32_t i = 0; i < o->warmup && !rc; i++) rc = one_run(b, o->capture ? CAPTURE : PLAIN, &sec, NULL, err);
    for (int32_t i = 0; i < o->repeat && !rc; i++) { /* turn about, so that a drifting clock touches both alike */
        double cpu = cpu_seconds();
        rc = one_run(b, PLAIN, &r->forward_s[i], NULL, err);
        cpu = cpu_seconds() - cpu;
        if (cpu > 0 && (double)r->tokens / cpu > r->cpu_tok_s) r->cpu_tok_s = (double)r->tokens / cpu;
        if (!rc && o->capture) rc = one_run(b, CAPTURE, &r->capture_s[i], NULL, err);
        if (!rc && b->tp > 1 && o->ranks > 1) rc = one_run(b, UNSUMMED, &r->unsummed_s[i], &own[i], err);
        r->runs = i + 1;
    }
    if (!rc && o->ranks > 1) rc = sums_alone(b, r, err);
    if (rc) return rc;
    qsort(r->unsummed_s, (size_t)r->runs, sizeof *r->unsummed_s, by_value);
    qsort(own, (size_t)r->runs, sizeof *own, by_value);
    r->own_s = own[r->runs / 2];
    qsort(r->forward_s, (size_t)r->runs, sizeof *r->forward_s, by_value);
    qsort(r->capture_s, (size_t)r->runs, sizeof *r->capture_s, by_value);
    double tokens = (double)r->tokens;
    r->best_tok_s = tokens / r->forward_s[0];
    r->median_tok_s = tokens / r->forward_s[r->runs / 2];
    if (o->capture) r->capture_median_tok_s = tokens / r->capture_s[r->runs / 2];
    if (r->sums_s > 0) r->sums_exposed = (r->forward_s[r->runs / 2] - r->unsummed_s[r->runs / 2]) / r->sums_s;
    r->n_layers = b->model->spec.n_layers;
    r->width = b->model->spec.width;
    r->layers_run = b->model->top_layer;
    r->gflop_per_token = 2e-9 * touched(b->model);
    r->gflops = r->gflop_per_token * r->median_tok_s;
    r->capture_bytes_per_token = (double)r->n_captures * r->width * (double)b->es;
    return 0;
}

static void close_bench(bench *b) {
    if (b->coll) b->coll->destroy(b->coll); /* it looks into the forward pass's memory */
    sl_forward_destroy(b->fwd);
    if (b->model) sl_model_free(b->model, b->ops);
    if (b->ops) b->ops->destroy(b->ops);
    free(b->arena);
    free(b->sums);
    free(b->nonfinite);
    free(b->rows);
    free(b->ids);
}

static int one_rank(bench *b, sl_bench_result *out, sl_err *err) {
    int rc = open_collective(b, open_model(b, out, err), err);
    if (rc) return rc;
    rc = all_well(b, open_forward(b, out, err), err);
    out->how = b->coll->how; /* the memory is announced: what is used is known */
    return rc ? rc : measure(b, out, err);
}

/* With the model's memory given back. A bench is worth printing without it. */
static void find_ceiling(sl_bench_result *out, const sl_bench_opts *o) {
    sl_err why = {0};
    double flop_s = 0;
    if (!sl_bench_ceiling(&flop_s, o->backend, o->precision, o->threads, &why)) out->ceiling_gflops = flop_s / 1e9;
}

/* ---- a group ---- */
typedef struct group_arg {
    const sl_bench_opts *o;
    int fd;
} group_arg;

static int member_main(void *arg, int rank, void *result, sl_err *err) {
    const group_arg *g = arg;
    bench *b = calloc(1, sizeof *b);
    int gpus = 1;
    if (!b) return sl_err_set(err, SL_ETEMP, "bench: out of memory");
#ifdef SL_HAVE_CUDA
    if (g->o->backend == SL_BACKEND_CUDA) gpus = sl_ops_cuda_devices();
#endif
    b->o = g->o;
    b->rank = rank;
    b->tp = g->o->ranks;
    b->device = gpus > 0 ? rank % gpus : 0;
    b->coll_fd = g->fd;
    int rc = one_rank(b, result, err);
    close_bench(b);
    free(b);
    if (!rc && !rank) find_ceiling(result, g->o);
    return rc;
}

static int group(sl_bench_result *out, const sl_bench_opts *o, sl_err *err) {
    group_arg g = {.o = o, .fd = sl_coll_shm_create_region(o->ranks, 1 << 22, err)};
    sl_bench_result *all = calloc((size_t)o->ranks, sizeof *all);
    int rc = g.fd < 0 ? err->code : 0, slowest = 0, fastest = 0;
    if (!rc && !all) rc = sl_err_set(err, SL_ETEMP, "bench: out of memory");
    if (!rc) rc = sl_bench_ranks_run(o->ranks, member_main, &g, all, sizeof *all, err);
    if (!rc) *out = all[0];
    for (int i = 1; i < o->ranks && !rc; i++) {
        if (all[i].own_s > all[slowest].own_s) slowest = i;
        if (all[i].own_s < all[fastest].own_s) fastest = i;
    }
    if (!rc && all[fastest].own_s > 0) out->imbalance = all[slowest].own_s / all[fastest].own_s;
    free(all);
    if (g.fd >= 0) close(g.fd);
    return rc;
}

int sl_bench_forward(sl_bench_result *out, const sl_bench_opts *o, sl_err *err) {
    memset(out, 0, sizeof *out);
    if (o->rows < 1 || o->length < 1 || o->repeat < 1 || o->repeat > SL_BENCH_MAX_RUNS || o->warmup < 0 || o->tp < 1 ||
        o->threads < 1 || o->ranks < 0 || o->ranks > 8)
        return sl_err_set(err, SL_EUSAGE,
                          "bench: rows, length, rank-of and threads must be at least 1, repeat 1..%d, ranks 1..8",
                          SL_BENCH_MAX_RUNS);
    if (o->ranks > 1) return group(out, o, err);
    bench *b = calloc(1, sizeof *b);
    if (!b) return sl_err_set(err, SL_ETEMP, "bench: out of memory");
    b->o = o;
    b->tp = o->tp;
    int rc = one_rank(b, out, err);
    close_bench(b);
    free(b);
    if (!rc) find_ceiling(out, o);
    return rc;
}

/* ---- NLL ---- */
static int run_nll(bench *b, double *nll, double *tokens_s, const sl_bench_row *rows, int32_t n_rows, sl_err *err) {
    int64_t longest = 1, tokens = 0;
    for (int32_t i = 0; i < n_rows; i++) longest = rows[i].T > longest ? rows[i].T : longest;
    sl_forward_opts fo = {
        .batch_tokens = longest, .max_length = longest, .max_rows = 1, .captures = b->captures, .n_captures = 1};
    int rc = sl_forward_create(&b->fwd, b->model, b->ops, b->coll, &fo, err);
    uint64_t t0 = sl_now_ns();
    for (int32_t i = 0; i < n_rows && !rc; i++) {
        sl_forward_row row = {.T = rows[i].T};
        nll[i] = 0;
        rc = sl_forward_run(b->fwd, rows[i].ids, &row, 1, &nll[i], NULL, NULL, err);
        if (rc) sl_err_wrap(err, "row %d", i);
        tokens += row.T;
    }
    *tokens_s = (double)tokens * 1e9 / (double)(sl_now_ns() - t0);
    return rc;
}

int sl_bench_nll(double *nll, double *tokens_s, const sl_bench_row *rows, int32_t n_rows, const sl_bench_opts *o,
                 sl_err *err) {
    sl_bench_opts mine = *o;
    mine.layers = "n";
    mine.tp = 1;
    mine.random = 0;
    mine.ranks = 0;
    bench *b = calloc(1, sizeof *b);
    if (!b) return sl_err_set(err, SL_ETEMP, "bench: out of memory");
    b->o = &mine;
    b->tp = 1;
    b->want_head = 1;
    sl_bench_result r;
    memset(&r, 0, sizeof r);
    int rc = open_collective(b, open_model(b, &r, err), err);
    if (!rc) rc = run_nll(b, nll, tokens_s, rows, n_rows, err);
    close_bench(b);
    free(b);
    return rc;
}
