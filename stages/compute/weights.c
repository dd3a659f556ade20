#include "stages/compute/weights.h"
#include "stages/compute/loader.h"
#include "stages/compute/random.h"
#include "stages/compute/resident.h"
#include "stages/compute/staging.h"
#include "stages/compute/want.h"
#include "kernels/cpu/isa.h" /* the dequantizer, for the one matrix that has to be built from quantized parts */

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PLACE_ALIGN UINT64_C(256)

struct sl_model_store {
    sl_source src;       /* open while something points into its mappings */
    const uint8_t **map; /* per file, NULL until needed */
    void **block;        /* device allocations */
    int n_blocks, cap_blocks;
    char note[256];
};

typedef struct load {
    sl_model *m;
    const sl_load_opts *o;
    sl_ops *ops;
    sl_err *err;
    sl_want want;
    sl_loader *reader;
    sl_loader_progress progress;
    int host; /* device memory is host memory: files can be used in place */
    int32_t
        *order; /* the layer's experts as they lie in the file: order[place] = expert of the slice; NULL: ascending */
} load;

/* ---- memory ---- */

static int no_memory(sl_err *err, const char *what) {
    sl_err_set(err, SL_ETEMP, "out of memory: %s", what);
    return SL_ETEMP;
}

static void *new_block(load *l, uint64_t bytes, const char *what) {
    struct sl_model_store *st = l->m->store;
    void *p = NULL;
    if (st->n_blocks == st->cap_blocks) {
        int cap = st->cap_blocks ? st->cap_blocks * 2 : 64;
        void **b = realloc(st->block, (size_t)cap * sizeof *b);
        if (!b) {
            sl_err_set(l->err, SL_ETEMP, "out of memory");
            return NULL;
        }
        st->block = b;
        st->cap_blocks = cap;
    }
    if (l->ops->alloc(l->ops->ctx, &p, bytes, what, l->err)) return NULL;
    st->block[st->n_blocks++] = p;
    if (l->host && bytes >= (4u << 20)) { /* fewer page faults now, fewer TLB misses in every batch */
        const uintptr_t huge = 0x1fffff;
        uint64_t skip = -(uintptr_t)p & huge, n = bytes > skip ? (bytes - skip) & ~(uint64_t)huge : 0;
        if (n) (void)madvise((uint8_t *)p + skip, n, MADV_HUGEPAGE);
    }
    return p;
}

/* The file's bytes, mapped (a GGUF already is). */
static const uint8_t *map_file(load *l, uint32_t file) {
    struct sl_model_store *st = l->m->store;
    if (st->map[file]) return st->map[file];
    if (st->src.gguf) {
        const sl_gguf_tensor *t = NULL;
        for (uint64_t i = 0; i < sl_gguf_n_tensors(st->src.gguf) && (!t || t->file != file); i++)
            t = sl_gguf_tensor_at(st->src.gguf, i);
        if (t && t->file == file) st->map[file] = (const uint8_t *)sl_gguf_data(st->src.gguf, t) - t->offset;
        return st->map[file];
    }
    void *p = mmap(NULL, sl_source_file_bytes(&st->src, file), PROT_READ, MAP_SHARED, sl_source_fd(&st->src, file), 0);
    if (p == MAP_FAILED) {
        sl_err_sys(l->err, SL_ETEMP, errno, "%s: cannot map", sl_source_path(&st->src, file));
        return NULL;
    }
    return st->map[file] = p;
}

static void store_free(struct sl_model_store *st, sl_ops *ops) {
    if (!st) return;
    for (int i = 0; i < st->n_blocks; i++) ops->free(ops->ctx, st->block[i]);
    for (uint32_t f = 0; st->map && st->src.st && f < sl_source_n_files(&st->src); f++)
        if (st->map[f]) munmap((void *)st->map[f], sl_source_file_bytes(&st->src, f));
    free(st->map);
    free(st->block);
    sl_source_close(&st->src);
    free(st);
}

/* ---- where an item's parts are ---- */

