/* bench_ring: the row of `sluice bench` that measures a ring between two processes; the result is the exit code. */
#ifndef SL_TOOLS_BENCH_RING_H
#define SL_TOOLS_BENCH_RING_H
int sl_bench_cmd_ring(int argc, char **argv);
#endif
