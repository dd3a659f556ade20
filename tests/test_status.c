/* status and control: every number of the map from logs, metrics and rings that are known; rates and the estimate of
 * the end by a clock of the test's own; what the two sockets answer, send, and refuse. */
#include "daemon/control.h"
#include "ipc/wire.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zmq.h>
#include <cmocka.h>

#define SECOND 1000000000ull

typedef struct world {
    sl_config cfg;
    sl_topo topo;
    sl_super super;
    sl_status st;
    sl_preflight plan;
    sl_journal *intake, *commit;
    sl_metrics *feeder, *writer, *rank; /* what those stages would write */
    char dir[64];
    sl_err e;
} world;

static world *start(void) {
    world *w = calloc(1, sizeof *w);
    assert_non_null(w);
    sl_config *c = &w->cfg;
    sl_boot *b = &c->boot;
    sl_config_default(c);
    strcpy(w->dir, "/tmp/sl-status-XXXXXX");
    assert_non_null(mkdtemp(w->dir));
    snprintf(b->store, sizeof b->store, "%s", w->dir);
    snprintf(b->feed_addr, sizeof b->feed_addr, "ipc://%s/feed.sock", w->dir);
    snprintf(b->sock_progress, sizeof b->sock_progress, "ipc://%s/progress.sock", w->dir);
    snprintf(b->sock_control, sizeof b->sock_control, "ipc://%s/control.sock", w->dir);
    strcpy(b->model, "/m");
    b->dp = 2, b->tp = 1, b->n_layers = 4, b->width = 8, b->vocab = 100, b->elem_size = 2, b->threads = 3;
    b->n_captures = 2, b->captures[0].hidx = 2, b->captures[1] = (sl_capture){.hidx = 4, .final_norm = 1};
    b->batch_tokens = b->max_length = 16, b->max_batch_rows = 4, b->chunk_rows = 16;
    if (sl_topo_plan(&w->topo, b, c, &w->e) || sl_topo_create(&w->topo, false, &w->e)) fail_msg("%s", w->e.msg);
    w->super.cfg = c, w->super.topo = &w->topo;
    w->plan.token_bytes = 32;
    sl_metrics **m[] = {&w->feeder, &w->writer, &w->rank};
    const unsigned proc[] = {SL_PROC_FEEDER, SL_PROC_WRITER, SL_PROC_RANKS + 1};
    for (int i = 0; i < 3; i++)
        if (sl_metrics_attach(m[i], w->topo.boot->metrics_fd, proc[i], &w->e)) fail_msg("%s", w->e.msg);
    return w;
}

static void finish(world *w) {
    char cmd[96];
    if (w->intake) sl_journal_close(w->intake);
    if (w->commit) sl_journal_close(w->commit);
    sl_metrics_detach(w->feeder), sl_metrics_detach(w->writer), sl_metrics_detach(w->rank);
    sl_topo_destroy(&w->topo);
    snprintf(cmd, sizeof cmd, "rm -r %s", w->dir);
    assert_int_equal(system(cmd), 0);
    free(w);
}

static void append(world *w, sl_journal **j, const char *name, uint32_t magic, void *rec) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", w->dir, name);
    if (!*j && sl_journal_open(j, path, magic, NULL, NULL, &w->e)) fail_msg("%s", w->e.msg);
    if (sl_journal_append(*j, rec, &w->e) || sl_journal_sync(*j, &w->e)) fail_msg("%s", w->e.msg);
}
static void intake(world *w, sl_in_kind kind, uint32_t T, uint16_t flags, sl_reason reason) {
    sl_intake_rec r = {.kind = (uint16_t)kind, .T = T, .flags = flags, .reason = (uint16_t)reason};
    append(w, &w->intake, "intake.log", SL_INTAKE_MAGIC, &r);
}
static void commit(world *w, sl_verdict v, uint32_t T, uint64_t raw, uint64_t len, float nll) {
    sl_commit_rec r = {.kind = v ? SL_CM_REJECT : SL_CM_COMMIT,
                       .verdict = (uint16_t)v,
                       .T = T,
                       .raw_bytes = raw,
                       .len = len,
                       .nll = nll};
    append(w, &w->commit, "commit.log", SL_COMMIT_MAGIC, &r);
}

