/* codec: every bf16 bit pattern, random blocks, NaN payloads; SIMD against scalar; the zstd program as judge. */
#define ZSTD_STATIC_LINKING_ONLY
#include "stages/writer/codec.h"
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
    if (len > 1) assert_int_not_equal(sl_codec_decode(c, used, b, enc, len - 1, dec, &err), 0);
    for (int i = 0; i < 50; i++) {
        uint64_t bit = rnd() % (len * 8);
        enc[bit / 8] ^= (uint8_t)(1 << bit % 8);
        (void)sl_codec_decode(c, used, b, enc, len, dec, &err);
        enc[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
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

/* What we call zstd must be read by the zstd program. */
static void zstd_program_reads_it(void **state) {
    (void)state;
    if (system("zstd --version >/dev/null 2>&1")) {
        print_message("no zstd program: skipped\n");
        skip();
    }
    sl_block b = {100, 64, 4};
    char dir[] = "/tmp/sluice-codec-XXXXXX", cmd[200], path[100];
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
    const struct CMUnitTest t[] = {cmocka_unit_test(every_pattern),   cmocka_unit_test(odd_shapes),
                                   cmocka_unit_test(simd_is_scalar),  cmocka_unit_test(ratio_and_literals),
                                   cmocka_unit_test(repeated_tokens), cmocka_unit_test(zstd_program_reads_it)};
    return cmocka_run_group_tests(t, NULL, NULL);
}
