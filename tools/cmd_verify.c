/* sluice verify: is a store what its logs say? The work is in stages/writer/verify.h. */
#include "tools/cli.h"
#include "tools/commands.h"
#include "stages/writer/verify.h"
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static struct {
    bool deep, json, quiet;
    uint64_t threads;
} o;

static const sl_cli_opt opts[] = {
    {"deep", 'd', SL_CLI_FLAG, NULL,
     "decode every state and compare it with its checksums, look for NaN, compare ids and masks with what was accepted",
     &o.deep},
    {"threads", 't', SL_CLI_U64, "N", "threads that read and decode; default: two a core, at least 8", &o.threads,
     .min = 1, .max = 64},
    {"json", 0, SL_CLI_FLAG, NULL, "print one JSON object instead of text", &o.json},
    {"quiet", 'q', SL_CLI_FLAG, NULL, "no progress on stderr", &o.quiet},
    {0}};

static const sl_cli cli = {"sluice verify",
                           "STORE",
                           "is a store whole, and do its logs agree with it",
                           "Compares manifest.json, intake.log, commit.log and the files or shards of STORE in both "
                           "directions: every committed row "
                           "is in its place and whole, every rejected row has its states and its reason in quarantine, "
                           "and nothing else is there. "
                           "Every fault is named with its row, layer and file.\n\n"
                           "Rows that were accepted and not yet computed are pending, which is no fault. A store may "
                           "be verified while it is written.\n\n"
                           "Exit status 0 healthy, 1 faults found, 78 not a store.",
                           "sluice verify out\nsluice verify --deep --json out | jq .faults",
                           opts,
                           1,
                           1};

static sl_cli_progress bar;

static void progress(void *arg, uint64_t rows, uint64_t total) {
    (void)arg;
    if (!o.quiet) sl_cli_progress_draw(&bar, rows, total, NULL);
}

static json_t *list(char *const *v, uint64_t n) {
    json_t *a = json_array();
    for (uint64_t i = 0; i < n && i < SL_VERIFY_KEEP; i++)
        if (v[i]) json_array_append_new(a, json_stringn_nocheck(v[i], strlen(v[i])));
    return a;
}

static void print_json(const sl_verify_report *r, double s) {
    json_t *j =
        json_pack("{s:b,s:b,s:b,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:f,s:I,s:o,s:o}", "healthy", (int)!r->n_faults, "deep",
                  (int)o.deep, "complete", (int)r->complete, "rows", (json_int_t)r->rows, "rejected",
                  (json_int_t)r->rejected, "refused", (json_int_t)r->refused, "pending", (json_int_t)r->pending,
                  "tokens", (json_int_t)r->tokens, "raw_bytes", (json_int_t)r->raw_bytes, "stored_bytes",
                  (json_int_t)r->stored_bytes, "read_bytes", (json_int_t)r->read_bytes, "seconds", s, "n_faults",
                  (json_int_t)r->n_faults, "faults", list(r->faults, r->n_faults), "notes", list(r->notes, r->n_notes));
    char *t = json_dumps(j, JSON_INDENT(2) | JSON_PRESERVE_ORDER);
    if (t) puts(t);
    free(t);
    json_decref(j);
}

static void print_text(const char *store, const sl_verify_report *r, double s) {
    char a[32], b[32], c[32];
    for (uint64_t i = 0; i < r->n_faults && i < SL_VERIFY_KEEP; i++) printf("FAULT %s\n", r->faults[i]);
    if (r->n_faults > SL_VERIFY_KEEP) printf("FAULT ... and %" PRIu64 " more\n", r->n_faults - SL_VERIFY_KEEP);
    for (uint64_t i = 0; i < r->n_notes && i < SL_VERIFY_KEEP; i++) printf("note  %s\n", r->notes[i]);
    printf("%s: %s: %" PRIu64 " rows, %s tokens, %s of states in %s; %" PRIu64 " rejected, %" PRIu64
           " refused, %" PRIu64 " pending; %s%s in %.1f s\n",
           store, r->n_faults ? "UNHEALTHY" : "healthy", r->rows, sl_cli_count(a, (double)r->tokens),
           sl_cli_bytes(b, (double)r->raw_bytes), sl_cli_bytes(c, (double)r->stored_bytes), r->rejected, r->refused,
           r->pending, o.deep ? "every state decoded" : "structure only (--deep decodes)",
           r->n_faults ? ", faults above" : "", s);
}

int sl_cmd_verify(int argc, char **argv) {
    int n = 0, rc = sl_cli_parse(&cli, argc, argv, &n);
    if (rc != SL_CLI_GO) return rc;
    sl_verify_report rep;
    sl_err err = {0};
    struct timespec t0, t1;
    clock_gettime(CLOCK_MONOTONIC, &t0);
    sl_cli_progress_start(&bar, "rows");
    rc = sl_store_verify(
        argv[1], &(sl_verify_opts){.deep = o.deep, .threads = (unsigned)o.threads, .progress = progress}, &rep, &err);
    if (!o.quiet) sl_cli_progress_end(&bar);
    clock_gettime(CLOCK_MONOTONIC, &t1);
    double s = (double)(t1.tv_sec - t0.tv_sec) + 1e-9 * (double)(t1.tv_nsec - t0.tv_nsec);
    if (rc) {
        sl_verify_free(&rep);
        return sl_cli_fail(&err);
    }
    if (o.json)
        print_json(&rep, s);
    else
        print_text(argv[1], &rep, s);
    rc = rep.n_faults ? 1 : 0;
    sl_verify_free(&rep);
    return rc;
}
