/* safetensors_out: the safetensors file of one row, as bytes in order. Layout files and the quarantine write it, `cat`
 * prints it. The header is padded with spaces to a multiple of 64 bytes, so that tensors are aligned for who maps the
 * file.
 *
 *   hidden_states [T, K', width]   states in ascending H index
 *   final_norm    [T, width]       only when H[n] and its final-normed form were both captured
 *   token_ids     I64 [T]
 *   loss_mask     U8 [T] */
#ifndef SL_WRITER_SAFETENSORS_OUT_H
#define SL_WRITER_SAFETENSORS_OUT_H
#include "ipc/boot.h"

typedef struct sl_capture_set { /* what a store keeps of a token */
    uint32_t n, width, elem_size, n_layers;
    sl_capture v[SL_MAX_CAPTURES];
    char model[80]; /* fingerprint */
} sl_capture_set;

/* The label of state k: hidx, or n_layers + 1 for the final-normed state. */
uint32_t sl_capture_label(const sl_capture_set *c, uint32_t k);
/* The final-normed state is a tensor of its own (H[n] is in the stack too). */
bool sl_capture_split(const sl_capture_set *c);
/* States in hidden_states. */
uint32_t sl_capture_stacked(const sl_capture_set *c);
/* "pre", "post" or "both" when the last state of the stack is H[n] / its normed form / both exist, "none" when neither
 * does. */
const char *sl_capture_final(const sl_capture_set *c);
/* "2,18,33,36", with "36n" for the final-normed state. buf of cap bytes. */
void sl_capture_text(const sl_capture_set *c, char *buf, size_t cap);
extern const char sl_convention[]; /* one sentence, in every file */

typedef struct sl_st_row { /* what is written about a row besides its states */
    uint64_t row;
    uint32_t part, T, mask_sum;
    const char *id, *dataset;
    uint32_t id_len;
    double nll; /* NaN: not computed */
} sl_st_row;
/* Header (8-byte length included) in a malloc'ed buffer, *len bytes; the tensors follow in the order above. NULL: no
 * memory. */
char *sl_st_header(const sl_capture_set *c, const sl_st_row *r, uint64_t *len, uint64_t *data_len);
/* Append `s` as a JSON string to buf at *at (cap bytes; stops before overflow). Bytes that are not UTF-8 become U+FFFD.
 */
void sl_json_str(char *buf, size_t cap, size_t *at, const char *s, size_t n);
#endif
