#include "kernels/cpu/gemm.h"
#include "kernels/cpu/cpu.h"
#include <string.h>

/* One thread's scratch, carved up. The f32 tile rows and the accumulators are sized by the constants of gemm.h. */
typedef struct {
    uint8_t *panels; /* SL_GEMM_B_BYTES, or one panel */
    float *acc;      /* [SL_GEMM_MC, block columns] when k is cut, else one tile */
    float *arow;     /* [mr, SL_GEMM_KC] f32 copies of x when the kernel wants f32 and x is bf16 */
    float *wrow;     /* [nr, SL_GEMM_KC] dequantized rows of one panel */
    uint16_t *wrow16;
} carve;

enum { ACC_BYTES = 2u << 20 };

static carve carve_scratch(uint8_t *p) {
    carve s;
    s.panels = p;
    p += SL_GEMM_B_BYTES;
    s.acc = (float *)(void *)p;
    p += ACC_BYTES;
    s.arow = (float *)(void *)p;
    p += 16 * SL_GEMM_KC * 4;
    s.wrow = (float *)(void *)p;
    p += 32 * SL_GEMM_KC * 4;
    s.wrow16 = (uint16_t *)(void *)p;
    return s;
}
_Static_assert(SL_GEMM_B_BYTES + ACC_BYTES + 16 * SL_GEMM_KC * 4 + 32 * SL_GEMM_KC * 4 + 32 * SL_GEMM_KC * 2 <=
                   SL_GEMM_SCRATCH,
               "scratch holds its parts");

typedef struct {
    sl_cpu *c;
    const sl_gemm *g;
    int64_t cols;
    int x_f32, dot; /* x is f32; the bf16 dot kernel is used */
    int tn, tm;     /* threads along columns, along rows */
} job;

static const uint8_t *x_at(const job *j, int64_t row, int64_t k) {
    return (const uint8_t *)j->g->x + (row * j->g->x_stride + k) * (j->x_f32 ? 4 : 2);
}

/* Columns [col, col+n) of out, k range [k0, k0+kn), as one panel at dst. */
static void pack_panel(const job *j, const carve *s, void *dst, int64_t col, int32_t n, int64_t k0, int64_t kn) {
    const sl_isa *isa = j->c->isa;
    const sl_mat *w = j->g->w;
    const int64_t step = j->g->n_step, r0 = j->g->n0 + col * step;
    /* bf16 activations see the weight rounded to bf16, whichever kernel runs; f32 ones see the exact value */
    const int round = j->c->bf && !j->g->exact;
    if (!w->row_perm && (w->fmt == SL_W_BF16 || w->fmt == SL_W_F32)) {
        const uint8_t *src = (const uint8_t *)w->data + (uint64_t)j->g->e * w->stride + (uint64_t)r0 * w->row_bytes;
        int64_t ld = (int64_t)w->row_bytes * step;
        if (w->fmt == SL_W_F32 && !round && (ld & 3) == 0) {
            isa->pack_f32(dst, (const float *)(const void *)src + k0, ld / 4, n, kn);
            return;
        }
        if (w->fmt == SL_W_BF16 && (ld & 1) == 0) {
            const uint16_t *b = (const uint16_t *)(const void *)src + k0;
            if (j->dot)
                isa->pack_bf16(dst, b, ld / 2, n, kn);
            else
                isa->pack_f32_from_bf16(dst, b, ld / 2, n, kn);
            return;
        }
    }
    for (int32_t i = 0; i < n; i++) {
        float *row = s->wrow + i * kn;
        isa->dequant(row, w, j->g->e, sl_mat_row(w, r0 + i * step), k0, kn);
        if (round) isa->to_bf16(s->wrow16 + i * kn, row, kn);
    }
    if (j->dot)
        isa->pack_bf16(dst, s->wrow16, kn, n, kn);
    else if (round)
        isa->pack_f32_from_bf16(dst, s->wrow16, kn, n, kn);
    else
        isa->pack_f32(dst, s->wrow, kn, n, kn);
}

