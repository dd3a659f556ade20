/* weights: mapped and copied loads give the same matrices; damaged checkpoints are refused with everything that is
 * wrong in one message; random weights of every format are the same model at every width; the plan is what is loaded.
 * argv[1]: tests/golden. */
#include "ipc/boot.h"
#include "kernels/cpu/isa.h"
#include "stages/compute/loader.h"
#include "stages/compute/weights.h"
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *golden;
static sl_ops *cpu, copying, /* the same memory under a name that forbids using files in place, as a GPU does */
    staged;                  /* and with pinned memory */
static int pinned_alloc(void *ctx, void **p, uint64_t bytes, sl_err *err) {
    (void)ctx;
    *p = aligned_alloc(4096, bytes);
    return *p ? 0 : sl_err_set(err, SL_ETEMP, "no memory");
}
static void pinned_free(void *ctx, void *p) {
    (void)ctx;
    free(p);
}
static int upload_start(void *ctx, void *dst, const void *src, uint64_t bytes, uint64_t *ticket, sl_err *err) {
    *ticket = 0;
    return cpu->upload(ctx, dst, src, bytes, err);
}
static int upload_wait(void *ctx, uint64_t ticket, sl_err *err) {
    (void)ctx, (void)ticket, (void)err;
    return 0;
}

static const char *const names[] = {"llama",           "smollm",           "mistral",     "qwen2",         "qwen3",
                                    "qwen3_moe",       "deepseek_v2_lite", "deepseek_v2", "deepseek_v3",   "kimi_k2",
                                    "deepseek_v3_fp8", "kimi_k25_int4",    "gpt_oss",     "gpt_oss_mxfp4", "gemma3"};

/* ---- every matrix and vector of a layer ---- */

enum { MATS = 14, VECS = 18 };
static void mats_of(const sl_layer_weights *w, const sl_mat *m[MATS]) {
    const sl_mat *all[MATS] = {&w->q,        &w->k,      &w->v, &w->q_b,  &w->kv_b,     &w->gate, &w->up,
                               &w->moe.gate, &w->moe.up, &w->o, &w->down, &w->moe.down, &w->q_a,  &w->kv_a};
    memcpy(m, all, sizeof all);
}
enum { ROWS_TO = 9, COLS_TO = 12 }; /* [0, 9) are cut by rows, [9, 12) by columns, the rest are whole on every rank */
static void vecs_of(const sl_layer_weights *w, const sl_vec *v[VECS]) {
    const sl_vec *all[VECS] = {
        &w->attn_norm,     &w->mlp_norm,    &w->post_attn_norm, &w->post_mlp_norm, &w->q_bias,
        &w->k_bias,        &w->v_bias,      &w->o_bias,         &w->q_norm,        &w->k_norm,
        &w->sinks,         &w->q_a_norm,    &w->kv_a_norm,      &w->router_bias,   &w->router_logit_bias,
        &w->moe.gate_bias, &w->moe.up_bias, &w->moe.down_bias};
    memcpy(v, all, sizeof all);
}

static float *row_of(const sl_mat *m, int64_t e, int64_t r) {
    float *x = malloc((size_t)m->k * sizeof *x);
    sl_isa_base.dequant(x, m, e, r, 0, m->k);
    return x;
}

