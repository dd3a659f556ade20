/* random: weights without a checkpoint. Every element is a function of seed, tensor name and its position in the FULL
 * tensor, so that any rank at any width makes the same model. Values are about normal with standard deviation 1/sqrt(k)
 * for matrices of k columns (0.02 for embeddings and heads), norms scatter around their neutral value, nothing is
 * constant. Quantized formats get random codes and scales of matching size. */
#ifndef SL_COMPUTE_RANDOM_H
#define SL_COMPUTE_RANDOM_H
#include "stages/compute/want.h"

uint64_t sl_random_key(uint64_t seed, const char *name, int part);
/* Row `row` (of expert e) of part p of the item, this rank's columns, as the file would hold them: part[p].piece bytes.
 */
void sl_random_row(const sl_want_item *it, uint64_t key, int part, int64_t e, int64_t row, void *out);
/* 1 and *f when the part can be made by ops->fill with the same bits (f32, bf16 and INT4 matrices), else 0. */
int sl_random_fill(sl_fill *f, const sl_want_item *it, uint64_t key, int part);
/* Element i of a vector; neutral: what a norm weight scatters around (1, or 0 for Gemma's 1 + w). */
float sl_random_vec(const sl_want_item *it, uint64_t key, uint64_t i, float neutral);
#endif
