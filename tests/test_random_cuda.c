/* Random weights made on the GPU are the host's, bit for bit: `test_random_cuda GOLDEN/FAMILY...` makes each family's
 * model twice, in several formats and widths, and compares every matrix. */
#include "stages/compute/forward_internal.h"
#include "stages/compute/weights.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures, compared;

static void same(sl_ops *gpu, const char *what, int l, const sl_mat *a, const sl_mat *b) {
    uint64_t n = (uint64_t)a->count * a->stride, sn = a->scale ? (uint64_t)a->count * a->scale_stride : 0;
    sl_err err = {0};
    if (!a->data) return;
    compared++;
    void *got = malloc(n + sn);
    int rc = gpu->download(gpu->ctx, got, b->data, n, &err);
    if (!rc && sn) rc = gpu->download(gpu->ctx, (char *)got + n, b->scale, sn, &err);
    if (rc || a->stride != b->stride || memcmp(a->data, got, n) || (sn && memcmp(a->scale, (char *)got + n, sn))) {
        failures++;
        printf("FAIL: %s layer %d, format %s [%lld][%lld, %lld]: %s\n", what, l, sl_wfmt_name(a->fmt),
               (long long)a->count, (long long)a->n, (long long)a->k, rc ? err.msg : "not the same bits");
    }
    free(got);
}

static void compare(const char *dir, int format, int rank, int tp) {
    sl_err err = {0};
    sl_ops *ops[2] = {0};
    sl_model *m[2] = {0};
    sl_spec *spec = calloc(1, sizeof *spec);
    int rc = sl_spec_load(spec, dir, 0, &err);
    sl_load_opts o = {.model = dir,
                      .rank = rank,
                      .tp = tp,
                      .top_layer = spec->n_layers,
                      .want_head = 1,
                      .random = 1,
                      .seed = 7,
                      .random_format = format};
    if (!rc && sl_spec_check_tp(spec, SL_EXPERTS_AUTO, tp, &err)) return;
    if (!rc) rc = sl_ops_cpu_create(&ops[0], 1, SL_BF16, &err);
    if (!rc) rc = sl_ops_cuda_create(&ops[1], 0, SL_BF16, &err);
    for (int i = 0; i < 2 && !rc; i++) rc = sl_model_load(&m[i], &o, ops[i], &err);
    if (rc) {
        failures++;
        printf("FAIL: %s: %s\n", dir, err.msg);
        return;
    }
    same(ops[1], dir, -1, &m[0]->embed, &m[1]->embed);
    same(ops[1], dir, -1, &m[0]->lm_head, &m[1]->lm_head);
    for (int l = 0; l < m[0]->top_layer; l++) {
        sl_mat *a[SL_LAYER_MATS], *b[SL_LAYER_MATS];
        int n = sl_forward_layer_mats(&m[0]->layer[l], a), k = sl_forward_layer_mats(&m[1]->layer[l], b);
        if (n != k) failures++, printf("FAIL: %s layer %d: %d matrices and %d\n", dir, l, n, k);
        for (int i = 0; i < n && i < k; i++) same(ops[1], dir, l, a[i], b[i]);
        same(ops[1], dir, l, &m[0]->layer[l].router, &m[1]->layer[l].router);
    }
    for (int i = 0; i < 2; i++) sl_model_free(m[i], ops[i]), ops[i]->destroy(ops[i]);
    sl_spec_free(spec);
    free(spec);
}

int main(int argc, char **argv) {
    if (!sl_ops_cuda_devices()) return printf("SKIP: no CUDA device\n"), 77;
    for (int i = 1; i < argc; i++) {
        compare(argv[i], -1, 0, 1);
        compare(argv[i], -1, 1, 2);
        compare(argv[i], SL_W_F32, 1, 2);
        compare(argv[i], SL_W_BF16, 0, 1);
        compare(argv[i], SL_W_FP8, 0, 1);
    }
    printf("%d matrices compared, %d failures\n", compared, failures);
    return failures || !compared;
}
