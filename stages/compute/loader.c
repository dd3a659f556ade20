#include "stages/compute/loader.h"
#include "stages/compute/staging.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define CHUNK     (UINT64_C(4) << 20)
#define DEPTH     16
#define ALIGN     UINT64_C(4096)
#define BUF_BYTES (CHUNK + 2 * ALIGN)
#define MIN_PIECE (UINT64_C(32) << 10)

typedef struct slot {
    uint8_t *buf;
    int busy, direct;
    uint32_t file;
    uint64_t start, want, got; /* file offset of buf[0], bytes needed from there, bytes there */
    uint64_t lead;             /* first needed byte in buf */
    uint64_t rows, pitch, piece;
    uint64_t phase; /* of the first needed byte in its block, for the check */
    uint8_t *dst;
    sl_finite_check check;
} slot;

struct sl_loader {
    const sl_source *src;
    sl_ops *ops;
    sl_loader_progress *progress;
    sl_staging *staging; /* does all of it, or NULL: the ring below does */
    uint64_t chunk;
    struct io_uring ring;
    int uring;   /* 1: usable */
    int *direct; /* per file: O_DIRECT descriptor, -1 none (yet), -2 refused */
    uint8_t *mem;
    slot slot[DEPTH];
    int busy;
    char note[200];
};

void sl_loader_advance(sl_loader_progress *p, uint64_t bytes) {
    if (!p) return;
    p->done += bytes;
    if (p->fn) p->fn(p->arg, p->done, p->total);
}

/* ---- small reads and checks ---- */

/* A read at `at` found nothing. The file ends there or, when several pieces are read at once, before. */
static int too_short(const sl_source *src, uint32_t file, uint64_t at, sl_err *err) {
    struct stat st;
    if (!fstat(sl_source_fd(src, file), &st) && st.st_size >= 0 && (uint64_t)st.st_size < at) at = (uint64_t)st.st_size;
    return sl_err_set(err, SL_EDATA, "%s: ends at byte %" PRIu64 " while being read: it was cut since it was checked",
                      sl_source_path(src, file), at);
}

int sl_source_read(const sl_source *src, uint32_t file, uint64_t off, void *buf, uint64_t n, sl_err *err) {
    for (uint64_t at = 0; at < n;) {
        ssize_t r = pread(sl_source_fd(src, file), (char *)buf + at, n - at, (off_t)(off + at));
        if (r < 0 && errno == EINTR) continue;
        if (r < 0)
            return sl_err_sys(err, SL_ETEMP, errno, "%s: cannot read at byte %" PRIu64, sl_source_path(src, file),
                              off + at);
        if (r == 0) return too_short(src, file, off + at, err);
        at += (uint64_t)r;
    }
    return 0;
}

/* Blocks of `block` bytes with one or two values of `size` bytes at `at`: a value is not finite when all bits of `mask`
 * are set. */
static const struct {
    uint8_t block, size, n, at[2];
    uint32_t mask;
} scale_at[SL_FINITE_N] = {
    [SL_FINITE_F32] = {4, 4, 1, {0}, 0x7f800000},   [SL_FINITE_BF16] = {2, 2, 1, {0}, 0x7f80},
    [SL_FINITE_F16] = {2, 2, 1, {0}, 0x7c00},       [SL_FINITE_E8M0] = {1, 1, 1, {0}, 0xff},
    [SL_FINITE_Q8_0] = {34, 2, 1, {0}, 0x7c00},     [SL_FINITE_Q4_0] = {18, 2, 1, {0}, 0x7c00},
    [SL_FINITE_Q4_1] = {20, 2, 2, {0, 2}, 0x7c00},  [SL_FINITE_Q5_0] = {22, 2, 1, {0}, 0x7c00},
    [SL_FINITE_Q5_1] = {24, 2, 2, {0, 2}, 0x7c00},  [SL_FINITE_Q4_K] = {144, 2, 2, {0, 2}, 0x7c00},
    [SL_FINITE_Q5_K] = {176, 2, 2, {0, 2}, 0x7c00}, [SL_FINITE_Q6_K] = {210, 2, 1, {208}, 0x7c00},
    [SL_FINITE_MXFP4_GGUF] = {17, 1, 1, {0}, 0xff},
};

