/* flow: checksum twins against the definition, batch views against hostile slots, owners, names. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "ipc/faults.h"
#include "ipc/flow.h"
#include "ipc/journal.h"
#include "ipc/sum64.h"
#include "tests/row_sum.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static sl_err e;

/* The definition in ipc/flow.h, word for word. */
static uint64_t by_definition(const uint8_t *p, uint64_t bytes) {
    uint64_t a = 0, b = 0;
    for (uint64_t i = 0; 4 * i < bytes; i++) {
        uint64_t w = 0;
        for (unsigned j = 0; j < 4 && 4 * i + j < bytes; j++) w |= (uint64_t)p[4 * i + j] << 8 * j;
        a += w;
        b += (i + 1) * w;
    }
    return b ^ (a << 32 | a >> 32) ^ bytes * 0x9e3779b97f4a7c15ull;
}

static void sums_agree(void **state) {
    (void)state;
    enum { N = 4096 + 6 };
    uint8_t *p = malloc(N + 2);
    uint32_t x = 1;
    for (unsigned i = 0; i < N + 2; i++) p[i] = (uint8_t)((x = x * 1664525 + 1013904223) >> 24);
    memset(p + 512, 0xff, 1024); /* large words */
    for (unsigned n = 0; n <= N; n += n < 300 ? 2 : 262) {
        for (unsigned off = 0; off <= 2; off += 2) {
            uint64_t want = by_definition(p + off, n), a, b;
            assert_true(sl_sum64(p + off, n) == want);
            sl_sum_pair_scalar(p + off, n, &a, &b);
            assert_true(sl_sum_fold(a, b, n) == want);
#if defined(__x86_64__)
            if (__builtin_cpu_supports("avx2")) {
                sl_sum_pair_avx2(p + off, n, &a, &b);
                assert_true(sl_sum_fold(a, b, n) == want);
            }
            if (__builtin_cpu_supports("avx512f")) {
                sl_sum_pair_avx512(p + off, n, &a, &b);
                assert_true(sl_sum_fold(a, b, n) == want);
            }
#endif
            uint64_t cut = n / 3 / 4 * 4, a1, b1, a2, b2; /* by parts */
            sl_sum_pair(p + off, cut, &a1, &b1);
            sl_sum_pair(p + off + cut, n - cut, &a2, &b2);
            assert_true(sl_sum_fold(a1 + a2, b1 + b2 + cut / 4 * a2, n) == want);
        }
    }
    free(p);
}

/* A row's sum, however its states are cut; odd numbers of 16-bit elements too. */
static void row_sums_agree(void **state) {
    (void)state;
    enum { K = 3, T = 11, MOST = 300 };
    static uint8_t x[K][T * MOST];
    uint32_t r = 5;
    for (unsigned i = 0; i < sizeof x; i++) ((uint8_t *)x)[i] = (uint8_t)((r = r * 1664525 + 1013904223) >> 24);
    const uint8_t *p[K] = {x[0], x[1], x[2]};
    for (unsigned bytes = 2; bytes <= MOST; bytes += bytes < 40 ? 2 : 58)
        for (unsigned cut = 1; cut <= T; cut++) {
            uint64_t h = 0;
            for (unsigned k = 0; k < K; k++) {
                uint64_t a = 0, b = 0;
                for (unsigned t = 0; t < T; t += cut)
                    sl_sum_states(x[k] + t * bytes, T - t < cut ? T - t : cut, bytes, t, &a, &b);
                h = sl_sum_chain(h, sl_sum_fold(a, b, (uint64_t)T * bytes));
            }
            assert_true(h == plain_row_sum(p, K, T, bytes));
        }
    const uint8_t *swapped[K] = {x[1], x[0], x[2]};
    assert_true(plain_row_sum(p, K, T, 32) != plain_row_sum(swapped, K, T, 32));
}

