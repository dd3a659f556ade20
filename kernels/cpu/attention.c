/* Attention over packed sequences, flash style: for a tile of query rows, blocks of keys are scored, turned into
 * probabilities with a running maximum and sum, and multiplied into a running output; nothing of size L x L exists.
 *
 * K and V of one kv head become panels (isa.h) once. A short sequence is one work item a kv head: one thread packs and
 * computes all of it in its own scratch. A long one is packed into the workspace by all threads, a group of kv heads at
 * a time, and its work items are (kv head, block of query rows of all its query heads). Items are taken from a counter;
 * each is computed whole by one thread, so the result does not depend on who took it. */
#include "kernels/cpu/cpu.h"
#include <math.h>
#include <stdatomic.h>
#include <string.h>

enum {
    KB = 256,              /* keys a block; a multiple of every nr */
    SHORT = 256,           /* sequences up to this length are one item a kv head */
    TILES = 6,             /* query tiles that share a pass over the keys */
    QT = 8,                /* query tiles (of mr rows) of one head in an item */
    MAX_D = 1024,          /* of a head */
    GROUP_BYTES = 32 << 20 /* packed kv heads at a time, at least one */
};

typedef struct {
    sl_cpu *c;
    const sl_attn *a;
    void *o;
    const void *q, *k, *v;
    int dot;
    int64_t esz; /* of a packed element */
} view;

typedef struct { /* packed K and V of one kv head of one sequence */
    uint8_t *k, *v;
    int64_t lpad; /* keys, padded to KB */
} packed;

static int64_t up(int64_t x, int64_t m) {
    return (x + m - 1) / m * m;
}
static int64_t k_bytes(const view *w, int64_t lpad) {
    return lpad * (w->dot ? up(w->a->dqk, 2) : w->a->dqk) * w->esz;
}
static int64_t v_bytes(const view *w, int64_t lpad) {
    return lpad * up(w->a->dv, w->c->isa->nr) * w->esz;
}

/* Keys [k0, k0+kn) (kn <= KB, k0 a multiple of KB) of kv head h of the sequence that starts at token t0. */
static void pack_keys(const view *w, const packed *p, int64_t t0, int32_t h, int64_t k0, int64_t kn) {
    const sl_isa *isa = w->c->isa;
    const sl_attn *a = w->a;
    const int64_t nr = isa->nr, panel = k_bytes(w, nr), vpanel = p->lpad * nr * w->esz;
    for (int64_t i = 0; i < kn; i += nr) {
        int32_t n = (int32_t)(kn - i < nr ? kn - i : nr);
        uint8_t *dst = p->k + (k0 + i) / nr * panel;
        const void *src = sl_cpu_at(w->c, w->k, (t0 + k0 + i) * a->k_stride + h * a->k_head_stride);
        if (w->dot)
            isa->pack_bf16((void *)dst, src, a->k_stride, n, a->dqk);
        else if (w->c->bf)
            isa->pack_f32_from_bf16((void *)dst, src, a->k_stride, n, a->dqk);
        else
            isa->pack_f32((void *)dst, src, a->k_stride, n, a->dqk);
    }
    for (int64_t d = 0, j = 0; d < a->dv; d += nr, j++) {
        int32_t n = (int32_t)(a->dv - d < nr ? a->dv - d : nr);
        uint8_t *dst = p->v + j * vpanel + k0 * nr * w->esz;
        const void *src = sl_cpu_at(w->c, w->v, (t0 + k0) * a->v_stride + h * a->v_head_stride + d);
        if (w->dot)
            isa->pack_v_bf16((void *)dst, src, a->v_stride, n, kn);
        else if (w->c->bf)
            isa->pack_v_f32_from_bf16((void *)dst, src, a->v_stride, n, kn);
        else
            isa->pack_v_f32((void *)dst, src, a->v_stride, n, kn);
    }
}

typedef struct { /* one thread's buffers; TILES tiles side by side */
    float *s;    /* [16][KB] each: scores, then probabilities (bf16 ones in the first half of each row) */
    float *o;    /* [16][dv padded] each */
    float *q;    /* [16][dqk] each: f32 copies of bf16 queries */
    uint8_t *kv; /* packed keys and values of a short sequence */
} bufs;

static bufs carve(uint8_t *p) {
    bufs b;
    b.s = (float *)(void *)p;
    p += TILES * 16 * KB * 4;
    b.o = (float *)(void *)p;
    p += TILES * 16 * MAX_D * 4;
    b.q = (float *)(void *)p;
    p += TILES * 16 * MAX_D * 4;
    b.kv = p;
    return b;
}
_Static_assert(TILES * 16 * (KB + 2 * MAX_D) * 4 + SHORT * 2 * MAX_D * 4 <= SL_GEMM_SCRATCH, "scratch holds its parts");