/* Part of row r of expert e of `full` against row r2 of expert e2 of `part`. */
static void same_row(const sl_mat *full, int64_t e, int64_t r, int64_t k0, const sl_mat *part, int64_t e2, int64_t r2) {
    float *x = row_of(full, e, r), *y = row_of(part, e2, r2);
    assert_memory_equal(x + k0, y, (size_t)part->k * sizeof *y);
    free(x);
    free(y);
}
static int64_t at(const int32_t *place, int64_t e) {
    return place ? place[e] : e;
}
static void same_mats(const sl_mat *a, const int32_t *pa, const sl_mat *b, const int32_t *pb) {
    assert_true((a->data == NULL) == (b->data == NULL));
    if (!a->data) return;
    assert_true(a->fmt == b->fmt && a->n == b->n && a->k == b->k && a->count == b->count && a->n_off == b->n_off &&
                a->k_off == b->k_off);
    for (int64_t e = 0; e < a->count; e++)
        for (int64_t r = 0; r < a->n; r++) same_row(a, at(pa, e), r, 0, b, at(pb, e), r);
}
static void same_mat(const sl_mat *a, const sl_mat *b) {
    same_mats(a, NULL, b, NULL);
}
static void same_vec(const sl_vec *a, const sl_vec *b) {
    assert_int_equal(a->n, b->n);
    if (a->n) assert_memory_equal(a->data, b->data, (size_t)a->n * 4);
}
static void same_model(const sl_model *a, const sl_model *b) {
    same_mat(&a->embed, &b->embed);
    same_mat(&a->lm_head, &b->lm_head);
    same_vec(&a->final_norm, &b->final_norm);
    for (int l = 0; l < a->spec.n_layers; l++) {
        const sl_mat *x[MATS], *y[MATS];
        const sl_vec *v[VECS], *w[VECS];
        mats_of(&a->layer[l], x), mats_of(&b->layer[l], y);
        vecs_of(&a->layer[l], v), vecs_of(&b->layer[l], w);
        const sl_moe *ma = &a->layer[l].moe, *mb = &b->layer[l].moe;
        for (int i = 0; i < MATS; i++) {
            int expert = x[i] == &ma->gate || x[i] == &ma->up || x[i] == &ma->down;
            same_mats(x[i], expert ? ma->place : NULL, y[i], expert ? mb->place : NULL);
        }
        for (int i = 0; i < VECS; i++) same_vec(v[i], w[i]);
        same_mat(&a->layer[l].router, &b->layer[l].router);
    }
}

static uint64_t seen_done, seen_total;
static void progress(void *arg, uint64_t done, uint64_t total) {
    (void)arg;
    assert_true(done >= seen_done && done <= total);
    seen_done = done;
    seen_total = total;
}
static sl_load_opts options(const char *model, int rank, int tp, int split) {
    seen_done = seen_total = 0;
    return (sl_load_opts){.model = model,
                          .rank = rank,
                          .tp = tp,
                          .expert_split = split,
                          .top_layer = 4,
                          .want_head = 1,
                          .random_format = -1,
                          .progress = progress};
}
static sl_model *load(const sl_load_opts *o, sl_ops *ops) {
    sl_model *m;
    sl_err err = {0};
    if (sl_model_load(&m, o, ops, &err)) fail_msg("%s", err.msg);
    assert_true(seen_total > 0 && seen_done == seen_total);
    return m;
}

/* Mapped and copied either way, every family, every rank of every width, experts whole and sliced; and the plan's
 * bytes. */
static void test_mapped_and_copied(void **state) {
    (void)state;
    char path[1024];
    static sl_spec s;
    sl_err err = {0};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s/%s", golden, names[i]);
        assert_int_equal(sl_spec_load(&s, path, 0, &err), 0);
        for (int split = SL_EXPERTS_AUTO; split <= SL_EXPERTS_TP; split += 2) {
            int w[8], nw = sl_spec_widths(&s, split, 8, w);
            for (int k = 0; k < nw; k++)
                for (int r = 0; r<w[k]; r += w[k]> 2 ? w[k] - 1 : 1) {
                    sl_load_opts o = options(path, r, w[k], split);
                    sl_model *a = load(&o, cpu);
                    o = options(path, r, w[k], split);
                    sl_model *b = load(&o, &copying);
                    same_model(a, b);
                    o = options(path, r, w[k], split);
                    sl_model *c = load(&o, &staged);
                    same_model(a, c);
                    sl_model_free(c, &staged);
                    sl_model_plan p;
                    assert_int_equal(sl_model_plan_make(&p, &s, &o, &err), 0);
                    assert_int_equal(p.weight_bytes, seen_total);
                    assert_true(p.params > 0 && p.file_bytes > 0);
                    sl_model_free(a, cpu);
                    sl_model_free(b, &copying);
                }
        }
    }
}

