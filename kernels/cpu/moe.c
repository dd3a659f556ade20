/* Mixture of experts: routing, and the experts' sum. Experts run one after another in ascending order, each over the
 * rows that chose it, with all threads in its products; so the sum of a token's experts has one fixed order and the
 * memory is that of one expert's rows. */
#include "kernels/cpu/cpu.h"
#include <math.h>
#include <string.h>

/* ---- route ----------------------------------------------------------------------------------------------------------
 */

enum { ROUTE_ROWS = 240, MAX_GROUPS = 256 };

typedef struct {
    sl_cpu *c;
    const sl_router *r;
    float *logits; /* [rows, E], overwritten by scores */
    float *choice; /* [rows, E] */
    int64_t rows;
    int32_t *idx;
    float *w;
} route_job;

static float round_bf16(const sl_cpu *c, float x) {
    uint16_t h;
    c->isa->to_bf16(&h, &x, 1);
    c->isa->to_f32(&x, &h, 1);
    return x;
}

/* The k best of v[0..n), lower index first among equals, best first. A NaN is never better than a number. */
static void top_k(const float *v, int32_t n, int32_t k, int32_t *idx) {
    int32_t have = 0;
    for (int32_t i = 0; i < n; i++) {
        int32_t at = have;
        while (at > 0 && (v[i] > v[idx[at - 1]] || (isnan(v[idx[at - 1]]) && !isnan(v[i])))) at--;
        if (at >= k) continue;
        if (have < k) have++;
        for (int32_t j = have - 1; j > at; j--) idx[j] = idx[j - 1];
        idx[at] = i;
    }
}

static void softmax(float *v, int32_t n) {
    float m = v[0], sum = 0;
    for (int32_t i = 1; i < n; i++) m = v[i] > m ? v[i] : m;
    for (int32_t i = 0; i < n; i++) sum += v[i] = expf(v[i] - m);
    for (int32_t i = 0; i < n; i++) v[i] /= sum;
}

/* Experts outside the topk_group best groups get -inf. */
static void mask_groups(const sl_router *r, float *choice) {
    const int32_t per = r->experts / r->n_group;
    float score[MAX_GROUPS] = {0};
    int32_t keep[MAX_GROUPS];
    for (int32_t g = 0; g < r->n_group; g++) {
        int32_t best[2] = {0, 0};
        top_k(choice + g * per, per, per > 1 ? 2 : 1, best);
        score[g] = choice[g * per + best[0]];
        if (r->group_score_top2 && per > 1) score[g] += choice[g * per + best[1]];
    }
    top_k(score, r->n_group, r->topk_group, keep);
    for (int32_t g = 0; g < r->n_group; g++) {
        int kept = 0;
        for (int32_t i = 0; i < r->topk_group; i++) kept |= keep[i] == g;
        for (int32_t e = 0; !kept && e < per; e++) choice[g * per + e] = -INFINITY;
    }
}

static void route_row(const route_job *j, float *s, float *choice, int32_t *idx, float *w) {
    const sl_router *r = j->r;
    const int32_t E = r->experts, k = r->top_k;
    for (int32_t e = 0; e < E; e++) {
        if (r->logit_bias) s[e] += r->logit_bias[e];
        if (r->bf16_logits && j->c->bf) s[e] = round_bf16(j->c, s[e]);
    }
    if (r->score == SL_SCORE_SOFTMAX) softmax(s, E);
    if (r->score == SL_SCORE_SIGMOID)
        for (int32_t e = 0; e < E; e++) s[e] = 1.0f / (1.0f + expf(-s[e]));
    for (int32_t e = 0; e < E; e++) choice[e] = s[e] + (r->bias ? r->bias[e] : 0.0f);
    if (r->n_group > 1) mask_groups(r, choice);
    top_k(choice, E, k, idx);
    float sum = 0;
    for (int32_t i = 0; i < k; i++) w[i] = s[idx[i]];
    if (r->score == SL_SCORE_SOFTMAX_TOPK) softmax(w, k);
    for (int32_t i = 0; i < k; i++) sum += w[i];
    for (int32_t i = 0; i < k; i++) {
        if (r->renorm) w[i] /= sum + 1e-20f;
        w[i] *= r->scale;
        if (r->bf16_weights && j->c->bf) w[i] = round_bf16(j->c, w[i]);
    }
}

