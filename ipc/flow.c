#include "ipc/flow.h"
#include "ipc/journal.h"
#include <inttypes.h>

#define MAX_BATCH_TOKENS (1u << 30)
#define MAX_ROW_ID       256u

const char *sl_verdict_name(sl_verdict v) {
    static const char *const names[] = {"OK",       "COUNT",    "SHAPE", "ORDER",          "TOKENS",        "NONFINITE",
                                        "CONSTANT", "CHECKSUM", "EPOCH", "RANKS_DISAGREE", "MISSING_SHARD", "POISON"};
    _Static_assert(sizeof names / sizeof *names == SL_V_N, "one name a verdict");
    return (unsigned)v < SL_V_N ? names[v] : "?";
}

uint64_t sl_batch_bytes(uint32_t n_rows, uint32_t n_tokens, uint64_t string_bytes) {
    return (uint64_t)n_rows * sizeof(sl_batch_row) + (uint64_t)n_tokens * 5 + string_bytes;
}

static int check_rows(const sl_desc_input *d, const sl_batch_row *rows, uint64_t strings, sl_err *err) {
    uint64_t t = 0;
    for (uint32_t i = 0; i < d->n_rows; i++) {
        const sl_batch_row *r = &rows[i];
        if (r->t0 != t || !r->T || r->T > d->n_tokens - t)
            return sl_err_set(err, SL_EINTERNAL,
                              "row %u covers tokens %u+%u, expected it to start at %" PRIu64 " and end by %u", i, r->t0,
                              r->T, t, d->n_tokens);
        t += r->T;
        if (r->mask_sum > r->T)
            return sl_err_set(err, SL_EINTERNAL, "row %u has %u supervised tokens of %u", i, r->mask_sum, r->T);
        if (r->id_len > MAX_ROW_ID ||
            (r->id_len && (r->id_off < strings || (uint64_t)r->id_off + r->id_len > d->bytes)))
            return sl_err_set(err, SL_EINTERNAL, "row %u: id string at %u+%u is outside [%" PRIu64 ", %" PRIu64 ")", i,
                              r->id_off, r->id_len, strings, d->bytes);
    }
    if (t != d->n_tokens)
        return sl_err_set(err, SL_EINTERNAL, "rows cover %" PRIu64 " tokens, the batch has %u", t, d->n_tokens);
    return 0;
}

int sl_batch_parse(sl_batch_view *v, const sl_desc_input *d, uint64_t pos, const void *slot, uint64_t slot_bytes,
                   sl_err *err) {
    if (d->h.kind != SL_DESC_INPUT || d->h.pos != pos)
        return sl_err_set(err, SL_EINTERNAL, "batch at %" PRIu64 ": found kind %u at position %" PRIu64, pos, d->h.kind,
                          d->h.pos);
    if (!d->n_rows || !d->n_tokens || d->n_tokens > MAX_BATCH_TOKENS || d->n_rows > d->n_tokens)
        return sl_err_set(err, SL_EINTERNAL, "batch at %" PRIu64 ": %u rows with %u tokens", pos, d->n_rows,
                          d->n_tokens);
    uint64_t strings = sl_batch_bytes(d->n_rows, d->n_tokens, 0);
    if (d->bytes < strings || d->bytes > slot_bytes)
        return sl_err_set(err, SL_EINTERNAL,
                          "batch at %" PRIu64 ": %" PRIu64 " bytes used, expected %" PRIu64 " to %" PRIu64, pos,
                          d->bytes, strings, slot_bytes);
    uint32_t crc = sl_crc32c(0, slot, d->bytes);
    if (crc != d->crc)
        return sl_err_set(err, SL_EINTERNAL, "batch at %" PRIu64 ": CRC32C %08x, expected %08x", pos, crc, d->crc);
    const sl_batch_row *rows = slot;
    int rc = check_rows(d, rows, strings, err);
    if (rc) {
        sl_err_wrap(err, "batch at %" PRIu64, pos);
        return rc;
    }
    const int32_t *ids = (const int32_t *)(const void *)(rows + d->n_rows);
    *v = (sl_batch_view){
        .desc = d, .rows = rows, .ids = ids, .mask = (const uint8_t *)(ids + d->n_tokens), .base = slot};
    return 0;
}

int sl_batch_open(sl_batch_view *v, const sl_ring *batch_ring, uint64_t pos, sl_err *err) {
    const sl_desc *d = sl_ring_at(batch_ring, pos);
    const void *slot = sl_ring_payload(batch_ring, pos);
    if (!d || !slot)
        return sl_err_set(err, SL_EINTERNAL,
                          "ring '%s': no batch with a payload at %" PRIu64 " (published %" PRIu64 ")",
                          sl_ring_info(batch_ring)->name, pos, sl_ring_pos(batch_ring, SL_BATCH_PUBLISHED));
    return sl_batch_parse(v, (const sl_desc_input *)(const void *)d, pos, slot, sl_ring_info(batch_ring)->pay_size,
                          err);
}
