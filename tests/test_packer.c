/* packer and intake: batches are a pure function of the order of the rows. Rows are journaled in runs that are cut at
 * random points (also in the middle of a record); after every restart the batches formed so far must be the same. The
 * expected batches come from a packing written here, not from the packer. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "ipc/log.h"
#include "stages/feeder/intake.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { TOKENS = 100, ROWS = 8, N = 400 };
static char dir[64];
static sl_err e;
static uint64_t seed = 88172645463325252ull;
static uint32_t rnd(uint32_t n) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (uint32_t)(seed >> 11) % n;
}

static int setup(void **state) {
    (void)state;
    strcpy(dir, "/tmp/sl_packer_XXXXXX");
    sl_log_init("test", SL_ERROR);
    return mkdtemp(dir) ? 0 : -1;
}
static int teardown(void **state) {
    (void)state;
    char cmd[96];
    snprintf(cmd, sizeof cmd, "rm -r %s", dir);
    return system(cmd);
}

static sl_intake *reopen(sl_intake *in) {
    sl_intake_cfg c = {.store = dir, .batch_tokens = TOKENS, .max_batch_rows = ROWS, .max_length = 300};
    sl_intake_close(in);
    if (sl_intake_open(&in, &c, &e)) fail_msg("%s", e.msg);
    return in;
}

/* Row i: its length and content follow from i. */
static uint32_t len_of(uint64_t i) {
    return (uint32_t)(i * 2654435761u >> 7) % (i % 37 == 0 ? 250 : 60) + 1;
}
static int32_t id_of(uint64_t i, uint32_t t) {
    return (int32_t)((i * 31 + t * 7) % 1000);
}

static int add(sl_intake *in, uint64_t i) {
    uint32_t T = len_of(i);
    sl_part part = {.T = T, .ids = malloc(T * 4), .mask = malloc(T)};
    for (uint32_t t = 0; t < T; t++) {
        part.ids[t] = id_of(i, t);
        part.mask[t] = (i + t) % 3 == 0;
        part.mask_sum += part.mask[t];
    }
    sl_prepared p = {.parts = &part, .n = 1};
    p.id_len = (uint32_t)snprintf(p.id, sizeof p.id, "row-%llu", (unsigned long long)i);
    uint64_t content[2] = {i, ~i};
    int64_t d = sl_intake_dataset(in, "set", &e);
    assert_true(d >= 0);
    sl_in_found f = sl_intake_find(in, (uint32_t)d, i, content, NULL);
    int rc = f == SL_IN_NEW ? sl_intake_add(in, (uint32_t)d, i, content, &p, 0, &e) : 0;
    if (rc) fail_msg("%s", e.msg);
    free(part.ids);
    free(part.mask);
    return f == SL_IN_NEW;
}

/* Batches as (first row, rows): the rule in the words of ipc/journal.h. flush_after[i]: a FLUSH follows row i. */
static size_t expect(const unsigned char *flush_after, uint64_t n, uint64_t (*out)[2]) {
    size_t b = 0;
    uint64_t first = 0, rows = 0, tokens = 0;
    for (uint64_t i = 0; i < n; i++) {
        uint32_t T = len_of(i);
        if (rows && (tokens + T > TOKENS || rows == ROWS)) {
            out[b][0] = first;
            out[b++][1] = rows;
            rows = tokens = 0;
        }
        if (!rows) first = i;
        rows++;
        tokens += T;
        if (flush_after[i] || rows == ROWS || tokens >= TOKENS) {
            out[b][0] = first;
            out[b++][1] = rows;
            rows = tokens = 0;
        }
    }
    return b;
}

static uint32_t no_flags(void *arg, const sl_intake_rec *r) {
    (void)arg;
    (void)r;
    return SL_ROW_NLL;
}

