/* sluice extract: one command from a file of rows to verified states. It runs a private sluiced with every stage,
 * pushes the rows, waits until they are durable, drains, verifies, and says what came out. */
#include "daemon/bootinfo.h"
#include "daemon/preflight.h"
#include "daemon/status.h"
#include "ipc/file.h"
#include "stages/writer/verify.h"
#include "tools/cli.h"
#include "tools/commands.h"
#include "tools/daemon_client.h"
#include "tools/pusher.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xxhash.h>

/* ---- options ---- */

static struct {
    sl_cli_list input, set;
    const char *output, *dataset, *model, *layers, *final, *tp, *dp, *threads, *backend, *precision, *layout, *codec,
        *zstd_level, *shard_size, *reserve, *max_length, *batch_tokens, *overlong, *min_supervised, *train_on,
        *rows_from, *reasoning, *chat_template, *template_args, *tokenizer, *nll_every, *feeder_threads, *shard;
    uint64_t limit;
    bool random, json, no_verify, plan, verbose, per_turn;
} o;

static const sl_cli_opt opts[] = {
    {"What goes in and out", 0, SL_CLI_HEAD},
    {"model", 'm', SL_CLI_STR, "PATH", "Model folder (config.json and safetensors) or a .gguf file.", &o.model,
     .required = true},
    {"input", 'i', SL_CLI_LIST, "FILE|DIR|-",
     "Rows, one JSON object a line, plain or compressed (gzip, zstd): a file, a folder (its *.jsonl, *.ndjson, *.json "
     "files, also with .gz or .zst, in the order of their names), or - for standard input. May be repeated. Each file "
     "is a data set of its own.",
     &o.input, .required = true},
    {"output", 'o', SL_CLI_STR, "DIR",
     "The store: states, logs, manifest. Made when absent; an existing one is continued.", &o.output, .required = true},
    {"dataset", 0, SL_CLI_STR, "NAME",
     "Name of the data set (one file only). Default: the file's name without .gz or .zst; FOLDER/FILE for the files of "
     "a folder; stdin.",
     &o.dataset},
    {"limit", 0, SL_CLI_U64, "N", "Take only the first N rows (of all inputs together, in order).", &o.limit, 1, 9e18},
    {"shard", 0, SL_CLI_STR, "I/N",
     "Take only every N-th row, from line I on (I from 1 to N, in each file). N machines with I = 1..N take every row "
     "once, and rows keep their numbers.",
     &o.shard},
    {"States", 0, SL_CLI_HEAD},
    {"layers", 'l', SL_CLI_STR, "L",
     "Residual-stream indices 0..n: eagle3 (default: 2, n/2, n-3, n), speculators-0.3, dflash, all, or a list such as "
     "2,n/2,n-3,n. H[0] is the embedding output, H[k] the state after k layers.",
     &o.layers},
    {"final", 0, SL_CLI_CHOICE, "pre|post|both",
     "H[n] as it is (pre, default), after the final norm in its place (post), or both.", &o.final},
    {"precision", 0, SL_CLI_CHOICE, "bf16|f32",
     "Arithmetic and stored type. Default bf16; f32 on the cpu is the reference.", &o.precision},
    {"nll-every", 0, SL_CLI_STR, "N", "Teacher NLL on one row in N; 0: never. Default 64.", &o.nll_every},
    {"Rows", 0, SL_CLI_HEAD},
    {"max-length", 0, SL_CLI_STR, "T", "Longest row in tokens. Default 4096.", &o.max_length},
    {"overlong", 0, SL_CLI_CHOICE, "truncate|skip|split", "What to do with a longer one. Default truncate.",
     &o.overlong},
    {"min-supervised", 0, SL_CLI_STR, "N", "Reject rows with fewer supervised tokens. Default 0.", &o.min_supervised},
    {"train-on", 0, SL_CLI_CHOICE, "all-assistant|last-assistant|all",
     "Which tokens the loss mask marks. Default all-assistant.", &o.train_on},
    {"rows-from", 0, SL_CLI_CHOICE, "conversation|turn", "One row a conversation (default) or an assistant turn.",
     &o.rows_from},
    {"per-turn", 0, SL_CLI_FLAG, NULL, "Same as --rows-from turn: each answer as it was served.", &o.per_turn},
    {"reasoning", 0, SL_CLI_CHOICE, "keep-last|template",
     "Keep the last turn's reasoning (default), or whatever the template does.", &o.reasoning},
    {"chat-template", 0, SL_CLI_STR, "FILE", "Jinja2 template. Default: the model's own.", &o.chat_template},
    {"template-args", 0, SL_CLI_STR, "JSON", "Extra arguments of the template.", &o.template_args},
    {"tokenizer", 0, SL_CLI_STR, "PATH", "Tokenizer folder or file. Default: the model's own.", &o.tokenizer},
    {"Machine", 0, SL_CLI_HEAD},
    {"backend", 0, SL_CLI_CHOICE, "auto|cpu|cuda", "Default auto: cuda when it is there.", &o.backend},
    {"tp", 0, SL_CLI_STR, "N", "Tensor-parallel ranks a group. Default: the fewest that fit.", &o.tp},
    {"dp", 0, SL_CLI_STR, "G", "Groups. Default: as many as the GPUs allow; 1 on the cpu.", &o.dp},
    {"threads", 't', SL_CLI_STR, "N", "CPU threads a rank. Default: the processors divided by the ranks.", &o.threads},
    {"feeder-threads", 0, SL_CLI_STR, "N", "Tokenizer threads. Default 1.", &o.feeder_threads},
    {"batch-tokens", 0, SL_CLI_STR, "B", "Token budget of a batch. Default 4096.", &o.batch_tokens},
    {"random-weights", 0, SL_CLI_FLAG, NULL,
     "Weights of the config's shape from a fixed seed: for trying out, never for training.", &o.random},
    {"Store", 0, SL_CLI_HEAD},
    {"layout", 0, SL_CLI_CHOICE, "shards|files",
     "Large self-describing shards (default), or one safetensors file a row.", &o.layout},
    {"codec", 0, SL_CLI_CHOICE, "none|zstd|bf16", "Compression of shards. Default bf16 (f32 states: zstd).", &o.codec},
    {"zstd-level", 0, SL_CLI_STR, "N", "Default 1.", &o.zstd_level},
    {"shard-size", 0, SL_CLI_STR, "SIZE", "Default 4GiB.", &o.shard_size},
    {"reserve", 0, SL_CLI_STR, "SIZE", "Wait when less than this is free on the disk. Default 256MiB.", &o.reserve},
    {"Command", 0, SL_CLI_HEAD},
    {"set", 0, SL_CLI_LIST, "SECTION.KEY=VALUE", "Any key of sluiced --print-default-config. May be repeated.", &o.set},
    {"plan", 0, SL_CLI_FLAG, NULL, "Print what would be run and what it needs; start nothing.", &o.plan},
    {"no-verify", 0, SL_CLI_FLAG, NULL, "Skip reading the store back at the end.", &o.no_verify},
    {"verbose", 'v', SL_CLI_FLAG, NULL, "Show the whole log, not only warnings and errors.", &o.verbose},
    {"json", 0, SL_CLI_FLAG, NULL, "Print the summary as one JSON object.", &o.json},
    {0}};

