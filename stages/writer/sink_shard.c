/* Shards: frames are appended to write buffers in order and written with several writes in flight. Compression jobs run
 * in the pool; their slots are queued in frame order and emitted in that order, across rows, so that short rows keep it
 * busy. */
#include "ipc/file.h"
#include "ipc/sum64.h"
#include "stages/writer/xxh3.h"
#include "stages/writer/sink_int.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum {
    SUM_STEP = 32u << 10,  /* sum one way, then the other: likewise */
    HASH_STEP = 4u << 10,  /* copy, then hash, while it is in the nearest cache: the memory is read once */
    PREFETCH_AHEAD = 1024, /* bytes; the hardware's own prefetch stops at every page and at every turn to the hash */
};
#define ALLOC_STEP (256ull << 20)

static uint64_t up(uint64_t v, uint64_t a) {
    return (v + a - 1) / a * a;
}

/* ---- bytes into buffers ---- */

/* Room for [.., end) of the shard: allocated ahead in large steps, so that writes extend nothing. */
static int allocate(sl_sink *s, uint64_t end, sl_err *err) {
    shard *h = &s->sh;
    while (end > h->alloc) {
        uint64_t need = up(end - h->alloc, SL_SHARD_ALIGN), step = ALLOC_STEP;
        uint64_t left = s->cfg.shard_bytes > h->alloc ? s->cfg.shard_bytes - h->alloc : 0;
        if (step > left) step = up(left, SL_SHARD_ALIGN);
        if (step < need || sl_sink_look_free(s) < s->cfg.reserve_bytes + step) step = need;
        int rc = sl_sink_wait_room(s, step, err);
        if (rc) return rc;
        if (!fallocate(h->fd, 0, (off_t)h->alloc, (off_t)step)) {
            h->alloc += step;
        } else if (errno == EOPNOTSUPP || errno == ENOSYS) {
            sl_sink_note(s, 0, "the file system cannot preallocate: shards grow as they are written");
            h->alloc = UINT64_MAX;
        } else if (errno == ENOSPC || errno == EDQUOT) {
            if ((rc = sl_sink_refused(s, step, err))) return rc;
        } else if (errno != EINTR) {
            return sl_err_sys(err, SL_EINTERNAL, errno, "cannot allocate room in shard %u", h->no);
        }
    }
    return 0;
}

static int submit(sl_sink *s, unsigned idx, uint32_t len, uint64_t off, sl_err *err) {
    int rc = allocate(s, off + len, err);
    if (rc) return rc;
#if defined(__x86_64__)
    _mm_sfence(); /* streamed stores are in memory before the device is told to read */
#endif
    s->open->writes++;
    sl_wio_write(s->wio, idx, len, off, s->open);
    return 0;
}

static int buffer_done(sl_sink *s, uint32_t len, sl_err *err) {
    shard *h = &s->sh;
    int rc = 0;
    if (h->hold)
        h->held[h->n_held++] = (struct held){h->buf_idx, len, h->buf_off};
    else
        rc = submit(s, h->buf_idx, len, h->buf_off, err);
    h->buf = NULL;
    return rc;
}

/* All writes that may be are in flight: wait for one. */
static int wait_write(sl_sink *s, sl_err *err) {
    int rc = 0;
    if (s->cfg.on_wait) s->cfg.on_wait(s->cfg.arg, true);
    if (sl_wio_stalled(s->wio)) {
        rc = sl_sink_refused(s, (uint64_t)sl_wio_stalled(s->wio) * s->cfg.buf_bytes, err);
        if (!rc) sl_wio_retry(s->wio);
    }
    if (!rc) sl_wio_reap(s->wio, true);
    if (!rc && s->fatal) rc = sl_err_sys(err, SL_EINTERNAL, -s->fatal, "writing shard %u failed", s->sh.no);
    if (s->cfg.on_wait) s->cfg.on_wait(s->cfg.arg, false);
    return rc;
}

static int buffer_get(sl_sink *s, sl_err *err) {
    shard *h = &s->sh;
    int rc = 0;
    while (!rc && !(h->buf = sl_wio_buf(s->wio, &h->buf_idx))) rc = wait_write(s, err);
    h->buf_at = 0;
    h->buf_off = h->off;
    return rc;
}

