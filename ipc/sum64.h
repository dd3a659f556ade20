/* sum64: the two halves of sl_sum64 (ipc/flow.h), for whoever sums a range piece by piece.
 *
 *     a = sum w_i,  b = sum (i+1) * w_i  over the 32-bit words w_0.. of a range;  sum64 = fold(a, b, bytes)
 *
 * The pair of a range made of parts: with `before` words in front of a part whose own pair is (pa, pb),
 *     a += pa,  b += pb + before * pa          (all parts but the last a multiple of 4 bytes). */
#ifndef SL_IPC_SUM64_H
#define SL_IPC_SUM64_H
#include <stdint.h>

void sl_sum_pair(const void *data, uint64_t bytes, uint64_t *a, uint64_t *b); /* the fastest twin this CPU has */
static inline uint64_t sl_sum_fold(uint64_t a, uint64_t b, uint64_t bytes) {
    return b ^ (a << 32 | a >> 32) ^ (bytes * 0x9e3779b97f4a7c15ull);
}

/* The same for states: `rows` of them, `bytes` each, behind `before` others. Each counts as (bytes + 3) / 4 words of
 * its own, so that the states of a row can be summed in any cut. Added to *a and *b. */
void sl_sum_states(const void *data, uint64_t rows, uint64_t bytes, uint64_t before, uint64_t *a, uint64_t *b);
/* The row sum, one number for all captured states of a row of T tokens: h = 0; for capture k ascending
 * h = sl_sum_chain(h, sl_sum_fold(a, b, T * bytes)) with the pair of the capture's T states. */
static inline uint64_t sl_sum_chain(uint64_t h, uint64_t sum) {
    h = (h ^ sum) * 0xff51afd7ed558ccdull;
    return h ^ h >> 32;
}

/* The twins, for the test that compares them. The vector ones need the CPU feature of their name. */
void sl_sum_pair_scalar(const void *data, uint64_t bytes, uint64_t *a, uint64_t *b);
#if defined(__x86_64__)
void sl_sum_pair_avx2(const void *data, uint64_t bytes, uint64_t *a, uint64_t *b);
void sl_sum_pair_avx512(const void *data, uint64_t bytes, uint64_t *a, uint64_t *b);
#endif
#endif
