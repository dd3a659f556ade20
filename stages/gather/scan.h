/* scan: one pass over the state of one token: checksum pair, non-finite elements, all-zero. The pass is memory-bound
 * with AVX-512 or AVX2 (chosen at run time); the scalar twin is the reference. */
#ifndef SL_GATHER_SCAN_H
#define SL_GATHER_SCAN_H
#include <stdbool.h>
#include <stdint.h>

typedef struct sl_scan {
    uint64_t a, b;      /* checksum pair of the token's bytes (ipc/sum64.h) */
    uint32_t nonfinite; /* elements that are NaN or Inf */
    bool zero;          /* every element is +0 or -0 */
} sl_scan;

/* `data`: `elems` elements of elem_size 2 (bf16) or 4 (f32) bytes, little-endian, any alignment. */
void sl_scan_token(const void *data, uint32_t elems, uint32_t elem_size, sl_scan *out);

/* The twins, for the test that compares them and the benchmark. avx512 needs AVX512F and BW. */
void sl_scan_token_scalar(const void *data, uint32_t elems, uint32_t elem_size, sl_scan *out);
#if defined(__x86_64__)
void sl_scan_token_avx2(const void *data, uint32_t elems, uint32_t elem_size, sl_scan *out);
void sl_scan_token_avx512(const void *data, uint32_t elems, uint32_t elem_size, sl_scan *out);
#endif
#endif
