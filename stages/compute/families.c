#include "stages/compute/families.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAX_ASKED 192

/* One JSON object being read. The first error sticks and later getters return their defaults, so that a family's fill
 * function is a plain list. Every key that was asked for is remembered: the rest is judged by check_rest. */
typedef struct cfg {
    json_t *o;
    const char *file, *where; /* "config.json", "" or "text_config." */
    sl_err *err;
    int rc;
    const char *asked[MAX_ASKED];
    int n_asked;
} cfg;

#define REQUIRED INT64_MIN

static int fail(cfg *c, const char *key, const char *found, const char *expected) {
    if (!c->rc)
        c->rc = sl_err_set(c->err, SL_ECONFIG, "%s: %s%s is %s; expected %s", c->file, c->where, key, found, expected);
    return c->rc;
}
static int fail_value(cfg *c, const char *key, const json_t *v, const char *expected) {
    char *text = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT);
    char found[160];
    snprintf(found, sizeof found, "%.150s", text ? text : "?");
    free(text);
    return fail(c, key, found, expected);
}

/* The value, or NULL when absent or null. */
static json_t *get(cfg *c, const char *key) {
    int i = 0;
    while (i < c->n_asked && strcmp(c->asked[i], key) != 0) i++;
    if (i == c->n_asked && i < MAX_ASKED) c->asked[c->n_asked++] = key;
    json_t *v = json_object_get(c->o, key);
    return json_is_null(v) ? NULL : v;
}

static int64_t get_int(cfg *c, const char *key, int64_t def, int64_t min, int64_t max) {
    json_t *v = get(c, key);
    char want[96];
    snprintf(want, sizeof want, "an integer from %" PRId64 " to %" PRId64, min, max);
    if (!v) {
        if (def == REQUIRED) fail(c, key, "missing", want);
        return def == REQUIRED ? min : def;
    }
    double x = json_is_number(v) ? json_number_value(v) : NAN;
    if (!(x >= (double)min && x <= (double)max) || x != floor(x)) {
        fail_value(c, key, v, want);
        return min;
    }
    return (int64_t)x;
}
static int32_t get_i32(cfg *c, const char *key, int64_t def, int64_t max) {
    return (int32_t)get_int(c, key, def, 1, max);
}

/* A finite number above `above`; def NAN = required. */
static double get_num(cfg *c, const char *key, double def, double above) {
    json_t *v = get(c, key);
    if (!v) {
        if (isnan(def)) fail(c, key, "missing", "a number");
        return isnan(def) ? 1 : def;
    }
    double x = json_is_number(v) ? json_number_value(v) : NAN;
    if (!isfinite(x) || x <= above) {
        char want[64];
        snprintf(want, sizeof want, "a number above %g", above);
        fail_value(c, key, v, want);
        return 1;
    }
    return x;
}
static int get_bool(cfg *c, const char *key, int def) {
    json_t *v = get(c, key);
    if (v && !json_is_boolean(v)) fail_value(c, key, v, "true or false");
    return v ? json_is_true(v) : def;
}
static const char *get_str(cfg *c, const char *key, const char *def) {
    json_t *v = get(c, key);
    if (v && !json_is_string(v)) fail_value(c, key, v, "a string");
    return json_is_string(v) ? json_string_value(v) : def;
}
static void only(cfg *c, const char *key, const char *value, const char *supported) {
    if (value && strcmp(value, supported) != 0) {
        char want[200], found[200];
        snprintf(found, sizeof found, "\"%.150s\"", value);
        snprintf(want, sizeof want, "\"%s\", the only one that is supported for this family", supported);
        fail(c, key, found, want);
    }
}

/* ---- keys that no family reads ---- */

static const char *const ignored[] = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "add_cross_attention",
    "architectures",
    "attention_dropout",
    "attn_implementation",
    "attn_pdrop",
    "auto_map",
    "aux_loss_alpha",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "embd_pdrop",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "ep_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "hidden_dropout",
    "hidden_dropout_prob",
    "id2label",
    "initial_context_length",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "is_llama_config",
    "label2id",
    "length_penalty",
    "max_length",
    "max_window_layers",
    "min_length",
    "model_max_length",
    "model_type",
    "name_or_path",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "pruned_heads",
    "remove_invalid_values",
    "repetition_penalty",
    "resid_pdrop",
    "return_dict",
    "return_dict_in_generate",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "sep_token_id",
    "seq_aux",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
};

