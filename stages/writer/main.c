/* sluice-writer: see stages/writer/writer.h. Started by sluiced. */
#include "stages/writer/writer.h"
#include <sys/resource.h>

int main(int argc, char **argv) {
    static sl_stage st; /* the process's own context: a failure ends the process with it, nothing is lost sight of */
    static sl_writer *w;
    sl_err err = {0};
    struct rlimit files;
    /* A commit group of layout files holds a descriptor a row. */
    if (!getrlimit(RLIMIT_NOFILE, &files) && files.rlim_cur < files.rlim_max) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    if (sl_stage_open(&st, argc, argv, SL_ROLE_WRITER, &err) || sl_writer_open(&w, &st, &err) ||
        sl_writer_run(w, &err)) {
        if (err.code == SL_EDATA) err.code = SL_ECONFIG; /* a damaged store: starting again will not help */
        return sl_stage_fail(&st, &err);
    }
    sl_writer_close(w);
    sl_metrics_detach(st.metrics);
    return 0;
}
