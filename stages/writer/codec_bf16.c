/* The planes of codec bf16. One element s eeeeeeee mmmmmmm is rotated left by one, so that the exponent is the high
 * byte and mantissa and sign are the low byte; both planes are then plain bytes. */
#include "stages/writer/codec.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

void sl_bf16_split_scalar(const uint16_t *x, const uint8_t *bias, uint8_t *mant, uint8_t *expo, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        uint16_t w = (uint16_t)(x[i] << 1 | x[i] >> 15);
        expo[i] = (uint8_t)((w >> 8) - bias[i]);
        mant[i] = (uint8_t)w;
    }
}

void sl_bf16_join_scalar(const uint8_t *mant, const uint8_t *expo, const uint8_t *bias, uint16_t *x, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        uint16_t w = (uint16_t)((uint8_t)(expo[i] + bias[i]) << 8 | mant[i]);
        x[i] = (uint16_t)(w >> 1 | w << 15);
    }
}

#if defined(__x86_64__)
__attribute__((target("avx512bw,avx512vl"))) static void split_512(const uint16_t *x, const uint8_t *bias,
                                                                   uint8_t *mant, uint8_t *expo, uint64_t n) {
    uint64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m512i v = _mm512_loadu_si512(x + i);
        __m512i w = _mm512_or_si512(_mm512_slli_epi16(v, 1), _mm512_srli_epi16(v, 15));
        __m256i e = _mm512_cvtepi16_epi8(_mm512_srli_epi16(w, 8));
        __m256i b = _mm256_loadu_si256((const __m256i *)(bias + i));
        _mm256_storeu_si256((__m256i *)(expo + i), _mm256_sub_epi8(e, b));
        _mm256_storeu_si256((__m256i *)(mant + i), _mm512_cvtepi16_epi8(w));
    }
    sl_bf16_split_scalar(x + i, bias + i, mant + i, expo + i, n - i);
}

__attribute__((target("avx512bw,avx512vl"))) static void join_512(const uint8_t *mant, const uint8_t *expo,
                                                                  const uint8_t *bias, uint16_t *x, uint64_t n) {
    uint64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i e = _mm256_add_epi8(_mm256_loadu_si256((const __m256i *)(expo + i)),
                                    _mm256_loadu_si256((const __m256i *)(bias + i)));
        __m512i w = _mm512_slli_epi16(_mm512_cvtepu8_epi16(e), 8);
        w = _mm512_or_si512(w, _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(mant + i))));
        _mm512_storeu_si512(x + i, _mm512_or_si512(_mm512_srli_epi16(w, 1), _mm512_slli_epi16(w, 15)));
    }
    sl_bf16_join_scalar(mant + i, expo + i, bias + i, x + i, n - i);
}

__attribute__((target("avx2"))) static void split_256(const uint16_t *x, const uint8_t *bias, uint8_t *mant,
                                                      uint8_t *expo, uint64_t n) {
    const __m256i low = _mm256_set1_epi16(0xff);
    uint64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(x + i)), c = _mm256_loadu_si256((const __m256i *)(x + i + 16));
        a = _mm256_or_si256(_mm256_slli_epi16(a, 1), _mm256_srli_epi16(a, 15));
        c = _mm256_or_si256(_mm256_slli_epi16(c, 1), _mm256_srli_epi16(c, 15));
        __m256i e = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(c, 8));
        __m256i m = _mm256_packus_epi16(_mm256_and_si256(a, low), _mm256_and_si256(c, low));
        e = _mm256_permute4x64_epi64(e, 0xd8); /* pack works per 128-bit lane */
        m = _mm256_permute4x64_epi64(m, 0xd8);
        _mm256_storeu_si256((__m256i *)(expo + i), _mm256_sub_epi8(e, _mm256_loadu_si256((const __m256i *)(bias + i))));
        _mm256_storeu_si256((__m256i *)(mant + i), m);
    }
    sl_bf16_split_scalar(x + i, bias + i, mant + i, expo + i, n - i);
}

__attribute__((target("avx2"))) static void join_256(const uint8_t *mant, const uint8_t *expo, const uint8_t *bias,
                                                     uint16_t *x, uint64_t n) {
    uint64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m128i e =
            _mm_add_epi8(_mm_loadu_si128((const __m128i *)(expo + i)), _mm_loadu_si128((const __m128i *)(bias + i)));
        __m256i w = _mm256_slli_epi16(_mm256_cvtepu8_epi16(e), 8);
        w = _mm256_or_si256(w, _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(mant + i))));
        _mm256_storeu_si256((__m256i *)(x + i), _mm256_or_si256(_mm256_srli_epi16(w, 1), _mm256_slli_epi16(w, 15)));
    }
    sl_bf16_join_scalar(mant + i, expo + i, bias + i, x + i, n - i);
}
#endif

void sl_bf16_split(const uint16_t *x, const uint8_t *bias, uint8_t *mant, uint8_t *expo, uint64_t n) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return split_512(x, bias, mant, expo, n);
    if (__builtin_cpu_supports("avx2")) return split_256(x, bias, mant, expo, n);
#endif
    sl_bf16_split_scalar(x, bias, mant, expo, n);
}

void sl_bf16_join(const uint8_t *mant, const uint8_t *expo, const uint8_t *bias, uint16_t *x, uint64_t n) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return join_512(mant, expo, bias, x, n);
    if (__builtin_cpu_supports("avx2")) return join_256(mant, expo, bias, x, n);
#endif
    sl_bf16_join_scalar(mant, expo, bias, x, n);
}

/* Order-0 bits of a histogram. */
static double bits(const uint32_t *h, double total) {
    double b = 0;
    for (int i = 0; i < 256; i++)
        if (h[i]) b += h[i] * (log2(total) - log2((double)h[i]));
    return b;
}

/* The bias of a channel is the rounded mean exponent over a sample of tokens, less a constant: one pass, no histogram
 * per channel, and close to the median because exponents within a channel spread over few binades. */
bool sl_bf16_bias(const uint16_t *x, uint32_t rows, uint32_t width, uint8_t *bias) {
    enum { SAMPLE = 64 };
    uint32_t step = rows > SAMPLE ? rows / SAMPLE : 1, n = 0;
    if (rows < 8) return false; /* too few tokens to earn back the table */
    uint32_t *sum = calloc(width, sizeof *sum);
    if (!sum) return false;
    for (uint32_t t = 0; t < rows && n < SAMPLE; t += step, n++)
        for (uint32_t c = 0; c < width; c++) sum[c] += (uint32_t)(x[(uint64_t)t * width + c] >> 7) & 0xff;
    for (uint32_t c = 0; c < width; c++) bias[c] = (uint8_t)((sum[c] + n / 2) / n);
    free(sum);
    uint32_t plain[256] = {0}, biased[256] = {0}, table[256] = {0};
    uint64_t seen = 0;
    for (uint32_t t = 0; t < rows; t += step * 4 + 1)
        for (uint32_t c = 0; c < width; c++, seen++) {
            uint32_t e = (uint32_t)(x[(uint64_t)t * width + c] >> 7) & 0xff;
            plain[e]++;
            biased[(uint8_t)(e - bias[c])]++;
        }
    for (uint32_t c = 0; c < width; c++) table[bias[c]]++;
    double gain = (bits(plain, (double)seen) - bits(biased, (double)seen)) * rows * width / (double)seen;
    return gain > bits(table, width) + 8 * 80;
}