/* Keys that change the math, with the one value (besides null) at which they do not. */
static const struct {
    const char *key;
    double neutral; /* NAN: none; true/false count as 1/0 */
    const char *what;
} refused[] = {
    {"index_topk", NAN, "sparse attention with an indexer (DeepSeek V3.2)"},
    {"index_n_heads", NAN, "sparse attention with an indexer (DeepSeek V3.2)"},
    {"index_head_dim", NAN, "sparse attention with an indexer (DeepSeek V3.2)"},
    {"attn_logit_softcapping", 0, "soft-capped attention logits"},
    {"final_logit_softcapping", 0, "soft-capped output logits"},
    {"use_sliding_window", 0, "sliding windows in this family"},
    {"mlp_bias", 0, "biases in the MLP"},
    {"attention_bias", 0, "attention biases in this family"},
    {"partial_rotary_factor", 1, "rotating a part of each head"},
    {"rotary_pct", 1, "rotating a part of each head"},
    {"rope_interleaved", 0, "interleaved rotation in this family"},
    {"use_bidirectional_attention", 0, "attention to later tokens"},
    {"attention_chunk_size", 0, "chunked attention"},
    {"no_rope_layers", NAN, "layers without rope"},
    {"no_rope_layer_interval", NAN, "layers without rope"},
    {"dual_chunk_attention_config", NAN, "dual chunk attention"},
    {"logit_scale", 1, "scaled logits"},
    {"logits_scaling", 1, "scaled logits"},
    {"residual_multiplier", 1, "a scaled residual"},
    {"embedding_multiplier", 1, "a scaled embedding in this family"},
    {"attention_multiplier", NAN, "a given attention scale"},
    {"clip_qkv", NAN, "clipped q, k, v"},
    {"alibi", 0, "alibi positions"},
    {"use_mrope", 0, "rope over several axes"},
    {"use_qk_norm", 0, "q/k norms in this family"},
    {"qk_layernorm", 0, "q/k norms in this family"},
    {"use_parallel_residual", 0, "parallel residuals"},
    {"num_local_experts", 0, "experts in this family"},
    {"num_experts", 0, "experts in this family"},
    {"n_routed_experts", 0, "experts in this family"},
    {"shared_expert_intermediate_size", 0, "a gated shared expert"},
    {"layer_types", NAN, "mixed layer types in this family"},
    {"sliding_window", 0, "sliding windows in this family"},
    {"rope_local_base_freq", NAN, "a second rope in this family"},
    {"query_pre_attn_scalar", NAN, "a given attention scale in this family"},
};

static unsigned distance(const char *a, const char *b) { /* edit distance, capped at 3; swaps of neighbours count 1 */
    size_t n = strlen(a), m = strlen(b);
    if (n > 63 || m > 63 || n > m + 2 || m > n + 2) return 3;
    unsigned char d[65][65];
    for (size_t i = 0; i <= n; i++) d[i][0] = (unsigned char)i;
    for (size_t j = 0; j <= m; j++) d[0][j] = (unsigned char)j;
    for (size_t i = 1; i <= n; i++)
        for (size_t j = 1; j <= m; j++) {
            unsigned v = d[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
            if (d[i - 1][j] + 1u < v) v = d[i - 1][j] + 1u;
            if (d[i][j - 1] + 1u < v) v = d[i][j - 1] + 1u;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && d[i - 2][j - 2] + 1u < v)
                v = d[i - 2][j - 2] + 1u;
            d[i][j] = (unsigned char)v;
        }
    return d[n][m] > 3 ? 3 : d[n][m];
}

static void check_refused(cfg *c, const char *key, const json_t *v) {
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        if (strcmp(refused[i].key, key) != 0) continue;
        double x = json_is_boolean(v) ? json_is_true(v) : json_is_number(v) ? json_number_value(v) : NAN;
        if (json_is_null(v) || (!isnan(refused[i].neutral) && x == refused[i].neutral)) return;
        char want[200];
        snprintf(want, sizeof want, "nothing there: %s is not supported", refused[i].what);
        fail_value(c, key, v, want);
    }
}

/* Judge the keys that the family did not ask for. */
static void check_rest(cfg *c, sl_spec *s) {
    const char *key;
    json_t *v;
    json_object_foreach(c->o, key, v) {
        int known = 0;
        for (int i = 0; i < c->n_asked && !known; i++) known = !strcmp(c->asked[i], key);
        if (known) continue;
        check_refused(c, key, v);
        for (size_t i = 0; i < sizeof ignored / sizeof *ignored && !known; i++) known = !strcmp(ignored[i], key);
        for (size_t i = 0; i < sizeof refused / sizeof *refused && !known; i++) known = !strcmp(refused[i].key, key);
        if (known || c->rc) continue;
        for (int i = 0; i < c->n_asked && strlen(key) > 4; i++)
            if (distance(key, c->asked[i]) <= 2 && !json_object_get(c->o, c->asked[i])) {
                c->rc = sl_err_set(c->err, SL_ECONFIG,
                                   "%s: %s%.80s is not a known key; did you mean '%s', which is not there?", c->file,
                                   c->where, key, c->asked[i]);
                return;
            }
        size_t at = strlen(s->unknown);
        if (at + strlen(c->where) + strlen(key) + 3 < sizeof s->unknown)
            snprintf(s->unknown + at, sizeof s->unknown - at, "%s%s%s", at ? ", " : "", c->where, key);
    }
}

/* ---- rope: {rope_theta, rope_scaling} or rope_parameters ---- */

