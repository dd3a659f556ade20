/* ring: the contract in one process; then many processes: a producer and two stages move 100,000 descriptors, each
 * process is killed again and again at random times, and every item arrives once, in order, with its own payload. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "ipc/doorbell.h"
#include "ipc/ring.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static sl_err e;

static int make(uint64_t depth, uint64_t slots, uint32_t cursors) {
    sl_ring_params p = {
        .name = "t", .depth = depth, .pay_slots = slots, .pay_size = slots ? 4096 : 0, .n_cursors = cursors};
    bool huge = true;
    int fd = sl_ring_create(&p, false, &huge, &e);
    assert_true(fd >= 0);
    assert_false(huge);
    return fd;
}

static sl_ring *attach(int fd, int role) {
    sl_ring *r;
    if (sl_ring_attach(&r, fd, role, &e)) fail_msg("%s", e.msg);
    return r;
}

static void refuses_bad_shapes(void **state) {
    (void)state;
    const sl_ring_params good = {.name = "t", .depth = 8, .pay_slots = 2, .pay_size = 4096, .n_cursors = 3};
    assert_int_equal(sl_ring_footprint(&good), 4096 + 3 * 4096 + 4096 + 2 * 4096);
    sl_ring_params p[12];
    for (int i = 0; i < 12; i++) p[i] = good;
    p[0].depth = 0;
    p[1].depth = 1;
    p[2].depth = 12;
    p[3].depth = 1ull << 25;
    p[4].pay_slots = 3;
    p[5].pay_size = 100;
    p[6].pay_size = 0;
    p[7].n_cursors = 1;
    p[8].n_cursors = SL_RING_MAX_CURSORS + 1;
    memset(p[9].name, 'x', sizeof p[9].name);
    p[10].pay_size = UINT64_MAX - 4095;
    p[11].pay_slots = 1ull << 63;
    for (int i = 0; i < 12; i++) {
        assert_int_equal(sl_ring_footprint(&p[i]), 0);
        assert_int_equal(sl_ring_create(&p[i], false, NULL, &e), SL_ECONFIG);
    }
    sl_ring_params most = {
        .name = "t", .depth = 2, .n_cursors = SL_RING_MAX_CURSORS}; /* each limit itself is allowed */
    assert_int_equal(sl_ring_footprint(&most), 4096 + SL_RING_MAX_CURSORS * 4096 + 4096);
    most = (sl_ring_params){
        .name = "t", .depth = 1ull << 24, .pay_slots = 1ull << 24, .pay_size = 1ull << 22, .n_cursors = 2};
    assert_true(sl_ring_footprint(&most) > 1ull << 46);
    most.pay_size += 4096;
    assert_int_equal(sl_ring_footprint(&most), 0);
}

