#include "tools/bench_op.h"
#include "ipc/boot.h"
#include "stages/compute/bench_ops.h"
#include "stages/compute/collective.h"
#include "tools/cli.h"
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

static struct {
    const char *backend, *precision, *format, *how, *lengths;
    uint64_t threads, repeat, inner, tokens, width, out, rows, length, heads, kv_heads, dqk, dv, window, experts, top_k,
        shared, ranks, link;
} bo;

#define COMMON                                                                                                         \
    {"Machine", 0, SL_CLI_HEAD, NULL, NULL, NULL},                                                                     \
        {"backend", 0, SL_CLI_CHOICE, "cpu|cuda", "default cpu", &bo.backend},                                         \
        {"threads", 't', SL_CLI_U64, "N", "CPU threads (default 1)", &bo.threads, .min = 1, .max = 1024},              \
        {"precision", 0, SL_CLI_CHOICE, "bf16|f32", "default bf16", &bo.precision},                                    \
        {"repeat",                                                                                                     \
         0,                                                                                                            \
         SL_CLI_U64,                                                                                                   \
         "N",                                                                                                          \
         "measurements; the median is reported (default 7)",                                                           \
         &bo.repeat,                                                                                                   \
         .min = 1,                                                                                                     \
         .max = SL_BENCH_OP_RUNS},                                                                                     \
        {"inner", 0, SL_CLI_U64, "N", "operations in a measurement (default 10)", &bo.inner, .min = 1, .max = 100000}, \
    {                                                                                                                  \
        0                                                                                                              \
    }
#define SIZE(name, arg, text, field)                                                                                   \
    { name, 0, SL_CLI_U64, arg, text, &bo.field, .min = 1, .max = 1u << 24 }

static const sl_cli_opt attention_opts[] = {
    {"Size", 0, SL_CLI_HEAD, NULL, NULL, NULL},
    SIZE("rows", "N", "sequences (default 8)", rows),
    SIZE("length", "T", "tokens a sequence (default 2048)", length),
    {"lengths", 0, SL_CLI_STR, "T[xN],...", "sequences of mixed lengths in place of both: 2048x4,512x8", &bo.lengths},
    SIZE("heads", "N", "query heads (default 32)", heads),
    SIZE("kv-heads", "N", "key and value heads (default 8)", kv_heads),
    SIZE("dqk", "D", "dimension of query and key (default 128)", dqk),
    SIZE("dv", "D", "dimension of value (default 128)", dv),
    {"window", 0, SL_CLI_U64, "W", "sliding window, 0 = none (default 0)", &bo.window, .max = 1u << 24},
    COMMON};
static const sl_cli_opt gemm_opts[] = {{"Size", 0, SL_CLI_HEAD, NULL, NULL, NULL},
                                       SIZE("tokens", "N", "rows (default 16384)", tokens),
                                       SIZE("width", "K", "columns in (default 4096)", width),
                                       SIZE("out", "N", "columns out (default 14336)", out),
                                       COMMON};
static const sl_cli_opt moe_opts[] = {
    {"Size", 0, SL_CLI_HEAD, NULL, NULL, NULL},
    SIZE("tokens", "N", "tokens (default 16384)", tokens),
    SIZE("width", "H", "model width (default 7168)", width),
    SIZE("inter", "I", "width of an expert (default 2048)", out),
    SIZE("experts", "E", "routed experts (default 384)", experts),
    SIZE("top-k", "K", "experts a token uses (default 8)", top_k),
    {"shared", 0, SL_CLI_U64, "N", "shared experts (default 1)", &bo.shared, .max = 64},
    {"format", 0, SL_CLI_CHOICE, "bf16|int4", "of the routed experts (default int4)", &bo.format},
    COMMON};
static const sl_cli_opt allreduce_opts[] = {{"Size", 0, SL_CLI_HEAD, NULL, NULL, NULL},
                                            SIZE("ranks", "N", "ranks (default 2)", ranks),
                                            SIZE("tokens", "N", "tokens (default 8192)", tokens),
                                            SIZE("width", "H", "elements a token (default 7168)", width),
                                            SIZE("link", "GB/s",
                                                 "what the link between two GPUs takes one way, for the floor "
                                                 "(default 450: NVLink of an H100 or H200)",
                                                 link),
                                            {"how", 0, SL_CLI_CHOICE, "best|nccl|ring",
                                             "best: onto a residual, as the forward pass adds up, by copies between "
                                             "GPUs; nccl: the same over NCCL; ring: NCCL's own all-reduce (default "
                                             "best)",
                                             &bo.how},
                                            COMMON};

