#include "stages/compute/gguf.h"

#include "ipc/file.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define GGUF_MAGIC       0x46554747u /* "GGUF" */
#define MAX_FILES        1000
#define MAX_ARRAY_NEST   4
#define MIN_KV_BYTES     13 /* empty key, type, one byte of value */
#define MIN_TENSOR_BYTES 24 /* empty name, n_dims, type, offset */

/* ---- ggml tensor types ---- */

typedef struct ggml_type_info {
    const char *name;
    uint16_t elems, bytes;
} ggml_type_info;

/* Layouts of types that we do not compute with are here as well, so that a file that uses them is refused for what it
 * is (a type we lack) and not as damaged. */
static const ggml_type_info ggml_types[] = {
    [0] = {"F32", 1, 4},         [1] = {"F16", 1, 2},         [2] = {"Q4_0", 32, 18},      [3] = {"Q4_1", 32, 20},
    [6] = {"Q5_0", 32, 22},      [7] = {"Q5_1", 32, 24},      [8] = {"Q8_0", 32, 34},      [9] = {"Q8_1", 32, 36},
    [10] = {"Q2_K", 256, 84},    [11] = {"Q3_K", 256, 110},   [12] = {"Q4_K", 256, 144},   [13] = {"Q5_K", 256, 176},
    [14] = {"Q6_K", 256, 210},   [15] = {"Q8_K", 256, 292},   [16] = {"IQ2_XXS", 256, 66}, [17] = {"IQ2_XS", 256, 74},
    [18] = {"IQ3_XXS", 256, 98}, [19] = {"IQ1_S", 256, 50},   [20] = {"IQ4_NL", 32, 18},   [21] = {"IQ3_S", 256, 110},
    [22] = {"IQ2_S", 256, 82},   [23] = {"IQ4_XS", 256, 136}, [24] = {"I8", 1, 1},         [25] = {"I16", 1, 2},
    [26] = {"I32", 1, 4},        [27] = {"I64", 1, 8},        [28] = {"F64", 1, 8},        [29] = {"IQ1_M", 256, 56},
    [30] = {"BF16", 1, 2},       [34] = {"TQ1_0", 256, 54},   [35] = {"TQ2_0", 256, 66},   [39] = {"MXFP4", 32, 17},
};

static const ggml_type_info *type_info(uint32_t type) {
    if (type >= sizeof ggml_types / sizeof *ggml_types || !ggml_types[type].name) return NULL;
    return &ggml_types[type];
}
const char *sl_ggml_type_name(uint32_t type) {
    const ggml_type_info *t = type_info(type);
    return t ? t->name : NULL;
}
uint32_t sl_ggml_block_elems(uint32_t type) {
    const ggml_type_info *t = type_info(type);
    return t ? t->elems : 0;
}
uint32_t sl_ggml_block_bytes(uint32_t type) {
    const ggml_type_info *t = type_info(type);
    return t ? t->bytes : 0;
}

/* ---- the parsed file ---- */

typedef struct gguf_kv {
    sl_gguf_str key;
    uint32_t type;      /* sl_gguf_type */
    uint32_t elem_type; /* arrays */
    uint64_t count;     /* arrays */
    const uint8_t *at;  /* scalar bytes, string bytes, or the first array element */
    uint64_t n;         /* string length */
    uint64_t *str_off;  /* string arrays: offset of every element from `at`, so that access is O(1) for any thread */
} gguf_kv;

typedef struct gguf_file {
    char *path;
    int fd;
    const uint8_t *map;
    uint64_t size;
    bool mapped;
} gguf_file;

struct sl_gguf {
    gguf_file *file;
    uint32_t n_files;
    gguf_kv *kv; /* sorted by key; of the first file */
    uint64_t n_kv, meta_bytes;
    sl_gguf_tensor *tensor; /* in file order */
    uint64_t n_tensors;
    uint32_t *by_name; /* indices sorted by name */
};