/* ---- looking into a map ---- */

static char message[65536]; /* the one in hand: what was unpacked points into it */

/* "rows.accepted", "stages.2.state": keys, or positions in an array. */
static const msgpack_object *look(const msgpack_object *o, const char *path) {
    char part[64];
    for (const char *p = path; *p;) {
        size_t n = strcspn(p, ".");
        snprintf(part, sizeof part, "%.*s", (int)n, p);
        if (o->type == MSGPACK_OBJECT_ARRAY) {
            if ((unsigned)atoi(part) >= o->via.array.size) fail_msg("%s: only %u", path, o->via.array.size);
            o = &o->via.array.ptr[atoi(part)];
        } else if (!(o = sl_wire_get(o, part)))
            fail_msg("%s: no '%s'", path, part);
        p += n + (p[n] == '.');
    }
    return o;
}
static void expect_num(const msgpack_object *map, const char *path, double want) {
    const msgpack_object *o = look(map, path);
    double got = o->type == MSGPACK_OBJECT_POSITIVE_INTEGER   ? (double)o->via.u64
                 : o->type == MSGPACK_OBJECT_NEGATIVE_INTEGER ? (double)o->via.i64
                 : o->type == MSGPACK_OBJECT_FLOAT64          ? o->via.f64
                                                              : NAN;
    if (!(fabs(got - want) <= 1e-6 * fabs(want))) fail_msg("%s is %g, expected %g", path, got, want);
}
static void expect_str(const msgpack_object *map, const char *path, const char *want) {
    const msgpack_object *o = look(map, path);
    if (o->type != MSGPACK_OBJECT_STR || o->via.str.size != strlen(want) ||
        memcmp(o->via.str.ptr, want, o->via.str.size) != 0)
        fail_msg("%s is '%.*s', expected '%s'", path, o->type == MSGPACK_OBJECT_STR ? (int)o->via.str.size : 0,
                 o->type == MSGPACK_OBJECT_STR ? o->via.str.ptr : "", want);
}
static void unpack_status(world *w, msgpack_unpacked *u) {
    msgpack_sbuffer b;
    msgpack_sbuffer_init(&b);
    sl_status_pack(&w->st, &b);
    assert_true(b.size <= sizeof message);
    memcpy(message, b.data, b.size);
    if (sl_wire_unpack(u, message, b.size, &w->e)) fail_msg("%s", w->e.msg);
    msgpack_sbuffer_destroy(&b);
}
#define NUM(path, want) expect_num(&u.data, path, want)
#define STR(path, want) expect_str(&u.data, path, want)

/* ---- status ---- */

static void open_status(world *w) {
    if (sl_status_open(&w->st, &w->cfg, &w->plan, &w->topo, &w->super, &w->e)) fail_msg("%s", w->e.msg);
}

