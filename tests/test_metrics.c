/* metrics and doorbell. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "ipc/doorbell.h"
#include "ipc/metrics.h"
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void one_writer_a_page(void **state) {
    (void)state;
    sl_err e;
    int fd = sl_metrics_create(3, &e);
    assert_true(fd >= 0);
    sl_metrics *a, *b;
    assert_int_equal(sl_metrics_attach(&a, fd, 1, &e), 0);
    assert_int_equal(sl_metrics_attach(&b, fd, -1, &e), 0);
    sl_metric_reset(a);
    sl_metric_add(a, SL_M_ROWS_IN, 5);
    sl_metric_add(a, SL_M_ROWS_IN, 2);
    sl_metric_set(a, SL_M_REJECT_BASE + 31, 9);
    assert_int_equal(sl_metric_get(b, 1, SL_M_ROWS_IN), 7);
    assert_int_equal(sl_metric_get(b, 1, SL_M_REJECT_BASE + 31), 9);
    assert_int_equal(sl_metric_get(b, 1, SL_M_PID), getpid());
    assert_int_equal(sl_metric_get(b, 0, SL_M_ROWS_IN), 0);
    assert_int_equal(sl_metric_get(b, 99, SL_M_ROWS_IN), 0);
    sl_metric_add(b, SL_M_ROWS_IN, 1); /* no own page: nothing happens */
    sl_metric_reset(b);
    assert_int_equal(sl_metric_get(b, 1, SL_M_ROWS_IN), 7);
    sl_metrics_detach(a);
    sl_metrics_detach(b);
    assert_int_equal(sl_metrics_attach(&a, fd, 3, &e), SL_EINTERNAL);
    close(fd);
    assert_int_equal(sl_metrics_create(0, &e), SL_ECONFIG);
    for (int i = 0; i < SL_M_REJECT_BASE; i++) assert_non_null(sl_metric_names[i]);
    assert_string_equal(sl_stage_state_name(SL_ST_DONE), "done");
    assert_string_equal(sl_stage_state_name(1000), "?");
}

static void regimes_sum_to_the_time(void **state) {
    (void)state;
    sl_err e;
    int fd = sl_metrics_create(1, &e);
    sl_metrics *m;
    assert_int_equal(sl_metrics_attach(&m, fd, 0, &e), 0);
    sl_metric_reset(m);
    struct timespec ms = {.tv_nsec = 3000000};
    for (int i = 0; i < 3; i++) {
        sl_metric_regime(m, SL_M_WAIT_IN_NS);
        nanosleep(&ms, NULL);
        sl_metric_regime(m, i & 1 ? SL_M_BUSY_NS : SL_M_WAIT_OUT_NS);
        nanosleep(&ms, NULL);
        sl_metric_beat(m);
    }
    uint64_t sum = sl_metric_get(m, 0, SL_M_BUSY_NS) + sl_metric_get(m, 0, SL_M_WAIT_IN_NS) +
                   sl_metric_get(m, 0, SL_M_WAIT_OUT_NS);
    uint64_t wall = sl_now_ns() - sl_metric_get(m, 0, SL_M_START_NS);
    assert_true(sum <= wall);
    assert_true(wall - sum < 100000000); /* only what passed since the last beat */
    assert_true(sl_metric_get(m, 0, SL_M_WAIT_IN_NS) >= 9000000);
    assert_int_equal(sl_metric_get(m, 0, SL_M_HEARTBEAT), 3);
    sl_metrics_detach(m);
    close(fd);
}

static void refuses_foreign_fds(void **state) {
    (void)state;
    sl_err e;
    sl_metrics *m;
    int fd = open("/dev/null", O_RDONLY);
    assert_int_equal(sl_metrics_attach(&m, fd, -1, &e), SL_EINTERNAL);
    close(fd);
    assert_int_equal(sl_metrics_attach(&m, 9999, -1, &e), SL_EINTERNAL);
}

static void bell_keeps_a_ring(void **state) {
    (void)state;
    sl_err e;
    int fd = sl_bell_create(&e);
    struct pollfd p;
    assert_int_equal(sl_bell_wait(fd, &p, 1, 0), 0);
    sl_bell_ring(fd);
    sl_bell_ring(fd);
    assert_int_equal(sl_bell_wait(fd, &p, 1, 0), 1);
    assert_int_equal(sl_bell_wait(fd, &p, 1, 0), 1); /* waiting does not drain */
    sl_bell_drain(fd);
    assert_int_equal(sl_bell_wait(fd, &p, 1, 0), 0);
    uint64_t full = UINT64_MAX - 1;
    assert_int_equal(write(fd, &full, 8), 8);
    sl_bell_ring(fd); /* a full counter does not block */
    assert_int_equal(sl_bell_wait(fd, &p, 1, 0), 1);
    pid_t pid = fork(); /* a ring made by another process while nobody waits is not lost */
    sl_bell_drain(fd);
    if (!pid) {
        sl_bell_ring(fd);
        _exit(0);
    }
    waitpid(pid, NULL, 0);
    sl_bell_ring(fd);
    assert_int_equal(sl_bell_wait(fd, &p, 1, 1000), 1);
    close(fd);
}

int main(void) {
    const struct CMUnitTest t[] = {cmocka_unit_test(one_writer_a_page), cmocka_unit_test(regimes_sum_to_the_time),
                                   cmocka_unit_test(refuses_foreign_fds), cmocka_unit_test(bell_keeps_a_ring)};
    return cmocka_run_group_tests_name("metrics", t, NULL, NULL);
}
