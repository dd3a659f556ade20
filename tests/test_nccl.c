/* NCCL against sums made here: `test_nccl` opens one communicator over every GPU present (one rank a GPU, ranks are
 * threads; one GPU: a communicator of one rank) and adds up random numbers in f32 and bf16, several sizes, odd ones
 * too. Every rank must hold the same bits. */
#include "stages/compute/collective.h"
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_RANKS 8
static const int64_t sizes[] = {1, 3, 257, 4096, 1000003};
enum { SIZES = sizeof sizes / sizeof *sizes };

typedef struct rank {
    int id, n, fd, rc;
    sl_dtype act;
    sl_err err;
    void *got[SIZES];
} rank;

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

static int sums(rank *r, sl_ops *ops, sl_coll *c) {
    size_t es = r->act == SL_F32 ? 4 : 2;
    int rc = 0;
    for (int s = 0; s < SIZES && !rc; s++) {
        int64_t n = sizes[s];
        void *dev = NULL;
        r->got[s] = malloc((size_t)n * es);
        for (int64_t i = 0; i < n; i++) put(r->got[s], r->act, i, value(r->id, i));
        rc = ops->alloc(ops->ctx, &dev, (uint64_t)n * es, "numbers", &r->err);
        if (!rc) rc = ops->upload(ops->ctx, dev, r->got[s], (uint64_t)n * es, &r->err);
        if (!rc) rc = c->allreduce(c, dev, n, &r->err);
        if (!rc) rc = ops->download(ops->ctx, r->got[s], dev, (uint64_t)n * es, &r->err);
        if (dev) ops->free(ops->ctx, dev);
    }
    return rc;
}

static void *rank_main(void *arg) {
    rank *r = arg;
    sl_ops *ops = NULL;
    sl_coll *host = NULL, *c = NULL;
    r->rc = sl_ops_cuda_create(&ops, r->id, r->act, &r->err);
    if (!r->rc)
        r->rc = r->n == 1 ? sl_coll_none_open(&host, &r->err)
                          : sl_coll_shm_open(&host, r->fd, r->id, r->n, 1, ops, &r->err);
    if (!r->rc) r->rc = sl_coll_nccl_open(&c, host, ops, &r->err);
    if (!r->rc) r->rc = sums(r, ops, c);
    if (r->rc && r->n > 1) { /* the other ranks would wait for ever */
        printf("FAIL: rank %d of %d: %s\n", r->id, r->n, r->err.msg);
        fflush(stdout);
        _exit(1);
    }
    if (c)
        c->destroy(c);
    else if (host)
        host->destroy(host);
    if (ops) ops->destroy(ops);
    return NULL;
}

static int check(const rank *all, int n, sl_dtype act) {
    int bad = 0;
    for (int s = 0; s < SIZES; s++) {
        size_t es = act == SL_F32 ? 4 : 2;
        void *want = malloc((size_t)sizes[s] * es);
        for (int64_t i = 0; i < sizes[s]; i++) {
            float sum = 0;
            for (int k = 0; k < n; k++) sum += value(k, i);
            put(want, act, i, sum);
        }
        for (int k = 0; k < n; k++)
            if (memcmp(want, all[k].got[s], (size_t)sizes[s] * es)) {
                printf("FAIL: %s, %lld numbers, rank %d of %d: wrong sums\n", es == 4 ? "f32" : "bf16",
                       (long long)sizes[s], k, n);
                bad++;
            }
        free(want);
    }
    return bad;
}

int main(void) {
    int n = sl_ops_cuda_devices(), bad = 0;
    if (!n) return printf("SKIP: no CUDA device\n"), 77;
    n = n > MAX_RANKS ? MAX_RANKS : n;
    for (int act = SL_F32; act <= SL_BF16 && !bad; act++) {
        rank all[MAX_RANKS];
        pthread_t t[MAX_RANKS];
        sl_err err = {0};
        int fd = n > 1 ? sl_coll_shm_create_region(n, 4096, &err) : -1;
        for (int i = 0; i < n; i++) {
            all[i] = (rank){.id = i, .n = n, .fd = fd, .act = (sl_dtype)act};
            pthread_create(&t[i], NULL, rank_main, &all[i]);
        }
        for (int i = 0; i < n; i++) pthread_join(t[i], NULL);
        if (all[0].rc == SL_ECONFIG) return printf("SKIP: %s\n", all[0].err.msg), 77;
        if (all[0].rc) return printf("FAIL: %s\n", all[0].err.msg), 1;
        bad += check(all, n, (sl_dtype)act);
        for (int i = 0; i < n; i++)
            for (int s = 0; s < SIZES; s++) free(all[i].got[s]);
    }
    printf("nccl: %d rank%s, %d sizes in f32 and bf16: %s\n", n, n == 1 ? "" : "s", SIZES, bad ? "FAILED" : "ok");
    return bad != 0;
}
