#include "stages/compute/resident.h"
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>

#define STEP  (UINT64_C(4) << 20)
#define AHEAD (UINT64_C(64) << 20)

static int by_place(const void *pa, const void *pb) {
    const sl_extent *a = pa, *b = pb;
    if (a->file != b->file) return a->file < b->file ? -1 : 1;
    return a->off < b->off ? -1 : a->off > b->off;
}

static uint64_t span(const sl_extent *x) {
    return (x->rows - 1) * x->pitch + x->piece;
}

/* What has been asked of the kernel: everything before byte `at` of piece `i`. */
typedef struct front {
    uint64_t i, at, bytes; /* bytes: asked and not yet taken */
} front;

static void run_ahead(const sl_source *src, const sl_extent *x, uint64_t n, front *f) {
    while (f->i < n && f->bytes < AHEAD) {
        uint64_t len = span(&x[f->i]) - f->at;
        if (len > STEP) len = STEP;
        (void)posix_fadvise(sl_source_fd(src, x[f->i].file), (off_t)(x[f->i].off + f->at), (off_t)len,
                            POSIX_FADV_WILLNEED);
        f->bytes += len;
        f->at += len;
        if (f->at == span(&x[f->i])) {
            f->i++;
            f->at = 0;
        }
    }
}

static void take(const uint8_t *map, uint64_t off, uint64_t len) {
    uint64_t page = off / 4096 * 4096;
    if (!madvise((void *)(uintptr_t)(map + page), off + len - page, MADV_POPULATE_READ)) return;
    for (uint64_t at = page; at < off + len; at += 4096) /* before Linux 5.14: touch the pages */
        (void)*(const volatile uint8_t *)(map + at);
}

int sl_resident_read(const sl_source *src, const uint8_t *const *map, sl_extent *x, uint64_t n, sl_loader_progress *p,
                     sl_err *err) {
    front f = {0};
    qsort(x, n, sizeof *x, by_place);
    for (uint64_t i = 0; i < n; i++) {
        uint64_t all = span(&x[i]), useful = x[i].rows * x[i].piece; /* a slice of columns has gaps */
        const uint8_t *file = map[x[i].file];
        for (uint64_t at = 0, len; at < all; at += len) {
            len = all - at < STEP ? all - at : STEP;
            run_ahead(src, x, n, &f);
            take(file, x[i].off + at, len);
            f.bytes -= len;
            uint64_t count = len < useful ? len : useful;
            sl_loader_advance(p, count);
            useful -= count;
        }
        int rc = sl_check_finite(file + x[i].off, x[i].rows, x[i].pitch, x[i].piece, 0, x[i].check, err);
        if (rc) return rc;
    }
    return 0;
}
