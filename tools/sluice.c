/* sluice: the command line. It only looks the command up; each command is its own file (commands.h). */
#include "tools/commands.h"
#include "tools/cli.h"
#include <signal.h>
#include <string.h>

typedef struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *brief;
} command;

/* One row a command; a NULL function is a heading of the overview. */
static const command commands[] = {
    {"Running", NULL, NULL},
    {"extract", sl_cmd_extract, "hidden states of every row of a file, in one command"},
    {"push", sl_cmd_push, "send rows to a running service"},
    {"monitor", sl_cmd_monitor, "watch a running service"},
    {"status", sl_cmd_status, "what a running service is doing, once"},
    {"drain", sl_cmd_drain, "let a running service finish what it has accepted, then end"},
    {"check", sl_cmd_check, "is this machine ready, and what to do where it is not"},
    {"Looking at data", NULL, NULL},
    {"verify", sl_cmd_verify, "is a store whole, and do its logs agree with it"},
    {"cat", sl_cmd_cat, "one row of a store: statistics, safetensors or .npy"},
    {"export", sl_cmd_export, "convert a store to the format of a trainer"},
    {"salvage", sl_cmd_salvage, "rebuild a damaged store from its shards"},
    {"inspect", sl_cmd_inspect, "what a model is and what running it takes"},
    {"tokenize", sl_cmd_tokenize, "show the token ids and the loss mask of rows"},
    {"mask-report", sl_cmd_mask_report, "summary of what a data set would train on"},
    {"Measuring", NULL, NULL},
    {"bench", sl_cmd_bench, "how fast each stage is here"},
    {NULL, NULL, NULL},
};

static void overview(FILE *f) {
    fputs("sluice - stream hidden states out of large language models, with proof\n\n"
          "usage: sluice COMMAND [OPTION...] [ARGUMENT...]\n",
          f);
    for (const command *c = commands; c->name; c++) {
        if (c->run)
            fprintf(f, "  %-12s %s\n", c->name, c->brief);
        else
            fprintf(f, "\n%s\n", c->name);
    }
    fputs("\n'sluice COMMAND --help' is the manual of a command. stdout is data, stderr is talk.\n"
          "Exit status: 0 done, 1 some rows rejected or unhealthy, 2 wrong use, 75 temporary, 78 configuration.\n",
          f);
}

int main(int argc, char **argv) {
    if (argc < 2) {
        overview(stderr);
        return 2;
    }
    const char *name = argv[1];
    if (!strcmp(name, "--help") || !strcmp(name, "-h") || (!strcmp(name, "help") && argc < 3)) {
        overview(stdout);
        return 0;
    }
    if (!strcmp(name, "--version")) {
        puts("sluice " SL_VERSION);
        return 0;
    }
    char *help_args[] = {argv[1], "--help", NULL};
    int n = argc - 1;
    char **args = argv + 1;
    if (!strcmp(name, "help")) name = help_args[0] = argv[2], args = help_args, n = 2;
    for (const command *c = commands; c->name; c++)
        if (c->run && !strcmp(c->name, name)) return c->run(n, args);
    fprintf(stderr, "sluice: unknown command '%s'\nTry 'sluice --help'.\n", name);
    return 2;
}
