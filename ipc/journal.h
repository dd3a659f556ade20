/* journal: the two append-only logs that are the truth. Shared memory is only a cache.
 *
 * Files in the store folder (all integers little-endian):
 *   intake.log  feeder only.  Header record, then fixed 128-byte records, each with magic, length and CRC32C.
 *   intake.dat  feeder only.  Per accepted row, 8-byte aligned: int32 ids[T], u8 mask[T], id string; data set name
 *               once. Appended and fdatasync'ed before the intake record that points to it.
 *   commit.log  writer only.  Header record, then fixed 128-byte records: COMMIT or REJECT per row.
 * A row is acknowledged "accepted" after fdatasync(intake.log), "durable" when its commit record is. A torn tail (bad
 * magic, length or CRC) is cut at open by the one writer; readers stop before it. Recovery is start-up: intake -
 * commit.
 *
 * Packing is a pure function of intake.log: rows in seq order are put into a batch until the next row would exceed
 * batch_tokens or max_batch_rows; a FLUSH record closes the batch. So after any crash the same batches form again, and
 * a row's bytes do not depend on when somebody was killed. The header holds batch_tokens, max_batch_rows, max_length,
 * so a changed setting is noticed (rows already accepted keep the packing they were accepted under). */
#ifndef SL_IPC_JOURNAL_H
#define SL_IPC_JOURNAL_H
#include "ipc/err.h"
#include <stdint.h>
#include <stdbool.h>

#define SL_JREC 128

/* XXH128 of data set name, NUL, row number (8 bytes LE) [, NUL, part (4 bytes) for split rows and turns]. */
typedef struct sl_key {
    uint64_t w[2];
} sl_key;
sl_key sl_row_key(const char *dataset, uint64_t row, uint32_t part);

typedef enum { SL_IN_HEADER = 1, SL_IN_DATASET, SL_IN_ROW, SL_IN_REJECT, SL_IN_FLUSH } sl_in_kind;

/* Why the feeder refused a row (SL_IN_REJECT.reason, wire replies, metrics slots SL_M_REJECT_BASE + 12 + reason). */
typedef enum {
    SL_R_NONE,
    SL_R_JSON,
    SL_R_FIELDS,
    SL_R_ROLE,
    SL_R_TEMPLATE,
    SL_R_MASK,
    SL_R_EMPTY,
    SL_R_TOO_LONG,
    SL_R_VOCAB,
    SL_R_ENCODING,
    SL_R_LENGTHS,
    SL_R_UNSUPERVISED,
    SL_R_CONFLICT,
    SL_R_TOO_BIG,
    SL_R_MEDIA,
    SL_R_N
} sl_reason;
const char *sl_reason_name(sl_reason r); /* "JSON", "FIELDS", ... */

typedef struct sl_intake_rec {
    uint32_t magic;      /* 'SLIN' */
    uint16_t kind;       /* sl_in_kind */
    uint16_t length;     /* SL_JREC */
    uint64_t seq;        /* ROW: 0,1,2... ; others: the next seq */
    sl_key key;          /* ROW, REJECT */
    uint64_t content[2]; /* XXH128 of the pushed row as pushed: a second push with other content is a CONFLICT */
    uint64_t row;        /* row number in its data set */
    uint32_t dataset;    /* index (DATASET: the index being defined) */
    uint32_t part;       /* split or turn number */
    uint32_t T;          /* tokens */
    uint32_t mask_sum;
    uint64_t data_off, data_len; /* in intake.dat */
    uint32_t id_len;             /* bytes of the id string (behind ids and mask) */
    uint16_t reason;             /* REJECT: sl_reason */
    uint16_t flags; /* ROW: 1 = truncated to max_length; ROW, REJECT: 2 = more parts of this pushed row follow */
    uint32_t batch_tokens, max_batch_rows; /* HEADER */
    uint32_t max_length, version;          /* HEADER */
    uint64_t data_sum; /* ROW, DATASET: XXH3-64 of its bytes in intake.dat; 0 in logs of before there was one */
    uint8_t pad[4];
    uint32_t crc; /* CRC32C of the 124 bytes before */
} sl_intake_rec;
_Static_assert(sizeof(sl_intake_rec) == SL_JREC, "");

typedef enum { SL_CM_HEADER = 1, SL_CM_COMMIT, SL_CM_REJECT } sl_cm_kind;
typedef struct sl_commit_rec {
    uint32_t magic; /* 'SLCM' */
    uint16_t kind;
    uint16_t length;
    uint64_t seq;
    sl_key key;
    uint64_t row;
    uint32_t dataset;
    uint32_t T;
    uint32_t epoch;
    uint16_t verdict; /* sl_verdict; OK for COMMIT */
    uint16_t k;       /* first faulty capture index or 0xffff */
    uint32_t token;
    uint32_t shard;     /* shard number (layout shards) or 0xffffffff */
    uint64_t off, len;  /* place in the shard, or file length */
    uint64_t raw_bytes; /* bytes of states before the codec */
    float nll;          /* NaN: not computed */
    uint32_t mask_sum;
    uint64_t states_sum; /* checksum of the row's states, defined in ipc/store.h: what `verify --deep` recomputes */
    uint64_t time_ns;    /* CLOCK_REALTIME */
    uint64_t
        file_sum; /* REJECT: XXH3-64 of the bytes of its quarantine files, .safetensors then .json; 0: not recorded */
    uint32_t spare;
    uint32_t crc;
} sl_commit_rec;
_Static_assert(sizeof(sl_commit_rec) == SL_JREC, "");

/* Append side (one writer a file; flock'ed: a second writer is refused with the pid that holds it). `kind_magic` picks
 * the log. Opening scans, cuts a torn tail (says so at WARN), syncs what it found, and calls `each` for every good
 * record in order (may be NULL). */
typedef struct sl_journal sl_journal;
typedef int (*sl_journal_each)(void *arg, const void *rec128, sl_err *err);
int sl_journal_open(sl_journal **out, const char *path, uint32_t magic, sl_journal_each each, void *arg, sl_err *err);
/* Fills magic, length, crc; buffered. */
int sl_journal_append(sl_journal *j, void *rec128, sl_err *err);
/* write + fdatasync. A full disk (ipc/file.h) or a failed sync is SL_ETEMP and nothing is lost: call again, which
 * writes all of it again. */
int sl_journal_sync(sl_journal *j, sl_err *err);
uint64_t sl_journal_count(const sl_journal *j);  /* records on disk and waiting, headers included */
uint64_t sl_journal_synced(const sl_journal *j); /* of them on disk */
void sl_journal_close(sl_journal *j);            /* drops what was not synced (it was never acknowledged) */
/* Magic, length and CRC of one record are right. */
bool sl_journal_record_ok(const void *rec128, uint32_t magic);

/* Read side: follow a growing log from record number *at; calls `each` per good record, advances *at; stops quietly at
 * a torn or missing tail, and before a record for which `each` returns 1. What is read may not be on disk yet. SL_EDATA when a bad record is followed by good ones (corruption, not a torn tail). */
int sl_journal_follow(const char *path, uint32_t magic, uint64_t *at, sl_journal_each each, void *arg, sl_err *err);
#define SL_INTAKE_MAGIC 0x4e494c53u /* "SLIN" */
#define SL_COMMIT_MAGIC 0x4d434c53u /* "SLCM" */

uint32_t sl_crc32c(uint32_t crc, const void *data, uint64_t n); /* hardware when there is SSE4.2; start with 0 */
#endif
