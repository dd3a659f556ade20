#include "stages/writer/writer.h"
#include "ipc/crash.h"
#include "ipc/doorbell.h"
#include "ipc/log.h"
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

typedef struct batch { /* a batch that was handed to the sink; its token */
    struct batch *next;
    unsigned group;
    uint64_t bpos, sample_end;
    uint64_t *chunk_end; /* [tp]: position behind the batch's END; 0: already released before */
    bool batch_gone;     /* the batch ring was released past it before (a crash in the middle of a release) */
} batch;

typedef struct lane { /* one group */
    sl_ring *batch, *sample, *chunk[SL_MAX_RANKS];
    uint64_t at;                    /* next descriptor of the sample ring */
    uint64_t cat[SL_MAX_RANKS];     /* where the next batch's chunks are looked for */
    unsigned held;                  /* batches handed over and not yet released */
    batch *release, **release_tail; /* durable, waiting for gather's cursors to pass them */
} lane;

struct sl_writer {
    const sl_stage *st;
    const sl_boot *b;
    sl_sink *sink;
    sl_accepted *intake;
    lane *lanes;
    unsigned tp, dp, K;
    uint32_t row_bytes;
    /* Of the batch in hand: payload of chunk (k, c), NULL when it is not there. */
    const void **chunks;
    uint64_t n_chunks, cap_chunks;
    sl_piece *pieces;
    uint32_t *first;
    uint64_t cap_pieces;
    uint64_t open_since; /* when the open group got its first row; 0: none */
    uint64_t stored_seen, reject_seen;
    bool draining;
};

void sl_writer_manifest(sl_manifest *m, const sl_boot *b) {
    memset(m, 0, sizeof *m);
    m->set.n = b->n_captures;
    m->set.width = b->width;
    m->set.elem_size = b->elem_size;
    m->set.n_layers = b->n_layers;
    memcpy(m->set.v, b->captures, sizeof m->set.v);
    memcpy(m->set.model, b->model_fingerprint, sizeof m->set.model);
    m->vocab = b->vocab;
    m->layout = b->layout;
    m->codec = b->codec;
    memcpy(m->model_path, b->model, sizeof m->model_path);
    memcpy(m->tokenizer_hash, b->tokenizer_hash, sizeof m->tokenizer_hash);
    memcpy(m->template_hash, b->template_hash, sizeof m->template_hash);
    static const char *const overlong[] = {"truncate", "skip", "split"}, *const train_on[] = {"all-assistant",
                                                                                              "last-assistant", "all"};
    snprintf(m->rows_made, sizeof m->rows_made,
             "overlong=%s min_supervised=%u train_on=%s rows_from=%s reasoning=%s template_args=%s",
             b->overlong < 3 ? overlong[b->overlong] : "?", b->min_supervised,
             b->train_on < 3 ? train_on[b->train_on] : "?", b->per_turn ? "turn" : "conversation",
             b->reasoning ? "template" : "keep-last", b->template_args);
}

/* ---- what the sink tells us ---- */

static void on_note(void *arg, int warn, const char *text) {
    sl_writer *w = arg;
    sl_log(warn ? SL_WARN : SL_INFO, "%s", text);
    if (warn) sl_metric_set(w->st->metrics, SL_M_WARNINGS, sl_log_warnings());
}

static void on_pause(void *arg, bool paused, uint64_t need, uint64_t have) {
    sl_writer *w = arg;
    sl_metrics *m = w->st->metrics;
    if (paused)
        sl_log(SL_WARN,
               "%s: the disk is full: %.1f MB free, %.1f MB needed (of which %.1f MB are the reserve). The flow is "
               "paused and "
               "nothing is lost; make room and it goes on by itself",
               w->b->store, (double)have / 1e6, (double)need / 1e6, (double)w->b->reserve_bytes / 1e6);
    else
        sl_log(SL_INFO, "%s: there is room again (%.1f MB free): going on", w->b->store, (double)have / 1e6);
    sl_metric_set(m, SL_M_STATE, paused ? SL_ST_PAUSED : w->draining ? SL_ST_DRAINING : SL_ST_RUNNING);
    sl_metric_set(m, SL_M_PAUSED, paused);
    sl_metric_set(m, SL_M_FREE_BYTES, have);
    sl_metric_set(m, SL_M_WARNINGS, sl_log_warnings());
    sl_metric_regime(m, paused ? SL_M_WAIT_OUT_NS : SL_M_BUSY_NS);
}

