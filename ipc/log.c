#include "ipc/log.h"
#include "ipc/err.h"
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define LINE_MAX_BYTES 4096
#define REPEAT_S       10

static const char *const level_name[] = {"DEBUG", "INFO", "WARN", "ERROR"};
static const int level_prio[] = {7, 6, 4, 3}; /* syslog priorities for the journal */

/* This process's log context: the one global a library may have, because a log line can come from anywhere. */
static struct {
    char who[32];
    sl_level min;
    bool journal;
    atomic_ulong warnings;
    pthread_mutex_t mu; /* guards what follows: the error that may be repeating */
    char last[512];
    time_t last_at;
    unsigned long held;
} ctx = {.who = "sluice", .min = SL_INFO, .mu = PTHREAD_MUTEX_INITIALIZER};

/* JOURNAL_STREAM names the device and inode of what systemd gave as stderr; a program that was started with another
 * stderr, from a service or a terminal that runs as one, inherits the variable all the same. */
static bool stderr_is_journal(void) {
    const char *s = getenv("JOURNAL_STREAM");
    char *end = NULL;
    struct stat st;
    if (!s || fstat(STDERR_FILENO, &st)) return false;
    unsigned long long dev = strtoull(s, &end, 10), ino = *end == ':' ? strtoull(end + 1, NULL, 10) : 0;
    return dev == st.st_dev && ino == st.st_ino;
}

void sl_log_init(const char *who, sl_level min) {
    snprintf(ctx.who, sizeof ctx.who, "%s", who);
    ctx.min = min;
    ctx.journal = stderr_is_journal();
}

unsigned long sl_log_warnings(void) {
    return atomic_load_explicit(&ctx.warnings, memory_order_relaxed);
}

int sl_log_level_parse(const char *name, sl_level *out) {
    static const char *const names[] = {"debug", "info", "warn", "error"};
    for (int i = 0; i < 4; i++)
        if (!strcmp(name, names[i])) {
            *out = (sl_level)i;
            return 0;
        }
    return SL_EUSAGE;
}

/* One line, one write(2): short writes are finished, so that a line is whole even on a full pipe. */
static void emit(sl_level lv, const char *text) {
    char line[LINE_MAX_BYTES];
    int n;
    if (ctx.journal) {
        n = snprintf(line, sizeof line - 1, "<%d>%s[%d] %s", level_prio[lv], ctx.who, (int)getpid(), text);
    } else {
        struct timespec ts;
        struct tm tm;
        clock_gettime(CLOCK_REALTIME, &ts);
        gmtime_r(&ts.tv_sec, &tm);
        n = snprintf(line, sizeof line - 1, "%04d-%02d-%02dT%02d:%02d:%02d.%03ldZ %-5s %s[%d] %s", tm.tm_year + 1900,
                     tm.tm_mon + 1, tm.tm_mday, tm.tm_hour, tm.tm_min, tm.tm_sec, ts.tv_nsec / 1000000, level_name[lv],
                     ctx.who, (int)getpid(), text);
    }
    if (n < 0) return;
    size_t len = (size_t)n;
    if (len > sizeof line - 2) {
        len = sizeof line - 2;
        line[len - 1] = line[len - 2] = line[len - 3] = '.';
    }
    for (size_t i = 0; i < len; i++) /* a message cannot forge a second line or send terminal codes */
        if ((unsigned char)line[i] < 0x20 || line[i] == 0x7f) line[i] = line[i] == '\n' ? '|' : ' ';
    line[len++] = '\n';
    for (size_t at = 0; at < len;) {
        ssize_t w = write(STDERR_FILENO, line + at, len - at);
        if (w < 0 && errno == EINTR) continue;
        if (w <= 0) return; /* nowhere left to complain */
        at += (size_t)w;
    }
}

/* Called with ctx.mu held. */
static void flush_held(void) {
    if (!ctx.held) return;
    char text[sizeof ctx.last + 40];
    snprintf(text, sizeof text, "%s (repeated %lu times)", ctx.last, ctx.held);
    ctx.held = 0;
    emit(SL_ERROR, text);
}

void sl_log(sl_level lv, const char *fmt, ...) {
    if (lv == SL_WARN) atomic_fetch_add_explicit(&ctx.warnings, 1, memory_order_relaxed);
    if (lv < ctx.min) return;
    char text[LINE_MAX_BYTES - 96];
    va_list ap;
    va_start(ap, fmt);
    /* NOLINTNEXTLINE(clang-analyzer-valist.Uninitialized): the line before is va_start */
    int n = vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (n < 0) return;
    if (n >= (int)sizeof text) memcpy(text + sizeof text - 4, "...", 4);

    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    pthread_mutex_lock(&ctx.mu);
    if (ctx.held && now.tv_sec - ctx.last_at >= REPEAT_S) flush_held();
    if (lv == SL_ERROR) {
        char key[sizeof ctx.last];
        snprintf(key, sizeof key, "%.*s", (int)sizeof key - 1, text);
        if (!strcmp(key, ctx.last) && now.tv_sec - ctx.last_at < REPEAT_S) {
            ctx.held++;
            pthread_mutex_unlock(&ctx.mu);
            return;
        }
        flush_held();
        memcpy(ctx.last, key, sizeof key);
        ctx.last_at = now.tv_sec;
    }
    emit(lv, text);
    pthread_mutex_unlock(&ctx.mu);
}

void sl_log_flush(void) {
    pthread_mutex_lock(&ctx.mu);
    flush_held();
    pthread_mutex_unlock(&ctx.mu);
}
