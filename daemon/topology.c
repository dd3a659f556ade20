#include "daemon/topology.h"
#include "ipc/doorbell.h"
#include "stages/compute/collective.h"
#include <string.h>
#include <unistd.h>

#define COLL_ELEMS (1u << 20) /* one reduction step: 4 MiB of f32, larger calls are cut */

static uint64_t pow2_at_least(uint64_t v) {
    uint64_t p = 2;
    while (p < v) p <<= 1;
    return p;
}

static uint64_t pages(uint64_t bytes) {
    return (bytes + 4095) & ~(uint64_t)4095;
}

void sl_topo_need_of(const sl_boot *b, sl_topo_need *n) {
    n->batch_tokens = b->batch_tokens > b->max_length ? b->batch_tokens : b->max_length;
    n->chunks = (n->batch_tokens + b->chunk_rows - 1) / b->chunk_rows;
    n->descriptors = b->n_captures * n->chunks + b->max_batch_rows + 1;
    n->payloads = 0; /* sl_chunk_owner deals them out in turn; which rank starts differs, so take the fullest */
    for (uint32_t r = 0; r < b->tp; r++) {
        uint64_t mine = 0;
        for (uint32_t k = 0; k < b->n_captures; k++) {
            uint64_t first = (r + b->tp - k % b->tp) % b->tp; /* chunks first, first + tp, ... */
            if (first < n->chunks) mine += (n->chunks - 1 - first) / b->tp + 1;
        }
        if (mine > n->payloads) n->payloads = mine;
    }
}

/* ---- plan ---- */

static sl_topo_obj *add(sl_topo *t, sl_obj_kind kind, uint32_t group, uint32_t rank, uint64_t bytes) {
    sl_topo_obj *o = &t->obj[t->n_obj++];
    memset(o, 0, sizeof *o);
    o->kind = kind, o->group = group, o->rank = rank, o->bytes = bytes, o->fd = -1;
    return o;
}

static int add_ring(sl_topo *t, sl_obj_kind kind, uint32_t g, uint32_t r, sl_ring_params p, sl_err *err) {
    sl_topo_obj *o = add(t, kind, g, r, 0);
    switch (kind) {
    case SL_OBJ_CHUNK:
        snprintf(p.name, sizeof p.name, "chunk.%u.%u", g, r);
        break;
    case SL_OBJ_BATCH:
        snprintf(p.name, sizeof p.name, "batch.%u", g);
        break;
    default:
        snprintf(p.name, sizeof p.name, "sample.%u", g);
    }
    memcpy(o->name, p.name, sizeof o->name);
    o->ring = p;
    o->bytes = sl_ring_footprint(&p);
    if (o->bytes) return SL_OK;
    return sl_err_set(
        err, SL_ECONFIG,
        "ring %s cannot be built: depth %llu, %llu payload slots of %llu bytes; make [batch] tokens, max_rows or "
        "max_length smaller",
        p.name, (unsigned long long)p.depth, (unsigned long long)p.pay_slots, (unsigned long long)p.pay_size);
}

static void add_proc(sl_boot *b, sl_topo *t, sl_role role, uint32_t g, uint32_t r) {
    unsigned i = b->n_procs++;
    sl_boot_proc *p = &b->procs[i];
    *p = (sl_boot_proc){.role = role, .group = g, .rank = r, .bell_fd = -1};
    if (role == SL_ROLE_RANK)
        snprintf(p->name, sizeof p->name, "rank%u.%u", g, r);
    else
        snprintf(p->name, sizeof p->name, "%s", sl_role_name(role));
    sl_topo_obj *o = add(t, SL_OBJ_BELL, g, r, 0);
    o->proc = i;
    snprintf(o->name, sizeof o->name, "bell.%.26s", p->name);
}

static int chunk_ring_params(const sl_boot *b, const sl_config *c, sl_ring_params *p, sl_err *err) {
    sl_topo_need n;
    sl_topo_need_of(b, &n);
    uint64_t slot = pages((uint64_t)b->chunk_rows * b->width * b->elem_size);
    uint64_t want = 2 * n.payloads;
    *p = (sl_ring_params){.depth = pow2_at_least(2 * n.descriptors),
                          .pay_slots = pow2_at_least(want),
                          .pay_size = slot,
                          .n_cursors = SL_CHUNK_CURSORS};
    if (!c->ring_bytes) return SL_OK;
    uint64_t have = 1;
    while (have * 2 * slot <= c->ring_bytes) have *= 2;
    if (have < want)
        return sl_err_set(
            err, SL_ECONFIG,
            "[memory] ring_size = %llu bytes holds %llu chunk slots (a power of two) of %llu bytes, but the largest "
            "batch "
            "needs %llu a rank and twice that must fit: %llu tokens / %u a chunk = %llu chunks a state, times %u "
            "states, "
            "over %u ranks. Give ring_size at least %llu MiB, or make [batch] tokens or max_length smaller",
            (unsigned long long)c->ring_bytes, (unsigned long long)have, (unsigned long long)slot,
            (unsigned long long)n.payloads, (unsigned long long)n.batch_tokens, b->chunk_rows,
            (unsigned long long)n.chunks, b->n_captures, b->tp,
            (unsigned long long)((pow2_at_least(want) * slot + 1048575) >> 20));
    p->pay_slots = have;
    return SL_OK;
}

