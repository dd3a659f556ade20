/* config: every key round-trips, every fault is named with its line and the nearest key. */
#include "daemon/config.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static sl_config *fresh(void) {
    sl_config *c = malloc(sizeof *c);
    assert_non_null(c);
    sl_config_default(c);
    return c;
}

static int parse(sl_config *c, const char *text, sl_err *e) {
    return sl_config_parse(c, "test.ini", text, strlen(text), e);
}

static char *print(const sl_config *c, size_t *n) {
    char *text = NULL;
    FILE *f = open_memstream(&text, n);
    assert_non_null(f);
    sl_config_print(c, f);
    fclose(f);
    return text;
}

static void same_values(const sl_config *a, const sl_config *b) {
    int n;
    const sl_config_key *k = sl_config_keys(&n);
    for (int i = 0; i < n; i++)
        if (memcmp((const char *)a + k[i].offset, (const char *)b + k[i].offset, k[i].size))
            fail_msg("[%s] %s differs after a round trip", k[i].section, k[i].key);
}

static void default_file_is_the_default(void **s) {
    (void)s;
    sl_err e = {0};
    sl_config *a = fresh(), *b = fresh();
    size_t n;
    char *text = print(NULL, &n);
    if (sl_config_parse(a, "default", text, n, &e)) fail_msg("%s", e.msg);
    same_values(a, b);
    free(text), free(a), free(b);
}

/* A value other than the default for every key, printed and parsed again. */
static void every_key_round_trips(void **s) {
    (void)s;
    sl_err e = {0};
    sl_config *a = fresh(), *b = fresh(), *def = fresh();
    int n;
    const sl_config_key *k = sl_config_keys(&n);
    for (int i = 0; i < n; i++) {
        char set[256], value[128];
        const char *last = strrchr(k[i].unit, '|');
        switch (k[i].type) {
        case SL_KEY_STR:
            snprintf(value, sizeof value, "/some/where %d", i);
            break;
        case SL_KEY_CHOICE:
            snprintf(value, sizeof value, "%s", last + 1);
            break;
        case SL_KEY_BOOL:
            snprintf(value, sizeof value, "%s", strcmp(k[i].def, "no") ? "no" : "yes");
            break;
        case SL_KEY_DOUBLE:
            snprintf(value, sizeof value, "%s", "0.000123456789");
            break;
        case SL_KEY_SIZE:
        case SL_KEY_MIB:
            snprintf(value, sizeof value, "%s", "3MiB");
            break;
        case SL_KEY_MS:
            snprintf(value, sizeof value, "%s", "3777ms");
            break;
        default:
            snprintf(value, sizeof value, "%.0f", atof(k[i].def) + 1 <= k[i].max ? atof(k[i].def) + 1 : k[i].min);
        }
        snprintf(set, sizeof set, "%s.%s=%s", k[i].section, k[i].key, value);
        if (sl_config_set(a, set, &e)) fail_msg("%s", e.msg);
        if (k[i].type != SL_KEY_CHOICE && !memcmp((char *)a + k[i].offset, (char *)def + k[i].offset, k[i].size))
            fail_msg("%s did not change anything", set);
    }
    size_t len;
    char *text = print(a, &len);
    if (sl_config_parse(b, "printed", text, len, &e)) fail_msg("%s", e.msg);
    same_values(a, b);
    free(text), free(a), free(b), free(def);
}

/* Every field of the boot block that is a setting has a key; fields that preflight or topology fill are listed here. */
static void offsets_do_not_overlap(void **s) {
    (void)s;
    int n;
    const sl_config_key *k = sl_config_keys(&n);
    for (int i = 0; i < n; i++)
        for (int j = 0; j < i; j++)
            if (k[i].offset < k[j].offset + k[j].size && k[j].offset < k[i].offset + k[i].size)
                fail_msg("[%s] %s and [%s] %s share memory", k[i].section, k[i].key, k[j].section, k[j].key);
}

