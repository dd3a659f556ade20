/* supervise: restarts, group epochs, the suspect and poison rule, back-off, budget, watchdog and drain, with stages
 * that do nothing but obey (fake_stage.c). argv[1]: the folder with sluice-feeder ... as links to fake_stage. */
#include "daemon/supervise.h"
#include "daemon/status.h"
#include "ipc/wire.h"
#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

static const char *stage_dir;

/* Of the calls to come, `good` work and the `bad` after them fail. */
static struct {
    unsigned good, bad;
    int err;
} forks, pidfds;
static bool fails(unsigned *good, unsigned *bad, int err) {
    if (*good) return (*good)--, false;
    if (!*bad) return false;
    (*bad)--;
    errno = err;
    return true;
}
int __real_fork(void); // NOLINT(bugprone-reserved-identifier): the linker's name
int __wrap_fork(void);
int __wrap_fork(void) { // NOLINT(bugprone-reserved-identifier)
    return fails(&forks.good, &forks.bad, forks.err) ? -1 : __real_fork();
}
int __real_pidfd_open(pid_t pid, unsigned flags); // NOLINT(bugprone-reserved-identifier)
int __wrap_pidfd_open(pid_t pid, unsigned flags);
int __wrap_pidfd_open(pid_t pid, unsigned flags) { // NOLINT(bugprone-reserved-identifier)
    return fails(&pidfds.good, &pidfds.bad, pidfds.err) ? -1 : __real_pidfd_open(pid, flags);
}

typedef struct world {
    sl_config cfg;
    sl_topo topo;
    sl_super super;
    sl_ring *producer, *gathered, *released;
} world;

static world *start(uint32_t dp, uint32_t tp) {
    world *w = calloc(1, sizeof *w);
    sl_config *c = &w->cfg;
    sl_boot *b = &c->boot;
    sl_err e = {0};
    assert_non_null(w);
    sl_config_default(c);
    strcpy(b->store, "/tmp/sl-super-XXXXXX");
    assert_non_null(mkdtemp(b->store));
    strcpy(b->model, "/m"), strcpy(b->feed_addr, "ipc:///tmp/f"), strcpy(b->sock_progress, "ipc:///tmp/p"),
        strcpy(b->sock_control, "ipc:///tmp/c");
    b->dp = dp, b->tp = tp, b->n_layers = 4, b->width = 8, b->vocab = 100, b->elem_size = 2, b->threads = 1;
    b->n_captures = 1, b->captures[0].hidx = 4, b->batch_tokens = b->max_length = 16, b->max_batch_rows = 4,
    b->chunk_rows = 16;
    snprintf(c->stage_dir, sizeof c->stage_dir, "%s", stage_dir);
    c->backoff_min_ms = 1, c->backoff_max_ms = 8, c->restart_budget = 100;
    b->log_level = SL_ERROR;
    if (sl_topo_plan(&w->topo, b, c, &e) || sl_topo_create(&w->topo, false, &e)) fail_msg("%s", e.msg);
    assert_int_equal(sl_ring_attach(&w->producer, b->groups[0].batch_fd, SL_RING_PRODUCER, &e), 0);
    assert_int_equal(sl_ring_attach(&w->gathered, b->groups[0].batch_fd, SL_BATCH_GATHERED, &e), 0);
    assert_int_equal(sl_ring_attach(&w->released, b->groups[0].batch_fd, SL_BATCH_RELEASED, &e), 0);
    if (sl_super_start(&w->super, c, &w->topo, &e)) fail_msg("%s", e.msg);
    return w;
}

static void finish(world *w) {
    char cmd[1200];
    sl_super_kill(&w->super, "test over");
    sl_ring_detach(w->producer), sl_ring_detach(w->gathered), sl_ring_detach(w->released);
    sl_topo_destroy(&w->topo);
    snprintf(cmd, sizeof cmd, "rm -rf %s", w->cfg.boot.store);
    assert_int_equal(system(cmd), 0);
    free(w);
}

enum { WAIT_S = 300 }; /* only to end a test that hangs: nothing here depends on how fast the machine is */

