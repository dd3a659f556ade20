/* Hostile shards: header, frame walk, rows through their END frames, blocks through every codec, index and footer. The
 * input is the shard; so that the fuzzer gets behind the checksums, CRCs and sums of what it made are put right first.
 */
#include "stages/writer/shard.h"
#include "stages/writer/xxh3.h"
#include <stdlib.h>
#include <string.h>

static void put_right(uint8_t *b, size_t n) {
    if (n < sizeof(sl_shard_head)) return;
    sl_shard_head h;
    memcpy(&h, b, sizeof h);
    h.magic = SL_SHARD_MAGIC;
    h.version = SL_STORE_VERSION;
    h.crc = sl_crc32c(0, &h, sizeof h - 4);
    memcpy(b, &h, sizeof h);
    for (size_t at = sizeof h; at + sizeof(sl_frame_head) <= n; at += SL_FRAME_ALIGN) {
        sl_frame_head f;
        memcpy(&f, b + at, sizeof f);
        if (f.magic != SL_FRAME_MAGIC) continue;
        f.version = SL_STORE_VERSION;
        if (f.enc_len <= n - at - sizeof f) f.enc_sum = XXH3_64bits(b + at + sizeof f, f.enc_len);
        f.crc = sl_crc32c(0, &f, sizeof f - 4);
        memcpy(b + at, &f, sizeof f);
    }
    sl_shard_foot ft;
    memcpy(&ft, b + n - sizeof ft, sizeof ft);
    ft.crc = sl_crc32c(0, &ft, sizeof ft - 4);
    memcpy(b + n - sizeof ft, &ft, sizeof ft);
}

static void read_row(const sl_src *s, const sl_shard_head *h, sl_codec_ctx *c, const sl_frame_head *f, uint64_t end) {
    sl_row_frames r;
    sl_row_meta m;
    sl_meta_head mh;
    sl_scratch sc = {0};
    if (!sl_row_meta_read(s, f, &mh, &m, NULL)) sl_row_meta_free(&m);
    if (f->T > 4096 || end <= f->off || sl_row_open(&r, s, h, f->off, end - f->off, f->T, NULL)) return;
    uint64_t rb = (uint64_t)h->width * h->elem_size;
    if (rb * f->T <= 64u << 20) {
        void *dst = malloc(rb * f->T);
        for (uint32_t k = 0; dst && k < h->n_states && k < 4; k++) {
            sl_row_state(&r, s, h, c, k, 0, f->T, dst, &sc, NULL, NULL);
            sl_row_state(&r, s, h, c, k, f->T / 2, 1, dst, &sc, NULL, NULL);
        }
        free(dst);
    }
    free(sc.p);
    sl_row_close(&r);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static sl_codec_ctx *c;
    sl_shard_head h;
    sl_frame_head f;
    if (!c && sl_codec_ctx_new(&c, 1, NULL)) return 0;
    if (size < sizeof h + sizeof(sl_shard_foot)) return 0;
    uint8_t *b = malloc(size);
    memcpy(b, data, size);
    put_right(b, size);
    sl_src s = {.fd = -1, .mem = b, .len = size, .name = "fuzz"};
    sl_index_entry *ix;
    uint64_t n, metas = 0;
    if (!sl_shard_open(&s, &h, NULL)) {
        if (!sl_shard_index(&s, &h, &ix, &n, NULL)) free(ix);
        for (uint64_t at = sizeof h; at < size; at += SL_FRAME_ALIGN) {
            if (sl_frame_open(&s, &h, at, &f, NULL) || f.kind != SL_FR_META || ++metas > 4) continue;
            /* the row may end behind any END frame that follows */
            for (uint64_t e = at; e < size; e += SL_FRAME_ALIGN) {
                sl_frame_head g;
                if (!sl_frame_open(&s, &h, e, &g, NULL) && g.kind == SL_FR_END)
                    read_row(&s, &h, c, &f, e + sl_frame_span(g.enc_len));
            }
        }
    }
    free(b);
    return 0;
}
