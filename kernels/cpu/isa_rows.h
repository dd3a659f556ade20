/* Rows: the entries of sl_isa that isa_rows.c and isa_dequant.c define, for the table in isa_gemm.c. Private to
 * isa_*.c. */
#ifndef SL_CPU_ISA_ROWS_H
#define SL_CPU_ISA_ROWS_H
void FN(sl_row_to_f32)(float *dst, const uint16_t *src, int64_t n);
void FN(sl_row_to_bf16)(uint16_t *dst, const float *src, int64_t n);
void FN(sl_row_finish_f32)(float *dst, const float *acc, const float *bias, int64_t n);
void FN(sl_row_finish_bf16)(uint16_t *dst, const float *acc, const float *bias, int64_t n);
float FN(sl_row_softmax_step)(float *s, int32_t n, int32_t lo, int32_t hi, float scale, float *m, float *l);
void FN(sl_row_scale_f32)(float *x, float f, int64_t n);
void FN(sl_row_axpy_f32)(float *y, const float *x, float f, int64_t n);
void FN(sl_row_lse_step)(const float *x, int64_t n, double *m, double *l);
void FN(sl_row_norm)(void *out, const void *x, const float *w, int64_t d, float eps, int kind, int bf);
void FN(sl_row_glu)(void *out, const void *g, const void *u, int64_t n, int kind, float limit, int bf);
void FN(sl_row_add)(void *h, const void *a, int64_t n, int bf);
void FN(sl_row_scale)(void *x, float f, int64_t n, int bf);
void FN(sl_row_rope)(void *x, const float *cs, int32_t half, int kind, int bf);
void FN(sl_row_fingerprint)(const void *x, uint64_t first_word, uint64_t bytes, int bf, uint64_t *a, uint64_t *b,
                            uint32_t *nonfinite);
void FN(sl_row_dequant)(float *dst, const sl_mat *w, int64_t e, int64_t row, int64_t k0, int64_t kn);
#endif