/* Turn until `done` holds; the result of the last step. */
static int run(world *w, bool (*done)(world *), sl_err *e) {
    uint64_t end = sl_now_ns() + WAIT_S * 1000000000ull;
    for (;;) {
        struct pollfd p[SL_MAX_PROCS];
        int n = sl_super_pollfds(&w->super, p, SL_MAX_PROCS), t = sl_super_timeout(&w->super, sl_now_ns());
        poll(p, (nfds_t)n, t < 10 ? t : 10);
        int rc = sl_super_step(&w->super, sl_now_ns(), e);
        if (rc <= 0 || (done && done(w))) return rc;
        if (sl_now_ns() > end) {
            for (uint64_t i = 0; i < w->super.n_events && i < SL_SUPER_EVENTS; i++)
                print_message("%s: %s\n", w->super.event[i].who, w->super.event[i].msg);
            fail_msg("did not come about in %d s", WAIT_S);
        }
    }
}

static void order(world *w, const char *stage, const char *what) {
    char path[1200], tmp[1200];
    snprintf(path, sizeof path, "%s/do.%s", w->cfg.boot.store, stage);
    snprintf(tmp, sizeof tmp, "%s/tmp", w->cfg.boot.store);
    FILE *f = fopen(tmp, "w");
    assert_non_null(f);
    fputs(what, f);
    fclose(f);
    assert_int_equal(rename(tmp, path), 0);
}

static void publish(world *w, uint32_t rows) {
    sl_desc_input *d = (sl_desc_input *)(void *)sl_ring_stage(w->producer, 1);
    assert_non_null(d);
    d->h.kind = SL_DESC_INPUT, d->n_rows = rows;
    sl_ring_publish(w->producer);
}

static bool ready(world *w) {
    return sl_super_ready(&w->super);
}
static unsigned want_epoch, want_proc, want_restarts;
static uint32_t epoch(world *w, int g) {
    return atomic_load(&w->topo.ctl[1 + g].epoch);
}
static bool at_epoch(world *w) {
    return epoch(w, 0) >= want_epoch && ready(w);
}
static bool past_epoch(world *w) {
    return epoch(w, 0) >= want_epoch;
}
static bool restarted(world *w) {
    return w->super.proc[want_proc].restarts >= want_restarts && ready(w);
}
static bool obeyed(world *w) { /* the order was read */
    char path[1200];
    snprintf(path, sizeof path, "%s/do.rank0.0", w->cfg.boot.store);
    return access(path, F_OK) != 0;
}
static bool no_suspect(world *w) {
    return !atomic_load(&w->topo.ctl[1].suspect);
}

static void one_rank_dies_and_its_group_alone_restarts(void **s) {
    (void)s;
    world *w = start(2, 2);
    sl_err e = {0};
    assert_int_equal(run(w, ready, &e), 1);
    int feeder = w->super.proc[SL_PROC_FEEDER].pid, other = w->super.proc[SL_PROC_RANKS + 2].pid,
        mate = w->super.proc[SL_PROC_RANKS].pid;
    order(w, "rank0.1", "kill");
    want_epoch = 2;
    assert_int_equal(run(w, at_epoch, &e), 1);
    assert_int_equal(epoch(w, 0), 2);
    assert_int_equal(epoch(w, 1), 1);
    assert_int_equal(w->super.proc[SL_PROC_FEEDER].pid, feeder);
    assert_int_equal(w->super.proc[SL_PROC_RANKS + 2].pid, other);
    assert_int_not_equal(w->super.proc[SL_PROC_RANKS].pid, mate); /* all ranks of the group are new */
    assert_int_equal(kill(mate, 0), -1);                          /* and the old one is gone and reaped */
    assert_int_equal(w->super.proc[SL_PROC_RANKS].restarts, 1);
    assert_int_equal(w->super.proc[SL_PROC_RANKS + 2].restarts, 0);
    finish(w);
}

