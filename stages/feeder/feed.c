#include "stages/feeder/feed.h"
#include "ipc/doorbell.h"
#include "ipc/log.h"
#include "ipc/metrics.h"
#include "ipc/wire.h"
#include "stages/feeder/curve.h"
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>
#include <zmq.h>

enum { MAX_CLIENTS = 1024, MAX_REPLIES = 64, MAX_IDENTITY = 255, MAX_MESSAGES = 256, SYNC_MS = 5, RETRY_MS = 500 };

typedef struct refusal {
    uint64_t row;
    uint32_t part, count;
    sl_reason reason;
    char *msg;
} refusal;
typedef struct accepted {
    uint64_t row, tokens;
    uint32_t parts;
} accepted;
typedef struct lost {
    uint64_t row;
    uint32_t count;
    uint8_t verdict;
} lost;

#define VEC(T)                                                                                                         \
    struct {                                                                                                           \
        T *v;                                                                                                          \
        size_t n, cap;                                                                                                 \
    }
typedef struct reply {
    void *data;
    size_t n;
} reply;

typedef struct client {
    unsigned char identity[MAX_IDENTITY];
    size_t id_len;
    uint32_t no; /* what it is called elsewhere; never used again for another */
    bool hello, stream;
    uint32_t dataset, outstanding, pending; /* pending: accepted rows that it is to hear of again */
    uint64_t last_ns;
    VEC(accepted) acc;
    VEC(accepted) known;
    VEC(refusal) rej;
    VEC(uint64_t) ok;
    VEC(lost) bad;
    VEC(reply) replies;
} client;

/* One more client that waits for a row that another one pushed before it. */
typedef struct other {
    uint32_t client, next; /* next: index + 1 in sl_feed.others, of the same row or of the free ones */
} other;

struct sl_feed {
    sl_feed_cfg cfg;
    char addr[512], store[PATH_MAX];
    void *ctx, *sock;
    sl_curve *curve;
    int wake;
    sl_pool *pool;
    client **clients; /* by rising number */
    uint32_t n_clients, last_no;
    uint64_t turned_away;
    VEC(other) others;
    uint32_t free_others;
    sl_job *wait_head, *wait_tail; /* journaled, waiting for the sync */
    uint64_t waiting, first_wait_ns, retry_ns;
    bool draining, fatal_set;
    sl_err fatal;
    sl_feed_stats st;
};

/* ---- small things ---- */

static bool grow(void **v, size_t *cap, size_t n, size_t size) {
    if (n < *cap) return true;
    size_t c = *cap ? *cap * 2 : 16;
    void *p = realloc(*v, c * size);
    if (!p) return false;
    *v = p;
    *cap = c;
    return true;
}
#define PUSH(vec, ...)                                                                                                 \
    (grow((void **)&(vec).v, &(vec).cap, (vec).n, sizeof *(vec).v) ? ((vec).v[(vec).n++] = __VA_ARGS__, true) : false)

static void drop_refusals(client *c) {
    for (size_t i = 0; i < c->rej.n; i++) free(c->rej.v[i].msg);
    c->rej.n = 0;
}

static void client_free(client *c) {
    if (!c) return;
    drop_refusals(c);
    for (size_t i = 0; i < c->replies.n; i++) free(c->replies.v[i].data);
    free(c->acc.v);
    free(c->known.v);
    free(c->rej.v);
    free(c->ok.v);
    free(c->bad.v);
    free(c->replies.v);
    free(c);
}

static client *client_at(const sl_feed *f, uint32_t no) {
    uint32_t lo = 0, hi = f->n_clients;
    while (lo < hi) {
        uint32_t mid = (lo + hi) / 2;
        if (f->clients[mid]->no == no) return f->clients[mid];
        if (f->clients[mid]->no < no)
            lo = mid + 1;
        else
            hi = mid;
    }
    return NULL;
}

static void forget(sl_feed *f, uint32_t i) {
    client_free(f->clients[i]);
    f->n_clients--;
    memmove(f->clients + i, f->clients + i + 1, (f->n_clients - i) * sizeof(client *));
}

static bool has_answers(const client *c) {
    return c->acc.n || c->rej.n || c->known.n || c->ok.n || c->bad.n || c->replies.n;
}

/* A client that hangs up says nothing, so the table fills up with those that did: the one that has been silent longest
 * and expects nothing makes room. Should it live after all, it says hello again when it is told that it must. */
static bool make_room(sl_feed *f) {
    uint32_t found = UINT32_MAX;
    for (uint32_t i = 0; i < f->n_clients; i++) {
        const client *c = f->clients[i];
        if (c->outstanding || c->pending || has_answers(c)) continue;
        if (found == UINT32_MAX || c->last_ns < f->clients[found]->last_ns) found = i;
    }
    if (found != UINT32_MAX) forget(f, found);
    return found != UINT32_MAX;
}

