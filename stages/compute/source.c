#include "stages/compute/source.h"
#include "stages/compute/spec.h"

#include <stdlib.h>
#include <string.h>

static int st_fmt(sl_st_dtype t) {
    switch (t) {
    case SL_ST_F32:
        return SL_W_F32;
    case SL_ST_BF16:
        return SL_W_BF16;
    case SL_ST_F16:
        return SL_W_F16;
    case SL_ST_F8_E4M3:
        return SL_W_FP8;
    default:
        return -1;
    }
}
static const struct {
    uint32_t ggml;
    int fmt, st;
} ggml_map[] = {
    {0, SL_W_F32, SL_ST_F32}, {1, SL_W_F16, SL_ST_F16}, {30, SL_W_BF16, SL_ST_BF16}, {8, SL_W_Q8_0, -1},
    {2, SL_W_Q4_0, -1},       {3, SL_W_Q4_1, -1},       {6, SL_W_Q5_0, -1},          {7, SL_W_Q5_1, -1},
    {12, SL_W_Q4_K, -1},      {13, SL_W_Q5_K, -1},      {14, SL_W_Q6_K, -1},         {39, SL_W_MXFP4_GGUF, -1},
};

static void from_st(sl_src_tensor *t, const sl_st_tensor *s) {
    *t = (sl_src_tensor){.name = s->name,
                         .name_len = (int)strlen(s->name),
                         .fmt = st_fmt(s->dtype),
                         .st = (int)s->dtype,
                         .type = sl_st_dtype_name(s->dtype),
                         .n_dims = s->n_dims,
                         .file = s->file,
                         .off = s->offset,
                         .bytes = s->bytes};
    for (uint32_t d = 0; d < 4; d++) t->shape[d] = s->shape[d];
}
static void from_gguf(sl_src_tensor *t, const sl_gguf_tensor *g) {
    *t = (sl_src_tensor){.name = g->name.s,
                         .name_len = (int)g->name.n,
                         .fmt = -1,
                         .st = -1,
                         .type = sl_ggml_type_name(g->type),
                         .n_dims = g->n_dims,
                         .file = g->file,
                         .off = g->offset,
                         .bytes = g->bytes};
    for (size_t i = 0; i < sizeof ggml_map / sizeof *ggml_map; i++)
        if (ggml_map[i].ggml == g->type) {
            t->fmt = ggml_map[i].fmt;
            t->st = ggml_map[i].st;
        }
    for (uint32_t d = 0; d < 4; d++) t->shape[d] = d < g->n_dims ? g->ne[g->n_dims - 1 - d] : 1;
}

int sl_source_open(sl_source *s, const char *model, sl_err *err) {
    *s = (sl_source){0};
    int rc = sl_spec_is_gguf(model) ? sl_gguf_open(&s->gguf, model, err) : sl_st_open(&s->st, model, err);
    if (rc) return rc;
    s->n = s->st ? sl_st_n_tensors(s->st) : sl_gguf_n_tensors(s->gguf);
    s->tensor = calloc(s->n + 1, sizeof *s->tensor);
    if (!s->tensor) {
        sl_source_close(s);
        return sl_err_set(err, SL_ETEMP, "%s: out of memory for its tensor table", model);
    }
    for (uint64_t i = 0; i < s->n; i++) {
        if (s->st)
            from_st(&s->tensor[i], sl_st_at(s->st, i));
        else
            from_gguf(&s->tensor[i], sl_gguf_by_name(s->gguf, i));
    }
    return 0;
}

void sl_source_close(sl_source *s) {
    sl_st_close(s->st);
    sl_gguf_close(s->gguf);
    free(s->tensor);
    *s = (sl_source){0};
}

sl_src_tensor *sl_source_find(sl_source *s, const char *name) {
    uint64_t lo = 0, hi = s->n;
    size_t n = strlen(name);
    while (lo < hi) {
        uint64_t mid = lo + (hi - lo) / 2;
        sl_src_tensor *t = &s->tensor[mid];
        size_t m = (size_t)t->name_len;
        int c = memcmp(t->name, name, m < n ? m : n);
        if (!c) c = (m > n) - (m < n);
        if (!c) {
            t->asked = 1;
            return t;
        }
        if (c < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return NULL;
}

uint32_t sl_source_n_files(const sl_source *s) {
    return s->st ? sl_st_n_files(s->st) : s->gguf ? sl_gguf_n_files(s->gguf) : 0;
}
const char *sl_source_path(const sl_source *s, uint32_t f) {
    return s->st ? sl_st_path(s->st, f) : s->gguf ? sl_gguf_path(s->gguf, f) : "";
}
int sl_source_fd(const sl_source *s, uint32_t f) {
    return s->st ? sl_st_fd(s->st, f) : s->gguf ? sl_gguf_fd(s->gguf, f) : -1;
}
uint64_t sl_source_file_bytes(const sl_source *s, uint32_t f) {
    return s->st ? sl_st_file_bytes(s->st, f) : s->gguf ? sl_gguf_file_bytes(s->gguf, f) : 0;
}
