/* boot, ctl, stage start, crash points. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "ipc/boot.h"
#include "ipc/crash.h"
#include "ipc/doorbell.h"
#include "ipc/log.h"
#include "tests/boot_example.h"
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static sl_boot b;
static sl_err e;

static void carries_a_block(void **state) {
    (void)state;
    boot_example(&b, 2, 3);
    strcpy(b.model, "/m");
    int fd = sl_boot_create(&b, &e);
    assert_true(fd >= 0);
    const sl_boot *got;
    assert_int_equal(sl_boot_attach(&got, fd, &e), 0);
    assert_memory_equal(got, &b, sizeof b);
    assert_true(pwrite(fd, "x", 1, 0) < 0); /* sealed */
    assert_true(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
    assert_true(ftruncate(fd, 0) < 0);
    close(fd);
}

/* Each line breaks one thing; the check must refuse and name it. */
#define BREAK(stmt, word)                                                                                              \
    do {                                                                                                               \
        boot_example(&b, 2, 3);                                                                                        \
        assert_int_equal(sl_boot_check(&b, &e), 0);                                                                    \
        stmt;                                                                                                          \
        assert_int_equal(sl_boot_check(&b, &e), SL_EINTERNAL);                                                         \
        if (!strstr(e.msg, word)) fail_msg("'%s' does not speak of '%s'", e.msg, word);                                \
    } while (0)

static void checks_everything(void **state) {
    (void)state;
    BREAK(b.magic++, "magic");
    BREAK(b.abi++, "version");
    BREAK(b.size--, "version");
    BREAK(b.layout_hash ^= 1, "version");
    BREAK(b.dp = 0, "dp");
    BREAK(b.dp = SL_MAX_GROUPS + 1, "dp");
    BREAK(b.tp = SL_MAX_RANKS, "tp");
    BREAK(b.n_procs++, "n_procs");
    BREAK(b.procs[2].role = SL_ROLE_WRITER, "role");
    BREAK(b.procs[5].rank = 7, "rank");
    BREAK(b.procs[9].bell_fd = -1, "bell");
    BREAK(memset(b.procs[9].name, 'x', 32), "name");
    BREAK(b.groups[1].first_rank_proc = 70000, "first_rank_proc");
    BREAK(b.groups[1].chunk_fd[2] = -5, "chunk");
    BREAK(b.groups[0].batch_fd = 1 << 30, "batch ring");
    BREAK(b.metrics_fd = -1, "metrics_fd");
    BREAK(b.n_captures = 0, "n_captures");
    BREAK(b.n_captures = SL_MAX_CAPTURES + 1, "n_captures");
    BREAK(b.captures[1].hidx = 9, "order");
    BREAK(b.captures[1].hidx = 0, "order");
    BREAK(b.captures[1].final_norm = 1, "order");
    BREAK(b.elem_size = 3, "elem_size");
    BREAK(b.width = 0, "width");
    BREAK(b.chunk_rows = 0, "chunk_rows");
    BREAK(b.log_level = 4, "log_level");
    BREAK(b.codec = 77, "codec");
    BREAK(b.norm_eps_lora = 0.0 / 0.0, "eps");
    BREAK(memset(b.store, 'x', sizeof b.store), "store");
    BREAK(memset(b.crash_points, 'x', sizeof b.crash_points), "crash_points");
    boot_example(&b, 1, 1);
    b.captures[2] = (sl_capture){8, 0};
    b.captures[3] = (sl_capture){8, 1}; /* H[n] and its normed twin */
    b.n_captures = 4;
    assert_int_equal(sl_boot_check(&b, &e), 0);
    const sl_boot *got;
    int fd = open("/dev/zero", O_RDONLY);
    assert_int_equal(sl_boot_attach(&got, fd, &e), SL_EINTERNAL);
    close(fd);
}

static void ctl_pages(void **state) {
    (void)state;
    int fd = sl_ctl_create(2, &e);
    sl_ctl_page *w, *r;
    assert_int_equal(sl_ctl_attach(&w, fd, 2, 1, &e), 0);
    assert_int_equal(sl_ctl_attach(&r, fd, 2, 0, &e), 0);
    assert_int_equal(r[1].epoch, 1);
    assert_int_equal(r[2].epoch, 1);
    w[2].epoch = 5;
    w[0].draining = 1;
    assert_int_equal(r[2].epoch, 5);
    assert_int_equal(r[0].draining, 1);
    assert_int_equal(sl_ctl_attach(&r, fd, 3, 0, &e), SL_EINTERNAL);
    close(fd);
}

