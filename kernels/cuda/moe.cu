/* moe: router, token permutation, experts, weighted sum. The host never needs to know the routing on the tensor-core
 * path: the offsets of the experts' rows stay on the device. On the other paths (f32, chips without wgmma) the offsets
 * are fetched once and each expert is one dense product.
 *
 * Rows of experts: pair (token t, choice j) of a local expert gets a row; rows of one expert are neighbours. The order
 * within an expert is not fixed, which changes no bit: a row's products do not depend on its place, and the sum over a
 * token's choices runs in the order of j. */
#include <algorithm>
#include "kernels/cuda/context.h"

/* ---------------------------------------------------------------- router */

constexpr int MAX_TOPK = 32;

/* One warp a token. Shared memory: 2 E floats a warp (score, choice value). */
__global__ void route_kernel(int32_t *idx, float *wout, const float *logits, int64_t T, const sl_router r,
                             int bf16_act) {
    extern __shared__ float sh[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, E = r.experts;
    const int64_t t = blockIdx.x * (int64_t)(blockDim.x / 32) + warp;
    float *s = sh + warp * 2 * E, *c = s + E;
    if (t >= T) return;
    float mx = -INFINITY;
    for (int e = lane; e < E; e += 32) {
        float l = logits[t * E + e];
        if (r.logit_bias) l += r.logit_bias[e];
        if (r.bf16_logits && bf16_act) l = __bfloat162float(__float2bfloat16_rn(l));
        s[e] = l;
        mx = fmaxf(mx, l);
    }
    mx = warp_max(mx);
    __syncwarp();
    if (r.score == SL_SCORE_SOFTMAX) {
        float sum = 0;
        for (int e = lane; e < E; e += 32) sum += s[e] = expf(s[e] - mx);
        sum = warp_sum(sum);
        for (int e = lane; e < E; e += 32) s[e] /= sum;
    } else if (r.score == SL_SCORE_SIGMOID) {
        for (int e = lane; e < E; e += 32) s[e] = 1.f / (1.f + expf(-s[e]));
    }
    for (int e = lane; e < E; e += 32) c[e] = s[e] + (r.bias ? r.bias[e] : 0.f);
    __syncwarp();
    unsigned keep = ~0u; /* groups that may be chosen from */
    const int per = r.n_group > 1 ? E / r.n_group : E;
    if (r.n_group > 1) { /* lane g scores group g; the best topk_group stay, the others cannot be chosen */
        float gs = -INFINITY, gs2 = -INFINITY;
        for (int g = lane; g < r.n_group; g += 32) { /* n_group <= 32: one turn */
            for (int i = 0; i < per; i++) {
                const float v = c[g * per + i];
                if (v > gs)
                    gs2 = gs, gs = v;
                else if (v > gs2)
                    gs2 = v;
            }
            if (r.group_score_top2) gs = per > 1 ? gs + gs2 : gs;
        }
        int better = 0;
        for (int g = 0; g < r.n_group; g++) {
            const float o = __shfl_sync(~0u, gs, g);
            better += o > gs || (o == gs && g < lane);
        }
        keep = __ballot_sync(~0u, lane < r.n_group && better < r.topk_group);
    }
    int chosen = 0;
    float w = 0;        /* lane j keeps choice j */
    unsigned taken = 0; /* of this lane's entries, at most 1024 / 32 */
    for (int j = 0; j < r.top_k; j++) {
        float best = -INFINITY;
        int at = E;
        for (int e = lane; e < E; e += 32) {
            const bool out = taken >> (e / 32) & 1 || (r.n_group > 1 && !(keep >> (e / per) & 1));
            const float v = out ? -INFINITY : c[e];
            if (v > best || (v == best && e < at)) best = v, at = e;
        }
#pragma unroll
        for (int o = 16; o; o >>= 1) {
            const float ob = __shfl_xor_sync(~0u, best, o);
            const int oa = __shfl_xor_sync(~0u, at, o);
            if (ob > best || (ob == best && oa < at)) best = ob, at = oa;
        }
        if (at >= E) at = 0; /* only with NaN scores: the states are rejected later as not finite */
        if (lane == j) chosen = at, w = s[at];
        if (at % 32 == lane) taken |= 1u << (at / 32);
    }
    const bool mine = lane < r.top_k;
    if (r.score == SL_SCORE_SOFTMAX_TOPK) {
        const float m = warp_max(mine ? w : -INFINITY), x = mine ? expf(w - m) : 0.f;
        w = x / warp_sum(x);
    }
    if (r.renorm) w /= warp_sum(mine ? w : 0.f) + 1e-20f;
    w *= r.scale;
    if (r.bf16_weights && bf16_act) w = __bfloat162float(__float2bfloat16_rn(w));
    if (mine) idx[t * r.top_k + lane] = chosen, wout[t * r.top_k + lane] = w;
}

/* Workspace of the router: logits, then the matrix in the activation type (when the file has another). */
static uint64_t route_gate_bytes(const SlCuda *c, int64_t H, int64_t E) {
    return ((uint64_t)E * H * (c->act == SL_F32 ? 4 : 2) + 255) & ~255ull;
}
static uint64_t route_bytes(const SlCuda *c, int64_t T, int64_t H, int64_t E) {
    return (((uint64_t)T * E * 4 + 255) & ~255ull) + route_gate_bytes(c, H, E);
}

int sl_cuda_route(SlCuda *c, int32_t *idx, float *w, const void *x, int64_t T, int64_t H, const sl_mat *gate,
                  const sl_router *r, sl_err *err) {
    if (r->top_k > MAX_TOPK || r->n_group > 32 || r->experts > 1024 || r->top_k > r->experts)
        return sl_err_set(err, SL_ECONFIG,
                          "router with %d experts, top %d, %d groups: the CUDA backend takes at most 1024, 32, 32",
                          r->experts, r->top_k, r->n_group);
    if (gate->n != r->experts || gate->k != H)
        return sl_err_set(err, SL_EINTERNAL, "router matrix is [%lld, %lld], expected [%d, %lld]", (long long)gate->n,
                          (long long)gate->k, r->experts, (long long)H);
    const uint64_t need = route_bytes(c, T, H, r->experts);
    char *ws = c->ws;
    if (need > c->ws_bytes) { /* no workspace of the caller's, or too small: an own one, kept */
        if (need > c->route_cap) {
            SL_CU(cudaStreamSynchronize(c->stream));
            cudaFree(c->route_dev), c->route_dev = nullptr, c->route_cap = 0;
            SL_CU(cudaMalloc((void **)&c->route_dev, need));
            c->route_cap = need;
        }
        ws = c->route_dev;
    }
    float *logits = (float *)ws;
    sl_mat g;
    int rc = sl_cuda_as_act(c, &g, gate, ws + need - route_gate_bytes(c, H, r->experts), err);
    if (!rc) rc = sl_cuda_linear_f32out(c, logits, r->experts, x, H, T, &g, err);
    if (rc) return rc;
    const int warps = 4;
    route_kernel<<<(unsigned)((T + warps - 1) / warps), warps * 32, (size_t)warps * 2 * r->experts * 4, c->stream>>>(
        idx, w, logits, T, *r, c->act == SL_BF16);
    SL_LAUNCHED("route");
    return 0;
}

/* ---------------------------------------------------------------- permutation */

__global__ void count_kernel(int *counts, const int32_t *idx, int64_t n, int first, int local) {
    extern __shared__ int hist[];
    for (int i = threadIdx.x; i < local; i += blockDim.x) hist[i] = 0;
    __syncthreads();
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        const int e = idx[i] - first;
        if (e >= 0 && e < local) atomicAdd(&hist[e], 1);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < local; i += blockDim.x)
        if (hist[i]) atomicAdd(&counts[i], hist[i]);
}
__global__ void prefix_kernel(int *off, int *cursor, const int *counts, int local) { /* one warp */
    int sum = 0;
    for (int base = 0; base < local; base += 32) {
        const int i = base + threadIdx.x, v = i < local ? counts[i] : 0;
        int x = v;
        for (int o = 1; o < 32; o *= 2) {
            const int u = __shfl_up_sync(~0u, x, o);
            if ((int)threadIdx.x >= o) x += u;
        }
        if (i < local) cursor[i] = off[i] = sum + x - v;
        sum += __shfl_sync(~0u, x, 31);
    }
    if (threadIdx.x == 0) off[local] = sum;
}
__global__ void place_kernel(int *slot, int *cursor, const int32_t *idx, int64_t n, int first, int local) {
    extern __shared__ int place_sh[];
    int *hist = place_sh, *base = place_sh + local;
    for (int i = threadIdx.x; i < local; i += blockDim.x) hist[i] = 0;
    __syncthreads();
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    int e = -1, at = 0;
    if (i < n) {
        e = idx[i] - first;
        if (e >= 0 && e < local)
            at = atomicAdd(&hist[e], 1);
        else
            e = -1;
    }
    __syncthreads();
    for (int j = threadIdx.x; j < local; j += blockDim.x)
        if (hist[j]) base[j] = atomicAdd(&cursor[j], hist[j]);
    __syncthreads();
    if (i < n) slot[i] = e < 0 ? -1 : base[e] + at;
}
/* xa[slot] = x[t]: a token's row is read once and written to each of its local slots. */
template <class T> __global__ void spread_kernel(T *xa, const T *x, const int *slot, int64_t H, int top_k) {
    const int64_t t = blockIdx.x;
    for (int64_t i = threadIdx.x * 8; i < H; i += blockDim.x * 8) {
        float v[8];
        load8(x + t * H + i, v);
        for (int j = 0; j < top_k; j++) {
            const int s = slot[t * top_k + j];
            if (s >= 0) store8(xa + (int64_t)s * H + i, v);
        }
    }
}
template <class T> __global__ void spread_kernel_odd(T *xa, const T *x, const int *slot, int64_t H, int top_k) {
    const int64_t t = blockIdx.x;
    for (int j = 0; j < top_k; j++) {
        const int s = slot[t * top_k + j];
        if (s < 0) continue;
        for (int64_t i = threadIdx.x; i < H; i += blockDim.x) xa[(int64_t)s * H + i] = x[t * H + i];
    }
}

