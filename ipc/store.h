/* store: the format manual of what is on disk. From this page another person can write a reader. Little-endian
 * everywhere; XXH3-64 is with seed 0. In the store's folder:
 *
 *   manifest.json: what the states are (model fingerprint, H indices, dtype, width), how rows were made, and counts;
 * replaced atomically. Its own checksum: stages/writer/manifest.h.
 *
 *   intake.log, intake.dat: rows that were accepted (ipc/journal.h); data_sum of a record is the XXH3-64 of its bytes
 * in intake.dat, and the up to 7 bytes between two of them are zeros.
 *
 *   commit.log: rows that are durable or rejected (ipc/journal.h): the truth about what is in the store.
 *
 *   hidden_states: layout files. hs_<row>.safetensors, or hs_<row>.<part>.safetensors when part > 0; data sets other
 * than the first have a folder of their own (sl_store_dataset_dir).
 *
 *   shards: layout shards. shard-000000.sls, and shard-000001.sls.open while it is being written.
 *
 *   quarantine: rejected rows, named as in hidden_states: .safetensors with what was there, and .json with why;
 * file_sum of the row's record in commit.log is the XXH3-64 of the bytes of both, one behind the other.
 *
 *   .tmp: files not yet published; emptied at start.
 *
 * States. A store keeps K states a token, in ascending H index: H[0] is the embedding output, H[k] the residual stream
 * after k layers, H[n] the last layer's output before the final norm. The final-normed state is labelled hidx = n + 1
 * and is the last one. Each is [T, width] in bf16 (elem_size 2) or f32 (4).
 *
 * Blocks. A state of a row is cut into blocks of sl_store_block_rows(width, elem_size) tokens (about 4 MiB), the last
 * one shorter. raw_sum of a block is XXH3-64 of its bytes [t][h]; states_sum of a row is XXH3-64 of the array
 * of its raw_sums (8 bytes each) for state ascending, block ascending. Every layout and codec has the same sums.
 *
 * Safetensors files (layout files): tensors hidden_states [T, K', width], token_ids I64 [T], loss_mask U8 [T] and, when
 * H[n] and its final-normed form were both captured, final_norm [T, width] (then K' = K - 1, else K' = K). __metadata__
 * is a function of the row and the model alone, so an interrupted run makes the same bytes as one that was not.
 *
 * Shards (version 2). sl_shard_head at 0 (4096 bytes), then frames. A frame is sl_frame_head (128 bytes), its payload,
 * and zeros to the next multiple of SL_FRAME_ALIGN. A row is META, then for state ascending, block ascending one STATE,
 * then END; nothing of another row lies in between.
 *
 *   META  payload: sl_meta_head, int32 ids[T], u8 mask[T], id string, data set name
 *   STATE payload: enc_len bytes in `codec`, see stages/writer/codec.h
 *   END   payload: sl_end_head, u64 rel[n_frames]: offset of each STATE frame from the start of the META frame
 *   INDEX payload: sl_index_entry[n], in the order of offsets
 *
 * Places. A frame starts where the one before it ends, with two exceptions. (1) A commit group starts at a multiple of
 * SL_SHARD_ALIGN: where a META should start and the magic is 0, go on at the next multiple. (2) A STATE frame that
 * holds SL_DIRECT_BYTES or more in codec none has its payload on a page: its head takes the last 128 bytes before the
 * next possible multiple of SL_SHARD_ALIGN (sl_frame_place says where), and zeros lie between. So large states are
 * written from where they lie in memory, and read into page-aligned buffers, without a copy. What that costs: 2 KiB a
 * frame on average and 4223 bytes at most, so 0.8 % (1.6 %) of a frame of 256 KiB and 0.1 % of one of 4 MiB; smaller
 * frames and compressed ones lie close together. A reader that goes by rel needs to know none of this.
 *
 * In an .open file, bytes behind the last committed row mean nothing (the file may also be longer than what is in it).
 * At seal an INDEX frame (at a multiple of SL_SHARD_ALIGN) and an sl_shard_foot (the last 64 bytes of the file) are
 * added and the file is renamed. All bytes that belong to no frame are 0 up to the last committed row and in a sealed
 * file.
 *
 * To read state k of a row: its place [off, len) is in the index or commit.log; the END frame takes the last
 * sl_frame_span(sizeof(sl_end_head) + 8 * n_frames) bytes, n_frames = K * ceil(T / block_rows); rel[k * blocks + b]
 * says where the frame of block b is, and its head how long. Checks: crc is CRC32C of the header's bytes before it;
 * enc_sum is XXH3-64 of the payload. */
#ifndef SL_IPC_STORE_H
#define SL_IPC_STORE_H
#include "ipc/flow.h"
#include "ipc/journal.h"

#define SL_STORE_VERSION 2
#define SL_SHARD_MAGIC   0x3144524148534c53ull /* "SLSHARD1" */
#define SL_FOOT_MAGIC    0x31544f4f46534c53ull /* "SLSFOOT1" */
#define SL_FRAME_MAGIC   0x52464c53u           /* "SLFR" */
#define SL_SHARD_ALIGN   4096u
#define SL_FRAME_ALIGN   64u
#define SL_BLOCK_BYTES   (4u << 20)
#define SL_DIRECT_BYTES  (256u << 10)
/* The writer seals a shard that has so many rows, so that the index it keeps of it is at most 20 MiB. A reader need not
 * know. */
