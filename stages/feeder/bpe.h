/* bpe: byte-pair encoding of one piece of text, in time that is near linear in its length.
 *
 * A model is a vocabulary (byte string to id) and a table of merges (pair of ids to rank and resulting id). Encoding
 * starts from one symbol per byte (SL_BPE_BYTES), or per character (SL_BPE_CHARS: characters outside the vocabulary
 * become byte tokens, the unknown token, or nothing), and applies again and again the merge of lowest rank, leftmost
 * first. Short pieces scan an array of ranks; long ones use a heap over a linked list (n log n: a megabyte of one
 * letter takes a fraction of a second).
 *
 * Build with _new, _add_token, _add_merge (or _merges_from_vocab), then _finish; immutable afterwards, any number of
 * threads may encode, each with its own sl_bpe_scratch. The scratch keeps a bounded cache of pieces (fixed 4 MiB). */
#ifndef SL_FEEDER_BPE_H
#define SL_FEEDER_BPE_H
#include "ipc/err.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SL_BPE_NONE      (-1)
#define SL_BPE_MAX_IDS   (1 << 22)  /* more tokens than any vocabulary; bounds memory that a hostile file can ask for */
#define SL_BPE_MAX_PIECE (16 << 20) /* longest piece in bytes; some 800 MiB of scratch at the very most */

typedef enum { SL_BPE_BYTES, SL_BPE_CHARS } sl_bpe_units;
typedef struct sl_bpe sl_bpe;
typedef struct sl_bpe_scratch sl_bpe_scratch;

typedef struct sl_bpe_out { /* tokens of one piece: id and byte offset in the piece; owned by the scratch, valid until
                               the next call */
    const int32_t *ids;
    const uint32_t *off; /* only filled when asked for */
    size_t n;
} sl_bpe_out;

sl_bpe *sl_bpe_new(sl_bpe_units units); /* NULL: out of memory */
void sl_bpe_free(sl_bpe *b);
/* Give `id` the bytes s[0..n). `in_vocab` false: known by id only (special tokens), never produced by encoding.
 * SL_ECONFIG: id out of [0, SL_BPE_MAX_IDS) or given twice with different bytes. The first id of equal bytes is kept
 * for look-ups. */
int sl_bpe_add_token(sl_bpe *b, int32_t id, const char *s, size_t n, bool in_vocab, sl_err *err);
/* Merge of rank `rank` (low first). SL_ECONFIG: one of the parts or the result is not in the vocabulary. Of equal pairs
 * the later wins. */
int sl_bpe_add_merge(sl_bpe *b, const char *l, size_t nl, const char *r, size_t nr, uint32_t rank, sl_err *err);
/* Every pair of vocabulary tokens (or single characters, in SL_BPE_CHARS) whose concatenation is a token merges with
 * the rank `rank_of[id]` of the result (tiktoken: the id itself; SentencePiece: order of scores). */
int sl_bpe_merges_from_vocab(sl_bpe *b, const uint32_t *rank_of, size_t n_rank, sl_err *err);

typedef struct sl_bpe_options {
    bool whole_piece;   /* a piece that is a token is that token, whatever the merges say (ignore_merges, tiktoken) */
    bool byte_fallback; /* SL_BPE_CHARS: unknown characters become <0xNN> tokens, if all of them exist */
    bool merge_unknown; /* SL_BPE_CHARS: unknown characters take part in merging and fall back afterwards (SentencePiece
                           order) */
    int32_t unk;        /* SL_BPE_NONE: unknown characters vanish */
    bool fuse_unk;      /* neighbouring unknowns give one token */
} sl_bpe_options;
/* Freeze. `salt` tells caches of different models apart (a hash of the model's files). */
int sl_bpe_finish(sl_bpe *b, const sl_bpe_options *o, uint64_t salt, sl_err *err);

int32_t sl_bpe_find(const sl_bpe *b, const char *s, size_t n); /* id of a vocabulary token, SL_BPE_NONE */
const char *sl_bpe_piece(const sl_bpe *b, int32_t id, size_t *n);
int32_t sl_bpe_size(const sl_bpe *b); /* 1 + the largest id */

sl_bpe_scratch *sl_bpe_scratch_new(void);
void sl_bpe_scratch_free(sl_bpe_scratch *s);
/* Encode piece p[0..n), valid UTF-8 when units are characters, SL_EDATA: longer than SL_BPE_MAX_PIECE.
 * SL_ETEMP: out of memory. */
int sl_bpe_encode(const sl_bpe *b, sl_bpe_scratch *s, const char *p, size_t n, bool want_off, sl_bpe_out *out,
                  sl_err *err);
/* Merge-table look-ups and heap operations so far, for tests of linearity that need no clock. */
uint64_t sl_bpe_scratch_work(const sl_bpe_scratch *s);
#endif
