/* feed: the protocol of ipc/wire.h over a real socket: credit, duplicates, conflicts, refusals by reason, nonsense, two
 * clients at once, restart, `done` from commit.log, a full disk (file size limit), tcp only with keys. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "ipc/log.h"
#include "ipc/metrics.h"
#include "ipc/wire.h"
#include "stages/feeder/feed.h"
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zmq.h>

static char dir[64], addr[128];
static sl_err e;
static sl_intake *in;
static sl_feed *feed;
static void *ctx;

static void start_at(const char *address, const char *curve) {
    sl_intake_cfg ic = {.store = dir, .batch_tokens = 64, .max_batch_rows = 8, .max_length = 16};
    if (sl_intake_open(&in, &ic, &e)) fail_msg("%s", e.msg);
    sl_feed_cfg fc = {.addr = address,
                      .curve_dir = curve,
                      .store = dir,
                      .credit = 50,
                      .threads = 2,
                      .max_length = 16,
                      .vocab = 100,
                      .run_id = 77,
                      .intake = in,
                      .prep = {.vocab = 100, .max_length = 16, .overlong = SL_LONG_SKIP, .tok_why = "a test"}};
    if (sl_feed_open(&feed, &fc, &e)) fail_msg("%s", e.msg);
}
static void stop(void) {
    sl_feed_close(feed);
    sl_intake_close(in);
    feed = NULL;
    in = NULL;
}

static int setup(void **state) {
    (void)state;
    sl_log_init("test", SL_ERROR);
    strcpy(dir, "/tmp/sl_feed_XXXXXX");
    if (!mkdtemp(dir)) return -1;
    snprintf(addr, sizeof addr, "ipc://%s/feed.sock", dir);
    ctx = zmq_ctx_new();
    start_at(addr, "");
    return 0;
}
static int teardown(void **state) {
    (void)state;
    char cmd[96];
    stop();
    zmq_ctx_term(ctx);
    snprintf(cmd, sizeof cmd, "rm -r %s", dir);
    return system(cmd);
}

/* ---- a client ---- */

static void *dial(void) {
    void *s = zmq_socket(ctx, ZMQ_DEALER);
    int zero = 0;
    zmq_setsockopt(s, ZMQ_LINGER, &zero, sizeof zero);
    assert_int_equal(zmq_connect(s, addr), 0);
    return s;
}

typedef struct msg {
    msgpack_sbuffer b;
    msgpack_packer pk;
} msg;
static msg *begin(uint32_t fields, const char *type) {
    static msg m; /* one at a time */
    msgpack_sbuffer_init(&m.b);
    msgpack_packer_init(&m.pk, &m.b, msgpack_sbuffer_write);
    msgpack_pack_map(&m.pk, fields);
    sl_wire_kstr(&m.pk, "t", type);
    return &m;
}
static void post(void *s, msg *m) {
    assert_true(zmq_send(s, m->b.data, m->b.size, 0) >= 0);
    msgpack_sbuffer_destroy(&m->b);
}
static void hello(void *s, const char *dataset) {
    msg *m = begin(4, "hello");
    sl_wire_ku64(&m->pk, "v", 1);
    sl_wire_kstr(&m->pk, "dataset", dataset);
    sl_wire_kstr(&m->pk, "client", "test");
    post(s, m);
}
static void simple(void *s, const char *type) {
    post(s, begin(1, type));
}
static msg *rows(uint32_t n) {
    msg *m = begin(2, "rows");
    sl_wire_key(&m->pk, "rows");
    msgpack_pack_array(&m->pk, n);
    return m;
}
static void json_row(msg *m, uint64_t n, const char *line) {
    msgpack_pack_map(&m->pk, 2);
    sl_wire_ku64(&m->pk, "n", n);
    sl_wire_key(&m->pk, "j");
    msgpack_pack_bin_with_body(&m->pk, line, strlen(line));
}
static void ids_row(msg *m, uint64_t n, uint32_t T, uint32_t mask) {
    int32_t ids[64];
    uint8_t ones[64];
    for (uint32_t i = 0; i < 64; i++) ids[i] = (int32_t)((n + i) % 100), ones[i] = i & 1;
    msgpack_pack_map(&m->pk, mask ? 3 : 2);
    sl_wire_ku64(&m->pk, "n", n);
    sl_wire_key(&m->pk, "ids");
    msgpack_pack_bin_with_body(&m->pk, ids, T * 4);
    if (!mask) return;
    sl_wire_key(&m->pk, "mask");
    msgpack_pack_bin_with_body(&m->pk, ones, mask);
}

