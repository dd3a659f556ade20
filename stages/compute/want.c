#include "stages/compute/want.h"
#include "ipc/boot.h" /* sl_expert_split */

#include <ctype.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Everything wrong with the checkpoint, gathered into one message. */
typedef struct problems {
    char text[1500];
    size_t at;
    uint64_t n, shown;
} problems;

static void __attribute__((format(printf, 2, 3))) problem(problems *p, const char *fmt, ...) {
    va_list ap;
    size_t room = sizeof p->text - p->at;
    p->n++;
    if (p->shown != p->n - 1) return; /* once one did not fit, none is shown any more */
    va_start(ap, fmt);
    int sep = snprintf(p->text + p->at, room, "%s", p->at ? "; " : "");
    int len = (size_t)sep < room ? vsnprintf(p->text + p->at + sep, room - (size_t)sep, fmt, ap) : (int)room;
    va_end(ap);
    if (sep + len >= (int)room)
        p->text[p->at] = 0;
    else {
        p->at += (size_t)(sep + len);
        p->shown++;
    }
}

typedef struct maker {
    sl_want *w;
    sl_model *m;
    const sl_load_opts *o;
    sl_source *src;
    problems *p;
    char base[64], head[64]; /* HF: before "layers.0..." / "embed_tokens", and before "lm_head" */
    int fatal;               /* out of memory */
    uint64_t quantized;      /* items that were found in the checkpoint's declared format */
} maker;

/* ---- names ---- */

typedef enum {
    N_ATTN_NORM,
    N_MLP_NORM,
    N_POST_ATTN,
    N_POST_MLP,
    N_Q,
    N_K,
    N_V,
    N_O,
    N_QN,
    N_KN,
    N_SINKS,
    N_QA,
    N_QAN,
    N_QB,
    N_KVA,
    N_KVAN,
    N_KVB,
    N_GATE,
    N_UP,
    N_DOWN,
    N_SGATE,
    N_SUP,
    N_SDOWN,
    N_ROUTER,
    N_ROUTER_SEL,
    N_EGATE,
    N_EUP,
    N_EDOWN
} name_id;

static const char *const layer_names[][2] = {
    /* HF, GGUF */
    [N_ATTN_NORM] = {"input_layernorm", "attn_norm"},
    [N_MLP_NORM] = {"post_attention_layernorm", "ffn_norm"},
    [N_POST_ATTN] = {"post_attention_layernorm", "post_attention_norm"},
    [N_POST_MLP] = {"post_feedforward_layernorm", "post_ffw_norm"},
    [N_Q] = {"self_attn.q_proj", "attn_q"},
    [N_K] = {"self_attn.k_proj", "attn_k"},
    [N_V] = {"self_attn.v_proj", "attn_v"},
    [N_O] = {"self_attn.o_proj", "attn_output"},
    [N_QN] = {"self_attn.q_norm", "attn_q_norm"},
    [N_KN] = {"self_attn.k_norm", "attn_k_norm"},
    [N_SINKS] = {"self_attn.sinks", "attn_sinks"},
    [N_QA] = {"self_attn.q_a_proj", "attn_q_a"},
    [N_QAN] = {"self_attn.q_a_layernorm", "attn_q_a_norm"},
    [N_QB] = {"self_attn.q_b_proj", "attn_q_b"},
    [N_KVA] = {"self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"},
    [N_KVAN] = {"self_attn.kv_a_layernorm", "attn_kv_a_norm"},
    [N_KVB] = {"self_attn.kv_b_proj", "attn_kv_b"},
    [N_GATE] = {"mlp.gate_proj", "ffn_gate"},
    [N_UP] = {"mlp.up_proj", "ffn_up"},
    [N_DOWN] = {"mlp.down_proj", "ffn_down"},
    [N_SGATE] = {"mlp.shared_experts.gate_proj", "ffn_gate_shexp"},
    [N_SUP] = {"mlp.shared_experts.up_proj", "ffn_up_shexp"},
    [N_SDOWN] = {"mlp.shared_experts.down_proj", "ffn_down_shexp"},
    [N_ROUTER] = {"mlp.gate", "ffn_gate_inp"},
    [N_ROUTER_SEL] = {"mlp.gate.e_score_correction_bias", "exp_probs_b.bias"},
    [N_EGATE] = {"mlp.experts.%d.gate_proj", "ffn_gate_exps"},
    [N_EUP] = {"mlp.experts.%d.up_proj", "ffn_up_exps"},
    [N_EDOWN] = {"mlp.experts.%d.down_proj", "ffn_down_exps"},
};

static void layer_name(const maker *k, char *out, size_t cap, int layer, const char *name) {
    if (k->m->spec.from_gguf)
        snprintf(out, cap, "blk.%d.%.70s", layer, name);
    else
        snprintf(out, cap, "%.60slayers.%d.%.70s", k->base, layer, name);
}

/* Where checkpoints put the text model: the first base whose embedding is there. */
static const char *const bases[][2] = {
    {"model.", ""},
    {"language_model.model.", "language_model."},
    {"model.language_model.", ""},
    {"language_model.", "language_model."},
};
static void find_base(maker *k) {
    char name[128];
    snprintf(k->base, sizeof k->base, "%.50smodel.", k->m->spec.prefix);
    snprintf(k->head, sizeof k->head, "%.50s", k->m->spec.prefix);
    if (!k->src || k->m->spec.from_gguf) return;
    for (size_t i = 0; i < sizeof bases / sizeof *bases; i++) {
        snprintf(name, sizeof name, "%sembed_tokens.weight", bases[i][0]);
        if (!sl_source_find(k->src, name)) continue;
        snprintf(k->base, sizeof k->base, "%s", bases[i][0]);
        snprintf(k->head, sizeof k->head, "%s", bases[i][1]);
        return;
    }
}

/* ---- finding and checking one item ---- */

static sl_want_src *new_src(maker *k, uint64_t count) { /* offsets into w->src until the end: it may move */
    sl_want *w = k->w;
    if (w->n_src + count > w->cap_src) {
        uint64_t cap = (w->n_src + count) * 2 + 256;
        sl_want_src *s = realloc(w->src, cap * sizeof *s);
        if (!s) {
            k->fatal = 1;
            return NULL;
        }
        w->src = s;
        w->cap_src = cap;
    }
    sl_want_src *at = w->src + w->n_src;
    w->n_src += count;
    return at;
}

