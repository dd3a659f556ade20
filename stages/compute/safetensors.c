#include "stages/compute/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_HEADER (UINT64_C(512) << 20)
#define MAX_INDEX  (UINT64_C(512) << 20)
#define MAX_SHARDS 4096
#define MAX_DEPTH  32

static const struct {
    const char *name;
    uint32_t size;
} dtypes[SL_ST_N] = {
    [SL_ST_F64] = {"F64", 8},         [SL_ST_F32] = {"F32", 4},         [SL_ST_F16] = {"F16", 2},
    [SL_ST_BF16] = {"BF16", 2},       [SL_ST_F8_E4M3] = {"F8_E4M3", 1}, [SL_ST_F8_E5M2] = {"F8_E5M2", 1},
    [SL_ST_F8_E8M0] = {"F8_E8M0", 1}, [SL_ST_I64] = {"I64", 8},         [SL_ST_U64] = {"U64", 8},
    [SL_ST_I32] = {"I32", 4},         [SL_ST_U32] = {"U32", 4},         [SL_ST_I16] = {"I16", 2},
    [SL_ST_U16] = {"U16", 2},         [SL_ST_I8] = {"I8", 1},           [SL_ST_U8] = {"U8", 1},
    [SL_ST_BOOL] = {"BOOL", 1},
};
const char *sl_st_dtype_name(sl_st_dtype t) {
    return (unsigned)t < SL_ST_N ? dtypes[t].name : "?";
}
uint32_t sl_st_dtype_size(sl_st_dtype t) {
    return (unsigned)t < SL_ST_N ? dtypes[t].size : 0;
}

typedef struct st_file {
    char *path;
    int fd;
    uint64_t size;
} st_file;

typedef struct arena_block {
    struct arena_block *next;
    size_t used, size;
    char data[];
} arena_block;

struct sl_st {
    st_file *file;
    uint32_t n_files;
    sl_st_tensor *tensor;
    uint64_t n, cap;
    arena_block *arena; /* names */
};

/* ---- a strict JSON scanner: values are walked, never built, so that a header of a quarter million names costs one
 * pass ---- */

typedef struct scan {
    const char *base, *p, *end, *path;
    sl_err *err;
    char *text; /* the last string, unescaped */
    size_t text_cap, text_n;
} scan;

static int bad(scan *s, const char *what) {
    return sl_err_set(s->err, SL_EDATA, "%s: malformed JSON at byte %zu of it: %s; the file is damaged", s->path,
                      (size_t)(s->p - s->base), what);
}
static void blanks(scan *s) {
    while (s->p < s->end && (*s->p == ' ' || *s->p == '\n' || *s->p == '\t' || *s->p == '\r')) s->p++;
}
static int expect(scan *s, char c) {
    blanks(s);
    if (s->p >= s->end || *s->p != c) {
        char msg[] = "expected '?'";
        msg[10] = c;
        return bad(s, msg);
    }
    s->p++;
    return 0;
}
static bool accept(scan *s, char c) {
    blanks(s);
    if (s->p >= s->end || *s->p != c) return false;
    s->p++;
    return true;
}