static void route_part(void *arg, int tid, int threads) {
    route_job *j = arg;
    const int64_t E = j->r->experts, k = j->r->top_k;
    long lo, hi;
    sl_pool_part(j->rows, 1, tid, threads, &lo, &hi);
    for (int64_t t = lo; t < hi; t++) route_row(j, j->logits + t * E, j->choice + t * E, j->idx + t * k, j->w + t * k);
}

int sl_cpu_route(void *ctx, int32_t *idx, float *w, const void *x, int64_t T, int64_t H, const sl_mat *gate,
                 const sl_router *r, sl_err *err) {
    sl_cpu *c = ctx;
    float *own;
    int rc = sl_mat_check(gate, "route", H, err);
    if (rc) return rc;
    if (r->experts < 1 || gate->n != r->experts || r->top_k < 1 || r->top_k > r->experts || r->n_group < 1 ||
        r->n_group > MAX_GROUPS || r->experts % r->n_group || r->topk_group < 1 || r->topk_group > r->n_group ||
        r->top_k > r->experts / r->n_group * r->topk_group || (unsigned)r->score > SL_SCORE_SOFTMAX_TOPK)
        return sl_err_set(err, SL_EINTERNAL,
                          "route: top %d of %d experts (gate has %lld rows), %d of %d groups, score %d", r->top_k,
                          r->experts, (long long)gate->n, r->topk_group, r->n_group, (int)r->score);
    rc = sl_cpu_own(c, (uint64_t)ROUTE_ROWS * 2 * (uint64_t)r->experts * 4, &own, err);
    if (rc) return rc;
    for (int64_t t = 0; t < T; t += ROUTE_ROWS) {
        int64_t rows = T - t < ROUTE_ROWS ? T - t : ROUTE_ROWS;
        sl_gemm g = {.out = own,
                     .out_stride = r->experts,
                     .out_f32 = 1,
                     .x = sl_cpu_at(c, x, t * H),
                     .x_stride = H,
                     .M = rows,
                     .w = gate,
                     .n1 = gate->n,
                     .n_step = 1,
                     .exact = 1};
        sl_gemm_run(c, &g);
        route_job j = {c, r, own, own + (int64_t)ROUTE_ROWS * r->experts, rows, idx + t * r->top_k, w + t * r->top_k};
        sl_pool_run(c->pool, route_part, &j);
    }
    return 0;
}

/* ---- experts --------------------------------------------------------------------------------------------------------
 */

enum { MOE_ROWS = 2048 }; /* rows of one expert at a time */

typedef struct {
    uint8_t *x, *gate, *up, *mid, *down; /* [rows, H], [rows, I] x3, [rows, H] */
    float *acc;                          /* [T, H] */
    int32_t *start;                      /* [local + 1] */
    int32_t *slot;                       /* [T * top_k]: t * top_k + j of each assignment, grouped by expert */
    uint64_t total;
} moe_ws;

static int64_t inter(const sl_moe *m) {
    return m->up.data ? m->gate.n : m->gate.n / 2;
}

static moe_ws moe_layout(const sl_cpu *c, uint8_t *p, int64_t T, int64_t H, const sl_moe *m) {
    const uint64_t rows = (uint64_t)(T < MOE_ROWS ? T : MOE_ROWS), e = sl_cpu_esz(c), I = (uint64_t)inter(m);
    moe_ws w;
    uint64_t off = 0;
#define TAKE(field, bytes) (w.field = (void *)(p + off), off += sl_cpu_up(bytes))
    TAKE(x, rows * (uint64_t)H * e);
    TAKE(gate, rows * I * e);
    TAKE(up, rows * I * e);
    TAKE(mid, rows * I * e);
    TAKE(down, rows * (uint64_t)H * e);
    TAKE(acc, (uint64_t)T * (uint64_t)H * 4);
    TAKE(start, ((uint64_t)m->local + 2) * 4);
    TAKE(slot, (uint64_t)T * (uint64_t)m->top_k * 4);
#undef TAKE
    w.total = off;
    return w;
}

uint64_t sl_cpu_moe_bytes(void *ctx, int64_t T, int64_t H, const sl_moe *m) {
    static uint8_t nowhere[1];
    return moe_layout(ctx, nowhere, T, H, m).total;
}

typedef struct {
    sl_cpu *c;
    const sl_moe *m;
    moe_ws ws;
    int64_t H, T;
    const void *x;
    const float *w;
    void *out;
    const int32_t *slot; /* of the expert's rows */
    int64_t rows;
} moe_job;

