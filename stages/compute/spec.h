/* spec: one decoder, described. Filled from config.json (both spellings) or GGUF metadata; nothing else in the program
 * looks at a model's configuration. A field or architecture that is not understood is refused by name, never guessed.
 * The math of each family: README "Families"; every formula's source is named at its op in kernels/ops.h. */
#ifndef SL_COMPUTE_SPEC_H
#define SL_COMPUTE_SPEC_H
#include "ipc/err.h"
#include "kernels/ops.h"

#define SL_MAX_LAYERS 512

typedef enum { SL_ATTN_GQA, SL_ATTN_MLA } sl_attn_kind;
typedef enum { SL_MLP_DENSE, SL_MLP_MOE } sl_mlp_kind;
typedef enum { SL_ROPESC_NONE, SL_ROPESC_LINEAR, SL_ROPESC_LLAMA3, SL_ROPESC_YARN } sl_ropesc_kind;

typedef struct sl_rope_spec {
    double theta;
    sl_ropesc_kind scaling;
    double factor;
    double low_freq, high_freq;    /* llama3 */
    double orig_max;               /* llama3, yarn */
    double beta_fast, beta_slow;   /* yarn */
    double mscale, mscale_all_dim; /* yarn, 0 = absent */
    double attention_factor;       /* yarn, 0 = derive */
    int truncate;                  /* yarn: floor/ceil the ramp ends (default 1) */
    const float *divide; /* GGUF rope_freqs: divide inv_freq by it, dim/2 values, or NULL (owned by the spec) */
} sl_rope_spec;

typedef struct sl_layer_spec {
    sl_mlp_kind mlp;
    int32_t window; /* 0 = full */
    int32_t rope;   /* index into spec.rope[]: 0, or 1 for Gemma's local layers */
} sl_layer_spec;

typedef struct sl_spec {
    char family[32]; /* row of the family table: "llama", "qwen3_moe", "deepseek_v3", ... */
    char arch[64];   /* as the file says */
    char prefix[64]; /* of the weight names: "", "language_model.", ... */
    int from_gguf;
    int32_t n_layers, width, vocab, heads, kv_heads, head_dim;
    int32_t inter;        /* dense MLP */
    double eps, eps_lora; /* norms; q_a/kv_a norms (default 1e-6, a setting) */
    int tied;             /* lm_head = embedding */
    int64_t max_pos;
    int qkv_bias, o_bias, qk_norm, sandwich_norms /* Gemma 3: four norms a layer */, sinks;
    sl_norm_kind norm;
    float embed_scale; /* 1, or sqrt(H) (rounded to bf16 by the op) */
    float attn_scale;  /* final softmax scale (MLA: with m^2) */
    sl_attn_kind attn;
    sl_rope_kind rope_kind;
    sl_rope_spec rope[2];
    /* MLA */
    int32_t q_lora, kv_lora, nope_dim, rope_dim, v_dim; /* q_lora 0 = plain q_proj */
    /* MoE */
    int32_t experts, top_k, moe_inter, shared_inter; /* shared_inter 0 = no shared expert */
    sl_router router;                                /* bias pointers NULL here */
    sl_glu_kind glu;
    float glu_limit;
    int moe_biases, gate_up_interleaved, moe_bf16_accumulate;
    sl_layer_spec layer[SL_MAX_LAYERS];
    /* quantization of the checkpoint as its config declares it (checked against the tensors) */
    char quant[32];                                  /* "", "int4", "fp8", "mxfp4", "gguf" */
    int32_t quant_group, quant_symmetric, fp8_block; /* quant_group -1: one scale a row ("channel") */
    /* elements along k in which the k-sliced matrices (attention output, dense and shared down, expert down) can be
     * cut: 1, the INT4 group, or the block of the GGUF type */
    int32_t k_block_attn, k_block_mlp, k_block_moe;
    int32_t mtp_layers; /* extra prediction layers n_layers..n_layers+mtp_layers-1 in the files, skipped */
    char unknown[512];  /* keys of config.json that are in none of our tables, "a, b, c"; worth a WARNING */
    float *rope_divide; /* owns rope[].divide */
} sl_spec;

/* Read MODEL/config.json or the GGUF's metadata. SL_ECONFIG with file, key, found, expected; the unsupported
 * architecture message lists the supported ones. */
int sl_spec_load(sl_spec *s, const char *model, double eps_lora, sl_err *err); /* eps_lora <= 0: the default, 1e-6 */
/* As the loader of config.json does, from text (tests, fuzzer); `name` stands for the file in messages. */
int sl_spec_parse_config(sl_spec *s, const char *json, size_t n, const char *name, double eps_lora, sl_err *err);
/* Is MODEL a GGUF file (by its name's ending or its first four bytes)? */
int sl_spec_is_gguf(const char *model);
void sl_spec_free(sl_spec *s);

/* cos/sin table f32 [maxpos][dim/2][2] of rope r (yarn's attention factor multiplied in); sl_spec_rope_dim gives dim.
 */
int32_t sl_spec_rope_dim(const sl_spec *s);
/* Its parts: inverse frequencies f32 [dim/2] and the factor on cos and sin. */
int sl_spec_rope_freqs(const sl_spec *s, int r, float *inv_freq, double *factor, sl_err *err);
int sl_spec_rope_table(const sl_spec *s, int r, int64_t maxpos, float *out, sl_err *err);

/* Tensor-parallel widths this model allows up to `max` (heads, kv heads or their replication, MLP slices, experts);
 * returns how many were written. sl_spec_check_tp: 0, or SL_ECONFIG naming what does not divide and the widths that do.
 */
int sl_spec_widths(const sl_spec *s, int split, int max, int *out);
int sl_spec_check_tp(const sl_spec *s, int split, int tp, sl_err *err);

/* --layers: "eagle3" | "speculators-0.3" | "dflash" | "all" | comma list of indices, n, n-K, n/K, n/K+J. Writes
 * ascending distinct H indices into hidx[] and returns their number; SL_EUSAGE with the offending part. */
int sl_spec_layers(const char *text, int n_layers, uint32_t *hidx, int max, sl_err *err);

/* 64 hex digits: XXH128 pairs of config and of the sorted tensor table (names, shapes, dtypes, sizes); not of the
 * weights. */
int sl_spec_fingerprint(const char *model, char out[80], sl_err *err);
#endif
