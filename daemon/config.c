#include "daemon/config.h"
#include "ipc/faults.h"
#include "ipc/file.h"
#include <ctype.h>
#include <errno.h>
#include <ini.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define B(f)  offsetof(sl_config, boot.f), sizeof(((sl_config *)0)->boot.f)
#define C(f)  offsetof(sl_config, f), sizeof(((sl_config *)0)->f)
#define MAX32 4294967295.0
#define MAX64 9.0e18

/* clang-format off */
static const sl_config_key keys[] = {
    {"model", "path", SL_KEY_STR, 0, 0, "folder or file", "", "Model folder (config.json + safetensors) or a .gguf file. Required.", B(model)},
    {"model", "tokenizer", SL_KEY_STR, 0, 0, "folder or file", "", "Tokenizer; empty: the model's own.", B(tokenizer)},
    {"model", "chat_template", SL_KEY_STR, 0, 0, "file", "", "Chat template (Jinja2); empty: the model's own.", B(chat_template)},
    {"model", "template_args", SL_KEY_STR, 0, 0, "JSON object", "{}", "Extra arguments of the chat template.", B(template_args)},
    {"model", "backend", SL_KEY_CHOICE, 0, 0, "cpu|cuda|auto", "auto", "Where the model runs; auto: cuda when it was built in and a GPU is there, else cpu.", C(backend)},
    {"model", "precision", SL_KEY_CHOICE, 0, 0, "bf16|f32", "bf16", "Arithmetic and stored type; f32 on the cpu is the reference path.", B(precision)},
    {"model", "weights", SL_KEY_CHOICE, 0, 0, "file|random", "file", "random: weights of the config's shape made from random_seed, for benchmarks.", B(random_weights)},
    {"model", "random_seed", SL_KEY_U64, 0, MAX64, "", "1", "Seed of random weights.", B(random_seed)},
    {"model", "expert_split", SL_KEY_CHOICE, 0, 0, "auto|ep|tp", "auto", "Mixture of experts: whole experts a rank (ep) or slices of each (tp).", B(expert_split)},
    {"model", "eps_lora", SL_KEY_DOUBLE, 0, 1, "", "0", "Epsilon of MLA's low-rank norms; 0: 1e-6.", B(norm_eps_lora)},

    {"capture", "layers", SL_KEY_STR, 0, 0, "", "eagle3", "Residual-stream indices to keep, 0..n: eagle3, speculators-0.3, dflash, all, or a list of numbers and n, n-K, n/K, n/K+J.", C(layers)},
    {"capture", "final", SL_KEY_CHOICE, 0, 0, "pre|post|both", "pre", "H[n] as it is (pre), after the final norm in its place (post), or both.", C(final)},
    {"capture", "nll_every", SL_KEY_U32, 0, MAX32, "rows", "64", "Teacher NLL on one row in this many (the first always); 0: never.", B(nll_every)},

    {"parallel", "groups", SL_KEY_U32, 0, SL_MAX_GROUPS, "", "0", "Groups of tensor-parallel ranks (data parallel); 0: choose.", B(dp)},
    {"parallel", "ranks", SL_KEY_U32, 0, SL_MAX_RANKS, "", "0", "Tensor-parallel ranks a group; 0: the fewest whose memory plan fits.", B(tp)},
    {"parallel", "sums", SL_KEY_CHOICE, 0, 0, "best|nccl|ring", "best", "How ranks on GPUs of their own add up: copies between GPUs where they reach each other, else NCCL; NCCL by the same slices; NCCL's own all-reduce.", B(sums)},
    {"parallel", "threads", SL_KEY_U32, 0, 1024, "", "0", "CPU threads a rank; 0: the processors divided by the ranks.", B(threads)},
    {"parallel", "pin_cpus", SL_KEY_BOOL, 0, 1, "", "no", "Pin each rank to its own processors.", C(pin_cpus)},

    {"batch", "tokens", SL_KEY_U32, 1, 16777216, "tokens", "4096", "Token budget of a batch; rows are packed without padding.", B(batch_tokens)},
    {"batch", "max_rows", SL_KEY_U32, 1, 65536, "rows", "512", "Most rows in a batch.", B(max_batch_rows)},
    {"batch", "max_length", SL_KEY_U32, 1, 16777216, "tokens", "4096", "Longest row; see feed.overlong.", B(max_length)},
    {"batch", "micro_tokens", SL_KEY_U32, 0, 16777216, "tokens", "0", "Tokens computed at a time within a batch; 0: the whole batch.", B(micro_tokens)},
    {"batch", "chunk_tokens", SL_KEY_U32, 0, 16777216, "tokens", "0", "Tokens a chunk of a captured state; 0: choose (about 1 MiB on the cpu, up to 14 MiB else).", B(chunk_rows)},
    {"batch", "wait", SL_KEY_MS, 0, 3600e3, "", "500ms", "A batch that is not full is closed when no row came for this long.", B(batch_wait_ms)},

    {"feed", "address", SL_KEY_STR, 0, 0, "ZeroMQ endpoint", "", "Where rows come in; empty: ipc://RUN_DIR/feed.sock. tcp:// needs curve_dir.", B(feed_addr)},
    {"feed", "curve_dir", SL_KEY_STR, 0, 0, "folder", "", "CURVE keys for tcp://.", B(curve_dir)},
    {"feed", "threads", SL_KEY_U32, 1, 256, "", "1", "Tokenizer threads.", B(feeder_threads)},
    {"feed", "credit_rows", SL_KEY_U32, 1, 1048576, "rows", "512", "Rows a client may have sent that are not yet acknowledged.", B(credit_rows)},
    {"feed", "overlong", SL_KEY_CHOICE, 0, 0, "truncate|skip|split", "truncate", "A row longer than batch.max_length: cut it, reject it (TOO_LONG), or cut it into parts.", B(overlong)},
    {"feed", "min_supervised", SL_KEY_U32, 0, 16777216, "tokens", "0", "Rows with fewer supervised tokens are rejected (UNSUPERVISED).", B(min_supervised)},
    {"feed", "train_on", SL_KEY_CHOICE, 0, 0, "all-assistant|last-assistant|all", "all-assistant", "Which tokens of a conversation the loss mask marks.", B(train_on)},
    {"feed", "rows_from", SL_KEY_CHOICE, 0, 0, "conversation|turn", "conversation", "One row a conversation, or one row an assistant turn.", B(per_turn)},
    {"feed", "reasoning", SL_KEY_CHOICE, 0, 0, "keep-last|template", "keep-last", "Reasoning of the last assistant turn is kept, or whatever the template does.", B(reasoning)},

    {"store", "path", SL_KEY_STR, 0, 0, "folder", "", "Where the states and the two logs go. Required.", B(store)},
    {"store", "layout", SL_KEY_CHOICE, 0, 0, "shards|files", "shards", "Large sealed shards, or one safetensors file a row.", B(layout)},
    {"store", "codec", SL_KEY_CHOICE, 0, 0, "none|zstd|bf16", "bf16", "Compression of the states in shards; f32 states: bf16 means zstd.", B(codec)},
    {"store", "zstd_level", SL_KEY_U32, 1, 19, "", "1", "zstd compression level.", B(zstd_level)},
    {"store", "threads", SL_KEY_U32, 1, 256, "", "1", "Compression threads.", B(writer_threads)},
    {"store", "shard_size", SL_KEY_SIZE, 1048576, 1099511627776.0, "", "4GiB", "A shard is sealed when it reaches this size.", B(shard_bytes)},
    {"store", "reserve", SL_KEY_SIZE, 0, MAX64, "", "256MiB", "Pause when less than this is free in the store's file system.", B(reserve_bytes)},
    {"store", "commit_time", SL_KEY_MS, 1, 3600e3, "", "200ms", "Rows are made durable at the latest after this time...", B(commit_ms)},
    {"store", "commit_size", SL_KEY_MIB, 1, 1048576.0 * 1048576, "", "64MiB", "...or after this many bytes.", B(commit_mb)},
    {"store", "direct_io", SL_KEY_BOOL, 0, 1, "", "yes", "Write shards with O_DIRECT (a file system that refuses it is a warning).", B(direct_io)},

    {"daemon", "run_dir", SL_KEY_STR, 0, 0, "folder", "", "Sockets and the pid record; empty: $RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR/sluice or /tmp/sluice-UID.", C(run_dir)},
    {"daemon", "progress_address", SL_KEY_STR, 0, 0, "ipc:// endpoint", "", "Status is published here; empty: ipc://RUN_DIR/progress.sock.", B(sock_progress)},
    {"daemon", "control_address", SL_KEY_STR, 0, 0, "ipc:// endpoint", "", "Commands come in here; empty: ipc://RUN_DIR/control.sock.", B(sock_control)},
    {"daemon", "socket_group", SL_KEY_STR, 0, 0, "group", "", "Members of this group may use the sockets; empty: only this user.", C(socket_group)},
    {"daemon", "stage_dir", SL_KEY_STR, 0, 0, "folder", "", "Where sluice-feeder and the other stages are; empty: where they were built or installed.", C(stage_dir)},
    {"daemon", "log_level", SL_KEY_CHOICE, 0, 0, "debug|info|warn|error", "info", "Least severity that is logged.", B(log_level)},
    {"daemon", "status_interval", SL_KEY_MS, 50, 60e3, "", "250ms", "Status is published this often.", C(status_ms)},
    {"daemon", "expect_tokens", SL_KEY_U64, 0, MAX64, "tokens", "0", "Forecast of the whole run, for the disk estimate and the time left; 0: unknown.", C(expect_tokens)},

    {"memory", "batch_depth", SL_KEY_U32, 2, 4096, "batches", "8", "Batches in flight a group (a power of two).", C(batch_depth)},
    {"memory", "ring_size", SL_KEY_SIZE, 0, MAX64, "", "0", "States in flight a rank; 0: two of the largest batches and a little more.", C(ring_bytes)},
    {"memory", "hugepages", SL_KEY_BOOL, 0, 1, "", "yes", "Put the rings on huge pages when the pool has room.", C(hugepages)},
    {"memory", "limit", SL_KEY_SIZE, 0, MAX64, "", "0", "Refuse a memory plan above this; 0: what is available.", C(memory_limit)},

    {"supervise", "watchdog", SL_KEY_MS, 100, 86400e3, "", "1m", "A stage without a heartbeat for this long is killed and restarted.", C(watchdog_ms)},
    {"supervise", "watchdog_load", SL_KEY_MS, 100, 864000e3, "", "30m", "The same while it starts or loads weights.", C(watchdog_load_ms)},
    {"supervise", "watchdog_rank", SL_KEY_MS, 100, 864000e3, "", "15m", "The same for a rank inside a batch.", C(watchdog_rank_ms)},
    {"supervise", "backoff_min", SL_KEY_MS, 1, 3600e3, "", "10ms", "Wait before the first restart; doubles with each death without progress...", C(backoff_min_ms)},
    {"supervise", "backoff_max", SL_KEY_MS, 1, 3600e3, "", "5s", "...up to this.", C(backoff_max_ms)},
    {"supervise", "restarts", SL_KEY_U32, 1, 100000, "", "20", "Restarts of one stage without progress before the daemon gives up (exit 75)...", C(restart_budget)},
    {"supervise", "restart_window", SL_KEY_MS, 1000, 86400e3, "", "10m", "...within this time.", C(restart_window_ms)},
    {"supervise", "poison_deaths", SL_KEY_U32, 0, 1000, "", "8", "A batch of several rows that was being computed at this many deaths in a row is rejected whole (POISON), when running its rows one by one did not show which it is; 0: never. A row alone needs two.", C(poison_deaths)},

    {"test", "fault", SL_KEY_CHOICE, 0, 0, "none|flatten|lost-dim|missing-shard|wrong-place|layers-swapped|wrong-offset|nan|zeros|previous|diverge|changed", "none", "Fault made on purpose (ipc/faults.h), to see it rejected.", B(fault)},
    {"test", "fault_rank", SL_KEY_U32, 0, SL_MAX_RANKS, "", "0", "The rank that injects it.", B(fault_rank)},
    {"test", "fault_batch", SL_KEY_U32, 0, MAX32, "", "0", "The batch in which it is injected.", B(fault_batch)},
    {"test", "crash_points", SL_KEY_STR, 0, 0, "name:count,...", "", "Points at which a stage kills itself (ipc/crash.h).", B(crash_points)},
};
/* clang-format on */
#define N_KEYS ((int)(sizeof keys / sizeof *keys))
_Static_assert(sizeof keys / sizeof *keys <= sizeof(((sl_config *)0)->set), "sl_config.set is too small");
_Static_assert(SL_FAULT_CHANGED == 11 && SL_FAULT_N == 12, "test.fault lists every fault");
_Static_assert(SL_LAYOUT_SHARDS == 0 && SL_CODEC_BF16 == 2 && SL_PREC_F32 == 1 && SL_BACKEND_CUDA == 1 &&
                   SL_EXPERTS_TP == 2,
               "the words of a CHOICE are in the order of its enum");

