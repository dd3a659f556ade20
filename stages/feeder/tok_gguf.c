/* Loader of the vocabulary inside a GGUF file: kinds "gpt2" (byte-level BPE; tokenizer.ggml.pre names the split) and
 * "llama" (SentencePiece: merges by score, bytes as fall-back). */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>
#include "stages/compute/gguf.h"
#include "stages/feeder/match.h"
#include "stages/feeder/tokenizer_internal.h"
#include "stages/feeder/unicode.h"

#define KEY(x) "tokenizer.ggml." x
enum { TYPE_NORMAL = 1, TYPE_UNKNOWN = 2, TYPE_CONTROL = 3, TYPE_USER = 4, TYPE_UNUSED = 5, TYPE_BYTE = 6 };

static const char TEKKEN[] =
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"
    "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*"
    "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

/* tokenizer.ggml.pre: how the published tokenizer of that name splits. */
static const struct pre {
    const char *name;
    bool digits; /* every digit alone first */
    const char *pattern[4];
    bool nfc, whole_piece, bos;
} pres[] = {
    {"llama-bpe", false, {SL_PATTERN_LLAMA3}, .whole_piece = true, .bos = true},
    {"llama3", false, {SL_PATTERN_LLAMA3}, .whole_piece = true, .bos = true},
    {"llama-v3", false, {SL_PATTERN_LLAMA3}, .whole_piece = true, .bos = true},
    {"qwen2", false, {SL_PATTERN_QWEN2}, .nfc = true},
    {"deepseek-r1-qwen", false, {SL_PATTERN_QWEN2}},
    {"deepseek-v3", false, {SL_PATTERN_DIGITS3, SL_PATTERN_CJK, SL_PATTERN_DEEPSEEK}},
    {"smollm", true, {SL_PATTERN_GPT2}},
    {"starcoder", true, {SL_PATTERN_GPT2}},
    {"refact", true, {SL_PATTERN_GPT2}},
    {"command-r", true, {SL_PATTERN_GPT2}},
    {"gpt-2", false, {SL_PATTERN_GPT2}},
    {"phi-2", false, {SL_PATTERN_GPT2}},
    {"mpt", false, {SL_PATTERN_GPT2}},
    {"olmo", false, {SL_PATTERN_GPT2}},
    {"gpt-4o", false, {SL_PATTERN_O200K}},
    {"llama4", false, {SL_PATTERN_O200K}},
    {"kimi-k2", false, {SL_PATTERN_KIMI}},
    {"tekken", false, {TEKKEN}, .whole_piece = true, .bos = true},
    {"default", false, {"[\\p{P}\\$\\+<=>\\^~\\|]+", SL_PATTERN_GPT2, "\\p{N}+", "[0-9][0-9][0-9]"}},
};

static const struct pre *pre_named(sl_gguf_str s) {
    for (size_t i = 0; i < sizeof pres / sizeof pres[0]; i++)
        if (strlen(pres[i].name) == s.n && !memcmp(pres[i].name, s.s, s.n)) return &pres[i];
    return NULL;
}

static int type_at(const sl_gguf *g, uint64_t i) {
    double v;
    return sl_gguf_arr_num(g, KEY("token_type"), i, &v) || !(v >= 0 && v < 16) ? TYPE_NORMAL : (int)v;
}
static bool is(sl_gguf_str s, const char *c) {
    return s.n == strlen(c) && !memcmp(s.s, c, s.n);
}

/* Text of token i; the array walked in order. */
static int token_at(const sl_gguf *g, uint64_t i, sl_gguf_str *s, sl_err *err) {
    if (sl_gguf_arr_str(g, KEY("tokens"), i, s))
        return sl_err_set(err, SL_ECONFIG, KEY("tokens") "[%llu] is no string", (unsigned long long)i);
    if (sl_unicode_check((const uint8_t *)s->s, s->n) != s->n)
        return sl_err_set(err, SL_ECONFIG, KEY("tokens") "[%llu] is not UTF-8", (unsigned long long)i);
    return 0;
}

