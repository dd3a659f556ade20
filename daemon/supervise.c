#include "daemon/supervise.h"
#include "ipc/doorbell.h"
#include "ipc/file.h"
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define TICK_NS 1000000000ull
#define MS      1000000ull

static const struct {
    const char *program, *folder;
} stages[SL_ROLE_N] = {
    [SL_ROLE_FEEDER] = {"sluice-feeder", "feeder"},
    [SL_ROLE_RANK] = {"sluice-compute", "compute"},
    [SL_ROLE_GATHER] = {"sluice-gather", "gather"},
    [SL_ROLE_WRITER] = {"sluice-writer", "writer"},
};

const char *sl_domain_state_name(sl_domain_state s) {
    static const char *const names[] = {"wait", "running", "killing", "done"};
    return (unsigned)s < 4 ? names[s] : "?";
}

void sl_super_event_add(sl_super *s, sl_level lv, const char *who, const char *fmt, ...) {
    struct timespec ts;
    sl_super_event *e = &s->event[s->n_events++ % SL_SUPER_EVENTS];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(e->msg, sizeof e->msg, fmt, ap);
    va_end(ap);
    clock_gettime(CLOCK_REALTIME, &ts);
    e->time_ns = (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
    e->level = lv;
    snprintf(e->who, sizeof e->who, "%s", who);
    sl_log(lv, "%s: %s", who, e->msg);
}

/* ---- start ---- */

int sl_supervise_stage_path(const sl_config *c, sl_role role, char *out, size_t cap, sl_err *err) {
    char exe[SL_PATH_MAX] = "", tried[1500] = "";
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    if (n > 0) exe[n] = 0;
    char *slash = strrchr(exe, '/');
    if (slash) *slash = 0;
    for (int i = 0; i < 5; i++) {
        int len = -1;
        const char *p = stages[role].program;
        switch (i) {
        case 0:
            len = c->stage_dir[0] ? snprintf(out, cap, "%s/%s", c->stage_dir, p) : -1;
            break;
        case 1:
            len = snprintf(out, cap, "%s/%s", exe, p);
            break;
        case 2:
            len = snprintf(out, cap, "%s/../stages/%s/%s", exe, stages[role].folder, p);
            break;
        case 3:
            len = snprintf(out, cap, "%s/../libexec/sluice/%s", exe, p);
            break;
        case 4:
            len = snprintf(out, cap, "%s/../lib/sluice/%s", exe, p);
            break;
        }
        if (len < 0 || (size_t)len >= cap) continue;
        if (!access(out, X_OK)) return SL_OK;
        size_t at = strlen(tried);
        snprintf(tried + at, sizeof tried - at, "%s%s", at ? ", " : "", out);
        if (c->stage_dir[0]) break; /* a named folder is the only place */
    }
    return sl_err_set(err, SL_ECONFIG, "the program %s was not found (tried %s)", stages[role].program, tried);
}

/* In the child, between fork and exec: only async-signal-safe calls. */
static void child(const sl_super *s, unsigned p, char *const argv[], const int *fds, int n_fds, const cpu_set_t *cpus,
                  int parent) {
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(75);
    int null = open("/dev/null", O_RDONLY);
    if (null >= 0) dup2(null, 0);
    if (null > 2) close(null);
    dup2(2, 1); /* stdout is data, and a stage has none */
    for (int i = 0; i < n_fds; i++) fcntl(fds[i], F_SETFD, 0);
    if (cpus) sched_setaffinity(0, sizeof *cpus, cpus);
    (void)s, (void)p;
    execv(argv[0], argv);
    int status = sl_file_code(errno) == SL_ETEMP ? 75 : 78; /* what passes is a death like others */
    static const char msg[] = "sluiced: exec of a stage program failed\n";
    if (write(2, msg, sizeof msg - 1) < 0) _exit(status);
    _exit(status);
}

/* Ranks get consecutive slices of the processors this daemon may use. */
static bool pick_cpus(const sl_super *s, unsigned p, cpu_set_t *out) {
    const sl_boot *b = s->topo->boot;
    cpu_set_t all;
    if (!s->cfg->pin_cpus || b->procs[p].role != SL_ROLE_RANK || sched_getaffinity(0, sizeof all, &all)) return false;
    int have = CPU_COUNT(&all), ranks = (int)(b->dp * b->tp), each = ranks ? have / ranks : 0, seen = 0;
    int first = (int)(p - SL_PROC_RANKS) * each;
    CPU_ZERO(out);
    for (int c = 0; each && c < CPU_SETSIZE; c++) {
        if (!CPU_ISSET(c, &all)) continue;
        if (seen >= first && seen < first + each) CPU_SET(c, out);
        seen++;
    }
    return each > 0;
}

static int spawn(sl_super *s, unsigned p, uint64_t now, sl_err *err) {
    sl_super_proc *sp = &s->proc[p];
    const sl_boot_proc *bp = &s->topo->boot->procs[p];
    char path[SL_PATH_MAX], fd_arg[16], proc_arg[16];
    int fds[SL_TOPO_MAX], n, parent = getpid();
    cpu_set_t cpus;
    int rc = sl_supervise_stage_path(s->cfg, (sl_role)bp->role, path, sizeof path, err);
    if (rc) return rc;
    n = sl_topo_fds(s->topo, p, fds, SL_TOPO_MAX);
    bool pin = pick_cpus(s, p, &cpus);
    snprintf(fd_arg, sizeof fd_arg, "%d", sl_topo_boot_fd(s->topo));
    snprintf(proc_arg, sizeof proc_arg, "%u", p);
    char *argv[] = {path, "--boot", fd_arg, "--proc", proc_arg, NULL};
    int pid = fork();
    if (pid < 0) return sl_err_sys(err, SL_ETEMP, errno, "starting %s", bp->name);
    if (!pid) child(s, p, argv, fds, n, pin ? &cpus : NULL, parent);
    sp->pid = sp->life = pid;
    sp->pidfd = pidfd_open(pid, 0);
    if (sp->pidfd < 0) {
        rc = sl_err_sys(err, SL_ETEMP, errno, "watching %s", bp->name);
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        sp->pid = 0;
        return rc;
    }
    if (sp->started_ns) sp->restarts++;
    sp->started_ns = sp->beat_ns = now;
    sp->beat = 0, sp->warned = sp->done = false;
    sl_log(SL_INFO, "%s started pid=%d", bp->name, pid);
    return SL_OK;
}

/* Ranks may have left something in the rings under the old epoch. Only when every one of them has been reaped. */
static uint32_t new_epoch(const sl_super *s, const sl_super_domain *d) {
    return d->group >= 0 ? atomic_fetch_add(&s->topo->ctl[1 + d->group].epoch, 1) + 1 : 0;
}

static uint64_t backoff_ms(const sl_config *c, unsigned times) {
    uint64_t wait = c->backoff_min_ms;
    for (unsigned i = 1; i < times && wait < c->backoff_max_ms; i++) wait *= 2;
    return wait > c->backoff_max_ms ? c->backoff_max_ms : wait;
}

/* No process, memory or descriptor for one process of the domain. Nobody died, so that costs nothing of the budget:
 * what runs of the domain is ended, and all of it is started anew until that works. ran: some process of it did
 * begin. */
static void put_off(sl_super *s, sl_super_domain *d, uint64_t now, bool ran, const char *why) {
    uint64_t wait = backoff_ms(s->cfg, ++d->put_off);
    bool empty = true;
    if (!(d->put_off & (d->put_off - 1)))
        sl_super_event_add(s, SL_WARN, d->name, "cannot be started: %s; it is tried again until it works (try %u)", why,
                           d->put_off);
    for (unsigned p = d->first; p < d->first + d->n; p++) {
        if (s->proc[p].pidfd < 0) continue;
        pidfd_send_signal(s->proc[p].pidfd, SIGKILL, NULL, 0);
        empty = false;
    }
    d->restart_at_ns = now + wait * MS;
    d->state = empty ? SL_DOM_WAIT : SL_DOM_KILLING;
    d->unstarted = !empty;
    if (empty && ran) new_epoch(s, d);
}

static int start_domain(sl_super *s, sl_super_domain *d, uint64_t now, sl_err *err) {
    for (unsigned p = d->first; p < d->first + d->n; p++) {
        int before = s->proc[p].life, rc = spawn(s, p, now, err);
        if (rc == SL_ETEMP) {
            put_off(s, d, now, s->proc[p].life != before, err->msg);
            return SL_OK;
        }
        if (rc) return rc;
    }
    if (d->put_off) sl_super_event_add(s, SL_INFO, d->name, "started at try %u", d->put_off + 1);
    d->put_off = 0;
    d->state = SL_DOM_RUNNING;
    return SL_OK;
}

static void add_domain(sl_super *s, const char *name, unsigned first, unsigned n, int group) {
    sl_super_domain *d = &s->dom[s->n_dom++];
    *d = (sl_super_domain){.first = first, .n = n, .group = group, .state = SL_DOM_WAIT};
    snprintf(d->name, sizeof d->name, "%s", name);
}

int sl_super_start(sl_super *s, const sl_config *cfg, sl_topo *topo, sl_err *err) {
    const sl_boot *b = topo->boot;
    memset(s, 0, sizeof *s);
    s->cfg = cfg, s->topo = topo;
    for (unsigned p = 0; p < SL_MAX_PROCS; p++) s->proc[p].pidfd = -1;
    add_domain(s, "writer", SL_PROC_WRITER, 1,
               -1); /* from the end of the flow, so that nothing is made before it can go on */
    add_domain(s, "gather", SL_PROC_GATHER, 1, -1);
    for (uint32_t g = 0; g < b->dp; g++) {
        char name[32];
        snprintf(name, sizeof name, "group%u", g);
        add_domain(s, name, b->groups[g].first_rank_proc, b->tp, (int)g);
    }
    add_domain(s, "feeder", SL_PROC_FEEDER, 1, -1);
    for (unsigned i = 0; i < s->n_dom; i++) {
        int rc = start_domain(s, &s->dom[i], sl_now_ns(), err);
        if (rc) {
            sl_super_kill(s, "start failed");
            return rc;
        }
    }
    return SL_OK;
}

/* ---- progress and the group rule ---- */

static void ring_all(const sl_super *s) {
    for (unsigned p = 1; p < s->topo->boot->n_procs; p++) sl_bell_ring(s->topo->boot->procs[p].bell_fd);
}

static const sl_ring *batch_ring(const sl_super *s, uint32_t g) {
    const sl_topo_obj *o = sl_topo_find(s->topo, SL_OBJ_BATCH, g, 0);
    return o ? o->view : NULL;
}

static uint64_t progress_of(const sl_super *s, const sl_super_domain *d) {
    if (d->group >= 0) return sl_ring_pos(batch_ring(s, (uint32_t)d->group), SL_BATCH_GATHERED);
    unsigned cursor = d->first == SL_PROC_FEEDER   ? SL_BATCH_PUBLISHED
                      : d->first == SL_PROC_GATHER ? SL_BATCH_GATHERED
                                                   : SL_BATCH_RELEASED;
    uint64_t sum = 0;
    for (uint32_t g = 0; g < s->topo->boot->dp; g++) sum += sl_ring_pos(batch_ring(s, g), cursor);
    return sum;
}

/* Had a rank of the group come as far as computing in the life that has just ended? */
static bool was_computing(const sl_super *s, const sl_super_domain *d) {
    const sl_metrics *m = s->topo->metrics;
    for (unsigned p = d->first; p < d->first + d->n; p++) {
        uint64_t st = sl_metric_get(m, p, SL_M_STATE);
        if (sl_metric_get(m, p, SL_M_PID) == (uint64_t)s->proc[p].life && st != SL_ST_BOOT && st != SL_ST_LOADING)
            return true;
    }
    return false;
}

/* 1 + the row that the ranks ran alone when they died, 0: none. Every rank had ended the rows before the highest. */
static uint32_t row_at_death(const sl_super *s, const sl_super_domain *d) {
    const sl_metrics *m = s->topo->metrics;
    uint64_t most = 0;
    for (unsigned p = d->first; p < d->first + d->n; p++) {
        uint64_t row = sl_metric_get(m, p, SL_M_ROW_AT);
        if (sl_metric_get(m, p, SL_M_PID) == (uint64_t)s->proc[p].life && row > most) most = row;
    }
    return most > UINT32_MAX ? 0 : (uint32_t)most;
}

/* Find the one row that kills among the rows of the batch at position g, which was there at the last death too. */
static void isolate(sl_super *s, sl_super_domain *d, uint64_t g, uint32_t rows, unsigned deaths) {
    sl_ctl_page *ctl = &s->topo->ctl[1 + d->group];
    if (rows > SL_ISOLATE_ROWS) return;
    if (atomic_load(&ctl->isolate_bpos) != g + 1) {
        for (unsigned i = 0; i < SL_ISOLATE_ROWS / 64; i++) atomic_store(&ctl->poison_rows[i], 0);
        atomic_store(&ctl->isolate_bpos, g + 1);
        d->death_row = 0;
        sl_super_event_add(
            s, SL_WARN, d->name,
            "batch position %llu (%u rows) was being computed at two deaths in a row: its rows run one by "
            "one first",
            (unsigned long long)g, rows);
        return;
    }
    uint32_t row = row_at_death(s, d);
    if (row && row <= rows && row == d->death_row) {
        _Atomic uint64_t *word = &ctl->poison_rows[(row - 1) / 64];
        atomic_store(word, atomic_load(word) | 1ull << ((row - 1) % 64));
        sl_super_event_add(
            s, SL_ERROR, d->name,
            "row %u of batch position %llu killed the group twice when it ran alone: rejected as POISON; "
            "the other %u rows go on",
            row - 1, (unsigned long long)g, rows - 1);
        row = 0;
        d->named_at = deaths;
    }
    d->death_row = row;
}

/* What to think of the batch at position g, which was next to be gathered when the group died for the deaths-th time.
 */
static void judge(sl_super *s, sl_super_domain *d, const sl_ring *r, uint64_t g, unsigned deaths) {
    sl_ctl_page *ctl = &s->topo->ctl[1 + d->group];
    const sl_desc *desc = sl_ring_at(r, g);
    uint32_t rows = desc && desc->h.kind == SL_DESC_INPUT ? ((const sl_desc_input *)(const void *)desc)->n_rows : 0;
    uint32_t limit = rows == 1 ? 2 : s->cfg->poison_deaths;
    if (deaths <= d->named_at || d->death_pos != g) d->named_at = 0;
    if (rows && limit && deaths - d->named_at >= limit && d->death_pos == g &&
        atomic_load(&ctl->poison_bpos) != g + 1) {
        atomic_store(&ctl->poison_bpos, g + 1);
        sl_super_event_add(
            s, rows == 1 ? SL_WARN : SL_ERROR, d->name,
            "batch position %llu (%u row%s) was being computed at %u deaths in a row: rejected as POISON",
            (unsigned long long)g, rows, rows == 1 ? "" : "s, all of them", deaths);
    }
    if (deaths >= 2 && !atomic_load(&ctl->suspect)) {
        atomic_store(&ctl->suspect, 1);
        sl_super_event_add(s, SL_WARN, d->name, "suspect: %u deaths while computing without a batch gathered", deaths);
    }
    if (rows > 1 && deaths >= 2 && d->death_pos == g) isolate(s, d, g, rows, deaths);
    d->death_pos = g;
}

static void group_died(sl_super *s, sl_super_domain *d, bool progress) {
    sl_ctl_page *ctl = &s->topo->ctl[1 + d->group];
    const sl_ring *r = batch_ring(s, (uint32_t)d->group);
    uint64_t g = sl_ring_pos(r, SL_BATCH_GATHERED), pub = sl_ring_pos(r, SL_BATCH_PUBLISHED);
    unsigned deaths = progress ? 0 : atomic_load(&ctl->deaths);
    if (g < pub && was_computing(s, d)) judge(s, d, r, g, ++deaths);
    d->suspect_until = pub;
    atomic_store(&ctl->deaths, deaths);
    uint32_t epoch = new_epoch(s, d);
    sl_super_event_add(s, SL_INFO, d->name, "epoch %u: ranks go on at batch position %llu", epoch,
                       (unsigned long long)g);
}

/* A suspect group that got past everything it was suspected of is an ordinary one again. */
static void clear_suspects(sl_super *s) {
    for (unsigned i = 0; i < s->n_dom; i++) {
        sl_super_domain *d = &s->dom[i];
        if (d->group < 0) continue;
        sl_ctl_page *ctl = &s->topo->ctl[1 + d->group];
        uint64_t g = sl_ring_pos(batch_ring(s, (uint32_t)d->group), SL_BATCH_GATHERED);
        if (atomic_load(&ctl->deaths) && g > d->death_pos) atomic_store(&ctl->deaths, 0);
        if (!atomic_load(&ctl->suspect) || g < d->suspect_until) continue;
        atomic_store(&ctl->suspect, 0);
        sl_super_event_add(s, SL_INFO, d->name, "no longer suspect: everything that was in flight has been gathered");
        ring_all(s);
    }
}

/* ---- death ---- */

static void fail(sl_super *s, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static void fail(sl_super *s, int code, const char *fmt, ...) {
    if (s->fail_code) return; /* the first reason is the one to tell */
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(s->fail_msg, sizeof s->fail_msg, fmt, ap);
    va_end(ap);
    s->fail_code = code;
}

/* All processes of the domain are reaped. */
static void domain_died(sl_super *s, sl_super_domain *d, uint64_t now) {
    const sl_config *c = s->cfg;
    uint64_t at = progress_of(s, d);
    bool progress = at != d->progress;
    d->progress = at;
    if (progress || now - d->window_ns > c->restart_window_ms * MS) d->budget_used = d->deaths = 0, d->window_ns = now;
    d->deaths++, d->budget_used++;
    if (d->group >= 0) group_died(s, d, progress);
    if (d->budget_used > c->restart_budget) {
        fail(s, SL_ETEMP,
             "%s died %u times within %u s without progress ([supervise] restarts = %u); the reasons are in the "
             "log above. What is committed is safe; starting again goes on from there",
             d->name, d->budget_used, c->restart_window_ms / 1000, c->restart_budget);
        return;
    }
    uint64_t wait = backoff_ms(c, d->deaths);
    d->restart_at_ns = now + wait * MS;
    d->state = SL_DOM_WAIT;
    sl_super_event_add(s, SL_INFO, d->name, "restart in %llu ms (death %u without progress, %u of %u in the window)",
                       (unsigned long long)wait, d->deaths, d->budget_used, c->restart_budget);
    ring_all(s);
}

static const char *how_it_ended(const siginfo_t *si, char *buf, size_t cap) {
    if (si->si_code == CLD_EXITED)
        snprintf(buf, cap, "exited with status %d", si->si_status);
    else
        snprintf(buf, cap, "killed by SIG%s%s", sigabbrev_np(si->si_status) ? sigabbrev_np(si->si_status) : "?",
                 si->si_code == CLD_DUMPED ? " (core dumped)" : "");
    return buf;
}

static void proc_ended(sl_super *s, sl_super_domain *d, unsigned p, const siginfo_t *si) {
    sl_super_proc *sp = &s->proc[p];
    const char *name = s->topo->boot->procs[p].name;
    char how[64];
    int code = si->si_code == CLD_EXITED ? si->si_status : -1;
    how_it_ended(si, how, sizeof how);
    int pid = sp->pid;
    close(sp->pidfd);
    sp->pid = 0, sp->pidfd = -1;
    if (d->state == SL_DOM_KILLING || s->killing) {
        sl_log(SL_INFO, "%s[%d] %s with its domain", name, pid, how);
        return;
    }
    if (s->draining && code == 0) {
        sp->done = true;
        sl_log(SL_INFO, "%s[%d] has finished", name, pid);
        ring_all(s); /* whoever comes after it in the flow may be waiting for just this */
        return;
    }
    if (code == 78 || code == 2) {
        sl_super_event_add(s, SL_ERROR, name, "pid %d %s: a restart cannot help", pid, how);
        fail(s, code == 2 ? SL_EUSAGE : SL_ECONFIG, "%s refused to run (%s); its message is in the log above", name,
             how);
        return;
    }
    sl_super_event_add(s, SL_WARN, name, "pid %d %s%s", pid, how, s->draining ? " while draining" : "");
    d->state = SL_DOM_KILLING;
    for (unsigned q = d->first; q < d->first + d->n; q++)
        if (s->proc[q].pidfd >= 0) pidfd_send_signal(s->proc[q].pidfd, SIGKILL, NULL, 0);
}

/* Reap what has ended; true when the domain has no process left. */
static bool reap(sl_super *s, sl_super_domain *d) {
    bool empty = true;
    for (unsigned p = d->first; p < d->first + d->n; p++) {
        siginfo_t si = {0};
        if (s->proc[p].pidfd < 0) continue;
        if (!waitid(P_PIDFD, (id_t)s->proc[p].pidfd, &si, WEXITED | WNOHANG) && si.si_pid)
            proc_ended(s, d, p, &si);
        else
            empty = false;
    }
    return empty;
}

/* ---- watchdog ---- */

static uint64_t patience(const sl_super *s, unsigned p) {
    const sl_metrics *m = s->topo->metrics;
    uint64_t st = sl_metric_get(m, p, SL_M_STATE);
    bool fresh = sl_metric_get(m, p, SL_M_PID) != (uint64_t)s->proc[p].pid;
    if (fresh || st == SL_ST_BOOT || st == SL_ST_LOADING) return s->cfg->watchdog_load_ms * MS;
    return (s->topo->boot->procs[p].role == SL_ROLE_RANK ? s->cfg->watchdog_rank_ms : s->cfg->watchdog_ms) * MS;
}

static void watch(sl_super *s, unsigned p, uint64_t now) {
    sl_super_proc *sp = &s->proc[p];
    if (sp->pidfd < 0) return;
    uint64_t beat = sl_metric_get(s->topo->metrics, p, SL_M_HEARTBEAT), limit = patience(s, p);
    if (beat != sp->beat) {
        sp->beat = beat, sp->beat_ns = now, sp->warned = false;
        return;
    }
    const char *name = s->topo->boot->procs[p].name;
    double still = (double)(now - sp->beat_ns) * 1e-9;
    if (now - sp->beat_ns > limit) {
        sl_super_event_add(s, SL_WARN, name, "pid %d: no heartbeat for %.1f s (limit %.1f s): killed", sp->pid, still,
                           (double)limit * 1e-9);
        pidfd_send_signal(sp->pidfd, SIGKILL, NULL, 0);
        sp->beat_ns = now;
    } else if (now - sp->beat_ns > limit / 2 && !sp->warned) {
        sp->warned = true;
        sl_super_event_add(s, SL_WARN, name, "pid %d: no heartbeat for %.1f s, state %s", sp->pid, still,
                           sl_stage_state_name(sl_metric_get(s->topo->metrics, p, SL_M_STATE)));
    }
}

/* ---- the turn ---- */

int sl_super_pollfds(const sl_super *s, struct pollfd *fds, int max) {
    int n = 0;
    for (unsigned p = 1; p < s->topo->boot->n_procs && n < max; p++)
        if (s->proc[p].pidfd >= 0) fds[n++] = (struct pollfd){.fd = s->proc[p].pidfd, .events = POLLIN};
    return n;
}

static uint64_t tick_ns(const sl_super *s) { /* a short watchdog (tests) needs a short tick */
    uint64_t t = s->cfg->watchdog_ms * MS / 4;
    return t < TICK_NS ? t : TICK_NS;
}

int sl_super_timeout(const sl_super *s, uint64_t now) {
    uint64_t next = s->last_tick_ns + tick_ns(s);
    for (unsigned i = 0; i < s->n_dom; i++)
        if (s->dom[i].state == SL_DOM_WAIT && s->dom[i].restart_at_ns < next) next = s->dom[i].restart_at_ns;
    return next <= now ? 0 : (int)((next - now + MS - 1) / MS);
}

static void step_domain(sl_super *s, sl_super_domain *d, uint64_t now) {
    sl_err e = {0};
    if (d->state == SL_DOM_DONE) return;
    if (d->state == SL_DOM_WAIT) {
        if (now < d->restart_at_ns) return;
        int rc = start_domain(s, d, now, &e);
        if (rc) fail(s, rc, "%s", e.msg);
        return;
    }
    if (!reap(s, d) || s->fail_code) return;
    if (d->state == SL_DOM_KILLING && d->unstarted) {
        d->state = SL_DOM_WAIT, d->unstarted = false;
        new_epoch(s, d);
    } else if (d->state == SL_DOM_KILLING)
        domain_died(s, d, now);
    else
        d->state = SL_DOM_DONE; /* every one exited 0 while draining */
}

int sl_super_step(sl_super *s, uint64_t now, sl_err *err) {
    unsigned done = 0;
    for (unsigned i = 0; i < s->n_dom && !s->fail_code; i++) {
        step_domain(s, &s->dom[i], now);
        done += s->dom[i].state == SL_DOM_DONE;
    }
    if (!s->fail_code && now - s->last_tick_ns >= tick_ns(s)) {
        s->last_tick_ns = now;
        for (unsigned p = 1; p < s->topo->boot->n_procs; p++) watch(s, p, now);
        ring_all(s);
    }
    if (!s->fail_code) clear_suspects(s);
    if (s->fail_code) {
        sl_super_kill(s, s->fail_msg);
        return sl_err_set(err, s->fail_code, "%s", s->fail_msg);
    }
    return done < s->n_dom;
}

void sl_super_drain(sl_super *s, const char *why) {
    if (s->draining) return;
    s->draining = true;
    sl_super_event_add(s, SL_INFO, "sluiced", "draining: %s", why);
    atomic_store(&s->topo->ctl[0].draining, 1);
    ring_all(s);
}

void sl_super_kill(sl_super *s, const char *why) {
    fail(s, SL_ETEMP, "%s", why);
    s->killing = true;
    for (unsigned p = 1; p < SL_MAX_PROCS; p++)
        if (s->proc[p].pidfd >= 0) pidfd_send_signal(s->proc[p].pidfd, SIGKILL, NULL, 0);
    for (unsigned p = 1; p < SL_MAX_PROCS; p++) {
        siginfo_t si = {0};
        if (s->proc[p].pidfd < 0) continue;
        while (waitid(P_PIDFD, (id_t)s->proc[p].pidfd, &si, WEXITED) && errno == EINTR)
            ;
        close(s->proc[p].pidfd);
        s->proc[p].pid = 0, s->proc[p].pidfd = -1;
    }
}

bool sl_super_ready(const sl_super *s) {
    for (unsigned p = 1; p < s->topo->boot->n_procs; p++) {
        uint64_t st = sl_metric_get(s->topo->metrics, p, SL_M_STATE);
        if (s->proc[p].pidfd < 0 || sl_metric_get(s->topo->metrics, p, SL_M_PID) != (uint64_t)s->proc[p].pid ||
            st == SL_ST_BOOT || st == SL_ST_LOADING || st == SL_ST_FAILED)
            return false;
    }
    return true;
}
