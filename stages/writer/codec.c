#define ZSTD_STATIC_LINKING_ONLY /* ZSTD_c_literalCompressionMode is in the static-only part of the interface */
#include "stages/writer/codec.h"
#include "stages/writer/litframe.h"
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

struct sl_codec_ctx {
    ZSTD_CCtx *cz; /* codec zstd */
    ZSTD_CCtx *ch; /* Huffman only, for the exponent plane */
    ZSTD_DCtx *d;
    uint8_t *expo; /* scratch of one exponent plane */
    uint64_t expo_cap;
    uint8_t *bias; /* scratch: width bytes */
    uint64_t bias_cap;
    uint8_t *ref, *slots, *stored; /* scratch of repeated tokens: u32[rows], a hash table, the tokens that are stored */
    uint64_t ref_cap, slots_cap, stored_cap;
    sl_lit lit;
    uint8_t part[SL_LIT_BLOCK + SL_LIT_SLACK]; /* exponents of one zstd block: joined while they are in the cache */
};

int sl_codec_ctx_new(sl_codec_ctx **out, int zstd_level, sl_err *err) {
    sl_codec_ctx *c = calloc(1, sizeof *c);
    if (c) {
        c->cz = ZSTD_createCCtx();
        c->ch = ZSTD_createCCtx();
        c->d = ZSTD_createDCtx();
    }
    if (!c || !c->cz || !c->ch || !c->d) {
        sl_codec_ctx_free(c);
        return sl_err_set(err, SL_ETEMP, "no memory for a compression context");
    }
    ZSTD_CCtx_setParameter(c->cz, ZSTD_c_compressionLevel, zstd_level);
    /* The match finder only hurts on exponents: at level -1000 it finds nothing, and literals are Huffman-coded.
     * Negative levels switch literal compression off unless it is asked for, so the second parameter is what makes this
     * a codec. */
    ZSTD_CCtx_setParameter(c->ch, ZSTD_c_compressionLevel, -1000);
    if (ZSTD_isError(ZSTD_CCtx_setParameter(c->ch, ZSTD_c_literalCompressionMode, ZSTD_ps_enable)))
        ZSTD_CCtx_setParameter(c->ch, ZSTD_c_compressionLevel, 1);
    ZSTD_CCtx_setParameter(c->ch, ZSTD_c_blockDelimiters, ZSTD_sf_explicitBlockDelimiters);
    *out = c;
    return 0;
}

void sl_codec_ctx_free(sl_codec_ctx *c) {
    if (!c) return;
    ZSTD_freeCCtx(c->cz);
    ZSTD_freeCCtx(c->ch);
    ZSTD_freeDCtx(c->d);
    free(c->expo);
    free(c->bias);
    free(c->ref);
    free(c->slots);
    free(c->stored);
    free(c);
}

static int scratch(uint8_t **p, uint64_t *cap, uint64_t need, sl_err *err) {
    if (*cap >= need) return 0;
    free(*p);
    *p = malloc(need + 64);
    *cap = *p ? need : 0;
    return *p ? 0 : sl_err_set(err, SL_ETEMP, "no memory for %llu bytes of codec scratch", (unsigned long long)need);
}

/* One zstd frame that must give exactly n bytes. */
static int unframe(sl_codec_ctx *c, const void *src, uint64_t len, void *dst, uint64_t n, const char *what,
                   sl_err *err) {
    size_t r = ZSTD_decompressDCtx(c->d, dst, n, src, len);
    if (ZSTD_isError(r)) return sl_err_set(err, SL_EDATA, "%s: zstd says %s", what, ZSTD_getErrorName(r));
    if (r != n)
        return sl_err_set(err, SL_EDATA, "%s: %llu bytes, expected %llu", what, (unsigned long long)r,
                          (unsigned long long)n);
    return 0;
}

static uint64_t none_bound(sl_block b) {
    return sl_block_bytes(b);
}

static int none_encode(sl_codec_ctx *c, sl_block b, const void *src, void *dst, uint64_t cap, uint64_t *len,
                       sl_err *err) {
    (void)c, (void)cap, (void)err;
    memcpy(dst, src, sl_block_bytes(b));
    *len = sl_block_bytes(b);
    return 0;
}

static int none_decode(sl_codec_ctx *c, sl_block b, const void *src, uint64_t len, void *dst, sl_err *err) {
    (void)c;
    if (len != sl_block_bytes(b))
        return sl_err_set(err, SL_EDATA, "codec none: %llu bytes, expected %llu", (unsigned long long)len,
                          (unsigned long long)sl_block_bytes(b));
    memcpy(dst, src, len);
    return 0;
}

static uint64_t zstd_bound(sl_block b) {
    return ZSTD_compressBound(sl_block_bytes(b));
}

