/* intake: the rows that were accepted, on disk before anybody is told so, and what became of them.
 *
 * Owns intake.log and intake.dat (ipc/journal.h). One pushed row (a data set's row number) is one entry with one or
 * more parts; each part is a ROW record (tokens, gets a seq) or a REJECT record. sl_intake_add buffers all parts of one
 * row; nothing may be acknowledged before the next sl_intake_sync returned 0: data, fdatasync, records, fdatasync.
 *
 * Every record of a row but its last carries the flag SL_IN_MORE. A log that ends inside a row (power cut in the middle
 * of the last write) leaves the entry INCOMPLETE: the row was not acknowledged, is pushed again, and only the parts
 * that are missing are added.
 *
 * A row that was refused (no part accepted) may be pushed again with other content: it takes the place of the refusal.
 * Any other difference is a CONFLICT and is not recorded.
 *
 * Memory: about 72 bytes a pushed row and 5 bytes a part, for the life of the store. */
#ifndef SL_FEEDER_INTAKE_H
#define SL_FEEDER_INTAKE_H
#include "ipc/journal.h"
#include "stages/feeder/packer.h"
#include "stages/feeder/prepare.h"

enum { SL_IN_TRUNCATED = 1, SL_IN_MORE = 2 }; /* sl_intake_rec.flags */

typedef struct sl_intake sl_intake;
typedef struct sl_intake_cfg {
    const char *store; /* folder, must exist */
    uint32_t batch_tokens, max_batch_rows, max_length;
} sl_intake_cfg;

typedef struct sl_entry { /* a pushed row */
    sl_key key;           /* of part 0 */
    uint64_t content[2];
    uint64_t row;
    uint32_t dataset;
    uint32_t parts;  /* part records seen, accepted and refused */
    uint32_t rows;   /* of these, accepted */
    uint32_t left;   /* accepted and not yet in commit.log */
    uint32_t bad;    /* accepted, then rejected by a verdict */
    uint32_t owner;  /* whom to tell when it is done; the caller's number, 0 = nobody */
    uint32_t others; /* more of them; the caller's own, 0 at first */
    uint16_t reason; /* last refusal */
    uint8_t verdict; /* first sl_verdict of its parts that is not OK */
    uint8_t more;    /* the last record seen had SL_IN_MORE */
} sl_entry;

typedef enum { SL_IN_NEW, SL_IN_KNOWN, SL_IN_REFUSED, SL_IN_INCOMPLETE, SL_IN_CONFLICT } sl_in_found;

/* Open or create; replays both logs. SL_ECONFIG: not a store, or held by another process; SL_EDATA: damaged beyond a
 * torn tail; SL_ETEMP: no room. Other batch settings than the log's are recorded (a new HEADER record) and hold from
 * here on. */
int sl_intake_open(sl_intake **out, const sl_intake_cfg *cfg, sl_err *err);
void sl_intake_close(sl_intake *in);

/* Index of a data set by name (1..255 bytes), new ones are recorded. Negative: SL_E*. */
int64_t sl_intake_dataset(sl_intake *in, const char *name, sl_err *err);
const char *sl_intake_dataset_name(const sl_intake *in, uint32_t dataset);

/* What is known about a row. *e is set unless NEW; valid until the next add. */
sl_in_found sl_intake_find(sl_intake *in, uint32_t dataset, uint64_t row, const uint64_t content[2], sl_entry **e);
/* Record a row that is NEW, INCOMPLETE, or REFUSED with other content. Buffered. */
int sl_intake_add(sl_intake *in, uint32_t dataset, uint64_t row, const uint64_t content[2], const sl_prepared *p,
                  uint32_t owner, sl_err *err);
/* Record a FLUSH when the open batch holds rows; returns 1 when it did, 0 when there was nothing to close. Buffered. */
int sl_intake_flush(sl_intake *in, sl_err *err);
/* Make everything buffered durable. SL_ETEMP (disk full): nothing is lost, call again. */
int sl_intake_sync(sl_intake *in, sl_err *err);
bool sl_intake_dirty(const sl_intake *in);
uint64_t sl_intake_buffered(const sl_intake *in); /* bytes waiting for sl_intake_sync */

uint64_t sl_intake_records(const sl_intake *in);   /* durable records of intake.log: what the packer may read */
uint64_t sl_intake_rows(const sl_intake *in);      /* accepted parts (next seq) */
uint64_t sl_intake_committed(const sl_intake *in); /* of these, in commit.log */
bool sl_intake_row_done(const sl_intake *in, uint64_t seq);
uint32_t sl_intake_open_rows(const sl_intake *in); /* rows in the batch that is not closed yet */

/* Read what is new in commit.log, up to its first `synced` records (those that are on disk; UINT64_MAX: all that can be
 * read); calls `done` for each entry that became complete (all its parts committed or rejected). */
typedef void (*sl_intake_done)(void *arg, sl_entry *e);
uint64_t sl_intake_commits(const sl_intake *in); /* records of commit.log read so far */
int sl_intake_follow(sl_intake *in, uint64_t synced, sl_intake_done done, void *arg, sl_err *err);
#endif
