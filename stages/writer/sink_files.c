/* Rows that are files of their own: layout files, and the quarantine of both layouts. A file is written below .tmp/ by
 * a worker thread, synced by a worker when its group closes (syncs of one group run side by side, so the file system
 * joins them in few journal commits), and renamed into its place by one job a group, which also syncs the folders. */
#include "stages/writer/xxh3.h"
#include "stages/writer/sink_int.h"
#include "ipc/crash.h"
#include "ipc/file.h"
#include "ipc/sum64.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FBUF = 1u << 20 };

typedef struct out {
    int fd, res;
    uint8_t *buf;
    uint32_t at;
    uint64_t len;
    XXH3_state_t *sum; /* of what is written, when it is wanted */
} out;

static void put(out *o, const void *p, uint64_t n) {
    const uint8_t *s = p;
    o->len += n;
    while (n && !o->res) {
        uint32_t m = FBUF - o->at < n ? FBUF - o->at : (uint32_t)n;
        if (s) memcpy(o->buf + o->at, s, m);
        o->at += m;
        n -= m;
        s = s ? s + m : s;
        if (o->at == FBUF && o->sum) XXH3_64bits_update(o->sum, o->buf, FBUF);
        for (uint32_t w = 0; o->at == FBUF && !o->res;) {
            ssize_t r = write(o->fd, o->buf + w, FBUF - w);
            if (r < 0 && errno != EINTR) o->res = -errno;
            if (r > 0) w += (uint32_t)r;
            if (w == FBUF) o->at = 0;
        }
    }
}

static void flush(out *o) {
    if (o->sum) XXH3_64bits_update(o->sum, o->buf, o->at);
    for (uint32_t w = 0; w < o->at && !o->res;) {
        ssize_t r = write(o->fd, o->buf + w, o->at - w);
        if (r < 0 && errno != EINTR) o->res = -errno;
        if (r > 0) w += (uint32_t)r;
    }
    o->at = 0;
}

/* The block [t0, t0 + rows) of state k: its XXH3-64; its share of the row sum's pair is added to *a and *b. Token by
 * token, so that the memory is read once. */
static uint64_t sum_block(const sl_row_in *r, uint32_t k, uint32_t t0, uint32_t rows, uint32_t row_bytes, uint64_t *a,
                          uint64_t *b) {
    XXH3_state_t st;
    uint32_t end = t0 + rows;
    XXH3_64bits_reset(&st);
    for (uint32_t i = r->first[k]; i < r->first[k + 1]; i++) {
        const sl_piece *p = &r->pieces[i];
        uint32_t from = p->t0 > t0 ? p->t0 : t0, to = p->t0 + p->rows < end ? p->t0 + p->rows : end;
        for (uint32_t t = from; t < to; t++) {
            const uint8_t *x = (const uint8_t *)p->p + (uint64_t)(t - p->t0) * row_bytes;
            XXH3_64bits_update(&st, x, row_bytes);
            sl_sum_states(x, 1, row_bytes, t, a, b);
        }
    }
    return XXH3_64bits_digest(&st);
}

static void sum_states(file_job *f) {
    const sl_capture_set *c = &f->s->cfg.manifest.set;
    uint32_t bytes = c->width * c->elem_size;
    XXH3_state_t st;
    XXH3_64bits_reset(&st);
    f->row_sum = 0;
    for (uint32_t k = 0; k < c->n; k++) {
        uint64_t a = 0, b = 0;
        for (uint32_t t = 0; t < f->r.T; t += f->s->block_rows) {
            uint32_t n = f->r.T - t < f->s->block_rows ? f->r.T - t : f->s->block_rows;
            uint64_t v = sum_block(&f->r, k, t, n, bytes, &a, &b);
            XXH3_64bits_update(&st, &v, sizeof v);
        }
        f->row_sum = sl_sum_chain(f->row_sum, sl_sum_fold(a, b, (uint64_t)f->r.T * bytes));
    }
    f->states_sum = XXH3_64bits_digest(&st);
}

