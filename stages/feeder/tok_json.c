/* Loader of tokenizer.json. Every member that changes ids is either understood or refused by name. */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include "stages/feeder/tokenizer_internal.h"
#include "stages/feeder/unicode.h"

static const char *str(const json_t *o, const char *key) {
    return json_string_value(json_object_get(o, key));
}
static bool flag(const json_t *o, const char *key, bool otherwise) {
    const json_t *v = json_object_get(o, key);
    return json_is_boolean(v) ? json_is_true(v) : otherwise;
}
static const char *type_of(const json_t *o) {
    const char *s = str(o, "type");
    return s ? s : "(no type)";
}

/* {"String": s} or {"Regex": s} */
static int pattern_of(const json_t *o, const char *where, const char **s, size_t *n, bool *literal, sl_err *err) {
    const json_t *p = json_object_get(o, "pattern");
    const json_t *v = json_object_get(p, "Regex");
    *literal = !v;
    if (!v) v = json_object_get(p, "String");
    if (!json_is_string(v)) return sl_err_set(err, SL_ECONFIG, "%s: 'pattern' has neither 'String' nor 'Regex'", where);
    *s = json_string_value(v);
    *n = json_string_length(v);
    return 0;
}

/* --- normalizer --- */
static int normalizer(sl_tokenizer *t, const json_t *o, int depth, sl_err *err) {
    if (!o || json_is_null(o)) return 0;
    const char *type = type_of(o);
    if (depth > 4) return sl_err_set(err, SL_ECONFIG, "normalizer: sequences nested too deep");
    if (!strcmp(type, "Sequence")) {
        const json_t *list = json_object_get(o, "normalizers");
        int rc = 0;
        for (size_t i = 0; i < json_array_size(list) && !rc; i++)
            rc = normalizer(t, json_array_get(list, i), depth + 1, err);
        return rc;
    }
    if (!strcmp(type, "NFC")) return sl_tokenizer_add_norm(t, SL_NORM_NFC, NULL, 0, true, NULL, 0, err);
    if (!strcmp(type, "Prepend")) {
        const char *s = str(o, "prepend");
        if (!s) return sl_err_set(err, SL_ECONFIG, "normalizer: Prepend without 'prepend'");
        return sl_tokenizer_add_norm(t, SL_NORM_PREPEND, NULL, 0, true, s, strlen(s), err);
    }
    if (!strcmp(type, "Replace")) {
        const char *s = NULL, *with = str(o, "content");
        size_t n = 0;
        bool literal;
        int rc = pattern_of(o, "normalizer Replace", &s, &n, &literal, err);
        if (rc) return rc;
        if (!with) return sl_err_set(err, SL_ECONFIG, "normalizer: Replace without 'content'");
        return sl_tokenizer_add_norm(t, SL_NORM_REPLACE, s, n, literal, with, strlen(with), err);
    }
    return sl_err_set(err, SL_ECONFIG, "normalizer '%s' is not supported (known: NFC, Replace, Prepend, Sequence)",
                      type);
}

/* --- pre_tokenizer --- */
static int split_behavior(const json_t *o, const char *where, sl_split *how, sl_err *err) {
    const char *b = str(o, "behavior");
    int k = b ? sl_split_named(b) : -1;
    if (k < 0) return sl_err_set(err, SL_ECONFIG, "%s: behavior '%s' is not known", where, b ? b : "(none)");
    *how = (sl_split)k;
    return 0;
}

static int metaspace(sl_tokenizer *t, const json_t *o, sl_err *err) {
    const char *mark = str(o, "replacement"), *scheme = str(o, "prepend_scheme");
    sl_prefix p = flag(o, "add_prefix_space", true) ? SL_PREFIX_ALWAYS : SL_PREFIX_NEVER;
    if (scheme) {
        if (!strcmp(scheme, "always"))
            p = SL_PREFIX_ALWAYS;
        else if (!strcmp(scheme, "first"))
            p = SL_PREFIX_FIRST;
        else if (!strcmp(scheme, "never"))
            p = SL_PREFIX_NEVER;
        else
            return sl_err_set(err, SL_ECONFIG, "pre_tokenizer: Metaspace prepend_scheme '%s' is not known", scheme);
    }
    if (!mark) return sl_err_set(err, SL_ECONFIG, "pre_tokenizer: Metaspace without 'replacement'");
    return sl_pretok_add_metaspace(t->pretok, mark, strlen(mark), p, flag(o, "split", true), err);
}

