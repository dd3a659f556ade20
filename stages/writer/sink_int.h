/* What sink.c, sink_shard.c and sink_files.c share; nobody else includes this. */
#ifndef SL_WRITER_SINK_INT_H
#define SL_WRITER_SINK_INT_H
#include "ipc/store.h"
#include "stages/writer/codec.h"
#include "stages/writer/workers.h"
#include "stages/writer/sink.h"
#include "stages/writer/wio.h"

typedef struct group group;

/* A row that goes to a file of its own (layout files, quarantine). */
typedef struct file_job {
    sl_job j;
    sl_sink *s;
    sl_row_in r; /* pieces and first are the job's own copies */
    char dir[160], name[64];
    int fd, res; /* res: 0 or -errno of the last phase */
    enum { FJ_WRITE, FJ_SYNC, FJ_DONE } phase;
    bool quarantine;
    int moved;                                          /* of its files, into their place */
    uint64_t row_sum;                                   /* of the states as they were written */
    uint64_t states_sum, raw_bytes, file_len, file_sum; /* file_sum: of the quarantine */
} file_job;

struct group {
    group *next;
    sl_commit_rec *recs;
    unsigned n_recs, cap_recs;
    file_job **files; /* files[i] made recs[file_rec[i]] */
    unsigned *file_rec;
    unsigned n_files, cap_files;
    void **tokens;
    unsigned n_tokens, cap_tokens;
    uint64_t bytes;
    unsigned writes; /* shard writes not yet reported done */
    bool shard_data, sync_out;
    enum { G_WRITING, G_SYNCING, G_PUBLISHING, G_READY } st;
    sl_job pub;
    int pub_res;
    const file_job *changed; /* its states are not those of its sum */
    sl_sink *s;
    uint64_t sync_t0;
};

/* One frame on its way into the shard, in order. */
typedef struct slot {
    sl_job j;
    sl_sink *s;
    struct shard_row *row;
    uint8_t *out;
    uint64_t len, raw_sum, enc_sum, a, b; /* a, b: of the block's states (ipc/sum64.h) */
    uint32_t k, t0, rows, used;
    int kind; /* sl_frame_kind */
    sl_err err;
    int rc;
} slot;

typedef struct shard_row { /* a row being written to the shard */
    struct shard_row *next;
    sl_row_in r;
    uint64_t off, raw_bytes, a, b, row_sum; /* a, b: of the state under way; row_sum: of those before it */
    uint64_t *rel, *sums;                   /* [n_frames] */
    uint32_t n_frames, at;
    unsigned rec; /* index in the open group's recs */
} shard_row;

typedef struct shard {
    int fd;
    uint32_t no;
    uint64_t off, alloc; /* end of what was appended; end of what is allocated */
    bool direct;
    uint32_t mem_align, off_align; /* of writes from the rings' memory; 0: this file takes none */
    sl_index_entry *index;
    uint64_t n_index, cap_index; /* committed rows, SL_SHARD_ROWS at most */
    uint64_t n_rows;             /* those, and the ones on their way */
    /* The buffer being filled, and full ones held back until the header of the frame in them is known. */
    uint8_t *buf;
    unsigned buf_idx;
    uint32_t buf_at;
    uint64_t buf_off;
    bool hold;
    struct held {
        unsigned idx;
        uint32_t len;
        uint64_t off;
    } held[64];
    unsigned n_held;
    shard_row *rows, **rows_tail; /* not wholly written yet, in order */
} shard;

struct sl_sink {
    sl_sink_cfg cfg;
    char store[SL_PATH_MAX];
    sl_journal *log;
    uint8_t *done; /* bitmap over seq */
    uint64_t done_bits;
    sl_store_stats stats;
    int efd, store_fd;
    sl_wio *wio;
    sl_workers *codec_pool, *file_pool;
    sl_codec_ctx **ctx; /* one a codec worker; [0] also serves the caller when there is no pool */
    uint8_t **scratch;  /* one a codec worker: a block gathered from its pieces */
    uint8_t **fbuf;     /* one a file worker */
    group *open, *head, **tail;
    unsigned n_closed;
    shard sh;
    slot *slots;
    unsigned n_slots;
    uint64_t slot_in, slot_out; /* slots [out, in) are queued */
    uint32_t block_rows;
    bool in_poll, paused;
    bool had_quarantine; /* there was one at open: see drop_twin */
    unsigned refused;    /* times in a row that the file system refused although there is room */
    uint64_t free_bytes, sync_ns;
    int fatal; /* -errno of a write that failed for good */
    char made_dir[2][160];
};

enum { SL_FILE_GROUP_ROWS = 128 }; /* open descriptors a group */

/* Bytes of one token's state. */
static inline uint64_t sl_sink_state_bytes(const sl_sink *s) {
    return (uint64_t)s->cfg.manifest.set.width * s->cfg.manifest.set.elem_size;
}

/* sink.c */
void sl_sink_note(sl_sink *s, int warn, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
int sl_sink_wait_room(sl_sink *s, uint64_t need, sl_err *err);
/* After a write of about `need` bytes that the file system refused (no space, quota): waits for room, or, where there
 * is room and it refused all the same, a moment, and says so. Then the caller tries again. */
int sl_sink_refused(sl_sink *s, uint64_t need, sl_err *err);
uint64_t sl_sink_look_free(sl_sink *s);
int sl_sink_rec(sl_sink *s, const sl_row_in *r, unsigned *index, sl_err *err);
int sl_sink_progress(sl_sink *s, bool wait, sl_err *err);

/* SL_EINTERNAL: what was written of the row has `found` for its row sum. */
int sl_sink_changed(sl_sink *s, const sl_row_in *r, uint64_t found, sl_err *err);

/* sink_shard.c */
int sl_shard_recover(sl_sink *s, uint64_t committed_end, uint32_t last_shard, sl_err *err);
int sl_shard_row(sl_sink *s, const sl_row_in *r, sl_err *err);
int sl_shard_end_group(sl_sink *s, sl_err *err); /* emit what is queued, pad, flush */
int sl_shard_seal(sl_sink *s, sl_err *err);      /* nothing in flight */
int sl_shard_index_add(sl_sink *s, const sl_commit_rec *r, sl_err *err);
int sl_shard_next(sl_sink *s, sl_err *err); /* after a seal */
void sl_shard_close(sl_sink *s);

/* sink_files.c */
int sl_files_row(sl_sink *s, const sl_row_in *r, sl_err *err);
int sl_files_sync(sl_sink *s, group *g);
void sl_files_publish(sl_sink *s, group *g);
void sl_files_free(file_job *f);
#endif
