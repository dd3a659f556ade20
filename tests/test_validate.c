/* validate: every verdict from an injected fault, with 1, 2 and 3 ranks, through real rings. Each fault condemns
 * exactly the rows it should, and the batch behind it is clean. Then the legitimate repetitions, which condemn nobody.
 */
#include "ipc/log.h"
#include "stages/gather/gather.h"
#include "stages/gather/scan.h"
#include "stages/gather/validate.h"
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include "tests/flow_rig.h"
#include "tests/row_sum.h"

static int failures;
#define CHECK(ok, ...)                                                                                                 \
    do {                                                                                                               \
        if (!(ok)) {                                                                                                   \
            printf("FAIL %s:%d: ", __FILE__, __LINE__);                                                                \
            printf(__VA_ARGS__);                                                                                       \
            printf("\n");                                                                                              \
            failures++;                                                                                                \
        }                                                                                                              \
    } while (0)

/* Rows of the standard batch: tokens 0-9, 10-29, 30, 31-35, 36-47, 48-54; chunks of 16 tokens. */
static const uint32_t T[] = {10, 20, 1, 5, 12, 7};
#define ROWS 6
#define ALL  0x3f

#define CHUNK(d) ((sl_desc_chunk *)(void *)(d))
#define ROW(d)   ((sl_desc_row *)(void *)(d))
#define END(d)   ((sl_desc_end *)(void *)(d))
static bool is_chunk(const sl_desc *d, unsigned k, unsigned c) {
    return d->h.kind == SL_DESC_CHUNK && CHUNK(d)->k == k && CHUNK(d)->c == c;
}
static bool owns(const sl_desc *d) {
    return d->h.kind == SL_DESC_CHUNK && d->h.flags & SL_CHUNK_PAYLOAD;
}
static uint16_t *state_at(rig *g, uint16_t *s, unsigned k, unsigned t) {
    return s + ((size_t)k * g->now.n_tokens + t) * g->H;
}
static void copy_state(rig *g, uint16_t *s, unsigned k, unsigned to, unsigned k2, unsigned from) {
    memcpy(state_at(g, s, k, to), state_at(g, s, k2, from), g->H * 2);
}

