#include "stages/feeder/publish.h"
#include "ipc/crash.h"
#include "ipc/doorbell.h"
#include "ipc/log.h"
#include <stdlib.h>
#include <string.h>

struct sl_publisher {
    const sl_boot *boot;
    const sl_intake *in;
    sl_ring *ring[SL_MAX_GROUPS];
    sl_packer *packer;
    uint64_t *in_flight; /* batch numbers found in the rings at start */
    size_t n_in_flight;
    bool have;
    sl_batch batch;
    uint64_t rows, batches, tokens;
};

static int note_in_flight(sl_publisher *p, const sl_ring *r, sl_err *err) {
    uint64_t from = sl_ring_pos(r, SL_BATCH_RELEASED), to = sl_ring_pos(r, SL_BATCH_PUBLISHED);
    if (to - from > sl_ring_info(r)->depth)
        return sl_err_set(err, SL_EINTERNAL, "%s: cursors are further apart than the ring is deep",
                          sl_ring_info(r)->name);
    uint64_t *v = realloc(p->in_flight, (p->n_in_flight + (to - from) + 1) * sizeof *v);
    if (!v) return sl_err_set(err, SL_ETEMP, "no memory for the batches in flight");
    p->in_flight = v;
    for (uint64_t pos = from; pos < to; pos++) {
        const sl_desc *d = sl_ring_at(r, pos); /* NULL: released meanwhile, so it is in commit.log */
        if (!d) continue;
        if (d->h.kind != SL_DESC_INPUT || d->h.pos != pos)
            return sl_err_set(err, SL_EINTERNAL, "%s: position %llu holds no batch", sl_ring_info(r)->name,
                              (unsigned long long)pos);
        v[p->n_in_flight++] = ((const sl_desc_input *)(const void *)d)->batch_no;
    }
    return SL_OK;
}

int sl_publisher_open(sl_publisher **out, const sl_boot *boot, sl_err *err) {
    sl_publisher *p = calloc(1, sizeof *p);
    if (!p) return sl_err_set(err, SL_ETEMP, "no memory for the batch rings");
    p->boot = boot;
    int rc = SL_OK;
    for (uint32_t g = 0; !rc && g < boot->dp; g++) {
        rc = sl_ring_attach(&p->ring[g], boot->groups[g].batch_fd, SL_RING_PRODUCER, err);
        if (!rc) rc = note_in_flight(p, p->ring[g], err);
    }
    if (rc)
        sl_publisher_close(p);
    else
        *out = p;
    return rc;
}

int sl_publisher_begin(sl_publisher *p, const sl_intake *in, sl_err *err) {
    p->in = in;
    return sl_packer_open(&p->packer, p->boot->store, err);
}

void sl_publisher_close(sl_publisher *p) {
    if (!p) return;
    for (int g = 0; g < SL_MAX_GROUPS; g++)
        if (p->ring[g]) sl_ring_detach(p->ring[g]);
    sl_packer_close(p->packer);
    free(p->in_flight);
    free(p);
}

static bool skip(const sl_publisher *p, const sl_batch *b) {
    for (size_t i = 0; i < p->n_in_flight; i++)
        if (p->in_flight[i] == b->batch_no) return true;
    for (uint32_t i = 0; i < b->n_rows; i++)
        if (!sl_intake_row_done(p->in, b->rows[i].seq)) return false;
    return true;
}

static int next_batch(sl_publisher *p, sl_err *err) {
    const sl_boot *b = p->boot;
    while (!p->have) {
        int rc = sl_packer_next(p->packer, sl_intake_records(p->in), &p->batch, err);
        if (rc <= 0) return rc;
        p->have = !skip(p, &p->batch);
        if (!p->have) p->rows += p->batch.n_rows;
    }
    uint32_t most = b->batch_tokens > b->max_length ? b->batch_tokens : b->max_length;
    if (p->batch.n_tokens > most || p->batch.n_rows > b->max_batch_rows)
        return sl_err_set(err, SL_ECONFIG,
                          "batch %llu of the store was packed with %u rows and %u tokens, this configuration runs at "
                          "most %u rows and %u tokens: "
                          "set batch_tokens, max_batch_rows and max_length back until these rows are written",
                          (unsigned long long)p->batch.batch_no, p->batch.n_rows, p->batch.n_tokens, b->max_batch_rows,
                          most);
    return 1;
}

