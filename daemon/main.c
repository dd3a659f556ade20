/* sluiced: configuration -> preflight -> shared memory -> stages -> watch -> drain. The steps, in this order, are the
 * functions below; each object has its manual in its header. */
#include "daemon/bootinfo.h"
#include "daemon/control.h"
#include "daemon/notify.h"
#include "ipc/log.h"
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <unistd.h>

typedef struct daemon_state { /* the one context of this process */
    sl_config cfg;
    sl_preflight pf;
    sl_topo topo;
    sl_super super;
    sl_status status;
    sl_control control;
    sl_run_record record;
    int lock_fd, signal_fd;
    bool ready, drain_said;
} daemon_state;

static void usage(FILE *f) {
    fputs(
        "NAME\n    sluiced - the daemon that runs the pipeline and watches it\n\n"
        "SYNOPSIS\n    sluiced --config FILE [--set SECTION.KEY=VALUE]...\n"
        "    sluiced --check [--config FILE] [--set ...]\n    sluiced --print-default-config | --print-config\n\n"
        "DESCRIPTION\n"
        "    Reads the configuration (strictly: an unknown key is an error that names the nearest one), checks the\n"
        "    machine and the model, makes the shared memory, starts sluice-feeder, sluice-compute, sluice-gather and\n"
        "    sluice-writer, and restarts what dies. SIGTERM or SIGINT drains: everything accepted is finished first; "
        "a\n"
        "    second one kills, which is always safe: starting again goes on from the two logs in the store.\n\n"
        "OPTIONS\n"
        "    --config FILE\n        INI file; see --print-default-config for every key with its unit and meaning.\n"
        "    --set SECTION.KEY=VALUE\n        Override one key; may be repeated.\n"
        "    --check\n        Check the machine and the configuration, print each result with a remedy, start "
        "nothing.\n"
        "    --print-default-config\n        Print the default configuration file with its comments.\n"
        "    --print-config\n        Print the configuration after --config and --set.\n"
        "    --version, -h, --help\n\n"
        "EXIT STATUS\n    0 drained; 1 drained, but rows were rejected; 2 wrong use; 70 a bug; 75 temporary (a stage "
        "keeps\n"
        "    dying, the store is in use, killed); 78 the configuration or the model cannot work.\n",
        f);
}

typedef enum { RUN, CHECK, PRINT_DEFAULT, PRINT } action;

/* The exit code to leave with, or -1. */
static int parse_args(daemon_state *d, int argc, char **argv, action *what, sl_err *err) {
    static const struct option opts[] = {
        {"config", 1, 0, 'c'},       {"set", 1, 0, 's'},     {"check", 0, 0, 'k'}, {"print-default-config", 0, 0, 'd'},
        {"print-config", 0, 0, 'p'}, {"version", 0, 0, 'v'}, {"help", 0, 0, 'h'},  {0}};
    const char *sets[256];
    int n_sets = 0, o, rc = 0;
    bool config = false;
    *what = RUN;
    sl_config_default(&d->cfg);
    while ((o = getopt_long(argc, argv, "c:s:h", opts, NULL)) != -1) {
        switch (o) {
        case 'c':
            rc = sl_config_read(&d->cfg, optarg, err), config = true;
            break;
        case 's':
            if (n_sets == 256)
                rc = sl_err_set(err, SL_EUSAGE, "more than 256 --set");
            else
                sets[n_sets++] = optarg;
            break;
        case 'k':
            *what = CHECK;
            break;
        case 'd':
            *what = PRINT_DEFAULT;
            break;
        case 'p':
            *what = PRINT;
            break;
        case 'v':
            puts("sluiced " SL_VERSION);
            return 0;
        case 'h':
            usage(stdout);
            return 0;
        default:
            fputs("Try 'sluiced --help'.\n", stderr);
            return 2;
        }
        if (rc) return fprintf(stderr, "sluiced: %s\n", err->msg), sl_err_exit(rc);
    }
    if (optind < argc)
        return fprintf(stderr, "sluiced: unexpected argument '%s'\nTry 'sluiced --help'.\n", argv[optind]), 2;
    for (int i = 0; i < n_sets; i++) /* after the file, wherever they stand */
        if ((rc = sl_config_set(&d->cfg, sets[i], err)))
            return fprintf(stderr, "sluiced: %s\n", err->msg), sl_err_exit(rc);
    if (*what == RUN && !config && !n_sets) return usage(stderr), 2;
    return -1;
}