/* Turn the feeder until the client has a message, or `ms` passed; the message as text (JSON-like), or "". */
static const char *expect(void *s, int ms) {
    static char text[65536];
    char buf[65536];
    uint64_t end = sl_now_ns() + (uint64_t)ms * 1000000;
    int n = -1;
    while (n < 0 && sl_now_ns() < end) {
        if (sl_feed_turn(feed, &e) < 0) fail_msg("%s", e.msg);
        n = zmq_recv(s, buf, sizeof buf, ZMQ_DONTWAIT);
        if (n < 0) usleep(500);
    }
    text[0] = 0;
    if (n < 0) return text;
    msgpack_unpacked u;
    if (sl_wire_unpack(&u, buf, (size_t)n, &e)) fail_msg("%s", e.msg);
    FILE *f = fmemopen(text, sizeof text, "w");
    msgpack_object_print(f, u.data);
    fclose(f);
    msgpack_unpacked_destroy(&u);
    return text;
}
static void says(void *s, const char *what) {
    const char *got = expect(s, 600000);
    if (!strstr(got, what)) fail_msg("got %s, expected ...%s...", got, what);
}
static void silent(void *s) {
    assert_string_equal(expect(s, 50), "");
}
static void welcome(void *s, const char *dataset) {
    hello(s, dataset);
    says(s, "\"welcome\", \"v\"=>1, \"credit\"=>50, \"run\"=>77, \"max_length\"=>16, \"vocab\"=>100");
}

/* ---- tests ---- */

static void reasons(void **state) {
    (void)state;
    void *s = dial();
    struct stat st;
    char path[128];
    snprintf(path, sizeof path, "%s/feed.sock", dir);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    welcome(s, "set");
    msg *m = rows(9);
    json_row(m, 0, "{\"input_ids\":[1,2,3],\"id\":\"x\"}");
    json_row(m, 1, "{\"input_ids\":[1,2,");
    json_row(m, 2, "{\"messages\":[{\"role\":\"gpt-4\",\"content\":\"x\"}]}");
    json_row(m, 3, "{\"input_ids\":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]}");
    ids_row(m, 4, 4, 3);
    ids_row(m, 5, 4, 4);
    ids_row(m, 6, 0, 0);
    json_row(m, 7, "{\"text\":\"a\"}");
    json_row(m, 8, "{\"input_ids\":[1,100]}");
    post(s, m);
    const char *got = expect(s, 600000);
    static const char *const want[] = {"\"acc\"=>[[0, 1, 3], [5, 1, 4]]",
                                       "\"known\"=>[]",
                                       "[1, 0, \"JSON\"",
                                       "[2, 0, \"ROLE\", \"message 0: unknown role 'gpt-4'",
                                       "[3, 0, \"TOO_LONG\", \"the row has 17 tokens, max_length is 16",
                                       "[4, 0, \"LENGTHS\"",
                                       "[6, 0, \"EMPTY\"",
                                       "[7, 0, \"FIELDS\"",
                                       "[8, 0, \"VOCAB\", \"input_ids[1] is 100"};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++)
        if (!strstr(got, want[i])) fail_msg("got %s, expected ...%s...", got, want[i]);
    const sl_feed_stats *stats = sl_feed_get_stats(feed);
    assert_int_equal(stats->rows_in, 9);
    assert_int_equal(stats->parts_ok + stats->parts_refused, 9);
    zmq_close(s);
}

