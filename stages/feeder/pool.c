#include "stages/feeder/pool.h"
#include "ipc/doorbell.h"
#include "ipc/log.h"
#include "ipc/metrics.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MS           1000000ull
#define RETRY_MIN_NS (100 * MS)
#define RETRY_MAX_NS (2000 * MS)
#define REMIND_NS    (60000 * MS)

struct sl_pool {
    pthread_mutex_t mu;
    pthread_cond_t work, ending;
    sl_job *head, *tail;           /* order of arrival */
    sl_job *todo_head, *todo_tail; /* not yet picked up */
    bool stop;
    uint32_t lacking; /* threads that wait until a row can be prepared */
    uint64_t said_ns; /* when that was said last */
    int wake;
    uint32_t n_threads;
    pthread_t *threads;
    sl_preparer **preparers;
    uint32_t started;
    uint64_t jobs, bytes; /* main thread only */
};

void sl_job_free(sl_job *job) {
    if (!job) return;
    sl_prepared_free(&job->out);
    free(job->data);
    free(job);
}

static int prepare(sl_preparer *pr, sl_job *j, sl_err *err) {
    if (j->kind == SL_JOB_JSON) return sl_prepare_json(pr, j->data, j->bytes, &j->out, err);
    const uint8_t *mask = (const uint8_t *)j->data + (size_t)j->n_ids * 4;
    sl_prepare_ids(pr, (const int32_t *)(const void *)j->data, j->n_ids, j->has_mask ? mask : NULL, j->n_mask,
                   (const char *)mask + j->n_mask, j->id_len, &j->out);
    return SL_OK;
}

/* Wait a while, or until the pool ends. With the lock. */
static void wait_a_while(sl_pool *p, uint64_t ns) {
    struct timespec t;
    uint64_t until = sl_now_ns() + ns;
    t.tv_sec = (time_t)(until / (1000 * MS)), t.tv_nsec = (long)(until % (1000 * MS));
    while (!p->stop && sl_now_ns() < until)
        if (pthread_cond_timedwait(&p->ending, &p->mu, &t)) return;
}

/* What the machine lacks now it may have again in a moment: the row waits, and with it everything behind it, since jobs
 * are taken in order. Said when it begins and then once a minute, by one thread for all. With the lock, which is given
 * up meanwhile. False: the pool ends and the job is not finished. */
static bool wait_out_lack(sl_pool *p, sl_preparer *pr, sl_job *j, sl_err *e) {
    int rc = SL_ETEMP;
    p->lacking++;
    for (uint64_t ns = RETRY_MIN_NS; rc && !p->stop; ns = ns < RETRY_MAX_NS ? ns * 2 : ns) {
        uint64_t now = sl_now_ns();
        if (!p->said_ns || now - p->said_ns >= REMIND_NS) {
            p->said_ns = now;
            sl_log(SL_WARN,
                   "rows wait, none is rejected for this: %s; it is tried again until it works, make memory, processes "
                   "or open files free",
                   e->msg);
        }
        wait_a_while(p, ns);
        if (p->stop) break;
        pthread_mutex_unlock(&p->mu);
        rc = prepare(pr, j, e);
        pthread_mutex_lock(&p->mu);
    }
    if (!--p->lacking && !rc) {
        p->said_ns = 0;
        sl_log(SL_INFO, "rows go on: what was missing is there again");
    }
    return !rc;
}

typedef struct worker {
    sl_pool *p;
    sl_preparer *pr;
} worker;

static void *work(void *arg) {
    worker w = *(worker *)arg;
    free(arg);
    sl_pool *p = w.p;
    pthread_mutex_lock(&p->mu);
    for (;;) {
        while (!p->todo_head && !p->stop) pthread_cond_wait(&p->work, &p->mu);
        if (p->stop) break;
        sl_job *j = p->todo_head;
        p->todo_head = j->next_todo;
        if (!p->todo_head) p->todo_tail = NULL;
        pthread_mutex_unlock(&p->mu);
        sl_err e;
        int rc = prepare(w.pr, j, &e);
        pthread_mutex_lock(&p->mu);
        if (rc && !wait_out_lack(p, w.pr, j, &e)) break;
        j->finished = true;
        if (j == p->head) sl_bell_ring(p->wake);
    }
    pthread_mutex_unlock(&p->mu);
    return NULL;
}

