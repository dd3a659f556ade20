/* validate: what must hold before a row may be called a sample. One checker a group; it sees every descriptor of the
 * batch in hand from every rank, looks at every byte of payload exactly once, and gives each row a verdict.
 *
 * A fault condemns the rows it touches and no others: a chunk's fault the rows that overlap the chunk, a ROW
 * descriptor's fault its row, a fault of the batch as a whole (bad kind, wrong batch number, END that counts wrong)
 * every row. When a row has several faults the one named first below wins, because it explains the ones after it.
 *
 *   POISON     the batch was in flight at two deaths of its group in a row. detail: 0
 *   EPOCH      a descriptor carries an epoch that the group has not reached, or an older one after newer ones of the
 *              same rank. detail: the epoch found
 *   SHAPE      a chunk's width is not H, or rows*H*elem_size does not fit the payload slot, or the payload slot itself
 *              is out of place. detail: the width, or the bytes, found
 *   ORDER      k, c or rank out of range or against the agreed order; a label (hidx) that is not that of capture k;
 *              payload from a rank that does not own the chunk; a payload whose checksum is not its own fingerprint
 *              but that of another chunk of this or the previous batch; a rank's fingerprint that other ranks have for
 *              another chunk; ROW out of order or from another rank than 0; false kind, position or batch number.
 *              detail: the label, index, rank or number found; for content in another's place, where it belongs:
 *              k << 32 | c, with SL_DETAIL_PREVIOUS when that is in the batch before
 *   MISSING_SHARD  the owner's chunk (k, c) did not come, or came without payload. detail: the owing rank
 *   COUNT      ROW.T or the rows of a chunk differ from what was asked; a fingerprint or ROW is missing; a chunk came
 *              twice; END is missing or counts wrong. detail: the number found
 *   TOKENS     ROW.token_sum is not sl_sum64 of the ids that were asked for. detail: the sum found
 *   NONFINITE  NaN or Inf in the payload (counted here, not believed). detail: how many in this row and capture
 *   CONSTANT   see below. detail: sl_constant << 32 | number
 *   CHECKSUM   sl_sum64 of the payload is not the fingerprint its rank made. detail: the sum found
 *   RANKS_DISAGREE  the ranks' fingerprints of chunk (k, c) differ. detail: the odd rank; 0xffff: no majority
 *
 * CONSTANT looks for states that carry nothing of their token. Legitimate repetitions are not faults: embeddings (H[0])
 * repeat with their token; a row of one repeated token has the same state everywhere; equal rows and shared prefixes
 * have equal states. So (a state's identity is the checksum of its bytes; "captured" means H[1] and above; "number" is
 * the lower half of detail):
 *   ZERO       a captured state of all zeros; in H[0], a whole row of zeros. number: states
 *   REPEATED   more than two neighbours with different ids but the same captured state. number: pairs
 *   LAYERS     two captures of the row are equal in every token. number: the other k
 *   ROWS       a captured row equals one of the last SL_HISTORY_ROWS accepted rows, whose ids differ. number: rows ago
 *   OTHER_ID   captured states that were seen before as the state of a different token id, more than two or more than
 *              half of the row: the states of an earlier sample, at any offset. number: states
 * The last two need a memory, which holds accepted rows only and starts empty after a restart. OTHER_ID watches at most
 * SL_HISTORY_CAPTURES captures, the deepest among them.
 *
 * Nothing here trusts a number from a descriptor. The checker never allocates per descriptor and never fails on
 * content. */
#ifndef SL_GATHER_VALIDATE_H
#define SL_GATHER_VALIDATE_H
#include "ipc/boot.h"

#define SL_DETAIL_PREVIOUS  (1ull << 63)
#define SL_HISTORY_ROWS     64
#define SL_HISTORY_CAPTURES 8

typedef enum { SL_CONST_ZERO = 1, SL_CONST_REPEATED, SL_CONST_LAYERS, SL_CONST_ROWS, SL_CONST_OTHER_ID } sl_constant;

typedef struct sl_check_shape { /* what was asked; from the boot block */
    uint32_t n_ranks, n_captures;
    uint32_t label[SL_MAX_CAPTURES]; /* hidx, or n_layers + 1 for the final-normed tensor */
    uint32_t width, elem_size, chunk_rows;
    uint32_t batch_tokens; /* sizes the memory */
} sl_check_shape;

typedef struct sl_row_verdict {
    sl_verdict verdict;
    uint16_t k;      /* capture of the first fault, 0xffff: none */
    uint16_t rank;   /* rank that showed it, 0xffff: none */
    uint32_t token;  /* token within the row, 0xffffffff: none */
    uint64_t detail; /* as above */
    uint64_t want;   /* what was expected in place of detail, for the log */
    uint64_t sum;    /* of a good row: the row sum of its states (ipc/sum64.h) */
    double nll;      /* NaN when not computed */
    uint32_t nll_tokens;
} sl_row_verdict;

typedef struct sl_check sl_check;

void sl_check_shape_of(sl_check_shape *s, const sl_boot *b);
int sl_check_open(sl_check **out, const sl_check_shape *s, sl_err *err); /* SL_ETEMP: no memory; SL_ECONFIG: shape */
void sl_check_close(sl_check *c);

/* Start (again) on a batch; forgets what was seen of it. `v` must stay mapped until finish. SL_ETEMP: no memory. */
int sl_check_begin(sl_check *c, const sl_batch_view *v, uint64_t bpos, sl_err *err);
/* The next descriptor of `rank`, found at ring position `pos`; payload (or NULL) as sl_ring_payload gave it, in a slot
 * of pay_size bytes. True when it was the rank's END. */
bool sl_check_desc(sl_check *c, unsigned rank, uint64_t pos, const sl_desc *d, const void *payload, uint64_t pay_size);
/* A fault of the whole batch that the caller noticed (rank 0xffff: none). */
void sl_check_condemn(sl_check *c, sl_verdict v, unsigned rank, uint64_t detail, uint64_t want);
/* Row i of the batch alone, whatever its states are; before sl_check_finish. */
void sl_check_condemn_row(sl_check *c, uint32_t i, sl_verdict v);
/* Every rank is through: settle every row. n_rows verdicts, valid until the next begin. Call once a batch. */
const sl_row_verdict *sl_check_finish(sl_check *c);
/* Payload bytes looked at in this batch. */
uint64_t sl_check_bytes(const sl_check *c);

/* A sentence for the log: "NONFINITE at capture 2 (H index 15), token 17: 3 NaN or Inf elements". Returns buf. */
const char *sl_check_say(const sl_check_shape *s, const sl_row_verdict *v, char *buf, size_t n);
#endif
