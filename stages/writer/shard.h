/* shard: reading what ipc/store.h describes, from a file or from memory. Every byte is hostile: nothing is used before
 * it was checked against the length of the file and against what the frame header, whose CRC is checked first, says. */
#ifndef SL_WRITER_SHARD_H
#define SL_WRITER_SHARD_H
#include "ipc/store.h"
#include "stages/writer/codec.h"
#include "stages/writer/safetensors_out.h"

/* A piece of a file that was read ahead, for reading it from front to back in large reads without the page cache
 * (O_DIRECT wants whole pages in memory that starts on one). */
typedef struct sl_window {
    uint8_t *p;
    uint64_t cap;       /* multiple of 4096 */
    uint64_t off, have; /* bytes [off, off + have) of the file are in p; off is a multiple of 4096 */
    uint64_t limit;     /* nothing from here on is read ahead */
    uint64_t ahead;     /* and no more than so many bytes at once */
    uint64_t read;      /* bytes read from the file so far */
} sl_window;
int sl_window_open(sl_window *w, uint64_t cap, sl_err *err); /* SL_ETEMP: no memory */
void sl_window_close(sl_window *w);

typedef struct sl_src { /* one shard: an fd, or (fd < 0) memory */
    int fd;
    const uint8_t *mem;
    uint64_t len;
    const char *name; /* for messages */
    sl_window *win;   /* NULL: none */
} sl_src;

int sl_src_read(const sl_src *s, uint64_t off, void *dst, uint64_t n, sl_err *err); /* SL_EDATA: past the end */
/* Bytes [off, off + n) where they lie, in memory or in the window (valid until the next read); *p is NULL when there is
 * neither, or the window is too small: then read them. */
int sl_src_view(const sl_src *s, uint64_t off, uint64_t n, const uint8_t **p, sl_err *err);

/* Header: magic, version, CRC, 1..SL_MAX_CAPTURES states, width and elem_size within what a block holds. */
int sl_shard_open(const sl_src *s, sl_shard_head *h, sl_err *err);
void sl_shard_set(const sl_shard_head *h, sl_capture_set *set);

/* Frame header at off. 1: no frame here (four zero bytes or the end of the file): go on at the next multiple of
 * SL_SHARD_ALIGN. 0: good and the payload lies in the file. SL_EDATA: damaged. */
int sl_frame_open(const sl_src *s, const sl_shard_head *h, uint64_t off, sl_frame_head *f, sl_err *err);
/* Payload into dst (enc_len bytes), enc_sum checked. */
int sl_frame_read(const sl_src *s, const sl_frame_head *f, void *dst, sl_err *err);

/* Bytes [from, to) are zeros, as all padding is. */
int sl_zeros(const sl_src *s, uint64_t from, uint64_t to, sl_err *err);
int sl_frame_padding(const sl_src *s, uint64_t off, uint64_t enc_len, sl_err *err);

typedef struct sl_row_frames { /* one row, opened through its END frame */
    uint64_t off, len;
    sl_frame_head meta;
    sl_meta_head mh;
    uint64_t states_sum;
    uint32_t n_frames, block_rows;
    uint64_t *rel; /* [n_frames] */
} sl_row_frames;
/* The row at [off, off + len) with T tokens. Checks META, END and their agreement. Free with sl_row_close. */
int sl_row_open(sl_row_frames *r, const sl_src *s, const sl_shard_head *h, uint64_t off, uint64_t len, uint32_t T,
                sl_err *err);
void sl_row_close(sl_row_frames *r);
/* META payload: ids, mask, id and name into one malloc'ed block; the pointers point into it. */
typedef struct sl_row_meta {
    void *block;
    const int32_t *ids;
    const uint8_t *mask;
    const char *id, *name; /* NUL-terminated copies */
} sl_row_meta;
int sl_row_meta_read(const sl_src *s, const sl_frame_head *meta, sl_meta_head *mh, sl_row_meta *out, sl_err *err);
void sl_row_meta_free(sl_row_meta *m);
/* Tokens [t0, t0 + rows) of state k into dst, [rows, width]. Reads only the blocks that hold them. `scratch` grows as
 * needed (free it at the end). enc_bytes (may be NULL) gets the bytes read added. */
typedef struct sl_scratch {
    uint8_t *p;
    uint64_t cap;
} sl_scratch;
int sl_row_state(const sl_row_frames *r, const sl_src *s, const sl_shard_head *h, sl_codec_ctx *c, uint32_t k,
                 uint32_t t0, uint32_t rows, void *dst, sl_scratch *scratch, uint64_t *enc_bytes, sl_err *err);
/* One whole block (frame i of the row) into dst (block_rows * width elements at most); its header in *f. */
int sl_row_block(const sl_row_frames *r, const sl_src *s, const sl_shard_head *h, sl_codec_ctx *c, uint32_t i,
                 void *dst, sl_frame_head *f, sl_scratch *scratch, sl_err *err);
/* The same, checked in full, but the states are left where they are if nothing has to be decoded: *states is dst, or
 * lies in the source and is valid until the next read. */
int sl_row_block_view(const sl_row_frames *r, const sl_src *s, const sl_shard_head *h, sl_codec_ctx *c, uint32_t i,
                      void *dst, const void **states, sl_frame_head *f, sl_scratch *scratch, sl_err *err);
/* Footer and index of a sealed shard: entries in a malloc'ed array. */
int sl_shard_index(const sl_src *s, const sl_shard_head *h, sl_index_entry **out, uint64_t *n, sl_err *err);
#endif