static uint32_t elem_align(const sl_want_item *it, int part) {
    if (part == SL_PART_ZERO) return 4;
    if (part == SL_PART_SCALE)
        return it->fmt == SL_W_MXFP4 ? 1 : it->fmt == SL_W_FP8 || it->scale_dtype == SL_F32 ? 4 : 2;
    return it->fmt == SL_W_F32 || it->fmt == SL_W_INT4 ? 4 : it->fmt == SL_W_BF16 || it->fmt == SL_W_F16 ? 2 : 1;
}

/* The usual writer sorts tensors by name, so that expert 10 lies before expert 2. order[place] = expert, by offset in
 * the file of the item's data; 1 when that is not the ascending order. */
static int experts_by_place(const sl_want_item *it, int32_t *order) {
    const sl_want_src *src = it->part[SL_PART_DATA].src;
    int32_t n = (int32_t)(it->e1 - it->e0), moved = 0;
    for (int32_t e = 0; e < n; e++) {
        int32_t at = e;
        for (; at > 0 && src[order[at - 1]].off > src[e].off; at--) order[at] = order[at - 1];
        order[at] = e;
        moved |= at != e;
    }
    return moved;
}

static const sl_want_src *nth(const sl_want_part *q, const int32_t *order, int64_t place) {
    return &q->src[order ? order[place] : place];
}

/* Can the file's bytes be used as they lie there? Experts must be evenly spaced in one file, in the order given,
 * elements aligned. */
static int usable_in_place(const sl_want_item *it, const int32_t *order) {
    int64_t n = it->e1 - it->e0;
    if (it->how != SL_WANT_PLAIN) return 0;
    for (int p = 0; p < SL_PARTS; p++) {
        const sl_want_part *q = &it->part[p];
        if (!q->rows) continue;
        const sl_want_src *first = nth(q, order, 0);
        uint32_t a = elem_align(it, p);
        uint64_t stride = n > 1 ? nth(q, order, 1)->off - first->off : 0;
        if (first->off % a || q->pitch % a || stride % a || stride > (UINT64_C(1) << 50)) return 0;
        for (int64_t e = 1; e < n; e++)
            if (nth(q, order, e)->file != first->file || nth(q, order, e)->off - nth(q, order, e - 1)->off != stride)
                return 0;
        /* Zero points have no stride of their own: they must follow each other as the scales' columns say. */
        if (p == SL_PART_ZERO && n > 1 && stride != q->rows * q->pitch) return 0;
    }
    return 1;
}

static const int32_t *order_of(const load *l, const sl_want_item *it) {
    return it->role == SL_ROLE_EXPERT && it->e1 - it->e0 > 1 ? l->order : NULL;
}

/* Matrices of one expert share one place: the order is kept when every one of the layer's can be used in it. */
static int find_order(load *l, int i, int n) {
    sl_layer_weights *w = l->want.item[i].layer < 0 ? NULL : &l->m->layer[l->want.item[i].layer];
    l->order = NULL;
    if (!l->host || !w || !l->m->store->src.tensor) return 0;
    for (int j = i; j < n; j++) {
        const sl_want_item *it = &l->want.item[j];
        int64_t e_n = it->e1 - it->e0;
        if (!it->load || !it->mat || it->role != SL_ROLE_EXPERT || e_n < 2) continue;
        if (!l->order) {
            int32_t *mem = new_block(l, (uint64_t)e_n * 2 * sizeof *mem, "the order of experts");
            if (!mem) return l->err ? l->err->code : SL_ETEMP;
            if (!experts_by_place(it, mem)) return 0;
            for (int32_t p = 0; p < e_n; p++) mem[e_n + mem[p]] = p;
            l->order = mem;
            w->moe.place = mem + e_n;
        }
        if (!usable_in_place(it, l->order)) {
            l->order = NULL;
            w->moe.place = NULL;
            return 0;
        }
    }
    return 0;
}

/* Fill *mat; base[p] is where part p's first element is, tight: without the file's gaps, else `order` is that of
 * experts. */