static void read_rope_object(cfg *parent, json_t *o, const char *name, double theta, int64_t max_pos, sl_rope_spec *r) {
    char where[96];
    snprintf(where, sizeof where, "%s%s.", parent->where, name);
    cfg c = {.o = o, .file = parent->file, .where = where, .err = parent->err, .rc = parent->rc};
    if (!json_is_object(o)) fail_value(parent, name, o, "an object");
    if (parent->rc) return;
    r->theta = get_num(&c, "rope_theta", theta, 1);
    const char *type = get_str(&c, "rope_type", NULL), *old = get_str(&c, "type", NULL);
    if (type && old && strcmp(type, old) != 0) fail(&c, "type", old, "the same as rope_type");
    if (!type) type = old ? old : "default";
    r->truncate = 1;
    if (get_num(&c, "partial_rotary_factor", 1, 0) != 1)
        fail(&c, "partial_rotary_factor", "not 1", "1: rotating a part of each head is not supported");
    if (!strcmp(type, "default"))
        r->scaling = SL_ROPESC_NONE;
    else if (!strcmp(type, "linear"))
        r->scaling = SL_ROPESC_LINEAR;
    else if (!strcmp(type, "llama3"))
        r->scaling = SL_ROPESC_LLAMA3;
    else if (!strcmp(type, "yarn"))
        r->scaling = SL_ROPESC_YARN;
    else
        fail(&c, "rope_type", type, "default, linear, llama3 or yarn: other kinds of rope are not supported");
    if (r->scaling != SL_ROPESC_NONE)
        r->factor = get_num(&c, "factor", NAN, 0);
    else
        get(&c, "factor");
    if (r->scaling == SL_ROPESC_LLAMA3) {
        r->low_freq = get_num(&c, "low_freq_factor", NAN, 0);
        r->high_freq = get_num(&c, "high_freq_factor", NAN, r->low_freq);
        r->orig_max = get_num(&c, "original_max_position_embeddings", NAN, 0);
    }
    if (r->scaling == SL_ROPESC_YARN) {
        r->orig_max = get_num(&c, "original_max_position_embeddings", (double)max_pos, 0);
        r->beta_fast = get_num(&c, "beta_fast", 32, 0);
        r->beta_slow = get_num(&c, "beta_slow", 1, 0);
        r->mscale = get_num(&c, "mscale", 0, -1e-30);
        r->mscale_all_dim = get_num(&c, "mscale_all_dim", 0, -1e-30);
        r->attention_factor = get_num(&c, "attention_factor", 0, 0);
        r->truncate = get_bool(&c, "truncate", 1);
    }
    const char *key;
    json_t *v;
    json_object_foreach(o, key, v) {
        int known = json_is_null(v);
        for (int i = 0; i < c.n_asked && !known; i++) known = !strcmp(c.asked[i], key);
        if (!known) fail_value(&c, key, v, "nothing there: this key of a rope of this type is not understood");
    }
    parent->rc = c.rc;
}

static void read_rope(cfg *c, sl_spec *s, sl_rope_spec *r, double default_theta) {
    json_t *p = get(c, "rope_parameters"), *sc = get(c, "rope_scaling");
    double theta = get_num(c, "rope_theta", default_theta, 1);
    *r = (sl_rope_spec){.theta = theta, .truncate = 1};
    if (p)
        read_rope_object(c, p, "rope_parameters", theta, s->max_pos, r);
    else if (sc)
        read_rope_object(c, sc, "rope_scaling", theta, s->max_pos, r);
}

/* ---- layer types ---- */

/* layer_types when given: "full_attention" or "sliding_attention" for each layer. Returns whether it is there. */
static int read_layer_types(cfg *c, sl_spec *s, int32_t window, int local_rope) {
    json_t *v = get(c, "layer_types");
    if (!v || c->rc) return 0;
    if (!json_is_array(v) || json_array_size(v) != (size_t)s->n_layers) {
        fail(c, "layer_types", "not a list of one entry a layer",
             "\"full_attention\" or \"sliding_attention\" for each layer");
        return 1;
    }
    for (int32_t i = 0; i < s->n_layers; i++) {
        const char *t = json_string_value(json_array_get(v, (size_t)i));
        int sliding = t && !strcmp(t, "sliding_attention");
        if (!sliding && !(t && !strcmp(t, "full_attention"))) {
            fail_value(c, "layer_types", json_array_get(v, (size_t)i),
                       "\"full_attention\" or \"sliding_attention\" for each layer");
            return 1;
        }
        if (sliding && window <= 0) fail(c, "layer_types", "sliding", "full attention: no sliding_window is given");
        s->layer[i].window = sliding ? window : 0;
        s->layer[i].rope = sliding ? local_rope : 0;
    }
    return 1;
}

/* ---- quantization ---- */