static const sl_cli cli = {
    "sluice extract",
    "",
    "hidden states of every row of a file, in one command",
    "Starts a private service with every stage (feeder, ranks, gather, writer), sends the rows, waits until each is on "
    "disk or "
    "rejected by name, drains, reads the store back, and prints a summary. Every row of the input is accounted for: "
    "rows = "
    "written + rejected, and rejected rows are listed in OUTPUT/rejected.jsonl with file, line and reason. With "
    "--per-turn or --overlong split a row gives several parts; it counts as written when at least one of them is, and "
    "every part that is not is listed.\n\n"
    "Run the same command again after an interruption of any kind: it goes on where the logs in OUTPUT say, and makes "
    "the same "
    "states. Ctrl-C finishes the rows that were accepted and ends; a second Ctrl-C kills, which is safe. The log is "
    "OUTPUT/sluice.log; warnings and errors are shown as they come.",
    "    sluice extract --model ./SmolLM2 --input chats.jsonl --output ./states\n"
    "    sluice extract -m m.gguf -i a.jsonl -o out --layers 2,n/2,n --final both --layout files\n"
    "    sluice extract -m ./Qwen3-8B -i ./chats/ -o out --per-turn --max-length 8192 --overlong skip\n"
    "    sluice extract -m ./Qwen3-8B -i big.jsonl.zst -o part2 --shard 2/8 --limit 1000\n",
    opts,
    0,
    0};

/* Option -> configuration key. */
static const struct {
    const char **value;
    const char *key;
} forward[] = {
    {&o.model, "model.path"},
    {&o.output, "store.path"},
    {&o.layers, "capture.layers"},
    {&o.final, "capture.final"},
    {&o.precision, "model.precision"},
    {&o.nll_every, "capture.nll_every"},
    {&o.max_length, "batch.max_length"},
    {&o.overlong, "feed.overlong"},
    {&o.min_supervised, "feed.min_supervised"},
    {&o.train_on, "feed.train_on"},
    {&o.rows_from, "feed.rows_from"},
    {&o.reasoning, "feed.reasoning"},
    {&o.chat_template, "model.chat_template"},
    {&o.template_args, "model.template_args"},
    {&o.tokenizer, "model.tokenizer"},
    {&o.backend, "model.backend"},
    {&o.tp, "parallel.ranks"},
    {&o.dp, "parallel.groups"},
    {&o.threads, "parallel.threads"},
    {&o.feeder_threads, "feed.threads"},
    {&o.batch_tokens, "batch.tokens"},
    {&o.layout, "store.layout"},
    {&o.codec, "store.codec"},
    {&o.zstd_level, "store.zstd_level"},
    {&o.shard_size, "store.shard_size"},
    {&o.reserve, "store.reserve"},
};