const sl_config_key *sl_config_keys(int *n) {
    *n = N_KEYS;
    return keys;
}

/* ---- one value ---- */

typedef struct unit {
    const char *name;
    double factor;
} unit;

/* Largest first, so that printing takes the largest unit that divides. */
static const unit sizes[] = {{"TiB", 1099511627776.0},
                             {"GiB", 1073741824.0},
                             {"MiB", 1048576.0},
                             {"KiB", 1024.0},
                             {"", 1},
                             {"B", 1},
                             {"T", 1099511627776.0},
                             {"G", 1073741824.0},
                             {"M", 1048576.0},
                             {"K", 1024.0},
                             {"TB", 1e12},
                             {"GB", 1e9},
                             {"MB", 1e6},
                             {"kB", 1e3},
                             {NULL, 0}};
static const unit times[] = {{"h", 3600e3}, {"m", 60e3}, {"s", 1e3}, {"ms", 1}, {"", 1e3}, {"min", 60e3}, {NULL, 0}};

static const unit *units_of(sl_key_type t) {
    return t == SL_KEY_SIZE || t == SL_KEY_MIB ? sizes : t == SL_KEY_MS ? times : NULL;
}

static int choice_index(const char *words, const char *v) {
    size_t n = strlen(v);
    int i = 0;
    for (const char *p = words;; i++) {
        size_t len = strcspn(p, "|");
        if (len == n && !memcmp(p, v, n)) return i;
        if (!p[len]) return -1;
        p += len + 1;
    }
}

