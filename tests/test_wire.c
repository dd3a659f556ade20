/* wire: well-formed messages come through, hostile ones are refused before anything is allocated. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "ipc/wire.h"
#include <stdlib.h>
#include <string.h>

static sl_err e;

static int unpack(const void *p, size_t n) {
    msgpack_unpacked u;
    int rc = sl_wire_unpack(&u, p, n, &e);
    if (!rc) msgpack_unpacked_destroy(&u);
    return rc;
}

static void round_trip(void **state) {
    (void)state;
    msgpack_sbuffer sb;
    msgpack_packer pk;
    msgpack_sbuffer_init(&sb);
    msgpack_packer_init(&pk, &sb, msgpack_sbuffer_write);
    msgpack_pack_map(&pk, 5);
    sl_wire_kstr(&pk, "t", "rows");
    sl_wire_ku64(&pk, "n", UINT64_MAX);
    sl_wire_kdbl(&pk, "x", 1.5);
    sl_wire_key(&pk, "b");
    msgpack_pack_bin(&pk, 70000);
    char *big = calloc(1, 70000);
    big[69999] = 'z';
    msgpack_pack_bin_body(&pk, big, 70000);
    sl_wire_key(&pk, "neg");
    msgpack_pack_int(&pk, -3);
    msgpack_unpacked u;
    assert_int_equal(sl_wire_unpack(&u, sb.data, sb.size, &e), 0);
    const char *s;
    const void *p;
    uint32_t n;
    uint64_t v;
    assert_int_equal(sl_wire_str(&u.data, "t", &s, &n, &e), 0);
    assert_int_equal(n, 4);
    assert_memory_equal(s, "rows", 4);
    assert_int_equal(sl_wire_u64(&u.data, "n", &v, &e), 0);
    assert_true(v == UINT64_MAX);
    assert_int_equal(sl_wire_bin(&u.data, "b", &p, &n, &e), 0);
    assert_int_equal(n, 70000);
    assert_memory_equal(p, big, n);
    assert_true(sl_wire_get(&u.data, "x")->via.f64 == 1.5);
    assert_int_equal(sl_wire_u64(&u.data, "neg", &v, &e), SL_EDATA);
    assert_string_equal(e.msg, "field 'neg': found a negative integer, expected an integer >= 0");
    assert_int_equal(sl_wire_str(&u.data, "n", &s, &n, &e), SL_EDATA);
    assert_int_equal(sl_wire_bin(&u.data, "t", &p, &n, &e), SL_EDATA);
    assert_int_equal(sl_wire_u64(&u.data, "absent", &v, &e), SL_EDATA);
    assert_string_equal(e.msg, "field 'absent': found nothing, expected an integer >= 0");
    assert_null(sl_wire_get(&u.data, "tt"));
    for (size_t i = 0; i < sb.size; i += i < 100 ? 1 : 997) /* every cut is an error, none reads on */
        assert_int_equal(unpack(sb.data, i), SL_EDATA);
    msgpack_unpacked_destroy(&u);
    msgpack_sbuffer_destroy(&sb);
    free(big);
}

