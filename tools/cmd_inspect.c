/* sluice inspect: what a model is and what running it takes, from its configuration and tensor table alone. */
#include "tools/cli.h"
#include "tools/commands.h"
#include "ipc/boot.h"
#include "stages/compute/weights.h"
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct {
    const char *layers, *experts, *precision;
    uint64_t tp;
    bool json;
} o = {.layers = "eagle3", .experts = "auto", .precision = "bf16", .tp = 1};

static const sl_cli_opt opts[] = {
    {"tp", 't', SL_CLI_U64, "N", "ranks that share the model (tensor parallel width); default 1", &o.tp, 1,
     SL_MAX_RANKS},
    {"layers", 'l', SL_CLI_STR, "LIST",
     "states to capture: indices 0..n, n, n-K, n/K, or eagle3, speculators-0.3, dflash, all; default eagle3",
     &o.layers},
    {"experts", 0, SL_CLI_CHOICE, "auto|ep|tp",
     "routed experts whole per rank (ep) or sliced (tp); default auto: ep when they divide", &o.experts},
    {"precision", 0, SL_CLI_CHOICE, "bf16|f32", "element type of the stored states; default bf16", &o.precision},
    {"json", 0, SL_CLI_FLAG, NULL, "print one JSON object instead of text", &o.json},
    {0}};

static const sl_cli cli = {"sluice inspect",
                           "MODEL",
                           "what a model is and what running it takes, without loading it",
                           "Reads the configuration and the table of tensors of MODEL (a folder with config.json and "
                           "safetensors, or a .gguf file), checks every name, shape and type "
                           "against what its family needs, and prints family, sizes, formats, the memory that one "
                           "rank's share of the weights takes, the tensor-parallel widths that "
                           "work, and how many bytes the chosen states have. Weights themselves are not read.\n\n"
                           "A folder that has no weights is shown from its configuration alone, with the formats that "
                           "it declares. Only the layers that the chosen states need count "
                           "in the plan. Exit status 78 when the model cannot be run, with every fault named.",
                           "sluice inspect ~/models/Qwen3-8B\n"
                           "sluice inspect --tp 8 --layers eagle3 ~/models/Kimi-K2.5\n"
                           "sluice inspect --json model.gguf",
                           opts,
                           1,
                           1};

typedef struct view {
    const char *model;
    sl_spec spec;
    sl_model_plan plan;
    uint32_t hidx[SL_MAX_LAYERS + 1];
    int n_states, n_widths, width[SL_MAX_RANKS], split, no_weights;
    uint64_t token_bytes;
    char fingerprint[80];
} view;

static int weights_missing(const char *model) {
    char path[4096];
    if (sl_spec_is_gguf(model)) return 0;
    snprintf(path, sizeof path, "%s/model.safetensors", model);
    if (!access(path, F_OK)) return 0;
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", model);
    return access(path, F_OK) != 0;
}

static int look(view *v, sl_err *err) {
    int rc = sl_spec_load(&v->spec, v->model, 0, err);
    if (rc) return rc;
    v->split = !strcmp(o.experts, "ep") ? SL_EXPERTS_EP : !strcmp(o.experts, "tp") ? SL_EXPERTS_TP : SL_EXPERTS_AUTO;
    v->n_states = sl_spec_layers(o.layers, v->spec.n_layers, v->hidx, SL_MAX_LAYERS + 1, err);
    if (v->n_states < 0) return v->n_states;
    v->n_widths = sl_spec_widths(&v->spec, v->split, SL_MAX_RANKS, v->width);
    v->token_bytes = (uint64_t)v->n_states * (uint64_t)v->spec.width * (strcmp(o.precision, "f32") ? 2 : 4);
    v->no_weights = weights_missing(v->model);
    int top = (int)v->hidx[v->n_states - 1];
    sl_load_opts lo = {.model = v->model,
                       .tp = (int)o.tp,
                       .expert_split = v->split,
                       .top_layer = top,
                       .want_head = top == v->spec.n_layers,
                       .random = v->no_weights,
                       .random_format = -1};
    rc = sl_model_plan_make(&v->plan, &v->spec, &lo, err);
    return rc ? rc : sl_spec_fingerprint(v->model, v->fingerprint, err);
}

static int moe_layers(const sl_spec *s) {
    int n = 0;
    for (int32_t i = 0; i < s->n_layers; i++) n += s->layer[i].mlp == SL_MLP_MOE;
    return n;
}

static void print_json(const view *v) {
    const sl_spec *s = &v->spec;
    json_t *fmt = json_object(), *states = json_array(), *widths = json_array();
    for (int f = 0; f < SL_W_N; f++)
        if (v->plan.fmt_bytes[f])
            json_object_set_new(fmt, sl_wfmt_name((sl_wfmt)f), json_integer((json_int_t)v->plan.fmt_bytes[f]));
    for (int i = 0; i < v->n_states; i++) json_array_append_new(states, json_integer(v->hidx[i]));
    for (int i = 0; i < v->n_widths; i++) json_array_append_new(widths, json_integer(v->width[i]));
    json_t *j = json_pack("{s:s, s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:I, s:I, s:s, s:b}", "model",
                          v->model, "family", s->family, "architecture", s->arch, "fingerprint", v->fingerprint,
                          "layers", s->n_layers, "moe_layers", moe_layers(s), "width", s->width, "vocabulary", s->vocab,
                          "heads", s->heads, "kv_heads", s->kv_heads, "experts", s->experts, "experts_per_token",
                          s->top_k, "max_positions", (json_int_t)s->max_pos, "parameters", (json_int_t)v->plan.params,
                          "quantization", s->quant, "weights_present", !v->no_weights);
    json_object_set_new(j, "tp_widths", widths);
    json_object_set_new(j, "plan",
                        json_pack("{s:I, s:I, s:I, s:I, s:I, s:o}", "tp", (json_int_t)o.tp, "weight_bytes_per_rank",
                                  (json_int_t)v->plan.weight_bytes, "largest_layer_dequantized_bytes",
                                  (json_int_t)v->plan.prepared_bytes, "file_bytes", (json_int_t)v->plan.file_bytes,
                                  "pinned_bytes_while_loading", (json_int_t)v->plan.pinned_bytes, "bytes_by_format",
                                  fmt));
    json_object_set_new(j, "states",
                        json_pack("{s:o, s:s, s:I, s:I}", "h", states, "dtype", o.precision, "bytes_per_token",
                                  (json_int_t)v->token_bytes, "bytes_per_million_tokens",
                                  (json_int_t)v->token_bytes * 1000000));
    json_object_set_new(j, "unknown_keys", json_string(s->unknown));
    json_dumpf(j, stdout, JSON_INDENT(2) | JSON_PRESERVE_ORDER);
    putchar('\n');
    json_decref(j);
}

