#include "daemon/preflight.h"
#include "daemon/gpus.h"
#include "ipc/file.h"
#include "ipc/store.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#define MIB (1ull << 20)

/* ---- memory that is there ---- */

static uint64_t read_number(const char *path) { /* first number of a file; 0 when absent or "max" */
    char buf[64] = "";
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t n = read(fd, buf, sizeof buf - 1);
    close(fd);
    return n > 0 ? strtoull(buf, NULL, 10) : 0;
}

/* Sum of the numbers behind one or two words at line starts; 0 when there are none. */
static uint64_t read_named(const char *path, const char *a, const char *b) {
    char line[256];
    uint64_t sum = 0;
    FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f)) {
        size_t n = strcspn(line, ": ");
        if ((n == strlen(a) && !memcmp(line, a, n)) || (b && n == strlen(b) && !memcmp(line, b, n)))
            sum += strtoull(line + n + 1, NULL, 10);
    }
    if (f) fclose(f);
    return sum;
}

/* What is used in a control group and cannot be taken back: pages of files count there until somebody needs the memory,
 * so a group that has read or written for a while always seems to be full. */
static uint64_t group_used(const char *group) {
    char path[1300];
    snprintf(path, sizeof path, "%s/memory.current", group);
    uint64_t used = read_number(path);
    snprintf(path, sizeof path, "%s/memory.stat", group);
    uint64_t cache = read_named(path, "active_file", "inactive_file");
    return used > cache ? used - cache : 0;
}

/* The least of the machine's memory and every limit on the way to our control group: what is there at all, and what of
 * it is not in use. */
static uint64_t memory(bool at_all) {
    uint64_t least = 1024 * read_named("/proc/meminfo", at_all ? "MemTotal" : "MemAvailable", NULL);
    char line[1024], path[1200] = "", group[1240], max[1300];
    FILE *f = fopen("/proc/self/cgroup", "re");
    while (f && fgets(line, sizeof line, f))
        if (!strncmp(line, "0::/", 4)) line[strcspn(line, "\n")] = 0, snprintf(path, sizeof path, "%s", line + 3);
    if (f) fclose(f);
    while (*path) { /* every ancestor may have a limit */
        snprintf(group, sizeof group, "/sys/fs/cgroup%s", path);
        snprintf(max, sizeof max, "%s/memory.max", group);
        uint64_t m = read_number(max), u = m && !at_all ? group_used(group) : 0;
        if (m && (m > u ? m - u : 1) < least) least = m > u ? m - u : 1;
        *strrchr(path, '/') = 0;
    }
    return least;
}

uint64_t sl_memory_available(void) {
    return memory(false);
}

/* ---- resolve ---- */

