/* cuda: the CUDA backend's operation table (kernels/ops.h): memory, streams, and one line per operation to its
 * launcher. */
#include <cstdio>
#include <cstring>
#include "kernels/cuda/context.h"

int sl_cuda_fail(sl_err *err, cudaError_t e, const char *what, const char *file, int line) {
    const char *base = strrchr(file, '/');
    return sl_err_set(err, e == cudaErrorMemoryAllocation ? SL_ETEMP : SL_EINTERNAL, "%s:%d: %s: %s (%s)",
                      base ? base + 1 : file, line, what, cudaGetErrorString(e), cudaGetErrorName(e));
}

#define C ((SlCuda *)ctx)

/* A captured buffer must not be overwritten while its copy runs; every operation that may write to one goes through
 * here. */
static int guard_copies(SlCuda *c, sl_err *err) {
    if (c->last_copy == c->copies_waited) return 0;
    SL_CU(cudaStreamWaitEvent(c->stream, c->events[c->last_copy % c->events.size()], 0));
    c->copies_waited = c->last_copy;
    return 0;
}

static int op_alloc(void *ctx, void **p, uint64_t bytes, const char *what, sl_err *err) {
    (void)ctx;
    const cudaError_t e = cudaMalloc(p, bytes ? bytes : 1);
    if (e == cudaSuccess) return 0;
    size_t avail = 0, total = 0;
    cudaMemGetInfo(&avail, &total);
    return sl_err_set(err, SL_ETEMP, "%s: %.2f GiB of device memory asked for, %.2f of %.2f GiB are free (%s)", what,
                      bytes / 1073741824.0, avail / 1073741824.0, total / 1073741824.0, cudaGetErrorString(e));
}
static void op_free(void *ctx, void *p) {
    (void)ctx, cudaFree(p);
}
static int op_upload(void *ctx, void *dst, const void *src, uint64_t bytes, sl_err *err) {
    SL_CU(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, C->stream));
    return 0;
}
static int op_download(void *ctx, void *dst, const void *src, uint64_t bytes, sl_err *err) {
    SL_CU(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, C->stream));
    SL_CU(cudaStreamSynchronize(C->stream));
    return 0;
}
static int op_sync(void *ctx, sl_err *err) {
    SL_CU(cudaStreamSynchronize(C->stream));
    return 0;
}
static uint64_t op_prepare_bytes(void *ctx, const sl_mat *w) {
    return sl_cuda_prepare_bytes(C, w);
}
static int op_prepare(void *ctx, sl_mat *out, const sl_mat *w, void *scratch, sl_err *err) {
    return sl_cuda_prepare(C, out, w, scratch, err);
}
static int op_embed(void *ctx, void *out, const int32_t *ids, int64_t T, const sl_mat *t, float s, sl_err *err) {
    const int rc = guard_copies(C, err);
    return rc ? rc : sl_cuda_embed(C, out, ids, T, t, s, err);
}
static int op_rmsnorm(void *ctx, void *out, int64_t os, const void *x, int64_t xs, int64_t T, int64_t g, int64_t d,
                      const float *w, float eps, sl_norm_kind kind, sl_err *err) {
    return sl_cuda_rmsnorm(C, out, os, x, xs, T, g, d, w, eps, kind, err);
}
static int op_add(void *ctx, void *h, const void *a, int64_t n, sl_err *err) {
    const int rc = guard_copies(C, err);
    return rc ? rc : sl_cuda_add(C, h, a, n, err);
}
static int op_linear(void *ctx, void *out, int64_t os, const void *x, int64_t xs, int64_t T, const sl_mat *w,
                     const float *bias, sl_err *err) {
    return sl_cuda_linear(C, out, os, x, xs, T, w, bias, err);
}
static int op_rope(void *ctx, void *x, int64_t stride, int64_t T, int32_t heads, int64_t hs, int32_t off, int32_t dim,
                   const float *cs, const int32_t *pos, sl_rope_kind kind, sl_err *err) {
    return sl_cuda_rope(C, x, stride, T, heads, hs, off, dim, cs, pos, kind, err);
}
static int op_mla_k(void *ctx, void *k, const void *kv, const void *pe, int64_t ps, int64_t T, int32_t heads,
                    int32_t nope, int32_t rope, int32_t v, sl_err *err) {
    return sl_cuda_mla_k(C, k, kv, pe, ps, T, heads, nope, rope, v, err);
}
static int op_attention(void *ctx, void *o, const void *q, const void *k, const void *v, const int32_t *cu, int32_t S,
                        const sl_attn *a, sl_err *err) {
    return sl_cuda_attention(C, o, q, k, v, cu, S, a, err);
}
static int op_glu(void *ctx, void *out, const void *g, int64_t gs, const void *u, int64_t us, int64_t T, int64_t I,
                  sl_glu_kind kind, float limit, sl_err *err) {
    return sl_cuda_glu(C, out, g, gs, u, us, T, I, kind, limit, err);
}
static int op_route(void *ctx, int32_t *idx, float *w, const void *x, int64_t T, int64_t H, const sl_mat *gate,
                    const sl_router *r, sl_err *err) {
    return sl_cuda_route(C, idx, w, x, T, H, gate, r, err);
}
static int op_moe(void *ctx, void *out, const void *x, int64_t T, int64_t H, const int32_t *idx, const float *w,
                  const sl_moe *m, sl_err *err) {
    return sl_cuda_moe(C, out, x, T, H, idx, w, m, err);
}
static uint64_t op_moe_bytes(void *ctx, int64_t T, int64_t H, const sl_moe *m) {
    return sl_cuda_moe_bytes(C, T, H, m);
}
static int op_set_workspace(void *ctx, void *ws, uint64_t bytes, sl_err *err) {
    (void)err;
    C->ws = (char *)ws, C->ws_bytes = bytes;
    return 0;
}
static uint64_t op_workspace_bytes(void *ctx, int64_t T, int64_t max_seq, int64_t H, int64_t widest, const sl_attn *a) {
    (void)ctx, (void)T, (void)max_seq, (void)H, (void)widest, (void)a;
    return 0; /* attention and products keep their own small buffers */
}
static int op_nll(void *ctx, double *nll, const void *x, int64_t T, int64_t H, const int32_t *ids, const sl_mat *head,
                  sl_err *err) {
    return sl_cuda_nll(C, nll, x, T, H, ids, head, err);
}
static int op_fingerprint(void *ctx, uint64_t *s, uint32_t *nf, const void *x, int64_t T, int64_t H, int64_t cr,
                          sl_err *err) {
    return sl_cuda_fingerprint(C, s, nf, x, T, H, cr, err);
}
static int op_capture_copy(void *ctx, void *host, const void *dev, uint64_t bytes, uint64_t *ticket, sl_err *err) {
    return sl_cuda_capture_copy(C, host, dev, bytes, ticket, err);
}
static int op_capture_done(void *ctx, uint64_t ticket, int *done, sl_err *err) {
    return sl_cuda_capture_done(C, ticket, done, err);
}
static int op_capture_wait(void *ctx, uint64_t ticket, sl_err *err) {
    return sl_cuda_capture_wait(C, ticket, err);
}
static int op_register_arena(void *ctx, void *base, uint64_t bytes, sl_err *err) {
    (void)ctx;
    SL_CU(cudaHostRegister(base, bytes, cudaHostRegisterDefault));
    return 0;
}
static int op_linear_add(void *ctx, void *out, int64_t os, const void *x, int64_t xs, int64_t T, const sl_mat *w,
                         sl_err *err) {
    const int rc = guard_copies(C, err); /* it may add straight to the residual, which is captured */
    return rc ? rc : sl_cuda_linear_add(C, out, os, x, xs, T, w, err);
}
static int op_fill(void *ctx, void *dst, const sl_fill *f, sl_err *err) {
    return sl_cuda_fill(C, dst, f, err);
}
static int op_glu_linear(void *ctx, void *out, void *scratch, const void *x, int64_t xs, int64_t T, const sl_mat *gate,
                         const sl_mat *up, sl_glu_kind kind, float limit, sl_err *err) {
    return sl_cuda_glu_linear(C, out, scratch, x, xs, T, gate, up, kind, limit, err);
}
static int op_host_alloc(void *ctx, void **p, uint64_t bytes, sl_err *err) {
    (void)ctx;
    const cudaError_t e = cudaMallocHost(p, bytes);
    if (e == cudaSuccess) return 0;
    (void)cudaGetLastError();
    return sl_err_set(err, SL_ETEMP, "%.1f MB of pinned host memory: %s", (double)bytes / 1e6, cudaGetErrorString(e));
}
static void op_host_free(void *ctx, void *p) {
    (void)ctx, cudaFreeHost(p);
}
static int op_upload_start(void *ctx, void *dst, const void *src, uint64_t bytes, uint64_t *ticket, sl_err *err) {
    const uint64_t t = C->last_upload + 1;
    cudaEvent_t &e = C->uploads[t % 64];
    if (!e) SL_CU(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    SL_CU(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, C->stream));
    SL_CU(cudaEventRecord(e, C->stream));
    *ticket = C->last_upload = t;
    return 0;
}
static int op_upload_wait(void *ctx, uint64_t ticket, sl_err *err) {
    SL_CU(cudaEventSynchronize(C->uploads[ticket % 64])); /* used again since: then a later copy, which is as good */
    return 0;
}
static int op_add_norm(void *ctx, void *h, const void *part, void *out, int64_t T, int64_t d, const float *w, float eps,
                       sl_norm_kind kind, sl_err *err) {
    const int rc = guard_copies(C, err);
    return rc ? rc : sl_cuda_add_norm(C, h, part, out, T, d, w, eps, kind, err);
}
static void op_destroy(sl_ops *ops) {
    SlCuda *c = (SlCuda *)ops->ctx;
    if (c->stream) cudaStreamSynchronize(c->stream);
    if (c->copy) cudaStreamSynchronize(c->copy);
    sl_cuda_attention_close(c);
    sl_cuda_gemm_close(c);
    for (auto e : c->events)
        if (e) cudaEventDestroy(e);
    for (auto e : c->uploads)
        if (e) cudaEventDestroy(e);
    if (c->compute_mark) cudaEventDestroy(c->compute_mark);
    cudaFree(c->dense_off), cudaFree(c->counters), cudaFree(c->fp_dev), cudaFree(c->nll_dev), cudaFree(c->head_dev),
        cudaFree(c->route_dev);
    if (c->copy) cudaStreamDestroy(c->copy);
    if (c->stream) cudaStreamDestroy(c->stream);
    delete c;
    delete ops;
}

