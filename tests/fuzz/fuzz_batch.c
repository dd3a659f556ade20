/* A hostile batch slot: the first 64 bytes are the descriptor, the rest is the slot. Its CRC is made good so that the
 * checks behind it are reached; a view that is accepted is read to its last byte. */
#include "ipc/flow.h"
#include "ipc/journal.h"
#include <stdlib.h>
#include <string.h>

static volatile unsigned sink;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    sl_desc_input d;
    if (size < sizeof d + 1) return 0;
    memcpy(&d, data, sizeof d);
    size_t slot_bytes = size - sizeof d;
    uint8_t *slot = aligned_alloc(64, (slot_bytes + 63) / 64 * 64);
    uint8_t *tight = slot + 0;
    memcpy(slot, data + sizeof d, slot_bytes);
    d.h.kind = SL_DESC_INPUT;
    d.h.pos = 3;
    if (d.n_rows & 1u << 31) { /* make the sizes plausible more often than chance would */
        d.n_rows = d.n_rows % 8;
        d.n_tokens %= 64;
        d.bytes = slot_bytes;
    }
    if (d.bytes <= slot_bytes) d.crc = sl_crc32c(0, slot, d.bytes);
    sl_batch_view v;
    sl_err e;
    if (!sl_batch_parse(&v, &d, 3, tight, slot_bytes, &e)) {
        uint64_t t = 0;
        for (uint32_t i = 0; i < d.n_rows; i++) {
            const sl_batch_row *r = &v.rows[i];
            for (uint32_t j = 0; j < r->T; j++, t++) sink += (unsigned)v.ids[r->t0 + j] + v.mask[r->t0 + j];
            for (uint32_t j = 0; j < r->id_len; j++) sink += (unsigned char)v.base[r->id_off + j];
        }
        if (t != d.n_tokens) abort();
    }
    free(slot);
    return 0;
}
