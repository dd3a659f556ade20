#include "tools/input.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

enum { RAW = 1 << 18, TEXT = 1 << 20, TURN = 4 << 20 };
#define PUNCH (16ull << 20) /* holes are made in pieces of this size */

/* ---- names ---- */

static size_t cut_end(const char *s, size_t n, const char *end) {
    size_t k = strlen(end);
    return n > k && !memcmp(s + n - k, end, k) ? n - k : n;
}

/* Length of a name without its compression's ending. */
static size_t bare(const char *name) {
    size_t n = strlen(name), k = cut_end(name, n, ".gz");
    return k < n ? k : cut_end(name, n, ".zst");
}

static bool holds_rows(const char *name) {
    static const char *const ends[] = {".jsonl", ".ndjson", ".json"};
    size_t n = bare(name);
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if (name[0] != '.' && cut_end(name, n, ends[i]) < n) return true;
    return false;
}

static int add(sl_input_list *l, char *path, char *dataset, sl_err *err) {
    struct sl_input_name *v = path && dataset ? realloc(l->v, (size_t)(l->n + 1) * sizeof *v) : NULL;
    if (!v) {
        free(path), free(dataset);
        return sl_err_set(err, SL_ETEMP, "out of memory for the list of inputs");
    }
    l->v = v;
    v[l->n++] = (struct sl_input_name){path, dataset};
    size_t len = strlen(dataset);
    if (len > 255)
        return sl_err_set(err, SL_EUSAGE,
                          "%s: a data set's name has at most 255 bytes, not %zu: name it with --dataset", path, len);
    for (int i = 0; i < l->n - 1; i++)
        if (!strcmp(v[i].dataset, dataset))
            return sl_err_set(
                err, SL_EUSAGE,
                "%s and %s would both be the data set '%s' and their rows could not be told apart: rename "
                "one, or push them by themselves with --dataset",
                v[i].path, path, dataset);
    if (strcmp(path, "-") && access(path, R_OK)) return sl_err_sys(err, SL_EUSAGE, errno, "input %s", path);
    return SL_OK;
}

static char *join(const char *dir, const char *name, size_t n) {
    char *s = NULL;
    return asprintf(&s, "%s/%.*s", dir, (int)n, name) < 0 ? NULL : s;
}

static int only_files(const struct dirent *d) {
    return strcmp(d->d_name, ".") && strcmp(d->d_name, "..");
}
static int by_bytes(const struct dirent **a, const struct dirent **b) {
    return strcmp((*a)->d_name, (*b)->d_name); /* not alphasort: the locale must not change the order */
}

static int add_folder(sl_input_list *l, const char *dir, sl_err *err) {
    char full[PATH_MAX];
    struct dirent **e;
    struct stat st;
    if (!realpath(dir, full)) return sl_err_sys(err, SL_EUSAGE, errno, "input %s", dir);
    int n = scandir(dir, &e, only_files, by_bytes), rc = SL_OK, before = l->n;
    if (n < 0) return sl_err_sys(err, SL_EUSAGE, errno, "input folder %s", dir);
    const char *slash = strrchr(full, '/'), *base = slash && slash[1] ? slash + 1 : "root";
    for (int i = 0; i < n; i++) {
        const char *name = e[i]->d_name;
        char *path = rc ? NULL : join(dir, name, strlen(name));
        bool take = path && holds_rows(name) && !stat(path, &st) && !S_ISDIR(st.st_mode);
        if (take)
            rc = add(l, path, join(base, name, bare(name)), err);
        else {
            l->left_out++;
            free(path);
        }
        free(e[i]);
    }
    free(e);
    if (!rc && l->n == before)
        rc = sl_err_set(err, SL_EUSAGE, "the folder %s holds no file of rows (*.jsonl, *.ndjson, *.json, .gz, .zst)",
                        dir);
    return rc;
}

int sl_input_list_make(sl_input_list *out, const char *const *paths, int n, const char *dataset, sl_err *err) {
    *out = (sl_input_list){0};
    for (int i = 0; i < n; i++) {
        struct stat st;
        const char *p = paths[i], *slash = strrchr(p, '/'), *name = !strcmp(p, "-") ? "stdin" : slash ? slash + 1 : p;
        int rc;
        if (strcmp(p, "-") && !stat(p, &st) && S_ISDIR(st.st_mode))
            rc = add_folder(out, p, err);
        else
            rc = add(out, strdup(p), dataset && n == 1 ? strdup(dataset) : strndup(name, bare(name)), err);
        if (rc) return rc;
    }
    if (dataset && out->n != 1)
        return sl_err_set(err, SL_EUSAGE, "--dataset names one data set, but there are %d files", out->n);
    return SL_OK;
}

void sl_input_list_free(sl_input_list *l) {
    for (int i = 0; i < l->n; i++) free(l->v[i].path), free(l->v[i].dataset);
    free(l->v);
    *l = (sl_input_list){0};
}

