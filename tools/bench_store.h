/* bench_store: rows of `sluice bench` that measure the store; argv[0] is the bench's name, the result is the exit code.
 */
#ifndef SL_TOOLS_BENCH_STORE_H
#define SL_TOOLS_BENCH_STORE_H
int sl_bench_cmd_store(int argc, char **argv);
int sl_bench_cmd_codec(int argc, char **argv);
#endif
