#include "tools/cli.h"
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

/* ---- numbers with units ---- */

typedef struct unit {
    const char *name;
    double factor;
} unit;

static const unit size_units[] = {{"", 1},
                                  {"B", 1},
                                  {"K", 1024},
                                  {"KiB", 1024},
                                  {"kB", 1e3},
                                  {"KB", 1e3},
                                  {"M", 1048576},
                                  {"MiB", 1048576},
                                  {"MB", 1e6},
                                  {"G", 1 << 30},
                                  {"GiB", 1 << 30},
                                  {"GB", 1e9},
                                  {"T", 1099511627776.0},
                                  {"TiB", 1099511627776.0},
                                  {"TB", 1e12},
                                  {NULL, 0}};
static const unit time_units[] = {{"", 1000},    {"ms", 1},     {"s", 1000}, {"m", 60e3},
                                  {"min", 60e3}, {"h", 3600e3}, {NULL, 0}};

static int with_unit(const char *text, const unit *units, const char *what, const char *example, uint64_t *out,
                     sl_err *err) {
    char *end;
    errno = 0;
    bool number = isdigit((unsigned char)text[0]);
    double v = number ? strtod(text, &end) : 0;
    if (!number || errno) return sl_err_set(err, SL_EUSAGE, "'%s' is not a %s (for example %s)", text, what, example);
    while (*end == ' ') end++;
    for (const unit *u = units; u->name; u++) {
        if (strcmp(end, u->name)) continue;
        v *= u->factor;
        if (v >= 9.2e18) return sl_err_set(err, SL_EUSAGE, "'%s' is too large", text);
        *out = (uint64_t)llround(v);
        return SL_OK;
    }
    return sl_err_set(err, SL_EUSAGE, "'%s': unknown unit '%s' in a %s (for example %s)", text, end, what, example);
}

int sl_cli_size(const char *text, uint64_t *bytes, sl_err *err) {
    return with_unit(text, size_units, "size", "4096, 64KiB, 4GiB", bytes, err);
}

int sl_cli_ms(const char *text, uint64_t *ms, sl_err *err) {
    return with_unit(text, time_units, "time", "500ms, 2s, 1m", ms, err);
}

const char *sl_cli_bytes(char *buf, double b) {
    static const char *const names[] = {"B", "kB", "MB", "GB", "TB", "PB"};
    int i = 0;
    while (b >= 999.5 && i < 5) b /= 1000, i++;
    snprintf(buf, 32, i && b < 99.95 ? "%.1f %s" : "%.0f %s", b, names[i]);
    return buf;
}

const char *sl_cli_count(char *buf, double n) {
    static const char *const names[] = {"", " k", " M", " G", " T"};
    int i = 0;
    while (n >= 99999.5 && i < 4) n /= 1000, i++;
    snprintf(buf, 32, i ? "%.1f%s" : "%.0f%s", n, names[i]);
    return buf;
}

const char *sl_cli_span(char *buf, double s) {
    if (!(s >= 0) || s > 1e8)
        snprintf(buf, 32, "?");
    else if (s < 10)
        snprintf(buf, 32, "%.1fs", s);
    else if (s < 60)
        snprintf(buf, 32, "%.0fs", s);
    else if (s < 3600)
        snprintf(buf, 32, "%dm%02ds", (int)s / 60, (int)s % 60);
    else
        snprintf(buf, 32, "%dh%02dm", (int)s / 3600, (int)s / 60 % 60);
    return buf;
}

/* ---- help ---- */

static void wrap(FILE *f, const char *text, int indent, int width) {
    int col = indent;
    bool first = true;
    for (const char *p = text; *p;) {
        if (*p == '\n') {
            fprintf(f, "\n%*s", indent, "");
            col = indent, first = true, p++;
            continue;
        }
        int n = (int)strcspn(p, " \n");
        if (!first && col + 1 + n > width) {
            fprintf(f, "\n%*s", indent, "");
            col = indent, first = true;
        }
        if (!first) fputc(' ', f), col++;
        fprintf(f, "%.*s", n, p);
        col += n, first = false;
        p += n;
        while (*p == ' ') p++;
    }
    fputc('\n', f);
}

/* Lines as they are, each set in, the last one ended: whatever a command's text has of that already. */
static void examples(FILE *f, const char *text) {
    fputs("\nEXAMPLES\n", f);
    for (const char *p = text; *p; p += *p == '\n') {
        while (*p == ' ') p++;
        int n = (int)strcspn(p, "\n");
        fprintf(f, "    %.*s\n", n, p);
        p += n;
    }
}

