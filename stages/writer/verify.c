#include "stages/writer/verify.h"
#include "stages/writer/reader.h"
#include "stages/writer/workers.h"
#include "stages/writer/xxh3.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct look {
    const char *store;
    const sl_verify_opts *o;
    sl_verify_report *rep;
    sl_reader *r;
    const sl_accepted *in;
    uint8_t *state; /* per accepted row: 0 pending, 1 committed, 2 rejected */
    uint64_t n_state;
    char **expect; /* sorted paths that should exist below hidden_states/ and quarantine/ */
    uint8_t *seen;
    uint64_t n_expect, cap_expect;
} look;

static void say(uint64_t *n, char **list, const char *fmt, va_list ap) {
    char text[SL_ERR_MAX];
    vsnprintf(text, sizeof text, fmt, ap);
    if (*n < SL_VERIFY_KEEP) list[*n] = strdup(text);
    ++*n;
}

__attribute__((format(printf, 2, 3))) static void fault(look *l, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    say(&l->rep->n_faults, l->rep->faults, fmt, ap);
    va_end(ap);
}

__attribute__((format(printf, 2, 3))) static void note(look *l, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    say(&l->rep->n_notes, l->rep->notes, fmt, ap);
    va_end(ap);
}

void sl_verify_free(sl_verify_report *rep) {
    for (int i = 0; i < SL_VERIFY_KEEP; i++) {
        free(rep->faults[i]);
        free(rep->notes[i]);
        rep->faults[i] = rep->notes[i] = NULL;
    }
}

/* ---- logs ---- */

static void check_record(look *l, const sl_commit_rec *c, int what) {
    const sl_accepted_row *a = sl_accepted_at(l->in, c->seq);
    const char *name = sl_accepted_name(l->in, c->dataset);
    if (!a || !name) {
        fault(l,
              "commit.log: row %" PRIu64 " (seq %" PRIu64
              ") is %s but intake.log does not have it (it ends at seq %" PRIu64 "): intake.log lost its end",
              c->row, c->seq, what == 1 ? "committed" : "rejected", sl_accepted_rows(l->in));
        return;
    }
    sl_key k = sl_row_key(name, c->row, a->part);
    if (a->row != c->row || a->dataset != c->dataset || a->T != c->T || a->mask_sum != c->mask_sum ||
        memcmp(&k, &c->key, sizeof k) || memcmp(&k, &a->key, sizeof k))
        fault(l,
              "commit.log: seq %" PRIu64 " is row %" PRIu64
              " of data set %u with %u tokens, intake.log says row %" PRIu64 " of %u with %u tokens",
              c->seq, c->row, c->dataset, c->T, a->row, a->dataset, a->T);
    if (what == 1 ? c->verdict != SL_V_OK : c->verdict == SL_V_OK || c->verdict >= SL_V_N)
        fault(l, "commit.log: row %" PRIu64 " of '%s' (seq %" PRIu64 ") is %s with verdict %u", c->row, name, c->seq,
              what == 1 ? "committed" : "rejected", c->verdict);
    if (l->state[c->seq])
        fault(l, "commit.log: row %" PRIu64 " of '%s' (seq %" PRIu64 ") has two records", c->row, name, c->seq);
    l->state[c->seq] = (uint8_t)what;
}

