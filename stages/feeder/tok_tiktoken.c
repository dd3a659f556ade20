/* Loader of tiktoken.model + tokenizer_config.json as Kimi ships them: a line a token, "base64 rank"; rank is id and
 * priority. 256 special slots follow the base vocabulary; those without a name are written <|reserved_token_ID|>. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "stages/feeder/match.h"
#include "stages/feeder/tokenizer_internal.h"

#define SLOTS 256

static int sextet(uint8_t c) {
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Strict base64 with padding; returns the bytes, -1 on anything else. out: n / 4 * 3 bytes. */
static long base64(const char *s, size_t n, char *out) {
    size_t o = 0, pad = 0;
    if (!n || n % 4) return -1;
    if (s[n - 1] == '=') pad = s[n - 2] == '=' ? 2 : 1;
    for (size_t i = 0; i < n; i += 4) {
        uint32_t v = 0;
        size_t keep = i + 4 == n ? 4 - pad : 4;
        for (size_t k = 0; k < 4; k++) {
            int x = k < keep ? sextet((uint8_t)s[i + k]) : 0;
            if (x < 0) return -1;
            v = v << 6 | (uint32_t)x;
        }
        for (size_t k = 0; k + 1 < keep; k++) out[o++] = (char)(v >> (16 - 8 * k));
    }
    return (long)o;
}

static int line(sl_tokenizer *t, const char *s, size_t n, size_t no, char *buf, sl_err *err) {
    const char *sp = memchr(s, ' ', n);
    long rank = 0, k = sp && (size_t)(sp - s) <= 8192 ? base64(s, (size_t)(sp - s), buf) : -1;
    const char *d = sp ? sp + 1 : s;
    bool ok = k > 0 && d < s + n && s + n - d <= 8;
    for (; ok && d < s + n; d++) {
        ok = *d >= '0' && *d <= '9';
        rank = rank * 10 + (*d - '0');
    }
    if (!ok) return sl_err_set(err, SL_ECONFIG, "line %zu is not \"base64 rank\"", no);
    int rc = sl_bpe_add_token(t->bpe, (int32_t)rank, buf, (size_t)k, true, err);
    return rc ? sl_err_wrap(err, "line %zu", no), rc : 0;
}

static int lines(sl_tokenizer *t, const char *s, size_t n, sl_err *err) {
    char *buf = malloc(8192);
    if (!buf) return sl_err_set(err, SL_ETEMP, "out of memory");
    int rc = 0;
    size_t no = 0;
    for (size_t i = 0; i < n && !rc;) {
        const char *nl = memchr(s + i, '\n', n - i);
        size_t len = nl ? (size_t)(nl - s) - i : n - i, keep = len;
        no++;
        if (keep && s[i + keep - 1] == '\r') keep--;
        if (keep) rc = line(t, s + i, keep, no, buf, err);
        i += len + 1;
    }
    free(buf);
    return rc;
}

static int complete(const sl_tokenizer *t, sl_err *err) {
    for (int i = 0; i < 256; i++) {
        char c = (char)i;
        if (sl_bpe_find(t->bpe, &c, 1) < 0)
            return sl_err_set(err, SL_ECONFIG, "the single byte 0x%02x is missing", (unsigned)i);
    }
    for (int32_t id = 0; id < sl_bpe_size(t->bpe); id++) {
        size_t n;
        if (!sl_bpe_piece(t->bpe, id, &n)) return sl_err_set(err, SL_ECONFIG, "rank %d is missing", id);
    }
    return 0;
}

static int specials(sl_tokenizer *t, const json_t *table, int32_t base, sl_err *err) {
    if (!json_is_object(table)) return sl_err_set(err, SL_ECONFIG, "tokenizer_config.json has no added_tokens_decoder");
    int rc = 0;
    for (int32_t id = base; id < base + SLOTS && !rc; id++) {
        char key[16], name[48];
        snprintf(key, sizeof key, "%d", id);
        snprintf(name, sizeof name, "<|reserved_token_%d|>", id);
        const json_t *o = json_object_get(table, key), *c = json_object_get(o, "content");
        const char *s = json_is_string(c) ? json_string_value(c) : name;
        if (o && (!*s || strlen(s) > SL_ADDED_MAX_BYTES))
            return sl_err_set(err, SL_ECONFIG, "added_tokens_decoder[%d]: 'content' has 0 or too many bytes", id);
        sl_added_token tok = {.s = (char *)s, .n = (uint32_t)strlen(s), .id = id, .special = true};
        rc = sl_tokenizer_add_added(t, &tok, err);
    }
    for (void *i = json_object_iter((json_t *)table); i && !rc; i = json_object_iter_next((json_t *)table, i)) {
        char *end;
        long id = strtol(json_object_iter_key(i), &end, 10);
        if (*end || id < base || id >= base + SLOTS)
            rc = sl_err_set(err, SL_ECONFIG, "added_tokens_decoder: id '%.20s' is outside the special slots %d to %d",
                            json_object_iter_key(i), base, base + SLOTS - 1);
    }
    return rc;
}

int sl_tokenizer_from_tiktoken(sl_tokenizer *t, const char *model, size_t n, const char *config, size_t n_config,
                               sl_err *err) {
    json_error_t je;
    json_t *cfg =
        json_loadb(config, n_config, JSON_DECODE_INT_AS_REAL, &je); /* model_max_length may be 1e30 written out */
    if (!cfg)
        return sl_err_set(err, SL_ECONFIG, "tokenizer_config.json: line %d column %d: %s", je.line, je.column, je.text);
    const char *cls = json_string_value(json_object_get(cfg, "tokenizer_class"));
    int rc = 0;
    if (cls && strcmp(cls, "TikTokenTokenizer"))
        rc = sl_err_set(err, SL_ECONFIG,
                        "tokenizer_class '%s' with a tiktoken file is not supported (known: TikTokenTokenizer)", cls);
    if (!rc && !(t->bpe = sl_bpe_new(SL_BPE_BYTES))) rc = sl_err_set(err, SL_ETEMP, "out of memory");
    if (!rc) rc = lines(t, model, n, err);
    if (!rc) rc = complete(t, err);
    if (!rc) {
        const int32_t base = sl_bpe_size(t->bpe);
        uint32_t *rank = malloc((size_t)base * sizeof *rank);
        for (int32_t i = 0; rank && i < base; i++) rank[i] = (uint32_t)i;
        rc = rank ? sl_bpe_merges_from_vocab(t->bpe, rank, (size_t)base, err)
                  : sl_err_set(err, SL_ETEMP, "out of memory");
        free(rank);
        if (!rc) rc = sl_bpe_finish(t->bpe, &(sl_bpe_options){.whole_piece = true, .unk = SL_BPE_NONE}, t->salt, err);
        if (!rc) rc = specials(t, json_object_get(cfg, "added_tokens_decoder"), base, err);
    }
    if (!rc)
        rc = sl_pretok_add_split(t->pretok, SL_PATTERN_KIMI, strlen(SL_PATTERN_KIMI), false, SL_SPLIT_ISOLATED, false,
                                 err);
    if (!rc) rc = sl_pretok_add_bytelevel(t->pretok, false, false, err);
    if (!rc) rc = sl_pretok_finish(t->pretok, !t->no_plain, err);
    if (!rc) rc = sl_tokenizer_seal(t, err);
    t->kind = "tiktoken";
    t->chunked = true;
    json_decref(cfg);
    return rc;
}
