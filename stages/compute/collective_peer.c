/* collective_peer: sums over GPUs that reach each other's memory, by the copy engines. The same slices and the same
 * bits as the sums over NCCL, but no multiprocessor is taken from the products beside them except for the short kernels
 * that add: each rank pulls its slice of every peer's part, adds it up, and pushes the result to every peer. It does so
 * piece by piece in three streams, so that pulling the next piece, adding this one and pushing the last go on together.
 *
 * Order between processes is kept by counters in device memory, written and waited for by the streams themselves
 * (stream memory operations), so no host waits: sum number s of a rank tells every peer that its part is ready
 * (ready[me] = s in the peer's memory), waits for ready[peer] >= s and pulls, adds, pushes, and tells the peer
 * (done[me] = s), waits for done[peer] >= s of all. When all have said done, they have also pulled this rank's part
 * before: it may be written again. Every rank begins the same sums in the same order, each behind the end of the one
 * before. Counters compare cyclically, so they may run over. */
#include "stages/compute/collective.h"
#ifdef SL_HAVE_CUDA
#include "stages/compute/collective_lane.h"
#include "stages/compute/collective_slices.h"
#include <cuda.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_TP      SL_CUDA_SUM_MAX
#define MAX_REGIONS 4
#define FLAG_STEP   128 /* bytes between two counters: each has a line of its own */
#define MAX_PIECES  16
#define PIECE       (16 << 20) /* bytes that a piece should have at least, all peers' together: 40 us of NVLink .. */
#define PIECE_COPY  (4 << 20)  /* .. and each copy of it: twice what its start costs */

typedef struct region {
    uint8_t *base[MAX_TP]; /* [rank]: as seen by this process */
    void *opened[MAX_TP];  /* to be closed */
    uint64_t bytes;
} region;

typedef struct coll_peer {
    sl_coll *inner;
    sl_ops *ops;
    sl_lane lane; /* pushes, and the end of a sum */
    cudaStream_t pull, add;
    cudaEvent_t pulled[MAX_PIECES], added[MAX_PIECES];
    region flags, mem[MAX_REGIONS];
    int n_mem, closed; /* closed: a peer's memory cannot be reached; `inner` does the sums */
    CUresult (*write)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
    CUresult (*wait)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
    CUresult (*range)(CUdeviceptr *, size_t *, CUdeviceptr);
} coll_peer;

static int cuda_fail(cudaError_t e, const char *what, sl_err *err) {
    return sl_err_set(err, SL_EINTERNAL, "peer collective: %s: %s", what, cudaGetErrorString(e));
}
static int cu_fail(CUresult r, const char *what, sl_err *err) {
    return sl_err_set(err, SL_EINTERNAL, "peer collective: %s: CUDA driver error %d", what, (int)r);
}

/* ---- reaching the peers' memory ---- */
typedef struct card { /* what a rank tells about a piece of memory */
    uint64_t pid, offset, bytes;
    cudaIpcMemHandle_t handle;
} card;

static int make_card(coll_peer *c, card *k, void *base, uint64_t bytes) {
    CUdeviceptr start = 0;
    size_t size = 0;
    if (c->range(&start, &size, (CUdeviceptr)base) != CUDA_SUCCESS) return -1;
    *k = (card){.pid = (uint64_t)getpid(), .offset = (uint64_t)base - (uint64_t)start, .bytes = bytes};
    return cudaIpcGetMemHandle(&k->handle, base) == cudaSuccess ? 0 : -1;
}