static void set_mat(const sl_want_item *it, const uint8_t *const base[SL_PARTS], int tight, const int32_t *order) {
    sl_mat *m = it->mat;
    const sl_want_part *d = &it->part[SL_PART_DATA], *s = &it->part[SL_PART_SCALE];
    int64_t n = it->e1 - it->e0;
    *m = (sl_mat){.fmt = it->fmt,
                  .n = it->n1 - it->n0,
                  .k = it->k1 - it->k0,
                  .count = n,
                  .data = base[SL_PART_DATA],
                  .group = it->fmt == SL_W_INT4 ? it->group : 0};
    m->row_bytes = tight ? sl_wfmt_row_bytes(it->fmt, m->k) : d->pitch;
    m->stride = tight || n == 1 ? (uint64_t)m->n * m->row_bytes : nth(d, order, 1)->off - nth(d, order, 0)->off;
    if (it->how != SL_WANT_PLAIN || !s->rows) return;
    uint32_t es = elem_align(it, SL_PART_SCALE);
    m->scale = base[SL_PART_SCALE];
    m->scale_row = (tight ? s->piece : s->pitch) / es;
    m->scale_stride = tight || n == 1 ? s->rows * m->scale_row * es : nth(s, order, 1)->off - nth(s, order, 0)->off;
    m->scale_dtype = it->fmt == SL_W_INT4 ? it->scale_dtype : SL_F32;
    if (it->fmt == SL_W_FP8) {
        m->n_off = (int32_t)(it->n0 % 128);
        m->k_off = (int32_t)(it->k0 % 128);
    }
    if (it->part[SL_PART_ZERO].rows) m->zero = base[SL_PART_ZERO];
}

static sl_finite finite_kind(const sl_want_item *it, int part) {
    static const sl_finite of_block[SL_W_N] = {
        [SL_W_Q8_0] = SL_FINITE_Q8_0, [SL_W_Q4_0] = SL_FINITE_Q4_0, [SL_W_Q4_1] = SL_FINITE_Q4_1,
        [SL_W_Q5_0] = SL_FINITE_Q5_0, [SL_W_Q5_1] = SL_FINITE_Q5_1, [SL_W_Q4_K] = SL_FINITE_Q4_K,
        [SL_W_Q5_K] = SL_FINITE_Q5_K, [SL_W_Q6_K] = SL_FINITE_Q6_K, [SL_W_MXFP4_GGUF] = SL_FINITE_MXFP4_GGUF};
    if (part == SL_PART_DATA && it->how == SL_WANT_PLAIN && of_block[it->fmt]) return of_block[it->fmt];
    if (part != SL_PART_SCALE) return SL_FINITE_NONE;
    if (it->fmt == SL_W_MXFP4) return SL_FINITE_E8M0;
    if (it->fmt == SL_W_FP8 || it->scale_dtype == SL_F32) return SL_FINITE_F32;
    return it->scale_dtype == SL_F16 ? SL_FINITE_F16 : SL_FINITE_BF16;
}

/* ---- in place ---- */

/* make_resident has mapped, read and checked it. */
static void place_in_file(load *l, sl_want_item *it) {
    const uint8_t *base[SL_PARTS] = {0};
    const int32_t *order = order_of(l, it);
    for (int p = 0; p < SL_PARTS; p++) {
        const sl_want_part *q = &it->part[p];
        if (q->rows) base[p] = l->m->store->map[q->src[0].file] + nth(q, order, 0)->off;
    }
    set_mat(it, base, 0, order);
}

static uint64_t place_bytes(const load *l, const sl_want_item *it);

