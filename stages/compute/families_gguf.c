/* families_gguf: the spec from a GGUF's metadata. Keys are "ARCH.name"; a key that is not there has the default that
 * the converter omits it for. Differences from config.json that matter, each handled at its place below: the llama
 * architecture's q and k rows are stored for interleaved rope; llama3 scaling comes as a tensor of divisors; Gemma's
 * norm weights have the 1 added already; DeepSeek's MLA keys have an old and a new meaning. */
#include "stages/compute/families.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct meta {
    const sl_gguf *g;
    const char *arch;
    sl_err *err;
    int rc;
} meta;

static int fail(meta *m, const char *key, const char *found, const char *expected) {
    if (!m->rc)
        m->rc = sl_err_set(m->err, SL_ECONFIG, "%s: metadata %s.%s is %s; expected %s", sl_gguf_path(m->g, 0), m->arch,
                           key, found, expected);
    return m->rc;
}
static double num(meta *m, const char *key, double def) { /* def NAN: required */
    char full[160], found[32];
    double v = def, x;
    snprintf(full, sizeof full, "%s.%s", m->arch, key);
    int absent = sl_gguf_num(m->g, full, &v);
    if (absent && isnan(def)) fail(m, key, "missing", "a number");
    for (uint64_t i = 1, n = sl_gguf_arr_len(m->g, full); i < n; i++)
        if (sl_gguf_arr_num(m->g, full, i, &x) || x != v)
            fail(m, key, "a list of different values", "the same for every layer");
    if (!absent && !isfinite(v)) {
        snprintf(found, sizeof found, "%g", v);
        fail(m, key, found, "a finite number");
    }
    return isfinite(v) ? v : 1;
}
static int32_t i32(meta *m, const char *key, double def, int32_t max) {
    double v = num(m, key, def);
    char found[32], want[64];
    if (v >= (def == 0 ? 0 : 1) && v <= max && v == floor(v)) return (int32_t)v;
    snprintf(found, sizeof found, "%g", v);
    snprintf(want, sizeof want, "an integer from 1 to %d", max);
    fail(m, key, found, want);
    return 1;
}
static int str(meta *m, const char *key, char *out, size_t cap) {
    char full[160];
    sl_gguf_str s;
    snprintf(full, sizeof full, "%s.%s", m->arch, key);
    if (sl_gguf_string(m->g, full, &s)) return 0;
    snprintf(out, cap, "%.*s", (int)(s.n < cap ? s.n : cap - 1), s.s);
    return 1;
}

static void read_rope(meta *m, sl_spec *s) {
    sl_rope_spec *r = &s->rope[0];
    char type[32] = "none";
    *r = (sl_rope_spec){.theta = num(m, "rope.freq_base", 10000), .truncate = 1};
    double legacy = num(m, "rope.scale_linear", 1), dim = num(m, "rope.dimension_count", sl_spec_rope_dim(s));
    if (!(r->theta > 1)) fail(m, "rope.freq_base", "too small", "a number above 1");
    if (dim != sl_spec_rope_dim(s))
        fail(m, "rope.dimension_count", "not the size of a head",
             "the whole head: rotating a part of each head is not supported");
    str(m, "rope.scaling.type", type, sizeof type);
    r->factor = num(m, "rope.scaling.factor", legacy);
    if (!strcmp(type, "linear") || (!strcmp(type, "none") && r->factor != 1))
        r->scaling = r->factor == 1 ? SL_ROPESC_NONE : SL_ROPESC_LINEAR;
    else if (!strcmp(type, "yarn"))
        r->scaling = SL_ROPESC_YARN;
    else if (strcmp(type, "none") != 0)
        fail(m, "rope.scaling.type", type, "none, linear or yarn");
    if (!(r->factor > 0)) fail(m, "rope.scaling.factor", "not positive", "a number above 0");
    if (r->scaling != SL_ROPESC_YARN) return;
    r->orig_max = num(m, "rope.scaling.original_context_length", (double)s->max_pos);
    r->beta_fast = num(m, "rope.scaling.yarn_beta_fast", 32);
    r->beta_slow = num(m, "rope.scaling.yarn_beta_slow", 1);
    r->attention_factor = num(m, "rope.scaling.attn_factor", 0);
    if (r->attention_factor == 1) r->attention_factor = 0; /* 1 multiplies the derived factor there */
    if (!(r->orig_max > 0) || !(r->beta_fast > 0) || !(r->beta_slow > 0))
        fail(m, "rope.scaling", "damaged", "positive yarn parameters");
}

