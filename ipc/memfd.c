#include "ipc/memfd.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/memfd.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Write through a short-lived mapping: hugetlb files have no write(2). */
static int fill(int fd, uint64_t bytes, bool huge, const void *init, uint64_t init_len) {
    uint64_t unit = huge ? 2u << 20 : 4096, len = (init_len + unit - 1) / unit * unit;
    if (len > bytes) len = bytes;
    void *p = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) return errno;
    memcpy(p, init, init_len);
    munmap(p, len);
    return 0;
}

int sl_memfd_create(const char *name, uint64_t bytes, bool huge, const void *init, uint64_t init_len, bool seal_write,
                    sl_err *err) {
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | (huge ? MFD_HUGETLB | MFD_HUGE_2MB : 0));
    if (fd < 0) return sl_err_sys(err, SL_ETEMP, errno, "%s: memfd_create", name);
    int rc = 0;
    if (ftruncate(fd, (off_t)bytes) < 0)
        rc = sl_err_sys(err, SL_ETEMP, errno, "%s: size %" PRIu64 " bytes", name, bytes);
    /* fallocate takes the pages now: with an empty pool or no memory it fails here, not as SIGBUS in a stage. */
    /* (hugetlb gives up whenever anything wants the thread's attention.) */
    int r = -1, tries = 0;
    while (!rc && (r = fallocate(fd, 0, 0, (off_t)bytes)) < 0 && errno == EINTR && ++tries < 1000) {}
    if (!rc && r < 0)
        rc = sl_err_sys(err, SL_ETEMP, errno, "%s: cannot allocate %" PRIu64 " bytes of shared memory", name, bytes);
    if (!rc && init_len) {
        int e = fill(fd, bytes, huge, init, init_len);
        if (e) rc = sl_err_sys(err, SL_ETEMP, e, "%s: cannot map %" PRIu64 " bytes", name, bytes);
    }
    int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | (seal_write ? F_SEAL_WRITE : 0);
    if (!rc && fcntl(fd, F_ADD_SEALS, seals) < 0) rc = sl_err_sys(err, SL_ETEMP, errno, "%s: cannot seal", name);
    if (rc) {
        close(fd);
        return rc;
    }
    return fd;
}

int sl_memfd_check(int fd, const char *what, uint64_t bytes, bool sealed_write, uint64_t *size, sl_err *err) {
    struct stat st;
    if (fstat(fd, &st) < 0) return sl_err_sys(err, SL_EINTERNAL, errno, "%s: fd %d", what, fd);
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0) return sl_err_sys(err, SL_EINTERNAL, errno, "%s: fd %d is no sealable memfd", what, fd);
    int want = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | (sealed_write ? F_SEAL_WRITE : 0);
    if ((seals & want) != want)
        return sl_err_set(err, SL_EINTERNAL, "%s: fd %d has seals 0x%x, expected at least 0x%x", what, fd,
                          (unsigned)seals, (unsigned)want);
    if (bytes && (uint64_t)st.st_size != bytes)
        return sl_err_set(err, SL_EINTERNAL, "%s: fd %d has %lld bytes, expected %" PRIu64, what, fd,
                          (long long)st.st_size, bytes);
    if (size) *size = (uint64_t)st.st_size;
    return 0;
}
