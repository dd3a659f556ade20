/* Any bytes as tiktoken.model and, after the first NUL, tokenizer_config.json. To get past the 256 single bytes that a
 * model must have, they are put in front of the fuzzer's lines. */
#include "stages/feeder/tokenizer_internal.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t base(char *out, size_t cap) {
    static const char b64[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    size_t n = 0;
    for (unsigned i = 0; i < 256; i++)
        n += (size_t)snprintf(out + n, cap - n, "%c%c== %u\n", b64[i >> 2], b64[(i & 3) << 4], i);
    return n;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static sl_tok_scratch *s;
    static uint64_t salt;
    if (!s && !(s = sl_tok_scratch_new())) return 0;
    const uint8_t *cut = size ? memchr(data, 0, size) : NULL;
    size_t nm = cut ? (size_t)(cut - data) : size, nb = size && data[0] == '#' ? 0 : 1;
    char *model = malloc(4096 + nm);
    sl_tokenizer *t = sl_tokenizer_alloc();
    sl_err err = {0};
    if (!model || !t) exit(0);
    nb = nb ? base(model, 4096) : 0;
    memcpy(model + nb, data, nm);
    t->salt = ++salt;
    static const char none[] = "{\"added_tokens_decoder\":{}}";
    const char *cfg = cut ? (const char *)cut + 1 : none;
    if (!sl_tokenizer_from_tiktoken(t, model, nb + nm, cfg, cut ? size - nm - 1 : sizeof none - 1, &err)) {
        static const char text[] = "aaaa bbb \xe4\xbd\xa0 <|reserved_token_300|> It's 12345\n\n";
        sl_ids ids = {0};
        if (sl_tokenizer_encode(t, s, text, sizeof text - 1, true, true, &ids, &err)) abort();
        size_t n = 0;
        for (size_t i = 0; i < ids.n; i++) {
            size_t k;
            const char *p = sl_tokenizer_piece(t, ids.ids[i], &k);
            if (!p || n + k > sizeof text - 1 || memcmp(p, text + n, k)) abort();
            n += k;
        }
        if (n != sizeof text - 1) abort();
        free(ids.ids);
    } else if (!err.msg[0])
        abort();
    sl_tokenizer_free(t);
    free(model);
    return 0;
}