/* Experts named one by one lie as their names sort (0, 1, 10, 11, ..., 2, ...): used in place all the same. */
static void test_experts_in_file_order(void **state) {
    (void)state;
    char path[1024];
    snprintf(path, sizeof path, "%s/kimi_k25_int4", golden);
    sl_load_opts o = options(path, 0, 1, SL_EXPERTS_AUTO);
    sl_model *m = load(&o, cpu);
    const sl_moe *moe = &m->layer[2].moe;
    assert_non_null(moe->place);
    assert_true(moe->place[0] == 0 && moe->place[1] == 1 && moe->place[10] == 2 && moe->place[2] == 12);
    assert_true(moe->gate.stride > (uint64_t)moe->gate.n * moe->gate.row_bytes); /* up and down lie between */
    sl_model_free(m, cpu);
    o = options(path, 1, 2, SL_EXPERTS_EP); /* experts 12..23: 12 .. 19, 20 .. 23 are in order */
    m = load(&o, cpu);
    assert_null(m->layer[2].moe.place);
    sl_model_free(m, cpu);
}

static void
test_shares(void **state) { /* layers above the top are not loaded, the head only when wanted, o_bias on rank 0 */
    (void)state;
    char path[1024];
    snprintf(path, sizeof path, "%s/gpt_oss", golden);
    sl_load_opts o = options(path, 0, 4, SL_EXPERTS_AUTO);
    o.top_layer = 2;
    o.want_head = 0;
    sl_model *m = load(&o, cpu);
    assert_true(m->layer[1].q.data && !m->layer[2].q.data && !m->lm_head.data && !m->final_norm.data && m->embed.data);
    assert_true(m->layer[0].o_bias.data != NULL && m->hq == 2 && m->hkv == 1 && m->experts_ep);
    assert_true(m->layer[0].moe.first == 0 && m->layer[0].moe.local == 2 && m->layer[0].moe.bias_scale_rank0 == 1);
    sl_model_free(m, cpu);
    o = options(path, 3, 4, SL_EXPERTS_TP);
    m = load(&o, cpu);
    assert_true(!m->layer[0].o_bias.data && !m->experts_ep && m->layer[0].moe.local == 8 &&
                m->layer[0].moe.gate.n == 32 && m->layer[0].moe.bias_scale_rank0 == 0);
    assert_int_equal(m->layer[0].moe.gate_bias.n, 8 * 32);
    sl_model_free(m, cpu);
}

/* ---- damaged checkpoints: a folder whose header is edited ---- */

static char dir[64];
typedef struct ckpt {
    json_t *head;
    uint8_t *data;
    size_t n;
} ckpt;
static void read_ckpt(ckpt *c, const char *name) {
    char path[1024];
    uint64_t hn;
    struct stat st;
    snprintf(path, sizeof path, "%s/%s/model.safetensors", golden, name);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(fread(&hn, 8, 1, f), 1);
    char *text = malloc(hn);
    assert_int_equal(fread(text, 1, hn, f), hn);
    c->head = json_loadb(text, hn, 0, NULL);
    free(text);
    c->n = (size_t)st.st_size - 8 - hn;
    c->data = malloc(c->n);
    assert_int_equal(fread(c->data, 1, c->n, f), c->n);
    fclose(f);
}
static void write_ckpt(ckpt *c, const char *name) {
    char path[1200], cmd[2400];
    strcpy(dir, "/tmp/sl_weights_XXXXXX");
    assert_non_null(mkdtemp(dir));
    snprintf(cmd, sizeof cmd, "cp %s/%s/config.json %s/", golden, name, dir);
    assert_int_equal(system(cmd), 0);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    FILE *f = fopen(path, "wb");
    char *text = json_dumps(c->head, 0);
    uint64_t hn = strlen(text);
    fwrite(&hn, 8, 1, f);
    fwrite(text, 1, hn, f);
    fwrite(c->data, 1, c->n, f);
    fclose(f);
    free(text);
    json_decref(c->head);
    free(c->data);
}
static void expect_refused_by(sl_ops *ops, int code, const char *const *says) {
    char cmd[128];
    sl_model *m;
    sl_err err = {0};
    sl_load_opts o = {.model = dir, .tp = 1, .top_layer = 4, .random_format = -1};
    int rc = sl_model_load(&m, &o, ops, &err);
    if (rc != code) fail_msg("%d '%s', expected %d", rc, err.msg, code);
    for (; *says; says++)
        if (!strstr(err.msg, *says)) fail_msg("'%s' does not say '%s'", err.msg, *says);
    snprintf(cmd, sizeof cmd, "rm -r %s", dir);
    assert_int_equal(system(cmd), 0);
}
static void expect_refused(int code, const char *const *says) {
    expect_refused_by(cpu, code, says);
}
static void rename_tensor(ckpt *c, const char *from, const char *to) {
    json_t *t = json_incref(json_object_get(c->head, from));
    assert_non_null(t);
    json_object_del(c->head, from);
    json_object_set_new(c->head, to, t);
}
static json_t *entry(ckpt *c, const char *name) {
    json_t *t = json_object_get(c->head, name);
    assert_non_null(t);
    return t;
}

