#include "ipc/journal.h"
#include "ipc/file.h"
#include "ipc/log.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>
#include <xxhash.h>

#define BLOCK_RECS 512 /* records read at a time */

struct sl_journal {
    int fd;
    uint32_t magic;
    char *path;
    uint64_t durable; /* records on disk, fdatasync'ed */
    uint8_t *buf; /* records not yet durable: kept until fdatasync has succeeded, so that a failed write or sync can be
                     repeated in full from `durable` (after a failed fdatasync the kernel may have dropped the pages) */
    uint64_t n, cap;
};

sl_key sl_row_key(const char *dataset, uint64_t row, uint32_t part) {
    uint8_t num[13] = {0};
    for (int i = 0; i < 8; i++) num[i] = (uint8_t)(row >> 8 * i);
    for (int i = 0; i < 4; i++) num[9 + i] = (uint8_t)(part >> 8 * i); /* num[8] is the NUL between */
    XXH3_state_t *st = XXH3_createState();
    sl_key k = {{0, 0}};
    if (!st) abort(); /* a wrong key would be silent corruption */
    XXH3_128bits_reset(st);
    XXH3_128bits_update(st, dataset, strlen(dataset) + 1);
    XXH3_128bits_update(st, num, part ? 13 : 8);
    XXH128_hash_t h = XXH3_128bits_digest(st);
    XXH3_freeState(st);
    k.w[0] = h.low64;
    k.w[1] = h.high64;
    return k;
}

const char *sl_reason_name(sl_reason r) {
    static const char *const names[] = {"NONE",    "JSON",         "FIELDS",   "ROLE",    "TEMPLATE",
                                        "MASK",    "EMPTY",        "TOO_LONG", "VOCAB",   "ENCODING",
                                        "LENGTHS", "UNSUPERVISED", "CONFLICT", "TOO_BIG", "MEDIA"};
    _Static_assert(sizeof names / sizeof *names == SL_R_N, "one name a reason");
    return (unsigned)r < SL_R_N ? names[r] : "?";
}

bool sl_journal_record_ok(const void *rec128, uint32_t magic) {
    const uint8_t *p = rec128;
    uint32_t m, crc;
    uint16_t len;
    memcpy(&m, p, 4);
    memcpy(&len, p + 6, 2);
    memcpy(&crc, p + SL_JREC - 4, 4);
    return m == magic && len == SL_JREC && crc == sl_crc32c(0, p, SL_JREC - 4);
}

/* pread that finishes short reads; bytes read, fewer only at the end of the file. */
static ssize_t read_at(int fd, void *buf, size_t n, uint64_t off) {
    size_t got = 0;
    while (got < n) {
        ssize_t r = pread(fd, (uint8_t *)buf + got, n - got, (off_t)(off + got));
        if (r < 0 && errno == EINTR) continue;
        if (r < 0) return -1;
        if (!r) break;
        got += (size_t)r;
    }
    return (ssize_t)got;
}

/* Good records from record *at on, each handed to `each`; *at ends at the first that is not good (or is missing). */
static int scan_good(int fd, const char *path, uint32_t magic, uint64_t *at, sl_journal_each each, void *arg,
                     sl_err *err) {
    uint8_t *block = malloc((size_t)BLOCK_RECS * SL_JREC);
    if (!block) return sl_err_set(err, SL_ETEMP, "%s: no memory", path);
    int rc = 0;
    for (bool more = true; more && !rc;) {
        ssize_t n = read_at(fd, block, (size_t)BLOCK_RECS * SL_JREC, *at * SL_JREC);
        if (n < 0) rc = sl_err_sys(err, SL_ETEMP, errno, "%s: read at byte %" PRIu64, path, *at * SL_JREC);
        more = n == BLOCK_RECS * SL_JREC;
        for (ssize_t i = 0; i + SL_JREC <= n && !rc; i += SL_JREC) {
            if (!sl_journal_record_ok(block + i, magic)) {
                more = false;
                break;
            }
            if (each) rc = each(arg, block + i, err);
            if (!rc) (*at)++;
        }
    }
    free(block);
    return rc > 0 ? 0 : rc;
}