static void on_wait(void *arg, bool waiting) {
    sl_writer *w = arg;
    sl_metric_regime(w->st->metrics, waiting ? SL_M_WAIT_OUT_NS : SL_M_BUSY_NS);
}

static void on_changed(void *arg, uint64_t seq) {
    sl_writer *w = arg;
    sl_metric_set(w->st->metrics, SL_M_DOUBT, seq + 1);
}

static void on_tick(void *arg) {
    sl_writer *w = arg;
    sl_metric_beat(w->st->metrics);
}

/* Bytes still to come: tokens accepted and not done, at the ratio so far. */
static void forecast(sl_writer *w, const sl_store_stats *s) {
    uint64_t done = s->tokens + s->rejected_tokens;
    if (sl_accepted_follow(w->intake, NULL) || sl_accepted_tokens(w->intake) < done) return;
    double left = (double)(sl_accepted_tokens(w->intake) - done) * w->K * w->row_bytes;
    if (s->raw_bytes) left *= (double)s->stored_bytes / (double)s->raw_bytes;
    sl_metric_set(w->st->metrics, SL_M_DISK_NEED, (uint64_t)left);
}

static void on_commit(void *arg, void **tokens, unsigned n) {
    sl_writer *w = arg;
    for (unsigned i = 0; i < n; i++) {
        batch *b = tokens[i];
        lane *l = &w->lanes[b->group];
        b->next = NULL;
        *l->release_tail = b;
        l->release_tail = &b->next;
    }
    const sl_store_stats *s = sl_sink_stats(w->sink);
    sl_metric_set(w->st->metrics, SL_M_COMMITTED, sl_sink_committed(w->sink));
    sl_metric_set(w->st->metrics, SL_M_COMMIT_NS, sl_sink_sync_ns(w->sink));
    sl_metric_set(w->st->metrics, SL_M_FREE_BYTES, sl_sink_free(w->sink));
    sl_metric_add(w->st->metrics, SL_M_BYTES_OUT, s->stored_bytes - w->stored_seen);
    sl_metric_add(w->st->metrics, SL_M_ROWS_REJECTED, s->rejected - w->reject_seen);
    w->stored_seen = s->stored_bytes;
    w->reject_seen = s->rejected;
    forecast(w, s);
}

/* ---- finding a batch's chunks ---- */

static uint32_t chunk_count(const sl_writer *w, uint32_t n_tokens) {
    return (n_tokens + w->b->chunk_rows - 1) / w->b->chunk_rows;
}

/* Take one chunk descriptor into the map when every number in it is possible. */
static void take_chunk(sl_writer *w, const lane *l, unsigned r, uint64_t pos, const sl_desc *d, uint32_t n_tokens) {
    sl_desc_chunk c;
    memcpy(&c, d, sizeof c);
    uint32_t n = chunk_count(w, n_tokens);
    if (!(c.h.flags & SL_CHUNK_PAYLOAD) || c.k >= w->K || c.c >= n || c.width != w->b->width || c.rank != r) return;
    if (sl_chunk_owner(c.bpos, c.k, c.c, w->tp) != r) return;
    uint32_t rows = c.c + 1 < n ? w->b->chunk_rows : n_tokens - (n - 1) * w->b->chunk_rows;
    if (c.rows != rows || (uint64_t)rows * w->row_bytes > sl_ring_info(l->chunk[r])->pay_size) return;
    w->chunks[(uint64_t)c.k * n + c.c] = sl_ring_payload(l->chunk[r], pos);
}

/* Walk rank r's ring to the batch's END. Descriptors of other batches or epochs on the way are stale. 0: found; 1: not
 * there. */
