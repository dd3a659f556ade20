/* Any bytes as text, through tiny vocabularies of every kind: invalid UTF-8 is refused at the right byte; otherwise the
 * pieces spell the text, starts rise, the cache changes nothing, and (where no younger Unicode is at stake) plain code
 * and pcre2 agree. */
#include "stages/feeder/match.h"
#include "stages/feeder/tokenizer_internal.h"
#include "stages/feeder/unicode.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct kind {
    const char *pattern[3];
    bool digits, nfc, chars;
} kind;
static const kind kinds[] = {{{SL_PATTERN_GPT2}, false, false, false},
                             {{SL_PATTERN_GPT2}, true, false, false},
                             {{SL_PATTERN_LLAMA3}, false, false, false},
                             {{SL_PATTERN_QWEN2}, false, true, false},
                             {{SL_PATTERN_O200K}, false, false, false},
                             {{SL_PATTERN_KIMI}, false, false, false},
                             {{SL_PATTERN_DIGITS3, SL_PATTERN_CJK, SL_PATTERN_DEEPSEEK}, false, false, false},
                             {{NULL}, false, false, true}};
#define N_KINDS (sizeof kinds / sizeof kinds[0])

static void vocabulary(sl_bpe *b, bool chars) {
    char name[8];
    int32_t id = 0;
    for (int i = 0; i < 256; i++) {
        name[0] = (char)i;
        if (chars) snprintf(name, sizeof name, "<0x%02X>", (unsigned)i);
        if (sl_bpe_add_token(b, id++, name, chars ? 6 : 1, true, NULL)) abort();
    }
    static const char *const more[] = {"\u2581", "a",   "b",    "aa", "aaaa",   "ab",      "\u2581a", " a",
                                       "th",     "the", "\n\n", "  ", "\u4f60", "a\u2581", "12"};
    for (size_t i = 0; i < sizeof more / sizeof more[0]; i++)
        if (chars || strlen(more[i]) > 1) sl_bpe_add_token(b, id++, more[i], strlen(more[i]), true, NULL);
    static const struct {
        const char *l, *r;
    } m[] = {{"a", "a"},  {"aa", "aa"}, {"a", "b"}, {"\xe2\x96\x81", "a"}, {" ", "a"}, {"t", "h"},
             {"th", "e"}, {"\n", "\n"}, {" ", " "}, {"a", "\xe2\x96\x81"}, {"1", "2"}};
    for (uint32_t i = 0; i < sizeof m / sizeof m[0]; i++) /* those whose parts are missing are refused, which is fine */
        sl_bpe_add_merge(b, m[i].l, strlen(m[i].l), m[i].r, strlen(m[i].r), i, NULL);
}

static sl_tokenizer *make(const kind *k, bool plain, uint64_t salt) {
    sl_tokenizer *t = sl_tokenizer_alloc();
    int rc = k->nfc ? sl_tokenizer_add_norm(t, SL_NORM_NFC, NULL, 0, true, NULL, 0, NULL) : 0;
    if (k->chars) rc = sl_tokenizer_add_norm(t, SL_NORM_REPLACE, " ", 1, true, "\xe2\x96\x81", 3, NULL);
    if (k->digits) rc |= sl_pretok_add_digits(t->pretok, true, NULL);
    for (int i = 0; i < 3 && k->pattern[i]; i++)
        rc |=
            sl_pretok_add_split(t->pretok, k->pattern[i], strlen(k->pattern[i]), false, SL_SPLIT_ISOLATED, false, NULL);
    if (!k->chars) rc |= sl_pretok_add_bytelevel(t->pretok, false, false, NULL);
    rc |= sl_pretok_finish(t->pretok, plain, NULL);
    t->bpe = sl_bpe_new(k->chars ? SL_BPE_CHARS : SL_BPE_BYTES);
    vocabulary(t->bpe, k->chars);
    rc |= sl_bpe_finish(t->bpe, &(sl_bpe_options){.byte_fallback = k->chars, .unk = SL_BPE_NONE}, salt, NULL);
    if (k->chars && plain) rc |= sl_tokenizer_find_cuts(t, NULL);
    rc |= sl_tokenizer_add_added(t, &(sl_added_token){.s = "<x>", .n = 3, .id = 400, .special = true}, NULL);
    rc |= sl_tokenizer_add_added(
        t, &(sl_added_token){.s = "<x>>", .n = 4, .id = 401, .lstrip = true, .rstrip = true, .normalized = true}, NULL);
    if (rc || sl_tokenizer_seal(t, NULL)) abort();
    t->chunked = k->pattern[0] == SL_PATTERN_KIMI;
    return t;
}

/* Classes that both engines surely know alike: ASCII, Latin, Greek, Cyrillic, CJK, general punctuation. */
static bool settled(const uint8_t *p, size_t n) {
    for (size_t i = 0; i < n;) {
        unsigned len;
        uint32_t c = sl_utf8_decode(p + i, &len);
        if (!(c < 0x370 || (c >= 0x400 && c < 0x500) || (c >= 0x2000 && c < 0x2060) || (c >= 0x3040 && c < 0x3097) ||
              (c >= 0x4e00 && c < 0x9f00)))
            return false;
        i += len;
    }
    return true;
}

static void compare(const sl_ids *a, const sl_ids *b) {
    if (a->n != b->n || (a->n && memcmp(a->ids, b->ids, a->n * sizeof *a->ids))) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static sl_tokenizer *plain[N_KINDS], *slow[N_KINDS];
    static sl_tok_scratch *sp[N_KINDS], *ss[N_KINDS]; /* one each: changing the tokenizer empties a scratch's cache */
    if (!sp[0]) {
        for (size_t i = 0; i < N_KINDS; i++) {
            sp[i] = sl_tok_scratch_new();
            ss[i] = sl_tok_scratch_new();
            plain[i] = make(&kinds[i], true, 2 * i + 1);
            slow[i] = make(&kinds[i], false, 2 * i + 2);
        }
    }
    const size_t bad = sl_unicode_check(data, size);
    const char *text = (const char *)data;
    for (size_t i = 0; i < N_KINDS; i++) {
        sl_ids a = {.want_off = true}, b = {0};
        sl_err err = {0};
        int rc = sl_tokenizer_encode(plain[i], sp[i], text, size, false, !(size & 1), &a, &err);
        if ((rc != 0) != (bad != size)) abort();
        size_t at = 0;
        for (size_t k = 0; k < a.n; k++) {
            size_t len;
            const char *p = sl_tokenizer_piece(plain[i], a.ids[k], &len);
            if (!p || a.off[k] > size || (k && a.off[k] < a.off[k - 1])) abort();
            if (kinds[i].chars || kinds[i].nfc || a.ids[k] == 401) {
                at = k + 1 < a.n ? a.off[k + 1] : size;
                continue;
            }
            if (a.off[k] != at || at + len > size || memcmp(p, text + at, len)) abort();
            at += len;
        }
        if (!rc && at != size && a.n) abort();
        if (!rc) {
            if (sl_tokenizer_encode(plain[i], sp[i], text, size, false, !(size & 1), &b, &err)) abort();
            compare(&a, &b);
            b.n = 0;
            if (settled(data, size)) {
                if (sl_tokenizer_encode(slow[i], ss[i], text, size, false, !(size & 1), &b, &err)) abort();
                compare(&a, &b);
            }
        }
        free(a.ids);
        free(a.off);
        free(b.ids);
    }
    return 0;
}
