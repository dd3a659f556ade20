/* The store without rings: every layout and codec written by the sink and read back, groups and shards of every size,
 * reading while writing, torn tails, refusals. */
#include "stages/writer/reader.h"
#include "stages/writer/verify.h"
#include "tests/store_rig.h"
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <cmocka.h>

static char base[160];

/* In place of the C library's: writes that come up short, as the last ones before a disk is full do, and
 * syncs of commit.log that fail. */
static bool short_writes;
static unsigned failing_syncs;

ssize_t write(int fd, const void *buf, size_t n) {
    return syscall(SYS_write, fd, buf, short_writes && n > 4096 ? n / 2 : n);
}

int fdatasync(int fd) {
    char link[64], path[400] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (!failing_syncs || readlink(link, path, sizeof path - 1) < 0 || !strstr(path, "/commit.log"))
        return (int)syscall(SYS_fdatasync, fd);
    failing_syncs--;
    errno = EIO;
    return -1;
}

static void healthy(const char *store, uint64_t rows, uint64_t rejected) {
    sl_verify_report rep;
    sl_err err;
    assert_int_equal(sl_store_verify(store, &(sl_verify_opts){.deep = true}, &rep, &err), 0);
    for (int i = 0; i < SL_VERIFY_KEEP; i++)
        if (rep.faults[i]) print_message("FAULT %s\n", rep.faults[i]);
    assert_int_equal(rep.n_faults, 0);
    assert_int_equal(rep.rows, rows);
    assert_int_equal(rep.rejected, rejected);
    sl_verify_free(&rep);
}

static void one(uint32_t layout, uint32_t codec, uint32_t width, uint32_t elem, uint32_t max_T, uint64_t n,
                unsigned threads, uint64_t shard_bytes, bool plain, bool direct) {
    rig r;
    char store[200];
    snprintf(store, sizeof store, "%s/s", base);
    rig_rmtree(store);
    rig_make(&r, store, n, max_T, width, elem, 7);
    r.m.layout = layout;
    r.m.codec = codec;
    for (uint64_t i = 0; i < n; i += 9) r.rows[i].verdict = SL_V_NONFINITE;
    sl_sink_cfg c = {.threads = threads, .shard_bytes = shard_bytes, .plain = plain, .direct = direct};
    rig_sink(&r, &c, 5, 7);
    uint64_t rej = (n + 8) / 9;
    assert_int_equal(rig_check(&r), n - rej);
    healthy(store, n - rej, rej);
    rig_sink(&r, &c, 5, 7); /* again: nothing to do, nothing changed */
    healthy(store, n - rej, rej);
    rig_free(&r);
}

static void every_layout(void **state) {
    (void)state;
    one(SL_LAYOUT_FILES, SL_CODEC_NONE, 24, 2, 20, 40, 1, 0, false, true);
    one(SL_LAYOUT_FILES, SL_CODEC_NONE, 24, 4, 20, 40, 1, 0, false, true);
    for (uint32_t codec = 0; codec < 3; codec++) {
        one(SL_LAYOUT_SHARDS, codec, 64, 2, 30, 60, 1, 0, false, true);
        one(SL_LAYOUT_SHARDS, codec, 64, 4, 30, 60, 3, 100000, false, true);
        one(SL_LAYOUT_SHARDS, codec, 33, 2, 30, 60, 2, 40000, true, false);
    }
}

static void rows_of_many_blocks(void **state) {
    (void)state;
    for (uint32_t codec = 0; codec < 3; codec++) one(SL_LAYOUT_SHARDS, codec, 16384, 2, 300, 6, 2, 0, false, true);
    one(SL_LAYOUT_FILES, SL_CODEC_NONE, 16384, 2, 300, 6, 2, 0, false, true);
}

/* Large blocks go to the disk from where they lie when that suits the file, whatever is left in the last chunk: here
 * one token, of less than a page, behind every number of tokens before it. */