static int walk(sl_writer *w, lane *l, unsigned r, uint64_t bpos, uint32_t epoch, uint32_t n_tokens, uint64_t *end) {
    uint64_t pub = sl_ring_pos(l->chunk[r], SL_CHUNK_PUBLISHED), released = sl_ring_pos(l->chunk[r], SL_CHUNK_RELEASED);
    for (uint64_t p = l->cat[r] > released ? l->cat[r] : released; p < pub; p++) {
        const sl_desc *d = sl_ring_at(l->chunk[r], p);
        uint64_t of;
        if (!d || d->h.pos != p || d->h.epoch != epoch) continue;
        memcpy(&of, d->body, sizeof of); /* bpos is the first field behind the head in all three kinds */
        if (of != bpos) continue;
        if (d->h.kind == SL_DESC_CHUNK) take_chunk(w, l, r, p, d, n_tokens);
        if (d->h.kind == SL_DESC_END) {
            *end = l->cat[r] = p + 1;
            return 0;
        }
    }
    return 1;
}
_Static_assert(offsetof(sl_desc_chunk, bpos) == 24 && offsetof(sl_desc_row, bpos) == 24 &&
                   offsetof(sl_desc_end, bpos) == 24,
               "");

static int map_chunks(sl_writer *w, lane *l, batch *b, uint32_t epoch, uint32_t n_tokens, sl_err *err) {
    w->n_chunks = (uint64_t)w->K * chunk_count(w, n_tokens);
    if (w->n_chunks > w->cap_chunks) {
        const void **p = realloc(w->chunks, w->n_chunks * sizeof *p);
        if (!p) return sl_err_set(err, SL_ETEMP, "no memory for the map of %" PRIu64 " chunks", w->n_chunks);
        w->chunks = p;
        w->cap_chunks = w->n_chunks;
    }
    memset(w->chunks, 0, w->n_chunks * sizeof *w->chunks);
    for (unsigned r = 0; r < w->tp; r++)
        if (walk(w, l, r, b->bpos, epoch, n_tokens, &b->chunk_end[r]))
            sl_log(SL_DEBUG, "batch at %" PRIu64 ": no END of rank %u.%u in its ring", b->bpos, b->group, r);
    return 0;
}

/* ---- rows ---- */

/* The row's pieces, state by state. Returns whether all are there. */
static int cut_pieces(sl_writer *w, const sl_batch_row *r, uint32_t n_tokens, bool *whole, sl_err *err) {
    uint32_t n = chunk_count(w, n_tokens), c0 = r->t0 / w->b->chunk_rows, c1 = (r->t0 + r->T - 1) / w->b->chunk_rows,
             at = 0;
    uint64_t need = (uint64_t)w->K * (c1 - c0 + 1);
    if (need > w->cap_pieces) {
        sl_piece *p = realloc(w->pieces, need * sizeof *p);
        if (!p) return sl_err_set(err, SL_ETEMP, "no memory for the %" PRIu64 " pieces of a row", need);
        w->pieces = p;
        w->cap_pieces = need;
    }
    *whole = true;
    for (uint32_t k = 0; k < w->K; k++) {
        w->first[k] = at;
        for (uint32_t c = c0; c <= c1; c++) {
            const uint8_t *p = w->chunks[(uint64_t)k * n + c];
            uint32_t a = c * w->b->chunk_rows, b = a + w->b->chunk_rows;
            if (a < r->t0) a = r->t0;
            if (b > r->t0 + r->T) b = r->t0 + r->T;
            if (!p)
                *whole = false;
            else
                w->pieces[at++] = (sl_piece){p + (uint64_t)(a - c * w->b->chunk_rows) * w->row_bytes, a - r->t0, b - a};
        }
    }
    w->first[w->K] = at;
    return 0;
}

/* Data set name and part come from the log, which is durable before a batch is published. */
static int look_up(sl_writer *w, const sl_batch_row *r, const sl_accepted_row **row, const char **name, sl_err *err) {
    for (int again = 0; again < 2; again++) {
        *row = sl_accepted_at(w->intake, r->seq);
        *name = sl_accepted_name(w->intake, r->dataset);
        if (*row && *name) break;
        int rc = sl_accepted_follow(w->intake, err);
        if (rc) return rc;
    }
    if (!*row || !*name)
        return sl_err_set(err, SL_EINTERNAL,
                          "row %" PRIu64 " (seq %" PRIu64 ", data set %u) is in a batch but not in intake.log", r->row,
                          r->seq, r->dataset);
    if ((*row)->row != r->row || (*row)->dataset != r->dataset || (*row)->T != r->T ||
        memcmp((*row)->key.w, r->key, sizeof r->key))
        return sl_err_set(
            err, SL_EINTERNAL,
            "seq %" PRIu64 " is row %" PRIu64 " of data set %u with %u tokens and key %016" PRIx64
            " in the batch, but row %" PRIu64 " of data set %u with %u tokens and key %016" PRIx64 " in intake.log",
            r->seq, r->row, r->dataset, r->T, r->key[0], (*row)->row, (*row)->dataset, (*row)->T, (*row)->key.w[0]);
    return 0;
}

