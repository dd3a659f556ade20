/* topology: sizes keep the promise "twice the largest batch", every object has one owner, and a stage gets exactly the
 * fds of its role. */
#include "daemon/topology.h"
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static sl_config *config(uint32_t dp, uint32_t tp) {
    sl_config *c = malloc(sizeof *c);
    assert_non_null(c);
    sl_config_default(c);
    sl_boot *b = &c->boot;
    strcpy(b->model, "/m"), strcpy(b->store, "/s"), strcpy(b->feed_addr, "ipc:///tmp/f");
    strcpy(b->sock_progress, "ipc:///tmp/p"), strcpy(b->sock_control, "ipc:///tmp/c");
    b->dp = dp, b->tp = tp, b->n_layers = 4, b->width = 64, b->vocab = 100, b->elem_size = 2, b->threads = 1;
    b->n_captures = 3, b->captures[0].hidx = 0, b->captures[1].hidx = 2, b->captures[2].hidx = 4;
    b->batch_tokens = 1000, b->max_length = 1500, b->max_batch_rows = 50, b->chunk_rows = 128;
    return c;
}

/* Count by brute force what sl_topo_need_of derives. */
static void need_is_what_the_owner_rule_gives(void **s) {
    (void)s;
    for (uint32_t tp = 1; tp <= 8; tp++) {
        for (uint32_t k = 1; k <= 7; k++) {
            sl_config *c = config(1, tp);
            c->boot.n_captures = k;
            sl_topo_need n;
            sl_topo_need_of(&c->boot, &n);
            assert_int_equal(n.batch_tokens, 1500);
            assert_int_equal(n.chunks, 12);
            assert_int_equal(n.descriptors, k * 12 + 50 + 1);
            uint64_t most = 0;
            for (uint64_t bpos = 0; bpos < tp; bpos++) {
                uint64_t of[8] = {0};
                for (uint32_t i = 0; i < k; i++)
                    for (uint32_t j = 0; j < 12; j++) of[sl_chunk_owner(bpos, i, j, tp)]++;
                for (uint32_t r = 0; r < tp; r++)
                    if (of[r] > most) most = of[r];
            }
            assert_int_equal(n.payloads, most);
            free(c);
        }
    }
}

static void rings_hold_twice_the_largest_batch(void **s) {
    (void)s;
    sl_config *c = config(2, 3);
    sl_topo *t = malloc(sizeof *t);
    sl_err e = {0};
    if (sl_topo_plan(t, &c->boot, c, &e)) fail_msg("%s", e.msg);
    assert_int_equal(c->boot.n_procs, 4 + 6);
    assert_string_equal(c->boot.procs[4 + 3 + 1].name, "rank1.1");
    assert_int_equal(c->boot.groups[1].first_rank_proc, 7);
    sl_topo_need n;
    sl_topo_need_of(&c->boot, &n);
    for (uint32_t g = 0; g < 2; g++)
        for (uint32_t r = 0; r < 3; r++) {
            const sl_topo_obj *o = sl_topo_find(t, SL_OBJ_CHUNK, g, r);
            assert_non_null(o);
            assert_true(o->group == g && o->rank == r);
            assert_true(o->ring.depth >= 2 * n.descriptors && o->ring.pay_slots >= 2 * n.payloads);
            assert_true(o->ring.pay_size >= 128 * 64 * 2 && o->ring.pay_size % 4096 == 0);
        }
    assert_true(sl_topo_bytes(t) > 6 * sl_topo_find(t, SL_OBJ_CHUNK, 0, 0)->bytes);
    free(t), free(c);
}

