/* bench_ranks: the ranks of a group as child processes, for benches and tests; the daemon has its supervisor. Processes
 * and not threads, as in the daemon: ranks of one process hang in copies between GPUs (collective_peer.c). */
#ifndef SL_COMPUTE_BENCH_RANKS_H
#define SL_COMPUTE_BENCH_RANKS_H
#include "ipc/err.h"
#include <stdint.h>

#define SL_BENCH_RANKS 8
/* A rank's life: fills result[bytes] (zeros at first, shared with the parent), returns 0 or an SL_E* code with *err
 * set. Pointers in the result must be to what existed before the fork (string literals). */
typedef int sl_bench_rank(void *arg, int rank, void *result, sl_err *err);
/* Runs `fn` n (1..SL_BENCH_RANKS) times at once, each in a child of its own, and waits for all; results [n * bytes].
 * When one fails or dies the others are killed: they would wait for it for ever; so are all when the parent dies. The
 * first failure that is not SL_ETEMP (the echo of a peer's) is returned, else the first. CUDA must not have been used
 * in this process: it does not survive a fork. */
int sl_bench_ranks_run(int n, sl_bench_rank *fn, void *arg, void *results, uint64_t bytes, sl_err *err);
#endif
