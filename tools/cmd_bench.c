/* sluice bench WHAT: one JSON object on stdout. One row a bench in the table at the end. */
#include "stages/compute/collective.h"
#include "tools/cli.h"
#include "tools/commands.h"
#include "tools/bench_op.h"
#include "tools/bench_ring.h"
#include "tools/bench_store.h"
#include "tools/bench_tokenize.h"
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
    const char *config, *layers, *weights, *precision, *experts, *backend, *format, *lengths, *how;
    uint64_t rank_of, ranks, threads, rows, length, warmup, repeat, micro_tokens, chunk_rows, seed;
} fo = {.layers = "eagle3",
        .weights = "random",
        .precision = "bf16",
        .experts = "auto",
        .backend = "cpu",
        .format = "config",
        .how = "best",
        .rank_of = 1,
        .ranks = 1,
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
    {"ranks", 0, SL_CLI_U64, "N",
     "run a whole group of N ranks, a process each, a GPU each where there are enough, with their sums (default 1)",
     &fo.ranks, .min = 1, .max = 8},
    {"how", 0, SL_CLI_CHOICE, "best|nccl|ring",
     "how ranks on GPUs of their own add up: best: copies between GPUs; nccl: the same slices over NCCL; ring: NCCL's "
     "own all-reduce (default best)",
     &fo.how},
    {"experts", 0, SL_CLI_CHOICE, "auto|ep|tp", "how experts are split over ranks: whole or sliced (default auto)",
     &fo.experts},
    {"backend", 0, SL_CLI_CHOICE, "cpu|cuda", "default cpu", &fo.backend},
    {"threads", 't', SL_CLI_U64, "N", "CPU threads (default 1)", &fo.threads, .min = 1, .max = 1024},
    {"precision", 0, SL_CLI_CHOICE, "bf16|f32", "default bf16", &fo.precision},
    {"Work", 0, SL_CLI_HEAD, NULL, NULL, NULL},
    {"rows", 0, SL_CLI_U64, "N", "rows in the batch (default 4)", &fo.rows, .min = 1, .max = 65536},
    {"length", 0, SL_CLI_U64, "T", "tokens a row (default 512)", &fo.length, .min = 1, .max = 1 << 22},
    {"lengths", 0, SL_CLI_STR, "T[xN],...",
     "a batch of mixed lengths in place of --rows and --length: 2048x4,512x8 is four rows of 2048 and eight of 512",
     &fo.lengths},
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
    "Runs one batch through the layers below the highest captured state and prints the median and best speed, the "
    "floor "
    "(its linear products at the rate of one large product here) and what fraction of that rate was reached.",
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
    if (fo.lengths) json_object_set_new(j, "lengths", json_string(fo.lengths));
    json_object_set_new(j, "tokens", json_integer((json_int_t)r->tokens));
    json_object_set_new(j, "rank_of", json_integer((json_int_t)fo.rank_of));
    if (fo.ranks > 1) {
        json_object_set_new(j, "ranks", json_integer((json_int_t)fo.ranks));
        json_object_set_new(j, "how", json_string(r->how));
        json_object_set_new(j, "sums", json_integer(r->sums));
        json_object_set_new(j, "sums_alone_s", json_real(r->sums_s));
        json_object_set_new(j, "sums_bus_gb_s", json_real(r->sums_bus_gb_s));
        json_object_set_new(j, "unsummed_tok_s", json_real((double)r->tokens / r->unsummed_s[r->runs / 2]));
        json_object_set_new(j, "sums_exposed", json_real(r->sums_exposed));
        json_object_set_new(j, "slowest_rank_over_fastest", json_real(r->imbalance));
    }
    json_object_set_new(j, "weights", json_string(fo.weights));
    json_object_set_new(j, "workspace_bytes", json_integer((json_int_t)r->workspace_bytes));
    json_object_set_new(j, "tok_s", json_real(r->median_tok_s));
    json_object_set_new(j, "best_tok_s", json_real(r->best_tok_s));
    json_object_set_new(j, "tok_per_cpu_s", json_real(r->cpu_tok_s));
    json_object_set_new(j, "gflop_per_token", json_real(r->gflop_per_token));
    json_object_set_new(j, "gflop_s", json_real(r->gflops));
    if (r->ceiling_gflops > 0) {
        json_object_set_new(j, "ceiling_gflop_s", json_real(r->ceiling_gflops));
        json_object_set_new(j, "floor_s", json_real((double)r->tokens * r->gflop_per_token / r->ceiling_gflops));
        json_object_set_new(j, "fraction", json_real(r->gflops / r->ceiling_gflops));
    }
    json_object_set_new(j, "seconds", runs);
    if (r->capture_median_tok_s > 0) {
        json_object_set_new(j, "capture_tok_s", json_real(r->capture_median_tok_s));
        json_object_set_new(j, "capture_over_forward", json_real(r->capture_median_tok_s / r->median_tok_s));
        json_object_set_new(j, "capture_bytes_per_token", json_real(r->capture_bytes_per_token));
        json_object_set_new(j, "capture_mb_s", json_real(r->capture_bytes_per_token * r->capture_median_tok_s / 1e6));
    }
    return j;
}