static void faults_are_named(void **s) {
    (void)s;
    static const struct {
        const char *text, *a, *b;
    } bad[] = {
        {"[store]\npaht = /x\n", "test.ini:2", "'path' in [store]"},
        {"[batch]\n\n# c\ntoken = 3\n", "test.ini:4", "'tokens' in [batch]"},
        {"[stor]\npath = /x\n", "test.ini:2", "no such section"},
        {"[batch]\ntokens = 0\n", "test.ini:2", "out of range"},
        {"[batch]\ntokens = -5\n", "test.ini:2", "not a whole number"},
        {"[batch]\ntokens = 99999999999\n", "test.ini:2", "out of range"},
        {"[batch]\nwait = 5 parsecs\n", "test.ini:2", "unknown unit 'parsecs'"},
        {"[store]\nlayout = tar\n", "test.ini:2", "shards|files"},
        {"[store]\npath = /a\nlayout = files\npath = /b\n", "test.ini:4", "first in line 2"},
        {"[store]\ngarbage\n", "test.ini:2", "key = value"},
        {"path = /x\n", "test.ini:1", "unknown key"},
        {"[store]\nshard_size = nan\n", "test.ini:2", "not a number"},
        {"[store]\ndirect_io = maybe\n", "test.ini:2", "yes|no"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        sl_config *c = fresh();
        sl_err e = {0};
        assert_int_equal(parse(c, bad[i].text, &e), SL_ECONFIG);
        if (!strstr(e.msg, bad[i].a) || !strstr(e.msg, bad[i].b)) fail_msg("case %zu: %s", i, e.msg);
        free(c);
    }
}

static void bytes_that_are_no_text(void **s) {
    (void)s;
    sl_config *c = fresh();
    sl_err e = {0};
    assert_int_equal(sl_config_parse(c, "t", "[store]\npath = a\0b\n", 19, &e), SL_ECONFIG);
    assert_non_null(strstr(e.msg, "t:2: NUL"));
    char *line = malloc(20000);
    memset(line, 'x', 20000);
    memcpy(line, "[store]\npath = ", 15);
    assert_int_equal(sl_config_parse(c, "t", line, 20000, &e), SL_ECONFIG);
    assert_non_null(strstr(e.msg, "t:2: the line has"));
    assert_int_equal(parse(c, "", &e), SL_OK);
    free(line), free(c);
}

static void units(void **s) {
    (void)s;
    sl_config *c = fresh();
    sl_err e = {0};
    assert_int_equal(parse(c,
                           "[store]\nshard_size = 1.5 GiB\nreserve = 2MB ; comment\ncommit_size = 1500KiB\ncommit_time "
                           "= 2\n[batch]\nwait = 1.5s\n",
                           &e),
                     SL_OK);
    assert_int_equal(c->boot.shard_bytes, 1536ull << 20);
    assert_int_equal(c->boot.reserve_bytes, 2000000);
    assert_int_equal(c->boot.commit_mb, 2); /* rounded up to MiB */
    assert_int_equal(c->boot.commit_ms, 2000);
    assert_int_equal(c->boot.batch_wait_ms, 1500);
    assert_true(sl_config_set(c, "store.reserve", &e) == SL_ECONFIG);
    assert_true(sl_config_set(c, "nodot=1", &e) == SL_ECONFIG);
    free(c);
}

static void what_must_agree(void **s) {
    (void)s;
    static const char *const bad[][2] = {
        {"model.path=", "model"},
        {"store.path=", "store"},
        {"memory.batch_depth=12", "power"},
        {"supervise.backoff_min=10s", "backoff"},
        {"feed.address=tcp://*:5555", "curve_dir"},
        {"daemon.control_address=tcp://*:5556", "control_address"},
        {"daemon.progress_address=tcp://127.0.0.1:5557", "progress_address"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        sl_config *c = fresh();
        sl_err e = {0};
        assert_int_equal(sl_config_set(c, "model.path=/m", &e), 0);
        assert_int_equal(sl_config_set(c, "store.path=/s", &e), 0);
        assert_int_equal(sl_config_check(c, &e), SL_OK);
        assert_int_equal(sl_config_set(c, bad[i][0], &e), 0);
        assert_int_equal(sl_config_check(c, &e), SL_ECONFIG);
        if (!strstr(e.msg, bad[i][1])) fail_msg("%s: %s", bad[i][0], e.msg);
        free(c);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(default_file_is_the_default),
        cmocka_unit_test(every_key_round_trips),
        cmocka_unit_test(offsets_do_not_overlap),
        cmocka_unit_test(faults_are_named),
        cmocka_unit_test(bytes_that_are_no_text),
        cmocka_unit_test(units),
        cmocka_unit_test(what_must_agree),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
