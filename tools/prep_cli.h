/* prep_cli: what `sluice tokenize` and `sluice mask-report` share: the feeder's own way from a row to ids and masks,
 * set up from options, over the lines of a file. */
#ifndef SL_TOOLS_PREP_CLI_H
#define SL_TOOLS_PREP_CLI_H
#include "stages/feeder/prepare.h"
#include "tools/cli.h"

/* Values of the options below; static storage of the command. */
typedef struct sl_prep_opts {
    const char *model, *chat_template, *template_args, *train_on, *reasoning, *overlong;
    uint64_t max_length, min_supervised;
    bool per_turn;
} sl_prep_opts;
#define SL_PREP_OPTS(o)                                                                                                \
    {"model",                                                                                                          \
     'm',                                                                                                              \
     SL_CLI_STR,                                                                                                       \
     "DIR|FILE",                                                                                                       \
     "model folder (tokenizer.json, or tiktoken.model with tokenizer_config.json), one of those files, or a .gguf",    \
     &(o).model,                                                                                                       \
     .required = true},                                                                                                \
        {"chat-template", 0, SL_CLI_STR, "FILE", "Jinja chat template. Default: the model's own", &(o).chat_template}, \
        {"template-args",   0, SL_CLI_STR, "JSON", "extra arguments of the template, one JSON object",                 \
         &(o).template_args},                                                                                          \
        {"train-on",                                                                                                   \
         0,                                                                                                            \
         SL_CLI_CHOICE,                                                                                                \
         "all-assistant|last-assistant|all",                                                                           \
         "what is supervised. Default all-assistant",                                                                  \
         &(o).train_on},                                                                                               \
        {"per-turn", 0, SL_CLI_FLAG, NULL, "one row for each assistant turn, as served", &(o).per_turn},               \
        {"reasoning",                                                                                                  \
         0,                                                                                                            \
         SL_CLI_CHOICE,                                                                                                \
         "keep-last|template",                                                                                         \
         "keep the last turn's reasoning where the template drops it, or do exactly as the template. Default "         \
         "keep-last",                                                                                                  \
         &(o).reasoning},                                                                                              \
        {"max-length", 0, SL_CLI_U64, "N", "tokens a row. Default: no limit", &(o).max_length},                        \
        {"overlong",   0, SL_CLI_CHOICE, "truncate|skip|split", "rows beyond max-length. Default truncate",            \
         &(o).overlong},                                                                                               \
    {                                                                                                                  \
        "min-supervised", 0, SL_CLI_U64, "N", "reject rows with fewer supervised tokens. Default 0",                   \
            &(o).min_supervised                                                                                        \
    }

typedef struct sl_prep_cli {
    sl_tokenizer *tok;
    sl_template *tmpl;
    sl_preparer *prep;
    sl_err tmpl_why;
    bool waited; /* that a row waits was said */
} sl_prep_cli;
int sl_prep_cli_open(sl_prep_cli *p, const sl_prep_opts *o, sl_prep_cfg cfg, sl_err *err);
void sl_prep_cli_close(sl_prep_cli *p);

/* Each non-empty line of FILE ("-" = standard input), numbered from 1; whole: the input is one text, given as a row of
 * text. Lines longer than the feeder takes are read and refused like others. */
typedef void (*sl_prep_cli_row)(void *arg, uint64_t line, const char *text, size_t n, const sl_prepared *p);
int sl_prep_cli_each(sl_prep_cli *p, const char *path, bool whole, sl_prep_cli_row fn, void *arg, sl_err *err);
#endif
