/* bench_op: rows of `sluice bench` that time one operation; argv[0] is the bench's name, the result is the exit code.
 */
#ifndef SL_TOOLS_BENCH_OP_H
#define SL_TOOLS_BENCH_OP_H
#include <stdint.h>

/* "2048x4,512x8" into the lengths of at most `cap` rows, each 1..2^22. Returns the number of rows and raises *longest;
 * 0 when it is not that. */
int32_t sl_bench_lengths(const char *s, int32_t *out, int32_t cap, int32_t *longest);
int sl_bench_cmd_attention(int argc, char **argv);
int sl_bench_cmd_gemm(int argc, char **argv);
int sl_bench_cmd_moe(int argc, char **argv);
int sl_bench_cmd_allreduce(int argc, char **argv);
#endif