/* A batch of 3 rows (2, 1 and 4 tokens) in an 8 KiB slot. */
static uint64_t slot_words[1024];
static sl_desc_input d;
static void make_batch(void) {
    uint8_t *s = (uint8_t *)slot_words;
    memset(s, 0, sizeof slot_words);
    sl_batch_row *r = (sl_batch_row *)slot_words;
    const uint32_t T[] = {2, 1, 4};
    uint32_t t = 0, str = (uint32_t)sl_batch_bytes(3, 7, 0);
    for (uint32_t i = 0; i < 3; i++) {
        r[i] = (sl_batch_row){.seq = i, .row = i, .t0 = t, .T = T[i], .id_off = str + i, .id_len = 1, .mask_sum = 1};
        s[str + i] = (uint8_t)('a' + i);
        t += T[i];
    }
    d = (sl_desc_input){
        .h = {.kind = SL_DESC_INPUT, .pos = 5}, .bytes = sl_batch_bytes(3, 7, 3), .n_rows = 3, .n_tokens = 7};
    d.crc = sl_crc32c(0, slot_words, d.bytes);
}

static int parse(void) {
    sl_batch_view v;
    return sl_batch_parse(&v, &d, 5, slot_words, sizeof slot_words, &e);
}

#define BREAK(stmt)                                                                                                    \
    do {                                                                                                               \
        make_batch();                                                                                                  \
        assert_int_equal(parse(), 0);                                                                                  \
        sl_batch_row *r = (sl_batch_row *)slot_words;                                                                  \
        (void)r;                                                                                                       \
        stmt;                                                                                                          \
        if (d.bytes <= sizeof slot_words) d.crc = sl_crc32c(0, slot_words, d.bytes);                                   \
        if (parse() != SL_EINTERNAL) fail_msg("taken: %s", #stmt);                                                     \
    } while (0)

static void batch_views(void **state) {
    (void)state;
    assert_int_equal(sl_batch_bytes(3, 7, 2), 3 * 64 + 7 * (4 + 1) + 2);
    make_batch();
    sl_batch_view v;
    assert_int_equal(sl_batch_parse(&v, &d, 5, slot_words, sizeof slot_words, &e), 0);
    assert_ptr_equal(v.ids, v.base + 3 * 64);
    assert_ptr_equal(v.mask, v.base + 3 * 64 + 7 * 4);
    assert_int_equal(v.base[v.rows[2].id_off], 'c');
    BREAK(d.h.kind = SL_DESC_CHUNK);
    BREAK(d.h.pos = 4);
    BREAK(d.n_rows = 0);
    BREAK(d.n_rows = 4);
    BREAK(d.n_rows = 0xffffffff);
    BREAK(d.n_tokens = 0);
    BREAK(d.n_tokens = 8);
    BREAK(d.n_tokens = 6);
    BREAK(d.n_tokens = 0xffffffff);
    BREAK(d.bytes = sizeof slot_words + 1);
    BREAK(d.bytes = UINT64_MAX);
    BREAK(d.bytes = 3);
    BREAK((r[0].id_len = r[1].id_len = r[2].id_len = 0, d.bytes = sl_batch_bytes(3, 7, 0) - 1)); /* cuts the mask */
    BREAK(r[1].t0 = 3);
    BREAK(r[0].t0 = 1);
    BREAK(r[1].T = 0);
    BREAK((r[1].T = r[1].mask_sum = 0, r[2].t0 = 2, r[2].T = 5)); /* empty, in an order that adds up */
    assert_non_null(strstr(e.msg, "batch at 5: row 1 "));
    BREAK(r[2].T = 0xffffffff);
    BREAK(r[2].T = 3);
    BREAK(r[1].mask_sum = 2);
    BREAK(r[0].id_off = 0);
    BREAK(r[0].id_off = 0xffffffff);
    BREAK(r[2].id_len = 2);
    BREAK(r[0].id_len = 257);
    BREAK((r[0].id_len = 256, r[0].id_off = 0xf0000000)); /* more than the bytes there are */
    BREAK((r[0].id_len = 257, d.bytes += 300));
    make_batch();
    ((sl_batch_row *)slot_words)[0].id_len = 256;
    d.bytes += 253;
    d.crc = sl_crc32c(0, slot_words, d.bytes);
    assert_int_equal(sl_batch_parse(&v, &d, 5, slot_words, d.bytes, &e), 0); /* the longest id, in a full slot */
    assert_int_equal(sl_batch_parse(&v, &d, 5, slot_words, d.bytes - 1, &e), SL_EINTERNAL);
    make_batch();
    slot_words[3] ^= 1;
    assert_int_equal(parse(), SL_EINTERNAL);
    assert_non_null(strstr(e.msg, "CRC32C"));
    make_batch();
    ((sl_batch_row *)slot_words)[1].id_len = 0; /* no id: its offset does not matter */
    ((sl_batch_row *)slot_words)[1].id_off = 77777;
    d.crc = sl_crc32c(0, slot_words, d.bytes);
    assert_int_equal(parse(), 0);
}

/* A batch is opened only where the ring has one, with its payload. */
static void batches_in_a_ring(void **state) {
    (void)state;
    const sl_ring_params p = {.name = "b", .depth = 8, .pay_slots = 2, .pay_size = sizeof slot_words, .n_cursors = 3};
    int fd = sl_ring_create(&p, false, NULL, &e);
    sl_ring *r;
    sl_batch_view v;
    assert_int_equal(sl_ring_attach(&r, fd, SL_RING_PRODUCER, &e), 0);
    assert_int_equal(sl_batch_open(&v, r, 0, &e), SL_EINTERNAL);
    make_batch();
    memcpy(sl_ring_pay_next(r), slot_words, sizeof slot_words);
    for (unsigned with = 2; with-- > 0;) {
        sl_desc *at = sl_ring_stage(r, with);
        d.h = at->h;
        d.h.kind = SL_DESC_INPUT;
        memcpy(at, &d, sizeof d);
    }
    sl_ring_publish(r);
    assert_int_equal(sl_batch_open(&v, r, 0, &e), 0);
    assert_int_equal(v.rows[2].T, 4);
    assert_int_equal(sl_batch_open(&v, r, 1, &e), SL_EINTERNAL); /* owns no payload */
    assert_non_null(strstr(e.msg, "no batch with a payload at 1"));
    assert_int_equal(sl_batch_open(&v, r, 2, &e), SL_EINTERNAL);
    sl_ring_detach(r);
    close(fd);
}

static void owners_rotate(void **state) {
    (void)state;
    uint32_t n[3] = {0};
    for (uint32_t c = 0; c < 3000; c++) n[sl_chunk_owner(7, 1, c, 3)]++;
    for (int i = 0; i < 3; i++) assert_int_equal(n[i], 1000);
    assert_true(sl_chunk_owner(0, 0, 0, 4) != sl_chunk_owner(1, 0, 0, 4)); /* short batches rotate too */
    assert_true(sl_chunk_owner(UINT64_MAX, 65535, 0xffffffff, 64) < 64);
}

static void names(void **state) {
    (void)state;
    assert_string_equal(sl_verdict_name(SL_V_OK), "OK");
    assert_string_equal(sl_verdict_name(SL_V_POISON), "POISON");
    assert_string_equal(sl_verdict_name((sl_verdict)-1), "?");
    assert_string_equal(sl_verdict_name(SL_V_N), "?");
    for (int i = 0; i < SL_FAULT_N; i++) {
        sl_fault f;
        assert_int_equal(sl_fault_parse(sl_fault_name((sl_fault)i), &f), 0);
        assert_int_equal(f, i);
        assert_int_equal(sl_fault_verdict(f) != SL_V_OK, i != SL_FAULT_NONE);
    }
    sl_fault f;
    assert_int_equal(sl_fault_parse("nonsense", &f), SL_EUSAGE);
}

int main(void) {
    const struct CMUnitTest t[] = {cmocka_unit_test(sums_agree),    cmocka_unit_test(row_sums_agree),
                                   cmocka_unit_test(batch_views),   cmocka_unit_test(batches_in_a_ring),
                                   cmocka_unit_test(owners_rotate), cmocka_unit_test(names)};
    return cmocka_run_group_tests_name("flow", t, NULL, NULL);
}
