#include "stages/gather/scan.h"
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define ABS16 0x7fffu
#define INF16 0x7f80u /* bf16: exponent all ones */
#define ABS32 0x7fffffffu
#define INF32 0x7f800000u

static uint32_t count_nonfinite(const uint8_t *p, uint32_t elems, uint32_t elem_size) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < elems; i++) {
        if (elem_size == 2) {
            uint16_t v;
            memcpy(&v, p + 2 * (uint64_t)i, 2);
            n += (v & ABS16) >= INF16;
        } else {
            uint32_t v;
            memcpy(&v, p + 4 * (uint64_t)i, 4);
            n += (v & ABS32) >= INF32;
        }
    }
    return n;
}

/* Words from byte `from` on; `word` is the index of the word before. Returns the largest magnitude seen, as bits. */
static uint32_t tail(const uint8_t *p, uint64_t from, uint64_t bytes, uint64_t word, uint32_t elem_size, sl_scan *s) {
    uint32_t max = 0;
    for (uint64_t at = from; at < bytes; at += 4) {
        uint32_t w = 0;
        memcpy(&w, p + at, bytes - at < 4 ? bytes - at : 4);
        word++;
        s->a += w;
        s->b += word * w;
        uint32_t m = w & ABS32;
        if (elem_size == 2) m = (w & ABS16) > (w >> 16 & ABS16) ? w & ABS16 : w >> 16 & ABS16;
        if (m > max) max = m;
    }
    return max;
}

/* The maximum magnitude tells both: zero when it is 0, and whether it is worth counting NaN and Inf (a second pass over
 * one token, only when there is one). */
static void conclude(const uint8_t *p, uint32_t elems, uint32_t elem_size, uint32_t max, sl_scan *s) {
    s->zero = max == 0;
    s->nonfinite = max >= (elem_size == 2 ? INF16 : INF32) ? count_nonfinite(p, elems, elem_size) : 0;
}

void sl_scan_token_scalar(const void *data, uint32_t elems, uint32_t elem_size, sl_scan *out) {
    *out = (sl_scan){0};
    uint32_t max = tail(data, 0, (uint64_t)elems * elem_size, 0, elem_size, out);
    conclude(data, elems, elem_size, max, out);
}

#if defined(__x86_64__)
/* Sums as in ipc/sum64.c: per lane A = sum of words, P = sum of the prefix sums of A; b = L*(n*A - P) + (lane+1)*A. */
__attribute__((target("avx512f,avx512bw"))) void sl_scan_token_avx512(const void *data, uint32_t elems,
                                                                      uint32_t elem_size, sl_scan *out) {
    const uint8_t *p = data;
    uint64_t bytes = (uint64_t)elems * elem_size, n = bytes / 64;
    __m512i ae = _mm512_setzero_si512(), ao = ae, pe = ae, po = ae, mx = ae, low = _mm512_set1_epi64(0xffffffff);
    __m512i abs = elem_size == 2 ? _mm512_set1_epi16((short)ABS16) : _mm512_set1_epi32((int)ABS32);
    if (elem_size == 2) {
        for (uint64_t i = 0; i < n; i++) {
            __m512i v = _mm512_loadu_si512(p + 64 * i);
            ae = _mm512_add_epi64(ae, _mm512_and_si512(v, low));
            ao = _mm512_add_epi64(ao, _mm512_srli_epi64(v, 32));
            pe = _mm512_add_epi64(pe, ae);
            po = _mm512_add_epi64(po, ao);
            mx = _mm512_max_epu16(mx, _mm512_and_si512(v, abs));
        }
    } else {
        for (uint64_t i = 0; i < n; i++) {
            __m512i v = _mm512_loadu_si512(p + 64 * i);
            ae = _mm512_add_epi64(ae, _mm512_and_si512(v, low));
            ao = _mm512_add_epi64(ao, _mm512_srli_epi64(v, 32));
            pe = _mm512_add_epi64(pe, ae);
            po = _mm512_add_epi64(po, ao);
            mx = _mm512_max_epu32(mx, _mm512_and_si512(v, abs));
        }
    }
    uint64_t E[8], O[8], PS[8];
    _mm512_storeu_si512(E, ae);
    _mm512_storeu_si512(O, ao);
    _mm512_storeu_si512(PS, _mm512_add_epi64(pe, po));
    uint64_t sa = 0, sb = 0, sp = 0;
    for (unsigned l = 0; l < 8; l++) {
        sa += E[l] + O[l];
        sp += PS[l];
        sb += (2 * l + 1) * E[l] + (2 * l + 2) * O[l];
    }
    *out = (sl_scan){.a = sa, .b = 16 * (n * sa - sp) + sb};
    uint32_t max = 0;
    if (elem_size == 2) {
        __m512i hi = _mm512_srli_epi32(mx, 16), lo = _mm512_and_si512(mx, _mm512_set1_epi32(0xffff));
        max = _mm512_reduce_max_epu32(_mm512_max_epu32(hi, lo));
    } else {
        max = _mm512_reduce_max_epu32(mx);
    }
    uint32_t m = tail(p, 64 * n, bytes, 16 * n, elem_size, out);
    conclude(p, elems, elem_size, m > max ? m : max, out);
}

