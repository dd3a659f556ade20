/* A config.json and a --layers text from anybody. */
#include "stages/compute/spec.h"
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static sl_spec spec;
    sl_err err = {0};
    int w[64];
    if (!sl_spec_parse_config(&spec, (const char *)data, n, "config.json", 0, &err)) {
        sl_spec_widths(&spec, 0, 64, w);
        sl_spec_free(&spec);
    }
    char text[64];
    uint32_t h[32];
    size_t m = n < 63 ? n : 63;
    memcpy(text, data, m);
    text[m] = 0;
    sl_spec_layers(text, n ? data[0] + 1 : 1, h, 32, &err);
    return 0;
}
