#include "stages/feeder/mask.h"
#include "stages/feeder/rows.h"
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

/* ---- small text tools ---- */

static size_t find(const char *s, size_t n, size_t from, const char *what, size_t m) {
    const char *p = from <= n ? memmem(s + from, n - from, what, m) : NULL;
    return p ? (size_t)(p - s) : SIZE_MAX;
}

static bool starts(const char *s, size_t n, const char *what, size_t m) {
    return n >= m && !memcmp(s, what, m);
}

static size_t common(const char *a, size_t na, const char *b, size_t nb) {
    size_t i = 0;
    while (i < na && i < nb && a[i] == b[i]) i++;
    while (i && i < na && ((unsigned char)a[i] & 0xc0) == 0x80) i--; /* not inside a character */
    return i;
}

/* What Python's str.strip() takes for white space. */
static bool is_space(utf8proc_int32_t c) {
    return (c >= 9 && c <= 13) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

static size_t lead_space(const char *s, size_t n, bool newlines) {
    size_t i = 0;
    while (i < n) {
        utf8proc_int32_t c;
        utf8proc_ssize_t k = utf8proc_iterate((const utf8proc_uint8_t *)s + i, (utf8proc_ssize_t)(n - i), &c);
        if (k <= 0 || (newlines ? c != '\n' : !is_space(c))) break;
        i += (size_t)k;
    }
    return i;
}

static size_t trail_space(const char *s, size_t n, bool newlines) {
    size_t end = n;
    while (end) {
        size_t i = end - 1;
        while (i && ((unsigned char)s[i] & 0xc0) == 0x80) i--;
        utf8proc_int32_t c;
        if (utf8proc_iterate((const utf8proc_uint8_t *)s + i, (utf8proc_ssize_t)(end - i), &c) <= 0 ||
            (newlines ? c != '\n' : !is_space(c)))
            break;
        end = i;
    }
    return n - end;
}

/* ---- the marked conversation ---- */

/* The part of a content that the template may move or trim: [*at, *at + *len). The rest stays when a mark is put in. */
static void body_of(const json_t *m, size_t *at, size_t *len) {
    json_t *c = json_object_get(m, "content");
    const char *s = json_string_value(c);
    size_t n = s ? json_string_length(c) : 0;
    *at = 0;
    *len = n;
    if (!s) return;
    if (!strcmp(json_string_value(json_object_get(m, "role")), "assistant")) {
        size_t last = SIZE_MAX;
        for (size_t p = find(s, n, 0, "</think>", 8); p != SIZE_MAX; p = find(s, n, p + 8, "</think>", 8)) last = p;
        if (last != SIZE_MAX) {
            *at = last + 8;
            *len = n - *at;
        }
        return;
    }
    static const char open[] = "<tool_response>", close[] = "</tool_response>";
    size_t o = sizeof open - 1, c2 = sizeof close - 1;
    if (n >= o + c2 && starts(s, n, open, o) && !memcmp(s + n - c2, close, c2)) {
        *at = o;
        *len = n - o - c2;
    }
}

json_t *sl_mask_marked(const json_t *messages, const char *key, unsigned char *marked) {
    json_t *out = json_array(), *m;
    size_t i;
    json_array_foreach(messages, i, m) {
        json_t *copy = json_copy(m); /* shallow: only the content is replaced */
        size_t at, len;
        body_of(m, &at, &len);
        json_t *c = json_object_get(m, "content");
        const char *s = json_string_value(c);
        marked[i] = s && lead_space(s + at, len, false) < len;
        if (marked[i]) {
            size_t n = json_string_length(c), cap = n - len + strlen(key) + 32;
            char *buf = malloc(cap);
            if (!buf) {
                json_decref(copy);
                json_decref(out);
                return NULL;
            }
            memcpy(buf, s, at);
            int k = snprintf(buf + at, cap - at, "%s%zu.", key, i);
            memcpy(buf + at + k, s + at + len, n - at - len);
            json_object_set_new(copy, "content", json_stringn(buf, n - len + (size_t)k));
            free(buf);
        }
        json_array_append_new(out, copy);
    }
    return out;
}

/* ---- learning the turn markers ---- */

void sl_turn_marks_free(sl_turn_marks *m) {
    free(m->head[0]);
    free(m->head[1]);
    free(m->end);
    memset(m, 0, sizeof *m);
}

/* What is learned here holds for every row to come: to have learned nothing for want of memory would cost all of
 * them. */
static char *dup_range(const char *s, size_t n) {
    char *p = n ? strndup(s, n) : NULL;
    if (n && !p) abort();
    return p;
}

/* Header: what the generation prompt and the text before a finished answer have in common. */
static void learn_head(sl_turn_marks *m, const sl_rendered *u, const sl_rendered *g, const sl_rendered *ua,
                       const sl_rendered *uau) {
    size_t n = strlen(SL_PROBE_A);
    if (!starts(g->text, g->len, u->text, u->len) || g->len == u->len) {
        snprintf(m->why, sizeof m->why, "the template has no generation prompt");
        return;
    }
    const char *H = g->text + u->len;
    size_t hn = g->len - u->len, l[2] = {0, 0};
    const sl_rendered *r[2] = {ua, uau};
    for (int i = 0; i < 2; i++) {
        size_t a = find(r[i]->text, r[i]->len, 0, SL_PROBE_A, n);
        if (a != SIZE_MAX && a >= u->len && starts(r[i]->text, r[i]->len, u->text, u->len))
            l[i] = common(H, hn, r[i]->text + u->len, a - u->len);
    }
    size_t longer = l[0] > l[1] ? l[0] : l[1], shorter = l[0] > l[1] ? l[1] : l[0];
    if (shorter < 3) { /* too little to tell a header by */
        shorter = longer;
        if (longer < 3) return (void)snprintf(m->why, sizeof m->why, "answers do not begin with the generation prompt");
    }
    m->head[0] = dup_range(H, longer);
    m->head[1] = shorter < longer ? dup_range(H, shorter) : NULL;
}

static void learn_end(sl_turn_marks *m, const sl_rendered *ua, const sl_rendered *uau) {
    size_t n = strlen(SL_PROBE_A);
    size_t a = find(ua->text, ua->len, 0, SL_PROBE_A, n), b = find(uau->text, uau->len, 0, SL_PROBE_A, n);
    size_t v = b == SIZE_MAX ? SIZE_MAX : find(uau->text, uau->len, b, SL_PROBE_V, strlen(SL_PROBE_V));
    if (a == SIZE_MAX || v == SIZE_MAX) {
        snprintf(m->why, sizeof m->why, "the template does not render a plain answer as it is");
        return;
    }
    const char *tail = ua->text + a + n;
    size_t tn = ua->len - a - n, k = common(tail, tn, uau->text + b + n, v - b - n);
    k -= trail_space(tail, k, false);
    size_t whole = tn - trail_space(tail, tn, false);
    /* Half a marker ("<|" of <|return|> and <|end|>) is none. */
    if (!k || (k != whole && !strchr(">]})", tail[k - 1]))) {
        snprintf(m->why, sizeof m->why, "the text after an answer has no end-of-turn marker");
        return;
    }
    m->end = dup_range(tail, k);
}

/* Families whose markers are known, for templates that refuse the probes (a system turn is demanded, say). */
static const struct {
    const char *sign, *head, *end;
} families[] = {
    {"<|im_start|>", "<|im_start|>assistant\n", "<|im_end|>"},
    {"<|start_header_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"},
    {"<｜Assistant｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"},
    {"<start_of_turn>", "<start_of_turn>model\n", "<end_of_turn>"},
    {"<|im_assistant|>", "<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"},
};

void sl_turn_marks_learn(sl_turn_marks *m, const sl_rendered *u, const sl_rendered *g, const sl_rendered *ua,
                         const sl_rendered *uau) {
    sl_turn_marks_free(m);
    m->probed = true;
    if (!u || !g || !ua || !uau) {
        snprintf(m->why, sizeof m->why, "the template refuses a plain conversation");
        return;
    }
    learn_head(m, u, g, ua, uau);
    learn_end(m, ua, uau);
}

/* The markers to use for this text: learned, else the family's. */
static void marks_for(const sl_turn_marks *tm, const sl_rendered *full, const char *head[2], const char **end) {
    head[0] = tm->head[0];
    head[1] = tm->head[1];
    *end = tm->end;
    if (*end) return; /* a template may well have no header that is always there: prefixes decide then */
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        if (find(full->text, full->len, 0, families[i].sign, strlen(families[i].sign)) != SIZE_MAX) {
            head[0] = families[i].head;
            head[1] = NULL;
            *end = families[i].end;
            return;
        }
}

/* ---- alignment ---- */

typedef struct piece { /* one content, where it was found */
    size_t message;
    size_t gap_a, gap_b; /* the template's text before it, in the marked rendering */
    size_t a, b;         /* the content in the full rendering */
} piece;

typedef struct align {
    const sl_rendered *full, *marks;
    const json_t *messages;
    const char *key;
    piece *p; /* n of them, then one more without content: the tail */
    size_t n;
    size_t *piece_of; /* by message: its piece, SIZE_MAX when it has none or several */
    const char *head[2], *end;
    sl_mask_start start_of;
    void *arg;
} align;

static const char *role_at(const json_t *messages, size_t i) {
    return json_string_value(json_object_get(json_array_get(messages, i), "role"));
}
static bool is_assistant(const json_t *messages, size_t i) {
    const char *r = role_at(messages, i);
    return r && !strcmp(r, "assistant");
}

/* Cut the marked rendering at its marks. */
static sl_reason cut_pieces(align *al, sl_err *why) {
    const char *t = al->marks->text;
    size_t n = al->marks->len, kn = strlen(al->key), n_msg = json_array_size(al->messages), cap = 0, at = 0;
    for (size_t p = find(t, n, 0, al->key, kn); p != SIZE_MAX; p = find(t, n, p + kn, al->key, kn)) cap++;
    al->p = calloc(cap + 1, sizeof *al->p);
    al->piece_of = malloc((n_msg + 1) * sizeof *al->piece_of);
    if (!al->p || !al->piece_of) return sl_lack(why, SL_R_MASK, "no memory to align %zu messages", n_msg);
    memset(al->piece_of, 0xff, (n_msg + 1) * sizeof *al->piece_of);
    for (size_t p = find(t, n, 0, al->key, kn); p != SIZE_MAX; p = find(t, n, at, al->key, kn)) {
        size_t i = 0, q = p + kn;
        while (q < n && isdigit((unsigned char)t[q]) && i < n_msg) i = i * 10 + (size_t)(t[q++] - '0');
        if (q >= n || t[q] != '.' || q == p + kn || i >= n_msg)
            return sl_refuse(why, SL_R_MASK,
                             "the template changes the contents of messages (a mark came back altered at byte %zu)", p);
        if (al->piece_of[i] != SIZE_MAX && is_assistant(al->messages, i))
            return sl_refuse(why, SL_R_MASK,
                             "the template writes the answer of message %zu twice: which one is meant cannot be told",
                             i);
        al->piece_of[i] = al->n;
        al->p[al->n++] = (piece){.message = i, .gap_a = at, .gap_b = p};
        at = q + 1;
    }
    al->p[al->n] = (piece){.message = SIZE_MAX, .gap_a = at, .gap_b = n};
    return SL_R_NONE;
}

/* Does the template's text of piece k stand at `at` in the full rendering? */
static bool gap_fits(const align *al, size_t k, size_t at) {
    const piece *p = &al->p[k];
    size_t n = p->gap_b - p->gap_a;
    if (k == al->n) return al->full->len - at == n && !memcmp(al->full->text + at, al->marks->text + p->gap_a, n);
    return al->full->len - at >= n && !memcmp(al->full->text + at, al->marks->text + p->gap_a, n);
}

/* The forms in which templates write a content: as it is, stripped on either side, of all white space or of newlines.
 */
static bool place_content(align *al, size_t k, size_t at, size_t *end) {
    const json_t *m = json_array_get(al->messages, al->p[k].message);
    size_t from, len;
    body_of(m, &from, &len);
    const char *s = json_string_value(json_object_get(m, "content")) + from;
    size_t lead[3] = {0, lead_space(s, len, true), lead_space(s, len, false)},
           trail[3] = {0, trail_space(s, len, true), trail_space(s, len, false)};
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < 3; j++) {
            if (lead[i] + trail[j] > len) continue;
            size_t n = len - lead[i] - trail[j];
            if (al->full->len - at < n || memcmp(al->full->text + at, s + lead[i], n) != 0) continue;
            if (!gap_fits(al, k + 1, at + n)) continue;
            *end = at + n;
            return true;
        }
    return false;
}

