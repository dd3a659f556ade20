#include "stages/compute/rank.h"
#include "ipc/crash.h"
#include "ipc/doorbell.h"
#include "ipc/log.h"
#include "stages/compute/export.h"
#include "stages/compute/forward.h"
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MIB(x) ((double)(x) / 1048576.0)

typedef struct rank {
    sl_stage *st;
    const sl_boot *b;
    const sl_boot_group *g;
    uint32_t id, epoch;
    sl_ops *ops;
    sl_model *model;
    sl_coll *coll;
    sl_forward *fwd;
    sl_ring *batches, *chunks;
    sl_export *exp;
    sl_forward_row *rows;
    double *nll;
    int32_t *stand_in;    /* ids of a batch in which a poison row is replaced */
    uint64_t pos;         /* next batch to run */
    uint64_t last_log_ns; /* loading */
    uint64_t nll_high;    /* rows above ln(vocab) in this life */
    int want_nll;
} rank;

/* ---- start ---- */
/* 0: the processors divided by the ranks of all groups. */
static int threads_of(const sl_boot *b) {
    long n = b->threads ? (long)b->threads : sysconf(_SC_NPROCESSORS_ONLN) / (long)(b->dp * b->tp);
    return n < 1 ? 1 : n > 1024 ? 1024 : (int)n;
}

static int open_ops(rank *r, sl_err *err) {
    sl_dtype act = r->b->precision == SL_PREC_F32 ? SL_F32 : SL_BF16;
    uint32_t es = act == SL_F32 ? 4 : 2;
    if (r->b->elem_size != es)
        return sl_err_set(err, SL_EINTERNAL,
                          "rank: the store holds %u-byte elements but this precision makes %u-byte ones",
                          r->b->elem_size, es);
    if (r->b->backend == SL_BACKEND_CPU) return sl_ops_cpu_create(&r->ops, threads_of(r->b), act, err);
#ifdef SL_HAVE_CUDA
    /* Ranks of all groups are numbered through: one GPU each, and round again when there are more ranks than GPUs. */
    int gpus = sl_ops_cuda_devices(), me = (int)(r->st->proc - r->b->groups[0].first_rank_proc);
    return sl_ops_cuda_create(&r->ops, gpus > 0 ? me % gpus : me, act, err);
#else
    return sl_err_set(
        err, SL_ECONFIG,
        "backend cuda: this program was built without CUDA; build it where nvcc is, or use --backend cpu");
#endif
}

static void on_progress(void *arg, uint64_t done, uint64_t total) {
    rank *r = arg;
    sl_metric_set(r->st->metrics, SL_M_LOAD_TOTAL, total);
    sl_metric_set(r->st->metrics, SL_M_LOAD_DONE, done);
    sl_metric_beat(r->st->metrics);
    uint64_t now = sl_now_ns();
    if (now - r->last_log_ns < 5000000000ull) return;
    r->last_log_ns = now;
    sl_log(SL_INFO, "loading weights: %.2f of %.2f GB", (double)done / 1e9, (double)total / 1e9);
}

