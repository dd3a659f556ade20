#include "stages/feeder/bpe.h"
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>
#include "stages/feeder/unicode.h"

#define NO_RANK         UINT32_MAX
#define NO_SYM          UINT32_MAX /* a character that is no token and part of none */
#define SHORT           48         /* symbols up to which scanning an array beats the heap */
#define MAX_SPLIT_TOKEN 1024       /* longest token whose every split is looked up: bounds loading a hostile file */

typedef struct token {
    uint64_t at; /* in the arena */
    uint32_t len;
    bool known, in_vocab;
} token;

typedef struct merge {
    uint64_t key; /* left << 32 | right; all ones = free */
    uint32_t rank, id;
} merge;

struct sl_bpe {
    sl_bpe_units units;
    sl_bpe_options o;
    uint64_t salt;
    char *arena;
    size_t arena_n, arena_cap;
    token *tok; /* [0, n_vocab) tokens, [n_vocab, n_tok) single characters that only occur inside tokens */
    uint32_t n_tok, tok_cap, n_vocab;
    uint32_t *slot; /* vocabulary hash: id + 1, 0 = free */
    uint64_t slots, used;
    merge *m;
    uint64_t m_slots, m_used;
    uint32_t unit_sym[256]; /* symbol of a byte (bytes) or of an ASCII character (chars) */
    int32_t byte_id[256];   /* <0xNN> */
    bool byte_all;
    bool frozen;
};

/* --- building --- */
static int oom(sl_err *err) {
    return sl_err_set(err, SL_ETEMP, "out of memory in the tokenizer");
}

sl_bpe *sl_bpe_new(sl_bpe_units units) {
    sl_bpe *b = calloc(1, sizeof *b);
    if (b) b->units = units;
    return b;
}

void sl_bpe_free(sl_bpe *b) {
    if (!b) return;
    free(b->arena);
    free(b->tok);
    free(b->slot);
    free(b->m);
    free(b);
}

static uint64_t hash_bytes(const char *s, size_t n) {
    return XXH3_64bits(s, n);
}

/* Index of the slot that holds s, or of the free one where it belongs. */
static uint64_t slot_of(const sl_bpe *b, const char *s, size_t n) {
    uint64_t i = hash_bytes(s, n) & (b->slots - 1);
    while (b->slot[i]) {
        const token *t = &b->tok[b->slot[i] - 1];
        if (t->len == n && !memcmp(b->arena + t->at, s, n)) break;
        i = (i + 1) & (b->slots - 1);
    }
    return i;
}

static int grow_slots(sl_bpe *b) {
    uint64_t want = b->slots ? b->slots * 2 : 1024;
    uint32_t *old = b->slot, *fresh = calloc(want, sizeof *fresh);
    uint64_t n = b->slots;
    if (!fresh) return -1;
    b->slot = fresh;
    b->slots = want;
    for (uint64_t i = 0; i < n; i++) {
        if (!old[i]) continue;
        const token *t = &b->tok[old[i] - 1];
        fresh[slot_of(b, b->arena + t->at, t->len)] = old[i];
    }
    free(old);
    return 0;
}

static int arena_put(sl_bpe *b, const char *s, size_t n, uint64_t *at) {
    if (!b->arena || b->arena_n + n > b->arena_cap) { /* also for an empty text: it has a place, not NULL + 0 */
        size_t cap = (b->arena_n + n) * 2 + 4096;
        char *p = realloc(b->arena, cap);
        if (!p) return -1;
        b->arena = p;
        b->arena_cap = cap;
    }
    if (n) memcpy(b->arena + b->arena_n, s, n);
    *at = b->arena_n;
    b->arena_n += n;
    return 0;
}

static int tok_reserve(sl_bpe *b, uint32_t id) {
    if (id >= b->tok_cap) {
        uint32_t cap = id + id / 2 + 256;
        token *p = realloc(b->tok, cap * sizeof *p);
        if (!p) return -1;
        memset(p + b->tok_cap, 0, (cap - b->tok_cap) * sizeof *p);
        b->tok = p;
        b->tok_cap = cap;
    }
    if (id >= b->n_tok) b->n_tok = id + 1;
    return 0;
}