/* The write buffers are read next by the device, not by us: stores that go past the cache save the read of each line
 * before it is overwritten (a third of the copy's memory traffic). Whole steps to aligned places only; the rest is
 * memcpy. */
#if defined(__x86_64__)
__attribute__((target("avx2"))) static void stream_copy(uint8_t *d, const uint8_t *s, uint32_t n) {
    for (uint32_t i = 0; i < n; i += 64) {
        /* a hint: an address behind the end does no harm */
        _mm_prefetch((const char *)((uintptr_t)s + i + PREFETCH_AHEAD), _MM_HINT_T0);
        __m256i a = _mm256_loadu_si256((const __m256i *)(s + i)), b = _mm256_loadu_si256((const __m256i *)(s + i + 32));
        _mm256_stream_si256((__m256i *)(d + i), a);
        _mm256_stream_si256((__m256i *)(d + i + 32), b);
    }
}
#endif

static void copy_out(uint8_t *d, const uint8_t *s, uint32_t n) {
#if defined(__x86_64__)
    if (n >= 1024 && !((uintptr_t)d & 63) && __builtin_cpu_supports("avx2")) {
        uint32_t m = n & ~63u;
        stream_copy(d, s, m);
        d += m;
        s += m;
        n -= m;
    }
#endif
    memcpy(d, s, n);
}

/* Copy n bytes behind what is there (p NULL: zeros), hashing on the way when st is given. */
static int append(sl_sink *s, const void *p, uint64_t n, XXH3_state_t *st, sl_err *err) {
    shard *h = &s->sh;
    const uint8_t *src = p;
    while (n) {
        int rc = h->buf ? 0 : buffer_get(s, err);
        if (rc) return rc;
        uint32_t m = s->cfg.buf_bytes - h->buf_at, lim = st ? HASH_STEP : m;
        if (m > lim) m = lim;
        if (m > n) m = (uint32_t)n;
        if (src) {
            copy_out(h->buf + h->buf_at, src, m);
            if (st) XXH3_64bits_update(st, src, m);
            src += m;
        } else {
            memset(h->buf + h->buf_at, 0, m);
        }
        h->buf_at += m;
        h->off += m;
        n -= m;
        if (h->buf_at == s->cfg.buf_bytes && (rc = buffer_done(s, h->buf_at, err))) return rc;
    }
    return 0;
}

/* A group starts on a boundary, in a buffer of its own. */
static int start_group(sl_sink *s, sl_err *err) {
    shard *h = &s->sh;
    if (s->open->shard_data) return 0;
    h->off = up(h->off, SL_SHARD_ALIGN);
    s->open->shard_data = true;
    if (h->off) return 0;
    sl_shard_head *sh = calloc(1, sizeof *sh);
    if (!sh) return sl_err_set(err, SL_ETEMP, "no memory for a shard header");
    const sl_capture_set *c = &s->cfg.manifest.set;
    *sh = (sl_shard_head){.magic = SL_SHARD_MAGIC,
                          .version = SL_STORE_VERSION,
                          .shard = h->no,
                          .width = c->width,
                          .elem_size = c->elem_size,
                          .n_states = c->n,
                          .n_layers = c->n_layers};
    memcpy(sh->model, c->model, sizeof sh->model);
    for (uint32_t k = 0; k < c->n; k++) {
        sh->states[k].hidx = sl_capture_label(c, k);
        sh->states[k].final_norm = c->v[k].final_norm;
    }
    sh->crc = sl_crc32c(0, sh, sizeof *sh - 4);
    int rc = append(s, sh, sizeof *sh, NULL, err);
    free(sh);
    return rc;
}

/* ---- frames ---- */