static void gather_part(void *arg, int tid, int threads) {
    moe_job *j = arg;
    const size_t bytes = (size_t)j->H * sl_cpu_esz(j->c);
    long lo, hi;
    sl_pool_part(j->rows, 1, tid, threads, &lo, &hi);
    for (int64_t i = lo; i < hi; i++)
        memcpy(j->ws.x + (size_t)i * bytes, sl_cpu_at(j->c, j->x, (int64_t)(j->slot[i] / j->m->top_k) * j->H), bytes);
}

/* acc[token] += w * down[row]; a token appears at most once among an expert's rows, so threads do not meet. */
static void scatter_part(void *arg, int tid, int threads) {
    moe_job *j = arg;
    const sl_isa *isa = j->c->isa;
    float *row = (float *)(void *)j->c->scratch[tid];
    long lo, hi;
    sl_pool_part(j->rows, 1, tid, threads, &lo, &hi);
    for (int64_t i = lo; i < hi; i++) {
        float *acc = j->ws.acc + (int64_t)(j->slot[i] / j->m->top_k) * j->H, w = j->w[j->slot[i]];
        for (int64_t k = 0; k < j->H; k += SL_GEMM_KC) {
            int64_t n = j->H - k < SL_GEMM_KC ? j->H - k : SL_GEMM_KC;
            const void *d = j->ws.down + (uint64_t)(i * j->H + k) * sl_cpu_esz(j->c);
            const float *f = d;
            if (j->c->bf) {
                isa->to_f32(row, d, n);
                f = row;
            }
            if (j->m->bf16_accumulate && j->c->bf) { /* acc holds bf16 values: round the product, then the sum */
                uint16_t *h = (uint16_t *)(void *)(row + SL_GEMM_KC);
                isa->scale_f32(row, w, n);
                isa->to_bf16(h, row, n);
                isa->to_f32(row, h, n);
                isa->axpy_f32(acc + k, row, 1.0f, n);
                isa->to_bf16(h, acc + k, n);
                isa->to_f32(acc + k, h, n);
            } else {
                isa->axpy_f32(acc + k, f, w, n);
            }
        }
    }
}

static void zero_part(void *arg, int tid, int threads) {
    moe_job *j = arg;
    long lo, hi;
    sl_pool_part(j->T * j->H, 16, tid, threads, &lo, &hi);
    if (hi > lo) memset(j->ws.acc + lo, 0, (size_t)(hi - lo) * 4);
}

static void out_part(void *arg, int tid, int threads) {
    moe_job *j = arg;
    long lo, hi;
    sl_pool_part(j->T, 1, tid, threads, &lo, &hi);
    for (int64_t t = lo; t < hi; t++) {
        if (j->c->bf)
            j->c->isa->to_bf16((uint16_t *)j->out + t * j->H, j->ws.acc + t * j->H, j->H);
        else
            memcpy((float *)j->out + t * j->H, j->ws.acc + t * j->H, (size_t)j->H * 4);
    }
}

/* Assignments grouped by local expert, tokens ascending. An index outside all experts: SL_EINTERNAL. */
static int group(const moe_job *j, const int32_t *idx, sl_err *err) {
    const sl_moe *m = j->m;
    int32_t *start = j->ws.start;
    memset(start, 0, ((size_t)m->local + 2) * 4);
    for (int64_t i = 0; i < j->T * m->top_k; i++) {
        if (idx[i] < 0 || idx[i] >= m->experts)
            return sl_err_set(err, SL_EINTERNAL, "moe: token %lld chose expert %d of %d", (long long)(i / m->top_k),
                              idx[i], m->experts);
        int32_t e = idx[i] - m->first;
        if (e >= 0 && e < m->local) start[e + 2]++;
    }
    for (int32_t e = 1; e < m->local; e++) start[e + 1] += start[e];
    for (int64_t i = 0; i < j->T * m->top_k; i++) {
        int32_t e = idx[i] - m->first;
        if (e >= 0 && e < m->local) j->ws.slot[start[e + 1]++] = (int32_t)i;
    }
    return 0;
}

