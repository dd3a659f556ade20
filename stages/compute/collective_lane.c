/* collective_lane: see the header. */
#include "stages/compute/collective_lane.h"

static int fail(cudaError_t e, const char *what, sl_err *err) {
    return sl_err_set(err, SL_EINTERNAL, "sums over ranks: %s: %s", what, cudaGetErrorString(e));
}

int sl_lane_stream(cudaStream_t *out, sl_err *err) {
    int least, greatest;
    cudaError_t e = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (e == cudaSuccess) e = cudaStreamCreateWithPriority(out, cudaStreamNonBlocking, greatest);
    return e == cudaSuccess ? 0 : fail(e, "opening a stream", err);
}

int sl_lane_open(sl_lane *l, const sl_ops *ops, sl_err *err) {
    l->compute = sl_ops_cuda_stream(ops);
    int rc = sl_lane_stream(&l->stream, err);
    cudaError_t e = cudaSuccess;
    for (int i = 0; i < SL_COLL_FLIGHT && !rc && e == cudaSuccess; i++)
        e = cudaEventCreateWithFlags(&l->done[i], cudaEventDisableTiming);
    return rc || e == cudaSuccess ? rc : fail(e, "making an event", err);
}

int sl_lane_end(sl_lane *l, uint64_t *ticket, sl_err *err) {
    *ticket = ++l->tickets;
    cudaError_t e = cudaEventRecord(l->done[*ticket % SL_COLL_FLIGHT], l->stream);
    return e == cudaSuccess ? 0 : fail(e, "recording an event", err);
}

int sl_lane_wait(sl_lane *l, cudaStream_t waiter, uint64_t ticket, sl_err *err) {
    cudaError_t e = ticket ? cudaStreamWaitEvent(waiter, l->done[ticket % SL_COLL_FLIGHT], 0) : cudaSuccess;
    return e == cudaSuccess ? 0 : fail(e, "waiting for a sum", err);
}

void sl_lane_close(sl_lane *l) {
    for (int i = 0; i < SL_COLL_FLIGHT; i++)
        if (l->done[i]) cudaEventDestroy(l->done[i]);
    if (l->stream) cudaStreamDestroy(l->stream);
}
