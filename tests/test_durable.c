/* durable: the order of writes and syncs, seen from where a power cut sees it. This program stands between the code and
 * the C library: it notes which files have bytes, and which folders have names, that no fsync covered yet.
 *
 * Before a COMMIT or REJECT record is written, all of a store but its logs is durable; before an intake record is,
 * intake.dat is; before a file is renamed to its final name, its bytes are; when all is done, everything is. Writes go
 * by pwrite here: what io_uring is handed cannot be seen, but the order is decided in the same lines. */
#include "stages/feeder/intake.h"
#include "stages/writer/salvage.h"
#include "stages/writer/verify.h"
#include "tests/store_rig.h"
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>
#include "ipc/log.h"

typedef struct node { /* a file or folder as it was when it was last synced */
    ino_t ino;
    bool dirty;
    off_t size;
    struct timespec mtime;
} node;

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static node nodes[8192];
static unsigned n_nodes, n_bad, n_commits, n_intakes, n_renames;
static char bad[16][400], root[200];
static bool watching;
static const char *fail_sync; /* a sync of what has this in its path fails */

static node *find(ino_t ino) {
    for (unsigned i = 0; i < n_nodes; i++)
        if (nodes[i].ino == ino) return &nodes[i];
    return NULL;
}

static node *find_or_add(const struct stat *st, bool dirty) {
    node *n = find(st->st_ino);
    if (!n) {
        if (n_nodes == sizeof nodes / sizeof *nodes) abort();
        n = &nodes[n_nodes++];
        n->ino = st->st_ino;
    }
    *n = (node){st->st_ino, dirty, st->st_size, st->st_mtim};
    return n;
}

static void complain(const char *what, const char *path) {
    if (n_bad < 16) snprintf(bad[n_bad], sizeof bad[0], "%s: %s", what, path);
    n_bad++;
}

/* Also by size and time, which shows what was written through stdio. */
static bool unsynced(const struct stat *st) {
    const node *n = find(st->st_ino);
    if (S_ISDIR(st->st_mode) || (!n && !st->st_size)) return n && n->dirty;
    return !n || n->dirty || n->size != st->st_size || n->mtime.tv_sec != st->st_mtim.tv_sec ||
           n->mtime.tv_nsec != st->st_mtim.tv_nsec;
}

static const char *when, *only; /* of the walk */
static bool with_logs;
static int look(const char *path, const struct stat *st, int flag, struct FTW *f) {
    static const char *const logs[] = {"commit.log", "intake.log", "intake.dat", "manifest.json"};
    const char *name = path + f->base;
    (void)flag;
    if (strstr(path, "/.tmp") || strstr(path, ".new") || strstr(path, ".damaged")) return 0;
    if (only && strcmp(name, only) != 0) return 0;
    for (unsigned i = 0; !with_logs && !only && i < 4; i++)
        if (!strcmp(name, logs[i])) return 0;
    if (unsynced(st)) complain(when, path);
    return 0;
}

static void check(const char *at, const char *one, bool logs) {
    when = at, only = one, with_logs = logs;
    nftw(root, look, 16, FTW_PHYS);
}

static int stamp(const char *path, const struct stat *st, int flag, struct FTW *f) {
    (void)path, (void)flag, (void)f;
    find_or_add(st, false);
    return 0;
}

static void watch(const char *store) {
    n_nodes = n_bad = n_commits = n_intakes = n_renames = 0;
    snprintf(root, sizeof root, "%s", store);
    nftw(root, stamp, 16, FTW_PHYS);
    watching = true;
}

static void calm(const char *at) { /* everything is durable and nothing was out of order */
    check(at, NULL, true);
    watching = false;
    for (unsigned i = 0; i < n_bad && i < 16; i++) print_message("NOT DURABLE %s\n", bad[i]);
    assert_int_equal(n_bad, 0);
}

static void touch_parent(const char *path) {
    char dir[4096];
    struct stat st;
    snprintf(dir, sizeof dir, "%s", path);
    char *slash = strrchr(dir, '/');
    if (!slash) return;
    *slash = 0;
    if (!stat(dir, &st)) find_or_add(&st, true);
}

static void touch_fd(int fd) {
    struct stat st;
    if (!fstat(fd, &st)) find_or_add(&st, true);
}

/* ---- between the code and the C library ---- */

static void path_of(int fd, char *buf, size_t cap) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, buf, cap - 1);
    buf[n > 0 ? n : 0] = 0;
}

static bool ends(const char *s, const char *tail) {
    size_t n = strlen(s), t = strlen(tail);
    return n >= t && !strcmp(s + n - t, tail);
}

