#include "stages/writer/salvage.h"
#include "ipc/file.h"
#include "ipc/store.h"
#include "stages/writer/xxh3.h"
#include "stages/writer/manifest.h"
#include "stages/writer/names.h"
#include "stages/writer/shard.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define LOST_NAME "sluice-salvage-lost"

typedef struct whole { /* a whole row */
    sl_commit_rec c;
    uint32_t part;
} whole;

typedef struct recs {
    uint8_t *v; /* SL_JREC bytes each */
    uint64_t n;
} recs;

typedef struct job {
    const char *store;
    sl_salvage_report *rep;
    whole *rows;
    uint64_t n, cap;
    uint64_t *by_seq, n_by_seq; /* index in rows + 1, 0: none */
    uint32_t highest_open;
    int have_open, have_head;
    sl_capture_set set;
    recs intake, commit; /* every good record of the old logs, in order */
    int intake_bad;
    uint8_t *buf;
    uint64_t buf_cap;
    char *names[4096]; /* data set names seen in shards */
} job;

static int need(job *j, uint64_t n, sl_err *err) {
    if (j->buf_cap >= n) return 0;
    free(j->buf);
    j->buf = malloc(n);
    j->buf_cap = j->buf ? n : 0;
    return j->buf ? 0 : sl_err_set(err, SL_ETEMP, "no memory for %" PRIu64 " bytes", n);
}

static int map_row(job *j, uint64_t seq, uint64_t index, sl_err *err) {
    if (seq >= 1ull << 32) return sl_err_set(err, SL_EDATA, "sequence number %" PRIu64 " is not plausible", seq);
    if (seq >= j->n_by_seq) {
        uint64_t n = j->n_by_seq ? j->n_by_seq : 1024;
        while (n <= seq) n *= 2;
        uint64_t *p = realloc(j->by_seq, n * sizeof *p);
        if (!p) return sl_err_set(err, SL_ETEMP, "no memory for %" PRIu64 " rows", n);
        memset(p + j->n_by_seq, 0, (n - j->n_by_seq) * sizeof *p);
        j->by_seq = p;
        j->n_by_seq = n;
    }
    j->by_seq[seq] = index + 1;
    return 0;
}

static whole *find_seq(const job *j, uint64_t seq) {
    return seq < j->n_by_seq && j->by_seq[seq] ? &j->rows[j->by_seq[seq] - 1] : NULL;
}

/* ---- shards ---- */

static int keep_row(job *j, const sl_src *s, uint32_t shard, const sl_frame_head *meta, uint64_t len, uint64_t sum,
                    sl_err *err) {
    sl_meta_head mh;
    sl_row_meta m;
    int rc = sl_row_meta_read(s, meta, &mh, &m, err);
    if (rc) return rc;
    sl_key k = sl_row_key(m.name, meta->row, meta->part);
    if (memcmp(&k, meta->key, sizeof k) || meta->dataset >= 4096)
        rc = sl_err_set(err, SL_EDATA, "%s: row %" PRIu64 " has another's key", s->name, meta->row);
    if (!rc && !j->names[meta->dataset]) j->names[meta->dataset] = strdup(m.name);
    sl_row_meta_free(&m);
    if (rc) return rc;
    if (j->n == j->cap) {
        uint64_t cap = j->cap ? j->cap * 2 : 1024;
        whole *p = realloc(j->rows, cap * sizeof *p);
        if (!p) return sl_err_set(err, SL_ETEMP, "no memory for %" PRIu64 " rows", cap);
        j->rows = p;
        j->cap = cap;
    }
    uint64_t raw = (uint64_t)meta->T * meta->n_states * meta->width * meta->elem_size;
    if ((rc = map_row(j, meta->seq, j->n, err))) return rc;
    j->rows[j->n++] = (whole){.c = {.kind = SL_CM_COMMIT,
                                    .seq = meta->seq,
                                    .key = k,
                                    .row = meta->row,
                                    .dataset = meta->dataset,
                                    .T = meta->T,
                                    .epoch = 0,
                                    .k = 0xffff,
                                    .token = UINT32_MAX,
                                    .shard = shard,
                                    .off = meta->off,
                                    .len = len,
                                    .raw_bytes = raw,
                                    .nll = (float)mh.nll,
                                    .mask_sum = mh.mask_sum,
                                    .states_sum = sum},
                              .part = meta->part};
    return 0;
}

