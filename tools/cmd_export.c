/* sluice export: hands over to the Python package sluice_reader, which knows the trainers' formats. */
#include "tools/cli.h"
#include "tools/commands.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct { const char *format, *dataset, *model, *python; } o = {.python = "python3"};

static const sl_cli_opt opts[] = {
    {"format", 'f', SL_CLI_CHOICE, "speculators|speculators-0.3|specforge|modelopt",
     "speculators: data set folder for speculators 0.5 and later; speculators-0.3: data_i.pt files; specforge: .ckpt "
     "files, last state "
     "after the final norm; modelopt: .pt files with hidden_states_prenorm",
     &o.format, .required = true},
    {"dataset", 0, SL_CLI_STR, "NAME", "only rows of this data set; default all", &o.dataset},
    {"model", 'm', SL_CLI_STR, "DIR",
     "model folder, when the final norm must be applied; default the one in the manifest", &o.model},
    {"python", 0, SL_CLI_STR, "PROGRAM", "Python with numpy (and zstandard, datasets where needed); default python3",
     &o.python},
    {0}};

static const sl_cli cli = {
    "sluice export",
    "STORE DIR",
    "convert a store to the format of a trainer",
    "Writes the committed rows of STORE to the new folder DIR. Layers keep their meaning: each format's own numbering "
    "of layers and "
    "whether its last state is before or after the final norm are converted, and what cannot be converted is refused "
    "with the reason. "
    "DIR.export.json says which row became which file and which layer ids to train with.\n\n"
    "A store of --layout files with --codec none is loaded by speculators as it is and needs no export.",
    "sluice export out train --format speculators\nsluice export out ckpt --format specforge --model ~/models/Qwen3-8B",
    opts,
    2,
    2};

/* Where the package lies: beside the source, or where it was installed. */
static const char *package_dir(void) {
    const char *env = getenv("SLUICE_PYTHON_DIR");
    if (env) return env;
    return access(SL_PYTHON_SOURCE "/sluice_reader/__init__.py", R_OK) ? SL_PYTHON_INSTALL : SL_PYTHON_SOURCE;
}

int sl_cmd_export(int argc, char **argv) {
    int n = 0, rc = sl_cli_parse(&cli, argc, argv, &n);
    if (rc != SL_CLI_GO) return rc;
    const char *old = getenv("PYTHONPATH"), *dir = package_dir();
    char path[8192];
    snprintf(path, sizeof path, "%s%s%s", dir, old && *old ? ":" : "", old ? old : "");
    setenv("PYTHONPATH", path, 1);
    const char *args[16] = {o.python, "-m", "sluice_reader", "export", argv[1], argv[2], "--format", o.format};
    int at = 8;
    if (o.dataset) args[at++] = "--dataset", args[at++] = o.dataset;
    if (o.model) args[at++] = "--model", args[at++] = o.model;
    fflush(stdout);
    execvp(o.python, (char *const *)(void *)args);
    fprintf(stderr, "error: cannot run %s: %s (choose a Python with --python)\n", o.python, strerror(errno));
    return 78;
}
