/* spec: the golden configurations, the same in the spelling since transformers 5, what must be refused and in which
 * words, rope tables against published values, widths, --layers, fingerprints. argv[1]: tests/golden. */
#include "ipc/boot.h"
#include "stages/compute/spec.h"
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *golden;
static sl_spec a, b; /* 12 KB each: not for the stack */

static const char *const names[] = {"llama",           "smollm",           "mistral",     "qwen2",         "qwen3",
                                    "qwen3_moe",       "deepseek_v2_lite", "deepseek_v2", "deepseek_v3",   "kimi_k2",
                                    "deepseek_v3_fp8", "kimi_k25_int4",    "gpt_oss",     "gpt_oss_mxfp4", "gemma3"};
#define N_NAMES (sizeof names / sizeof *names)

static json_t *config(const char *name) {
    char path[1024];
    snprintf(path, sizeof path, "%s/%s/config.json", golden, name);
    json_t *j = json_load_file(path, 0, NULL);
    assert_non_null(j);
    return j;
}
static int parse(sl_spec *s, json_t *j, sl_err *err) {
    char *text = json_dumps(j, 0);
    memset(err, 0, sizeof *err);
    int rc = sl_spec_parse_config(s, text, strlen(text), "config.json", 0, err);
    free(text);
    return rc;
}
static json_t *text_part(json_t *j) {
    json_t *t = json_object_get(j, "text_config");
    return t ? t : j;
}

static void test_golden(void **state) {
    (void)state;
    sl_err err;
    for (size_t i = 0; i < N_NAMES; i++) {
        char path[1024];
        snprintf(path, sizeof path, "%s/%s", golden, names[i]);
        if (sl_spec_load(&a, path, 0, &err)) fail_msg("%s", err.msg);
        assert_int_equal(a.n_layers, 4);
        assert_int_equal(a.width, 64);
        assert_int_equal(a.vocab, 288);
        assert_string_equal(a.unknown, "");
        assert_true(a.eps_lora == 1e-6);
        assert_int_equal(sl_spec_load(&a, path, 1e-5, &err), 0);
        assert_true(a.eps_lora == 1e-5);
    }
}

static void test_details(void **state) {
    (void)state;
    sl_err err;
    json_t *j = config("deepseek_v3");
    assert_int_equal(parse(&a, j, &err), 0);
    json_decref(j);
    assert_int_equal(a.layer[1].mlp, SL_MLP_DENSE);
    assert_int_equal(a.layer[2].mlp, SL_MLP_MOE);
    assert_int_equal(a.router.score, SL_SCORE_SIGMOID);
    assert_true(a.router.n_group == 4 && a.router.topk_group == 2 && a.router.group_score_top2 && a.router.renorm);
    assert_int_equal(a.mtp_layers, 1);
    j = config("gemma3");
    assert_int_equal(parse(&a, j, &err), 0);
    json_decref(j);
    assert_true(a.layer[0].window == 16 && a.layer[0].rope == 1 && a.layer[2].window == 0 && a.layer[2].rope == 0);
    assert_true(a.rope[0].theta == 1e6 && a.rope[1].theta == 1e4 && a.embed_scale == 8);
    j = config("kimi_k25_int4");
    assert_int_equal(parse(&a, j, &err), 0);
    json_decref(j);
    assert_string_equal(a.prefix, "language_model.");
    assert_true(!strcmp(a.quant, "int4") && a.quant_group == 32 && a.quant_symmetric == 1);
    j = config("gpt_oss");
    assert_int_equal(parse(&a, j, &err), 0);
    json_decref(j);
    assert_true(a.layer[0].window == 16 && a.layer[1].window == 0 && a.sinks && a.o_bias && a.glu_limit == 7);
}