static int check_all(const sl_config *c) {
    sl_check k[32];
    int n = sl_preflight_checks(c, k, 32), bad = 0;
    for (int i = 0; i < n; i++) {
        printf("%-10s %-4s  %s\n", k[i].name, sl_check_state_name(k[i].state), k[i].found);
        if (k[i].remedy[0]) printf("%17s-> %s\n", "", k[i].remedy);
        bad += k[i].state == SL_CHECK_FAIL;
    }
    return bad ? 78 : 0;
}

static void log_plan(daemon_state *d) {
    char *text = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&text, &n);
    if (!f) return;
    sl_preflight_print(&d->pf, &d->cfg, f);
    fclose(f);
    for (char *line = text, *end; *line; line = end + 1) {
        if (!(end = strchr(line, '\n'))) break;
        *end = 0;
        sl_log(SL_INFO, "plan: %s", line);
    }
    free(text);
    if (*d->pf.spec->unknown)
        sl_log(SL_WARN, "model: config.json has keys that are not known and were not used: %s; remedy: %s",
               d->pf.spec->unknown, SL_UNKNOWN_KEYS_REMEDY);
    if (d->pf.spec->max_pos > 0 && d->cfg.boot.max_length > d->pf.spec->max_pos)
        sl_log(SL_WARN,
               "model: rows may have %u tokens (max_length), the model was made for %lld positions: states beyond are "
               "what "
               "the formulas give, not what was trained",
               d->cfg.boot.max_length, (long long)d->pf.spec->max_pos);
}

static int log_checks(daemon_state *d, sl_err *err) {
    sl_check k[32];
    int n = sl_preflight_checks(&d->cfg, k, 32);
    for (int i = 0; i < n; i++) {
        if (!strcmp(k[i].name, "model")) continue; /* resolve has done that */
        if (k[i].state == SL_CHECK_WARN) sl_log(SL_WARN, "%s: %s; remedy: %s", k[i].name, k[i].found, k[i].remedy);
        if (k[i].state == SL_CHECK_FAIL)
            return sl_err_set(err, SL_ECONFIG, "%s: %s; remedy: %s", k[i].name, k[i].found, k[i].remedy);
    }
    return SL_OK;
}

static int block_signals(sl_err *err) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM), sigaddset(&set, SIGINT), sigaddset(&set, SIGHUP);
    sigprocmask(SIG_BLOCK, &set, NULL);
    signal(SIGPIPE, SIG_IGN);
    int fd = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
    return fd >= 0 ? fd : sl_err_sys(err, SL_ETEMP, errno, "signalfd");
}

static int publish_record(daemon_state *d, sl_err *err) {
    const sl_boot *b = &d->cfg.boot;
    sl_run_record *r = &d->record;
    r->run_id = b->run_id;
    snprintf(r->feed, sizeof r->feed, "%s", b->feed_addr);
    snprintf(r->progress, sizeof r->progress, "%s", b->sock_progress);
    snprintf(r->control, sizeof r->control, "%s", b->sock_control);
    snprintf(r->store, sizeof r->store, "%s", b->store);
    snprintf(r->model, sizeof r->model, "%s", b->model);
    return sl_run_publish(r, d->cfg.run_dir, err);
}

