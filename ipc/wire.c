#include "ipc/wire.h"
#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_ITEMS (4u << 20) /* objects a message: bounds what unpacking may allocate (about 50 bytes each) */

int sl_wire_access(const char *addr, uint32_t gid1, sl_err *err) {
    if (strncmp(addr, "ipc://", 6) != 0 || addr[6] == '@') return 0;
    const char *path = addr + 6;
    if ((gid1 && chown(path, (uid_t)-1, gid1 - 1)) || chmod(path, gid1 ? 0660 : 0600))
        return sl_err_sys(err, SL_ECONFIG, errno, "giving the socket %s its group and mode", path);
    return 0;
}

/* One item's shape, read from its first bytes. */
typedef struct item {
    uint64_t head;     /* bytes of the header */
    uint64_t body;     /* bytes of string or binary data after it */
    uint64_t children; /* objects inside */
    bool box;          /* an array or a map */
} item;

static uint64_t be(const uint8_t *p, unsigned n) {
    uint64_t v = 0;
    for (unsigned i = 0; i < n; i++) v = v << 8 | p[i];
    return v;
}

/* The msgpack types 0xc0..0xdf: bytes of header behind the first, and which count they hold. 'x' is refused. */
static bool item_typed(const uint8_t *p, uint64_t left, item *it) {
    static const struct {
        uint8_t bytes;
        char what; /* '-' nothing inside, 'b' body of that many bytes, 'a' array, 'm' map, 'x' never used or ext */
    } t[32] = {{0, '-'}, {0, 'x'}, {0, '-'}, {0, '-'}, {1, 'b'}, {2, 'b'}, {4, 'b'}, {0, 'x'},
               {0, 'x'}, {0, 'x'}, {4, '-'}, {8, '-'}, {1, '-'}, {2, '-'}, {4, '-'}, {8, '-'},
               {1, '-'}, {2, '-'}, {4, '-'}, {8, '-'}, {0, 'x'}, {0, 'x'}, {0, 'x'}, {0, 'x'},
               {0, 'x'}, {1, 'b'}, {2, 'b'}, {4, 'b'}, {2, 'a'}, {4, 'a'}, {2, 'm'}, {4, 'm'}};
    unsigned i = p[0] - 0xc0u;
    if (t[i].what == 'x' || left < 1u + t[i].bytes) return false;
    it->head = 1u + t[i].bytes;
    uint64_t n = t[i].what == '-' ? 0 : be(p + 1, t[i].bytes);
    if (t[i].what == 'b') it->body = n;
    it->box = t[i].what == 'a' || t[i].what == 'm';
    if (t[i].what == 'a') it->children = n;
    if (t[i].what == 'm') it->children = 2 * n;
    return true;
}

static bool item_read(const uint8_t *p, uint64_t left, item *it) {
    *it = (item){.head = 1};
    if (!left) return false;
    uint8_t b = p[0];
    if (b < 0x80 || b >= 0xe0) return true;
    it->box = b < 0xa0;
    if (b < 0x90)
        it->children = 2 * (uint64_t)(b & 0x0f);
    else if (b < 0xa0)
        it->children = b & 0x0f;
    else if (b < 0xc0)
        it->body = b & 0x1f;
    else
        return item_typed(p, left, it);
    return true;
}

/* Walk the whole message without allocating: it must be one object, complete, not deeper than SL_WIRE_DEPTH, with every
 * count payable from the bytes that are there. */
static int prescan(const uint8_t *p, uint64_t len, sl_err *err) {
    uint64_t todo[SL_WIRE_DEPTH + 1], at = 0, items = 0;
    unsigned depth = 0;
    todo[0] = 1;
    for (;;) {
        while (depth && !todo[depth]) depth--;
        if (!depth && !todo[0]) break;
        todo[depth]--;
        item it;
        if (!item_read(p + at, len - at, &it))
            return sl_err_set(err, SL_EDATA, "message: byte %" PRIu64 " of %" PRIu64 ": cut short or not a known type",
                              at, len);
        if (++items > MAX_ITEMS) return sl_err_set(err, SL_EDATA, "message: more than %u objects", MAX_ITEMS);
        if (it.body > len - at - it.head || it.children > len - at - it.head)
            return sl_err_set(err, SL_EDATA,
                              "message: byte %" PRIu64 ": claims more than the %" PRIu64 " bytes there are", at, len);
        at += it.head + it.body;
        if (it.box && depth == SL_WIRE_DEPTH)
            return sl_err_set(err, SL_EDATA, "message: byte %" PRIu64 ": nested deeper than %d", at, SL_WIRE_DEPTH);
        if (it.children) todo[++depth] = it.children;
    }
    if (at != len) return sl_err_set(err, SL_EDATA, "message: %" PRIu64 " bytes behind its end", len - at);
    return 0;
}

