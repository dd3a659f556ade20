/* The writer process, with synthetic ranks and gather on real rings: exactly once through every crash point, with the
 * rings kept (the writer alone dies) and with new rings (everything dies); dead epochs; rejected rows; states that
 * change behind the verdict; a full disk.
 *
 *   test_writer WRITER [crash|changed|full|many|lies|release]      WRITER: path of sluice-writer */
#include "ipc/boot.h"
#include "ipc/doorbell.h"
#include "stages/writer/verify.h"
#include "stages/writer/writer.h"
#include "tests/store_rig.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define MUST(x)                                                                                                        \
    do {                                                                                                               \
        if (!(x)) {                                                                                                    \
            fprintf(stderr, "%s:%d: %s does not hold (%s)\n", __FILE__, __LINE__, #x, err.msg);                        \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

enum { TP = 2, CHUNK_ROWS = 8, BATCH_TOKENS = 96, BATCH_ROWS = 12 };

static sl_err err;
static const char *writer_path;

/* What the chunk of state 1 that holds the first tokens of the first batch says falsely; the same of its row 1, its
 * verdicts, its batch. */
typedef enum {
    TRUTH,
    NO_PAYLOAD,
    OTHER_WIDTH,
    OTHER_RANK,
    FEWER_ROWS,
    STATE_OUT_OF_RANGE,
    CHUNK_OUT_OF_RANGE,
    OTHER_EPOCH,
    OTHER_BATCH,
    OTHER_POSITION,
    NOT_THE_OWNER, /* the last of those that cost the rows of that chunk; the others end the writer */
    VERDICT_OF_NO_KIND,
    VERDICT_OF_ANOTHER_ROW,
    VERDICT_OF_ANOTHER_SEQ,
    VERDICT_UNKNOWN,
    VERDICTS_OF_MORE_ROWS,
    VERDICTS_OF_ANOTHER_BATCH,
    VERDICTS_WITHOUT_A_HEAD,
    ROW_OF_ANOTHER_NUMBER,
    ROWS_OF_OTHER_LENGTHS,
    ROW_OF_ANOTHER_KEY,
    ROW_OF_ANOTHER_SET,
    ROW_NEVER_ACCEPTED,
    LIES
} lie;

typedef struct world { /* what sluiced, the feeder, the ranks and gather would hold */
    rig *r;
    sl_boot boot;
    int boot_fd;
    sl_ring *batch[2], *batch_g, *chunk[TP], *chunk_g[TP], *sample; /* producer and gather's side */
    sl_metrics *m;
    sl_ctl_page *ctl;
    pid_t pid;
    unsigned deaths;
    bool die_together; /* a death ends the world */
    uint64_t flip[2];  /* 1 + seq of rows of which a bit changes behind the verdict; 0: none */
    uint8_t *flipped;  /* the byte */
    bool heal;         /* it changes back when the writer dies of it */
    lie lie;
    int ended; /* of a lie: the status with which the writer ended */
} world;

static int keep(int fd) {
    MUST(fd >= 0);
    fcntl(fd, F_SETFD, 0);
    return fd;
}

static int ring(const char *name, uint64_t depth, uint64_t slots, uint64_t size, uint32_t cursors) {
    sl_ring_params p = {.depth = depth, .pay_slots = slots, .pay_size = size, .n_cursors = cursors};
    bool huge;
    snprintf(p.name, sizeof p.name, "%s", name);
    return keep(sl_ring_create(&p, false, &huge, &err));
}

static void start_writer(world *w) {
    char fd[16];
    snprintf(fd, sizeof fd, "%d", w->boot_fd);
    w->pid = fork();
    if (!w->pid) {
        execl(writer_path, writer_path, "--boot", fd, "--proc", "3", (char *)NULL);
        _exit(127);
    }
}

/* Everything but the writer. */
static void make_rings(world *w, rig *r, const char *crash, uint64_t reserve) {
    memset(w, 0, sizeof *w);
    w->r = r;
    sl_boot *b = &w->boot;
    uint32_t rb = r->m.set.width * r->m.set.elem_size;
    *b = (sl_boot){.n_procs = 4 + TP,
                   .dp = 1,
                   .tp = TP,
                   .n_layers = 5,
                   .width = r->m.set.width,
                   .vocab = 1000,
                   .n_captures = r->m.set.n,
                   .elem_size = r->m.set.elem_size,
                   .chunk_rows = CHUNK_ROWS,
                   .batch_tokens = BATCH_TOKENS,
                   .max_batch_rows = BATCH_ROWS,
                   .max_length = BATCH_TOKENS,
                   .layout = r->m.layout,
                   .codec = r->m.codec,
                   .zstd_level = 1,
                   .writer_threads = 2,
                   .shard_bytes = 300000,
                   .reserve_bytes = reserve,
                   .commit_ms = 5,
                   .commit_mb = 1,
                   .direct_io = 1,
                   .log_level = 2,
                   .run_id = 1};
    static const uint32_t roles[] = {SL_ROLE_SLUICED, SL_ROLE_FEEDER, SL_ROLE_GATHER,
                                     SL_ROLE_WRITER,  SL_ROLE_RANK,   SL_ROLE_RANK};
    for (uint32_t i = 0; i < b->n_procs; i++) {
        b->procs[i] = (sl_boot_proc){.role = roles[i], .rank = i > 4, .bell_fd = keep(sl_bell_create(&err))};
        snprintf(b->procs[i].name, sizeof b->procs[i].name, "%s%u", i == 3 ? "writer" : "p", i);
    }
    memcpy(b->captures, r->m.set.v, sizeof b->captures);
    snprintf(b->store, sizeof b->store, "%s", r->store);
    strcpy(b->model, "/nowhere");
    strcpy(b->model_fingerprint, "f00d");
    strcpy(b->tokenizer_hash, "aa");
    strcpy(b->template_hash, "bb");
    snprintf(b->crash_points, sizeof b->crash_points, "%s", crash);
    sl_boot_group *g = &b->groups[0];
    *g = (sl_boot_group){.coll_fd = -1, .first_rank_proc = 4};
    g->batch_fd = ring("batch.0", 4, 4, 65536, SL_BATCH_CURSORS);
    g->sample_fd = ring("sample.0", 128, 0, 0, SL_SAMPLE_CURSORS);
    for (int i = 0; i < TP; i++)
        g->chunk_fd[i] = ring("chunk.0", 256, 64, (CHUNK_ROWS * rb + 4095) / 4096 * 4096, SL_CHUNK_CURSORS);
    b->metrics_fd = keep(sl_metrics_create(b->n_procs, &err));
    b->ctl_fd = keep(sl_ctl_create(1, &err));
    w->boot_fd = keep(sl_boot_create(b, &err));
    MUST(!sl_ring_attach(&w->batch[0], g->batch_fd, SL_RING_PRODUCER, &err) &&
         !sl_ring_attach(&w->batch_g, g->batch_fd, SL_BATCH_GATHERED, &err));
    MUST(!sl_ring_attach(&w->sample, g->sample_fd, SL_RING_PRODUCER, &err));
    for (int i = 0; i < TP; i++)
        MUST(!sl_ring_attach(&w->chunk[i], g->chunk_fd[i], SL_RING_PRODUCER, &err) &&
             !sl_ring_attach(&w->chunk_g[i], g->chunk_fd[i], SL_CHUNK_VALIDATED, &err));
    MUST(!sl_metrics_attach(&w->m, b->metrics_fd, 2, &err) && !sl_ctl_attach(&w->ctl, b->ctl_fd, 1, 1, &err));
    atomic_store(&w->ctl[1].epoch, 1);
}

static void make_world(world *w, rig *r, const char *crash, uint64_t reserve) {
    make_rings(w, r, crash, reserve);
    start_writer(w);
}

static void end_world(world *w) {
    const sl_boot *b = &w->boot;
    sl_ring_detach(w->batch[0]), sl_ring_detach(w->batch_g), sl_ring_detach(w->sample);
    for (int i = 0; i < TP; i++)
        sl_ring_detach(w->chunk[i]), sl_ring_detach(w->chunk_g[i]), close(b->groups[0].chunk_fd[i]);
    sl_metrics_detach(w->m);
    for (uint32_t i = 0; i < b->n_procs; i++) close(b->procs[i].bell_fd);
    close(b->groups[0].batch_fd), close(b->groups[0].sample_fd), close(b->metrics_fd), close(b->ctl_fd),
        close(w->boot_fd);
}

static void died(world *w, int st) {
    if (!WIFSIGNALED(st) && !(w->flipped && WEXITSTATUS(st))) {
        fprintf(stderr, "the writer ended with status %d\n", WEXITSTATUS(st));
        exit(1);
    }
    if (w->flipped && w->heal) *w->flipped ^= 1;
    w->deaths++;
}

/* Wait a moment for the writer. false: everything died (die_together). */
static bool breathe(world *w) {
    int st;
    struct pollfd p = {0};
    sl_bell_ring(w->boot.procs[3].bell_fd);
    sl_bell_drain(w->boot.procs[1].bell_fd);
    sl_bell_wait(w->boot.procs[1].bell_fd, &p, 1, 10);
    if (waitpid(w->pid, &st, WNOHANG) != w->pid) return true;
    if (!WIFSIGNALED(st) && w->lie > NOT_THE_OWNER) return w->ended = WEXITSTATUS(st), false;
    died(w, st);
    if (w->die_together) return false;
    start_writer(w);
    return true;
}

#define WAIT(cond)                                                                                                     \
    while (!(cond))                                                                                                    \
        if (!breathe(w)) return false

/* Chunks of one rank for one batch; `only` limits them (a rank that dies in the middle), -1: all and END. */
static bool rank_batch(world *w, unsigned rank, uint64_t bpos, uint64_t batch_no, uint64_t first, uint32_t n_rows,
                       uint32_t n_tokens, uint32_t epoch, int only, bool lost) {
    rig *r = w->r;
    uint32_t n = (n_tokens + CHUNK_ROWS - 1) / CHUNK_ROWS, K = r->m.set.n, rb = r->m.set.width * r->m.set.elem_size,
             made = 0;
    for (uint32_t k = 0; k < K; k++)
        for (uint32_t c = 0; c < n; c++) {
            if (only >= 0 && made++ >= (uint32_t)only) goto out;
            uint32_t rows = c + 1 < n ? CHUNK_ROWS : n_tokens - c * CHUNK_ROWS;
            lie lies = bpos == 0 && k == 1 && c == 0 ? w->lie : TRUTH;
            bool owner = sl_chunk_owner(bpos, k, c, TP) == rank, mine = owner && !(lost && k == 1 && c == 0);
            if (lies == NOT_THE_OWNER) mine = !owner;
            WAIT(sl_ring_room(w->chunk[rank]) && (!mine || sl_ring_pay_room(w->chunk[rank])));
            if (mine) {
                uint8_t *p = sl_ring_pay_next(w->chunk[rank]);
                uint32_t t0 = 0; /* of the row within the batch */
                for (uint64_t s = first; s < first + n_rows; s++) {
                    uint32_t a = c * CHUNK_ROWS > t0 ? c * CHUNK_ROWS : t0, e = t0 + r->rows[s].T;
                    if (e > c * CHUNK_ROWS + rows) e = c * CHUNK_ROWS + rows;
                    if (a >= e) {
                        t0 += r->rows[s].T;
                        continue;
                    }
                    rig_fill(r, s, k, a - t0, e - a, p + (uint64_t)(a - c * CHUNK_ROWS) * rb);
                    if (only < 0 && k == K - 1 && a == t0 && (w->flip[0] == s + 1 || w->flip[1] == s + 1)) {
                        w->flipped = p + (uint64_t)(a - c * CHUNK_ROWS) * rb;
                        *w->flipped ^= 1;
                    }
                    t0 += r->rows[s].T;
                }
            }
            sl_desc_chunk *d = (sl_desc_chunk *)(void *)sl_ring_stage(w->chunk[rank], mine);
            d->h.kind = SL_DESC_CHUNK;
            d->h.epoch = epoch;
            d->h.flags = mine ? SL_CHUNK_PAYLOAD : 0;
            d->bpos = bpos, d->k = (uint16_t)k, d->rank = (uint16_t)rank, d->c = c, d->rows = rows,
            d->width = r->m.set.width, d->hidx = r->m.set.v[k].hidx;
            if (lies == NO_PAYLOAD) d->h.flags = 0;
            if (lies == OTHER_WIDTH) d->width++;
            if (lies == OTHER_RANK) d->rank = (uint16_t)(1 - rank);
            if (lies == FEWER_ROWS) d->rows--;
            /* far out, and such that this rank would own it */
            if (lies == STATE_OUT_OF_RANGE)
                for (d->k = 65535; owner && sl_chunk_owner(bpos, d->k, c, TP) != rank;) d->k--;
            if (lies == CHUNK_OUT_OF_RANGE) {
                d->rows = n_tokens - (n - 1) * CHUNK_ROWS; /* as many as the last one has */
                for (d->c = 0x7fffffff; owner && sl_chunk_owner(bpos, k, d->c, TP) != rank;) d->c--;
            }
            if (lies == OTHER_EPOCH) d->h.epoch++;
            if (lies == OTHER_BATCH) d->bpos += TP; /* which this rank would own too */
            if (lies == OTHER_POSITION) d->h.pos++;
            sl_ring_publish(w->chunk[rank]);
        }
    WAIT(sl_ring_room(w->chunk[rank]));
    sl_desc_end *e = (sl_desc_end *)(void *)sl_ring_stage(w->chunk[rank], 0);
    e->h.kind = SL_DESC_END, e->h.epoch = epoch, e->bpos = bpos, e->n_chunks = K * n, e->rank = (uint16_t)rank,
    e->batch_no = batch_no;
out:
    sl_ring_publish(w->chunk[rank]);
    return true;
}

static bool feed_batch(world *w, uint64_t first, uint32_t n_rows, uint32_t n_tokens) {
    WAIT(sl_ring_room(w->batch[0]));
    uint8_t *p = sl_ring_pay_next(w->batch[0]);
    sl_batch_row *rows = (sl_batch_row *)(void *)p;
    int32_t *ids = (int32_t *)(void *)(rows + n_rows);
    uint8_t *mask = (uint8_t *)(ids + n_tokens);
    char *str = (char *)mask + n_tokens;
    uint32_t t0 = 0;
    for (uint32_t i = 0; i < n_rows; i++) {
        const rig_row *x = &w->r->rows[first + i];
        sl_key key = sl_row_key(rig_name(x->dataset), x->row, x->part);
        rows[i] = (sl_batch_row){.seq = first + i,
                                 .row = x->row,
                                 .dataset = x->dataset,
                                 .t0 = t0,
                                 .T = x->T,
                                 .id_off = (uint32_t)(str - (char *)p),
                                 .id_len = (uint32_t)strlen(x->id),
                                 .key = {key.w[0], key.w[1]},
                                 .mask_sum = x->mask_sum};
        if (first == 0 && i == 1) { /* an intake log that speaks of another row */
            if (w->lie == ROW_OF_ANOTHER_NUMBER) rows[i].row += 1000;
            if (w->lie == ROW_OF_ANOTHER_KEY) rows[i].key[1] ^= 1;
            if (w->lie == ROW_OF_ANOTHER_SET) rows[i].dataset ^= 1;
            if (w->lie == ROW_NEVER_ACCEPTED) rows[i].seq = 1000000;
        }
        rig_ids(w->r, first + i, ids + t0, mask + t0);
        memcpy(str, x->id, rows[i].id_len);
        str += rows[i].id_len;
        t0 += x->T;
    }
    if (first == 0 && w->lie == ROWS_OF_OTHER_LENGTHS) { /* which together are as long as they should be */
        MUST(n_rows > 2 && rows[1].T > 1);
        rows[1].T--, rows[2].t0--, rows[2].T++;
        rows[1].mask_sum = rows[2].mask_sum = 0;
    }
    uint64_t bytes = (uint64_t)(str - (char *)p);
    sl_desc_input *d = (sl_desc_input *)(void *)sl_ring_stage(w->batch[0], 1);
    d->h.kind = SL_DESC_INPUT, d->batch_no = first, d->bytes = bytes, d->n_rows = n_rows, d->n_tokens = n_tokens,
    d->crc = sl_crc32c(0, p, bytes);
    sl_ring_publish(w->batch[0]);
    return true;
}

static bool say_verdicts(world *w, uint64_t bpos, uint64_t first, uint32_t n_rows, uint32_t epoch) {
    WAIT(sl_ring_room(w->sample) > n_rows);
    sl_desc_batch *b = (sl_desc_batch *)(void *)sl_ring_stage(w->sample, 0);
    lie lies = bpos == 0 ? w->lie : TRUTH;
    b->h.kind = SL_DESC_BATCH, b->h.epoch = epoch, b->bpos = bpos, b->batch_no = first, b->n_rows = n_rows;
    if (lies == VERDICTS_OF_MORE_ROWS) b->n_rows++;
    if (lies == VERDICTS_OF_ANOTHER_BATCH) b->batch_no++;
    if (lies == VERDICTS_WITHOUT_A_HEAD) b->h.kind = SL_DESC_SAMPLE;
    for (uint32_t i = 0; i < n_rows; i++) {
        const rig_row *x = &w->r->rows[first + i];
        sl_desc_sample *s = (sl_desc_sample *)(void *)sl_ring_stage(w->sample, 0);
        s->h.kind = SL_DESC_SAMPLE, s->h.epoch = epoch, s->seq = first + i, s->row = i,
        s->verdict = (uint16_t)x->verdict, s->nll = x->nll;
        s->k = x->verdict ? 1 : 0xffff, s->token = x->verdict ? 3 : UINT32_MAX,
        s->nll_tokens = isnan(x->nll) ? 0 : x->T - 1;
        s->detail = x->verdict ? 4711 : rig_row_sum(w->r, first + i);
        if (i == 1 && lies == VERDICT_OF_NO_KIND) s->h.kind = SL_DESC_BATCH;
        if (i == 1 && lies == VERDICT_OF_ANOTHER_ROW) s->row++;
        if (i == 1 && lies == VERDICT_OF_ANOTHER_SEQ) s->seq++;
        if (i == 1 && lies == VERDICT_UNKNOWN) s->verdict = SL_V_N;
        if (i == 1 && lies == ROW_NEVER_ACCEPTED) s->seq = 1000000;
    }
    sl_ring_publish(w->sample);
    return true;
}

static bool gather_batch(world *w, uint64_t bpos, uint64_t first, uint32_t n_rows, uint32_t epoch) {
    if (!say_verdicts(w, bpos, first, n_rows, epoch)) return false;
    if (bpos % 3 == 0 && !breathe(w)) return false; /* now and then gather is slow to advance */
    for (int i = 0; i < TP; i++) MUST(!sl_ring_advance(w->chunk_g[i], sl_ring_pos(w->chunk_g[i], 0), &err));
    MUST(!sl_ring_advance(w->batch_g, bpos + 1, &err));
    sl_bell_ring(w->boot.procs[3].bell_fd);
    return true;
}

static bool drain(world *w) {
    int st;
    sl_metric_set(w->m, SL_M_STATE, SL_ST_DONE);
    atomic_store(&w->ctl[0].draining, 1);
    for (;;) {
        pid_t pid = w->pid;
        sl_bell_ring(w->boot.procs[3].bell_fd);
        if (waitpid(pid, &st, WNOHANG) == pid) {
            if (WIFEXITED(st) && !WEXITSTATUS(st)) return true;
            if (WIFEXITED(st) && w->lie > NOT_THE_OWNER) return w->ended = WEXITSTATUS(st), false;
            died(w, st);
            if (w->die_together) return false;
            start_writer(w);
        }
        poll(NULL, 0, 5);
    }
}

/* All rows once through the rings. false: the world died. */
static bool run_once(world *w) {
    uint32_t epoch = 1;
    uint64_t bpos = 0;
    for (uint64_t first = 0; first < w->r->n; bpos++) {
        uint32_t n = 0, tok = 0;
        bool lost = false;
        while (first + n < w->r->n && n < BATCH_ROWS && tok + w->r->rows[first + n].T <= BATCH_TOKENS) {
            lost |= w->r->rows[first + n].verdict == SL_V_MISSING_SHARD;
            tok += w->r->rows[first + n++].T;
        }
        if (!feed_batch(w, first, n, tok)) return false;
        if (bpos % 4 == 2) { /* the group dies in the middle: half a batch of the old epoch stays in the rings */
            for (unsigned i = 0; i < TP; i++)
                if (!rank_batch(w, i, bpos, first, first, n, tok, epoch, 3 + (int)i, false)) return false;
            for (int i = 0; i < TP; i++) MUST(!sl_ring_advance(w->chunk_g[i], sl_ring_pos(w->chunk_g[i], 0), &err));
            epoch++;
        }
        for (unsigned i = 0; i < TP; i++)
            if (!rank_batch(w, i, bpos, first, first, n, tok, epoch, -1, lost)) return false;
        if (!gather_batch(w, bpos, first, n, epoch)) return false;
        first += n;
    }
    return drain(w);
}

/* Until it is done; returns deaths of the writer. */
static unsigned run_all(rig *r, const char *crash, bool together, uint64_t reserve) {
    unsigned deaths = 0;
    for (bool done = false; !done;) {
        world w;
        make_world(&w, r, crash, reserve);
        w.die_together = together;
        done = run_once(&w);
        deaths += w.deaths;
        if (done && sl_ring_pos(w.sample, SL_SAMPLE_RELEASED) != sl_ring_pos(w.sample, 0)) {
            fprintf(stderr, "the writer ended with the sample ring not released\n");
            exit(1);
        }
        end_world(&w);
    }
    return deaths;
}

static void healthy(const rig *r, uint64_t rejected) {
    sl_verify_report rep;
    MUST(!sl_store_verify(r->store, &(sl_verify_opts){.deep = true}, &rep, &err));
    for (int i = 0; i < SL_VERIFY_KEEP && rep.faults[i]; i++) fprintf(stderr, "FAULT %s\n", rep.faults[i]);
    MUST(!rep.n_faults && rep.rows == r->n - rejected && rep.rejected == rejected && !rep.pending && rep.complete);
    MUST(rig_check(r) == r->n - rejected);
    sl_verify_free(&rep);
}

/* What stands beside the states of a rejected row is what gather said of it. */
static void expect_reason(const rig *r, uint64_t seq, const char *says) {
    char cmd[700], text[4096] = "";
    snprintf(cmd, sizeof cmd, "cat \"$(grep -rl '\"seq\":%llu,' %s/quarantine --include=*.json)\"",
             (unsigned long long)seq, r->store);
    FILE *f = popen(cmd, "r");
    MUST(f);
    text[fread(text, 1, sizeof text - 1, f)] = 0;
    pclose(f);
    if (!strstr(text, says)) {
        fprintf(stderr, "row of seq %llu: no '%s' in %s\n", (unsigned long long)seq, says, text);
        exit(1);
    }
}

static rig make(const char *base, const char *name, uint64_t n, uint32_t layout, uint32_t codec) {
    rig r;
    char store[420];
    snprintf(store, sizeof store, "%s/%s", base, name);
    rig_make(&r, store, n, 30, 48, 2, 11);
    r.m.layout = layout;
    r.m.codec = codec;
    rig_intake(&r);
    return r;
}

static uint64_t states_sum(const rig *r) {
    char path[600];
    snprintf(path, sizeof path, "%s/hidden_states", r->store);
    uint64_t a = rig_tree_sum(path);
    snprintf(path, sizeof path, "%s/quarantine", r->store);
    return a ^ rig_tree_sum(path);
}

static int crash_matrix(const char *base) {
    static const char *const points[] = {"before_data",  "after_data",    "before_commit",
                                         "after_commit", "after_release", "mid_rename"};
    static const struct {
        const char *name;
        uint32_t layout, codec;
    } kinds[] = {{"files", SL_LAYOUT_FILES, SL_CODEC_NONE}, {"shards", SL_LAYOUT_SHARDS, SL_CODEC_BF16}};
    for (size_t k = 0; k < 2; k++) {
        rig r = make(base, kinds[k].name, 60, kinds[k].layout, kinds[k].codec);
        r.rows[5].verdict = r.rows[40].verdict = SL_V_NONFINITE;
        MUST(run_all(&r, "", false, 0) == 0);
        healthy(&r, 2);
        char says[128];
        snprintf(says, sizeof says, "\"state\":1,\"h_index\":%u,\"final_norm\":%s,\"token\":3,\"detail\":4711,",
                 r.m.set.v[1].hidx, r.m.set.v[1].final_norm ? "true" : "false");
        expect_reason(&r, 5, says), expect_reason(&r, 5, "{\"verdict\":\"NONFINITE\",");
        expect_reason(&r, 40, says);
        uint64_t want = states_sum(&r);
        MUST(run_all(&r, "", false, 0) == 0); /* the same rows again: nothing is written twice */
        healthy(&r, 2);
        MUST(states_sum(&r) == want);
        rig_rmtree(r.store);
        for (size_t p = 0; p < sizeof points / sizeof *points; p++)
            for (int how = 0; how < 4; how++) {
                char crash[64];
                snprintf(crash, sizeof crash, "writer.%s:%d", points[p], how < 2 ? 1 : k && p == 5 ? 1 : 2);
                rig_intake(&r);
                unsigned deaths = run_all(&r, crash, how % 2, 0);
                if (deaths != 1) {
                    fprintf(stderr, "%s %s: %u deaths\n", kinds[k].name, crash, deaths);
                    return 1;
                }
                healthy(&r, 2);
                if (states_sum(&r) != want) {
                    fprintf(stderr, "%s: files differ from an uninterrupted run after %s\n", kinds[k].name, crash);
                    return 1;
                }
                rig_rmtree(r.store);
            }
        printf("%s: every crash point, twice, writer alone and everything: exactly once\n", kinds[k].name);
        rig_free(&r);
    }
    /* gather called a row good whose chunk never came: the writer must not believe it */
    rig r = make(base, "lost", 20, SL_LAYOUT_SHARDS, SL_CODEC_ZSTD);
    r.rows[0].verdict = SL_V_MISSING_SHARD;
    MUST(run_all(&r, "", false, 0) == 0);
    sl_verify_report rep;
    MUST(!sl_store_verify(r.store, &(sl_verify_opts){.deep = true}, &rep, &err) && !rep.n_faults && rep.rejected >= 1 &&
         rep.rows + rep.rejected == 20);
    sl_verify_free(&rep);
    rig_free(&r);
    return 0;
}

/* States that change between gather's verdict and the writer's reading, for good (two rows of one batch) or only for
 * the first life of the writer. */
static int changed_states(const char *base) {
    static const struct {
        const char *name;
        uint32_t layout, codec;
    } kinds[] = {{"files", SL_LAYOUT_FILES, SL_CODEC_NONE},
                 {"bf16", SL_LAYOUT_SHARDS, SL_CODEC_BF16},
                 {"none", SL_LAYOUT_SHARDS, SL_CODEC_NONE}};
    for (size_t k = 0; k < 3; k++)
        for (int heal = 0; heal < 2; heal++) {
            rig r = make(base, kinds[k].name, 40, kinds[k].layout, kinds[k].codec);
            world w;
            make_world(&w, &r, "", 0);
            w.flip[0] = 1;
            w.flip[1] = heal ? 0 : 2; /* of the same batch: T is at most 30 of 96 */
            w.heal = heal;
            MUST(run_once(&w));
            end_world(&w);
            sl_verify_report rep;
            MUST(!sl_store_verify(r.store, &(sl_verify_opts){.deep = true}, &rep, &err));
            uint64_t bad = heal ? 0 : 2;
            if (rep.n_faults || rep.rejected != bad || rep.rows != 40 - bad || w.deaths < 1 || w.deaths > 1 + bad) {
                fprintf(stderr, "%s, heal %d: %llu faults, %llu rows, %llu rejected, %u deaths\n", kinds[k].name, heal,
                        (unsigned long long)rep.n_faults, (unsigned long long)rep.rows,
                        (unsigned long long)rep.rejected, w.deaths);
                return 1;
            }
            sl_verify_free(&rep);
            MUST(rig_check(&r) == 40 - bad);
            rig_rmtree(r.store);
            rig_free(&r);
        }
    printf("states that change behind the verdict: rejected, or taken when they are right again\n");
    return 0;
}

/* What a store says of itself is what the run was told. */
static void manifest(void) {
    static sl_boot b = {.n_layers = 4,
                        .width = 8,
                        .vocab = 100,
                        .elem_size = 2,
                        .n_captures = 2,
                        .captures = {{.hidx = 2}, {.hidx = 4, .final_norm = 1}},
                        .layout = SL_LAYOUT_FILES,
                        .codec = SL_CODEC_NONE,
                        .model = "/m",
                        .model_fingerprint = "finger",
                        .tokenizer_hash = "tok",
                        .template_hash = "tmpl",
                        .min_supervised = 3,
                        .template_args = "{}"};
    static const struct {
        uint32_t overlong, train_on, per_turn, reasoning;
        const char *rows_made;
    } c[] = {
        {0, 0, 0, 0,
         "overlong=truncate min_supervised=3 train_on=all-assistant rows_from=conversation reasoning=keep-last "
         "template_args={}"},
        {1, 1, 1, 1,
         "overlong=skip min_supervised=3 train_on=last-assistant rows_from=turn reasoning=template template_args={}"},
        {2, 2, 0, 1,
         "overlong=split min_supervised=3 train_on=all rows_from=conversation reasoning=template template_args={}"},
    };
    sl_manifest m;
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        b.overlong = c[i].overlong, b.train_on = c[i].train_on, b.per_turn = c[i].per_turn,
        b.reasoning = c[i].reasoning;
        sl_writer_manifest(&m, &b);
        if (strcmp(m.rows_made, c[i].rows_made) != 0) {
            fprintf(stderr, "rows_made is\n%s, expected\n%s\n", m.rows_made, c[i].rows_made);
            exit(1);
        }
    }
    MUST(m.set.n == 2 && m.set.v[0].hidx == 2 && !m.set.v[0].final_norm && m.set.v[1].hidx == 4 &&
         m.set.v[1].final_norm);
    MUST(m.set.width == 8 && m.set.elem_size == 2 && m.set.n_layers == 4 && m.vocab == 100);
    MUST(m.layout == SL_LAYOUT_FILES && m.codec == SL_CODEC_NONE && !strcmp(m.model_path, "/m"));
    MUST(!strcmp(m.set.model, "finger") && !strcmp(m.tokenizer_hash, "tok") && !strcmp(m.template_hash, "tmpl"));
}

/* Nothing that comes from a ring is believed. What gather called good is rejected where a chunk is not what it should
 * be, with the rows of that chunk and no others; what makes no sense ends the writer before it commits any of the
 * batch. */
static int lies(const char *base) {
    manifest();
    for (lie l = NO_PAYLOAD; l < LIES; l++) {
        rig r = make(base, "lies", 20, SL_LAYOUT_SHARDS, SL_CODEC_NONE);
        uint64_t touched = 0; /* rows with one of the first CHUNK_ROWS tokens */
        for (uint32_t t = 0; t < CHUNK_ROWS; t += r.rows[touched++].T) {}
        world w;
        make_world(&w, &r, "", 0);
        w.lie = l;
        w.die_together = true;
        bool done = run_once(&w);
        if (w.deaths || (l > NOT_THE_OWNER ? done || w.ended != 70 : !done)) {
            fprintf(stderr, "lie %d: the writer %s, status %d, %u deaths\n", (int)l, done ? "believed it" : "ended",
                    w.ended, w.deaths);
            return 1;
        }
        end_world(&w);
        sl_verify_report rep;
        MUST(!sl_store_verify(r.store, &(sl_verify_opts){.deep = true}, &rep, &err));
        uint64_t rows = l > NOT_THE_OWNER ? 0 : r.n - touched, rejected = l > NOT_THE_OWNER ? 0 : touched;
        if (rep.n_faults || rep.rows != rows || rep.rejected != rejected) {
            fprintf(stderr, "lie %d: %llu faults, %llu rows and %llu rejected, expected %llu and %llu\n", (int)l,
                    (unsigned long long)rep.n_faults, (unsigned long long)rep.rows, (unsigned long long)rep.rejected,
                    (unsigned long long)rows, (unsigned long long)rejected);
            return 1;
        }
        sl_verify_free(&rep);
        rig_rmtree(r.store);
        rig_free(&r);
    }
    printf("%d lies: none is believed\n", LIES - 1);
    return 0;
}

static void whole_batch(world *w) { /* all rows as batch 0, up to the ENDs */
    uint32_t n = (uint32_t)w->r->n, tok = 0;
    for (uint32_t i = 0; i < n; i++) tok += w->r->rows[i].T;
    MUST(tok <= BATCH_TOKENS && feed_batch(w, 0, n, tok));
    for (unsigned i = 0; i < TP; i++) MUST(rank_batch(w, i, 0, 0, 0, n, tok, 1, -1, false));
}

static void all_released(world *w) {
    MUST(drain(w));
    MUST(sl_ring_pos(w->sample, SL_SAMPLE_RELEASED) == sl_ring_pos(w->sample, 0));
    MUST(sl_ring_pos(w->batch_g, SL_BATCH_RELEASED) == 1);
    for (int i = 0; i < TP; i++) MUST(sl_ring_pos(w->chunk_g[i], SL_CHUNK_RELEASED) == sl_ring_pos(w->chunk_g[i], 0));
    end_world(w);
}

/* A writer that died in the middle of a release: the next one goes on where it stopped, ring by ring. And what gather
 * has not passed yet is not released, however durable it is. */
static int release(const char *base) {
    rig r = make(base, "release", 3, SL_LAYOUT_SHARDS, SL_CODEC_NONE);
    for (unsigned released = 0; released <= TP + 1; released++) {
        world all, *w = &all;
        make_rings(w, &r, "", 0);
        whole_batch(w);
        MUST(gather_batch(w, 0, 0, (uint32_t)r.n, 1));
        for (unsigned i = 0; i < released; i++) { /* as the writer before did, which had committed the rows */
            sl_ring *x;
            int fd = i < TP ? w->boot.groups[0].chunk_fd[i] : w->boot.groups[0].batch_fd;
            MUST(!sl_ring_attach(&x, fd, i < TP ? SL_CHUNK_RELEASED : SL_BATCH_RELEASED, &err));
            MUST(!sl_ring_advance(x, sl_ring_pos(x, 0), &err));
            sl_ring_detach(x);
        }
        start_writer(w);
        all_released(w);
        healthy(&r, 0);
    }
    for (int passed = 0; passed < 2; passed++) { /* nothing; the chunks, but not the batch */
        world all, *w = &all;
        rig_rmtree(r.store);
        rig_intake(&r);
        make_rings(w, &r, "", 0);
        whole_batch(w);
        MUST(say_verdicts(w, 0, 0, (uint32_t)r.n, 1));
        for (int i = 0; passed && i < TP; i++)
            MUST(!sl_ring_advance(w->chunk_g[i], sl_ring_pos(w->chunk_g[i], 0), &err));
        start_writer(w);
        while (sl_metric_get(w->m, 3, SL_M_COMMITTED) < r.n) MUST(breathe(w));
        uint64_t beat = sl_metric_get(w->m, 3, SL_M_HEARTBEAT);
        while (sl_metric_get(w->m, 3, SL_M_HEARTBEAT) < beat + 3) MUST(breathe(w));
        MUST(sl_ring_pos(w->sample, SL_SAMPLE_RELEASED) == 0 && sl_ring_pos(w->batch_g, SL_BATCH_RELEASED) == 0);
        for (int i = 0; i < TP; i++) {
            MUST(sl_ring_pos(w->chunk_g[i], SL_CHUNK_RELEASED) == 0);
            MUST(!sl_ring_advance(w->chunk_g[i], sl_ring_pos(w->chunk_g[i], 0), &err));
        }
        MUST(!sl_ring_advance(w->batch_g, 1, &err));
        all_released(w);
        healthy(&r, 0);
    }
    /* A run that is drained has not ended while gather may have something to say. */
    world all, *w = &all;
    rig_rmtree(r.store);
    rig_intake(&r);
    make_rings(w, &r, "", 0);
    atomic_store(&w->ctl[0].draining, 1);
    start_writer(w);
    while (sl_metric_get(w->m, 3, SL_M_HEARTBEAT) < 3) MUST(breathe(w));
    whole_batch(w);
    MUST(gather_batch(w, 0, 0, (uint32_t)r.n, 1));
    all_released(w);
    healthy(&r, 0);
    /* What a dead epoch left is released without a verdict, or the ranks would wait for room for ever. */
    make_rings(w, &r, "", 0);
    for (unsigned i = 0; i < TP; i++) MUST(rank_batch(w, i, 0, 0, 0, (uint32_t)r.n, 30, 1, 5, false));
    for (int i = 0; i < TP; i++) MUST(!sl_ring_advance(w->chunk_g[i], sl_ring_pos(w->chunk_g[i], 0), &err));
    start_writer(w);
    for (int i = 0; i < TP; i++)
        for (int tries = 0; sl_ring_pos(w->chunk_g[i], SL_CHUNK_RELEASED) != sl_ring_pos(w->chunk_g[i], 0); tries++)
            MUST(tries < 1000 && breathe(w));
    MUST(drain(w));
    end_world(w);
    rig_free(&r);
    printf("released in part, and late: exactly once\n");
    return 0;
}

/* A tmpfs too small, filled up by a stranger: the writer waits; when there is room it ends well. */
static int disk_full(const char *base) {
    char mnt[340], hog[360];
    snprintf(mnt, sizeof mnt, "%s/small", base);
    mkdir(mnt, 0755);
    if (mount("none", mnt, "tmpfs", 0, "size=24m")) {
        fprintf(stderr, "SKIPPED: a tmpfs cannot be mounted here (%s): run as root\n", strerror(errno));
        return 77;
    }
    for (int k = 0; k < 2; k++) {
        rig r = make(mnt, k ? "shards" : "files", 60, k ? SL_LAYOUT_SHARDS : SL_LAYOUT_FILES, SL_CODEC_NONE);
        snprintf(hog, sizeof hog, "%s/hog", mnt);
        int fd = open(hog, O_CREAT | O_RDWR, 0600);
        MUST(fd >= 0);
        uint8_t *mb = calloc(1, 1 << 20);
        while (write(fd, mb, 1 << 16) > 0) {}
        ftruncate(fd, lseek(fd, 0, SEEK_END) - (k ? 96 << 10 : 128 << 10)); /* a little room to begin in */
        free(mb);
        pid_t child = fork(); /* makes room after a while */
        if (!child) {
            poll(NULL, 0, 2500);
            _exit(unlink(hog) != 0);
        }
        close(fd);
        MUST(run_all(&r, "", false, 64 << 10) == 0);
        int st;
        waitpid(child, &st, 0);
        healthy(&r, 0);
        MUST(access(hog, F_OK)); /* it did wait for the room */
        printf("%s: full disk, room made, every row there\n", k ? "shards" : "files");
        rig_rmtree(r.store);
        rig_free(&r);
    }
    /* (the kernel lets go of a ring's files a moment after its process has ended) */
    if (umount2(mnt, MNT_DETACH)) fprintf(stderr, "%s stays mounted: %s\n", mnt, strerror(errno));
    return 0;
}

static int many_rows(const char *base) {
    rig r;
    char store[420];
    snprintf(store, sizeof store, "%s/many", base);
    rig_make(&r, store, 3000, 8, 16, 2, 5);
    r.m.layout = SL_LAYOUT_FILES;
    rig_intake(&r);
    uint64_t t = sl_now_ns();
    MUST(run_all(&r, "", false, 0) == 0);
    printf("3000 tiny rows as files: %.0f rows/s\n", 3000e9 / (double)(sl_now_ns() - t));
    healthy(&r, 0);
    rig_free(&r);
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    char base[300], here[200];
    writer_path = argv[1];
    signal(SIGPIPE, SIG_IGN);
    if (!getcwd(here, sizeof here)) return 1;
    snprintf(base, sizeof base, "%s/sluice-writer-XXXXXX", here);
    if (!mkdtemp(base)) return 1;
    const char *what = argc > 2 ? argv[2] : "crash";
    int rc = !strcmp(what, "full")      ? disk_full(base)
             : !strcmp(what, "many")    ? many_rows(base)
             : !strcmp(what, "changed") ? changed_states(base)
             : !strcmp(what, "release") ? release(base)
             : !strcmp(what, "lies")    ? lies(base)
                                        : crash_matrix(base);
    rig_rmtree(base);
    return rc;
}
