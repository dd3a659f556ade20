#include "daemon/status.h"
#include "ipc/wire.h"
#include <math.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000ull

/* ---- the logs ---- */

static int on_intake(void *arg, const void *rec, sl_err *err) {
    (void)err;
    sl_status_totals *t = arg;
    const sl_intake_rec *r = rec;
    if (r->kind == SL_IN_ROW) {
        t->accepted++, t->accepted_tokens += r->T;
        t->truncated += r->flags & 1; /* ipc/journal.h */
    }
    if (r->kind == SL_IN_REJECT) {
        t->refused++;
        if (r->reason < SL_R_N) t->reasons[r->reason]++;
    }
    return SL_OK;
}

static int on_commit(void *arg, const void *rec, sl_err *err) {
    (void)err;
    sl_status_totals *t = arg;
    const sl_commit_rec *r = rec;
    if (r->kind == SL_CM_COMMIT) {
        t->committed++, t->committed_tokens += r->T, t->raw += r->raw_bytes, t->stored += r->len;
        if (!isnan(r->nll)) t->nll_sum += (double)r->nll, t->nll_rows++;
    } else if (r->kind == SL_CM_REJECT) {
        t->rejected++;
        if (r->verdict < SL_V_N) t->verdicts[r->verdict]++;
    }
    return SL_OK;
}

