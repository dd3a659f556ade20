#include "stages/feeder/unicode.h"
#include <pthread.h>
#include <string.h>
#include <utf8proc.h>

static const struct {
    uint32_t first, last;
    uint16_t flags;
} ranges[] = {
#include "stages/feeder/unicode_ranges.inc"
};

#define MAX_BLOCKS 512
uint16_t sl_unicode_block[0x110000 >> 8];
uint16_t sl_unicode_flags[MAX_BLOCKS][256];
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Does NFC leave this character, standing alone, as it is? */
static int nfc_stable(uint32_t cp) {
    utf8proc_int32_t buf[32];
    int last = 0;
    utf8proc_ssize_t n =
        utf8proc_decompose_char((utf8proc_int32_t)cp, buf, 32, UTF8PROC_STABLE | UTF8PROC_DECOMPOSE, &last);
    if (n < 1 || n > 32) return 0;
    n = utf8proc_normalize_utf32(buf, n, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    return n == 1 && (uint32_t)buf[0] == cp;
}

static uint16_t nfc_flag(uint32_t cp, unsigned known) {
    if (cp < 0x300) return 0; /* composed already, and nothing here combines backwards */
    const utf8proc_property_t *u = utf8proc_get_property((utf8proc_int32_t)cp);
    if (u->combining_class > 1 && !(known & SL_UC_MOVES)) return SL_UC_INERT;
    int second = u->comb_index != UINT16_MAX && u->comb_index >= 0x8000;
    int jamo = cp >= 0x1160 && cp < 0x1200; /* Hangul vowels and finals join the syllable before them by rule */
    if (u->combining_class || second || jamo) return SL_UC_NFC;
    return u->decomp_seqindex != UINT16_MAX && u->decomp_type == 0 && !nfc_stable(cp) ? SL_UC_NFC : 0;
}

/* Block of 256 equal to `want`, shared where one exists: uniform ideograph planes collapse into a single block. */
static uint16_t block_of(const uint16_t want[256], unsigned *n) {
    for (unsigned i = 0; i < *n; i++)
        if (!memcmp(sl_unicode_flags[i], want, sizeof sl_unicode_flags[0])) return (uint16_t)i;
    memcpy(sl_unicode_flags[*n], want, sizeof sl_unicode_flags[0]);
    return (uint16_t)(*n)++;
}

static void expand(void) {
    unsigned n = 0;
    size_t r = 0;
    const size_t nr = sizeof ranges / sizeof ranges[0];
    for (uint32_t b = 0; b < 0x110000 >> 8; b++) {
        uint16_t blk[256] = {0};
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t cp = b << 8 | i;
            while (r < nr && ranges[r].last < cp) r++;
            unsigned f = r < nr && ranges[r].first <= cp ? ranges[r].flags : 0;
            blk[i] = (uint16_t)(f | nfc_flag(cp, f));
        }
        sl_unicode_block[b] = block_of(blk, &n);
    }
}

void sl_unicode_init(void) {
    pthread_once(&once, expand);
}

unsigned sl_utf8_encode(uint32_t cp, uint8_t out[4]) {
    if (cp < 0x80) return out[0] = (uint8_t)cp, 1;
    if (cp < 0x800) {
        out[0] = (uint8_t)(0xc0 | cp >> 6);
        out[1] = (uint8_t)(0x80 | (cp & 0x3f));
        return 2;
    }
    if (cp < 0x10000) {
        out[0] = (uint8_t)(0xe0 | cp >> 12);
        out[1] = (uint8_t)(0x80 | (cp >> 6 & 0x3f));
        out[2] = (uint8_t)(0x80 | (cp & 0x3f));
        return 3;
    }
    out[0] = (uint8_t)(0xf0 | cp >> 18);
    out[1] = (uint8_t)(0x80 | (cp >> 12 & 0x3f));
    out[2] = (uint8_t)(0x80 | (cp >> 6 & 0x3f));
    out[3] = (uint8_t)(0x80 | (cp & 0x3f));
    return 4;
}

/* Length of the valid multi-byte character at p, 0 when it is not one. */
static unsigned char_ok(const uint8_t *p, size_t left) {
    unsigned need = p[0] >= 0xc2 && p[0] < 0xe0   ? 2
                    : p[0] >= 0xe0 && p[0] < 0xf0 ? 3
                    : p[0] >= 0xf0 && p[0] < 0xf5 ? 4
                                                  : 0;
    if (!need || left < need) return 0;
    for (unsigned i = 1; i < need; i++)
        if ((p[i] & 0xc0) != 0x80) return 0;
    if (p[0] == 0xe0 && p[1] < 0xa0) return 0; /* overlong */
    if (p[0] == 0xed && p[1] > 0x9f) return 0; /* surrogates */
    if (p[0] == 0xf0 && p[1] < 0x90) return 0; /* overlong */
    if (p[0] == 0xf4 && p[1] > 0x8f) return 0; /* above U+10FFFF */
    return need;
}

size_t sl_unicode_check(const uint8_t *p, size_t n) {
    size_t i = 0;
    while (i < n) {
        if (p[i] < 0x80) {
            uint64_t w;
            while (i + 8 <= n && (memcpy(&w, p + i, 8), !(w & 0x8080808080808080u))) i += 8;
            while (i < n && p[i] < 0x80) i++;
            continue;
        }
        unsigned k = char_ok(p + i, n - i);
        if (!k) return i;
        i += k;
    }
    return n;
}
