/* loader: the same bytes through the ring (a backend without pinned memory) and through staging (one with it, whose
 * copies happen as late as they may), cold and cached, whole and in slices; files that end early, values that are not
 * finite, copies that fail; pinned memory that is not to be had. */
#include "stages/compute/loader.h"
#include "stages/compute/staging.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

/* ---- a device whose copies are late ---- */

enum { TICKETS = 64 };
typedef struct device {
    struct late {
        void *dst;
        const void *src;
        uint64_t bytes, ticket;
    } late[TICKETS];
    int n, most, fail_at, started, pinned;
    uint64_t ticket, pinned_bytes;
} device;

static void run_late(device *d, uint64_t up_to) {
    int n = 0;
    for (int i = 0; i < d->n; i++) {
        if (d->late[i].ticket <= up_to)
            memcpy(d->late[i].dst, d->late[i].src, d->late[i].bytes);
        else
            d->late[n++] = d->late[i];
    }
    d->n = n;
}
static int dev_upload(void *ctx, void *dst, const void *src, uint64_t bytes, sl_err *err) {
    (void)ctx, (void)err;
    memcpy(dst, src, bytes);
    return 0;
}
static int dev_sync(void *ctx, sl_err *err) {
    (void)err;
    run_late(ctx, UINT64_MAX);
    return 0;
}
static int dev_host_alloc(void *ctx, void **p, uint64_t bytes, sl_err *err) {
    device *d = ctx;
    if (d->pinned < 0) return sl_err_set(err, SL_ETEMP, "pinned memory is locked away");
    *p = aligned_alloc(4096, bytes);
    d->pinned++;
    d->pinned_bytes = bytes;
    return *p ? 0 : sl_err_set(err, SL_ETEMP, "no memory");
}
static void dev_host_free(void *ctx, void *p) {
    ((device *)ctx)->pinned--;
    free(p);
}
static int dev_start(void *ctx, void *dst, const void *src, uint64_t bytes, uint64_t *ticket, sl_err *err) {
    device *d = ctx;
    if (++d->started == d->fail_at) return sl_err_set(err, SL_EINTERNAL, "the device fell off the bus");
    assert_true(d->n < TICKETS);
    *ticket = ++d->ticket;
    d->late[d->n++] = (struct late){dst, src, bytes, *ticket};
    if (d->n > d->most) d->most = d->n;
    return 0;
}
static int dev_wait(void *ctx, uint64_t ticket, sl_err *err) {
    (void)err;
    run_late(ctx, ticket);
    return 0;
}
static sl_ops ops_of(device *d, int staged) {
    sl_ops o = {.name = "late", .ctx = d, .upload = dev_upload, .sync = dev_sync};
    if (staged) {
        o.host_alloc = dev_host_alloc;
        o.host_free = dev_host_free;
        o.upload_start = dev_start;
        o.upload_wait = dev_wait;
    }
    return o;
}

/* ---- what the kernel says of a read that must not wait, and of direct ones ---- */

typedef enum {
    AS_IT_IS,
    NOT_IN_MEMORY, /* every byte would have to be waited for */
    CANNOT_TELL,   /* no such file system */
    HALF_IN_MEMORY,
    REFUSES,    /* direct reads are refused after all */
    ENDS_ODDLY, /* direct reads come back short, in the middle of a block */
    SHORT,      /* a part at a time */
    FAILS
} kernel_says;
static kernel_says kernel;
static _Atomic unsigned n_direct, n_crooked;

