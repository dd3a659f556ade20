/* template: where a chat template comes from and which special tokens and arguments it gets; what the helper process
 * gives templates; helpers that answer nonsense, or are killed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "ipc/log.h"
#include "stages/feeder/template.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static sl_err e;
static char dir[] = "test_template.XXXXXX";

static const char *at(const char *name) {
    static char path[2][256];
    static int i;
    i = !i;
    snprintf(path[i], sizeof path[i], "%s/%s", dir, name);
    return path[i];
}
static void put_bytes(const char *name, const void *data, size_t n) {
    FILE *f = fopen(at(name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}
static void put(const char *name, const char *text) {
    put_bytes(name, text, strlen(text));
}
static void drop_all(void) {
    char cmd[128];
    snprintf(cmd, sizeof cmd, "rm -rf %s && mkdir %s", dir, dir);
    assert_int_equal(system(cmd), 0);
}

/* ---- where it comes from ---- */

typedef struct want {
    const char *source, *tools, *bos, *eos, *from; /* NULL: none; from: how the name of the place ends */
} want;

static void same(const char *what, const char *got, const char *expected) {
    if ((got != NULL) != (expected != NULL) || (got && strcmp(got, expected) != 0))
        fail_msg("%s is '%s', expected '%s'", what, got ? got : "(none)", expected ? expected : "(none)");
}
static void expect_load(const char *model, const char *file, const char *args, want w) {
    sl_template *t;
    if (sl_template_load(&t, model, file, args, &e)) fail_msg("%s", e.msg);
    if (!t) fail_msg("no template: %s", e.msg);
    same("the source", t->source, w.source);
    same("the source for tools", t->source_tools, w.tools);
    same("bos_token", json_string_value(json_object_get(t->vars, "bos_token")), w.bos);
    same("eos_token", json_string_value(json_object_get(t->vars, "eos_token")), w.eos);
    size_t n = strlen(w.from), m = strlen(t->from);
    if (m < n || strcmp(t->from + m - n, w.from) != 0) fail_msg("it comes from %s, expected %s", t->from, w.from);
    sl_template_free(t);
}
static void expect_refused(const char *model, const char *file, const char *args, const char *says) {
    sl_template *t;
    memset(&e, 0, sizeof e);
    if (sl_template_load(&t, model, file, args, &e) != SL_ECONFIG || !strstr(e.msg, says))
        fail_msg("got %d '%s', expected '%s'", e.code, e.msg, says);
    assert_null(t);
}

/* Each place that is found later wins; special tokens are added up, tokenizer_config.json before the map. */
static void folders(void **state) {
    (void)state;
    sl_template *t;
    drop_all();
    assert_int_equal(sl_template_load(&t, dir, "", "", &e), 0); /* a model may have none */
    assert_null(t);
    assert_non_null(strstr(e.msg, "has no chat template"));
    put("special_tokens_map.json",
        "{\"bos_token\": \"<map>\", \"eos_token\": {\"content\": \"<e>\", \"lstrip\": false}}");
    put("tokenizer_config.json", "{\"bos_token\": {\"content\": \"<conf>\"}, \"chat_template\": \"conf\"}");
    expect_load(dir, "", "", (want){"conf", NULL, "<conf>", "<e>", "/tokenizer_config.json"});
}

static void folders_by_a_file(void **state) {
    (void)state;
    drop_all();
    put("tokenizer.json", "{}");
    put("tokenizer_config.json", "{\"eos_token\": \"<e>\", \"chat_template\": \"conf\"}");
    expect_load(at("tokenizer.json"), "", "", (want){"conf", NULL, NULL, "<e>", "/tokenizer_config.json"});
    put("chat_template.json", "{\"chat_template\": \"json\"}");
    expect_load(dir, "", "", (want){"json", NULL, NULL, "<e>", "/chat_template.json"});
    put("chat_template.jinja", "jinja");
    expect_load(dir, "", "", (want){"jinja", NULL, NULL, "<e>", "/chat_template.jinja"});
    put("mine", "mine");
    expect_load(dir, at("mine"), "", (want){"mine", NULL, NULL, "<e>", "/mine"});
    expect_refused(dir, at("not_there"), "", "reading the chat template");
}

