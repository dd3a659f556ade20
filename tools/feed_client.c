#include "tools/feed_client.h"
#include "ipc/metrics.h"
#include "ipc/wire.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

#define SECOND     1000000000ull
#define MAX_LINE   (60u << 20)
#define MSG_ROWS   64
#define MSG_BYTES  (1u << 20)
#define SCAN_BYTES (1u << 20)

typedef struct row {
    uint64_t off;
    uint32_t len;
    uint32_t parts;         /* accepted */
    uint32_t next_part;     /* parts before this one were answered for: an answer that comes twice counts once */
    uint16_t state, partly; /* partly: some part was rejected */
} row;

struct sl_feed_client {
    sl_feed_opts o;
    int fd;
    void *ctx, *sock, *mon; /* mon: events of the connection */
    bool welcome, draining, want_flush, flush_sent, flushed;
    uint32_t credit;
    uint64_t heard_ns, pinged_ns, hello_ns;
    uint64_t answer_ns;         /* as heard_ns, but a new connection does not set it anew */
    row *rows;                  /* index = row number, blank lines included */
    uint64_t n, cap, next;      /* next: no NEW row before it */
    uint64_t scanned, line_at;  /* file offsets: read so far, start of the open line */
    uint64_t ahead, final_rows; /* bytes not sent yet; rows before this one have their final answer */
    bool blank, full;           /* the open line is blank so far; the limit is reached */
    sl_feed_counts k;
    char *line;
    uint32_t line_cap;
};

/* ---- connection ---- */

static void send_map(sl_feed_client *c, msgpack_sbuffer *b) {
    zmq_send(c->sock, b->data, b->size, ZMQ_DONTWAIT); /* lost messages are made up for by silence */
    msgpack_sbuffer_destroy(b);
}

static void hello(sl_feed_client *c) {
    msgpack_sbuffer b;
    msgpack_packer pk;
    msgpack_sbuffer_init(&b);
    msgpack_packer_init(&pk, &b, msgpack_sbuffer_write);
    msgpack_pack_map(&pk, 4);
    sl_wire_kstr(&pk, "t", "hello");
    sl_wire_ku64(&pk, "v", SL_WIRE_VERSION);
    sl_wire_kstr(&pk, "dataset", c->o.dataset);
    sl_wire_kstr(&pk, "client", c->o.client);
    send_map(c, &b);
    c->hello_ns = sl_now_ns();
    c->welcome = false;
}

static void simple(sl_feed_client *c, const char *type) {
    msgpack_sbuffer b;
    msgpack_packer pk;
    msgpack_sbuffer_init(&b);
    msgpack_packer_init(&pk, &b, msgpack_sbuffer_write);
    msgpack_pack_map(&pk, 1);
    sl_wire_kstr(&pk, "t", type);
    send_map(c, &b);
}

/* Everything that is not finally answered goes out again. */
static void forget_answers(sl_feed_client *c) {
    for (uint64_t i = 0; i < c->n; i++)
        if (c->rows[i].state == SL_FR_SENT || c->rows[i].state == SL_FR_ACCEPTED)
            c->rows[i].state = SL_FR_NEW, c->ahead += c->rows[i].len;
    c->k.waiting += c->k.sent + c->k.accepted;
    c->k.sent = c->k.accepted = 0;
    c->next = 0;
    c->flush_sent = c->flushed = false;
}

static int read_key(const char *dir, const char *name, char out[41], sl_err *err) {
    char path[1200];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "re");
    size_t n = f ? fread(out, 1, 40, f) : 0;
    if (f) fclose(f);
    out[n] = 0;
    return n == 40 ? SL_OK : sl_err_set(err, SL_ECONFIG, "%s: a key of 40 characters (Z85) was expected", path);
}

static int curve(sl_feed_client *c, sl_err *err) {
    static const struct {
        const char *file;
        int opt;
    } keys[] = {{"server.pub", ZMQ_CURVE_SERVERKEY},
                {"client.pub", ZMQ_CURVE_PUBLICKEY},
                {"client.secret", ZMQ_CURVE_SECRETKEY}};
    for (int i = 0; c->o.curve_dir && i < 3; i++) {
        char key[41];
        int rc = read_key(c->o.curve_dir, keys[i].file, key, err);
        if (rc) return rc;
        if (zmq_setsockopt(c->sock, keys[i].opt, key, 41))
            return sl_err_set(err, SL_ECONFIG, "%s/%s: %s", c->o.curve_dir, keys[i].file, zmq_strerror(zmq_errno()));
    }
    return SL_OK;
}

