#include "stages/compute/spec.h"
#include "stages/compute/families.h"
#include "stages/compute/safetensors.h"
#include "ipc/boot.h" /* sl_expert_split */

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#define MAX_CONFIG (16u << 20)

int sl_spec_is_gguf(const char *model) {
    size_t n = strlen(model);
    char magic[4] = {0};
    struct stat st;
    if (n > 5 && !strcasecmp(model + n - 5, ".gguf")) return 1;
    if (stat(model, &st) || !S_ISREG(st.st_mode)) return 0;
    int fd = open(model, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t r = read(fd, magic, 4);
    close(fd);
    return r == 4 && !memcmp(magic, "GGUF", 4);
}

/* MODEL/config.json, read whole. */
static char *read_config(const char *model, char *path, size_t cap, size_t *n, sl_err *err) {
    struct stat st;
    snprintf(path, cap, "%s/config.json", model);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        int e = errno;
        if (!stat(model, &st) && !S_ISDIR(st.st_mode))
            sl_err_set(err, SL_ECONFIG, "%s: neither a model folder nor a GGUF file", model);
        else
            sl_err_sys(err, SL_ECONFIG, e, "%s: cannot open", path);
        return NULL;
    }
    char *buf = NULL;
    if (fstat(fd, &st) || !S_ISREG(st.st_mode) || st.st_size > (off_t)MAX_CONFIG)
        sl_err_set(err, SL_ECONFIG, "%s: not a regular file of at most 16 MiB", path);
    else if (!(buf = malloc((size_t)st.st_size + 1)))
        sl_err_set(err, SL_ETEMP, "%s: out of memory", path);
    size_t at = 0;
    while (buf && at < (size_t)st.st_size) {
        ssize_t r = read(fd, buf + at, (size_t)st.st_size - at);
        if (r < 0 && errno == EINTR) continue;
        if (r <= 0) break;
        at += (size_t)r;
    }
    close(fd);
    *n = at;
    return buf;
}

int sl_spec_parse_config(sl_spec *s, const char *json, size_t n, const char *name, double eps_lora, sl_err *err) {
    return sl_families_config(s, json, n, name, eps_lora, err);
}

int sl_spec_load(sl_spec *s, const char *model, double eps_lora, sl_err *err) {
    memset(s, 0, sizeof *s);
    if (sl_spec_is_gguf(model)) {
        sl_gguf *g;
        int rc = sl_gguf_open(&g, model, err);
        if (rc) return rc;
        rc = sl_families_gguf(s, g, eps_lora, err);
        sl_gguf_close(g);
        return rc;
    }
    sl_err local = {0};
    if (!err) err = &local;
    char path[4096];
    size_t n;
    char *json = read_config(model, path, sizeof path, &n, err);
    if (!json) return err->code;
    int rc = sl_families_config(s, json, n, path, eps_lora, err);
    free(json);
    return rc;
}

void sl_spec_free(sl_spec *s) {
    if (!s) return;
    free(s->rope_divide);
    s->rope_divide = NULL;
    s->rope[0].divide = s->rope[1].divide = NULL;
}

/* ---- tensor-parallel widths ---- */

static int has_kind(const sl_spec *s, sl_mlp_kind k) {
    for (int32_t i = 0; i < s->n_layers; i++)
        if (s->layer[i].mlp == k) return 1;
    return 0;
}
static int cuts(int64_t n, int tp, int block) {
    return n % tp == 0 && (n / tp) % (block > 0 ? block : 1) == 0;
}

