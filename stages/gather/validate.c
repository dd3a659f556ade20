#include "stages/gather/validate.h"
#include "ipc/sum64.h"
#include "stages/gather/scan.h"
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOK_ZERO = 1, TOK_SEEN = 2 };              /* per capture and token */
enum { GOT = 1, GOT_PAYLOAD = 2, BAD_SHAPE = 4 }; /* per rank and chunk */

typedef struct seen { /* one remembered state */
    uint64_t fp;
    int64_t id; /* -1: empty */
} seen;

typedef struct place { /* where a fingerprint belongs */
    uint64_t sum;
    uint32_t k, c;
    uint32_t rank; /* PREV_BATCH: in the batch before */
} place;
#define PREV_BATCH 0xffffffffu

typedef struct past_row { /* one remembered row */
    uint64_t ids, T;
    uint64_t *fp; /* [K] */
} past_row;

typedef struct sums { /* a checksum pair (ipc/sum64.h) */
    uint64_t a, b;
} sums;

struct sl_check {
    sl_check_shape s;
    sl_batch_view v;
    uint64_t bpos;
    uint32_t n_rows, n_tokens, C; /* chunks a capture */
    uint64_t bytes;
    /* per batch, grown on demand */
    uint64_t *tok;    /* [K][n_tokens] fingerprint of each state */
    uint8_t *tflag;   /* [K][n_tokens] TOK_* */
    uint64_t *sum;    /* [N][K*C] fingerprints as told by the ranks */
    uint64_t *psum;   /* [K*C] checksum of the payload */
    uint8_t *got;     /* [N][K*C] */
    uint32_t *nonfin; /* [n_rows][K] */
    uint32_t *nf_tok; /* [n_rows][K] first token with one */
    sums *rsum;       /* [n_rows][K] of the row's states */
    sl_row_verdict *row;
    uint8_t *got_row; /* [n_rows] ROW came */
    uint64_t cap_tok, cap_chunk, cap_row;
    uint32_t next_row, n_got[SL_MAX_RANKS];
    int64_t top[SL_MAX_RANKS]; /* highest chunk index seen of each rank, -1: none */
    /* checksums of the previous batch's payload, to recognise its content */
    uint64_t *prev;
    uint64_t n_prev, cap_prev;
    uint32_t prev_C;
    place *places; /* every fingerprint of this batch and the previous, sorted; made when one is looked for */
    uint64_t n_places;
    /* memory of accepted rows */
    seen *table[SL_HISTORY_CAPTURES];
    uint32_t table_k[SL_HISTORY_CAPTURES], n_tables;
    uint64_t table_mask;
    past_row past[SL_HISTORY_ROWS];
    uint64_t n_past;
    uint64_t *rowfp; /* [K], scratch */
};

/* ---- shape, open, close ---- */
void sl_check_shape_of(sl_check_shape *s, const sl_boot *b) {
    *s = (sl_check_shape){.n_ranks = b->tp,
                          .n_captures = b->n_captures,
                          .width = b->width,
                          .elem_size = b->elem_size,
                          .chunk_rows = b->chunk_rows,
                          .batch_tokens = b->batch_tokens};
    for (uint32_t k = 0; k < b->n_captures; k++)
        s->label[k] = b->captures[k].final_norm ? b->n_layers + 1 : b->captures[k].hidx;
}

static int open_memory(sl_check *c) {
    uint64_t n = 1024;
    while (n < 2ull * c->s.batch_tokens && n < 1u << 16) n *= 2;
    c->table_mask = n - 1;
    /* The deepest captures first: they depend on everything before. H[0] repeats with its token and is left out. */
    for (uint32_t k = c->s.n_captures; k-- > 0 && c->n_tables < SL_HISTORY_CAPTURES;) {
        if (c->s.label[k] == 0) continue;
        seen *t = malloc(n * sizeof *t);
        if (!t) return SL_ETEMP;
        for (uint64_t i = 0; i < n; i++) t[i] = (seen){.id = -1};
        c->table_k[c->n_tables] = k;
        c->table[c->n_tables++] = t;
    }
    for (int i = 0; i < SL_HISTORY_ROWS; i++)
        if (!(c->past[i].fp = malloc(SL_MAX_CAPTURES * sizeof(uint64_t)))) return SL_ETEMP;
    c->rowfp = malloc(SL_MAX_CAPTURES * sizeof(uint64_t));
    return c->rowfp ? 0 : SL_ETEMP;
}