static int pre_tokenizer(sl_tokenizer *t, const json_t *o, int depth, sl_err *err) {
    if (!o || json_is_null(o)) return 0;
    const char *type = type_of(o), *s = NULL;
    size_t n = 0;
    bool literal = false;
    sl_split how = SL_SPLIT_ISOLATED;
    int rc = 0;
    if (depth > 4) return sl_err_set(err, SL_ECONFIG, "pre_tokenizer: sequences nested too deep");
    if (!strcmp(type, "Sequence")) {
        const json_t *list = json_object_get(o, "pretokenizers");
        for (size_t i = 0; i < json_array_size(list) && !rc; i++)
            rc = pre_tokenizer(t, json_array_get(list, i), depth + 1, err);
        return rc;
    }
    if (!strcmp(type, "Split")) {
        if ((rc = pattern_of(o, "pre_tokenizer Split", &s, &n, &literal, err)) ||
            (rc = split_behavior(o, "pre_tokenizer Split", &how, err)))
            return rc;
        return sl_pretok_add_split(t->pretok, s, n, literal, how, flag(o, "invert", false), err);
    }
    if (!strcmp(type, "ByteLevel"))
        return sl_pretok_add_bytelevel(t->pretok, flag(o, "add_prefix_space", true), flag(o, "use_regex", true), err);
    if (!strcmp(type, "Digits")) return sl_pretok_add_digits(t->pretok, flag(o, "individual_digits", false), err);
    if (!strcmp(type, "Metaspace")) return metaspace(t, o, err);
    if (!strcmp(type, "WhitespaceSplit")) return sl_pretok_add_whitespace(t->pretok, err);
    if (!strcmp(type, "Punctuation")) {
        if (json_object_get(o, "behavior") && (rc = split_behavior(o, "pre_tokenizer Punctuation", &how, err)))
            return rc;
        return sl_pretok_add_punctuation(t->pretok, how, err);
    }
    return sl_err_set(err, SL_ECONFIG,
                      "pre_tokenizer '%s' is not supported (known: Sequence, Split, ByteLevel, Digits, Metaspace, "
                      "WhitespaceSplit, Punctuation)",
                      type);
}

/* --- model --- */
/* Vocabulary string to bytes; a byte-level string outside the alphabet can never be produced by merging. */
static int add_vocab(sl_tokenizer *t, const char *s, size_t n, const json_t *id, char **buf, size_t *cap, sl_err *err) {
    json_int_t v = json_is_integer(id) ? json_integer_value(id) : -1;
    if (v < 0 || v >= SL_BPE_MAX_IDS)
        return sl_err_set(err, SL_ECONFIG, "model.vocab: id of '%.60s' is not in [0, %d)", s, SL_BPE_MAX_IDS);
    if (!sl_pretok_bytelevel(t->pretok)) return sl_bpe_add_token(t->bpe, (int32_t)v, s, n, true, err);
    if (n > *cap) {
        char *p = realloc(*buf, n * 2);
        if (!p) return sl_err_set(err, SL_ETEMP, "out of memory loading the vocabulary");
        *buf = p;
        *cap = n * 2;
    }
    long k = sl_bytelevel_decode(s, n, *buf);
    return k < 0 ? sl_bpe_add_token(t->bpe, (int32_t)v, s, n, false, err)
                 : sl_bpe_add_token(t->bpe, (int32_t)v, *buf, (size_t)k, true, err);
}

static int vocab(sl_tokenizer *t, const json_t *o, sl_err *err) {
    if (!json_is_object(o) || !json_object_size(o))
        return sl_err_set(err, SL_ECONFIG, "model.vocab is missing or empty");
    char *buf = NULL;
    size_t cap = 0;
    int rc = 0;
    for (void *i = json_object_iter((json_t *)o); i && !rc; i = json_object_iter_next((json_t *)o, i)) {
        const char *key = json_object_iter_key(i);
        rc = add_vocab(t, key, strlen(key), json_object_iter_value(i), &buf, &cap, err);
    }
    free(buf);
    return rc;
}