static int zstd_encode(sl_codec_ctx *c, sl_block b, const void *src, void *dst, uint64_t cap, uint64_t *len,
                       sl_err *err) {
    size_t r = ZSTD_compress2(c->cz, dst, cap, src, sl_block_bytes(b));
    if (ZSTD_isError(r)) return sl_err_set(err, SL_EINTERNAL, "codec zstd: %s", ZSTD_getErrorName(r));
    *len = r;
    return 0;
}

static int zstd_decode(sl_codec_ctx *c, sl_block b, const void *src, uint64_t len, void *dst, sl_err *err) {
    return unframe(c, src, len, dst, sl_block_bytes(b), "codec zstd", err);
}

static uint64_t bf16_bound(sl_block b) {
    uint64_t n = (uint64_t)b.rows * b.width;
    return sizeof(sl_bf16_head) + ZSTD_compressBound(4ull * b.rows) + ZSTD_compressBound(b.width) + n +
           ZSTD_compressBound(n);
}

/* Tokens that are the same as an earlier one, as an embedding's are. c->ref gets the table that is stored; returns how
 * many tokens are left, all of them when the table would not pay. A token is looked up by its first and middle bytes,
 * which costs next to nothing where nothing repeats. */
static int find_repeats(sl_codec_ctx *c, sl_block b, const uint8_t *src, uint32_t *stored, sl_err *err) {
    uint64_t rb = (uint64_t)b.width * 2, cap = 64;
    *stored = b.rows;
    if (b.width < 32 || b.rows < 16) return 0;
    while (cap < 2ull * b.rows) cap *= 2;
    if (scratch(&c->ref, &c->ref_cap, 4ull * b.rows, err) || scratch(&c->slots, &c->slots_cap, 8 * cap, err))
        return SL_ETEMP;
    uint32_t *ref = (uint32_t *)(void *)c->ref, n = 0;
    struct {
        uint32_t row1, at; /* row + 1, its place among the stored */
    } *slot = (void *)c->slots;
    memset(slot, 0, 8 * cap);
    for (uint32_t t = 0; t < b.rows; t++) {
        const uint8_t *x = src + t * rb;
        uint64_t w[2];
        memcpy(&w[0], x, 8);
        memcpy(&w[1], x + rb / 2, 8);
        uint64_t i = ((w[0] ^ w[1] * 0x9e3779b97f4a7c15ull) * 0xff51afd7ed558ccdull) >> 32 & (cap - 1);
        for (; slot[i].row1 && memcmp(src + (slot[i].row1 - 1) * rb, x, rb); i = (i + 1) & (cap - 1)) {}
        ref[t] = slot[i].row1 ? slot[i].at + 1 : 0;
        if (slot[i].row1) continue;
        slot[i].row1 = t + 1;
        slot[i].at = n++;
    }
    if ((uint64_t)(b.rows - n) * rb > 4ull * b.rows + 256) *stored = n;
    return 0;
}

/* Put the stored tokens one behind the other. */
static int gather_stored(sl_codec_ctx *c, sl_block b, const uint8_t *src, uint32_t stored, sl_err *err) {
    const uint32_t *ref = (const uint32_t *)(const void *)c->ref;
    uint64_t rb = (uint64_t)b.width * 2, n = 0;
    if (scratch(&c->stored, &c->stored_cap, stored * rb, err)) return SL_ETEMP;
    for (uint32_t t = 0; t < b.rows; t++)
        if (!ref[t]) memcpy(c->stored + n++ * rb, src + t * rb, rb);
    return 0;
}

static int frame(ZSTD_CCtx *z, void *dst, uint64_t cap, const void *src, uint64_t n, uint32_t *len, const char *what,
                 sl_err *err) {
    size_t r = ZSTD_compress2(z, dst, cap, src, n);
    if (ZSTD_isError(r)) return sl_err_set(err, SL_EINTERNAL, "codec bf16: %s: %s", what, ZSTD_getErrorName(r));
    *len = (uint32_t)r;
    return 0;
}

/* A frame of nothing but literals: the match finder is told what it would find, block by block. That spares its time,
 * and the frame is of the kind that litframe.h reads. */
static int literal_frame(ZSTD_CCtx *z, void *dst, uint64_t cap, const void *src, uint64_t n, uint32_t *len,
                         const char *what, sl_err *err) {
    ZSTD_Sequence block[64] = {{0}};
    size_t blocks = 0;
    for (uint64_t at = 0; at < n && blocks < 64; at += SL_LIT_BLOCK)
        block[blocks++].litLength = (unsigned)(n - at < SL_LIT_BLOCK ? n - at : SL_LIT_BLOCK);
    if (!n || n > 64ull * SL_LIT_BLOCK) return frame(z, dst, cap, src, n, len, what, err);
    size_t r = ZSTD_compressSequences(z, dst, cap, block, blocks, src, n);
    if (ZSTD_isError(r)) return frame(z, dst, cap, src, n, len, what, err);
    *len = (uint32_t)r;
    return 0;
}