int sl_wire_unpack(msgpack_unpacked *out, const void *buf, size_t len, sl_err *err) {
    msgpack_unpacked_init(out);
    if (len > SL_WIRE_MAX) return sl_err_set(err, SL_EDATA, "message: %zu bytes, at most %u", len, SL_WIRE_MAX);
    int rc = prescan(buf, len, err);
    if (rc) return rc;
    size_t off = 0;
    if (msgpack_unpack_next(out, buf, len, &off) != MSGPACK_UNPACK_SUCCESS || off != len) {
        msgpack_unpacked_destroy(out);
        return sl_err_set(err, SL_EDATA, "message: not one msgpack object of %zu bytes", len);
    }
    if (out->data.type != MSGPACK_OBJECT_MAP) {
        msgpack_unpacked_destroy(out);
        return sl_err_set(err, SL_EDATA, "message: not a map");
    }
    return 0;
}

const msgpack_object *sl_wire_get(const msgpack_object *map, const char *key) {
    if (map->type != MSGPACK_OBJECT_MAP) return NULL;
    size_t n = strlen(key);
    for (uint32_t i = 0; i < map->via.map.size; i++) {
        const msgpack_object *k = &map->via.map.ptr[i].key;
        if (k->type == MSGPACK_OBJECT_STR && k->via.str.size == n && !memcmp(k->via.str.ptr, key, n))
            return &map->via.map.ptr[i].val;
    }
    return NULL;
}

static const char *type_name(const msgpack_object *o) {
    if (!o) return "nothing";
    switch (o->type) {
    case MSGPACK_OBJECT_NIL:
        return "nil";
    case MSGPACK_OBJECT_BOOLEAN:
        return "a boolean";
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
        return "an integer";
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
        return "a negative integer";
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64:
        return "a float";
    case MSGPACK_OBJECT_STR:
        return "a string";
    case MSGPACK_OBJECT_BIN:
        return "binary";
    case MSGPACK_OBJECT_ARRAY:
        return "an array";
    case MSGPACK_OBJECT_MAP:
        return "a map";
    default:
        return "something else";
    }
}

static int wrong(const char *key, const msgpack_object *o, const char *want, sl_err *err) {
    return sl_err_set(err, SL_EDATA, "field '%s': found %s, expected %s", key, type_name(o), want);
}

int sl_wire_u64(const msgpack_object *map, const char *key, uint64_t *out, sl_err *err) {
    const msgpack_object *o = sl_wire_get(map, key);
    if (!o || o->type != MSGPACK_OBJECT_POSITIVE_INTEGER) return wrong(key, o, "an integer >= 0", err);
    *out = o->via.u64;
    return 0;
}

int sl_wire_str(const msgpack_object *map, const char *key, const char **s, uint32_t *len, sl_err *err) {
    const msgpack_object *o = sl_wire_get(map, key);
    if (!o || o->type != MSGPACK_OBJECT_STR) return wrong(key, o, "a string", err);
    *s = o->via.str.ptr;
    *len = o->via.str.size;
    return 0;
}

int sl_wire_bin(const msgpack_object *map, const char *key, const void **p, uint32_t *len, sl_err *err) {
    const msgpack_object *o = sl_wire_get(map, key);
    if (!o || o->type != MSGPACK_OBJECT_BIN) return wrong(key, o, "binary", err);
    *p = o->via.bin.ptr;
    *len = o->via.bin.size;
    return 0;
}

void sl_wire_key(msgpack_packer *pk, const char *key) {
    size_t n = strlen(key);
    msgpack_pack_str(pk, n);
    msgpack_pack_str_body(pk, key, n);
}

void sl_wire_kstr(msgpack_packer *pk, const char *key, const char *val) {
    sl_wire_key(pk, key);
    sl_wire_key(pk, val);
}

void sl_wire_ku64(msgpack_packer *pk, const char *key, uint64_t val) {
    sl_wire_key(pk, key);
    msgpack_pack_uint64(pk, val);
}

void sl_wire_kdbl(msgpack_packer *pk, const char *key, double val) {
    sl_wire_key(pk, key);
    msgpack_pack_double(pk, val);
}