static int load(rank *r, sl_err *err) {
    const sl_boot *b = r->b;
    const sl_capture *last = &b->captures[b->n_captures - 1];
    r->want_nll = b->nll_every && r->id == 0;
    if (r->want_nll && last->hidx != b->n_layers) {
        sl_log(SL_WARN,
               "teacher NLL is off: it needs H[%u], the last layer's output, and the highest captured state is H[%u]",
               b->n_layers, last->hidx);
        r->want_nll = 0;
    }
    sl_load_opts o = {.model = b->model,
                      .rank = (int)r->id,
                      .tp = (int)b->tp,
                      .expert_split = (int)b->expert_split,
                      .top_layer = (int)last->hidx,
                      .want_head = r->want_nll || last->final_norm,
                      .random = (int)b->random_weights,
                      .seed = b->random_seed,
                      .random_format = -1,
                      .eps_lora = b->norm_eps_lora,
                      .progress = on_progress,
                      .progress_arg = r};
    sl_metric_set(r->st->metrics, SL_M_STATE, SL_ST_LOADING);
    uint64_t t0 = r->last_log_ns = sl_now_ns();
    int rc = sl_model_load(&r->model, &o, r->ops, err);
    if (rc == SL_EDATA) rc = err->code = SL_ECONFIG; /* a damaged model: starting again will not help */
    if (rc) return sl_err_wrap(err, "loading model %s", b->model);
    double sec = (double)(sl_now_ns() - t0) / 1e9;
    uint64_t bytes = sl_metric_get(r->st->metrics, r->st->proc, SL_M_LOAD_TOTAL);
    sl_log(SL_INFO, "loaded %s: %d of %d layers, %.2f GB in %.2f s (%.2f GB/s)", r->model->spec.family,
           r->model->top_layer, r->model->spec.n_layers, (double)bytes / 1e9, sec,
           sec > 0 ? (double)bytes / 1e9 / sec : 0.0);
    if (*sl_model_note(r->model)) sl_log(SL_WARN, "loading weights: %s", sl_model_note(r->model));
    if (r->model->spec.n_layers != (int)b->n_layers || r->model->spec.width != (int)b->width ||
        r->model->spec.vocab != (int)b->vocab)
        return sl_err_set(err, SL_EINTERNAL,
                          "rank: the model has %d layers of width %d and %d tokens, preflight saw %u, %u and %u: it "
                          "changed underneath",
                          r->model->spec.n_layers, r->model->spec.width, r->model->spec.vocab, b->n_layers, b->width,
                          b->vocab);
    return 0;
}

/* Sums over the ranks: none, shared memory, or NCCL with shared memory beside it for barriers and agreement. */
static int open_collective(rank *r, sl_err *err) {
    const sl_boot *b = r->b;
    if (b->tp == 1) return sl_coll_none_open(&r->coll, err);
    int rc = sl_coll_shm_open(&r->coll, r->g->coll_fd, (int)r->id, (int)b->tp, r->epoch, r->ops, err);
#ifdef SL_HAVE_NCCL
    /* Two ranks of one communicator on one GPU are an error to NCCL. The count is the same on every rank. */
    int own_gpu = b->backend == SL_BACKEND_CUDA && (int)(b->dp * b->tp) <= sl_ops_cuda_devices();
    if (!rc && b->backend == SL_BACKEND_CUDA && !own_gpu)
        sl_log(SL_WARN, "%u ranks share %d GPUs: they add up through host memory, which is slow", b->dp * b->tp,
               sl_ops_cuda_devices());
    char note[256] = "";
    if (!rc && own_gpu) rc = sl_coll_gpu_open(&r->coll, r->coll, r->ops, (int)b->sums, note, err);
    if (note[0]) sl_log(SL_WARN, "%s: ranks add up through host memory, which is slow", note);
#endif
    return rc;
}

static int open_forward(rank *r, sl_err *err) {
    const sl_boot *b = r->b;
    sl_forward_opts o = {.batch_tokens = b->batch_tokens,
                         .micro_tokens = b->micro_tokens,
                         .max_length = b->max_length,
                         .max_rows = (int32_t)b->max_batch_rows,
                         .captures = b->captures,
                         .n_captures = (int32_t)b->n_captures};
    sl_forward_plan p;
    int rc = open_collective(r, err);
    if (!rc) rc = sl_forward_plan_make(&p, r->model, r->ops, r->coll, &o, err);
    if (rc) return rc;
    sl_log(SL_INFO,
           "memory: residual %.1f MiB, workspace %.1f MiB, prepared weights %.1f MiB, rotary tables %.1f MiB, together "
           "%.1f MiB beside the weights",
           MIB(p.residual), MIB(p.workspace), MIB(p.prepared), MIB(p.rope), MIB(p.total));
    rc = sl_forward_create(&r->fwd, r->model, r->ops, r->coll, &o, err);
    if (!rc && b->tp > 1) sl_log(SL_INFO, "ranks add up by %s", r->coll->how);
    return rc;
}

static int open_rings(rank *r, sl_err *err) {
    const sl_boot *b = r->b;
    int64_t cap = b->batch_tokens > b->max_length ? b->batch_tokens : b->max_length;
    int rc = sl_ring_attach(&r->batches, r->g->batch_fd, SL_RING_OBSERVER, err);
    if (!rc) rc = sl_ring_attach(&r->chunks, r->g->chunk_fd[r->id], SL_RING_PRODUCER, err);
    if (!rc) rc = sl_export_create(&r->exp, r->st, r->ops, r->chunks, r->epoch, cap, err);
    r->rows = calloc(b->max_batch_rows, sizeof *r->rows);
    r->nll = calloc(b->max_batch_rows, sizeof *r->nll);
    if (!rc && (!r->rows || !r->nll)) rc = sl_err_set(err, SL_ETEMP, "rank: out of memory");
    return rc;
}

