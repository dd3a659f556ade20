/* forward_layer: the math of one decoder layer on one micro-batch. Every formula is in section "Families" of the
 * README; here is only the order of operations. */
#include "stages/compute/forward_internal.h"

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        int rc_ = (call);                                                                                              \
        if (rc_) return rc_;                                                                                           \
    } while (0)

int sl_forward_layer_mats(sl_layer_weights *w, sl_mat *out[SL_LAYER_MATS]) {
    sl_mat *all[] = {&w->q,    &w->k,    &w->v,  &w->o,    &w->q_a,      &w->q_b,    &w->kv_a,
                     &w->kv_b, &w->gate, &w->up, &w->down, &w->moe.gate, &w->moe.up, &w->moe.down};
    _Static_assert(sizeof all / sizeof *all <= SL_LAYER_MATS, "");
    int n = 0;
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i]->data) out[n++] = all[i];
    return n;
}

static int norm(sl_forward *f, void *out, int64_t os, const void *x, int64_t xs, int64_t T, int64_t groups,
                const sl_vec *w, double eps, sl_err *err) {
    return f->ops->rmsnorm(f->ops->ctx, out, os, x, xs, T, groups, w->n, w->data, (float)eps, f->m->spec.norm, err);
}

static int lin(sl_forward *f, void *out, const void *x, int64_t xs, int64_t T, const sl_mat *w, const sl_vec *bias,
               sl_err *err) {
    return f->ops->linear(f->ops->ctx, out, w->n, x, xs, T, w, bias ? bias->data : NULL, err);
}

sl_attn sl_forward_attn(const sl_model *m, const sl_layer_weights *w, const sl_layer_spec *ls) {
    const sl_spec *s = &m->spec;
    sl_attn a = {.heads = m->hq, .scale = s->attn_scale, .window = ls->window, .sinks = w ? w->sinks.data : NULL};
    if (s->attn == SL_ATTN_MLA) {
        a.kv_heads = m->hq;
        a.dqk = s->nope_dim + s->rope_dim;
        a.dv = s->v_dim;
        a.k_stride = (int64_t)m->hq * a.dqk;
        a.k_head_stride = a.dqk;
        a.v_head_stride = s->nope_dim + s->v_dim;
        a.v_stride = (int64_t)m->hq * a.v_head_stride;
    } else {
        a.kv_heads = m->hkv;
        a.dqk = a.dv = s->head_dim;
        a.k_stride = a.v_stride = (int64_t)m->hkv * s->head_dim;
        a.k_head_stride = a.v_head_stride = s->head_dim;
    }
    a.q_stride = (int64_t)m->hq * a.dqk;
    a.o_stride = (int64_t)m->hq * a.dv;
    return a;
}

/* q, k, v with biases; per-head norms before the rotation. */
static int qkv_gqa(sl_forward *f, const sl_layer_weights *w, const sl_attn *a, int64_t T, const int32_t *pos,
                   const float *cs, sl_err *err) {
    const sl_spec *s = &f->m->spec;
    sl_ops *p = f->ops;
    uint8_t *xn = f->ws + f->at.xn, *q = f->ws + f->at.q, *k = f->ws + f->at.k, *v = f->ws + f->at.v;
    TRY(lin(f, q, xn, s->width, T, &w->q, &w->q_bias, err));
    TRY(lin(f, k, xn, s->width, T, &w->k, &w->k_bias, err));
    TRY(lin(f, v, xn, s->width, T, &w->v, &w->v_bias, err));
    if (w->q_norm.data) TRY(norm(f, q, a->q_stride, q, a->q_stride, T, a->heads, &w->q_norm, s->eps, err));
    if (w->k_norm.data) TRY(norm(f, k, a->k_stride, k, a->k_stride, T, a->kv_heads, &w->k_norm, s->eps, err));
    int32_t rd = sl_spec_rope_dim(s);
    TRY(p->rope(p->ctx, q, a->q_stride, T, a->heads, a->dqk, 0, rd, cs, pos, s->rope_kind, err));
    return p->rope(p->ctx, k, a->k_stride, T, a->kv_heads, a->dqk, 0, rd, cs, pos, s->rope_kind, err);
}

