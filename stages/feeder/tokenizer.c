#include "stages/feeder/tokenizer.h"
#include "ipc/file.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>
#include "stages/feeder/tokenizer_internal.h"
#include "stages/feeder/unicode.h"

#define MAX_TEXT (1u << 30)
#define MAX_FILE (1ull << 30)
static const char MARK[] = "\xe2\x96\x81"; /* U+2581, which stands for a space in SentencePiece vocabularies */
#define MARK_N 3

struct sl_tok_scratch {
    sl_bpe_scratch *bpe;
    sl_pretok_scratch *pretok;
    sl_regex_scratch *rs;
    sl_rewrite w[SL_TOK_MAX_NORM];
};

sl_tok_scratch *sl_tok_scratch_new(void) {
    sl_tok_scratch *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->bpe = sl_bpe_scratch_new();
    s->pretok = sl_pretok_scratch_new();
    s->rs = sl_regex_scratch_new();
    if (s->bpe && s->pretok && s->rs) return s;
    sl_tok_scratch_free(s);
    return NULL;
}

void sl_tok_scratch_free(sl_tok_scratch *s) {
    if (!s) return;
    sl_bpe_scratch_free(s->bpe);
    sl_pretok_scratch_free(s->pretok);
    sl_regex_scratch_free(s->rs);
    for (int i = 0; i < SL_TOK_MAX_NORM; i++) sl_rewrite_free(&s->w[i]);
    free(s);
}

uint64_t sl_tok_scratch_work(const sl_tok_scratch *s) {
    return sl_bpe_scratch_work(s->bpe);
}

/* --- loading --- */
sl_tokenizer *sl_tokenizer_alloc(void) {
    sl_tokenizer *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    t->pretok = sl_pretok_new();
    t->added = sl_added_new();
    sl_unicode_init();
    if (t->pretok && t->added) return t;
    sl_tokenizer_free(t);
    return NULL;
}

void sl_tokenizer_free(sl_tokenizer *t) {
    if (!t) return;
    sl_bpe_free(t->bpe);
    sl_pretok_free(t->pretok);
    sl_added_free(t->added);
    free(t->added_of);
    free(t->not_before);
    for (int i = 0; i < t->n_norm; i++) sl_norm_step_free(&t->norm[i]);
    free(t);
}

/* The alphabet: printable Latin-1 stands for itself, the other 68 bytes, in order, for U+0100 onwards. */
int sl_bytelevel_byte(uint32_t cp) {
    if ((cp >= 33 && cp <= 126) || (cp >= 161 && cp <= 172) || (cp >= 174 && cp <= 255)) return (int)cp;
    if (cp < 0x100 || cp > 0x143) return -1;
    uint32_t k = cp - 0x100; /* 0..32, 127..160, 173 */
    return (int)(k < 33 ? k : k < 67 ? k - 33 + 127 : 173);
}

long sl_bytelevel_decode(const char *s, size_t n, char *out) {
    size_t o = 0;
    for (size_t i = 0; i < n;) {
        unsigned len;
        int b = sl_bytelevel_byte(sl_utf8_decode((const uint8_t *)s + i, &len));
        if (b < 0) return -1;
        out[o++] = (char)b;
        i += len;
    }
    return (long)o;
}

static char *copy_of(const char *s, size_t n) {
    char *p = malloc(n + 1);
    if (!p) return NULL;
    if (n) memcpy(p, s, n);
    p[n] = 0;
    return p;
}

