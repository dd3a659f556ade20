/* sluice push: rows from files or stdin to a running service. */
#include "tools/cli.h"
#include "tools/commands.h"
#include "tools/daemon_client.h"
#include "tools/feed_client.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct {
    const char *to, *at, *dataset, *wait, *curve;
    bool json;
} o = {.wait = "durable"};

static const sl_cli_opt opts[] = {
    {"to", 0, SL_CLI_STR, "ADDRESS",
     "Feed socket of the service (ipc://... or tcp://...). Default: found from the run record.", &o.to},
    {"at", 0, SL_CLI_STR, "DIR", "Run folder or store of the service, when it is not in the usual place.", &o.at},
    {"dataset", 'd', SL_CLI_STR, "NAME",
     "Name of the data set. Default: the file's name without its folder. Rows are identified by data set and line, so "
     "pushing the same file twice is harmless.",
     &o.dataset},
    {"wait", 0, SL_CLI_CHOICE, "accepted|durable",
     "Return when the rows are journaled by the service (accepted), or when their states are on disk (durable, the "
     "default).",
     &o.wait},
    {"curve", 0, SL_CLI_STR, "DIR", "CURVE keys for tcp://: server.pub, client.pub, client.secret.", &o.curve},
    {"json", 0, SL_CLI_FLAG, NULL, "Print one JSON object about the push on stdout; rejected rows are in it.", &o.json},
    {0}};

static const sl_cli cli = {
    "sluice push",
    "[FILE...]",
    "send rows to a running service",
    "Sends every line of the files (JSONL; standard input when there is none, or for '-') as a row: input_ids with an "
    "optional loss_mask, text, or messages/conversations. Lines go out as they stand and are judged by the service: "
    "one that "
    "cannot be used is rejected by name and the others go on. Row number = line number - 1; blank lines keep their "
    "number.\n\n"
    "If the service restarts, rows that were not answered are sent again; nothing is lost and nothing is taken twice.",
    "    sluice push train.jsonl\n    zcat big.jsonl.gz | sluice push --dataset big --wait accepted\n",
    opts,
    0,
    SL_CLI_MANY};

typedef struct refusals {
    FILE *json; /* the open JSON array, or NULL */
    uint64_t n;
} refusals;

static void on_reject(void *arg, const char *dataset, uint64_t row, const char *reason, const char *msg) {
    refusals *r = arg;
    fprintf(stderr, "%s:%llu: rejected %s: %s\n", dataset, (unsigned long long)row + 1, reason, msg);
    r->n++;
}

static volatile sig_atomic_t stopped;
static void on_signal(int sig) {
    stopped = sig;
}

