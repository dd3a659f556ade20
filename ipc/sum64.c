/* sl_sum64: three twins that must agree to the bit; tests/test_flow.c compares them. */
#include "ipc/sum64.h"
#include "ipc/flow.h"
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Words of a byte range, tail zero-extended; `first` is the number of words before `data`. */
static void tail_words(const uint8_t *data, uint64_t from, uint64_t bytes, uint64_t word, uint64_t *a, uint64_t *b) {
    for (uint64_t at = from; at < bytes; at += 4) {
        uint32_t w = 0;
        memcpy(&w, data + at, bytes - at < 4 ? bytes - at : 4);
        word++;
        *a += w;
        *b += word * w;
    }
}

void sl_sum_pair_scalar(const void *data, uint64_t bytes, uint64_t *a, uint64_t *b) {
    *a = *b = 0;
    tail_words(data, 0, bytes, 0, a, b);
}

#if defined(__x86_64__)
/* Both vector twins keep, per lane, A = sum of words and P = sum of the prefix sums of A. After n blocks of L words
 *     P = sum over blocks j of (n - j) * w_j,   so   sum of j * w_j = n*A - P
 *     b = sum (L*j + lane + 1) * w = L*(n*A - P) + sum (lane + 1) * A
 * which needs no multiplication inside the loop. Even and odd words have their own accumulators. */
__attribute__((target("avx512f"))) void sl_sum_pair_avx512(const void *data, uint64_t bytes, uint64_t *a, uint64_t *b) {
    const uint8_t *p = data;
    uint64_t n = bytes / 64;
    __m512i ae = _mm512_setzero_si512(), ao = ae, pe = ae, po = ae, low = _mm512_set1_epi64(0xffffffff);
    for (uint64_t i = 0; i < n; i++) {
        __m512i v = _mm512_loadu_si512(p + 64 * i);
        ae = _mm512_add_epi64(ae, _mm512_and_si512(v, low));
        ao = _mm512_add_epi64(ao, _mm512_srli_epi64(v, 32));
        pe = _mm512_add_epi64(pe, ae);
        po = _mm512_add_epi64(po, ao);
    }
    uint64_t A[2][8], P[2][8];
    _mm512_storeu_si512(A[0], ae);
    _mm512_storeu_si512(A[1], ao);
    _mm512_storeu_si512(P[0], pe);
    _mm512_storeu_si512(P[1], po);
    *a = *b = 0;
    for (unsigned l = 0; l < 16; l++) {
        uint64_t s = A[l & 1][l >> 1], q = P[l & 1][l >> 1];
        *a += s;
        *b += 16 * (n * s - q) + (l + 1) * s;
    }
    tail_words(p, 64 * n, bytes, 16 * n, a, b);
}

__attribute__((target("avx2"))) void sl_sum_pair_avx2(const void *data, uint64_t bytes, uint64_t *a, uint64_t *b) {
    const uint8_t *p = data;
    uint64_t n = bytes / 32;
    __m256i ae = _mm256_setzero_si256(), ao = ae, pe = ae, po = ae, low = _mm256_set1_epi64x(0xffffffff);
    for (uint64_t i = 0; i < n; i++) {
        __m256i v = _mm256_loadu_si256((const __m256i *)(const void *)(p + 32 * i));
        ae = _mm256_add_epi64(ae, _mm256_and_si256(v, low));
        ao = _mm256_add_epi64(ao, _mm256_srli_epi64(v, 32));
        pe = _mm256_add_epi64(pe, ae);
        po = _mm256_add_epi64(po, ao);
    }
    uint64_t A[2][4], P[2][4];
    _mm256_storeu_si256((__m256i *)(void *)A[0], ae);
    _mm256_storeu_si256((__m256i *)(void *)A[1], ao);
    _mm256_storeu_si256((__m256i *)(void *)P[0], pe);
    _mm256_storeu_si256((__m256i *)(void *)P[1], po);
    *a = *b = 0;
    for (unsigned l = 0; l < 8; l++) {
        uint64_t s = A[l & 1][l >> 1], q = P[l & 1][l >> 1];
        *a += s;
        *b += 8 * (n * s - q) + (l + 1) * s;
    }
    tail_words(p, 32 * n, bytes, 8 * n, a, b);
}
#endif

void sl_sum_pair(const void *data, uint64_t bytes, uint64_t *a, uint64_t *b) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) {
        sl_sum_pair_avx512(data, bytes, a, b);
        return;
    }
    if (__builtin_cpu_supports("avx2")) {
        sl_sum_pair_avx2(data, bytes, a, b);
        return;
    }
#endif
    sl_sum_pair_scalar(data, bytes, a, b);
}

void sl_sum_states(const void *data, uint64_t rows, uint64_t bytes, uint64_t before, uint64_t *a, uint64_t *b) {
    uint64_t words = (bytes + 3) / 4, step = bytes % 4 ? 1 : rows; /* whole words: all states are one range */
    for (uint64_t t = 0; t < rows; t += step) {
        uint64_t pa, pb;
        sl_sum_pair((const uint8_t *)data + t * bytes, step * bytes, &pa, &pb);
        *a += pa;
        *b += pb + (before + t) * words * pa;
    }
}

uint64_t sl_sum64(const void *data, uint64_t bytes) {
    uint64_t a, b;
    sl_sum_pair(data, bytes, &a, &b);
    return sl_sum_fold(a, b, bytes);
}
