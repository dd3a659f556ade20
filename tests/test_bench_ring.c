/* bench_ring: a small run moves everything and gives figures that can be true. */
#include "ipc/bench_ring.h"
#include <stdbool.h>
#include <stdio.h>

int main(void) {
    sl_bench_ring_opts o = {.messages = 20000, .pings = 300, .payload_size = 65536, .payload_bytes = 16 << 20},
                       bad = {.payload_size = 5};
    sl_bench_ring_result r;
    sl_err e = {0};
    if (sl_bench_ring(&bad, &r, &e) != SL_EUSAGE) return printf("a payload of 5 bytes was taken\n"), 1;
    if (sl_bench_ring(&o, &r, &e)) return printf("%s\n", e.msg), 1;
    printf("%.2f M messages/s, p50 %.1f us, p99 %.1f us, zero-copy %.2f GB/s, memcpy %.2f GB/s\n",
           r.messages_per_s / 1e6, r.latency_p50_us, r.latency_p99_us, r.zero_copy_gb_s, r.memcpy_gb_s);
    bool sane = r.messages_per_s > 1000 && r.latency_p50_us > 0 && r.latency_p99_us >= r.latency_p50_us &&
                r.zero_copy_gb_s > 0 && r.memcpy_gb_s > 0 && r.payload_bytes >= 16u << 20;
    return !sane;
}
