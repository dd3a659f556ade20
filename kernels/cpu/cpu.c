#include "kernels/cpu/cpu.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- instruction sets -----------------------------------------------------------------------------------------------
 */

static int have(const sl_isa *isa) {
    __builtin_cpu_init();
    if (isa == &sl_isa_base) return 1;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    if (isa == &sl_isa_avx2) return 1;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return 0;
    return isa == &sl_isa_avx512 || __builtin_cpu_supports("avx512bf16");
}

const sl_isa *sl_isa_pick(const char *name) {
    static const sl_isa *const all[] = {&sl_isa_avx512bf16, &sl_isa_avx512, &sl_isa_avx2, &sl_isa_base};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (name && strcmp(name, all[i]->name)) continue;
        /* Intel's dot product takes two cycles where a multiply-add takes half a one: f32 panels are the faster way
         * there */
        if (!name && all[i]->bf16_dot && !__builtin_cpu_is("amd")) continue;
        if (have(all[i])) return all[i];
    }
    return NULL;
}

/* ---- memory ---------------------------------------------------------------------------------------------------------
 */

static int cpu_alloc(void *ctx, void **p, uint64_t bytes, const char *what, sl_err *err) {
    (void)ctx;
    *p = NULL;
    if (bytes > (uint64_t)1 << 48 ||
        !(*p = aligned_alloc(256, (size_t)((bytes + 255) & ~(uint64_t)255) + (bytes ? 0 : 256))))
        return sl_err_set(err, SL_ETEMP, "no memory for %s: %llu bytes", what, (unsigned long long)bytes);
    return 0;
}
static void cpu_free(void *ctx, void *p) {
    (void)ctx;
    free(p);
}
static int cpu_copy(void *ctx, void *dst, const void *src, uint64_t bytes, sl_err *err) {
    (void)ctx;
    (void)err;
    if (dst != src && bytes) memcpy(dst, src, (size_t)bytes);
    return 0;
}
static int cpu_sync(void *ctx, sl_err *err) {
    (void)ctx;
    (void)err;
    return 0;
}
static int cpu_set_workspace(void *ctx, void *ws, uint64_t bytes, sl_err *err) {
    sl_cpu *c = ctx;
    (void)err;
    c->ws = ws;
    c->ws_bytes = bytes;
    return 0;
}

int sl_cpu_ws(sl_cpu *c, uint64_t bytes, const char *op, uint8_t **out, sl_err *err) {
    if (bytes > c->ws_bytes)
        return sl_err_set(err, SL_EINTERNAL, "%s needs %llu bytes of workspace, %llu were set", op,
                          (unsigned long long)bytes, (unsigned long long)c->ws_bytes);
    *out = c->ws;
    return 0;
}

int sl_cpu_own(sl_cpu *c, uint64_t bytes, float **out, sl_err *err) {
    if (bytes > c->own_bytes) {
        free(c->own);
        c->own_bytes = 0;
        c->own = aligned_alloc(64, (size_t)sl_cpu_up(bytes));
        if (!c->own) return sl_err_set(err, SL_ETEMP, "no memory for %llu bytes of logits", (unsigned long long)bytes);
        c->own_bytes = bytes;
    }
    *out = c->own;
    return 0;
}

static uint64_t cpu_workspace_bytes(void *ctx, int64_t T, int64_t max_seq, int64_t H, int64_t widest,
                                    const sl_attn *a) {
    (void)T;
    (void)H;
    (void)widest;
    return a ? sl_cpu_attention_bytes(ctx, max_seq, a) : 0;
}

/* ---- weights are used in place --------------------------------------------------------------------------------------
 */

static uint64_t cpu_prepare_bytes(void *ctx, const sl_mat *w) {
    (void)ctx;
    (void)w;
    return 0;
}
static int cpu_prepare(void *ctx, sl_mat *out, const sl_mat *w, void *scratch, sl_err *err) {
    (void)ctx;
    (void)scratch;
    (void)err;
    *out = *w;
    return 0;
}

/* ---- capture: the copy is done when the call returns
 * ----------------------------------------------------------------- */