void sl_cli_help(const sl_cli *c, FILE *f) {
    fprintf(f, "NAME\n    %s - %s\n\nSYNOPSIS\n    %s [OPTION...]%s%s\n\nDESCRIPTION\n    ", c->name, c->brief, c->name,
            *c->args ? " " : "", c->args);
    wrap(f, c->description, 4, 100);
    fputs("\nOPTIONS\n", f);
    for (const sl_cli_opt *o = c->opts; o && o->name; o++) {
        if (o->type == SL_CLI_HEAD) {
            fprintf(f, "  %s\n", o->name);
            continue;
        }
        fputs("    ", f);
        if (o->letter) fprintf(f, "-%c, ", o->letter);
        fprintf(f, "--%s%s%s%s\n        ", o->name, o->arg ? " " : "", o->arg ? o->arg : "",
                o->required ? "   (required)" : "");
        wrap(f, o->help, 8, 100);
    }
    fputs("    -h, --help\n        Print this page.\n", f);
    fputs("\nEXIT STATUS\n    0 done; 1 some rows were rejected or something is unhealthy; 2 wrong use; 70 a bug;\n"
          "    75 temporary, try again; 78 the configuration or the model cannot work.\n",
          f);
    if (c->examples && *c->examples) examples(f, c->examples);
}

/* ---- parsing ---- */

static int usage(const sl_cli *c, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static int usage(const sl_cli *c, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "%s: ", c->name);
    vfprintf(stderr, fmt, ap);
    fprintf(stderr, "\nTry '%s --help'.\n", c->name);
    va_end(ap);
    return 2;
}

static bool in_choice(const char *words, const char *v) {
    size_t n = strlen(v);
    for (const char *p = words; *p;) {
        size_t len = strcspn(p, "|");
        if (len == n && !memcmp(p, v, n)) return true;
        p += len;
        if (*p) p++;
    }
    return false;
}

static int number(const sl_cli *c, const sl_cli_opt *o, const char *v) {
    sl_err e = {0};
    uint64_t u = 0;
    double d = 0;
    char *end = NULL;
    errno = 0;
    switch (o->type) {
    case SL_CLI_U64:
        u = strtoull(v, &end, 10);
        if (!isdigit((unsigned char)*v) || *end || errno)
            return usage(c, "--%s: '%s' is not a whole number", o->name, v);
        break;
    case SL_CLI_SIZE:
        if (sl_cli_size(v, &u, &e)) return usage(c, "--%s: %s", o->name, e.msg);
        break;
    case SL_CLI_MS:
        if (sl_cli_ms(v, &u, &e)) return usage(c, "--%s: %s", o->name, e.msg);
        break;
    default:
        d = strtod(v, &end);
        if (end == v || *end || !isfinite(d)) return usage(c, "--%s: '%s' is not a number", o->name, v);
    }
    double x = o->type == SL_CLI_DOUBLE ? d : (double)u;
    if ((o->min != 0 || o->max != 0) && (x < o->min || x > o->max))
        return usage(c, "--%s: %s is out of range %g..%g", o->name, v, o->min, o->max);
    if (o->type == SL_CLI_DOUBLE)
        *(double *)o->dest = d;
    else
        *(uint64_t *)o->dest = u;
    return SL_CLI_GO;
}

static int assign(const sl_cli *c, const sl_cli_opt *o, const char *v) {
    switch (o->type) {
    case SL_CLI_STR:
        *(const char **)o->dest = v;
        return SL_CLI_GO;
    case SL_CLI_CHOICE:
        if (!in_choice(o->arg, v)) return usage(c, "--%s: '%s' is not one of %s", o->name, v, o->arg);
        *(const char **)o->dest = v;
        return SL_CLI_GO;
    case SL_CLI_LIST: {
        sl_cli_list *l = o->dest;
        if (l->n == (int)(sizeof l->v / sizeof *l->v)) return usage(c, "--%s: given more than %d times", o->name, l->n);
        l->v[l->n++] = v;
        return SL_CLI_GO;
    }
    default:
        return number(c, o, v);
    }
}

/* Edit distance over two short words, for "did you mean". */
static int distance(const char *a, const char *b, size_t n) {
    int row[64], m = (int)strlen(b);
    if (m >= 63) return 99;
    for (int j = 0; j <= m; j++) row[j] = j;
    for (size_t i = 1; i <= n; i++) {
        int diag = row[0];
        row[0] = (int)i;
        for (int j = 1; j <= m; j++) {
            int up = row[j], best = diag + (a[i - 1] != b[j - 1]);
            if (up + 1 < best) best = up + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            diag = up, row[j] = best;
        }
    }
    return row[m];
}

static int unknown(const sl_cli *c, const char *arg, size_t n) {
    const char *near = NULL;
    int best = 99;
    for (const sl_cli_opt *o = c->opts; o && o->name; o++) {
        int d = o->type == SL_CLI_HEAD ? 99 : distance(arg, o->name, n);
        if (d < best) best = d, near = o->name;
    }
    if (near && best <= 3) return usage(c, "unknown option '--%.*s'; did you mean '--%s'?", (int)n, arg, near);
    return usage(c, "unknown option '--%.*s'", (int)n, arg);
}