static const sl_ops table = {
    .name = "cuda",
    .act = SL_BF16,
    .ctx = nullptr,
    .alloc = op_alloc,
    .free = op_free,
    .upload = op_upload,
    .download = op_download,
    .sync = op_sync,
    .prepare_bytes = op_prepare_bytes,
    .prepare = op_prepare,
    .embed = op_embed,
    .rmsnorm = op_rmsnorm,
    .add = op_add,
    .linear = op_linear,
    .rope = op_rope,
    .mla_k = op_mla_k,
    .attention = op_attention,
    .glu = op_glu,
    .route = op_route,
    .moe = op_moe,
    .moe_bytes = op_moe_bytes,
    .set_workspace = op_set_workspace,
    .workspace_bytes = op_workspace_bytes,
    .nll = op_nll,
    .fingerprint = op_fingerprint,
    .capture_copy = op_capture_copy,
    .capture_done = op_capture_done,
    .capture_wait = op_capture_wait,
    .register_arena = op_register_arena,
    .linear_add = op_linear_add,
    .fill = op_fill,
    .add_norm = op_add_norm,
    .glu_linear = op_glu_linear,
    .host_alloc = op_host_alloc,
    .host_free = op_host_free,
    .upload_start = op_upload_start,
    .upload_wait = op_upload_wait,
    .destroy = op_destroy,
};