static void test_everything_in_one_message(void **state) {
    (void)state;
    ckpt c;
    read_ckpt(&c, "llama");
    rename_tensor(&c, "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.upp_proj.weight");
    json_object_set_new(entry(&c, "model.layers.0.self_attn.k_proj.weight"), "shape", json_pack("[i, i]", 64, 16));
    json_object_set_new(entry(&c, "model.layers.2.self_attn.v_proj.weight"), "dtype", json_string("I16"));
    json_object_set_new(entry(&c, "model.layers.3.input_layernorm.weight"), "shape", json_pack("[i, i]", 64, 1));
    write_ckpt(&c, "llama");
    expect_refused(SL_ECONFIG,
                   (const char *const[]){
                       "5 faults", "'model.layers.0.self_attn.k_proj.weight' has shape [64, 16], expected [16, 64]",
                       "'model.layers.1.mlp.up_proj.weight' is missing",
                       "'model.layers.2.self_attn.v_proj.weight' has type I16",
                       "'model.layers.3.input_layernorm.weight' has shape [64, 1], expected [64]",
                       "'model.layers.1.mlp.upp_proj.weight' is unexpected", NULL});
}
static void test_many_faults(void **state) { /* more than fit a message: counted */
    (void)state;
    ckpt c;
    read_ckpt(&c, "kimi_k2");
    for (int e = 0; e < 24; e++) {
        char from[128], to[128];
        snprintf(from, sizeof from, "model.layers.2.mlp.experts.%d.up_proj.weight", e);
        snprintf(to, sizeof to, "model.layers.2.mlp.experts.%d.w3.weight", e);
        rename_tensor(&c, from, to);
    }
    write_ckpt(&c, "kimi_k2");
    expect_refused(
        SL_ECONFIG,
        (const char *const[]){"48 faults", "'model.layers.2.mlp.experts.0.up_proj.weight' is missing", "...", NULL});
}
static void test_quantized_faults(void **state) {
    (void)state;
    ckpt c;
    read_ckpt(&c, "deepseek_v3_fp8");
    rename_tensor(&c, "model.layers.0.self_attn.o_proj.weight_scale_inv",
                  "model.layers.0.self_attn.o_proj.weight_scale");
    write_ckpt(&c, "deepseek_v3_fp8");
    expect_refused(SL_ECONFIG, (const char *const[]){"o_proj.weight_scale_inv' is missing",
                                                     "o_proj.weight_scale' is unexpected", NULL});

    read_ckpt(&c, "kimi_k25_int4");
    json_t *t = entry(&c, "language_model.model.layers.1.mlp.experts.3.down_proj.weight_scale");
    uint16_t nan = 0x7fc0;
    memcpy(c.data + json_integer_value(json_array_get(json_object_get(t, "data_offsets"), 0)) + 6, &nan, 2);
    write_ckpt(&c, "kimi_k25_int4");
    expect_refused(SL_EDATA, (const char *const[]){"NaN", "layers.1.mlp.experts.3.down_proj", NULL});

    read_ckpt(&c, "kimi_k25_int4"); /* FP8 data under a configuration that says INT4 */
    write_ckpt(&c, "kimi_k2");
    expect_refused(SL_ECONFIG, (const char *const[]){"declares no such quantization", NULL});
    read_ckpt(&c, "gpt_oss");
    write_ckpt(&c, "gpt_oss_mxfp4");
    expect_refused(SL_ECONFIG, (const char *const[]){"declares mxfp4 weights, but no tensor", NULL});
}
/* A scale or a norm that is not a number is found while loading, by tensor and expert, in place and copied. */
static void put_bytes(ckpt *c, const char *tensor, long at, const void *v, size_t n) {
    json_t *off = json_object_get(entry(c, tensor), "data_offsets");
    long lo = (long)json_integer_value(json_array_get(off, 0)), hi = (long)json_integer_value(json_array_get(off, 1));
    memcpy(c->data + (at < 0 ? hi : lo) + at, v, n);
}
static void test_not_finite(void **state) {
    (void)state;
    static const uint8_t nan8 = 255;
    static const uint16_t inf16 = 0xff80, nan16 = 0x7fc1;
    static const float nan32 = NAN;
    static const struct {
        const char *name, *tensor, *says;
        long at; /* negative: from the end */
        const void *v;
        size_t n;
    } t[] = {
        {"kimi_k25_int4", "language_model.model.layers.3.mlp.experts.23.gate_proj.weight_scale",
         "layers.3.mlp.experts.23.gate_proj", -2, &inf16, 2},
        {"deepseek_v3_fp8", "model.layers.2.self_attn.kv_b_proj.weight_scale_inv", "layers.2.self_attn.kv_b_proj", 0,
         &nan32, 4},
        {"gpt_oss_mxfp4", "model.layers.0.mlp.experts.down_proj_scales", "layers.0.mlp.experts.down_proj", -1, &nan8,
         1},
        {"qwen3", "model.layers.1.self_attn.q_norm.weight", "layers.1.self_attn.q_norm", 4, &nan16, 2},
        {"gpt_oss", "model.layers.1.self_attn.sinks", "layers.1.self_attn.sinks", -2, &inf16, 2},
    };
    for (size_t i = 0; i < sizeof t / sizeof *t; i++)
        for (int copy = 0; copy < 3; copy++) {
            ckpt c;
            read_ckpt(&c, t[i].name);
            put_bytes(&c, t[i].tensor, t[i].at, t[i].v, t[i].n);
            write_ckpt(&c, t[i].name);
            expect_refused_by(copy == 2 ? &staged
                              : copy    ? &copying
                                        : cpu,
                              SL_EDATA, (const char *const[]){"NaN or infinite", t[i].says, NULL});
        }
}
static void test_finite_blocks(void **state) { /* the scales inside GGUF blocks, cut at any byte */
    (void)state;
    static const struct {
        sl_finite kind;
        uint32_t block, at[2], n;
    } t[] = {
        {SL_FINITE_Q8_0, 34, {0, 0}, 1},  {SL_FINITE_Q4_0, 18, {0, 0}, 1},    {SL_FINITE_Q4_1, 20, {0, 2}, 2},
        {SL_FINITE_Q5_0, 22, {0, 0}, 1},  {SL_FINITE_Q5_1, 24, {0, 2}, 2},    {SL_FINITE_Q4_K, 144, {0, 2}, 2},
        {SL_FINITE_Q5_K, 176, {0, 2}, 2}, {SL_FINITE_Q6_K, 210, {208, 0}, 1}, {SL_FINITE_MXFP4_GGUF, 17, {0, 0}, 1}};
    sl_err err = {0};
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        uint32_t n = t[i].block * 3, bytes = t[i].kind == SL_FINITE_MXFP4_GGUF ? 1 : 2;
        uint8_t *b = malloc(n);
        memset(b, 0x3c, n);
        sl_finite_check c = {t[i].kind, "blk.0.ffn_down", 0};
        for (uint32_t at = 0; at < n; at++) {
            uint8_t was[2] = {b[at], at + 1 < n ? b[at + 1] : 0};
            int is = 0;
            for (uint32_t k = 0; k < t[i].n; k++) is |= at % t[i].block == t[i].at[k];
            b[at] = bytes == 1 ? 255 : 0;
            if (bytes == 2 && at + 1 < n) b[at + 1] = 0x7c;
            for (uint32_t cut = 0; cut <= at; cut += 13) /* a later start must find it as well */
                assert_int_equal(sl_check_finite(b + cut, 1, n - cut, n - cut, cut, c, &err), is ? SL_EDATA : 0);
            if (is) assert_int_equal(sl_check_finite(b, 1, at, at, 0, c, &err), 0); /* cut off before it */
            b[at] = was[0];
            if (at + 1 < n) b[at + 1] = was[1];
        }
        free(b);
    }
}
static void test_truncated(void **state) {
    (void)state;
    ckpt c;
    read_ckpt(&c, "qwen3");
    c.n -= 1000;
    write_ckpt(&c, "qwen3");
    expect_refused(SL_EDATA, (const char *const[]){"model.safetensors", "truncated", NULL});
}

