/* gpus: what CUDA_VISIBLE_DEVICES leaves of the GPUs that are there. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "daemon/gpus.h"

static const char *const uuid[] = {"GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44"};

static void lists(void **state) {
    (void)state;
    const struct {
        const char *list;
        int n, index[4];
    } t[] = {
        {NULL, 4, {0, 1, 2, 3}}, {"", 0, {0}},
        {"1", 1, {1}},           {"3,0", 2, {3, 0}},
        {" 2 , 1 ", 2, {2, 1}},  {"0,1,2,3", 4, {0, 1, 2, 3}},
        {"0,4,1", 1, {0}}, /* ends at what names no GPU */
        {"0,-1,1", 1, {0}},      {"-1", 0, {0}},
        {"none", 0, {0}},        {"0,,1", 1, {0}},
        {"0;1", 0, {0}},         {"1x", 0, {0}},
        {"0 1", 1, {0}},         {"18446744073709551616", 0, {0}},
        {"1,1", 0, {0}}, /* twice: none at all */
        {"1,GPU-aa22", 0, {0}},  {"GPU-bb", 1, {2}},
        {"GPU-aa", 0, {0}}, /* two of them */
        {"GPU-", 0, {0}},        {"GPU-aa11,GPU-cc44", 2, {0, 3}},
        {"GPU-aa113", 0, {0}},   {"MIG-aa11", 0, {0}},
    };
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        int got[SL_GPUS_MAX], n = sl_gpus_visible(t[i].list, uuid, 4, got);
        if (n != t[i].n) fail_msg("%s: %d GPUs, expected %d", t[i].list ? t[i].list : "(unset)", n, t[i].n);
        for (int k = 0; k < n; k++) assert_int_equal(got[k], t[i].index[k]);
    }
}

static void nothing_there(void **state) {
    (void)state;
    int got[SL_GPUS_MAX];
    assert_int_equal(sl_gpus_visible(NULL, uuid, 0, got), 0);
    assert_int_equal(sl_gpus_visible("0", uuid, 0, got), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(lists), cmocka_unit_test(nothing_there)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
