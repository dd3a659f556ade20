#include "ipc/metrics.h"
#include "ipc/memfd.h"
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PAGE_BYTES 4096u
#define MAX_PAGES  4096u

typedef struct page {
    _Atomic uint64_t v[PAGE_BYTES / 8];
} page;
_Static_assert(sizeof(page) == PAGE_BYTES && SL_M_N <= PAGE_BYTES / 8, "a page holds every counter");

struct sl_metrics {
    page *pages, *own; /* own: NULL when nothing is writable */
    unsigned n;
    sl_metric regime; /* running clock of the own page */
    uint64_t since;
};

const char *const sl_metric_names[SL_M_REJECT_BASE] = {
    "start_ns",   "pid",           "heartbeat", "state",      "busy_ns",    "wait_in_ns", "wait_out_ns", "rows_in",
    "rows_out",   "rows_rejected", "tokens_in", "tokens_out", "bytes_raw",  "bytes_out",  "batches",     "warnings",
    "restarts",   "nll_sum_micro", "nll_rows",  "load_done",  "load_total", "epoch",      "queue",       "paused",
    "free_bytes", "commit_ns",     "disk_need", "row_at",     "committed",  "doubt",
};
_Static_assert(SL_M_DOUBT == 29 && SL_M_REJECT_BASE == 30, "one name a counter");

const char *sl_stage_state_name(uint64_t s) {
    static const char *const names[] = {"boot", "loading", "ready", "running", "paused", "draining", "done", "failed"};
    _Static_assert(sizeof names / sizeof *names == SL_ST_FAILED + 1, "one name a state");
    return s <= SL_ST_FAILED ? names[s] : "?";
}

uint64_t sl_now_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

uint64_t sl_metrics_footprint(unsigned n_pages) {
    return (uint64_t)n_pages * PAGE_BYTES;
}

int sl_metrics_create(unsigned n_pages, sl_err *err) {
    if (!n_pages || n_pages > MAX_PAGES)
        return sl_err_set(err, SL_ECONFIG, "metrics: %u pages, expected 1..%u", n_pages, MAX_PAGES);
    return sl_memfd_create("metrics", sl_metrics_footprint(n_pages), false, NULL, 0, false, err);
}

int sl_metrics_attach(sl_metrics **out, int fd, int writable_page, sl_err *err) {
    *out = NULL;
    uint64_t size;
    int rc = sl_memfd_check(fd, "metrics", 0, false, &size, err);
    if (rc) return rc;
    if (!size || size % PAGE_BYTES || size / PAGE_BYTES > MAX_PAGES)
        return sl_err_set(err, SL_EINTERNAL, "metrics: %llu bytes are no whole pages", (unsigned long long)size);
    unsigned n = (unsigned)(size / PAGE_BYTES);
    if (writable_page < -1 || writable_page >= (int)n)
        return sl_err_set(err, SL_EINTERNAL, "metrics: page %d of %u", writable_page, n);
    sl_metrics *m = calloc(1, sizeof *m);
    if (!m) return sl_err_set(err, SL_ETEMP, "metrics: no memory");
    m->n = n;
    m->pages = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    if (m->pages == MAP_FAILED) {
        rc = sl_err_sys(err, SL_ETEMP, errno, "metrics: map");
        free(m);
        return rc;
    }
    if (writable_page >= 0) {
        m->own = m->pages + writable_page;
        if (mmap(m->own, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
                 (off_t)writable_page * PAGE_BYTES) == MAP_FAILED) {
            rc = sl_err_sys(err, SL_ETEMP, errno, "metrics: map page %d for writing", writable_page);
            sl_metrics_detach(m);
            return rc;
        }
    }
    m->regime = SL_M_BUSY_NS;
    m->since = sl_now_ns();
    *out = m;
    return 0;
}

void sl_metrics_detach(sl_metrics *m) {
    if (!m) return;
    munmap(m->pages, sl_metrics_footprint(m->n));
    free(m);
}

void sl_metric_reset(sl_metrics *m) {
    if (!m->own) return;
    for (unsigned i = 0; i < SL_M_N; i++)
        if (i != SL_M_DOUBT) sl_metric_set(m, (sl_metric)i, 0);
    m->regime = SL_M_BUSY_NS;
    m->since = sl_now_ns();
    sl_metric_set(m, SL_M_START_NS, m->since);
    sl_metric_set(m, SL_M_PID, (uint64_t)getpid());
}

/* An atomic add although each page has one writing process: several of its threads may count. */
void sl_metric_add(sl_metrics *m, sl_metric id, uint64_t v) {
    if (m->own && (unsigned)id < SL_M_N) atomic_fetch_add_explicit(&m->own->v[id], v, memory_order_relaxed);
}

void sl_metric_set(sl_metrics *m, sl_metric id, uint64_t v) {
    if (m->own && (unsigned)id < SL_M_N) atomic_store_explicit(&m->own->v[id], v, memory_order_relaxed);
}

uint64_t sl_metric_get(const sl_metrics *m, unsigned pg, sl_metric id) {
    if (pg >= m->n || (unsigned)id >= SL_M_N) return 0;
    return atomic_load_explicit(&m->pages[pg].v[id], memory_order_relaxed);
}

void sl_metric_regime(sl_metrics *m, sl_metric regime) {
    uint64_t now = sl_now_ns();
    sl_metric_add(m, m->regime, now - m->since);
    m->since = now;
    m->regime = regime;
}

void sl_metric_beat(sl_metrics *m) {
    sl_metric_add(m, SL_M_HEARTBEAT, 1);
    sl_metric_regime(m, m->regime);
}