static sl_frame_head head_of(const sl_sink *s, const sl_row_in *r, sl_frame_kind kind, uint64_t len) {
    const sl_capture_set *c = &s->cfg.manifest.set;
    return (sl_frame_head){.magic = SL_FRAME_MAGIC,
                           .version = SL_STORE_VERSION,
                           .kind = (uint8_t)kind,
                           .elem_size = (uint8_t)c->elem_size,
                           .off = s->sh.off,
                           .seq = r->seq,
                           .row = r->row,
                           .dataset = r->dataset,
                           .part = r->part,
                           .n_states = (uint16_t)c->n,
                           .T = r->T,
                           .width = c->width,
                           .raw_len = len,
                           .enc_len = len,
                           .key = {r->key.w[0], r->key.w[1]}};
}

static int frame_bytes(sl_sink *s, sl_frame_head *f, const void *const *part, const uint64_t *len, int n, sl_err *err) {
    XXH3_state_t st;
    XXH3_64bits_reset(&st);
    for (int i = 0; i < n; i++) XXH3_64bits_update(&st, part[i], len[i]);
    f->raw_sum = f->enc_sum = XXH3_64bits_digest(&st);
    f->crc = sl_crc32c(0, f, sizeof *f - 4);
    int rc = append(s, f, sizeof *f, NULL, err);
    for (int i = 0; !rc && i < n; i++) rc = append(s, part[i], len[i], NULL, err);
    return rc ? rc : append(s, NULL, sl_frame_span(f->enc_len) - sizeof *f - f->enc_len, NULL, err);
}

static int emit_meta(sl_sink *s, shard_row *row, sl_err *err) {
    const sl_row_in *r = &row->r;
    sl_meta_head m = {.id_len = r->id_len,
                      .name_len = (uint32_t)strlen(r->name),
                      .mask_sum = r->mask_sum,
                      .nll_tokens = r->nll_tokens,
                      .nll = r->nll,
                      .block_rows = s->block_rows,
                      .n_frames = row->n_frames};
    const void *part[] = {&m, r->ids, r->mask, r->id, r->name};
    uint64_t len[] = {sizeof m, 4ull * r->T, r->T, r->id_len, m.name_len};
    row->off = s->sh.off;
    sl_frame_head f = head_of(s, r, SL_FR_META, len[0] + len[1] + len[2] + len[3] + len[4]);
    return frame_bytes(s, &f, part, len, 5, err);
}

static int emit_end(sl_sink *s, shard_row *row, sl_err *err) {
    if (row->r.summed && row->row_sum != row->r.sum) return sl_sink_changed(s, &row->r, row->row_sum, err);
    sl_end_head e = {.states_sum = XXH3_64bits(row->sums, 8ull * row->n_frames), .n_frames = row->n_frames};
    const void *part[] = {&e, row->rel};
    uint64_t len[] = {sizeof e, 8ull * row->n_frames};
    sl_frame_head f = head_of(s, &row->r, SL_FR_END, len[0] + len[1]);
    int rc = frame_bytes(s, &f, part, len, 2, err);
    sl_commit_rec *rec = &s->open->recs[row->rec];
    rec->shard = s->sh.no;
    rec->off = row->off;
    rec->len = s->sh.off - row->off;
    rec->raw_bytes = row->raw_bytes;
    rec->states_sum = e.states_sum;
    return rc;
}

/* ---- straight from the rings ---- */

/* Tokens [t, ..) of the row: n bytes at p, summed for the comparison with what was validated. */
static void sum_states(const sl_sink *s, slot *q, const uint8_t *p, uint64_t n, uint32_t t) {
    uint64_t rb = sl_sink_state_bytes(s);
    if (q->row->r.summed) sl_sum_states(p, n / rb, rb, t, &q->a, &q->b);
}

/* The part of piece i that lies in the block: its bytes in *p, how many. */
static uint64_t piece_of(const sl_sink *s, const slot *q, uint32_t i, const uint8_t **p) {
    const sl_piece *x = &q->row->r.pieces[i];
    uint64_t rb = sl_sink_state_bytes(s);
    uint32_t a = x->t0 > q->t0 ? x->t0 : q->t0, b = x->t0 + x->rows;
    if (b > q->t0 + q->rows) b = q->t0 + q->rows;
    if (a >= b) return 0;
    *p = (const uint8_t *)x->p + (uint64_t)(a - x->t0) * rb;
    return (b - a) * rb;
}

