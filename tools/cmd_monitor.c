/* sluice monitor: the flow of a running service, in pipeline order. Reads, asks nothing. */
#include "tools/cli.h"
#include "tools/commands.h"
#include "tools/daemon_client.h"
#include "ipc/metrics.h"
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

static struct {
    const char *at;
    bool json;
    uint64_t count;
} o;

static const sl_cli_opt opts[] = {
    {"at", 0, SL_CLI_STR, "DIR",
     "Run folder or store of the service, when it is not in the usual place (the OUTPUT of a running sluice extract, "
     "for instance).",
     &o.at},
    {"json", 0, SL_CLI_FLAG, NULL,
     "Print every message (four status maps a second, and events) as one JSON object a line.", &o.json},
    {"count", 'n', SL_CLI_U64, "N", "End after N screens, lines or messages. Default: never.", &o.count},
    {0}};

static const sl_cli cli = {
    "sluice monitor",
    "",
    "watch a running service",
    "On a terminal: for each stage, in the order of the flow, how much of its time it computes (busy), waits for input "
    "(wait-in) or waits for room (wait-out), and how full the rings between them are. The stage that is busy while "
    "those before "
    "it wait-out and those after it wait-in is the bottleneck. Below: tokens and bytes a second, compression ratio, "
    "time "
    "left, rejects by reason, restarts and the last events. When piped: one line a second.",
    "    sluice monitor\n    sluice monitor --at ./states\n    sluice monitor --json | jq -c .rate\n",
    opts,
    0,
    0};

static volatile sig_atomic_t stopped;
static void on_signal(int sig) {
    stopped = sig;
}

/* ---- one line ---- */

static void print_line(const msgpack_object *m) {
    char state[32], a[32], b[32], c[32], room[32], need[32], eta[32];
    double e = sl_status_dbl(m, "eta");
    printf("%s rows %llu/%llu queued %llu rejected %llu | %s tok/s | %s/s raw %s/s stored | ratio %.2f | free %s, "
           "%s to come | eta %s%s\n",
           sl_status_str(m, "state", state, sizeof state), (unsigned long long)sl_status_u64(m, "rows.committed"),
           (unsigned long long)sl_status_u64(m, "rows.accepted"), (unsigned long long)sl_status_u64(m, "rows.queued"),
           (unsigned long long)(sl_status_u64(m, "rows.rejected") + sl_status_u64(m, "rows.refused")),
           sl_cli_count(a, sl_status_dbl(m, "rate.tokens")), sl_cli_bytes(b, sl_status_dbl(m, "rate.raw")),
           sl_cli_bytes(c, sl_status_dbl(m, "rate.stored")), sl_status_dbl(m, "bytes.ratio"),
           sl_cli_bytes(room, sl_status_dbl(m, "disk.free")), sl_cli_bytes(need, sl_status_dbl(m, "disk.need")),
           e < 0 ? "?" : sl_cli_span(eta, e), sl_status_u64(m, "disk.paused") ? " PAUSED: disk full" : "");
    fflush(stdout);
}

/* ---- the screen: built in memory, written at once, so that it does not flicker ---- */

typedef struct screen {
    FILE *f;
    int cols;
} screen;

