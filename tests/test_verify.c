/* verify must find every damage: every single bit of a small store, missing and extra files, cut logs, rows of another.
 *
 *   test_verify            the tests
 *   test_verify --make DIR LAYOUT CODEC ROWS    leave a store with known content (for the tests in Python and of the
 * tools) */
#include "stages/writer/codec.h"
#include "stages/writer/salvage.h"
#include "stages/writer/verify.h"
#include "tests/store_rig.h"
#include <fcntl.h>
#include <ftw.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

static char base[160], store[200];

static uint64_t faults(char *first, size_t cap) {
    sl_verify_report rep;
    sl_err err;
    int rc = sl_store_verify(store, &(sl_verify_opts){.deep = true}, &rep, &err);
    uint64_t n = rc ? 1 : rep.n_faults;
    if (first) snprintf(first, cap, "%.2000s", rc ? err.msg : n ? rep.faults[0] : "");
    sl_verify_free(&rep);
    return n;
}

static void build(uint32_t layout, uint32_t codec) {
    rig r;
    rig_rmtree(store);
    rig_make(&r, store, 5, 3, 8, 2, 5);
    r.m.layout = layout;
    r.m.codec = codec;
    r.rows[3].verdict = SL_V_ORDER;
    rig_sink(&r, &(sl_sink_cfg){.threads = 1}, 2, 2);
    rig_free(&r);
    char text[2048];
    if (faults(text, sizeof text)) fail_msg("a fresh store: %s", text);
}

static char files[64][300];
static int n_files;
static int add_file(const char *p, const struct stat *st, int flag, struct FTW *f) {
    (void)st, (void)f;
    if (flag == FTW_F && n_files < 64) snprintf(files[n_files++], sizeof files[0], "%s", p);
    return 0;
}

static void list_files(void) {
    n_files = 0;
    nftw(store, add_file, 16, FTW_PHYS);
    assert_true(n_files > 3);
}

/* Whether a flip in this file must be found: all that is data. The quarantine's contents are for people, and the
 * manifest's text is checked by meaning. */
static int must_find(const char *p) {
    return !strstr(p, "/quarantine/") && !strstr(p, "manifest.json") && !strstr(p, "intake.dat");
}

static void flip_all(uint32_t layout, uint32_t codec) {
    char text[2048];
    build(layout, codec);
    list_files();
    for (int i = 0; i < n_files; i++) {
        struct stat st;
        if (!must_find(files[i])) continue;
        int fd = open(files[i], O_RDWR);
        assert_true(fd >= 0 && !fstat(fd, &st));
        uint64_t seed = 12345;
        /* every byte with one bit each, the bit chosen anew; the logs and small files with all eight */
        for (off_t at = 0; at < st.st_size; at += strstr(files[i], "/shards/") ? 3 : 1) {
            uint8_t b, c;
            seed = seed * 6364136223846793005ull + 1442695040888963407ull;
            assert_int_equal(pread(fd, &b, 1, at), 1);
            c = b ^ (uint8_t)(1u << (seed >> 60 & 7));
            assert_int_equal(pwrite(fd, &c, 1, at), 1);
            if (!faults(text, sizeof text)) {
                /* the tail of a log that ends in a damaged record reads as torn: then rows are pending and the store's
                 * counts differ */
                fail_msg("%s: a flipped bit in byte %lld was not found", files[i], (long long)at);
            }
            if (strstr(files[i], "/hidden_states/") ||
                (strstr(files[i], "/shards/") && at > 4096 && strstr(text, "checksum")))
                assert_non_null(strstr(text, "row "));
            assert_int_equal(pwrite(fd, &b, 1, at), 1);
        }
        close(fd);
    }
    assert_int_equal(faults(NULL, 0), 0);
}

