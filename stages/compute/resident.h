/* resident: pieces of mapped files brought into memory before they are used in place. Pieces are taken in the order in
 * which they lie in the files, whatever order they are wanted in, and reading runs ahead of the piece in hand by a
 * bounded amount across the ends of pieces: the device sees one long sequential read. */
#ifndef SL_COMPUTE_RESIDENT_H
#define SL_COMPUTE_RESIDENT_H
#include "stages/compute/loader.h"

typedef struct sl_extent {
    uint32_t file;
    uint64_t off, rows, pitch, piece; /* rows pieces of `piece` bytes, `pitch` apart */
    sl_finite_check check;            /* done on each piece while the next ones are being read */
} sl_extent;

/* x[0..n) is sorted in place; map[file] is the whole file, mapped. 0, or what sl_check_finite says. A page that cannot
 * be read now is read, or faults, when it is used. */
int sl_resident_read(const sl_source *src, const uint8_t *const *map, sl_extent *x, uint64_t n, sl_loader_progress *p,
                     sl_err *err);
#endif
