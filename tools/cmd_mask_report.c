/* sluice mask-report: what a data set would train on, before anything is computed: counts by role and by reason, the
 * share of supervised tokens, and the rows that differ most from the others. */
#include "tools/cli.h"
#include "tools/commands.h"
#include "tools/prep_cli.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static struct {
    sl_prep_opts prep;
    bool json;
} o;

static const sl_cli_opt opts[] = {
    SL_PREP_OPTS(o.prep), {"json", 0, SL_CLI_FLAG, NULL, "print one JSON object", &o.json}, {0}};

static const sl_cli cli = {"sluice mask-report",
                           "FILE|-",
                           "summary of what a data set would train on",
                           "Reads rows (JSON lines) from FILE or standard input, prepares each as the feeder would, "
                           "and prints how many messages "
                           "there are of each role, how the masks were found, what share of the tokens is supervised, "
                           "how many rows are rejected for "
                           "which reason, and the ten oddest rows: those whose length and supervised share lie "
                           "farthest from the rest. The exit status "
                           "is 1 when rows are rejected.",
                           "sluice mask-report --model ~/models/Qwen3-8B train.jsonl",
                           opts,
                           1,
                           1};

enum { ODDEST = 10, ROLES = 5, HOWS = 8 };
static const char *const roles[ROLES] = {"system", "user", "assistant", "tool", "developer"};

typedef struct line {
    uint64_t no;
    uint32_t part, T, sum;
    double odd;
} line;

typedef struct report {
    uint64_t rows, parts, tokens, supervised, none, whole, truncated, warnings, bad_rows;
    uint64_t messages[ROLES], reasons[SL_R_N];
    struct {
        const char *how;
        uint64_t n;
    } how[HOWS];
    line *v;
    size_t n, cap;
} report;

static void count_roles(report *r, const char *text, size_t n) {
    sl_row row;
    if (sl_row_parse(&row, text, n, 0, NULL)) return;
    size_t i;
    json_t *m;
    json_array_foreach(row.messages, i, m) {
        const char *role = json_string_value(json_object_get(m, "role"));
        for (int k = 0; k < ROLES; k++) r->messages[k] += !strcmp(role, roles[k]);
    }
    sl_row_free(&row);
}

static void count_how(report *r, const char *how) {
    for (int i = 0; i < HOWS; i++) {
        if (!r->how[i].how) r->how[i].how = how;
        if (strcmp(r->how[i].how, how) != 0) continue;
        r->how[i].n++;
        return;
    }
}

static void count_part(report *r, uint64_t no, uint32_t part, const sl_part *p) {
    r->parts++;
    if (p->reason) {
        r->reasons[p->reason]++;
        return;
    }
    count_how(r, p->how);
    r->tokens += p->T;
    r->supervised += p->mask_sum;
    r->none += p->mask_sum == 0;
    r->whole += p->mask_sum == p->T;
    r->truncated += p->flags & SL_PART_TRUNCATED;
    if (r->n == r->cap) {
        line *v = realloc(r->v, (r->cap = r->cap * 2 + 1024) * sizeof *v);
        if (!v) return;
        r->v = v;
    }
    r->v[r->n++] = (line){.no = no, .part = part, .T = p->T, .sum = p->mask_sum};
}

static void take(void *arg, uint64_t no, const char *text, size_t n, const sl_prepared *row) {
    report *r = arg;
    bool bad = false;
    r->rows++;
    count_roles(r, text, n);
    for (uint32_t i = 0; i < row->n; i++) {
        count_part(r, no, i, &row->parts[i]);
        bad |= row->parts[i].reason != SL_R_NONE;
    }
    r->bad_rows += bad;
    r->warnings += row->warn[0] != 0;
}

static double share(const line *l) {
    return (double)l->sum / l->T;
}

static int by_oddness(const void *a, const void *b) {
    double x = ((const line *)a)->odd, y = ((const line *)b)->odd;
    if (x != y) return x < y ? 1 : -1;
    return ((const line *)a)->no < ((const line *)b)->no ? -1 : 1;
}

