#include "stages/feeder/rows.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

size_t sl_utf8_check(const char *s, size_t n) {
    const unsigned char *p = (const unsigned char *)s;
    size_t i = 0;
    while (i < n) {
        unsigned c = p[i];
        if (c < 0x80) {
            i++;
            continue;
        }
        unsigned more = c >= 0xf0 ? 3 : c >= 0xe0 ? 2 : 1;
        if (c < 0xc2 || c > 0xf4 || n - i <= more) return i;
        unsigned lo = c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80;
        unsigned hi = c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
        if (p[i + 1] < lo || p[i + 1] > hi) return i;
        for (unsigned k = 2; k <= more; k++)
            if ((p[i + k] & 0xc0) != 0x80) return i;
        i += more + 1;
    }
    return n;
}

static void say(sl_err *why, int code, const char *fmt, va_list ap) {
    if (!why) return;
    vsnprintf(why->msg, sizeof why->msg, fmt, ap); // NOLINT(clang-analyzer-valist.Uninitialized): a known false alarm
    why->code = code;
}

sl_reason sl_refuse(sl_err *why, sl_reason r, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    say(why, SL_EDATA, fmt, ap);
    va_end(ap);
    return r;
}

sl_reason sl_lack(sl_err *why, sl_reason r, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    say(why, SL_ETEMP, fmt, ap);
    va_end(ap);
    return r;
}

static const char *type_name(const json_t *v) {
    if (!v) return "nothing";
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "a list";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return "an integer";
    case JSON_REAL:
        return "a real number";
    case JSON_TRUE:
    case JSON_FALSE:
        return "a boolean";
    default:
        return "null";
    }
}

/* Nesting is bounded before the recursive parser sees the line. Brackets inside strings do not count. */
static sl_reason check_depth(const char *s, size_t n, sl_err *why) {
    int depth = 0;
    bool in = false;
    for (size_t i = 0; i < n; i++) {
        char c = s[i];
        if (in) {
            if (c == '\\')
                i++;
            else if (c == '"')
                in = false;
        } else if (c == '"')
            in = true;
        else if (c == '{' || c == '[') {
            if (++depth > SL_ROW_MAX_DEPTH)
                return sl_refuse(why, SL_R_JSON, "nested deeper than %d at byte %zu", SL_ROW_MAX_DEPTH, i);
        } else if (c == '}' || c == ']')
            depth--;
    }
    return SL_R_NONE;
}

static sl_reason parse_tree(json_t **out, const char *s, size_t n, sl_err *why) {
    if (n > SL_ROW_MAX_BYTES)
        return sl_refuse(why, SL_R_TOO_BIG, "the line has %zu bytes, a row may have %u", n, SL_ROW_MAX_BYTES);
    if (n >= 3 && !memcmp(s, "\xef\xbb\xbf", 3)) s += 3, n -= 3;
    if (n >= 2 && (!memcmp(s, "\xff\xfe", 2) || !memcmp(s, "\xfe\xff", 2)))
        return sl_refuse(why, SL_R_ENCODING,
                         "the line begins as UTF-16 does (0x%02x 0x%02x); rows are UTF-8: convert it",
                         (unsigned)(unsigned char)s[0], (unsigned)(unsigned char)s[1]);
    size_t bad = sl_utf8_check(s, n);
    if (bad < n)
        return sl_refuse(why, SL_R_ENCODING, "byte %zu (0x%02x) is not valid UTF-8", bad,
                         (unsigned)(unsigned char)s[bad]);
    sl_reason r = check_depth(s, n, why);
    if (r) return r;
    json_error_t e;
    *out = json_loadb(s, n, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_ANY, &e);
    if (!*out) {
        bool enc = json_error_code(&e) == json_error_invalid_utf8 || !strncmp(e.text, "invalid Unicode", 15);
        return sl_refuse(why, enc ? SL_R_ENCODING : SL_R_JSON, "%s, at byte %d", e.text, e.position);
    }
    if (!json_is_object(*out)) return sl_refuse(why, SL_R_JSON, "expected a JSON object, found %s", type_name(*out));
    return SL_R_NONE;
}

static json_t *field(const json_t *o, const char *key) {
    json_t *v = json_object_get(o, key);
    return json_is_null(v) ? NULL : v;
}