int sl_check_open(sl_check **out, const sl_check_shape *s, sl_err *err) {
    *out = NULL;
    if (!s->n_ranks || s->n_ranks > SL_MAX_RANKS || !s->n_captures || s->n_captures > SL_MAX_CAPTURES || !s->width ||
        !s->chunk_rows || (s->elem_size != 2 && s->elem_size != 4))
        return sl_err_set(err, SL_ECONFIG,
                          "validate: %u ranks, %u captures of width %u, %u bytes an element, chunks of %u", s->n_ranks,
                          s->n_captures, s->width, s->elem_size, s->chunk_rows);
    sl_check *c = calloc(1, sizeof *c);
    if (!c) return sl_err_set(err, SL_ETEMP, "validate: no memory");
    c->s = *s;
    if (open_memory(c)) {
        sl_check_close(c);
        return sl_err_set(err, SL_ETEMP, "validate: no memory for the history");
    }
    *out = c;
    return 0;
}

void sl_check_close(sl_check *c) {
    if (!c) return;
    for (uint32_t i = 0; i < c->n_tables; i++) free(c->table[i]);
    for (int i = 0; i < SL_HISTORY_ROWS; i++) free(c->past[i].fp);
    free(c->rowfp);
    free(c->tok);
    free(c->tflag);
    free(c->sum);
    free(c->psum);
    free(c->got);
    free(c->nonfin);
    free(c->nf_tok);
    free(c->rsum);
    free(c->row);
    free(c->got_row);
    free(c->prev);
    free(c->places);
    free(c);
}

/* ---- begin ---- */
static bool regrow(void *pp, uint64_t n, size_t size) {
    void **p = pp;
    free(*p);
    *p = calloc(n, size);
    return *p != NULL;
}

static bool reserve(sl_check *c) {
    uint64_t K = c->s.n_captures, N = c->s.n_ranks, tok = K * c->n_tokens, chunk = K * c->C;
    bool ok = true;
    if (tok > c->cap_tok) {
        ok = ok && regrow(&c->tok, tok, 8) && regrow(&c->tflag, tok, 1);
        c->cap_tok = ok ? tok : 0;
    }
    if (chunk > c->cap_chunk) {
        ok = ok && regrow(&c->sum, N * chunk, 8) && regrow(&c->psum, chunk, 8) && regrow(&c->got, N * chunk, 1);
        c->cap_chunk = ok ? chunk : 0;
    }
    if (c->n_rows > c->cap_row) {
        ok = ok && regrow(&c->nonfin, c->n_rows * K, 4) && regrow(&c->nf_tok, c->n_rows * K, 4) &&
             regrow(&c->rsum, c->n_rows * K, sizeof *c->rsum) && regrow(&c->row, c->n_rows, sizeof *c->row) &&
             regrow(&c->got_row, c->n_rows, 1);
        c->cap_row = ok ? c->n_rows : 0;
    }
    return ok;
}

int sl_check_begin(sl_check *c, const sl_batch_view *v, uint64_t bpos, sl_err *err) {
    c->v = *v;
    c->bpos = bpos;
    c->n_rows = v->desc->n_rows;
    c->n_tokens = v->desc->n_tokens;
    c->C = (c->n_tokens - 1) / c->s.chunk_rows + 1;
    c->bytes = 0;
    c->next_row = 0;
    if (!reserve(c))
        return sl_err_set(err, SL_ETEMP, "validate: no memory for a batch of %u rows, %u tokens", c->n_rows,
                          c->n_tokens);
    uint64_t K = c->s.n_captures, N = c->s.n_ranks;
    memset(c->tflag, 0, K * c->n_tokens);
    memset(c->got, 0, N * K * c->C);
    memset(c->nonfin, 0, c->n_rows * K * 4);
    memset(c->rsum, 0, c->n_rows * K * sizeof *c->rsum);
    memset(c->got_row, 0, c->n_rows);
    memset(c->n_got, 0, sizeof c->n_got);
    for (unsigned r = 0; r < SL_MAX_RANKS; r++) c->top[r] = -1;
    for (uint32_t i = 0; i < c->n_rows; i++)
        c->row[i] = (sl_row_verdict){.k = 0xffff, .rank = 0xffff, .token = 0xffffffff, .nll = NAN};
    return 0;
}

/* ---- condemning ---- */
static int severity(sl_verdict v) { /* the higher wins */
    static const uint8_t order[SL_V_N] = {[SL_V_OK] = 0,       [SL_V_RANKS_DISAGREE] = 1, [SL_V_CHECKSUM] = 2,
                                          [SL_V_CONSTANT] = 3, [SL_V_NONFINITE] = 4,      [SL_V_TOKENS] = 5,
                                          [SL_V_COUNT] = 6,    [SL_V_ORDER] = 8,          [SL_V_MISSING_SHARD] = 7,
                                          [SL_V_SHAPE] = 9,    [SL_V_EPOCH] = 10,         [SL_V_POISON] = 11};
    return order[v];
}

