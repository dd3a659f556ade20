#include "stages/writer/xxh3.h"
#include "stages/writer/reader.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct recs {
    sl_commit_rec *v;
    uint64_t n, cap;
} recs;

struct sl_reader {
    char store[SL_PATH_MAX];
    sl_manifest m;
    sl_accepted *in;
    recs rows, rejects;
    sl_codec_ctx *ctx;
    sl_scratch scratch;
    uint8_t *block;
    uint64_t bytes;
    sl_window win; /* of a reader that reads ahead */
    bool shared;   /* rows and logs are another reader's */
    /* the shard or file opened last */
    sl_src src;
    sl_shard_head head;
    char open_name[SL_PATH_MAX + 300];
    uint32_t open_shard;
    uint64_t data_at;  /* layout files: where the tensors start */
    uint64_t file_row; /* layout files: index of the row whose file is open */
};

static int take(void *arg, const void *rec, sl_err *err) {
    sl_reader *r = arg;
    const sl_commit_rec *c = rec;
    recs *l = c->kind == SL_CM_COMMIT ? &r->rows : c->kind == SL_CM_REJECT ? &r->rejects : NULL;
    if (!l) return 0;
    if (l->n == l->cap) {
        uint64_t cap = l->cap ? l->cap * 2 : 1024;
        sl_commit_rec *p = realloc(l->v, cap * sizeof *p);
        if (!p) return sl_err_set(err, SL_ETEMP, "no memory for %" PRIu64 " rows of commit.log", cap);
        l->v = p;
        l->cap = cap;
    }
    l->v[l->n++] = *c;
    return 0;
}

static int by_seq(const void *a, const void *b) {
    const sl_commit_rec *x = a, *y = b;
    return x->seq < y->seq ? -1 : x->seq > y->seq;
}

int sl_reader_open(sl_reader **out, const char *store, sl_err *err) {
    sl_reader *r = calloc(1, sizeof *r);
    char path[SL_PATH_MAX + 32];
    uint64_t at = 0;
    if (!r) return sl_err_set(err, SL_ETEMP, "no memory");
    r->src.fd = -1;
    r->open_shard = SL_NO_SHARD;
    r->file_row = UINT64_MAX;
    int rc = snprintf(r->store, sizeof r->store, "%s", store) < (int)sizeof r->store
                 ? 0
                 : sl_err_set(err, SL_EUSAGE, "the path is too long");
    if (!rc) rc = sl_manifest_read(&r->m, store, err);
    if (!rc && (uint64_t)r->m.set.width * r->m.set.elem_size > SL_BLOCK_BYTES)
        rc = sl_err_set(err, SL_ECONFIG, "%s: width %u is not possible", store, r->m.set.width);
    if (!rc) rc = sl_accepted_new(&r->in, store, err);
    snprintf(path, sizeof path, "%s/commit.log", store);
    if (!rc) rc = sl_journal_follow(path, SL_COMMIT_MAGIC, &at, take, r, err);
    if (!rc) rc = sl_accepted_follow(r->in, err); /* after commit.log: every row in it is there */
    if (!rc) rc = sl_codec_ctx_new(&r->ctx, 1, err);
    if (!rc && !(r->block = aligned_alloc(64, SL_BLOCK_BYTES))) rc = sl_err_set(err, SL_ETEMP, "no memory");
    if (rc) {
        sl_reader_close(r);
        return rc;
    }
    if (r->rows.n) qsort(r->rows.v, r->rows.n, sizeof *r->rows.v, by_seq);
    if (r->rejects.n) qsort(r->rejects.v, r->rejects.n, sizeof *r->rejects.v, by_seq);
    *out = r;
    return 0;
}

int sl_reader_again(sl_reader **out, const sl_reader *of, sl_err *err) {
    sl_block b = {sl_store_block_rows(of->m.set.width, of->m.set.elem_size), of->m.set.width, of->m.set.elem_size};
    sl_reader *r = malloc(sizeof *r);
    if (!r) return sl_err_set(err, SL_ETEMP, "no memory");
    *r = (sl_reader){.m = of->m,
                     .in = of->in,
                     .rows = of->rows,
                     .rejects = of->rejects,
                     .shared = true,
                     .src.fd = -1,
                     .open_shard = SL_NO_SHARD,
                     .file_row = UINT64_MAX};
    memcpy(r->store, of->store, sizeof r->store);
    int rc = sl_codec_ctx_new(&r->ctx, 1, err);
    if (!rc && !(r->block = aligned_alloc(64, SL_BLOCK_BYTES))) rc = sl_err_set(err, SL_ETEMP, "no memory");
    if (!rc) rc = sl_window_open(&r->win, sl_codec_bound(b) + (4u << 20), err);
    if (rc) {
        sl_reader_close(r);
        return rc;
    }
    *out = r;
    return 0;
}