static void a_small_last_piece(void **state) {
    (void)state;
    static const uint32_t widths[] = {256, 576, 768, 896};
    for (unsigned w = 0; w < sizeof widths / sizeof *widths; w++)
        for (uint32_t more = 0; more < 3; more++) {
            rig r;
            char store[200];
            uint32_t tokens = SL_DIRECT_BYTES / (2 * widths[w]) + 1 + more;
            snprintf(store, sizeof store, "%s/s", base);
            rig_rmtree(store);
            rig_make(&r, store, 3, 8, widths[w], 2, 5);
            r.rows[1].T = tokens + 1;
            r.rows[1].mask_sum = r.rows[1].T - r.rows[1].T / 2;
            rig_sink(&r, &(sl_sink_cfg){.threads = 1, .huge = true}, tokens, 3);
            assert_int_equal(rig_check(&r), 3);
            healthy(store, 3, 0);
            rig_free(&r);
        }
}

/* States that are not those of the row's sum: nothing of the row is committed, and the store goes on from there. */
static uint64_t told[4];
static unsigned n_told;
static void on_changed(void *arg, uint64_t seq) {
    (void)arg;
    if (n_told < 4) told[n_told++] = seq;
}

static void changed_states(void **state) {
    (void)state;
    static const struct {
        uint32_t layout, codec, width, max_T, piece;
        bool huge;
    } kinds[] = {{SL_LAYOUT_FILES, SL_CODEC_NONE, 48, 20, 5, false},
                 {SL_LAYOUT_FILES, SL_CODEC_NONE, 33, 20, 5, false},
                 {SL_LAYOUT_SHARDS, SL_CODEC_NONE, 48, 20, 5, false},
                 {SL_LAYOUT_SHARDS, SL_CODEC_NONE, 33, 20, 5, false},
                 {SL_LAYOUT_SHARDS, SL_CODEC_ZSTD, 33, 20, 5, false},
                 {SL_LAYOUT_SHARDS, SL_CODEC_BF16, 48, 20, 5, false},
                 {SL_LAYOUT_SHARDS, SL_CODEC_BF16, 16384, 300, 70, false},
                 {SL_LAYOUT_SHARDS, SL_CODEC_NONE, 16384, 300, 256, true}};
    for (unsigned i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        rig r;
        char store[200];
        sl_err err;
        uint64_t n = kinds[i].max_T > 100 ? 6 : 20, bad = n - 3;
        snprintf(store, sizeof store, "%s/s", base);
        rig_rmtree(store);
        rig_make(&r, store, n, kinds[i].max_T, kinds[i].width, 2, 7);
        r.m.layout = kinds[i].layout;
        r.m.codec = kinds[i].codec;
        r.rows[0].verdict = SL_V_NONFINITE;
        sl_sink_cfg c = {.threads = 1 + i % 3, .huge = kinds[i].huge, .on_changed = on_changed};
        n_told = 0;
        assert_int_equal(rig_sink_try(&r, &c, kinds[i].piece, 4, bad, &err), SL_EINTERNAL);
        if (!strstr(err.msg, "not the ones that were validated")) fail_msg("%s", err.msg);
        assert_int_equal(n_told, 1);
        assert_int_equal(told[0], bad);
        assert_true(rig_check(&r) < bad);
        rig_sink(&r, &c, kinds[i].piece, 4);
        assert_int_equal(rig_check(&r), n - 1);
        healthy(store, n - 1, 1);
        rig_free(&r);
    }
}

