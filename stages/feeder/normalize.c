#include "stages/feeder/normalize.h"
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>
#include "stages/feeder/unicode.h"

void sl_rewrite_reset(sl_rewrite *w, bool want_map) {
    w->n = w->n_e = 0;
    w->want_map = want_map;
    w->failed = false;
    w->under = NULL;
}

void sl_rewrite_free(sl_rewrite *w) {
    free(w->s);
    free(w->e);
    memset(w, 0, sizeof *w);
}

void sl_rewrite_copy(sl_rewrite *w, const char *s, size_t n) {
    if (w->n + n > w->cap) {
        size_t cap = (w->n + n) * 2 + 256;
        char *p = realloc(w->s, cap);
        if (!p) {
            w->failed = true;
            return;
        }
        w->s = p;
        w->cap = cap;
    }
    if (n) memcpy(w->s + w->n, s, n);
    w->n += n;
}

void sl_rewrite_put(sl_rewrite *w, const char *s, size_t n, size_t from, size_t from_n) {
    if (w->want_map) {
        if (w->n_e == w->cap_e) {
            size_t cap = w->cap_e * 2 + 64;
            sl_edit *p = realloc(w->e, cap * sizeof *p);
            if (!p) {
                w->failed = true;
                return;
            }
            w->e = p;
            w->cap_e = cap;
        }
        w->e[w->n_e++] = (sl_edit){(uint32_t)w->n, (uint32_t)n, (uint32_t)from, (uint32_t)from_n};
    }
    sl_rewrite_copy(w, s, n);
}

uint32_t sl_rewrite_map(const sl_rewrite *w, size_t *cursor, uint32_t x) {
    size_t i = *cursor; /* edits [0, i) begin at or before x */
    if (i && w->e[i - 1].to > x) i = 0;
    while (i < w->n_e && w->e[i].to <= x) i++;
    *cursor = i;
    if (!i) return x;
    const sl_edit *e = &w->e[i - 1];
    return x < e->to + e->to_n ? e->from : e->from + e->from_n + (x - e->to - e->to_n);
}

void sl_norm_step_free(sl_norm_step *s) {
    sl_regex_free(s->re);
    free(s->find);
    free(s->with);
    memset(s, 0, sizeof *s);
}

/* Text [a, b) holds characters that NFC may join: compose it. */
static int compose(sl_rewrite *w, const char *s, size_t a, size_t b, bool *changed, sl_err *err) {
    utf8proc_uint8_t *out = NULL;
    utf8proc_ssize_t n = utf8proc_map((const utf8proc_uint8_t *)s + a, (utf8proc_ssize_t)(b - a), &out,
                                      UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    if (n < 0) {
        free(out);
        return sl_err_set(err, n == UTF8PROC_ERROR_NOMEM ? SL_ETEMP : SL_EDATA, "NFC at byte %zu: %s", a,
                          utf8proc_errmsg(n));
    }
    if ((size_t)n == b - a && !memcmp(out, s + a, b - a))
        sl_rewrite_copy(w, s + a, b - a);
    else {
        /* Characters that came out as they went in, at either end, are no part of the edit. */
        size_t k = 0, tail = 0, len = (size_t)n;
        while (k < len && k < b - a && (char)out[k] == s[a + k]) k++;
        while (k && ((k < len && (out[k] & 0xc0) == 0x80) || (k < b - a && ((uint8_t)s[a + k] & 0xc0) == 0x80))) k--;
        while (tail < len - k && tail < b - a - k && (char)out[len - 1 - tail] == s[b - 1 - tail]) tail++;
        while (tail && (out[len - tail] & 0xc0) == 0x80) tail--;
        sl_rewrite_copy(w, s + a, k);
        sl_rewrite_put(w, (const char *)out + k, len - k - tail, a + k, b - a - k - tail);
        sl_rewrite_copy(w, s + b - tail, tail);
        *changed = true;
    }
    free(out);
    return 0;
}

/* Only clusters with a character that NFC can touch go through the library: the one before it, and all such that
 * follow. */
static int nfc(sl_rewrite *w, const char *s, size_t n, sl_err *err) {
    const uint8_t *p = (const uint8_t *)s;
    size_t i = 0, before = 0, copied = 0;
    bool changed = false;
    while (i < n) {
        unsigned len;
        if (p[i] < 0xcc) { /* below U+0300 */
            before = i;
            i += p[i] < 0x80 ? 1 : 2;
            continue;
        }
        uint32_t cp = sl_utf8_decode(p + i, &len);
        if (!(sl_unicode_class(cp) & SL_UC_NFC)) {
            i += len;
            before = sl_unicode_class(cp) & SL_UC_INERT ? i : i - len;
            continue;
        }
        size_t a = before < copied ? copied : before;
        while (i < n && (cp = sl_utf8_decode(p + i, &len), sl_unicode_class(cp) & SL_UC_NFC)) i += len;
        sl_rewrite_copy(w, s + copied, a - copied);
        if (compose(w, s, a, i, &changed, err)) return err ? err->code : SL_EDATA;
        copied = before = i;
    }
    if (!changed) return 0;
    sl_rewrite_copy(w, s + copied, n - copied);
    return 1;
}

static int replace(const sl_norm_step *st, sl_regex_scratch *rs, sl_rewrite *w, const char *s, size_t n, sl_err *err) {
    size_t at = 0, copied = 0, hits = 0;
    while (at <= n) {
        size_t a, b;
        if (st->re) {
            int rc = sl_regex_next(st->re, rs, s, n, at, &a, &b, err);
            if (rc < 0) return rc;
            if (!rc) break;
        } else {
            const char *hit = st->find_n && n > at ? memmem(s + at, n - at, st->find, st->find_n) : NULL;
            if (!hit) break;
            a = (size_t)(hit - s);
            b = a + st->find_n;
        }
        sl_rewrite_copy(w, s + copied, a - copied);
        sl_rewrite_put(w, st->with, st->with_n, a, b - a);
        hits++;
        copied = b;
        at = b > a ? b : b < n ? b + sl_utf8_len((uint8_t)s[b]) : n + 1; /* past an empty match by a character */
    }
    if (!hits) return 0;
    sl_rewrite_copy(w, s + copied, n - copied);
    return 1;
}

int sl_norm_apply(const sl_norm_step *step, sl_regex_scratch *rs, const char *s, size_t n, bool want_map, sl_rewrite *w,
                  sl_err *err) {
    int rc = 0;
    sl_rewrite_reset(w, want_map);
    if (step->kind == SL_NORM_NFC)
        rc = nfc(w, s, n, err);
    else if (step->kind == SL_NORM_REPLACE)
        rc = replace(step, rs, w, s, n, err);
    else if (n) { /* PREPEND: nothing before nothing */
        sl_rewrite_put(w, step->with, step->with_n, 0, 0);
        sl_rewrite_copy(w, s, n);
        rc = 1;
    }
    return rc >= 0 && w->failed ? sl_err_set(err, SL_ETEMP, "out of memory normalizing %zu bytes", n) : rc;
}