/* rope_theta + rope_scaling -> rope_parameters, torch_dtype -> dtype: the spec must not change by a bit. */
static void respell(json_t *j) {
    json_t *t = text_part(j), *theta = json_object_get(t, "rope_theta"), *sc = json_object_get(t, "rope_scaling");
    if (!theta) return;
    json_t *p = json_object();
    const char *key;
    json_t *v;
    if (json_is_object(sc))
        json_object_foreach(sc, key, v) json_object_set(p, strcmp(key, "type") ? key : "rope_type", v);
    else
        json_object_set_new(p, "rope_type", json_string("default"));
    json_object_set(p, "rope_theta", theta);
    json_object_set_new(t, "rope_parameters", p);
    json_object_del(t, "rope_theta");
    json_object_del(t, "rope_scaling");
    json_object_set_new(t, "dtype", json_string("bfloat16"));
    json_object_del(t, "torch_dtype");
}
static void test_new_spelling(void **state) {
    (void)state;
    sl_err err;
    for (size_t i = 0; i < N_NAMES; i++) {
        json_t *j = config(names[i]);
        assert_int_equal(parse(&a, j, &err), 0);
        respell(j);
        if (parse(&b, j, &err)) fail_msg("%s: %s", names[i], err.msg);
        json_decref(j);
        assert_memory_equal(&a, &b, sizeof a);
    }
    /* Gemma 3 the old way: two bases, a pattern instead of a list, a linear factor for the global layers. */
    json_t *j = config("gemma3");
    json_object_del(j, "rope_parameters");
    json_object_del(j, "layer_types");
    json_object_set_new(j, "rope_theta", json_real(1e6));
    json_object_set_new(j, "rope_local_base_freq", json_real(1e4));
    json_object_set_new(j, "sliding_window_pattern", json_integer(3));
    json_object_set_new(j, "rope_scaling", json_pack("{s:s, s:f}", "rope_type", "linear", "factor", 8.0));
    if (parse(&b, j, &err)) fail_msg("%s", err.msg);
    json_decref(j);
    assert_true(b.layer[2].window == 0 && b.layer[3].window == 16 && b.rope[0].scaling == SL_ROPESC_LINEAR &&
                b.rope[0].factor == 8 && b.rope[1].scaling == SL_ROPESC_NONE);
    /* and nested, as the multimodal checkpoints are */
    j = config("gemma3");
    json_t *text = json_deep_copy(j);
    json_object_clear(j);
    json_object_set_new(j, "architectures", json_pack("[s]", "Gemma3ForConditionalGeneration"));
    json_object_set_new(j, "model_type", json_string("gemma3"));
    json_object_set_new(j, "text_config", text);
    if (parse(&b, j, &err)) fail_msg("%s", err.msg);
    json_decref(j);
    assert_string_equal(b.prefix, "language_model.");
    assert_int_equal(b.kv_heads, 1);
}