static void finish_tile(const job *j, const float *t, int64_t ldt, int64_t m, int32_t rows, int64_t col, int32_t n) {
    const sl_gemm *g = j->g;
    const float *bias = g->bias ? g->bias + col : NULL;
    for (int32_t i = 0; i < rows; i++) {
        int64_t at = (m + i) * g->out_stride + col;
        if (g->out_f32 || !j->c->bf)
            j->c->isa->finish_f32((float *)g->out + at, t + i * ldt, bias, n);
        else
            j->c->isa->finish_bf16((uint16_t *)g->out + at, t + i * ldt, bias, n);
    }
}

/* All rows [m0, m1) over the packed block of columns [col0, col1), k range [k0, k0+kn). */
static void run_block(const job *j, const carve *s, int64_t m0, int64_t m1, int64_t col0, int64_t col1, int64_t k0,
                      int64_t kn) {
    const sl_isa *isa = j->c->isa;
    const int64_t nr = isa->nr, last = k0 + kn == j->g->w->k, whole = last && k0 == 0;
    const int64_t panel = (j->dot ? (kn + 1) / 2 * 4 : kn * 4) * nr, width = (col1 - col0 + nr - 1) / nr * nr;
    for (int64_t m = m0; m < m1; m += isa->mr) {
        int32_t rows = (int32_t)(m1 - m < isa->mr ? m1 - m : isa->mr);
        const float *af = (const float *)(const void *)x_at(j, m, k0);
        int64_t lda = j->g->x_stride;
        if (!j->dot && !j->x_f32) {
            for (int32_t i = 0; i < rows; i++)
                isa->to_f32(s->arow + i * kn, (const uint16_t *)(const void *)x_at(j, m + i, k0), kn);
            af = s->arow;
            lda = kn;
        }
        for (int64_t col = col0, p = 0; col < col1; col += nr, p++) {
            float *t = whole ? s->acc : s->acc + (m - m0) * width + (col - col0);
            int64_t ldt = whole ? nr : width;
            if (j->dot)
                isa->mm_bf16(t, ldt, (const uint16_t *)(const void *)x_at(j, m, k0), lda, rows,
                             (const uint16_t *)(const void *)(s->panels + p * panel), kn, k0 != 0);
            else
                isa->mm_f32(t, ldt, af, lda, rows, (const float *)(const void *)(s->panels + p * panel), kn, k0 != 0);
            if (last) finish_tile(j, t, ldt, m, rows, col, (int32_t)(col1 - col < nr ? col1 - col : nr));
        }
    }
}

static void gemm_part(void *arg, int tid, int threads) {
    const job *j = arg;
    (void)threads;
    if (tid >= j->tn * j->tm) return;
    const sl_isa *isa = j->c->isa;
    const carve s = carve_scratch(j->c->scratch[tid]);
    const int64_t K = j->g->w->k, most_k = j->x_f32 ? SL_GEMM_KC_F32 : SL_GEMM_KC, kc = K < most_k ? K : most_k,
                  nr = isa->nr;
    const int64_t panel = (j->dot ? (kc + 1) / 2 * 4 : kc * 4) * nr;
    int64_t nc = j->c->b_bytes / panel * nr, mc = INT64_MAX;
    if (nc < nr) nc = nr;
    if (K > kc) {
        mc = SL_GEMM_MC;
        int64_t most = ACC_BYTES / (4 * mc) / nr * nr;
        if (nc > most) nc = most;
    }
    long c0, c1, m0, m1;
    sl_pool_part(j->cols, nr, tid % j->tn, j->tn, &c0, &c1);
    sl_pool_part(j->g->M, isa->mr, tid / j->tn, j->tm, &m0, &m1);
    for (int64_t m = m0; m < m1;) {
        int64_t mend = m1 - m < mc ? m1 : m + mc;
        for (int64_t col = c0; col < c1; col += nc) {
            int64_t cend = c1 - col < nc ? c1 : col + nc;
            for (int64_t k0 = 0; k0 < K; k0 += kc) {
                int64_t kn = K - k0 < kc ? K - k0 : kc;
                int64_t pb = (j->dot ? (kn + 1) / 2 * 4 : kn * 4) * nr;
                for (int64_t b = col, p = 0; b < cend; b += nr, p++)
                    pack_panel(j, &s, s.panels + p * pb, b, (int32_t)(cend - b < nr ? cend - b : nr), k0, kn);
                run_block(j, &s, m, mend, col, cend, k0, kn);
            }
        }
        m = mend;
    }
}

