#include "stages/writer/litframe.h"
#include <string.h>

static uint64_t load64(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, 8);
    return v; /* little-endian, as everything in a store */
}

static uint64_t load_le(const uint8_t *p, unsigned n) {
    uint64_t v = 0;
    if (n == 8) return load64(p);
    for (unsigned i = 0; i < n; i++) v |= (uint64_t)p[i] << 8 * i;
    return v;
}

static unsigned high_bit(uint32_t v) { /* of v > 0 */
    return 31u - (unsigned)__builtin_clz(v);
}

/* ---- the frame ---- */

int sl_lit_open(sl_lit *l, const void *src, uint64_t len, uint64_t n) {
    static const uint8_t sizes[4] = {0, 2, 4, 8};
    const uint8_t *p = src;
    l->have_table = l->last = false;
    if (!n || len < 6 || load_le(p, 4) != 0xfd2fb528u) return SL_LIT_OTHER;
    uint8_t d = p[4];
    bool single = d & 0x20;
    unsigned fcs = d >> 6 ? sizes[d >> 6] : single, head = 5u + !single + fcs;
    if (d & 0x0f || !fcs || len < head) return SL_LIT_OTHER; /* reserved bit, checksum, dictionary, no content size */
    if (load_le(p + head - fcs, fcs) + (fcs == 2 ? 256 : 0) != n) return SL_LIT_OTHER;
    uint64_t base = 1ull << (10 + (p[5] >> 3)), window = single ? n : base + base / 8 * (p[5] & 7);
    l->most = window < SL_LIT_BLOCK ? (uint32_t)window : SL_LIT_BLOCK;
    if (window > 1ull << 31) return SL_LIT_OTHER; /* libzstd takes less */
    l->at = p + head;
    l->end = p + len;
    l->left = n;
    return 0;
}

/* ---- bits, read from the end of a stream towards its start ---- */

typedef struct tail {
    const uint8_t *p;
    uint64_t len;
    int64_t bits; /* still to be read; negative: more was read than there is */
} tail;

/* The last byte's highest set bit marks the end. */
static bool tail_open(tail *t, const uint8_t *p, uint64_t len) {
    if (!len || !p[len - 1]) return false;
    *t = (tail){p, len, (int64_t)(8 * len - 8 + high_bit(p[len - 1]))};
    return true;
}

/* The next n <= 11 bits, zeros behind the start; they are not taken. */
static uint32_t tail_peek(const tail *t, unsigned n) {
    int64_t lo = t->bits - (int64_t)n;
    uint64_t from = lo > 0 ? (uint64_t)lo / 8 : 0;
    uint64_t have = t->bits > 0 ? t->len - from : 0;
    uint64_t v = load_le(t->p + from, have < 8 ? (unsigned)have : 8);
    v = lo >= 0 ? v >> (lo - (int64_t)(8 * from)) : lo > -32 ? v << -lo : 0;
    return (uint32_t)v & ((1u << n) - 1);
}

static uint32_t tail_take(tail *t, unsigned n) {
    uint32_t v = n ? tail_peek(t, n) : 0;
    t->bits -= n;
    return v;
}

/* ---- weights of the Huffman tree ---- */

enum { W_MAX = 256, W_LOG = 6, W_KINDS = 13 };

/* Normalized counts of the weights. Returns bytes read, 0 when they are not possible. */
static unsigned read_counts(const uint8_t *p, unsigned len, int16_t counts[W_KINDS], unsigned *log) {
    unsigned at = 4, kinds = 0;
    if (!len) return 0;
    *log = (p[0] & 15u) + 5;
    if (*log > W_LOG) return 0;
    for (int left = 1 << *log; left > 0;) {
        if (kinds == W_KINDS) return 0;
        unsigned n = high_bit((uint32_t)left + 1) + 1, byte = at / 8;
        uint32_t v = byte < len ? (uint32_t)(load_le(p + byte, len - byte < 4 ? len - byte : 4) >> at % 8) : 0;
        uint32_t low = (1u << (n - 1)) - 1, few = (1u << n) - 1 - ((uint32_t)left + 1);
        v &= (1u << n) - 1;
        at += n;
        if ((v & low) < few) {
            v &= low;
            at--;
        } else if (v > low) {
            v -= few;
        }
        int c = (int)v - 1;
        counts[kinds++] = (int16_t)c;
        left -= c < 0 ? 1 : c;
        for (unsigned run = c ? 0 : 3; run == 3;) {
            byte = at / 8;
            run = byte < len ? (unsigned)(load_le(p + byte, len - byte < 2 ? len - byte : 2) >> at % 8) & 3 : 0;
            at += 2;
            if (kinds + run > W_KINDS) return 0;
            for (unsigned i = 0; i < run; i++) counts[kinds++] = 0;
        }
        if (left < 0) return 0;
    }
    while (kinds < W_KINDS) counts[kinds++] = 0;
    unsigned used = (at + 7) / 8;
    return used <= len ? used : 0;
}

