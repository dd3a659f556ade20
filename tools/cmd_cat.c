/* sluice cat: one row of a store, or one of its states, as statistics, safetensors or .npy. */
#include "tools/cli.h"
#include "tools/commands.h"
#include "stages/writer/reader.h"
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct {
    const char *dataset, *layer, *format, *output;
    uint64_t part;
    bool json;
} o = {.format = "stats"};

static const sl_cli_opt opts[] = {
    {"layer", 'l', SL_CLI_STR, "H", "one state only: its H index, or final for the final-normed one; default all",
     &o.layer},
    {"format", 'f', SL_CLI_CHOICE, "stats|safetensors|npy",
     "stats: a line a state (default); safetensors: the row as layout files stores it, with --layer one tensor [T, "
     "width]; npy: one state as float32 [T, width]",
     &o.format},
    {"dataset", 0, SL_CLI_STR, "NAME", "data set of the row; default the first one", &o.dataset},
    {"part", 0, SL_CLI_U64, "N", "part of a row that was split, or turn; default 0", &o.part, .min = 0,
     .max = 4294967295.0},
    {"output", 'o', SL_CLI_STR, "FILE", "write there instead of stdout", &o.output},
    {"json", 0, SL_CLI_FLAG, NULL, "stats as one JSON object", &o.json},
    {0}};

static const sl_cli cli = {"sluice cat",
                           "STORE ROW",
                           "one row of a store: statistics, safetensors or .npy",
                           "Reads ROW (the row's number in its data set) of STORE, whatever layout and codec it has; "
                           "every block is checked against its "
                           "checksum on the way. Only what is asked for is read: one state of one row of a large shard "
                           "costs its own bytes.\n\n"
                           "Statistics: per state mean, standard deviation, smallest and largest element, and mean "
                           "length of a token's vector.",
                           "sluice cat out 17\nsluice cat out 17 --layer 18 -f npy -o h18.npy\nsluice cat out 17 -f "
                           "safetensors > row.safetensors",
                           opts,
                           2,
                           2};

typedef struct row {
    sl_reader *r;
    const sl_manifest *m;
    const sl_commit_rec *c;
    uint64_t i;
    int k; /* state, -1: all */
    FILE *out;
} row;

static const char *label(const row *w, uint32_t k, char buf[32]) {
    const sl_capture *c = &w->m->set.v[k];
    if (c->final_norm)
        snprintf(buf, 32, "final_norm");
    else
        snprintf(buf, 32, "H[%u]", c->hidx);
    return buf;
}

static int pick_state(row *w, sl_err *err) {
    char idx[1024];
    w->k = -1;
    if (!o.layer) return 0;
    char *end;
    unsigned long h = strtoul(o.layer, &end, 10);
    bool fin = !strcmp(o.layer, "final");
    for (uint32_t k = 0; k < w->m->set.n; k++) {
        const sl_capture *c = &w->m->set.v[k];
        if (fin ? c->final_norm : !c->final_norm && !*end && *o.layer && c->hidx == h) w->k = (int)k;
    }
    sl_capture_text(&w->m->set, idx, sizeof idx);
    return w->k >= 0
               ? 0
               : sl_err_set(err, SL_EUSAGE,
                            "state '%s' is not in the store, which has H %s (n: final-normed, asked for as 'final')",
                            o.layer, idx);
}

static float at(const sl_manifest *m, const void *p, uint64_t i) {
    float f;
    if (m->set.elem_size == 4) return ((const float *)p)[i];
    uint32_t u = (uint32_t)((const uint16_t *)p)[i] << 16;
    memcpy(&f, &u, 4);
    return f;
}

typedef struct stats {
    double mean, std, min, max, norm;
} stats;

static int state_stats(const row *w, uint32_t k, stats *s, sl_err *err) {
    uint32_t H = w->m->set.width, per = sl_store_block_rows(H, w->m->set.elem_size);
    void *buf = malloc((uint64_t)per * H * w->m->set.elem_size);
    double sum = 0, sq = 0, norm = 0;
    int rc = buf ? 0 : sl_err_set(err, SL_ETEMP, "no memory");
    *s = (stats){.min = INFINITY, .max = -INFINITY};
    for (uint32_t t = 0; !rc && t < w->c->T; t += per) {
        uint32_t n = w->c->T - t < per ? w->c->T - t : per;
        rc = sl_reader_state(w->r, w->i, k, t, n, buf, err);
        for (uint32_t j = 0; !rc && j < n; j++) {
            double len = 0;
            for (uint32_t h = 0; h < H; h++) {
                double v = (double)at(w->m, buf, (uint64_t)j * H + h);
                sum += v;
                len += v * v;
                s->min = fmin(s->min, v);
                s->max = fmax(s->max, v);
            }
            sq += len;
            norm += sqrt(len);
        }
    }
    free(buf);
    double n = (double)w->c->T * H;
    s->mean = sum / n;
    s->std = sqrt(fmax(0, sq / n - s->mean * s->mean));
    s->norm = norm / w->c->T;
    return rc;
}