static void condemn_row(sl_check *c, uint32_t i, sl_verdict v, unsigned k, unsigned rank, uint32_t token,
                        uint64_t detail, uint64_t want) {
    sl_row_verdict *r = &c->row[i];
    if (severity(v) <= severity(r->verdict)) return;
    r->verdict = v;
    r->k = (uint16_t)k;
    r->rank = (uint16_t)rank;
    r->token = token;
    r->detail = detail;
    r->want = want;
}

void sl_check_condemn(sl_check *c, sl_verdict v, unsigned rank, uint64_t detail, uint64_t want) {
    for (uint32_t i = 0; i < c->n_rows; i++) condemn_row(c, i, v, 0xffff, rank, 0xffffffff, detail, want);
}

void sl_check_condemn_row(sl_check *c, uint32_t i, sl_verdict v) {
    if (i < c->n_rows) condemn_row(c, i, v, 0xffff, 0xffff, 0xffffffff, 0, 0);
}

/* The row that holds token t of the batch. */
static uint32_t row_of(const sl_check *c, uint32_t t) {
    uint32_t lo = 0, hi = c->n_rows - 1;
    while (lo < hi) {
        uint32_t mid = hi - (hi - lo) / 2;
        if (c->v.rows[mid].t0 <= t)
            lo = mid;
        else
            hi = mid - 1;
    }
    return lo;
}

static uint32_t chunk_len(const sl_check *c, uint32_t ch) {
    uint32_t t = ch * c->s.chunk_rows;
    return c->n_tokens - t < c->s.chunk_rows ? c->n_tokens - t : c->s.chunk_rows;
}

static void condemn_chunk(sl_check *c, uint32_t k, uint32_t ch, sl_verdict v, unsigned rank, uint64_t detail,
                          uint64_t want) {
    uint32_t t = ch * c->s.chunk_rows, end = t + chunk_len(c, ch);
    for (uint32_t i = row_of(c, t); i < c->n_rows && c->v.rows[i].t0 < end; i++) {
        uint32_t t0 = c->v.rows[i].t0;
        condemn_row(c, i, v, k, rank, t > t0 ? t - t0 : 0, detail, want);
    }
}

/* ---- the payload: one pass ---- */
static void scan_payload(sl_check *c, uint32_t k, uint32_t ch, const uint8_t *p) {
    uint32_t t = ch * c->s.chunk_rows, n = chunk_len(c, ch), row = row_of(c, t), K = c->s.n_captures;
    uint64_t bytes = (uint64_t)c->s.width * c->s.elem_size, a = 0, b = 0, words = 0;
    uint64_t *tok = c->tok + (uint64_t)k * c->n_tokens;
    uint8_t *flag = c->tflag + (uint64_t)k * c->n_tokens;
    for (uint32_t i = 0; i < n; i++, t++) {
        sl_scan s;
        sl_scan_token(p + i * bytes, c->s.width, c->s.elem_size, &s);
        a += s.a;
        b += s.b + words * s.a;
        words += bytes / 4;
        tok[t] = sl_sum_fold(s.a, s.b, bytes);
        flag[t] = (uint8_t)(TOK_SEEN | (s.zero ? TOK_ZERO : 0));
        while (t - c->v.rows[row].t0 >= c->v.rows[row].T) row++;
        uint64_t at = (uint64_t)row * K + k;
        uint32_t in_row = t - c->v.rows[row].t0;
        c->rsum[at].a += s.a;
        c->rsum[at].b += s.b + (bytes + 3) / 4 * in_row * s.a;
        if (!s.nonfinite) continue;
        if (!c->nonfin[at] || in_row < c->nf_tok[at]) c->nf_tok[at] = in_row;
        c->nonfin[at] += s.nonfinite;
    }
    /* An odd number of 16-bit elements puts tokens across words; then the chunk's sum needs a pass of its own. */
    c->psum[(uint64_t)k * c->C + ch] = bytes % 4 ? sl_sum64(p, n * bytes) : sl_sum_fold(a, b, n * bytes);
    c->bytes += n * bytes;
}