/* Whether the file takes the block's pieces as they lie in memory: each starts where the device can read it, and ends,
 * but for the last, where the next can be written. Widths of which a token is a multiple of 512 bytes always do. */
static bool takes_direct(const sl_sink *s, const slot *q, uint64_t len) {
    const shard *h = &s->sh;
    const sl_row_in *r = &q->row->r;
    uint64_t at = 0;
    if (q->out || !s->cfg.huge || !h->off_align || len < SL_DIRECT_BYTES) return false;
    for (uint32_t i = r->first[q->k]; i < r->first[q->k + 1]; i++) {
        const uint8_t *p = NULL;
        uint64_t n = piece_of(s, q, i, &p);
        if (n && ((uintptr_t)p % h->mem_align || at % h->off_align)) return false;
        at += n;
    }
    return at == len;
}

static int write_from(sl_sink *s, const uint8_t *p, uint64_t n, sl_err *err) {
    shard *h = &s->sh;
    while (n) {
        uint32_t m = n < s->cfg.buf_bytes ? (uint32_t)n : s->cfg.buf_bytes;
        int rc = allocate(s, h->off + m, err);
        while (!rc && !sl_wio_write_from(s->wio, p, m, h->off, s->open)) rc = wait_write(s, err);
        if (rc) return rc;
        s->open->writes++;
        h->off += m;
        p += m;
        n -= m;
    }
    return 0;
}

/* Every byte of the block where it lies, once from memory: hashed (copied behind what is there on the way, when `copy`),
 * and summed for the comparison while it is in the nearer caches. *hash: its XXH3-64. */
static int hash_block(sl_sink *s, slot *q, bool copy, uint64_t *hash, sl_err *err) {
    const sl_row_in *r = &q->row->r;
    uint64_t sb = sl_sink_state_bytes(s), step = sb < SUM_STEP ? SUM_STEP / sb * sb : sb, at = 0;
    const uint8_t *p = NULL;
    XXH3_state_t st;
    int rc = 0;
    XXH3_64bits_reset(&st);
    for (uint32_t i = r->first[q->k]; !rc && i < r->first[q->k + 1]; i++)
        for (uint64_t n = piece_of(s, q, i, &p), m; !rc && n; n -= m, p += m, at += m) {
            m = n < step ? n : step;
            if (copy)
                rc = append(s, p, m, &st, err);
            else
                XXH3_64bits_update(&st, p, m);
            sum_states(s, q, p, m, q->t0 + (uint32_t)(at / sb));
        }
    *hash = XXH3_64bits_digest(&st);
    return rc;
}

/* The payload is summed where it lies and written from there; only what is left of its last page is copied. The header
 * comes before it and ends a page, so the buffer that it is in can go. */
static int emit_direct(sl_sink *s, slot *q, sl_frame_head *f, sl_err *err) {
    shard *h = &s->sh;
    const sl_row_in *r = &q->row->r;
    const uint8_t *p = NULL;
    uint64_t left = f->enc_len;
    int rc = hash_block(s, q, false, &f->raw_sum, err);
    if (rc) return rc;
    f->enc_sum = f->raw_sum;
    f->crc = sl_crc32c(0, f, sizeof *f - 4);
    rc = append(s, f, sizeof *f, NULL, err);
    if (!rc && h->buf) rc = buffer_done(s, h->buf_at, err);
    for (uint32_t i = r->first[q->k]; !rc && i < r->first[q->k + 1]; i++) {
        uint64_t n = piece_of(s, q, i, &p), whole = n;
        left -= n;
        if (n && !left) { /* the last: up to the last page's start, which may lie before this piece */
            uint64_t over = (h->off + n) % SL_SHARD_ALIGN;
            whole = n > over ? n - over : 0;
        }
        if (whole) rc = write_from(s, p, whole, err);
        if (!rc && n > whole) rc = append(s, p + whole, n - whole, NULL, err);
    }
    return rc;
}

/* The payload goes through buffers, summed on the way. The header holds the sum of what follows it: buffers are held
 * back until it is filled in. It may straddle two. */
