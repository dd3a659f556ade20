/* control: the two sockets of sluiced. REP at sock_control answers {t:"status"|"drain"|"ping"|"config"} (ipc/wire.h);
 * PUB at sock_progress sends status maps and events. ipc:// sockets are made with mode 0600, or 0660 and the group of
 * daemon.socket_group. Any message is outside data: what cannot be used is answered {ok:false, code, msg}. */
#ifndef SL_DAEMON_CONTROL_H
#define SL_DAEMON_CONTROL_H
#include "daemon/status.h"

typedef struct sl_control {
    void *ctx, *rep, *pub;
    uint64_t events_sent, published_ns;
    bool drain_asked;
} sl_control;

/* SL_ETEMP: an address is in use or cannot be bound (named). */
int sl_control_open(sl_control *c, const sl_config *cfg, sl_err *err);
/* Answer every request that is waiting. Sets drain_asked. */
void sl_control_serve(sl_control *c, const sl_status *s);
/* Publish new events, and the status when it is due. */
void sl_control_publish(sl_control *c, const sl_status *s, uint64_t now_ns);
int sl_control_fd(const sl_control *c); /* poll for POLLIN, then serve (edge-triggered: always drain) */
void sl_control_close(sl_control *c);
#endif