/* ---- ids ---- */

static sl_reason parse_ids(sl_row *row, json_t *ids, json_t *mask, uint32_t vocab, sl_err *why) {
    if (!json_is_array(ids))
        return sl_refuse(why, SL_R_FIELDS, "input_ids: expected a list of integers, found %s", type_name(ids));
    size_t n = json_array_size(ids);
    if (!n) return sl_refuse(why, SL_R_EMPTY, "input_ids is empty");
    if (n > UINT32_MAX) return sl_refuse(why, SL_R_TOO_BIG, "input_ids has %zu entries", n);
    row->ids = malloc(n * sizeof *row->ids);
    row->mask = malloc(n);
    if (!row->ids || !row->mask) return sl_lack(why, SL_R_TOO_BIG, "no memory for %zu ids", n);
    for (size_t i = 0; i < n; i++) {
        json_t *v = json_array_get(ids, i);
        if (!json_is_integer(v))
            return sl_refuse(why, SL_R_FIELDS, "input_ids[%zu]: expected an integer, found %s", i, type_name(v));
        json_int_t x = json_integer_value(v);
        if (x < 0 || x > INT32_MAX || (vocab && x >= (json_int_t)vocab))
            return sl_refuse(why, SL_R_VOCAB, "input_ids[%zu] is %lld, outside the vocabulary [0, %u)", i, (long long)x,
                             vocab);
        row->ids[i] = (int32_t)x;
        row->mask[i] = 1;
    }
    row->T = (uint32_t)n;
    row->kind = SL_ROWK_IDS;
    if (!mask) return SL_R_NONE;
    if (!json_is_array(mask))
        return sl_refuse(why, SL_R_FIELDS, "loss_mask: expected a list of 0 and 1, found %s", type_name(mask));
    if (json_array_size(mask) != n)
        return sl_refuse(why, SL_R_LENGTHS, "input_ids has %zu entries, loss_mask %zu: they must agree", n,
                         json_array_size(mask));
    for (size_t i = 0; i < n; i++) {
        json_t *v = json_array_get(mask, i);
        bool one = json_is_true(v) || (json_is_integer(v) && json_integer_value(v) == 1) ||
                   (json_is_real(v) && json_real_value(v) == 1.0);
        bool zero = json_is_false(v) || (json_is_integer(v) && json_integer_value(v) == 0) ||
                    (json_is_real(v) && json_real_value(v) == 0.0);
        if (!one && !zero)
            return json_is_number(v)
                       ? sl_refuse(why, SL_R_FIELDS, "loss_mask[%zu]: expected 0 or 1, found %g", i,
                                   json_number_value(v))
                       : sl_refuse(why, SL_R_FIELDS, "loss_mask[%zu]: expected 0 or 1, found %s", i, type_name(v));
        row->mask[i] = one;
    }
    return SL_R_NONE;
}

/* ---- messages ---- */

static const struct {
    const char *said, *role;
} role_table[] = {
    {"system", "system"},       {"user", "user"},        {"assistant", "assistant"}, {"tool", "tool"},
    {"developer", "developer"}, {"human", "user"},       {"gpt", "assistant"},       {"chatgpt", "assistant"},
    {"model", "assistant"},     {"observation", "tool"}, {"function", "tool"},       {"ipython", "tool"},
};

static const char *role_of(const char *said) {
    for (size_t i = 0; i < sizeof role_table / sizeof *role_table; i++)
        if (!strcmp(said, role_table[i].said)) return role_table[i].role;
    return NULL;
}