/* Whether the pieces of every state tile [0, T): only then can the tensors be written. */
static bool whole(const file_job *f) {
    for (uint32_t k = 0; k < f->s->cfg.manifest.set.n; k++) {
        uint32_t t = 0;
        for (uint32_t i = f->r.first[k]; i < f->r.first[k + 1]; i++) {
            if (f->r.pieces[i].t0 != t) return false;
            t += f->r.pieces[i].rows;
        }
        if (t != f->r.T) return false;
    }
    return true;
}

static void put_ids(out *o, const sl_row_in *r) {
    int64_t id[512];
    for (uint32_t t = 0; t < r->T;) {
        uint32_t n = 0;
        while (n < 512 && t < r->T) id[n++] = r->ids[t++];
        put(o, id, 8ull * n);
    }
    put(o, r->mask, r->T);
}

/* States interleaved [t][k][h]: one cursor a state walks its pieces. */
static void put_states(out *o, const sl_row_in *r, uint32_t k0, uint32_t k1, uint32_t row_bytes) {
    uint32_t cur[SL_MAX_CAPTURES];
    memcpy(cur, r->first, (k1 + 1) * sizeof *cur);
    for (uint32_t t = 0; t < r->T && !o->res; t++)
        for (uint32_t k = k0; k < k1; k++) {
            while (t >= r->pieces[cur[k]].t0 + r->pieces[cur[k]].rows) cur[k]++;
            const sl_piece *p = &r->pieces[cur[k]];
            put(o, (const uint8_t *)p->p + (uint64_t)(t - p->t0) * row_bytes, row_bytes);
        }
}

static void put_whole(file_job *f, out *o) {
    const sl_capture_set *c = &f->s->cfg.manifest.set;
    sl_st_row m = {.row = f->r.row,
                   .part = f->r.part,
                   .T = f->r.T,
                   .mask_sum = f->r.mask_sum,
                   .id = f->r.id,
                   .dataset = f->r.name,
                   .id_len = f->r.id_len,
                   .nll = f->r.nll};
    uint64_t len, data;
    char *h = sl_st_header(c, &m, &len, &data);
    if (!h) {
        o->res = -ENOMEM;
        return;
    }
    put(o, h, len);
    free(h);
    put_states(o, &f->r, 0, sl_capture_stacked(c), c->width * c->elem_size);
    if (sl_capture_split(c)) put_states(o, &f->r, c->n - 1, c->n, c->width * c->elem_size);
    put_ids(o, &f->r);
}

/* Quarantine of an incomplete row: a tensor a piece that came, "state.<k>.<first token>". */
static void put_parts(file_job *f, out *o) {
    const sl_capture_set *c = &f->s->cfg.manifest.set;
    uint32_t rb = c->width * c->elem_size, n = f->r.first[c->n];
    size_t cap = 1024 + 160ull * n, at = 8;
    char *h = malloc(cap);
    if (!h) {
        o->res = -ENOMEM;
        return;
    }
    uint64_t off = 0, len;
    at += (size_t)snprintf(h + at, cap - at, "{\"__metadata__\":{\"incomplete\":\"1\"}");
    for (uint32_t k = 0; k < c->n; k++)
        for (uint32_t i = f->r.first[k]; i < f->r.first[k + 1]; i++) {
            uint64_t e = off + (uint64_t)f->r.pieces[i].rows * rb;
            at += (size_t)snprintf(h + at, cap - at,
                                   ",\"state.%u.%u\":{\"dtype\":\"%s\",\"shape\":[%u,%u],\"data_offsets\":[%llu,%llu]}",
                                   k, f->r.pieces[i].t0, c->elem_size == 2 ? "BF16" : "F32", f->r.pieces[i].rows,
                                   c->width, (unsigned long long)off, (unsigned long long)e);
            off = e;
        }
    at += (size_t)snprintf(
        h + at, cap - at,
        ",\"token_ids\":{\"dtype\":\"I64\",\"shape\":[%u],\"data_offsets\":[%llu,%llu]},\"loss_mask\":{\"dtype\":"
        "\"U8\",\"shape\":[%u],\"data_offsets\":[%llu,%llu]}}",
        f->r.T, (unsigned long long)off, (unsigned long long)(off + 8ull * f->r.T), f->r.T,
        (unsigned long long)(off + 8ull * f->r.T), (unsigned long long)(off + 9ull * f->r.T));
    while (at % 8) h[at++] = ' ';
    len = at - 8;
    memcpy(h, &len, 8);
    put(o, h, at);
    free(h);
    for (uint32_t i = 0; i < n; i++) put(o, f->r.pieces[i].p, (uint64_t)f->r.pieces[i].rows * rb);
    put_ids(o, &f->r);
}

