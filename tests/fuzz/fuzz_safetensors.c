/* A safetensors file or an index from anybody (the first byte chooses). */
#include "stages/compute/safetensors.h"
#include <string.h>

static int each(void *arg, const char *name, const char *file, sl_err *err) {
    (void)err;
    *(size_t *)arg += strlen(name) + strlen(file);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    sl_st *s;
    sl_err err = {0};
    size_t sum = 0;
    if (n < 1) return 0;
    if (data[0] & 1) {
        sl_st_index_mem(data + 1, n - 1, "index", each, &sum, &err);
        return 0;
    }
    /* The size field is filled in, so that most inputs get past it. */
    uint8_t buf[65536];
    if (n < 12 || n > sizeof buf) return 0;
    memcpy(buf, data, n);
    uint64_t head = n - 9 - data[1] % 8;
    memcpy(buf + 1, &head, 8);
    if (!sl_st_open_mem(&s, buf + 1, n - 1, n - 1 + (uint64_t)data[9] * 64, &err)) {
        for (uint64_t i = 0; i < sl_st_n_tensors(s); i++) sum += strlen(sl_st_at(s, i)->name);
        sl_st_close(s);
    }
    return 0;
}