/* A list of text parts, joined. */
static sl_reason join_parts(json_t **out, json_t *list, size_t at, sl_err *why) {
    size_t total = 0, i;
    json_t *p;
    json_array_foreach(list, i, p) {
        if (json_is_string(p)) {
            total += json_string_length(p);
            continue;
        }
        const char *type = json_string_value(field(p, "type"));
        json_t *t = field(p, "text");
        if (type && strcmp(type, "text") != 0)
            return sl_refuse(why, SL_R_MEDIA, "message %zu, part %zu: type '%.64s' (only text parts can be captured)",
                             at, i, type);
        if (!json_is_string(t))
            return sl_refuse(why, SL_R_FIELDS, "message %zu, part %zu: expected {type:\"text\", text:string}, found %s",
                             at, i, type_name(p));
        total += json_string_length(t);
    }
    char *buf = malloc(total + 1);
    if (!buf) return sl_lack(why, SL_R_TOO_BIG, "no memory for message %zu", at);
    size_t n = 0;
    json_array_foreach(list, i, p) {
        json_t *t = json_is_string(p) ? p : field(p, "text");
        memcpy(buf + n, json_string_value(t), json_string_length(t));
        n += json_string_length(t);
    }
    *out = json_stringn(buf, n);
    free(buf);
    return *out ? SL_R_NONE
                : sl_refuse(why, SL_R_ENCODING, "message %zu: the joined text parts are not valid UTF-8", at);
}

static sl_reason message_content(json_t **out, json_t *msg, json_t *content, size_t at, sl_err *why) {
    if (json_is_string(content)) {
        *out = json_incref(content);
        return SL_R_NONE;
    }
    if (json_is_array(content)) return join_parts(out, content, at, why);
    if (content)
        return sl_refuse(why, SL_R_FIELDS, "message %zu: content: expected a string or a list of text parts, found %s",
                         at, type_name(content));
    if (!field(msg, "tool_calls") && !field(msg, "reasoning_content") && !field(msg, "reasoning"))
        return sl_refuse(why, SL_R_FIELDS, "message %zu has no content (and no tool_calls)", at);
    *out = json_null();
    return SL_R_NONE;
}

static sl_reason normalize_message(json_t *out, json_t *msg, size_t at, sl_err *why) {
    if (!json_is_object(msg))
        return sl_refuse(why, SL_R_FIELDS, "message %zu: expected an object, found %s", at, type_name(msg));
    bool share = !field(msg, "role") && field(msg, "from");
    json_t *role = field(msg, share ? "from" : "role");
    if (!json_is_string(role))
        return sl_refuse(why, SL_R_FIELDS, "message %zu: role: expected a string, found %s", at, type_name(role));
    const char *known = role_of(json_string_value(role));
    if (!known)
        return sl_refuse(
            why, SL_R_ROLE,
            "message %zu: unknown role '%.80s' (known: system, user, assistant, tool, developer; human, gpt)", at,
            json_string_value(role));
    if (field(msg, "tool_calls") && !json_is_array(field(msg, "tool_calls")))
        return sl_refuse(why, SL_R_FIELDS, "message %zu: tool_calls: expected a list, found %s", at,
                         type_name(field(msg, "tool_calls")));
    json_t *content = NULL;
    sl_reason r = message_content(&content, msg, field(msg, share ? "value" : "content"), at, why);
    if (r) return r;
    json_object_set_new(out, "role", json_string(known));
    json_object_set_new(out, "content", content);
    const char *key;
    json_t *v;
    json_object_foreach(msg, key, v) {
        if (!strcmp(key, "role") || !strcmp(key, "content") ||
            (share && (!strcmp(key, "from") || !strcmp(key, "value"))))
            continue;
        json_object_set(out, key, v);
    }
    return SL_R_NONE;
}

static sl_reason append_messages(json_t *out, json_t *list, const char *name, sl_err *why) {
    if (!json_is_array(list))
        return sl_refuse(why, SL_R_FIELDS, "%s: expected a list of messages, found %s", name, type_name(list));
    size_t i;
    json_t *m;
    json_array_foreach(list, i, m) {
        json_t *o = json_object();
        sl_reason r = normalize_message(o, m, i, why);
        if (r) {
            json_decref(o);
            return r;
        }
        json_array_append_new(out, o);
    }
    return SL_R_NONE;
}

