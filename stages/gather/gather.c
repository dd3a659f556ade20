#include "stages/gather/gather.h"
#include "ipc/crash.h"
#include "ipc/doorbell.h"
#include "ipc/faults.h"
#include "ipc/log.h"
#include "stages/gather/validate.h"
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BEAT_MS     250            /* longest sleep: heartbeat, and changes of ctl that nobody rang for */
#define SUMMARY_NS  10000000000ull /* one INFO line in this time */
#define FEEDER_PROC 1
#define WRITER_PROC 3

typedef struct lane { /* one rank's chunk ring */
    sl_ring *ring;
    uint64_t at;  /* next descriptor to look at */
    uint64_t own; /* everything before is stale or done: "validated" may go here while the batch is still coming */
    bool started; /* gave something to the batch in hand */
    bool done;    /* END seen, or gone on without */
} lane;

typedef struct group {
    unsigned id;
    sl_ring *batch, *sample;
    lane lane[SL_MAX_RANKS];
    uint32_t tp;
    uint64_t cur;   /* batch in hand == cursor "gathered" */
    uint32_t epoch; /* of the batch in hand; 0: nothing of it has come */
    uint32_t floor; /* descriptors of older epochs are stale */
    bool open;      /* the checker is set on batch cur */
    bool swept;     /* the writer has something to sweep */
    bool suspect;   /* the batch before this one had a rejected row */
    bool ready;     /* every lane is done, verdicts are made: waits for room */
    sl_batch_view v;
    sl_check *check;
    const sl_row_verdict *rows;
} group;

struct sl_gather {
    const sl_stage *st;
    sl_check_shape shape;
    uint32_t n_groups;
    group *groups;
    uint64_t summary_at, batches, ok, rejected;
};

/* ---- open, close ---- */
static int attach_group(sl_gather *g, group *gr, sl_err *err) {
    const sl_boot *b = g->st->boot;
    const sl_boot_group *bg = &b->groups[gr->id];
    gr->tp = b->tp;
    int rc = sl_ring_attach(&gr->batch, bg->batch_fd, SL_BATCH_GATHERED, err);
    if (!rc) rc = sl_ring_attach(&gr->sample, bg->sample_fd, SL_RING_PRODUCER, err);
    for (uint32_t r = 0; !rc && r < gr->tp; r++)
        rc = sl_ring_attach(&gr->lane[r].ring, bg->chunk_fd[r], SL_CHUNK_VALIDATED, err);
    if (!rc) rc = sl_check_open(&gr->check, &g->shape, err);
    if (rc) return rc;
    if (sl_ring_info(gr->sample)->depth <= b->max_batch_rows)
        return sl_err_set(err, SL_ECONFIG, "ring '%s' holds %" PRIu64 " descriptors, a batch of %u rows needs %u",
                          sl_ring_info(gr->sample)->name, sl_ring_info(gr->sample)->depth, b->max_batch_rows,
                          b->max_batch_rows + 1);
    return 0;
}

/* Epoch with which batch `cur` stands in the sample ring, 0 when it does not. It cannot have left the ring: the writer
 * takes a batch only when "gathered" has passed it. */
static uint32_t published_epoch(const group *gr) {
    uint64_t end = sl_ring_pos(gr->sample, SL_SAMPLE_PUBLISHED);
    for (uint64_t p = sl_ring_pos(gr->sample, SL_SAMPLE_RELEASED); p < end; p++) {
        const sl_desc_batch *d = (const sl_desc_batch *)(const void *)sl_ring_at(gr->sample, p);
        if (d && d->h.kind == SL_DESC_BATCH && d->bpos == gr->cur) return d->h.epoch;
    }
    return 0;
}

static uint64_t desc_bpos(const sl_desc *d) { /* at the same offset in CHUNK, ROW and END */
    uint64_t v;
    memcpy(&v, d->body, 8);
    return v;
}