/* ---------------------------------------------------------------- activation and sum */

__device__ __forceinline__ int expert_of(const int *off, int local, int row) { /* largest e with off[e] <= row */
    int lo = 0, hi = local;
    while (hi - lo > 1) {
        const int mid = (lo + hi) / 2;
        if (off[mid] <= row)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}
struct GluArgs {
    const void *gate, *up; /* fused: gate holds 2I columns, up NULL */
    const float *gate_bias, *up_bias;
    const int *off;
    int64_t I;
    int local, interleaved, kind;
    float limit;
};
template <class T> __device__ __forceinline__ float moe_act(float g, float u, int kind, float limit) {
    if (kind == SL_GLU_SILU) return rnd<T>(g / (1.f + expf(-g))) * u;
    if (kind == SL_GLU_GELU)
        return rnd<T>(0.5f * g * (1.f + tanhf(0.7978845608028654f * (g + 0.044715f * g * g * g)))) * u;
    g = fminf(g, limit), u = fminf(fmaxf(u, -limit), limit);
    return (u + 1.f) * (g / (1.f + expf(-1.702f * g)));
}
template <class T> __global__ void moe_glu_kernel(T *out, const GluArgs a) {
    const int rows = a.off[a.local];
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        const int e = a.gate_bias ? expert_of(a.off, a.local, row) : 0;
        const int64_t ld = a.up ? a.I : 2 * a.I;
        const T *g = (const T *)a.gate + row * ld, *u = a.up ? (const T *)a.up + row * ld : nullptr;
        for (int64_t i = threadIdx.x; i < a.I; i += blockDim.x) {
            const int64_t gi = !a.up && a.interleaved ? 2 * i : i, ui = a.up ? i : a.interleaved ? 2 * i + 1 : a.I + i;
            float gv = to_f<T>(g[gi]), uv = to_f<T>(u ? u[ui] : g[ui]);
            if (a.gate_bias) {
                gv = rnd<T>(gv + (a.up ? a.gate_bias[e * a.I + i] : a.gate_bias[e * 2 * a.I + gi]));
                uv = rnd<T>(uv + (a.up ? (a.up_bias ? a.up_bias[e * a.I + i] : 0.f) : a.gate_bias[e * 2 * a.I + ui]));
            }
            out[row * a.I + i] = from_f<T>(moe_act<T>(gv, uv, a.kind, a.limit));
        }
    }
}

