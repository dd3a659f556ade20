#include "stages/writer/wio.h"
#include <errno.h>
#include <liburing.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct op {
    const uint8_t *buf;
    uint64_t off;
    uint32_t len, at; /* at: bytes taken so far */
    void *tag;
    int res;
    sl_wio_kind kind;
    enum { FREE, HELD, FLYING, DONE, STALLED } st;
} op;

struct sl_wio {
    unsigned n_buf, n_ops; /* ops: one a buffer, as many for the caller's memory, then syncs */
    uint32_t buf_bytes;
    op *ops;
    uint8_t *mem;
    struct io_uring ring;
    bool uring, fixed, reg_file;
    int fd;
    unsigned flying, stalled, undone;
    unsigned next, next_from; /* where the search for a free buffer or operation starts */
    const char *why;
    sl_wio_done done;
    void *arg;
};
enum { N_SYNCS = 16 };

static void start_ring(sl_wio *w, int efd, bool plain) {
    w->why = "asked for";
    if (plain) return;
    struct io_uring_params p = {.flags = 0};
    w->why = "the kernel or a sandbox refuses io_uring";
    if (io_uring_queue_init_params(w->n_ops, &w->ring, &p) < 0) return;
    struct iovec *v = calloc(w->n_buf, sizeof *v);
    for (unsigned i = 0; v && i < w->n_buf; i++) v[i] = (struct iovec){w->mem + (size_t)i * w->buf_bytes, w->buf_bytes};
    /* Registered memory counts against RLIMIT_MEMLOCK; without it the same writes work, a little dearer. */
    w->fixed = v && io_uring_register_buffers(&w->ring, v, w->n_buf) == 0;
    free(v);
    int none = -1;
    w->reg_file = io_uring_register_files(&w->ring, &none, 1) == 0;
    if (efd >= 0) io_uring_register_eventfd(&w->ring, efd);
    w->uring = true;
    w->why = NULL;
}

int sl_wio_open(sl_wio **out, unsigned n_buf, uint32_t buf_bytes, int efd, bool plain, sl_wio_done done, void *arg,
                sl_err *err) {
    sl_wio *w = calloc(1, sizeof *w);
    if (!w) return sl_err_set(err, SL_ETEMP, "no memory for the write engine");
    *w = (sl_wio){
        .n_buf = n_buf, .n_ops = 2 * n_buf + N_SYNCS, .buf_bytes = buf_bytes, .fd = -1, .done = done, .arg = arg};
    w->ops = calloc(w->n_ops, sizeof *w->ops);
    w->mem = mmap(NULL, (size_t)n_buf * buf_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!w->ops || w->mem == MAP_FAILED) {
        if (w->mem != MAP_FAILED) munmap(w->mem, (size_t)n_buf * buf_bytes);
        free(w->ops);
        free(w);
        return sl_err_set(err, SL_ETEMP, "no memory for %u write buffers of %u bytes", n_buf, buf_bytes);
    }
    madvise(w->mem, (size_t)n_buf * buf_bytes, MADV_HUGEPAGE); /* fewer pages to pin when they are not registered */
    for (unsigned i = 0; i < n_buf; i++) w->ops[i].buf = w->mem + (size_t)i * buf_bytes;
    start_ring(w, efd, plain);
    *out = w;
    return 0;
}

void sl_wio_close(sl_wio *w) {
    if (!w) return;
    while (w->flying) sl_wio_reap(w, true);
    if (w->uring) io_uring_queue_exit(&w->ring);
    munmap(w->mem, (size_t)w->n_buf * w->buf_bytes);
    free(w->ops);
    free(w);
}

bool sl_wio_uring(const sl_wio *w) {
    return w->uring;
}
bool sl_wio_fixed(const sl_wio *w) {
    return w->fixed;
}
const char *sl_wio_why_plain(const sl_wio *w) {
    return w->why;
}
unsigned sl_wio_inflight(const sl_wio *w) {
    return w->undone;
}
unsigned sl_wio_stalled(const sl_wio *w) {
    return w->stalled;
}

int sl_wio_file(sl_wio *w, int fd, sl_err *err) {
    if (w->undone) return sl_err_set(err, SL_EINTERNAL, "%u writes in flight while the file changes", w->undone);
    w->fd = fd;
    if (w->uring && w->reg_file) {
        int r = io_uring_register_files_update(&w->ring, 0, &fd, 1);
        if (r < 0) {
            w->reg_file = false;
            io_uring_unregister_files(&w->ring);
        }
    }
    return 0;
}

void *sl_wio_buf(sl_wio *w, unsigned *idx) {
    for (unsigned i = 0; i < w->n_buf; i++) {
        unsigned k = (w->next + i) % w->n_buf;
        if (w->ops[k].st != FREE) continue;
        w->ops[k].st = HELD;
        w->next = k + 1;
        *idx = k;
        return w->mem + (size_t)k * w->buf_bytes;
    }
    return NULL;
}

