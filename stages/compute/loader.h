/* loader: bytes of files into device memory, fast, with bounded memory. Extents are cut into chunks, whose ends are
 * multiples of the chunk in the file.
 *
 * A backend with pinned host memory (ops->host_alloc) gets chunks of 8 MiB through staging.h: several threads read,
 * copies to the device run behind them. Otherwise, and where no such memory can be had, chunks of 4 MiB are read by
 * io_uring, O_DIRECT, 16 at a time, into a ring of buffers; a finished chunk is uploaded and its buffer used again.
 * Where the kernel or the file system refuses io_uring or O_DIRECT, plain reads are used and the note says so.
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

/* What must be finite in the bytes of a tensor: every element, or the scales that lie in each block of a GGUF type. */
typedef enum {
    SL_FINITE_NONE = -1,
    SL_FINITE_F32,
    SL_FINITE_BF16,
    SL_FINITE_F16,
    SL_FINITE_E8M0, /* exponents alone: 255 is NaN */
    SL_FINITE_Q8_0,
    SL_FINITE_Q4_0,
    SL_FINITE_Q4_1,
    SL_FINITE_Q5_0,
    SL_FINITE_Q5_1,
    SL_FINITE_Q4_K,
    SL_FINITE_Q5_K,
    SL_FINITE_Q6_K,
    SL_FINITE_MXFP4_GGUF,
    SL_FINITE_N
} sl_finite;
typedef struct sl_finite_check {
    sl_finite kind;
    const char *what; /* name for errors, "%d" in it stands for `expert`; must stay until sl_loader_finish */
    int64_t expert;
} sl_finite_check;

int sl_loader_open(sl_loader **out, const sl_source *src, sl_ops *ops, sl_loader_progress *p, sl_err *err);
/* rows pieces of `piece` bytes, `pitch` apart from `off` on, to dst without gaps. Reads may still be in flight on
 * return. */
int sl_loader_add(sl_loader *r, uint32_t file, uint64_t off, uint64_t rows, uint64_t pitch, uint64_t piece, void *dst,
                  sl_finite_check check, sl_err *err);
int sl_loader_finish(sl_loader *r, sl_err *err); /* waits for everything */
const char *sl_loader_note(const sl_loader *r);  /* "" or a sentence: which fallback is in use */
void sl_loader_close(sl_loader *r);

/* Reads [off, off+n) of a file into host memory, at once. */
int sl_source_read(const sl_source *src, uint32_t file, uint64_t off, void *buf, uint64_t n, sl_err *err);
/* 0, or SL_EDATA naming the tensor when one of these is NaN or infinite. Pieces start `phase` bytes into a block; what
 * a piece has only a part of is not looked at. */
int sl_check_finite(const void *p, uint64_t rows, uint64_t pitch, uint64_t piece, uint64_t phase, sl_finite_check check,
                    sl_err *err);
#endif
