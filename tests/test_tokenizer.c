/* test_tokenizer: ids and offsets against what other programs gave.
 *
 *   test_tokenizer cases FILE          tiny tokenizers, one feature each (data/make_tokenizer_cases.py)
 *   test_tokenizer unit                errors, GGUF vocabularies made here, linear work, chunks
 *   test_tokenizer shared DIR NAME     a published tokenizer over the shared texts; 77 when DIR is absent
 *   test_tokenizer gguf FILE           SmolLM2's ids from llama.cpp; the model comes from $SL_SMOLLM2_GGUF, 77 when
 * unset */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utf8proc.h>
#include <zstd.h>
#include "stages/compute/gguf.h"
#include "stages/feeder/tokenizer_internal.h"
#include "stages/feeder/unicode.h"

static int fails;
#define CHECK(cond, ...)                                                                                               \
    do {                                                                                                               \
        if (!(cond)) {                                                                                                 \
            fails++;                                                                                                   \
            printf("%s:%d: ", __FILE__, __LINE__);                                                                     \
            printf(__VA_ARGS__);                                                                                       \
            putchar('\n');                                                                                             \
        }                                                                                                              \
    } while (0)

static char *slurp(const char *path, size_t *n) {
    FILE *f = fopen(path, "rb");
    if (!f) return NULL;
    fseek(f, 0, SEEK_END);
    *n = (size_t)ftell(f);
    rewind(f);
    char *p = malloc(*n + 1);
    if (p && fread(p, 1, *n, f) != *n) exit(2);
    if (p) p[*n] = 0;
    fclose(f);
    return p;
}

static char *unzstd(const char *path, size_t *n) {
    size_t k;
    char *z = slurp(path, &k);
    if (!z) return NULL;
    unsigned long long size = ZSTD_getFrameContentSize(z, k);
    char *out = NULL;
    if (size < 1ull << 30 && (out = malloc(size + 1))) {
        *n = ZSTD_decompress(out, size, z, k);
        if (ZSTD_isError(*n)) exit(2);
        out[*n] = 0;
    }
    free(z);
    return out;
}

static uint64_t salts = 1000;
static sl_tokenizer *from_json(const char *text, size_t n, bool plain, sl_err *err) {
    sl_tokenizer *t = sl_tokenizer_alloc();
    t->no_plain = !plain;
    t->salt = ++salts; /* caches are told apart by it */
    if (!sl_tokenizer_from_json(t, text, n, err)) return t;
    sl_tokenizer_free(t);
    return NULL;
}

/* Does the encoding equal the list? Reports otherwise. */
static bool same(const char *what, const sl_ids *got, const json_t *want) {
    bool ok = got->n == json_array_size(want);
    for (size_t i = 0; ok && i < got->n; i++) ok = got->ids[i] == json_integer_value(json_array_get(want, i));
    if (ok) return true;
    fails++;
    char *w = json_dumps(want, JSON_COMPACT);
    printf("%s\n  want %s\n  got  [", what, w);
    for (size_t i = 0; i < got->n; i++) printf("%s%d", i ? "," : "", got->ids[i]);
    puts("]");
    free(w);
    return false;
}

/* --- cases --- */
/* The reference gives the start of the character for a token that begins inside one. */
static void check_offsets(const char *what, const char *text, size_t n, const sl_ids *got, const json_t *want) {
    for (size_t i = 0; i < got->n && i < json_array_size(want); i++) {
        size_t at = got->off[i];
        CHECK(at <= n, "%s: offset %zu of %zu", what, at, n);
        while (at > 0 && at < n && ((uint8_t)text[at] & 0xc0) == 0x80) at--;
        CHECK((json_int_t)at == json_integer_value(json_array_get(want, i)),
              "%s: token %zu begins at %zu, the reference says %d", what, i, at,
              (int)json_integer_value(json_array_get(want, i)));
    }
}

