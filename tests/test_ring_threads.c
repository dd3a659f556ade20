/* ring, in one process: producer and two stages as threads over one mapping, so that ThreadSanitizer sees whether
 * cursors order descriptors and payload as promised. Run with and without it. */
#include "ipc/doorbell.h"
#include "ipc/ring.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ITEMS 20000u
static int bells[3];
static sl_ring *base;
static sl_err errs[3];
static unsigned long wrong[3];

static void *producer(void *arg) {
    (void)arg;
    sl_ring *r;
    if (sl_ring_alias(&r, base, SL_RING_PRODUCER, &errs[0])) return (void *)1;
    for (uint64_t i = 0; i < ITEMS;) {
        sl_bell_drain(bells[0]);
        struct pollfd f;
        if (!sl_ring_room(r) || !sl_ring_pay_room(r)) {
            sl_bell_wait(bells[0], &f, 1, 1000);
            continue;
        }
        memset(sl_ring_pay_next(r), (int)(i & 0x7f), 64);
        sl_desc *d = sl_ring_stage(r, 1);
        d->h.kind = 1;
        memcpy(d->body, &i, 8);
        i++;
        sl_ring_publish(r);
        sl_bell_ring(bells[1]);
    }
    sl_ring_detach(r);
    return NULL;
}

static void *stage(void *arg) {
    unsigned me = (unsigned)(uintptr_t)arg;
    sl_ring *r;
    if (sl_ring_alias(&r, base, (int)me, &errs[me])) return (void *)1;
    for (uint64_t at = 0; at < ITEMS;) {
        sl_bell_drain(bells[me]);
        uint64_t to = sl_ring_pos(r, me - 1);
        struct pollfd f;
        if (at == to) {
            sl_bell_wait(bells[me], &f, 1, 1000);
            continue;
        }
        for (; at < to; at++) {
            uint64_t v;
            char want[64];
            memcpy(&v, sl_ring_at(r, at)->body, 8);
            memset(want, (int)(at & 0x7f), 64);
            if (v != at || memcmp(sl_ring_payload(r, at), want, 64)) wrong[me]++;
        }
        if (sl_ring_advance(r, at, &errs[me]) || sl_ring_check(r, &errs[me])) return (void *)1;
        sl_bell_ring(bells[(me + 1) % 3]);
    }
    sl_ring_detach(r);
    return NULL;
}

int main(void) {
    sl_ring_params p = {.name = "threads", .depth = 16, .pay_slots = 8, .pay_size = 4096, .n_cursors = 3};
    sl_err e = {0};
    int fd = sl_ring_create(&p, false, NULL, &e);
    if (fd < 0 || sl_ring_attach(&base, fd, SL_RING_ANY, &e)) {
        printf("FAIL: %s\n", e.msg);
        return 1;
    }
    for (int i = 0; i < 3; i++) bells[i] = sl_bell_create(&e);
    pthread_t t[3];
    pthread_create(&t[0], NULL, producer, NULL);
    pthread_create(&t[1], NULL, stage, (void *)(uintptr_t)1);
    pthread_create(&t[2], NULL, stage, (void *)(uintptr_t)2);
    int bad = 0;
    for (int i = 0; i < 3; i++) {
        void *rc;
        pthread_join(t[i], &rc);
        if (rc || wrong[i]) {
            printf("FAIL: thread %d: %lu wrong items; %s\n", i, wrong[i], errs[i].msg);
            bad = 1;
        }
    }
    if (sl_ring_pos(base, 2) != ITEMS) bad = 1;
    sl_ring_detach(base);
    if (!bad) printf("ok: %u items through two stages\n", ITEMS);
    return bad;
}