/* config, key to set (dots go down), JSON value (NULL: remove), what the message must say */
static const struct {
    const char *name, *key, *value, *says[3];
} refused[] = {
    {"llama", "architectures", "[\"FalconForCausalLM\"]", {"FalconForCausalLM", "LlamaForCausalLM", "KimiK25"}},
    {"llama", "model_type", "\"falcon\"", {"falcon", "supported", "qwen3_moe"}},
    {"llama", "hidden_size", NULL, {"hidden_size", "missing"}},
    {"llama", "hidden_size", "\"64\"", {"hidden_size", "\"64\"", "integer"}},
    {"llama", "hidden_size", "1e99", {"hidden_size"}},
    {"llama", "num_hidden_layers", "0", {"num_hidden_layers", "from 1 to 512"}},
    {"llama", "num_hidden_layers", "513", {"num_hidden_layers", "513"}},
    {"llama", "num_key_value_heads", "3", {"8 attention heads", "3 key/value"}},
    {"llama", "head_dim", "7", {"even"}},
    {"llama", "hidden_act", "\"gelu\"", {"hidden_act", "gelu", "silu"}},
    {"llama", "mlp_bias", "true", {"mlp_bias"}},
    {"llama", "rms_norm_eps", "0", {"rms_norm_eps"}},
    {"llama", "rope_scaling.rope_type", "\"longrope\"", {"longrope", "yarn"}},
    {"llama", "rope_scaling.factr", "8", {"factr", "not understood"}},
    {"llama", "rope_scaling.factor", NULL, {"factor", "missing"}},
    {"llama", "rope_scaling.type", "\"yarn\"", {"type", "yarn"}},
    {"llama", "attn_logit_softcapping", "30.0", {"attn_logit_softcapping", "30.0"}},
    {"llama", "partial_rotary_factor", "0.5", {"partial_rotary_factor"}},
    {"llama", "clip_qkv", "8", {"clip_qkv"}},
    {"llama", "quantization_config", "{\"quant_method\":\"awq\"}", {"awq", "mxfp4"}},
    {"mistral", "layer_types", "[\"full_attention\"]", {"layer_types"}},
    {"qwen2", "use_sliding_window", "true", {"use_sliding_window"}},
    {"qwen2", "dual_chunk_attention_config", "{}", {"dual_chunk_attention_config"}},
    {"qwen3_moe", "num_experts_per_tok", "9", {"num_experts_per_tok", "9"}},
    {"qwen3_moe", "mlp_only_layers", "[4]", {"mlp_only_layers"}},
    {"deepseek_v3", "index_topk", "2048", {"index_topk", "2048", "V3.2"}},
    {"deepseek_v3", "scoring_func", "\"softmax\"", {"scoring_func", "sigmoid"}},
    {"deepseek_v3", "topk_group", "5", {"groups"}},
    {"deepseek_v2", "norm_topk_prob", "true", {"norm_topk_prob"}},
    {"deepseek_v2", "topk_method", "\"noaux_tc\"", {"topk_method", "noaux_tc"}},
    {"deepseek_v3_fp8", "quantization_config.weight_block_size", "[64, 64]", {"weight_block_size", "[128, 128]"}},
    {"kimi_k25_int4", "text_config", NULL, {"text_config"}},
    {"kimi_k25_int4", "text_config.quantization_config.config_groups.group_0.weights.num_bits", "8", {"num_bits", "4"}},
    {"kimi_k25_int4", "text_config.quantization_config.kv_cache_scheme", "{}", {"kv_cache_scheme"}},
    {"kimi_k25_int4", "text_config.index_topk", "1", {"text_config.index_topk"}},
    {"gpt_oss",
     "layer_types",
     "[\"sliding_attention\",\"full_attention\",\"chunked_attention\",\"full_attention\"]",
     {"chunked_attention"}},
    {"gemma3", "final_logit_softcapping", "30", {"final_logit_softcapping"}},
    {"gemma3", "use_bidirectional_attention", "true", {"use_bidirectional_attention"}},
    {"gemma3", "hidden_activation", "\"silu\"", {"hidden_activation", "gelu_pytorch_tanh"}},
};

static void set_path(json_t *j, const char *path, const char *value) {
    char key[128];
    const char *dot;
    while ((dot = strchr(path, '.'))) {
        snprintf(key, sizeof key, "%.*s", (int)(dot - path), path);
        j = json_object_get(j, key);
        assert_non_null(j);
        path = dot + 1;
    }
    if (value)
        json_object_set_new(j, path, json_loads(value, JSON_DECODE_ANY, NULL));
    else
        json_object_del(j, path);
}
static void test_refused(void **state) {
    (void)state;
    sl_err err;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        json_t *j = config(refused[i].name);
        set_path(j, refused[i].key, refused[i].value);
        int rc = parse(&a, j, &err);
        json_decref(j);
        if (rc != SL_ECONFIG)
            fail_msg("%s with %s = %s gave %d '%s'", refused[i].name, refused[i].key,
                     refused[i].value ? refused[i].value : "(removed)", rc, err.msg);
        if (!strstr(err.msg, "config.json")) fail_msg("no file in '%s'", err.msg);
        for (int k = 0; k < 3 && refused[i].says[k]; k++)
            if (!strstr(err.msg, refused[i].says[k])) fail_msg("'%s' does not say '%s'", err.msg, refused[i].says[k]);
    }
}

static void test_unknown_keys(void **state) {
    (void)state;
    sl_err err;
    json_t *j = config("qwen3");
    json_object_set_new(j, "my_own_note", json_integer(3));
    json_object_set_new(j, "router_aux_loss_coef", json_real(.1));
    assert_int_equal(parse(&a, j, &err), 0);
    assert_string_equal(a.unknown, "my_own_note");
    json_object_set(j, "rms_nrom_eps", json_object_get(j, "rms_norm_eps")); /* beside the right one: only unknown */
    assert_int_equal(parse(&a, j, &err), 0);
    assert_non_null(strstr(a.unknown, "rms_nrom_eps"));
    json_object_set_new(j, "num_key_value_haeds", json_integer(2));
    json_object_del(j, "num_key_value_heads"); /* would silently have become the number of heads */
    assert_int_equal(parse(&a, j, &err), SL_ECONFIG);
    assert_non_null(strstr(err.msg, "did you mean 'num_key_value_heads'"));
    json_decref(j);
    assert_int_equal(sl_spec_parse_config(&a, "{\"a\":1,\"a\":2}", 13, "x", 0, &err), SL_ECONFIG);
    assert_int_equal(sl_spec_parse_config(&a, "[]", 2, "x", 0, &err), SL_ECONFIG);
    assert_int_equal(sl_spec_parse_config(&a, "", 0, "x", 0, &err), SL_ECONFIG);
}