static void duplicates(void **state) {
    (void)state;
    void *s = dial();
    welcome(s, "set");
    msg *m = rows(4);
    json_row(m, 0, "{\"input_ids\":[1,2]}");
    json_row(m, 0, "{\"input_ids\":[1,2]}");
    json_row(m, 0, "{\"input_ids\":[1,3]}");
    json_row(m, 1, "{\"input_ids\":");
    post(s, m);
    says(s, "\"acc\"=>[[0, 1, 2]], \"known\"=>[[0, 1]], \"rej\"=>[[0, 0, \"CONFLICT\"");
    for (int life = 0; life < 2; life++) {
        m = rows(3);
        json_row(m, 0, "{\"input_ids\":[1,2]}");
        json_row(m, 0, "{\"input_ids\":[1,3]}");
        json_row(m, 1, "{\"input_ids\":");
        post(s, m);
        says(s, "\"acc\"=>[], \"known\"=>[[0, 1]], \"rej\"=>[[0, 0, \"CONFLICT\", \"row 0 of this data set was pushed "
                "before with other content; that one is kept\", 1], [1, 0, \"JSON\"");
        zmq_close(s);
        stop();
        start_at(addr, "");
        s = dial();
        welcome(s, "set");
    }
    m = rows(2); /* a refused row that was corrected, and the same number in another data set */
    json_row(m, 1, "{\"input_ids\":[5]}");
    post(s, m); /* says 2, holds 1: not one whole object */
    says(s, "\"err\"");
    m = rows(1);
    json_row(m, 1, "{\"input_ids\":[5]}");
    post(s, m);
    says(s, "\"acc\"=>[[1, 1, 1]]");
    void *t = dial();
    welcome(t, "other");
    m = rows(1);
    json_row(m, 0, "{\"input_ids\":[9,9,9]}");
    post(t, m);
    says(t, "\"acc\"=>[[0, 1, 3]]");
    assert_int_equal(sl_intake_rows(in), 3);
    zmq_close(s);
    zmq_close(t);
}

static void nonsense(void **state) {
    (void)state;
    void *s = dial();
    msg *m = rows(1);
    json_row(m, 0, "{\"input_ids\":[1]}");
    post(s, m);
    says(s, "\"order\"");
    simple(s, "flush");
    says(s, "\"order\"");
    static const struct {
        const char *bytes;
        size_t n;
    } bad[] = {{"", 0},
               {"\xc1", 1},
               {"\x81", 1},
               {"\x93\x01\x02\x03", 4},
               {"\x81\xa1t\x05", 4},
               {"\xdf\xff\xff\xff\xff", 5},
               {"\x81\xa1t\xa4pingX", 9},
               {"\xff\xff\xff", 3}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        zmq_send(s, bad[i].bytes, bad[i].n, 0);
        says(s, "\"message\"");
    }
    char deep[300];
    memset(deep, 0x91, sizeof deep);
    zmq_send(s, deep, sizeof deep, 0);
    says(s, "\"message\"");
    simple(s, "dance");
    says(s, "unknown message type 'dance'");
    zmq_send(s, "a", 1, ZMQ_SNDMORE);
    zmq_send(s, "b", 1, 0);
    says(s, "one frame");
    m = begin(3, "hello");
    sl_wire_ku64(&m->pk, "v", 9);
    sl_wire_kstr(&m->pk, "dataset", "d");
    post(s, m);
    says(s, "\"version\"");
    hello(s, "");
    says(s, "dataset must be");
    welcome(s, "d");
    m = rows(2); /* the second row is wrong: none is taken */
    json_row(m, 0, "{\"input_ids\":[1]}");
    msgpack_pack_map(&m->pk, 1);
    sl_wire_kstr(&m->pk, "j", "no number");
    post(s, m);
    says(s, "rows[1]");
    m = rows(1);
    msgpack_pack_map(&m->pk, 2);
    sl_wire_ku64(&m->pk, "n", 3);
    sl_wire_key(&m->pk, "ids");
    msgpack_pack_bin_with_body(&m->pk, "12345", 5);
    post(s, m);
    says(s, "multiple of 4");
    const struct {
        const char *key, *val, *says;
        size_t n;
        bool bin;
    } field[] = {{"mask", "11", "mask", 2, false},
                 {"id", "x", "id", 1, true},
                 {"id", "\xff", "bytes of UTF-8", 1, false},
                 {"id", deep, "bytes of UTF-8", SL_ROW_ID_MAX + 1, false}};
    memset(deep, 'i', sizeof deep);
    for (size_t i = 0; i < sizeof field / sizeof *field; i++) {
        m = rows(1);
        msgpack_pack_map(&m->pk, 3);
        sl_wire_ku64(&m->pk, "n", 3);
        sl_wire_key(&m->pk, "ids");
        msgpack_pack_bin_with_body(&m->pk, "1\0\0\0", 4);
        sl_wire_key(&m->pk, field[i].key);
        if (field[i].bin)
            msgpack_pack_bin_with_body(&m->pk, field[i].val, field[i].n);
        else
            msgpack_pack_str_with_body(&m->pk, field[i].val, field[i].n);
        post(s, m);
        says(s, field[i].says);
    }
    m = rows(1); /* a good mask does not hide a bad id */
    msgpack_pack_map(&m->pk, 4);
    sl_wire_ku64(&m->pk, "n", 3);
    sl_wire_key(&m->pk, "ids");
    msgpack_pack_bin_with_body(&m->pk, "1\0\0\0", 4);
    sl_wire_key(&m->pk, "mask");
    msgpack_pack_bin_with_body(&m->pk, "\1", 1);
    sl_wire_kstr(&m->pk, "id", "\xc3");
    post(s, m);
    says(s, "bytes of UTF-8");
    assert_int_equal(sl_intake_rows(in), 0);
    simple(s, "ping"); /* the connection is still usable */
    says(s, "pong");
    zmq_close(s);
}

