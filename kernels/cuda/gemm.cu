/* gemm: dense products by cuBLASLt. For each shape (rows rounded up to a bucket, n, k, types) the library's first
 * choices are timed on the real operands the first time it is met, and the best is kept in a small text file
 * ($SLUICE_CACHE_DIR, else $CACHE_DIRECTORY, else $XDG_CACHE_HOME/sluice, else ~/.cache/sluice). Products that add to
 * their output are timed on a copy of it, which is freed again: timing in place would add several times.
 *
 * Two algorithms may differ in the last bit, so a choice must not depend on who asks or when: it is made under a lock
 * on the file and written at once, and every rank and every later life of this machine takes it from there. Without a
 * writable file, and for the router (where ranks that disagree in the last bit could send a token to different
 * experts), the library's own first choice is taken. f32 runs in full fp32 (no TF32). */
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include "kernels/cuda/context.h"

/* What becomes of a product. These numbers stand in the file. */
/* In the activation type; in f32; added to what is there, one rounding; gate and up of a gated activation. */
enum { TO_ACT = 0, TO_F32 = 1, ONTO = 2, GLU = 3 };
struct GemmKey {
    int64_t m, n, k, lda, ldb, ldc;
    int kind, f32, align; /* align: bytes that every operand's address and row distance are a multiple of, 2..256 */
    bool operator<(const GemmKey &o) const {
        return std::tie(m, n, k, lda, ldb, ldc, kind, f32, align) <
               std::tie(o.m, o.n, o.k, o.lda, o.ldb, o.ldc, o.kind, o.f32, o.align);
    }
};
struct SlGemmCache {
    std::map<GemmKey, cublasLtMatmulAlgo_t> algos;
    std::set<GemmKey> refused; /* products that no algorithm of the library can add: the plain kernel's */
    std::string path;          /* empty: nothing is timed */
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
    else if (const char *s = getenv("CACHE_DIRECTORY"))
        dir = s;
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
    while (fscanf(f, "%ld %ld %ld %ld %ld %ld %d %d %d", &k.m, &k.n, &k.k, &k.lda, &k.ldb, &k.ldc, &k.kind, &k.f32,
                  &k.align) == 9) {
        int ok = 1;
        for (auto &x : w) ok &= fscanf(f, "%llx", &x) == 1;
        if (!ok) break;
        memcpy(&g->algos[k], w, sizeof w);
    }
    fclose(f);
}
/* Held while a choice is made; *fd -1: no file can be kept.
 * Nobody may hold the lock while waiting for a peer. What was submitted so far may be a sum over ranks that a peer,
 * itself in front of the lock, has not begun: it is waited for before. */
