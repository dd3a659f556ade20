#include "stages/writer/safetensors_out.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char sl_convention[] =
    "H[0] is the embedding output, H[k] the residual stream after k layers, H[n] the last layer's output before "
    "the final norm; an index followed by n is the final-normed H[n]";

uint32_t sl_capture_label(const sl_capture_set *c, uint32_t k) {
    return c->v[k].final_norm ? c->n_layers + 1 : c->v[k].hidx;
}

bool sl_capture_split(const sl_capture_set *c) {
    return c->n >= 2 && c->v[c->n - 1].final_norm && !c->v[c->n - 2].final_norm && c->v[c->n - 2].hidx == c->n_layers;
}

uint32_t sl_capture_stacked(const sl_capture_set *c) {
    return c->n - (sl_capture_split(c) ? 1 : 0);
}

const char *sl_capture_final(const sl_capture_set *c) {
    if (sl_capture_split(c)) return "both";
    if (!c->n) return "none";
    const sl_capture *l = &c->v[c->n - 1];
    return l->final_norm ? "post" : l->hidx == c->n_layers ? "pre" : "none";
}

void sl_capture_text(const sl_capture_set *c, char *buf, size_t cap) {
    size_t at = 0;
    buf[0] = 0;
    for (uint32_t k = 0; k < c->n && at + 16 < cap; k++)
        at += (size_t)snprintf(buf + at, cap - at, "%s%u%s", k ? "," : "", c->v[k].hidx, c->v[k].final_norm ? "n" : "");
}

/* Length of the UTF-8 sequence at s (n bytes left), 0 when it is none. */
static size_t utf8_len(const unsigned char *s, size_t n) {
    size_t want = s[0] < 0x80                   ? 1
                  : s[0] >= 0xc2 && s[0] < 0xe0 ? 2
                  : s[0] >= 0xe0 && s[0] < 0xf0 ? 3
                  : s[0] >= 0xf0 && s[0] < 0xf5 ? 4
                                                : 0;
    if (!want || want > n) return 0;
    for (size_t i = 1; i < want; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] >= 0xa0) || (s[0] == 0xf0 && s[1] < 0x90) ||
        (s[0] == 0xf4 && s[1] >= 0x90))
        return 0;
    return want;
}

void sl_json_str(char *buf, size_t cap, size_t *at, const char *s, size_t n) {
    size_t a = *at;
    if (a + 8 >= cap) return;
    buf[a++] = '"';
    for (size_t i = 0; i < n && a + 8 < cap;) {
        unsigned char ch = (unsigned char)s[i];
        size_t u = utf8_len((const unsigned char *)s + i, n - i);
        if (ch == '"' || ch == '\\') {
            buf[a++] = '\\';
            buf[a++] = s[i++];
        } else if (ch < 0x20 || !u) {
            a += (size_t)snprintf(buf + a, cap - a, "\\u%04x", u ? ch : 0xfffd);
            i++;
        } else {
            memcpy(buf + a, s + i, u);
            a += u;
            i += u;
        }
    }
    buf[a++] = '"';
    buf[a] = 0;
    *at = a;
}

static size_t metadata(const sl_capture_set *c, const sl_st_row *r, char *b, size_t cap) {
    char idx[1024];
    size_t at = 0;
    sl_capture_text(c, idx, sizeof idx);
    at += (size_t)snprintf(
        b + at, cap - at,
        "{\"__metadata__\":{\"format\":\"sluice-1\",\"h_indices\":\"%s\",\"n_layers\":\"%u\",\"final\":\"%s\","
        "\"convention\":\"%s\",\"model\":",
        idx, c->n_layers, sl_capture_final(c), sl_convention);
    sl_json_str(b, cap, &at, c->model, strnlen(c->model, sizeof c->model));
    at += (size_t)snprintf(b + at, cap - at, ",\"dataset\":");
    sl_json_str(b, cap, &at, r->dataset, strlen(r->dataset));
    at += (size_t)snprintf(b + at, cap - at, ",\"row\":\"%llu\",\"part\":\"%u\",\"id\":", (unsigned long long)r->row,
                           r->part);
    sl_json_str(b, cap, &at, r->id, r->id_len);
    at += (size_t)snprintf(b + at, cap - at, ",\"mask_sum\":\"%u\"", r->mask_sum);
    if (!isnan(r->nll)) at += (size_t)snprintf(b + at, cap - at, ",\"nll\":\"%.9g\"", (float)r->nll);
    at += (size_t)snprintf(b + at, cap - at, "}");
    return at;
}

char *sl_st_header(const sl_capture_set *c, const sl_st_row *r, uint64_t *len, uint64_t *data_len) {
    size_t cap = 8192 + 6 * (r->id_len + strlen(r->dataset)) + sizeof c->model * 6 + sizeof sl_convention, at;
    char *b = malloc(cap);
    if (!b) return NULL;
    const char *dt = c->elem_size == 2 ? "BF16" : "F32";
    uint32_t stacked = sl_capture_stacked(c);
    uint64_t o = (uint64_t)r->T * stacked * c->width * c->elem_size;
    at = 8 + metadata(c, r, b + 8, cap - 8);
    at += (size_t)snprintf(b + at, cap - at,
                           ",\"hidden_states\":{\"dtype\":\"%s\",\"shape\":[%u,%u,%u],\"data_offsets\":[0,%llu]}", dt,
                           r->T, stacked, c->width, (unsigned long long)o);
    if (sl_capture_split(c)) {
        uint64_t e = o + (uint64_t)r->T * c->width * c->elem_size;
        at += (size_t)snprintf(b + at, cap - at,
                               ",\"final_norm\":{\"dtype\":\"%s\",\"shape\":[%u,%u],\"data_offsets\":[%llu,%llu]}", dt,
                               r->T, c->width, (unsigned long long)o, (unsigned long long)e);
        o = e;
    }
    at += (size_t)snprintf(b + at, cap - at,
                           ",\"token_ids\":{\"dtype\":\"I64\",\"shape\":[%u],\"data_offsets\":[%llu,%llu]}", r->T,
                           (unsigned long long)o, (unsigned long long)(o + 8ull * r->T));
    o += 8ull * r->T;
    at += (size_t)snprintf(b + at, cap - at,
                           ",\"loss_mask\":{\"dtype\":\"U8\",\"shape\":[%u],\"data_offsets\":[%llu,%llu]}}", r->T,
                           (unsigned long long)o, (unsigned long long)(o + r->T));
    while (at % 64) b[at++] = ' ';
    uint64_t n = at - 8;
    memcpy(b, &n, 8);
    *len = at;
    *data_len = o + r->T;
    return b;
}