/* The pwrite and fdatasync twins. */
static void plain_op(sl_wio *w, op *o) {
    o->res = 0;
    if (o->kind == SL_WIO_SYNC) o->res = fdatasync(w->fd) ? -errno : 0;
    while (o->kind == SL_WIO_WRITE && o->at < o->len) {
        ssize_t n = pwrite(w->fd, o->buf + o->at, o->len - o->at, (off_t)(o->off + o->at));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            o->res = n ? -errno : -EIO;
            break;
        }
        o->at += (uint32_t)n;
    }
    o->st = DONE;
}

static void submit(sl_wio *w, unsigned i) {
    op *o = &w->ops[i];
    if (!w->uring) {
        plain_op(w, o);
        return;
    }
    struct io_uring_sqe *s = io_uring_get_sqe(&w->ring); /* the queue holds one entry an op: never NULL */
    int fd = w->reg_file ? 0 : w->fd;
    if (o->kind == SL_WIO_SYNC)
        io_uring_prep_fsync(s, fd, IORING_FSYNC_DATASYNC);
    else if (w->fixed && i < w->n_buf)
        io_uring_prep_write_fixed(s, fd, o->buf + o->at, o->len - o->at, o->off + o->at, (int)i);
    else
        io_uring_prep_write(s, fd, o->buf + o->at, o->len - o->at, o->off + o->at);
    if (w->reg_file) s->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data64(s, i);
    o->st = FLYING;
    w->flying++;
    while (io_uring_submit(&w->ring) == -EINTR) {} /* -EAGAIN, no kernel memory: it stays queued for sl_wio_reap */
}

static void start_write(sl_wio *w, unsigned idx, uint32_t len, uint64_t off, void *tag) {
    op *o = &w->ops[idx];
    o->kind = SL_WIO_WRITE;
    o->len = len;
    o->off = off;
    o->at = 0;
    o->tag = tag;
    w->undone++;
    submit(w, idx);
}

void sl_wio_write(sl_wio *w, unsigned idx, uint32_t len, uint64_t off, void *tag) {
    start_write(w, idx, len, off, tag);
}

bool sl_wio_write_from(sl_wio *w, const void *p, uint32_t len, uint64_t off, void *tag) {
    for (unsigned i = 0; i < w->n_buf; i++) {
        unsigned k = w->n_buf + (w->next_from + i) % w->n_buf;
        if (w->ops[k].st != FREE) continue;
        w->next_from = (k + 1) % w->n_buf;
        w->ops[k].buf = p;
        start_write(w, k, len, off, tag);
        return true;
    }
    return false;
}

void sl_wio_sync(sl_wio *w, void *tag) {
    unsigned i = 2 * w->n_buf;
    while (w->ops[i].st != FREE) { /* more syncs than commit groups can be in flight: wait for one */
        if (++i < w->n_ops) continue;
        sl_wio_reap(w, true);
        i = 2 * w->n_buf;
    }
    w->ops[i].kind = SL_WIO_SYNC;
    w->ops[i].tag = tag;
    w->undone++;
    submit(w, i);
}

/* One completion of the kernel; a short write goes on where it stopped. */
static void complete(sl_wio *w, struct io_uring_cqe *c) {
    op *o = &w->ops[io_uring_cqe_get_data64(c)];
    int res = c->res;
    io_uring_cqe_seen(&w->ring, c);
    w->flying--;
    if (o->kind == SL_WIO_WRITE && res > 0 && o->at + (uint32_t)res < o->len) {
        o->at += (uint32_t)res;
        submit(w, (unsigned)(o - w->ops));
        return;
    }
    if (res == -EAGAIN || res == -EINTR) {
        submit(w, (unsigned)(o - w->ops));
        return;
    }
    o->res = res < 0 ? res : o->kind == SL_WIO_WRITE && res == 0 ? -EIO : 0;
    o->st = DONE;
}

void sl_wio_reap(sl_wio *w, bool wait) {
    struct io_uring_cqe *c;
    unsigned handed = 0;
    do {
        if (w->uring && io_uring_sq_ready(&w->ring)) (void)io_uring_submit(&w->ring); /* refused before: see submit */
        while (w->uring && io_uring_peek_cqe(&w->ring, &c) == 0) complete(w, c);
        for (unsigned i = 0; i < w->n_ops; i++) {
            op *o = &w->ops[i];
            if (o->st != DONE) continue;
            bool full = o->res == -ENOSPC || o->res == -EDQUOT;
            if (full && o->kind == SL_WIO_WRITE) {
                o->st = STALLED;
                w->stalled++;
            } else {
                o->st = FREE;
                w->undone--;
            }
            handed++;
            w->done(w->arg, o->kind, o->tag, full ? -ENOSPC : o->res);
        }
        if (handed || !wait || !w->flying) return;
        if (io_uring_sq_ready(&w->ring)) {
            poll(NULL, 0, 1); /* perhaps nothing is under way: try again, do not wait for a completion */
            continue;
        }
        int r = io_uring_wait_cqe(&w->ring, &c);
        if (r < 0 && r != -EINTR) return;
    } while (1);
}

void sl_wio_retry(sl_wio *w) {
    for (unsigned i = 0; i < 2 * w->n_buf; i++)
        if (w->ops[i].st == STALLED) {
            w->stalled--;
            submit(w, i);
        }
}
