/* NCCL against sums made here: `test_nccl` opens one communicator over every GPU present (one rank a GPU, ranks are
 * processes; one GPU: a communicator of one rank) and adds up numbers in f32 and bf16, several sizes, odd ones too, by
 * copies between GPUs, by slices over NCCL and by NCCL's own ring, alone and onto a residual, several sums in flight.
 * Every rank must hold the same bits.
 */
#include "stages/compute/bench_ranks.h"
#include "stages/compute/collective.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_RANKS 8
/* the last: several pieces a slice in copies between GPUs */
static const int64_t sizes[] = {1, 3, 257, 4096, 1000003, 40000003};
enum { SIZES = sizeof sizes / sizeof *sizes };

typedef struct rank {
    int id, n, fd, rc, kind;
    const char *how;
    sl_dtype act;
    sl_err err;
    void *got[SIZES], *onto[SIZES]; /* the sum; the sum onto a residual of value(99, i) */
} rank;
typedef struct result {
    int gpus, bad;
    const char *how;
} result;
typedef struct group {
    int n, fd, kind;
    sl_dtype act;
} group;

static float value(int id, int64_t i) { /* exact in bf16, and so are sums of eight */
    return (float)((i * 7 + id * 13) % 31 - 15);
}
static uint16_t to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)(u >> 16);
}
static void put(void *dst, sl_dtype act, int64_t i, float v) {
    if (act == SL_F32)
        ((float *)dst)[i] = v;
    else
        ((uint16_t *)dst)[i] = to_bf16(v);
}

/* value(id, i) as numbers at dst on the device. */
static int fill(rank *r, sl_ops *ops, void *dst, int id, int64_t n) {
    size_t es = r->act == SL_F32 ? 4 : 2;
    void *host = malloc((size_t)n * es);
    for (int64_t i = 0; i < n; i++) put(host, r->act, i, value(id, i));
    int rc = ops->upload(ops->ctx, dst, host, (uint64_t)n * es, &r->err);
    if (!rc) rc = ops->sync(ops->ctx, &r->err);
    free(host);
    return rc;
}

/* Places of the parts (two a size) and of the residual in one piece of device memory. */
static uint64_t place(const rank *r, int s, int what) {
    uint64_t at = 0, es = r->act == SL_F32 ? 4 : 2;
    for (int i = 0; i < s; i++) at += 3 * (((uint64_t)sizes[i] * es + 255) / 256 * 256);
    return at + (uint64_t)what * (((uint64_t)sizes[s] * es + 255) / 256 * 256);
}

/* Twice, so that counters of the first round are not taken for the second's. */
static int sums(rank *r, sl_ops *ops, sl_coll *c) {
    size_t es = r->act == SL_F32 ? 4 : 2;
    uint8_t *mem = NULL;
    void *scratch = NULL;
    uint64_t ticket[2 * SIZES], total = place(r, SIZES - 1, 2) + (uint64_t)sizes[SIZES - 1] * es;
    int rc = ops->alloc(ops->ctx, (void **)&mem, total, "numbers", &r->err);
    if (!rc) rc = ops->alloc(ops->ctx, &scratch, c->scratch_bytes(c, sizes[SIZES - 1]) + 1, "scratch", &r->err);
    c->scratch = scratch;
    if (!rc && c->memory) rc = c->memory(c, mem, total, &r->err);
    r->how = c->how;
    for (int round = 0; round < 2; round++) {
        for (int s = 0; s < 3 * SIZES && !rc; s++)
            rc = fill(r, ops, mem + place(r, s / 3, s % 3), s % 3 == 2 ? 99 : r->id, sizes[s / 3]);
        if (!rc) rc = c->barrier(c, &r->err);
        for (int s = 0; s < 2 * SIZES && !rc; s++)
            rc = c->reduce(c, s % 2 ? mem + place(r, s / 2, 2) : NULL, mem + place(r, s / 2, s % 2), sizes[s / 2],
                           &ticket[s], &r->err);
        for (int s = 2 * SIZES - 1; s >= 0 && !rc; s--) rc = c->wait(c, ticket[s], &r->err);
        if (!rc) rc = ops->sync(ops->ctx, &r->err);
        if (!rc) rc = c->barrier(c, &r->err);
    }
    for (int s = 0; s < SIZES && !rc; s++) {
        uint64_t bytes = (uint64_t)sizes[s] * es;
        r->got[s] = malloc(bytes);
        r->onto[s] = malloc(bytes);
        rc = ops->download(ops->ctx, r->got[s], mem + place(r, s, 0), bytes, &r->err);
        if (!rc) rc = ops->download(ops->ctx, r->onto[s], mem + place(r, s, 2), bytes, &r->err);
    }
    if (!rc) rc = c->barrier(c, &r->err); /* nobody frees what another may still read */
    ops->free(ops->ctx, mem);
    ops->free(ops->ctx, scratch);
    return rc;
}