ssize_t __real_preadv2(int fd, const struct iovec *v, int n, off_t off, int flags);
ssize_t __wrap_preadv2(int fd, const struct iovec *v, int n, off_t off, int flags);
ssize_t __wrap_preadv2(int fd, const struct iovec *v, int n, off_t off, int flags) {
    struct iovec part = *v;
    if (kernel == CANNOT_TELL) return errno = EOPNOTSUPP, -1;
    if (kernel != AS_IT_IS && kernel != HALF_IN_MEMORY) return errno = EAGAIN, -1;
    if (kernel == HALF_IN_MEMORY && part.iov_len > 1) part.iov_len /= 2;
    return __real_preadv2(fd, &part, n, off, flags);
}
ssize_t __real_pread(int fd, void *buf, size_t n, off_t off);
ssize_t __wrap_pread(int fd, void *buf, size_t n, off_t off);
ssize_t __wrap_pread(int fd, void *buf, size_t n, off_t off) {
    if (!(fcntl(fd, F_GETFL) & O_DIRECT)) return __real_pread(fd, buf, n, off);
    n_direct++;
    if (off % 4096 || n % 4096 || (uintptr_t)buf % 4096) n_crooked++;
    if (kernel == REFUSES) return errno = EINVAL, -1;
    if (kernel == FAILS) return errno = EIO, -1;
    ssize_t r = __real_pread(fd, buf, n, off), most = kernel == ENDS_ODDLY ? 5000 : kernel == SHORT ? 1 << 20 : r;
    return r < most ? r : most;
}

/* ---- a checkpoint of one tensor ---- */

#define BYTES UINT64_C(50000003) /* no multiple of anything */
static char dir[64] = "test_loader.XXXXXX", path[128];
static uint8_t *data; /* what is in the tensor */
static uint64_t start;

static int make_files(void **state) {
    (void)state;
    char head[256];
    uint64_t x = 88172645463325252u, n;
    if (!mkdtemp(dir) || !(data = malloc(BYTES + 8))) return 1;
    for (uint64_t i = 0; i < BYTES; i += 8) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        memcpy(data + i, &x, 8);
    }
    n = (uint64_t)snprintf(head, sizeof head, "{\"t\":{\"dtype\":\"U8\",\"shape\":[%llu],\"data_offsets\":[0,%llu]}}",
                           (unsigned long long)BYTES, (unsigned long long)BYTES);
    start = 8 + n;
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    FILE *f = fopen(path, "wb");
    int ok = f && fwrite(&n, 8, 1, f) == 1 && fwrite(head, 1, n, f) == n && fwrite(data, 1, BYTES, f) == BYTES;
    return !(f && fclose(f) == 0 && ok);
}
static int remove_files(void **state) {
    (void)state;
    free(data);
    return unlink(path) || rmdir(dir);
}
/* Out of the page cache, where the file system has one to be out of. */
static void make_cold(void) {
    int fd = open(path, O_RDONLY);
    assert_true(fd >= 0);
    (void)fsync(fd);
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
}
static void make_warm(void) {
    uint8_t *b = malloc(1 << 20);
    int fd = open(path, O_RDONLY);
    assert_true(fd >= 0);
    while (read(fd, b, 1 << 20) > 0) {}
    close(fd);
    free(b);
}

/* ---- cases ---- */

typedef struct extent {
    uint64_t off, rows, pitch, piece;
} extent;
static const extent extents[] = {
    {0, 1, 1, 1},
    {5, 1, 4095, 4095},
    {4091, 1, 8192, 8192},
    {1000001, 1, 30000001, 30000001},   /* several chunks */
    {77, 700, 28000, 3500},             /* a slice of columns: more gaps than data */
    {33, 9000, 120, 100},               /* hardly any gaps */
    {100, 5, 100000, 40000},            /* pieces large enough to be read one by one */
    {12, 3, 9000000, 10},               /* further apart than a chunk */
    {7, 1000, 1000, 1000},              /* no gaps */
    {BYTES - 9999, 1, 9999, 9999},      /* the last byte */
    {BYTES - 4000000, 400, 10000, 400}, /* ends before the end, in a gap */
};
enum { N = sizeof extents / sizeof *extents };

typedef struct counts {
    uint64_t last;
    int backwards;
} counts;
static void on_progress(void *arg, uint64_t done, uint64_t total) {
    counts *c = arg;
    (void)total;
    c->backwards |= done < c->last;
    c->last = done;
}