/* ---- the faults ---- */
static rig_act row_longer(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)r, (void)p;
    if (d->h.kind == SL_DESC_ROW && ROW(d)->row == 3) ROW(d)->T++;
    return ACT_KEEP;
}
static rig_act chunk_shorter(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)p;
    if (r == 0 && is_chunk(d, 1, 2)) CHUNK(d)->rows--;
    return ACT_KEEP;
}
static rig_act chunk_twice(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)p;
    return r == 0 && is_chunk(d, 0, 1) ? ACT_TWICE : ACT_KEEP;
}
static rig_act fingerprint_gone(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)r, (void)p;
    return is_chunk(d, 1, 2) && !owns(d) ? ACT_DROP : ACT_KEEP;
}
static rig_act end_miscounts(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)p;
    if (r == 0 && d->h.kind == SL_DESC_END) END(d)->n_chunks = 5;
    return ACT_KEEP;
}
static rig_act row_gone(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)r, (void)p;
    return d->h.kind == SL_DESC_ROW && ROW(d)->row == 2 ? ACT_DROP : ACT_KEEP;
}
static rig_act width_off(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)p;
    if (r == 0 && is_chunk(d, 2, 0)) CHUNK(d)->width++;
    return ACT_KEEP;
}
static rig_act flatten(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)p;
    if (r == g->N - 1 && d->h.kind == SL_DESC_CHUNK) {
        CHUNK(d)->rows = (CHUNK(d)->rows + 1) / 2;
        CHUNK(d)->width *= 2;
    }
    return ACT_KEEP;
}
static rig_act lost_dim(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)p;
    if (r == g->N - 1 && d->h.kind == SL_DESC_CHUNK) CHUNK(d)->width = 1;
    return ACT_KEEP;
}
static rig_act slot_gone(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)r, (void)p;
    return is_chunk(d, 1, 3) && owns(d) ? ACT_NO_SLOT : ACT_KEEP;
}
static rig_act swapped_chunks(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)p;
    if (r != 0 || d->h.kind != SL_DESC_CHUNK || CHUNK(d)->k != 1) return ACT_KEEP;
    if (CHUNK(d)->c == 1)
        CHUNK(d)->c = 2;
    else if (CHUNK(d)->c == 2)
        CHUNK(d)->c = 1;
    return ACT_KEEP;
}
static rig_act label_off(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)p;
    if (r == 0 && is_chunk(d, 1, 3)) CHUNK(d)->hidx = 8;
    return ACT_KEEP;
}
static rig_act rank_off(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)p;
    if (r == 0 && is_chunk(d, 0, 0)) CHUNK(d)->rank = 9;
    return ACT_KEEP;
}
static rig_act k_out_of_range(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)p;
    if (r == 0 && is_chunk(d, 2, 1)) CHUNK(d)->k = 65535;
    return ACT_KEEP;
}
static rig_act c_out_of_range(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)p;
    if (r == 0 && is_chunk(d, 2, 1)) CHUNK(d)->c = 0xfffffff0;
    return ACT_KEEP;
}
static rig_act wrong_place(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)r;
    if (is_chunk(d, 0, 1) && owns(d)) memcpy(p, state_at(g, g->now.states, 0, 32), 16ul * g->H * 2);
    return ACT_KEEP;
}
static rig_act last_batch_content(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)r;
    if (is_chunk(d, 1, 0) && owns(d)) memcpy(p, g->before.states + (size_t)g->before.n_tokens * g->H, 16ul * g->H * 2);
    return ACT_KEEP;
}
static void swap_layers(rig *g, uint32_t r, uint16_t *s) {
    (void)r;
    for (uint32_t t = 0; t < g->now.n_tokens; t++)
        for (uint32_t x = 0; x < g->H; x++) {
            uint16_t *a = state_at(g, s, 0, t) + x, *b = state_at(g, s, 1, t) + x, v = *a;
            *a = *b;
            *b = v;
        }
}
static rig_act swap_labels(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)r, (void)p;
    if (d->h.kind == SL_DESC_CHUNK && CHUNK(d)->k < 2) CHUNK(d)->hidx = g->boot.captures[1 - CHUNK(d)->k].hidx;
    return ACT_KEEP;
}
static void swap_layers_of_one(rig *g, uint32_t r, uint16_t *s) {
    if (r == g->N - 1) swap_layers(g, r, s);
}
static rig_act stranger_exports(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)r, (void)p;
    if (is_chunk(d, 1, 3) && !owns(d)) d->h.flags |= SL_CHUNK_PAYLOAD;
    return ACT_KEEP;
}
static rig_act other_tokens(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)r, (void)p;
    if (d->h.kind == SL_DESC_ROW && ROW(d)->row == 4) ROW(d)->token_sum ^= 1;
    return ACT_KEEP;
}
static rig_act row_from_rank1(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)p;
    return r == 1 && d->h.kind == SL_DESC_END ? ACT_ROW_FIRST : ACT_KEEP;
}
static rig_act row_index_wild(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)r, (void)p;
    if (d->h.kind == SL_DESC_ROW && ROW(d)->row == 5) ROW(d)->row = 0x7fffffff;
    return ACT_KEEP;
}
static void a_nan(rig *g, uint32_t r, uint16_t *s) {
    (void)r;
    state_at(g, s, 1, 14)[63] = 0x7fc1;
}
static void infs(rig *g, uint32_t r, uint16_t *s) {
    (void)r;
    state_at(g, s, 2, 54)[0] = 0xff80;
    state_at(g, s, 2, 53)[1] = 0x7f80;
}
static void zero_row(rig *g, uint32_t r, uint16_t *s) {
    (void)r;
    memset(state_at(g, s, 2, 48), 0, 7ul * g->H * 2);
}
static void zero_token(rig *g, uint32_t r, uint16_t *s) {
    (void)r;
    for (uint32_t x = 0; x < g->H; x++) state_at(g, s, 1, 20)[x] = x & 1 ? 0x8000 : 0; /* -0 is zero too */
}
static void zero_embeddings(rig *g, uint32_t r, uint16_t *s) {
    (void)r;
    memset(state_at(g, s, 0, 31), 0, 5ul * g->H * 2);
}
static void repeated(rig *g, uint32_t r, uint16_t *s) {
    (void)r;
    for (unsigned t = 13; t < 19; t++) copy_state(g, s, 2, t, 2, 12);
}
static void same_layers(rig *g, uint32_t r, uint16_t *s) {
    (void)r;
    for (unsigned t = 36; t < 48; t++) copy_state(g, s, 2, t, 1, t);
}
static void earlier_row(rig *g, uint32_t r, uint16_t *s) { /* row 3 of the batch before, other ids */
    (void)r;
    for (unsigned k = 1; k < g->K; k++)
        memcpy(state_at(g, s, k, 31), g->before.states + ((size_t)k * g->before.n_tokens + 31) * g->H, 5ul * g->H * 2);
}
static void row_before(rig *g, uint32_t r, uint16_t *s) { /* of the same batch: row 5 shows row 4's first states */
    (void)r;
    for (unsigned k = 0; k < g->K; k++)
        for (unsigned t = 0; t < 7; t++) copy_state(g, s, k, 48 + t, k, 36 + t);
}
static void earlier_batch_shifted(rig *g, uint32_t r, uint16_t *s) { /* rows do not fall on rows */
    (void)r;
    for (unsigned k = 0; k < g->K; k++)
        for (unsigned t = 0; t < g->now.n_tokens; t++)
            memcpy(state_at(g, s, k, t),
                   g->before.states + ((size_t)k * g->before.n_tokens + (t + 3) % g->before.n_tokens) * g->H, g->H * 2);
}
static rig_act flipped_bit(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)r;
    if (is_chunk(d, 1, 1) && owns(d)) p[5] ^= 4;
    return ACT_KEEP;
}
static rig_act wrong_offset(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    if (r != 0 || !owns(d)) return ACT_KEEP;
    uint32_t t0 = CHUNK(d)->c * 16, n = CHUNK(d)->rows;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t t = t0 + i + 1 < g->now.n_tokens ? t0 + i + 1 : g->now.n_tokens - 1;
        memcpy(p + (size_t)i * g->H, state_at(g, g->now.states, CHUNK(d)->k, t), g->H * 2);
    }
    return ACT_KEEP;
}
static rig_act future_epoch(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)p;
    if (r == g->N - 1 && is_chunk(d, 0, 3)) d->h.epoch = 99;
    return ACT_KEEP;
}
static rig_act epoch_zero(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)p;
    if (r == g->N - 1 && d->h.kind == SL_DESC_END) d->h.epoch = 0;
    return ACT_KEEP;
}
static void diverging(rig *g, uint32_t r, uint16_t *s) {
    if (r == g->N - 1) state_at(g, s, 1, 50)[7] ^= 0x8000;
}
static rig_act payload_gone(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)r, (void)p;
    if (is_chunk(d, 2, 1)) d->h.flags = 0;
    return ACT_KEEP;
}
static rig_act chunk_gone(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)r, (void)p;
    return is_chunk(d, 2, 1) && owns(d) ? ACT_DROP : ACT_KEEP;
}
static rig_act bad_kind(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)p;
    if (r == 0 && d->h.kind == SL_DESC_ROW && ROW(d)->row == 0) d->h.kind = 77;
    return ACT_KEEP;
}
static rig_act bad_pos(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)p;
    if (r == 0 && is_chunk(d, 1, 1)) d->h.pos = 123456;
    return ACT_KEEP;
}
static rig_act bad_bpos(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)p;
    if (r == g->N - 1 && is_chunk(d, 1, 1)) CHUNK(d)->bpos = 1ull << 60;
    return ACT_KEEP;
}
static rig_act bad_batch_no(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)p;
    if (r == 0 && d->h.kind == SL_DESC_END) END(d)->batch_no++;
    return ACT_KEEP;
}
static rig_act start_elsewhere(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)p;
    if (r == g->N - 1 && is_chunk(d, 0, 0)) CHUNK(d)->bpos = 1ull << 60;
    return ACT_KEEP;
}
static rig_act start_of_epoch_zero(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)p;
    if (r == g->N - 1 && is_chunk(d, 0, 0)) d->h.epoch = 0;
    return ACT_KEEP;
}
static rig_act start_to_come(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)p;
    if (r == 0 && is_chunk(d, 0, 0)) d->h.epoch = 99;
    return ACT_KEEP;
}
static rig_act start_to_come_of_the_next(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    if (r == 0 && is_chunk(d, 0, 0)) CHUNK(d)->bpos++;
    return start_to_come(g, r, d, p);
}
static rig_act next_in_the_middle(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)p;
    if (r == g->N - 1 && is_chunk(d, 1, 1)) CHUNK(d)->bpos++;
    return ACT_KEEP;
}
/* Rows 1 and 2 as they are, in the other order. */
static rig_act rows_change_places(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)r, (void)p;
    if (d->h.kind != SL_DESC_ROW || (ROW(d)->row != 1 && ROW(d)->row != 2)) return ACT_KEEP;
    uint32_t i = ROW(d)->row == 1 ? 2 : 1;
    ROW(d)->row = i;
    ROW(d)->T = T[i];
    ROW(d)->token_sum = sl_sum64(g->now.ids + (i == 1 ? 10 : 30), 4ull * T[i]);
    return ACT_KEEP;
}
static rig_act row_twice(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)r, (void)p;
    return d->h.kind == SL_DESC_ROW && ROW(d)->row == 2 ? ACT_TWICE : ACT_KEEP;
}
static rig_act end_of_another(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)p;
    if (r == 0 && d->h.kind == SL_DESC_END) END(d)->rank = 9;
    return ACT_KEEP;
}
/* The END tells what was sent: only the chunk that was not is missing. */
static rig_act chunk_gone_and_told(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    if (d->h.kind == SL_DESC_END && sl_chunk_owner(g->now.bpos, 2, 1, g->N) == r) END(d)->n_chunks--;
    return chunk_gone(g, r, d, p);
}
static rig_act row_shorter(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)r, (void)p;
    if (d->h.kind == SL_DESC_ROW && ROW(d)->row == 3) ROW(d)->T--;
    return ACT_KEEP;
}
/* The one that is found first explains less than the one that is found then. */
static rig_act two_faults(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    if (r == 0 && is_chunk(d, 2, 2)) CHUNK(d)->hidx = 77;
    return chunk_shorter(g, r, d, p);
}
static void three_repeated(rig *g, uint32_t r, uint16_t *s) {
    (void)r;
    for (unsigned t = 13; t < 16; t++) copy_state(g, s, 2, t, 2, 12);
}
static void three_of_others(rig *g, uint32_t r, uint16_t *s) { /* three of twenty, spread over the row */
    (void)r;
    for (unsigned i = 0; i < 3; i++)
        for (unsigned k = 1; k < g->K; k++)
            memcpy(state_at(g, s, k, 12 + 5 * i), g->before.states + ((size_t)k * g->before.n_tokens + 40 + i) * g->H,
                   g->H * 2);
}
static rig_act no_end(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)p;
    return r == g->N - 1 && d->h.kind == SL_DESC_END ? ACT_DROP : ACT_KEEP;
}

