// grouped_gemm: persistent grouped bf16 GEMM for Hopper (sm_90a): TMA + mbarrier + wgmma, for MoE prefill.
//   A [M, K] row-major, rows of expert e are off[e] .. off[e+1]-1 (any counts, no padding)
//   B [E, N, K] row-major (weights [out, in]);  C [M, N] bf16, fp32 accumulation.  Dense is E = 1.  K % 8 == 0, N % 16
//   == 0.
// With SWIGLU, B rows hold gate and up and C is [M, N/2] = silu(A gate^T) * (A up^T).
//
// The tile is computed transposed: weights are wgmma's M side (128 rows, 64 a consumer warpgroup), tokens its N side. N
// may be any multiple of 8, so a tile takes 16..256 tokens in steps of 16 and an expert pads to 16 rows, not to 64 or
// 128; its rows are spread evenly over ceil(rows/256) tiles, because a narrow left-over tile would be short of operand
// bandwidth. stmatrix.trans turns the result back, for free. (The untransposed 128x256 version spent 2 to 9% of its
// tensor work on padding rows.)
//
// One CTA per SM: a producer warp (TMA), a scheduler warp, two consumer warpgroups of 128 accumulators a thread. A
// 64-deep k step of a full tile costs 1024 tensor cycles and needs 48 KiB from L2; so CTAs pair up in clusters that
// take neighbouring weight tiles of the same tokens, and each loads half of the tokens into both (TMA multicast): 32
// KiB a step and SM. Pairing along weights never leaves a CTA without partner, whatever the routing (if N % 256 == 0).
#include "kernels/cuda/context.h"
#include "kernels/cuda/tma.h"
#include "kernels/cuda/wgmma_operands.h"

constexpr int BW = 128, BT = 256, BK = 64, THREADS = 384, MAX_E = 512, MAX_STAGES = 5; // BW weights x up to BT tokens
constexpr int SLOT_READERS = 8 * 32 + 1; // a CTA's consumer warps, lane by lane, and its producer
constexpr int BOX = 32, BOX_BYTES = BOX * BK * 2, T_BYTES = BT * BK * 2, PANEL = 64 * 64 * 2;
struct Tile {
    int e, row0, valid, w;
};             // tokens row0 .. row0+valid-1 of expert e (computed up to the next multiple of 16), weight tile pair w
struct Tail {  // after the operand stages and the C panels, both of which need 1024-byte alignment for the 128B swizzle
    Tile slot; // the tile this CTA does next; e < 0: none left
    uint64_t full[MAX_STAGES], empty[MAX_STAGES], slot_full, slot_empty;
    int prefix[MAX_E + 1]; // first tile pair of each expert
};
template <class W> constexpr int smem_bytes() {
    constexpr int n = W::STAGES * (T_BYTES + W::BYTES) + 4 * PANEL + sizeof(Tail);
    static_assert(W::STAGES <= MAX_STAGES && n <= 232448, "shared memory");
    return n;
}

struct Params {
    const int *off; // [E+1] on the device: the host never needs the routing
    bf16 *C;
    int *counter;                   // [2], zero before the first launch; the kernel leaves them zero
    int E, w_tiles, k_tiles, n_out; // w_tiles: clusters' worth of weight rows per expert; n_out: columns of C
    int group;                      // token tiles swept together per weight tile: bounds the L2 working set
    int dynamic;                    // 0: static round robin, for comparison
};