static int check_logs(look *l, sl_err *err) {
    const sl_manifest *m = sl_reader_manifest(l->r);
    l->n_state = sl_accepted_rows(l->in);
    l->state = calloc(l->n_state + 1, 1);
    if (!l->state) return sl_err_set(err, SL_ETEMP, "no memory for %" PRIu64 " rows", l->n_state);
    sl_store_stats st = {0};
    for (uint64_t i = 0; i < sl_reader_rows(l->r); i++) {
        sl_store_stats_add(&st, sl_reader_row(l->r, i));
        check_record(l, sl_reader_row(l->r, i), 1);
    }
    for (uint64_t i = 0; i < sl_reader_rejects(l->r); i++) {
        sl_store_stats_add(&st, sl_reader_reject(l->r, i));
        check_record(l, sl_reader_reject(l->r, i), 2);
    }
    for (uint64_t i = 0; i < l->n_state; i++) l->rep->pending += !l->state[i];
    l->rep->rows = st.rows;
    l->rep->rejected = st.rejected;
    l->rep->refused = sl_accepted_rejected(l->in);
    l->rep->tokens = st.tokens;
    l->rep->raw_bytes = st.raw_bytes;
    l->rep->stored_bytes = st.stored_bytes;
    l->rep->complete = m->complete;
    if (l->rep->pending) note(l, "%" PRIu64 " accepted rows are pending: run again to compute them", l->rep->pending);
    if (m->complete && (m->stats.rows != st.rows || m->stats.rejected != st.rejected || m->stats.tokens != st.tokens ||
                        m->stats.supervised != st.supervised || m->stats.raw_bytes != st.raw_bytes ||
                        m->stats.stored_bytes != st.stored_bytes))
        fault(l,
              "manifest.json counts %" PRIu64 " rows, %" PRIu64 " rejected, %" PRIu64 " tokens, %" PRIu64
              " bytes; commit.log has %" PRIu64 ", %" PRIu64 ", %" PRIu64 ", %" PRIu64
              ": a log lost records, or the manifest is another's",
              m->stats.rows, m->stats.rejected, m->stats.tokens, m->stats.stored_bytes, st.rows, st.rejected, st.tokens,
              st.stored_bytes);
    return 0;
}

typedef struct dat {
    look *l;
    sl_src s;
    uint64_t at; /* end of the bytes that were looked at */
    uint8_t *buf;
    uint64_t cap;
} dat;

/* Bytes of one record, and the padding in front of them. */
static int check_dat_record(void *arg, const void *rec, sl_err *err) {
    dat *d = arg;
    const sl_intake_rec *r = rec;
    sl_err e;
    if (r->kind != SL_IN_ROW && r->kind != SL_IN_DATASET) return 0;
    if (r->data_off >= d->at && r->data_off - d->at < 8 && sl_zeros(&d->s, d->at, r->data_off, &e))
        fault(d->l, "%s", e.msg);
    d->at = r->data_off + r->data_len;
    if (!r->data_sum) return 0; /* written before there were sums */
    if (r->data_len > d->s.len) {
        fault(d->l, "%s: row %" PRIu64 " (seq %" PRIu64 ") has %" PRIu64 " bytes in a file of %" PRIu64, d->s.name,
              r->row, r->seq, r->data_len, d->s.len);
        return 0;
    }
    if (r->data_len > d->cap) {
        free(d->buf);
        d->cap = r->data_len;
        if (!(d->buf = malloc(d->cap))) return sl_err_set(err, SL_ETEMP, "no memory for %" PRIu64 " bytes", d->cap);
    }
    if (sl_src_read(&d->s, r->data_off, d->buf, r->data_len, &e))
        fault(d->l, "%s", e.msg);
    else if (XXH3_64bits(d->buf, r->data_len) != r->data_sum)
        fault(d->l, "%s: the bytes of %s %" PRIu64 " do not match their checksum", d->s.name,
              r->kind == SL_IN_ROW ? "the row with seq" : "data set",
              r->kind == SL_IN_ROW ? r->seq : (uint64_t)r->dataset);
    return 0;
}

/* Every byte that intake.log points at. */
static int check_dat(look *l, sl_err *err) {
    char log[SL_PATH_MAX + 16], path[SL_PATH_MAX + 16];
    struct stat st;
    uint64_t from = 0;
    snprintf(log, sizeof log, "%s/intake.log", l->store);
    snprintf(path, sizeof path, "%s/intake.dat", l->store);
    dat d = {.l = l, .s = {.fd = open(path, O_RDONLY | O_CLOEXEC), .name = path}};
    if (d.s.fd < 0 || fstat(d.s.fd, &st)) {
        if (l->n_state) fault(l, "%s: %s", path, strerror(errno));
        if (d.s.fd >= 0) close(d.s.fd);
        return 0;
    }
    d.s.len = (uint64_t)st.st_size;
    int rc = sl_journal_follow(log, SL_INTAKE_MAGIC, &from, check_dat_record, &d, err);
    if (rc == SL_EDATA) rc = 0; /* a fault already */
    sl_err e;
    if (d.at < d.s.len && d.s.len - d.at < 8 && sl_zeros(&d.s, d.at, d.s.len, &e)) fault(l, "%s", e.msg);
    free(d.buf);
    close(d.s.fd);
    return rc;
}

