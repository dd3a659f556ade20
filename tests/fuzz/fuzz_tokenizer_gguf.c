/* Any bytes as a GGUF file with a vocabulary. */
#include "stages/compute/gguf.h"
#include "stages/feeder/tokenizer_internal.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static sl_tok_scratch *s;
    if (!s && !(s = sl_tok_scratch_new())) return 0;
    sl_gguf *g = NULL;
    sl_err err = {0};
    if (sl_gguf_open_mem(&g, data, size, &err)) return 0;
    sl_tokenizer *t = sl_tokenizer_alloc();
    if (t && !sl_tokenizer_from_gguf_open(t, g, &err)) {
        static const char text[] = "ab abb \xe4\xbd\xa0 It's 12345</s>\n\n";
        sl_ids ids = {.want_off = true};
        if (!sl_tokenizer_encode(t, s, text, sizeof text - 1, true, true, &ids, &err))
            for (size_t i = 0; i < ids.n; i++)
                if (ids.ids[i] < 0 || ids.ids[i] >= sl_tokenizer_vocab(t) || ids.off[i] > sizeof text) abort();
        free(ids.ids);
        free(ids.off);
    }
    sl_tokenizer_free(t);
    sl_gguf_close(g);
    return 0;
}
