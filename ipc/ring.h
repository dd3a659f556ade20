/* ring: the one ring type. One producer, a chain of stages behind it, fixed 64-byte descriptors, optional fixed payload
 * slots, all in one sealed memfd that outlives every process which uses it.
 *
 * Cursors. cursor[0] is "published" (producer), cursor[1..n-1] are the stages behind it, in flow order; the last one is
 * "released". Stage i may pass what cursor[i-1] has passed; the producer may be at most `depth` descriptors and
 * `pay_slots` payload slots ahead of cursor[n-1]. Positions are 64-bit, start at 0, never wrap, never decrease;
 * both counts are powers of two. payload slot = pay & (pay_slots-1); descriptor slot = pos & (2*depth-1): the table has
 * twice as many slots as may be in flight, so that the descriptor before `released` is never overwritten (see Payload).
 *
 *     released <= ... <= validated <= published <= released + depth          (checked by sl_ring_check)
 *
 * One writer each. Every cursor is alone on its page and every process maps the memfd read-only except its own cursor
 * page; only the producer maps descriptors and payload writable. The MMU therefore enforces the rule.
 *
 * Payload. A descriptor may own the next `pay` payload slots (0 or 1). Descriptors carry pay_end, the payload position
 * after them, so the position of what is free can be read from the descriptor before `released`; there is no second set
 * of cursors.
 *
 * Crashes. All state a process needs to go on is here: a producer restarts at its own cursor, a stage at its own.
 * A descriptor becomes visible only by the store-release of the producer's cursor, after it was written.
 *
 * Memory order: sl_ring_publish / sl_ring_advance store-release (R1); sl_ring_pos load-acquire (A1) by whoever waits on
 * that cursor. R1 of stage i pairs with A1 of stage i+1; R1 of the last stage pairs with A1 of the producer.
 *
 * Every number read from a descriptor is hostile: readers bounds-check before use. */
#ifndef SL_IPC_RING_H
#define SL_IPC_RING_H
#include "ipc/err.h"
#include <stdint.h>
#include <stdbool.h>

#define SL_RING_MAX_CURSORS 4

/* The first 24 bytes of every descriptor. */
typedef struct sl_desc_head {
    uint16_t kind; /* SL_DESC_* of ipc/flow.h, never 0 */
    uint16_t flags;
    uint32_t epoch;   /* group epoch in which it was made */
    uint64_t pos;     /* its own position: a reader that finds another value sees a torn or foreign slot */
    uint64_t pay_end; /* payload position after this descriptor */
} sl_desc_head;

typedef struct sl_desc { /* generic view; the kinds are in ipc/flow.h */
    sl_desc_head h;
    uint8_t body[40];
} sl_desc;
_Static_assert(sizeof(sl_desc) == 64, "descriptor is one cache line");

typedef struct sl_ring_params {
    char name[32];      /* "batch.0", "chunk.0.1", "sample.0" */
    uint64_t depth;     /* descriptors, power of two in [2, 2^24] */
    uint64_t pay_slots; /* payload slots, 0 or a power of two */
    uint64_t pay_size;  /* bytes a payload slot, multiple of 4096 */
    uint32_t n_cursors; /* 2..SL_RING_MAX_CURSORS */
} sl_ring_params;

/* Where a mapping may write. */
typedef enum {
    SL_RING_OBSERVER = -1, /* nothing */
    SL_RING_ANY = -2, /* everything: only to make views of threads with sl_ring_alias (tests, in-process benchmarks) */
    SL_RING_PRODUCER = 0, /* cursor[0], descriptors, payload */
    /* i >= 1: the stage that owns cursor[i] */
} sl_ring_role;

typedef struct sl_ring sl_ring; /* a process's view; opaque */

/* Total bytes of the memfd (of ordinary pages) for these parameters; 0 when they are invalid. */
uint64_t sl_ring_footprint(const sl_ring_params *p);
/* Create, size, fallocate and seal (SHRINK|GROW|SEAL) the memfd and write its header; hugetlb when `huge` and the pool
 * has room, else ordinary pages (*used_huge says which). Returns the fd or SL_ECONFIG (bad parameters) / SL_ETEMP (no
 * memory).*/
int sl_ring_create(const sl_ring_params *p, bool huge, bool *used_huge, sl_err *err);
/* Map an existing ring in `role`. Checks magic, ABI, layout hash, size and seals; SL_EINTERNAL names what differs.
 * The fd may be closed afterwards. sl_ring_detach unmaps and frees. */
int sl_ring_attach(sl_ring **out, int fd, int role, sl_err *err);
void sl_ring_detach(sl_ring *r);
/* A further view in `role` over the mapping of `base`, which was attached as SL_RING_ANY and must outlive it: for
 * threads of one process, and for race detectors, which cannot see that two mappings are the same memory. */
int sl_ring_alias(sl_ring **out, const sl_ring *base, int role, sl_err *err);

const sl_ring_params *sl_ring_info(const sl_ring *r);
uint64_t sl_ring_pos(const sl_ring *r, unsigned cursor); /* load-acquire */
uint64_t sl_ring_fill(const sl_ring *r);                 /* published - released, for the monitor */
/* Invariants hold (within the race of reading several cursors: reads last-to-first)? SL_EINTERNAL and a sentence if
 * not. */
int sl_ring_check(const sl_ring *r, sl_err *err);

/* Producer: descriptors that can be written now, and payload slots. */
uint64_t sl_ring_room(const sl_ring *r);
uint64_t sl_ring_pay_room(const sl_ring *r);
/* Producer: the i-th unpublished descriptor (i < room), and the payload slot for the j-th unpublished payload. The head
 * is filled in (pos, pay_end) by sl_ring_stage, the rest is zeroed; the caller fills kind, flags, epoch, body and
 * leaves pos and pay_end alone. `pay` is 0 or 1. NULL when there is no room (or no payload room). */
sl_desc *sl_ring_stage(sl_ring *r, unsigned pay);
/* Payload slot that the next sl_ring_stage(r, 1) will own, or NULL when there is no room. Stable until staged. */
void *sl_ring_pay_next(sl_ring *r);
/* The payload slot `ahead` slots after pay_next (for several copies in flight), or NULL when there is no room. */
void *sl_ring_pay_ahead(sl_ring *r, uint64_t ahead);
/* Make every staged descriptor visible: one store-release. */
void sl_ring_publish(sl_ring *r);

/* Stage: the descriptor at `pos`, which must lie in [released, published) (else NULL). Read-only. h.pos is not compared
 * with `pos` here: a reader does that, because it knows what to call the fault. */
const sl_desc *sl_ring_at(const sl_ring *r, uint64_t pos);
/* The payload that the descriptor at pos owns (pay_end-1), or NULL when it owns none or is out of range. Owning is read
 * from the difference to the pay_end before it, which must be 0 or 1; always inside the payload region, whatever it
 * says. */
const void *sl_ring_payload(const sl_ring *r, uint64_t pos);
/* Stage: move the own cursor to `pos` (store-release). Must not pass the cursor before it or go back: SL_EINTERNAL. */
int sl_ring_advance(sl_ring *r, uint64_t pos, sl_err *err);
/* Base and length of the producer's payload mapping (for registering it with CUDA in one call). */
void *sl_ring_arena(const sl_ring *r, uint64_t *bytes);
#endif