static void read_int4(cfg *c, sl_spec *s) {
    only(c, "format", get_str(c, "format", "pack-quantized"), "pack-quantized");
    if (get(c, "kv_cache_scheme")) fail(c, "kv_cache_scheme", "set", "null: a quantized cache is not supported");
    json_t *groups = get(c, "config_groups");
    const char *name;
    json_t *g;
    if (!json_is_object(groups) || json_object_size(groups) != 1) {
        fail(c, "config_groups", "not one group", "exactly one group of weights");
        return;
    }
    json_object_foreach(groups, name, g) {
        cfg w = {.o = json_object_get(g, "weights"),
                 .file = c->file,
                 .where = "config_groups.weights.",
                 .err = c->err,
                 .rc = c->rc};
        if (!json_is_object(w.o)) {
            fail(c, "config_groups.weights", "missing", "an object");
            return;
        }
        json_t *act = json_object_get(g, "input_activations");
        if (act && !json_is_null(act))
            fail(c, "input_activations", "set", "null: quantized activations are not supported");
        if (get_int(&w, "num_bits", REQUIRED, 1, 64) != 4) fail(&w, "num_bits", "not 4", "4");
        only(&w, "type", get_str(&w, "type", "int"), "int");
        s->quant_symmetric = get_bool(&w, "symmetric", 1);
        const char *order = get_str(&w, "actorder", NULL), *strategy = get_str(&w, "strategy", "group");
        if (order && strcmp(order, "weight") != 0)
            fail(&w, "actorder", order, "null or \"weight\": reordered groups are not supported");
        if (!strcmp(strategy, "channel"))
            s->quant_group = -1;
        else {
            only(&w, "strategy", strategy, "group");
            s->quant_group = (int32_t)get_int(&w, "group_size", REQUIRED, 8, 65536);
            if (s->quant_group % 8) fail(&w, "group_size", "not a multiple of 8", "a multiple of 8");
        }
        c->rc = w.rc;
    }
    snprintf(s->quant, sizeof s->quant, "int4");
}

static void read_fp8(cfg *c, sl_spec *s) {
    json_t *b = get(c, "weight_block_size");
    only(c, "fmt", get_str(c, "fmt", "e4m3"), "e4m3");
    if (!json_is_array(b) || json_array_size(b) != 2 || json_integer_value(json_array_get(b, 0)) != 128 ||
        json_integer_value(json_array_get(b, 1)) != 128)
        fail(c, "weight_block_size", b ? "another size" : "missing", "[128, 128]");
    s->fp8_block = 128;
    snprintf(s->quant, sizeof s->quant, "fp8");
}

static void read_quantization(cfg *parent, json_t *o, sl_spec *s) {
    if (!o || parent->rc) return;
    cfg c = {.o = o, .file = parent->file, .where = "quantization_config.", .err = parent->err};
    if (!json_is_object(o)) fail_value(parent, "quantization_config", o, "an object");
    if (parent->rc) return;
    const char *m = get_str(&c, "quant_method", "");
    if (!strcmp(m, "compressed-tensors"))
        read_int4(&c, s);
    else if (!strcmp(m, "fp8"))
        read_fp8(&c, s);
    else if (!strcmp(m, "mxfp4"))
        snprintf(s->quant, sizeof s->quant, "mxfp4");
    else
        fail(&c, "quant_method", *m ? m : "missing", "compressed-tensors (pack-quantized INT4), fp8 or mxfp4");
    parent->rc = c.rc;
}

/* ---- fields that most families share ---- */

static void fill_common(cfg *c, sl_spec *s, double eps_default) {
    s->n_layers = get_i32(c, "num_hidden_layers", REQUIRED, SL_MAX_LAYERS);
    s->width = get_i32(c, "hidden_size", REQUIRED, 1 << 20);
    s->vocab = get_i32(c, "vocab_size", s->vocab ? s->vocab : REQUIRED, 1 << 24);
    s->heads = get_i32(c, "num_attention_heads", s->heads ? s->heads : REQUIRED, 1 << 16);
    s->inter = get_i32(c, "intermediate_size", REQUIRED, 1 << 24);
    s->eps = get_num(c, "rms_norm_eps", eps_default, 0);
    s->max_pos = get_int(c, "max_position_embeddings", s->max_pos ? s->max_pos : REQUIRED, 1, INT64_C(1) << 40);
    s->tied = get_bool(c, "tie_word_embeddings", s->tied);
    s->embed_scale = 1;
    s->glu = SL_GLU_SILU;
    s->norm = SL_NORM_LLAMA;
    s->rope_kind = SL_ROPE_HALF;
    only(c, "hidden_act", get_str(c, "hidden_act", NULL), "silu");
}
static void fill_gqa(cfg *c, sl_spec *s) {
    s->attn = SL_ATTN_GQA;
    s->kv_heads = get_i32(c, "num_key_value_heads", s->kv_heads ? s->kv_heads : s->heads, 1 << 16);
    s->head_dim =
        get_i32(c, "head_dim", s->head_dim ? s->head_dim : (s->width / s->heads ? s->width / s->heads : 1), 1 << 16);
    s->attn_scale = (float)(1 / sqrt(s->head_dim));
}