/* A shard is sealed when it has as many rows as its index may hold, also after a restart in the middle. */
static void rows_a_shard(void **state) {
    (void)state;
    rig r;
    char store[200], path[300];
    snprintf(store, sizeof store, "%s/s", base);
    rig_rmtree(store);
    rig_make(&r, store, 23, 4, 16, 2, 1);
    sl_sink_cfg c = {.threads = 1, .shard_rows = 5};
    r.n = 12;
    rig_sink(&r, &c, 5, 2);
    r.n = 23;
    snprintf(path, sizeof path, "%s/intake.log", store);
    unlink(path); /* the rig writes it for all rows */
    rig_sink(&r, &c, 5, 50);
    sl_reader *rd;
    sl_err err;
    uint64_t in[16] = {0}, most = 0;
    assert_int_equal(sl_reader_open(&rd, store, &err), 0);
    for (uint64_t i = 0; i < sl_reader_rows(rd); i++) {
        uint64_t n = ++in[sl_reader_row(rd, i)->shard];
        most = n > most ? n : most;
    }
    assert_int_equal(sl_reader_rows(rd), 23);
    assert_int_equal(most, 5);
    sl_reader_close(rd);
    assert_int_equal(rig_check(&r), 23);
    healthy(store, 23, 0);
    rig_free(&r);
}

static void another_store_is_refused(void **state) {
    (void)state;
    rig r;
    char store[200];
    sl_err err;
    sl_sink *s;
    snprintf(store, sizeof store, "%s/s", base);
    rig_rmtree(store);
    rig_make(&r, store, 4, 4, 16, 2, 1);
    sl_sink_cfg c = {.threads = 1};
    rig_sink(&r, &c, 5, 2);
    c.manifest.set.width = 32;
    assert_int_equal(sl_sink_open(&s, &c, &err), SL_ECONFIG);
    assert_non_null(strstr(err.msg, "width 16"));
    assert_non_null(strstr(err.msg, "32"));
    c.manifest = r.m;
    strcpy(c.manifest.set.model, "beef");
    assert_int_equal(sl_sink_open(&s, &c, &err), SL_ECONFIG);
    assert_non_null(strstr(err.msg, "f00d"));
    c.manifest = r.m;
    strcpy(c.manifest.tokenizer_hash, "cc");
    assert_int_equal(sl_sink_open(&s, &c, &err), SL_ECONFIG);
    assert_non_null(strstr(err.msg, "begun with tokenizer aa and this run has cc"));
    strcpy(c.manifest.tokenizer_hash, "none"); /* ids alone need none, and the others' stays named */
    assert_int_equal(sl_sink_open(&s, &c, &err), 0);
    sl_sink_close(s);
    sl_manifest m;
    assert_int_equal(sl_manifest_read(&m, store, &err), 0);
    assert_string_equal(m.tokenizer_hash, "aa");
    c.manifest = r.m;
    c.manifest.layout = SL_LAYOUT_FILES;
    assert_int_equal(sl_sink_open(&s, &c, &err), SL_ECONFIG);
    assert_non_null(strstr(err.msg, "layout shards"));
    rig_free(&r);
}

/* The quarantine's files are written to their ends. */
static void writes_that_come_up_short(void **state) {
    (void)state;
    rig r;
    char store[200];
    snprintf(store, sizeof store, "%s/s", base);
    rig_rmtree(store);
    rig_make(&r, store, 3, 8, 64, 2, 5);
    r.rows[1].T = 3000;
    r.rows[1].mask_sum = 1500;
    r.rows[1].verdict = SL_V_NONFINITE;
    short_writes = true;
    rig_sink(&r, &(sl_sink_cfg){.threads = 1}, 1000, 3);
    short_writes = false;
    assert_int_equal(rig_check(&r), 2);
    healthy(store, 2, 1);
    rig_free(&r);
}

/* A commit that does not come through is repeated, and the log says what it waits for. */
static char notes[2000];
static void on_note(void *arg, int warn, const char *text) {
    (void)arg;
    if (warn) snprintf(notes + strlen(notes), sizeof notes - strlen(notes), "%s\n", text);
}

static void fail_the_next(void *arg, void **tokens, unsigned n) {
    static bool done;
    (void)arg, (void)tokens, (void)n;
    if (!done) failing_syncs = 2;
    done = true;
}

