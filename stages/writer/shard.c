#include "stages/writer/xxh3.h"
#include "stages/writer/shard.h"
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int sl_window_open(sl_window *w, uint64_t cap, sl_err *err) {
    cap = (cap + (2u << 20) - 1) & ~((2ull << 20) - 1);
    *w = (sl_window){.p = aligned_alloc(2u << 20, cap), .cap = cap, .ahead = cap};
    if (!w->p) return sl_err_set(err, SL_ETEMP, "no memory for a window of %" PRIu64 " bytes", cap);
    madvise(w->p, cap, MADV_HUGEPAGE); /* fewer pages to pin for each read */
    return 0;
}

void sl_window_close(sl_window *w) {
    free(w->p);
    *w = (sl_window){0};
}

enum { AHEAD_BELOW = 256 << 10 };

/* Make [off, off + n) lie in the window, and what follows it up to the limit. Bytes that are there already are moved to
 * the front, not read again. */
static int slide(const sl_src *s, uint64_t off, uint64_t n, sl_err *err) {
    sl_window *w = s->win;
    uint64_t page = off & ~4095ull, keep = 0;
    if (off >= w->off && off + n <= w->off + w->have) return 0;
    if (page >= w->off && page < w->off + w->have) {
        keep = (w->off + w->have - page) & ~4095ull; /* a part of a page at the end of the file is read again */
        memmove(w->p, w->p + (page - w->off), keep);
    }
    w->off = page;
    w->have = keep;
    /* Little things: what follows in one large read. A payload: it, and the head that follows. */
    uint64_t ahead = n < AHEAD_BELOW ? w->ahead : n + 8192, to = w->limit < off + ahead ? w->limit : off + ahead;
    if (to < off + n) to = off + n;
    if (to > page + w->cap) to = page + w->cap;
    to = (to + 4095) & ~4095ull;
    while (w->have < to - page) {
        ssize_t r = pread(s->fd, w->p + w->have, to - page - w->have, (off_t)(page + w->have));
        if (r < 0 && errno == EINTR) continue;
        if (r < 0) return sl_err_sys(err, SL_EDATA, errno, "%s: reading at %" PRIu64, s->name, page + w->have);
        w->have += (uint64_t)r;
        w->read += (uint64_t)r;
        if (!r || w->have % 4096) break; /* the end of the file */
    }
    if (w->have < off - page + n)
        return sl_err_set(err, SL_EDATA, "%s: the file ends at %" PRIu64 " meanwhile", s->name, page + w->have);
    return 0;
}

static int inside(const sl_src *s, uint64_t off, uint64_t n, sl_err *err) {
    if (off <= s->len && n <= s->len - off) return 0;
    return sl_err_set(err, SL_EDATA, "%s: bytes %" PRIu64 "+%" PRIu64 " are behind the end of the file (%" PRIu64 ")",
                      s->name, off, n, s->len);
}

int sl_src_view(const sl_src *s, uint64_t off, uint64_t n, const uint8_t **p, sl_err *err) {
    int rc = inside(s, off, n, err);
    *p = NULL;
    if (rc) return rc;
    if (s->fd < 0) *p = s->mem + off;
    if (s->fd < 0 || !s->win || n + 8192 > s->win->cap) return 0;
    if ((rc = slide(s, off, n, err))) return rc;
    *p = s->win->p + (off - s->win->off);
    return 0;
}

