/* staging: bytes of files into device memory through pinned buffers, for backends that have such (ops->host_alloc).
 * Several threads read, check and close gaps, each in a buffer of its own; the caller's thread starts the copies to the
 * device, which run behind the reading. A buffer is used again when its copy is done. Host memory: SL_STAGING_BYTES,
 * however large the model.
 *
 * What is in the page cache is copied from there (bound by the threads' memcpy); the rest is read with O_DIRECT where
 * the file system allows it, which costs no page cache. The kernel says which is which: a read that must not wait comes
 * back short.
 *
 * Expected on one H200 host with 16 processors: 12 readers at 3 to 5 GB/s each, 30 to 50 GB/s from the page cache (the
 * copies alone: 55 GB/s); from a disk what the disk gives at 12 requests of 8 MiB in flight. */
#ifndef SL_COMPUTE_STAGING_H
#define SL_COMPUTE_STAGING_H
#include "stages/compute/loader.h"

#define SL_STAGING_CHUNK UINT64_C(8388608) /* most bytes of a job, gaps included */
enum { SL_STAGING_BUFFERS = 16, SL_STAGING_READERS = 12 };
#define SL_STAGING_BYTES (SL_STAGING_BUFFERS * (SL_STAGING_CHUNK + 8192)) /* 134 MB of pinned memory */

typedef struct sl_staging sl_staging;
typedef struct sl_staging_job { /* rows pieces of `piece` bytes, `pitch` apart from `off` on, to dst without gaps */
    uint32_t file;
    uint64_t off, rows, pitch, piece; /* (rows - 1) * pitch + piece <= SL_STAGING_CHUNK */
    uint64_t phase;                   /* bytes of a block before `off`, for the check */
    void *dst;
    sl_finite_check check;
} sl_staging_job;

/* SL_ETEMP: no pinned memory, no threads. `src`, `ops` and `p` must outlive it; `p` is called in the caller's thread.
 */
int sl_staging_open(sl_staging **out, const sl_source *src, sl_ops *ops, sl_loader_progress *p, sl_err *err);
/* Returns when the job has a buffer. SL_EDATA (a file that ends early, a value that is not finite), SL_ETEMP (a read
 * that failed) may be those of an earlier job; after an error only close may be called. */
int sl_staging_add(sl_staging *s, const sl_staging_job *job, sl_err *err);
int sl_staging_finish(sl_staging *s, sl_err *err); /* waits until everything is in device memory; errors as above */
const char *sl_staging_note(const sl_staging *s);  /* "" or a sentence: which fallback is in use */
void sl_staging_close(sl_staging *s);              /* waits for what is in flight; NULL is nothing */
#endif
