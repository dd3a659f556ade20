/* Any bytes as tokenizer.json: refused with a sentence, or a tokenizer that encodes. */
#include "stages/feeder/tokenizer_internal.h"
#include <stdlib.h>
#include <string.h>

static void encode(const sl_tokenizer *t, sl_tok_scratch *s) {
    static const char many[] = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    static const char *const texts[] = {"", "the cat sat  on\n\nthe mat",
                                        "na\u00efve e\u0301 \u4f60\u597d 123 <s>\u2581x", many};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        sl_ids ids = {.want_off = true};
        sl_err err = {0};
        size_t n = strlen(texts[i]);
        if (!sl_tokenizer_encode(t, s, texts[i], n, true, i & 1, &ids, &err))
            for (size_t k = 0; k < ids.n; k++)
                if (ids.ids[k] < 0 || ids.off[k] > n) abort();
        free(ids.ids);
        free(ids.off);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static sl_tok_scratch *s;
    static uint64_t salt;
    if (!s && !(s = sl_tok_scratch_new())) return 0;
    sl_tokenizer *t = sl_tokenizer_alloc();
    sl_err err = {0};
    if (!t) return 0;
    t->salt = ++salt;
    t->no_plain = size & 1;
    if (!sl_tokenizer_from_json(t, (const char *)data, size, &err)) {
        if (!sl_tokenizer_apply_config(t, (const char *)data, size, &err)) encode(t, s);
    } else if (!err.msg[0])
        abort();
    sl_tokenizer_free(t);
    return 0;
}