int sl_src_read(const sl_src *s, uint64_t off, void *dst, uint64_t n, sl_err *err) {
    const uint8_t *p;
    for (uint64_t at = 0, m; s->win && s->fd >= 0 && at < n; at += m) {
        m = n - at < s->win->cap / 2 ? n - at : s->win->cap / 2;
        int rc = sl_src_view(s, off + at, m, &p, err);
        if (!rc && !p) rc = sl_err_set(err, SL_EINTERNAL, "a window of %" PRIu64 " bytes is too small", s->win->cap);
        if (rc) return rc;
        memcpy((uint8_t *)dst + at, p, m);
    }
    int rc = inside(s, off, n, err);
    if (rc || (s->win && s->fd >= 0)) return rc;
    if (s->fd < 0) {
        if (n) memcpy(dst, s->mem + off, n);
        return 0;
    }
    for (uint64_t at = 0; at < n;) {
        ssize_t r = pread(s->fd, (uint8_t *)dst + at, n - at, (off_t)(off + at));
        if (r < 0 && errno == EINTR) continue;
        if (r <= 0) return sl_err_sys(err, SL_EDATA, r ? errno : EIO, "%s: reading at %" PRIu64, s->name, off + at);
        at += (uint64_t)r;
    }
    return 0;
}

int sl_shard_open(const sl_src *s, sl_shard_head *h, sl_err *err) {
    int rc = sl_src_read(s, 0, h, sizeof *h, err);
    if (rc) return rc;
    if (h->magic != SL_SHARD_MAGIC)
        return sl_err_set(err, SL_EDATA, "%s: not a shard (magic %016" PRIx64 ")", s->name, h->magic);
    if (sl_crc32c(0, h, sizeof *h - 4) != h->crc)
        return sl_err_set(err, SL_EDATA, "%s: the shard header is damaged (CRC32C)", s->name);
    if (h->version != SL_STORE_VERSION)
        return sl_err_set(err, SL_EDATA, "%s: shard version %u, this program reads %u", s->name, h->version,
                          SL_STORE_VERSION);
    if (!h->n_states || h->n_states > SL_MAX_CAPTURES || !h->width || (h->elem_size != 2 && h->elem_size != 4) ||
        (uint64_t)h->width * h->elem_size > SL_BLOCK_BYTES || !memchr(h->model, 0, sizeof h->model))
        return sl_err_set(err, SL_EDATA, "%s: %u states of width %u with %u bytes an element are not possible", s->name,
                          h->n_states, h->width, h->elem_size);
    return 0;
}

void sl_shard_set(const sl_shard_head *h, sl_capture_set *set) {
    memset(set, 0, sizeof *set);
    set->n = h->n_states;
    set->width = h->width;
    set->elem_size = h->elem_size;
    set->n_layers = h->n_layers;
    memcpy(set->model, h->model, sizeof set->model);
    for (uint32_t k = 0; k < h->n_states; k++) {
        set->v[k].final_norm = h->states[k].final_norm;
        set->v[k].hidx = h->states[k].final_norm ? h->n_layers : h->states[k].hidx;
    }
}

static const char *frame_fault(const sl_src *s, const sl_shard_head *h, uint64_t off, const sl_frame_head *f) {
    if (f->version != SL_STORE_VERSION) return "version";
    if (f->off != off) return "offset (the frame is in another's place)";
    if (f->enc_len > s->len - off - sizeof *f) return "length (the frame reaches behind the end of the file)";
    if (f->kind == SL_FR_INDEX) return f->enc_len == (uint64_t)f->T * sizeof(sl_index_entry) ? NULL : "index length";
    if (f->width != h->width || f->elem_size != h->elem_size || f->n_states != h->n_states)
        return "width, element size or number of states";
    if (!f->T) return "number of tokens";
    uint32_t br = sl_store_block_rows(h->width, h->elem_size);
    uint64_t frames = (uint64_t)h->n_states * ((f->T - 1) / br + 1);
    if (f->kind == SL_FR_META) return f->enc_len >= sizeof(sl_meta_head) + 5ull * f->T ? NULL : "META length";
    if (f->kind == SL_FR_END) return f->enc_len == sizeof(sl_end_head) + 8 * frames ? NULL : "END length";
    if (f->kind != SL_FR_STATE) return "kind";
    if (f->k >= h->n_states || f->hidx != h->states[f->k].hidx) return "state or H index";
    if (f->t0 % br || f->t0 >= f->T || f->rows != (f->T - f->t0 < br ? f->T - f->t0 : br)) return "token range";
    if (f->raw_len != (uint64_t)f->rows * f->width * f->elem_size) return "raw length";
    if (f->enc_len > sl_codec_bound((sl_block){f->rows, f->width, f->elem_size})) return "encoded length";
    return NULL;
}