static void credit(void **state) {
    (void)state;
    void *s = dial();
    welcome(s, "set");
    msg *m = rows(51);
    for (uint32_t i = 0; i < 51; i++) ids_row(m, i, 3, 0);
    post(s, m);
    says(s, "\"credit\", \"msg\"=>\"51 rows sent, but 0 of 50");
    uint64_t acked = 0, sent = 0;
    while (acked < 500) {
        m = rows(50);
        for (uint32_t i = 0; i < 50; i++) ids_row(m, sent++, 3, 0);
        post(s, m);
        for (uint64_t goal = acked + 50; acked < goal;) {
            const char *got = expect(s, 600000);
            if (!strstr(got, "\"ack\"")) fail_msg("got %s", got);
            for (const char *p = strstr(got, "\"acc\""); (p = strstr(p, ", 1, 3]")); p++) acked++;
        }
    }
    assert_int_equal(sl_intake_rows(in), 500);
    zmq_close(s);
}

static void flush_and_done(void **state) {
    (void)state;
    void *s = dial(), *t = dial();
    welcome(s, "set");
    welcome(t, "set");
    for (uint32_t i = 0; i < 6; i++) {
        msg *m = rows(1);
        ids_row(m, i, 3, 0);
        post(i % 2 ? t : s, m);
        says(i % 2 ? t : s, "\"ack\"");
    }
    assert_int_equal(sl_feed_get_stats(feed)->open_streams, 2);
    assert_int_equal(sl_intake_open_rows(in), 6);
    simple(s, "flush");
    says(s, "flushed");
    assert_int_equal(sl_feed_get_stats(feed)->open_streams, 1);
    assert_int_equal(sl_intake_open_rows(in), 0);
    uint64_t records = sl_intake_records(in);
    simple(t, "flush"); /* nothing to close: no record */
    says(t, "flushed");
    assert_int_equal(sl_intake_records(in), records);
    char path[96];
    snprintf(path, sizeof path, "%s/commit.log", dir);
    sl_journal *j;
    assert_int_equal(sl_journal_open(&j, path, SL_COMMIT_MAGIC, NULL, NULL, &e), 0);
    for (uint64_t i = 0; i < 6; i++) {
        sl_commit_rec r = {.kind = i == 2 ? SL_CM_REJECT : SL_CM_COMMIT,
                           .seq = i,
                           .row = i,
                           .verdict = i == 2 ? SL_V_TOKENS : SL_V_OK};
        sl_journal_append(j, &r, &e);
    }
    sl_journal_sync(j, &e);
    sl_journal_close(j);
    assert_int_equal(sl_intake_follow(in, UINT64_MAX, sl_feed_done, feed, &e), 0);
    says(s, "\"done\", \"ok\"=>[0, 4], \"rej\"=>[[2, \"TOKENS\"");
    says(t, "\"done\", \"ok\"=>[1, 3, 5], \"rej\"=>[]");
    silent(s);
    msg *m = rows(2); /* asked for again: known, and done at once */
    ids_row(m, 0, 3, 0);
    ids_row(m, 2, 3, 0);
    post(t, m);
    says(t, "\"known\"=>[[0, 1], [2, 1]]");
    says(t, "\"done\", \"ok\"=>[0], \"rej\"=>[[2, \"TOKENS\"");
    sl_feed_drain(feed);
    m = rows(1);
    ids_row(m, 99, 3, 0);
    post(t, m);
    says(t, "\"draining\"");
    zmq_close(s);
    zmq_close(t);
}

static void commit(uint64_t from, uint64_t to) {
    char path[96];
    snprintf(path, sizeof path, "%s/commit.log", dir);
    sl_journal *j;
    assert_int_equal(sl_journal_open(&j, path, SL_COMMIT_MAGIC, NULL, NULL, &e), 0);
    for (uint64_t i = from; i < to; i++) {
        sl_commit_rec r = {.kind = SL_CM_COMMIT, .seq = i, .row = i};
        sl_journal_append(j, &r, &e);
    }
    sl_journal_sync(j, &e);
    sl_journal_close(j);
    assert_int_equal(sl_intake_follow(in, UINT64_MAX, sl_feed_done, feed, &e), 0);
}

