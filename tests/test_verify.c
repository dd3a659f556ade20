/* verify must find every damage: every single bit of a small store, missing and extra files, cut logs, rows of another.
 *
 *   test_verify            the tests
 *   test_verify bits [N]   every Nth bit of every file of a store of each codec and layout (1: all of them), found; in
 * shards named by row and state
 *   test_verify torn [N]   the last shard and the logs cut at every Nth byte of their last 4 KiB
 *   test_verify --make DIR LAYOUT CODEC ROWS [WIDTH MAX_T]    leave a store with known content (for the tests in Python
 * and of the tools) */
#include "stages/writer/codec.h"
#include "stages/writer/reader.h"
#include "stages/writer/salvage.h"
#include "stages/writer/verify.h"
#include "stages/writer/xxh3.h"
#include "ipc/crc32c.h"
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
static sl_verify_opts deep = {.deep = true};

static uint64_t faults(char *first, size_t cap) {
    sl_verify_report rep;
    sl_err err;
    int rc = sl_store_verify(store, &deep, &rep, &err);
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

static void flip_all(uint32_t layout, uint32_t codec) {
    char text[2048];
    build(layout, codec);
    list_files();
    for (int i = 0; i < n_files; i++) {
        struct stat st;
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
    sh("echo >>$(ls quarantine/sluice-salvage-lost*/*.json)%s%s", "", ""); /* a lost row stays lost */
    must_say("rejected: its files in quarantine");
    r = salvage();
    assert_int_equal(r.pending_again, 0);
    assert_int_equal(r.rejects, 1);
    rig_free(&sr);
    build_for_salvage();
    sh("printf xx | dd of=intake.log bs=1 seek=%s conv=notrunc 2>/dev/null%s", "900", "");
    r = salvage();
    assert_int_equal(r.restored + r.lost, 1);
    rig_free(&sr);
    build_for_salvage(); /* a rejected row whose files are not what they were is computed and rejected again */
    sh("printf x | dd of=$(ls quarantine/*.json quarantine/*/*.json 2>/dev/null) bs=1 seek=%s conv=notrunc "
       "2>/dev/null%s",
       "9", "");
    must_say("rejected: its files in quarantine");
    r = salvage();
    assert_int_equal(r.pending_again, 1);
    assert_int_equal(r.rejects, 0);
    finish(13);
    build_for_salvage();
    sh("sed -i s/open/OPEN/ manifest.json && sed -i s/complete/COMPLETE/ manifest.json%s%s", "", "");
    must_say("manifest.json");
    assert_int_equal(salvage().manifest_rebuilt, 1);
    finish(13);
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

/* ---- every bit ---- */

typedef struct zone { /* [from, to) of the shard, and what a report on it must say */
    uint64_t from, to;
    char row[32], state[16];
} zone;

static unsigned frames_in[3]; /* of the last zones_of, by codec */
static unsigned zones_of(const char *path, zone *z, unsigned cap) {
    sl_err err;
    struct stat st;
    sl_src src = {.fd = open(path, O_RDONLY), .name = path};
    sl_shard_head *h = malloc(sizeof *h);
    sl_index_entry *ix = NULL;
    uint64_t n_ix = 0;
    unsigned n = 0;
    memset(frames_in, 0, sizeof frames_in);
    assert_true(src.fd >= 0 && !fstat(src.fd, &st));
    src.len = (uint64_t)st.st_size;
    assert_int_equal(sl_shard_open(&src, h, &err) || sl_shard_index(&src, h, &ix, &n_ix, &err), 0);
    for (uint64_t i = 0; i < n_ix; i++) {
        sl_row_frames f;
        sl_frame_head fh;
        assert_int_equal(sl_row_open(&f, &src, h, ix[i].off, ix[i].len, ix[i].T, &err), 0);
        for (uint32_t j = 0; j < f.n_frames; j++) {
            assert_int_equal(sl_frame_open(&src, h, f.off + f.rel[j], &fh, &err), 0);
            assert_true(n + 2 < cap);
            z[n] = (zone){.from = fh.off, .to = fh.off + sl_frame_span(fh.enc_len)};
            frames_in[fh.codec]++;
            snprintf(z[n].state, sizeof z[n].state, "H[%u]", fh.hidx);
            snprintf(z[n++].row, sizeof z[n].row, "row %llu ", (unsigned long long)ix[i].row);
        }
        z[n] = (zone){.from = ix[i].off, .to = ix[i].off + ix[i].len}; /* META and END: behind the states in the list */
        snprintf(z[n++].row, sizeof z[n].row, "row %llu ", (unsigned long long)ix[i].row);
        sl_row_close(&f);
    }
    free(ix);
    free(h);
    close(src.fd);
    return n;
}

static bool report_names(const zone *z, char *why, size_t cap) {
    sl_verify_report rep;
    sl_err err;
    int rc = sl_store_verify(store, &deep, &rep, &err);
    bool hit = rc || (rep.n_faults && !z);
    snprintf(why, cap, "%.1500s", rc ? err.msg : rep.n_faults ? rep.faults[0] : "nothing found");
    for (uint64_t i = 0; !hit && i < rep.n_faults && i < SL_VERIFY_KEEP; i++)
        hit = strstr(rep.faults[i], z->row) && strstr(rep.faults[i], z->state);
    sl_verify_free(&rep);
    return hit;
}

static unsigned every = 1;

/* Bits of one file, each found, and named by row and state where the file is a shard with the zones z. */
static unsigned flip_file(const char *path, const zone *z, unsigned n, const char *what) {
    char why[2048];
    struct stat st;
    unsigned tried = 0;
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0 && !fstat(fd, &st));
    for (uint64_t bit = 0; bit < (uint64_t)st.st_size * 8; bit += every, tried++) {
        uint64_t at = bit / 8;
        uint8_t b, c;
        const zone *in = NULL;
        for (unsigned i = 0; !in && i < n; i++)
            if (at >= z[i].from && at < z[i].to) in = &z[i];
        assert_int_equal(pread(fd, &b, 1, (off_t)at), 1);
        c = b ^ (uint8_t)(1u << bit % 8);
        assert_int_equal(pwrite(fd, &c, 1, (off_t)at), 1);
        if (!report_names(in, why, sizeof why))
            fail_msg("%s: %s, bit %llu of byte %llu (%s%s): %s", what, path, (unsigned long long)(bit % 8),
                     (unsigned long long)at, in ? in->row : "no row", in ? in->state : "", why);
        assert_int_equal(pwrite(fd, &b, 1, (off_t)at), 1);
    }
    close(fd);
    return tried;
}

/* Every file of a store: shards or states, logs and what they point at, manifest, quarantine. */
static void every_bit(void **state) {
    (void)state;
    static zone z[256];
    for (uint32_t kind = 0; kind < 4; kind++) {
        rig r;
        uint64_t tried = 0;
        bool seen[4] = {false};
        const char *what = kind < 3 ? sl_codec_name(kind) : "files";
        rig_rmtree(store);
        rig_make(&r, store, 4, 40, 32, 2, 5); /* long enough for biases and repeats */
        r.m.codec = kind < 3 ? kind : SL_CODEC_NONE;
        r.m.layout = kind < 3 ? SL_LAYOUT_SHARDS : SL_LAYOUT_FILES;
        r.rows[3].verdict = SL_V_ORDER;
        rig_sink(&r, &(sl_sink_cfg){.threads = 1}, 7, 2);
        rig_free(&r);
        list_files();
        int files_n = n_files;
        for (int i = 0; i < files_n; i++) {
            bool shard = strstr(files[i], "/shards/");
            unsigned n = shard ? zones_of(files[i], z, 256) : 0;
            if (shard) assert_true(frames_in[kind] >= 4);
            tried += flip_file(files[i], z, n, what);
            seen[0] |= strstr(files[i], "manifest.json") != NULL;
            seen[1] |= strstr(files[i], "/quarantine/") && strstr(files[i], ".json");
            seen[2] |= strstr(files[i], "/quarantine/") && strstr(files[i], ".safetensors");
            seen[3] |= strstr(files[i], "intake.dat") != NULL;
        }
        assert_true(seen[0] && seen[1] && seen[2] && seen[3]);
        assert_int_equal(faults(NULL, 0), 0);
        print_message("%s: %llu bits of %d files flipped, each found and named\n", what, (unsigned long long)tried,
                      files_n);
    }
}

/* ---- forged: other values with the checksums made right again ---- */

static uint8_t *forged; /* the file under test */
static size_t forged_n;

/* Checksums of the frame at `off` over what it holds now. */
static void frame_reseal(uint64_t off) {
    sl_frame_head *f = (sl_frame_head *)(void *)(forged + off);
    uint64_t room = forged_n - off - sizeof *f;
    if (f->enc_len <= room && f->kind != SL_FR_STATE) f->raw_sum = f->enc_sum = XXH3_64bits(f + 1, f->enc_len);
    f->crc = sl_crc32c(0, f, sizeof *f - 4);
}

static void read_all(void) { /* whatever is in it: an error, or bytes */
    sl_reader *rd;
    sl_err err;
    if (sl_reader_open(&rd, store, &err)) return;
    for (uint64_t i = 0; i < sl_reader_rows(rd); i++) {
        const sl_commit_rec *c = sl_reader_row(rd, i);
        uint32_t T = c->T < 1000 ? c->T : 1000;
        char id[257];
        uint8_t *dst = malloc((size_t)T * 8 * 4 + 1), *mask = malloc((size_t)c->T + 1);
        int32_t *ids = malloc(4 * (size_t)c->T + 4);
        for (uint32_t k = 0; k < 4; k++) (void)sl_reader_state(rd, i, k, 0, T, dst, &err);
        if (c->T < 1000) (void)sl_reader_meta(rd, i, ids, mask, id, &err);
        free(dst), free(mask), free(ids);
    }
    sl_reader_close(rd);
}

typedef struct span { /* bytes [from, to) of a structure; {0, 0} ends a list */
    uint32_t from, to;
} span;

static void put_forged(const char *path) {
    int fd = open(path, O_WRONLY);
    assert_int_equal(pwrite(fd, forged, forged_n, 0), (ssize_t)forged_n);
    close(fd);
}

/* Bits of `n` bytes at `at`, each with the frame there (`seal` 0) sealed again, or the checksum that stands behind
 * `seal` bytes at `base_at`: verify finds each but those in bytes that mean nothing. */
static unsigned forge(const char *path, const char *what, uint64_t at, uint64_t n, uint64_t base_at, uint64_t seal,
                      const span *nothing) {
    unsigned missed = 0;
    uint8_t *keep = malloc(forged_n);
    memcpy(keep, forged, forged_n);
    for (uint64_t i = 0; i < n; i++) {
        bool skip = false;
        for (const span *f = nothing; f && f->to; f++) skip |= i >= f->from && i < f->to;
        for (unsigned bit = 0; bit < 8 && !skip; bit += 7) {
            forged[at + i] ^= (uint8_t)(1u << bit);
            uint32_t crc = seal ? sl_crc32c(0, forged + base_at, seal) : 0;
            if (seal)
                memcpy(forged + base_at + seal, &crc, 4);
            else
                frame_reseal(base_at);
            put_forged(path);
            if (!faults(NULL, 0)) {
                print_message("%s: bit %u of byte %llu was not found\n", what, bit, (unsigned long long)i);
                missed++;
            }
            read_all();
            memcpy(forged, keep, forged_n);
        }
    }
    put_forged(path);
    free(keep);
    return missed;
}

static void load_forged(const char *path) {
    struct stat st;
    int fd = open(path, O_RDONLY);
    assert_true(fd >= 0 && !fstat(fd, &st));
    free(forged);
    forged_n = (size_t)st.st_size;
    forged = malloc(forged_n);
    assert_int_equal(read(fd, forged, forged_n), (ssize_t)forged_n);
    close(fd);
}

static unsigned forge_shard(const char *path) {
    static const span of_meta[] = {{6, 7}, {40, 42}, {44, 56}, {64, 72}, {80, 96}, {112, 124}, {0, 0}},
                      of_state[] = {{112, 124}, {0, 0}}, of_foot[] = {{40, 60}, {0, 0}},
                      of_index[] = {{6, 8}, {16, 56}, {60, 72}, {80, 124}, {0, 0}};
    static const span meta_pay[] = {{12, 20}, {0, 0}}, end_pay[] = {{12, 16}, {0, 0}};
    static const struct {
        const char *name, *pay;
        const span *head_free, *pay_free;
    } kind[5] = {{NULL, NULL, NULL, NULL},
                 {"META", "META's payload", of_meta, meta_pay},
                 {"STATE", NULL, of_state, NULL},
                 {"END", "END's payload", of_meta, end_pay},
                 {"INDEX", "INDEX's payload", of_index, NULL}};
    load_forged(path);
    const sl_shard_head *h = (const sl_shard_head *)(const void *)forged;
    const span model[] = {{32 + (uint32_t)strlen(h->model) + 1, 112}, {0, 0}};
    unsigned seen = 0, missed = forge(path, "shard header", 0, 112 + 8 * h->n_states, 0, 4092, model);
    for (uint64_t at = sizeof *h; at + sizeof(sl_frame_head) < forged_n;) {
        sl_frame_head f;
        memcpy(&f, forged + at, sizeof f);
        if (!f.magic) { /* up to the next page */
            at += SL_FRAME_ALIGN;
            continue;
        }
        assert_true(f.magic == SL_FRAME_MAGIC && f.kind >= 1 && f.kind <= 4);
        if (!(seen & 1u << f.kind)) {
            missed += forge(path, kind[f.kind].name, at, 124, at, 0, kind[f.kind].head_free);
            if (kind[f.kind].pay)
                missed += forge(path, kind[f.kind].pay, at + sizeof f, f.enc_len < 80 ? f.enc_len : 80, at, 0,
                                kind[f.kind].pay_free);
        }
        seen |= 1u << f.kind;
        at += sl_frame_span(f.enc_len);
        if (f.kind == SL_FR_INDEX) missed += forge(path, "footer", at, 60, at, 60, of_foot);
    }
    assert_int_equal(seen, 0x1e);
    return missed;
}

/* Records of a log, but the HEADER, whose fields are only the settings of a run. */
static unsigned forge_log(const char *path, const char *what, const span *const *nothing) {
    unsigned missed = 0;
    load_forged(path);
    for (uint64_t at = SL_JREC; at < forged_n; at += SL_JREC)
        missed += forge(path, what, at, SL_JREC - 4, at, SL_JREC - 4, nothing[forged[at + 4]]);
    return missed;
}

static void forged_fields(void **state) {
    (void)state;
    char path[300];
    static const span commit[] = {{48, 52}, {54, 60}, {104, 124}, {0, 0}},
                      reject[] = {{48, 53}, {54, 92}, {96, 112}, {120, 124}, {0, 0}},
                      dataset[] = {{8, 56}, {60, 72}, {88, 112}, {120, 124}, {0, 0}},
                      row[] = {{32, 48}, {88, 112}, {120, 124}, {0, 0}};
    static const span *const in_commit[4] = {NULL, NULL, commit, reject}, *const in_intake[4] = {NULL, NULL, dataset,
                                                                                                 row};
    build(SL_LAYOUT_SHARDS, SL_CODEC_NONE);
    snprintf(path, sizeof path, "%s/shards/shard-000000.sls", store);
    unsigned missed = forge_shard(path);
    snprintf(path, sizeof path, "%s/commit.log", store);
    missed += forge_log(path, "a record of commit.log", in_commit);
    snprintf(path, sizeof path, "%s/intake.log", store);
    missed += forge_log(path, "a record of intake.log", in_intake);
    assert_int_equal(faults(NULL, 0), 0);
    assert_int_equal(missed, 0);
    free(forged);
    forged = NULL;
}

/* States that are not finite are found whatever the checksums say. */
static void nonfinite_states(void **state) {
    (void)state;
    for (uint32_t layout = 0; layout < 2; layout++) {
        build(layout, SL_CODEC_NONE);
        list_files();
        int i = 0;
        while (i < n_files && !strstr(files[i], layout == SL_LAYOUT_SHARDS ? "/shards/" : "/hidden_states/")) i++;
        assert_true(i < n_files);
        const char *path = files[i];
        load_forged(path);
        uint64_t at = sizeof(sl_shard_head), len;
        if (layout == SL_LAYOUT_SHARDS) {
            sl_frame_head *f = (sl_frame_head *)(void *)(forged + at);
            while (f->kind != SL_FR_STATE) f = (sl_frame_head *)(void *)(forged + (at += sl_frame_span(f->enc_len)));
            memcpy(f + 1, "\x80\x7f", 2); /* +Inf */
            f->raw_sum = f->enc_sum = XXH3_64bits(f + 1, f->enc_len);
            frame_reseal(at);
        } else {
            memcpy(&len, forged, 8);
            memcpy(forged + 8 + len, "\xc0\xff", 2);
        }
        put_forged(path);
        sl_verify_report rep;
        sl_err err;
        bool said = false;
        assert_int_equal(sl_store_verify(store, &deep, &rep, &err), 0);
        for (uint64_t k = 0; k < rep.n_faults && k < SL_VERIFY_KEEP; k++)
            said |= strstr(rep.faults[k], "1 elements are NaN or infinite") != NULL;
        assert_true(said);
        sl_verify_free(&rep);
    }
    free(forged);
    forged = NULL;
}

/* ---- torn ends ---- */

static struct kept {
    char path[300];
    uint8_t *p;
    size_t n;
} kept[64];
static int n_kept;

static void keep_store(void) {
    list_files();
    for (n_kept = 0; n_kept < n_files; n_kept++) {
        struct stat st;
        struct kept *k = &kept[n_kept];
        int fd = open(files[n_kept], O_RDONLY);
        assert_true(fd >= 0 && !fstat(fd, &st));
        snprintf(k->path, sizeof k->path, "%s", files[n_kept]);
        k->n = (size_t)st.st_size;
        k->p = malloc(k->n + 1);
        assert_int_equal(read(fd, k->p, k->n), (ssize_t)k->n);
        close(fd);
    }
}

/* The kept store, with file `which` (-1: none) shorter by `cut`. */
static void put_store(int which, size_t cut) {
    list_files();
    for (int i = 0; i < n_files; i++) unlink(files[i]);
    for (int i = 0; i < n_kept; i++) {
        int fd = open(kept[i].path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
        size_t n = kept[i].n - (i == which ? cut : 0);
        assert_true(fd >= 0);
        assert_int_equal(write(fd, kept[i].p, n), (ssize_t)n);
        close(fd);
    }
}

static int kept_file(const char *end) {
    int best = -1;
    for (int i = 0; i < n_kept; i++)
        if (strstr(kept[i].path, end) && (best < 0 || strcmp(kept[i].path, kept[best].path) > 0)) best = i;
    assert_true(best >= 0);
    return best;
}

static int restart(char *why, size_t cap) {
    sl_sink *s;
    sl_err err;
    sl_sink_cfg cfg = {.threads = 1, .store = store, .manifest = sr.m, .shard_bytes = 16000, .zstd_level = 1};
    if (sl_sink_open(&s, &cfg, &err)) {
        snprintf(why, cap, "%.1500s", err.msg);
        return 1;
    }
    sl_sink_close(s);
    return faults(why, cap) > 0;
}

/* salvage first: it keeps every row that is whole. The next run first: it goes on and nothing is wrong, or verify says
 * so and salvage mends it; what was lost by then is pending. In the end the run completes. */
static unsigned clean_restarts;
static void recover(uint64_t whole, bool salvage_first, const char *what, size_t cut) {
    char text[2048];
    if (salvage_first) {
        sl_salvage_report r = salvage();
        if (r.rows != whole)
            fail_msg("%s cut by %zu: salvage kept %llu rows, %llu are whole", what, cut, (unsigned long long)r.rows,
                     (unsigned long long)whole);
    } else if (restart(text, sizeof text)) {
        salvage();
    } else {
        clean_restarts++;
    }
    if (restart(text, sizeof text)) fail_msg("%s cut by %zu: %s", what, cut, text);
    if (cut % (67 * every) != 1) return;
    rig_sink(&sr, &(sl_sink_cfg){.threads = 1, .shard_bytes = 16000}, 2, 3);
    if (faults(text, sizeof text)) fail_msg("%s cut by %zu: after the next run: %s", what, cut, text);
    assert_int_equal(rig_check(&sr), 13);
}

/* The last shard as it is before it is sealed: no index, no footer. */
static void unseal(struct kept *k, const zone *z, unsigned n) {
    size_t end = 0;
    for (unsigned i = 0; i < n; i++) end = z[i].to > end ? (size_t)z[i].to : end;
    k->n = end;
    strcat(k->path, ".open");
}

static void every_torn_byte(void **state) {
    (void)state;
    build_for_salvage();
    keep_store();
    int shard = kept_file("/shards/"), log[2] = {kept_file("commit.log"), kept_file("intake.log")};
    static zone z[256];
    unsigned n = zones_of(kept[shard].path, z, 256), tried = 0;
    for (int open_ = 0; open_ < 2; open_++) {
        if (open_) unseal(&kept[shard], z, n);
        for (size_t cut = 1; cut <= 4096 && cut <= kept[shard].n; cut += every) {
            unsigned torn = 0;
            for (unsigned i = 0; i < n; i++) torn += !z[i].state[0] && z[i].to + cut > kept[shard].n;
            for (int first = 0; first < 2; first++, tried++) {
                put_store(shard, cut);
                recover(13 - torn, first, open_ ? "open shard" : "last shard", cut);
            }
            for (int i = 0; i < 4; i++) {
                const struct kept *k = &kept[log[i / 2]];
                if (cut > k->n) continue;
                put_store(log[i / 2], cut);
                recover(13, i % 2, k->path, cut);
                tried++;
            }
        }
    }
    print_message("%u torn ends, each recovered, %u of %u by the restart alone\n", tried, clean_restarts, tried / 2);
    for (int i = 0; i < n_kept; i++) free(kept[i].p);
    rig_free(&sr);
}

/* ---- large blocks, whose payload starts on a page ---- */

/* Blocks of half a MiB of codec none, written from memory (a token is a multiple of 512 bytes), from memory that does
 * not fit (it is not), and copied: the same bytes in the same places whichever way; every way of damaging the places
 * where a frame begins and ends is found and named; salvage finds every row. */
static void pages(void **state) {
    (void)state;
    static const struct {
        uint32_t width, piece;
        bool huge, direct, plain;
    } way[] = {{512, 128, true, true, false},  {512, 128, true, false, false}, {512, 128, true, true, true},
               {512, 128, false, true, false}, {500, 128, true, true, false},  {500, 128, false, false, true}};
    uint64_t want[2] = {0};
    char keep[sizeof store], here[] = "./sluice-pages-XXXXXX";
    memcpy(keep, store, sizeof keep);
    assert_non_null(mkdtemp(here)); /* memory file systems do not say what O_DIRECT asks for */
    snprintf(store, sizeof store, "%s/s", here);
    for (unsigned w = 0; w < sizeof way / sizeof *way; w++) {
        rig r;
        char path[300], why[2048];
        static zone z[256];
        rig_rmtree(store);
        rig_make(&r, store, 7, 700, way[w].width, 2, 3);
        r.rows[2].T = 600;
        r.rows[2].mask_sum = 300;
        r.m.codec = SL_CODEC_NONE;
        sl_sink_cfg cfg = {.threads = 1, .huge = way[w].huge, .direct = way[w].direct, .plain = way[w].plain};
        rig_sink(&r, &cfg, way[w].piece, 3);
        deep.threads = w % 3 * 2; /* 0, 2, 4 */
        deep.part_blocks = w & 1;
        if (faults(why, sizeof why)) fail_msg("way %u: %s", w, why);
        assert_int_equal(rig_check(&r), 7);
        snprintf(path, sizeof path, "%s/shards", store);
        uint64_t sum = rig_tree_sum(path), *same = &want[way[w].width == 500];
        if (!*same) *same = sum;
        assert_int_equal(sum, *same);
        snprintf(path, sizeof path, "%s/shards/shard-000000.sls", store);
        unsigned n = zones_of(path, z, 256), on_page = 0;
        int fd = open(path, O_RDWR);
        assert_true(fd >= 0);
        for (unsigned i = 0; i < n; i++) {
            bool large = z[i].state[0] && z[i].to - z[i].from > SL_DIRECT_BYTES;
            on_page += large;
            if (large) assert_int_equal((z[i].from + sizeof(sl_frame_head)) % 4096, 0);
            /* the gap before the frame, its head, both ends of its payload, its padding */
            uint64_t at[] = {z[i].from - 1,          z[i].from,    z[i].from + 127, z[i].from + 128,
                             z[i].from + 4096 + 128, z[i].to - 65, z[i].to - 1};
            for (unsigned j = 0; large && j < sizeof at / sizeof *at; j++) {
                uint8_t b, c;
                assert_int_equal(pread(fd, &b, 1, (off_t)at[j]), 1);
                c = b ^ 16;
                assert_int_equal(pwrite(fd, &c, 1, (off_t)at[j]), 1);
                zone row = z[i];
                if (j == 0) row.state[0] = 0;
                if (!report_names(&row, why, sizeof why)) fail_msg("byte %llu: %s", (unsigned long long)at[j], why);
                assert_int_equal(pwrite(fd, &b, 1, (off_t)at[j]), 1);
            }
        }
        close(fd);
        assert_true(on_page >= 8);
        sh("rm commit.log%s%s", "", "");
        sl_salvage_report rep = salvage();
        assert_int_equal(rep.rows, 7);
        assert_int_equal(rig_check(&r), 7);
        rig_free(&r);
    }
    deep = (sl_verify_opts){.deep = true};
    rig_rmtree(here);
    memcpy(store, keep, sizeof keep);
}

/* Several threads find what one finds, in the same order, in both layouts and every codec, however rows are cut. */
static void threads_agree(void **state) {
    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        rig r;
        sl_verify_report rep[4];
        sl_err err;
        rig_rmtree(store);
        rig_make(&r, store, 12, 900, 1024, 2, 5);
        r.rows[4].T = 4000; /* two blocks a state */
        r.rows[4].mask_sum = 2000;
        r.m.layout = kind == 3 ? SL_LAYOUT_FILES : SL_LAYOUT_SHARDS;
        r.m.codec = kind == 3 ? SL_CODEC_NONE : (uint32_t)kind;
        rig_sink(&r, &(sl_sink_cfg){.threads = 2, .shard_bytes = 4 << 20}, 512, 3);
        for (int hurt = 0; hurt < 2; hurt++) {
            list_files();
            for (int i = 0; hurt && i < n_files; i++) {
                struct stat st;
                uint8_t b = 0;
                if (!strstr(files[i], "/shards/") && !strstr(files[i], "/hidden_states/")) continue;
                int fd = open(files[i], O_RDWR);
                assert_true(fd >= 0 && !fstat(fd, &st) && pread(fd, &b, 1, st.st_size / 2) == 1);
                b ^= 1;
                assert_int_equal(pwrite(fd, &b, 1, st.st_size / 2), 1);
                close(fd);
            }
            for (int t = 0; t < 4; t++) {
                sl_verify_opts o = {.deep = true, .threads = (unsigned)t * 2 + (t == 0), .part_blocks = (uint32_t)t};
                assert_int_equal(sl_store_verify(store, &o, &rep[t], &err), 0);
                assert_true(hurt ? rep[t].n_faults > 0 : !rep[t].n_faults);
                assert_int_equal(rep[t].n_faults, rep[0].n_faults);
                if (!hurt) assert_int_equal(rep[t].read_bytes, rep[0].read_bytes);
                for (uint64_t i = 0; i < rep[t].n_faults && i < SL_VERIFY_KEEP; i++)
                    assert_string_equal(rep[t].faults[i], rep[0].faults[i]);
            }
            for (int t = 0; t < 4; t++) sl_verify_free(&rep[t]);
        }
        rig_free(&r);
    }
}

/* ---- one state alone ---- */

static uint64_t read_so_far(void) {
    char line[100];
    unsigned long long v = 0;
    FILE *f = fopen("/proc/self/io", "r");
    assert_non_null(f);
    assert_non_null(fgets(line, sizeof line, f));
    assert_int_equal(sscanf(line, "rchar: %llu", &v), 1);
    fclose(f);
    return v;
}

/* One state of one row takes less than twice its bytes of reading, as the kernel counts them. */
static void one_state_reads_little(void **state) {
    (void)state;
    for (uint32_t codec = 0; codec < 3; codec++) {
        rig r;
        sl_reader *rd;
        sl_err err;
        rig_rmtree(store);
        rig_make(&r, store, 6, 60, 1024, 2, 5);
        r.m.codec = codec;
        rig_sink(&r, &(sl_sink_cfg){.threads = 1}, 16, 3);
        assert_int_equal(sl_reader_open(&rd, store, &err), 0);
        uint8_t *x = malloc(60 * 2048), *y = malloc(60 * 2048);
        double most = 0;
        for (uint64_t i = 0; i < sl_reader_rows(rd); i++)
            for (uint32_t k = 0; k < r.m.set.n; k++) {
                const sl_commit_rec *c = sl_reader_row(rd, i);
                if (c->T < 8) continue; /* the row's own tables are larger */
                uint64_t before = read_so_far(), idle = read_so_far() - before, b0 = sl_reader_bytes_read(rd);
                before = read_so_far();
                assert_int_equal(sl_reader_state(rd, i, k, 0, c->T, x, &err), 0);
                double f = (double)(read_so_far() - before - idle) / (double)(sl_reader_bytes_read(rd) - b0);
                most = f > most ? f : most;
                rig_fill(&r, c->seq, k, 0, c->T, y);
                assert_memory_equal(x, y, (size_t)c->T * 2048);
            }
        print_message("codec %s: at most %.3f times the state's bytes read\n", sl_codec_name(codec), most);
        assert_true(most >= 1 && most < 2);
        free(x);
        free(y);
        sl_reader_close(rd);
        rig_free(&r);
    }
}

static int make(int argc, char **argv) {
    rig r;
    uint32_t codec, width = argc > 6 ? (uint32_t)strtoul(argv[6], NULL, 10) : 64;
    uint32_t max_T = argc > 7 ? (uint32_t)strtoul(argv[7], NULL, 10) : 40;
    if (sl_codec_parse(argv[4], &codec)) return 2;
    rig_make(&r, argv[2], strtoull(argv[5], NULL, 10), max_T, width, 2, 5);
    r.m.layout = !strcmp(argv[3], "files") ? SL_LAYOUT_FILES : SL_LAYOUT_SHARDS;
    r.m.codec = codec;
    rig_sink(&r, &(sl_sink_cfg){.threads = 1, .shard_bytes = 200000}, 16, 4);
    rig_free(&r);
    return 0;
}

int main(int argc, char **argv) {
    if (argc >= 6 && !strcmp(argv[1], "--make")) return make(argc, argv);
    snprintf(base, sizeof base, "%s/sluice-verify-XXXXXX", access("/dev/shm", W_OK) ? "." : "/dev/shm");
    if (!mkdtemp(base)) return 1;
    snprintf(store, sizeof store, "%s/s", base);
    if (argc > 2) every = (unsigned)atoi(argv[2]);
    const struct CMUnitTest bits[] = {cmocka_unit_test(every_bit)}, torn[] = {cmocka_unit_test(every_torn_byte)};
    const struct CMUnitTest t[] = {cmocka_unit_test(one_state_reads_little), cmocka_unit_test(pages),
                                   cmocka_unit_test(threads_agree),          cmocka_unit_test(missing_and_extra),
                                   cmocka_unit_test(flips_in_intake),        cmocka_unit_test(cut_logs),
                                   cmocka_unit_test(forged_fields),          cmocka_unit_test(nonfinite_states),
                                   cmocka_unit_test(salvage_logs),           cmocka_unit_test(salvage_shards),
                                   cmocka_unit_test(flips_in_files),         cmocka_unit_test(flips_in_shards)};
    int rc = argc > 1 && !strcmp(argv[1], "bits")   ? cmocka_run_group_tests(bits, NULL, NULL)
             : argc > 1 && !strcmp(argv[1], "torn") ? cmocka_run_group_tests(torn, NULL, NULL)
                                                    : cmocka_run_group_tests(t, NULL, NULL);
    rig_rmtree(base);
    return rc;
}