/* rope_freqs: divisors of the inverse frequencies (llama3 scaling is shipped so). */
static void read_divisors(meta *m, sl_spec *s) {
    const sl_gguf_tensor *t = sl_gguf_find(m->g, "rope_freqs.weight");
    if (!t || m->rc) return;
    uint64_t half = (uint64_t)sl_spec_rope_dim(s) / 2;
    if (t->type != 0 || t->ne[0] != half || t->bytes != half * 4) {
        m->rc = sl_err_set(m->err, SL_EDATA, "%s: tensor 'rope_freqs.weight' is not F32 [%" PRIu64 "]",
                           sl_gguf_path(m->g, 0), half);
        return;
    }
    s->rope_divide = malloc(half * sizeof(float));
    if (!s->rope_divide) {
        m->rc = sl_err_set(m->err, SL_ETEMP, "out of memory for rope divisors");
        return;
    }
    memcpy(s->rope_divide, sl_gguf_data(m->g, t), half * 4);
    for (uint64_t i = 0; i < half; i++)
        if (!(s->rope_divide[i] > 0) || !isfinite(s->rope_divide[i])) {
            m->rc =
                sl_err_set(m->err, SL_EDATA, "%s: 'rope_freqs.weight'[%" PRIu64 "] is %g; expected a positive number",
                           sl_gguf_path(m->g, 0), i, (double)s->rope_divide[i]);
            return;
        }
    s->rope[0].divide = s->rope_divide;
}

static void fill_common(meta *m, sl_spec *s) {
    s->n_layers = i32(m, "block_count", NAN, SL_MAX_LAYERS);
    s->width = i32(m, "embedding_length", NAN, 1 << 20);
    s->heads = i32(m, "attention.head_count", NAN, 1 << 16);
    s->inter = i32(m, "feed_forward_length", NAN, 1 << 24);
    s->eps = num(m, "attention.layer_norm_rms_epsilon", NAN);
    s->max_pos = i32(m, "context_length", NAN, 1 << 30);
    uint64_t tokens = sl_gguf_arr_len(m->g, "tokenizer.ggml.tokens");
    const sl_gguf_tensor *e = sl_gguf_find(m->g, "token_embd.weight");
    if (tokens == 0 && e) tokens = e->ne[1];
    s->vocab = i32(m, "vocab_size", tokens ? (double)tokens : NAN, 1 << 24);
    if (e && e->n_dims == 2 && e->ne[1] > 0 && e->ne[1] <= 1 << 24)
        s->vocab = (int32_t)e->ne[1]; /* some files pad one of the two */
    s->tied = !sl_gguf_find(m->g, "output.weight");
    s->embed_scale = 1;
    s->glu = SL_GLU_SILU;
    s->norm = SL_NORM_LLAMA;
    s->rope_kind = SL_ROPE_HALF;
}
static void fill_gqa(meta *m, sl_spec *s) {
    s->attn = SL_ATTN_GQA;
    s->kv_heads = i32(m, "attention.head_count_kv", s->heads, 1 << 16);
    s->head_dim = i32(m, "attention.key_length", s->width / s->heads > 0 ? s->width / s->heads : 1, 1 << 16);
    if (num(m, "attention.value_length", s->head_dim) != s->head_dim)
        fail(m, "attention.value_length", "not key_length", "the same as key_length");
    s->attn_scale = (float)(1 / sqrt(s->head_dim));
    read_rope(m, s);
    read_divisors(m, s);
}
static void fill_experts(meta *m, sl_spec *s) {
    s->experts = i32(m, "expert_count", NAN, 65536);
    s->top_k = i32(m, "expert_used_count", NAN, 65536);
    s->moe_inter = i32(m, "expert_feed_forward_length", s->inter, 1 << 24);
    s->router = (sl_router){.experts = s->experts, .top_k = s->top_k, .n_group = 1, .topk_group = 1, .scale = 1};
}
static void set_moe(sl_spec *s, int32_t first) {
    for (int32_t i = 0; i < s->n_layers; i++) s->layer[i].mlp = i >= first ? SL_MLP_MOE : SL_MLP_DENSE;
}

static void fill_llama(meta *m, sl_spec *s) {
    fill_common(m, s);
    fill_gqa(m, s);
    s->rope_kind =
        SL_ROPE_INTERLEAVED; /* the converter reordered the rows of q and k for it: row 2i, 2i+1 = halves' row i */
    if (num(m, "expert_count", 0) != 0) fail(m, "expert_count", "set", "a dense model: Mixtral is not supported");
    if (num(m, "attention.sliding_window", 0) != 0)
        fail(m, "attention.sliding_window", "set", "no sliding window in this architecture");
}
static void fill_qwen2(meta *m, sl_spec *s) {
    fill_common(m, s);
    fill_gqa(m, s);
    s->qkv_bias = 1;
}
static void fill_qwen3(meta *m, sl_spec *s) {
    fill_common(m, s);
    fill_gqa(m, s);
    s->qk_norm = 1;
}
static void fill_qwen3moe(meta *m, sl_spec *s) {
    fill_qwen3(m, s);
    fill_experts(m, s);
    set_moe(s, 0);
    s->moe_bf16_accumulate = 1;
    s->router.score = SL_SCORE_SOFTMAX;
    s->router.renorm = s->router.bf16_logits = s->router.bf16_weights = 1;
}