int sl_tokenizer_add_norm(sl_tokenizer *t, sl_norm_kind kind, const char *find, size_t nf, bool literal,
                          const char *with, size_t nw, sl_err *err) {
    if (t->n_norm == SL_TOK_MAX_NORM)
        return sl_err_set(err, SL_ECONFIG, "normalizer: more than %d steps", SL_TOK_MAX_NORM);
    sl_norm_step *s = &t->norm[t->n_norm];
    *s = (sl_norm_step){.kind = kind};
    if (kind == SL_NORM_REPLACE && !literal) {
        int rc = sl_regex_new(&s->re, find, nf, false, err);
        if (rc) return sl_err_wrap(err, "normalizer"), rc;
    }
    t->n_norm++; /* counted from here on, so that freeing the tokenizer frees it */
    if (literal && find && !(s->find = copy_of(find, nf))) return sl_err_set(err, SL_ETEMP, "out of memory");
    if (with && !(s->with = copy_of(with, nw))) return sl_err_set(err, SL_ETEMP, "out of memory");
    s->find_n = nf;
    s->with_n = nw;
    return 0;
}

/* Through all normalizers; the result lives in the scratch (or is s itself). *map: the last rewrite, NULL when nothing
 * changed. */
static int normalize(const sl_tokenizer *t, sl_tok_scratch *sc, const char **s, size_t *n, bool want_map,
                     const sl_rewrite **map, sl_err *err) {
    *map = NULL;
    for (int i = 0; i < t->n_norm; i++) {
        int rc = sl_norm_apply(&t->norm[i], sc->rs, *s, *n, want_map, &sc->w[i], err);
        if (rc < 0) return rc;
        if (!rc) continue;
        sc->w[i].under = *map;
        *map = &sc->w[i];
        *s = sc->w[i].s ? sc->w[i].s : "";
        *n = sc->w[i].n;
    }
    return 0;
}

int sl_tokenizer_add_added(sl_tokenizer *t, const sl_added_token *tok, sl_err *err) {
    if (tok->id < 0 || tok->id >= SL_BPE_MAX_IDS)
        return sl_err_set(err, SL_ECONFIG, "added token '%s': id %d is out of range", tok->s, tok->id);
    if (sl_unicode_check((const uint8_t *)tok->s, tok->n) != tok->n)
        return sl_err_set(err, SL_ECONFIG, "added token %d is not UTF-8", tok->id);
    if (!tok->normalized || !t->n_norm) return sl_added_put(t->added, tok, tok->s, tok->n, err);
    sl_tok_scratch *sc = sl_tok_scratch_new();
    if (!sc) return sl_err_set(err, SL_ETEMP, "out of memory loading added tokens");
    const char *s = tok->s;
    size_t n = tok->n;
    const sl_rewrite *map;
    int rc = normalize(t, sc, &s, &n, false, &map, err);
    if (!rc) rc = sl_added_put(t->added, tok, s, n, err);
    sl_tok_scratch_free(sc);
    return rc;
}

int sl_tokenizer_find_cuts(sl_tokenizer *t, sl_err *err) {
    if (sl_bpe_find(t->bpe, MARK, MARK_N) < 0) return 0; /* an unknown mark might fuse with its neighbour */
    if (!(t->not_before = calloc(1, 0x110000 / 8))) return sl_err_set(err, SL_ETEMP, "out of memory");
    for (int32_t id = 0; id < sl_bpe_size(t->bpe); id++) {
        size_t n, at = 0;
        const char *s = sl_bpe_piece(t->bpe, id, &n), *hit;
        if (!s || sl_unicode_check((const uint8_t *)s, n) != n) continue;
        for (; (hit = n > at ? memmem(s + at, n - at, MARK, MARK_N) : NULL); at = (size_t)(hit - s) + 1) {
            if (hit == s) continue;
            const char *p = hit - 1;
            while (((uint8_t)*p & 0xc0) == 0x80) p--;
            uint32_t cp = sl_utf8_decode((const uint8_t *)p, &(unsigned){0});
            t->not_before[cp >> 3] |= (uint8_t)(1u << (cp & 7));
        }
    }
    return 0;
}

