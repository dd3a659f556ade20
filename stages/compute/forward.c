/* forward: memory, micro-batches, the layer-major loop and capture. The math of a layer is in forward_layer.c. */
#include "stages/compute/forward_internal.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ALIGN 256u
static uint64_t align_up(uint64_t n) {
    return (n + ALIGN - 1) / ALIGN * ALIGN;
}
static int64_t max64(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* ---- sizes ---- */
typedef struct sizes {
    int64_t cap, micro;
    int top, want_final;
    uint64_t es, h, final, ws, op_ws, scratch, staging, rope;
    sl_fwd_bufs at;
} sizes;

static uint64_t take(uint64_t *at, uint64_t bytes) {
    uint64_t here = *at;
    *at += align_up(bytes);
    return here;
}

/* T tokens a micro-batch; `batch` of them when the ranks' partial results of a whole batch are kept. */
static void lay_out(sl_fwd_bufs *b, const sl_model *m, uint64_t T, uint64_t batch, uint64_t es) {
    const sl_spec *s = &m->spec;
    sl_layer_spec none = {0};
    sl_attn a = sl_forward_attn(m, NULL, &none);
    uint64_t at = 0, H = (uint64_t)s->width;
    b->xn = take(&at, T * H * es);
    b->part = take(&at, batch * H * es);
    uint64_t attn = at, mlp = at;
    b->q = take(&attn, T * (uint64_t)a.q_stride * es);
    b->k = take(&attn, T * (uint64_t)a.k_stride * es);
    b->v = take(&attn, T * (uint64_t)a.v_stride * es);
    b->o = take(&attn, T * (uint64_t)a.o_stride * es);
    b->qa = take(&attn, T * (uint64_t)s->q_lora * es);
    b->ckv = take(&attn, T * (uint64_t)(s->kv_lora + s->rope_dim) * es);
    int64_t I = 0;
    for (int l = 0; l < m->top_layer; l++) I = max64(I, m->layer[l].gate.data ? m->layer[l].gate.n : 0);
    b->gate = take(&mlp, T * (uint64_t)I * es);
    b->up = take(&mlp, T * (uint64_t)I * es);
    b->shared = take(&mlp, s->experts && s->shared_inter ? T * H * es : 0);
    b->idx = take(&mlp, T * (uint64_t)s->top_k * 4);
    b->weight = take(&mlp, T * (uint64_t)s->top_k * 4);
    b->total = attn > mlp ? attn : mlp;
}

/* The widest activation any linear of this rank reads or writes. */
static int64_t widest_of(const sl_model *m) {
    int64_t w = m->spec.width;
    for (int l = 0; l < m->top_layer; l++) {
        sl_mat *mats[SL_LAYER_MATS];
        sl_layer_weights lw = m->layer[l];
        int n = sl_forward_layer_mats(&lw, mats);
        for (int i = 0; i < n; i++) w = max64(w, max64(mats[i]->n, mats[i]->k));
    }
    return w;
}

static void size_ops(sizes *z, const sl_model *m, const sl_ops *ops, int64_t max_seq) {
    int64_t widest = widest_of(m);
    for (int l = 0; l < m->top_layer; l++) {
        sl_layer_weights lw = m->layer[l];
        sl_attn a = sl_forward_attn(m, &lw, &m->spec.layer[l]);
        uint64_t need = ops->workspace_bytes(ops->ctx, z->micro, max_seq, m->spec.width, widest, &a), scratch = 0;
        if (need > z->op_ws) z->op_ws = need;
        if (m->spec.layer[l].mlp == SL_MLP_MOE &&
            (need = ops->moe_bytes(ops->ctx, z->micro, m->spec.width, &lw.moe)) > z->op_ws)
            z->op_ws = need;
        sl_mat *mats[SL_LAYER_MATS];
        int n = sl_forward_layer_mats(&lw, mats);
        for (int i = 0; i < n; i++) scratch += align_up(ops->prepare_bytes(ops->ctx, mats[i]));
        if (scratch > z->scratch) z->scratch = scratch;
    }
}

static int check_opts(const sl_model *m, const sl_forward_opts *o, sl_err *err) {
    if (o->batch_tokens < 1 || o->max_length < 1 || o->max_rows < 1 || o->micro_tokens < 0)
        return sl_err_set(err, SL_ECONFIG,
                          "forward: batch of %lld tokens, micro-batch %lld, rows of at most %lld tokens, %d rows: each "
                          "must be at least 1",
                          (long long)o->batch_tokens, (long long)o->micro_tokens, (long long)o->max_length,
                          o->max_rows);
    if (o->n_captures < 1 || o->n_captures > SL_MAX_CAPTURES)
        return sl_err_set(err, SL_ECONFIG, "forward: %d states to capture (1..%d)", o->n_captures, SL_MAX_CAPTURES);
    for (int i = 0; i < o->n_captures; i++) {
        const sl_capture *c = &o->captures[i];
        int n = m->spec.n_layers;
        if (c->hidx > (uint32_t)n || (c->final_norm && c->hidx != (uint32_t)n))
            return sl_err_set(err, SL_ECONFIG, "forward: capture %d asks for H[%u]%s of a model of %d layers", i,
                              c->hidx, c->final_norm ? " after the final norm" : "", n);
        if ((int)c->hidx > m->top_layer)
            return sl_err_set(err, SL_EINTERNAL, "forward: capture %d asks for H[%u] but only %d layers are loaded", i,
                              c->hidx, m->top_layer);
        if (i && (c->hidx < o->captures[i - 1].hidx || o->captures[i - 1].final_norm))
            return sl_err_set(err, SL_EINTERNAL, "forward: captures are not in ascending order at %d", i);
        if (c->final_norm && !m->final_norm.data)
            return sl_err_set(err, SL_EINTERNAL, "forward: the final norm is to be captured but was not loaded");
    }
    return 0;
}

static int measure(sizes *z, const sl_model *m, const sl_ops *ops, const sl_coll *coll, const sl_forward_opts *o,
                   sl_err *err) {
    int rc = check_opts(m, o, err);
    if (rc) return rc;
    memset(z, 0, sizeof *z);
    z->es = ops->act == SL_F32 ? 4 : 2;
    z->cap = max64(o->batch_tokens, o->max_length);
    z->micro = o->micro_tokens
                   ? max64(o->micro_tokens < o->batch_tokens ? o->micro_tokens : o->batch_tokens, o->max_length)
                   : z->cap;
    z->top = (int)o->captures[o->n_captures - 1].hidx;
    z->want_final = o->captures[o->n_captures - 1].final_norm || (m->final_norm.data && z->top == m->spec.n_layers);
    z->h = (uint64_t)z->cap * (uint64_t)m->spec.width * z->es;
    z->final = z->want_final ? z->h : 0;
    lay_out(&z->at, m, (uint64_t)z->micro, (uint64_t)(coll->tp > 1 ? z->cap : z->micro), z->es);
    z->staging = coll->scratch_bytes(coll, z->micro * (int64_t)m->spec.width);
    z->ws = z->at.total;
    size_ops(z, m, ops, o->max_length);
    z->rope = (uint64_t)o->max_length * (uint64_t)sl_spec_rope_dim(&m->spec) * 4;
    return 0;
}

static int uses_rope(const sl_model *m, int r) {
    for (int l = 0; l < m->top_layer; l++)
        if (m->spec.layer[l].rope == r) return 1;
    return 0;
}

int sl_forward_plan_make(sl_forward_plan *p, const sl_model *m, const sl_ops *ops, const sl_coll *coll,
                         const sl_forward_opts *o, sl_err *err) {
    sizes z;
    int rc = measure(&z, m, ops, coll, o, err);
    if (rc) return rc;
    *p = (sl_forward_plan){.residual = z.h + z.final,
                           .workspace = z.ws + z.op_ws + z.staging + (uint64_t)z.cap * 8,
                           .prepared = z.scratch,
                           .rope = z.rope * (uint64_t)(uses_rope(m, 0) + uses_rope(m, 1))};
    p->total = p->residual + p->workspace + p->prepared + p->rope;
    return 0;
}

/* ---- life ---- */
static int make_rope(sl_forward *f, int r, uint64_t bytes, sl_err *err) {
    if (!uses_rope(f->m, r)) return 0;
    int rc = f->ops->alloc(f->ops->ctx, (void **)&f->rope[r], bytes, "rotary table", err);
    float *host = rc ? NULL : malloc(bytes);
    if (!rc && !host)
        rc =
            sl_err_set(err, SL_ETEMP, "forward: no memory for a rotary table of %llu bytes", (unsigned long long)bytes);
    if (!rc) rc = sl_spec_rope_table(&f->m->spec, r, f->o.max_length, host, err);
    if (!rc) rc = f->ops->upload(f->ops->ctx, f->rope[r], host, bytes, err);
    if (!rc) rc = f->ops->sync(f->ops->ctx, err);
    free(host);
    return rc;
}

static int make_memory(sl_forward *f, const sizes *z, sl_err *err) {
    struct {
        void **p;
        uint64_t bytes;
        const char *what;
    } list[] = {
        {(void **)&f->h, z->h, "residual stream"},
        {(void **)&f->final, z->final, "final-normed states"},
        {(void **)&f->ws, z->ws, "layer workspace"},
        {(void **)&f->op_ws, z->op_ws, "operation workspace"},
        {(void **)&f->scratch, z->scratch, "prepared weights"},
        {(void **)&f->staging, z->staging, "the ranks' sums"},
        {(void **)&f->ids, (uint64_t)z->cap * 4, "token ids"},
        {(void **)&f->pos, (uint64_t)z->cap * 4, "positions"},
    };
    for (unsigned i = 0; i < sizeof list / sizeof *list; i++) {
        int rc = list[i].bytes ? f->ops->alloc(f->ops->ctx, list[i].p, list[i].bytes, list[i].what, err) : 0;
        if (rc) return rc;
    }
    f->pos_host = malloc((size_t)z->cap * 4);
    f->cu_host = malloc((size_t)f->o.max_rows * 8);
    f->micro = malloc(((size_t)f->o.max_rows + 1) * sizeof *f->micro); /* one row may become two */
    if (!f->pos_host || !f->cu_host || !f->micro) return sl_err_set(err, SL_ETEMP, "forward: out of memory");
    for (int r = 0; r < 2; r++) {
        int rc = make_rope(f, r, z->rope, err);
        if (rc) return rc;
    }
    return f->ops->set_workspace(f->ops->ctx, f->op_ws, z->op_ws, err);
}

int sl_forward_create(sl_forward **out, sl_model *m, sl_ops *ops, sl_coll *coll, const sl_forward_opts *o,
                      sl_err *err) {
    *out = NULL;
    sizes z;
    int rc = measure(&z, m, ops, coll, o, err);
    if (rc) return rc;
    sl_forward *f = calloc(1, sizeof *f);
    if (!f) return sl_err_set(err, SL_ETEMP, "forward: out of memory");
    f->m = m;
    f->ops = ops;
    f->coll = coll;
    f->o = *o;
    memcpy(f->captures, o->captures, (size_t)o->n_captures * sizeof *o->captures);
    f->o.captures = f->captures;
    f->cap_tokens = z.cap;
    f->micro_tokens = z.micro;
    f->top = z.top;
    f->es = z.es;
    f->at = z.at;
    if ((rc = make_memory(f, &z, err))) {
        sl_forward_destroy(f);
        return rc;
    }
    coll->scratch = f->staging;
    if (coll->tp > 1 && coll->memory) {
        rc = coll->memory(coll, f->h, z.h, err);
        if (!rc) rc = coll->memory(coll, f->ws + f->at.part, (uint64_t)z.cap * (uint64_t)m->spec.width * z.es, err);
    }
    if (rc) {
        sl_forward_destroy(f);
        return rc;
    }
    *out = f;
    return 0;
}

void sl_forward_destroy(sl_forward *f) {
    if (!f) return;
    void *dev[] = {f->h, f->final, f->ws, f->op_ws, f->scratch, f->staging, f->ids, f->pos, f->rope[0], f->rope[1]};
    for (unsigned i = 0; i < sizeof dev / sizeof *dev; i++)
        if (dev[i]) f->ops->free(f->ops->ctx, dev[i]);
    free(f->pos_host);
    free(f->cu_host);
    free(f->micro);
    free(f);
}

/* ---- one batch ---- */
static int check_rows(const sl_forward *f, const int32_t *ids, const sl_forward_row *rows, int32_t n_rows,
                      int64_t *n_tokens, sl_err *err) {
    if (n_rows < 1 || n_rows > f->o.max_rows)
        return sl_err_set(err, SL_EDATA, "forward: a batch of %d rows (1..%d)", n_rows, f->o.max_rows);
    int64_t at = 0;
    for (int32_t i = 0; i < n_rows; i++) {
        if (rows[i].t0 != at || rows[i].T < 1 || rows[i].T > f->o.max_length)
            return sl_err_set(err, SL_EDATA,
                              "forward: row %d covers %lld tokens from %lld, expected 1..%lld tokens from %lld", i,
                              (long long)rows[i].T, (long long)rows[i].t0, (long long)f->o.max_length, (long long)at);
        at += rows[i].T;
    }
    if (at > f->cap_tokens)
        return sl_err_set(err, SL_EDATA, "forward: a batch of %lld tokens, room for %lld", (long long)at,
                          (long long)f->cap_tokens);
    for (int64_t t = 0; t < at; t++)
        if (ids[t] < 0 || ids[t] >= f->m->spec.vocab)
            return sl_err_set(err, SL_EDATA, "forward: token %lld is %d, outside the vocabulary of %d", (long long)t,
                              ids[t], f->m->spec.vocab);
    *n_tokens = at;
    return 0;
}

/* The row that begins the second half of a batch, as even as whole rows allow; 0: one row. */
static int32_t middle(const sl_forward_row *rows, int32_t n_rows) {
    int64_t n = rows[n_rows - 1].t0 + rows[n_rows - 1].T;
    int32_t i = 0;
    while (i < n_rows - 1 && rows[i].t0 + rows[i].T / 2 < n / 2) i++;
    return i;
}

/* Two halves cut inside a row, where whole rows would make them too uneven to hide each other's sums. */
static int cut_inside(sl_forward *f, const sl_forward_row *rows, int32_t n_rows, int64_t left) {
    int64_t n = rows[n_rows - 1].t0 + rows[n_rows - 1].T, mid = n / 2;
    if (!f->coll->overlaps || n < 2 || n > f->micro_tokens || (8 * left >= 3 * n && 8 * left <= 5 * n)) return 0;
    if (mid >= 128) mid -= mid % 128;
    for (int32_t i = 0; i < n_rows; i++) f->cu_host[i] = (int32_t)rows[i].t0;
    f->cu_host[n_rows] = (int32_t)n;
    f->micro[0] = (sl_micro){.t0 = 0, .T = mid, .cu = f->cu_host, .S = n_rows};
    f->micro[1] = (sl_micro){.t0 = mid, .T = n - mid};
    f->n_micro = f->attn_step = 2;
    return 1;
}

/* Whole rows side by side up to the budget. The default budget is the batch itself, or half of it where sums over the
 * ranks run beside compute: one half is computed while the other is added up. A row's own results do not depend on the
 * cut (every op works row by row, attention sequence by sequence). */
static void cut_micro(sl_forward *f, const sl_forward_row *rows, int32_t n_rows) {
    int64_t budget = f->o.micro_tokens ? f->o.micro_tokens : f->cap_tokens;
    int32_t *cu = f->cu_host, half = f->coll->overlaps ? middle(rows, n_rows) : 0;
    if (cut_inside(f, rows, n_rows, rows[half].t0)) return;
    f->n_micro = 0;
    f->attn_step = 1;
    for (int32_t i = 0; i < n_rows;) {
        sl_micro *mb = &f->micro[f->n_micro++];
        *mb = (sl_micro){.t0 = rows[i].t0, .cu = cu};
        *cu++ = 0;
        do {
            mb->T += rows[i++].T;
            *cu++ = (int32_t)mb->T;
            mb->S++;
        } while (i < n_rows && i != half && mb->T + rows[i].T <= budget);
    }
}

static int load_batch(sl_forward *f, const int32_t *ids, const sl_forward_row *rows, int32_t n_rows, int64_t n,
                      sl_err *err) {
    for (int32_t i = 0; i < n_rows; i++)
        for (int64_t t = 0; t < rows[i].T; t++) f->pos_host[rows[i].t0 + t] = (int32_t)t;
    int rc = f->ops->upload(f->ops->ctx, f->ids, ids, (uint64_t)n * 4, err);
    if (!rc) rc = f->ops->upload(f->ops->ctx, f->pos, f->pos_host, (uint64_t)n * 4, err);
    const sl_spec *s = &f->m->spec;
    for (int32_t i = 0; !rc && i < f->n_micro; i++) {
        const sl_micro *mb = &f->micro[i];
        rc = f->ops->embed(f->ops->ctx, f->h + (uint64_t)mb->t0 * (uint64_t)s->width * f->es, f->ids + mb->t0, mb->T,
                           &f->m->embed, s->embed_scale, err);
    }
    return rc;
}

/* How many micro-batches the MLP takes together: one, or all where halves would leave an expert fewer than four tiles
 * of 128 tokens, so that part-filled tiles cost a good share of the product. An estimate, not measured. The attention
 * half still overlaps. */
#define EXPERT_TOKENS 512
static int32_t mlp_at_once(const sl_forward *f, const sl_layer_spec *ls) {
    const sl_spec *s = &f->m->spec;
    if (ls->mlp != SL_MLP_MOE || !f->coll->overlaps || f->n_micro < 2) return 1;
    const sl_micro *last = &f->micro[f->n_micro - 1];
    int64_t n = last->t0 + last->T;
    if (n > f->micro_tokens) return 1; /* the workspace holds one micro-batch */
    return n / f->n_micro * s->top_k / s->experts < EXPERT_TOKENS ? f->n_micro : 1;
}

static int run_layer(sl_forward *f, int l, sl_err *err) {
    sl_layer_weights w = f->m->layer[l];
    sl_mat *mats[SL_LAYER_MATS];
    int n = sl_forward_layer_mats(&w, mats), rc = 0;
    uint64_t at = 0;
    for (int i = 0; i < n && !rc; i++) {
        uint64_t need = f->ops->prepare_bytes(f->ops->ctx, mats[i]);
        sl_mat raw = *mats[i];
        rc = f->ops->prepare(f->ops->ctx, mats[i], &raw, need ? f->scratch + at : NULL, err);
        at += align_up(need);
    }
    const sl_layer_spec *ls = &f->m->spec.layer[l];
    for (int32_t i = 0; i < f->n_micro && !rc; i += f->attn_step)
        rc = sl_forward_attention(f, &w, ls, &f->micro[i], f->attn_step, err);
    int32_t step = mlp_at_once(f, ls);
    for (int32_t i = 0; i < f->n_micro && !rc; i += step) rc = sl_forward_mlp(f, &w, ls, &f->micro[i], step, err);
    return rc ? sl_err_wrap(err, "layer %d", l) : 0;
}

static int settle_all(sl_forward *f, sl_err *err) {
    int rc = 0;
    for (int32_t i = 0; i < f->n_micro && !rc; i++) rc = sl_forward_settle(f, &f->micro[i], err);
    return rc;
}

/* Hand every capture that is state H[hidx] (or its final norm) to the sink. */
static int capture(sl_forward *f, uint32_t hidx, uint32_t final_norm, int64_t n, sl_forward_sink sink, void *arg,
                   sl_err *err) {
    for (int32_t k = 0; k < f->o.n_captures; k++) {
        const sl_capture *c = &f->captures[k];
        if (c->hidx != hidx || (c->final_norm != 0) != (final_norm != 0)) continue;
        int rc = settle_all(f, err);
        if (rc) return rc;
        rc = sink ? sink(arg, k, final_norm ? f->final : f->h, n, err) : 0;
        if (rc) return rc;
    }
    return 0;
}

static int final_states(sl_forward *f, int64_t t0, int64_t T, sl_err *err) {
    int64_t H = f->m->spec.width;
    uint64_t off = (uint64_t)t0 * (uint64_t)H * f->es;
    return f->ops->rmsnorm(f->ops->ctx, f->final + off, H, f->h + off, H, T, 1, H, f->m->final_norm.data,
                           (float)f->m->spec.eps, f->m->spec.norm, err);
}

static int teacher_nll(sl_forward *f, const sl_forward_row *rows, int32_t n_rows, double *nll, int have_final,
                       sl_err *err) {
    int possible = f->top == f->m->spec.n_layers && f->m->lm_head.data && f->final;
    for (int32_t i = 0; i < n_rows; i++) {
        int want = nll[i] >= 0 && possible && rows[i].T > 1;
        nll[i] = NAN;
        if (!want) continue;
        uint64_t off = (uint64_t)rows[i].t0 * (uint64_t)f->m->spec.width * f->es;
        int rc = have_final ? 0 : final_states(f, rows[i].t0, rows[i].T, err);
        if (!rc)
            rc = f->ops->nll(f->ops->ctx, &nll[i], f->final + off, rows[i].T, f->m->spec.width, f->ids + rows[i].t0,
                             &f->m->lm_head, err);
        if (rc) return rc;
    }
    return 0;
}

int sl_forward_run(sl_forward *f, const int32_t *ids, const sl_forward_row *rows, int32_t n_rows, double *nll,
                   sl_forward_sink sink, void *arg, sl_err *err) {
    int64_t n = 0;
    int rc = check_rows(f, ids, rows, n_rows, &n, err);
    if (rc) return rc;
    cut_micro(f, rows, n_rows);
    if ((rc = load_batch(f, ids, rows, n_rows, n, err)) || (rc = capture(f, 0, 0, n, sink, arg, err))) return rc;
    for (int l = 0; l < f->top; l++)
        if ((rc = run_layer(f, l, err)) || (rc = capture(f, (uint32_t)l + 1, 0, n, sink, arg, err))) return rc;
    if ((rc = settle_all(f, err))) return rc;
    int have_final = f->captures[f->o.n_captures - 1].final_norm != 0;
    if (have_final)
        if ((rc = final_states(f, 0, n, err)) || (rc = capture(f, (uint32_t)f->top, 1, n, sink, arg, err))) return rc;
    return nll ? teacher_nll(f, rows, n_rows, nll, have_final, err) : 0;
}
