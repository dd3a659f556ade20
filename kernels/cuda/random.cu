/* random: weights of a model that is only a shape, made on the device with the same bits as stages/compute/random.c
 * makes them on the host (a counter-based generator: every element is a function of its index alone). */
#include "kernels/cuda/context.h"

__device__ __forceinline__ uint64_t draw(uint64_t key, uint64_t i) {
    uint64_t x = key + i * 0xd1342543de82ef95ull;
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}
__device__ __forceinline__ float normal(uint64_t x) {
    const int s = (int)(x & 0xffff) + (int)(x >> 16 & 0xffff) + (int)(x >> 32 & 0xffff) + (int)(x >> 48);
    return __fmul_rn((float)(s - 131070), 1.7320508f / 65536.0f);
}
__device__ __forceinline__ float around_one(uint64_t x) {
    return __fadd_rn(0.75f, __fmul_rn(0.5f, (float)(x >> 40) * 0x1p-24f));
}

/* One block a row (of one matrix), rows in turn when there are more than blocks. */
__global__ void __launch_bounds__(256) fill_kernel(void *dst, const sl_fill f) {
    for (int64_t r = blockIdx.x; r < f.e_n * f.rows; r += gridDim.x) {
        const int64_t e = r / f.rows, row = r % f.rows;
        const uint64_t i0 = (uint64_t)(((f.e0 + e) * f.full_rows + f.row0 + row) * f.full_units + f.unit0);
        for (int64_t u = threadIdx.x; u < f.units; u += blockDim.x) {
            const uint64_t x = draw(f.key, i0 + (uint64_t)u);
            const int64_t at = r * f.units + u;
            if (f.kind == SL_FILL_F32)
                ((float *)dst)[at] = __fmul_rn(f.dev, normal(x));
            else if (f.kind == SL_FILL_BF16)
                ((bf16 *)dst)[at] = __float2bfloat16_rn(__fmul_rn(f.dev, normal(x)));
            else if (f.kind == SL_FILL_WORDS)
                ((uint64_t *)dst)[at] = x;
            else
                ((bf16 *)dst)[at] = __float2bfloat16_rn(__fmul_rn(f.dev, around_one(x)));
        }
    }
}

int sl_cuda_fill(SlCuda *c, void *dst, const sl_fill *f, sl_err *err) {
    const int64_t rows = f->e_n * f->rows, most = (int64_t)c->sms * 32;
    if (rows < 1 || f->units < 1) return 0;
    fill_kernel<<<(unsigned)(rows < most ? rows : most), 256, 0, c->stream>>>(dst, *f);
    SL_LAUNCHED("random weights");
    return 0;
}
