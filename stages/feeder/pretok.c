#include "stages/feeder/pretok.h"
#include <stdlib.h>
#include <string.h>
#include "stages/feeder/match.h"
#include "stages/feeder/unicode.h"

#define MAX_STEPS 32

typedef enum { STEP_SPLIT, STEP_CLASS, STEP_PREFIX_SPACE, STEP_METASPACE } step_kind;
typedef struct step {
    step_kind kind;
    sl_split how;
    bool invert;
    char *pattern; /* SPLIT: as written; METASPACE: the mark; owned */
    size_t pattern_n;
    bool literal;
    sl_regex *re;
    sl_match_fn plain; /* SPLIT by a known pattern */
    unsigned classes;  /* CLASS: the characters that match */
    bool ascii_punct;  /* CLASS: and all ASCII punctuation */
    sl_prefix prefix;  /* METASPACE */
    bool split;
} step;

struct sl_pretok {
    step st[MAX_STEPS];
    int n;
    bool bytelevel;
    sl_match_fn whole; /* the entire sequence as one matcher */
};

typedef struct piece {
    uint32_t a, b;
} piece;
typedef struct pieces {
    piece *p;
    size_t n, cap;
} pieces;

struct sl_pretok_scratch {
    sl_regex_scratch *rs;
    pieces cur, next;
    sl_rewrite w[2]; /* at most two steps may rewrite: Metaspace and ByteLevel's prefix space */
};

sl_pretok *sl_pretok_new(void) {
    return calloc(1, sizeof(sl_pretok));
}

void sl_pretok_free(sl_pretok *t) {
    if (!t) return;
    for (int i = 0; i < t->n; i++) {
        free(t->st[i].pattern);
        sl_regex_free(t->st[i].re);
    }
    free(t);
}

int sl_split_named(const char *name) {
    static const char *const names[] = {"Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"};
    for (int i = 0; i < 5; i++)
        if (!strcmp(name, names[i])) return i;
    return -1;
}

/* --- building --- */
static int add(sl_pretok *t, const step *s, sl_err *err) {
    if (t->bytelevel) return sl_err_set(err, SL_ECONFIG, "pre_tokenizer: a step after ByteLevel is not supported");
    if (t->n == MAX_STEPS) return sl_err_set(err, SL_ECONFIG, "pre_tokenizer: more than %d steps", MAX_STEPS);
    t->st[t->n++] = *s;
    return 0;
}

static int add_text(sl_pretok *t, step s, const char *text, size_t n, sl_err *err) {
    if (!(s.pattern = malloc(n + 1))) return sl_err_set(err, SL_ETEMP, "out of memory");
    memcpy(s.pattern, text, n);
    s.pattern[n] = 0;
    s.pattern_n = n;
    int rc = add(t, &s, err);
    if (rc) free(s.pattern);
    return rc;
}

int sl_pretok_add_split(sl_pretok *t, const char *pattern, size_t n, bool literal, sl_split how, bool invert,
                        sl_err *err) {
    return add_text(t, (step){.kind = STEP_SPLIT, .how = how, .invert = invert, .literal = literal}, pattern, n, err);
}
int sl_pretok_add_digits(sl_pretok *t, bool individual, sl_err *err) {
    return add(
        t,
        &(step){.kind = STEP_CLASS, .how = individual ? SL_SPLIT_ISOLATED : SL_SPLIT_CONTIGUOUS, .classes = SL_UC_NUM},
        err);
}
int sl_pretok_add_punctuation(sl_pretok *t, sl_split how, sl_err *err) {
    return add(t, &(step){.kind = STEP_CLASS, .how = how, .classes = SL_UC_PUNCT, .ascii_punct = true}, err);
}
int sl_pretok_add_whitespace(sl_pretok *t, sl_err *err) {
    return add(t, &(step){.kind = STEP_CLASS, .how = SL_SPLIT_REMOVED, .classes = SL_UC_SPACE}, err);
}

int sl_pretok_add_bytelevel(sl_pretok *t, bool add_prefix_space, bool use_regex, sl_err *err) {
    int rc = add_prefix_space ? add(t, &(step){.kind = STEP_PREFIX_SPACE}, err) : 0;
    if (!rc && use_regex)
        rc = sl_pretok_add_split(t, SL_PATTERN_GPT2, strlen(SL_PATTERN_GPT2), false, SL_SPLIT_ISOLATED, false, err);
    if (!rc && t->bytelevel) rc = sl_err_set(err, SL_ECONFIG, "pre_tokenizer: ByteLevel given twice");
    if (!rc) t->bytelevel = true;
    return rc;
}

