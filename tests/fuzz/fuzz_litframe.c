/* What the reader of literal frames takes, libzstd must take too and give the same bytes. The input is a frame, or
 * (first byte odd) content that is made into one and then damaged in the bits that the next bytes say. */
#define ZSTD_STATIC_LINKING_ONLY
#include "stages/writer/litframe.h"
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

enum { MOST = 1 << 20 };

static void compare(const uint8_t *enc, size_t len) {
    static sl_lit l;
    static uint8_t block[SL_LIT_BLOCK + SL_LIT_SLACK];
    unsigned long long n = ZSTD_getFrameContentSize(enc, len);
    if (n > MOST || sl_lit_open(&l, enc, len, n)) return;
    uint8_t *ours = malloc(n + 1), *theirs = malloc(n + 1);
    uint64_t at = 0;
    uint32_t m = 0;
    int rc;
    while (!(rc = sl_lit_next(&l, block, &m)) && m) {
        if (m > n - at) abort();
        memcpy(ours + at, block, m);
        at += m;
    }
    if (!rc && (at != n || ZSTD_decompress(theirs, n, enc, len) != n || memcmp(ours, theirs, n))) abort();
    free(ours);
    free(theirs);
}

static size_t make(uint8_t *dst, size_t cap, const uint8_t *src, size_t n, unsigned step) {
    static ZSTD_CCtx *z;
    ZSTD_Sequence *q = calloc(n / step + 1, sizeof *q);
    size_t k = 0;
    for (size_t at = 0; at < n; at += step) q[k++].litLength = (unsigned)(n - at < step ? n - at : step);
    if (!z) {
        z = ZSTD_createCCtx();
        ZSTD_CCtx_setParameter(z, ZSTD_c_compressionLevel, -1000);
        ZSTD_CCtx_setParameter(z, ZSTD_c_literalCompressionMode, ZSTD_ps_enable);
        ZSTD_CCtx_setParameter(z, ZSTD_c_blockDelimiters, ZSTD_sf_explicitBlockDelimiters);
    }
    size_t r = ZSTD_compressSequences(z, dst, cap, q, k, src, n);
    free(q);
    return ZSTD_isError(r) ? 0 : r;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 16) return 0;
    if (!(data[0] & 1)) {
        uint8_t *exact = malloc(size - 1);
        memcpy(exact, data + 1, size - 1);
        compare(exact, size - 1);
        free(exact);
        return 0;
    }
    /* Bytes as they come are flat; a few bits of each make a steep distribution, whose codes differ in length. */
    size_t n = size - 16, cap = ZSTD_compressBound(n) + 1024;
    uint8_t *x = malloc(n + 1), *enc = malloc(cap), mask = data[1];
    for (size_t i = 0; i < n; i++) x[i] = data[16 + i] & mask;
    size_t len = n ? make(enc, cap, x, n, 40 + data[2] * 64u) : 0;
    compare(enc, len);
    for (int i = 3; len && i + 3 < 16; i += 3) {
        size_t bit = ((size_t)data[i] | (size_t)data[i + 1] << 8) % (len * 8);
        if (data[i + 2] & 1) enc[bit / 8] ^= (uint8_t)(1 << bit % 8);
        compare(enc, len);
    }
    free(x);
    free(enc);
    return 0;
}