static int put_token(sl_bpe *b, uint32_t id, const char *s, size_t n, bool in_vocab) {
    if (b->used * 2 >= b->slots && grow_slots(b)) return -1;
    uint64_t at;
    if (tok_reserve(b, id) || arena_put(b, s, n, &at)) return -1;
    b->tok[id] = (token){at, (uint32_t)n, true, in_vocab};
    if (!in_vocab) return 0;
    uint64_t i = slot_of(b, s, n);
    if (!b->slot[i]) {
        b->slot[i] = id + 1;
        b->used++;
    }
    return 0;
}

int sl_bpe_add_token(sl_bpe *b, int32_t id, const char *s, size_t n, bool in_vocab, sl_err *err) {
    if (b->frozen) return sl_err_set(err, SL_EINTERNAL, "token added to a frozen vocabulary");
    if (id < 0 || id >= SL_BPE_MAX_IDS)
        return sl_err_set(err, SL_ECONFIG, "token id %d is outside [0, %d)", id, SL_BPE_MAX_IDS);
    if (n > INT32_MAX) return sl_err_set(err, SL_ECONFIG, "token %d has %zu bytes", id, n);
    if ((uint32_t)id < b->n_tok && b->tok[id].known) {
        const token *t = &b->tok[id];
        if (t->len == n && !memcmp(b->arena + t->at, s, n)) return 0;
        return sl_err_set(err, SL_ECONFIG, "token id %d is given twice, as '%.*s' and as '%.*s'", id,
                          (int)(t->len < 60 ? t->len : 60), b->arena + t->at, (int)(n < 60 ? n : 60), s);
    }
    return put_token(b, (uint32_t)id, s, n, in_vocab) ? oom(err) : 0;
}

static inline uint64_t merge_slot(const sl_bpe *b, uint64_t key) {
    uint64_t i = (key * 0x9E3779B97F4A7C15u) >> 20 & (b->m_slots - 1);
    while (b->m[i].key != key && b->m[i].key != UINT64_MAX) i = (i + 1) & (b->m_slots - 1);
    return i;
}

static int put_merge(sl_bpe *b, uint32_t l, uint32_t r, uint32_t rank, uint32_t id) {
    if (b->m_used * 2 >= b->m_slots) {
        uint64_t n = b->m_slots, want = n ? n * 2 : 1024;
        merge *old = b->m, *fresh = malloc(want * sizeof *fresh);
        if (!fresh) return -1;
        memset(fresh, 0xff, want * sizeof *fresh);
        b->m = fresh;
        b->m_slots = want;
        for (uint64_t i = 0; i < n; i++)
            if (old[i].key != UINT64_MAX) fresh[merge_slot(b, old[i].key)] = old[i];
        free(old);
    }
    uint64_t key = (uint64_t)l << 32 | r, i = merge_slot(b, key);
    if (b->m[i].key == UINT64_MAX) b->m_used++;
    b->m[i] = (merge){key, rank, id};
    return 0;
}

static uint32_t lookup(const sl_bpe *b, const char *s, size_t n) {
    if (!b->slots) return NO_SYM;
    uint32_t v = b->slot[slot_of(b, s, n)];
    return v ? v - 1 : NO_SYM;
}

int32_t sl_bpe_find(const sl_bpe *b, const char *s, size_t n) {
    uint32_t v = lookup(b, s, n);
    return v == NO_SYM || (b->n_vocab && v >= b->n_vocab) ? SL_BPE_NONE : (int32_t)v;
}

int sl_bpe_add_merge(sl_bpe *b, const char *l, size_t nl, const char *r, size_t nr, uint32_t rank, sl_err *err) {
    uint32_t a = lookup(b, l, nl), c = lookup(b, r, nr), id = NO_SYM;
    char small[256], *buf = nl + nr <= sizeof small ? small : malloc(nl + nr);
    if (!buf) return oom(err);
    memcpy(buf, l, nl);
    memcpy(buf + nl, r, nr);
    if (a != NO_SYM && c != NO_SYM) id = lookup(b, buf, nl + nr);
    if (buf != small) free(buf);
    if (id == NO_SYM)
        return sl_err_set(err, SL_ECONFIG, "merge %u ('%.*s' + '%.*s'): %s is not in the vocabulary", rank,
                          (int)(nl < 60 ? nl : 60), l, (int)(nr < 60 ? nr : 60), r,
                          a == NO_SYM   ? "the left part"
                          : c == NO_SYM ? "the right part"
                                        : "the result");
    return put_merge(b, a, c, rank, id) ? oom(err) : 0;
}

/* A character that is no token but begins or ends a part of one: give it a number of its own, so that it can be merged.
 */