static void tmp_path(const file_job *f, const char *suffix, char *buf, size_t cap) {
    snprintf(buf, cap, "%s/.tmp/%llu%s", f->s->store, (unsigned long long)f->r.seq, suffix);
}

/* The reason beside a rejected row's states; through the same buffer, which is empty again. */
static int write_reason(file_job *f, uint8_t *buf, XXH3_state_t *sum) {
    char path[SL_PATH_MAX + 64];
    size_t cap = 2048 + 6 * (f->r.id_len + strlen(f->r.name)) + 12ull * f->r.T, at = 0;
    char *b = malloc(cap);
    if (!b) return -ENOMEM;
    const sl_capture_set *c = &f->s->cfg.manifest.set;
    at += (size_t)snprintf(b, cap, "{\"verdict\":\"%s\",\"dataset\":", sl_verdict_name((sl_verdict)f->r.verdict));
    sl_json_str(b, cap, &at, f->r.name, strlen(f->r.name));
    at += (size_t)snprintf(b + at, cap - at,
                           ",\"row\":%llu,\"part\":%u,\"seq\":%llu,\"id\":", (unsigned long long)f->r.row, f->r.part,
                           (unsigned long long)f->r.seq);
    sl_json_str(b, cap, &at, f->r.id, f->r.id_len);
    if (f->r.fault_k < c->n)
        at += (size_t)snprintf(b + at, cap - at, ",\"state\":%u,\"h_index\":%u,\"final_norm\":%s", f->r.fault_k,
                               c->v[f->r.fault_k].hidx, c->v[f->r.fault_k].final_norm ? "true" : "false");
    if (f->r.fault_token != UINT32_MAX) at += (size_t)snprintf(b + at, cap - at, ",\"token\":%u", f->r.fault_token);
    at += (size_t)snprintf(b + at, cap - at, ",\"detail\":%llu,\"tokens\":%u,\"input_ids\":[",
                           (unsigned long long)f->r.detail, f->r.T);
    for (uint32_t t = 0; t < f->r.T; t++) at += (size_t)snprintf(b + at, cap - at, "%s%d", t ? "," : "", f->r.ids[t]);
    at += (size_t)snprintf(b + at, cap - at, "]}\n");
    tmp_path(f, ".json", path, sizeof path);
    out o = {.fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644), .buf = buf, .sum = sum};
    if (o.fd < 0) o.res = -errno;
    put(&o, b, at);
    flush(&o);
    if (!o.res && fdatasync(o.fd)) o.res = -errno;
    if (o.fd >= 0) close(o.fd);
    free(b);
    return o.res;
}

static void run_write(file_job *f, unsigned worker) {
    char path[SL_PATH_MAX + 64];
    tmp_path(f, ".st", path, sizeof path);
    if (f->fd >= 0) close(f->fd);
    f->fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (f->fd < 0) {
        f->res = -errno;
        return;
    }
    XXH3_state_t sum;
    XXH3_64bits_reset(&sum);
    out o = {.fd = f->fd, .buf = f->s->fbuf[worker], .sum = f->quarantine ? &sum : NULL};
    f->raw_bytes = 0;
    for (uint32_t i = 0; i < f->r.first[f->s->cfg.manifest.set.n]; i++)
        f->raw_bytes += (uint64_t)f->r.pieces[i].rows * f->s->cfg.manifest.set.width * f->s->cfg.manifest.set.elem_size;
    if (whole(f)) {
        sum_states(f);
        put_whole(f, &o);
    } else {
        put_parts(f, &o);
    }
    flush(&o);
    f->file_len = o.len;
    f->res = o.res;
    if (!f->res && f->quarantine) f->res = write_reason(f, o.buf, &sum);
    f->file_sum = f->quarantine ? XXH3_64bits_digest(&sum) : 0;
    if (f->res && ftruncate(f->fd, 0)) f->res = -EIO; /* a half file gives its room back at once */
}