static void all_extents(int staged, int cold) {
    device d = {0};
    sl_ops ops = ops_of(&d, staged);
    sl_err err = {0};
    sl_source src;
    sl_loader *r;
    counts c = {0};
    sl_loader_progress p = {on_progress, &c, 0, 0};
    uint8_t *dst[N];
    uint64_t total = 0;
    assert_int_equal(sl_source_open(&src, dir, &err), 0);
    if (cold)
        make_cold();
    else
        make_warm();
    if (sl_loader_open(&r, &src, &ops, &p, &err)) fail_msg("%s", err.msg);
    for (int i = 0; i < N; i++) {
        const extent *x = &extents[i];
        uint64_t bytes = x->rows * x->piece;
        dst[i] = malloc(bytes + 16);
        memset(dst[i], 0x5a, bytes + 16);
        total += bytes;
        if (sl_loader_add(r, 0, start + x->off, x->rows, x->pitch, x->piece, dst[i] + 8,
                          (sl_finite_check){SL_FINITE_NONE, "t", 0}, &err))
            fail_msg("extent %d: %s", i, err.msg);
    }
    if (sl_loader_finish(r, &err)) fail_msg("%s", err.msg);
    for (int i = 0; i < N; i++) {
        const extent *x = &extents[i];
        for (uint64_t k = 0; k < x->rows; k++)
            if (memcmp(dst[i] + 8 + k * x->piece, data + x->off + k * x->pitch, x->piece))
                fail_msg("extent %d, row %llu, staged %d, cold %d: other bytes", i, (unsigned long long)k, staged,
                         cold);
        for (int g = 0; g < 8; g++) {
            assert_int_equal(dst[i][g], 0x5a);
            assert_int_equal(dst[i][8 + x->rows * x->piece + (uint64_t)g], 0x5a);
        }
        free(dst[i]);
    }
    assert_int_equal(c.last, total);
    assert_int_equal(c.backwards, 0);
    assert_int_equal(d.n, 0);
    if (staged) {
        assert_int_equal(d.pinned, 1);
        assert_int_equal(d.pinned_bytes, SL_STAGING_BYTES);
        assert_in_range(d.most, 1, SL_STAGING_BUFFERS); /* never more than there are buffers */
    } else
        assert_int_equal(d.started, 0);
    sl_loader_close(r);
    assert_int_equal(d.pinned, 0);
    sl_source_close(&src);
}
static void test_extents(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) all_extents(i & 1, i >> 1);
}

/* Whatever the kernel has in memory and makes of direct reads, the bytes are the same; direct reads are aligned, are
 * made where bytes would have to be waited for, and not where nobody can tell. */
static void test_what_the_kernel_says(void **state) {
    (void)state;
    int fd = open(path, O_RDONLY | O_DIRECT);
    if (fd < 0) print_message("no direct reads in this folder: they are not tried\n");
    for (kernel = NOT_IN_MEMORY; kernel < FAILS; kernel++) {
        n_direct = n_crooked = 0;
        all_extents(1, 0);
        if (n_crooked) fail_msg("kernel %d: %u direct reads are not aligned", (int)kernel, n_crooked);
        if (fd >= 0 && (kernel == CANNOT_TELL ? n_direct != 0 : !n_direct))
            fail_msg("kernel %d: %u direct reads", (int)kernel, n_direct);
    }
    if (fd >= 0) close(fd);
    kernel = AS_IT_IS;
}