static int open_card(region *r, const card *k, int rank) {
    /* Ranks of one process were seen to hang: probably the driver waits for both GPUs when it gives out memory that
     * both can reach, and one of them waits for a counter. Such ranks use NCCL. */
    if (k->pid == (uint64_t)getpid()) return -1;
    void *p = NULL;
    if (cudaIpcOpenMemHandle(&p, k->handle, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess) {
        (void)cudaGetLastError();
        return -1;
    }
    r->opened[rank] = p;
    r->base[rank] = (uint8_t *)p + k->offset;
    return 0;
}

/* Every rank's card to every rank: the others contribute zeros, so the greatest of each word is its owner's. */
static int deal(sl_coll *in, card *all, const card *mine, sl_err *err) {
    _Static_assert(sizeof(card) % 8 == 0, "cards are dealt by words");
    for (int r = 0; r < in->tp; r++)
        for (size_t i = 0; i < sizeof(card) / 8; i++) {
            uint64_t w = 0, least, got;
            if (r == in->rank) memcpy(&w, (const uint8_t *)mine + i * 8, 8);
            int rc = in->agree(in, w, &least, &got, err);
            if (rc) return rc;
            memcpy((uint8_t *)&all[r] + i * 8, &got, 8);
        }
    return 0;
}

/* 1 on every rank, or 0 on every rank; < 0: an error. */
static int agree_on(sl_coll *in, int mine, sl_err *err) {
    uint64_t least, most;
    int rc = in->agree(in, (uint64_t)mine, &least, &most, err);
    return rc < 0 ? rc : (int)least;
}

/* 1: reachable on every rank; 0: not; < 0. */
static int share(coll_peer *c, region *r, void *base, uint64_t bytes, sl_err *err) {
    sl_coll *in = c->inner;
    card mine = {0}, all[MAX_TP] = {0};
    int ok = make_card(c, &mine, base, bytes) == 0, rc = deal(in, all, &mine, err);
    if (rc) return rc;
    (void)cudaGetLastError();
    if ((rc = agree_on(in, ok, err)) <= 0) return rc;
    r->bytes = bytes;
    for (int p = 0; p < in->tp; p++) {
        if (all[p].bytes != bytes) ok = 0; /* the same layout everywhere, or offsets would mean different things */
        if (p == in->rank)
            r->base[p] = base;
        else if (open_card(r, &all[p], p))
            ok = 0;
    }
    return agree_on(in, ok, err);
}

static int peer_memory(sl_coll *coll, void *base, uint64_t bytes, sl_err *err) {
    coll_peer *c = coll->impl;
    if (c->closed) return 0;
    if (c->n_mem == MAX_REGIONS)
        return sl_err_set(err, SL_EINTERNAL, "peer collective: more than %d pieces of memory", MAX_REGIONS);
    int ok = share(c, &c->mem[c->n_mem], base, bytes, err);
    if (ok < 0) return ok;
    c->n_mem++;
    if (!ok) {
        c->closed = 1;
        coll->how = c->inner->how;
        coll->overlaps = c->inner->overlaps;
    }
    return 0;
}

/* ---- one sum ---- */
static const region *region_of(const coll_peer *c, int rank, const void *p, uint64_t bytes, uint64_t *offset) {
    for (int i = 0; i < c->n_mem; i++) {
        uint64_t base = (uint64_t)(uintptr_t)c->mem[i].base[rank], at = (uint64_t)(uintptr_t)p;
        if (at < base || at - base > c->mem[i].bytes || c->mem[i].bytes - (at - base) < bytes) continue;
        *offset = at - base;
        return &c->mem[i];
    }
    return NULL;
}

enum { READY, DONE };
static CUdeviceptr flag(const coll_peer *c, int tp, int owner, int which, int from) { /* in the memory of `owner` */
    return (CUdeviceptr)(uintptr_t)(c->flags.base[owner] + (which * tp + from) * FLAG_STEP);
}
static int tell(coll_peer *c, sl_coll *coll, cudaStream_t st, int peer, int which, uint32_t s, sl_err *err) {
    CUresult r = c->write((CUstream)st, flag(c, coll->tp, peer, which, coll->rank), s, 0);
    return r == CUDA_SUCCESS ? 0 : cu_fail(r, "writing a counter", err);
}
static int hear(coll_peer *c, sl_coll *coll, cudaStream_t st, int peer, int which, uint32_t s, sl_err *err) {
    CUresult r = c->wait((CUstream)st, flag(c, coll->tp, coll->rank, which, peer), s, CU_STREAM_WAIT_VALUE_GEQ);
    return r == CUDA_SUCCESS ? 0 : cu_fail(r, "waiting for a counter", err);
}
static int copy(cudaStream_t st, void *to, const void *from, uint64_t bytes, sl_err *err) {
    cudaError_t e = bytes ? cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, st) : cudaSuccess;
    return e == cudaSuccess ? 0 : cuda_fail(e, "copy between GPUs", err);
}
/* What `later` does next waits for what `earlier` was given so far. */
static int hand_on(cudaEvent_t ev, cudaStream_t earlier, cudaStream_t later, sl_err *err) {
    cudaError_t e = cudaEventRecord(ev, earlier);
    if (e == cudaSuccess) e = cudaStreamWaitEvent(later, ev, 0);
    return e == cudaSuccess ? 0 : cuda_fail(e, "order between streams", err);
}