/* Everything of items [i, n) that will be used in place, read in the order of the files. */
static int make_resident(load *l, int i, int n) {
    uint64_t most = 0, have = 0;
    for (int j = i; j < n; j++) most += (uint64_t)(l->want.item[j].e1 - l->want.item[j].e0) * SL_PARTS;
    sl_extent *x = malloc(most * sizeof *x + 1);
    if (!x) return no_memory(l->err, "the list of pieces to read");
    for (int j = i; j < n; j++) {
        const sl_want_item *it = &l->want.item[j];
        if (!it->load || !it->mat || place_bytes(l, it)) continue;
        for (int p = 0; p < SL_PARTS; p++)
            for (int64_t e = 0; e < it->e1 - it->e0 && it->part[p].rows; e++) {
                const sl_want_part *q = &it->part[p];
                if (!map_file(l, q->src[e].file)) {
                    free(x);
                    return l->err ? l->err->code : SL_ETEMP;
                }
                x[have++] = (sl_extent){q->src[e].file, q->src[e].off, q->rows,
                                        q->pitch,       q->piece,      {finite_kind(it, p), it->name, it->e0 + e}};
            }
    }
    int rc = sl_resident_read(&l->m->store->src, l->m->store->map, x, have, &l->progress, l->err);
    free(x);
    return rc;
}

/* ---- copied ---- */

static int send(load *l, void *dst, const void *src, uint64_t n) {
    int rc = l->ops->upload(l->ops->ctx, dst, src, n, l->err);
    if (!rc) rc = l->ops->sync(l->ops->ctx, l->err); /* the host buffer is used again */
    if (!rc) sl_loader_advance(&l->progress, n);
    return rc;
}

static int copy_parts(load *l, sl_want_item *it, uint8_t *at) {
    const uint8_t *base[SL_PARTS] = {0};
    int64_t n = it->e1 - it->e0;
    int rc = 0;
    for (int p = 0; p < SL_PARTS && !rc; p++) {
        const sl_want_part *q = &it->part[p];
        if (!q->rows) continue;
        base[p] = at;
        for (int64_t e = 0; e < n && !rc; e++, at += q->rows * q->piece)
            rc = sl_loader_add(l->reader, q->src[e].file, q->src[e].off, q->rows, q->pitch, q->piece, at,
                               (sl_finite_check){finite_kind(it, p), it->name, it->e0 + e}, l->err);
        at += -(uintptr_t)at & (PLACE_ALIGN - 1);
    }
    set_mat(it, base, 1, NULL);
    return rc;
}

/* The file has k rows of n elements: turn each expert around on the way, a band of its rows at a time. */
static int copy_transposed(load *l, sl_want_item *it, uint8_t *dst) {
    const sl_want_part *q = &it->part[SL_PART_DATA];
    uint64_t es = sl_wfmt_row_bytes(it->fmt, 1), n = q->piece / es, k = q->rows, bytes = n * k * es;
    uint8_t *in = malloc(q->piece * 64), *out = malloc(bytes);
    const uint8_t *base[SL_PARTS] = {dst, NULL, NULL};
    int rc = in && out ? 0 : no_memory(l->err, it->name);
    for (int64_t e = 0; e < it->e1 - it->e0 && !rc; e++, dst += bytes) {
        for (uint64_t k0 = 0; k0 < k && !rc; k0 += 64) {
            uint64_t kb = k - k0 < 64 ? k - k0 : 64;
            for (uint64_t i = 0; i < kb && !rc; i++)
                rc = sl_source_read(&l->m->store->src, q->src[e].file, q->src[e].off + (k0 + i) * q->pitch,
                                    in + i * q->piece, q->piece, l->err);
            for (uint64_t j = 0; j < n && !rc; j++)
                for (uint64_t i = 0; i < kb; i++) memcpy(out + (j * k + k0 + i) * es, in + i * q->piece + j * es, es);
        }
        if (!rc) rc = send(l, dst, out, bytes);
    }
    free(in);
    free(out);
    set_mat(it, base, 1, NULL);
    return rc;
}