static void fill_llama(cfg *c, sl_spec *s) {
    fill_common(c, s, NAN);
    fill_gqa(c, s);
    s->qkv_bias = s->o_bias = get_bool(c, "attention_bias", 0);
    read_rope(c, s, &s->rope[0], 10000);
}
static void fill_mistral(cfg *c, sl_spec *s) {
    fill_common(c, s, NAN);
    fill_gqa(c, s);
    int32_t window = (int32_t)get_int(c, "sliding_window", 0, 0, 1 << 30);
    for (int32_t i = 0; i < s->n_layers; i++) s->layer[i].window = window;
    read_layer_types(c, s, window, 0);
    read_rope(c, s, &s->rope[0], 10000);
}
static void fill_qwen(cfg *c, sl_spec *s) {
    fill_common(c, s, NAN);
    fill_gqa(c, s);
    if (!get_bool(c, "use_sliding_window", 0))
        get(c, "sliding_window"); /* no effect then */
    else
        fail(c, "use_sliding_window", "true", "false: sliding windows in this family are not supported");
    read_layer_types(c, s, 0, 0);
    read_rope(c, s, &s->rope[0], 10000);
}
static void fill_qwen2(cfg *c, sl_spec *s) {
    fill_qwen(c, s);
    s->qkv_bias = 1;
}
static void fill_qwen3(cfg *c, sl_spec *s) {
    if (!s->head_dim) s->head_dim = 128; /* the family's own default, not width / heads */
    fill_qwen(c, s);
    s->qk_norm = 1;
}

static void set_moe(sl_spec *s, int32_t first, int32_t freq) {
    for (int32_t i = 0; i < s->n_layers; i++) s->layer[i].mlp = i >= first && i % freq == 0 ? SL_MLP_MOE : SL_MLP_DENSE;
}

static void fill_qwen3_moe(cfg *c, sl_spec *s) {
    fill_qwen3(c, s);
    json_t *dense = get(c, "mlp_only_layers");
    int64_t step = get_int(c, "decoder_sparse_step", 1, 1, SL_MAX_LAYERS);
    const char *key = get(c, "num_experts") ? "num_experts" : "num_local_experts"; /* the name since transformers 5 */
    s->experts = get_i32(c, key, REQUIRED, 65536);
    s->top_k = get_i32(c, "num_experts_per_tok", REQUIRED, s->experts);
    s->moe_inter = get_i32(c, "moe_intermediate_size", REQUIRED, 1 << 24);
    for (int32_t i = 0; i < s->n_layers; i++) s->layer[i].mlp = (i + 1) % step == 0 ? SL_MLP_MOE : SL_MLP_DENSE;
    for (size_t i = 0; dense && i < json_array_size(dense); i++) {
        json_int_t l = json_is_integer(json_array_get(dense, i)) ? json_integer_value(json_array_get(dense, i)) : -1;
        if (l < 0 || l >= s->n_layers)
            fail_value(c, "mlp_only_layers", dense, "layer numbers");
        else
            s->layer[l].mlp = SL_MLP_DENSE;
    }
    if (dense && !json_is_array(dense)) fail_value(c, "mlp_only_layers", dense, "a list of layer numbers");
    s->moe_bf16_accumulate = 1;
    s->router = (sl_router){.experts = s->experts,
                            .top_k = s->top_k,
                            .score = SL_SCORE_SOFTMAX,
                            .n_group = 1,
                            .topk_group = 1,
                            .scale = 1,
                            .renorm = get_bool(c, "norm_topk_prob", 0),
                            .bf16_logits = 1,
                            .bf16_weights = 1};
}

static double mla_m2(const sl_rope_spec *r) {
    if (r->scaling != SL_ROPESC_YARN || r->mscale_all_dim == 0 || r->factor <= 1) return 1;
    double m = 0.1 * r->mscale_all_dim * log(r->factor) + 1;
    return m * m;
}