static int put(scan *s, char c) {
    if (s->text_n + 1 >= s->text_cap) {
        size_t cap = s->text_cap ? s->text_cap * 2 : 256;
        char *t = realloc(s->text, cap);
        if (!t) return sl_err_set(s->err, SL_ETEMP, "%s: out of memory", s->path);
        s->text = t;
        s->text_cap = cap;
    }
    s->text[s->text_n++] = c;
    return 0;
}
static int hex4(scan *s, uint32_t *out) {
    uint32_t v = 0;
    if (s->end - s->p < 4) return bad(s, "a \\u escape is cut off");
    for (int i = 0; i < 4; i++) {
        char c = *s->p++;
        if (c >= '0' && c <= '9')
            v = v * 16 + (uint32_t)(c - '0');
        else if ((c | 32) >= 'a' && (c | 32) <= 'f')
            v = v * 16 + (uint32_t)((c | 32) - 'a' + 10);
        else
            return bad(s, "a \\u escape is not hexadecimal");
    }
    *out = v;
    return 0;
}
static int put_code(scan *s, uint32_t u) {
    int rc = 0;
    if (u < 0x80) return put(s, (char)u);
    if (u < 0x800) {
        rc = put(s, (char)(0xc0 | u >> 6));
    } else if (u < 0x10000) {
        rc = put(s, (char)(0xe0 | u >> 12));
        if (!rc) rc = put(s, (char)(0x80 | (u >> 6 & 63)));
    } else {
        rc = put(s, (char)(0xf0 | u >> 18));
        if (!rc) rc = put(s, (char)(0x80 | (u >> 12 & 63)));
        if (!rc) rc = put(s, (char)(0x80 | (u >> 6 & 63)));
    }
    return rc ? rc : put(s, (char)(0x80 | (u & 63)));
}
static int escape(scan *s) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    if (s->p >= s->end) return bad(s, "an escape is cut off");
    char c = *s->p++;
    if (c != 'u') {
        const char *f = c ? strchr(from, c) : NULL;
        return f ? put(s, to[f - from]) : bad(s, "unknown escape");
    }
    uint32_t u, lo;
    int rc = hex4(s, &u);
    if (rc) return rc;
    if (u >= 0xd800 && u < 0xdc00) {
        if (s->end - s->p < 2 || s->p[0] != '\\' || s->p[1] != 'u') return bad(s, "half a surrogate pair");
        s->p += 2;
        if ((rc = hex4(s, &lo))) return rc;
        if (lo < 0xdc00 || lo > 0xdfff) return bad(s, "half a surrogate pair");
        u = 0x10000 + ((u - 0xd800) << 10) + (lo - 0xdc00);
    } else if (u >= 0xdc00 && u < 0xe000)
        return bad(s, "half a surrogate pair");
    return u ? put_code(s, u) : bad(s, "a NUL character in a string");
}
/* The next string into s->text, NUL-terminated. */
static int string(scan *s) {
    int rc = expect(s, '"');
    s->text_n = 0;
    while (!rc) {
        if (s->p >= s->end) return bad(s, "a string does not end");
        char c = *s->p++;
        if (c == '"') break;
        if (c == '\\')
            rc = escape(s);
        else if ((unsigned char)c < 0x20)
            rc = bad(s, "a control character in a string");
        else
            rc = put(s, c);
    }
    if (!rc) rc = put(s, 0);
    if (!rc) s->text_n--;
    return rc;
}
static int number(scan *s, uint64_t *out) {
    uint64_t v = 0;
    blanks(s);
    const char *start = s->p;
    while (s->p < s->end && *s->p >= '0' && *s->p <= '9')
        if (__builtin_mul_overflow(v, 10, &v) || __builtin_add_overflow(v, (uint64_t)(*s->p++ - '0'), &v))
            return bad(s, "a number is too large");
    if (s->p == start) return bad(s, "expected a non-negative integer");
    *out = v;
    return 0;
}
static int skip_value(scan *s, int depth) {
    if (depth > MAX_DEPTH) return bad(s, "nested too deeply");
    blanks(s);
    if (s->p >= s->end) return bad(s, "a value is missing");
    int rc = 0;
    if (*s->p == '"') return string(s);
    if (*s->p == '{' || *s->p == '[') {
        bool object = *s->p == '{';
        char close = object ? '}' : ']';
        s->p++;
        if (accept(s, close)) return 0;
        do {
            if (object && ((rc = string(s)) || (rc = expect(s, ':')))) return rc;
            if ((rc = skip_value(s, depth + 1))) return rc;
        } while (accept(s, ','));
        return expect(s, close);
    }
    const char *start =
        s->p; /* a number or a literal: the exact grammar does not matter for a value that is not used */
    while (s->p < s->end &&
           (strchr("+-.", *s->p) ? *s->p != 0
                                 : (*s->p >= '0' && *s->p <= '9') || ((*s->p | 32) >= 'a' && (*s->p | 32) <= 'z')))
        s->p++;
    return s->p == start ? bad(s, "unexpected character") : 0;
}

/* ---- one file's header ---- */

static const char *keep_name(sl_st *s, const char *text, size_t n) {
    arena_block *b = s->arena;
    if (!b || b->size - b->used < n + 1) {
        size_t size = n + 1 > 65536 ? n + 1 : 65536;
        b = malloc(sizeof *b + size);
        if (!b) return NULL;
        *b = (arena_block){.next = s->arena, .size = size};
        s->arena = b;
    }
    char *at = b->data + b->used;
    memcpy(at, text, n + 1);
    b->used += n + 1;
    return at;
}