static int follow(sl_status_totals *t, const char *store, const char *name, uint32_t magic, uint64_t *at,
                  sl_journal_each each, sl_err *err) {
    char path[SL_PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/%s", store, name);
    if (access(path, F_OK)) return SL_OK; /* nothing came yet */
    return sl_journal_follow(path, magic, at, each, t, err);
}

int sl_status_totals_follow(sl_status_totals *t, const char *store, sl_status_at *at, sl_err *err) {
    /* commit first: then accepted can never be smaller than committed + rejected */
    int rc = follow(t, store, "commit.log", SL_COMMIT_MAGIC, &at->commit, on_commit, err);
    return rc ? rc : follow(t, store, "intake.log", SL_INTAKE_MAGIC, &at->intake, on_intake, err);
}

int sl_status_open(sl_status *s, const sl_config *c, const sl_preflight *p, const sl_topo *t, const sl_super *super,
                   sl_err *err) {
    memset(s, 0, sizeof *s);
    s->cfg = c, s->topo = t, s->super = super, s->state = "booting";
    s->start_ns = sl_now_ns();
    s->token_bytes = p->token_bytes;
    int rc = sl_status_totals_follow(&s->now, s->cfg->boot.store, &s->at, err);
    s->first = s->now;
    return rc;
}

uint64_t sl_status_bad_rows(const sl_status *s) {
    return s->now.rejected - s->first.rejected + s->now.refused - s->first.refused;
}

/* ---- rates and shares ---- */

static void update_rates(sl_status *s, uint64_t now) {
    unsigned last = (s->n_samples + SL_STATUS_WINDOW - 1) % SL_STATUS_WINDOW;
    if (s->n_samples && now - s->sample[last].ns < SECOND / 5) return;
    unsigned at = s->n_samples++ % SL_STATUS_WINDOW;
    s->sample[at].ns = now, s->sample[at].tokens = s->now.committed_tokens, s->sample[at].rows = s->now.committed;
    s->sample[at].raw = s->now.raw, s->sample[at].stored = s->now.stored;
    unsigned n = s->n_samples < SL_STATUS_WINDOW ? s->n_samples : SL_STATUS_WINDOW, from = at;
    for (unsigned i = 1; i < n; i++) { /* the oldest one that is at most 5 s old */
        unsigned j = (at + SL_STATUS_WINDOW - i) % SL_STATUS_WINDOW;
        if (now - s->sample[j].ns > 5 * SECOND) break;
        from = j;
    }
    double dt = (double)(now - s->sample[from].ns) * 1e-9;
    if (dt <= 0) return;
    s->tokens_s = (double)(s->now.committed_tokens - s->sample[from].tokens) / dt;
    s->rows_s = (double)(s->now.committed - s->sample[from].rows) / dt;
    s->raw_s = (double)(s->now.raw - s->sample[from].raw) / dt;
    s->stored_s = (double)(s->now.stored - s->sample[from].stored) / dt;
}

static void update_shares(sl_status *s, uint64_t now) {
    static const sl_metric ids[3] = {SL_M_BUSY_NS, SL_M_WAIT_IN_NS, SL_M_WAIT_OUT_NS};
    if (now - s->regime_ns < SECOND) return;
    s->regime_ns = now;
    for (unsigned p = 1; p < s->topo->boot->n_procs; p++) {
        uint64_t v[3], sum = 0;
        for (int i = 0; i < 3; i++) {
            v[i] = sl_metric_get(s->topo->metrics, p, ids[i]);
            sum += v[i] - s->regime[p][i];
        }
        bool back = v[0] < s->regime[p][0] || v[1] < s->regime[p][1] || v[2] < s->regime[p][2]; /* restarted */
        for (int i = 0; i < 3; i++) {
            if (sum && !back) s->share[p][i] = (float)(100.0 * (double)(v[i] - s->regime[p][i]) / (double)sum);
            s->regime[p][i] = v[i];
        }
    }
}

int sl_status_update(sl_status *s, uint64_t now, sl_err *err) {
    int rc = sl_status_totals_follow(&s->now, s->cfg->boot.store, &s->at, err);
    update_rates(s, now);
    update_shares(s, now);
    return rc;
}

/* ---- the map ---- */

static double realtime(void) {
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static void map(msgpack_packer *pk, const char *key, size_t n) {
    sl_wire_key(pk, key);
    msgpack_pack_map(pk, n);
}

static void str(msgpack_packer *pk, const char *s) {
    msgpack_pack_str(pk, strlen(s));
    msgpack_pack_str_body(pk, s, strlen(s));
}

static void pack_head(const sl_status *s, msgpack_packer *pk) { /* 11 keys */
    const sl_boot *b = s->topo->boot;
    sl_wire_kstr(pk, "t", "status");
    sl_wire_ku64(pk, "v", SL_WIRE_VERSION);
    sl_wire_kdbl(pk, "time", realtime());
    sl_wire_kdbl(pk, "uptime", (double)(sl_now_ns() - s->start_ns) * 1e-9);
    sl_wire_ku64(pk, "run", b->run_id);
    sl_wire_ku64(pk, "pid", (uint64_t)getpid());
    sl_wire_kstr(pk, "state", s->state);
    sl_wire_kstr(pk, "model", b->model);
    sl_wire_kstr(pk, "store", b->store);
    sl_wire_kstr(pk, "feed", b->feed_addr);
    map(pk, "layout", 8);
    sl_wire_ku64(pk, "groups", b->dp);
    sl_wire_ku64(pk, "ranks", b->tp);
    sl_wire_kstr(pk, "backend", b->backend == SL_BACKEND_CUDA ? "cuda" : "cpu");
    sl_wire_kstr(pk, "precision", b->precision == SL_PREC_F32 ? "f32" : "bf16");
    sl_wire_ku64(pk, "threads", b->threads);
    sl_wire_ku64(pk, "width", b->width);
    sl_wire_ku64(pk, "layers", b->n_layers);
    sl_wire_ku64(pk, "token_bytes", s->token_bytes);
    sl_wire_key(pk, "states");
    msgpack_pack_array(pk, b->n_captures);
    for (uint32_t k = 0; k < b->n_captures; k++) {
        msgpack_pack_array(pk, 2);
        msgpack_pack_uint32(pk, b->captures[k].hidx);
        msgpack_pack_uint32(pk, b->captures[k].final_norm);
    }
}
#define HEAD_KEYS 12

static double eta_of(const sl_status *s) {
    uint64_t goal = s->cfg->expect_tokens > s->now.accepted_tokens ? s->cfg->expect_tokens : s->now.accepted_tokens;
    if (s->now.accepted == s->now.committed + s->now.rejected && !s->cfg->expect_tokens) return 0;
    if (s->tokens_s <= 0) return -1;
    return goal > s->now.committed_tokens ? (double)(goal - s->now.committed_tokens) / s->tokens_s : 0;
}

static void pack_rejects(const sl_status_totals *t, msgpack_packer *pk) {
    size_t n = 0;
    for (int v = 1; v < SL_V_N; v++) n += t->verdicts[v] > 0;
    for (int r = 1; r < SL_R_N; r++) n += t->reasons[r] > 0;
    map(pk, "rejects", n);
    for (int v = 1; v < SL_V_N; v++)
        if (t->verdicts[v]) sl_wire_ku64(pk, sl_verdict_name((sl_verdict)v), t->verdicts[v]);
    for (int r = 1; r < SL_R_N; r++)
        if (t->reasons[r]) sl_wire_ku64(pk, sl_reason_name((sl_reason)r), t->reasons[r]);
}

static void pack_totals(const sl_status *s, msgpack_packer *pk) { /* 8 keys */
    const sl_status_totals *t = &s->now, *f = &s->first;
    uint64_t finished = t->committed + t->rejected;
    map(pk, "rows", 6);
    sl_wire_ku64(pk, "accepted", t->accepted);
    sl_wire_ku64(pk, "committed", t->committed);
    sl_wire_ku64(pk, "rejected", t->rejected);
    sl_wire_ku64(pk, "refused", t->refused);
    sl_wire_ku64(pk, "queued", t->accepted > finished ? t->accepted - finished : 0);
    sl_wire_ku64(pk, "truncated", t->truncated);
    map(pk, "life", 4);
    sl_wire_ku64(pk, "committed", t->committed - f->committed);
    sl_wire_ku64(pk, "rejected", t->rejected - f->rejected);
    sl_wire_ku64(pk, "refused", t->refused - f->refused);
    sl_wire_ku64(pk, "tokens", t->committed_tokens - f->committed_tokens);
    map(pk, "tokens", 2);
    sl_wire_ku64(pk, "accepted", t->accepted_tokens);
    sl_wire_ku64(pk, "committed", t->committed_tokens);
    map(pk, "bytes", 3);
    sl_wire_ku64(pk, "raw", t->raw);
    sl_wire_ku64(pk, "stored", t->stored);
    sl_wire_kdbl(pk, "ratio", t->stored ? (double)t->raw / (double)t->stored : 0);
    map(pk, "rate", 4);
    sl_wire_kdbl(pk, "tokens", s->tokens_s);
    sl_wire_kdbl(pk, "rows", s->rows_s);
    sl_wire_kdbl(pk, "raw", s->raw_s);
    sl_wire_kdbl(pk, "stored", s->stored_s);
    sl_wire_kdbl(pk, "eta", eta_of(s));
    map(pk, "nll", 2);
    sl_wire_key(pk, "mean");
    if (t->nll_rows)
        msgpack_pack_double(pk, t->nll_sum / (double)t->nll_rows);
    else
        msgpack_pack_nil(pk);
    sl_wire_ku64(pk, "rows", t->nll_rows);
    pack_rejects(t, pk);
}
#define TOTALS_KEYS 8

static void pack_stage(const sl_status *s, unsigned p, msgpack_packer *pk) {
    static const struct {
        const char *key;
        sl_metric id;
    } counters[] = {{"rows", SL_M_ROWS_OUT}, {"tokens", SL_M_TOKENS_OUT}, {"batches", SL_M_BATCHES},
                    {"raw", SL_M_BYTES_RAW}, {"written", SL_M_BYTES_OUT}, {"warnings", SL_M_WARNINGS},
                    {"epoch", SL_M_EPOCH}};
    const sl_boot_proc *bp = &s->topo->boot->procs[p];
    const sl_super_proc *sp = &s->super->proc[p];
    const sl_metrics *m = s->topo->metrics;
    uint64_t total = sl_metric_get(m, p, SL_M_LOAD_TOTAL);
    bool alive = sp->pid && sl_metric_get(m, p, SL_M_PID) == (uint64_t)sp->pid;
    msgpack_pack_map(pk, 11 + sizeof counters / sizeof *counters + (total ? 1 : 0));
    sl_wire_kstr(pk, "name", bp->name);
    sl_wire_kstr(pk, "role", sl_role_name((sl_role)bp->role));
    sl_wire_ku64(pk, "group", bp->group);
    sl_wire_ku64(pk, "rank", bp->rank);
    sl_wire_ku64(pk, "pid", (uint64_t)sp->pid);
    sl_wire_kstr(pk, "state",
                 sp->done   ? "done"
                 : !sp->pid ? "down"
                 : !alive   ? "starting"
                            : sl_stage_state_name(sl_metric_get(m, p, SL_M_STATE)));
    sl_wire_kdbl(pk, "busy", (double)s->share[p][0]);
    sl_wire_kdbl(pk, "in", (double)s->share[p][1]);
    sl_wire_kdbl(pk, "out", (double)s->share[p][2]);
    for (size_t i = 0; i < sizeof counters / sizeof *counters; i++)
        sl_wire_ku64(pk, counters[i].key, sl_metric_get(m, p, counters[i].id));
    sl_wire_ku64(pk, "restarts", sp->restarts);
    sl_wire_kdbl(pk, "beat_age", sp->pid ? (double)(sl_now_ns() - sp->beat_ns) * 1e-9 : 0);
    if (total) sl_wire_kdbl(pk, "load", (double)sl_metric_get(m, p, SL_M_LOAD_DONE) / (double)total);
}

static void pack_stages(const sl_status *s, msgpack_packer *pk) {
    const sl_boot *b = s->topo->boot;
    sl_wire_key(pk, "stages");
    msgpack_pack_array(pk, b->n_procs - 1);
    pack_stage(s, SL_PROC_FEEDER, pk);
    for (unsigned p = SL_PROC_RANKS; p < b->n_procs; p++) pack_stage(s, p, pk);
    pack_stage(s, SL_PROC_GATHER, pk);
    pack_stage(s, SL_PROC_WRITER, pk);
}

static void pack_rings(const sl_status *s, msgpack_packer *pk) {
    const sl_topo *t = s->topo;
    size_t n = 0;
    for (unsigned i = 0; i < t->n_obj; i++) n += t->obj[i].view != NULL;
    sl_wire_key(pk, "rings");
    msgpack_pack_array(pk, n);
    for (unsigned i = 0; i < t->n_obj; i++) {
        const sl_topo_obj *o = &t->obj[i];
        if (!o->view) continue;
        msgpack_pack_map(pk, 4);
        sl_wire_kstr(pk, "name", o->name);
        sl_wire_ku64(pk, "depth", o->ring.depth);
        sl_wire_ku64(pk, "fill", sl_ring_fill(o->view));
        sl_wire_ku64(pk, "slots", o->ring.pay_slots);
    }
}

static void pack_groups(const sl_status *s, msgpack_packer *pk) {
    sl_wire_key(pk, "groups");
    msgpack_pack_array(pk, s->topo->boot->dp);
    for (uint32_t g = 0; g < s->topo->boot->dp; g++) {
        const sl_ctl_page *c = &s->topo->ctl[1 + g];
        const sl_topo_obj *o = sl_topo_find(s->topo, SL_OBJ_BATCH, g, 0);
        msgpack_pack_map(pk, 5);
        sl_wire_ku64(pk, "epoch", atomic_load(&c->epoch));
        sl_wire_ku64(pk, "deaths", atomic_load(&c->deaths));
        sl_wire_ku64(pk, "suspect", atomic_load(&c->suspect));
        sl_wire_ku64(pk, "poison", atomic_load(&c->poison_bpos));
        map(pk, "batch", 3);
        sl_wire_ku64(pk, "published", sl_ring_pos(o->view, SL_BATCH_PUBLISHED));
        sl_wire_ku64(pk, "gathered", sl_ring_pos(o->view, SL_BATCH_GATHERED));
        sl_wire_ku64(pk, "released", sl_ring_pos(o->view, SL_BATCH_RELEASED));
    }
}

static const char *level_name(sl_level l) {
    static const char *const names[] = {"DEBUG", "INFO", "WARN", "ERROR"};
    return (unsigned)l < 4 ? names[l] : "?";
}

static void pack_events(const sl_super *u, msgpack_packer *pk) {
    uint64_t n = u->n_events < 8 ? u->n_events : 8;
    sl_wire_key(pk, "events");
    msgpack_pack_array(pk, n);
    for (uint64_t i = u->n_events - n; i < u->n_events; i++) {
        const sl_super_event *e = &u->event[i % SL_SUPER_EVENTS];
        msgpack_pack_array(pk, 4);
        msgpack_pack_double(pk, (double)e->time_ns * 1e-9);
        str(pk, level_name(e->level));
        str(pk, e->who);
        str(pk, e->msg);
    }
}

void sl_status_pack(const sl_status *s, msgpack_sbuffer *out) {
    msgpack_packer pk;
    const sl_metrics *m = s->topo->metrics;
    msgpack_packer_init(&pk, out, msgpack_sbuffer_write);
    msgpack_pack_map(&pk, HEAD_KEYS + TOTALS_KEYS + 5);
    pack_head(s, &pk);
    pack_totals(s, &pk);
    map(&pk, "disk", 3);
    sl_wire_ku64(&pk, "free", sl_metric_get(m, SL_PROC_WRITER, SL_M_FREE_BYTES));
    sl_wire_ku64(&pk, "paused", sl_metric_get(m, SL_PROC_WRITER, SL_M_PAUSED));
    sl_wire_ku64(&pk, "need", sl_metric_get(m, SL_PROC_WRITER, SL_M_DISK_NEED)); /* forecast: bytes still to come */
    pack_stages(s, &pk);
    pack_rings(s, &pk);
    pack_groups(s, &pk);
    pack_events(s->super, &pk);
}

void sl_status_pack_event(const sl_super_event *e, msgpack_sbuffer *out) {
    msgpack_packer pk;
    msgpack_packer_init(&pk, out, msgpack_sbuffer_write);
    msgpack_pack_map(&pk, 5);
    sl_wire_kstr(&pk, "t", "event");
    sl_wire_kdbl(&pk, "time", (double)e->time_ns * 1e-9);
    sl_wire_kstr(&pk, "lv", level_name(e->level));
    sl_wire_kstr(&pk, "who", e->who);
    sl_wire_kstr(&pk, "msg", e->msg);
}