static void moves_and_gates(void **state) {
    (void)state;
    int fd = make(4, 2, 3);
    sl_ring *p = attach(fd, 0), *g = attach(fd, 1), *w = attach(fd, 2), *o = attach(fd, SL_RING_OBSERVER);
    close(fd);
    assert_int_equal(sl_ring_room(p), 4);
    assert_int_equal(sl_ring_pay_room(p), 2);
    assert_null(sl_ring_stage(p, 2));
    assert_null(sl_ring_stage(g, 0)); /* only the producer */
    assert_ptr_not_equal(sl_ring_pay_ahead(p, 1), sl_ring_pay_next(p));
    assert_null(sl_ring_pay_ahead(p, 2));
    strcpy(sl_ring_pay_next(p), "first");
    sl_desc *d = sl_ring_stage(p, 1);
    d->h.kind = 9;
    assert_int_equal(d->h.pos, 0);
    assert_int_equal(d->h.pay_end, 1);
    assert_int_equal(sl_ring_stage(p, 0)->h.pay_end, 1);
    assert_null(sl_ring_at(o, 0)); /* staged is not published */
    sl_ring_publish(p);
    assert_int_equal(sl_ring_at(o, 0)->h.kind, 9);
    assert_string_equal(sl_ring_payload(o, 0), "first");
    assert_null(sl_ring_payload(o, 1)); /* owns none */
    assert_null(sl_ring_at(o, 2));
    assert_int_equal(sl_ring_fill(o), 2);
    assert_int_equal(sl_ring_advance(w, 1, &e), SL_EINTERNAL); /* before the stage in front */
    assert_int_equal(sl_ring_advance(g, 3, &e), SL_EINTERNAL); /* beyond published */
    assert_int_equal(sl_ring_advance(o, 1, &e), SL_EINTERNAL);
    assert_int_equal(sl_ring_advance(p, 1, &e), SL_EINTERNAL);
    assert_int_equal(sl_ring_advance(g, 2, &e), 0);
    assert_int_equal(sl_ring_advance(g, 1, &e), SL_EINTERNAL); /* back */
    assert_non_null(sl_ring_stage(p, 1));
    assert_null(sl_ring_stage(p, 1)); /* payload is used up, descriptors are not */
    assert_non_null(sl_ring_stage(p, 0));
    assert_null(sl_ring_stage(p, 0));
    sl_ring_publish(p);
    assert_int_equal(sl_ring_room(p), 0);
    assert_int_equal(sl_ring_advance(w, 1, &e), 0);
    assert_int_equal(sl_ring_room(p), 1);
    assert_int_equal(sl_ring_pay_room(p), 1); /* read from the descriptor before "released" */
    assert_null(sl_ring_at(o, 0));
    assert_null(sl_ring_payload(o, 0));
    assert_int_equal(sl_ring_check(o, &e), 0);
    uint64_t bytes;
    assert_ptr_equal(sl_ring_arena(p, &bytes), (uint8_t *)sl_ring_pay_next(p)); /* slot 0 is free again */
    assert_int_equal(bytes, 2 * 4096);
    assert_int_equal(sl_ring_pos(o, 99), 0);
    sl_ring_detach(p);
    sl_ring_detach(g);
    sl_ring_detach(w);
    sl_ring_detach(o);
}

/* The producer fills the ring to the brim many times around: the descriptor before "released" must survive that. */
static void payload_room_is_exact_when_full(void **state) {
    (void)state;
    int fd = make(4, 4, 2);
    sl_ring *p = attach(fd, 0), *c = attach(fd, 1);
    uint64_t pay = 0;
    for (uint64_t i = 0; i < 1000; i++) {
        while (sl_ring_room(p) && sl_ring_pay_room(p)) {
            unsigned own = (sl_ring_pos(p, 0) * 7 + sl_ring_room(p)) % 3 != 0;
            pay += own;
            assert_int_equal(sl_ring_stage(p, own)->h.pay_end, pay);
            sl_ring_publish(p);
        }
        if (i % 10 == 0) { /* a restarted producer knows the same */
            uint64_t room = sl_ring_room(p), pr = sl_ring_pay_room(p);
            sl_ring_detach(p);
            p = attach(fd, 0);
            assert_int_equal(sl_ring_room(p), room);
            assert_int_equal(sl_ring_pay_room(p), pr);
        }
        uint64_t rel = sl_ring_pos(c, 1), n = 1 + i % 4, have = sl_ring_fill(c);
        assert_int_equal(sl_ring_advance(c, rel + (n < have ? n : have), &e), 0);
    }
    sl_ring_detach(p);
    sl_ring_detach(c);
    close(fd);
}

static void hostile_pay_end_stays_inside(void **state) {
    (void)state;
    int fd = make(4, 4, 2);
    sl_ring *p = attach(fd, 0), *o = attach(fd, SL_RING_OBSERVER);
    const uint64_t evil[] = {UINT64_MAX, 0, 1ull << 63, 2, 5};
    uint64_t bytes;
    const uint8_t *base = sl_ring_arena(o, &bytes);
    for (unsigned i = 0; i < 3; i++) {
        sl_desc *d = sl_ring_stage(p, 1);
        d->h.pay_end = evil[i];
        sl_ring_publish(p);
        const uint8_t *q = sl_ring_payload(o, i);
        if (q) assert_true(q >= base && q < base + bytes);
    }
    assert_true(sl_ring_pay_room(p) <= 4);
    sl_ring_detach(p);
    sl_ring_detach(o);
    close(fd);
}