static void one_case(const sl_tokenizer *t, sl_tok_scratch *s, const char *name, const json_t *c, bool exact_starts) {
    const json_t *x = json_object_get(c, "text");
    const char *text = json_string_value(x);
    size_t n = json_string_length(x);
    char what[400];
    sl_err err = {0};
    const struct {
        const char *key;
        bool special, parse;
    } way[] = {{"ids", false, true}, {"special", true, true}, {"literal", false, false}};
    for (int k = 0; k < 6; k++) { /* each twice: the second time out of the cache */
        sl_ids ids = {.want_off = k % 3 == 0};
        snprintf(what, sizeof what, "%s, %s: '%s'", name, way[k % 3].key, text);
        CHECK(!sl_tokenizer_encode(t, s, text, n, way[k % 3].special, way[k % 3].parse, &ids, &err), "%s: %s", what,
              err.msg);
        if (same(what, &ids, json_object_get(c, way[k % 3].key)) && ids.want_off && exact_starts)
            check_offsets(what, text, n, &ids, json_object_get(c, "at"));
        free(ids.ids);
        free(ids.off);
    }
}

/* Where the starts are compared: the reference counts replaced text from its end, and loses count after dropped
 * characters. */
static bool starts_agree(const char *name) {
    return strcmp(name, "replace regex") && strcmp(name, "unknown dropped");
}

static int cases(const char *path) {
    json_error_t je;
    json_t *all = json_load_file(path, 0, &je);
    if (!all) return printf("%s: %s\n", path, je.text), 2;
    size_t i, k, n = 0;
    json_t *o, *c;
    sl_tok_scratch *s = sl_tok_scratch_new();
    json_array_foreach(all, i, o) {
        const char *name = json_string_value(json_object_get(o, "name"));
        char *text = json_dumps(json_object_get(o, "tokenizer"), 0);
        for (int plain = 0; plain < 2; plain++) {
            sl_err err = {0};
            sl_tokenizer *t = from_json(text, strlen(text), plain, &err);
            CHECK(t, "%s: %s", name, err.msg);
            if (!t) continue;
            json_array_foreach(json_object_get(o, "cases"), k, c) {
                one_case(t, s, name, c, starts_agree(name));
                n++;
            }
            sl_tokenizer_free(t);
        }
        free(text);
    }
    sl_tok_scratch_free(s);
    printf("%zu tokenizers, %zu cases\n", json_array_size(all), n);
    json_decref(all);
    return n > 1000 && !fails ? 0 : 1;
}

/* --- shared --- */
/* pcre2 may know an older Unicode than the table: texts with characters that the two see differently are left out. */
static bool young(const char *text, size_t n) {
    for (size_t i = 0; i < n;) {
        unsigned len;
        uint32_t cp = sl_utf8_decode((const uint8_t *)text + i, &len);
        unsigned c = sl_unicode_class(cp);
        if (c && utf8proc_category((utf8proc_int32_t)cp) == UTF8PROC_CATEGORY_CN) return true;
        i += len;
    }
    return false;
}

/* Exact offsets: each token's bytes stand in the text where it says. `gaps`: bytes that the vocabulary lacks vanish, as
 * they do in the reference (SmolLM2 has no token for 0xf1, for one). */
static void check_pieces(const sl_tokenizer *t, const char *text, size_t n, const sl_ids *ids, bool gaps) {
    for (size_t i = 0; i < ids->n; i++) {
        size_t len, end = i + 1 < ids->n ? ids->off[i + 1] : n;
        const char *p = sl_tokenizer_piece(t, ids->ids[i], &len);
        CHECK(p && (gaps ? len <= end - ids->off[i] : len == end - ids->off[i]) && !memcmp(p, text + ids->off[i], len),
              "token %d does not stand at byte %u", ids->ids[i], ids->off[i]);
    }
}

