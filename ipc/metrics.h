/* metrics: one page of 64-bit counters a process in one sealed memfd. Each page has one writer; everyone else maps it
 * read-only (the monitor's snapshots are made by sluiced from here). Counters never decrease within one life of a page;
 * gauges may. Time is accounted to exactly one of BUSY / WAIT_IN / WAIT_OUT at any moment, so the three sum to the wall
 * time since START_NS. The label table is tied to the enum by a static assert. */
#ifndef SL_IPC_METRICS_H
#define SL_IPC_METRICS_H
#include "ipc/err.h"
#include <stdint.h>
#include <stdatomic.h>

typedef enum {
    SL_M_START_NS, /* CLOCK_MONOTONIC at start of this life */
    SL_M_PID,
    SL_M_HEARTBEAT, /* +1 each turn of the main loop */
    SL_M_STATE,     /* sl_stage_state */
    SL_M_BUSY_NS,
    SL_M_WAIT_IN_NS,
    SL_M_WAIT_OUT_NS,
    SL_M_ROWS_IN,
    SL_M_ROWS_OUT,
    SL_M_ROWS_REJECTED,
    SL_M_TOKENS_IN,
    SL_M_TOKENS_OUT,
    SL_M_BYTES_RAW, /* states handed on (rank: exported; writer: before the codec) */
    SL_M_BYTES_OUT, /* bytes written to the store */
    SL_M_BATCHES,
    SL_M_WARNINGS,
    SL_M_RESTARTS, /* written by sluiced into its own page's copy; 0 elsewhere */
    SL_M_NLL_SUM_MICRO,
    SL_M_NLL_ROWS, /* sum of row means in 1e-6 nats (two's complement) */
    SL_M_LOAD_DONE,
    SL_M_LOAD_TOTAL,  /* bytes of weights (rank) */
    SL_M_EPOCH,       /* rank: the epoch it runs in */
    SL_M_QUEUE,       /* feeder: rows accepted, not yet published in a batch */
    SL_M_PAUSED,      /* writer: 1 while the disk is full */
    SL_M_FREE_BYTES,  /* writer: free bytes in the store's file system */
    SL_M_COMMIT_NS,   /* writer: time spent in fdatasync */
    SL_M_DISK_NEED,   /* writer: forecast bytes still to come */
    SL_M_ROW_AT,      /* rank: 1 + the row that runs alone, to find a poison row (ipc/boot.h); 0: none */
    SL_M_COMMITTED,   /* writer: records of commit.log that are on disk, headers too; 0 until it has opened the log */
    SL_M_DOUBT,       /* writer: 1 + seq of the row whose states were not those that gather validated; 0: none. The only
                         counter that a process finds as its last life left it */
    SL_M_REJECT_BASE, /* + sl_verdict or the feeder's reason, 32 slots */
    SL_M_N = SL_M_REJECT_BASE + 32
} sl_metric;
extern const char *const sl_metric_names[SL_M_REJECT_BASE];

typedef enum {
    SL_ST_BOOT,
    SL_ST_LOADING,
    SL_ST_READY,
    SL_ST_RUNNING,
    SL_ST_PAUSED,
    SL_ST_DRAINING,
    SL_ST_DONE,
    SL_ST_FAILED
} sl_stage_state;
const char *sl_stage_state_name(uint64_t s);

typedef struct sl_metrics sl_metrics; /* a mapping of all pages, one of them writable */

uint64_t sl_metrics_footprint(unsigned n_pages);      /* pages are 4096 bytes, one a process (index: sl_boot.proc) */
int sl_metrics_create(unsigned n_pages, sl_err *err); /* sealed memfd */
int sl_metrics_attach(sl_metrics **out, int fd, int writable_page, sl_err *err); /* -1: none */
void sl_metrics_detach(sl_metrics *m);
void sl_metric_reset(sl_metrics *m);                         /* own page: zero but for DOUBT, set START_NS, PID */
void sl_metric_add(sl_metrics *m, sl_metric id, uint64_t v); /* relaxed; own page */
void sl_metric_set(sl_metrics *m, sl_metric id, uint64_t v);
uint64_t sl_metric_get(const sl_metrics *m, unsigned page, sl_metric id);
/* Regime accounting: switch the running clock to BUSY / WAIT_IN / WAIT_OUT; the time since the last switch is added to
 * the regime that ends. */
void sl_metric_regime(sl_metrics *m, sl_metric regime);
/* Called every turn of a stage's main loop: heartbeat + 1 and flushes the running regime. */
void sl_metric_beat(sl_metrics *m);
uint64_t sl_now_ns(void); /* CLOCK_MONOTONIC */
#endif
