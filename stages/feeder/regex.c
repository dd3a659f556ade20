#include "stages/feeder/regex.h"
#include <stdlib.h>
#include <string.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#define SPACES "\\t-\\r \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"

struct sl_regex {
    pcre2_code *code;
};
struct sl_regex_scratch {
    pcre2_match_data *md;
    pcre2_match_context *mc;
    pcre2_jit_stack *stack;
};

typedef struct sbuf {
    char *s;
    size_t n, cap;
    bool failed;
} sbuf;

static void put(sbuf *t, const char *s, size_t n) {
    if (t->n + n > t->cap) {
        size_t cap = (t->n + n) * 2 + 64;
        char *p = realloc(t->s, cap);
        if (!p) {
            t->failed = true;
            return;
        }
        t->s = p;
        t->cap = cap;
    }
    memcpy(t->s + t->n, s, n);
    t->n += n;
}
#define PUTS(t, s) put((t), (s), strlen(s))

/* End of the class that starts at p[i] == '[' (after its ']'); 0 when it never ends. Nested sets count. */
static size_t class_end(const char *p, size_t n, size_t i) {
    int depth = 0;
    for (; i < n; i++) {
        if (p[i] == '\\')
            i++;
        else if (p[i] == '[')
            depth++;
        else if (p[i] == ']' && --depth == 0)
            return i + 1;
    }
    return 0;
}

/* Contents of a class without its brackets; nothing in it may nest. */
static int put_class(sbuf *t, const char *p, size_t n, sl_err *err) {
    for (size_t i = 0; i < n; i++) {
        if (p[i] == '\\' && i + 1 < n) {
            if (p[i + 1] == 's')
                PUTS(t, SPACES);
            else if (p[i + 1] == 'S' || p[i + 1] == 'h' || p[i + 1] == 'H')
                return sl_err_set(err, SL_ECONFIG, "'\\%c' inside a set is not supported", p[i + 1]);
            else
                put(t, p + i, 2);
            i++;
        } else if (p[i] == '[') {
            return sl_err_set(err, SL_ECONFIG, "a set inside a set is not supported");
        } else
            put(t, p + i, 1);
    }
    return 0;
}

/* "[A&&[^B]]" at p[i..e): one character that is not in B and is in A. */
static int put_set(sbuf *t, const char *p, size_t i, size_t e, sl_err *err) {
    size_t amp = 0;
    for (size_t k = i; k + 1 < e && !amp; k++) {
        if (p[k] == '\\')
            k++;
        else if (p[k] == '&' && p[k + 1] == '&')
            amp = k;
    }
    if (!amp) {
        PUTS(t, "[");
        int rc = put_class(t, p + i + 1, e - i - 2, err);
        PUTS(t, "]");
        return rc;
    }
    const char *rest = p + amp + 2;
    size_t n = e - 1 - (amp + 2);
    if (n < 4 || rest[0] != '[' || rest[1] != '^' || class_end(rest, n, 0) != n || p[i + 1] == '^')
        return sl_err_set(err, SL_ECONFIG, "a set intersection other than [A&&[^B]] is not supported");
    PUTS(t, "(?:(?![");
    if (put_class(t, rest + 2, n - 3, err)) return SL_ECONFIG;
    PUTS(t, "])[");
    if (put_class(t, p + i + 1, amp - i - 1, err)) return SL_ECONFIG;
    PUTS(t, "])");
    return 0;
}

static int translate(sbuf *t, const char *p, size_t n, sl_err *err) {
    for (size_t i = 0; i < n; i++) {
        if (p[i] == '\\' && i + 1 < n) {
            char c = p[++i];
            if (c == 's')
                PUTS(t, "[" SPACES "]");
            else if (c == 'S')
                PUTS(t, "[^" SPACES "]");
            else if (c == 'h' || c == 'H' || c == 'O' || c == 'y' || c == 'Y')
                return sl_err_set(err, SL_ECONFIG, "'\\%c' is not supported", c);
            else
                put(t, p + i - 1, 2);
        } else if (p[i] == '[') {
            size_t e = class_end(p, n, i);
            if (!e) return sl_err_set(err, SL_ECONFIG, "the set at offset %zu never ends", i);
            int rc = put_set(t, p, i, e, err);
            if (rc) return rc;
            i = e - 1;
        } else
            put(t, p + i, 1);
    }
    return 0;
}

