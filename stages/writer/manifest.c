#include "stages/writer/manifest.h"
#include "ipc/file.h"
#include "stages/writer/names.h"
#include "stages/writer/codec.h"
#include "stages/writer/xxh3.h"
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { VERSION = 2 };
static const char *const layouts[] = {[SL_LAYOUT_SHARDS] = "shards", [SL_LAYOUT_FILES] = "files"};

void sl_store_stats_add(sl_store_stats *s, const sl_commit_rec *r) {
    if (r->kind == SL_CM_REJECT) {
        s->rejected++;
        s->rejected_tokens += r->T;
        s->by_verdict[r->verdict < SL_V_N ? r->verdict : SL_V_COUNT]++;
    }
    if (r->kind != SL_CM_COMMIT) return;
    s->rows++;
    s->tokens += r->T;
    s->supervised += r->mask_sum;
    s->raw_bytes += r->raw_bytes;
    s->stored_bytes += r->len;
    if (!isnan(r->nll)) {
        s->nll_rows++;
        s->nll_sum += (double)r->nll;
    }
}

static json_t *counts(const sl_store_stats *s) {
    json_t *by = json_object();
    for (int v = 1; v < SL_V_N; v++)
        if (s->by_verdict[v])
            json_object_set_new(by, sl_verdict_name((sl_verdict)v), json_integer((json_int_t)s->by_verdict[v]));
    return json_pack("{s:I,s:I,s:o,s:I,s:I,s:I,s:I,s:I,s:o}", "rows", (json_int_t)s->rows, "rejected",
                     (json_int_t)s->rejected, "rejected_by", by, "tokens", (json_int_t)s->tokens, "supervised_tokens",
                     (json_int_t)s->supervised, "raw_bytes", (json_int_t)s->raw_bytes, "stored_bytes",
                     (json_int_t)s->stored_bytes, "nll_rows", (json_int_t)s->nll_rows, "nll_mean",
                     s->nll_rows ? json_real(s->nll_sum / (double)s->nll_rows) : json_null());
}

static json_t *to_json(const sl_manifest *m) {
    char idx[1024];
    json_t *list = json_array();
    for (uint32_t k = 0; k < m->set.n; k++)
        json_array_append_new(
            list, json_pack("{s:i,s:b}", "h", (int)m->set.v[k].hidx, "final_norm", (int)m->set.v[k].final_norm));
    sl_capture_text(&m->set, idx, sizeof idx);
    return json_pack(
        "{s:s,s:i,s:{s:s,s:s,s:i,s:i,s:i},s:{s:s,s:s,s:o,s:s,s:s},s:s,s:s,s:s,s:s,s:s,s:o,s:s,s:s}", "format",
        "sluice-store", "version", VERSION, "model", "fingerprint", m->set.model, "path", m->model_path, "n_layers",
        (int)m->set.n_layers, "width", (int)m->set.width, "vocab", (int)m->vocab, "states", "dtype",
        m->set.elem_size == 2 ? "bf16" : "f32", "h_indices", idx, "captures", list, "final", sl_capture_final(&m->set),
        "convention", sl_convention, "layout", layouts[m->layout == SL_LAYOUT_FILES], "codec", sl_codec_name(m->codec),
        "tokenizer_hash", m->tokenizer_hash, "template_hash", m->template_hash, "rows_made", m->rows_made, "counts",
        counts(&m->stats), "state", m->complete ? "complete" : "open", "checksum", "xxh3:0000000000000000");
}

/* The 16 digits of the checksum in the text, NULL when there are none. */
static char *digits(char *text, size_t n) {
    static const char mark[] = "\"checksum\": \"xxh3:";
    size_t len = sizeof mark - 1;
    for (size_t at = n; at-- > 0;)
        if (n - at >= len + 16 && !memcmp(text + at, mark, len)) return text + at + len;
    return NULL;
}

static void sum_text(char *text, size_t n, char *at, char hex[17]) {
    memset(at, '0', 16);
    snprintf(hex, 17, "%016llx", (unsigned long long)XXH3_64bits(text, n));
    memcpy(at, hex, 16);
}

