/* sluice bench ring: what a shared-memory ring costs between two processes. */
#include "tools/bench_ring.h"
#include "ipc/bench_ring.h"
#include "tools/cli.h"
#include <jansson.h>
#include <stdio.h>

static sl_bench_ring_opts o;
static uint64_t burst;

static const sl_cli_opt opts[] = {
    {"messages", 0, SL_CLI_U64, "N", "descriptors of the rate run (default 2000000)", &o.messages, .min = 1,
     .max = 1e10},
    {"depth", 0, SL_CLI_U64, "N", "descriptors the ring holds, a power of two (default 4096)", &o.depth, .min = 2,
     .max = 16777216},
    {"burst", 0, SL_CLI_U64, "N", "descriptors published with one store and one ring of the bell (default 64)", &burst,
     .min = 1, .max = 4096},
    {"pings", 0, SL_CLI_U64, "N", "single descriptors of the latency run (default 20000)", &o.pings, .min = 1,
     .max = 1e8},
    {"payload-size", 0, SL_CLI_SIZE, "SIZE", "a payload slot, a multiple of 4096 (default 1MiB)", &o.payload_size},
    {"payload-bytes", 0, SL_CLI_SIZE, "SIZE", "moved in each payload run (default 2GiB)", &o.payload_bytes},
    {0}};

static const sl_cli cli = {
    "sluice bench ring",
    "",
    "a ring between two processes: messages a second, latency, payload GB/s",
    "A producer and a consumer process, woken by doorbells as the stages are. Payload is measured twice: summed in "
    "place, as gather does, and copied out of the ring first and then summed, as a pipe would make it.",
    "  sluice bench ring --burst 1",
    opts,
    0,
    0};

int sl_bench_cmd_ring(int argc, char **argv) {
    int n = 0, rc = sl_cli_parse(&cli, argc, argv, &n);
    if (rc != SL_CLI_GO) return rc;
    sl_err err = {0};
    sl_bench_ring_result r;
    o.burst = (uint32_t)burst;
    if (sl_bench_ring(&o, &r, &err)) return sl_cli_fail(&err);
    json_t *j =
        json_pack("{s:s, s:f, s:f, s:f, s:f, s:f, s:f, s:I, s:I, s:I, s:I, s:I}", "bench", "ring", "messages_per_s",
                  r.messages_per_s, "latency_p50_us", r.latency_p50_us, "latency_p99_us", r.latency_p99_us,
                  "zero_copy_gb_s", r.zero_copy_gb_s, "memcpy_gb_s", r.memcpy_gb_s, "zero_copy_over_memcpy",
                  r.memcpy_gb_s > 0 ? r.zero_copy_gb_s / r.memcpy_gb_s : 0.0, "messages", (json_int_t)r.messages,
                  "burst", (json_int_t)r.burst, "pings", (json_int_t)r.pings, "payload_size",
                  (json_int_t)r.payload_size, "payload_bytes", (json_int_t)r.payload_bytes);
    json_dumpf(j, stdout, JSON_REAL_PRECISION(6));
    putchar('\n');
    json_decref(j);
    return 0;
}