static void rows_are_those_of_the_logs(void **s) {
    (void)s;
    world *w = start();
    msgpack_unpacked u;
    open_status(w); /* no log yet */
    unpack_status(w, &u);
    NUM("rows.accepted", 0), NUM("eta", 0), NUM("bytes.ratio", 0), NUM("nll.rows", 0);
    assert_int_equal(look(&u.data, "nll.mean")->type, MSGPACK_OBJECT_NIL);
    assert_int_equal(look(&u.data, "rejects")->via.map.size, 0);
    msgpack_unpacked_destroy(&u);
    intake(w, SL_IN_DATASET, 1000, 1, SL_R_NONE); /* neither a row nor a refusal */
    for (int i = 0; i < 4; i++) intake(w, SL_IN_ROW, 10, i == 3 ? 1 : i == 2 ? 2 : 0, SL_R_NONE);
    intake(w, SL_IN_REJECT, 500, 1, SL_R_MEDIA); /* the last one */
    intake(w, SL_IN_FLUSH, 0, 0, SL_R_NONE);
    commit(w, SL_V_OK, 10, 3000, 1000, 2.f);
    commit(w, SL_V_NONFINITE, 10, 700, 700, 9.f);
    open_status(w); /* as a new sluiced finds them */
    assert_int_equal(sl_status_bad_rows(&w->st), 0);
    for (int i = 0; i < 3; i++) intake(w, SL_IN_ROW, 10, 0, SL_R_NONE);
    intake(w, SL_IN_REJECT, 0, 0, SL_R_JSON);
    intake(w, SL_IN_REJECT, 0, 0, SL_R_JSON);
    commit(w, SL_V_OK, 10, 1000, 1000, NAN);
    commit(w, SL_V_OK, 11, 1000, 500, 4.f);
    commit(w, SL_V_POISON, 9, 0, 0, NAN);
    if (sl_status_update(&w->st, sl_now_ns(), &w->e)) fail_msg("%s", w->e.msg);
    assert_int_equal(sl_status_bad_rows(&w->st), 3);
    unpack_status(w, &u);
    NUM("rows.accepted", 7), NUM("rows.committed", 3), NUM("rows.rejected", 2), NUM("rows.refused", 3);
    NUM("rows.queued", 2), NUM("rows.truncated", 1);
    NUM("life.committed", 2), NUM("life.rejected", 1), NUM("life.refused", 2), NUM("life.tokens", 21);
    NUM("tokens.accepted", 70), NUM("tokens.committed", 31);
    NUM("bytes.raw", 5000), NUM("bytes.stored", 2500), NUM("bytes.ratio", 2);
    NUM("nll.mean", 3), NUM("nll.rows", 2);
    assert_int_equal(look(&u.data, "rejects")->via.map.size, 4);
    NUM("rejects.NONFINITE", 1), NUM("rejects.POISON", 1), NUM("rejects.MEDIA", 1), NUM("rejects.JSON", 2);
    msgpack_unpacked_destroy(&u);
    finish(w);
}

static void a_corrupt_log_is_told(void **s) {
    (void)s;
    world *w = start();
    char path[128];
    for (int i = 0; i < 3; i++) commit(w, SL_V_OK, 1, 1, 1, 1.f);
    intake(w, SL_IN_ROW, 1, 0, SL_R_NONE);
    snprintf(path, sizeof path, "%s/commit.log", w->dir);
    FILE *f = fopen(path, "r+");
    assert_true(f && !fseek(f, SL_JREC + 20, SEEK_SET) && fputc('x', f) == 'x' && !fclose(f));
    assert_int_equal(sl_status_open(&w->st, &w->cfg, &w->plan, &w->topo, &w->super, &w->e), SL_EDATA);
    assert_non_null(strstr(w->e.msg, "commit.log"));
    finish(w);
}