int sl_frame_open(const sl_src *s, const sl_shard_head *h, uint64_t off, sl_frame_head *f, sl_err *err) {
    if (off >= s->len) return 1;
    if (s->len - off < sizeof *f) {
        uint32_t magic = 0;
        if (s->len - off < 4 || sl_src_read(s, off, &magic, 4, NULL) || !magic) return 1;
        return sl_err_set(err, SL_EDATA, "%s: a frame at %" PRIu64 " is cut by the end of the file", s->name, off);
    }
    int rc = sl_src_read(s, off, f, sizeof *f, err);
    if (rc) return rc;
    if (!f->magic) return 1;
    if (f->magic != SL_FRAME_MAGIC)
        return sl_err_set(err, SL_EDATA, "%s: no frame at %" PRIu64 " (magic %08x)", s->name, off, f->magic);
    if (sl_crc32c(0, f, sizeof *f - 4) != f->crc)
        return sl_err_set(err, SL_EDATA, "%s: the frame header at %" PRIu64 " is damaged (CRC32C)", s->name, off);
    const char *bad = frame_fault(s, h, off, f);
    return bad ? sl_err_set(err, SL_EDATA, "%s: the frame at %" PRIu64 " (row %" PRIu64 ") has an impossible %s",
                            s->name, off, f->row, bad)
               : 0;
}

static const char *frame_name(const sl_frame_head *f, char buf[96]) {
    static const char *const kinds[] = {"?", "META", "STATE", "END", "INDEX"};
    if (f->kind == SL_FR_STATE)
        snprintf(buf, 96, "row %" PRIu64 " H[%u] tokens %u..%u", f->row, f->hidx, f->t0, f->t0 + f->rows - 1);
    else
        snprintf(buf, 96, "row %" PRIu64 " %s", f->row, kinds[f->kind <= 4 ? f->kind : 0]);
    return buf;
}

static int check_sum(const sl_src *s, const sl_frame_head *f, const void *p, sl_err *err) {
    char nm[96];
    if (XXH3_64bits(p, f->enc_len) == f->enc_sum) return 0;
    return sl_err_set(err, SL_EDATA, "%s: %s: the bytes at %" PRIu64 " do not match their checksum", s->name,
                      frame_name(f, nm), f->off);
}

int sl_frame_read(const sl_src *s, const sl_frame_head *f, void *dst, sl_err *err) {
    int rc = sl_src_read(s, f->off + sizeof *f, dst, f->enc_len, err);
    return rc ? rc : check_sum(s, f, dst, err);
}

int sl_zeros(const sl_src *s, uint64_t from, uint64_t to, sl_err *err) {
    uint8_t b[4096];
    while (from < to) {
        uint64_t n = to - from < sizeof b ? to - from : sizeof b;
        int rc = sl_src_read(s, from, b, n, err);
        if (rc) return rc;
        for (uint64_t i = 0; i < n; i++)
            if (b[i])
                return sl_err_set(err, SL_EDATA, "%s: byte %" PRIu64 " is padding and should be zero", s->name,
                                  from + i);
        from += n;
    }
    return 0;
}

int sl_frame_padding(const sl_src *s, uint64_t off, uint64_t enc_len, sl_err *err) {
    return sl_zeros(s, off + sizeof(sl_frame_head) + enc_len, off + sl_frame_span(enc_len), err);
}

static int check_meta(const sl_src *s, const sl_frame_head *f, const sl_meta_head *m, sl_err *err) {
    uint64_t want = sizeof *m + 5ull * f->T + m->id_len + m->name_len;
    if (f->enc_len != want || m->mask_sum > f->T)
        return sl_err_set(err, SL_EDATA, "%s: META of row %" PRIu64 ": %" PRIu64 " bytes, expected %" PRIu64, s->name,
                          f->row, f->enc_len, want);
    return 0;
}