static sl_reason place_pieces(align *al, sl_err *why) {
    size_t at = 0;
    if (!gap_fits(al, 0, 0))
        return sl_refuse(why, SL_R_MASK,
                         "the template's own text depends on the contents of the messages (before message %zu)",
                         al->n ? al->p[0].message : 0);
    for (size_t k = 0; k < al->n; k++) {
        at += al->p[k].gap_b - al->p[k].gap_a;
        al->p[k].a = at;
        if (!place_content(al, k, at, &at))
            return sl_refuse(why, SL_R_MASK,
                             "message %zu (%s) does not come back as it was written: the template changes it",
                             al->p[k].message, role_at(al->messages, al->p[k].message));
        al->p[k].b = at;
    }
    al->p[al->n].a = al->p[al->n].b = al->full->len;
    return SL_R_NONE;
}

/* ---- turns ---- */

static size_t count_in(const align *al, size_t a, size_t b, const char *what) {
    size_t c = 0, n = strlen(what);
    for (size_t p = find(al->full->text, b, a, what, n); p != SIZE_MAX; p = find(al->full->text, b, p + n, what, n))
        c++;
    return c;
}

/* Does a message say `what` outside of its marked content (reasoning, tool calls, the part before </think>)? Then a
 * marker that is found in its turn proves nothing. */