/* A tile of query rows [i0, i0+rows) of query head hq in progress, rows <= mr. */
typedef struct {
    int64_t i0;
    int32_t hq, rows;
    const void *q; /* f32 or bf16, as the kernel wants it */
    int64_t ldq;
    float *s, *o;
    float m[16], l[16];
} tile;

static void tile_open(const view *w, const bufs *b, tile *t, int n, int64_t t0) {
    const sl_isa *isa = w->c->isa;
    const sl_attn *a = w->a;
    for (int32_t r = 0; r < t->rows; r++) {
        t->m[r] = a->sinks ? a->sinks[t->hq] : -INFINITY;
        t->l[r] = a->sinks ? 1.0f : 0.0f;
    }
    t->s = b->s + (int64_t)n * 16 * KB;
    t->o = b->o + (int64_t)n * 16 * up(a->dv, isa->nr);
    t->q = sl_cpu_at(w->c, w->q, (t0 + t->i0) * a->q_stride + (int64_t)t->hq * a->dqk);
    t->ldq = a->q_stride;
    if (w->dot || !w->c->bf) return;
    float *f = b->q + (int64_t)n * 16 * a->dqk;
    for (int32_t r = 0; r < t->rows; r++) isa->to_f32(f + r * a->dqk, (const uint16_t *)t->q + r * a->q_stride, a->dqk);
    t->q = f;
    t->ldq = a->dqk;
}

/* Probabilities of the tile against keys [kb, kb+n). */
static void tile_scores(const view *w, const packed *kv, tile *t, int64_t kb, int32_t n, int first) {
    const sl_isa *isa = w->c->isa;
    const sl_attn *a = w->a;
    const int64_t nr = isa->nr, panel = k_bytes(w, nr), dvp = up(a->dv, nr);
    for (int32_t c = 0; c < n; c += (int32_t)nr) {
        const uint8_t *kp = kv->k + (kb + c) / nr * panel;
        if (w->dot)
            isa->mm_bf16(t->s + c, KB, t->q, t->ldq, t->rows, (const void *)kp, a->dqk, 0);
        else
            isa->mm_f32(t->s + c, KB, t->q, t->ldq, t->rows, (const void *)kp, a->dqk, 0);
    }
    for (int32_t r = 0; r < t->rows; r++) {
        float *s = t->s + r * KB;
        int64_t i = t->i0 + r, lo = a->window > 0 && i - a->window + 1 > kb ? i - a->window + 1 - kb : 0;
        int64_t hi = i + 1 - kb < n ? i + 1 - kb : n;
        if (lo >= hi) { /* nothing of this block is visible to the row */
            memset(s, 0, (size_t)n * 4);
        } else {
            float f = isa->softmax_step(s, n, (int32_t)lo, (int32_t)hi, a->scale, &t->m[r], &t->l[r]);
            if (!first && f != 1.0f) isa->scale_f32(t->o + r * dvp, f, dvp);
        }
        if (w->dot) isa->to_bf16((uint16_t *)(void *)s, s, n); /* in place: it writes behind what it reads */
    }
}

static void tile_values(const view *w, const packed *kv, const tile *t, int64_t kb, int32_t n, int first) {
    const sl_isa *isa = w->c->isa;
    const int64_t nr = isa->nr, dvp = up(w->a->dv, nr), vpanel = kv->lpad * nr * w->esz;
    for (int64_t d = 0; d < dvp; d += nr) {
        const uint8_t *vp = kv->v + d / nr * vpanel + kb * nr * w->esz;
        if (w->dot)
            isa->mm_bf16(t->o + d, dvp, (const uint16_t *)(const void *)t->s, 2 * KB, t->rows, (const void *)vp, n,
                         !first);
        else
            isa->mm_f32(t->o + d, dvp, t->s, KB, t->rows, (const void *)vp, n, !first);
    }
}

static void tile_close(const view *w, const tile *t, int64_t t0) {
    const sl_isa *isa = w->c->isa;
    const sl_attn *a = w->a;
    const int64_t dvp = up(a->dv, isa->nr);
    for (int32_t r = 0; r < t->rows; r++) {
        void *out = sl_cpu_at(w->c, w->o, (t0 + t->i0 + r) * a->o_stride + (int64_t)t->hq * a->dv);
        isa->scale_f32(t->o + r * dvp, 1.0f / t->l[r], a->dv);
        if (w->c->bf)
            isa->finish_bf16(out, t->o + r * dvp, NULL, a->dv);
        else
            isa->finish_f32(out, t->o + r * dvp, NULL, a->dv);
    }
}

