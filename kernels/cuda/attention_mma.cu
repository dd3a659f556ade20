// FlashAttention-2 style kernel on mma.sync (any GPU from sm_80 on; the 96+ KB blocks want sm_90).
//
// Each warp owns 16 * MT query rows.  MT = 2 wherever the accumulators fit: one ldmatrix of K or V
// (4 shared-memory cycles) then feeds 4 mma instead of 2, and with MT = 1 shared memory, not the
// tensor core, is the limit.
#include "kernels/cuda/attention.cuh"

namespace {

__device__ __forceinline__ void ldsm4(uint32_t (&r)[4], uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr));
}
__device__ __forceinline__ void ldsm4t(uint32_t (&r)[4], uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr));
}
__device__ __forceinline__ void mma16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Same with a zero accumulator: the first k step then needs no registers cleared beforehand.
__device__ __forceinline__ void mma16816_first(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}
__device__ __forceinline__ void cp16(uint32_t dst, const void *src, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N> __device__ __forceinline__ void cp_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Shared tiles are slabs of 64 columns: [D / 64][rows][128 bytes], the 16-byte chunk c of row r at
// c ^ (r & 7), so that ldmatrix (8 rows, one chunk each) touches all 32 banks once.
// Rows at or past `limit` are zero-filled: they belong to the next sequence, and its NaNs must not
// reach this one through 0 * NaN.
template <int D, int ROWS, int NT>
__device__ __forceinline__ void load_tile(uint32_t dst, const bf16 *src, int64_t stride, int limit, int tid) {
    constexpr int STEP = NT / 8;
    static_assert(STEP % 8 == 0 && ROWS % STEP == 0, "");
    int c = tid & 7, r = tid >> 3;
    uint32_t d = dst + r * 128 + ((c ^ (r & 7)) << 4);
    const bf16 *p = src + r * stride + c * 8;
#pragma unroll
    for (int i = 0; i < ROWS / STEP; i++) {
        bool ok = r + i * STEP < limit;
        const bf16 *pi = ok ? p + i * STEP * stride : src;
#pragma unroll
        for (int s = 0; s < D / 64; s++) cp16(d + s * ROWS * 128 + i * STEP * 128, pi + s * 64, ok ? 16 : 0);
    }
}

template <int DQK_, int DV_, int BN_, int NWARP_, int MT_, int STAGES_, bool QREG_, int MINB_> struct Cfg {
    static constexpr int DQK = DQK_, DV = DV_, BN = BN_, NWARP = NWARP_, MT = MT_, STAGES = STAGES_;
    static constexpr bool QREG = QREG_; // keep the Q fragments in registers
    static constexpr int NT = NWARP * 32, BM = NWARP * 16 * MT;
    static constexpr int QB = BM * DQK * 2, KB = BN * DQK * 2, VB = BN * DV * 2;
    static constexpr int SMEM = QB + STAGES * (KB + VB);
    static constexpr int MINB = MINB_; // blocks per SM; one hides the other's softmax
};

template <class C> __global__ void __launch_bounds__(C::NT, C::MINB) attn_mma_kernel(const AttnArgs a) {
    constexpr int DQK = C::DQK, DV = C::DV, BN = C::BN, MT = C::MT, BM = C::BM, NT = C::NT;
    extern __shared__ __align__(1024) unsigned char smem[];
    const uint32_t sq = smem_u32(smem), sk = sq + C::QB, sv = sk + C::STAGES * C::KB;
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t4 = lane & 3;

    const Work w = work_item(a, blockIdx.x);
    const int m0 = w.t.m0, len = w.t.len, hkv = w.head / (a.heads_q / a.heads_kv);
    const bf16 *qp = a.q + int64_t(w.t.start + m0) * a.q_t + w.head * a.q_h;
    const bf16 *kp = a.k + int64_t(w.t.start) * a.k_t + hkv * a.k_h;
    const bf16 *vp = a.v + int64_t(w.t.start) * a.v_t + hkv * a.v_h;
    const int n_hi = (min(m0 + BM, len) + BN - 1) / BN;
    const int n_lo = a.window > 0 ? max(0, m0 - a.window + 1) / BN : 0;

    auto load_k = [&](int n, int st) {
        load_tile<DQK, BN, NT>(sk + st * C::KB, kp + int64_t(n) * BN * a.k_t, a.k_t, len - n * BN, tid);
    };
    auto load_v = [&](int n, int st) {
        load_tile<DV, BN, NT>(sv + st * C::VB, vp + int64_t(n) * BN * a.v_t, a.v_t, len - n * BN, tid);
    };

    load_tile<DQK, BM, NT>(sq, qp, a.q_t, len - m0, tid);
    load_k(n_hi - 1, 0);
    if (C::STAGES == 2) load_v(n_hi - 1, 0);
    cp_commit();

    // ldmatrix addresses: this lane's row and chunk; the k step then only flips chunk bits (xor).
    const uint32_t q_addr = sq + (warp * 16 * MT + (lane & 15)) * 128 + ((((lane >> 4)) ^ (lane & 7)) << 4);
    const uint32_t k_off = ((lane & 7) + ((lane >> 4) << 3)) * 128 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
    const uint32_t v_off = (lane & 15) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);

    uint32_t qf[C::QREG ? DQK / 16 : 1][MT][4];
    if (C::QREG) {
        cp_wait<0>();
        __syncthreads();
#pragma unroll
        for (int kk = 0; kk < DQK / 16; kk++)
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
                ldsm4(qf[C::QREG ? kk : 0][mt], (q_addr + (kk / 4) * BM * 128 + mt * 2048) ^ ((kk & 3) << 5));
    }

    float o[MT][DV / 8][4], mrow[MT][2], lrow[MT][2];
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
        mrow[mt][0] = mrow[mt][1] = -INFINITY;
        lrow[mt][0] = lrow[mt][1] = 0.f;
#pragma unroll
        for (int j = 0; j < DV / 8; j++) o[mt][j][0] = o[mt][j][1] = o[mt][j][2] = o[mt][j][3] = 0.f;
    }
    const float c = a.scale * 1.4426950408889634f; // exp(x) = exp2(x log2 e): one FFMA per score
    const int row0 = m0 + warp * 16 * MT;          // this warp's first row in the sequence

    int st = 0;
    for (int n = n_hi - 1; n >= n_lo; n--) {
        const int n0 = n * BN;
        cp_wait<0>();
        __syncthreads(); // tile n landed; nobody reads the other stage now
        if (C::STAGES == 2) {
            if (n > n_lo) {
                load_k(n - 1, st ^ 1);
                load_v(n - 1, st ^ 1);
            }
            cp_commit();
        } else {
            load_v(n, 0);
            cp_commit();
        }
        // A warp whose rows see nothing of this tile leaves the tensor core to the others.
        const bool live = n0 <= row0 + 16 * MT - 1 && (a.window <= 0 || n0 + BN - 1 > row0 - a.window);

        float s[MT][BN / 8][4];
        if (live) {
            const uint32_t kb = sk + st * C::KB + k_off;
#pragma unroll
            for (int kk = 0; kk < DQK / 16; kk++) {
                uint32_t qa[MT][4];
                if (!C::QREG)
#pragma unroll
                    for (int mt = 0; mt < MT; mt++)
                        ldsm4(qa[mt], (q_addr + (kk / 4) * BM * 128 + mt * 2048) ^ ((kk & 3) << 5));
#pragma unroll
                for (int j = 0; j < BN / 16; j++) {
                    uint32_t b[4];
                    ldsm4(b, (kb + (kk / 4) * BN * 128 + j * 2048) ^ ((kk & 3) << 5));
#pragma unroll
                    for (int mt = 0; mt < MT; mt++) {
                        const uint32_t(&q)[4] = C::QREG ? qf[C::QREG ? kk : 0][mt] : qa[mt];
                        if (kk == 0) {
                            mma16816_first(s[mt][2 * j], q, b[0], b[1]);
                            mma16816_first(s[mt][2 * j + 1], q, b[2], b[3]);
                        } else {
                            mma16816(s[mt][2 * j], q, b[0], b[1]);
                            mma16816(s[mt][2 * j + 1], q, b[2], b[3]);
                        }
                    }
                }
            }
        }
        if (C::STAGES == 1) { // V came in under Q.K; now K's buffer is free
            cp_wait<0>();
            __syncthreads();
            if (n > n_lo) load_k(n - 1, 0);
            cp_commit();
        }
        if (live) {
            // Only tiles on the diagonal or on the window's far edge need masking.
            if (n0 + BN - 1 > row0 || (a.window > 0 && n0 <= row0 + 16 * MT - 1 - a.window)) {
                const int win = a.window > 0 ? a.window : 0x3fffffff;
#pragma unroll
                for (int mt = 0; mt < MT; mt++)
#pragma unroll
                    for (int j = 0; j < BN / 8; j++)
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            int row = row0 + mt * 16 + g + (e >> 1) * 8, col = n0 + j * 8 + t4 * 2 + (e & 1);
                            if (col > row || col <= row - win) s[mt][j][e] = -INFINITY;
                        }
            }
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float mx = mrow[mt][h];
#pragma unroll
                    for (int j = 0; j < BN / 8; j++) mx = fmaxf(mx, fmaxf(s[mt][j][2 * h], s[mt][j][2 * h + 1]));
                    mx = quad_max(mx);
                    const float ms = mx == -INFINITY ? 0.f : mx * c; // a row may see nothing of the first tile
                    const float corr = ex2(fmaf(mrow[mt][h], c, -ms));
                    mrow[mt][h] = mx;
                    float sum = 0.f;
#pragma unroll
                    for (int j = 0; j < BN / 8; j++)
#pragma unroll
                        for (int e = 2 * h; e < 2 * h + 2; e++) {
                            s[mt][j][e] = ex2(fmaf(s[mt][j][e], c, -ms));
                            sum += s[mt][j][e];
                        }
                    lrow[mt][h] = lrow[mt][h] * corr + sum;
#pragma unroll
                    for (int j = 0; j < DV / 8; j++) {
                        o[mt][j][2 * h] *= corr;
                        o[mt][j][2 * h + 1] *= corr;
                    }
                }
            const uint32_t vb = sv + st * C::VB + v_off;
