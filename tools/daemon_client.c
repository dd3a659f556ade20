#include "tools/daemon_client.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

int sl_daemon_find(const char *where, sl_run_record *out, sl_err *err) {
    char dir[4][1024] = {{0}};
    const char *a = getenv("RUNTIME_DIRECTORY"), *b = getenv("XDG_RUNTIME_DIR");
    if (where) return sl_run_find(where, out, err);
    if (a && *a) snprintf(dir[0], sizeof dir[0], "%.*s", (int)strcspn(a, ":"), a);
    if (b && *b) snprintf(dir[1], sizeof dir[1], "%s/sluice", b);
    snprintf(dir[2], sizeof dir[2], "/run/sluice");
    snprintf(dir[3], sizeof dir[3], "/tmp/sluice-%u", (unsigned)getuid());
    for (int i = 0; i < 4; i++)
        if (dir[i][0] && !sl_run_find(dir[i], out, err)) return SL_OK;
    return sl_err_set(err, SL_ETEMP,
                      "no running sluiced was found (looked in %s%s%s%s/run/sluice, %s); start one, or name its run "
                      "folder or store with --at",
                      dir[0], dir[0][0] ? ", " : "", dir[1], dir[1][0] ? ", " : "", dir[3]);
}

/* Unpacked strings point into the buffer, so the result gets a copy of it, which lives and dies with its zone. */
static int own_unpack(msgpack_unpacked *out, const void *data, size_t n, sl_err *err) {
    void *copy = malloc(n ? n : 1);
    if (!copy) return sl_err_set(err, SL_ETEMP, "out of memory");
    memcpy(copy, data, n);
    int rc = sl_wire_unpack(out, copy, n, err);
    if (!rc && !msgpack_zone_push_finalizer(out->zone, free, copy)) {
        msgpack_unpacked_destroy(out);
        msgpack_unpacked_init(out);
        rc = sl_err_set(err, SL_ETEMP, "out of memory");
    }
    if (rc) free(copy);
    return rc;
}

/* ---- asking ---- */

int sl_daemon_ask(const char *control, const char *type, int timeout_ms, msgpack_unpacked *out, sl_err *err) {
    int zero = 0, rc;
    void *ctx = zmq_ctx_new(), *s = ctx ? zmq_socket(ctx, ZMQ_REQ) : NULL;
    msgpack_unpacked_init(out);
    if (!s) {
        if (ctx) zmq_ctx_term(ctx);
        return sl_err_set(err, SL_ETEMP, "ZeroMQ: %s", zmq_strerror(zmq_errno()));
    }
    zmq_setsockopt(s, ZMQ_LINGER, &zero, sizeof zero);
    zmq_setsockopt(s, ZMQ_RCVTIMEO, &timeout_ms, sizeof timeout_ms);
    msgpack_sbuffer b;
    msgpack_packer pk;
    msgpack_sbuffer_init(&b);
    msgpack_packer_init(&pk, &b, msgpack_sbuffer_write);
    msgpack_pack_map(&pk, 1);
    sl_wire_kstr(&pk, "t", type);
    zmq_msg_t m;
    zmq_msg_init(&m);
    if (zmq_connect(s, control))
        rc = sl_err_set(err, SL_ETEMP, "%s: %s", control, zmq_strerror(zmq_errno()));
    else if (zmq_send(s, b.data, b.size, ZMQ_DONTWAIT) < 0 || zmq_msg_recv(&m, s, 0) < 0)
        rc = sl_err_set(err, SL_ETEMP, "sluiced did not answer on %s within %d ms", control, timeout_ms);
    else
        rc = own_unpack(out, zmq_msg_data(&m), zmq_msg_size(&m), err);
    zmq_msg_close(&m);
    msgpack_sbuffer_destroy(&b);
    zmq_close(s);
    zmq_ctx_term(ctx);
    return rc;
}

/* ---- listening ---- */

int sl_daemon_listen(sl_daemon_feed *f, const char *progress, sl_err *err) {
    int zero = 0, hwm = 16;
    f->ctx = zmq_ctx_new();
    f->sock = f->ctx ? zmq_socket(f->ctx, ZMQ_SUB) : NULL;
    if (!f->sock) return sl_err_set(err, SL_ETEMP, "ZeroMQ: %s", zmq_strerror(zmq_errno()));
    zmq_setsockopt(f->sock, ZMQ_LINGER, &zero, sizeof zero);
    zmq_setsockopt(f->sock, ZMQ_RCVHWM, &hwm, sizeof hwm);
    zmq_setsockopt(f->sock, ZMQ_SUBSCRIBE, "", 0);
    if (!zmq_connect(f->sock, progress)) return SL_OK;
    int rc = sl_err_set(err, SL_ETEMP, "%s: %s", progress, zmq_strerror(zmq_errno()));
    sl_daemon_unlisten(f);
    return rc;
}

