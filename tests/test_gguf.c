/* gguf: typed access, and every way in which a file can lie about itself. Files are built here byte by byte. */
#include "stages/compute/gguf.h"
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct buf {
    uint8_t b[8192];
    size_t n;
} buf;
static void put(buf *w, const void *p, size_t n) {
    memcpy(w->b + w->n, p, n);
    w->n += n;
}
static void u32(buf *w, uint32_t v) {
    put(w, &v, 4);
}
static void u64(buf *w, uint64_t v) {
    put(w, &v, 8);
}
static void str(buf *w, const char *s) {
    u64(w, strlen(s));
    put(w, s, strlen(s));
}
static void head(buf *w, uint32_t version, uint64_t tensors, uint64_t kvs) {
    put(w, "GGUF", 4);
    u32(w, version);
    u64(w, tensors);
    u64(w, kvs);
}
static void tensor(buf *w, const char *name, uint32_t dims, uint64_t a, uint64_t b, uint32_t type, uint64_t off) {
    str(w, name);
    u32(w, dims);
    u64(w, a);
    if (dims > 1) u64(w, b);
    u32(w, type);
    u64(w, off);
}
static void pad(buf *w, size_t align, size_t extra) {
    size_t n = (w->n + align - 1) / align * align + extra;
    memset(w->b + w->n, 0xa5, n - w->n);
    w->n = n;
}

/* Four metadata entries and two tensors: what the tests of damage start from. */
static void sample(buf *w) {
    w->n = 0;
    head(w, 3, 2, 5);
    str(w, "general.architecture"), u32(w, SL_GV_STR), str(w, "llama");
    str(w, "n"), u32(w, SL_GV_U32), u32(w, 7);
    str(w, "x"), u32(w, SL_GV_F32), put(w, &(float){1.5f}, 4);
    str(w, "words"), u32(w, SL_GV_ARR), u32(w, SL_GV_STR), u64(w, 3), str(w, "a"), str(w, ""), str(w, "ccc");
    str(w, "heads"), u32(w, SL_GV_ARR), u32(w, SL_GV_I32), u64(w, 2), u32(w, 5), u32(w, (uint32_t)-6);
    tensor(w, "t1", 2, 32, 2, 8, 0); /* Q8_0: 68 bytes */
    tensor(w, "t0", 1, 4, 1, 0, 96); /* F32: 16 bytes */
    pad(w, 32, 112);
}

static int open_buf(sl_gguf **g, const buf *w, size_t n, sl_err *err) {
    void *exact = malloc(n ? n : 1); /* so that a sanitizer sees one byte too far */
    memcpy(exact, w->b, n);
    memset(err, 0, sizeof *err);
    int rc = sl_gguf_open_mem(g, exact, n, err);
    if (rc) free(exact);
    return rc;
}
static void close_buf(sl_gguf *g) {
    uint64_t n;
    void *p = (void *)(uintptr_t)sl_gguf_meta(g, &n);
    sl_gguf_close(g);
    free(p);
}

