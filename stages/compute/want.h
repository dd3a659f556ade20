/* want: what a rank needs of a model, item by item, before anything is read. sl_want_make lists every matrix and vector
 * of the spec with its names, full shape and this rank's slice, finds each in the source, checks names, shapes, dtypes
 * and alignment, and reports everything that is missing, unexpected or wrong in ONE message. The loader and the random
 * filler then walk the list, which is in layer order. */
#ifndef SL_COMPUTE_WANT_H
#define SL_COMPUTE_WANT_H
#include "stages/compute/source.h"
#include "stages/compute/weights.h"

typedef enum {
    SL_WANT_PLAIN,
    SL_WANT_TRANSPOSE, /* the file has [E, k, n] (gpt-oss experts in bf16) */
    SL_WANT_KV_SPLIT   /* GGUF's attn_k_b (transposed per head) and attn_v_b make kv_b */
} sl_want_how;

/* One tensor's worth of a slice: `rows` pieces of `piece` bytes, `pitch` apart in the file; for expert e of the slice
 * it starts at src[e]. In memory rows follow each other without gaps, experts too. */
typedef struct sl_want_src {
    uint32_t file;
    uint64_t off;
} sl_want_src;
typedef struct sl_want_part {
    sl_want_src *src; /* [count] */
    uint64_t src_at;  /* its place in sl_want.src */
    uint64_t rows, pitch, piece;
} sl_want_part;
enum { SL_PART_DATA, SL_PART_SCALE, SL_PART_ZERO, SL_PARTS };

typedef enum {
    SL_ROLE_LINEAR,
    SL_ROLE_EXPERT,
    SL_ROLE_EMBED,
    SL_ROLE_ROUTER,
    SL_ROLE_NORM,
    SL_ROLE_BIAS,
    SL_ROLE_SINK
} sl_want_role;

typedef struct sl_want_item {
    char name[160]; /* of the tensor without ".weight"; with "%d" for the expert when each has its own */
    sl_want_role role;
    sl_want_how how;
    int layer;   /* -1: embedding, final norm, head */
    int load;    /* 0: only checked (a layer above the top, a head that nobody asked for) */
    sl_mat *mat; /* where it goes: exactly one of the two; NULL when only checked */
    sl_vec *vec;
    int64_t n, k, count;            /* the full shape: count matrices [n, k], or count vectors of n */
    int64_t n0, n1, k0, k1, e0, e1; /* this rank's slice */
    /* filled by the check */
    sl_wfmt fmt;
    int st; /* vectors: sl_st_dtype in the file */
    int32_t group;
    sl_dtype scale_dtype;
    sl_want_part part[SL_PARTS];
    uint64_t bytes; /* in memory, all parts */
} sl_want_item;

typedef struct sl_want {
    sl_want_item *item;
    int n, cap;
    int ep;           /* experts whole per rank */
    uint64_t bytes;   /* to be loaded by this rank */
    uint64_t params;  /* of the whole model */
    sl_want_src *src; /* storage of all part[].src */
    uint64_t n_src, cap_src;
} sl_want;

/* `m` (zeroed, spec/rank/tp/top_layer set) receives the layout; m->layer must hold n_layers entries. `src` NULL: random
 * weights, formats from the configuration or o->random_format. */
int sl_want_make(sl_want *w, sl_model *m, const sl_load_opts *o, sl_source *src, sl_err *err);
void sl_want_free(sl_want *w);
#endif