/* MLA in its expanded form: latent -> every head's k_nope and v; one rotated k_pe shared by all heads. */
static int qkv_mla(sl_forward *f, const sl_layer_weights *w, const sl_attn *a, int64_t T, const int32_t *pos,
                   const float *cs, sl_err *err) {
    const sl_spec *s = &f->m->spec;
    sl_ops *p = f->ops;
    uint8_t *xn = f->ws + f->at.xn, *q = f->ws + f->at.q, *k = f->ws + f->at.k, *kv = f->ws + f->at.v;
    uint8_t *qa = f->ws + f->at.qa, *ckv = f->ws + f->at.ckv;
    int64_t latent = s->kv_lora + s->rope_dim;
    if (s->q_lora) {
        TRY(lin(f, qa, xn, s->width, T, &w->q_a, NULL, err));
        TRY(norm(f, qa, s->q_lora, qa, s->q_lora, T, 1, &w->q_a_norm, s->eps_lora, err));
        TRY(lin(f, q, qa, s->q_lora, T, &w->q_b, NULL, err));
    } else {
        TRY(lin(f, q, xn, s->width, T, &w->q_b, NULL, err));
    }
    TRY(lin(f, ckv, xn, s->width, T, &w->kv_a, NULL, err));
    TRY(norm(f, ckv, latent, ckv, latent, T, 1, &w->kv_a_norm, s->eps_lora,
             err)); /* the latent part; k_pe stays as it is */
    TRY(lin(f, kv, ckv, latent, T, &w->kv_b, NULL, err));
    TRY(p->rope(p->ctx, ckv, latent, T, 1, latent, s->kv_lora, s->rope_dim, cs, pos, s->rope_kind, err));
    TRY(p->rope(p->ctx, q, a->q_stride, T, a->heads, a->dqk, s->nope_dim, s->rope_dim, cs, pos, s->rope_kind, err));
    return p->mla_k(p->ctx, k, kv, ckv + (uint64_t)s->kv_lora * f->es, latent, T, a->heads, s->nope_dim, s->rope_dim,
                    s->v_dim, err);
}

static uint8_t *residual(const sl_forward *f, int64_t t0) {
    return f->h + (uint64_t)t0 * (uint64_t)f->m->spec.width * f->es;
}
static uint8_t *part_of(const sl_forward *f, int64_t t0) {
    return f->ws + f->at.part + (f->coll->tp > 1 ? (uint64_t)t0 * (uint64_t)f->m->spec.width * f->es : 0);
}

/* One rank, nothing between the product and the residual: the product adds itself, with one rounding and without a pass
 * of its own. */
static int adds_itself(const sl_forward *f, const sl_vec *bias, const sl_vec *post) {
    return f->coll->tp == 1 && f->ops->linear_add && !post->data && !(bias && bias->data);
}

static int add_part(sl_forward *f, const sl_micro *mb, sl_err *err) {
    return f->ops->add(f->ops->ctx, residual(f, mb->t0), part_of(f, mb->t0), mb->T * f->m->spec.width, err);
}
static int norm_part(sl_forward *f, const sl_vec *post, const sl_micro *mb, sl_err *err) {
    int64_t H = f->m->spec.width;
    uint8_t *part = part_of(f, mb->t0);
    return post->data ? norm(f, part, H, part, H, mb->T, 1, post, f->m->spec.eps, err) : 0;
}

/* The micro-batch's partial result goes on its way into the residual. */
static int begin_sum(sl_forward *f, const sl_vec *post, sl_micro *mb, sl_err *err) {
    if (f->coll->tp > 1) {
        mb->post = *post;
        mb->summing = 1;
        return f->coll->reduce(f->coll, post->data ? NULL : residual(f, mb->t0), part_of(f, mb->t0),
                               mb->T * f->m->spec.width, &mb->ticket, err);
    }
    TRY(norm_part(f, post, mb, err));
    if (!f->ops->add_norm || f->n_micro > 1) return add_part(f, mb, err); /* the next micro-batch needs the buffer */
    mb->adding = 1;
    return 0;
}

int sl_forward_settle(sl_forward *f, sl_micro *mb, sl_err *err) {
    if (mb->adding) {
        mb->adding = 0;
        return add_part(f, mb, err);
    }
    if (!mb->summing) return 0;
    mb->summing = 0;
    TRY(f->coll->wait(f->coll, mb->ticket, err));
    if (!mb->post.data) return 0;
    TRY(norm_part(f, &mb->post, mb, err));
    return add_part(f, mb, err);
}

/* xn = norm(residual) of the micro-batches mb[0..n), T tokens together, once it is complete. */
static int enter_block(sl_forward *f, const sl_vec *w, sl_micro *mb, int32_t n, int64_t T, sl_err *err) {
    const sl_spec *s = &f->m->spec;
    uint8_t *h = residual(f, mb->t0), *xn = f->ws + f->at.xn;
    if (n == 1 && mb->adding) {
        mb->adding = 0;
        return f->ops->add_norm(f->ops->ctx, h, part_of(f, mb->t0), xn, T, s->width, w->data, (float)s->eps, s->norm,
                                err);
    }
    for (int32_t i = 0; i < n; i++) TRY(sl_forward_settle(f, &mb[i], err));
    return norm(f, xn, s->width, h, s->width, T, 1, w, s->eps, err);
}