/* ---- one run ---- */

typedef struct run {
    char run_dir[256], feed[300], progress[300], log_path[1100], last_error[1024];
    char *sets[160];
    int n_sets;
    int pid, pidfd, exit_code; /* of sluiced; exit_code -1: still running */
    int log_fd;
    uint64_t log_at;
    sl_input_list inputs;
    sl_pusher *push;
    uint64_t shard, shards;
    sl_reasons reasons;
    bool fault_said, stage_error; /* stage_error: last_error is a stage's own */
    sl_daemon_feed status;
    msgpack_unpacked last; /* newest status map */
    bool has_status;
    sl_cli_progress bar;
    FILE *rejected;
    char rejected_tmp[1200];
    uint64_t n_rejected;
    sl_status_totals before, after;
    uint64_t ready_ns, end_ns;
    bool estimated;
} run;

static volatile sig_atomic_t signals;
static void on_signal(int sig) {
    (void)sig, signals++;
}

static int add_set(run *r, sl_err *err, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static int add_set(run *r, sl_err *err, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    int n = r->n_sets < 160 ? vasprintf(&r->sets[r->n_sets], fmt, ap) : -1;
    va_end(ap);
    if (n < 0) return sl_err_set(err, SL_EUSAGE, "too many settings");
    r->n_sets++;
    return SL_OK;
}

/* A private folder with a short name that is the same for the same output, so that a killed run leaves nothing to pile
 * up. */
static int make_run_dir(run *r, sl_err *err) {
    char full[PATH_MAX];
    const char *base = getenv("XDG_RUNTIME_DIR");
    if (!realpath(o.output, full)) return sl_err_sys(err, SL_EUSAGE, errno, "--output %s", o.output);
    uint64_t h = XXH3_64bits(full, strlen(full));
    if (base && strlen(base) < 60 && !access(base, W_OK | X_OK))
        snprintf(r->run_dir, sizeof r->run_dir, "%s/sluice-%016llx", base, (unsigned long long)h);
    else
        snprintf(r->run_dir, sizeof r->run_dir, "/tmp/sluice-%u-%016llx", (unsigned)getuid(), (unsigned long long)h);
    snprintf(r->feed, sizeof r->feed, "ipc://%s/feed.sock", r->run_dir);
    snprintf(r->progress, sizeof r->progress, "ipc://%s/progress.sock", r->run_dir);
    return SL_OK;
}

static int make_settings(run *r, sl_err *err) {
    int rc = add_set(r, err, "daemon.run_dir=%s", r->run_dir);
    for (size_t i = 0; !rc && i < sizeof forward / sizeof *forward; i++)
        if (*forward[i].value) rc = add_set(r, err, "%s=%s", forward[i].key, *forward[i].value);
    if (!rc && o.per_turn) rc = add_set(r, err, "feed.rows_from=turn");
    if (!rc && o.random) rc = add_set(r, err, "model.weights=random");
    for (int i = 0; !rc && i < o.set.n; i++) rc = add_set(r, err, "%s", o.set.v[i]);
    return rc;
}

/* Wrong settings are found here, before anything is started, with the same code that sluiced uses. */
static int check_settings(run *r, bool print, sl_err *err) {
    sl_config *c = malloc(sizeof *c);
    sl_topo *t = malloc(sizeof *t);
    sl_preflight p = {0};
    int rc = c && t ? SL_OK : sl_err_set(err, SL_ETEMP, "out of memory");
    if (!rc) sl_config_default(c);
    for (int i = 0; !rc && i < r->n_sets; i++) rc = sl_config_set(c, r->sets[i], err);
    if (!rc) rc = sl_preflight_resolve(&p, c, t, err);
    if (rc == SL_EDATA) rc = err->code = SL_ECONFIG; /* a damaged model cannot work; "some rows rejected" it is not */
    if (!rc && print) sl_preflight_print(&p, c, stdout);
    if (!rc) rc = sl_preflight_memory(&p, c, err);
    sl_preflight_free(&p);
    free(c);
    free(t);
    return rc;
}

static int find_sluiced(char *out, size_t cap, sl_err *err) {
    static const char *const places[] = {"sluiced", "../daemon/sluiced"};
    char exe[PATH_MAX] = "";
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    if (n > 0) exe[n] = 0;
    char *slash = strrchr(exe, '/');
    if (slash) slash[1] = 0;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        snprintf(out, cap, "%s%s", exe, places[i]);
        if (!access(out, X_OK)) return SL_OK;
    }
    return sl_err_set(err, SL_ECONFIG, "the program sluiced was not found beside %s", exe);
}

