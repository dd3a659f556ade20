/* sluice-gather: one process for all groups; started by sluiced. */
#include "ipc/log.h"
#include "stages/gather/gather.h"

int main(int argc, char **argv) {
    static sl_stage st; /* the process's own context: a failure ends the process with it */
    static sl_gather *g;
    sl_err err = {0};
    if (sl_stage_open(&st, argc, argv, SL_ROLE_GATHER, &err)) return sl_stage_fail(&st, &err);
    if (sl_gather_open(&g, &st, &err)) return sl_stage_fail(&st, &err);
    sl_log(SL_INFO, "ready: %u group%s of %u rank%s, %u captures of width %u", st.boot->dp, st.boot->dp == 1 ? "" : "s",
           st.boot->tp, st.boot->tp == 1 ? "" : "s", st.boot->n_captures, st.boot->width);
    if (sl_gather_run(g, &err)) return sl_stage_fail(&st, &err);
    sl_gather_close(g);
    sl_metrics_detach(st.metrics);
    return 0;
}