static void linear(const char *name, const sl_tokenizer *t) {
    static const char units[] = {'a', ' ', '7', '\n', '.', 'A'};
    const size_t small = 1 << 16, big = 1 << 20;
    char *text = malloc(big);
    for (size_t u = 0; u < sizeof units; u++) {
        uint64_t work[2];
        memset(text, units[u], big);
        for (int k = 0; k < 2; k++) {
            sl_tok_scratch *s = sl_tok_scratch_new();
            sl_ids ids = {0};
            sl_err err = {0};
            CHECK(!sl_tokenizer_encode(t, s, text, k ? big : small, false, true, &ids, &err), "%s: %s", name, err.msg);
            work[k] = sl_tok_scratch_work(s);
            free(ids.ids);
            sl_tok_scratch_free(s);
        }
        CHECK(work[1] <= 24 * (work[0] + 1000), "%s: 16 times '%c' costs %.1f times the work", name, units[u],
              (double)work[1] / (double)work[0]);
        CHECK(work[1] <= 64 * big, "%s: a megabyte of '%c' costs %llu steps", name, units[u],
              (unsigned long long)work[1]);
    }
    free(text);
}

static int put_file(const char *dir, const char *name, const char *s, size_t n) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    if (!f) return -1;
    size_t k = fwrite(s, 1, n, f);
    return fclose(f) || k != n ? -1 : 0;
}

/* Unpack the tokenizer into a folder of its own, as a user has it. */
static bool unpack(const char *dir, const char *name, char *folder) {
    static const char *const files[] = {"tokenizer.json", "tiktoken.model", "tokenizer_config.json"};
    char path[4096];
    int n_files = 0;
    if (!mkdtemp(folder)) exit(2);
    for (int i = 0; i < 3; i++) {
        size_t n;
        snprintf(path, sizeof path, "%s/%s/%s%s", dir, name, files[i], i < 2 ? ".zst" : "");
        char *s = i < 2 ? unzstd(path, &n) : slurp(path, &n);
        if (!s) continue;
        if (put_file(folder, files[i], s, n)) exit(2);
        free(s);
        n_files++;
    }
    return n_files > 0;
}

static void clean(const char *folder) {
    static const char *const files[] = {"tokenizer.json", "tiktoken.model", "tokenizer_config.json"};
    char path[4096];
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, files[i]);
        unlink(path);
    }
    rmdir(folder);
}

static sl_tokenizer *on_pcre(const char *folder, sl_err *err) {
    char path[4096];
    size_t n, nc;
    snprintf(path, sizeof path, "%s/tokenizer.json", folder);
    char *s = slurp(path, &n);
    if (s) {
        sl_tokenizer *t = from_json(s, n, false, err);
        free(s);
        return t;
    }
    snprintf(path, sizeof path, "%s/tiktoken.model", folder);
    s = slurp(path, &n);
    snprintf(path, sizeof path, "%s/tokenizer_config.json", folder);
    char *c = slurp(path, &nc);
    sl_tokenizer *t = sl_tokenizer_alloc();
    t->no_plain = true;
    t->salt = 77;
    if (!s || !c || sl_tokenizer_from_tiktoken(t, s, n, c, nc, err)) {
        sl_tokenizer_free(t);
        t = NULL;
    }
    free(s);
    free(c);
    return t;
}