// ---- PTX, one instruction each
// ----------------------------------------------------------------------------------------------
__device__ __forceinline__ uint32_t s32(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ uint32_t cta_rank() {
    uint32_t r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
__device__ __forceinline__ uint32_t mapa(uint32_t a, uint32_t cta) {
    uint32_t r;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(cta));
    return r;
}
__device__ __forceinline__ void mbar_init(uint64_t *b, int n) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(s32(b)), "r"(n));
}
__device__ __forceinline__ void mbar_expect(uint64_t *b, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(s32(b)), "r"(bytes) : "memory");
}
// Default semantics on purpose. `.release.cluster` compiles to a device-wide memory barrier in front of every arrival
// (seen in the SASS: MEMBAR.ALL.GPU), which in the main loop cost 15 to 30% of the speed; what a freed stage must
// order, the reads of wgmma, is complete after wgmma.wait_group.
template <int CL> __device__ __forceinline__ void mbar_arrive_at(uint64_t *b, uint32_t cta) {
    if constexpr (CL == 1)
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(s32(b)) : "memory");
    else
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapa(s32(b), cta)) : "memory");
}
// The same for a reader whose arrival must follow its load of the slot. Default semantics order that only towards the
// own CTA; towards the other one the address depends on a loaded value (`valid`, never negative, so nothing is added):
// the arrival cannot be issued before the load is done.
template <int CL> __device__ __forceinline__ void mbar_arrive_after(uint64_t *b, uint32_t cta, const Tile &got) {
    if constexpr (CL == 1)
        mbar_arrive_at<1>(b, cta);
    else
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapa(s32(b), cta) + (got.valid >> 31))
                     : "memory");
}
// Writes a tile into a CTA's slot and says so.
template <int CL> __device__ __forceinline__ void publish_tile(Tail &t, uint32_t cta, const Tile &u) {
    if constexpr (CL == 1)
        asm volatile("st.shared::cta.v4.s32 [%0], {%2, %3, %4, %5};\n"
                     "mbarrier.arrive.release.cta.shared::cta.b64 _, [%1];" ::"r"(s32(&t.slot)),
                     "r"(s32(&t.slot_full)), "r"(u.e), "r"(u.row0), "r"(u.valid), "r"(u.w)
                     : "memory");
    else
        asm volatile("st.shared::cluster.v4.s32 [%0], {%2, %3, %4, %5};\n"
                     "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%1];" ::"r"(mapa(s32(&t.slot), cta)),
                     "r"(mapa(s32(&t.slot_full), cta)), "r"(u.e), "r"(u.row0), "r"(u.valid), "r"(u.w)
                     : "memory");
}
__device__ __forceinline__ void mbar_wait(uint64_t *b, int parity) {
    asm volatile(
        "{\n.reg .pred p;\nW:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra W;\nD:\n}" ::"r"(
            s32(b)),
        "r"(parity)
        : "memory");
}
__device__ __forceinline__ void mbar_wait_cluster(uint64_t *b,
                                                  int parity) { // for data a peer CTA wrote with ordinary stores
    asm volatile("{\n.reg .pred p;\nW:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n@p bra "
                 "D;\nbra W;\nD:\n}" ::"r"(s32(b)),
                 "r"(parity)
                 : "memory");
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void bar_wg(int id) {
    asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}
__device__ __forceinline__ void tma_load_t(uint32_t dst, const CUtensorMap *m, uint64_t *bar, int k, int row,
                                           int mask) {
    if (mask)
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                     "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst),
                     "l"(m), "r"(s32(bar)), "r"(k), "r"(row), "h"((short)mask)
                     : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
                "r"(dst),
            "l"(m), "r"(s32(bar)), "r"(k), "r"(row)
            : "memory");
}
// Weights come through a 5-d view (k, 8 rows, 2 halves, 16-row block, expert): a plain matrix, gate and up interleaved
// by 8 rows, and gate above up are then the same code with other strides, and a tile always alternates 8 rows of each
// half.
__device__ __forceinline__ void tma_load_w(uint32_t dst, const CUtensorMap *m, uint64_t *bar, int k, int block, int e) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %4, "
                 "%5, %6}], [%2];" ::"r"(dst),
                 "l"(m), "r"(s32(bar)), "r"(k), "r"(0), "r"(block), "r"(e)
                 : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap *m, uint32_t src, int col, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(m), "r"(src),
                 "r"(col), "r"(row)
                 : "memory");
}
__device__ __forceinline__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int N> __device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void stmatrix4(uint32_t a, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
__device__ __forceinline__ uint32_t pack(float lo, float hi) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
// silu(gate) * up of two neighbours, rounded to bf16 where separate operations would: gate, up, silu, product.
__device__ __forceinline__ uint32_t swiglu(uint32_t gate, uint32_t up) {
    auto lo = [](uint32_t x) { return __uint_as_float(x << 16); };
    auto hi = [](uint32_t x) { return __uint_as_float(x & 0xffff0000u); };
    auto silu = [](float g) { return __fdividef(g, 1.f + __expf(-g)); };
    const uint32_t s = pack(silu(lo(gate)), silu(hi(gate)));
    return pack(lo(s) * lo(up), hi(s) * hi(up));
}
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Shared-memory operand descriptor, K-major, 128B swizzle: address/16, 1024 bytes between 8-row groups, layout code 1
// at bit 62.
__device__ __forceinline__ uint64_t desc(uint32_t a) {
    return (uint64_t)((a & 0x3FFFF) >> 4) | (uint64_t)1 << 16 | (uint64_t)64 << 32 | (uint64_t)1 << 62;
}
// m64nNk16 with N = 16 U.
#define WGMMA(u, n, a_, b_, c_)                                                                                        \
    if constexpr (U == u)                                                                                              \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #c_ ", 0;\n"                                                 \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" L##u "}, %" #a_ ", %" #b_            \
                                                                                       ", p, 1, 1, 0, 0;\n}"           \
                     : O##u                                                                                            \
                     : "l"(a), "l"(b), "r"(accumulate));
