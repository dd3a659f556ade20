/* capture: fingerprints of the states and asynchronous copies into the registered shared-memory arena. The compute
 * stream never waits for the host: a copy runs in its own stream behind an event of the compute stream, and only the
 * next write to a captured buffer waits (on the device) for the copies before it. */
#include "kernels/cuda/context.h"

/* sum64 of a chunk (ipc/flow.h): a = sum w_i, b = sum (i+1) w_i over 32-bit words, mod 2^64. Many blocks a chunk;
 * integer sums do not depend on order. */
struct FpPart {
    unsigned long long a, b;
    unsigned int bad, pad;
};
__device__ __forceinline__ unsigned nonfinite2(uint32_t w) {
    return ((w & 0x7f80u) == 0x7f80u) + ((w & 0x7f800000u) == 0x7f800000u);
}

template <bool F32>
__global__ void __launch_bounds__(256) fp_kernel(FpPart *part, const uint32_t *x, int64_t words, int64_t chunk_words) {
    const int64_t c = blockIdx.y, base = c * chunk_words, n = min(chunk_words, words - base);
    const uint32_t *p = x + base;
    unsigned long long a = 0, b = 0;
    unsigned bad = 0;
    const int64_t step = (int64_t)gridDim.x * 256;
    if ((reinterpret_cast<uintptr_t>(p) & 15) == 0) {
        const int64_t n4 = n / 4;
        for (int64_t i = blockIdx.x * 256 + threadIdx.x; i < n4; i += step) {
            const uint4 v = __ldcs(reinterpret_cast<const uint4 *>(p) + i);
            const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                a += w[j], b += (unsigned long long)(i * 4 + j + 1) * w[j];
                bad += F32 ? (w[j] & 0x7f800000u) == 0x7f800000u : nonfinite2(w[j]);
            }
        }
        if (blockIdx.x == 0)
            for (int64_t i = n4 * 4 + threadIdx.x; i < n; i += 256) {
                a += p[i], b += (unsigned long long)(i + 1) * p[i];
                bad += F32 ? (p[i] & 0x7f800000u) == 0x7f800000u : nonfinite2(p[i]);
            }
    } else {
        for (int64_t i = blockIdx.x * 256 + threadIdx.x; i < n; i += step) {
            a += p[i], b += (unsigned long long)(i + 1) * p[i];
            bad += F32 ? (p[i] & 0x7f800000u) == 0x7f800000u : nonfinite2(p[i]);
        }
    }
#pragma unroll
    for (int o = 16; o; o >>= 1)
        a += __shfl_xor_sync(~0u, a, o), b += __shfl_xor_sync(~0u, b, o), bad += __shfl_xor_sync(~0u, bad, o);
    if (threadIdx.x % 32 == 0) {
        atomicAdd(&part[c].a, a), atomicAdd(&part[c].b, b);
        if (bad) atomicAdd(&part[c].bad, bad);
    }
}
/* An odd count of bf16 elements in a chunk (odd width and odd rows): 16-bit reads, the last half word zero-extended. */
__global__ void __launch_bounds__(256)
    fp_kernel_half(FpPart *part, const uint16_t *x, int64_t elems, int64_t chunk_elems) {
    const int64_t c = blockIdx.y, base = c * chunk_elems, n = min(chunk_elems, elems - base);
    const uint16_t *p = x + base;
    unsigned long long a = 0, b = 0;
    unsigned bad = 0;
    for (int64_t i = blockIdx.x * 256 + threadIdx.x; i < (n + 1) / 2; i += (int64_t)gridDim.x * 256) {
        const uint32_t w = p[2 * i] | (2 * i + 1 < n ? (uint32_t)p[2 * i + 1] << 16 : 0u);
        a += w, b += (unsigned long long)(i + 1) * w, bad += nonfinite2(w);
    }
    atomicAdd(&part[c].a, a), atomicAdd(&part[c].b, b);
    if (bad) atomicAdd(&part[c].bad, bad);
}
__global__ void fp_finish(uint64_t *sums, uint32_t *bad, const FpPart *part, int64_t chunks, int64_t bytes,
                          int64_t chunk_bytes) {
    const int64_t c = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (c >= chunks) return;
    const unsigned long long n = min(chunk_bytes, bytes - c * chunk_bytes), a = part[c].a;
    sums[c] = part[c].b ^ (a << 32 | a >> 32) ^ (n * 0x9e3779b97f4a7c15ull);
    bad[c] = part[c].bad;
}