static int read_shape(scan *s, sl_st_tensor *t) {
    int rc = expect(s, '[');
    t->n_dims = 0;
    if (rc || accept(s, ']')) return rc;
    do {
        if (t->n_dims == SL_ST_MAX_DIMS)
            return sl_err_set(s->err, SL_EDATA, "%s: tensor '%s' has more than %d dimensions", s->path, t->name,
                              SL_ST_MAX_DIMS);
        if ((rc = number(s, &t->shape[t->n_dims]))) return rc;
        t->n_dims++;
    } while (accept(s, ','));
    return expect(s, ']');
}
static int read_dtype(scan *s, sl_st_tensor *t) {
    int rc = string(s);
    if (rc) return rc;
    for (t->dtype = 0; t->dtype < SL_ST_N; t->dtype++)
        if (!strcmp(dtypes[t->dtype].name, s->text)) return 0;
    return sl_err_set(s->err, SL_EDATA, "%s: tensor '%s' has dtype '%.40s', which is unknown", s->path, t->name,
                      s->text);
}

/* The three fields of one tensor, each exactly once. */
static int read_entry(scan *s, sl_st_tensor *t, uint64_t off[2]) {
    unsigned seen = 0;
    int rc = expect(s, '{');
    if (rc) return rc;
    do {
        if ((rc = string(s)) || (rc = expect(s, ':'))) return rc;
        unsigned bit = !strcmp(s->text, "dtype")          ? 1
                       : !strcmp(s->text, "shape")        ? 2
                       : !strcmp(s->text, "data_offsets") ? 4
                                                          : 0;
        if (!bit || (seen & bit))
            return sl_err_set(s->err, SL_EDATA,
                              "%s: tensor '%s' has %s field '%.40s'; expected dtype, shape and data_offsets once each",
                              s->path, t->name, bit ? "a second" : "an unknown", s->text);
        seen |= bit;
        if (bit == 1)
            rc = read_dtype(s, t);
        else if (bit == 2)
            rc = read_shape(s, t);
        else if (!(rc = expect(s, '[')) && !(rc = number(s, &off[0])) && !(rc = expect(s, ',')) &&
                 !(rc = number(s, &off[1])))
            rc = expect(s, ']');
        if (rc) return rc;
    } while (accept(s, ','));
    if ((rc = expect(s, '}'))) return rc;
    if (seen != 7)
        return sl_err_set(s->err, SL_EDATA, "%s: tensor '%s' lacks dtype, shape or data_offsets", s->path, t->name);
    return 0;
}

static int check_entry(scan *s, sl_st_tensor *t, const uint64_t off[2], uint64_t data, uint64_t size) {
    uint64_t bytes = sl_st_dtype_size(t->dtype);
    for (uint32_t d = 0; d < SL_ST_MAX_DIMS; d++) {
        if (d >= t->n_dims) t->shape[d] = 1;
        if (__builtin_mul_overflow(bytes, t->shape[d], &bytes))
            return sl_err_set(s->err, SL_EDATA, "%s: tensor '%s' has an absurd shape (its size overflows)", s->path,
                              t->name);
    }
    if (off[0] > off[1] || off[1] - off[0] != bytes)
        return sl_err_set(s->err, SL_EDATA,
                          "%s: tensor '%s': data_offsets [%" PRIu64 ", %" PRIu64 "] do not span the %" PRIu64
                          " bytes that its dtype %s and shape need",
                          s->path, t->name, off[0], off[1], bytes, sl_st_dtype_name(t->dtype));
    if (off[1] > size - data)
        return sl_err_set(s->err, SL_EDATA,
                          "%s: tensor '%s' ends at byte %" PRIu64 " of the data, but the file has only %" PRIu64
                          " there: it is truncated, fetch it again",
                          s->path, t->name, off[1], size - data);
    t->bytes = bytes;
    t->offset = data + off[0];
    return 0;
}

