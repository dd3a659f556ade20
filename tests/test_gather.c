/* gather, the process: forked with its own loop on real rings, killed at every crash point and at random, restarted.
 * Every row must come out once, in order, with its verdict; so must rows of a group that dies in the middle of a batch.
 */
#include "ipc/crash.h"
#include "ipc/log.h"
#include "stages/gather/gather.h"
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "tests/flow_rig.h"

static int failures;
#define CHECK(ok, ...)                                                                                                 \
    do {                                                                                                               \
        if (!(ok)) {                                                                                                   \
            printf("FAIL %s:%d: ", __FILE__, __LINE__);                                                                \
            printf(__VA_ARGS__);                                                                                       \
            printf("\n");                                                                                              \
            failures++;                                                                                                \
        }                                                                                                              \
    } while (0)

static const uint32_t T[] = {10, 20, 1, 5, 12, 7};
#define ROWS 6
enum { PATIENCE = 2000000 }; /* naps; only to end a test that hangs */

static pid_t spawn(rig *g) {
    fflush(stdout);
    pid_t pid = fork();
    if (pid) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    sl_crash_init(&g->boot, "gather");
    sl_gather *ga;
    if (sl_gather_open(&ga, &g->st, &g->e) || sl_gather_run(ga, &g->e)) {
        printf("gather: %s\n", g->e.msg);
        fflush(stdout);
        _exit(1);
    }
    _exit(0);
}

/* Reap the process if it is dead; true when it was. *code: exit status or -signal. */
static bool dead(pid_t pid, int *code) {
    int st;
    if (waitpid(pid, &st, WNOHANG) != pid) return false;
    *code = WIFSIGNALED(st) ? -WTERMSIG(st) : WEXITSTATUS(st);
    return true;
}

static void nap(void) {
    struct timespec ts = {.tv_nsec = 200000};
    nanosleep(&ts, NULL);
}

typedef struct tally {
    uint64_t next_seq, next_bpos;
    uint64_t deaths;
    uint32_t epoch; /* of the verdicts taken last: the writer finds the chunks by it */
} tally;

/* As the writer: take what is there; every batch once and in order, every row once and in order. */
static void take_all(rig *g, tally *t) {
    sl_desc_sample s[RIG_MAX_ROWS];
    sl_desc_batch b = {0};
    for (uint32_t n; (n = rig_take(g, s, &b));) {
        CHECK(b.bpos == t->next_bpos, "batch %llu, expected %llu", (unsigned long long)b.bpos,
              (unsigned long long)t->next_bpos);
        CHECK(b.batch_no == b.bpos + 100, "batch number");
        t->epoch = b.h.epoch;
        t->next_bpos = b.bpos + 1;
        for (uint32_t i = 0; i < n; i++) {
            CHECK(s[i].seq == t->next_seq, "row %llu, expected %llu", (unsigned long long)s[i].seq,
                  (unsigned long long)t->next_seq);
            CHECK(s[i].verdict == SL_V_OK, "row %llu is %s", (unsigned long long)s[i].seq,
                  sl_verdict_name((sl_verdict)s[i].verdict));
            t->next_seq = s[i].seq + 1;
        }
    }
    for (uint32_t r = 0; r < g->N; r++) CHECK(!sl_ring_check(g->w_lane[r], &g->e), "%s", g->e.msg);
}

/* Wait until the batch at bpos is through, restarting a gather that dies. */
static void see_through(rig *g, pid_t *pid, tally *t, uint64_t bpos) {
    for (int i = 0; i < PATIENCE && t->next_bpos <= bpos; i++) {
        int code;
        if (dead(*pid, &code)) {
            CHECK(code == -SIGKILL, "gather ended with %d", code);
            t->deaths++;
            *pid = spawn(g);
        }
        take_all(g, t);
        nap();
    }
    CHECK(t->next_bpos > bpos, "batch %llu never came", (unsigned long long)bpos);
}

