/* sluice tokenize: what a model's tokenizer makes of texts. Needs the tokenizer's files only, no weights. */
#include "tools/cli.h"
#include "tools/commands.h"
#include "stages/feeder/tokenizer.h"
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

static struct {
    const char *model;
    bool json, text, special, plain;
} o;

static const sl_cli_opt opts[] = {
    {"model", 'm', SL_CLI_STR, "DIR|FILE",
     "model folder (tokenizer.json, or tiktoken.model with tokenizer_config.json), one of those files, or a .gguf",
     &o.model, .required = true},
    {"text", 0, SL_CLI_FLAG, NULL, "the whole input is one text, not JSON lines", &o.text},
    {"json", 0, SL_CLI_FLAG, NULL, "print one JSON object a row: text, input_ids, or rejected with the reason",
     &o.json},
    {"add-special", 0, SL_CLI_FLAG, NULL,
     "add the tokens that the model puts around a text (BOS), as for rows of plain text", &o.special},
    {"no-parse-special", 0, SL_CLI_FLAG, NULL,
     "special tokens written in the text stay text; by default they become control tokens", &o.plain},
    {0}};

static const sl_cli cli = {
    "sluice tokenize",
    "FILE|-",
    "show the token ids of texts",
    "Reads JSON lines with a \"text\" member from FILE or standard input and prints the ids that the model's own "
    "tokenizer gives. Rows that "
    "cannot be encoded are named with their line; the exit status is then 1.\n\n"
    "Without --json a row shows as its ids, each followed by the piece of text that it stands for.",
    "sluice tokenize --model ~/models/Qwen3-8B --json rows.jsonl\n"
    "echo 'Hello there' | sluice tokenize --model model.gguf --text -",
    opts,
    1,
    1};

typedef struct job {
    sl_tokenizer *t;
    sl_tok_scratch *s;
    sl_ids ids;
    uint64_t line, rows, rejected;
} job;

static void print_piece(const sl_tokenizer *t, int32_t id) {
    size_t n;
    const char *p = sl_tokenizer_piece(t, id, &n);
    for (size_t i = 0; p && i < n; i++) {
        unsigned char c = (unsigned char)p[i];
        if (c == '\n')
            fputs("\\n", stdout);
        else if (c == '\t')
            fputs("\\t", stdout);
        else if (c < 32 || c == 127)
            printf("\\x%02x", c);
        else
            putchar(c);
    }
}

static void show_json(const job *j, const char *text, size_t n) {
    json_t *root = json_object(), *ids = json_array();
    for (size_t i = 0; i < j->ids.n; i++) json_array_append_new(ids, json_integer(j->ids.ids[i]));
    json_object_set_new(root, "line", json_integer((json_int_t)j->line));
    json_object_set_new(root, "text", json_stringn(text, n));
    json_object_set_new(root, "input_ids", ids);
    json_dumpf(root, stdout, JSON_COMPACT);
    putchar('\n');
    json_decref(root);
}

static void show_plain(const job *j) {
    printf("# line %llu: %zu tokens\n", (unsigned long long)j->line, j->ids.n);
    for (size_t i = 0; i < j->ids.n; i++) {
        printf("%8d  ", j->ids.ids[i]);
        print_piece(j->t, j->ids.ids[i]);
        putchar('\n');
    }
}

static void reject(job *j, const char *why) {
    j->rejected++;
    if (o.json) {
        json_t *root = json_pack("{s:I, s:s}", "line", (json_int_t)j->line, "rejected", why);
        json_dumpf(root, stdout, JSON_COMPACT);
        putchar('\n');
        json_decref(root);
    } else
        printf("# line %llu: rejected: %s\n", (unsigned long long)j->line, why);
}

static void encode(job *j, const char *text, size_t n) {
    sl_err err = {0};
    j->rows++;
    j->ids.n = 0;
    if (sl_tokenizer_encode(j->t, j->s, text, n, o.special, !o.plain, &j->ids, &err))
        reject(j, err.msg);
    else if (o.json)
        show_json(j, text, n);
    else
        show_plain(j);
}

static void line_of_json(job *j, const char *line, size_t n) {
    json_error_t je;
    json_t *root = json_loadb(line, n, JSON_ALLOW_NUL | JSON_REJECT_DUPLICATES, &je);
    const json_t *text = json_object_get(root, "text");
    if (root && json_is_string(text))
        encode(j, json_string_value(text), json_string_length(text));
    else {
        char why[256];
        j->rows++;
        if (!root)
            snprintf(why, sizeof why, "not JSON: %s (column %d)", je.text, je.column);
        else
            snprintf(why, sizeof why, "no \"text\" string in the row");
        reject(j, why);
    }
    json_decref(root);
}

static int read_lines(job *j, FILE *f) {
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    while ((n = getline(&line, &cap, f)) >= 0) {
        j->line++;
        if (n && line[n - 1] == '\n') n--;
        if (n) line_of_json(j, line, (size_t)n);
    }
    free(line);
    return ferror(f) ? -1 : 0;
}

static int read_whole(job *j, FILE *f) {
    char *text = NULL;
    size_t n = 0, cap = 0;
    j->line = 1;
    while (!feof(f) && !ferror(f)) {
        if (n == cap) {
            char *p = realloc(text, cap = cap * 2 + 65536);
            if (!p) break;
            text = p;
        }
        n += fread(text + n, 1, cap - n, f);
    }
    bool ok = feof(f) != 0 && !ferror(f);
    if (ok) encode(j, text, n);
    free(text);
    return ok ? 0 : -1;
}

static int run(job *j, const char *path, sl_err *err) {
    FILE *f = strcmp(path, "-") ? fopen(path, "r") : stdin;
    if (!f) return sl_err_sys(err, SL_EUSAGE, errno, "opening %s", path);
    int rc = o.text ? read_whole(j, f) : read_lines(j, f);
    if (f != stdin) fclose(f);
    if (rc) return sl_err_sys(err, SL_ETEMP, errno, "reading %s", path);
    return fflush(stdout) || ferror(stdout) ? sl_err_sys(err, SL_ETEMP, errno, "writing the result") : 0;
}

int sl_cmd_tokenize(int argc, char **argv) {
    int n = 0;
    int rc = sl_cli_parse(&cli, argc, argv, &n);
    if (rc != SL_CLI_GO) return rc;
    sl_err err = {0};
    job j = {0};
    rc = sl_tokenizer_load(&j.t, o.model, &err);
    if (!rc && !(j.s = sl_tok_scratch_new())) rc = sl_err_set(&err, SL_ETEMP, "out of memory");
    if (!rc) rc = run(&j, argv[1], &err);
    free(j.ids.ids);
    free(j.ids.off);
    sl_tok_scratch_free(j.s);
    sl_tokenizer_free(j.t);
    if (rc) return sl_cli_fail(&err);
    if (j.rejected)
        fprintf(stderr, "%llu of %llu rows rejected\n", (unsigned long long)j.rejected, (unsigned long long)j.rows);
    return j.rejected ? 1 : 0;
}