static int zero_range(job *j, int fd, uint64_t from, uint64_t to, sl_err *err) {
    static const uint8_t zeros[65536];
    if (from >= to) return 0;
    sl_src s = {.fd = fd, .len = to, .name = "shard"};
    if (!sl_zeros(&s, from, to, NULL)) return 0;
    j->rep->bytes_dropped += to - from;
    for (uint64_t at = from; at < to;) {
        uint64_t n = to - at < sizeof zeros ? to - at : sizeof zeros;
        ssize_t w = pwrite(fd, zeros, n, (off_t)at);
        if (w <= 0) return sl_err_sys(err, SL_ETEMP, errno, "cannot clear damaged bytes");
        at += (uint64_t)w;
    }
    return 0;
}

/* The frame behind byte `at`, there or with its payload on the next page; what lies between is cleared. */
static int next_frame(job *j, const sl_src *s, const sl_shard_head *h, uint64_t at, sl_frame_head *f) {
    if (!sl_frame_open(s, h, at, f, NULL))
        return sl_frame_place(at, f->codec, f->enc_len) != at && f->kind == SL_FR_STATE;
    uint64_t page = sl_frame_page_place(at);
    if (page == at || sl_frame_open(s, h, page, f, NULL) || f->kind != SL_FR_STATE ||
        sl_frame_place(at, f->codec, f->enc_len) != page)
        return 1;
    return zero_range(j, s->fd, at, page, NULL);
}

/* The row whose META is at `off`: its length when all of it is there, 0 when not. */
static uint64_t row_length(job *j, const sl_src *s, const sl_shard_head *h, const sl_frame_head *meta, uint64_t *sum) {
    sl_frame_head f;
    uint32_t br = sl_store_block_rows(h->width, h->elem_size), blocks = (meta->T - 1) / br + 1;
    uint64_t n = (uint64_t)blocks * h->n_states, at = meta->off + sl_frame_span(meta->enc_len);
    XXH3_state_t st;
    XXH3_64bits_reset(&st);
    for (uint64_t i = 0; i <= n; i++) {
        if (next_frame(j, s, h, at, &f) || f.seq != meta->seq || f.T != meta->T ||
            memcmp(f.key, meta->key, sizeof f.key))
            return 0;
        if (f.kind != (i < n ? SL_FR_STATE : SL_FR_END) || (i < n && (f.k != i / blocks || f.t0 != i % blocks * br)))
            return 0;
        if (need(j, f.enc_len + 1, NULL) || sl_frame_read(s, &f, j->buf, NULL)) return 0;
        if (i < n) XXH3_64bits_update(&st, &f.raw_sum, 8);
        at = f.off + sl_frame_span(f.enc_len);
    }
    if (at > s->len) return 0;
    sl_end_head e;
    memcpy(&e, j->buf, sizeof e);
    *sum = XXH3_64bits_digest(&st);
    return e.states_sum == *sum ? at - meta->off : 0;
}

