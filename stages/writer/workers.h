/* workers: worker threads for compression and for file system calls that block. A job is a struct that its owner keeps
 * alive until it is done; run() is called once in some worker. After it, the pool adds 1 to the eventfd (when there is
 * one), so a main loop that polls can wait for jobs and for everything else at once. */
#ifndef SL_WRITER_WORKERS_H
#define SL_WRITER_WORKERS_H
#include "ipc/err.h"
#include <stdatomic.h>
#include <stdint.h>

typedef struct sl_job {
    void (*run)(struct sl_job *j, unsigned worker);
    struct sl_job *next;
    _Atomic int done; /* 0 queued or running, 1 done: stored with release after run() */
} sl_job;

typedef struct sl_workers sl_workers;
/* n worker threads, 1..256. `efd` is an eventfd to add to, or -1. SL_ETEMP: no thread or memory. */
int sl_workers_open(sl_workers **out, unsigned n, int efd, sl_err *err);
void sl_workers_close(sl_workers *p); /* finishes what is queued */
unsigned sl_workers_size(const sl_workers *p);
void sl_workers_put(sl_workers *p, sl_job *j);
/* Block until j is done. */
void sl_workers_wait(sl_workers *p, sl_job *j);
#endif