typedef struct sum {
    const region *part, *out;
    uint64_t part_off, out_off, es;
    int64_t n;
    void *h; /* NULL: the sum stays in part */
    uint32_t s;
} sum;

/* Elements [lo, hi) of the sum, inside this rank's slice, which begins at `first`. */
static int pull_and_add(coll_peer *c, sl_coll *coll, const sum *s, int k, int64_t first, int64_t lo, int64_t hi,
                        sl_err *err) {
    int me = coll->rank, tp = coll->tp, rc = 0;
    const void *x[MAX_TP];
    int64_t widest = sl_slice_widest(s->n, tp);
    uint64_t at = (uint64_t)lo * s->es, bytes = (uint64_t)(hi - lo) * s->es;
    x[me] = s->part->base[me] + s->part_off + at;
    for (int i = 1; i < tp && !rc; i++) { /* each rank begins with another peer */
        int p = (me + i) % tp;
        int64_t place = widest * sl_slice_place(me, p) + (lo - first);
        uint8_t *piece = (uint8_t *)coll->scratch + (uint64_t)place * s->es;
        x[p] = piece;
        if (!k) rc = hear(c, coll, c->pull, p, READY, s->s, err);
        if (!rc) rc = copy(c->pull, piece, s->part->base[p] + s->part_off + at, bytes, err);
    }
    uint8_t *out = s->out->base[me] + s->out_off + at;
    if (!rc) rc = hand_on(c->pulled[k], c->pull, c->add, err);
    if (!rc) rc = sl_ops_cuda_sum(c->ops, c->add, out, s->h ? out : NULL, x, tp, hi - lo, err);
    return rc ? rc : hand_on(c->added[k], c->add, c->lane.stream, err);
}

static int push(coll_peer *c, sl_coll *coll, const sum *s, int64_t lo, int64_t hi, int last, sl_err *err) {
    int me = coll->rank, tp = coll->tp, rc = 0;
    uint64_t at = s->out_off + (uint64_t)lo * s->es, bytes = (uint64_t)(hi - lo) * s->es;
    for (int i = 1; i < tp && !rc; i++) {
        int p = (me + i) % tp;
        rc = copy(c->lane.stream, s->out->base[p] + at, s->out->base[me] + at, bytes, err);
        if (!rc && last) rc = tell(c, coll, c->lane.stream, p, DONE, s->s, err);
    }
    return rc;
}

/* Into how many pieces a slice of n elements is cut. */
static int pieces(const sum *s, int64_t n, int tp) {
    int64_t bytes = n * (int64_t)s->es, want = bytes * (tp - 1) / PIECE, most = bytes / PIECE_COPY;
    if (want > most) want = most;
    return want < 1 ? 1 : want > MAX_PIECES ? MAX_PIECES : (int)want;
}