static void fill_deepseek2_attention(meta *m, sl_spec *s) {
    s->attn = SL_ATTN_MLA;
    s->kv_heads = s->heads;
    s->q_lora = i32(m, "attention.q_lora_rank", 0, 1 << 20);
    s->kv_lora = i32(m, "attention.kv_lora_rank", NAN, 1 << 20);
    s->rope_dim = i32(m, "rope.dimension_count", NAN, 1 << 16);
    /* Newer files store the shapes of the absorbed form under the plain names and the true ones under *_mla. */
    int32_t dqk = i32(m, "attention.key_length_mla", num(m, "attention.key_length", NAN), 1 << 16);
    s->v_dim = i32(m, "attention.value_length_mla", num(m, "attention.value_length", NAN), 1 << 16);
    s->nope_dim = dqk - s->rope_dim;
    s->head_dim = dqk;
    if (s->nope_dim < 1)
        fail(m, "attention.key_length", "not larger than rope.dimension_count", "nope + rope elements a head");
    s->rope_kind = SL_ROPE_INTERLEAVED;
    if (!m->rc) read_rope(m, s);
    sl_rope_spec *r = &s->rope[0];
    r->mscale = r->mscale_all_dim = 10 * num(m, "rope.scaling.yarn_log_multiplier", 0);
    double f = r->scaling == SL_ROPESC_YARN && r->mscale_all_dim != 0 && r->factor > 1
                   ? 0.1 * r->mscale_all_dim * log(r->factor) + 1
                   : 1;
    s->attn_scale = (float)(f * f / sqrt(dqk));
}
static void fill_deepseek2(meta *m, sl_spec *s) {
    fill_common(m, s);
    fill_deepseek2_attention(m, s);
    fill_experts(m, s);
    s->shared_inter = s->moe_inter * i32(m, "expert_shared_count", 0, 64);
    set_moe(s, i32(m, "leading_dense_block_count", 0, SL_MAX_LAYERS));
    sl_router *r = &s->router;
    int gating = i32(m, "expert_gating_func", 1, 2);
    r->score = gating == 2 ? SL_SCORE_SIGMOID : SL_SCORE_SOFTMAX;
    r->group_score_top2 = gating == 2;
    r->scale = (float)num(m, "expert_weights_scale", 1);
    r->renorm = num(m, "expert_weights_norm", 0) != 0;
    r->n_group = i32(m, "expert_group_count", 1, 65536);
    r->topk_group = i32(m, "expert_group_used_count", 1, 65536);
    if (gating == 1 && r->renorm) fail(m, "expert_weights_norm", "true", "false with softmax gating");
    /* DeepSeek-V2 (160 experts) and V3/R1 (256) route by groups; files from before these keys existed do not say so. */
    if (r->n_group == 1 && (s->experts == 160 || s->experts == 256))
        fail(m, "expert_group_count", "missing",
             "the routing groups of this model; the file is from an old converter, convert it again");
}
static void fill_gpt_oss(meta *m, sl_spec *s) {
    fill_common(m, s);
    fill_gqa(m, s);
    s->rope[0].truncate = 0; /* a property of the family; the metadata has no key for it */
    s->norm = SL_NORM_F32;
    s->qkv_bias = s->o_bias = s->sinks = 1;
    int32_t window = i32(m, "attention.sliding_window", NAN, 1 << 30);
    for (int32_t i = 0; i < s->n_layers; i++) s->layer[i].window = i % 2 == 0 ? window : 0;
    fill_experts(m, s);
    set_moe(s, 0);
    s->glu = SL_GLU_CLAMP;
    s->glu_limit = 7;
    s->moe_biases = 1;
    s->router.score = SL_SCORE_SOFTMAX_TOPK;
}
static void fill_gemma3(meta *m, sl_spec *s) {
    fill_common(m, s);
    fill_gqa(m, s);
    if (num(m, "final_logit_softcapping", 0) != 0) fail(m, "final_logit_softcapping", "set", "none");
    s->norm = SL_NORM_F32; /* the converter added the 1 of (1 + w) to the weights */
    s->glu = SL_GLU_GELU;
    s->qk_norm = s->sandwich_norms = 1;
    s->embed_scale = (float)sqrt(s->width);
    /* Only the 27B model, known by its 62 layers, scales by width / heads instead of the head size. */
    if (s->n_layers == 62) s->attn_scale = (float)(1 / sqrt((double)s->width / s->heads));
    s->rope[1] = (sl_rope_spec){.theta = num(m, "rope.freq_base_swa", 10000), .truncate = 1};
    if (!(s->rope[1].theta > 1)) fail(m, "rope.freq_base_swa", "too small", "a number above 1");
    int32_t window = i32(m, "attention.sliding_window", NAN, 1 << 30);
    /* One number, or a flag for each layer; without either every sixth layer is global. */
    const char *key = "gemma3.attention.sliding_window_pattern";
    int listed = sl_gguf_arr_len(m->g, key) == (uint64_t)s->n_layers;
    int32_t pattern = listed ? 1 : i32(m, "attention.sliding_window_pattern", 6, SL_MAX_LAYERS);
    for (int32_t i = 0; i < s->n_layers; i++) {
        double flag = 0;
        int local = listed ? !sl_gguf_arr_num(m->g, key, (uint64_t)i, &flag) && flag != 0 : (i + 1) % pattern != 0;
        s->layer[i].window = local ? window : 0;
        s->layer[i].rope = local;
    }
}