/* ids, mask and id string of row 0, the first in intake.dat behind the two names. */
static void flips_in_intake(void **state) {
    (void)state;
    for (int layout = 0; layout < 2; layout++) {
        rig r;
        char path[300];
        build((uint32_t)layout, SL_CODEC_NONE);
        rig_make(&r, store, 5, 3, 8, 2, 5);
        snprintf(path, sizeof path, "%s/intake.dat", store);
        int fd = open(path, O_RDWR);
        for (off_t at = 24; at < 24 + 5 * (off_t)r.rows[0].T + (off_t)strlen(r.rows[0].id); at++) {
            uint8_t b, c;
            assert_int_equal(pread(fd, &b, 1, at), 1);
            c = b ^ 4;
            assert_int_equal(pwrite(fd, &c, 1, at), 1);
            if (!faults(NULL, 0)) fail_msg("intake.dat: a flipped bit in byte %lld was not found", (long long)at);
            assert_int_equal(pwrite(fd, &b, 1, at), 1);
        }
        assert_int_equal(faults(NULL, 0), 0);
        close(fd);
        rig_free(&r);
    }
}

static void flips_in_files(void **state) {
    (void)state;
    flip_all(SL_LAYOUT_FILES, SL_CODEC_NONE);
}
static void flips_in_shards(void **state) {
    (void)state;
    flip_all(SL_LAYOUT_SHARDS, SL_CODEC_NONE);
    flip_all(SL_LAYOUT_SHARDS, SL_CODEC_ZSTD);
}

static void must_say(const char *word) {
    char text[2048];
    if (!faults(text, sizeof text)) fail_msg("nothing found, expected '%s'", word);
    if (!strstr(text, word)) fail_msg("expected '%s' in: %s", word, text);
}

static void sh(const char *fmt, const char *a, const char *b) {
    char cmd[1200];
    int n = snprintf(cmd, sizeof cmd, "cd %s && ", store);
    snprintf(cmd + n, sizeof cmd - (size_t)n, fmt, a, b);
    assert_int_equal(system(cmd), 0);
}

static void missing_and_extra(void **state) {
    (void)state;
    build(SL_LAYOUT_FILES, SL_CODEC_NONE);
    sh("mv %s/hs_2.safetensors keep", "hidden_states", "");
    must_say("hs_2.safetensors is missing");
    sh("cp keep %s/hs_77.safetensors && mv keep hidden_states/hs_2.safetensors", "hidden_states", "");
    must_say("hs_77.safetensors: no committed");
    sh("rm hidden_states/hs_77.safetensors && cp %s %s", "hidden_states/hs_0.safetensors",
       "hidden_states/hs_2.safetensors");
    must_say("row 2");
    build(SL_LAYOUT_FILES, SL_CODEC_NONE);
    sh("rm quarantine/*/*.json%s%s", "", "");
    must_say(".json is missing");
    build(SL_LAYOUT_SHARDS, SL_CODEC_NONE);
    sh("rm shards/%s%s", "*", "");
    must_say("shard 0 is missing");
    build(SL_LAYOUT_SHARDS, SL_CODEC_NONE);
    sh("cp shards/%s shards/%s", "shard-000000.sls", "shard-000007.sls");
    assert_true(faults(NULL, 0) > 0);
}

static void cut_logs(void **state) {
    (void)state;
    for (int layout = 0; layout < 2; layout++) {
        build((uint32_t)layout, SL_CODEC_NONE);
        sh("cp commit.log keep && truncate -s -%s commit.log%s", "128", "");
        assert_true(faults(NULL, 0) > 0);
        sh("mv keep commit.log && truncate -s -%s intake.log%s", "128", "");
        must_say("intake.log");
    }
    build(SL_LAYOUT_SHARDS, SL_CODEC_NONE);
    sh("truncate -s -%s shards/shard-000000.sls%s", "1", "");
    must_say("shard-000000.sls");
}

/* ---- salvage ---- */

static rig sr;

static void build_for_salvage(void) {
    rig_rmtree(store);
    rig_make(&sr, store, 14, 6, 16, 2, 5);
    sr.m.codec = SL_CODEC_BF16;
    sr.rows[4].verdict = SL_V_NONFINITE;
    rig_sink(&sr, &(sl_sink_cfg){.threads = 1, .shard_bytes = 16000}, 2, 3);
}