uint32_t sl_feed_client(sl_feed *f, const void *identity, size_t n) {
    if (n > MAX_IDENTITY) return 0;
    for (uint32_t i = f->n_clients; i-- > 0;) { /* the latest is the likeliest */
        const client *c = f->clients[i];
        if (c->id_len == n && !memcmp(c->identity, identity, n)) return c->no;
    }
    if (f->n_clients >= MAX_CLIENTS && !make_room(f)) {
        uint64_t k = ++f->turned_away;
        if (!(k & (k - 1)))
            sl_log(SL_WARN, "%d clients have rows under way: a message of another is not taken (%llu so far)",
                   MAX_CLIENTS, (unsigned long long)k);
        return 0;
    }
    client **v = realloc(f->clients, (f->n_clients + 1) *
                                         sizeof(client *)); // NOLINT(bugprone-sizeof-expression): pointers are meant
    client *c = calloc(1, sizeof *c);
    if (v) f->clients = v;
    if (!v || !c) {
        free(c);
        return 0;
    }
    memcpy(c->identity, identity, n);
    c->id_len = n;
    c->last_ns = sl_now_ns();
    c->no = ++f->last_no;
    v[f->n_clients++] = c;
    return c->no;
}

/* ---- answers ---- */

/* A client waits for its answer as long as this process lives. So one for which there is no memory ends the process:
 * the next one knows from the logs what to answer when the client asks again. */
static _Noreturn void unanswered(void) {
    sl_log(SL_ERROR, "no memory for an answer to a client: the feeder starts again, clients ask again");
    abort();
}
static void answered(bool kept) {
    if (!kept) unanswered();
}

static void queue_reply(client *c, const msgpack_sbuffer *b) {
    if (c->replies.n >= MAX_REPLIES) return; /* it does not read its answers */
    void *d = malloc(b->size);
    if (!d) unanswered();
    memcpy(d, b->data, b->size);
    if (PUSH(c->replies, (reply){d, b->size})) return;
    free(d);
    unanswered();
}

static void reply_simple(client *c, const char *type) {
    msgpack_sbuffer b;
    msgpack_packer pk;
    msgpack_sbuffer_init(&b);
    msgpack_packer_init(&pk, &b, msgpack_sbuffer_write);
    msgpack_pack_map(&pk, 1);
    sl_wire_kstr(&pk, "t", type);
    queue_reply(c, &b);
    msgpack_sbuffer_destroy(&b);
}

static void reply_err(sl_feed *f, client *c, const char *code, const char *msg) {
    msgpack_sbuffer b;
    msgpack_packer pk;
    f->st.errors++;
    msgpack_sbuffer_init(&b);
    msgpack_packer_init(&pk, &b, msgpack_sbuffer_write);
    msgpack_pack_map(&pk, 3);
    sl_wire_kstr(&pk, "t", "err");
    sl_wire_kstr(&pk, "code", code);
    sl_wire_kstr(&pk, "msg", msg);
    queue_reply(c, &b);
    msgpack_sbuffer_destroy(&b);
}

static void reply_welcome(sl_feed *f, client *c) {
    msgpack_sbuffer b;
    msgpack_packer pk;
    msgpack_sbuffer_init(&b);
    msgpack_packer_init(&pk, &b, msgpack_sbuffer_write);
    msgpack_pack_map(&pk, 7);
    sl_wire_kstr(&pk, "t", "welcome");
    sl_wire_ku64(&pk, "v", SL_WIRE_VERSION);
    sl_wire_ku64(&pk, "credit", f->cfg.credit);
    sl_wire_ku64(&pk, "run", f->cfg.run_id);
    sl_wire_ku64(&pk, "max_length", f->cfg.max_length);
    sl_wire_ku64(&pk, "vocab", f->cfg.vocab);
    sl_wire_kstr(&pk, "store", f->store);
    queue_reply(c, &b);
    msgpack_sbuffer_destroy(&b);
}

static void pack_text(msgpack_packer *pk, const char *s) {
    size_t n = strlen(s), good = sl_utf8_check(s, n); /* a cut sentence may end inside a character */
    msgpack_pack_str_with_body(pk, s, good);
}