static const char *choice_word(const char *words, uint32_t i, char *buf, size_t cap) {
    while (i-- && *words) words += strcspn(words, "|"), words += *words == '|';
    snprintf(buf, cap, "%.*s", (int)strcspn(words, "|"), words);
    return buf;
}

static int parse_number(const sl_config_key *k, const char *v, double *d, uint64_t *u, sl_err *err) {
    char *end = NULL;
    const unit *units = units_of(k->type);
    errno = 0;
    *u = 0;
    if (k->type == SL_KEY_U32 || k->type == SL_KEY_U64) {
        if (isdigit((unsigned char)*v)) *u = strtoull(v, &end, 10);
        *d = (double)*u;
        if (!end || *end || errno) return sl_err_set(err, SL_ECONFIG, "'%s' is not a whole number", v);
    } else {
        if (isdigit((unsigned char)*v)) *d = strtod(v, &end);
        if (!end || errno || !isfinite(*d)) return sl_err_set(err, SL_ECONFIG, "'%s' is not a number", v);
        while (*end == ' ') end++;
        for (; units && units->name && strcmp(units->name, end); units++)
            ;
        if (units ? !units->name : *end)
            return sl_err_set(err, SL_ECONFIG, "'%s' has an unknown unit '%s' (%s)", v, end,
                              k->type == SL_KEY_MS ? "ms s m h"
                              : units              ? "KiB MiB GiB TiB kB MB GB TB"
                                                   : "none is allowed");
        if (units) *d *= units->factor;
        if (*d <= MAX64) *u = (uint64_t)llround(*d);
    }
    double max = k->max != 0 ? k->max : MAX64;
    if (*d < k->min || *d > max)
        return sl_err_set(err, SL_ECONFIG, "'%s' is out of range %.10g..%.10g%s", v, k->min, max,
                          units_of(k->type) == sizes ? " bytes"
                          : k->type == SL_KEY_MS     ? " ms"
                                                     : "");
    return SL_OK;
}