static void shape_text(char *out, size_t cap, const sl_src_tensor *t) {
    size_t at = (size_t)snprintf(out, cap, "[");
    for (uint32_t d = 0; d < t->n_dims && d < 4 && at < cap; d++)
        at += (size_t)snprintf(out + at, cap - at, "%s%" PRIu64, d ? ", " : "", t->shape[d]);
    if (at < cap) snprintf(out + at, cap - at, "]");
}

static int shaped(maker *k, const sl_src_tensor *t, uint32_t dims, const uint64_t *want) {
    int same = t->n_dims == dims;
    for (uint32_t d = 0; d < dims && same; d++) same = t->shape[d] == want[d];
    /* GGUF drops or keeps dimensions of 1 as it likes. */
    if (!same && k->m->spec.from_gguf) {
        uint64_t a[4] = {1, 1, 1, 1}, b[4] = {1, 1, 1, 1};
        int na = 0, nb = 0;
        for (uint32_t d = 0; d < t->n_dims && d < 4; d++)
            if (t->shape[d] != 1) a[na++] = t->shape[d];
        for (uint32_t d = 0; d < dims; d++)
            if (want[d] != 1) b[nb++] = want[d];
        same = na == nb && !memcmp(a, b, sizeof a);
    }
    if (same) return 1;
    char found[100], need[100];
    sl_src_tensor w = {.n_dims = dims};
    for (uint32_t d = 0; d < dims; d++) w.shape[d] = want[d];
    shape_text(found, sizeof found, t);
    shape_text(need, sizeof need, &w);
    problem(k->p, "'%.*s' has shape %s, expected %s", t->name_len > 150 ? 150 : t->name_len, t->name, found, need);
    return 0;
}

static void bad_type(maker *k, const sl_src_tensor *t, const char *want) {
    problem(k->p, "'%.*s' has type %s, expected %s", t->name_len > 150 ? 150 : t->name_len, t->name, t->type, want);
}

static sl_src_tensor *lookup(maker *k, const char *name) {
    sl_src_tensor *t = sl_source_find(k->src, name);
    if (!t) problem(k->p, "'%s' is missing", name);
    return t;
}

/* Point part p of expert slot e at row r0, byte column col of matrix index `em` inside tensor t of `rows_all` rows. */
static void set_part(sl_want_item *it, sl_want_src *src, int p, int64_t slot, const sl_src_tensor *t, uint64_t em,
                     uint64_t rows_all, uint64_t pitch, uint64_t r0, uint64_t rows, uint64_t col, uint64_t piece) {
    sl_want_part *part = &it->part[p];
    part->rows = rows;
    part->pitch = pitch;
    part->piece = piece;
    if (src) src[slot] = (sl_want_src){t->file, t->off + (em * rows_all + r0) * pitch + col};
}

/* A dense or GGUF block matrix, as one tensor of `dims` dimensions. */
static void plain_part(maker *k, sl_want_item *it, sl_want_src *src, int64_t slot, const sl_src_tensor *t,
                       uint64_t em) {
    uint64_t pitch = sl_wfmt_row_bytes(it->fmt, it->k), col = it->k0 ? sl_wfmt_row_bytes(it->fmt, it->k0) : 0,
             piece = sl_wfmt_row_bytes(it->fmt, it->k1 - it->k0);
    if (!pitch || !piece || (it->k0 && !col)) {
        problem(k->p,
                "'%.*s' is %s, whose blocks of %u elements do not fit columns %" PRId64 "..%" PRId64 " of %" PRId64,
                t->name_len, t->name, t->type, sl_wfmt_block(it->fmt), it->k0, it->k1, it->k);
        return;
    }
    set_part(it, src, SL_PART_DATA, slot, t, em, (uint64_t)it->n, pitch, (uint64_t)it->n0, (uint64_t)(it->n1 - it->n0),
             col, piece);
}