#define ANY 0xffffffffu
typedef struct fault_case {
    const char *name;
    rig_hooks h;
    uint32_t min_ranks;
    sl_verdict verdict;
    uint32_t rows;
    uint32_t k, token; /* of the lowest condemned row; ANY: not checked */
    uint64_t detail;   /* the same; 0: not checked */
} fault_case;
static const fault_case cases[] = {
    {"ROW says another length", {.desc = row_longer}, 1, SL_V_COUNT, 0x08, ANY, ANY},
    {"chunk has a row less", {.desc = chunk_shorter}, 1, SL_V_COUNT, 0x18, 1, 1},
    {"chunk comes twice", {.desc = chunk_twice}, 1, SL_V_COUNT, 0x0e, 0, 6},
    {"a fingerprint is missing", {.desc = fingerprint_gone}, 2, SL_V_COUNT, 0x18, 1, 1},
    {"END counts wrong", {.desc = end_miscounts}, 1, SL_V_COUNT, ALL, ANY, ANY},
    {"a ROW is missing", {.desc = row_gone}, 1, SL_V_COUNT, 0x04, ANY, ANY},
    {"no END", {.desc = no_end}, 1, SL_V_COUNT, ALL, ANY, ANY},
    {"width differs", {.desc = width_off}, 1, SL_V_SHAPE, 0x03, 2, 0},
    {"flattened", {.desc = flatten}, 1, SL_V_SHAPE, ALL, 0, 0},
    {"hidden dimension lost", {.desc = lost_dim}, 1, SL_V_SHAPE, ALL, 0, 0},
    {"payload slot is missing", {.desc = slot_gone}, 1, SL_V_SHAPE, 0x20, 1, 0},
    {"chunks change places", {.desc = swapped_chunks}, 1, SL_V_ORDER, 0x1e, 1, ANY},
    {"label of another layer", {.desc = label_off}, 1, SL_V_ORDER, 0x20, 1, 0},
    {"another rank's name", {.desc = rank_off}, 1, SL_V_ORDER, 0x03, 0, 0},
    {"k out of range", {.desc = k_out_of_range}, 1, SL_V_ORDER, ALL, ANY, ANY},
    {"c out of range", {.desc = c_out_of_range}, 1, SL_V_ORDER, ALL, ANY, ANY},
    {"payload of another chunk", {.desc = wrong_place}, 1, SL_V_ORDER, 0x0e, 0, 6},
    {"payload of the batch before", {.desc = last_batch_content}, 1, SL_V_ORDER, 0x03, 1, 0},
    {"layers and labels swapped", {.states = swap_layers, .desc = swap_labels}, 1, SL_V_ORDER, ALL, 0, 0},
    {"layers swapped on one rank", {.states = swap_layers_of_one}, 2, SL_V_ORDER, ALL, 0, 0},
    {"payload from a stranger", {.desc = stranger_exports}, 2, SL_V_ORDER, 0x20, 1, 0},
    {"ROW from rank 1", {.desc = row_from_rank1}, 2, SL_V_ORDER, 0x01, ANY, ANY},
    {"ROW of no row", {.desc = row_index_wild}, 1, SL_V_ORDER, ALL, ANY, ANY},
    {"unknown kind", {.desc = bad_kind}, 1, SL_V_ORDER, ALL, ANY, ANY},
    {"false position", {.desc = bad_pos}, 1, SL_V_ORDER, ALL, ANY, ANY},
    {"false batch position", {.desc = bad_bpos}, 1, SL_V_ORDER, ALL, ANY, ANY},
    {"false batch number", {.desc = bad_batch_no}, 1, SL_V_ORDER, ALL, ANY, ANY},
    {"other tokens were run", {.desc = other_tokens}, 1, SL_V_TOKENS, 0x10, ANY, ANY},
    {"a NaN", {.states = a_nan}, 1, SL_V_NONFINITE, 0x02, 1, 4},
    {"two Inf", {.states = infs}, 1, SL_V_NONFINITE, 0x20, 2, 5},
    {"a row of zeros", {.states = zero_row}, 1, SL_V_CONSTANT, 0x20, 2, 0},
    {"a state of zeros", {.states = zero_token}, 1, SL_V_CONSTANT, 0x02, 1, 10},
    {"embeddings of zeros", {.states = zero_embeddings}, 1, SL_V_CONSTANT, 0x08, 0, 0},
    {"repeated states", {.states = repeated}, 1, SL_V_CONSTANT, 0x02, 2, 3},
    {"a layer twice", {.states = same_layers}, 1, SL_V_CONSTANT, 0x10, 2, 0},
    {"the states of an earlier row",
     {.states = earlier_row},
     1,
     SL_V_CONSTANT,
     0x08,
     ANY,
     0,
     (uint64_t)SL_CONST_ROWS << 32 | 6},
    {"the states of the row before", {.states = row_before}, 1, SL_V_CONSTANT, 0x20, ANY, 0},
    {"the batch before, shifted", {.states = earlier_batch_shifted}, 1, SL_V_CONSTANT, ALL, ANY, ANY},
    {"a flipped bit", {.desc = flipped_bit}, 1, SL_V_CHECKSUM, 0x0e, 1, 6},
    {"wrong offset", {.desc = wrong_offset}, 1, SL_V_CHECKSUM, ALL, ANY, ANY},
    {"an epoch to come", {.desc = future_epoch}, 1, SL_V_EPOCH, ALL, ANY, ANY},
    {"epoch 0", {.desc = epoch_zero}, 1, SL_V_EPOCH, ALL, ANY, ANY},
    {"one rank diverges", {.states = diverging}, 2, SL_V_RANKS_DISAGREE, 0x20, 1, 0},
    {"payload does not come", {.desc = payload_gone}, 1, SL_V_MISSING_SHARD, 0x0e, 2, 6},
    {"chunk does not come", {.desc = chunk_gone}, 1, SL_V_MISSING_SHARD, 0x0e, 2, 6},
    {"chunk does not come, and END says so", {.desc = chunk_gone_and_told}, 1, SL_V_MISSING_SHARD, 0x0e, 2, 6},
    {"false batch position at the start", {.desc = start_elsewhere}, 1, SL_V_ORDER, ALL, ANY, ANY},
    {"the next batch's position in the middle", {.desc = next_in_the_middle}, 1, SL_V_ORDER, ALL, ANY, ANY},
    {"epoch 0 at the start", {.desc = start_of_epoch_zero}, 1, SL_V_EPOCH, ALL, ANY, ANY},
    {"an epoch to come at the start", {.desc = start_to_come}, 1, SL_V_EPOCH, ALL, ANY, ANY, 99},
    {"the same, of the next batch", {.desc = start_to_come_of_the_next}, 1, SL_V_EPOCH, ALL, ANY, ANY, 99},
    {"ROWs change places", {.desc = rows_change_places}, 1, SL_V_ORDER, 0x02, ANY, ANY},
    {"a ROW comes twice", {.desc = row_twice}, 1, SL_V_COUNT, 0x04, ANY, ANY, 2},
    {"ROW says a shorter length", {.desc = row_shorter}, 1, SL_V_COUNT, 0x08, ANY, ANY, 4},
    {"END of another rank", {.desc = end_of_another}, 1, SL_V_ORDER, ALL, ANY, ANY, 9},
    {"two faults", {.desc = two_faults}, 1, SL_V_ORDER, 0x18, 2, 1, 77},
    {"three states of other ids",
     {.states = three_of_others},
     1,
     SL_V_CONSTANT,
     0x02,
     ANY,
     2,
     (uint64_t)SL_CONST_OTHER_ID << 32 | 3},
    {"a state four times",
     {.states = three_repeated},
     1,
     SL_V_CONSTANT,
     0x02,
     2,
     3,
     (uint64_t)SL_CONST_REPEATED << 32 | 3},
};

