/* bench: how fast the store is on this machine, through the same code as the writer process.
 *
 * store: rows of `length` tokens are handed to a sink from memory until `bytes` of states are written and committed, in
 * groups of commit_mb: compression, checksums, io_uring writes, fdatasync and commit records are all in the time, as is
 * the sealing of shards. codec: one thread encodes and decodes blocks, beside zstd -1 and -19 on the same bytes.
 *
 * The states are made (per-channel scale and mean, Student-t tails, the outlier channels of a residual stream) or read
 * from a file of raw little-endian elements, [tokens, width] a state. */
#ifndef SL_WRITER_BENCH_H
#define SL_WRITER_BENCH_H
#include "ipc/boot.h"

typedef struct sl_bench_store_opts {
    const char *dir;   /* a store is made in it and removed */
    const char *input; /* raw states, or NULL: made */
    uint64_t bytes, shard_bytes;
    bool verify;             /* read it all back, as `sluice verify --deep` does */
    bool keep;               /* leave the store in dir/sluice-bench-<pid> */
    unsigned verify_threads; /* 0: its default */
    uint32_t layout, codec, threads, width, n_states, length, commit_mb, zstd_level;
    bool direct, plain,
        small_pages; /* small_pages: the states lie in ordinary pages even where huge ones are to be had */
} sl_bench_store_opts;

typedef struct sl_bench_store_result {
    double seconds, cpu_seconds, sync_seconds; /* sync: waits for fdatasync and commit.log, not all of it exclusive */
    uint64_t raw_bytes, stored_bytes, rows, tokens;
    bool huge; /* the states lay in huge pages */
    double gb_s, stored_gb_s, ratio, cpu_per_gb;
    double verify_seconds, verify_cpu_seconds, verify_gb_s; /* GB of states a second */
    double verify_read_gb_s;                                /* GB of the file a second */
} sl_bench_store_result;

/* SL_ETEMP: no room or memory; SL_EDATA: verify found a fault in what was just written; errors of the sink pass
 * through. */
int sl_bench_store(sl_bench_store_result *out, const sl_bench_store_opts *o, sl_err *err);

typedef struct sl_bench_codec_result {
    const char *name;
    double ratio, encode_gb_s,
        decode_gb_s; /* GB of raw states a second of one thread's processor time; best of the repeats */
} sl_bench_codec_result;
enum { SL_BENCH_CODECS = 3 }; /* bf16, zstd -1, zstd -19 */
/* elem_size 2; input as above. lengths: a file of token counts, one a row and state, whose ends blocks do not cross;
 * NULL: whole blocks. */
int sl_bench_codec(sl_bench_codec_result out[SL_BENCH_CODECS], const char *input, const char *lengths, uint64_t bytes,
                   uint32_t width, unsigned repeat, sl_err *err);
#endif
