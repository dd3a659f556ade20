/* tma: tensor maps for the bulk copy engine. The encoder is looked up through the runtime, so nothing links against
 * libcuda. */
#ifndef SL_CUDA_TMA_H
#define SL_CUDA_TMA_H
#include <cuda.h>
#include "kernels/cuda/context.h"
/* rank <= 5; dims and box innermost first; strides in bytes from dimension 1 on (rank-1 of them), multiples of 16. */
int sl_tma_map(CUtensorMap *m, const void *p, int rank, const uint64_t *dims, const uint64_t *strides,
               const uint32_t *box, CUtensorMapSwizzle swizzle, CUtensorMapDataType type, sl_err *err);
#endif
