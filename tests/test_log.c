/* log: lines as others parse them; levels, journal prefixes, repeats, no forged lines. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "ipc/err.h"
#include "ipc/log.h"
#include <regex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* What a child with its stderr in a pipe writes. */
static char *capture(void (*f)(void)) {
    static char buf[1 << 16];
    int p[2];
    assert_int_equal(pipe(p), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (!pid) {
        dup2(p[1], STDERR_FILENO);
        f();
        _exit(0);
    }
    close(p[1]);
    size_t n = 0;
    for (ssize_t r; (r = read(p[0], buf + n, sizeof buf - 1 - n)) > 0;) n += (size_t)r;
    buf[n] = 0;
    close(p[0]);
    waitpid(pid, NULL, 0);
    return buf;
}

static void assert_matches(const char *text, const char *pattern) {
    regex_t re;
    assert_int_equal(regcomp(&re, pattern, REG_EXTENDED | REG_NOSUB), 0);
    int rc = regexec(&re, text, 0, NULL, 0);
    regfree(&re);
    if (rc) fail_msg("'%s' does not match '%s'", text, pattern);
}

static unsigned lines(const char *s) {
    unsigned n = 0;
    for (; *s; s++) n += *s == '\n';
    return n;
}

static void plain(void) {
    unsetenv("JOURNAL_STREAM");
    sl_log_init("gather", SL_INFO);
    sl_log(SL_DEBUG, "hidden");
    sl_log(SL_INFO, "batch %d", 17);
}
/* A file as stderr, in a terminal or service whose own stderr is the journal. */
static void journal_of_another(void) {
    setenv("JOURNAL_STREAM", "8:1", 1);
    sl_log_init("rank0.1", SL_INFO);
    sl_log(SL_INFO, "hi");
}

static void journal(void) {
    char stream[64];
    struct stat st;
    assert_int_equal(fstat(STDERR_FILENO, &st), 0);
    snprintf(stream, sizeof stream, "%llu:%llu", (unsigned long long)st.st_dev, (unsigned long long)st.st_ino);
    setenv("JOURNAL_STREAM", stream, 1);
    sl_log_init("rank0.1", SL_DEBUG);
    sl_log(SL_DEBUG, "d");
    sl_log(SL_ERROR, "e");
}
static void repeats(void) {
    unsetenv("JOURNAL_STREAM");
    sl_log_init("w", SL_INFO);
    for (int i = 0; i < 100; i++) sl_log(SL_ERROR, "disk on fire");
    for (int i = 0; i < 3; i++) sl_log(SL_INFO, "never collapsed");
    sl_log(SL_ERROR, "another");
    for (int i = 0; i < 3; i++) sl_log(SL_ERROR, "another");
    sl_log_flush();
}
static void hostile(void) {
    unsetenv("JOURNAL_STREAM");
    char big[10000];
    memset(big, 'x', sizeof big - 1);
    big[sizeof big - 1] = 0;
    sl_log_init("a-name-that-is-much-longer-than-thirty-one-bytes", SL_INFO);
    sl_log(SL_INFO, "a\nb\033[31m%c", 0x7f);
    sl_log(SL_WARN, "%s", big);
}

static void writes_lines(void **state) {
    (void)state;
    assert_matches(capture(journal_of_another), "^[0-9-]+T[0-9:.]+Z INFO  rank0.1\\[[0-9]+\\] hi\n$");
    char *s = capture(plain);
    assert_int_equal(lines(s), 1);
    assert_matches(
        s, "^20[0-9]{2}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\\.[0-9]{3}Z INFO  gather\\[[0-9]+\\] batch 17\n$");
    s = capture(journal);
    assert_matches(s, "^<7>rank0.1\\[[0-9]+\\] d\n<3>rank0.1\\[[0-9]+\\] e\n$");
}

static void collapses_repeated_errors_only(void **state) {
    (void)state;
    char *s = capture(repeats);
    assert_int_equal(lines(s), 7);
    assert_non_null(strstr(s, "disk on fire (repeated 99 times)\n"));
    assert_non_null(strstr(s, "another (repeated 3 times)\n"));
}

static void keeps_a_line_a_line(void **state) {
    (void)state;
    char *s = capture(hostile);
    assert_int_equal(lines(s), 2);
    assert_null(strchr(s, '\033'));
    assert_null(strchr(s, 0x7f));
    assert_non_null(strstr(s, "a|b [31m \n"));
    assert_non_null(strstr(s, "xxx...\n"));
}

static void parses_levels(void **state) {
    (void)state;
    sl_level lv;
    assert_int_equal(sl_log_level_parse("warn", &lv), 0);
    assert_int_equal(lv, SL_WARN);
    assert_int_equal(sl_log_level_parse("loud", &lv), SL_EUSAGE);
    unsigned long before = sl_log_warnings();
    sl_log_init("t", SL_ERROR); /* a warning counts even when it is not shown */
    sl_log(SL_WARN, "x");
    assert_int_equal(sl_log_warnings(), before + 1);
}

int main(void) {
    const struct CMUnitTest t[] = {cmocka_unit_test(writes_lines), cmocka_unit_test(collapses_repeated_errors_only),
                                   cmocka_unit_test(keeps_a_line_a_line), cmocka_unit_test(parses_levels)};
    return cmocka_run_group_tests_name("log", t, NULL, NULL);
}