/* The share of attention's result on its way into the residual, one micro-batch after the other. */
static int output_products(sl_forward *f, const sl_layer_weights *w, const sl_attn *a, sl_micro *mb, int32_t n,
                           sl_err *err) {
    const uint8_t *o = f->ws + f->at.o;
    if (adds_itself(f, &w->o_bias, &w->post_attn_norm))
        return f->ops->linear_add(f->ops->ctx, residual(f, mb->t0), f->m->spec.width, o, a->o_stride, mb->T, &w->o,
                                  err);
    for (int32_t i = 0; i < n; i++) {
        TRY(lin(f, part_of(f, mb[i].t0), o, a->o_stride, mb[i].T, &w->o, &w->o_bias, err));
        TRY(begin_sum(f, &w->post_attn_norm, &mb[i], err));
        o += (uint64_t)(mb[i].T * a->o_stride) * f->es;
    }
    return 0;
}

int sl_forward_attention(sl_forward *f, const sl_layer_weights *w, const sl_layer_spec *ls, sl_micro *mb, int32_t n,
                         sl_err *err) {
    const sl_spec *s = &f->m->spec;
    sl_ops *p = f->ops;
    sl_attn a = sl_forward_attn(f->m, w, ls);
    const int32_t *pos = f->pos + mb->t0;
    const float *cs = f->rope[ls->rope];
    int64_t T = 0;
    for (int32_t i = 0; i < n; i++) T += mb[i].T;
    TRY(enter_block(f, &w->attn_norm, mb, n, T, err));
    const uint8_t *v = f->ws + f->at.v;
    if (s->attn == SL_ATTN_MLA) {
        TRY(qkv_mla(f, w, &a, T, pos, cs, err));
        v += (uint64_t)s->nope_dim * f->es;
    } else {
        TRY(qkv_gqa(f, w, &a, T, pos, cs, err));
    }
    TRY(p->attention(p->ctx, f->ws + f->at.o, f->ws + f->at.q, f->ws + f->at.k, v, mb->cu, mb->S, &a, err));
    return output_products(f, w, &a, mb, n, err);
}

/* out (+)= down(glu(gate(x), up(x))): the dense MLP or the shared expert */
static int glu_mlp(sl_forward *f, const sl_layer_weights *w, void *out, int64_t T, int add, sl_err *err) {
    const sl_spec *s = &f->m->spec;
    sl_ops *p = f->ops;
    uint8_t *xn = f->ws + f->at.xn, *g = f->ws + f->at.gate, *u = f->ws + f->at.up;
    int64_t I = w->gate.n;
    if (p->glu_linear) {
        TRY(p->glu_linear(p->ctx, g, u, xn, s->width, T, &w->gate, &w->up, s->glu, (float)s->glu_limit, err));
    } else {
        TRY(lin(f, g, xn, s->width, T, &w->gate, NULL, err));
        TRY(lin(f, u, xn, s->width, T, &w->up, NULL, err));
        TRY(p->glu(p->ctx, g, g, I, u, I, T, I, s->glu, s->glu_limit, err));
    }
    return add ? p->linear_add(p->ctx, out, w->down.n, g, I, T, &w->down, err)
               : lin(f, out, g, I, T, &w->down, NULL, err);
}

/* part = routed experts + shared expert of this rank */
static int moe_mlp(sl_forward *f, const sl_layer_weights *w, uint8_t *part, int64_t T, sl_err *err) {
    const sl_spec *s = &f->m->spec;
    sl_ops *p = f->ops;
    uint8_t *xn = f->ws + f->at.xn;
    int32_t *idx = (int32_t *)(f->ws + f->at.idx);
    float *weight = (float *)(f->ws + f->at.weight);
    sl_router r = s->router;
    r.bias = w->router_bias.data;
    r.logit_bias = w->router_logit_bias.data;
    TRY(p->route(p->ctx, idx, weight, xn, T, s->width, &w->router, &r, err));
    TRY(p->moe(p->ctx, part, xn, T, s->width, idx, weight, &w->moe, err));
    if (!w->gate.data) return 0;
    /* routed and shared partials are added here, so that the ranks reduce once */
    if (p->linear_add) return glu_mlp(f, w, part, T, 1, err);
    TRY(glu_mlp(f, w, f->ws + f->at.shared, T, 0, err));
    return p->add(p->ctx, part, f->ws + f->at.shared, T * s->width, err);
}

int sl_forward_mlp(sl_forward *f, const sl_layer_weights *w, const sl_layer_spec *ls, sl_micro *mb, int32_t n,
                   sl_err *err) {
    const sl_vec *post = &w->post_mlp_norm;
    int64_t T = 0;
    for (int32_t i = 0; i < n; i++) T += mb[i].T;
    uint8_t *h = residual(f, mb->t0), *part = part_of(f, mb->t0);
    TRY(enter_block(f, &w->mlp_norm, mb, n, T, err));
    if (ls->mlp != SL_MLP_MOE && adds_itself(f, NULL, post)) return glu_mlp(f, w, h, T, 1, err);
    TRY(ls->mlp == SL_MLP_MOE ? moe_mlp(f, w, part, T, err) : glu_mlp(f, w, part, T, 0, err));
    for (int32_t i = 0; i < n; i++) TRY(begin_sum(f, post, &mb[i], err));
    return 0;
}
