/* A rig for tests of gather: one group of N ranks on real rings, synthetic batches whose states are a function of the
 * token ids as a decoder's would be, ranks that publish as ipc/flow.h says (with hooks that spoil what they publish),
 * and a writer that reads verdicts and releases. */
#ifndef SL_TESTS_FLOW_RIG_H
#define SL_TESTS_FLOW_RIG_H
#include "ipc/boot.h"
#include "ipc/doorbell.h"
#include "ipc/journal.h"
#include "tests/boot_example.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RIG_MAX_ROWS   16
#define RIG_MAX_TOKENS 64

typedef enum { ACT_KEEP, ACT_DROP, ACT_TWICE, ACT_NO_SLOT, ACT_ROW_FIRST } rig_act;

typedef struct rig rig;
typedef struct rig_hooks {
    /* Change a rank's own states [K][n][H] before anything is computed from them. */
    void (*states)(rig *g, uint32_t rank, uint16_t *s);
    /* Change a descriptor (and the payload that would be exported with it). */
    rig_act (*desc)(rig *g, uint32_t rank, sl_desc *d, uint16_t *payload);
    int same_labels; /* unused by most: see layers_swapped */
} rig_hooks;

typedef struct rig_batch {
    uint32_t n_rows, n_tokens, T[RIG_MAX_ROWS];
    int32_t ids[RIG_MAX_TOKENS];
    uint64_t bpos;
    uint16_t *states; /* [K][n][H], what is right */
} rig_batch;

struct rig {
    sl_boot boot;
    sl_stage st;
    sl_ctl_page *ctl;
    uint32_t N, K, H;
    sl_ring *feed, *lane[SL_MAX_RANKS];                 /* producers */
    sl_ring *w_batch, *w_lane[SL_MAX_RANKS], *w_sample; /* the writer's */
    sl_ring *eyes;                                      /* sample ring, observer */
    sl_metrics *feeder;
    rig_batch now, before;
    uint64_t seq, sample_at;
    uint32_t epoch;
    sl_err e;
};

