/* sluice bench store, sluice bench codec. */
#include "tools/bench_store.h"
#include "tools/cli.h"
#include "stages/writer/bench.h"
#include "stages/writer/codec.h"
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

static struct {
    const char *dir, *input, *lengths, *layout, *codec;
    uint64_t bytes, shard, threads, width, states, length, commit_mb, level, repeat;
    bool no_direct, plain, small_pages, verify, keep;
    uint64_t verify_threads;
} o = {.dir = ".",
       .layout = "shards",
       .codec = "none",
       .bytes = 4ull << 30,
       .shard = 4ull << 30,
       .threads = 1,
       .width = 4096,
       .states = 4,
       .length = 2048,
       .commit_mb = 256,
       .level = 1,
       .repeat = 3};

static const sl_cli_opt store_opts[] = {
    {"dir", 'd', SL_CLI_STR, "DIR", "write there (removed afterwards); default the current folder", &o.dir},
    {"bytes", 'b', SL_CLI_SIZE, "SIZE", "states to write; default 4GiB", &o.bytes, .min = 1 << 20, .max = 1e15},
    {"layout", 0, SL_CLI_CHOICE, "shards|files", "default shards", &o.layout},
    {"codec", 'c', SL_CLI_CHOICE, "none|zstd|bf16", "default none", &o.codec},
    {"zstd-level", 0, SL_CLI_U64, "N", "1..19, default 1", &o.level, .min = 1, .max = 19},
    {"threads", 't', SL_CLI_U64, "N", "compression threads; default 1", &o.threads, .min = 1, .max = 64},
    {"width", 0, SL_CLI_U64, "H", "elements a token and state; default 4096", &o.width, .min = 1, .max = 1 << 20},
    {"states", 0, SL_CLI_U64, "K", "states a token; default 4", &o.states, .min = 1, .max = SL_MAX_CAPTURES},
    {"length", 0, SL_CLI_U64, "T", "tokens a row; default 2048", &o.length, .min = 1, .max = 1 << 22},
    {"commit-mb", 0, SL_CLI_U64, "N", "states a group commit; default 256", &o.commit_mb, .min = 1, .max = 1 << 20},
    {"shard-size", 0, SL_CLI_SIZE, "SIZE", "default 4GiB", &o.shard, .min = 1 << 20, .max = 1e15},
    {"input", 'i', SL_CLI_STR, "FILE", "raw bf16 states [tokens, width]; default: made", &o.input},
    {"no-direct", 0, SL_CLI_FLAG, NULL, "through the page cache instead of O_DIRECT", &o.no_direct},
    {"verify", 0, SL_CLI_FLAG, NULL, "read everything back, as 'sluice verify --deep' does", &o.verify},
    {"verify-threads", 0, SL_CLI_U64, "N", "threads of that; default as there", &o.verify_threads, .min = 1, .max = 64},
    {"keep", 0, SL_CLI_FLAG, NULL, "leave the store where it was written", &o.keep},
    {"small-pages", 0, SL_CLI_FLAG, NULL, "the states lie in ordinary pages, as rings do without a pool of huge ones",
     &o.small_pages},
    {"plain", 0, SL_CLI_FLAG, NULL, "pwrite instead of io_uring", &o.plain},
    {0}};
static const sl_cli store_cli = {
    "sluice bench store",
    "",
    "writer throughput, commits included",
    "Writes rows through the writer's own code: checksums, compression, io_uring, fdatasync, commit records, sealing. "
    "tests/bench/fio_ratio.sh puts fio beside it.",
    "sluice bench store --dir /data --bytes 8GiB\nsluice bench store --codec bf16 --threads 4",
    store_opts,
    0,
    0};

static const sl_cli_opt codec_opts[] = {
    {"bytes", 'b', SL_CLI_SIZE, "SIZE", "states to compress; default 256MiB", &o.bytes, .min = 1 << 20, .max = 1e12},
    {"width", 0, SL_CLI_U64, "H", "elements a token; default 4096", &o.width, .min = 1, .max = 1 << 20},
    {"input", 'i', SL_CLI_STR, "FILE", "raw bf16 states [tokens, width]; default: made", &o.input},
    {"lengths", 0, SL_CLI_STR, "FILE", "token counts of the rows in the input; blocks end there", &o.lengths},
    {"repeat", 0, SL_CLI_U64, "N", "best of N; default 3", &o.repeat, .min = 1, .max = 100},
    {0}};