static void test_access(void **state) {
    (void)state;
    buf w;
    sl_gguf *g;
    sl_err err;
    double v;
    uint64_t u;
    sl_gguf_str s;
    sample(&w);
    if (open_buf(&g, &w, w.n, &err)) fail_msg("%s", err.msg);
    assert_int_equal(sl_gguf_num(g, "n", &v), 0);
    assert_true(v == 7);
    assert_int_equal(sl_gguf_u64(g, "n", &u), 0);
    assert_int_equal(u, 7);
    assert_int_equal(sl_gguf_num(g, "x", &v), 0);
    assert_true(v == 1.5);
    assert_int_equal(sl_gguf_u64(g, "x", &u), -1);
    assert_int_equal(sl_gguf_num(g, "absent", &v), -1);
    assert_int_equal(sl_gguf_num(g, "general.architecture", &v), -1);
    assert_int_equal(sl_gguf_string(g, "n", &s), -1);
    assert_int_equal(sl_gguf_string(g, "general.architecture", &s), 0);
    assert_true(s.n == 5 && !memcmp(s.s, "llama", 5));
    assert_int_equal(sl_gguf_arr_len(g, "words"), 3);
    assert_int_equal(sl_gguf_arr_len(g, "n"), 0);
    assert_int_equal(sl_gguf_arr_str(g, "words", 2, &s), 0);
    assert_true(s.n == 3 && !memcmp(s.s, "ccc", 3));
    assert_int_equal(sl_gguf_arr_str(g, "words", 3, &s), -1);
    assert_int_equal(sl_gguf_arr_str(g, "heads", 0, &s), -1);
    assert_int_equal(sl_gguf_arr_num(g, "heads", 1, &v), 0);
    assert_true(v == -6);
    assert_int_equal(sl_gguf_num(g, "heads", &v), 0);
    assert_true(v == 5);
    assert_int_equal(sl_gguf_n_tensors(g), 2);
    const sl_gguf_tensor *t = sl_gguf_find(g, "t0");
    assert_true(t && t->bytes == 16 && t->ne[0] == 4 && t->ne[1] == 1);
    assert_true(sl_gguf_by_name(g, 0) == t && sl_gguf_tensor_at(g, 1) == t && !sl_gguf_tensor_at(g, 2));
    assert_int_equal(sl_gguf_find(g, "t1")->bytes, 68);
    assert_null(sl_gguf_find(g, "t"));
    assert_int_equal(((const uint8_t *)sl_gguf_data(g, t))[15], 0xa5);
    assert_string_equal(sl_ggml_type_name(12), "Q4_K");
    assert_null(sl_ggml_type_name(4));
    close_buf(g);
}

static void test_truncated(void **state) {
    (void)state;
    buf w;
    sl_gguf *g;
    sl_err err;
    sample(&w);
    for (size_t n = 0; n < w.n; n++) {
        if (!open_buf(&g, &w, n, &err)) fail_msg("cut at %zu of %zu was taken", n, w.n);
        assert_true(err.code == SL_EDATA || err.code == SL_ECONFIG);
        assert_true(strlen(err.msg) > 10);
    }
}

/* Every byte of the header set to several values: right or refused, never out of bounds (ASan watches). */
static void test_flipped(void **state) {
    (void)state;
    static const uint8_t to[] = {0, 1, 9, 0x7f, 0x80, 0xff};
    buf w;
    sl_gguf *g;
    sl_err err;
    sample(&w);
    for (size_t i = 0; i < w.n - 112; i++)
        for (size_t k = 0; k < sizeof to; k++) {
            uint8_t was = w.b[i];
            w.b[i] = to[k];
            if (!open_buf(&g, &w, w.n, &err)) {
                double v;
                sl_gguf_str s;
                for (uint64_t j = 0; j < 4; j++) {
                    sl_gguf_arr_str(g, "words", j, &s);
                    sl_gguf_arr_num(g, "heads", j, &v);
                }
                close_buf(g);
            }
            w.b[i] = was;
        }
}