/* One option at argv[*i]; moves *i over its value. */
static int option(const sl_cli *c, int argc, char **argv, int *i, uint64_t *seen) {
    const char *a = argv[*i], *val = NULL;
    bool is_long = a[1] == '-';
    const char *name = a + 1 + is_long;
    size_t n = is_long ? strcspn(name, "=") : 1;
    if (is_long && name[n] == '=') val = name + n + 1;
    if ((is_long && n == 4 && !strncmp(name, "help", 4)) || (!is_long && *name == 'h' && !name[1])) {
        sl_cli_help(c, stdout);
        return 0;
    }
    for (const sl_cli_opt *o = c->opts; o && o->name; o++) {
        bool hit = o->type != SL_CLI_HEAD &&
                   (is_long ? strlen(o->name) == n && !memcmp(o->name, name, n) : o->letter && o->letter == *name);
        if (!hit) continue;
        if (o - c->opts < 64) *seen |= 1ull << (o - c->opts);
        if (o->type == SL_CLI_FLAG) {
            if (val || (!is_long && name[1])) return usage(c, "--%s takes no value", o->name);
            *(bool *)o->dest = true;
            return SL_CLI_GO;
        }
        if (!is_long && name[1]) val = name + 1;
        if (!val && *i + 1 >= argc) return usage(c, "--%s needs a value (%s)", o->name, o->arg);
        if (!val) val = argv[++*i];
        return assign(c, o, val);
    }
    if (!is_long) return usage(c, "unknown option '-%c'", *name);
    return unknown(c, name, n);
}

int sl_cli_parse(const sl_cli *c, int argc, char **argv, int *n_args) {
    int n = 0;
    uint64_t seen = 0;
    bool only_args = false;
    for (int i = 1; i < argc; i++) {
        if (!only_args && !strcmp(argv[i], "--")) {
            only_args = true;
        } else if (!only_args && argv[i][0] == '-' && argv[i][1]) {
            int rc = option(c, argc, argv, &i, &seen);
            if (rc != SL_CLI_GO) return rc;
        } else {
            argv[++n] = argv[i];
        }
    }
    for (const sl_cli_opt *o = c->opts; o && o->name; o++)
        if (o->required && o - c->opts < 64 && !(seen >> (o - c->opts) & 1))
            return usage(c, "--%s %s is required", o->name, o->arg ? o->arg : "");
    if (n < c->min_args) return usage(c, "too few arguments: %s expected", c->args);
    if (n > c->max_args) return usage(c, "unexpected argument '%s'", argv[c->max_args + 1]);
    *n_args = n;
    return SL_CLI_GO;
}

int sl_cli_fail(const sl_err *err) {
    fprintf(stderr, "error: %s\n", err->msg);
    return sl_err_exit(err->code);
}

/* ---- progress ---- */

static uint64_t now_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

void sl_cli_progress_start(sl_cli_progress *p, const char *what) {
    *p = (sl_cli_progress){.tty = isatty(2), .start_ns = now_ns(), .what = what};
    p->last_ns = p->start_ns;
}

void sl_cli_progress_draw(sl_cli_progress *p, uint64_t done, uint64_t total, const char *more) {
    uint64_t now = now_ns();
    if (now - p->last_ns < (p->tty ? 200000000ull : 60000000000ull)) return;
    double dt = (double)(now - p->last_ns) * 1e-9, inst = done > p->last_done ? (double)(done - p->last_done) / dt : 0;
    /* A memory of 10 s keeps the ETA calm; of 5 minutes where lines are a minute apart, as long rows may take longer.
     */
    double keep = p->drawn ? exp(-dt / (p->tty ? 10 : 300)) : 0;
    p->rate = p->rate * keep + inst * (1 - keep);
    p->last_ns = now, p->last_done = done, p->drawn = true;
    char a[32], b[32], eta[32];
    sl_cli_count(a, (double)done), sl_cli_count(b, (double)total);
    sl_cli_span(eta, p->rate > 0 && total > done ? (double)(total - done) / p->rate : total ? 0 : -1);
    if (!p->tty) {
        fprintf(stderr, "%s of %s %s, %.1f %s/s, ETA %s%s%s\n", a, total ? b : "?", p->what, p->rate, p->what, eta,
                more ? ", " : "", more ? more : "");
        return;
    }
    struct winsize ws = {.ws_col = 80};
    ioctl(2, TIOCGWINSZ, &ws);
    int cols = ws.ws_col < 40 ? 80 : ws.ws_col, full = 20;
    int on = total ? (int)((double)full * (double)done / (double)total) : 0;
    if (on > full) on = full;
    char line[512], bar[64] = "";
    for (int i = 0; i < full; i++) bar[i] = i < on ? '#' : '.';
    snprintf(line, sizeof line, "[%s] %3.0f%%  %s/%s %s  %.1f/s  ETA %s  %s", bar,
             total ? 100.0 * (double)done / (double)total : 0.0, a, total ? b : "?", p->what, p->rate, eta,
             more ? more : "");
    fprintf(stderr, "\r%.*s\033[K", cols - 1, line);
    fflush(stderr);
}

void sl_cli_progress_end(sl_cli_progress *p) {
    if (p->tty && p->drawn) fputs("\r\033[K", stderr);
    p->drawn = false;
}
