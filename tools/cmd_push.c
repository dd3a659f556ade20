/* sluice push: rows from files or stdin to a running service. */
#include "tools/cli.h"
#include "tools/commands.h"
#include "tools/daemon_client.h"
#include "tools/pusher.h"
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

static struct {
    const char *to, *at, *dataset, *wait, *curve, *shard;
    uint64_t limit, patience;
    bool json;
} o = {.wait = "durable", .patience = 600000};

static const sl_cli_opt opts[] = {
    {"to", 0, SL_CLI_STR, "ADDRESS",
     "Feed socket of the service (ipc://... or tcp://...). Default: found from the run record.", &o.to},
    {"at", 0, SL_CLI_STR, "DIR", "Run folder or store of the service, when it is not in the usual place.", &o.at},
    {"dataset", 'd', SL_CLI_STR, "NAME",
     "Name of the data set (one file only). Default: the file's name without its folder and without .gz or .zst; "
     "FOLDER/FILE for the files of a folder; stdin. Rows are identified by data set and line, so pushing the same file "
     "twice is harmless.",
     &o.dataset},
    {"limit", 0, SL_CLI_U64, "N", "Send only the first N rows (of all files together, in order).", &o.limit, 1, 9e18},
    {"shard", 0, SL_CLI_STR, "I/N", "Send only every N-th row, from line I on (I from 1 to N, in each file).",
     &o.shard},
    {"wait", 0, SL_CLI_CHOICE, "accepted|durable",
     "Return when the rows are journaled by the service (accepted), or when their states are on disk (durable, the "
     "default).",
     &o.wait},
    {"patience", 0, SL_CLI_MS, "TIME", "Give up (status 75) when the service is not heard for this long. Default 10m.",
     &o.patience, 1000, 9e15},
    {"curve", 0, SL_CLI_STR, "DIR", "CURVE keys for tcp://: server.pub, client.pub, client.secret.", &o.curve},
    {"json", 0, SL_CLI_FLAG, NULL, "Print one JSON object about the push on stdout; rejected rows are in it.", &o.json},
    {0}};

static const sl_cli cli = {
    "sluice push",
    "[FILE|DIR|-]...",
    "send rows to a running service",
    "Sends every line of the files (JSONL, plain or compressed with gzip or zstd; a folder stands for its *.jsonl, "
    "*.ndjson and *.json files in the order of their names; standard input when there is none, or for '-') as a row: "
    "input_ids with an optional loss_mask, text, or messages/conversations. Lines go out as they stand and are judged "
    "by "
    "the service: one that cannot be used is rejected by name and the others go on. Row number = line number - 1; "
    "blank "
    "lines keep their number. How rows become tokens (template, masks, max_length) is the service's configuration.\n\n"
    "If the service restarts, or is not there yet, rows that were not answered wait and are sent again, with a warning "
    "when that takes longer than 5 s; nothing is lost and nothing is taken twice.",
    "    sluice push train.jsonl more.jsonl.zst\n    sluice push --shard 1/4 ./chats/\n    generate | sluice push "
    "--dataset made --wait accepted\n",
    opts,
    0,
    SL_CLI_MANY};

static void on_reject(void *arg, const char *dataset, uint64_t row, uint32_t part, uint32_t parts, const char *reason,
                      const char *msg) {
    char which[64] = "";
    if (parts == 1 && part != SL_FEED_PART_ANY && part > 0) snprintf(which, sizeof which, " part %u", part);
    if (parts > 1) snprintf(which, sizeof which, " %u parts", parts);
    fprintf(stderr, "%s:%llu:%s rejected %s: %s\n", dataset, (unsigned long long)row + 1, which, reason, msg);
    sl_reasons_add(arg, reason, parts);
}

static volatile sig_atomic_t stopped;
static void on_signal(int sig) {
    stopped = sig;
}

/* Nobody is to sit before a command that says nothing and waits. */
static int heard(sl_pusher *p, const char *addr, bool *warned, sl_err *err) {
    uint64_t ms = sl_pusher_silent_ms(p);
    char a[32], b[32];
    if (ms < 5000) {
        *warned = false;
        return SL_OK;
    }
    sl_cli_span(a, (double)ms / 1e3), sl_cli_span(b, (double)o.patience / 1e3);
    if (ms >= o.patience)
        return sl_err_set(err, SL_ETEMP,
                          "no answer from %s for %s (--patience): is the service running? 'sluice status' "
                          "says; push again when it is",
                          addr, a);
    if (!*warned) fprintf(stderr, "WARNING: no answer from %s for %s; waiting for up to %s\n", addr, a, b);
    *warned = true;
    return SL_OK;
}