static bool says_itself(json_t *m, const char *what, bool marked) {
    json_t *copy = json_copy(m);
    size_t at, len;
    body_of(m, &at, &len);
    const char *s = json_string_value(json_object_get(m, "content"));
    if (marked) json_object_set_new(copy, "content", json_stringn(s, at));
    char *d = json_dumps(copy, JSON_COMPACT);
    json_t *str = json_string(what);
    char *w = json_dumps(str, JSON_ENCODE_ANY | JSON_COMPACT); /* escaped the same way */
    bool found = false;
    if (d && w) found = memmem(d, strlen(d), w + 1, strlen(w) - 2) != NULL;
    free(d);
    free(w);
    json_decref(str);
    json_decref(copy);
    return found;
}

typedef struct turn {
    size_t message, gap_a, gap_b; /* the template's text in which it starts, in the full rendering */
    size_t k;                     /* its piece, SIZE_MAX: its content is empty */
} turn;

/* Start of turn number `nth` of the `of` turns that start in this gap. */
static sl_reason turn_start(align *al, const turn *t, size_t nth, size_t of, size_t *start, sl_err *why) {
    const char *h = al->head[1] ? al->head[1] : al->head[0];
    if (h && count_in(al, t->gap_a, t->gap_b, h) == of) {
        size_t p = t->gap_a, hn = strlen(h);
        for (size_t i = 0;; i++, p += hn) {
            p = find(al->full->text, t->gap_b, p, h, hn);
            if (i == nth) break;
        }
        size_t n = strlen(al->head[0]); /* the longer header, where it stands */
        if (al->head[1] && starts(al->full->text + p, t->gap_b - p, al->head[0], n)) hn = n;
        *start = p + hn;
        return SL_R_NONE;
    }
    long s = al->start_of ? al->start_of(al->arg, t->message, why) : -1;
    if (s < 0)
        return al->start_of
                   ? SL_R_MASK
                   : sl_refuse(
                         why, SL_R_MASK,
                         "where the turn of message %zu starts cannot be told: its header is not there exactly once",
                         t->message);
    if ((size_t)s < t->gap_a || (size_t)s > t->gap_b)
        return sl_refuse(
            why, SL_R_MASK,
            "message %zu: the generation prompt before it ends at byte %ld, outside of the text before its answer",
            t->message, s);
    *start = (size_t)s;
    return SL_R_NONE;
}