/* ---- a batch ---- */
static int on_state(void *arg, int32_t k, const void *states, int64_t n, sl_err *err) {
    rank *r = arg;
    int rc = sl_export_state(r->exp, k, states, n, err);
    sl_metric_beat(r->st->metrics);
    if (!rc && k == 0) sl_crash_point("rank.mid_batch");
    return rc;
}

/* The cheapest proof that the states belong to the tokens: no model of language is worse than guessing. Said at the
 * first row and then each time the number of such rows has doubled. */
static void note_nll(rank *r, uint64_t batch_no, uint32_t row, double nll) {
    double guess = log((double)r->b->vocab);
    sl_metric_add(r->st->metrics, SL_M_NLL_SUM_MICRO, (uint64_t)(int64_t)llround(nll * 1e6));
    sl_metric_add(r->st->metrics, SL_M_NLL_ROWS, 1);
    if (nll <= guess) return;
    r->nll_high++;
    if (r->nll_high & (r->nll_high - 1)) return;
    sl_log(SL_WARN,
           "NLL_HIGH: row %u of batch %llu has teacher NLL %.3f, above ln(vocab) = %.3f: the states may not belong to "
           "these tokens "
           "(%llu such rows so far)",
           row, (unsigned long long)batch_no, nll, guess, (unsigned long long)r->nll_high);
}

static int export_rows(rank *r, const sl_batch_view *v, sl_err *err) {
    for (uint32_t i = 0; i < v->desc->n_rows; i++) {
        const sl_batch_row *row = &v->rows[i];
        double nll = r->want_nll && row->flags & SL_ROW_NLL ? r->nll[i] : NAN;
        if (nll == nll) note_nll(r, v->desc->batch_no, i, nll);
        int rc = sl_export_row(r->exp, i, row->T, sl_sum64(v->ids + row->t0, (uint64_t)row->T * 4), nll, err);
        if (rc) return rc;
    }
    return 0;
}

/* All ranks must be about to run the same batch: a sum over different batches would look healthy on every rank. */
static int same_batch(rank *r, const sl_desc_input *d, sl_err *err) {
    uint64_t mine = r->pos * 0x9e3779b97f4a7c15ull ^ ((uint64_t)d->crc << 32 | d->n_tokens), lo, hi;
    int rc = r->coll->agree(r->coll, mine, &lo, &hi, err);
    if (!rc && lo != hi)
        rc = sl_err_set(err, SL_EINTERNAL, "rank: the ranks of group %u hold different batches at position %llu",
                        r->st->me->group, (unsigned long long)r->pos);
    return rc;
}

/* ---- poison ---- */
static bool poison(const rank *r, uint32_t row) {
    return sl_ctl_poison_row(&r->st->ctl[1 + r->st->me->group], r->pos, row);
}

/* For tests: "rank.row.SEQ:1" among the crash points kills whoever is about to run that row, in every life. */
static void crash_row(const rank *r, const sl_batch_row *row) {
    char name[48];
    const char *list = r->b->crash_points;
    if (!list[0]) return;
    snprintf(name, sizeof name, "rank.row.%llu:", (unsigned long long)row->seq);
    const char *at = strstr(list, name);
    if (at && (at == list || at[-1] == ',')) kill(getpid(), SIGKILL);
}

static int drop_state(void *arg, int32_t k, const void *states, int64_t n, sl_err *err) {
    rank *r = arg;
    (void)k, (void)states, (void)n, (void)err;
    sl_metric_beat(r->st->metrics);
    return 0;
}

/* This batch was being computed at two deaths of the group in a row: each row runs alone, its states are dropped, and
 * SL_M_ROW_AT names the row that kills. */