static void feeder_gather_and_writer_are_domains_of_their_own(void **s) {
    (void)s;
    static const char *const names[] = {"", "feeder", "gather", "writer"};
    world *w = start(1, 1);
    sl_err e = {0};
    assert_int_equal(run(w, ready, &e), 1);
    for (unsigned p = 1; p <= 3; p++) {
        order(w, names[p], p == 2 ? "exit 70" : "kill");
        want_proc = p, want_restarts = 1;
        assert_int_equal(run(w, restarted, &e), 1);
    }
    assert_int_equal(w->super.proc[SL_PROC_RANKS].restarts, 0);
    assert_int_equal(epoch(w, 0), 1);
    finish(w);
}

static void two_deaths_make_suspects_and_a_lone_row_is_poison(void **s) {
    (void)s;
    world *w = start(1, 1);
    sl_err e = {0};
    sl_ctl_page *ctl = &w->topo.ctl[1];
    assert_int_equal(run(w, ready, &e), 1);
    publish(w, 3); /* position 0: three rows */
    publish(w, 1); /* position 1: one row */
    for (want_epoch = 2; want_epoch <= 4; want_epoch++) {
        order(w, "rank0.0", "kill");
        assert_int_equal(run(w, at_epoch, &e), 1);
        assert_int_equal(atomic_load(&ctl->deaths), want_epoch - 1);
        assert_int_equal(atomic_load(&ctl->suspect), want_epoch >= 3);
        assert_int_equal(atomic_load(&ctl->poison_bpos), 0); /* three rows: nobody knows which */
    }
    assert_int_equal(sl_ring_advance(w->gathered, 1, &e), 0); /* progress: the count starts again */
    order(w, "rank0.0", "kill");
    assert_int_equal(run(w, at_epoch, &e), 1);
    assert_int_equal(atomic_load(&ctl->deaths), 1);
    assert_int_equal(atomic_load(&ctl->poison_bpos), 0);
    want_epoch = 6;
    order(w, "rank0.0", "kill");
    assert_int_equal(run(w, at_epoch, &e), 1);
    assert_int_equal(atomic_load(&ctl->poison_bpos), 2); /* position 1, in flight at two deaths in a row */
    assert_int_equal(atomic_load(&ctl->suspect), 1);
    assert_int_equal(sl_ring_advance(w->gathered, 2, &e), 0);
    assert_int_equal(run(w, no_suspect, &e), 1);
    assert_int_equal(atomic_load(&ctl->deaths), 0);
    finish(w);
}

static void several_rows_are_poison_only_after_many_deaths(void **s) {
    (void)s;
    world *w = start(1, 2);
    sl_err e = {0};
    sl_ctl_page *ctl = &w->topo.ctl[1];
    w->cfg.poison_deaths = 4;
    assert_int_equal(run(w, ready, &e), 1);
    publish(w, 3);
    for (want_epoch = 2; want_epoch <= 5; want_epoch++) {
        order(w, "rank0.1", "kill");
        assert_int_equal(run(w, at_epoch, &e), 1);
        assert_int_equal(atomic_load(&ctl->poison_bpos), want_epoch == 5 ? 1 : 0);
    }
    finish(w);
}

/* Rank 1 of group 0 dies while it runs `row` alone (0: it runs all of them), and the group has come back. */
static void die_at(world *w, unsigned row) {
    char what[32];
    sl_err e = {0};
    snprintf(what, sizeof what, "kill row %u", row);
    want_epoch = epoch(w, 0) + 1;
    order(w, "rank0.1", what);
    assert_int_equal(run(w, at_epoch, &e), 1);
}
static void expect_named(world *w, uint64_t isolate, uint64_t word0, uint64_t word1, int line) {
    sl_ctl_page *c = &w->topo.ctl[1];
    uint64_t got[3] = {atomic_load(&c->isolate_bpos), atomic_load(&c->poison_rows[0]), atomic_load(&c->poison_rows[1])};
    if (got[0] != isolate || got[1] != word0 || got[2] != word1 || atomic_load(&c->poison_bpos))
        fail_msg("line %d: isolated %llu, named %llx %llx, whole batch %llu; expected %llu, %llx %llx, 0", line,
                 (unsigned long long)got[0], (unsigned long long)got[1], (unsigned long long)got[2],
                 (unsigned long long)atomic_load(&c->poison_bpos), (unsigned long long)isolate,
                 (unsigned long long)word0, (unsigned long long)word1);
}
#define NAMED(isolate, word0, word1) expect_named(w, isolate, word0, word1, __LINE__)