#pragma unroll
            for (int kk = 0; kk < BN / 16; kk++) {
                uint32_t p[MT][4];
#pragma unroll
                for (int mt = 0; mt < MT; mt++) {
                    p[mt][0] = pack_bf16(s[mt][2 * kk][0], s[mt][2 * kk][1]);
                    p[mt][1] = pack_bf16(s[mt][2 * kk][2], s[mt][2 * kk][3]);
                    p[mt][2] = pack_bf16(s[mt][2 * kk + 1][0], s[mt][2 * kk + 1][1]);
                    p[mt][3] = pack_bf16(s[mt][2 * kk + 1][2], s[mt][2 * kk + 1][3]);
                }
#pragma unroll
                for (int j = 0; j < DV / 16; j++) {
                    uint32_t b[4];
                    ldsm4t(b, (vb + (j / 4) * BN * 128 + kk * 2048) ^ ((j & 3) << 5));
#pragma unroll
                    for (int mt = 0; mt < MT; mt++) {
                        mma16816(o[mt][2 * j], p[mt], b[0], b[1]);
                        mma16816(o[mt][2 * j + 1], p[mt], b[2], b[3]);
                    }
                }
            }
        }
        if (C::STAGES == 2) st ^= 1;
    }

#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float inv = row_inverse(lrow[mt][h], mrow[mt][h], c, a.sinks, w.head);
            const int row = row0 + mt * 16 + g + h * 8;
            bf16 *op = a.o + int64_t(w.t.start + row) * a.o_t + w.head * a.o_h;