static sl_reason parse_chat(sl_row *row, json_t *a, json_t *b, const char *name, sl_err *why) {
    row->messages = json_array();
    sl_reason r = append_messages(row->messages, a, name, why);
    if (!r && b) r = append_messages(row->messages, b, "completion", why);
    if (r) return r;
    if (!json_array_size(row->messages)) return sl_refuse(why, SL_R_EMPTY, "%s is empty", name);
    row->kind = SL_ROWK_CHAT;
    json_t *tools = field(row->root, "tools");
    if (json_is_string(tools) && json_string_length(tools)) {
        sl_err e;
        if (check_depth(json_string_value(tools), json_string_length(tools), &e) ||
            !(row->own = json_loadb(json_string_value(tools), json_string_length(tools),
                                    JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, NULL)))
            return sl_refuse(why, SL_R_FIELDS, "tools: a string that is not a JSON list");
        tools = row->own;
    } else if (json_is_string(tools))
        tools = NULL;
    if (tools && !json_is_array(tools))
        return sl_refuse(why, SL_R_FIELDS, "tools: expected a list, found %s", type_name(tools));
    row->tools = tools && json_array_size(tools) ? tools : NULL;
    row->documents = field(row->root, "documents");
    return SL_R_NONE;
}

/* ---- text ---- */

static sl_reason parse_text(sl_row *row, json_t *a, json_t *b, sl_err *why) {
    if (!json_is_string(a))
        return sl_refuse(why, SL_R_FIELDS, "%s: expected a string, found %s", b ? "prompt" : "text", type_name(a));
    if (b && !json_is_string(b))
        return sl_refuse(why, SL_R_FIELDS, "completion: expected a string, found %s", type_name(b));
    size_t na = json_string_length(a), nb = b ? json_string_length(b) : 0;
    if (b ? !nb : !na) return sl_refuse(why, SL_R_EMPTY, "%s is empty", b ? "completion" : "text");
    row->text = malloc(na + nb + 1);
    if (!row->text) return sl_lack(why, SL_R_TOO_BIG, "no memory for %zu bytes of text", na + nb);
    memcpy(row->text, json_string_value(a), na);
    if (nb) memcpy(row->text + na, json_string_value(b), nb);
    row->text[na + nb] = 0;
    row->text_len = na + nb;
    row->prompt_len = b ? na : 0;
    row->kind = SL_ROWK_TEXT;
    return SL_R_NONE;
}

static void take_id(sl_row *row) {
    static const char *const keys[] = {"id", "conversation_id", "uuid"};
    for (int i = 0; i < 3; i++) {
        json_t *v = field(row->root, keys[i]);
        if (json_is_string(v)) {
            size_t n = json_string_length(v);
            if (n > SL_ROW_ID_MAX) /* cut between characters */
                for (n = SL_ROW_ID_MAX; n && ((unsigned char)json_string_value(v)[n] & 0xc0) == 0x80; n--) {}
            memcpy(row->id, json_string_value(v), n);
            row->id_len = (uint32_t)n;
            return;
        }
        if (json_is_integer(v)) {
            char num[32];
            int n = snprintf(num, sizeof num, "%lld", (long long)json_integer_value(v));
            memcpy(row->id, num, (size_t)n);
            row->id_len = (uint32_t)n;
            return;
        }
    }
}

sl_reason sl_row_parse(sl_row *row, const char *line, size_t n, uint32_t vocab, sl_err *why) {
    memset(row, 0, sizeof *row);
    sl_reason r = parse_tree(&row->root, line, n, why);
    if (!r) {
        json_t *v, *o = row->root;
        take_id(row);
        if ((v = field(o, "input_ids")))
            r = parse_ids(row, v, field(o, "loss_mask"), vocab, why);
        else if ((v = field(o, "messages")))
            r = parse_chat(row, v, NULL, "messages", why);
        else if ((v = field(o, "conversations")))
            r = parse_chat(row, v, NULL, "conversations", why);
        else if ((v = field(o, "prompt")) && field(o, "completion"))
            r = json_is_array(v) ? parse_chat(row, v, field(o, "completion"), "prompt", why)
                                 : parse_text(row, v, field(o, "completion"), why);
        else if ((v = field(o, "text")))
            r = parse_text(row, v, NULL, why);
        else
            r = sl_refuse(why, SL_R_FIELDS,
                          "no input_ids, messages, conversations, prompt + completion or text in this row");
    }
    if (r) sl_row_free(row);
    return r;
}

void sl_row_free(sl_row *row) {
    json_decref(row->messages);
    json_decref(row->own);
    json_decref(row->root);
    free(row->ids);
    free(row->mask);
    free(row->text);
    memset(row, 0, sizeof *row);
}