int sl_pretok_add_metaspace(sl_pretok *t, const char *mark, size_t n, sl_prefix prefix, bool split, sl_err *err) {
    if (!n || n > 4 || sl_unicode_check((const uint8_t *)mark, n) != n || sl_utf8_len((uint8_t)mark[0]) != n)
        return sl_err_set(err, SL_ECONFIG, "pre_tokenizer: Metaspace replacement must be one character");
    return add_text(t, (step){.kind = STEP_METASPACE, .how = SL_SPLIT_NEXT, .prefix = prefix, .split = split}, mark, n,
                    err);
}

static bool is_pattern(const step *s, const char *pattern) {
    return s->kind == STEP_SPLIT && !s->literal && !s->invert && s->how == SL_SPLIT_ISOLATED &&
           s->pattern_n == strlen(pattern) && !memcmp(s->pattern, pattern, s->pattern_n);
}

static sl_match_fn whole_matcher(const sl_pretok *t) {
    const step *s = t->st;
    if (t->n == 1 && s->plain) return s->plain;
    if (t->n == 3 && is_pattern(&s[0], SL_PATTERN_DIGITS3) && is_pattern(&s[1], SL_PATTERN_CJK) &&
        is_pattern(&s[2], SL_PATTERN_DEEPSEEK))
        return sl_match_deepseek;
    if (t->n == 2 && s[0].kind == STEP_CLASS && s[0].classes == SL_UC_NUM && s[0].how == SL_SPLIT_ISOLATED &&
        is_pattern(&s[1], SL_PATTERN_GPT2))
        return sl_match_digits_gpt2;
    return NULL;
}

int sl_pretok_finish(sl_pretok *t, bool plain, sl_err *err) {
    int rewrites = 0;
    sl_unicode_init();
    for (int i = 0; i < t->n; i++) {
        step *s = &t->st[i];
        if (s->kind == STEP_PREFIX_SPACE || s->kind == STEP_METASPACE) rewrites++;
        if (s->kind != STEP_SPLIT) continue;
        if (plain && !s->literal && !s->invert && s->how == SL_SPLIT_ISOLATED)
            s->plain = sl_match_find(s->pattern, s->pattern_n);
        if (s->plain) continue;
        int rc = sl_regex_new(&s->re, s->pattern, s->pattern_n, s->literal, err);
        if (rc) return sl_err_wrap(err, "pre_tokenizer"), rc;
    }
    if (rewrites > 2) return sl_err_set(err, SL_ECONFIG, "pre_tokenizer: more than two steps that insert characters");
    if (plain) t->whole = whole_matcher(t);
    return 0;
}

bool sl_pretok_bytelevel(const sl_pretok *t) {
    return t->bytelevel;
}
bool sl_pretok_plain(const sl_pretok *t) {
    return t->whole != NULL;
}

/* --- running --- */
sl_pretok_scratch *sl_pretok_scratch_new(void) {
    sl_pretok_scratch *s = calloc(1, sizeof *s);
    if (s && !(s->rs = sl_regex_scratch_new())) {
        free(s);
        return NULL;
    }
    return s;
}

void sl_pretok_scratch_free(sl_pretok_scratch *s) {
    if (!s) return;
    sl_regex_scratch_free(s->rs);
    free(s->cur.p);
    free(s->next.p);
    sl_rewrite_free(&s->w[0]);
    sl_rewrite_free(&s->w[1]);
    free(s);
}

static int push(pieces *v, size_t a, size_t b, sl_err *err) {
    if (v->n == v->cap) {
        size_t cap = v->cap * 2 + 64;
        piece *p = realloc(v->p, cap * sizeof *p);
        if (!p) return sl_err_set(err, SL_ETEMP, "out of memory splitting a text");
        v->p = p;
        v->cap = cap;
    }
    v->p[v->n++] = (piece){(uint32_t)a, (uint32_t)b};
    return 0;
}

typedef struct joiner { /* turns (range, is a match) in order into pieces, as the behaviour says */
    pieces *out;
    sl_split how;
    bool any, last_match; /* of this piece's parts so far */
    bool pending;         /* NEXT: a match that waits for what follows */
    size_t pend_a;
    size_t pend_b;
} joiner;