static int store_value(sl_config *c, const sl_config_key *k, const char *v, sl_err *err) {
    char *at = (char *)c + k->offset;
    double d = 0;
    uint64_t u = 0;
    int i;
    switch (k->type) {
    case SL_KEY_STR:
        if (strlen(v) >= k->size)
            return sl_err_set(err, SL_ECONFIG, "the value has %zu bytes, at most %zu fit", strlen(v), k->size - 1);
        memset(at, 0, k->size);
        memcpy(at, v, strlen(v));
        return SL_OK;
    case SL_KEY_BOOL:
    case SL_KEY_CHOICE:
        i = k->type == SL_KEY_BOOL ? choice_index("no|yes|false|true|0|1|off|on", v) : choice_index(k->unit, v);
        if (i < 0)
            return sl_err_set(err, SL_ECONFIG, "'%s' is not one of %s", v, k->type == SL_KEY_BOOL ? "yes|no" : k->unit);
        *(uint32_t *)at = k->type == SL_KEY_BOOL ? (uint32_t)(i & 1) : (uint32_t)i;
        return SL_OK;
    default:
        break;
    }
    if (parse_number(k, v, &d, &u, err)) return SL_ECONFIG;
    if (k->type == SL_KEY_DOUBLE)
        *(double *)at = d;
    else if (k->type == SL_KEY_U64 || k->type == SL_KEY_SIZE)
        *(uint64_t *)at = u;
    else if (k->type == SL_KEY_MIB)
        *(uint32_t *)at = (uint32_t)((u + 1048575) >> 20);
    else
        *(uint32_t *)at = (uint32_t)u;
    return SL_OK;
}