void sl_reader_close(sl_reader *r) {
    if (!r) return;
    if (r->src.fd >= 0) close(r->src.fd);
    sl_codec_ctx_free(r->ctx);
    sl_window_close(&r->win);
    free(r->scratch.p);
    free(r->block);
    if (r->shared) {
        free(r);
        return;
    }
    sl_accepted_free(r->in);
    free(r->rows.v);
    free(r->rejects.v);
    free(r);
}

const sl_manifest *sl_reader_manifest(const sl_reader *r) {
    return &r->m;
}
const sl_accepted *sl_reader_accepted(const sl_reader *r) {
    return r->in;
}
uint64_t sl_reader_rows(const sl_reader *r) {
    return r->rows.n;
}
const sl_commit_rec *sl_reader_row(const sl_reader *r, uint64_t i) {
    return &r->rows.v[i];
}
uint64_t sl_reader_rejects(const sl_reader *r) {
    return r->rejects.n;
}
const sl_commit_rec *sl_reader_reject(const sl_reader *r, uint64_t i) {
    return &r->rejects.v[i];
}
uint64_t sl_reader_bytes_read(const sl_reader *r) {
    return r->bytes;
}

uint32_t sl_reader_part(const sl_reader *r, const sl_commit_rec *c) {
    const sl_accepted_row *a = sl_accepted_at(r->in, c->seq);
    return a ? a->part : 0;
}

const char *sl_reader_dataset(const sl_reader *r, const sl_commit_rec *c) {
    const char *n = sl_accepted_name(r->in, c->dataset);
    return n ? n : "";
}

int64_t sl_reader_find(const sl_reader *r, const char *dataset, uint64_t row, uint32_t part, sl_err *err) {
    for (uint64_t i = 0; i < r->rows.n; i++) {
        const sl_commit_rec *c = &r->rows.v[i];
        if (c->row == row && sl_reader_part(r, c) == part &&
            (dataset ? !strcmp(sl_reader_dataset(r, c), dataset) : !c->dataset))
            return (int64_t)i;
    }
    for (uint64_t i = 0; i < r->rejects.n; i++) {
        const sl_commit_rec *c = &r->rejects.v[i];
        if (c->row == row && sl_reader_part(r, c) == part &&
            (dataset ? !strcmp(sl_reader_dataset(r, c), dataset) : !c->dataset))
            return sl_err_set(err, SL_EUSAGE, "row %" PRIu64 " was rejected (%s): look in %s/quarantine", row,
                              sl_verdict_name((sl_verdict)c->verdict), r->store);
    }
    return sl_err_set(err, SL_EUSAGE, "%s has no row %" PRIu64 "%s%s%s; it holds %" PRIu64 " rows", r->store, row,
                      dataset ? " of data set '" : "", dataset ? dataset : "", dataset ? "'" : "", r->rows.n);
}

void sl_reader_path(const sl_reader *r, const sl_commit_rec *c, char *buf, size_t cap) {
    char a[160], b[64];
    if (r->m.layout == SL_LAYOUT_FILES) {
        sl_store_dataset_dir(a, sizeof a, c->dataset, sl_reader_dataset(r, c));
        sl_store_row_name(b, sizeof b, c->row, sl_reader_part(r, c));
        snprintf(buf, cap, "%s/hidden_states/%s%s%s.safetensors", r->store, a, *a ? "/" : "", b);
        return;
    }
    sl_store_shard_name(b, sizeof b, c->shard, 0);
    snprintf(buf, cap, "%s/shards/%s", r->store, b);
    if (access(buf, F_OK)) {
        sl_store_shard_name(b, sizeof b, c->shard, 1);
        snprintf(buf, cap, "%s/shards/%s", r->store, b);
    }
}