int32_t sl_bench_lengths(const char *s, int32_t *out, int32_t cap, int32_t *longest) {
    int32_t n = 0;
    for (;;) {
        char *end;
        unsigned long T = strtoul(s, &end, 10), times = 1;
        if (end == s || T < 1 || T > 1u << 22) return 0;
        if (*end == 'x') {
            s = end + 1;
            times = strtoul(s, &end, 10);
            if (end == s) return 0;
        }
        if (times < 1 || times > (unsigned long)(cap - n)) return 0;
        if ((int32_t)T > *longest) *longest = (int32_t)T;
        while (times--) out[n++] = (int32_t)T;
        if (!*end) return n;
        if (*end != ',') return 0;
        s = end + 1;
    }
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
                       .ranks = (int)fo.ranks,
                       .how = !strcmp(fo.how, "ring")   ? SL_SUMS_RING
                              : !strcmp(fo.how, "nccl") ? SL_SUMS_NCCL
                                                        : SL_SUMS_BEST,
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
    static int32_t lengths[4096];
    if (fo.lengths) {
        o.length = 0;
        o.rows = sl_bench_lengths(fo.lengths, lengths, (int32_t)(sizeof lengths / sizeof *lengths), &o.length);
        o.lengths = lengths;
        if (!o.rows) {
            sl_err_set(&err, SL_EUSAGE, "--lengths %s: expected lengths such as 2048x4,512x8, at most 4096 rows",
                       fo.lengths);
            return sl_cli_fail(&err);
        }
    }
    if (sl_bench_forward(&r, &o, &err)) return sl_cli_fail(&err);
    return print_json(forward_json(what, &r));
}
static int bench_forward(int argc, char **argv) {
    return run_forward(&forward_cli, "forward", argc, argv);
}
static int bench_capture(int argc, char **argv) {
    return run_forward(&capture_cli, "capture", argc, argv);
}

/* ---- nll ---- */
static struct {
    const char *model, *rows, *precision, *backend;
    uint64_t threads, max_rows;
} no = {.precision = "bf16", .backend = "cpu", .threads = 1};
static const sl_cli_opt nll_opts[] = {
    {"model", 'm', SL_CLI_STR, "DIR|FILE.gguf", "model folder or GGUF file, with its weights", &no.model,
     .required = true},
    {"rows", 'r', SL_CLI_STR, "FILE.jsonl", "one {\"input_ids\": [...]} a line", &no.rows, .required = true},
    {"max-rows", 0, SL_CLI_U64, "N", "only the first N rows, 0 = all (default 0)", &no.max_rows},
    {"backend", 0, SL_CLI_CHOICE, "cpu|cuda", "default cpu", &no.backend},
    {"threads", 't', SL_CLI_U64, "N", "CPU threads (default 1)", &no.threads, .min = 1, .max = 1024},
    {"precision", 0, SL_CLI_CHOICE, "bf16|f32", "default bf16", &no.precision},
    {0}};
static const sl_cli nll_cli = {
    "sluice bench nll",
    "",
    "teacher NLL of given token rows",
    "Runs each row through the whole model and prints its mean next-token negative log likelihood in nats, and the "
    "mean over rows "
    "(mean_row) and over tokens (mean_token). tests/bench/nll_llama.py prints the same from llama.cpp, for comparison.",
    "  sluice bench nll --model SmolLM2.gguf --rows rows.jsonl --threads 2",
    nll_opts,
    0,
    0};

typedef struct row_list {
    sl_bench_row *row;
    size_t n, cap;
} row_list;

static int add_row(row_list *l, json_t *ids, size_t line, sl_err *err) {
    size_t T = json_array_size(ids);
    if (!T || T > 1u << 24)
        return sl_err_set(err, SL_EDATA, "%s line %zu: no \"input_ids\" with 1 to 2^24 numbers", no.rows, line);
    if (l->n == l->cap) {
        size_t cap = l->cap ? 2 * l->cap : 64;
        sl_bench_row *r = realloc(l->row, cap * sizeof *r);
        if (!r) return sl_err_set(err, SL_ETEMP, "out of memory");
        l->row = r;
        l->cap = cap;
    }
    int32_t *out = malloc(T * sizeof *out);
    if (!out) return sl_err_set(err, SL_ETEMP, "out of memory");
    l->row[l->n++] = (sl_bench_row){.ids = out, .T = (int32_t)T};
    for (size_t t = 0; t < T; t++) {
        json_t *v = json_array_get(ids, t);
        if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) > INT32_MAX)
            return sl_err_set(err, SL_EDATA, "%s line %zu: input_ids[%zu] is no token id", no.rows, line, t);
        out[t] = (int32_t)json_integer_value(v);
    }
    return 0;
}