static void turn_until_idle(rig *g, sl_gather *ga) {
    bool full;
    int rc, n = 0;
    while ((rc = sl_gather_turn(ga, &full, &g->e)) > 0 && n++ < 1000) {}
    CHECK(rc == 0, "turn: %s", g->e.msg);
}

/* A good row's sum is that of its states, which the rig still has. */
static void check_sum(rig *g, uint32_t i, uint64_t told, const char *when) {
    const uint8_t *state[SL_MAX_CAPTURES];
    uint32_t t0 = 0, T0 = 0;
    for (uint32_t j = 0; j <= i; j++) t0 += T0, T0 = g->now.T[j];
    for (uint32_t k = 0; k < g->K; k++) state[k] = (const uint8_t *)state_at(g, g->now.states, k, t0);
    uint64_t want = plain_row_sum(state, g->K, T0, g->H * 2);
    CHECK(told == want, "%s (%u ranks): row %u has the sum %016llx, expected %016llx", when, g->N, i,
          (unsigned long long)told, (unsigned long long)want);
}

static void expect_good(rig *g, sl_gather *ga, const char *when) {
    sl_desc_sample s[RIG_MAX_ROWS];
    sl_desc_batch b = {0};
    turn_until_idle(g, ga);
    uint32_t n = rig_take(g, s, &b);
    CHECK(n == g->now.n_rows, "%s: %u rows of %u", when, n, g->now.n_rows);
    for (uint32_t i = 0; i < n; i++)
        CHECK(s[i].verdict == SL_V_OK && s[i].row == i && s[i].k == 0xffff, "%s (%u ranks): row %u is %s", when, g->N,
              i, sl_verdict_name((sl_verdict)s[i].verdict));
    for (uint32_t i = 0; i < n; i++) check_sum(g, i, s[i].detail, when);
    CHECK(n == 0 || b.rejected == 0, "%s: %u rejected", when, b.rejected);
}