/* What DeepSeek V2, V3 and the Kimi models have in common: MLA, experts, the shared expert. */
static void fill_deepseek(cfg *c, sl_spec *s) {
    fill_common(c, s, NAN);
    s->attn = SL_ATTN_MLA;
    s->kv_heads = s->heads;
    s->q_lora = (int32_t)get_int(c, "q_lora_rank", 0, 0, 1 << 20);
    s->kv_lora = get_i32(c, "kv_lora_rank", REQUIRED, 1 << 20);
    s->nope_dim = get_i32(c, "qk_nope_head_dim", REQUIRED, 1 << 16);
    s->rope_dim = get_i32(c, "qk_rope_head_dim", REQUIRED, 1 << 16);
    s->v_dim = get_i32(c, "v_head_dim", REQUIRED, 1 << 16);
    s->head_dim = s->nope_dim + s->rope_dim;
    get(c, "head_dim"); /* a copy of others of these; unused by the reference's MLA */
    get(c, "qk_head_dim");
    get(c, "num_key_value_heads");
    s->rope_kind = get_bool(c, "rope_interleave", 1) ? SL_ROPE_INTERLEAVED : SL_ROPE_HALF;
    read_rope(c, s, &s->rope[0], 10000);
    s->attn_scale = (float)(mla_m2(&s->rope[0]) / sqrt(s->nope_dim + s->rope_dim));
    s->experts = get_i32(c, "n_routed_experts", REQUIRED, 65536);
    s->top_k = get_i32(c, "num_experts_per_tok", REQUIRED, s->experts);
    s->moe_inter = get_i32(c, "moe_intermediate_size", REQUIRED, 1 << 24);
    s->shared_inter = s->moe_inter * (int32_t)get_int(c, "n_shared_experts", 0, 0, 64);
    s->mtp_layers = (int32_t)get_int(c, "num_nextn_predict_layers", 0, 0, 16);
    set_moe(s, (int32_t)get_int(c, "first_k_dense_replace", 0, 0, SL_MAX_LAYERS),
            (int32_t)get_int(c, "moe_layer_freq", 1, 1, SL_MAX_LAYERS));
    s->router = (sl_router){.experts = s->experts,
                            .top_k = s->top_k,
                            .n_group = get_i32(c, "n_group", 1, s->experts),
                            .topk_group = get_i32(c, "topk_group", 1, s->experts),
                            .scale = (float)get_num(c, "routed_scaling_factor", 1, 0)};
}
static void fill_deepseek_v2(cfg *c, sl_spec *s) {
    fill_deepseek(c, s);
    const char *method = get_str(c, "topk_method", "greedy");
    if (!strcmp(method, "greedy"))
        s->router.n_group = s->router.topk_group = 1;
    else if (strcmp(method, "group_limited_greedy") != 0)
        fail(c, "topk_method", method, "\"greedy\" or \"group_limited_greedy\" in this family");
    only(c, "scoring_func", get_str(c, "scoring_func", NULL), "softmax");
    /* The published code and the transformers library disagree on what this would do (scale or not). */
    if (get_bool(c, "norm_topk_prob", 0))
        fail(c, "norm_topk_prob", "true",
             "false, as in every published model of this family; its references disagree on true");
    s->router.score = SL_SCORE_SOFTMAX;
}
static void fill_deepseek_v3(cfg *c, sl_spec *s) {
    fill_deepseek(c, s);
    only(c, "topk_method", get_str(c, "topk_method", NULL), "noaux_tc");
    only(c, "scoring_func", get_str(c, "scoring_func", NULL), "sigmoid");
    s->router.score = SL_SCORE_SIGMOID;
    s->router.group_score_top2 = 1;
    s->router.renorm = get_bool(c, "norm_topk_prob", 1);
}

static void fill_gpt_oss(cfg *c, sl_spec *s) {
    fill_common(c, s, NAN);
    if (!s->head_dim) s->head_dim = 64;
    fill_gqa(c, s);
    s->norm = SL_NORM_F32;
    s->qkv_bias = s->o_bias = get_bool(c, "attention_bias", 1);
    s->sinks = 1;
    int32_t window = (int32_t)get_int(c, "sliding_window", 128, 1, 1 << 30);
    if (!read_layer_types(c, s, window, 0))
        for (int32_t i = 0; i < s->n_layers; i++) s->layer[i].window = i % 2 == 0 ? window : 0;
    read_rope(c, s, &s->rope[0], 150000);
    s->experts = get_i32(c, "num_local_experts", REQUIRED, 65536);
    s->top_k =
        get_i32(c, get(c, "num_experts_per_tok") ? "num_experts_per_tok" : "experts_per_token", REQUIRED, s->experts);
    get(c, "experts_per_token");
    s->moe_inter = s->inter;
    set_moe(s, 0, 1);
    s->glu = SL_GLU_CLAMP;
    s->glu_limit = (float)get_num(c, "swiglu_limit", 7, 0);
    s->moe_biases = s->gate_up_interleaved = 1;
    s->router = (sl_router){.experts = s->experts,
                            .top_k = s->top_k,
                            .score = SL_SCORE_SOFTMAX_TOPK,
                            .n_group = 1,
                            .topk_group = 1,
                            .scale = 1};
}

