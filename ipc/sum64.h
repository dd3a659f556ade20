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

/* The twins, for the test that compares them. The vector ones need the CPU feature of their name. */
void sl_sum_pair_scalar(const void *data, uint64_t bytes, uint64_t *a, uint64_t *b);
#if defined(__x86_64__)
void sl_sum_pair_avx2(const void *data, uint64_t bytes, uint64_t *a, uint64_t *b);
void sl_sum_pair_avx512(const void *data, uint64_t bytes, uint64_t *a, uint64_t *b);
#endif
#endif