/* A frame of the row that META speaks of. */
static bool of_row(const sl_frame_head *f, const sl_frame_head *meta) {
    return f->seq == meta->seq && f->row == meta->row && f->dataset == meta->dataset && f->part == meta->part &&
           f->T == meta->T && !memcmp(f->key, meta->key, sizeof f->key);
}

int sl_row_open(sl_row_frames *r, const sl_src *s, const sl_shard_head *h, uint64_t off, uint64_t len, uint32_t T,
                sl_err *err) {
    memset(r, 0, sizeof *r);
    r->off = off;
    r->len = len;
    r->block_rows = sl_store_block_rows(h->width, h->elem_size);
    int rc = sl_frame_open(s, h, off, &r->meta, err);
    if (rc == 1 || (!rc && (r->meta.kind != SL_FR_META || r->meta.T != T)))
        rc = sl_err_set(err, SL_EDATA, "%s: no row of %u tokens starts at %" PRIu64, s->name, T, off);
    if (!rc) rc = sl_src_read(s, off + sizeof r->meta, &r->mh, sizeof r->mh, err);
    if (!rc) rc = check_meta(s, &r->meta, &r->mh, err);
    if (rc) return rc;
    uint64_t n = (uint64_t)h->n_states * ((T - 1) / r->block_rows + 1),
             span = sl_frame_span(sizeof(sl_end_head) + 8 * n);
    if (r->mh.block_rows != r->block_rows || r->mh.n_frames != n)
        return sl_err_set(err, SL_EDATA,
                          "%s: META of row %" PRIu64 " says %u frames of %u tokens, expected %" PRIu64 " of %u",
                          s->name, r->meta.row, r->mh.n_frames, r->mh.block_rows, n, r->block_rows);
    if (len < span || len > s->len - off)
        return sl_err_set(err, SL_EDATA, "%s: a row of %" PRIu64 " bytes at %" PRIu64 " is not possible", s->name, len,
                          off);
    sl_frame_head f;
    rc = sl_frame_open(s, h, off + len - span, &f, err);
    if (rc == 1 || (!rc && (f.kind != SL_FR_END || !of_row(&f, &r->meta))))
        return sl_err_set(err, SL_EDATA, "%s: row %" PRIu64 " has no END at %" PRIu64, s->name, r->meta.row,
                          off + len - span);
    uint8_t *buf = rc ? NULL : malloc(f.enc_len);
    if (!rc && !buf) rc = sl_err_set(err, SL_ETEMP, "no memory for a row of %" PRIu64 " frames", n);
    if (!rc) rc = sl_frame_read(s, &f, buf, err);
    if (!rc) {
        sl_end_head e;
        memcpy(&e, buf, sizeof e);
        r->states_sum = e.states_sum;
        r->n_frames = (uint32_t)n;
        memmove(buf, buf + sizeof e, 8 * n);
        r->rel = (uint64_t *)(void *)buf;
        if (e.n_frames != n)
            rc = sl_err_set(err, SL_EDATA, "%s: END of row %" PRIu64 " counts %u frames, expected %" PRIu64, s->name,
                            f.row, e.n_frames, n);
    } else {
        free(buf);
    }
    if (rc) sl_row_close(r);
    return rc;
}

void sl_row_close(sl_row_frames *r) {
    free(r->rel);
    r->rel = NULL;
}