static void count_row(sl_writer *w, const sl_row_in *r) {
    sl_metrics *m = w->st->metrics;
    sl_metric_add(m, SL_M_ROWS_IN, 1);
    sl_metric_add(m, SL_M_TOKENS_IN, r->T);
    if (r->verdict != SL_V_OK) {
        sl_metric_add(m, SL_M_REJECT_BASE + (r->verdict < SL_V_N ? r->verdict : 0), 1);
        return;
    }
    sl_metric_add(m, SL_M_ROWS_OUT, 1);
    sl_metric_add(m, SL_M_TOKENS_OUT, r->T);
    sl_metric_add(m, SL_M_BYTES_RAW, (uint64_t)r->T * w->K * w->row_bytes);
    if (!isnan(r->nll)) {
        sl_metric_add(m, SL_M_NLL_SUM_MICRO, (uint64_t)(int64_t)llrint(r->nll * 1e6));
        sl_metric_add(m, SL_M_NLL_ROWS, 1);
    }
}

static void reject(sl_row_in *row, sl_verdict v, uint64_t detail) {
    row->verdict = v;
    row->fault_k = 0xffff;
    row->fault_token = UINT32_MAX;
    row->detail = detail;
}

/* After a life that ended over a row, every row up to that one (others of its group may be no better) is looked at
 * before anything of it is written. Were its states only read wrongly then, it is a row like any other. */
static void look_first(sl_writer *w, sl_row_in *row) {
    const sl_stage *st = w->st;
    uint64_t doubt = sl_metric_get(st->metrics, st->proc, SL_M_DOUBT);
    if (!doubt) return;
    if (doubt == row->seq + 1) sl_metric_set(st->metrics, SL_M_DOUBT, 0);
    if (row->verdict != SL_V_OK) return;
    uint64_t found = sl_sink_row_sum(w->sink, row);
    if (found == row->sum) {
        if (doubt == row->seq + 1)
            sl_log(SL_WARN, "row %" PRIu64 " of '%s': its states are the validated ones after all", row->row,
                   row->name);
        return;
    }
    sl_log(SL_ERROR,
           "row %" PRIu64 " of '%s': its states changed in memory after they were validated (row sum %016" PRIx64
           ", expected %016" PRIx64 "): rejected. A part of this machine's memory may be failing",
           row->row, row->name, found, row->sum);
    reject(row, SL_V_CHECKSUM, found);
}

static int put_row(sl_writer *w, const sl_batch_view *v, const sl_desc_sample *s, uint32_t epoch, sl_err *err) {
    const sl_batch_row *r = &v->rows[s->row];
    const sl_accepted_row *in;
    const char *name;
    bool whole = false;
    if ((r->flags & SL_ROW_DONE) || sl_sink_done(w->sink, r->seq)) return 0;
    int rc = look_up(w, r, &in, &name, err);
    if (!rc) rc = cut_pieces(w, r, v->desc->n_tokens, &whole, err);
    if (rc) return rc;
    sl_row_in row = {.seq = r->seq,
                     .row = r->row,
                     .dataset = r->dataset,
                     .part = in->part,
                     .T = r->T,
                     .mask_sum = r->mask_sum,
                     .epoch = epoch,
                     .key = in->key,
                     .id = v->base + r->id_off,
                     .id_len = r->id_len,
                     .name = name,
                     .ids = v->ids + r->t0,
                     .mask = v->mask + r->t0,
                     .nll = s->nll,
                     .nll_tokens = s->nll_tokens,
                     .verdict = s->verdict,
                     .fault_k = s->k,
                     .fault_token = s->token,
                     .detail = s->detail,
                     .summed = s->verdict == SL_V_OK,
                     .sum = s->detail,
                     .pieces = w->pieces,
                     .first = w->first};
    if (row.verdict >= SL_V_N)
        return sl_err_set(err, SL_EINTERNAL, "verdict %u of row %" PRIu64 " is unknown", s->verdict, r->row);
    if (row.verdict == SL_V_OK && !whole) {
        sl_log(SL_ERROR, "row %" PRIu64 " of '%s' was called good but not all of its chunks are in the rings: rejected",
               r->row, name);
        reject(&row, SL_V_MISSING_SHARD, 0);
    }
    look_first(w, &row);
    if (row.verdict != SL_V_OK)
        sl_log(SL_WARN, "row %" PRIu64 " of '%s' is rejected: %s; its states and the reason are in %s/quarantine",
               r->row, name, sl_verdict_name((sl_verdict)row.verdict), w->b->store);
    rc = sl_sink_row(w->sink, &row, err);
    if (!rc) count_row(w, &row);
    return rc < 0 ? rc : 0;
}

