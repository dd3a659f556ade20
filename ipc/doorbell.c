#include "ipc/doorbell.h"
#include <errno.h>
#include <stdint.h>
#include <sys/eventfd.h>
#include <unistd.h>

int sl_bell_create(sl_err *err) {
    int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (fd < 0) return sl_err_sys(err, SL_ETEMP, errno, "doorbell: eventfd");
    return fd;
}

void sl_bell_ring(int fd) {
    uint64_t one = 1;
    /* EAGAIN means that the counter is full, which is a rung bell. write(2) takes the eventfd's lock, which orders the
     * cursor stored before it ahead of the count that the waiter will read. */
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR) {}
}

void sl_bell_drain(int fd) {
    uint64_t n;
    while (read(fd, &n, sizeof n) < 0 && errno == EINTR) {}
}

int sl_bell_wait(int fd, struct pollfd *fds, int n, int timeout_ms) {
    fds[0] = (struct pollfd){.fd = fd, .events = POLLIN};
    int rc = poll(fds, (nfds_t)n, timeout_ms);
    if (rc < 0 && errno == EINTR) {
        for (int i = 0; i < n; i++) fds[i].revents = 0;
        return 0;
    }
    return rc;
}