static void drain(rig *g, pid_t pid, tally *t) {
    sl_metric_set(g->feeder, SL_M_STATE, SL_ST_DONE);
    g->ctl[0].draining = 1;
    sl_bell_ring(g->boot.procs[2].bell_fd);
    int code = 999;
    for (int i = 0; i < PATIENCE && !dead(pid, &code); i++) nap();
    CHECK(code == 0, "drain: gather ended with %d", code);
    take_all(g, t);
    CHECK(t->next_seq == g->seq, "%llu rows of %llu", (unsigned long long)t->next_seq, (unsigned long long)g->seq);
}

/* ahead: how many batches the ranks are ahead of the one that is waited for. */
static void killed_at(const char *points, uint32_t ranks, uint64_t ahead, uint64_t deaths) {
    rig g;
    rig_open(&g, ranks);
    char dir[] = "/tmp/sl_gather_XXXXXX", cmd[64];
    if (!mkdtemp(dir)) abort();
    snprintf(g.boot.store, sizeof g.boot.store, "%s", dir);
    snprintf(g.boot.crash_points, sizeof g.boot.crash_points, "%s", points);
    tally t = {0};
    pid_t pid = spawn(&g);
    for (uint64_t b = 0; b < 6 + ahead; b++) {
        if (b < 6) {
            rig_feed(&g, ROWS, T, NULL);
            rig_ranks(&g, NULL);
        }
        if (b >= ahead) see_through(&g, &pid, &t, b - ahead);
    }
    drain(&g, pid, &t);
    CHECK(t.deaths == deaths, "%s: %llu deaths", points, (unsigned long long)t.deaths);
    snprintf(cmd, sizeof cmd, "rm -r %s", dir);
    if (system(cmd)) abort();
    rig_close(&g);
}

static void killed_at_random(void) {
    rig g;
    rig_open(&g, 3);
    tally t = {0};
    pid_t pid = spawn(&g);
    unsigned rnd = 99, kills = 0;
    for (uint64_t b = 0; b < 150; b++) {
        rig_feed(&g, ROWS, T, NULL);
        for (uint32_t r = 0; r < 3; r++) {
            rig_rank(&g, (uint32_t)(r + b) % 3, NULL);
            rnd = rnd * 1103515245 + 12345;
            if ((rnd >> 16) % 3) continue;
            struct timespec ts = {.tv_nsec = (rnd >> 20) % 400 * 1000};
            nanosleep(&ts, NULL);
            kill(pid, SIGKILL);
            waitpid(pid, NULL, 0);
            kills++;
            pid = spawn(&g);
        }
        see_through(&g, &pid, &t, b);
    }
    drain(&g, pid, &t);
    printf("killed at random %u times\n", kills);
    CHECK(kills > 50, "%u kills", kills);
    rig_close(&g);
}

/* Publish only part of a batch, as a rank that is killed: up to `keep` descriptors. */
static int keep_left;
static rig_act partial(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)r, (void)d, (void)p;
    return keep_left-- > 0 ? ACT_KEEP : ACT_DROP;
}

static void group_dies(bool gather_too) {
    rig g;
    rig_open(&g, 3);
    rig_hooks h = {.desc = partial};
    tally t = {0};
    pid_t pid = spawn(&g);
    for (uint64_t b = 0; b < 40; b++) {
        rig_feed(&g, ROWS, T, NULL);
        for (int death = 0; death < (int)(b % 3); death++) { /* each rank gets somewhere else; one may even end */
            for (uint32_t r = 0; r < 3; r++) {
                keep_left = (int)((b * 7 + r * 5 + (uint32_t)death * 3) % 22);
                rig_rank(&g, r, &h);
            }
            if (b & 4) nap();
            g.ctl[1].epoch = ++g.epoch; /* as sluiced does when all are reaped */
            sl_bell_ring(g.boot.procs[2].bell_fd);
            if (gather_too && b % 5 == 1) {
                kill(pid, SIGKILL);
                waitpid(pid, NULL, 0);
                pid = spawn(&g);
            }
            for (int i = 0; i < 4; i++) take_all(&g, &t); /* the writer sweeps what is stale with the next batch */
        }
        rig_ranks(&g, NULL);
        see_through(&g, &pid, &t, b);
    }
    drain(&g, pid, &t);
    rig_close(&g);
}