/* ---- rope: values computed elsewhere from the published formulas ---- */

static void near_list(const float *got, const double *want, int n) {
    for (int i = 0; i < n; i++)
        if (fabs(got[i] - want[i]) > 1e-6 * fabs(want[i]))
            fail_msg("frequency %d is %.8g, expected %.8g", i, (double)got[i], want[i]);
}
static void yarn_case(double theta, double factor, double orig, double fast, double m, int dim) {
    memset(&a, 0, sizeof a);
    a.head_dim = dim;
    a.rope[0] = (sl_rope_spec){.theta = theta,
                               .scaling = SL_ROPESC_YARN,
                               .factor = factor,
                               .orig_max = orig,
                               .beta_fast = fast,
                               .beta_slow = 1,
                               .mscale = m,
                               .mscale_all_dim = m,
                               .truncate = 1};
}
static void test_rope(void **state) {
    (void)state;
    static const double k25[32] = {
        1.000000e+00, 7.131111e-01, 5.085274e-01, 3.626365e-01, 2.586001e-01, 1.844106e-01, 1.315053e-01, 9.377786e-02,
        6.687403e-02, 4.377666e-02, 2.842796e-02, 1.828296e-02, 1.161916e-02, 7.274119e-03, 4.465849e-03, 2.670203e-03,
        1.537297e-03, 8.346550e-04, 4.086460e-04, 1.583750e-04, 1.807023e-05, 1.288608e-05, 9.189209e-06, 6.552927e-06,
        4.672965e-06, 3.332343e-06, 2.376331e-06, 1.694588e-06, 1.208429e-06, 8.617444e-07, 6.145195e-07, 4.382206e-07};
    static const double v3[32] = {
        1.0,     7.498942e-01, 5.623413e-01, 4.216965e-01, 3.162278e-01, 2.371374e-01, 1.778279e-01, 1.333521e-01,
        1.0e-01, 7.498942e-02, 5.623413e-02, 3.900693e-02, 2.687936e-02, 1.837815e-02, 1.244796e-02, 8.334509e-03,
        5.5e-03, 3.561997e-03, 2.249365e-03, 1.370514e-03, 7.905694e-04, 4.149904e-04, 1.778279e-04, 3.333804e-05,
        2.5e-05, 1.874736e-05, 1.405853e-05, 1.054241e-05, 7.905694e-06, 5.928434e-06, 4.445699e-06, 3.333804e-06};
    float f[64];
    double factor;
    sl_err err;
    yarn_case(50000, 64, 4096, 32, 1, 64);
    assert_int_equal(sl_spec_rope_freqs(&a, 0, f, &factor, &err), 0);
    near_list(f, k25, 32);
    assert_true(factor == 1);
    yarn_case(10000, 40, 4096, 32, 1, 64);
    assert_int_equal(sl_spec_rope_freqs(&a, 0, f, &factor, &err), 0);
    near_list(f, v3, 32);
    /* gpt-oss: no truncation, factor derived */
    yarn_case(150000, 32, 4096, 32, 0, 64);
    a.rope[0].truncate = 0;
    assert_int_equal(sl_spec_rope_freqs(&a, 0, f, &factor, &err), 0);
    assert_true(fabs(factor - 1.3465736) < 1e-7);
    double lo = 8.0928, hi = 17.3980, plain = pow(150000, -2.0 * 12 / 64), r = (12 - lo) / (hi - lo);
    assert_true(fabs(f[12] - (plain / 32 * r + plain * (1 - r))) < 1e-4 * plain);
    assert_true(fabs(f[8] - pow(150000, -16.0 / 64)) < 1e-6);
    /* llama3 */
    memset(&a, 0, sizeof a);
    a.head_dim = 128;
    a.rope[0] = (sl_rope_spec){
        .theta = 5e5, .scaling = SL_ROPESC_LLAMA3, .factor = 8, .low_freq = 1, .high_freq = 4, .orig_max = 8192};
    assert_int_equal(sl_spec_rope_freqs(&a, 0, f, &factor, &err), 0);
    static const int at[] = {28, 29, 30, 32, 34, 35, 63};
    static const double llama3[] = {3.211446e-03, 2.166571e-03, 1.371894e-03, 5.248462e-04,
                                    1.785078e-04, 9.556212e-05, 3.068926e-07};
    for (int i = 0; i < 7; i++) near_list(&f[at[i]], &llama3[i], 1);
    float div[64], table[2 * 128], want[64];
    memcpy(want, f, sizeof want);
    for (int i = 0; i < 64; i++) div[i] = (float)(pow(5e5, -i / 64.0) / want[i]);
    a.rope[0] = (sl_rope_spec){.theta = 5e5, .divide = div}; /* the way GGUF ships it */
    assert_int_equal(sl_spec_rope_table(&a, 0, 2, table, &err), 0);
    for (int i = 0; i < 64; i++)
        assert_true(fabs(table[128 + 2 * i] - cos(want[i])) < 1e-6 &&
                    fabs(table[128 + 2 * i + 1] - sin(want[i])) < 1e-6 && table[2 * i] == 1);
}