int sl_manifest_write(const sl_manifest *m, const char *store, sl_err *err) {
    char tmp[SL_PATH_MAX + 32], path[SL_PATH_MAX + 32];
    snprintf(tmp, sizeof tmp, "%s/.manifest.tmp", store);
    snprintf(path, sizeof path, "%s/manifest.json", store);
    json_t *j = to_json(m);
    char *text = j ? json_dumps(j, JSON_INDENT(2)) : NULL;
    json_decref(j);
    if (!text) return sl_err_set(err, SL_EINTERNAL, "cannot form the manifest (is a path or hash not UTF-8?)");
    size_t n = strlen(text);
    text[n++] = '\n'; /* in place of the NUL */
    char *at = digits(text, n), hex[17];
    if (at) sum_text(text, n, at, hex);
    int fd = open(tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    int e = fd < 0 ? errno : sl_file_write(fd, text, n);
    if (!e && fsync(fd)) e = errno;
    if (fd >= 0) close(fd);
    free(text);
    if (!e && rename(tmp, path)) e = errno;
    if (e) {
        unlink(tmp);
        return sl_err_sys(err, sl_file_code(e), e, "cannot write %s", path);
    }
    return sl_file_sync_folder(store, err);
}

static int str_field(json_t *o, const char *key, char *buf, size_t cap) {
    const char *s = json_string_value(json_object_get(o, key));
    if (!s || strlen(s) >= cap) return -1;
    strcpy(buf, s);
    return 0;
}

static int u32_field(json_t *o, const char *key, uint32_t max, uint32_t *out) {
    json_t *v = json_object_get(o, key);
    if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) > (json_int_t)max) return -1;
    *out = (uint32_t)json_integer_value(v);
    return 0;
}

static int u64_field(json_t *o, const char *key, uint64_t *out) {
    json_t *v = json_object_get(o, key);
    if (!json_is_integer(v) || json_integer_value(v) < 0) return -1;
    *out = (uint64_t)json_integer_value(v);
    return 0;
}

static const char *parse(sl_manifest *m, json_t *j) {
    char word[32];
    json_t *model = json_object_get(j, "model"), *st = json_object_get(j, "states"),
           *list = json_object_get(st, "captures");
    if (str_field(j, "format", word, sizeof word) || strcmp(word, "sluice-store")) return "format";
    uint32_t version;
    if (u32_field(j, "version", VERSION, &version) || version != VERSION) return "version";
    if (str_field(model, "fingerprint", m->set.model, sizeof m->set.model)) return "model.fingerprint";
    if (str_field(model, "path", m->model_path, sizeof m->model_path)) return "model.path";
    if (u32_field(model, "n_layers", 100000, &m->set.n_layers)) return "model.n_layers";
    if (u32_field(model, "width", 1u << 24, &m->set.width) || !m->set.width) return "model.width";
    if (u32_field(model, "vocab", 1u << 30, &m->vocab)) return "model.vocab";
    if (str_field(st, "dtype", word, sizeof word)) return "states.dtype";
    m->set.elem_size = !strcmp(word, "bf16") ? 2 : !strcmp(word, "f32") ? 4 : 0;
    if (!m->set.elem_size) return "states.dtype";
    if (!json_is_array(list) || json_array_size(list) < 1 || json_array_size(list) > SL_MAX_CAPTURES)
        return "states.captures";
    m->set.n = (uint32_t)json_array_size(list);
    for (uint32_t k = 0; k < m->set.n; k++) {
        json_t *e = json_array_get(list, k);
        if (u32_field(e, "h", m->set.n_layers, &m->set.v[k].hidx)) return "states.captures";
        m->set.v[k].final_norm = json_is_true(json_object_get(e, "final_norm"));
    }
    if (str_field(j, "layout", word, sizeof word)) return "layout";
    m->layout = !strcmp(word, "files") ? SL_LAYOUT_FILES : SL_LAYOUT_SHARDS;
    if (strcmp(word, layouts[m->layout])) return "layout";
    if (str_field(j, "codec", word, sizeof word) || sl_codec_parse(word, &m->codec)) return "codec";
    if (str_field(j, "tokenizer_hash", m->tokenizer_hash, sizeof m->tokenizer_hash)) return "tokenizer_hash";
    if (str_field(j, "template_hash", m->template_hash, sizeof m->template_hash)) return "template_hash";
    if (str_field(j, "rows_made", m->rows_made, sizeof m->rows_made)) m->rows_made[0] = 0; /* (older stores) */
    json_t *n = json_object_get(j, "counts");
    if (u64_field(n, "rows", &m->stats.rows) || u64_field(n, "rejected", &m->stats.rejected) ||
        u64_field(n, "tokens", &m->stats.tokens) || u64_field(n, "supervised_tokens", &m->stats.supervised) ||
        u64_field(n, "raw_bytes", &m->stats.raw_bytes) || u64_field(n, "stored_bytes", &m->stats.stored_bytes) ||
        u64_field(n, "nll_rows", &m->stats.nll_rows))
        return "counts";
    json_t *nll = json_object_get(n, "nll_mean");
    m->stats.nll_sum = json_is_number(nll) ? json_number_value(nll) * (double)m->stats.nll_rows : 0;
    m->complete = !str_field(j, "state", word, sizeof word) && !strcmp(word, "complete");
    return NULL;
}

/* All of a small file, or NULL and errno. */
static char *read_text(const char *path, size_t *n) {
    enum { MOST = 1 << 20 };
    char *t = NULL;
    FILE *f = fopen(path, "re");
    if (f && (t = malloc(MOST))) *n = fread(t, 1, MOST, f);
    if (t && (ferror(f) || *n == MOST)) {
        free(t);
        t = NULL;
        errno = EFBIG;
    }
    if (f) fclose(f);
    return t;
}