/* ---- descriptors ---- */
/* Position of a chunk in the agreed order. Returns false when it must not be used at all. */
static bool place_chunk(sl_check *c, unsigned rank, uint32_t k, uint32_t ch) {
    uint64_t idx = (uint64_t)k * c->C + ch;
    uint8_t *got = &c->got[(uint64_t)rank * c->s.n_captures * c->C + idx];
    c->n_got[rank]++;
    if (*got & GOT) {
        condemn_chunk(c, k, ch, SL_V_COUNT, rank, 2, 1);
        return false;
    }
    *got |= GOT;
    if ((int64_t)idx < c->top[rank]) { /* it and the one that came before its turn */
        uint64_t top = (uint64_t)c->top[rank];
        condemn_chunk(c, k, ch, SL_V_ORDER, rank, (uint64_t)k << 32 | ch, top / c->C << 32 | top % c->C);
        condemn_chunk(c, (uint32_t)(top / c->C), (uint32_t)(top % c->C), SL_V_ORDER, rank,
                      top / c->C << 32 | top % c->C, (uint64_t)k << 32 | ch);
    } else {
        c->top[rank] = (int64_t)idx;
    }
    return true;
}

static void check_chunk(sl_check *c, unsigned rank, const sl_desc_chunk *d, const void *payload, uint64_t pay_size) {
    uint32_t k = d->k, ch = d->c, width = d->width, rows = d->rows, label = d->hidx;
    bool told_payload = d->h.flags & SL_CHUNK_PAYLOAD;
    if (k >= c->s.n_captures || ch >= c->C) {
        c->n_got[rank]++;
        sl_check_condemn(c, SL_V_ORDER, rank, (uint64_t)k << 32 | ch,
                         (uint64_t)(c->s.n_captures - 1) << 32 | (c->C - 1));
        return;
    }
    if (!place_chunk(c, rank, k, ch)) return;
    uint64_t idx = (uint64_t)k * c->C + ch, KC = (uint64_t)c->s.n_captures * c->C;
    uint8_t *got = &c->got[rank * KC + idx];
    c->sum[rank * KC + idx] = d->sum;
    if (d->rank != rank) condemn_chunk(c, k, ch, SL_V_ORDER, rank, d->rank, rank);
    if (label != c->s.label[k]) condemn_chunk(c, k, ch, SL_V_ORDER, rank, label, c->s.label[k]);
    uint32_t want = chunk_len(c, ch);
    uint64_t need = (uint64_t)want * c->s.width * c->s.elem_size;
    bool good = true;
    if (width != c->s.width) {
        condemn_chunk(c, k, ch, SL_V_SHAPE, rank, width, c->s.width);
        good = false;
    }
    if (rows != want) {
        condemn_chunk(c, k, ch, SL_V_COUNT, rank, rows, want);
        good = false;
    }
    if (!told_payload) return;
    *got |= GOT_PAYLOAD | (good ? 0 : BAD_SHAPE);
    if (sl_chunk_owner(c->bpos, k, ch, c->s.n_ranks) != rank) {
        condemn_chunk(c, k, ch, SL_V_ORDER, rank, rank, sl_chunk_owner(c->bpos, k, ch, c->s.n_ranks));
        return;
    }
    if (!payload || need > pay_size) {
        condemn_chunk(c, k, ch, SL_V_SHAPE, rank, payload ? need : 0, payload ? pay_size : need);
        *got |= BAD_SHAPE;
    } else if (good) {
        scan_payload(c, k, ch, payload);
    }
}

static void check_row_desc(sl_check *c, unsigned rank, const sl_desc_row *d) {
    uint32_t i = d->row;
    if (rank != 0 || i >= c->n_rows) {
        if (i < c->n_rows)
            condemn_row(c, i, SL_V_ORDER, 0xffff, rank, 0xffffffff, rank, 0);
        else
            sl_check_condemn(c, SL_V_ORDER, rank, i, c->n_rows - 1);
        return;
    }
    if (c->got_row[i]) {
        condemn_row(c, i, SL_V_COUNT, 0xffff, rank, 0xffffffff, 2, 1);
        return;
    }
    c->got_row[i] = 1;
    if (i < c->next_row)
        condemn_row(c, i, SL_V_ORDER, 0xffff, rank, 0xffffffff, i, c->next_row);
    else
        c->next_row = i + 1;
    const sl_batch_row *r = &c->v.rows[i];
    if (d->T != r->T) condemn_row(c, i, SL_V_COUNT, 0xffff, rank, 0xffffffff, d->T, r->T);
    uint64_t want = sl_sum64(c->v.ids + r->t0, 4ull * r->T);
    if (d->token_sum != want) condemn_row(c, i, SL_V_TOKENS, 0xffff, rank, 0xffffffff, d->token_sum, want);
    if (d->nll_tokens && d->nll_tokens < r->T) {
        c->row[i].nll = d->nll;
        c->row[i].nll_tokens = d->nll_tokens;
    }
}

