/* feeder: the real `sluice-feeder` process under a test that plays supervisor, client, gather and writer.
 *   test_feeder SLUICE_FEEDER
 * The same 300 rows are pushed (1) undisturbed, (2) with a SIGKILL at every crash point, (3) with SIGKILLs at random
 * times, (4) with SIGKILLs and new shared memory (as when the whole service restarts). Each time every row must come
 * out exactly once, in exactly the batches of the undisturbed run, with its tokens; and a drain must end with exit
 * status 0. */
#include "tests/boot_example.h"
#include "ipc/doorbell.h"
#include "ipc/journal.h"
#include "ipc/log.h"
#include "ipc/wire.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <zmq.h>

#define WAIT_NS 600000000000ull /* only to end a test that hangs */
enum { ROWS = 300, CREDIT = 40, GROUPS = 2, DEPTH = 4, PAY = 8192 };

#define FAIL(...)                                                                                                      \
    do {                                                                                                               \
        printf("FAIL %s:%d: ", __func__, __LINE__);                                                                    \
        printf(__VA_ARGS__);                                                                                           \
        printf("\n");                                                                                                  \
        if (w.pid > 0) kill(w.pid, SIGKILL);                                                                           \
        exit(1);                                                                                                       \
    } while (0)
#define MUST(call)                                                                                                     \
    do {                                                                                                               \
        if ((call) < 0) FAIL("%s: %s", #call, err.msg);                                                                \
    } while (0)

static sl_err err;
static struct {
    const char *binary;
    char dir[64];
    sl_boot boot;
    int boot_fd, bell, other_bell;
    sl_ctl_page *ctl;
    sl_metrics *sup; /* read-only */
    sl_metrics *writer;
    unsigned writer_page;
    sl_ring *gathered[GROUPS], *released[GROUPS];
    int ring_fd[GROUPS];
    pid_t pid;
    sl_journal *commit;
    unsigned deaths;
    void *ctx, *sock;
    /* client */
    bool acked[ROWS], durable[ROWS], welcome, flush_sent, flushed;
    uint32_t outstanding, next;
    uint64_t seen_ns;
    /* what came out: batch of each row, how often each batch was given out in this life of the rings */
    int64_t batch_of[ROWS];
    bool committed[ROWS], told[ROWS]; /* told: that it is on disk */
    uint64_t synced;
    unsigned given[2 * ROWS];
    unsigned done_flags;
} w;

static uint64_t seed;
static uint32_t rnd(uint32_t n) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(seed >> 33) % n;
}
static uint32_t len_of(uint64_t row) {
    return (uint32_t)(row * 7919 % 41) + 1;
}
static int32_t id_of(uint64_t row, uint32_t t) {
    return (int32_t)((row * 13 + t * 5) % 1000);
}

/* ---- the service ---- */

static void keep(int fd) {
    fcntl(fd, F_SETFD, 0);
}

static void make_rings(void) {
    for (int g = 0; g < GROUPS; g++) {
        if (w.gathered[g]) {
            sl_ring_detach(w.gathered[g]);
            sl_ring_detach(w.released[g]);
            close(w.ring_fd[g]);
        }
        sl_ring_params p = {.depth = DEPTH, .pay_slots = DEPTH, .pay_size = PAY, .n_cursors = SL_BATCH_CURSORS};
        snprintf(p.name, sizeof p.name, "batch.%d", g);
        bool huge;
        MUST(w.ring_fd[g] = sl_ring_create(&p, false, &huge, &err));
        keep(w.ring_fd[g]);
        MUST(sl_ring_attach(&w.gathered[g], w.ring_fd[g], SL_BATCH_GATHERED, &err));
        MUST(sl_ring_attach(&w.released[g], w.ring_fd[g], SL_BATCH_RELEASED, &err));
        w.boot.groups[g].batch_fd = w.ring_fd[g];
    }
    memset(w.given, 0, sizeof w.given);
}

static void make_boot(void) {
    if (w.boot_fd > 0) close(w.boot_fd);
    MUST(w.boot_fd = sl_boot_create(&w.boot, &err));
    keep(w.boot_fd);
}

