/* sluice status, drain and check: one question to the service, or to the machine. */
#include "daemon/preflight.h"
#include "tools/cli.h"
#include "tools/commands.h"
#include "tools/daemon_client.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static struct {
    const char *at;
    bool json, wait;
} o;

static const sl_cli_opt status_opts[] = {
    {"at", 0, SL_CLI_STR, "DIR", "Run folder or store of the service, when it is not in the usual place.", &o.at},
    {"json", 0, SL_CLI_FLAG, NULL, "Print the status map as one JSON object (daemon/status.h names every key).",
     &o.json},
    {0}};
static const sl_cli status_cli = {"sluice status",
                                  "",
                                  "what a running service is doing, once",
                                  "Asks the service on its control socket and prints its state, the rows and tokens so "
                                  "far, rates, rejects and one line a "
                                  "stage. The exit status is 1 when rows were rejected or a stage is down.",
                                  "    sluice status\n    sluice status --json | jq .rows\n",
                                  status_opts,
                                  0,
                                  0};

static void print_stage(const msgpack_object *s) {
    char name[64], state[32], a[32];
    printf("  %-10s pid %-8llu %-9s busy %3.0f%%  wait-in %3.0f%%  wait-out %3.0f%%  rows %-8s restarts %llu  warnings "
           "%llu\n",
           sl_status_str(s, "name", name, sizeof name), (unsigned long long)sl_status_u64(s, "pid"),
           sl_status_str(s, "state", state, sizeof state), sl_status_dbl(s, "busy"), sl_status_dbl(s, "in"),
           sl_status_dbl(s, "out"), sl_cli_count(a, sl_status_dbl(s, "rows")),
           (unsigned long long)sl_status_u64(s, "restarts"), (unsigned long long)sl_status_u64(s, "warnings"));
}

static void print_status(const msgpack_object *m) {
    char a[1100], b[1100], c[32], d[32], e[32];
    printf("state     %s, up %s, pid %llu\n", sl_status_str(m, "state", a, sizeof a),
           sl_cli_span(c, sl_status_dbl(m, "uptime")), (unsigned long long)sl_status_u64(m, "pid"));
    printf("model     %s\n", sl_status_str(m, "model", a, sizeof a));
    printf("store     %s\nfeed      %s\n", sl_status_str(m, "store", a, sizeof a),
           sl_status_str(m, "feed", b, sizeof b));
    printf("rows      %llu accepted, %llu committed, %llu queued, %llu rejected, %llu refused\n",
           (unsigned long long)sl_status_u64(m, "rows.accepted"),
           (unsigned long long)sl_status_u64(m, "rows.committed"), (unsigned long long)sl_status_u64(m, "rows.queued"),
           (unsigned long long)sl_status_u64(m, "rows.rejected"), (unsigned long long)sl_status_u64(m, "rows.refused"));
    if (sl_status_u64(m, "rows.truncated"))
        printf("cut       %llu of these rows to max_length\n", (unsigned long long)sl_status_u64(m, "rows.truncated"));
    printf("tokens    %s of %s, %s tok/s\n", sl_cli_count(c, sl_status_dbl(m, "tokens.committed")),
           sl_cli_count(d, sl_status_dbl(m, "tokens.accepted")), sl_cli_count(e, sl_status_dbl(m, "rate.tokens")));
    printf("bytes     %s raw, %s stored, ratio %.2f\n", sl_cli_bytes(c, sl_status_dbl(m, "bytes.raw")),
           sl_cli_bytes(d, sl_status_dbl(m, "bytes.stored")), sl_status_dbl(m, "bytes.ratio"));
    printf("disk      %s free%s\n", sl_cli_bytes(c, sl_status_dbl(m, "disk.free")),
           sl_status_u64(m, "disk.paused") ? ", PAUSED: the disk is full" : "");
    double eta = sl_status_dbl(m, "eta"), nll = sl_status_dbl(m, "nll.mean");
    printf("eta       %s\n", eta < 0 ? "unknown" : sl_cli_span(c, eta));
    if (!isnan(nll))
        printf("nll       %.4f nats a token over %llu rows\n", nll, (unsigned long long)sl_status_u64(m, "nll.rows"));
    const msgpack_object *r = sl_status_get(m, "rejects"), *s = sl_status_get(m, "stages");
    for (uint32_t i = 0; r && r->type == MSGPACK_OBJECT_MAP && i < r->via.map.size; i++)
        printf("rejects   %.*s %llu\n", (int)r->via.map.ptr[i].key.via.str.size, r->via.map.ptr[i].key.via.str.ptr,
               (unsigned long long)r->via.map.ptr[i].val.via.u64);
    puts("stages");
    for (uint32_t i = 0; s && s->type == MSGPACK_OBJECT_ARRAY && i < s->via.array.size; i++)
        print_stage(&s->via.array.ptr[i]);
}

static int health(const msgpack_object *m) {
    const msgpack_object *s = sl_status_get(m, "stages");
    char state[32];
    int bad = sl_status_u64(m, "rows.rejected") || sl_status_u64(m, "rows.refused");
    for (uint32_t i = 0; s && s->type == MSGPACK_OBJECT_ARRAY && i < s->via.array.size; i++) {
        sl_status_str(&s->via.array.ptr[i], "state", state, sizeof state);
        bad |= !strcmp(state, "down") || !strcmp(state, "failed");
    }
    return bad ? 1 : 0;
}

