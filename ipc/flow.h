/* flow: what travels in the rings. All structs are fixed 64-byte descriptors with static asserts, and hostile when
 * read.
 *
 *   batch ring  (one a group)  feeder -> ranks, gather -> writer     cursors: published, gathered, released
 *   chunk ring  (one a rank)   rank -> gather -> writer              cursors: published, validated, released
 *   sample ring (one a group)  gather -> writer                      cursors: published, released
 *
 * The batch is the unit of work. A batch is a list of whole rows packed without padding: its tokens are 0..n_tokens-1
 * and row i covers tokens [t0_i, t0_i + T_i). Ranks read the batch ring as observers at a private position that starts
 * at cursor "gathered" (so a restarted group rewinds to there by itself).
 *
 * For each captured state k (0 <= k < K, in the order of boot.captures) the batch's states are a [n_tokens, H] matrix
 * in the store dtype. It is cut into chunks of `chunk_rows` tokens: chunk c covers tokens [c*chunk_rows, ...), the last
 * is shorter. Chunk (k, c) of the batch at position b of its batch ring is exported by rank (c + k + b) mod N, so that
 * N PCIe links share the load; every other rank publishes a descriptor without payload that carries only its
 * fingerprint. So every rank publishes, per batch and in this order: for k ascending, for c ascending: one
 * SL_DESC_CHUNK; then (rank 0 only) one SL_DESC_ROW per row in order; then one SL_DESC_END. Chunks cost nothing for
 * short rows and are one contiguous copy from the device.
 *
 * (The design speaks of chunks per sample. Chunks per batch keep fixed payload slots full whatever the row lengths are,
 * make a capture one contiguous copy, and keep the property that a sample's pieces are spread over all ranks.)
 *
 * Gather checks each chunk as it comes, and when all N END descriptors of a batch are in, publishes in ONE
 * sl_ring_publish of the sample ring: SL_DESC_BATCH, then one SL_DESC_SAMPLE per row. Then it advances "validated" of
 * the chunk rings past the batch, then "gathered" of the batch ring. After a crash in between, the last descriptors of
 * the sample ring say what was already published. If every rank finished a batch before its group died, the batch is
 * used. Otherwise chunks of an older epoch are skipped by advancing "validated" over them without publishing.
 *
 * The writer handles an SL_DESC_BATCH once the batch ring's "gathered" has passed its bpos: gathered is advanced last,
 * so all of the batch's chunks then lie before "validated", and the writer may advance "released" of the batch ring.
 * (Gather rings the writer's bell after that too.) The writer, for each SL_DESC_BATCH: finds the batch's chunks in the
 * chunk rings itself (descriptors in [released, validated) with this epoch and bpos), writes and commits its rows, then
 * advances "released" of the chunk rings past that batch's END, of the batch ring past bpos, of the sample ring past
 * the batch. While it writes it sums the states once more: they must be those that gather looked at (row sum of the
 * sample descriptor), or the writer ends, and its next life looks before it writes: a row whose states in the rings
 * are other than the ones that were validated is rejected CHECKSUM. When the sample ring holds nothing unprocessed,
 * everything in [released, validated) of the chunk rings (validated read BEFORE looking at the sample ring) is stale
 * and is released too: that is how dead epochs are swept.
 */
#ifndef SL_IPC_FLOW_H
#define SL_IPC_FLOW_H
#include "ipc/ring.h"

enum { SL_BATCH_PUBLISHED, SL_BATCH_GATHERED, SL_BATCH_RELEASED, SL_BATCH_CURSORS };
enum { SL_CHUNK_PUBLISHED, SL_CHUNK_VALIDATED, SL_CHUNK_RELEASED, SL_CHUNK_CURSORS };
enum { SL_SAMPLE_PUBLISHED, SL_SAMPLE_RELEASED, SL_SAMPLE_CURSORS };

enum { SL_DESC_INPUT = 1, SL_DESC_CHUNK, SL_DESC_ROW, SL_DESC_END, SL_DESC_BATCH, SL_DESC_SAMPLE };