typedef struct fse {
    uint8_t sym[1 << W_LOG], bits[1 << W_LOG], base[1 << W_LOG];
} fse;

static bool fse_table(fse *f, const int16_t counts[W_KINDS], unsigned log) {
    unsigned size = 1u << log, high = size, at = 0, step = (size >> 1) + (size >> 3) + 3, next[W_KINDS];
    for (unsigned s = 0; s < W_KINDS; s++) {
        next[s] = counts[s] < 0 ? 1 : (unsigned)counts[s];
        if (counts[s] < 0) f->sym[--high] = (uint8_t)s;
    }
    for (unsigned s = 0; s < W_KINDS; s++)
        for (int i = 0; i < counts[s]; i++) {
            f->sym[at] = (uint8_t)s;
            do at = (at + step) & (size - 1);
            while (at >= high);
        }
    if (at) return false;
    for (unsigned i = 0; i < size; i++) {
        unsigned x = next[f->sym[i]]++;
        f->bits[i] = (uint8_t)(log - high_bit(x));
        f->base[i] = (uint8_t)((x << f->bits[i]) - size);
    }
    return true;
}

/* Weights coded by two states that take turns. Returns how many, 0 when they are not possible. */
static unsigned fse_weights(const uint8_t *p, unsigned len, uint8_t w[W_MAX]) {
    int16_t counts[W_KINDS];
    unsigned log, head = read_counts(p, len, counts, &log), n = 0, s[2];
    fse f;
    tail t;
    if (!head || !fse_table(&f, counts, log) || !tail_open(&t, p + head, len - head)) return 0;
    s[0] = tail_take(&t, log);
    s[1] = tail_take(&t, log);
    if (t.bits < 0) return 0;
    for (unsigned i = 0;; i ^= 1) {
        if (n + 2 > W_MAX - 1) return 0;
        w[n++] = f.sym[s[i]];
        s[i] = f.base[s[i]] + tail_take(&t, f.bits[s[i]]);
        if (t.bits >= 0) continue;
        w[n++] = f.sym[s[i ^ 1]];
        return n;
    }
}

/* ---- tables ---- */

/* A code that is in use: its first index in a table of 2^log entries, its bits and its symbol. In the order of index,
 * which is that of falling length. */
typedef struct code {
    uint16_t start;
    uint8_t bits, sym;
} code;

/* Index i of `multi`: as many whole symbols as its bits hold, at most six. */
static void build_multi_plain(sl_lit *l) {
    unsigned log = l->log, size = 1u << log;
    for (unsigned i = 0; i < size; i++) {
        uint64_t syms = 0;
        unsigned used = 0, n = 0;
        do {
            unsigned e = l->one[(i << used) & (size - 1)], b = e >> 8;
            if (used + b > log) break;
            syms |= (uint64_t)(e & 255) << 8 * n;
            used += b;
        } while (++n < 6);
        l->multi[i] = used | n << 8 | syms << 16;
    }
}

/* The same where no code has one bit, so that six symbols never fit. Let T(r) be the table that r bits index: a code of
 * b bits owns 2^(r-b) entries of it, which are its symbol in front of those of T(r-b). T(0) .. T(log-1) lie in `small`,
 * T(r) from 2^r on. */