static double scale_of(json_t *j, double factor, double m, const char *tail) {
    sl_err err;
    json_object_set_new(j, "qk_nope_head_dim", json_integer(128));
    json_object_set_new(j, "qk_rope_head_dim", json_integer(64));
    json_object_set_new(j, "rope_scaling",
                        json_pack("{s:s, s:f, s:f, s:f, s:i}", "type", "yarn", "factor", factor, "mscale", m,
                                  "mscale_all_dim", m, "original_max_position_embeddings", 4096));
    if (parse(&a, j, &err)) fail_msg("%s %s", err.msg, tail);
    return a.attn_scale;
}
static void test_attention_scale(void **state) {
    (void)state;
    json_t *j = config("deepseek_v3");
    assert_true(fabs(scale_of(j, 64, 1, "K2.5") - 0.144679626) < 1e-8);
    assert_true(fabs(scale_of(j, 32, 1, "K2") - 0.130860800) < 1e-8);
    assert_true(fabs(scale_of(j, 40, 1, "V3") - 0.135233779) < 1e-8);
    assert_true(fabs(scale_of(j, 40, 0.707, "V2-Lite") - 0.114721387) < 1e-8);
    json_decref(j);
}

/* ---- widths and layers ---- */

static void expect_widths(const char *name, int split, const char *want) {
    sl_err err;
    char got[128] = "";
    json_t *j = config(name);
    assert_int_equal(parse(&a, j, &err), 0);
    json_decref(j);
    int w[32], n = sl_spec_widths(&a, split, 32, w);
    for (int i = 0; i < n; i++) snprintf(got + strlen(got), sizeof got - strlen(got), "%s%d", i ? " " : "", w[i]);
    assert_string_equal(got, want);
}
static void test_widths(void **state) {
    (void)state;
    sl_err err = {0};
    expect_widths("llama", SL_EXPERTS_AUTO, "1 2 4 8"); /* 2 kv heads: copied from 4 ranks on */
    expect_widths("smollm", SL_EXPERTS_AUTO, "1 2");
    expect_widths("qwen3_moe", SL_EXPERTS_EP, "1 2 4");
    expect_widths("kimi_k25_int4", SL_EXPERTS_EP, "1 2 4 8");
    expect_widths("kimi_k25_int4", SL_EXPERTS_TP, "1"); /* 32 columns are one group */
    expect_widths("gpt_oss_mxfp4", SL_EXPERTS_TP, "1 2");
    assert_int_equal(sl_spec_check_tp(&a, SL_EXPERTS_TP, 2, &err), 0);
    assert_int_equal(sl_spec_check_tp(&a, SL_EXPERTS_TP, 4, &err), SL_ECONFIG);
    assert_non_null(strstr(err.msg, "widths that work: 1, 2"));
    assert_non_null(strstr(err.msg, "64 columns of each expert"));
    assert_int_equal(sl_spec_check_tp(&a, SL_EXPERTS_TP, 0, &err), SL_ECONFIG);
    assert_int_equal(sl_spec_check_tp(&a, SL_EXPERTS_EP, 3, &err), SL_ECONFIG);
    assert_non_null(strstr(err.msg, "8 attention heads"));
}