int sl_tokenizer_seal(sl_tokenizer *t, sl_err *err) {
    t->vocab = sl_bpe_size(t->bpe);
    for (size_t i = 0; i < sl_added_count(t->added); i++)
        if (sl_added_at(t->added, i)->id >= t->vocab) t->vocab = sl_added_at(t->added, i)->id + 1;
    if (!(t->added_of = calloc((size_t)t->vocab, sizeof *t->added_of)))
        return sl_err_set(err, SL_ETEMP, "out of memory");
    for (size_t i = 0; i < sl_added_count(t->added); i++)
        t->added_of[sl_added_at(t->added, i)->id] = sl_added_at(t->added, i);
    return 0;
}

/* Whole file into memory. 1: read; 0: there is none; negative: failed. */
static int slurp(const char *path, char **out, size_t *n, sl_err *err) {
    struct stat st;
    *out = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 && (errno == ENOENT || errno == ENOTDIR)) return 0;
    if (fd < 0) return sl_err_sys(err, sl_file_read_code(errno), errno, "opening %s", path);
    if (fstat(fd, &st) || !S_ISREG(st.st_mode) || (unsigned long long)st.st_size > MAX_FILE) {
        close(fd);
        return sl_err_set(err, SL_ECONFIG, "%s is not a file of at most 1 GiB", path);
    }
    char *p = malloc((size_t)st.st_size + 1);
    size_t got = 0;
    while (p && got < (size_t)st.st_size) {
        ssize_t k = read(fd, p + got, (size_t)st.st_size - got);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) break;
        got += (size_t)k;
    }
    close(fd);
    if (!p || got != (size_t)st.st_size) {
        free(p);
        return p ? sl_err_set(err, SL_ECONFIG, "%s: only %zu of %lld bytes could be read", path, got,
                              (long long)st.st_size)
                 : sl_err_set(err, SL_ETEMP, "out of memory reading %s", path);
    }
    p[got] = 0;
    *out = p;
    *n = got;
    return 1;
}

static void set_hash(sl_tokenizer *t, const char *a, size_t na, const char *b, size_t nb) {
    XXH3_state_t *x = XXH3_createState();
    if (!x) return;
    XXH3_128bits_reset(x);
    XXH3_128bits_update(x, a, na);
    if (b) XXH3_128bits_update(x, b, nb);
    XXH128_hash_t h = XXH3_128bits_digest(x);
    XXH3_freeState(x);
    static const char hex[] = "0123456789abcdef";
    for (int i = 0; i < 16; i++) {
        t->hash[i] = hex[h.high64 >> (60 - 4 * i) & 15];
        t->hash[16 + i] = hex[h.low64 >> (60 - 4 * i) & 15];
    }
    t->salt = h.low64 | 1; /* a fresh cache has 0 */
}

typedef struct source {
    char json[4096], model[4096], config[4096]; /* paths */
    bool gguf, is_json, is_tiktoken;
} source;

static bool ends_with(const char *s, const char *tail) {
    size_t n = strlen(s), k = strlen(tail);
    return n >= k && !strcmp(s + n - k, tail);
}

static int locate(source *s, const char *path, sl_err *err) {
    struct stat st;
    if (strlen(path) > 3900) return sl_err_set(err, SL_ECONFIG, "path of the tokenizer is too long");
    if (stat(path, &st)) return sl_err_sys(err, sl_file_read_code(errno), errno, "no tokenizer at %s", path);
    const char *slash = strrchr(path, '/');
    int dir = (int)(slash ? slash - path + 1 : 0);
    if (S_ISDIR(st.st_mode)) {
        snprintf(s->json, sizeof s->json, "%s/tokenizer.json", path);
        snprintf(s->model, sizeof s->model, "%s/tiktoken.model", path);
        snprintf(s->config, sizeof s->config, "%s/tokenizer_config.json", path);
        if (!stat(s->json, &st))
            s->is_json = true;
        else if (!stat(s->model, &st))
            s->is_tiktoken = true;
        else
            return sl_err_set(err, SL_ECONFIG, "%s has neither tokenizer.json nor tiktoken.model", path);
        return 0;
    }
    snprintf(s->json, sizeof s->json, "%s", path);
    snprintf(s->model, sizeof s->model, "%s", path);
    snprintf(s->config, sizeof s->config, "%.*stokenizer_config.json", dir, path);
    s->is_json = ends_with(path, ".json");
    s->is_tiktoken = ends_with(path, "tiktoken.model");
    s->gguf = ends_with(path, ".gguf");
    if (!s->is_json && !s->is_tiktoken && !s->gguf)
        return sl_err_set(err, SL_ECONFIG, "%s is none of tokenizer.json, tiktoken.model, *.gguf", path);
    return 0;
}

