/* salvage: make a store of layout shards whole again from its shards alone. Every row that is whole (META, all states,
 * END, each with its checksum) is kept; logs and indexes are rebuilt around them.
 *
 * Shards: walked frame by frame, searching on behind damage. Bytes that belong to no whole row are zeroed, the index
 * and footer of each shard are written anew, and all but the newest open shard are sealed.
 *
 * commit.log: one COMMIT a whole row, and the REJECT records that can still be read. A row that was committed and is
 * not whole any more, or was rejected and whose files in quarantine are not what they were, is pending again: the next
 * run computes it.
 *
 * intake.log: kept where it is good. Rows whose record is lost are restored from the shards; a sequence number of which
 * nothing is left becomes a row of data set "sluice-salvage-lost", rejected MISSING_SHARD, so that the count still says
 * it.
 *
 * Manifest: kept when it is readable, else made from the shard headers (paths and hashes are then empty).
 *
 * The old logs stay beside the new ones as <name>.damaged. Nothing may write the store meanwhile: a lock is refused
 * with SL_ETEMP. Layout files has one file a row and needs none of this: SL_EUSAGE. May be repeated after an
 * interruption. */
#ifndef SL_WRITER_SALVAGE_H
#define SL_WRITER_SALVAGE_H
#include "ipc/err.h"
#include <stdint.h>

typedef struct sl_salvage_report {
    uint64_t shards, rows;   /* looked at; whole rows kept */
    uint64_t bytes_dropped;  /* zeroed or cut: belonged to no whole row */
    uint64_t pending_again;  /* were in the readable part of commit.log and are not whole, or their quarantine is not */
    uint64_t recommitted;    /* whole, and had no readable record */
    uint64_t restored, lost; /* intake rows restored from shards; sequence numbers of which nothing is left */
    uint64_t rejects;        /* kept */
    int intake_rebuilt, manifest_rebuilt;
} sl_salvage_report;

int sl_store_salvage(const char *store, sl_salvage_report *rep, sl_err *err);
#endif