static const sl_cli clis[] = {
    {"sluice bench attention", "", "causal attention alone, TFLOP/s", "Random operands, no padding, causal.",
     "  sluice bench attention --backend cuda --heads 64 --kv-heads 64 --dqk 192", attention_opts, 0, 0},
    {"sluice bench gemm", "", "a dense product alone, TFLOP/s", "out[tokens, out] = x[tokens, width] * W^T.",
     "  sluice bench gemm --backend cuda --tokens 16384 --width 4096 --out 14336", gemm_opts, 0, 0},
    {"sluice bench moe", "", "a block of experts, TFLOP/s",
     "Router, permutation, experts, weighted sum and shared expert on random weights, routing near uniform.",
     "  sluice bench moe --backend cuda --tokens 65536", moe_opts, 0, 0},
    {"sluice bench allreduce", "", "sums over ranks, GB/s",
     "Ranks are processes: with a GPU each the sums go between the GPUs, else through host memory.",
     "  sluice bench allreduce --backend cuda --ranks 2", allreduce_opts, 0, 0}};

typedef int (*bench_fn)(sl_bench_op_result *, const sl_bench_op_opts *, sl_err *);
enum { ATTENTION, GEMM, MOE, ALLREDUCE };

static void defaults(int which) {
    memset(&bo, 0, sizeof bo);
    bo.backend = "cpu", bo.precision = "bf16", bo.format = "int4", bo.how = "best";
    bo.threads = 1, bo.repeat = 7, bo.inner = 10;
    bo.tokens = which == ALLREDUCE ? 8192 : 16384;
    bo.width = which == GEMM ? 4096 : 7168, bo.out = which == GEMM ? 14336 : 2048;
    bo.rows = 8, bo.length = 2048, bo.heads = 32, bo.kv_heads = 8, bo.dqk = bo.dv = 128;
    bo.experts = 384, bo.top_k = 8, bo.shared = 1, bo.ranks = 2, bo.link = 450;
}

static void set_int(json_t *j, const char *key, uint64_t v) {
    json_object_set_new(j, key, json_integer((json_int_t)v));
}

static void sizes(json_t *j, int which) {
    if (which == ATTENTION) {
        set_int(j, "rows", bo.rows), set_int(j, "length", bo.length);
        if (bo.lengths) json_object_set_new(j, "lengths", json_string(bo.lengths));
        set_int(j, "heads", bo.heads), set_int(j, "kv_heads", bo.kv_heads);
        set_int(j, "dqk", bo.dqk), set_int(j, "dv", bo.dv), set_int(j, "window", bo.window);
        return;
    }
    set_int(j, "tokens", bo.tokens), set_int(j, "width", bo.width);
    if (which == GEMM) set_int(j, "out", bo.out);
    if (which == ALLREDUCE) set_int(j, "ranks", bo.ranks);
    if (which != MOE) return;
    set_int(j, "inter", bo.out), set_int(j, "experts", bo.experts), set_int(j, "top_k", bo.top_k);
    set_int(j, "shared", bo.shared);
    json_object_set_new(j, "format", json_string(bo.format));
}