static int load_files(sl_tokenizer *t, const source *s, sl_err *err) {
    char *a = NULL, *c = NULL;
    size_t na = 0, nc = 0;
    const char *main_file = s->is_json ? s->json : s->model;
    int rc = slurp(main_file, &a, &na, err);
    if (rc == 0) rc = sl_err_set(err, SL_ECONFIG, "%s is gone", main_file);
    if (rc > 0) rc = slurp(s->config, &c, &nc, err);
    if (rc >= 0) {
        set_hash(t, a, na, c, nc);
        if (s->is_json)
            rc = sl_tokenizer_from_json(t, a, na, err);
        else if (!c)
            rc = sl_err_set(err, SL_ECONFIG, "tokenizer_config.json with the special tokens is missing");
        else
            rc = sl_tokenizer_from_tiktoken(t, a, na, c, nc, err);
        if (rc) sl_err_wrap(err, "%s", main_file);
        if (!rc && s->is_json && c && (rc = sl_tokenizer_apply_config(t, c, nc, err)))
            sl_err_wrap(err, "%s", s->config);
    }
    free(a);
    free(c);
    return rc;
}

int sl_tokenizer_load(sl_tokenizer **out, const char *path, sl_err *err) {
    source s = {0};
    *out = NULL;
    int rc = locate(&s, path, err);
    if (rc) return rc;
    sl_tokenizer *t = sl_tokenizer_alloc();
    if (!t) return sl_err_set(err, SL_ETEMP, "out of memory loading %s", path);
    if (s.gguf) {
        rc = sl_tokenizer_from_gguf(t, path, err);
        if (rc) sl_err_wrap(err, "%s", path);
    } else
        rc = load_files(t, &s, err);
    if (rc)
        sl_tokenizer_free(t);
    else
        *out = t;
    return rc;
}

/* --- encoding --- */
typedef struct enc {
    const sl_tokenizer *t;
    sl_tok_scratch *s;
    sl_ids *out;
    uint32_t base;         /* of the segment in the text */
    uint32_t sub;          /* of the stretch in the normalized segment */
    const sl_rewrite *map; /* of the segment's normalization */
    size_t cur_norm[SL_TOK_MAX_NORM], cur_pre[4];
} enc;

static int reserve(sl_ids *o, size_t more, sl_err *err) {
    if (o->n + more <= o->cap && (!o->want_off || o->off)) return 0;
    size_t cap = (o->n + more) + (o->n + more) / 2 + 64;
    int32_t *p = realloc(o->ids, cap * sizeof *p);
    if (p) o->ids = p;
    uint32_t *q = o->want_off ? realloc(o->off, cap * sizeof *q) : NULL;
    if (q) o->off = q;
    if (!p || (o->want_off && !q)) return sl_err_set(err, SL_ETEMP, "out of memory for %zu token ids", cap);
    o->cap = cap;
    return 0;
}

static int put_id(sl_ids *o, int32_t id, uint32_t off, sl_err *err) {
    if (reserve(o, 1, err)) return SL_ETEMP;
    o->ids[o->n] = id;
    if (o->want_off) o->off[o->n] = off;
    o->n++;
    return 0;
}

static uint32_t to_original(enc *e, const sl_rewrite *pre, uint32_t x) {
    int i = 0;
    for (const sl_rewrite *w = pre; w; w = w->under) x = sl_rewrite_map(w, &e->cur_pre[i++], x);
    x += e->sub;
    i = 0;
    for (const sl_rewrite *w = e->map; w; w = w->under) x = sl_rewrite_map(w, &e->cur_norm[i++], x);
    return x + e->base;
}