/* Where a finished batch ends in a lane: behind the last descriptor that names it. */
static uint64_t lane_end(const lane *l, uint64_t bpos, uint32_t epoch) {
    uint64_t pub = sl_ring_pos(l->ring, SL_CHUNK_PUBLISHED), end = l->at;
    for (uint64_t p = l->at; p < pub; p++) {
        const sl_desc *d = sl_ring_at(l->ring, p);
        if (d && d->h.epoch == epoch && desc_bpos(d) == bpos) end = p + 1;
    }
    return end;
}

/* What was read of a dead epoch in the last life is not known any more, and what is left of it may begin in the middle
 * of a batch: only the current epoch counts. Its ranks make the batch at "gathered" again. */
static int resume_group(const sl_gather *g, group *gr, sl_err *err) {
    gr->floor = atomic_load_explicit(&g->st->ctl[1 + gr->id].epoch, memory_order_acquire);
    gr->cur = sl_ring_pos(gr->batch, SL_BATCH_GATHERED);
    for (uint32_t r = 0; r < gr->tp; r++)
        gr->lane[r].at = gr->lane[r].own = sl_ring_pos(gr->lane[r].ring, SL_CHUNK_VALIDATED);
    uint32_t epoch = published_epoch(gr);
    if (!epoch) return 0;
    sl_log(SL_INFO, "group %u: batch %" PRIu64 " was already passed on; finishing it", gr->id, gr->cur);
    for (uint32_t r = 0; r < gr->tp; r++) {
        lane *l = &gr->lane[r];
        l->at = l->own = lane_end(l, gr->cur, epoch);
        int rc = sl_ring_advance(l->ring, l->at, err);
        if (rc) return rc;
    }
    return sl_ring_advance(gr->batch, ++gr->cur, err);
}

int sl_gather_open(sl_gather **out, const sl_stage *st, sl_err *err) {
    *out = NULL;
    sl_gather *g = calloc(1, sizeof *g);
    if (!g) return sl_err_set(err, SL_ETEMP, "gather: no memory");
    g->st = st;
    sl_check_shape_of(&g->shape, st->boot);
    g->groups = calloc(st->boot->dp, sizeof *g->groups);
    int rc = 0;
    if (!g->groups) {
        sl_err_set(err, SL_ETEMP, "gather: no memory");
        free(g);
        return SL_ETEMP;
    }
    for (; !rc && g->n_groups < st->boot->dp; g->n_groups++) {
        group *gr = &g->groups[g->n_groups];
        gr->id = g->n_groups;
        rc = attach_group(g, gr, err);
        if (!rc) rc = resume_group(g, gr, err);
        if (rc) sl_err_wrap(err, "gather: group %u", gr->id);
    }
    g->summary_at = sl_now_ns() + SUMMARY_NS;
    sl_bell_ring(st->boot->procs[WRITER_PROC].bell_fd); /* what a last life passed on without ringing */
    if (rc) {
        sl_gather_close(g);
        return rc;
    }
    *out = g;
    return 0;
}

void sl_gather_close(sl_gather *g) {
    if (!g) return;
    for (uint32_t i = 0; g->groups && i < g->st->boot->dp; i++) {
        group *gr = &g->groups[i];
        sl_ring_detach(gr->batch);
        sl_ring_detach(gr->sample);
        for (uint32_t r = 0; r < gr->tp; r++) sl_ring_detach(gr->lane[r].ring);
        sl_check_close(gr->check);
    }
    free(g->groups);
    free(g);
}

/* ---- reading the lanes ---- */
static const sl_ctl_page *ctl_of(const sl_gather *g, const group *gr) {
    return &g->st->ctl[1 + gr->id];
}

static uint32_t ctl_epoch(const sl_gather *g, const group *gr) {
    return atomic_load_explicit(&ctl_of(g, gr)->epoch, memory_order_acquire);
}

