/* safetensors: the golden files as they are, cut at every byte of the header, and headers that lie. argv[1]:
 * tests/golden. */
#include "stages/compute/safetensors.h"
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *golden;

static int open_text(sl_st **s, const char *json, uint64_t data, sl_err *err) {
    uint64_t n = strlen(json);
    char *b = malloc(8 + n); /* exact, so that a sanitizer sees one byte too far */
    memcpy(b, &n, 8);
    memcpy(b + 8, json, n);
    memset(err, 0, sizeof *err);
    int rc = sl_st_open_mem(s, b, 8 + n, 8 + n + data, err);
    free(b);
    return rc;
}

static void test_golden(void **state) {
    (void)state;
    char path[1024];
    sl_st *s;
    sl_err err = {0};
    snprintf(path, sizeof path, "%s/deepseek_v3", golden);
    if (sl_st_open(&s, path, &err)) fail_msg("%s", err.msg);
    assert_int_equal(sl_st_n_files(s), 7);
    const sl_st_tensor *t = sl_st_find(s, "model.layers.0.self_attn.q_a_proj.weight");
    assert_true(t && t->dtype == SL_ST_BF16 && t->n_dims == 2 && t->shape[0] == 48 && t->shape[1] == 64 &&
                t->shape[2] == 1 && t->bytes == 48 * 64 * 2);
    assert_null(sl_st_find(s, "model.layers.0.self_attn.q_a_proj.weigh"));
    for (uint64_t i = 1; i < sl_st_n_tensors(s); i++)
        assert_true(strcmp(sl_st_at(s, i - 1)->name, sl_st_at(s, i)->name) < 0);
    assert_null(sl_st_at(s, sl_st_n_tensors(s)));
    sl_st_close(s);
}

static void test_good(void **state) {
    (void)state;
    sl_st *s;
    sl_err err;
    if (open_text(&s,
                  " {\"b\\u00e9\\\"\":{\"shape\":[],\"dtype\":\"F32\",\"data_offsets\":[0,4]} , "
                  "\"__metadata__\":{\"a\":\"b\",\"deep\":[{\"x\":[1.5e3,null,true]}]},\"z\":{\"dtype\":\"I64\","
                  "\"shape\":[0],\"data_offsets\":[4,4]}}  ",
                  4, &err))
        fail_msg("%s", err.msg);
    assert_int_equal(sl_st_n_tensors(s), 2);
    assert_non_null(sl_st_find(s, "b\xc3\xa9\""));
    sl_st_close(s);
    assert_int_equal(open_text(&s, "{}", 0, &err), 0);
    sl_st_close(s);
}