static void run(sl_job *j, unsigned worker) {
    file_job *f = (file_job *)j;
    if (f->phase == FJ_WRITE) {
        run_write(f, worker);
    } else {
        f->res = fdatasync(f->fd) ? -errno : 0;
        if (!f->res) {
            close(f->fd);
            f->fd = -1;
        }
    }
}

void sl_files_free(file_job *f) {
    if (f->fd >= 0) close(f->fd);
    free((void *)(uintptr_t)f->r.pieces);
    free((void *)(uintptr_t)f->r.first);
    free(f);
}

/* The folder of a data set, made and synced once. */
static int make_dir(sl_sink *s, const char *dir, int which, sl_err *err) {
    char path[SL_PATH_MAX + 200];
    if (!strcmp(s->made_dir[which], dir)) return 0;
    snprintf(path, sizeof path, "%s/%s", s->store, dir);
    int rc = sl_store_folder_make(path, strlen(s->store), err);
    if (!rc) snprintf(s->made_dir[which], sizeof s->made_dir[which], "%s", dir);
    return rc;
}

static int push_file(sl_sink *s, file_job *f, unsigned rec, sl_err *err) {
    group *g = s->open;
    if (g->n_files == g->cap_files) {
        unsigned cap = g->cap_files ? g->cap_files * 2 : 16;
        file_job **a = realloc(g->files, cap * sizeof *a);
        if (a) g->files = a;
        unsigned *b = realloc(g->file_rec, cap * sizeof *b);
        if (b) g->file_rec = b;
        if (!a || !b) return sl_err_set(err, SL_ETEMP, "no memory for a group of %u files", cap);
        g->cap_files = cap;
    }
    g->files[g->n_files] = f;
    g->file_rec[g->n_files++] = rec;
    return 0;
}

int sl_files_row(sl_sink *s, const sl_row_in *r, sl_err *err) {
    uint32_t K = s->cfg.manifest.set.n, np = r->first[K];
    char sub[140];
    unsigned rec;
    file_job *f = calloc(1, sizeof *f);
    if (!f) return sl_err_set(err, SL_ETEMP, "no memory for a row");
    sl_piece *pc = malloc((np + 1) * sizeof *pc);
    uint32_t *first = malloc((K + 1) * sizeof *first);
    *f = (file_job){.j.run = run, .s = s, .r = *r, .fd = -1, .quarantine = r->verdict != SL_V_OK};
    f->r.pieces = pc;
    f->r.first = first;
    if (!pc || !first) {
        sl_files_free(f);
        return sl_err_set(err, SL_ETEMP, "no memory for the pieces of a row");
    }
    memcpy(pc, r->pieces, np * sizeof *pc);
    memcpy(first, r->first, (K + 1) * sizeof *first);
    sl_store_dataset_dir(sub, sizeof sub, r->dataset, r->name);
    snprintf(f->dir, sizeof f->dir, "%s%s%s", f->quarantine ? "quarantine" : "hidden_states", *sub ? "/" : "", sub);
    sl_store_row_name(f->name, sizeof f->name, r->row, r->part);
    uint64_t need = (uint64_t)r->T * K * s->cfg.manifest.set.width * s->cfg.manifest.set.elem_size + 9ull * r->T + 8192;
    int rc = sl_sink_wait_room(s, need, err);
    if (!rc) rc = make_dir(s, f->dir, f->quarantine, err);
    if (!rc) rc = sl_sink_rec(s, r, &rec, err);
    if (!rc) rc = push_file(s, f, rec, err);
    if (rc) {
        sl_files_free(f);
        return rc;
    }
    sl_workers_put(s->file_pool, &f->j);
    return 0;
}

/* Next phase of the files of a closed group: 1 when all are synced, 0 when some are at work, negative -errno; -EBADMSG:
 * g->changed is not what was found good. */