static int shared(const char *dir, const char *name) {
    char path[4096], folder[] = "/tmp/sltest-tok-XXXXXX";
    size_t n;
    snprintf(path, sizeof path, "%s/expected.jsonl.zst", dir);
    char *texts = unzstd(path, &n);
    if (!texts) return printf("SKIPPED: %s is absent\n", path), 77;
    sl_err err = {0};
    sl_tokenizer *t = NULL, *re = NULL;
    if (unpack(dir, name, folder)) {
        CHECK(!sl_tokenizer_load(&t, folder, &err), "%s", err.msg);
        re = on_pcre(folder, &err);
        CHECK(re, "on pcre2: %s", err.msg);
    }
    clean(folder);
    if (!t || !re) return 1;
    sl_tok_scratch *s = sl_tok_scratch_new(), *s2 = sl_tok_scratch_new();
    size_t rows = 0, compared = 0;
    for (char *line = texts, *end; (end = strchr(line, '\n')); line = end + 1) {
        json_t *j = json_loadb(line, (size_t)(end - line), JSON_ALLOW_NUL, NULL);
        const json_t *x = json_object_get(j, "text");
        const char *text = json_string_value(x);
        sl_ids ids = {.want_off = true}, other = {0};
        CHECK(!sl_tokenizer_encode(t, s, text, json_string_length(x), false, true, &ids, &err), "%s", err.msg);
        same(text, &ids, json_object_get(j, name));
        if (sl_tokenizer_exact(t)) check_pieces(t, text, json_string_length(x), &ids, false);
        if (!young(text, json_string_length(x))) {
            CHECK(!sl_tokenizer_encode(re, s2, text, json_string_length(x), false, true, &other, &err), "%s", err.msg);
            same("on pcre2", &other, json_object_get(j, name));
            compared++;
        }
        rows++;
        free(ids.ids);
        free(ids.off);
        free(other.ids);
        json_decref(j);
    }
    linear(name, t);
    printf("%s: %zu texts, %zu of them also on pcre2, vocabulary %d, kind %s\n", name, rows, compared,
           sl_tokenizer_vocab(t), sl_tokenizer_kind(t));
    CHECK(rows == 542, "%zu texts", rows);
    CHECK(compared > 450, "only %zu texts compared with pcre2", compared);
    free(texts);
    sl_tokenizer_free(t);
    sl_tokenizer_free(re);
    sl_tok_scratch_free(s);
    sl_tok_scratch_free(s2);
    return fails != 0;
}

/* --- unit --- */
typedef struct buf {
    unsigned char b[65536];
    size_t n;
} buf;
static void put(buf *b, const void *p, size_t n) {
    memcpy(b->b + b->n, p, n);
    b->n += n;
}
static void u32(buf *b, uint32_t v) {
    put(b, &v, 4);
}
static void u64(buf *b, uint64_t v) {
    put(b, &v, 8);
}
static void str(buf *b, const char *s) {
    u64(b, strlen(s));
    put(b, s, strlen(s));
}
static void kv_str(buf *b, const char *k, const char *v) {
    str(b, k);
    u32(b, SL_GV_STR);
    str(b, v);
}
static void kv_u32(buf *b, const char *k, uint32_t v) {
    str(b, k);
    u32(b, SL_GV_U32);
    u32(b, v);
}
static void kv_arr(buf *b, const char *k, uint32_t type, uint64_t n) {
    str(b, k);
    u32(b, SL_GV_ARR);
    u32(b, type);
    u64(b, n);
}
static void head(buf *b, uint64_t keys) {
    b->n = 0;
    put(b, "GGUF", 4);
    u32(b, 3);
    u64(b, 0);
    u64(b, keys);
}

static sl_tokenizer *from_gguf(const buf *b, sl_err *err) {
    sl_gguf *g = NULL;
    if (sl_gguf_open_mem(&g, b->b, b->n, err)) return NULL;
    sl_tokenizer *t = sl_tokenizer_alloc();
    if (sl_tokenizer_from_gguf_open(t, g, err)) {
        sl_tokenizer_free(t);
        t = NULL;
    }
    sl_gguf_close(g);
    return t;
}

static void expect(const sl_tokenizer *t, const char *text, bool special, int n, const int32_t *want) {
    sl_tok_scratch *s = sl_tok_scratch_new();
    sl_ids ids = {0};
    sl_err err = {0};
    CHECK(!sl_tokenizer_encode(t, s, text, strlen(text), special, true, &ids, &err), "'%s': %s", text, err.msg);
    CHECK(ids.n == (size_t)n, "'%s': %zu ids instead of %d", text, ids.n, n);
    for (int i = 0; i < n && (size_t)i < ids.n; i++)
        CHECK(ids.ids[i] == want[i], "'%s': id %d is %d, not %d", text, i, ids.ids[i], want[i]);
    free(ids.ids);
    sl_tok_scratch_free(s);
}
#define IDS(...)                                                                                                       \
    (int)(sizeof((int32_t[]){__VA_ARGS__}) / 4), (int32_t[]) {                                                         \
        __VA_ARGS__                                                                                                    \
    }