template <int U>
__device__ __forceinline__ void wgmma(float (&d)[128], uint64_t a, uint64_t b, int accumulate){
    WGMMA(1, 16, 8, 9, 10) WGMMA(2, 32, 16, 17, 18) WGMMA(3, 48, 24, 25, 26) WGMMA(4, 64, 32, 33, 34)
        WGMMA(5, 80, 40, 41, 42) WGMMA(6, 96, 48, 49, 50) WGMMA(7, 112, 56, 57, 58) WGMMA(8, 128, 64, 65, 66)
            WGMMA(9, 144, 72, 73, 74) WGMMA(10, 160, 80, 81, 82) WGMMA(11, 176, 88, 89, 90) WGMMA(12, 192, 96, 97, 98)
                WGMMA(13, 208, 104, 105, 106) WGMMA(14, 224, 112, 113, 114) WGMMA(15, 240, 120, 121, 122)
                    WGMMA(16, 256, 128, 129, 130)}

// ---- which tile is it
// ------------------------------------------------------------------------------------------------------- Rows are
// dealt out in units of 16, evenly, over the fewest tiles of at most 16 units. Token tiles are swept in even groups of
// at most p.group with the weight tile in the outer loop: clusters that run together then form a near-square block, and
// an expert of a few hundred rows streams its weights exactly once (at 341 rows an expert that alone is half of the
// DRAM bandwidth).
__device__ __forceinline__ int token_tiles(int rows) {
    return (rows + BT - 1) / BT;
}
__device__ __forceinline__ Tile decode(const Params &p, const int *prefix, int idx, int &e) {
    while (idx >= prefix[e + 1]) e++; // idx only grows, so the search is a walk
    int first = p.off[e], rows = p.off[e + 1] - first, local = idx - prefix[e], T = token_tiles(rows),
        units = (rows + 15) / 16;
    int groups = (T + p.group - 1) / p.group, size = (T + groups - 1) / groups;
    int g = local / (size * p.w_tiles), rem = local - g * size * p.w_tiles, in = min(size, T - g * size);
    int t = g * size + rem % in, start = t * (units / T) + min(t, units % T), n = units / T + (t < units % T);
    return {e, first + start * 16, min(n * 16, rows - start * 16), rem / in};
}

// How weights reach the tensor cores; a stage is a tile of tokens followed by W::BYTES of weights.
struct Bf16Weights {
    static constexpr int STAGES = 4, BYTES = BW * BK * 2;
    static __device__ __forceinline__ void load(uint32_t dst, const CUtensorMap *w, const CUtensorMap *, uint64_t *bar,
                                                int k, int block, int e) {
        tma_load_w(dst, w, bar, k * BK, block, e);
    }
    // One output tile's products. The stage index and phase live in the caller: they run on through tiles.
    template <int U, class Release>
    static __device__ __forceinline__ void mainloop(float (&d)[128], uint8_t *smem, Tail &t, int wg, int k_tiles,
                                                    int &s, int &ph, const Release &release) {
        int prev = 0;
        for (int k = 0; k < k_tiles; k++) {
            mbar_wait(&t.full[s], ph);
            uint32_t a = s32(smem + s * (T_BYTES + BYTES));
            uint64_t dw = desc(a + T_BYTES + wg * (BYTES / 2)), dt = desc(a);
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < 4; j++)
                wgmma<U>(d, dw + 2 * j, dt + 2 * j, k | j); // 16 k = 32 bytes = 2 descriptor units
            wgmma_commit();
            wgmma_wait<1>(); // one group stays in flight; the one before it is done, so its stage can go
            if (k) release(prev);
            prev = s;
            if (++s == STAGES) s = 0, ph ^= 1;
        }
        wgmma_wait<0>();
        release(prev);
    }
};

