/* daemon_client: find a running sluiced, ask it, listen to it, and read its status map (daemon/status.h). */
#ifndef SL_TOOLS_DAEMON_CLIENT_H
#define SL_TOOLS_DAEMON_CLIENT_H
#include "daemon/bootinfo.h"
#include "ipc/wire.h"
#include <stdio.h>

/* Where to look, in this order: `where` (a run folder or a store; NULL = none), $RUNTIME_DIRECTORY,
 * $XDG_RUNTIME_DIR/sluice, /run/sluice, /tmp/sluice-UID. SL_ETEMP when nobody runs there. */
int sl_daemon_find(const char *where, sl_run_record *out, sl_err *err);

/* One request {t: type} to the control socket; the answer must be freed with msgpack_unpacked_destroy. SL_ETEMP after
 * timeout_ms of silence. */
int sl_daemon_ask(const char *control, const char *type, int timeout_ms, msgpack_unpacked *out, sl_err *err);

/* Status maps and events from the progress socket. */
typedef struct sl_daemon_feed {
    void *ctx, *sock;
} sl_daemon_feed;
int sl_daemon_listen(sl_daemon_feed *f, const char *progress, sl_err *err);
/* Next message within timeout_ms: 1 and *out (to be freed), 0 when none came. Malformed ones are skipped. */
int sl_daemon_next(sl_daemon_feed *f, int timeout_ms, msgpack_unpacked *out);
void sl_daemon_unlisten(sl_daemon_feed *f);

/* Look-ups by path in a map ("rows.committed"): 0 / "" / NULL when absent, never an error: a newer or older sluiced may
 * have other keys. */
const msgpack_object *sl_status_get(const msgpack_object *map, const char *path);
uint64_t sl_status_u64(const msgpack_object *map, const char *path);
double sl_status_dbl(const msgpack_object *map, const char *path); /* NaN for nil */
const char *sl_status_str(const msgpack_object *map, const char *path, char *buf, size_t cap);

/* Any msgpack object as JSON on one line (binary as an array of bytes, NaN and infinities as null). */
void sl_status_json(const msgpack_object *o, FILE *f);
#endif