/* Threads go along columns first (each packs its own part of W once); along rows only when columns run out. */
static void split(job *j, int threads) {
    int64_t panels = (j->cols + j->c->isa->nr - 1) / j->c->isa->nr;
    int64_t tiles = (j->g->M + j->c->isa->mr - 1) / j->c->isa->mr;
    double best = 0;
    j->tn = 1;
    j->tm = 1;
    for (int tn = threads; tn >= 1; tn--) {
        int tm = threads / tn;
        int64_t pn = (panels + tn - 1) / tn, pm = (tiles + tm - 1) / tm;
        /* share of the work of the busiest thread, plus what packing twice costs (about 12 rows' worth a panel) */
        double cost = (double)pn * (double)(pm + 2);
        if (best == 0 || cost < best) {
            best = cost;
            j->tn = tn;
            j->tm = tm;
        }
    }
}

void sl_gemm_run(sl_cpu *c, const sl_gemm *g) {
    job j = {.c = c, .g = g};
    if (g->M <= 0) return;
    j.cols = (g->n1 - g->n0 + g->n_step - 1) / g->n_step;
    j.x_f32 = !c->bf;
    j.dot = c->bf && c->isa->bf16_dot && !g->exact;
    split(&j, c->threads);
    if (j.tn * j.tm == 1)
        gemm_part(&j, 0, 1);
    else
        sl_pool_run(c->pool, gemm_part, &j);
}

int sl_mat_check(const sl_mat *w, const char *op, int64_t k, sl_err *err) {
    const uint64_t row = sl_wfmt_row_bytes(w->fmt, w->k);
    if (!w->data || w->n <= 0 || w->k != k || w->count <= 0)
        return sl_err_set(err, SL_EINTERNAL, "%s: weight [%lld, %lld] x %lld at %p, expected %lld inputs", op,
                          (long long)w->n, (long long)w->k, (long long)w->count, w->data, (long long)k);
    if (!row || w->row_bytes < row)
        return sl_err_set(err, SL_EINTERNAL,
                          "%s: a %s row of %lld elements needs %llu bytes (blocks of %u), rows are %llu apart", op,
                          sl_wfmt_name(w->fmt), (long long)w->k, (unsigned long long)row, sl_wfmt_block(w->fmt),
                          (unsigned long long)w->row_bytes);
    if ((w->fmt == SL_W_INT4 || w->fmt == SL_W_FP8 || w->fmt == SL_W_MXFP4) && (!w->scale || !w->scale_row))
        return sl_err_set(err, SL_EINTERNAL, "%s: %s weight without scales", op, sl_wfmt_name(w->fmt));
    if (w->fmt == SL_W_INT4 && w->group < 1)
        return sl_err_set(err, SL_EINTERNAL, "%s: INT4 group size %d", op, w->group);
    if (w->fmt == SL_W_FP8 && (w->n_off < 0 || w->n_off > 127 || w->k_off < 0 || w->k_off > 127))
        return sl_err_set(err, SL_EINTERNAL, "%s: FP8 slice starts at (%d, %d) of its first block, expected 0..127", op,
                          w->n_off, w->k_off);
    if (w->row_perm && (w->perm_dim < 2 || w->perm_dim % 2 || w->n % w->perm_dim))
        return sl_err_set(err, SL_EINTERNAL, "%s: %lld rows in heads of %d cannot be interleaved", op, (long long)w->n,
                          w->perm_dim);
    return 0;
}

int sl_cpu_linear(void *ctx, void *out, int64_t out_stride, const void *x, int64_t x_stride, int64_t T, const sl_mat *w,
                  const float *bias, sl_err *err) {
    int rc = sl_mat_check(w, "linear", w->k, err);
    if (rc) return rc;
    if (T < 0 || x_stride < w->k || out_stride < w->n)
        return sl_err_set(err, SL_EINTERNAL, "linear: %lld rows %lld and %lld apart for a weight [%lld, %lld]",
                          (long long)T, (long long)x_stride, (long long)out_stride, (long long)w->n, (long long)w->k);
    sl_gemm g = {.out = out,
                 .out_stride = out_stride,
                 .x = x,
                 .x_stride = x_stride,
                 .M = T,
                 .w = w,
                 .n1 = w->n,
                 .n_step = 1,
                 .bias = bias};
    sl_gemm_run(ctx, &g);
    return 0;
}