#pragma unroll
            for (int j = 0; j < DV / 8; j += 4) {
                uint32_t x[4];
#pragma unroll
                for (int i = 0; i < 4; i++) x[i] = pack_bf16(o[mt][j + i][2 * h] * inv, o[mt][j + i][2 * h + 1] * inv);
                uint4 y = quad_transpose(x[0], x[1], x[2], x[3], t4);
                if (row < len) *reinterpret_cast<uint4 *>(op + (j + t4) * 8) = y;
            }
        }
}

template <class C> int launch(const AttnArgs &a, cudaStream_t s, sl_err *err) {
    SL_CU(cudaFuncSetAttribute(attn_mma_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SMEM));
    if (a.n_tiles == 0) return 0;
    attn_mma_kernel<C><<<a.n_tiles * a.heads_q, C::NT, C::SMEM, s>>>(a);
    SL_LAUNCHED("attention_mma");
    return 0;
}

// Measured best of several each.  Head dims 192/128 gain from 256 query rows per block (K and V are read
// half as often), the others from two smaller blocks per SM (one computes while the other waits).
//                DQK  DV   BN warps MT stages Q-in-regs blocks
using C64 = Cfg<64, 64, 128, 4, 2, 2, false, 2>;
using C128 = Cfg<128, 128, 64, 4, 2, 2, false, 2>;
using C192 = Cfg<192, 128, 64, 8, 2, 2, false, 1>;
using C256 = Cfg<256, 256, 64, 8, 1, 2, false, 1>; // 32 rows per warp would need 256 registers for O

} // namespace

int sl_attention_mma_rows(int dqk, int dv) {
    if (dqk == 64 && dv == 64) return C64::BM;
    if (dqk == 128 && dv == 128) return C128::BM;
    if (dqk == 192 && dv == 128) return C192::BM;
    if (dqk == 256 && dv == 256) return C256::BM;
    return 0;
}

int sl_attention_mma(const AttnArgs &a, int dqk, int dv, cudaStream_t s, sl_err *err) {
    if (dqk == 64 && dv == 64) return launch<C64>(a, s, err);
    if (dqk == 128 && dv == 128) return launch<C128>(a, s, err);
    if (dqk == 192 && dv == 128) return launch<C192>(a, s, err);
    if (dqk == 256 && dv == 256) return launch<C256>(a, s, err);
    return sl_err_set(err, SL_EINTERNAL, "attention_mma: no kernel for head dims %d/%d", dqk, dv);
}