/* Rates over the last five seconds, and the time that what is left takes at them. */
static void rates_and_the_end(void **s) {
    (void)s;
    world *w = start();
    msgpack_unpacked u;
    for (int i = 0; i < 100; i++) intake(w, SL_IN_ROW, 10, 0, SL_R_NONE);
    open_status(w);
    unpack_status(w, &u);
    NUM("eta", -1); /* nothing is known yet */
    msgpack_unpacked_destroy(&u);
    uint64_t t = 1000 * SECOND;
    for (int i = 0; i < 30; i++) { /* two rows a second, then eight */
        for (int k = 0; k < (i < 10 ? 1 : i < 20 ? 4 : 0); k++) commit(w, SL_V_OK, 10, 400, 100, NAN);
        if (sl_status_update(&w->st, t, &w->e)) fail_msg("%s", w->e.msg);
        if (i == 9 || i == 19) {
            unpack_status(w, &u);
            int f = i == 9 ? 2 : 8;
            NUM("rate.rows", f), NUM("rate.tokens", 10 * f), NUM("rate.raw", 400 * f), NUM("rate.stored", 100 * f);
            NUM("eta", i == 9 ? 900 / 20. : 500 / 80.);
            msgpack_unpacked_destroy(&u);
        }
        /* Asked more often it does not forget what was five seconds ago. */
        for (int k = 1; k < 5; k++) assert_int_equal(sl_status_update(&w->st, t + (uint64_t)k * SECOND / 50, &w->e), 0);
        t += SECOND / 2;
    }
    w->cfg.expect_tokens = 1200; /* the whole run is known to be longer */
    w->st.tokens_s = 70;
    unpack_status(w, &u);
    NUM("eta", 10);
    msgpack_unpacked_destroy(&u);
    w->cfg.expect_tokens = 100; /* or was thought to be shorter */
    unpack_status(w, &u);
    NUM("eta", 500 / 70.);
    msgpack_unpacked_destroy(&u);
    w->cfg.expect_tokens = 0;
    for (int i = 0; i < 50; i++) commit(w, i % 2 ? SL_V_OK : SL_V_COUNT, 10, 400, 100, NAN);
    assert_int_equal(sl_status_update(&w->st, t, &w->e), 0);
    unpack_status(w, &u);
    NUM("rows.queued", 0), NUM("eta", 0); /* done, rejected rows and all */
    msgpack_unpacked_destroy(&u);
    finish(w);
}

