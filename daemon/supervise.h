/* supervise: starts the stages, watches them, and restarts what dies. It owns no data and never blocks.
 *
 * Failure domains: {feeder}, {gather}, {writer}, {the ranks of group g} - one state machine each:
 *
 *            start                     a process of it dies
 *   WAIT ------------------> RUNNING ------------------------> KILLING (SIGKILL to the others of the domain)
 *    ^   back-off is over       |                                 | all are reaped
 *    |                          | all exit 0 while draining       | group: epoch + 1, deaths, suspect, poison
 *    |                          v                                 v        (ipc/boot.h)
 *    |                        DONE                        budget left? --no--> the daemon fails (SL_ETEMP, exit 75)
 *    +------------------------------------------------------------+ yes
 *
 * Back-off doubles from backoff_min to backoff_max with each death without progress. Progress is the domain's own: the
 * feeder publishes batches, a group and gather get batches gathered, the writer releases batches. `restarts` deaths
 * without progress within `restart_window` use the budget up. A stage that exits with 78 (configuration) or 2 (usage)
 * is not restarted: the daemon fails with its code. A start that fails for want of processes, memory or descriptors is
 * no death: it is tried again with the same back-off until it works, and costs no budget.
 *
 * Poison. A batch of several rows that was next to be gathered at two deaths in a row is isolated: its ranks run its
 * rows one by one first, and the row that was running so at two deaths is rejected by itself; its batch mates are
 * written. What cannot be told so (it dies only when all rows run together) falls under the rule of the whole batch:
 *
 * deaths counts a group's deaths with no batch gathered in between, while at least one of its ranks had its
 * weights loaded: a rank that cannot even start blames no row. From two on `suspect` is set, on which a feeder that can
 * isolates rows. The batch that was next to be gathered is poison when it is a row alone and was there at two deaths in
 * a row, or when it holds several rows and was there at `poison_deaths`: then all of them are rejected by name, so that
 * the flow goes on. suspect is taken back when everything that was published at the last death is gathered.
 *
 * Watchdog. Every second each bell is rung, so an idle stage turns its loop; a heartbeat that stands still for the
 * limit (watchdog; watchdog_load while starting or loading; watchdog_rank for ranks) is logged at half of it and killed
 * at it.
 *
 * Drain: ctl.draining = 1, all bells; the stages end in flow order by themselves. Killing is always safe. */
#ifndef SL_DAEMON_SUPERVISE_H
#define SL_DAEMON_SUPERVISE_H
#include "daemon/topology.h"
#include "ipc/log.h"
#include <poll.h>

typedef enum { SL_DOM_WAIT, SL_DOM_RUNNING, SL_DOM_KILLING, SL_DOM_DONE } sl_domain_state;

typedef struct sl_super_proc {
    int pid, pidfd; /* 0, -1: not running */
    int life;       /* pid of the newest life, running or not */
    bool done;      /* exited 0 while draining */
    bool warned;    /* watchdog: half of the limit has passed */
    uint64_t beat, beat_ns;
    uint64_t restarts; /* starts after the first */
    uint64_t started_ns;
} sl_super_proc;

typedef struct sl_super_domain {
    char name[32];
    unsigned first, n; /* processes */
    int group;         /* -1: not a group */
    sl_domain_state state;
    uint64_t restart_at_ns;
    unsigned deaths;  /* without progress: back-off */
    unsigned put_off; /* starts that failed one after the other */
    bool unstarted;   /* KILLING because a start failed */
    unsigned budget_used;
    uint64_t window_ns, progress;
    /* groups */
    uint64_t death_pos;     /* gathered at the last death that may blame a row */
    uint64_t suspect_until; /* published at the last death */
    uint32_t death_row;     /* 1 + the row that ran alone at the last death, 0: none */
    unsigned named_at;      /* deaths when a row was named last: the rule of the whole batch counts from there */
} sl_super_domain;

typedef struct sl_super_event {
    uint64_t time_ns; /* CLOCK_REALTIME */
    sl_level level;
    char who[32], msg[256];
} sl_super_event;
#define SL_SUPER_EVENTS 64

typedef struct sl_super {
    const sl_config *cfg;
    sl_topo *topo;
    sl_super_proc proc[SL_MAX_PROCS];
    sl_super_domain dom[SL_MAX_GROUPS + 3];
    unsigned n_dom;
    bool draining, killing;
    int fail_code; /* SL_E*, 0 = none */
    char fail_msg[1024];
    uint64_t last_tick_ns;
    uint64_t n_events; /* ever; the last SL_SUPER_EVENTS are in event[n % SL_SUPER_EVENTS] */
    sl_super_event event[SL_SUPER_EVENTS];
} sl_super;

/* Program of a role: stage_dir, else beside sluiced, else where it was built or installed. SL_ECONFIG lists the places.
 */
int sl_supervise_stage_path(const sl_config *c, sl_role role, char *out, size_t cap, sl_err *err);

/* Start every stage. `cfg` and `topo` must outlive *s. SL_ECONFIG when a program is missing; what the
 * machine lacks just now is waited for.
 */
int sl_super_start(sl_super *s, const sl_config *cfg, sl_topo *topo, sl_err *err);
/* pidfds to poll for POLLIN; returns how many. */
int sl_super_pollfds(const sl_super *s, struct pollfd *fds, int max);
/* Milliseconds until sl_super_step should be called again even if nothing happens. */
int sl_super_timeout(const sl_super *s, uint64_t now_ns);
/* Reap, restart, watch. 1: still running; 0: every stage has ended after a drain; SL_ETEMP / SL_ECONFIG / SL_EUSAGE /
 * SL_EINTERNAL: the daemon has failed, all stages are dead, *err says why. */
int sl_super_step(sl_super *s, uint64_t now_ns, sl_err *err);
void sl_super_drain(sl_super *s, const char *why);
/* SIGKILL everything and wait for it; step then returns SL_ETEMP. */
void sl_super_kill(sl_super *s, const char *why);
bool sl_super_ready(const sl_super *s); /* every stage runs and has said READY */
void sl_super_event_add(sl_super *s, sl_level lv, const char *who, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
const char *sl_domain_state_name(sl_domain_state s);
#endif