static void check_case(rig *g, const fault_case *c, const sl_desc_sample *s, const sl_desc_batch *b) {
    uint32_t rejected = 0;
    bool first = true;
    for (uint32_t i = 0; i < ROWS; i++) {
        sl_verdict want = c->rows >> i & 1 ? c->verdict : SL_V_OK;
        CHECK(s[i].verdict == want, "%s (%u ranks): row %u is %s, expected %s", c->name, g->N, i,
              sl_verdict_name((sl_verdict)s[i].verdict), sl_verdict_name(want));
        rejected += want != SL_V_OK;
        if (want == SL_V_OK || !first) continue;
        first = false;
        CHECK(c->k == ANY || s[i].k == c->k, "%s (%u ranks): capture %u, expected %u", c->name, g->N, s[i].k, c->k);
        CHECK(c->token == ANY || s[i].token == c->token, "%s (%u ranks): token %u, expected %u", c->name, g->N,
              s[i].token, c->token);
        CHECK(!c->detail || s[i].detail == c->detail, "%s (%u ranks): detail %llx, expected %llx", c->name, g->N,
              (unsigned long long)s[i].detail, (unsigned long long)c->detail);
    }
    CHECK(b->rejected == rejected, "%s: %u rejected, expected %u", c->name, b->rejected, rejected);
    if (c->h.states == diverging)
        CHECK(s[5].detail == (g->N > 2 ? g->N - 1 : 0xffff), "odd rank %llu", (unsigned long long)s[5].detail);
    if (c->h.states == a_nan) CHECK(s[1].detail == 1, "%llu elements", (unsigned long long)s[1].detail);
}

static void run_case(const fault_case *c, uint32_t ranks) {
    rig g;
    rig_open(&g, ranks);
    sl_gather *ga;
    if (sl_gather_open(&ga, &g.st, &g.e)) rig_fail("gather", &g.e);
    rig_feed(&g, ROWS, T, NULL);
    rig_ranks(&g, NULL);
    expect_good(&g, ga, "batch before");
    rig_feed(&g, ROWS, T, NULL);
    rig_ranks(&g, &c->h);
    turn_until_idle(&g, ga);
    rig_batch faulty = g.now;
    faulty.states = NULL;
    sl_desc_sample s[RIG_MAX_ROWS];
    sl_desc_batch b = {0};
    if (c->h.desc == no_end) { /* noticed when the rank goes on */
        CHECK(rig_take(&g, s, &b) == 0, "ended without END");
        rig_feed(&g, ROWS, T, NULL);
        rig_ranks(&g, NULL);
        turn_until_idle(&g, ga);
    }
    uint32_t n = rig_take(&g, s, &b);
    CHECK(n == ROWS && b.bpos == faulty.bpos, "%s (%u ranks): %u rows, batch at %llu", c->name, ranks, n,
          (unsigned long long)b.bpos);
    if (n == ROWS) check_case(&g, c, s, &b);
    if (c->h.desc != no_end) {
        rig_feed(&g, ROWS, T, NULL);
        rig_ranks(&g, NULL);
    }
    expect_good(&g, ga, c->name);
    sl_gather_close(ga);
    rig_close(&g);
}

