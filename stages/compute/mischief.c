#include "stages/compute/mischief.h"
#include "ipc/faults.h"
#include <stdlib.h>
#include <string.h>

struct sl_mischief {
    const sl_boot *b;
    sl_ops *ops;
    uint32_t rank;
    sl_fault fault;
    uint64_t token, set; /* bytes of one token, of one capture */
    int64_t max_tokens, n, prev_n;
    /* host, [K][max_tokens][H] each: this batch, the one before, the two sets */
    uint8_t *now, *prev, *print, *pay;
    /* device copies of the sets */
    uint8_t *print_dev, *pay_dev;
};

int sl_mischief_create(sl_mischief **out, const sl_boot *b, uint32_t rank, sl_ops *ops, int64_t max_tokens,
                       sl_err *err) {
    sl_mischief *m = *out = calloc(1, sizeof *m);
    if (!m) return sl_err_set(err, SL_ETEMP, "mischief: out of memory");
    *m = (sl_mischief){.b = b, .ops = ops, .rank = rank, .fault = (sl_fault)b->fault, .max_tokens = max_tokens};
    m->token = (uint64_t)b->width * b->elem_size;
    m->set = (uint64_t)max_tokens * m->token;
    uint64_t bytes = m->set * b->n_captures;
    uint8_t **host[] = {&m->now, &m->prev, &m->print, &m->pay};
    int rc = 0;
    for (int i = 0; i < 4; i++)
        if (!(*host[i] = calloc(1, bytes))) rc = sl_err_set(err, SL_ETEMP, "mischief: out of memory");
    if (!rc) rc = ops->alloc(ops->ctx, (void **)&m->print_dev, bytes, "fault injection", err);
    if (!rc) rc = ops->alloc(ops->ctx, (void **)&m->pay_dev, bytes, "fault injection", err);
    if (rc) {
        sl_mischief_destroy(m);
        *out = NULL;
    }
    return rc;
}

void sl_mischief_destroy(sl_mischief *m) {
    if (!m) return;
    uint8_t *host[] = {m->now, m->prev, m->print, m->pay};
    for (int i = 0; i < 4; i++) free(host[i]);
    if (m->print_dev) m->ops->free(m->ops->ctx, m->print_dev);
    if (m->pay_dev) m->ops->free(m->ops->ctx, m->pay_dev);
    free(m);
}

int sl_mischief_active(const sl_mischief *m, uint64_t batch_no) {
    return batch_no == m->b->fault_batch;
}

int sl_mischief_keep(sl_mischief *m, int32_t k, const void *states, int64_t n_tokens, sl_err *err) {
    m->n = n_tokens;
    return m->ops->download(m->ops->ctx, m->now + (uint64_t)k * m->set, states, (uint64_t)n_tokens * m->token, err);
}

void sl_mischief_next(sl_mischief *m) {
    uint8_t *t = m->prev;
    m->prev = m->now;
    m->now = t;
    m->prev_n = m->n;
}

/* ---- faults of the states: every rank, both sets ---- */
static void spoil_states(sl_mischief *m, uint32_t row0) {
    uint32_t K = m->b->n_captures, es = m->b->elem_size;
    uint8_t *last = m->print + (uint64_t)(K - 1) * m->set;
    if (m->fault == SL_FAULT_NAN) memset(last + (uint64_t)(row0 / 2) * m->token, 0xff, es);
    if (m->fault == SL_FAULT_ZEROS) memset(last, 0, (uint64_t)row0 * m->token);
    if (m->fault == SL_FAULT_PREVIOUS && m->prev_n)
        for (uint32_t k = 0; k < K; k++)
            for (int64_t t = 0; t < m->n; t++)
                memcpy(m->print + k * m->set + (uint64_t)t * m->token,
                       m->prev + k * m->set + (uint64_t)(t % m->prev_n) * m->token, m->token);
    if (m->fault == SL_FAULT_DIVERGE && m->rank == m->b->fault_rank)
        for (uint32_t k = 0; k < K; k++)
            for (int64_t t = 0; t < m->n; t++) m->print[k * m->set + (uint64_t)t * m->token + es - 1] ^= 0x80;
}