/* The row that killed twice when it ran alone is named, by its own bit, and no other; each name starts the count of the
 * whole batch again, and the next batch starts without names. */
static void the_row_that_kills_is_named(void **s) {
    (void)s;
    world *w = start(1, 2);
    sl_err e = {0};
    w->cfg.poison_deaths = 6;
    assert_int_equal(run(w, ready, &e), 1);
    publish(w, 70);
    publish(w, 70);
    die_at(w, 0);
    NAMED(0, 0, 0); /* once may be chance */
    die_at(w, 0);
    NAMED(1, 0, 0);
    die_at(w, 67);
    NAMED(1, 0, 0);
    die_at(w, 67);
    NAMED(1, 0, 1u << 2); /* row 66 */
    bool said = false;
    for (uint64_t i = 0; i < w->super.n_events; i++)
        said |= strstr(w->super.event[i].msg, "row 66 of batch position 0 killed the group twice") &&
                strstr(w->super.event[i].msg, "the other 69 rows");
    assert_true(said);
    die_at(w, 5); /* rank 0 has not come to it yet */
    NAMED(1, 0, 1u << 2);
    order(w, "rank0.0", "row 4");
    assert_int_equal(run(w, obeyed, &e), 1);
    die_at(w, 5);
    NAMED(1, 1u << 4, 1u << 2); /* row 4, the highest */
    die_at(w, 9);
    die_at(w, 9);
    const uint64_t both = 1u << 8 | 1u << 4;
    NAMED(1, both, 1u << 2);
    die_at(w, 2);
    NAMED(1, both, 1u << 2);
    die_at(w, 3); /* another row: neither killed twice */
    NAMED(1, both, 1u << 2);
    die_at(w, 71); /* there is no such row */
    die_at(w, 71);
    NAMED(1, both, 1u << 2);
    die_at(w, 2);
    NAMED(1, both, 1u << 2);
    assert_int_equal(sl_ring_advance(w->gathered, 1, &e), 0);
    die_at(w, 71);
    NAMED(1, both, 1u << 2); /* the first death of batch 1 */
    die_at(w, 0);
    NAMED(2, 0, 0); /* all of its rows were running together, whatever was left of the batch before */
    die_at(w, 2);
    NAMED(2, 0, 0);
    die_at(w, 2);
    NAMED(2, 1u << 1, 0);
    finish(w);
}

/* Without a limit, and with more rows than can be told apart, nothing is named; the count goes on. */
static void what_cannot_be_told_is_not_named(void **s) {
    (void)s;
    world *w = start(1, 2);
    sl_err e = {0};
    w->cfg.poison_deaths = 0;
    assert_int_equal(run(w, ready, &e), 1);
    publish(w, SL_ISOLATE_ROWS + 1);
    for (unsigned i = 1; i <= 4; i++) {
        die_at(w, 1);
        NAMED(0, 0, 0);
        assert_int_equal(atomic_load(&w->topo.ctl[1].deaths), i);
    }
    finish(w);
}

static void a_rank_that_cannot_load_blames_no_row(void **s) {
    (void)s;
    world *w = start(1, 1);
    sl_err e = {0};
    assert_int_equal(run(w, ready, &e), 1);
    publish(w, 1);
    order(w, "rank0.0", "loading"); /* from now on every life dies before it is READY */
    want_epoch = 6;
    assert_int_equal(run(w, past_epoch, &e), 1);
    assert_true(atomic_load(&w->topo.ctl[1].deaths) <= 1); /* the first life had been READY */
    assert_int_equal(atomic_load(&w->topo.ctl[1].poison_bpos), 0);
    finish(w);
}

