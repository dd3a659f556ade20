#include "ipc/err.h"
#include <stdio.h>
#include <string.h>

static int err_vset(sl_err *err, int code, const char *fmt, va_list ap) {
    if (!err) return code;
    err->code = code;
    /* NOLINTNEXTLINE(clang-analyzer-valist.Uninitialized): every caller has called va_start */
    int n = vsnprintf(err->msg, sizeof err->msg, fmt, ap);
    if (n < 0) err->msg[0] = 0;
    return code;
}

int sl_err_set(sl_err *err, int code, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    err_vset(err, code, fmt, ap);
    va_end(ap);
    return code;
}

int sl_err_sys(sl_err *err, int code, int errnum, const char *fmt, ...) {
    if (!err) return code;
    va_list ap;
    va_start(ap, fmt);
    err_vset(err, code, fmt, ap);
    va_end(ap);
    size_t n = strlen(err->msg);
    char buf[128];
    /* The GNU strerror_r: returns the text, which may or may not be in buf. */
    snprintf(err->msg + n, sizeof err->msg - n, ": %s", strerror_r(errnum, buf, sizeof buf));
    return code;
}

int sl_err_wrap(sl_err *err, const char *fmt, ...) {
    if (!err) return SL_EINTERNAL;
    char front[SL_ERR_MAX];
    va_list ap;
    va_start(ap, fmt);
    /* NOLINTNEXTLINE(clang-analyzer-valist.Uninitialized): the line before is va_start */
    int n = vsnprintf(front, sizeof front, fmt, ap);
    va_end(ap);
    if (n < 0) return err->code;
    size_t fl = strlen(front), room = sizeof err->msg - 1;
    if (fl + 2 > room / 2) fl = room / 2 - 2; /* the cause matters more than a long context */
    size_t ml = strlen(err->msg);
    if (ml > room - fl - 2) ml = room - fl - 2;
    memmove(err->msg + fl + 2, err->msg, ml);
    memcpy(err->msg, front, fl);
    memcpy(err->msg + fl, ": ", 2);
    err->msg[fl + 2 + ml] = 0;
    return err->code;
}

int sl_err_exit(int code) {
    switch (code) {
    case SL_EDATA:
        return 1;
    case SL_EUSAGE:
        return 2;
    case SL_ETEMP:
        return 75;
    case SL_ECONFIG:
        return 78;
    default:
        return code >= 0 ? 0 : 70;
    }
}
