/* prepare: rows to ids and masks with a tokenizer small enough to check by eye (tests/data/tiny: byte b is token b, a
 * few merges, <|im_start|> 263, <|im_end|> 264). Lengths, parts, train-on, borders that fall into a token. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "ipc/log.h"
#include "stages/feeder/prepare.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static sl_tokenizer *tok;
static sl_template *own;
static sl_err e;

/* One part as text: "ids|mask", or "REASON: sentence". */
static const char *show(const sl_part *p) {
    static char out[4096];
    size_t n = 0;
    if (p->reason) {
        snprintf(out, sizeof out, "%s: %s", sl_reason_name(p->reason), p->why);
        return out;
    }
    for (uint32_t i = 0; i < p->T; i++)
        n += (size_t)snprintf(out + n, sizeof out - n, "%s%d%s", i ? " " : "", p->ids[i], p->mask[i] ? "*" : "");
    if (p->flags & SL_PART_TRUNCATED) snprintf(out + n, sizeof out - n, " cut");
    return out;
}

static void expect(sl_prep_cfg cfg, const char *line, const char *const *want, uint32_t n) {
    sl_preparer *p;
    sl_prepared out;
    cfg.tok = tok;
    if (!cfg.tmpl) cfg.tmpl = own;
    if (sl_preparer_new(&p, &cfg, &e)) fail_msg("%s", e.msg);
    assert_int_equal(sl_prepare_json(p, line, strlen(line), &out, &e), 0);
    for (uint32_t i = 0; i < n && i < out.n; i++)
        if (strncmp(show(&out.parts[i]), want[i], strlen(want[i])) ||
            (!out.parts[i].reason && strlen(show(&out.parts[i])) != strlen(want[i])))
            fail_msg("%s part %u:\ngot      %s\nexpected %s", line, i, show(&out.parts[i]), want[i]);
    if (out.n != n) fail_msg("%s: %u parts, expected %u", line, out.n, n);
    for (uint32_t i = 0; i < out.n; i++) {
        uint32_t sum = 0;
        for (uint32_t t = 0; t < out.parts[i].T; t++) sum += out.parts[i].mask[t];
        if (!out.parts[i].reason) assert_int_equal(sum, out.parts[i].mask_sum);
    }
    sl_prepared_free(&out);
    sl_preparer_free(p);
}
#define EXPECT(cfg, line, ...)                                                                                         \
    do {                                                                                                               \
        const char *w_[] = {__VA_ARGS__};                                                                              \
        expect(cfg, line, w_, sizeof w_ / sizeof *w_);                                                                 \
    } while (0)
#define CFG(...) ((sl_prep_cfg){__VA_ARGS__})

static void lengths(void **state) {
    (void)state;
    const char *ten = "{\"input_ids\":[0,1,2,3,4,5,6,7,8,9],\"loss_mask\":[0,0,1,1,0,0,0,0,1,1]}";
    EXPECT(CFG(0), ten, "0 1 2* 3* 4 5 6 7 8* 9*");
    EXPECT(CFG(.max_length = 10), ten, "0 1 2* 3* 4 5 6 7 8* 9*");
    EXPECT(CFG(.max_length = 4), ten, "0 1 2* 3* cut");
    EXPECT(CFG(.max_length = 4, .overlong = SL_LONG_SKIP), ten, "TOO_LONG: the row has 10 tokens, max_length is 4");
    EXPECT(CFG(.max_length = 4, .overlong = SL_LONG_SPLIT), ten, "0 1 2* 3*", "4 5 6 7", "8* 9*");
    EXPECT(CFG(.max_length = 4, .overlong = SL_LONG_SPLIT, .min_supervised = 1), ten, "0 1 2* 3*",
           "UNSUPERVISED: 0 of 4", "8* 9*");
    EXPECT(CFG(.max_length = 2, .min_supervised = 1), ten, "UNSUPERVISED: 0 of 2");
    EXPECT(CFG(.min_supervised = 5), ten, "UNSUPERVISED: 4 of 10");
    EXPECT(CFG(.vocab = 9), ten, "VOCAB: input_ids[9] is 9");
}

#define HEAD "263 117 115 101 114 10 113 264 10 263 97 115 115 105 115 116 97 110 116 10 "
#define Q    "{\"role\":\"user\",\"content\":\"q\"}"
#define A(x) "{\"role\":\"assistant\",\"content\":\"" x "\"}"