static void int4_parts(maker *k, sl_want_item *it, sl_want_src *const src[SL_PARTS], int64_t slot, const char *base,
                       sl_src_tensor *packed) {
    char name[224];
    uint64_t n = (uint64_t)it->n, kk = (uint64_t)it->k;
    if (packed->st != SL_ST_I32) bad_type(k, packed, "I32");
    if (!shaped(k, packed, 2, (uint64_t[]){n, (kk + 7) / 8}) || packed->st != SL_ST_I32) return;
    snprintf(name, sizeof name, "%s.weight_scale", base);
    sl_src_tensor *sc = lookup(k, name);
    int32_t g = k->m->spec.quant_group > 0 ? k->m->spec.quant_group : (int32_t)it->k;
    if (strcmp(k->m->spec.quant, "int4") != 0)
        problem(k->p, "'%s' is packed INT4, but config.json declares no such quantization", base);
    if (kk % 8 || kk % (uint64_t)g)
        problem(k->p, "'%s' has %" PRIu64 " columns, not a multiple of its group of %d", base, kk, g);
    else if (k->m->spec.quant_group > 0 && (it->k0 % g || it->k1 % g))
        problem(k->p, "'%s' would be cut at columns %" PRId64 "..%" PRId64 ", inside a group of %d", base, it->k0,
                it->k1, g);
    else if (it->k0 % 8 || it->k1 % 8)
        problem(k->p, "'%s' would be cut inside a packed word", base);
    else if (sc && shaped(k, sc, 2, (uint64_t[]){n, kk / (uint64_t)g})) {
        if (sc->st != SL_ST_BF16 && sc->st != SL_ST_F16 && sc->st != SL_ST_F32) {
            bad_type(k, sc, "BF16, F16 or F32");
            return;
        }
        uint64_t es = sl_st_dtype_size((sl_st_dtype)sc->st), g0 = (uint64_t)(it->k0 / g),
                 gs = ((uint64_t)(it->k1 - 1) / (uint64_t)g) + 1 - g0;
        sl_dtype sd = sc->st == SL_ST_BF16 ? SL_BF16 : sc->st == SL_ST_F16 ? SL_F16 : SL_F32;
        if (slot && sd != it->scale_dtype) bad_type(k, sc, "the type of the first expert's scales");
        it->scale_dtype = sd;
        it->group = k->m->spec.quant_group > 0 ? g : (int32_t)(it->k1 - it->k0);
        set_part(it, src[SL_PART_DATA], SL_PART_DATA, slot, packed, 0, n, kk / 2, (uint64_t)it->n0,
                 (uint64_t)(it->n1 - it->n0), (uint64_t)it->k0 / 2, (uint64_t)(it->k1 - it->k0) / 2);
        set_part(it, src[SL_PART_SCALE], SL_PART_SCALE, slot, sc, 0, n, kk / (uint64_t)g * es, (uint64_t)it->n0,
                 (uint64_t)(it->n1 - it->n0), g0 * es, gs * es);
        k->quantized++;
    }
    snprintf(name, sizeof name, "%s.weight_shape", base);
    sl_src_tensor *shape = sl_source_find(k->src, name);
    if (shape) shaped(k, shape, 1, (uint64_t[]){2});
    snprintf(name, sizeof name, "%s.weight_zero_point", base);
    sl_src_tensor *zp = sl_source_find(k->src, name);
    if (!zp && !k->m->spec.quant_symmetric) problem(k->p, "'%s' is missing", name);
    if (!zp) return;
    if (zp->st != SL_ST_I32)
        bad_type(k, zp, "I32");
    else if (it->n0 % 8 || it->n1 % 8)
        problem(k->p, "'%s' would be cut inside a packed word of zero points", base);
    else if (shaped(k, zp, 2, (uint64_t[]){(n + 7) / 8, kk / (uint64_t)g})) {
        uint64_t g0 = (uint64_t)(it->k0 / g), gs = ((uint64_t)(it->k1 - 1) / (uint64_t)g) + 1 - g0;
        set_part(it, src[SL_PART_ZERO], SL_PART_ZERO, slot, zp, 0, (n + 7) / 8, kk / (uint64_t)g * 4,
                 (uint64_t)it->n0 / 8, (uint64_t)(it->n1 - it->n0) / 8, g0 * 4, gs * 4);
    }
}

static void fp8_parts(maker *k, sl_want_item *it, sl_want_src *const src[SL_PARTS], int64_t slot, const char *base,
                      sl_src_tensor *t) {
    char name[224];
    snprintf(name, sizeof name, "%s.weight_scale_inv", base);
    sl_src_tensor *sc = lookup(k, name);
    if (strcmp(k->m->spec.quant, "fp8") != 0)
        problem(k->p, "'%s.weight' is F8_E4M3, but config.json declares no such quantization", base);
    if (!sc) return;
    if (sc->st != SL_ST_F32) {
        bad_type(k, sc, "F32");
        return;
    }
    uint64_t nb = ((uint64_t)it->n + 127) / 128, kb = ((uint64_t)it->k + 127) / 128;
    if (!shaped(k, sc, 2, (uint64_t[]){nb, kb})) return;
    uint64_t r0 = (uint64_t)it->n0 / 128, r1 = ((uint64_t)it->n1 + 127) / 128, c0 = (uint64_t)it->k0 / 128,
             c1 = ((uint64_t)it->k1 + 127) / 128;
    plain_part(k, it, src[SL_PART_DATA], slot, t, 0);
    set_part(it, src[SL_PART_SCALE], SL_PART_SCALE, slot, sc, 0, nb, kb * 4, r0, r1 - r0, c0 * 4, (c1 - c0) * 4);
    k->quantized++;
}

/* One matrix in a tensor (or a tensor group) of its own; slot = index in this rank's experts, or 0. */
static void find_matrix(maker *k, sl_want_item *it, sl_want_src *const src[SL_PARTS], int64_t slot, const char *base) {
    char name[224];
    snprintf(name, sizeof name, "%s.weight_packed", base);
    sl_src_tensor *t = it->role == SL_ROLE_LINEAR || it->role == SL_ROLE_EXPERT ? sl_source_find(k->src, name) : NULL;
    sl_wfmt fmt = SL_W_INT4;
    if (!t) {
        snprintf(name, sizeof name, "%s.weight", base);
        if (!(t = lookup(k, name))) return;
        if (t->fmt < 0 || (t->fmt == SL_W_FP8 && it->role != SL_ROLE_LINEAR && it->role != SL_ROLE_EXPERT)) {
            bad_type(k, t,
                     k->m->spec.from_gguf ? "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q5_K Q6_K or MXFP4"
                                          : "BF16, F16, F32, F8_E4M3 with scales, or packed INT4");
            return;
        }
        fmt = (sl_wfmt)t->fmt;
    }
    if (slot > 0 && fmt != it->fmt) {
        problem(k->p, "'%s' is %s, the first expert is %s", base, sl_wfmt_name(fmt), sl_wfmt_name(it->fmt));
        return;
    }
    it->fmt = fmt;
    if (fmt == SL_W_INT4)
        int4_parts(k, it, src, slot, base, t);
    else if (!shaped(k, t, 2, (uint64_t[]){(uint64_t)it->n, (uint64_t)it->k}))
        return;
    else if (fmt == SL_W_FP8)
        fp8_parts(k, it, src, slot, base, t);
    else
        plain_part(k, it, src[SL_PART_DATA], slot, t, 0);
}

/* All experts in one tensor: GGUF's [E, n, k]. */
static void find_stack(maker *k, sl_want_item *it, sl_want_src *const src[SL_PARTS]) {
    char name[224];
    snprintf(name, sizeof name, "%s.weight", it->name);
    sl_src_tensor *t = lookup(k, name);
    if (!t) return;
    if (t->fmt < 0) {
        bad_type(k, t, "a type that is supported");
        return;
    }
    it->fmt = (sl_wfmt)t->fmt;
    if (!shaped(k, t, 3, (uint64_t[]){(uint64_t)it->count, (uint64_t)it->n, (uint64_t)it->k})) return;
    for (int64_t e = it->e0; e < it->e1; e++) plain_part(k, it, src[SL_PART_DATA], e - it->e0, t, (uint64_t)e);
}