static void several_in_one_file(void **state) {
    (void)state;
    drop_all();
    put("tokenizer_config.json",
        "{\"chat_template\": [{\"name\": \"rag\", \"template\": \"r\"}, {\"name\": \"tool_use\", "
        "\"template\": \"t\"}, {\"name\": \"default\", \"template\": \"d\"}, {\"name\": \"last\", "
        "\"template\": \"l\"}, {\"name\": 5}]}");
    expect_load(dir, "", "", (want){"d", "t", NULL, NULL, "/tokenizer_config.json"});
    put("mine", "mine"); /* a file that was named is for rows with tools too */
    expect_load(dir, at("mine"), "", (want){"mine", NULL, NULL, NULL, "/mine"});
    put("tokenizer_config.json", "{\"chat_template\": [{\"name\": \"rag\", \"template\": \"r\"}, {\"name\": \"other\", "
                                 "\"template\": \"o\"}]}");
    expect_load(dir, "", "", (want){"r", NULL, NULL, NULL, "/tokenizer_config.json"});
}

static void arguments(void **state) {
    (void)state;
    drop_all();
    put("tokenizer_config.json", "{\"bos_token\": \"<b>\", \"chat_template\": \"c\"}");
    expect_load(dir, "", "{}", (want){"c", NULL, "<b>", NULL, ""});
    expect_load(dir, "", "{\"bos_token\": \"<mine>\", \"eos_token\": \"<e>\"}", (want){"c", NULL, "<mine>", "<e>", ""});
    expect_refused(dir, "", "[1]", "expected a JSON object: found another type");
    expect_refused(dir, "", "{\"a\": 1, \"a\": 2}", "template_args: expected a JSON object: duplicate");
    expect_refused(dir, "", "{", "template_args: expected a JSON object: ");
}

static void what_is_no_template(void **state) {
    (void)state;
    drop_all();
    put("tokenizer_config.json", "{\n\"chat_template\": \"c\",\n}");
    expect_refused(dir, "", "", "tokenizer_config.json line 3");
    put("tokenizer_config.json", "{}");
    put_bytes("chat_template.jinja", "a\0b", 3);
    expect_refused(dir, "", "", "chat_template.jinja: the chat template is not text");
    put("chat_template.jinja", "a\xff");
    expect_refused(dir, "", "", "chat_template.jinja: the chat template is not text");
}

/* The hash stands in the manifest: it tells all of the template from another. */
static void hashes(void **state) {
    (void)state;
    sl_template *t[2];
    drop_all();
    put("a", "the same beginning, a");
    put("b", "the same beginning, b");
    for (int i = 0; i < 2; i++) assert_int_equal(sl_template_load(&t[i], "", at(i ? "b" : "a"), "", &e), 0);
    assert_int_equal(strlen(t[0]->hash), 32);
    assert_string_not_equal(t[0]->hash, t[1]->hash);
    for (int i = 0; i < 2; i++) sl_template_free(t[i]);
}