static void set_up(const char *crash_points) {
    const char *binary = w.binary;
    void *ctx = w.ctx;
    memset(&w, 0, sizeof w);
    w.binary = binary;
    w.ctx = ctx;
    strcpy(w.dir, "/tmp/sl_feeder_XXXXXX");
    if (!mkdtemp(w.dir)) FAIL("mkdtemp");
    boot_example(&w.boot, GROUPS, 1);
    sl_boot *b = &w.boot;
    snprintf(b->store, sizeof b->store, "%s", w.dir);
    snprintf(b->model, sizeof b->model, "%s", w.dir);
    snprintf(b->feed_addr, sizeof b->feed_addr, "ipc://%s/feed.sock", w.dir);
    snprintf(b->template_args, sizeof b->template_args, "{}");
    snprintf(b->crash_points, sizeof b->crash_points, "%s", crash_points);
    b->batch_tokens = 64;
    b->max_batch_rows = 6;
    b->feeder_threads = 2;
    b->credit_rows = CREDIT;
    b->batch_wait_ms = 10;
    b->nll_every = 64;
    b->log_level = SL_ERROR;
    MUST(w.bell = sl_bell_create(&err));
    MUST(w.other_bell = sl_bell_create(&err));
    keep(w.bell);
    keep(w.other_bell);
    for (uint32_t i = 0; i < b->n_procs; i++)
        b->procs[i].bell_fd = b->procs[i].role == SL_ROLE_FEEDER ? w.bell : w.other_bell;
    MUST(b->metrics_fd = sl_metrics_create(b->n_procs, &err));
    MUST(b->ctl_fd = sl_ctl_create(GROUPS, &err));
    keep(b->metrics_fd);
    keep(b->ctl_fd);
    MUST(sl_ctl_attach(&w.ctl, b->ctl_fd, GROUPS, 1, &err));
    MUST(sl_metrics_attach(&w.sup, b->metrics_fd, -1, &err));
    for (uint32_t i = 0; i < b->n_procs; i++)
        if (b->procs[i].role == SL_ROLE_WRITER) w.writer_page = i;
    MUST(sl_metrics_attach(&w.writer, b->metrics_fd, (int)w.writer_page, &err));
    make_rings();
    make_boot();
    char path[128];
    snprintf(path, sizeof path, "%s/commit.log", w.dir);
    MUST(sl_journal_open(&w.commit, path, SL_COMMIT_MAGIC, NULL, NULL, &err));
    for (int i = 0; i < ROWS; i++) w.batch_of[i] = -1;
}

static void spawn(void) {
    char fd[16];
    snprintf(fd, sizeof fd, "%d", w.boot_fd);
    w.pid = fork();
    if (w.pid == 0) {
        execl(w.binary, w.binary, "--boot", fd, "--proc", "1", (char *)NULL);
        _exit(127);
    }
}

/* ---- the client ---- */

static void send_map(msgpack_sbuffer *b) {
    if (zmq_send(w.sock, b->data, b->size, ZMQ_DONTWAIT) < 0 && errno != EAGAIN) FAIL("send: %s", zmq_strerror(errno));
    msgpack_sbuffer_destroy(b);
}

static void begin(msgpack_sbuffer *b, msgpack_packer *pk, uint32_t fields, const char *t) {
    msgpack_sbuffer_init(b);
    msgpack_packer_init(pk, b, msgpack_sbuffer_write);
    msgpack_pack_map(pk, fields);
    sl_wire_kstr(pk, "t", t);
}

static void dial(void) {
    int zero = 0;
    msgpack_sbuffer b;
    msgpack_packer pk;
    if (w.sock) zmq_close(w.sock);
    w.sock = zmq_socket(w.ctx, ZMQ_DEALER);
    zmq_setsockopt(w.sock, ZMQ_LINGER, &zero, sizeof zero);
    if (zmq_connect(w.sock, w.boot.feed_addr)) FAIL("connect");
    begin(&b, &pk, 3, "hello");
    sl_wire_ku64(&pk, "v", 1);
    sl_wire_kstr(&pk, "dataset", "set");
    send_map(&b);
    w.welcome = w.flush_sent = w.flushed = false;
    w.outstanding = 0;
    for (w.next = 0; w.next < ROWS && w.acked[w.next]; w.next++) {} /* from the first row that was not answered */
    w.seen_ns = sl_now_ns();
}