/* 0 <unk>, 1 <s>, 2 </s>, 3..258 bytes, then pieces: the best score merges first. */
static void gguf_llama(void) {
    static const char *const piece[] = {"\342\226\201", "a", "b", "ab", "\342\226\201ab", "bb", "abb"};
    static const float score[] = {-10, -11, -12, -2, -3, -1, -4};
    buf b;
    head(&b, 6);
    kv_str(&b, "tokenizer.ggml.model", "llama");
    kv_u32(&b, "tokenizer.ggml.bos_token_id", 1);
    kv_u32(&b, "tokenizer.ggml.eos_token_id", 2);
    kv_arr(&b, "tokenizer.ggml.tokens", SL_GV_STR, 259 + 7);
    str(&b, "<unk>");
    str(&b, "<s>");
    str(&b, "</s>");
    for (int i = 0; i < 256; i++) {
        char name[8];
        snprintf(name, sizeof name, "<0x%02X>", (unsigned)i);
        str(&b, name);
    }
    for (int i = 0; i < 7; i++) str(&b, piece[i]);
    kv_arr(&b, "tokenizer.ggml.scores", SL_GV_F32, 259 + 7);
    for (int i = 0; i < 266; i++) put(&b, i < 259 ? &(float){0} : &score[i - 259], 4);
    kv_arr(&b, "tokenizer.ggml.token_type", SL_GV_I32, 259 + 7);
    for (int i = 0; i < 266; i++) u32(&b, i == 0 ? 2 : i < 3 ? 3 : i < 259 ? 6 : 1);
    sl_err err = {0};
    sl_tokenizer *t = from_gguf(&b, &err);
    CHECK(t, "%s", err.msg);
    if (!t) return;
    expect(t, "ab", true, IDS(1, 263));             /* _ + ab -> _ab */
    expect(t, "ab abb", false, IDS(263, 259, 265)); /* bb goes first, so the second word is a + bb */
    expect(t, "c", false, IDS(259, 3 + 'c'));       /* falls back to its byte */
    expect(t, "a</s>b", false, IDS(259, 260, 2, 259, 261));
    CHECK(!strcmp(sl_tokenizer_kind(t), "gguf-llama"), "%s", sl_tokenizer_kind(t));
    size_t n = 0;
    const char *p = sl_tokenizer_piece(t, 3 + 'c', &n);
    CHECK(p && n == 1 && *p == 'c', "a byte token's piece is its byte");
    sl_tokenizer_free(t);
}

static void byte_name(int byte, char out[5]) {
    for (uint32_t cp = 0; cp < 0x144; cp++)
        if (sl_bytelevel_byte(cp) == byte) {
            out[sl_utf8_encode(cp, (uint8_t *)out)] = 0;
            return;
        }
}

static void gguf_gpt2(const char *pre, bool good) {
    buf b;
    char name[5];
    head(&b, 6);
    kv_str(&b, "tokenizer.ggml.model", "gpt2");
    kv_str(&b, "tokenizer.ggml.pre", pre);
    kv_u32(&b, "tokenizer.ggml.bos_token_id", 258);
    kv_arr(&b, "tokenizer.ggml.tokens", SL_GV_STR, 259);
    for (int i = 0; i < 256; i++) {
        byte_name(i, name);
        str(&b, name);
    }
    str(&b, "ab");
    str(&b, "\xc4\xa0"
            "ab");
    str(&b, "<|x|>");
    kv_arr(&b, "tokenizer.ggml.token_type", SL_GV_I32, 259);
    for (int i = 0; i < 259; i++) u32(&b, i == 258 ? 3 : 1);
    kv_arr(&b, "tokenizer.ggml.merges", SL_GV_STR, 2);
    str(&b, "a b");
    str(&b, "\xc4\xa0 ab");
    sl_err err = {0};
    sl_tokenizer *t = from_gguf(&b, &err);
    CHECK(good == (t != NULL), "pre '%s': %s", pre, err.msg);
    if (!t) {
        CHECK(err.code == SL_ECONFIG && strstr(err.msg, pre), "the refusal does not name '%s': %s", pre, err.msg);
        return;
    }
    expect(t, "ab ab<|x|>12", false, IDS(256, 257, 258, '1', '2'));
    sl_tokenizer_free(t);
}

