/* sluice bench WHAT: one JSON object on stdout. One row a bench in the table at the end. */
#include "tools/cli.h"
#include "tools/commands.h"
#include "stages/compute/bench.h"
#include "kernels/ops.h"
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

static int print_json(json_t *j) {
    char *text = json_dumps(j, JSON_INDENT(2) | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(8));
    if (text) puts(text);
    free(text);
    json_decref(j);
    return text ? 0 : 70;
}

/* ---- forward, capture ---- */
static struct {
    const char *config, *layers, *weights, *precision, *experts, *backend, *format;
    uint64_t rank_of, threads, rows, length, warmup, repeat, micro_tokens, chunk_rows, seed;
} fo = {.layers = "eagle3",
        .weights = "random",
        .precision = "bf16",
        .experts = "auto",
        .backend = "cpu",
        .format = "config",
        .rank_of = 1,
        .threads = 1,
        .rows = 4,
        .length = 512,
        .warmup = 1,
        .repeat = 5,
        .chunk_rows = 256,
        .seed = 1};

static const sl_cli_opt forward_opts[] = {
    {"Model", 0, SL_CLI_HEAD, NULL, NULL, NULL},
    {"config", 'c', SL_CLI_STR, "DIR|FILE.gguf",
     "model folder (config.json is enough with random weights) or GGUF file", &fo.config, .required = true},
    {"weights", 'w', SL_CLI_CHOICE, "random|file",
     "random: deterministic random weights of the config's shape; file: the model's own (default random)", &fo.weights},
    {"format", 0, SL_CLI_CHOICE, "config|f32|bf16|int4|fp8|mxfp4|q8_0|q4_0|q4_1|q4_k|q6_k",
     "storage format of random linear weights (default: as the config says)", &fo.format},
    {"layers", 'l', SL_CLI_STR, "LAYERS",
     "states to capture, as in sluice extract; layers above the highest are not run (default eagle3)", &fo.layers},
    {"Parallel", 0, SL_CLI_HEAD, NULL, NULL, NULL},
    {"rank-of", 0, SL_CLI_U64, "N",
     "run one rank's share of N tensor-parallel ranks, with the reductions left out (default 1)", &fo.rank_of, .min = 1,
     .max = 64},
    {"experts", 0, SL_CLI_CHOICE, "auto|ep|tp", "how experts are split over ranks: whole or sliced (default auto)",
     &fo.experts},
    {"backend", 0, SL_CLI_CHOICE, "cpu|cuda", "default cpu", &fo.backend},
    {"threads", 't', SL_CLI_U64, "N", "CPU threads (default 1)", &fo.threads, .min = 1, .max = 1024},
    {"precision", 0, SL_CLI_CHOICE, "bf16|f32", "default bf16", &fo.precision},
    {"Work", 0, SL_CLI_HEAD, NULL, NULL, NULL},
    {"rows", 0, SL_CLI_U64, "N", "rows in the batch (default 4)", &fo.rows, .min = 1, .max = 65536},
    {"length", 0, SL_CLI_U64, "T", "tokens a row (default 512)", &fo.length, .min = 1, .max = 1 << 22},
    {"micro-tokens", 0, SL_CLI_U64, "N", "tokens a micro-batch, 0 = the whole batch (default 0)", &fo.micro_tokens},
    {"chunk-rows", 0, SL_CLI_U64, "N", "tokens a captured chunk (default 256)", &fo.chunk_rows, .min = 1,
     .max = 1 << 20},
    {"warmup", 0, SL_CLI_U64, "N", "runs that are not counted (default 1)", &fo.warmup, .max = 1000},
    {"repeat", 0, SL_CLI_U64, "N", "runs that are counted; the median is reported (default 5)", &fo.repeat, .min = 1,
     .max = SL_BENCH_MAX_RUNS},
    {"seed", 0, SL_CLI_U64, "N", "of random weights (default 1)", &fo.seed},
    {0}};
static const sl_cli forward_cli = {
    "sluice bench forward",
    "",
    "forward pass, tokens a second",
    "Runs one batch through the layers below the highest captured state and prints the median and best speed.",
    "  sluice bench forward --config tests/golden/llama --threads 2\n  sluice bench forward --config K2.5 --rank-of 8 "
    "--backend cuda",
    forward_opts,
    0,
    0};
static const sl_cli capture_cli = {"sluice bench capture",
                                   "",
                                   "forward pass with and without capture",
                                   "As bench forward, and every second run fingerprints each captured state and copies "
                                   "the chunks a rank owns to host memory. "
                                   "The ratio of both speeds is what capture costs on the compute side.",
                                   "  sluice bench capture --config tests/golden/llama --layers all",
                                   forward_opts,
                                   0,
                                   0};

static int format_of(const char *name) {
    static const struct {
        const char *name;
        int fmt;
    } t[] = {{"f32", SL_W_F32},   {"bf16", SL_W_BF16}, {"int4", SL_W_INT4}, {"fp8", SL_W_FP8},   {"mxfp4", SL_W_MXFP4},
             {"q8_0", SL_W_Q8_0}, {"q4_0", SL_W_Q4_0}, {"q4_1", SL_W_Q4_1}, {"q4_k", SL_W_Q4_K}, {"q6_k", SL_W_Q6_K}};
    for (unsigned i = 0; i < sizeof t / sizeof *t; i++)
        if (!strcmp(t[i].name, name)) return t[i].fmt;
    return -1; /* "config" */
}