bool sl_check_desc(sl_check *c, unsigned rank, uint64_t pos, const sl_desc *d, const void *payload, uint64_t pay_size) {
    sl_desc copy = *d; /* read once: what is checked is what is used */
    if (copy.h.pos != pos) sl_check_condemn(c, SL_V_ORDER, rank, copy.h.pos, pos);
    uint64_t bpos; /* at the same offset in all three kinds */
    memcpy(&bpos, copy.body, 8);
    if (bpos != c->bpos) sl_check_condemn(c, SL_V_ORDER, rank, bpos, c->bpos);
    switch (copy.h.kind) {
    case SL_DESC_CHUNK:
        check_chunk(c, rank, (const sl_desc_chunk *)(const void *)&copy, payload, pay_size);
        return false;
    case SL_DESC_ROW:
        check_row_desc(c, rank, (const sl_desc_row *)(const void *)&copy);
        return false;
    case SL_DESC_END: {
        const sl_desc_end *e = (const sl_desc_end *)(const void *)&copy;
        uint32_t all = c->s.n_captures * c->C;
        if (e->rank != rank) sl_check_condemn(c, SL_V_ORDER, rank, e->rank, rank);
        if (e->batch_no != c->v.desc->batch_no) sl_check_condemn(c, SL_V_ORDER, rank, e->batch_no, c->v.desc->batch_no);
        /* What is missing or came twice is named chunk by chunk; a number that is neither is a fault of the batch. */
        if (e->n_chunks != all && e->n_chunks != c->n_got[rank])
            sl_check_condemn(c, SL_V_COUNT, rank, e->n_chunks, all);
        return true;
    }
    default:
        sl_check_condemn(c, SL_V_ORDER, rank, copy.h.kind, SL_DESC_CHUNK);
        return false;
    }
}

/* ---- content in another's place ---- */
static int place_cmp(const void *x, const void *y) {
    const place *a = x, *b = y;
    return a->sum < b->sum ? -1 : a->sum > b->sum;
}

static void make_places(sl_check *c) {
    uint64_t KC = (uint64_t)c->s.n_captures * c->C, n = 0;
    c->places = malloc((c->s.n_ranks * KC + c->n_prev) * sizeof *c->places);
    if (!c->places) return; /* then the fault is called CHECKSUM or RANKS_DISAGREE: still rejected */
    for (uint32_t r = 0; r < c->s.n_ranks; r++)
        for (uint64_t i = 0; i < KC; i++)
            if (c->got[r * KC + i] & GOT)
                c->places[n++] = (place){c->sum[r * KC + i], (uint32_t)(i / c->C), (uint32_t)(i % c->C), r};
    for (uint64_t i = 0; i < c->n_prev; i++)
        c->places[n++] = (place){c->prev[i], (uint32_t)(i / c->prev_C), (uint32_t)(i % c->prev_C), PREV_BATCH};
    c->n_places = n;
    qsort(c->places, n, sizeof *c->places, place_cmp);
}

/* Is `sum` the fingerprint of a chunk other than (k, ch), told by a rank other than `not_rank`? */
static const place *find_elsewhere(sl_check *c, uint64_t sum, uint32_t k, uint32_t ch, uint32_t not_rank) {
    if (!c->places) make_places(c);
    if (!c->places) return NULL;
    uint64_t lo = 0, hi = c->n_places;
    while (lo < hi) {
        uint64_t mid = lo + (hi - lo) / 2;
        if (c->places[mid].sum < sum)
            lo = mid + 1;
        else
            hi = mid;
    }
    for (; lo < c->n_places && c->places[lo].sum == sum; lo++) {
        const place *p = &c->places[lo];
        bool same = p->rank != PREV_BATCH && p->k == k && p->c == ch;
        if (!same && p->rank != not_rank) return p;
    }
    return NULL;
}

static uint64_t place_code(const place *p) {
    return (uint64_t)p->k << 32 | p->c | (p->rank == PREV_BATCH ? SL_DETAIL_PREVIOUS : 0);
}

/* ---- finish: chunks ---- */
static void check_payload_sum(sl_check *c, uint32_t k, uint32_t ch, uint32_t owner) {
    uint64_t KC = (uint64_t)c->s.n_captures * c->C, idx = (uint64_t)k * c->C + ch;
    uint64_t told = c->sum[owner * KC + idx], found = c->psum[idx];
    if (found == told) return;
    const place *p = find_elsewhere(c, found, k, ch, c->s.n_ranks);
    if (p)
        condemn_chunk(c, k, ch, SL_V_ORDER, owner, place_code(p), (uint64_t)k << 32 | ch);
    else
        condemn_chunk(c, k, ch, SL_V_CHECKSUM, owner, found, told);
}