static int emit_copied(sl_sink *s, slot *q, sl_frame_head *f, sl_err *err) {
    shard *h = &s->sh;
    h->hold = true;
    int rc = h->buf ? 0 : buffer_get(s, err);
    if (rc) return rc;
    uint8_t *a = h->buf + h->buf_at;
    uint32_t na = s->cfg.buf_bytes - h->buf_at < sizeof *f ? s->cfg.buf_bytes - h->buf_at : (uint32_t)sizeof *f;
    rc = append(s, f, sizeof *f, NULL, err);
    uint8_t *b = h->buf ? h->buf + h->buf_at - (sizeof *f - na) : NULL;
    if (rc) return rc;
    if (q->out) {
        rc = append(s, q->out, q->len, NULL, err);
    } else {
        rc = hash_block(s, q, true, &f->raw_sum, err);
        f->enc_sum = f->raw_sum;
    }
    f->crc = sl_crc32c(0, f, sizeof *f - 4);
    memcpy(a, f, na);
    if (b && na < sizeof *f) memcpy(b, (uint8_t *)f + na, sizeof *f - na);
    h->hold = false;
    for (unsigned i = 0; !rc && i < h->n_held; i++) rc = submit(s, h->held[i].idx, h->held[i].len, h->held[i].off, err);
    h->n_held = 0;
    return rc;
}

static int emit_state(sl_sink *s, slot *q, sl_err *err) {
    shard *h = &s->sh;
    shard_row *row = q->row;
    const sl_capture_set *c = &s->cfg.manifest.set;
    uint64_t raw = q->rows * sl_sink_state_bytes(s), len = q->out ? q->len : raw;
    int rc = append(s, NULL, sl_frame_place(h->off, q->used, len) - h->off, NULL, err);
    if (rc) return rc;
    sl_frame_head f = head_of(s, &row->r, SL_FR_STATE, raw);
    f.k = (uint16_t)q->k;
    f.hidx = sl_capture_label(c, q->k);
    f.t0 = q->t0;
    f.rows = q->rows;
    f.codec = (uint8_t)q->used;
    f.enc_len = len;
    f.raw_sum = q->raw_sum;
    f.enc_sum = q->enc_sum;
    row->rel[row->at] = h->off - row->off;
    rc = takes_direct(s, q, len) ? emit_direct(s, q, &f, err) : emit_copied(s, q, &f, err);
    if (!rc) rc = append(s, NULL, sl_frame_span(len) - sizeof f - len, NULL, err);
    row->sums[row->at++] = f.raw_sum;
    row->raw_bytes += raw;
    row->a += q->a, row->b += q->b;
    if (q->t0 + q->rows == row->r.T) {
        uint64_t bytes = row->r.T * sl_sink_state_bytes(s);
        row->row_sum = sl_sum_chain(row->row_sum, sl_sum_fold(row->a, row->b, bytes));
        row->a = row->b = 0;
    }
    return rc;
}

/* ---- the queue of slots ---- */

static void compress(sl_job *j, unsigned worker) {
    slot *q = (slot *)j;
    sl_sink *s = q->s;
    const sl_row_in *r = &q->row->r;
    const sl_capture_set *c = &s->cfg.manifest.set;
    uint64_t n = q->rows * sl_sink_state_bytes(s), at = 0;
    const uint8_t *src = NULL;
    for (uint32_t i = r->first[q->k]; i < r->first[q->k + 1]; i++) {
        const uint8_t *from = NULL;
        uint64_t m = piece_of(s, q, i, &from);
        if (!m) continue;
        if (m == n) {
            src = from; /* in one piece: no gathering */
            break;
        }
        memcpy(s->scratch[worker] + at, from, m);
        at += m;
        src = s->scratch[worker];
    }
    sl_block b = {q->rows, c->width, c->elem_size};
    q->raw_sum = XXH3_64bits(src, n);
    sum_states(s, q, src, n, q->t0);
    q->rc = sl_codec_encode(s->ctx[worker], s->cfg.manifest.codec, b, src, q->out, sl_codec_bound(b), &q->len, &q->used,
                            &q->err);
    if (!q->rc) q->enc_sum = XXH3_64bits(q->out, q->len);
}

