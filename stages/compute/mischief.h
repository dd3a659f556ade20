/* mischief: makes the faults of ipc/faults.h inside a rank, for tests. Exists only when boot->fault is set.
 *
 * For the batch in question every captured state is kept until the last one is there; then two sets of states are made:
 * what the fingerprints are taken of, and what the payloads are copied from, and the batch is exported from those. What
 * is wrong with descriptors is done to each of them. */
#ifndef SL_COMPUTE_MISCHIEF_H
#define SL_COMPUTE_MISCHIEF_H
#include "ipc/boot.h"
#include "kernels/ops.h"

typedef struct sl_mischief sl_mischief;
int sl_mischief_create(sl_mischief **out, const sl_boot *b, uint32_t rank, sl_ops *ops, int64_t max_tokens,
                       sl_err *err);
void sl_mischief_destroy(sl_mischief *m);

/* Is this the batch? */
int sl_mischief_active(const sl_mischief *m, uint64_t batch_no);
/* Remember capture k of the batch in hand. */
int sl_mischief_keep(sl_mischief *m, int32_t k, const void *states, int64_t n_tokens, sl_err *err);
/* After the last capture of the batch: make both sets. row0: tokens of the first row. */
int sl_mischief_make(sl_mischief *m, uint64_t bpos, uint32_t row0, sl_err *err);
const void *sl_mischief_fingerprinted(const sl_mischief *m, int32_t k);
const void *sl_mischief_payload(const sl_mischief *m, int32_t k);
/* Spoil one descriptor; *own says whether it carries payload. */
void sl_mischief_descriptor(const sl_mischief *m, sl_desc_chunk *d, uint32_t *own);
/* The batch is over: its states become "the batch before". */
void sl_mischief_next(sl_mischief *m);
#endif
