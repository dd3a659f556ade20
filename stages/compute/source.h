/* source: the tensor table of a model, whichever container it is in: a safetensors folder, GGUF files, or nothing
 * (random weights). Shapes are in the order of HF checkpoints, slowest first: a GGUF's ne = {in, out, experts} becomes
 * [experts, out, in]. A tensor is marked when something asks for it; what is never asked for is "unexpected". */
#ifndef SL_COMPUTE_SOURCE_H
#define SL_COMPUTE_SOURCE_H
#include "stages/compute/gguf.h"
#include "stages/compute/safetensors.h"
#include "kernels/ops.h"

typedef struct sl_src_tensor {
    const char *name;
    int name_len;
    int fmt;          /* sl_wfmt when the elements are those of a weight matrix (F8_E4M3: SL_W_FP8), else -1 */
    int st;           /* sl_st_dtype, or -1 for a ggml block type */
    const char *type; /* as the file calls it */
    uint32_t n_dims;
    uint64_t shape[4];
    uint32_t file;
    uint64_t off, bytes;
    int asked;
} sl_src_tensor;

typedef struct sl_source {
    sl_st *st;
    sl_gguf *gguf;
    sl_src_tensor *tensor; /* sorted by name */
    uint64_t n;
} sl_source;

int sl_source_open(sl_source *s, const char *model, sl_err *err);
void sl_source_close(sl_source *s);
/* Marks it as asked for. NULL when it is not there. */
sl_src_tensor *sl_source_find(sl_source *s, const char *name);
uint32_t sl_source_n_files(const sl_source *s);
const char *sl_source_path(const sl_source *s, uint32_t file);
int sl_source_fd(const sl_source *s, uint32_t file);
uint64_t sl_source_file_bytes(const sl_source *s, uint32_t file);
#endif