/* ---- what is legitimate ---- */
static void legitimate(uint32_t ranks) {
    rig g;
    rig_open(&g, ranks);
    g.boot.n_captures = g.K = 4;
    g.boot.captures[3] = (sl_capture){8, 1}; /* with the final-normed twin */
    sl_gather *ga;
    if (sl_gather_open(&ga, &g.st, &g.e)) rig_fail("gather", &g.e);
    const uint32_t len[] = {12, 1, 1, 1, 6, 6, 8, 8};
    int32_t ids[43];
    uint32_t t = 0;
    for (int i = 0; i < 12; i++) ids[t++] = 5; /* one repeated token */
    ids[t++] = 5;                              /* one token: the same state */
    ids[t++] = 9;
    ids[t++] = 9;
    for (int r = 0; r < 2; r++)
        for (int i = 0; i < 6; i++) ids[t++] = 40 + i; /* equal rows */
    for (int r = 0; r < 2; r++)
        for (int i = 0; i < 8; i++) ids[t++] = i < 6 ? 60 + i : 70 + i + r * 9; /* a shared prefix */
    for (int again = 0; again < 3; again++) {
        rig_feed(&g, 8, len, ids);
        rig_ranks(&g, NULL);
        expect_good(&g, ga, "legitimate repetitions");
    }
    uint32_t ones[RIG_MAX_ROWS];
    for (int i = 0; i < RIG_MAX_ROWS; i++) ones[i] = 1;
    rig_feed(&g, RIG_MAX_ROWS, ones, NULL);
    rig_ranks(&g, NULL);
    expect_good(&g, ga, "one-token rows");
    sl_gather_close(ga);
    rig_close(&g);
}

/* What looks like a fault and is none: one embedding of zeros (of a token that pads), ids with the embeddings of
 * others, a state three times, and an NLL, which goes on as it came unless it counts more tokens than the row can
 * have. */
static void a_pad_and_a_pause(rig *g, uint32_t r, uint16_t *s) {
    (void)r;
    memset(state_at(g, s, 0, 33), 0, g->H * 2);
    memcpy(state_at(g, s, 0, 36), g->before.states + 36ul * g->H, 12ul * g->H * 2);
    for (unsigned t = 13; t < 15; t++) copy_state(g, s, 2, t, 2, 12);
}
static rig_act with_nll(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)r, (void)p;
    if (d->h.kind != SL_DESC_ROW) return ACT_KEEP;
    ROW(d)->nll = 1.5 + ROW(d)->row;
    ROW(d)->nll_tokens = ROW(d)->row == 1 ? 20 : ROW(d)->row == 4 ? 11 : 0;
    return ACT_KEEP;
}
static void nearly_faults(uint32_t ranks) {
    rig g;
    rig_open(&g, ranks);
    sl_gather *ga;
    if (sl_gather_open(&ga, &g.st, &g.e)) rig_fail("gather", &g.e);
    rig_hooks h = {.states = a_pad_and_a_pause, .desc = with_nll};
    rig_feed(&g, ROWS, T, NULL);
    rig_ranks(&g, NULL);
    expect_good(&g, ga, "before what nearly is a fault");
    rig_feed(&g, ROWS, T, NULL);
    rig_ranks(&g, &h);
    turn_until_idle(&g, ga);
    sl_desc_sample s[RIG_MAX_ROWS];
    sl_desc_batch b = {0};
    CHECK(rig_take(&g, s, &b) == ROWS && !b.rejected, "%u of %u rows rejected", b.rejected, b.n_rows);
    for (uint32_t i = 0; i < ROWS; i++)
        CHECK(i == 4 ? s[i].nll == 5.5 && s[i].nll_tokens == 11 : isnan(s[i].nll) && !s[i].nll_tokens,
              "row %u: NLL %g of %u tokens", i, s[i].nll, s[i].nll_tokens);
    sl_gather_close(ga);
    rig_close(&g);
}

/* What a rejected row showed is not remembered: here the states that another row will have with its own ids. */
static const rig_batch *to_come;
static void states_to_come(rig *g, uint32_t r, uint16_t *s) {
    (void)r;
    memcpy(s, to_come->states, (size_t)g->K * g->now.n_tokens * g->H * 2);
}
static rig_act all_other_tokens(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)g, (void)r, (void)p;
    if (d->h.kind == SL_DESC_ROW) ROW(d)->token_sum ^= 1;
    return ACT_KEEP;
}
static void rejected_rows_are_forgotten(void) {
    rig g;
    rig_open(&g, 1);
    sl_gather *ga;
    if (sl_gather_open(&ga, &g.st, &g.e)) rig_fail("gather", &g.e);
    const uint32_t len[] = {9, 9};
    int32_t first[18], then[18];
    for (int i = 0; i < 18; i++) first[i] = 100 + i, then[i] = 200 + i;
    rig_batch b = {.n_rows = 2, .n_tokens = 18, .T = {9, 9}};
    memcpy(b.ids, then, sizeof then);
    rig_states(&g, &b);
    to_come = &b;
    rig_hooks h = {.states = states_to_come, .desc = all_other_tokens};
    rig_feed(&g, 2, len, first);
    rig_ranks(&g, &h);
    turn_until_idle(&g, ga);
    sl_desc_sample s[RIG_MAX_ROWS];
    sl_desc_batch d = {0};
    CHECK(rig_take(&g, s, &d) == 2 && d.rejected == 2 && s[0].verdict == SL_V_TOKENS, "%u of %u rows rejected",
          d.rejected, d.n_rows);
    rig_feed(&g, 2, len, then);
    rig_ranks(&g, NULL);
    expect_good(&g, ga, "after a rejected row with these states");
    free(b.states);
    sl_gather_close(ga);
    rig_close(&g);
}