static int run_sum(coll_peer *c, sl_coll *coll, const sum *s, sl_err *err) {
    int me = coll->rank, tp = coll->tp;
    int64_t lo, hi;
    sl_slice(s->n, tp, me, &lo, &hi);
    int rc = sl_lane_wait(&c->lane, c->pull, c->lane.tickets, err); /* it may still use scratch */
    if (!rc) rc = sl_ops_cuda_fence(c->ops, c->pull, err);
    for (int p = 0; p < tp && !rc; p++)
        if (p != me) rc = tell(c, coll, c->pull, p, READY, s->s, err);
    int n = pieces(s, hi - lo, tp);
    for (int k = 0; k < n && !rc; k++) {
        int64_t from, to;
        sl_slice(hi - lo, n, k, &from, &to);
        rc = pull_and_add(c, coll, s, k, lo, lo + from, lo + to, err);
        if (!rc) rc = push(c, coll, s, lo + from, lo + to, k == n - 1, err);
    }
    for (int p = 0; p < tp && !rc; p++)
        if (p != me) rc = hear(c, coll, c->lane.stream, p, DONE, s->s, err);
    return rc;
}

static int peer_reduce(sl_coll *coll, void *h, void *part, int64_t n, uint64_t *ticket, sl_err *err) {
    coll_peer *c = coll->impl;
    if (c->closed) {
        c->inner->scratch = coll->scratch;
        return c->inner->reduce(c->inner, h, part, n, ticket, err);
    }
    sum s = {.n = n, .es = c->ops->act == SL_F32 ? 4 : 2, .h = h, .s = (uint32_t)(c->lane.tickets + 1)};
    s.part = region_of(c, coll->rank, part, (uint64_t)n * s.es, &s.part_off);
    s.out = h ? region_of(c, coll->rank, h, (uint64_t)n * s.es, &s.out_off) : s.part;
    if (!h) s.out_off = s.part_off;
    if (!s.part || !s.out || !coll->scratch)
        return sl_err_set(err, SL_EINTERNAL, "peer collective: a sum in memory that was not announced");
    int rc = run_sum(c, coll, &s, err);
    return rc ? rc : sl_lane_end(&c->lane, ticket, err);
}
static int peer_wait(sl_coll *coll, uint64_t ticket, sl_err *err) {
    coll_peer *c = coll->impl;
    if (c->closed) return c->inner->wait(c->inner, ticket, err);
    return sl_lane_wait(&c->lane, c->lane.compute, ticket, err);
}
static uint64_t peer_scratch(const sl_coll *coll, int64_t n) {
    const coll_peer *c = coll->impl;
    uint64_t mine = (uint64_t)sl_slice_widest(n, coll->tp) * (uint64_t)(coll->tp - 1) * (c->ops->act == SL_F32 ? 4 : 2);
    uint64_t inner = c->inner->scratch_bytes(c->inner, n);
    return mine > inner ? mine : inner;
}

/* ---- life ---- */
static int peer_barrier(sl_coll *coll, sl_err *err) {
    coll_peer *c = coll->impl;
    return c->inner->barrier(c->inner, err);
}
static int peer_agree(sl_coll *coll, uint64_t mine, uint64_t *least, uint64_t *greatest, sl_err *err) {
    coll_peer *c = coll->impl;
    return c->inner->agree(c->inner, mine, least, greatest, err);
}
static void close_region(region *r) {
    for (int p = 0; p < MAX_TP; p++)
        if (r->opened[p]) cudaIpcCloseMemHandle(r->opened[p]);
}
static void peer_destroy(sl_coll *coll) {
    coll_peer *c = coll->impl;
    if (c->inner) c->inner->destroy(c->inner);
    for (int i = 0; i < c->n_mem; i++) close_region(&c->mem[i]);
    close_region(&c->flags);
    for (int i = 0; i < MAX_PIECES; i++) {
        if (c->pulled[i]) cudaEventDestroy(c->pulled[i]);
        if (c->added[i]) cudaEventDestroy(c->added[i]);
    }
    if (c->pull) cudaStreamDestroy(c->pull);
    if (c->add) cudaStreamDestroy(c->add);
    sl_lane_close(&c->lane);
    if (c->flags.base[coll->rank]) c->ops->free(c->ops->ctx, c->flags.base[coll->rank]);
    free(c);
    free(coll);
}