/* Standard input may be endless and cannot be read twice: it is spooled to an unnamed file. */
static int spool_open(void) {
    const char *tmp = getenv("TMPDIR");
    return open(tmp && *tmp ? tmp : "/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
}

/* Move what is there from stdin to the spool; false at its end. */
static bool spool_more(int spool, int wait_ms, sl_err *err, int *rc) {
    static char buf[1 << 16];
    struct pollfd p = {.fd = 0, .events = POLLIN};
    if (poll(&p, 1, wait_ms) <= 0) return true;
    ssize_t n = read(0, buf, sizeof buf);
    if (n < 0 && errno == EINTR) return true;
    if (n < 0) *rc = sl_err_sys(err, SL_EDATA, errno, "reading standard input");
    for (ssize_t at = 0; at < n;) {
        ssize_t w = write(spool, buf + at, (size_t)(n - at));
        if (w < 0 && errno != EINTR) {
            *rc = sl_err_sys(err, SL_ETEMP, errno, "spooling standard input");
            return false;
        }
        if (w > 0) at += w;
    }
    return n > 0;
}

static int push_one(const char *addr, const char *file, const char *dataset, refusals *bad, sl_feed_counts *sum,
                    sl_err *err) {
    bool from_stdin = !strcmp(file, "-"), open_end = from_stdin, durable = !strcmp(o.wait, "durable");
    int fd = from_stdin ? spool_open() : open(file, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return sl_err_sys(err, SL_EUSAGE, errno, "%s", from_stdin ? "a spool file for standard input" : file);
    sl_feed_opts fo = {
        .addr = addr, .dataset = dataset, .client = "push", .curve_dir = o.curve, .on_reject = on_reject, .arg = bad};
    sl_feed_client *c = NULL;
    sl_cli_progress bar;
    int rc = sl_feed_client_open(&c, &fo, fd, err);
    if (!rc && !from_stdin) rc = sl_feed_client_scan(c, true, err), sl_feed_client_flush(c);
    sl_cli_progress_start(&bar, "rows");
    while (!rc && !stopped) {
        if (open_end) {
            open_end = spool_more(fd, sl_feed_client_counts(c)->waiting ? 0 : 100, err, &rc);
            if (!rc) rc = sl_feed_client_scan(c, !open_end, err);
            if (!open_end) sl_feed_client_flush(c);
            if (rc) break;
        }
        int got = sl_feed_client_turn(c, open_end ? 0 : 200, err);
        if (got < 0) rc = got;
        const sl_feed_counts *k = sl_feed_client_counts(c);
        sl_cli_progress_draw(&bar, durable ? k->durable + k->rejected : k->rows - k->waiting - k->sent, k->rows, NULL);
        if (!open_end && (durable ? sl_feed_client_durable(c) : sl_feed_client_answered(c))) break;
        if (!rc && sl_feed_client_refused(c) && k->waiting)
            rc = sl_err_set(err, SL_ETEMP,
                            "the service is draining and took %llu of %llu rows; push again when it is back",
                            (unsigned long long)(k->rows - k->waiting - k->sent), (unsigned long long)k->rows);
    }
    sl_cli_progress_end(&bar);
    if (!rc && stopped)
        rc = sl_err_set(err, SL_ETEMP, "interrupted; what was accepted stays accepted, push again for the rest");
    if (c) {
        const sl_feed_counts *k = sl_feed_client_counts(c);
        sum->rows += k->rows, sum->durable += k->durable, sum->accepted += k->accepted, sum->rejected += k->rejected;
        sum->known += k->known, sum->tokens += k->tokens, sum->reconnects += k->reconnects;
    }
    sl_feed_client_close(c);
    close(fd);
    return rc;
}

int sl_cmd_push(int argc, char **argv) {
    int n, rc = sl_cli_parse(&cli, argc, argv, &n);
    if (rc != SL_CLI_GO) return rc;
    sl_err err = {0};
    sl_run_record rec;
    char *dash[] = {NULL, "-", NULL}, **files = n ? argv : dash;
    if (!n) n = 1;
    if (!o.to && sl_daemon_find(o.at, &rec, &err)) return sl_cli_fail(&err);
    struct sigaction sa = {.sa_handler = on_signal};
    sigaction(SIGINT, &sa, NULL);
    sigaction(SIGTERM, &sa, NULL);
    refusals bad = {0};
    sl_feed_counts sum = {0};
    rc = SL_OK;
    for (int i = 1; i <= n && !rc; i++) {
        const char *slash = strrchr(files[i], '/'), *name = o.dataset                ? o.dataset
                                                            : !strcmp(files[i], "-") ? "stdin"
                                                            : slash                  ? slash + 1
                                                                                     : files[i];
        rc = push_one(o.to ? o.to : rec.feed, files[i], name, &bad, &sum, &err);
    }
    if (o.json)
        printf("{\"rows\":%llu,\"durable\":%llu,\"accepted\":%llu,\"rejected\":%llu,\"known\":%llu,\"tokens\":%llu,"
               "\"reconnects\":%llu,\"ok\":%s}\n",
               (unsigned long long)sum.rows, (unsigned long long)sum.durable,
               (unsigned long long)(sum.accepted + sum.durable), (unsigned long long)sum.rejected,
               (unsigned long long)sum.known, (unsigned long long)sum.tokens, (unsigned long long)sum.reconnects,
               rc || sum.rejected ? "false" : "true");
    else
        fprintf(stderr, "%llu rows: %llu durable, %llu accepted and still computed, %llu rejected (%llu were known)\n",
                (unsigned long long)sum.rows, (unsigned long long)sum.durable, (unsigned long long)sum.accepted,
                (unsigned long long)sum.rejected, (unsigned long long)sum.known);
    if (rc) return sl_cli_fail(&err);
    return sum.rejected ? 1 : 0;
}
