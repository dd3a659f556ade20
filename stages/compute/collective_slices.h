/* collective_slices: which elements of a sum each rank adds up, for the collectives between GPUs. */
#ifndef SL_COMPUTE_COLLECTIVE_SLICES_H
#define SL_COMPUTE_COLLECTIVE_SLICES_H
#include <stdint.h>

/* Elements [lo, hi) of n that rank r of tp adds up; starts are multiples of 64, so that 16-byte alignment is kept. */
static inline void sl_slice(int64_t n, int tp, int r, int64_t *lo, int64_t *hi) {
    int64_t units = (n + 63) / 64;
    *lo = units * r / tp * 64;
    *hi = units * (r + 1) / tp * 64;
    if (*lo > n) *lo = n;
    if (*hi > n) *hi = n;
}
/* Room for the widest of them. */
static inline int64_t sl_slice_widest(int64_t n, int tp) {
    int64_t units = (n + 63) / 64;
    return (units + tp - 1) / tp * 64;
}
/* Place of rank `from` among the pieces that rank `me` receives, 0..tp-2. */
static inline int sl_slice_place(int me, int from) {
    return from < me ? from : from - 1;
}
#endif
