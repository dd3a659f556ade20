/* A boot block with bytes changed: the input is a list of (offset, value) patches on a good block, 3 bytes each. What
 * is accepted must hold what stages rely on. */
#include "ipc/boot.h"
#include "tests/boot_example.h"
#include <stdlib.h>

static void require(bool ok) {
    if (!ok) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static sl_boot b;
    boot_example(&b, size && data[0] & 1 ? 1 : 3, size && data[0] & 2 ? 2 : 5);
    uint8_t *raw = (uint8_t *)&b;
    /* Offsets are 16 bits and the block is larger: the first byte also picks the stretch. */
    size_t base = size ? (size_t)(data[0] >> 2) * (sizeof b / 64) : 0;
    for (size_t i = 1; i + 3 <= size; i += 3) raw[(base + (data[i] | data[i + 1] << 8)) % sizeof b] = data[i + 2];
    sl_err e;
    if (sl_boot_check(&b, &e)) {
        require(e.code == SL_EINTERNAL && strlen(e.msg) < sizeof e.msg);
        return 0;
    }
    require(b.dp >= 1 && b.tp >= 1 && b.dp * b.tp <= SL_MAX_RANKS && b.n_procs <= SL_MAX_PROCS);
    require(b.n_captures >= 1 && b.n_captures <= SL_MAX_CAPTURES && b.chunk_rows && b.width);
    for (uint32_t k = 0; k < b.n_captures; k++) require(b.captures[k].hidx <= b.n_layers);
    for (uint32_t i = 0; i < b.n_procs; i++) require(b.procs[i].role < SL_ROLE_N && strlen(b.procs[i].name) < 32);
    require(strlen(b.store) < sizeof b.store && strlen(b.model) < sizeof b.model);
    require(strlen(b.crash_points) < sizeof b.crash_points);
    return 0;
}
