#include "daemon/bootinfo.h"
#include "ipc/file.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static uint64_t start_ticks(int pid) { /* 0: no such process */
    char path[64], buf[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t n = read(fd, buf, sizeof buf - 1);
    close(fd);
    if (n <= 0) return 0;
    buf[n] = 0;
    char *p = strrchr(buf, ')'); /* the name may hold blanks and brackets */
    for (int field = 2; p && field < 22; field++) p = strchr(p + 1, ' ');
    return p ? strtoull(p + 1, NULL, 10) : 0;
}

/* Lock DIR/NAME.lock. When another process has it: SL_ETEMP, and "WHAT DIR is in use by PROGRAM pid N; REMEDY". */
static int lock(const char *dir, const char *name, const char *what, const char *program, const char *remedy,
                sl_err *err) {
    char path[1100], text[32] = "";
    snprintf(path, sizeof path, "%s/%s.lock", dir, name);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0) return sl_err_sys(err, sl_file_read_code(errno), errno, "%s", path);
    if (flock(fd, LOCK_EX | LOCK_NB)) {
        int e = errno;
        ssize_t n = pread(fd, text, sizeof text - 1, 0);
        close(fd);
        if (e != EWOULDBLOCK) return sl_err_sys(err, SL_ETEMP, e, "locking %s", path);
        return sl_err_set(err, SL_ETEMP, "%s %s is in use by %s pid %.*s; %s", what, dir, program,
                          n > 0 ? (int)strcspn(text, "\n") : 1, n > 0 ? text : "?", remedy);
    }
    int len = snprintf(text, sizeof text, "%d\n", getpid());
    if (ftruncate(fd, 0) || pwrite(fd, text, (size_t)len, 0) != len) {
        int rc = sl_err_sys(err, SL_ETEMP, errno, "writing %s", path);
        close(fd);
        return rc;
    }
    return fd;
}

int sl_run_lock(const char *store, sl_err *err) {
    return lock(store, "sluiced", "the store", "sluiced",
                "stop it (sluice drain --at that folder) or give another store", err);
}

int sl_run_lock_sockets(const char *run_dir, const char *store, sl_err *err) {
    struct stat a, b;
    if (!stat(run_dir, &a) && !stat(store, &b) && a.st_dev == b.st_dev && a.st_ino == b.st_ino) return 0;
    int fd = lock(run_dir, "sluiced", "the folder of sockets", "sluiced",
                  "stop it (sluice drain --at that folder) or give another [daemon] run_dir", err);
    if (fd < 0) return fd;
    int dir =
        open(run_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC); /* kept: systemd-tmpfiles cleans no folder with a lock */
    if (dir >= 0 && flock(dir, LOCK_SH | LOCK_NB)) close(dir);
    return 0;
}

int sl_run_lock_extract(const char *store, sl_err *err) {
    return lock(store, "extract", "the output", "sluice extract", "wait for it, or give another output", err);
}

static int put(const sl_run_record *r, const char *dir, sl_err *err) {
    char path[1100], tmp[1200];
    snprintf(path, sizeof path, "%s/sluiced.run", dir);
    snprintf(tmp, sizeof tmp, "%s.%d", path, getpid());
    int fd = open(tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0) return sl_err_sys(err, SL_ETEMP, errno, "%s", tmp);
    ssize_t n = write(fd, r, sizeof *r);
    int e = errno;
    close(fd);
    if (n != (ssize_t)sizeof *r || rename(tmp, path)) {
        if (n == (ssize_t)sizeof *r) e = errno;
        unlink(tmp);
        return sl_err_sys(err, SL_ETEMP, e, "writing %s", path);
    }
    return SL_OK;
}

int sl_run_publish(sl_run_record *r, const char *run_dir, sl_err *err) {
    r->magic = SL_RUN_MAGIC, r->version = 1, r->size = sizeof *r;
    r->pid = getpid(), r->start_ticks = start_ticks(r->pid);
    int rc = put(r, run_dir, err);
    return rc ? rc : put(r, r->store, err);
}

void sl_run_withdraw(const sl_run_record *r, const char *run_dir) {
    char path[1100];
    snprintf(path, sizeof path, "%s/sluiced.run", run_dir);
    unlink(path);
    snprintf(path, sizeof path, "%s/sluiced.run", r->store);
    unlink(path);
}

int sl_run_find(const char *dir, sl_run_record *out, sl_err *err) {
    char path[1100];
    snprintf(path, sizeof path, "%s/sluiced.run", dir);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return sl_err_sys(err, SL_ETEMP, errno, "no sluiced is running there: %s", path);
    ssize_t n = read(fd, out, sizeof *out);
    close(fd);
    if (n != (ssize_t)sizeof *out || out->magic != SL_RUN_MAGIC || out->version < 1 || out->size < sizeof *out)
        return sl_err_set(err, SL_EDATA, "%s is no run record (%zd bytes)", path, n);
    out->feed[255] = out->progress[255] = out->control[255] = out->store[1023] = out->model[1023] = 0;
    if (out->pid <= 0 || !out->start_ticks || start_ticks(out->pid) != out->start_ticks)
        return sl_err_set(err, SL_ETEMP, "no sluiced is running there: %s is of pid %d, which is gone", path, out->pid);
    return SL_OK;
}
