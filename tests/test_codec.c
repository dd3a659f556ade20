/* codec: every bf16 bit pattern, random blocks, NaN payloads; SIMD against scalar; the zstd program as judge. */
#define ZSTD_STATIC_LINKING_ONLY
#include "stages/writer/codec.h"
#include "stages/writer/litframe.h"
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>
#include <zstd.h>

static uint64_t seed = 88172645463325252ull;
static uint64_t rnd(void) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    return seed ^= seed << 17;
}
static double gauss(void) {
    double a = ((double)(rnd() >> 11) + .5) / 9007199254740992.0, b = ((double)(rnd() >> 11) + .5) / 9007199254740992.0;
    return sqrt(-2 * log(a)) * cos(6.283185307179586 * b);
}

static double round_trip(uint32_t codec, sl_block b, const void *src) {
    sl_codec_ctx *c;
    sl_err err;
    uint64_t n = sl_block_bytes(b), cap = sl_codec_bound(b), len;
    uint32_t used;
    uint8_t *enc = malloc(cap), *dec = malloc(n + 1);
    assert_int_equal(sl_codec_ctx_new(&c, 1, &err), 0);
    assert_int_equal(sl_codec_encode(c, codec, b, src, enc, cap, &len, &used, &err), 0);
    dec[n] = 0x5a;
    assert_int_equal(sl_codec_decode(c, used, b, enc, len, dec, &err), 0);
    assert_memory_equal(src, dec, n);
    assert_int_equal(dec[n], 0x5a);
    /* cut and flipped input must fail or give other bytes, never crash; a cut is always noticed */
    uint8_t *exact = malloc(len); /* nothing behind it: the address sanitizer sees every byte too far */
    if (len > 1) {
        memcpy(exact + 1, enc, len - 1);
        assert_int_not_equal(sl_codec_decode(c, used, b, exact + 1, len - 1, dec, &err), 0);
    }
    memcpy(exact, enc, len);
    uint64_t head = used == SL_CODEC_BF16 ? 8 * sizeof(sl_bf16_head) : 0; /* each bit but the padding is refused */
    for (uint64_t i = 0; i < 50 + head; i++) {
        uint64_t bit = i < head ? i : rnd() % (len * 8);
        exact[bit / 8] ^= (uint8_t)(1 << bit % 8);
        int rc = sl_codec_decode(c, used, b, exact, len, dec, &err);
        if (i < head && !(bit >= 16 && bit < 32) && !rc) fail_msg("bit %u of the head does not matter", (unsigned)bit);
        exact[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    free(exact);
    sl_codec_ctx_free(c);
    free(enc);
    free(dec);
    return (double)n / (double)len;
}

static void every_pattern(void **state) {
    (void)state;
    uint16_t *x = malloc(131072);
    for (uint32_t i = 0; i < 65536; i++) x[i] = (uint16_t)i;
    for (uint32_t codec = 0; codec < 3; codec++) {
        round_trip(codec, (sl_block){1, 65536, 2}, x);
        round_trip(codec, (sl_block){64, 1024, 2}, x);
        round_trip(codec, (sl_block){65536, 1, 2}, x);
        round_trip(codec, (sl_block){32768, 1, 4}, x);
    }
    free(x);
}

static void odd_shapes(void **state) {
    (void)state;
    static const uint32_t shape[][2] = {{1, 1}, {1, 31}, {3, 33}, {9, 7}, {100, 65}, {17, 576}, {8, 4097}};
    for (size_t i = 0; i < sizeof shape / sizeof *shape; i++) {
        uint64_t n = (uint64_t)shape[i][0] * shape[i][1];
        uint16_t *x = malloc(n * 4);
        for (uint64_t j = 0; j < n * 2; j++) x[j] = (uint16_t)rnd();
        for (uint32_t codec = 0; codec < 3; codec++) {
            round_trip(codec, (sl_block){shape[i][0], shape[i][1], 2}, x);
            round_trip(codec, (sl_block){shape[i][0], shape[i][1], 4}, x);
        }
        memset(x, 0, n * 4);
        for (uint32_t codec = 0; codec < 3; codec++) round_trip(codec, (sl_block){shape[i][0], shape[i][1], 2}, x);
        free(x);
    }
}

static void simd_is_scalar(void **state) {
    (void)state;
    for (uint32_t n = 0; n < 200; n++) {
        uint16_t x[200], y[200], z[200];
        uint8_t bias[200], m0[200], m1[200], e0[200], e1[200];
        for (uint32_t i = 0; i < 200; i++) x[i] = (uint16_t)rnd(), bias[i] = (uint8_t)rnd();
        sl_bf16_split(x, bias, m0, e0, n);
        sl_bf16_split_scalar(x, bias, m1, e1, n);
        assert_memory_equal(m0, m1, n);
        assert_memory_equal(e0, e1, n);
        sl_bf16_join(m0, e0, bias, y, n);
        sl_bf16_join_scalar(m0, e0, bias, z, n);
        assert_memory_equal(y, x, 2 * n);
        assert_memory_equal(z, x, 2 * n);
#if defined(__x86_64__)
        if (!__builtin_cpu_supports("avx2")) continue;
        memset(m0, 0x55, n), memset(e0, 0x55, n), memset(y, 0x55, 2 * n);
        sl_bf16_split_avx2(x, bias, m0, e0, n);
        assert_memory_equal(m0, m1, n);
        assert_memory_equal(e0, e1, n);
        sl_bf16_join_avx2(m0, e0, bias, y, n);
        assert_memory_equal(y, x, 2 * n);
#endif
    }
}

/* The bias is chosen alike on every CPU, so that the same states are the same bytes: exponents far from the bias on
 * either side cost the table's last entry. */
static void costs_are_alike(void **state) {
    (void)state;
    uint8_t cost[SL_BF16_COSTS];
    for (int i = 0; i < SL_BF16_COSTS; i++) cost[i] = (uint8_t)(10 * i + 7);
    for (uint32_t n = 1; n < 200; n++) {
        uint8_t smp[200], bias[200];
        uint16_t a[600], b[600];
        for (uint32_t i = 0; i < 600; i++) a[i] = b[i] = (uint16_t)(rnd() % 1000);
        for (uint32_t i = 0; i < 200; i++)
            bias[i] = (uint8_t)rnd(), smp[i] = (uint8_t)(i % 3 ? bias[i] + rnd() % 20 - 10 : rnd());
        uint16_t want[600];
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t j = 0; j < 3; j++) { /* exponent - (bias - 1 + j) + 8 */
                uint8_t v = (uint8_t)(smp[i] - bias[i] + 1 - (int)j + 8);
                want[j * n + i] = (uint16_t)(a[j * n + i] + cost[v < SL_BF16_COSTS ? v : SL_BF16_COSTS - 1]);
            }
        sl_bf16_costs_scalar(smp, bias, cost, a, n);
        assert_memory_equal(a, want, 6 * n);
#if defined(__x86_64__)
        if (!__builtin_cpu_supports("avx2")) continue;
        sl_bf16_costs_avx2(smp, bias, cost, b, n);
        assert_memory_equal(b, want, 6 * n);
#endif
    }
}

/* States with the channel structure of a residual stream shrink by what the exponents' entropy allows, and the bias
 * pays. */
static void ratio_and_literals(void **state) {
    (void)state;
    enum { T = 128, C = 1024 };
    uint16_t *x = malloc(2 * T * C);
    double scale[C];
    for (int c = 0; c < C; c++) scale[c] = exp(1.2 * gauss());
    for (int i = 0; i < T * C; i++) {
        float f = (float)(scale[i % C] * gauss());
        uint32_t u;
        memcpy(&u, &f, 4);
        x[i] = (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
    }
    uint8_t bias[C];
    assert_true(sl_bf16_bias(x, T, C, bias));
    double bf = round_trip(SL_CODEC_BF16, (sl_block){T, C, 2}, x),
           z = round_trip(SL_CODEC_ZSTD, (sl_block){T, C, 2}, x);
    print_message("ratio bf16 %.3f, zstd -1 %.3f\n", bf, z);
    assert_true(bf > 1.47);
    assert_true(bf > z * 1.1);
    free(x);
}

/* Tokens that repeat are stored once; a table that points at what is not stored yet, or of another length, is refused.
 */
static void repeated_tokens(void **state) {
    (void)state;
    enum { T = 300, C = 64 };
    uint16_t *x = malloc(2 * T * C);
    for (int i = 0; i < T * C; i++) x[i] = (uint16_t)(0x3f00 + (rnd() & 0x80ff));
    for (int t = 40; t < T; t++) memcpy(x + t * C, x + rnd() % 40 * C, 2 * C);
    x[2 * C + C / 2 + 7] ^= 1; /* nearly token 2: its own */
    memcpy(x + 299 * C, x + 2 * C, 2 * C);
    x[299 * C + C - 1] ^= 1;
    double r = round_trip(SL_CODEC_BF16, (sl_block){T, C, 2}, x);
    assert_true(r > 6);
    sl_codec_ctx *c;
    sl_err err;
    sl_block b = {T, C, 2};
    uint64_t cap = sl_codec_bound(b), len;
    uint32_t used, *ref = malloc(4 * T);
    uint8_t *enc = malloc(cap), *forged = malloc(cap), *dec = malloc(2 * T * C);
    assert_int_equal(sl_codec_ctx_new(&c, 1, &err), 0);
    assert_int_equal(sl_codec_encode(c, SL_CODEC_BF16, b, x, enc, cap, &len, &used, &err), 0);
    sl_bf16_head h;
    memcpy(&h, enc, sizeof h);
    assert_int_equal(used, SL_CODEC_BF16);
    assert_int_equal(h.flags, SL_BF16_REPEATS);
    assert_int_equal(ZSTD_decompress(ref, 4 * T, enc + sizeof h, h.ref_len), 4 * T);
    for (int t = 0; t < T; t++) {
        uint32_t keep = ref[t], bad[] = {t + 2u, UINT32_MAX, keep ? 0 : 1};
        for (int i = 0; i < 3; i++) {
            ref[t] = bad[i];
            size_t n = ZSTD_compress(forged + sizeof h, cap - sizeof h - len, ref, 4 * T, 1);
            assert_false(ZSTD_isError(n));
            sl_bf16_head g = h;
            g.ref_len = (uint32_t)n;
            memcpy(forged, &g, sizeof g);
            memcpy(forged + sizeof g + n, enc + sizeof h + h.ref_len, len - sizeof h - h.ref_len);
            int rc = sl_codec_decode(c, used, b, forged, len - h.ref_len + n, dec, &err);
            if (rc != SL_EDATA) fail_msg("token %d, reference %u: %d", t, bad[i], rc);
        }
        ref[t] = keep;
    }
    sl_codec_ctx_free(c);
    free(x);
    free(ref);
    free(enc);
    free(forged);
    free(dec);
}

/* ---- frames of literals ---- */

/* What sl_lit makes of a frame: bytes into `out`, or false. `out` has no byte more than n: blocks come through a buffer
 * of the size that the manual asks for. */
static bool lit_read(const uint8_t *enc, uint64_t len, uint8_t *out, uint64_t n) {
    sl_lit *l = malloc(sizeof *l);
    uint8_t *block = malloc(SL_LIT_BLOCK + SL_LIT_SLACK);
    uint64_t at = 0;
    uint32_t m = 0;
    bool ok = !sl_lit_open(l, enc, len, n);
    l->ahead = l->ahead_end = NULL;
    while (ok && (ok = !sl_lit_next(l, block, &m)) && m) {
        assert_true(m <= n - at);
        memcpy(out + at, block, m);
        at += m;
    }
    if (ok) assert_int_equal(at, n);
    free(l);
    free(block);
    return ok;
}

/* Bytes of a distribution: k 0 steep, 1 flat, 2 two values, 3 one value, 4 geometric (codes of one bit), 5 noise. */
static void draw(uint8_t *p, uint64_t n, int k) {
    uint8_t base = (uint8_t)rnd();
    for (uint64_t i = 0; i < n; i++) {
        double g = gauss();
        p[i] = k == 0   ? (uint8_t)(base + (int)lround(1.5 * g))
               : k == 1 ? (uint8_t)(base + (int)lround(20 * g))
               : k == 2 ? (uint8_t)(base + (rnd() % 5 == 0))
               : k == 3 ? base
               : k == 4 ? (uint8_t)(base + __builtin_ctzll(rnd() | 1ull << 40))
                        : (uint8_t)rnd();
    }
}

static size_t literal_frame(uint8_t *enc, size_t cap, const uint8_t *x, size_t n, size_t step) {
    ZSTD_CCtx *z = ZSTD_createCCtx();
    ZSTD_Sequence *q = calloc(n / step + 1, sizeof *q);
    size_t k = 0;
    for (size_t at = 0; at < n; at += step) q[k++].litLength = (unsigned)(n - at < step ? n - at : step);
    ZSTD_CCtx_setParameter(z, ZSTD_c_compressionLevel, -1000);
    ZSTD_CCtx_setParameter(z, ZSTD_c_literalCompressionMode, ZSTD_ps_enable);
    ZSTD_CCtx_setParameter(z, ZSTD_c_blockDelimiters, ZSTD_sf_explicitBlockDelimiters);
    size_t r = ZSTD_compressSequences(z, enc, cap, q, k, x, n);
    free(q);
    ZSTD_freeCCtx(z);
    return r;
}

/* Every length, distribution and block size is read, to the byte; a damaged frame gives what libzstd makes of it, or
 * nothing. */
static void literal_frames(void **state) {
    (void)state;
    enum { MAX = 400000 };
    uint8_t *x = malloc(MAX), *y = malloc(MAX), *z = malloc(MAX), *enc = malloc(2 * MAX);
    unsigned read = 0, damaged = 0, agreed = 0;
    for (int i = 0; i < 1500; i++) {
        size_t n = i < 300 ? (size_t)i + 1 : rnd() % 4 ? 300 + rnd() % 5000 : 1 + rnd() % MAX;
        size_t step = i % 3 ? SL_LIT_BLOCK : 1 + rnd() % SL_LIT_BLOCK;
        if (step < 40) step = 40;
        draw(x, n, i % 6);
        size_t len = literal_frame(enc, 2 * MAX, x, n, step);
        assert_false(ZSTD_isError(len));
        uint8_t *exact = malloc(len); /* nothing behind it: the address sanitizer sees every byte too far */
        memcpy(exact, enc, len);
        memset(y, 0xa5, n);
        if (!lit_read(exact, len, y, n))
            fail_msg("a frame of %zu bytes, distribution %d, blocks of %zu", n, i % 6, step);
        assert_memory_equal(x, y, n);
        read++;
        assert_false(lit_read(exact, len, y, n + 1));
        assert_false(lit_read(exact, len - 1, y, n));
        for (int j = 0; j < 8; j++) {
            uint64_t bit = j < 4 ? rnd() % (8 * (len < 90 ? len : 90)) : rnd() % (8 * len);
            exact[bit / 8] ^= (uint8_t)(1 << bit % 8);
            damaged++;
            if (lit_read(exact, len, y, n)) {
                size_t r = ZSTD_decompress(z, n, exact, len);
                assert_int_equal(r, n);
                assert_memory_equal(y, z, n);
                agreed++;
            }
            exact[bit / 8] ^= (uint8_t)(1 << bit % 8);
        }
        free(exact);
    }
    print_message("%u frames read; of %u damaged ones %u still frames, read as libzstd reads them\n", read, damaged,
                  agreed);
    assert_true(agreed > 100 && agreed < damaged);
    for (int level = 1; level < 8; level += 3) { /* frames with matches are left to libzstd */
        for (size_t i = 0; i < MAX; i++) x[i] = (uint8_t)(i % 1000 < 500 ? i % 1000 : rnd());
        size_t len = ZSTD_compress(enc, 2 * MAX, x, MAX, level);
        assert_false(lit_read(enc, len, y, MAX));
    }
    free(x);
    free(y);
    free(z);
    free(enc);
}

/* Frames at the edge of the format, found by the fuzzer: refused by both, or the same bytes from both. */
static void frames_at_the_edge(void **state) {
    (void)state;
    static const struct {
        const char *what;
        uint64_t n, len;
        uint8_t enc[16];
        bool good;
    } c[] = {
        {"a raw block", 4, 13, {0x28, 0xb5, 0x2f, 0xfd, 0x20, 4, 0x21, 0, 0, 1, 2, 3, 4}, true},
        {"a compressed block larger than the window",
         4,
         15,
         {0x28, 0xb5, 0x2f, 0xfd, 0x20, 4, 0x35, 0, 0, 0x20, 0x82, 0, 0xa2, 0, 0},
         false},
    };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        uint8_t ours[16], theirs[16];
        bool we = lit_read(c[i].enc, c[i].len, ours, c[i].n),
             they = ZSTD_decompress(theirs, c[i].n, c[i].enc, c[i].len) == c[i].n;
        if (we != c[i].good || they != c[i].good) fail_msg("%s: we %d, libzstd %d", c[i].what, we, they);
        if (we) assert_memory_equal(ours, theirs, c[i].n);
    }
}

/* The exponents that the codec writes are such a frame, and libzstd reads it. */
static void codec_writes_literals(void **state) {
    (void)state;
    enum { T = 700, C = 576 };
    sl_block b = {T, C, 2};
    uint16_t *x = malloc(2 * T * C);
    for (int i = 0; i < T * C; i++) {
        float f = (float)gauss();
        uint32_t u;
        memcpy(&u, &f, 4);
        x[i] = (uint16_t)(u >> 16);
    }
    sl_codec_ctx *c;
    sl_err err;
    uint64_t len;
    uint32_t used;
    uint8_t *enc = malloc(sl_codec_bound(b)), *y = malloc(T * C), *z = malloc(T * C);
    assert_int_equal(sl_codec_ctx_new(&c, 1, &err), 0);
    assert_int_equal(sl_codec_encode(c, SL_CODEC_BF16, b, x, enc, sl_codec_bound(b), &len, &used, &err), 0);
    sl_bf16_head h;
    memcpy(&h, enc, sizeof h);
    const uint8_t *expo = enc + len - h.exp_len;
    assert_true(lit_read(expo, h.exp_len, y, T * C));
    assert_int_equal(ZSTD_decompress(z, T * C, expo, h.exp_len), T * C);
    assert_memory_equal(y, z, T * C);
    sl_codec_ctx_free(c);
    free(x);
    free(y);
    free(z);
    free(enc);
}

/* What we call zstd must be read by the zstd program. */
static void zstd_program_reads_it(void **state) {
    (void)state;
    if (system("zstd --version >/dev/null 2>&1")) {
        print_message("no zstd program: skipped\n");
        skip();
    }
    sl_block b = {100, 64, 4};
    char dir[] = "/tmp/sltest-codec-XXXXXX", cmd[200], path[100];
    assert_non_null(mkdtemp(dir));
    uint8_t *x = malloc(sl_block_bytes(b)), *enc = malloc(sl_codec_bound(b));
    for (uint64_t i = 0; i < sl_block_bytes(b); i++) x[i] = (uint8_t)(rnd() % 7);
    sl_codec_ctx *c;
    sl_err err;
    uint64_t len;
    uint32_t used;
    assert_int_equal(sl_codec_ctx_new(&c, 3, &err), 0);
    assert_int_equal(sl_codec_encode(c, SL_CODEC_BF16, b, x, enc, sl_codec_bound(b), &len, &used, &err), 0);
    assert_int_equal(used, SL_CODEC_ZSTD); /* f32: the fall-back */
    snprintf(path, sizeof path, "%s/a.zst", dir);
    FILE *f = fopen(path, "w");
    fwrite(enc, 1, len, f);
    fclose(f);
    snprintf(path, sizeof path, "%s/b", dir);
    f = fopen(path, "w");
    fwrite(x, 1, sl_block_bytes(b), f);
    fclose(f);
    snprintf(cmd, sizeof cmd, "zstd -dqc %s/a.zst | cmp - %s/b && rm -r %s", dir, dir, dir);
    assert_int_equal(system(cmd), 0);
    sl_codec_ctx_free(c);
    free(x);
    free(enc);
}

int main(void) {
    const struct CMUnitTest t[] = {cmocka_unit_test(every_pattern),         cmocka_unit_test(odd_shapes),
                                   cmocka_unit_test(simd_is_scalar),        cmocka_unit_test(costs_are_alike),
                                   cmocka_unit_test(ratio_and_literals),    cmocka_unit_test(repeated_tokens),
                                   cmocka_unit_test(literal_frames),        cmocka_unit_test(frames_at_the_edge),
                                   cmocka_unit_test(codec_writes_literals), cmocka_unit_test(zstd_program_reads_it)};
    return cmocka_run_group_tests(t, NULL, NULL);
}