/* The same file pushed by several at a time: each hears of each row, once, whoever came first and whoever hung up. */
static void all_who_wait_are_told(void **state) {
    (void)state;
    void *s[4];
    for (int i = 0; i < 4; i++) {
        s[i] = dial();
        welcome(s[i], "set");
        for (int again = 0; again < 2; again++) {
            msg *m = rows(2);
            ids_row(m, 0, 3, 0);
            ids_row(m, 1, 3, 0);
            post(s[i], m);
            says(s[i], i + again ? "\"known\"=>[[0, 1], [1, 1]]" : "\"acc\"=>[[0, 1, 3], [1, 1, 3]]");
        }
    }
    zmq_close(s[1]);
    commit(0, 1);
    for (int i = 0; i < 4; i++)
        if (i != 1) says(s[i], "\"done\", \"ok\"=>[0], \"rej\"=>[]");
    void *t = dial(); /* one more, when one of them is known to be gone */
    welcome(t, "set");
    msg *m = rows(2);
    ids_row(m, 0, 3, 0);
    ids_row(m, 1, 3, 0);
    post(t, m);
    says(t, "\"known\"=>[[0, 1], [1, 1]]");
    says(t, "\"done\", \"ok\"=>[0], \"rej\"=>[]");
    commit(1, 2);
    says(t, "\"done\", \"ok\"=>[1], \"rej\"=>[]");
    for (int i = 0; i < 4; i++) {
        if (i == 1) continue;
        says(s[i], "\"done\", \"ok\"=>[1], \"rej\"=>[]");
        silent(s[i]);
        zmq_close(s[i]);
    }
    zmq_close(t);
}

/* The disk is full: no ack, nothing lost; room again: the ack comes. (A file size limit stands in for the full disk.)
 */
static void full_disk(void **state) {
    (void)state;
    void *s = dial();
    welcome(s, "set");
    struct rlimit old, small = {600, RLIM_INFINITY};
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &old);
    small.rlim_max = old.rlim_max;
    setrlimit(RLIMIT_FSIZE, &small);
    msg *m = rows(10);
    for (uint32_t i = 0; i < 10; i++) ids_row(m, i, 16, 16);
    post(s, m);
    silent(s);
    assert_true(sl_feed_get_stats(feed)->paused);
    assert_false(sl_feed_idle(feed));
    setrlimit(RLIMIT_FSIZE, &old);
    says(s, "\"ack\"");
    assert_false(sl_feed_get_stats(feed)->paused);
    assert_int_equal(sl_intake_rows(in), 10);
    stop();
    start_at(addr, "");
    assert_int_equal(sl_intake_rows(in), 10);
    zmq_close(s);
}