static int open_locked(SlGemmCache *g) {
    if (g->path.empty()) return -1;
    const int fd = open(g->path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0 || flock(fd, LOCK_EX)) {
        if (fd >= 0) close(fd);
        g->path.clear();
        return -1;
    }
    return fd;
}
static int cache_lock(SlCuda *c, int *fd, sl_err *err) {
    SL_CU(cudaDeviceSynchronize());
    *fd = open_locked(c->gemms);
    return 0;
}
static void cache_append(int fd, const GemmKey &k, const cublasLtMatmulAlgo_t &algo) {
    unsigned long long w[8];
    memcpy(w, &algo, sizeof w);
    std::string line;
    for (long x : {(long)k.m, (long)k.n, (long)k.k, (long)k.lda, (long)k.ldb, (long)k.ldc, (long)k.kind, (long)k.f32,
                   (long)k.align})
        line += std::to_string(x) + " ";
    for (auto x : w) {
        char hex[20];
        snprintf(hex, sizeof hex, " %llx", x);
        line += hex;
    }
    line += '\n';
    lseek(fd, 0, SEEK_END);
    if (write(fd, line.data(), line.size()) < 0) return; /* a full disk: the choice holds for this life */
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
    const cudaDataType_t in = k.f32 ? CUDA_R_32F : CUDA_R_16BF,
                         out = k.f32 || k.kind == TO_F32 ? CUDA_R_32F : CUDA_R_16BF;
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
    float beta; /* 1: onto what is there */
};
static cublasStatus_t go(SlCuda *c, const LtOp &op, const Call &p, const cublasLtMatmulAlgo_t *algo) {
    const float one = 1;
    return cublasLtMatmul(c->lt, op.d, &one, p.w, op.w, p.x, op.x, &p.beta, p.out, op.o, p.out, op.o, algo, c->lt_ws,
                          c->lt_ws_bytes, c->stream);
}
constexpr int TRY = 8, REPS = 3;
static int candidates(SlCuda *c, const LtOp &op, const GemmKey &key, cublasLtMatmulHeuristicResult_t *r, int *n,
                      sl_err *err) {
    cublasLtMatmulPreference_t pref;
    SL_LT(cublasLtMatmulPreferenceCreate(&pref));
    const uint32_t align = (uint32_t)key.align; /* left alone, the library takes 256 for granted */
    for (auto attr : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                      CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
        cublasLtMatmulPreferenceSetAttribute(pref, attr, &align, sizeof align);
    cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &c->lt_ws_bytes,
                                         sizeof c->lt_ws_bytes);
    const cublasStatus_t s = cublasLtMatmulAlgoGetHeuristic(c->lt, op.d, op.w, op.x, op.o, op.o, pref, TRY, r, n);
    cublasLtMatmulPreferenceDestroy(pref);
    if (s != CUBLAS_STATUS_SUCCESS || *n == 0)
        return sl_err_set(err, SL_EINTERNAL, "cuBLASLt offers no algorithm for %ld x %ld x %ld (status %d)",
                          (long)key.m, (long)key.n, (long)key.k, (int)s);
    return 0;
}
/* Time the library's first choices on these operands. *best stays when none of them runs. */
static int fastest(SlCuda *c, const LtOp &op, const Call &p, const cublasLtMatmulHeuristicResult_t *r, int n, int *best,
                   sl_err *err) {
    float least = 1e30f;
    for (int i = 0; i < n; i++) {
        if (go(c, op, p, &r[i].algo) != CUBLAS_STATUS_SUCCESS) continue; /* also warms it up */
        SL_CU(cudaEventRecord(c->gemms->a, c->stream));
        for (int j = 0; j < REPS; j++) (void)go(c, op, p, &r[i].algo);
        SL_CU(cudaEventRecord(c->gemms->b, c->stream));
        SL_CU(cudaEventSynchronize(c->gemms->b));
        float ms;
        SL_CU(cudaEventElapsedTime(&ms, c->gemms->a, c->gemms->b));
        if (ms < least) least = ms, *best = i;
    }
    return 0;
}
/* The same for products that add: on a copy of the output, so that they add to real values and the output keeps its
 * own. Without memory for the copy nothing is timed and *best stays. */
static int fastest_onto(SlCuda *c, const LtOp &op, Call p, const GemmKey &key, int64_t T,
                        const cublasLtMatmulHeuristicResult_t *r, int n, int *best, sl_err *err) {
    const size_t elem = key.f32 ? 4 : 2, row = (size_t)key.ldc * elem;
    void *copy = nullptr;
    if (cudaMalloc(&copy, row * (size_t)T) != cudaSuccess) {
        (void)cudaGetLastError(); /* said and done: the next launch must not find it */
        return 0;
    }
    const cudaError_t e =
        cudaMemcpy2DAsync(copy, row, p.out, row, (size_t)key.n * elem, (size_t)T, cudaMemcpyDeviceToDevice, c->stream);
    p.out = copy;
    const int rc = e == cudaSuccess ? fastest(c, op, p, r, n, best, err)
                                    : sl_cuda_fail(err, e, "copy of a product's output", __FILE__, __LINE__);
    cudaFree(copy); /* waits for what runs on it */
    return rc;
}
/* A choice for the key, from the file or by timing. There may be none for products that add (not all algorithms can,
 * which only running them tells): `product` then takes the first that runs. */