static void note(sl_preflight *p, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void note(sl_preflight *p, const char *fmt, ...) {
    size_t n = strlen(p->notes);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(p->notes + n, sizeof p->notes - n, fmt, ap);
    va_end(ap);
    n = strlen(p->notes);
    if (n + 1 < sizeof p->notes) p->notes[n] = '\n', p->notes[n + 1] = 0;
}

static int resolve_backend(sl_preflight *p, sl_config *c, sl_err *err) {
#ifdef SL_HAVE_CUDA
    const bool built = true;
#else
    const bool built = false;
#endif
    bool gpu = !access("/dev/nvidiactl", R_OK | W_OK);
    if (c->backend == SL_BACKEND_CUDA && !built)
        return sl_err_set(err, SL_ECONFIG,
                          "[model] backend = cuda: this build has no CUDA backend (built without nvcc)");
    c->boot.backend = c->backend == SL_BACKEND_AUTO ? (built && gpu ? SL_BACKEND_CUDA : SL_BACKEND_CPU) : c->backend;
    if (c->backend == SL_BACKEND_AUTO && c->boot.backend == SL_BACKEND_CPU)
        note(p, "backend auto: cpu (%s)", built ? "no usable /dev/nvidiactl" : "built without CUDA");
    p->on_host = c->boot.backend == SL_BACKEND_CPU;
    return SL_OK;
}

static int resolve_captures(sl_config *c, const sl_spec *s, sl_err *err) {
    sl_boot *b = &c->boot;
    uint32_t h[SL_MAX_CAPTURES];
    int n = sl_spec_layers(c->layers, s->n_layers, h, SL_MAX_CAPTURES - 1, err);
    if (n < 0) {
        sl_err_wrap(err, "[capture] layers = %s", c->layers);
        if (err) err->code = SL_ECONFIG;
        return SL_ECONFIG;
    }
    bool last = n > 0 && h[n - 1] == (uint32_t)s->n_layers;
    if (c->final != SL_FINAL_PRE && !last)
        return sl_err_set(err, SL_ECONFIG, "[capture] final = %s needs the last state H[%d] among layers = %s",
                          c->final == SL_FINAL_POST ? "post" : "both", s->n_layers, c->layers);
    for (int i = 0; i < n; i++) b->captures[i] = (sl_capture){.hidx = h[i]};
    if (c->final == SL_FINAL_POST) b->captures[n - 1].final_norm = 1;
    if (c->final == SL_FINAL_BOTH) b->captures[n++] = (sl_capture){.hidx = (uint32_t)s->n_layers, .final_norm = 1};
    b->n_captures = (uint32_t)n;
    return SL_OK;
}

static int rank_plan(sl_preflight *p, const sl_config *c, int tp, sl_err *err) {
    const sl_boot *b = &c->boot;
    const sl_spec *s = p->spec;
    uint32_t top = 0;
    for (uint32_t i = 0; i < b->n_captures; i++)
        if (b->captures[i].hidx > top) top = b->captures[i].hidx;
    if (b->nll_every) top = (uint32_t)s->n_layers; /* the head reads H[n] */
    sl_load_opts o = {.model = b->model,
                      .tp = tp,
                      .expert_split = (int)b->expert_split,
                      .top_layer = (int)top,
                      .want_head = b->nll_every != 0,
                      .random = (int)b->random_weights,
                      .seed = b->random_seed,
                      .random_format = -1,
                      .eps_lora = b->norm_eps_lora};
    int rc = sl_model_plan_make(&p->model, s, &o, err);
    if (rc) return rc;
    uint64_t act = b->precision == SL_PREC_F32 ? 4 : 2, H = (uint64_t)s->width, t = p->need.batch_tokens;
    uint64_t mt = b->micro_tokens && b->micro_tokens < t ? b->micro_tokens : t;
    uint64_t qkv = (uint64_t)s->heads * (uint64_t)(s->head_dim ? s->head_dim : s->nope_dim + s->rope_dim) * 2 +
                   2 * (uint64_t)s->kv_heads * (uint64_t)s->head_dim;
    uint64_t mlp = 3 * (uint64_t)s->inter;
    if ((uint64_t)s->moe_inter * (uint64_t)s->top_k * 3 > mlp) mlp = (uint64_t)s->moe_inter * (uint64_t)s->top_k * 3;
    if (!p->on_host && s->top_k) { /* room for every pair that could be this rank's */
        uint64_t local = (uint64_t)s->experts / (uint64_t)tp, pairs = (uint64_t)s->top_k;
        if (s->experts % tp == 0 && local < pairs) pairs = local;
        uint64_t rows = pairs * (H + 2 * (uint64_t)s->moe_inter) * (uint64_t)tp;
        if (rows > mlp) mlp = rows;
    }
    /* Ranks that add up keep their partial results of the whole batch, and on GPUs what the peers sent. */
    uint64_t sums = tp > 1 ? (t - mt) * H * act + (p->on_host ? 0 : mt * H * act) : 0;
    p->rank_weights = p->model.weight_bytes;
    p->rank_workspace = 2 * t * H * act + sums + mt * act * (3 * H + (qkv + mlp) / (uint64_t)tp + 1) +
                        (p->on_host ? 0 : p->model.prepared_bytes) /* the cpu reads every format in place */ +
                        (uint64_t)b->max_length * 512 + (b->nll_every ? 64ull * (uint64_t)s->vocab * 4 : 0) + 32 * MIB;
    return SL_OK;
}

static int no_gpu(sl_err *err) {
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    return sl_err_set(err, SL_ECONFIG, "[model] backend = cuda, but the driver (libnvidia-ml.so.1) shows no GPU%s%s",
                      list ? " that is in CUDA_VISIBLE_DEVICES=" : "", list ? list : "");
}

static int resolve_parallel(sl_preflight *p, sl_config *c, sl_err *err) {
    sl_boot *b = &c->boot;
    uint64_t gpu_bytes = 0;
    int gpus = p->on_host ? 0 : sl_gpus_count(&gpu_bytes), widths[SL_MAX_RANKS], n;
    if (!p->on_host && !gpus) return no_gpu(err);
    if (b->tp) {
        int rc = sl_spec_check_tp(p->spec, (int)b->expert_split, (int)b->tp, err);
        if (rc) return sl_err_wrap(err, "[parallel] ranks = %u", b->tp);
    } else if (p->on_host) {
        b->tp = 1; /* ranks share the same memory and processors: more of them only add an all-reduce */
    } else {
        n = sl_spec_widths(p->spec, (int)b->expert_split, gpus, widths);
        for (int i = 0; i < n && !b->tp; i++) {
            if (rank_plan(p, c, widths[i], err)) return SL_ECONFIG;
            if (p->rank_weights + p->rank_workspace < gpu_bytes - gpu_bytes / 16) b->tp = (uint32_t)widths[i];
        }
        if (!b->tp)
            return sl_err_set(
                err, SL_ECONFIG,
                "the model does not fit on %d GPUs: %llu MiB of weights and %llu MiB of workspace a rank at "
                "width %d, %llu MiB free; make [batch] tokens smaller or use more GPUs",
                gpus, (unsigned long long)(p->rank_weights / MIB), (unsigned long long)(p->rank_workspace / MIB),
                n ? widths[n - 1] : 0, (unsigned long long)(gpu_bytes / MIB));
    }
    if (!b->dp) b->dp = p->on_host || (uint32_t)gpus < b->tp ? 1 : (uint32_t)gpus / b->tp;
    if (b->dp > SL_MAX_GROUPS || b->dp * b->tp > SL_MAX_RANKS)
        return sl_err_set(err, SL_ECONFIG, "[parallel] %u groups of %u ranks are more than %d ranks", b->dp, b->tp,
                          SL_MAX_RANKS);
    uint32_t ranks = b->dp * b->tp;
    if (!p->on_host && ranks > (uint32_t)gpus)
        note(p, "%u ranks share %d GPU%s: a test of widths, not of speed (sums go through host memory)", ranks, gpus,
             gpus == 1 ? "" : "s");
    if (!b->threads) {
        long cpus = sysconf(_SC_NPROCESSORS_ONLN);
        b->threads = p->on_host && cpus > (long)(b->dp * b->tp) ? (uint32_t)cpus / (b->dp * b->tp) : 1;
    }
    int rc = rank_plan(p, c, (int)b->tp, err);
    uint64_t sharing = gpus ? (ranks + (uint32_t)gpus - 1) / (uint32_t)gpus : 0;
    if (!rc && sharing && sharing * p->rank_weights > gpu_bytes)
        rc = sl_err_set(err, SL_ECONFIG,
                        "the weights do not fit: %llu rank%s a GPU x %llu MiB, %llu MiB free; use more [parallel] "
                        "ranks on more GPUs",
                        (unsigned long long)sharing, sharing == 1 ? "" : "s",
                        (unsigned long long)(p->rank_weights / MIB), (unsigned long long)(gpu_bytes / MIB));
    return rc;
}

/* About 1 MiB a chunk on the cpu, 14 MiB on a GPU: large enough for one full-speed copy, small enough to rotate. */
static void resolve_chunk(sl_preflight *p, sl_config *c) {
    sl_boot *b = &c->boot;
    p->need.batch_tokens = b->batch_tokens > b->max_length ? b->batch_tokens : b->max_length;
    uint64_t row = (uint64_t)b->width * b->elem_size, aim = b->backend == SL_BACKEND_CUDA ? 14 * MIB : MIB;
    if (!b->chunk_rows) b->chunk_rows = (uint32_t)(aim / row ? aim / row : 1);
    if (b->chunk_rows > p->need.batch_tokens) b->chunk_rows = (uint32_t)p->need.batch_tokens;
}

/* ---- identity of what makes the states ---- */

static void hash_bytes(char out[80], const void *data, size_t n) {
    XXH128_hash_t h = XXH3_128bits(data, n);
    snprintf(out, 80, "xxh128:%016llx%016llx", (unsigned long long)h.high64, (unsigned long long)h.low64);
}

static bool hash_file(char out[80], const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    if (fd < 0) return false;
    bool ok = !fstat(fd, &st) && S_ISREG(st.st_mode) && st.st_size < (off_t)(512 * MIB);
    char *buf = ok ? malloc((size_t)st.st_size + 1) : NULL;
    size_t n = 0;
    while (buf && n < (size_t)st.st_size) {
        ssize_t got = read(fd, buf + n, (size_t)st.st_size - n);
        if (got <= 0) break;
        n += (size_t)got;
    }
    ok = buf && n == (size_t)st.st_size; /* never the hash of a part */
    if (ok) hash_bytes(out, buf, n);
    free(buf);
    close(fd);
    return ok;
}

static bool is_dir(const char *path) {
    struct stat st;
    return !stat(path, &st) && S_ISDIR(st.st_mode);
}

static void hash_tokenizer(sl_boot *b) {
    static const char *const names[] = {"tokenizer.json", "tiktoken.model", "tokenizer.model"};
    const char *base = b->tokenizer[0] ? b->tokenizer : b->model;
    char path[SL_PATH_MAX + 64];
    if (!is_dir(base)) { /* a GGUF's tokenizer is in its metadata, which the fingerprint covers */
        if (b->tokenizer[0] && hash_file(b->tokenizer_hash, base)) return;
        snprintf(b->tokenizer_hash, sizeof b->tokenizer_hash, "model:%.72s", b->model_fingerprint);
        return;
    }
    snprintf(b->tokenizer_hash, sizeof b->tokenizer_hash, "none");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s/%s", base, names[i]);
        if (hash_file(b->tokenizer_hash, path)) return;
    }
}