/* The oldest row is written, or given up. */
static void row_done(shard *h) {
    shard_row *row = h->rows;
    h->rows = row->next;
    if (!h->rows) h->rows_tail = &h->rows;
    free(row->rel);
    free((void *)(uintptr_t)row->r.pieces);
    free(row);
}

static int emit_one(sl_sink *s, sl_err *err) {
    slot *q = &s->slots[s->slot_out % s->n_slots];
    int rc = 0;
    if (q->kind == SL_FR_STATE && q->out) {
        if (s->codec_pool)
            sl_workers_wait(s->codec_pool, &q->j);
        else
            compress(&q->j, 0);
        if (q->rc) {
            if (err) *err = q->err;
            return q->rc;
        }
    }
    if (q->kind == SL_FR_META) rc = emit_meta(s, q->row, err);
    if (q->kind == SL_FR_STATE) rc = emit_state(s, q, err);
    if (q->kind == SL_FR_END) {
        rc = emit_end(s, q->row, err);
        row_done(&s->sh);
    }
    s->slot_out++;
    return rc;
}

static int queue(sl_sink *s, shard_row *row, int kind, uint32_t k, uint32_t t0, uint32_t rows, sl_err *err) {
    while (s->slot_in - s->slot_out == s->n_slots) {
        int rc = emit_one(s, err);
        if (rc) return rc;
    }
    slot *q = &s->slots[s->slot_in % s->n_slots];
    uint8_t *out = q->out;
    *q = (slot){.j.run = compress, .s = s, .row = row, .kind = kind, .k = k, .t0 = t0, .rows = rows, .out = out};
    s->slot_in++;
    if (kind == SL_FR_STATE && s->codec_pool) sl_workers_put(s->codec_pool, &q->j);
    return 0;
}

int sl_shard_row(sl_sink *s, const sl_row_in *r, sl_err *err) {
    const sl_capture_set *c = &s->cfg.manifest.set;
    uint32_t blocks = (r->T + s->block_rows - 1) / s->block_rows, np = r->first[c->n];
    shard_row *row = calloc(1, sizeof *row);
    uint64_t *two = calloc((uint64_t)2 * c->n * blocks, sizeof *two);
    /* pieces and first in one allocation: the caller's arrays are gone when the slots are emitted */
    sl_piece *pc = malloc(np * sizeof *pc + (c->n + 1) * sizeof(uint32_t) + 8);
    if (!row || !two || !pc) {
        free(row);
        free(two);
        free(pc);
        return sl_err_set(err, SL_ETEMP, "no memory for a row of %u tokens", r->T);
    }
    uint32_t *first = (uint32_t *)(pc + np);
    memcpy(pc, r->pieces, np * sizeof *pc);
    memcpy(first, r->first, (c->n + 1) * sizeof *first);
    *row = (shard_row){.r = *r, .rel = two, .sums = two + (uint64_t)c->n * blocks, .n_frames = c->n * blocks};
    row->r.pieces = pc;
    row->r.first = first;
    if (!s->sh.rows) s->sh.rows_tail = &s->sh.rows;
    *s->sh.rows_tail = row;
    s->sh.rows_tail = &row->next;
    int rc = start_group(s, err);
    if (!rc) rc = sl_sink_rec(s, r, &row->rec, err);
    s->sh.n_rows += !rc;
    if (!rc) rc = queue(s, row, SL_FR_META, 0, 0, 0, err);
    for (uint32_t k = 0; !rc && k < c->n; k++)
        for (uint32_t t = 0; !rc && t < r->T; t += s->block_rows)
            rc = queue(s, row, SL_FR_STATE, k, t, r->T - t < s->block_rows ? r->T - t : s->block_rows, err);
    if (!rc) rc = queue(s, row, SL_FR_END, 0, 0, 0, err);
    return rc;
}

int sl_shard_end_group(sl_sink *s, sl_err *err) {
    shard *h = &s->sh;
    int rc = 0;
    while (!rc && s->slot_out < s->slot_in) rc = emit_one(s, err);
    if (rc || !h->buf) return rc;
    uint64_t end = h->off;
    rc = append(s, NULL, up(end, SL_SHARD_ALIGN) - end, NULL, err);
    if (!rc && h->buf) rc = buffer_done(s, h->buf_at, err);
    h->off = end;
    return rc;
}