/* The check before the start only sees that the pool is not empty. */
static void say_pages(const daemon_state *d) {
    uint64_t small = 0, all = 0;
    for (unsigned i = 0; i < d->topo.n_obj; i++) {
        const sl_topo_obj *o = &d->topo.obj[i];
        if (o->kind != SL_OBJ_CHUNK) continue;
        all += o->bytes;
        small += o->huge ? 0 : o->bytes;
    }
    if (d->cfg.hugepages && small)
        sl_log(
            SL_WARN,
            "hugepages: the rings of states need %llu pages of 2 MiB, for %llu of them the pool has no room: ordinary "
            "pages, which cost some speed; remedy: sysctl vm.nr_hugepages=N",
            (unsigned long long)((all >> 21) + 1), (unsigned long long)((small >> 21) + 1));
}

/* Everything up to running stages. */
static int boot(daemon_state *d, sl_err *err) {
    int rc = sl_preflight_resolve(&d->pf, &d->cfg, &d->topo, err);
    if (rc == SL_EDATA) rc = err->code = SL_ECONFIG; /* a damaged model: starting again will not help */
    if (rc) return rc;
    log_plan(d);
    if ((rc = sl_preflight_memory(&d->pf, &d->cfg, err))) return rc;
    if ((d->lock_fd = sl_run_lock(d->cfg.boot.store, err)) < 0) return d->lock_fd;
    if ((rc = sl_preflight_sockets(&d->cfg, err))) return rc;
    if ((rc = sl_run_lock_sockets(d->cfg.run_dir, d->cfg.boot.store, err))) return rc;
    if ((rc = log_checks(d, err))) return rc;
    if (getrandom(&d->cfg.boot.run_id, sizeof d->cfg.boot.run_id, 0) < 0) d->cfg.boot.run_id = sl_now_ns();
    if ((rc = sl_topo_create(&d->topo, d->cfg.hugepages, err))) return rc;
    say_pages(d);
    if ((rc = sl_status_open(&d->status, &d->cfg, &d->pf, &d->topo, &d->super, err))) return rc;
    if ((rc = sl_control_open(&d->control, &d->cfg, err))) return rc;
    if ((rc = publish_record(d, err))) return rc;
    return sl_super_start(&d->super, &d->cfg, &d->topo, err);
}

static void handle_signals(daemon_state *d) {
    struct signalfd_siginfo si;
    while (read(d->signal_fd, &si, sizeof si) == (ssize_t)sizeof si) {
        const char *name = si.ssi_signo == SIGTERM ? "SIGTERM" : si.ssi_signo == SIGINT ? "SIGINT" : "SIGHUP";
        if (!d->super.draining) {
            char why[64];
            snprintf(why, sizeof why, "%s from pid %u", name, si.ssi_pid);
            sl_super_drain(&d->super, why);
        } else {
            sl_super_event_add(&d->super, SL_WARN, "sluiced", "second %s: killing the stages", name);
            sl_super_kill(&d->super, "killed by a second signal; starting again goes on from the logs");
        }
    }
}

static void say_state(daemon_state *d) {
    if (!d->ready && sl_super_ready(&d->super)) {
        d->ready = true;
        sl_log(SL_INFO, "ready: feed %s", d->cfg.boot.feed_addr);
        sl_notify("READY=1\nSTATUS=running");
    }
    if (d->super.draining && !d->drain_said) d->drain_said = true, sl_notify("STOPPING=1\nSTATUS=draining");
    d->status.state = d->super.draining ? "draining" : d->ready ? "running" : "booting";
}

static int turn_timeout(const daemon_state *d, uint64_t now) {
    int t = sl_super_timeout(&d->super, now);
    int s = (int)d->cfg.status_ms;
    return t < s ? t : s;
}

