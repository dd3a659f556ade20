#include "kernels/cpu/pool.h"
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SPIN = 4000 }; /* pauses before sleeping: some tens of microseconds */

typedef struct {
    sl_pool *pool;
    int tid;
    pthread_t thread;
} worker;

struct sl_pool {
    int threads, started;
    sl_pool_fn fn;
    void *arg;
    _Alignas(64) _Atomic uint32_t job;  /* counts jobs; released by the caller, acquired by the helpers */
    _Alignas(64) _Atomic uint32_t left; /* helpers still running; released by them, acquired by the caller */
    _Atomic int quit;
    worker w[];
};

static void relax(void) {
    __builtin_ia32_pause();
}
static void futex_wait(_Atomic uint32_t *a, uint32_t seen) {
    syscall(SYS_futex, a, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}
static void futex_wake(_Atomic uint32_t *a) {
    syscall(SYS_futex, a, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void *worker_main(void *arg) {
    worker *w = arg;
    sl_pool *p = w->pool;
    uint32_t seen = 0;
    for (;;) {
        uint32_t now;
        int spin = 0;
        while ((now = atomic_load_explicit(&p->job, memory_order_acquire)) == seen) {
            if (++spin < SPIN)
                relax();
            else
                futex_wait(&p->job, seen);
        }
        seen = now;
        if (atomic_load_explicit(&p->quit, memory_order_relaxed)) return NULL;
        p->fn(p->arg, w->tid, p->threads);
        if (atomic_fetch_sub_explicit(&p->left, 1, memory_order_acq_rel) == 1) futex_wake(&p->left);
    }
}

int sl_pool_create(sl_pool **out, int threads, sl_err *err) {
    if (threads < 1 || threads > 1024)
        return sl_err_set(err, SL_EUSAGE, "%d compute threads asked for; give 1 to 1024", threads);
    size_t bytes = sizeof(sl_pool) + (size_t)threads * sizeof(worker);
    sl_pool *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!p) return sl_err_set(err, SL_ETEMP, "no memory for a pool of %d threads", threads);
    p->threads = threads;
    p->started = 0;
    atomic_init(&p->job, 0);
    atomic_init(&p->left, 0);
    atomic_init(&p->quit, 0);
    for (int t = 1; t < threads; t++) {
        p->w[t].pool = p;
        p->w[t].tid = t;
        int rc = pthread_create(&p->w[t].thread, NULL, worker_main, &p->w[t]);
        if (rc) {
            sl_pool_destroy(p);
            return sl_err_sys(err, SL_ETEMP, rc, "starting compute thread %d of %d", t + 1, threads);
        }
        p->started = t;
    }
    *out = p;
    return 0;
}

void sl_pool_run(sl_pool *p, sl_pool_fn fn, void *arg) {
    if (p->threads == 1) {
        fn(arg, 0, 1);
        return;
    }
    p->fn = fn;
    p->arg = arg;
    atomic_store_explicit(&p->left, (uint32_t)p->started, memory_order_relaxed);
    atomic_fetch_add_explicit(&p->job, 1, memory_order_release);
    futex_wake(&p->job);
    fn(arg, 0, p->threads);
    int spin = 0;
    uint32_t left;
    while ((left = atomic_load_explicit(&p->left, memory_order_acquire))) {
        if (++spin < SPIN)
            relax();
        else
            futex_wait(&p->left, left);
    }
}

void sl_pool_destroy(sl_pool *p) {
    if (!p) return;
    atomic_store_explicit(&p->quit, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&p->job, 1, memory_order_release);
    futex_wake(&p->job);
    for (int t = 1; t <= p->started; t++) pthread_join(p->w[t].thread, NULL);
    free(p);
}
