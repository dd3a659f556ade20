/* err: one error value that carries its context up the call chain.
 *
 * A library function never prints and never exits. It returns 0 (or a useful non-negative value) on success and a
 * negative SL_E* code on failure, with a sentence in *err: what was found, what was expected, where (file, line, row,
 * tensor), what to do. Callers add context in front with sl_err_wrap: "loading model /m: model.safetensors: tensor
 * 'lm_head.weight': ...". `err` may be NULL everywhere. The codes map to the exit codes of every program. */
#ifndef SL_IPC_ERR_H
#define SL_IPC_ERR_H
#include <stdarg.h>
#include <stddef.h>

enum {
    SL_OK = 0,
    SL_EDATA = -1,     /* bad input data or unhealthy result        -> exit 1  */
    SL_EUSAGE = -2,    /* wrong use of a command                    -> exit 2  */
    SL_ETEMP = -75,    /* temporary: disk full, peer gone, resource -> exit 75 (EX_TEMPFAIL) */
    SL_ECONFIG = -78,  /* configuration or model cannot work        -> exit 78 (EX_CONFIG)   */
    SL_EINTERNAL = -70 /* a broken promise inside the program       -> exit 70 (EX_SOFTWARE) */
};

#define SL_ERR_MAX 2048
typedef struct sl_err {
    int code;             /* SL_E*, 0 = no error */
    char msg[SL_ERR_MAX]; /* NUL-terminated, one line unless it lists several faults */
} sl_err;

/* Set *err (if any) and return `code`. */
int sl_err_set(sl_err *err, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* As sl_err_set, with ": " and strerror(errnum) appended. */
int sl_err_sys(sl_err *err, int code, int errnum, const char *fmt, ...) __attribute__((format(printf, 4, 5)));
/* Put "context: " in front of an error that is already set; returns err->code (SL_EINTERNAL when err is NULL). */
int sl_err_wrap(sl_err *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Process exit code for an SL_* code: 0, 1, 2, 70, 75 or 78. */
int sl_err_exit(int code);
#endif