/* End of the turn: behind its end marker, which must come before byte `limit`. */
static sl_reason turn_end(align *al, const turn *t, size_t start, size_t limit, size_t *end, sl_err *why) {
    json_t *m = json_array_get(al->messages, t->message);
    size_t n = strlen(al->end), from = t->k == SIZE_MAX ? start : al->p[t->k].b;
    size_t p = find(al->full->text, limit, from, al->end, n);
    if (p == SIZE_MAX)
        return sl_refuse(why, SL_R_MASK, "message %zu: no end-of-turn marker '%s' after its answer", t->message,
                         al->end);
    bool calls = json_array_size(json_object_get(m, "tool_calls")) > 0;
    if (t->k != SIZE_MAX && !calls && p != from)
        return sl_refuse(why, SL_R_MASK, "message %zu: '%s' expected right after the answer, found %zu bytes later",
                         t->message, al->end, p - from);
    if ((t->k == SIZE_MAX || calls) && says_itself(m, al->end, t->k != SIZE_MAX))
        return sl_refuse(why, SL_R_MASK,
                         "message %zu: its reasoning or tool calls contain the end-of-turn marker '%s': where the turn "
                         "ends cannot be told",
                         t->message, al->end);
    *end = p + n;
    return SL_R_NONE;
}

/* The assistant turns in order, each with the gap in which it starts. */
static sl_reason list_turns(align *al, const unsigned char *marked, turn *t, size_t *n_turns, sl_err *why) {
    size_t n_msg = json_array_size(al->messages), gap = 0, n = 0;
    for (size_t i = 0; i < n_msg; i++) {
        size_t k = marked[i] ? al->piece_of[i] : SIZE_MAX;
        if (is_assistant(al->messages, i)) {
            if (marked[i] && k == SIZE_MAX)
                return sl_refuse(why, SL_R_MASK, "the template leaves out the answer of message %zu", i);
            if (k != SIZE_MAX) gap = k;
            t[n++] = (turn){.message = i, .gap_a = gap ? al->p[gap - 1].b : 0, .gap_b = al->p[gap].a, .k = k};
        }
        if (k != SIZE_MAX && k + 1 > gap) gap = k + 1; /* system turns may be moved to the front */
    }
    *n_turns = n;
    return SL_R_NONE;
}