typedef struct cursor {
    const uint8_t *base, *p, *end;
    const char *path;
    sl_err *err;
} cursor;

static uint64_t left(const cursor *c) {
    return (uint64_t)(c->end - c->p);
}

static int truncated(cursor *c, const char *what) {
    return sl_err_set(c->err, SL_EDATA,
                      "%s: file ends at byte %" PRIu64 " inside %s; it is truncated or damaged: fetch it again",
                      c->path, (uint64_t)(c->end - c->base), what);
}
static int take(cursor *c, void *out, uint64_t n, const char *what) {
    if (left(c) < n) return truncated(c, what);
    memcpy(out, c->p, n);
    c->p += n;
    return 0;
}
static int take_string(cursor *c, sl_gguf_str *s, const char *what) {
    int rc = take(c, &s->n, 8, what);
    if (rc) return rc;
    if (s->n > left(c))
        return sl_err_set(c->err, SL_EDATA,
                          "%s: %s at byte %" PRIu64 " claims %" PRIu64 " bytes but only %" PRIu64
                          " are left in the file",
                          c->path, what, (uint64_t)(c->p - c->base), s->n, left(c));
    s->s = (const char *)c->p;
    c->p += s->n;
    return 0;
}

static const uint8_t value_size[] = {
    [SL_GV_U8] = 1,  [SL_GV_I8] = 1,  [SL_GV_U16] = 2,  [SL_GV_I16] = 2, [SL_GV_U32] = 4,
    [SL_GV_I32] = 4, [SL_GV_F32] = 4, [SL_GV_BOOL] = 1, [SL_GV_STR] = 0, [SL_GV_ARR] = 0,
    [SL_GV_U64] = 8, [SL_GV_I64] = 8, [SL_GV_F64] = 8};
#define N_VALUE_TYPES (sizeof value_size)

static int compare_str(sl_gguf_str a, sl_gguf_str b) {
    uint64_t n = a.n < b.n ? a.n : b.n;
    int c = n ? memcmp(a.s, b.s, n) : 0;
    return c ? c : (a.n > b.n) - (a.n < b.n);
}
static int str_len(sl_gguf_str s) {
    return s.n > 200 ? 200 : (int)s.n;
}

static int skip_array(cursor *c, gguf_kv *kv, int depth);

static int skip_elements(cursor *c, gguf_kv *kv, uint32_t type, uint64_t count, int depth) {
    if (type == SL_GV_ARR) {
        for (uint64_t i = 0; i < count; i++) {
            int rc = skip_array(c, NULL, depth + 1);
            if (rc) return rc;
        }
        return 0;
    }
    if (type != SL_GV_STR) {
        if (count > left(c) / value_size[type]) return truncated(c, "an array");
        c->p += count * value_size[type];
        return 0;
    }
    if (count > left(c) / 8) return truncated(c, "an array of strings");
    uint64_t *off = NULL;
    if (kv && count) {
        off = kv->str_off = malloc(count * sizeof *off);
        if (!off)
            return sl_err_set(c->err, SL_ETEMP, "%s: out of memory for an array of %" PRIu64 " strings", c->path,
                              count);
    }
    const uint8_t *at = c->p;
    for (uint64_t i = 0; i < count; i++) {
        sl_gguf_str s = {0};
        if (off) off[i] = (uint64_t)(c->p - at);
        int rc = take_string(c, &s, "a string of an array");
        if (rc) return rc;
    }
    return 0;
}

static int skip_array(cursor *c, gguf_kv *kv, int depth) {
    uint32_t type = 0;
    uint64_t count = 0;
    int rc = take(c, &type, 4, "an array header");
    if (!rc) rc = take(c, &count, 8, "an array header");
    if (rc) return rc;
    if (type >= N_VALUE_TYPES)
        return sl_err_set(c->err, SL_EDATA, "%s: array element type %u is unknown (0..12 exist)", c->path, type);
    if (depth >= MAX_ARRAY_NEST)
        return sl_err_set(c->err, SL_EDATA, "%s: arrays nested deeper than %d", c->path, MAX_ARRAY_NEST);
    /* Nested empty arrays take 12 bytes each, so the count is bounded by the bytes left even there. */
    if (count > left(c)) return truncated(c, "an array");
    if (kv) *kv = (gguf_kv){.key = kv->key, .type = SL_GV_ARR, .elem_type = type, .count = count, .at = c->p};
    return skip_elements(c, kv, type, count, depth);
}