static int print_stats(const row *w, sl_err *err) {
    char nm[32], id[257];
    int rc = sl_reader_meta(w->r, w->i, NULL, NULL, id, err);
    if (rc) return rc;
    json_t *list = json_array();
    if (!o.json) {
        fprintf(w->out, "row %" PRIu64 " of '%s'%s%s: %u tokens (%u supervised), %u states of width %u, %s", w->c->row,
                sl_reader_dataset(w->r, w->c), *id ? ", id " : "", id, w->c->T, w->c->mask_sum, w->m->set.n,
                w->m->set.width, w->m->set.elem_size == 2 ? "bf16" : "f32");
        if (!isnan(w->c->nll)) fprintf(w->out, ", NLL %.4f", (double)w->c->nll);
        fprintf(w->out, "\n%-12s %12s %12s %12s %12s %12s\n", "state", "mean", "std", "min", "max", "|token|");
    }
    for (uint32_t k = 0; !rc && k < w->m->set.n; k++) {
        stats s;
        if (w->k >= 0 && k != (uint32_t)w->k) continue;
        if ((rc = state_stats(w, k, &s, err))) break;
        if (o.json)
            json_array_append_new(list, json_pack("{s:s,s:f,s:f,s:f,s:f,s:f}", "state", label(w, k, nm), "mean", s.mean,
                                                  "std", s.std, "min", s.min, "max", s.max, "token_norm", s.norm));
        else
            fprintf(w->out, "%-12s %12.5g %12.5g %12.5g %12.5g %12.5g\n", label(w, k, nm), s.mean, s.std, s.min, s.max,
                    s.norm);
    }
    json_t *j = json_pack("{s:I,s:s%,s:s,s:i,s:i,s:i,s:o,s:o}", "row", (json_int_t)w->c->row, "id", id, strlen(id),
                          "dataset", sl_reader_dataset(w->r, w->c), "tokens", (int)w->c->T, "supervised",
                          (int)w->c->mask_sum, "width", (int)w->m->set.width, "nll",
                          isnan(w->c->nll) ? json_null() : json_real((double)w->c->nll), "states", list);
    if (o.json && !rc) json_dumpf(j, w->out, JSON_INDENT(2) | JSON_PRESERVE_ORDER), fputc('\n', w->out);
    json_decref(j);
    return rc;
}

/* Elements of one state in order, `wide`: as float32. */
static int write_state(const row *w, uint32_t k, bool wide, sl_err *err) {
    uint32_t H = w->m->set.width, per = sl_store_block_rows(H, w->m->set.elem_size);
    void *buf = malloc((uint64_t)per * H * w->m->set.elem_size);
    float *f = malloc((uint64_t)per * H * 4);
    int rc = buf && f ? 0 : sl_err_set(err, SL_ETEMP, "no memory");
    for (uint32_t t = 0; !rc && t < w->c->T; t += per) {
        uint32_t n = w->c->T - t < per ? w->c->T - t : per;
        if ((rc = sl_reader_state(w->r, w->i, k, t, n, buf, err))) break;
        for (uint64_t j = 0; wide && j < (uint64_t)n * H; j++) f[j] = at(w->m, buf, j);
        fwrite(wide ? (void *)f : buf, wide ? 4 : w->m->set.elem_size, (uint64_t)n * H, w->out);
    }
    free(buf);
    free(f);
    return rc;
}

static int write_npy(const row *w, sl_err *err) {
    char h[128];
    if (w->k < 0) return sl_err_set(err, SL_EUSAGE, "--format npy holds one state: choose it with --layer");
    int n = snprintf(h + 10, sizeof h - 10, "{'descr': '<f4', 'fortran_order': False, 'shape': (%u, %u), }", w->c->T,
                     w->m->set.width);
    memset(h + 10 + n, ' ', sizeof h - 10 - (size_t)n);
    memcpy(h, "\x93NUMPY\x01\x00\x76\x00", 10); /* 0x76 = 118 bytes of header follow */
    h[sizeof h - 1] = '\n';
    fwrite(h, 1, sizeof h, w->out);
    return write_state(w, (uint32_t)w->k, true, err);
}

static int write_one_tensor(const row *w, sl_err *err) {
    char nm[32], h[512];
    uint64_t bytes = (uint64_t)w->c->T * w->m->set.width * w->m->set.elem_size;
    int n = snprintf(
        h + 8, sizeof h - 8, "{\"%s\":{\"dtype\":\"%s\",\"shape\":[%u,%u],\"data_offsets\":[0,%" PRIu64 "]}}",
        label(w, (uint32_t)w->k, nm), w->m->set.elem_size == 2 ? "BF16" : "F32", w->c->T, w->m->set.width, bytes);
    while ((8 + n) % 64) h[8 + n++] = ' ';
    uint64_t len = (uint64_t)n;
    memcpy(h, &len, 8);
    fwrite(h, 1, 8 + len, w->out);
    return write_state(w, (uint32_t)w->k, false, err);
}