__attribute__((target("avx2"))) void sl_scan_token_avx2(const void *data, uint32_t elems, uint32_t elem_size,
                                                        sl_scan *out) {
    const uint8_t *p = data;
    uint64_t bytes = (uint64_t)elems * elem_size, n = bytes / 32;
    __m256i ae = _mm256_setzero_si256(), ao = ae, pe = ae, po = ae, mx = ae, low = _mm256_set1_epi64x(0xffffffff);
    __m256i abs = elem_size == 2 ? _mm256_set1_epi16((short)ABS16) : _mm256_set1_epi32((int)ABS32);
    for (uint64_t i = 0; i < n; i++) {
        __m256i v = _mm256_loadu_si256((const __m256i *)(const void *)(p + 32 * i)), m = _mm256_and_si256(v, abs);
        ae = _mm256_add_epi64(ae, _mm256_and_si256(v, low));
        ao = _mm256_add_epi64(ao, _mm256_srli_epi64(v, 32));
        pe = _mm256_add_epi64(pe, ae);
        po = _mm256_add_epi64(po, ao);
        mx = elem_size == 2 ? _mm256_max_epu16(mx, m) : _mm256_max_epu32(mx, m);
    }
    uint64_t E[4], O[4], PS[4], sa = 0, sb = 0, sp = 0;
    uint32_t M[8], max = 0;
    _mm256_storeu_si256((__m256i *)(void *)E, ae);
    _mm256_storeu_si256((__m256i *)(void *)O, ao);
    _mm256_storeu_si256((__m256i *)(void *)PS, _mm256_add_epi64(pe, po));
    _mm256_storeu_si256((__m256i *)(void *)M, mx);
    for (unsigned l = 0; l < 4; l++) {
        sa += E[l] + O[l];
        sp += PS[l];
        sb += (2 * l + 1) * E[l] + (2 * l + 2) * O[l];
    }
    for (unsigned l = 0; l < 8; l++) {
        uint32_t m = elem_size == 4 ? M[l] : (M[l] & 0xffff) > M[l] >> 16 ? M[l] & 0xffff : M[l] >> 16;
        if (m > max) max = m;
    }
    *out = (sl_scan){.a = sa, .b = 8 * (n * sa - sp) + sb};
    uint32_t m = tail(p, 32 * n, bytes, 8 * n, elem_size, out);
    conclude(p, elems, elem_size, m > max ? m : max, out);
}
#endif

void sl_scan_token(const void *data, uint32_t elems, uint32_t elem_size, sl_scan *out) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw")) {
        sl_scan_token_avx512(data, elems, elem_size, out);
        return;
    }
    if (__builtin_cpu_supports("avx2")) {
        sl_scan_token_avx2(data, elems, elem_size, out);
        return;
    }
#endif
    sl_scan_token_scalar(data, elems, elem_size, out);
}