static void build_multi(sl_lit *l, const code *c, unsigned n) {
    unsigned log = l->log;
    for (unsigned r = 0, k = n; r <= log; r++) {
        uint64_t *t = r < log ? l->small + (1u << r) : l->multi;
        while (k && c[k - 1].bits <= r) k--; /* codes k .. n-1 fit into r bits */
        unsigned from = k < n ? (unsigned)c[k].start >> (log - r) : 1u << r;
        for (unsigned i = 0; i < from; i++) t[i] = 0;
        for (unsigned j = k; j < n; j++) {
            unsigned m = 1u << (r - c[j].bits);
            const uint64_t *rest = l->small + m;
            uint64_t *to = t + ((unsigned)c[j].start >> (log - r)),
                     add = (uint64_t)c[j].sym << 16 | 1u << 8 | c[j].bits;
            for (unsigned i = 0; i < m; i++) to[i] = (rest[i] >> 16 << 24 | (rest[i] & 0xffff)) + add;
        }
    }
}

/* Longer codes come first, symbols of one length in their order; a weight w takes 2^(w-1) entries. */
static bool build(sl_lit *l, uint8_t w[W_MAX], unsigned n) {
    uint32_t sum = 0, start[W_KINDS + 1] = {0};
    code c[W_MAX];
    unsigned codes = 0;
    for (unsigned i = 0; i < n; i++) {
        if (w[i] > SL_LIT_LOG) return false;
        sum += w[i] ? 1u << (w[i] - 1) : 0;
    }
    if (!sum || sum >= 1u << SL_LIT_LOG) return false;
    l->log = high_bit(sum) + 1;
    uint32_t rest = (1u << l->log) - sum; /* the last symbol's weight is what is left */
    if (rest & (rest - 1)) return false;
    w[n++] = (uint8_t)(high_bit(rest) + 1);
    for (unsigned i = 0; i < n; i++)
        if (w[i]) start[w[i] + 1] += 1u << (w[i] - 1);
    if (start[2] < 2 || start[2] & 1) return false; /* the longest codes come in pairs */
    for (unsigned k = 1; k < W_KINDS; k++) start[k + 1] += start[k];
    for (unsigned i = 0; i < n; i++) {
        if (!w[i]) continue;
        uint16_t e = (uint16_t)(i | (l->log + 1 - w[i]) << 8);
        uint32_t m = 1u << (w[i] - 1);
        for (uint32_t j = 0; j < m; j++) l->one[start[w[i]] + j] = e;
        start[w[i]] += m;
    }
    for (uint32_t i = 0; i < 1u << l->log; codes++) {
        c[codes] = (code){(uint16_t)i, (uint8_t)(l->one[i] >> 8), (uint8_t)l->one[i]};
        i += 1u << (l->log - c[codes].bits);
    }
    if (c[codes - 1].bits > 1)
        build_multi(l, c, codes);
    else
        build_multi_plain(l);
    return true;
}

/* Tree description at p; returns the bytes it takes, 0 when it is not possible. */
static unsigned read_tree(sl_lit *l, const uint8_t *p, uint32_t len) {
    uint8_t w[W_MAX + 1];
    if (!len) return 0;
    unsigned h = p[0], n, used;
    if (h < 128) {
        used = 1 + h;
        n = used <= len ? fse_weights(p + 1, h, w) : 0;
    } else {
        n = h - 127;
        used = 1 + (n + 1) / 2;
        if (used > len) return 0;
        for (unsigned i = 0; i < n; i++) w[i] = i % 2 ? p[1 + i / 2] & 15 : p[1 + i / 2] >> 4;
    }
    l->have_table = n && build(l, w, n);
    return l->have_table ? used : 0;
}

/* ---- streams ---- */

typedef struct stream {
    const uint8_t *start, *ip; /* ip: the eight bytes that `bits` was loaded from */
    uint64_t bits;             /* the next bit is the highest; the lowest set bit counts what was taken */
    uint8_t *op, *end;
    bool live; /* has eight bytes to load from */
} stream;

static bool stream_open(stream *s, const uint8_t *p, uint64_t len, uint8_t *op, uint8_t *end) {
    if (!len || !p[len - 1]) return false;
    *s = (stream){.start = p, .ip = p, .op = op, .end = end, .live = len >= 8};
    if (!s->live) return true;
    s->ip = p + len - 8;
    s->bits = (load64(s->ip) | 1) << (8 - high_bit(p[len - 1]));
    return true;
}

/* Five lookups take at most 55 of the at least 56 bits at hand; each may write eight bytes. */
enum { TURN = 5, TURN_OUT = 6 * TURN + 8 };