static sl_st_tensor *new_tensor(sl_st *s) {
    if (s->n == s->cap) {
        uint64_t cap = s->cap ? s->cap * 2 : 256;
        sl_st_tensor *t = realloc(s->tensor, cap * sizeof *t);
        if (!t) return NULL;
        s->tensor = t;
        s->cap = cap;
    }
    sl_st_tensor *t = &s->tensor[s->n];
    memset(t, 0, sizeof *t);
    return t;
}

static int scan_header(sl_st *st, scan *s, uint32_t file, uint64_t data, uint64_t size) {
    int rc = expect(s, '{');
    if (rc) return rc;
    if (!accept(s, '}')) {
        do {
            if ((rc = string(s)) || (rc = expect(s, ':'))) return rc;
            if (!strcmp(s->text, "__metadata__")) {
                if ((rc = skip_value(s, 0))) return rc;
                continue;
            }
            sl_st_tensor *t = new_tensor(st);
            if (!t || !(t->name = keep_name(st, s->text, s->text_n)))
                return sl_err_set(s->err, SL_ETEMP, "%s: out of memory for its names", s->path);
            uint64_t off[2];
            t->file = file;
            if ((rc = read_entry(s, t, off)) || (rc = check_entry(s, t, off, data, size))) return rc;
            st->n++;
        } while (accept(s, ','));
        if ((rc = expect(s, '}'))) return rc;
    }
    blanks(s);
    return s->p == s->end ? 0 : bad(s, "text after the header's object");
}

static int by_offset(const void *a, const void *b) {
    const sl_st_tensor *x = a, *y = b;
    if (x->offset != y->offset) return x->offset > y->offset ? 1 : -1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}
static int by_name(const void *a, const void *b) {
    return strcmp(((const sl_st_tensor *)a)->name, ((const sl_st_tensor *)b)->name);
}

static int check_layout(sl_st *st, const char *path, uint64_t first, uint64_t data, uint64_t size, sl_err *err) {
    uint64_t at = data;
    if (st->n > first) qsort(&st->tensor[first], st->n - first, sizeof *st->tensor, by_offset);
    for (uint64_t i = first; i < st->n; at = st->tensor[i].offset + st->tensor[i].bytes, i++) {
        const sl_st_tensor *t = &st->tensor[i];
        if (t->offset < at)
            return sl_err_set(err, SL_EDATA, "%s: tensors '%s' and '%s' overlap: the header is damaged", path,
                              i > first ? st->tensor[i - 1].name : "?", t->name);
        if (t->offset > at)
            return sl_err_set(err, SL_EDATA,
                              "%s: %" PRIu64 " bytes before tensor '%s' belong to no tensor: the header is damaged",
                              path, t->offset - at, t->name);
    }
    if (at != size)
        return sl_err_set(err, SL_EDATA, "%s: %" PRIu64 " bytes after the last tensor: the header is damaged", path,
                          size - at);
    return 0;
}

static int parse_header(sl_st *st, uint32_t file, const char *json, uint64_t n, sl_err *err) {
    st_file *f = &st->file[file];
    scan s = {json, json, json + n, f->path, err, NULL, 0, 0};
    uint64_t first = st->n;
    int rc = scan_header(st, &s, file, 8 + n, f->size);
    free(s.text);
    return rc ? rc : check_layout(st, f->path, first, 8 + n, f->size, err);
}

static int check_header_size(const char *path, uint64_t n, uint64_t size, sl_err *err) {
    if (n > size - 8 || n > MAX_HEADER || n < 2)
        return sl_err_set(err, SL_EDATA,
                          "%s: claims a header of %" PRIu64 " bytes in a file of %" PRIu64 " (at most %" PRIu64
                          " MiB are sane): not a safetensors file, or damaged",
                          path, n, size, MAX_HEADER >> 20);
    return 0;
}

static int read_all(int fd, char *buf, uint64_t n, uint64_t off, const char *path, sl_err *err) {
    while (n) {
        ssize_t r = pread(fd, buf, n, (off_t)off);
        if (r < 0 && errno == EINTR) continue;
        if (r < 0) return sl_err_sys(err, SL_ETEMP, errno, "%s: cannot read", path);
        if (r == 0) return sl_err_set(err, SL_EDATA, "%s: ends at byte %" PRIu64 ", more was expected", path, off);
        buf += r;
        off += (uint64_t)r;
        n -= (uint64_t)r;
    }
    return 0;
}