struct SumArgs {
    const int *slot;
    const int32_t *idx;
    const float *w, *bias; /* bias [local, H] or NULL */
    int64_t H;
    int top_k, first, in_bf16; /* in_bf16: each weighted output rounded, summed in bf16 in ascending expert order */
};
template <class T, int VEC> __global__ void combine_kernel(T *out, const T *y, const SumArgs a) {
    __shared__ int slots[MAX_TOPK], experts[MAX_TOPK];
    __shared__ float ws[MAX_TOPK];
    const int64_t t = blockIdx.x;
    if (threadIdx.x == 0) { /* insertion sort by expert: the reference adds in that order */
        int n = 0;
        for (int j = 0; j < a.top_k; j++) {
            const int s = a.slot[t * a.top_k + j], e = a.idx[t * a.top_k + j];
            if (s < 0) continue;
            int i = n++;
            for (; i > 0 && experts[i - 1] > e; i--)
                slots[i] = slots[i - 1], experts[i] = experts[i - 1], ws[i] = ws[i - 1];
            slots[i] = s, experts[i] = e, ws[i] = a.w[t * a.top_k + j];
        }
        for (; n < a.top_k; n++) slots[n] = -1;
    }
    __syncthreads();
    for (int64_t i = threadIdx.x * VEC; i < a.H; i += blockDim.x * VEC) {
        float acc[VEC] = {};
        for (int j = 0; j < a.top_k && slots[j] >= 0; j++) {
            const T *row = y + (int64_t)slots[j] * a.H + i;
            float v[8];
            if constexpr (VEC == 8)
                load8(row, v);
            else
                v[0] = to_f<T>(*row);
#pragma unroll
            for (int q = 0; q < VEC; q++) {
                if (a.bias) v[q] = rnd<T>(v[q] + a.bias[(int64_t)(experts[j] - a.first) * a.H + i + q]);
                if (a.in_bf16)
                    acc[q] = rnd<T>(acc[q] + rnd<T>(v[q] * ws[j]));
                else
                    acc[q] = fmaf(ws[j], v[q], acc[q]);
            }
        }
        if constexpr (VEC == 8)
            store8(out + t * a.H + i, acc);
        else
            out[t * a.H + i] = from_f<T>(acc[0]);
    }
}