static uint32_t part_of(sl_bpe *b, const char *s, size_t n, int *failed) {
    uint32_t v = lookup(b, s, n);
    if (v != NO_SYM || b->units != SL_BPE_CHARS || n > 4 || sl_utf8_len((uint8_t)s[0]) != n) return v;
    char c[4]; /* the arena may move */
    memcpy(c, s, n);
    if (b->n_tok >= 2u * SL_BPE_MAX_IDS || put_token(b, b->n_tok, c, n, true)) return *failed = 1, NO_SYM;
    return b->n_tok - 1;
}

int sl_bpe_merges_from_vocab(sl_bpe *b, const uint32_t *rank_of, size_t n_rank, sl_err *err) {
    b->n_vocab = b->n_tok;
    int failed = 0;
    for (uint32_t id = 0; id < b->n_vocab && !failed; id++) {
        const token t = b->tok[id];
        if (!t.known || !t.in_vocab || id >= n_rank || lookup(b, b->arena + t.at, t.len) != id) continue;
        if (t.len > MAX_SPLIT_TOKEN)
            return sl_err_set(err, SL_ECONFIG, "token %u has %u bytes; at most %d are supported", id, t.len,
                              MAX_SPLIT_TOKEN);
        for (uint32_t i = 1; i < t.len && !failed; i++) {
            if (b->units == SL_BPE_CHARS && ((uint8_t)b->arena[t.at + i] & 0xc0) == 0x80) continue;
            uint32_t l = part_of(b, b->arena + t.at, i, &failed);
            if (l == NO_SYM) continue;
            uint32_t r = part_of(b, b->arena + t.at + i, t.len - i, &failed);
            if (r != NO_SYM && put_merge(b, l, r, rank_of[id], id)) failed = 1;
        }
    }
    return failed ? oom(err) : 0;
}

static void find_byte_tokens(sl_bpe *b) {
    b->byte_all = true;
    for (int i = 0; i < 256; i++) {
        char name[8];
        snprintf(name, sizeof name, "<0x%02X>", (unsigned)i);
        b->byte_id[i] = sl_bpe_find(b, name, 6);
        if (b->byte_id[i] < 0) b->byte_all = false;
    }
}

int sl_bpe_finish(sl_bpe *b, const sl_bpe_options *o, uint64_t salt, sl_err *err) {
    b->o = *o;
    b->salt = salt;
    if (!b->n_vocab) b->n_vocab = b->n_tok;
    if (!b->n_vocab) return sl_err_set(err, SL_ECONFIG, "the vocabulary is empty");
    if (!b->m_slots && put_merge(b, NO_SYM, 0, NO_RANK, 0)) return oom(err); /* so that look-ups need no test */
    for (int i = 0; i < 256; i++) {
        char c = (char)i;
        b->unit_sym[i] = b->units == SL_BPE_BYTES || i < 128 ? lookup(b, &c, 1) : NO_SYM;
    }
    if (b->units == SL_BPE_CHARS && o->byte_fallback) {
        find_byte_tokens(b);
        for (int i = 0; i < 256;
             i++) { /* their bytes are the byte itself; their written form is never produced by merging */
            if (b->byte_id[i] < 0) continue;
            char c = (char)i;
            uint64_t at;
            if (arena_put(b, &c, 1, &at)) return oom(err);
            b->tok[b->byte_id[i]].at = at;
            b->tok[b->byte_id[i]].len = 1;
        }
        /* The hash still finds them by their place only; rebuild it so that no look-up meets a moved key. */
        memset(b->slot, 0, b->slots * sizeof *b->slot);
        for (uint32_t id = 0; id < b->n_tok; id++) {
            const token *t = &b->tok[id];
            bool is_byte = t->len == 1 && b->byte_id[(uint8_t)b->arena[t->at]] == (int32_t)id;
            if (!t->known || !t->in_vocab || is_byte) continue;
            uint64_t i = slot_of(b, b->arena + t->at, t->len);
            if (!b->slot[i]) b->slot[i] = id + 1;
        }
    }
    b->frozen = true;
    return 0;
}

const char *sl_bpe_piece(const sl_bpe *b, int32_t id, size_t *n) {
    if (id < 0 || (uint32_t)id >= b->n_tok || (b->n_vocab && (uint32_t)id >= b->n_vocab) || !b->tok[id].known)
        return NULL;
    *n = b->tok[id].len;
    return b->arena + b->tok[id].at;
}