static void check_payload(sl_packer *p, const sl_batch *b) {
    uint64_t n = sl_packer_bytes(b);
    char *slot = malloc(n);
    sl_desc_input d = {.h = {.kind = SL_DESC_INPUT, .pos = 5}};
    if (sl_packer_write(p, b, slot, n, &d, no_flags, NULL, &e)) fail_msg("%s", e.msg);
    assert_int_equal(sl_packer_write(p, b, slot, n - 1, &d, no_flags, NULL, &e), SL_ECONFIG);
    sl_batch_view v;
    if (sl_batch_parse(&v, &d, 5, slot, n, &e)) fail_msg("%s", e.msg);
    for (uint32_t i = 0; i < d.n_rows; i++) {
        const sl_batch_row *r = &v.rows[i];
        char id[32];
        snprintf(id, sizeof id, "row-%llu", (unsigned long long)r->row);
        assert_int_equal(r->id_len, strlen(id));
        assert_memory_equal(v.base + r->id_off, id, r->id_len);
        assert_int_equal(r->T, len_of(r->row));
        assert_int_equal(r->flags, SL_ROW_NLL);
        sl_key k = sl_row_key("set", r->row, 0);
        assert_memory_equal(&k, r->key, sizeof k);
        uint32_t sum = 0;
        for (uint32_t t = 0; t < r->T; t++) {
            assert_int_equal(v.ids[r->t0 + t], id_of(r->row, t));
            sum += v.mask[r->t0 + t];
            assert_int_equal(v.mask[r->t0 + t], (r->row + t) % 3 == 0);
        }
        assert_int_equal(sum, r->mask_sum);
    }
    free(slot);
}

/* All batches that the packer forms; the records become visible in random steps. */
static void check_batches(const sl_intake *in, const unsigned char *flush_after) {
    static uint64_t want[N + 1][2];
    size_t n = expect(flush_after, sl_intake_rows(in), want), got = 0;
    sl_packer *p;
    if (sl_packer_open(&p, dir, &e)) fail_msg("%s", e.msg);
    uint64_t limit = 0, all = sl_intake_records(in);
    while (got < n || limit < all) {
        sl_batch b;
        int rc = sl_packer_next(p, limit, &b, &e);
        if (rc < 0) fail_msg("%s", e.msg);
        if (rc == 0) {
            if (limit == all) break;
            limit += rnd(20) + 1;
            if (limit > all) limit = all;
            continue;
        }
        assert_true(got < n);
        assert_int_equal(b.batch_no, got);
        assert_int_equal(b.n_rows, want[got][1]);
        assert_int_equal(b.rows[0].row, want[got][0]);
        if (rnd(10) == 0) check_payload(p, &b);
        got++;
    }
    assert_int_equal(got, n);
    sl_packer_close(p);
}

/* Cut the log where a crash could have left it: anywhere behind `from` (the last synced record). */
static void crash_tail(uint64_t from) {
    char path[96];
    struct stat st;
    snprintf(path, sizeof path, "%s/intake.log", dir);
    assert_int_equal(stat(path, &st), 0);
    uint64_t size = (uint64_t)st.st_size, cut = from + (size > from ? rnd((uint32_t)(size - from) + 1) : 0);
    assert_int_equal(truncate(path, (off_t)cut), 0);
}

static void restarts(void **state) {
    (void)state;
    static unsigned char flush_after[N];
    memset(flush_after, 0, sizeof flush_after);
    sl_intake *in = reopen(NULL);
    uint64_t next = 0, crashes = 0;
    while (next < N) {
        uint64_t synced = sl_intake_records(in) * SL_JREC;
        for (uint32_t k = rnd(12); k-- && next < N; next++) {
            assert_int_equal(add(in, next), 1);
            if (rnd(15) == 0 && sl_intake_flush(in, &e) == 1) flush_after[next] = 1;
        }
        assert_int_equal(sl_intake_sync(in, &e), 0);
        if (rnd(4)) continue;
        sl_intake_close(in);
        in = NULL;
        crash_tail(synced);
        in = reopen(NULL);
        crashes++;
        uint64_t kept = sl_intake_rows(in); /* what was lost was not acknowledged and is pushed again */
        assert_true(kept <= next);
        if (kept < next) memset(flush_after + kept, 0, N - kept);
        if (kept && sl_intake_open_rows(in)) flush_after[kept - 1] = 0; /* its FLUSH went with the tail */
        if (kept) assert_int_equal(add(in, kept - 1), 0);               /* known */
        next = kept;
        check_batches(in, flush_after);
    }
    assert_true(crashes > 5);
    check_batches(in, flush_after);
    sl_intake_close(in);
}