/* Values of `size` bytes every `step` bytes in p[0..n). */
static int any_set(const uint8_t *p, uint64_t n, uint64_t step, uint32_t size, uint32_t mask) {
    uint32_t bad = 0, v = 0;
    if (n < size) return 0;
    if (size == 2 && step == 2) { /* the common one, in a form that compilers make wide */
        for (uint64_t i = 0; i < n / 2; i++) {
            uint16_t h;
            memcpy(&h, p + 2 * i, 2);
            bad |= (uint32_t)(h & mask) == mask;
        }
        return bad != 0;
    }
    for (uint64_t i = 0; i <= n - size; i += step) {
        memcpy(&v, p + i, size);
        bad |= (v & mask) == mask;
    }
    return bad != 0;
}

int sl_check_finite(const void *p, uint64_t rows, uint64_t pitch, uint64_t piece, uint64_t phase, sl_finite_check check,
                    sl_err *err) {
    if (check.kind < 0 || check.kind >= SL_FINITE_N) return 0;
    uint64_t block = scale_at[check.kind].block;
    int bad = 0;
    for (uint64_t r = 0; r < rows && !bad; r++)
        for (int i = 0; i < scale_at[check.kind].n; i++) {
            uint64_t skip = (scale_at[check.kind].at[i] + block - phase % block) % block;
            if (skip < piece)
                bad |= any_set((const uint8_t *)p + r * pitch + skip, piece - skip, block, scale_at[check.kind].size,
                               scale_at[check.kind].mask);
        }
    if (!bad) return 0;
    const char *d = strstr(check.what, "%d");
    char name[200];
    snprintf(name, sizeof name, "%s", check.what);
    if (d) snprintf(name, sizeof name, "%.*s%lld%s", (int)(d - check.what), check.what, (long long)check.expert, d + 2);
    return sl_err_set(err, SL_EDATA, "'%s' has a scale or value that is NaN or infinite: the checkpoint is damaged",
                      name);
}

/* ---- the ring of buffers ---- */

static int open_staged(sl_loader **out, const sl_source *src, sl_ops *ops, sl_loader_progress *p, sl_err *err) {
    sl_loader *r = calloc(1, sizeof *r);
    if (!r) return sl_err_set(err, SL_ETEMP, "out of memory for the reader");
    r->src = src;
    r->chunk = SL_STAGING_CHUNK;
    int rc = sl_staging_open(&r->staging, src, ops, p, err);
    if (rc)
        free(r);
    else
        *out = r;
    return rc;
}

int sl_loader_open(sl_loader **out, const sl_source *src, sl_ops *ops, sl_loader_progress *p, sl_err *err) {
    *out = NULL;
    sl_err why = {0};
    if (ops->host_alloc && !open_staged(out, src, ops, p, &why)) return 0;
    sl_loader *r = calloc(1, sizeof *r);
    uint32_t n = sl_source_n_files(src);
    if (r) r->direct = malloc((n + 1) * sizeof *r->direct);
    void *mem = mmap(NULL, DEPTH * BUF_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!r || !r->direct || mem == MAP_FAILED) {
        if (mem != MAP_FAILED) munmap(mem, DEPTH * BUF_BYTES);
        if (r) free(r->direct);
        free(r);
        return sl_err_set(err, SL_ETEMP, "out of memory for the read buffers");
    }
    for (uint32_t i = 0; i < n; i++) r->direct[i] = -1;
    r->src = src;
    r->ops = ops;
    r->progress = p;
    r->chunk = CHUNK;
    r->mem = mem;
    for (int i = 0; i < DEPTH; i++) r->slot[i].buf = r->mem + (uint64_t)i * BUF_BYTES;
    int rc = io_uring_queue_init(DEPTH, &r->ring, 0);
    r->uring = rc == 0;
    if (rc)
        snprintf(r->note, sizeof r->note, "io_uring is not available (%s): weights are read one block at a time",
                 strerror(-rc));
    if (why.code)
        snprintf(r->note, sizeof r->note, "copies to the device are slow, without pinned memory (%.120s)", why.msg);
    *out = r;
    return 0;
}