int32_t sl_bpe_size(const sl_bpe *b) {
    return (int32_t)(b->n_vocab ? b->n_vocab : b->n_tok);
}

/* --- encoding --- */
#define KEY_MAX    32
#define IDS_MAX    6
#define CACHE_BITS 16

typedef struct entry { /* one cache line */
    uint32_t tag;
    uint8_t len, n, pad[2];
    char key[KEY_MAX];
    int32_t ids[IDS_MAX];
} entry;
_Static_assert(sizeof(entry) == 64, "a cache entry is one line");

typedef struct sym {       /* symbols of a piece */
    uint32_t id, rank, to; /* rank and result of the merge with the next symbol */
    uint32_t at;           /* byte offset in the piece */
    uint32_t prev, next;   /* long pieces only; NO_SYM ends the list */
} sym;

struct sl_bpe_scratch {
    entry *cache;
    uint64_t salt, work;
    sym *s;
    size_t s_cap;
    uint64_t *heap; /* rank << 32 | symbol */
    size_t h_n, h_cap;
    int32_t *ids;
    uint32_t *off;
    size_t o_n, o_cap;
};

sl_bpe_scratch *sl_bpe_scratch_new(void) {
    sl_bpe_scratch *s = calloc(1, sizeof *s);
    if (s && !(s->cache = aligned_alloc(64, sizeof(entry) << CACHE_BITS))) {
        free(s);
        return NULL;
    }
    if (s) memset(s->cache, 0, sizeof(entry) << CACHE_BITS);
    return s;
}

void sl_bpe_scratch_free(sl_bpe_scratch *s) {
    if (!s) return;
    free(s->cache);
    free(s->s);
    free(s->heap);
    free(s->ids);
    free(s->off);
    free(s);
}

uint64_t sl_bpe_scratch_work(const sl_bpe_scratch *s) {
    return s->work;
}

static inline void pair(const sl_bpe *b, sl_bpe_scratch *s, sym *a, uint32_t right) {
    s->work++;
    const merge *m = &b->m[merge_slot(b, (uint64_t)a->id << 32 | right)];
    bool hit = m->key != UINT64_MAX;
    a->rank = hit ? m->rank : NO_RANK;
    a->to = hit ? m->id : 0;
}

static int need_syms(sl_bpe_scratch *s, size_t n, sl_err *err) {
    if (n <= s->s_cap) return 0;
    size_t cap = n + n / 4 + 256;
    sym *p = realloc(s->s, cap * sizeof *p);
    if (!p) return oom(err);
    s->s = p;
    s->s_cap = cap;
    return 0;
}

static int need_out(sl_bpe_scratch *s, size_t n, sl_err *err) {
    if (n <= s->o_cap) return 0;
    size_t cap = n + n / 4 + 256;
    int32_t *p = realloc(s->ids, cap * sizeof *p);
    if (p) s->ids = p;
    uint32_t *q = realloc(s->off, cap * sizeof *q);
    if (q) s->off = q;
    if (!p || !q) return oom(err);
    s->o_cap = cap;
    return 0;
}

/* One symbol per character; those outside the vocabulary as the options say. Returns the count. */
static size_t start_chars(const sl_bpe *b, sym *y, const char *p, size_t n) {
    size_t k = 0;
    bool unk_open = false;
    for (size_t i = 0; i < n;) {
        unsigned len = sl_utf8_len((uint8_t)p[i]);
        uint32_t id = len == 1 ? b->unit_sym[(uint8_t)p[i]] : lookup(b, p + i, len);
        if (id != NO_SYM || b->o.merge_unknown) {
            y[k++] = (sym){.id = id, .at = (uint32_t)i};
            unk_open = false;
        } else if (b->o.byte_fallback && b->byte_all) {
            for (unsigned j = 0; j < len; j++)
                y[k++] = (sym){.id = (uint32_t)b->byte_id[(uint8_t)p[i + j]], .at = (uint32_t)(i + j)};
            unk_open = false;
        } else if (b->o.unk >= 0) {
            if (!unk_open || !b->o.fuse_unk) y[k++] = (sym){.id = (uint32_t)b->o.unk, .at = (uint32_t)i};
            unk_open = true;
        }
        i += len;
    }
    return k;
}