static int open_shard(sl_st *st, const char *path, sl_err *err) {
    struct stat sb;
    st_file *file = realloc(st->file, (st->n_files + 1) * sizeof *file);
    if (!file) return sl_err_set(err, SL_ETEMP, "%s: out of memory", path);
    st->file = file;
    st_file *f = &file[st->n_files++];
    *f = (st_file){strdup(path), open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), 0};
    if (!f->path) return sl_err_set(err, SL_ETEMP, "%s: out of memory", path);
    if (f->fd < 0) return sl_err_sys(err, SL_ECONFIG, errno, "%s: cannot open", path);
    if (fstat(f->fd, &sb)) return sl_err_sys(err, SL_ECONFIG, errno, "%s: cannot stat", path);
    if (!S_ISREG(sb.st_mode)) return sl_err_set(err, SL_ECONFIG, "%s: not a regular file", path);
    f->size = (uint64_t)sb.st_size;
    if (f->size < 10)
        return sl_err_set(err, SL_EDATA, "%s: %" PRIu64 " bytes are too few for a safetensors file", path, f->size);
    uint64_t n;
    int rc = read_all(f->fd, (char *)&n, 8, 0, path, err);
    if (!rc) rc = check_header_size(path, n, f->size, err);
    if (rc) return rc;
    char *json = malloc(n);
    if (!json) return sl_err_set(err, SL_ETEMP, "%s: out of memory for a header of %" PRIu64 " bytes", path, n);
    rc = read_all(f->fd, json, n, 8, path, err);
    if (!rc) rc = parse_header(st, st->n_files - 1, json, n, err);
    free(json);
    return rc;
}

static int sort_names(sl_st *st, sl_err *err) {
    if (st->n) qsort(st->tensor, st->n, sizeof *st->tensor, by_name);
    for (uint64_t i = 1; i < st->n; i++)
        if (!strcmp(st->tensor[i - 1].name, st->tensor[i].name)) {
            const char *a = st->file[st->tensor[i - 1].file].path, *b = st->file[st->tensor[i].file].path;
            return sl_err_set(err, SL_EDATA, "tensor '%s' appears twice: in %s and in %s", st->tensor[i].name, a, b);
        }
    return 0;
}

/* ---- the index ---- */

int sl_st_index_mem(const void *data, uint64_t n, const char *path,
                    int (*each)(void *, const char *, const char *, sl_err *), void *arg, sl_err *err) {
    scan s = {data, data, (const char *)data + n, path, err, NULL, 0, 0};
    char *name = NULL;
    int rc = expect(&s, '{'), maps = 0;
    if (!rc && accept(&s, '}')) goto done;
    while (!rc) {
        if ((rc = string(&s)) || (rc = expect(&s, ':'))) break;
        if (strcmp(s.text, "weight_map") != 0)
            rc = skip_value(&s, 0);
        else if (maps++)
            rc = bad(&s, "a second weight_map");
        else if (!(rc = expect(&s, '{')) && !accept(&s, '}')) {
            do {
                free(name);
                name = NULL;
                if ((rc = string(&s)) || (rc = expect(&s, ':'))) break;
                if (!(name = strdup(s.text)))
                    rc = sl_err_set(err, SL_ETEMP, "%s: out of memory", path);
                else if (!(rc = string(&s)))
                    rc = each(arg, name, s.text, err);
            } while (!rc && accept(&s, ','));
            if (!rc) rc = expect(&s, '}');
        }
        if (rc || !accept(&s, ',')) break;
    }
    if (!rc) rc = expect(&s, '}');
done:
    blanks(&s);
    if (!rc && s.p != s.end) rc = bad(&s, "text after the object");
    if (!rc && !maps) rc = sl_err_set(err, SL_EDATA, "%s: has no weight_map", path);
    free(name);
    free(s.text);
    return rc;
}

typedef struct index_pair {
    char *name;
    uint32_t file;
} index_pair;
typedef struct index_list {
    const char *path;
    char **file;
    uint32_t n_files;
    index_pair *pair;
    uint64_t n, cap;
} index_list;