static int join(joiner *j, size_t a, size_t b, bool match, sl_err *err) {
    int rc = 0;
    if (a == b && j->how != SL_SPLIT_PREVIOUS && j->how != SL_SPLIT_NEXT) return 0; /* empty parts vanish */
    switch (j->how) {
    case SL_SPLIT_REMOVED:
        if (!match) rc = push(j->out, a, b, err);
        break;
    case SL_SPLIT_ISOLATED:
        rc = push(j->out, a, b, err);
        break;
    case SL_SPLIT_CONTIGUOUS:
        if (j->any && j->last_match == match)
            j->out->p[j->out->n - 1].b = (uint32_t)b;
        else
            rc = push(j->out, a, b, err);
        break;
    case SL_SPLIT_PREVIOUS:
        if (match && !j->last_match && j->any)
            j->out->p[j->out->n - 1].b = (uint32_t)b;
        else
            rc = push(j->out, a, b, err);
        break;
    case SL_SPLIT_NEXT: /* a match joins what follows unless that is a match too */
        if (j->pending && match) rc = push(j->out, j->pend_a, j->pend_b, err);
        if (match) {
            j->pending = true;
            j->pend_a = a;
            j->pend_b = b;
        } else if (!rc) {
            rc = push(j->out, j->pending ? j->pend_a : a, b, err);
            j->pending = false;
        }
        break;
    }
    j->any = true;
    j->last_match = match;
    return rc;
}

static int join_end(joiner *j, sl_err *err) {
    return j->pending ? push(j->out, j->pend_a, j->pend_b, err) : 0;
}

static int split_regex(const step *s, sl_regex_scratch *rs, const char *text, piece in, joiner *j, sl_err *err) {
    const char *t = text + in.a;
    size_t n = in.b - in.a, at = 0, done = 0, a, b;
    int rc = 0;
    while (at <= n && (rc = sl_regex_next(s->re, rs, t, n, at, &a, &b, err)) == 1) {
        rc = a > done ? join(j, in.a + done, in.a + a, s->invert, err) : 0;
        if (!rc) rc = join(j, in.a + a, in.a + b, !s->invert, err);
        if (rc) return rc;
        done = b;
        at = b > a ? b : b < n ? b + sl_utf8_len((uint8_t)t[b]) : n + 1;
    }
    if (rc < 0) return rc;
    return done < n ? join(j, in.a + done, in.b, s->invert, err) : 0;
}

static int split_class(const step *s, const char *text, piece in, joiner *j, sl_err *err) {
    size_t done = in.a;
    for (size_t i = in.a; i < in.b;) {
        unsigned len, c = sl_unicode_class(sl_utf8_decode((const uint8_t *)text + i, &len));
        bool hit = c & s->classes || (s->ascii_punct && (uint8_t)text[i] < 0x80 && c & SL_UC_SYM);
        if (hit) {
            int rc = done < i ? join(j, done, i, s->invert, err) : 0;
            if (!rc) rc = join(j, i, i + len, !s->invert, err);
            if (rc) return rc;
            done = i + len;
        }
        i += len;
    }
    return done < in.b ? join(j, done, in.b, s->invert, err) : 0;
}

static int split_mark(const step *s, const char *text, piece in, joiner *j, sl_err *err) {
    size_t done = in.a;
    for (;;) {
        const char *hit = done < in.b ? memmem(text + done, in.b - done, s->pattern, s->pattern_n) : NULL;
        if (!hit) break;
        size_t a = (size_t)(hit - text);
        int rc = done < a ? join(j, done, a, false, err) : 0;
        if (!rc) rc = join(j, a, a + s->pattern_n, true, err);
        if (rc) return rc;
        done = a + s->pattern_n;
    }
    return done < in.b ? join(j, done, in.b, false, err) : 0;
}

static int split_all(const step *s, sl_pretok_scratch *sc, const char *text, sl_err *err) {
    sc->next.n = 0;
    for (size_t i = 0; i < sc->cur.n; i++) {
        piece in = sc->cur.p[i];
        joiner j = {.out = &sc->next, .how = s->how};
        int rc = 0;
        if (s->kind == STEP_CLASS)
            rc = split_class(s, text, in, &j, err);
        else if (s->kind == STEP_METASPACE)
            rc = split_mark(s, text, in, &j, err);
        else if (s->plain) {
            const uint8_t *p = (const uint8_t *)text + in.a, *end = (const uint8_t *)text + in.b;
            for (const uint8_t *q; p < end && !rc; p = q) {
                q = s->plain(p, end);
                rc = push(&sc->next, (size_t)(p - (const uint8_t *)text), (size_t)(q - (const uint8_t *)text), err);
            }
        } else
            rc = split_regex(s, sc->rs, text, in, &j, err);
        if (!rc) rc = join_end(&j, err);
        if (rc) return rc;
    }
    pieces swap = sc->cur;
    sc->cur = sc->next;
    sc->next = swap;
    return 0;
}