static void close_sockets(sl_feed_client *c) {
    if (c->sock) zmq_socket_monitor(c->sock, NULL, 0);
    if (c->mon) zmq_close(c->mon);
    if (c->sock) zmq_close(c->sock);
    c->sock = c->mon = NULL;
}

/* Did the connection break since the last call? Then a new feeder answers pings as the old one did, but knows no rows.
 */
static bool broken(sl_feed_client *c) {
    bool yes = false;
    for (;;) {
        zmq_msg_t m;
        zmq_msg_init(&m);
        int n = c->mon ? zmq_msg_recv(&m, c->mon, ZMQ_DONTWAIT) : -1;
        uint16_t event = 0;
        bool first = n == 6 && zmq_msg_more(&m); /* event and value; the second frame is an address */
        if (first) memcpy(&event, zmq_msg_data(&m), 2);
        zmq_msg_close(&m);
        if (n < 0) return yes;
        yes |= event == ZMQ_EVENT_DISCONNECTED;
    }
}

static int connect_now(sl_feed_client *c, sl_err *err) {
    int zero = 0, ms = 100, max_ms = 1000;
    close_sockets(c);
    c->sock = zmq_socket(c->ctx, ZMQ_DEALER);
    if (!c->sock) return sl_err_set(err, SL_ETEMP, "ZeroMQ: %s", zmq_strerror(zmq_errno()));
    zmq_setsockopt(c->sock, ZMQ_LINGER, &zero, sizeof zero);
    zmq_setsockopt(c->sock, ZMQ_SNDHWM, &zero, sizeof zero); /* credit is the limit */
    zmq_setsockopt(c->sock, ZMQ_RCVHWM, &zero, sizeof zero);
    zmq_setsockopt(c->sock, ZMQ_RECONNECT_IVL, &ms, sizeof ms);
    zmq_setsockopt(c->sock, ZMQ_RECONNECT_IVL_MAX, &max_ms, sizeof max_ms);
    int rc = curve(c, err);
    if (rc) return rc;
    if (!zmq_socket_monitor(c->sock, "inproc://feed-events", ZMQ_EVENT_DISCONNECTED)) {
        c->mon = zmq_socket(c->ctx, ZMQ_PAIR);
        if (c->mon) zmq_setsockopt(c->mon, ZMQ_LINGER, &zero, sizeof zero);
        if (c->mon && zmq_connect(c->mon, "inproc://feed-events")) zmq_close(c->mon), c->mon = NULL;
    }
    if (zmq_connect(c->sock, c->o.addr))
        return sl_err_set(err, SL_EUSAGE, "feed address '%s': %s", c->o.addr, zmq_strerror(zmq_errno()));
    c->heard_ns = c->pinged_ns = sl_now_ns();
    if (!c->answer_ns) c->answer_ns = c->heard_ns;
    hello(c);
    return SL_OK;
}

int sl_feed_client_open(sl_feed_client **out, const sl_feed_opts *o, int fd, sl_err *err) {
    size_t n = strlen(o->dataset);
    if (!n || n > 255) return sl_err_set(err, SL_EUSAGE, "a data set's name has 1 to 255 bytes, not %zu", n);
    sl_feed_client *c = calloc(1, sizeof *c);
    if (!c) return sl_err_set(err, SL_ETEMP, "out of memory");
    c->o = *o, c->fd = fd, c->blank = true;
    c->ctx = zmq_ctx_new();
    int rc = c->ctx ? connect_now(c, err) : sl_err_set(err, SL_ETEMP, "ZeroMQ: %s", zmq_strerror(zmq_errno()));
    if (rc)
        sl_feed_client_close(c);
    else
        *out = c;
    return rc;
}

void sl_feed_client_close(sl_feed_client *c) {
    if (!c) return;
    close_sockets(c);
    if (c->ctx) zmq_ctx_term(c->ctx);
    free(c->rows);
    free(c->line);
    free(c);
}

/* ---- finding rows ---- */

static uint64_t *open_count(sl_feed_client *c, const row *r) {
    return r->state == SL_FR_NEW        ? &c->k.waiting
           : r->state == SL_FR_SENT     ? &c->k.sent
           : r->state == SL_FR_ACCEPTED ? &c->k.accepted
                                        : NULL;
}