/* The group with the most free slots; -1 when no ring has one. */
static int pick_group(const sl_publisher *p) {
    int best = -1;
    uint64_t most = 0;
    for (uint32_t g = 0; g < p->boot->dp; g++) {
        uint64_t a = sl_ring_room(p->ring[g]), b = sl_ring_pay_room(p->ring[g]), room = a < b ? a : b;
        if (room > most) {
            most = room;
            best = (int)g;
        }
    }
    return best;
}

static uint32_t flags_of(void *arg, const sl_intake_rec *row) {
    const sl_publisher *p = arg;
    uint32_t every = p->boot->nll_every;
    return (every && row->seq % every == 0 ? SL_ROW_NLL : 0) | (sl_intake_row_done(p->in, row->seq) ? SL_ROW_DONE : 0);
}

static void ring_bells(const sl_publisher *p, int g) {
    const sl_boot_group *grp = &p->boot->groups[g];
    for (uint32_t r = 0; r < p->boot->tp; r++) sl_bell_ring(p->boot->procs[grp->first_rank_proc + r].bell_fd);
    for (uint32_t i = 0; i < p->boot->n_procs; i++)
        if (p->boot->procs[i].role == SL_ROLE_GATHER) sl_bell_ring(p->boot->procs[i].bell_fd);
}

int sl_publisher_turn(sl_publisher *p, sl_err *err) {
    int n = 0;
    for (;; n++) {
        int rc = next_batch(p, err), g;
        if (rc < 0) return rc;
        if (rc == 0 || (g = pick_group(p)) < 0) return n;
        sl_ring *r = p->ring[g];
        sl_desc_input in = {0};
        rc = sl_packer_write(p->packer, &p->batch, sl_ring_pay_next(r), sl_ring_info(r)->pay_size, &in, flags_of, p,
                             err);
        if (rc) return rc;
        sl_desc_input *d = (sl_desc_input *)(void *)sl_ring_stage(r, 1);
        if (!d)
            return sl_err_set(err, SL_EINTERNAL, "%s: no descriptor although there was room", sl_ring_info(r)->name);
        in.h = d->h; /* position and payload end were filled in by the ring */
        in.h.kind = SL_DESC_INPUT;
        *d = in;
        sl_crash_point("feeder.before_publish");
        sl_ring_publish(r);
        sl_crash_point("feeder.after_publish");
        ring_bells(p, g);
        sl_log(SL_DEBUG, "batch %llu: %u rows, %u tokens to group %d", (unsigned long long)in.batch_no, in.n_rows,
               in.n_tokens, g);
        p->have = false;
        p->rows += in.n_rows;
        p->tokens += in.n_tokens;
        p->batches++;
    }
}

bool sl_publisher_blocked(const sl_publisher *p) {
    return p->have;
}
uint64_t sl_publisher_rows(const sl_publisher *p) {
    return p->rows;
}
uint64_t sl_publisher_batches(const sl_publisher *p) {
    return p->batches;
}
uint64_t sl_publisher_tokens(const sl_publisher *p) {
    return p->tokens;
}

bool sl_publisher_starved(const sl_publisher *p) {
    for (uint32_t g = 0; g < p->boot->dp; g++)
        if (sl_ring_pos(p->ring[g], SL_BATCH_GATHERED) == sl_ring_pos(p->ring[g], SL_BATCH_PUBLISHED)) return true;
    return false;
}