int sl_manifest_read(sl_manifest *m, const char *store, sl_err *err) {
    char path[SL_PATH_MAX + 32];
    json_error_t je;
    size_t n;
    memset(m, 0, sizeof *m);
    snprintf(path, sizeof path, "%s/manifest.json", store);
    char *text = read_text(path, &n), *at = text ? digits(text, n) : NULL, was[16], hex[17];
    if (!text && errno == ENOENT)
        return sl_err_set(
            err, SL_ECONFIG,
            "%s is not a store: there is no manifest.json in it. Give the folder that was sluice extract's "
            "--output, or [store] path",
            store);
    if (!text) return sl_err_sys(err, SL_ECONFIG, errno, "cannot read %s", path);
    if (at) {
        memcpy(was, at, 16);
        sum_text(text, n, at, hex);
    }
    if (!at || memcmp(was, hex, 16)) {
        free(text);
        return sl_err_set(err, SL_EDATA, "%s: the text does not match its checksum: it is damaged, or was edited%s",
                          path, at ? "" : " (there is none)");
    }
    json_t *j = json_loadb(text, n, JSON_REJECT_DUPLICATES, &je);
    free(text);
    if (!j) return sl_err_set(err, SL_ECONFIG, "%s: line %d: %s", path, je.line, je.text);
    const char *bad = parse(m, j);
    json_decref(j);
    return bad ? sl_err_set(err, SL_ECONFIG, "%s: field '%s' is missing or not usable by this version", path, bad) : 0;
}

static bool named(const char *hash) {
    return *hash && strcmp(hash, "none") != 0;
}

void sl_manifest_keep(sl_manifest *now, const sl_manifest *old) {
    if (!named(now->tokenizer_hash)) memcpy(now->tokenizer_hash, old->tokenizer_hash, sizeof now->tokenizer_hash);
    if (!named(now->template_hash)) memcpy(now->template_hash, old->template_hash, sizeof now->template_hash);
}

int sl_manifest_same(const sl_manifest *old, const sl_manifest *now, sl_err *err) {
    char a[1024], b[1024];
    const char *what = NULL;
    if (old->set.width != now->set.width)
        what = "width", snprintf(a, 32, "%u", old->set.width), snprintf(b, 32, "%u", now->set.width);
    if (old->layout != now->layout)
        what = "layout", strcpy(a, layouts[old->layout]), strcpy(b, layouts[now->layout == SL_LAYOUT_FILES]);
    if (old->set.elem_size != now->set.elem_size)
        what = "dtype", strcpy(a, old->set.elem_size == 2 ? "bf16" : "f32"),
        strcpy(b, now->set.elem_size == 2 ? "bf16" : "f32");
    if (strcmp(old->set.model, now->set.model))
        what = "model fingerprint", snprintf(a, sizeof a, "%s", old->set.model),
        snprintf(b, sizeof b, "%s", now->set.model);
    /* A store of ids alone has none, and takes text later on. */
    if (!what && strcmp(old->tokenizer_hash, now->tokenizer_hash) && named(old->tokenizer_hash) &&
        named(now->tokenizer_hash))
        what = "tokenizer", snprintf(a, sizeof a, "%s", old->tokenizer_hash),
        snprintf(b, sizeof b, "%s", now->tokenizer_hash);
    if (!what) {
        sl_capture_text(&old->set, a, sizeof a);
        sl_capture_text(&now->set, b, sizeof b);
        if (strcmp(a, b)) what = "layers";
    }
    if (!what) return 0;
    return sl_err_set(
        err, SL_ECONFIG,
        "the store was begun with %s %s and this run has %s: choose another output folder, or the old setting", what, a,
        b);
}

/* The next "key=value " of the text; template_args is the last one and may hold spaces. */
static const char *next_setting(const char *p, int *key, const char **value, int *len) {
    *key = (int)strcspn(p, "=");
    *value = p + *key + (p[*key] == '=');
    *len = (int)(strncmp(p, "template_args=", 14) ? strcspn(*value, " ") : strlen(*value));
    p = *value + *len;
    return p + (*p == ' ');
}

bool sl_manifest_rows_differ(const sl_manifest *old, const sl_manifest *now, char *buf, size_t cap) {
    size_t at = 0;
    buf[0] = 0;
    const char *a = old->rows_made, *b = now->rows_made;
    while (*a && *b) {
        int ka, kb, na, nb;
        const char *va, *vb, *key = b;
        a = next_setting(a, &ka, &va, &na), b = next_setting(b, &kb, &vb, &nb);
        if ((na == nb && !memcmp(va, vb, (size_t)na)) || at >= cap) continue;
        int n = snprintf(buf + at, cap - at, "%s%.*s %.*s, now %.*s", at ? "; " : "", kb, key, na, va, nb, vb);
        at += n > 0 ? (size_t)n : 0;
    }
    return at > 0;
}