static void say_rejected(sl_feed_client *c, uint64_t i, uint32_t part, uint32_t parts, const char *reason,
                         const char *msg) {
    c->k.parts_rejected += parts;
    if (c->o.on_reject) c->o.on_reject(c->o.arg, c->o.dataset, i, part, parts, reason, msg);
}

/* Parts that the feeder (or this client) refused. When no part was accepted that is the end of the row. */
static void refuse(sl_feed_client *c, uint64_t i, uint32_t part, uint32_t parts, const char *reason, const char *msg) {
    row *r = &c->rows[i];
    if (part < r->next_part) return; /* answered before */
    if (r->state == SL_FR_NEW || r->state == SL_FR_SENT) {
        --*open_count(c, r);
        if (r->state == SL_FR_NEW) c->ahead -= r->len;
        r->state = SL_FR_REJECTED;
        c->k.rejected++;
    } else if (r->state == SL_FR_ACCEPTED) {
        r->partly = 1;
    } else if (r->state != SL_FR_REJECTED) {
        return;
    }
    r->next_part = part + parts;
    say_rejected(c, i, part, parts, reason, msg);
}

/* Every accepted part has its answer: `bad` of them were rejected, the others are written. */
static void finish_row(sl_feed_client *c, uint64_t i, uint32_t bad, const char *reason, const char *msg) {
    row *r = &c->rows[i];
    uint64_t *from = open_count(c, r);
    if (!from) return; /* a second answer to the same row */
    if (r->state == SL_FR_NEW) c->ahead -= r->len;
    if (!r->parts) r->parts = bad ? bad : 1; /* `done` overtook the acknowledgement: cannot be, but must not miscount */
    if (bad > r->parts) bad = r->parts;
    --*from;
    r->state = bad == r->parts ? SL_FR_REJECTED : SL_FR_DURABLE;
    c->k.parts_written += r->parts - bad;
    if (r->state == SL_FR_REJECTED)
        c->k.rejected++;
    else
        c->k.durable++, c->k.partly += r->partly || bad;
    if (bad) say_rejected(c, i, r->parts == 1 && !r->partly ? 0 : SL_FEED_PART_ANY, bad, reason, msg);
}

static int add_line(sl_feed_client *c, uint64_t off, uint64_t len, bool blank, sl_err *err) {
    if (c->n == c->cap) {
        uint64_t cap = c->cap ? c->cap * 2 : 1024;
        row *p = realloc(c->rows, cap * sizeof *p);
        if (!p) return sl_err_set(err, SL_ETEMP, "out of memory for %llu rows", (unsigned long long)cap);
        c->rows = p, c->cap = cap;
    }
    bool other = c->o.shards && c->n % c->o.shards != c->o.shard;
    c->rows[c->n++] =
        (row){.off = off, .len = len > MAX_LINE ? 0 : (uint32_t)len, .state = blank || other ? SL_FR_BLANK : SL_FR_NEW};
    if (blank || other) {
        c->k.left_out += !blank;
        return SL_OK;
    }
    c->k.rows++, c->k.waiting++;
    c->ahead += c->rows[c->n - 1].len;
    c->full = c->o.limit && c->k.rows >= c->o.limit;
    if (len > MAX_LINE) refuse(c, c->n - 1, 0, 1, "TOO_BIG", "the line has more than 60 MiB");
    return SL_OK;
}

int sl_feed_client_scan(sl_feed_client *c, bool final, sl_err *err) {
    char *buf = malloc(SCAN_BYTES);
    if (!buf) return sl_err_set(err, SL_ETEMP, "out of memory");
    int rc = SL_OK;
    while (!c->full) {
        ssize_t n = pread(c->fd, buf, SCAN_BYTES, (off_t)c->scanned);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) rc = sl_err_sys(err, SL_EDATA, errno, "reading the rows of %s", c->o.dataset);
        if (n <= 0 || rc) break;
        for (ssize_t i = 0; i < n && !rc && !c->full; i++) {
            if (buf[i] == '\n') {
                rc = add_line(c, c->line_at, c->scanned + (uint64_t)i - c->line_at, c->blank, err);
                c->line_at = c->scanned + (uint64_t)i + 1;
                c->blank = true;
            } else if (buf[i] != ' ' && buf[i] != '\t' && buf[i] != '\r') {
                c->blank = false;
            }
        }
        c->scanned += (uint64_t)n;
    }
    if (!rc && final && !c->full && c->scanned > c->line_at) {
        rc = add_line(c, c->line_at, c->scanned - c->line_at, c->blank, err);
        c->line_at = c->scanned;
    }
    free(buf);
    return rc;
}