// INT4 weights straight to the tensor cores, without a bf16 copy. In the transposed tile weights are wgmma's A operand,
// and A may come from registers: TMA brings nibbles and scales (6 KiB a k step instead of 16), each consumer thread
// expands exactly the fragment it feeds. Rounding is that of dequantize-then-multiply (one bf16 rounding of (nibble -
// 8) * scale): the same bits. Needs K % 256 == 0 (scale rows are whole 16-byte units).
#define WGMMA_RS(u, n, a0_, a1_, a2_, a3_, b_, c_)                                                                     \
    if constexpr (U == u)                                                                                              \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #c_ ", 0;\n"                                                 \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" L##u                                 \
                     "}, {%" #a0_ ", %" #a1_ ", %" #a2_ ", %" #a3_ "}, %" #b_ ", p, 1, 1, 0;\n}"                       \
                     : O##u                                                                                            \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
template <int U>
__device__ __forceinline__ void wgmma_rs(float (&d)[128], const uint32_t *a, uint64_t b, int accumulate){
    WGMMA_RS(1, 16, 8, 9, 10, 11, 12, 13) WGMMA_RS(2, 32, 16, 17, 18, 19, 20, 21)
        WGMMA_RS(3, 48, 24, 25, 26, 27, 28, 29) WGMMA_RS(4, 64, 32, 33, 34, 35, 36, 37)
            WGMMA_RS(5, 80, 40, 41, 42, 43, 44, 45) WGMMA_RS(6, 96, 48, 49, 50, 51, 52, 53)
                WGMMA_RS(7, 112, 56, 57, 58, 59, 60, 61) WGMMA_RS(8, 128, 64, 65, 66, 67, 68, 69)
                    WGMMA_RS(9, 144, 72, 73, 74, 75, 76, 77) WGMMA_RS(10, 160, 80, 81, 82, 83, 84, 85)
                        WGMMA_RS(11, 176, 88, 89, 90, 91, 92, 93) WGMMA_RS(12, 192, 96, 97, 98, 99, 100, 101)
                            WGMMA_RS(13, 208, 104, 105, 106, 107, 108, 109)
                                WGMMA_RS(14, 224, 112, 113, 114, 115, 116, 117) WGMMA_RS(15, 240, 120, 121, 122, 123,
                                                                                         124, 125)
                                    WGMMA_RS(16, 256, 128, 129, 130, 131, 132, 133)} __device__ __forceinline__ uint4
    lds128(uint32_t a) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
    return v;
}
__device__ __forceinline__ uint32_t lds32(uint32_t a) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a));
    return v;
}
// The two nibbles of byte `shift / 8`, times a scale held in both halves.
__device__ __forceinline__ uint32_t expand(uint32_t w, int shift, uint32_t scale) {
    uint32_t v = w >> shift, x = (v & 0xF) | 0x43004300u;
    x |= (v << 12) & 0xF0000;
    __nv_bfloat162 h = __hmul2(__hsub2(*(__nv_bfloat162 *)&x, __float2bfloat162_rn(136.f)), *(__nv_bfloat162 *)&scale);
    return *(uint32_t *)&h;
}
struct Int4Weights {
    static constexpr int STAGES = 5, Q_BYTES = BW * BK / 2,
                         BYTES = Q_BYTES + BW * 16; // scales: 8 a row (4 k steps' worth: TMA's minimum)
    static __device__ __forceinline__ void load(uint32_t dst, const CUtensorMap *q, const CUtensorMap *scales,
                                                uint64_t *bar, int k, int block, int e) {
        tma_load_w(dst, q, bar, k * (BK / 8), block, e);
        tma_load_w(dst + Q_BYTES, scales, bar, k * 2 & ~7, block, e);
    }
    template <int U, class Release>
    static __device__ __forceinline__ void mainloop(float (&d)[128], uint8_t *smem, Tail &t, int wg, int k_tiles,
                                                    int &s, int &ph, const Release &release) {
        const int lane = threadIdx.x % 32, row = wg * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4, shift = lane % 4 * 8,
                  flip = (row >> 2 & 1) << 4;
        int prev = 0;
        for (int k = 0; k < k_tiles; k++) {
            mbar_wait(&t.full[s], ph);
            uint32_t x = s32(smem + s * (T_BYTES + BYTES)), q = x + T_BYTES + row * 32,
                     sc = x + T_BYTES + Q_BYTES + row * 16 + k % 4 * 4;
            uint4 lo[2] = {lds128(q + flip), lds128(q + (16 ^ flip))},
                  hi[2] = {lds128(q + 256 + flip), lds128(q + 256 + (16 ^ flip))}; // rows r, r + 8
            uint32_t slo = lds32(sc), shi = lds32(sc + 128);
            uint64_t dt = desc(x);
            // One group per 16 k, one in flight while the next fragment is expanded. Heed ptxas here: with all four in
            // one group and a double-buffered fragment, or with two groups in flight, it serializes every wgmma (C7513,
            // C7512) and says so only in -v.
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint4 &l = lo[j / 2], &h = hi[j / 2];
                uint32_t sl = __byte_perm(slo, slo, j / 2 ? 0x3232 : 0x1010),
                         sh = __byte_perm(shi, shi, j / 2 ? 0x3232 : 0x1010); // 32 k share a scale
                uint32_t a[4] = {expand(j & 1 ? l.z : l.x, shift, sl), expand(j & 1 ? h.z : h.x, shift, sh),
                                 expand(j & 1 ? l.w : l.y, shift, sl), expand(j & 1 ? h.w : h.y, shift, sh)};
                asm volatile(""
                             : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory"); // expanded before the fence
                wgmma_fence();
                wgmma_rs<U>(d, a, dt + 2 * j, k | j);
                wgmma_commit();
                wgmma_wait<1>();
            }
            if (k) release(prev);
            prev = s;
            if (++s == STAGES) s = 0, ph ^= 1;
        }
        wgmma_wait<0>();
        release(prev);
    }
};

