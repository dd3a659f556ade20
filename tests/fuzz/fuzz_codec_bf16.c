/* Hostile payloads into every codec's decoder, and what was encoded must come back. First bytes: codec, rows, width. */
#include "stages/writer/codec.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static sl_codec_ctx *c;
    if (!c && sl_codec_ctx_new(&c, 1, NULL)) return 0;
    if (size < 4) return 0;
    sl_block b = {1 + data[1] % 40, 1 + data[2], data[0] & 4 ? 4 : 2};
    uint32_t codec = data[0] % 3, used;
    uint64_t n = sl_block_bytes(b), cap = sl_codec_bound(b), len;
    uint8_t *dst = malloc(n), *src = calloc(1, n), *enc = malloc(cap);
    sl_codec_decode(c, codec, b, data + 3, size - 3, dst, NULL);
    memcpy(src, data + 3, size - 3 < n ? size - 3 : n);
    if (sl_codec_encode(c, codec, b, src, enc, cap, &len, &used, NULL) ||
        sl_codec_decode(c, used, b, enc, len, dst, NULL) || memcmp(src, dst, n))
        abort();
    free(dst);
    free(src);
    free(enc);
    return 0;
}
