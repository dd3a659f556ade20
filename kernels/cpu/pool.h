/* pool: threads-1 helper threads that run one function together with the caller. Work is divided by the function itself
 * from (tid, threads), so what is computed where never depends on timing. Helpers spin for some microseconds after a
 * job, because the next one usually follows at once, then sleep on a futex. One caller at a time. */
#ifndef SL_CPU_POOL_H
#define SL_CPU_POOL_H
#include "ipc/err.h"

typedef struct sl_pool sl_pool;
typedef void (*sl_pool_fn)(void *arg, int tid, int threads);

/* SL_ETEMP when the system gives no more threads. */
int sl_pool_create(sl_pool **out, int threads, sl_err *err);
void sl_pool_run(sl_pool *p, sl_pool_fn fn, void *arg); /* returns when every thread has finished fn */
void sl_pool_destroy(sl_pool *p);

/* Part tid of `threads` equal parts of [0, n), cut at multiples of `step`. */
static inline void sl_pool_part(long n, long step, int tid, int threads, long *lo, long *hi) {
    long units = (n + step - 1) / step;
    *lo = units * tid / threads * step;
    *hi = units * (tid + 1) / threads * step;
    if (*hi > n) *hi = n;
    if (*lo > n) *lo = n;
}
#endif
