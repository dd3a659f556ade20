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
    KB = 128,              /* keys a block; a multiple of every nr */
    SHORT = 256,           /* sequences up to this length are one item a kv head */
    QT = 8,                /* query tiles (of mr rows) an item */
    MAX_DV = 1024,         /* of the output tile */
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

typedef struct { /* one thread's buffers */
    float *s;    /* [mr][KB] scores, then probabilities */
    float *o;    /* [mr][dv padded] */
    float *q;    /* [mr][dqk] f32 copies of bf16 queries */
    uint16_t *p; /* [mr][KB] bf16 probabilities */
    uint8_t *kv; /* packed keys and values of a short sequence */
} bufs;

static bufs carve(uint8_t *p) {
    bufs b;
    b.s = (float *)(void *)p;
    p += 16 * KB * 4;
    b.o = (float *)(void *)p;
    p += 16 * MAX_DV * 4;
    b.q = (float *)(void *)p;
    p += 16 * MAX_DV * 4;
    b.p = (uint16_t *)(void *)p;
    p += 16 * KB * 2;
    b.kv = p;
    return b;
}
_Static_assert(16 * KB * 6 + 32 * MAX_DV * 4 + SHORT * 2 * MAX_DV * 4 <= SL_GEMM_SCRATCH, "scratch holds its parts");

/* Query rows [i0, i0+rows) of query head hq of the sequence at t0: rows <= mr. */
static void query_tile(const view *w, const packed *kv, const bufs *b, int64_t t0, int32_t hq, int64_t i0,
                       int32_t rows) {
    const sl_isa *isa = w->c->isa;
    const sl_attn *a = w->a;
    const int64_t nr = isa->nr, dvp = up(a->dv, nr), panel = k_bytes(w, nr), vpanel = kv->lpad * nr * w->esz;
    float m[16], l[16];
    for (int32_t r = 0; r < rows; r++) {
        m[r] = a->sinks ? a->sinks[hq] : -INFINITY;
        l[r] = a->sinks ? 1.0f : 0.0f;
    }
    const void *q = sl_cpu_at(w->c, w->q, (t0 + i0) * a->q_stride + (int64_t)hq * a->dqk);
    const float *qf = q;
    int64_t ldq = a->q_stride;
    if (!w->dot && w->c->bf) {
        for (int32_t r = 0; r < rows; r++)
            isa->to_f32(b->q + r * a->dqk, (const uint16_t *)q + r * a->q_stride, a->dqk);
        qf = b->q;
        ldq = a->dqk;
    }
    int64_t first = a->window > 0 && i0 >= a->window ? (i0 - a->window + 1) / KB * KB : 0;
    for (int64_t kb = first; kb < i0 + rows; kb += KB) {
        int32_t n = (int32_t)(i0 + rows - kb < KB ? i0 + rows - kb : KB), np = (int32_t)up(n, nr);
        for (int32_t c = 0; c < np; c += (int32_t)nr) {
            const uint8_t *kp = kv->k + (kb + c) / nr * panel;
            if (w->dot)
                isa->mm_bf16(b->s + c, KB, q, ldq, rows, (const void *)kp, a->dqk, 0);
            else
                isa->mm_f32(b->s + c, KB, qf, ldq, rows, (const void *)kp, a->dqk, 0);
        }
        for (int32_t r = 0; r < rows; r++) {
            int64_t i = i0 + r, lo = a->window > 0 && i - a->window + 1 > kb ? i - a->window + 1 - kb : 0;
            int64_t hi = i + 1 - kb < n ? i + 1 - kb : n;
            if (lo >= hi) { /* nothing of this block is visible to the row */
                memset(b->s + r * KB, 0, (size_t)n * 4);
            } else {
                float f = isa->softmax_step(b->s + r * KB, n, (int32_t)lo, (int32_t)hi, a->scale, &m[r], &l[r]);
                if (kb != first && f != 1.0f) isa->scale_f32(b->o + r * dvp, f, dvp);
            }
            if (w->dot) isa->to_bf16(b->p + r * KB, b->s + r * KB, n);
        }
        for (int64_t d = 0; d < dvp; d += nr) {
            const uint8_t *vp = kv->v + d / nr * vpanel + kb * nr * w->esz;
            if (w->dot)
                isa->mm_bf16(b->o + d, dvp, b->p, KB, rows, (const void *)vp, n, kb != first);
            else
                isa->mm_f32(b->o + d, dvp, b->s, KB, rows, (const void *)vp, n, kb != first);
        }
    }
    for (int32_t r = 0; r < rows; r++) {
        void *out = sl_cpu_at(w->c, w->o, (t0 + i0 + r) * a->o_stride + (int64_t)hq * a->dv);
        isa->scale_f32(b->o + r * dvp, 1.0f / l[r], a->dv);
        if (w->c->bf)
            isa->finish_bf16(out, b->o + r * dvp, NULL, a->dv);
        else
            isa->finish_f32(out, b->o + r * dvp, NULL, a->dv);
    }
}

static void query_rows(const view *w, const packed *kv, const bufs *b, int64_t t0, int32_t h, int64_t i0, int64_t i1) {
    const int32_t rep = w->a->heads / w->a->kv_heads, mr = w->c->isa->mr;
    for (int32_t g = 0; g < rep; g++)
        for (int64_t i = i0; i < i1; i += mr)
            query_tile(w, kv, b, t0, h * rep + g, i, (int32_t)(i1 - i < mr ? i1 - i : mr));
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
    if (a->heads < 1 || a->kv_heads < 1 || a->heads % a->kv_heads || a->dqk < 1 || a->dv < 1 || a->dqk > MAX_DV ||
        a->dv > MAX_DV)
        return sl_err_set(err, SL_EINTERNAL,
                          "attention: %d query heads on %d kv heads of %d and %d, expected a multiple and 1..%d",
                          a->heads, a->kv_heads, a->dqk, a->dv, MAX_DV);
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
