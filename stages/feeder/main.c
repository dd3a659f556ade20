/* sluice-feeder: rows in at the feed socket, batches out into the batch rings. */
#include "ipc/boot.h"
#include "ipc/doorbell.h"
#include "ipc/log.h"
#include "stages/feeder/feed.h"
#include "stages/feeder/publish.h"
#include <stdio.h>
#include <string.h>

enum { FOLLOW_MS = 20, GRACE_S = 10 };

typedef struct feeder {
    sl_stage stage;
    const sl_boot *boot;
    sl_tokenizer *tok;
    sl_template *tmpl;
    sl_err tok_why, tmpl_why;
    sl_publisher *pub;
    sl_intake *in;
    sl_feed *feed;
    uint64_t ready_ns;  /* since when every rank is ready, 0 = not yet */
    uint64_t follow_ns; /* last look at commit.log */
    uint64_t blind;     /* looks since it could be read */
    bool drained;       /* the last batch is published */
} feeder;

static int load_tokenizer(feeder *f, sl_err *err) {
    const sl_boot *b = f->boot;
    const char *from = b->tokenizer[0] ? b->tokenizer : b->model;
    int rc = sl_tokenizer_load(&f->tok, from, &f->tok_why);
    if (rc &&
        (b->tokenizer[0] || rc == SL_ETEMP)) { /* one that could not be read just now is not one that is missing */
        if (err) *err = f->tok_why;
        return rc;
    }
    if (rc) {
        f->tok = NULL;
        sl_log(SL_WARN, "no tokenizer, only rows with input_ids can be taken: %s", f->tok_why.msg);
    } else {
        sl_log(SL_INFO, "tokenizer %s from %s, %d tokens", sl_tokenizer_kind(f->tok), from, sl_tokenizer_vocab(f->tok));
    }
    rc = sl_template_load(&f->tmpl, from, b->chat_template, b->template_args, &f->tmpl_why);
    if (rc && (b->chat_template[0] || strcmp(b->template_args, "{}") != 0 || rc == SL_ETEMP)) {
        if (err) *err = f->tmpl_why;
        return rc;
    }
    if (f->tmpl)
        sl_log(SL_INFO, "chat template from %s, hash %.16s, reasoning %s", f->tmpl->from, f->tmpl->hash,
               b->reasoning == SL_REASONING_KEEP_LAST ? "keep-last" : "template");
    else if (f->tok)
        sl_log(SL_WARN, "rows of messages cannot be taken: %s", f->tmpl_why.msg);
    return SL_OK;
}

static uint64_t of_writer(const feeder *f, sl_metric id) {
    for (uint32_t i = 0; i < f->boot->n_procs; i++)
        if (f->boot->procs[i].role == SL_ROLE_WRITER) return sl_metric_get(f->stage.metrics, i, id);
    return 0;
}

/* The last records of commit.log may be those of a writer that died before their sync; the next one syncs them when it
 * opens the log. Until then no client may hear of them. */
static void wait_for_writer(feeder *f) {
    while (of_writer(f, SL_M_COMMITTED) < sl_intake_commits(f->in)) {
        sl_metric_beat(f->stage.metrics);
        poll(NULL, 0, 2);
    }
}

static int open_all(feeder *f, sl_err *err) {
    const sl_boot *b = f->boot;
    sl_metric_set(f->stage.metrics, SL_M_STATE, SL_ST_LOADING);
    int rc = load_tokenizer(f, err);
    if (!rc) rc = sl_publisher_open(&f->pub, b, err); /* the rings before the logs: see publish.h */
    sl_intake_cfg ic = {.store = b->store,
                        .batch_tokens = b->batch_tokens,
                        .max_batch_rows = b->max_batch_rows,
                        .max_length = b->max_length};
    if (!rc) rc = sl_intake_open(&f->in, &ic, err);
    if (!rc) rc = sl_publisher_begin(f->pub, f->in, err);
    sl_feed_cfg fc = {.addr = b->feed_addr,
                      .curve_dir = b->curve_dir,
                      .store = b->store,
                      .credit = b->credit_rows,
                      .threads = b->feeder_threads,
                      .max_length = b->max_length,
                      .vocab = b->vocab,
                      .socket_gid1 = b->socket_gid1,
                      .run_id = b->run_id,
                      .intake = f->in,
                      .prep = {.tok = f->tok,
                               .tok_why = f->tok_why.msg,
                               .tmpl = f->tmpl,
                               .tmpl_why = f->tmpl_why.msg,
                               .vocab = b->vocab,
                               .max_length = b->max_length,
                               .overlong = b->overlong,
                               .min_supervised = b->min_supervised,
                               .train_on = b->train_on,
                               .per_turn = b->per_turn,
                               .reasoning = b->reasoning}};
    if (!rc) wait_for_writer(f);
    if (!rc) rc = sl_feed_open(&f->feed, &fc, err);
    if (rc) return rc;
    uint64_t rows = sl_intake_rows(f->in), done = sl_intake_committed(f->in);
    if (rows)
        sl_log(SL_INFO, "the store holds %llu accepted rows, %llu of them written or rejected",
               (unsigned long long)rows, (unsigned long long)done);
    sl_log(SL_INFO, "taking rows at %s", b->feed_addr);
    return SL_OK;
}

