/* bench_load MODEL [copy]: GB/s of loading a model, its files put out of the page cache first. `copy` reads everything
 * into memory of its own, as a GPU does; without it files are used in place where they can be. Compare, in one sitting,
 * with fio --name=r --filename=MODEL/model.safetensors --rw=read --bs=4M --direct=1 --ioengine=io_uring --iodepth=16 */
#include "stages/compute/source.h"
#include "stages/compute/weights.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void on_progress(void *arg, uint64_t done, uint64_t total) {
    (void)total;
    *(uint64_t *)arg = done;
}
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Device memory does not fault page by page: what stands for it here is touched first, outside of the time. */
static double alloc_s;
static int alloc_touched(void *ctx, void **p, uint64_t bytes, const char *what, sl_err *err) {
    (void)ctx;
    double t = now();
    uint64_t n = (bytes + 4095) & ~UINT64_C(4095);
    if (!(*p = aligned_alloc(4096, n))) return sl_err_set(err, SL_ETEMP, "no memory for %s", what);
    memset(*p, 1, n);
    alloc_s += now() - t;
    return 0;
}

int main(int argc, char **argv) {
    static sl_spec spec;
    sl_err err = {0};
    sl_ops *cpu, ops;
    sl_model *m;
    sl_source src;
    if (argc < 2) return 2;
    int rc = sl_spec_load(&spec, argv[1], 0, &err);
    if (!rc) rc = sl_source_open(&src, argv[1], &err);
    if (!rc) rc = sl_ops_cpu_create(&cpu, 1, SL_BF16, &err);
    if (rc) {
        fprintf(stderr, "%s\n", err.msg);
        return 1;
    }
    for (uint32_t f = 0; f < sl_source_n_files(&src); f++)
        (void)posix_fadvise(sl_source_fd(&src, f), 0, 0, POSIX_FADV_DONTNEED);
    sl_source_close(&src);
    ops = *cpu;
    int copy = argc > 2 && !strcmp(argv[2], "copy");
    if (copy) {
        ops.name = "copying";
        ops.alloc = alloc_touched;
    }
    uint64_t bytes = 0;
    sl_load_opts o = {.model = argv[1],
                      .tp = 1,
                      .top_layer = spec.n_layers,
                      .want_head = 1,
                      .random_format = -1,
                      .progress = on_progress,
                      .progress_arg = &bytes};
    double t = now();
    rc = sl_model_load(&m, &o, &ops, &err);
    if (rc) {
        fprintf(stderr, "%s\n", err.msg);
        return 1;
    }
    t = now() - t - alloc_s;
    printf(
        "{\"model\": \"%s\", \"copied\": %s, \"bytes\": %llu, \"seconds\": %.3f, \"GB/s\": %.3f, \"note\": \"%s\"}\n",
        argv[1], copy ? "true" : "false", (unsigned long long)bytes, t, (double)bytes / 1e9 / t, sl_model_note(m));
    sl_model_free(m, &ops);
    cpu->destroy(cpu);
    sl_spec_free(&spec);
    return 0;
}