/* INDEX and footer behind the rows [a, n), then the file ends. */
static int write_index(job *j, int fd, uint32_t shard, uint64_t a, uint64_t end, const sl_shard_head *h, sl_err *err) {
    uint64_t n = j->n - a, len = n * sizeof(sl_index_entry),
             off = (end + SL_SHARD_ALIGN - 1) / SL_SHARD_ALIGN * SL_SHARD_ALIGN, span = sl_frame_span(len);
    uint8_t *b = calloc(1, span + sizeof(sl_shard_foot));
    if (!b) return sl_err_set(err, SL_ETEMP, "no memory for an index");
    sl_index_entry *ix = (sl_index_entry *)(void *)(b + sizeof(sl_frame_head));
    for (uint64_t i = 0; i < n; i++) {
        const sl_commit_rec *c = &j->rows[a + i].c;
        ix[i] = (sl_index_entry){.seq = c->seq,
                                 .row = c->row,
                                 .dataset = c->dataset,
                                 .T = c->T,
                                 .off = c->off,
                                 .len = c->len,
                                 .key = {c->key.w[0], c->key.w[1]},
                                 .states_sum = c->states_sum,
                                 .raw_bytes = c->raw_bytes,
                                 .mask_sum = c->mask_sum,
                                 .nll = c->nll};
    }
    sl_frame_head *f = (sl_frame_head *)(void *)b;
    *f = (sl_frame_head){.magic = SL_FRAME_MAGIC,
                         .version = SL_STORE_VERSION,
                         .kind = SL_FR_INDEX,
                         .elem_size = (uint8_t)h->elem_size,
                         .off = off,
                         .n_states = (uint16_t)h->n_states,
                         .T = (uint32_t)n,
                         .width = h->width,
                         .raw_len = len,
                         .enc_len = len};
    f->raw_sum = f->enc_sum = XXH3_64bits(ix, len);
    f->crc = sl_crc32c(0, f, sizeof *f - 4);
    sl_shard_foot *ft = (sl_shard_foot *)(void *)(b + span);
    *ft = (sl_shard_foot){.magic = SL_FOOT_MAGIC,
                          .version = SL_STORE_VERSION,
                          .shard = shard,
                          .index_off = off,
                          .n_rows = n,
                          .file_len = off + span + sizeof *ft};
    ft->crc = sl_crc32c(0, ft, sizeof *ft - 4);
    ssize_t all = (ssize_t)(span + sizeof *ft);
    int bad = ftruncate(fd, (off_t)end) || pwrite(fd, b, (size_t)all, (off_t)off) != all || fsync(fd);
    free(b);
    return bad ? sl_err_sys(err, SL_ETEMP, errno, "cannot write the index of shard %u", shard) : 0;
}

/* An open shard whose header never reached the disk: nothing was committed in it. */
static bool never_begun(const sl_src *s) {
    return s->len < sizeof(sl_shard_head) || !sl_zeros(s, 0, sizeof(sl_shard_head), NULL);
}

static int scan_shard(job *j, const char *file, uint32_t no, int open_, sl_err *err) {
    char path[SL_PATH_MAX + 128], to[SL_PATH_MAX + 128], nm[64];
    struct stat st;
    sl_frame_head f;
    sl_shard_head h;
    snprintf(path, sizeof path, "%s/shards/%s", j->store, file);
    sl_src s = {.fd = open(path, O_RDWR | O_CLOEXEC), .name = path};
    if (s.fd < 0 || fstat(s.fd, &st)) return sl_err_sys(err, SL_ECONFIG, errno, "%s", path);
    s.len = (uint64_t)st.st_size;
    j->rep->shards++;
    uint64_t first = j->n, at = sizeof h, end = sizeof h;
    int rc = 0;
    if (open_ && never_begun(&s)) {
        j->rep->bytes_dropped += s.len;
        if (unlink(path)) rc = sl_err_sys(err, SL_ETEMP, errno, "cannot remove %s", path);
        goto out;
    }
    rc = sl_shard_open(&s, &h, err);
    if (rc) goto out; /* without a header nothing in it can be understood */
    if (!j->have_head) sl_shard_set(&h, &j->set), j->have_head = 1;
    while (!rc && at < s.len) {
        uint64_t len = 0, sum = 0;
        if (!sl_frame_open(&s, &h, at, &f, NULL) && f.kind == SL_FR_META) len = row_length(j, &s, &h, &f, &sum);
        if (len && !find_seq(j, f.seq) && !keep_row(j, &s, no, &f, len, sum, err)) {
            rc = zero_range(j, s.fd, end, at, err);
            end = at += len;
        } else {
            at += SL_FRAME_ALIGN;
        }
    }
    if (rc) goto out;
    int newest = open_ && no == j->highest_open;
    if (newest)
        rc = ftruncate(s.fd, (off_t)end) || fsync(s.fd) ? sl_err_sys(err, SL_ETEMP, errno, "cannot cut %s", path) : 0;
    else
        rc = write_index(j, s.fd, no, first, end, &h, err);
    sl_store_shard_name(nm, sizeof nm, no, 0);
    snprintf(to, sizeof to, "%s/shards/%s", j->store, nm);
    if (!rc && open_ && !newest && rename(path, to)) rc = sl_err_sys(err, SL_ETEMP, errno, "cannot rename %s", path);
out:
    close(s.fd);
    return rc;
}

