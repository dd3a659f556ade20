#include "tests/store_rig.h"
#include "tests/row_sum.h"
#include "stages/writer/reader.h"
#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#define MUST(x)                                                                                                        \
    do {                                                                                                               \
        if (!(x)) {                                                                                                    \
            fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #x);                                      \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

const char *rig_name(uint32_t dataset) {
    return dataset ? "b\xc3\xa9ta/two" : "alpha";
}

void rig_make(rig *r, const char *store, uint64_t n, uint32_t max_T, uint32_t width, uint32_t elem, unsigned seed) {
    memset(r, 0, sizeof *r);
    snprintf(r->store, sizeof r->store, "%s", store);
    r->n = n;
    r->rows = calloc(n, sizeof *r->rows);
    MUST(r->rows);
    for (uint64_t i = 0; i < n; i++) {
        uint64_t x = mix(i * 977 + seed);
        rig_row *w = &r->rows[i];
        *w = (rig_row){
            .row = i / 2, .dataset = i % 2, .T = 1 + (uint32_t)(x % max_T), .nll = i % 4 ? NAN : 2.0 + (double)i / 64};
        if (i >= 2 && i % 10 == 2) w->row = (i - 2) / 2, w->part = 1; /* a second part of the row before */
        snprintf(w->id, sizeof w->id, "id \"%llu\"", (unsigned long long)i);
        w->mask_sum = w->T - w->T / 2;
    }
    r->m = (sl_manifest){.set = {.n = 4,
                                 .width = width,
                                 .elem_size = elem,
                                 .n_layers = 5,
                                 .v = {{0, 0}, {2, 0}, {5, 0}, {5, 1}},
                                 .model = "f00d"},
                         .vocab = 1000,
                         .model_path = "/nowhere",
                         .tokenizer_hash = "aa",
                         .template_hash = "bb"};
}

void rig_free(rig *r) {
    free(r->rows);
}

void rig_ids(const rig *r, uint64_t seq, int32_t *ids, uint8_t *mask) {
    for (uint32_t t = 0; t < r->rows[seq].T; t++) {
        ids[t] = (int32_t)(mix(seq * 7919 + t) % 1000);
        mask[t] = t >= r->rows[seq].T / 2;
    }
}

void rig_fill(const rig *r, uint64_t seq, uint32_t k, uint32_t t0, uint32_t rows, void *dst) {
    uint32_t H = r->m.set.width, e = r->m.set.elem_size;
    for (uint32_t t = t0; t < t0 + rows; t++)
        for (uint32_t h = 0; h < H; h++) {
            /* state 0 repeats its tokens, as an embedding does */
            uint64_t x = mix(mix(seq << 20 ^ (uint64_t)k << 16 ^ (k ? t : t % 5)) ^ h);
            float f = ((float)(x & 0xffff) + (float)(x >> 16 & 0xffff) - 65536.f) / 32768.f *
                      ldexpf(1.f, (int)(mix(h) % 5) - 2);
            uint64_t at = (uint64_t)(t - t0) * H + h;
            uint32_t u;
            memcpy(&u, &f, 4);
            if (e == 2)
                ((uint16_t *)dst)[at] = (uint16_t)(u >> 16);
            else
                ((uint32_t *)dst)[at] = u;
        }
}

void rig_intake(const rig *r) {
    char path[600];
    sl_err err;
    sl_journal *j;
    snprintf(path, sizeof path, "%s/intake.log", r->store);
    if (access(path, F_OK) == 0) return;
    mkdir(r->store, 0755);
    MUST(!sl_journal_open(&j, path, SL_INTAKE_MAGIC, NULL, NULL, &err));
    snprintf(path, sizeof path, "%s/intake.dat", r->store);
    FILE *f = fopen(path, "w");
    MUST(f);
    sl_intake_rec h = {.kind = SL_IN_HEADER, .batch_tokens = 64, .max_batch_rows = 64, .version = 1};
    MUST(!sl_journal_append(j, &h, &err));
    for (uint32_t d = 0; d < 2; d++) {
        sl_intake_rec n = {
            .kind = SL_IN_DATASET, .dataset = d, .data_off = (uint64_t)ftell(f), .data_len = strlen(rig_name(d))};
        n.data_sum = XXH3_64bits(rig_name(d), n.data_len);
        fwrite(rig_name(d), 1, n.data_len, f);
        while (ftell(f) % 8) fputc(0, f);
        MUST(!sl_journal_append(j, &n, &err));
    }
    int32_t *ids = malloc(4 << 20);
    uint8_t *mask = malloc(1 << 20);
    for (uint64_t i = 0; i < r->n; i++) {
        const rig_row *w = &r->rows[i];
        uint32_t il = (uint32_t)strlen(w->id);
        sl_intake_rec n = {.kind = SL_IN_ROW,
                           .seq = i,
                           .key = sl_row_key(rig_name(w->dataset), w->row, w->part),
                           .row = w->row,
                           .dataset = w->dataset,
                           .part = w->part,
                           .T = w->T,
                           .mask_sum = w->mask_sum,
                           .data_off = (uint64_t)ftell(f),
                           .data_len = 5ull * w->T + il,
                           .id_len = il};
        rig_ids(r, i, ids, mask);
        memcpy(ids + w->T, mask, w->T);
        memcpy((char *)(ids + w->T) + w->T, w->id, il);
        n.data_sum = XXH3_64bits(ids, n.data_len);
        fwrite(ids, 1, n.data_len, f);
        while (ftell(f) % 8) fputc(0, f);
        MUST(!sl_journal_append(j, &n, &err));
    }
    fclose(f);
    free(ids);
    free(mask);
    MUST(!sl_journal_sync(j, &err));
    sl_journal_close(j);
}

typedef struct held { /* memory of the rows of groups not yet committed; freed at the end: tests are small */
    void *p;
    struct held *next;
} held;

static void *keep(held **h, size_t n) {
    held *x = malloc(sizeof *x);
    x->p = aligned_alloc(4096, (n + 4095) / 4096 * 4096); /* as chunks lie in a ring */
    x->next = *h;
    *h = x;
    return x->p;
}

uint64_t rig_row_sum(const rig *r, uint64_t seq) {
    uint32_t K = r->m.set.n, T = r->rows[seq].T, rb = r->m.set.width * r->m.set.elem_size;
    uint8_t *x = malloc((size_t)K * T * rb);
    const uint8_t *state[SL_MAX_CAPTURES];
    for (uint32_t k = 0; k < K; k++) {
        rig_fill(r, seq, k, 0, T, x + (size_t)k * T * rb);
        state[k] = x + (size_t)k * T * rb;
    }
    uint64_t sum = plain_row_sum(state, K, T, rb);
    free(x);
    return sum;
}

/* Row i, in memory that lives until the store is closed. */
static sl_row_in make_row(const rig *r, uint64_t i, uint32_t piece, held **h) {
    const rig_row *w = &r->rows[i];
    uint32_t K = r->m.set.n, rb = r->m.set.width * r->m.set.elem_size, per = (w->T - 1) / piece + 1, n = 0;
    sl_piece *pc = keep(h, sizeof *pc * K * per);
    uint32_t *first = keep(h, 4 * (K + 1));
    for (uint32_t k = 0; k < K; k++) {
        first[k] = n;
        for (uint32_t t = 0; t < w->T; t += piece) {
            uint32_t rows = w->T - t < piece ? w->T - t : piece;
            void *p = keep(h, (size_t)rows * rb);
            rig_fill(r, i, k, t, rows, p);
            pc[n++] = (sl_piece){p, t, rows};
        }
    }
    first[K] = n;
    int32_t *ids = keep(h, 4 * w->T);
    uint8_t *mask = keep(h, w->T);
    rig_ids(r, i, ids, mask);
    return (sl_row_in){.seq = i,
                       .row = w->row,
                       .dataset = w->dataset,
                       .part = w->part,
                       .T = w->T,
                       .mask_sum = w->mask_sum,
                       .epoch = 1,
                       .key = sl_row_key(rig_name(w->dataset), w->row, w->part),
                       .id = w->id,
                       .name = rig_name(w->dataset),
                       .id_len = (uint32_t)strlen(w->id),
                       .ids = ids,
                       .mask = mask,
                       .nll = w->nll,
                       .nll_tokens = w->T - 1,
                       .verdict = w->verdict,
                       .fault_k = w->verdict ? 1 : 0xffff,
                       .fault_token = w->verdict ? 0 : UINT32_MAX,
                       .summed = !w->verdict,
                       .sum = w->verdict ? 0 : rig_row_sum(r, i),
                       .pieces = pc,
                       .first = first};
}

int rig_sink_try(const rig *r, sl_sink_cfg *cfg, uint32_t piece, unsigned group, uint64_t changed, sl_err *err) {
    sl_sink *s;
    held *h = NULL;
    cfg->store = r->store;
    cfg->manifest = r->m;
    if (!cfg->shard_bytes) cfg->shard_bytes = 1ull << 30;
    if (!cfg->zstd_level) cfg->zstd_level = 1;
    rig_intake(r);
    int rc = sl_sink_open(&s, cfg, err);
    if (rc) return rc;
    for (uint64_t i = 0; i < r->n && !rc; i++) {
        sl_row_in in = make_row(r, i, piece, &h);
        if (i == changed) {
            const sl_piece *last = &in.pieces[in.first[r->m.set.n] - 1];
            ((uint8_t *)(uintptr_t)last->p)[(size_t)last->rows * r->m.set.width * r->m.set.elem_size - 1] ^= 1;
        }
        rc = sl_sink_row(s, &in, err);
        if (rc > 0) rc = 0; /* it is there already */
        if (!rc && i % group == group - 1) rc = sl_sink_close_group(s, err);
        if (!rc) rc = sl_sink_poll(s, false, err);
        if (rc) sl_err_wrap(err, "row %llu", (unsigned long long)i);
    }
    if (!rc) rc = sl_sink_finish(s, err);
    sl_sink_close(s);
    while (h) {
        held *n = h->next;
        free(h->p);
        free(h);
        h = n;
    }
    return rc;
}

void rig_sink(const rig *r, sl_sink_cfg *cfg, uint32_t piece, unsigned group) {
    sl_err err;
    if (!rig_sink_try(r, cfg, piece, group, UINT64_MAX, &err)) return;
    fprintf(stderr, "sink: %s\n", err.msg);
    exit(1);
}

uint64_t rig_check(const rig *r) {
    sl_reader *rd;
    sl_err err;
    if (sl_reader_open(&rd, r->store, &err)) {
        fprintf(stderr, "reader: %s\n", err.msg);
        exit(1);
    }
    uint32_t rb = r->m.set.width * r->m.set.elem_size;
    for (uint64_t i = 0; i < sl_reader_rows(rd); i++) {
        const sl_commit_rec *c = sl_reader_row(rd, i);
        MUST(c->seq < r->n);
        const rig_row *w = &r->rows[c->seq];
        MUST(c->row == w->row && c->dataset == w->dataset && c->T == w->T && sl_reader_part(rd, c) == w->part);
        MUST(isnan(w->nll) ? isnan(c->nll) : (float)w->nll == c->nll);
        uint8_t *a = malloc((size_t)w->T * rb), *b = malloc((size_t)w->T * rb), *m0 = malloc(w->T), *m1 = malloc(w->T);
        int32_t *i0 = malloc(4 * w->T), *i1 = malloc(4 * w->T);
        char id[257];
        for (uint32_t k = 0; k < r->m.set.n; k++) {
            if (sl_reader_state(rd, i, k, 0, w->T, a, &err)) {
                fprintf(stderr, "row %llu state %u: %s\n", (unsigned long long)c->seq, k, err.msg);
                exit(1);
            }
            rig_fill(r, c->seq, k, 0, w->T, b);
            MUST(!memcmp(a, b, (size_t)w->T * rb));
            uint32_t t = w->T / 3, n = w->T - t > 2 ? 2 : w->T - t; /* a few tokens in the middle */
            MUST(!sl_reader_state(rd, i, k, t, n, a, &err));
            MUST(!memcmp(a, b + (size_t)t * rb, (size_t)n * rb));
        }
        MUST(!sl_reader_meta(rd, i, i0, m0, id, &err));
        rig_ids(r, c->seq, i1, m1);
        MUST(!memcmp(i0, i1, 4 * w->T) && !memcmp(m0, m1, w->T) && !strcmp(id, w->id));
        free(a), free(b), free(m0), free(m1), free(i0), free(i1);
    }
    uint64_t n = sl_reader_rows(rd);
    sl_reader_close(rd);
    return n;
}

static int rm_one(const char *p, const struct stat *st, int flag, struct FTW *f) {
    (void)st, (void)flag, (void)f;
    return remove(p);
}

void rig_rmtree(const char *path) {
    nftw(path, rm_one, 16, FTW_DEPTH | FTW_PHYS);
}

static uint64_t tree_acc;
static size_t tree_cut;
static int sum_one(const char *p, const struct stat *st, int flag, struct FTW *f) {
    (void)f;
    if (flag != FTW_F) return 0;
    uint8_t *b = malloc((size_t)st->st_size + 1);
    int fd = open(p, O_RDONLY);
    MUST(b && fd >= 0 && read(fd, b, (size_t)st->st_size) == st->st_size);
    close(fd);
    tree_acc += mix(XXH3_64bits(b, (size_t)st->st_size) ^ mix(XXH3_64bits(p + tree_cut, strlen(p + tree_cut))));
    free(b);
    return 0;
}

uint64_t rig_tree_sum(const char *path) {
    tree_acc = 0;
    tree_cut = strlen(path);
    nftw(path, sum_one, 16, FTW_PHYS);
    return tree_acc;
}
