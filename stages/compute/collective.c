/* collective: the implementations that need no GPU. See collective.h for the protocol. */
#include "stages/compute/collective.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define COLL_MAGIC  0x314c4f43434c5353ull
#define COLL_PAGE   4096u
#define COLL_MAX_TP 64

typedef struct coll_head {
    uint64_t magic;
    uint32_t tp, pad;
    uint64_t max_elems, bytes;
    _Alignas(128) _Atomic uint32_t bell; /* futex word: + 1 by whoever completes a barrier */
    _Alignas(128) _Atomic uint32_t sleepers;
} coll_head;

typedef struct coll_flag {    /* one page a rank */
    _Atomic uint64_t arrived; /* epoch << 40 | number of barriers entered in this epoch */
    _Atomic uint64_t value;   /* of `agree`, written before the arrival that publishes it */
} coll_flag;

typedef struct coll_shm {
    uint8_t *base;
    uint64_t bytes, buf_bytes, max_elems, count;
    uint32_t epoch;
    int spins;
    coll_head *head;
    sl_ops *ops;
} coll_shm;

static uint64_t round_page(uint64_t n) {
    return (n + COLL_PAGE - 1) / COLL_PAGE * COLL_PAGE;
}

uint64_t sl_coll_shm_footprint(int tp, int64_t max_elems) {
    if (tp < 2 || tp > COLL_MAX_TP || max_elems < 1 || max_elems > (int64_t)1 << 36) return 0;
    return COLL_PAGE + (uint64_t)tp * COLL_PAGE + (uint64_t)(tp + 1) * round_page((uint64_t)max_elems * 4);
}