static int push_all(sl_pusher *p, const char *addr, sl_err *err) {
    bool durable = !strcmp(o.wait, "durable");
    sl_cli_progress bar;
    bool warned = false;
    int rc = SL_OK;
    sl_cli_progress_start(&bar, "rows");
    while (!stopped && !sl_pusher_done(p)) {
        struct pollfd fds[SL_PUSHER_OPEN + 1];
        if ((rc = sl_pusher_turn(p, err)) < 0) break;
        sl_feed_counts k = sl_pusher_counts(p);
        sl_cli_progress_draw(&bar, durable ? k.durable + k.rejected : k.rows - k.waiting - k.sent,
                             sl_pusher_read(p) ? k.rows : 0, NULL);
        if (sl_pusher_refused(p)) {
            rc = sl_err_set(err, SL_ETEMP,
                            "the service is draining and took %llu of %llu rows; push again when it is back",
                            (unsigned long long)(k.rows - k.waiting - k.sent), (unsigned long long)k.rows);
            break;
        }
        if (!rc) poll(fds, (nfds_t)sl_pusher_fds(p, fds), 100);
        if ((rc = heard(p, addr, &warned, err)) < 0) break;
    }
    sl_cli_progress_end(&bar);
    if (rc < 0) return rc;
    if (stopped)
        return sl_err_set(err, SL_ETEMP, "interrupted; what was accepted stays accepted, push again for the rest");
    const char *fault = sl_pusher_fault(p);
    return fault ? sl_err_set(err, SL_EDATA, "%s", fault) : SL_OK;
}

static void say_result(const sl_feed_counts *k, const sl_reasons *bad, bool ok) {
    if (!o.json) {
        fprintf(stderr, "%llu rows: %llu durable, %llu accepted and still computed, %llu rejected (%llu were known)\n",
                (unsigned long long)k->rows, (unsigned long long)k->durable, (unsigned long long)k->accepted,
                (unsigned long long)k->rejected, (unsigned long long)k->known);
        if (k->parts_rejected > k->rejected)
            fprintf(stderr, "%llu parts of rows rejected; %llu rows are written in part\n",
                    (unsigned long long)k->parts_rejected, (unsigned long long)k->partly);
        return;
    }
    printf("{\"rows\":%llu,\"durable\":%llu,\"accepted\":%llu,\"rejected\":%llu,\"known\":%llu,\"tokens\":%llu,"
           "\"left_out\":%llu,\"partly\":%llu,\"parts_written\":%llu,\"parts_rejected\":%llu,\"reasons\":{",
           (unsigned long long)k->rows, (unsigned long long)k->durable, (unsigned long long)(k->accepted + k->durable),
           (unsigned long long)k->rejected, (unsigned long long)k->known, (unsigned long long)k->tokens,
           (unsigned long long)k->left_out, (unsigned long long)k->partly, (unsigned long long)k->parts_written,
           (unsigned long long)k->parts_rejected);
    for (int i = 0; i < bad->n; i++)
        printf("%s\"%s\":%llu", i ? "," : "", bad->v[i].name, (unsigned long long)bad->v[i].n);
    printf("},\"reconnects\":%llu,\"ok\":%s}\n", (unsigned long long)k->reconnects, ok ? "true" : "false");
}

int sl_cmd_push(int argc, char **argv) {
    int n, rc = sl_cli_parse(&cli, argc, argv, &n);
    if (rc != SL_CLI_GO) return rc;
    sl_err err = {0};
    sl_run_record rec;
    const char *const dash[] = {"-"}, *const *files = n ? (const char *const *)argv + 1 : dash;
    sl_input_list inputs;
    sl_reasons bad = {0};
    sl_pusher_opts po = {.addr = o.to,
                         .client = "push",
                         .curve_dir = o.curve,
                         .inputs = &inputs,
                         .limit = o.limit,
                         .accepted = strcmp(o.wait, "durable") != 0,
                         .on_reject = on_reject,
                         .arg = &bad};
    rc = sl_input_list_make(&inputs, files, n ? n : 1, o.dataset, &err);
    if (!rc && o.shard) rc = sl_pusher_shard(o.shard, &po.shard, &po.shards, &err);
    if (!rc && !o.to) {
        rc = sl_daemon_find(o.at, &rec, &err);
        po.addr = rec.feed;
    }
    sl_pusher *p = NULL;
    if (!rc && !strncmp(po.addr, "ipc://", 6) && access(po.addr + 6, W_OK) && errno == EACCES)
        rc = sl_err_set(&err, SL_ECONFIG,
                        "%s: user %u may not use this socket: be the service's user or in its [daemon] socket_group",
                        po.addr, (unsigned)geteuid());
    if (!rc) rc = sl_pusher_open(&p, &po, &err);
    if (rc) {
        sl_input_list_free(&inputs);
        return sl_cli_fail(&err);
    }
    if (inputs.left_out)
        fprintf(stderr, "%d entries of the folders are no files of rows and are left out\n", inputs.left_out);
    struct sigaction sa = {.sa_handler = on_signal};
    sigaction(SIGINT, &sa, NULL);
    sigaction(SIGTERM, &sa, NULL);
    rc = push_all(p, po.addr, &err);
    sl_feed_counts k = sl_pusher_counts(p);
    say_result(&k, &bad, !rc && !k.parts_rejected);
    sl_pusher_close(p);
    sl_input_list_free(&inputs);
    if (rc) return sl_cli_fail(&err);
    return k.parts_rejected ? 1 : 0;
}
