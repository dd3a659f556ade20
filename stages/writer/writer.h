/* writer: the last stage. Takes verdicts from each group's sample ring, finds the states they speak of in the group's
 * chunk rings, and puts rows into the store (sink.h); releases the rings when the commit record is durable.
 *
 * A group commit is closed when commit_mb of states are in it, when its oldest row waited commit_ms, when a ring is
 * more than half full of what it holds back, or when the run is draining and nothing else is to do.
 *
 * Nothing that comes from a ring is believed: a row that gather called good but whose chunks are not all there, of the
 * right width and in the right place, is rejected here (MISSING_SHARD, ERROR in the log). A batch descriptor that makes
 * no sense is SL_EINTERNAL: the writer ends, is started again, and finds the same rings. */
#ifndef SL_WRITER_WRITER_H
#define SL_WRITER_WRITER_H
#include "ipc/boot.h"
#include "stages/writer/sink.h"

typedef struct sl_writer sl_writer;
int sl_writer_open(sl_writer **out, const sl_stage *st, sl_err *err);
/* Until drained: 0. */
int sl_writer_run(sl_writer *w, sl_err *err);
void sl_writer_close(sl_writer *w);

/* The sink's view of a boot block; also used by tests and tools. */
void sl_writer_manifest(sl_manifest *m, const sl_boot *b);
#endif