/* ---- reading ---- */

typedef enum { UNKNOWN, PLAIN, GZIP, ZSTANDARD } kind;

struct sl_input {
    char *path;
    int raw, fd; /* fd: what rows are read from; the same as raw for a plain regular file */
    kind kind;
    bool direct, may_wait, ended;
    unsigned char *in; /* RAW bytes, of which [at, n) are not used yet */
    size_t at, n;
    bool raw_end;    /* nothing comes after in[n) */
    bool open_frame; /* inside a gzip member or zstd frame */
    char *out;
    uint64_t text, forgotten; /* bytes of text so far; given back */
    z_stream z;
    ZSTD_DStream *zs;
};

static kind kind_of(const unsigned char *p, size_t n) {
    static const unsigned char gz[] = {0x1f, 0x8b}, zst[] = {0x28, 0xb5, 0x2f, 0xfd};
    if (n >= sizeof gz && !memcmp(p, gz, sizeof gz)) return GZIP;
    if (n >= sizeof zst && !memcmp(p, zst, sizeof zst)) return ZSTANDARD;
    return PLAIN;
}

static int open_spool(const char *dir, sl_err *err) {
    if (!dir) dir = getenv("TMPDIR");
    if (!dir || !*dir) dir = "/tmp";
    int fd = open(dir, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd >= 0) return fd;
    char path[PATH_MAX]; /* file systems without unnamed files */
    snprintf(path, sizeof path, "%s/.sluice-spool-XXXXXX", dir);
    fd = mkostemp(path, O_CLOEXEC);
    if (fd < 0) return sl_err_sys(err, SL_ETEMP, errno, "a spool file in %s", dir);
    unlink(path);
    return fd;
}

int sl_input_open(sl_input **out, const char *path, const char *spool, sl_err *err) {
    sl_input *in = calloc(1, sizeof *in);
    unsigned char head[4];
    struct stat st = {0};
    if (!in) return sl_err_set(err, SL_ETEMP, "out of memory");
    in->fd = -1;
    in->raw = strcmp(path, "-") ? open(path, O_RDONLY | O_CLOEXEC) : fcntl(0, F_DUPFD_CLOEXEC, 3);
    in->path = strdup(strcmp(path, "-") ? path : "standard input");
    int rc = SL_OK;
    if (in->raw < 0 || fstat(in->raw, &st)) rc = sl_err_sys(err, SL_EUSAGE, errno, "input %s", path);
    if (!rc && S_ISDIR(st.st_mode)) rc = sl_err_set(err, SL_EUSAGE, "input %s is a folder", path);
    if (!rc && S_ISREG(st.st_mode)) {
        ssize_t n = pread(in->raw, head, sizeof head, 0);
        /* (standard input that is a file may be open somewhere behind its start) */
        in->direct = strcmp(path, "-") && kind_of(head, n < 0 ? 0 : (size_t)n) == PLAIN;
    }
    in->may_wait = !rc && !S_ISREG(st.st_mode);
    if (!rc && in->direct) in->fd = in->raw;
    if (!rc && !in->direct) {
        in->in = malloc(RAW), in->out = malloc(TEXT);
        if (!in->in || !in->out) rc = sl_err_set(err, SL_ETEMP, "out of memory");
        if (!rc && (in->fd = open_spool(spool, err)) < 0) rc = in->fd;
    }
    if (rc)
        sl_input_close(in);
    else
        *out = in;
    return rc;
}

void sl_input_close(sl_input *in) {
    if (!in) return;
    if (in->kind == GZIP) inflateEnd(&in->z);
    ZSTD_freeDStream(in->zs);
    if (in->fd >= 0 && in->fd != in->raw) close(in->fd);
    if (in->raw >= 0) close(in->raw);
    free(in->path), free(in->in), free(in->out), free(in);
}

int sl_input_fd(const sl_input *in) {
    return in->fd;
}

int sl_input_wait_fd(const sl_input *in) {
    return in->may_wait && !in->ended && in->at == in->n ? in->raw : -1;
}

/* Fill the raw buffer when it is empty (or too short to tell the kind). False when nothing came. */
static bool fill(sl_input *in, int *rc, sl_err *err) {
    if (in->raw_end || (in->at < in->n && in->kind != UNKNOWN)) return in->at < in->n;
    struct pollfd p = {.fd = in->raw, .events = POLLIN};
    if (in->may_wait && poll(&p, 1, 0) <= 0) return false;
    if (in->at == in->n) in->at = in->n = 0;
    ssize_t n = read(in->raw, in->in + in->n, RAW - in->n);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) return false;
    if (n < 0) {
        *rc = sl_err_sys(err, SL_EDATA, errno, "reading %s", in->path);
        return false;
    }
    in->raw_end = n == 0;
    in->n += (size_t)n;
    return in->at < in->n && (in->kind != UNKNOWN || in->raw_end || in->n >= 4);
}

