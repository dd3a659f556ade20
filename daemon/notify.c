#include "daemon/notify.h"
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

void sl_notify(const char *fmt, ...) {
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    size_t n = path ? strlen(path) : 0;
    char msg[1024];
    if (!n || n >= sizeof a.sun_path || (path[0] != '/' && path[0] != '@')) return;
    memcpy(a.sun_path, path, n);
    if (path[0] == '@') a.sun_path[0] = 0; /* abstract namespace */
    va_list ap;
    va_start(ap, fmt);
    int len = vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    if (len <= 0 || (size_t)len >= sizeof msg) return;
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return;
    (void)!sendto(fd, msg, (size_t)len, MSG_DONTWAIT | MSG_NOSIGNAL, (struct sockaddr *)&a,
                  (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n));
    close(fd);
}

uint64_t sl_notify_watchdog_ns(void) {
    const char *usec = getenv("WATCHDOG_USEC"), *pid = getenv("WATCHDOG_PID");
    if (!usec || (pid && strtol(pid, NULL, 10) != (long)getpid())) return 0;
    return strtoull(usec, NULL, 10) * 500; /* half, in ns */
}
