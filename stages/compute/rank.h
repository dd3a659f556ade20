/* rank: the compute process, `sluice-compute --boot FD --proc INDEX`, one per tensor-parallel rank.
 *
 *   open the stage -> ops -> load this rank's weights (state LOADING, progress in LOAD_DONE / LOAD_TOTAL) -> forward,
 * chunk ring, collective -> agree with the other ranks where to start -> for each batch: check it, agree that all ranks
 * hold the same one, forward, export states as they are complete, rows, end -> until drained.
 *
 * Start. A rank reads the batch ring as an observer from a position of its own, which starts at cursor "gathered".
 * Ranks read that cursor at different moments, so they agree on the greatest value: what lies below it has been
 * gathered. Epoch. Taken from the group's ctl page at start; when it changes, this life is over and the process ends
 * with 0, saying nothing (the supervisor has already spoken). Drain. When the global page says so, the feeder is DONE
 * and no batch is unread, the process ends with 0. A batch that cannot be read is a broken promise of the feeder:
 * SL_EINTERNAL. Teacher NLL is computed by rank 0 for rows flagged SL_ROW_NLL; it needs H[n] to be captured, else there
 * is one WARN and NaN. */
#ifndef SL_COMPUTE_RANK_H
#define SL_COMPUTE_RANK_H
#include "ipc/boot.h"

/* Runs until drained (0), superseded (0) or failed (SL_E*). */
int sl_rank_run(sl_stage *st, sl_err *err);
#endif