static int open_files(void) {
    int n = 0;
    for (int fd = 0; fd < 256; fd++) n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

/* Reads everything; expects `code` and a message with all of `says`. */
static void expect(const sl_ops *use, sl_source *src, uint64_t bytes, sl_finite_check check, int code,
                   const char *const *says) {
    sl_ops ops = *use;
    sl_err err = {0};
    sl_loader *r;
    uint8_t *dst = malloc(bytes);
    if (sl_loader_open(&r, src, &ops, NULL, &err)) fail_msg("%s", err.msg);
    int rc = sl_loader_add(r, 0, start, 1, bytes, bytes, dst, check, &err);
    if (!rc) rc = sl_loader_finish(r, &err);
    sl_loader_close(r); /* with reads and copies in flight: they must not touch what is gone */
    if (rc != code) fail_msg("%d '%s', expected %d", rc, err.msg, code);
    for (; *says; says++)
        if (!strstr(err.msg, *says)) fail_msg("'%s' does not say '%s'", err.msg, *says);
    free(dst);
}

static const sl_finite_check unchecked = {SL_FINITE_NONE, "t", 0};

static void test_cut(void **state) { /* the file ends in the middle of a page, while it is being read */
    (void)state;
    for (int i = 0; i < 4; i++) {
        device d = {0};
        sl_ops ops = ops_of(&d, i & 1);
        sl_source src;
        assert_int_equal(sl_source_open(&src, dir, NULL), 0);
        assert_int_equal(truncate(path, 33000333), 0);
        if (i >> 1)
            make_cold();
        else
            make_warm();
        expect(&ops, &src, BYTES, unchecked, SL_EDATA,
               (const char *const[]){path, "ends at byte 33000333", "it was cut since it was checked", NULL});
        assert_int_equal(d.n, 0);
        assert_int_equal(d.pinned, 0);
        sl_source_close(&src);
        FILE *f = fopen(path, "r+b");
        assert_non_null(f);
        assert_int_equal(fseek(f, 33000333, SEEK_SET), 0);
        assert_int_equal(fwrite(data + 33000333 - start, 1, BYTES + start - 33000333, f), BYTES + start - 33000333);
        assert_int_equal(fclose(f), 0);
    }
}

static void test_not_finite(void **state) { /* random bits are not finite somewhere; the first bytes alone are */
    (void)state;
    for (int i = 0; i < 2; i++) {
        device d = {0};
        sl_ops ops = ops_of(&d, i);
        sl_source src;
        assert_int_equal(sl_source_open(&src, dir, NULL), 0);
        expect(&ops, &src, BYTES, (sl_finite_check){SL_FINITE_BF16, "layer.%d.scale", 7}, SL_EDATA,
               (const char *const[]){"'layer.7.scale'", "NaN or infinite", NULL});
        expect(&ops, &src, 16, (sl_finite_check){SL_FINITE_BF16, "layer.%d.scale", 7}, 0, (const char *const[]){NULL});
        assert_int_equal(d.pinned, 0);
        sl_source_close(&src);
    }
}

/* A read that fails is neither taken for the end of the file nor tried otherwise: the disk is going. */
static void test_failing_disk(void **state) {
    (void)state;
    device d = {0};
    sl_ops ops = ops_of(&d, 1);
    sl_source src;
    int before = open_files(), fd = open(path, O_RDONLY | O_DIRECT);
    if (fd < 0) skip();
    close(fd);
    assert_int_equal(sl_source_open(&src, dir, NULL), 0);
    kernel = FAILS;
    expect(&ops, &src, BYTES, unchecked, SL_ETEMP, (const char *const[]){path, "cannot read at byte", NULL});
    kernel = AS_IT_IS;
    sl_source_close(&src);
    assert_int_equal(open_files(), before);
}

/* Values that are not finite are found in every row and at the right places of every chunk, and looked for nowhere
 * else: blocks of 34 bytes do not end where chunks do. */
static void check_made(const uint8_t *made, uint64_t bytes, uint64_t off, uint64_t rows, uint64_t pitch, uint64_t piece,
                       sl_finite kind, int code, int line) {
    char folder[] = "test_loader_made.XXXXXX", file[64], head[128];
    assert_non_null(mkdtemp(folder));
    uint64_t n =
        (uint64_t)snprintf(head, sizeof head, "{\"t\":{\"dtype\":\"U8\",\"shape\":[%llu],\"data_offsets\":[0,%llu]}}",
                           (unsigned long long)bytes, (unsigned long long)bytes);
    snprintf(file, sizeof file, "%s/model.safetensors", folder);
    FILE *f = fopen(file, "wb");
    assert_true(f && fwrite(&n, 8, 1, f) == 1 && fwrite(head, 1, n, f) == n && fwrite(made, 1, bytes, f) == bytes);
    assert_int_equal(fclose(f), 0);
    for (int staged = 0; staged < 2; staged++) {
        device d = {0};
        sl_ops ops = ops_of(&d, staged);
        sl_source src;
        sl_loader *r;
        sl_err err = {0};
        uint8_t *dst = malloc(rows * piece);
        assert_int_equal(sl_source_open(&src, folder, NULL), 0);
        assert_int_equal(sl_loader_open(&r, &src, &ops, NULL, &err), 0);
        int rc = sl_loader_add(r, 0, 8 + n + off, rows, pitch, piece, dst, (sl_finite_check){kind, "t", 0}, &err);
        if (!rc) rc = sl_loader_finish(r, &err);
        sl_loader_close(r);
        if (rc != code) fail_msg("line %d, staged %d: %d '%s', expected %d", line, staged, rc, err.msg, code);
        sl_source_close(&src);
        free(dst);
    }
    assert_int_equal(unlink(file) || rmdir(folder), 0);
}
static void test_where_values_are(void **state) {
    (void)state;
    uint64_t bytes = 34 * 600000ull;
    uint8_t *x = malloc(bytes);
    memset(x, 0xff, bytes); /* no scale may be that */
    for (uint64_t i = 0; i < bytes; i += 34) x[i] = 0, x[i + 1] = 0x3c;
    check_made(x, bytes, 0, 1, bytes, bytes, SL_FINITE_Q8_0, 0, __LINE__);
    check_made(x, bytes, 34, 3, 3400, 340, SL_FINITE_Q8_0, 0, __LINE__);
    x[34 * 500000 + 1] = 0x7c;
    check_made(x, bytes, 0, 1, bytes, bytes, SL_FINITE_Q8_0, SL_EDATA, __LINE__);
    memset(x, 0x3c, bytes);
    memset(x + 340, 0xff, 3060); /* a gap */
    for (int row = 0; row < 3; row++) {
        check_made(x, 34000, 0, 3, 3400, 340, SL_FINITE_BF16, 0, __LINE__);
        check_made(x, 34000, 0, 3, 600, 340, SL_FINITE_BF16, SL_EDATA, __LINE__); /* rows that reach into the gap */
        memset(x + row * 3400 + 338, 0xff, 2);
        check_made(x, 34000, 0, 3, 3400, 340, SL_FINITE_BF16, SL_EDATA, __LINE__);
        memset(x + row * 3400 + 338, 0x3c, 2);
    }
    free(x);
}

static void test_device_errors(void **state) {
    (void)state;
    sl_source src;
    assert_int_equal(sl_source_open(&src, dir, NULL), 0);
    for (int at = 1; at < 8; at += 2) {
        device d = {.fail_at = at};
        sl_ops ops = ops_of(&d, 1);
        expect(&ops, &src, BYTES, unchecked, at < 7 ? SL_EINTERNAL : 0,
               (const char *const[]){at < 7 ? "bus" : "", NULL});
        assert_int_equal(d.pinned, 0);
        assert_int_equal(d.n, 0);
    }
    sl_source_close(&src);
}

static void test_no_pinned_memory(void **state) {
    (void)state;
    device d = {.pinned = -1};
    sl_ops ops = ops_of(&d, 1);
    sl_source src;
    sl_loader *r;
    sl_err err = {0};
    uint8_t *dst = malloc(BYTES);
    assert_int_equal(sl_source_open(&src, dir, NULL), 0);
    assert_int_equal(sl_loader_open(&r, &src, &ops, NULL, &err), 0);
    assert_int_equal(sl_loader_add(r, 0, start, 1, BYTES, BYTES, dst, unchecked, &err), 0);
    assert_int_equal(sl_loader_finish(r, &err), 0);
    assert_non_null(strstr(sl_loader_note(r), "pinned memory is locked away"));
    assert_memory_equal(dst, data, BYTES);
    assert_int_equal(d.started, 0);
    sl_loader_close(r);
    sl_source_close(&src);
    free(dst);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_extents),          cmocka_unit_test(test_cut),
        cmocka_unit_test(test_not_finite),       cmocka_unit_test(test_device_errors),
        cmocka_unit_test(test_no_pinned_memory), cmocka_unit_test(test_what_the_kernel_says),
        cmocka_unit_test(test_failing_disk),     cmocka_unit_test(test_where_values_are),
    };
    return cmocka_run_group_tests(tests, make_files, remove_files);
}