static int read_rows(row_list *l, sl_err *err) {
    FILE *f = fopen(no.rows, "r");
    if (!f) return sl_err_set(err, SL_ECONFIG, "%s cannot be read", no.rows);
    char *text = NULL;
    size_t cap = 0, line = 0;
    int rc = 0;
    while (!rc && (!no.max_rows || l->n < no.max_rows) && getline(&text, &cap, f) > 0) {
        line++;
        if (strspn(text, " \t\r\n") == strlen(text)) continue;
        json_error_t je;
        json_t *j = json_loads(text, 0, &je);
        if (!j)
            rc = sl_err_set(err, SL_EDATA, "%s line %zu: %s at column %d", no.rows, line, je.text, je.column);
        else
            rc = add_row(l, json_object_get(j, "input_ids"), line, err);
        json_decref(j);
    }
    free(text);
    fclose(f);
    if (!rc && !l->n) rc = sl_err_set(err, SL_EDATA, "%s has no rows", no.rows);
    return rc;
}

static json_t *nll_json(const row_list *l, const double *nll, double tokens_s) {
    json_t *each = json_array();
    double rows = 0, sum = 0, tokens = 0, weighted = 0;
    for (size_t i = 0; i < l->n; i++) {
        json_array_append_new(each, l->row[i].T > 1 ? json_real(nll[i]) : json_null());
        if (l->row[i].T < 2) continue;
        rows++;
        sum += nll[i];
        tokens += l->row[i].T - 1;
        weighted += nll[i] * (l->row[i].T - 1);
    }
    json_t *j = json_pack("{s:s, s:s, s:s, s:I, s:f}", "bench", "nll", "model", no.model, "precision", no.precision,
                          "rows", (json_int_t)rows, "tok_s", tokens_s);
    if (rows > 0) {
        json_object_set_new(j, "mean_row", json_real(sum / rows));
        json_object_set_new(j, "mean_token", json_real(weighted / tokens));
    }
    json_object_set_new(j, "nll", each);
    return j;
}

static int bench_nll(int argc, char **argv) {
    int n = 0, rc = sl_cli_parse(&nll_cli, argc, argv, &n);
    if (rc != SL_CLI_GO) return rc;
    row_list l = {0};
    sl_err err = {0};
    sl_bench_opts o = {.model = no.model,
                       .backend = !strcmp(no.backend, "cuda") ? SL_BACKEND_CUDA : SL_BACKEND_CPU,
                       .precision = !strcmp(no.precision, "f32") ? SL_PREC_F32 : SL_PREC_BF16,
                       .random_format = -1,
                       .threads = (int)no.threads};
    double *nll = NULL, tokens_s = 0;
    rc = read_rows(&l, &err);
    if (!rc && !(nll = calloc(l.n, sizeof *nll))) rc = sl_err_set(&err, SL_ETEMP, "out of memory");
    if (!rc) rc = sl_bench_nll(nll, &tokens_s, l.row, (int32_t)l.n, &o, &err);
    rc = rc ? sl_cli_fail(&err) : print_json(nll_json(&l, nll, tokens_s));
    for (size_t i = 0; i < l.n; i++) free((void *)(uintptr_t)l.row[i].ids);
    free(l.row);
    free(nll);
    return rc;
}

/* ---- the table ---- */
static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *brief;
} benches[] = {
    {"forward", bench_forward, "forward pass, tokens a second"},
    {"nll", bench_nll, "teacher NLL of given token rows"},
    {"capture", bench_capture, "forward pass with and without capture"},
    {"attention", sl_bench_cmd_attention, "causal attention alone, TFLOP/s"},
    {"gemm", sl_bench_cmd_gemm, "a dense product alone, TFLOP/s"},
    {"moe", sl_bench_cmd_moe, "a block of experts, TFLOP/s"},
    {"allreduce", sl_bench_cmd_allreduce, "sums over ranks, GB/s"},
    {"ring", sl_bench_cmd_ring, "a ring between two processes, messages and GB/s"},
    {"store", sl_bench_cmd_store, "writer throughput, commits included"},
    {"codec", sl_bench_cmd_codec, "compression ratio and speed of one thread"},
    {"tokenize", sl_bench_cmd_tokenize, "text to token ids on one thread"},
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