/* ---- random ---- */

static void write_config(const char *name, const char *patch) {
    char path[1200];
    strcpy(dir, "/tmp/sl_random_XXXXXX");
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/%s/config.json", golden, name);
    json_t *j = json_load_file(path, 0, NULL), *p = json_loads(patch, 0, NULL);
    assert_true(j && p);
    json_object_update(json_object_get(j, "text_config") ? json_object_get(j, "text_config") : j, p);
    snprintf(path, sizeof path, "%s/config.json", dir);
    assert_int_equal(json_dump_file(j, path, 0), 0);
    json_decref(j);
    json_decref(p);
}
static void drop_dir(void) {
    char cmd[128];
    snprintf(cmd, sizeof cmd, "rm -r %s", dir);
    assert_int_equal(system(cmd), 0);
}

static void
check_spread(const sl_mat *m) { /* root mean square within a factor of two of 1/sqrt(k), mean near zero, rows differ */
    double sum = 0, sq = 0;
    int64_t rows = m->n < 32 ? m->n : 32;
    for (int64_t r = 0; r < rows; r++) {
        float *x = row_of(m, m->count - 1, r);
        for (int64_t i = 0; i < m->k; i++) {
            assert_true(isfinite(x[i]));
            sum += x[i];
            sq += (double)x[i] * x[i];
        }
        free(x);
    }
    double n = (double)(rows * m->k), rms = sqrt(sq / n), want = 1 / sqrt((double)m->k);
    if (!(rms > 0.5 * want && rms < 2 * want))
        fail_msg("%s: rms %g, expected about %g", sl_wfmt_name(m->fmt), rms, want);
    if (!(fabs(sum / n) < 0.3 * rms)) fail_msg("%s: mean %g at rms %g", sl_wfmt_name(m->fmt), sum / n, rms);
    float *x = row_of(m, 0, 0), *y = row_of(m, 0, 1);
    assert_memory_not_equal(x, y, (size_t)m->k * 4);
    free(x);
    free(y);
}