static void pack_ack(msgpack_packer *pk, const client *c) {
    msgpack_pack_map(pk, 4);
    sl_wire_kstr(pk, "t", "ack");
    sl_wire_key(pk, "acc");
    msgpack_pack_array(pk, c->acc.n);
    for (size_t i = 0; i < c->acc.n; i++) {
        msgpack_pack_array(pk, 3);
        msgpack_pack_uint64(pk, c->acc.v[i].row);
        msgpack_pack_uint32(pk, c->acc.v[i].parts);
        msgpack_pack_uint64(pk, c->acc.v[i].tokens);
    }
    sl_wire_key(pk, "known");
    msgpack_pack_array(pk, c->known.n);
    for (size_t i = 0; i < c->known.n; i++) {
        msgpack_pack_array(pk, 2);
        msgpack_pack_uint64(pk, c->known.v[i].row);
        msgpack_pack_uint32(pk, c->known.v[i].parts);
    }
    sl_wire_key(pk, "rej");
    msgpack_pack_array(pk, c->rej.n);
    for (size_t i = 0; i < c->rej.n; i++) {
        msgpack_pack_array(pk, 5);
        msgpack_pack_uint64(pk, c->rej.v[i].row);
        msgpack_pack_uint32(pk, c->rej.v[i].part);
        pack_text(pk, sl_reason_name(c->rej.v[i].reason));
        pack_text(pk, c->rej.v[i].msg ? c->rej.v[i].msg : "");
        msgpack_pack_uint32(pk, c->rej.v[i].count);
    }
}

static void pack_done(msgpack_packer *pk, const client *c) {
    msgpack_pack_map(pk, 3);
    sl_wire_kstr(pk, "t", "done");
    sl_wire_key(pk, "ok");
    msgpack_pack_array(pk, c->ok.n);
    for (size_t i = 0; i < c->ok.n; i++) msgpack_pack_uint64(pk, c->ok.v[i]);
    sl_wire_key(pk, "rej");
    msgpack_pack_array(pk, c->bad.n);
    for (size_t i = 0; i < c->bad.n; i++) {
        msgpack_pack_array(pk, 4);
        msgpack_pack_uint64(pk, c->bad.v[i].row);
        pack_text(pk, sl_verdict_name((sl_verdict)c->bad.v[i].verdict));
        pack_text(pk, "rejected after it was computed; the quarantine folder of the store has the details");
        msgpack_pack_uint32(pk, c->bad.v[i].count);
    }
}

typedef enum { SENT, LATER, GONE } sent;