static int start_daemon(run *r, sl_err *err) {
    char path[PATH_MAX + 32], *argv[2 * 160 + 2];
    int n = 0, rc = find_sluiced(path, sizeof path, err), parent = getpid();
    if (rc) return rc;
    argv[n++] = path;
    for (int i = 0; i < r->n_sets; i++) argv[n++] = "--set", argv[n++] = r->sets[i];
    argv[n] = NULL;
    snprintf(r->log_path, sizeof r->log_path, "%s/sluice.log", o.output);
    r->log_fd = open(r->log_path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (r->log_fd < 0) return sl_err_sys(err, SL_ETEMP, errno, "%s", r->log_path);
    r->log_at = (uint64_t)lseek(r->log_fd, 0, SEEK_END);
    r->pid = fork();
    if (r->pid < 0) return sl_err_sys(err, SL_ETEMP, errno, "starting sluiced");
    if (!r->pid) {
        setpgid(0, 0); /* a terminal's Ctrl-C is for this command, which decides */
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(75);
        unsetenv("JOURNAL_STREAM"), unsetenv("NOTIFY_SOCKET"), unsetenv("WATCHDOG_USEC");
        dup2(r->log_fd, 1), dup2(r->log_fd, 2);
        execv(path, argv);
        _exit(sl_file_code(errno) == SL_ETEMP ? 75 : 78);
    }
    r->pidfd = pidfd_open(r->pid, 0);
    r->exit_code = -1;
    return r->pidfd >= 0 ? SL_OK : sl_err_sys(err, SL_ETEMP, errno, "watching sluiced");
}

/* ---- what comes in while it runs ---- */

static void show_line(run *r, char *line) {
    char head[64];
    snprintf(head, sizeof head, "%.60s", line);
    bool error = strstr(head, " ERROR") != NULL, warn = strstr(head, " WARN") != NULL;
    /* A stage says why it cannot work, then sluiced that the stage ended: the end of the command repeats the cause. */
    bool cause = !strstr(head, " sluiced[") || !r->stage_error;
    if (error && cause) {
        const char *text = strchr(strstr(head, " ERROR") + 1, ' ');
        snprintf(r->last_error, sizeof r->last_error, "%.1000s", text ? line + (text + 1 - head) : line);
        r->stage_error = !strstr(head, " sluiced[");
    }
    if (!error && !warn && !o.verbose) return;
    sl_cli_progress_end(&r->bar);
    fprintf(stderr, "%s\n", line);
}

static void tail_log(run *r) {
    char buf[8192];
    for (;;) {
        ssize_t n = pread(r->log_fd, buf, sizeof buf - 1, (off_t)r->log_at);
        if (n <= 0) return;
        buf[n] = 0;
        char *line = buf, *end;
        for (; (end = memchr(line, '\n', (size_t)(buf + n - line))); line = end + 1) {
            *end = 0;
            show_line(r, line);
        }
        if (line == buf && n < (ssize_t)sizeof buf - 1) return;          /* an open line: wait for its end */
        r->log_at += line == buf ? (uint64_t)n : (uint64_t)(line - buf); /* (longer than the buffer: cut) */
    }
}

static void take_status(run *r) {
    msgpack_unpacked u;
    char t[16];
    while (sl_daemon_next(&r->status, 0, &u)) {
        if (strcmp(sl_status_str(&u.data, "t", t, sizeof t), "status")) {
            msgpack_unpacked_destroy(&u);
            continue;
        }
        if (r->has_status) msgpack_unpacked_destroy(&r->last);
        r->last = u, r->has_status = true;
        if (!r->ready_ns && !strcmp(sl_status_str(&u.data, "state", t, sizeof t), "running")) r->ready_ns = sl_now_ns();
    }
}

static void json_text(FILE *f, const char *s) {
    msgpack_object v = {.type = MSGPACK_OBJECT_STR, .via.str = {.size = (uint32_t)strlen(s), .ptr = s}};
    sl_status_json(&v, f);
}

static void on_reject(void *arg, const char *dataset, uint64_t row, uint32_t part, uint32_t parts, const char *reason,
                      const char *msg) {
    run *r = arg;
    char which[64] = "";
    bool one_of_many = parts == 1 && part != SL_FEED_PART_ANY && part > 0;
    if (one_of_many) snprintf(which, sizeof which, " part %u", part);
    if (parts > 1) snprintf(which, sizeof which, " %u parts", parts);
    sl_reasons_add(&r->reasons, reason, parts);
    r->n_rejected++;
    if (r->n_rejected <= 20) {
        sl_cli_progress_end(&r->bar);
        fprintf(stderr, "%s:%llu:%s rejected %s: %s\n", dataset, (unsigned long long)row + 1, which, reason, msg);
        if (r->n_rejected == 20) fputs("(further rejected rows are only listed in rejected.jsonl)\n", stderr);
    }
    if (!r->rejected) return;
    fputs("{\"dataset\":", r->rejected), json_text(r->rejected, dataset);
    fprintf(r->rejected, ",\"row\":%llu,\"line\":%llu,\"reason\":", (unsigned long long)row,
            (unsigned long long)row + 1);
    json_text(r->rejected, reason);
    if (part != SL_FEED_PART_ANY) fprintf(r->rejected, ",\"part\":%u", part);
    fprintf(r->rejected, ",\"parts\":%u", parts);
    fputs(",\"message\":", r->rejected), json_text(r->rejected, msg);
    fputs("}\n", r->rejected);
}

static int open_inputs(run *r, sl_err *err) {
    sl_pusher_opts po = {.addr = r->feed,
                         .client = "extract",
                         .spool = o.output,
                         .inputs = &r->inputs,
                         .limit = o.limit,
                         .shard = r->shard,
                         .shards = r->shards,
                         .on_reject = on_reject,
                         .arg = r};
    if (r->inputs.left_out)
        fprintf(stderr, "%d entries of the input folders are no files of rows and are left out\n", r->inputs.left_out);
    return sl_pusher_open(&r->push, &po, err);
}

static sl_feed_counts counts(const run *r) {
    return r->push ? sl_pusher_counts(r->push) : (sl_feed_counts){0};
}

/* Once every row is tokenized the size is known. */
static void say_estimate(run *r) {
    if (r->estimated || !r->has_status || !sl_pusher_answered(r->push)) return;
    const msgpack_object *m = &r->last.data;
    sl_feed_counts n = counts(r);
    if (sl_status_u64(m, "tokens.accepted") < r->before.accepted_tokens + n.tokens)
        return; /* the status is older than the answers */
    r->estimated = true;
    double tokens = sl_status_dbl(m, "tokens.accepted"), done = sl_status_dbl(m, "tokens.committed"),
           each = sl_status_dbl(m, "layout.token_bytes"), room = sl_status_dbl(m, "disk.free");
    /* Before anything is written: what real states gave, from below. */
    bool plain = (o.codec && !strcmp(o.codec, "none")) || (o.layout && !strcmp(o.layout, "files")),
         f32 = o.precision && !strcmp(o.precision, "f32");
    double ratio = sl_status_dbl(m, "bytes.ratio"), usual = plain                                          ? 1
                                                            : f32 || (o.codec && !strcmp(o.codec, "zstd")) ? 1.1
                                                                                                           : 1.45;
    double need = (tokens - done) * each / (ratio > 0 ? ratio : usual);
    char a[32], b[32], c[32], d[32];
    sl_cli_progress_end(&r->bar);
    fprintf(stderr, "%s tokens in %llu rows: %s of states, about %s still to be written, %s free\n",
            sl_cli_count(a, tokens), (unsigned long long)counts(r).rows, sl_cli_bytes(b, tokens * each),
            sl_cli_bytes(c, need), room > 0 ? sl_cli_bytes(d, room) : "?");
    if (room > 0 && need > room)
        fprintf(stderr, "WARNING: the disk has less room than that; the flow will wait when it is full\n");
}

static void draw(run *r) {
    char more[160] = "starting", a[32], b[32];
    sl_feed_counts k = counts(r);
    if (r->has_status) {
        const msgpack_object *m = &r->last.data, *st = sl_status_get(m, "stages");
        double load = 1;
        for (uint32_t i = 0; st && st->type == MSGPACK_OBJECT_ARRAY && i < st->via.array.size; i++) {
            const msgpack_object *l = sl_status_get(&st->via.array.ptr[i], "load");
            if (l && l->type == MSGPACK_OBJECT_FLOAT64 && l->via.f64 < load) load = l->via.f64;
        }
        if (load < 1 && !k.durable)
            snprintf(more, sizeof more, "loading weights %.0f%%", load * 100);
        else
            snprintf(more, sizeof more, "%s tok/s  %s%s", sl_cli_count(a, sl_status_dbl(m, "rate.tokens")),
                     sl_cli_bytes(b, sl_status_dbl(m, "bytes.stored")),
                     sl_status_u64(m, "disk.paused") ? "  PAUSED: disk full" : "");
    }
    sl_cli_progress_draw(&r->bar, k.durable + k.rejected, r->push && sl_pusher_read(r->push) ? k.rows : 0, more);
}

static void reap_daemon(run *r, bool wait) {
    siginfo_t si = {0};
    if (r->exit_code >= 0 || waitid(P_PIDFD, (id_t)r->pidfd, &si, WEXITED | (wait ? 0 : WNOHANG)) || !si.si_pid) return;
    r->exit_code = si.si_code == CLD_EXITED ? si.si_status : 128 + si.si_status;
    tail_log(r);
}

static int daemon_ended(run *r, sl_err *err) {
    int code = r->exit_code == 78   ? SL_ECONFIG
               : r->exit_code == 2  ? SL_EUSAGE
               : r->exit_code == 70 ? SL_EINTERNAL
                                    : SL_ETEMP;
    return sl_err_set(err, code, "sluiced ended early with status %d%s%s; the whole log is %s", r->exit_code,
                      r->last_error[0] ? ": " : "", r->last_error, r->log_path);
}

static void say_fault(run *r) {
    const char *fault = sl_pusher_fault(r->push);
    if (!fault || r->fault_said) return;
    r->fault_said = true;
    sl_cli_progress_end(&r->bar);
    fprintf(stderr, "ERROR: %s\n", fault);
}

/* Push until every row is durable or rejected, or somebody wants to stop. */
static int push_all(run *r, sl_err *err) {
    while (!signals && !sl_pusher_done(r->push)) {
        struct pollfd p[SL_PUSHER_OPEN + 2];
        int some = sl_pusher_turn(r->push, err);
        if (some < 0) return some;
        say_fault(r);
        take_status(r);
        tail_log(r);
        say_estimate(r);
        draw(r);
        reap_daemon(r, false);
        if (r->exit_code >= 0) return daemon_ended(r, err);
        int n = sl_pusher_fds(r->push, p);
        p[n++] = (struct pollfd){.fd = r->pidfd, .events = POLLIN};
        if (!some) poll(p, (nfds_t)n, 100);
    }
    return SL_OK;
}

/* Drain and wait; a second signal kills. */
static void stop_daemon(run *r) {
    bool killed = false;
    int seen = signals;
    if (r->exit_code >= 0 || r->pid <= 0) return;
    if (seen) fprintf(stderr, "\ndraining: rows that were accepted are finished first (again Ctrl-C: kill)\n");
    pidfd_send_signal(r->pidfd, SIGTERM, NULL, 0);
    while (r->exit_code < 0) {
        struct pollfd p = {.fd = r->pidfd, .events = POLLIN};
        poll(&p, 1, 200);
        if (signals > seen && !killed) killed = true, pidfd_send_signal(r->pidfd, SIGKILL, NULL, 0);
        take_status(r);
        tail_log(r);
        if (!killed) draw(r);
        reap_daemon(r, false);
    }
}

/* ---- the end ---- */

static int close_rejected(run *r, sl_err *err) {
    char path[1200];
    snprintf(path, sizeof path, "%s/rejected.jsonl", o.output);
    if (!r->rejected) return SL_OK;
    int bad = fclose(r->rejected);
    r->rejected = NULL;
    if (r->n_rejected)
        bad |= rename(r->rejected_tmp, path);
    else
        unlink(r->rejected_tmp), unlink(path);
    return bad ? sl_err_sys(err, SL_ETEMP, errno, "writing %s", path) : SL_OK;
}

static void summary_json(const run *r, const sl_feed_counts *k, double seconds, const sl_verify_report *v, bool ok) {
    const sl_status_totals *t = &r->after, *b = &r->before;
    printf("{\"ok\":%s,\"output\":", ok ? "true" : "false");
    json_text(stdout, o.output);
    printf(",\"rows\":%llu,\"written\":%llu,\"partly\":%llu,\"rejected\":%llu,\"left_out\":%llu,\"parts_written\":%llu,"
           "\"parts_rejected\":%llu,\"reasons\":{",
           (unsigned long long)k->rows, (unsigned long long)k->durable, (unsigned long long)k->partly,
           (unsigned long long)k->rejected, (unsigned long long)k->left_out, (unsigned long long)k->parts_written,
           (unsigned long long)k->parts_rejected);
    for (int i = 0; i < r->reasons.n; i++) {
        if (i) putchar(',');
        json_text(stdout, r->reasons.v[i].name);
        printf(":%llu", (unsigned long long)r->reasons.v[i].n);
    }
    printf("},\"truncated\":%llu,\"already_there\":%llu,\"store_rows\":%llu,\"tokens\":%llu,\"tokens_now\":%llu,"
           "\"seconds\":%.3f,\"tok_s\":%.1f,\"bytes_raw\":%llu,\"bytes_stored\":%llu,\"ratio\":%.4f,\"nll_mean\":",
           (unsigned long long)t->truncated, (unsigned long long)b->committed, (unsigned long long)t->committed,
           (unsigned long long)t->committed_tokens, (unsigned long long)(t->committed_tokens - b->committed_tokens),
           seconds, seconds > 0 ? (double)(t->committed_tokens - b->committed_tokens) / seconds : 0,
           (unsigned long long)t->raw, (unsigned long long)t->stored,
           t->stored ? (double)t->raw / (double)t->stored : 0);
    if (t->nll_rows)
        printf("%.6f", t->nll_sum / (double)t->nll_rows);
    else
        fputs("null", stdout);
    printf(",\"nll_rows\":%llu,\"verified\":%s,\"verify_faults\":%llu}\n", (unsigned long long)t->nll_rows,
           o.no_verify ? "false" : "true", (unsigned long long)v->n_faults);
}

static void summary_text(const run *r, const sl_feed_counts *k, double seconds, const sl_verify_report *v) {
    const sl_status_totals *t = &r->after, *b = &r->before;
    char c1[32], c2[32], c3[32];
    double fresh = (double)(t->committed_tokens - b->committed_tokens);
    printf("rows      %llu in the input: %llu written, %llu rejected", (unsigned long long)k->rows,
           (unsigned long long)k->durable, (unsigned long long)k->rejected);
    if (k->known) printf(" (%llu were known from an earlier run)", (unsigned long long)k->known);
    if (k->left_out) printf("; %llu are of other shards", (unsigned long long)k->left_out);
    if (k->partly || k->parts_written != k->durable)
        printf("\nparts     %llu of these rows: %llu written, %llu rejected; %llu rows are written in part",
               (unsigned long long)(k->parts_written + k->parts_rejected), (unsigned long long)k->parts_written,
               (unsigned long long)k->parts_rejected, (unsigned long long)k->partly);
    if (t->truncated)
        printf("\ncut       %llu of the store's rows are longer than max_length and were cut to it (--overlong)",
               (unsigned long long)t->truncated);
    printf("\ntokens    %llu in the store, %.0f of them now in %s: %s tok/s\n", (unsigned long long)t->committed_tokens,
           fresh, sl_cli_span(c1, seconds), sl_cli_count(c2, seconds > 0 ? fresh / seconds : 0));
    printf("size      %s of states, %s stored, ratio %.2f\n", sl_cli_bytes(c1, (double)t->raw),
           sl_cli_bytes(c3, (double)t->stored), t->stored ? (double)t->raw / (double)t->stored : 0);
    if (t->nll_rows)
        printf("nll       %.4f nats a token (teacher, %llu rows)\n", t->nll_sum / (double)t->nll_rows,
               (unsigned long long)t->nll_rows);
    if (o.no_verify)
        puts("verified  no (--no-verify)");
    else
        printf("verified  %llu rows read back and decoded: %llu faults, %llu notes\n", (unsigned long long)v->rows,
               (unsigned long long)v->n_faults, (unsigned long long)v->n_notes);
    printf("files     %s\n", o.output);
    for (int i = 0; i < r->reasons.n; i++)
        printf("rejected  %s %llu\n", r->reasons.v[i].name, (unsigned long long)r->reasons.v[i].n);
    if (k->parts_rejected) printf("list      %s/rejected.jsonl\n", o.output);
}

static void remove_run_dir(const run *r) {
    static const char *const names[] = {"feed.sock", "progress.sock", "control.sock", "sluiced.run", "sluiced.lock"};
    char path[400];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        snprintf(path, sizeof path, "%s/%s", r->run_dir, names[i]), unlink(path);
    rmdir(r->run_dir);
}

static int make_output(sl_err *err) {
    struct stat st;
    if (mkdir(o.output, 0777) && errno != EEXIST) return sl_err_sys(err, SL_EUSAGE, errno, "--output %s", o.output);
    if (!stat(o.output, &st) && !S_ISDIR(st.st_mode))
        return sl_err_set(err, SL_EUSAGE, "--output %s is a file; the store is a folder: give another name", o.output);
    if (!o.plan && access(o.output, W_OK | X_OK))
        return sl_err_sys(err, SL_ECONFIG, errno,
                          "--output %s: user %u cannot write there; choose another folder or "
                          "change its owner",
                          o.output, (unsigned)geteuid());
    return SL_OK;
}

static int setup(run *r, sl_err *err) {
    sl_status_at at = {0};
    int rc = sl_input_list_make(&r->inputs, o.input.v, o.input.n, o.dataset, err);
    if (!rc && o.shard) rc = sl_pusher_shard(o.shard, &r->shard, &r->shards, err);
    if (rc) return rc;
    rc = make_output(err);
    if (!rc) rc = make_run_dir(r, err);
    if (!rc) rc = make_settings(r, err);
    if (!rc) rc = check_settings(r, o.plan, err);
    if (rc || o.plan) return rc;
    if ((rc = sl_run_lock_extract(o.output, err)) < 0) return rc;
    rc = sl_status_totals_follow(&r->before, o.output, &at, err);
    if (rc) return rc;
    snprintf(r->rejected_tmp, sizeof r->rejected_tmp, "%s/.rejected.jsonl.tmp", o.output);
    r->rejected = fopen(r->rejected_tmp, "we");
    if (!r->rejected) return sl_err_sys(err, SL_ETEMP, errno, "%s", r->rejected_tmp);
    rc = open_inputs(r, err);
    if (!rc) rc = start_daemon(r, err);
    if (!rc) rc = sl_daemon_listen(&r->status, r->progress, err);
    return rc;
}

static void verify_progress(void *arg, uint64_t rows, uint64_t total) {
    sl_cli_progress_draw(arg, rows, total, "reading back");
}

static int verify(run *r, sl_verify_report *v, sl_err *err) {
    sl_verify_opts vo = {.deep = true, .progress = verify_progress, .arg = &r->bar};
    sl_cli_progress_start(&r->bar, "rows verified");
    int rc = sl_store_verify(o.output, &vo, v, err);
    sl_cli_progress_end(&r->bar);
    for (uint64_t i = 0; i < v->n_faults && i < SL_VERIFY_KEEP; i++) fprintf(stderr, "fault: %s\n", v->faults[i]);
    for (uint64_t i = 0; i < v->n_notes && i < SL_VERIFY_KEEP; i++) fprintf(stderr, "note: %s\n", v->notes[i]);
    return rc;
}

static int conclude(run *r, sl_err *err) {
    sl_feed_counts k = counts(r);
    sl_status_at at = {0};
    sl_verify_report v = {0};
    double seconds = r->ready_ns && r->end_ns > r->ready_ns ? (double)(r->end_ns - r->ready_ns) * 1e-9 : 0;
    int rc = sl_status_totals_follow(&r->after, o.output, &at, err);
    if (!rc && !o.no_verify) rc = verify(r, &v, err);
    if (!rc) {
        const char *fault = sl_pusher_fault(r->push);
        bool ok = !k.parts_rejected && !v.n_faults && !fault;
        if (o.json)
            summary_json(r, &k, seconds, &v, ok);
        else
            summary_text(r, &k, seconds, &v);
        if (!k.rows && !k.left_out) fputs("WARNING: the input has no rows (only empty lines, or none)\n", stderr);
        if (v.n_faults)
            rc = sl_err_set(err, SL_EDATA, "the store has %llu faults; they are listed above",
                            (unsigned long long)v.n_faults);
        else if (k.durable + k.rejected != k.rows)
            rc = sl_err_set(err, SL_EINTERNAL, "%llu rows were found, but %llu written and %llu rejected",
                            (unsigned long long)k.rows, (unsigned long long)k.durable, (unsigned long long)k.rejected);
        else if (fault)
            rc = sl_err_set(err, SL_EDATA, "%s", fault);
        else if (k.rejected)
            rc = sl_err_set(err, SL_EDATA, "%llu of %llu rows were rejected; the others are written",
                            (unsigned long long)k.rejected, (unsigned long long)k.rows);
        else if (k.parts_rejected)
            rc = sl_err_set(err, SL_EDATA, "%llu of %llu parts of the rows were rejected; the others are written",
                            (unsigned long long)k.parts_rejected,
                            (unsigned long long)(k.parts_rejected + k.parts_written));
    }
    sl_verify_free(&v);
    return rc;
}

int sl_cmd_extract(int argc, char **argv) {
    int n, rc = sl_cli_parse(&cli, argc, argv, &n);
    if (rc != SL_CLI_GO) return rc;
    static run r;
    sl_err err = {0}, err2 = {0};
    struct sigaction sa = {.sa_handler = on_signal};
    r.pidfd = r.log_fd = -1;
    sigaction(SIGINT, &sa, NULL);
    sigaction(SIGTERM, &sa, NULL);
    signal(SIGPIPE, SIG_IGN);
    rc = setup(&r, &err);
    if (o.plan) return rc ? sl_cli_fail(&err) : 0;
    sl_cli_progress_start(&r.bar, "rows");
    if (!rc) rc = push_all(&r, &err);
    r.end_ns = sl_now_ns();
    bool interrupted = signals != 0;
    if (r.pid > 0) stop_daemon(&r);
    sl_cli_progress_end(&r.bar);
    if (!rc && interrupted) rc = sl_err_set(&err, SL_ETEMP, "interrupted; run the same command again to go on");
    if (!rc && r.exit_code != 0 && r.exit_code != 1) rc = daemon_ended(&r, &err);
    int rc2 = close_rejected(&r, &err2);
    if (!rc) rc = rc2, err = rc2 ? err2 : err;
    if (!rc) rc = conclude(&r, &err);
    sl_pusher_close(r.push);
    sl_input_list_free(&r.inputs);
    sl_daemon_unlisten(&r.status);
    if (r.pid > 0) remove_run_dir(&r);
    err.code = rc;
    return rc ? sl_cli_fail(&err) : 0;
}
