/* collective_lane: the stream in which a collective's sums run beside compute, and the tickets by which compute waits
 * for them on the device. Used by the collectives between GPUs. */
#ifndef SL_COMPUTE_COLLECTIVE_LANE_H
#define SL_COMPUTE_COLLECTIVE_LANE_H
#include "stages/compute/collective.h"
#include <cuda_runtime_api.h>

typedef struct sl_lane {
    cudaStream_t compute;             /* the ops' own stream, not owned */
    cudaStream_t stream;              /* the sums end here; the highest priority of the device */
    cudaEvent_t done[SL_COLL_FLIGHT]; /* of sum number t at t % SL_COLL_FLIGHT */
    uint64_t tickets;                 /* sums begun so far */
} sl_lane;

/* Zeroed memory into an open lane on the device of `ops`. SL_EINTERNAL with CUDA's words; close it then too. */
int sl_lane_open(sl_lane *l, const sl_ops *ops, sl_err *err);
/* One more stream of the same priority, the caller's to destroy. */
int sl_lane_stream(cudaStream_t *out, sl_err *err);
/* All that was put into the stream so far is sum *ticket (1, 2, ..). */
int sl_lane_end(sl_lane *l, uint64_t *ticket, sl_err *err);
/* `waiter` goes on behind that sum; ticket 0: at once. Sums are in order, so a younger event that has taken the place
 * of the one asked for is still behind it. */
int sl_lane_wait(sl_lane *l, cudaStream_t waiter, uint64_t ticket, sl_err *err);
void sl_lane_close(sl_lane *l);
#endif