/* ---- sending ---- */

static int fetch(sl_feed_client *c, const row *r, sl_err *err) {
    if (r->len > c->line_cap) {
        char *p = realloc(c->line, r->len);
        if (!p) return sl_err_set(err, SL_ETEMP, "out of memory for a line of %u bytes", r->len);
        c->line = p, c->line_cap = r->len;
    }
    for (uint32_t at = 0; at < r->len;) {
        ssize_t n = pread(c->fd, c->line + at, r->len - at, (off_t)(r->off + at));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return sl_err_sys(err, SL_EDATA, errno, "reading the rows of %s", c->o.dataset);
        if (n == 0)
            return sl_err_set(err, SL_EDATA, "the file of data set %s became shorter while it was read", c->o.dataset);
        at += (uint32_t)n;
    }
    return SL_OK;
}

/* One `rows` message; returns how many rows went out. */
static int send_some(sl_feed_client *c, sl_err *err) {
    uint64_t pick[MSG_ROWS];
    uint32_t room = c->credit > c->k.sent ? c->credit - (uint32_t)c->k.sent : 0, n = 0;
    uint64_t bytes = 0, i = c->next;
    for (; i < c->n && n < room && n < MSG_ROWS; i++) {
        if (c->rows[i].state != SL_FR_NEW) continue;
        if (n && bytes + c->rows[i].len > MSG_BYTES) break;
        bytes += c->rows[i].len;
        pick[n++] = i;
    }
    c->next = i;
    if (!n) return 0;
    msgpack_sbuffer b;
    msgpack_packer pk;
    msgpack_sbuffer_init(&b);
    msgpack_packer_init(&pk, &b, msgpack_sbuffer_write);
    msgpack_pack_map(&pk, 2);
    sl_wire_kstr(&pk, "t", "rows");
    sl_wire_key(&pk, "rows");
    msgpack_pack_array(&pk, n);
    for (uint32_t j = 0; j < n; j++) {
        row *r = &c->rows[pick[j]];
        int rc = fetch(c, r, err);
        if (rc) {
            msgpack_sbuffer_destroy(&b);
            return rc;
        }
        msgpack_pack_map(&pk, 2);
        sl_wire_ku64(&pk, "n", pick[j]);
        sl_wire_key(&pk, "j");
        msgpack_pack_bin(&pk, r->len);
        msgpack_pack_bin_body(&pk, c->line, r->len);
    }
    for (uint32_t j = 0; j < n; j++) c->rows[pick[j]].state = SL_FR_SENT, c->ahead -= c->rows[pick[j]].len;
    c->k.waiting -= n, c->k.sent += n;
    send_map(c, &b);
    return (int)n;
}

/* ---- answers ---- */

static bool row_number(const sl_feed_client *c, const msgpack_object *o, uint64_t *n) {
    if (o->type != MSGPACK_OBJECT_POSITIVE_INTEGER || o->via.u64 >= c->n) return false;
    *n = o->via.u64;
    return true;
}

static const char *text_of(const msgpack_object *o, char *buf, size_t cap) {
    if (o->type == MSGPACK_OBJECT_STR)
        snprintf(buf, cap, "%.*s", (int)(o->via.str.size < cap ? o->via.str.size : cap - 1), o->via.str.ptr);
    else
        snprintf(buf, cap, "?");
    return buf;
}

static void accept_row(sl_feed_client *c, uint64_t n, uint32_t parts, bool known) {
    row *r = &c->rows[n];
    if (r->state != SL_FR_SENT) return;
    r->state = SL_FR_ACCEPTED;
    r->parts = parts;
    c->k.sent--, c->k.accepted++;
    if (known) c->k.known++;
}

/* Element i of an answer, a number of parts. */
static uint32_t parts_at(const msgpack_object *o, uint32_t i) {
    const msgpack_object *v = &o->via.array.ptr[i];
    return v->type == MSGPACK_OBJECT_POSITIVE_INTEGER && v->via.u64 && v->via.u64 < 1u << 20 ? (uint32_t)v->via.u64 : 1;
}

