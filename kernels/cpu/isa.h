/* isa: the inner loops of the CPU backend, compiled once an instruction set.
 *
 * isa_gemm.c, isa_rows.c and isa_dequant.c are built four times with different -m flags (base x86-64, avx2, avx512,
 * avx512 + bf16) and each build exports one table of function pointers. The program picks a table when the backend is
 * created, by what the processor says, so that one binary runs everywhere and every level can be tested on a machine
 * that has it. Nothing outside these three files uses vector instructions, and nothing inside them knows about threads
 * or memory plans.
 *
 * GEMM tiles. A panel holds `nr` columns (= rows of W) side by side, so that the inner loop reads it linearly:
 *   f32  panel: [k][nr] floats
 *   bf16 panel: [(k+1)/2][nr][2] bf16, two neighbouring k of a column together, the odd last one padded with zero
 * Columns beyond the matrix are zero. mm computes C[rows x nr] (+)= A[rows x k] * panel with rows <= mr; every element
 * of C is one chain of multiply-adds in ascending k, whatever `rows` is: a row's result does not depend on its
 * neighbours.
 *
 * bf16 is uint16_t throughout. */
#ifndef SL_CPU_ISA_H
#define SL_CPU_ISA_H
#include "kernels/ops.h"

typedef struct sl_isa {
    const char *name;
    int32_t mr, nr;
    int32_t bf16_dot; /* mm_bf16 and pack_bf16 exist */

    void (*mm_f32)(float *c, int64_t ldc, const float *a, int64_t lda, int32_t rows, const float *b, int64_t k,
                   int add);
    void (*mm_bf16)(float *c, int64_t ldc, const uint16_t *a, int64_t lda, int32_t rows, const uint16_t *b, int64_t k,
                    int add);
    /* rows [0, n) of src (n <= nr, ld elements apart, k used) become the columns of one panel */
    void (*pack_f32)(float *dst, const float *src, int64_t ld, int32_t n, int64_t k);
    void (*pack_f32_from_bf16)(float *dst, const uint16_t *src, int64_t ld, int32_t n, int64_t k);
    void (*pack_bf16)(uint16_t *dst, const uint16_t *src, int64_t ld, int32_t n, int64_t k);
    /* the same for a matrix whose rows already run along k: src[k][n] (attention's V) */
    void (*pack_v_f32)(float *dst, const float *src, int64_t ld, int32_t n, int64_t k);
    void (*pack_v_f32_from_bf16)(float *dst, const uint16_t *src, int64_t ld, int32_t n, int64_t k);
    void (*pack_v_bf16)(uint16_t *dst, const uint16_t *src, int64_t ld, int32_t n, int64_t k);

    /* conversions of n elements; f32 -> bf16 rounds to nearest even and keeps NaN a NaN */
    void (*to_f32)(float *dst, const uint16_t *src, int64_t n);
    void (*to_bf16)(uint16_t *dst, const float *src, int64_t n);
    /* out = round(acc + bias) */
    void (*finish_f32)(float *dst, const float *acc, const float *bias, int64_t n);
    void (*finish_bf16)(uint16_t *dst, const float *acc, const float *bias, int64_t n);

    /* One online-softmax step over scores s[0, n): positions outside [lo, hi) are masked. *m is the running maximum, *l
     * the running sum; s becomes exp(s*scale - m), masked positions 0. Returns the factor for what was accumulated
     * before. */
    float (*softmax_step)(float *s, int32_t n, int32_t lo, int32_t hi, float scale, float *m, float *l);
    void (*scale_f32)(float *x, float f, int64_t n);                   /* x *= f */
    void (*axpy_f32)(float *y, const float *x, float f, int64_t n);    /* y += f * x */
    void (*lse_step)(const float *x, int64_t n, double *m, double *l); /* running log-sum-exp: max and sum */

    /* one row; `bf` says whether x and out are bf16 or f32 */
    void (*norm_row)(void *out, const void *x, const float *w, int64_t d, float eps, int kind, int bf);
    void (*glu_row)(void *out, const void *g, const void *u, int64_t n, int kind, float limit, int bf);
    void (*add_row)(void *h, const void *a, int64_t n, int bf);
    void (*scale_row)(void *x, float f, int64_t n, int bf);
    void (*rope_row)(void *x, const float *cs, int32_t half, int kind, int bf);
    void (*fingerprint)(const void *x, uint64_t first_word, uint64_t bytes, int bf, uint64_t *a, uint64_t *b,
                        uint32_t *nonfinite);

    /* elements [k0, k0+kn) of the stored row `row` of matrix e of w, as f32; k0 and kn are multiples of the format's
     * block (kn may reach the row's end). Products are plain f32: rounding
     * to bf16, once, is the caller's where activations are bf16. */
    void (*dequant)(float *dst, const sl_mat *w, int64_t e, int64_t row, int64_t k0, int64_t kn);

    double (*peak)(int64_t n); /* n rounds of multiply-adds in registers; returns how many operations that was */
} sl_isa;

extern const sl_isa sl_isa_base, sl_isa_avx2, sl_isa_avx512, sl_isa_avx512bf16;

/* The best table for this processor, or the named one: "base", "avx2", "avx512", "avx512bf16"; NULL when the processor
 * lacks it or the name is unknown. name NULL = choose. avx512bf16 is chosen only where its dot product is faster than
 * two f32 multiply-adds (gemm.h has the measurements). */
const sl_isa *sl_isa_pick(const char *name);
#endif