static int try_rows(rank *r, const sl_batch_view *v, sl_err *err) {
    sl_metrics *m = r->st->metrics;
    uint64_t lo, hi;
    int rc = 0;
    sl_log(SL_WARN, "batch %llu: its %u rows run one by one first, to find the one that kills",
           (unsigned long long)v->desc->batch_no, v->desc->n_rows);
    for (uint32_t i = 0; !rc && i < v->desc->n_rows; i++) {
        sl_forward_row one = {.t0 = 0, .T = v->rows[i].T};
        if (poison(r, i)) continue;
        sl_metric_set(m, SL_M_ROW_AT, i + 1);
        crash_row(r, &v->rows[i]);
        rc = sl_forward_run(r->fwd, v->ids + v->rows[i].t0, &one, 1, NULL, drop_state, r, err);
        if (!rc) rc = r->ops->sync(r->ops->ctx, err); /* a fault of the device belongs to this row */
        /* Nobody begins a row before all have ended the one before: the highest row of all ranks is the one to blame.
         */
        if (!rc) rc = r->coll->agree(r->coll, i, &lo, &hi, err);
    }
    sl_metric_set(m, SL_M_ROW_AT, 0);
    return rc ? rc : r->coll->agree(r->coll, 0, &lo, &hi, err); /* nor the batch before all have ended the last row */
}

/* The ids to run: zeros in the place of a poison row, so that its batch mates stand where they stood and come out as
 * they would have without it. */
static int ids_to_run(rank *r, const sl_batch_view *v, const int32_t **ids, sl_err *err) {
    bool some = false;
    for (uint32_t i = 0; i < v->desc->n_rows; i++) some = some || poison(r, i);
    *ids = v->ids;
    if (!some) return 0;
    free(r->stand_in);
    r->stand_in = malloc((uint64_t)v->desc->n_tokens * sizeof *r->stand_in);
    if (!r->stand_in) return sl_err_set(err, SL_ETEMP, "rank: out of memory");
    memcpy(r->stand_in, v->ids, (uint64_t)v->desc->n_tokens * sizeof *r->stand_in);
    for (uint32_t i = 0; i < v->desc->n_rows; i++)
        if (poison(r, i)) memset(r->stand_in + v->rows[i].t0, 0, (uint64_t)v->rows[i].T * sizeof *r->stand_in);
    *ids = r->stand_in;
    return 0;
}

static int run_batch(rank *r, sl_err *err) {
    sl_batch_view v;
    int rc = sl_batch_open(&v, r->batches, r->pos, err);
    if (rc) return rc;
    const sl_desc_input *d = v.desc;
    if (d->n_rows > r->b->max_batch_rows)
        return sl_err_set(err, SL_EINTERNAL, "rank: batch %llu has %u rows, at most %u were agreed",
                          (unsigned long long)d->batch_no, d->n_rows, r->b->max_batch_rows);
    if ((rc = same_batch(r, d, err))) return rc;
    for (uint32_t i = 0; i < d->n_rows; i++) {
        r->rows[i] = (sl_forward_row){.t0 = v.rows[i].t0, .T = v.rows[i].T};
        r->nll[i] = v.rows[i].flags & SL_ROW_NLL && !poison(r, i) ? 0 : -1;
    }
    const int32_t *ids;
    if (atomic_load(&r->st->ctl[1 + r->st->me->group].isolate_bpos) == r->pos + 1) rc = try_rows(r, &v, err);
    if (rc) return sl_err_wrap(err, "batch %llu, a row alone", (unsigned long long)d->batch_no);
    if ((rc = ids_to_run(r, &v, &ids, err))) return rc;
    for (uint32_t i = 0; i < d->n_rows; i++)
        if (!poison(r, i)) crash_row(r, &v.rows[i]);
    sl_metrics *m = r->st->metrics;
    sl_metric_add(m, SL_M_ROWS_IN, d->n_rows);
    sl_metric_add(m, SL_M_TOKENS_IN, d->n_tokens);
    uint64_t t0 = sl_now_ns(), out0 = sl_metric_get(m, r->st->proc, SL_M_WAIT_OUT_NS);
    sl_export_begin(r->exp, r->pos, d->batch_no, d->n_tokens, v.rows[0].T);
    rc = sl_forward_run(r->fwd, ids, r->rows, (int32_t)d->n_rows, r->want_nll ? r->nll : NULL, on_state, r, err);
    if (!rc && r->id == 0) rc = export_rows(r, &v, err);
    uint64_t waited = sl_metric_get(m, r->st->proc, SL_M_WAIT_OUT_NS) - out0, took = sl_now_ns() - t0;
    if (!rc) rc = sl_export_end(r->exp, took > waited ? took - waited : 0, err);
    if (rc) return rc < 0 ? sl_err_wrap(err, "batch %llu", (unsigned long long)d->batch_no) : rc;
    sl_metric_add(m, SL_M_ROWS_OUT, d->n_rows);
    sl_metric_add(m, SL_M_TOKENS_OUT, d->n_tokens);
    sl_metric_add(m, SL_M_BATCHES, 1);
    r->pos++;
    return 0;
}

