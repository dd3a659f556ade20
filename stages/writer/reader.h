/* reader: a store as rows, whatever its layout. What is in the store is what commit.log says; names and parts come from
 * intake.log. A store may be read while it is being written: it is seen as it was at open.
 *
 * Not thread-safe; open one a thread. */
#ifndef SL_WRITER_READER_H
#define SL_WRITER_READER_H
#include "stages/writer/manifest.h"
#include "stages/writer/names.h"
#include "stages/writer/shard.h"

typedef struct sl_reader sl_reader;
int sl_reader_open(sl_reader **out, const char *store, sl_err *err);
/* Another reader of the same store as it was seen by `of`, which must outlive it, for another thread: it reads whole
 * rows in large reads past the page cache (through it where a file system has no O_DIRECT). */
int sl_reader_again(sl_reader **out, const sl_reader *of, sl_err *err);
void sl_reader_close(sl_reader *r);
const sl_manifest *sl_reader_manifest(const sl_reader *r);
const sl_accepted *sl_reader_accepted(const sl_reader *r);

uint64_t sl_reader_rows(const sl_reader *r);                        /* committed rows, in the order of their seq */
const sl_commit_rec *sl_reader_row(const sl_reader *r, uint64_t i); /* i < rows */
uint64_t sl_reader_rejects(const sl_reader *r);
const sl_commit_rec *sl_reader_reject(const sl_reader *r, uint64_t i);
uint32_t sl_reader_part(const sl_reader *r, const sl_commit_rec *c);
const char *sl_reader_dataset(const sl_reader *r, const sl_commit_rec *c); /* "" when not known */
/* Index of a row by data set name (NULL: the first), row number and part; SL_EUSAGE says what is there instead. */
int64_t sl_reader_find(const sl_reader *r, const char *dataset, uint64_t row, uint32_t part, sl_err *err);

/* ids[T], mask[T] and the id string (<= 256 bytes and NUL; cap 257) of row i; each may be NULL. */
int sl_reader_meta(sl_reader *r, uint64_t i, int32_t *ids, uint8_t *mask, char *id, sl_err *err);
/* Tokens [t0, t0 + rows) of state k of row i, [rows, width]. */
int sl_reader_state(sl_reader *r, uint64_t i, uint32_t k, uint32_t t0, uint32_t rows, void *dst, sl_err *err);
/* Blocks of row i: states times blocks a state (ipc/store.h). */
uint32_t sl_reader_blocks(const sl_reader *r, uint64_t i);
/* Check blocks [b0, b1) of row i in full and put their raw sums into sums[b1 - b0], of which states_sum is made; with
 * b0 = 0 also all else of the row: shape, place, ids and mask against the logs. Everything of them is read; elements
 * that are not finite are counted into *nonfinite. In layout files a row is one piece: b0 is 0 and b1 all blocks.
 * SL_EDATA says what is wrong and of which row and state. */
int sl_reader_check(sl_reader *r, uint64_t i, uint32_t b0, uint32_t b1, uint64_t *sums, uint64_t *nonfinite,
                    sl_err *err);
/* Path of the file or shard that holds the row. */
void sl_reader_path(const sl_reader *r, const sl_commit_rec *c, char *buf, size_t cap);
uint64_t sl_reader_bytes_read(const sl_reader *r); /* payload bytes read so far */
#endif
