#include "stages/feeder/match.h"
#include <stdbool.h>
#include <string.h>
#include "stages/feeder/unicode.h"

#define CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
const char SL_PATTERN_GPT2[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
const char SL_PATTERN_LLAMA3[] = CONTRACTIONS
    "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
const char SL_PATTERN_QWEN2[] =
    CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
const char SL_PATTERN_O200K[] =
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+" CONTRACTIONS "?"
    "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*" CONTRACTIONS "?"
    "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
const char SL_PATTERN_KIMI[] = "[\\p{Han}]+"
                               "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]*[\\p{Ll}\\p{"
                               "Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]+" CONTRACTIONS "?"
                               "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]+[\\p{Ll}\\p{"
                               "Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]*" CONTRACTIONS "?"
                               "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
const char SL_PATTERN_DIGITS3[] = "\\p{N}{1,3}";
const char SL_PATTERN_CJK[] = "[一-龥\u3040-ゟ゠-ヿ]+";
const char SL_PATTERN_DEEPSEEK[] =
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+";

#define WORDY (SL_UC_SPACE | SL_UC_LETTER | SL_UC_NUM)

static inline unsigned class_at(const uint8_t *p, unsigned *len) {
    if (*p < 0x80) return *len = 1, sl_unicode_flags[0][*p]; /* block 0 is always the first one made */
    return sl_unicode_class(sl_utf8_decode(p, len));
}

/* Skip characters that have one of `mask`. */
static inline const uint8_t *run(const uint8_t *p, const uint8_t *end, unsigned mask) {
    unsigned len;
    while (p < end && class_at(p, &len) & mask) p += len;
    return p;
}
/* Skip characters that have none of `mask`. */
static inline const uint8_t *run_not(const uint8_t *p, const uint8_t *end, unsigned mask) {
    unsigned len;
    while (p < end && !(class_at(p, &len) & mask)) p += len;
    return p;
}
static inline bool newline(uint8_t c) {
    return c == '\r' || c == '\n';
}

/* 's 't 're 've 'm 'll 'd at p (on the apostrophe); p itself when it is none. Unicode's long s folds to s. */
static inline const uint8_t *contraction(const uint8_t *p, const uint8_t *end, bool fold) {
    if (end - p < 2 || *p != '\'') return p;
    uint8_t a = p[1], b = end - p > 2 ? p[2] : 0;
    if (fold) {
        if (a == 0xc5 && b == 0xbf) return p + 3;
        if (a >= 'A' && a <= 'Z') a |= 0x20;
        if (b >= 'A' && b <= 'Z') b |= 0x20;
    }
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return p + 2;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return p + 3;
    return p;
}

/* Characters where an earlier split of a sequence of patterns ends the piece: numbers, and DeepSeek's CJK range. */
typedef enum { CUT_NONE, CUT_NUM, CUT_NUM_CJK } cuts;
static inline bool cjk(const uint8_t *p) {
    unsigned len;
    if (*p < 0xe3 || *p > 0xe9) return false;
    uint32_t c = sl_utf8_decode(p, &len);
    return (c >= 0x4e00 && c <= 0x9fa5) || (c >= 0x3040 && c <= 0x30ff);
}
static inline bool cut_at(const uint8_t *p, cuts k) {
    unsigned len;
    return k != CUT_NONE && (class_at(p, &len) & SL_UC_NUM || (k == CUT_NUM_CJK && cjk(p)));
}

/* \s*[\r\n]+ (when `lines`), else \s+(?!\S), else \s+: p stands on white space. */
static inline const uint8_t *white(const uint8_t *p, const uint8_t *end, bool lines, cuts k) {
    const uint8_t *start = p, *last = p, *after_newline = NULL;
    unsigned len;
    while (p < end && class_at(p, &len) & SL_UC_SPACE) {
        last = p;
        if (newline(*p)) after_newline = p + 1;
        p += len;
    }
    if (lines && after_newline) return after_newline;
    if (p == end || last == start || cut_at(p, k)) return p;
    return last; /* leave one for the word that follows */
}

static inline const uint8_t *digits(const uint8_t *p, const uint8_t *end, int most) {
    unsigned len;
    while (most-- && p < end && class_at(p, &len) & SL_UC_NUM) p += len;
    return p;
}

const uint8_t *sl_match_gpt2(const uint8_t *p, const uint8_t *end) {
    const uint8_t *q = contraction(p, end, false);
    if (q != p) return q;
    unsigned len, c = class_at(p, &len);
    q = p;
    if (*p == ' ' && p + 1 < end) c = class_at(++q, &len);
    if (c & SL_UC_LETTER) return run(q + len, end, SL_UC_LETTER);
    if (c & SL_UC_NUM) return run(q + len, end, SL_UC_NUM);
    if (!(c & SL_UC_SPACE)) return run_not(q + len, end, WORDY);
    return white(p, end, false, CUT_NONE);
}

/* Tail that llama3 and its children share: " ?[^\s\p{L}\p{N}]+[\r\n]*" with `slash` also eating '/', then white space.
 */
static inline const uint8_t *symbols_or_white(const uint8_t *p, const uint8_t *end, unsigned c, unsigned len,
                                              bool slash) {
    const uint8_t *q = p;
    if (*p == ' ' && p + 1 < end) c = class_at(++q, &len);
    if (c & WORDY) return white(p, end, true, CUT_NONE);
    q = run_not(q + len, end, WORDY);
    while (q < end && (newline(*q) || (slash && *q == '/'))) q++;
    return q;
}

static inline const uint8_t *llama(const uint8_t *p, const uint8_t *end, int most_digits) {
    const uint8_t *q = contraction(p, end, true);
    if (q != p) return q;
    unsigned len, len2, c = class_at(p, &len);
    if (c & SL_UC_LETTER) return run(p + len, end, SL_UC_LETTER);
    if (c & SL_UC_NUM) return digits(p, end, most_digits);
    if (!newline(*p) && p + len < end && class_at(p + len, &len2) & SL_UC_LETTER)
        return run(p + len + len2, end, SL_UC_LETTER);
    return symbols_or_white(p, end, c, len, false);
}
static const uint8_t *match_llama3(const uint8_t *p, const uint8_t *end) {
    return llama(p, end, 3);
}
static const uint8_t *match_qwen2(const uint8_t *p, const uint8_t *end) {
    return llama(p, end, 1);
}

/* o200k's words: U = upper, title, other, mark; W = lower, other, mark; `han` characters are in neither. */
#define BOTH    (SL_UC_OTHER | SL_UC_MARK)
#define CLASS_U (SL_UC_UPPER | BOTH)
#define CLASS_W (SL_UC_LOWER | BOTH)
static inline unsigned case_class(const uint8_t *p, unsigned *len, bool han) {
    unsigned c = class_at(p, len);
    return han && c & SL_UC_HAN ? 0 : c;
}

/* U*W+ at q: the end, or NULL. U* takes all it can; if no lower-case letter follows, it gives back to the last
 * character that is in both classes, and W+ takes just that one. */
static inline const uint8_t *upper_lower(const uint8_t *q, const uint8_t *end, bool han) {
    const uint8_t *both_end = NULL;
    unsigned len, c = 0;
    while (q < end && (c = case_class(q, &len, han)) & CLASS_U) {
        q += len;
        if (c & BOTH) both_end = q;
    }
    if (q < end && c & SL_UC_LOWER) {
        while (q < end && case_class(q, &len, han) & CLASS_W) q += len;
        return q;
    }
    return both_end;
}

/* U+W* at q when U*W+ failed there: then only capitals stand here. */
static inline const uint8_t *upper_only(const uint8_t *q, const uint8_t *end, bool han) {
    const uint8_t *start = q;
    unsigned len;
    while (q < end && case_class(q, &len, han) & CLASS_U) q += len;
    return q == start ? NULL : q;
}

static inline const uint8_t *cased(const uint8_t *p, const uint8_t *end, bool han, bool slash) {
    unsigned len, c = class_at(p, &len);
    if (han && c & SL_UC_HAN) return run(p, end, SL_UC_HAN);
    const bool prefix = !newline(*p) && !(c & (SL_UC_LETTER | SL_UC_NUM));
    const uint8_t *q = NULL;
    if (prefix) q = upper_lower(p + len, end, han);
    if (!q) q = upper_lower(p, end, han);
    if (!q && prefix) q = upper_only(p + len, end, han);
    if (!q) q = upper_only(p, end, han);
    if (q) return contraction(q, end, true);
    if (c & SL_UC_NUM) return digits(p, end, 3);
    return symbols_or_white(p, end, c, len, slash);
}
static const uint8_t *match_o200k(const uint8_t *p, const uint8_t *end) {
    return cased(p, end, false, true);
}
static const uint8_t *match_kimi(const uint8_t *p, const uint8_t *end) {
    return cased(p, end, true, false);
}

/* Every digit is a piece; what stands between digits follows gpt2's pattern. */
const uint8_t *sl_match_digits_gpt2(const uint8_t *p, const uint8_t *end) {
    const uint8_t *q = contraction(p, end, false);
    if (q != p) return q;
    unsigned len, c = class_at(p, &len);
    if (c & SL_UC_NUM) return p + len;
    q = p;
    if (*p == ' ' && p + 1 < end) c = class_at(++q, &len);
    if (c & SL_UC_LETTER) return run(q + len, end, SL_UC_LETTER);
    if (!(c & (SL_UC_SPACE | SL_UC_NUM))) return run_not(q + len, end, WORDY);
    return white(p, end, false, CUT_NUM);
}

/* Class as DeepSeek's third pattern sees it: at a cut the piece ends, so nothing there matches anything. */
static inline unsigned deepseek_class(const uint8_t *p, unsigned *len) {
    unsigned c = class_at(p, len);
    return c & SL_UC_NUM || cjk(p) ? 0 : c;
}
static inline const uint8_t *deepseek_run(const uint8_t *p, const uint8_t *end, unsigned mask) {
    unsigned len;
    while (p < end && deepseek_class(p, &len) & mask) p += len;
    return p;
}

/* DeepSeek's third pattern at p, which is no cut; NULL when nothing matches here. */
static const uint8_t *deepseek_word(const uint8_t *p, const uint8_t *end) {
    const unsigned word = SL_UC_LETTER | SL_UC_MARK, symbol = SL_UC_PUNCT | SL_UC_SYM;
    unsigned len, len2, c = class_at(p, &len);
    if (*p < 0x80 && c & symbol && p + 1 < end && (p[1] | 0x20) >= 'a' && (p[1] | 0x20) <= 'z') {
        for (p += 2; p < end && (*p | 0x20) >= 'a' && (*p | 0x20) <= 'z';) p++;
        return p;
    }
    if (c & SL_UC_LETTER) return deepseek_run(p + len, end, word);
    const bool prefix = !newline(*p) && !(c & symbol);
    if (prefix && p + len < end && deepseek_class(p + len, &len2) & word)
        return deepseek_run(p + len + len2, end, word);
    if (c & SL_UC_MARK) return p + len;
    const uint8_t *q = p;
    if (*p == ' ' && p + 1 < end) c = deepseek_class(++q, &len);
    if (c & symbol) {
        q = deepseek_run(q + len, end, symbol);
        while (q < end && newline(*q)) q++;
        return q;
    }
    return class_at(p, &len) & SL_UC_SPACE ? white(p, end, true, CUT_NUM_CJK) : NULL;
}

const uint8_t *sl_match_deepseek(const uint8_t *p, const uint8_t *end) {
    if (class_at(p, &(unsigned){0}) & SL_UC_NUM) return digits(p, end, 3);
    if (cjk(p)) {
        while (p < end && cjk(p)) p += sl_utf8_len(*p);
        return p;
    }
    const uint8_t *q = deepseek_word(p, end);
    if (q) return q;
    do p += sl_utf8_len(*p); /* between matches: one piece up to the next match or cut */
    while (p < end && !cut_at(p, CUT_NUM_CJK) && !deepseek_word(p, end));
    return p;
}

sl_match_fn sl_match_find(const char *pattern, size_t n) {
    static const struct {
        const char *pattern;
        sl_match_fn fn;
    } known[] = {{SL_PATTERN_GPT2, sl_match_gpt2},
                 {SL_PATTERN_LLAMA3, match_llama3},
                 {SL_PATTERN_QWEN2, match_qwen2},
                 {SL_PATTERN_O200K, match_o200k},
                 {SL_PATTERN_KIMI, match_kimi}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (strlen(known[i].pattern) == n && !memcmp(known[i].pattern, pattern, n)) return known[i].fn;
    return NULL;
}