static void hash_template(sl_boot *b) {
    const char *base = b->tokenizer[0] ? b->tokenizer : b->model;
    char path[SL_PATH_MAX + 64];
    if (b->chat_template[0] && hash_file(b->template_hash, b->chat_template)) return;
    snprintf(path, sizeof path, "%s/chat_template.jinja", base);
    if (hash_file(b->template_hash, path)) return;
    snprintf(path, sizeof path, "%s/tokenizer_config.json", base);
    json_t *j = is_dir(base) ? json_load_file(path, JSON_REJECT_DUPLICATES, NULL) : NULL;
    json_t *t = json_object_get(j, "chat_template");
    if (json_is_string(t))
        hash_bytes(b->template_hash, json_string_value(t), json_string_length(t));
    else if (!is_dir(base))
        snprintf(b->template_hash, sizeof b->template_hash, "model:%.72s", b->model_fingerprint);
    else
        snprintf(b->template_hash, sizeof b->template_hash, "none");
    json_decref(j);
}

static int absolute(char *path, size_t cap, const char *what, sl_err *err) {
    char full[PATH_MAX];
    if (!path[0]) return SL_OK;
    if (!realpath(path, full)) return sl_err_sys(err, sl_file_read_code(errno), errno, "%s = %s", what, path);
    if (strlen(full) >= cap)
        return sl_err_set(err, SL_ECONFIG, "%s: the path %s is longer than %zu bytes", what, full, cap - 1);
    snprintf(path, cap, "%s", full);
    return SL_OK;
}