/* All ranks had ended the batch when the group died: it is used, and what the new life repeats is passed over. */
static void finished_batch_of_a_dead_group(void) {
    rig g;
    rig_open(&g, 2);
    tally t = {0};
    pid_t pid = spawn(&g);
    while (sl_metric_get(g.st.metrics, 2, SL_M_HEARTBEAT) == 0) nap();
    kill(pid, SIGSTOP);
    rig_feed(&g, ROWS, T, NULL);
    rig_ranks(&g, NULL);
    g.ctl[1].epoch = g.epoch = 2;
    kill(pid, SIGCONT);
    see_through(&g, &pid, &t, 0);
    CHECK(t.epoch == 1, "verdicts of epoch %u on chunks of epoch 1", t.epoch);
    rig_ranks(&g, NULL); /* the new life read "gathered" before */
    rig_feed(&g, ROWS, T, NULL);
    rig_ranks(&g, NULL);
    see_through(&g, &pid, &t, 1);
    drain(&g, pid, &t);
    rig_close(&g);
}

/* A restarted gather does not know what it had read of a dead epoch: here the first batch of it is gone, the second
 * whole. */
static void dead_epoch_after_a_restart(void) {
    rig g;
    rig_open(&g, 2);
    tally t = {0};
    rig_feed(&g, ROWS, T, NULL);
    rig_batch first = g.now;
    g.now.states = NULL;
    rig_feed(&g, ROWS, T, NULL);
    rig_ranks(&g, NULL); /* batch 1 of epoch 1 stands at the head of both rings */
    g.ctl[1].epoch = g.epoch = 2;
    pid_t pid = spawn(&g);
    rig_batch second = g.now;
    g.now = first;
    rig_ranks(&g, NULL);
    see_through(&g, &pid, &t, 0);
    g.now = second;
    rig_ranks(&g, NULL);
    see_through(&g, &pid, &t, 1);
    drain(&g, pid, &t);
    free(first.states);
    g.before.states = NULL;
    rig_close(&g);
}

/* Turn until nothing moves; what gather publishes stays where it is. */
static void turns(rig *g, sl_gather *ga, bool *full) {
    int rc;
    while ((rc = sl_gather_turn(ga, full, &g->e)) > 0) {}
    CHECK(!rc, "turn: %s", g->e.msg);
}

/* Verdicts of earlier batches that the writer has not taken yet do not stand for the batch in hand. */
static void restart_before_a_slow_writer(void) {
    rig g;
    rig_open(&g, 2);
    tally t = {0};
    for (int life = 0; life < 2; life++) {
        for (int b = 0; b < 2; b++) {
            rig_feed(&g, ROWS, T, NULL);
            rig_ranks(&g, NULL);
        }
        sl_gather *ga = NULL;
        bool full;
        CHECK(!sl_gather_open(&ga, &g.st, &g.e), "%s", g.e.msg);
        turns(&g, ga, &full);
        sl_gather_close(ga); /* what it knew is gone */
    }
    take_all(&g, &t);
    CHECK(t.next_bpos == 4 && t.next_seq == g.seq, "%llu batches, %llu rows of %llu", (unsigned long long)t.next_bpos,
          (unsigned long long)t.next_seq, (unsigned long long)g.seq);
    rig_close(&g);
}

/* What a dead epoch left is passed over at once, or the next life's ranks would find no room; what the living one has
 * brought of a batch that is still coming is not, or it would be lost with the gather. Rank 0 had gone on to the next
 * batch when rank 1 died: that is no end of this one. */