/* gpt-oss: NAME_blocks and NAME_scales in MXFP4, or NAME in bf16, transposed. */
static void find_fused(maker *k, sl_want_item *it, sl_want_src *const src[SL_PARTS]) {
    char name[224];
    uint64_t E = (uint64_t)it->count, n = (uint64_t)it->n, kk = (uint64_t)it->k;
    snprintf(name, sizeof name, "%s_blocks", it->name);
    sl_src_tensor *b = sl_source_find(k->src, name), *t = NULL;
    if (!b) {
        if (!(t = lookup(k, it->name))) return;
        if (t->fmt != SL_W_BF16 && t->fmt != SL_W_F16 && t->fmt != SL_W_F32)
            bad_type(k, t, "BF16, F16 or F32");
        else if (shaped(k, t, 3, (uint64_t[]){E, kk, n})) {
            uint64_t es = sl_wfmt_row_bytes((sl_wfmt)t->fmt, 1);
            it->fmt = (sl_wfmt)t->fmt;
            it->how = SL_WANT_TRANSPOSE; /* rows of the file are columns: what is n here is contiguous there */
            for (int64_t e = it->e0; e < it->e1; e++)
                set_part(it, src[SL_PART_DATA], SL_PART_DATA, e - it->e0, t, (uint64_t)e, kk, n * es, (uint64_t)it->k0,
                         (uint64_t)(it->k1 - it->k0), (uint64_t)it->n0 * es, (uint64_t)(it->n1 - it->n0) * es);
        }
        return;
    }
    snprintf(name, sizeof name, "%s_scales", it->name);
    sl_src_tensor *s = lookup(k, name);
    if (b->st != SL_ST_U8) bad_type(k, b, "U8");
    if (s && s->st != SL_ST_U8) bad_type(k, s, "U8");
    if (kk % 32 || it->k0 % 32 || it->k1 % 32)
        problem(k->p, "'%s' would be cut at columns %" PRId64 "..%" PRId64 ", inside a block of 32", it->name, it->k0,
                it->k1);
    else if (s && shaped(k, b, 4, (uint64_t[]){E, n, kk / 32, 16}) && shaped(k, s, 3, (uint64_t[]){E, n, kk / 32}) &&
             b->st == SL_ST_U8 && s->st == SL_ST_U8) {
        it->fmt = SL_W_MXFP4;
        k->quantized++;
        for (int64_t e = it->e0; e < it->e1; e++) {
            set_part(it, src[SL_PART_DATA], SL_PART_DATA, e - it->e0, b, (uint64_t)e, n, kk / 2, (uint64_t)it->n0,
                     (uint64_t)(it->n1 - it->n0), (uint64_t)it->k0 / 2, (uint64_t)(it->k1 - it->k0) / 2);
            set_part(it, src[SL_PART_SCALE], SL_PART_SCALE, e - it->e0, s, (uint64_t)e, n, kk / 32, (uint64_t)it->n0,
                     (uint64_t)(it->n1 - it->n0), (uint64_t)it->k0 / 32, (uint64_t)(it->k1 - it->k0) / 32);
        }
    }
}

/* kv_b of a GGUF: whole, or split in k_b [heads, kv_lora, nope] and v_b [heads, v, kv_lora]. The split pair becomes one
 * matrix of bf16 (f32 when a part is F32): part DATA points at k_b, part SCALE at v_b, each whole for this rank's
 * heads. */
static void find_kv_b(maker *k, sl_want_item *it, sl_want_src *const src[SL_PARTS]) {
    const sl_spec *s = &k->m->spec;
    char name[224];
    snprintf(name, sizeof name, "%s.weight", it->name);
    if (sl_source_find(k->src, name)) {
        find_matrix(k, it, src, 0, it->name);
        return;
    }
    snprintf(name, sizeof name, "blk.%d.attn_k_b.weight", it->layer);
    sl_src_tensor *kb = lookup(k, name);
    snprintf(name, sizeof name, "blk.%d.attn_v_b.weight", it->layer);
    sl_src_tensor *vb = lookup(k, name);
    if (!kb || !vb) return;
    if (kb->fmt < 0 || vb->fmt < 0) {
        bad_type(k, kb->fmt < 0 ? kb : vb, "a type that is supported");
        return;
    }
    uint64_t h = (uint64_t)s->heads, lora = (uint64_t)s->kv_lora, nope = (uint64_t)s->nope_dim, v = (uint64_t)s->v_dim,
             h0 = (uint64_t)it->n0 / (nope + v), hn = (uint64_t)(it->n1 - it->n0) / (nope + v);
    if (!shaped(k, kb, 3, (uint64_t[]){h, lora, nope}) || !shaped(k, vb, 3, (uint64_t[]){h, v, lora})) return;
    uint64_t kp = sl_wfmt_row_bytes((sl_wfmt)kb->fmt, (int64_t)nope),
             vp = sl_wfmt_row_bytes((sl_wfmt)vb->fmt, (int64_t)lora);
    it->how = SL_WANT_KV_SPLIT;
    it->fmt = kb->fmt == SL_W_F32 || vb->fmt == SL_W_F32 ? SL_W_F32 : SL_W_BF16;
    it->group = kb->fmt;
    it->scale_dtype = (sl_dtype)vb->fmt; /* the two formats of the parts, for the loader */
    set_part(it, src[SL_PART_DATA], SL_PART_DATA, 0, kb, 0, h * lora, kp, h0 * lora, hn * lora, 0, kp);
    set_part(it, src[SL_PART_SCALE], SL_PART_SCALE, 0, vb, 0, h * v, vp, h0 * v, hn * v, 0, vp);
}

static void find_vector(maker *k, sl_want_item *it, sl_want_src *const src[SL_PARTS]) {
    sl_src_tensor *t = lookup(k, it->name);
    if (!t) return;
    if (t->st != SL_ST_F32 && t->st != SL_ST_BF16 && t->st != SL_ST_F16) {
        bad_type(k, t, "F32, BF16 or F16");
        return;
    }
    int ok = it->count > 1 || it->role == SL_ROLE_EXPERT
                 ? shaped(k, t, 2, (uint64_t[]){(uint64_t)it->count, (uint64_t)it->n})
                 : shaped(k, t, 1, (uint64_t[]){(uint64_t)it->n});
    if (!ok) return;
    uint64_t es = sl_st_dtype_size((sl_st_dtype)t->st);
    it->st = t->st;
    for (int64_t e = it->e0; e < it->e1; e++)
        set_part(it, src[SL_PART_DATA], SL_PART_DATA, e - it->e0, t, (uint64_t)e, 1, (uint64_t)it->n * es, 0, 1,
                 (uint64_t)it->n0 * es, (uint64_t)(it->n1 - it->n0) * es);
}

