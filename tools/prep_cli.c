#include "tools/prep_cli.h"
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

static uint32_t choice(const char *said, const char *const *words) {
    for (uint32_t i = 0; said && words[i]; i++)
        if (!strcmp(said, words[i])) return i;
    return 0;
}

int sl_prep_cli_open(sl_prep_cli *p, const sl_prep_opts *o, sl_prep_cfg cfg, sl_err *err) {
    static const char *const train[] = {"all-assistant", "last-assistant", "all", NULL};
    static const char *const reasoning[] = {"keep-last", "template", NULL};
    static const char *const overlong[] = {"truncate", "skip", "split", NULL};
    memset(p, 0, sizeof *p);
    const char *args = o->template_args ? o->template_args : "{}", *file = o->chat_template ? o->chat_template : "";
    int rc = sl_tokenizer_load(&p->tok, o->model, err);
    if (rc) return rc;
    rc = sl_template_load(&p->tmpl, o->model, file, args, &p->tmpl_why);
    if (rc) {
        if (err) *err = p->tmpl_why;
        return rc;
    }
    if (o->max_length > INT32_MAX || o->min_supervised > INT32_MAX)
        return sl_err_set(err, SL_EUSAGE, "max-length and min-supervised are at most %d", INT32_MAX);
    cfg.tok = p->tok;
    cfg.tmpl = p->tmpl;
    cfg.tmpl_why = p->tmpl_why.msg[0] ? p->tmpl_why.msg : NULL;
    cfg.max_length = (uint32_t)o->max_length;
    cfg.min_supervised = (uint32_t)o->min_supervised;
    cfg.train_on = choice(o->train_on, train);
    cfg.reasoning = choice(o->reasoning, reasoning);
    cfg.overlong = choice(o->overlong, overlong);
    cfg.per_turn = o->per_turn;
    return sl_preparer_new(&p->prep, &cfg, err);
}

void sl_prep_cli_close(sl_prep_cli *p) {
    sl_preparer_free(p->prep);
    sl_template_free(p->tmpl);
    sl_tokenizer_free(p->tok);
}

/* What passes is waited for, as the feeder does; said once for the run. */
static void prepare(sl_prep_cli *p, const char *line, size_t n, sl_prepared *out) {
    sl_err e;
    while (sl_prepare_json(p->prep, line, n, out, &e)) {
        if (!p->waited) fprintf(stderr, "WARNING: waiting: %s\n", e.msg);
        p->waited = true;
        poll(NULL, 0, 200);
    }
}

static int each_line(sl_prep_cli *p, FILE *f, sl_prep_cli_row fn, void *arg) {
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    for (uint64_t no = 1; (n = getline(&line, &cap, f)) >= 0; no++) {
        if (n && line[n - 1] == '\n') n--;
        if (!n) continue;
        sl_prepared out;
        prepare(p, line, (size_t)n, &out);
        fn(arg, no, line, (size_t)n, &out);
        sl_prepared_free(&out);
    }
    free(line);
    return ferror(f) ? -1 : 0;
}

/* The whole input as the row {"text": ...}. */
static int one_text(sl_prep_cli *p, FILE *f, sl_prep_cli_row fn, void *arg, sl_err *err) {
    char *text = NULL;
    size_t n = 0, cap = 0;
    while (!feof(f) && !ferror(f)) {
        if (n == cap) {
            char *q = realloc(text, cap = cap * 2 + 65536);
            if (!q) break;
            text = q;
        }
        n += fread(text + n, 1, cap - n, f);
    }
    bool ok = feof(f) && !ferror(f);
    size_t bad = ok ? sl_utf8_check(text, n) : 0;
    if (ok && bad < n) {
        free(text);
        return sl_err_set(err, SL_EDATA, "byte %zu of the text is not valid UTF-8", bad);
    }
    json_t *row = ok ? json_pack("{s:o}", "text", json_stringn(text, n)) : NULL;
    char *line = row ? json_dumps(row, JSON_COMPACT) : NULL;
    json_decref(row);
    free(text);
    if (!line) return -1;
    sl_prepared out;
    prepare(p, line, strlen(line), &out);
    fn(arg, 1, line, strlen(line), &out);
    sl_prepared_free(&out);
    free(line);
    return 0;
}

int sl_prep_cli_each(sl_prep_cli *p, const char *path, bool whole, sl_prep_cli_row fn, void *arg, sl_err *err) {
    FILE *f = strcmp(path, "-") ? fopen(path, "re") : stdin;
    if (!f) return sl_err_sys(err, SL_EUSAGE, errno, "opening %s", path);
    int rc = whole ? one_text(p, f, fn, arg, err) : each_line(p, f, fn, arg);
    if (f != stdin) fclose(f);
    if (rc == -1) return sl_err_sys(err, SL_ETEMP, errno, "reading %s", path);
    if (rc) return rc;
    return fflush(stdout) || ferror(stdout) ? sl_err_sys(err, SL_ETEMP, errno, "writing the result") : 0;
}
