#include "stages/writer/sink_int.h"
#include "ipc/crash.h"
#include "ipc/file.h"
#include "ipc/sum64.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

enum { FILE_THREADS = 8, FBUF_BYTES = 1u << 20 };

void sl_sink_note(sl_sink *s, int warn, const char *fmt, ...) {
    char text[SL_ERR_MAX];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (s->cfg.on_note) s->cfg.on_note(s->cfg.arg, warn, text);
}

/* ---- room ---- */

uint64_t sl_sink_look_free(sl_sink *s) {
    struct statvfs v;
    if (!fstatvfs(s->store_fd, &v)) s->free_bytes = (uint64_t)v.f_bavail * v.f_frsize;
    return s->free_bytes;
}

uint64_t sl_sink_free(sl_sink *s) {
    return s->free_bytes;
}

int sl_sink_wait_room(sl_sink *s, uint64_t need, sl_err *err) {
    uint64_t want = s->cfg.reserve_bytes + need;
    while (sl_sink_look_free(s) < want) {
        if (!s->paused && s->cfg.on_pause) s->cfg.on_pause(s->cfg.arg, true, want, s->free_bytes);
        s->paused = true;
        if (s->cfg.on_tick) s->cfg.on_tick(s->cfg.arg);
        int rc = s->in_poll ? 0 : sl_sink_progress(s, false, err); /* what is written already can still be committed */
        if (rc) return rc;
        poll(NULL, 0, 500);
    }
    if (s->paused && s->cfg.on_pause) s->cfg.on_pause(s->cfg.arg, false, want, s->free_bytes);
    s->paused = false;
    return 0;
}

int sl_sink_refused(sl_sink *s, uint64_t need, sl_err *err) {
    if (sl_sink_look_free(s) < s->cfg.reserve_bytes + need) return sl_sink_wait_room(s, need, err);
    if (++s->refused == 2) /* once may be a file that was deleted in the meantime */
        sl_sink_note(
            s, 1,
            "%s: the file system refuses to write although %.1f MB are free: out of inodes, a quota, room kept "
            "for others, or too few descriptors or memory. The flow is paused and nothing is lost; make room and it "
            "goes on by itself",
            s->store, (double)s->free_bytes / 1e6);
    if (s->cfg.on_tick) s->cfg.on_tick(s->cfg.arg);
    int rc = s->in_poll ? 0 : sl_sink_progress(s, false, err); /* what is written already can still be committed */
    if (!rc) poll(NULL, 0, s->refused < 10 ? 50 : 500);
    return rc;
}

/* ---- open ---- */

static int set_done(sl_sink *s, uint64_t seq, sl_err *err) {
    if (seq >= s->done_bits) {
        uint64_t bits = s->done_bits ? s->done_bits : 1u << 16;
        if (seq >= 1ull << 40)
            return sl_err_set(err, SL_EDATA, "sequence number %llu is not plausible", (unsigned long long)seq);
        while (bits <= seq) bits *= 2;
        uint8_t *p = realloc(s->done, bits / 8);
        if (!p) return sl_err_set(err, SL_ETEMP, "no memory to remember %llu rows", (unsigned long long)bits);
        memset(p + s->done_bits / 8, 0, (bits - s->done_bits) / 8);
        s->done = p;
        s->done_bits = bits;
    }
    s->done[seq / 8] |= (uint8_t)(1u << (seq % 8));
    return 0;
}

bool sl_sink_done(const sl_sink *s, uint64_t seq) {
    return seq < s->done_bits && s->done[seq / 8] >> (seq % 8) & 1;
}

typedef struct replay {
    sl_sink *s;
    uint32_t shard;
    uint64_t end;
} replay;

static int replay_rec(void *arg, const void *rec, sl_err *err) {
    replay *p = arg;
    const sl_commit_rec *r = rec;
    if (r->kind != SL_CM_COMMIT && r->kind != SL_CM_REJECT) return 0;
    sl_store_stats_add(&p->s->stats, r);
    int rc = set_done(p->s, r->seq, err);
    if (rc || r->kind != SL_CM_COMMIT || r->shard == SL_NO_SHARD) return rc;
    p->shard = r->shard;
    p->end = r->off + r->len;
    return sl_shard_index_add(p->s, r, err);
}