static int start_thread(sl_pool *p, const sl_prep_cfg *cfg, sl_err *err) {
    uint32_t i = p->started;
    int rc = sl_preparer_new(&p->preparers[i], cfg, err);
    if (rc) return rc;
    worker *w = malloc(sizeof *w);
    if (!w) return sl_err_set(err, SL_ETEMP, "no memory for feeder thread %u", i);
    *w = (worker){p, p->preparers[i]};
    int e = pthread_create(&p->threads[i], NULL, work, w);
    if (e) {
        free(w);
        return sl_err_sys(err, SL_ETEMP, e, "starting feeder thread %u", i);
    }
    p->started++;
    return SL_OK;
}

int sl_pool_new(sl_pool **out, const sl_prep_cfg *cfg, uint32_t threads, int wake, sl_err *err) {
    if (threads < 1) threads = 1;
    if (threads > 256) threads = 256;
    sl_pool *p = calloc(1, sizeof *p);
    if (!p) return sl_err_set(err, SL_ETEMP, "no memory for the feeder's threads");
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&p->mu, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->ending, &clock);
    pthread_condattr_destroy(&clock);
    p->wake = wake;
    p->n_threads = threads;
    p->threads = calloc(threads, sizeof *p->threads);
    p->preparers = calloc(threads, sizeof(sl_preparer *)); // NOLINT(bugprone-sizeof-expression): pointers are meant
    int rc = SL_OK;
    if (!p->threads || !p->preparers) {
        sl_pool_free(p);
        return sl_err_set(err, SL_ETEMP, "no memory for %u feeder threads", threads);
    }
    for (uint32_t i = 0; !rc && i < threads; i++) rc = start_thread(p, cfg, err);
    if (rc) {
        sl_pool_free(p);
        return rc;
    }
    *out = p;
    return SL_OK;
}

void sl_pool_free(sl_pool *p) {
    if (!p) return;
    pthread_mutex_lock(&p->mu);
    p->stop = true;
    pthread_cond_broadcast(&p->work);
    pthread_cond_broadcast(&p->ending);
    pthread_mutex_unlock(&p->mu);
    for (uint32_t i = 0; i < p->started; i++) pthread_join(p->threads[i], NULL);
    for (uint32_t i = 0; p->preparers && i < p->n_threads; i++) sl_preparer_free(p->preparers[i]);
    for (sl_job *j = p->head, *next; j; j = next) {
        next = j->next;
        sl_job_free(j);
    }
    free(p->threads);
    free(p->preparers);
    pthread_mutex_destroy(&p->mu);
    pthread_cond_destroy(&p->work);
    pthread_cond_destroy(&p->ending);
    free(p);
}

void sl_pool_put(sl_pool *p, sl_job *job) {
    job->next = job->next_todo = NULL;
    job->finished = job->kind == SL_JOB_FLUSH || job->kind == SL_JOB_KNOWN;
    p->jobs++;
    p->bytes += job->bytes;
    pthread_mutex_lock(&p->mu);
    if (p->tail)
        p->tail->next = job;
    else
        p->head = job;
    p->tail = job;
    if (!job->finished) {
        if (p->todo_tail)
            p->todo_tail->next_todo = job;
        else
            p->todo_head = job;
        p->todo_tail = job;
        pthread_cond_signal(&p->work);
    }
    pthread_mutex_unlock(&p->mu);
}

sl_job *sl_pool_take(sl_pool *p) {
    pthread_mutex_lock(&p->mu);
    sl_job *j = p->head && p->head->finished ? p->head : NULL;
    if (j) {
        p->head = j->next;
        if (!p->head) p->tail = NULL;
    }
    pthread_mutex_unlock(&p->mu);
    if (j) {
        p->jobs--;
        p->bytes -= j->bytes;
    }
    return j;
}

bool sl_pool_lacking(sl_pool *p) {
    pthread_mutex_lock(&p->mu);
    bool lacking = p->lacking != 0;
    pthread_mutex_unlock(&p->mu);
    return lacking;
}
uint64_t sl_pool_jobs(const sl_pool *p) {
    return p->jobs;
}
uint64_t sl_pool_bytes(const sl_pool *p) {
    return p->bytes;
}