/* NULL when `tp` works, else what is in the way. */
static const char *obstacle(const sl_spec *s, int split, int tp, char *why, size_t cap) {
    int64_t dv = s->attn == SL_ATTN_MLA ? s->v_dim : s->head_dim;
    if (tp == 1) return NULL;
    if (tp < 1)
        snprintf(why, cap, "a width is at least 1");
    else if (s->heads % tp)
        snprintf(why, cap, "%d attention heads do not divide by %d", s->heads, tp);
    else if (s->attn == SL_ATTN_GQA && s->kv_heads % tp && tp % s->kv_heads)
        snprintf(why, cap, "%d key/value heads neither divide by %d nor are copied evenly to %d ranks", s->kv_heads, tp,
                 tp);
    else if (!cuts(s->heads * dv, tp, s->k_block_attn))
        snprintf(why, cap,
                 "the attention output's %" PRId64 " columns cannot be cut in %d slices of whole blocks of %d",
                 s->heads * dv, tp, s->k_block_attn);
    else if (has_kind(s, SL_MLP_DENSE) && !cuts(s->inter, tp, s->k_block_mlp))
        snprintf(why, cap, "the MLP's %d columns cannot be cut in %d slices of whole blocks of %d", s->inter, tp,
                 s->k_block_mlp);
    else if (s->shared_inter && !cuts(s->shared_inter, tp, s->from_gguf ? s->k_block_mlp : 1))
        snprintf(why, cap, "the shared expert's %d columns cannot be cut in %d slices of whole blocks", s->shared_inter,
                 tp);
    else if (has_kind(s, SL_MLP_MOE) && split == SL_EXPERTS_EP && s->experts % tp)
        snprintf(why, cap, "%d experts do not divide by %d", s->experts, tp);
    else if (has_kind(s, SL_MLP_MOE) && (split == SL_EXPERTS_TP || s->experts % tp) && split != SL_EXPERTS_EP &&
             !cuts(s->moe_inter, tp, s->k_block_moe))
        snprintf(why, cap, "%s%d columns of each expert cannot be cut in %d slices of whole blocks of %d",
                 split == SL_EXPERTS_TP ? "the " : "the experts do not divide, and the ", s->moe_inter, tp,
                 s->k_block_moe);
    else
        return NULL;
    return why;
}

int sl_spec_widths(const sl_spec *s, int split, int max, int *out) {
    char why[256];
    int n = 0;
    for (int tp = 1; tp <= max; tp++)
        if (!obstacle(s, split, tp, why, sizeof why)) out[n++] = tp;
    return n;
}

int sl_spec_check_tp(const sl_spec *s, int split, int tp, sl_err *err) {
    char why[256], list[256] = "";
    if (!obstacle(s, split, tp, why, sizeof why)) return 0;
    int width[SL_MAX_RANKS], n = sl_spec_widths(s, split, SL_MAX_RANKS, width);
    size_t at = 0;
    for (int i = 0; i < n && at < sizeof list; i++)
        at += (size_t)snprintf(list + at, sizeof list - at, "%s%d", i ? ", " : "", width[i]);
    return sl_err_set(err, SL_ECONFIG, "this model cannot run %d ranks wide: %s; widths that work: %s", tp, why, list);
}

/* ---- --layers ---- */

static const char *const presets[] = {"eagle3", "speculators-0.3", "dflash", "all"};

static int preset(const char *text, int n, int64_t *v) { /* number of values, -1 when it is no preset */
    if (!strcmp(text, presets[0])) {
        int64_t x[] = {2, n / 2, n - 3, n};
        memcpy(v, x, sizeof x);
        return 4;
    }
    if (!strcmp(text, presets[1])) {
        int64_t x[] = {3, n / 2 + 1, n - 2, n};
        memcpy(v, x, sizeof x);
        return 4;
    }
    if (!strcmp(text, presets[2])) {
        for (int i = 0; i < 5; i++) v[i] = 1 + (int64_t)floor(1 + i * (n - 4) / 4.0 + 0.5);
        v[5] = n;
        return 6;
    }
    if (!strcmp(text, presets[3])) {
        for (int i = 0; i <= n; i++) v[i] = i;
        return n + 1;
    }
    return -1;
}

static const char *digits(const char *p, int64_t *v) { /* 1..6 digits */
    int len = 0;
    for (*v = 0; isdigit((unsigned char)*p) && len < 6; p++, len++) *v = *v * 10 + (*p - '0');
    return len && !isdigit((unsigned char)*p) ? p : NULL;
}
/* INT | n | n-K | n/K | n/K+J | n/K-J */
static int expression(const char *p, const char *end, int n, int64_t *out) {
    int64_t x;
    if (*p != 'n') return (p = digits(p, out)) && p == end ? 0 : -1;
    *out = n;
    p++;
    if (p < end && *p == '/') {
        if (!(p = digits(p + 1, &x)) || x == 0) return -1;
        *out /= x;
    }
    if (p < end && (*p == '-' || *p == '+')) {
        int minus = *p == '-';
        if (!(p = digits(p + 1, &x))) return -1;
        *out += minus ? -x : x;
    }
    return p == end ? 0 : -1;
}