#define T(name, rest) "\"" name "\":{\"dtype\":\"F32\"," rest "}"
static const struct {
    const char *json;
    uint64_t data;
    const char *says;
} bad[] = {
    {"", 0, "bytes are too few"},
    {"[]", 0, "expected '{'"},
    {"{\"a\":1}", 0, "expected '{'"},
    {"{" T("a", "\"shape\":[2],\"data_offsets\":[0,8]") "", 8, "expected '}'"},
    {"{" T("a", "\"shape\":[2],\"data_offsets\":[0,8]") "}x", 8, "after the header"},
    {"{" T("a", "\"shape\":[2],\"data_offsets\":[0,8]") "," T("a", "\"shape\":[2],\"data_offsets\":[8,16]") "}", 16,
     "'a' appears twice"},
    {"{" T("a", "\"shape\":[3],\"data_offsets\":[0,8]") "}", 8, "do not span the 12 bytes"},
    {"{" T("a", "\"shape\":[2],\"data_offsets\":[8,0]") "}", 8, "do not span"},
    {"{" T("a", "\"shape\":[2],\"data_offsets\":[0,8]") "}", 7, "truncated"},
    {"{" T("a", "\"shape\":[2],\"data_offsets\":[0,8]") "}", 9, "1 bytes after the last tensor"},
    {"{" T("a", "\"shape\":[2],\"data_offsets\":[4,12]") "}", 12, "4 bytes before tensor 'a'"},
    {"{" T("a", "\"shape\":[2],\"data_offsets\":[0,8]") "," T("b", "\"shape\":[2],\"data_offsets\":[4,12]") "}", 12,
     "'a' and 'b' overlap"},
    {"{" T("a", "\"shape\":[4611686018427387904,4],\"data_offsets\":[0,8]") "}", 8, "absurd shape"},
    {"{" T("a", "\"shape\":[99999999999999999999],\"data_offsets\":[0,8]") "}", 8, "too large"},
    {"{" T("a", "\"shape\":[-2],\"data_offsets\":[0,8]") "}", 8, "non-negative"},
    {"{" T("a", "\"shape\":[2.0],\"data_offsets\":[0,8]") "}", 8, "expected ']'"},
    {"{" T("a", "\"shape\":[1,1,1,1,1,1,1,1,2],\"data_offsets\":[0,8]") "}", 8, "more than 8 dimensions"},
    {"{" T("a", "\"shape\":[2],\"shape\":[2],\"data_offsets\":[0,8]") "}", 8, "a second field 'shape'"},
    {"{" T("a", "\"shape\":[2],\"size\":8,\"data_offsets\":[0,8]") "}", 8, "an unknown field 'size'"},
    {"{" T("a", "\"shape\":[2]") "}", 8, "lacks"},
    {"{\"a\":{\"dtype\":\"F4\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "dtype 'F4'"},
    {"{\"a\\u0000\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "NUL"},
    {"{\"a\\ud800\":{}}", 8, "surrogate"},
    {"{\"a\n\":{}}", 8, "control character"},
    {"{\"__metadata__\":[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]}", 0,
     "nested too deeply"},
};
static void test_bad(void **state) {
    (void)state;
    sl_st *s;
    sl_err err;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int rc = open_text(&s, bad[i].json, bad[i].data, &err);
        if (rc != SL_EDATA) fail_msg("'%s' gave %d", bad[i].json, rc);
        if (!strstr(err.msg, bad[i].says)) fail_msg("'%s' does not say '%s'", err.msg, bad[i].says);
    }
}

static void test_claims(void **state) { /* a header of 2 GB, and of almost 2^64 bytes */
    (void)state;
    uint64_t b[4] = {UINT64_C(2) << 30, 0, 0, 0};
    sl_st *s;
    sl_err err = {0};
    assert_int_equal(sl_st_open_mem(&s, b, sizeof b, UINT64_C(4) << 30, &err), SL_EDATA);
    assert_non_null(strstr(err.msg, "2147483648"));
    b[0] = UINT64_MAX - 3;
    assert_int_equal(sl_st_open_mem(&s, b, sizeof b, sizeof b, &err), SL_EDATA);
}

static void test_truncated(void **state) {
    (void)state;
    char path[1024];
    sl_st *s;
    sl_err err = {0};
    snprintf(path, sizeof path, "%s/smollm/model.safetensors", golden);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    static char b[1 << 16];
    size_t n = fread(b, 1, sizeof b, f);
    fclose(f);
    uint64_t header;
    memcpy(&header, b, 8);
    assert_true(8 + header < n);
    for (uint64_t cut = 10; cut < 8 + header; cut += 3) {
        char *exact = malloc(cut);
        uint64_t claim = cut - 8;
        memcpy(exact, b, cut);
        memcpy(exact, &claim, 8); /* the size agrees: the JSON is what is cut */
        if (!sl_st_open_mem(&s, exact, cut, cut + (1 << 20), &err))
            fail_msg("cut at %llu was taken", (unsigned long long)cut);
        free(exact);
    }
}

/* ---- folders ---- */

static char dir[64];
static void put(const char *name, const char *json, const char *head_of) { /* head_of: tensor data follows a header */
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    uint64_t n = strlen(json);
    if (head_of) fwrite(&n, 8, 1, f);
    fwrite(json, 1, n, f);
    if (head_of) fwrite(head_of, 1, 8, f);
    fclose(f);
}
static void expect(int code, const char *says) {
    sl_st *s;
    sl_err err = {0};
    int rc = sl_st_open(&s, dir, &err);
    if (rc != code) fail_msg("%d '%s', expected %d '%s'", rc, err.msg, code, says);
    if (!rc)
        sl_st_close(s);
    else if (!strstr(err.msg, says))
        fail_msg("'%s' does not say '%s'", err.msg, says);
}
static void test_folder(void **state) {
    (void)state;
    static const char index[] = "model.safetensors.index.json";
    strcpy(dir, "/tmp/sl_st_XXXXXX");
    assert_non_null(mkdtemp(dir));
    expect(SL_ECONFIG, "neither model.safetensors nor");
    put(index,
        "{\"metadata\":{\"total_size\":16},\"weight_map\":{\"a\":\"one.safetensors\",\"b\":\"two.safetensors\"}}",
        NULL);
    expect(SL_ECONFIG, "one.safetensors");
    put("one.safetensors", "{" T("a", "\"shape\":[2],\"data_offsets\":[0,8]") "}", "01234567");
    put("two.safetensors", "{" T("b", "\"shape\":[2],\"data_offsets\":[0,8]") "}", "01234567");
    expect(0, "");
    put("two.safetensors", "{" T("c", "\"shape\":[2],\"data_offsets\":[0,8]") "}", "01234567");
    expect(SL_EDATA, "'b' (in two.safetensors)");
    put("two.safetensors", "{" T("a", "\"shape\":[2],\"data_offsets\":[0,8]") "}", "01234567");
    expect(SL_EDATA, "'a' appears twice");
    put(index, "{\"weight_map\":{\"a\":\"../one.safetensors\"}}", NULL);
    expect(SL_EDATA, "not a plain file name");
    put(index, "{\"weight_map\":{\"a\":[]}}", NULL);
    expect(SL_EDATA, "malformed JSON");
    put(index, "{\"metadata\":{}}", NULL);
    expect(SL_EDATA, "no weight_map");
    put(index, "{\"weight_map\":{\"a\":\"gone.safetensors\"}}", NULL);
    expect(SL_ECONFIG, "names a file that is not there");
    put("model.safetensors", "{}", NULL);
    expect(SL_EDATA, "too few");
    char cmd[128];
    snprintf(cmd, sizeof cmd, "rm -r %s", dir);
    assert_int_equal(system(cmd), 0);
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    golden = argv[1];
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_golden),    cmocka_unit_test(test_good),
                                       cmocka_unit_test(test_bad),       cmocka_unit_test(test_claims),
                                       cmocka_unit_test(test_truncated), cmocka_unit_test(test_folder)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