static void socket_of_a_group(void **state) {
    (void)state;
    struct stat st;
    char path[160];
    assert_int_equal(stat(addr + 6, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    stop();
    sl_intake_cfg ic = {.store = dir, .batch_tokens = 64, .max_batch_rows = 8, .max_length = 16};
    assert_int_equal(sl_intake_open(&in, &ic, &e), 0);
    snprintf(path, sizeof path, "ipc://%s/group.sock", dir);
    sl_feed_cfg fc = {.addr = path,
                      .curve_dir = "",
                      .store = dir,
                      .credit = 5,
                      .threads = 1,
                      .intake = in,
                      .socket_gid1 = (uint32_t)getgid() + 1};
    if (sl_feed_open(&feed, &fc, &e)) fail_msg("%s", e.msg);
    assert_int_equal(stat(path + 6, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0660);
    assert_int_equal(st.st_gid, getgid());
    stop();
    start_at(addr, "");
}

static void tcp_needs_keys(void **state) {
    (void)state;
    stop();
    sl_intake_cfg ic = {.store = dir, .batch_tokens = 64, .max_batch_rows = 8, .max_length = 16};
    assert_int_equal(sl_intake_open(&in, &ic, &e), 0);
    sl_feed_cfg fc = {
        .addr = "tcp://127.0.0.1:*", .curve_dir = "", .store = dir, .credit = 5, .threads = 1, .intake = in};
    assert_int_equal(sl_feed_open(&feed, &fc, &e), SL_ECONFIG);
    assert_non_null(strstr(e.msg, "CURVE"));
    fc.curve_dir = dir;
    assert_int_equal(sl_feed_open(&feed, &fc, &e), SL_ECONFIG);
    assert_non_null(strstr(e.msg, "server.secret"));
    sl_intake_close(in);
    char pub[41], sec[41], cpub[41], csec[41], bpub[41], bsec[41], path[128];
    if (zmq_curve_keypair(pub, sec)) { /* a libzmq without CURVE */
        start_at(addr, "");
        skip();
    }
    do zmq_curve_keypair(cpub, csec); /* '#' is a letter of Z85 and no comment inside a key */
    while (!strchr(cpub, '#'));
    zmq_curve_keypair(bpub, bsec);
    snprintf(path, sizeof path, "%s/server.secret", dir);
    FILE *f = fopen(path, "we");
    fputs(sec, f);
    fclose(f);
    snprintf(path, sizeof path, "%s/clients.pub", dir);
    f = fopen(path, "we");
    fprintf(f, "# admitted\n%s  # me\n", cpub);
    fclose(f);
    assert_int_equal(sl_intake_open(&in, &ic, &e), 0);
    assert_int_equal(sl_feed_open(&feed, &fc, &e), SL_ECONFIG); /* the secret is readable by others */
    assert_non_null(strstr(e.msg, "600"));
    sl_intake_close(in);
    snprintf(path, sizeof path, "%s/server.secret", dir);
    chmod(path, 0600);
    char tcp[64];
    snprintf(tcp, sizeof tcp, "tcp://127.0.0.1:%d", 20000 + (int)(getpid() % 20000));
    start_at(tcp, dir);
    for (int good = 0; good < 2; good++) {
        void *s = zmq_socket(ctx, ZMQ_DEALER);
        int zero = 0;
        zmq_setsockopt(s, ZMQ_LINGER, &zero, sizeof zero);
        zmq_setsockopt(s, ZMQ_CURVE_SERVERKEY, pub, 41);
        zmq_setsockopt(s, ZMQ_CURVE_PUBLICKEY, good ? cpub : bpub, 41);
        zmq_setsockopt(s, ZMQ_CURVE_SECRETKEY, good ? csec : bsec, 41);
        assert_int_equal(zmq_connect(s, tcp), 0);
        hello(s, "set");
        if (good)
            says(s, "welcome");
        else
            assert_string_equal(expect(s, 300), "");
        zmq_close(s);
    }
}

/* Clients that hung up without a word, many in the life of a service: the next is taken all the same, and who waits for
 * an answer is not forgotten for it. */
static void clients_come_and_go(void **state) {
    (void)state;
    void *waits = dial(), *idle = dial();
    welcome(idle, "b");
    welcome(waits, "a");
    msg *m = rows(1);
    ids_row(m, 0, 4, 0);
    post(waits, m);
    says(waits, "\"acc\"=>[[0, 1, 4]]");
    for (unsigned i = 0; i < 66000; i++) {
        char id[16];
        int n = snprintf(id, sizeof id, "c%u", i);
        if (!sl_feed_client(feed, id, (size_t)n)) fail_msg("client %u is not taken", i);
    }
    simple(waits, "ping");
    says(waits, "\"pong\"");
    simple(idle, "ping");
    says(idle, "\"order\"");
    welcome(idle, "b");
    m = rows(1);
    ids_row(m, 0, 4, 0);
    post(idle, m);
    says(idle, "\"acc\"=>[[0, 1, 4]]");
    zmq_close(waits);
    zmq_close(idle);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(reasons, setup, teardown),
                                       cmocka_unit_test_setup_teardown(duplicates, setup, teardown),
                                       cmocka_unit_test_setup_teardown(nonsense, setup, teardown),
                                       cmocka_unit_test_setup_teardown(credit, setup, teardown),
                                       cmocka_unit_test_setup_teardown(flush_and_done, setup, teardown),
                                       cmocka_unit_test_setup_teardown(all_who_wait_are_told, setup, teardown),
                                       cmocka_unit_test_setup_teardown(full_disk, setup, teardown),
                                       cmocka_unit_test_setup_teardown(clients_come_and_go, setup, teardown),
                                       cmocka_unit_test_setup_teardown(socket_of_a_group, setup, teardown),
                                       cmocka_unit_test_setup_teardown(tcp_needs_keys, setup, teardown)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
