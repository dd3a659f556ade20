/* collective: how the ranks of a group add up. Three implementations of one small interface: none (tp 1), shared memory
 * (CPU, and any backend through the host), NCCL. Results are bit-identical on every rank: each element is reduced once, in
 * rank order, by one rank, then copied. */
#ifndef SL_COMPUTE_COLLECTIVE_H
#define SL_COMPUTE_COLLECTIVE_H
#include "kernels/ops.h"

typedef struct sl_coll sl_coll;
struct sl_coll {
    int rank, tp;
    /* buf[n] (device pointer, ops->act) = sum over ranks; ordered in the compute stream. A peer's death shows as SL_ETEMP or as
     * being killed by the supervisor; waiting uses futexes, never spinning without bound. */
    int (*allreduce)(sl_coll *c, void *buf, int64_t n, sl_err *err);
    int (*barrier)(sl_coll *c, sl_err *err);
    void (*destroy)(sl_coll *c);
    void *impl;
};
/* memfd bytes for a group of tp ranks reducing at most max_elems at a time (larger calls are cut). */
uint64_t sl_coll_shm_footprint(int tp, int64_t max_elems);
int sl_coll_shm_create_region(int tp, int64_t max_elems, sl_err *err); /* sealed memfd */
/* `epoch` separates lives of a group: a rank of another epoch is never waited for. */
int sl_coll_shm_open(sl_coll **out, int fd, int rank, int tp, uint32_t epoch, sl_ops *ops, sl_err *err);
int sl_coll_none_open(sl_coll **out, sl_err *err);
#endif