static void print_value(const sl_config *c, const sl_config_key *k, FILE *f) {
    const char *at = (const char *)c + k->offset;
    char word[64];
    uint64_t u = k->size == 8 ? *(const uint64_t *)at : k->size == 4 ? *(const uint32_t *)at : 0;
    if (k->type == SL_KEY_MIB) u <<= 20;
    switch (k->type) {
    case SL_KEY_STR:
        fputs(at, f);
        return;
    case SL_KEY_BOOL:
        fputs(u ? "yes" : "no", f);
        return;
    case SL_KEY_CHOICE:
        fputs(choice_word(k->unit, (uint32_t)u, word, sizeof word), f);
        return;
    case SL_KEY_DOUBLE:
        fprintf(f, "%.17g", *(const double *)at);
        return;
    default:
        break;
    }
    const unit *n = units_of(k->type);
    while (n && u && n->factor > 1 && u % (uint64_t)n->factor) n++;
    if (n && u)
        fprintf(f, "%llu%s", (unsigned long long)(u / (uint64_t)n->factor), n->name);
    else
        fprintf(f, "%llu", (unsigned long long)u);
}

void sl_config_default(sl_config *c) {
    memset(c, 0, sizeof *c);
    for (int i = 0; i < N_KEYS; i++) store_value(c, &keys[i], keys[i].def, NULL);
}

/* ---- look-up, with the nearest known name when it fails ---- */

static int distance(const char *a, const char *b) {
    int row[64], n = (int)strlen(a), m = (int)strlen(b);
    if (m > 62 || n > 62) return 99;
    for (int j = 0; j <= m; j++) row[j] = j;
    for (int i = 1; i <= n; i++) {
        int diag = row[0];
        row[0] = i;
        for (int j = 1; j <= m; j++) {
            int up = row[j], best = diag + (tolower((unsigned char)a[i - 1]) != b[j - 1]);
            if (up + 1 < best) best = up + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            diag = up, row[j] = best;
        }
    }
    return row[m];
}