static void refused(const char *json, const char *names) {
    sl_err err = {0};
    sl_tokenizer *t = from_json(json, strlen(json), true, &err);
    CHECK(!t && err.code == SL_ECONFIG && strstr(err.msg, names), "expected a refusal with '%s', got: %s", names,
          t ? "a tokenizer" : err.msg);
    sl_tokenizer_free(t);
}

static void refusals(void) {
    refused("{", "JSON");
    refused("[]", "object");
    refused("{}", "model type");
    refused("{\"model\":{\"type\":\"Unigram\",\"vocab\":[]}}", "Unigram");
    refused("{\"model\":{\"type\":\"BPE\",\"vocab\":{},\"merges\":[]}}", "vocab");
    refused("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":-1},\"merges\":[]}}", "id of 'a'");
    refused("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":99999999999},\"merges\":[]}}", "id of 'a'");
    refused("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":1,\"b\":1},\"merges\":[]}}", "given twice");
    refused("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1},\"merges\":[\"a b\"]}}", "the result");
    refused("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1},\"merges\":[\"a\"]}}", "merges[0]");
    refused("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[],\"dropout\":0.1}}", "dropout");
    refused("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[],\"unk_token\":\"u\"}}", "unk_token");
    refused("{\"normalizer\":{\"type\":\"NFKC\"},\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[]}}",
            "NFKC");
    refused("{\"pre_tokenizer\":{\"type\":\"BertPreTokenizer\"},\"model\":{}}", "BertPreTokenizer");
    refused(
        "{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(\"},\"behavior\":\"Isolated\"},\"model\":{}}",
        "pattern '('");
    refused("{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[a&&b]\"},\"behavior\":\"Isolated\"},"
            "\"model\":{}}",
            "intersection");
    refused(
        "{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},\"behavior\":\"Sideways\"},\"model\":{}}",
        "Sideways");
    refused("{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"ByteLevel\"},{\"type\":"
            "\"Digits\"}]},\"model\":{}}",
            "after ByteLevel");
    refused("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[]},\"added_tokens\":[{\"id\":-4,\"content\":"
            "\"x\"}]}",
            "added_tokens[0]");
    refused("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[]},\"post_processor\":{\"type\":\"Odd\"}}",
            "Odd");
}

static void utf8_errors(const sl_tokenizer *t) {
    static const struct {
        const char *s;
        size_t n, at;
    } bad[] = {{"ab\xff", 3, 2},      {"a\xc0\x80", 3, 1},        {"\xed\xa0\x80", 3, 0},
               {"abc\xe2\x82", 5, 3}, {"\xf4\x90\x80\x80", 4, 0}, {"12345678\x80", 9, 8}};
    sl_tok_scratch *s = sl_tok_scratch_new();
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        sl_ids ids = {0};
        sl_err err = {0};
        char want[32];
        snprintf(want, sizeof want, "byte %zu ", bad[i].at);
        CHECK(sl_tokenizer_encode(t, s, bad[i].s, bad[i].n, false, true, &ids, &err) == SL_EDATA &&
                  strstr(err.msg, want),
              "text %zu: %s", i, err.msg);
        CHECK(ids.n == 0, "ids were left behind");
        free(ids.ids);
    }
    sl_tok_scratch_free(s);
}

/* Tiktoken files made here: single bytes, and runs of a up to 8. The wrapper cuts after 25,000 of a kind and every
 * 400,000. */