static void before_write(int fd, const void *p, size_t n) {
    char path[4096];
    uint16_t kind = 0;
    path_of(fd, path, sizeof path);
    if (n >= SL_JREC) memcpy(&kind, (const uint8_t *)p + offsetof(sl_commit_rec, kind), 2);
    if (ends(path, "/commit.log") && kind != SL_CM_HEADER) check("before a COMMIT record", NULL, false), n_commits++;
    if (ends(path, "/intake.log")) check("before an intake record", "intake.dat", false), n_intakes++;
}

ssize_t pwrite(int fd, const void *p, size_t n, off_t off) {
    pthread_mutex_lock(&mu);
    if (watching) before_write(fd, p, n);
    ssize_t r = syscall(SYS_pwrite64, fd, p, n, off);
    if (watching && r > 0) touch_fd(fd);
    pthread_mutex_unlock(&mu);
    return r;
}

ssize_t write(int fd, const void *p, size_t n) {
    ssize_t r = syscall(SYS_write, fd, p, n);
    struct stat st;
    pthread_mutex_lock(&mu);
    if (watching && r > 0 && !fstat(fd, &st) && S_ISREG(st.st_mode)) find_or_add(&st, true);
    pthread_mutex_unlock(&mu);
    return r;
}

int ftruncate(int fd, off_t n) {
    pthread_mutex_lock(&mu);
    struct stat st;
    bool other = !fstat(fd, &st) && st.st_size != n;
    int r = (int)syscall(SYS_ftruncate, fd, n);
    if (watching && other) touch_fd(fd);
    pthread_mutex_unlock(&mu);
    return r;
}

static int synced(int fd, long call) {
    char path[4096];
    struct stat st;
    pthread_mutex_lock(&mu);
    path_of(fd, path, sizeof path);
    bool broken = fail_sync && ends(path, fail_sync);
    int r = broken ? -1 : (int)syscall(call, fd);
    if (broken) errno = EIO;
    if (watching && !r && !fstat(fd, &st)) find_or_add(&st, false);
    pthread_mutex_unlock(&mu);
    return r;
}

int fsync(int fd) {
    return synced(fd, SYS_fsync);
}
int fdatasync(int fd) {
    return synced(fd, SYS_fdatasync);
}

int rename(const char *from, const char *to) {
    struct stat st;
    pthread_mutex_lock(&mu);
    if (watching && !stat(from, &st) && unsynced(&st)) complain("before it got its final name", from);
    if (watching && ends(to, "/commit.log")) check("before commit.log is put in place", NULL, false);
    if (watching && ends(to, "/intake.log")) check("before intake.log is put in place", "intake.dat", false);
    int r = (int)syscall(SYS_rename, from, to);
    if (watching && !r) touch_parent(to), n_renames++;
    pthread_mutex_unlock(&mu);
    return r;
}

int mkdir(const char *path, mode_t mode) {
    pthread_mutex_lock(&mu);
    int r = (int)syscall(SYS_mkdir, path, mode);
    if (watching && !r) touch_parent(path);
    pthread_mutex_unlock(&mu);
    return r;
}