static int add_pair(void *arg, const char *name, const char *file, sl_err *err) {
    index_list *l = arg;
    uint32_t f = l->n_files; /* neighbours mostly share a file: search from the end */
    while (f > 0 && strcmp(l->file[f - 1], file) != 0) f--;
    if (f == 0) {
        if (!*file || strchr(file, '/') || file[0] == '.')
            return sl_err_set(err, SL_EDATA, "%s: tensor '%s' is said to be in '%s', which is not a plain file name",
                              l->path, name, file);
        if (l->n_files == MAX_SHARDS)
            return sl_err_set(err, SL_EDATA, "%s: names more than %d files", l->path, MAX_SHARDS);
        char **g = realloc(l->file, (l->n_files + 1) * sizeof *g);
        if (g) l->file = g;
        if (!g || !(g[l->n_files] = strdup(file))) return sl_err_set(err, SL_ETEMP, "%s: out of memory", l->path);
        f = ++l->n_files;
    }
    if (l->n == l->cap) {
        uint64_t cap = l->cap ? l->cap * 2 : 1024;
        index_pair *p = realloc(l->pair, cap * sizeof *p);
        if (!p) return sl_err_set(err, SL_ETEMP, "%s: out of memory", l->path);
        l->pair = p;
        l->cap = cap;
    }
    l->pair[l->n] = (index_pair){strdup(name), f - 1};
    if (!l->pair[l->n].name) return sl_err_set(err, SL_ETEMP, "%s: out of memory", l->path);
    l->n++;
    return 0;
}
static void free_index(index_list *l) {
    for (uint32_t i = 0; i < l->n_files; i++) free(l->file[i]);
    for (uint64_t i = 0; i < l->n; i++) free(l->pair[i].name);
    free(l->file);
    free(l->pair);
}

/* All names that the index promises but the files lack, in one message. */
static int check_index(const sl_st *st, const index_list *l, sl_err *err) {
    char list[1024];
    size_t at = 0;
    uint64_t missing = 0;
    for (uint64_t i = 0; i < l->n; i++) {
        const sl_st_tensor *t = sl_st_find(st, l->pair[i].name);
        if (t && t->file == l->pair[i].file) continue;
        if (missing++ < 5 && at < sizeof list)
            at += (size_t)snprintf(list + at, sizeof list - at, "%s'%.120s' (in %.60s)", at ? ", " : "",
                                   l->pair[i].name, l->file[l->pair[i].file]);
    }
    if (!missing) return 0;
    return sl_err_set(err, SL_EDATA, "%s: %" PRIu64 " tensors are not in the files that it names: %s%s", l->path,
                      missing, list, missing > 5 ? ", ..." : "");
}

static char *slurp(const char *path, uint64_t max, uint64_t *n, sl_err *err) {
    struct stat sb;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    char *buf = NULL;
    if (fd < 0 || fstat(fd, &sb))
        sl_err_sys(err, SL_ECONFIG, errno, "%s: cannot open", path);
    else if (!S_ISREG(sb.st_mode) || (uint64_t)sb.st_size > max)
        sl_err_set(err, SL_EDATA, "%s: not a regular file, or larger than %" PRIu64 " MiB", path, max >> 20);
    else if (!(buf = malloc((size_t)sb.st_size + 1)))
        sl_err_set(err, SL_ETEMP, "%s: out of memory", path);
    else {
        *n = (uint64_t)sb.st_size;
        if (read_all(fd, buf, *n, 0, path, err)) {
            free(buf);
            buf = NULL;
        }
    }
    if (fd >= 0) close(fd);
    return buf;
}

static int open_index(sl_st *st, const char *dir, const char *index, sl_err *err) {
    index_list l = {.path = index};
    uint64_t n = 0;
    char *json = slurp(index, MAX_INDEX, &n, err);
    if (!json) return err ? err->code : SL_EDATA;
    int rc = sl_st_index_mem(json, n, index, add_pair, &l, err);
    free(json);
    for (uint32_t i = 0; i < l.n_files && !rc; i++) {
        size_t len = strlen(dir) + strlen(l.file[i]) + 2;
        char *path = malloc(len);
        if (!path)
            rc = sl_err_set(err, SL_ETEMP, "%s: out of memory", index);
        else {
            snprintf(path, len, "%s/%s", dir, l.file[i]);
            rc = open_shard(st, path, err);
            if (rc && err && access(path, F_OK)) sl_err_wrap(err, "%s names a file that is not there", index);
        }
        free(path);
    }
    if (!rc) rc = sort_names(st, err);
    if (!rc) rc = check_index(st, &l, err);
    free_index(&l);
    return rc;
}