#define SL_SHARD_ROWS (256u << 10)
#define SL_NO_SHARD   0xffffffffu

typedef struct sl_shard_head {
    uint64_t magic;   /* SL_SHARD_MAGIC */
    uint32_t version; /* SL_STORE_VERSION */
    uint32_t shard;   /* its number */
    uint32_t width, elem_size, n_states, n_layers;
    char model[80]; /* model fingerprint, NUL-terminated */
    struct {
        uint32_t hidx, final_norm;
    } states[SL_MAX_CAPTURES];
    uint8_t pad[4096 - 8 - 24 - 80 - 8 * SL_MAX_CAPTURES - 4];
    uint32_t crc; /* CRC32C of the 4092 bytes before */
} sl_shard_head;
_Static_assert(sizeof(sl_shard_head) == 4096, "");

typedef enum { SL_FR_META = 1, SL_FR_STATE, SL_FR_END, SL_FR_INDEX } sl_frame_kind;

typedef struct sl_frame_head {
    uint32_t magic;            /* SL_FRAME_MAGIC */
    uint8_t version, kind;     /* SL_STORE_VERSION, sl_frame_kind */
    uint8_t codec, elem_size;  /* STATE: sl_codec of ipc/boot.h; else 0 */
    uint64_t off;              /* own offset in the shard */
    uint64_t seq, row;         /* intake sequence number, row number in its data set */
    uint32_t dataset, part;    /* index of the data set in intake.log; split or turn number */
    uint16_t k, n_states;      /* STATE: state 0..K-1; K */
    uint32_t hidx;             /* STATE: H index; n+1 for the final-normed one */
    uint32_t t0, rows;         /* STATE: tokens [t0, t0 + rows) of the row */
    uint32_t T, width;         /* tokens of the row, elements a token; INDEX: T = entries */
    uint64_t raw_len, enc_len; /* bytes before the codec, bytes of payload that follow */
    uint64_t raw_sum, enc_sum; /* XXH3-64 of both */
    uint64_t key[2];           /* row key (ipc/journal.h) */
    uint8_t spare[12];
    uint32_t crc; /* CRC32C of the 124 bytes before */
} sl_frame_head;
_Static_assert(sizeof(sl_frame_head) == 128, "");

typedef struct sl_meta_head {
    uint32_t id_len, name_len; /* bytes of the id string and of the data set name */
    uint32_t mask_sum;         /* supervised tokens */
    uint32_t nll_tokens;       /* 0: not computed */
    double nll;                /* mean next-token NLL, nats; NaN: not computed */
    uint32_t block_rows;       /* tokens a block */
    uint32_t n_frames;         /* STATE frames that follow */
} sl_meta_head;
_Static_assert(sizeof(sl_meta_head) == 32, "");

typedef struct sl_end_head {
    uint64_t states_sum;
    uint32_t n_frames, pad;
} sl_end_head;
_Static_assert(sizeof(sl_end_head) == 16, "");

typedef struct sl_index_entry {
    uint64_t seq, row;
    uint32_t dataset, T;
    uint64_t off, len; /* META to END, padding of END included */
    uint64_t key[2];
    uint64_t states_sum, raw_bytes;
    uint32_t mask_sum;
    float nll;
} sl_index_entry;
_Static_assert(sizeof(sl_index_entry) == 80, "");

typedef struct sl_shard_foot {
    uint64_t magic;   /* SL_FOOT_MAGIC */
    uint32_t version; /* SL_STORE_VERSION */
    uint32_t shard;
    uint64_t index_off; /* of the INDEX frame */
    uint64_t n_rows;
    uint64_t file_len; /* of the sealed file, this footer included */
    uint8_t pad[20];
    uint32_t crc;
} sl_shard_foot;
_Static_assert(sizeof(sl_shard_foot) == 64, "");

/* Tokens a block: >= 1, a function of width and elem_size only. */
static inline uint32_t sl_store_block_rows(uint32_t width, uint32_t elem_size) {
    uint64_t n = SL_BLOCK_BYTES / ((uint64_t)width * elem_size + !width);
    return n ? (uint32_t)n : 1;
}
/* Bytes that a frame with `enc_len` bytes of payload takes in the shard. */
static inline uint64_t sl_frame_span(uint64_t enc_len) {
    return (sizeof(sl_frame_head) + enc_len + SL_FRAME_ALIGN - 1) & ~(uint64_t)(SL_FRAME_ALIGN - 1);
}
/* Where in the shard a STATE frame starts that comes next behind byte `at` (a multiple of SL_FRAME_ALIGN): there, or,
 * with SL_DIRECT_BYTES or more of states as they are (codec none), so that its payload starts on a page. */
static inline uint64_t sl_frame_page_place(uint64_t at) {
    uint64_t page = SL_SHARD_ALIGN, head = sizeof(sl_frame_head);
    return (at + head + page - 1) / page * page - head;
}
static inline uint64_t sl_frame_place(uint64_t at, uint32_t codec, uint64_t enc_len) {
    return codec || enc_len < SL_DIRECT_BYTES ? at : sl_frame_page_place(at);
}
#endif
