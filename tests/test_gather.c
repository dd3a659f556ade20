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
} tally;

/* As the writer: take what is there; every batch once and in order, every row once and in order. */
static void take_all(rig *g, tally *t) {
    sl_desc_sample s[RIG_MAX_ROWS];
    sl_desc_batch b = {0};
    for (uint32_t n; (n = rig_take(g, s, &b));) {
        CHECK(b.bpos == t->next_bpos, "batch %llu, expected %llu", (unsigned long long)b.bpos,
              (unsigned long long)t->next_bpos);
        CHECK(b.batch_no == b.bpos + 100, "batch number");
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

static void killed_at(const char *points, uint32_t ranks, uint64_t deaths) {
    rig g;
    rig_open(&g, ranks);
    char dir[] = "/tmp/sl_gather_XXXXXX", cmd[64];
    if (!mkdtemp(dir)) abort();
    snprintf(g.boot.store, sizeof g.boot.store, "%s", dir);
    snprintf(g.boot.crash_points, sizeof g.boot.crash_points, "%s", points);
    tally t = {0};
    pid_t pid = spawn(&g);
    for (uint64_t b = 0; b < 6; b++) {
        rig_feed(&g, ROWS, T, NULL);
        rig_ranks(&g, NULL);
        see_through(&g, &pid, &t, b);
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
            killed_at(one, 3, 1);
        }
    killed_at("gather.before_publish:2,gather.after_publish:2,gather.after_validated:3,gather.after_gathered:1", 2, 4);
    killed_at_random();
    group_dies(false);
    group_dies(true);
    finished_batch_of_a_dead_group();
    dead_epoch_after_a_restart();
    waits_for_the_writer();
    ends_in_wrong_places();
    printf("%d failures\n", failures);
    return failures != 0;
}