static int vocabulary(sl_tokenizer *t, const sl_gguf *g, bool bytes, sl_err *err) {
    const uint64_t n = sl_gguf_arr_len(g, KEY("tokens"));
    if (!n || n > SL_BPE_MAX_IDS)
        return sl_err_set(err, SL_ECONFIG, KEY("tokens") " has %llu entries", (unsigned long long)n);
    char *buf = NULL;
    size_t cap = 0;
    int rc = 0;
    for (uint64_t i = 0; i < n && !rc; i++) {
        sl_gguf_str s;
        if ((rc = token_at(g, i, &s, err))) break;
        int type = type_at(g, i);
        long k = -1;
        if (bytes && (type == TYPE_NORMAL || type == TYPE_UNUSED)) {
            if (s.n + 1 > cap) {
                char *p = realloc(buf, cap = s.n * 2 + 64);
                if (!p) {
                    rc = sl_err_set(err, SL_ETEMP, "out of memory loading the vocabulary");
                    break;
                }
                buf = p;
            }
            k = sl_bytelevel_decode(s.s, s.n, buf);
        }
        rc = k >= 0 ? sl_bpe_add_token(t->bpe, (int32_t)i, buf, (size_t)k, true, err)
                    : sl_bpe_add_token(t->bpe, (int32_t)i, s.s, s.n, !bytes, err);
    }
    free(buf);
    return rc;
}

static int added(sl_tokenizer *t, const sl_gguf *g, sl_err *err) {
    const uint64_t n = sl_gguf_arr_len(g, KEY("tokens"));
    int rc = 0;
    for (uint64_t i = 0; i < n && !rc; i++) {
        int type = type_at(g, i);
        sl_gguf_str s;
        if (type != TYPE_CONTROL && type != TYPE_USER && type != TYPE_UNKNOWN) continue;
        if ((rc = token_at(g, i, &s, err))) break;
        if (!s.n) continue;
        if (s.n > SL_ADDED_MAX_BYTES || memchr(s.s, 0, s.n))
            return sl_err_set(err, SL_ECONFIG, "special token %llu has %llu bytes or a NUL", (unsigned long long)i,
                              (unsigned long long)s.n);
        char name[SL_ADDED_MAX_BYTES + 1];
        memcpy(name, s.s, s.n);
        name[s.n] = 0;
        rc = sl_tokenizer_add_added(
            t, &(sl_added_token){.s = name, .n = (uint32_t)s.n, .id = (int32_t)i, .special = type != TYPE_USER}, err);
    }
    return rc;
}

static int merges(sl_tokenizer *t, const sl_gguf *g, sl_err *err) {
    const uint64_t n = sl_gguf_arr_len(g, KEY("merges"));
    char *buf = NULL;
    size_t cap = 0;
    int rc = 0;
    for (uint64_t i = 0; i < n && !rc; i++) {
        sl_gguf_str s;
        const char *sp = NULL;
        if (!sl_gguf_arr_str(g, KEY("merges"), i, &s) && sl_unicode_check((const uint8_t *)s.s, s.n) == s.n && s.n > 2)
            sp = memchr(s.s + 1, ' ', s.n - 1);
        if (sp && s.n > cap) {
            char *p = realloc(buf, cap = s.n * 2 + 64);
            if (!p) {
                rc = sl_err_set(err, SL_ETEMP, "out of memory loading merges");
                break;
            }
            buf = p;
        }
        size_t nl = sp ? (size_t)(sp - s.s) : 0;
        long a = sp ? sl_bytelevel_decode(s.s, nl, buf) : -1,
             b = a < 0 ? -1 : sl_bytelevel_decode(sp + 1, s.n - nl - 1, buf + a);
        rc = b < 0 ? sl_err_set(err, SL_ECONFIG, KEY("merges") "[%llu] is not two byte-level strings",
                                (unsigned long long)i)
                   : sl_bpe_add_merge(t->bpe, buf, (size_t)a, buf + a, (size_t)b, (uint32_t)i, err);
    }
    free(buf);
    return rc;
}