template <int CL, bool SWIGLU, class W>
__global__ void __launch_bounds__(THREADS, 1)
    grouped_product(const __grid_constant__ CUtensorMap mapT, const __grid_constant__ CUtensorMap mapW,
                    const __grid_constant__ CUtensorMap mapS, const __grid_constant__ CUtensorMap mapC,
                    const Params p) {
    extern __shared__ __align__(1024) uint8_t smem[];
    constexpr int STAGES = W::STAGES, STAGE_BYTES = T_BYTES + W::BYTES;
    uint8_t *panels = smem + STAGES * STAGE_BYTES;
    Tail &t = *(Tail *)(panels + 4 * PANEL);
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, rank = CL == 1 ? 0 : cta_rank();
    const int clusters = gridDim.x / CL, cluster = blockIdx.x / CL;

    if (tid == 0) {
        if (s32(smem) & 1023) __trap();
        for (int i = 0; i < STAGES; i++) mbar_init(&t.full[i], 1), mbar_init(&t.empty[i], 8 * CL);
        mbar_init(&t.slot_full, 1), mbar_init(&t.slot_empty, SLOT_READERS * CL);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    for (int e = tid; e < p.E; e += THREADS) t.prefix[e + 1] = token_tiles(p.off[e + 1] - p.off[e]) * p.w_tiles;
    __syncthreads();
    if (warp == 0) {
        int sum = 0;
        for (int base = 0; base < p.E; base += 32) {
            int v = base + lane < p.E ? t.prefix[base + lane + 1] : 0;
            for (int o = 1; o < 32; o *= 2) {
                int u = __shfl_up_sync(~0u, v, o);
                if (lane >= o) v += u;
            }
            if (base + lane < p.E) t.prefix[base + lane + 1] = sum + v;
            sum += __shfl_sync(~0u, v, 31);
        }
        if (lane == 0) t.prefix[0] = 0;
    }
    __syncthreads();            // the prefix sums
    if (CL > 1) cluster_sync(); // and the peer's barriers, before anyone arrives at them
    const int total = t.prefix[p.E];
    auto next_tile = [&](int it) {
        if constexpr (CL == 1)
            mbar_wait(&t.slot_full, it & 1);
        else
            mbar_wait_cluster(&t.slot_full, it & 1);
        Tile u;
        asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(u.e), "=r"(u.row0), "=r"(u.valid), "=r"(u.w)
                     : "r"(s32(&t.slot))
                     : "memory");
        return u;
    };

    if (warp < 4) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == 0 && lane == 0) {
            // Producer. A pair's stage is free only when both CTAs' consumers have left it, because either CTA writes
            // into both.
            int s = 0, ph = 1;
            for (int it = 0;; it++) {
                Tile u = next_tile(it);
                mbar_arrive_after<CL>(&t.slot_empty, 0, u);
                if (u.e < 0) break;
                const int boxes = (u.valid + BOX - 1) / BOX, block = (u.w * CL + rank) * (BW / 16);
                for (int k = 0; k < p.k_tiles; k++) {
                    mbar_wait(&t.empty[s], ph);
                    mbar_expect(&t.full[s], W::BYTES + boxes * BOX_BYTES);
                    uint32_t x = s32(smem + s * STAGE_BYTES);
                    W::load(x + T_BYTES, &mapW, &mapS, &t.full[s], k, block, u.e);
                    for (int i = rank; i < boxes; i += CL)
                        tma_load_t(x + i * BOX_BYTES, &mapT, &t.full[s], k * BK, u.row0 + i * BOX, CL == 1 ? 0 : 3);
                    if (++s == STAGES) s = 0, ph ^= 1;
                }
            }
        } else if (warp == 1 && lane == 0 && rank == 0) {
            // Scheduler: draws a pair of tiles, decodes it off everyone's critical path, writes it into both CTAs. One
            // slot, so the next pair is drawn when all consumers have begun the current one: late enough for balance,
            // early enough never to be waited for.
            for (int it = 0, idx = cluster, e = 0;; it++) {
                mbar_wait(&t.slot_empty, (it & 1) ^ 1);
                if (it) idx = p.dynamic ? clusters + atomicAdd(p.counter, 1) : idx + clusters;
                Tile u = {-1, 0, 0, 0};
                if (idx < total) u = decode(p, t.prefix, idx, e);
                for (int c = 0; c < CL; c++) publish_tile<CL>(t, c, u);
                if (idx >= total) break;
            }
            // The last cluster to run dry resets the counters: no memset between launches.
            __threadfence();
            if (atomicAdd(p.counter + 1, 1) == clusters - 1) p.counter[0] = 0, p.counter[1] = 0;
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int wg = warp / 4 - 1, wt = tid % 128;
        const uint32_t mine = s32(panels) + wg * 2 * PANEL;
        // stmatrix.trans: lane l gives the address of one token's 8 weights. Plain: matrices are (8 tokens, chunk 0),
        // (same, chunk 1), (next 8 tokens, chunk 0), (.., chunk 1) of the warp's 16 weights. SwiGLU: four times 8
        // tokens, one chunk of 8 outputs.
        const int stok = SWIGLU ? lane : lane / 16 * 8 + lane % 8,
                  schunk = SWIGLU ? warp % 4 : warp % 4 * 2 + lane / 8 % 2;
        const int ROW = SWIGLU ? 64 : 128; // bytes of a token in a panel
        auto swizzle = [](int tok, int chunk) {
            return chunk ^ (SWIGLU ? tok >> 1 & 3 : tok & 7);
        };                             // as TMA's 64B and 128B modes
        int s = 0, ph = 0, passes = 0; // passes: panels used so far, through all tiles
        // One arrival per warp and CTA, not per warpgroup: then no warp's reads can still be under way when the stage
        // is refilled.
        auto release = [&](int i) {
            if (lane < CL) mbar_arrive_at<CL>(&t.empty[i], lane);
        };
        for (int it = 0;; it++) {
            const Tile u = next_tile(it);
            mbar_arrive_after<CL>(&t.slot_empty, 0, u); // every lane for its own read
            if (u.e < 0) break;
            float d[128];
#define CASE(u)                                                                                                        \
    case u:                                                                                                            \
        W::template mainloop<u>(d, smem, t, wg, p.k_tiles, s, ph, release);                                            \
        break;
            switch ((u.valid + 15) / 16) {
                CASE(1)
                CASE(2)
                CASE(3)
                CASE(4)
                CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14) CASE(15) CASE(16)
            }
            const int col0 = ((u.w * CL + rank) * 2 + wg) * (SWIGLU ? 32 : 64);
#pragma unroll
            for (int q = 0; q < 4; q++) { // 64 tokens a pass, two panels, so a store overlaps the next pass
                const int left = u.valid - q * 64;
                if (left <= 0) break;
                // Turn about through tiles too: a tile of one or three passes must not begin with the panel that the
                // one before it ended with, whose store may still be reading.
                const int half = passes++ & 1;
                const uint32_t panel = mine + half * PANEL;
                if (wt == 0) bulk_wait_read<1>();
                bar_wg(1 + wg);
                if constexpr (SWIGLU) {
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        uint32_t r[4];
#pragma unroll
                        for (int i = 0; i < 4;
                             i++) { // rows 0-7 of the warp's 16 are gate, 8-15 up: one thread holds both of an output
                            const float *v = d + q * 32 + c * 16 + i * 4;
                            r[i] = swiglu(pack(v[0], v[1]), pack(v[2], v[3]));
                        }
                        int tok = c * 32 + stok;
                        stmatrix4(panel + tok * ROW + (swizzle(tok, schunk) << 4), r);
                    }
                } else {
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        uint32_t r[4];
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            r[i] = pack(d[q * 32 + c * 8 + 2 * i], d[q * 32 + c * 8 + 2 * i + 1]);
                        int tok = c * 16 + stok;
                        stmatrix4(panel + tok * ROW + (swizzle(tok, schunk) << 4), r);
                    }
                }
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                bar_wg(1 + wg);
                if (left >= 64) {
                    if (wt == 0) tma_store(&mapC, panel, col0, u.row0 + q * 64);
                } else { // rows past `valid` belong to the next tile or expert, and another CTA writes them
                    for (int i = wt; i < 64 * (ROW / 16); i += 128) {
                        int tok = i / (ROW / 16), c = i % (ROW / 16), col = col0 + c * 8;
                        if (tok < left && col < p.n_out) {
                            int4 v = *(const int4 *)(panels + wg * 2 * PANEL + half * PANEL + tok * ROW +
                                                     (swizzle(tok, c) << 4));
                            *(int4 *)(p.C + (size_t)(u.row0 + q * 64 + tok) * p.n_out + col) = v;
                        }
                    }
                }
                if (wt == 0) bulk_commit(); // also when empty: keeps wait_read<1> meaning "the panel before last"
            }
        }
        if (wt == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    __syncwarp();
    if (CL > 1) cluster_sync(); // a peer may still be arriving on this CTA's barriers
}

