#include "stages/feeder/chat.h"
#include "stages/feeder/rows.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PREFIXES = 256 }; /* prefix renderings a row may cost: each is as long as the conversation so far */
#define PROBE_REASON "sluicereason"

/* How the last turn's reasoning can be kept (reasoning = keep-last). */
typedef enum {
    KEEP_AS_IS,    /* the template renders it */
    KEEP_PRESERVE, /* it does with preserve_thinking = true */
    KEEP_BY_HAND,  /* it does not, but the generation prompt opens <think>: the turn is written behind it */
    KEEP_NOT       /* the template has no place for it */
} keep_mode;

struct sl_chat {
    const sl_template *t;
    sl_renderer *r;
    sl_reasoning_mode reasoning;
    sl_turn_marks marks;
    keep_mode keep;
    bool newline_think; /* KEEP_BY_HAND: the prompt ends in "<think>\n" */
};

int sl_chat_new(sl_chat **out, const sl_template *t, sl_reasoning_mode reasoning, const char *helper, sl_err *err) {
    sl_chat *c = calloc(1, sizeof *c);
    if (!c) return sl_err_set(err, SL_ETEMP, "no memory for a template renderer");
    c->t = t;
    c->reasoning = reasoning;
    int rc = sl_renderer_new(&c->r, t, helper, err);
    if (rc)
        free(c);
    else
        *out = c;
    return rc;
}

void sl_chat_free(sl_chat *c) {
    if (!c) return;
    sl_renderer_free(c->r);
    sl_turn_marks_free(&c->marks);
    free(c);
}

void sl_chat_text_free(sl_chat_text *t) {
    free(t->text);
    free(t->spans);
    memset(t, 0, sizeof *t);
}

static bool contains(const char *s, size_t n, const char *what) {
    return s && memmem(s, n, what, strlen(what)) != NULL;
}
static json_t *message(const char *role, const char *text) {
    return json_pack("{s:s, s:s}", "role", role, "content", text);
}
static bool ends_with(const sl_rendered *r, const char *s) {
    size_t n = strlen(s);
    return r->len >= n && !memcmp(r->text + r->len - n, s, n);
}

/* ---- probes ---- */

/* Probes may fail: that is an answer too. What has no answer (SL_ETEMP) is asked again with the next try. */
static sl_reason probe_reasoning(sl_chat *c, const sl_rendered *gen, sl_err *why) {
    json_t *m = json_pack("[o, o]", message("user", SL_PROBE_U), message("assistant", SL_PROBE_A));
    json_t *on = json_pack("{s:b}", "preserve_thinking", 1);
    json_object_set_new(json_array_get(m, 1), "reasoning_content", json_string(PROBE_REASON));
    sl_render_job jobs[2] = {{.messages = m}, {.messages = m, .extra = on}};
    sl_rendered r[2];
    sl_err e = {0};
    sl_reason said = sl_render(c->r, jobs, 2, NULL, NULL, r, &e);
    c->keep = KEEP_NOT;
    if (!said) {
        if (contains(r[0].text, r[0].len, PROBE_REASON))
            c->keep = KEEP_AS_IS;
        else if (contains(r[1].text, r[1].len, PROBE_REASON))
            c->keep = KEEP_PRESERVE;
        sl_rendered_free(&r[0]);
        sl_rendered_free(&r[1]);
    }
    c->newline_think = gen && ends_with(gen, "<think>\n");
    if (c->keep == KEEP_NOT && gen && (c->newline_think || ends_with(gen, "<think>"))) c->keep = KEEP_BY_HAND;
    json_decref(m);
    json_decref(on);
    if (e.code != SL_ETEMP) return SL_R_NONE;
    if (why) *why = e;
    return said;
}

static sl_reason probe(sl_chat *c, sl_err *why) {
    json_t *u = json_pack("[o]", message("user", SL_PROBE_U));
    json_t *ua = json_pack("[o, o]", message("user", SL_PROBE_U), message("assistant", SL_PROBE_A));
    json_t *uau = json_pack("[o, o, o]", message("user", SL_PROBE_U), message("assistant", SL_PROBE_A),
                            message("user", SL_PROBE_V));
    sl_render_job jobs[4] = {{.messages = u}, {.messages = u, .gen = true}, {.messages = ua}, {.messages = uau}};
    sl_rendered r[4];
    sl_err e = {0};
    sl_reason said = sl_render(c->r, jobs, 4, NULL, NULL, r, &e);
    bool ok = !said;
    if (e.code == SL_ETEMP) {
        if (why) *why = e;
    } else
        said = probe_reasoning(c, ok ? &r[1] : NULL, why);
    if (!said)
        sl_turn_marks_learn(&c->marks, ok ? &r[0] : NULL, ok ? &r[1] : NULL, ok ? &r[2] : NULL, ok ? &r[3] : NULL);
    for (int i = 0; ok && i < 4; i++) sl_rendered_free(&r[i]);
    json_decref(u);
    json_decref(ua);
    json_decref(uau);
    return said;
}

