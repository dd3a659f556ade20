/* notify: the systemd readiness protocol (NOTIFY_SOCKET), nothing else. Without the variable every call does nothing.
 */
#ifndef SL_DAEMON_NOTIFY_H
#define SL_DAEMON_NOTIFY_H
#include <stdint.h>
/* One datagram of VAR=value lines, e.g. "READY=1\nSTATUS=running". Never blocks; failures are ignored (systemd's own
 * watchdog notices). */
void sl_notify(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Nanoseconds between WATCHDOG=1 messages (half of WATCHDOG_USEC), 0 = not wanted. */
uint64_t sl_notify_watchdog_ns(void);
#endif