/* "a b" or ["a", "b"] */
static int merge_parts(const json_t *m, size_t i, const char **a, size_t *na, const char **b, size_t *nb, sl_err *err) {
    if (json_is_string(m)) {
        const char *s = json_string_value(m), *sp = memchr(s, ' ', json_string_length(m));
        if (sp && !memchr(sp + 1, ' ', json_string_length(m) - (size_t)(sp + 1 - s))) {
            *a = s;
            *na = (size_t)(sp - s);
            *b = sp + 1;
            *nb = json_string_length(m) - *na - 1;
            return 0;
        }
    } else if (json_array_size(m) == 2 && json_is_string(json_array_get(m, 0)) &&
               json_is_string(json_array_get(m, 1))) {
        *a = json_string_value(json_array_get(m, 0));
        *na = json_string_length(json_array_get(m, 0));
        *b = json_string_value(json_array_get(m, 1));
        *nb = json_string_length(json_array_get(m, 1));
        return 0;
    }
    return sl_err_set(err, SL_ECONFIG, "model.merges[%zu] is neither \"a b\" nor [\"a\", \"b\"]", i);
}

static int merges(sl_tokenizer *t, const json_t *list, sl_err *err) {
    char *buf = NULL;
    size_t cap = 0;
    int rc = 0;
    if (!json_is_array(list)) return sl_err_set(err, SL_ECONFIG, "model.merges is missing");
    for (size_t i = 0; i < json_array_size(list) && !rc; i++) {
        const char *a = NULL, *b = NULL;
        size_t na = 0, nb = 0;
        if ((rc = merge_parts(json_array_get(list, i), i, &a, &na, &b, &nb, err))) break;
        if (sl_pretok_bytelevel(t->pretok)) {
            if (na + nb > cap) {
                char *p = realloc(buf, (na + nb) * 2);
                if (!p) {
                    rc = sl_err_set(err, SL_ETEMP, "out of memory loading merges");
                    break;
                }
                buf = p;
                cap = (na + nb) * 2;
            }
            long ka = sl_bytelevel_decode(a, na, buf), kb = ka < 0 ? -1 : sl_bytelevel_decode(b, nb, buf + ka);
            if (kb < 0)
                rc =
                    sl_err_set(err, SL_ECONFIG, "model.merges[%zu] has a character outside the byte-level alphabet", i);
            else
                rc = sl_bpe_add_merge(t->bpe, buf, (size_t)ka, buf + ka, (size_t)kb, (uint32_t)i, err);
        } else
            rc = sl_bpe_add_merge(t->bpe, a, na, b, nb, (uint32_t)i, err);
    }
    free(buf);
    return rc;
}