static void stages_rings_and_groups(void **s) {
    (void)s;
    world *w = start();
    msgpack_unpacked u;
    sl_ring *feed, *gathered;
    assert_int_equal(sl_ring_attach(&feed, w->topo.boot->groups[1].batch_fd, SL_RING_PRODUCER, &w->e), 0);
    assert_int_equal(sl_ring_attach(&gathered, w->topo.boot->groups[1].batch_fd, SL_BATCH_GATHERED, &w->e), 0);
    for (int i = 0; i < 3; i++) {
        assert_non_null(sl_ring_stage(feed, 1));
        sl_ring_publish(feed);
    }
    assert_int_equal(sl_ring_advance(gathered, 2, &w->e), 0);
    sl_ctl_page *ctl = &w->topo.ctl[2]; /* of group 1 */
    atomic_store(&ctl->epoch, 7), atomic_store(&ctl->deaths, 3), atomic_store(&ctl->suspect, 1),
        atomic_store(&ctl->poison_bpos, 5);
    sl_metric_set(w->writer, SL_M_FREE_BYTES, 12345), sl_metric_set(w->writer, SL_M_PAUSED, 1);
    sl_metric_set(w->writer, SL_M_DISK_NEED, 777), sl_metric_set(w->writer, SL_M_STATE, SL_ST_PAUSED);
    sl_metric_set(w->writer, SL_M_BYTES_OUT, 99), sl_metric_set(w->writer, SL_M_PID, 41);
    sl_metric_set(w->rank, SL_M_LOAD_TOTAL, 200), sl_metric_set(w->rank, SL_M_LOAD_DONE, 50);
    sl_metric_set(w->rank, SL_M_STATE, SL_ST_RUNNING), sl_metric_set(w->rank, SL_M_PID, 51);
    w->super.proc[SL_PROC_WRITER].pid = 41;
    w->super.proc[SL_PROC_RANKS + 1].pid = 52; /* a new life, which has not said anything */
    w->super.proc[SL_PROC_RANKS + 1].restarts = 2;
    w->super.proc[SL_PROC_GATHER].done = true;
    for (int i = 0; i < 11; i++) sl_super_event_add(&w->super, (sl_level)(i % 4), "who", "event %d", i);
    open_status(w);
    sl_metric_set(w->rank, SL_M_BUSY_NS, 10), sl_metric_set(w->rank, SL_M_WAIT_IN_NS, 100),
        sl_metric_set(w->rank, SL_M_WAIT_OUT_NS, 100);
    assert_int_equal(sl_status_update(&w->st, 1000 * SECOND, &w->e), 0);
    sl_metric_set(w->rank, SL_M_BUSY_NS, 60), sl_metric_set(w->rank, SL_M_WAIT_IN_NS, 130),
        sl_metric_set(w->rank, SL_M_WAIT_OUT_NS, 120);
    assert_int_equal(sl_status_update(&w->st, 1001 * SECOND, &w->e), 0);
    unpack_status(w, &u);
    STR("stages.0.name", "feeder"), STR("stages.0.state", "down");
    STR("stages.1.name", "rank0.0"), STR("stages.2.name", "rank1.0"), STR("stages.3.name", "gather");
    STR("stages.4.name", "writer");
    STR("stages.2.state", "starting"), NUM("stages.2.pid", 52), NUM("stages.2.restarts", 2), NUM("stages.2.load", 0.25);
    NUM("stages.2.group", 1), NUM("stages.2.rank", 0), STR("stages.2.role", "rank");
    NUM("stages.2.busy", 50), NUM("stages.2.in", 30), NUM("stages.2.out", 20);
    STR("stages.3.state", "done"), STR("stages.4.state", "paused"), NUM("stages.4.written", 99);
    assert_null(sl_wire_get(look(&u.data, "stages.4"), "load"));
    NUM("groups.0.epoch", 1), NUM("groups.0.batch.published", 0);
    NUM("groups.1.epoch", 7), NUM("groups.1.deaths", 3), NUM("groups.1.suspect", 1), NUM("groups.1.poison", 5);
    NUM("groups.1.batch.published", 3), NUM("groups.1.batch.gathered", 2), NUM("groups.1.batch.released", 0);
    NUM("disk.free", 12345), NUM("disk.paused", 1), NUM("disk.need", 777);
    NUM("layout.groups", 2), NUM("layout.ranks", 1), NUM("layout.threads", 3), NUM("layout.width", 8);
    NUM("layout.layers", 4), NUM("layout.token_bytes", 32), STR("layout.precision", "bf16"),
        STR("layout.backend", "cpu");
    NUM("states.0.0", 2), NUM("states.0.1", 0), NUM("states.1.0", 4), NUM("states.1.1", 1);
    assert_int_equal(look(&u.data, "events")->via.array.size, 8);
    STR("events.0.3", "event 3"), STR("events.0.1", "ERROR"), STR("events.7.3", "event 10"), STR("events.7.1", "WARN");
    const msgpack_object *rings = look(&u.data, "rings");
    bool seen = false;
    for (uint32_t i = 0; i < rings->via.array.size; i++) {
        const msgpack_object *name = look(&rings->via.array.ptr[i], "name");
        if (name->via.str.size != 7 || memcmp(name->via.str.ptr, "batch.1", 7) != 0) continue;
        expect_num(&rings->via.array.ptr[i], "fill", 3);
        seen = true;
    }
    assert_true(seen);
    msgpack_unpacked_destroy(&u);
    /* A restarted stage counts from zero again: its shares wait for the next second. */
    sl_metric_set(w->rank, SL_M_BUSY_NS, 5), sl_metric_set(w->rank, SL_M_WAIT_IN_NS, 300);
    assert_int_equal(sl_status_update(&w->st, 1002 * SECOND, &w->e), 0);
    unpack_status(w, &u);
    NUM("stages.2.busy", 50), NUM("stages.2.in", 30), NUM("stages.2.out", 20);
    msgpack_unpacked_destroy(&u);
    sl_ring_detach(feed), sl_ring_detach(gathered);
    finish(w);
}

/* ---- control ---- */

typedef struct peer {
    void *ctx, *req, *sub;
} peer;

