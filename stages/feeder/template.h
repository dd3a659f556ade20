/* template: the model's own chat template, rendered by Jinja2 in a helper process.
 *
 * Where it comes from: a file that is named, else in the model folder chat_template.jinja, chat_template.json, or
 * tokenizer_config.json (a string, or a list of named ones: "default" is used, "tool_use" when the row has tools), or a
 * GGUF file's tokenizer.chat_template. The special tokens (bos_token, eos_token, ...) come from the same place.
 *
 * The helper (template_helper.py, one for each feeder thread, started when first needed) has the environment that
 * transformers gives templates: ImmutableSandboxedEnvironment, trim_blocks, lstrip_blocks, loop controls, tojson
 * without HTML escapes, raise_exception, the generation tag; strftime_now is pinned to 26 Jul 2024, so that the same
 * row gives the same ids on every day. It has no network, no files, no new privileges; its memory is limited
 * (SL_TMPL_MEM) and a request may take SL_TMPL_CPU_S seconds of its processor time. A template that raises, hangs or
 * kills the helper costs that row (TEMPLATE, with the template's own message) and nothing else: the helper is started
 * again. Nothing else costs a row: where processes, memory or open files are short, the helper cannot be started or is
 * killed from outside, the code in *why is SL_ETEMP, nothing is said of the row, and whoever asked tries again later. */
#ifndef SL_FEEDER_TEMPLATE_H
#define SL_FEEDER_TEMPLATE_H
#include "ipc/err.h"
#include "ipc/journal.h"
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SL_TMPL_MEM      (2ull << 30)
#define SL_TMPL_CPU_S    20
#define SL_TMPL_WALL_S   300
#define SL_TMPL_MAX_TEXT (64u << 20) /* bytes of one rendered text */

typedef struct sl_template {
    char *source;       /* Jinja text */
    char *source_tools; /* the "tool_use" one, or NULL */
    json_t *vars;       /* special tokens and extra arguments: an object */
    char hash[80];      /* XXH128 of the source, hex */
    char from[1100];    /* where it was found */
} sl_template;

/* model: folder or .gguf; file: a template file or ""; args: JSON object of extra arguments or "". SL_ECONFIG when a
 * named file cannot be used, SL_ETEMP when something could not be read just now; *out = NULL and 0 with a sentence in
 * *err when the model simply has none. */
int sl_template_load(sl_template **out, const char *model, const char *file, const char *args, sl_err *err);
void sl_template_free(sl_template *t);

/* A rendered text: bytes, and the [start, end) byte spans of the generation tags, when the template has them. */
typedef struct sl_rendered {
    char *text;
    size_t len;
    size_t (*spans)[2];
    size_t n_spans;
    bool has_tags; /* the template has a generation tag at all */
} sl_rendered;
void sl_rendered_free(sl_rendered *r);

/* One rendering that is wanted. extra: more arguments (borrowed) or NULL. */
typedef struct sl_render_job {
    json_t *messages; /* borrowed */
    bool gen;         /* add_generation_prompt */
    json_t *extra;
} sl_render_job;

typedef struct sl_renderer sl_renderer; /* one helper process; one thread */
/* Does not start the helper yet. helper: path of template_helper.py, NULL = looked up (SLUICE_TEMPLATE_HELPER, next to
 * the program, ../libexec/sluice, the source tree). */
int sl_renderer_new(sl_renderer **out, const sl_template *t, const char *helper, sl_err *err);
void sl_renderer_free(sl_renderer *r); /* ends the helper */
/* Render n <= 256 jobs with the same tools and documents; out[0..n). SL_R_TEMPLATE and the sentence in *why: the first
 * one that failed; or, with the code SL_ETEMP there, none did: try again. On failure nothing is left in out. */
sl_reason sl_render(sl_renderer *r, const sl_render_job *jobs, size_t n, json_t *tools, json_t *documents,
                    sl_rendered *out, sl_err *why);
uint64_t sl_renderer_restarts(const sl_renderer *r);
#endif
