/* A stage of every role that does no work, for test_supervise: it attaches like a real one, beats, and does what the
 * file <store>/do.<name> says: "exit N", "kill", "hang" (once), "row N" (as a rank that runs row N - 1 alone),
 * "kill row N" (and dies of it), or "die" and "loading" (SIGKILL in every life; later lives then die before they are
 * READY). While draining it ends with 0. Each life adds a line with its epoch to <store>/lives.<name>. */
#include "ipc/boot.h"
#include "ipc/doorbell.h"
#include "ipc/log.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static sl_role role_of(const char *program) {
    const char *slash = strrchr(program, '/'); /* the folders may have any name */
    if (slash) program = slash + 1;
    return strstr(program, "feeder")   ? SL_ROLE_FEEDER
           : strstr(program, "gather") ? SL_ROLE_GATHER
           : strstr(program, "writer") ? SL_ROLE_WRITER
                                       : SL_ROLE_RANK;
}

static void obey(const sl_stage *s) {
    char path[1200], what[64] = "";
    snprintf(path, sizeof path, "%s/do.%s", s->boot->store, s->me->name);
    FILE *f = fopen(path, "r");
    if (!f) return;
    if (!fgets(what, sizeof what, f)) what[0] = 0;
    fclose(f);
    const char *row = strstr(what, "row ");
    if (row) sl_metric_set(s->metrics, SL_M_ROW_AT, strtoull(row + 4, NULL, 10));
    if (strncmp(what, "die", 3) && strncmp(what, "loading", 7)) unlink(path);
    if (!strncmp(what, "exit ", 5)) _exit(atoi(what + 5));
    if (!strncmp(what, "kill", 4) || !strncmp(what, "die", 3)) kill(getpid(), SIGKILL);
    if (!strncmp(what, "hang", 4)) pause();
    if (!strncmp(what, "loading", 7)) kill(getpid(), SIGKILL);
}

int main(int argc, char **argv) {
    sl_stage s;
    sl_err e = {0};
    if (sl_stage_open(&s, argc, argv, role_of(argv[0]), &e)) return sl_stage_fail(NULL, &e);
    char path[1200];
    snprintf(path, sizeof path, "%s/lives.%s", s.boot->store, s.me->name);
    FILE *f = fopen(path, "a");
    if (f) fprintf(f, "%u\n", s.me->role == SL_ROLE_RANK ? atomic_load(&s.ctl[1 + s.me->group].epoch) : 0), fclose(f);
    sl_metric_set(s.metrics, SL_M_ROW_AT, 0);
    sl_metric_set(s.metrics, SL_M_STATE, SL_ST_LOADING);
    obey(&s); /* "loading": dies here, before it is ready, in every life but the first */
    sl_metric_set(s.metrics, SL_M_STATE, SL_ST_READY);
    while (!atomic_load(&s.ctl[0].draining)) {
        struct pollfd p[1];
        sl_bell_drain(s.bell);
        sl_metric_beat(s.metrics);
        obey(&s);
        sl_bell_wait(s.bell, p, 1, 20);
    }
    sl_metrics_detach(s.metrics);
    return 0;
}