static void send_row(uint32_t row) {
    msgpack_sbuffer b;
    msgpack_packer pk;
    int32_t ids[64];
    uint32_t T = len_of(row);
    char id[16];
    for (uint32_t t = 0; t < T; t++) ids[t] = id_of(row, t);
    begin(&b, &pk, 2, "rows");
    sl_wire_key(&pk, "rows");
    msgpack_pack_array(&pk, 1);
    msgpack_pack_map(&pk, 3);
    sl_wire_ku64(&pk, "n", row);
    sl_wire_key(&pk, "ids");
    msgpack_pack_bin_with_body(&pk, ids, T * 4);
    snprintf(id, sizeof id, "r%u", row);
    sl_wire_kstr(&pk, "id", id);
    send_map(&b);
    w.outstanding++;
}

static uint64_t number(const msgpack_object *o) {
    if (o->type == MSGPACK_OBJECT_ARRAY && o->via.array.size) o = &o->via.array.ptr[0];
    if (o->type != MSGPACK_OBJECT_POSITIVE_INTEGER || o->via.u64 >= ROWS) FAIL("not a row number");
    return o->via.u64;
}

static void mark(const msgpack_object *m, const char *key, bool *flags, bool ack) {
    const msgpack_object *list = sl_wire_get(m, key);
    for (uint32_t i = 0; list && i < list->via.array.size; i++) {
        flags[number(&list->via.array.ptr[i])] = true;
        if (ack && w.outstanding) w.outstanding--;
    }
}

static bool is(const char *t, uint32_t len, const char *what) {
    return len == strlen(what) && !memcmp(t, what, len);
}

static void receive(void) {
    char buf[65536];
    int n;
    while ((n = zmq_recv(w.sock, buf, sizeof buf, ZMQ_DONTWAIT)) >= 0) {
        msgpack_unpacked u;
        const char *t;
        uint32_t len;
        MUST(sl_wire_unpack(&u, buf, (size_t)n, &err));
        MUST(sl_wire_str(&u.data, "t", &t, &len, &err));
        w.seen_ns = sl_now_ns();
        if (is(t, len, "welcome"))
            w.welcome = true;
        else if (is(t, len, "ack")) {
            mark(&u.data, "acc", w.acked, true);
            mark(&u.data, "known", w.acked, true);
            if (sl_wire_get(&u.data, "rej")->via.array.size) FAIL("a row was refused");
        } else if (is(t, len, "done")) {
            mark(&u.data, "ok", w.durable, false);
            for (int i = 0; i < ROWS; i++)
                if (w.durable[i] && !w.told[i]) FAIL("row %d is called durable before its record is synced", i);
        } else if (is(t, len, "flushed"))
            w.flushed = true;
        else
            FAIL("answer '%.*s'", (int)len, t);
        msgpack_unpacked_destroy(&u);
    }
}

static void client_turn(void) {
    receive();
    if (!w.welcome) return;
    while (w.next < ROWS && w.outstanding < CREDIT) send_row(w.next++);
    if (w.next == ROWS && !w.outstanding && !w.flush_sent) {
        msgpack_sbuffer b;
        msgpack_packer pk;
        begin(&b, &pk, 1, "flush");
        send_map(&b);
        w.flush_sent = true;
    }
}

/* ---- gather and writer ---- */

static void check_batch(const sl_batch_view *v) {
    uint64_t no = v->desc->batch_no;
    if (no >= 2 * ROWS) FAIL("batch number %llu", (unsigned long long)no);
    if (w.given[no]++) FAIL("batch %llu was given out twice", (unsigned long long)no);
    for (uint32_t i = 0; i < v->desc->n_rows; i++) {
        const sl_batch_row *r = &v->rows[i];
        char id[16];
        if (r->row >= ROWS || r->T != len_of(r->row) || r->seq != r->row)
            FAIL("row %llu seq %llu T %u", (unsigned long long)r->row, (unsigned long long)r->seq, r->T);
        for (uint32_t t = 0; t < r->T; t++)
            if (v->ids[r->t0 + t] != id_of(r->row, t))
                FAIL("row %llu: token %u differs", (unsigned long long)r->row, t);
        int n = snprintf(id, sizeof id, "r%llu", (unsigned long long)r->row);
        if (r->id_len != (uint32_t)n || memcmp(v->base + r->id_off, id, r->id_len))
            FAIL("row %llu: another id", (unsigned long long)r->row);
        if (w.batch_of[r->row] >= 0 && w.batch_of[r->row] != (int64_t)no)
            FAIL("row %llu moved to another batch", (unsigned long long)r->row);
        w.batch_of[r->row] = (int64_t)no;
        bool done = r->flags & SL_ROW_DONE;
        if (done && !w.committed[r->row]) FAIL("row %llu is called done but is not", (unsigned long long)r->row);
        if (!done && w.committed[r->row]) FAIL("row %llu is committed and given out again", (unsigned long long)r->row);
        if (!!(r->flags & SL_ROW_NLL) != (r->seq % 64 == 0)) FAIL("NLL flag of row %llu", (unsigned long long)r->row);
        w.done_flags += done;
    }
}