static int plan_group(sl_topo *t, sl_boot *b, const sl_config *c, uint32_t g, sl_err *err) {
    sl_topo_need n;
    sl_topo_need_of(b, &n);
    sl_ring_params batch = {.depth = c->batch_depth,
                            .pay_slots = c->batch_depth,
                            .pay_size = pages(sl_batch_bytes(b->max_batch_rows, (uint32_t)n.batch_tokens,
                                                             (uint64_t)b->max_batch_rows * 256)),
                            .n_cursors = SL_BATCH_CURSORS};
    sl_ring_params sample = {.depth = pow2_at_least(4 * ((uint64_t)b->max_batch_rows + 1)),
                             .n_cursors = SL_SAMPLE_CURSORS};
    sl_ring_params chunk;
    int rc = chunk_ring_params(b, c, &chunk, err);
    if (!rc) rc = add_ring(t, SL_OBJ_BATCH, g, 0, batch, err);
    for (uint32_t r = 0; !rc && r < b->tp; r++) rc = add_ring(t, SL_OBJ_CHUNK, g, r, chunk, err);
    if (!rc) rc = add_ring(t, SL_OBJ_SAMPLE, g, 0, sample, err);
    if (rc || b->tp == 1) return rc;
    uint64_t elems = n.batch_tokens * b->width;
    if (elems > COLL_ELEMS) elems = COLL_ELEMS;
    sl_topo_obj *o = add(t, SL_OBJ_COLL, g, 0, sl_coll_shm_footprint((int)b->tp, (int64_t)elems));
    o->coll_elems = elems;
    snprintf(o->name, sizeof o->name, "coll.%u", g);
    return SL_OK;
}

int sl_topo_plan(sl_topo *t, sl_boot *b, const sl_config *c, sl_err *err) {
    memset(t, 0, sizeof *t);
    t->boot = b;
    if (b->dp < 1 || b->dp > SL_MAX_GROUPS || b->tp < 1 || (uint64_t)b->dp * b->tp > SL_MAX_RANKS)
        return sl_err_set(err, SL_ECONFIG,
                          "%u groups of %u ranks: 1..%d groups and at most %d ranks in all are possible", b->dp, b->tp,
                          SL_MAX_GROUPS, SL_MAX_RANKS);
    if (!b->chunk_rows || !b->width || !b->elem_size || !b->n_captures || b->n_captures > SL_MAX_CAPTURES)
        return sl_err_set(err, SL_EINTERNAL, "topology of an unresolved boot block");
    b->n_procs = 0;
    add_proc(b, t, SL_ROLE_SLUICED, 0, 0);
    add_proc(b, t, SL_ROLE_FEEDER, 0, 0);
    add_proc(b, t, SL_ROLE_GATHER, 0, 0);
    add_proc(b, t, SL_ROLE_WRITER, 0, 0);
    for (uint32_t g = 0; g < b->dp; g++) {
        b->groups[g].first_rank_proc = b->n_procs;
        for (uint32_t r = 0; r < b->tp; r++) add_proc(b, t, SL_ROLE_RANK, g, r);
    }
    snprintf(add(t, SL_OBJ_METRICS, 0, 0, sl_metrics_footprint(b->n_procs))->name, 32, "metrics");
    snprintf(add(t, SL_OBJ_CTL, 0, 0, 4096ull * (1 + b->dp))->name, 32, "ctl");
    for (uint32_t g = 0; g < b->dp; g++) {
        int rc = plan_group(t, b, c, g, err);
        if (rc) return rc;
    }
    snprintf(add(t, SL_OBJ_BOOT, 0, 0, pages(sizeof *b))->name, 32, "boot");
    return SL_OK;
}

uint64_t sl_topo_bytes(const sl_topo *t) {
    uint64_t n = 0;
    for (unsigned i = 0; i < t->n_obj; i++) n += t->obj[i].bytes;
    return n;
}

/* ---- create ---- */

static int create_ring(sl_topo *t, sl_topo_obj *o, bool huge, sl_err *err) {
    sl_boot_group *g = &t->boot->groups[o->group];
    o->fd = sl_ring_create(&o->ring, huge && o->kind == SL_OBJ_CHUNK, &o->huge, err);
    if (o->fd < 0) return o->fd;
    *(o->kind == SL_OBJ_BATCH    ? &g->batch_fd
      : o->kind == SL_OBJ_SAMPLE ? &g->sample_fd
                                 : &g->chunk_fd[o->rank]) = o->fd;
    return sl_ring_attach(&o->view, o->fd, SL_RING_OBSERVER, err);
}