static void dead_epochs_make_room(void) {
    rig g;
    rig_open(&g, 2);
    sl_gather *ga = NULL;
    CHECK(!sl_gather_open(&ga, &g.st, &g.e), "%s", g.e.msg);
    rig_hooks h = {.desc = partial};
    bool full;
    rig_feed(&g, ROWS, T, NULL);
    rig_batch first = g.now;
    g.now.states = NULL;
    rig_feed(&g, ROWS, T, NULL);
    rig_batch second = g.now;
    for (int death = 0; death < 3; death++) {
        g.now = first;
        rig_rank(&g, 0, NULL);
        keep_left = 5;
        rig_rank(&g, 1, &h);
        g.now = second;
        keep_left = 5;
        rig_rank(&g, 0, &h);
        turns(&g, ga, &full);
        g.ctl[1].epoch = ++g.epoch;
        uint64_t end[2];
        for (uint32_t r = 0; r < 2; r++) end[r] = sl_ring_pos(g.lane[r], SL_CHUNK_PUBLISHED);
        for (int more = 0; more < 2; more++) {
            if (!more && death == 1) continue; /* the new life may be faster than gather */
            for (uint32_t r = 0; more && r < 2; r++) {
                g.now = first;
                keep_left = 4;
                rig_rank(&g, r, &h);
            }
            turns(&g, ga, &full);
            for (uint32_t r = 0; r < 2; r++) {
                uint64_t passed = sl_ring_pos(g.lane[r], SL_CHUNK_VALIDATED);
                CHECK(passed == end[r], "death %d, rank %u, %s: passed to %llu, not %llu", death, r,
                      more ? "more has come" : "nothing more", (unsigned long long)passed, (unsigned long long)end[r]);
            }
        }
        g.ctl[1].epoch = ++g.epoch;
        turns(&g, ga, &full);
    }
    rig_ranks(&g, NULL);
    g.now = second;
    rig_ranks(&g, NULL);
    turns(&g, ga, &full);
    tally t = {0};
    take_all(&g, &t);
    CHECK(t.next_bpos == 2 && t.next_seq == 2ull * ROWS, "%llu batches, %llu rows", (unsigned long long)t.next_bpos,
          (unsigned long long)t.next_seq);
    CHECK(t.epoch == g.epoch, "verdicts of epoch %u", t.epoch);
    sl_gather_close(ga);
    free(first.states);
    g.before.states = NULL;
    rig_close(&g);
}

/* Gather and the group died together, and the ring was full: a restarted gather passes over all of it, or the next life
 * would wait for room and gather for the next life. */
static void restart_on_a_ring_full_of_a_dead_epoch(void) {
    rig g;
    rig_open(&g, 1);
    rig_batch fed[6];
    rig_hooks h = {.desc = partial};
    for (int b = 0; b < 6; b++) { /* 12 payload slots each, of 64 */
        rig_feed(&g, ROWS, T, NULL);
        fed[b] = g.now;
        g.now.states = NULL;
    }
    for (int b = 0; b < 6; b++) {
        g.now = fed[b];
        keep_left = b < 5 ? 100 : 4;
        rig_rank(&g, 0, &h);
    }
    CHECK(!sl_ring_pay_room(g.lane[0]), "the ring is not full");
    g.ctl[1].epoch = g.epoch = 2;
    sl_gather *ga = NULL;
    CHECK(!sl_gather_open(&ga, &g.st, &g.e), "%s", g.e.msg);
    bool full;
    tally t = {0};
    for (int b = 0; b < 6; b++) {
        turns(&g, ga, &full);
        take_all(&g, &t);
        CHECK(!sl_ring_advance(g.w_lane[0], sl_ring_pos(g.w_lane[0], SL_CHUNK_VALIDATED), &g.e), "%s",
              g.e.msg); /* as the writer sweeps */
        uint64_t room = sl_ring_pay_room(g.lane[0]);
        CHECK(room >= 12, "batch %d: room for %llu chunks of 12", b, (unsigned long long)room);
        if (room < 12) break; /* (the rank would wait for ever) */
        g.now = fed[b];
        rig_rank(&g, 0, NULL);
    }
    turns(&g, ga, &full);
    take_all(&g, &t);
    CHECK(t.next_seq == g.seq, "%llu rows of %llu", (unsigned long long)t.next_seq, (unsigned long long)g.seq);
    sl_gather_close(ga);
    for (int b = 0; b < 6; b++) free(fed[b].states);
    g.now.states = g.before.states = NULL;
    rig_close(&g);
}

