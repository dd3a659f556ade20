/* collective: how the ranks of a group add up. Four implementations of one small interface: none (tp 1), shared memory
 * (CPU, and any backend through the host), NCCL, copies between GPUs. Every element is added once, by one rank, in f32
 * and in rank order, rounded once, and copied to the others. So the results are bit-identical on every rank, and the
 * same bits whichever implementation made them. */
#ifndef SL_COMPUTE_COLLECTIVE_H
#define SL_COMPUTE_COLLECTIVE_H
#include "ipc/boot.h"
#include "kernels/ops.h"

#define SL_COLL_FLIGHT 64
typedef struct sl_coll sl_coll;
struct sl_coll {
    int rank, tp;
    int overlaps;    /* 1: sums run beside compute, so cutting a batch in two micro-batches hides them */
    const char *how; /* for people: "host memory", "NCCL", "copies between GPUs" */
    /* Device memory in which h and part of later sums will lie; every rank calls it in the same order with the same
     * sizes. Owned by the caller, who keeps it until the collective is destroyed. NULL: needs no announcement. */
    int (*memory)(sl_coll *c, void *base, uint64_t bytes, sl_err *err);
    /* Device memory that `reduce` needs for n elements; the caller allocates it and sets `scratch` before the first
     * call, and owns it. 0 unless GPUs add up. */
    uint64_t (*scratch_bytes)(const sl_coll *c, int64_t n);
    void *scratch;
    /* h == NULL: part[n] = sum over ranks of part. Else h[n] = round(h + sum of part) with one rounding, where h holds
     * the same values on every rank before and after; part is then left undefined. Device pointers, ops->act, aligned
     * to 16 bytes. It begins behind all compute submitted so far; compute submitted later may touch h and part only
     * behind wait(*ticket). Between the two, h, part and `scratch` belong to the sum. A peer's death shows as SL_ETEMP
     * or as being killed by the supervisor; waiting uses futexes, never spinning without bound. */
    int (*reduce)(sl_coll *c, void *h, void *part, int64_t n, uint64_t *ticket, sl_err *err);
    /* Order all later compute behind that sum. Does not wait on the host. Tickets may be waited for in any order, and
     * the last SL_COLL_FLIGHT of them are remembered. */
    int (*wait)(sl_coll *c, uint64_t ticket, sl_err *err);
    int (*barrier)(sl_coll *c, sl_err *err);
    /* Every rank gives a number, every rank learns the least and the greatest: how ranks agree where to start, and that
     * they are about to run the same batch. A barrier too. */
    int (*agree)(sl_coll *c, uint64_t mine, uint64_t *least, uint64_t *greatest, sl_err *err);
    void (*destroy)(sl_coll *c);
    void *impl;
};

/* Shared memory. One memfd a group: a header page, one page of flags a rank, one input buffer a rank, one result
 * buffer. A sum of at most max_elems elements is: copy in (the part, and this rank's slice of h into the result),
 * barrier, each rank adds up its slice of the elements, barrier, copy out. It is done when reduce returns. The barrier
 * after "copy in" also proves that everybody has copied the previous result out, so two barriers a call are enough. A
 * rank waits by looking a bounded number of times, then by futex; with fewer processors than ranks it goes to the futex
 * at once. Flags carry the epoch, so what a dead life left behind is never taken for an arrival, and a region needs no
 * cleaning between lives. Seeing a newer epoch is SL_ETEMP: this rank was left behind and ends. */
/* memfd bytes for a group of tp ranks (2..64) reducing at most max_elems at a time (larger calls are cut); 0 when
 * invalid. */
uint64_t sl_coll_shm_footprint(int tp, int64_t max_elems);
int sl_coll_shm_create_region(int tp, int64_t max_elems, sl_err *err); /* sealed memfd */
/* `epoch` (>= 1) separates lives of a group: a rank of another epoch is never waited for. The fd may be closed
 * afterwards. SL_EINTERNAL when the region is not one that sl_coll_shm_create_region made for this tp. */
int sl_coll_shm_open(sl_coll **out, int fd, int rank, int tp, uint32_t epoch, sl_ops *ops, sl_err *err);
int sl_coll_none_open(sl_coll **out, sl_err *err);
#ifdef SL_HAVE_CUDA
/* NCCL for the copies between GPUs: each rank sends every other rank its slice of the part, adds up its own slice with
 * a small kernel, and sends the result to all; as many bytes as NCCL's ring all-reduce moves, 2 (tp-1)/tp a rank and
 * element, but one rounding instead of one a hop. All of it runs in a stream of its own beside compute. Barriers and
 * agreement stay on `host` (an open shared-memory collective of the same group), which the new one owns on success. On
 * failure (SL_ECONFIG: no libnccl here or at a peer; SL_ETEMP: NCCL could not connect) `host` is untouched and serves
 * alone. Every rank of the group must call this. Peers must be on different GPUs.
 * `ring` 1 uses NCCL's own all-reduce instead (for measuring: its rounding differs, and h is added afterwards by a
 * second pass). */
int sl_coll_nccl_open(sl_coll **out, sl_coll *host, sl_ops *ops, int ring, sl_err *err);
/* Copies between GPUs that reach each other's memory (NVLink or PCIe peers of one machine), by the copy engines: the
 * same sums without NCCL's use of multiprocessors. `inner` (NCCL or shared memory, of the same group) does the
 * agreement, and the sums too where memory turns out not to be reachable; the new one owns it on success. Ranks must be
 * processes. SL_ECONFIG:
 * not possible here, on every rank alike; `inner` is untouched. Every rank of the group must call this. */
int sl_coll_peer_open(sl_coll **out, sl_coll *inner, sl_ops *ops, sl_err *err);
/* What a group on GPUs uses: copies between GPUs over NCCL where every rank has a GPU of its own. `host` as above; *out
 * is `host` itself when neither works, and *note says why ("" otherwise). how: sl_sums. */
int sl_coll_gpu_open(sl_coll **out, sl_coll *host, sl_ops *ops, int how, char note[256], sl_err *err);
#endif
#endif