static void ask(world *w, sl_control *c, peer *p, const void *msg, size_t n, msgpack_unpacked *u) {
    int got = -1;
    assert_int_equal(zmq_send(p->req, msg, n, 0), (int)n);
    for (int i = 0; i < 2000 && got < 0; i++) {
        sl_control_serve(c, &w->st);
        zmq_pollitem_t item = {p->req, 0, ZMQ_POLLIN, 0};
        zmq_poll(&item, 1, 5);
        got = zmq_recv(p->req, message, sizeof message, ZMQ_DONTWAIT);
    }
    if (got < 0) fail_msg("no answer");
    if (sl_wire_unpack(u, message, (size_t)got, &w->e)) fail_msg("%s", w->e.msg);
}
static void ask_for(world *w, sl_control *c, peer *p, const char *t, msgpack_unpacked *u) {
    msgpack_sbuffer b;
    msgpack_packer pk;
    msgpack_sbuffer_init(&b);
    msgpack_packer_init(&pk, &b, msgpack_sbuffer_write);
    msgpack_pack_map(&pk, 1);
    sl_wire_kstr(&pk, "t", t);
    ask(w, c, p, b.data, b.size, u);
    msgpack_sbuffer_destroy(&b);
}
static bool ok_of(const msgpack_object *map) {
    const msgpack_object *o = look(map, "ok");
    assert_int_equal(o->type, MSGPACK_OBJECT_BOOLEAN);
    return o->via.boolean;
}

/* The next message on the progress socket, or none in a while. */
static bool hear(world *w, peer *p, msgpack_unpacked *u, int ms) {
    zmq_pollitem_t item = {p->sub, 0, ZMQ_POLLIN, 0};
    if (zmq_poll(&item, 1, ms) <= 0) return false;
    int n = zmq_recv(p->sub, message, sizeof message, 0);
    if (n < 0 || sl_wire_unpack(u, message, (size_t)n, &w->e)) fail_msg("%s", w->e.msg);
    return true;
}

static void requests_are_answered(void **s) {
    (void)s;
    world *w = start();
    sl_control c;
    peer p = {.ctx = zmq_ctx_new()};
    msgpack_unpacked u;
    struct stat st;
    open_status(w);
    w->st.state = "running";
    if (sl_control_open(&c, &w->cfg, &w->e)) fail_msg("%s", w->e.msg);
    const char *const socks[] = {w->cfg.boot.sock_control + 6, w->cfg.boot.sock_progress + 6};
    for (int i = 0; i < 2; i++) { /* for this user alone */
        assert_int_equal(stat(socks[i], &st), 0);
        if ((st.st_mode & 0777) != 0600) fail_msg("%s has mode %o", socks[i], (unsigned)st.st_mode);
    }
    p.req = zmq_socket(p.ctx, ZMQ_REQ);
    assert_int_equal(zmq_connect(p.req, w->cfg.boot.sock_control), 0);
    ask_for(w, &c, &p, "ping", &u);
    STR("t", "pong");
    assert_true(ok_of(&u.data));
    msgpack_unpacked_destroy(&u);
    ask_for(w, &c, &p, "status", &u);
    STR("t", "status"), STR("state", "running"), STR("store", w->dir);
    msgpack_unpacked_destroy(&u);
    ask_for(w, &c, &p, "config", &u);
    STR("t", "config");
    const msgpack_object *ini = look(&u.data, "ini");
    assert_true(ini->type == MSGPACK_OBJECT_STR && memmem(ini->via.str.ptr, ini->via.str.size, "path = /m", 9) != NULL);
    msgpack_unpacked_destroy(&u);
    static const char *const wrong[] = {"", "statu", "drain!", "drainnnnnnnnnnnnnnnnnnnnnnn"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        ask_for(w, &c, &p, wrong[i], &u);
        assert_false(ok_of(&u.data));
        STR("code", "t"), STR("msg", "t must be status, drain, ping or config");
        msgpack_unpacked_destroy(&u);
    }
    static const char *const noise[] = {"\xc1", "\x80", "\x93\x01\x02\x03", "\x81\xa1t\x05", "no map"};
    for (size_t i = 0; i < sizeof noise / sizeof *noise; i++) { /* no msgpack, no t, no map, a number */
        ask(w, &c, &p, noise[i], strlen(noise[i]), &u);
        assert_false(ok_of(&u.data));
        STR("code", "message");
        assert_true(look(&u.data, "msg")->via.str.size > 0);
        msgpack_unpacked_destroy(&u);
    }
    assert_false(c.drain_asked);
    ask_for(w, &c, &p, "drain", &u);
    STR("t", "drain");
    assert_true(ok_of(&u.data) && c.drain_asked);
    msgpack_unpacked_destroy(&u);
    zmq_close(p.req);
    zmq_ctx_term(p.ctx);
    sl_control_close(&c);
    finish(w);
}