/* The rank that most others contradict about a chunk: 0xffff when there is no majority; agree = they all say the same.
 */
static uint32_t odd_rank(const sl_check *c, uint64_t idx, bool *agree) {
    uint64_t KC = (uint64_t)c->s.n_captures * c->C, best = 0;
    uint32_t N = c->s.n_ranks, votes = 0, told = 0, odd = 0xffff;
    for (uint32_t r = 0; r < N; r++) {
        if (!(c->got[r * KC + idx] & GOT)) continue;
        uint32_t n = 0;
        told++;
        for (uint32_t q = 0; q < N; q++)
            n += (c->got[q * KC + idx] & GOT) && c->sum[q * KC + idx] == c->sum[r * KC + idx];
        if (n > votes) {
            votes = n;
            best = c->sum[r * KC + idx];
        }
    }
    *agree = votes == told;
    if (2 * votes <= told) return 0xffff;
    for (uint32_t r = 0; r < N && odd == 0xffff; r++)
        if ((c->got[r * KC + idx] & GOT) && c->sum[r * KC + idx] != best) odd = r;
    return odd;
}

static void check_ranks(sl_check *c, uint32_t k, uint32_t ch) {
    uint64_t KC = (uint64_t)c->s.n_captures * c->C, idx = (uint64_t)k * c->C + ch;
    bool agree;
    uint32_t odd = odd_rank(c, idx, &agree);
    if (agree) return;
    const place *p = NULL;
    for (uint32_t r = 0; r < c->s.n_ranks && !p; r++)
        if ((odd == 0xffff || odd == r) && (c->got[r * KC + idx] & GOT))
            p = find_elsewhere(c, c->sum[r * KC + idx], k, ch, r);
    if (p)
        condemn_chunk(c, k, ch, SL_V_ORDER, odd, place_code(p), (uint64_t)k << 32 | ch);
    else
        condemn_chunk(c, k, ch, SL_V_RANKS_DISAGREE, odd, odd, 0);
}

static void finish_chunks(sl_check *c) {
    uint32_t N = c->s.n_ranks;
    uint64_t KC = (uint64_t)c->s.n_captures * c->C;
    for (uint32_t k = 0; k < c->s.n_captures; k++)
        for (uint32_t ch = 0; ch < c->C; ch++) {
            uint64_t idx = (uint64_t)k * c->C + ch;
            uint32_t owner = sl_chunk_owner(c->bpos, k, ch, N);
            uint8_t own = c->got[owner * KC + idx];
            for (uint32_t r = 0; r < N; r++)
                if (r != owner && !(c->got[r * KC + idx] & GOT)) condemn_chunk(c, k, ch, SL_V_COUNT, r, 0, 1);
            if (!(own & GOT) || !(own & GOT_PAYLOAD))
                condemn_chunk(c, k, ch, SL_V_MISSING_SHARD, owner, owner, 0);
            else if (!(own & BAD_SHAPE))
                check_payload_sum(c, k, ch, owner);
            if (N > 1) check_ranks(c, k, ch);
        }
}

/* ---- finish: rows ---- */
static void constant(sl_check *c, uint32_t i, uint32_t k, uint32_t token, sl_constant kind, uint64_t n) {
    condemn_row(c, i, SL_V_CONSTANT, k, 0xffff, token, (uint64_t)kind << 32 | n, 0);
}

static void check_zero(sl_check *c, uint32_t i, uint32_t k) {
    const sl_batch_row *r = &c->v.rows[i];
    const uint8_t *flag = c->tflag + (uint64_t)k * c->n_tokens + r->t0;
    uint32_t n = 0, first = 0;
    for (uint32_t t = r->T; t-- > 0;)
        if (flag[t] & TOK_ZERO) {
            n++;
            first = t;
        }
    if (n && (c->s.label[k] || n == r->T)) constant(c, i, k, first, SL_CONST_ZERO, n);
}

static void check_repeated(sl_check *c, uint32_t i, uint32_t k) {
    const sl_batch_row *r = &c->v.rows[i];
    const uint64_t *tok = c->tok + (uint64_t)k * c->n_tokens + r->t0;
    const uint8_t *flag = c->tflag + (uint64_t)k * c->n_tokens + r->t0;
    const int32_t *ids = c->v.ids + r->t0;
    uint32_t n = 0, first = 0;
    for (uint32_t t = r->T; t-- > 1;)
        if (tok[t] == tok[t - 1] && ids[t] != ids[t - 1] && (flag[t] & flag[t - 1] & TOK_SEEN)) {
            n++;
            first = t;
        }
    if (n > 2) constant(c, i, k, first, SL_CONST_REPEATED, n);
}

