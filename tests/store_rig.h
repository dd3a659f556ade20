/* store_rig: rows with known content for the tests of the store: an intake log, and every element a function of
 * (seq, state, token, channel), so that what is read back can be checked without keeping it. */
#ifndef SL_TESTS_STORE_RIG_H
#define SL_TESTS_STORE_RIG_H
#include "stages/writer/sink.h"

typedef struct rig_row {
    uint64_t row;
    uint32_t dataset, part, T, mask_sum, verdict;
    double nll;
    char id[32];
} rig_row;

typedef struct rig {
    char store[512];
    sl_manifest m;
    rig_row *rows;
    uint64_t n;
} rig;

/* n rows of 1..max_T tokens in two data sets, some of them parts; states H indices 0, 2, n_layers and the final-normed
 * one. */
void rig_make(rig *r, const char *store, uint64_t n, uint32_t max_T, uint32_t width, uint32_t elem, unsigned seed);
void rig_free(rig *r);
const char *rig_name(uint32_t dataset);
void rig_intake(const rig *r); /* intake.log and intake.dat */
void rig_ids(const rig *r, uint64_t seq, int32_t *ids, uint8_t *mask);
void rig_fill(const rig *r, uint64_t seq, uint32_t k, uint32_t t0, uint32_t rows, void *dst);
/* The row sum of what rig_fill gives. */
uint64_t rig_row_sum(const rig *r, uint64_t seq);
/* Everything through a sink in this process: pieces of `piece` tokens, a group every `group` rows. */
void rig_sink(const rig *r, sl_sink_cfg *cfg, uint32_t piece, unsigned group);
/* The same, but a failure is the caller's to look at; the states of row `changed` (UINT64_MAX: none) are not those of
 * its sum: one bit of its last element differs. */
int rig_sink_try(const rig *r, sl_sink_cfg *cfg, uint32_t piece, unsigned group, uint64_t changed, sl_err *err);
/* Read every committed row back through the reader and compare; returns how many. */
uint64_t rig_check(const rig *r);
void rig_rmtree(const char *path);
/* XXH3 of names and bytes of all files below a folder; equal trees give equal values. */
uint64_t rig_tree_sum(const char *path);
#endif