/* ---- reasoning ---- */

static bool assistant(const json_t *m) {
    const char *r = json_string_value(json_object_get(m, "role"));
    return r && !strcmp(r, "assistant");
}

/* "<think>reasoning</think>rest" at the start of a content. */
static bool split_think(const char *s, size_t n, size_t *r0, size_t *r1, size_t *rest) {
    size_t i = 0;
    while (i < n && (s[i] == ' ' || s[i] == '\n' || s[i] == '\t' || s[i] == '\r')) i++;
    if (n - i < 7 || memcmp(s + i, "<think>", 7) != 0) return false;
    const char *e = memmem(s + i + 7, n - i - 7, "</think>", 8);
    if (!e) return false;
    *r0 = i + 7;
    *r1 = (size_t)(e - s);
    *rest = *r1 + 8;
    return true;
}

/* Take the reasoning out of a message copy: new string or NULL; the content keeps the rest. */
static json_t *take_reasoning(json_t *m) {
    json_t *c = json_object_get(m, "content"), *r = json_object_get(m, "reasoning_content");
    if (!json_is_string(r)) r = json_object_get(m, "reasoning");
    json_t *found = json_is_string(r) && json_string_length(r) ? json_incref(r) : NULL;
    json_object_del(m, "reasoning_content");
    json_object_del(m, "reasoning");
    size_t a, b, rest, n = json_is_string(c) ? json_string_length(c) : 0;
    if (n && split_think(json_string_value(c), n, &a, &b, &rest)) {
        const char *s = json_string_value(c);
        if (!found) found = json_stringn(s + a, b - a);
        json_object_set_new(m, "content", json_stringn(s + rest, n - rest));
    }
    return found;
}

/* Copy of the messages in which only the last assistant turn has reasoning, as reasoning_content (also returned). */
static json_t *only_last_reasoning(const json_t *messages, json_t **reasoning, size_t *last) {
    json_t *out = json_array(), *m;
    size_t i, n = json_array_size(messages);
    *last = SIZE_MAX;
    *reasoning = NULL;
    for (i = 0; i < n; i++)
        if (assistant(json_array_get(messages, i))) *last = i;
    json_array_foreach(messages, i, m) {
        json_t *c = json_copy(m);
        if (assistant(m)) {
            json_t *r = take_reasoning(c);
            if (i == *last)
                *reasoning = r;
            else
                json_decref(r);
            if (i == *last && r) json_object_set(c, "reasoning_content", r);
        }
        json_array_append_new(out, c);
    }
    return out;
}

static bool has_reasoning(const json_t *messages) {
    size_t i;
    json_t *m;
    json_array_foreach(messages, i, m) {
        json_t *c = json_object_get(m, "content");
        size_t a, b, r;
        if (!assistant(m)) continue;
        if (json_string_length(json_object_get(m, "reasoning_content")) ||
            json_string_length(json_object_get(m, "reasoning")))
            return true;
        if (json_is_string(c) && split_think(json_string_value(c), json_string_length(c), &a, &b, &r)) return true;
    }
    return false;
}

/* ---- one conversation ---- */

typedef struct work {
    sl_chat *c;
    json_t *messages, *tools, *documents, *extra;
    bool gen; /* the rendering ends with the generation prompt */
    sl_rendered full;
    unsigned prefixes;
} work;