// ---- host
// -------------------------------------------------------------------------------------------------------------------
// Weights as (k, 8 rows, 2 halves, 16-row block, expert). Plain: the halves are neighbours. Gate and up: half 1 is
// `up`, wherever it lies behind gate.
static int weights_map(CUtensorMap *m, const void *p, uint64_t cols, uint64_t row, uint64_t n, uint64_t e,
                       uint64_t expert, uint64_t half, uint32_t box, CUtensorMapSwizzle sw, CUtensorMapDataType type,
                       sl_err *err) {
    const uint64_t dims[5] = {cols, 8, 2, n / 16, e};
    const uint64_t strides[4] = {row, half ? half : 8 * row, half ? 8 * row : 16 * row, e > 1 ? expert : 16 * row};
    const uint32_t b[5] = {box, 8, 2, BW / 16, 1};
    return sl_tma_map(m, p, 5, dims, strides, b, sw, type, err);
}
template <int CL, class W, bool SWIGLU>
static int launch_cl(SlCuda *c, const SlGrouped *g, const CUtensorMap &w, const CUtensorMap &scales, sl_err *err) {
    constexpr int GROUP = 8;
    const sl_mat *m = g->w;
    const int64_t n = SWIGLU ? 2 * m->n : m->n;
    Params p = {g->off,
                (bf16 *)g->c,
                c->counters + 4,
                (int)m->count,
                (int)((n + BW * CL - 1) / (BW * CL)),
                (int)((m->k + BK - 1) / BK),
                (int)m->n,
                GROUP,
                1};
    CUtensorMap t, out;
    const uint64_t td[2] = {(uint64_t)m->k, (uint64_t)g->m}, ts[1] = {(uint64_t)m->k * 2},
                   cd[2] = {(uint64_t)m->n, (uint64_t)g->m}, cs[1] = {(uint64_t)m->n * 2};
    const uint32_t tb[2] = {BK, BOX}, cb[2] = {SWIGLU ? 32u : 64u, 64};
    int rc = sl_tma_map(&t, g->a, 2, td, ts, tb, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, err);
    if (!rc)
        rc = sl_tma_map(&out, g->c, 2, cd, cs, cb, SWIGLU ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
                        CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, err);
    if (rc) return rc;
    auto f = grouped_product<CL, SWIGLU, W>;
    SL_CU(cudaFuncSetAttribute(f, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes<W>()));
    cudaLaunchConfig_t cfg = {};
    cudaLaunchAttribute at;
    at.id = cudaLaunchAttributeClusterDimension, at.val.clusterDim.x = CL, at.val.clusterDim.y = 1,
    at.val.clusterDim.z = 1;
    cfg.gridDim = dim3(c->sms / CL * CL), cfg.blockDim = dim3(THREADS), cfg.dynamicSmemBytes = smem_bytes<W>(),
    cfg.attrs = &at, cfg.numAttrs = CL > 1, cfg.stream = c->stream;
    SL_CU(cudaLaunchKernelEx(&cfg, f, t, w, scales, out, p));
    return 0;
}
template <class W, bool SWIGLU>
static int launch_as(SlCuda *c, const SlGrouped *g, const CUtensorMap &w, const CUtensorMap &scales, sl_err *err) {
    return c->force.one_cta ? launch_cl<1, W, SWIGLU>(c, g, w, scales, err)
                            : launch_cl<2, W, SWIGLU>(c, g, w, scales, err);
}

