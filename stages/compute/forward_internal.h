/* forward_internal: what forward.c (batches, memory, capture) and forward_layer.c (one layer's math) share. */
#ifndef SL_COMPUTE_FORWARD_INTERNAL_H
#define SL_COMPUTE_FORWARD_INTERNAL_H
#include "stages/compute/forward.h"

/* Tokens [t0, t0+T) of the batch that go through a layer together. They are whole rows, cu[0..S] relative to t0; or
 * halves of the batch cut inside a row, which go through attention together, with the cu of both in the first. */
typedef struct sl_micro {
    int64_t t0, T;
    int32_t S;
    int32_t *cu;
    /* A sum over the ranks that was begun and not waited for; `post` is the norm that comes behind it (Gemma), data
     * NULL: the sum went into the residual itself. */
    int summing;
    int adding; /* one rank: `part` is still to be added, together with the norm of the next block */
    uint64_t ticket;
    sl_vec post;
} sl_micro;

/* Offsets in the workspace of one micro-batch. Attention and MLP are never live together and share their space. */
typedef struct sl_fwd_bufs {
    uint64_t xn;   /* [T, H] normed input of the block */
    uint64_t part; /* [T, H] this rank's partial result; of the whole batch when ranks add up, because the sum of one
                      micro-batch runs while the next one is computed */
    uint64_t q, k, v,
        o; /* GQA: [T, hq*hd], [T, hkv*hd] x2, [T, hq*hd]. MLA: q, k [T, hq*(nope+rope)], v = kv, o [T, hq*v] */
    uint64_t qa, ckv;     /* MLA: [T, q_lora], [T, kv_lora+rope] */
    uint64_t gate, up;    /* [T, I] of the dense MLP or the shared expert */
    uint64_t shared;      /* [T, H] result of the shared expert */
    uint64_t idx, weight; /* [T, top_k] int32, f32 */
    uint64_t total;
} sl_fwd_bufs;

struct sl_forward {
    sl_model *m;
    sl_ops *ops;
    sl_coll *coll;
    sl_forward_opts o;
    sl_capture captures[SL_MAX_CAPTURES];
    int64_t cap_tokens, micro_tokens; /* rows of the residual; of the workspace */
    int top;                          /* layers that are run */
    uint64_t es;                      /* bytes an activation element */
    sl_fwd_bufs at;
    /* device memory */
    uint8_t *h;       /* [cap_tokens, H] residual */
    uint8_t *final;   /* [cap_tokens, H] final-normed state, or NULL */
    uint8_t *ws;      /* sl_fwd_bufs */
    uint8_t *op_ws;   /* the ops' own */
    uint8_t *scratch; /* prepared weights of the layer in hand */
    uint8_t *staging; /* what the collective needs */
    float *rope[2];
    int32_t *ids, *pos;
    /* host memory */
    int32_t *pos_host, *cu_host;
    sl_micro *micro;
    int32_t n_micro, attn_step; /* attention takes so many micro-batches at once: 1, or 2 when a row is cut */
};

/* Matrices of a layer that `prepare` may repack; returns how many (<= SL_LAYER_MATS). */
#define SL_LAYER_MATS 16
int sl_forward_layer_mats(sl_layer_weights *w, sl_mat *out[SL_LAYER_MATS]);

/* Both halves of a layer on tokens [t0, t0+T): a block waits for the residual, reads it, and leaves its result on the
 * way into it: behind sl_forward_settle, or at the start of the next block, it is there. w holds prepared matrices. */
int sl_forward_attention(sl_forward *f, const sl_layer_weights *w, const sl_layer_spec *ls, sl_micro *mb, int32_t n,
                         sl_err *err);
/* Both take the micro-batches mb[0..n), which lie side by side, in one piece. */
int sl_forward_mlp(sl_forward *f, const sl_layer_weights *w, const sl_layer_spec *ls, sl_micro *mb, int32_t n,
                   sl_err *err);
int sl_forward_settle(sl_forward *f, sl_micro *mb, sl_err *err);
/* What the attention op of this model is called with. */
sl_attn sl_forward_attn(const sl_model *m, const sl_layer_weights *w, const sl_layer_spec *ls);
#endif
