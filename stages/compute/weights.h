/* weights: one rank's share of a checkpoint, loaded. The loader is the only code that knows files and names; what comes
 * out is sl_mat / sl_vec in device memory, sliced for (rank, tp). Each rank reads only its own bytes, in layer order,
 * with large reads through bounded buffers (loader.h) (or maps the file when the CPU backend can use it in place:
 * weights are never held twice). Before anything is read, every name, shape, dtype and byte range is checked against
 * the spec; all that is missing, unexpected or wrong is reported in ONE message. */
#ifndef SL_COMPUTE_WEIGHTS_H
#define SL_COMPUTE_WEIGHTS_H
#include "stages/compute/spec.h"

typedef struct sl_layer_weights {
    sl_vec attn_norm, mlp_norm; /* input_layernorm; post_attention_layernorm (pre-MLP norm; Gemma: pre_feedforward) */
    sl_vec post_attn_norm, post_mlp_norm; /* Gemma 3 sandwich norms, else absent */
    /* GQA. This rank's heads: h_q query heads from h_q0, h_kv kv heads (replicated when kv_heads < tp). */
    sl_mat q, k, v, o;                     /* q [hq*hd, H], k/v [hkv*hd, H], o [H, hq*hd] */
    sl_vec q_bias, k_bias, v_bias, o_bias; /* o_bias on rank 0 only, absent elsewhere */
    sl_vec q_norm, k_norm;                 /* [hd] */
    sl_vec sinks;                          /* [hq] */
    /* MLA */
    sl_mat q_a, q_b, kv_a, kv_b; /* q_a [q_lora, H], q_b [hq*(nope+rope), q_lora] (or from H when q_lora == 0), kv_a
                                    [kv_lora+rope, H], kv_b [hq*(nope+v), kv_lora] */
    sl_vec q_a_norm, kv_a_norm;
    /* MLP: dense, or the shared expert of a MoE layer */
    sl_mat gate, up, down; /* [I/tp, H], [I/tp, H], [H, I/tp]; data NULL when absent */
    /* MoE */
    sl_mat router;                         /* [E, H], replicated */
    sl_vec router_bias, router_logit_bias; /* selection bias; logits bias */
    sl_moe moe;                            /* gate/up/down of this rank; first/local */
} sl_layer_weights;

typedef struct sl_model {
    sl_spec spec;
    int rank, tp, experts_ep; /* experts_ep: whole experts per rank */
    int32_t hq, hkv;          /* heads of this rank */
    int32_t top_layer;        /* layers [0, top_layer) are loaded (the highest captured state needs no more) */
    sl_mat embed, lm_head;    /* replicated; lm_head is loaded only when NLL is wanted, embed itself when tied */
    sl_vec final_norm;
    sl_layer_weights *layer;
    struct sl_model_store *store; /* owns the memory */
} sl_model;

typedef struct sl_load_opts {
    const char *model;
    int rank, tp;
    int expert_split; /* sl_expert_split: AUTO = EP when experts % tp == 0, else TP */
    int top_layer;    /* <= n_layers; layers above are not loaded */
    int want_head;    /* lm_head and final norm */
    int random;       /* weights from the seed instead of the files (config only) */
    uint64_t seed;
    int random_format; /* sl_wfmt for the linear weights when random: -1 = what the config says */
    double eps_lora;
    void (*progress)(void *arg, uint64_t done, uint64_t total); /* bytes; may be NULL */
    void *progress_arg;
} sl_load_opts;

int sl_model_load(sl_model **out, const sl_load_opts *o, sl_ops *ops, sl_err *err);
void sl_model_free(sl_model *m, sl_ops *ops);
/* "" or a sentence worth a WARNING: which fallback the loader used (no io_uring, no O_DIRECT). */
const char *sl_model_note(const sl_model *m);

/* Without loading: what a rank will need. Bytes of weights by format, of the largest prepared layer; parameter count.
 */
typedef struct sl_model_plan {
    uint64_t params, weight_bytes, prepared_bytes, file_bytes, fmt_bytes[SL_W_N];
    uint64_t pinned_bytes; /* host memory that a backend with pinned memory holds while weights are read from files */
} sl_model_plan;
int sl_model_plan_make(sl_model_plan *p, const sl_spec *s, const sl_load_opts *o, sl_err *err);
#endif
