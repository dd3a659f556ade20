#include "stages/feeder/intake.h"
#include "ipc/crash.h"
#include "ipc/file.h"
#include "ipc/log.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

struct sl_intake {
    sl_intake_cfg cfg;
    char store[PATH_MAX], log_path[PATH_MAX], commit_path[PATH_MAX];
    sl_journal *log;
    int dat;
    uint64_t dat_end; /* durable + buffered end of intake.dat */
    char *buf;        /* not yet written to intake.dat: [dat_end - buf_n, dat_end) */
    uint64_t buf_n, buf_cap, buf_written;
    uint64_t pending, records; /* records appended and not synced; durable records */

    char **datasets;
    uint32_t n_datasets;
    sl_entry *entries;
    uint32_t n_entries, cap_entries;
    uint32_t *slots; /* open addressing: entry index + 1 */
    uint64_t n_slots;
    uint32_t *entry_of; /* by seq */
    uint8_t *done;      /* by seq, one bit */
    uint64_t next_seq, cap_seq;

    sl_pack pack;
    uint32_t max_length; /* of the last HEADER */
    uint64_t commit_at, commit_synced, committed;
    sl_intake_done done_cb; /* during follow */
    void *done_arg;
};

/* ---- the table of pushed rows ---- */

static uint64_t slot_of(const sl_intake *in, const sl_key *k) {
    uint64_t i = k->w[0] & (in->n_slots - 1);
    while (in->slots[i] && memcmp(&in->entries[in->slots[i] - 1].key, k, sizeof *k) != 0)
        i = (i + 1) & (in->n_slots - 1);
    return i;
}

static int grow_slots(sl_intake *in, sl_err *err) {
    uint64_t n = in->n_slots ? in->n_slots * 2 : 1024;
    uint32_t *s = calloc(n, sizeof *s);
    if (!s) return sl_err_set(err, SL_ETEMP, "no memory for a table of %llu rows", (unsigned long long)n);
    free(in->slots);
    in->slots = s;
    in->n_slots = n;
    for (uint32_t i = 0; i < in->n_entries; i++) in->slots[slot_of(in, &in->entries[i].key)] = i + 1;
    return SL_OK;
}

static sl_entry *find(const sl_intake *in, const sl_key *k) {
    if (!in->n_slots) return NULL;
    uint32_t s = in->slots[slot_of(in, k)];
    return s ? &in->entries[s - 1] : NULL;
}

static int get_entry(sl_intake *in, const sl_key *k, uint32_t dataset, uint64_t row, sl_entry **out, sl_err *err) {
    if ((*out = find(in, k))) return SL_OK;
    int rc;
    if ((uint64_t)in->n_entries * 2 >= in->n_slots && (rc = grow_slots(in, err))) return rc;
    if (in->n_entries == in->cap_entries || !in->entries) {
        if (in->n_entries > UINT32_MAX / 2)
            return sl_err_set(err, SL_ECONFIG, "a store holds at most %u rows", UINT32_MAX / 2);
        uint32_t cap = in->cap_entries ? in->cap_entries * 2 : 512;
        sl_entry *e = realloc(in->entries, (size_t)cap * sizeof *e);
        if (!e) return sl_err_set(err, SL_ETEMP, "no memory for %u rows", cap);
        in->entries = e;
        in->cap_entries = cap;
    }
    sl_entry *e = &in->entries[in->n_entries];
    *e = (sl_entry){.key = *k, .dataset = dataset, .row = row};
    in->slots[slot_of(in, k)] = ++in->n_entries;
    *out = e;
    return SL_OK;
}

static int map_seq(sl_intake *in, uint64_t seq, const sl_entry *e, sl_err *err) {
    if (seq >= in->cap_seq) {
        uint64_t cap = in->cap_seq ? in->cap_seq * 2 : 1024;
        uint32_t *m = realloc(in->entry_of, cap * sizeof *m);
        if (!m) return sl_err_set(err, SL_ETEMP, "no memory for %llu rows", (unsigned long long)cap);
        in->entry_of = m;
        uint8_t *d = realloc(in->done, cap / 8);
        if (!d) return sl_err_set(err, SL_ETEMP, "no memory for %llu rows", (unsigned long long)cap);
        memset(d + in->cap_seq / 8, 0, (cap - in->cap_seq) / 8);
        in->done = d;
        in->cap_seq = cap;
    }
    in->entry_of[seq] = (uint32_t)(e - in->entries);
    return SL_OK;
}