static int create_one(sl_topo *t, sl_topo_obj *o, bool huge, sl_err *err) {
    sl_boot *b = t->boot;
    switch (o->kind) {
    case SL_OBJ_BELL:
        o->fd = b->procs[o->proc].bell_fd = sl_bell_create(err);
        break;
    case SL_OBJ_METRICS:
        o->fd = b->metrics_fd = sl_metrics_create(b->n_procs, err);
        break;
    case SL_OBJ_CTL:
        o->fd = b->ctl_fd = sl_ctl_create(b->dp, err);
        break;
    case SL_OBJ_COLL:
        o->fd = b->groups[o->group].coll_fd = sl_coll_shm_create_region((int)b->tp, (int64_t)o->coll_elems, err);
        break;
    case SL_OBJ_BOOT: /* last in the table: it holds the numbers of all others */
        o->fd = sl_boot_create(b, err);
        break;
    default:
        return create_ring(t, o, huge, err);
    }
    return o->fd < 0 ? o->fd : SL_OK;
}

int sl_topo_create(sl_topo *t, bool huge, sl_err *err) {
    sl_boot *b = t->boot;
    for (uint32_t g = 0; g < SL_MAX_GROUPS; g++) {
        b->groups[g].batch_fd = b->groups[g].sample_fd = b->groups[g].coll_fd = -1;
        for (int r = 0; r < SL_MAX_RANKS; r++) b->groups[g].chunk_fd[r] = -1;
    }
    for (unsigned i = 0; i < t->n_obj; i++) {
        if (create_one(t, &t->obj[i], huge, err)) {
            sl_err_wrap(err, "creating %s (%llu bytes of shared memory)", t->obj[i].name,
                        (unsigned long long)t->obj[i].bytes);
            goto fail;
        }
    }
    if (sl_metrics_attach(&t->metrics, b->metrics_fd, SL_PROC_SLUICED, err)) goto fail;
    if (sl_ctl_attach(&t->ctl, b->ctl_fd, b->dp, 1, err)) goto fail;
    sl_metric_reset(t->metrics);
    for (uint32_t g = 0; g < b->dp; g++) atomic_store(&t->ctl[1 + g].epoch, 1);
    return SL_OK;
fail:
    sl_topo_destroy(t);
    return err ? err->code : SL_ETEMP;
}

void sl_topo_destroy(sl_topo *t) {
    for (unsigned i = 0; i < t->n_obj; i++) {
        if (t->obj[i].view) sl_ring_detach(t->obj[i].view);
        if (t->obj[i].fd >= 0) close(t->obj[i].fd);
        t->obj[i].view = NULL, t->obj[i].fd = -1;
    }
    if (t->metrics) sl_metrics_detach(t->metrics);
    t->metrics = NULL, t->ctl = NULL; /* the ctl pages go with the process */
}

/* ---- who may have what: the table in the header ---- */

typedef enum { NONE, OWN_RANK, OWN_GROUP, ALL } scope;

/* clang-format off */
static const scope access_of[SL_OBJ_KINDS][SL_ROLE_N] = {
    /*                  sluiced feeder rank       gather writer */
    [SL_OBJ_BELL]    = {ALL,    ALL,   OWN_GROUP, ALL,   ALL},
    [SL_OBJ_METRICS] = {ALL,    ALL,   ALL,       ALL,   ALL},
    [SL_OBJ_CTL]     = {ALL,    ALL,   ALL,       ALL,   ALL},
    [SL_OBJ_BOOT]    = {ALL,    ALL,   ALL,       ALL,   ALL},
    [SL_OBJ_BATCH]   = {ALL,    ALL,   OWN_GROUP, ALL,   ALL},
    [SL_OBJ_CHUNK]   = {ALL,    NONE,  OWN_RANK,  ALL,   ALL},
    [SL_OBJ_SAMPLE]  = {ALL,    NONE,  NONE,      ALL,   ALL},
    [SL_OBJ_COLL]    = {ALL,    NONE,  OWN_GROUP, NONE,  NONE},
};
/* clang-format on */

bool sl_topo_allowed(const sl_topo *t, unsigned proc, const sl_topo_obj *o) {
    const sl_boot_proc *p = &t->boot->procs[proc];
    switch (access_of[o->kind][p->role]) {
    case ALL:
        return true;
    case OWN_GROUP: /* bells of processes that belong to no group are everybody's */
        return o->group == p->group || (o->kind == SL_OBJ_BELL && o->proc < SL_PROC_RANKS);
    case OWN_RANK:
        return o->group == p->group && o->rank == p->rank;
    default:
        return false;
    }
}

int sl_topo_fds(const sl_topo *t, unsigned proc, int *fds, int max) {
    int n = 0;
    for (unsigned i = 0; i < t->n_obj && n < max; i++)
        if (t->obj[i].fd >= 0 && sl_topo_allowed(t, proc, &t->obj[i])) fds[n++] = t->obj[i].fd;
    return n;
}

const sl_topo_obj *sl_topo_find(const sl_topo *t, sl_obj_kind kind, uint32_t group, uint32_t rank) {
    for (unsigned i = 0; i < t->n_obj; i++)
        if (t->obj[i].kind == kind && t->obj[i].group == group && t->obj[i].rank == rank) return &t->obj[i];
    return NULL;
}

int sl_topo_boot_fd(const sl_topo *t) {
    const sl_topo_obj *o = sl_topo_find(t, SL_OBJ_BOOT, 0, 0);
    return o ? o->fd : -1;
}