static json_t *forward_json(const char *what, const sl_bench_result *r) {
    json_t *runs = json_array();
    for (int32_t i = 0; i < r->runs; i++) json_array_append_new(runs, json_real(r->forward_s[i]));
    json_t *j =
        json_pack("{s:s, s:s, s:s, s:s, s:I, s:i, s:I, s:I, s:i, s:i, s:i, s:I, s:I, s:f}", "bench", what, "family",
                  r->family, "backend", fo.backend, "precision", fo.precision, "threads", (json_int_t)fo.threads,
                  "layers_run", (int)r->layers_run, "rows", (json_int_t)fo.rows, "length", (json_int_t)fo.length,
                  "n_layers", (int)r->n_layers, "width", (int)r->width, "captures", (int)r->n_captures, "params",
                  (json_int_t)r->params, "weight_bytes", (json_int_t)r->weight_bytes, "load_s", r->load_s);
    json_object_set_new(j, "rank_of", json_integer((json_int_t)fo.rank_of));
    json_object_set_new(j, "weights", json_string(fo.weights));
    json_object_set_new(j, "workspace_bytes", json_integer((json_int_t)r->workspace_bytes));
    json_object_set_new(j, "tok_s", json_real(r->median_tok_s));
    json_object_set_new(j, "best_tok_s", json_real(r->best_tok_s));
    json_object_set_new(j, "gflop_per_token", json_real(r->gflop_per_token));
    json_object_set_new(j, "gflop_s", json_real(r->gflops));
    json_object_set_new(j, "seconds", runs);
    if (r->capture_median_tok_s > 0) {
        json_object_set_new(j, "capture_tok_s", json_real(r->capture_median_tok_s));
        json_object_set_new(j, "capture_over_forward", json_real(r->capture_median_tok_s / r->median_tok_s));
        json_object_set_new(j, "capture_bytes_per_token", json_real(r->capture_bytes_per_token));
        json_object_set_new(j, "capture_mb_s", json_real(r->capture_bytes_per_token * r->capture_median_tok_s / 1e6));
    }
    return j;
}

static int run_forward(const sl_cli *cli, const char *what, int argc, char **argv) {
    int n = 0, rc = sl_cli_parse(cli, argc, argv, &n);
    if (rc != SL_CLI_GO) return rc;
    sl_bench_opts o = {.model = fo.config,
                       .layers = fo.layers,
                       .random = !strcmp(fo.weights, "random"),
                       .random_format = format_of(fo.format),
                       .backend = !strcmp(fo.backend, "cuda") ? SL_BACKEND_CUDA : SL_BACKEND_CPU,
                       .precision = !strcmp(fo.precision, "f32") ? SL_PREC_F32 : SL_PREC_BF16,
                       .tp = (int)fo.rank_of,
                       .expert_split = !strcmp(fo.experts, "ep")   ? SL_EXPERTS_EP
                                       : !strcmp(fo.experts, "tp") ? SL_EXPERTS_TP
                                                                   : SL_EXPERTS_AUTO,
                       .threads = (int)fo.threads,
                       .rows = (int32_t)fo.rows,
                       .length = (int32_t)fo.length,
                       .warmup = (int32_t)fo.warmup,
                       .repeat = (int32_t)fo.repeat,
                       .micro_tokens = (int64_t)fo.micro_tokens,
                       .chunk_rows = (uint32_t)fo.chunk_rows,
                       .capture = !strcmp(what, "capture"),
                       .seed = fo.seed};
    sl_err err = {0};
    sl_bench_result r;
    if (sl_bench_forward(&r, &o, &err)) return sl_cli_fail(&err);
    return print_json(forward_json(what, &r));
}
static int bench_forward(int argc, char **argv) {
    return run_forward(&forward_cli, "forward", argc, argv);
}
static int bench_capture(int argc, char **argv) {
    return run_forward(&capture_cli, "capture", argc, argv);
}

/* ---- the table ---- */
static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *brief;
} benches[] = {
    {"forward", bench_forward, "forward pass, tokens a second"},
    {"capture", bench_capture, "forward pass with and without capture"},
};

static int overview(FILE *f) {
    fputs("sluice bench - how fast each stage is here; one JSON object on stdout\n\nusage: sluice bench WHAT "
          "[OPTION...]\n\n",
          f);
    for (unsigned i = 0; i < sizeof benches / sizeof *benches; i++)
        fprintf(f, "  %-10s %s\n", benches[i].name, benches[i].brief);
    fputs("\n'sluice bench WHAT --help' is the manual of one.\n", f);
    return f == stdout ? 0 : 2;
}

int sl_cmd_bench(int argc, char **argv) {
    if (argc < 2) return overview(stderr);
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) return overview(stdout);
    for (unsigned i = 0; i < sizeof benches / sizeof *benches; i++)
        if (!strcmp(argv[1], benches[i].name)) return benches[i].run(argc - 1, argv + 1);
    fprintf(stderr, "sluice bench: unknown bench '%s'\n", argv[1]);
    return overview(stderr);
}