static sl_salvage_report salvage(void) {
    sl_salvage_report rep;
    sl_err err;
    char text[2048];
    if (sl_store_salvage(store, &rep, &err)) fail_msg("salvage: %s", err.msg);
    if (faults(text, sizeof text)) fail_msg("after salvage: %s", text);
    return rep;
}

/* The next run computes what is pending; then everything is there. */
static void finish(uint64_t rows) {
    char text[2048];
    rig_sink(&sr, &(sl_sink_cfg){.threads = 1, .shard_bytes = 16000}, 2, 3);
    if (faults(text, sizeof text)) fail_msg("after the next run: %s", text);
    assert_int_equal(rig_check(&sr), rows);
    rig_free(&sr);
}

static void salvage_logs(void **state) {
    (void)state;
    build_for_salvage();
    assert_int_equal(salvage().rows, 13); /* of a healthy store: nothing changes */
    finish(13);
    build_for_salvage();
    sh("rm commit.log%s%s", "", "");
    sl_salvage_report r = salvage();
    assert_int_equal(r.rows, 13);
    assert_int_equal(r.recommitted, 13);
    finish(13);
    build_for_salvage();
    sh("truncate -s 900 commit.log && printf x | dd of=commit.log bs=1 seek=300 conv=notrunc 2>/dev/null%s%s", "", "");
    assert_int_equal(salvage().rows, 13);
    finish(13);
    build_for_salvage();
    sh("rm intake.log intake.dat manifest.json%s%s", "", "");
    r = salvage();
    assert_int_equal(r.restored, 13);
    assert_int_equal(r.lost, 1); /* the rejected row is in no shard */
    assert_true(r.manifest_rebuilt);
    assert_int_equal(rig_check(&sr), 13);
    rig_free(&sr);
    build_for_salvage();
    sh("printf xx | dd of=intake.log bs=1 seek=%s conv=notrunc 2>/dev/null%s", "900", "");
    r = salvage();
    assert_int_equal(r.restored + r.lost, 1);
    rig_free(&sr);
}

static void salvage_shards(void **state) {
    (void)state;
    build_for_salvage();
    sh("printf zz | dd of=shards/shard-000000.sls bs=1 seek=%s conv=notrunc 2>/dev/null%s", "5000", "");
    sl_salvage_report r = salvage();
    assert_int_equal(r.rows, 12);
    assert_int_equal(r.pending_again, 1);
    assert_true(r.bytes_dropped > 0);
    finish(13);
    for (int cut = 1; cut < 4200; cut += 97) { /* the last shard torn anywhere in its last 4 KiB, with its log */
        char n[16];
        build_for_salvage();
        snprintf(n, sizeof n, "%d", cut);
        sh("f=$(ls shards/* | tail -1) && truncate -s -%s $f && truncate -s -%s commit.log", n, "70");
        salvage();
        finish(13);
    }
}

static int make(char **argv) {
    rig r;
    uint32_t codec;
    if (sl_codec_parse(argv[4], &codec)) return 2;
    rig_make(&r, argv[2], strtoull(argv[5], NULL, 10), 40, 64, 2, 5);
    r.m.layout = !strcmp(argv[3], "files") ? SL_LAYOUT_FILES : SL_LAYOUT_SHARDS;
    r.m.codec = codec;
    rig_sink(&r, &(sl_sink_cfg){.threads = 1, .shard_bytes = 200000}, 16, 4);
    rig_free(&r);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 6 && !strcmp(argv[1], "--make")) return make(argv);
    snprintf(base, sizeof base, "%s/sluice-verify-XXXXXX", access("/dev/shm", W_OK) ? "." : "/dev/shm");
    if (!mkdtemp(base)) return 1;
    snprintf(store, sizeof store, "%s/s", base);
    const struct CMUnitTest t[] = {cmocka_unit_test(missing_and_extra), cmocka_unit_test(flips_in_intake),
                                   cmocka_unit_test(cut_logs),          cmocka_unit_test(salvage_logs),
                                   cmocka_unit_test(salvage_shards),    cmocka_unit_test(flips_in_files),
                                   cmocka_unit_test(flips_in_shards)};
    int rc = cmocka_run_group_tests(t, NULL, NULL);
    rig_rmtree(base);
    return rc;
}