static int compare_i64(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

int sl_spec_layers(const char *text, int n_layers, uint32_t *hidx, int max, sl_err *err) {
    int64_t v[2 * SL_MAX_LAYERS];
    if (n_layers < 1 || n_layers > SL_MAX_LAYERS)
        return sl_err_set(err, SL_EUSAGE, "layers of a model with %d layers", n_layers);
    int n = preset(text, n_layers, v);
    if (n < 0) {
        n = 0;
        for (const char *p = text;;) {
            while (*p == ' ') p++;
            const char *end = p + strcspn(p, ","), *tail = end;
            while (tail > p && tail[-1] == ' ') tail--;
            if (n == 2 * SL_MAX_LAYERS)
                return sl_err_set(err, SL_EUSAGE, "layers: more than %d entries", 2 * SL_MAX_LAYERS);
            if (expression(p, tail, n_layers, &v[n]))
                return sl_err_set(err, SL_EUSAGE,
                                  "layers '%.100s': '%.*s' is not understood; use numbers 0..%d, n, n-K, n/K, n/K+J, "
                                  "or one of eagle3, speculators-0.3, dflash, all",
                                  text, tail - p > 60 ? 60 : (int)(tail - p), p, n_layers);
            n++;
            if (!*end) break;
            p = end + 1;
        }
    }
    for (int i = 0; i < n; i++)
        if (v[i] < 0 || v[i] > n_layers)
            return sl_err_set(err, SL_EUSAGE,
                              "layers '%.100s': H[%" PRId64
                              "] does not exist; this model has %d layers, so states H[0]..H[%d]",
                              text, v[i], n_layers, n_layers);
    qsort(v, (size_t)n, sizeof *v, compare_i64);
    int m = 0;
    for (int i = 0; i < n; i++) {
        if (i && v[i] == v[i - 1]) continue;
        if (m == max) return sl_err_set(err, SL_EUSAGE, "layers '%.100s': more than %d states", text, max);
        hidx[m++] = (uint32_t)v[i];
    }
    return m;
}

/* ---- fingerprint ---- */

static void hash_st(XXH3_state_t *x, const sl_st *st) {
    char line[256];
    for (uint64_t i = 0; i < sl_st_n_tensors(st); i++) {
        const sl_st_tensor *t = sl_st_at(st, i);
        XXH3_128bits_update(x, t->name, strlen(t->name) + 1);
        int n = snprintf(line, sizeof line, "%s %" PRIu64, sl_st_dtype_name(t->dtype), t->bytes);
        for (uint32_t d = 0; d < t->n_dims; d++)
            n += snprintf(line + n, sizeof line - (size_t)n, " %" PRIu64, t->shape[d]);
        XXH3_128bits_update(x, line, (size_t)n + 1);
    }
}
static void hash_gguf(XXH3_state_t *x, const sl_gguf *g) {
    char line[160];
    for (uint64_t i = 0; i < sl_gguf_n_tensors(g); i++) {
        const sl_gguf_tensor *t = sl_gguf_by_name(g, i);
        XXH3_128bits_update(x, t->name.s, t->name.n);
        int n = snprintf(line, sizeof line, " %u %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64, t->type,
                         t->bytes, t->ne[0], t->ne[1], t->ne[2], t->ne[3]);
        XXH3_128bits_update(x, line, (size_t)n + 1);
    }
}

int sl_spec_fingerprint(const char *model, char out[80], sl_err *err) {
    sl_err local = {0};
    if (!err) err = &local;
    XXH128_hash_t config = {0, 0}, table;
    XXH3_state_t *x = XXH3_createState();
    if (!x) return sl_err_set(err, SL_ETEMP, "out of memory");
    XXH3_128bits_reset(x);
    int rc = 0;
    if (sl_spec_is_gguf(model)) {
        sl_gguf *g;
        uint64_t n;
        if (!(rc = sl_gguf_open(&g, model, err))) {
            const void *meta = sl_gguf_meta(g, &n);
            config = XXH3_128bits(meta, n);
            hash_gguf(x, g);
            sl_gguf_close(g);
        }
    } else {
        char path[4096];
        size_t n;
        char *json = read_config(model, path, sizeof path, &n, err);
        if (!json)
            rc = err->code;
        else {
            config = XXH3_128bits(json, n);
            free(json);
            sl_st *st;
            /* A folder without weights (random ones will be made) has an empty table. */
            snprintf(path, sizeof path, "%s/model.safetensors", model);
            int any = !access(path, F_OK);
            snprintf(path, sizeof path, "%s/model.safetensors.index.json", model);
            any |= !access(path, F_OK);
            if (any && !(rc = sl_st_open(&st, model, err))) {
                hash_st(x, st);
                sl_st_close(st);
            }
        }
    }
    table = XXH3_128bits_digest(x);
    XXH3_freeState(x);
    if (!rc)
        snprintf(out, 80, "%016" PRIx64 "%016" PRIx64 "%016" PRIx64 "%016" PRIx64, (uint64_t)config.high64,
                 (uint64_t)config.low64, (uint64_t)table.high64, (uint64_t)table.low64);
    return rc;
}
