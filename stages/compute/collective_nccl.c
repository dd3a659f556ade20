/* collective_nccl: sums over GPUs, one communicator a group. Slice r of a part is added up by rank r: every rank sends
 * it its piece, a small kernel adds the pieces in rank order onto the residual, and the result goes to everybody. Two
 * exchanges and a kernel, in a stream of their own with the highest priority, so that they run beside the products of
 * another micro-batch; compute waits for them only on the device. Barriers and the agreement on batches stay on the
 * shared-memory collective, which also carries the communicator's id to the other ranks; so one protocol decides who is
 * alive.
 *
 * libnccl is opened at run time: a machine without it, or several ranks on one GPU, use the host collective instead
 * (slow, the same bits), and say so. NVLink multicast stays off unless the environment says otherwise
 * (NCCL_NVLS_ENABLE). */
#include "stages/compute/collective.h"
#ifdef SL_HAVE_CUDA
#include "stages/compute/collective_lane.h"
#include "stages/compute/collective_slices.h"
#include <dlfcn.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct nccl_api { /* what is used of libnccl */
    void *lib;
    ncclResult_t (*get_id)(ncclUniqueId *);
    ncclResult_t (*init)(ncclComm_t *, int, ncclUniqueId, int);
    ncclResult_t (*all_reduce)(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t);
    ncclResult_t (*send)(const void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
    ncclResult_t (*recv)(void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
    ncclResult_t (*group_start)(void);
    ncclResult_t (*group_end)(void);
    ncclResult_t (*async_error)(ncclComm_t, ncclResult_t *);
    ncclResult_t (*abort)(ncclComm_t);
    const char *(*error_string)(ncclResult_t);
} nccl_api;

typedef struct coll_nccl {
    nccl_api api;
    ncclComm_t comm;
    sl_coll *host;
    sl_ops *ops;
    sl_lane lane;
    int ring;
} coll_nccl;

static int api_open(nccl_api *a, sl_err *err) {
    const struct {
        const char *name;
        void **at;
    } want[] = {
        {"ncclGetUniqueId", (void **)&a->get_id},
        {"ncclCommInitRank", (void **)&a->init},
        {"ncclAllReduce", (void **)&a->all_reduce},
        {"ncclCommGetAsyncError", (void **)&a->async_error},
        {"ncclSend", (void **)&a->send},
        {"ncclRecv", (void **)&a->recv},
        {"ncclGroupStart", (void **)&a->group_start},
        {"ncclGroupEnd", (void **)&a->group_end},
        {"ncclCommAbort", (void **)&a->abort},
        {"ncclGetErrorString", (void **)&a->error_string},
    };
    a->lib = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!a->lib) return sl_err_set(err, SL_ECONFIG, "libnccl.so.2 cannot be opened: %s", dlerror());
    for (size_t i = 0; i < sizeof want / sizeof *want; i++)
        if (!(*want[i].at = dlsym(a->lib, want[i].name)))
            return sl_err_set(err, SL_ECONFIG, "libnccl.so.2 has no %s: NCCL 2.7 or newer is needed", want[i].name);
    return 0;
}

static int nccl_fail(coll_nccl *c, ncclResult_t r, const char *what, sl_err *err) {
    return sl_err_set(err, SL_ETEMP, "NCCL: %s: %s", what, c->api.error_string(r));
}

static uint64_t nccl_scratch(const sl_coll *coll, int64_t n) {
    const coll_nccl *c = coll->impl;
    uint64_t es = c->ops->act == SL_F32 ? 4 : 2;
    return c->ring ? 0 : (uint64_t)sl_slice_widest(n, coll->tp) * (uint64_t)(coll->tp - 1) * es;
}

typedef struct sum { /* one call of reduce */
    sl_coll *coll;
    uint8_t *h, *part;
    int64_t n;
    uint64_t es;
    ncclDataType_t type;
} sum;

static uint8_t *piece_of(const sum *s, int from) { /* in scratch: what rank `from` sent of this rank's slice */
    uint64_t at = (uint64_t)sl_slice_place(s->coll->rank, from);
    return (uint8_t *)s->coll->scratch + (uint64_t)sl_slice_widest(s->n, s->coll->tp) * at * s->es;
}

