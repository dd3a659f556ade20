/* rows: what is taken, what is refused, and that a refusal says what was found where. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "stages/feeder/rows.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *line;
    sl_reason reason;
    const char *says;
} refused[] = {
    {"{\"text\": \"a\"", SL_R_JSON, "byte"},
    {"", SL_R_JSON, ""},
    {"[1,2]", SL_R_JSON, "a list"},
    {"42", SL_R_JSON, "expected a JSON object, found an integer"},
    {"null", SL_R_JSON, "expected a JSON object, found null"},
    {"\xef\xbb\xbf[1]", SL_R_JSON, "a list"},
    {"\xff\xfe{", SL_R_ENCODING, "UTF-16"},
    {"{\"input_ids\":[1],\"loss_mask\":[2]}", SL_R_FIELDS, "expected 0 or 1, found 2"},
    {"{\"text\":\"a\",\"text\":\"b\"}", SL_R_JSON, "duplicate"},
    {"{\"text\":\"a\"} x", SL_R_JSON, "byte"},
    {"{\"text\":\"\\ud800\"}", SL_R_ENCODING, "Unicode"},
    {"{\"text\":\"\xff\"}", SL_R_ENCODING, "0xff"},
    {"{\"text\":\"\xed\xa0\x80\"}", SL_R_ENCODING, "byte 9"},
    {"{\"text\":\"\xc0\x80\"}", SL_R_ENCODING, "byte 9"},
    {"{\"text\":\"\xe2\x82\xac\xe2\x82\"}", SL_R_ENCODING, "byte 12"},
    {"{\"text\":\"\xf0\x9f\x98\x41\"}", SL_R_ENCODING, "byte 9"},
    {"{\"text\":\"\xf4\x90\x80\x80\"}", SL_R_ENCODING, "byte 9"},
    {"{\"text\":\"\xf5\x80\x80\x80\"}", SL_R_ENCODING, "byte 9"},
    {"{\"text\":5}", SL_R_FIELDS, "an integer"},
    {"{\"text\":\"\"}", SL_R_EMPTY, "text"},
    {"{\"txt\":\"a\"}", SL_R_FIELDS, "input_ids"},
    {"{\"input_ids\":[]}", SL_R_EMPTY, "input_ids"},
    {"{\"input_ids\":[1,\"2\"]}", SL_R_FIELDS, "input_ids[1]"},
    {"{\"input_ids\":[1,2.0]}", SL_R_FIELDS, "input_ids[1]"},
    {"{\"input_ids\":[1,100]}", SL_R_VOCAB, "input_ids[1] is 100"},
    {"{\"input_ids\":[-1]}", SL_R_VOCAB, "input_ids[0] is -1"},
    {"{\"input_ids\":[99999999999999999999]}", SL_R_JSON, "big integer"},
    {"{\"input_ids\":[1,2],\"loss_mask\":[1]}", SL_R_LENGTHS, "2 entries, loss_mask 1"},
    {"{\"input_ids\":[1,2],\"loss_mask\":[1,2]}", SL_R_FIELDS, "loss_mask[1]"},
    {"{\"messages\":[]}", SL_R_EMPTY, "messages"},
    {"{\"messages\":[{\"role\":\"gpt-4\",\"content\":\"x\"}]}", SL_R_ROLE, "'gpt-4'"},
    {"{\"conversations\":[{\"from\":\"narrator\",\"value\":\"x\"}]}", SL_R_ROLE, "narrator"},
    {"{\"messages\":[{\"role\":\"user\"}]}", SL_R_FIELDS, "message 0 has no content"},
    {"{\"messages\":[{\"content\":\"x\"}]}", SL_R_FIELDS, "role"},
    {"{\"messages\":[3]}", SL_R_FIELDS, "an integer"},
    {"{\"messages\":{}}", SL_R_FIELDS, "an object"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\",\"image_url\":{}}]}]}", SL_R_MEDIA,
     "image_url"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":3}]}]}", SL_R_FIELDS, "part 0"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]}", SL_R_FIELDS, "part 0"},
    {"{\"input_ids\":[2147483648]}", SL_R_VOCAB, "input_ids[0] is 2147483648"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"tools\":3}", SL_R_FIELDS, "tools"},
    {"{\"prompt\":\"a\",\"completion\":\"\"}", SL_R_EMPTY, "completion"},
    {"{\"prompt\":\"a\",\"completion\":3}", SL_R_FIELDS, "completion"},
};

static void refusals(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        sl_row row;
        sl_err why = {0};
        sl_reason r = sl_row_parse(&row, refused[i].line, strlen(refused[i].line), 100, &why);
        if (r != refused[i].reason || !strstr(why.msg, refused[i].says))
            fail_msg("%s: got %s '%s', expected %s '...%s...'", refused[i].line, sl_reason_name(r), why.msg,
                     sl_reason_name(refused[i].reason), refused[i].says);
        assert_null(row.root);
        sl_row_free(&row);
    }
}

static sl_row parse(const char *line) {
    sl_row row;
    sl_err why = {0};
    sl_reason r = sl_row_parse(&row, line, strlen(line), 100, &why);
    if (r) fail_msg("%s: %s %s", line, sl_reason_name(r), why.msg);
    return row;
}

static const char *at(const sl_row *r, size_t i, const char *key) {
    return json_string_value(json_object_get(json_array_get(r->messages, i), key));
}

static void ids(void **state) {
    (void)state;
    sl_row r = parse("{\"input_ids\":[1,99,0],\"loss_mask\":[0,true,1.0],\"uuid\":17}");
    assert_int_equal(r.kind, SL_ROWK_IDS);
    assert_int_equal(r.T, 3);
    assert_int_equal(r.ids[1], 99);
    assert_memory_equal(r.mask, "\0\1\1", 3);
    assert_int_equal(r.id_len, 2);
    assert_memory_equal(r.id, "17", 2);
    sl_row_free(&r);
    r = parse("{\"input_ids\":[5],\"loss_mask\":null}");
    assert_int_equal(r.mask[0], 1);
    sl_row_free(&r);
}

static void conversations(void **state) {
    (void)state;
    sl_row r = parse("{\"id\":\"a\\u0000b\",\"conversations\":[{\"from\":\"human\",\"value\":\"hi\",\"weight\":1},{"
                     "\"from\":\"gpt\",\"value\":\"yo\"}],"
                     "\"tools\":\"[{\\\"type\\\":\\\"function\\\"}]\"}");
    assert_int_equal(r.kind, SL_ROWK_CHAT);
    assert_int_equal(r.id_len, 3);
    assert_string_equal(at(&r, 0, "role"), "user");
    assert_string_equal(at(&r, 1, "role"), "assistant");
    assert_string_equal(at(&r, 1, "content"), "yo");
    assert_null(json_object_get(json_array_get(r.messages, 0), "from"));
    assert_int_equal(json_integer_value(json_object_get(json_array_get(r.messages, 0), "weight")), 1);
    assert_int_equal(json_array_size(r.tools), 1);
    sl_row_free(&r);
    r = parse("{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},{\"type\":\"text\","
              "\"text\":\"b\"}]},"
              "{\"role\":\"assistant\",\"tool_calls\":[]}]}");
    assert_string_equal(at(&r, 0, "content"), "ab");
    assert_true(json_is_null(json_object_get(json_array_get(r.messages, 1), "content")));
    sl_row_free(&r);
    r = parse("{\"prompt\":[{\"role\":\"user\",\"content\":\"q\"}],\"completion\":[{\"role\":\"assistant\",\"content\":"
              "\"a\"}]}");
    assert_int_equal(json_array_size(r.messages), 2);
    sl_row_free(&r);
}

static void text(void **state) {
    (void)state;
    sl_row r = parse("{\"text\":\"a\\u0000b\"}");
    assert_int_equal(r.text_len, 3);
    assert_memory_equal(r.text, "a\0b", 4);
    sl_row_free(&r);
    r = parse("{\"prompt\":\"ab\",\"completion\":\"c\"}");
    assert_int_equal(r.prompt_len, 2);
    assert_string_equal(r.text, "abc");
    sl_row_free(&r);
}

static void utf8(void **state) {
    (void)state;
    static const char *const good[] = {"\xc2\x80\xdf\xbf", "\xe0\xa0\x80\xed\x9f\xbf\xee\x80\x80\xef\xbf\xbf",
                                       "\xf0\x90\x80\x80\xf4\x8f\xbf\xbf", "a\xc3\xa9z"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        size_t n = strlen(good[i]), last = n - 1;
        while (last && ((unsigned char)good[i][last] & 0xc0) == 0x80) last--;
        assert_int_equal(sl_utf8_check(good[i], n), n);
        if ((unsigned char)good[i][last] >= 0x80) /* the last character, cut */
            for (size_t cut = last + 1; cut < n; cut++) assert_int_equal(sl_utf8_check(good[i], cut), last);
    }
    assert_int_equal(sl_utf8_check("\xc1\xbf", 2), 0);
    assert_int_equal(sl_utf8_check("\xe0\x9f\xbf", 3), 0);
    assert_int_equal(sl_utf8_check("\xf0\x8f\xbf\xbf", 4), 0);
    assert_int_equal(sl_utf8_check("\xc3\xc0", 2), 0);
    assert_int_equal(sl_utf8_check("\xe2\x82\xc0", 3), 0);
}