static int choose(SlCuda *c, const LtOp &op, const Call &p, const GemmKey &key, int64_t T, sl_err *err) {
    cublasLtMatmulHeuristicResult_t r[TRY];
    int n = 0, best = key.kind == ONTO ? -1 : 0, rc = candidates(c, op, key, r, &n, err);
    if (rc) return rc;
    int fd = -1;
    if ((key.kind != TO_F32 || key.f32) && (rc = cache_lock(c, &fd, err))) return rc;
    if (fd >= 0) {
        cache_load(c->gemms); /* another rank may have chosen meanwhile */
        if (c->gemms->algos.count(key)) {
            close(fd);
            return 0;
        }
        if (n > 1)
            rc = key.kind == ONTO ? fastest_onto(c, op, p, key, T, r, n, &best, err)
                                  : fastest(c, op, p, r, n, &best, err);
        if (!rc && best >= 0) cache_append(fd, key, r[best].algo);
        close(fd);
    }
    if (!rc && best >= 0) c->gemms->algos[key] = r[best].algo;
    return rc;
}

/* Operands that are not 16-byte aligned (odd sizes, in tests and tiny models): the library's algorithms for them are
 * few and one was seen to fail with an illegal instruction, and speed does not matter there. */
constexpr int PT = 16;
template <class In, class Out>
__global__ void plain_kernel(Out *out, int64_t os, const In *x, int64_t xs, const In *w, int64_t ws, int64_t m,
                             int64_t n, int64_t k, int add) {
    __shared__ float a[PT][PT + 1], b[PT][PT + 1];
    const int64_t row = (int64_t)blockIdx.y * PT + threadIdx.y, col = (int64_t)blockIdx.x * PT + threadIdx.x,
                  wrow = (int64_t)blockIdx.x * PT + threadIdx.y;
    float sum = 0;
    for (int64_t k0 = 0; k0 < k; k0 += PT) {
        const int64_t i = k0 + threadIdx.x;
        a[threadIdx.y][threadIdx.x] = row < m && i < k ? to_f<In>(x[row * xs + i]) : 0.f;
        b[threadIdx.y][threadIdx.x] = wrow < n && i < k ? to_f<In>(w[wrow * ws + i]) : 0.f;
        __syncthreads();
#pragma unroll
        for (int j = 0; j < PT; j++) sum = fmaf(a[threadIdx.y][j], b[threadIdx.x][j], sum);
        __syncthreads();
    }
    if (row < m && col < n) out[row * os + col] = from_f<Out>(add ? to_f<Out>(out[row * os + col]) + sum : sum);
}
template <class In, class Out>
static int plain(SlCuda *c, const Call &p, const GemmKey &key, int64_t m, int add, sl_err *err) {
    for (int64_t r = 0; r < m; r += 65535 * PT) { /* a grid's second dimension is limited */
        const int64_t rows = std::min<int64_t>(m - r, 65535 * PT);
        const dim3 grid((unsigned)((key.n + PT - 1) / PT), (unsigned)((rows + PT - 1) / PT));
        plain_kernel<In, Out><<<grid, dim3(PT, PT), 0, c->stream>>>((Out *)p.out + r * key.ldc, key.ldc,
                                                                    (const In *)p.x + r * key.lda, key.lda,
                                                                    (const In *)p.w, key.ldb, rows, key.n, key.k, add);
    }
    SL_LAUNCHED("plain product");
    return 0;
}

static int common_alignment(std::initializer_list<uintptr_t> v) {
    uintptr_t all = 256;
    for (uintptr_t x : v) all |= x;
    return (int)(all & -all);
}

static int plain_any(SlCuda *c, const Call &p, const GemmKey &key, int64_t T, sl_err *err) {
    const int add = key.kind == ONTO;
    return key.f32              ? plain<float, float>(c, p, key, T, add, err)
           : key.kind == TO_F32 ? plain<bf16, float>(c, p, key, T, add, err)
                                : plain<bf16, bf16>(c, p, key, T, add, err);
}