static void idle_deaths_blame_no_row(void **s) {
    (void)s;
    world *w = start(1, 1);
    sl_err e = {0};
    assert_int_equal(run(w, ready, &e), 1);
    for (want_epoch = 2; want_epoch <= 4; want_epoch++) {
        order(w, "rank0.0", "kill");
        assert_int_equal(run(w, at_epoch, &e), 1);
    }
    assert_int_equal(atomic_load(&w->topo.ctl[1].deaths), 0);
    assert_int_equal(atomic_load(&w->topo.ctl[1].suspect), 0);
    finish(w);
}

static void budget_ends_the_daemon(void **s) {
    (void)s;
    world *w = start(1, 1);
    sl_err e = {0};
    w->cfg.restart_budget = 5;
    assert_int_equal(run(w, ready, &e), 1);
    order(w, "writer", "die");
    assert_int_equal(run(w, NULL, &e), SL_ETEMP);
    if (!strstr(e.msg, "writer died 6 times")) fail_msg("%s", e.msg);
    assert_int_equal(w->super.proc[SL_PROC_WRITER].restarts, 5);
    assert_int_equal(w->super.proc[SL_PROC_FEEDER].pid, 0); /* nobody is left behind */
    finish(w);
}

static void progress_gives_the_budget_back(void **s) {
    (void)s;
    world *w = start(1, 1);
    sl_err e = {0};
    w->cfg.restart_budget = 2;
    assert_int_equal(run(w, ready, &e), 1);
    for (want_epoch = 2; want_epoch <= 7; want_epoch++) {
        publish(w, 1);
        assert_int_equal(sl_ring_advance(w->gathered, sl_ring_pos(w->gathered, SL_BATCH_PUBLISHED), &e), 0);
        order(w, "rank0.0", "kill");
        assert_int_equal(run(w, at_epoch, &e), 1);
    }
    finish(w);
}

/* What counts as progress is the stage's own: 0 feeder publishes, 1 gather gathers, 2 writer releases. */
static void advance(world *w, unsigned kind) {
    sl_err e = {0};
    if (kind == 0)
        publish(w, 1);
    else if (kind == 1)
        assert_int_equal(sl_ring_advance(w->gathered, sl_ring_pos(w->gathered, SL_BATCH_GATHERED) + 1, &e), 0);
    else
        assert_int_equal(sl_ring_advance(w->released, sl_ring_pos(w->released, SL_BATCH_RELEASED) + 1, &e), 0);
}
static void progress_is_a_stage_s_own(void **s) {
    (void)s;
    static const char *const names[] = {"feeder", "gather", "writer"};
    for (unsigned stage = 0; stage < 3; stage++)
        for (unsigned own = 0; own < 2; own++) {
            world *w = start(1, 1);
            sl_err e = {0};
            w->cfg.restart_budget = 1;
            assert_int_equal(run(w, ready, &e), 1);
            for (unsigned i = 0; i < 6; i++) advance(w, i < 4 ? 0 : 1); /* so that each can go on twice */
            want_proc = SL_PROC_FEEDER + stage;
            int rc = 1;
            for (unsigned death = 1; death <= 3 && rc > 0; death++) {
                for (unsigned kind = 0; kind < 3; kind++)
                    if (death > 1 && own == (kind == stage)) advance(w, kind);
                want_restarts = death;
                order(w, names[stage], "kill");
                rc = run(w, restarted, &e);
            }
            if (rc != (own ? 1 : SL_ETEMP))
                fail_msg("%s, %s progress: %d %s", names[stage], own ? "its own" : "others'", rc, e.msg);
            finish(w);
        }
}

/* Deaths that are further apart than the window do not add up. */
static void old_deaths_are_forgotten(void **s) {
    (void)s;
    world *w = start(1, 1);
    sl_err e = {0};
    w->cfg.restart_budget = 1, w->cfg.restart_window_ms = 0;
    assert_int_equal(run(w, ready, &e), 1);
    want_proc = SL_PROC_WRITER;
    for (want_restarts = 1; want_restarts <= 3; want_restarts++) {
        order(w, "writer", "kill");
        assert_int_equal(run(w, restarted, &e), 1);
    }
    finish(w);
}