/* Its descriptor says "readable" once for all that is waiting: one call answers all of it. */
static void all_that_wait_are_answered(void **s) {
    (void)s;
    world *w = start();
    sl_control c;
    void *ctx = zmq_ctx_new(), *req[3];
    open_status(w);
    if (sl_control_open(&c, &w->cfg, &w->e)) fail_msg("%s", w->e.msg);
    for (int i = 0; i < 3; i++) {
        req[i] = zmq_socket(ctx, ZMQ_REQ);
        assert_int_equal(zmq_connect(req[i], w->cfg.boot.sock_control), 0);
    }
    for (int i = 0; i < 3; i++) assert_int_equal(zmq_send(req[i], "\x81\xa1t\xa4ping", 8, 0), 8);
    /* When the last answer is here, the earlier ones have been given in the same call or in one before. */
    unsigned calls = 0, left = 3;
    bool have[3] = {0};
    for (int tries = 0; left && tries < 4000; tries++) {
        struct pollfd p = {.fd = sl_control_fd(&c), .events = POLLIN};
        if (poll(&p, 1, 5) > 0) sl_control_serve(&c, &w->st), calls++;
        for (int i = 0; i < 3; i++)
            if (!have[i] && zmq_recv(req[i], message, sizeof message, ZMQ_DONTWAIT) > 0) have[i] = true, left--;
    }
    if (left) fail_msg("%u requests were not answered in %u calls", left, calls);
    for (int i = 0; i < 3; i++) zmq_close(req[i]);
    zmq_ctx_term(ctx);
    sl_control_close(&c);
    finish(w);
}

static void an_address_in_use_is_named(void **s) {
    (void)s;
    world *w = start();
    sl_control c;
    snprintf(w->cfg.boot.sock_progress, sizeof w->cfg.boot.sock_progress, "ipc://%s/no/such/folder", w->dir);
    assert_int_equal(sl_control_open(&c, &w->cfg, &w->e), SL_ETEMP);
    if (!strstr(w->e.msg, "/no/such/folder")) fail_msg("%s", w->e.msg);
    finish(w);
}