int sl_cuda_fingerprint(SlCuda *c, uint64_t *sums, uint32_t *nonfinite, const void *x, int64_t T, int64_t H,
                        int64_t chunk_rows, sl_err *err) {
    if (T < 1 || H < 1 || chunk_rows < 1)
        return sl_err_set(err, SL_EINTERNAL, "fingerprint of %lld x %lld in chunks of %lld rows", (long long)T,
                          (long long)H, (long long)chunk_rows);
    const int64_t elem = c->act == SL_F32 ? 4 : 2, chunks = (T + chunk_rows - 1) / chunk_rows;
    const uint64_t need = (uint64_t)chunks * (sizeof(FpPart) + 12);
    if (need > c->fp_cap) {
        if (c->fp_dev) SL_CU(cudaStreamSynchronize(c->stream));
        cudaFree(c->fp_dev), c->fp_dev = nullptr, c->fp_cap = 0;
        SL_CU(cudaMalloc(&c->fp_dev, need * 2));
        c->fp_cap = need * 2;
    }
    FpPart *part = (FpPart *)c->fp_dev;
    uint64_t *ds = (uint64_t *)(part + chunks);
    uint32_t *db = (uint32_t *)(ds + chunks);
    SL_CU(cudaMemsetAsync(part, 0, (size_t)chunks * sizeof(FpPart), c->stream));
    const int64_t total = T * H, per = chunk_rows * H;
    const unsigned bx = (unsigned)max((int64_t)1, min((per * elem + 65535) / 65536, (int64_t)c->sms * 8 / chunks + 1));
    for (int64_t c0 = 0; c0 < chunks; c0 += 65535) {
        const dim3 grid(bx, (unsigned)min((int64_t)65535, chunks - c0));
        if (elem == 4)
            fp_kernel<true>
                <<<grid, 256, 0, c->stream>>>(part + c0, (const uint32_t *)x + c0 * per, total - c0 * per, per);
        else if (per % 2 == 0 && total % 2 == 0)
            fp_kernel<false><<<grid, 256, 0, c->stream>>>(part + c0, (const uint32_t *)x + c0 * per / 2,
                                                          (total - c0 * per) / 2, per / 2);
        else
            fp_kernel_half<<<grid, 256, 0, c->stream>>>(part + c0, (const uint16_t *)x + c0 * per, total - c0 * per,
                                                        per);
    }
    fp_finish<<<(unsigned)((chunks + 127) / 128), 128, 0, c->stream>>>(ds, db, part, chunks, total * elem, per * elem);
    SL_LAUNCHED("fingerprint");
    SL_CU(cudaMemcpyAsync(sums, ds, (size_t)chunks * 8, cudaMemcpyDeviceToHost, c->stream));
    SL_CU(cudaMemcpyAsync(nonfinite, db, (size_t)chunks * 4, cudaMemcpyDeviceToHost, c->stream));
    return 0;
}

/* Tickets count copies from 1; events are a ring, far longer than copies in flight can be (a ring's payload slots bound
 * them). */
constexpr uint64_t EVENTS = 1024;

int sl_cuda_capture_copy(SlCuda *c, void *host, const void *dev, uint64_t bytes, uint64_t *ticket, sl_err *err) {
    if (c->events.empty()) {
        c->events.resize(EVENTS);
        for (auto &e : c->events) SL_CU(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    }
    SL_CU(cudaEventRecord(c->compute_mark, c->stream));
    SL_CU(cudaStreamWaitEvent(c->copy, c->compute_mark, 0));
    SL_CU(cudaMemcpyAsync(host, dev, bytes, cudaMemcpyDeviceToHost, c->copy));
    const uint64_t t = ++c->tickets;
    if (t > EVENTS) SL_CU(cudaEventSynchronize(c->events[t % EVENTS])); /* the copy 1024 before: long done */
    SL_CU(cudaEventRecord(c->events[t % EVENTS], c->copy));
    c->last_copy = t;
    *ticket = t;
    return 0;
}
int sl_cuda_capture_done(SlCuda *c, uint64_t ticket, int *done, sl_err *err) {
    if (ticket + EVENTS <= c->tickets) {
        *done = 1;
        return 0;
    }
    const cudaError_t e = cudaEventQuery(c->events[ticket % EVENTS]);
    if (e != cudaSuccess && e != cudaErrorNotReady)
        return sl_cuda_fail(err, e, "copy of captured states", __FILE__, __LINE__);
    *done = e == cudaSuccess;
    return 0;
}
int sl_cuda_capture_wait(SlCuda *c, uint64_t ticket, sl_err *err) {
    if (ticket + EVENTS <= c->tickets) return 0;
    SL_CU(cudaEventSynchronize(c->events[ticket % EVENTS]));
    return 0;
}