static void put_weight(uint8_t *row, sl_wfmt fmt, int64_t i, float v) {
    uint32_t u;
    memcpy(&u, &v, 4);
    if (fmt == SL_W_F32)
        memcpy(row + 4 * i, &v, 4);
    else {
        uint16_t h = (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
        memcpy(row + 2 * i, &h, 2);
    }
}

/* kv_b = for each head, nope rows from k_b [kv_lora, nope] turned around, then v rows from v_b [v, kv_lora]. */
static int build_kv_b(load *l, sl_want_item *it, uint8_t *dst) {
    const sl_spec *s = &l->m->spec;
    const sl_want_part *kp = &it->part[SL_PART_DATA], *vp = &it->part[SL_PART_SCALE];
    int64_t nope = s->nope_dim, v = s->v_dim, lora = s->kv_lora, heads = (it->n1 - it->n0) / (nope + v);
    uint64_t row = sl_wfmt_row_bytes(it->fmt, lora), kbytes = kp->rows * kp->piece, vbytes = vp->rows * vp->piece;
    uint8_t *kb = malloc(kbytes), *vb = malloc(vbytes), *out = malloc((uint64_t)(it->n1 - it->n0) * row);
    float *line = malloc((size_t)(nope > lora ? nope : lora) * sizeof *line);
    int rc = kb && vb && out && line ? 0 : no_memory(l->err, it->name);
    if (!rc) rc = sl_source_read(&l->m->store->src, kp->src[0].file, kp->src[0].off, kb, kbytes, l->err);
    if (!rc) rc = sl_source_read(&l->m->store->src, vp->src[0].file, vp->src[0].off, vb, vbytes, l->err);
    sl_mat km = {
        .fmt = (sl_wfmt)it->group, .n = (int64_t)kp->rows, .k = nope, .count = 1, .data = kb, .row_bytes = kp->piece};
    sl_mat vm = {.fmt = (sl_wfmt)it->scale_dtype,
                 .n = (int64_t)vp->rows,
                 .k = lora,
                 .count = 1,
                 .data = vb,
                 .row_bytes = vp->piece};
    for (int64_t h = 0; h < heads && !rc; h++) {
        uint8_t *head = out + (uint64_t)(h * (nope + v)) * row;
        for (int64_t j = 0; j < lora; j++) {
            sl_isa_base.dequant(line, &km, 0, h * lora + j, 0, nope);
            for (int64_t i = 0; i < nope; i++) put_weight(head + (uint64_t)i * row, it->fmt, j, line[i]);
        }
        for (int64_t i = 0; i < v; i++) {
            sl_isa_base.dequant(line, &vm, 0, h * v + i, 0, lora);
            for (int64_t j = 0; j < lora; j++) put_weight(head + (uint64_t)(nope + i) * row, it->fmt, j, line[j]);
        }
    }
    if (!rc) rc = send(l, dst, out, it->bytes);
    const uint8_t *base[SL_PARTS] = {dst, NULL, NULL};
    set_mat(it, base, 1, NULL);
    free(kb);
    free(vb);
    free(out);
    free(line);
    return rc;
}

static int fill_random(load *l, sl_want_item *it, uint8_t *at) {
    const uint8_t *base[SL_PARTS] = {0};
    int rc = 0;
    for (int p = 0; p < SL_PARTS && !rc; p++) {
        const sl_want_part *q = &it->part[p];
        if (!q->rows) continue;
        uint64_t key = sl_random_key(l->o->seed, it->name, p), batch = (UINT64_C(1) << 20) / q->piece + 1;
        int64_t row0 = p == SL_PART_SCALE && it->fmt == SL_W_FP8 ? it->n0 / 128 : it->n0;
        sl_fill f;
        if (l->ops->fill && sl_random_fill(&f, it, key, p)) { /* made where it is used */
            uint64_t bytes = (uint64_t)(it->e1 - it->e0) * q->rows * q->piece;
            if ((rc = l->ops->fill(l->ops->ctx, at, &f, l->err))) return rc;
            base[p] = at;
            at += bytes;
            at += -(uintptr_t)at & (PLACE_ALIGN - 1);
            sl_loader_advance(&l->progress, bytes);
            continue;
        }
        uint8_t *buf = l->host ? NULL : malloc(batch * q->piece);
        if (!l->host && !buf) return sl_err_set(l->err, SL_ETEMP, "out of memory for random weights");
        base[p] = at;
        for (int64_t e = it->e0; e < it->e1 && !rc; e++)
            for (uint64_t r = 0; r < q->rows && !rc; r += batch) {
                uint64_t n = q->rows - r < batch ? q->rows - r : batch;
                uint8_t *to = l->host ? at : buf;
                for (uint64_t i = 0; i < n; i++)
                    sl_random_row(it, key, p, e, row0 + (int64_t)(r + i), to + i * q->piece);
                if (l->host)
                    sl_loader_advance(&l->progress, n * q->piece);
                else
                    rc = send(l, at, buf, n * q->piece);
                at += n * q->piece;
            }
        free(buf);
        at += -(uintptr_t)at & (PLACE_ALIGN - 1);
    }
    set_mat(it, base, 1, NULL);
    return rc;
}

static int place_mat(load *l, sl_want_item *it, uint8_t *at) {
    if (!at) {
        place_in_file(l, it);
        return 0;
    }
    if (!l->m->store->src.tensor) return fill_random(l, it, at);
    if (it->how == SL_WANT_TRANSPOSE) return copy_transposed(l, it, at);
    if (it->how == SL_WANT_KV_SPLIT) return build_kv_b(l, it, at);
    return copy_parts(l, it, at);
}

/* Bytes of device memory for an item; 0 when it is used in the file. */
static uint64_t place_bytes(const load *l, const sl_want_item *it) {
    if (!it->load || !it->mat) return 0;
    if (l->host && l->m->store->src.tensor && usable_in_place(it, order_of(l, it))) return 0;
    return (it->bytes + (SL_PARTS + 1) * PLACE_ALIGN - 1) / PLACE_ALIGN * PLACE_ALIGN;
}

/* Items [i, n) of one layer share one block. */
static int place_layer(load *l, int i, int n) {
    uint64_t total = 0;
    char what[64];
    int rc = find_order(l, i, n);
    if (rc) return rc;
    for (int j = i; j < n; j++) total += place_bytes(l, &l->want.item[j]);
    snprintf(what, sizeof what, l->want.item[i].layer < 0 ? "the embedding or head" : "the weights of layer %d",
             l->want.item[i].layer);
    uint8_t *at = total ? new_block(l, total, what) : NULL;
    if (total && !at) return l->err ? l->err->code : SL_ETEMP;
    if (l->host && l->m->store->src.tensor && (rc = make_resident(l, i, n))) return rc;
    for (; i < n; i++) {
        sl_want_item *it = &l->want.item[i];
        uint64_t bytes = place_bytes(l, it);
        if (!it->load || !it->mat) continue;
        rc = place_mat(l, it, bytes ? at : NULL);
        if (rc) return rc;
        if (bytes) at += bytes;
    }
    return 0;
}

/* ---- vectors: f32 on the device, in one block ---- */

static float to_f32(const uint8_t *p, int st, uint64_t i) {
    uint32_t u = 0;
    float f;
    if (st == SL_ST_F32)
        memcpy(&u, p + 4 * i, 4);
    else {
        uint16_t h;
        memcpy(&h, p + 2 * i, 2);
        u = (uint32_t)h << 16;
        if (st == SL_ST_F16) {
            uint32_t e = h >> 10 & 31, m = h & 1023, sign = (uint32_t)(h & 0x8000) << 16;
            if (e == 0) { /* zero and subnormals: m * 2^-24, exact */
                f = (float)m * 0x1p-24f;
                return sign ? -f : f;
            }
            u = sign | (e == 31 ? 0x7f800000u : (e + 112) << 23) | m << 13;
        }
    }
    memcpy(&f, &u, 4);
    return f;
}

static int read_vec(load *l, const sl_want_item *it, float *out) {
    int64_t n = it->n1 - it->n0, slots = it->e1 - it->e0;
    if (!l->m->store->src.tensor) {
        uint64_t key = sl_random_key(l->o->seed, it->name, 0);
        float neutral = l->m->spec.norm == SL_NORM_GEMMA ? 0 : 1;
        for (int64_t e = 0; e < slots; e++)
            for (int64_t i = 0; i < n; i++)
                out[e * n + i] = sl_random_vec(it, key, (uint64_t)((it->e0 + e) * it->n + it->n0 + i), neutral);
        return 0;
    }
    const sl_want_part *q = &it->part[SL_PART_DATA];
    uint8_t *buf = malloc(q->piece);
    int rc = buf ? 0 : no_memory(l->err, it->name);
    for (int64_t e = 0; e < slots && !rc; e++) {
        rc = sl_source_read(&l->m->store->src, q->src[e].file, q->src[e].off, buf, q->piece, l->err);
        for (int64_t i = 0; i < n && !rc; i++) out[e * n + i] = to_f32(buf, it->st, (uint64_t)i);
        if (!rc)
            rc = sl_check_finite(out + e * n, 1, (uint64_t)n * 4, (uint64_t)n * 4, 0,
                                 (sl_finite_check){SL_FINITE_F32, it->name, it->e0 + e}, l->err);
    }
    free(buf);
    return rc;
}

static int place_vectors(load *l) {
    uint64_t total = 0, at = 0;
    for (int i = 0; i < l->want.n; i++)
        if (l->want.item[i].vec && l->want.item[i].load)
            total += (l->want.item[i].bytes + PLACE_ALIGN - 1) / PLACE_ALIGN * PLACE_ALIGN;
    if (!total) return 0;
    uint8_t *host = calloc(1, total), *dev = new_block(l, total, "norms and biases");
    int rc = host && dev ? 0 : dev ? no_memory(l->err, "norms and biases") : (l->err ? l->err->code : SL_ETEMP);
    for (int i = 0; i < l->want.n && !rc; i++) {
        sl_want_item *it = &l->want.item[i];
        if (!it->vec || !it->load) continue;
        rc = read_vec(l, it, (float *)(void *)(host + at));
        *it->vec = (sl_vec){(const float *)(const void *)(dev + at), (int64_t)(it->bytes / 4)};
        at += (it->bytes + PLACE_ALIGN - 1) / PLACE_ALIGN * PLACE_ALIGN;
        sl_loader_advance(&l->progress, it->bytes);
    }
    if (!rc) rc = l->ops->upload(l->ops->ctx, dev, host, total, l->err);
    if (!rc) rc = l->ops->sync(l->ops->ctx, l->err);
    free(host);
    return rc;
}

/* ---- the whole ---- */

static int place_all(load *l) {
    struct sl_model_store *st = l->m->store;
    int rc = place_vectors(l);
    if (!rc && st->src.tensor) rc = sl_loader_open(&l->reader, &st->src, l->ops, &l->progress, l->err);
    for (int i = 0, n; i < l->want.n && !rc; i = n) {
        for (n = i; n < l->want.n && l->want.item[n].layer == l->want.item[i].layer;) n++;
        rc = place_layer(l, i, n);
    }
    if (l->reader) {
        int rc2 = rc ? 0 : sl_loader_finish(l->reader, l->err);
        rc = rc ? rc : rc2;
        snprintf(st->note, sizeof st->note, "%s", sl_loader_note(l->reader));
        sl_loader_close(l->reader);
    }
    return rc;
}

static int new_model(sl_model **out, const sl_load_opts *o, sl_err *err) {
    sl_model *m = calloc(1, sizeof *m);
    if (!m) return no_memory(err, "the model");
    *out = m;
    m->rank = o->rank;
    m->tp = o->tp;
    int rc = sl_spec_load(&m->spec, o->model, o->eps_lora, err);
    if (rc) return rc;
    if (o->top_layer < 0 || o->top_layer > m->spec.n_layers)
        return sl_err_set(err, SL_EUSAGE, "layers up to %d are wanted, the model has %d", o->top_layer,
                          m->spec.n_layers);
    m->top_layer = o->top_layer;
    m->layer = calloc((size_t)m->spec.n_layers, sizeof *m->layer);
    m->store = calloc(1, sizeof *m->store);
    if (!m->layer || !m->store) return no_memory(err, "the model");
    return 0;
}

int sl_model_load(sl_model **out, const sl_load_opts *o, sl_ops *ops, sl_err *err) {
    sl_err local = {0};
    if (!err) err = &local;
    sl_model *m = NULL;
    *out = NULL;
    int rc = new_model(&m, o, err);
    load l = {.m = m,
              .o = o,
              .ops = ops,
              .err = err,
              .host = !strcmp(ops->name, "cpu"),
              .progress = {o->progress, o->progress_arg, 0, 0}};
    if (!rc && !o->random) {
        rc = sl_source_open(&m->store->src, o->model, err);
        if (!rc && !(m->store->map = calloc(sl_source_n_files(&m->store->src) + 1, sizeof *m->store->map)))
            rc = no_memory(err, "the list of files");
    }
    if (!rc) rc = sl_want_make(&l.want, m, o, o->random ? NULL : &m->store->src, err);
    if (!rc) {
        l.progress.total = l.want.bytes;
        sl_loader_advance(&l.progress, 0);
        rc = place_all(&l);
        sl_want_free(&l.want);
    }
    if (!rc && o->want_head && m->spec.tied) m->lm_head = m->embed;
    if (rc)
        sl_model_free(m, ops);
    else
        *out = m;
    return rc;
}

void sl_model_free(sl_model *m, sl_ops *ops) {
    if (!m) return;
    store_free(m->store, ops);
    sl_spec_free(&m->spec);
    free(m->layer);
    free(m);
}

const char *sl_model_note(const sl_model *m) {
    return m->store->note;
}

/* ---- the plan ---- */

static void count_prepared(sl_model_plan *p, const sl_want *w) {
    uint64_t layer = 0;
    for (int i = 0; i < w->n; i++) {
        const sl_want_item *it = &w->item[i];
        if (i == 0 || it->layer != w->item[i - 1].layer) layer = 0;
        if (!it->load || !it->mat || it->layer < 0 || it->fmt == SL_W_BF16) continue;
        layer += (uint64_t)((it->e1 - it->e0) * (it->n1 - it->n0) * (it->k1 - it->k0)) * 2;
        if (layer > p->prepared_bytes) p->prepared_bytes = layer;
    }
}

int sl_model_plan_make(sl_model_plan *p, const sl_spec *s, const sl_load_opts *o, sl_err *err) {
    *p = (sl_model_plan){0};
    sl_model *m = calloc(1, sizeof *m);
    if (!m) return sl_err_set(err, SL_ETEMP, "out of memory");
    sl_source src = {0};
    sl_want w = {0};
    m->spec = *s;
    m->rank = o->rank;
    m->tp = o->tp;
    m->top_layer = o->top_layer;
    m->layer = calloc((size_t)s->n_layers, sizeof *m->layer);
    int rc = m->layer ? 0 : no_memory(err, "the plan");
    if (!rc && !o->random) rc = sl_source_open(&src, o->model, err);
    if (!rc) rc = sl_want_make(&w, m, o, o->random ? NULL : &src, err);
    if (!rc) {
        p->params = w.params;
        p->weight_bytes = w.bytes;
        p->pinned_bytes = o->random ? 0 : SL_STAGING_BYTES;
        count_prepared(p, &w);
        for (uint32_t f = 0; f < sl_source_n_files(&src); f++) p->file_bytes += sl_source_file_bytes(&src, f);
        for (int i = 0; i < w.n; i++)
            if (w.item[i].load) p->fmt_bytes[w.item[i].vec ? SL_W_F32 : w.item[i].fmt] += w.item[i].bytes;
        sl_want_free(&w);
    }
    sl_source_close(&src);
    free(m->layer);
    free(m);
    return rc;
}