static int bf16_encode(sl_codec_ctx *c, sl_block b, const void *src, void *dst, uint64_t cap, uint64_t *len,
                       sl_err *err) {
    uint64_t at = sizeof(sl_bf16_head);
    sl_bf16_head h = {.version = 1};
    uint8_t *o = dst;
    uint32_t stored;
    int rc = find_repeats(c, b, src, &stored, err);
    if (!rc && stored < b.rows) {
        h.flags = SL_BF16_REPEATS;
        if (!(rc = gather_stored(c, b, src, stored, err)))
            rc = frame(c->cz, o + at, cap - at, c->ref, 4ull * b.rows, &h.ref_len, "repeats", err);
        at += h.ref_len;
        src = c->stored;
    }
    uint64_t n = (uint64_t)stored * b.width;
    if (rc || scratch(&c->expo, &c->expo_cap, n, err) || scratch(&c->bias, &c->bias_cap, b.width, err))
        return rc ? rc : SL_ETEMP;
    if (sl_bf16_bias(src, stored, b.width, c->bias)) {
        if ((rc = literal_frame(c->ch, o + at, cap - at, c->bias, b.width, &h.bias_len, "bias", err))) return rc;
        at += h.bias_len;
    } else {
        memset(c->bias, 0, b.width);
    }
    for (uint32_t t = 0; t < stored; t++) {
        uint64_t e = (uint64_t)t * b.width;
        sl_bf16_split((const uint16_t *)src + e, c->bias, o + at + e, c->expo + e, b.width);
    }
    at += n;
    if ((rc = literal_frame(c->ch, o + at, cap - at, c->expo, n, &h.exp_len, "exponents", err))) return rc;
    memcpy(o, &h, sizeof h);
    *len = at + h.exp_len;
    return 0;
}

/* The table of repeats: every reference to a token stored before. */
static int read_repeats(sl_codec_ctx *c, sl_block b, const uint8_t *s, uint32_t len, uint32_t *stored, sl_err *err) {
    if (scratch(&c->ref, &c->ref_cap, 4ull * b.rows, err)) return SL_ETEMP;
    int rc = unframe(c, s, len, c->ref, 4ull * b.rows, "codec bf16: repeats", err);
    const uint32_t *ref = (const uint32_t *)(const void *)c->ref;
    uint32_t n = 0;
    for (uint32_t t = 0; !rc && t < b.rows; t++) {
        if (ref[t] > n)
            rc = sl_err_set(err, SL_EDATA, "codec bf16: token %u repeats stored token %u of %u", t, ref[t] - 1, n);
        n += !ref[t];
    }
    *stored = n;
    return rc;
}

/* Exponents of elements [at, at + n) of the block and their mantissas become elements. */
static void join_part(const uint8_t *mant, const uint8_t *expo, const uint8_t *bias, uint16_t *out, uint32_t width,
                      uint64_t at, uint64_t n) {
    for (uint64_t e = 0; e < n;) {
        uint64_t c = (at + e) % width, m = width - c < n - e ? width - c : n - e;
        sl_bf16_join(mant + at + e, expo + e, bias + c, out + at + e, m);
        e += m;
    }
}

/* Both planes of n elements, block by block of the exponents' frame where it is of the kind that litframe.h reads. */
static int join_planes(sl_codec_ctx *c, const uint8_t *mant, uint64_t n, uint32_t width, uint64_t exp_len,
                       uint16_t *out, sl_err *err) {
    uint64_t at = 0;
    uint32_t m = 0;
    int rc = sl_lit_open(&c->lit, mant + n, exp_len, n);
    for (;;) {
        c->lit.ahead = mant + at;
        c->lit.ahead_end = mant + (n - at < SL_LIT_BLOCK ? n : at + SL_LIT_BLOCK);
        if (rc || (rc = sl_lit_next(&c->lit, c->part, &m)) || !m) break;
        join_part(mant, c->part, c->bias, out, width, at, m);
        at += m;
    }
    if (!rc) return 0;
    if (scratch(&c->expo, &c->expo_cap, n, err)) return SL_ETEMP;
    if ((rc = unframe(c, mant + n, exp_len, c->expo, n, "codec bf16: exponents", err))) return rc;
    join_part(mant, c->expo, c->bias, out, width, 0, n);
    return 0;
}

