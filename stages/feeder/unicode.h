/* unicode: what the tokenizers need to know of characters: UTF-8 decoding and validation, the classes that
 * pre-tokenizer patterns name, and NFC.
 *
 * Classes come from a table made with the reference engine (gen_unicode.py), so that a pattern splits as it did when
 * the tokenizer was trained, whatever Unicode version the system's libraries have. */
#ifndef SL_FEEDER_UNICODE_H
#define SL_FEEDER_UNICODE_H
#include <stddef.h>
#include <stdint.h>

/* Class bits of a code point; at most one of the first seven (general category groups), any of the rest. */
enum {
    SL_UC_UPPER = 1 << 0,  /* Lu, Lt */
    SL_UC_LOWER = 1 << 1,  /* Ll */
    SL_UC_OTHER = 1 << 2,  /* Lm, Lo */
    SL_UC_MARK = 1 << 3,   /* M */
    SL_UC_NUM = 1 << 4,    /* N */
    SL_UC_PUNCT = 1 << 5,  /* P */
    SL_UC_SYM = 1 << 6,    /* S */
    SL_UC_SPACE = 1 << 7,  /* White_Space, which is what \s means */
    SL_UC_HAN = 1 << 8,    /* script Han */
    SL_UC_WORD = 1 << 9,   /* \w */
    SL_UC_MOVES = 1 << 10, /* the reference's NFC orders it among combining marks (meaningful for marks only) */
    SL_UC_NFC = 1 << 11,   /* NFC may change it or join it to the one before; without the bit it surely does neither */
    SL_UC_INERT = 1 << 12, /* a mark that the reference's NFC does not know: nothing moves or joins across it */
    SL_UC_LETTER = SL_UC_UPPER | SL_UC_LOWER | SL_UC_OTHER
};

/* Two-stage table, read-only after sl_unicode_init. */
extern uint16_t sl_unicode_block[0x110000 >> 8];
extern uint16_t sl_unicode_flags[][256];

/* Expands the table once (thread-safe, cheap to repeat). Must precede sl_unicode_class; loading a tokenizer does it. */
void sl_unicode_init(void);
/* cp must be below 0x110000. */
static inline unsigned sl_unicode_class(uint32_t cp) {
    return sl_unicode_flags[sl_unicode_block[cp >> 8]][cp & 255];
}

/* Decode the character at p of valid UTF-8; *len = its bytes (1 to 4). */
static inline uint32_t sl_utf8_decode(const uint8_t *p, unsigned *len) {
    uint32_t c = p[0];
    if (c < 0x80) return *len = 1, c;
    if (c < 0xe0) return *len = 2, (c & 0x1f) << 6 | (p[1] & 0x3f);
    if (c < 0xf0) return *len = 3, (c & 0x0f) << 12 | (uint32_t)(p[1] & 0x3f) << 6 | (p[2] & 0x3f);
    return *len = 4, (c & 0x07) << 18 | (uint32_t)(p[1] & 0x3f) << 12 | (uint32_t)(p[2] & 0x3f) << 6 | (p[3] & 0x3f);
}
/* Bytes of the character whose first byte is b (valid UTF-8). */
static inline unsigned sl_utf8_len(uint8_t b) {
    return b < 0x80 ? 1 : b < 0xe0 ? 2 : b < 0xf0 ? 3 : 4;
}
/* Encode cp (a scalar value) into out[4]; returns the bytes written. */
unsigned sl_utf8_encode(uint32_t cp, uint8_t out[4]);
/* Offset of the first byte that is not valid UTF-8 (no surrogates, no overlong forms, at most U+10FFFF); n when all is
 * valid. */
size_t sl_unicode_check(const uint8_t *p, size_t n);
#endif