/* One number for all states of a row at capture k; false when some did not come. */
static bool row_print(const sl_check *c, uint32_t i, uint32_t k, uint64_t *out) {
    const sl_batch_row *r = &c->v.rows[i];
    uint64_t h = 0x9e3779b97f4a7c15ull, at = (uint64_t)k * c->n_tokens + r->t0;
    for (uint32_t t = 0; t < r->T; t++) {
        if (!(c->tflag[at + t] & TOK_SEEN)) return false;
        h = (h ^ c->tok[at + t]) * 0xff51afd7ed558ccdull;
        h ^= h >> 32;
    }
    *out = h;
    return true;
}

static void check_layers(sl_check *c, uint32_t i) {
    for (uint32_t k = 1; k < c->s.n_captures; k++)
        for (uint32_t q = 0; q < k; q++)
            if (c->rowfp[k] == c->rowfp[q]) {
                constant(c, i, k, 0, SL_CONST_LAYERS, q);
                return;
            }
}

static void check_past_rows(sl_check *c, uint32_t i, uint64_t ids) {
    uint64_t n = c->n_past < SL_HISTORY_ROWS ? c->n_past : SL_HISTORY_ROWS;
    for (uint64_t ago = 1; ago <= n; ago++) {
        const past_row *p = &c->past[(c->n_past - ago) % SL_HISTORY_ROWS];
        if (p->ids == ids || p->T != c->v.rows[i].T) continue;
        for (uint32_t k = 0; k < c->s.n_captures; k++)
            if (c->s.label[k] && p->fp[k] == c->rowfp[k]) {
                constant(c, i, k, 0, SL_CONST_ROWS, ago);
                return;
            }
    }
}

static seen *table_at(const sl_check *c, uint32_t j, uint64_t fp) {
    return &c->table[j][(fp * 0x9e3779b97f4a7c15ull >> 32) & c->table_mask];
}

static void check_other_id(sl_check *c, uint32_t i) {
    const sl_batch_row *r = &c->v.rows[i];
    for (uint32_t j = 0; j < c->n_tables; j++) {
        uint32_t n = 0, first = 0;
        for (uint32_t t = 0; t < r->T; t++) {
            uint64_t fp = c->tok[(uint64_t)c->table_k[j] * c->n_tokens + r->t0 + t];
            const seen *e = table_at(c, j, fp);
            if (e->fp != fp || e->id < 0 || e->id == (uint32_t)c->v.ids[r->t0 + t]) continue;
            if (!n++) first = t;
        }
        if (n > 2 || 2ull * n > r->T) {
            constant(c, i, c->table_k[j], first, SL_CONST_OTHER_ID, n);
            return;
        }
    }
}

static void remember_row(sl_check *c, uint32_t i, uint64_t ids) {
    const sl_batch_row *r = &c->v.rows[i];
    past_row *p = &c->past[c->n_past++ % SL_HISTORY_ROWS];
    p->ids = ids;
    p->T = r->T;
    memcpy(p->fp, c->rowfp, c->s.n_captures * 8);
    for (uint32_t j = 0; j < c->n_tables; j++)
        for (uint32_t t = 0; t < r->T; t++) {
            uint64_t fp = c->tok[(uint64_t)c->table_k[j] * c->n_tokens + r->t0 + t];
            *table_at(c, j, fp) = (seen){fp, (uint32_t)c->v.ids[r->t0 + t]};
        }
}

static uint64_t row_sum(const sl_check *c, uint32_t i) {
    uint64_t h = 0, K = c->s.n_captures, bytes = (uint64_t)c->v.rows[i].T * c->s.width * c->s.elem_size;
    for (uint64_t k = 0; k < K; k++) {
        const sums *s = &c->rsum[i * K + k];
        h = sl_sum_chain(h, sl_sum_fold(s->a, s->b, bytes));
    }
    return h;
}

static void finish_row(sl_check *c, uint32_t i) {
    const sl_batch_row *r = &c->v.rows[i];
    uint32_t K = c->s.n_captures;
    uint64_t ids = sl_sum64(c->v.ids + r->t0, 4ull * r->T);
    bool whole = true;
    if (!c->got_row[i]) condemn_row(c, i, SL_V_COUNT, 0xffff, 0, 0xffffffff, 0, 1);
    for (uint32_t k = 0; k < K; k++) {
        uint64_t at = (uint64_t)i * K + k;
        if (c->nonfin[at]) condemn_row(c, i, SL_V_NONFINITE, k, 0xffff, c->nf_tok[at], c->nonfin[at], 0);
        check_zero(c, i, k);
        if (c->s.label[k]) check_repeated(c, i, k);
        whole = row_print(c, i, k, &c->rowfp[k]) && whole;
    }
    if (!whole) return; /* already condemned for what is missing */
    check_layers(c, i);
    check_past_rows(c, i, ids);
    check_other_id(c, i);
    if (c->row[i].verdict != SL_V_OK) return;
    c->row[i].sum = row_sum(c, i);
    remember_row(c, i, ids);
}