/* Is there any good record behind record `bad`? Then it is corruption and not a torn tail. */
static int check_tail(int fd, const char *path, uint32_t magic, uint64_t bad, sl_err *err) {
    uint8_t rec[SL_JREC];
    for (uint64_t i = bad;; i++) {
        ssize_t n = read_at(fd, rec, SL_JREC, i * SL_JREC);
        if (n < 0) return sl_err_sys(err, SL_ETEMP, errno, "%s: read at byte %" PRIu64, path, i * SL_JREC);
        if (n < SL_JREC) return 0;
        uint32_t m;
        memcpy(&m, rec, 4);
        if (i == 0 && m && m != magic) /* never cut what somebody else wrote */
            return sl_err_set(err, SL_EDATA, "%s: starts with %08x, expected %08x: this is another file", path, m,
                              magic);
        if (!sl_journal_record_ok(rec, magic)) continue;
        if (i == bad) return 0; /* a reader met the record while it was being written: it is whole now */
        n = read_at(fd, rec, SL_JREC, bad * SL_JREC); /* or since: one write holds many records */
        if (n == SL_JREC && sl_journal_record_ok(rec, magic)) return 0;
        return sl_err_set(
            err, SL_EDATA,
            "%s: record %" PRIu64 " (byte %" PRIu64 ") is damaged but record %" PRIu64
            " behind it is good: the file was damaged, this is not an interrupted write; restore it, or rebuild it "
            "from the store with 'sluice verify'",
            path, bad, bad * SL_JREC, i);
    }
}

/* The pid that holds the flock of this file, from /proc/locks; 0 when not found. */
static long lock_holder(int fd) {
    struct stat st;
    if (fstat(fd, &st) < 0) return 0;
    FILE *f = fopen("/proc/locks", "re");
    if (!f) return 0;
    long found = 0;
    char line[256], kind[16], pid[32], at[64], want[64];
    snprintf(want, sizeof want, "%02x:%02x:%llu", major(st.st_dev), minor(st.st_dev), (unsigned long long)st.st_ino);
    while (fgets(line, sizeof line, f))
        if (sscanf(line, "%*s %15s %*s %*s %31s %63s", kind, pid, at) == 3 && !strcmp(kind, "FLOCK") &&
            !strcmp(at, want)) {
            found = strtol(pid, NULL, 10);
            break;
        }
    fclose(f);
    return found;
}

static int cut_tail(sl_journal *j, sl_err *err) {
    struct stat st;
    if (fstat(j->fd, &st) < 0) return sl_err_sys(err, SL_ETEMP, errno, "%s: stat", j->path);
    uint64_t good = j->durable * SL_JREC;
    if ((uint64_t)st.st_size == good) {
        /* They were found, which does not mean that they are on disk: their writer may have died before its sync. Now
         * they count as durable, so they have to be. */
        if (good && fdatasync(j->fd) < 0)
            return sl_err_sys(err, SL_ETEMP, errno, "%s: fdatasync of the records found", j->path);
        return 0;
    }
    int rc = check_tail(j->fd, j->path, j->magic, j->durable, err);
    if (rc) return rc;
    sl_log(SL_WARN,
           "%s: cut a torn tail of %" PRIu64 " bytes after record %" PRIu64
           " (an interrupted write, never acknowledged)",
           j->path, (uint64_t)st.st_size - good, j->durable);
    if (ftruncate(j->fd, (off_t)good) < 0 || fdatasync(j->fd) < 0)
        return sl_err_sys(err, SL_ETEMP, errno, "%s: cut tail", j->path);
    return 0;
}

/* The name of a new file is durable only when its folder is. */
static int sync_folder(const char *path, sl_err *err) {
    char dir[4096];
    snprintf(dir, sizeof dir, "%s", path);
    char *slash = strrchr(dir, '/');
    if (slash == dir)
        dir[1] = 0;
    else if (slash)
        *slash = 0;
    else
        strcpy(dir, ".");
    return sl_file_sync_folder(dir, err);
}