/* Commit the rows of a batch; `part`: only some of them, as a writer that dies in the middle. */
static void commit(const sl_batch_view *v, bool part) {
    for (uint32_t i = 0; i < v->desc->n_rows; i++) {
        const sl_batch_row *r = &v->rows[i];
        if (w.committed[r->row] || (part && i % 2)) continue;
        sl_commit_rec c = {.kind = SL_CM_COMMIT, .seq = r->seq, .row = r->row, .T = r->T};
        MUST(sl_journal_append(w.commit, &c, &err));
        w.committed[r->row] = true;
    }
    MUST(sl_journal_sync(w.commit, &err));
    w.synced = sl_journal_synced(w.commit);
}

/* Some time after a commit, as if the sync took so long: the log shows the records all the while. */
static void say_synced(void) {
    if (sl_metric_get(w.writer, w.writer_page, SL_M_COMMITTED) == w.synced || rnd(4)) return;
    memcpy(w.told, w.committed, sizeof w.told);
    sl_metric_set(w.writer, SL_M_COMMITTED, w.synced);
}

static bool pipeline_turn(void) {
    bool did = false;
    say_synced();
    for (int g = 0; g < GROUPS; g++) {
        uint64_t pub = sl_ring_pos(w.gathered[g], SL_BATCH_PUBLISHED),
                 gat = sl_ring_pos(w.gathered[g], SL_BATCH_GATHERED);
        sl_batch_view v;
        if (gat < pub && rnd(3) == 0) {
            MUST(sl_batch_open(&v, w.gathered[g], gat, &err));
            check_batch(&v);
            MUST(sl_ring_advance(w.gathered[g], gat + 1, &err));
            did = true;
        }
        uint64_t rel = sl_ring_pos(w.released[g], SL_BATCH_RELEASED);
        gat = sl_ring_pos(w.gathered[g], SL_BATCH_GATHERED);
        if (rel < gat && rnd(3) == 0) {
            MUST(sl_batch_open(&v, w.released[g], rel, &err));
            commit(&v, false);
            MUST(sl_ring_advance(w.released[g], rel + 1, &err));
            sl_bell_ring(w.bell);
            did = true;
        }
    }
    return did;
}

/* Is there a batch of several rows between gather and writer? */
static bool half_written(void) {
    for (int g = 0; g < GROUPS; g++) {
        uint64_t rel = sl_ring_pos(w.released[g], SL_BATCH_RELEASED);
        sl_batch_view v;
        if (rel >= sl_ring_pos(w.gathered[g], SL_BATCH_GATHERED)) continue;
        MUST(sl_batch_open(&v, w.released[g], rel, &err));
        if (v.desc->n_rows > 1) return true;
    }
    return false;
}

/* The service dies as a whole: shared memory is gone, and a batch that was being written is half in the log. */
static void lose_everything(void) {
    for (int g = 0; g < GROUPS; g++) {
        uint64_t rel = sl_ring_pos(w.released[g], SL_BATCH_RELEASED);
        sl_batch_view v;
        if (rel < sl_ring_pos(w.gathered[g], SL_BATCH_GATHERED)) {
            MUST(sl_batch_open(&v, w.released[g], rel, &err));
            commit(&v, true);
        }
    }
    make_rings();
    make_boot();
}

/* ---- scenarios ---- */

static void kill_now(void) {
    kill(w.pid, SIGKILL);
    waitpid(w.pid, NULL, 0);
    w.deaths++;
}