static void refuse(buf *w, const char *says) {
    sl_gguf *g;
    sl_err err;
    if (!open_buf(&g, w, w->n, &err)) fail_msg("taken, expected: %s", says);
    if (!strstr(err.msg, says)) fail_msg("'%s' does not say '%s'", err.msg, says);
}
static void test_lies(void **state) {
    (void)state;
    buf w = {.n = 0};
    put(&w, "GGML\0\0\0\0........................", 32);
    refuse(&w, "not a GGUF");
    w.n = 0;
    head(&w, 1, 0, 0), pad(&w, 32, 0);
    refuse(&w, "version 1");
    w.n = 0;
    head(&w, 0x03000000, 0, 0), pad(&w, 32, 0);
    refuse(&w, "big-endian");
    w.n = 0;
    head(&w, 3, UINT64_C(1) << 60, 0), pad(&w, 32, 0);
    refuse(&w, "cannot hold");
    w.n = 0;
    head(&w, 3, 0, UINT64_C(1) << 60), pad(&w, 32, 0);
    refuse(&w, "cannot hold");
    w.n = 0;
    head(&w, 3, 0, 1), str(&w, "k"), u32(&w, SL_GV_ARR), u32(&w, SL_GV_STR), u64(&w, UINT64_C(1) << 61), pad(&w, 32, 0);
    refuse(&w, "array");
    w.n = 0;
    head(&w, 3, 0, 1), str(&w, "k"), u32(&w, SL_GV_STR), u64(&w, UINT64_MAX), pad(&w, 32, 0);
    refuse(&w, "claims 18446744073709551615 bytes");
    w.n = 0;
    head(&w, 3, 0, 1), str(&w, "k"), u32(&w, 13), pad(&w, 32, 64);
    refuse(&w, "value type 13");
    w.n = 0;
    head(&w, 3, 0, 2), str(&w, "k"), u32(&w, SL_GV_U32), u32(&w, 1), str(&w, "k"), u32(&w, SL_GV_U32), u32(&w, 1),
        pad(&w, 32, 0);
    refuse(&w, "'k' appears twice");
    w.n = 0;
    head(&w, 3, 0, 1), str(&w, "k"), u32(&w, SL_GV_ARR);
    for (int i = 0; i < 8; i++) u32(&w, SL_GV_ARR), u64(&w, 1);
    pad(&w, 32, 64);
    refuse(&w, "nested");
    w.n = 0;
    head(&w, 3, 0, 1), str(&w, "general.alignment"), u32(&w, SL_GV_U32), u32(&w, 0), pad(&w, 32, 0);
    refuse(&w, "general.alignment");
    static const float odd[] = {NAN, -NAN, INFINITY, -INFINITY, -32, 0.5f, 48.5f, 3e38f, 2097152};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) { /* a number is whatever type the file gives it */
        uint32_t bits;
        memcpy(&bits, &odd[i], 4);
        w.n = 0;
        head(&w, 3, 0, 1), str(&w, "general.alignment"), u32(&w, SL_GV_F32), u32(&w, bits), pad(&w, 32, 0);
        refuse(&w, "general.alignment");
    }
    w.n = 0;
    head(&w, 3, 1, 0), tensor(&w, "t", 2, UINT64_C(1) << 40, UINT64_C(1) << 40, 0, 0), pad(&w, 32, 64);
    refuse(&w, "absurd shape");
    w.n = 0;
    head(&w, 3, 1, 0), tensor(&w, "t", 2, 0, 4, 0, 0), pad(&w, 32, 64);
    refuse(&w, "absurd shape");
    w.n = 0;
    head(&w, 3, 1, 0), tensor(&w, "t", 1, 48, 1, 8, 0), pad(&w, 32, 64);
    refuse(&w, "not a multiple of the block of 32");
    w.n = 0;
    head(&w, 3, 1, 0), tensor(&w, "t", 1, 32, 1, 77, 0), pad(&w, 32, 64);
    refuse(&w, "ggml type 77");
    w.n = 0;
    head(&w, 3, 1, 0), tensor(&w, "t", 9, 32, 1, 0, 0), pad(&w, 32, 64);
    refuse(&w, "9 dimensions");
    w.n = 0;
    head(&w, 3, 1, 0), tensor(&w, "t", 1, 16, 1, 0, 4), pad(&w, 32, 128);
    refuse(&w, "alignment");
    w.n = 0;
    head(&w, 3, 1, 0), tensor(&w, "t", 1, 16, 1, 0, UINT64_MAX - 31), pad(&w, 32, 64);
    refuse(&w, "truncated or damaged");
    w.n = 0;
    head(&w, 3, 1, 0), tensor(&w, "t", 1, 17, 1, 0, 0), pad(&w, 32, 64);
    refuse(&w, "needs 68 bytes");
    w.n = 0;
    head(&w, 3, 2, 0), tensor(&w, "t", 1, 16, 1, 0, 0), tensor(&w, "u", 1, 16, 1, 0, 32), pad(&w, 32, 128);
    refuse(&w, "'t' and 'u' overlap");
    w.n = 0;
    head(&w, 3, 2, 0), tensor(&w, "t", 1, 16, 1, 0, 0), tensor(&w, "t", 1, 16, 1, 0, 64), pad(&w, 32, 128);
    refuse(&w, "'t' appears twice");
}