/* ---- batches ---- */

static batch *new_batch(sl_writer *w, unsigned group, uint64_t bpos, uint64_t sample_end) {
    batch *b = calloc(1, sizeof *b + w->tp * sizeof(uint64_t));
    if (b) *b = (batch){.group = group, .bpos = bpos, .sample_end = sample_end, .chunk_end = (uint64_t *)(b + 1)};
    return b;
}

static int put_rows(sl_writer *w, lane *l, batch *b, const sl_desc_batch *d, sl_err *err) {
    sl_batch_view v;
    int rc = sl_batch_open(&v, l->batch, b->bpos, err);
    if (rc) return rc;
    if (v.desc->n_rows != d->n_rows || v.desc->batch_no != d->batch_no)
        return sl_err_set(err, SL_EINTERNAL,
                          "verdicts on %u rows for batch %" PRIu64 ", which is number %" PRIu64 " with %u rows",
                          d->n_rows, d->batch_no, v.desc->batch_no, v.desc->n_rows);
    if ((rc = map_chunks(w, l, b, d->h.epoch, v.desc->n_tokens, err))) return rc;
    for (uint32_t i = 0; i < d->n_rows && !rc; i++) {
        const sl_desc *p = sl_ring_at(l->sample, l->at + 1 + i);
        sl_desc_sample s;
        if (p) memcpy(&s, p, sizeof s);
        if (!p || s.h.kind != SL_DESC_SAMPLE || s.h.pos != l->at + 1 + i || s.row != i || s.seq != v.rows[i].seq)
            return sl_err_set(err, SL_EINTERNAL,
                              "sample ring %u: verdict %u of batch %" PRIu64 " is not where it should be", b->group, i,
                              d->batch_no);
        rc = put_row(w, &v, &s, d->h.epoch, err);
        if (!rc) rc = sl_sink_poll(w->sink, false, err);
        sl_metric_beat(w->st->metrics);
    }
    return rc;
}

/* Take the next batch of a group: 1 taken, 0 none. */
static int take_batch(sl_writer *w, unsigned g, sl_err *err) {
    lane *l = &w->lanes[g];
    uint64_t pub = sl_ring_pos(l->sample, SL_SAMPLE_PUBLISHED);
    if (l->at == pub) return 0;
    const sl_desc *p = sl_ring_at(l->sample, l->at);
    sl_desc_batch d;
    if (p) memcpy(&d, p, sizeof d);
    if (!p || d.h.kind != SL_DESC_BATCH || d.h.pos != l->at || d.n_rows > pub - l->at - 1)
        return sl_err_set(err, SL_EINTERNAL, "sample ring %u: no whole batch at position %" PRIu64, g, l->at);
    batch *b = new_batch(w, g, d.bpos, l->at + 1 + d.n_rows);
    if (!b) return sl_err_set(err, SL_ETEMP, "no memory for a batch");
    b->batch_gone = d.bpos < sl_ring_pos(l->batch, SL_BATCH_RELEASED);
    int rc = b->batch_gone ? 0 : put_rows(w, l, b, &d, err);
    if (!rc) rc = sl_sink_token(w->sink, b, err);
    if (rc) {
        free(b);
        sl_err_wrap(err, "group %u, batch %" PRIu64, g, d.batch_no);
        return rc;
    }
    l->at = b->sample_end;
    l->held++;
    sl_metric_add(w->st->metrics, SL_M_BATCHES, 1);
    if (!w->open_since) w->open_since = sl_now_ns();
    return 1;
}