static int print(int which, const sl_bench_op_result *r) {
    static const char *const names[] = {"attention", "gemm", "moe", "allreduce"};
    double s = r->seconds[r->runs / 2];
    json_t *j = json_pack("{s:s, s:s, s:s}", "bench", names[which], "backend", bo.backend, "precision", bo.precision);
    sizes(j, which);
    json_object_set_new(j, "ms", json_real(s * 1e3));
    json_object_set_new(j, "best_ms", json_real(r->seconds[0] * 1e3));
    if (which == ALLREDUCE) { /* every byte is sent and received (n - 1) / n times, twice */
        json_object_set_new(j, "how", json_string(r->how));
        json_object_set_new(j, "bytes", json_integer((json_int_t)r->bytes));
        double moved = r->bytes * 2 * (double)(bo.ranks - 1) / (double)bo.ranks / 1e9;
        json_object_set_new(j, "bus_gb_s", json_real(moved / s));
        if (strcmp(r->how, "host memory") != 0) {
            json_object_set_new(j, "floor_ms", json_real(moved / (double)bo.link * 1e3));
            json_object_set_new(j, "fraction", json_real(moved / s / (double)bo.link));
        }
    } else {
        json_object_set_new(j, "tflop_s", json_real(r->flop / s / 1e12));
        json_object_set_new(j, "gb_s", json_real(r->bytes / s / 1e9));
        json_object_set_new(j, "ceiling_tflop_s", json_real(r->ceiling_flop_s / 1e12));
        json_object_set_new(j, "floor_ms", json_real(r->flop / r->ceiling_flop_s * 1e3));
        json_object_set_new(j, "fraction", json_real(r->flop / r->ceiling_flop_s / s));
    }
    char *text = json_dumps(j, JSON_INDENT(2) | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(8));
    if (text) puts(text);
    free(text);
    json_decref(j);
    return text ? 0 : 70;
}

static int run(int which, bench_fn f, int argc, char **argv) {
    int n = 0;
    defaults(which);
    int rc = sl_cli_parse(&clis[which], argc, argv, &n);
    if (rc != SL_CLI_GO) return rc;
    sl_bench_op_opts o = {.backend = !strcmp(bo.backend, "cuda") ? SL_BACKEND_CUDA : SL_BACKEND_CPU,
                          .precision = !strcmp(bo.precision, "f32") ? SL_PREC_F32 : SL_PREC_BF16,
                          .threads = (int)bo.threads,
                          .repeat = (int32_t)bo.repeat,
                          .inner = (int32_t)bo.inner,
                          .tokens = (int64_t)bo.tokens,
                          .width = (int64_t)bo.width,
                          .out = (int64_t)bo.out,
                          .rows = (int32_t)bo.rows,
                          .length = (int32_t)bo.length,
                          .heads = (int32_t)bo.heads,
                          .kv_heads = (int32_t)bo.kv_heads,
                          .dqk = (int32_t)bo.dqk,
                          .dv = (int32_t)bo.dv,
                          .window = (int32_t)bo.window,
                          .experts = (int32_t)bo.experts,
                          .top_k = (int32_t)bo.top_k,
                          .shared = (int32_t)bo.shared,
                          .fmt = !strcmp(bo.format, "bf16") ? SL_W_BF16 : SL_W_INT4,
                          .ranks = (int32_t)bo.ranks,
                          .how = !strcmp(bo.how, "ring")   ? SL_SUMS_RING
                                 : !strcmp(bo.how, "nccl") ? SL_SUMS_NCCL
                                                           : SL_SUMS_BEST};
    sl_err err = {0};
    sl_bench_op_result r;
    static int32_t lengths[4096];
    if (bo.lengths) {
        o.length = 0;
        o.rows = sl_bench_lengths(bo.lengths, lengths, (int32_t)(sizeof lengths / sizeof *lengths), &o.length);
        o.lengths = lengths;
        bo.rows = (uint64_t)o.rows, bo.length = (uint64_t)o.length; /* what is printed */
        if (!o.rows)
            return sl_err_set(&err, SL_EUSAGE, "--lengths %s: expected lengths such as 2048x4,512x8, at most 4096 rows",
                              bo.lengths),
                   sl_cli_fail(&err);
    }
    return f(&r, &o, &err) ? sl_cli_fail(&err) : print(which, &r);
}

int sl_bench_cmd_attention(int argc, char **argv) {
    return run(ATTENTION, sl_bench_attention, argc, argv);
}
int sl_bench_cmd_gemm(int argc, char **argv) {
    return run(GEMM, sl_bench_gemm, argc, argv);
}
int sl_bench_cmd_moe(int argc, char **argv) {
    return run(MOE, sl_bench_moe, argc, argv);
}
int sl_bench_cmd_allreduce(int argc, char **argv) {
    return run(ALLREDUCE, sl_bench_allreduce, argc, argv);
}
