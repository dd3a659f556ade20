/* journal: what is synced is there, a torn tail is cut, damage in the middle is not mistaken for one, a full disk loses
 * nothing. CRC32C is compared with published values. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "ipc/crc32c.h"
#include "ipc/journal.h"
#include "ipc/log.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static char dir[64], path[96];
static sl_err e;
static uint64_t seen_n, seen_sum;

/* In place of the C library's: counts, and mends record `mend_rec` after somebody has read it alone. */
static unsigned n_syncs;
static uint64_t mend_rec = UINT64_MAX;
static void corrupt(uint64_t rec, unsigned byte);

int fdatasync(int fd) {
    n_syncs++;
    return (int)syscall(SYS_fdatasync, fd);
}

ssize_t pread(int fd, void *buf, size_t n, off_t off) {
    ssize_t r = syscall(SYS_pread64, fd, buf, n, off);
    if (n == SL_JREC && (uint64_t)off == mend_rec * SL_JREC) {
        uint64_t rec = mend_rec;
        mend_rec = UINT64_MAX;
        corrupt(rec, 8);
    }
    return r;
}

static int each(void *arg, const void *rec, sl_err *err) {
    const sl_commit_rec *r = rec;
    (void)err;
    assert_int_equal(r->seq, seen_n);
    seen_n++;
    seen_sum += r->seq * 7 + r->row;
    return arg && seen_n == *(uint64_t *)arg ? SL_EDATA : 0;
}

static int setup(void **state) {
    (void)state;
    strcpy(dir, "/tmp/sl_journal_XXXXXX");
    if (!mkdtemp(dir)) return -1;
    snprintf(path, sizeof path, "%s/commit.log", dir);
    sl_log_init("test", SL_ERROR);
    seen_n = seen_sum = 0;
    return 0;
}

static int teardown(void **state) {
    (void)state;
    char cmd[96];
    snprintf(cmd, sizeof cmd, "rm -r %s", dir);
    return system(cmd);
}

static void append(sl_journal *j, uint64_t seq) {
    sl_commit_rec r = {.kind = SL_CM_COMMIT, .seq = seq, .row = seq * 3};
    assert_int_equal(sl_journal_append(j, &r, &e), 0);
}

static void fill(uint64_t n) {
    sl_journal *j;
    assert_int_equal(sl_journal_open(&j, path, SL_COMMIT_MAGIC, NULL, NULL, &e), 0);
    for (uint64_t i = 0; i < n; i++) append(j, i);
    assert_int_equal(sl_journal_sync(j, &e), 0);
    sl_journal_close(j);
}

static void reads_back(void **state) {
    (void)state;
    fill(1300); /* more than two blocks of the scan */
    sl_journal *j;
    assert_int_equal(sl_journal_open(&j, path, SL_COMMIT_MAGIC, each, NULL, &e), 0);
    assert_int_equal(seen_n, 1300);
    assert_int_equal(sl_journal_count(j), 1300);
    append(j, 1300);
    assert_int_equal(sl_journal_count(j), 1301);
    sl_journal_close(j); /* not synced: dropped */
    seen_n = 0;
    uint64_t at = 0;
    assert_int_equal(sl_journal_follow(path, SL_COMMIT_MAGIC, &at, each, NULL, &e), 0);
    assert_int_equal(at, 1300);
    assert_int_equal(sl_journal_follow(path, SL_COMMIT_MAGIC, &at, each, NULL, &e), 0);
    assert_int_equal(seen_n, 1300);
    uint64_t none = 0;
    assert_int_equal(sl_journal_follow("/nonexistent/x", SL_COMMIT_MAGIC, &none, each, NULL, &e), 0);
    assert_int_equal(sl_journal_open(&j, "/nonexistent/x", SL_COMMIT_MAGIC, NULL, NULL, &e), SL_ECONFIG);
}

static void follower_stops_where_told(void **state) {
    (void)state;
    fill(10);
    uint64_t at = 0, stop = 4;
    assert_int_equal(sl_journal_follow(path, SL_COMMIT_MAGIC, &at, each, &stop, &e), SL_EDATA);
    assert_int_equal(at, 3); /* the record that was refused comes again */
}

static void cuts_every_torn_tail(void **state) {
    (void)state;
    for (unsigned cut = 1; cut < SL_JREC; cut += 9) {
        unlink(path);
        fill(5);
        assert_int_equal(truncate(path, 5 * SL_JREC - cut), 0);
        uint64_t at = 0;
        assert_int_equal(sl_journal_follow(path, SL_COMMIT_MAGIC, &at, NULL, NULL, &e), 0);
        assert_int_equal(at, 4);
        sl_journal *j;
        assert_int_equal(sl_journal_open(&j, path, SL_COMMIT_MAGIC, NULL, NULL, &e), 0);
        assert_int_equal(sl_journal_count(j), 4);
        append(j, 4);
        assert_int_equal(sl_journal_sync(j, &e), 0);
        sl_journal_close(j);
        seen_n = at = 0;
        assert_int_equal(sl_journal_follow(path, SL_COMMIT_MAGIC, &at, each, NULL, &e), 0);
        assert_int_equal(at, 5);
    }
}