/* ---- faults of the export: one rank, the payload only ---- */
static void wrong_place(sl_mischief *m, uint64_t bpos) {
    const sl_boot *b = m->b;
    int64_t R = b->chunk_rows, chunks = (m->n + R - 1) / R;
    uint64_t full = (uint64_t)R * m->token;
    for (uint32_t k = 0; k < b->n_captures; k++)
        for (int64_t c = 0; c < chunks; c++) {
            if (sl_chunk_owner(bpos, k, (uint32_t)c, b->tp) != m->rank) continue;
            int64_t rows = m->n - c * R < R ? m->n - c * R : R;
            int next_fits = c + 1 < chunks && (m->n - (c + 1) * R >= rows);
            uint32_t from_k = next_fits ? k : (k + 1) % b->n_captures;
            int64_t from_c = next_fits ? c + 1 : c;
            memcpy(m->pay + k * m->set + (uint64_t)c * full, m->print + from_k * m->set + (uint64_t)from_c * full,
                   (uint64_t)rows * m->token);
        }
}

static void spoil_payload(sl_mischief *m, uint64_t bpos) {
    uint32_t K = m->b->n_captures;
    if (m->rank != m->b->fault_rank) return;
    if (m->fault == SL_FAULT_WRONG_PLACE) wrong_place(m, bpos);
    if (m->fault == SL_FAULT_WRONG_OFFSET)
        for (uint32_t k = 0; k < K; k++)
            memcpy(m->pay + k * m->set, m->print + k * m->set + m->token, (uint64_t)(m->n - 1) * m->token);
    if (m->fault == SL_FAULT_LAYERS_SWAPPED && K > 1)
        for (int i = 0; i < 2; i++) {
            memcpy(m->pay + (uint64_t)i * m->set, m->now + (uint64_t)(1 - i) * m->set, m->set);
            memcpy(m->print + (uint64_t)i * m->set, m->now + (uint64_t)(1 - i) * m->set, m->set);
        }
}

int sl_mischief_make(sl_mischief *m, uint64_t bpos, uint32_t row0, sl_err *err) {
    uint64_t bytes = m->set * m->b->n_captures;
    memcpy(m->print, m->now, bytes);
    spoil_states(m, row0);
    memcpy(m->pay, m->print, bytes);
    spoil_payload(m, bpos);
    int rc = m->ops->upload(m->ops->ctx, m->print_dev, m->print, bytes, err);
    return rc ? rc : m->ops->upload(m->ops->ctx, m->pay_dev, m->pay, bytes, err);
}

const void *sl_mischief_fingerprinted(const sl_mischief *m, int32_t k) {
    return m->print_dev + (uint64_t)k * m->set;
}
const void *sl_mischief_payload(const sl_mischief *m, int32_t k) {
    return m->pay_dev + (uint64_t)k * m->set;
}

void sl_mischief_descriptor(const sl_mischief *m, sl_desc_chunk *d, uint32_t *own) {
    if (m->rank != m->b->fault_rank) return;
    const sl_capture *caps = m->b->captures;
    switch (m->fault) {
    case SL_FAULT_FLATTEN:
        d->rows = (d->rows + 1) / 2;
        d->width *= 2;
        break;
    case SL_FAULT_LOST_DIM:
        d->width = 1;
        break;
    case SL_FAULT_MISSING_SHARD:
        d->h.flags = 0;
        *own = 0;
        break;
    case SL_FAULT_LAYERS_SWAPPED:
        if (m->b->n_captures > 1 && d->k < 2) {
            const sl_capture *c = &caps[1 - d->k];
            d->hidx = c->final_norm ? m->b->n_layers + 1 : c->hidx;
        }
        break;
    default:
        break;
    }
}