/* ---------------------------------------------------------------- the whole block */

struct Plan { /* pieces of the workspace, all offsets 256-byte aligned */
    uint64_t counts, off, cursor, slot, xa, h, h2, y, total;
};
static uint64_t take(uint64_t *at, uint64_t bytes) {
    const uint64_t r = *at;
    *at += (bytes + 255) & ~255ull;
    return r;
}
/* xa is dead once gate and up are done, so the down product's output takes its place. */
static Plan plan(const SlCuda *c, int64_t T, int64_t H, const sl_moe *m) {
    const uint64_t elem = c->act == SL_F32 ? 4 : 2, rows = (uint64_t)T * std::min(m->top_k, m->local),
                   fused = m->up.data ? 1 : 2;
    const uint64_t I = m->down.k;
    Plan p = {};
    uint64_t at = 0;
    p.counts = take(&at, (uint64_t)m->local * 4);
    p.off = take(&at, (uint64_t)(m->local + 1) * 4);
    p.cursor = take(&at, (uint64_t)m->local * 4);
    p.slot = take(&at, (uint64_t)T * m->top_k * 4);
    p.xa = p.y = take(&at, rows * H * elem);
    p.h = take(&at, rows * I * elem * fused);
    p.h2 = take(&at, rows * I * elem);
    p.total = at;
    return p;
}
uint64_t sl_cuda_moe_bytes(SlCuda *c, int64_t T, int64_t H, const sl_moe *m) {
    return std::max(plan(c, T, H, m).total, route_bytes(c, T, H, m->experts)); /* or the router's logits */
}

/* C[rows of e] = A[rows of e] * W_e^T; `host` has the offsets when the grouped kernel cannot serve. */
static int experts(SlCuda *c, const void *a, const sl_mat *w, void *out, const int *off, const std::vector<int> &host,
                   int64_t rows, sl_err *err) {
    if (host.empty()) {
        const SlGrouped g = {w, nullptr, off, a, out, rows};
        return sl_cuda_grouped(c, &g, err);
    }
    const int64_t elem = c->act == SL_F32 ? 4 : 2;
    for (int e = 0; e < (int)w->count; e++) {
        const int n = host[e + 1] - host[e];
        if (!n) continue;
        sl_mat one = *w;
        one.count = 1, one.data = (const char *)w->data + e * w->stride;
        const int rc = sl_cuda_linear(c, (char *)out + host[e] * w->n * elem, w->n,
                                      (const char *)a + host[e] * w->k * elem, w->k, n, &one, nullptr, err);
        if (rc) return rc;
    }
    return 0;
}