/* As layout files has it, token by token. */
static int write_row(const row *w, sl_err *err) {
    const sl_capture_set *c = &w->m->set;
    uint32_t T = w->c->T, K = sl_capture_stacked(c);
    uint64_t rb = (uint64_t)c->width * c->elem_size, len, data;
    const sl_accepted_row *a = sl_accepted_at(sl_reader_accepted(w->r), w->c->seq);
    uint8_t *buf = malloc(rb * K), *mask = malloc(T);
    int32_t *ids = malloc(4ull * T);
    char id[257];
    int rc =
        buf && mask && ids ? sl_reader_meta(w->r, w->i, ids, mask, id, err) : sl_err_set(err, SL_ETEMP, "no memory");
    sl_st_row s = {.row = w->c->row,
                   .part = sl_reader_part(w->r, w->c),
                   .T = T,
                   .mask_sum = w->c->mask_sum,
                   .id = id,
                   .id_len = a ? a->id_len : 0,
                   .dataset = sl_reader_dataset(w->r, w->c),
                   .nll = (double)w->c->nll};
    char *h = rc ? NULL : sl_st_header(c, &s, &len, &data);
    if (!rc && !h) rc = sl_err_set(err, SL_ETEMP, "no memory");
    uint8_t *all = rc ? NULL : malloc((uint64_t)T * rb * c->n); /* one row; a reader that wants less asks for a layer */
    if (!rc && !all)
        rc = sl_err_set(err, SL_ETEMP, "no memory for a row of %" PRIu64 " bytes", (uint64_t)T * rb * c->n);
    for (uint32_t k = 0; !rc && k < c->n; k++)
        rc = sl_reader_state(w->r, w->i, k, 0, T, all + (uint64_t)k * T * rb, err);
    if (!rc) fwrite(h, 1, len, w->out);
    for (uint32_t t = 0; !rc && t < T; t++)
        for (uint32_t k = 0; k < K; k++) fwrite(all + ((uint64_t)k * T + t) * rb, 1, rb, w->out);
    if (!rc && K < c->n) fwrite(all + (uint64_t)K * T * rb, 1, (uint64_t)T * rb, w->out);
    for (uint32_t t = 0; !rc && t < T; t++) fwrite(&(int64_t){ids[t]}, 8, 1, w->out);
    if (!rc) fwrite(mask, 1, T, w->out);
    free(all);
    free(h);
    free(buf);
    free(mask);
    free(ids);
    return rc;
}

static int show(row *w, sl_err *err) {
    bool text = !strcmp(o.format, "stats");
    if (!text && w->out == stdout && isatty(1))
        return sl_err_set(err, SL_EUSAGE, "binary data does not go to a terminal: redirect it, or give --output FILE");
    int rc = pick_state(w, err);
    if (rc) return rc;
    if (text) return print_stats(w, err);
    if (!strcmp(o.format, "npy")) return write_npy(w, err);
    return w->k >= 0 ? write_one_tensor(w, err) : write_row(w, err);
}

int sl_cmd_cat(int argc, char **argv) {
    int n = 0, rc = sl_cli_parse(&cli, argc, argv, &n);
    if (rc != SL_CLI_GO) return rc;
    sl_err err = {0};
    char *end;
    row w = {.out = stdout};
    unsigned long long number = strtoull(argv[2], &end, 10);
    if (*end || end == argv[2])
        rc = sl_err_set(&err, SL_EUSAGE, "'%s' is not a row number", argv[2]);
    else
        rc = sl_reader_open(&w.r, argv[1], &err);
    if (!rc) {
        int64_t i = sl_reader_find(w.r, o.dataset, number, (uint32_t)o.part, &err);
        rc = i < 0 ? (int)i : 0;
        w.i = i < 0 ? 0 : (uint64_t)i;
    }
    if (!rc && o.output && !(w.out = fopen(o.output, "wb")))
        rc = sl_err_sys(&err, SL_EUSAGE, errno, "cannot write %s", o.output);
    if (!rc) {
        w.m = sl_reader_manifest(w.r);
        w.c = sl_reader_row(w.r, w.i);
        rc = show(&w, &err);
    }
    if (w.out && (fflush(w.out) || ferror(w.out)) && !rc) rc = sl_err_sys(&err, SL_ETEMP, errno, "writing failed");
    if (w.out && w.out != stdout) fclose(w.out);
    sl_reader_close(w.r);
    return rc ? sl_cli_fail(&err) : 0;
}