/* Every rank's piece of slice r to rank r. */
static ncclResult_t scatter(coll_nccl *c, const sum *s) {
    int64_t lo, hi, mine0, mine1;
    int me = s->coll->rank, tp = s->coll->tp;
    sl_slice(s->n, tp, me, &mine0, &mine1);
    ncclResult_t r = c->api.group_start(), end;
    for (int i = 1; i < tp && r == ncclSuccess; i++) { /* each rank begins with another peer */
        int to = (me + i) % tp, from = (me + tp - i) % tp;
        sl_slice(s->n, tp, to, &lo, &hi);
        if (hi > lo)
            r = c->api.send(s->part + (uint64_t)lo * s->es, (size_t)(hi - lo), s->type, to, c->comm, c->lane.stream);
        if (r == ncclSuccess && mine1 > mine0)
            r = c->api.recv(piece_of(s, from), (size_t)(mine1 - mine0), s->type, from, c->comm, c->lane.stream);
    }
    end = c->api.group_end();
    return r != ncclSuccess ? r : end;
}

/* The finished slices to everybody. */
static ncclResult_t gather(coll_nccl *c, const sum *s, uint8_t *out) {
    int64_t lo, hi, mine0, mine1;
    int me = s->coll->rank, tp = s->coll->tp;
    sl_slice(s->n, tp, me, &mine0, &mine1);
    ncclResult_t r = c->api.group_start(), end;
    for (int i = 1; i < tp && r == ncclSuccess; i++) {
        int to = (me + i) % tp, from = (me + tp - i) % tp;
        sl_slice(s->n, tp, from, &lo, &hi);
        if (mine1 > mine0)
            r = c->api.send(out + (uint64_t)mine0 * s->es, (size_t)(mine1 - mine0), s->type, to, c->comm,
                            c->lane.stream);
        if (r == ncclSuccess && hi > lo)
            r = c->api.recv(out + (uint64_t)lo * s->es, (size_t)(hi - lo), s->type, from, c->comm, c->lane.stream);
    }
    end = c->api.group_end();
    return r != ncclSuccess ? r : end;
}

static int by_slices(coll_nccl *c, const sum *s, sl_err *err) {
    const void *x[SL_CUDA_SUM_MAX];
    int64_t lo, hi;
    int me = s->coll->rank, tp = s->coll->tp;
    if (tp > 1 && !s->coll->scratch) return sl_err_set(err, SL_EINTERNAL, "NCCL collective: no scratch was given");
    sl_slice(s->n, tp, me, &lo, &hi);
    uint64_t at = (uint64_t)lo * s->es;
    for (int r = 0; r < tp; r++) x[r] = r == me ? s->part + at : piece_of(s, r);
    uint8_t *out = s->h ? s->h : s->part;
    ncclResult_t r = scatter(c, s);
    if (r != ncclSuccess) return nccl_fail(c, r, "exchange of partial sums", err);
    int rc = sl_ops_cuda_sum(c->ops, c->lane.stream, out + at, s->h ? s->h + at : NULL, x, tp, hi - lo, err);
    if (rc) return rc;
    r = gather(c, s, out);
    return r == ncclSuccess ? 0 : nccl_fail(c, r, "exchange of sums", err);
}

static int by_ring(coll_nccl *c, const sum *s, sl_err *err) {
    const void *x[1] = {s->part};
    ncclResult_t r = c->api.all_reduce(s->part, s->part, (size_t)s->n, s->type, ncclSum, c->comm, c->lane.stream);
    if (r != ncclSuccess) return nccl_fail(c, r, "all-reduce", err);
    return s->h ? sl_ops_cuda_sum(c->ops, c->lane.stream, s->h, s->h, x, 1, s->n, err) : 0;
}

static int nccl_reduce(sl_coll *coll, void *h, void *part, int64_t n, uint64_t *ticket, sl_err *err) {
    coll_nccl *c = coll->impl;
    int f32 = c->ops->act == SL_F32;
    sum s = {.coll = coll, .h = h, .part = part, .n = n, .es = f32 ? 4 : 2, .type = f32 ? ncclFloat : ncclBfloat16};
    int rc = sl_ops_cuda_fence(c->ops, c->lane.stream, err);
    if (!rc) rc = c->ring ? by_ring(c, &s, err) : by_slices(c, &s, err);
    if (!rc) rc = sl_lane_end(&c->lane, ticket, err);
    if (rc) return rc;
    ncclResult_t seen = ncclSuccess, r = c->api.async_error(c->comm, &seen);
    if (r == ncclSuccess && seen != ncclSuccess && seen != ncclInProgress) r = seen;
    return r == ncclSuccess ? 0 : nccl_fail(c, r, "an earlier sum failed", err);
}
static int nccl_wait(sl_coll *coll, uint64_t ticket, sl_err *err) {
    coll_nccl *c = coll->impl;
    return sl_lane_wait(&c->lane, c->lane.compute, ticket, err);
}
static int nccl_barrier(sl_coll *coll, sl_err *err) {
    coll_nccl *c = coll->impl;
    return c->host->barrier(c->host, err);
}
static int nccl_agree(sl_coll *coll, uint64_t mine, uint64_t *least, uint64_t *greatest, sl_err *err) {
    coll_nccl *c = coll->impl;
    return c->host->agree(c->host, mine, least, greatest, err);
}
static void nccl_destroy(sl_coll *coll) {
    coll_nccl *c = coll->impl;
    if (c->comm) c->api.abort(c->comm); /* never waits for peers */
    sl_lane_close(&c->lane);
    if (c->host) c->host->destroy(c->host);
    if (c->api.lib) dlclose(c->api.lib);
    free(c);
    free(coll);
}