static void configuration_is_not_restarted(void **s) {
    (void)s;
    static const struct {
        const char *order;
        int code;
    } ends[] = {{"exit 78", SL_ECONFIG}, {"exit 2", SL_EUSAGE}};
    for (size_t i = 0; i < 2; i++) {
        world *w = start(1, 1);
        sl_err e = {0};
        assert_int_equal(run(w, ready, &e), 1);
        order(w, "rank0.0", ends[i].order);
        assert_int_equal(run(w, NULL, &e), ends[i].code);
        assert_non_null(strstr(e.msg, "rank0.0 refused to run"));
        assert_int_equal(w->super.proc[SL_PROC_RANKS].restarts, 0);
        finish(w);
    }
}

/* An installation that is taken away under a running service. */
static void a_program_that_is_gone_ends_the_daemon(void **s) {
    (void)s;
    world *w = start(1, 1);
    sl_err e = {0};
    assert_int_equal(run(w, ready, &e), 1);
    strcpy(w->cfg.stage_dir, "/nowhere");
    order(w, "gather", "kill");
    assert_int_equal(run(w, NULL, &e), SL_ECONFIG);
    if (!strstr(e.msg, "sluice-gather was not found")) fail_msg("%s", e.msg);
    finish(w);
}

/* A folder that was named is the only place where programs are looked for. */
static void a_named_folder_is_not_guessed_around(void **s) {
    (void)s;
    sl_config c = {.stage_dir = "/nowhere"};
    sl_err e = {0};
    char path[1200];
    assert_int_equal(sl_supervise_stage_path(&c, SL_ROLE_GATHER, path, sizeof path, &e), SL_ECONFIG);
    if (!strstr(e.msg, "sluice-gather was not found (tried /nowhere/sluice-gather)")) fail_msg("%s", e.msg);
    snprintf(c.stage_dir, sizeof c.stage_dir, "%s", stage_dir);
    if (sl_supervise_stage_path(&c, SL_ROLE_GATHER, path, sizeof path, &e)) fail_msg("%s", e.msg);
    assert_non_null(strstr(path, "/sluice-gather"));
}

/* As run, by a clock that goes on only when every process but one has beaten since: a busy machine stops it. */
static void run_by_beats(world *w, bool (*done)(world *), unsigned but) {
    uint64_t end = sl_now_ns() + WAIT_S * 1000000000ull, now = sl_now_ns(), beat[SL_MAX_PROCS] = {0};
    sl_err e = {0};
    while (!done(w)) {
        bool all = true;
        poll(NULL, 0, 5);
        for (unsigned p = 1; p < w->topo.boot->n_procs; p++)
            all &= p == but || sl_metric_get(w->topo.metrics, p, SL_M_HEARTBEAT) != beat[p];
        if (all) {
            now += 100000000;
            for (unsigned p = 1; p < w->topo.boot->n_procs; p++)
                beat[p] = sl_metric_get(w->topo.metrics, p, SL_M_HEARTBEAT);
        }
        if (sl_super_step(&w->super, now, &e) != 1) fail_msg("%s", e.msg);
        if (sl_now_ns() > end) fail_msg("did not come about in %d s", WAIT_S);
    }
}

static void watchdog_kills_what_hangs(void **s) {
    (void)s;
    world *w = start(1, 1);
    sl_err e = {0};
    assert_int_equal(run(w, ready, &e), 1);
    w->cfg.watchdog_ms = 1500;
    order(w, "gather", "hang");
    want_proc = SL_PROC_GATHER, want_restarts = 1;
    run_by_beats(w, restarted, SL_PROC_GATHER);
    bool warned = false, killed = false;
    for (uint64_t i = 0; i < w->super.n_events; i++) {
        warned |= strstr(w->super.event[i].msg, "no heartbeat for") && strstr(w->super.event[i].msg, "state");
        killed |= strstr(w->super.event[i].msg, "): killed") != NULL;
    }
    assert_true(warned && killed);
    assert_int_equal(w->super.proc[SL_PROC_FEEDER].restarts, 0); /* an idle stage is not a hanging one */
    finish(w);
}

