/* collective_nccl: all-reduce over NCCL, one communicator a group. Barriers and the agreement on batches stay on the
 * shared-memory collective, which also carries the communicator's id to the other ranks; so one protocol decides who is
 * alive.
 *
 * libnccl is opened at run time: a machine without it, or several ranks on one GPU, use the host collective instead
 * (slow, the same sums up to rounding), and say so. NVLink multicast stays off unless the environment says otherwise
 * (NCCL_NVLS_ENABLE). */
#include "stages/compute/collective.h"
#ifdef SL_HAVE_CUDA
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <nccl.h>
#include <stdlib.h>
#include <string.h>

typedef struct nccl_api { /* what is used of libnccl */
    void *lib;
    ncclResult_t (*get_id)(ncclUniqueId *);
    ncclResult_t (*init)(ncclComm_t *, int, ncclUniqueId, int);
    ncclResult_t (*all_reduce)(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t);
    ncclResult_t (*async_error)(ncclComm_t, ncclResult_t *);
    ncclResult_t (*abort)(ncclComm_t);
    const char *(*error_string)(ncclResult_t);
} nccl_api;

typedef struct coll_nccl {
    nccl_api api;
    ncclComm_t comm;
    sl_coll *host;
    sl_ops *ops;
    cudaStream_t stream;
} coll_nccl;

static int api_open(nccl_api *a, sl_err *err) {
    const struct {
        const char *name;
        void **at;
    } want[] = {
        {"ncclGetUniqueId", (void **)&a->get_id},   {"ncclCommInitRank", (void **)&a->init},
        {"ncclAllReduce", (void **)&a->all_reduce}, {"ncclCommGetAsyncError", (void **)&a->async_error},
        {"ncclCommAbort", (void **)&a->abort},      {"ncclGetErrorString", (void **)&a->error_string},
    };
    a->lib = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!a->lib) return sl_err_set(err, SL_ECONFIG, "libnccl.so.2 cannot be opened: %s", dlerror());
    for (size_t i = 0; i < sizeof want / sizeof *want; i++)
        if (!(*want[i].at = dlsym(a->lib, want[i].name)))
            return sl_err_set(err, SL_ECONFIG, "libnccl.so.2 has no %s: NCCL 2.4 or newer is needed", want[i].name);
    return 0;
}

static int nccl_fail(coll_nccl *c, ncclResult_t r, const char *what, sl_err *err) {
    return sl_err_set(err, SL_ETEMP, "NCCL: %s: %s", what, c->api.error_string(r));
}

static int nccl_allreduce(sl_coll *coll, void *buf, int64_t n, sl_err *err) {
    coll_nccl *c = coll->impl;
    ncclDataType_t t = c->ops->act == SL_F32 ? ncclFloat : ncclBfloat16;
    ncclResult_t r = c->api.all_reduce(buf, buf, (size_t)n, t, ncclSum, c->comm, c->stream), seen = ncclSuccess;
    if (r != ncclSuccess) return nccl_fail(c, r, "all-reduce", err);
    r = c->api.async_error(c->comm, &seen);
    if (r == ncclSuccess && seen != ncclSuccess && seen != ncclInProgress) r = seen;
    return r == ncclSuccess ? 0 : nccl_fail(c, r, "an earlier all-reduce failed", err);
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

int sl_coll_nccl_open(sl_coll **out, sl_coll *host, sl_ops *ops, sl_err *err) {
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
                      .allreduce = nccl_allreduce,
                      .barrier = nccl_barrier,
                      .agree = nccl_agree,
                      .destroy = nccl_destroy,
                      .impl = c};
    c->ops = ops;
    c->stream = sl_ops_cuda_stream(ops);
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    ncclUniqueId id = {{0}};
    int rc = api_open(&c->api, err);
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
#endif
