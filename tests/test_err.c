/* err: codes, context, truncation. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "ipc/err.h"
#include <errno.h>
#include <string.h>

static void sets_and_wraps(void **state) {
    (void)state;
    sl_err e = {0};
    assert_int_equal(sl_err_set(&e, SL_EDATA, "row %d: bad", 7), SL_EDATA);
    assert_string_equal(e.msg, "row 7: bad");
    assert_int_equal(sl_err_wrap(&e, "file %s", "x.jsonl"), SL_EDATA);
    assert_string_equal(e.msg, "file x.jsonl: row 7: bad");
    assert_int_equal(sl_err_sys(&e, SL_ETEMP, ENOENT, "open %s", "/a"), SL_ETEMP);
    assert_string_equal(e.msg, "open /a: No such file or directory");
    assert_int_equal(e.code, SL_ETEMP);
}

static void takes_null(void **state) {
    (void)state;
    assert_int_equal(sl_err_set(NULL, SL_ECONFIG, "x"), SL_ECONFIG);
    assert_int_equal(sl_err_sys(NULL, SL_ETEMP, EIO, "x"), SL_ETEMP);
    assert_int_equal(sl_err_wrap(NULL, "x"), SL_EINTERNAL);
}

static void long_texts_keep_the_cause(void **state) {
    (void)state;
    char big[2 * SL_ERR_MAX];
    memset(big, 'c', sizeof big - 1);
    big[sizeof big - 1] = 0;
    sl_err e;
    sl_err_set(&e, SL_EDATA, "the cause");
    sl_err_wrap(&e, "%s", big);
    assert_true(strlen(e.msg) < SL_ERR_MAX);
    assert_non_null(strstr(e.msg, ": the cause"));
    sl_err_set(&e, SL_EDATA, "%s", big);
    assert_int_equal(strlen(e.msg), SL_ERR_MAX - 1);
    for (int i = 0; i < 10; i++) sl_err_wrap(&e, "%s", big);
    assert_true(strlen(e.msg) < SL_ERR_MAX);
    sl_err_sys(&e, SL_EDATA, EIO, "%s", big);
    assert_true(strlen(e.msg) < SL_ERR_MAX);
}

static void maps_to_exit_codes(void **state) {
    (void)state;
    const int in[] = {0, 5, SL_EDATA, SL_EUSAGE, SL_ETEMP, SL_ECONFIG, SL_EINTERNAL, -999},
              out[] = {0, 0, 1, 2, 75, 78, 70, 70};
    for (int i = 0; i < 8; i++) assert_int_equal(sl_err_exit(in[i]), out[i]);
}

int main(void) {
    const struct CMUnitTest t[] = {cmocka_unit_test(sets_and_wraps), cmocka_unit_test(takes_null),
                                   cmocka_unit_test(long_texts_keep_the_cause), cmocka_unit_test(maps_to_exit_codes)};
    return cmocka_run_group_tests_name("err", t, NULL, NULL);
}
