/* curve: CURVE keys for a feed socket on tcp://. Reads DIR/server.secret and DIR/clients.pub and answers libzmq's
 * authentication requests (ZAP) in a thread of its own: only the listed public keys get in. */
#ifndef SL_FEEDER_CURVE_H
#define SL_FEEDER_CURVE_H
#include "ipc/err.h"
typedef struct sl_curve sl_curve;
/* Prepare `sock` (not yet bound) of ZeroMQ context `ctx`. SL_ECONFIG names the file and what is wrong with it. */
int sl_curve_open(sl_curve **out, void *ctx, void *sock, const char *dir, sl_err *err);
/* Call after the socket is closed and before zmq_ctx_term. */
void sl_curve_close(sl_curve *c);
#endif