/* mask.h: where the generation prompt before message i ends in the full rendering. */
static long prefix_end(void *arg, size_t i, sl_err *why) {
    work *w = arg;
    if (++w->prefixes > MAX_PREFIXES) {
        sl_refuse(why, SL_R_MASK, "more than %d turns whose header cannot be told from the template", MAX_PREFIXES);
        return -1;
    }
    json_t *m = json_array();
    for (size_t k = 0; k < i; k++) json_array_append(m, json_array_get(w->messages, k));
    sl_render_job job = {.messages = m, .gen = true, .extra = w->extra};
    sl_rendered r;
    long end = -1;
    if (i == 0)
        sl_refuse(why, SL_R_MASK,
                  "the conversation starts with an assistant turn and the template shows no header for it");
    else if (!sl_render(w->c->r, &job, 1, w->tools, w->documents, &r, why)) {
        if (r.len <= w->full.len && !memcmp(r.text, w->full.text, r.len))
            end = (long)r.len;
        else
            sl_refuse(
                why, SL_R_MASK,
                "message %zu: the conversation before it, with the generation prompt, is not a prefix of the whole", i);
        sl_rendered_free(&r);
    }
    json_decref(m);
    return end;
}

static size_t count_assistants(const json_t *messages) {
    size_t n = 0, i;
    json_t *m;
    json_array_foreach(messages, i, m) n += assistant(m);
    return n;
}

/* A key that the conversation does not contain. */
static void pick_key(char key[32], const sl_rendered *full) {
    for (unsigned i = 0;; i++) {
        snprintf(key, 32, "qzslmark%uqz", i);
        if (!contains(full->text, full->len, key)) return;
    }
}

static sl_reason spans_from_tags(const work *w, sl_chat_text *out, sl_err *why) {
    size_t n = count_assistants(w->messages);
    if (w->full.n_spans == 0 && n)
        return sl_refuse(why, SL_R_MASK,
                         "the template has generation tags, but none was reached for %zu assistant turns", n);
    out->spans = calloc(w->full.n_spans + 1, sizeof *out->spans);
    if (!out->spans) return sl_lack(why, SL_R_MASK, "no memory for %zu spans", w->full.n_spans);
    for (size_t i = 0; i < w->full.n_spans; i++) out->spans[i] = (sl_span){w->full.spans[i][0], w->full.spans[i][1]};
    out->n_spans = w->full.n_spans;
    out->how = "generation tags";
    return SL_R_NONE;
}

static sl_reason spans_from_alignment(work *w, sl_chat_text *out, sl_err *why) {
    size_t n_msg = json_array_size(w->messages);
    char key[32];
    pick_key(key, &w->full);
    unsigned char *marked = calloc(n_msg + 1, 1);
    json_t *mm = marked ? sl_mask_marked(w->messages, key, marked) : NULL;
    out->spans = calloc(count_assistants(w->messages) + 1, sizeof *out->spans);
    sl_reason r = mm && out->spans ? SL_R_NONE : sl_lack(why, SL_R_MASK, "no memory to align %zu messages", n_msg);
    sl_rendered marks = {0};
    sl_render_job job = {.messages = mm, .gen = w->gen, .extra = w->extra};
    if (!r && (r = sl_render(w->c->r, &job, 1, w->tools, w->documents, &marks, why))) r = SL_R_MASK;
    if (!r) r = sl_mask_align(&w->full, &marks, w->messages, key, marked, &w->c->marks, prefix_end, w, out->spans, why);
    if (!r) {
        out->n_spans = count_assistants(w->messages);
        out->how = w->prefixes ? "template and prefixes" : "template";
    }
    sl_rendered_free(&marks);
    json_decref(mm);
    free(marked);
    return r;
}

static sl_reason render(work *w, bool want_spans, sl_chat_text *out, sl_err *why) {
    sl_render_job job = {.messages = w->messages, .gen = w->gen, .extra = w->extra};
    sl_reason r = sl_render(w->c->r, &job, 1, w->tools, w->documents, &w->full, why);
    if (r) return r;
    if (want_spans && count_assistants(w->messages))
        r = w->full.has_tags ? spans_from_tags(w, out, why) : spans_from_alignment(w, out, why);
    out->text = w->full.text;
    out->len = w->full.len;
    w->full.text = NULL;
    sl_rendered_free(&w->full);
    return r;
}