static void drain_ends_with_zero(void **s) {
    (void)s;
    world *w = start(2, 2);
    sl_err e = {0};
    assert_int_equal(run(w, ready, &e), 1);
    sl_super_drain(&w->super, "test");
    assert_int_equal(run(w, NULL, &e), 0);
    for (unsigned p = 1; p < w->cfg.boot.n_procs; p++) assert_true(w->super.proc[p].done);
    finish(w);
}

static void death_while_draining_is_made_good(void **s) {
    (void)s;
    world *w = start(1, 2);
    sl_err e = {0};
    assert_int_equal(run(w, ready, &e), 1);
    kill(w->super.proc[SL_PROC_RANKS + 1].pid, SIGKILL);
    sl_super_drain(&w->super, "test");
    assert_int_equal(run(w, NULL, &e), 0);
    assert_int_equal(epoch(w, 0), 2);
    finish(w);
}

static void backoff_doubles_to_its_limit(void **s) {
    (void)s;
    world *w = start(1, 1);
    sl_err e = {0};
    assert_int_equal(run(w, ready, &e), 1);
    order(w, "feeder", "die");
    want_proc = SL_PROC_FEEDER, w->cfg.restart_budget = 6;
    assert_int_equal(run(w, NULL, &e), SL_ETEMP);
    static const char *const waits[] = {"restart in 1 ms", "restart in 2 ms", "restart in 4 ms",
                                        "restart in 8 ms", "restart in 8 ms", "restart in 8 ms"};
    unsigned seen = 0;
    for (uint64_t i = 0; i < w->super.n_events; i++)
        if (strstr(w->super.event[i].msg, "restart in")) {
            assert_true(seen < 6);
            if (!strstr(w->super.event[i].msg, waits[seen])) fail_msg("%s", w->super.event[i].msg);
            seen++;
        }
    assert_int_equal(seen, 6);
    finish(w);
}

static unsigned said(const world *w, const char *what) {
    unsigned n = 0;
    for (uint64_t i = 0; i < w->super.n_events && i < SL_SUPER_EVENTS; i++)
        n += strstr(w->super.event[i].msg, what) != NULL;
    return n;
}

/* No process, no descriptor: at the start and at a restart, for the first process of a domain and for a later one. */
static void what_cannot_be_started_now_is_started_later(void **s) {
    (void)s;
    forks.good = 1, forks.bad = 40, forks.err = EAGAIN; /* the writer starts, the others wait */
    world *w = start(1, 2);
    sl_err e = {0};
    w->cfg.restart_budget = 2;
    assert_int_equal(w->super.proc[SL_PROC_GATHER].pid, 0);
    assert_int_equal(run(w, ready, &e), 1);
    assert_int_equal(forks.bad, 0);
    assert_int_equal(epoch(w, 0), 1); /* nothing of the group had begun, or all of it */
    publish(w, 1);
    forks.good = 1, forks.bad = 1; /* the second rank, when the first one runs already */
    order(w, "rank0.0", "kill");
    want_epoch = 3;
    assert_int_equal(run(w, at_epoch, &e), 1);
    assert_int_equal(epoch(w, 0), 3); /* one for the death, one for the rank that had begun */
    assert_int_equal(atomic_load(&w->topo.ctl[1].deaths), 1);
    pidfds.good = 1, pidfds.bad = 3, pidfds.err = EMFILE;
    order(w, "rank0.1", "kill");
    want_epoch = 4;
    assert_int_equal(run(w, at_epoch, &e), 1);
    assert_int_equal(pidfds.bad, 0);
    assert_int_equal(atomic_load(&w->topo.ctl[1].deaths), 2);
    assert_int_equal(w->super.dom[2].budget_used, 2); /* of deaths alone */
    forks.bad = 8;
    order(w, "feeder", "kill");
    want_proc = SL_PROC_FEEDER, want_restarts = 1;
    assert_int_equal(run(w, restarted, &e), 1);
    assert_int_equal(w->super.proc[SL_PROC_FEEDER].restarts, 1);
    assert_true(said(w, "cannot be started") && said(w, "started at try 9"));
    finish(w);
}

