/* nll: teacher negative log-likelihood of one row. Logits of a block of tokens at a time (never the whole T x
 * vocabulary), then one block a token: a stable log-sum-exp in f32. */
#include <algorithm>
#include <cmath>
#include <vector>
#include "kernels/cuda/context.h"

constexpr int NLL_ROWS = 512;

__global__ void __launch_bounds__(256) nll_kernel(float *out, const float *logits, int64_t vocab, const int32_t *next) {
    const float *l = logits + blockIdx.x * vocab;
    __shared__ float part[8];
    float m = -INFINITY;
    for (int64_t i = threadIdx.x; i < vocab; i += 256) m = fmaxf(m, l[i]);
    m = warp_max(m);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = m;
    __syncthreads();
    for (int i = 0; i < 8; i++) m = fmaxf(m, part[i]);
    __syncthreads();
    float s = 0;
    for (int64_t i = threadIdx.x; i < vocab; i += 256) s += expf(l[i] - m);
    s = warp_sum(s);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = s;
    __syncthreads();
    if (threadIdx.x == 0) {
        s = 0;
        for (int i = 0; i < 8; i++) s += part[i];
        out[blockIdx.x] = m + logf(s) - l[next[blockIdx.x]];
    }
}

/* *p holds at least `bytes`; kept from call to call, made anew for a larger head. */
static int reserve(SlCuda *c, void **p, uint64_t *cap, uint64_t bytes, sl_err *err) {
    if (bytes <= *cap) return 0;
    SL_CU(cudaStreamSynchronize(c->stream));
    cudaFree(*p), *p = nullptr, *cap = 0;
    SL_CU(cudaMalloc(p, bytes));
    *cap = bytes;
    return 0;
}

int sl_cuda_nll(SlCuda *c, double *nll, const void *x, int64_t T, int64_t H, const int32_t *ids, const sl_mat *head,
                sl_err *err) {
    if (T < 2) { /* nothing to predict */
        *nll = NAN;
        return 0;
    }
    const int64_t V = head->n, elem = c->act == SL_F32 ? 4 : 2;
    int rc = reserve(c, (void **)&c->nll_dev, &c->nll_cap, ((uint64_t)NLL_ROWS * V + NLL_ROWS) * 4, err);
    if (!rc && head->fmt != (c->act == SL_F32 ? SL_W_F32 : SL_W_BF16))
        rc = reserve(c, &c->head_dev, &c->head_cap, (uint64_t)V * H * elem, err);
    if (rc) return rc;
    sl_mat w;
    if ((rc = sl_cuda_as_act(c, &w, head, c->head_dev, err))) return rc;
    float *logits = c->nll_dev, *rows = logits + (size_t)NLL_ROWS * V;
    std::vector<float> host(NLL_ROWS);
    double sum = 0;
    for (int64_t t0 = 0; t0 < T - 1; t0 += NLL_ROWS) {
        const int64_t n = std::min<int64_t>(NLL_ROWS, T - 1 - t0);
        rc = sl_cuda_linear_f32out(c, logits, V, (const char *)x + t0 * H * elem, H, n, &w, err);
        if (rc) return rc;
        nll_kernel<<<(unsigned)n, 256, 0, c->stream>>>(rows, logits, V, ids + t0 + 1);
        SL_LAUNCHED("nll");
        SL_CU(cudaMemcpyAsync(host.data(), rows, (size_t)n * 4, cudaMemcpyDeviceToHost, c->stream));
        SL_CU(cudaStreamSynchronize(c->stream));
        for (int64_t i = 0; i < n; i++) sum += host[i];
    }
    *nll = sum / (double)(T - 1);
    return 0;
}
