/* collective: how the ranks of a group add up. Three implementations of one small interface: none (tp 1), shared memory
 * (CPU, and any backend through the host), NCCL. Results are bit-identical on every rank: each element is reduced once,
 * in rank order, by one rank, then copied. */
#ifndef SL_COMPUTE_COLLECTIVE_H
#define SL_COMPUTE_COLLECTIVE_H
#include "kernels/ops.h"

typedef struct sl_coll sl_coll;
struct sl_coll {
    int rank, tp;
    /* buf[n] (device pointer, ops->act) = sum over ranks; ordered in the compute stream. A peer's death shows as
     * SL_ETEMP or as being killed by the supervisor; waiting uses futexes, never spinning without bound. */
    int (*allreduce)(sl_coll *c, void *buf, int64_t n, sl_err *err);
    int (*barrier)(sl_coll *c, sl_err *err);
    /* Every rank gives a number, every rank learns the least and the greatest: how ranks agree where to start, and that
     * they are about to run the same batch. A barrier too. */
    int (*agree)(sl_coll *c, uint64_t mine, uint64_t *least, uint64_t *greatest, sl_err *err);
    void (*destroy)(sl_coll *c);
    void *impl;
};

/* Shared memory. One memfd a group: a header page, one page of flags a rank, one input buffer a rank, one result
 * buffer. An all-reduce of at most max_elems elements is: copy in, barrier, each rank reduces its slice of the elements
 * in f32 in rank order and rounds once, barrier, copy out. The barrier after "copy in" also proves that everybody has
 * copied the previous result out, so two barriers a call are enough. A rank waits by looking a bounded number of times,
 * then by futex; with fewer processors than ranks it goes to the futex at once. Flags carry the epoch, so what a dead
 * life left behind is never taken for an arrival, and a region needs no cleaning between lives. Seeing a newer epoch is
 * SL_ETEMP: this rank was left behind and ends. */
/* memfd bytes for a group of tp ranks (2..64) reducing at most max_elems at a time (larger calls are cut); 0 when
 * invalid. */
uint64_t sl_coll_shm_footprint(int tp, int64_t max_elems);
int sl_coll_shm_create_region(int tp, int64_t max_elems, sl_err *err); /* sealed memfd */
/* `epoch` (>= 1) separates lives of a group: a rank of another epoch is never waited for. The fd may be closed
 * afterwards. SL_EINTERNAL when the region is not one that sl_coll_shm_create_region made for this tp. */
int sl_coll_shm_open(sl_coll **out, int fd, int rank, int tp, uint32_t epoch, sl_ops *ops, sl_err *err);
int sl_coll_none_open(sl_coll **out, sl_err *err);
#ifdef SL_HAVE_CUDA
/* NCCL for the sums; barriers and agreement stay on `host` (an open shared-memory collective of the same group), which
 * the new one owns on success. On failure (SL_ECONFIG: no libnccl here or at a peer; SL_ETEMP: NCCL could not connect)
 * `host` is untouched and serves alone. Every rank of the group must call this. Peers must be on different GPUs. */
int sl_coll_nccl_open(sl_coll **out, sl_coll *host, sl_ops *ops, sl_err *err);
#endif
#endif