static void on_list(sl_feed_client *c, const msgpack_object *list,
                    void (*each)(sl_feed_client *, const msgpack_object *)) {
    if (!list || list->type != MSGPACK_OBJECT_ARRAY) return;
    for (uint32_t i = 0; i < list->via.array.size; i++) each(c, &list->via.array.ptr[i]);
}

static void each_acc(sl_feed_client *c, const msgpack_object *o) {
    uint64_t n;
    if (o->type != MSGPACK_OBJECT_ARRAY || o->via.array.size < 3 || !row_number(c, &o->via.array.ptr[0], &n)) return;
    if (c->rows[n].state == SL_FR_SENT && o->via.array.ptr[2].type == MSGPACK_OBJECT_POSITIVE_INTEGER)
        c->k.tokens += o->via.array.ptr[2].via.u64;
    accept_row(c, n, parts_at(o, 1), false);
}

static void each_known(sl_feed_client *c, const msgpack_object *o) { /* [n, parts] */
    uint64_t n;
    if (o->type != MSGPACK_OBJECT_ARRAY || o->via.array.size < 2 || !row_number(c, &o->via.array.ptr[0], &n)) return;
    accept_row(c, n, parts_at(o, 1), true);
}

static void each_refused(sl_feed_client *c, const msgpack_object *o) { /* [n, part, reason, message, count] */
    uint64_t n;
    char reason[64], msg[1024];
    if (o->type != MSGPACK_OBJECT_ARRAY || o->via.array.size < 5 || !row_number(c, &o->via.array.ptr[0], &n)) return;
    const msgpack_object *part = &o->via.array.ptr[1];
    if (part->type != MSGPACK_OBJECT_POSITIVE_INTEGER || part->via.u64 >= 1u << 20) return;
    refuse(c, n, (uint32_t)part->via.u64, parts_at(o, 4), text_of(&o->via.array.ptr[2], reason, sizeof reason),
           text_of(&o->via.array.ptr[3], msg, sizeof msg));
}

static void each_ok(sl_feed_client *c, const msgpack_object *o) {
    uint64_t n;
    if (row_number(c, o, &n)) finish_row(c, n, 0, NULL, NULL);
}

static void each_lost(sl_feed_client *c, const msgpack_object *o) { /* [n, verdict, detail, count] */
    uint64_t n;
    char reason[64], msg[1024];
    if (o->type != MSGPACK_OBJECT_ARRAY || o->via.array.size < 4 || !row_number(c, &o->via.array.ptr[0], &n)) return;
    finish_row(c, n, parts_at(o, 3), text_of(&o->via.array.ptr[1], reason, sizeof reason),
               text_of(&o->via.array.ptr[2], msg, sizeof msg));
}

static int on_error(sl_feed_client *c, const msgpack_object *m, sl_err *err) {
    static const msgpack_object none = {.type = MSGPACK_OBJECT_NIL};
    char code[32], msg[1024];
    const msgpack_object *a = sl_wire_get(m, "code"), *b = sl_wire_get(m, "msg");
    text_of(a ? a : &none, code, sizeof code), text_of(b ? b : &none, msg, sizeof msg);
    if (!strcmp(code, "draining")) {
        c->draining = true;
        return SL_OK;
    }
    if (!strcmp(code, "order") || !strcmp(code, "credit") ||
        !strcmp(code, "memory")) { /* it does not know us (any more) */
        if (c->welcome || sl_now_ns() - c->hello_ns > SECOND) {
            forget_answers(c);
            hello(c);
            c->k.reconnects++;
        }
        return SL_OK;
    }
    return sl_err_set(err, SL_EDATA, "the feeder refused a message (%s): %s", code, msg);
}

static int on_message(sl_feed_client *c, const void *data, size_t len, sl_err *err) {
    msgpack_unpacked u;
    const char *t = NULL;
    uint32_t n = 0;
    uint64_t credit = 0;
    char type[16];
    msgpack_unpacked_init(&u);
    int rc = sl_wire_unpack(&u, data, len, err);
    if (!rc) rc = sl_wire_str(&u.data, "t", &t, &n, err);
    if (!rc) {
        snprintf(type, sizeof type, "%.*s", (int)(n < 15 ? n : 15), t);
        if (!strcmp(type, "welcome")) {
            rc = sl_wire_u64(&u.data, "credit", &credit, err);
            if (!rc) c->credit = credit > 1u << 20 ? 1u << 20 : (uint32_t)credit, c->welcome = true;
        } else if (!strcmp(type, "ack")) {
            on_list(c, sl_wire_get(&u.data, "acc"), each_acc);
            on_list(c, sl_wire_get(&u.data, "known"), each_known);
            on_list(c, sl_wire_get(&u.data, "rej"), each_refused);
        } else if (!strcmp(type, "done")) {
            on_list(c, sl_wire_get(&u.data, "ok"), each_ok);
            on_list(c, sl_wire_get(&u.data, "rej"), each_lost);
        } else if (!strcmp(type, "flushed")) {
            c->flushed = c->flush_sent;
        } else if (!strcmp(type, "err")) {
            rc = on_error(c, &u.data, err);
        }
    }
    msgpack_unpacked_destroy(&u);
    return rc;
}

