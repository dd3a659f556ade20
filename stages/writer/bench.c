#include "stages/writer/bench.h"
#include "ipc/flow.h"
#include "ipc/store.h"
#include "ipc/sum64.h"
#include "stages/writer/codec.h"
#include "stages/writer/sink.h"
#include "stages/writer/verify.h"
#include "stages/writer/xxh3.h"
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static uint64_t rnd_state = 88172645463325252ull;
static uint64_t rnd(void) {
    rnd_state ^= rnd_state << 13;
    rnd_state ^= rnd_state >> 7;
    return rnd_state ^= rnd_state << 17;
}

static float gauss(void) { /* sum of twelve uniforms less six, a little short in the tails */
    float s = -6;
    for (int i = 0; i < 3; i++) {
        uint64_t x = rnd();
        for (int j = 0; j < 4; j++) s += (float)(x >> 16 * j & 0xffff) / 65536.f;
    }
    return s;
}

static uint16_t to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static int make_states(uint16_t *x, uint64_t n, uint32_t width, sl_err *err) {
    float *scale = malloc(width * sizeof *scale), *mean = malloc(width * sizeof *mean);
    if (!scale || !mean) {
        free(scale);
        free(mean);
        return sl_err_set(err, SL_ETEMP, "no memory");
    }
    for (uint32_t c = 0; c < width; c++) {
        scale[c] = 0.05f * expf(0.7f * gauss()) * (rnd() % 500 ? 1.f : 30.f);
        mean[c] = 0.3f * scale[c] * gauss();
    }
    for (uint64_t t = 0; width && t < n / width; t++) {
        float token = expf(0.2f * gauss());
        for (uint32_t c = 0; c < width; c++) {
            float tail = 0;
            for (int i = 0; i < 2; i++) {
                float g = gauss();
                tail += g * g;
            }
            x[t * width + c] = to_bf16(token * (mean[c] + scale[c] * gauss() / sqrtf(0.3f + 0.35f * tail)));
        }
    }
    free(scale);
    free(mean);
    return 0;
}

/* Memory full of states: from the file, repeated as often as it takes, or made. */
static int fill_states(uint16_t *x, uint64_t bytes, const char *input, uint32_t width, sl_err *err) {
    if (!input) return make_states(x, bytes / 2, width, err);
    int fd = open(input, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return sl_err_sys(err, SL_EUSAGE, errno, "cannot read %s", input);
    uint64_t at = 0;
    for (bool any = true; at < bytes;) {
        ssize_t r = read(fd, (char *)x + at, bytes - at);
        if (r < 0 && errno == EINTR) continue;
        if (r < 0 || (!r && !any)) {
            int e = errno;
            close(fd);
            return r < 0 ? sl_err_sys(err, SL_EUSAGE, e, "cannot read %s", input)
                         : sl_err_set(err, SL_EUSAGE, "%s is empty", input);
        }
        any = r > 0;
        if (!r) lseek(fd, 0, SEEK_SET);
        at += (uint64_t)r;
    }
    close(fd);
    return 0;
}

/* Memory as the writer finds it in a ring, to be read only: a memfd, on huge pages where there are any (the pool's,
 * else transparent ones) and they are wanted. */
static void *get_memory(uint64_t bytes, bool *huge) {
    int fd = *huge ? memfd_create("states", MFD_CLOEXEC | MFD_HUGETLB | MFD_HUGE_2MB) : -1;
    void *x = MAP_FAILED;
    if (fd >= 0 && !ftruncate(fd, (off_t)bytes)) x = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0) close(fd);
    if (x != MAP_FAILED) return x;
    if (*huge) {
        x = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (x == MAP_FAILED || !madvise(x, bytes, MADV_HUGEPAGE)) return x;
        munmap(x, bytes);
        *huge = false;
    }
    fd = memfd_create("states", MFD_CLOEXEC);
    x = fd < 0 || ftruncate(fd, (off_t)bytes) ? MAP_FAILED
                                              : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0) close(fd);
    return x;
}