static int gpt2(sl_tokenizer *t, const sl_gguf *g, bool *bos, sl_err *err) {
    sl_gguf_str name;
    if (sl_gguf_string(g, KEY("pre"), &name)) name = (sl_gguf_str){"default", 7};
    const struct pre *p = pre_named(name);
    if (!p)
        return sl_err_set(err, SL_ECONFIG, KEY("pre") " '%.*s' is not known", (int)(name.n < 60 ? name.n : 60), name.s);
    int rc = p->nfc ? sl_tokenizer_add_norm(t, SL_NORM_NFC, NULL, 0, true, NULL, 0, err) : 0;
    if (!rc && p->digits) rc = sl_pretok_add_digits(t->pretok, true, err);
    for (int i = 0; i < 4 && p->pattern[i] && !rc; i++)
        rc = sl_pretok_add_split(t->pretok, p->pattern[i], strlen(p->pattern[i]), false, SL_SPLIT_ISOLATED, false, err);
    if (!rc) rc = sl_pretok_add_bytelevel(t->pretok, false, false, err);
    if (!rc) rc = sl_pretok_finish(t->pretok, !t->no_plain, err);
    if (!rc && !(t->bpe = sl_bpe_new(SL_BPE_BYTES))) rc = sl_err_set(err, SL_ETEMP, "out of memory");
    if (!rc) rc = vocabulary(t, g, true, err);
    if (!rc && !sl_gguf_arr_len(g, KEY("merges"))) rc = sl_err_set(err, SL_ECONFIG, KEY("merges") " is missing");
    if (!rc) rc = merges(t, g, err);
    *bos = p->bos;
    t->kind = "gguf-gpt2";
    return rc ? rc
              : sl_bpe_finish(t->bpe, &(sl_bpe_options){.whole_piece = p->whole_piece, .unk = SL_BPE_NONE}, t->salt,
                              err);
}

