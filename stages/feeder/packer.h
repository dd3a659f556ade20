/* packer: which rows share a batch. A pure function of intake.log: rows are taken in order; a batch is closed when the
 * next row would exceed batch_tokens or max_batch_rows, when it is exactly full, or by a FLUSH or HEADER record. A row
 * longer than batch_tokens is a batch of its own. So the same batches, with the same numbers, form again after any
 * restart.
 *
 * sl_pack is the rule itself. sl_packer reads the log from its start and hands out closed batches one by one; it holds
 * one batch and one read buffer, however long the log is. */
#ifndef SL_FEEDER_PACKER_H
#define SL_FEEDER_PACKER_H
#include "ipc/flow.h"
#include "ipc/journal.h"

typedef struct sl_pack {
    uint32_t batch_tokens, max_rows; /* of the last HEADER */
    uint32_t rows, tokens;           /* in the open batch */
    uint64_t batch_no;               /* number of the open batch */
} sl_pack;
/* Would a row of T tokens have to start a new batch? */
bool sl_pack_splits(const sl_pack *p, uint32_t T);
/* Put a row in. True: the batch is full and closed by this row. (Call sl_pack_close first when it splits.) */
bool sl_pack_add(sl_pack *p, uint32_t T);
/* Close the open batch if it has rows: true when it had. Then rows = tokens = 0 and batch_no is one more. */
bool sl_pack_close(sl_pack *p);

typedef struct sl_batch { /* a closed batch; valid until the next call of sl_packer_next */
    uint64_t batch_no;
    uint32_t n_rows, n_tokens;
    uint64_t string_bytes;
    const sl_intake_rec *rows;
} sl_batch;

typedef struct sl_packer sl_packer;
int sl_packer_open(sl_packer **out, const char *store, sl_err *err);
void sl_packer_close(sl_packer *p);
/* The next closed batch among the first `limit` records: 1 and *b, or 0 when no further batch is closed yet. SL_EDATA
 * when a record below limit is not as it was written. */
int sl_packer_next(sl_packer *p, uint64_t limit, sl_batch *b, sl_err *err);
/* Bytes of the batch's payload slot. */
uint64_t sl_packer_bytes(const sl_batch *b);
/* Write the payload of a batch (ids, masks and id strings read from intake.dat) and fill the descriptor's body.
 * flags_of gives the SL_ROW_* flags of a row. SL_EDATA when intake.dat is not what the records say; SL_ECONFIG when cap
 * is less than sl_packer_bytes (the ring was made for smaller batches than the store was begun with). */
typedef uint32_t (*sl_packer_flags)(void *arg, const sl_intake_rec *row);
int sl_packer_write(sl_packer *p, const sl_batch *b, void *slot, uint64_t cap, sl_desc_input *desc,
                    sl_packer_flags flags_of, void *arg, sl_err *err);
#endif
