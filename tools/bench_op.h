/* bench_op: rows of `sluice bench` that time one operation; argv[0] is the bench's name, the result is the exit code.
 */
#ifndef SL_TOOLS_BENCH_OP_H
#define SL_TOOLS_BENCH_OP_H
int sl_bench_cmd_attention(int argc, char **argv);
int sl_bench_cmd_gemm(int argc, char **argv);
int sl_bench_cmd_moe(int argc, char **argv);
int sl_bench_cmd_allreduce(int argc, char **argv);
#endif