/* ---- release ---- */

static int release_batch(sl_writer *w, lane *l, batch *b, bool *moved, sl_err *err) {
    int rc = 0;
    /* Gather advances its cursors after it published the verdicts: wait for it (it rings our bell). */
    for (unsigned r = 0; r < w->tp; r++)
        if (b->chunk_end[r] > sl_ring_pos(l->chunk[r], SL_CHUNK_VALIDATED)) return 0;
    if (!b->batch_gone && sl_ring_pos(l->batch, SL_BATCH_GATHERED) <= b->bpos) return 0;
    for (unsigned r = 0; r < w->tp && !rc; r++)
        if (b->chunk_end[r] > sl_ring_pos(l->chunk[r], SL_CHUNK_RELEASED))
            rc = sl_ring_advance(l->chunk[r], b->chunk_end[r], err);
    if (!rc && !b->batch_gone) rc = sl_ring_advance(l->batch, b->bpos + 1, err);
    if (!rc) rc = sl_ring_advance(l->sample, b->sample_end, err);
    *moved = true;
    return rc;
}

static void ring_bells(const sl_writer *w, unsigned g) {
    const sl_boot *b = w->b;
    for (unsigned r = 0; r < w->tp; r++) sl_bell_ring(b->procs[b->groups[g].first_rank_proc + r].bell_fd);
    for (unsigned p = 0; p < b->n_procs; p++)
        if (b->procs[p].role == SL_ROLE_FEEDER || b->procs[p].role == SL_ROLE_GATHER) sl_bell_ring(b->procs[p].bell_fd);
}

static int release(sl_writer *w, bool *any, sl_err *err) {
    for (unsigned g = 0; g < w->dp; g++) {
        lane *l = &w->lanes[g];
        bool rang = false;
        while (l->release) {
            bool moved = false;
            batch *b = l->release;
            int rc = release_batch(w, l, b, &moved, err);
            if (rc) return rc;
            if (!moved) break;
            l->release = b->next;
            if (!l->release) l->release_tail = &l->release;
            l->held--;
            free(b);
            rang = true;
        }
        if (rang) ring_bells(w, g);
        *any |= rang;
    }
    return 0;
}

/* Chunks of dead epochs: what gather passed, when no verdict is left that could speak of it. `val` was read before the
 * sample ring was found empty. */
static int sweep(sl_writer *w, unsigned g, const uint64_t *val, sl_err *err) {
    lane *l = &w->lanes[g];
    bool any = false;
    if (l->held || l->at != sl_ring_pos(l->sample, SL_SAMPLE_PUBLISHED)) return 0;
    for (unsigned r = 0; r < w->tp; r++) {
        if (val[r] <= sl_ring_pos(l->chunk[r], SL_CHUNK_RELEASED)) continue;
        int rc = sl_ring_advance(l->chunk[r], val[r], err);
        if (rc) return rc;
        any = true;
    }
    if (any) ring_bells(w, g);
    return 0;
}

/* ---- the loop ---- */

static bool ring_pressed(const sl_ring *r, unsigned released) {
    uint64_t rel = sl_ring_pos(r, released), fill = sl_ring_pos(r, 0) - rel;
    const sl_ring_params *p = sl_ring_info(r);
    if (fill * 2 >= p->depth) return true;
    const sl_desc *last = fill ? sl_ring_at(r, rel + fill - 1) : NULL, *old = fill ? sl_ring_at(r, rel) : NULL;
    return last && old && p->pay_slots && (last->h.pay_end - old->h.pay_end) * 2 >= p->pay_slots;
}

/* Back-pressure that only our commit can lift. */
static bool pressed(const sl_writer *w) {
    for (unsigned g = 0; g < w->dp; g++) {
        const lane *l = &w->lanes[g];
        if (!l->held) continue;
        if (ring_pressed(l->batch, SL_BATCH_RELEASED) || ring_pressed(l->sample, SL_SAMPLE_RELEASED)) return true;
        for (unsigned r = 0; r < w->tp; r++)
            if (ring_pressed(l->chunk[r], SL_CHUNK_RELEASED)) return true;
    }
    return false;
}