static void corrupt(uint64_t rec, unsigned byte) {
    int fd = open(path, O_RDWR);
    uint8_t v;
    assert_int_equal(pread(fd, &v, 1, (off_t)(rec * SL_JREC + byte)), 1);
    v ^= 0x10;
    assert_int_equal(pwrite(fd, &v, 1, (off_t)(rec * SL_JREC + byte)), 1);
    close(fd);
}

static void tells_damage_from_a_torn_tail(void **state) {
    (void)state;
    for (unsigned byte = 0; byte < SL_JREC; byte += 13) {
        unlink(path);
        fill(6);
        corrupt(2, byte);
        sl_journal *j;
        uint64_t at = 0;
        assert_int_equal(sl_journal_follow(path, SL_COMMIT_MAGIC, &at, NULL, NULL, &e), SL_EDATA);
        assert_int_equal(at, 2);
        assert_int_equal(sl_journal_open(&j, path, SL_COMMIT_MAGIC, NULL, NULL, &e), SL_EDATA);
        assert_non_null(strstr(e.msg, "record 2 "));
        struct stat st;
        assert_int_equal(stat(path, &st), 0);
        assert_int_equal(st.st_size, 6 * SL_JREC); /* nothing was cut */
        unlink(path);
        fill(6);
        corrupt(5, byte); /* the last one alone: torn */
        assert_int_equal(sl_journal_open(&j, path, SL_COMMIT_MAGIC, NULL, NULL, &e), 0);
        assert_int_equal(sl_journal_count(j), 5);
        sl_journal_close(j);
    }
    unlink(path);
    fill(2);
    sl_journal *j; /* another log's file is no torn tail of ours */
    assert_int_equal(sl_journal_open(&j, path, SL_INTAKE_MAGIC, NULL, NULL, &e), SL_EDATA);
}

/* A reader that meets a write of many records in the middle sees damage with good records behind it, for a moment. */
static void a_write_in_the_middle_is_no_damage(void **state) {
    (void)state;
    fill(6);
    corrupt(2, 8);
    mend_rec = 2;
    uint64_t at = 0;
    assert_int_equal(sl_journal_follow(path, SL_COMMIT_MAGIC, &at, NULL, NULL, &e), 0);
    assert_int_equal(at, 2);
    assert_int_equal(sl_journal_follow(path, SL_COMMIT_MAGIC, &at, NULL, NULL, &e), 0);
    assert_int_equal(at, 6);
}

/* What is found at the start counts as durable, so it must be: a killed process may not have come as far as its sync.
 */
static void what_is_found_is_synced(void **state) {
    (void)state;
    fill(3);
    n_syncs = 0;
    sl_journal *j;
    assert_int_equal(sl_journal_open(&j, path, SL_COMMIT_MAGIC, NULL, NULL, &e), 0);
    assert_true(n_syncs > 0);
    sl_journal_close(j);
}

static void refuses_a_second_writer(void **state) {
    (void)state;
    sl_journal *j, *k;
    assert_int_equal(sl_journal_open(&j, path, SL_COMMIT_MAGIC, NULL, NULL, &e), 0);
    assert_int_equal(sl_journal_open(&k, path, SL_COMMIT_MAGIC, NULL, NULL, &e), SL_ETEMP);
    char pid[32];
    snprintf(pid, sizeof pid, "process %d ", (int)getpid());
    if (!access("/proc/locks", R_OK) && !strstr(e.msg, pid) && !strstr(e.msg, "another process")) fail_msg("%s", e.msg);
    sl_journal_close(j);
    assert_int_equal(sl_journal_open(&k, path, SL_COMMIT_MAGIC, NULL, NULL, &e), 0);
    sl_journal_close(k);
}

/* A file-size limit stands in for a full disk: writes come up short, then fail, in the middle of a record. */
static void a_full_disk_loses_nothing(void **state) {
    (void)state;
    pid_t pid = fork();
    if (!pid) {
        signal(SIGXFSZ, SIG_IGN);
        struct rlimit lim = {10 * SL_JREC + 50, RLIM_INFINITY};
        sl_journal *j;
        if (sl_journal_open(&j, path, SL_COMMIT_MAGIC, NULL, NULL, &e)) _exit(2);
        for (uint64_t i = 0; i < 8; i++) append(j, i);
        if (sl_journal_sync(j, &e)) _exit(3);
        if (setrlimit(RLIMIT_FSIZE, &lim)) _exit(4);
        for (uint64_t i = 8; i < 20; i++) append(j, i);
        if (sl_journal_sync(j, &e) != SL_ETEMP) _exit(5);
        if (sl_journal_sync(j, &e) != SL_ETEMP) _exit(6);
        append(j, 20); /* one may go on appending */
        lim.rlim_cur = RLIM_INFINITY;
        if (setrlimit(RLIMIT_FSIZE, &lim)) _exit(7);
        if (sl_journal_sync(j, &e)) _exit(8);
        if (sl_journal_count(j) != 21) _exit(9);
        _exit(0);
    }
    int st;
    waitpid(pid, &st, 0);
    assert_int_equal(st, 0);
    uint64_t at = 0;
    assert_int_equal(sl_journal_follow(path, SL_COMMIT_MAGIC, &at, each, NULL, &e), 0);
    assert_int_equal(at, 21);
}

