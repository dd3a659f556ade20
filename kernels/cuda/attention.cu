/* attention: chooses the kernel (wgmma on sm_90, mma.sync elsewhere, plain for f32 and odd head dims) and keeps the
 * work lists. A list depends only on the sequences and the rows of a block, so one serves every layer of a micro-batch;
 * a few are kept. */
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/tma.h"

int sl_tma_map(CUtensorMap *m, const void *p, int rank, const uint64_t *dims, const uint64_t *strides,
               const uint32_t *box, CUtensorMapSwizzle swizzle, CUtensorMapDataType type, sl_err *err) {
    using Fn = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                            const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                            CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    static Fn encode = nullptr; /* a driver entry point: the same for the whole process */
    if (!encode) {
        void *f = nullptr;
        cudaDriverEntryPointQueryResult q;
        SL_CU(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &q));
        if (!f)
            return sl_err_set(err, SL_ECONFIG,
                              "the CUDA driver has no cuTensorMapEncodeTiled: driver 525 or newer is needed");
        encode = reinterpret_cast<Fn>(f);
    }
    const cuuint32_t one[5] = {1, 1, 1, 1, 1};
    const CUresult r = encode(m, type, rank, const_cast<void *>(p), reinterpret_cast<const cuuint64_t *>(dims),
                              reinterpret_cast<const cuuint64_t *>(strides), box, one, CU_TENSOR_MAP_INTERLEAVE_NONE,
                              swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS)
        return sl_err_set(err, SL_EINTERNAL, "cuTensorMapEncodeTiled (rank %d, base %p): CUDA driver error %d", rank, p,
                          (int)r);
    return 0;
}

/* ---- work lists ---- */
struct TileList {
    std::vector<int32_t> cu;
    int bm = 0, window = 0, n = 0, max_len = 0;
    AttnTile *dev = nullptr, *host = nullptr; /* host: pinned */
    size_t cap = 0;
    cudaEvent_t copied = nullptr;
    uint64_t used = 0;
};
struct SlAttnTiles {
    TileList list[16];
    uint64_t clock = 0;
};

int sl_cuda_attention_open(SlCuda *c, sl_err *err) {
    c->tiles = new SlAttnTiles;
    for (auto &l : c->tiles->list) SL_CU(cudaEventCreateWithFlags(&l.copied, cudaEventDisableTiming));
    return 0;
}
void sl_cuda_attention_close(SlCuda *c) {
    if (!c->tiles) return;
    for (auto &l : c->tiles->list) {
        if (l.copied) cudaEventDestroy(l.copied);
        cudaFree(l.dev), cudaFreeHost(l.host);
    }
    delete c->tiles;
    c->tiles = nullptr;
}

/* The list for these sequences with blocks of bm rows (bm 0: one entry a sequence). */
static int tiles_for(SlCuda *c, TileList **out, const int32_t *cu, int S, int bm, int window, sl_err *err) {
    SlAttnTiles *t = c->tiles;
    TileList *oldest = &t->list[0];
    for (auto &l : t->list) {
        if (l.used && l.bm == bm && l.window == window && (int)l.cu.size() == S + 1 &&
            std::equal(l.cu.begin(), l.cu.end(), cu)) {
            l.used = ++t->clock;
            *out = &l;
            return 0;
        }
        if (l.used < oldest->used) oldest = &l;
    }
    TileList *l = oldest;
    if (l->used) SL_CU(cudaEventSynchronize(l->copied)); /* its pinned copy may still be read; long done in practice */
    std::vector<int> v(cu, cu + S + 1);
    std::vector<AttnTile> tiles;
    if (bm)
        tiles = make_tiles(v, bm, window);
    else
        for (int s = 0; s < S; s++) tiles.push_back({cu[s], cu[s + 1] - cu[s], 0, 0});
    if (tiles.size() > l->cap) {
        SL_CU(cudaStreamSynchronize(c->stream)); /* kernels may still read the old one */
        cudaFree(l->dev), cudaFreeHost(l->host);
        l->dev = nullptr, l->host = nullptr, l->cap = 0, l->used = 0;
        const size_t cap = tiles.size() * 2;
        SL_CU(cudaMalloc(&l->dev, cap * sizeof(AttnTile)));
        SL_CU(cudaMallocHost(&l->host, cap * sizeof(AttnTile)));
        l->cap = cap;
    }
    std::copy(tiles.begin(), tiles.end(), l->host);
    SL_CU(cudaMemcpyAsync(l->dev, l->host, tiles.size() * sizeof(AttnTile), cudaMemcpyHostToDevice, c->stream));
    SL_CU(cudaEventRecord(l->copied, c->stream));
    l->cu.assign(cu, cu + S + 1);
    l->bm = bm, l->window = window, l->n = (int)tiles.size(), l->used = ++t->clock, l->max_len = 0;
    for (int s = 0; s < S; s++) l->max_len = std::max(l->max_len, cu[s + 1] - cu[s]);
    *out = l;
    return 0;
}

static bool vectors_ok(const sl_attn *a, const void *o, const void *q, const void *k, const void *v) {
    const int64_t all =
        a->q_stride | a->k_stride | a->v_stride | a->o_stride | a->k_head_stride | a->v_head_stride | a->dqk | a->dv;
    return all % 8 == 0 && aligned16(o) && aligned16(q) && aligned16(k) && aligned16(v) && a->scale > 0;
}

int sl_cuda_attention(SlCuda *c, void *o, const void *q, const void *k, const void *v, const int32_t *cu, int32_t S,
                      const sl_attn *a, sl_err *err) {
    TileList *l = nullptr;
    int rc;
    const bool fast = c->act == SL_BF16 && vectors_ok(a, o, q, k, v);
    const bool wg = fast && c->cc == 90 && sl_attention_wgmma_rows(a->dqk, a->dv);
    const int bm = wg ? sl_attention_wgmma_rows(a->dqk, a->dv) : fast ? sl_attention_mma_rows(a->dqk, a->dv) : 0;
    if ((rc = tiles_for(c, &l, cu, S, bm, a->window, err))) return rc;
    if (!bm) {
        if (a->dqk > 256 || a->dv > 256)
            return sl_err_set(err, SL_ECONFIG, "attention head dims %d/%d: at most 256 on the CUDA backend", a->dqk,
                              a->dv);
        return c->act == SL_F32 ? sl_attention_plain<float>(a, o, q, k, v, l->dev, S, l->max_len, c->stream, err)
                                : sl_attention_plain<bf16>(a, o, q, k, v, l->dev, S, l->max_len, c->stream, err);
    }
    AttnArgs x = {};
    x.q = (const bf16 *)q, x.k = (const bf16 *)k, x.v = (const bf16 *)v, x.o = (bf16 *)o;
    x.q_t = a->q_stride, x.q_h = a->dqk, x.k_t = a->k_stride, x.k_h = a->k_head_stride, x.v_t = a->v_stride,
    x.v_h = a->v_head_stride, x.o_t = a->o_stride, x.o_h = a->dv;
    x.tokens = cu[S], x.heads_q = a->heads, x.heads_kv = a->kv_heads, x.scale = a->scale, x.window = a->window,
    x.sinks = a->sinks;
    x.tiles = l->dev, x.n_tiles = l->n, x.counter = c->counters;
    x.head_group = pick_head_group(cu[S], a->heads, a->kv_heads, a->dqk, a->dv);
    return wg ? sl_attention_wgmma(x, a->dqk, a->dv, c->sms, c->stream, err)
              : sl_attention_mma(x, a->dqk, a->dv, c->stream, err);
}
