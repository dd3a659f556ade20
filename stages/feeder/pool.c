#include "stages/feeder/pool.h"
#include "ipc/doorbell.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct sl_pool {
    pthread_mutex_t mu;
    pthread_cond_t work;
    sl_job *head, *tail;           /* order of arrival */
    sl_job *todo_head, *todo_tail; /* not yet picked up */
    bool stop;
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

static void prepare(sl_preparer *pr, sl_job *j) {
    if (j->kind == SL_JOB_JSON) {
        sl_prepare_json(pr, j->data, j->bytes, &j->out);
        return;
    }
    const uint8_t *mask = (const uint8_t *)j->data + (size_t)j->n_ids * 4;
    sl_prepare_ids(pr, (const int32_t *)(const void *)j->data, j->n_ids, j->has_mask ? mask : NULL, j->n_mask,
                   (const char *)mask + j->n_mask, j->id_len, &j->out);
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
        prepare(w.pr, j);
        pthread_mutex_lock(&p->mu);
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
    pthread_mutex_init(&p->mu, NULL);
    pthread_cond_init(&p->work, NULL);
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

uint64_t sl_pool_jobs(const sl_pool *p) {
    return p->jobs;
}
uint64_t sl_pool_bytes(const sl_pool *p) {
    return p->bytes;
}