static int parse_kv(cursor *c, gguf_kv *kv) {
    int rc = take_string(c, &kv->key, "a metadata key");
    if (!rc) rc = take(c, &kv->type, 4, "a metadata value type");
    if (rc) return rc;
    if (kv->type >= N_VALUE_TYPES)
        return sl_err_set(c->err, SL_EDATA, "%s: metadata '%.*s' has value type %u, which is unknown (0..12 exist)",
                          c->path, str_len(kv->key), kv->key.s, kv->type);
    if (kv->type == SL_GV_ARR) return skip_array(c, kv, 0);
    if (kv->type == SL_GV_STR) {
        sl_gguf_str s = {0};
        rc = take_string(c, &s, "a metadata string");
        if (rc) return rc;
        kv->at = (const uint8_t *)s.s;
        kv->n = s.n;
        return 0;
    }
    if (left(c) < value_size[kv->type]) return truncated(c, "a metadata value");
    kv->at = c->p;
    c->p += value_size[kv->type];
    return 0;
}

/* Bytes of a tensor from its shape: every product checked against 2^62. */
static int tensor_bytes(cursor *c, sl_gguf_tensor *t) {
    const ggml_type_info *ti = type_info(t->type);
    if (!ti)
        return sl_err_set(c->err, SL_EDATA,
                          "%s: tensor '%.*s' has ggml type %u, whose layout is unknown to this program", c->path,
                          str_len(t->name), t->name.s, t->type);
    uint64_t elems = 1;
    for (uint32_t d = 0; d < 4; d++)
        if (t->ne[d] == 0 || __builtin_mul_overflow(elems, t->ne[d], &elems) || elems > (UINT64_C(1) << 56))
            return sl_err_set(c->err, SL_EDATA,
                              "%s: tensor '%.*s' has an absurd shape [%" PRIu64 ",%" PRIu64 ",%" PRIu64 ",%" PRIu64 "]",
                              c->path, str_len(t->name), t->name.s, t->ne[0], t->ne[1], t->ne[2], t->ne[3]);
    if (t->ne[0] % ti->elems)
        return sl_err_set(c->err, SL_EDATA,
                          "%s: tensor '%.*s' of type %s has rows of %" PRIu64
                          " elements, not a multiple of the block of %u",
                          c->path, str_len(t->name), t->name.s, ti->name, t->ne[0], ti->elems);
    t->bytes = elems / ti->elems * ti->bytes;
    return 0;
}

static int parse_tensor(cursor *c, sl_gguf_tensor *t) {
    int rc = take_string(c, &t->name, "a tensor name");
    if (!rc) rc = take(c, &t->n_dims, 4, "a tensor's dimensions");
    if (rc) return rc;
    if (t->n_dims < 1 || t->n_dims > 4)
        return sl_err_set(c->err, SL_EDATA, "%s: tensor '%.*s' has %u dimensions, expected 1 to 4", c->path,
                          str_len(t->name), t->name.s, t->n_dims);
    for (uint32_t d = 0; d < 4; d++) t->ne[d] = 1;
    rc = take(c, t->ne, 8ull * t->n_dims, "a tensor's shape");
    if (!rc) rc = take(c, &t->type, 4, "a tensor's type");
    if (!rc) rc = take(c, &t->offset, 8, "a tensor's offset");
    if (!rc) rc = tensor_bytes(c, t);
    return rc;
}

