/* faults: known ways in which hidden states went wrong, made on purpose, so that a test can show that each is rejected
 * by name. A compute rank makes the fault while it exports batch `boot->fault_batch` (a batch_no), once; boot->fault 0
 * costs one branch. Faults of the export are made by rank `boot->fault_rank` of each group alone; faults of the states
 * themselves (NAN, ZEROS, PREVIOUS) are made by every rank of the group, before fingerprints are taken, as a fault of
 * the model or its inputs would be. "fingerprint" is sl_desc_chunk.sum, "its chunks" are those that the faulty rank
 * owns (sl_chunk_owner).
 *
 *   none           nothing
 *   flatten        every chunk descriptor says rows/2 (rounded up) vectors of width 2*H, as if the states of two
 *                  samples lay side by side; payload and fingerprint as they are. SHAPE, all rows of the batch
 *   lost-dim       every chunk descriptor says width 1, as if the hidden dimension had been lost. SHAPE, all rows
 *   missing-shard  its chunks are published without payload (flag clear, fingerprint right). MISSING_SHARD, rows that
 *                  overlap its chunks
 *   wrong-place    the payload of each of its chunks is the content of the next chunk of the same capture when that has
 *                  as many rows, else of the same chunk of the next capture, (k+1) mod K; fingerprint of the right
 *                  states; nothing happens when there is no other. ORDER, rows that overlap its chunks
 *   layers-swapped captures 0 and 1 change places with everything that belongs to them: states, fingerprints and labels
 *                  (hidx). Needs two captures. ORDER, all rows
 *   wrong-offset   the payload of its chunks is read one token too late (the last token of the batch is repeated at the
 *                  end); fingerprint of the right states. CHECKSUM, rows that overlap its chunks
 *   nan            one element (the first of the middle token of row 0, last capture) is a NaN. NONFINITE, row 0 alone
 *   zeros          all states of row 0 in the last capture are zero. CONSTANT, row 0 alone
 *   previous       the states of all captures are those of the batch before (token i gets its token i mod n; needs
 *                  fault_batch >= 1). CONSTANT, rows whose ids differ from what was run
 *   diverge        on the faulty rank element 0 of each state is changed (its sign bit) before fingerprint and export.
 *                  RANKS_DISAGREE, all rows; with one rank there is no one to disagree with, and it goes unnoticed
 *   changed        made by gather: it tells the writer another row sum of row 0 than that of its states, as if they had
 *                  changed behind the verdict. The writer dies once, then CHECKSUM, row 0 alone
 * Verdicts are gather's (stages/gather/validate.h), the last one is the writer's. Everything else in the batch and
 * every later batch is unharmed. */
#ifndef SL_IPC_FAULTS_H
#define SL_IPC_FAULTS_H
#include "ipc/flow.h"

typedef enum {
    SL_FAULT_NONE,
    SL_FAULT_FLATTEN,
    SL_FAULT_LOST_DIM,
    SL_FAULT_MISSING_SHARD,
    SL_FAULT_WRONG_PLACE,
    SL_FAULT_LAYERS_SWAPPED,
    SL_FAULT_WRONG_OFFSET,
    SL_FAULT_NAN,
    SL_FAULT_ZEROS,
    SL_FAULT_PREVIOUS,
    SL_FAULT_DIVERGE,
    SL_FAULT_CHANGED,
    SL_FAULT_N
} sl_fault;

const char *sl_fault_name(sl_fault f);               /* "flatten", ...; "?" out of range */
int sl_fault_parse(const char *name, sl_fault *out); /* 0 or SL_EUSAGE */
sl_verdict sl_fault_verdict(sl_fault f);             /* what must come out; SL_V_OK for none */
#endif