static int product(SlCuda *c, void *out, int64_t os, const void *x, int64_t xs, int64_t T, const sl_mat *w, int kind,
                   sl_err *err) {
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
                         kind,
                         f32,
                         common_alignment({(uintptr_t)x, (uintptr_t)w->data, (uintptr_t)out, (uintptr_t)xs * elem,
                                           w->row_bytes, (uintptr_t)os * (kind == TO_F32 ? 4 : elem)})};
    const Call p = {x, w->data, out, kind == ONTO ? 1.f : 0.f};
    if (c->force.plain || key.align < 16 || c->gemms->refused.count(key)) return plain_any(c, p, key, T, err);
    LtOp op;
    int rc = op_make(&op, key, T, err);
    if (rc) return rc;
    auto it = c->gemms->algos.find(key);
    if (it == c->gemms->algos.end()) {
        if ((rc = choose(c, op, p, key, T, err))) return rc;
        it = c->gemms->algos.find(key);
    }
    const bool chosen = it != c->gemms->algos.end();
    cublasStatus_t s = chosen ? go(c, op, p, &it->second) : CUBLAS_STATUS_NOT_SUPPORTED;
    if (s != CUBLAS_STATUS_SUCCESS) { /* no choice, or one of the bucket that does not serve these rows */
        cublasLtMatmulHeuristicResult_t r[TRY];
        int n = 0;
        if ((rc = candidates(c, op, key, r, &n, err))) return rc;
        for (int i = 0; i < n && s != CUBLAS_STATUS_SUCCESS; i++) { /* a refusal touches nothing */
            s = go(c, op, p, &r[i].algo);
            if (s == CUBLAS_STATUS_SUCCESS && !chosen) c->gemms->algos[key] = r[i].algo;
        }
    }
    if (s == CUBLAS_STATUS_SUCCESS) return 0;
    if (kind != ONTO) return lt_fail(err, s, "cublasLtMatmul", __LINE__);
    c->gemms->refused.insert(key);
    return plain_any(c, p, key, T, err);
}

/* Every row starts as the bias (bf16 checkpoints hold it in bf16: nothing is lost), and the product adds itself: one
 * rounding of the sum, as in the reference, and one pass less than adding afterwards. */
template <class T> __global__ void bias_kernel(T *out, int64_t os, const float *bias, int64_t n) {
    T *row = out + (int64_t)blockIdx.x * os;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) row[i] = from_f<T>(bias[i]);
}

int sl_cuda_linear(SlCuda *c, void *out, int64_t os, const void *x, int64_t xs, int64_t T, const sl_mat *w,
                   const float *bias, sl_err *err) {
    if (!bias) return product(c, out, os, x, xs, T, w, TO_ACT, err);
    if (c->act == SL_F32)
        bias_kernel<float><<<(unsigned)T, 256, 0, c->stream>>>((float *)out, os, bias, w->n);
    else
        bias_kernel<bf16><<<(unsigned)T, 256, 0, c->stream>>>((bf16 *)out, os, bias, w->n);
    SL_LAUNCHED("bias");
    return product(c, out, os, x, xs, T, w, ONTO, err);
}
int sl_cuda_linear_f32out(SlCuda *c, float *out, int64_t os, const void *x, int64_t xs, int64_t T, const sl_mat *w,
                          sl_err *err) {
    return product(c, out, os, x, xs, T, w, TO_F32, err);
}
int sl_cuda_linear_add(SlCuda *c, void *out, int64_t os, const void *x, int64_t xs, int64_t T, const sl_mat *w,
                       sl_err *err) {
    return product(c, out, os, x, xs, T, w, ONTO, err);
}

/* ---- gate, up and activation ---- */