/* Rank r of two against the whole. */
static void check_slices(const sl_model *full, const sl_model *part, int r) {
    for (int l = 0; l < full->spec.n_layers; l++) {
        const sl_mat *x[MATS], *y[MATS];
        mats_of(&full->layer[l], x), mats_of(&part->layer[l], y);
        for (int i = 0; i < MATS; i++) {
            if (!x[i]->data) continue;
            int64_t e0 = x[i]->count > y[i]->count ? r * y[i]->count : 0;
            int64_t n0 = i < ROWS_TO && x[i]->n > y[i]->n ? r * y[i]->n : 0,
                    k0 = i >= ROWS_TO && i < COLS_TO && x[i]->k > y[i]->k ? r * y[i]->k : 0;
            for (int64_t e = 0; e<y[i]->count; e += y[i]->count> 1 ? y[i]->count - 1 : 1)
                for (int64_t row = 0; row < y[i]->n; row += 7) same_row(x[i], e0 + e, n0 + row, k0, y[i], e, row);
        }
    }
}

static void test_random_formats(void **state) {
    (void)state;
    for (int moe = 0; moe < 2; moe++) {
        write_config(moe ? "qwen3_moe" : "llama", moe ? "{\"hidden_size\":512,\"moe_intermediate_size\":512,\"num_"
                                                        "hidden_layers\":1,\"head_dim\":64,\"num_attention_heads\":8}"
                                                      : "{\"hidden_size\":512,\"intermediate_size\":1024,\"num_hidden_"
                                                        "layers\":1,\"head_dim\":64,\"num_attention_heads\":8}");
        for (int f = 0; f < SL_W_N; f++)
            for (int split = SL_EXPERTS_AUTO; split <= SL_EXPERTS_TP; split += moe ? 2 : 3) {
                sl_load_opts o = options(dir, 0, 1, split);
                o.random = 1;
                o.seed = 5;
                o.top_layer = 1;
                o.random_format = f;
                sl_model *full = load(&o, cpu);
                const sl_mat *m[MATS];
                mats_of(&full->layer[0], m);
                for (int i = 0; i < MATS; i++)
                    if (m[i]->data) {
                        assert_int_equal(m[i]->fmt, f);
                        check_spread(m[i]);
                    }
                o.tp = 2;
                for (int r = 0; r < 2; r++) {
                    o.rank = r;
                    seen_done = 0;
                    sl_model *part = load(&o, r ? &copying : cpu);
                    check_slices(full, part, r);
                    sl_model_free(part, cpu);
                }
                sl_model_free(full, cpu);
            }
        drop_dir();
    }
}