/* A row of several parts whose log ends in the middle is completed by the second push. */
static void half_a_row(void **state) {
    (void)state;
    sl_intake *in = reopen(NULL);
    int32_t ids[3] = {1, 2, 3};
    uint8_t mask[3] = {1, 1, 1};
    sl_part parts[3] = {{.ids = ids, .mask = mask, .T = 3, .mask_sum = 3},
                        {.reason = SL_R_UNSUPERVISED},
                        {.ids = ids, .mask = mask, .T = 2, .mask_sum = 2}};
    sl_prepared p = {.parts = parts, .n = 3};
    uint64_t content[2] = {7, 7};
    uint32_t d = (uint32_t)sl_intake_dataset(in, "set", &e);
    assert_int_equal(sl_intake_add(in, d, 40, content, &p, 0, &e), 0);
    assert_int_equal(sl_intake_sync(in, &e), 0);
    uint64_t n = sl_intake_records(in);
    sl_intake_close(in);
    char path[96];
    snprintf(path, sizeof path, "%s/intake.log", dir);
    assert_int_equal(truncate(path, (off_t)((n - 1) * SL_JREC)), 0);
    in = reopen(NULL);
    sl_entry *en;
    assert_int_equal(sl_intake_find(in, d, 40, content, &en), SL_IN_INCOMPLETE);
    assert_int_equal(en->parts, 2);
    assert_int_equal(sl_intake_rows(in), 1);
    assert_int_equal(sl_intake_add(in, d, 40, content, &p, 0, &e), 0);
    assert_int_equal(sl_intake_sync(in, &e), 0);
    in = reopen(in);
    assert_int_equal(sl_intake_find(in, d, 40, content, &en), SL_IN_KNOWN);
    assert_int_equal(en->rows, 2);
    assert_int_equal(en->parts, 3);
    assert_int_equal(sl_intake_rows(in), 2);
    content[0] = 8;
    assert_int_equal(sl_intake_find(in, d, 40, content, &en), SL_IN_CONFLICT);
    sl_intake_close(in);
}

static uint64_t done_rows, done_bad;
static void count_done(void *arg, sl_entry *en) {
    (void)arg;
    done_rows++;
    done_bad += en->bad;
    if (en->bad) assert_int_equal(en->verdict, SL_V_NONFINITE);
}

static void commits(void **state) {
    (void)state;
    sl_intake *in = reopen(NULL);
    for (uint64_t i = 0; i < 20; i++) add(in, i);
    assert_int_equal(sl_intake_sync(in, &e), 0);
    char path[96];
    snprintf(path, sizeof path, "%s/commit.log", dir);
    assert_int_equal(sl_intake_follow(in, UINT64_MAX, count_done, NULL, &e), 0); /* there is no commit.log yet */
    sl_journal *j;
    assert_int_equal(sl_journal_open(&j, path, SL_COMMIT_MAGIC, NULL, NULL, &e), 0);
    sl_commit_rec h = {.kind = SL_CM_HEADER};
    sl_journal_append(j, &h, &e);
    for (uint64_t i = 0; i < 10; i++) {
        sl_commit_rec r = {.kind = i == 3 ? SL_CM_REJECT : SL_CM_COMMIT,
                           .seq = i * 2,
                           .row = i * 2,
                           .verdict = i == 3 ? SL_V_NONFINITE : SL_V_OK};
        sl_journal_append(j, &r, &e);
        if (i == 5) sl_journal_append(j, &r, &e); /* a second record of the same row counts once */
    }
    assert_int_equal(sl_journal_sync(j, &e), 0);
    done_rows = done_bad = 0;
    for (uint64_t synced = 0; synced <= 5; synced++) { /* nobody hears of a row before its record is on disk */
        assert_int_equal(sl_intake_follow(in, synced, count_done, NULL, &e), 0);
        assert_int_equal(done_rows, synced ? synced - 1 : 0); /* the first is the header */
    }
    assert_int_equal(sl_intake_follow(in, UINT64_MAX, count_done, NULL, &e), 0);
    assert_int_equal(done_rows, 10);
    assert_int_equal(done_bad, 1);
    assert_int_equal(sl_intake_committed(in), 10);
    in = reopen(in); /* the same after a restart */
    assert_int_equal(sl_intake_committed(in), 10);
    for (uint64_t i = 0; i < 20; i++) assert_int_equal(sl_intake_row_done(in, i), i % 2 == 0);
    assert_false(sl_intake_row_done(in, 20)); /* not accepted: not done, and nothing is read for it */
    assert_false(sl_intake_row_done(in, UINT64_MAX));
    sl_commit_rec r = {.kind = SL_CM_COMMIT, .seq = 20};
    sl_journal_append(j, &r, &e);
    sl_journal_sync(j, &e);
    assert_int_equal(sl_intake_follow(in, UINT64_MAX, count_done, NULL, &e),
                     SL_EDATA); /* a row that was never accepted */
    sl_journal_close(j);
    sl_intake_close(in);
}