static int put_piece(enc *e, const char *s, size_t n, size_t at, const sl_rewrite *map, sl_err *err) {
    sl_bpe_out r;
    sl_ids *o = e->out;
    int rc = sl_bpe_encode(e->t->bpe, e->s->bpe, s, n, o->want_off, &r, err);
    if (rc || reserve(o, r.n, err)) return rc ? rc : SL_ETEMP;
    for (size_t i = 0; i < r.n; i++) o->ids[o->n + i] = r.ids[i];
    if (o->want_off)
        for (size_t i = 0; i < r.n; i++) o->off[o->n + i] = to_original(e, map, (uint32_t)at + r.off[i]);
    o->n += r.n;
    return 0;
}

/* A long piece of a SentencePiece-like vocabulary is a whole text; cut it before marks that no token reaches across.
 * Merging is unaffected, and words become short enough to be cached. */
static int on_piece(void *ctx, const char *s, size_t n, size_t at, const sl_rewrite *map, sl_err *err) {
    enc *e = ctx;
    const uint8_t *nb = e->t->not_before;
    if (!nb) return put_piece(e, s, n, at, map, err);
    size_t done = 0, from = 1;
    while (from < n) {
        const char *hit = memmem(s + from, n - from, MARK, MARK_N);
        if (!hit) break;
        const char *p = hit - 1;
        while (((uint8_t)*p & 0xc0) == 0x80) p--;
        uint32_t cp = sl_utf8_decode((const uint8_t *)p, &(unsigned){0});
        size_t k = (size_t)(hit - s);
        if (!(nb[cp >> 3] >> (cp & 7) & 1)) {
            int rc = put_piece(e, s + done, k - done, at + done, map, err);
            if (rc) return rc;
            done = k;
        }
        from = k + MARK_N;
    }
    return put_piece(e, s + done, n - done, at + done, map, err);
}

static int put_text(enc *e, const char *s, size_t n, uint32_t sub, sl_err *err) {
    e->sub = sub;
    memset(e->cur_pre, 0, sizeof e->cur_pre);
    return sl_pretok_run(e->t->pretok, e->s->pretok, s, n, e->base == 0 && sub == 0, e->out->want_off, on_piece, e,
                         err);
}

/* A stretch without tokens of the first set: normalize, cut out tokens of the second set, encode the rest. */
static int put_segment(enc *e, const char *s, size_t n, uint32_t base, bool parse_special, sl_err *err) {
    if (!n) return 0;
    int rc = normalize(e->t, e->s, &s, &n, e->out->want_off, &e->map, err);
    if (rc) return rc;
    e->base = base;
    memset(e->cur_norm, 0, sizeof e->cur_norm);
    sl_added_scan scan = {0};
    sl_added_hit hit;
    size_t done = 0;
    while (sl_added_next(e->t->added, true, s, n, parse_special, &scan, &hit)) {
        if (hit.a > done && (rc = put_text(e, s + done, hit.a - done, (uint32_t)done, err))) return rc;
        e->sub = 0;
        if (put_id(e->out, hit.t->id, e->out->want_off ? to_original(e, NULL, (uint32_t)hit.a) : 0, err))
            return SL_ETEMP;
        done = hit.b;
    }
    return done < n ? put_text(e, s + done, n - done, (uint32_t)done, err) : 0;
}

static int put_range(enc *e, const char *text, size_t a, size_t b, bool parse_special, sl_err *err) {
    const char *s = text + a;
    size_t n = b - a, done = 0;
    sl_added_scan scan = {0};
    sl_added_hit hit;
    int rc;
    while (sl_added_next(e->t->added, false, s, n, parse_special, &scan, &hit)) {
        if (hit.a > done && (rc = put_segment(e, s + done, hit.a - done, (uint32_t)(a + done), parse_special, err)))
            return rc;
        if (put_id(e->out, hit.t->id, (uint32_t)(a + hit.a), err)) return SL_ETEMP;
        done = hit.b;
    }
    return put_segment(e, s + done, n - done, (uint32_t)(a + done), parse_special, err);
}