/* ---- batch ring: descriptor + payload slot (pay_slots == depth) ---- */
typedef struct sl_desc_input {
    sl_desc_head h;    /* epoch 0: batches belong to no epoch */
    uint64_t batch_no; /* global batch number: the packing is a pure function of the intake order, so it is stable over
                          restarts */
    uint64_t bytes;    /* used bytes of the payload slot */
    uint32_t n_rows;   /* 1..max_batch_rows */
    uint32_t n_tokens; /* 1..batch_tokens (or one longer row alone, up to max_length) */
    uint32_t crc;      /* CRC32C of the used payload bytes */
    uint32_t pad[3];
} sl_desc_input;
_Static_assert(sizeof(sl_desc_input) == 64, "");

/* Payload of a batch slot: sl_batch_row[n_rows], int32 ids[n_tokens], uint8 mask[n_tokens], id strings. */
typedef struct sl_batch_row {
    uint64_t seq;     /* intake sequence number (unique in the store, 0-based) */
    uint64_t row;     /* row number in its data set: names hs_<row> */
    uint32_t dataset; /* index in intake.log's data set table */
    uint32_t t0;      /* first token in the batch */
    uint32_t T;       /* tokens, >= 1 */
    uint32_t flags;  /* SL_ROW_NLL: compute teacher NLL for this row; SL_ROW_DONE: already committed, recomputed only so
                        that the batch keeps its shape (the writer drops it) */
    uint32_t id_off; /* row id string, offset from the start of the slot; */
    uint32_t id_len; /* not NUL-terminated, 0..256 */
    uint64_t key[2]; /* 128-bit row key (ipc/journal.h) */
    uint32_t mask_sum; /* supervised tokens */
    uint32_t pad;
} sl_batch_row;
_Static_assert(sizeof(sl_batch_row) == 64, "");
enum { SL_ROW_NLL = 1u << 0, SL_ROW_DONE = 1u << 1 };

/* Slot bytes needed for a batch; a view of a slot with every offset checked against desc->bytes, n_rows, n_tokens
 * (rows tile [0, n_tokens) exactly, strings inside, CRC right): SL_EINTERNAL and a sentence otherwise. */
typedef struct sl_batch_view {
    const sl_desc_input *desc;
    const sl_batch_row *rows;
    const int32_t *ids;
    const uint8_t *mask;
    const char *base;
} sl_batch_view;
uint64_t sl_batch_bytes(uint32_t n_rows, uint32_t n_tokens, uint64_t string_bytes);
int sl_batch_open(sl_batch_view *v, const sl_ring *batch_ring, uint64_t pos, sl_err *err);
/* The checks of sl_batch_open on a descriptor and its slot of `slot_bytes` bytes, wherever they lie (8-byte aligned).
 */
int sl_batch_parse(sl_batch_view *v, const sl_desc_input *d, uint64_t pos, const void *slot, uint64_t slot_bytes,
                   sl_err *err);

/* ---- chunk ring ---- */
typedef struct sl_desc_chunk {
    sl_desc_head h;     /* epoch: the group's epoch of the rank that made it */
    uint64_t bpos;      /* position in the batch ring */
    uint16_t k;         /* capture index 0..K-1 */
    uint16_t rank;      /* who made it */
    uint32_t c;         /* chunk index */
    uint32_t rows;      /* tokens in this chunk */
    uint32_t width;     /* H: elements a token */
    uint32_t nonfinite; /* NaN/Inf elements counted by the rank over its own copy */
    uint32_t hidx;      /* H index of the state (n+1 for the final-normed tensor): the label travels with the data */
    uint64_t sum;       /* sl_sum64 of the rank's own copy of the states, whether exported or not (fingerprint) */
} sl_desc_chunk;
_Static_assert(sizeof(sl_desc_chunk) == 64, "");
enum { SL_CHUNK_PAYLOAD = 1u << 0 }; /* head.flags: owns a payload slot holding rows*width elements */