static void close_all(feeder *f) {
    sl_feed_close(f->feed);
    sl_intake_close(f->in);
    sl_publisher_close(f->pub);
    sl_template_free(f->tmpl);
    sl_tokenizer_free(f->tok);
}

static void update_metrics(feeder *f) {
    sl_metrics *m = f->stage.metrics;
    const sl_feed_stats *s = sl_feed_get_stats(f->feed);
    sl_metric_set(m, SL_M_ROWS_IN, s->rows_in);
    sl_metric_set(m, SL_M_TOKENS_IN, s->tokens);
    sl_metric_set(m, SL_M_ROWS_OUT, sl_publisher_rows(f->pub));
    sl_metric_set(m, SL_M_TOKENS_OUT, sl_publisher_tokens(f->pub));
    sl_metric_set(m, SL_M_BATCHES, sl_publisher_batches(f->pub));
    sl_metric_set(m, SL_M_ROWS_REJECTED, s->parts_refused + s->conflicts);
    sl_metric_set(m, SL_M_QUEUE, sl_intake_rows(f->in) - sl_publisher_rows(f->pub));
    sl_metric_set(m, SL_M_PAUSED, s->paused);
    sl_metric_set(m, SL_M_WARNINGS, sl_log_warnings());
    _Static_assert(12 + SL_R_N <= 32, "reasons fit into the reject slots");
    for (int r = 1; r < SL_R_N; r++) sl_metric_set(m, (sl_metric)(SL_M_REJECT_BASE + 12 + r), s->reasons[r]);
    bool draining = atomic_load(&f->stage.ctl[0].draining);
    sl_metric_set(m, SL_M_STATE,
                  f->drained                ? SL_ST_DONE
                  : draining                ? SL_ST_DRAINING
                  : s->paused || s->lacking ? SL_ST_PAUSED
                  : s->rows_in              ? SL_ST_RUNNING
                                            : SL_ST_READY);
    sl_metric_beat(m);
}

static bool ranks_ready(const feeder *f) {
    for (uint32_t i = 0; i < f->boot->n_procs; i++) {
        if (f->boot->procs[i].role != SL_ROLE_RANK) continue;
        uint64_t st = sl_metric_get(f->stage.metrics, i, SL_M_STATE);
        if (st != SL_ST_READY && st != SL_ST_RUNNING) return false;
    }
    return true;
}

/* A batch that is not full waits for more rows. It is closed by a client's flush, by a drain, or here: when no stream
 * is open, nothing came for batch_wait_ms and the ranks have nothing to do. After a start, clients get GRACE_S to come
 * back and push on, so that an interrupted run packs the same batches as one that was not. */
static int close_waiting_batch(feeder *f, sl_err *err) {
    if (!sl_intake_open_rows(f->in) || !sl_feed_idle(f->feed)) return 0;
    uint64_t now = sl_now_ns();
    if (!f->ready_ns && ranks_ready(f)) f->ready_ns = now;
    const sl_feed_stats *s = sl_feed_get_stats(f->feed);
    if (!atomic_load(&f->stage.ctl[0].draining)) {
        if (!f->ready_ns || s->open_streams || s->paused || !sl_publisher_starved(f->pub)) return 0;
        uint64_t wait = f->boot->batch_wait_ms * 1000000ull;
        uint64_t since = s->last_row_ns ? s->last_row_ns : f->ready_ns + GRACE_S * 1000000000ull;
        if (now < since || now - since < wait) return 0;
    }
    return sl_feed_flush(f->feed, err);
}

