/* gemm: dense products by cuBLASLt. For each shape (rows rounded up to a bucket, n, k, types) the library's first
 * choices are timed on the real operands the first time it is met, and the best is kept; the choices go to a small text
 * file so that the next start finds them ($SLUICE_CACHE_DIR, else $XDG_CACHE_HOME/sluice, else ~/.cache/sluice; absent
 * or unwritable: measured again). f32 runs in full fp32 (no TF32). */
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <sys/stat.h>
#include <unistd.h>
#include "kernels/cuda/context.h"

struct GemmKey {
    int64_t m, n, k, lda, ldb, ldc;
    int out_f32, f32, align; /* align: bytes that every operand's address and row distance are a multiple of, 2..256 */
    bool operator<(const GemmKey &o) const {
        return std::tie(m, n, k, lda, ldb, ldc, out_f32, f32, align) <
               std::tie(o.m, o.n, o.k, o.lda, o.ldb, o.ldc, o.out_f32, o.f32, o.align);
    }
};
struct SlGemmCache {
    std::map<GemmKey, cublasLtMatmulAlgo_t> algos;
    std::string path;
    bool dirty = false;
    cudaEvent_t a = nullptr, b = nullptr;
};

static int lt_fail(sl_err *err, cublasStatus_t s, const char *what, int line) {
    return sl_err_set(err, SL_EINTERNAL, "%s:%d: %s: cuBLASLt status %d", __FILE__, line, what, (int)s);
}
#define SL_LT(x)                                                                                                       \
    do {                                                                                                               \
        cublasStatus_t s_ = (x);                                                                                       \
        if (s_ != CUBLAS_STATUS_SUCCESS) return lt_fail(err, s_, #x, __LINE__);                                        \
    } while (0)

/* Rows of a micro-batch differ from batch to batch; one timing serves all that need the same number of tiles. */
static int64_t bucket(int64_t m) {
    if (m <= 128) return 128;
    int64_t step = 128;
    while (m > step * 16) step *= 2;
    return (m + step - 1) / step * step;
}

static std::string cache_path(const SlCuda *c) {
    std::string dir;
    if (const char *d = getenv("SLUICE_CACHE_DIR"))
        dir = d;
    else if (const char *x = getenv("XDG_CACHE_HOME"))
        dir = std::string(x) + "/sluice";
    else if (const char *h = getenv("HOME"))
        dir = std::string(h) + "/.cache/sluice";
    else
        return "";
    mkdir(dir.c_str(), 0755);
    return dir + "/gemm-sm" + std::to_string(c->cc) + "-" + std::to_string(cublasLtGetVersion()) + ".txt";
}
static void cache_load(SlGemmCache *g) {
    FILE *f = g->path.empty() ? nullptr : fopen(g->path.c_str(), "r");
    if (!f) return;
    GemmKey k;
    unsigned long long w[8];
    static_assert(sizeof(cublasLtMatmulAlgo_t) == sizeof w, "the algorithm is eight words");
    while (fscanf(f, "%ld %ld %ld %ld %ld %ld %d %d %d", &k.m, &k.n, &k.k, &k.lda, &k.ldb, &k.ldc, &k.out_f32, &k.f32,
                  &k.align) == 9) {
        int ok = 1;
        for (auto &x : w) ok &= fscanf(f, "%llx", &x) == 1;
        if (!ok) break;
        memcpy(&g->algos[k], w, sizeof w);
    }
    fclose(f);
}
static void cache_save(const SlGemmCache *g) {
    if (g->path.empty() || !g->dirty) return;
    const std::string tmp = g->path + ".tmp" + std::to_string((long)getpid());
    FILE *f = fopen(tmp.c_str(), "w");
    if (!f) return;
    for (const auto &e : g->algos) {
        const GemmKey &k = e.first;
        fprintf(f, "%ld %ld %ld %ld %ld %ld %d %d %d", k.m, k.n, k.k, k.lda, k.ldb, k.ldc, k.out_f32, k.f32, k.align);
        unsigned long long w[8];
        memcpy(w, &e.second, sizeof w);
        for (auto x : w) fprintf(f, " %llx", x);
        fputc('\n', f);
    }
    fclose(f);
    rename(tmp.c_str(), g->path.c_str());
}

int sl_cuda_gemm_open(SlCuda *c, sl_err *err) {
    SL_LT(cublasLtCreate(&c->lt));
    c->lt_ws_bytes = 64u << 20;
    SL_CU(cudaMalloc(&c->lt_ws, c->lt_ws_bytes));
    c->gemms = new SlGemmCache;
    c->gemms->path = cache_path(c);
    cache_load(c->gemms);
    SL_CU(cudaEventCreate(&c->gemms->a));
    SL_CU(cudaEventCreate(&c->gemms->b));
    return 0;
}
void sl_cuda_gemm_close(SlCuda *c) {
    if (c->gemms) {
        cache_save(c->gemms);
        cudaEventDestroy(c->gemms->a), cudaEventDestroy(c->gemms->b);
        delete c->gemms;
    }
    if (c->lt) cublasLtDestroy(c->lt);
    cudaFree(c->lt_ws);
}

/* Everything one product needs; destroyed with it. out [m, n] = x [m, k] * w [n, k]^T, in cuBLAS's column-major terms
 * out^T = w' x'. */
struct LtOp {
    cublasLtMatmulDesc_t d = nullptr;
    cublasLtMatrixLayout_t w = nullptr, x = nullptr, o = nullptr;
    ~LtOp() {
        if (o) cublasLtMatrixLayoutDestroy(o);
        if (x) cublasLtMatrixLayoutDestroy(x);
        if (w) cublasLtMatrixLayoutDestroy(w);
        if (d) cublasLtMatmulDescDestroy(d);
    }
};
static int op_make(LtOp *op, const GemmKey &k, int64_t m, sl_err *err) {
    const cublasOperation_t t = CUBLAS_OP_T;
    const cudaDataType_t in = k.f32 ? CUDA_R_32F : CUDA_R_16BF, out = k.f32 || k.out_f32 ? CUDA_R_32F : CUDA_R_16BF;
    SL_LT(cublasLtMatmulDescCreate(&op->d, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    SL_LT(cublasLtMatmulDescSetAttribute(op->d, CUBLASLT_MATMUL_DESC_TRANSA, &t, sizeof t));
    SL_LT(cublasLtMatrixLayoutCreate(&op->w, in, k.k, k.n, k.ldb));
    SL_LT(cublasLtMatrixLayoutCreate(&op->x, in, k.k, m, k.lda));
    SL_LT(cublasLtMatrixLayoutCreate(&op->o, out, k.n, m, k.ldc));
    return 0;
}

struct Call {
    const void *x, *w;
    void *out;
};
static cublasStatus_t go(SlCuda *c, const LtOp &op, const Call &p, const cublasLtMatmulAlgo_t *algo) {
    const float one = 1, zero = 0;
    return cublasLtMatmul(c->lt, op.d, &one, p.w, op.w, p.x, op.x, &zero, p.out, op.o, p.out, op.o, algo, c->lt_ws,
                          c->lt_ws_bytes, c->stream);
}
/* Time the library's first choices on these operands and remember the best. */
static int choose(SlCuda *c, const LtOp &op, const Call &p, const GemmKey &key, sl_err *err) {
    constexpr int TRY = 8, REPS = 3;
    cublasLtMatmulPreference_t pref;
    SL_LT(cublasLtMatmulPreferenceCreate(&pref));
    const uint32_t align = (uint32_t)key.align; /* left alone, the library takes 256 for granted */
    for (auto attr : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                      CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
        cublasLtMatmulPreferenceSetAttribute(pref, attr, &align, sizeof align);
    cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &c->lt_ws_bytes,
                                         sizeof c->lt_ws_bytes);
    cublasLtMatmulHeuristicResult_t r[TRY];
    int n = 0, best = 0;
    const cublasStatus_t s = cublasLtMatmulAlgoGetHeuristic(c->lt, op.d, op.w, op.x, op.o, op.o, pref, TRY, r, &n);
    cublasLtMatmulPreferenceDestroy(pref);
    if (s != CUBLAS_STATUS_SUCCESS || n == 0)
        return sl_err_set(err, SL_EINTERNAL, "cuBLASLt offers no algorithm for %ld x %ld x %ld (status %d)",
                          (long)key.m, (long)key.n, (long)key.k, (int)s);
    float least = 1e30f;
    for (int i = 0; n > 1 && i < n; i++) {
        if (go(c, op, p, &r[i].algo) != CUBLAS_STATUS_SUCCESS) continue; /* also warms it up */
        SL_CU(cudaEventRecord(c->gemms->a, c->stream));
        for (int j = 0; j < REPS; j++) (void)go(c, op, p, &r[i].algo);
        SL_CU(cudaEventRecord(c->gemms->b, c->stream));
        SL_CU(cudaEventSynchronize(c->gemms->b));
        float ms;
        SL_CU(cudaEventElapsedTime(&ms, c->gemms->a, c->gemms->b));
        if (ms < least) least = ms, best = i;
    }
    c->gemms->algos[key] = r[best].algo;
    c->gemms->dirty = true;
    return 0;
}

static int common_alignment(std::initializer_list<uintptr_t> v) {
    uintptr_t all = 256;
    for (uintptr_t x : v) all |= x;
    return (int)(all & -all);
}

static int product(SlCuda *c, void *out, int64_t os, const void *x, int64_t xs, int64_t T, const sl_mat *w,
                   bool out_f32, sl_err *err) {
    const bool f32 = c->act == SL_F32;
    const uintptr_t elem = f32 ? 4 : 2;
    if (w->fmt != (f32 ? SL_W_F32 : SL_W_BF16))
        return sl_err_set(err, SL_EINTERNAL, "linear: matrix in format %s was not prepared", sl_wfmt_name(w->fmt));
    const GemmKey key = {bucket(T),
                         w->n,
                         w->k,
                         xs,
                         (int64_t)(w->row_bytes / (f32 ? 4 : 2)),
                         os,
                         out_f32,
                         f32,
                         common_alignment({(uintptr_t)x, (uintptr_t)w->data, (uintptr_t)out, (uintptr_t)xs * elem,
                                           w->row_bytes, (uintptr_t)os * (out_f32 ? 4 : elem)})};
    LtOp op;
    int rc = op_make(&op, key, T, err);
    if (rc) return rc;
    const Call p = {x, w->data, out};
    auto it = c->gemms->algos.find(key);
    if (it == c->gemms->algos.end()) {
        if ((rc = choose(c, op, p, key, err))) return rc;
        it = c->gemms->algos.find(key);
    }
    cublasStatus_t s = go(c, op, p, &it->second);
    if (s != CUBLAS_STATUS_SUCCESS) { /* an algorithm from the file or of the bucket that does not serve these rows */
        c->gemms->algos.erase(it);
        if ((rc = choose(c, op, p, key, err))) return rc;
        s = go(c, op, p, &c->gemms->algos[key]);
    }
    if (s != CUBLAS_STATUS_SUCCESS) return lt_fail(err, s, "cublasLtMatmul", __LINE__);
    return 0;
}

template <class T> __global__ void bias_kernel(T *out, int64_t os, const float *bias, int64_t n) {
    T *row = out + (int64_t)blockIdx.x * os;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) row[i] = from_f<T>(to_f<T>(row[i]) + bias[i]);
}

int sl_cuda_linear(SlCuda *c, void *out, int64_t os, const void *x, int64_t xs, int64_t T, const sl_mat *w,
                   const float *bias, sl_err *err) {
    const int rc = product(c, out, os, x, xs, T, w, false, err);
    if (rc || !bias) return rc;
    /* The reference adds the bias to the f32 sum; here the product is rounded first. In bf16 that is one more rounding,
     * inside the tolerance band; in f32 it is the same. */
    if (c->act == SL_F32)
        bias_kernel<float><<<(unsigned)T, 256, 0, c->stream>>>((float *)out, os, bias, w->n);
    else
        bias_kernel<bf16><<<(unsigned)T, 256, 0, c->stream>>>((bf16 *)out, os, bias, w->n);
    SL_LAUNCHED("bias");
    return 0;
}
int sl_cuda_linear_f32out(SlCuda *c, float *out, int64_t os, const void *x, int64_t xs, int64_t T, const sl_mat *w,
                          sl_err *err) {
    return product(c, out, os, x, xs, T, w, true, err);
}