/* ---- the loop ---- */
/* 1: another batch is there; 0: nothing now; the feeder's state is read before the cursor, so that DONE and an empty
 * ring together really mean the end (*over). */
static int look(rank *r, int *over) {
    int done = sl_metric_get(r->st->metrics, 1, SL_M_STATE) == SL_ST_DONE && atomic_load(&r->st->ctl[0].draining);
    if (sl_ring_pos(r->batches, SL_BATCH_PUBLISHED) > r->pos) return 1;
    *over = done;
    return 0;
}

static int serve(rank *r, sl_err *err) {
    sl_metrics *m = r->st->metrics;
    for (;;) {
        sl_bell_drain(r->st->bell);
        sl_metric_beat(m);
        sl_metric_set(m, SL_M_WARNINGS, sl_log_warnings());
        if (atomic_load(&r->st->ctl[1 + r->st->me->group].epoch) != r->epoch) return SL_EXPORT_STOP;
        int over = 0;
        if (look(r, &over)) {
            sl_metric_regime(m, SL_M_BUSY_NS);
            sl_metric_set(m, SL_M_STATE, SL_ST_RUNNING);
            int rc = run_batch(r, err);
            if (rc) return rc;
            continue;
        }
        if (over) return 0;
        sl_metric_set(m, SL_M_STATE, atomic_load(&r->st->ctl[0].draining) ? SL_ST_DRAINING : SL_ST_READY);
        sl_metric_regime(m, SL_M_WAIT_IN_NS);
        struct pollfd p[1];
        sl_bell_wait(r->st->bell, p, 1, 250);
    }
}

static int start_position(rank *r, sl_err *err) {
    uint64_t least;
    int rc = r->coll->agree(r->coll, sl_ring_pos(r->batches, SL_BATCH_GATHERED), &least, &r->pos, err);
    if (!rc)
        sl_log(SL_INFO, "ready in epoch %u, starting at batch position %llu", r->epoch, (unsigned long long)r->pos);
    return rc;
}

int sl_rank_run(sl_stage *st, sl_err *err) {
    rank r = {.st = st, .b = st->boot, .g = &st->boot->groups[st->me->group], .id = st->me->rank};
    r.epoch = atomic_load(&st->ctl[1 + st->me->group].epoch);
    sl_metric_set(st->metrics, SL_M_EPOCH, r.epoch);
    sl_metric_set(st->metrics, SL_M_ROW_AT, 0);
    sl_metric_regime(st->metrics, SL_M_BUSY_NS);
    int rc = open_ops(&r, err);
    if (!rc) rc = load(&r, err);
    if (!rc) sl_crash_point("rank.after_load");
    if (!rc) rc = open_forward(&r, err);
    if (!rc) rc = open_rings(&r, err);
    if (!rc) rc = start_position(&r, err);
    if (!rc) rc = serve(&r, err);
    if (rc == SL_EXPORT_STOP)
        rc = 0;
    else if (!rc)
        sl_log(SL_INFO, "drained: %llu batches in this life",
               (unsigned long long)sl_metric_get(st->metrics, st->proc, SL_M_BATCHES));
    if (r.coll) r.coll->destroy(r.coll); /* it looks into the forward pass's memory */
    if (r.fwd) sl_forward_destroy(r.fwd);
    if (r.exp) sl_export_destroy(r.exp);
    if (r.batches) sl_ring_detach(r.batches);
    if (r.chunks) sl_ring_detach(r.chunks);
    if (r.model) sl_model_free(r.model, r.ops);
    if (r.ops) r.ops->destroy(r.ops);
    free(r.rows);
    free(r.nll);
    free(r.stand_in);
    return rc;
}
