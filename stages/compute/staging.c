#include "stages/compute/staging.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define ALIGN     UINT64_C(4096)
#define BUF_BYTES (SL_STAGING_CHUNK + 2 * ALIGN)

/* A buffer's way. Only READING -> READ and WAITING -> READING are taken by readers, under the lock. */
typedef enum { FREE, WAITING, READING, READ, COPYING } state;

typedef struct slot {
    state state;
    uint8_t *buf;
    sl_staging_job job;
    uint64_t lead; /* first byte of the result in buf */
    uint64_t ticket;
    int rc;
    sl_err err;
} slot;

typedef struct file {  /* made by the caller's thread before the first job of it is queued */
    int known, direct; /* direct: O_DIRECT descriptor, or -1 */
} file;

struct sl_staging {
    const sl_source *src;
    sl_ops *ops;
    sl_loader_progress *progress;
    file *file;
    uint8_t *mem;
    slot slot[SL_STAGING_BUFFERS];
    int queue[SL_STAGING_BUFFERS], queued, head; /* WAITING, oldest first */
    int copying[SL_STAGING_BUFFERS], n_copying;  /* COPYING, oldest first */
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    pthread_t reader[SL_STAGING_READERS];
    int n_readers, quit;
    char note[200];
};

/* ---- reading, in the readers ---- */

/* What of these bytes is in memory, at most n, from the first one on. -1: this file system cannot tell, for instance
 * because it is one in memory. */
static int64_t read_now(int fd, void *buf, uint64_t n, uint64_t off) {
    struct iovec v = {buf, n};
    ssize_t r;
    do r = preadv2(fd, &v, 1, (off_t)off, RWF_NOWAIT);
    while (r < 0 && errno == EINTR);
    return r >= 0 ? r : errno == EAGAIN ? 0 : -1;
}

/* Bytes [start, start + want) of the file to buf, the first *got of them there; start, buf and *got are multiples of
 * ALIGN. 0: done; 1: direct reads do not serve (refused, or a short one that leaves an odd offset) and the rest, from
 * *got on, is to be read otherwise. */
static int read_direct(const sl_source *src, uint32_t n, int fd, uint8_t *buf, uint64_t start, uint64_t want,
                       uint64_t *got, sl_err *err) {
    uint64_t ask = (want + ALIGN - 1) / ALIGN * ALIGN;
    while (*got < want) {
        ssize_t r = pread(fd, buf + *got, ask - *got, (off_t)(start + *got));
        if (r < 0 && errno == EINTR) continue;
        if (r < 0 && errno == EINVAL) return 1;
        if (r < 0)
            return sl_err_sys(err, SL_ETEMP, errno, "%s: cannot read at byte %" PRIu64, sl_source_path(src, n),
                              start + *got);
        *got += (uint64_t)r;
        if (*got < want && (r == 0 || *got % ALIGN)) return 1;
    }
    return 0;
}

/* Reads a job, gaps and all: from memory what is there, the rest with O_DIRECT. The first byte alone is tried first: a
 * miss of a large read would start reading ahead into the page cache. Aligned offsets lie at aligned addresses. */
static int read_span(sl_staging *s, slot *b, uint64_t len) {
    const sl_staging_job *j = &b->job;
    int fd = sl_source_fd(s->src, j->file), direct = s->file[j->file].direct, rc = 1;
    uint64_t start = j->off / ALIGN * ALIGN, want = j->off - start + len, got = b->lead = j->off - start;
    int64_t now = read_now(fd, b->buf + got, 1, j->off);
    if (now > 0) now = read_now(fd, b->buf + got, len, j->off);
    got += now > 0 ? (uint64_t)now : 0;
    if (got == want) return 0;
    if (now >= 0 && direct >= 0) {
        got = got / ALIGN * ALIGN;
        rc = read_direct(s->src, j->file, direct, b->buf, start, want, &got, &b->err);
        if (got < b->lead) got = b->lead;
    } else
        (void)posix_fadvise(fd, (off_t)j->off, (off_t)len, POSIX_FADV_WILLNEED);
    return rc == 1 ? sl_source_read(s->src, j->file, start + got, b->buf + got, want - got, &b->err) : rc;
}

/* More gaps than data: pieces that are in memory are taken one by one, which costs less than copying the gaps. 1: they
 * are not in memory. */
