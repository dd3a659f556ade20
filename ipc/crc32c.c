/* CRC32C (Castagnoli): the CPU's instruction where there is one, else a table; the twins are compared in a test. */
#include "ipc/crc32c.h"
#include "ipc/journal.h"
#include <pthread.h>
#include <string.h>

static uint32_t table[256];
static pthread_once_t table_once = PTHREAD_ONCE_INIT;

static void table_make(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int k = 0; k < 8; k++) c = c & 1 ? c >> 1 ^ 0x82f63b78u : c >> 1;
        table[i] = c;
    }
}

uint32_t sl_crc32c_table(uint32_t crc, const void *data, uint64_t n) {
    pthread_once(&table_once, table_make);
    const uint8_t *p = data;
    crc = ~crc;
    while (n--) crc = crc >> 8 ^ table[(crc ^ *p++) & 0xff];
    return ~crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t sl_crc32c_sse42(uint32_t crc, const void *data, uint64_t n) {
    const uint8_t *p = data;
    uint64_t c = ~crc;
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t v;
        memcpy(&v, p, 8);
        c = __builtin_ia32_crc32di(c, v);
    }
    uint32_t s = (uint32_t)c;
    while (n--) s = __builtin_ia32_crc32qi(s, *p++);
    return ~s;
}
#endif

uint32_t sl_crc32c(uint32_t crc, const void *data, uint64_t n) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2")) return sl_crc32c_sse42(crc, data, n);
#endif
    return sl_crc32c_table(crc, data, n);
}
