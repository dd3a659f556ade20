/* crc32c: the twins behind sl_crc32c (ipc/journal.h), for the test that compares them. */
#ifndef SL_IPC_CRC32C_H
#define SL_IPC_CRC32C_H
#include <stdint.h>
uint32_t sl_crc32c_table(uint32_t crc, const void *data, uint64_t n);
#if defined(__x86_64__)
uint32_t sl_crc32c_sse42(uint32_t crc, const void *data, uint64_t n); /* needs SSE4.2 */
#endif
#endif