static int by_number(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static int scan_shards(job *j, sl_err *err) {
    char path[SL_PATH_MAX + 16], **list = NULL;
    uint64_t n = 0;
    uint32_t no;
    int open_, rc = 0;
    snprintf(path, sizeof path, "%s/shards", j->store);
    DIR *d = opendir(path);
    if (!d) return sl_err_sys(err, SL_EUSAGE, errno, "%s: salvage works on a store of layout shards", path);
    for (struct dirent *e; !rc && (e = readdir(d));) {
        if (!sl_store_shard_parse(e->d_name, &no, &open_)) continue;
        if (open_ && (!j->have_open || no > j->highest_open)) j->highest_open = no, j->have_open = 1;
        char **p = realloc(list, (n + 1) * sizeof *p);
        if (!p || !(p[n] = strdup(e->d_name))) rc = sl_err_set(err, SL_ETEMP, "no memory");
        if (p) list = p;
        n += !rc;
    }
    closedir(d);
    if (list) qsort(list, n, sizeof *list, by_number);
    for (uint64_t i = 0; i < n; i++) {
        if (!rc && sl_store_shard_parse(list[i], &no, &open_)) rc = scan_shard(j, list[i], no, open_, err);
        free(list[i]);
    }
    free(list);
    return rc ? rc : sl_file_sync_folder(path, err); /* the final names come before the log that speaks of them */
}

/* ---- logs ---- */

/* All good records, whatever lies between them. */
static int load(job *j, const char *name, uint32_t magic, recs *out, int *bad, sl_err *err) {
    char path[SL_PATH_MAX + 32];
    struct stat st;
    snprintf(path, sizeof path, "%s/%s", j->store, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        *bad = 1;
        return errno == ENOENT ? 0 : sl_err_sys(err, SL_ECONFIG, errno, "%s", path);
    }
    if (flock(fd, LOCK_EX | LOCK_NB)) {
        close(fd);
        return sl_err_set(err, SL_ETEMP, "%s is being written: drain the service first", path);
    }
    int rc = 0;
    if (fstat(fd, &st) || !(out->v = malloc((size_t)st.st_size + SL_JREC)))
        rc = sl_err_set(err, SL_ETEMP, "no memory for %s", path);
    for (off_t at = 0; !rc && at + SL_JREC <= st.st_size; at += SL_JREC) {
        uint8_t *r = out->v + out->n * SL_JREC;
        if (pread(fd, r, SL_JREC, at) == SL_JREC && sl_journal_record_ok(r, magic))
            out->n++;
        else
            *bad = 1;
    }
    close(fd);
    return rc;
}

/* A log is built beside the old one and takes its place when it is whole, so an interruption loses nothing. */
static int open_new(job *j, const char *name, uint32_t magic, sl_journal **log, sl_err *err) {
    char path[SL_PATH_MAX + 48];
    snprintf(path, sizeof path, "%s/%s.new", j->store, name);
    unlink(path);
    return sl_journal_open(log, path, magic, NULL, NULL, err);
}

static int swap_in(job *j, const char *name, sl_err *err) {
    char a[SL_PATH_MAX + 32], b[SL_PATH_MAX + 48], c[SL_PATH_MAX + 48];
    snprintf(a, sizeof a, "%s/%s", j->store, name);
    snprintf(b, sizeof b, "%s/%s.new", j->store, name);
    snprintf(c, sizeof c, "%s/%s.damaged", j->store, name);
    unlink(c);
    if (link(a, c) && errno != ENOENT) return sl_err_sys(err, SL_ETEMP, errno, "cannot keep %s", c);
    if (rename(b, a)) return sl_err_sys(err, SL_ETEMP, errno, "cannot rename %s", b);
    return sl_file_sync_folder(j->store, err);
}

static int by_place(const void *a, const void *b) {
    const whole *x = a, *y = b;
    if (x->c.shard != y->c.shard) return x->c.shard < y->c.shard ? -1 : 1;
    return x->c.off < y->c.off ? -1 : x->c.off > y->c.off;
}

static int append_dat(FILE *f, const void *p, size_t n, uint64_t *off) {
    if (fseek(f, 0, SEEK_END)) return -1;
    while (ftell(f) % 8) fputc(0, f);
    *off = (uint64_t)ftell(f);
    return fwrite(p, 1, n, f) == n ? 0 : -1;
}

static int restore_row(job *j, sl_journal *log, FILE *dat, const whole *w, sl_err *err) {
    char path[SL_PATH_MAX + 128], nm[64];
    struct stat st;
    sl_row_frames fr;
    sl_meta_head mh;
    sl_row_meta m;
    sl_shard_head h;
    sl_store_shard_name(nm, sizeof nm, w->c.shard, 0);
    snprintf(path, sizeof path, "%s/shards/%s", j->store, nm);
    if (access(path, F_OK)) strcat(path, ".open");
    sl_src s = {.fd = open(path, O_RDONLY | O_CLOEXEC), .name = path};
    if (s.fd < 0 || fstat(s.fd, &st)) return sl_err_sys(err, SL_EDATA, errno, "%s", path);
    s.len = (uint64_t)st.st_size;
    int rc = sl_shard_open(&s, &h, err);
    if (!rc) rc = sl_row_open(&fr, &s, &h, w->c.off, w->c.len, w->c.T, err);
    if (!rc) {
        rc = sl_row_meta_read(&s, &fr.meta, &mh, &m, err);
        sl_row_close(&fr);
    }
    if (!rc) {
        sl_intake_rec r = {.kind = SL_IN_ROW,
                           .seq = w->c.seq,
                           .key = w->c.key,
                           .row = w->c.row,
                           .dataset = w->c.dataset,
                           .part = w->part,
                           .T = w->c.T,
                           .mask_sum = w->c.mask_sum,
                           .data_len = 5ull * w->c.T + mh.id_len,
                           .id_len = mh.id_len};
        r.data_sum = XXH3_64bits(m.ids, r.data_len);
        rc = append_dat(dat, m.ids, r.data_len, &r.data_off) ? sl_err_set(err, SL_ETEMP, "cannot write intake.dat")
                                                             : sl_journal_append(log, &r, err);
        sl_row_meta_free(&m);
        j->rep->restored++;
    }
    close(s.fd);
    return rc;
}

static int write_text(const char *path, const void *p, size_t n, sl_err *err) {
    FILE *f = fopen(path, "wb");
    int bad = !f || fwrite(p, 1, n, f) != n || fflush(f) || fsync(fileno(f));
    if (f) fclose(f);
    return bad ? sl_err_sys(err, SL_ETEMP, errno, "cannot write %s", path) : 0;
}

/* A sequence number of which nothing is left. */
static int lose_row(job *j, sl_journal *log, FILE *dat, uint64_t seq, uint32_t lost_set, sl_err *err) {
    static const char head[] = "{\"__metadata__\":{\"incomplete\":\"1\",\"salvage\":\"lost\"}}";
    char st[8 + sizeof head - 1];
    char dir[160], path[SL_PATH_MAX + 256], text[256];
    uint8_t one[5] = {0};
    memcpy(st, &(uint64_t){sizeof head - 1}, 8);
    memcpy(st + 8, head, sizeof head - 1);
    sl_intake_rec r = {.kind = SL_IN_ROW,
                       .seq = seq,
                       .key = sl_row_key(LOST_NAME, seq, 0),
                       .row = seq,
                       .dataset = lost_set,
                       .T = 1,
                       .data_len = 5,
                       .data_sum = XXH3_64bits(one, sizeof one)};
    int rc = append_dat(dat, one, sizeof one, &r.data_off) ? sl_err_set(err, SL_ETEMP, "cannot write intake.dat")
                                                           : sl_journal_append(log, &r, err);
    sl_store_dataset_dir(dir, sizeof dir, lost_set, LOST_NAME);
    snprintf(path, sizeof path, "%s/quarantine/%s", j->store, dir);
    if (!rc) rc = sl_store_folder_make(path, strlen(j->store), err);
    size_t at = strlen(path);
    snprintf(path + at, sizeof path - at, "/hs_%" PRIu64 ".json", seq);
    int n = snprintf(text, sizeof text,
                     "{\"verdict\":\"MISSING_SHARD\",\"dataset\":\"" LOST_NAME "\",\"row\":%" PRIu64
                     ",\"detail\":\"salvage found neither its record nor its states\"}\n",
                     seq);
    if (!rc) rc = write_text(path, text, (size_t)n, err);
    snprintf(path + at, sizeof path - at, "/hs_%" PRIu64 ".safetensors", seq);
    if (!rc) rc = write_text(path, st, sizeof st, err);
    path[at] = 0;
    if (!rc) rc = sl_file_sync_folder(path, err);
    j->rep->lost++;
    return rc;
}

/* Data sets that are defined by good records, and those only shards know. */
static int define_sets(job *j, sl_journal *log, FILE *dat, uint32_t *lost_set, sl_err *err) {
    uint8_t have[4096] = {0};
    int rc = 0;
    for (uint64_t i = 0; !rc && i < j->intake.n; i++) {
        sl_intake_rec r;
        memcpy(&r, j->intake.v + i * SL_JREC, sizeof r);
        if (r.kind == SL_IN_HEADER && !i) rc = sl_journal_append(log, &r, err);
        if (r.kind != SL_IN_DATASET || r.dataset >= 4095) continue;
        have[r.dataset] = 1;
    }
    uint32_t top = 0;
    for (uint32_t d = 0; d < 4095; d++)
        if (have[d] || j->names[d]) top = d + 1;
    *lost_set = top;
    for (uint32_t d = 0; d < top && !rc; d++) { /* in order: an index is its position */
        sl_intake_rec r = {.kind = SL_IN_DATASET, .dataset = d};
        for (uint64_t i = 0; have[d] && i < j->intake.n; i++) {
            sl_intake_rec x;
            memcpy(&x, j->intake.v + i * SL_JREC, sizeof x);
            if (x.kind == SL_IN_DATASET && x.dataset == d) r = x;
        }
        char unknown[64];
        snprintf(unknown, sizeof unknown, "unknown-%u", d);
        const char *name = j->names[d] ? j->names[d] : unknown;
        if (!have[d]) {
            r.data_len = strlen(name);
            r.data_sum = XXH3_64bits(name, r.data_len);
            if (append_dat(dat, name, r.data_len, &r.data_off))
                rc = sl_err_set(err, SL_ETEMP, "cannot write intake.dat");
        }
        if (!rc) rc = sl_journal_append(log, &r, err);
    }
    return rc;
}

static int rebuild_intake(job *j, uint64_t n_seq, sl_err *err) {
    char path[SL_PATH_MAX + 32];
    sl_journal *log;
    uint32_t lost_set;
    int rc = 0;
    snprintf(path, sizeof path, "%s/intake.dat", j->store);
    FILE *dat = fopen(path, "r+b");
    if (!dat) dat = fopen(path, "w+b");
    if (!dat) rc = sl_err_sys(err, SL_ETEMP, errno, "cannot write intake.dat");
    if (!rc) rc = open_new(j, "intake.log", SL_INTAKE_MAGIC, &log, err);
    if (rc) {
        if (dat) fclose(dat);
        return rc;
    }
    j->rep->intake_rebuilt = 1;
    sl_intake_rec first = {.kind = 0};
    if (j->intake.n) memcpy(&first, j->intake.v, sizeof first);
    if (first.kind != SL_IN_HEADER) {
        sl_intake_rec h = {
            .kind = SL_IN_HEADER, .batch_tokens = 16384, .max_batch_rows = 256, .max_length = 1u << 20, .version = 1};
        rc = sl_journal_append(log, &h, err);
    }
    if (!rc) rc = define_sets(j, log, dat, &lost_set, err);
    if (!rc && n_seq) {
        /* is any sequence number beyond help? then its data set must be defined before the rows */
        sl_intake_rec r = {.kind = SL_IN_DATASET, .dataset = lost_set, .data_len = strlen(LOST_NAME)};
        r.data_sum = XXH3_64bits(LOST_NAME, r.data_len);
        uint8_t *known = calloc(n_seq, 1);
        uint64_t have = 0;
        for (uint64_t i = 0; known && i < j->intake.n; i++) {
            sl_intake_rec x;
            memcpy(&x, j->intake.v + i * SL_JREC, sizeof x);
            if (x.kind == SL_IN_ROW && x.seq < n_seq && !known[x.seq]) known[x.seq] = 1, have++;
        }
        for (uint64_t i = 0; known && i < j->n; i++)
            if (!known[j->rows[i].c.seq]) known[j->rows[i].c.seq] = 1, have++;
        free(known);
        if (have < n_seq) {
            if (append_dat(dat, LOST_NAME, r.data_len, &r.data_off))
                rc = sl_err_set(err, SL_ETEMP, "cannot write intake.dat");
            if (!rc) rc = sl_journal_append(log, &r, err);
        }
    }
    uint64_t seq = 0;
    for (uint64_t i = 0; !rc && i <= j->intake.n; i++) {
        sl_intake_rec r = {.kind = SL_IN_ROW, .seq = n_seq};
        if (i < j->intake.n) memcpy(&r, j->intake.v + i * SL_JREC, sizeof r);
        if (r.kind == SL_IN_DATASET || (r.kind == SL_IN_HEADER && !i)) continue;
        while (!rc && r.kind == SL_IN_ROW && seq < r.seq && seq < n_seq) { /* what is missing before it */
            const whole *w = find_seq(j, seq);
            rc = w ? restore_row(j, log, dat, w, err) : lose_row(j, log, dat, seq, lost_set, err);
            seq++;
        }
        if (i == j->intake.n || (r.kind == SL_IN_ROW && r.seq < seq)) continue;
        if (!rc) rc = sl_journal_append(log, &r, err);
        if (r.kind == SL_IN_ROW) seq++;
    }
    if (!rc && (fflush(dat) || fsync(fileno(dat)))) rc = sl_err_sys(err, SL_ETEMP, errno, "cannot write intake.dat");
    fclose(dat);
    if (!rc) rc = sl_journal_sync(log, err);
    sl_journal_close(log);
    return rc ? rc : swap_in(j, "intake.log", err);
}

static int rebuild_commit(job *j, sl_store_stats *st, sl_err *err) {
    sl_journal *log;
    sl_accepted *in = NULL;
    sl_commit_rec h = {.kind = SL_CM_HEADER};
    int rc = open_new(j, "commit.log", SL_COMMIT_MAGIC, &log, err);
    if (rc) return rc;
    rc = sl_journal_append(log, &h, err);
    if (!rc) rc = sl_accepted_new(&in, j->store, err);
    if (!rc) rc = sl_accepted_follow(in, err);
    for (uint64_t i = 0; !rc && i < j->commit.n; i++) {
        sl_commit_rec r;
        memcpy(&r, j->commit.v + i * SL_JREC, sizeof r);
        whole *w = find_seq(j, r.seq);
        if (r.kind == SL_CM_COMMIT && !w) j->rep->pending_again++;
        if (r.kind == SL_CM_COMMIT && w && r.shard == w->c.shard && r.off == w->c.off &&
            r.states_sum == w->c.states_sum)
            w->c = r;
        const sl_accepted_row *was = sl_accepted_at(in, r.seq);
        if (r.kind != SL_CM_REJECT || w || !was || memcmp(&was->key, &r.key, sizeof r.key)) continue;
        const char *name = sl_accepted_name(in, was->dataset);
        uint64_t sum = 0;
        bool same = !r.file_sum || !name ||
                    (!sl_store_quarantine_sum(j->store, was->dataset, name, was->row, was->part, &sum, NULL) &&
                     sum == r.file_sum);
        if (!same && strcmp(name, LOST_NAME)) {
            j->rep->pending_again++; /* computed again, its files are written again */
            continue;
        }
        if (!same)
            r.file_sum = sum; /* a lost row cannot be computed: what is in its files is only a note that it was */
        sl_store_stats_add(st, &r);
        j->rep->rejects++;
        rc = sl_journal_append(log, &r, err);
    }
    for (uint64_t i = 0; !rc && j->rep->lost && i < sl_accepted_rows(in); i++) {
        const sl_accepted_row *a = sl_accepted_at(in, i);
        const char *name = sl_accepted_name(in, a->dataset);
        if (!name || strcmp(name, LOST_NAME)) continue;
        sl_commit_rec r = {.kind = SL_CM_REJECT,
                           .seq = i,
                           .key = a->key,
                           .row = a->row,
                           .dataset = a->dataset,
                           .T = 1,
                           .verdict = SL_V_MISSING_SHARD,
                           .k = 0xffff,
                           .token = UINT32_MAX,
                           .shard = SL_NO_SHARD};
        rc = sl_store_quarantine_sum(j->store, a->dataset, name, a->row, a->part, &r.file_sum, err);
        sl_store_stats_add(st, &r);
        if (!rc) rc = sl_journal_append(log, &r, err);
    }
    for (uint64_t i = 0; !rc && i < j->n; i++) {
        j->rep->recommitted += !j->rows[i].c.epoch;
        sl_store_stats_add(st, &j->rows[i].c);
        rc = sl_journal_append(log, &j->rows[i].c, err);
    }
    sl_accepted_free(in);
    if (!rc) rc = sl_journal_sync(log, err);
    sl_journal_close(log);
    return rc ? rc : swap_in(j, "commit.log", err);
}

static int rebuild_manifest(job *j, const sl_store_stats *st, sl_err *err) {
    sl_manifest m;
    if (sl_manifest_read(&m, j->store, NULL)) {
        if (!j->have_head)
            return sl_err_set(err, SL_EDATA,
                              "%s: neither a manifest nor a shard header can be read: nothing to salvage", j->store);
        memset(&m, 0, sizeof m);
        m.set = j->set;
        m.layout = SL_LAYOUT_SHARDS;
        m.codec = SL_CODEC_BF16;
        j->rep->manifest_rebuilt = 1;
    }
    m.stats = *st;
    m.complete = 0;
    return sl_manifest_write(&m, j->store, err);
}

static int run(job *j, sl_err *err) {
    sl_manifest m;
    int commit_bad = 0, rc;
    if (!sl_manifest_read(&m, j->store, NULL) && m.layout == SL_LAYOUT_FILES)
        return sl_err_set(err, SL_EUSAGE,
                          "%s is of layout files: a row whose record is lost is computed again by the next run, "
                          "nothing needs salvage",
                          j->store);
    if ((rc = load(j, "intake.log", SL_INTAKE_MAGIC, &j->intake, &j->intake_bad, err))) return rc;
    if ((rc = load(j, "commit.log", SL_COMMIT_MAGIC, &j->commit, &commit_bad, err))) return rc;
    if ((rc = scan_shards(j, err))) return rc;
    if (j->n) qsort(j->rows, j->n, sizeof *j->rows, by_place);
    for (uint64_t i = 0; i < j->n; i++) j->by_seq[j->rows[i].c.seq] = i + 1;
    j->rep->rows = j->n;
    uint64_t n_seq = 0, rows = 0;
    for (uint64_t i = 0; i < j->n; i++)
        if (j->rows[i].c.seq + 1 > n_seq) n_seq = j->rows[i].c.seq + 1;
    for (uint64_t i = 0; i < j->intake.n; i++) {
        sl_intake_rec r;
        memcpy(&r, j->intake.v + i * SL_JREC, sizeof r);
        if (r.kind != SL_IN_ROW) continue;
        rows++;
        if (r.seq + 1 > n_seq) n_seq = r.seq + 1;
    }
    for (uint64_t i = 0; i < j->commit.n; i++) {
        sl_commit_rec r;
        memcpy(&r, j->commit.v + i * SL_JREC, sizeof r);
        if (r.kind != SL_CM_HEADER && r.seq < 1ull << 40 && r.seq + 1 > n_seq) n_seq = r.seq + 1;
    }
    sl_store_stats st = {0};
    if (j->intake_bad || rows != n_seq) rc = rebuild_intake(j, n_seq, err);
    if (!rc) rc = rebuild_commit(j, &st, err);
    return rc ? rc : rebuild_manifest(j, &st, err);
}

int sl_store_salvage(const char *store, sl_salvage_report *rep, sl_err *err) {
    memset(rep, 0, sizeof *rep);
    job *j = calloc(1, sizeof *j);
    if (!j) return sl_err_set(err, SL_ETEMP, "no memory");
    j->store = store;
    j->rep = rep;
    int rc = run(j, err);
    for (uint32_t d = 0; d < 4096; d++) free(j->names[d]);
    free(j->rows);
    free(j->by_seq);
    free(j->intake.v);
    free(j->commit.v);
    free(j->buf);
    free(j);
    return rc;
}