static int get_states(uint16_t **out, uint64_t bytes, bool *huge, const char *input, uint32_t width, sl_err *err) {
    void *x = get_memory(bytes, huge);
    if (x == MAP_FAILED)
        return sl_err_set(err, SL_ETEMP, "no memory for %llu bytes of states", (unsigned long long)bytes);
    *out = x;
    int rc = fill_states(x, bytes, input, width, err);
    if (!rc && mprotect(x, bytes, PROT_READ)) rc = sl_err_sys(err, SL_ETEMP, errno, "mprotect");
    return rc;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double cpu(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + 1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

static int remove_one(const char *p, const struct stat *st, int flag, struct FTW *f) {
    (void)st, (void)flag, (void)f;
    return remove(p);
}

/* The sum of each window's states, which gather would have made. */
static uint64_t *sum_windows(const uint16_t *x, uint64_t mem, uint64_t row_bytes) {
    uint64_t *sums = malloc(mem / row_bytes * sizeof *sums);
    for (uint64_t i = 0; sums && i < mem / row_bytes; i++)
        sums[i] = sl_sum64((const char *)x + i * row_bytes, row_bytes);
    return sums;
}

/* Rows out of a window that moves over the memory, so that caches don't help. */
static int run_rows(sl_sink *s, const sl_bench_store_opts *o, const uint16_t *x, const uint64_t *sums, uint64_t mem,
                    sl_bench_store_result *r, sl_err *err) {
    uint64_t row_bytes = (uint64_t)o->length * o->width * 2, at = 0, chunk = (8ull << 20) / (o->width * 2ull);
    sl_piece *pc = malloc((uint64_t)o->n_states * (o->length / chunk + 1) * sizeof *pc);
    uint32_t *first = malloc((o->n_states + 1) * sizeof *first);
    int32_t *ids = calloc(o->length, sizeof *ids);
    uint8_t *mask = calloc(o->length, 1);
    int rc = pc && first && ids && mask ? 0 : sl_err_set(err, SL_ETEMP, "no memory");
    for (uint64_t seq = 0; !rc && r->raw_bytes < o->bytes; seq++) {
        uint32_t n = 0;
        uint64_t sum = 0;
        for (uint32_t k = 0; k < o->n_states; k++) {
            if (at + row_bytes > mem) at = 0;
            sum = sl_sum_chain(sum, sums[at / row_bytes]);
            first[k] = n;
            for (uint32_t t = 0; t < o->length; t += (uint32_t)chunk) {
                uint32_t rows = o->length - t < chunk ? o->length - t : (uint32_t)chunk;
                pc[n++] = (sl_piece){(const char *)x + at + (uint64_t)t * o->width * 2, t, rows};
            }
            at += row_bytes;
        }
        first[o->n_states] = n;
        sl_row_in in = {.seq = seq,
                        .row = seq,
                        .T = o->length,
                        .epoch = 1,
                        .key = sl_row_key("bench", seq, 0),
                        .id = "",
                        .name = "bench",
                        .ids = ids,
                        .mask = mask,
                        .nll = NAN,
                        .fault_k = 0xffff,
                        .fault_token = UINT32_MAX,
                        .summed = o->width % 2 == 0, /* else a state is no range of whole words */
                        .sum = sum,
                        .pieces = pc,
                        .first = first};
        rc = sl_sink_row(s, &in, err);
        r->raw_bytes += row_bytes * o->n_states;
        r->rows++;
        if (!rc && sl_sink_open_bytes(s) >= (uint64_t)o->commit_mb << 20) rc = sl_sink_close_group(s, err);
        if (!rc) rc = sl_sink_poll(s, false, err);
    }
    if (!rc) rc = sl_sink_finish(s, err);
    free(pc);
    free(first);
    free(ids);
    free(mask);
    return rc;
}

/* The logs of rows that were accepted: what verify compares the store with. */
static int write_intake(const char *store, const sl_bench_store_opts *o, sl_err *err) {
    char path[SL_PATH_MAX + 32];
    uint64_t row = (uint64_t)o->length * o->width * 2 * o->n_states, n = row ? (o->bytes + row - 1) / row : 0;
    sl_journal *j;
    mkdir(store, 0755);
    snprintf(path, sizeof path, "%s/intake.log", store);
    int rc = sl_journal_open(&j, path, SL_INTAKE_MAGIC, NULL, NULL, err);
    if (rc) return rc;
    snprintf(path, sizeof path, "%s/intake.dat", store);
    FILE *f = fopen(path, "w");
    uint8_t *zeros = calloc(o->length, 5);
    if (!f || !zeros) rc = sl_err_sys(err, SL_ETEMP, errno, "cannot write %s", path);
    sl_intake_rec h = {.kind = SL_IN_HEADER, .batch_tokens = o->length, .max_batch_rows = 1, .version = 1},
                  name = {.kind = SL_IN_DATASET, .data_len = 5, .data_sum = XXH3_64bits("bench", 5)};
    if (!rc) rc = sl_journal_append(j, &h, err);
    if (!rc) rc = sl_journal_append(j, &name, err);
    if (f) fwrite("bench\0\0\0", 1, 8, f);
    for (uint64_t i = 0; !rc && i < n; i++) {
        sl_intake_rec r = {.kind = SL_IN_ROW,
                           .seq = i,
                           .row = i,
                           .T = o->length,
                           .key = sl_row_key("bench", i, 0),
                           .data_off = (uint64_t)ftell(f),
                           .data_len = 5ull * o->length,
                           .data_sum = XXH3_64bits(zeros, 5ull * o->length)};
        fwrite(zeros, 5, o->length, f);
        while (ftell(f) % 8) fputc(0, f);
        rc = sl_journal_append(j, &r, err);
    }
    if (!rc) rc = sl_journal_sync(j, err);
    if (f && fclose(f) && !rc) rc = sl_err_sys(err, SL_ETEMP, errno, "cannot write %s", path);
    sl_journal_close(j);
    free(zeros);
    return rc;
}

static int read_back(sl_bench_store_result *out, const sl_bench_store_opts *o, const char *store, sl_err *err) {
    sl_verify_report rep;
    double t = now(), u = cpu();
    int rc = sl_store_verify(store, &(sl_verify_opts){.deep = true, .threads = o->verify_threads}, &rep, err);
    out->verify_seconds = now() - t;
    out->verify_cpu_seconds = cpu() - u;
    out->verify_gb_s = (double)out->raw_bytes / out->verify_seconds / 1e9;
    out->verify_read_gb_s = (double)out->stored_bytes / out->verify_seconds / 1e9;
    if (!rc && rep.n_faults) rc = sl_err_set(err, SL_EDATA, "%s", rep.faults[0]);
    sl_verify_free(&rep);
    return rc;
}

int sl_bench_store(sl_bench_store_result *out, const sl_bench_store_opts *o, sl_err *err) {
    char store[SL_PATH_MAX];
    sl_sink *s = NULL;
    uint16_t *x = NULL;
    uint64_t mem = 256ull << 20, row = (uint64_t)o->length * o->width * 2;
    while (mem < 2 * row) mem *= 2;
    memset(out, 0, sizeof *out);
    snprintf(store, sizeof store, "%s/sluice-bench-%d", o->dir, (int)getpid());
    sl_sink_cfg c = {.store = store,
                     .zstd_level = (int)o->zstd_level,
                     .threads = o->threads,
                     .shard_bytes = o->shard_bytes,
                     .direct = o->direct,
                     .plain = o->plain};
    c.manifest = (sl_manifest){
        .set = {.n = o->n_states, .width = o->width, .elem_size = 2, .n_layers = o->n_states, .model = "bench"},
        .vocab = 1,
        .layout = o->layout,
        .codec = o->codec};
    for (uint32_t k = 0; k < o->n_states; k++) c.manifest.set.v[k].hidx = k;
    out->huge = !o->small_pages;
    int rc = get_states(&x, mem, &out->huge, o->input, o->width, err);
    c.huge = out->huge;
    uint64_t *sums = rc ? NULL : sum_windows(x, mem, row);
    if (!rc && !sums) rc = sl_err_set(err, SL_ETEMP, "no memory");
    if (!rc && (o->verify || o->keep)) rc = write_intake(store, o, err);
    if (!rc) rc = sl_sink_open(&s, &c, err);
    double t = now(), u = cpu();
    if (!rc) rc = run_rows(s, o, x, sums, mem, out, err);
    if (!rc) {
        out->seconds = now() - t;
        out->cpu_seconds = cpu() - u;
        out->stored_bytes = sl_sink_stats(s)->stored_bytes;
        out->sync_seconds = (double)sl_sink_sync_ns(s) * 1e-9;
        out->tokens = out->rows * o->length;
        out->gb_s = (double)out->raw_bytes / out->seconds / 1e9;
        out->stored_gb_s = (double)out->stored_bytes / out->seconds / 1e9;
        out->ratio = (double)out->raw_bytes / (double)out->stored_bytes;
        out->cpu_per_gb = out->cpu_seconds / ((double)out->raw_bytes / 1e9);
    }
    sl_sink_close(s);
    if (!rc && o->verify) rc = read_back(out, o, store, err);
    if (!o->keep) nftw(store, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    if (x) munmap(x, mem);
    free(sums);
    return rc;
}

/* ---- codecs ---- */

static double thread_cpu(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef struct cut { /* one block of the input and what became of it */
    sl_block b;
    uint64_t at, enc, len; /* bytes into the states, into the encoded ones; encoded length */
    uint32_t used;
} cut;

/* Blocks as the store cuts them: whole ones, or rows of the given lengths cut at their ends and at whole blocks. */
static int cut_blocks(cut **out, uint64_t *n, uint64_t *enc_cap, const char *lengths, uint64_t bytes, uint32_t width,
                      sl_err *err) {
    uint64_t rb = 2ull * width, tokens = bytes / rb, cap = 0, at = 0, left = 0;
    uint32_t most = sl_store_block_rows(width, 2);
    FILE *f = lengths ? fopen(lengths, "r") : NULL;
    int rc = 0;
    if (lengths && !f) return sl_err_sys(err, SL_EUSAGE, errno, "cannot read %s", lengths);
    while (!rc && at < tokens) {
        unsigned long long v = tokens - at;
        // NOLINTNEXTLINE(cert-err34-c): a number too large is too large
        if (!left && f && (fscanf(f, "%llu", &v) != 1 || !v || v > tokens - at)) break;
        if (!left) left = v;
        uint32_t rows = left < most ? (uint32_t)left : most;
        cut *p = *n == cap ? realloc(*out, (cap = cap ? 2 * cap : 64) * sizeof *p) : *out;
        if (!p) rc = sl_err_set(err, SL_ETEMP, "no memory");
        if (rc) break;
        *out = p;
        p[*n] = (cut){.b = {rows, width, 2}, .at = at * rb, .enc = *enc_cap};
        *enc_cap += sl_codec_bound(p[(*n)++].b);
        at += rows;
        left -= rows;
    }
    if (f) fclose(f);
    if (!rc && !*n)
        rc = sl_err_set(err, SL_EUSAGE, "%llu bytes of width %u make no block", (unsigned long long)bytes, width);
    return rc;
}

static int run_codec(sl_bench_codec_result *out, uint32_t codec, int level, cut *c, uint64_t n, uint64_t step,
                     const uint8_t *x, uint8_t *enc, uint8_t *dec, unsigned repeat, sl_err *err) {
    sl_codec_ctx *ctx;
    double te = 1e9, td = 1e9;
    uint64_t raw = 0, sum = 0;
    int rc = sl_codec_ctx_new(&ctx, level, err);
    if (rc) return rc;
    for (unsigned r = 0; !rc && r < repeat; r++) {
        double t = thread_cpu();
        raw = sum = 0;
        for (uint64_t i = 0; !rc && i < n; i += step) {
            rc = sl_codec_encode(ctx, codec, c[i].b, x + c[i].at, enc + c[i].enc, sl_codec_bound(c[i].b), &c[i].len,
                                 &c[i].used, err);
            raw += sl_block_bytes(c[i].b);
            sum += c[i].len;
        }
        te = fmin(te, thread_cpu() - t);
        t = thread_cpu();
        for (uint64_t i = 0; !rc && i < n; i += step)
            rc = sl_codec_decode(ctx, c[i].used, c[i].b, enc + c[i].enc, c[i].len, dec, err);
        td = fmin(td, thread_cpu() - t);
    }
    for (uint64_t i = 0; !rc && i < n; i += step) {
        rc = sl_codec_decode(ctx, c[i].used, c[i].b, enc + c[i].enc, c[i].len, dec, err);
        if (!rc && memcmp(dec, x + c[i].at, sl_block_bytes(c[i].b)))
            rc = sl_err_set(err, SL_EINTERNAL, "codec %s did not give back what went in", out->name);
    }
    sl_codec_ctx_free(ctx);
    *out =
        (sl_bench_codec_result){out->name, (double)raw / (double)sum, (double)raw / te / 1e9, (double)raw / td / 1e9};
    return rc;
}

int sl_bench_codec(sl_bench_codec_result out[SL_BENCH_CODECS], const char *input, const char *lengths, uint64_t bytes,
                   uint32_t width, unsigned repeat, sl_err *err) {
    static const struct {
        const char *name;
        uint32_t codec;
        int level;
    } kinds[SL_BENCH_CODECS] = {
        {"bf16", SL_CODEC_BF16, 1}, {"zstd-1", SL_CODEC_ZSTD, 1}, {"zstd-19", SL_CODEC_ZSTD, 19}};
    cut *c = NULL;
    uint64_t n = 0, cap = 0;
    uint16_t *x = NULL;
    bool huge = false;
    int rc = cut_blocks(&c, &n, &cap, lengths, bytes, width, err);
    uint8_t *enc = rc ? NULL : malloc(cap), *dec = aligned_alloc(64, SL_BLOCK_BYTES);
    if (!rc) rc = enc && dec ? get_states(&x, bytes, &huge, input, width, err) : sl_err_set(err, SL_ETEMP, "no memory");
    if (!rc) memset(enc, 1, cap); /* pages are there before the clock runs */
    for (unsigned k = 0; !rc && k < SL_BENCH_CODECS; k++) {
        bool slow = kinds[k].level > 1; /* some blocks, evenly spread, tell enough */
        uint64_t use = 1 + (n ? (16ull << 20) * n / bytes : 0);
        out[k].name = kinds[k].name;
        rc = run_codec(&out[k], kinds[k].codec, kinds[k].level, c, n, slow && use && n > use ? n / use : 1,
                       (const uint8_t *)x, enc, dec, slow ? 1 : repeat, err);
    }
    if (x) munmap(x, bytes);
    free(c);
    free(enc);
    free(dec);
    return rc;
}
