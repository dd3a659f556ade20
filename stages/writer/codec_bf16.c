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

__attribute__((target("avx2"))) void sl_bf16_split_avx2(const uint16_t *x, const uint8_t *bias, uint8_t *mant,
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

__attribute__((target("avx2"))) void sl_bf16_join_avx2(const uint8_t *mant, const uint8_t *expo, const uint8_t *bias,
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
    if (__builtin_cpu_supports("avx2")) return sl_bf16_split_avx2(x, bias, mant, expo, n);
#endif
    sl_bf16_split_scalar(x, bias, mant, expo, n);
}

void sl_bf16_join(const uint8_t *mant, const uint8_t *expo, const uint8_t *bias, uint16_t *x, uint64_t n) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return join_512(mant, expo, bias, x, n);
    if (__builtin_cpu_supports("avx2")) return sl_bf16_join_avx2(mant, expo, bias, x, n);
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

enum { COSTS = SL_BF16_COSTS, SAMPLE = 64 };

static void costs_from(const uint8_t *smp, const uint8_t *bias, const uint8_t *cost, uint16_t *add, uint64_t from,
                       uint64_t width) {
    for (uint64_t c = from; c < width; c++)
        for (uint8_t j = 0; j < 3; j++) {
            uint8_t v = (uint8_t)(smp[c] - bias[c] + 9 - j);
            add[j * width + c] = (uint16_t)(add[j * width + c] + cost[v < COSTS ? v : COSTS - 1]);
        }
}

void sl_bf16_costs_scalar(const uint8_t *smp, const uint8_t *bias, const uint8_t *cost, uint16_t *add, uint64_t width) {
    costs_from(smp, bias, cost, add, 0, width);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void sl_bf16_costs_avx2(const uint8_t *smp, const uint8_t *bias, const uint8_t *cost,
                                                        uint16_t *add, uint64_t width) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)cost));
    const __m256i last = _mm256_set1_epi8(COSTS - 1), zero = _mm256_setzero_si256();
    uint64_t c = 0;
    for (; c + 32 <= width; c += 32) {
        __m256i v = _mm256_sub_epi8(_mm256_loadu_si256((const __m256i *)(smp + c)),
                                    _mm256_loadu_si256((const __m256i *)(bias + c)));
        for (int j = 0; j < 3; j++) {
            __m256i at = _mm256_min_epu8(_mm256_add_epi8(v, _mm256_set1_epi8((char)(9 - j))), last);
            __m256i q = _mm256_shuffle_epi8(table, at);
            __m256i *lo = (__m256i *)(add + (uint64_t)j * width + c), *hi = lo + 1;
            q = _mm256_permute4x64_epi64(q, 0xd8); /* unpack works per 128-bit lane */
            _mm256_storeu_si256(lo, _mm256_add_epi16(_mm256_loadu_si256(lo), _mm256_unpacklo_epi8(q, zero)));
            _mm256_storeu_si256(hi, _mm256_add_epi16(_mm256_loadu_si256(hi), _mm256_unpackhi_epi8(q, zero)));
        }
    }
    costs_from(smp, bias, cost, add, c, width);
}
#endif

static void costs(const uint8_t *smp, const uint8_t *bias, const uint8_t *cost, uint16_t *add, uint64_t width) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) return sl_bf16_costs_avx2(smp, bias, cost, add, width);
#endif
    sl_bf16_costs_scalar(smp, bias, cost, add, width);
}

/* Histogram of every fourth sampled token's exponents, less the bias when there is one; returns how many. */
static uint64_t hist(const uint8_t *smp, uint32_t n, uint32_t width, const uint8_t *bias, uint32_t h[256]) {
    uint64_t seen = 0;
    memset(h, 0, 256 * sizeof *h);
    for (uint32_t t = 0; t < n; t += 4, seen += width)
        for (uint32_t c = 0; c < width; c++) h[(uint8_t)(smp[(uint64_t)t * width + c] - (bias ? bias[c] : 0))]++;
    return seen;
}

/* One step towards the biases under which the shared code is shortest: each channel moves by one binade when its
 * exponents are cheaper there. (Each channel's mean is where it starts; the mean alone costs 0.1 bits more.) */
static void refine(const uint8_t *smp, uint32_t n, uint32_t width, uint16_t *add, uint8_t *bias) {
    uint32_t h[256];
    uint8_t cost[COSTS];
    uint64_t seen = hist(smp, n, width, bias, h);
    double far = log2((double)seen + 1);
    for (int i = 0; i < COSTS; i++) {
        double b = i + 1 < COSTS ? far - log2(h[(uint8_t)(i - 8)] + 0.5) : far;
        cost[i] = (uint8_t)(b * 8 < 255 ? b * 8 : 255);
    }
    memset(add, 0, 3ull * width * sizeof *add);
    for (uint32_t t = 0; t < n; t++) costs(smp + (uint64_t)t * width, bias, cost, add, width);
    for (uint32_t c = 0; c < width; c++) {
        uint16_t down = add[c], stay = add[width + c], go = add[2ull * width + c];
        bias[c] = (uint8_t)(bias[c] + (go < stay && go <= down) - (down < stay && down < go));
    }
}

bool sl_bf16_bias(const uint16_t *x, uint32_t rows, uint32_t width, uint8_t *bias) {
    uint32_t n = rows < SAMPLE ? rows : SAMPLE, plain[256], biased[256], table[256] = {0};
    if (rows < 8) return false; /* too few tokens to earn back the table */
    uint8_t *smp = calloc((uint64_t)width, SAMPLE + 2);
    uint16_t *add = malloc(3ull * width * sizeof *add);
    uint32_t *sum = calloc(width, sizeof *sum);
    bool pays = false;
    if (smp && add && sum) {
        uint8_t *zero = smp + (uint64_t)width * SAMPLE, *trash = zero + width;
        for (uint32_t t = 0; t < n; t++) {
            uint8_t *e = smp + (uint64_t)t * width;
            sl_bf16_split(x + (uint64_t)t * rows / n * width, zero, trash, e, width);
            for (uint32_t c = 0; c < width; c++) sum[c] += e[c];
        }
        for (uint32_t c = 0; c < width; c++) bias[c] = (uint8_t)((sum[c] + n / 2) / n);
        for (int i = 0; i < 2; i++) refine(smp, n, width, add, bias);
        double seen = (double)hist(smp, n, width, NULL, plain);
        hist(smp, n, width, bias, biased);
        for (uint32_t c = 0; c < width; c++) table[bias[c]]++;
        double gain = (bits(plain, seen) - bits(biased, seen)) / seen * rows * width;
        pays = gain > bits(table, width) + 8 * 80;
    }
    free(smp);
    free(add);
    free(sum);
    return pays;
}