static const struct {
    const char *arch, *family;
    void (*fill)(meta *m, sl_spec *s);
} archs[] = {
    {"llama", "llama", fill_llama},
    {"qwen2", "qwen2", fill_qwen2},
    {"qwen3", "qwen3", fill_qwen3},
    {"qwen3moe", "qwen3_moe", fill_qwen3moe},
    {"deepseek2", "deepseek_v3", fill_deepseek2},
    {"gpt-oss", "gpt_oss", fill_gpt_oss},
    {"gemma3", "gemma3", fill_gemma3},
};

static int ends_with(sl_gguf_str s, const char *tail) {
    size_t n = strlen(tail);
    return s.n >= n && !memcmp(s.s + s.n - n, tail, n);
}
static void widen(int32_t *block, uint32_t type) {
    int32_t b = (int32_t)sl_ggml_block_elems(type);
    if (b > *block) *block = b;
}
/* k-sliced matrices can be cut at the blocks of the coarsest type that any layer uses. */
static void set_blocks(sl_spec *s, const sl_gguf *g) {
    s->k_block_attn = s->k_block_mlp = s->k_block_moe = 1;
    for (uint64_t i = 0; i < sl_gguf_n_tensors(g); i++) {
        const sl_gguf_tensor *t = sl_gguf_tensor_at(g, i);
        if (ends_with(t->name, ".attn_output.weight"))
            widen(&s->k_block_attn, t->type);
        else if (ends_with(t->name, ".ffn_down.weight") || ends_with(t->name, ".ffn_down_shexp.weight"))
            widen(&s->k_block_mlp, t->type);
        else if (ends_with(t->name, ".ffn_down_exps.weight"))
            widen(&s->k_block_moe, t->type);
    }
}

int sl_families_gguf(sl_spec *s, const sl_gguf *g, double eps_lora, sl_err *err) {
    sl_gguf_str arch = {"", 0};
    char name[64], list[200];
    size_t at = 0, i = 0, n = sizeof archs / sizeof *archs;
    memset(s, 0, sizeof *s);
    sl_gguf_string(g, "general.architecture", &arch);
    snprintf(name, sizeof name, "%.*s", (int)(arch.n < 60 ? arch.n : 60), arch.s);
    while (i < n && strcmp(archs[i].arch, name) != 0) i++;
    if (i == n) {
        for (i = 0; i < n; i++)
            at += (size_t)snprintf(list + at, sizeof list - at, "%s%s", i ? ", " : "", archs[i].arch);
        return sl_err_set(err, SL_ECONFIG, "%s: architecture '%s' is not supported; supported in GGUF files: %s",
                          sl_gguf_path(g, 0), *name ? name : "(none)", list);
    }
    meta m = {g, name, err, 0};
    s->from_gguf = 1;
    s->eps_lora = eps_lora > 0 ? eps_lora : 1e-6;
    snprintf(s->family, sizeof s->family, "%s", archs[i].family);
    snprintf(s->arch, sizeof s->arch, "%s", name);
    snprintf(s->quant, sizeof s->quant, "gguf");
    archs[i].fill(&m, s);
    if (!m.rc && s->router.score == SL_SCORE_SOFTMAX && !strcmp(name, "deepseek2"))
        snprintf(s->family, sizeof s->family, "deepseek_v2");
    set_blocks(s, g);
    if (!m.rc && !(s->eps > 0)) fail(&m, "attention.layer_norm_rms_epsilon", "not positive", "a small positive number");
    if (!m.rc) m.rc = sl_families_check(s, sl_gguf_path(g, 0), err);
    if (m.rc) sl_spec_free(s);
    return m.rc;
}
