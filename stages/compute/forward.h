/* forward: prefill of one batch, layer-major, with capture. No decode, no KV cache beyond the layer in hand, no logits
 * unless asked. A batch is one or more micro-batches of whole sequences (<= micro_tokens unless one row is longer); for
 * each layer the weights are prepared once, then every micro-batch runs through it, attention first. Where the sums
 * over ranks run beside compute, a batch is cut in two (inside a row where that is needed), so that the sum of one half
 * is hidden behind the computation of the other. Layers above the highest captured state are not run. All workspaces
 * are allocated once, in sl_forward_create; the plan is printed by the caller from sl_forward_plan. */
#ifndef SL_COMPUTE_FORWARD_H
#define SL_COMPUTE_FORWARD_H
#include "stages/compute/weights.h"
#include "stages/compute/collective.h"
#include "ipc/boot.h"

typedef struct sl_forward sl_forward;

typedef struct sl_forward_opts {
    int64_t batch_tokens; /* most tokens a batch (a single longer row counts: max(batch_tokens, max_length)) */
    int64_t micro_tokens; /* 0 = batch_tokens */
    int64_t max_length;   /* longest row */
    int32_t max_rows;
    const sl_capture *captures;
    int32_t n_captures;
} sl_forward_opts;

typedef struct sl_forward_row {
    int64_t t0, T;
} sl_forward_row;

/* Called on the host, in capture order, when state k of the whole batch is complete on this rank: `states` is a device
 * pointer [n_tokens, H] in ops->act, unchanged until the NEXT layer's residual add, i.e. until the sink returns and the
 * copies that it started are ordered by ops->capture_copy (which the next write waits for on the device). */
typedef int (*sl_forward_sink)(void *arg, int32_t k, const void *states, int64_t n_tokens, sl_err *err);

typedef struct sl_forward_plan {
    uint64_t residual, workspace, prepared, rope, total;
} sl_forward_plan;
int sl_forward_plan_make(sl_forward_plan *p, const sl_model *m, const sl_ops *ops, const sl_coll *coll,
                         const sl_forward_opts *o, sl_err *err);

int sl_forward_create(sl_forward **out, sl_model *m, sl_ops *ops, sl_coll *coll, const sl_forward_opts *o, sl_err *err);
/* rows tile ids[0..n_tokens). nll: [n_rows] or NULL; rows whose nll entry is >= 0 on entry are computed, others set to
 * NaN. Ids out of vocabulary are SL_EDATA (the feeder rejects them first). */
int sl_forward_run(sl_forward *f, const int32_t *ids, const sl_forward_row *rows, int32_t n_rows, double *nll,
                   sl_forward_sink sink, void *arg, sl_err *err);
void sl_forward_destroy(sl_forward *f);
#endif
