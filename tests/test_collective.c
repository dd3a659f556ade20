/* collective: sums over ranks that are threads, at several widths and sizes, against a sum made here; agreement; a life
 * left behind. Run under ThreadSanitizer too. */
#include "stages/compute/collective.h"
#include "stages/compute/collective_slices.h"
#include <pthread.h>
#include <stdarg.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#define MAX_ELEMS 4096
#define ROUNDS    40

static int copy_bytes(void *ctx, void *dst, const void *src, uint64_t n, sl_err *err) {
    (void)ctx, (void)err;
    memcpy(dst, src, n);
    return 0;
}
static sl_ops host_ops(sl_dtype act) {
    return (sl_ops){.name = "test", .act = act, .upload = copy_bytes, .download = copy_bytes};
}

/* Values whose sum in rank order differs from the sum in another order, so that the order is tested. */
static float value(int rank, int round, int64_t i) {
    uint32_t x = (uint32_t)(i * 2654435761u) ^ (uint32_t)(rank * 40503u + round * 977u);
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13;
    return ((float)(x & 0xffffff) / 8388608.0f - 1.0f) * (float)(1 << (x >> 28));
}
static uint16_t bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
static float unbf16(uint16_t v) {
    uint32_t u = (uint32_t)v << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

typedef struct job {
    int fd, rank, tp, bad;
    uint32_t epoch;
    sl_dtype act;
} job;

static int64_t size_of(int round) {
    static const int64_t n[] = {1, 31, 32, 33, 1000, MAX_ELEMS, MAX_ELEMS + 1, 3 * MAX_ELEMS + 77};
    return n[round % 8];
}

static int allreduce(sl_coll *c, void *buf, int64_t n, sl_err *err) {
    uint64_t ticket;
    int rc = c->reduce(c, NULL, buf, n, &ticket, err);
    return rc ? rc : c->wait(c, ticket, err);
}

static void put(const job *j, void *buf, int64_t i, float v) {
    if (j->act == SL_F32)
        ((float *)buf)[i] = v;
    else
        ((uint16_t *)buf)[i] = bf16(v);
}
static float held(const job *j, float v) {
    return j->act == SL_F32 ? v : unbf16(bf16(v));
}

/* Every other round adds onto a residual that all ranks hold alike: one rounding for both. */
#define RESIDUAL 77
static void one_round(job *j, sl_coll *c, int round, void *buf, void *h) {
    int64_t n = size_of(round);
    for (int64_t i = 0; i < n; i++) {
        put(j, buf, i, value(j->rank, round, i));
        put(j, h, i, value(RESIDUAL, round, i));
    }
    sl_err err = {0};
    uint64_t ticket;
    int onto = round / 8 % 2;
    if (c->reduce(c, onto ? h : NULL, buf, n, &ticket, &err) || c->wait(c, ticket, &err)) j->bad++;
    const void *got = onto ? h : buf;
    for (int64_t i = 0; i < n; i++) {
        float sum = held(j, value(0, round, i));
        for (int r = 1; r < j->tp; r++) sum += held(j, value(r, round, i));
        if (onto) sum += held(j, value(RESIDUAL, round, i));
        if (j->act == SL_F32 ? ((float *)got)[i] != sum : ((uint16_t *)got)[i] != bf16(sum)) j->bad++;
    }
}

static void *rank_main(void *arg) {
    job *j = arg;
    sl_ops ops = host_ops(j->act);
    sl_coll *c;
    sl_err err = {0};
    if (sl_coll_shm_open(&c, j->fd, j->rank, j->tp, j->epoch, &ops, &err)) {
        j->bad = 1000;
        return NULL;
    }
    void *buf = malloc((3 * MAX_ELEMS + 77) * 4), *h = malloc((3 * MAX_ELEMS + 77) * 4);
    for (int round = 0; round < ROUNDS; round++) {
        one_round(j, c, round, buf, h);
        uint64_t lo, hi;
        if (c->agree(c, (uint64_t)(100 * round + j->rank), &lo, &hi, &err) || lo != (uint64_t)(100 * round) ||
            hi != (uint64_t)(100 * round + j->tp - 1))
            j->bad++;
        if (round % 5 == 0 && c->barrier(c, &err)) j->bad++;
    }
    free(buf);
    free(h);
    c->destroy(c);
    return NULL;
}

static void run_group(int fd, int tp, sl_dtype act, uint32_t epoch) {
    pthread_t t[8];
    job j[8];
    for (int r = 0; r < tp; r++) {
        j[r] = (job){.fd = fd, .rank = r, .tp = tp, .act = act, .epoch = epoch};
        assert_int_equal(pthread_create(&t[r], NULL, rank_main, &j[r]), 0);
    }
    for (int r = 0; r < tp; r++) {
        pthread_join(t[r], NULL);
        assert_int_equal(j[r].bad, 0);
    }
}

static void test_sums(void **state) {
    (void)state;
    static const int widths[] = {2, 3, 4, 8};
    for (int w = 0; w < 4; w++)
        for (int act = 0; act < 2; act++) {
            sl_err err = {0};
            int fd = sl_coll_shm_create_region(widths[w], MAX_ELEMS, &err);
            assert_true(fd >= 0);
            run_group(fd, widths[w], act ? SL_BF16 : SL_F32, 1);
            close(fd);
        }
}

/* A life that died between two barriers leaves its flags; the next epoch on the same region is not disturbed. */
static void *die_early(void *arg) {
    job *j = arg;
    sl_ops ops = host_ops(SL_F32);
    sl_coll *c;
    sl_err err = {0};
    float x[100] = {0};
    if (sl_coll_shm_open(&c, j->fd, j->rank, j->tp, j->epoch, &ops, &err)) return NULL;
    allreduce(c, x, 100, &err);
    allreduce(c, x, 100, &err);
    j->bad = c->barrier(c, &err); /* rank 1 waits for rank 0, which never comes */
    c->destroy(c);
    return NULL;
}

static void test_epochs(void **state) {
    (void)state;
    sl_err err = {0};
    int fd = sl_coll_shm_create_region(2, MAX_ELEMS, &err);
    assert_true(fd >= 0);
    sl_ops ops = host_ops(SL_F32);
    sl_coll *c0;
    job late = {.fd = fd, .rank = 1, .tp = 2, .epoch = 7};
    pthread_t t;
    assert_int_equal(pthread_create(&t, NULL, die_early, &late), 0);
    assert_int_equal(sl_coll_shm_open(&c0, fd, 0, 2, 7, &ops, &err), 0);
    float x[100] = {0};
    assert_int_equal(allreduce(c0, x, 100, &err), 0);
    assert_int_equal(allreduce(c0, x, 100, &err), 0);
    c0->destroy(c0);
    run_group(fd, 2, SL_F32, 8); /* rank 1 of epoch 7 still waits: it is told that its time is over */
    pthread_join(t, NULL);
    assert_int_equal(late.bad, SL_ETEMP);
    close(fd);
}

static void test_refused(void **state) {
    (void)state;
    sl_err err = {0};
    assert_int_equal(sl_coll_shm_create_region(1, 10, &err), SL_ECONFIG);
    assert_int_equal(sl_coll_shm_create_region(2, 0, &err), SL_ECONFIG);
    int fd = sl_coll_shm_create_region(3, 100, &err);
    assert_true(fd >= 0);
    sl_coll *c;
    sl_ops ops = host_ops(SL_F32);
    assert_int_equal(sl_coll_shm_open(&c, fd, 0, 2, 1, &ops, &err), SL_EINTERNAL); /* made for three */
    assert_int_equal(sl_coll_shm_open(&c, fd, 3, 3, 1, &ops, &err), SL_EINTERNAL);
    assert_int_equal(sl_coll_shm_open(&c, fd, 0, 3, 0, &ops, &err), SL_EINTERNAL);
    close(fd);
    FILE *f = tmpfile();
    assert_non_null(f);
    assert_int_equal(sl_coll_shm_open(&c, fileno(f), 0, 3, 1, &ops, &err), SL_EINTERNAL); /* empty */
    fclose(f);
}

/* Slices of sums between GPUs: side by side, nothing left out, starts on 64 elements, none wider than what is kept for
 * it; pieces of the others have places of their own. */
static void test_slices(void **state) {
    (void)state;
    static const int64_t sizes[] = {1, 63, 64, 65, 127, 128, 1000, 4096, 1000003, (int64_t)131072 * 7168};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int tp = 1; tp <= 64; tp++) {
            int64_t at = 0, lo, hi;
            for (int r = 0; r < tp; r++, at = hi) {
                sl_slice(sizes[i], tp, r, &lo, &hi);
                assert_int_equal(lo, at);
                assert_true(hi >= lo && hi - lo <= sl_slice_widest(sizes[i], tp));
                assert_true(lo % 64 == 0 || lo == sizes[i]);
            }
            assert_int_equal(at, sizes[i]);
        }
    for (int me = 0; me < 8; me++) {
        unsigned taken = 0;
        for (int from = 0; from < 8; from++)
            if (from != me) taken |= 1u << sl_slice_place(me, from);
        assert_int_equal(taken, 0x7f);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_slices), cmocka_unit_test(test_sums),
                                       cmocka_unit_test(test_epochs), cmocka_unit_test(test_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
