#include "ipc/bench_ring.h"
#include "ipc/doorbell.h"
#include "ipc/flow.h"
#include "ipc/metrics.h"
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PRODUCER, CONSUMER };

/* One run: a ring, two bells, and what the consumer reports back through a shared page. */
typedef struct report {
    uint64_t wrong, end_ns, sum;
    uint64_t seen_ns[];
} report;

typedef struct run {
    int fd, bell[2];
    report *rep;
    uint64_t rep_bytes, n;
    bool copy;
} run;

static int run_open(run *r, uint64_t depth, uint64_t slots, uint64_t size, uint64_t n, uint64_t stamps, sl_err *err) {
    sl_ring_params p = {
        .name = "bench", .depth = depth, .pay_slots = slots, .pay_size = slots ? size : 0, .n_cursors = 2};
    *r = (run){.fd = -1, .bell = {-1, -1}, .n = n, .rep_bytes = sizeof(report) + 8 * stamps};
    bool huge;
    if ((r->fd = sl_ring_create(&p, true, &huge, err)) < 0) return r->fd;
    for (int i = 0; i < 2; i++)
        if ((r->bell[i] = sl_bell_create(err)) < 0) return r->bell[i];
    r->rep = mmap(NULL, r->rep_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (r->rep == MAP_FAILED) {
        r->rep = NULL;
        sl_err_sys(err, SL_ETEMP, errno, "bench ring: %llu bytes", (unsigned long long)r->rep_bytes);
        return SL_ETEMP;
    }
    return 0;
}

static void run_close(run *r) {
    if (r->rep) munmap(r->rep, r->rep_bytes);
    if (r->fd >= 0) close(r->fd);
    for (int i = 0; i < 2; i++)
        if (r->bell[i] >= 0) close(r->bell[i]);
}

static void wait_bell(int fd) {
    struct pollfd p;
    sl_bell_wait(fd, &p, 1, 1000);
}

/* ---- the consumer's process ---- */
static void take(const sl_ring *c, run *r, uint64_t at, void *copy) {
    uint64_t v;
    memcpy(&v, sl_ring_at(c, at)->body, 8);
    if (v != at) r->rep->wrong++;
    uint64_t size = sl_ring_info(c)->pay_size;
    const void *p = sl_ring_payload(c, at);
    if (!p) return;
    if (r->copy) p = memcpy(copy, p, size);
    r->rep->sum += sl_sum64(p, size);
}

static int consume(run *r, bool stamp) {
    sl_ring *c;
    if (sl_ring_attach(&c, r->fd, CONSUMER, NULL)) return 1;
    void *copy = malloc(sl_ring_info(c)->pay_size + 1);
    if (!copy) return 1;
    for (uint64_t at = 0; at < r->n;) {
        sl_bell_drain(r->bell[CONSUMER]);
        uint64_t to = sl_ring_pos(c, 0);
        if (to == at) {
            wait_bell(r->bell[CONSUMER]);
            continue;
        }
        if (stamp) r->rep->seen_ns[at] = sl_now_ns();
        while (at < to) {
            take(c, r, at++, copy);
            if (sl_ring_info(c)->pay_slots || at == to) { /* payload goes back at once, descriptors by the handful */
                if (sl_ring_advance(c, at, NULL)) return 1;
                sl_bell_ring(r->bell[PRODUCER]);
            }
        }
    }
    r->rep->end_ns = sl_now_ns();
    return 0;
}

static pid_t start_consumer(run *r, bool stamp, sl_err *err) {
    pid_t pid = fork();
    if (pid < 0) return sl_err_sys(err, SL_ETEMP, errno, "bench ring: fork");
    if (pid) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    _exit(consume(r, stamp));
}

/* ---- the producer: this process ---- */
static uint64_t produce(run *r, sl_ring *p, uint32_t burst, bool pay, uint64_t *published_ns) {
    uint64_t start = sl_now_ns(), size = sl_ring_info(p)->pay_size;
    for (uint64_t i = 0; i < r->n;) {
        sl_bell_drain(r->bell[PRODUCER]);
        uint32_t k = 0;
        bool idle = !published_ns || sl_ring_fill(p) == 0; /* latency: one in flight */
        for (; idle && k < burst && i < r->n; k++, i++) {
            if (pay && sl_ring_pay_room(p)) memset(sl_ring_pay_next(p), (int)(i + 1), size);
            sl_desc *d = sl_ring_stage(p, pay);
            if (!d) break;
            d->h.kind = 1;
            memcpy(d->body, &i, 8);
        }
        if (!k) {
            wait_bell(r->bell[PRODUCER]);
            continue;
        }
        if (published_ns) {
            usleep(20); /* let the consumer fall asleep: the wake-up is what is measured */
            published_ns[i - 1] = sl_now_ns();
        }
        sl_ring_publish(p);
        sl_bell_ring(r->bell[CONSUMER]);
    }
    return start;
}

/* Seconds from the producer's first step to the consumer's last. */
static int run_go(run *r, uint32_t burst, bool pay, uint64_t *published_ns, double *seconds, sl_err *err) {
    sl_ring *p;
    int rc = sl_ring_attach(&p, r->fd, PRODUCER, err), st = 0;
    if (rc) return rc;
    pid_t pid = start_consumer(r, published_ns != NULL, err);
    if (pid < 0) {
        sl_ring_detach(p);
        return (int)pid;
    }
    uint64_t start = produce(r, p, burst, pay, published_ns);
    while (waitpid(pid, &st, 0) < 0 && errno == EINTR) {}
    sl_ring_detach(p);
    if (st || r->rep->wrong)
        return sl_err_set(err, SL_EINTERNAL, "bench ring: %llu wrong items, consumer status %d",
                          (unsigned long long)r->rep->wrong, st);
    *seconds = (double)(r->rep->end_ns - start) / 1e9;
    return 0;
}

static int cmp_u64(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static int bench_latency(uint64_t pings, sl_bench_ring_result *out, sl_err *err) {
    run r;
    double sec;
    uint64_t *at = calloc(pings, 8);
    int rc = at ? run_open(&r, 64, 0, 0, pings, pings, err) : sl_err_set(err, SL_ETEMP, "bench ring: no memory");
    if (!at) return rc;
    if (!rc) rc = run_go(&r, 1, false, at, &sec, err);
    if (!rc) {
        for (uint64_t i = 0; i < pings; i++) at[i] = r.rep->seen_ns[i] - at[i];
        qsort(at, pings, 8, cmp_u64);
        uint64_t p50 = pings / 2, p99 = pings * 99 / 100;
        out->latency_p50_us = (double)at[p50] / 1e3;
        out->latency_p99_us = (double)at[p99] / 1e3;
    }
    run_close(&r);
    free(at);
    return rc;
}

/* Several runs that differ in one thing are interleaved, and the best of each counts: noise only ever slows. */
static int bench_payload(const sl_bench_ring_opts *o, sl_bench_ring_result *out, sl_err *err) {
    uint64_t n = o->payload_bytes / 3 / o->payload_size + 1;
    for (int i = 0; i < 6; i++) {
        run r;
        double sec = 0;
        int rc = run_open(&r, 64, 16, o->payload_size, n, 0, err);
        r.copy = i & 1;
        if (!rc) rc = run_go(&r, 1, true, NULL, &sec, err);
        run_close(&r);
        if (rc) return rc;
        double gbs = (double)n * (double)o->payload_size / sec / 1e9,
               *best = i & 1 ? &out->memcpy_gb_s : &out->zero_copy_gb_s;
        if (gbs > *best) *best = gbs;
    }
    out->payload_bytes = 3 * n * o->payload_size;
    return 0;
}

int sl_bench_ring(const sl_bench_ring_opts *opts, sl_bench_ring_result *out, sl_err *err) {
    sl_bench_ring_opts o = *opts;
    if (!o.messages) o.messages = 2000000;
    if (!o.depth) o.depth = 4096;
    if (!o.burst) o.burst = 64;
    if (!o.pings) o.pings = 20000;
    if (!o.payload_size) o.payload_size = 1u << 20;
    if (!o.payload_bytes) o.payload_bytes = 2ull << 30;
    if (o.payload_size % 4096) return sl_err_set(err, SL_EUSAGE, "payload size must be a multiple of 4096");
    *out = (sl_bench_ring_result){
        .messages = o.messages, .pings = o.pings, .burst = o.burst, .depth = o.depth, .payload_size = o.payload_size};
    run r;
    double sec = 0;
    int rc = run_open(&r, o.depth, 0, 0, o.messages, 0, err);
    if (!rc) rc = run_go(&r, o.burst, false, NULL, &sec, err);
    run_close(&r);
    if (rc) return rc;
    out->messages_per_s = (double)o.messages / sec;
    if ((rc = bench_latency(o.pings, out, err))) return rc;
    return bench_payload(&o, out, err);
}