static sl_reason find_turns(align *al, const unsigned char *marked, sl_span *spans, sl_err *why) {
    size_t n_msg = json_array_size(al->messages), n = 0;
    turn *t = calloc(n_msg + 1, sizeof *t);
    if (!t) return sl_lack(why, SL_R_MASK, "no memory for %zu turns", n_msg);
    sl_reason r = list_turns(al, marked, t, &n, why);
    for (size_t i = 0, first = 0; !r && i < n; i++) {
        if (t[i].gap_a != t[first].gap_a || t[i].gap_b != t[first].gap_b) first = i;
        size_t of = 1;
        while (first + of < n && t[first + of].gap_a == t[first].gap_a && t[first + of].gap_b == t[first].gap_b) of++;
        r = turn_start(al, &t[i], i - first, of, &spans[i].a, why);
        if (!r && i && spans[i].a < spans[i - 1].b)
            r = sl_refuse(why, SL_R_MASK, "message %zu: its turn would start inside the turn before it", t[i].message);
        /* The end lies before the next content (or in the same gap, for an empty turn). */
        size_t limit = t[i].k == SIZE_MAX ? t[i].gap_b : al->p[t[i].k + 1].a;
        if (!r) r = turn_end(al, &t[i], spans[i].a, limit, &spans[i].b, why);
    }
    free(t);
    return r;
}

sl_reason sl_mask_align(const sl_rendered *full, const sl_rendered *marks, const json_t *messages, const char *key,
                        const unsigned char *marked, const sl_turn_marks *tm, sl_mask_start start_of, void *arg,
                        sl_span *spans, sl_err *why) {
    align al = {.full = full, .marks = marks, .messages = messages, .key = key, .start_of = start_of, .arg = arg};
    marks_for(tm, full, al.head, &al.end);
    if (!al.end)
        return sl_refuse(why, SL_R_MASK, "the assistant's turns cannot be told from this template: %s",
                         tm->why[0] ? tm->why : "no markers");
    sl_reason r = cut_pieces(&al, why);
    if (!r) r = place_pieces(&al, why);
    if (!r) r = find_turns(&al, marked, spans, why);
    free(al.p);
    free(al.piece_of);
    return r;
}

