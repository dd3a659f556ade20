/* pool: rows are prepared by several threads and come back in the order they went in.
 *
 * One thread (the feeder's main loop) puts jobs in and takes finished ones out, strictly in order of arrival, so that
 * what is journaled depends on the order of arrival alone and never on which thread was faster. `wake` (an eventfd) is
 * rung when the job at the head is finished.
 *
 * Where the machine lacks something that passes (prepare.h: SL_ETEMP), the thread waits and tries the row again, from
 * every 0.1 to every 2 s, and says so once and then every minute. The jobs behind it are not given out meanwhile, so
 * that the feeder takes no more rows than its clients have credit for: the flow is paused, and nothing is rejected. */
#ifndef SL_FEEDER_POOL_H
#define SL_FEEDER_POOL_H
#include "stages/feeder/prepare.h"

typedef enum { SL_JOB_JSON, SL_JOB_IDS, SL_JOB_FLUSH, SL_JOB_KNOWN } sl_job_kind; /* the last two need no thread */

typedef struct sl_job {
    sl_job_kind kind;
    uint32_t client, dataset;
    uint64_t row;
    uint64_t content[2];
    char *data; /* the JSON line, or as n_ids says. Owned. */
    uint64_t bytes;
    uint32_t n_ids, n_mask, id_len; /* IDS: int32 ids[n_ids], u8 mask[n_mask], id string */
    bool has_mask;
    sl_prepared out;
    /* the pool's own */
    bool finished;
    struct sl_job *next, *next_todo;
} sl_job;

typedef struct sl_pool sl_pool;
int sl_pool_new(sl_pool **out, const sl_prep_cfg *cfg, uint32_t threads, int wake, sl_err *err); /* 1..256 threads */
void sl_pool_free(sl_pool *p);             /* waits for the jobs that are being worked on; the rest is dropped */
void sl_pool_put(sl_pool *p, sl_job *job); /* takes the job */
sl_job *sl_pool_take(sl_pool *p);          /* the oldest job if it is finished, else NULL; free with sl_job_free */
bool sl_pool_lacking(sl_pool *p);          /* does a row wait for what the machine lacks? */
uint64_t sl_pool_jobs(const sl_pool *p);   /* put and not taken */
uint64_t sl_pool_bytes(const sl_pool *p);  /* of their data */
void sl_job_free(sl_job *job);
#endif
