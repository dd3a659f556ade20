/* input: every cut of compressed text, members in a row, damage, pipes, folders, and space given back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "tools/input.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

static char dir[64];
static sl_err e;

static const char *at(const char *name) {
    static char path[4][256];
    static int i;
    i = (i + 1) % 4;
    snprintf(path[i], sizeof path[i], "%s/%s", dir, name);
    return path[i];
}

static void put(const char *name, const void *data, size_t n) {
    FILE *f = fopen(at(name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

/* All text of an input; the result of the last call in *rc. */
static char *read_all(sl_input *in, size_t *n, int *rc) {
    struct stat st;
    while ((*rc = sl_input_more(in, &e)) == 1) {}
    assert_int_equal(sl_input_more(in, &e), 0); /* the end stays the end */
    assert_int_equal(fstat(sl_input_fd(in), &st), 0);
    char *s = malloc((size_t)st.st_size + 1);
    assert_int_equal(pread(sl_input_fd(in), s, (size_t)st.st_size, 0), st.st_size);
    *n = (size_t)st.st_size;
    return s;
}

static size_t gz(unsigned char *out, size_t cap, const char *s, size_t n) {
    z_stream z = {
        .next_in = (unsigned char *)(uintptr_t)s, .avail_in = (uInt)n, .next_out = out, .avail_out = (uInt)cap};
    assert_int_equal(deflateInit2(&z, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
    assert_int_equal(deflate(&z, Z_FINISH), Z_STREAM_END);
    deflateEnd(&z);
    return cap - z.avail_out;
}

static size_t zst(unsigned char *out, size_t cap, const char *s, size_t n) {
    size_t k = ZSTD_compress(out, cap, s, n, 3);
    assert_false(ZSTD_isError(k));
    return k;
}

static void same_text(const char *name, const char *want, size_t n) {
    sl_input *in;
    size_t k;
    int rc;
    if (sl_input_open(&in, at(name), dir, &e)) fail_msg("%s", e.msg);
    char *s = read_all(in, &k, &rc);
    if (rc) fail_msg("%s: %s", name, e.msg);
    assert_int_equal(k, n);
    assert_memory_equal(s, want, n);
    free(s);
    sl_input_close(in);
}

static void kinds(void **state) {
    (void)state;
    size_t n = 3 << 20;
    char *text = malloc(n);
    unsigned char *z = malloc(2 * n);
    uint32_t x = 1;
    for (size_t i = 0; i < n; i++) text[i] = (char)((x = x * 1664525 + 1013904223) >> 27 ? 'a' + (x >> 28) : '\n');
    put("plain", text, n);
    same_text("plain", text, n);
    put("g", z, gz(z, 2 * n, text, n));
    same_text("g", text, n);
    put("z", z, zst(z, 2 * n, text, n));
    same_text("z", text, n);
    for (int kind = 0; kind < 2; kind++) { /* two members, the first one empty, are one text */
        size_t (*pack)(unsigned char *, size_t, const char *, size_t) = kind ? zst : gz;
        size_t a = pack(z, 2 * n, "", 0), b = pack(z + a, 2 * n - a, text, 1000),
               c = pack(z + a + b, 2 * n - a - b, text + 1000, 5000);
        put("m", z, a + b + c);
        same_text("m", text, 6000);
    }
    put("empty", "", 0);
    same_text("empty", "", 0);
    free(text);
    free(z);
}

/* Cut at every byte: what comes out is a beginning of the text, and the cut is named. */
static void cuts(void **state) {
    (void)state;
    char text[600];
    unsigned char z[2000];
    for (size_t i = 0; i < sizeof text; i++) text[i] = (char)(' ' + i * i % 90);
    for (int kind = 0; kind < 2; kind++) {
        size_t n = (kind ? zst : gz)(z, sizeof z, text, sizeof text);
        for (size_t cut = kind ? 4 : 2; cut < n; cut++) {
            sl_input *in;
            size_t k;
            int rc;
            put("cut", z, cut);
            assert_int_equal(sl_input_open(&in, at("cut"), dir, &e), 0);
            char *s = read_all(in, &k, &rc);
            assert_int_equal(rc, SL_EDATA);
            assert_non_null(strstr(e.msg, "ends too early"));
            assert_non_null(strstr(e.msg, "/cut"));
            assert_true(k <= sizeof text && !memcmp(s, text, k));
            free(s);
            sl_input_close(in);
        }
        for (size_t at_byte = kind ? 4 : 2; at_byte < n;
             at_byte++) { /* damage: never a crash, never silence at the sum */
            sl_input *in;
            size_t k;
            int rc;
            z[at_byte] ^= 0x55;
            put("bad", z, n);
            assert_int_equal(sl_input_open(&in, at("bad"), dir, &e), 0);
            char *s = read_all(in, &k, &rc);
            if (at_byte + 4 >= n && !kind) assert_int_equal(rc, SL_EDATA); /* gzip's length */
            free(s);
            sl_input_close(in);
            z[at_byte] ^= 0x55;
        }
    }
}

static void pipes(void **state) {
    (void)state;
    int p[2], rc;
    sl_input *in;
    unsigned char z[1000];
    size_t n = zst(z, sizeof z, "one\ntwo\n", 8), k;
    assert_int_equal(mkfifo(at("fifo"), 0600), 0);
    p[0] = open(at("fifo"), O_RDONLY | O_NONBLOCK);
    p[1] = open(at("fifo"), O_WRONLY);
    assert_int_equal(sl_input_open(&in, at("fifo"), dir, &e), 0);
    assert_int_equal(sl_input_more(in, &e), 1); /* nothing yet, and it does not wait */
    assert_true(sl_input_wait_fd(in) >= 0);
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(write(p[1], z + i, 1), 1);
        assert_int_equal(sl_input_more(in, &e), 1);
    }
    close(p[1]);
    char *s = read_all(in, &k, &rc);
    assert_int_equal(rc, 0);
    assert_int_equal(k, 8);
    assert_memory_equal(s, "one\ntwo\n", 8);
    assert_int_equal(sl_input_wait_fd(in), -1);
    free(s);
    sl_input_close(in);
    close(p[0]);
}

static void space(void **state) {
    (void)state;
    size_t n = 40 << 20;
    char *text = calloc(1, n), c;
    unsigned char *z = malloc(1 << 20);
    struct stat a, b;
    sl_input *in;
    size_t k;
    int rc;
    memset(text, 'x', n);
    put("big", z, gz(z, 1 << 20, text, n));
    assert_int_equal(sl_input_open(&in, at("big"), dir, &e), 0);
    free(read_all(in, &k, &rc));
    assert_int_equal(rc, 0);
    assert_int_equal(k, n);
    fstat(sl_input_fd(in), &a);
    sl_input_forget(in, 33 << 20);
    fstat(sl_input_fd(in), &b);
    assert_int_equal(b.st_size, n); /* places do not move */
    if (b.st_blocks * 512 > a.st_blocks * 512 - (30 << 20)) print_message("this file system keeps the space\n");
    assert_int_equal(pread(sl_input_fd(in), &c, 1, 34 << 20), 1);
    assert_int_equal(c, 'x');
    sl_input_close(in);
    free(text);
    free(z);
}

static void lists(void **state) {
    (void)state;
    sl_input_list l;
    char sub[256], again[256];
    snprintf(sub, sizeof sub, "%s", at("sub"));
    assert_int_equal(mkdir(sub, 0700), 0);
    assert_int_equal(mkdir(at("sub/deeper.jsonl"), 0700), 0);
    const char *const files[] = {"sub/b.jsonl.zst", "sub/B.json", "sub/a10.ndjson",
                                 "sub/a9.jsonl.gz", "sub/x.csv",  "sub/.h.jsonl"};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) put(files[i], "", 0);
    const char *one[] = {sub, "-"};
    if (sl_input_list_make(&l, one, 2, NULL, &e)) fail_msg("%s", e.msg);
    const char *const want[] = {"sub/B.json", "sub/a10.ndjson", "sub/a9.jsonl", "sub/b.jsonl", "stdin"};
    assert_int_equal(l.n, 5);
    assert_int_equal(l.left_out, 3);
    for (int i = 0; i < 5; i++) assert_string_equal(l.v[i].dataset, want[i]);
    sl_input_list_free(&l);
    assert_int_equal(sl_input_list_make(&l, one, 1, "name", &e), SL_EUSAGE); /* four files, one name */
    sl_input_list_free(&l);
    put("sub/b.jsonl", "", 0); /* beside b.jsonl.zst */
    assert_int_equal(sl_input_list_make(&l, one, 1, NULL, &e), SL_EUSAGE);
    assert_non_null(strstr(e.msg, "'sub/b.jsonl'"));
    sl_input_list_free(&l);
    snprintf(again, sizeof again, "%s", at("none.jsonl"));
    const char *none[] = {again};
    assert_int_equal(sl_input_list_make(&l, none, 1, NULL, &e), SL_EUSAGE);
    sl_input_list_free(&l);
}

int main(void) {
    snprintf(dir, sizeof dir, "/tmp/sl_input_XXXXXX");
    if (!mkdtemp(dir)) return 2;
    const struct CMUnitTest tests[] = {cmocka_unit_test(kinds), cmocka_unit_test(cuts), cmocka_unit_test(pipes),
                                       cmocka_unit_test(space), cmocka_unit_test(lists)};
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    char cmd[96];
    snprintf(cmd, sizeof cmd, "rm -r %s", dir);
    return system(cmd) ? 2 : rc;
}