int open(const char *path, int flags, ...) {
    va_list va;
    va_start(va, flags);
    int mode = flags & O_CREAT ? va_arg(va, int) : 0;
    va_end(va);
    pthread_mutex_lock(&mu);
    bool made = watching && flags & O_CREAT && syscall(SYS_access, path, F_OK);
    int r = (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
    if (made && r >= 0) touch_parent(path);
    pthread_mutex_unlock(&mu);
    return r;
}

FILE *fopen(const char *path, const char *how) {
    FILE *(*real)(const char *, const char *);
    *(void **)&real = dlsym(RTLD_NEXT, "fopen");
    pthread_mutex_lock(&mu);
    bool made = watching && *how != 'r' && syscall(SYS_access, path, F_OK);
    FILE *f = real(path, how);
    if (made && f) touch_parent(path);
    pthread_mutex_unlock(&mu);
    return f;
}

/* ---- the tests ---- */

static char base[64], store[80];
static sl_err e;

static int setup(void **state) {
    (void)state;
    strcpy(base, "./sluice-durable-XXXXXX"); /* not /tmp: a memory file system has no time of its own */
    sl_log_init("test", SL_ERROR);
    if (!mkdtemp(base)) return -1;
    snprintf(store, sizeof store, "%s/s", base);
    return 0;
}
static int teardown(void **state) {
    (void)state;
    watching = false;
    fail_sync = NULL;
    rig_rmtree(base);
    return 0;
}

static void sink_commits(uint32_t layout) {
    rig r;
    rig_make(&r, store, 23, 20, 24, 2, 7);
    r.m.layout = layout;
    r.m.codec = SL_CODEC_NONE;
    /* The first one is of the second data set: its folder in quarantine is two levels deep. */
    for (uint64_t i = 1; i < r.n; i += 5) r.rows[i].verdict = SL_V_NONFINITE;
    sl_sink_cfg c = {.threads = 1, .shard_rows = 6, .plain = true, .direct = true};
    assert_int_equal(mkdir(store, 0755), 0);
    rig_intake(&r);
    watch(store);
    rig_sink(&r, &c, 5, 1000);
    assert_true(n_commits > 0 && n_renames > 1);
    calm("at the end");
    rig_free(&r);
}

static void shards_before_commits(void **state) {
    (void)state;
    sink_commits(SL_LAYOUT_SHARDS);
}

static void files_before_commits(void **state) {
    (void)state;
    sink_commits(SL_LAYOUT_FILES);
}

/* A run that was killed before it synced a folder's name leaves that to the next one. */
static void names_of_an_earlier_run(void **state) {
    (void)state;
    rig r;
    char path[200];
    rig_make(&r, store, 9, 20, 24, 2, 7);
    r.m.layout = SL_LAYOUT_FILES;
    r.rows[1].verdict = SL_V_NONFINITE;
    sl_sink_cfg c = {.threads = 1};
    rig_intake(&r);
    watch(store);
    snprintf(path, sizeof path, "%s/quarantine", store);
    assert_int_equal(mkdir(path, 0755), 0);
    sl_store_dataset_dir(path + strlen(path) + 1, 130, 1, rig_name(1));
    path[strlen(path)] = '/';
    assert_int_equal(mkdir(path, 0755), 0);
    rig_sink(&r, &c, 5, 1000);
    calm("at the end");
    rig_free(&r);
}

/* What could not be synced is not committed: the run ends with an error and no COMMIT record. */
static void failing(uint32_t layout, const char *what, int want) {
    rig r;
    char path[200];
    rig_rmtree(store);
    rig_make(&r, store, 8, 20, 24, 2, 7);
    r.m.layout = layout;
    r.m.codec = SL_CODEC_NONE;
    r.rows[1].verdict = SL_V_NONFINITE;
    sl_sink_cfg c = {.threads = 1, .plain = true};
    pid_t pid = fork();
    if (!pid) {
        if (!freopen("/dev/null", "w", stderr)) _exit(9);
        fail_sync = what;
        rig_sink(&r, &c, 5, 1000);
        _exit(0);
    }
    int st;
    assert_int_equal(waitpid(pid, &st, 0), pid);
    if (!WIFEXITED(st) || WEXITSTATUS(st) != 1) fail_msg("'%s' not synced: status %x", what, (unsigned)st);
    uint64_t at = 0;
    snprintf(path, sizeof path, "%s/commit.log", store);
    assert_int_equal(sl_journal_follow(path, SL_COMMIT_MAGIC, &at, NULL, NULL, &e), 0);
    if (at > (uint64_t)want) fail_msg("'%s' not synced: %llu records in the log", what, (unsigned long long)at);
    rig_free(&r);
}

static void nothing_is_committed_unsynced(void **state) {
    (void)state;
    failing(SL_LAYOUT_SHARDS, "/s", 0);
    failing(SL_LAYOUT_SHARDS, "/shards", 1);
    failing(SL_LAYOUT_SHARDS, ".sls.open", 1);
    failing(SL_LAYOUT_SHARDS, ".json", 1); /* of the rejected row */
    failing(SL_LAYOUT_SHARDS, "/commit.log", 1);
    failing(SL_LAYOUT_SHARDS, "/.manifest.tmp", 1);
    failing(SL_LAYOUT_FILES, "/hidden_states", 1);
    failing(SL_LAYOUT_FILES, "/quarantine", 1);
    failing(SL_LAYOUT_FILES, ".st", 1);
    failing(SL_LAYOUT_FILES, ".json", 1);
}

/* What a crash left behind the last committed row is durably gone before the next rows are committed. */
static void a_cut_shard_is_synced(void **state) {
    (void)state;
    rig r;
    char a[200], b[220];
    rig_make(&r, store, 9, 20, 24, 2, 7);
    r.m.codec = SL_CODEC_NONE;
    sl_sink_cfg c = {.threads = 1, .plain = true, .shard_rows = 100};
    rig_sink(&r, &c, 5, 3);
    snprintf(a, sizeof a, "%s/shards/shard-000000.sls", store);
    snprintf(b, sizeof b, "%s.open", a);
    assert_int_equal(rename(a, b), 0);
    snprintf(a, sizeof a, "%s/commit.log", store);
    assert_int_equal(truncate(a, 8 * SL_JREC - 3), 0);
    watch(store);
    rig_sink(&r, &c, 5, 1000);
    assert_true(n_commits > 0);
    calm("at the end");
    rig_free(&r);
}

static void damage(const char *what) {
    char cmd[400];
    snprintf(cmd, sizeof cmd, "cd %s && %s", store, what);
    assert_int_equal(system(cmd), 0);
}

static void salvage_is_synced(void **state) {
    (void)state;
    rig r;
    rig_make(&r, store, 14, 6, 16, 2, 5);
    r.m.codec = SL_CODEC_BF16;
    r.rows[4].verdict = SL_V_NONFINITE;
    sl_sink_cfg c = {.threads = 1, .plain = true, .shard_rows = 4};
    rig_sink(&r, &c, 2, 3);
    damage("rm intake.log intake.dat manifest.json && for i in 1 2; do mv shards/shard-00000$i.sls "
           "shards/shard-00000$i.sls.open; done && "
           "printf zz | dd of=shards/shard-000000.sls bs=1 seek=5000 conv=notrunc 2>/dev/null");
    watch(store);
    sl_salvage_report rep;
    assert_int_equal(sl_store_salvage(store, &rep, &e), 0);
    assert_int_equal(rep.rows, 12);
    calm("after salvage");
    rig_free(&r);
}

static void journal_is_synced(void **state) {
    (void)state;
    char path[120];
    sl_journal *j;
    sl_commit_rec r = {.kind = SL_CM_COMMIT};
    assert_int_equal(mkdir(store, 0755), 0);
    snprintf(path, sizeof path, "%s/other.log", store);
    watch(store);
    assert_int_equal(sl_journal_open(&j, path, SL_COMMIT_MAGIC, NULL, NULL, &e), 0);
    check("a new journal's name", NULL, true);
    for (int i = 0; i < 3; i++) assert_int_equal(sl_journal_append(j, &r, &e), 0);
    assert_int_equal(sl_journal_sync(j, &e), 0);
    check("after a sync", NULL, true);
    fail_sync = "other.log"; /* not durable is said, and all of it is written again */
    assert_int_equal(sl_journal_append(j, &r, &e), 0);
    assert_int_equal(sl_journal_sync(j, &e), SL_ETEMP);
    assert_int_equal(truncate(path, 3 * SL_JREC), 0); /* what a kernel may do with pages it could not write */
    fail_sync = NULL;
    assert_int_equal(sl_journal_sync(j, &e), 0);
    sl_journal_close(j);
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_size, 4 * SL_JREC);
    assert_int_equal(truncate(path, 4 * SL_JREC - 5), 0);
    fail_sync = "other.log";
    assert_int_equal(sl_journal_open(&j, path, SL_COMMIT_MAGIC, NULL, NULL, &e), SL_ETEMP); /* the cut */
    fail_sync = NULL;
    assert_int_equal(truncate(path, 3 * SL_JREC - 5), 0);
    assert_int_equal(sl_journal_open(&j, path, SL_COMMIT_MAGIC, NULL, NULL, &e), 0);
    calm("after a cut");
    sl_journal_close(j);
    fail_sync = "/s";
    assert_int_equal(sl_journal_open(&j, path, SL_COMMIT_MAGIC, NULL, NULL, &e), SL_ETEMP); /* the folder */
}