/* Runs until every stage has ended: 0, or the error that ended it. */
static int watch(daemon_state *d, sl_err *err) {
    uint64_t dog = sl_notify_watchdog_ns(), dog_ns = 0, status_ns = 0;
    int control_fd = sl_control_fd(&d->control);
    struct pollfd fds[SL_MAX_PROCS + 2];
    for (;;) {
        int n = sl_super_pollfds(&d->super, fds, SL_MAX_PROCS);
        fds[n] = (struct pollfd){.fd = d->signal_fd, .events = POLLIN};
        fds[n + 1] = (struct pollfd){.fd = control_fd, .events = POLLIN};
        poll(fds, (nfds_t)n + 2, turn_timeout(d, sl_now_ns()));
        uint64_t now = sl_now_ns();
        handle_signals(d);
        int rc = sl_super_step(&d->super, now, err);
        say_state(d);
        if (now - status_ns >= d->cfg.status_ms * 1000000ull) {
            sl_err e = {0};
            status_ns = now;
            if (sl_status_update(&d->status, now, &e)) sl_log(SL_ERROR, "status: %s", e.msg);
            sl_metric_beat(d->topo.metrics);
        }
        sl_control_serve(&d->control, &d->status);
        if (d->control.drain_asked) sl_super_drain(&d->super, "asked for on the control socket");
        sl_control_publish(&d->control, &d->status, now);
        if (dog && now - dog_ns >= dog) dog_ns = now, sl_notify("WATCHDOG=1");
        if (rc <= 0) return rc;
    }
}

static int finish(daemon_state *d, int rc, sl_err *err) {
    sl_err e = {0};
    if (d->status.cfg && !sl_status_update(&d->status, sl_now_ns(), &e)) {
        const sl_status_totals *n = &d->status.now;
        uint64_t bad = sl_status_bad_rows(&d->status);
        sl_log(
            bad ? SL_WARN : SL_INFO,
            "%s: rows accepted=%llu committed=%llu rejected=%llu refused=%llu (in this life rejected or refused=%llu)",
            rc ? "stopped" : "drained", (unsigned long long)n->accepted, (unsigned long long)n->committed,
            (unsigned long long)n->rejected, (unsigned long long)n->refused, (unsigned long long)bad);
        if (!rc && n->accepted > n->committed + n->rejected)
            rc = sl_err_set(err, SL_EINTERNAL,
                            "all stages ended, but %llu accepted rows are neither committed nor rejected",
                            (unsigned long long)(n->accepted - n->committed - n->rejected));
        else if (!rc && bad)
            rc = sl_err_set(err, SL_EDATA, "%llu rows were rejected", (unsigned long long)bad);
    }
    if (d->control.pub) {
        d->status.state = rc == 0 || rc == SL_EDATA ? "done" : "failed";
        d->control.published_ns = 0;
        sl_control_publish(&d->control, &d->status, sl_now_ns());
    }
    if (rc) sl_log(rc == SL_EDATA ? SL_WARN : SL_ERROR, "%s", err->msg);
    sl_notify("STOPPING=1\nSTATUS=%.200s", rc ? err->msg : "drained");
    if (d->record.magic) sl_run_withdraw(&d->record, d->cfg.run_dir);
    sl_control_close(&d->control);
    sl_topo_destroy(&d->topo);
    sl_preflight_free(&d->pf);
    return sl_err_exit(rc);
}

int main(int argc, char **argv) {
    static daemon_state d; /* large, and zero at start */
    sl_err err = {0};
    action what;
    int rc = parse_args(&d, argc, argv, &what, &err);
    if (rc >= 0) return rc;
    if (what == PRINT_DEFAULT || what == PRINT) return sl_config_print(what == PRINT ? &d.cfg : NULL, stdout), 0;
    if (what == CHECK) return check_all(&d.cfg);
    sl_log_init("sluiced", (sl_level)d.cfg.boot.log_level);
    d.lock_fd = -1;
    if ((d.signal_fd = block_signals(&err)) < 0) return fprintf(stderr, "sluiced: %s\n", err.msg), 75;
    rc = boot(&d, &err);
    if (!rc) rc = watch(&d, &err);
    return finish(&d, rc, &err);
}