/* The effect of a part record on memory: the same for a record that is replayed and one that is being written. */
static int apply_part(sl_intake *in, const sl_intake_rec *r, sl_err *err) {
    sl_key key = sl_row_key(in->datasets[r->dataset], r->row, 0);
    sl_entry *e = NULL;
    int rc = get_entry(in, &key, r->dataset, r->row, &e, err);
    if (rc) return rc;
    if (r->part == 0 && e->rows == 0) { /* new, or takes the place of a refusal */
        e->parts = 0;
        e->reason = SL_R_NONE;
        memcpy(e->content, r->content, sizeof e->content);
    }
    e->parts = r->part + 1;
    e->more = (r->flags & SL_IN_MORE) != 0;
    if (r->kind == SL_IN_REJECT) {
        e->reason = r->reason;
        return SL_OK;
    }
    e->rows++;
    e->left++;
    if ((rc = map_seq(in, r->seq, e, err))) return rc;
    in->next_seq = r->seq + 1;
    if (sl_pack_splits(&in->pack, r->T)) sl_pack_close(&in->pack);
    sl_pack_add(&in->pack, r->T);
    return SL_OK;
}

/* ---- data sets ---- */

static int add_dataset(sl_intake *in, const char *name, size_t n, sl_err *err) {
    char **d = realloc(in->datasets, (in->n_datasets + 1) * sizeof *d);
    if (!d) return sl_err_set(err, SL_ETEMP, "no memory for a data set name");
    in->datasets = d;
    if (!(d[in->n_datasets] = strndup(name, n))) return sl_err_set(err, SL_ETEMP, "no memory for a data set name");
    in->n_datasets++;
    return SL_OK;
}

static int replay_dataset(sl_intake *in, const sl_intake_rec *r, sl_err *err) {
    char name[256];
    if (r->dataset != in->n_datasets || !r->data_len || r->data_len > 255)
        return sl_err_set(err, SL_EDATA, "data set record %u is out of order", r->dataset);
    if (pread(in->dat, name, r->data_len, (off_t)r->data_off) != (ssize_t)r->data_len)
        return sl_err_set(err, SL_EDATA, "the name of data set %u is not in intake.dat", r->dataset);
    if (r->data_sum && XXH3_64bits(name, r->data_len) != r->data_sum)
        return sl_err_set(err, SL_EDATA,
                          "intake.dat: the name of data set %u does not match its checksum: the file was damaged; "
                          "restore it, or see 'sluice verify'",
                          r->dataset);
    return add_dataset(in, name, r->data_len, err);
}

/* ---- opening ---- */

static int replay(void *arg, const void *rec, sl_err *err) {
    sl_intake *in = arg;
    const sl_intake_rec *r = rec;
    uint64_t end = r->data_off + r->data_len;
    in->records++;
    if ((r->kind == SL_IN_ROW || r->kind == SL_IN_DATASET) && end > in->dat_end) in->dat_end = end;
    switch (r->kind) {
    case SL_IN_HEADER:
        if (r->version != 1)
            return sl_err_set(err, SL_ECONFIG, "%s has version %u, this program writes version 1", in->log_path,
                              r->version);
        if (!r->batch_tokens || !r->max_batch_rows)
            return sl_err_set(err, SL_EDATA, "%s: a header without batch limits", in->log_path);
        sl_pack_close(&in->pack);
        in->pack.batch_tokens = r->batch_tokens;
        in->pack.max_rows = r->max_batch_rows;
        in->max_length = r->max_length;
        return SL_OK;
    case SL_IN_DATASET:
        return replay_dataset(in, r, err);
    case SL_IN_FLUSH:
        sl_pack_close(&in->pack);
        return SL_OK;
    case SL_IN_ROW:
    case SL_IN_REJECT:
        if (r->dataset >= in->n_datasets || !in->pack.batch_tokens || (r->kind == SL_IN_ROW && r->seq != in->next_seq))
            return sl_err_set(err, SL_EDATA, "%s: record %llu does not follow from the records before it", in->log_path,
                              (unsigned long long)(in->records - 1));
        return apply_part(in, r, err);
    default:
        return sl_err_set(err, SL_EDATA, "%s: record %llu is of unknown kind %u", in->log_path,
                          (unsigned long long)(in->records - 1), r->kind);
    }
}

static int append(sl_intake *in, sl_intake_rec *r, sl_err *err) {
    int rc = sl_journal_append(in->log, r, err);
    if (!rc) in->pending++;
    return rc;
}

