/* cli: what every `sluice` command shares: one table of options drives parsing and the --help page, so they cannot
 * differ.
 *
 *     static struct { const char *out; bool json; } o;
 *     static const sl_cli_opt opts[] = {
 *         {"output", 'o', SL_CLI_STR, "DIR", "where the states go", &o.out, .required = true},
 *         {"json", 0, SL_CLI_FLAG, NULL, "print one JSON object instead of text", &o.json},
 *         {0}};
 *     static const sl_cli cli = {"sluice frob", "FILE...", "one line", "paragraphs", "examples", opts, 1, SL_CLI_MANY};
 *     int sl_cmd_frob(int argc, char **argv) {
 *         int n = 0;                                  // positional arguments are argv[1..n] afterwards
 *         int rc = sl_cli_parse(&cli, argc, argv, &n);
 *         if (rc != SL_CLI_GO) return rc;             // --help (0) or wrong use (2) was answered
 *
 * Rules for every command: stdout is data, stderr is talk; exit codes are 0 done, 1 some rows rejected or unhealthy,
 * 2 wrong use, 70 bug, 75 temporary, 78 configuration. Options may stand anywhere; `--` ends them; `--name value` and
 * `--name=value` are the same. --help and -h are added to each command. */
#ifndef SL_TOOLS_CLI_H
#define SL_TOOLS_CLI_H
#include "ipc/err.h"
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#define SL_CLI_GO   (-1)       /* sl_cli_parse: carry on */
#define SL_CLI_MANY 0x7fffffff /* no limit on positional arguments */

typedef enum {
    SL_CLI_FLAG,   /* bool *       present = true */
    SL_CLI_STR,    /* const char ** */
    SL_CLI_U64,    /* uint64_t *   decimal */
    SL_CLI_SIZE,   /* uint64_t *   bytes: 4096, 64KiB, 4GiB, 1MB (powers of ten) */
    SL_CLI_MS,     /* uint64_t *   milliseconds: 500ms, 2s, 1m, or a plain number of seconds */
    SL_CLI_DOUBLE, /* double * */
    SL_CLI_CHOICE, /* const char **, one of the words in `arg`, separated by | */
    SL_CLI_LIST,   /* sl_cli_list *: may be given several times */
    SL_CLI_HEAD    /* no option: a heading in the help page (name) */
} sl_cli_type;

typedef struct sl_cli_list {
    const char *v[64];
    int n;
} sl_cli_list;

typedef struct sl_cli_opt {
    const char *name; /* long name without dashes; {0} ends the table */
    char letter;      /* short name, 0 = none */
    sl_cli_type type;
    const char *arg;  /* placeholder in the help page; SL_CLI_CHOICE: the words */
    const char *help; /* a sentence or more; wrapped by the printer; says the default */
    void *dest;       /* static storage; its value before parsing is the default */
    double min, max;  /* numbers: range, both 0 = not checked */
    bool required;
} sl_cli_opt;

typedef struct sl_cli {
    const char *name;        /* "sluice extract" */
    const char *args;        /* positional arguments as shown in the synopsis, "" = none */
    const char *brief;       /* one line */
    const char *description; /* paragraphs separated by an empty line */
    const char *examples;    /* lines; the printer sets them in; "" = none */
    const sl_cli_opt *opts;
    int min_args, max_args;
} sl_cli;

/* Parse; positional arguments are moved to argv[1..*n_args]. SL_CLI_GO, or the exit code: 0 after --help (printed on
 * stdout), 2 after wrong use (the sentence, the nearest option, and how to get help on stderr). */
int sl_cli_parse(const sl_cli *c, int argc, char **argv, int *n_args);
void sl_cli_help(const sl_cli *c, FILE *f);
/* "error: MSG" on stderr; returns the exit code of the error. */
int sl_cli_fail(const sl_err *err);

/* Number with a unit. SL_EUSAGE with what was found. "4GiB" "4G" "4096" / "500ms" "2s" "1.5m" "1h" (plain = seconds).
 */
int sl_cli_size(const char *text, uint64_t *bytes, sl_err *err);
int sl_cli_ms(const char *text, uint64_t *ms, sl_err *err);
/* "1.4 GB", "12.3 k" (powers of ten), "1h02m"; written into buf (>= 32 bytes), which is returned. */
const char *sl_cli_bytes(char *buf, double bytes);
const char *sl_cli_count(char *buf, double n);
const char *sl_cli_span(char *buf, double seconds);

/* Progress on stderr: a bar redrawn in place (at most 5 times a second) when stderr is a terminal, else one line a
 * minute. total 0 = unknown. `what` names the unit ("rows"), `more` is shown at the end of the line, may be NULL. */
typedef struct sl_cli_progress {
    bool tty, drawn;
    uint64_t start_ns, last_ns, last_done;
    double rate; /* smoothed units a second */
    const char *what;
} sl_cli_progress;
void sl_cli_progress_start(sl_cli_progress *p, const char *what);
void sl_cli_progress_draw(sl_cli_progress *p, uint64_t done, uint64_t total, const char *more);
void sl_cli_progress_end(sl_cli_progress *p); /* clears the bar, so that text may follow */
#endif