static int resolve_paths(sl_config *c, sl_err *err) {
    sl_boot *b = &c->boot;
    if (mkdir(b->store, 0777) && errno != EEXIST)
        return sl_err_sys(err, sl_file_read_code(errno), errno, "[store] path = %s", b->store);
    int rc = absolute(b->model, sizeof b->model, "[model] path", err);
    if (!rc) rc = absolute(b->tokenizer, sizeof b->tokenizer, "[model] tokenizer", err);
    if (!rc) rc = absolute(b->chat_template, sizeof b->chat_template, "[model] chat_template", err);
    if (!rc) rc = absolute(b->store, sizeof b->store, "[store] path", err);
    return rc;
}

static int resolve_codec(sl_preflight *p, sl_config *c, sl_err *err) {
    sl_boot *b = &c->boot;
    bool given = false;
    int n;
    const sl_config_key *k = sl_config_keys(&n);
    for (int i = 0; i < n; i++)
        if (!strcmp(k[i].key, "codec")) given = c->set[i];
    if (b->layout == SL_LAYOUT_FILES) { /* a safetensors file is read as it is by others */
        if (given && b->codec != SL_CODEC_NONE)
            return sl_err_set(err, SL_ECONFIG, "[store] layout = files stores plain safetensors: codec must be none");
        b->codec = SL_CODEC_NONE;
    } else if (b->codec == SL_CODEC_BF16 && b->elem_size != 2) {
        if (given) return sl_err_set(err, SL_ECONFIG, "[store] codec = bf16 cannot hold f32 states; use zstd or none");
        b->codec = SL_CODEC_ZSTD;
        note(p, "codec zstd: the states are f32");
    }
    return SL_OK;
}