static int bf16_decode(sl_codec_ctx *c, sl_block b, const void *src, uint64_t len, void *dst, sl_err *err) {
    uint64_t at = sizeof(sl_bf16_head), rb = (uint64_t)b.width * 2;
    const uint8_t *s = src;
    uint32_t stored = b.rows;
    sl_bf16_head h;
    if (b.elem_size != 2) return sl_err_set(err, SL_EDATA, "codec bf16: elements of %u bytes", b.elem_size);
    if (len < sizeof h) return sl_err_set(err, SL_EDATA, "codec bf16: %llu bytes", (unsigned long long)len);
    memcpy(&h, s, sizeof h);
    bool repeats = h.flags == SL_BF16_REPEATS;
    if (h.version != 1 || (h.flags && !repeats) || (!repeats && h.ref_len))
        return sl_err_set(err, SL_EDATA, "codec bf16: version %u flags %u", h.version, h.flags);
    if (h.ref_len > len - at) return sl_err_set(err, SL_EDATA, "codec bf16: repeats of %u bytes", h.ref_len);
    int rc = repeats ? read_repeats(c, b, s + at, h.ref_len, &stored, err) : 0;
    if (rc) return rc;
    at += h.ref_len;
    uint64_t n = (uint64_t)stored * b.width;
    if (at + h.bias_len + n + h.exp_len != len)
        return sl_err_set(err, SL_EDATA, "codec bf16: parts of %u + %u + %llu + %u bytes do not make %llu", h.ref_len,
                          h.bias_len, (unsigned long long)n, h.exp_len, (unsigned long long)len);
    if (scratch(&c->bias, &c->bias_cap, b.width, err)) return SL_ETEMP;
    if (repeats && scratch(&c->stored, &c->stored_cap, stored * rb, err)) return SL_ETEMP;
    if (h.bias_len)
        rc = unframe(c, s + at, h.bias_len, c->bias, b.width, "codec bf16: bias", err);
    else
        memset(c->bias, 0, b.width);
    at += h.bias_len;
    uint16_t *out = repeats ? (uint16_t *)(void *)c->stored : dst;
    if (!rc) rc = join_planes(c, s + at, n, b.width, h.exp_len, out, err);
    const uint32_t *ref = (const uint32_t *)(const void *)c->ref;
    for (uint32_t t = 0, k = 0; repeats && !rc && t < b.rows; t++)
        memcpy((uint8_t *)dst + t * rb, c->stored + (ref[t] ? ref[t] - 1 : k++) * rb, rb);
    return rc;
}

static const struct codec {
    const char *name;
    uint64_t (*bound)(sl_block b);
    int (*encode)(sl_codec_ctx *c, sl_block b, const void *src, void *dst, uint64_t cap, uint64_t *len, sl_err *err);
    int (*decode)(sl_codec_ctx *c, sl_block b, const void *src, uint64_t len, void *dst, sl_err *err);
} codecs[] = {
    [SL_CODEC_NONE] = {"none", none_bound, none_encode, none_decode},
    [SL_CODEC_ZSTD] = {"zstd", zstd_bound, zstd_encode, zstd_decode},
    [SL_CODEC_BF16] = {"bf16", bf16_bound, bf16_encode, bf16_decode},
};
enum { N_CODECS = sizeof codecs / sizeof codecs[0] };

const char *sl_codec_name(uint32_t codec) {
    return codec < N_CODECS ? codecs[codec].name : "?";
}

int sl_codec_parse(const char *name, uint32_t *codec) {
    for (uint32_t i = 0; i < N_CODECS; i++)
        if (!strcmp(name, codecs[i].name)) {
            *codec = i;
            return 0;
        }
    return SL_EUSAGE;
}

uint64_t sl_codec_bound(sl_block b) {
    uint64_t m = 0;
    for (uint32_t i = 0; i < N_CODECS; i++) {
        uint64_t v = codecs[i].bound(b);
        if (v > m) m = v;
    }
    return m;
}

int sl_codec_encode(sl_codec_ctx *c, uint32_t codec, sl_block b, const void *src, void *dst, uint64_t cap,
                    uint64_t *len, uint32_t *used, sl_err *err) {
    if (codec >= N_CODECS) return sl_err_set(err, SL_EINTERNAL, "codec %u is unknown", codec);
    if (cap < sl_codec_bound(b)) return sl_err_set(err, SL_EINTERNAL, "codec buffer too small");
    if (codec == SL_CODEC_BF16 && b.elem_size != 2) codec = SL_CODEC_ZSTD;
    int rc = codecs[codec].encode(c, b, src, dst, cap, len, err);
    if (!rc && codec != SL_CODEC_NONE && *len >= sl_block_bytes(b)) {
        codec = SL_CODEC_NONE;
        rc = codecs[codec].encode(c, b, src, dst, cap, len, err);
    }
    *used = codec;
    return rc;
}

int sl_codec_decode(sl_codec_ctx *c, uint32_t codec, sl_block b, const void *src, uint64_t len, void *dst,
                    sl_err *err) {
    if (codec >= N_CODECS) return sl_err_set(err, SL_EDATA, "codec %u is unknown to this version", codec);
    return codecs[codec].decode(c, b, src, len, dst, err);
}