/* Killed at random while it appends and syncs: what was reported as synced is there, in order, once. */
static void survives_kills(void **state) {
    (void)state;
    int p[2];
    uint64_t durable = 0;
    for (int round = 0; round < 8; round++) {
        assert_int_equal(pipe(p), 0);
        pid_t pid = fork();
        if (!pid) {
            sl_journal *j;
            if (sl_journal_open(&j, path, SL_COMMIT_MAGIC, NULL, NULL, &e)) _exit(2);
            for (;;) {
                for (int i = 0; i < 3; i++) append(j, sl_journal_count(j));
                if (sl_journal_sync(j, &e)) _exit(3);
                uint64_t n = sl_journal_count(j);
                if (write(p[1], &n, 8) != 8) _exit(4);
            }
        }
        close(p[1]);
        for (int i = 0; i < 4 + round; i++) assert_int_equal(read(p[0], &durable, 8), 8);
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        for (uint64_t v; read(p[0], &v, 8) == 8;) durable = v;
        close(p[0]);
        uint64_t at = 0;
        seen_n = 0;
        assert_int_equal(sl_journal_follow(path, SL_COMMIT_MAGIC, &at, each, NULL, &e), 0);
        assert_true(at >= durable);
    }
}

/* Linked with --wrap=fdatasync. */
int __real_fdatasync(int fd);
int __wrap_fdatasync(int fd);
static int syncs, sync_errno;
int __wrap_fdatasync(int fd) {
    syncs++;
    errno = sync_errno;
    return sync_errno ? -1 : __real_fdatasync(fd);
}

/* Its writer was killed between write and sync: a record that is found counts as durable, so opening has to sync it. */
static void opening_syncs_what_it_finds(void **state) {
    (void)state;
    fill(5);
    syncs = 0;
    sl_journal *j;
    assert_int_equal(sl_journal_open(&j, path, SL_COMMIT_MAGIC, NULL, NULL, &e), 0);
    assert_int_equal(syncs, 1);
    sl_journal_close(j);
    sync_errno = ENOSPC;
    assert_int_equal(sl_journal_open(&j, path, SL_COMMIT_MAGIC, NULL, NULL, &e), SL_ETEMP);
    sync_errno = EIO; /* the same: the kernel may show what it could not write, so nothing goes on from it */
    assert_int_equal(sl_journal_open(&j, path, SL_COMMIT_MAGIC, NULL, NULL, &e), SL_ETEMP);
    sync_errno = 0;
}

static void crc_and_keys(void **state) {
    (void)state;
    assert_int_equal(sl_crc32c(0, "123456789", 9), 0xe3069283u); /* the check value of the CRC catalogue */
    uint8_t z[32] = {0};                                         /* RFC 3720, B.4 */
    assert_int_equal(sl_crc32c(0, z, 32), 0x8a9136aau);
    memset(z, 0xff, 32);
    assert_int_equal(sl_crc32c(0, z, 32), 0x62a8ab43u);
    uint8_t buf[257];
    for (unsigned i = 0; i < sizeof buf; i++) buf[i] = (uint8_t)(i * 37 + 11);
    for (unsigned n = 0; n < sizeof buf; n++) {
        uint32_t t = sl_crc32c_table(0x1234, buf, n);
        assert_int_equal(sl_crc32c(0x1234, buf, n), t);
        assert_int_equal(sl_crc32c(sl_crc32c(0x1234, buf, n / 3), buf + n / 3, n - n / 3), t); /* in two pieces */
    }
    sl_key a = sl_row_key("d", 1, 0), c = sl_row_key("d", 1, 1), d = sl_row_key("d", 257, 0), f = sl_row_key("d", 1, 0);
    assert_memory_equal(&a, &f, sizeof a);
    assert_memory_not_equal(&a, &c, sizeof a);
    assert_memory_not_equal(&a, &d, sizeof a);
    assert_string_equal(sl_reason_name(SL_R_MEDIA), "MEDIA");
    assert_string_equal(sl_reason_name((sl_reason)99), "?");
}

int main(void) {
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest t[] = {T(reads_back),
                                   T(follower_stops_where_told),
                                   T(cuts_every_torn_tail),
                                   T(tells_damage_from_a_torn_tail),
                                   T(a_write_in_the_middle_is_no_damage),
                                   T(what_is_found_is_synced),
                                   T(refuses_a_second_writer),
                                   T(a_full_disk_loses_nothing),
                                   T(survives_kills),
                                   T(opening_syncs_what_it_finds),
                                   T(crc_and_keys)};
    return cmocka_run_group_tests_name("journal", t, NULL, NULL);
}