static void drain(void) {
    int st;
    atomic_store(&w.ctl[0].draining, 1);
    sl_bell_ring(w.bell);
    for (uint64_t end = sl_now_ns() + WAIT_NS; sl_now_ns() < end;) {
        pipeline_turn();
        receive();
        if (waitpid(w.pid, &st, WNOHANG) == w.pid) {
            if (!WIFEXITED(st) || WEXITSTATUS(st)) FAIL("drain ended with status %x", (unsigned)st);
            if (sl_metric_get(w.sup, 1, SL_M_STATE) != SL_ST_DONE) FAIL("state after the drain");
            w.pid = 0;
            return;
        }
        usleep(1000);
    }
    FAIL("the drain does not end");
}

static bool all(const bool *v) {
    for (int i = 0; i < ROWS; i++)
        if (!v[i]) return false;
    return true;
}

/* Push everything until it is durable; every `kill_every` turns (on average) the feeder is killed, at most `kills`
 * times. */
static void run(uint32_t kill_every, unsigned kills, bool everything) {
    spawn();
    dial();
    uint64_t end = sl_now_ns() + WAIT_NS;
    while (!all(w.durable)) {
        int st;
        if (sl_now_ns() > end) FAIL("rows are missing after %llu s", WAIT_NS / 1000000000ull);
        bool did = pipeline_turn(), dead = waitpid(w.pid, &st, WNOHANG) == w.pid;
        client_turn();
        if (dead) {
            if (!WIFSIGNALED(st) || WTERMSIG(st) != SIGKILL)
                FAIL("the feeder ended by itself, status %x", (unsigned)st);
            w.deaths++;
        } else if (kills && rnd(kill_every) == 0 && (!everything || half_written())) {
            kill_now();
            kills--;
            dead = true;
            if (everything) lose_everything();
        }
        if (dead) {
            spawn();
            memset(w.durable, 0, sizeof w.durable);
            memset(w.acked, 0, sizeof w.acked); /* ask for all of them again: known rows are harmless */
            dial();
        }
        if (!did) usleep(300);
    }
    if (!all(w.committed)) FAIL("durable rows that are not committed");
    drain();
}

static void tear_down(void) {
    char cmd[128];
    zmq_close(w.sock);
    sl_journal_close(w.commit);
    for (int g = 0; g < GROUPS; g++) {
        sl_ring_detach(w.gathered[g]);
        sl_ring_detach(w.released[g]);
        close(w.ring_fd[g]);
    }
    sl_metrics_detach(w.sup);
    sl_metrics_detach(w.writer);
    munmap(w.ctl, (1 + GROUPS) * sizeof *w.ctl);
    snprintf(cmd, sizeof cmd, "rm -r %s", w.dir);
    if (system(cmd)) FAIL("%s", cmd);
}

static int64_t calm[ROWS];
static void compare(const char *what) {
    for (int i = 0; i < ROWS; i++)
        if (w.batch_of[i] != calm[i])
            FAIL("%s: row %d in batch %lld, undisturbed in %lld", what, i, (long long)w.batch_of[i],
                 (long long)calm[i]);
    printf("%s: %u deaths, every row once, the same batches, %u rows recomputed beside uncommitted ones\n", what,
           w.deaths, w.done_flags);
    tear_down();
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    w.binary = argv[1];
    w.ctx = zmq_ctx_new();
    seed = 12345;
    set_up("");
    run(0, 0, false);
    memcpy(calm, w.batch_of, sizeof calm);
    if (w.deaths) FAIL("deaths in the undisturbed run");
    compare("undisturbed");
    set_up("feeder.after_data:2,feeder.after_intake:3,feeder.before_publish:4,feeder.after_publish:6");
    run(0, 0, false);
    if (w.deaths != 4) FAIL("%u deaths at 4 crash points", w.deaths);
    compare("crash points");
    for (int i = 0; i < 3; i++) {
        set_up("");
        run(60, 8, false);
        compare("random kills");
    }
    unsigned again = 0;
    for (int i = 0; i < 3; i++) {
        set_up("");
        run(60, 6, true);
        again += w.done_flags;
        compare("kills of everything");
    }
    if (!again) FAIL("no batch was half committed: this test tests nothing");
    zmq_ctx_term(w.ctx);
    printf("ok\n");
    return 0;
}