int sl_row_meta_read(const sl_src *s, const sl_frame_head *meta, sl_meta_head *mh, sl_row_meta *out, sl_err *err) {
    memset(out, 0, sizeof *out);
    uint8_t *b = malloc(meta->enc_len + 2);
    if (!b) return sl_err_set(err, SL_ETEMP, "no memory for a row of %u tokens", meta->T);
    int rc = sl_frame_read(s, meta, b, err);
    if (!rc) memcpy(mh, b, sizeof *mh);
    if (!rc) rc = check_meta(s, meta, mh, err);
    if (rc) {
        free(b);
        return rc;
    }
    char *str = (char *)b + sizeof *mh + 5ull * meta->T;
    memmove(str + mh->id_len + 1, str + mh->id_len, mh->name_len);
    str[mh->id_len] = 0;
    str[mh->id_len + 1 + mh->name_len] = 0;
    *out = (sl_row_meta){.block = b,
                         .ids = (const int32_t *)(const void *)(b + sizeof *mh),
                         .mask = b + sizeof *mh + 4ull * meta->T,
                         .id = str,
                         .name = str + mh->id_len + 1};
    return 0;
}

void sl_row_meta_free(sl_row_meta *m) {
    free(m->block);
    m->block = NULL;
}

static int grow(sl_scratch *p, uint64_t n, sl_err *err) {
    if (p->cap >= n) return 0;
    free(p->p);
    p->p = malloc(n);
    p->cap = p->p ? n : 0;
    return p->p ? 0 : sl_err_set(err, SL_ETEMP, "no memory for %" PRIu64 " bytes", n);
}

/* Frame i of the row is STATE k, block j of it, of this row. */
static int open_block(const sl_row_frames *r, const sl_src *s, const sl_shard_head *h, uint32_t i, sl_frame_head *f,
                      sl_err *err) {
    uint32_t blocks = r->n_frames / h->n_states, k = i / blocks, t0 = i % blocks * r->block_rows;
    if (r->rel[i] >= r->len)
        return sl_err_set(err, SL_EDATA, "%s: row %" PRIu64 ": frame %u lies outside the row", s->name, r->meta.row, i);
    int rc = sl_frame_open(s, h, r->off + r->rel[i], f, err);
    if (rc == 1 || (!rc && (f->kind != SL_FR_STATE || f->k != k || f->t0 != t0 || !of_row(f, &r->meta))))
        return sl_err_set(err, SL_EDATA, "%s: row %" PRIu64 ": the frame at %" PRIu64 " is not H[%u] from token %u",
                          s->name, r->meta.row, r->off + r->rel[i], h->states[k].hidx, t0);
    return rc;
}

int sl_row_block_view(const sl_row_frames *r, const sl_src *s, const sl_shard_head *h, sl_codec_ctx *c, uint32_t i,
                      void *dst, const void **states, sl_frame_head *f, sl_scratch *scratch, sl_err *err) {
    char nm[96];
    const uint8_t *p = NULL;
    int rc = open_block(r, s, h, i, f, err);
    if (!rc) rc = sl_src_view(s, f->off + sizeof *f, f->enc_len, &p, err);
    if (!rc && !p) {
        rc = grow(scratch, f->enc_len + 1, err);
        if (!rc) rc = sl_src_read(s, f->off + sizeof *f, scratch->p, f->enc_len, err);
        p = scratch->p;
    }
    if (!rc) rc = check_sum(s, f, p, err);
    if (rc) return rc;
    bool plain = f->codec == SL_CODEC_NONE && f->enc_len == f->raw_len;
    *states = plain ? p : dst;
    if (!plain &&
        (rc = sl_codec_decode(c, f->codec, (sl_block){f->rows, f->width, f->elem_size}, p, f->enc_len, dst, err))) {
        sl_err_wrap(err, "%s: %s", s->name, frame_name(f, nm));
        return rc;
    }
    if ((plain ? f->enc_sum : XXH3_64bits(dst, f->raw_len)) != f->raw_sum)
        return sl_err_set(err, SL_EDATA, "%s: %s: the decoded states do not match their checksum", s->name,
                          frame_name(f, nm));
    return 0;
}

int sl_row_block(const sl_row_frames *r, const sl_src *s, const sl_shard_head *h, sl_codec_ctx *c, uint32_t i,
                 void *dst, sl_frame_head *f, sl_scratch *scratch, sl_err *err) {
    const void *p;
    int rc = sl_row_block_view(r, s, h, c, i, dst, &p, f, scratch, err);
    if (!rc && p != dst) memcpy(dst, p, f->raw_len);
    return rc;
}