static int read_pieces(sl_staging *s, slot *b, uint64_t len) {
    const sl_staging_job *j = &b->job;
    int fd = sl_source_fd(s->src, j->file), rc = 0, tell = 1;
    b->lead = 0;
    for (uint64_t i = 0; i < j->rows && !rc; i++) {
        uint8_t *to = b->buf + i * j->piece;
        uint64_t off = j->off + i * j->pitch;
        int64_t now = tell ? read_now(fd, to, j->piece, off) : -1;
        if (now == (int64_t)j->piece) continue;
        if (now >= 0) return 1;
        if (tell) (void)posix_fadvise(fd, (off_t)j->off, (off_t)len, POSIX_FADV_WILLNEED);
        tell = 0;
        rc = sl_source_read(s->src, j->file, off, to, j->piece, &b->err);
    }
    return rc;
}

static int fill(sl_staging *s, slot *b) {
    const sl_staging_job *j = &b->job;
    uint64_t len = (j->rows - 1) * j->pitch + j->piece, pitch = j->piece;
    int rc = j->rows > 1 && j->pitch >= 2 * j->piece ? read_pieces(s, b, len) : 1;
    if (rc == 1) {
        pitch = j->rows > 1 ? j->pitch : j->piece;
        rc = read_span(s, b, len);
    }
    uint8_t *at = b->buf + b->lead;
    if (!rc) rc = sl_check_finite(at, j->rows, pitch, j->piece, j->phase, j->check, &b->err);
    if (!rc && pitch != j->piece)
        for (uint64_t i = 1; i < j->rows; i++) memmove(at + i * j->piece, at + i * pitch, j->piece);
    return rc;
}

static void *read_main(void *arg) {
    sl_staging *s = arg;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->queued && !s->quit) pthread_cond_wait(&s->work, &s->lock);
        if (s->quit) break;
        slot *b = &s->slot[s->queue[s->head]];
        s->head = (s->head + 1) % SL_STAGING_BUFFERS;
        s->queued--;
        b->state = READING;
        pthread_mutex_unlock(&s->lock);
        int rc = fill(s, b);
        pthread_mutex_lock(&s->lock);
        b->rc = rc;
        b->state = READ;
        pthread_cond_signal(&s->done);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* ---- life ---- */

/* Signals stay the caller's thread's business. */
static int start_readers(sl_staging *s, sl_err *err) {
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    int want = cpus < 2 ? 2 : cpus > SL_STAGING_READERS ? SL_STAGING_READERS : (int)cpus, e = 0;
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    while (s->n_readers < want && !(e = pthread_create(&s->reader[s->n_readers], NULL, read_main, s))) s->n_readers++;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return s->n_readers ? 0 : sl_err_sys(err, SL_ETEMP, e, "no thread for reading weights");
}

int sl_staging_open(sl_staging **out, const sl_source *src, sl_ops *ops, sl_loader_progress *p, sl_err *err) {
    *out = NULL;
    sl_staging *s = calloc(1, sizeof *s);
    if (s) s->file = calloc(sl_source_n_files(src) + 1, sizeof *s->file);
    if (!s || !s->file) {
        free(s);
        return sl_err_set(err, SL_ETEMP, "out of memory for the read buffers");
    }
    s->src = src;
    s->ops = ops;
    s->progress = p;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->work, NULL);
    pthread_cond_init(&s->done, NULL);
    void *mem = NULL;
    int rc = ops->host_alloc(ops->ctx, &mem, SL_STAGING_BYTES, err);
    s->mem = rc ? NULL : mem;
    for (int i = 0; i < SL_STAGING_BUFFERS && s->mem; i++) s->slot[i].buf = s->mem + (uint64_t)i * BUF_BYTES;
    if (!rc) rc = start_readers(s, err);
    if (rc) {
        sl_staging_close(s);
        return rc;
    }
    *out = s;
    return 0;
}

void sl_staging_close(sl_staging *s) {
    if (!s) return;
    pthread_mutex_lock(&s->lock);
    s->quit = 1;
    pthread_cond_broadcast(&s->work);
    pthread_mutex_unlock(&s->lock);
    for (int i = 0; i < s->n_readers; i++) pthread_join(s->reader[i], NULL);
    if (s->n_copying) (void)s->ops->sync(s->ops->ctx, NULL); /* after an error: a copy may still read the buffers */
    if (s->mem) s->ops->host_free(s->ops->ctx, s->mem);
    for (uint32_t i = 0; i < sl_source_n_files(s->src); i++) {
        file *f = &s->file[i];
        if (f->known && f->direct >= 0) close(f->direct);
    }
    pthread_cond_destroy(&s->work);
    pthread_cond_destroy(&s->done);
    pthread_mutex_destroy(&s->lock);
    free(s->file);
    free(s);
}

