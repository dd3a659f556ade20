#include "ipc/crash.h"
#include "ipc/boot.h"
#include "ipc/log.h"
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_POINTS 16

/* This process's crash context; empty unless a test asked. */
static struct {
    unsigned n;
    char dir[SL_PATH_MAX + 16];
    struct {
        char name[48];
        unsigned count;
        atomic_uint passed;
    } at[MAX_POINTS];
} ctx;

void sl_crash_init(const sl_boot *b, const char *role) {
    ctx.n = 0;
    if (!b->crash_points[0]) return;
    snprintf(ctx.dir, sizeof ctx.dir, "%s/.crash", b->store);
    char list[sizeof b->crash_points], *save = NULL;
    memcpy(list, b->crash_points, sizeof list);
    list[sizeof list - 1] = 0;
    for (char *w = strtok_r(list, ", ", &save); w && ctx.n < MAX_POINTS; w = strtok_r(NULL, ", ", &save)) {
        char *colon = strchr(w, ':');
        long count = colon ? strtol(colon + 1, NULL, 10) : 1;
        if (colon) *colon = 0;
        if (strlen(w) >= sizeof ctx.at[0].name || !*w || count < 1 || count > 1000000000 || strchr(w, '/')) {
            sl_log(SL_WARN, "crash point '%s' is not understood and will not fire", w);
            continue;
        }
        snprintf(ctx.at[ctx.n].name, sizeof ctx.at[0].name, "%s", w);
        ctx.at[ctx.n].count = (unsigned)count;
        atomic_store(&ctx.at[ctx.n++].passed, 0);
    }
    sl_log(SL_WARN, "%s runs with crash points '%s': this is a test", role, b->crash_points);
}

/* O_EXCL makes "once in the life of the store" true even when two ranks pass the same point together. */
static void die_once(const char *name) {
    char path[sizeof ctx.dir + 64];
    snprintf(path, sizeof path, "%s/%s", ctx.dir, name);
    mkdir(ctx.dir, 0777);
    int fd = open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0666);
    if (fd < 0) return;
    close(fd);
    kill(getpid(), SIGKILL);
    pause();
}

void sl_crash_point(const char *name) {
    if (__builtin_expect(!ctx.n, 1)) return;
    for (unsigned i = 0; i < ctx.n; i++)
        if (!strcmp(ctx.at[i].name, name) && atomic_fetch_add(&ctx.at[i].passed, 1) + 1 == ctx.at[i].count)
            die_once(name);
}
