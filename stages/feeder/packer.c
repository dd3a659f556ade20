#include "stages/feeder/packer.h"
#include "ipc/file.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#define XXH_STATIC_LINKING_ONLY /* its state on the stack */
#include <xxhash.h>

bool sl_pack_splits(const sl_pack *p, uint32_t T) {
    return p->rows && (p->rows >= p->max_rows || (uint64_t)p->tokens + T > p->batch_tokens);
}

bool sl_pack_close(sl_pack *p) {
    if (!p->rows) return false;
    p->rows = p->tokens = 0;
    p->batch_no++;
    return true;
}

bool sl_pack_add(sl_pack *p, uint32_t T) {
    p->rows++;
    p->tokens += T;
    return (p->rows >= p->max_rows || p->tokens >= p->batch_tokens) && sl_pack_close(p);
}

enum { READ_RECS = 256 };

struct sl_packer {
    int log, dat;
    char path[PATH_MAX];
    uint64_t at;               /* next record to look at */
    uint64_t buf_first, buf_n; /* records in buf */
    sl_intake_rec buf[READ_RECS];
    sl_pack pack;
    sl_intake_rec *rows; /* of the open batch */
    uint32_t n, cap;
    bool handed; /* the rows above were handed out: start anew */
};

int sl_packer_open(sl_packer **out, const char *store, sl_err *err) {
    sl_packer *p = calloc(1, sizeof *p);
    if (!p) return sl_err_set(err, SL_ETEMP, "packer: no memory");
    p->log = p->dat = -1;
    char dat[PATH_MAX];
    snprintf(p->path, sizeof p->path, "%.4000s/intake.log", store);
    snprintf(dat, sizeof dat, "%.4000s/intake.dat", store);
    p->log = open(p->path, O_RDONLY | O_CLOEXEC);
    p->dat = open(dat, O_RDONLY | O_CLOEXEC);
    if (p->log < 0 || p->dat < 0) {
        int e = errno;
        sl_packer_close(p);
        return sl_err_sys(err, sl_file_read_code(e), e, "opening intake.log and intake.dat in %s", store);
    }
    *out = p;
    return SL_OK;
}

void sl_packer_close(sl_packer *p) {
    if (!p) return;
    if (p->log >= 0) close(p->log);
    if (p->dat >= 0) close(p->dat);
    free(p->rows);
    free(p);
}

/* All of [off, off+n), or SL_EDATA. */
static int pread_all(int fd, void *buf, uint64_t n, uint64_t off, const char *what, sl_err *err) {
    uint64_t done = 0;
    while (done < n) {
        ssize_t r = pread(fd, (char *)buf + done, n - done, (off_t)(off + done));
        if (r < 0 && errno == EINTR) continue;
        if (r < 0)
            return sl_err_sys(err, SL_EDATA, errno, "reading %s at byte %llu", what, (unsigned long long)off + done);
        if (r == 0)
            return sl_err_set(err, SL_EDATA, "%s ends at byte %llu, expected %llu bytes from %llu on", what,
                              (unsigned long long)off + done, (unsigned long long)n, (unsigned long long)off);
        done += (uint64_t)r;
    }
    return SL_OK;
}

static int record_at(sl_packer *p, uint64_t i, uint64_t limit, const sl_intake_rec **rec, sl_err *err) {
    if (i < p->buf_first || i >= p->buf_first + p->buf_n) {
        uint64_t n = limit - i < READ_RECS ? limit - i : READ_RECS;
        p->buf_n = 0;
        int rc = pread_all(p->log, p->buf, n * SL_JREC, i * SL_JREC, p->path, err);
        if (rc) return rc;
        p->buf_first = i;
        p->buf_n = n;
    }
    const sl_intake_rec *r = &p->buf[i - p->buf_first];
    if (r->magic != SL_INTAKE_MAGIC || r->length != SL_JREC || r->crc != sl_crc32c(0, r, SL_JREC - 4))
        return sl_err_set(err, SL_EDATA, "%s: record %llu is damaged (magic, length or checksum)", p->path,
                          (unsigned long long)i);
    *rec = r;
    return SL_OK;
}

static int keep_row(sl_packer *p, const sl_intake_rec *r, sl_err *err) {
    if (p->n == p->cap) {
        uint32_t cap = p->cap ? p->cap * 2 : 64;
        sl_intake_rec *q = realloc(p->rows, (size_t)cap * sizeof *q);
        if (!q) return sl_err_set(err, SL_ETEMP, "packer: no memory for %u rows", cap);
        p->rows = q;
        p->cap = cap;
    }
    p->rows[p->n++] = *r;
    return SL_OK;
}

static int hand_out(sl_packer *p, uint64_t batch_no, sl_batch *b) {
    *b = (sl_batch){.batch_no = batch_no, .n_rows = p->n, .rows = p->rows};
    for (uint32_t i = 0; i < p->n; i++) {
        b->n_tokens += p->rows[i].T;
        b->string_bytes += p->rows[i].id_len;
    }
    p->handed = true;
    return 1;
}