/* ---- the caller's thread ---- */

static void know_file(sl_staging *s, uint32_t n) {
    file *f = &s->file[n];
    if (f->known) return;
    f->known = 1;
    f->direct = open(sl_source_path(s->src, n), O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (f->direct < 0 && !*s->note)
        snprintf(s->note, sizeof s->note,
                 "the file system refuses O_DIRECT (%s): weights are read through the page cache", strerror(errno));
}

/* Starts the copies of everything that has been read. */
static int send_read(sl_staging *s, sl_err *err) {
    int ready[SL_STAGING_BUFFERS], n = 0, rc = 0;
    pthread_mutex_lock(&s->lock);
    for (int i = 0; i < SL_STAGING_BUFFERS; i++)
        if (s->slot[i].state == READ) ready[n++] = i;
    pthread_mutex_unlock(&s->lock);
    for (int i = 0; i < n && !rc; i++) {
        slot *b = &s->slot[ready[i]];
        const sl_staging_job *j = &b->job;
        if ((rc = b->rc)) {
            if (err) *err = b->err;
            return rc;
        }
        rc = s->ops->upload_start(s->ops->ctx, j->dst, b->buf + b->lead, j->rows * j->piece, &b->ticket, err);
        if (rc) return rc;
        b->state = COPYING;
        s->copying[s->n_copying++] = ready[i];
        sl_loader_advance(s->progress, j->rows * j->piece);
    }
    return rc;
}

/* Waits until something moves: the oldest copy's end (under a millisecond away), or when no copy runs a reader's. Not
 * every buffer is free. */
static int wait_some(sl_staging *s, sl_err *err) {
    if (s->n_copying) {
        slot *b = &s->slot[s->copying[0]];
        int rc = s->ops->upload_wait(s->ops->ctx, b->ticket, err);
        if (rc) return rc;
        b->state = FREE;
        memmove(s->copying, s->copying + 1, (size_t)--s->n_copying * sizeof *s->copying);
        return 0;
    }
    pthread_mutex_lock(&s->lock);
    for (;;) {
        int some = 0;
        for (int i = 0; i < SL_STAGING_BUFFERS; i++) some |= s->slot[i].state == READ;
        if (some) break;
        pthread_cond_wait(&s->done, &s->lock);
    }
    pthread_mutex_unlock(&s->lock);
    return 0;
}

/* A buffer's state as this thread may see it; FREE and COPYING are its own. */
static int free_slot(sl_staging *s, int *all_free) {
    int at = -1;
    *all_free = 1;
    pthread_mutex_lock(&s->lock);
    for (int i = 0; i < SL_STAGING_BUFFERS; i++) {
        if (s->slot[i].state != FREE)
            *all_free = 0;
        else if (at < 0)
            at = i;
    }
    pthread_mutex_unlock(&s->lock);
    return at;
}

int sl_staging_add(sl_staging *s, const sl_staging_job *job, sl_err *err) {
    int rc, at, all;
    if (!job->rows || !job->piece) return 0;
    know_file(s, job->file);
    if ((rc = send_read(s, err))) return rc;
    while ((at = free_slot(s, &all)) < 0)
        if ((rc = wait_some(s, err)) || (rc = send_read(s, err))) return rc;
    slot *b = &s->slot[at];
    b->job = *job;
    b->rc = 0;
    pthread_mutex_lock(&s->lock);
    b->state = WAITING;
    s->queue[(s->head + s->queued++) % SL_STAGING_BUFFERS] = at;
    pthread_cond_signal(&s->work);
    pthread_mutex_unlock(&s->lock);
    return 0;
}

int sl_staging_finish(sl_staging *s, sl_err *err) {
    int rc, all;
    for (;;) {
        if ((rc = send_read(s, err))) return rc;
        (void)free_slot(s, &all);
        if (all) return 0;
        if ((rc = wait_some(s, err))) return rc;
    }
}

const char *sl_staging_note(const sl_staging *s) {
    return s->note;
}
