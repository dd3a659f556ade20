/* fail_calls: a library for LD_PRELOAD that lets chosen system calls of one program fail, for
 * tests/crash/failing_calls.py.
 *
 *   SLUICE_FAIL="PROGRAM CALL FILE ERRNO FIRST COUNT STATE"
 *
 * The calls number FIRST .. FIRST + COUNT - 1 (from 1, over all lives of PROGRAM) of CALL on paths that contain FILE
 * fail with ERRNO; with ERRNO 0 a write takes half of its bytes. Calls that name no file (fork, socketpair, ...) count
 * as calls on "-"; opening a file without making it is "open-old"; one that becomes another program counts as a call of
 * the program that it was. STATE is a file that grows by a byte a call that was met. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/pidfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

static struct {
    char program[32], call[16], file[64], state[256];
    int err, mine;
    long first, count;
} plan;
static int (*real_open)(const char *, int, ...);

__attribute__((constructor)) static void read_plan(void) {
    const char *e = getenv("SLUICE_FAIL");
    *(void **)&real_open = dlsym(RTLD_NEXT, "open");
    if (!e || sscanf(e, "%31s %15s %63s %d %ld %ld %255s", plan.program, plan.call, plan.file, &plan.err, &plan.first,
                     &plan.count, plan.state) != 7)
        return;
    plan.mine = !strcmp(plan.program, program_invocation_short_name);
}

/* Is it this call's turn to fail? (The file is opened each time: a child between fork and exec has closed all
 * others.) */
static int hit(const char *call, const char *path) {
    struct stat st;
    static ssize_t (*put)(int, const void *, size_t);
    if (!plan.mine || strcmp(call, plan.call) || !strstr(path, plan.file)) return 0;
    int fd = real_open(plan.state, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    *(void **)&put = dlsym(RTLD_NEXT, "write");
    int bad = fd < 0 || put(fd, "x", 1) != 1 || fstat(fd, &st);
    if (fd >= 0) close(fd);
    if (bad || st.st_size < plan.first || st.st_size >= plan.first + plan.count) return 0;
    errno = plan.err;
    return 1;
}

static int hit_fd(const char *call, int fd) {
    char link[64], path[512];
    if (!plan.mine || strcmp(call, plan.call)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    return hit(call, path);
}

#define REAL(name)                                                                                                     \
    static __typeof__(&name) real;                                                                                     \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name)

int open(const char *path, int flags, ...) {
    va_list ap;
    va_start(ap, flags);
    int mode = flags & O_CREAT ? va_arg(ap, int) : 0;
    va_end(ap);
    return hit(flags & O_CREAT ? "open" : "open-old", path) ? -1 : real_open(path, flags, mode);
}
int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    return hit("mkdir", path) ? -1 : real(path, mode);
}
int rename(const char *from, const char *to) {
    REAL(rename);
    return hit("rename", to) ? -1 : real(from, to);
}
ssize_t write(int fd, const void *p, size_t n) {
    REAL(write);
    if (hit_fd("write", fd)) return plan.err ? -1 : real(fd, p, n / 2);
    return real(fd, p, n);
}
ssize_t pwrite(int fd, const void *p, size_t n, off_t off) {
    REAL(pwrite);
    if (hit_fd("pwrite", fd)) return plan.err ? -1 : real(fd, p, n / 2, off);
    return real(fd, p, n, off);
}
int fdatasync(int fd) {
    REAL(fdatasync);
    return hit_fd("fdatasync", fd) ? -1 : real(fd);
}
int fsync(int fd) {
    REAL(fsync);
    return hit_fd("fsync", fd) ? -1 : real(fd);
}
int ftruncate(int fd, off_t n) {
    REAL(ftruncate);
    return hit_fd("ftruncate", fd) ? -1 : real(fd, n);
}
int fallocate(int fd, int mode, off_t off, off_t n) {
    REAL(fallocate);
    return hit_fd("fallocate", fd) ? -1 : real(fd, mode, off, n);
}
FILE *fopen(const char *path, const char *mode) {
    REAL(fopen);
    return hit("fopen", path) ? NULL : real(path, mode);
}
pid_t fork(void) {
    REAL(fork);
    return hit("fork", "-") ? -1 : real();
}
int socketpair(int domain, int type, int protocol, int fds[2]) {
    REAL(socketpair);
    return hit("socketpair", "-") ? -1 : real(domain, type, protocol, fds);
}
int pidfd_open(pid_t pid, unsigned flags) {
    REAL(pidfd_open);
    return hit("pidfd_open", "-") ? -1 : real(pid, flags);
}
int execve(const char *path, char *const argv[], char *const env[]) {
    REAL(execve);
    return hit("execve", path) ? -1 : real(path, argv, env);
}
int execv(const char *path, char *const argv[]) {
    REAL(execv);
    return hit("execv", path) ? -1 : real(path, argv);
}
