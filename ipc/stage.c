/* The common start and end of every stage's main(); declared in ipc/boot.h. */
#include "ipc/boot.h"
#include "ipc/crash.h"
#include "ipc/log.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

static int parse_index(const char *s, long max, long *out) {
    char *end;
    errno = 0;
    long v = strtol(s, &end, 10);
    if (errno || end == s || *end || v < 0 || v > max) return SL_EUSAGE;
    *out = v;
    return 0;
}

static int parse_args(int argc, char **argv, long *fd, long *proc, sl_err *err) {
    *fd = *proc = -1;
    for (int i = 1; i + 1 < argc; i += 2) {
        long *to = !strcmp(argv[i], "--boot") ? fd : !strcmp(argv[i], "--proc") ? proc : NULL;
        if (!to || parse_index(argv[i + 1], to == fd ? 65535 : SL_MAX_PROCS - 1, to))
            return sl_err_set(err, SL_EUSAGE, "'%s %s' is not understood", argv[i], argv[i + 1]);
    }
    if (*fd < 0 || *proc < 0 || argc % 2 == 0)
        return sl_err_set(err, SL_EUSAGE, "usage: %s --boot FD --proc INDEX (started by sluiced, not by hand)",
                          argv[0]);
    return 0;
}

static void set_signals(void) {
    /* A stage must not outlive its supervisor: nobody would restart it and a second set may be started. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT); /* a terminal's ^C reaches every process; only sluiced acts on it */
    sigprocmask(SIG_BLOCK, &set, NULL);
    signal(SIGTERM, SIG_IGN); /* drain comes through ctl */
    signal(SIGPIPE, SIG_IGN);
}

int sl_stage_open(sl_stage *s, int argc, char **argv, sl_role expect, sl_err *err) {
    memset(s, 0, sizeof *s);
    s->bell = -1;
    long fd, proc;
    int rc = parse_args(argc, argv, &fd, &proc, err);
    if (rc) return rc;
    set_signals();
    if ((rc = sl_boot_attach(&s->boot, (int)fd, err))) return rc;
    if ((uint32_t)proc >= s->boot->n_procs || s->boot->procs[proc].role != (uint32_t)expect)
        return sl_err_set(err, SL_EINTERNAL, "process %ld of %u is no %s", proc, s->boot->n_procs,
                          sl_role_name(expect));
    s->proc = (unsigned)proc;
    s->me = &s->boot->procs[proc];
    s->bell = s->me->bell_fd;
    sl_log_init(s->me->name, (sl_level)s->boot->log_level);
    if (fcntl(s->bell, F_GETFD) < 0) return sl_err_sys(err, SL_EINTERNAL, errno, "bell fd %d", s->bell);
    if ((rc = sl_metrics_attach(&s->metrics, s->boot->metrics_fd, (int)proc, err))) return rc;
    if ((rc = sl_ctl_attach(&s->ctl, s->boot->ctl_fd, s->boot->dp, 0, err))) return rc;
    sl_metric_reset(s->metrics);
    sl_metric_set(s->metrics, SL_M_STATE, SL_ST_BOOT);
    sl_crash_init(s->boot, sl_role_name(expect));
    return 0;
}

int sl_stage_fail(sl_stage *s, const sl_err *err) {
    sl_log(SL_ERROR, "%s", err->msg);
    sl_log_flush();
    if (s && s->metrics) sl_metric_set(s->metrics, SL_M_STATE, SL_ST_FAILED);
    return sl_err_exit(err->code ? err->code : SL_EINTERNAL);
}