static int stage_with(sl_boot *blk, const char *proc, sl_role role, int *metrics_fd) {
    int bell = sl_bell_create(&e), ctl = sl_ctl_create(blk->dp, &e), met = sl_metrics_create(blk->n_procs, &e);
    for (uint32_t i = 0; i < blk->n_procs; i++) blk->procs[i].bell_fd = bell;
    blk->ctl_fd = ctl;
    blk->metrics_fd = met;
    int fd = sl_boot_create(blk, &e);
    char num[16];
    snprintf(num, sizeof num, "%d", fd);
    char a0[] = "x", a1[] = "--boot", a3[] = "--proc", p[8];
    snprintf(p, sizeof p, "%s", proc);
    char *argv[] = {a0, a1, num, a3, p, NULL};
    sl_stage s;
    int rc = sl_stage_open(&s, 5, argv, role, &e);
    if (!rc && (s.proc != 4 || strcmp(s.me->name, "rank0.0") || s.ctl[1].epoch != 1)) return 1;
    if (!rc) sl_metric_set(s.metrics, SL_M_STATE, SL_ST_READY);
    if (metrics_fd) *metrics_fd = met;
    return rc;
}

static void stage_starts(void **state) {
    (void)state;
    int st;
    boot_example(&b, 1, 1);
    pid_t pid = fork(); /* it changes signals and the log of its process */
    if (!pid) {
        int fd = -1;
        int rc = stage_with(&b, "4", SL_ROLE_RANK, &fd);
        sigset_t now;
        sigprocmask(SIG_SETMASK, NULL, &now);
        raise(SIGTERM);
        _exit(rc ? 10 : sigismember(&now, SIGINT) ? 0 : 11);
    }
    waitpid(pid, &st, 0);
    assert_int_equal(st, 0);
    const struct {
        const char *proc;
        sl_role role;
    } bad[] = {
        {"4", SL_ROLE_WRITER}, {"5", SL_ROLE_RANK}, {"-1", SL_ROLE_RANK}, {"4x", SL_ROLE_RANK}, {"99", SL_ROLE_RANK}};
    for (unsigned i = 0; i < 5; i++) {
        boot_example(&b, 1, 1);
        pid = fork();
        if (!pid) _exit(stage_with(&b, bad[i].proc, bad[i].role, NULL) < 0 ? 0 : 1);
        waitpid(pid, &st, 0);
        assert_int_equal(st, 0);
    }
    char a0[] = "sluice-gather";
    char *argv[] = {a0, NULL};
    sl_stage s;
    assert_int_equal(sl_stage_open(&s, 1, argv, SL_ROLE_GATHER, &e), SL_EUSAGE);
}

static int child_passes(const char *points, unsigned n) {
    fflush(NULL);
    pid_t pid = fork();
    if (!pid) {
        int null = open("/dev/null", O_WRONLY);
        dup2(null, 2);
        snprintf(b.crash_points, sizeof b.crash_points, "%s", points);
        sl_crash_init(&b, "gather");
        for (unsigned i = 0; i < n; i++) {
            sl_crash_point("gather.other");
            sl_crash_point("gather.here");
        }
        _exit(0);
    }
    int st;
    waitpid(pid, &st, 0);
    return WIFSIGNALED(st) ? -WTERMSIG(st) : WEXITSTATUS(st);
}

static void crash_points_fire_once(void **state) {
    (void)state;
    char dir[] = "/tmp/sl_crash_XXXXXX";
    assert_non_null(mkdtemp(dir));
    boot_example(&b, 1, 1);
    snprintf(b.store, sizeof b.store, "%s", dir);
    assert_int_equal(child_passes("", 5), 0);
    assert_int_equal(child_passes("gather.here:3", 2), 0);
    assert_int_equal(child_passes("gather.never:1,gather.here:3", 3), -SIGKILL);
    assert_int_equal(child_passes("gather.here:3", 9), 0); /* it has fired in the life of this store */
    assert_int_equal(child_passes("gather.other", 1), -SIGKILL);
    assert_int_equal(child_passes("../../etc/x:1,:::,nonsense:-4,,", 1), 0);
    char cmd[64];
    snprintf(cmd, sizeof cmd, "rm -r %s", dir);
    assert_int_equal(system(cmd), 0);
}

int main(void) {
    const struct CMUnitTest t[] = {cmocka_unit_test(carries_a_block), cmocka_unit_test(checks_everything),
                                   cmocka_unit_test(ctl_pages), cmocka_unit_test(stage_starts),
                                   cmocka_unit_test(crash_points_fire_once)};
    return cmocka_run_group_tests_name("boot", t, NULL, NULL);
}