static int open_device(SlCuda *c, sl_err *err) {
    SL_CU(cudaSetDevice(c->device));
    cudaDeviceProp p;
    SL_CU(cudaGetDeviceProperties(&p, c->device));
    c->sms = p.multiProcessorCount, c->cc = p.major * 10 + p.minor;
    if (c->cc < 80)
        return sl_err_set(err, SL_ECONFIG,
                          "device %d (%s) has compute capability %d.%d: 8.0 or newer is needed for bf16", c->device,
                          p.name, p.major, p.minor);
    SL_CU(cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking));
    SL_CU(cudaStreamCreateWithFlags(&c->copy, cudaStreamNonBlocking));
    SL_CU(cudaEventCreateWithFlags(&c->compute_mark, cudaEventDisableTiming));
    SL_CU(cudaMalloc((void **)&c->counters, 256));
    SL_CU(cudaMemsetAsync(c->counters, 0, 256, c->stream));
    SL_CU(cudaMalloc((void **)&c->dense_off, 2 * sizeof(int)));
    const int rc = sl_cuda_attention_open(c, err);
    return rc ? rc : sl_cuda_gemm_open(c, err);
}

extern "C" int sl_ops_cuda_create(sl_ops **out, int device, sl_dtype act, sl_err *err) {
    *out = nullptr;
    if (act != SL_F32 && act != SL_BF16)
        return sl_err_set(err, SL_EINTERNAL, "activation type %d: f32 or bf16", (int)act);
    int n = 0;
    const cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess || n == 0)
        return sl_err_set(err, SL_ECONFIG, "no CUDA device: %s",
                          e != cudaSuccess ? cudaGetErrorString(e) : "none found");
    if (device < 0 || device >= n)
        return sl_err_set(err, SL_ECONFIG, "CUDA device %d asked for, %d present", device, n);
    sl_ops *ops = new sl_ops(table);
    SlCuda *c = new SlCuda;
    c->device = device, c->act = act;
    ops->act = act, ops->ctx = c;
    const int rc = open_device(c, err);
    if (rc) {
        op_destroy(ops);
        return sl_err_wrap(err, "opening CUDA device %d", device);
    }
    *out = ops;
    return 0;
}

extern "C" int sl_ops_cuda_devices(void) {
    int n = 0;
    return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
}
extern "C" void sl_ops_cuda_force(sl_ops *ops, sl_cuda_force f) {
    ((SlCuda *)ops->ctx)->force = f;
}
extern "C" void *sl_ops_cuda_stream(const sl_ops *ops) {
    return ((const SlCuda *)ops->ctx)->stream;
}