static int model(sl_tokenizer *t, const json_t *m, sl_err *err) {
    const char *type = str(m, "type");
    if (!json_is_object(m) || (type && strcmp(type, "BPE")) || (!type && !json_object_get(m, "merges")))
        return sl_err_set(err, SL_ECONFIG, "model type '%s' is not supported (known: BPE)", type ? type : "(none)");
    const json_t *drop = json_object_get(m, "dropout");
    if (drop && !json_is_null(drop) && json_number_value(drop) != 0)
        return sl_err_set(err, SL_ECONFIG, "model: dropout is not supported");
    static const char *const affix[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (int i = 0; i < 2; i++)
        if (str(m, affix[i]) && *str(m, affix[i]))
            return sl_err_set(err, SL_ECONFIG, "model: %s '%s' is not supported", affix[i], str(m, affix[i]));
    const bool bytes = sl_pretok_bytelevel(t->pretok);
    if (!(t->bpe = sl_bpe_new(bytes ? SL_BPE_BYTES : SL_BPE_CHARS))) return sl_err_set(err, SL_ETEMP, "out of memory");
    int rc = vocab(t, json_object_get(m, "vocab"), err);
    if (!rc) rc = merges(t, json_object_get(m, "merges"), err);
    if (rc) return rc;
    sl_bpe_options o = {.whole_piece = flag(m, "ignore_merges", false),
                        .byte_fallback = flag(m, "byte_fallback", false) && !bytes,
                        .unk = SL_BPE_NONE,
                        .fuse_unk = flag(m, "fuse_unk", false)};
    const char *unk = str(m, "unk_token");
    if (unk) {
        const json_t *id = json_object_get(json_object_get(m, "vocab"), unk);
        if (!json_is_integer(id))
            return sl_err_set(err, SL_ECONFIG, "model: unk_token '%s' is not in the vocabulary", unk);
        o.unk = (int32_t)json_integer_value(id);
    }
    if ((rc = sl_bpe_finish(t->bpe, &o, t->salt, err))) return rc;
    t->kind = bytes ? "bpe-bytelevel" : "bpe-bytefallback";
    return bytes || o.whole_piece ? 0 : sl_tokenizer_find_cuts(t, err);
}

/* --- added tokens, post-processor --- */
static int added(sl_tokenizer *t, const json_t *list, sl_err *err) {
    int rc = 0;
    for (size_t i = 0; i < json_array_size(list) && !rc; i++) {
        const json_t *o = json_array_get(list, i), *id = json_object_get(o, "id"), *c = json_object_get(o, "content");
        if (!json_is_integer(id) || !json_is_string(c) || json_integer_value(id) < 0 ||
            json_integer_value(id) >= SL_BPE_MAX_IDS)
            return sl_err_set(err, SL_ECONFIG, "added_tokens[%zu] has no usable 'id' and 'content'", i);
        if (!json_string_length(c)) continue; /* the reference skips these */
        if (json_string_length(c) > SL_ADDED_MAX_BYTES || strlen(json_string_value(c)) != json_string_length(c))
            return sl_err_set(err, SL_ECONFIG, "added_tokens[%zu] has %zu bytes or a NUL; 1 to %d are supported", i,
                              json_string_length(c), SL_ADDED_MAX_BYTES);
        sl_added_token tok = {.s = (char *)json_string_value(c),
                              .n = (uint32_t)json_string_length(c),
                              .id = (int32_t)json_integer_value(id),
                              .special = flag(o, "special", false),
                              .single_word = flag(o, "single_word", false),
                              .lstrip = flag(o, "lstrip", false),
                              .rstrip = flag(o, "rstrip", false)};
        tok.normalized = flag(o, "normalized", !tok.special);
        rc = sl_tokenizer_add_added(t, &tok, err);
    }
    return rc;
}

static int put_extra(int32_t *v, int *n, const json_t *id, sl_err *err) {
    if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) >= SL_BPE_MAX_IDS)
        return sl_err_set(err, SL_ECONFIG, "post_processor: a special token has no usable id");
    if (*n == SL_TOK_MAX_EXTRA)
        return sl_err_set(err, SL_ECONFIG, "post_processor: more than %d tokens on one side", SL_TOK_MAX_EXTRA);
    v[(*n)++] = (int32_t)json_integer_value(id);
    return 0;
}

static int template(sl_tokenizer *t, const json_t *o, sl_err *err) {
    const json_t *single = json_object_get(o, "single"), *table = json_object_get(o, "special_tokens");
    bool after = false;
    for (size_t i = 0; i < json_array_size(single); i++) {
        const json_t *p = json_array_get(single, i), *tok = json_object_get(p, "SpecialToken");
        if (json_object_get(p, "Sequence")) {
            after = true;
            continue;
        }
        const char *name = str(tok, "id");
        const json_t *ids = name ? json_object_get(json_object_get(table, name), "ids") : NULL;
        if (!json_array_size(ids))
            return sl_err_set(err, SL_ECONFIG, "post_processor: template token '%s' has no ids",
                              name ? name : "(none)");
        for (size_t k = 0; k < json_array_size(ids); k++) {
            int rc = after ? put_extra(t->after, &t->n_after, json_array_get(ids, k), err)
                           : put_extra(t->before, &t->n_before, json_array_get(ids, k), err);
            if (rc) return rc;
        }
    }
    return 0;
}