static void line(screen *s, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void line(screen *s, const char *fmt, ...) {
    char buf[1024];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(buf, sizeof buf, fmt, ap);
    va_end(ap);
    if (n >= s->cols) n = s->cols - 1;
    fprintf(s->f, "%.*s\033[K\n", n, buf);
}

static const char *bar(char *buf, double share, int width) {
    int on = (int)(share * width + 0.5);
    if (share > 0 && !on) on = 1;
    for (int i = 0; i < width; i++) buf[i] = i < on ? '#' : '.';
    buf[width] = 0;
    return buf;
}

static void draw_stage(screen *s, const msgpack_object *st) {
    char name[32], state[32], a[32], b[32], busy[16], load[16] = "";
    const msgpack_object *l = sl_status_get(st, "load");
    if (l && sl_status_dbl(st, "load") < 1) snprintf(load, sizeof load, " %.0f%%", 100 * sl_status_dbl(st, "load"));
    line(s, "  %-9s %-8s%-4s %s %3.0f%%  %3.0f%%  %3.0f%%  %9s rows %9s tok  epoch %-3llu restarts %llu  warnings %llu",
         sl_status_str(st, "name", name, sizeof name), sl_status_str(st, "state", state, sizeof state), load,
         bar(busy, sl_status_dbl(st, "busy") / 100, 10), sl_status_dbl(st, "busy"), sl_status_dbl(st, "in"),
         sl_status_dbl(st, "out"), sl_cli_count(a, sl_status_dbl(st, "rows")),
         sl_cli_count(b, sl_status_dbl(st, "tokens")), (unsigned long long)sl_status_u64(st, "epoch"),
         (unsigned long long)sl_status_u64(st, "restarts"), (unsigned long long)sl_status_u64(st, "warnings"));
}

/* Rings of one kind behind the stage that fills them. */
static void draw_rings(screen *s, const msgpack_object *rings, const char *kind) {
    size_t n = strlen(kind);
    for (uint32_t i = 0; rings && rings->type == MSGPACK_OBJECT_ARRAY && i < rings->via.array.size; i++) {
        const msgpack_object *r = &rings->via.array.ptr[i];
        char name[40], b[24];
        sl_status_str(r, "name", name, sizeof name);
        if (strncmp(name, kind, n)) continue;
        double depth = sl_status_dbl(r, "depth"), fill = sl_status_dbl(r, "fill");
        line(s, "      | %-11s [%s] %llu/%llu", name, bar(b, depth > 0 ? fill / depth : 0, 20),
             (unsigned long long)fill, (unsigned long long)depth);
    }
}

static void draw_flow(screen *s, const msgpack_object *m) {
    static const struct {
        const char *role, *ring;
    } order[] = {{"feeder", "batch"}, {"rank", "chunk"}, {"gather", "sample"}, {"writer", NULL}};
    const msgpack_object *st = sl_status_get(m, "stages"), *rings = sl_status_get(m, "rings");
    line(s, "  stage     state        busy             in   out");
    for (size_t k = 0; k < 4; k++) {
        for (uint32_t i = 0; st && st->type == MSGPACK_OBJECT_ARRAY && i < st->via.array.size; i++) {
            char role[32];
            if (!strcmp(sl_status_str(&st->via.array.ptr[i], "role", role, sizeof role), order[k].role))
                draw_stage(s, &st->via.array.ptr[i]);
        }
        if (order[k].ring) draw_rings(s, rings, order[k].ring);
    }
}

static void draw_rejects(screen *s, const msgpack_object *m) {
    const msgpack_object *r = sl_status_get(m, "rejects");
    char text[512] = "";
    for (uint32_t i = 0; r && r->type == MSGPACK_OBJECT_MAP && i < r->via.map.size; i++) {
        size_t at = strlen(text);
        const msgpack_object_kv *kv = &r->via.map.ptr[i];
        if (kv->key.type == MSGPACK_OBJECT_STR)
            snprintf(text + at, sizeof text - at, " %.*s %llu", (int)kv->key.via.str.size, kv->key.via.str.ptr,
                     (unsigned long long)kv->val.via.u64);
    }
    line(s, "rejects %s", *text ? text : " none");
}

static void draw_events(screen *s, const msgpack_object *m) {
    const msgpack_object *e = sl_status_get(m, "events");
    for (uint32_t i = 0; e && e->type == MSGPACK_OBJECT_ARRAY && i < e->via.array.size; i++) {
        const msgpack_object *v = &e->via.array.ptr[i];
        if (v->type != MSGPACK_OBJECT_ARRAY || v->via.array.size < 4 ||
            v->via.array.ptr[0].type != MSGPACK_OBJECT_FLOAT64)
            continue;
        const msgpack_object *p = v->via.array.ptr;
        double sec = p[0].via.f64;
        time_t t = sec > 0 && sec < 1e15 ? (time_t)sec : 0; /* not a NaN either */
        struct tm tm;
        char when[16] = "";
        if (localtime_r(&t, &tm)) strftime(when, sizeof when, "%H:%M:%S", &tm);
        if (p[1].type == MSGPACK_OBJECT_STR && p[2].type == MSGPACK_OBJECT_STR && p[3].type == MSGPACK_OBJECT_STR)
            line(s, "  %s %-5.*s %.*s: %.*s", when, (int)p[1].via.str.size, p[1].via.str.ptr, (int)p[2].via.str.size,
                 p[2].via.str.ptr, (int)p[3].via.str.size, p[3].via.str.ptr);
    }
}

static void draw_screen(const msgpack_object *m) {
    struct winsize ws = {.ws_col = 100};
    char *text = NULL, a[1100], b[32], c[32], d[32], e[32];
    size_t n = 0;
    ioctl(1, TIOCGWINSZ, &ws);
    screen s = {.f = open_memstream(&text, &n), .cols = ws.ws_col < 40 ? 100 : ws.ws_col};
    if (!s.f) return;
    fputs("\033[H", s.f);
    double eta = sl_status_dbl(m, "eta"), nll = sl_status_dbl(m, "nll.mean");
    line(&s, "sluice  %s  up %s  %s", sl_status_str(m, "state", b, sizeof b),
         sl_cli_span(c, sl_status_dbl(m, "uptime")), sl_status_str(m, "model", a, sizeof a));
    line(&s, "rows    %llu of %llu committed, %llu queued    tokens %s of %s",
         (unsigned long long)sl_status_u64(m, "rows.committed"), (unsigned long long)sl_status_u64(m, "rows.accepted"),
         (unsigned long long)sl_status_u64(m, "rows.queued"), sl_cli_count(b, sl_status_dbl(m, "tokens.committed")),
         sl_cli_count(c, sl_status_dbl(m, "tokens.accepted")));
    line(&s, "rate    %s tok/s  %s/s raw  %s/s stored  ratio %.2f  eta %s",
         sl_cli_count(b, sl_status_dbl(m, "rate.tokens")), sl_cli_bytes(c, sl_status_dbl(m, "rate.raw")),
         sl_cli_bytes(d, sl_status_dbl(m, "rate.stored")), sl_status_dbl(m, "bytes.ratio"),
         eta < 0 ? "?" : sl_cli_span(e, eta));
    if (isnan(nll))
        line(&s, "nll     -    disk %s free, %s to come%s", sl_cli_bytes(b, sl_status_dbl(m, "disk.free")),
             sl_cli_bytes(c, sl_status_dbl(m, "disk.need")), sl_status_u64(m, "disk.paused") ? "  PAUSED: full" : "");
    else
        line(&s, "nll     %.4f    disk %s free, %s to come%s", nll, sl_cli_bytes(b, sl_status_dbl(m, "disk.free")),
             sl_cli_bytes(c, sl_status_dbl(m, "disk.need")), sl_status_u64(m, "disk.paused") ? "  PAUSED: full" : "");
    line(&s, " ");
    draw_flow(&s, m);
    line(&s, " ");
    draw_rejects(&s, m);
    draw_events(&s, m);
    fputs("\033[J", s.f);
    fclose(s.f);
    fwrite(text, 1, n, stdout);
    fflush(stdout);
    free(text);
}

static void show_event(const msgpack_object *m) {
    char lv[16], who[40], msg[300];
    printf("event %s %s: %s\n", sl_status_str(m, "lv", lv, sizeof lv), sl_status_str(m, "who", who, sizeof who),
           sl_status_str(m, "msg", msg, sizeof msg));
}

/* Shows one message; true when it counts for --count. */
static bool show(const msgpack_object *m, bool tty, uint64_t *line_ns) {
    char t[16];
    bool status = !strcmp(sl_status_str(m, "t", t, sizeof t), "status");
    if (o.json) {
        sl_status_json(m, stdout);
        putchar('\n');
        fflush(stdout);
        return true;
    }
    if (tty) {
        if (status) draw_screen(m);
        return status;
    }
    if (!status) return show_event(m), false;
    uint64_t now = sl_now_ns();
    if (now - *line_ns < 950000000ull) return false;
    *line_ns = now;
    print_line(m);
    return true;
}

int sl_cmd_monitor(int argc, char **argv) {
    int n, rc = sl_cli_parse(&cli, argc, argv, &n);
    if (rc != SL_CLI_GO) return rc;
    sl_err err = {0};
    sl_run_record rec, again;
    sl_daemon_feed f;
    struct sigaction sa = {.sa_handler = on_signal};
    sigaction(SIGINT, &sa, NULL);
    sigaction(SIGTERM, &sa, NULL);
    if (sl_daemon_find(o.at, &rec, &err) || sl_daemon_listen(&f, rec.progress, &err)) return sl_cli_fail(&err);
    bool tty = isatty(1) && !o.json;
    uint64_t shown = 0, line_ns = 0, silent = 0;
    char state[32] = "";
    if (tty) fputs("\033[?1049h\033[?25l", stdout); /* a screen of its own, no cursor */
    while (!stopped && (!o.count || shown < o.count)) {
        msgpack_unpacked u;
        if (!sl_daemon_next(&f, 500, &u)) {
            if (++silent >= 4 && (sl_run_find(rec.store, &again, &err) || again.pid != rec.pid)) break;
            continue;
        }
        silent = 0;
        shown += show(&u.data, tty, &line_ns);
        if (sl_status_get(&u.data, "state")) sl_status_str(&u.data, "state", state, sizeof state);
        msgpack_unpacked_destroy(&u);
        if (!strcmp(state, "done") || !strcmp(state, "failed")) break;
    }
    if (tty) fputs("\033[?25h\033[?1049l", stdout), fflush(stdout);
    sl_daemon_unlisten(&f);
    if (!strcmp(state, "done") || !strcmp(state, "failed"))
        fprintf(stderr, "sluiced has ended: %s\n", state);
    else if (silent >= 4)
        fprintf(stderr, "sluiced is gone\n");
    return !strcmp(state, "failed") ? 1 : 0;
}