/* Start the batch again: its descriptors so far are stale. */
static int forget_batch(group *gr, uint32_t new_floor, sl_err *err) {
    gr->epoch = 0;
    gr->floor = new_floor;
    for (uint32_t r = 0; r < gr->tp; r++) {
        lane *l = &gr->lane[r];
        l->started = l->done = false;
        l->own = l->at;
    }
    return sl_check_begin(gr->check, &gr->v, gr->cur, err);
}

/* What to do with the descriptor at the head of a lane. */
typedef enum { TAKE, SKIP, NEXT_BATCH, NEWER } fate;

static fate judge(sl_gather *g, group *gr, unsigned r, const sl_desc *d) {
    const lane *l = &gr->lane[r];
    uint32_t e = d->h.epoch, now = ctl_epoch(g, gr), base = gr->epoch ? gr->epoch : gr->floor;
    uint64_t bpos = desc_bpos(d);
    bool impossible = e == 0 || e > now;
    /* Behind a batch that was not as it should be may lie what is left of it: with an end in the wrong place, it would
     * be taken for the start of this one, and end it too early again. Nothing is lost by passing it: a start that is
     * garbled is missed. */
    if (!l->started && gr->suspect && bpos != gr->cur && bpos != gr->cur + 1) return SKIP;
    if (impossible) {
        sl_check_condemn(gr->check, SL_V_EPOCH, r, e, now);
    } else if (e < base) {
        if (!l->started) return SKIP;
        sl_check_condemn(gr->check, SL_V_EPOCH, r, e, base);
    } else if (gr->epoch && e > gr->epoch) {
        return NEWER;
    }
    if (bpos == gr->cur) return TAKE;
    if (!l->started && bpos < gr->cur) return SKIP;
    const sl_desc_chunk *c = (const sl_desc_chunk *)(const void *)d;
    if (!impossible && bpos == gr->cur + 1 && d->h.kind == SL_DESC_CHUNK && c->k == 0 && c->c == 0) return NEXT_BATCH;
    return TAKE; /* garbage; the checker names it */
}

static void take(sl_gather *g, group *gr, unsigned r, const sl_desc *d) {
    lane *l = &gr->lane[r];
    uint32_t e = d->h.epoch, now = ctl_epoch(g, gr);
    if (!gr->epoch) gr->epoch = e && e <= now && e >= gr->floor ? e : now;
    const sl_ring_params *p = sl_ring_info(l->ring);
    l->started = true;
    l->done = sl_check_desc(gr->check, r, l->at, d, sl_ring_payload(l->ring, l->at), p->pay_size);
    l->at++;
}

/* Read one lane as far as it goes in this batch. 1: something moved. */
static int read_lane(sl_gather *g, group *gr, unsigned r, sl_err *err) {
    lane *l = &gr->lane[r];
    int moved = 0;
    while (!l->done) {
        const sl_desc *d = sl_ring_at(l->ring, l->at);
        if (!d) break;
        moved = 1;
        switch (judge(g, gr, r, d)) {
        case TAKE:
            take(g, gr, r, d);
            break;
        case SKIP: /* nothing of the batch has come in this lane, so what is skipped may be passed at once */
            l->own = ++l->at;
            break;
        case NEXT_BATCH: /* without END */
            sl_check_condemn(gr->check, SL_V_COUNT, r, 0, 1);
            if (!gr->epoch) gr->epoch = d->h.epoch;
            l->done = true;
            break;
        case NEWER: {
            int rc = forget_batch(gr, d->h.epoch, err);
            if (rc) return rc;
            return 1;
        }
        }
    }
    return moved;
}

/* Pass the "validated" cursor over what is stale, so that the writer can sweep it: also in front of a batch that is
 * still coming, or a ring full of a dead epoch would leave its rank no room to finish. */
