#include "stages/compute/export.h"
#include "ipc/crash.h"
#include "ipc/doorbell.h"
#include "ipc/log.h"
#include "stages/compute/mischief.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef struct pending { /* a descriptor that is not visible yet */
    sl_desc d;
    uint64_t ticket;
    uint32_t sum; /* index of its fingerprint, filled in when the ticket is done; UINT32_MAX: none */
    uint32_t pay;
} pending;

struct sl_export {
    sl_stage *st;
    const sl_boot *b;
    sl_ops *ops;
    sl_ring *ring;
    int gather_bell;
    uint32_t epoch, rank, tp, max_chunks;
    /* the batch in hand */
    uint64_t bpos, batch_no, out_bytes;
    uint32_t n_chunks, chunks_done, row0;
    /* fingerprints [K * max_chunks], in memory the device can write */
    uint64_t *sums;
    uint32_t *nonfinite;
    void *host;
    uint64_t host_bytes;
    sl_mischief *mis; /* NULL unless a test asked for a fault */
    /* queue */
    pending *q;
    uint32_t cap, head, n, n_pay;
};

int sl_export_create(sl_export **out, sl_stage *st, sl_ops *ops, sl_ring *ring, uint32_t epoch, int64_t max_tokens,
                     sl_err *err) {
    *out = NULL;
    sl_export *x = calloc(1, sizeof *x);
    if (!x) return sl_err_set(err, SL_ETEMP, "export: out of memory");
    x->st = st;
    x->b = st->boot;
    x->ops = ops;
    x->ring = ring;
    x->epoch = epoch;
    x->rank = st->me->rank;
    x->tp = st->boot->tp;
    x->gather_bell = st->boot->procs[2].bell_fd;
    x->max_chunks = (uint32_t)((max_tokens + x->b->chunk_rows - 1) / x->b->chunk_rows);
    uint64_t n = (uint64_t)x->b->n_captures * x->max_chunks;
    x->cap = (uint32_t)n + 8;
    x->q = calloc(x->cap, sizeof *x->q);
    x->host_bytes = (n * 12 + 4095) / 4096 * 4096;
    x->host = mmap(NULL, x->host_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (x->host == MAP_FAILED) x->host = NULL;
    int rc = x->q && x->host ? 0 : sl_err_set(err, SL_ETEMP, "export: out of memory");
    uint64_t arena_bytes = 0;
    void *arena = sl_ring_arena(ring, &arena_bytes);
    if (!rc) rc = ops->register_arena(ops->ctx, x->host, x->host_bytes, err);
    if (!rc && arena_bytes) rc = ops->register_arena(ops->ctx, arena, arena_bytes, err);
    if (!rc && x->b->fault) rc = sl_mischief_create(&x->mis, x->b, x->rank, ops, max_tokens, err);
    if (rc) {
        sl_export_destroy(x);
        return rc;
    }
    x->sums = x->host;
    x->nonfinite = (uint32_t *)((uint8_t *)x->host + n * 8);
    *out = x;
    return 0;
}

void sl_export_destroy(sl_export *x) {
    if (!x) return;
    sl_mischief_destroy(x->mis);
    if (x->host) munmap(x->host, x->host_bytes);
    free(x->q);
    free(x);
}

/* ---- the queue ---- */
static void publish_head(sl_export *x) {
    pending *p = &x->q[x->head];
    if (p->sum != UINT32_MAX) {
        sl_desc_chunk *c = (sl_desc_chunk *)&p->d;
        c->sum = x->sums[p->sum];
        c->nonfinite = x->nonfinite[p->sum];
    }
    sl_desc *d = sl_ring_stage(x->ring, p->pay);
    sl_desc_head h = d->h; /* pos and pay_end are the ring's */
    *d = p->d;
    d->h.pos = h.pos;
    d->h.pay_end = h.pay_end;
    x->head = (x->head + 1) % x->cap;
    x->n--;
    x->n_pay -= p->pay;
}

/* Publish what is ready. Waits for the oldest one first when `wait`. */
static int pump(sl_export *x, int wait, sl_err *err) {
    uint32_t before = x->n;
    int rc = 0;
    while (x->n && !rc) {
        uint64_t ticket = x->q[x->head].ticket;
        int done = ticket == 0; /* rows and ends wait for nothing */
        if (done)
            wait = 0;
        else if (wait)
            rc = x->ops->capture_wait(x->ops->ctx, ticket, err), done = 1, wait = 0;
        else
            rc = x->ops->capture_done(x->ops->ctx, ticket, &done, err);
        if (rc || !done) break;
        publish_head(x);
    }
    if (x->n != before) {
        sl_ring_publish(x->ring);
        sl_bell_ring(x->gather_bell);
    }
    return rc;
}

static int stale(const sl_export *x) {
    return atomic_load(&x->st->ctl[1 + x->st->me->group].epoch) != x->epoch;
}

static int has_room(const sl_export *x, uint32_t pay) {
    return sl_ring_room(x->ring) > x->n && x->n + 1 < x->cap && (!pay || sl_ring_pay_ahead(x->ring, x->n_pay));
}

/* Until one more descriptor (and payload) fits. Drain the bell, test the gate, then sleep. */
static int wait_room(sl_export *x, uint32_t pay, sl_err *err) {
    int rc;
    if (has_room(x, pay)) return 0;
    while (x->n) /* what is queued must become visible, or nobody can free anything */
        if ((rc = pump(x, 1, err))) return rc;
    sl_metric_regime(x->st->metrics, SL_M_WAIT_OUT_NS);
    for (;;) {
        sl_bell_drain(x->st->bell);
        sl_metric_beat(x->st->metrics);
        if (stale(x)) return SL_EXPORT_STOP;
        if (has_room(x, pay)) break;
        struct pollfd p[1];
        sl_bell_wait(x->st->bell, p, 1, 200);
    }
    sl_metric_regime(x->st->metrics, SL_M_BUSY_NS);
    return 0;
}

static int push(sl_export *x, const void *desc64, uint64_t ticket, uint32_t sum, uint32_t pay, sl_err *err) {
    int rc = wait_room(x, pay, err);
    if (rc) return rc;
    pending *p = &x->q[(x->head + x->n) % x->cap];
    memcpy(&p->d, desc64, sizeof p->d);
    p->ticket = ticket;
    p->sum = sum;
    p->pay = pay;
    x->n++;
    x->n_pay += pay;
    return 0;
}

/* ---- a batch ---- */
void sl_export_begin(sl_export *x, uint64_t bpos, uint64_t batch_no, int64_t n_tokens, uint32_t row0) {
    x->row0 = row0;
    x->bpos = bpos;
    x->batch_no = batch_no;
    x->out_bytes = 0;
    x->n_chunks = (uint32_t)((n_tokens + x->b->chunk_rows - 1) / x->b->chunk_rows);
    x->chunks_done = 0;
}

static sl_desc_head head_of(const sl_export *x, uint16_t kind, uint16_t flags) {
    return (sl_desc_head){.kind = kind, .flags = flags, .epoch = x->epoch};
}

/* Fingerprints of `states`; the chunks this rank owns are copied from `payload`, which is the same memory unless a test
 * has asked for a fault. */
static int export_capture(sl_export *x, int32_t k, const void *states, const void *payload, int64_t n_tokens, int spoil,
                          sl_err *err) {
    const sl_boot *b = x->b;
    const sl_capture *cap = &b->captures[k];
    uint32_t first = (uint32_t)k * x->max_chunks;
    int rc = x->ops->fingerprint(x->ops->ctx, x->sums + first, x->nonfinite + first, states, n_tokens, b->width,
                                 b->chunk_rows, err);
    uint64_t ticket = 0; /* an empty copy marks "the fingerprints are there" */
    if (!rc) rc = x->ops->capture_copy(x->ops->ctx, x->host, states, 0, &ticket, err);
    for (uint32_t c = 0; c < x->n_chunks && !rc; c++) {
        int64_t left = n_tokens - (int64_t)c * b->chunk_rows;
        uint32_t rows = left < b->chunk_rows ? (uint32_t)left : b->chunk_rows;
        uint32_t own = sl_chunk_owner(x->bpos, (uint32_t)k, c, x->tp) == x->rank;
        sl_desc_chunk d = {.h = head_of(x, SL_DESC_CHUNK, own ? SL_CHUNK_PAYLOAD : 0),
                           .bpos = x->bpos,
                           .k = (uint16_t)k,
                           .rank = (uint16_t)x->rank,
                           .c = c,
                           .rows = rows,
                           .width = b->width,
                           .hidx = cap->final_norm ? b->n_layers + 1 : cap->hidx};
        if (spoil) sl_mischief_descriptor(x->mis, &d, &own);
        if (own) {
            if ((rc = wait_room(x, 1, err))) break;
            uint64_t bytes = (uint64_t)rows * b->width * b->elem_size;
            const uint8_t *src = (const uint8_t *)payload + (uint64_t)c * b->chunk_rows * b->width * b->elem_size;
            rc = x->ops->capture_copy(x->ops->ctx, sl_ring_pay_ahead(x->ring, x->n_pay), src, bytes, &ticket, err);
            x->out_bytes += bytes;
        }
        if (!rc) rc = push(x, &d, ticket, first + c, own, err);
        x->chunks_done++;
    }
    if (!rc) rc = pump(x, 0, err);
    if (!rc) sl_crash_point("rank.after_chunk");
    return rc;
}

static int export_faulty(sl_export *x, int32_t k, const void *states, int64_t n_tokens, sl_err *err) {
    int32_t K = (int32_t)x->b->n_captures;
    int rc = sl_mischief_keep(x->mis, k, states, n_tokens, err), active = sl_mischief_active(x->mis, x->batch_no);
    if (rc) return rc;
    if (!active) {
        rc = export_capture(x, k, states, states, n_tokens, 0, err);
    } else if (k == K - 1) {
        sl_log(SL_WARN, "batch %llu is spoilt on purpose: this is a test", (unsigned long long)x->batch_no);
        rc = sl_mischief_make(x->mis, x->bpos, x->row0, err);
        for (int32_t i = 0; i < K && !rc; i++)
            rc = export_capture(x, i, sl_mischief_fingerprinted(x->mis, i), sl_mischief_payload(x->mis, i), n_tokens, 1,
                                err);
    }
    if (!rc && k == K - 1) sl_mischief_next(x->mis);
    return rc;
}

int sl_export_state(sl_export *x, int32_t k, const void *states, int64_t n_tokens, sl_err *err) {
    return x->mis ? export_faulty(x, k, states, n_tokens, err) : export_capture(x, k, states, states, n_tokens, 0, err);
}

int sl_export_row(sl_export *x, uint32_t row, uint32_t T, uint64_t token_sum, double nll, sl_err *err) {
    sl_desc_row d = {
        .h = head_of(x, SL_DESC_ROW, 0), .bpos = x->bpos, .row = row, .T = T, .token_sum = token_sum, .nll = nll};
    d.nll_tokens = nll == nll ? T - 1 : 0;
    return push(x, &d, 0, UINT32_MAX, 0, err);
}

int sl_export_end(sl_export *x, uint64_t busy_ns, sl_err *err) {
    int rc = 0;
    while (x->n && !rc) rc = pump(x, 1, err);
    if (rc) return rc;
    sl_crash_point("rank.before_end");
    sl_desc_end d = {.h = head_of(x, SL_DESC_END, 0),
                     .bpos = x->bpos,
                     .n_chunks = x->chunks_done,
                     .rank = (uint16_t)x->rank,
                     .batch_no = x->batch_no,
                     .busy_ns = busy_ns};
    rc = push(x, &d, 0, UINT32_MAX, 0, err);
    if (!rc) rc = pump(x, 0, err);
    if (rc) return rc;
    sl_metric_add(x->st->metrics, SL_M_BYTES_RAW, x->out_bytes);
    sl_crash_point("rank.after_end");
    return 0;
}