static int write_header(sl_intake *in, sl_err *err) {
    const sl_intake_cfg *c = &in->cfg;
    if (in->records && in->pack.batch_tokens == c->batch_tokens && in->pack.max_rows == c->max_batch_rows &&
        in->max_length == c->max_length)
        return SL_OK;
    if (in->records)
        sl_log(SL_WARN,
               "limits changed from %u tokens and %u rows a batch, %u tokens a row to %u, %u, %u: rows accepted so far "
               "stay as they are, in the batches they are in",
               in->pack.batch_tokens, in->pack.max_rows, in->max_length, c->batch_tokens, c->max_batch_rows,
               c->max_length);
    sl_intake_rec r = {.kind = SL_IN_HEADER,
                       .seq = in->next_seq,
                       .batch_tokens = c->batch_tokens,
                       .max_batch_rows = c->max_batch_rows,
                       .max_length = c->max_length,
                       .version = 1};
    int rc = append(in, &r, err);
    if (rc) return rc;
    sl_pack_close(&in->pack);
    in->pack.batch_tokens = c->batch_tokens;
    in->pack.max_rows = c->max_batch_rows;
    return sl_intake_sync(in, err);
}

static int open_files(sl_intake *in, sl_err *err) {
    char dat[PATH_MAX];
    snprintf(dat, sizeof dat, "%.4000s/intake.dat", in->store);
    in->dat = open(dat, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (in->dat < 0) return sl_err_sys(err, sl_file_code(errno), errno, "opening %s", dat);
    int rc = sl_journal_open(&in->log, in->log_path, SL_INTAKE_MAGIC, replay, in, err);
    if (rc) return rc;
    struct stat st;
    if (fstat(in->dat, &st)) return sl_err_sys(err, SL_ETEMP, errno, "looking at %s", dat);
    if ((uint64_t)st.st_size < in->dat_end)
        return sl_err_set(err, SL_EDATA,
                          "%s has %lld bytes, but intake.log speaks of %llu: it was cut or belongs to another store",
                          dat, (long long)st.st_size, (unsigned long long)in->dat_end);
    if (ftruncate(in->dat, (off_t)in->dat_end)) return sl_err_sys(err, SL_ETEMP, errno, "cutting the tail of %s", dat);
    return SL_OK;
}

int sl_intake_open(sl_intake **out, const sl_intake_cfg *cfg, sl_err *err) {
    sl_intake *in = calloc(1, sizeof *in);
    if (!in) return sl_err_set(err, SL_ETEMP, "intake: no memory");
    in->cfg = *cfg;
    in->dat = -1;
    snprintf(in->store, sizeof in->store, "%s", cfg->store);
    snprintf(in->log_path, sizeof in->log_path, "%.4000s/intake.log", cfg->store);
    snprintf(in->commit_path, sizeof in->commit_path, "%.4000s/commit.log", cfg->store);
    in->cfg.store = in->store;
    int rc = cfg->batch_tokens && cfg->max_batch_rows
                 ? SL_OK
                 : sl_err_set(err, SL_ECONFIG, "batch_tokens and max_batch_rows must be at least 1");
    if (!rc) rc = open_files(in, err);
    if (!rc) rc = write_header(in, err);
    if (!rc) rc = sl_intake_follow(in, UINT64_MAX, NULL, NULL, err);
    if (rc) {
        sl_intake_close(in);
        return rc;
    }
    *out = in;
    return SL_OK;
}

void sl_intake_close(sl_intake *in) {
    if (!in) return;
    if (in->log) sl_journal_close(in->log);
    if (in->dat >= 0) close(in->dat);
    for (uint32_t i = 0; i < in->n_datasets; i++) free(in->datasets[i]);
    free(in->datasets);
    free(in->entries);
    free(in->slots);
    free(in->entry_of);
    free(in->done);
    free(in->buf);
    free(in);
}

/* ---- writing ---- */

/* Buffer n bytes for intake.dat at the next multiple of 8; *off is where they will be. `reserve` grows once for a part.
 */
static char *dat_reserve(sl_intake *in, uint64_t n, uint64_t *off, sl_err *err) {
    uint64_t pad = -in->dat_end & 7, need = in->buf_n + pad + n;
    if (need > in->buf_cap) {
        uint64_t cap = in->buf_cap ? in->buf_cap : 65536;
        while (cap < need) cap *= 2;
        char *b = realloc(in->buf, cap);
        if (!b) return sl_err_set(err, SL_ETEMP, "no memory for %llu bytes of rows", (unsigned long long)cap), NULL;
        in->buf = b;
        in->buf_cap = cap;
    }
    memset(in->buf + in->buf_n, 0, pad);
    char *p = in->buf + in->buf_n + pad;
    *off = in->dat_end + pad;
    in->buf_n += pad + n;
    in->dat_end += pad + n;
    return p;
}

int64_t sl_intake_dataset(sl_intake *in, const char *name, sl_err *err) {
    for (uint32_t i = 0; i < in->n_datasets; i++)
        if (!strcmp(in->datasets[i], name)) return i;
    size_t n = strlen(name);
    if (!n || n > 255) return sl_err_set(err, SL_EDATA, "a data set name has 1 to 255 bytes, this one %zu", n);
    if (in->n_datasets >= 1000000) return sl_err_set(err, SL_EDATA, "a store holds at most 1000000 data sets");
    sl_intake_rec r = {.kind = SL_IN_DATASET, .seq = in->next_seq, .dataset = in->n_datasets, .data_len = n};
    char *p = dat_reserve(in, n, &r.data_off, err);
    if (!p) return SL_ETEMP;
    memcpy(p, name, n); // NOLINT(bugprone-not-null-terminated-result): the record has the length
    r.data_sum = XXH3_64bits(name, n);
    int rc = add_dataset(in, name, n, err);
    if (!rc) rc = append(in, &r, err);
    return rc ? rc : (int64_t)r.dataset;
}

const char *sl_intake_dataset_name(const sl_intake *in, uint32_t dataset) {
    return dataset < in->n_datasets ? in->datasets[dataset] : NULL;
}

sl_in_found sl_intake_find(sl_intake *in, uint32_t dataset, uint64_t row, const uint64_t content[2], sl_entry **out) {
    sl_key k = sl_row_key(in->datasets[dataset], row, 0);
    sl_entry *e = find(in, &k);
    if (out) *out = e;
    if (!e) return SL_IN_NEW;
    bool same = e->content[0] == content[0] && e->content[1] == content[1];
    if (e->rows == 0 && !e->more) return same ? SL_IN_REFUSED : SL_IN_NEW;
    if (!same) return SL_IN_CONFLICT;
    return e->more ? SL_IN_INCOMPLETE : SL_IN_KNOWN;
}

static int add_part(sl_intake *in, sl_intake_rec *r, const sl_part *part, const sl_prepared *p, sl_err *err) {
    if (part->reason) {
        r->kind = SL_IN_REJECT;
        r->reason = (uint16_t)part->reason;
    } else {
        r->kind = SL_IN_ROW;
        r->T = part->T;
        r->mask_sum = part->mask_sum;
        r->id_len = p->id_len;
        r->data_len = (uint64_t)part->T * 5 + p->id_len;
        if (part->flags & SL_PART_TRUNCATED) r->flags |= SL_IN_TRUNCATED;
        char *d = dat_reserve(in, r->data_len, &r->data_off, err);
        if (!d) return SL_ETEMP;
        memcpy(d, part->ids, (size_t)part->T * 4);
        memcpy(d + (size_t)part->T * 4, part->mask, part->T);
        memcpy(d + (size_t)part->T * 5, p->id, p->id_len);
        r->data_sum = XXH3_64bits(d, r->data_len);
    }
    int rc = append(in, r, err);
    return rc ? rc : apply_part(in, r, err);
}

int sl_intake_add(sl_intake *in, uint32_t dataset, uint64_t row, const uint64_t content[2], const sl_prepared *p,
                  uint32_t owner, sl_err *err) {
    sl_entry *e;
    sl_in_found f = sl_intake_find(in, dataset, row, content, &e);
    if (f != SL_IN_NEW && f != SL_IN_INCOMPLETE && f != SL_IN_REFUSED)
        return sl_err_set(err, SL_EINTERNAL, "row %llu is already recorded", (unsigned long long)row);
    for (uint32_t i = f == SL_IN_INCOMPLETE ? e->parts : 0; i < p->n; i++) {
        sl_intake_rec r = {.seq = in->next_seq,
                           .key = sl_row_key(in->datasets[dataset], row, i),
                           .content = {content[0], content[1]},
                           .row = row,
                           .dataset = dataset,
                           .part = i,
                           .flags = i + 1 < p->n ? SL_IN_MORE : 0};
        int rc = add_part(in, &r, &p->parts[i], p, err);
        if (rc) return rc;
    }
    sl_key k = sl_row_key(in->datasets[dataset], row, 0);
    if ((e = find(in, &k))) {
        e->owner = owner;
        e->more = 0;
    }
    return SL_OK;
}

int sl_intake_flush(sl_intake *in, sl_err *err) {
    if (!in->pack.rows) return 0;
    sl_intake_rec r = {.kind = SL_IN_FLUSH, .seq = in->next_seq};
    int rc = append(in, &r, err);
    if (rc) return rc;
    sl_pack_close(&in->pack);
    return 1;
}

static int write_data(sl_intake *in, sl_err *err) {
    uint64_t start = in->dat_end - in->buf_n;
    while (in->buf_written < in->buf_n) {
        ssize_t w =
            pwrite(in->dat, in->buf + in->buf_written, in->buf_n - in->buf_written, (off_t)(start + in->buf_written));
        if (w < 0 && errno == EINTR) continue;
        if (w <= 0) {
            int e = w < 0 ? errno : ENOSPC;
            return sl_err_sys(err, sl_file_code(e), e, "writing intake.dat in %s", in->store);
        }
        in->buf_written += (uint64_t)w;
    }
    if (in->buf_n && fdatasync(in->dat)) {
        in->buf_written = 0; /* the kernel may have dropped what it could not write: the next try writes all of it */
        return sl_err_sys(err, SL_ETEMP, errno, "syncing intake.dat in %s", in->store);
    }
    in->buf_n = in->buf_written = 0;
    if (in->buf_cap > (16u << 20)) { /* one huge row must not keep its memory */
        free(in->buf);
        in->buf = NULL;
        in->buf_cap = 0;
    }
    return SL_OK;
}

int sl_intake_sync(sl_intake *in, sl_err *err) {
    if (!sl_intake_dirty(in)) return SL_OK;
    int rc = write_data(in, err);
    if (rc) return rc;
    sl_crash_point("feeder.after_data");
    if ((rc = sl_journal_sync(in->log, err))) return rc;
    in->records += in->pending;
    in->pending = 0;
    sl_crash_point("feeder.after_intake");
    return SL_OK;
}

bool sl_intake_dirty(const sl_intake *in) {
    return in->pending || in->buf_n;
}
uint64_t sl_intake_buffered(const sl_intake *in) {
    return in->buf_n + in->pending * SL_JREC;
}
uint64_t sl_intake_records(const sl_intake *in) {
    return in->records;
}
uint64_t sl_intake_rows(const sl_intake *in) {
    return in->next_seq;
}
uint64_t sl_intake_committed(const sl_intake *in) {
    return in->committed;
}
bool sl_intake_row_done(const sl_intake *in, uint64_t seq) {
    return seq < in->next_seq && (in->done[seq / 8] >> (seq & 7) & 1);
}
uint32_t sl_intake_open_rows(const sl_intake *in) {
    return in->pack.rows;
}

/* ---- what became of them ---- */

static int on_commit(void *arg, const void *rec, sl_err *err) {
    sl_intake *in = arg;
    const sl_commit_rec *c = rec;
    if (in->commit_at >= in->commit_synced) return 1;
    if (c->kind != SL_CM_COMMIT && c->kind != SL_CM_REJECT) return SL_OK;
    if (c->seq >= in->next_seq)
        return sl_err_set(err, SL_EDATA,
                          "commit.log speaks of row %llu, intake.log holds %llu: the logs are of different stores",
                          (unsigned long long)c->seq, (unsigned long long)in->next_seq);
    if (sl_intake_row_done(in, c->seq)) return SL_OK;
    in->done[c->seq / 8] |= (uint8_t)(1u << (c->seq & 7));
    in->committed++;
    sl_entry *e = &in->entries[in->entry_of[c->seq]];
    e->bad += c->kind == SL_CM_REJECT;
    if (c->kind == SL_CM_REJECT && !e->verdict) e->verdict = c->verdict < SL_V_N ? (uint8_t)c->verdict : SL_V_COUNT;
    if (e->left && --e->left == 0 && !e->more && in->done_cb) in->done_cb(in->done_arg, e);
    return SL_OK;
}

uint64_t sl_intake_commits(const sl_intake *in) {
    return in->commit_at;
}

int sl_intake_follow(sl_intake *in, uint64_t synced, sl_intake_done done, void *arg, sl_err *err) {
    if (access(in->commit_path, F_OK)) return SL_OK; /* the writer has not made it yet */
    in->done_cb = done;
    in->done_arg = arg;
    in->commit_synced = synced;
    int rc = sl_journal_follow(in->commit_path, SL_COMMIT_MAGIC, &in->commit_at, on_commit, in, err);
    in->done_cb = NULL;
    return rc < 0 ? rc : SL_OK;
}