/* A payload slot that is too small for its chunk is never read. */
static void slot_too_small(void) {
    rig g;
    rig_open(&g, 1);
    sl_check_shape shape;
    sl_check *c;
    sl_batch_view v;
    sl_check_shape_of(&shape, &g.boot);
    rig_feed(&g, ROWS, T, NULL);
    if (sl_check_open(&c, &shape, &g.e) || sl_batch_open(&v, g.w_batch, 0, &g.e) || sl_check_begin(c, &v, 0, &g.e))
        rig_fail("checker", &g.e);
    uint64_t bytes = 16ull * g.H * 2;
    uint8_t *small = malloc(bytes - 1); /* the address sanitizer sees a byte too far */
    memset(small, 0x3c, bytes - 1);
    sl_desc_chunk d = {.h = {.kind = SL_DESC_CHUNK, .epoch = 1, .flags = SL_CHUNK_PAYLOAD},
                       .k = 1,
                       .rows = 16,
                       .width = g.H,
                       .hidx = rig_label(&g, 1)};
    sl_check_desc(c, 0, 0, (const sl_desc *)(const void *)&d, small, bytes - 1);
    const sl_row_verdict *r = sl_check_finish(c);
    CHECK(r[0].verdict == SL_V_SHAPE && r[0].k == 1 && r[0].detail == bytes && r[0].want == bytes - 1,
          "row 0 is %s, %llu, %llu", sl_verdict_name(r[0].verdict), (unsigned long long)r[0].detail,
          (unsigned long long)r[0].want);
    free(small);
    sl_check_close(c);
    rig_close(&g);
}

/* What the log says of a row. */
static void words(void) {
    const sl_check_shape shape = {.n_captures = 3, .label = {0, 15, 30}};
    enum { NONE = 0xffff };
    const uint32_t NO_TOKEN = 0xffffffff;
    const struct {
        sl_row_verdict v;
        const char *want;
    } c[] = {
        {{SL_V_NONFINITE, 1, NONE, 17, 3, 0}, "NONFINITE at capture 1 (H index 15), token 17: 3 NaN or Inf elements"},
        {{SL_V_COUNT, NONE, 2, NO_TOKEN, 5, 12}, "COUNT: found 5, expected 12 (rank 2)"},
        {{SL_V_ORDER, 2, 1, 0, 15, 30}, "ORDER at capture 2 (H index 30), token 0: found 15, expected 30 (rank 1)"},
        {{SL_V_ORDER, NONE, NONE, NO_TOKEN, SL_DETAIL_PREVIOUS | 1ull << 32 | 4, 2ull << 32 | 3},
         "ORDER: found capture 1 chunk 4 of the batch before, expected capture 2 chunk 3"},
        {{SL_V_ORDER, NONE, NONE, NO_TOKEN, 1ull << 32 | 4, 7},
         "ORDER: found capture 1 chunk 4, expected capture 0 chunk 7"},
        {{SL_V_CHECKSUM, NONE, NONE, NO_TOKEN, 0xab, 0x1000},
         "CHECKSUM: found checksum 00000000000000ab, expected 0000000000001000"},
        {{SL_V_MISSING_SHARD, NONE, 2, NO_TOKEN, 2, 0},
         "MISSING_SHARD: rank 2 did not deliver the payload of its chunk (rank 2)"},
        {{SL_V_RANKS_DISAGREE, NONE, NONE, NO_TOKEN, 0xffff, 0},
         "RANKS_DISAGREE: fingerprints differ between ranks, no majority"},
        {{SL_V_RANKS_DISAGREE, NONE, 1, NO_TOKEN, 1, 0}, "RANKS_DISAGREE: rank 1 contradicts the others (rank 1)"},
        {{SL_V_CONSTANT, 1, NONE, 0, (uint64_t)SL_CONST_LAYERS << 32 | 2, 0},
         "CONSTANT at capture 1 (H index 15), token 0: the same states as capture 2 in every token"},
        {{SL_V_CONSTANT, 1, NONE, 0, (uint64_t)SL_CONST_ROWS << 32 | 6, 0},
         "CONSTANT at capture 1 (H index 15), token 0: the same states as the row accepted 6 rows ago, whose ids "
         "differ"},
        {{SL_V_CONSTANT, 1, NONE, 4, (uint64_t)SL_CONST_ZERO << 32 | 1, 0},
         "CONSTANT at capture 1 (H index 15), token 4: 1 states are all zeros"},
    };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        char got[320];
        sl_check_say(&shape, &c[i].v, got, sizeof got);
        CHECK(!strcmp(got, c[i].want), "said\n%s\nexpected\n%s", got, c[i].want);
    }
}

/* A descriptor of a dead epoch behind those of the living one. */
static rig_act two_epochs_back(rig *g, uint32_t r, sl_desc *d, uint16_t *p) {
    (void)p;
    if (r == g->N - 1 && is_chunk(d, 1, 1)) d->h.epoch = g->epoch - 2;
    return ACT_KEEP;
}
static void older_epoch(uint32_t ranks) {
    rig g;
    rig_open(&g, ranks);
    g.ctl[1].epoch = g.epoch = 5;
    sl_gather *ga;
    if (sl_gather_open(&ga, &g.st, &g.e)) rig_fail("gather", &g.e);
    rig_hooks h = {.desc = two_epochs_back};
    rig_feed(&g, ROWS, T, NULL);
    rig_ranks(&g, &h);
    turn_until_idle(&g, ga);
    sl_desc_sample s[RIG_MAX_ROWS];
    sl_desc_batch b = {0};
    CHECK(rig_take(&g, s, &b) == ROWS && b.rejected == ROWS, "%u of %u rows rejected", b.rejected, b.n_rows);
    for (uint32_t i = 0; i < ROWS; i++)
        CHECK(s[i].verdict == SL_V_EPOCH && s[i].detail == 3, "row %u is %s, detail %llu", i,
              sl_verdict_name((sl_verdict)s[i].verdict), (unsigned long long)s[i].detail);
    rig_feed(&g, ROWS, T, NULL);
    rig_ranks(&g, NULL);
    expect_good(&g, ga, "after an older epoch");
    sl_gather_close(ga);
    rig_close(&g);
}