/* A GGUF file has the template and the ids of its special tokens. */
typedef struct bytes {
    uint8_t b[4096];
    size_t n;
} bytes;
static void add(bytes *w, const void *p, size_t n) {
    assert_true(w->n + n <= sizeof w->b);
    memcpy(w->b + w->n, p, n);
    w->n += n;
}
static void add_u32(bytes *w, uint32_t v) {
    add(w, &v, 4);
}
static void add_u64(bytes *w, uint64_t v) {
    add(w, &v, 8);
}
static void add_str(bytes *w, const char *s) {
    add_u64(w, strlen(s));
    add(w, s, strlen(s));
}
static void ggufs(void **state) {
    (void)state;
    static const char *const words[] = {"<unk>", "<s>", "</s>", "a"};
    bytes w = {.n = 0};
    drop_all();
    add(&w, "GGUF", 4);
    add_u32(&w, 3);
    add_u64(&w, 0); /* tensors */
    add_u64(&w, 4); /* key-values */
    add_str(&w, "tokenizer.ggml.tokens");
    add_u32(&w, 9), add_u32(&w, 8), add_u64(&w, 4);
    for (int i = 0; i < 4; i++) add_str(&w, words[i]);
    add_str(&w, "tokenizer.ggml.bos_token_id");
    add_u32(&w, 4), add_u32(&w, 1);
    add_str(&w, "tokenizer.ggml.eos_token_id");
    add_u32(&w, 4), add_u32(&w, 2);
    add_str(&w, "tokenizer.chat_template");
    add_u32(&w, 8), add_str(&w, "in the file");
    while (w.n % 32) add(&w, "", 1);
    put_bytes("m.gguf", w.b, w.n);
    expect_load(at("m.gguf"), "", "", (want){"in the file", NULL, "<s>", "</s>", "/m.gguf"});
    put_bytes("cut.gguf", w.b, w.n / 2);
    sl_template *t;
    assert_int_not_equal(sl_template_load(&t, at("cut.gguf"), "", "", &e), 0);
}

/* ---- what templates get ---- */

static sl_template of(const char *source) {
    return (sl_template){.source = (char *)source, .vars = json_pack("{s:s, s:s}", "bos_token", "<s>", "mine", "m")};
}
static const char *const one_message = "[{\"role\": \"user\", \"content\": \"é <b>\"}]";

static void expect_text(const char *source, const char *source_tools, const char *tools, const char *documents,
                        const char *extra, bool gen, const char *text) {
    sl_template t = of(source);
    t.source_tools = (char *)source_tools;
    sl_renderer *r;
    sl_rendered out;
    json_t *m = json_loads(one_message, 0, NULL), *to = tools ? json_loads(tools, 0, NULL) : NULL,
           *d = documents ? json_loads(documents, 0, NULL) : NULL, *x = extra ? json_loads(extra, 0, NULL) : NULL;
    sl_render_job job = {.messages = m, .gen = gen, .extra = x};
    assert_int_equal(sl_renderer_new(&r, &t, NULL, &e), 0);
    if (sl_render(r, &job, 1, to, d, &out, &e)) fail_msg("%s: %s", source, e.msg);
    if (strcmp(out.text, text) != 0) fail_msg("%s gives\n[%s], expected\n[%s]", source, out.text, text);
    assert_int_equal(out.len, strlen(text));
    sl_rendered_free(&out);
    sl_renderer_free(r);
    json_decref(m), json_decref(to), json_decref(d), json_decref(x);
    json_decref(t.vars);
}

static void environment(void **state) {
    (void)state;
    const char *two = "[{\"a\": 1}, {\"a\": 2}]", *three = "[1, 2, 3]";
    expect_text("{{ bos_token }}{{ mine }}", NULL, NULL, NULL, NULL, false, "<s>m");
    expect_text("{{ mine }} {{ add_generation_prompt }}", NULL, NULL, NULL, "{\"mine\": \"x\"}", true, "x True");
    expect_text("{{ messages | length }}", NULL, NULL, NULL, "{\"messages\": []}", false, "1"); /* it is the row's */
    expect_text("plain", "tools", NULL, NULL, NULL, false, "plain");
    expect_text("plain", "tools", "[]", NULL, NULL, false, "plain");
    expect_text("plain", "tools", two, NULL, NULL, false, "tools");
    expect_text("{{ tools | length }} {{ documents | length }}", NULL, two, three, NULL, false, "2 3");
    expect_text("{{ tools is none }}", NULL, NULL, three, NULL, false, "True");
    expect_text("{{ messages[0].content | tojson }}", NULL, NULL, NULL, NULL, false, "\"é <b>\"");
    expect_text("{{ {'b': 1, 'a': 2} | tojson }}", NULL, NULL, NULL, NULL, false, "{\"b\": 1, \"a\": 2}");
    expect_text("a\n  {% if true %}\nb\n  {% endif %}\nc", NULL, NULL, NULL, NULL, false, "a\nb\nc");
    expect_text("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", NULL, NULL, NULL,
                NULL, false, "1");
    expect_text("{{ strftime_now('%d %b %Y') }}", NULL, NULL, NULL, NULL, false, "26 Jul 2024");
}