static void chats(void **state) {
    (void)state;
    const char *one = "{\"messages\":[" Q "," A("hi") "]}",
               *two = "{\"messages\":[" Q "," A("hi") "," Q "," A("ok") "]}";
    EXPECT(CFG(0), one, HEAD "256* 264* 10");
    EXPECT(CFG(0), two, HEAD "256* 264* 10 " HEAD "259* 264* 10");
    EXPECT(CFG(.train_on = SL_TRAIN_LAST_ASSISTANT), two, HEAD "256 264 10 " HEAD "259* 264* 10");
    EXPECT(CFG(.per_turn = 1), two, HEAD "256* 264* 10", HEAD "256 264 10 " HEAD "259* 264* 10");
    EXPECT(CFG(.max_length = 22), one, HEAD "256* 264* cut");
    EXPECT(CFG(.max_length = 21), one, HEAD "256* cut"); /* a last turn that is cut keeps what it has */
    EXPECT(CFG(.vocab = 264), one, "VOCAB: token 7 is 264");
    EXPECT(CFG(.min_supervised = 1), "{\"messages\":[" Q "]}", "UNSUPERVISED");
    EXPECT(CFG(.per_turn = 1), "{\"messages\":[" Q "]}", "UNSUPERVISED");
    /* a marker that a user wrote is a control token, as the reference does it, and stays out of the mask */
    EXPECT(CFG(0), "{\"messages\":[{\"role\":\"user\",\"content\":\"<|im_end|>\"}," A("hi<|im_end|>ok") "]}",
           "263 117 115 101 114 10 264 264 10 263 97 115 115 105 115 116 97 110 116 10 256* 264* 259* 264* 10");
    EXPECT(CFG(.train_on = SL_TRAIN_ALL), "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}",
           "263* 117* 115* 101* 114* 10* 256* 264* 10*");
}

static void texts(void **state) {
    (void)state;
    EXPECT(CFG(0), "{\"text\":\"hi\"}", "262* 256*");
    EXPECT(CFG(.text_bare = true), "{\"text\":\"<|im_end|>\"}", "264*");
    EXPECT(CFG(.text_bare = true, .text_plain = true), "{\"text\":\"<\"}", "60*");
    EXPECT(CFG(0), "{\"prompt\":\"no: \",\"completion\":\"hi\"}", "262 110 111 258 256*");
    EXPECT(CFG(0), "{\"prompt\":\"x\",\"completion\":\"y\"}", "262 261*"); /* the token that holds both is a target */
    EXPECT(CFG(0), "{\"text\":\"a\\u0000b\"}", "262* 97* 0* 98*");
}

/* Borders inside a token: white space may come along, text may not. */
static void borders(void **state) {
    (void)state;
    sl_template space = {.source = strdup("{% for m in messages %}{{ m.role }}: {{ m.content }}</think>{% endfor %}"
                                          "{% if add_generation_prompt %}assistant: {% endif %}"),
                         .vars = json_object()};
    sl_template glue = {
        .source = strdup(
            "{% for m in messages %}x{{ m.content }}</think>{% endfor %}{% if add_generation_prompt %}x{% endif %}"),
        .vars = json_object()};
    /* ": " is one token and lies before the answer; "hi" follows in a token of its own */
    EXPECT(CFG(.tmpl = &space), "{\"messages\":[" Q "," A("hi") "]}",
           "117 115 101 114 258 113 266 97 115 115 105 115 116 97 110 116 258 256* 266*");
    /* the header "x" and the answer "y" are one token: no border */
    EXPECT(CFG(.tmpl = &glue), "{\"messages\":[" Q "," A("y") "]}",
           "MASK: token 3 mixes the answer with the template's text");
    free(space.source);
    free(glue.source);
    json_decref(space.vars);
    json_decref(glue.vars);
}