static void a_program_that_is_missing_is_not_waited_for(void **s) {
    (void)s;
    world *w = start(1, 1);
    sl_err e = {0};
    assert_int_equal(run(w, ready, &e), 1);
    strcpy(w->cfg.stage_dir, "/nowhere");
    order(w, "gather", "kill");
    assert_int_equal(run(w, NULL, &e), SL_ECONFIG);
    finish(w);
}

/* The status map has every key of its manual and counts what happened. */
static void status_tells(void **s) {
    (void)s;
    static const char *const keys[] = {"t",      "v",     "time",   "uptime", "run",    "pid",     "state",
                                       "model",  "store", "feed",   "layout", "states", "rows",    "life",
                                       "tokens", "bytes", "rate",   "eta",    "nll",    "rejects", "disk",
                                       "stages", "rings", "groups", "events"};
    world *w = start(1, 2);
    sl_err e = {0};
    sl_preflight p = {.token_bytes = 16};
    sl_status st;
    assert_int_equal(run(w, ready, &e), 1);
    order(w, "rank0.0", "kill");
    want_epoch = 2;
    assert_int_equal(run(w, at_epoch, &e), 1);
    assert_int_equal(sl_status_open(&st, &w->cfg, &p, &w->topo, &w->super, &e), 0);
    assert_int_equal(sl_status_update(&st, sl_now_ns(), &e), 0);
    msgpack_sbuffer b;
    msgpack_sbuffer_init(&b);
    sl_status_pack(&st, &b);
    msgpack_unpacked u;
    if (sl_wire_unpack(&u, b.data, b.size, &e)) fail_msg("%s", e.msg);
    assert_int_equal(u.data.via.map.size, sizeof keys / sizeof *keys);
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (!sl_wire_get(&u.data, keys[i])) fail_msg("no key %s", keys[i]);
    const msgpack_object *stages = sl_wire_get(&u.data, "stages");
    assert_int_equal(stages->via.array.size, 5);
    uint64_t v;
    assert_int_equal(sl_wire_u64(&stages->via.array.ptr[1], "restarts", &v, &e), 0); /* rank0.0: after the feeder */
    assert_int_equal(v, 1);
    msgpack_unpacked_destroy(&u);
    msgpack_sbuffer_destroy(&b);
    finish(w);
}

int main(int argc, char **argv) {
    if (argc < 2) return fprintf(stderr, "usage: test_supervise STAGE_DIR\n"), 2;
    stage_dir = argv[1];
    sl_log_init("test", SL_ERROR);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_rank_dies_and_its_group_alone_restarts),
        cmocka_unit_test(feeder_gather_and_writer_are_domains_of_their_own),
        cmocka_unit_test(two_deaths_make_suspects_and_a_lone_row_is_poison),
        cmocka_unit_test(several_rows_are_poison_only_after_many_deaths),
        cmocka_unit_test(the_row_that_kills_is_named),
        cmocka_unit_test(what_cannot_be_told_is_not_named),
        cmocka_unit_test(a_rank_that_cannot_load_blames_no_row),
        cmocka_unit_test(idle_deaths_blame_no_row),
        cmocka_unit_test(budget_ends_the_daemon),
        cmocka_unit_test(progress_gives_the_budget_back),
        cmocka_unit_test(progress_is_a_stage_s_own),
        cmocka_unit_test(old_deaths_are_forgotten),
        cmocka_unit_test(configuration_is_not_restarted),
        cmocka_unit_test(a_program_that_is_gone_ends_the_daemon),
        cmocka_unit_test(a_named_folder_is_not_guessed_around),
        cmocka_unit_test(watchdog_kills_what_hangs),
        cmocka_unit_test(drain_ends_with_zero),
        cmocka_unit_test(death_while_draining_is_made_good),
        cmocka_unit_test(backoff_doubles_to_its_limit),
        cmocka_unit_test(what_cannot_be_started_now_is_started_later),
        cmocka_unit_test(a_program_that_is_missing_is_not_waited_for),
        cmocka_unit_test(status_tells),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