static int open_path(sl_reader *r, sl_err *err) {
    struct stat st;
    if (r->src.fd >= 0) close(r->src.fd);
    r->open_shard = SL_NO_SHARD;
    r->file_row = UINT64_MAX;
    r->win.have = 0;
    r->src = (sl_src){.fd = -1, .name = r->open_name, .win = r->win.p ? &r->win : NULL};
    if (r->win.p) r->src.fd = open(r->open_name, O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (r->src.fd < 0) r->src.fd = open(r->open_name, O_RDONLY | O_CLOEXEC);
    if (r->src.fd < 0 || fstat(r->src.fd, &st)) return sl_err_sys(err, SL_EDATA, errno, "%s", r->open_name);
    r->src.len = (uint64_t)st.st_size;
    return 0;
}

static int need_shard(sl_reader *r, const sl_commit_rec *c, sl_err *err) {
    if (r->open_shard == c->shard) return 0;
    sl_reader_path(r, c, r->open_name, sizeof r->open_name);
    int rc = open_path(r, err);
    if (!rc) rc = sl_shard_open(&r->src, &r->head, err);
    if (rc) return rc;
    if (r->head.n_states != r->m.set.n || r->head.width != r->m.set.width || r->head.elem_size != r->m.set.elem_size ||
        r->head.shard != c->shard)
        return sl_err_set(err, SL_EDATA, "%s: %u states of width %u in shard %u, the manifest says %u of %u",
                          r->open_name, r->head.n_states, r->head.width, r->head.shard, r->m.set.n, r->m.set.width);
    r->open_shard = c->shard;
    return 0;
}

/* Header of a layout file: it is a function of logs and manifest, so it must be, byte by byte, what we would write. */
static int need_file(sl_reader *r, uint64_t i, sl_err *err) {
    const sl_commit_rec *c = &r->rows.v[i];
    char id[257];
    if (r->file_row == i) return 0;
    const sl_accepted_row *a = sl_accepted_at(r->in, c->seq);
    sl_reader_path(r, c, r->open_name, sizeof r->open_name);
    int rc = open_path(r, err);
    if (rc) return rc;
    if (!a || a->T != c->T)
        return sl_err_set(err, SL_EDATA, "row %" PRIu64 " is in commit.log with %u tokens, but not so in intake.log",
                          c->row, c->T);
    if ((rc = sl_reader_meta(r, i, NULL, NULL, id, err))) return rc;
    sl_st_row row = {.row = c->row,
                     .part = a->part,
                     .T = c->T,
                     .mask_sum = c->mask_sum,
                     .id = id,
                     .id_len = a->id_len,
                     .dataset = sl_reader_dataset(r, c),
                     .nll = (double)c->nll};
    uint64_t len, data;
    char *want = sl_st_header(&r->m.set, &row, &len, &data), *got = malloc(len ? len : 1);
    if (!want || !got) rc = sl_err_set(err, SL_ETEMP, "no memory");
    if (!rc && r->src.len != len + data)
        rc =
            sl_err_set(err, SL_EDATA, "%s: %" PRIu64 " bytes, expected %" PRIu64, r->open_name, r->src.len, len + data);
    if (!rc) rc = sl_src_read(&r->src, 0, got, len, err);
    if (!rc && memcmp(want, got, len))
        rc = sl_err_set(err, SL_EDATA, "%s: the header is not that of row %" PRIu64 " with these logs", r->open_name,
                        c->row);
    free(want);
    free(got);
    if (rc) return rc;
    r->data_at = len;
    r->file_row = i;
    return 0;
}

/* ids, mask and id string as they were accepted. */
static int meta_from_intake(sl_reader *r, const sl_commit_rec *c, int32_t *ids, uint8_t *mask, char *id, sl_err *err) {
    char path[SL_PATH_MAX + 32];
    struct stat st;
    const sl_accepted_row *a = sl_accepted_at(r->in, c->seq);
    if (!a || a->T != c->T || a->id_len > 256 || a->data_len < 5ull * a->T + a->id_len)
        return sl_err_set(err, SL_EDATA, "row %" PRIu64 " (seq %" PRIu64 ") is not in intake.log with %u tokens",
                          c->row, c->seq, c->T);
    snprintf(path, sizeof path, "%s/intake.dat", r->store);
    sl_src s = {.fd = open(path, O_RDONLY | O_CLOEXEC), .name = path};
    if (s.fd < 0 || fstat(s.fd, &st)) {
        int e = errno;
        if (s.fd >= 0) close(s.fd);
        return sl_err_sys(err, SL_EDATA, e, "%s", path);
    }
    s.len = (uint64_t)st.st_size;
    int rc = ids ? sl_src_read(&s, a->data_off, ids, 4ull * a->T, err) : 0;
    if (!rc && mask) rc = sl_src_read(&s, a->data_off + 4ull * a->T, mask, a->T, err);
    if (!rc && id) rc = sl_src_read(&s, a->data_off + 5ull * a->T, id, a->id_len, err);
    if (id) id[rc ? 0 : a->id_len] = 0;
    close(s.fd);
    return rc;
}

int sl_reader_meta(sl_reader *r, uint64_t i, int32_t *ids, uint8_t *mask, char *id, sl_err *err) {
    const sl_commit_rec *c = &r->rows.v[i];
    if (r->m.layout == SL_LAYOUT_FILES) return meta_from_intake(r, c, ids, mask, id, err);
    sl_row_frames f;
    sl_meta_head mh;
    sl_row_meta m;
    int rc = need_shard(r, c, err);
    if (!rc) rc = sl_row_open(&f, &r->src, &r->head, c->off, c->len, c->T, err);
    if (rc) return rc;
    rc = sl_row_meta_read(&r->src, &f.meta, &mh, &m, err);
    sl_row_close(&f);
    if (rc) return rc;
    if (ids) memcpy(ids, m.ids, 4ull * c->T);
    if (mask) memcpy(mask, m.mask, c->T);
    if (id) snprintf(id, 257, "%s", m.id);
    const char *set = sl_accepted_name(r->in, c->dataset); /* NULL: intake.log is lost */
    if (set && strcmp(set, m.name))
        rc = sl_err_set(err, SL_EDATA, "%s: row %" PRIu64 " is of data set '%s', intake.log says '%s'", r->open_name,
                        c->row, m.name, set);
    sl_row_meta_free(&m);
    return rc;
}

static int file_state(sl_reader *r, uint64_t i, uint32_t k, uint32_t t0, uint32_t rows, uint8_t *dst, sl_err *err) {
    const sl_commit_rec *c = &r->rows.v[i];
    const sl_capture_set *s = &r->m.set;
    uint64_t rb = (uint64_t)s->width * s->elem_size, K = sl_capture_stacked(s);
    int rc = need_file(r, i, err);
    if (rc) return rc;
    if (k >= s->n || t0 > c->T || rows > c->T - t0)
        return sl_err_set(err, SL_EUSAGE, "state %u, tokens %u+%u: the row has %u states and %u tokens", k, t0, rows,
                          s->n, c->T);
    r->bytes += rows * rb;
    if (k == K) return sl_src_read(&r->src, r->data_at + (c->T * K + t0) * rb, dst, rows * rb, err);
    for (uint32_t t = 0; t < rows && !rc; t++)
        rc = sl_src_read(&r->src, r->data_at + ((uint64_t)(t0 + t) * K + k) * rb, dst + t * rb, rb, err);
    return rc;
}

int sl_reader_state(sl_reader *r, uint64_t i, uint32_t k, uint32_t t0, uint32_t rows, void *dst, sl_err *err) {
    const sl_commit_rec *c = &r->rows.v[i];
    if (r->m.layout == SL_LAYOUT_FILES) return file_state(r, i, k, t0, rows, dst, err);
    sl_row_frames f;
    int rc = need_shard(r, c, err);
    if (!rc) rc = sl_row_open(&f, &r->src, &r->head, c->off, c->len, c->T, err);
    if (rc) return rc;
    rc = sl_row_state(&f, &r->src, &r->head, r->ctx, k, t0, rows, dst, &r->scratch, &r->bytes, err);
    sl_row_close(&f);
    return rc;
}

/* ---- the whole row ---- */

/* Elements whose exponent is all ones, counted in 16-bit lanes that are emptied before they are full. */
static inline __attribute__((always_inline)) uint64_t count_16(const uint16_t *p, uint64_t n) {
    uint64_t sum = 0;
    for (uint64_t at = 0; at < n; at += 16384) {
        uint64_t e = n - at < 16384 ? n : at + 16384;
        uint16_t c = 0;
        for (uint64_t i = at; i < e; i++) c = (uint16_t)(c + ((p[i] & 0x7f80) == 0x7f80));
        sum += c;
    }
    return sum;
}
#if defined(__x86_64__)
__attribute__((target("avx2"))) static uint64_t count_16_avx2(const uint16_t *p, uint64_t n) {
    return count_16(p, n);
}
#endif

static uint64_t count_nonfinite(const void *p, uint64_t bytes, uint32_t elem) {
    uint64_t n = 0;
    if (elem == 2) {
#if defined(__x86_64__)
        if (__builtin_cpu_supports("avx2")) return count_16_avx2(p, bytes / 2);
#endif
        return count_16(p, bytes / 2);
    }
    for (uint64_t i = 0; i < bytes / 4; i++) n += (((const uint32_t *)p)[i] & 0x7f800000) == 0x7f800000;
    return n;
}

/* Frame i of the row: whole, where it must be behind byte *at of the row, and with zeros around it. Moves *at behind
 * it. From front to back, so that a window never has to go back; what the payload says comes first in the report. */
static int check_frame(sl_reader *r, const sl_commit_rec *c, const sl_row_frames *f, uint32_t i, uint64_t *at,
                       uint64_t *sum, uint64_t *bad, sl_err *err) {
    sl_frame_head h;
    sl_err gap = {0};
    const void *states;
    uint64_t place = c->off + *at;
    int gap_rc = 0;
    if (f->rel[i] < f->len && !sl_frame_open(&r->src, &r->head, f->off + f->rel[i], &h, NULL)) {
        place = sl_frame_place(c->off + *at, h.codec, h.enc_len);
        if (h.off != place)
            gap_rc = sl_err_set(&gap, SL_EDATA, "%s: frame %u is not where the one before ends", r->open_name, i);
        else
            gap_rc = sl_zeros(&r->src, c->off + *at, place, &gap);
    }
    int rc = sl_row_block_view(f, &r->src, &r->head, r->ctx, i, r->block, &states, &h, &r->scratch, err);
    if (rc) { /* name the state even when its header cannot be read */
        sl_err_wrap(err, "H[%u]", r->head.states[i / (f->n_frames / r->head.n_states)].hidx);
        return rc;
    }
    *sum = h.raw_sum;
    *bad += count_nonfinite(states, h.raw_len, h.elem_size);
    r->bytes += h.enc_len;
    *at = place - c->off + sl_frame_span(h.enc_len);
    rc = gap_rc;
    if (rc && err) *err = gap;
    if (!rc) rc = sl_frame_padding(&r->src, h.off, h.enc_len, err);
    if (rc) sl_err_wrap(err, "row %" PRIu64 " H[%u]", c->row, h.hidx);
    return rc;
}

/* Where frame i - 1 of the row ends, from the start of the row. */
static int frame_before(sl_reader *r, const sl_row_frames *f, uint32_t i, uint64_t *at, sl_err *err) {
    sl_frame_head h = f->meta;
    *at = 0;
    if (i && f->rel[i - 1] >= f->len)
        return sl_err_set(err, SL_EDATA, "%s: row %" PRIu64 ": frame %u lies outside the row", r->open_name,
                          f->meta.row, i - 1);
    int rc = i ? sl_frame_open(&r->src, &r->head, f->off + f->rel[i - 1], &h, err) : 0;
    if (rc == 1) rc = sl_err_set(err, SL_EDATA, "%s: row %" PRIu64 " lacks frame %u", r->open_name, f->meta.row, i - 1);
    if (!rc) *at = (i ? f->rel[i - 1] : 0) + sl_frame_span(h.enc_len);
    return rc;
}

static bool same_nll(float a, float b) {
    return a == b || (isnan(a) && isnan(b));
}

/* What is checked once a row of a shard, whose last state ends at byte `at` of it. */
static int check_ends(sl_reader *r, const sl_commit_rec *c, const sl_row_frames *f, uint64_t at, sl_err *err) {
    uint64_t end_len = sizeof(sl_end_head) + 8ull * f->n_frames;
    int rc = sl_frame_padding(&r->src, c->off, f->meta.enc_len, err);
    if (!rc && at + sl_frame_span(end_len) != c->len)
        rc = sl_err_set(err, SL_EDATA, "%s: row %" PRIu64 ": END is not behind the last state", r->open_name, c->row);
    if (!rc) rc = sl_frame_padding(&r->src, c->off + at, end_len, err);
    if (!rc && f->states_sum != c->states_sum)
        rc = sl_err_set(err, SL_EDATA, "%s: row %" PRIu64 ": END and commit.log have different states_sum",
                        r->open_name, c->row);
    if (!rc && (f->meta.seq != c->seq || f->meta.row != c->row || f->meta.dataset != c->dataset ||
                memcmp(f->meta.key, c->key.w, sizeof c->key.w)))
        rc = sl_err_set(err, SL_EDATA,
                        "%s: the row at %" PRIu64 " is row %" PRIu64 " of %u, commit.log says %" PRIu64 " of %u",
                        r->open_name, c->off, f->meta.row, f->meta.dataset, c->row, c->dataset);
    if (!rc && (f->mh.mask_sum != c->mask_sum || !same_nll((float)f->mh.nll, c->nll)))
        rc = sl_err_set(err, SL_EDATA,
                        "%s: row %" PRIu64 ": META and commit.log have different mask sums (%u, %u) or NLL",
                        r->open_name, c->row, f->mh.mask_sum, c->mask_sum);
    return rc;
}

/* The window may read on to byte `to` of the shard. */
static void read_ahead(sl_reader *r, uint64_t to) {
    if (r->src.win) r->src.win->limit = to;
}

static int check_shard_row(sl_reader *r, const sl_commit_rec *c, uint32_t f0, uint32_t f1, uint64_t *sums,
                           uint64_t *bad, sl_err *err) {
    sl_row_frames f;
    uint64_t at;
    read_ahead(r, 0);
    int rc = need_shard(r, c, err);
    /* A row that fits into the window is read at once; of a longer one first its two ends. */
    bool whole = r->src.win && c->len + 4096 <= r->src.win->cap;
    if (!rc && whole) read_ahead(r, c->off + c->len);
    r->win.ahead = whole ? r->win.cap : SL_BLOCK_BYTES + 16384; /* else frame by frame, with the head of the next */
    if (!rc) rc = sl_row_open(&f, &r->src, &r->head, c->off, c->len, c->T, err);
    if (rc) return rc;
    rc = frame_before(r, &f, f0, &at, err);
    read_ahead(r, f1 < f.n_frames && f.rel[f1] < c->len ? c->off + f.rel[f1] : c->off + c->len);
    for (uint32_t i = f0; !rc && i < f1 && i < f.n_frames; i++)
        rc = check_frame(r, c, &f, i, &at, &sums[i - f0], bad, err);
    read_ahead(r, 0);
    if (!rc && f1 >= f.n_frames) rc = check_ends(r, c, &f, at, err);
    sl_row_close(&f);
    return rc;
}

static int check_file_row(sl_reader *r, uint64_t i, uint64_t *sums, uint64_t *bad, sl_err *err) {
    const sl_commit_rec *c = &r->rows.v[i];
    const sl_capture_set *s = &r->m.set;
    uint32_t br = sl_store_block_rows(s->width, s->elem_size), blocks = (c->T - 1) / br + 1;
    uint64_t rb = (uint64_t)s->width * s->elem_size, K = sl_capture_stacked(s),
             per = K * rb > 0 && SL_BLOCK_BYTES / (K * rb) ? SL_BLOCK_BYTES / (K * rb) : 1;
    XXH3_state_t *st = aligned_alloc(64, s->n * sizeof *st);
    uint8_t *buf = malloc(per * K * rb > SL_BLOCK_BYTES ? per * K * rb : SL_BLOCK_BYTES);
    read_ahead(r, UINT64_MAX);
    int rc = st && buf ? need_file(r, i, err) : sl_err_set(err, SL_ETEMP, "no memory");
    for (uint32_t t = 0; !rc && t < c->T;) { /* tokens in groups that end with their block */
        uint32_t n = (uint32_t)(br - t % br < per ? br - t % br : per);
        if (n > c->T - t) n = c->T - t;
        rc = sl_src_read(&r->src, r->data_at + t * K * rb, buf, n * K * rb, err);
        if (rc) break;
        *bad += count_nonfinite(buf, n * K * rb, s->elem_size);
        for (uint32_t k = 0; k < K; k++) {
            if (t % br == 0) XXH3_64bits_reset(&st[k]);
            for (uint32_t j = 0; j < n; j++) XXH3_64bits_update(&st[k], buf + (j * K + k) * rb, rb);
            sums[(uint64_t)k * blocks + t / br] = XXH3_64bits_digest(&st[k]);
        }
        t += n;
    }
    for (uint32_t b = 0; !rc && K < s->n && b < blocks; b++) {
        uint32_t n = c->T - b * br < br ? c->T - b * br : br;
        rc = sl_src_read(&r->src, r->data_at + (c->T * K + (uint64_t)b * br) * rb, buf, n * rb, err);
        if (rc) break;
        *bad += count_nonfinite(buf, n * rb, s->elem_size);
        sums[K * blocks + b] = XXH3_64bits(buf, n * rb);
    }
    r->bytes += (uint64_t)c->T * s->n * rb;
    free(st);
    free(buf);
    return rc;
}

/* ids and mask that are stored beside the states, against those that were accepted. */
static int check_ids(sl_reader *r, uint64_t i, sl_err *err) {
    const sl_commit_rec *c = &r->rows.v[i];
    bool files = r->m.layout == SL_LAYOUT_FILES;
    uint64_t T = c->T, at = r->data_at + T * r->m.set.n * r->m.set.width * r->m.set.elem_size;
    int32_t *a = malloc(T * 4), *b = malloc(T * 4);
    uint8_t *ma = malloc(T), *mb = malloc(T);
    int64_t *w = malloc(T * 8);
    char ia[257], ib[257];
    int rc = a && b && ma && mb && w ? 0 : sl_err_set(err, SL_ETEMP, "no memory");
    if (!rc) rc = meta_from_intake(r, c, a, ma, ia, err);
    if (!rc && files) {
        rc = sl_src_read(&r->src, at, w, T * 8, err);
        if (!rc) rc = sl_src_read(&r->src, at + T * 8, mb, T, err);
        for (uint64_t t = 0; !rc && t < T; t++)
            if (w[t] != a[t])
                rc = sl_err_set(err, SL_EDATA, "%s: token_ids[%" PRIu64 "] is %" PRId64 ", %d was accepted",
                                r->open_name, t, w[t], a[t]);
    } else if (!rc) {
        rc = sl_reader_meta(r, i, b, mb, ib, err);
        if (!rc && memcmp(a, b, T * 4))
            rc = sl_err_set(err, SL_EDATA, "%s: row %" PRIu64 ": token ids are not those that were accepted",
                            r->open_name, c->row);
    }
    if (!rc && !files && strcmp(ia, ib))
        rc = sl_err_set(err, SL_EDATA, "%s: row %" PRIu64 ": the id is '%s', '%s' was accepted", r->open_name, c->row,
                        ib, ia);
    if (!rc && memcmp(ma, mb, T))
        rc = sl_err_set(err, SL_EDATA, "%s: row %" PRIu64 ": the loss mask is not that which was accepted",
                        r->open_name, c->row);
    free(a);
    free(b);
    free(ma);
    free(mb);
    free(w);
    return rc;
}

uint32_t sl_reader_blocks(const sl_reader *r, uint64_t i) {
    const sl_capture_set *s = &r->m.set;
    uint32_t T = r->rows.v[i].T;
    return T ? s->n * ((T - 1) / sl_store_block_rows(s->width, s->elem_size) + 1) : 0;
}

int sl_reader_check(sl_reader *r, uint64_t i, uint32_t b0, uint32_t b1, uint64_t *sums, uint64_t *nonfinite,
                    sl_err *err) {
    const sl_commit_rec *c = &r->rows.v[i];
    *nonfinite = 0;
    if (!c->T) return sl_err_set(err, SL_EDATA, "row %" PRIu64 " has no tokens in commit.log", c->row);
    bool files = r->m.layout == SL_LAYOUT_FILES;
    if (files && b0) return 0; /* a file is one piece: all of it was done with its first block */
    int rc = files ? check_file_row(r, i, sums, nonfinite, err) : check_shard_row(r, c, b0, b1, sums, nonfinite, err);
    if (!rc && !b0 && sl_accepted_rows(r->in)) rc = check_ids(r, i, err);
    return rc;
}