/* A descriptor of a ring without payload cannot claim one, whatever it says. */
static void no_payload_without_slots(void **state) {
    (void)state;
    int fd = make(4, 0, 2);
    sl_ring *p = attach(fd, 0);
    sl_ring_stage(p, 0)->h.pay_end = 1;
    sl_ring_publish(p);
    assert_non_null(sl_ring_at(p, 0));
    assert_null(sl_ring_payload(p, 0));
    assert_null(sl_ring_pay_next(p));
    assert_null(sl_ring_arena(p, NULL));
    sl_ring_detach(p);
    close(fd);
}

/* An alias shares the mapping: the producer's goes on where the ring is, and only the mapping's owner takes it away. */
static void aliases_share_one_mapping(void **state) {
    (void)state;
    int fd = make(4, 2, 2);
    sl_ring *any = attach(fd, SL_RING_ANY), *p, *q;
    assert_int_equal(sl_ring_alias(&p, any, SL_RING_PRODUCER, &e), 0);
    assert_non_null(sl_ring_stage(p, 1));
    assert_non_null(sl_ring_stage(p, 1));
    sl_ring_publish(p);
    assert_int_equal(sl_ring_alias(&q, p, 1, &e), SL_EINTERNAL);
    assert_int_equal(sl_ring_alias(&q, any, 2, &e), SL_EINTERNAL);
    sl_ring_detach(p);
    assert_int_equal(sl_ring_alias(&q, any, SL_RING_PRODUCER, &e), 0);
    assert_int_equal(sl_ring_room(q), 2);
    assert_int_equal(sl_ring_pay_room(q), 0);
    assert_int_equal(sl_ring_stage(q, 0)->h.pos, 2);
    sl_ring_detach(q);
    void *arena = sl_ring_arena(any, NULL);
    assert_int_equal(msync(arena, 4096, MS_ASYNC), 0);
    sl_ring_detach(any);
    assert_true(msync(arena, 4096, MS_ASYNC) < 0 && errno == ENOMEM); /* unmapped */
    close(fd);
}

