/* bench_tokenize: the row of `sluice bench` that measures the tokenizer; the result is the exit code. */
#ifndef SL_TOOLS_BENCH_TOKENIZE_H
#define SL_TOOLS_BENCH_TOKENIZE_H
int sl_bench_cmd_tokenize(int argc, char **argv);
#endif
