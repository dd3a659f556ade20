/* reduce: what collectives need of this backend: a stream that waits for compute, and the sum of a slice of every
 * rank's part, in f32, in rank order, onto the residual, rounded once. */
#include <algorithm>
#include "kernels/cuda/context.h"

struct SumArgs {
    const void *x[SL_CUDA_SUM_MAX];
    int k;
};

template <class T> __device__ __forceinline__ float sum_one(const SumArgs &a, const T *h, int64_t i) {
    float v = to_f<T>(static_cast<const T *>(a.x[0])[i]);
    for (int r = 1; r < a.k; r++) v += to_f<T>(static_cast<const T *>(a.x[r])[i]);
    return h ? v + to_f<T>(h[i]) : v;
}

/* All multiprocessors for a short time. A product that is persistent with a fixed share of tiles a block ends late when
 * some of its blocks begin late: half of the multiprocessors for twice as long cost more (NOTES.md, Several GPUs). */
constexpr int SUM_BLOCKS_SM = 2, SUM_THREADS = 512;
template <class T>
__global__ void __launch_bounds__(SUM_THREADS) sum_kernel(T *out, const T *h, SumArgs a, int64_t n, int wide) {
    const int64_t first = (int64_t)blockIdx.x * SUM_THREADS + threadIdx.x, step = (int64_t)gridDim.x * SUM_THREADS;
    const int64_t n8 = wide ? n / 8 : 0;
    for (int64_t i = first; i < n8; i += step) {
        float v[8], x[8];
        load8(static_cast<const T *>(a.x[0]) + i * 8, v);
        for (int r = 1; r < a.k; r++) {
            load8(static_cast<const T *>(a.x[r]) + i * 8, x);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] += x[j];
        }
        if (h) {
            load8(h + i * 8, x);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] += x[j];
        }
        store8(out + i * 8, v);
    }
    for (int64_t i = n8 * 8 + first; i < n; i += step) out[i] = from_f<T>(sum_one<T>(a, h, i));
}

extern "C" int sl_ops_cuda_sum(const sl_ops *ops, void *stream, void *out, const void *h, const void *const *x, int k,
                               int64_t n, sl_err *err) {
    if (k < 1 || k > SL_CUDA_SUM_MAX)
        return sl_err_set(err, SL_EINTERNAL, "sum of %d parts: 1..%d", k, SL_CUDA_SUM_MAX);
    if (n < 1) return 0;
    SumArgs a = {};
    a.k = k;
    bool wide = aligned16(out) && aligned16(h);
    for (int r = 0; r < k; r++) a.x[r] = x[r], wide = wide && aligned16(x[r]);
    const unsigned blocks =
        (unsigned)std::min<int64_t>(SUM_BLOCKS_SM * ((SlCuda *)ops->ctx)->sms, (n + SUM_THREADS - 1) / SUM_THREADS);
    if (ops->act == SL_F32)
        sum_kernel<float><<<blocks, SUM_THREADS, 0, (cudaStream_t)stream>>>((float *)out, (const float *)h, a, n, wide);
    else
        sum_kernel<bf16><<<blocks, SUM_THREADS, 0, (cudaStream_t)stream>>>((bf16 *)out, (const bf16 *)h, a, n, wide);
    SL_LAUNCHED("sum");
    return 0;
}

extern "C" int sl_ops_cuda_fence(const sl_ops *ops, void *stream, sl_err *err) {
    SlCuda *c = (SlCuda *)ops->ctx;
    SL_CU(cudaEventRecord(c->compute_mark, c->stream));
    SL_CU(cudaStreamWaitEvent((cudaStream_t)stream, c->compute_mark, 0));
    if (c->last_copy) SL_CU(cudaStreamWaitEvent((cudaStream_t)stream, c->events[c->last_copy % c->events.size()], 0));
    return 0;
}