/* Spans to tokens, with ids and offsets as some tokenizer might give them. */
static void spans_to_tokens(void **state) {
    (void)state;
    static const struct {
        const char *text;
        int32_t ids[4];
        uint32_t off[4];
        size_t n;
        sl_span spans[2];
        const char *want; /* the mask, or what the refusal says */
    } c[] = {
        {"ok hi", {259, 32, 256}, {0, 2, 3}, 3, {{3, 5}}, "001"},
        {"ok hi", {259, 32, 256}, {0, 2, 3}, 3, {{2, 3}}, "010"},
        {"ok hi", {259, 32, 256}, {0, 2, 3}, 3, {{0, 2}, {3, 5}}, "101"},
        {"ok hi", {259, 32, 256}, {0, 2, 3}, 3, {{1, 1}, {3, 5}}, "001"}, /* an empty span is none */
        {"a: hi", {97, 258, 256}, {0, 1, 3}, 3, {{1, 2}}, "010"},         /* white space comes along behind ... */
        {"b a", {98, 257}, {0, 1}, 2, {{2, 3}}, "01"},                    /* ... and before */
        {"a: hi", {97, 258, 256}, {0, 1, 3}, 3, {{1, 2}, {2, 3}}, "010"}, /* one token of two spans */
        {"axy", {97, 261}, {0, 1}, 2, {{0, 2}}, "token 1 mixes"},
        {"xya", {261, 97}, {0, 2}, 2, {{1, 3}}, "token 0 mixes"},
        {"ab", {98}, {1}, 1, {{0, 2}}, "tokens 0..1 do not cover bytes 0..2"},
        {"ab", {0}, {0}, 0, {{0, 2}}, "no token lies in bytes 0..2"},
        {"ab", {97, 98}, {0, 1}, 2, {{0, 3}}, "span 0 ends at byte 3 of 2"},
        {"ab", {97, 99}, {0, 1}, 2, {{0, 2}}, "do not decode"},
        {"ab", {97, 9999}, {0, 1}, 2, {{0, 2}}, "do not decode"},
        {"e\xcc\x81", {0xc3, 0xa9}, {0, 1}, 2, {{0, 3}}, "11"}, /* a tokenizer that composes what it reads */
        {"e\xcc\x81", {0xc3, 0xa8}, {0, 1}, 2, {{0, 3}}, "do not decode"},
    };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        sl_ids ids = {.ids = (int32_t *)c[i].ids, .off = (uint32_t *)c[i].off, .n = c[i].n};
        uint8_t mask[4];
        char got[256] = "";
        memset(&e, 0, sizeof e);
        memset(mask, 9, sizeof mask);
        sl_reason r =
            sl_mask_tokens(tok, &ids, c[i].text, strlen(c[i].text), c[i].spans, c[i].spans[1].b ? 2 : 1, mask, &e);
        for (size_t t = 0; !r && t < c[i].n; t++) got[t] = (char)('0' + mask[t]);
        if (r) snprintf(got, sizeof got, "%.200s", e.msg);
        if (r ? r != SL_R_MASK || !strstr(got, c[i].want) : strcmp(got, c[i].want) != 0)
            fail_msg("case %zu, '%s': got %s, expected %s", i, c[i].text, got, c[i].want);
    }
}

static void without(void **state) {
    (void)state;
    sl_preparer *p;
    sl_prepared out;
    sl_prep_cfg cfg = {.tok = NULL, .tok_why = "no such file"};
    assert_int_equal(sl_preparer_new(&p, &cfg, &e), 0);
    assert_int_equal(sl_prepare_json(p, "{\"text\":\"a\"}", 12, &out, &e), 0);
    assert_int_equal(out.parts[0].reason, SL_R_FIELDS);
    assert_non_null(strstr(out.parts[0].why, "no such file"));
    sl_prepared_free(&out);
    int32_t ids[2] = {1, 2};
    sl_prepare_ids(p, ids, 2, NULL, 0, "id", 2, &out);
    assert_string_equal(show(&out.parts[0]), "1* 2*");
    sl_prepared_free(&out);
    sl_preparer_free(p);
    cfg = (sl_prep_cfg){.tok = tok, .tmpl_why = "none found"};
    assert_int_equal(sl_preparer_new(&p, &cfg, &e), 0);
    assert_int_equal(sl_prepare_json(p, "{\"messages\":[" Q "]}", strlen("{\"messages\":[" Q "]}"), &out, &e), 0);
    assert_int_equal(out.parts[0].reason, SL_R_TEMPLATE);
    assert_non_null(strstr(out.parts[0].why, "none found"));
    sl_prepared_free(&out);
    sl_preparer_free(p);
}

static void big(void **state) { /* one letter, a megabyte: bounded time, all of it there */
    (void)state;
    size_t n = 1000000;
    char *line = malloc(n + 32);
    size_t k = (size_t)sprintf(line, "{\"text\":\"");
    memset(line + k, 'a', n);
    strcpy(line + k + n, "\"}");
    sl_prep_cfg cfg = {.tok = tok};
    sl_preparer *p;
    sl_prepared out;
    assert_int_equal(sl_preparer_new(&p, &cfg, &e), 0);
    assert_int_equal(sl_prepare_json(p, line, strlen(line), &out, &e), 0);
    assert_int_equal(out.parts[0].reason, 0);
    assert_int_equal(out.parts[0].T, n + 1);
    sl_prepared_free(&out);
    sl_preparer_free(p);
    free(line);
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    sl_log_init("test", SL_ERROR);
    if (sl_tokenizer_load(&tok, argv[1], &e) || sl_template_load(&own, argv[1], "", "{}", &e)) {
        printf("%s\n", e.msg);
        return 1;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lengths), cmocka_unit_test(chats),           cmocka_unit_test(texts),
        cmocka_unit_test(borders), cmocka_unit_test(spans_to_tokens), cmocka_unit_test(without),
        cmocka_unit_test(big)};
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    sl_template_free(own);
    sl_tokenizer_free(tok);
    return rc;
}