/* Verdicts that need one descriptor more than there is wait; those that just fit do not. */
static void exactly_what_fits(void) {
    const uint32_t ones[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    for (uint32_t last = 12; last <= 13; last++) {
        rig g;
        rig_open(&g, 1);
        sl_gather *ga = NULL;
        CHECK(!sl_gather_open(&ga, &g.st, &g.e), "%s", g.e.msg);
        bool full;
        for (int b = 0; b < 4; b++) { /* 3 * 17 of 64 descriptors, then 13 or 14 */
            rig_feed(&g, b < 3 ? 16 : last, ones, NULL);
            rig_ranks(&g, NULL);
        }
        turns(&g, ga, &full);
        uint64_t have = sl_ring_pos(g.eyes, 0), want = last == 12 ? 64 : 51;
        CHECK(have == want && full == (last == 13), "a last batch of %u rows: %llu descriptors, full %d", last,
              (unsigned long long)have, full);
        sl_gather_close(ga);
        rig_close(&g);
    }
}

/* The end: nothing more can come, and everything has been handed on. */
static void drained_when_all_is_done(void) {
    rig g;
    rig_open(&g, 1);
    sl_gather *ga = NULL;
    CHECK(!sl_gather_open(&ga, &g.st, &g.e), "%s", g.e.msg);
    bool full;
    CHECK(!sl_gather_drained(ga), "drained without being told");
    g.ctl[0].draining = 1;
    sl_metric_set(g.feeder, SL_M_STATE, SL_ST_DRAINING);
    CHECK(!sl_gather_drained(ga), "drained before the feeder is done");
    rig_feed(&g, ROWS, T, NULL);
    sl_metric_set(g.feeder, SL_M_STATE, SL_ST_DONE);
    CHECK(!sl_gather_drained(ga), "drained with a batch to come");
    rig_ranks(&g, NULL);
    turns(&g, ga, &full);
    CHECK(sl_gather_drained(ga), "not drained");
    sl_gather_close(ga);
    rig_close(&g);
}

/* A sample ring that could never hold the largest batch is refused, not waited for. */
static void sample_ring_too_small(void) {
    for (uint32_t rows = 63; rows <= 64; rows++) {
        rig g;
        rig_open(&g, 1);
        g.boot.max_batch_rows = rows;
        sl_gather *ga = NULL;
        int rc = sl_gather_open(&ga, &g.st, &g.e);
        CHECK(rows == 63 ? !rc : rc == SL_ECONFIG && strstr(g.e.msg, "a batch of 64 rows needs 65"), "%u rows: %d %s",
              rows, rc, g.e.msg);
        sl_gather_close(ga);
        rig_close(&g);
    }
}

/* The sample ring is full: gather waits, and goes on when there is room. */
static void waits_for_the_writer(void) {
    rig g;
    rig_open(&g, 1);
    tally t = {0};
    pid_t pid = spawn(&g);
    const uint32_t ones[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    for (int b = 0; b < 6; b++) { /* 17 descriptors each; the ring holds 64 */
        rig_feed(&g, 16, ones, NULL);
        rig_ranks(&g, NULL);
    }
    for (int i = 0; i < PATIENCE && sl_ring_pos(g.eyes, 0) < 51; i++) nap();
    nap();
    CHECK(sl_ring_pos(g.eyes, 0) == 51, "published %llu", (unsigned long long)sl_ring_pos(g.eyes, 0));
    for (int i = 0; i < PATIENCE / 10; i++) { /* it is asleep waiting for room, and says so */
        if (sl_metric_get(g.st.metrics, 2, SL_M_WAIT_OUT_NS)) break;
        struct timespec ts = {.tv_nsec = 10000000};
        nanosleep(&ts, NULL);
    }
    CHECK(sl_metric_get(g.st.metrics, 2, SL_M_WAIT_OUT_NS) > 0, "no wait-out");
    see_through(&g, &pid, &t, 5);
    drain(&g, pid, &t);
    rig_close(&g);
}

/* Ends in wrong places, and what follows each garbled, so that the rest of a batch looks like batches of its own: its
 * rows are rejected, and the next batch is all right. */
static int place;
static rig_act false_ends(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)p;
    sl_desc_chunk *c = (sl_desc_chunk *)(void *)d;
    if (r) return ACT_KEEP;
    place++;
    if (place == 3 || place == 5 || place == 7) c->h.kind = SL_DESC_END;
    if (place > 3 && place < 9) c->bpos = UINT64_C(1) << 40;
    if (place == 6) c->h.epoch = 77;
    return ACT_KEEP;
}

static void ends_in_wrong_places(void) {
    rig g;
    rig_open(&g, 2);
    sl_gather *ga = NULL;
    CHECK(!sl_gather_open(&ga, &g.st, &g.e), "%s", g.e.msg);
    rig_hooks h = {.desc = false_ends};
    sl_desc_sample s[RIG_MAX_ROWS];
    bool full;
    for (uint64_t b = 0; b < 3; b++) {
        sl_desc_batch got = {0};
        rig_feed(&g, ROWS, T, NULL);
        for (uint32_t r = 0; r < 2; r++) rig_rank(&g, r, b ? NULL : &h);
        while (sl_gather_turn(ga, &full, &g.e) > 0) {}
        uint32_t n = rig_take(&g, s, &got);
        CHECK(n == ROWS && got.bpos == b, "batch %llu: %u rows of batch %llu", (unsigned long long)b, n,
              (unsigned long long)got.bpos);
        CHECK(got.rejected == (b ? 0 : ROWS), "batch %llu: %u rows rejected", (unsigned long long)b, got.rejected);
    }
    uint64_t in = sl_metric_get(g.st.metrics, 2, SL_M_ROWS_IN),
             bad = sl_metric_get(g.st.metrics, 2, SL_M_ROWS_REJECTED);
    CHECK(in == 3 * ROWS && bad == ROWS, "counted %llu rows, %llu rejected", (unsigned long long)in,
          (unsigned long long)bad);
    sl_gather_close(ga);
    rig_close(&g);
}

int main(void) {
    if (!getenv("SHOW")) {
        int null = open("/dev/null", O_WRONLY);
        dup2(null, STDERR_FILENO);
    }
    sl_log_init("gather", SL_DEBUG);
    const char *const points[] = {"gather.before_publish", "gather.after_publish", "gather.after_validated",
                                  "gather.after_gathered"};
    for (int i = 0; i < 4; i++)
        for (int n = 1; n <= 3; n++) {
            char one[64];
            snprintf(one, sizeof one, "%s:%d", points[i], n);
            killed_at(one, 3, 0, 1);
            killed_at(one, 2, 2, 1);
        }
    killed_at("gather.before_publish:2,gather.after_publish:2,gather.after_validated:3,gather.after_gathered:1", 2, 0,
              4);
    killed_at_random();
    group_dies(false);
    group_dies(true);
    finished_batch_of_a_dead_group();
    dead_epoch_after_a_restart();
    restart_before_a_slow_writer();
    dead_epochs_make_room();
    restart_on_a_ring_full_of_a_dead_epoch();
    exactly_what_fits();
    drained_when_all_is_done();
    sample_ring_too_small();
    waits_for_the_writer();
    ends_in_wrong_places();
    printf("%d failures\n", failures);
    return failures != 0;
}