static int find_key(const char *section, const char *key, sl_err *err) {
    int best = 1000, at = 0;
    bool known_section = false;
    for (int i = 0; i < N_KEYS; i++) {
        bool same = !strcmp(keys[i].section, section);
        known_section |= same;
        if (same && !strcmp(keys[i].key, key)) return i;
        int ds = distance(section, keys[i].section), d = distance(key, keys[i].key) * 2 + (ds > 3 ? 3 : ds);
        if (d < best) best = d, at = i;
    }
    return sl_err_set(err, SL_ECONFIG, "unknown key '%s' in section [%s]%s; the nearest known key is '%s' in [%s]", key,
                      section, known_section ? "" : " (no such section)", keys[at].key, keys[at].section);
}

/* ---- file ---- */

typedef struct reader {
    const char *p, *end;
    int line;
    bool too_long, nul;
    sl_config *c;
    const char *name;
    sl_err *err;
    int rc;
} reader;

/* inih calls this once a line, so the line number in the handler is this one. */
static char *read_line(char *buf, int num, void *arg) {
    reader *r = arg;
    if (r->p >= r->end || r->rc || num < 2) return NULL;
    const char *nl = memchr(r->p, '\n', (size_t)(r->end - r->p));
    size_t n = nl ? (size_t)(nl - r->p) + 1 : (size_t)(r->end - r->p);
    r->line++;
    if (memchr(r->p, 0, n)) {
        r->rc = sl_err_set(r->err, SL_ECONFIG, "%s:%d: NUL byte in the line", r->name, r->line);
        return NULL;
    }
    if (n > (size_t)num - 2) {
        r->rc = sl_err_set(r->err, SL_ECONFIG, "%s:%d: the line has %zu bytes, at most %d are allowed", r->name,
                           r->line, n, num - 2);
        return NULL;
    }
    memcpy(buf, r->p, n);
    buf[n] = 0;
    r->p += n;
    return buf;
}

static int on_key(void *arg, const char *section, const char *name, const char *value) {
    reader *r = arg;
    if (r->rc) return 0;
    int i = find_key(section, name, r->err);
    if (i >= 0 && r->c->line[i])
        i = sl_err_set(r->err, SL_ECONFIG, "'%s' is given twice, first in line %d", name, r->c->line[i]);
    if (i < 0) {
        r->rc = i;
    } else {
        r->rc = store_value(r->c, &keys[i], value ? value : "", r->err);
        if (r->rc) sl_err_wrap(r->err, "[%s] %s", section, name);
        r->c->set[i] = true;
        r->c->line[i] = r->line;
    }
    if (r->rc) {
        sl_err_wrap(r->err, "%s:%d", r->name, r->line);
        return 0;
    }
    return 1;
}

int sl_config_parse(sl_config *c, const char *name, const char *text, size_t len, sl_err *err) {
    /* The library's switches are variables: long lines whole, no continuation lines, stop at the first fault. */
    ini_use_stack = false, ini_max_line = 8192, ini_initial_alloc = 8192, ini_allow_realloc = false;
    ini_allow_multiline = false, ini_stop_on_first_error = true;
    memset(c->line, 0, sizeof c->line);
    reader r = {.p = text, .end = text + len, .c = c, .name = name, .err = err};
    int bad = ini_parse_stream(read_line, &r, on_key, &r);
    if (r.rc) return r.rc;
    if (bad == -2) return sl_err_set(err, SL_ETEMP, "%s: out of memory", name);
    if (bad) return sl_err_set(err, SL_ECONFIG, "%s:%d: expected [section] or key = value", name, bad);
    return SL_OK;
}

