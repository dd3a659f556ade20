/* sink: puts rows into a store folder: files or shards, group commit, exactly once. The writer process feeds it from
 * the rings, the bench and tests feed it from memory.
 *
 *     sl_sink_row(...) ...  sl_sink_token(...)      rows of the open group; tokens come back when they are durable
 *     sl_sink_close_group()                         data -> fdatasync -> [rename, fsync folder] -> COMMIT records ->
 *     sl_sink_poll()                                fdatasync(commit.log) -> on_commit(tokens)
 *
 * Groups commit in the order they were closed; up to SL_SINK_GROUPS are under way at once, so writes of one overlap the
 * sync of another. All pointers of a row (ids, id, pieces) must stay valid until its group's on_commit.
 *
 * A row already in commit.log is skipped (sl_sink_done). At open what a crash left is cleared: .tmp is emptied, the
 * open shard is cut behind its last committed row.
 *
 * A row can come with the sum of its states as they were when they were found good. What is written is summed on the
 * way: when it is another sum, the sink fails before the row's group is committed.
 *
 * Full disk: when free space falls below `reserve` plus what is to be written (or the kernel says ENOSPC),
 * on_pause(true, need, free) is called, the sink waits (calling on_tick about once a second) until there is room and
 * goes on; nothing is lost and nothing is half committed. */
#ifndef SL_WRITER_SINK_H
#define SL_WRITER_SINK_H
#include "stages/writer/manifest.h"
#include "stages/writer/names.h"

#define SL_SINK_GROUPS 3

typedef struct sl_piece { /* rows tokens of one state from token t0 of the row; elements row-major */
    const void *p;
    uint32_t t0, rows;
} sl_piece;

typedef struct sl_row_in {
    uint64_t seq, row;
    uint32_t dataset, part, T, mask_sum, epoch;
    sl_key key;
    const char *id, *name; /* row id string (id_len bytes), data set name */
    uint32_t id_len;
    const int32_t *ids;
    const uint8_t *mask;
    double nll; /* NaN: not computed */
    uint32_t nll_tokens;
    uint32_t verdict; /* sl_verdict; anything but OK goes to quarantine */
    uint16_t fault_k;
    uint32_t fault_token;
    uint64_t detail;
    bool summed;  /* of a good row: its states must have */
    uint64_t sum; /* this row sum (ipc/sum64.h) */
    const sl_piece
        *pieces; /* state k has pieces[first[k]] .. pieces[first[k+1] - 1]; for OK they tile [0, T) in order */
    const uint32_t *first; /* [n_states + 1] */
} sl_row_in;

typedef struct sl_sink_cfg {
    const char *store;
    sl_manifest manifest;                /* set, vocab, layout, codec, paths and hashes; stats are the sink's */
    int zstd_level;                      /* 1..19 */
    unsigned threads;                    /* compression threads, 1 = in the caller */
    uint64_t shard_bytes, reserve_bytes; /* a shard is sealed when it has so many bytes, or */
    uint64_t shard_rows;                 /* so many rows; 0: SL_SHARD_ROWS, which is also the most */
    bool direct, plain;                  /* O_DIRECT wanted; pwrite instead of io_uring */
    bool huge;      /* the pieces lie in huge pages: large blocks of codec none are written from there, not copied. From
                       ordinary pages that is dearer than a copy into the write buffers, which are on huge ones: the
                       device is given 256 places a MiB in place of one */
    unsigned n_buf; /* 0: 32 buffers of 1 MiB */
    uint32_t buf_bytes;
    void *arg;
    void (*on_commit)(void *arg, void **tokens, unsigned n);
    void (*on_pause)(void *arg, bool paused, uint64_t need, uint64_t free_bytes);
    void (*on_tick)(void *arg);
    void (*on_wait)(void *arg, bool waiting); /* blocked on the disk from here / no longer */
    /* The row's states are not those of its sum; the sink fails with SL_EINTERNAL after it. May be NULL. */
    void (*on_changed)(void *arg, uint64_t seq);
    void (*on_note)(void *arg, int warn, const char *text); /* a fall-back or a recovery, to be logged */
} sl_sink_cfg;

typedef struct sl_sink sl_sink;
/* SL_ECONFIG: the store is another's (both values named); SL_ETEMP: no room or memory; SL_EDATA: corrupt logs. */
int sl_sink_open(sl_sink **out, const sl_sink_cfg *cfg, sl_err *err);
int sl_sink_eventfd(const sl_sink *s); /* readable when sl_sink_poll has something to do */
bool sl_sink_done(const sl_sink *s, uint64_t seq);
/* The row sum of the pieces as they lie in memory. */
uint64_t sl_sink_row_sum(const sl_sink *s, const sl_row_in *r);
/* Committed earlier or in this group already: returns 1 and does nothing; 0: taken. */
int sl_sink_row(sl_sink *s, const sl_row_in *r, sl_err *err);
int sl_sink_token(sl_sink *s, void *token, sl_err *err);
int sl_sink_close_group(sl_sink *s, sl_err *err); /* nothing open: nothing happens */
/* Move groups on. With `wait` block until something moved (returns at once when nothing is under way). */
int sl_sink_poll(sl_sink *s, bool wait, sl_err *err);
uint64_t sl_sink_open_bytes(const sl_sink *s); /* raw bytes in the open group */
unsigned sl_sink_open_rows(const sl_sink *s);  /* rows and tokens of the open group together */
unsigned sl_sink_groups(const sl_sink *s);     /* closed, not yet committed */
const sl_store_stats *sl_sink_stats(const sl_sink *s);
uint64_t sl_sink_committed(const sl_sink *s); /* records of commit.log that are on disk, headers too */
uint64_t sl_sink_sync_ns(const sl_sink *s);   /* time spent waiting for data syncs and for commit.log */
uint64_t sl_sink_free(sl_sink *s);            /* free bytes in the store's file system, looked at when last needed */
/* Commit everything, seal the shard, write the manifest. */
int sl_sink_finish(sl_sink *s, sl_err *err);
void sl_sink_close(sl_sink *s); /* after finish, or to give up: what is not committed is not in the store */
#endif
