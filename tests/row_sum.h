/* The row sum by its definition (ipc/sum64.h), in plain loops: what the tests compare with. */
#ifndef SL_TESTS_ROW_SUM_H
#define SL_TESTS_ROW_SUM_H
#include <stdint.h>

/* state[k]: the T states of capture k, `bytes` each, one behind the other. */
static inline uint64_t plain_row_sum(const uint8_t *const *state, uint32_t K, uint32_t T, uint64_t bytes) {
    uint64_t h = 0;
    for (uint32_t k = 0; k < K; k++) {
        uint64_t a = 0, b = 0, n = 0, total = T * bytes;
        for (uint32_t t = 0; t < T; t++)
            for (uint64_t i = 0; i < bytes; i += 4) {
                uint64_t w = 0;
                for (uint64_t j = i; j < bytes && j < i + 4; j++) w |= (uint64_t)state[k][t * bytes + j] << 8 * (j - i);
                a += w;
                b += ++n * w;
            }
        h ^= b ^ (a << 32 | a >> 32) ^ total * 0x9e3779b97f4a7c15ull;
        h *= 0xff51afd7ed558ccdull;
        h ^= h >> 32;
    }
    return h;
}
#endif
