/* sluice bench tokenize: text to ids on one thread. */
#include "tools/bench_tokenize.h"
#include "tools/cli.h"
#include "stages/feeder/bench_tok.h"
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define TEXT_BYTES 4096

static struct {
    const char *model;
    uint64_t rounds;
} o = {.rounds = 3};

static const sl_cli_opt opts[] = {
    {"model", 'm', SL_CLI_STR, "DIR|FILE", "model folder with a tokenizer, one of its tokenizer's files, or a .gguf",
     &o.model, .required = true},
    {"rounds", 0, SL_CLI_U64, "N", "times the file is encoded; the fastest counts (default 3)", &o.rounds, .min = 1,
     .max = 1000},
    {0}};

static const sl_cli cli = {
    "sluice bench tokenize",
    "FILE",
    "text to token ids on one thread",
    "FILE is UTF-8 text; it is cut into texts of about 4 KiB at line ends. The first round fills the cache of "
    "pieces. tests/bench/hf_tokenizers.py times the PyPI package on the same texts.",
    "  sluice bench tokenize --model ~/models/Qwen3-8B corpus.txt",
    opts,
    1,
    1};

typedef struct corpus {
    char *s;
    const char **text;
    size_t *len, n;
} corpus;

static int load(corpus *c, const char *path, sl_err *err) {
    FILE *f = fopen(path, "rb");
    size_t size = 0, cap = 0;
    if (!f) return sl_err_sys(err, SL_EUSAGE, errno, "opening %s", path);
    while (!feof(f) && !ferror(f)) {
        if (size == cap) {
            char *p = realloc(c->s, cap = cap * 2 + (1 << 20));
            if (!p) break;
            c->s = p;
        }
        size += fread(c->s + size, 1, cap - size, f);
    }
    bool ok = feof(f) != 0 && !ferror(f);
    fclose(f);
    if (!ok) return sl_err_set(err, SL_ETEMP, "%s could not be read into memory", path);
    if (!size) return sl_err_set(err, SL_EUSAGE, "%s is empty", path);
    c->text = malloc((size / TEXT_BYTES + 2) * sizeof *c->text);
    c->len = malloc((size / TEXT_BYTES + 2) * sizeof *c->len);
    if (!c->text || !c->len) return sl_err_set(err, SL_ETEMP, "out of memory");
    for (size_t at = 0; at < size; at += c->len[c->n++]) {
        size_t from = at + TEXT_BYTES < size ? at + TEXT_BYTES : size;
        const char *nl = memchr(c->s + from, '\n', size - from);
        c->text[c->n] = c->s + at;
        c->len[c->n] = nl ? (size_t)(nl + 1 - c->s) - at : size - at;
    }
    return 0;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int sl_bench_cmd_tokenize(int argc, char **argv) {
    int n = 0, rc = sl_cli_parse(&cli, argc, argv, &n);
    if (rc != SL_CLI_GO) return rc;
    corpus c = {0};
    sl_err err = {0};
    sl_tokenizer *t = NULL;
    sl_bench_tok r;
    rc = load(&c, argv[1], &err);
    double start = now();
    if (!rc) rc = sl_tokenizer_load(&t, o.model, &err);
    double load_s = now() - start;
    if (!rc) rc = sl_bench_tokenize(t, c.text, c.len, c.n, (int)o.rounds, &r, &err);
    if (!rc) {
        json_t *j =
            json_pack("{s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:f}", "bench", "tokenize", "kind",
                      sl_tokenizer_kind(t), "hash", sl_tokenizer_hash(t), "texts", (json_int_t)c.n, "bytes",
                      (json_int_t)r.bytes, "tokens", (json_int_t)r.tokens, "rounds", (json_int_t)r.rounds, "load_s",
                      load_s, "seconds", r.seconds, "mb_per_s", r.mb_per_s, "tok_per_s", r.tokens_per_s);
        json_dumpf(j, stdout, JSON_REAL_PRECISION(6));
        putchar('\n');
        json_decref(j);
    }
    sl_tokenizer_free(t);
    free(c.s);
    free(c.text);
    free(c.len);
    return rc ? sl_cli_fail(&err) : 0;
}
