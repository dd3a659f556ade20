#include "ipc/ring.h"
#include "ipc/memfd.h"
#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define RING_MAGIC 0x31474e49524c5300ull /* "\0SLRING1" */
#define RING_ABI   1u
#define MAX_DEPTH  (1ull << 24)
#define MAX_BYTES  (1ull << 46)

/* First page of the memfd; written once before sealing, mapped read-only by everyone. */
typedef struct ring_header {
    uint64_t magic;
    uint32_t abi, page; /* page: 4096 or 2 MiB, the unit in which regions are aligned */
    uint64_t layout, bytes;
    sl_ring_params p;
} ring_header;

/* A cursor alone on its page (of `page` bytes). */
typedef struct ring_cursor {
    _Atomic uint64_t pos;
} ring_cursor;

struct sl_ring {
    sl_ring_params p;
    int role;
    bool alias;
    uint64_t page, bytes;
    uint8_t *base; /* whole memfd, read-only but for the parts that `role` writes */
    ring_cursor *cur[SL_RING_MAX_CURSORS];
    sl_desc *desc;
    uint8_t *pay;
    uint64_t next, next_pay; /* producer: positions after what is staged */
};

/* Byte offsets of the regions for a page unit; false when the parameters are invalid. */
typedef struct layout {
    uint64_t cur, desc, pay, end;
} layout;

static bool pow2(uint64_t v) {
    return v && !(v & (v - 1));
}
static uint64_t up(uint64_t v, uint64_t unit) {
    return (v + unit - 1) / unit * unit;
}

static bool ring_layout(const sl_ring_params *p, uint64_t page, layout *l) {
    if (!memchr(p->name, 0, sizeof p->name) || !pow2(p->depth) || p->depth < 2 || p->depth > MAX_DEPTH) return false;
    if (p->n_cursors < 2 || p->n_cursors > SL_RING_MAX_CURSORS) return false;
    if (p->pay_slots) {
        if (!pow2(p->pay_slots) || p->pay_slots > MAX_DEPTH || !p->pay_size || p->pay_size % 4096) return false;
        if (p->pay_size > MAX_BYTES / p->pay_slots) return false;
    }
    l->cur = page;
    l->desc = l->cur + p->n_cursors * page;
    l->pay = l->desc + up(2 * p->depth * sizeof(sl_desc), page);
    l->end = l->pay + up(p->pay_slots * p->pay_size, page);
    return true;
}

/* Changes whenever something that both ends must agree on changes. */
static uint64_t layout_hash(void) {
    const uint64_t v[] = {sizeof(ring_header),          sizeof(sl_ring_params),      sizeof(sl_desc),
                          sizeof(sl_desc_head),         offsetof(sl_desc_head, pos), offsetof(sl_desc_head, pay_end),
                          SL_RING_MAX_CURSORS,
                          /* table slots per depth */ 2};
    uint64_t h = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < sizeof v / sizeof *v; i++) h = (h ^ v[i]) * 0x100000001b3ull;
    return h;
}

uint64_t sl_ring_footprint(const sl_ring_params *p) {
    layout l;
    return ring_layout(p, 4096, &l) ? l.end : 0;
}

int sl_ring_create(const sl_ring_params *p, bool huge, bool *used_huge, sl_err *err) {
    layout l;
    if (used_huge) *used_huge = false;
    if (!ring_layout(p, 4096, &l))
        return sl_err_set(err, SL_ECONFIG,
                          "ring '%.31s': invalid shape: depth %" PRIu64 " (power of two, 2..%llu), %" PRIu64
                          " payload slots (0 or a power of two) of %" PRIu64
                          " bytes (multiple of 4096), %u cursors (2..%d)",
                          p->name, p->depth, MAX_DEPTH, p->pay_slots, p->pay_size, p->n_cursors, SL_RING_MAX_CURSORS);
    ring_header h = {
        .magic = RING_MAGIC, .abi = RING_ABI, .page = 4096, .layout = layout_hash(), .bytes = l.end, .p = *p};
    if (huge) {
        ring_header hh = h;
        layout lh;
        hh.page = 2u << 20;
        if (ring_layout(p, hh.page, &lh)) {
            hh.bytes = lh.end;
            int fd = sl_memfd_create(p->name, lh.end, true, &hh, sizeof hh, false, NULL);
            if (fd >= 0) {
                if (used_huge) *used_huge = true;
                return fd;
            }
        }
    }
    return sl_memfd_create(p->name, l.end, false, &h, sizeof h, false, err);
}

/* Open one region of the read-only mapping for writing, in place. */
static int open_for_write(sl_ring *r, int fd, uint64_t off, uint64_t len, sl_err *err) {
    if (!len) return 0;
    if (mmap(r->base + off, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, (off_t)off) == MAP_FAILED)
        return sl_err_sys(err, SL_ETEMP, errno, "ring '%s': map %" PRIu64 " bytes for writing", r->p.name, len);
    return 0;
}