static void tiktoken(void) {
    static const char b64[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    char model[4096];
    size_t n = 0;
    for (unsigned i = 0; i < 256; i++)
        n += (size_t)snprintf(model + n, sizeof model - n, "%c%c== %u\n", b64[i >> 2], b64[(i & 3) << 4], i);
    n += (size_t)snprintf(model + n, sizeof model - n, "YWE= 256\nYWFhYQ== 257\nYWFhYWFhYWE= 258\n");
    const char *cfg =
        "{\"tokenizer_class\":\"TikTokenTokenizer\",\"added_tokens_decoder\":{\"260\":{\"content\":\"[EOT]\"}}}";
    sl_err err = {0};
    sl_tokenizer *t = sl_tokenizer_alloc();
    CHECK(!sl_tokenizer_from_tiktoken(t, model, n, cfg, strlen(cfg), &err), "%s", err.msg);
    CHECK(sl_tokenizer_vocab(t) == 259 + 256, "%d", sl_tokenizer_vocab(t));
    CHECK(sl_tokenizer_special(t, "<|reserved_token_259|>") == 259 && sl_tokenizer_special(t, "[EOT]") == 260,
          "specials");
    expect(t, "aaaa[EOT]aab", false, IDS(257, 260, 256, 'b'));
    const size_t len = 25003; /* 25,000 = 3125 * 8, then aa + a */
    char *text = malloc(len + 1);
    memset(text, 'a', len);
    text[len] = 0;
    sl_tok_scratch *s = sl_tok_scratch_new();
    sl_ids ids = {.want_off = true};
    CHECK(!sl_tokenizer_encode(t, s, text, len, false, true, &ids, &err), "%s", err.msg);
    CHECK(ids.n == 3127 && ids.ids[3125] == 256 && ids.off[3125] == 25000 && ids.ids[3126] == 'a',
          "a run of 25,003: %zu ids", ids.n);
    free(ids.ids);
    free(ids.off);
    free(text);
    sl_tok_scratch_free(s);
    linear("tiktoken made here", t);
    utf8_errors(t);
    sl_tokenizer_free(t);
    t = sl_tokenizer_alloc();
    CHECK(sl_tokenizer_from_tiktoken(t, model + 7, n - 7, cfg, strlen(cfg), &err) == SL_ECONFIG &&
              strstr(err.msg, "0x00"),
          "%s", err.msg);
    sl_tokenizer_free(t);
}

static int unit(void) {
    sl_unicode_init();
    gguf_llama();
    gguf_gpt2("smollm", true);
    gguf_gpt2("default", true);
    gguf_gpt2("tekken", true);
    gguf_gpt2("of-a-name-never-heard", false);
    refusals();
    tiktoken();
    return fails != 0;
}

/* --- gguf --- */
static int gguf(const char *path) {
    const char *model = getenv("SL_SMOLLM2_GGUF");
    if (!model || access(model, R_OK)) return printf("SKIPPED: SL_SMOLLM2_GGUF names no readable file\n"), 77;
    sl_err err = {0};
    sl_tokenizer *t = NULL;
    CHECK(!sl_tokenizer_load(&t, model, &err), "%s", err.msg);
    json_t *all = json_load_file(path, JSON_ALLOW_NUL, NULL), *o;
    if (!t || !all) return 1;
    sl_tok_scratch *s = sl_tok_scratch_new();
    size_t i;
    json_array_foreach(all, i, o) {
        const json_t *x = json_object_get(o, "text");
        sl_ids ids = {.want_off = true};
        CHECK(!sl_tokenizer_encode(t, s, json_string_value(x), json_string_length(x), false, true, &ids, &err), "%s",
              err.msg);
        same(json_string_value(x), &ids, json_object_get(o, "ids"));
        check_pieces(t, json_string_value(x), json_string_length(x), &ids, true);
        free(ids.ids);
        free(ids.off);
    }
    printf("%zu texts\n", json_array_size(all));
    CHECK(json_array_size(all) >= 100, "only %zu texts", json_array_size(all));
    json_decref(all);
    sl_tok_scratch_free(s);
    sl_tokenizer_free(t);
    return fails != 0;
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "cases")) return cases(argv[2]);
    if (argc == 2 && !strcmp(argv[1], "unit")) return unit();
    if (argc == 4 && !strcmp(argv[1], "shared")) return shared(argv[2], argv[3]);
    if (argc == 3 && !strcmp(argv[1], "gguf")) return gguf(argv[2]);
    fprintf(stderr, "usage: test_tokenizer cases FILE | unit | shared DIR NAME | gguf FILE\n");
    return 2;
}