static int make_folder(const sl_sink *s, const char *sub, sl_err *err) {
    char path[SL_PATH_MAX + 64];
    snprintf(path, sizeof path, "%s%s%s", s->store, sub ? "/" : "", sub ? sub : "");
    return sl_store_folder_make(path, sub ? strlen(s->store) : 0, err);
}

/* What was killed between making a folder and syncing the name may have left names that are not durable. */
static int sync_folders(const sl_sink *s, sl_err *err) {
    static const char *const sub[] = {"", "/hidden_states", "/quarantine"};
    char path[SL_PATH_MAX + 64];
    int rc = 0;
    for (unsigned i = 0; i < 3 && !rc; i++) {
        snprintf(path, sizeof path, "%s%s", s->store, sub[i]);
        if (!access(path, F_OK)) rc = sl_file_sync_folder(path, err);
    }
    return rc;
}

/* What a crash left half done. */
static int empty_tmp(sl_sink *s, sl_err *err) {
    char path[SL_PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/.tmp", s->store);
    DIR *d = opendir(path);
    if (!d) return sl_err_sys(err, sl_file_code(errno), errno, "cannot read folder %s", path);
    unsigned n = 0;
    for (struct dirent *e; (e = readdir(d));)
        if (e->d_name[0] != '.') n += unlinkat(dirfd(d), e->d_name, 0) == 0;
    closedir(d);
    if (n) sl_sink_note(s, 0, "removed %u unpublished file%s of an earlier run", n, n == 1 ? "" : "s");
    return 0;
}

static int open_folders(sl_sink *s, sl_err *err) {
    bool shards = s->cfg.manifest.layout == SL_LAYOUT_SHARDS;
    int rc = make_folder(s, NULL, err);
    if (!rc) rc = make_folder(s, ".tmp", err);
    if (!rc) rc = make_folder(s, shards ? "shards" : "hidden_states", err);
    if (rc) return rc;
    s->store_fd = open(s->store, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (s->store_fd < 0) return sl_err_sys(err, sl_file_code(errno), errno, "cannot open folder %s", s->store);
    s->had_quarantine = !faccessat(s->store_fd, "quarantine", F_OK, 0);
    rc = sync_folders(s, err);
    return rc ? rc : empty_tmp(s, err);
}

static int open_manifest(sl_sink *s, sl_err *err) {
    char path[SL_PATH_MAX + 32];
    sl_manifest old;
    snprintf(path, sizeof path, "%s/manifest.json", s->store);
    if (access(path, F_OK)) return 0;
    int rc = sl_manifest_read(&old, s->store, err);
    if (!rc) rc = sl_manifest_same(&old, &s->cfg.manifest, err);
    if (rc) return rc;
    sl_manifest_keep(&s->cfg.manifest, &old);
    if (strcmp(old.template_hash, s->cfg.manifest.template_hash) != 0)
        sl_sink_note(s, 1,
                     "the chat template is not the one that this store was begun with (%s, now %s): rows that were "
                     "accepted stay as they are, new ones are made with this one; for all rows alike choose another "
                     "output folder",
                     old.template_hash, s->cfg.manifest.template_hash);
    char differ[600];
    if (sl_manifest_rows_differ(&old, &s->cfg.manifest, differ, sizeof differ))
        sl_sink_note(
            s, 1,
            "rows are made otherwise than when this store was begun (%s): rows that were accepted stay as they "
            "are, also when they are pushed again; for all rows alike choose another output folder",
            differ);
    return 0;
}

static void wio_done(void *arg, sl_wio_kind kind, void *tag, int res) {
    sl_sink *s = arg;
    group *g = tag;
    if (res == -ENOSPC && kind == SL_WIO_WRITE) return; /* kept and written again when there is room */
    if (res) s->fatal = res;
    if (kind == SL_WIO_WRITE)
        g->writes--;
    else
        g->sync_out = false;
}

static int open_pools(sl_sink *s, sl_err *err) {
    sl_capture_set *c = &s->cfg.manifest.set;
    sl_block b = {s->block_rows, c->width, c->elem_size};
    unsigned n = s->cfg.threads > 1 ? s->cfg.threads : 1;
    bool compress = s->cfg.manifest.layout == SL_LAYOUT_SHARDS && s->cfg.manifest.codec != SL_CODEC_NONE;
    int rc = 0;
    s->fbuf = calloc(FILE_THREADS, sizeof *s->fbuf);
    s->n_slots = 2 * n + 8;
    s->slots = calloc(s->n_slots, sizeof *s->slots);
    if (!s->fbuf || !s->slots) return sl_err_set(err, SL_ETEMP, "no memory for the writer's buffers");
    for (unsigned i = 0; i < FILE_THREADS; i++)
        if (!(s->fbuf[i] = malloc(FBUF_BYTES))) return sl_err_set(err, SL_ETEMP, "no memory for the writer's buffers");
    if ((rc = sl_workers_open(&s->file_pool, FILE_THREADS, s->efd, err))) return rc;
    if (!compress) return 0;
    s->ctx = calloc(n, sizeof *s->ctx);
    s->scratch = calloc(n, sizeof *s->scratch);
    if (!s->ctx || !s->scratch) return sl_err_set(err, SL_ETEMP, "no memory for the writer's buffers");
    for (unsigned i = 0; i < n; i++) {
        if ((rc = sl_codec_ctx_new(&s->ctx[i], s->cfg.zstd_level, err))) return rc;
        if (!(s->scratch[i] = malloc(sl_block_bytes(b))))
            return sl_err_set(err, SL_ETEMP, "no memory for the writer's buffers");
    }
    for (unsigned i = 0; i < s->n_slots; i++)
        if (!(s->slots[i].out = malloc(sl_codec_bound(b))))
            return sl_err_set(err, SL_ETEMP, "no memory for the writer's buffers");
    return n > 1 ? sl_workers_open(&s->codec_pool, n, s->efd, err) : 0;
}

static int check_cfg(sl_sink *s, sl_err *err) {
    sl_capture_set *c = &s->cfg.manifest.set;
    if (!c->n || c->n > SL_MAX_CAPTURES || !c->width || (c->elem_size != 2 && c->elem_size != 4) ||
        (uint64_t)c->width * c->elem_size > SL_BLOCK_BYTES)
        return sl_err_set(err, SL_ECONFIG,
                          "%u states of width %u, %u bytes an element: not something the store can hold", c->n,
                          c->width, c->elem_size);
    if (!s->cfg.shard_rows || s->cfg.shard_rows > SL_SHARD_ROWS) s->cfg.shard_rows = SL_SHARD_ROWS;
    if (!s->cfg.n_buf) s->cfg.n_buf = 32, s->cfg.buf_bytes = 1u << 20;
    s->block_rows = sl_store_block_rows(c->width, c->elem_size);
    uint64_t frame = sl_codec_bound((sl_block){s->block_rows, c->width, c->elem_size}) + 256;
    if (s->cfg.n_buf < 3 || s->cfg.n_buf > 64 || s->cfg.buf_bytes % SL_SHARD_ALIGN ||
        (uint64_t)(s->cfg.n_buf - 2) * s->cfg.buf_bytes < frame)
        return sl_err_set(err, SL_ECONFIG, "%u write buffers of %u bytes do not hold a frame of %llu bytes",
                          s->cfg.n_buf, s->cfg.buf_bytes, (unsigned long long)frame);
    if (s->cfg.manifest.layout == SL_LAYOUT_FILES && s->cfg.manifest.codec != SL_CODEC_NONE) {
        sl_sink_note(s, 1, "layout files holds plain safetensors: codec %s is not used (codec none)",
                     sl_codec_name(s->cfg.manifest.codec));
        s->cfg.manifest.codec = SL_CODEC_NONE;
    }
    return 0;
}

static int open_log(sl_sink *s, sl_err *err) {
    char path[SL_PATH_MAX + 32];
    replay rp = {s, SL_NO_SHARD, 0};
    s->sh.no = SL_NO_SHARD;
    snprintf(path, sizeof path, "%s/commit.log", s->store);
    int rc = sl_journal_open(&s->log, path, SL_COMMIT_MAGIC, replay_rec, &rp, err);
    if (rc) return rc;
    if (!sl_journal_count(s->log)) {
        sl_commit_rec h = {.kind = SL_CM_HEADER};
        if ((rc = sl_journal_append(s->log, &h, err)) || (rc = sl_journal_sync(s->log, err))) return rc;
    }
    if (s->cfg.manifest.layout == SL_LAYOUT_SHARDS) return sl_shard_recover(s, rp.end, rp.shard, err);
    return 0;
}

static int open_parts(sl_sink *s, sl_err *err) {
    int rc = check_cfg(s, err);
    if (!rc) rc = open_folders(s, err);
    if (!rc) rc = open_manifest(s, err);
    if (rc) return rc;
    if ((s->efd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) < 0)
        return sl_err_sys(err, SL_ETEMP, errno, "cannot make an eventfd");
    if ((rc = open_pools(s, err))) return rc;
    if (s->cfg.manifest.layout == SL_LAYOUT_SHARDS) {
        if ((rc = sl_wio_open(&s->wio, s->cfg.n_buf, s->cfg.buf_bytes, s->efd, s->cfg.plain, wio_done, s, err)))
            return rc;
        if (sl_wio_uring(s->wio) && !sl_wio_fixed(s->wio))
            sl_sink_note(
                s, 1,
                "write buffers (%u MB) are not registered with io_uring, which costs some CPU: raise the memlock limit "
                "(LimitMEMLOCK, ulimit -l)",
                (unsigned)((uint64_t)s->cfg.n_buf * s->cfg.buf_bytes >> 20));
        if (!sl_wio_uring(s->wio))
            sl_sink_note(s, 1, "writing with pwrite instead of io_uring: %s", sl_wio_why_plain(s->wio));
    }
    if ((rc = open_log(s, err))) return rc;
    sl_sink_look_free(s);
    s->cfg.manifest.stats = s->stats;
    s->cfg.manifest.complete = 0;
    return sl_manifest_write(&s->cfg.manifest, s->store, err);
}

int sl_sink_open(sl_sink **out, const sl_sink_cfg *cfg, sl_err *err) {
    sl_sink *s = calloc(1, sizeof *s);
    if (!s) return sl_err_set(err, SL_ETEMP, "no memory for the writer");
    s->cfg = *cfg;
    s->efd = s->store_fd = s->sh.fd = -1;
    s->tail = &s->head;
    if (snprintf(s->store, sizeof s->store, "%s", cfg->store) >= (int)sizeof s->store) {
        free(s);
        return sl_err_set(err, SL_ECONFIG, "the path of the store is longer than %d bytes", SL_PATH_MAX - 1);
    }
    s->cfg.store = s->store;
    int rc = open_parts(s, err);
    if (rc) {
        sl_sink_close(s);
        return rc;
    }
    *out = s;
    return 0;
}

/* ---- rows into the open group ---- */

static int need_group(sl_sink *s, sl_err *err) {
    if (s->open) return 0;
    s->open = calloc(1, sizeof *s->open);
    if (!s->open) return sl_err_set(err, SL_ETEMP, "no memory for a commit group");
    s->open->s = s;
    sl_crash_point("writer.before_data");
    return 0;
}

int sl_sink_rec(sl_sink *s, const sl_row_in *r, unsigned *index, sl_err *err) {
    group *g = s->open;
    if (g->n_recs == g->cap_recs) {
        unsigned cap = g->cap_recs ? g->cap_recs * 2 : 64;
        sl_commit_rec *p = realloc(g->recs, cap * sizeof *p);
        if (!p) return sl_err_set(err, SL_ETEMP, "no memory for a group of %u rows", cap);
        g->recs = p;
        g->cap_recs = cap;
    }
    *index = g->n_recs;
    g->recs[g->n_recs++] = (sl_commit_rec){.kind = r->verdict == SL_V_OK ? SL_CM_COMMIT : SL_CM_REJECT,
                                           .seq = r->seq,
                                           .key = r->key,
                                           .row = r->row,
                                           .dataset = r->dataset,
                                           .T = r->T,
                                           .epoch = r->epoch,
                                           .verdict = (uint16_t)r->verdict,
                                           .k = r->fault_k,
                                           .token = r->fault_token,
                                           .shard = SL_NO_SHARD,
                                           .nll = (float)r->nll,
                                           .mask_sum = r->mask_sum};
    return 0;
}

int sl_sink_changed(sl_sink *s, const sl_row_in *r, uint64_t found, sl_err *err) {
    if (s->cfg.on_changed) s->cfg.on_changed(s->cfg.arg, r->seq);
    return sl_err_set(err, SL_EINTERNAL,
                      "row %llu of '%s' (seq %llu): its states in memory are not the ones that were validated: row sum "
                      "%016llx, expected %016llx. Nothing of it is committed",
                      (unsigned long long)r->row, r->name, (unsigned long long)r->seq, (unsigned long long)found,
                      (unsigned long long)r->sum);
}

uint64_t sl_sink_row_sum(const sl_sink *s, const sl_row_in *r) {
    const sl_capture_set *c = &s->cfg.manifest.set;
    uint64_t bytes = sl_sink_state_bytes(s), h = 0;
    for (uint32_t k = 0; k < c->n; k++) {
        uint64_t a = 0, b = 0;
        for (uint32_t i = r->first[k]; i < r->first[k + 1]; i++)
            sl_sum_states(r->pieces[i].p, r->pieces[i].rows, bytes, r->pieces[i].t0, &a, &b);
        h = sl_sum_chain(h, sl_sum_fold(a, b, r->T * bytes));
    }
    return h;
}

/* A full shard is sealed between groups, with nothing under way. */
static int roll_shard(sl_sink *s, sl_err *err) {
    int rc = sl_sink_close_group(s, err);
    while (!rc && s->n_closed) rc = sl_sink_poll(s, true, err);
    if (!rc) rc = sl_shard_seal(s, err);
    if (!rc) rc = sl_shard_next(s, err);
    return rc;
}

int sl_sink_row(sl_sink *s, const sl_row_in *r, sl_err *err) {
    bool shards = s->cfg.manifest.layout == SL_LAYOUT_SHARDS, file = !shards || r->verdict != SL_V_OK;
    int rc = 0;
    if (sl_sink_done(s, r->seq)) return 1;
    if (shards && (s->sh.off >= s->cfg.shard_bytes || s->sh.n_rows >= s->cfg.shard_rows)) rc = roll_shard(s, err);
    if (!rc && file && s->open && s->open->n_files >= SL_FILE_GROUP_ROWS) rc = sl_sink_close_group(s, err);
    if (!rc) rc = need_group(s, err);
    if (!rc) rc = file ? sl_files_row(s, r, err) : sl_shard_row(s, r, err);
    if (!rc) rc = set_done(s, r->seq, err);
    if (rc) return rc;
    s->open->bytes += (uint64_t)r->T * s->cfg.manifest.set.n * sl_sink_state_bytes(s);
    return 0;
}

int sl_sink_token(sl_sink *s, void *token, sl_err *err) {
    int rc = need_group(s, err);
    if (rc) return rc;
    group *g = s->open;
    if (g->n_tokens == g->cap_tokens) {
        unsigned cap = g->cap_tokens ? g->cap_tokens * 2 : 16;
        void **p = realloc(g->tokens, cap * sizeof *p);
        if (!p) return sl_err_set(err, SL_ETEMP, "no memory for a commit group");
        g->tokens = p;
        g->cap_tokens = cap;
    }
    g->tokens[g->n_tokens++] = token;
    return 0;
}

int sl_sink_close_group(sl_sink *s, sl_err *err) {
    if (!s->open) return 0;
    int rc = 0;
    if (s->open->shard_data) rc = sl_shard_end_group(s, err);
    if (rc) return rc;
    *s->tail = s->open;
    s->tail = &s->open->next;
    s->open = NULL;
    s->n_closed++;
    while (!rc && s->n_closed > SL_SINK_GROUPS) rc = sl_sink_poll(s, true, err);
    return rc;
}

/* ---- groups towards the commit ---- */

static void group_free(group *g) {
    if (!g) return;
    for (unsigned i = 0; i < g->n_files; i++) sl_files_free(g->files[i]);
    free(g->files);
    free(g->file_rec);
    free(g->recs);
    free(g->tokens);
    free(g);
}

static uint64_t mono(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* One step of one group; returns 1 when it moved. */
static int step(sl_sink *s, group *g, sl_err *err) {
    if (g->st == G_WRITING) {
        if (g->writes) return 0;
        if (g->shard_data) {
            g->sync_out = true;
            sl_wio_sync(s->wio, g);
        }
        g->sync_t0 = mono();
        g->st = G_SYNCING;
        return 1;
    }
    if (g->st == G_SYNCING) {
        int rc = sl_files_sync(s, g);
        if (rc == -EBADMSG && g->changed) return sl_sink_changed(s, &g->changed->r, g->changed->row_sum, err);
        if (rc < 0) return sl_err_sys(err, SL_EINTERNAL, -rc, "writing a row's file in %s failed", s->store);
        if (!rc || g->sync_out) return 0;
        s->sync_ns += mono() - g->sync_t0;
        sl_crash_point("writer.after_data");
        g->st = g->n_files ? G_PUBLISHING : G_READY;
        if (g->n_files) sl_files_publish(s, g);
        return 1;
    }
    if (g->st == G_PUBLISHING) {
        if (!atomic_load_explicit(&g->pub.done, memory_order_acquire)) return 0;
        if (g->pub_res && sl_file_code(-g->pub_res) == SL_ETEMP) { /* a folder has to grow, descriptors are short */
            int rc = sl_sink_refused(s, 1u << 20, err);
            if (!rc) sl_files_publish(s, g);
            return rc;
        }
        if (g->pub_res) return sl_err_sys(err, SL_EINTERNAL, -g->pub_res, "publishing files in %s failed", s->store);
        g->st = G_READY;
        return 1;
    }
    return 0;
}

static int commit(sl_sink *s, group *g, sl_err *err) {
    struct timespec t;
    int rc = 0;
    clock_gettime(CLOCK_REALTIME, &t);
    sl_crash_point("writer.before_commit");
    uint64_t t0 = mono();
    for (unsigned i = 0; !rc && i < g->n_recs; i++) {
        g->recs[i].time_ns = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
        rc = sl_journal_append(s->log, &g->recs[i], err);
    }
    bool said = false;
    while (!rc && g->n_recs) {
        rc = sl_journal_sync(s->log, err);
        if (rc != SL_ETEMP) break;
        if (!said) sl_sink_note(s, 1, "%s; it is tried again until it works", err ? err->msg : "commit.log");
        said = true;
        rc = sl_sink_refused(s, 1u << 20, err); /* the records are kept: try again */
    }
    if (rc) return rc;
    if (s->refused > 1) sl_sink_note(s, 0, "the file system takes writes again: going on");
    s->refused = 0;
    s->sync_ns += mono() - t0;
    sl_crash_point("writer.after_commit");
    for (unsigned i = 0; !rc && i < g->n_recs; i++) {
        sl_store_stats_add(&s->stats, &g->recs[i]);
        if (g->recs[i].shard != SL_NO_SHARD) rc = sl_shard_index_add(s, &g->recs[i], err);
    }
    if (!rc && s->cfg.on_commit) s->cfg.on_commit(s->cfg.arg, g->tokens, g->n_tokens);
    sl_crash_point("writer.after_release");
    return rc;
}

static int progress_once(sl_sink *s, bool *moved, sl_err *err) {
    uint64_t n;
    if (read(s->efd, &n, sizeof n) < 0) n = 0; /* drained before the tests: what comes later wakes the poll */
    if (s->wio) {
        if (sl_wio_stalled(s->wio)) {
            int rc = sl_sink_refused(s, (uint64_t)sl_wio_stalled(s->wio) * s->cfg.buf_bytes, err);
            if (rc) return rc;
            sl_wio_retry(s->wio);
        }
        sl_wio_reap(s->wio, false);
        if (s->fatal) return sl_err_sys(err, SL_EINTERNAL, -s->fatal, "writing to %s failed", s->store);
    }
    for (group *g = s->head; g; g = g->next)
        for (int r; (r = step(s, g, err)); *moved = true)
            if (r < 0) return r;
    while (s->head && s->head->st == G_READY) {
        group *g = s->head;
        int rc = commit(s, g, err);
        if (rc) return rc;
        s->head = g->next;
        if (!s->head) s->tail = &s->head;
        s->n_closed--;
        group_free(g);
        *moved = true;
    }
    return 0;
}

int sl_sink_progress(sl_sink *s, bool wait, sl_err *err) {
    bool moved = false, waited = false;
    int rc;
    s->in_poll = true;
    while (!(rc = progress_once(s, &moved, err)) && !moved && wait && s->n_closed) {
        if (!waited && s->cfg.on_wait) s->cfg.on_wait(s->cfg.arg, true);
        waited = true;
        struct pollfd p = {.fd = s->efd, .events = POLLIN};
        poll(&p, 1, 1000);
        if (s->cfg.on_tick) s->cfg.on_tick(s->cfg.arg);
    }
    if (waited && s->cfg.on_wait) s->cfg.on_wait(s->cfg.arg, false);
    s->in_poll = false;
    return rc;
}

int sl_sink_poll(sl_sink *s, bool wait, sl_err *err) {
    return sl_sink_progress(s, wait, err);
}

int sl_sink_eventfd(const sl_sink *s) {
    return s->efd;
}
uint64_t sl_sink_open_bytes(const sl_sink *s) {
    return s->open ? s->open->bytes : 0;
}
unsigned sl_sink_open_rows(const sl_sink *s) {
    return s->open ? s->open->n_recs + s->open->n_tokens : 0;
}
unsigned sl_sink_groups(const sl_sink *s) {
    return s->n_closed;
}
const sl_store_stats *sl_sink_stats(const sl_sink *s) {
    return &s->stats;
}
uint64_t sl_sink_committed(const sl_sink *s) {
    return sl_journal_synced(s->log);
}
uint64_t sl_sink_sync_ns(const sl_sink *s) {
    return s->sync_ns;
}

int sl_sink_finish(sl_sink *s, sl_err *err) {
    int rc = sl_sink_close_group(s, err);
    while (!rc && s->n_closed) rc = sl_sink_poll(s, true, err);
    if (!rc && s->sh.fd >= 0) rc = sl_shard_seal(s, err);
    if (rc) return rc;
    s->cfg.manifest.stats = s->stats;
    s->cfg.manifest.complete = 1;
    while ((rc = sl_manifest_write(&s->cfg.manifest, s->store, err)) == SL_ETEMP)
        if ((rc = sl_sink_refused(s, 1u << 16, err))) return rc;
    return rc;
}

void sl_sink_close(sl_sink *s) {
    if (!s) return;
    sl_workers_close(s->codec_pool);
    sl_workers_close(s->file_pool);
    sl_wio_close(s->wio);
    sl_journal_close(s->log);
    group_free(s->open);
    for (group *g = s->head, *n; g; g = n) n = g->next, group_free(g);
    unsigned threads = s->cfg.threads > 1 ? s->cfg.threads : 1;
    for (unsigned i = 0; s->ctx && i < threads; i++) sl_codec_ctx_free(s->ctx[i]);
    for (unsigned i = 0; s->scratch && i < threads; i++) free(s->scratch[i]);
    for (unsigned i = 0; s->fbuf && i < FILE_THREADS; i++) free(s->fbuf[i]);
    for (unsigned i = 0; s->slots && i < s->n_slots; i++) free(s->slots[i].out);
    sl_shard_close(s);
    free(s->ctx);
    free(s->scratch);
    free(s->fbuf);
    free(s->slots);
    free(s->done);
    if (s->efd >= 0) close(s->efd);
    if (s->store_fd >= 0) close(s->store_fd);
    free(s);
}