/* The spans of generation tags are bytes, the outermost ones where one lies in another. */
static void generation_tags(void **state) {
    (void)state;
    sl_template t = of("é[{% generation %}é{% generation %}b{% endgeneration %}c{% endgeneration %}]"
                       "{% generation %}d{% endgeneration %}");
    sl_renderer *r;
    sl_rendered out;
    json_t *m = json_loads(one_message, 0, NULL);
    sl_render_job job = {.messages = m};
    assert_int_equal(sl_renderer_new(&r, &t, NULL, &e), 0);
    if (sl_render(r, &job, 1, NULL, NULL, &out, &e)) fail_msg("%s", e.msg);
    assert_string_equal(out.text, "é[ébc]d");
    assert_true(out.has_tags);
    assert_int_equal(out.n_spans, 2);
    assert_int_equal(out.spans[0][0], 3), assert_int_equal(out.spans[0][1], 7);
    assert_int_equal(out.spans[1][0], 8), assert_int_equal(out.spans[1][1], 9);
    sl_rendered_free(&out);
    sl_renderer_free(r);
    json_decref(t.vars);
    t = of("x"); /* no tag at all is something else than no tag reached */
    assert_int_equal(sl_renderer_new(&r, &t, NULL, &e), 0);
    if (sl_render(r, &job, 1, NULL, NULL, &out, &e)) fail_msg("%s", e.msg);
    assert_false(out.has_tags);
    sl_rendered_free(&out);
    sl_renderer_free(r);
    json_decref(m);
    json_decref(t.vars);
}

/* A template cannot change the row; one that does not compile says so each time without a new process. */
static void refusals(void **state) {
    (void)state;
    static const struct {
        const char *source, *says;
    } c[] = {{"{% for %}", "cannot be compiled"},
             {"{{ messages.append(1) }}", "unsafe"},
             {"{{ raise_exception('not so') }}", "not so"},
             {"{{ messages[0].content + 1 }}", "TypeError"},
             {"{{ 'x' * 67108865 }}", "has 67108865 bytes, at most 67108864"}};
    json_t *m = json_loads(one_message, 0, NULL);
    sl_render_job job = {.messages = m};
    sl_rendered out;
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        sl_template t = of(c[i].source);
        sl_renderer *r;
        assert_int_equal(sl_renderer_new(&r, &t, NULL, &e), 0);
        for (int again = 0; again < 3; again++) {
            memset(&e, 0, sizeof e);
            if (sl_render(r, &job, 1, NULL, NULL, &out, &e) != SL_R_TEMPLATE || !strstr(e.msg, c[i].says))
                fail_msg("%s: '%s', expected '%s'", c[i].source, e.msg, c[i].says);
            assert_null(out.text);
        }
        assert_int_equal(sl_renderer_restarts(r), 0);
        sl_renderer_free(r);
        json_decref(t.vars);
    }
    json_decref(m);
}

/* ---- helpers that fail ---- */

/* A helper that is ready, answers `hello`, then `answer` (Python expressions of bytes) to every request. */
static void put_helper(const char *hello, const char *answer) {
    char s[2048];
    snprintf(s, sizeof s,
             "import os, json\n"
             "def frame(b): return len(b).to_bytes(4, 'little') + b\n"
             "def js(x): return frame(json.dumps(x).encode())\n"
             "def read(n):\n"
             "    b = b''\n"
             "    while len(b) < n:\n"
             "        more = os.read(0, n - len(b))\n"
             "        if not more: os._exit(0)\n"
             "        b += more\n"
             "    return b\n"
             "def request(): read(int.from_bytes(read(4), 'little'))\n"
             "os.write(1, js({'ready': True}))\n"
             "request()\n"
             "os.write(1, %s)\n"
             "while True:\n"
             "    request()\n"
             "    os.write(1, %s)\n",
             hello, answer);
    put("helper.py", s);
}