static void
test_random_configured(void **state) { /* the formats that the configuration declares, and a seed that matters */
    (void)state;
    static const struct {
        const char *name;
        sl_wfmt expert, attn;
    } want[] = {{"kimi_k25_int4", SL_W_INT4, SL_W_BF16},
                {"gpt_oss_mxfp4", SL_W_MXFP4, SL_W_BF16},
                {"deepseek_v3_fp8", SL_W_FP8, SL_W_FP8},
                {"gpt_oss", SL_W_BF16, SL_W_BF16}};
    char path[1024];
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        snprintf(path, sizeof path, "%s/%s", golden, want[i].name);
        sl_load_opts o = options(path, 0, 1, SL_EXPERTS_AUTO);
        o.random = 1;
        sl_model *a = load(&o, cpu), *b;
        assert_int_equal(a->layer[3].moe.gate.fmt, want[i].expert);
        assert_int_equal(a->layer[3].o.fmt, want[i].attn);
        assert_true(a->final_norm.data[0] != a->final_norm.data[1] && fabsf(a->final_norm.data[0] - 1) < 0.5f);
        seen_done = 0;
        b = load(&o, &copying);
        same_model(a, b);
        sl_model_free(b, cpu);
        o.seed = 1;
        seen_done = 0;
        b = load(&o, cpu);
        float *x = row_of(&a->layer[3].o, 0, 0), *y = row_of(&b->layer[3].o, 0, 0);
        assert_memory_not_equal(x, y, 64);
        free(x);
        free(y);
        sl_model_free(a, cpu);
        sl_model_free(b, cpu);
    }
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    golden = argv[1];
    sl_err err = {0};
    if (sl_ops_cpu_create(&cpu, 1, SL_F32, &err)) return 1;
    copying = *cpu;
    copying.name = "copying";
    staged = copying;
    staged.host_alloc = pinned_alloc;
    staged.host_free = pinned_free;
    staged.upload_start = upload_start;
    staged.upload_wait = upload_wait;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mapped_and_copied),
        cmocka_unit_test(test_experts_in_file_order),
        cmocka_unit_test(test_shares),
        cmocka_unit_test(test_everything_in_one_message),
        cmocka_unit_test(test_many_faults),
        cmocka_unit_test(test_quantized_faults),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_finite_blocks),
        cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_random_formats),
        cmocka_unit_test(test_random_configured),
    };
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    cpu->destroy(cpu);
    return rc;
}