static size_t start_bytes(const sl_bpe *b, sym *y, const char *p, size_t n) {
    size_t k = 0;
    bool unk_open = false;
    for (size_t i = 0; i < n; i++) {
        uint32_t id = b->unit_sym[(uint8_t)p[i]];
        if (id != NO_SYM) {
            y[k++] = (sym){.id = id, .at = (uint32_t)i};
            unk_open = false;
            continue;
        }
        if (b->o.unk >= 0 && (!unk_open || !b->o.fuse_unk)) y[k++] = (sym){.id = (uint32_t)b->o.unk, .at = (uint32_t)i};
        unk_open = true;
    }
    return k;
}

/* Scan for the lowest rank, merge, close the gap: quadratic, and fastest for the few symbols of a word. */
static size_t merge_short(const sl_bpe *b, sl_bpe_scratch *s, sym *y, size_t k) {
    for (size_t i = 0; i + 1 < k; i++) pair(b, s, &y[i], y[i + 1].id);
    while (k > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < k; i++)
            if (y[i].rank < y[best].rank) best = i;
        if (y[best].rank == NO_RANK) break;
        y[best].id = y[best].to;
        memmove(&y[best + 1], &y[best + 2], (k - best - 2) * sizeof *y);
        k--;
        if (best + 1 < k)
            pair(b, s, &y[best], y[best + 1].id);
        else
            y[best].rank = NO_RANK;
        if (best) pair(b, s, &y[best - 1], y[best].id);
    }
    return k;
}

static int heap_push(sl_bpe_scratch *s, uint64_t v, sl_err *err) {
    if (s->h_n == s->h_cap) {
        size_t cap = s->h_cap * 2 + 256;
        uint64_t *p = realloc(s->heap, cap * sizeof *p);
        if (!p) return oom(err);
        s->heap = p;
        s->h_cap = cap;
    }
    size_t i = s->h_n++;
    for (; i && s->heap[(i - 1) / 2] > v; i = (i - 1) / 2) {
        s->heap[i] = s->heap[(i - 1) / 2];
        s->work++;
    }
    s->heap[i] = v;
    return 0;
}

static uint64_t heap_pop(sl_bpe_scratch *s) {
    uint64_t top = s->heap[0], v = s->heap[--s->h_n];
    size_t i = 0, n = s->h_n;
    for (size_t c; (c = 2 * i + 1) < n; i = c) {
        if (c + 1 < n && s->heap[c + 1] < s->heap[c]) c++;
        if (s->heap[c] >= v) break;
        s->heap[i] = s->heap[c];
        s->work++;
    }
    s->heap[i] = v;
    return top;
}

/* A heap entry is stale when its symbol died or its pair now has another rank; a symbol's rank is always the current
 * one. */
static int merge_long(const sl_bpe *b, sl_bpe_scratch *s, size_t *count, sl_err *err) {
    sym *y = s->s;
    size_t k = *count, out = 0;
    s->h_n = 0;
    for (size_t i = 0; i < k; i++) {
        y[i].prev = i ? (uint32_t)i - 1 : NO_SYM;
        y[i].next = i + 1 < k ? (uint32_t)i + 1 : NO_SYM;
        y[i].rank = NO_RANK;
        if (i + 1 < k) pair(b, s, &y[i], y[i + 1].id);
        if (y[i].rank != NO_RANK && heap_push(s, (uint64_t)y[i].rank << 32 | i, err)) return SL_ETEMP;
    }
    while (s->h_n) {
        uint64_t top = heap_pop(s);
        sym *a = &y[(uint32_t)top];
        if (a->rank != (uint32_t)(top >> 32) || a->rank == NO_RANK) continue;
        sym *d = &y[a->next];
        a->id = a->to;
        a->next = d->next;
        a->rank = NO_RANK;
        d->rank = NO_RANK;
        if (a->next != NO_SYM) {
            y[a->next].prev = (uint32_t)(a - y);
            pair(b, s, a, y[a->next].id);
            if (a->rank != NO_RANK && heap_push(s, (uint64_t)a->rank << 32 | (uint32_t)(a - y), err)) return SL_ETEMP;
        }
        if (a->prev != NO_SYM) {
            sym *c = &y[a->prev];
            pair(b, s, c, a->id);
            if (c->rank != NO_RANK && heap_push(s, (uint64_t)c->rank << 32 | a->prev, err)) return SL_ETEMP;
        }
    }
    for (uint32_t i = k ? 0 : NO_SYM; i != NO_SYM;) {
        uint32_t next = y[i].next; /* out never passes i */
        y[out++] = y[i];
        i = next;
    }
    *count = out;
    return 0;
}