/* gate, up, glu, down of expert e over the gathered rows */
static int expert(moe_job *j, int32_t e, sl_err *err) {
    const sl_moe *m = j->m;
    const int64_t I = inter(m), H = j->H;
    const int fused = !m->up.data, inter2 = fused && m->gate_up_interleaved;
    const int64_t at = m->place ? m->place[e] : e;
    const float *gb = m->gate_bias.data, *ub = fused ? m->gate_bias.data : m->up_bias.data, *db = m->down_bias.data;
    float *bias;
    sl_gemm g = {.out = j->ws.gate,
                 .out_stride = I,
                 .x = j->ws.x,
                 .x_stride = H,
                 .M = j->rows,
                 .w = &m->gate,
                 .e = at,
                 .n0 = 0,
                 .n1 = inter2 ? 2 * I : I,
                 .n_step = inter2 ? 2 : 1};
    sl_gemm u = g;
    u.out = j->ws.up;
    if (fused) {
        u.n0 = inter2 ? 1 : I;
        u.n1 = 2 * I;
    } else {
        u.w = &m->up;
    }
    if (gb && inter2) { /* biases alternate like the rows: split them */
        int rc = sl_cpu_own(j->c, (uint64_t)I * 8, &bias, err);
        if (rc) return rc;
        for (int64_t i = 0; i < I; i++) {
            bias[i] = gb[e * 2 * I + 2 * i];
            bias[I + i] = gb[e * 2 * I + 2 * i + 1];
        }
        g.bias = bias;
        u.bias = bias + I;
    } else {
        if (gb) g.bias = gb + e * (fused ? 2 * I : I);
        if (ub) u.bias = fused ? ub + e * 2 * I + I : ub + e * I;
    }
    sl_gemm_run(j->c, &g);
    sl_gemm_run(j->c, &u);
    int rc = sl_cpu_glu(j->c, j->ws.mid, j->ws.gate, I, j->ws.up, I, j->rows, I, m->glu, m->limit, err);
    if (rc) return rc;
    sl_gemm d = {.out = j->ws.down,
                 .out_stride = H,
                 .x = j->ws.mid,
                 .x_stride = I,
                 .M = j->rows,
                 .w = &m->down,
                 .e = at,
                 .n1 = H,
                 .n_step = 1,
                 .bias = db && m->bias_scale_rank0 ? db + e * H : NULL};
    sl_gemm_run(j->c, &d);
    return 0;
}

static int moe_check(const sl_moe *m, int64_t H, sl_err *err) {
    int rc = sl_mat_check(&m->gate, "moe gate", H, err);
    if (!rc && m->up.data) rc = sl_mat_check(&m->up, "moe up", H, err);
    if (!rc) rc = sl_mat_check(&m->down, "moe down", inter(m), err);
    if (rc) return rc;
    if (m->down.n != H || m->local < 1 || m->gate.count != m->local || m->down.count != m->local || m->first < 0 ||
        m->first + m->local > m->experts || m->top_k < 1 || (!m->up.data && m->gate.n % 2) ||
        (m->up.data && (m->up.n != m->gate.n || m->up.count != m->local)))
        return sl_err_set(err, SL_EINTERNAL,
                          "moe: experts [%d, %d) of %d, top %d, gate %lld x %lld, down %lld x %lld into %lld", m->first,
                          m->first + m->local, m->experts, m->top_k, (long long)m->gate.count, (long long)m->gate.n,
                          (long long)m->down.count, (long long)m->down.n, (long long)H);
    return 0;
}

int sl_cpu_moe(void *ctx, void *out, const void *x, int64_t T, int64_t H, const int32_t *idx, const float *w,
               const sl_moe *m, sl_err *err) {
    sl_cpu *c = ctx;
    uint8_t *p;
    int rc = moe_check(m, H, err);
    if (rc) return rc;
    if ((rc = sl_cpu_ws(c, sl_cpu_moe_bytes(c, T, H, m), "moe", &p, err))) return rc;
    moe_job j = {.c = c, .m = m, .ws = moe_layout(c, p, T, H, m), .H = H, .T = T, .x = x, .w = w, .out = out};
    if ((rc = group(&j, idx, err))) return rc;
    sl_pool_run(c->pool, zero_part, &j);
    for (int32_t e = 0; e < m->local; e++) {
        for (int32_t at = j.ws.start[e]; at < j.ws.start[e + 1]; at += MOE_ROWS) {
            j.slot = j.ws.slot + at;
            j.rows = j.ws.start[e + 1] - at < MOE_ROWS ? j.ws.start[e + 1] - at : MOE_ROWS;
            sl_pool_run(c->pool, gather_part, &j);
            if ((rc = expert(&j, e, err))) return rc;
            sl_pool_run(c->pool, scatter_part, &j);
        }
    }
    sl_pool_run(c->pool, out_part, &j);
    return 0;
}