int sl_st_open(sl_st **out, const char *path, sl_err *err) {
    struct stat sb;
    sl_err local = {0};
    if (!err) err = &local;
    *out = NULL;
    sl_st *st = calloc(1, sizeof *st);
    size_t len = strlen(path) + 40;
    char *name = malloc(len);
    int rc = 0;
    if (!st || !name)
        rc = sl_err_set(err, SL_ETEMP, "%s: out of memory", path);
    else if (stat(path, &sb))
        rc = sl_err_sys(err, SL_ECONFIG, errno, "%s: cannot open", path);
    else if (!S_ISDIR(sb.st_mode)) {
        rc = open_shard(st, path, err);
        if (!rc) rc = sort_names(st, err);
    } else {
        snprintf(name, len, "%s/model.safetensors", path);
        if (!access(name, F_OK)) {
            rc = open_shard(st, name, err);
            if (!rc) rc = sort_names(st, err);
        } else {
            snprintf(name, len, "%s/model.safetensors.index.json", path);
            if (access(name, F_OK))
                rc = sl_err_set(err, SL_ECONFIG, "%s: holds neither model.safetensors nor model.safetensors.index.json",
                                path);
            else
                rc = open_index(st, path, name, err);
        }
    }
    free(name);
    if (rc)
        sl_st_close(st);
    else
        *out = st;
    return rc;
}

int sl_st_open_mem(sl_st **out, const void *data, uint64_t n, uint64_t file_bytes, sl_err *err) {
    *out = NULL;
    sl_st *st = calloc(1, sizeof *st);
    if (st) st->file = calloc(1, sizeof *st->file);
    if (st && st->file) {
        st->n_files = 1;
        st->file[0] = (st_file){strdup("(memory)"), -1, file_bytes};
    }
    if (!st || !st->file || !st->file[0].path) {
        sl_st_close(st);
        return sl_err_set(err, SL_ETEMP, "out of memory");
    }
    uint64_t header = 0;
    int rc = 0;
    if (n < 10 || file_bytes < n)
        rc = sl_err_set(err, SL_EDATA, "(memory): %" PRIu64 " bytes are too few for a safetensors file", n);
    if (!rc) {
        memcpy(&header, data, 8);
        rc = check_header_size("(memory)", header, n, err);
    }
    if (!rc) rc = parse_header(st, 0, (const char *)data + 8, header, err);
    if (!rc) rc = sort_names(st, err);
    if (rc)
        sl_st_close(st);
    else
        *out = st;
    return rc;
}

void sl_st_close(sl_st *s) {
    if (!s) return;
    for (uint32_t i = 0; i < s->n_files; i++) {
        if (s->file[i].fd >= 0) close(s->file[i].fd);
        free(s->file[i].path);
    }
    for (arena_block *b = s->arena, *next; b; b = next) {
        next = b->next;
        free(b);
    }
    free(s->file);
    free(s->tensor);
    free(s);
}

uint64_t sl_st_n_tensors(const sl_st *s) {
    return s->n;
}
const sl_st_tensor *sl_st_at(const sl_st *s, uint64_t i) {
    return i < s->n ? &s->tensor[i] : NULL;
}
const sl_st_tensor *sl_st_find(const sl_st *s, const char *name) {
    sl_st_tensor want = {.name = name};
    return s->n ? bsearch(&want, s->tensor, s->n, sizeof want, by_name) : NULL;
}
uint32_t sl_st_n_files(const sl_st *s) {
    return s->n_files;
}
const char *sl_st_path(const sl_st *s, uint32_t file) {
    return file < s->n_files ? s->file[file].path : "";
}
int sl_st_fd(const sl_st *s, uint32_t file) {
    return file < s->n_files ? s->file[file].fd : -1;
}
uint64_t sl_st_file_bytes(const sl_st *s, uint32_t file) {
    return file < s->n_files ? s->file[file].size : 0;
}