/* ---- formats when there is no file ---- */

static void random_format(const maker *k, sl_want_item *it) {
    const sl_spec *s = &k->m->spec;
    sl_wfmt f = SL_W_BF16;
    int linear = it->role == SL_ROLE_LINEAR || it->role == SL_ROLE_EXPERT;
    if (linear && k->o->random_format >= 0)
        f = (sl_wfmt)k->o->random_format;
    else if (linear && !strcmp(s->quant, "fp8"))
        f = SL_W_FP8;
    else if (it->role == SL_ROLE_EXPERT && !strcmp(s->quant, "mxfp4"))
        f = SL_W_MXFP4;
    else if (linear && !strcmp(s->quant, "int4") && (it->role == SL_ROLE_EXPERT || !s->experts))
        f = SL_W_INT4;
    int64_t kn = it->k1 - it->k0;
    it->group = f == SL_W_INT4 ? (s->quant_group > 0 ? s->quant_group : 32) : 0;
    int64_t block = f == SL_W_INT4 ? (it->group > 16 ? it->group : 16) : (int64_t)sl_wfmt_block(f);
    if (it->k % block || it->k0 % block || kn % block) f = SL_W_BF16; /* this matrix does not fit the format's blocks */
    it->fmt = f;
    it->scale_dtype = SL_BF16;
    uint64_t rows = (uint64_t)(it->n1 - it->n0);
    it->part[SL_PART_DATA] = (sl_want_part){.rows = rows, .piece = sl_wfmt_row_bytes(f, kn)};
    if (f == SL_W_INT4) it->part[SL_PART_SCALE] = (sl_want_part){.rows = rows, .piece = (uint64_t)(kn / it->group) * 2};
    if (f == SL_W_MXFP4) it->part[SL_PART_SCALE] = (sl_want_part){.rows = rows, .piece = (uint64_t)kn / 32};
    if (f == SL_W_FP8)
        it->part[SL_PART_SCALE] = (sl_want_part){.rows = (uint64_t)((it->n1 + 127) / 128 - it->n0 / 128),
                                                 .piece = (uint64_t)((it->k1 + 127) / 128 - it->k0 / 128) * 4};
}

static void find_item(maker *k, sl_want_item *it) {
    int64_t slots = it->e1 - it->e0;
    uint64_t at[SL_PARTS];
    sl_want_src *src[SL_PARTS];
    for (int p = 0; p < SL_PARTS; p++) {
        if (!new_src(k, (uint64_t)slots)) return;
        at[p] = k->w->n_src - (uint64_t)slots;
    }
    for (int p = 0; p < SL_PARTS; p++) src[p] = k->w->src + at[p];
    char base[192];
    if (it->vec)
        find_vector(k, it, src);
    else if (it->role == SL_ROLE_EXPERT && k->m->spec.from_gguf)
        find_stack(k, it, src);
    else if (it->role == SL_ROLE_EXPERT && !strstr(it->name, "%d"))
        find_fused(k, it, src);
    else if (it->role == SL_ROLE_EXPERT) {
        /* Experts of other ranks are looked up as well, so that every rank reports the same faults. */
        sl_want_item other = *it;
        const char *pct = strstr(it->name, "%d");
        for (int64_t e = 0; e < it->count; e++) {
            int mine = e >= it->e0 && e < it->e1;
            sl_want_src *none[SL_PARTS] = {0};
            snprintf(base, sizeof base, "%.*s%" PRId64 "%s", (int)(pct - it->name), it->name, e, pct + 2);
            find_matrix(k, mine ? it : &other, mine ? src : none, mine ? e - it->e0 : 0, base);
        }
    } else if (k->m->spec.from_gguf && k->m->spec.attn == SL_ATTN_MLA && strstr(it->name, ".attn_kv_b"))
        find_kv_b(k, it, src);
    else
        find_matrix(k, it, src, 0, it->name);
    for (int p = 0; p < SL_PARTS; p++) it->part[p].src_at = at[p]; /* a pointer only at the end: the array moves */
}

/* ---- the list ---- */

static sl_want_item *add(maker *k, sl_want_role role, int layer) {
    sl_want *w = k->w;
    if (w->n == w->cap) {
        int cap = w->cap ? w->cap * 2 : 512;
        sl_want_item *p = realloc(w->item, (size_t)cap * sizeof *p);
        if (!p) {
            k->fatal = 1;
            return NULL;
        }
        w->item = p;
        w->cap = cap;
    }
    sl_want_item *it = &w->item[w->n++];
    *it = (sl_want_item){
        .role = role, .layer = layer, .count = 1, .e1 = 1, .k = 1, .k1 = 1, .load = layer < k->m->top_layer};
    return it;
}

static void want_done(maker *k, sl_want_item *it) {
    sl_want *w = k->w;
    if (k->src)
        find_item(k, it);
    else if (it->mat)
        random_format(k, it);
    int64_t slots = it->e1 - it->e0;
    w->params += (uint64_t)(it->n * it->k * it->count);
    if (it->vec)
        it->bytes = (uint64_t)(slots * (it->n1 - it->n0)) * 4;
    else if (it->how == SL_WANT_PLAIN)
        for (int p = 0; p < SL_PARTS; p++) it->bytes += (uint64_t)slots * it->part[p].rows * it->part[p].piece;
    else
        it->bytes = (uint64_t)slots * (uint64_t)(it->n1 - it->n0) * sl_wfmt_row_bytes(it->fmt, it->k1 - it->k0);
    if (it->load) w->bytes += it->bytes;
}

