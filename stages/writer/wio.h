/* wio: the writer's asynchronous file writes: registered buffers and file, several writes in flight, fdatasync as an
 * operation among them. One file at a time is written, from one thread.
 *
 * With io_uring a write is submitted and reported later; on kernels without it (or where a sandbox forbids it) every
 * call does its pwrite at once and reports it at the next reap, and sl_wio_uring says so.
 *
 * Bytes are written from the engine's own registered buffers, or straight from the caller's memory (sl_wio_write_from):
 * io_uring cannot register memory that is mapped read-only, as a ring's payload is, so the kernel pins those pages for
 * each write, which costs much less than copying them.
 *
 * A write is reported done only when every byte was taken; a full disk (ENOSPC, EDQUOT) is reported as -ENOSPC and the
 * buffer is kept until sl_wio_retry writes it again. Any other failure is reported as its -errno and is final. */
#ifndef SL_WRITER_WIO_H
#define SL_WRITER_WIO_H
#include "ipc/err.h"
#include <stdbool.h>
#include <stdint.h>

typedef struct sl_wio sl_wio;
typedef enum { SL_WIO_WRITE, SL_WIO_SYNC } sl_wio_kind;
/* res: 0, or -errno. */
typedef void (*sl_wio_done)(void *arg, sl_wio_kind kind, void *tag, int res);

/* n_buf buffers (2..1024) of buf_bytes (multiple of 4096); n_buf is also the depth. `efd` is signalled at completions
 * (-1: none). `plain` asks for pwrite even where io_uring works. SL_ETEMP: no memory. */
int sl_wio_open(sl_wio **out, unsigned n_buf, uint32_t buf_bytes, int efd, bool plain, sl_wio_done done, void *arg,
                sl_err *err);
void sl_wio_close(sl_wio *w); /* waits for what is in flight */
bool sl_wio_uring(const sl_wio *w);
bool sl_wio_fixed(const sl_wio *w);            /* buffers are registered (RLIMIT_MEMLOCK allowed it) */
const char *sl_wio_why_plain(const sl_wio *w); /* the reason when sl_wio_uring is false */
/* The file that further writes go to; nothing may be in flight. */
int sl_wio_file(sl_wio *w, int fd, sl_err *err);
/* A free buffer (index in *idx), or NULL when all are in flight: reap first. It is the caller's until written. */
void *sl_wio_buf(sl_wio *w, unsigned *idx);
/* Write len bytes of buffer idx at off. The buffer is free again when it is done. */
void sl_wio_write(sl_wio *w, unsigned idx, uint32_t len, uint64_t off, void *tag);
/* Write len bytes of the caller's memory at off, which stay as they are until it is reported. For a file opened with
 * O_DIRECT, p, len and off are multiples of what the file asks for. false: as many as there are buffers are in flight:
 * reap first. */
bool sl_wio_write_from(sl_wio *w, const void *p, uint32_t len, uint64_t off, void *tag);
void sl_wio_sync(sl_wio *w, void *tag); /* fdatasync of everything reported done before */
/* Hand out completions; with `wait`, block until there is at least one (returns at once when nothing is in flight). */
void sl_wio_reap(sl_wio *w, bool wait);
unsigned sl_wio_inflight(const sl_wio *w); /* writes and syncs not yet reported */
unsigned sl_wio_stalled(const sl_wio *w);  /* writes that met a full disk */
void sl_wio_retry(sl_wio *w);
#endif