static int direct_fd(sl_loader *r, uint32_t file) {
    if (r->direct[file] == -1) {
        int fd = open(sl_source_path(r->src, file), O_RDONLY | O_CLOEXEC | O_DIRECT);
        r->direct[file] = fd >= 0 ? fd : -2;
        if (fd < 0 && !*r->note)
            snprintf(r->note, sizeof r->note,
                     "the file system refuses O_DIRECT (%s): weights are read through the page cache", strerror(errno));
    }
    return r->direct[file];
}

static void submit(sl_loader *r, slot *s) {
    int fd = s->direct ? r->direct[s->file] : sl_source_fd(r->src, s->file);
    uint64_t ask = s->direct ? (s->want + ALIGN - 1) / ALIGN * ALIGN : s->want;
    struct io_uring_sqe *e = io_uring_get_sqe(&r->ring); /* never full: at most DEPTH in flight */
    io_uring_prep_read(e, fd, s->buf + s->got, (unsigned)(ask - s->got), s->start + s->got);
    io_uring_sqe_set_data(e, s);
    io_uring_submit(&r->ring);
}

/* The chunk is complete: check, upload, count. */
static int deliver(sl_loader *r, slot *s, sl_err *err) {
    const uint8_t *at = s->buf + s->lead;
    int rc = sl_check_finite(at, s->rows, s->pitch, s->piece, s->phase, s->check, err);
    s->busy = 0;
    r->busy--;
    if (s->rows == 1 || s->pitch == s->piece)
        rc = rc ? rc : r->ops->upload(r->ops->ctx, s->dst, at, s->rows * s->piece, err);
    else if (!rc) {
        /* Close the gaps in place first, so that one upload does it. */
        for (uint64_t i = 1; i < s->rows; i++) memmove(s->buf + s->lead + i * s->piece, at + i * s->pitch, s->piece);
        rc = r->ops->upload(r->ops->ctx, s->dst, at, s->rows * s->piece, err);
    }
    if (!rc) rc = r->ops->sync(r->ops->ctx, err); /* the buffer is used again */
    if (!rc) sl_loader_advance(r->progress, s->rows * s->piece);
    return rc;
}

/* Take one completion. A short or refused read is continued. */
static int reap(sl_loader *r, sl_err *err) {
    struct io_uring_cqe *c;
    int rc = io_uring_wait_cqe(&r->ring, &c);
    if (rc == -EINTR) return 0;
    if (rc) return sl_err_sys(err, SL_ETEMP, -rc, "waiting for reads");
    slot *s = io_uring_cqe_get_data(c);
    int res = c->res;
    io_uring_cqe_seen(&r->ring, c);
    if (res == -EINTR || res == -EAGAIN)
        submit(r, s);
    else if (res == -EINVAL && s->direct) {
        if (!*r->note)
            snprintf(r->note, sizeof r->note,
                     "the file system refuses direct reads: weights are read through the page cache");
        s->direct = 0;
        s->got = 0;
        submit(r, s);
    } else if (res < 0) {
        s->busy = 0;
        r->busy--;
        return sl_err_sys(err, SL_ETEMP, -res, "%s: cannot read at byte %" PRIu64, sl_source_path(r->src, s->file),
                          s->start + s->got);
    } else if (res == 0) {
        s->busy = 0;
        r->busy--;
        return too_short(r->src, s->file, s->start + s->got, err);
    } else {
        s->got += (uint64_t)res;
        if (s->got >= s->want) return deliver(r, s, err);
        if (s->got % ALIGN) s->direct = 0; /* the end of a file that has become shorter: plain reads find it */
        submit(r, s);
    }
    return 0;
}