static void intake_data_before_records(void **state) {
    (void)state;
    sl_intake *in;
    const sl_intake_cfg c = {.store = store, .batch_tokens = 100, .max_batch_rows = 8, .max_length = 50};
    assert_int_equal(mkdir(store, 0755), 0);
    watch(store);
    assert_int_equal(sl_intake_open(&in, &c, &e), 0);
    int32_t ids[4] = {1, 2, 3, 4};
    uint8_t mask[4] = {1, 1, 1, 1};
    sl_part part = {.T = 4, .ids = ids, .mask = mask, .mask_sum = 4};
    sl_prepared p = {.parts = &part, .n = 1};
    for (uint64_t i = 0; i < 6; i++) {
        int64_t d = sl_intake_dataset(in, "set", &e);
        assert_int_equal(d, 0);
        assert_int_equal(sl_intake_add(in, 0, i, (uint64_t[2]){i, i}, &p, 0, &e), 0);
        if (i == 4) { /* a failed sync of the data stops the records */
            unsigned before = n_intakes;
            fail_sync = "intake.dat";
            assert_int_equal(sl_intake_sync(in, &e), SL_ETEMP);
            assert_int_equal(n_intakes, before);
            fail_sync = NULL;
        }
        assert_int_equal(sl_intake_sync(in, &e), 0);
        check("after a sync", NULL, true);
    }
    sl_intake_close(in);
    calm("at the end");
}

int main(void) {
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest t[] = {
        T(journal_is_synced),       T(intake_data_before_records),    T(shards_before_commits), T(files_before_commits),
        T(names_of_an_earlier_run), T(nothing_is_committed_unsynced), T(a_cut_shard_is_synced), T(salvage_is_synced)};
    return cmocka_run_group_tests_name("durable", t, NULL, NULL);
}
