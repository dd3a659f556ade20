/* sl_bench_gemm: without arguments a check that every format gives a plausible row and that bad requests are refused;
 * `test_bench_gemm THREADS [f32|bf16 [ISA]]` prints the whole table for a person. */
#include "kernels/bench.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int print_table(int argc, char **argv) {
    sl_bench_gemm_row r[16];
    sl_err err;
    const char *isa = "?";
    sl_bench_gemm_opts o = {.threads = atoi(argv[1]), .runs = 10, .fmt = SL_W_BF16, .isa = argc > 3 ? argv[3] : NULL};
    o.act = argc > 2 && !strcmp(argv[2], "f32") ? SL_F32 : SL_BF16;
    int n = sl_bench_gemm(r, 16, &o, &isa, &err);
    if (n < 0) {
        fprintf(stderr, "%s\n", err.msg);
        return 1;
    }
    printf("%s, %d threads, %s, peak %.0f GFLOP/s\n   M     n     k    ours  OpenBLAS f32  oneDNN f32\n", isa,
           o.threads, o.act == SL_BF16 ? "bf16" : "f32", r[0].peak);
    for (int i = 0; i < n; i++)
        printf("%4lld %5lld %5lld  %6.1f  %12.1f  %10.1f\n", (long long)r[i].m, (long long)r[i].n, (long long)r[i].k,
               r[i].gflops, r[i].openblas, r[i].onednn);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1) return print_table(argc, argv);
    sl_err err = {0};
    int bad = 0;
    for (int f = 0; f < SL_W_N; f++) {
        sl_bench_gemm_row r = {0};
        sl_bench_gemm_opts o = {.threads = 2, .runs = 2, .act = SL_BF16, .fmt = (sl_wfmt)f, .m = 32, .n = 64, .k = 256};
        int n = sl_bench_gemm(&r, 1, &o, NULL, &err);
        if (n != 1 || !(r.gflops > 0) || !(r.peak > 0) || r.m != 32 || r.k != 256) {
            fprintf(stderr, "%s: %d rows, %g GFLOP/s of %g: %s\n", sl_wfmt_name((sl_wfmt)f), n, r.gflops, r.peak,
                    err.msg);
            bad = 1;
        }
    }
    sl_bench_gemm_row r;
    const sl_bench_gemm_opts wrong[] = {
        {.threads = 1, .runs = 1, .act = SL_BF16, .fmt = SL_W_Q4_K, .m = 8, .n = 8, .k = 100},
        {.threads = 0, .runs = 1, .act = SL_BF16, .fmt = SL_W_BF16},
        {.threads = 1, .runs = 0, .act = SL_BF16, .fmt = SL_W_BF16},
        {.threads = 1, .runs = 1, .act = SL_F16, .fmt = SL_W_BF16},
        {.threads = 1, .runs = 1, .act = SL_BF16, .fmt = SL_W_BF16, .isa = "mmx"}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        err.msg[0] = 0;
        if (sl_bench_gemm(&r, 1, &wrong[i], NULL, &err) != SL_EUSAGE || !err.msg[0]) {
            fprintf(stderr, "bad request %zu was not refused with a reason\n", i);
            bad = 1;
        }
    }
    puts(bad ? "FAILED" : "OK");
    return bad;
}