static int open_rank(rank *r, sl_ops **ops, sl_coll **c) {
    sl_coll *host = NULL;
    char note[256] = "";
    int rc = sl_ops_cuda_create(ops, r->id, r->act, &r->err);
    if (!rc)
        rc = r->n == 1 ? sl_coll_none_open(&host, &r->err)
                       : sl_coll_shm_open(&host, r->fd, r->id, r->n, 1, *ops, &r->err);
    if (!rc) rc = sl_coll_gpu_open(c, host, *ops, r->kind, note, &r->err);
    if (!rc && note[0]) rc = sl_err_set(&r->err, SL_ECONFIG, "%s", note);
    return rc;
}

static int check(const rank *r) {
    int bad = 0;
    size_t es = r->act == SL_F32 ? 4 : 2;
    for (int s = 0; s < SIZES; s++) {
        void *want = malloc((size_t)sizes[s] * es);
        for (int onto = 0; onto < 2; onto++) {
            for (int64_t i = 0; i < sizes[s]; i++) {
                float sum = onto ? value(99, i) : 0;
                for (int k = 0; k < r->n; k++) sum += value(k, i);
                put(want, r->act, i, sum);
            }
            if (!memcmp(want, onto ? r->onto[s] : r->got[s], (size_t)sizes[s] * es)) continue;
            printf("FAIL: %s, %lld numbers, rank %d of %d, %s%s: wrong sums\n", es == 4 ? "f32" : "bf16",
                   (long long)sizes[s], r->id, r->n, r->how, onto ? ", onto a residual" : "");
            bad++;
        }
        free(want);
    }
    return bad;
}

static int rank_main(void *arg, int id, void *out, sl_err *err) {
    const group *g = arg;
    rank r = {.id = id, .n = g->n, .fd = g->fd, .kind = g->kind, .act = g->act};
    result *res = out;
    sl_ops *ops = NULL;
    sl_coll *c = NULL;
    int rc = open_rank(&r, &ops, &c);
    if (!rc) rc = sums(&r, ops, c);
    res->how = r.how;
    if (rc)
        *err = r.err;
    else
        res->bad = check(&r);
    if (c) c->destroy(c);
    if (ops) ops->destroy(ops);
    for (int s = 0; s < SIZES; s++) free(r.got[s]), free(r.onto[s]);
    return rc;
}

/* In a child: what uses CUDA cannot fork afterwards. */
static int count_main(void *arg, int id, void *out, sl_err *err) {
    (void)arg, (void)id, (void)err;
    ((result *)out)->gpus = sl_ops_cuda_devices();
    return 0;
}

int main(void) {
    result r[MAX_RANKS] = {0};
    sl_err err = {0};
    int bad = sl_bench_ranks_run(1, count_main, NULL, r, sizeof *r, &err) != 0, n = r[0].gpus;
    if (!n) return printf("SKIP: no CUDA device\n"), 77;
    n = n > MAX_RANKS ? MAX_RANKS : n;
    for (int pass = 0; pass < 6 && !bad; pass++) {
        group g = {.n = n, .kind = pass % 3, .act = pass / 3 ? SL_BF16 : SL_F32};
        g.fd = n > 1 ? sl_coll_shm_create_region(n, 4096, &err) : -1;
        int rc = sl_bench_ranks_run(n, rank_main, &g, r, sizeof *r, &err);
        if (g.fd >= 0) close(g.fd);
        if (rc == SL_ECONFIG) return printf("SKIP: %s\n", err.msg), 77;
        if (rc) return printf("FAIL: %s\n", err.msg), 1;
        for (int i = 0; i < n; i++) bad += r[i].bad;
        printf("%s over %d rank%s by %s: %s\n", g.act == SL_F32 ? "f32" : "bf16", n, n == 1 ? "" : "s", r[0].how,
               bad ? "FAILED" : "ok");
    }
    return bad != 0;
}