static int start(sl_input *in, sl_err *err) {
    in->kind = kind_of(in->in + in->at, in->n - in->at);
    if (in->kind == GZIP && inflateInit2(&in->z, 15 + 16) != Z_OK) {
        in->kind = PLAIN;
        return sl_err_set(err, SL_ETEMP, "out of memory for gzip");
    }
    if (in->kind == ZSTANDARD && !(in->zs = ZSTD_createDStream()))
        return sl_err_set(err, SL_ETEMP, "out of memory for zstd");
    return SL_OK;
}

static int damaged(const sl_input *in, const char *what, const char *why, sl_err *err) {
    return sl_err_set(err, SL_EDATA, "%s: damaged %s data after %llu bytes of text: %s", in->path, what,
                      (unsigned long long)in->text, why ? why : "unknown");
}

static int gunzip(sl_input *in, size_t *made, sl_err *err) {
    if (!in->open_frame && inflateReset(&in->z) != Z_OK) return damaged(in, "gzip", in->z.msg, err);
    in->open_frame = true;
    in->z.next_in = in->in + in->at, in->z.avail_in = (uInt)(in->n - in->at);
    in->z.next_out = (unsigned char *)in->out, in->z.avail_out = TEXT;
    int r = inflate(&in->z, Z_NO_FLUSH);
    in->at = in->n - in->z.avail_in;
    *made = TEXT - in->z.avail_out;
    if (r == Z_STREAM_END) in->open_frame = false;
    return r == Z_OK || r == Z_STREAM_END || r == Z_BUF_ERROR ? SL_OK : damaged(in, "gzip", in->z.msg, err);
}

static int unzstd(sl_input *in, size_t *made, sl_err *err) {
    ZSTD_inBuffer src = {.src = in->in, .size = in->n, .pos = in->at};
    ZSTD_outBuffer dst = {.dst = in->out, .size = TEXT};
    size_t r = ZSTD_decompressStream(in->zs, &dst, &src);
    in->at = src.pos;
    *made = dst.pos;
    if (ZSTD_isError(r)) return damaged(in, "zstd", ZSTD_getErrorName(r), err);
    in->open_frame = r != 0;
    return SL_OK;
}

static int plain(sl_input *in, size_t *made) {
    size_t n = in->n - in->at;
    if (n > TEXT) n = TEXT;
    memcpy(in->out, in->in + in->at, n);
    in->at += n;
    *made = n;
    return SL_OK;
}

static int spool(sl_input *in, size_t n, sl_err *err) {
    for (size_t at = 0; at < n;) {
        ssize_t w = pwrite(in->fd, in->out + at, n - at, (off_t)in->text);
        if (w < 0 && errno == EINTR) continue;
        if (w < 0) return sl_err_sys(err, SL_ETEMP, errno, "spooling %s", in->path);
        at += (size_t)w, in->text += (size_t)w;
    }
    return SL_OK;
}

/* Is there text that is inside the decoder still, with no input left? */
static int step(sl_input *in, size_t *made, bool *end, sl_err *err) {
    int rc = SL_OK;
    bool have = fill(in, &rc, err);
    *made = 0;
    if (rc) return rc;
    if (in->kind == UNKNOWN && have) rc = start(in, err);
    if (!rc && (have || in->open_frame))
        rc = in->kind == GZIP ? gunzip(in, made, err) : in->kind == ZSTANDARD ? unzstd(in, made, err) : plain(in, made);
    if (!rc && *made) rc = spool(in, *made, err);
    if (rc || *made || !in->raw_end || in->at < in->n) return rc;
    *end = true;
    if (in->open_frame)
        return sl_err_set(err, SL_EDATA, "%s: the %s data ends too early, after %llu bytes of text", in->path,
                          in->kind == GZIP ? "gzip" : "zstd", (unsigned long long)in->text);
    return SL_OK;
}

int sl_input_more(sl_input *in, sl_err *err) {
    if (in->direct || in->ended) return 0;
    size_t made, sum = 0;
    do {
        size_t before = in->n - in->at;
        int rc = step(in, &made, &in->ended, err);
        if (rc) {
            in->ended = true;
            return rc;
        }
        sum += made;
        if (!made && before == in->n - in->at && !in->raw_end) break; /* nothing there now */
    } while (!in->ended && sum < TURN);
    return in->ended ? 0 : 1;
}

void sl_input_forget(sl_input *in, uint64_t below) {
    below -= below % PUNCH;
    if (in->direct || below <= in->forgotten) return;
    (void)fallocate(in->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)in->forgotten,
                    (off_t)(below - in->forgotten)); /* where that is not supported the space is kept: harmless */
    in->forgotten = below;
}
