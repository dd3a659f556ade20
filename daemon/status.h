/* status: what the daemon knows about itself, as one msgpack map. Built from the metrics pages, the ring cursors and the two
 * logs of the store (the truth about rows); published every status_interval on the progress socket, answered on the
 * control socket, printed by `sluice status --json` and `sluice monitor --json`.
 *
 *   t        "status"            v         1
 *   time     s since 1970        uptime    s
 *   run      u64                 pid       sluiced
 *   state    booting | running | draining | done | failed
 *   model, store, feed           as resolved: paths, socket
 *   layout   {groups, ranks, backend, precision, threads, width, layers, token_bytes}
 *   states   [[H index, final_norm 0|1], ...]
 *   rows     {accepted, committed, rejected, refused, queued, truncated}  of the whole store; accepted = committed +
 *            rejected + queued; rejected: by gather (verdicts); refused: by the feeder before acceptance;
 *            truncated: of the accepted ones, cut to max_length
 *   life     {committed, rejected, refused, tokens}                 since this sluiced started
 *   tokens   {accepted, committed}
 *   bytes    {raw, stored, ratio}                                   committed rows: before and after the codec
 *   rate     {tokens, rows, raw, stored}                            a second, over the last 5 s
 *   eta      s until everything accepted (or expected) is committed; -1 = unknown
 *   nll      {mean, rows}                                           nats; mean is nil when rows = 0
 *   rejects  {REASON: n, ...}                                       verdicts and feeder reasons, only those that occurred
 *   disk     {free, paused 0|1, need}                               bytes; need: estimate for what is still to come
 *   stages   [{name, role, group, rank, pid, state, busy, in, out, rows, tokens, batches, raw, written, warnings,
 *              epoch, restarts, beat_age, load}, ...]     in flow order. busy/in/out: percent of the last second
 *              (computing / waiting for input / waiting for room), sum 100; load: 0..1 of the weights (ranks), else
 *              absent
 *   rings    [{name, depth, fill, slots}, ...]
 *   groups   [{epoch, deaths, suspect 0|1, poison, batch: {published, gathered, released}}, ...]
 *   events   [[time, level, who, msg], ...]                         the last 8, oldest first
 *
 * Events also go out alone: {t: "event", time, lv, who, msg}. */
#ifndef SL_DAEMON_STATUS_H
#define SL_DAEMON_STATUS_H
#include "daemon/preflight.h"
#include "daemon/supervise.h"
#include "ipc/journal.h"
#include <msgpack.h>

typedef struct sl_status_totals {
    uint64_t accepted, accepted_tokens, refused;
    uint64_t truncated; /* of the accepted ones: longer than max_length, and cut */
    uint64_t committed, committed_tokens, rejected, raw, stored;
    double nll_sum;
    uint64_t nll_rows;
    uint64_t verdicts[SL_V_N], reasons[SL_R_N];
} sl_status_totals;

/* Where the reading of a store's two logs stands. */
typedef struct sl_status_at {
    uint64_t intake, commit; /* records read */
} sl_status_at;
/* Add what came since *at to *t. A log that is not there yet counts as empty; SL_EDATA when one is corrupt. */
int sl_status_totals_follow(sl_status_totals *t, const char *store, sl_status_at *at, sl_err *err);

#define SL_STATUS_WINDOW 24 /* samples of the rates */

typedef struct sl_status {
    const sl_config *cfg;
    const sl_topo *topo;
    const sl_super *super;
    const char *state;
    uint64_t start_ns;
    sl_status_at at;
    sl_status_totals now, first; /* first: as found when this sluiced started */
    struct {
        uint64_t ns, tokens, rows, raw, stored;
    } sample[SL_STATUS_WINDOW];
    unsigned n_samples;
    double tokens_s, rows_s, raw_s, stored_s;
    uint64_t regime_ns, regime[SL_MAX_PROCS][3]; /* counters at the last sample */
    float share[SL_MAX_PROCS][3];                /* percent */
    uint64_t token_bytes;
} sl_status;

/* Reads what the logs hold already. SL_EDATA when a log is corrupt (a torn tail is not). */
int sl_status_open(sl_status *s, const sl_config *c, const sl_preflight *p, const sl_topo *t, const sl_super *super,
                   sl_err *err);
int sl_status_update(sl_status *s, uint64_t now_ns, sl_err *err);
void sl_status_pack(const sl_status *s, msgpack_sbuffer *out);
void sl_status_pack_event(const sl_super_event *e, msgpack_sbuffer *out);
/* Rows rejected or refused since this sluiced started. */
uint64_t sl_status_bad_rows(const sl_status *s);
#endif