/* Rank 0 makes the id; the others contribute zeros, so the greatest of each word is rank 0's. */
static int share_id(coll_nccl *c, int rank, ncclUniqueId *id, sl_err *err) {
    uint64_t w[sizeof *id / 8] = {0};
    if (rank == 0) {
        ncclResult_t r = c->api.get_id(id);
        if (r != ncclSuccess) return nccl_fail(c, r, "ncclGetUniqueId", err);
        memcpy(w, id, sizeof *id);
    }
    for (size_t i = 0; i < sizeof *id / 8; i++) {
        uint64_t least, got;
        int rc = c->host->agree(c->host, w[i], &least, &got, err);
        if (rc) return rc;
        memcpy((char *)id + i * 8, &got, 8);
    }
    return 0;
}

int sl_coll_nccl_open(sl_coll **out, sl_coll *host, sl_ops *ops, int ring, sl_err *err) {
    *out = NULL;
    coll_nccl *c = calloc(1, sizeof *c);
    sl_coll *coll = calloc(1, sizeof *coll);
    if (!c || !coll) {
        free(c);
        free(coll);
        return sl_err_set(err, SL_ETEMP, "collective: out of memory");
    }
    *coll = (sl_coll){.rank = host->rank,
                      .tp = host->tp,
                      .overlaps = 1,
                      .how = ring ? "NCCL's own all-reduce" : "NCCL",
                      .scratch_bytes = nccl_scratch,
                      .reduce = nccl_reduce,
                      .wait = nccl_wait,
                      .barrier = nccl_barrier,
                      .agree = nccl_agree,
                      .destroy = nccl_destroy,
                      .impl = c};
    c->ops = ops;
    c->ring = ring;
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    ncclUniqueId id = {{0}};
    int rc = sl_lane_open(&c->lane, ops, err);
    if (!rc) rc = api_open(&c->api, err);
    /* Whether everybody could open the library is agreed first: a rank alone in ncclCommInitRank would wait for ever.
     */
    uint64_t least = 0, most = 0;
    int agreed = host->agree(host, rc == 0, &least, &most, rc ? NULL : err);
    if (!rc) rc = agreed;
    if (!rc && !least) rc = sl_err_set(err, SL_ECONFIG, "another rank of the group cannot open NCCL");
    c->host = host;
    if (!rc) rc = share_id(c, host->rank, &id, err);
    if (!rc) {
        ncclResult_t r = c->api.init(&c->comm, host->tp, id, host->rank);
        if (r != ncclSuccess) rc = nccl_fail(c, r, "ncclCommInitRank", err);
    }
    if (rc) {
        c->host = NULL; /* stays the caller's */
        nccl_destroy(coll);
        return rc;
    }
    *out = coll;
    return 0;
}

int sl_coll_gpu_open(sl_coll **out, sl_coll *host, sl_ops *ops, int how, char note[256], sl_err *err) {
    sl_coll *nccl = NULL, *peer = NULL;
    sl_err why = {0};
    *out = host;
    note[0] = 0;
    int rc = sl_coll_nccl_open(&nccl, host, ops, how == SL_SUMS_RING, &why);
    if (rc && rc != SL_ECONFIG) return sl_err_set(err, rc, "%s", why.msg);
    if (!rc) *out = nccl;
    if (how != SL_SUMS_BEST) return rc ? sl_err_set(err, rc, "%s", why.msg) : 0;
    if (rc) snprintf(note, 256, "NCCL: %.200s", why.msg);
    rc = sl_coll_peer_open(&peer, *out, ops, &why);
    if (!rc) {
        *out = peer;
        note[0] = 0;
    } else if (rc != SL_ECONFIG) {
        return sl_err_set(err, rc, "%s", why.msg);
    }
    return 0;
}
#endif
