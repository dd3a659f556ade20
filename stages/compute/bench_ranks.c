#include "stages/compute/bench_ranks.h"
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct child { /* in memory that parent and children share; the result lies behind */
    sl_err err;
    int rc, done;
    _Alignas(64) uint8_t result[];
} child;

typedef struct crew {
    int n, started;
    pid_t pid[SL_BENCH_RANKS];
    uint8_t *base;
    uint64_t step, bytes;
} crew;

static child *child_of(const crew *c, int i) {
    return (child *)(c->base + (uint64_t)i * c->step);
}
static void kill_all(crew *c) {
    for (int i = 0; i < c->started; i++)
        if (c->pid[i] > 0) kill(c->pid[i], SIGKILL);
}

static void reap(crew *c) {
    for (int left = c->started; left > 0;) {
        int status, i = 0;
        pid_t p = waitpid(-1, &status, 0);
        if (p < 0 && errno == EINTR) continue;
        if (p < 0) return;
        while (i < c->started && c->pid[i] != p) i++;
        if (i == c->started) continue;
        left--;
        c->pid[i] = 0;
        child *m = child_of(c, i);
        if (m->done && !m->rc) continue;
        if (!m->done)
            m->rc = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL
                        ? sl_err_set(&m->err, SL_ETEMP, "its process was killed")
                        : sl_err_set(&m->err, SL_EINTERNAL, "its process ended with wait status %d", status);
        kill_all(c);
    }
}

static int start(crew *c, sl_bench_rank *fn, void *arg, sl_err *err) {
    fflush(NULL); /* or the children would write it again */
    for (int i = 0; i < c->n; i++) {
        pid_t p = fork();
        if (!p) {
            prctl(PR_SET_PDEATHSIG, SIGKILL); /* nobody is left behind on the GPUs */
            child *m = child_of(c, i);
            m->rc = fn(arg, i, m->result, &m->err);
            m->done = 1;
            fflush(NULL);
            _exit(0);
        }
        if (p < 0) {
            kill_all(c);
            return sl_err_sys(err, SL_ETEMP, errno, "starting rank %d", i);
        }
        c->pid[c->started++] = p;
    }
    return 0;
}

int sl_bench_ranks_run(int n, sl_bench_rank *fn, void *arg, void *results, uint64_t bytes, sl_err *err) {
    crew c = {.n = n, .step = (sizeof(child) + bytes + 63) / 64 * 64};
    if (n < 1 || n > SL_BENCH_RANKS)
        return sl_err_set(err, SL_EUSAGE, "a group of %d ranks (1..%d)", n, SL_BENCH_RANKS);
    c.bytes = (uint64_t)n * c.step;
    c.base = mmap(NULL, c.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (c.base == MAP_FAILED) return sl_err_sys(err, SL_ETEMP, errno, "memory for the results of %d ranks", n);
    int rc = start(&c, fn, arg, err), best = -1;
    reap(&c);
    for (int i = 0; i < n && !rc; i++) {
        int code = child_of(&c, i)->rc;
        if (code && (best < 0 || (child_of(&c, best)->rc == SL_ETEMP && code != SL_ETEMP))) best = i;
        memcpy((uint8_t *)results + (uint64_t)i * bytes, child_of(&c, i)->result, bytes);
    }
    if (best >= 0) rc = sl_err_set(err, child_of(&c, best)->rc, "rank %d: %s", best, child_of(&c, best)->err.msg);
    munmap(c.base, c.bytes);
    return rc;
}