int sl_cmd_status(int argc, char **argv) {
    int n, rc = sl_cli_parse(&status_cli, argc, argv, &n);
    if (rc != SL_CLI_GO) return rc;
    sl_err err = {0};
    sl_run_record rec;
    msgpack_unpacked u;
    if (sl_daemon_find(o.at, &rec, &err)) return sl_cli_fail(&err);
    if (sl_daemon_ask(rec.control, "status", 5000, &u, &err)) return sl_cli_fail(&err);
    if (o.json)
        sl_status_json(&u.data, stdout), putchar('\n');
    else
        print_status(&u.data);
    rc = health(&u.data);
    msgpack_unpacked_destroy(&u);
    return rc;
}

/* ---- drain ---- */

static const sl_cli_opt drain_opts[] = {
    {"at", 0, SL_CLI_STR, "DIR", "Run folder or store of the service, when it is not in the usual place.", &o.at},
    {"wait", 'w', SL_CLI_FLAG, NULL, "Return when the service has ended, not when it has begun to drain.", &o.wait},
    {0}};
static const sl_cli drain_cli = {
    "sluice drain",
    "",
    "let a running service finish what it has accepted, then end",
    "The service takes no more rows, finishes and commits every row it has accepted, and ends with status 0 (1 when "
    "rows were "
    "rejected). The same as SIGTERM to sluiced. Killing it is always safe too; the next start goes on from the logs.",
    "    sluice drain --wait\n",
    drain_opts,
    0,
    0};

int sl_cmd_drain(int argc, char **argv) {
    int n, rc = sl_cli_parse(&drain_cli, argc, argv, &n);
    if (rc != SL_CLI_GO) return rc;
    sl_err err = {0};
    sl_run_record rec, again;
    msgpack_unpacked u;
    if (sl_daemon_find(o.at, &rec, &err)) return sl_cli_fail(&err);
    if (sl_daemon_ask(rec.control, "drain", 5000, &u, &err)) return sl_cli_fail(&err);
    const msgpack_object *ok = sl_status_get(&u.data, "ok");
    bool yes = ok && ok->type == MSGPACK_OBJECT_BOOLEAN && ok->via.boolean;
    msgpack_unpacked_destroy(&u);
    if (!yes) return fprintf(stderr, "error: sluiced did not agree to drain\n"), 1;
    fprintf(stderr, "sluiced pid %d is draining\n", rec.pid);
    while (o.wait && !sl_run_find(rec.store, &again, &err) && again.pid == rec.pid) usleep(200000);
    return 0;
}

/* ---- check ---- */

static struct {
    const char *config, *model, *store;
    sl_cli_list set;
    bool json;
} c;

static const sl_cli_opt check_opts[] = {
    {"config", 'c', SL_CLI_STR, "FILE", "Configuration of sluiced.", &c.config},
    {"set", 0, SL_CLI_LIST, "SECTION.KEY=VALUE", "Override one key; may be repeated.", &c.set},
    {"model", 'm', SL_CLI_STR, "PATH", "Check this model.", &c.model},
    {"store", 's', SL_CLI_STR, "DIR", "Check this store's folder and file system.", &c.store},
    {"json", 0, SL_CLI_FLAG, NULL, "Print one JSON object.", &c.json},
    {0}};
static const sl_cli check_cli = {
    "sluice check",
    "",
    "is this machine ready, and what to do where it is not",
    "Looks at the limits, the kernel, the file system, the sockets, the programs and the model that a configuration "
    "names, "
    "and prints for each what was found and the remedy. Starts nothing and changes nothing. The exit status is 78 when "
    "something stands in the way; warnings only cost speed.",
    "    sluice check --model ./SmolLM2 --store /data/states\n",
    check_opts,
    0,
    0};

static void json_text(const char *key, const char *v, const char *end) {
    msgpack_object s = {.type = MSGPACK_OBJECT_STR, .via.str = {.size = (uint32_t)strlen(v), .ptr = v}};
    printf("\"%s\":", key);
    sl_status_json(&s, stdout);
    fputs(end, stdout);
}

int sl_cmd_check(int argc, char **argv) {
    int n, rc = sl_cli_parse(&check_cli, argc, argv, &n);
    if (rc != SL_CLI_GO) return rc;
    sl_config *cfg = malloc(sizeof *cfg);
    sl_err err = {0};
    sl_check k[32];
    if (!cfg) return 75;
    sl_config_default(cfg);
    rc = c.config ? sl_config_read(cfg, c.config, &err) : SL_OK;
    for (int i = 0; !rc && i < c.set.n; i++) rc = sl_config_set(cfg, c.set.v[i], &err);
    if (c.model) snprintf(cfg->boot.model, sizeof cfg->boot.model, "%s", c.model);
    if (c.store) snprintf(cfg->boot.store, sizeof cfg->boot.store, "%s", c.store);
    if (rc) return free(cfg), sl_cli_fail(&err);
    n = sl_preflight_checks(cfg, k, 32);
    free(cfg);
    bool bad = false;
    if (c.json) fputs("{\"checks\":[", stdout);
    for (int i = 0; i < n; i++) {
        bad |= k[i].state == SL_CHECK_FAIL;
        if (c.json) {
            printf("%s{", i ? "," : "");
            json_text("name", k[i].name, ","), json_text("state", sl_check_state_name(k[i].state), ",");
            json_text("found", k[i].found, ","), json_text("remedy", k[i].remedy, "}");
            continue;
        }
        printf("%-10s %-4s  %s\n", k[i].name, sl_check_state_name(k[i].state), k[i].found);
        if (k[i].remedy[0]) printf("%17s-> %s\n", "", k[i].remedy);
    }
    if (c.json) printf("],\"ok\":%s}\n", bad ? "false" : "true");
    return bad ? 78 : 0;
}