static void print_attention(const sl_spec *s) {
    if (s->attn == SL_ATTN_MLA)
        printf("attention     MLA, %d heads, q rank %d, kv rank %d, %d + %d rotated, values %d\n", s->heads, s->q_lora,
               s->kv_lora, s->nope_dim, s->rope_dim, s->v_dim);
    else
        printf("attention     %d heads, %d key/value heads, %d elements a head%s%s%s\n", s->heads, s->kv_heads,
               s->head_dim, s->qk_norm ? ", q/k norms" : "", s->qkv_bias ? ", biases" : "", s->sinks ? ", sinks" : "");
    int windows = 0;
    for (int32_t i = 0; i < s->n_layers; i++) windows += s->layer[i].window > 0;
    if (windows) printf("              %d of %d layers see a sliding window\n", windows, s->n_layers);
}

static void print_text(const view *v) {
    static const char *const rope[] = {"plain", "linear", "llama3", "yarn"};
    const sl_spec *s = &v->spec;
    char a[32], b[32];
    printf("model         %s\nfamily        %s (%s)\n", v->model, s->family, s->arch);
    printf("layers        %d of width %d (%d of them with experts), vocabulary %d%s\n", s->n_layers, s->width,
           moe_layers(s), s->vocab, s->tied ? ", head tied to the embedding" : "");
    print_attention(s);
    printf("rope          %s, theta %g", s->rope[0].divide ? "scaled by divisors" : rope[s->rope[0].scaling],
           s->rope[0].theta);
    if (s->rope[0].scaling) printf(", factor %g", s->rope[0].factor);
    printf(", positions %" PRId64 "\n", s->max_pos);
    if (s->experts)
        printf("experts       %d, %d a token, width %d, shared %d\n", s->experts, s->top_k, s->moe_inter,
               s->shared_inter);
    printf("parameters    %s\n", sl_cli_count(a, (double)v->plan.params));
    printf("quantization  %s%s\n", *s->quant ? s->quant : "none",
           v->no_weights ? " (as configured: the folder has no weights)" : "");
    printf("fingerprint   %s\n", v->fingerprint);
    printf("widths (--tp) ");
    for (int i = 0; i < v->n_widths; i++) printf("%s%d", i ? ", " : "", v->width[i]);
    printf("\n\nmemory of one rank of %" PRIu64 ", layers 0..%u\n", o.tp, v->hidx[v->n_states - 1]);
    printf("  weights     %s", sl_cli_bytes(a, (double)v->plan.weight_bytes));
    const char *sep = " (";
    for (int f = 0; f < SL_W_N; f++)
        if (v->plan.fmt_bytes[f]) {
            printf("%s%s %s", sep, sl_wfmt_name((sl_wfmt)f), sl_cli_bytes(b, (double)v->plan.fmt_bytes[f]));
            sep = ", ";
        }
    printf(")\n  dequantized %s for the largest layer, where the backend needs that\n",
           sl_cli_bytes(a, (double)v->plan.prepared_bytes));
    if (v->plan.file_bytes)
        printf("  files       %s, read on a GPU's host through %s of pinned memory\n",
               sl_cli_bytes(a, (double)v->plan.file_bytes), sl_cli_bytes(b, (double)v->plan.pinned_bytes));
    printf("\nstates        ");
    for (int i = 0; i < v->n_states; i++) printf("%sH[%u]", i ? ", " : "", v->hidx[i]);
    printf(" in %s\n  a token     %" PRIu64 " bytes\n  a million   %s\n", o.precision, v->token_bytes,
           sl_cli_bytes(a, (double)v->token_bytes * 1e6));
}

int sl_cmd_inspect(int argc, char **argv) {
    int n = 0, rc = sl_cli_parse(&cli, argc, argv, &n);
    if (rc != SL_CLI_GO) return rc;
    sl_err err = {0};
    view *v = calloc(1, sizeof *v);
    if (!v) {
        sl_err_set(&err, SL_ETEMP, "out of memory");
        return sl_cli_fail(&err);
    }
    v->model = argv[1];
    rc = look(v, &err);
    if (rc == SL_EDATA) rc = err.code = SL_ECONFIG; /* damaged: it cannot be run */
    if (!rc && *v->spec.unknown)
        fprintf(stderr, "warning: config.json has keys that are not known and were not used: %s\n", v->spec.unknown);
    if (!rc && o.json)
        print_json(v);
    else if (!rc)
        print_text(v);
    sl_spec_free(&v->spec);
    free(v);
    return rc ? sl_cli_fail(&err) : 0;
}
