#include "stages/feeder/prepare.h"
#include "stages/feeder/chat.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct sl_preparer {
    sl_prep_cfg cfg;
    sl_tok_scratch *scratch;
    sl_chat *chat;
};

/* A list that silently lacks what there was no memory for would be another row. So JSON gets its memory or the process
 * ends, as everywhere here: the supervisor starts it again, and what was not acknowledged is pushed again. */
static void *must_malloc(size_t n) {
    void *p = malloc(n ? n : 1);
    if (!p) abort();
    return p;
}
static void set_json_memory(void) {
    json_set_alloc_funcs(must_malloc, free);
}

int sl_preparer_new(sl_preparer **out, const sl_prep_cfg *cfg, sl_err *err) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, set_json_memory);
    sl_preparer *p = calloc(1, sizeof *p);
    if (!p) return sl_err_set(err, SL_ETEMP, "no memory for a feeder thread");
    p->cfg = *cfg;
    if (!p->cfg.vocab && cfg->tok) p->cfg.vocab = (uint32_t)sl_tokenizer_vocab(cfg->tok);
    int rc = SL_OK;
    if (cfg->tok && !(p->scratch = sl_tok_scratch_new())) rc = sl_err_set(err, SL_ETEMP, "no memory for a tokenizer");
    if (!rc && cfg->tmpl) rc = sl_chat_new(&p->chat, cfg->tmpl, (sl_reasoning_mode)cfg->reasoning, NULL, err);
    if (rc) {
        sl_preparer_free(p);
        return rc;
    }
    *out = p;
    return SL_OK;
}

void sl_preparer_free(sl_preparer *p) {
    if (!p) return;
    sl_chat_free(p->chat);
    if (p->scratch) sl_tok_scratch_free(p->scratch);
    free(p);
}

void sl_prepared_free(sl_prepared *p) {
    for (uint32_t i = 0; i < p->n; i++) {
        free(p->parts[i].ids);
        free(p->parts[i].mask);
        free(p->parts[i].why);
        free(p->parts[i].text);
        free(p->parts[i].off);
    }
    free(p->parts);
    free(p->lack);
    memset(p, 0, sizeof *p);
}

/* ---- parts ---- */

/* A new part; the first one always succeeds in the sense that matters: without memory the process is at its end anyway.
 */
static sl_part *new_part(sl_prepared *out) {
    sl_part *v = realloc(out->parts, (out->n + 1) * sizeof *v);
    if (!v) abort(); /* losing a row without a word is worse */
    out->parts = v;
    v[out->n] = (sl_part){.how = ""};
    return &v[out->n++];
}

static void refuse_part(sl_part *p, sl_reason r, const sl_err *why) {
    p->reason = r;
    free(p->why);
    p->why = strndup(why->msg, 1000);
}

static void refuse(sl_prepared *out, sl_reason r, const sl_err *why) {
    refuse_part(new_part(out), r, why);
    if (why->code != SL_ETEMP || out->lack) return;
    out->lack = strndup(why->msg, 1000); /* not the row's doing: all of it is done again */
    if (!out->lack) abort();
}

/* The last checks of a part whose ids and mask are there. */
static void judge(const sl_prep_cfg *c, sl_part *p) {
    sl_err e;
    p->mask_sum = 0;
    for (uint32_t i = 0; i < p->T; i++) {
        p->mask_sum += p->mask[i];
        if (p->ids[i] < 0 || (c->vocab && (uint32_t)p->ids[i] >= c->vocab)) {
            sl_refuse(&e, SL_R_VOCAB, "token %u is %d, outside the vocabulary [0, %u)", i, p->ids[i], c->vocab);
            return refuse_part(p, SL_R_VOCAB, &e);
        }
    }
    if (p->mask_sum < c->min_supervised) {
        sl_refuse(&e, SL_R_UNSUPERVISED, "%u of %u tokens are supervised, at least %u are asked for", p->mask_sum, p->T,
                  c->min_supervised);
        refuse_part(p, SL_R_UNSUPERVISED, &e);
    }
}

static void copy_part(sl_part *p, const int32_t *ids, const uint8_t *mask, uint32_t n) {
    p->ids = malloc((size_t)n * sizeof *ids + 1);
    p->mask = malloc((size_t)n + 1);
    if (!p->ids || !p->mask) abort();
    memcpy(p->ids, ids, (size_t)n * sizeof *ids);
    memcpy(p->mask, mask, n);
    p->T = n;
}

