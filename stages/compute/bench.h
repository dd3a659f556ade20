/* bench: how fast the forward pass is on this machine, for a model or just its shape.
 *
 * One rank of `tp` is loaded (real weights, or random ones of the config's shape) and the same batch of `rows` rows of
 * `length` tokens is run `warmup` + `repeat` times. With tp > 1 the ranks' reduction is left out, so the states are
 * wrong and the time is one rank's share of the computation: no peers are needed to see what a wide model costs here.
 * With `capture` every run also fingerprints each captured state and copies the chunks that rank 0 owns into host
 * memory, as the real rank does, and both times are given.
 *
 * With `ranks` > 1 a whole group runs, a child process a rank (CUDA must not have been used before: it does not survive
 * a fork), a GPU each where there are enough (then NCCL
 * adds up, else host memory does). Every second run leaves the sums over ranks out, and at last the sums of one run are
 * run alone: (with - without) / alone is the share of them that compute does not hide. A run of a group takes as long
 * as its slowest rank, with sums and without, so what ranks wait for each other is not taken for time of the sums. */
#ifndef SL_COMPUTE_BENCH_H
#define SL_COMPUTE_BENCH_H
#include "ipc/boot.h"

typedef struct sl_bench_opts {
    const char *model;
    const char *layers; /* --layers text, NULL = "eagle3" */
    int random, random_format;
    int backend, precision; /* sl_backend_id, sl_precision */
    int tp, expert_split, threads;
    int ranks;                            /* 0 or 1: one rank of `tp`; 2..8: a whole group, tp is not looked at */
    int how;                              /* SL_SUMS_* (collective.h) */
    int32_t rows, length, warmup, repeat; /* length: of every row, or of the longest when `lengths` is set */
    const int32_t *lengths;               /* [rows], or NULL: all `length` */
    int64_t micro_tokens;                 /* 0 = whole batch */
    uint32_t chunk_rows;                  /* capture: tokens a chunk, 0 = 256 */
    int capture;
    uint64_t seed;
} sl_bench_opts;

#define SL_BENCH_MAX_RUNS 64
typedef struct sl_bench_result {
    char family[32];
    int32_t n_layers, width, layers_run, n_captures;
    uint64_t params, weight_bytes, workspace_bytes;
    int64_t tokens; /* a run */
    double load_s;
    double forward_s[SL_BENCH_MAX_RUNS], capture_s[SL_BENCH_MAX_RUNS]; /* sorted ascending */
    int32_t runs;
    double median_tok_s, best_tok_s; /* without capture */
    double cpu_tok_s; /* tokens a second of processor time (all threads), best run: what to compare on a busy machine */
    double capture_median_tok_s;    /* 0 when not measured */
    double gflop_per_token, gflops; /* 2 * linear parameters touched a token; and that times median tok/s */
    double capture_bytes_per_token;
    /* A large dense product in the same process afterwards; 0: there was no memory for it. The floor of a run is its
     * linear products at that rate: attention, norms and memory come on top. */
    double ceiling_gflops;
    /* a group: */
    const char *how;                      /* they add up (sl_coll.how) */
    double unsummed_s[SL_BENCH_MAX_RUNS]; /* without sums, ascending */
    double own_s, imbalance; /* median of this rank's own time without sums; the slowest rank's over the fastest's */
    double sums_s, sums_exposed, sums_bus_gb_s; /* of one run alone; share not hidden; 2 (n-1)/n bytes over sums_s */
    int32_t sums;                               /* a run */
} sl_bench_result;

/* Teacher NLL of given rows, each run as a batch of its own: nll[i] = mean next-token NLL of row i in nats, NaN when it
 * has one token. The model's own weights are used; only model, backend, precision and threads of the options count. Ids
 * out of the vocabulary are SL_EDATA. tokens_s: tokens run a second, the head included. */
typedef struct sl_bench_row {
    const int32_t *ids;
    int32_t T;
} sl_bench_row;
int sl_bench_nll(double *nll, double *tokens_s, const sl_bench_row *rows, int32_t n_rows, const sl_bench_opts *o,
                 sl_err *err);

int sl_bench_forward(sl_bench_result *out, const sl_bench_opts *o, sl_err *err);
#endif