static inline __attribute__((always_inline)) uint8_t *lookup(const sl_lit *l, unsigned shift, uint64_t *bits,
                                                             uint8_t *op) {
    uint64_t e = l->multi[*bits >> shift];
    uint64_t syms = e >> 16;
    memcpy(op, &syms, 8);
    *bits <<= e & 63;
    return op + (e >> 8 & 255);
}

static inline __attribute__((always_inline)) void reload(const uint8_t **ip, uint64_t *bits) {
    unsigned took = (unsigned)__builtin_ctzll(*bits);
    *ip -= took >> 3;
    *bits = (load64(*ip) | 1) << (took & 7);
}

static inline bool can_turn(const stream *s) {
    return s->live && s->ip - s->start >= 8 && s->end - s->op >= TURN_OUT;
}

/* The last symbols of a stream, one by one. Everything must come out even. */
static bool finish(const sl_lit *l, stream *s, uint64_t len) {
    tail t;
    if (!tail_open(&t, s->start, len)) return false;
    if (s->live) t.bits = (s->ip - s->start) * 8 + 64 - __builtin_ctzll(s->bits);
    while (s->op < s->end && t.bits > 0) {
        unsigned e = l->one[tail_peek(&t, l->log)];
        *s->op++ = (uint8_t)e;
        t.bits -= e >> 8;
    }
    return s->op == s->end && !t.bits;
}

static bool one_stream(const sl_lit *l, stream *s, uint64_t len) {
    unsigned shift = 64 - l->log;
    while (can_turn(s)) {
        for (int i = 0; i < TURN; i++) s->op = lookup(l, shift, &s->bits, s->op);
        reload(&s->ip, &s->bits);
    }
    return finish(l, s, len);
}

/* Four streams side by side: each waits for its own lookups, so four of them keep the processor busy. */
static inline __attribute__((always_inline)) void four_streams_any(sl_lit *l, stream s[4]) {
    const uint8_t *i0 = s[0].ip, *i1 = s[1].ip, *i2 = s[2].ip, *i3 = s[3].ip;
    uint8_t *o0 = s[0].op, *o1 = s[1].op, *o2 = s[2].op, *o3 = s[3].op;
    uint64_t b0 = s[0].bits, b1 = s[1].bits, b2 = s[2].bits, b3 = s[3].bits;
    unsigned shift = 64 - l->log;
    if (!s[0].live || !s[1].live || !s[2].live || !s[3].live) return;
    for (;;) {
        /* Turns that every stream can take before the ends have to be looked at again. */
        int64_t in = i0 - s[0].start, out = s[0].end - o0, v;
        in = (v = i1 - s[1].start) < in ? v : in;
        in = (v = i2 - s[2].start) < in ? v : in;
        in = (v = i3 - s[3].start) < in ? v : in;
        out = (v = s[1].end - o1) < out ? v : out;
        out = (v = s[2].end - o2) < out ? v : out;
        out = (v = s[3].end - o3) < out ? v : out;
        int64_t turns = in / 8, most = (out - 8) / (6 * TURN);
        if (most < turns) turns = most;
        if (turns <= 0) break;
        for (; turns; turns--) {
            if (l->ahead < l->ahead_end) { /* about as many bytes as a turn yields symbols */
                __builtin_prefetch(l->ahead);
                __builtin_prefetch(l->ahead + 64);
                l->ahead += 128;
            }
            for (int i = 0; i < TURN; i++) {
                o0 = lookup(l, shift, &b0, o0);
                o1 = lookup(l, shift, &b1, o1);
                o2 = lookup(l, shift, &b2, o2);
                o3 = lookup(l, shift, &b3, o3);
            }
            reload(&i0, &b0);
            reload(&i1, &b1);
            reload(&i2, &b2);
            reload(&i3, &b3);
        }
    }
    s[0].ip = i0, s[0].op = o0, s[0].bits = b0;
    s[1].ip = i1, s[1].op = o1, s[1].bits = b1;
    s[2].ip = i2, s[2].op = o2, s[2].bits = b2;
    s[3].ip = i3, s[3].op = o3, s[3].bits = b3;
}

#if defined(__x86_64__)
/* BMI2 shifts by any register and leaves the flags alone: a quarter fewer instructions. */
__attribute__((target("bmi,bmi2"))) static void four_streams_bmi2(sl_lit *l, stream s[4]) {
    four_streams_any(l, s);
}
#endif