/* Python's str.isspace: White_Space, and the four separators U+001C to U+001F. */
static bool python_space(const uint8_t *p, unsigned *len) {
    uint32_t cp = sl_utf8_decode(p, len);
    return sl_unicode_class(cp) & SL_UC_SPACE || (cp >= 0x1c && cp <= 0x1f);
}

#define CHUNK_CHARS 400000
#define RUN_CHARS   25000
/* The wrapper around tiktoken cuts texts every 400,000 characters, and inside those after 25,000 in a row that are all
 * white space or all not; it only shows in pathological texts, but ids must agree there too. */
static int put_chunks(enc *e, const char *text, size_t n, bool parse_special, sl_err *err) {
    const uint8_t *p = (const uint8_t *)text;
    size_t start = 0, chars = 0, run = 0;
    bool space = false;
    int rc = 0;
    for (size_t i = 0; i < n && !rc;) {
        unsigned len;
        bool now = python_space(p + i, &len);
        if (chars == CHUNK_CHARS) {
            rc = put_range(e, text, start, i, parse_special, err);
            start = i;
            chars = 0;
        }
        if (chars == 0) {
            space = now;
            run = 0;
        }
        if (now != space) {
            run = 1;
            space = now;
        } else if (++run > RUN_CHARS) {
            rc = rc ? rc : put_range(e, text, start, i, parse_special, err);
            start = i;
            run = 1;
        }
        chars++;
        i += len;
    }
    return rc ? rc : put_range(e, text, start, n, parse_special, err);
}

int sl_tokenizer_encode(const sl_tokenizer *t, sl_tok_scratch *s, const char *text, size_t n, bool add_special,
                        bool parse_special, sl_ids *out, sl_err *err) {
    const size_t had = out->n;
    if (n > MAX_TEXT) return sl_err_set(err, SL_EDATA, "a text of %zu bytes; at most 1 GiB is supported", n);
    size_t bad = sl_unicode_check((const uint8_t *)text, n);
    if (bad != n) return sl_err_set(err, SL_EDATA, "text is not UTF-8 at byte %zu (0x%02x)", bad, (uint8_t)text[bad]);
    enc e = {.t = t, .s = s, .out = out};
    int rc = reserve(out, n / 4 + 8, err);
    for (int i = 0; add_special && i < t->n_before && !rc; i++) rc = put_id(out, t->before[i], 0, err);
    if (!rc && n)
        rc = t->chunked ? put_chunks(&e, text, n, parse_special, err) : put_range(&e, text, 0, n, parse_special, err);
    for (int i = 0; add_special && i < t->n_after && !rc; i++) rc = put_id(out, t->after[i], (uint32_t)n, err);
    if (rc) out->n = had;
    return rc;
}

/* --- facts --- */
const char *sl_tokenizer_piece(const sl_tokenizer *t, int32_t id, size_t *len) {
    if (id < 0 || id >= t->vocab) return NULL;
    const sl_added_token *a = t->added_of[id];
    if (!a) return sl_bpe_piece(t->bpe, id, len);
    *len = a->n;
    return a->s;
}

int32_t sl_tokenizer_special(const sl_tokenizer *t, const char *written) {
    const sl_added_token *a = sl_added_named(t->added, written);
    return a ? a->id : -1;
}

int32_t sl_tokenizer_vocab(const sl_tokenizer *t) {
    return t->vocab;
}
const char *sl_tokenizer_hash(const sl_tokenizer *t) {
    return t->hash;
}
const char *sl_tokenizer_kind(const sl_tokenizer *t) {
    return t->kind;
}
bool sl_tokenizer_exact(const sl_tokenizer *t) {
    return t->n_norm == 0;
}