/* A matrix: rows [n0, n1), columns [k0, k1) of [n, k]. */
static void want_mat(maker *k, sl_mat *dst, sl_want_role role, int layer, const char *name, int64_t n, int64_t kk,
                     int64_t n0, int64_t n1, int64_t k0, int64_t k1) {
    sl_want_item *it = add(k, role, layer);
    if (!it) return;
    it->mat = dst;
    it->n = n;
    it->k = kk;
    it->n0 = n0;
    it->n1 = n1;
    it->k0 = k0;
    it->k1 = k1;
    snprintf(it->name, sizeof it->name, "%s", name);
    want_done(k, it);
}
static void layer_mat(maker *k, sl_mat *dst, sl_want_role role, int layer, name_id id, int64_t n, int64_t kk,
                      int64_t n0, int64_t n1, int64_t k0, int64_t k1) {
    char name[160];
    layer_name(k, name, sizeof name, layer, layer_names[id][k->m->spec.from_gguf]);
    want_mat(k, dst, role, layer, name, n, kk, n0, n1, k0, k1);
}
static void rows_mat(maker *k, sl_mat *dst, int layer, name_id id, int64_t n, int64_t kk, int64_t n0, int64_t n1) {
    layer_mat(k, dst, SL_ROLE_LINEAR, layer, id, n, kk, n0, n1, 0, kk);
}
static void cols_mat(maker *k, sl_mat *dst, int layer, name_id id, int64_t n, int64_t kk, int64_t k0, int64_t k1) {
    layer_mat(k, dst, SL_ROLE_LINEAR, layer, id, n, kk, 0, n, k0, k1);
}

static void want_vec(maker *k, sl_vec *dst, sl_want_role role, int layer, const char *name, int64_t n, int64_t n0,
                     int64_t n1, int64_t count, int64_t e0, int64_t e1) {
    sl_want_item *it = add(k, role, layer);
    if (!it) return;
    it->vec = dst;
    it->n = n;
    it->n0 = n0;
    it->n1 = n1;
    it->count = count;
    it->e0 = e0;
    it->e1 = e1;
    snprintf(it->name, sizeof it->name, "%s", name);
    want_done(k, it);
}
static void layer_vec(maker *k, sl_vec *dst, sl_want_role role, int layer, const char *name, int64_t n, int64_t n0,
                      int64_t n1) {
    char full[160];
    layer_name(k, full, sizeof full, layer, name);
    want_vec(k, dst, role, layer, full, n, n0, n1, 1, 0, 1);
}
static void norm_vec(maker *k, sl_vec *dst, int layer, name_id id, int64_t n) {
    char name[96];
    snprintf(name, sizeof name, "%s.weight", layer_names[id][k->m->spec.from_gguf]);
    layer_vec(k, dst, SL_ROLE_NORM, layer, name, n, 0, n);
}
static void bias_vec(maker *k, sl_vec *dst, int layer, name_id id, int64_t n, int64_t n0, int64_t n1) {
    char name[96];
    snprintf(name, sizeof name, "%s.bias", layer_names[id][k->m->spec.from_gguf]);
    layer_vec(k, dst, SL_ROLE_BIAS, layer, name, n, n0, n1);
}

static void list_norms(maker *k, sl_layer_weights *L, int l) {
    const sl_spec *s = &k->m->spec;
    norm_vec(k, &L->attn_norm, l, N_ATTN_NORM, s->width);
    if (!s->sandwich_norms) {
        int alt = s->from_gguf && !strcmp(s->arch, "gpt-oss"); /* its converter calls the norm before the MLP so */
        norm_vec(k, &L->mlp_norm, l, alt ? N_POST_ATTN : N_MLP_NORM, s->width);
        return;
    }
    norm_vec(k, &L->post_attn_norm, l, N_POST_ATTN, s->width);
    norm_vec(k, &L->post_mlp_norm, l, N_POST_MLP, s->width);
    if (s->from_gguf)
        norm_vec(k, &L->mlp_norm, l, N_MLP_NORM, s->width);
    else
        layer_vec(k, &L->mlp_norm, SL_ROLE_NORM, l, "pre_feedforward_layernorm.weight", s->width, 0, s->width);
}

static void list_gqa(maker *k, sl_layer_weights *L, int l) {
    const sl_spec *s = &k->m->spec;
    const sl_model *m = k->m;
    int64_t H = s->width, hd = s->head_dim, nq = (int64_t)s->heads * hd, nkv = (int64_t)s->kv_heads * hd;
    int64_t q0 = (int64_t)m->rank * m->hq * hd, q1 = q0 + (int64_t)m->hq * hd;
    int64_t kvh = s->kv_heads >= m->tp ? (int64_t)m->rank * m->hkv : (int64_t)m->rank * s->kv_heads / m->tp,
            v0 = kvh * hd, v1 = v0 + (int64_t)m->hkv * hd;
    rows_mat(k, &L->q, l, N_Q, nq, H, q0, q1);
    rows_mat(k, &L->k, l, N_K, nkv, H, v0, v1);
    rows_mat(k, &L->v, l, N_V, nkv, H, v0, v1);
    cols_mat(k, &L->o, l, N_O, H, nq, q0, q1);
    if (s->qkv_bias) {
        bias_vec(k, &L->q_bias, l, N_Q, nq, q0, q1);
        bias_vec(k, &L->k_bias, l, N_K, nkv, v0, v1);
        bias_vec(k, &L->v_bias, l, N_V, nkv, v0, v1);
    }
    if (s->o_bias) { /* the ranks' outputs are summed, so one of them adds the bias */
        bias_vec(k, &L->o_bias, l, N_O, H, 0, H);
        if (m->rank && !k->fatal) {
            sl_want_item *it = &k->w->item[k->w->n - 1];
            if (it->load) k->w->bytes -= it->bytes;
            it->load = 0;
        }
    }
    if (s->qk_norm) {
        norm_vec(k, &L->q_norm, l, N_QN, hd);
        norm_vec(k, &L->k_norm, l, N_KN, hd);
    }
    if (s->sinks)
        layer_vec(k, &L->sinks, SL_ROLE_SINK, l, s->from_gguf ? "attn_sinks.weight" : "self_attn.sinks", s->heads,
                  (int64_t)m->rank * m->hq, (int64_t)(m->rank + 1) * m->hq);
}