static void refuses_hostile(void **state) {
    (void)state;
    const struct {
        size_t n;
        const char *bytes;
    } bad[] = {
        {0, ""},
        {1, "\x90"},                          /* not a map */
        {1, "\xc0"},                          /* nil */
        {2, "\x80\x80"},                      /* two objects */
        {5, "\xdf\xff\xff\xff\xff"},          /* map of 2^32 - 1 */
        {7, "\x81\xa1x\xdd\xff\xff\xff"},     /* cut in a count */
        {8, "\x81\xa1x\xdd\xff\xff\xff\xff"}, /* array of 2^32 - 1 */
        {8, "\x81\xa1x\xc6\xff\xff\xff\xff"}, /* 4 GiB of binary */
        {8, "\x81\xa1x\xdb\x7f\xff\xff\xff"}, /* 2 GiB of string */
        {4, "\x81\xa1x\xc1"},                 /* never used */
        {6, "\x81\xa1x\xc7\x00\x01"},         /* ext */
        {3, "\x81\xa1x"},                     /* key without value */
        {11, "\x81\xa1x\xcf\x01\x02\x03\x04\x05\x06\x07"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char *exact = malloc(bad[i].n + !bad[i].n); /* exact size: a read past the end is seen by ASan */
        memcpy(exact, bad[i].bytes, bad[i].n);
        if (unpack(exact, bad[i].n) != SL_EDATA) fail_msg("message %zu was taken", i);
        free(exact);
    }
}

/* Every encoding of a value: taken whole, as the last byte of a message, and refused with a byte less or more. */
static void every_type(void **state) {
    (void)state;
    const struct {
        size_t n;
        const char *bytes;
    } good[] = {
        {1, "\x00"},         {1, "\x7f"},
        {1, "\xe0"},         {1, "\xff"},
        {1, "\xc0"},         {1, "\xc2"},
        {1, "\xc3"},         {1, "\xa0"},
        {1, "\x80"},         {1, "\x90"},
        {3, "\xc4\x01y"},    {4, "\xc5\x00\x01y"},
        {5, "\xca\0\0\0\0"}, {6, "\xc6\x00\x00\x00\x01y"},
        {2, "\xcc\x01"},     {9, "\xcb\0\0\0\0\0\0\0\0"},
        {3, "\xcd\x00\x01"}, {5, "\xce\0\0\0\x01"},
        {2, "\xd0\x01"},     {9, "\xcf\0\0\0\0\0\0\0\x01"},
        {3, "\xd1\x00\x01"}, {5, "\xd2\0\0\0\x01"},
        {3, "\xd9\x01y"},    {9, "\xd3\0\0\0\0\0\0\0\x01"},
        {2, "\x91\xc0"},     {4, "\xda\x00\x01y"},
        {2, "\xa1y"},        {6, "\xdb\x00\x00\x00\x01y"},
        {3, "\x81\xc0\xc0"}, {5, "\xdc\x00\x02\xc0\xc0"},
        {2, "\xcc\xff"},     {7, "\xdd\x00\x00\x00\x02\xc0\xc0"},
        {2, "\xd0\xff"},     {7, "\xde\x00\x02\xc0\xc0\xc0\xc0"},
        {1, "\x01"},         {9, "\xdf\x00\x00\x00\x02\xc0\xc0\xc0\xc0"},
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        size_t n = 3 + good[i].n;
        char *m = malloc(n + 1);
        memcpy(m, "\x81\xa1x", 3);
        memcpy(m + 3, good[i].bytes, good[i].n);
        m[n] = '\xc0';
        for (size_t cut = 0; cut < 3; cut++) {
            char *exact = malloc(n + 1 - cut);
            memcpy(exact, m, n + 1 - cut);
            if (unpack(exact, n + 1 - cut) != (cut == 1 ? 0 : SL_EDATA))
                fail_msg("type %02x with %zu bytes of %zu", (uint8_t)m[3], n + 1 - cut, n);
            free(exact);
        }
        free(m);
    }
}

static void fields_that_are_not_there(void **state) {
    (void)state;
    msgpack_unpacked u;
    const char *s;
    const void *p;
    uint32_t n;
    assert_int_equal(sl_wire_unpack(&u, "\x81\xa1x\x01", 4, &e), 0);
    assert_null(sl_wire_get(&u.data.via.map.ptr[0].val, "x")); /* not a map */
    assert_null(sl_wire_get(&u.data, "xx"));
    assert_null(sl_wire_get(&u.data, ""));
    assert_int_equal(sl_wire_str(&u.data, "y", &s, &n, &e), SL_EDATA);
    assert_int_equal(sl_wire_bin(&u.data, "y", &p, &n, &e), SL_EDATA);
    assert_string_equal(e.msg, "field 'y': found nothing, expected binary");
    msgpack_unpacked_destroy(&u);
    assert_int_equal(unpack("\x80", (size_t)SL_WIRE_MAX + 1), SL_EDATA); /* refused before it is looked at */
    assert_non_null(strstr(e.msg, "at most"));
}

static size_t nested(uint8_t *p, unsigned depth) { /* {"x": [[[...]]]}: containers in all = depth */
    size_t n = 0;
    p[n++] = 0x81;
    p[n++] = 0xa1;
    p[n++] = 'x';
    for (unsigned i = 1; i < depth; i++) p[n++] = i + 1 < depth ? 0x91 : 0x90;
    return n;
}

static void limits_depth_and_items(void **state) {
    (void)state;
    uint8_t p[200];
    assert_int_equal(unpack(p, nested(p, 2)), 0);
    size_t n = nested(p, SL_WIRE_DEPTH);
    assert_int_equal(unpack(p, n), 0);
    n = nested(p, SL_WIRE_DEPTH + 1);
    assert_int_equal(unpack(p, n), SL_EDATA);
    assert_non_null(strstr(e.msg, "nested deeper"));
    p[n - 1] = 0x80; /* an empty map is a container too */
    assert_int_equal(unpack(p, n), SL_EDATA);
    size_t big = (5u << 20) + 8; /* five million nils: more objects than a message may have */
    uint8_t *m = malloc(big);
    memset(m, 0xc0, big);
    memcpy(m, "\x81\xa1x\xdd\x00\x50\x00\x00", 8);
    assert_int_equal(unpack(m, big), SL_EDATA);
    assert_non_null(strstr(e.msg, "objects"));
    free(m);
}

int main(void) {
    const struct CMUnitTest t[] = {cmocka_unit_test(round_trip), cmocka_unit_test(refuses_hostile),
                                   cmocka_unit_test(every_type), cmocka_unit_test(fields_that_are_not_there),
                                   cmocka_unit_test(limits_depth_and_items)};
    return cmocka_run_group_tests_name("wire", t, NULL, NULL);
}