/* KEEP_BY_HAND: the conversation before the last turn with the generation prompt, and the turn written behind it. */
static sl_reason render_by_hand(work *w, json_t *last, const json_t *reasoning, bool want_spans, sl_chat_text *out,
                                sl_err *why) {
    const char *end = w->c->marks.end, *r0 = json_string_value(reasoning),
               *c0 = json_string_value(json_object_get(last, "content"));
    size_t rn = json_string_length(reasoning), cn = json_string_length(json_object_get(last, "content"));
    if (!end) return sl_refuse(why, SL_R_MASK, "the turn with reasoning cannot be ended: %s", w->c->marks.why);
    w->gen = true;
    sl_reason r = render(w, want_spans, out, why);
    if (r) return r;
    const char *close = w->c->newline_think ? "\n</think>\n\n" : "</think>";
    size_t total = out->len + rn + strlen(close) + cn + strlen(end);
    char *t = realloc(out->text, total + 1);
    sl_span *s = realloc(out->spans, (out->n_spans + 1) * sizeof *s);
    if (t) out->text = t;
    if (s) out->spans = s;
    if (!t || !s) return sl_lack(why, SL_R_MASK, "no memory for the last turn");
    size_t at = out->len;
    memcpy(t + at, r0, rn);
    at += rn;
    at += (size_t)sprintf(t + at, "%s", close);
    if (cn) memcpy(t + at, c0, cn);
    at += cn;
    at += (size_t)sprintf(t + at, "%s", end);
    if (want_spans) s[out->n_spans++] = (sl_span){out->len, at};
    out->len = at;
    if (!out->how) out->how = "template";
    return SL_R_NONE;
}

static sl_reason render_keep_last(work *w, bool want_spans, sl_chat_text *out, sl_err *why) {
    json_t *reasoning = NULL, *all = w->messages, *copy;
    size_t last;
    copy = only_last_reasoning(all, &reasoning, &last);
    w->messages = copy;
    sl_reason r;
    bool final =
        last + 1 == json_array_size(all) && !json_array_size(json_object_get(json_array_get(all, last), "tool_calls"));
    if (w->c->keep == KEEP_PRESERVE) {
        w->extra = json_pack("{s:b}", "preserve_thinking", 1);
        r = render(w, want_spans, out, why);
    } else if (reasoning && w->c->keep == KEEP_BY_HAND && final) {
        json_t *m = json_incref(json_array_get(copy, last));
        json_array_remove(copy, last);
        r = render_by_hand(w, m, reasoning, want_spans, out, why);
        json_decref(m);
    } else {
        w->messages = all;
        r = render(w, want_spans, out, why);
    }
    if (!r && reasoning && !contains(out->text, out->len, json_string_value(reasoning)))
        snprintf(out->warn, sizeof out->warn,
                 "the chat template has no place for reasoning: that of the last turn is left out");
    w->messages = all;
    json_decref(copy);
    json_decref(reasoning);
    return r;
}

/* What the template silently dropped. */
static void look_for_losses(const sl_chat *c, const json_t *messages, json_t *tools, sl_chat_text *out) {
    size_t i, k;
    json_t *m, *call;
    json_array_foreach(messages, i, m) json_array_foreach(json_object_get(m, "tool_calls"), k, call) {
        json_t *f = json_object_get(call, "function");
        const char *name = json_string_value(json_object_get(f ? f : call, "name"));
        const char *id = json_string_value(json_object_get(call, "id")); /* some templates name a call by its id */
        if (name && !contains(out->text, out->len, name) && !(id && *id && contains(out->text, out->len, id)))
            snprintf(out->warn, sizeof out->warn, "message %zu: the chat template leaves out the tool call '%.64s'", i,
                     name);
    }
    if (tools && strstr(c->t->source, "tools_ts_str"))
        snprintf(out->warn, sizeof out->warn,
                 "the chat template would take the tools as TypeScript (tools_ts_str); its JSON form is used");
}

sl_reason sl_chat_render(sl_chat *c, const json_t *messages, size_t n_messages, json_t *tools, json_t *documents,
                         bool want_spans, sl_chat_text *out, sl_err *why) {
    memset(out, 0, sizeof *out);
    sl_reason r = c->marks.probed ? SL_R_NONE : probe(c, why);
    if (r) return r;
    work w = {.c = c, .tools = tools, .documents = documents, .messages = json_array()};
    for (size_t i = 0; i < n_messages; i++) json_array_append(w.messages, json_array_get(messages, i));
    bool keep = c->reasoning == SL_REASONING_KEEP_LAST && c->keep != KEEP_AS_IS && has_reasoning(w.messages);
    r = keep ? render_keep_last(&w, want_spans, out, why) : render(&w, want_spans, out, why);
    if (out->text) look_for_losses(c, w.messages, tools, out);
    json_decref(w.messages);
    json_decref(w.extra);
    return r;
}
