/* loader: bytes of files into device memory, fast, with bounded memory. Extents are cut into chunks at multiples of 4
 * MiB of the file and read by io_uring, O_DIRECT, 16 at a time, into a ring of buffers; a finished chunk is uploaded
 * and its buffer used again. Where the kernel or the file system refuses io_uring or O_DIRECT, plain reads are used and
 * the note says so.
 *
 * A strided extent (columns of a matrix) with pieces below 32 KiB is read whole, gaps included: reading a few KiB at a
 * time costs more than the gaps. */
#ifndef SL_COMPUTE_LOADER_H
#define SL_COMPUTE_LOADER_H
#include "stages/compute/source.h"

typedef struct sl_loader sl_loader;
typedef struct sl_loader_progress {
    void (*fn)(void *arg, uint64_t done, uint64_t total);
    void *arg;
    uint64_t done, total;
} sl_loader_progress;
void sl_loader_advance(sl_loader_progress *p, uint64_t bytes);

int sl_loader_open(sl_loader **out, const sl_source *src, sl_ops *ops, sl_loader_progress *p, sl_err *err);
/* rows pieces of `piece` bytes, `pitch` apart from `off` on, to dst without gaps. finite: SL_F32/SL_BF16/SL_F16 to
 * check that every element is finite, -1 not to; `what` names it in errors and must stay until sl_loader_finish. Reads
 * may still be in flight on return. */
int sl_loader_add(sl_loader *r, uint32_t file, uint64_t off, uint64_t rows, uint64_t pitch, uint64_t piece, void *dst,
                  int finite, const char *what, sl_err *err);
int sl_loader_finish(sl_loader *r, sl_err *err); /* waits for everything */
const char *sl_loader_note(const sl_loader *r);  /* "" or a sentence: which fallback is in use */
void sl_loader_close(sl_loader *r);

/* Reads [off, off+n) of a file into host memory, at once. */
int sl_source_read(const sl_source *src, uint32_t file, uint64_t off, void *buf, uint64_t n, sl_err *err);
/* 0, or SL_EDATA naming `what` when an element of the pieces is NaN or infinite. */
int sl_check_finite(const void *p, uint64_t rows, uint64_t pitch, uint64_t piece, int dtype, const char *what,
                    sl_err *err);
#endif
