/* The machine, property by property: the second half of preflight.h. */
#include "daemon/preflight.h"
#include "daemon/supervise.h"
#include "ipc/file.h"
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <liburing.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/un.h>
#include <unistd.h>

static void say(sl_check *k, sl_check_state s, const char *remedy, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
static void say(sl_check *k, sl_check_state s, const char *remedy, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    k->state = s;
    vsnprintf(k->found, sizeof k->found, fmt, ap);
    va_end(ap);
    snprintf(k->remedy, sizeof k->remedy, "%s", remedy);
}

static void check_memlock(const sl_config *c, sl_check *k) {
    struct rlimit r;
    getrlimit(RLIMIT_MEMLOCK, &r);
    if (r.rlim_cur == RLIM_INFINITY)
        say(k, SL_CHECK_OK, "", "memory may be locked without limit");
    else if (r.rlim_cur >= (64u << 20))
        say(k, SL_CHECK_OK, "", "%llu MiB may be locked", (unsigned long long)(r.rlim_cur >> 20));
    else
        say(k, c->boot.backend == SL_BACKEND_CUDA ? SL_CHECK_FAIL : SL_CHECK_WARN,
            "LimitMEMLOCK=infinity in the unit, or 'ulimit -l unlimited' (limits.conf: memlock)",
            "only %llu KiB may be locked: io_uring buffers are not registered and GPU copies cannot pin the rings",
            (unsigned long long)(r.rlim_cur >> 10));
}

static void check_hugepages(const sl_config *c, sl_check *k) {
    unsigned long long n = 0;
    FILE *f = fopen("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "re");
    if (f && fscanf(f, "%llu", &n) != 1) n = 0; // NOLINT(cert-err34-c): the kernel wrote it
    if (f) fclose(f);
    if (!c->hugepages)
        say(k, SL_CHECK_OK, "", "huge pages are switched off");
    else if (n)
        say(k, SL_CHECK_OK, "", "%llu huge pages of 2 MiB are free", n);
    else
        say(k, SL_CHECK_WARN, "sysctl vm.nr_hugepages=N (2 MiB each; the plan prints the size of the rings)",
            "no huge page is free: the rings use ordinary pages");
}

static void check_uring(const sl_config *c, sl_check *k) {
    (void)c;
    struct io_uring ring;
    int rc = io_uring_queue_init(4, &ring, 0);
    if (!rc) {
        io_uring_queue_exit(&ring);
        say(k, SL_CHECK_OK, "", "io_uring works");
    } else if (sl_file_code(-rc) == SL_ETEMP) { /* the writer asks again */
        say(k, SL_CHECK_WARN, "make memory or open files free, or raise LimitMEMLOCK", "io_uring_setup: %s",
            strerror(-rc));
    } else {
        say(k, SL_CHECK_FAIL,
            rc == -ENOSYS
                ? "use a kernel with io_uring (5.10 or later)"
                : "sysctl kernel.io_uring_disabled=0; in a container allow io_uring_setup/enter/register in seccomp",
            "io_uring_setup: %s", strerror(-rc));
    }
}

/* The store, or the nearest folder above it that exists. */
static bool store_place(const sl_config *c, char *out, size_t cap) {
    struct stat st;
    if (!c->boot.store[0]) return false;
    snprintf(out, cap, "%s", c->boot.store);
    while (stat(out, &st) && *out) {
        char *slash = strrchr(out, '/');
        if (!slash)
            snprintf(out, cap, ".");
        else if (slash == out)
            out[1] = 0;
        else
            *slash = 0;
    }
    return true;
}

static void check_writable(const sl_config *c, sl_check *k) {
    char dir[SL_PATH_MAX];
    if (!store_place(c, dir, sizeof dir)) return;
    int fd = open(dir, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR))
        fd = access(dir, W_OK | X_OK) ? -1 : open(dir, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        bool passes = sl_file_code(errno) == SL_ETEMP;
        say(k, passes ? SL_CHECK_WARN : SL_CHECK_FAIL,
            passes ? "make room: space, inodes, a quota, open files; the flow waits until there is"
                   : "chown or chmod the folder, or give another [store] path",
            "cannot write in %s: %s", dir, strerror(errno));
        return;
    }
    close(fd);
    say(k, SL_CHECK_OK, "", "files can be made in %s", dir);
}

static void check_space(const sl_config *c, sl_check *k) {
    char dir[SL_PATH_MAX];
    struct statvfs v;
    if (!store_place(c, dir, sizeof dir) || statvfs(dir, &v)) return;
    uint64_t free_bytes = (uint64_t)v.f_bavail * v.f_frsize;
    if (free_bytes <= c->boot.reserve_bytes)
        say(k, SL_CHECK_WARN, "free some space, or make [store] reserve smaller: the flow waits until there is room",
            "%.1f GB are free in %s, not more than the reserve of %.1f GB", (double)free_bytes / 1e9, dir,
            (double)c->boot.reserve_bytes / 1e9);
    else
        say(k, SL_CHECK_OK, "", "%.1f GB are free in %s", (double)free_bytes / 1e9, dir);
}

static void check_direct(const sl_config *c, sl_check *k) {
    char dir[SL_PATH_MAX];
    if (!store_place(c, dir, sizeof dir)) return;
    if (!c->boot.direct_io) {
        say(k, SL_CHECK_OK, "", "direct writes are switched off");
        return;
    }
    int fd = open(dir, O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC, 0600);
    if (fd < 0)
        say(k, SL_CHECK_WARN, "use ext4 or xfs for speed, or set [store] direct_io = no to silence this",
            "the file system of %s refuses O_DIRECT (%s): writes go through the page cache", dir, strerror(errno));
    else
        say(k, SL_CHECK_OK, "", "O_DIRECT works in %s", dir);
    if (fd >= 0) close(fd);
}

static void check_sockets(const sl_config *c, sl_check *k) {
    sl_config copy = *c;
    sl_err e = {0};
    if (c->socket_group[0] && !getgrnam(c->socket_group)) {
        say(k, SL_CHECK_FAIL, "groupadd it, or correct [daemon] socket_group", "there is no group '%s'",
            c->socket_group);
        return;
    }
    int rc = sl_preflight_sockets(&copy, &e);
    if (copy.run_dir_made) rmdir(copy.run_dir); /* a check leaves nothing behind */
    if (rc)
        say(k, SL_CHECK_FAIL, "give a short [daemon] run_dir that this user may write", "%s", e.msg);
    else
        say(k, SL_CHECK_OK, "", "sockets go to %s", copy.run_dir);
}

static void check_stages(const sl_config *c, sl_check *k) {
    sl_err e = {0};
    char path[SL_PATH_MAX];
    for (int r = SL_ROLE_FEEDER; r < SL_ROLE_N; r++) {
        if (sl_supervise_stage_path(c, (sl_role)r, path, sizeof path, &e)) {
            say(k, SL_CHECK_FAIL, "build or install all of sluice, or give [daemon] stage_dir", "%s", e.msg);
            return;
        }
    }
    say(k, SL_CHECK_OK, "", "all stage programs are there");
}

static void check_model(const sl_config *c, sl_check *k) {
    if (!c->boot.model[0]) return;
    sl_config *copy = malloc(sizeof *copy);
    sl_topo *t = malloc(sizeof *t);
    sl_preflight p;
    sl_err e = {0};
    struct stat st;
    if (!copy || !t) goto done;
    *copy = *c;
    bool made = copy->boot.store[0] && stat(copy->boot.store, &st);
    if (!copy->boot.store[0]) snprintf(copy->boot.store, sizeof copy->boot.store, "/tmp");
    if (sl_preflight_resolve(&p, copy, t, &e)) {
        say(k, SL_CHECK_FAIL, "see the message: it names the file and the key", "%s", e.msg);
    } else {
        if (sl_preflight_memory(&p, copy, &e))
            say(k, SL_CHECK_FAIL, "see the message", "%s", e.msg);
        else if (*p.spec->unknown)
            say(k, SL_CHECK_WARN, SL_UNKNOWN_KEYS_REMEDY,
                "config.json has keys that are not known and were not used: %s", p.spec->unknown);
        else
            say(k, SL_CHECK_OK, "", "%s, %u layers, width %u; the plan needs %llu MiB of %llu", p.spec->family,
                copy->boot.n_layers, copy->boot.width, (unsigned long long)(p.total >> 20),
                (unsigned long long)(p.available >> 20));
        sl_preflight_free(&p);
    }
    if (made) rmdir(copy->boot.store); /* a check leaves nothing behind */
done:
    free(copy);
    free(t);
}

static const struct {
    const char *name;
    void (*run)(const sl_config *c, sl_check *k);
} checks[] = {
    {"memlock", check_memlock}, {"hugepages", check_hugepages}, {"io_uring", check_uring},
    {"stages", check_stages},   {"sockets", check_sockets},     {"store", check_writable},
    {"space", check_space},     {"o_direct", check_direct},     {"model", check_model},
};

int sl_preflight_checks(const sl_config *c, sl_check *out, int max) {
    int n = 0;
    for (size_t i = 0; i < sizeof checks / sizeof *checks && n < max; i++, n++) {
        out[n] = (sl_check){.name = checks[i].name, .state = SL_CHECK_SKIP, .found = "not configured"};
        checks[i].run(c, &out[n]);
    }
    return n;
}

const char *sl_check_state_name(sl_check_state s) {
    static const char *const names[] = {"ok", "warn", "FAIL", "skip"};
    return (unsigned)s < 4 ? names[s] : "?";
}

/* ---- run folder and sockets ---- */

static int run_dir(sl_config *c, sl_err *err) {
    const char *env;
    struct stat st;
    if (!c->run_dir[0]) {
        if ((env = getenv("RUNTIME_DIRECTORY")) && *env)
            snprintf(c->run_dir, sizeof c->run_dir, "%.*s", (int)strcspn(env, ":"), env);
        else if ((env = getenv("XDG_RUNTIME_DIR")) && *env)
            snprintf(c->run_dir, sizeof c->run_dir, "%s/sluice", env);
        else
            snprintf(c->run_dir, sizeof c->run_dir, "/tmp/sluice-%u", (unsigned)getuid());
    }
    bool made = !mkdir(c->run_dir, 0700);
    c->run_dir_made = made;
    if (!made && errno != EEXIST)
        return sl_err_sys(err, sl_file_read_code(errno), errno, "[daemon] run_dir = %s cannot be made", c->run_dir);
    uint32_t gid1 = c->boot.socket_gid1; /* (a folder that was there keeps its mode) */
    if (made && gid1 && (chown(c->run_dir, (uid_t)-1, gid1 - 1) || chmod(c->run_dir, 0750)))
        return sl_err_sys(err, SL_ECONFIG, errno, "giving [daemon] run_dir = %s to group %s", c->run_dir,
                          c->socket_group);
    if (lstat(c->run_dir, &st) || !S_ISDIR(st.st_mode))
        return sl_err_set(err, SL_ECONFIG, "[daemon] run_dir = %s is no folder", c->run_dir);
    if (st.st_uid != geteuid() || (st.st_mode & 0002))
        return sl_err_set(
            err, SL_ECONFIG,
            "[daemon] run_dir = %s belongs to uid %u with mode %o; it must be this user's and not writable by "
            "others, else anybody could take the sockets' place",
            c->run_dir, (unsigned)st.st_uid, (unsigned)(st.st_mode & 07777));
    return SL_OK;
}

static int one_socket(const sl_config *c, char *addr, size_t cap, const char *name, sl_err *err) {
    struct sockaddr_un sun;
    if (!addr[0] && snprintf(addr, cap, "ipc://%s/%s.sock", c->run_dir, name) >= (int)cap)
        return sl_err_set(err, SL_ECONFIG, "[daemon] run_dir = %s is too long for a socket", c->run_dir);
    if (!strncmp(addr, "ipc://", 6) && strlen(addr + 6) >= sizeof sun.sun_path)
        return sl_err_set(err, SL_ECONFIG, "the socket path %s has %zu bytes, the kernel allows %zu", addr + 6,
                          strlen(addr + 6), sizeof sun.sun_path - 1);
    return SL_OK;
}

int sl_preflight_sockets(sl_config *c, sl_err *err) {
    sl_boot *b = &c->boot;
    struct group *g = c->socket_group[0] ? getgrnam(c->socket_group) : NULL;
    if (c->socket_group[0] && !g)
        return sl_err_set(err, SL_ECONFIG,
                          "[daemon] socket_group = %s: there is no such group; groupadd it, or correct "
                          "the name",
                          c->socket_group);
    b->socket_gid1 = g ? (uint32_t)g->gr_gid + 1 : 0;
    int rc = run_dir(c, err);
    if (!rc) rc = one_socket(c, b->feed_addr, sizeof b->feed_addr, "feed", err);
    if (!rc) rc = one_socket(c, b->sock_progress, sizeof b->sock_progress, "progress", err);
    if (!rc) rc = one_socket(c, b->sock_control, sizeof b->sock_control, "control", err);
    return rc;
}