static int check_row(const sl_packer *p, const sl_intake_rec *r, sl_err *err) {
    if (!p->pack.batch_tokens || !p->pack.max_rows)
        return sl_err_set(err, SL_EDATA, "%s: record %llu comes before a header", p->path, (unsigned long long)p->at);
    if (!r->T || r->T > INT32_MAX || r->id_len > 256 || r->data_len != (uint64_t)r->T * 5 + r->id_len)
        return sl_err_set(err, SL_EDATA, "%s: record %llu: %u tokens and %llu bytes do not belong together", p->path,
                          (unsigned long long)p->at, r->T, (unsigned long long)r->data_len);
    return SL_OK;
}

int sl_packer_next(sl_packer *p, uint64_t limit, sl_batch *b, sl_err *err) {
    if (p->handed) {
        p->n = 0;
        p->handed = false;
    }
    while (p->at < limit) {
        const sl_intake_rec *r = NULL;
        int rc = record_at(p, p->at, limit, &r, err);
        if (rc || !r) return rc;
        uint64_t no = p->pack.batch_no;
        if (r->kind == SL_IN_ROW) {
            if ((rc = check_row(p, r, err))) return rc;
            if (sl_pack_splits(&p->pack, r->T)) { /* the row is looked at again, for the next batch */
                sl_pack_close(&p->pack);
                return hand_out(p, no, b);
            }
            if ((rc = keep_row(p, r, err))) return rc;
            p->at++;
            if (sl_pack_add(&p->pack, r->T)) return hand_out(p, no, b);
            continue;
        }
        p->at++;
        if (r->kind == SL_IN_HEADER) {
            p->pack.batch_tokens = r->batch_tokens;
            p->pack.max_rows = r->max_batch_rows;
        }
        if ((r->kind == SL_IN_HEADER || r->kind == SL_IN_FLUSH) && sl_pack_close(&p->pack)) return hand_out(p, no, b);
    }
    return 0;
}

/* The row as it was accepted, its three parts into their places of the batch. Nothing is computed from bytes that are
 * not the ones that were acknowledged. */
static int read_row(const sl_packer *p, const sl_intake_rec *r, char *ids, char *mask, char *id, sl_err *err) {
    uint64_t T = r->T;
    int rc = pread_all(p->dat, ids, T * 4, r->data_off, "intake.dat", err);
    if (!rc) rc = pread_all(p->dat, mask, T, r->data_off + T * 4, "intake.dat", err);
    if (!rc) rc = pread_all(p->dat, id, r->id_len, r->data_off + T * 5, "intake.dat", err);
    if (rc || !r->data_sum) return rc;
    XXH3_state_t st;
    XXH3_64bits_reset(&st);
    XXH3_64bits_update(&st, ids, T * 4);
    XXH3_64bits_update(&st, mask, T);
    XXH3_64bits_update(&st, id, r->id_len);
    if (XXH3_64bits_digest(&st) == r->data_sum) return SL_OK;
    return sl_err_set(err, SL_EDATA,
                      "intake.dat: the %llu bytes at %llu do not match their checksum: the file was damaged after the "
                      "row was accepted; restore it, or see 'sluice verify'",
                      (unsigned long long)r->data_len, (unsigned long long)r->data_off);
}

uint64_t sl_packer_bytes(const sl_batch *b) {
    return sl_batch_bytes(b->n_rows, b->n_tokens, b->string_bytes);
}

int sl_packer_write(sl_packer *p, const sl_batch *b, void *slot, uint64_t cap, sl_desc_input *desc,
                    sl_packer_flags flags_of, void *arg, sl_err *err) {
    uint64_t need = sl_packer_bytes(b);
    if (need > cap || need > UINT32_MAX)
        return sl_err_set(err, SL_ECONFIG,
                          "batch %llu has %u rows, %u tokens and needs %llu bytes; a slot of the batch ring holds "
                          "%llu: the store was begun "
                          "with larger batches, set batch_tokens, max_batch_rows and max_length back to what they were",
                          (unsigned long long)b->batch_no, b->n_rows, b->n_tokens, (unsigned long long)need,
                          (unsigned long long)cap);
    char *base = slot;
    sl_batch_row *rows = slot;
    size_t ids = (size_t)b->n_rows * sizeof *rows, mask = ids + (size_t)b->n_tokens * 4, str = mask + b->n_tokens;
    uint32_t t0 = 0;
    memset(slot, 0, need); /* padding is part of the checksum */
    for (uint32_t i = 0; i < b->n_rows; i++) {
        const sl_intake_rec *r = &b->rows[i];
        rows[i] = (sl_batch_row){.seq = r->seq,
                                 .row = r->row,
                                 .dataset = r->dataset,
                                 .t0 = t0,
                                 .T = r->T,
                                 .flags = flags_of(arg, r),
                                 .id_off = (uint32_t)str,
                                 .id_len = r->id_len,
                                 .key = {r->key.w[0], r->key.w[1]},
                                 .mask_sum = r->mask_sum};
        int rc = read_row(p, r, base + ids + (size_t)t0 * 4, base + mask + t0, base + str, err);
        if (rc) return sl_err_wrap(err, "row %llu (seq %llu)", (unsigned long long)r->row, (unsigned long long)r->seq);
        t0 += r->T;
        str += r->id_len;
    }
    desc->batch_no = b->batch_no;
    desc->bytes = need;
    desc->n_rows = b->n_rows;
    desc->n_tokens = b->n_tokens;
    desc->crc = sl_crc32c(0, slot, need);
    return SL_OK;
}