/* Events come once each and in order, the newest when there were too many; the status when it is due. */
static void progress_is_published(void **s) {
    (void)s;
    world *w = start();
    sl_control c;
    peer p = {.ctx = zmq_ctx_new()};
    msgpack_unpacked u;
    open_status(w);
    w->cfg.status_ms = 1000;
    if (sl_control_open(&c, &w->cfg, &w->e)) fail_msg("%s", w->e.msg);
    p.sub = zmq_socket(p.ctx, ZMQ_SUB);
    assert_int_equal(zmq_setsockopt(p.sub, ZMQ_SUBSCRIBE, "", 0), 0);
    assert_int_equal(zmq_connect(p.sub, w->cfg.boot.sock_progress), 0);
    uint64_t now = 5000 * SECOND;
    bool heard = false; /* until the subscription is there, what is published is for nobody */
    for (int i = 0; i < 1000 && !heard; i++) {
        sl_control_publish(&c, &w->st, now += 2 * SECOND);
        if ((heard = hear(w, &p, &u, 10))) msgpack_unpacked_destroy(&u);
    }
    assert_true(heard);
    while (hear(w, &p, &u, 100)) msgpack_unpacked_destroy(&u);
    sl_super_event_add(&w->super, SL_WARN, "rank0.0", "first");
    sl_super_event_add(&w->super, SL_INFO, "sluiced", "second");
    sl_control_publish(&c, &w->st, now + SECOND - 1); /* the status is not due */
    static const char *const want[][3] = {{"first", "WARN", "rank0.0"}, {"second", "INFO", "sluiced"}};
    for (int i = 0; i < 2; i++) {
        if (!hear(w, &p, &u, 5000)) fail_msg("event %d did not come", i);
        STR("t", "event"), STR("msg", want[i][0]), STR("lv", want[i][1]), STR("who", want[i][2]);
        assert_int_equal(u.data.via.map.size, 5);
        msgpack_unpacked_destroy(&u);
    }
    for (int i = 0; i < SL_SUPER_EVENTS + 5; i++) sl_super_event_add(&w->super, SL_INFO, "sluiced", "%d", i);
    sl_control_publish(&c, &w->st, now + SECOND - 1);
    for (int i = 5; i < SL_SUPER_EVENTS - 10; i++) { /* (of so many at once ZeroMQ may drop the last) */
        char text[16];
        snprintf(text, sizeof text, "%d", i);
        if (!hear(w, &p, &u, 5000)) fail_msg("event %d did not come", i);
        STR("t", "event"), STR("msg", text);
        msgpack_unpacked_destroy(&u);
    }
    bool marked = false;
    for (int tries = 0; !marked; tries++) { /* past what is left of them; a mark may be dropped too */
        sl_super_event_add(&w->super, SL_INFO, "sluiced", "mark");
        sl_control_publish(&c, &w->st, now + SECOND - 1);
        if (tries > 1000) fail_msg("the mark did not come");
        if (!hear(w, &p, &u, 50)) continue;
        STR("t", "event");
        marked = look(&u.data, "msg")->via.str.size == 4;
        msgpack_unpacked_destroy(&u);
    }
    sl_control_publish(&c, &w->st, now + SECOND);
    for (bool other = true; other;) { /* (more marks may come first) */
        if (!hear(w, &p, &u, 5000)) fail_msg("the status did not come");
        other = look(&u.data, "t")->via.str.size != 6;
        if (other) msgpack_unpacked_destroy(&u);
    }
    STR("t", "status");
    msgpack_unpacked_destroy(&u);
    sl_control_publish(&c, &w->st, now + SECOND + 1); /* not due again */
    sl_super_event_add(&w->super, SL_INFO, "sluiced", "last");
    sl_control_publish(&c, &w->st, now + SECOND + 2);
    if (!hear(w, &p, &u, 5000)) fail_msg("the last event did not come");
    STR("msg", "last"); /* nothing before it: no second status, no event again */
    msgpack_unpacked_destroy(&u);
    sl_super_event_add(&w->super, SL_INFO, "sluiced", "both");
    sl_control_publish(&c, &w->st, now + 3 * SECOND); /* an event and the status: a message each */
    if (!hear(w, &p, &u, 5000)) fail_msg("the event did not come");
    STR("msg", "both");
    msgpack_unpacked_destroy(&u);
    if (!hear(w, &p, &u, 5000)) fail_msg("the status did not come");
    STR("t", "status");
    msgpack_unpacked_destroy(&u);
    zmq_close(p.sub);
    zmq_ctx_term(p.ctx);
    sl_control_close(&c);
    finish(w);
}

int main(void) {
    sl_log_init("test", SL_ERROR);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_are_those_of_the_logs), cmocka_unit_test(a_corrupt_log_is_told),
        cmocka_unit_test(rates_and_the_end),          cmocka_unit_test(stages_rings_and_groups),
        cmocka_unit_test(requests_are_answered),      cmocka_unit_test(all_that_wait_are_answered),
        cmocka_unit_test(an_address_in_use_is_named), cmocka_unit_test(progress_is_published),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