static void fill_gemma3_rope(cfg *c, sl_spec *s) {
    json_t *p = get(c, "rope_parameters");
    double theta = get_num(c, "rope_theta", 1e6, 1), local = get_num(c, "rope_local_base_freq", 1e4, 1);
    s->rope[0] = (sl_rope_spec){.theta = theta, .truncate = 1};
    s->rope[1] = (sl_rope_spec){.theta = local, .truncate = 1};
    json_t *sc = get(c, "rope_scaling");
    if (p && json_object_get(p, "full_attention")) {
        const char *key;
        json_t *v;
        json_object_foreach(p, key, v) if (strcmp(key, "full_attention") != 0 && strcmp(key, "sliding_attention") != 0)
            fail_value(c, "rope_parameters", p, "full_attention and sliding_attention");
        read_rope_object(c, json_object_get(p, "full_attention"), "rope_parameters.full_attention", theta, s->max_pos,
                         &s->rope[0]);
        if (json_object_get(p, "sliding_attention"))
            read_rope_object(c, json_object_get(p, "sliding_attention"), "rope_parameters.sliding_attention", local,
                             s->max_pos, &s->rope[1]);
    } else if (p)
        read_rope_object(c, p, "rope_parameters", theta, s->max_pos, &s->rope[0]);
    else if (sc)
        read_rope_object(c, sc, "rope_scaling", theta, s->max_pos, &s->rope[0]);
}
/* The text part of a multimodal Gemma 3 is written without what equals the reference's defaults, so those are here. */
static void fill_gemma3(cfg *c, sl_spec *s) {
    s->vocab = 262208;
    s->heads = 8;
    s->kv_heads = 4;
    s->head_dim = 256;
    s->max_pos = 131072;
    s->tied = 1;
    fill_common(c, s, 1e-6);
    fill_gqa(c, s);
    only(c, "hidden_activation", get_str(c, "hidden_activation", NULL), "gelu_pytorch_tanh");
    s->norm = SL_NORM_GEMMA;
    s->glu = SL_GLU_GELU;
    s->qk_norm = s->sandwich_norms = 1;
    s->embed_scale = (float)sqrt(s->width);
    s->attn_scale = (float)(1 / sqrt(get_num(c, "query_pre_attn_scalar", 256, 0)));
    int32_t window = (int32_t)get_int(c, "sliding_window", 4096, 1, 1 << 30);
    int64_t pattern =
        get_int(c, get(c, "sliding_window_pattern") ? "sliding_window_pattern" : "_sliding_window_pattern", 6, 1,
                SL_MAX_LAYERS);
    get(c, "_sliding_window_pattern");
    if (!read_layer_types(c, s, window, 1))
        for (int32_t i = 0; i < s->n_layers; i++) {
            int local = (i + 1) % pattern != 0;
            s->layer[i].window = local ? window : 0;
            s->layer[i].rope = local;
        }
    fill_gemma3_rope(c, s);
}

/* ---- the table ---- */

typedef struct family {
    const char *name;
    const char *model_types[4], *archs[4];
    const char *text_types[4]; /* model_type of text_config, when the configuration is nested */
    const char *prefix;
    void (*fill)(cfg *c, sl_spec *s);
} family;

static const family families[] = {
    {"llama", {"llama"}, {"LlamaForCausalLM"}, {0}, "", fill_llama},
    {"mistral", {"mistral"}, {"MistralForCausalLM"}, {0}, "", fill_mistral},
    {"qwen2", {"qwen2"}, {"Qwen2ForCausalLM"}, {0}, "", fill_qwen2},
    {"qwen3", {"qwen3"}, {"Qwen3ForCausalLM"}, {0}, "", fill_qwen3},
    {"qwen3_moe", {"qwen3_moe"}, {"Qwen3MoeForCausalLM"}, {0}, "", fill_qwen3_moe},
    {"deepseek_v2", {"deepseek_v2"}, {"DeepseekV2ForCausalLM"}, {0}, "", fill_deepseek_v2},
    {"deepseek_v3", {"deepseek_v3"}, {"DeepseekV3ForCausalLM"}, {0}, "", fill_deepseek_v3},
    {"kimi_k2", {"kimi_k2"}, {"DeepseekV3ForCausalLM", "KimiK2ForCausalLM"}, {0}, "", fill_deepseek_v3},
    {"kimi_k25",
     {"kimi_k25"},
     {"KimiK25ForConditionalGeneration"},
     {"kimi_k2", "deepseek_v3"},
     "language_model.",
     fill_deepseek_v3},
    {"gpt_oss", {"gpt_oss"}, {"GptOssForCausalLM"}, {0}, "", fill_gpt_oss},
    {"gemma3", {"gemma3_text"}, {"Gemma3ForCausalLM"}, {0}, "", fill_gemma3},
    {"gemma3", {"gemma3"}, {"Gemma3ForConditionalGeneration"}, {"gemma3_text"}, "language_model.", fill_gemma3},
};
#define N_FAMILIES (sizeof families / sizeof *families)

static int listed(const char *const list[4], const char *x) {
    for (int i = 0; i < 4 && list[i]; i++)
        if (!strcmp(list[i], x)) return 1;
    return 0;
}

static int refuse_family(const char *file, const char *arch, const char *type, sl_err *err) {
    char list[600];
    size_t at = 0;
    for (size_t i = 0; i < N_FAMILIES && at < sizeof list; i++)
        at += (size_t)snprintf(list + at, sizeof list - at, "%s%s/%s", i ? ", " : "", families[i].archs[0],
                               families[i].model_types[0]);
    return sl_err_set(
        err, SL_ECONFIG,
        "%s: architecture '%.80s' with model_type '%.80s' is not supported; supported (architecture/model_type): %s",
        file, arch ? arch : "(none)", type ? type : "(none)", list);
}

