/* bench_ring: what a ring costs between two processes, woken by doorbells, on this machine. The caller prints the
 * result as one JSON object (`sluice bench ring`). */
#ifndef SL_IPC_BENCH_RING_H
#define SL_IPC_BENCH_RING_H
#include "ipc/err.h"
#include <stdint.h>

typedef struct sl_bench_ring_opts { /* 0: the default in brackets */
    uint64_t messages;              /* descriptors of the rate run [2,000,000] */
    uint64_t depth;                 /* of the ring, a power of two [4096] */
    uint32_t burst;                 /* descriptors published with one store and one ring of the bell [64] */
    uint64_t pings;                 /* single descriptors of the latency run, one in flight [20,000] */
    uint64_t payload_size;          /* bytes a payload slot, multiple of 4096 [1 MiB] */
    uint64_t payload_bytes;         /* moved in each payload run [2 GiB] */
} sl_bench_ring_opts;

typedef struct sl_bench_ring_result {
    double messages_per_s; /* published, seen and released, bursts of `burst` */
    double latency_p50_us; /* from publish to the consumer's look, the consumer asleep in poll before */
    double latency_p99_us;
    /* The producer's process fills payload slots in place; the consumer's checksums them in place (sl_sum64) ... */
    double zero_copy_gb_s;
    /* ... or copies each out of the ring first and checksums the copy, as a pipe or socket would make it do. */
    double memcpy_gb_s;
    uint64_t messages, pings, payload_bytes; /* what was really moved */
    uint32_t burst;
    uint64_t depth, payload_size;
} sl_bench_ring_result;

/* Forks a consumer. Takes seconds. SL_EUSAGE (shape), SL_ETEMP (memory, fork), SL_EINTERNAL (an item was wrong). */
int sl_bench_ring(const sl_bench_ring_opts *o, sl_bench_ring_result *out, sl_err *err);
#endif