/* Write symbols out; in SentencePiece order unknown characters fall back to bytes only now. */
static int emit(const sl_bpe *b, sl_bpe_scratch *s, const char *p, size_t n, size_t k, sl_err *err) {
    if (need_out(s, b->o.merge_unknown ? n : k, err)) return SL_ETEMP;
    size_t o = 0;
    bool unk_open = false;
    for (size_t i = 0; i < k; i++) {
        const sym *y = &s->s[i];
        if (y->id < b->n_vocab) {
            s->ids[o] = (int32_t)y->id;
            s->off[o++] = y->at;
            unk_open = false;
            continue;
        }
        unsigned len = sl_utf8_len((uint8_t)p[y->at]);
        if (b->o.byte_fallback && b->byte_all) {
            for (unsigned j = 0; j < len; j++) {
                s->ids[o] = b->byte_id[(uint8_t)p[y->at + j]];
                s->off[o++] = y->at + j;
            }
        } else if (b->o.unk >= 0 && !(unk_open && b->o.fuse_unk)) {
            s->ids[o] = b->o.unk;
            s->off[o++] = y->at;
            unk_open = true;
        }
    }
    s->o_n = o;
    return 0;
}

static int encode_fresh(const sl_bpe *b, sl_bpe_scratch *s, const char *p, size_t n, sl_err *err) {
    if (b->o.whole_piece) {
        int32_t id = sl_bpe_find(b, p, n);
        if (id >= 0) {
            if (need_out(s, 1, err)) return SL_ETEMP;
            s->ids[0] = id;
            s->off[0] = 0;
            s->o_n = 1;
            return 0;
        }
    }
    if (n > SL_BPE_MAX_PIECE)
        return sl_err_set(err, SL_EDATA,
                          "a run of %zu bytes has no place where the tokenizer splits; at most %d are supported", n,
                          SL_BPE_MAX_PIECE);
    if (need_syms(s, n, err)) return SL_ETEMP;
    size_t k = b->units == SL_BPE_BYTES ? start_bytes(b, s->s, p, n) : start_chars(b, s->s, p, n);
    if (k <= SHORT)
        k = merge_short(b, s, s->s, k);
    else if (merge_long(b, s, &k, err))
        return SL_ETEMP;
    return emit(b, s, p, n, k, err);
}

/* Offsets follow from the tokens' lengths; only results for which that holds are cached. */
static void cached_offsets(const sl_bpe *b, sl_bpe_scratch *s, const entry *e) {
    uint32_t at = 0;
    for (size_t i = 0; i < e->n; i++) {
        s->off[i] = at;
        at += b->tok[e->ids[i]].len;
    }
}

static void remember(const sl_bpe *b, const sl_bpe_scratch *s, entry *e, uint32_t tag, const char *p, size_t n) {
    size_t sum = 0;
    if (s->o_n > IDS_MAX || !s->o_n) return;
    for (size_t i = 0; i < s->o_n; i++) sum += b->tok[s->ids[i]].len;
    if (sum != n) return;
    e->tag = tag;
    e->len = (uint8_t)n;
    e->n = (uint8_t)s->o_n;
    memcpy(e->key, p, n);
    memcpy(e->ids, s->ids, s->o_n * sizeof *s->ids);
}

int sl_bpe_encode(const sl_bpe *b, sl_bpe_scratch *s, const char *p, size_t n, bool want_off, sl_bpe_out *out,
                  sl_err *err) {
    if (s->salt != b->salt) {
        memset(s->cache, 0, sizeof(entry) << CACHE_BITS);
        s->salt = b->salt;
    }
    entry *e = NULL;
    uint32_t tag = 0;
    if (n && n <= KEY_MAX) {
        uint64_t h = hash_bytes(p, n);
        e = &s->cache[h & ((1u << CACHE_BITS) - 1)];
        tag = (uint32_t)(h >> 32);
        if (e->tag == tag && e->len == n && !memcmp(e->key, p, n)) {
            *out = (sl_bpe_out){e->ids, s->off, e->n};
            if (!want_off) return 0;
            if (need_out(s, IDS_MAX, err)) return SL_ETEMP;
            cached_offsets(b, s, e);
            out->off = s->off;
            return 0;
        }
    }
    int rc = encode_fresh(b, s, p, n, err);
    if (rc) return rc;
    if (e) remember(b, s, e, tag, p, n);
    *out = (sl_bpe_out){s->ids, s->off, s->o_n};
    return 0;
}
