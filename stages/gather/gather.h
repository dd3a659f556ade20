/* gather: assembles the chunks of all ranks of all groups, proves every row, and passes verdicts on. It copies nothing:
 * the states stay in the chunk rings, a verdict goes into the sample ring. What travels is described in ipc/flow.h,
 * what is checked in stages/gather/validate.h.
 *
 * Progress. The batch in hand of a group is the one at cursor "gathered" of its batch ring. It ends when every rank's
 * END is in (or the rank has visibly gone on to the next batch without one, which is a fault of the batch), whatever
 * nonsense came before; so a garbled batch is rejected and the next one starts clean.
 *
 * Epochs. Descriptors of a dead epoch are of no use unless every rank had finished the batch. The group's epoch is read
 * before the cursors: it is bumped only after every rank was reaped, so what an older epoch will ever have written is
 * visible then. If the batch is still incomplete it is forgotten, and everything older than the new epoch is passed
 * over.
 *
 * Crashes (tests/models/gather.pml). A batch goes through: publish BATCH + SAMPLEs (one store), advance "validated" of
 * each chunk ring, advance "gathered". A restart finds the batch at "gathered" either already in the sample ring (then
 * only the cursors are advanced) or not (then it is read again from "validated", in
 * the current epoch only). Crash points, in this order:
 * gather.before_publish, gather.after_publish, gather.after_validated, gather.after_gathered.
 *
 * Poison. When ctl names the batch in hand, its rows get the verdict POISON without waiting for chunks. */
#ifndef SL_GATHER_GATHER_H
#define SL_GATHER_GATHER_H
#include "ipc/boot.h"

typedef struct sl_gather sl_gather;

/* Map all rings and take up every group where the last life left it. SL_EINTERNAL, SL_ETEMP, SL_ECONFIG (a sample ring
 * too small for the largest batch). `st` must outlive the gather. */
int sl_gather_open(sl_gather **out, const sl_stage *st, sl_err *err);
void sl_gather_close(sl_gather *g);

/* Do what can be done now for every group. 1: something was done, 0: nothing to do, negative: fatal. *full is set when
 * a batch waits for room in a sample ring. */
int sl_gather_turn(sl_gather *g, bool *full, sl_err *err);
/* Everything published was gathered and nothing more will come (ctl is draining and the feeder is done)? */
bool sl_gather_drained(const sl_gather *g);
/* The loop: bell, turn, wait; returns 0 when drained, or the fatal error. */
int sl_gather_run(sl_gather *g, sl_err *err);
#endif