static int fill_family(const family *f, sl_spec *s, json_t *root, const char *file, sl_err *err) {
    cfg c = {.o = root, .file = file, .where = "", .err = err};
    json_t *quant = get(&c, "quantization_config");
    if (f->text_types[0]) {
        json_t *text = json_object_get(root, "text_config");
        const char *tt = json_string_value(json_object_get(text, "model_type"));
        if (!json_is_object(text)) return fail(&c, "text_config", "missing", "an object");
        if (tt && !listed(f->text_types, tt)) return refuse_family(file, "text_config", tt, err);
        if (json_is_boolean(json_object_get(root, "tie_word_embeddings")))
            s->tied = json_is_true(json_object_get(root, "tie_word_embeddings"));
        c.o = text;
        c.where = "text_config.";
        json_t *inner = get(&c, "quantization_config");
        if (inner) quant = inner;
    }
    f->fill(&c, s);
    read_quantization(&c, quant, s);
    if (!c.rc) check_rest(&c, s);
    return c.rc;
}

/* The blocks in which k-sliced matrices can be cut, as far as the configuration tells. */
static void set_blocks(sl_spec *s) {
    s->k_block_attn = s->k_block_mlp = s->k_block_moe = 1;
    if (!strcmp(s->quant, "mxfp4")) s->k_block_moe = 32;
    if (strcmp(s->quant, "int4") != 0) return;
    int32_t g = s->quant_group > 0 ? s->quant_group : 8;
    s->k_block_moe = g;
    if (!s->experts) s->k_block_attn = s->k_block_mlp = g;
}

int sl_families_config(sl_spec *s, const char *json, size_t n, const char *file, double eps_lora, sl_err *err) {
    json_error_t je;
    json_t *root = json_loadb(json, n, JSON_REJECT_DUPLICATES, &je);
    if (!root) return sl_err_set(err, SL_ECONFIG, "%s: line %d column %d: %s", file, je.line, je.column, je.text);
    int rc = 0;
    const char *type = json_string_value(json_object_get(root, "model_type"));
    const char *arch = json_string_value(json_array_get(json_object_get(root, "architectures"), 0));
    const family *f = NULL;
    for (size_t i = 0; i < N_FAMILIES && !f; i++)
        if ((type || arch) && (!type || listed(families[i].model_types, type)) &&
            (!arch || listed(families[i].archs, arch)))
            f = &families[i];
    memset(s, 0, sizeof *s);
    if (!f)
        rc = refuse_family(file, arch, type, err);
    else {
        snprintf(s->family, sizeof s->family, "%s", f->name);
        snprintf(s->arch, sizeof s->arch, "%s", arch ? arch : type);
        snprintf(s->prefix, sizeof s->prefix, "%s", f->prefix);
        s->eps_lora = eps_lora > 0 ? eps_lora : 1e-6;
        rc = fill_family(f, s, root, file, err);
    }
    json_decref(root);
    if (!rc) {
        set_blocks(s);
        rc = sl_families_check(s, file, err);
    }
    return rc;
}

/* ---- sanity ---- */

#define CHECK(cond, ...)                                                                                               \
    do {                                                                                                               \
        if (!(cond)) return sl_err_set(err, SL_ECONFIG, __VA_ARGS__);                                                  \
    } while (0)

int sl_families_check(const sl_spec *s, const char *file, sl_err *err) {
    int has_moe = 0;
    for (int32_t i = 0; i < s->n_layers; i++) has_moe |= s->layer[i].mlp == SL_MLP_MOE;
    CHECK(s->heads >= 1 && s->kv_heads >= 1 && s->heads % s->kv_heads == 0,
          "%s: %d attention heads do not divide over %d key/value heads", file, s->heads, s->kv_heads);
    CHECK(sl_spec_rope_dim(s) >= 2 && sl_spec_rope_dim(s) % 2 == 0,
          "%s: rope needs an even number of elements a head, found %d", file, sl_spec_rope_dim(s));
    CHECK((int64_t)s->heads * s->head_dim <= (1 << 24), "%s: %d heads of %d elements are beyond what is sane", file,
          s->heads, s->head_dim);
    CHECK((int64_t)s->vocab * s->width <= (INT64_C(1) << 40),
          "%s: a vocabulary of %d at width %d is beyond what is sane", file, s->vocab, s->width);
    if (!has_moe) return 0;
    CHECK(s->top_k >= 1 && s->top_k <= s->experts, "%s: %d experts a token of %d experts", file, s->top_k, s->experts);
    CHECK(s->router.n_group >= 1 && s->experts % s->router.n_group == 0, "%s: %d experts do not divide into %d groups",
          file, s->experts, s->router.n_group);
    CHECK(s->router.topk_group >= 1 && s->router.topk_group <= s->router.n_group,
          "%s: %d groups of %d are to be chosen", file, s->router.topk_group, s->router.n_group);
    CHECK((int64_t)s->experts / s->router.n_group * s->router.topk_group >= s->top_k,
          "%s: the %d chosen groups hold fewer than %d experts", file, s->router.topk_group, s->top_k);
    return 0;
}