int sl_preflight_resolve(sl_preflight *p, sl_config *c, sl_topo *t, sl_err *err) {
    sl_boot *b = &c->boot;
    memset(p, 0, sizeof *p);
    int rc = sl_config_check(c, err);
    if (!rc) rc = resolve_paths(c, err);
    if (!rc) rc = resolve_backend(p, c, err);
    if (!rc && !(p->spec = calloc(1, sizeof *p->spec))) rc = sl_err_set(err, SL_ETEMP, "out of memory");
    if (!rc) rc = sl_spec_load(p->spec, b->model, b->norm_eps_lora, err);
    if (rc) goto fail;
    b->n_layers = (uint32_t)p->spec->n_layers, b->width = (uint32_t)p->spec->width, b->vocab = (uint32_t)p->spec->vocab;
    b->elem_size = b->precision == SL_PREC_F32 ? 4 : 2;
    rc = resolve_captures(c, p->spec, err);
    if (rc) goto fail;
    resolve_chunk(p, c);
    rc = resolve_parallel(p, c, err);
    if (!rc) rc = resolve_codec(p, c, err);
    if (!rc && b->random_weights)
        snprintf(b->model_fingerprint, sizeof b->model_fingerprint, "random:%llu", (unsigned long long)b->random_seed);
    else if (!rc)
        rc = sl_spec_fingerprint(b->model, b->model_fingerprint, err);
    if (!rc) rc = sl_topo_plan(t, b, c, err);
    if (rc) goto fail;
    hash_tokenizer(b), hash_template(b);
    sl_topo_need_of(b, &p->need);
    p->token_bytes = (uint64_t)b->n_captures * b->width * b->elem_size;
    p->rings = sl_topo_bytes(t);
    p->feeder = 64 * MIB + (uint64_t)b->vocab * 512;
    p->gather = 16 * MIB;
    /* Write buffers, a group's bookkeeping, compression; the index of the open shard, half as much again while it
     * grows. */
    p->writer = 32 * MIB + b->commit_mb * MIB + b->writer_threads * 16 * MIB;
    p->index = b->layout == SL_LAYOUT_SHARDS ? 3ull * SL_SHARD_ROWS * sizeof(sl_index_entry) / 2 : 0;
    p->writer += p->index;
    p->total = p->rings + p->feeder + p->gather + p->writer + 16 * MIB;
    /* On GPUs only the buffers that weights are read through count here. */
    p->total += (uint64_t)b->dp * b->tp * (p->on_host ? p->rank_weights + p->rank_workspace : p->model.pinned_bytes);
    p->available = c->memory_limit ? c->memory_limit : sl_memory_available();
    return SL_OK;
fail:
    sl_preflight_free(p);
    return rc;
}

void sl_preflight_free(sl_preflight *p) {
    if (p->spec) sl_spec_free(p->spec);
    free(p->spec);
    p->spec = NULL;
}

uint64_t sl_preflight_disk(const sl_preflight *p, const sl_config *c, uint64_t tokens) {
    static const double ratio[] = {1.0, 1.1, 1.35}; /* of sl_codec, from below */
    return (uint64_t)((double)(tokens * p->token_bytes) / ratio[c->boot.codec]) + tokens * 5;
}

static double mib(uint64_t v) {
    return (double)v / (double)MIB;
}