/* ---- files of their own ---- */

static int expect(look *l, const char *path, sl_err *err) {
    if (l->n_expect == l->cap_expect) {
        uint64_t cap = l->cap_expect ? l->cap_expect * 2 : 256;
        char **p = realloc(l->expect, cap * sizeof *p);
        if (!p) return sl_err_set(err, SL_ETEMP, "no memory for %" PRIu64 " paths", cap);
        l->expect = p;
        l->cap_expect = cap;
    }
    l->expect[l->n_expect] = strdup(path);
    return l->expect[l->n_expect++] ? 0 : sl_err_set(err, SL_ETEMP, "no memory");
}

static int by_text(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* hs_<row>[.<part>].safetensors of a row that is only pending: left by a crash between rename and commit, written
 * again. */
static bool is_pending(const look *l, const char *rel) {
    char name[64], sub[160], path[300];
    for (uint64_t i = 0; i < l->n_state; i++) {
        const sl_accepted_row *a = sl_accepted_at(l->in, i);
        const char *ds = sl_accepted_name(l->in, a->dataset);
        if (l->state[i] || !ds) continue;
        sl_store_row_name(name, sizeof name, a->row, a->part);
        sl_store_dataset_dir(sub, sizeof sub, a->dataset, ds);
        snprintf(path, sizeof path, "%s%s%s", sub, *sub ? "/" : "", name);
        const char *tail = strchr(rel, '/') + 1;
        size_t n = strlen(path);
        if (!strncmp(tail, path, n) && (!strcmp(tail + n, ".safetensors") || !strcmp(tail + n, ".json"))) return true;
    }
    return false;
}

static void walk_dir(look *l, const char *rel, int depth) {
    char path[SL_PATH_MAX + 400], sub[400];
    snprintf(path, sizeof path, "%s/%s", l->store, rel);
    DIR *d = opendir(path);
    if (!d) {
        if (errno != ENOENT) fault(l, "%s: %s", path, strerror(errno));
        return;
    }
    for (struct dirent *e; (e = readdir(d));) {
        struct stat st;
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        if (snprintf(sub, sizeof sub, "%s/%s", rel, e->d_name) >= (int)sizeof sub ||
            fstatat(dirfd(d), e->d_name, &st, AT_SYMLINK_NOFOLLOW)) {
            fault(l, "%s/%s: cannot be looked at", path, e->d_name);
            continue;
        }
        if (S_ISDIR(st.st_mode) && depth < 1) {
            walk_dir(l, sub, depth + 1);
            continue;
        }
        l->rep->files++;
        const char *key = sub;
        char **hit = l->n_expect ? bsearch(&key, l->expect, l->n_expect, sizeof *l->expect, by_text) : NULL;
        if (hit)
            l->seen[hit - l->expect] = 1;
        else if (is_pending(l, sub))
            note(l, "%s/%s: of a pending row, not committed; it is written again by the next run", l->store, sub);
        else if (!strncmp(rel, "quarantine", 10)) /* is in nobody's way: what salvage could not place any more */
            note(l, "%s/%s: no rejected row has this file", l->store, sub);
        else
            fault(l, "%s/%s: no committed row has this file", l->store, sub);
    }
    closedir(d);
}

/* What is in quarantine is what was put there. */
static void check_quarantine(look *l) {
    for (uint64_t i = 0; i < sl_reader_rejects(l->r); i++) {
        const sl_commit_rec *c = sl_reader_reject(l->r, i);
        const char *name = sl_reader_dataset(l->r, c);
        uint64_t sum;
        sl_err e;
        if (!c->file_sum) continue;
        if (sl_store_quarantine_sum(l->store, c->dataset, name, c->row, sl_reader_part(l->r, c), &sum, &e))
            fault(l, "row %" PRIu64 " of '%s', rejected: %s", c->row, name, e.msg);
        else if (sum != c->file_sum)
            fault(l, "row %" PRIu64 " of '%s', rejected: its files in quarantine do not match their checksum", c->row,
                  name);
    }
}

static int check_trees(look *l, sl_err *err) {
    char path[SL_PATH_MAX + 400], sub[160], name[64];
    int rc = 0;
    bool files = sl_reader_manifest(l->r)->layout == SL_LAYOUT_FILES;
    for (uint64_t i = 0; files && !rc && i < sl_reader_rows(l->r); i++) {
        sl_reader_path(l->r, sl_reader_row(l->r, i), path, sizeof path);
        rc = expect(l, path + strlen(l->store) + 1, err);
    }
    for (uint64_t i = 0; !rc && i < sl_reader_rejects(l->r); i++) {
        const sl_commit_rec *c = sl_reader_reject(l->r, i);
        sl_store_dataset_dir(sub, sizeof sub, c->dataset, sl_reader_dataset(l->r, c));
        sl_store_row_name(name, sizeof name, c->row, sl_reader_part(l->r, c));
        for (int j = 0; !rc && j < 2; j++) {
            snprintf(path, sizeof path, "quarantine/%s%s%s%s", sub, *sub ? "/" : "", name,
                     j ? ".json" : ".safetensors");
            rc = expect(l, path, err);
        }
    }
    if (rc) return rc;
    if (l->n_expect) qsort(l->expect, l->n_expect, sizeof *l->expect, by_text);
    l->seen = calloc(l->n_expect + 1, 1);
    if (!l->seen) return sl_err_set(err, SL_ETEMP, "no memory");
    walk_dir(l, "hidden_states", 0);
    walk_dir(l, "quarantine", 0);
    for (uint64_t i = 0; i < l->n_expect; i++)
        if (!l->seen[i]) fault(l, "%s/%s is missing", l->store, l->expect[i]);
    if (l->o->deep) check_quarantine(l);
    return 0;
}

/* ---- shards ---- */

typedef struct place {
    uint64_t off, len;
    const sl_commit_rec *c;
} place;

static int by_off(const void *a, const void *b) {
    const place *x = a, *y = b;
    return x->off < y->off ? -1 : x->off > y->off;
}

/* Bytes between committed rows: padding to the next boundary and nothing else. */
static void check_gap(look *l, const sl_src *s, const sl_shard_head *h, uint64_t from, uint64_t to) {
    sl_err e;
    sl_frame_head f;
    if (to < from) {
        fault(l, "%s: two rows share the bytes %" PRIu64 "..%" PRIu64, s->name, to, from);
        return;
    }
    uint64_t bound = (from + SL_SHARD_ALIGN - 1) / SL_SHARD_ALIGN * SL_SHARD_ALIGN;
    if (to != from && to != bound) {
        int rc = sl_frame_open(s, h, from, &f, &e);
        if (rc == 1) rc = sl_frame_open(s, h, bound, &f, &e);
        if (rc == 1 && !sl_zeros(s, from, to, NULL)) return; /* cleared by salvage */
        if (!rc && f.kind == SL_FR_META)
            fault(l,
                  "%s: row %" PRIu64 " (seq %" PRIu64 ") is in the shard at %" PRIu64
                  " but not in commit.log: 'sluice salvage' rebuilds the log",
                  s->name, f.row, f.seq, f.off);
        else
            fault(l, "%s: bytes %" PRIu64 "..%" PRIu64 " belong to no committed row", s->name, from, to);
        return;
    }
    if (l->o->deep && sl_zeros(s, from, to, &e)) fault(l, "%s", e.msg);
}

static uint32_t bits_of(float x) { /* a NaN is the same as itself */
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static void check_index(look *l, const sl_src *s, const sl_shard_head *h, const place *p, uint64_t n, uint64_t at) {
    sl_err e;
    sl_index_entry *ix;
    uint64_t n_ix;
    sl_shard_foot ft;
    if (sl_shard_index(s, h, &ix, &n_ix, &e) || sl_src_read(s, s->len - sizeof ft, &ft, sizeof ft, &e)) {
        fault(l, "%s", e.msg);
        return;
    }
    for (uint64_t i = 0, j = 0; i < n_ix || j < n;) { /* both in the order of offsets */
        if (i < n_ix && j < n && ix[i].off == p[j].off) {
            const sl_commit_rec *c = p[j].c;
            if (ix[i].seq != c->seq || ix[i].row != c->row || ix[i].dataset != c->dataset || ix[i].T != c->T ||
                ix[i].len != c->len || ix[i].states_sum != c->states_sum || ix[i].raw_bytes != c->raw_bytes ||
                ix[i].mask_sum != c->mask_sum || bits_of(ix[i].nll) != bits_of(c->nll) ||
                memcmp(ix[i].key, c->key.w, sizeof ix[i].key))
                fault(l, "%s: the index and commit.log differ about row %" PRIu64, s->name, c->row);
            i++, j++;
        } else if (j == n || (i < n_ix && ix[i].off < p[j].off)) {
            fault(l,
                  "%s: row %" PRIu64 " (seq %" PRIu64
                  ") is in the index but not in commit.log: 'sluice salvage' rebuilds the log",
                  s->name, ix[i].row, ix[i].seq);
            i++;
        } else {
            fault(l, "%s: row %" PRIu64 " is in commit.log but not in the index", s->name, p[j].c->row);
            j++;
        }
    }
    free(ix);
    check_gap(l, s, h, at, ft.index_off);
    uint64_t span = sl_frame_span(n_ix * sizeof(sl_index_entry));
    if (ft.index_off + span + sizeof ft != s->len)
        fault(l, "%s: the footer is not behind the index", s->name);
    else if (l->o->deep && sl_frame_padding(s, ft.index_off, n_ix * sizeof(sl_index_entry), &e))
        fault(l, "%s", e.msg);
}

/* Rows behind the last committed one of an open shard. */
static void check_tail(look *l, const sl_src *s, const sl_shard_head *h, uint64_t at) {
    sl_frame_head f;
    uint64_t bound = (at + SL_SHARD_ALIGN - 1) / SL_SHARD_ALIGN * SL_SHARD_ALIGN;
    if (sl_frame_open(s, h, at, &f, NULL) && sl_frame_open(s, h, bound, &f, NULL)) return;
    if (f.kind != SL_FR_META) return;
    if (sl_accepted_at(l->in, f.seq) && l->state[f.seq])
        fault(l, "%s: row %" PRIu64 " is at %" PRIu64 " too, behind the last committed row", s->name, f.row, f.off);
    else
        note(l,
             "%s: uncommitted bytes from %" PRIu64 " on (row %" PRIu64 " begins there); the next run writes them again",
             s->name, f.off, f.row);
}

/* The header names the same states as the manifest: salvage makes one from the other. */
static void check_set(look *l, const char *path, const sl_shard_head *h) {
    const sl_capture_set *m = &sl_reader_manifest(l->r)->set;
    sl_capture_set s;
    sl_shard_set(h, &s);
    bool same = s.n == m->n && s.width == m->width && s.elem_size == m->elem_size && s.n_layers == m->n_layers;
    for (uint32_t k = 0; same && k < s.n; k++)
        same = s.v[k].hidx == m->v[k].hidx && h->states[k].final_norm == m->v[k].final_norm;
    if (!same) fault(l, "%s: the header names other states than the manifest", path);
}

static void check_shard(look *l, const char *file, uint32_t no, int open_, const place *p, uint64_t n) {
    char path[SL_PATH_MAX + 400];
    struct stat st;
    sl_err e;
    snprintf(path, sizeof path, "%s/shards/%s", l->store, file);
    sl_src s = {.fd = open(path, O_RDONLY | O_CLOEXEC), .name = path};
    sl_shard_head *h = malloc(sizeof *h);
    l->rep->files++;
    if (!h || s.fd < 0 || fstat(s.fd, &st)) {
        fault(l, "%s: %s", path, strerror(errno));
        goto out;
    }
    s.len = (uint64_t)st.st_size;
    if (open_ && !n && s.len < sizeof *h) goto out; /* begun, nothing committed in it */
    if (sl_shard_open(&s, h, &e)) {
        if (open_ && !n)
            note(l, "%s: begun, nothing is committed in it", path);
        else
            fault(l, "%s", e.msg);
        goto out;
    }
    if (h->shard != no || strcmp(h->model, sl_reader_manifest(l->r)->set.model))
        fault(l, "%s: the header says shard %u of model %s", path, h->shard, h->model);
    check_set(l, path, h);
    uint64_t at = sizeof *h;
    for (uint64_t i = 0; i < n; i++) {
        check_gap(l, &s, h, at, p[i].off);
        at = p[i].off + p[i].len;
    }
    if (at > s.len)
        fault(l, "%s has %" PRIu64 " bytes, rows up to byte %" PRIu64 " are committed in it", path, s.len, at);
    else if (open_)
        check_tail(l, &s, h, at);
    else
        check_index(l, &s, h, p, n, at);
out:
    if (s.fd >= 0) close(s.fd);
    free(h);
}

static int by_shard(const void *a, const void *b) {
    const place *x = a, *y = b;
    return x->c->shard != y->c->shard ? (x->c->shard < y->c->shard ? -1 : 1) : by_off(a, b);
}

static int check_shards(look *l, sl_err *err) {
    char path[SL_PATH_MAX + 16];
    uint64_t n = sl_reader_rows(l->r), used = 0;
    place *p = calloc(n + 1, sizeof *p);
    if (!p) return sl_err_set(err, SL_ETEMP, "no memory for %" PRIu64 " rows", n);
    for (uint64_t i = 0; i < n; i++) {
        const sl_commit_rec *c = sl_reader_row(l->r, i);
        p[i] = (place){c->off, c->len, c};
    }
    if (n) qsort(p, n, sizeof *p, by_shard);
    snprintf(path, sizeof path, "%s/shards", l->store);
    DIR *d = opendir(path);
    for (struct dirent *e; d && (e = readdir(d));) {
        uint32_t no;
        int open_;
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        if (!sl_store_shard_parse(e->d_name, &no, &open_)) {
            fault(l, "%s/%s: not a shard's name", path, e->d_name);
            continue;
        }
        uint64_t a = 0, b;
        while (a < n && p[a].c->shard < no) a++;
        for (b = a; b < n && p[b].c->shard == no; b++) {}
        check_shard(l, e->d_name, no, open_, p + a, b - a);
        used += b - a;
        for (uint64_t i = a; i < b; i++) p[i].len = 0; /* looked at */
    }
    if (d) closedir(d);
    for (uint64_t i = 0; used < n && i < n; i++)
        if (p[i].len && (!i || p[i - 1].c->shard != p[i].c->shard))
            fault(l, "shard %u is missing: row %" PRIu64 " and others are committed in it", p[i].c->shard, p[i].c->row);
    free(p);
    return 0;
}

/* ---- rows ---- */

/* Structure and place: the header of the file, or META and END of the row. */
static void check_structure(look *l, uint64_t i) {
    const sl_commit_rec *c = sl_reader_row(l->r, i);
    uint8_t one[16];
    sl_err e;
    if (c->T && sl_reader_state(l->r, i, 0, 0, 0, one, &e))
        fault(l, "row %" PRIu64 " of '%s': %s", c->row, sl_reader_dataset(l->r, c), e.msg);
}

/* Some blocks of a row, checked by a worker; reported in the order of rows by the thread that called. */
typedef struct part {
    sl_job j;
    struct deep *d;
    uint64_t row;
    uint32_t b0, b1, blocks; /* of how many */
    uint64_t *sums, bad;     /* [b1 - b0] */
    int rc;
    sl_err err;
} part;

typedef struct deep {
    look *l;
    sl_reader **reader; /* one a worker */
    unsigned n;         /* workers; 0: the caller does it */
    sl_workers *pool;
    part *parts; /* queue: parts [out, in) */
    uint64_t cap, in, out;
    uint64_t *sums, n_sums; /* of the row being put together */
    uint64_t bad;
    bool faulty;
} deep;

enum {
    PART_BYTES = 32 << 20, /* a longer row is cut, so that it keeps more than one thread busy */
    PARTS_A_THREAD = 4,
    SMALL_STORE = 64 << 20, /* below it threads cost more than they save */
    MIN_THREADS = 8         /* each has one read in flight, and the device wants several */
};

static void run_part(sl_job *j, unsigned worker) {
    part *p = (part *)j;
    p->rc = sl_reader_check(p->d->reader[worker], p->row, p->b0, p->b1, p->sums, &p->bad, &p->err);
}

/* What came out of the oldest part. */
static int report_part(deep *d, sl_err *err) {
    look *l = d->l;
    part *p = &d->parts[d->out++ % d->cap];
    const sl_commit_rec *c = sl_reader_row(l->r, p->row);
    const char *ds = sl_reader_dataset(l->r, c);
    if (d->pool) sl_workers_wait(d->pool, &p->j);
    if (!p->b0) d->bad = 0, d->faulty = false;
    if (p->rc == SL_ETEMP) return sl_err_set(err, SL_ETEMP, "%s", p->err.msg);
    if (p->rc && !d->faulty) fault(l, "row %" PRIu64 " of '%s': %s", c->row, ds, p->err.msg);
    d->faulty |= p->rc != 0;
    d->bad += p->bad;
    if (p->blocks > d->n_sums) {
        uint64_t *s = realloc(d->sums, p->blocks * sizeof *s);
        if (!s) return sl_err_set(err, SL_ETEMP, "no memory");
        d->sums = s;
        d->n_sums = p->blocks;
    }
    memcpy(d->sums + p->b0, p->sums, (p->b1 - p->b0) * sizeof *p->sums);
    free(p->sums);
    p->sums = NULL;
    if (p->b1 < p->blocks || d->faulty) return 0;
    uint64_t sum = XXH3_64bits(d->sums, 8ull * p->blocks);
    if (sum != c->states_sum)
        fault(l, "row %" PRIu64 " of '%s': the states have checksum %016" PRIx64 ", commit.log says %016" PRIx64,
              c->row, ds, sum, c->states_sum);
    if (d->bad) fault(l, "row %" PRIu64 " of '%s': %" PRIu64 " elements are NaN or infinite", c->row, ds, d->bad);
    return 0;
}

static int put_part(deep *d, uint64_t row, uint32_t b0, uint32_t b1, uint32_t blocks, sl_err *err) {
    int rc = d->in - d->out == d->cap ? report_part(d, err) : 0;
    part *p = &d->parts[d->in % d->cap];
    if (rc) return rc;
    *p = (part){.j.run = run_part, .d = d, .row = row, .b0 = b0, .b1 = b1, .blocks = blocks};
    if (!(p->sums = calloc(b1 - b0 + 1ull, sizeof *p->sums))) return sl_err_set(err, SL_ETEMP, "no memory");
    d->in++;
    if (d->pool)
        sl_workers_put(d->pool, &p->j);
    else
        run_part(&p->j, 0);
    return 0;
}

static int put_row(deep *d, uint64_t i, sl_err *err) {
    const sl_manifest *m = sl_reader_manifest(d->l->r);
    uint32_t blocks = sl_reader_blocks(d->l->r, i);
    uint64_t block = (uint64_t)sl_store_block_rows(m->set.width, m->set.elem_size) * m->set.width * m->set.elem_size;
    uint32_t step = block < PART_BYTES ? (uint32_t)(PART_BYTES / (block + !block)) : 1;
    int rc = 0;
    if (d->l->o->part_blocks) step = d->l->o->part_blocks;
    if (m->layout == SL_LAYOUT_FILES || !blocks) return put_part(d, i, 0, blocks, blocks, err);
    for (uint32_t b = 0; !rc && b < blocks; b += step)
        rc = put_part(d, i, b, blocks - b < step ? blocks : b + step, blocks, err);
    return rc;
}

static int open_deep(deep *d, sl_err *err) {
    unsigned n = d->l->o->threads;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (!n) n = d->l->rep->stored_bytes < SMALL_STORE ? 1 : cores * 2 > MIN_THREADS ? (unsigned)cores * 2 : MIN_THREADS;
    if (n > 64) n = 64;
    d->cap = n > 1 ? (uint64_t)n * PARTS_A_THREAD : 1;
    d->parts = calloc(d->cap, sizeof *d->parts);
    d->reader = calloc(n, sizeof(sl_reader *));
    if (!d->parts || !d->reader) return sl_err_set(err, SL_ETEMP, "no memory");
    if (n == 1) {
        d->reader[0] = d->l->r;
        return 0;
    }
    int rc = 0;
    for (; !rc && d->n < n; d->n += !rc) rc = sl_reader_again(&d->reader[d->n], d->l->r, err);
    return rc ? rc : sl_workers_open(&d->pool, n, -1, err);
}

static int check_deep(look *l, sl_err *err) {
    deep d = {.l = l};
    uint64_t n = sl_reader_rows(l->r);
    int rc = open_deep(&d, err);
    for (uint64_t i = 0; !rc && i < n; i++) {
        rc = put_row(&d, i, err);
        if (l->o->progress) l->o->progress(l->o->arg, i + 1, n);
    }
    while (!rc && d.out < d.in) rc = report_part(&d, err);
    sl_workers_close(d.pool); /* finishes what is queued */
    l->rep->read_bytes = sl_reader_bytes_read(l->r);
    for (unsigned i = 0; i < d.n; i++) {
        l->rep->read_bytes += sl_reader_bytes_read(d.reader[i]);
        sl_reader_close(d.reader[i]);
    }
    for (uint64_t i = 0; d.parts && i < d.cap; i++) free(d.parts[i].sums);
    free(d.parts);
    free(d.reader);
    free(d.sums);
    return rc;
}

static int check_rows(look *l, sl_err *err) {
    const sl_manifest *m = sl_reader_manifest(l->r);
    uint64_t n = sl_reader_rows(l->r);
    for (uint64_t i = 0; i < n; i++) {
        const sl_commit_rec *c = sl_reader_row(l->r, i);
        uint64_t raw = (uint64_t)c->T * m->set.n * m->set.width * m->set.elem_size;
        if (c->raw_bytes != raw)
            fault(l, "row %" PRIu64 " of '%s': commit.log says %" PRIu64 " bytes of states, %u tokens make %" PRIu64,
                  c->row, sl_reader_dataset(l->r, c), c->raw_bytes, c->T, raw);
        if (l->o->deep) continue;
        check_structure(l, i);
        if (l->o->progress) l->o->progress(l->o->arg, i + 1, n);
    }
    l->rep->read_bytes = sl_reader_bytes_read(l->r);
    return l->o->deep ? check_deep(l, err) : 0;
}

int sl_store_verify(const char *store, const sl_verify_opts *o, sl_verify_report *rep, sl_err *err) {
    look l = {.store = store, .o = o, .rep = rep};
    sl_err e = {0};
    memset(rep, 0, sizeof *rep);
    int rc = sl_reader_open(&l.r, store, &e);
    if (rc == SL_EDATA) { /* a damaged log is a finding */
        fault(&l, "%s", e.msg);
        return 0;
    }
    if (rc) {
        if (err) *err = e;
        return rc;
    }
    l.in = sl_reader_accepted(l.r);
    rc = check_logs(&l, err);
    if (!rc && o->deep) rc = check_dat(&l, err);
    if (!rc) rc = check_trees(&l, err);
    if (!rc && sl_reader_manifest(l.r)->layout == SL_LAYOUT_SHARDS) rc = check_shards(&l, err);
    if (!rc) rc = check_rows(&l, err);
    for (uint64_t i = 0; i < l.n_expect; i++) free(l.expect[i]);
    free(l.expect);
    free(l.seen);
    free(l.state);
    sl_reader_close(l.r);
    return rc;
}
