/* Any bytes as a message: unpacked or refused; what is unpacked is walked to its last byte. */
#include "ipc/wire.h"

static volatile unsigned sink;

static void walk(const msgpack_object *o) {
    switch (o->type) {
    case MSGPACK_OBJECT_STR:
        for (uint32_t i = 0; i < o->via.str.size; i++) sink += (unsigned char)o->via.str.ptr[i];
        break;
    case MSGPACK_OBJECT_BIN:
        for (uint32_t i = 0; i < o->via.bin.size; i++) sink += (unsigned char)o->via.bin.ptr[i];
        break;
    case MSGPACK_OBJECT_ARRAY:
        for (uint32_t i = 0; i < o->via.array.size; i++) walk(&o->via.array.ptr[i]);
        break;
    case MSGPACK_OBJECT_MAP:
        for (uint32_t i = 0; i < o->via.map.size; i++) {
            walk(&o->via.map.ptr[i].key);
            walk(&o->via.map.ptr[i].val);
        }
        break;
    default:
        break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    msgpack_unpacked u;
    sl_err e;
    if (sl_wire_unpack(&u, data, size, &e)) return 0;
    walk(&u.data);
    uint64_t v;
    const char *s;
    const void *p;
    uint32_t n;
    sl_wire_u64(&u.data, "n", &v, &e);
    if (!sl_wire_str(&u.data, "t", &s, &n, &e)) sink += n ? (unsigned char)s[n - 1] : 0;
    if (!sl_wire_bin(&u.data, "ids", &p, &n, &e)) sink += n;
    msgpack_unpacked_destroy(&u);
    return 0;
}