typedef struct sl_desc_row { /* rank 0, after the chunks: what this rank really ran */
    sl_desc_head h;
    uint64_t bpos;
    uint32_t row; /* index in the batch */
    uint32_t T;
    uint64_t token_sum;  /* sl_sum64 over the int32 ids it ran */
    double nll;          /* mean next-token NLL, nats; NaN when not computed */
    uint32_t nll_tokens; /* T-1, or 0 when not computed */
    uint32_t pad;
} sl_desc_row;
_Static_assert(sizeof(sl_desc_row) == 64, "");

typedef struct sl_desc_end {
    sl_desc_head h;
    uint64_t bpos;
    uint32_t n_chunks; /* chunk descriptors published for this batch by this rank */
    uint16_t rank;
    uint16_t pad;
    uint64_t batch_no;
    uint64_t busy_ns; /* forward time of the batch on this rank */
    uint64_t spare;
} sl_desc_end;
_Static_assert(sizeof(sl_desc_end) == 64, "");

/* ---- sample ring ---- */
typedef enum {
    SL_V_OK = 0,
    SL_V_COUNT,          /* wrong number of tokens, rows or chunks */
    SL_V_SHAPE,          /* wrong width, dtype size or payload length */
    SL_V_ORDER,          /* a state, chunk or row in another's place */
    SL_V_TOKENS,         /* computed ids are not the ids that were asked for */
    SL_V_NONFINITE,      /* NaN or Inf */
    SL_V_CONSTANT,       /* all-zero, repeated or identical rows, layers or samples */
    SL_V_CHECKSUM,       /* payload does not match the fingerprint made where it was computed */
    SL_V_EPOCH,          /* chunks of more than one epoch */
    SL_V_RANKS_DISAGREE, /* replicated states differ between ranks */
    SL_V_MISSING_SHARD,  /* a rank's chunk did not come */
    SL_V_POISON,         /* in flight at two consecutive group deaths */
    SL_V_N
} sl_verdict;
const char *sl_verdict_name(sl_verdict v); /* "OK", "COUNT", ...; "?" out of range */

typedef struct sl_desc_batch {
    sl_desc_head h; /* epoch of the chunks */
    uint64_t bpos;
    uint64_t batch_no;
    uint32_t n_rows; /* SL_DESC_SAMPLE descriptors that follow */
    uint32_t rejected;
    uint64_t spare[2];
} sl_desc_batch;
_Static_assert(sizeof(sl_desc_batch) == 64, "");

typedef struct sl_desc_sample {
    sl_desc_head h;
    uint64_t seq;     /* intake sequence number */
    uint32_t row;     /* index in the batch */
    uint16_t verdict; /* sl_verdict */
    uint16_t k;       /* capture index of the first fault, 0xffff when none */
    uint32_t token;   /* token (within the row) of the first fault, 0xffffffff when none */
    uint32_t nll_tokens;
    double nll;      /* NaN when not computed */
    uint64_t detail; /* verdict-specific: what was found (count, rank, H index ...), see stages/gather/validate.h; of a
                        good row its row sum (ipc/sum64.h), with which the writer compares what it writes */
} sl_desc_sample;
_Static_assert(sizeof(sl_desc_sample) == 64, "");

/* ---- which states, and where ---- */
#define SL_MAX_CAPTURES 160
static inline uint32_t sl_chunk_owner(uint64_t bpos, uint32_t k, uint32_t c, uint32_t n_ranks) {
    return (uint32_t)((bpos + k + c) % n_ranks);
}

/* sum64: order-sensitive 64-bit checksum of bytes (multiple of 2), cheap on AVX-512 and in one GPU pass, and additive
 * over ranges, so that it can be computed in any order by parallel workers. The data is read as little-endian 32-bit
 * words w_0..w_{n-1} (a trailing 16-bit half is zero-extended):
 *
 *     a = sum w_i,  b = sum (i+1) * w_i   (both mod 2^64),   sum64 = b ^ rotl(a, 32) ^ (bytes * 0x9e3779b97f4a7c15)
 *
 * Every backend (CPU, CUDA) computes exactly this. */
uint64_t sl_sum64(const void *data, uint64_t bytes);
#endif