static int read_chunk(sl_loader *r, uint32_t file, uint64_t off, uint64_t rows, uint64_t pitch, uint64_t piece,
                      void *dst, uint64_t phase, sl_finite_check check, sl_err *err) {
    int rc = 0;
    if (r->staging)
        return sl_staging_add(r->staging, &(sl_staging_job){file, off, rows, pitch, piece, phase, dst, check}, err);
    while (r->busy == DEPTH && !rc) rc = reap(r, err);
    if (rc) return rc;
    slot *s = r->slot;
    while (s->busy) s++;
    int direct = r->uring && direct_fd(r, file) >= 0;
    uint64_t start = direct ? off / ALIGN * ALIGN : off;
    uint8_t *buf = s->buf;
    *s = (slot){.buf = buf,
                .busy = 1,
                .direct = direct,
                .file = file,
                .start = start,
                .lead = off - start,
                .want = off - start + (rows - 1) * pitch + piece,
                .rows = rows,
                .pitch = pitch,
                .piece = piece,
                .dst = dst,
                .phase = phase,
                .check = check};
    r->busy++;
    if (r->uring) {
        submit(r, s);
        return 0;
    }
    rc = sl_source_read(r->src, file, start, s->buf, s->want, err);
    if (rc) {
        s->busy = 0;
        r->busy--;
        return rc;
    }
    return deliver(r, s, err);
}

int sl_loader_add(sl_loader *r, uint32_t file, uint64_t off, uint64_t rows, uint64_t pitch, uint64_t piece, void *dst,
                  sl_finite_check check, sl_err *err) {
    uint8_t *to = dst;
    int rc = 0;
    if (rows == 1 || pitch == piece) {
        uint64_t len = rows * piece, start = off;
        while (len && !rc) {
            uint64_t n = r->chunk - off % r->chunk; /* chunks end at its multiples in the file: none is read twice */
            if (n > len) n = len;
            rc = read_chunk(r, file, off, 1, n, n, to, off - start, check, err);
            off += n;
            to += n;
            len -= n;
        }
        return rc;
    }
    if (piece >= MIN_PIECE || pitch > r->chunk) {
        for (uint64_t i = 0; i < rows && !rc; i++)
            rc = sl_loader_add(r, file, off + i * pitch, 1, piece, piece, to + i * piece, check, err);
        return rc;
    }
    for (uint64_t i = 0, n; i < rows && !rc; i += n) {
        n = r->chunk / pitch;
        if (n > rows - i) n = rows - i;
        rc = read_chunk(r, file, off + i * pitch, n, pitch, piece, to + i * piece, 0, check, err);
    }
    return rc;
}

int sl_loader_finish(sl_loader *r, sl_err *err) {
    int rc = 0;
    if (r->staging) return sl_staging_finish(r->staging, err);
    while (r->busy && !rc) rc = reap(r, err);
    return rc;
}

const char *sl_loader_note(const sl_loader *r) {
    return r->staging ? sl_staging_note(r->staging) : r->note;
}

void sl_loader_close(sl_loader *r) {
    if (!r) return;
    if (r->staging) {
        sl_staging_close(r->staging);
        free(r);
        return;
    }
    while (r->uring && r->busy) { /* after an error: buffers must not be written when they are gone */
        struct io_uring_cqe *c;
        int rc = io_uring_wait_cqe(&r->ring, &c);
        if (rc == -EINTR) continue;
        if (rc) break;
        io_uring_cqe_seen(&r->ring, c);
        r->busy--;
    }
    if (r->uring) io_uring_queue_exit(&r->ring);
    for (uint32_t i = 0; i < sl_source_n_files(r->src); i++)
        if (r->direct[i] >= 0) close(r->direct[i]);
    munmap(r->mem, DEPTH * BUF_BYTES);
    free(r->direct);
    free(r);
}