/* Refused rows may be corrected; a second writer is kept out; other limits are recorded and hold from there on. */
static void odds(void **state) {
    (void)state;
    sl_intake *in = reopen(NULL), *second = NULL;
    sl_intake_cfg c = {.store = dir, .batch_tokens = 50, .max_batch_rows = 4, .max_length = 300};
    assert_int_not_equal(sl_intake_open(&second, &c, &e), 0);
    sl_part bad = {.reason = SL_R_JSON};
    sl_prepared p = {.parts = &bad, .n = 1};
    uint64_t c1[2] = {1, 1}, c2[2] = {9, ~9ull};
    uint32_t d = (uint32_t)sl_intake_dataset(in, "set", &e);
    assert_int_equal(sl_intake_add(in, d, 9, c1, &p, 0, &e), 0);
    assert_int_equal(sl_intake_find(in, d, 9, c1, NULL), SL_IN_REFUSED);
    assert_int_equal(sl_intake_find(in, d, 9, c2, NULL), SL_IN_NEW);
    assert_int_equal(add(in, 9), 1);
    assert_int_equal(sl_intake_find(in, d, 9, c2, NULL), SL_IN_KNOWN);
    assert_int_equal(sl_intake_find(in, d, 9, c1, NULL), SL_IN_CONFLICT);
    assert_int_equal(sl_intake_sync(in, &e), 0);
    assert_int_equal(sl_intake_open_rows(in), 1);
    sl_intake_close(in);
    assert_int_equal(sl_intake_open(&in, &c, &e), 0);
    assert_int_equal(sl_intake_open_rows(in), 0); /* the new header closed the batch */
    assert_int_equal(sl_intake_find(in, d, 9, c2, NULL), SL_IN_KNOWN);
    sl_packer *pk;
    sl_batch b;
    assert_int_equal(sl_packer_open(&pk, dir, &e), 0);
    assert_int_equal(sl_packer_next(pk, sl_intake_records(in), &b, &e), 1);
    assert_int_equal(b.n_rows, 1);
    sl_packer_close(pk);
    sl_intake_close(in);
}

/* The kernel's side of a failed sync (linked with --wrap=fdatasync): what was written since the last good one is gone,
 * and the next sync knows nothing of it. */
int __real_fdatasync(int fd);
int __wrap_fdatasync(int fd);
static int failing; /* syncs of intake.dat that are still to fail */
static uint64_t dat_synced;

int __wrap_fdatasync(int fd) {
    char link[64], name[128];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, name, sizeof name - 1);
    name[n > 0 ? n : 0] = 0;
    struct stat st;
    if (!strstr(name, "intake.dat") || fstat(fd, &st)) return __real_fdatasync(fd);
    if (!failing) {
        dat_synced = (uint64_t)st.st_size;
        return __real_fdatasync(fd);
    }
    failing--;
    for (uint64_t at = dat_synced; at < (uint64_t)st.st_size; at++)
        if (pwrite(fd, "", 1, (off_t)at) != 1) return -1;
    errno = ENOSPC;
    return -1;
}

static char *dat_path(char *path) {
    sprintf(path, "%s/intake.dat", dir);
    return path;
}

static void a_failed_sync_is_written_again(void **state) {
    (void)state;
    static const unsigned char no_flush[N];
    sl_intake *in = reopen(NULL);
    for (uint64_t i = 0; i < 60; i++) {
        add(in, i);
        if (i % 7) continue;
        failing = i % 3;
        while (sl_intake_sync(in, &e) == SL_ETEMP) add(in, ++i); /* more may come meanwhile */
        assert_int_equal(failing, 0);
    }
    assert_int_equal(sl_intake_sync(in, &e), 0);
    for (int k = 0; k < 20; k++) check_batches(in, no_flush); /* each looks at some of the payloads */
    sl_intake_close(in);
}