/* ids and mask (n tokens) become one part or, when too long, what `overlong` says. Returns the first part's index. */
static uint32_t add_tokens(const sl_prep_cfg *c, sl_prepared *out, const int32_t *ids, const uint8_t *mask, size_t n,
                           const char *how) {
    uint32_t first = out->n;
    sl_err e;
    if (!n) {
        sl_refuse(&e, SL_R_EMPTY, "the row has no tokens");
        refuse(out, SL_R_EMPTY, &e);
        return first;
    }
    size_t max = c->max_length ? c->max_length : UINT32_MAX;
    bool split = n > max && c->overlong == SL_LONG_SPLIT && out->n + n / max < SL_MAX_PARTS;
    for (size_t at = 0; at < n; at += max) {
        sl_part *p = new_part(out);
        size_t take = n - at < max ? n - at : max;
        if (n > max && c->overlong == SL_LONG_SKIP) take = n < UINT32_MAX ? n : max;
        p->how = how;
        copy_part(p, ids + at, mask + at, (uint32_t)take);
        if (n > max && !split && c->overlong != SL_LONG_TRUNCATE) {
            sl_refuse(&e, SL_R_TOO_LONG, "the row has %zu tokens, max_length is %zu", n, max);
            refuse_part(p, SL_R_TOO_LONG, &e);
        } else
            judge(c, p);
        if (n > max && !split) {
            if (c->overlong == SL_LONG_TRUNCATE) p->flags |= SL_PART_TRUNCATED;
            break;
        }
    }
    return first;
}

/* ---- kinds of rows ---- */

void sl_prepare_ids(sl_preparer *p, const int32_t *ids, uint32_t n, const uint8_t *mask, uint32_t n_mask,
                    const char *id, uint32_t id_len, sl_prepared *out) {
    memset(out, 0, sizeof *out);
    sl_err e;
    out->id_len = id_len <= SL_ROW_ID_MAX ? id_len : SL_ROW_ID_MAX;
    if (out->id_len) memcpy(out->id, id, out->id_len);
    if (mask && n_mask != n) {
        sl_refuse(&e, SL_R_LENGTHS, "the row has %u ids and a mask of %u: they must agree", n, n_mask);
        return refuse(out, SL_R_LENGTHS, &e);
    }
    uint8_t *m = malloc((size_t)n + 1);
    if (!m) abort();
    for (uint32_t i = 0; i < n; i++) m[i] = mask ? mask[i] != 0 : 1;
    add_tokens(&p->cfg, out, ids, m, n, mask ? "given" : "all");
    free(m);
}

static void keep_text(const sl_prep_cfg *c, sl_part *part, const char *text, size_t len, const sl_ids *ids) {
    if (!c->keep_text || part->text) return;
    part->text = malloc(len + 1);
    part->off = malloc((ids->n + 1) * sizeof *part->off);
    if (!part->text || !part->off) abort();
    if (text && len) memcpy(part->text, text, len);
    part->text[len] = 0;
    part->text_len = len;
    if (ids->n && ids->off) memcpy(part->off, ids->off, ids->n * sizeof *part->off);
}

static sl_reason encode(sl_preparer *p, const char *text, size_t len, bool add_special, bool parse_special, sl_ids *ids,
                        sl_err *why) {
    ids->want_off = true;
    if (sl_tokenizer_encode(p->cfg.tok, p->scratch, text, len, add_special, parse_special, ids, why))
        return SL_R_ENCODING;
    if (ids->n >= UINT32_MAX) return sl_refuse(why, SL_R_TOO_BIG, "the row has %zu tokens", ids->n);
    return SL_R_NONE;
}

static void prepare_text(sl_preparer *p, const sl_row *row, sl_prepared *out) {
    sl_ids ids = {0};
    sl_err e;
    sl_reason r = encode(p, row->text, row->text_len, !p->cfg.text_bare, !p->cfg.text_plain, &ids, &e);
    uint8_t *mask = r ? NULL : malloc(ids.n + 1);
    if (r)
        refuse(out, r, &e);
    else if (!mask)
        abort();
    else {
        for (size_t i = 0; i < ids.n; i++) { /* a token with a byte of the completion is supervised */
            size_t end = i + 1 < ids.n ? ids.off[i + 1] : row->text_len;
            mask[i] = row->prompt_len == 0 || end > row->prompt_len;
        }
        uint32_t first = add_tokens(&p->cfg, out, ids.ids, mask, ids.n, row->prompt_len ? "completion" : "text");
        keep_text(&p->cfg, &out->parts[first], row->text, row->text_len, &ids);
    }
    free(mask);
    free(ids.ids);
    free(ids.off);
}