static void expect_layers(const char *text, int n, const char *want) {
    uint32_t h[200];
    sl_err err = {0};
    char got[512] = "";
    int m = sl_spec_layers(text, n, h, 200, &err);
    if (m < 0) fail_msg("%s", err.msg);
    for (int i = 0; i < m; i++) snprintf(got + strlen(got), sizeof got - strlen(got), "%s%u", i ? " " : "", h[i]);
    assert_string_equal(got, want);
}
static void test_layers(void **state) {
    (void)state;
    uint32_t h[4];
    sl_err err = {0};
    expect_layers("eagle3", 61, "2 30 58 61");
    expect_layers("speculators-0.3", 32, "3 17 30 32");
    expect_layers("dflash", 36, "2 10 18 26 34 36");
    expect_layers("all", 3, "0 1 2 3");
    expect_layers("n", 5, "5");
    expect_layers(" n-3 , 2,n/2, n/2+1,n/2-1,0, 2", 32, "0 2 15 16 17 29");
    expect_layers("eagle3", 4, "1 2 4");
    static const char *const bad[] = {"",      "x",   "2,,3", "n/0",   "n*2", "33",
                                      "n-33",  "-1",  "2-1",  "eagle", "1,",  "99999999999999999999",
                                      "n/2/2", "0x2", "2 3"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (sl_spec_layers(bad[i], 32, h, 4, &err) != SL_EUSAGE) fail_msg("'%s' was taken", bad[i]);
    assert_int_equal(sl_spec_layers("all", 32, h, 4, &err), SL_EUSAGE);
    assert_int_equal(sl_spec_layers("eagle3", 2, h, 4, &err), SL_EUSAGE); /* n-3 is before the first */
}

static void copy_file(const char *from, const char *to) {
    char buf[65536];
    FILE *f = fopen(from, "rb"), *g = fopen(to, "wb");
    assert_true(f && g);
    for (size_t n; (n = fread(buf, 1, sizeof buf, f)) > 0;) fwrite(buf, 1, n, g);
    fclose(f);
    fclose(g);
}
static void test_fingerprint(void **state) {
    (void)state;
    char one[80], two[80], src[1024], dir[] = "/tmp/sl_spec_XXXXXX", path[1100];
    sl_err err = {0};
    assert_non_null(mkdtemp(dir));
    for (int i = 0; i < 2; i++) {
        snprintf(src, sizeof src, "%s/llama/%s", golden, i ? "model.safetensors" : "config.json");
        snprintf(path, sizeof path, "%s/%s", dir, i ? "model.safetensors" : "config.json");
        copy_file(src, path);
    }
    snprintf(src, sizeof src, "%s/llama", golden);
    assert_int_equal(sl_spec_fingerprint(src, one, &err), 0);
    assert_int_equal(sl_spec_fingerprint(dir, two, &err), 0);
    assert_string_equal(one, two);
    assert_int_equal(strlen(one), 64);
    assert_int_equal(strspn(one, "0123456789abcdef"), 64);
    unlink(path); /* no weights: another table, the same configuration */
    assert_int_equal(sl_spec_fingerprint(dir, two, &err), 0);
    assert_memory_equal(one, two, 32);
    assert_memory_not_equal(one + 32, two + 32, 32);
    snprintf(path, sizeof path, "%s/config.json", dir);
    FILE *f = fopen(path, "a");
    fputc('\n', f);
    fclose(f);
    assert_int_equal(sl_spec_fingerprint(dir, one, &err), 0);
    assert_memory_not_equal(one, two, 32);
    unlink(path);
    assert_int_equal(sl_spec_fingerprint(dir, one, &err), SL_ECONFIG);
    assert_int_equal(sl_spec_load(&a, "/nonexistent", 0, &err), SL_ECONFIG);
    rmdir(dir);
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    golden = argv[1];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden),          cmocka_unit_test(test_details),
        cmocka_unit_test(test_new_spelling),    cmocka_unit_test(test_refused),
        cmocka_unit_test(test_unknown_keys),    cmocka_unit_test(test_rope),
        cmocka_unit_test(test_attention_scale), cmocka_unit_test(test_widths),
        cmocka_unit_test(test_layers),          cmocka_unit_test(test_fingerprint),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