/* Row 1 of the batch is not what was accepted: nothing is computed from it, whatever part was hit. */
static void damaged_bytes_are_not_packed(void **state) {
    (void)state;
    sl_intake *in = reopen(NULL);
    for (uint64_t i = 0; i < ROWS; i++) add(in, i);
    sl_intake_flush(in, &e);
    assert_int_equal(sl_intake_sync(in, &e), 0);
    char path[96], slot[8192], v;
    int fd = open(dat_path(path), O_RDWR);
    sl_packer *p;
    sl_batch b;
    assert_int_equal(sl_packer_open(&p, dir, &e), 0);
    assert_int_equal(sl_packer_next(p, sl_intake_records(in), &b, &e), 1);
    const sl_intake_rec *r = &b.rows[1];
    uint64_t hit[] = {0, r->T * 4 - 1, r->T * 4, r->T * 5 - 1, r->T * 5, r->data_len - 1};
    for (unsigned i = 0; i < 2 * sizeof hit / sizeof *hit; i++) {
        off_t at = (off_t)(r->data_off + hit[i / 2]);
        sl_desc_input d = {.h = {.kind = SL_DESC_INPUT, .pos = 5}};
        assert_int_equal(pread(fd, &v, 1, at), 1);
        v ^= 4; /* there, and back */
        assert_int_equal(pwrite(fd, &v, 1, at), 1);
        assert_int_equal(sl_packer_write(p, &b, slot, sizeof slot, &d, no_flags, NULL, &e), i % 2 ? 0 : SL_EDATA);
        if (i % 2 == 0) assert_non_null(strstr(e.msg, "row 1 (seq 1): intake.dat"));
    }
    sl_packer_close(p);
    sl_intake_close(in);
    /* The data set's name comes first: with another one every row would be taken for a new one. */
    assert_int_equal(pwrite(fd, "S", 1, 0), 1);
    sl_intake_cfg c = {.store = dir, .batch_tokens = TOKENS, .max_batch_rows = ROWS, .max_length = 300};
    assert_int_equal(sl_intake_open(&in, &c, &e), SL_EDATA);
    assert_non_null(strstr(e.msg, "name of data set 0"));
    close(fd);
}

/* A record whose sizes do not belong together is an error of the log, however good its checksum. */
static void impossible_rows(void **state) {
    (void)state;
    const sl_intake_rec bad[] = {{.T = 0, .id_len = 4, .data_len = 4},
                                 {.T = 1u << 31, .data_len = 5ull << 31},
                                 {.T = 2, .id_len = 257, .data_len = 267},
                                 {.T = 2, .data_len = 11},
                                 {.T = 2, .id_len = 3, .data_len = 10}};
    char path[96];
    snprintf(path, sizeof path, "%s/intake.log", dir);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        unlink(path);
        sl_intake *in = reopen(NULL);
        add(in, 0);
        assert_int_equal(sl_intake_sync(in, &e), 0);
        sl_intake_close(in);
        sl_journal *j;
        sl_intake_rec r = bad[i];
        r.kind = SL_IN_ROW;
        r.seq = 1;
        assert_int_equal(sl_journal_open(&j, path, SL_INTAKE_MAGIC, NULL, NULL, &e), 0);
        assert_int_equal(sl_journal_append(j, &r, &e), 0);
        assert_int_equal(sl_journal_sync(j, &e), 0);
        uint64_t n = sl_journal_count(j);
        sl_journal_close(j);
        sl_packer *pk;
        sl_batch b;
        assert_int_equal(sl_packer_open(&pk, dir, &e), 0);
        if (sl_packer_next(pk, n, &b, &e) != SL_EDATA) fail_msg("record %zu was packed", i);
        assert_non_null(strstr(e.msg, "do not belong together"));
        sl_packer_close(pk);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(restarts, setup, teardown),
                                       cmocka_unit_test_setup_teardown(half_a_row, setup, teardown),
                                       cmocka_unit_test_setup_teardown(commits, setup, teardown),
                                       cmocka_unit_test_setup_teardown(impossible_rows, setup, teardown),
                                       cmocka_unit_test_setup_teardown(odds, setup, teardown),
                                       cmocka_unit_test_setup_teardown(a_failed_sync_is_written_again, setup, teardown),
                                       cmocka_unit_test_setup_teardown(damaged_bytes_are_not_packed, setup, teardown)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
