/* topology: ONE table of everything that processes share. Creating it, handing it to a stage, and showing it in the
 * monitor all walk this table; nothing else knows which ring goes where.
 *
 *   kind      one per        feeder   rank of g (index r)   gather   writer
 *   bell      process        all      own group + others*   all      all        (*feeder, gather, writer, sluiced)
 *   metrics   run            yes      yes                   yes      yes
 *   ctl       run            yes      yes                   yes      yes
 *   boot      run            yes      yes                   yes      yes
 *   batch     group          all      g                     all      all
 *   chunk     rank           -        its own               all      all
 *   sample    group          -        -                     all      all
 *   coll      group, tp > 1  -        g                     -        -
 *
 * Sizes come from sl_topo_plan, which touches nothing, so that preflight can print and refuse them. */
#ifndef SL_DAEMON_TOPOLOGY_H
#define SL_DAEMON_TOPOLOGY_H
#include "daemon/config.h"

typedef enum {
    SL_OBJ_BELL,
    SL_OBJ_METRICS,
    SL_OBJ_CTL,
    SL_OBJ_BOOT,
    SL_OBJ_BATCH,
    SL_OBJ_CHUNK,
    SL_OBJ_SAMPLE,
    SL_OBJ_COLL,
    SL_OBJ_KINDS
} sl_obj_kind;

typedef struct sl_topo_obj {
    sl_obj_kind kind;
    uint32_t group, rank; /* where they mean something */
    uint32_t proc;        /* bells */
    char name[32];
    uint64_t bytes;      /* shared memory */
    sl_ring_params ring; /* rings only */
    uint64_t coll_elems; /* coll only */
    int fd;              /* -1 before sl_topo_create */
    bool huge;
    sl_ring *view; /* rings, after create: an observer's mapping for the monitor */
} sl_topo_obj;

#define SL_TOPO_MAX (SL_MAX_PROCS + 3 + SL_MAX_RANKS + 3 * SL_MAX_GROUPS)

typedef struct sl_topo {
    sl_boot *boot; /* the caller's; n_procs, procs, groups and the fds are filled in here */
    sl_topo_obj obj[SL_TOPO_MAX];
    unsigned n_obj;
    sl_metrics *metrics; /* page 0 writable */
    sl_ctl_page *ctl;    /* writable */
} sl_topo;

/* First process index of a group's rank. */
#define SL_PROC_SLUICED 0u
#define SL_PROC_FEEDER  1u
#define SL_PROC_GATHER  2u
#define SL_PROC_WRITER  3u
#define SL_PROC_RANKS   4u

/* What one batch may cost a rank at most: descriptors it publishes, payload slots it exports. */
typedef struct sl_topo_need {
    uint64_t batch_tokens; /* max(batch_tokens, max_length) */
    uint64_t chunks;       /* a state */
    uint64_t descriptors, payloads;
} sl_topo_need;
void sl_topo_need_of(const sl_boot *b, sl_topo_need *n);

/* Fill the table from a resolved boot block (dp, tp, K, H, chunk_rows ... all set) and the memory settings of *c. Ring
 * sizes are at least twice what the largest batch needs; SL_ECONFIG prints the arithmetic when memory.ring_size forbids
 * that. */
int sl_topo_plan(sl_topo *t, sl_boot *boot, const sl_config *c, sl_err *err);
uint64_t sl_topo_bytes(const sl_topo *t); /* all shared memory */
/* Make every object and the sealed boot block. SL_ETEMP when memory is short. On failure everything made is closed. */
int sl_topo_create(sl_topo *t, bool huge, sl_err *err);
void sl_topo_destroy(sl_topo *t);

/* May process `proc` have this object's fd? */
bool sl_topo_allowed(const sl_topo *t, unsigned proc, const sl_topo_obj *o);
/* The fds of process `proc`; returns how many, at most `max`. */
int sl_topo_fds(const sl_topo *t, unsigned proc, int *fds, int max);
int sl_topo_boot_fd(const sl_topo *t);
const sl_topo_obj *sl_topo_find(const sl_topo *t, sl_obj_kind kind, uint32_t group, uint32_t rank);
#endif