static int pass_stale(group *gr, sl_err *err) {
    for (uint32_t r = 0; r < gr->tp; r++) {
        lane *l = &gr->lane[r];
        if (l->own == sl_ring_pos(l->ring, SL_CHUNK_VALIDATED)) continue;
        int rc = sl_ring_advance(l->ring, l->own, err);
        if (rc) return rc;
        gr->swept = true;
    }
    return 0;
}

static int read_lanes(sl_gather *g, group *gr, bool *complete, sl_err *err) {
    uint32_t now = ctl_epoch(g, gr); /* before the cursors: see gather.h */
    int moved = 0;
    *complete = true;
    for (uint32_t r = 0; r < gr->tp; r++) {
        int rc = read_lane(g, gr, r, err);
        if (rc < 0) return rc;
        moved |= rc;
    }
    for (uint32_t r = 0; r < gr->tp; r++) *complete = *complete && gr->lane[r].done;
    if (!*complete && gr->epoch && gr->epoch < now) {
        sl_log(SL_INFO,
               "group %u: batch %" PRIu64
               " of epoch %u is incomplete and its ranks are gone; it comes again in epoch %u",
               gr->id, gr->v.desc->batch_no, gr->epoch, now);
        int rc = forget_batch(gr, now, err);
        if (rc) return rc;
        moved = 1;
    }
    int rc = pass_stale(gr, err);
    if (gr->swept) sl_bell_ring(g->st->boot->procs[WRITER_PROC].bell_fd);
    gr->swept = false;
    return rc ? rc : moved;
}

/* ---- handing on ---- */
static void count_row(sl_gather *g, const sl_batch_row *r, const sl_row_verdict *v) {
    sl_metrics *m = g->st->metrics;
    sl_metric_add(m, SL_M_ROWS_IN, 1);
    sl_metric_add(m, SL_M_TOKENS_IN, r->T);
    if (v->verdict != SL_V_OK) {
        sl_metric_add(m, SL_M_ROWS_REJECTED, 1);
        sl_metric_add(m, (sl_metric)(SL_M_REJECT_BASE + v->verdict), 1);
        g->rejected++;
        return;
    }
    sl_metric_add(m, SL_M_ROWS_OUT, 1);
    sl_metric_add(m, SL_M_TOKENS_OUT, r->T);
    g->ok++;
    if (v->nll_tokens && isfinite(v->nll)) {
        sl_metric_add(m, SL_M_NLL_SUM_MICRO, (uint64_t)(int64_t)llrint(v->nll * 1e6));
        sl_metric_add(m, SL_M_NLL_ROWS, 1);
    }
}

static void log_rejected(const sl_gather *g, const group *gr, uint32_t i, const sl_row_verdict *v) {
    char why[320];
    const sl_batch_row *r = &gr->v.rows[i];
    sl_log(SL_WARN, "rejected row %" PRIu64 " '%.*s' (seq %" PRIu64 ", batch %" PRIu64 " row %u, group %u): %s", r->row,
           (int)r->id_len, gr->v.base + r->id_off, r->seq, gr->v.desc->batch_no, i, gr->id,
           sl_check_say(&g->shape, v, why, sizeof why));
}

/* The fault "changed" (ipc/faults.h): row 0's sum is another's. */
static uint64_t changed(const sl_boot *b, uint64_t batch_no, uint32_t row) {
    return b->fault == SL_FAULT_CHANGED && b->fault_batch == batch_no && !row;
}