int sl_files_sync(sl_sink *s, group *g) {
    bool all = true, full = false;
    for (unsigned i = 0; i < g->n_files; i++) {
        file_job *f = g->files[i];
        if (f->phase == FJ_DONE) continue;
        if (!atomic_load_explicit(&f->j.done, memory_order_acquire)) {
            all = false;
            continue;
        }
        if (f->res && sl_file_code(-f->res) == SL_ETEMP) {
            full = true;
            all = false;
            continue;
        }
        if (f->res) return f->res;
        if (f->phase == FJ_WRITE) {
            if (!f->quarantine && f->r.summed && f->row_sum != f->r.sum) {
                g->changed = f;
                return -EBADMSG;
            }
            sl_commit_rec *rec = &g->recs[g->file_rec[i]];
            rec->len = f->file_len;
            rec->raw_bytes = f->raw_bytes;
            rec->states_sum = f->states_sum;
            rec->file_sum = f->file_sum;
        }
        f->phase++;
        if (f->phase == FJ_DONE) continue;
        all = false;
        sl_workers_put(s->file_pool, &f->j);
    }
    if (!full) return all;
    /* Written again from the start: the states are still in the rings. */
    sl_err e;
    if (sl_sink_refused(s, g->bytes + (1u << 20), &e)) return -EIO;
    for (unsigned i = 0; i < g->n_files; i++) {
        file_job *f = g->files[i];
        if (f->phase == FJ_DONE || !atomic_load_explicit(&f->j.done, memory_order_acquire) || !f->res) continue;
        f->phase = FJ_WRITE;
        sl_workers_put(s->file_pool, &f->j);
    }
    return 0;
}

/* A row whose writer died between rename and commit may get the other verdict when it comes again: then what it left in
 * the other folder goes, or a rejected row would be there for everybody to load. 0 or -errno. */
static int drop_twin(const file_job *f) {
    static const char *const folder[2] = {"hidden_states", "quarantine"}, *const suffix[2] = {".safetensors", ".json"};
    char dir[SL_PATH_MAX + 200], path[SL_PATH_MAX + 300];
    bool gone = false;
    if (!f->quarantine && !f->s->had_quarantine) return 0;
    snprintf(dir, sizeof dir, "%s/%s%s", f->s->store, folder[!f->quarantine], f->dir + strlen(folder[f->quarantine]));
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s%s", dir, f->name, suffix[i]);
        if (!unlink(path))
            gone = true;
        else if (errno != ENOENT)
            return -errno;
    }
    if (!gone) return 0;
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC), res = fd < 0 || fsync(fd) ? -errno : 0;
    if (fd >= 0) close(fd);
    return res;
}

static void publish(sl_job *j, unsigned worker) {
    (void)worker;
    group *g = (group *)((char *)j - offsetof(group, pub));
    char from[SL_PATH_MAX + 64], to[SL_PATH_MAX + 300];
    const char *synced[2] = {NULL, NULL};
    for (unsigned i = 0; i < g->n_files && !g->pub_res; i++) {
        file_job *f = g->files[i];
        for (int json = f->moved; json <= (int)f->quarantine && !g->pub_res; json++) {
            tmp_path(f, json ? ".json" : ".st", from, sizeof from);
            snprintf(to, sizeof to, "%s/%s/%s%s", f->s->store, f->dir, f->name, json ? ".json" : ".safetensors");
            if (rename(from, to))
                g->pub_res = -errno;
            else
                f->moved++;
        }
        if (!g->pub_res) g->pub_res = drop_twin(f);
        if (i == g->n_files / 2) sl_crash_point("writer.mid_rename");
    }
    for (unsigned i = 0; i < g->n_files && !g->pub_res; i++) {
        const char *dir = g->files[i]->dir;
        int q = g->files[i]->quarantine;
        if (synced[q] && !strcmp(synced[q], dir)) continue;
        synced[q] = dir;
        snprintf(to, sizeof to, "%s/%s", g->s->store, dir);
        int fd = open(to, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0 || fsync(fd)) g->pub_res = -errno;
        if (fd >= 0) close(fd);
    }
}

void sl_files_publish(sl_sink *s, group *g) {
    g->pub = (sl_job){.run = publish};
    g->pub_res = 0;
    sl_workers_put(s->file_pool, &g->pub);
}