// Two matrices can be one fused call when `up` lies behind `gate` with the same strides.
static bool pair_ok(const sl_mat *g, const sl_mat *u) {
    auto behind = [](const void *a, const void *b) {
        const uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
        return y > x && (y - x) % 16 == 0 && y - x < (1ull << 40);
    };
    if (u->fmt != g->fmt || u->n != g->n || u->k != g->k || u->count != g->count || u->row_bytes != g->row_bytes ||
        u->stride != g->stride)
        return false;
    if (!behind(g->data, u->data)) return false;
    return g->fmt != SL_W_INT4 ||
           (behind(g->scale, u->scale) && u->scale_row == g->scale_row && u->scale_stride == g->scale_stride);
}
bool sl_cuda_grouped_ok(const SlCuda *c, const sl_mat *w, const sl_mat *up) {
    if (c->cc != 90 || c->act != SL_BF16 || w->count > MAX_E || w->row_perm) return false;
    if (w->k % 8 || w->n % (up ? 8 : 16) || w->row_bytes % 16 || w->stride % 16 || !aligned16(w->data)) return false;
    if (w->fmt == SL_W_INT4) {
        if (w->zero || w->group != 32 || w->scale_dtype != SL_BF16 || w->k % 256 || w->scale_row * 2 % 16 ||
            w->scale_stride % 16 || !aligned16(w->scale))
            return false;
    } else if (w->fmt != SL_W_BF16)
        return false;
    return !up || pair_ok(w, up);
}
int sl_cuda_grouped(SlCuda *c, const SlGrouped *g, sl_err *err) {
    const sl_mat *m = g->w;
    if (!g->m) return 0;
    const bool glu = g->up != nullptr, q = m->fmt == SL_W_INT4;
    const uint64_t n = glu ? 2 * m->n : m->n, half = glu ? (uintptr_t)g->up->data - (uintptr_t)m->data : 0;
    CUtensorMap w, s;
    int rc;
    if (!q) {
        rc = weights_map(&w, m->data, m->k, m->row_bytes, n, m->count, m->stride, half, BK, CU_TENSOR_MAP_SWIZZLE_128B,
                         CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, err);
        if (rc)
            return sl_err_wrap(err, "grouped product, bf16 weights [%lld][%lld, %lld]", (long long)m->count,
                               (long long)m->n, (long long)m->k);
        return glu ? launch_as<Bf16Weights, true>(c, g, w, w, err) : launch_as<Bf16Weights, false>(c, g, w, w, err);
    }
    const uint64_t shalf = glu ? (uintptr_t)g->up->scale - (uintptr_t)m->scale : 0;
    rc = weights_map(&w, m->data, m->k / 8, m->row_bytes, n, m->count, m->stride, half, BK / 8,
                     CU_TENSOR_MAP_SWIZZLE_32B, CU_TENSOR_MAP_DATA_TYPE_INT32, err);
    if (!rc)
        rc = weights_map(&s, m->scale, m->k / 32, m->scale_row * 2, n, m->count, m->scale_stride, shalf, 8,
                         CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, err);
    if (rc)
        return sl_err_wrap(err, "grouped product, INT4 weights [%lld][%lld, %lld]", (long long)m->count,
                           (long long)m->n, (long long)m->k);
    return glu ? launch_as<Int4Weights, true>(c, g, w, s, err) : launch_as<Int4Weights, false>(c, g, w, s, err);
}