/* ---- life of a shard ---- */

int sl_shard_index_add(sl_sink *s, const sl_commit_rec *r, sl_err *err) {
    shard *h = &s->sh;
    if (r->shard != h->no) { /* reading the log at open: only the last shard can still be open */
        h->no = r->shard;
        h->n_index = 0;
    }
    if (h->n_index == h->cap_index) {
        uint64_t cap = h->cap_index ? h->cap_index * 2 : 256;
        sl_index_entry *p = realloc(h->index, cap * sizeof *p);
        if (!p) return sl_err_set(err, SL_ETEMP, "no memory for the index of shard %u", h->no);
        h->index = p;
        h->cap_index = cap;
    }
    h->index[h->n_index++] = (sl_index_entry){.seq = r->seq,
                                              .row = r->row,
                                              .dataset = r->dataset,
                                              .T = r->T,
                                              .off = r->off,
                                              .len = r->len,
                                              .key = {r->key.w[0], r->key.w[1]},
                                              .states_sum = r->states_sum,
                                              .raw_bytes = r->raw_bytes,
                                              .mask_sum = r->mask_sum,
                                              .nll = r->nll};
    return 0;
}

static void shard_path(const sl_sink *s, uint32_t no, int open_, char *buf, size_t cap) {
    char name[64];
    sl_store_shard_name(name, sizeof name, no, open_);
    snprintf(buf, cap, "%s/shards/%s", s->store, name);
}