int sl_daemon_next(sl_daemon_feed *f, int timeout_ms, msgpack_unpacked *out) {
    zmq_pollitem_t item = {.socket = f->sock, .events = ZMQ_POLLIN};
    msgpack_unpacked_init(out);
    if (zmq_poll(&item, 1, timeout_ms) <= 0) return 0;
    zmq_msg_t m;
    zmq_msg_init(&m);
    int ok = zmq_msg_recv(&m, f->sock, ZMQ_DONTWAIT) >= 0 && !own_unpack(out, zmq_msg_data(&m), zmq_msg_size(&m), NULL);
    zmq_msg_close(&m);
    return ok;
}

void sl_daemon_unlisten(sl_daemon_feed *f) {
    if (f->sock) zmq_close(f->sock);
    if (f->ctx) zmq_ctx_term(f->ctx);
    f->sock = f->ctx = NULL;
}

/* ---- reading a map ---- */

const msgpack_object *sl_status_get(const msgpack_object *map, const char *path) {
    char key[64];
    while (map && *path) {
        size_t n = strcspn(path, ".");
        if (n >= sizeof key || map->type != MSGPACK_OBJECT_MAP) return NULL;
        memcpy(key, path, n);
        key[n] = 0;
        map = sl_wire_get(map, key);
        path += n + (path[n] == '.');
    }
    return map;
}

double sl_status_dbl(const msgpack_object *map, const char *path) {
    const msgpack_object *o = sl_status_get(map, path);
    if (!o) return 0;
    switch (o->type) {
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
        return (double)o->via.u64;
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
        return (double)o->via.i64;
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64:
        return o->via.f64;
    default:
        return NAN;
    }
}

uint64_t sl_status_u64(const msgpack_object *map, const char *path) {
    double d = sl_status_dbl(map, path);
    const msgpack_object *o = sl_status_get(map, path);
    if (o && o->type == MSGPACK_OBJECT_POSITIVE_INTEGER) return o->via.u64;
    return d > 0 && d < 1.8e19 ? (uint64_t)d : 0;
}

const char *sl_status_str(const msgpack_object *map, const char *path, char *buf, size_t cap) {
    const msgpack_object *o = sl_status_get(map, path);
    if (o && o->type == MSGPACK_OBJECT_STR)
        snprintf(buf, cap, "%.*s", (int)(o->via.str.size < cap ? o->via.str.size : cap - 1), o->via.str.ptr);
    else
        *buf = 0;
    return buf;
}

static void json_string(const char *s, uint32_t n, FILE *f) {
    fputc('"', f);
    for (uint32_t i = 0; i < n; i++) {
        unsigned char ch = (unsigned char)s[i];
        if (ch == '"' || ch == '\\')
            fprintf(f, "\\%c", ch);
        else if (ch < 0x20)
            fprintf(f, "\\u%04x", ch);
        else
            fputc(ch, f);
    }
    fputc('"', f);
}

void sl_status_json(const msgpack_object *o, FILE *f) {
    switch (o->type) {
    case MSGPACK_OBJECT_BOOLEAN:
        fputs(o->via.boolean ? "true" : "false", f);
        return;
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
        fprintf(f, "%llu", (unsigned long long)o->via.u64);
        return;
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
        fprintf(f, "%lld", (long long)o->via.i64);
        return;
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64:
        if (isfinite(o->via.f64))
            fprintf(f, "%.12g", o->via.f64);
        else
            fputs("null", f);
        return;
    case MSGPACK_OBJECT_STR:
        json_string(o->via.str.ptr, o->via.str.size, f);
        return;
    case MSGPACK_OBJECT_BIN:
        fputc('[', f);
        for (uint32_t i = 0; i < o->via.bin.size; i++)
            fprintf(f, "%s%u", i ? "," : "", (unsigned char)o->via.bin.ptr[i]);
        fputc(']', f);
        return;
    case MSGPACK_OBJECT_ARRAY:
        fputc('[', f);
        for (uint32_t i = 0; i < o->via.array.size; i++) {
            if (i) fputc(',', f);
            sl_status_json(&o->via.array.ptr[i], f);
        }
        fputc(']', f);
        return;
    case MSGPACK_OBJECT_MAP:
        fputc('{', f);
        for (uint32_t i = 0; i < o->via.map.size; i++) {
            if (i) fputc(',', f);
            sl_status_json(&o->via.map.ptr[i].key, f);
            fputc(':', f);
            sl_status_json(&o->via.map.ptr[i].val, f);
        }
        fputc('}', f);
        return;
    default:
        fputs("null", f);
    }
}