static int compare_kv(const void *a, const void *b) {
    return compare_str(((const gguf_kv *)a)->key, ((const gguf_kv *)b)->key);
}
static int compare_offset(const void *a, const void *b) {
    const sl_gguf_tensor *x = *(const sl_gguf_tensor *const *)a, *y = *(const sl_gguf_tensor *const *)b;
    return x->offset != y->offset ? (x->offset > y->offset ? 1 : -1) : (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

/* Offsets become absolute; each tensor must lie inside the file, aligned, and overlap no other. */
static int place_tensors(sl_gguf *g, cursor *c, uint32_t file, uint64_t first, uint64_t count, uint64_t align) {
    uint64_t size = g->file[file].size, at = (uint64_t)(c->p - c->base), data = (at + align - 1) / align * align;
    if (!count) return 0;
    sl_gguf_tensor **order = malloc(count * sizeof(sl_gguf_tensor *));
    if (!order) return sl_err_set(c->err, SL_ETEMP, "%s: out of memory for %" PRIu64 " tensors", c->path, count);
    int rc = 0;
    for (uint64_t i = 0; i < count && !rc; i++) {
        sl_gguf_tensor *t = order[i] = &g->tensor[first + i];
        t->file = file;
        if (t->offset % align)
            rc = sl_err_set(c->err, SL_EDATA,
                            "%s: tensor '%.*s' starts at offset %" PRIu64 ", not a multiple of the alignment %" PRIu64,
                            c->path, str_len(t->name), t->name.s, t->offset, align);
        else if (data > size || t->offset > size - data || t->bytes > size - data - t->offset)
            rc = sl_err_set(c->err, SL_EDATA,
                            "%s: tensor '%.*s' needs %" PRIu64 " bytes at offset %" PRIu64
                            " of the data, but the file has only %" PRIu64
                            " bytes there: it is truncated or damaged, fetch it again",
                            c->path, str_len(t->name), t->name.s, t->bytes, t->offset, size > data ? size - data : 0);
        else
            t->offset += data;
    }
    if (!rc) qsort(order, count, sizeof(sl_gguf_tensor *), compare_offset);
    for (uint64_t i = 1; i < count && !rc; i++)
        if (order[i - 1]->offset + order[i - 1]->bytes > order[i]->offset)
            rc = sl_err_set(c->err, SL_EDATA, "%s: tensors '%.*s' and '%.*s' overlap", c->path,
                            str_len(order[i - 1]->name), order[i - 1]->name.s, str_len(order[i]->name),
                            order[i]->name.s);
    free(order);
    return rc;
}

static void free_kvs(gguf_kv *kv, uint64_t n) {
    for (uint64_t i = 0; kv && i < n; i++) free(kv[i].str_off);
    free(kv);
}

static int parse_header(cursor *c, uint64_t *n_tensors, uint64_t *n_kv) {
    uint32_t magic = 0, version = 0;
    int rc = take(c, &magic, 4, "the header");
    if (rc) return rc;
    if (magic != GGUF_MAGIC)
        return sl_err_set(c->err, SL_ECONFIG,
                          "%s: not a GGUF file (it starts with %02x %02x %02x %02x instead of \"GGUF\")", c->path,
                          c->base[0], c->base[1], c->base[2], c->base[3]);
    rc = take(c, &version, 4, "the header");
    if (rc) return rc;
    if (version != 2 && version != 3)
        return sl_err_set(c->err, SL_ECONFIG, "%s: GGUF version %u%s; versions 2 and 3 (little-endian) are supported",
                          c->path, version, version && !(version & 0xffff) ? " (a big-endian file)" : "");
    rc = take(c, n_tensors, 8, "the header");
    if (!rc) rc = take(c, n_kv, 8, "the header");
    if (rc) return rc;
    if (*n_kv > left(c) / MIN_KV_BYTES || *n_tensors > left(c) / MIN_TENSOR_BYTES || *n_tensors > UINT32_MAX / 2)
        return sl_err_set(c->err, SL_EDATA,
                          "%s: the header claims %" PRIu64 " metadata entries and %" PRIu64 " tensors, which %" PRIu64
                          " bytes cannot hold",
                          c->path, *n_kv, *n_tensors, left(c));
    return 0;
}

static const gguf_kv *find_kv(const gguf_kv *kv, uint64_t n, const char *key) {
    gguf_kv want = {.key = {key, strlen(key)}};
    return n ? bsearch(&want, kv, n, sizeof want, compare_kv) : NULL;
}

static int scalar(uint32_t type, const uint8_t *p, double *out) {
    union {
        uint8_t u8;
        int8_t i8;
        uint16_t u16;
        int16_t i16;
        uint32_t u32;
        int32_t i32;
        float f32;
        uint64_t u64;
        int64_t i64;
        double f64;
    } v = {0};
    if (type >= N_VALUE_TYPES || !value_size[type]) return -1;
    memcpy(&v, p, value_size[type]);
    switch (type) {
    case SL_GV_U8:
        *out = v.u8;
        break;
    case SL_GV_BOOL:
        *out = v.u8 != 0;
        break;
    case SL_GV_I8:
        *out = v.i8;
        break;
    case SL_GV_U16:
        *out = v.u16;
        break;
    case SL_GV_I16:
        *out = v.i16;
        break;
    case SL_GV_U32:
        *out = v.u32;
        break;
    case SL_GV_I32:
        *out = v.i32;
        break;
    case SL_GV_F32:
        *out = v.f32;
        break;
    case SL_GV_U64:
        *out = (double)v.u64;
        break;
    case SL_GV_I64:
        *out = (double)v.i64;
        break;
    default:
        *out = v.f64;
        break;
    }
    return 0;
}

/* Parse one file: metadata into *kv (sorted), tensors appended to g->tensor. */
static int parse_file(sl_gguf *g, uint32_t file, gguf_kv **kv_out, uint64_t *n_kv_out, sl_err *err) {
    const gguf_file *f = &g->file[file];
    cursor c = {f->map, f->map, f->map + f->size, f->path, err};
    uint64_t nt = 0, nk = 0;
    int rc = parse_header(&c, &nt, &nk);
    if (rc) return rc;
    gguf_kv *kv = calloc(nk + 1, sizeof *kv);
    sl_gguf_tensor *tensor = realloc(g->tensor, (g->n_tensors + nt + 1) * sizeof *tensor);
    if (tensor) g->tensor = tensor;
    if (!kv || !tensor) {
        free(kv);
        return sl_err_set(err, SL_ETEMP, "%s: out of memory for its tables", f->path);
    }
    *kv_out = kv;
    *n_kv_out = nk;
    for (uint64_t i = 0; i < nk; i++)
        if ((rc = parse_kv(&c, &kv[i]))) return rc;
    if (file == 0) g->meta_bytes = (uint64_t)(c.p - c.base);
    qsort(kv, nk, sizeof *kv, compare_kv);
    for (uint64_t i = 1; i < nk; i++)
        if (!compare_str(kv[i - 1].key, kv[i].key))
            return sl_err_set(err, SL_EDATA, "%s: metadata '%.*s' appears twice", f->path, str_len(kv[i].key),
                              kv[i].key.s);
    double align = 32;
    const gguf_kv *a = find_kv(kv, nk, "general.alignment");
    /* Asked so that a NaN fails: only what lies in the range may become an integer. */
    if (a && (scalar(a->type, a->at, &align) || !(align >= 1 && align <= (1 << 20)) ||
              align != (double)(uint64_t)align || ((uint64_t)align & ((uint64_t)align - 1))))
        return sl_err_set(err, SL_EDATA, "%s: general.alignment is not a power of two up to 1 MiB", f->path);
    memset(&g->tensor[g->n_tensors], 0, (nt + 1) * sizeof *tensor);
    for (uint64_t i = 0; i < nt; i++)
        if ((rc = parse_tensor(&c, &g->tensor[g->n_tensors + i]))) return rc;
    rc = place_tensors(g, &c, file, g->n_tensors, nt, (uint64_t)align);
    if (!rc) g->n_tensors += nt;
    return rc;
}

static int compare_name(const void *a, const void *b, void *arg) {
    const sl_gguf_tensor *t = arg;
    return compare_str(t[*(const uint32_t *)a].name, t[*(const uint32_t *)b].name);
}

static int index_names(sl_gguf *g, sl_err *err) {
    g->by_name = malloc((g->n_tensors + 1) * sizeof *g->by_name);
    if (!g->by_name)
        return sl_err_set(err, SL_ETEMP, "%s: out of memory for %" PRIu64 " names", g->file[0].path, g->n_tensors);
    for (uint64_t i = 0; i < g->n_tensors; i++) g->by_name[i] = (uint32_t)i;
    qsort_r(g->by_name, g->n_tensors, sizeof *g->by_name, compare_name, g->tensor);
    for (uint64_t i = 1; i < g->n_tensors; i++) {
        sl_gguf_str a = g->tensor[g->by_name[i - 1]].name, b = g->tensor[g->by_name[i]].name;
        if (!compare_str(a, b))
            return sl_err_set(err, SL_EDATA, "%s: tensor '%.*s' appears twice", g->file[0].path, str_len(b), b.s);
    }
    return 0;
}

static int open_file(gguf_file *f, const char *path, sl_err *err) {
    struct stat st;
    f->fd = -1;
    f->path = strdup(path);
    if (!f->path) return sl_err_set(err, SL_ETEMP, "%s: out of memory", path);
    f->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (f->fd < 0) return sl_err_sys(err, sl_file_read_code(errno), errno, "%s: cannot open", path);
    if (fstat(f->fd, &st)) return sl_err_sys(err, SL_ECONFIG, errno, "%s: cannot stat", path);
    if (!S_ISREG(st.st_mode)) return sl_err_set(err, SL_ECONFIG, "%s: not a regular file", path);
    if (st.st_size < 24)
        return sl_err_set(err, SL_EDATA, "%s: %lld bytes are too few for a GGUF file", path, (long long)st.st_size);
    f->size = (uint64_t)st.st_size;
    void *m = mmap(NULL, f->size, PROT_READ, MAP_PRIVATE, f->fd, 0);
    if (m == MAP_FAILED) return sl_err_sys(err, SL_ETEMP, errno, "%s: cannot map %" PRIu64 " bytes", path, f->size);
    f->map = m;
    f->mapped = true;
    return 0;
}

/* "x-00001-of-00004.gguf": sets no and count, returns the length of "x"; 0 when the name is not of that form. */
static size_t split_name(const char *path, unsigned *no, unsigned *count) {
    static const char form[] = "-#####-of-#####.gguf";
    size_t n = strlen(path), len = sizeof form - 1;
    unsigned v[2] = {0, 0};
    if (n <= len) return 0;
    const char *tail = path + n - len;
    for (size_t i = 0; i < len; i++) {
        if (form[i] != '#' && tail[i] != form[i]) return 0;
        if (form[i] == '#' && (tail[i] < '0' || tail[i] > '9')) return 0;
        if (form[i] == '#') v[i > 6] = v[i > 6] * 10 + (unsigned)(tail[i] - '0');
    }
    *no = v[0];
    *count = v[1];
    return n - len;
}

static int open_splits(sl_gguf *g, const char *path, uint64_t count, sl_err *err) {
    unsigned no = 0, of = 0;
    size_t stem = split_name(path, &no, &of);
    if (count > MAX_FILES || !stem || of != count)
        return sl_err_set(err, SL_ECONFIG,
                          "%s: split.count is %" PRIu64 ", but the name is not NAME-00001-of-%05" PRIu64 ".gguf", path,
                          count, count);
    if (no != 1)
        return sl_err_set(err, SL_ECONFIG, "%s: this is part %u of %u; name the first part, %.*s-00001-of-%05u.gguf",
                          path, no, of, (int)stem, path, of);
    gguf_file *file = realloc(g->file, count * sizeof *file);
    char *name = malloc(stem + 32);
    int rc = 0;
    if (file) g->file = file;
    if (!file || !name) {
        sl_err_set(err, SL_ETEMP, "%s: out of memory", path);
        rc = SL_ETEMP;
    }
    for (uint32_t i = 1; i < count && !rc; i++) {
        gguf_kv *kv = NULL;
        uint64_t nk = 0;
        snprintf(name, stem + 32, "%.*s-%05u-of-%05u.gguf", (int)stem, path, i + 1, of);
        g->file[i] = (gguf_file){.fd = -1};
        g->n_files = i + 1;
        rc = open_file(&g->file[i], name, err);
        if (!rc) rc = parse_file(g, i, &kv, &nk, err);
        const gguf_kv *n = rc ? NULL : find_kv(kv, nk, "split.no");
        double v = i;
        if (n && (scalar(n->type, n->at, &v) || v != i))
            rc = sl_err_set(err, SL_EDATA, "%s: says that it is split.no %.0f, expected %u", name, v, i);
        free_kvs(kv, nk);
    }
    free(name);
    return rc;
}

static int finish_open(sl_gguf **out, sl_gguf *g, const char *path, sl_err *err) {
    int rc = parse_file(g, 0, &g->kv, &g->n_kv, err);
    uint64_t splits = 1, want = 0;
    if (!rc && path && !sl_gguf_u64(g, "split.count", &splits) && splits > 1) rc = open_splits(g, path, splits, err);
    if (!rc && splits > 1 && !sl_gguf_u64(g, "split.tensors.count", &want) && want != g->n_tensors)
        rc =
            sl_err_set(err, SL_EDATA,
                       "%s: its %" PRIu64 " parts hold %" PRIu64 " tensors together, split.tensors.count says %" PRIu64,
                       path, splits, g->n_tensors, want);
    if (!rc) rc = index_names(g, err);
    if (rc)
        sl_gguf_close(g);
    else
        *out = g;
    return rc;
}

static sl_gguf *new_gguf(void) {
    sl_gguf *g = calloc(1, sizeof *g);
    if (g) g->file = calloc(1, sizeof *g->file);
    if (g && !g->file) {
        free(g);
        return NULL;
    }
    if (g) {
        g->n_files = 1;
        g->file[0].fd = -1;
    }
    return g;
}

int sl_gguf_open(sl_gguf **out, const char *path, sl_err *err) {
    *out = NULL;
    sl_gguf *g = new_gguf();
    if (!g) return sl_err_set(err, SL_ETEMP, "%s: out of memory", path);
    int rc = open_file(&g->file[0], path, err);
    if (rc) {
        sl_gguf_close(g);
        return rc;
    }
    return finish_open(out, g, path, err);
}

int sl_gguf_open_mem(sl_gguf **out, const void *data, uint64_t n, sl_err *err) {
    *out = NULL;
    sl_gguf *g = new_gguf();
    if (g) g->file[0].path = strdup("(memory)");
    if (!g || !g->file[0].path) {
        sl_gguf_close(g);
        return sl_err_set(err, SL_ETEMP, "out of memory");
    }
    g->file[0].map = data;
    g->file[0].size = n;
    return finish_open(out, g, NULL, err);
}

void sl_gguf_close(sl_gguf *g) {
    if (!g) return;
    for (uint32_t i = 0; i < g->n_files; i++) {
        if (g->file[i].mapped) munmap((void *)g->file[i].map, g->file[i].size);
        if (g->file[i].fd >= 0) close(g->file[i].fd);
        free(g->file[i].path);
    }
    free_kvs(g->kv, g->n_kv);
    free(g->file);
    free(g->tensor);
    free(g->by_name);
    free(g);
}

/* ---- access ---- */

int sl_gguf_num(const sl_gguf *g, const char *key, double *out) {
    const gguf_kv *kv = find_kv(g->kv, g->n_kv, key);
    if (!kv) return -1;
    if (kv->type == SL_GV_ARR) return kv->count ? scalar(kv->elem_type, kv->at, out) : -1;
    return scalar(kv->type, kv->at, out);
}
int sl_gguf_u64(const sl_gguf *g, const char *key, uint64_t *out) {
    double v;
    if (sl_gguf_num(g, key, &v) || !(v >= 0 && v < 9e18) || v != (double)(uint64_t)v) return -1;
    *out = (uint64_t)v;
    return 0;
}
int sl_gguf_string(const sl_gguf *g, const char *key, sl_gguf_str *out) {
    const gguf_kv *kv = find_kv(g->kv, g->n_kv, key);
    if (!kv || kv->type != SL_GV_STR) return -1;
    *out = (sl_gguf_str){(const char *)kv->at, kv->n};
    return 0;
}
uint64_t sl_gguf_arr_len(const sl_gguf *g, const char *key) {
    const gguf_kv *kv = find_kv(g->kv, g->n_kv, key);
    return kv && kv->type == SL_GV_ARR ? kv->count : 0;
}
int sl_gguf_arr_str(const sl_gguf *g, const char *key, uint64_t i, sl_gguf_str *out) {
    const gguf_kv *kv = find_kv(g->kv, g->n_kv, key);
    if (!kv || kv->type != SL_GV_ARR || kv->elem_type != SL_GV_STR || i >= kv->count) return -1;
    const uint8_t *p = kv->at + kv->str_off[i];
    memcpy(&out->n, p, 8);
    out->s = (const char *)p + 8;
    return 0;
}
int sl_gguf_arr_num(const sl_gguf *g, const char *key, uint64_t i, double *out) {
    const gguf_kv *kv = find_kv(g->kv, g->n_kv, key);
    if (!kv || kv->type != SL_GV_ARR || i >= kv->count || !value_size[kv->elem_type]) return -1;
    return scalar(kv->elem_type, kv->at + i * value_size[kv->elem_type], out);
}

uint64_t sl_gguf_n_tensors(const sl_gguf *g) {
    return g->n_tensors;
}
const sl_gguf_tensor *sl_gguf_tensor_at(const sl_gguf *g, uint64_t i) {
    return i < g->n_tensors ? &g->tensor[i] : NULL;
}
const sl_gguf_tensor *sl_gguf_by_name(const sl_gguf *g, uint64_t i) {
    return i < g->n_tensors ? &g->tensor[g->by_name[i]] : NULL;
}
const void *sl_gguf_meta(const sl_gguf *g, uint64_t *n) {
    *n = g->meta_bytes;
    return g->file[0].map;
}
const sl_gguf_tensor *sl_gguf_find(const sl_gguf *g, const char *name) {
    sl_gguf_str want = {name, strlen(name)};
    uint64_t lo = 0, hi = g->n_tensors;
    while (lo < hi) {
        uint64_t mid = lo + (hi - lo) / 2;
        int c = compare_str(g->tensor[g->by_name[mid]].name, want);
        if (!c) return &g->tensor[g->by_name[mid]];
        if (c < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return NULL;
}
int sl_gguf_fd(const sl_gguf *g, uint32_t file) {
    return file < g->n_files ? g->file[file].fd : -1;
}
const void *sl_gguf_data(const sl_gguf *g, const sl_gguf_tensor *t) {
    return g->file[t->file].map + t->offset;
}
const char *sl_gguf_path(const sl_gguf *g, uint32_t file) {
    return file < g->n_files ? g->file[file].path : "";
}
uint32_t sl_gguf_n_files(const sl_gguf *g) {
    return g->n_files;
}
uint64_t sl_gguf_file_bytes(const sl_gguf *g, uint32_t file) {
    return file < g->n_files ? g->file[file].size : 0;
}
