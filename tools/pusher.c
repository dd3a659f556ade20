#include "tools/pusher.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct flow {
    sl_input *in;
    sl_feed_client *c;
    bool end; /* everything of it is found */
} flow;

struct sl_pusher {
    sl_pusher_opts o;
    flow v[SL_PUSHER_OPEN];
    int n, next; /* open flows; next input to open */
    bool full;   /* the limit is reached */
    bool flushed;
    sl_feed_counts closed; /* of flows that are gone */
    char fault[SL_ERR_MAX + 64];
};

int sl_pusher_open(sl_pusher **out, const sl_pusher_opts *o, sl_err *err) {
    sl_pusher *p = calloc(1, sizeof *p);
    if (!p) return sl_err_set(err, SL_ETEMP, "out of memory");
    p->o = *o;
    *out = p;
    return SL_OK;
}

static void close_flow(flow *f) {
    sl_feed_client_close(f->c);
    sl_input_close(f->in);
}

void sl_pusher_close(sl_pusher *p) {
    if (!p) return;
    for (int i = 0; i < p->n; i++) close_flow(&p->v[i]);
    free(p);
}

static void add_counts(sl_feed_counts *s, const sl_feed_counts *k) {
    s->rows += k->rows, s->left_out += k->left_out, s->waiting += k->waiting, s->sent += k->sent;
    s->accepted += k->accepted, s->durable += k->durable, s->partly += k->partly, s->rejected += k->rejected;
    s->parts_written += k->parts_written, s->parts_rejected += k->parts_rejected;
    s->known += k->known, s->tokens += k->tokens, s->reconnects += k->reconnects;
}

sl_feed_counts sl_pusher_counts(const sl_pusher *p) {
    sl_feed_counts s = p->closed;
    for (int i = 0; i < p->n; i++) add_counts(&s, sl_feed_client_counts(p->v[i].c));
    return s;
}

static void note_fault(sl_pusher *p, const flow *f, const sl_err *e) {
    if (p->fault[0]) return;
    snprintf(p->fault, sizeof p->fault, "%s; the rows before line %llu are used", e->msg,
             (unsigned long long)sl_feed_client_line(f->c));
}

/* ---- reading ---- */

static int open_next(sl_pusher *p, sl_err *err) {
    flow *f = &p->v[p->n];
    const struct sl_input_name *name = &p->o.inputs->v[p->next];
    uint64_t rows = sl_pusher_counts(p).rows;
    sl_feed_opts fo = {.addr = p->o.addr,
                       .dataset = name->dataset,
                       .client = p->o.client,
                       .curve_dir = p->o.curve_dir,
                       .limit = p->o.limit ? p->o.limit - rows : 0,
                       .shard = p->o.shard,
                       .shards = p->o.shards,
                       .on_reject = p->o.on_reject,
                       .arg = p->o.arg};
    *f = (flow){0};
    int rc = sl_input_open(&f->in, name->path, p->o.spool, err);
    if (!rc) rc = sl_feed_client_open(&f->c, &fo, sl_input_fd(f->in), err);
    if (rc) {
        sl_input_close(f->in);
        return rc;
    }
    p->n++, p->next++;
    return SL_OK;
}

/* More text of the newest flow, and the rows in it. */
static int find_rows(sl_pusher *p, flow *f, sl_err *err) {
    sl_err why = {0};
    if (f->end || sl_feed_client_ahead(f->c) > SL_PUSHER_AHEAD) return 0;
    int more = sl_input_more(f->in, &why), rc;
    /* what stands after the last newline of damaged text is a piece of a row, not a row */
    if ((rc = sl_feed_client_scan(f->c, more == 0, err))) return rc;
    if (more == SL_ETEMP) {
        *err = why;
        return more;
    }
    if (more < 0) note_fault(p, f, &why);
    f->end = more <= 0 || sl_feed_client_full(f->c);
    p->full = p->o.limit && sl_pusher_counts(p).rows >= p->o.limit;
    sl_input_forget(f->in, sl_feed_client_needed(f->c));
    return 1;
}

static bool last_opened(const sl_pusher *p) {
    return p->full || p->next == p->o.inputs->n;
}

