#include "stages/writer/workers.h"
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

struct sl_workers {
    pthread_mutex_t mu;
    pthread_cond_t work, done;
    sl_job *head, **tail;
    int stop, efd;
    unsigned n;
    pthread_t *threads;
};
typedef struct start {
    sl_workers *p;
    unsigned worker;
} start;

static void *body(void *arg) {
    start s = *(start *)arg;
    free(arg);
    sl_workers *p = s.p;
    pthread_mutex_lock(&p->mu);
    for (;;) {
        while (!p->head && !p->stop) pthread_cond_wait(&p->work, &p->mu);
        sl_job *j = p->head;
        if (!j) break;
        p->head = j->next;
        if (!p->head) p->tail = &p->head;
        pthread_mutex_unlock(&p->mu);
        j->run(j, s.worker);
        pthread_mutex_lock(&p->mu);
        /* From here on the owner may free the job: done is the last touch. */
        atomic_store_explicit(&j->done, 1, memory_order_release);
        pthread_cond_broadcast(&p->done);
        uint64_t one = 1;
        if (p->efd >= 0 && write(p->efd, &one, sizeof one) < 0 && errno != EAGAIN) break;
    }
    pthread_mutex_unlock(&p->mu);
    return NULL;
}

int sl_workers_open(sl_workers **out, unsigned n, int efd, sl_err *err) {
    sl_workers *p = calloc(1, sizeof *p);
    if (!p || !(p->threads = calloc(n ? n : 1, sizeof *p->threads))) {
        free(p);
        return sl_err_set(err, SL_ETEMP, "no memory for a thread pool");
    }
    p->tail = &p->head;
    p->efd = efd;
    pthread_mutex_init(&p->mu, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->done, NULL);
    for (; p->n < n; p->n++) {
        start *s = malloc(sizeof *s);
        int e = s ? 0 : ENOMEM;
        if (s) {
            *s = (start){p, p->n};
            e = pthread_create(&p->threads[p->n], NULL, body, s);
        }
        if (e) {
            unsigned running = p->n;
            free(s);
            sl_workers_close(p);
            return sl_err_sys(err, SL_ETEMP, e, "cannot start worker thread %u of %u", running, n);
        }
    }
    *out = p;
    return 0;
}

void sl_workers_close(sl_workers *p) {
    if (!p) return;
    pthread_mutex_lock(&p->mu);
    p->stop = 1;
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->mu);
    for (unsigned i = 0; i < p->n; i++) pthread_join(p->threads[i], NULL);
    free(p->threads);
    free(p);
}

unsigned sl_workers_size(const sl_workers *p) {
    return p->n;
}

void sl_workers_put(sl_workers *p, sl_job *j) {
    j->next = NULL;
    atomic_store_explicit(&j->done, 0, memory_order_relaxed);
    pthread_mutex_lock(&p->mu);
    *p->tail = j;
    p->tail = &j->next;
    pthread_cond_signal(&p->work);
    pthread_mutex_unlock(&p->mu);
}

void sl_workers_wait(sl_workers *p, sl_job *j) {
    if (atomic_load_explicit(&j->done, memory_order_acquire)) return;
    pthread_mutex_lock(&p->mu);
    while (!atomic_load_explicit(&j->done, memory_order_acquire)) pthread_cond_wait(&p->done, &p->mu);
    pthread_mutex_unlock(&p->mu);
}