int sl_config_read(sl_config *c, const char *path, sl_err *err) {
    FILE *f = fopen(path, "re");
    if (!f) return sl_err_sys(err, sl_file_read_code(errno), errno, "configuration file %s", path);
    static const size_t cap = 1 << 20;
    char *buf = malloc(cap);
    if (!buf) {
        fclose(f);
        return sl_err_set(err, SL_ETEMP, "out of memory");
    }
    size_t n = fread(buf, 1, cap, f);
    int rc = ferror(f) ? sl_err_sys(err, sl_file_read_code(errno), errno, "reading %s", path) : SL_OK;
    fclose(f);
    if (!rc && n == cap) rc = sl_err_set(err, SL_ECONFIG, "%s: larger than 1 MiB is no configuration file", path);
    if (!rc) rc = sl_config_parse(c, path, buf, n, err);
    free(buf);
    return rc;
}

int sl_config_set(sl_config *c, const char *assignment, sl_err *err) {
    const char *dot = strchr(assignment, '.'), *eq = strchr(assignment, '=');
    char section[64], key[64];
    if (!dot || !eq || dot > eq || dot - assignment >= 64 || eq - dot > 64)
        return sl_err_set(err, SL_ECONFIG, "--set %s: expected section.key=value", assignment);
    snprintf(section, sizeof section, "%.*s", (int)(dot - assignment), assignment);
    snprintf(key, sizeof key, "%.*s", (int)(eq - dot - 1), dot + 1);
    int i = find_key(section, key, err);
    if (i < 0) return sl_err_wrap(err, "--set %s", assignment);
    if (store_value(c, &keys[i], eq + 1, err)) return sl_err_wrap(err, "--set %s", assignment);
    c->set[i] = true;
    return SL_OK;
}

int sl_config_check(const sl_config *c, sl_err *err) {
    const sl_boot *b = &c->boot;
    if (!b->model[0]) return sl_err_set(err, SL_ECONFIG, "[model] path is required: a model folder or a .gguf file");
    if (!b->store[0]) return sl_err_set(err, SL_ECONFIG, "[store] path is required: the folder for the states");
    if (c->batch_depth & (c->batch_depth - 1))
        return sl_err_set(err, SL_ECONFIG, "[memory] batch_depth = %u is not a power of two", c->batch_depth);
    if ((uint64_t)b->dp * b->tp > SL_MAX_RANKS)
        return sl_err_set(err, SL_ECONFIG, "[parallel] %u groups of %u ranks are more than %d ranks", b->dp, b->tp,
                          SL_MAX_RANKS);
    if (c->backoff_min_ms > c->backoff_max_ms)
        return sl_err_set(err, SL_ECONFIG, "[supervise] backoff_min %u ms is above backoff_max %u ms",
                          c->backoff_min_ms, c->backoff_max_ms);
    const char *own[] = {"control", b->sock_control, "progress", b->sock_progress};
    for (int i = 0; i < 4; i += 2)
        if (*own[i + 1] && strncmp(own[i + 1], "ipc://", 6) != 0)
            return sl_err_set(err, SL_ECONFIG,
                              "[daemon] %s_address = %s: only ipc:// is possible, where the file says who may connect: "
                              "commands are not taken, and status is not sent, over a network in clear",
                              own[i], own[i + 1]);
    if (!strncmp(b->feed_addr, "tcp://", 6) && !b->curve_dir[0])
        return sl_err_set(err, SL_ECONFIG, "[feed] address = %s needs curve_dir: rows are not taken in clear over TCP",
                          b->feed_addr);
    return SL_OK;
}

void sl_config_print(const sl_config *values, FILE *f) {
    const char *section = "";
    for (int i = 0; i < N_KEYS; i++) {
        const sl_config_key *k = &keys[i];
        if (strcmp(section, k->section)) fprintf(f, "%s[%s]\n", *section ? "\n" : "", k->section);
        section = k->section;
        fprintf(f, "# %s%s%s%s\n", k->comment, *k->unit ? " [" : "", k->unit, *k->unit ? "]" : "");
        if (values) {
            fprintf(f, "%s = ", k->key);
            print_value(values, k, f);
            fputc('\n', f);
        } else {
            fprintf(f, "%s = %s\n", k->key, k->def);
        }
    }
}