static void stage_samples(const sl_boot *boot, group *gr, uint32_t epoch) {
    uint32_t n = gr->v.desc->n_rows, rejected = 0;
    for (uint32_t i = 0; i < n; i++) rejected += gr->rows[i].verdict != SL_V_OK;
    sl_desc_batch *b = (sl_desc_batch *)(void *)sl_ring_stage(gr->sample, 0);
    b->h.kind = SL_DESC_BATCH;
    b->h.epoch = epoch;
    b->bpos = gr->cur;
    b->batch_no = gr->v.desc->batch_no;
    b->n_rows = n;
    b->rejected = rejected;
    for (uint32_t i = 0; i < n; i++) {
        const sl_row_verdict *v = &gr->rows[i];
        sl_desc_sample *s = (sl_desc_sample *)(void *)sl_ring_stage(gr->sample, 0);
        s->h.kind = SL_DESC_SAMPLE;
        s->h.epoch = epoch;
        s->seq = gr->v.rows[i].seq;
        s->row = i;
        s->verdict = (uint16_t)v->verdict;
        s->k = v->k;
        s->token = v->token;
        s->nll = v->nll;
        s->nll_tokens = v->nll_tokens;
        s->detail = v->verdict == SL_V_OK ? v->sum ^ changed(boot, gr->v.desc->batch_no, i) : v->detail;
    }
}

static void report_batch(sl_gather *g, group *gr) {
    uint32_t n = gr->v.desc->n_rows, bad = 0;
    for (uint32_t i = 0; i < n; i++) {
        count_row(g, &gr->v.rows[i], &gr->rows[i]);
        if (gr->rows[i].verdict == SL_V_OK) continue;
        bad++;
        log_rejected(g, gr, i, &gr->rows[i]);
    }
    gr->suspect = bad > 0;
    g->batches++;
    sl_metric_add(g->st->metrics, SL_M_BATCHES, 1);
    sl_metric_add(g->st->metrics, SL_M_BYTES_RAW, sl_check_bytes(gr->check));
    sl_log(SL_DEBUG, "batch %" PRIu64 " (group %u): %u rows, %u tokens, %u rejected", gr->v.desc->batch_no, gr->id, n,
           gr->v.desc->n_tokens, bad);
    if (sl_now_ns() < g->summary_at) return;
    g->summary_at = sl_now_ns() + SUMMARY_NS;
    sl_log(SL_INFO, "%" PRIu64 " batches proven so far: %" PRIu64 " rows ok, %" PRIu64 " rejected", g->batches, g->ok,
           g->rejected);
}

static int hand_on(sl_gather *g, group *gr, sl_err *err) {
    int writer = g->st->boot->procs[WRITER_PROC].bell_fd, rc = 0;
    stage_samples(g->st->boot, gr, gr->epoch ? gr->epoch : ctl_epoch(g, gr));
    sl_crash_point("gather.before_publish");
    sl_ring_publish(gr->sample);
    sl_crash_point("gather.after_publish");
    report_batch(g, gr);
    for (uint32_t r = 0; !rc && r < gr->tp; r++) {
        rc = sl_ring_advance(gr->lane[r].ring, gr->lane[r].at, err);
        sl_crash_point("gather.after_validated");
    }
    if (!rc) rc = sl_ring_advance(gr->batch, gr->cur + 1, err);
    sl_crash_point("gather.after_gathered");
    sl_bell_ring(writer);
    if (rc) return rc;
    gr->cur++;
    gr->epoch = 0;
    gr->open = gr->ready = false;
    for (uint32_t r = 0; r < gr->tp; r++) {
        lane *l = &gr->lane[r];
        l->started = l->done = false;
        l->own = l->at;
    }
    return 0;
}

/* ---- turns ---- */
static bool poisoned(const sl_gather *g, const group *gr) {
    return atomic_load_explicit(&ctl_of(g, gr)->poison_bpos, memory_order_acquire) == gr->cur + 1;
}

/* What of the batch has come stays behind `at` or is stale by its position once "gathered" has moved. */
static int poison_batch(group *gr, sl_err *err) {
    int rc = forget_batch(gr, gr->floor, err);
    if (rc) return rc;
    sl_check_condemn(gr->check, SL_V_POISON, 0xffff, 0, 0);
    gr->rows = sl_check_finish(gr->check);
    gr->ready = true;
    return 0;
}