template <class T>
static int moe_as(SlCuda *c, void *out, const void *x, int64_t T_, int64_t H, const int32_t *idx, const float *w,
                  const sl_moe *m, sl_err *err) {
    const Plan p = plan(c, T_, H, m);
    if (p.total > c->ws_bytes)
        return sl_err_set(err, SL_EINTERNAL, "experts need %llu bytes of workspace for %lld tokens, %llu are set",
                          (unsigned long long)p.total, (long long)T_, (unsigned long long)c->ws_bytes);
    char *ws = c->ws;
    int *counts = (int *)(ws + p.counts), *off = (int *)(ws + p.off), *cursor = (int *)(ws + p.cursor),
        *slot = (int *)(ws + p.slot);
    T *xa = (T *)(ws + p.xa), *h = (T *)(ws + p.h), *h2 = (T *)(ws + p.h2), *y = (T *)(ws + p.y);
    const int64_t pairs = T_ * m->top_k, rows = T_ * std::min(m->top_k, m->local);
    const int64_t I = m->down.k;
    SL_CU(cudaMemsetAsync(counts, 0, (size_t)m->local * 4, c->stream));
    const size_t sh = (size_t)m->local * 4;
    count_kernel<<<(unsigned)std::min<int64_t>((pairs + 255) / 256, c->sms * 4), 256, sh, c->stream>>>(
        counts, idx, pairs, m->first, m->local);
    prefix_kernel<<<1, 32, 0, c->stream>>>(off, cursor, counts, m->local);
    place_kernel<<<(unsigned)((pairs + 1023) / 1024), 1024, 2 * sh, c->stream>>>(slot, cursor, idx, pairs, m->first,
                                                                                 m->local);
    const bool vec = H % 8 == 0 && aligned16(x) && aligned16(out);
    if (vec)
        spread_kernel<T><<<(unsigned)T_, 128, 0, c->stream>>>(xa, (const T *)x, slot, H, m->top_k);
    else
        spread_kernel_odd<T><<<(unsigned)T_, 128, 0, c->stream>>>(xa, (const T *)x, slot, H, m->top_k);
    SL_LAUNCHED("moe permutation");

    const bool fused_mat = !m->up.data;
    const bool grouped = sl_cuda_grouped_ok(c, &m->gate, nullptr) &&
                         (fused_mat || sl_cuda_grouped_ok(c, &m->up, nullptr)) &&
                         sl_cuda_grouped_ok(c, &m->down, nullptr);
    std::vector<int> host;
    if (!grouped) {
        host.resize(m->local + 1);
        SL_CU(cudaMemcpyAsync(host.data(), off, host.size() * 4, cudaMemcpyDeviceToHost, c->stream));
        SL_CU(cudaStreamSynchronize(c->stream));
    }
    int rc;
    if (grouped && !fused_mat && m->glu == SL_GLU_SILU && !m->gate_bias.data &&
        sl_cuda_grouped_ok(c, &m->gate, &m->up)) {
        const SlGrouped g = {&m->gate, &m->up, off, xa, h2, rows};
        if ((rc = sl_cuda_grouped(c, &g, err))) return rc;
    } else {
        if ((rc = experts(c, xa, &m->gate, h, off, host, rows, err))) return rc;
        if (!fused_mat && (rc = experts(c, xa, &m->up, h2, off, host, rows, err))) return rc;
        const GluArgs a = {h,
                           fused_mat ? nullptr : h2,
                           m->gate_bias.data,
                           m->up_bias.data,
                           off,
                           I,
                           m->local,
                           m->gate_up_interleaved,
                           m->glu,
                           m->limit};
        moe_glu_kernel<T><<<(unsigned)std::min<int64_t>(rows, c->sms * 16), 256, 0, c->stream>>>(
            h2, a); /* in place over up: same index */
        SL_LAUNCHED("moe activation");
    }
    if ((rc = experts(c, h2, &m->down, y, off, host, rows, err))) return rc;
    const bool sliced = m->local == m->experts && !m->bias_scale_rank0 && m->down_bias.data;
    const SumArgs s = {slot, idx,      w,        sliced ? nullptr : m->down_bias.data,
                       H,    m->top_k, m->first, m->bf16_accumulate && c->act == SL_BF16};
    if (vec)
        combine_kernel<T, 8><<<(unsigned)T_, 256, 0, c->stream>>>((T *)out, y, s);
    else
        combine_kernel<T, 1><<<(unsigned)T_, 128, 0, c->stream>>>((T *)out, y, s);
    SL_LAUNCHED("moe combine");
    return 0;
}
int sl_cuda_moe(SlCuda *c, void *out, const void *x, int64_t T, int64_t H, const int32_t *idx, const float *w,
                const sl_moe *m, sl_err *err) {
    if (m->local < 1 || m->down.n != H || m->top_k > MAX_TOPK)
        return sl_err_set(err, SL_EINTERNAL, "experts: %d held here, down gives %lld of %lld columns, top %d", m->local,
                          (long long)m->down.n, (long long)H, m->top_k);
    return c->act == SL_F32 ? moe_as<float>(c, out, x, T, H, idx, w, m, err)
                            : moe_as<bf16>(c, out, x, T, H, idx, w, m, err);
}