/* Distance from the mean in standard deviations, of log length and of supervised share, added up. */
static void rank_oddness(report *r) {
    double m[2] = {0}, s[2] = {0};
    for (size_t i = 0; i < r->n; i++) {
        double x[2] = {log(r->v[i].T), share(&r->v[i])};
        for (int k = 0; k < 2; k++) m[k] += x[k], s[k] += x[k] * x[k];
    }
    for (int k = 0; k < 2 && r->n; k++) {
        m[k] /= (double)r->n;
        s[k] = sqrt(fmax(s[k] / (double)r->n - m[k] * m[k], 1e-9));
    }
    for (size_t i = 0; i < r->n; i++)
        r->v[i].odd = fabs(log(r->v[i].T) - m[0]) / s[0] + fabs(share(&r->v[i]) - m[1]) / s[1];
    if (r->n) qsort(r->v, r->n, sizeof *r->v, by_oddness);
}

static void print_json(const report *r) {
    json_t *ro = json_object(), *re = json_object(), *ho = json_object(), *od = json_array();
    for (int i = 0; i < ROLES; i++) json_object_set_new(ro, roles[i], json_integer((json_int_t)r->messages[i]));
    for (int i = 1; i < SL_R_N; i++)
        if (r->reasons[i])
            json_object_set_new(re, sl_reason_name((sl_reason)i), json_integer((json_int_t)r->reasons[i]));
    for (int i = 0; i < HOWS && r->how[i].how; i++)
        json_object_set_new(ho, r->how[i].how, json_integer((json_int_t)r->how[i].n));
    for (size_t i = 0; i < r->n && i < ODDEST; i++)
        json_array_append_new(od,
                              json_pack("{s:I, s:i, s:i, s:i}", "line", (json_int_t)r->v[i].no, "part",
                                        (int)r->v[i].part, "tokens", (int)r->v[i].T, "supervised", (int)r->v[i].sum));
    json_t *all = json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o, s:o, s:o}", "rows", (json_int_t)r->rows,
                            "parts", (json_int_t)r->parts, "accepted", (json_int_t)r->n, "tokens",
                            (json_int_t)r->tokens, "supervised", (json_int_t)r->supervised, "none_supervised",
                            (json_int_t)r->none, "all_supervised", (json_int_t)r->whole, "truncated",
                            (json_int_t)r->truncated, "messages", ro, "rejected", re, "mask_from", ho, "oddest", od);
    json_dumpf(all, stdout, JSON_COMPACT);
    putchar('\n');
    json_decref(all);
}

#define LL(x) ((unsigned long long)(x))

static void print_text(const report *r) {
    printf("rows        %llu in the input, %llu samples from them, %zu accepted\n", LL(r->rows), LL(r->parts), r->n);
    printf("messages   ");
    for (int i = 0; i < ROLES; i++)
        if (r->messages[i]) printf(" %s %llu", roles[i], LL(r->messages[i]));
    printf("\nmasks from ");
    for (int i = 0; i < HOWS && r->how[i].how; i++) printf(" %s %llu", r->how[i].how, LL(r->how[i].n));
    printf("\ntokens      %llu, %llu of them supervised (%.1f %%)\n", LL(r->tokens), LL(r->supervised),
           r->tokens ? 100.0 * (double)r->supervised / (double)r->tokens : 0.0);
    printf("named       %llu with nothing supervised, %llu with everything supervised, %llu truncated, %llu with a "
           "warning\n",
           LL(r->none), LL(r->whole), LL(r->truncated), LL(r->warnings));
    for (int i = 1; i < SL_R_N; i++)
        if (r->reasons[i]) printf("rejected    %s %llu\n", sl_reason_name((sl_reason)i), LL(r->reasons[i]));
    for (size_t i = 0; i < r->n && i < ODDEST; i++)
        printf("%s line %llu%s: %u tokens, %u supervised (%.1f %%)\n", i ? "           " : "oddest     ",
               LL(r->v[i].no), r->v[i].part ? " (later part)" : "", r->v[i].T, r->v[i].sum, 100.0 * share(&r->v[i]));
}

int sl_cmd_mask_report(int argc, char **argv) {
    int n = 0;
    int rc = sl_cli_parse(&cli, argc, argv, &n);
    if (rc != SL_CLI_GO) return rc;
    sl_err err = {0};
    sl_prep_cli p;
    report r = {0};
    rc = sl_prep_cli_open(&p, &o.prep, (sl_prep_cfg){0}, &err);
    if (!rc) rc = sl_prep_cli_each(&p, argv[1], false, take, &r, &err);
    sl_prep_cli_close(&p);
    if (rc) return sl_cli_fail(&err);
    rank_oddness(&r);
    if (o.json)
        print_json(&r);
    else
        print_text(&r);
    free(r.v);
    return r.bad_rows ? 1 : 0;
}
