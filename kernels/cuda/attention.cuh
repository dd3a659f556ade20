/* attention.cuh: what the attention kernels share: arguments, work list, small device helpers.
 *
 * Packed causal self-attention, forward only. Query row i of a sequence sees keys j of the same sequence with j <= i
 * and, when window > 0, j > i - window. Output row = softmax(scale * q.k) . v; with sinks, exp(sink[head]) is one more
 * term of the denominator (and of nothing else). */
#pragma once
#include <algorithm>
#include <vector>
#include "kernels/cuda/context.h"

// One block of query rows: rows [m0, m0 + BM) of the sequence at tokens [start, start + len).
struct AttnTile {
    int start, len, m0, pad;
};

struct AttnArgs {
    // All pointers and all strides in bytes must be multiples of 16 (TMA, 16-byte loads and stores).
    const bf16 *q, *k, *v;                          // [T, H, D]; the last stride is 1
    bf16 *o;                                        // [T, Hq, Dv]
    int64_t q_t, q_h, k_t, k_h, v_t, v_h, o_t, o_h; // token and head strides, in elements
    int tokens, heads_q, heads_kv;
    float scale;           // must be > 0
    int window;            // 0: no window
    const float *sinks;    // [heads_q] or null
    const AttnTile *tiles; // device copy of make_tiles()
    int n_tiles;
    int head_group; // pick_head_group()
    int *counter;   // one zeroed int, left zeroed; not shared by concurrent launches (wgmma kernel only)
};

// Work list of one packed batch.  The same list serves every layer, so building it on the host
// costs nothing per layer.  Longest tiles first: the blocks are handed out in this order, and the
// short ones at the end fill the gaps (a causal grid in natural order ends with its longest tiles).
inline std::vector<AttnTile> make_tiles(const std::vector<int> &cu, int bm, int window) {
    std::vector<std::pair<int, AttnTile>> t;
    for (size_t s = 0; s + 1 < cu.size(); s++) {
        int len = cu[s + 1] - cu[s];
        for (int m0 = 0; m0 < len; m0 += bm) {
            int hi = std::min(len, m0 + bm), lo = window > 0 ? std::max(0, m0 - window + 1) : 0;
            t.push_back({hi - lo, AttnTile{cu[s], len, m0, 0}});
        }
    }
    std::stable_sort(t.begin(), t.end(), [](const auto &a, const auto &b) { return a.first > b.first; });
    std::vector<AttnTile> r;
    for (auto &x : t) r.push_back(x.second);
    return r;
}

// Query heads worked on together.  All tiles of one group run before the next group starts, so that
// the group's keys and values stay in L2: a tile of 128 rows does only 128 FLOP per byte of K/V it
// reads, 5 TB/s at 600 TFLOP/s, more than device memory delivers.  Groups of equal size (a divisor of
// the key heads): a small last group costs more than a slightly smaller common size.
inline int pick_head_group(int tokens, int heads_q, int heads_kv, int dqk, int dv, size_t budget = 30u << 20) {
    size_t per_head = std::max<size_t>(1, size_t(tokens) * (dqk + dv) * 2);
    int kv = 1;
    for (int d = 1; d <= heads_kv; d++)
        if (heads_kv % d == 0 && d * per_head <= budget) kv = d;
    return kv * (heads_q / heads_kv);
}

struct Work {
    AttnTile t;
    int head;
};
// Work item -> (tile, head): head groups outermost, tiles next, heads of the group innermost, so
// that the query heads that share a key head run side by side.
__device__ __forceinline__ Work work_item(const AttnArgs &a, int idx) {
    int per = a.n_tiles * a.head_group;
    int g = idx / per, r = idx - g * per;
    int first = g * a.head_group, hg = min(a.head_group, a.heads_q - first);
    int ti = r / hg;
    Work w;
    int4 raw = __ldg(reinterpret_cast<const int4 *>(a.tiles) + ti);
    w.t = AttnTile{raw.x, raw.y, raw.z, raw.w};
    w.head = first + (r - ti * hg);
    return w;
}

__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ uint32_t pack_bf16(float lo, float hi) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
__device__ __forceinline__ uint32_t smem_u32(const void *p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// An accumulator row lives in the 4 lanes of a quad, 2 columns of every 8 per lane.  Transposing
// 4 x 4 words inside the quad leaves each lane 8 neighbouring columns: one 16-byte store per lane
// instead of four 4-byte stores that fill only half of each 32-byte sector.
__device__ __forceinline__ uint4 quad_transpose(uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3, int t) {
    bool odd = t & 1, hi = t & 2;
    uint32_t x = __shfl_xor_sync(~0u, odd ? w0 : w1, 1), y = __shfl_xor_sync(~0u, odd ? w2 : w3, 1);
    if (odd) {
        w0 = x;
        w2 = y;
    } else {
        w1 = x;
        w3 = y;
    }
    x = __shfl_xor_sync(~0u, hi ? w0 : w2, 2), y = __shfl_xor_sync(~0u, hi ? w1 : w3, 2);
    if (hi) {
        w0 = x;
        w1 = y;
    } else {
        w2 = x;
        w3 = y;
    }
    return make_uint4(w0, w1, w2, w3);
}

// 1 / softmax denominator of a row: l is the quad's partial sum, m the row maximum of the raw
// scores, c = scale * log2(e).  A sink far above the maximum overflows to inf, and 1/inf = 0 is
// then the right answer.
__device__ __forceinline__ float row_inverse(float l, float m, float c, const float *sinks, int head) {
    l = quad_sum(l);
    if (sinks) l += ex2(fmaf(__ldg(sinks + head), 1.4426950408889634f, -m * c));
    return 1.f / l;
}

/* Launchers. *_rows gives the query rows a block takes, with which the work list must be built (0: head dims not
 * supported). */
int sl_attention_mma_rows(int dqk, int dv);
int sl_attention_mma(const AttnArgs &a, int dqk, int dv, cudaStream_t s, sl_err *err);
int sl_attention_wgmma_rows(int dqk, int dv);
int sl_attention_wgmma(const AttnArgs &a, int dqk, int dv, int sms, cudaStream_t s, sl_err *err);
/* Any head dims up to 256, float or bf16: one warp a query row. The sharp reference path and the odd shapes. */
template <class T>
int sl_attention_plain(const sl_attn *a, void *o, const void *q, const void *k, const void *v, const AttnTile *seqs,
                       int S, int max_len, cudaStream_t s, sl_err *err);