static int close_if_due(sl_writer *w, bool idle, uint64_t *left_ms, sl_err *err) {
    *left_ms = 1000;
    if (!w->open_since) return 0;
    uint64_t age = (sl_now_ns() - w->open_since) / 1000000;
    bool due = sl_sink_open_bytes(w->sink) >= (uint64_t)w->b->commit_mb << 20 || age >= w->b->commit_ms || pressed(w) ||
               (idle && w->draining);
    if (!due) {
        *left_ms = w->b->commit_ms - age;
        return 0;
    }
    w->open_since = 0;
    int rc = sl_sink_close_group(w->sink, err);
    return rc ? rc : 1;
}

static bool finished(const sl_writer *w) {
    if (!w->draining || w->open_since || sl_sink_groups(w->sink)) return false;
    for (unsigned p = 0; p < w->b->n_procs; p++)
        if (w->b->procs[p].role == SL_ROLE_GATHER && sl_metric_get(w->st->metrics, p, SL_M_STATE) != SL_ST_DONE)
            return false;
    for (unsigned g = 0; g < w->dp; g++) {
        const lane *l = &w->lanes[g];
        if (l->held || sl_ring_fill(l->sample)) return false;
    }
    return true;
}

/* One turn: 1 something was done, 0 nothing to do. */
static int turn(sl_writer *w, uint64_t *left_ms, sl_err *err) {
    bool any = false;
    int rc = 0;
    w->draining = atomic_load_explicit(&w->st->ctl[0].draining, memory_order_acquire);
    for (unsigned g = 0; g < w->dp && rc >= 0; g++) {
        uint64_t val[SL_MAX_RANKS] = {0};
        for (unsigned r = 0; r < w->tp; r++) val[r] = sl_ring_pos(w->lanes[g].chunk[r], SL_CHUNK_VALIDATED);
        rc = take_batch(w, g, err);
        if (rc == 0) rc = sweep(w, g, val, err);
        any |= rc > 0;
        /* Between batches too: a group that is due must not wait for the other groups' batches. */
        if (rc > 0) rc = close_if_due(w, false, left_ms, err);
    }
    unsigned groups = sl_sink_groups(w->sink);
    if (rc >= 0) rc = close_if_due(w, !any, left_ms, err);
    any |= rc > 0;
    if (rc >= 0) rc = sl_sink_poll(w->sink, false, err);
    any |= sl_sink_groups(w->sink) < groups;
    if (rc >= 0) rc = release(w, &any, err);
    return rc < 0 ? rc : any;
}

int sl_writer_run(sl_writer *w, sl_err *err) {
    sl_metrics *m = w->st->metrics;
    sl_metric_set(m, SL_M_STATE, SL_ST_RUNNING);
    for (;;) {
        uint64_t left;
        sl_bell_drain(w->st->bell);
        sl_metric_beat(m);
        if (w->draining) sl_metric_set(m, SL_M_STATE, SL_ST_DRAINING);
        int rc = turn(w, &left, err);
        if (rc < 0) return rc;
        if (rc) continue;
        if (finished(w)) break;
        bool on_disk = sl_sink_groups(w->sink) > 0;
        for (unsigned g = 0; g < w->dp; g++)
            if (w->lanes[g].release && left > 50) left = 50; /* gather may be down: look again soon */
        struct pollfd fds[2] = {[1] = {.fd = sl_sink_eventfd(w->sink), .events = POLLIN}};
        sl_metric_regime(m, on_disk ? SL_M_WAIT_OUT_NS : SL_M_WAIT_IN_NS);
        sl_bell_wait(w->st->bell, fds, 2, (int)left);
        sl_metric_regime(m, SL_M_BUSY_NS);
    }
    int rc = sl_sink_finish(w->sink, err);
    if (rc) return rc;
    const sl_store_stats *s = sl_sink_stats(w->sink);
    sl_log(SL_INFO,
           "done: %" PRIu64 " rows written, %" PRIu64 " rejected rows=%" PRIu64 " tokens=%" PRIu64 " bytes=%" PRIu64,
           s->rows, s->rejected, s->rows, s->tokens, s->stored_bytes);
    sl_metric_set(m, SL_M_STATE, SL_ST_DONE);
    return 0;
}