static int open_locked(sl_journal *j, sl_err *err) {
    j->fd = open(j->path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (j->fd < 0) return sl_err_sys(err, sl_file_code(errno), errno, "%s: open", j->path);
    if (flock(j->fd, LOCK_EX | LOCK_NB) == 0) return sync_folder(j->path, err);
    if (errno != EWOULDBLOCK) return sl_err_sys(err, SL_ETEMP, errno, "%s: lock", j->path);
    long pid = lock_holder(j->fd);
    if (pid) return sl_err_set(err, SL_ETEMP, "%s: process %ld is writing it; only one may", j->path, pid);
    return sl_err_set(err, SL_ETEMP, "%s: another process is writing it; only one may", j->path);
}

int sl_journal_open(sl_journal **out, const char *path, uint32_t magic, sl_journal_each each, void *arg, sl_err *err) {
    *out = NULL;
    sl_journal *j = calloc(1, sizeof *j);
    if (!j || !(j->path = strdup(path))) {
        free(j);
        return sl_err_set(err, SL_ETEMP, "%s: no memory", path);
    }
    j->magic = magic;
    int rc = open_locked(j, err);
    if (!rc) rc = scan_good(j->fd, path, magic, &j->durable, each, arg, err);
    if (!rc) rc = cut_tail(j, err);
    if (rc) {
        sl_journal_close(j);
        return rc;
    }
    *out = j;
    return 0;
}

int sl_journal_append(sl_journal *j, void *rec128, sl_err *err) {
    if (j->n == j->cap) {
        uint64_t cap = j->cap ? 2 * j->cap : 64;
        uint8_t *b = realloc(j->buf, cap * SL_JREC);
        if (!b) return sl_err_set(err, SL_ETEMP, "%s: no memory for %" PRIu64 " waiting records", j->path, cap);
        j->buf = b;
        j->cap = cap;
    }
    uint8_t *p = rec128;
    uint16_t len = SL_JREC;
    memcpy(p, &j->magic, 4);
    memcpy(p + 6, &len, 2);
    uint32_t crc = sl_crc32c(0, p, SL_JREC - 4);
    memcpy(p + SL_JREC - 4, &crc, 4);
    memcpy(j->buf + j->n++ * SL_JREC, p, SL_JREC);
    return 0;
}

int sl_journal_sync(sl_journal *j, sl_err *err) {
    if (!j->n) return 0;
    uint64_t bytes = j->n * SL_JREC, off = j->durable * SL_JREC;
    for (uint64_t at = 0; at < bytes;) {
        ssize_t w = pwrite(j->fd, j->buf + at, bytes - at, (off_t)(off + at));
        if (w < 0 && errno == EINTR) continue;
        if (w <= 0) {
            int e = w < 0 ? errno : ENOSPC;
            return sl_err_sys(err, sl_file_code(e), e, "%s: write of %" PRIu64 " records after record %" PRIu64,
                              j->path, j->n, j->durable);
        }
        at += (uint64_t)w;
    }
    /* Whatever the reason: the kernel may have dropped what it could not write and still show it to who reads. So a
     * process that starts again would take it for durable; the next call here writes it again. */
    if (fdatasync(j->fd) < 0)
        return sl_err_sys(err, SL_ETEMP, errno, "%s: fdatasync of %" PRIu64 " records after record %" PRIu64, j->path,
                          j->n, j->durable);
    j->durable += j->n;
    j->n = 0;
    return 0;
}

uint64_t sl_journal_synced(const sl_journal *j) {
    return j->durable;
}

uint64_t sl_journal_count(const sl_journal *j) {
    return j->durable + j->n;
}

void sl_journal_close(sl_journal *j) {
    if (!j) return;
    if (j->fd >= 0) close(j->fd);
    free(j->buf);
    free(j->path);
    free(j);
}

int sl_journal_follow(const char *path, uint32_t magic, uint64_t *at, sl_journal_each each, void *arg, sl_err *err) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        if (errno == ENOENT) return 0;
        return sl_err_sys(err, SL_ETEMP, errno, "%s: open", path);
    }
    int rc = scan_good(fd, path, magic, at, each, arg, err);
    if (!rc) rc = check_tail(fd, path, magic, *at, err);
    close(fd);
    return rc;
}