static void checks_what_it_maps(void **state) {
    (void)state;
    sl_ring *r;
    int fd = memfd_create("x", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(fd, 65536), 0);
    assert_int_equal(sl_ring_attach(&r, fd, 0, &e), SL_EINTERNAL);
    assert_non_null(strstr(e.msg, "seals"));
    int good = make(4, 0, 2);
    char head[4096];
    assert_int_equal(pread(good, head, sizeof head, 0), sizeof head);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
    assert_int_equal(sl_ring_attach(&r, fd, 0, &e), SL_EINTERNAL);
    assert_non_null(strstr(e.msg, "magic"));
    assert_int_equal(pwrite(fd, head, sizeof head, 0), sizeof head);
    assert_int_equal(sl_ring_attach(&r, fd, 0, &e), SL_EINTERNAL); /* another size than its shape needs */
    for (unsigned i = 0; i < 96; i++) { /* any flipped bit in the header is noticed, or harmless (the name) */
        head[i] ^= 4;
        assert_int_equal(pwrite(good, head, sizeof head, 0), sizeof head);
        if (!sl_ring_attach(&r, good, 0, &e)) {
            assert_true(i >= 32 && i < 96);
            sl_ring_detach(r);
        }
        head[i] ^= 4;
    }
    sl_ring_params more; /* a shape that is valid and needs more than the bytes there are */
    memcpy(&more, head + 32, sizeof more);
    assert_int_equal(more.depth, 4);
    more.depth = 64;
    assert_int_equal(pwrite(good, &more, sizeof more, 32), sizeof more);
    assert_int_equal(sl_ring_attach(&r, good, 0, &e), SL_EINTERNAL);
    assert_non_null(strstr(e.msg, "its shape needs"));
    assert_int_equal(pwrite(good, head, sizeof head, 0), sizeof head);
    assert_int_equal(sl_ring_attach(&r, good, 2, &e), SL_EINTERNAL);
    int small = memfd_create("s", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(small, 64), 0);
    assert_int_equal(fcntl(small, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
    assert_int_equal(sl_ring_attach(&r, small, 0, &e), SL_EINTERNAL);
    assert_non_null(strstr(e.msg, "64 bytes are no ring"));
    close(small);
    assert_int_equal(sl_ring_attach(&r, -1, 0, &e), SL_EINTERNAL);
    assert_true(ftruncate(good, 0) < 0); /* sealed */
    close(good);
    close(fd);
}

/* The MMU enforces "one writer": writing to what a role does not own kills the process. */
static int dies_writing(int fd, int role, int what) {
    pid_t pid = fork();
    if (!pid) {
        sl_ring *r = attach(fd, role);
        signal(SIGSEGV, SIG_DFL);
        if (what == 0)
            memset(sl_ring_arena(r, NULL), 1, 1);
        else
            *(uint64_t *)(uintptr_t)&sl_ring_at(r, 0)->h.pos = 1;
        _exit(0);
    }
    int st;
    waitpid(pid, &st, 0);
    return !(WIFEXITED(st) && WEXITSTATUS(st) == 0);
}

static void memory_is_guarded(void **state) {
    (void)state;
    int fd = make(4, 1, 3);
    sl_ring *p = attach(fd, 0);
    assert_non_null(sl_ring_stage(p, 1));
    sl_ring_publish(p);
    for (int what = 0; what < 2; what++) {
        assert_int_equal(dies_writing(fd, SL_RING_PRODUCER, what), 0);
        assert_int_equal(dies_writing(fd, 1, what), 1);
        assert_int_equal(dies_writing(fd, 2, what), 1);
        assert_int_equal(dies_writing(fd, SL_RING_OBSERVER, what), 1);
    }
    sl_ring_detach(p);
    close(fd);
}

static void huge_pages_or_a_plain_fallback(void **state) {
    (void)state;
    sl_ring_params p = {.name = "h", .depth = 8, .pay_slots = 4, .pay_size = 8192, .n_cursors = 3};
    bool huge;
    int fd = sl_ring_create(&p, true, &huge, &e);
    assert_true(fd >= 0);
    print_message("huge pages: %s\n", huge ? "used" : "the pool is empty, ordinary pages");
    sl_ring *r = attach(fd, 0), *o = attach(fd, 1);
    strcpy(sl_ring_pay_next(r), "x");
    assert_non_null(sl_ring_stage(r, 1));
    sl_ring_publish(r);
    assert_string_equal(sl_ring_payload(o, 0), "x");
    sl_ring_detach(r);
    sl_ring_detach(o);
    close(fd);
}

/* ---- many processes ---- */
#define ITEMS 100000u
typedef struct shared { /* in a shared mapping of the test's own, which outlives every process */
    _Atomic uint64_t wrong, lost, again;
    _Atomic uint64_t committed;      /* the last stage's durable log: items 0..committed-1, one step an item */
    _Atomic uint64_t verdict[ITEMS]; /* the first stage's results */
} shared;
static shared *sh;
static int bells[3];

static uint64_t mix(uint64_t i) {
    i = (i + 1) * 0x9e3779b97f4a7c15ull;
    return i ^ i >> 29;
}

static void produce(sl_ring *r) {
    for (uint64_t i = sl_ring_pos(r, 0); i < ITEMS;) {
        sl_bell_drain(bells[0]);
        unsigned batch = 0, own = mix(i) & 1;
        while (i < ITEMS && batch < 7 && sl_ring_room(r) && (own = mix(i) & 1, !own || sl_ring_pay_room(r))) {
            if (own) {
                uint64_t *pay = sl_ring_pay_next(r);
                for (int j = 0; j < 512; j += 64) pay[j] = mix(i) + (uint64_t)j;
            }
            sl_desc *d = sl_ring_stage(r, own);
            d->h.kind = 1;
            uint64_t body[2] = {i, mix(i)};
            memcpy(d->body, body, sizeof body);
            i++;
            batch++;
        }
        struct pollfd f;
        if (batch) {
            sl_ring_publish(r);
            sl_bell_ring(bells[1]);
        } else {
            sl_bell_wait(bells[0], &f, 1, 1000);
        }
    }
}

static bool item_ok(const sl_ring *r, uint64_t pos) {
    const sl_desc *d = sl_ring_at(r, pos);
    if (!d || d->h.pos != pos || d->h.kind != 1) return false;
    uint64_t body[2];
    memcpy(body, d->body, sizeof body);
    if (body[0] != pos || body[1] != mix(pos)) return false;
    const uint64_t *pay = sl_ring_payload(r, pos);
    if ((pay != NULL) != (mix(pos) & 1)) return false;
    for (int j = 0; pay && j < 512; j += 64)
        if (pay[j] != mix(pos) + (uint64_t)j) return false;
    return true;
}

static void stage(sl_ring *r, unsigned me) {
    uint64_t at = sl_ring_pos(r, me);
    while (at < ITEMS) {
        sl_bell_drain(bells[me]);
        uint64_t to = sl_ring_pos(r, me - 1);
        struct pollfd f;
        if (at == to) {
            sl_bell_wait(bells[me], &f, 1, 1000);
            continue;
        }
        if (to > at + 16) to = at + 16;
        for (; at < to; at++) {
            if (!item_ok(r, at)) sh->wrong++;
            if (me == 1) {
                sh->verdict[at] = mix(at);
                continue;
            }
            if (sh->verdict[at] != mix(at)) sh->wrong++; /* passed on before it was judged */
            uint64_t next = at;
            if (atomic_compare_exchange_strong(&sh->committed, &next, at + 1)) continue;
            if (next < at)
                sh->lost++;
            else
                sh->again++; /* killed between commit and release: seen again, committed once */
        }
        if (sl_ring_advance(r, at, &e)) sh->wrong++;
        if (sl_ring_check(r, &e)) sh->wrong++;
        sl_bell_ring(bells[(me + 1) % 3]);
    }
}

static pid_t spawn(int fd, int me) {
    pid_t pid = fork();
    if (pid) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    sl_ring *r;
    if (sl_ring_attach(&r, fd, me, &e)) _exit(3);
    if (me)
        stage(r, (unsigned)me);
    else
        produce(r);
    _exit(0);
}

static void survives_random_kills(void **state) {
    (void)state;
    sh = mmap(NULL, sizeof *sh, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(sh != MAP_FAILED);
    int fd = make(64, 16, 3);
    pid_t pid[3];
    for (int i = 0; i < 3; i++) bells[i] = sl_bell_create(&e);
    for (int i = 0; i < 3; i++) pid[i] = spawn(fd, i);
    sl_ring *o = attach(fd, SL_RING_OBSERVER);
    unsigned kills[3] = {0}, rnd = 12345;
    uint64_t next = ITEMS / 100;
    struct timespec ms = {.tv_nsec = 300000};
    while (sl_ring_pos(o, 2) < ITEMS) {
        nanosleep(&ms, NULL);
        for (int i = 0; i < 3; i++) { /* a process that ended by itself before the end is a failure */
            int st;
            if (pid[i] && waitpid(pid[i], &st, WNOHANG) == pid[i]) {
                assert_true(WIFEXITED(st) && WEXITSTATUS(st) == 0);
                pid[i] = 0;
            }
        }
        if (sl_ring_pos(o, 2) < next) continue;
        next += ITEMS / 100;
        rnd = rnd * 1103515245 + 12345;
        int v = (int)(rnd >> 16) % 3;
        if (!pid[v]) continue;
        kill(pid[v], SIGKILL);
        waitpid(pid[v], NULL, 0);
        kills[v]++;
        pid[v] = spawn(fd, v);
    }
    for (int i = 0; i < 3; i++)
        if (pid[i]) waitpid(pid[i], NULL, 0);
    assert_int_equal(sh->wrong, 0);
    assert_int_equal(sh->lost, 0);
    assert_int_equal(sh->committed, ITEMS);
    print_message("%u items, kills: producer %u, stages %u and %u; %u seen again and not committed again\n", ITEMS,
                  kills[0], kills[1], kills[2], (unsigned)sh->again);
    for (int i = 0; i < 3; i++) assert_true(kills[i] > 5);
    sl_ring_detach(o);
    close(fd);
}

int main(void) {
    const struct CMUnitTest t[] = {cmocka_unit_test(refuses_bad_shapes),
                                   cmocka_unit_test(moves_and_gates),
                                   cmocka_unit_test(payload_room_is_exact_when_full),
                                   cmocka_unit_test(hostile_pay_end_stays_inside),
                                   cmocka_unit_test(no_payload_without_slots),
                                   cmocka_unit_test(aliases_share_one_mapping),
                                   cmocka_unit_test(checks_what_it_maps),
                                   cmocka_unit_test(memory_is_guarded),
                                   cmocka_unit_test(huge_pages_or_a_plain_fallback),
                                   cmocka_unit_test(survives_random_kills)};
    return cmocka_run_group_tests_name("ring", t, NULL, NULL);
}