static void list_mla(maker *k, sl_layer_weights *L, int l) {
    const sl_spec *s = &k->m->spec;
    const sl_model *m = k->m;
    int64_t H = s->width, dqk = s->nope_dim + s->rope_dim, dkv = s->nope_dim + s->v_dim, h0 = (int64_t)m->rank * m->hq,
            h1 = h0 + m->hq;
    if (s->q_lora) {
        rows_mat(k, &L->q_a, l, N_QA, s->q_lora, H, 0, s->q_lora);
        norm_vec(k, &L->q_a_norm, l, N_QAN, s->q_lora);
    }
    rows_mat(k, &L->q_b, l, s->q_lora ? N_QB : N_Q, s->heads * dqk, s->q_lora ? s->q_lora : H, h0 * dqk, h1 * dqk);
    rows_mat(k, &L->kv_a, l, N_KVA, s->kv_lora + s->rope_dim, H, 0, s->kv_lora + s->rope_dim);
    norm_vec(k, &L->kv_a_norm, l, N_KVAN, s->kv_lora);
    rows_mat(k, &L->kv_b, l, N_KVB, s->heads * dkv, s->kv_lora, h0 * dkv, h1 * dkv);
    cols_mat(k, &L->o, l, N_O, H, (int64_t)s->heads * s->v_dim, h0 * s->v_dim, h1 * s->v_dim);
}

static void list_mlp(maker *k, sl_layer_weights *L, int l, int64_t I, name_id gate) {
    const sl_model *m = k->m;
    int64_t H = m->spec.width, i0 = I / m->tp * m->rank, i1 = I / m->tp * (m->rank + 1);
    rows_mat(k, &L->gate, l, gate, I, H, i0, i1);
    rows_mat(k, &L->up, l, (name_id)(gate + 1), I, H, i0, i1);
    cols_mat(k, &L->down, l, (name_id)(gate + 2), H, I, i0, i1);
}

/* Experts: matrices [n, k] each; `rows` tells whether the TP slice is along n (gate, up) or k (down). */
static void expert_mat(maker *k, sl_mat *dst, int l, const char *name, int64_t n, int64_t kk, int rows) {
    const sl_model *m = k->m;
    sl_want_item *it = add(k, SL_ROLE_EXPERT, l);
    if (!it) return;
    int64_t E = m->spec.experts, cut = m->experts_ep ? 1 : m->tp, at = m->experts_ep ? 0 : m->rank;
    it->mat = dst;
    it->count = E;
    it->n = n;
    it->k = kk;
    it->e0 = m->experts_ep ? E / m->tp * m->rank : 0;
    it->e1 = m->experts_ep ? E / m->tp * (m->rank + 1) : E;
    it->n0 = rows ? n / cut * at : 0;
    it->n1 = rows ? n / cut * (at + 1) : n;
    it->k0 = rows ? 0 : kk / cut * at;
    it->k1 = rows ? kk : kk / cut * (at + 1);
    layer_name(k, it->name, sizeof it->name, l, name);
    want_done(k, it);
}
static void expert_bias(maker *k, sl_vec *dst, int l, const char *name, int64_t n, int sliced) {
    const sl_model *m = k->m;
    char full[160];
    int64_t E = m->spec.experts, cut = m->experts_ep || !sliced ? 1 : m->tp, at = cut == 1 ? 0 : m->rank;
    layer_name(k, full, sizeof full, l, name);
    want_vec(k, dst, SL_ROLE_BIAS, l, full, n, n / cut * at, n / cut * (at + 1), E,
             m->experts_ep ? E / m->tp * m->rank : 0, m->experts_ep ? E / m->tp * (m->rank + 1) : E);
}

static void list_moe(maker *k, sl_layer_weights *L, int l) {
    const sl_spec *s = &k->m->spec;
    const sl_model *m = k->m;
    int64_t H = s->width, I = s->moe_inter, E = s->experts;
    int g = s->from_gguf, oss = !strcmp(s->family, "gpt_oss");
    char name[160];
    L->moe = (sl_moe){.experts = s->experts,
                      .top_k = s->top_k,
                      .glu = s->glu,
                      .limit = s->glu_limit,
                      .gate_up_interleaved = s->gate_up_interleaved,
                      .bf16_accumulate = s->moe_bf16_accumulate,
                      .first = m->experts_ep ? s->experts / m->tp * m->rank : 0,
                      .local = m->experts_ep ? s->experts / m->tp : s->experts,
                      .bias_scale_rank0 = m->experts_ep || m->rank == 0};
    layer_name(k, name, sizeof name, l, oss && !g ? "mlp.router" : layer_names[N_ROUTER][g]);
    want_mat(k, &L->router, SL_ROLE_ROUTER, l, name, E, H, 0, E, 0, H);
    if (s->router.score == SL_SCORE_SIGMOID)
        layer_vec(k, &L->router_bias, SL_ROLE_BIAS, l, layer_names[N_ROUTER_SEL][g], E, 0, E);
    if (oss) layer_vec(k, &L->router_logit_bias, SL_ROLE_BIAS, l, g ? "ffn_gate_inp.bias" : "mlp.router.bias", E, 0, E);
    if (oss && !g) {
        expert_mat(k, &L->moe.gate, l, "mlp.experts.gate_up_proj", 2 * I, H, 1);
        expert_mat(k, &L->moe.down, l, "mlp.experts.down_proj", H, I, 0);
        expert_bias(k, &L->moe.gate_bias, l, "mlp.experts.gate_up_proj_bias", 2 * I, 1);
        expert_bias(k, &L->moe.down_bias, l, "mlp.experts.down_proj_bias", H, 0);
    } else {
        expert_mat(k, &L->moe.gate, l, layer_names[N_EGATE][g], I, H, 1);
        expert_mat(k, &L->moe.up, l, layer_names[N_EUP][g], I, H, 1);
        expert_mat(k, &L->moe.down, l, layer_names[N_EDOWN][g], H, I, 0);
        if (oss) {
            expert_bias(k, &L->moe.gate_bias, l, "ffn_gate_exps.bias", I, 1);
            expert_bias(k, &L->moe.up_bias, l, "ffn_up_exps.bias", I, 1);
            expert_bias(k, &L->moe.down_bias, l, "ffn_down_exps.bias", H, 0);
        }
    }
    if (s->shared_inter) list_mlp(k, L, l, s->shared_inter, N_SGATE);
}