static int post_processor(sl_tokenizer *t, const json_t *o, int depth, sl_err *err) {
    if (!o || json_is_null(o)) return 0;
    const char *type = type_of(o);
    int rc = 0;
    if (depth > 4) return sl_err_set(err, SL_ECONFIG, "post_processor: sequences nested too deep");
    if (!strcmp(type, "ByteLevel")) return 0; /* offsets only */
    if (!strcmp(type, "TemplateProcessing")) return template(t, o, err);
    if (!strcmp(type, "Sequence")) {
        const json_t *list = json_object_get(o, "processors");
        for (size_t i = 0; i < json_array_size(list) && !rc; i++)
            rc = post_processor(t, json_array_get(list, i), depth + 1, err);
        return rc;
    }
    if (!strcmp(type, "RobertaProcessing") || !strcmp(type, "BertProcessing")) {
        rc = put_extra(t->before, &t->n_before, json_array_get(json_object_get(o, "cls"), 1), err);
        return rc ? rc : put_extra(t->after, &t->n_after, json_array_get(json_object_get(o, "sep"), 1), err);
    }
    return sl_err_set(err, SL_ECONFIG, "post_processor '%s' is not supported", type);
}

static json_t *parse(const char *text, size_t n, size_t flags, sl_err *err) {
    json_error_t je;
    json_t *j = json_loadb(text, n, JSON_ALLOW_NUL | flags, &je);
    if (!j)
        sl_err_set(err, SL_ECONFIG, "not valid JSON: line %d column %d: %s", je.line, je.column, je.text);
    else if (!json_is_object(j)) {
        sl_err_set(err, SL_ECONFIG, "not a JSON object");
        json_decref(j);
        j = NULL;
    }
    return j;
}

int sl_tokenizer_from_json(sl_tokenizer *t, const char *text, size_t n, sl_err *err) {
    json_t *j = parse(text, n, 0, err);
    if (!j) return SL_ECONFIG;
    int rc = normalizer(t, json_object_get(j, "normalizer"), 0, err);
    if (!rc) rc = pre_tokenizer(t, json_object_get(j, "pre_tokenizer"), 0, err);
    if (!rc) rc = sl_pretok_finish(t->pretok, !t->no_plain, err);
    if (!rc) rc = model(t, json_object_get(j, "model"), err);
    if (!rc) rc = added(t, json_object_get(j, "added_tokens"), err);
    if (!rc) rc = post_processor(t, json_object_get(j, "post_processor"), 0, err);
    if (!rc) rc = sl_tokenizer_seal(t, err);
    json_decref(j);
    return rc;
}

static const char *token_name(const json_t *cfg, const char *key) {
    const json_t *v = json_object_get(cfg, key);
    return json_is_object(v) ? str(v, "content") : json_string_value(v);
}

/* The Llama classes build their own template from add_bos_token and add_eos_token, whatever tokenizer.json says. */
int sl_tokenizer_apply_config(sl_tokenizer *t, const char *text, size_t n, sl_err *err) {
    json_t *j = parse(text, n, JSON_DECODE_INT_AS_REAL, err); /* model_max_length is often 1e30 written out */
    if (!j) return SL_ECONFIG;
    const char *cls = str(j, "tokenizer_class");
    int rc = 0;
    if (cls && (!strcmp(cls, "LlamaTokenizer") || !strcmp(cls, "LlamaTokenizerFast"))) {
        const struct {
            const char *flag, *name;
            bool otherwise;
            int32_t *v;
            int *n;
        } side[] = {{"add_bos_token", "bos_token", true, t->before, &t->n_before},
                    {"add_eos_token", "eos_token", false, t->after, &t->n_after}};
        for (int i = 0; i < 2 && !rc; i++) {
            const char *name = token_name(j, side[i].name);
            *side[i].n = 0;
            if (!flag(j, side[i].flag, side[i].otherwise) || !name) continue;
            int32_t id = sl_tokenizer_special(t, name);
            if (id < 0)
                rc = sl_err_set(err, SL_ECONFIG, "%s '%s' is no added token of tokenizer.json", side[i].name, name);
            else
                side[i].v[(*side[i].n)++] = id;
        }
    }
    json_decref(j);
    return rc;
}