int sl_coll_shm_create_region(int tp, int64_t max_elems, sl_err *err) {
    uint64_t bytes = sl_coll_shm_footprint(tp, max_elems);
    if (!bytes)
        return sl_err_set(err, SL_ECONFIG,
                          "collective: %d ranks and %lld elements make no region (2..%d ranks, at least 1 element)", tp,
                          (long long)max_elems, COLL_MAX_TP);
    int fd = memfd_create("sluice-coll", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return sl_err_sys(err, SL_ETEMP, errno, "collective: memfd_create");
    int e = posix_fallocate(fd, 0, (off_t)bytes);
    if (e) {
        close(fd);
        return sl_err_sys(err, SL_ETEMP, e, "collective: no memory for %llu bytes of shared memory",
                          (unsigned long long)bytes);
    }
    coll_head h = {.magic = COLL_MAGIC, .tp = (uint32_t)tp, .max_elems = (uint64_t)max_elems, .bytes = bytes};
    if (pwrite(fd, &h, sizeof h, 0) != (ssize_t)sizeof h ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0) {
        e = errno;
        close(fd);
        return sl_err_sys(err, SL_ETEMP, e, "collective: writing and sealing the region");
    }
    return fd;
}

static coll_flag *flag_of(const coll_shm *s, int r) {
    return (coll_flag *)(s->base + COLL_PAGE + (uint64_t)r * COLL_PAGE);
}
static uint8_t *buf_of(const coll_shm *s, int tp, int r) { /* r == tp: the result */
    return s->base + COLL_PAGE + (uint64_t)tp * COLL_PAGE + (uint64_t)r * s->buf_bytes;
}

static void futex_wait(_Atomic uint32_t *w, uint32_t seen) {
    struct timespec ts = {.tv_nsec = 200000000}; /* a lost wake-up costs 0.2 s, never a hang */
    syscall(SYS_futex, w, FUTEX_WAIT, seen, &ts, NULL, 0);
}
static void futex_wake(_Atomic uint32_t *w) {
    syscall(SYS_futex, w, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* 1: everybody has entered barrier number `count` of this epoch; 0: not yet; SL_ETEMP: a newer life is here. */
static int all_arrived(const coll_shm *s, int tp, sl_err *err) {
    uint64_t want = (uint64_t)s->epoch << 40 | s->count;
    for (int r = 0; r < tp; r++) {
        uint64_t v = atomic_load(&flag_of(s, r)->arrived); /* seq_cst: see shm_barrier */
        if (v >> 40 > s->epoch)
            return sl_err_set(err, SL_ETEMP,
                              "collective: rank %d runs in epoch %llu, this rank in %u: the group was restarted", r,
                              (unsigned long long)(v >> 40), s->epoch);
        if (v < want) return 0;
    }
    return 1;
}

/* Arrivals and the look at all arrivals are sequentially consistent: of several ranks that arrive together the last one
 * in that order sees all of them, rings the bell, and wakes who sleeps. `sleepers` counts up before the last look, so
 * either the sleeper sees the arrival or the arriver sees the sleeper. */
static int shm_barrier(sl_coll *c, sl_err *err) {
    coll_shm *s = c->impl;
    s->count++;
    /* Flags only rise: a rank that was left behind cannot take a newer life's arrival back. */
    uint64_t mine = (uint64_t)s->epoch << 40 | s->count, seen_flag = atomic_load(&flag_of(s, c->rank)->arrived);
    while (seen_flag < mine && !atomic_compare_exchange_weak(&flag_of(s, c->rank)->arrived, &seen_flag, mine)) {}
    int got = all_arrived(s, c->tp, err);
    if (got == 1) {
        atomic_fetch_add(&s->head->bell, 1);
        if (atomic_load(&s->head->sleepers)) futex_wake(&s->head->bell);
        return 0;
    }
    for (int i = 0; got == 0 && i < s->spins; i++) {
        __builtin_ia32_pause();
        got = all_arrived(s, c->tp, err);
    }
    if (got == 0) {
        atomic_fetch_add(&s->head->sleepers, 1);
        for (;;) {
            uint32_t seen = atomic_load(&s->head->bell);
            if ((got = all_arrived(s, c->tp, err)) != 0) break;
            futex_wait(&s->head->bell, seen);
        }
        atomic_fetch_sub(&s->head->sleepers, 1);
    }
    return got < 0 ? got : 0;
}

static int shm_agree(sl_coll *c, uint64_t mine, uint64_t *least, uint64_t *greatest, sl_err *err) {
    coll_shm *s = c->impl;
    atomic_store(&flag_of(s, c->rank)->value, mine);
    int rc = shm_barrier(c, err);
    if (rc) return rc;
    *least = UINT64_MAX;
    *greatest = 0;
    for (int r = 0; r < c->tp; r++) {
        uint64_t v = atomic_load(&flag_of(s, r)->value);
        if (v < *least) *least = v;
        if (v > *greatest) *greatest = v;
    }
    return shm_barrier(c, err); /* nobody may give the next number before everybody has read this one */
}

/* ---- the sum of one slice: f32 accumulation in rank order, one rounding ---- */
#define INLINE static inline __attribute__((always_inline))
INLINE float from_bf16(uint16_t v) {
    uint32_t u = (uint32_t)v << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
INLINE uint16_t to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    uint32_t nan = (u & 0x7fffffffu) > 0x7f800000u;
    return nan ? (uint16_t)(u >> 16 | 0x40) : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
#define TILE 256
/* out[lo..hi) = round(sum of the ranks' inputs (+ out)) */
INLINE void sum_f32_body(float *out, int onto, const uint8_t *in, uint64_t stride, int tp, int64_t lo, int64_t hi) {
    for (int64_t i = lo; i < hi; i += TILE) {
        int64_t n = hi - i < TILE ? hi - i : TILE;
        const float *x = (const float *)in + i;
        float acc[TILE];
        for (int64_t j = 0; j < n; j++) acc[j] = x[j];
        for (int r = 1; r < tp; r++) {
            x = (const float *)(in + (uint64_t)r * stride) + i;
            for (int64_t j = 0; j < n; j++) acc[j] += x[j];
        }
        for (int64_t j = 0; onto && j < n; j++) acc[j] += out[i + j];
        memcpy(out + i, acc, (size_t)n * 4);
    }
}
INLINE void sum_bf16_body(uint16_t *out, int onto, const uint8_t *in, uint64_t stride, int tp, int64_t lo, int64_t hi) {
    for (int64_t i = lo; i < hi; i += TILE) {
        int64_t n = hi - i < TILE ? hi - i : TILE;
        const uint16_t *x = (const uint16_t *)in + i;
        float acc[TILE];
        for (int64_t j = 0; j < n; j++) acc[j] = from_bf16(x[j]);
        for (int r = 1; r < tp; r++) {
            x = (const uint16_t *)(in + (uint64_t)r * stride) + i;
            for (int64_t j = 0; j < n; j++) acc[j] += from_bf16(x[j]);
        }
        for (int64_t j = 0; onto && j < n; j++) acc[j] += from_bf16(out[i + j]);
        for (int64_t j = 0; j < n; j++) out[i + j] = to_bf16(acc[j]);
    }
}
typedef void sum_fn(void *out, int onto, const uint8_t *in, uint64_t stride, int tp, int64_t lo, int64_t hi);
// NOLINTBEGIN(bugprone-macro-parentheses): an attribute stands without
#define SUMS(isa, attr)                                                                                                \
    attr static void sum_f32_##isa(void *o, int onto, const uint8_t *in, uint64_t st, int tp, int64_t lo,              \
                                   int64_t hi) {                                                                       \
        sum_f32_body(o, onto, in, st, tp, lo, hi);                                                                     \
    }                                                                                                                  \
    attr static void sum_bf16_##isa(void *o, int onto, const uint8_t *in, uint64_t st, int tp, int64_t lo,             \
                                    int64_t hi) {                                                                      \
        sum_bf16_body(o, onto, in, st, tp, lo, hi);                                                                    \
    }
// NOLINTEND(bugprone-macro-parentheses)
SUMS(any, )
SUMS(avx2, __attribute__((target("avx2"))))

static sum_fn *pick_sum(sl_dtype act) {
    int fast = __builtin_cpu_supports("avx2");
    if (act == SL_F32) return fast ? sum_f32_avx2 : sum_f32_any;
    return fast ? sum_bf16_avx2 : sum_bf16_any;
}

/* One piece of at most max_elems elements. */
static int shm_piece(sl_coll *c, uint8_t *h, uint8_t *part, int64_t n, sl_err *err) {
    coll_shm *s = c->impl;
    uint64_t es = s->ops->act == SL_F32 ? 4 : 2;
    uint8_t *mine = buf_of(s, c->tp, c->rank), *result = buf_of(s, c->tp, c->tp);
    /* Slices start on 64-byte lines, so that no two ranks write one line. */
    int64_t lines = (n + 31) / 32, lo = lines * c->rank / c->tp * 32, hi = lines * (c->rank + 1) / c->tp * 32;
    if (hi > n) hi = n;
    int rc = s->ops->download(s->ops->ctx, mine, part, (uint64_t)n * es, err);
    if (rc || (rc = shm_barrier(c, err))) return rc;
    /* Behind the barrier everybody has copied the previous result out. */
    if (h && lo < hi)
        rc = s->ops->download(s->ops->ctx, result + (uint64_t)lo * es, h + (uint64_t)lo * es, (uint64_t)(hi - lo) * es,
                              err);
    if (rc) return rc;
    if (lo < hi) pick_sum(s->ops->act)(result, h != NULL, buf_of(s, c->tp, 0), s->buf_bytes, c->tp, lo, hi);
    if ((rc = shm_barrier(c, err))) return rc;
    return s->ops->upload(s->ops->ctx, h ? h : part, result, (uint64_t)n * es, err);
}

static int shm_reduce(sl_coll *c, void *h, void *part, int64_t n, uint64_t *ticket, sl_err *err) {
    coll_shm *s = c->impl;
    uint64_t es = s->ops->act == SL_F32 ? 4 : 2;
    *ticket = 0;
    for (int64_t at = 0; at < n; at += (int64_t)s->max_elems) {
        int64_t m = n - at < (int64_t)s->max_elems ? n - at : (int64_t)s->max_elems;
        int rc = shm_piece(c, h ? (uint8_t *)h + (uint64_t)at * es : NULL, (uint8_t *)part + (uint64_t)at * es, m, err);
        if (rc) return rc;
    }
    return 0;
}
static int done_wait(sl_coll *c, uint64_t ticket, sl_err *err) {
    (void)c, (void)ticket, (void)err;
    return 0;
}
static uint64_t no_scratch(const sl_coll *c, int64_t n) {
    (void)c, (void)n;
    return 0;
}

static void shm_destroy(sl_coll *c) {
    coll_shm *s = c->impl;
    if (s) munmap(s->base, s->bytes);
    free(s);
    free(c);
}

static int shm_map(coll_shm *s, int fd, int tp, sl_err *err) {
    struct stat st;
    if (fstat(fd, &st) < 0) return sl_err_sys(err, SL_EINTERNAL, errno, "collective: fd %d", fd);
    if ((uint64_t)st.st_size < sizeof(coll_head))
        return sl_err_set(err, SL_EINTERNAL, "collective: region of %lld bytes is too small", (long long)st.st_size);
    s->bytes = (uint64_t)st.st_size;
    s->base = mmap(NULL, s->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (s->base == MAP_FAILED) {
        s->base = NULL;
        return sl_err_sys(err, SL_ETEMP, errno, "collective: mapping %llu bytes", (unsigned long long)s->bytes);
    }
    s->head = (coll_head *)s->base;
    s->max_elems = s->head->max_elems;
    if (s->head->magic != COLL_MAGIC || s->head->tp != (uint32_t)tp || s->max_elems > (uint64_t)1 << 36 ||
        sl_coll_shm_footprint(tp, (int64_t)s->max_elems) != s->bytes) {
        sl_err_set(err, SL_EINTERNAL,
                   "collective: the region is not one of %d ranks (magic %016llx, %u ranks, %llu bytes)", tp,
                   (unsigned long long)s->head->magic, s->head->tp, (unsigned long long)s->bytes);
        munmap(s->base, s->bytes);
        return SL_EINTERNAL;
    }
    s->buf_bytes = round_page(s->max_elems * 4);
    return 0;
}

int sl_coll_shm_open(sl_coll **out, int fd, int rank, int tp, uint32_t epoch, sl_ops *ops, sl_err *err) {
    *out = NULL;
    if (tp < 2 || tp > COLL_MAX_TP || rank < 0 || rank >= tp || !epoch || epoch >= 1u << 24)
        return sl_err_set(err, SL_EINTERNAL, "collective: rank %d of %d in epoch %u", rank, tp, epoch);
    coll_shm *s = calloc(1, sizeof *s);
    sl_coll *c = calloc(1, sizeof *c);
    int rc = s && c ? shm_map(s, fd, tp, err) : sl_err_set(err, SL_ETEMP, "collective: out of memory");
    if (rc) {
        free(s);
        free(c);
        return rc;
    }
    s->epoch = epoch;
    s->ops = ops;
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    s->spins = cpus >= tp ? 400 : 20;
    *c = (sl_coll){.rank = rank,
                   .tp = tp,
                   .how = "host memory",
                   .scratch_bytes = no_scratch,
                   .reduce = shm_reduce,
                   .wait = done_wait,
                   .barrier = shm_barrier,
                   .agree = shm_agree,
                   .destroy = shm_destroy,
                   .impl = s};
    *out = c;
    return 0;
}

/* ---- one rank ---- */
/* Nobody calls it: with one rank the products add to the residual themselves. */
static int none_reduce(sl_coll *c, void *h, void *part, int64_t n, uint64_t *ticket, sl_err *err) {
    (void)c, (void)part, (void)n;
    *ticket = 0;
    return h ? sl_err_set(err, SL_EINTERNAL, "collective: one rank has nothing to add up") : 0;
}
static int none_barrier(sl_coll *c, sl_err *err) {
    (void)c, (void)err;
    return 0;
}
static int none_agree(sl_coll *c, uint64_t mine, uint64_t *least, uint64_t *greatest, sl_err *err) {
    (void)c, (void)err;
    *least = *greatest = mine;
    return 0;
}
static void none_destroy(sl_coll *c) {
    free(c);
}

int sl_coll_none_open(sl_coll **out, sl_err *err) {
    sl_coll *c = *out = malloc(sizeof *c);
    if (!c) return sl_err_set(err, SL_ETEMP, "collective: out of memory");
    *c = (sl_coll){.rank = 0,
                   .tp = 1,
                   .how = "one rank",
                   .scratch_bytes = no_scratch,
                   .reduce = none_reduce,
                   .wait = done_wait,
                   .barrier = none_barrier,
                   .agree = none_agree,
                   .destroy = none_destroy};
    return 0;
}