static void list_all(maker *k) {
    sl_model *m = k->m;
    const sl_spec *s = &m->spec;
    char name[128];
    snprintf(name, sizeof name, s->from_gguf ? "token_embd" : "%sembed_tokens", k->base);
    want_mat(k, &m->embed, SL_ROLE_EMBED, -1, name, s->vocab, s->width, 0, s->vocab, 0, s->width);
    for (int l = 0; l < s->n_layers && !k->fatal; l++) {
        sl_layer_weights *L = &m->layer[l];
        list_norms(k, L, l);
        if (s->attn == SL_ATTN_MLA)
            list_mla(k, L, l);
        else
            list_gqa(k, L, l);
        if (s->layer[l].mlp == SL_MLP_MOE)
            list_moe(k, L, l);
        else
            list_mlp(k, L, l, s->inter, N_GATE);
    }
    int first = k->w->n;
    snprintf(name, sizeof name, s->from_gguf ? "output_norm.weight" : "%snorm.weight", k->base);
    want_vec(k, &m->final_norm, SL_ROLE_NORM, -1, name, s->width, 0, s->width, 1, 0, 1);
    if (!s->tied) {
        snprintf(name, sizeof name, s->from_gguf ? "output" : "%slm_head", k->head);
        want_mat(k, &m->lm_head, SL_ROLE_EMBED, -1, name, s->vocab, s->width, 0, s->vocab, 0, s->width);
    }
    for (int i = first; i < k->w->n && !k->o->want_head; i++) {
        k->w->item[i].load = 0;
        k->w->bytes -= k->w->item[i].bytes;
    }
}

/* ---- what nobody asked for ---- */

static const char *const skipped_prefix[] = {
    "vision_tower.",       "mm_projector.",
    "vision_model.",       "multi_modal_projector.",
    "model.vision_tower.", "model.multi_modal_projector.",
    "model.vision_model.", "mtp.",
};
static int may_skip(const maker *k, const sl_src_tensor *t) {
    const sl_spec *s = &k->m->spec;
    char name[256], layers[96];
    if (t->name_len >= (int)sizeof name) return 0;
    memcpy(name, t->name, (size_t)t->name_len);
    name[t->name_len] = 0;
    for (size_t i = 0; i < sizeof skipped_prefix / sizeof *skipped_prefix; i++)
        if (!strncmp(name, skipped_prefix[i], strlen(skipped_prefix[i]))) return 1;
    if (s->from_gguf) return !strcmp(name, "rope_freqs.weight");
    if (strstr(name, ".rotary_emb.inv_freq")) return 1; /* old checkpoints store what the configuration says anyway */
    if (s->tied && strlen(name) >= 14 && !strcmp(name + strlen(name) - 14, "lm_head.weight")) return 1;
    int n = snprintf(layers, sizeof layers, "%slayers.", k->base);
    if (!s->mtp_layers || strncmp(name, layers, (size_t)n) != 0 || !isdigit((unsigned char)name[n])) return 0;
    long l = strtol(name + n, NULL, 10);
    return l >= s->n_layers && l < s->n_layers + s->mtp_layers;
}

static void check_unexpected(maker *k) {
    for (uint64_t i = 0; i < k->src->n; i++) {
        const sl_src_tensor *t = &k->src->tensor[i];
        if (!t->asked && !may_skip(k, t))
            problem(k->p, "'%.*s' is unexpected", t->name_len > 150 ? 150 : t->name_len, t->name);
    }
    const char *q = k->m->spec.quant;
    if (!k->p->n && (!strcmp(q, "int4") || !strcmp(q, "fp8") || !strcmp(q, "mxfp4")) && !k->quantized)
        problem(k->p, "config.json declares %s weights, but no tensor is of that format", q);
}

/* ---- entry ---- */

static int set_shares(sl_model *m, const sl_load_opts *o, sl_err *err) {
    const sl_spec *s = &m->spec;
    int rc = sl_spec_check_tp(s, o->expert_split, m->tp, err);
    if (rc) return rc;
    if (m->rank < 0 || m->rank >= m->tp) return sl_err_set(err, SL_EINTERNAL, "rank %d of %d", m->rank, m->tp);
    m->hq = s->heads / m->tp;
    m->hkv = s->attn == SL_ATTN_MLA ? m->hq : s->kv_heads >= m->tp ? s->kv_heads / m->tp : 1;
    m->experts_ep = s->experts > 0 && (o->expert_split == SL_EXPERTS_EP ||
                                       (o->expert_split == SL_EXPERTS_AUTO && s->experts % m->tp == 0));
    return 0;
}

int sl_want_make(sl_want *w, sl_model *m, const sl_load_opts *o, sl_source *src, sl_err *err) {
    *w = (sl_want){0};
    int rc = set_shares(m, o, err);
    if (rc) return rc;
    problems *p = calloc(1, sizeof *p);
    if (!p) return sl_err_set(err, SL_ETEMP, "out of memory");
    maker k = {.w = w, .m = m, .o = o, .src = src, .p = p};
    find_base(&k);
    w->ep = m->experts_ep;
    list_all(&k);
    if (src && !k.fatal) check_unexpected(&k);
    if (k.fatal)
        rc = sl_err_set(err, SL_ETEMP, "out of memory for the list of weights");
    else if (p->n)
        rc = sl_err_set(err, SL_ECONFIG, "%s: %" PRIu64 " fault%s in the checkpoint: %s%s", o->model, p->n,
                        p->n > 1 ? "s" : "", p->text, p->shown < p->n ? "; ..." : "");
    for (int i = 0; i < w->n && src && !rc; i++)
        for (int q = 0; q < SL_PARTS; q++) w->item[i].part[q].src = w->src + w->item[i].part[q].src_at;
    free(p);
    if (rc) sl_want_free(w);
    return rc;
}

void sl_want_free(sl_want *w) {
    free(w->item);
    free(w->src);
    *w = (sl_want){0};
}
