/* verify: is this store what its logs say, and do the logs agree? Looked at both ways.
 *
 * Manifest: readable, with its checksum; when it says complete, its counts are those of commit.log. Logs: whole; every
 * commit and reject speaks of an accepted row (seq, row, key, tokens) and of each only once. Forward: every committed
 * row is where commit.log says, whole, with the right header; every rejected row has its states and its reason in
 * quarantine. Backward: every file, and every frame of every shard, belongs to a committed row; index and footer of
 * sealed shards agree.
 *
 * Deep: also every byte is read. All states are decoded: block checksums, states_sum, finiteness, ids and mask against
 * intake.dat, padding; the checksums of intake.dat and of the files in quarantine. Any flipped bit is found, and named
 * by row and state where there is one. Shards are read past the page cache by several threads, so that it goes at the
 * speed of the disk or of the decoder.
 *
 * Rows accepted and neither committed nor rejected are pending: no fault, the next run computes them. Safe beside a
 * running writer (it looks at the logs first), though rows that come meanwhile are notes. */
#ifndef SL_WRITER_VERIFY_H
#define SL_WRITER_VERIFY_H
#include "ipc/err.h"
#include <stdbool.h>
#include <stdint.h>

#define SL_VERIFY_KEEP 100 /* faults and notes kept as text; all are counted */

typedef struct sl_verify_opts {
    bool deep;
    unsigned threads;     /* of deep: reading and decoding. 0: as many as pay, one where little is to be read */
    uint32_t part_blocks; /* blocks of a row that a thread takes at once; 0: about 32 MiB */
    void (*progress)(void *arg, uint64_t rows, uint64_t total); /* may be NULL */
    void *arg;
} sl_verify_opts;

typedef struct sl_verify_report {
    uint64_t rows, rejected, refused, pending; /* refused: by the feeder */
    uint64_t tokens, raw_bytes, stored_bytes, read_bytes;
    uint64_t files; /* files or shards looked at */
    uint64_t n_faults, n_notes;
    char *faults[SL_VERIFY_KEEP], *notes[SL_VERIFY_KEEP]; /* sentences: what, where, what to do */
    bool complete;                                        /* manifest says so */
} sl_verify_report;

/* 0: looked at everything; *rep says what was found (healthy: n_faults == 0). SL_ECONFIG: this is no store; SL_ETEMP:
 * no memory. Free the report with sl_verify_free in any case. */
int sl_store_verify(const char *store, const sl_verify_opts *o, sl_verify_report *rep, sl_err *err);
void sl_verify_free(sl_verify_report *rep);
#endif
