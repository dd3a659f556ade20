/* sluice tokenize: what the feeder makes of rows: rendered text, token ids, and which tokens are supervised. Needs the
 * tokenizer's files only, no weights. */
#include "tools/cli.h"
#include "tools/commands.h"
#include "tools/prep_cli.h"
#include <string.h>
#include <unistd.h>

static struct {
    sl_prep_opts prep;
    bool json, text, special, plain;
    const char *color;
} o;

static const sl_cli_opt opts[] = {
    SL_PREP_OPTS(o.prep),
    {"json", 0, SL_CLI_FLAG, NULL,
     "print one JSON object a row: text, input_ids, loss_mask; or rejected (its name) and reason (a sentence)",
     &o.json},
    {"text", 0, SL_CLI_FLAG, NULL, "the whole input is one text, not JSON lines", &o.text},
    {"add-special", 0, SL_CLI_FLAG, NULL,
     "add the tokens that the model puts around a plain text (BOS), as the feeder does for rows of text", &o.special},
    {"no-parse-special", 0, SL_CLI_FLAG, NULL,
     "special tokens written in plain text stay text; by default they become control tokens", &o.plain},
    {"color", 0, SL_CLI_CHOICE, "auto|always|never", "mark supervised text by colour, or else by [[ ]]. Default auto",
     &o.color},
    {0}};

static const sl_cli cli = {
    "sluice tokenize",
    "FILE|-",
    "show the token ids and the loss mask of rows",
    "Reads rows (JSON lines: messages, conversations, prompt and completion, text, or input_ids) from FILE or standard "
    "input and shows what the feeder would make of them: the text that the model's chat template renders, the ids of "
    "the model's own tokenizer, and the tokens that are supervised. The loss mask lies on the token itself, not "
    "shifted. Rows that cannot be used are named with their line and the reason; the exit status is then 1.\n\n"
    "Without --json a row shows as its text, supervised spans in colour, and its ids.",
    "sluice tokenize --model ~/models/Qwen3-8B train.jsonl | less -R\n"
    "sluice tokenize --model ~/models/Qwen3-8B --json rows.jsonl\n"
    "echo 'Hello there' | sluice tokenize --model model.gguf --text -",
    opts,
    1,
    1};

typedef struct job {
    const char *on, *off;
    uint64_t rows, rejected;
} job;

static json_t *numbers(const sl_part *p, bool mask) {
    json_t *a = json_array();
    for (uint32_t i = 0; i < p->T; i++) json_array_append_new(a, json_integer(mask ? p->mask[i] : p->ids[i]));
    return a;
}

static void show_json(uint64_t line, uint32_t part, const sl_prepared *row) {
    const sl_part *p = &row->parts[part];
    json_t *o1 = json_object();
    json_object_set_new(o1, "line", json_integer((json_int_t)line));
    if (row->n > 1) json_object_set_new(o1, "part", json_integer(part));
    if (row->id_len) json_object_set_new(o1, "id", json_stringn(row->id, row->id_len));
    if (p->reason) {
        json_object_set_new(o1, "rejected", json_string(sl_reason_name(p->reason)));
        json_object_set_new(o1, "reason", json_stringn(p->why, sl_utf8_check(p->why, strlen(p->why))));
    }
    if (p->text) json_object_set_new(o1, "text", json_stringn(p->text, p->text_len));
    if (p->T) {
        json_object_set_new(o1, "input_ids", numbers(p, false));
        if (!p->reason || p->reason == SL_R_UNSUPERVISED) json_object_set_new(o1, "loss_mask", numbers(p, true));
    }
    if (!p->reason) json_object_set_new(o1, "mask_from", json_string(p->how));
    if (p->flags & SL_PART_TRUNCATED) json_object_set_new(o1, "truncated", json_true());
    if (row->warn[0])
        json_object_set_new(o1, "warning", json_stringn(row->warn, sl_utf8_check(row->warn, strlen(row->warn))));
    json_dumpf(o1, stdout, JSON_COMPACT);
    putchar('\n');
    json_decref(o1);
}

static void put_text(const char *s, size_t n) {
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)s[i];
        if ((c < 32 && c != '\n' && c != '\t') || c == 127)
            printf("\\x%02x", c);
        else
            putchar(c);
    }
}

/* The text, in runs of equal mask. The tokens say where a run starts. */
static void show_text(const job *j, const sl_part *p) {
    for (uint32_t i = 0; i < p->T;) {
        uint32_t k = i;
        while (k < p->T && p->mask[k] == p->mask[i]) k++;
        size_t a = p->off[i], b = k < p->T ? p->off[k] : p->text_len;
        if (p->mask[i]) fputs(j->on, stdout);
        put_text(p->text + a, b - a);
        if (p->mask[i]) fputs(j->off, stdout);
        i = k;
    }
    putchar('\n');
}

static void show_ids(const job *j, const sl_part *p) {
    for (uint32_t i = 0; i < p->T; i++) {
        bool start = p->mask[i] && (i == 0 || !p->mask[i - 1]), end = p->mask[i] && (i + 1 == p->T || !p->mask[i + 1]);
        printf("%s%s%d%s", i ? " " : "", start ? j->on : "", p->ids[i], end ? j->off : "");
    }
    putchar('\n');
}

static void show_plain(const job *j, uint64_t line, uint32_t part, const sl_prepared *row) {
    const sl_part *p = &row->parts[part];
    printf("# line %llu", (unsigned long long)line);
    if (row->n > 1) printf(", part %u", part);
    if (row->id_len) printf(", id %.*s", (int)row->id_len, row->id);
    if (p->reason)
        printf(": rejected %s: %s\n", sl_reason_name(p->reason), p->why);
    else
        printf(": %u tokens, %u supervised (%s)%s\n", p->T, p->mask_sum, p->how,
               p->flags & SL_PART_TRUNCATED ? ", truncated" : "");
    if (row->warn[0]) printf("# warning: %s\n", row->warn);
    if (p->text && p->T) show_text(j, p);
    if (p->T && (!p->reason || p->text)) show_ids(j, p);
    putchar('\n');
}

static void show(void *arg, uint64_t line, const char *text, size_t n, const sl_prepared *row) {
    job *j = arg;
    bool bad = false;
    (void)text;
    (void)n;
    for (uint32_t i = 0; i < row->n; i++) {
        bad |= row->parts[i].reason != SL_R_NONE;
        if (o.json)
            show_json(line, i, row);
        else
            show_plain(j, line, i, row);
    }
    j->rows++;
    j->rejected += bad;
}

int sl_cmd_tokenize(int argc, char **argv) {
    int n = 0;
    int rc = sl_cli_parse(&cli, argc, argv, &n);
    if (rc != SL_CLI_GO) return rc;
    bool color = o.color && strcmp(o.color, "auto") != 0 ? !strcmp(o.color, "always") : isatty(1);
    job j = {.on = color ? "\033[1;32m" : "[[", .off = color ? "\033[0m" : "]]"};
    sl_err err = {0};
    sl_prep_cli p;
    rc = sl_prep_cli_open(&p, &o.prep, (sl_prep_cfg){.keep_text = true, .text_bare = !o.special, .text_plain = o.plain},
                          &err);
    if (!rc) rc = sl_prep_cli_each(&p, argv[1], o.text, show, &j, &err);
    sl_prep_cli_close(&p);
    if (rc) return sl_cli_fail(&err);
    if (j.rejected)
        fprintf(stderr, "%llu of %llu rows rejected\n", (unsigned long long)j.rejected, (unsigned long long)j.rows);
    return j.rejected ? 1 : 0;
}