static int open_driver(coll_peer *c, sl_err *err) {
    const struct {
        const char *name;
        void **at;
    } want[] = {{"cuStreamWriteValue32", (void **)&c->write},
                {"cuStreamWaitValue32", (void **)&c->wait},
                {"cuMemGetAddressRange", (void **)&c->range}};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        enum cudaDriverEntryPointQueryResult q;
        cudaError_t e = cudaGetDriverEntryPointByVersion(want[i].name, want[i].at, 12000, cudaEnableDefault, &q);
        if (e != cudaSuccess || q != cudaDriverEntryPointSuccess)
            return sl_err_set(err, SL_ECONFIG, "this CUDA driver has no %s", want[i].name);
    }
    return 0;
}

static int open_streams(coll_peer *c, sl_err *err) {
    int rc = sl_lane_open(&c->lane, c->ops, err);
    if (!rc) rc = sl_lane_stream(&c->pull, err);
    if (!rc) rc = sl_lane_stream(&c->add, err);
    cudaError_t e = cudaSuccess;
    for (int i = 0; i < MAX_PIECES && !rc && e == cudaSuccess; i++) {
        e = cudaEventCreateWithFlags(&c->pulled[i], cudaEventDisableTiming);
        if (e == cudaSuccess) e = cudaEventCreateWithFlags(&c->added[i], cudaEventDisableTiming);
    }
    return rc || e == cudaSuccess ? rc : cuda_fail(e, "making an event", err);
}

static int open_flags(coll_peer *c, int rank, int tp, sl_err *err) {
    uint64_t bytes = 2 * (uint64_t)tp * FLAG_STEP;
    void *p = NULL;
    int rc = c->ops->alloc(c->ops->ctx, &p, bytes, "counters of the ranks' sums", err);
    if (rc) return rc;
    c->flags.base[rank] = p;
    cudaError_t e = cudaMemset(p, 0, bytes);
    if (e == cudaSuccess) e = cudaDeviceSynchronize();
    return e == cudaSuccess ? 0 : cuda_fail(e, "clearing the counters", err);
}

int sl_coll_peer_open(sl_coll **out, sl_coll *inner, sl_ops *ops, sl_err *err) {
    *out = NULL;
    if (inner->tp > MAX_TP) return sl_err_set(err, SL_ECONFIG, "peer collective: at most %d ranks", MAX_TP);
    coll_peer *c = calloc(1, sizeof *c);
    sl_coll *coll = calloc(1, sizeof *coll);
    if (!c || !coll) {
        free(c);
        free(coll);
        return sl_err_set(err, SL_ETEMP, "collective: out of memory");
    }
    *coll = (sl_coll){.rank = inner->rank,
                      .tp = inner->tp,
                      .overlaps = 1,
                      .how = "copies between GPUs",
                      .scratch_bytes = peer_scratch,
                      .memory = peer_memory,
                      .reduce = peer_reduce,
                      .wait = peer_wait,
                      .barrier = peer_barrier,
                      .agree = peer_agree,
                      .destroy = peer_destroy,
                      .impl = c};
    c->ops = ops;
    int rc = open_driver(c, err);
    if (!rc) rc = open_streams(c, err);
    if (!rc) rc = open_flags(c, inner->rank, inner->tp, err);
    sl_err why = {0};
    int all = agree_on(inner, rc == 0, rc ? &why : err);
    if (!rc && all < 0) rc = all;
    if (!rc && !all) rc = sl_err_set(err, SL_ECONFIG, "another rank of the group cannot copy between GPUs");
    c->inner = inner;
    if (!rc) {
        int ok = share(c, &c->flags, c->flags.base[inner->rank], 2 * (uint64_t)inner->tp * FLAG_STEP, err);
        if (ok <= 0) rc = ok < 0 ? ok : sl_err_set(err, SL_ECONFIG, "the GPUs do not reach each other's memory");
    }
    if (rc) {
        c->inner = NULL; /* stays the caller's */
        peer_destroy(coll);
        return rc;
    }
    *out = coll;
    return 0;
}
#endif