/* Of an isolated batch the row that was named is rejected, and no other. */
static void poison_of_a_row(void) {
    rig g;
    rig_open(&g, 2);
    sl_gather *ga;
    if (sl_gather_open(&ga, &g.st, &g.e)) rig_fail("gather", &g.e);
    rig_feed(&g, ROWS, T, NULL);
    g.ctl[1].isolate_bpos = 1;
    g.ctl[1].poison_rows[0] = 1u << 3;
    rig_ranks(&g, NULL);
    turn_until_idle(&g, ga);
    sl_desc_sample s[RIG_MAX_ROWS];
    sl_desc_batch b = {0};
    CHECK(rig_take(&g, s, &b) == ROWS && b.rejected == 1, "%u of %u rows rejected", b.rejected, b.n_rows);
    for (uint32_t i = 0; i < ROWS; i++)
        CHECK(s[i].verdict == (i == 3 ? SL_V_POISON : SL_V_OK), "row %u is %s", i,
              sl_verdict_name((sl_verdict)s[i].verdict));
    rig_feed(&g, ROWS, T, NULL); /* the names were those of batch 0 */
    rig_ranks(&g, NULL);
    expect_good(&g, ga, "after a poison row");
    sl_gather_close(ga);
    rig_close(&g);
}

static void poison(void) {
    rig g;
    rig_open(&g, 2);
    sl_gather *ga;
    if (sl_gather_open(&ga, &g.st, &g.e)) rig_fail("gather", &g.e);
    const uint32_t one[] = {20};
    rig_feed(&g, 1, one, NULL);
    rig_rank(&g, 0, NULL); /* rank 1 died */
    turn_until_idle(&g, ga);
    g.ctl[1].epoch = 2;
    g.ctl[1].poison_bpos = 1;
    turn_until_idle(&g, ga);
    sl_desc_sample s[RIG_MAX_ROWS];
    sl_desc_batch b = {0};
    CHECK(rig_take(&g, s, &b) == 1 && s[0].verdict == SL_V_POISON && b.rejected == 1, "poison");
    g.epoch = 2;
    rig_feed(&g, ROWS, T, NULL);
    rig_ranks(&g, NULL);
    expect_good(&g, ga, "after poison");
    CHECK(sl_metric_get(g.st.metrics, 2, SL_M_REJECT_BASE + SL_V_POISON) == 1, "metric");
    sl_gather_close(ga);
    rig_close(&g);
}

/* ---- the pass over a token ---- */
static void scan_twins(void) {
    uint8_t buf[600];
    for (uint32_t es = 2; es <= 4; es += 2)
        for (uint32_t n = 1; n * es <= 500; n += n < 40 ? 1 : 13)
            for (int kind = 0; kind < 4; kind++) {
                uint32_t x = n * 7 + (uint32_t)kind;
                for (uint32_t i = 0; i < sizeof buf; i++)
                    buf[i] = kind ? (uint8_t)((x = x * 1664525 + 1013904223) >> 24) : 0;
                if (kind == 1)
                    for (uint32_t i = es - 1; i < sizeof buf; i += es) buf[i] = 0x3f;  /* all finite */
                if (kind == 3) memset(buf, 0, sizeof buf), buf[n * es - 1 + 2] = 0x80; /* all -0 or +0 */
                sl_scan want, got;
                uint8_t *p = buf + 2;
                sl_scan_token_scalar(p, n, es, &want);
                uint32_t nonfinite = 0, zero = 1;
                for (uint32_t i = 0; i < n; i++) {
                    uint32_t v = 0;
                    memcpy((uint8_t *)&v + 4 - es, p + i * es, es); /* bf16 is the upper half of an f32 */
                    float f;
                    memcpy(&f, &v, 4);
                    nonfinite += !isfinite(f);
                    zero &= f == 0;
                }
                CHECK(want.nonfinite == nonfinite && want.zero == zero, "scalar: n=%u es=%u kind=%d", n, es, kind);
                sl_scan_token(p, n, es, &got);
                CHECK(got.a == want.a && got.b == want.b && got.nonfinite == want.nonfinite && got.zero == want.zero,
                      "dispatched: n=%u es=%u kind=%d", n, es, kind);
#if defined(__x86_64__)
                if (!__builtin_cpu_supports("avx2")) continue;
                sl_scan_token_avx2(p, n, es, &got);
                CHECK(got.a == want.a && got.b == want.b && got.nonfinite == want.nonfinite && got.zero == want.zero,
                      "avx2: n=%u es=%u kind=%d", n, es, kind);
#endif
            }
}

/* An odd width puts tokens across 32-bit words; the chunk's sum must still be that of its bytes. */
static void odd_width(void) {
    rig g;
    rig_open(&g, 2);
    g.boot.width = g.H = 63;
    sl_gather *ga;
    if (sl_gather_open(&ga, &g.st, &g.e)) rig_fail("gather", &g.e);
    rig_feed(&g, ROWS, T, NULL);
    rig_ranks(&g, NULL);
    expect_good(&g, ga, "odd width");
    sl_gather_close(ga);
    rig_close(&g);
}

int main(void) {
    if (!getenv("SHOW")) { /* the warnings about rejected rows are what is wanted here, not worth reading */
        int null = open("/dev/null", O_WRONLY);
        dup2(null, STDERR_FILENO);
    }
    sl_log_init("test", SL_INFO);
    scan_twins();
    for (uint32_t ranks = 1; ranks <= 3; ranks++) {
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
            if (cases[i].min_ranks <= ranks) run_case(&cases[i], ranks);
        legitimate(ranks);
        nearly_faults(ranks);
        older_epoch(ranks);
    }
    odd_width();
    poison();
    poison_of_a_row();
    rejected_rows_are_forgotten();
    slot_too_small();
    words();
    printf("%zu faults, 1 to 3 ranks: %d failures\n", sizeof cases / sizeof *cases, failures);
    return failures != 0;
}