static sent send_to(sl_feed *f, const client *c, const void *data, size_t n) {
    if (zmq_send(f->sock, c->identity, c->id_len, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0)
        return errno == EAGAIN ? LATER : GONE;
    return zmq_send(f->sock, data, n, ZMQ_DONTWAIT) < 0 ? GONE : SENT;
}

static sent send_packed(sl_feed *f, client *c, void (*pack)(msgpack_packer *, const client *)) {
    msgpack_sbuffer b;
    msgpack_packer pk;
    msgpack_sbuffer_init(&b);
    msgpack_packer_init(&pk, &b, msgpack_sbuffer_write);
    pack(&pk, c);
    sent s = send_to(f, c, b.data, b.size);
    msgpack_sbuffer_destroy(&b);
    return s;
}

static sent flush_client(sl_feed *f, client *c, int *did) {
    sent s;
    if (c->acc.n || c->known.n || c->rej.n) { /* before the replies: "flushed" speaks of these rows */
        if ((s = send_packed(f, c, pack_ack)) != SENT) return s;
        c->acc.n = c->known.n = 0;
        drop_refusals(c);
        *did = 1;
    }
    size_t i = 0;
    for (s = SENT; i < c->replies.n && (s = send_to(f, c, c->replies.v[i].data, c->replies.v[i].n)) == SENT; i++) {
        free(c->replies.v[i].data);
        *did = 1;
    }
    if (i) memmove(c->replies.v, c->replies.v + i, (c->replies.n - i) * sizeof *c->replies.v);
    c->replies.n -= i;
    if (s != SENT) return s;
    if (c->ok.n || c->bad.n) {
        if ((s = send_packed(f, c, pack_done)) != SENT) return s;
        c->ok.n = c->bad.n = 0;
        *did = 1;
    }
    return SENT;
}

static int send_answers(sl_feed *f) {
    int did = 0;
    for (uint32_t i = 0; f->sock && i < f->n_clients;) {
        if (flush_client(f, f->clients[i], &did) == GONE)
            forget(f, i); /* it hung up; its rows go on, a later client may ask for them again */
        else
            i++;
    }
    return did;
}

static void tell_done(client *c, const sl_entry *e) {
    if (!c || !e->rows) return;
    if (e->verdict)
        answered(PUSH(c->bad, (lost){e->row, e->bad, e->verdict}));
    else
        answered(PUSH(c->ok, e->row));
}

static void waits_no_more(client *c, const sl_entry *e) {
    if (c && c->pending) c->pending--;
    tell_done(c, e);
}

void sl_feed_done(void *feed, sl_entry *e) {
    sl_feed *f = feed;
    waits_no_more(client_at(f, e->owner), e);
    while (e->others) {
        other *o = &f->others.v[e->others - 1];
        uint32_t at = e->others;
        waits_no_more(client_at(f, o->client), e);
        e->others = o->next;
        o->next = f->free_others;
        f->free_others = at;
    }
}

/* A place among those who wait for the row: of one that is gone, a free one, or a new one. NULL: out of memory. */
static uint32_t *waiting_place(sl_feed *f, sl_entry *e) {
    if (!client_at(f, e->owner)) return &e->owner;
    for (uint32_t i = e->others; i; i = f->others.v[i - 1].next)
        if (!client_at(f, f->others.v[i - 1].client)) return &f->others.v[i - 1].client;
    uint32_t at = f->free_others;
    if (at)
        f->free_others = f->others.v[at - 1].next;
    else if (PUSH(f->others, (other){0}))
        at = (uint32_t)f->others.n;
    else
        return NULL;
    f->others.v[at - 1].next = e->others;
    e->others = at;
    return &f->others.v[at - 1].client;
}

/* Several clients may push the same row: each of them waits to hear that it is done, once. */
static void wait_for(sl_feed *f, sl_entry *e, client *c) {
    if (e->owner == c->no) return;
    for (uint32_t i = e->others; i; i = f->others.v[i - 1].next)
        if (f->others.v[i - 1].client == c->no) return;
    uint32_t *place = waiting_place(f, e);
    if (!place) unanswered();
    *place = c->no;
    c->pending++;
}

/* ---- messages ---- */

static void on_hello(sl_feed *f, client *c, const msgpack_object *m) {
    uint64_t v;
    const char *name;
    uint32_t n;
    sl_err e;
    if (sl_wire_u64(m, "v", &v, &e) || sl_wire_str(m, "dataset", &name, &n, &e))
        return reply_err(f, c, "message", e.msg);
    if (v != SL_WIRE_VERSION) {
        sl_err_set(&e, SL_EDATA, "this feeder speaks version %d of the protocol, the client version %llu",
                   SL_WIRE_VERSION, (unsigned long long)v);
        return reply_err(f, c, "version", e.msg);
    }
    if (!n || n > 255 || memchr(name, 0, n) || sl_utf8_check(name, n) < n)
        return reply_err(f, c, "message", "hello: dataset must be 1 to 255 bytes of UTF-8 without NUL");
    char buf[256];
    memcpy(buf, name, n);
    buf[n] = 0;
    if (c->hello && c->outstanding && strcmp(buf, sl_intake_dataset_name(f->cfg.intake, c->dataset)) != 0)
        return reply_err(f, c, "order",
                         "hello: rows of another data set are still on their way; wait for their answers");
    int64_t d = sl_intake_dataset(f->cfg.intake, buf, &e);
    if (d < 0) return reply_err(f, c, "dataset", e.msg);
    c->dataset = (uint32_t)d;
    c->hello = true;
    reply_welcome(f, c);
}

/* Check the shape of a ROW; nothing is taken before the whole message is good. */
static int check_row(const msgpack_object *row, sl_err *e) {
    uint64_t n;
    const void *p;
    const char *s;
    uint32_t len;
    if (row->type != MSGPACK_OBJECT_MAP) return sl_err_set(e, SL_EDATA, "expected a map");
    int rc = sl_wire_u64(row, "n", &n, e);
    if (rc) return rc;
    if (sl_wire_get(row, "j")) return sl_wire_bin(row, "j", &p, &len, e);
    if ((rc = sl_wire_bin(row, "ids", &p, &len, e))) return rc;
    if (len % 4) return sl_err_set(e, SL_EDATA, "ids has %u bytes, not a multiple of 4", len);
    if (sl_wire_get(row, "mask") && (rc = sl_wire_bin(row, "mask", &p, &len, e))) return rc;
    if (sl_wire_get(row, "id")) {
        if ((rc = sl_wire_str(row, "id", &s, &len, e))) return rc;
        if (len > SL_ROW_ID_MAX || sl_utf8_check(s, len) < len)
            return sl_err_set(e, SL_EDATA, "id must be at most %d bytes of UTF-8", SL_ROW_ID_MAX);
    }
    return SL_OK;
}

static sl_job *make_job(const client *c, uint32_t no, const msgpack_object *row) {
    sl_job *j = calloc(1, sizeof *j);
    if (!j) return NULL;
    const void *a = NULL, *b = NULL;
    const char *s = NULL;
    uint32_t na = 0, nb = 0, ns = 0;
    j->client = no;
    j->dataset = c->dataset;
    sl_wire_u64(row, "n", &j->row, NULL);
    if (sl_wire_get(row, "j")) {
        sl_wire_bin(row, "j", &a, &na, NULL);
        j->kind = SL_JOB_JSON;
    } else {
        sl_wire_bin(row, "ids", &a, &na, NULL);
        j->has_mask = sl_wire_get(row, "mask") && !sl_wire_bin(row, "mask", &b, &nb, NULL);
        if (sl_wire_get(row, "id")) sl_wire_str(row, "id", &s, &ns, NULL);
        j->kind = SL_JOB_IDS;
        j->n_ids = na / 4;
        j->n_mask = nb;
        j->id_len = ns;
    }
    j->bytes = (uint64_t)na + nb + ns;
    if (!(j->data = malloc(j->bytes + 1))) {
        free(j);
        return NULL;
    }
    memcpy(j->data, a ? a : "", na);
    if (nb) memcpy(j->data + na, b, nb);
    if (ns) memcpy(j->data + na + nb, s, ns);
    XXH128_hash_t h = XXH3_128bits_withSeed(j->data, j->bytes, (uint64_t)j->kind | (uint64_t)j->n_ids << 8);
    j->content[0] = h.low64;
    j->content[1] = h.high64;
    return j;
}

static void on_rows(sl_feed *f, client *c, uint32_t no, const msgpack_object *m) {
    sl_err e;
    const msgpack_object *rows = sl_wire_get(m, "rows");
    if (!c->hello) return reply_err(f, c, "order", "rows before hello");
    if (f->draining) return reply_err(f, c, "draining", "the service is draining and takes no more rows");
    if (!rows || rows->type != MSGPACK_OBJECT_ARRAY) return reply_err(f, c, "message", "rows: expected an array");
    if (rows->via.array.size > f->cfg.credit - c->outstanding) {
        sl_err_set(&e, SL_EDATA, "%u rows sent, but %u of %u are still unanswered: none of them was taken",
                   rows->via.array.size, c->outstanding, f->cfg.credit);
        return reply_err(f, c, "credit", e.msg);
    }
    for (uint32_t i = 0; i < rows->via.array.size; i++)
        if (check_row(&rows->via.array.ptr[i], &e)) {
            sl_err_wrap(&e, "rows[%u]: none of this message was taken", i);
            return reply_err(f, c, "rows", e.msg);
        }
    for (uint32_t i = 0; i < rows->via.array.size; i++) {
        sl_job *j = make_job(c, no, &rows->via.array.ptr[i]);
        if (!j) {
            if (!f->fatal_set) sl_err_set(&f->fatal, SL_ETEMP, "no memory for a row");
            f->fatal_set = true;
            return;
        }
        sl_in_found found = sl_intake_find(f->cfg.intake, j->dataset, j->row, j->content, NULL);
        if (found != SL_IN_NEW && found != SL_IN_INCOMPLETE) j->kind = SL_JOB_KNOWN; /* nothing to prepare */
        c->outstanding++;
        c->stream = true;
        f->st.rows_in++;
        f->st.last_row_ns = c->last_ns = sl_now_ns();
        sl_pool_put(f->pool, j);
    }
}

static void on_flush(sl_feed *f, client *c, uint32_t no) {
    if (!c->hello) return reply_err(f, c, "order", "flush before hello");
    sl_job *j = calloc(1, sizeof *j);
    if (!j) return reply_err(f, c, "memory", "no memory");
    j->kind = SL_JOB_FLUSH;
    j->client = no;
    sl_pool_put(f->pool, j);
}

void sl_feed_message(sl_feed *f, uint32_t no, const void *msg, size_t n) {
    client *c = client_at(f, no);
    if (!c) return;
    f->st.messages++;
    c->last_ns = sl_now_ns();
    msgpack_unpacked u;
    sl_err e;
    const char *t;
    uint32_t len;
    if (sl_wire_unpack(&u, msg, n, &e)) return reply_err(f, c, "message", e.msg);
    if (sl_wire_str(&u.data, "t", &t, &len, &e))
        reply_err(f, c, "message", e.msg);
    else if (len == 5 && !memcmp(t, "hello", 5))
        on_hello(f, c, &u.data);
    else if (len == 4 && !memcmp(t, "rows", 4))
        on_rows(f, c, no, &u.data);
    else if (len == 5 && !memcmp(t, "flush", 5))
        on_flush(f, c, no);
    else if (len == 4 && !memcmp(t, "ping", 4)) {
        if (c->hello)
            reply_simple(c, "pong");
        else /* a client of an earlier life must notice that this one knows nothing of its rows */
            reply_err(f, c, "order", "ping before hello");
    } else {
        sl_err_set(&e, SL_EDATA, "unknown message type '%.*s' (known: hello, rows, flush, ping)",
                   len < 40 ? (int)len : 40, t);
        reply_err(f, c, "unknown", e.msg);
    }
    msgpack_unpacked_destroy(&u);
}

/* Everything that is in the socket, unless too much is being prepared already. */
/* At most so many messages a turn: a client that never stops must not hold up answers, syncs and the heartbeat. */
static int receive(sl_feed *f) {
    int did = 0;
    for (int n = 0; n < MAX_MESSAGES && sl_pool_bytes(f->pool) < SL_FEED_MAX_BYTES && !f->fatal_set; n++) {
        zmq_msg_t id, body, spill;
        zmq_msg_init(&id);
        if (zmq_msg_recv(&id, f->sock, ZMQ_DONTWAIT) < 0) {
            zmq_msg_close(&id);
            break;
        }
        did = 1;
        int frames = 1;
        zmq_msg_init(&body);
        bool more = zmq_msg_more(&id);
        if (more) {
            zmq_msg_recv(&body, f->sock, 0);
            more = zmq_msg_more(&body);
            frames = 2;
        }
        while (more) {
            zmq_msg_init(&spill);
            zmq_msg_recv(&spill, f->sock, 0);
            more = zmq_msg_more(&spill);
            zmq_msg_close(&spill);
            frames++;
        }
        uint32_t no = sl_feed_client(f, zmq_msg_data(&id), zmq_msg_size(&id));
        if (frames == 2)
            sl_feed_message(f, no, zmq_msg_data(&body), zmq_msg_size(&body));
        else if (client_at(f, no))
            reply_err(f, client_at(f, no), "message", "a message is one frame (use a DEALER socket)");
        zmq_msg_close(&body);
        zmq_msg_close(&id);
    }
    return did;
}

/* ---- journaling and acknowledging ---- */

/* A whole data set may have the same flaw: the first warnings are logged, then those whose number is a power of two. */
static void warn_row(sl_feed *f, const sl_job *j) {
    uint64_t n = ++f->st.warned;
    if (n > 50 && (n & (n - 1))) return;
    sl_log(SL_WARN, "%s line %llu: %s (warning %llu about a row)", sl_intake_dataset_name(f->cfg.intake, j->dataset),
           (unsigned long long)j->row + 1, j->out.warn, (unsigned long long)n);
}

/* Rows that are cut lose supervised tokens: said of the first and of those whose number is a power of two; the exact
 * number is in the status and in the summary of an extract. */
static void warn_cut(sl_feed *f, const sl_job *j) {
    uint64_t n = 0;
    for (uint32_t i = 0; i < j->out.n; i++) n += !j->out.parts[i].reason && j->out.parts[i].flags & SL_PART_TRUNCATED;
    if (!n) return;
    uint64_t before = f->st.cut;
    f->st.cut += n;
    if ((before ^ f->st.cut) < before) return; /* the same highest bit: no power of two was passed */
    sl_log(
        SL_WARN,
        "%s line %llu is longer than max_length = %u tokens and was cut to it (overlong = truncate; skip and split do "
        "otherwise); %llu such rows so far",
        sl_intake_dataset_name(f->cfg.intake, j->dataset), (unsigned long long)j->row + 1, f->cfg.max_length,
        (unsigned long long)f->st.cut);
}

/* What a job came to, kept in the job until the sync: the entry's state before it was added. */
static int journal(sl_feed *f, sl_job *j, sl_err *err) {
    if (j->kind == SL_JOB_FLUSH) return sl_intake_flush(f->cfg.intake, err) < 0 ? err->code : SL_OK;
    sl_in_found found = sl_intake_find(f->cfg.intake, j->dataset, j->row, j->content, NULL);
    if (found != SL_IN_NEW && found != SL_IN_INCOMPLETE) {
        j->kind = SL_JOB_KNOWN;
        return SL_OK;
    }
    if (j->out.warn[0]) warn_row(f, j);
    warn_cut(f, j);
    return sl_intake_add(f->cfg.intake, j->dataset, j->row, j->content, &j->out, j->client, err);
}

static void refused_before(client *c, uint64_t row, const sl_entry *e) {
    answered(PUSH(c->rej, (refusal){row, 0, e->parts - e->rows, (sl_reason)e->reason,
                                    strdup("refused when it was pushed before, with the same content")}));
}

static void answer_known(sl_feed *f, client *c, sl_job *j) {
    sl_entry *e;
    char msg[160];
    switch (sl_intake_find(f->cfg.intake, j->dataset, j->row, j->content, &e)) {
    case SL_IN_KNOWN:
        f->st.known++;
        answered(PUSH(c->known, (accepted){.row = j->row, .parts = e->rows}));
        if (e->parts > e->rows) refused_before(c, j->row, e);
        if (e->left)
            wait_for(f, e, c);
        else
            tell_done(c, e);
        return;
    case SL_IN_REFUSED:
        f->st.known++;
        refused_before(c, j->row, e);
        return;
    default:
        f->st.conflicts++;
        f->st.reasons[SL_R_CONFLICT]++;
        snprintf(msg, sizeof msg, "row %llu of this data set was pushed before with other content; that one is kept",
                 (unsigned long long)j->row);
        answered(PUSH(c->rej, (refusal){j->row, 0, 1, SL_R_CONFLICT, strdup(msg)}));
    }
}

static void answer_new(sl_feed *f, client *c, sl_job *j) {
    accepted a = {.row = j->row};
    for (uint32_t i = 0; i < j->out.n; i++) {
        sl_part *p = &j->out.parts[i];
        if (p->reason == SL_R_NONE) {
            a.parts++;
            a.tokens += p->T;
            f->st.parts_ok++;
            f->st.tokens += p->T;
            continue;
        }
        f->st.parts_refused++;
        f->st.reasons[p->reason]++;
        if (c) {
            answered(PUSH(c->rej, (refusal){j->row, i, 1, p->reason, p->why}));
            p->why = NULL;
        }
    }
    if (!c || !a.parts) return;
    c->pending++;
    answered(PUSH(c->acc, a));
}

static void answer(sl_feed *f, sl_job *j) {
    client *c = client_at(f, j->client);
    if (j->kind == SL_JOB_FLUSH) {
        if (!c) return;
        c->stream = false;
        reply_simple(c, "flushed");
        return;
    }
    if (c && c->outstanding) c->outstanding--;
    if (j->kind != SL_JOB_KNOWN)
        answer_new(f, c, j);
    else if (c)
        answer_known(f, c, j);
}

static int sync_group(sl_feed *f, sl_err *err) {
    uint64_t now = sl_now_ns();
    if (f->st.paused && now < f->retry_ns) return 0;
    int rc = sl_intake_sync(f->cfg.intake, err);
    if (rc == SL_ETEMP) {
        if (!f->st.paused) sl_log(SL_WARN, "intake is paused until there is room: %s", err->msg);
        f->st.paused = true;
        f->retry_ns = now + RETRY_MS * 1000000ull;
        return 0;
    }
    if (rc) return rc;
    if (f->st.paused) sl_log(SL_INFO, "intake goes on: there is room again");
    f->st.paused = false;
    for (sl_job *j = f->wait_head, *next; j; j = next) {
        next = j->next;
        answer(f, j);
        sl_job_free(j);
    }
    f->wait_head = f->wait_tail = NULL;
    f->waiting = 0;
    return 1;
}

static int collect(sl_feed *f, sl_err *err) {
    int did = 0;
    while (!f->st.paused && f->waiting < SL_FEED_GROUP && sl_intake_buffered(f->cfg.intake) < (8u << 20)) {
        sl_job *j = sl_pool_take(f->pool);
        if (!j) break;
        j->next = NULL;
        if (f->wait_tail)
            f->wait_tail->next = j;
        else
            f->wait_head = j;
        f->wait_tail = j;
        if (!f->waiting++) f->first_wait_ns = sl_now_ns();
        int rc = journal(f, j, err);
        if (rc) return rc;
        did = 1;
    }
    bool due = f->waiting >= SL_FEED_GROUP || !sl_pool_jobs(f->pool) ||
               sl_intake_buffered(f->cfg.intake) >= (8u << 20) ||
               sl_now_ns() - f->first_wait_ns >= SYNC_MS * 1000000ull;
    if ((f->waiting || sl_intake_dirty(f->cfg.intake)) && due) {
        int rc = sync_group(f, err);
        if (rc < 0) return rc;
        did |= rc;
    }
    return did;
}

int sl_feed_turn(sl_feed *f, sl_err *err) {
    sl_bell_drain(f->wake);
    int did = f->sock ? receive(f) : 0;
    if (f->fatal_set) {
        if (err) *err = f->fatal;
        return f->fatal.code;
    }
    int rc = collect(f, err);
    if (rc < 0) return rc;
    return did | rc | send_answers(f);
}

int sl_feed_flush(sl_feed *f, sl_err *err) {
    return sl_intake_flush(f->cfg.intake, err);
}
void sl_feed_drain(sl_feed *f) {
    f->draining = true;
}
bool sl_feed_idle(const sl_feed *f) {
    return !sl_pool_jobs(f->pool) && !f->waiting && !sl_intake_dirty(f->cfg.intake);
}
int sl_feed_wake_fd(const sl_feed *f) {
    return f->wake;
}

int sl_feed_timeout_ms(const sl_feed *f) {
    if (f->st.paused) return RETRY_MS;
    if (f->waiting || sl_intake_dirty(f->cfg.intake)) return SYNC_MS;
    for (uint32_t i = 0; i < f->n_clients; i++) {
        if (has_answers(f->clients[i])) return 50; /* it is slow to read */
    }
    return 200;
}

int sl_feed_fd(const sl_feed *f) {
    int fd = -1;
    size_t n = sizeof fd;
    if (f->sock) zmq_getsockopt(f->sock, ZMQ_FD, &fd, &n);
    return fd;
}

const sl_feed_stats *sl_feed_get_stats(sl_feed *f) {
    uint64_t now = sl_now_ns();
    f->st.queue = sl_pool_jobs(f->pool) + f->waiting;
    f->st.lacking = sl_pool_lacking(f->pool);
    f->st.open_streams = 0;
    for (uint32_t i = 0; i < f->n_clients; i++) {
        const client *c = f->clients[i];
        if (c->stream && now - c->last_ns < SL_FEED_SILENT_S * 1000000000ull) f->st.open_streams++;
    }
    return &f->st;
}

/* ---- opening ---- */

static int bind_socket(sl_feed *f, sl_err *err) {
    const char *a = f->cfg.addr;
    bool ipc = !strncmp(a, "ipc://", 6), tcp = !strncmp(a, "tcp://", 6);
    if (!ipc && !tcp)
        return sl_err_set(err, SL_ECONFIG, "feed address '%s': expected ipc://PATH or tcp://HOST:PORT", a);
    if (tcp && !*f->cfg.curve_dir)
        return sl_err_set(
            err, SL_ECONFIG,
            "feed address '%s': tcp:// is open to the whole network and needs CURVE keys: set curve_dir, or use ipc://",
            a);
    int linger = 500, one = 1, hwm = 1000, rcv = 16, rc = SL_OK;
    int64_t max = SL_WIRE_MAX;
    f->ctx = zmq_ctx_new();
    f->sock = f->ctx ? zmq_socket(f->ctx, ZMQ_ROUTER) : NULL;
    if (!f->sock) return sl_err_set(err, SL_ETEMP, "opening a ZeroMQ socket: %s", zmq_strerror(errno));
    zmq_setsockopt(f->sock, ZMQ_LINGER, &linger, sizeof linger); /* last answers */
    zmq_setsockopt(f->sock, ZMQ_ROUTER_MANDATORY, &one, sizeof one);
    zmq_setsockopt(f->sock, ZMQ_SNDHWM, &hwm, sizeof hwm);
    zmq_setsockopt(f->sock, ZMQ_RCVHWM, &rcv, sizeof rcv);
    zmq_setsockopt(f->sock, ZMQ_MAXMSGSIZE, &max, sizeof max);
    if (tcp && (rc = sl_curve_open(&f->curve, f->ctx, f->sock, f->cfg.curve_dir, err))) return rc;
    /* The socket file must never be open to others, not even between bind and chmod. */
    mode_t old = umask(0177);
    rc = zmq_bind(f->sock, a);
    int e = errno;
    umask(old);
    if (rc) return sl_err_set(err, SL_ETEMP, "binding the feed socket to %s: %s", a, zmq_strerror(e));
    return sl_wire_access(a, f->cfg.socket_gid1, err);
}

int sl_feed_open(sl_feed **out, const sl_feed_cfg *cfg, sl_err *err) {
    sl_feed *f = calloc(1, sizeof *f);
    if (!f) return sl_err_set(err, SL_ETEMP, "feed: no memory");
    f->cfg = *cfg;
    if (!f->cfg.credit) f->cfg.credit = 1;
    snprintf(f->addr, sizeof f->addr, "%s", cfg->addr ? cfg->addr : "");
    snprintf(f->store, sizeof f->store, "%s", cfg->store ? cfg->store : "");
    f->cfg.addr = f->addr;
    f->wake = sl_bell_create(err);
    int rc = f->wake < 0 ? f->wake : sl_pool_new(&f->pool, &cfg->prep, cfg->threads, f->wake, err);
    if (!rc && f->addr[0]) rc = bind_socket(f, err); /* without an address: messages come by sl_feed_message only */
    if (rc) {
        sl_feed_close(f);
        return rc;
    }
    *out = f;
    return SL_OK;
}

void sl_feed_close(sl_feed *f) {
    if (!f) return;
    sl_pool_free(f->pool);
    for (sl_job *j = f->wait_head, *next; j; j = next) {
        next = j->next;
        sl_job_free(j);
    }
    if (f->sock) zmq_close(f->sock);
    sl_curve_close(f->curve);
    if (f->ctx) zmq_ctx_term(f->ctx);
    for (uint32_t i = 0; i < f->n_clients; i++) client_free(f->clients[i]);
    free(f->clients);
    free(f->others.v);
    if (f->wake > 0) close(f->wake);
    free(f);
}