static const sl_cli codec_cli = {
    "sluice bench codec",
    "",
    "compression ratio and speed of one thread, beside zstd",
    "Encodes and decodes blocks of bf16 states on one thread and prints ratio and GB of raw states a second.",
    "sluice bench codec --input h18.bf16 --width 576",
    codec_opts,
    0,
    0};

static int print(json_t *j) {
    char *t = json_dumps(j, JSON_INDENT(2) | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(6));
    if (t) puts(t);
    free(t);
    json_decref(j);
    return t ? 0 : 70;
}

int sl_bench_cmd_store(int argc, char **argv) {
    int n = 0, rc = sl_cli_parse(&store_cli, argc, argv, &n);
    if (rc != SL_CLI_GO) return rc;
    sl_err err = {0};
    sl_bench_store_result r;
    sl_bench_store_opts b = {.dir = o.dir,
                             .input = o.input,
                             .bytes = o.bytes,
                             .shard_bytes = o.shard,
                             .layout = strcmp(o.layout, "files") ? SL_LAYOUT_SHARDS : SL_LAYOUT_FILES,
                             .threads = (uint32_t)o.threads,
                             .width = (uint32_t)o.width,
                             .n_states = (uint32_t)o.states,
                             .length = (uint32_t)o.length,
                             .commit_mb = (uint32_t)o.commit_mb,
                             .zstd_level = (uint32_t)o.level,
                             .direct = !o.no_direct,
                             .plain = o.plain,
                             .small_pages = o.small_pages,
                             .verify = o.verify,
                             .keep = o.keep,
                             .verify_threads = (unsigned)o.verify_threads};
    sl_codec_parse(o.codec, &b.codec);
    if (sl_bench_store(&r, &b, &err)) return sl_cli_fail(&err);
    json_t *j = json_pack("{s:s,s:s,s:s,s:b,s:s,s:I,s:I,s:I,s:I,s:f,s:f,s:f,s:f,s:f,s:f,s:f}", "bench", "store",
                          "layout", o.layout, "codec", o.codec, "direct", (int)b.direct, "pages",
                          r.huge ? "huge" : "small", "threads", (json_int_t)o.threads, "rows", (json_int_t)r.rows,
                          "raw_bytes", (json_int_t)r.raw_bytes, "stored_bytes", (json_int_t)r.stored_bytes, "seconds",
                          r.seconds, "gb_s", r.gb_s, "stored_gb_s", r.stored_gb_s, "ratio", r.ratio, "cpu_s_per_gb",
                          r.cpu_per_gb, "cores_used", r.cpu_seconds / r.seconds, "sync_s", r.sync_seconds);
    if (o.verify)
        json_object_set_new(j, "verify",
                            json_pack("{s:f,s:f,s:f,s:f}", "seconds", r.verify_seconds, "gb_s", r.verify_gb_s,
                                      "stored_gb_s", r.verify_read_gb_s, "cpu_s_per_gb",
                                      r.verify_cpu_seconds / ((double)r.raw_bytes / 1e9)));
    return print(j);
}

int sl_bench_cmd_codec(int argc, char **argv) {
    o.bytes = 256ull << 20;
    int n = 0, rc = sl_cli_parse(&codec_cli, argc, argv, &n);
    if (rc != SL_CLI_GO) return rc;
    sl_err err = {0};
    sl_bench_codec_result r[SL_BENCH_CODECS];
    if (sl_bench_codec(r, o.input, o.lengths, o.bytes, (uint32_t)o.width, (unsigned)o.repeat, &err))
        return sl_cli_fail(&err);
    json_t *list = json_array();
    for (int i = 0; i < SL_BENCH_CODECS; i++)
        json_array_append_new(list, json_pack("{s:s,s:f,s:f,s:f}", "codec", r[i].name, "ratio", r[i].ratio,
                                              "encode_gb_s", r[i].encode_gb_s, "decode_gb_s", r[i].decode_gb_s));
    return print(json_pack("{s:s,s:s,s:I,s:o}", "bench", "codec", "states", o.input ? o.input : "made", "width",
                           (json_int_t)o.width, "codecs", list));
}