typedef struct scored {
    double score;
    uint32_t id;
} scored;
static int best_first(const void *a, const void *b) {
    const scored *x = a, *y = b;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

/* Rank by score, best first; equal scores share a rank, so that the leftmost goes first. */
static int ranks(const sl_gguf *g, uint32_t *rank, size_t n, sl_err *err) {
    if (sl_gguf_arr_len(g, KEY("scores")) != n)
        return sl_err_set(err, SL_ECONFIG, KEY("scores") " has %llu entries for %zu tokens",
                          (unsigned long long)sl_gguf_arr_len(g, KEY("scores")), n);
    scored *s = malloc(n * sizeof *s);
    if (!s) return sl_err_set(err, SL_ETEMP, "out of memory");
    int rc = 0;
    for (size_t i = 0; i < n && !rc; i++) {
        s[i].id = (uint32_t)i;
        if (sl_gguf_arr_num(g, KEY("scores"), i, &s[i].score) || !isfinite(s[i].score))
            rc = sl_err_set(err, SL_ECONFIG, KEY("scores") "[%zu] is not a finite number", i);
    }
    if (!rc) qsort(s, n, sizeof *s, best_first);
    uint32_t r = 0;
    for (size_t i = 0; i < n && !rc; i++) {
        if (i && s[i].score != s[i - 1].score) r++;
        rank[s[i].id] = r;
    }
    free(s);
    return rc;
}

static int llama(sl_tokenizer *t, const sl_gguf *g, sl_err *err) {
    const uint64_t n = sl_gguf_arr_len(g, KEY("tokens"));
    double v;
    int rc = 0;
    if (sl_gguf_num(g, KEY("add_space_prefix"), &v) || v != 0)
        rc = sl_tokenizer_add_norm(t, SL_NORM_PREPEND, NULL, 0, true, " ", 1, err);
    if (!rc) rc = sl_tokenizer_add_norm(t, SL_NORM_REPLACE, " ", 1, true, "\xe2\x96\x81", 3, err);
    if (!rc && !(t->bpe = sl_bpe_new(SL_BPE_CHARS))) rc = sl_err_set(err, SL_ETEMP, "out of memory");
    if (!rc) rc = vocabulary(t, g, false, err);
    uint32_t *rank = rc ? NULL : malloc((size_t)n * sizeof *rank);
    if (!rc && !rank) rc = sl_err_set(err, SL_ETEMP, "out of memory");
    if (!rc) rc = ranks(g, rank, (size_t)n, err);
    if (!rc) rc = sl_bpe_merges_from_vocab(t->bpe, rank, (size_t)n, err);
    free(rank);
    double unk = 0;
    sl_gguf_num(g, KEY("unknown_token_id"), &unk);
    sl_bpe_options o = {
        .byte_fallback = true, .merge_unknown = true, .unk = unk >= 0 && unk < (double)n ? (int32_t)unk : SL_BPE_NONE};
    if (!rc) rc = sl_bpe_finish(t->bpe, &o, t->salt, err);
    if (!rc) rc = sl_tokenizer_find_cuts(t, err);
    if (!rc) rc = sl_pretok_finish(t->pretok, !t->no_plain, err);
    t->kind = "gguf-llama";
    return rc;
}

/* One id before or after a text, when the file asks for it. */
static int extra(sl_tokenizer *t, const sl_gguf *g, const char *flag, const char *key, bool otherwise, int32_t *v,
                 int *n, sl_err *err) {
    double on, id;
    if (sl_gguf_num(g, flag, &on)) on = otherwise;
    if (on == 0) return 0;
    if (sl_gguf_num(g, key, &id) || !(id >= 0 && id < t->vocab))
        return sl_err_set(err, SL_ECONFIG, "%s is set, but %s gives no token", flag, key);
    v[(*n)++] = (int32_t)id;
    return 0;
}

static void hash(sl_tokenizer *t, const sl_gguf *g) {
    XXH3_state_t *x = XXH3_createState();
    if (!x) return;
    XXH3_128bits_reset(x);
    static const char *const arrays[] = {KEY("tokens"), KEY("merges")}, *const numbers[] = {KEY("token_type"),
                                                                                            KEY("scores")};
    static const char *const strings[] = {KEY("model"), KEY("pre")};
    sl_gguf_str s;
    double d;
    for (int k = 0; k < 2; k++) {
        if (!sl_gguf_string(g, strings[k], &s)) XXH3_128bits_update(x, s.s, s.n);
        for (uint64_t i = 0; i < sl_gguf_arr_len(g, arrays[k]) && !sl_gguf_arr_str(g, arrays[k], i, &s); i++) {
            XXH3_128bits_update(x, &s.n, sizeof s.n);
            XXH3_128bits_update(x, s.s, s.n);
        }
        for (uint64_t i = 0; i < sl_gguf_arr_len(g, numbers[k]) && !sl_gguf_arr_num(g, numbers[k], i, &d); i++)
            XXH3_128bits_update(x, &d, sizeof d);
    }
    XXH128_hash_t h = XXH3_128bits_digest(x);
    XXH3_freeState(x);
    static const char hex[] = "0123456789abcdef";
    for (int i = 0; i < 16; i++) {
        t->hash[i] = hex[h.high64 >> (60 - 4 * i) & 15];
        t->hash[16 + i] = hex[h.low64 >> (60 - 4 * i) & 15];
    }
    t->salt = h.low64 | 1;
}

int sl_tokenizer_from_gguf_open(sl_tokenizer *t, const sl_gguf *g, sl_err *err) {
    sl_gguf_str model;
    if (sl_gguf_string(g, KEY("model"), &model))
        return sl_err_set(err, SL_ECONFIG, "the file has no tokenizer (" KEY("model") " is missing)");
    bool spm = is(model, "llama"), bos = true;
    if (!spm && !is(model, "gpt2"))
        return sl_err_set(err, SL_ECONFIG, KEY("model") " '%.*s' is not supported (known: gpt2, llama)",
                          (int)(model.n < 60 ? model.n : 60), model.s);
    hash(t, g);
    int rc = spm ? llama(t, g, err) : gpt2(t, g, &bos, err);
    if (!rc) rc = added(t, g, err);
    if (!rc) rc = sl_tokenizer_seal(t, err);
    if (!rc) rc = extra(t, g, KEY("add_bos_token"), KEY("bos_token_id"), bos, t->before, &t->n_before, err);
    return rc ? rc : extra(t, g, KEY("add_eos_token"), KEY("eos_token_id"), false, t->after, &t->n_after, err);
}

int sl_tokenizer_from_gguf(sl_tokenizer *t, const char *path, sl_err *err) {
    sl_gguf *g = NULL;
    int rc = sl_gguf_open(&g, path, err);
    if (rc) return rc;
    rc = sl_tokenizer_from_gguf_open(t, g, err);
    sl_gguf_close(g);
    return rc;
}
