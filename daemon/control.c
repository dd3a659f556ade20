#include "daemon/control.h"
#include "ipc/wire.h"
#include <string.h>
#include <sys/stat.h>
#include <zmq.h>

static int bind_one(void *sock, const char *addr, const sl_config *cfg, sl_err *err) {
    mode_t old = umask(0177); /* the socket must not exist for a moment with a wider mode */
    int rc = zmq_bind(sock, addr), e = zmq_errno();
    umask(old);
    if (rc) return sl_err_set(err, SL_ETEMP, "binding %s: %s", addr, zmq_strerror(e));
    return sl_wire_access(addr, cfg->boot.socket_gid1, err);
}

int sl_control_open(sl_control *c, const sl_config *cfg, sl_err *err) {
    int zero = 0, hwm = 64;
    memset(c, 0, sizeof *c);
    c->ctx = zmq_ctx_new();
    c->rep = c->ctx ? zmq_socket(c->ctx, ZMQ_REP) : NULL;
    c->pub = c->ctx ? zmq_socket(c->ctx, ZMQ_PUB) : NULL;
    if (!c->rep || !c->pub) {
        sl_control_close(c);
        return sl_err_set(err, SL_ETEMP, "ZeroMQ: %s", zmq_strerror(zmq_errno()));
    }
    int64_t max = 65536; /* requests are tiny */
    zmq_setsockopt(c->rep, ZMQ_MAXMSGSIZE, &max, sizeof max);
    zmq_setsockopt(c->rep, ZMQ_LINGER, &zero, sizeof zero);
    zmq_setsockopt(c->pub, ZMQ_SNDHWM, &hwm, sizeof hwm); /* a slow monitor loses snapshots, nobody waits for it */
    int linger = 200;
    zmq_setsockopt(c->pub, ZMQ_LINGER, &linger, sizeof linger);
    int rc = bind_one(c->rep, cfg->boot.sock_control, cfg, err);
    if (!rc) rc = bind_one(c->pub, cfg->boot.sock_progress, cfg, err);
    if (rc) sl_control_close(c);
    return rc;
}

void sl_control_close(sl_control *c) {
    if (c->rep) zmq_close(c->rep);
    if (c->pub) zmq_close(c->pub);
    if (c->ctx) zmq_ctx_term(c->ctx);
    memset(c, 0, sizeof *c);
}

int sl_control_fd(const sl_control *c) {
    int fd = -1;
    size_t n = sizeof fd;
    zmq_getsockopt(c->rep, ZMQ_FD, &fd, &n);
    return fd;
}

static void answer_error(msgpack_sbuffer *out, const char *code, const char *msg) {
    msgpack_packer pk;
    msgpack_packer_init(&pk, out, msgpack_sbuffer_write);
    msgpack_pack_map(&pk, 3);
    sl_wire_key(&pk, "ok");
    msgpack_pack_false(&pk);
    sl_wire_kstr(&pk, "code", code);
    sl_wire_kstr(&pk, "msg", msg);
}

static void answer_config(msgpack_sbuffer *out, const sl_status *s) {
    char *text = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&text, &n);
    if (f) {
        sl_config_print(s->cfg, f);
        fclose(f);
    }
    msgpack_packer pk;
    msgpack_packer_init(&pk, out, msgpack_sbuffer_write);
    msgpack_pack_map(&pk, 2);
    sl_wire_kstr(&pk, "t", "config");
    sl_wire_kstr(&pk, "ini", text ? text : "");
    free(text);
}

static void answer_ok(msgpack_sbuffer *out, const char *t) {
    msgpack_packer pk;
    msgpack_packer_init(&pk, out, msgpack_sbuffer_write);
    msgpack_pack_map(&pk, 2);
    sl_wire_kstr(&pk, "t", t);
    sl_wire_key(&pk, "ok");
    msgpack_pack_true(&pk);
}

static void answer(sl_control *c, const sl_status *s, const void *msg, size_t n, msgpack_sbuffer *out) {
    msgpack_unpacked u;
    sl_err e = {0};
    const char *t = NULL;
    uint32_t len = 0;
    char type[16] = "";
    msgpack_unpacked_init(&u);
    if (sl_wire_unpack(&u, msg, n, &e) || sl_wire_str(&u.data, "t", &t, &len, &e)) {
        answer_error(out, "message", e.msg);
    } else {
        snprintf(type, sizeof type, "%.*s", (int)(len < 15 ? len : 15), t);
        if (!strcmp(type, "status"))
            sl_status_pack(s, out);
        else if (!strcmp(type, "ping"))
            answer_ok(out, "pong");
        else if (!strcmp(type, "config"))
            answer_config(out, s);
        else if (!strcmp(type, "drain"))
            answer_ok(out, "drain"), c->drain_asked = true;
        else
            answer_error(out, "t", "t must be status, drain, ping or config");
    }
    msgpack_unpacked_destroy(&u);
}

void sl_control_serve(sl_control *c, const sl_status *s) {
    for (;;) {
        zmq_msg_t m;
        zmq_msg_init(&m);
        int n = zmq_msg_recv(&m, c->rep, ZMQ_DONTWAIT);
        if (n < 0) {
            zmq_msg_close(&m);
            return;
        }
        msgpack_sbuffer out;
        msgpack_sbuffer_init(&out);
        answer(c, s, zmq_msg_data(&m), zmq_msg_size(&m), &out);
        zmq_send(c->rep, out.data, out.size, ZMQ_DONTWAIT);
        msgpack_sbuffer_destroy(&out);
        zmq_msg_close(&m);
    }
}

void sl_control_publish(sl_control *c, const sl_status *s, uint64_t now) {
    msgpack_sbuffer out;
    msgpack_sbuffer_init(&out);
    uint64_t n = s->super->n_events;
    if (n - c->events_sent > SL_SUPER_EVENTS) c->events_sent = n - SL_SUPER_EVENTS;
    for (; c->events_sent < n; c->events_sent++) {
        msgpack_sbuffer_clear(&out);
        sl_status_pack_event(&s->super->event[c->events_sent % SL_SUPER_EVENTS], &out);
        zmq_send(c->pub, out.data, out.size, ZMQ_DONTWAIT);
    }
    if (now - c->published_ns >= s->cfg->status_ms * 1000000ull) {
        c->published_ns = now;
        msgpack_sbuffer_clear(&out);
        sl_status_pack(s, &out);
        zmq_send(c->pub, out.data, out.size, ZMQ_DONTWAIT);
    }
    msgpack_sbuffer_destroy(&out);
}