static inline int rig_fail(const char *what, const sl_err *e) {
    fprintf(stderr, "rig: %s: %s\n", what, e->msg);
    abort();
}
#define RIG(call)                                                                                                      \
    do {                                                                                                               \
        if ((call) < 0) rig_fail(#call, &g->e);                                                                        \
    } while (0)

static inline int rig_ring(rig *g, const char *name, uint64_t depth, uint64_t slots, uint64_t size, uint32_t cursors) {
    sl_ring_params p = {.depth = depth, .pay_slots = slots, .pay_size = size, .n_cursors = cursors};
    snprintf(p.name, sizeof p.name, "%s", name);
    int fd = sl_ring_create(&p, false, NULL, &g->e);
    if (fd < 0) rig_fail(name, &g->e);
    return fd;
}

static inline void rig_open(rig *g, uint32_t ranks) {
    memset(g, 0, sizeof *g);
    sl_boot *b = &g->boot;
    boot_example(b, 1, ranks);
    g->N = ranks;
    g->K = b->n_captures;
    g->H = b->width;
    g->epoch = 1;
    for (uint32_t i = 0; i < b->n_procs; i++) RIG(b->procs[i].bell_fd = sl_bell_create(&g->e));
    RIG(b->metrics_fd = sl_metrics_create(b->n_procs, &g->e));
    RIG(b->ctl_fd = sl_ctl_create(1, &g->e));
    b->groups[0].batch_fd = rig_ring(g, "batch.0", 8, 8, 4096, SL_BATCH_CURSORS);
    b->groups[0].sample_fd = rig_ring(g, "sample.0", 64, 0, 0, SL_SAMPLE_CURSORS);
    for (uint32_t r = 0; r < ranks; r++)
        b->groups[0].chunk_fd[r] = rig_ring(g, "chunk.0", 256, 64, 4096, SL_CHUNK_CURSORS);
    RIG(sl_boot_check(b, &g->e));
    RIG(sl_ring_attach(&g->feed, b->groups[0].batch_fd, SL_RING_PRODUCER, &g->e));
    RIG(sl_ring_attach(&g->w_batch, b->groups[0].batch_fd, SL_BATCH_RELEASED, &g->e));
    RIG(sl_ring_attach(&g->w_sample, b->groups[0].sample_fd, SL_SAMPLE_RELEASED, &g->e));
    RIG(sl_ring_attach(&g->eyes, b->groups[0].sample_fd, SL_RING_OBSERVER, &g->e));
    for (uint32_t r = 0; r < ranks; r++) {
        RIG(sl_ring_attach(&g->lane[r], b->groups[0].chunk_fd[r], SL_RING_PRODUCER, &g->e));
        RIG(sl_ring_attach(&g->w_lane[r], b->groups[0].chunk_fd[r], SL_CHUNK_RELEASED, &g->e));
    }
    RIG(sl_ctl_attach(&g->ctl, b->ctl_fd, 1, 1, &g->e));
    RIG(sl_metrics_attach(&g->feeder, b->metrics_fd, 1, &g->e));
    g->st.boot = b;
    g->st.me = &b->procs[2];
    g->st.proc = 2;
    g->st.ctl = g->ctl;
    g->st.bell = b->procs[2].bell_fd;
    RIG(sl_metrics_attach(&g->st.metrics, b->metrics_fd, 2, &g->e));
}

static inline void rig_close(rig *g) {
    for (uint32_t r = 0; r < g->N; r++) {
        sl_ring_detach(g->lane[r]);
        sl_ring_detach(g->w_lane[r]);
        close(g->boot.groups[0].chunk_fd[r]);
    }
    sl_ring_detach(g->feed);
    sl_ring_detach(g->w_batch);
    sl_ring_detach(g->w_sample);
    sl_ring_detach(g->eyes);
    sl_metrics_detach(g->feeder);
    sl_metrics_detach(g->st.metrics);
    munmap(g->ctl, 2 * sizeof *g->ctl);
    close(g->boot.groups[0].batch_fd);
    close(g->boot.groups[0].sample_fd);
    close(g->boot.metrics_fd);
    close(g->boot.ctl_fd);
    for (uint32_t i = 0; i < g->boot.n_procs; i++) close(g->boot.procs[i].bell_fd);
    free(g->now.states);
    free(g->before.states);
}

static inline uint64_t rig_mix(uint64_t h) {
    h ^= h >> 33;
    h *= 0xff51afd7ed558ccdull;
    h ^= h >> 33;
    h *= 0xc4ceb9fe1a85ec53ull;
    return h ^ h >> 33;
}

/* H[0] is a function of the token; deeper states of the row so far, with runs of one token collapsed: attention over
 * equal values gives the same value. */
static inline void rig_states(rig *g, rig_batch *b) {
    b->states = malloc((size_t)g->K * b->n_tokens * g->H * 2);
    for (uint32_t k = 0; k < g->K; k++)
        for (uint32_t i = 0, t = 0; i < b->n_rows; i++) {
            uint64_t h = k;
            for (uint32_t j = 0; j < b->T[i]; j++, t++) {
                if (!g->boot.captures[k].hidx)
                    h = rig_mix((uint64_t)b->ids[t] + 77);
                else if (!j || b->ids[t] != b->ids[t - 1])
                    h = rig_mix(h ^ rig_mix((uint64_t)b->ids[t] + 1));
                for (uint32_t x = 0; x < g->H; x++) {
                    uint64_t v = rig_mix(h + x * 31 + k);
                    b->states[((size_t)k * b->n_tokens + t) * g->H + x] =
                        (uint16_t)(0x3e00 + (v & 0x1ff) + (v & 0x8000));
                }
            }
        }
}

/* Publish a batch of rows with these lengths and ids (NULL: distinct ids made up). */
static inline void rig_feed(rig *g, uint32_t n_rows, const uint32_t *T, const int32_t *ids) {
    free(g->before.states);
    g->before = g->now;
    rig_batch *b = &g->now;
    memset(b, 0, sizeof *b);
    b->n_rows = n_rows;
    b->bpos = sl_ring_pos(g->feed, 0);
    uint8_t *slot = sl_ring_pay_next(g->feed);
    if (!slot) rig_fail("batch ring is full", &g->e);
    memset(slot, 0, 4096);
    sl_batch_row *r = (sl_batch_row *)(void *)slot;
    for (uint32_t i = 0; i < n_rows; i++) {
        b->T[i] = T[i];
        r[i] = (sl_batch_row){.seq = g->seq, .row = g->seq, .t0 = b->n_tokens, .T = T[i], .mask_sum = 1};
        g->seq++;
        b->n_tokens += T[i];
    }
    for (uint32_t t = 0; t < b->n_tokens; t++)
        b->ids[t] = ids ? ids[t] : (int32_t)(rig_mix(b->bpos * 1000 + t) % 900 + (t & 1) * 50);
    memcpy(r + n_rows, b->ids, 4ul * b->n_tokens);
    sl_desc_input *d = (sl_desc_input *)(void *)sl_ring_stage(g->feed, 1);
    d->h.kind = SL_DESC_INPUT;
    d->batch_no = b->bpos + 100;
    d->n_rows = n_rows;
    d->n_tokens = b->n_tokens;
    d->bytes = sl_batch_bytes(n_rows, b->n_tokens, 0);
    d->crc = sl_crc32c(0, slot, d->bytes);
    sl_ring_publish(g->feed);
    sl_bell_ring(g->boot.procs[2].bell_fd);
    rig_states(g, b);
}

static inline void rig_emit(rig *g, uint32_t rank, sl_desc *d, uint16_t *payload, uint64_t bytes, const rig_hooks *h) {
    rig_act act = h && h->desc ? h->desc(g, rank, d, payload) : ACT_KEEP;
    if (act == ACT_DROP) return;
    if (act == ACT_ROW_FIRST) {
        sl_desc_row *w = (sl_desc_row *)(void *)sl_ring_stage(g->lane[rank], 0);
        w->h.kind = SL_DESC_ROW;
        w->h.epoch = d->h.epoch;
        w->bpos = g->now.bpos;
    }
    for (int i = 0; i < (act == ACT_TWICE ? 2 : 1); i++) {
        unsigned pay = bytes && act != ACT_NO_SLOT && (d->h.flags & SL_CHUNK_PAYLOAD);
        if (pay) memcpy(sl_ring_pay_next(g->lane[rank]), payload, bytes);
        sl_desc *o = sl_ring_stage(g->lane[rank], pay);
        if (!o) rig_fail("chunk ring is full", &g->e);
        sl_desc_head head = o->h;
        *o = *d;
        o->h.pay_end = head.pay_end;
        o->h.pos = d->h.pos ? d->h.pos : head.pos; /* a hook may set a false position */
    }
}

static inline uint32_t rig_label(const rig *g, uint32_t k) {
    return g->boot.captures[k].final_norm ? g->boot.n_layers + 1 : g->boot.captures[k].hidx;
}

/* What rank `rank` publishes for the batch fed last, up to and including END. */
static inline void rig_rank(rig *g, uint32_t rank, const rig_hooks *h) {
    const rig_batch *b = &g->now;
    uint32_t cr = g->boot.chunk_rows, C = (b->n_tokens - 1) / cr + 1;
    size_t total = (size_t)g->K * b->n_tokens * g->H * 2;
    uint16_t *mine = malloc(total), *buf = malloc((size_t)cr * g->H * 2);
    memcpy(mine, b->states, total);
    if (h && h->states) h->states(g, rank, mine);
    for (uint32_t k = 0; k < g->K; k++)
        for (uint32_t c = 0; c < C; c++) {
            uint32_t rows = b->n_tokens - c * cr < cr ? b->n_tokens - c * cr : cr;
            const uint16_t *p = mine + ((size_t)k * b->n_tokens + c * cr) * g->H;
            uint64_t bytes = (uint64_t)rows * g->H * 2;
            bool own = sl_chunk_owner(b->bpos, k, c, g->N) == rank;
            sl_desc d = {0};
            sl_desc_chunk *ch = (sl_desc_chunk *)(void *)&d;
            *ch = (sl_desc_chunk){.h = {.kind = SL_DESC_CHUNK, .epoch = g->epoch, .flags = own ? SL_CHUNK_PAYLOAD : 0},
                                  .bpos = b->bpos,
                                  .k = (uint16_t)k,
                                  .rank = (uint16_t)rank,
                                  .c = c,
                                  .rows = rows,
                                  .width = g->H,
                                  .hidx = rig_label(g, k),
                                  .sum = sl_sum64(p, bytes)};
            memcpy(buf, p, bytes);
            rig_emit(g, rank, &d, buf, bytes, h);
        }
    for (uint32_t i = 0, t = 0; i < b->n_rows && rank == 0; t += b->T[i++]) {
        sl_desc d = {0};
        *(sl_desc_row *)(void *)&d = (sl_desc_row){.h = {.kind = SL_DESC_ROW, .epoch = g->epoch},
                                                   .bpos = b->bpos,
                                                   .row = i,
                                                   .T = b->T[i],
                                                   .token_sum = sl_sum64(b->ids + t, 4ull * b->T[i]),
                                                   .nll = NAN};
        rig_emit(g, rank, &d, NULL, 0, h);
    }
    sl_desc d = {0};
    *(sl_desc_end *)(void *)&d = (sl_desc_end){.h = {.kind = SL_DESC_END, .epoch = g->epoch},
                                               .bpos = b->bpos,
                                               .n_chunks = g->K * C,
                                               .rank = (uint16_t)rank,
                                               .batch_no = b->bpos + 100};
    rig_emit(g, rank, &d, NULL, 0, h);
    sl_ring_publish(g->lane[rank]);
    sl_bell_ring(g->boot.procs[2].bell_fd);
    free(mine);
    free(buf);
}

static inline void rig_ranks(rig *g, const rig_hooks *h) {
    for (uint32_t r = 0; r < g->N; r++) rig_rank(g, r, h);
}

/* As the writer: the verdicts of the next batch in the sample ring (0: none yet), then everything released. */
static inline uint32_t rig_take(rig *g, sl_desc_sample *out, sl_desc_batch *batch) {
    const sl_desc_batch *d = (const sl_desc_batch *)(const void *)sl_ring_at(g->w_sample, g->sample_at);
    if (!d || d->h.kind != SL_DESC_BATCH || sl_ring_pos(g->w_batch, SL_BATCH_GATHERED) <= d->bpos) return 0;
    *batch = *d;
    for (uint32_t i = 0; i < batch->n_rows; i++)
        out[i] = *(const sl_desc_sample *)(const void *)sl_ring_at(g->w_sample, g->sample_at + 1 + i);
    g->sample_at += 1 + batch->n_rows;
    for (uint32_t r = 0; r < g->N; r++)
        RIG(sl_ring_advance(g->w_lane[r], sl_ring_pos(g->w_lane[r], SL_CHUNK_VALIDATED), &g->e));
    RIG(sl_ring_advance(g->w_batch, batch->bpos + 1, &g->e));
    RIG(sl_ring_advance(g->w_sample, g->sample_at, &g->e));
    sl_bell_ring(g->boot.procs[2].bell_fd);
    return batch->n_rows;
}
#endif