#define GOOD "js({'ok': True, 'tags': True})"
static void nonsense(void **state) {
    (void)state;
    static const struct {
        const char *hello, *answer, *says;
    } c[] = {
        {GOOD, "js({'out': [{'spans': [[0, 1], [1, 3]]}]}) + frame(b'abc')", NULL},
        {GOOD, "js({'out': [{'spans': [[0, 2], [1, 3]]}]}) + frame(b'abc')", "spans out of order"},
        {GOOD, "js({'out': [{'spans': [[2, 1]]}]}) + frame(b'abc')", "spans out of order"},
        {GOOD, "js({'out': [{'spans': [[0, 4]]}]}) + frame(b'abc')", "spans out of order"},
        {GOOD, "js({'out': [{'spans': [[-1, 2]]}]}) + frame(b'abc')", "spans out of order"},
        {GOOD, "js({'out': []}) + frame(b'abc')", "answered 0 of 1 jobs"},
        {GOOD, "frame(b'{')", "not JSON"},
        {GOOD, "js({'out': [{}]}) + bytes([1, 0, 0, 4])", "a frame of 67108865 bytes"},
        {"b'' if os._exit(0) else b''", "b''", "ended on this row"},
        {GOOD, "b'' if os._exit(0) else b''", "ended on this row"},
        {"frame(b'nothing')", "b''", "not JSON"},
    };
    json_t *m = json_loads(one_message, 0, NULL);
    sl_render_job job = {.messages = m};
    sl_template t = of("x");
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        sl_renderer *r;
        sl_rendered out;
        drop_all();
        put_helper(c[i].hello, c[i].answer);
        assert_int_equal(sl_renderer_new(&r, &t, at("helper.py"), &e), 0);
        for (uint64_t again = 0; again < 2; again++) { /* the next row gets a new helper */
            memset(&e, 0, sizeof e);
            sl_reason got = sl_render(r, &job, 1, NULL, NULL, &out, &e);
            if (got != (c[i].says ? SL_R_TEMPLATE : SL_R_NONE) || (c[i].says && !strstr(e.msg, c[i].says)))
                fail_msg("case %zu: '%s', expected '%s'", i, e.msg, c[i].says ? c[i].says : "");
            if (c[i].says) assert_null(out.text);
            assert_int_equal(sl_renderer_restarts(r), c[i].says ? again : 0);
            sl_rendered_free(&out);
        }
        sl_renderer_free(r);
    }
    json_decref(m);
    json_decref(t.vars);
}

/* A path that is given is not guessed around. */
static void no_helper(void **state) {
    (void)state;
    sl_template t = of("x");
    sl_renderer *r = NULL;
    assert_int_equal(sl_renderer_new(&r, &t, "/nowhere/helper.py", &e), SL_ECONFIG);
    assert_non_null(strstr(e.msg, "was not found (/nowhere/helper.py, as given)"));
    assert_null(r);
    json_decref(t.vars);
}

int main(void) {
    sl_log_init("test", SL_ERROR);
    if (!mkdtemp(dir)) return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(folders),
        cmocka_unit_test(folders_by_a_file),
        cmocka_unit_test(several_in_one_file),
        cmocka_unit_test(arguments),
        cmocka_unit_test(what_is_no_template),
        cmocka_unit_test(hashes),
        cmocka_unit_test(ggufs),
        cmocka_unit_test(environment),
        cmocka_unit_test(generation_tags),
        cmocka_unit_test(refusals),
        cmocka_unit_test(nonsense),
        cmocka_unit_test(no_helper),
    };
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    drop_all();
    return rmdir(dir) || rc;
}