/* Keep the payload's checksums: content of this batch may turn up in the next. */
static void remember_chunks(sl_check *c) {
    uint64_t KC = (uint64_t)c->s.n_captures * c->C;
    c->n_prev = 0;
    if (KC > c->cap_prev) {
        c->cap_prev = regrow(&c->prev, KC, 8) ? KC : 0;
        if (!c->cap_prev) return;
    }
    memcpy(c->prev, c->psum, KC * 8);
    c->n_prev = KC;
    c->prev_C = c->C;
}

const sl_row_verdict *sl_check_finish(sl_check *c) {
    finish_chunks(c);
    for (uint32_t i = 0; i < c->n_rows; i++) finish_row(c, i);
    free(c->places);
    c->places = NULL;
    c->n_places = 0;
    remember_chunks(c);
    return c->row;
}

uint64_t sl_check_bytes(const sl_check *c) {
    return c->bytes;
}

/* ---- words ---- */
static const char *say_constant(uint64_t detail, char *buf, size_t n) {
    uint32_t v = (uint32_t)detail;
    switch ((sl_constant)(detail >> 32)) {
    case SL_CONST_ZERO:
        snprintf(buf, n, "%u states are all zeros", v);
        break;
    case SL_CONST_REPEATED:
        snprintf(buf, n, "%u neighbours with different ids have the same state", v);
        break;
    case SL_CONST_LAYERS:
        snprintf(buf, n, "the same states as capture %u in every token", v);
        break;
    case SL_CONST_ROWS:
        snprintf(buf, n, "the same states as the row accepted %u rows ago, whose ids differ", v);
        break;
    case SL_CONST_OTHER_ID:
        snprintf(buf, n, "%u states were seen before under other token ids", v);
        break;
    default:
        snprintf(buf, n, "detail %" PRIu64, detail);
    }
    return buf;
}

static void say_fault(const sl_row_verdict *v, char *buf, size_t n) {
    uint64_t d = v->detail & ~SL_DETAIL_PREVIOUS;
    switch (v->verdict) {
    case SL_V_NONFINITE:
        snprintf(buf, n, "%" PRIu64 " NaN or Inf elements", v->detail);
        break;
    case SL_V_CONSTANT:
        say_constant(v->detail, buf, n);
        break;
    case SL_V_CHECKSUM:
    case SL_V_TOKENS:
        snprintf(buf, n, "found checksum %016" PRIx64 ", expected %016" PRIx64, v->detail, v->want);
        break;
    case SL_V_MISSING_SHARD:
        snprintf(buf, n, "rank %" PRIu64 " did not deliver the payload of its chunk", v->detail);
        break;
    case SL_V_RANKS_DISAGREE:
        if (v->detail == 0xffff)
            snprintf(buf, n, "fingerprints differ between ranks, no majority");
        else
            snprintf(buf, n, "rank %" PRIu64 " contradicts the others", v->detail);
        break;
    case SL_V_POISON:
        snprintf(buf, n, "in flight at two deaths of its group in a row");
        break;
    case SL_V_ORDER:
        if (v->detail & SL_DETAIL_PREVIOUS || v->detail >> 32 || v->want >> 32) {
            snprintf(buf, n, "found capture %" PRIu64 " chunk %u%s, expected capture %" PRIu64 " chunk %u", d >> 32,
                     (uint32_t)d, v->detail & SL_DETAIL_PREVIOUS ? " of the batch before" : "", v->want >> 32,
                     (uint32_t)v->want);
            break;
        } /* fall through */
    default:
        snprintf(buf, n, "found %" PRIu64 ", expected %" PRIu64, v->detail, v->want);
    }
}

const char *sl_check_say(const sl_check_shape *s, const sl_row_verdict *v, char *buf, size_t n) {
    char at[96] = "", fault[200], rank[24] = "";
    if (v->k < s->n_captures && v->token != 0xffffffff)
        snprintf(at, sizeof at, " at capture %u (H index %u), token %u", v->k, s->label[v->k], v->token);
    if (v->rank != 0xffff) snprintf(rank, sizeof rank, " (rank %u)", v->rank);
    say_fault(v, fault, sizeof fault);
    snprintf(buf, n, "%s%s: %s%s", sl_verdict_name(v->verdict), at, fault, rank);
    return buf;
}