static int follow(feeder *f, sl_err *err) {
    uint64_t now = sl_now_ns();
    if (now - f->follow_ns < FOLLOW_MS * 1000000ull) return 0;
    f->follow_ns = now;
    /* "Done" means on disk: the log shows records before their sync. */
    int rc = sl_intake_follow(f->in, of_writer(f, SL_M_COMMITTED), sl_feed_done, f->feed, err);
    if (rc != SL_ETEMP) {
        if (f->blind && !rc) sl_log(SL_INFO, "commit.log can be read again");
        f->blind = 0;
        return rc;
    }
    /* No memory or descriptor just now: clients hear of their rows a moment later. */
    if (!(f->blind & (f->blind + 1))) sl_log(SL_WARN, "commit.log cannot be read, it is tried again: %s", err->msg);
    f->blind++;
    *err = (sl_err){0};
    return SL_OK;
}

/* One turn; >0 when something was done. */
static int turn(feeder *f, sl_err *err) {
    int did = sl_feed_turn(f->feed, err), rc;
    if (did < 0) return did;
    if ((rc = close_waiting_batch(f, err)) < 0) return rc;
    did |= rc;
    if ((rc = sl_publisher_turn(f->pub, err)) < 0) return rc;
    did |= rc;
    if ((rc = follow(f, err)) < 0) return rc;
    return did;
}

static void sleep_a_while(feeder *f) {
    struct pollfd fds[3] = {
        {0}, {.fd = sl_feed_fd(f->feed), .events = POLLIN}, {.fd = sl_feed_wake_fd(f->feed), .events = POLLIN}};
    int ms = sl_feed_timeout_ms(f->feed);
    if (sl_intake_committed(f->in) < sl_intake_rows(f->in) && ms > 50) ms = 50;
    sl_metric_regime(f->stage.metrics, sl_publisher_blocked(f->pub) ? SL_M_WAIT_OUT_NS : SL_M_WAIT_IN_NS);
    sl_bell_wait(f->stage.bell, fds, 3, ms);
    sl_metric_regime(f->stage.metrics, SL_M_BUSY_NS);
}

static int run(feeder *f, sl_err *err) {
    sl_metric_regime(f->stage.metrics, SL_M_BUSY_NS);
    for (;;) {
        sl_bell_drain(f->stage.bell);
        bool draining = atomic_load(&f->stage.ctl[0].draining);
        if (draining) sl_feed_drain(f->feed);
        int did = turn(f, err);
        if (did < 0) return did;
        /* Everything accepted is in closed batches, and these are all in the rings. */
        if (draining && !did && sl_feed_idle(f->feed) && !sl_intake_open_rows(f->in) && !sl_publisher_blocked(f->pub)) {
            if (!f->drained)
                sl_log(SL_INFO, "drained: %llu rows published in %llu batches",
                       (unsigned long long)sl_publisher_rows(f->pub), (unsigned long long)sl_publisher_batches(f->pub));
            f->drained = true;
            if (of_writer(f, SL_M_STATE) == SL_ST_DONE || sl_intake_committed(f->in) == sl_intake_rows(f->in)) {
                f->follow_ns = 0;
                int rc = follow(f, err);
                if (!rc && !f->blind) rc = sl_feed_turn(f->feed, err);
                update_metrics(f);
                if (rc < 0 || !f->blind) return rc < 0 ? rc : SL_OK;
            } /* (blind: what clients have yet to hear is in there) */
        }
        update_metrics(f);
        if (!did) sleep_a_while(f);
    }
}

int main(int argc, char **argv) {
    static feeder f; /* the process's own context */
    sl_err err = {0};
    int rc = sl_stage_open(&f.stage, argc, argv, SL_ROLE_FEEDER, &err);
    if (rc) {
        if (!f.stage.boot) fprintf(stderr, "%s\n", err.msg);
        return sl_stage_fail(&f.stage, &err);
    }
    f.boot = f.stage.boot;
    rc = open_all(&f, &err);
    if (!rc) rc = run(&f, &err);
    close_all(&f);
    if (err.code == SL_EDATA) err.code = SL_ECONFIG; /* a damaged store: starting again will not help */
    return rc ? sl_stage_fail(&f.stage, &err) : 0;
}
