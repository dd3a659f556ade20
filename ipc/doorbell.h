/* doorbell: one eventfd a stage; whoever changes something that a stage may wait for rings its bell. No spinning.
 *
 * The rule (tests/models/doorbell.pml): DRAIN the bell, THEN test every gate, THEN poll. Test-then-drain loses
 * wake-ups.
 *
 *     for (;;) {
 *         sl_bell_drain(fd);
 *         if (work_available()) { do_it(); continue; }
 *         sl_bell_wait(fd, extra_fds, timeout_ms);
 *     }
 * The supervisor owns the eventfds, so a count survives the death of the waiter. */
#ifndef SL_IPC_DOORBELL_H
#define SL_IPC_DOORBELL_H
#include "ipc/err.h"
#include <poll.h>

int sl_bell_create(sl_err *err); /* non-blocking, close-on-exec eventfd; or SL_ETEMP */
void sl_bell_ring(int fd);       /* never blocks, never fails visibly (a full counter is a rung bell) */
void sl_bell_drain(int fd);
/* poll(2) on the bell (fds[0] is filled in by the call) and n-1 further fds; returns poll's result, EINTR counts as 0.
 */
int sl_bell_wait(int fd, struct pollfd *fds, int n, int timeout_ms);
#endif
