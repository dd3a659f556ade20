#include "stages/feeder/added.h"
#include <stdlib.h>
#include <string.h>
#include "stages/feeder/unicode.h"

typedef struct node { /* 0 = none; node 0 is unused */
    uint32_t child, sibling;
    int32_t token; /* index, -1 */
    uint8_t byte;
} node;
typedef struct trie {
    node *v;
    uint32_t n, cap;
    uint32_t root[256];
} trie;

struct sl_added {
    sl_added_token *t;
    size_t n, cap;
    trie set[2]; /* as written, normalized */
};

sl_added *sl_added_new(void) {
    return calloc(1, sizeof(sl_added));
}

void sl_added_free(sl_added *a) {
    if (!a) return;
    for (size_t i = 0; i < a->n; i++) free(a->t[i].s);
    free(a->t);
    free(a->set[0].v);
    free(a->set[1].v);
    free(a);
}

static uint32_t new_node(trie *t, uint8_t byte) {
    if (t->n + 1 >= t->cap) {
        uint32_t cap = t->cap * 2 + 256;
        node *p = realloc(t->v, cap * sizeof *p);
        if (!p) return 0;
        t->v = p;
        t->cap = cap;
        if (!t->n) t->n = 1;
    }
    t->v[t->n] = (node){.token = -1, .byte = byte};
    return t->n++;
}

static uint32_t step(const trie *t, uint32_t at, uint8_t byte) {
    uint32_t c = t->v[at].child;
    while (c && t->v[c].byte != byte) c = t->v[c].sibling;
    return c;
}

static int insert(trie *t, const char *s, size_t n, int32_t token) {
    uint8_t first = (uint8_t)s[0];
    if (!t->root[first] && !(t->root[first] = new_node(t, first))) return -1;
    uint32_t at = t->root[first];
    for (size_t i = 1; i < n; i++) {
        uint32_t next = step(t, at, (uint8_t)s[i]);
        if (!next) {
            if (!(next = new_node(t, (uint8_t)s[i]))) return -1;
            t->v[next].sibling = t->v[at].child;
            t->v[at].child = next;
        }
        at = next;
    }
    t->v[at].token = token;
    return 0;
}

int sl_added_put(sl_added *a, const sl_added_token *tok, const char *find, size_t n_find, sl_err *err) {
    if (!n_find || n_find > SL_ADDED_MAX_BYTES)
        return sl_err_set(err, SL_ECONFIG, "added token %d has %zu bytes; 1 to %d are supported", tok->id, n_find,
                          SL_ADDED_MAX_BYTES);
    if (a->n == a->cap) {
        size_t cap = a->cap * 2 + 64;
        sl_added_token *p = realloc(a->t, cap * sizeof *p);
        if (!p) return sl_err_set(err, SL_ETEMP, "out of memory loading added tokens");
        a->t = p;
        a->cap = cap;
    }
    sl_added_token t = *tok;
    if (!(t.s = malloc((size_t)t.n + 1))) return sl_err_set(err, SL_ETEMP, "out of memory loading added tokens");
    memcpy(t.s, tok->s, t.n);
    t.s[t.n] = 0;
    a->t[a->n] = t;
    if (insert(&a->set[t.normalized], find, n_find, (int32_t)a->n++))
        return sl_err_set(err, SL_ETEMP, "out of memory loading added tokens");
    return 0;
}

size_t sl_added_count(const sl_added *a) {
    return a->n;
}
const sl_added_token *sl_added_at(const sl_added *a, size_t i) {
    return &a->t[i];
}
bool sl_added_any(const sl_added *a, bool normalized) {
    return a->set[normalized].n != 0;
}

const sl_added_token *sl_added_by_id(const sl_added *a, int32_t id) {
    for (size_t i = 0; i < a->n; i++)
        if (a->t[i].id == id) return &a->t[i];
    return NULL;
}
const sl_added_token *sl_added_named(const sl_added *a, const char *s) {
    for (size_t i = 0; i < a->n; i++)
        if (!strcmp(a->t[i].s, s)) return &a->t[i];
    return NULL;
}

static unsigned class_before(const char *s, size_t at, size_t *start) {
    size_t i = at - 1;
    while (((uint8_t)s[i] & 0xc0) == 0x80) i--;
    *start = i;
    return sl_unicode_class(sl_utf8_decode((const uint8_t *)s + i, &(unsigned){0}));
}
static unsigned class_after(const char *s, size_t at, unsigned *len) {
    return sl_unicode_class(sl_utf8_decode((const uint8_t *)s + at, len));
}

/* Longest token that starts at s[i]; -1. */
static int32_t longest(const trie *t, const char *s, size_t n, size_t i, size_t *end) {
    int32_t best = -1;
    for (uint32_t at = t->root[(uint8_t)s[i]]; at;) {
        i++;
        if (t->v[at].token >= 0) {
            best = t->v[at].token;
            *end = i;
        }
        at = i < n ? step(t, at, (uint8_t)s[i]) : 0;
    }
    return best;
}

static bool stands_alone(const char *s, size_t n, size_t a, size_t b) {
    return !(a > 0 && class_before(s, a, &(size_t){0}) & SL_UC_WORD) &&
           !(b < n && class_after(s, b, &(unsigned){0}) & SL_UC_WORD);
}

bool sl_added_next(const sl_added *a, bool normalized, const char *s, size_t n, bool parse_special, sl_added_scan *scan,
                   sl_added_hit *hit) {
    const trie *t = &a->set[normalized];
    if (!t->n) return false;
    for (size_t i = scan->pos; i < n; i++) {
        size_t end = 0;
        if (!t->root[(uint8_t)s[i]]) continue;
        int32_t k = longest(t, s, n, i, &end);
        if (k < 0) continue;
        const sl_added_token *tok = &a->t[k];
        size_t from = i, to = end;
        if ((tok->special && !parse_special) || (tok->single_word && !stands_alone(s, n, from, to))) {
            i = end - 1; /* the match is used up all the same: nothing is looked for inside it */
            continue;
        }
        for (size_t c; tok->lstrip && from > scan->done && class_before(s, from, &c) & SL_UC_SPACE;) from = c;
        for (unsigned len; tok->rstrip && to < n && class_after(s, to, &len) & SL_UC_SPACE;) to += len;
        *hit = (sl_added_hit){tok, from, to};
        scan->pos = end;
        scan->done = to;
        return true;
    }
    scan->pos = n;
    return false;
}