/* Keys that the tile's rows see: [from, to), from at a block's start. */
static int64_t tile_from(const view *w, const tile *t) {
    return w->a->window > 0 && t->i0 >= w->a->window ? (t->i0 - w->a->window + 1) / KB * KB : 0;
}

/* A group of tiles goes through the key blocks together: a block of keys stays in the first cache for all tiles, then
 * the block of values does. What a tile computes does not depend on its group. */
static void tile_group(const view *w, const packed *kv, const bufs *b, tile *t, int n, int64_t t0) {
    int64_t from = INT64_MAX, to = 0;
    for (int i = 0; i < n; i++) {
        tile_open(w, b, &t[i], i, t0);
        if (tile_from(w, &t[i]) < from) from = tile_from(w, &t[i]);
        if (t[i].i0 + t[i].rows > to) to = t[i].i0 + t[i].rows;
    }
    for (int64_t kb = from; kb < to; kb += KB) {
        for (int phase = 0; phase < 2; phase++)
            for (int i = 0; i < n; i++) {
                int64_t end = t[i].i0 + t[i].rows, first = tile_from(w, &t[i]);
                if (kb < first || kb >= end) continue;
                int32_t keys = (int32_t)(end - kb < KB ? end - kb : KB);
                if (phase == 0)
                    tile_scores(w, kv, &t[i], kb, keys, kb == first);
                else
                    tile_values(w, kv, &t[i], kb, keys, kb == first);
            }
    }
    for (int i = 0; i < n; i++) tile_close(w, &t[i], t0);
}

/* Query rows [i0, i1) of all query heads of kv head h. */
static void query_rows(const view *w, const packed *kv, const bufs *b, int64_t t0, int32_t h, int64_t i0, int64_t i1) {
    const int32_t rep = w->a->heads / w->a->kv_heads, mr = w->c->isa->mr;
    tile t[TILES];
    int n = 0;
    for (int64_t i = i0; i < i1; i += mr)
        for (int32_t g = 0; g < rep; g++) {
            t[n].i0 = i;
            t[n].hq = h * rep + g;
            t[n].rows = (int32_t)(i1 - i < mr ? i1 - i : mr);
            if (++n == TILES) {
                tile_group(w, kv, b, t, n, t0);
                n = 0;
            }
        }
    if (n) tile_group(w, kv, b, t, n, t0);
}

/* ---- short sequences ------------------------------------------------------------------------------------------------
 */

typedef struct {
    view w;
    const int32_t *cu;
    int32_t S;
    _Atomic int64_t next;
} short_job;

static void short_part(void *arg, int tid, int threads) {
    short_job *j = arg;
    (void)threads;
    const bufs b = carve(j->w.c->scratch[tid]);
    const int64_t items = (int64_t)j->S * j->w.a->kv_heads;
    int64_t it;
    while ((it = atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed)) < items) {
        int32_t s = (int32_t)(it / j->w.a->kv_heads), h = (int32_t)(it % j->w.a->kv_heads);
        int64_t t0 = j->cu[s], L = j->cu[s + 1] - t0;
        if (L < 1 || L > SHORT) continue;
        packed kv = {.k = b.kv, .lpad = up(L, KB)};
        kv.v = b.kv + k_bytes(&j->w, kv.lpad);
        for (int64_t k = 0; k < L; k += KB) pack_keys(&j->w, &kv, t0, h, k, L - k < KB ? L - k : KB);
        query_rows(&j->w, &kv, &b, t0, h, 0, L);
    }
}

/* ---- long sequences -------------------------------------------------------------------------------------------------
 */

typedef struct {
    view w;
    int64_t t0, L, lpad;
    int32_t h0, hn; /* kv heads of this group */
    uint8_t *ws;
    _Atomic int64_t next;
} long_job;

static packed long_packed(const long_job *j, int32_t g) {
    int64_t kb = k_bytes(&j->w, j->lpad), vb = v_bytes(&j->w, j->lpad);
    return (packed){.k = j->ws + g * (kb + vb), .v = j->ws + g * (kb + vb) + kb, .lpad = j->lpad};
}