static int cpu_capture_copy(void *ctx, void *host, const void *dev, uint64_t bytes, uint64_t *ticket, sl_err *err) {
    (void)ctx;
    (void)err;
    memcpy(host, dev, (size_t)bytes);
    *ticket = 0;
    return 0;
}
static int cpu_capture_done(void *ctx, uint64_t ticket, int *done, sl_err *err) {
    (void)ctx;
    (void)ticket;
    (void)err;
    *done = 1;
    return 0;
}
static int cpu_capture_wait(void *ctx, uint64_t ticket, sl_err *err) {
    (void)ctx;
    (void)ticket;
    (void)err;
    return 0;
}
static int cpu_register_arena(void *ctx, void *base, uint64_t bytes, sl_err *err) {
    (void)ctx;
    (void)base;
    (void)bytes;
    (void)err;
    return 0;
}

/* ---- life -----------------------------------------------------------------------------------------------------------
 */

static void cpu_destroy(sl_ops *ops) {
    if (!ops) return;
    sl_cpu *c = ops->ctx;
    sl_pool_destroy(c->pool);
    for (int t = 0; t < c->threads; t++) free(c->scratch[t]);
    free(c->own);
    free(c);
}

static const sl_ops table = {
    .name = "cpu",
    .alloc = cpu_alloc,
    .free = cpu_free,
    .upload = cpu_copy,
    .download = cpu_copy,
    .sync = cpu_sync,
    .prepare_bytes = cpu_prepare_bytes,
    .prepare = cpu_prepare,
    .embed = sl_cpu_embed,
    .rmsnorm = sl_cpu_rmsnorm,
    .add = sl_cpu_add,
    .linear = sl_cpu_linear,
    .rope = sl_cpu_rope,
    .mla_k = sl_cpu_mla_k,
    .attention = sl_cpu_attention,
    .glu = sl_cpu_glu,
    .route = sl_cpu_route,
    .moe = sl_cpu_moe,
    .moe_bytes = sl_cpu_moe_bytes,
    .set_workspace = cpu_set_workspace,
    .workspace_bytes = cpu_workspace_bytes,
    .nll = sl_cpu_nll,
    .fingerprint = sl_cpu_fingerprint,
    .capture_copy = cpu_capture_copy,
    .capture_done = cpu_capture_done,
    .capture_wait = cpu_capture_wait,
    .register_arena = cpu_register_arena,
    .destroy = cpu_destroy,
};

int sl_ops_cpu_create_isa(sl_ops **out, int threads, sl_dtype act, const char *isa, sl_err *err) {
    *out = NULL;
    if (act != SL_F32 && act != SL_BF16)
        return sl_err_set(err, SL_EUSAGE, "the CPU backend computes in f32 or bf16, not %d", (int)act);
    const sl_isa *use = sl_isa_pick(isa);
    if (!use)
        return sl_err_set(err, SL_EUSAGE,
                          "instruction set '%s': unknown, or this processor lacks it (base, avx2, avx512, avx512bf16)",
                          isa);
    sl_cpu *c = calloc(1, sizeof *c);
    if (!c) return sl_err_set(err, SL_ETEMP, "no memory for the CPU backend");
    int rc = sl_pool_create(&c->pool, threads, err);
    if (rc) {
        free(c);
        return rc;
    }
    c->ops = table;
    c->ops.act = act;
    c->ops.ctx = c;
    c->isa = use;
    c->bf = act == SL_BF16;
    c->threads = threads;
    long l2 = sysconf(_SC_LEVEL2_CACHE_SIZE); /* 0 or -1 where the system does not say */
    c->b_bytes = l2 > 0 && l2 / 2 < SL_GEMM_B_BYTES ? l2 / 2 : SL_GEMM_B_BYTES;
    for (int t = 0; t < threads; t++) {
        if (!(c->scratch[t] = aligned_alloc(4096, SL_GEMM_SCRATCH))) {
            rc = sl_err_set(err, SL_ETEMP, "no memory for the scratch of compute thread %d of %d", t + 1, threads);
            cpu_destroy(&c->ops);
            return rc;
        }
    }
    *out = &c->ops;
    return 0;
}

int sl_ops_cpu_create(sl_ops **out, int threads, sl_dtype act, sl_err *err) {
    return sl_ops_cpu_create_isa(out, threads, act, NULL, err);
}
