/* A GGUF from anybody: opened, every key and tensor looked at, and its metadata read as a model's. */
#include "stages/compute/families.h"
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    sl_gguf *g;
    sl_err err = {0};
    static sl_spec spec;
    if (sl_gguf_open_mem(&g, data, n, &err)) return 0;
    volatile uint8_t sink = 0;
    for (uint64_t i = 0; i < sl_gguf_n_tensors(g); i++) {
        const sl_gguf_tensor *t = sl_gguf_tensor_at(g, i);
        const uint8_t *p = sl_gguf_data(g, t);
        if (t->bytes) sink = (uint8_t)(sink + p[0] + p[t->bytes - 1]);
    }
    sl_gguf_str s;
    for (uint64_t i = 0; i < sl_gguf_arr_len(g, "tokenizer.ggml.tokens"); i++)
        if (!sl_gguf_arr_str(g, "tokenizer.ggml.tokens", i, &s) && s.n) sink = (uint8_t)(sink + (uint8_t)s.s[s.n - 1]);
    if (!sl_families_gguf(&spec, g, 0, &err)) {
        int w[16];
        sl_spec_widths(&spec, 0, 16, w);
        if (sl_spec_rope_dim(&spec) <= 4096) {
            float *table = malloc(sizeof *table * (size_t)sl_spec_rope_dim(&spec) * 2);
            if (table) sl_spec_rope_table(&spec, 0, 2, table, &err);
            free(table);
        }
        sl_spec_free(&spec);
    }
    sl_gguf_close(g);
    return 0;
}
