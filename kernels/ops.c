#include "kernels/ops.h"

typedef struct {
    const char *name;
    uint32_t block;       /* elements a block along k */
    uint32_t block_bytes; /* bytes a block, scales of INT4/FP8/MXFP4 not counted (they are tensors of their own) */
} fmt_row;

static const fmt_row fmts[SL_W_N] = {
    [SL_W_F32] = {"F32", 1, 4},       [SL_W_BF16] = {"BF16", 1, 2},     [SL_W_F16] = {"F16", 1, 2},
    [SL_W_INT4] = {"INT4", 8, 4},     [SL_W_FP8] = {"FP8", 1, 1},       [SL_W_MXFP4] = {"MXFP4", 32, 16},
    [SL_W_Q8_0] = {"Q8_0", 32, 34},   [SL_W_Q4_0] = {"Q4_0", 32, 18},   [SL_W_Q4_1] = {"Q4_1", 32, 20},
    [SL_W_Q5_0] = {"Q5_0", 32, 22},   [SL_W_Q5_1] = {"Q5_1", 32, 24},   [SL_W_Q4_K] = {"Q4_K", 256, 144},
    [SL_W_Q5_K] = {"Q5_K", 256, 176}, [SL_W_Q6_K] = {"Q6_K", 256, 210}, [SL_W_MXFP4_GGUF] = {"MXFP4_GGUF", 32, 17},
};

const char *sl_wfmt_name(sl_wfmt f) {
    return (unsigned)f < SL_W_N ? fmts[f].name : "?";
}

uint32_t sl_wfmt_block(sl_wfmt f) {
    return (unsigned)f < SL_W_N ? fmts[f].block : 0;
}

uint64_t sl_wfmt_row_bytes(sl_wfmt f, int64_t k) {
    if ((unsigned)f >= SL_W_N || k <= 0 || k % fmts[f].block) return 0;
    return (uint64_t)(k / fmts[f].block) * fmts[f].block_bytes;
}