int sl_row_state(const sl_row_frames *r, const sl_src *s, const sl_shard_head *h, sl_codec_ctx *c, uint32_t k,
                 uint32_t t0, uint32_t rows, void *dst, sl_scratch *scratch, uint64_t *enc_bytes, sl_err *err) {
    uint64_t rb = (uint64_t)h->width * h->elem_size, T = r->meta.T;
    if (k >= h->n_states || t0 > T || rows > T - t0)
        return sl_err_set(err, SL_EUSAGE, "state %u, tokens %u+%u: the row has %u states and %" PRIu64 " tokens", k, t0,
                          rows, h->n_states, T);
    uint32_t blocks = r->n_frames / h->n_states;
    uint8_t *tmp = NULL;
    int rc = 0;
    for (uint32_t b = t0 / r->block_rows; !rc && b < blocks && (uint64_t)b * r->block_rows < (uint64_t)t0 + rows; b++) {
        uint32_t b0 = b * r->block_rows, b1 = (uint32_t)(b0 + r->block_rows < T ? b0 + r->block_rows : T);
        uint32_t a = b0 > t0 ? b0 : t0, e = b1 < t0 + rows ? b1 : t0 + rows;
        bool all = a == b0 && e == b1;
        sl_frame_head f;
        if (!all && !tmp && !(tmp = malloc((uint64_t)r->block_rows * rb)))
            return sl_err_set(err, SL_ETEMP, "no memory for a block");
        uint8_t *to = (uint8_t *)dst + (uint64_t)(a - t0) * rb;
        rc = sl_row_block(r, s, h, c, k * blocks + b, all ? to : tmp, &f, scratch, err);
        if (!rc && !all) memcpy(to, tmp + (uint64_t)(a - b0) * rb, (uint64_t)(e - a) * rb);
        if (!rc && enc_bytes) *enc_bytes += f.enc_len + sizeof f;
    }
    free(tmp);
    return rc;
}

int sl_shard_index(const sl_src *s, const sl_shard_head *h, sl_index_entry **out, uint64_t *n, sl_err *err) {
    sl_shard_foot ft;
    sl_frame_head f;
    *out = NULL;
    *n = 0;
    if (s->len < sizeof *h + sizeof ft)
        return sl_err_set(err, SL_EDATA, "%s: %" PRIu64 " bytes are too few for a sealed shard", s->name, s->len);
    int rc = sl_src_read(s, s->len - sizeof ft, &ft, sizeof ft, err);
    if (rc) return rc;
    if (ft.magic != SL_FOOT_MAGIC || sl_crc32c(0, &ft, sizeof ft - 4) != ft.crc || ft.version != SL_STORE_VERSION)
        return sl_err_set(err, SL_EDATA, "%s: the footer is missing or damaged", s->name);
    if (ft.file_len != s->len || ft.shard != h->shard)
        return sl_err_set(err, SL_EDATA,
                          "%s: the footer says %" PRIu64 " bytes of shard %u, found %" PRIu64 " of shard %u", s->name,
                          ft.file_len, ft.shard, s->len, h->shard);
    rc = sl_frame_open(s, h, ft.index_off, &f, err);
    if (rc == 1 || (!rc && (f.kind != SL_FR_INDEX || f.T != ft.n_rows)))
        return sl_err_set(err, SL_EDATA, "%s: no index of %" PRIu64 " rows at %" PRIu64, s->name, ft.n_rows,
                          ft.index_off);
    if (rc) return rc;
    *out = malloc(f.enc_len + 1);
    if (!*out) return sl_err_set(err, SL_ETEMP, "no memory for an index of %" PRIu64 " bytes", f.enc_len);
    if ((rc = sl_frame_read(s, &f, *out, err))) {
        free(*out);
        *out = NULL;
        return rc;
    }
    *n = ft.n_rows;
    return 0;
}