/* ---- bytes to tokens ---- */

typedef struct text_buf {
    char *s;
    size_t n, cap;
} text_buf;

static void put(text_buf *b, const char *s, size_t n) {
    if (!n) return;
    if (b->n + n > b->cap) {
        size_t cap = b->cap ? b->cap : 256;
        while (cap < b->n + n) cap *= 2;
        char *p = realloc(b->s, cap);
        if (!p) abort(); /* (as in prepare.c) */
        b->s = p;
        b->cap = cap;
    }
    memcpy(b->s + b->n, s, n);
    b->n += n;
}

/* Equal as they are, or after Unicode composition (tokenizers that normalize to NFC). */
static bool same_text(const char *a, size_t na, const char *b, size_t nb) {
    if (na == nb && !memcmp(a, b, na)) return true;
    utf8proc_uint8_t *x = NULL, *y = NULL;
    utf8proc_option_t o = UTF8PROC_STABLE | UTF8PROC_COMPOSE;
    utf8proc_ssize_t nx = utf8proc_map((const utf8proc_uint8_t *)a, (utf8proc_ssize_t)na, &x, o);
    utf8proc_ssize_t ny = utf8proc_map((const utf8proc_uint8_t *)b, (utf8proc_ssize_t)nb, &y, o);
    if (nx == UTF8PROC_ERROR_NOMEM || ny == UTF8PROC_ERROR_NOMEM) abort();
    bool same = nx >= 0 && nx == ny && !memcmp(x, y, (size_t)nx);
    free(x);
    free(y);
    return same;
}

static sl_reason check_span(const sl_tokenizer *tok, const sl_ids *ids, const char *text, size_t len, const sl_span *sp,
                            size_t t0, size_t t1, sl_err *why) {
    size_t a = ids->off[t0], b = t1 < ids->n ? ids->off[t1] : len;
    if (a > sp->a || b < sp->b)
        return sl_refuse(why, SL_R_MASK, "tokens %zu..%zu do not cover bytes %zu..%zu", t0, t1, sp->a, sp->b);
    if (lead_space(text + a, sp->a - a, false) < sp->a - a || lead_space(text + sp->b, b - sp->b, false) < b - sp->b)
        return sl_refuse(why, SL_R_MASK,
                         "token %zu mixes the answer with the template's text: the tokenizer has no border there",
                         lead_space(text + a, sp->a - a, false) < sp->a - a ? t0 : t1 - 1);
    text_buf d = {0};
    bool ok = true;
    for (size_t i = t0; ok && i < t1; i++) {
        size_t n;
        const char *p = sl_tokenizer_piece(tok, ids->ids[i], &n);
        if ((ok = p != NULL)) put(&d, p, n);
    }
    ok = ok && same_text(d.s ? d.s : "", d.n, text + a, b - a);
    free(d.s);
    return ok ? SL_R_NONE
              : sl_refuse(why, SL_R_MASK, "the supervised tokens %zu..%zu do not decode to the answer's text", t0, t1);
}

sl_reason sl_mask_tokens(const sl_tokenizer *tok, const sl_ids *ids, const char *text, size_t len, const sl_span *spans,
                         size_t n, uint8_t *mask, sl_err *why) {
    memset(mask, 0, ids->n);
    size_t i = 0;
    for (size_t k = 0; k < n; k++) {
        if (spans[k].a >= spans[k].b) continue;
        if (spans[k].b > len) return sl_refuse(why, SL_R_MASK, "span %zu ends at byte %zu of %zu", k, spans[k].b, len);
        /* the first token with a byte in the span */
        while (i < ids->n && (i + 1 < ids->n ? ids->off[i + 1] : len) <= spans[k].a) i++;
        size_t t0 = i;
        while (i < ids->n && ids->off[i] < spans[k].b) mask[i++] = 1;
        if (t0 == i && !(t0 && mask[t0 - 1]))
            return sl_refuse(why, SL_R_MASK, "no token lies in bytes %zu..%zu", spans[k].a, spans[k].b);
        if (t0 == i) continue;
        sl_reason r = check_span(tok, ids, text, len, &spans[k], t0, i, why);
        if (r) return r;
    }
    return SL_R_NONE;
}
