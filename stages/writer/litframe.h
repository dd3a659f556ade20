/* litframe: reads, block by block, the zstd frames that hold nothing but literals, as the exponent plane of codec bf16
 * does. libzstd reads them too; this is faster because a table lookup yields up to six symbols at a time, and because
 * the caller gets each block (at most 128 KiB) while it is in the cache.
 *
 * Format: RFC 8878 (frame header, block header, literals section, Huffman tree description, FSE-coded weights). What is
 * taken: a frame with its content size, without dictionary and checksum, whose blocks are raw, RLE, or compressed with
 * no sequences. Everything else, and everything damaged, is answered SL_LIT_OTHER: then libzstd is asked, which says
 * what is wrong. So what is decoded here is exactly what libzstd decodes, or nothing; tests/test_codec.c compares them.
 *
 * Every byte is hostile: nothing is read outside [src, src + len), nothing written outside the caller's block. */
#ifndef SL_WRITER_LITFRAME_H
#define SL_WRITER_LITFRAME_H
#include <stdbool.h>
#include <stdint.h>

enum {
    SL_LIT_BLOCK = 128u << 10, /* most bytes a block */
    SL_LIT_SLACK = 64,         /* bytes behind a block that may be overwritten */
    SL_LIT_LOG = 11            /* longest code */
};
enum { SL_LIT_OTHER = 1 };

typedef struct sl_lit { /* about 36 KiB: keep it in a context, not on the stack */
    const uint8_t *at, *end;
    const uint8_t *ahead, *ahead_end; /* a hint: bytes that the caller reads after the next block, fetched meanwhile */
    uint32_t most;                    /* bytes a block: SL_LIT_BLOCK, less when the frame's window is smaller */
    uint64_t left;                    /* bytes of content still to come */
    bool last, have_table;
    unsigned log;                    /* bits of an index into the tables */
    uint64_t multi[1 << SL_LIT_LOG]; /* byte 0 bits taken, byte 1 how many symbols, bytes 2..7 the symbols */
    uint64_t small[1 << SL_LIT_LOG]; /* scratch of their making */
    uint16_t one[1 << SL_LIT_LOG];   /* one symbol: low byte symbol, high byte bits */
} sl_lit;

/* Begin a frame of exactly `n` bytes of content. 0 or SL_LIT_OTHER. */
int sl_lit_open(sl_lit *l, const void *src, uint64_t len, uint64_t n);
/* The next block into dst (room for SL_LIT_BLOCK + SL_LIT_SLACK bytes); *n bytes of it, 0: the frame has ended and
 * everything fitted. 0 or SL_LIT_OTHER. */
int sl_lit_next(sl_lit *l, uint8_t *dst, uint32_t *n);
#endif