static void long_pack_part(void *arg, int tid, int threads) {
    long_job *j = arg;
    long lo, hi, blocks = j->lpad / KB;
    sl_pool_part(blocks * j->hn, 1, tid, threads, &lo, &hi);
    for (long i = lo; i < hi; i++) {
        packed kv = long_packed(j, (int32_t)(i / blocks));
        int64_t k = i % blocks * KB;
        pack_keys(&j->w, &kv, j->t0, j->h0 + (int32_t)(i / blocks), k, j->L - k < KB ? j->L - k : KB);
    }
}

static void long_part(void *arg, int tid, int threads) {
    long_job *j = arg;
    (void)threads;
    const bufs b = carve(j->w.c->scratch[tid]);
    const int64_t rows = QT * j->w.c->isa->mr, blocks = (j->L + rows - 1) / rows;
    int64_t it;
    while ((it = atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed)) < blocks * j->hn) {
        int64_t i0 = (blocks - 1 - it / j->hn) * rows; /* the longest first */
        int32_t g = (int32_t)(it % j->hn);
        packed kv = long_packed(j, g);
        query_rows(&j->w, &kv, &b, j->t0, j->h0 + g, i0, i0 + rows < j->L ? i0 + rows : j->L);
    }
}

static int32_t heads_at_once(int64_t head_bytes, int32_t kv_heads) {
    int64_t n = GROUP_BYTES / head_bytes;
    return (int32_t)(n < 1 ? 1 : n > kv_heads ? kv_heads : n);
}

static view view_of(const sl_cpu *c, const sl_attn *a) {
    view w = {.c = (sl_cpu *)(uintptr_t)c, .a = a, .dot = c->bf && c->isa->bf16_dot};
    w.esz = w.dot ? 2 : 4;
    return w;
}

uint64_t sl_cpu_attention_bytes(const sl_cpu *c, int64_t max_seq, const sl_attn *a) {
    if (max_seq <= SHORT) return 0;
    view w = view_of(c, a);
    int64_t lpad = up(max_seq, KB), head = k_bytes(&w, lpad) + v_bytes(&w, lpad);
    return (uint64_t)(head * heads_at_once(head, a->kv_heads));
}

static int check(const sl_attn *a, const int32_t *cu, int32_t S, sl_err *err) {
    if (a->heads < 1 || a->kv_heads < 1 || a->heads % a->kv_heads || a->dqk < 1 || a->dv < 1 || a->dqk > MAX_D ||
        a->dv > MAX_D)
        return sl_err_set(err, SL_EINTERNAL,
                          "attention: %d query heads on %d kv heads of %d and %d, expected a multiple and 1..%d",
                          a->heads, a->kv_heads, a->dqk, a->dv, MAX_D);
    if (S < 0 || cu[0] != 0)
        return sl_err_set(err, SL_EINTERNAL, "attention: %d sequences, the first at token %d, expected 0", S, cu[0]);
    for (int32_t s = 0; s < S; s++)
        if (cu[s + 1] < cu[s])
            return sl_err_set(err, SL_EINTERNAL, "attention: sequence %d ends at token %d before its start %d", s,
                              cu[s + 1], cu[s]);
    return 0;
}

int sl_cpu_attention(void *ctx, void *o, const void *q, const void *k, const void *v, const int32_t *cu, int32_t S,
                     const sl_attn *a, sl_err *err) {
    sl_cpu *c = ctx;
    int rc = check(a, cu, S, err);
    if (rc) return rc;
    view w = view_of(c, a);
    w.o = o;
    w.q = q;
    w.k = k;
    w.v = v;
    short_job sj = {.w = w, .cu = cu, .S = S};
    atomic_init(&sj.next, 0);
    sl_pool_run(c->pool, short_part, &sj);
    for (int32_t s = 0; s < S; s++) {
        int64_t L = cu[s + 1] - cu[s];
        if (L <= SHORT) continue;
        long_job j = {.w = w, .t0 = cu[s], .L = L, .lpad = up(L, KB)};
        int64_t head = k_bytes(&w, j.lpad) + v_bytes(&w, j.lpad);
        int32_t at_once = heads_at_once(head, a->kv_heads);
        rc = sl_cpu_ws(c, (uint64_t)(head * at_once), "attention", &j.ws, err);
        if (rc) return rc;
        for (j.h0 = 0; j.h0 < a->kv_heads; j.h0 += at_once) {
            j.hn = a->kv_heads - j.h0 < at_once ? a->kv_heads - j.h0 : at_once;
            sl_pool_run(c->pool, long_pack_part, &j);
            atomic_store_explicit(&j.next, 0, memory_order_relaxed);
            sl_pool_run(c->pool, long_part, &j);
        }
    }
    return 0;
}