static void write_part(const char *path, uint32_t no, uint32_t count, uint32_t all, const char *name) {
    buf w = {.n = 0};
    head(&w, 3, 1, 3);
    str(&w, "split.no"), u32(&w, SL_GV_U32), u32(&w, no);
    str(&w, "split.count"), u32(&w, SL_GV_U32), u32(&w, count);
    str(&w, "split.tensors.count"), u32(&w, SL_GV_U32), u32(&w, all);
    tensor(&w, name, 1, 16, 1, 0, 0);
    pad(&w, 32, 64);
    FILE *f = fopen(path, "wb");
    fwrite(w.b, 1, w.n, f);
    fclose(f);
}
static void test_split(void **state) {
    (void)state;
    char dir[] = "/tmp/sl_gguf_XXXXXX", p1[128], p2[128], plain[128];
    sl_gguf *g;
    sl_err err = {0};
    assert_non_null(mkdtemp(dir));
    snprintf(p1, sizeof p1, "%s/m-00001-of-00002.gguf", dir);
    snprintf(p2, sizeof p2, "%s/m-00002-of-00002.gguf", dir);
    snprintf(plain, sizeof plain, "%s/m.gguf", dir);
    write_part(p1, 0, 2, 2, "a");
    assert_int_equal(sl_gguf_open(&g, p1, &err), SL_ECONFIG); /* the second is not there */
    assert_non_null(strstr(err.msg, "00002-of-00002"));
    write_part(p2, 1, 2, 2, "b");
    assert_int_equal(sl_gguf_open(&g, p1, &err), 0);
    assert_int_equal(sl_gguf_n_files(g), 2);
    assert_int_equal(sl_gguf_find(g, "b")->file, 1);
    assert_int_equal(((const uint8_t *)sl_gguf_data(g, sl_gguf_find(g, "b")))[0], 0xa5);
    assert_string_equal(sl_gguf_path(g, 1), p2);
    sl_gguf_close(g);
    assert_int_equal(sl_gguf_open(&g, p2, &err), SL_ECONFIG);
    assert_non_null(strstr(err.msg, "part 2 of 2"));
    write_part(p2, 1, 2, 2, "a");
    assert_int_equal(sl_gguf_open(&g, p1, &err), SL_EDATA); /* the same name in both */
    write_part(p2, 0, 2, 2, "b");
    assert_int_equal(sl_gguf_open(&g, p1, &err), SL_EDATA); /* the parts are mixed up */
    write_part(p2, 1, 2, 2, "b");
    write_part(p1, 0, 2, 3, "a");
    assert_int_equal(sl_gguf_open(&g, p1, &err), SL_EDATA); /* one tensor less than promised */
    write_part(plain, 0, 2, 2, "a");
    assert_int_equal(sl_gguf_open(&g, plain, &err), SL_ECONFIG); /* a split file without its number */
    assert_int_equal(sl_gguf_open(&g, dir, &err), SL_ECONFIG);
    unlink(p1), unlink(p2), unlink(plain), rmdir(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_access), cmocka_unit_test(test_truncated),
                                       cmocka_unit_test(test_flipped), cmocka_unit_test(test_lies),
                                       cmocka_unit_test(test_split)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