/* Open the next input, or close the open batch when there is none, or when too many inputs wait for it. */
static int move_on(sl_pusher *p, sl_err *err) {
    flow *f = p->n ? &p->v[p->n - 1] : NULL;
    if (f && (!f->end || !sl_feed_client_answered(f->c))) return 0;
    if (!last_opened(p) && p->n < SL_PUSHER_OPEN) {
        int rc = open_next(p, err);
        p->flushed = false;
        return rc ? rc : 1;
    }
    if (!f || p->flushed) return 0;
    p->flushed = true;
    sl_feed_client_flush(f->c);
    return 1;
}

static void drop_finished(sl_pusher *p) {
    for (int i = 0; i < p->n;) {
        flow *f = &p->v[i];
        bool newest = i == p->n - 1;
        bool done = f->end && (p->o.accepted ? sl_feed_client_answered(f->c) : sl_feed_client_durable(f->c));
        if (!done || (newest && !p->flushed)) { /* the newest sends the flush */
            i++;
            continue;
        }
        add_counts(&p->closed, sl_feed_client_counts(f->c));
        close_flow(f);
        memmove(f, f + 1, (size_t)(p->n - i - 1) * sizeof *f);
        p->n--;
    }
}

int sl_pusher_turn(sl_pusher *p, sl_err *err) {
    int did = 0, rc = p->n ? find_rows(p, &p->v[p->n - 1], err) : 0;
    if (rc < 0) return rc;
    did |= rc;
    for (int i = 0; i < p->n; i++) {
        if ((rc = sl_feed_client_turn(p->v[i].c, 0, err)) < 0) return rc;
        did |= rc;
    }
    if ((rc = move_on(p, err)) < 0) return rc;
    drop_finished(p);
    return did | rc;
}

int sl_pusher_fds(sl_pusher *p, struct pollfd *fds) {
    int n = 0;
    for (int i = 0; i < p->n; i++) fds[n++] = (struct pollfd){.fd = sl_feed_client_fd(p->v[i].c), .events = POLLIN};
    int wait = p->n ? sl_input_wait_fd(p->v[p->n - 1].in) : -1;
    if (wait >= 0) fds[n++] = (struct pollfd){.fd = wait, .events = POLLIN};
    return n;
}

/* ---- questions ---- */

bool sl_pusher_read(const sl_pusher *p) {
    return last_opened(p) && (!p->n || p->v[p->n - 1].end);
}

bool sl_pusher_answered(const sl_pusher *p) {
    if (!sl_pusher_read(p)) return false;
    for (int i = 0; i < p->n; i++)
        if (!sl_feed_client_answered(p->v[i].c)) return false;
    return true;
}

bool sl_pusher_done(const sl_pusher *p) {
    return sl_pusher_read(p) && !p->n;
}

bool sl_pusher_refused(const sl_pusher *p) {
    for (int i = 0; i < p->n; i++)
        if (sl_feed_client_refused(p->v[i].c) && sl_feed_client_counts(p->v[i].c)->waiting) return true;
    return false;
}

uint64_t sl_pusher_silent_ms(const sl_pusher *p) {
    uint64_t least = p->n ? UINT64_MAX : 0;
    for (int i = 0; i < p->n; i++) {
        uint64_t ms = sl_feed_client_silent_ms(p->v[i].c);
        if (ms < least) least = ms;
    }
    return least;
}

const char *sl_pusher_fault(const sl_pusher *p) {
    return p->fault[0] ? p->fault : NULL;
}

int sl_pusher_shard(const char *text, uint64_t *shard, uint64_t *shards, sl_err *err) {
    char *slash = NULL, *end = NULL;
    unsigned long i = text[0] >= '1' && text[0] <= '9' ? strtoul(text, &slash, 10) : 0, n = 0;
    if (i && *slash == '/' && slash[1] >= '1' && slash[1] <= '9') n = strtoul(slash + 1, &end, 10);
    if (!n || *end || i > n || n > 1000000000)
        return sl_err_set(err, SL_EUSAGE, "--shard %s: expected I/N with I from 1 to N, for example 1/4", text);
    *shard = i - 1, *shards = n;
    return SL_OK;
}

void sl_reasons_add(sl_reasons *r, const char *name, uint64_t n) {
    int last = (int)(sizeof r->v / sizeof *r->v) - 1, i = 0;
    while (i < r->n && strcmp(r->v[i].name, name)) i++;
    if (i >= last) i = last, name = "OTHER";
    if (i == r->n) snprintf(r->v[i].name, sizeof r->v[i].name, "%s", name), r->n++;
    r->v[i].n += n;
}