/* Metaspace's marks and prefix, ByteLevel's prefix space: copy every piece into w, changed. */
static int insert(const step *s, sl_pretok_scratch *sc, const char *text, bool at_start, bool want_map, sl_rewrite *w,
                  sl_err *err) {
    sl_rewrite_reset(w, want_map);
    sc->next.n = 0;
    const bool meta = s->kind == STEP_METASPACE;
    for (size_t i = 0; i < sc->cur.n; i++) {
        piece in = sc->cur.p[i];
        size_t start = w->n, done = in.a, n = in.b - in.a;
        if (in.a == in.b) continue;
        if (meta) {
            bool has = n >= s->pattern_n && !memcmp(text + in.a, s->pattern, s->pattern_n);
            has = has || text[in.a] == ' ';
            bool first = in.a == 0 && at_start;
            if (!has && (s->prefix == SL_PREFIX_ALWAYS || (s->prefix == SL_PREFIX_FIRST && first)))
                sl_rewrite_put(w, s->pattern, s->pattern_n, in.a, 0);
            for (size_t k = in.a; k < in.b; k++) {
                if (text[k] != ' ') continue;
                sl_rewrite_copy(w, text + done, k - done);
                sl_rewrite_put(w, s->pattern, s->pattern_n, k, 1);
                done = k + 1;
            }
        } else if (text[in.a] != ' ') {
            sl_rewrite_put(w, " ", 1, in.a, 0);
        }
        /* An edit of nothing pins the place where removed text made a gap between pieces. */
        if (want_map && start == w->n) sl_rewrite_put(w, "", 0, in.a, 0);
        sl_rewrite_copy(w, text + done, in.b - done);
        int rc = push(&sc->next, start, w->n, err);
        if (rc) return rc;
    }
    if (w->failed) return sl_err_set(err, SL_ETEMP, "out of memory splitting a text");
    pieces swap = sc->cur;
    sc->cur = sc->next;
    sc->next = swap;
    return 0;
}

static int run_steps(const sl_pretok *t, sl_pretok_scratch *s, const char *text, size_t n, bool at_start, bool want_map,
                     sl_piece_fn fn, void *ctx, sl_err *err) {
    const sl_rewrite *map = NULL;
    int rc, used = 0;
    s->cur.n = 0;
    if ((rc = push(&s->cur, 0, n, err))) return rc;
    for (int i = 0; i < t->n; i++) {
        const step *st = &t->st[i];
        if (st->kind == STEP_PREFIX_SPACE || st->kind == STEP_METASPACE) {
            sl_rewrite *w = &s->w[used++];
            if ((rc = insert(st, s, text, at_start, want_map, w, err))) return rc;
            w->under = map;
            map = w;
            text = w->s;
            if (st->kind == STEP_PREFIX_SPACE || !st->split) continue;
        }
        if ((rc = split_all(st, s, text, err))) return rc;
    }
    for (size_t i = 0; i < s->cur.n; i++) {
        piece p = s->cur.p[i];
        if (p.a < p.b && (rc = fn(ctx, text + p.a, p.b - p.a, p.a, map, err))) return rc;
    }
    return 0;
}

int sl_pretok_run(const sl_pretok *t, sl_pretok_scratch *s, const char *text, size_t n, bool at_start, bool want_map,
                  sl_piece_fn fn, void *ctx, sl_err *err) {
    if (!n) return 0;
    if (!t->whole) return run_steps(t, s, text, n, at_start, want_map, fn, ctx, err);
    const uint8_t *start = (const uint8_t *)text, *p = start, *end = p + n;
    while (p < end) {
        const uint8_t *q = t->whole(p, end);
        int rc = fn(ctx, (const char *)p, (size_t)(q - p), (size_t)(p - start), NULL, err);
        if (rc) return rc;
        p = q;
    }
    return 0;
}