static int literal_of(sbuf *t, const char *p, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (strchr("\\^$.[]|()?*+{}#-", p[i]) && p[i]) PUTS(t, "\\");
        put(t, p + i, 1);
    }
    return 0;
}

int sl_regex_new(sl_regex **out, const char *pattern, size_t n, bool literal, sl_err *err) {
    *out = NULL;
    sbuf t = {0};
    if (n > 1 << 20) return sl_err_set(err, SL_ECONFIG, "a pattern of %zu bytes", n);
    int rc = literal ? literal_of(&t, pattern, n) : translate(&t, pattern, n, err);
    sl_regex *r = rc ? NULL : calloc(1, sizeof *r);
    if (!rc && (!r || t.failed)) rc = sl_err_set(err, SL_ETEMP, "out of memory compiling a pattern");
    if (!rc) {
        int code;
        PCRE2_SIZE at;
        r->code = pcre2_compile((PCRE2_SPTR)(t.s ? t.s : ""), t.n,
                                PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &code, &at, NULL);
        if (!r->code) {
            PCRE2_UCHAR msg[160];
            pcre2_get_error_message(code, msg, sizeof msg);
            rc = sl_err_set(err, SL_ECONFIG, "pattern '%.*s': %s (offset %zu of its translation)",
                            (int)(n < 200 ? n : 200), pattern, (char *)msg, (size_t)at);
        } else {
            pcre2_jit_compile(r->code, PCRE2_JIT_COMPLETE); /* without a JIT the interpreter gives the same answers */
        }
    } else if (err && rc == SL_ECONFIG) {
        sl_err_wrap(err, "pattern '%.*s'", (int)(n < 200 ? n : 200), pattern);
    }
    free(t.s);
    if (rc)
        sl_regex_free(r);
    else
        *out = r;
    return rc;
}

void sl_regex_free(sl_regex *r) {
    if (!r) return;
    pcre2_code_free(r->code);
    free(r);
}

sl_regex_scratch *sl_regex_scratch_new(void) {
    sl_regex_scratch *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->md = pcre2_match_data_create(1, NULL);
    s->mc = pcre2_match_context_create(NULL);
    s->stack = pcre2_jit_stack_create(64 << 10, 32 << 20, NULL);
    if (!s->md || !s->mc) {
        sl_regex_scratch_free(s);
        return NULL;
    }
    pcre2_set_match_limit(s->mc, 50u << 20);
    pcre2_set_heap_limit(s->mc, 256 << 10); /* KiB, for the interpreter */
    if (s->stack) pcre2_jit_stack_assign(s->mc, NULL, s->stack);
    return s;
}

void sl_regex_scratch_free(sl_regex_scratch *s) {
    if (!s) return;
    pcre2_match_data_free(s->md);
    pcre2_match_context_free(s->mc);
    if (s->stack) pcre2_jit_stack_free(s->stack);
    free(s);
}

int sl_regex_next(const sl_regex *r, sl_regex_scratch *s, const char *text, size_t n, size_t from, size_t *a, size_t *b,
                  sl_err *err) {
    int rc = pcre2_match(r->code, (PCRE2_SPTR)text, n, from, PCRE2_NO_UTF_CHECK, s->md, s->mc);
    if (rc == PCRE2_ERROR_NOMATCH) return 0;
    if (rc < 0) {
        PCRE2_UCHAR msg[160];
        pcre2_get_error_message(rc, msg, sizeof msg);
        return sl_err_set(err, SL_EDATA, "matching the tokenizer's pattern at byte %zu of a piece of %zu: %s", from, n,
                          (char *)msg);
    }
    PCRE2_SIZE *v = pcre2_get_ovector_pointer(s->md);
    *a = v[0];
    *b = v[1] < v[0] ? v[0] : v[1]; /* \K in a look-ahead may put the end first */
    return 1;
}
