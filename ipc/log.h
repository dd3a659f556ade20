/* log: the one log stream. Every process writes whole lines with one write(2) to its stderr, which the supervisor set
 * to the journal or the log file (O_APPEND), so lines of several processes never mix within a line.
 *
 *   2026-01-31T12:00:00.123Z INFO  gather[4711] batch 17: 12 rows ok rows=12 tokens=2048
 *
 * Under systemd (JOURNAL_STREAM names what stderr is) the time is left out and "<N>" priority prefixes are written instead.
 * INFO is the default and is never dropped. WARN is for every fallback. Errors that repeat are collapsed: the same text
 * within 10 s is counted and printed as "... (repeated N times)"; nothing else is suppressed. */
#ifndef SL_IPC_LOG_H
#define SL_IPC_LOG_H
typedef enum { SL_DEBUG, SL_INFO, SL_WARN, SL_ERROR } sl_level;

/* Name this process in its log lines ("rank0.1"); copies `who` (<= 31 bytes). Call once at start; not thread-safe. */
void sl_log_init(const char *who, sl_level min);
void sl_log(sl_level lv, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Print a pending "(repeated N times)" now: call before exit. */
void sl_log_flush(void);
/* Warnings logged by this process so far (the monitor's flag). */
unsigned long sl_log_warnings(void);
int sl_log_level_parse(const char *name, sl_level *out); /* debug|info|warn|error; 0 or SL_EUSAGE */
#endif
