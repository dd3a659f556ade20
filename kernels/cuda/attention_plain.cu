/* attention_plain: any head dims up to 256 in float or bf16. One warp a (query row, head): lanes hold one key each of
 * 32 for the scores, then the head's output columns. Online softmax in f32. Not fast and not meant to be: it is the
 * sharp path for f32 and serves head dims that the tensor-core kernels do not. */
#include "kernels/cuda/attention.cuh"

namespace {
constexpr int WARPS = 4, MAX_D = 256;

/* grid: (row blocks of WARPS rows, sequence, head) */
template <class T>
__global__ void __launch_bounds__(WARPS * 32)
    plain_kernel(T *o, const T *q, const T *k, const T *v, const sl_attn a, const AttnTile *seqs) {
    __shared__ float qs[WARPS][MAX_D];
    const AttnTile seq = seqs[blockIdx.y];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = blockIdx.x * WARPS + warp, h = blockIdx.z,
              kvh = h / (a.heads / a.kv_heads);
    if (i >= seq.len) return;
    const T *qp = q + (int64_t)(seq.start + i) * a.q_stride + (int64_t)h * a.dqk;
    const T *kp = k + (int64_t)seq.start * a.k_stride + kvh * a.k_head_stride,
            *vp = v + (int64_t)seq.start * a.v_stride + kvh * a.v_head_stride;
    for (int d = lane; d < a.dqk; d += 32) qs[warp][d] = to_f<T>(qp[d]);
    __syncwarp();
    float m = -INFINITY, l = 0, acc[MAX_D / 32] = {};
    const int lo = a.window > 0 ? max(0, i - a.window + 1) : 0;
    for (int j0 = lo; j0 <= i; j0 += 32) {
        const int j = j0 + lane;
        float s = -INFINITY;
        if (j <= i) {
            const T *kr = kp + (int64_t)j * a.k_stride;
            float dot = 0;
            for (int d = 0; d < a.dqk; d++) dot = fmaf(qs[warp][d], to_f<T>(kr[d]), dot);
            s = dot * a.scale;
        }
        const float mx = fmaxf(m, warp_max(s)), corr = expf(m - mx), p = j <= i ? expf(s - mx) : 0.f;
        l = l * corr + warp_sum(p);
        m = mx;
        const int n = min(32, i - j0 + 1);
        for (int c = 0; c < (a.dv + 31) / 32; c++) acc[c] *= corr;
        for (int jj = 0; jj < n; jj++) {
            const float pj = rnd<T>(__shfl_sync(~0u, p, jj));
            const T *vr = vp + (int64_t)(j0 + jj) * a.v_stride;
#pragma unroll
            for (int c = 0; c < MAX_D / 32; c++)
                if (c * 32 + lane < a.dv) acc[c] = fmaf(pj, to_f<T>(vr[c * 32 + lane]), acc[c]);
        }
    }
    if (a.sinks) l += expf(a.sinks[h] - m);
    T *op = o + (int64_t)(seq.start + i) * a.o_stride + (int64_t)h * a.dv;
#pragma unroll
    for (int c = 0; c < MAX_D / 32; c++)
        if (c * 32 + lane < a.dv) op[c * 32 + lane] = from_f<T>(acc[c] / l);
}
} // namespace

template <class T>
int sl_attention_plain(const sl_attn *a, void *o, const void *q, const void *k, const void *v, const AttnTile *seqs,
                       int S, int max_len, cudaStream_t s, sl_err *err) {
    if (!S || !max_len) return 0;
    for (int s0 = 0; s0 < S; s0 += 65535) { /* the grid's second dimension */
        const dim3 grid((max_len + WARPS - 1) / WARPS, std::min(S - s0, 65535), a->heads);
        plain_kernel<T><<<grid, WARPS * 32, 0, s>>>((T *)o, (const T *)q, (const T *)k, (const T *)v, *a, seqs + s0);
    }
    SL_LAUNCHED("attention_plain");
    return 0;
}
template int sl_attention_plain<float>(const sl_attn *, void *, const void *, const void *, const void *,
                                       const AttnTile *, int, int, cudaStream_t, sl_err *);
template int sl_attention_plain<bf16>(const sl_attn *, void *, const void *, const void *, const void *,
                                      const AttnTile *, int, int, cudaStream_t, sl_err *);
