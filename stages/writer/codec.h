/* codec: how the bytes of a block become the payload of a STATE frame, and back. A codec is a row of one table.
 *
 * A block is `rows` tokens of one state: rows * width elements of elem_size bytes (2 = bf16, 4 = f32), row-major.
 *   none  the bytes as they are
 *   zstd  one standard zstd frame of the bytes; `zstd -d` reads it
 *   bf16  sl_bf16_head, then
 *           ref_len bytes, with flag SL_BF16_REPEATS only: zstd frame of u32[rows]: 0, the token is stored, as the next
 *             of the planes; v + 1, it is the same as stored token v (tokens of the embedding output repeat exactly)
 *           bias_len bytes: zstd frame of the per-channel exponent bias, u8[width] (absent: bias_len 0, bias is 0)
 *           n bytes: sign+mantissa plane, low byte of the element rotated left by one (mantissa << 1 | sign)
 *           exp_len bytes: zstd frame of the exponent plane, n bytes u8 (exponent - bias[channel]) mod 256. Ours hold
 *             literals only, no matches (there are none worth having), which litframe.h reads fast; any zstd frame is
 *             good
 *         with n = width * tokens stored (all of them without the flag). Lossless for every bit pattern.
 *
 * Blocks that do not shrink (or are f32) are stored by the fall-back the frame header names. All sizes are in the frame
 * header, so a decoder knows rows, width and elem_size; whatever does not fit them is SL_EDATA.
 *
 * Left out, because real states do not pay for it (SmolLM2-135M, 18,220 tokens, H[2] H[15] H[27] H[30], bits an element
 * of 16, tests/interop/entropy.py): the state captured before as a predictor. Exponents with a bias a channel
 * need 2.74, 2.64, 2.62, 2.62; the difference to the state before 3.21, 3.27, 3.04; knowing the state before
 * leaves 2.62, 2.60, 2.54 and saves 0.02, 0.02 and 0.14 of the sign: 0.4 to 2 % of what is stored, and a state could no
 * longer be read alone. One table for all blocks would save a tree of some 50 bytes in 128 KiB of exponents, 0.1 %, and
 * fit each block worse.
 *
 * A context is one thread's scratch memory; create one a thread. */
#ifndef SL_WRITER_CODEC_H
#define SL_WRITER_CODEC_H
#include "ipc/boot.h"

typedef struct sl_block {
    uint32_t rows, width, elem_size;
} sl_block;
static inline uint64_t sl_block_bytes(sl_block b) {
    return (uint64_t)b.rows * b.width * b.elem_size;
}

enum { SL_BF16_REPEATS = 1 };
typedef struct sl_bf16_head {
    uint8_t version; /* 1 */
    uint8_t flags;   /* 0 or SL_BF16_REPEATS */
    uint16_t pad;
    uint32_t bias_len, exp_len;
    uint32_t ref_len; /* 0 without the flag */
} sl_bf16_head;
_Static_assert(sizeof(sl_bf16_head) == 16, "");

typedef struct sl_codec_ctx sl_codec_ctx;
int sl_codec_ctx_new(sl_codec_ctx **out, int zstd_level,
                     sl_err *err); /* level 1..19 for codec zstd; SL_ETEMP: no memory */
void sl_codec_ctx_free(sl_codec_ctx *c);

const char *sl_codec_name(uint32_t codec);             /* "none", "zstd", "bf16"; "?" out of range */
int sl_codec_parse(const char *name, uint32_t *codec); /* 0 or SL_EUSAGE */
/* Upper bound of the encoded size of a block in any codec. */
uint64_t sl_codec_bound(sl_block b);
/* Encode src (sl_block_bytes(b) bytes) into dst (cap >= sl_codec_bound). `codec` is what is wanted, *used what was
 * done: bf16 of f32 states becomes zstd, anything that does not shrink becomes none. */
int sl_codec_encode(sl_codec_ctx *c, uint32_t codec, sl_block b, const void *src, void *dst, uint64_t cap,
                    uint64_t *len, uint32_t *used, sl_err *err);
/* Decode hostile bytes into dst (exactly sl_block_bytes(b)). SL_EDATA says what is wrong. */
int sl_codec_decode(sl_codec_ctx *c, uint32_t codec, sl_block b, const void *src, uint64_t len, void *dst, sl_err *err);

/* The bf16 planes (codec_bf16.c), for tests and the bench: n elements of one token, bias u8[n]. SIMD where the CPU has
 * it; the _scalar twins give the same bytes. */
void sl_bf16_split(const uint16_t *x, const uint8_t *bias, uint8_t *mant, uint8_t *expo, uint64_t n);
void sl_bf16_join(const uint8_t *mant, const uint8_t *expo, const uint8_t *bias, uint16_t *x, uint64_t n);
void sl_bf16_split_scalar(const uint16_t *x, const uint8_t *bias, uint8_t *mant, uint8_t *expo, uint64_t n);
void sl_bf16_join_scalar(const uint8_t *mant, const uint8_t *expo, const uint8_t *bias, uint16_t *x, uint64_t n);
/* For each channel the cost in bits/8 of its sampled exponents under the biases b - 1, b, b + 1, added to add,
 * u16[3][width]: cost[] is a table over exponent - bias + 8, whose last entry also stands for everything out of
 * range. */
enum { SL_BF16_COSTS = 16 };
void sl_bf16_costs_scalar(const uint8_t *smp, const uint8_t *bias, const uint8_t *cost, uint16_t *add, uint64_t width);
#if defined(__x86_64__) /* what a CPU without AVX-512 takes; only where there is AVX2 */
void sl_bf16_split_avx2(const uint16_t *x, const uint8_t *bias, uint8_t *mant, uint8_t *expo, uint64_t n);
void sl_bf16_join_avx2(const uint8_t *mant, const uint8_t *expo, const uint8_t *bias, uint16_t *x, uint64_t n);
void sl_bf16_costs_avx2(const uint8_t *smp, const uint8_t *bias, const uint8_t *cost, uint16_t *add, uint64_t width);
#endif
/* Choose the bias of each channel from a sample of the block's tokens; returns whether it pays against none. `hist` is
 * scratch of width * 32 bytes. */
bool sl_bf16_bias(const uint16_t *x, uint32_t rows, uint32_t width, uint8_t *bias);
#endif