static void a_sync_that_fails(void **state) {
    (void)state;
    rig r;
    char store[200];
    snprintf(store, sizeof store, "%s/s", base);
    rig_rmtree(store);
    rig_make(&r, store, 4, 8, 64, 2, 5);
    notes[0] = 0;
    rig_sink(&r, &(sl_sink_cfg){.threads = 1, .on_note = on_note, .on_commit = fail_the_next}, 5, 2);
    assert_int_equal(failing_syncs, 0);
    assert_int_equal(rig_check(&r), 4);
    if (!strstr(notes, "commit.log: fdatasync") || !strstr(notes, strerror(EIO))) fail_msg("notes: %s", notes);
    rig_free(&r);
}

/* A shard is read while it is being written: after each commit the committed rows are there. */
static unsigned committed;
static void on_commit(void *arg, void **tokens, unsigned n) {
    (void)tokens, (void)n;
    committed = (unsigned)rig_check(arg);
}

static void read_while_written(void **state) {
    (void)state;
    rig r;
    char store[200];
    snprintf(store, sizeof store, "%s/s", base);
    rig_rmtree(store);
    rig_make(&r, store, 30, 10, 64, 2, 3);
    r.m.codec = SL_CODEC_BF16;
    committed = 0;
    rig_sink(&r, &(sl_sink_cfg){.threads = 2, .arg = &r, .on_commit = on_commit, .direct = true}, 4, 5);
    assert_int_equal(committed, 30);
    rig_free(&r);
}

/* Cut the open shard and the log at every place near their ends: the writer opens again, or says what is missing. */
static void torn_tails(void **state) {
    (void)state;
    rig r;
    char store[200], keep[200], cmd[1000], path[300];
    snprintf(store, sizeof store, "%s/s", base);
    snprintf(keep, sizeof keep, "%s/keep", base);
    rig_rmtree(store);
    rig_rmtree(keep);
    rig_make(&r, store, 12, 6, 16, 2, 3);
    rig_sink(&r, &(sl_sink_cfg){.threads = 1}, 4, 3);
    snprintf(cmd, sizeof cmd, "mv %s/shards/shard-000000.sls %s/shards/shard-000000.sls.open && cp -r %s %s", store,
             store, store, keep);
    assert_int_equal(system(cmd), 0);
    struct stat st;
    snprintf(path, sizeof path, "%s/commit.log", store);
    stat(path, &st);
    for (off_t cut = st.st_size - 1; cut >= st.st_size - 3 * SL_JREC - 1; cut -= 31) {
        rig_rmtree(store);
        snprintf(cmd, sizeof cmd, "cp -r %s %s", keep, store);
        assert_int_equal(system(cmd), 0);
        assert_int_equal(truncate(path, cut), 0);
        rig_sink(&r, &(sl_sink_cfg){.threads = 1}, 4, 3); /* computes the lost rows again */
        assert_int_equal(rig_check(&r), 12);
        healthy(store, 12, 0);
    }
    rig_free(&r);
}

int main(int argc, char **argv) {
    snprintf(base, sizeof base, "%s/sluice-shard-XXXXXX", argc > 1 ? argv[1] : ".");
    if (!mkdtemp(base)) return 1;
    const struct CMUnitTest t[] = {cmocka_unit_test(every_layout),       cmocka_unit_test(rows_of_many_blocks),
                                   cmocka_unit_test(a_small_last_piece), cmocka_unit_test(changed_states),
                                   cmocka_unit_test(rows_a_shard),       cmocka_unit_test(another_store_is_refused),
                                   cmocka_unit_test(read_while_written), cmocka_unit_test(writes_that_come_up_short),
                                   cmocka_unit_test(a_sync_that_fails),  cmocka_unit_test(torn_tails)};
    int rc = cmocka_run_group_tests(t, NULL, NULL);
    rig_rmtree(base);
    return rc;
}