/* One conversation of n_messages; only_last: supervise the last assistant turn alone. */
static void prepare_chat(sl_preparer *p, const sl_row *row, size_t n_messages, bool only_last, sl_prepared *out) {
    const sl_prep_cfg *c = &p->cfg;
    sl_chat_text t;
    sl_ids ids = {0};
    sl_err e, e2;
    bool all = c->train_on == SL_TRAIN_ALL && !only_last;
    sl_reason r = sl_chat_render(p->chat, row->messages, n_messages, row->tools, row->documents, !all, &t, &e);
    if (t.warn[0]) snprintf(out->warn, sizeof out->warn, "%s", t.warn);
    sl_reason enc = t.text ? encode(p, t.text, t.len, false, true, &ids, r ? &e2 : &e) : SL_R_NONE;
    if (!r) r = enc;
    uint8_t *mask = calloc(ids.n + 1, 1);
    if (!mask) abort();
    if (!r && all)
        memset(mask, 1, ids.n);
    else if (!r) {
        size_t skip = only_last && t.n_spans ? t.n_spans - 1 : 0;
        r = sl_mask_tokens(c->tok, &ids, t.text, t.len, skip ? t.spans + skip : t.spans, t.n_spans - skip, mask, &e);
    }
    if (!r) {
        uint32_t first = add_tokens(c, out, ids.ids, mask, ids.n, all ? "all" : t.how ? t.how : "no assistant turn");
        sl_part *part = &out->parts[first];
        if (!part->reason && part->mask_sum == 0)
            snprintf(out->warn, sizeof out->warn, "no token of this conversation is supervised");
        if (!part->reason && !all && part->mask_sum == part->T)
            snprintf(out->warn, sizeof out->warn, "every token of this conversation is supervised");
        keep_text(c, part, t.text, t.len, &ids);
    } else {
        refuse(out, r, &e);
        sl_part *part = &out->parts[out->n - 1];
        if (c->keep_text && t.text && !enc) { /* a person wants to see what could not be masked */
            copy_part(part, ids.ids ? ids.ids : &(int32_t){0}, mask, (uint32_t)ids.n);
            memset(part->mask, 0, ids.n);
            keep_text(c, part, t.text, t.len, &ids);
        }
    }
    free(mask);
    free(ids.ids);
    free(ids.off);
    sl_chat_text_free(&t);
}

static void prepare_turns(sl_preparer *p, const sl_row *row, sl_prepared *out) {
    size_t i;
    json_t *m;
    sl_err e;
    json_array_foreach(row->messages, i, m) {
        if (strcmp(json_string_value(json_object_get(m, "role")), "assistant") != 0) continue;
        if (out->n >= 4096) {
            sl_refuse(&e, SL_R_TOO_BIG, "a conversation gives at most 4096 turns");
            return refuse(out, SL_R_TOO_BIG, &e);
        }
        prepare_chat(p, row, i + 1, true, out);
        if (out->lack) return;
    }
    if (out->n) return;
    sl_refuse(&e, SL_R_UNSUPERVISED, "the conversation has no assistant turn");
    refuse(out, SL_R_UNSUPERVISED, &e);
}

static void prepare_row(sl_preparer *p, const sl_row *row, sl_prepared *out) {
    const sl_prep_cfg *c = &p->cfg;
    sl_err e;
    memcpy(out->id, row->id, row->id_len);
    out->id_len = row->id_len;
    if (row->kind == SL_ROWK_IDS) {
        add_tokens(c, out, row->ids, row->mask, row->T, "given");
    } else if (!c->tok) {
        sl_refuse(&e, SL_R_FIELDS, "only rows with input_ids can be taken: %s",
                  c->tok_why ? c->tok_why : "there is no tokenizer");
        refuse(out, SL_R_FIELDS, &e);
    } else if (row->kind == SL_ROWK_TEXT) {
        prepare_text(p, row, out);
    } else if (!p->chat) {
        sl_refuse(&e, SL_R_TEMPLATE, "%s",
                  c->tmpl_why ? c->tmpl_why
                              : "the model has no chat template: push text or input_ids, or name a template");
        refuse(out, SL_R_TEMPLATE, &e);
    } else if (c->per_turn) {
        prepare_turns(p, row, out);
    } else {
        prepare_chat(p, row, json_array_size(row->messages), c->train_on == SL_TRAIN_LAST_ASSISTANT, out);
    }
}

int sl_prepare_json(sl_preparer *p, const char *line, size_t n, sl_prepared *out, sl_err *err) {
    memset(out, 0, sizeof *out);
    sl_row row;
    sl_err e;
    sl_reason r = sl_row_parse(&row, line, n, p->cfg.vocab, &e);
    if (r)
        refuse(out, r, &e);
    else
        prepare_row(p, &row, out);
    sl_row_free(&row);
    if (!out->lack) return SL_OK;
    int rc = sl_err_set(err, SL_ETEMP, "%s", out->lack);
    sl_prepared_free(out);
    return rc;
}