static void a_ring_too_small_is_refused_with_the_sum(void **s) {
    (void)s;
    sl_config *c = config(1, 2);
    sl_topo *t = malloc(sizeof *t);
    sl_err e = {0};
    c->ring_bytes = 10 * 16384; /* 8 slots of 16 KiB; 18 payloads need 36 */
    assert_int_equal(sl_topo_plan(t, &c->boot, c, &e), SL_ECONFIG);
    if (!strstr(e.msg, "1500 tokens / 128 a chunk = 12 chunks a state, times 3 states, over 2 ranks"))
        fail_msg("%s", e.msg);
    c->ring_bytes = 64 * 16384;
    assert_int_equal(sl_topo_plan(t, &c->boot, c, &e), SL_OK);
    c->boot.dp = 40, c->boot.tp = 2;
    assert_int_equal(sl_topo_plan(t, &c->boot, c, &e), SL_ECONFIG);
    c->ring_bytes = 0, c->boot.dp = SL_MAX_GROUPS, c->boot.tp = 1;
    if (sl_topo_plan(t, &c->boot, c, &e)) fail_msg("%s", e.msg);
    c->boot.dp = SL_MAX_GROUPS + 1;
    assert_int_equal(sl_topo_plan(t, &c->boot, c, &e), SL_ECONFIG);
    c->boot.dp = 0;
    assert_int_equal(sl_topo_plan(t, &c->boot, c, &e), SL_ECONFIG);
    free(t), free(c);
}

static bool has(const int *fds, int n, int fd) {
    for (int i = 0; i < n; i++)
        if (fds[i] == fd) return true;
    return false;
}

static void every_role_gets_its_fds_and_no_other(void **s) {
    (void)s;
    sl_config *c = config(2, 2);
    sl_topo *t = malloc(sizeof *t);
    sl_err e = {0};
    if (sl_topo_plan(t, &c->boot, c, &e) || sl_topo_create(t, false, &e)) fail_msg("%s", e.msg);
    for (unsigned i = 0; i < t->n_obj; i++) { /* nothing leaks over exec by itself */
        assert_true(t->obj[i].fd >= 0);
        assert_true(fcntl(t->obj[i].fd, F_GETFD) & FD_CLOEXEC);
    }
    const sl_boot *b;
    if (sl_boot_attach(&b, sl_topo_boot_fd(t), &e)) fail_msg("%s", e.msg);
    int f[SL_TOPO_MAX], w[SL_TOPO_MAX], r[SL_TOPO_MAX];
    int nf = sl_topo_fds(t, SL_PROC_FEEDER, f, SL_TOPO_MAX), nw = sl_topo_fds(t, SL_PROC_WRITER, w, SL_TOPO_MAX);
    int nr = sl_topo_fds(t, SL_PROC_RANKS + 3, r, SL_TOPO_MAX); /* rank 1 of group 1 */
    assert_true(has(f, nf, b->groups[0].batch_fd) && has(f, nf, b->groups[1].batch_fd));
    assert_false(has(f, nf, b->groups[0].chunk_fd[0]) || has(f, nf, b->groups[0].sample_fd) ||
                 has(f, nf, b->groups[0].coll_fd));
    assert_true(has(w, nw, b->groups[1].chunk_fd[1]) && has(w, nw, b->groups[0].sample_fd));
    assert_false(has(w, nw, b->groups[0].coll_fd));
    assert_true(has(r, nr, b->groups[1].batch_fd) && has(r, nr, b->groups[1].chunk_fd[1]) &&
                has(r, nr, b->groups[1].coll_fd));
    assert_false(has(r, nr, b->groups[1].chunk_fd[0]) || has(r, nr, b->groups[0].batch_fd) ||
                 has(r, nr, b->groups[0].coll_fd));
    assert_false(has(r, nr, b->groups[1].sample_fd) || has(r, nr, b->procs[SL_PROC_RANKS].bell_fd));
    assert_true(has(r, nr, b->procs[SL_PROC_GATHER].bell_fd) && has(r, nr, b->metrics_fd) && has(r, nr, b->ctl_fd));
    assert_int_equal(atomic_load(&t->ctl[1].epoch), 1);
    sl_topo_destroy(t);
    assert_int_equal(fcntl(f[0], F_GETFD), -1);
    assert_int_equal(errno, EBADF);
    free(t), free(c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(need_is_what_the_owner_rule_gives),
        cmocka_unit_test(rings_hold_twice_the_largest_batch),
        cmocka_unit_test(a_ring_too_small_is_refused_with_the_sum),
        cmocka_unit_test(every_role_gets_its_fds_and_no_other),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