struct GluCall {
    void *out, *scratch;
    const void *x;
    int64_t xs, T;
    const sl_mat *gate, *up;
    sl_glu_kind kind;
    float limit;
};
static int glu_separate(SlCuda *c, const GluCall &g, sl_err *err) {
    const int64_t I = g.gate->n;
    int rc = product(c, g.out, I, g.x, g.xs, g.T, g.gate, TO_ACT, err);
    if (!rc) rc = product(c, g.scratch, I, g.x, g.xs, g.T, g.up, TO_ACT, err);
    return rc ? rc : sl_cuda_glu(c, g.out, g.out, I, g.scratch, I, g.T, I, g.kind, g.limit, err);
}
__global__ void dense_off_kernel(int *off, int rows) {
    off[0] = 0, off[1] = rows;
}
/* The grouped kernel with one expert, whose activation never leaves the registers. */
static int glu_fused(SlCuda *c, const GluCall &g, sl_err *err) {
    if (c->dense_rows != g.T) {
        dense_off_kernel<<<1, 1, 0, c->stream>>>(c->dense_off, (int)g.T);
        SL_LAUNCHED("offsets");
        c->dense_rows = g.T;
    }
    const SlGrouped grouped = {g.gate, g.up, c->dense_off, g.x, g.out, g.T};
    return sl_cuda_grouped(c, &grouped, err);
}
/* Turn about, so that a clock that falls meets both. *faster: 1 fused. */
static int glu_time(SlCuda *c, const GluCall &g, int *faster, sl_err *err) {
    float least[2] = {1e30f, 1e30f};
    for (int turn = 0; turn < 6; turn++) {
        int rc = 0;
        SL_CU(cudaEventRecord(c->gemms->a, c->stream));
        for (int j = 0; j < REPS && !rc; j++) rc = turn % 2 ? glu_fused(c, g, err) : glu_separate(c, g, err);
        if (rc) return rc;
        SL_CU(cudaEventRecord(c->gemms->b, c->stream));
        SL_CU(cudaEventSynchronize(c->gemms->b));
        float ms;
        SL_CU(cudaEventElapsedTime(&ms, c->gemms->a, c->gemms->b));
        least[turn % 2] = std::min(least[turn % 2], ms);
    }
    *faster = least[1] < least[0];
    return 0;
}
/* The choice is kept where those of products are, as an "algorithm" whose first word is 1 or 0. */
static int glu_choose(SlCuda *c, const GluCall &g, const GemmKey &key, sl_err *err) {
    int fused = 0;
    int rc = glu_separate(c, g, err); /* both warm, and the products' own choices made before the lock is taken */
    if (rc) return rc;
    const bool serves = glu_fused(c, g, nullptr) == 0;
    if (!serves) (void)cudaGetLastError();
    int fd = -1;
    if ((rc = cache_lock(c, &fd, err))) return rc;
    if (fd >= 0) {
        cache_load(c->gemms);
        if (c->gemms->algos.count(key)) {
            close(fd);
            return 0;
        }
        if (serves) rc = glu_time(c, g, &fused, err);
    }
    cublasLtMatmulAlgo_t choice = {};
    const unsigned long long word = (unsigned long long)fused;
    memcpy(&choice, &word, sizeof word);
    if (fd >= 0) {
        if (!rc) cache_append(fd, key, choice);
        close(fd);
    }
    if (!rc) c->gemms->algos[key] = choice;
    return rc;
}

int sl_cuda_glu_linear(SlCuda *c, void *out, void *scratch, const void *x, int64_t xs, int64_t T, const sl_mat *gate,
                       const sl_mat *up, sl_glu_kind kind, float limit, sl_err *err) {
    const GluCall g = {out, scratch, x, xs, T, gate, up, kind, limit};
    const bool can = kind == SL_GLU_SILU && gate->fmt == SL_W_BF16 && gate->count == 1 && xs == gate->k && T > 0 &&
                     T < (1ll << 31) && aligned16(x) && aligned16(out) && sl_cuda_grouped_ok(c, gate, up);
    if (!can || c->force.glu < 0) return glu_separate(c, g, err);
    if (c->force.glu > 0) return glu_fused(c, g, err);
    const GemmKey key = {bucket(T), gate->n, gate->k, xs, (int64_t)(gate->row_bytes / 2), gate->n, GLU, 0, 16};
    auto it = c->gemms->algos.find(key);
    if (it == c->gemms->algos.end()) {
        const int rc = glu_choose(c, g, key, err);
        if (rc) return rc;
        it = c->gemms->algos.find(key);
    }
    unsigned long long word;
    memcpy(&word, &it->second, sizeof word);
    return word ? glu_fused(c, g, err) : glu_separate(c, g, err);
}