static int receive(sl_feed_client *c, sl_err *err) {
    int got = 0;
    for (;;) {
        zmq_msg_t m;
        zmq_msg_init(&m);
        int n = zmq_msg_recv(&m, c->sock, ZMQ_DONTWAIT), rc = SL_OK;
        if (n >= 0) {
            c->heard_ns = c->answer_ns = sl_now_ns();
            got = 1;
            rc = on_message(c, zmq_msg_data(&m), zmq_msg_size(&m), err);
        }
        zmq_msg_close(&m);
        if (rc) return rc;
        if (n < 0) return got;
    }
}

int sl_feed_client_turn(sl_feed_client *c, int timeout_ms, sl_err *err) {
    uint64_t now = sl_now_ns();
    int rc = receive(c, err), some = 0;
    if (rc < 0) return rc;
    some |= rc;
    if (broken(c)) {
        forget_answers(c);
        hello(c); /* waits in the socket until the feeder is back */
        c->k.reconnects++;
    }
    while (c->welcome && !c->draining && (rc = send_some(c, err)) > 0) some = 1;
    if (rc < 0) return rc;
    if (c->want_flush && !c->flush_sent && c->welcome && !c->k.waiting) c->flush_sent = true, simple(c, "flush");
    if (now - c->pinged_ns > 2 * SECOND) {
        c->pinged_ns = now;
        if (c->welcome) simple(c, "ping");
    }
    if (now - c->heard_ns > 10 * SECOND && now > c->heard_ns) {
        forget_answers(c);
        c->k.reconnects++;
        return connect_now(c, err);
    }
    if (some || !timeout_ms) return some;
    zmq_pollitem_t item = {.socket = c->sock, .events = ZMQ_POLLIN};
    zmq_poll(&item, 1, timeout_ms < 500 ? timeout_ms : 500);
    return receive(c, err);
}

void sl_feed_client_flush(sl_feed_client *c) {
    c->want_flush = true, c->flush_sent = c->flushed = false;
}
const sl_feed_counts *sl_feed_client_counts(const sl_feed_client *c) {
    return &c->k;
}
bool sl_feed_client_full(const sl_feed_client *c) {
    return c->full;
}
uint64_t sl_feed_client_ahead(const sl_feed_client *c) {
    return c->ahead;
}
uint64_t sl_feed_client_line(const sl_feed_client *c) {
    return c->n + 1;
}

uint64_t sl_feed_client_needed(sl_feed_client *c) {
    for (; c->final_rows < c->n; c->final_rows++) {
        uint32_t s = c->rows[c->final_rows].state;
        if (s == SL_FR_NEW || s == SL_FR_SENT || s == SL_FR_ACCEPTED) return c->rows[c->final_rows].off;
    }
    /* (an open line that is too long already will not be read) */
    return c->full || c->scanned - c->line_at > MAX_LINE ? c->scanned : c->line_at;
}

bool sl_feed_client_refused(const sl_feed_client *c) {
    return c->draining;
}

bool sl_feed_client_answered(const sl_feed_client *c) {
    return !c->k.waiting && !c->k.sent && (!c->want_flush || c->flushed);
}

uint64_t sl_feed_client_silent_ms(const sl_feed_client *c) {
    return (sl_now_ns() - c->answer_ns) / 1000000;
}

bool sl_feed_client_durable(const sl_feed_client *c) {
    return sl_feed_client_answered(c) && !c->k.accepted;
}

int sl_feed_client_fd(const sl_feed_client *c) {
    int fd = -1;
    size_t n = sizeof fd;
    zmq_getsockopt(c->sock, ZMQ_FD, &fd, &n);
    return fd;
}