static int group_turn(sl_gather *g, group *gr, bool *full, sl_err *err) {
    if (sl_ring_pos(gr->batch, SL_BATCH_PUBLISHED) <= gr->cur) return 0;
    if (!gr->open) {
        int rc = sl_batch_open(&gr->v, gr->batch, gr->cur, err);
        if (!rc) rc = sl_check_begin(gr->check, &gr->v, gr->cur, err);
        if (rc) return rc;
        gr->open = true;
    }
    int moved = 0;
    if (!gr->ready && poisoned(g, gr)) {
        if ((moved = poison_batch(gr, err)) < 0) return moved;
    }
    if (!gr->ready) {
        bool complete;
        if ((moved = read_lanes(g, gr, &complete, err)) < 0) return moved;
        if (!complete) return moved;
        for (uint32_t i = 0; i < gr->v.desc->n_rows; i++) /* (its states are those of a stand-in) */
            if (sl_ctl_poison_row(ctl_of(g, gr), gr->cur, i)) sl_check_condemn_row(gr->check, i, SL_V_POISON);
        gr->rows = sl_check_finish(gr->check);
        gr->ready = true;
    }
    uint64_t need = 1ull + gr->v.desc->n_rows;
    if (need > sl_ring_info(gr->sample)->depth)
        return sl_err_set(err, SL_ECONFIG, "group %u: a batch of %u rows does not fit the sample ring of %" PRIu64,
                          gr->id, gr->v.desc->n_rows, sl_ring_info(gr->sample)->depth);
    if (sl_ring_room(gr->sample) < need) {
        *full = true;
        return moved;
    }
    int rc = hand_on(g, gr, err);
    return rc ? rc : 1;
}

int sl_gather_turn(sl_gather *g, bool *full, sl_err *err) {
    int did = 0;
    *full = false;
    for (uint32_t i = 0; i < g->n_groups; i++) {
        int rc = group_turn(g, &g->groups[i], full, err);
        if (rc < 0) {
            sl_err_wrap(err, "gather: group %u", i);
            return rc;
        }
        did |= rc;
    }
    return did;
}

bool sl_gather_drained(const sl_gather *g) {
    if (!atomic_load_explicit(&g->st->ctl[0].draining, memory_order_acquire)) return false;
    if (sl_metric_get(g->st->metrics, FEEDER_PROC, SL_M_STATE) != SL_ST_DONE) return false;
    atomic_thread_fence(memory_order_acquire); /* the feeder says DONE after its last batch */
    for (uint32_t i = 0; i < g->n_groups; i++)
        if (sl_ring_pos(g->groups[i].batch, SL_BATCH_PUBLISHED) != g->groups[i].cur) return false;
    return true;
}

int sl_gather_run(sl_gather *g, sl_err *err) {
    sl_metrics *m = g->st->metrics;
    sl_metric_set(m, SL_M_STATE, SL_ST_RUNNING);
    for (;;) {
        bool full;
        sl_bell_drain(g->st->bell);
        int did = sl_gather_turn(g, &full, err);
        if (did < 0) return did;
        sl_metric_beat(m);
        if (did) continue;
        if (sl_gather_drained(g)) break;
        sl_metric_set(m, SL_M_WARNINGS, sl_log_warnings());
        sl_metric_regime(m, full ? SL_M_WAIT_OUT_NS : SL_M_WAIT_IN_NS);
        struct pollfd fd;
        sl_bell_wait(g->st->bell, &fd, 1, BEAT_MS);
        sl_metric_regime(m, SL_M_BUSY_NS);
    }
    sl_log(SL_INFO, "drained: %" PRIu64 " batches, %" PRIu64 " rows ok, %" PRIu64 " rejected", g->batches, g->ok,
           g->rejected);
    sl_metric_set(m, SL_M_WARNINGS, sl_log_warnings());
    sl_metric_set(m, SL_M_STATE, SL_ST_DONE);
    return 0;
}