/* ---- open and close ---- */

/* Whether all chunk rings lie in huge pages: memfds tell by their block size. */
static bool rings_are_huge(const sl_boot *b) {
    struct stat st;
    for (unsigned g = 0; g < b->dp; g++)
        for (unsigned r = 0; r < b->tp; r++)
            if (fstat(b->groups[g].chunk_fd[r], &st) || st.st_blksize < 2 << 20) return false;
    return true;
}

static int open_lane(sl_writer *w, unsigned g, sl_err *err) {
    lane *l = &w->lanes[g];
    const sl_boot_group *b = &w->b->groups[g];
    l->release_tail = &l->release;
    int rc = sl_ring_attach(&l->batch, b->batch_fd, SL_BATCH_RELEASED, err);
    if (!rc) rc = sl_ring_attach(&l->sample, b->sample_fd, SL_SAMPLE_RELEASED, err);
    for (unsigned r = 0; r < w->tp && !rc; r++)
        rc = sl_ring_attach(&l->chunk[r], b->chunk_fd[r], SL_CHUNK_RELEASED, err);
    if (!rc) l->at = sl_ring_pos(l->sample, SL_SAMPLE_RELEASED);
    return rc;
}

int sl_writer_open(sl_writer **out, const sl_stage *st, sl_err *err) {
    const sl_boot *b = st->boot;
    sl_writer *w = calloc(1, sizeof *w);
    if (!w) return sl_err_set(err, SL_ETEMP, "no memory");
    *w = (sl_writer){
        .st = st, .b = b, .tp = b->tp, .dp = b->dp, .K = b->n_captures, .row_bytes = b->width * b->elem_size};
    w->lanes = calloc(w->dp, sizeof *w->lanes);
    w->first = calloc(w->K + 1, sizeof *w->first);
    int rc = w->lanes && w->first ? 0 : sl_err_set(err, SL_ETEMP, "no memory");
    for (unsigned g = 0; g < w->dp && !rc; g++) rc = open_lane(w, g, err);
    sl_sink_cfg c = {.store = b->store,
                     .zstd_level = b->zstd_level ? (int)b->zstd_level : 1,
                     .threads = b->writer_threads,
                     .shard_bytes = b->shard_bytes ? b->shard_bytes : 4ull << 30,
                     .reserve_bytes = b->reserve_bytes,
                     .direct = b->direct_io,
                     .huge = rings_are_huge(b),
                     .arg = w,
                     .on_commit = on_commit,
                     .on_pause = on_pause,
                     .on_tick = on_tick,
                     .on_wait = on_wait,
                     .on_changed = on_changed,
                     .on_note = on_note};
    sl_writer_manifest(&c.manifest, b);
    if (!rc) rc = sl_sink_open(&w->sink, &c, err);
    if (!rc) rc = sl_accepted_new(&w->intake, b->store, err);
    if (rc) {
        sl_writer_close(w);
        return rc;
    }
    w->stored_seen = sl_sink_stats(w->sink)->stored_bytes;
    w->reject_seen = sl_sink_stats(w->sink)->rejected;
    sl_metric_set(st->metrics, SL_M_COMMITTED, sl_sink_committed(w->sink));
    sl_metric_set(st->metrics, SL_M_FREE_BYTES, sl_sink_free(w->sink));
    sl_metric_set(st->metrics, SL_M_STATE, SL_ST_READY);
    *out = w;
    return 0;
}

void sl_writer_close(sl_writer *w) {
    if (!w) return;
    sl_sink_close(w->sink);
    sl_accepted_free(w->intake);
    for (unsigned g = 0; w->lanes && g < w->dp; g++) {
        lane *l = &w->lanes[g];
        for (batch *b = l->release, *n; b; b = n) n = b->next, free(b);
        sl_ring_detach(l->batch);
        sl_ring_detach(l->sample);
        for (unsigned r = 0; r < w->tp; r++) sl_ring_detach(l->chunk[r]);
    }
    free(w->lanes);
    free(w->chunks);
    free(w->pieces);
    free(w->first);
    free(w);
}
