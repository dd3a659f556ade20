/* bootinfo: how others find a running sluiced, and how a second one is kept off its store.
 *
 *   <store>/sluiced.lock   flock'ed for the life of sluiced; holds its pid as text. Never removed.
 *   <run_dir>/sluiced.lock the same: binding a socket takes it from whoever had it, without a word
 *   <store>/extract.lock   the same of `sluice extract`, whose lists and sockets in that output have one owner
 *   <run_dir>/sluiced.run  the record below, replaced by rename, removed at a clean end
 *   <store>/sluiced.run    the same, so that a tool can be pointed at the store
 *
 * The layout of the record never changes; later versions only append. A record whose process (pid AND start time) is
 * gone is stale. */
#ifndef SL_DAEMON_BOOTINFO_H
#define SL_DAEMON_BOOTINFO_H
#include "ipc/err.h"
#include <stdint.h>

#define SL_RUN_MAGIC 0x314e55524c53ull /* "SLRUN1" */

typedef struct sl_run_record {
    uint64_t magic;
    uint32_t version, size; /* 1, sizeof */
    int32_t pid;
    uint32_t pad;
    uint64_t start_ticks; /* field 22 of /proc/PID/stat: against reuse of pids */
    uint64_t run_id;
    char feed[256], progress[256], control[256];
    char store[1024], model[1024];
} sl_run_record;

/* Take a lock for the life of the process: the fd of the store's and of the extraction's (kept open), 0 for that of the
 * folder of sockets (which may be the store, whose lock does for both). SL_ETEMP naming the pid that has it. */
int sl_run_lock(const char *store, sl_err *err);
int sl_run_lock_sockets(const char *run_dir, const char *store, sl_err *err);
int sl_run_lock_extract(const char *store, sl_err *err);
/* Write the record into both folders. */
int sl_run_publish(sl_run_record *r, const char *run_dir, sl_err *err);
void sl_run_withdraw(const sl_run_record *r, const char *run_dir);
/* Read DIR/sluiced.run and check that its process lives. SL_ETEMP: nobody is running there. */
int sl_run_find(const char *dir, sl_run_record *out, sl_err *err);
#endif