/* Deep nesting and huge lines end with a verdict, not with the stack. */
static void bounds(void **state) {
    (void)state;
    size_t n = 200000;
    char *deep = malloc(n + 1);
    memset(deep, '[', n);
    deep[n] = 0;
    sl_row r;
    sl_err why = {0};
    assert_int_equal(sl_row_parse(&r, deep, n, 0, &why), SL_R_JSON);
    assert_non_null(strstr(why.msg, "deeper"));
    free(deep);
    n = SL_ROW_MAX_BYTES + 1;
    char *big = malloc(n);
    memset(big, ' ', n);
    assert_int_equal(sl_row_parse(&r, big, n, 0, &why), SL_R_TOO_BIG);
    free(big);
    char edge[2 * SL_ROW_MAX_DEPTH + 64]; /* the deepest that is allowed, and one more */
    for (int more = 0; more < 2; more++) {
        int d = SL_ROW_MAX_DEPTH - 1 + more, at = sprintf(edge, "{\"text\":\"\\\"[\",\"x\":");
        memset(edge + at, '[', (size_t)d);
        memset(edge + at + d, ']', (size_t)d);
        strcpy(edge + at + 2 * d, "}");
        assert_int_equal(sl_row_parse(&r, edge, strlen(edge), 0, &why), more ? SL_R_JSON : SL_R_NONE);
        sl_row_free(&r);
    }
    /* brackets inside strings do not count */
    char s[600] = "{\"text\":\"";
    memset(s + 9, '[', 500);
    strcpy(s + 509, "\\\"[\"}");
    assert_int_equal(sl_row_parse(&r, s, strlen(s), 0, &why), SL_R_NONE);
    sl_row_free(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(refusals),      cmocka_unit_test(ids),
                                       cmocka_unit_test(conversations), cmocka_unit_test(text),
                                       cmocka_unit_test(utf8),          cmocka_unit_test(bounds)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