static void set_regions(sl_ring *r, const layout *l) {
    for (unsigned i = 0; i < r->p.n_cursors; i++) r->cur[i] = (ring_cursor *)(void *)(r->base + l->cur + i * r->page);
    r->desc = (sl_desc *)(void *)(r->base + l->desc);
    r->pay = r->base + l->pay;
}

static sl_desc *slot(const sl_ring *r, uint64_t pos) {
    return &r->desc[pos & (2 * r->p.depth - 1)];
}

/* Payload position after the descriptor before `pos`. The table holds 2*depth slots and at most depth are in flight, so
 * that descriptor is intact for every pos >= released. */
static uint64_t pay_before(const sl_ring *r, uint64_t pos) {
    return pos ? slot(r, pos - 1)->h.pay_end : 0;
}

/* A restarted producer goes on at its own cursor; what it had staged but not published never existed. */
static void producer_resume(sl_ring *r) {
    r->next = atomic_load_explicit(&r->cur[0]->pos, memory_order_relaxed);
    r->next_pay = pay_before(r, r->next);
}

static int map_role(sl_ring *r, int fd, const layout *l, sl_err *err) {
    int rc = 0;
    if (r->role == SL_RING_PRODUCER || r->role == SL_RING_ANY)
        rc = open_for_write(r, fd, l->desc, l->end - l->desc, err);
    for (int i = 0; !rc && i < (int)r->p.n_cursors; i++)
        if (r->role == i || r->role == SL_RING_ANY)
            rc = open_for_write(r, fd, l->cur + (uint64_t)i * r->page, r->page, err);
    return rc;
}

static int check_role(const sl_ring_params *p, int role, sl_err *err) {
    if (role < SL_RING_ANY || role >= (int)p->n_cursors)
        return sl_err_set(err, SL_EINTERNAL, "ring '%s': no role %d (it has %u cursors)", p->name, role, p->n_cursors);
    return 0;
}

static int check_header(const ring_header *h, uint64_t size, layout *l, sl_err *err) {
    if (h->magic != RING_MAGIC)
        return sl_err_set(err, SL_EINTERNAL, "ring: magic %016" PRIx64 ", expected %016llx: not a ring", h->magic,
                          RING_MAGIC);
    if (h->abi != RING_ABI || h->layout != layout_hash())
        return sl_err_set(err, SL_EINTERNAL,
                          "ring: made by another version (ABI %u, layout %016" PRIx64 "; expected %u, %016" PRIx64 ")",
                          h->abi, h->layout, RING_ABI, layout_hash());
    if ((h->page != 4096 && h->page != 2u << 20) || !ring_layout(&h->p, h->page, l))
        return sl_err_set(err, SL_EINTERNAL, "ring: header holds an invalid shape");
    if (h->bytes != size || l->end != size)
        return sl_err_set(err, SL_EINTERNAL, "ring '%s': %" PRIu64 " bytes, its shape needs %" PRIu64, h->p.name, size,
                          l->end);
    return 0;
}

int sl_ring_attach(sl_ring **out, int fd, int role, sl_err *err) {
    *out = NULL;
    uint64_t size;
    int rc = sl_memfd_check(fd, "ring", 0, false, &size, err);
    if (rc) return rc;
    if (size < sizeof(ring_header)) return sl_err_set(err, SL_EINTERNAL, "ring: %" PRIu64 " bytes are no ring", size);
    sl_ring *r = calloc(1, sizeof *r);
    if (!r) return sl_err_set(err, SL_ETEMP, "ring: no memory");
    r->base = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    if (r->base == MAP_FAILED) {
        rc = sl_err_sys(err, SL_ETEMP, errno, "ring: map %" PRIu64 " bytes", size);
        free(r);
        return rc;
    }
    ring_header h;
    memcpy(&h, r->base, sizeof h);
    r->bytes = size;
    layout l = {0};
    if (!(rc = check_header(&h, size, &l, err)) && !(rc = check_role(&h.p, role, err))) {
        r->p = h.p;
        r->page = h.page;
        r->role = role;
        set_regions(r, &l);
        rc = map_role(r, fd, &l, err);
    }
    if (rc) {
        munmap(r->base, size);
        free(r);
        return rc;
    }
    if (role == SL_RING_PRODUCER) producer_resume(r);
    *out = r;
    return 0;
}

int sl_ring_alias(sl_ring **out, const sl_ring *base, int role, sl_err *err) {
    *out = NULL;
    if (base->role != SL_RING_ANY)
        return sl_err_set(err, SL_EINTERNAL, "ring '%s': alias of a mapping with role %d", base->p.name, base->role);
    int rc = check_role(&base->p, role, err);
    if (rc) return rc;
    sl_ring *r = malloc(sizeof *r);
    if (!r) return sl_err_set(err, SL_ETEMP, "ring: no memory");
    *r = *base;
    r->role = role;
    r->alias = true;
    if (role == SL_RING_PRODUCER) producer_resume(r);
    *out = r;
    return 0;
}

void sl_ring_detach(sl_ring *r) {
    if (!r) return;
    if (!r->alias) munmap(r->base, r->bytes);
    free(r);
}