static int sync_dir(sl_sink *s, sl_err *err) {
    char path[SL_PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/shards", s->store);
    return sl_file_sync_folder(path, err);
}

/* What the file asks of writes from memory that is not ours to align. */
static void ask_alignment(shard *h) {
    struct statx x;
    h->mem_align = h->off_align = h->direct ? 0 : 1;
    if (!h->direct || statx(h->fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &x) || !(x.stx_mask & STATX_DIOALIGN)) return;
    if (!x.stx_dio_mem_align || !x.stx_dio_offset_align || SL_SHARD_ALIGN % x.stx_dio_offset_align) return;
    h->mem_align = x.stx_dio_mem_align;
    h->off_align = x.stx_dio_offset_align;
}

/* Open shard `no` for appending at `end` (0: a new one). */
static int open_shard(sl_sink *s, uint32_t no, uint64_t end, sl_err *err) {
    char path[SL_PATH_MAX + 128];
    struct stat st;
    shard *h = &s->sh;
    shard_path(s, no, 1, path, sizeof path);
    int flags = O_RDWR | O_CREAT | O_CLOEXEC;
    h->fd = s->cfg.direct ? open(path, flags | O_DIRECT, 0644) : -1;
    h->direct = h->fd >= 0;
    if (!h->direct && s->cfg.direct && errno == EINVAL)
        sl_sink_note(s, 1, "%s: this file system has no O_DIRECT: writing through the page cache", path);
    if (!h->direct) h->fd = open(path, flags, 0644);
    if (h->fd < 0) return sl_err_sys(err, sl_file_code(errno), errno, "cannot open %s", path);
    if (fstat(h->fd, &st) || (uint64_t)st.st_size < end)
        return sl_err_set(err, SL_EDATA,
                          "%s has %lld bytes, but rows up to byte %llu are committed in it: run 'sluice verify', then "
                          "'sluice salvage'",
                          path, (long long)st.st_size, (unsigned long long)end);
    if (ftruncate(h->fd, (off_t)end) || fsync(h->fd))
        return sl_err_sys(err, sl_file_code(errno), errno, "cannot cut %s to %llu bytes", path,
                          (unsigned long long)end);
    if (end && (uint64_t)st.st_size > end)
        sl_sink_note(s, 0, "shard %u: cut to its last committed row (%llu bytes)", no, (unsigned long long)end);
    h->no = no;
    h->off = end;
    h->alloc = end;
    h->buf = NULL;
    h->n_rows = h->n_index;
    ask_alignment(h);
    int rc = sync_dir(s, err);
    return rc ? rc : sl_wio_file(s->wio, h->fd, err);
}

int sl_shard_recover(sl_sink *s, uint64_t committed_end, uint32_t last, sl_err *err) {
    char path[SL_PATH_MAX + 128];
    uint32_t no, next = 0, highest_open = 0;
    int open_, have_open = 0, sealed_last = 0;
    snprintf(path, sizeof path, "%s/shards", s->store);
    DIR *d = opendir(path);
    if (!d) return sl_err_sys(err, sl_file_code(errno), errno, "cannot read folder %s", path);
    for (struct dirent *e; (e = readdir(d));) {
        if (!sl_store_shard_parse(e->d_name, &no, &open_)) continue;
        if (open_) highest_open = no > highest_open ? no : highest_open, have_open = 1;
        if (!open_ && no + 1 > next) next = no + 1;
        if (!open_ && no == last) sealed_last = 1;
    }
    closedir(d);
    if (last != SL_NO_SHARD && !sealed_last) {
        shard_path(s, last, 1, path, sizeof path);
        if (access(path, F_OK))
            return sl_err_set(err, SL_EDATA, "shard %u is missing, but rows are committed in it: run 'sluice verify'",
                              last);
        return open_shard(s, last, committed_end, err);
    }
    /* No row of an open shard behind the last sealed one is committed: begin it again. */
    if (have_open && highest_open >= next) next = highest_open;
    s->sh.n_index = 0;
    return open_shard(s, next, 0, err);
}

/* INDEX frame and footer, then the final name. */
int sl_shard_seal(sl_sink *s, sl_err *err) {
    shard *h = &s->sh;
    char from[SL_PATH_MAX + 128], to[SL_PATH_MAX + 128];
    shard_path(s, h->no, 1, from, sizeof from);
    shard_path(s, h->no, 0, to, sizeof to);
    if (!h->n_index) { /* nothing in it */
        close(h->fd);
        h->fd = -1;
        unlink(from);
        return sync_dir(s, err);
    }
    group g = {0}, *keep = s->open;
    s->open = &g;
    g.shard_data = true;
    h->off = up(h->off, SL_SHARD_ALIGN);
    uint64_t index_off = h->off, len = h->n_index * sizeof *h->index;
    sl_row_in none = {.T = (uint32_t)h->n_index};
    sl_frame_head f = head_of(s, &none, SL_FR_INDEX, len);
    const void *part[] = {h->index};
    int rc = frame_bytes(s, &f, part, &len, 1, err);
    sl_shard_foot foot = {.magic = SL_FOOT_MAGIC,
                          .version = SL_STORE_VERSION,
                          .shard = h->no,
                          .index_off = index_off,
                          .n_rows = h->n_index,
                          .file_len = h->off + sizeof foot};
    foot.crc = sl_crc32c(0, &foot, sizeof foot - 4);
    if (!rc) rc = append(s, &foot, sizeof foot, NULL, err);
    if (!rc) rc = sl_shard_end_group(s, err);
    while (!rc && sl_wio_inflight(s->wio)) {
        if (sl_wio_stalled(s->wio)) {
            if ((rc = sl_sink_refused(s, (uint64_t)sl_wio_stalled(s->wio) * s->cfg.buf_bytes, err))) break;
            sl_wio_retry(s->wio);
        }
        sl_wio_reap(s->wio, true);
    }
    s->open = keep;
    if (!rc && s->fatal) rc = sl_err_sys(err, SL_EINTERNAL, -s->fatal, "writing shard %u failed", h->no);
    if (rc) return rc;
    if (ftruncate(h->fd, (off_t)foot.file_len) || fsync(h->fd) || rename(from, to))
        return sl_err_sys(err, SL_EINTERNAL, errno, "cannot seal %s", to);
    close(h->fd);
    h->fd = -1;
    h->n_index = 0;
    return sync_dir(s, err);
}

int sl_shard_next(sl_sink *s, sl_err *err) {
    return open_shard(s, s->sh.no + 1, 0, err);
}

void sl_shard_close(sl_sink *s) {
    while (s->sh.rows) row_done(&s->sh);
    if (s->sh.fd >= 0) close(s->sh.fd);
    free(s->sh.index);
}