void sl_preflight_print(const sl_preflight *p, const sl_config *c, FILE *f) {
    static const char *const codecs[] = {"none", "zstd", "bf16"};
    const sl_boot *b = &c->boot;
    const sl_topo_need *n = &p->need;
    uint32_t ranks = b->dp * b->tp;
    fprintf(f, "model     %s: %s, %u layers, width %u, vocabulary %u, %.1f M parameters a rank%s\n", b->model,
            p->spec->family, b->n_layers, b->width, b->vocab, (double)p->model.params / 1e6,
            b->random_weights ? ", RANDOM weights" : "");
    fprintf(f, "states   ");
    for (uint32_t k = 0; k < b->n_captures; k++)
        fprintf(f, " %sH[%u]%s", b->captures[k].final_norm ? "norm(" : "", b->captures[k].hidx,
                b->captures[k].final_norm ? ")" : "");
    fprintf(f, " of 0..%u, %s: %llu bytes a token\n", b->n_layers, b->elem_size == 2 ? "bf16" : "f32",
            (unsigned long long)p->token_bytes);
    fprintf(f, "parallel  %u group%s of %u rank%s, %s, %u thread%s a rank\n", b->dp, b->dp == 1 ? "" : "s", b->tp,
            b->tp == 1 ? "" : "s", b->backend == SL_BACKEND_CUDA ? "cuda" : "cpu", b->threads,
            b->threads == 1 ? "" : "s");
    fprintf(
        f,
        "batch     %u tokens, %u rows, longest row %u; a chunk is %u tokens\n"
        "rings     largest batch: %llu tokens = %llu chunks a state x %u states / %u ranks -> %llu payload slots and "
        "%llu descriptors a rank; twice that fits\n",
        b->batch_tokens, b->max_batch_rows, b->max_length, b->chunk_rows, (unsigned long long)n->batch_tokens,
        (unsigned long long)n->chunks, b->n_captures, b->tp, (unsigned long long)n->payloads,
        (unsigned long long)n->descriptors);
    fprintf(f,
            "memory    %.0f MiB %s = shared rings %.0f + %u x %s%.0f (weights %.0f + workspace %.0f%s) + feeder %.0f + "
            "gather "
            "%.0f + writer %.0f (%.0f for the open shard's index) + sluiced 16; available %.0f MiB\n",
            mib(p->total), p->on_host ? "in all" : "on the host", mib(p->rings), ranks,
            p->on_host ? "" : "pinned read buffers ",
            mib(p->on_host ? p->rank_weights + p->rank_workspace : p->model.pinned_bytes), mib(p->rank_weights),
            mib(p->rank_workspace), p->on_host ? "" : " each on the GPUs", mib(p->feeder), mib(p->gather),
            mib(p->writer), mib(p->index), mib(p->available));
    fprintf(f, "store     %s, layout %s, codec %s\n", b->store, b->layout == SL_LAYOUT_FILES ? "files" : "shards",
            codecs[b->codec]);
    if (c->expect_tokens)
        fprintf(f, "disk      %llu tokens x %llu bytes = %.1f MB raw, about %.1f MB in the store\n",
                (unsigned long long)c->expect_tokens, (unsigned long long)p->token_bytes,
                (double)(c->expect_tokens * p->token_bytes) / 1e6,
                (double)sl_preflight_disk(p, c, c->expect_tokens) / 1e6);
    for (const char *s = p->notes; *s; s += strcspn(s, "\n"), s += *s == '\n')
        fprintf(f, "choice    %.*s\n", (int)strcspn(s, "\n"), s);
}

int sl_preflight_memory(const sl_preflight *p, const sl_config *c, sl_err *err) {
    const sl_boot *b = &c->boot;
    if (!p->available || p->total <= p->available) return SL_OK;
    /* What others use now they may not use later; what is not there at all is not worth waiting for. */
    bool passes = !c->memory_limit && p->total <= memory(true);
    return sl_err_set(err, passes ? SL_ETEMP : SL_ECONFIG,
                      "the memory plan needs %.0f MiB but %.0f MiB %s: shared rings %.0f + %u ranks x (weights %.0f + "
                      "workspace %.0f) + feeder %.0f + gather %.0f + writer %.0f + sluiced 16. Make [batch] tokens or "
                      "max_length smaller, use fewer ranks or groups, or raise [memory] limit",
                      mib(p->total), mib(p->available),
                      c->memory_limit ? "are allowed by [memory] limit" : "are available", mib(p->rings), b->dp * b->tp,
                      p->on_host ? mib(p->rank_weights) : 0.0, p->on_host ? mib(p->rank_workspace) : 0.0,
                      mib(p->feeder), mib(p->gather), mib(p->writer));
}
