/* sluice-compute: one tensor-parallel rank. Started by sluiced only; see rank.h. */
#include "ipc/log.h"
#include "stages/compute/rank.h"

int main(int argc, char **argv) {
    static sl_stage st; /* the process's own context: a failure ends the process with it */
    sl_err err = {0};
    int rc = sl_stage_open(&st, argc, argv, SL_ROLE_RANK, &err);
    if (rc) return sl_stage_fail(&st, &err);
    if ((rc = sl_rank_run(&st, &err))) return sl_stage_fail(&st, &err);
    sl_metric_set(st.metrics, SL_M_STATE, SL_ST_DONE);
    sl_log_flush();
    sl_metrics_detach(st.metrics);
    return 0;
}