static void four_streams(sl_lit *l, stream s[4]) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("bmi2")) {
        four_streams_bmi2(l, s);
        return;
    }
#endif
    four_streams_any(l, s);
}

/* Streams of one block: p[0..len) gives n bytes. */
static bool streams(sl_lit *l, const uint8_t *p, uint32_t len, bool four, uint8_t *dst, uint32_t n) {
    stream s[4];
    if (!four) return stream_open(&s[0], p, len, dst, dst + n) && one_stream(l, &s[0], len);
    uint32_t part = (n + 3) / 4, size[4], at = 6;
    if (n < 6 || len < 6 || 3 * part >= n) return false;
    for (int i = 0; i < 3; i++) size[i] = (uint32_t)load_le(p + 2 * i, 2);
    if (6ull + size[0] + size[1] + size[2] >= len) return false;
    size[3] = len - 6 - size[0] - size[1] - size[2];
    for (uint32_t i = 0; i < 4; at += size[i], i++)
        if (!stream_open(&s[i], p + at, size[i], dst + i * part, i < 3 ? dst + (i + 1) * part : dst + n)) return false;
    four_streams(l, s);
    for (uint32_t i = 0; i < 4; i++)
        if (!one_stream(l, &s[i], size[i])) return false;
    return true;
}

/* ---- blocks ---- */

/* A compressed block: a literals section, then one zero byte, which says that there are no sequences. */
static bool literals(sl_lit *l, const uint8_t *p, uint32_t len, uint8_t *dst, uint32_t *n) {
    if (len < 2 || len >= SL_LIT_BLOCK || p[len - 1]) return false;
    unsigned kind = p[0] & 3, form = p[0] >> 2 & 3, head;
    len--;
    if (kind < 2) { /* raw or RLE */
        head = form == 1 ? 2 : form == 3 ? 3 : 1;
        if (len < head) return false;
        *n = (uint32_t)load_le(p, head) >> (head == 1 ? 3 : 4);
        if (*n > SL_LIT_BLOCK || len - head != (kind ? 1 : *n)) return false;
        if (kind)
            memset(dst, p[head], *n);
        else
            memcpy(dst, p + head, *n);
        return true;
    }
    unsigned bits = form == 3 ? 18 : form == 2 ? 14 : 10;
    head = form == 3 ? 5 : form == 2 ? 4 : 3;
    if (len < head) return false;
    uint64_t h = load_le(p, head) >> 4;
    *n = (uint32_t)(h & ((1u << bits) - 1));
    uint32_t size = (uint32_t)(h >> bits);
    if (!*n || *n > SL_LIT_BLOCK || len - head != size) return false;
    p += head;
    unsigned tree = kind == 2 ? read_tree(l, p, size) : 0;
    if (kind == 2 ? !tree : !l->have_table) return false;
    return streams(l, p + tree, size - tree, form > 0, dst, *n);
}

int sl_lit_next(sl_lit *l, uint8_t *dst, uint32_t *n) {
    *n = 0;
    if (l->last) return l->left || l->at != l->end ? SL_LIT_OTHER : 0;
    if (l->end - l->at < 3) return SL_LIT_OTHER;
    uint32_t h = (uint32_t)load_le(l->at, 3), kind = h >> 1 & 3, size = h >> 3, in = kind == 1 ? 1 : size;
    l->last = h & 1;
    l->at += 3;
    /* A compressed block, too, has no more bytes than a block may yield (RFC 8878, 3.1.1.2.4). */
    if (kind == 3 || size > (kind == 2 ? l->most : SL_LIT_BLOCK) || (uint64_t)(l->end - l->at) < in)
        return SL_LIT_OTHER;
    if (kind == 0) memcpy(dst, l->at, *n = size);
    if (kind == 1) memset(dst, l->at[0], *n = size);
    if (kind == 2 && !literals(l, l->at, in, dst, n)) return SL_LIT_OTHER;
    l->at += in;
    if (*n > l->left || *n > l->most) return SL_LIT_OTHER;
    l->left -= *n;
    /* Nothing in a block reads as the end of the frame: so it must be. */
    return !*n && !(!kind && l->last && !l->left && l->at == l->end) ? SL_LIT_OTHER : 0;
}
