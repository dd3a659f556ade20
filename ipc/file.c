#include "ipc/file.h"
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <unistd.h>

int sl_file_write(int fd, const void *p, size_t n) {
    for (size_t at = 0; at < n;) {
        ssize_t w = write(fd, (const uint8_t *)p + at, n - at);
        if (w < 0 && errno == EINTR) continue;
        if (w <= 0) return w < 0 ? errno : ENOSPC;
        at += (size_t)w;
    }
    return 0;
}

int sl_file_code(int errnum) {
    switch (errnum) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case ENOMEM:
    case EMFILE:
    case ENFILE:
    case EAGAIN:
    case EINTR:
        return SL_ETEMP;
    case EACCES:
    case EPERM:
    case EROFS:
    case ENOENT:
    case ENOTDIR:
    case EISDIR:
    case EEXIST:
    case ELOOP:
    case ENAMETOOLONG:
    case EINVAL:
        return SL_ECONFIG;
    default:
        return SL_EINTERNAL;
    }
}

int sl_file_read_code(int errnum) {
    return sl_file_code(errnum) == SL_ETEMP ? SL_ETEMP : SL_ECONFIG;
}

int sl_file_sync_folder(const char *path, sl_err *err) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), bad = fd < 0 || fsync(fd), e = errno;
    if (fd >= 0) close(fd);
    return bad ? sl_err_sys(err, SL_ETEMP, e, "cannot sync folder %s", path) : 0;
}
