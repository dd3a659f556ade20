/* export: from captured states to the chunk ring, in the order that ipc/flow.h promises.
 *
 * Each captured state of a batch is cut into chunks. This rank fingerprints every chunk of its own copy, copies the
 * chunks that it owns (sl_chunk_owner) straight into payload slots of its ring, and publishes one descriptor a chunk.
 * Copies are asynchronous: a descriptor waits in a queue until the copy and the fingerprints in front of it are done
 * (ops tickets), then it and its payload become visible together, in order. Several copies are in flight at a time;
 * when the ring is full the rank waits in regime WAIT_OUT at its own bell, which gather and writer ring as they
 * advance.
 *
 * Every call returns 0, an error, or SL_EXPORT_STOP when the group's epoch has moved on: this life is over, end
 * quietly. */
#ifndef SL_COMPUTE_EXPORT_H
#define SL_COMPUTE_EXPORT_H
#include "ipc/boot.h"
#include "kernels/ops.h"

#define SL_EXPORT_STOP 1

typedef struct sl_export sl_export;

/* ring: this rank's chunk ring, attached as producer. max_tokens: most tokens a batch. */
int sl_export_create(sl_export **out, sl_stage *st, sl_ops *ops, sl_ring *ring, uint32_t epoch, int64_t max_tokens,
                     sl_err *err);
void sl_export_destroy(sl_export *x);

/* A batch: begin (row0: tokens of its first row, which only fault injection asks for), then every state in capture
 * order, then rows (rank 0) and the end. */
void sl_export_begin(sl_export *x, uint64_t bpos, uint64_t batch_no, int64_t n_tokens, uint32_t row0);
int sl_export_state(sl_export *x, int32_t k, const void *states, int64_t n_tokens, sl_err *err);
int sl_export_row(sl_export *x, uint32_t row, uint32_t T, uint64_t token_sum, double nll, sl_err *err);
int sl_export_end(sl_export *x, uint64_t busy_ns, sl_err *err); /* returns when all is published */
#endif