const sl_ring_params *sl_ring_info(const sl_ring *r) {
    return &r->p;
}

uint64_t sl_ring_pos(const sl_ring *r, unsigned cursor) {
    if (cursor >= r->p.n_cursors) return 0;
    /* A1: pairs with R1 in sl_ring_publish (cursor 0) and sl_ring_advance. */
    return atomic_load_explicit(&r->cur[cursor]->pos, memory_order_acquire);
}

static uint64_t released(const sl_ring *r) {
    return sl_ring_pos(r, r->p.n_cursors - 1);
}

uint64_t sl_ring_fill(const sl_ring *r) {
    uint64_t rel = released(r), pub = sl_ring_pos(r, 0);
    return pub > rel ? pub - rel : 0;
}

int sl_ring_check(const sl_ring *r, sl_err *err) {
    uint64_t prev = 0;
    /* Last to first: a cursor read later can only be further on, so a true order never looks broken. */
    for (unsigned i = r->p.n_cursors; i-- > 0;) {
        uint64_t v = sl_ring_pos(r, i);
        if (v < prev)
            return sl_err_set(err, SL_EINTERNAL, "ring '%s': cursor %u is at %" PRIu64 ", behind cursor %u at %" PRIu64,
                              r->p.name, i, v, i + 1, prev);
        prev = v;
    }
    uint64_t rel = released(r); /* again, after published: it bounds what the producer may have seen */
    if (prev > rel + r->p.depth)
        return sl_err_set(err, SL_EINTERNAL,
                          "ring '%s': published %" PRIu64 " is more than depth %" PRIu64 " past released %" PRIu64,
                          r->p.name, prev, r->p.depth, rel);
    return 0;
}

uint64_t sl_ring_room(const sl_ring *r) {
    uint64_t used = r->next - released(r);
    return used >= r->p.depth ? 0 : r->p.depth - used;
}

uint64_t sl_ring_pay_room(const sl_ring *r) {
    uint64_t used = r->next_pay - pay_before(r, released(r));
    return used >= r->p.pay_slots ? 0 : r->p.pay_slots - used;
}

void *sl_ring_pay_ahead(sl_ring *r, uint64_t ahead) {
    if (ahead >= sl_ring_pay_room(r)) return NULL;
    return r->pay + ((r->next_pay + ahead) & (r->p.pay_slots - 1)) * r->p.pay_size;
}

void *sl_ring_pay_next(sl_ring *r) {
    return sl_ring_pay_ahead(r, 0);
}

sl_desc *sl_ring_stage(sl_ring *r, unsigned pay) {
    if (r->role != SL_RING_PRODUCER || pay > 1 || !sl_ring_room(r) || (pay && !sl_ring_pay_room(r))) return NULL;
    sl_desc *d = slot(r, r->next);
    memset(d, 0, sizeof *d);
    r->next_pay += pay;
    d->h.pos = r->next++;
    d->h.pay_end = r->next_pay;
    return d;
}

void sl_ring_publish(sl_ring *r) {
    /* R1: descriptors and payload written before are visible to whoever load-acquires (A1) this cursor. */
    atomic_store_explicit(&r->cur[0]->pos, r->next, memory_order_release);
}

const sl_desc *sl_ring_at(const sl_ring *r, uint64_t pos) {
    if (pos >= sl_ring_pos(r, 0) || pos < released(r)) return NULL;
    return slot(r, pos);
}

const void *sl_ring_payload(const sl_ring *r, uint64_t pos) {
    const sl_desc *d = sl_ring_at(r, pos);
    if (!d || !r->p.pay_slots) return NULL;
    uint64_t end = d->h.pay_end;
    if (end - pay_before(r, pos) != 1) return NULL;
    return r->pay + ((end - 1) & (r->p.pay_slots - 1)) * r->p.pay_size;
}

int sl_ring_advance(sl_ring *r, uint64_t pos, sl_err *err) {
    if (r->role < 1) return sl_err_set(err, SL_EINTERNAL, "ring '%s': role %d has no stage cursor", r->p.name, r->role);
    unsigned me = (unsigned)r->role;
    uint64_t own = atomic_load_explicit(&r->cur[me]->pos, memory_order_relaxed), gate = sl_ring_pos(r, me - 1);
    if (pos < own || pos > gate)
        return sl_err_set(err, SL_EINTERNAL,
                          "ring '%s': cursor %u cannot go from %" PRIu64 " to %" PRIu64
                          " (the stage before is at %" PRIu64 ")",
                          r->p.name, me, own, pos, gate);
    /* R1: pairs with A1 of the next stage, or of the producer for the last cursor: what this stage read or wrote is
     * done. */
    atomic_store_explicit(&r->cur[me]->pos, pos, memory_order_release);
    return 0;
}

void *sl_ring_arena(const sl_ring *r, uint64_t *bytes) {
    if (bytes) *bytes = r->p.pay_slots * r->p.pay_size;
    return r->p.pay_slots ? r->pay : NULL;
}
