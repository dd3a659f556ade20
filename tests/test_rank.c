/* rank: real `sluice-compute` processes under a test that plays supervisor, feeder, gather and writer.
 *   test_rank SLUICE_COMPUTE GOLDEN/FAMILY
 * Checks the order of the descriptors, every payload against the golden states, fingerprints of both ranks,
 * back-pressure through a ring that holds less than a batch, a killed rank and the restart of its group, the faults of
 * ipc/faults.h as the ring shows them, and the drain. */
#include "ipc/boot.h"
#include "ipc/doorbell.h"
#include "ipc/faults.h"
#include "ipc/journal.h"
#include "stages/compute/collective.h"
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define TP       2
#define CHUNK    16
#define MAX_ROWS 64

static int failures;
#define CHECK(cond, ...)                                                                                               \
    do {                                                                                                               \
        if (!(cond)) {                                                                                                 \
            failures++;                                                                                                \
            printf("FAIL %s:%d: ", __func__, __LINE__);                                                                \
            printf(__VA_ARGS__);                                                                                       \
            printf("\n");                                                                                              \
            if (failures > 20) exit(1);                                                                                \
        }                                                                                                              \
    } while (0)
#define MUST(call)                                                                                                     \
    do {                                                                                                               \
        if ((call) < 0) printf("FAIL: %s: %s\n", #call, err.msg), exit(1);                                             \
    } while (0)

/* ---- golden ---- */
static struct {
    int rows, n, H, vocab;
    int64_t T[MAX_ROWS], tokens;
    int32_t *ids; /* all rows, packed */
    float *all;   /* [n+2][tokens][H] */
} g;

static int load_golden(const char *dir) {
    char path[1024];
    snprintf(path, sizeof path, "%s/golden.safetensors", dir);
    FILE *f = fopen(path, "rb");
    if (!f) return -1;
    fseek(f, 0, SEEK_END);
    size_t size = (size_t)ftell(f);
    rewind(f);
    uint8_t *b = malloc(size);
    if (fread(b, 1, size, f) != size) return -1;
    fclose(f);
    uint64_t hn;
    memcpy(&hn, b, 8);
    json_t *head = json_loadb((char *)b + 8, hn, 0, NULL);
    for (int pass = 0; pass < 2; pass++) {
        int64_t at = 0;
        for (int r = 0; r < MAX_ROWS; r++) {
            const char *kinds[] = {"ids", "states", "final"};
            uint8_t *p[3] = {0};
            json_t *shape = NULL;
            for (int i = 0; i < 3; i++) {
                char name[32];
                snprintf(name, sizeof name, "%s.%d", kinds[i], r);
                json_t *t = json_object_get(head, name);
                if (!t) break;
                p[i] = b + 8 + hn + json_integer_value(json_array_get(json_object_get(t, "data_offsets"), 0));
                if (i == 1) shape = json_object_get(t, "shape");
            }
            if (!p[2]) break;
            g.rows = r + 1;
            g.n = (int)json_integer_value(json_array_get(shape, 0)) - 1;
            g.T[r] = json_integer_value(json_array_get(shape, 1));
            g.H = (int)json_integer_value(json_array_get(shape, 2));
            for (int64_t t = 0; pass && t < g.T[r]; t++) g.ids[at + t] = (int32_t)((int64_t *)p[0])[t];
            for (int k = 0; pass && k <= g.n + 1; k++)
                memcpy(g.all + (k * g.tokens + at) * g.H,
                       k <= g.n ? p[1] + (size_t)k * (size_t)(g.T[r] * g.H) * 4 : p[2], (size_t)(g.T[r] * g.H) * 4);
            at += g.T[r];
        }
        if (!pass) {
            g.tokens = at;
            g.ids = malloc((size_t)at * 4);
            g.all = malloc((size_t)(g.n + 2) * (size_t)at * (size_t)g.H * 4);
        }
    }
    json_decref(head);
    free(b);
    return g.rows ? 0 : -1;
}

/* ---- the stage ---- */
static struct {
    sl_boot boot;
    int boot_fd;
    sl_ctl_page *ctl;
    sl_metrics *feeder;
    sl_ring *batches, *gathered, *batch_released;
    sl_ring *validated[TP], *released[TP];
    int bell; /* gather's */
    pid_t pid[TP];
    const char *binary;
    uint64_t batch_no, next[TP]; /* batches published; next chunk descriptor to read */
} w;

static void keep_fd(int fd) {
    fcntl(fd, F_SETFD, fcntl(fd, F_GETFD) & ~FD_CLOEXEC);
}

static void spawn(void) {
    for (int r = 0; r < TP; r++) {
        w.pid[r] = fork();
        if (w.pid[r]) continue;
        char fd[16], proc[16];
        snprintf(fd, sizeof fd, "%d", w.boot_fd);
        snprintf(proc, sizeof proc, "%d", 4 + r);
        execl(w.binary, w.binary, "--boot", fd, "--proc", proc, (char *)NULL);
        _exit(127);
    }
}

static void build(const char *model, uint32_t fault, uint32_t fault_batch, const char *crash) {
    sl_err err = {0};
    memset(&w.boot, 0, sizeof w.boot);
    w.batch_no = 0;
    memset(w.next, 0, sizeof w.next);
    sl_boot *b = &w.boot;
    b->run_id = 1;
    b->dp = 1, b->tp = TP, b->n_procs = 4 + TP;
    const char *names[] = {"sluiced", "feeder", "gather", "writer", "rank0.0", "rank0.1"};
    sl_role roles[] = {SL_ROLE_SLUICED, SL_ROLE_FEEDER, SL_ROLE_GATHER, SL_ROLE_WRITER, SL_ROLE_RANK, SL_ROLE_RANK};
    for (uint32_t i = 0; i < b->n_procs; i++) {
        b->procs[i] = (sl_boot_proc){.role = roles[i], .rank = i >= 4 ? i - 4 : 0};
        snprintf(b->procs[i].name, sizeof b->procs[i].name, "%s", names[i]);
        MUST(b->procs[i].bell_fd = sl_bell_create(&err));
        keep_fd(b->procs[i].bell_fd);
    }
    w.bell = b->procs[2].bell_fd;
    uint64_t slot = (sl_batch_bytes(MAX_ROWS, (uint32_t)g.tokens, 4096) + 4095) / 4096 * 4096;
    uint64_t chunk = ((uint64_t)CHUNK * (uint64_t)g.H * 4 + 4095) / 4096 * 4096;
    sl_ring_params bp = {
        .name = "batch.0", .depth = 8, .pay_slots = 8, .pay_size = slot, .n_cursors = SL_BATCH_CURSORS};
    sl_ring_params cp = {
        .name = "chunk.0", .depth = 64, .pay_slots = 8, .pay_size = chunk, .n_cursors = SL_CHUNK_CURSORS};
    sl_ring_params sp = {.name = "sample.0", .depth = 64, .n_cursors = SL_SAMPLE_CURSORS};
    bool huge;
    sl_boot_group *gr = &b->groups[0];
    MUST(gr->batch_fd = sl_ring_create(&bp, false, &huge, &err));
    MUST(gr->sample_fd = sl_ring_create(&sp, false, &huge, &err));
    for (int r = 0; r < TP; r++) MUST(gr->chunk_fd[r] = sl_ring_create(&cp, false, &huge, &err));
    int region = -1;
    MUST(region = sl_coll_shm_create_region(TP, 1 << 14, &err));
    gr->coll_fd = region;
    gr->first_rank_proc = 4;
    MUST(b->metrics_fd = sl_metrics_create(b->n_procs, &err));
    MUST(b->ctl_fd = sl_ctl_create(1, &err));
    snprintf(b->model, sizeof b->model, "%s", model);
    snprintf(b->store, sizeof b->store, "%s", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    snprintf(b->crash_points, sizeof b->crash_points, "%s", crash);
    b->precision = SL_PREC_F32, b->threads = 1;
    b->n_layers = (uint32_t)g.n, b->width = (uint32_t)g.H, b->elem_size = 4, b->chunk_rows = CHUNK;
    b->n_captures = (uint32_t)g.n + 2;
    for (uint32_t k = 0; k < b->n_captures; k++)
        b->captures[k] = (sl_capture){.hidx = k > (uint32_t)g.n ? (uint32_t)g.n : k, .final_norm = k > (uint32_t)g.n};
    b->batch_tokens = b->max_length = (uint32_t)g.tokens, b->max_batch_rows = MAX_ROWS, b->nll_every = 1;
    b->log_level = 3; /* errors: what it provokes is not worth reading */
    b->fault = fault, b->fault_rank = 1, b->fault_batch = fault_batch;
    snprintf(b->template_args, sizeof b->template_args, "{}");
    b->vocab = (uint32_t)g.vocab;
}

static void open_all(void) {
    sl_err err = {0};
    sl_boot *b = &w.boot;
    sl_boot_group *gr = &b->groups[0];
    MUST(w.boot_fd = sl_boot_create(b, &err));
    int fds[] = {w.boot_fd,       gr->batch_fd,    gr->sample_fd, gr->coll_fd,
                 gr->chunk_fd[0], gr->chunk_fd[1], b->metrics_fd, b->ctl_fd};
    for (unsigned i = 0; i < sizeof fds / sizeof *fds; i++) keep_fd(fds[i]);
    MUST(sl_ctl_attach(&w.ctl, b->ctl_fd, 1, 1, &err));
    MUST(sl_metrics_attach(&w.feeder, b->metrics_fd, 1, &err));
    MUST(sl_ring_attach(&w.batches, gr->batch_fd, SL_RING_PRODUCER, &err));
    MUST(sl_ring_attach(&w.gathered, gr->batch_fd, SL_BATCH_GATHERED, &err));
    MUST(sl_ring_attach(&w.batch_released, gr->batch_fd, SL_BATCH_RELEASED, &err));
    for (int r = 0; r < TP; r++) {
        MUST(sl_ring_attach(&w.validated[r], gr->chunk_fd[r], SL_CHUNK_VALIDATED, &err));
        MUST(sl_ring_attach(&w.released[r], gr->chunk_fd[r], SL_CHUNK_RELEASED, &err));
    }
    atomic_store(&w.ctl[1].epoch, 1);
}

static void close_all(void) {
    sl_ring_detach(w.batches), sl_ring_detach(w.gathered), sl_ring_detach(w.batch_released);
    for (int r = 0; r < TP; r++) sl_ring_detach(w.validated[r]), sl_ring_detach(w.released[r]);
    sl_metrics_detach(w.feeder);
    sl_boot_group *gr = &w.boot.groups[0];
    int fds[] = {w.boot_fd,       gr->batch_fd,    gr->sample_fd,     gr->coll_fd,
                 gr->chunk_fd[0], gr->chunk_fd[1], w.boot.metrics_fd, w.boot.ctl_fd};
    for (unsigned i = 0; i < sizeof fds / sizeof *fds; i++) close(fds[i]);
    for (uint32_t i = 0; i < w.boot.n_procs; i++) close(w.boot.procs[i].bell_fd);
}

static void publish_batch(void) {
    uint8_t *p = sl_ring_pay_next(w.batches);
    sl_batch_row *rows = (sl_batch_row *)p;
    uint64_t bytes = sl_batch_bytes((uint32_t)g.rows, (uint32_t)g.tokens, 0);
    memset(p, 0, bytes);
    uint32_t at = 0;
    for (int r = 0; r < g.rows; at += (uint32_t)g.T[r++])
        rows[r] = (sl_batch_row){.seq = (uint64_t)r,
                                 .t0 = at,
                                 .T = (uint32_t)g.T[r],
                                 .flags = r % 2 ? 0 : SL_ROW_NLL,
                                 .id_off = (uint32_t)bytes};
    memcpy(p + (size_t)g.rows * sizeof *rows, g.ids, (size_t)g.tokens * 4);
    sl_desc_input *d = (sl_desc_input *)sl_ring_stage(w.batches, 1);
    d->h.kind = SL_DESC_INPUT;
    d->batch_no = w.batch_no++;
    d->bytes = bytes;
    d->n_rows = (uint32_t)g.rows;
    d->n_tokens = (uint32_t)g.tokens;
    d->crc = sl_crc32c(0, p, bytes);
    sl_ring_publish(w.batches);
    for (int r = 0; r < TP; r++) sl_bell_ring(w.boot.procs[4 + r].bell_fd);
}

/* The next descriptor of rank r, or NULL when none came in 20 s or the ring stays empty after a death. */
static const sl_desc *next_desc(int r, int wait_ms) {
    for (int i = 0;; i++) {
        sl_bell_drain(w.bell);
        if (w.next[r] < sl_ring_pos(w.validated[r], SL_CHUNK_PUBLISHED)) return sl_ring_at(w.validated[r], w.next[r]);
        if (i * 20 >= wait_ms) return NULL;
        struct pollfd p[1];
        sl_bell_wait(w.bell, p, 1, 20);
    }
}

static void pass(int r) { /* validated and released at once: this test is gather and writer */
    sl_err err = {0};
    w.next[r]++;
    MUST(sl_ring_advance(w.validated[r], w.next[r], &err));
    MUST(sl_ring_advance(w.released[r], w.next[r], &err));
    sl_bell_ring(w.boot.procs[4 + r].bell_fd);
}

static double distance(const float *x, uint32_t k, uint32_t c, uint32_t rows) {
    const float *ref = g.all + ((int64_t)k * g.tokens + (int64_t)c * CHUNK) * g.H;
    double num = 0, den = 0;
    for (int64_t i = 0; i < (int64_t)rows * g.H; i++) {
        double d = (double)x[i] - (double)ref[i];
        num += d * d, den += (double)ref[i] * (double)ref[i];
    }
    return sqrt(num / fmax(den, 1e-30));
}

/* One chunk of both ranks. `tally` counts what is not as it should be: [0] shape or label, [1] no payload where there
 * should be, [2] payload is not its fingerprint, [3] ranks disagree, [4] nonfinite, [5] states are not the golden ones.
 */
static void take_chunk(uint64_t bpos, uint32_t epoch, uint32_t k, uint32_t c, int tally[6]) {
    uint32_t left = (uint32_t)g.tokens - c * CHUNK, rows = left < CHUNK ? left : CHUNK;
    uint64_t sum[TP] = {0};
    for (int r = 0; r < TP; r++) {
        const sl_desc_chunk *d = (const sl_desc_chunk *)next_desc(r, 20000);
        CHECK(d, "rank %d: no descriptor for state %u chunk %u", r, k, c);
        if (!d) exit(1);
        CHECK(d->h.kind == SL_DESC_CHUNK && d->h.epoch == epoch && d->bpos == bpos && d->k == k && d->c == c &&
                  d->rank == r && d->h.pos == w.next[r],
              "rank %d: kind %u epoch %u bpos %llu k %u c %u, expected state %u chunk %u of batch %llu", r, d->h.kind,
              d->h.epoch, (unsigned long long)d->bpos, d->k, d->c, k, c, (unsigned long long)bpos);
        tally[0] +=
            d->rows != rows || d->width != (uint32_t)g.H || d->hidx != (k > (uint32_t)g.n ? (uint32_t)g.n + 1 : k);
        tally[4] += d->nonfinite != 0;
        sum[r] = d->sum;
        const float *x = sl_ring_payload(w.validated[r], w.next[r]);
        int own = sl_chunk_owner(bpos, k, c, TP) == (uint32_t)r;
        tally[1] += own && !(x && d->h.flags & SL_CHUNK_PAYLOAD);
        CHECK(own || (!x && !(d->h.flags & SL_CHUNK_PAYLOAD)), "rank %d has payload for a chunk that is not its", r);
        if (own && x) {
            tally[2] += sl_sum64(x, (uint64_t)rows * (uint64_t)g.H * 4) != d->sum;
            tally[5] += !(distance(x, k, c, rows) <= 2e-5);
        }
        pass(r);
    }
    tally[3] += sum[0] != sum[1];
}

static int nll_high; /* rows above ln(vocab) so far */

static void take_rest(uint64_t bpos, uint64_t batch_no) {
    sl_err err = {0};
    for (int i = 0; i < g.rows; i++) {
        const sl_desc_row *d = (const sl_desc_row *)next_desc(0, 20000);
        CHECK(d && d->h.kind == SL_DESC_ROW && d->row == (uint32_t)i && d->T == g.T[i], "row %d", i);
        if (!d) exit(1);
        int64_t at = 0;
        for (int j = 0; j < i; j++) at += g.T[j];
        CHECK(d->token_sum == sl_sum64(g.ids + at, (uint64_t)g.T[i] * 4), "row %d: token sum", i);
        int nll = i % 2 == 0 && g.T[i] > 1;
        CHECK(nll ? d->nll > 0 && d->nll < 20 && d->nll_tokens == g.T[i] - 1 : d->nll != d->nll && !d->nll_tokens,
              "row %d: nll %g over %u", i, d->nll, d->nll_tokens);
        nll_high += d->nll > log((double)g.vocab);
        pass(0);
    }
    uint32_t chunks = (uint32_t)((g.tokens + CHUNK - 1) / CHUNK) * (uint32_t)(g.n + 2);
    for (int r = 0; r < TP; r++) {
        const sl_desc_end *d = (const sl_desc_end *)next_desc(r, 20000);
        CHECK(d && d->h.kind == SL_DESC_END && d->bpos == bpos && d->n_chunks == chunks && d->rank == r &&
                  d->batch_no == batch_no && d->busy_ns > 0,
              "rank %d: end", r);
        pass(r);
    }
    MUST(sl_ring_advance(w.gathered, bpos + 1, &err));
    MUST(sl_ring_advance(w.batch_released, bpos + 1, &err));
}

static void take_batch(uint64_t bpos, uint32_t epoch, uint64_t batch_no, int tally[6]) {
    uint32_t C = (uint32_t)((g.tokens + CHUNK - 1) / CHUNK);
    memset(tally, 0, 6 * sizeof *tally);
    for (uint32_t k = 0; k <= (uint32_t)g.n + 1; k++)
        for (uint32_t c = 0; c < C; c++) take_chunk(bpos, epoch, k, c, tally);
    take_rest(bpos, batch_no);
}

static void expect_clean(const int t[6], const char *what) {
    CHECK(!t[0] && !t[1] && !t[2] && !t[3] && !t[4] && !t[5],
          "%s: shape %d, missing %d, checksum %d, disagree %d, nonfinite %d, wrong %d", what, t[0], t[1], t[2], t[3],
          t[4], t[5]);
}

static void reap(int expect_code) {
    for (int r = 0; r < TP; r++) {
        int st = 0, ended = 0;
        for (int i = 0; i < 60000 && !ended; i++) {
            ended = waitpid(w.pid[r], &st, WNOHANG) == w.pid[r];
            if (!ended) nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
        }
        CHECK(ended, "rank %d has not ended", r);
        if (!ended) kill(w.pid[r], SIGKILL), waitpid(w.pid[r], NULL, 0);
        CHECK(!ended || (WIFEXITED(st) && WEXITSTATUS(st) == expect_code), "rank %d ended with status %x", r, st);
    }
}

static void drain_and_reap(void) {
    sl_metric_set(w.feeder, SL_M_STATE, SL_ST_DONE);
    atomic_store(&w.ctl[0].draining, 1);
    for (int r = 0; r < TP; r++) sl_bell_ring(w.boot.procs[4 + r].bell_fd);
    reap(0);
}

/* The states of the batch at position 0, of which `poison` rows were not run: the others are what they always are. */
static void take_isolated(uint32_t epoch, unsigned poison) {
    sl_err err = {0};
    uint32_t C = (uint32_t)((g.tokens + CHUNK - 1) / CHUNK);
    unsigned others = 0; /* rows with states that are not theirs */
    for (uint32_t k = 0; k <= (uint32_t)g.n + 1; k++)
        for (uint32_t c = 0; c < C; c++)
            for (int r = 0; r < TP; r++) {
                const sl_desc_chunk *d = (const sl_desc_chunk *)next_desc(r, 20000);
                if (!d) printf("FAIL: rank %d: no descriptor for state %u chunk %u\n", r, k, c), exit(1);
                CHECK(d->h.kind == SL_DESC_CHUNK && d->h.epoch == epoch && d->k == k && d->c == c, "state %u chunk %u",
                      k, c);
                const float *x = sl_ring_payload(w.validated[r], w.next[r]);
                for (uint32_t t = 0; x && t < d->rows; t++) {
                    int64_t at = (int64_t)c * CHUNK + t, end = 0;
                    int row = 0;
                    while ((end += g.T[row]) <= at) row++;
                    double num = 0, den = 0;
                    for (int i = 0; i < g.H; i++) {
                        double ref = (double)g.all[((int64_t)k * g.tokens + at) * g.H + i];
                        double diff = (double)x[(int64_t)t * g.H + i] - ref;
                        num += diff * diff, den += ref * ref;
                    }
                    if (num > den * 1e-8) others |= 1u << row;
                }
                pass(r);
            }
    for (int i = 0; i < g.rows; i++) {
        const sl_desc_row *d = (const sl_desc_row *)next_desc(0, 20000);
        CHECK(d && d->h.kind == SL_DESC_ROW && d->row == (uint32_t)i, "row %d", i);
        if (!d) exit(1);
        CHECK((others >> i & 1) == (poison >> i & 1), "row %d has %s states", i, others >> i & 1 ? "other" : "its own");
        int nll = i % 2 == 0 && g.T[i] > 1 && !(poison >> i & 1);
        CHECK(nll ? d->nll > 0 && d->nll_tokens == g.T[i] - 1 : d->nll != d->nll && !d->nll_tokens, "row %d: nll %g", i,
              d->nll);
        pass(0);
    }
    for (int r = 0; r < TP; r++) {
        const sl_desc *d = next_desc(r, 20000);
        CHECK(d && d->h.kind == SL_DESC_END, "rank %d: end", r);
        if (!d) exit(1);
        pass(r);
    }
    MUST(sl_ring_advance(w.gathered, 1, &err));
    MUST(sl_ring_advance(w.batch_released, 1, &err));
}

/* A batch that was there at two deaths: its rows run alone, a row that was named is left out, and the row that kills is
 * told. With that one named too the batch goes through, and its batch mates are what they always are. */
static void test_isolation(const char *model) {
    if (g.rows < 4) return;
    build(model, 0, 0, "rank.row.1:1,rank.row.2:1");
    open_all();
    atomic_store(&w.ctl[1].isolate_bpos, 1);
    atomic_store(&w.ctl[1].poison_rows[0], 1u << 1);
    publish_batch();
    publish_batch();
    spawn();
    for (int r = 0; r < TP; r++) {
        int st = 0;
        CHECK(waitpid(w.pid[r], &st, 0) == w.pid[r] && WIFSIGNALED(st), "rank %d ended with status %x", r, st);
        uint64_t at = sl_metric_get(w.feeder, 4 + (unsigned)r, SL_M_ROW_AT);
        CHECK(at == 3, "rank %d died at row %lld", r, (long long)at - 1);
        CHECK(!next_desc(r, 0), "rank %d published a row that ran alone", r);
    }
    atomic_store(&w.ctl[1].epoch, 2);
    atomic_store(&w.ctl[1].poison_rows[0], 1u << 1 | 1u << 2);
    spawn();
    take_isolated(2, 1u << 1 | 1u << 2);
    for (int r = 0; r < TP; r++) { /* the next batch is an ordinary one: it dies of the first row that kills */
        int st = 0;
        CHECK(waitpid(w.pid[r], &st, 0) == w.pid[r] && WIFSIGNALED(st), "rank %d ended with status %x", r, st);
        CHECK(sl_metric_get(w.feeder, 4 + (unsigned)r, SL_M_ROW_AT) == 0, "rank %d names a row", r);
    }
    close_all();
}

/* The run is being drained, and the feeder has rows yet: they are computed. */
static void test_rows_while_draining(const char *model) {
    build(model, 0, 0, "");
    open_all();
    spawn();
    int t[6];
    publish_batch();
    take_batch(0, 1, 0, t);
    atomic_store(&w.ctl[0].draining, 1);
    for (int r = 0; r < TP; r++) sl_bell_ring(w.boot.procs[4 + r].bell_fd);
    for (int r = 0; r < TP; r++)
        for (int i = 0; i < 2000 && sl_metric_get(w.feeder, 4 + (unsigned)r, SL_M_STATE) != SL_ST_DRAINING; i++)
            nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    publish_batch();
    take_batch(1, 1, 1, t);
    expect_clean(t, "while draining");
    drain_and_reap();
    close_all();
}

/* The teacher NLL needs the last layer's output: without it there is none, rather than that of another state. */
static void test_no_nll(const char *model) {
    build(model, 0, 0, "");
    w.boot.n_captures = 2; /* H[0] and H[1] */
    open_all();
    spawn();
    publish_batch();
    int rows = 0, ended = 0;
    for (int turn = 0; ended < TP; turn++) { /* both in turn: neither gets on without the other */
        const sl_desc *d = next_desc(turn % TP, 10);
        if (turn > 20000) printf("FAIL: the batch does not end\n"), exit(1);
        if (!d) continue;
        const sl_desc_row *x = (const sl_desc_row *)d;
        if (d->h.kind == SL_DESC_ROW) {
            rows++;
            CHECK(x->nll != x->nll && !x->nll_tokens, "row %u: nll %g over %u", x->row, x->nll, x->nll_tokens);
        }
        ended += d->h.kind == SL_DESC_END;
        pass(turn % TP);
    }
    CHECK(rows == g.rows, "%d rows", rows);
    drain_and_reap();
    close_all();
}

/* What this rank was promised and does not find ends it before anything is computed or written. */
static void test_broken_promises(const char *model) {
    for (int i = 0; i < 3; i++) {
        build(model, 0, 0, "");
        if (i == 0) w.boot.elem_size = 2;
        if (i == 1) w.boot.vocab++;
        if (i == 2) w.boot.max_batch_rows = (uint32_t)g.rows - 1;
        open_all();
        spawn();
        publish_batch();
        reap(70);
        for (int r = 0; r < TP; r++) CHECK(!next_desc(r, 0), "case %d: rank %d has published something", i, r);
        close_all();
    }
}

static void test_flow(const char *model) {
    build(model, 0, 0, "");
    w.boot.max_length = 0; /* a batch is longer than the longest row of it */
    for (int r = 0; r < g.rows; r++)
        if (g.T[r] > w.boot.max_length) w.boot.max_length = (uint32_t)g.T[r];
    open_all();
    spawn();
    int t[6];
    for (uint64_t i = 0; i < 3; i++) publish_batch();
    for (uint64_t i = 0; i < 3; i++) {
        take_batch(i, 1, i, t);
        expect_clean(t, "flow");
    }
    drain_and_reap();
    uint64_t in = sl_metric_get(w.feeder, 4, SL_M_ROWS_IN), out = sl_metric_get(w.feeder, 4, SL_M_ROWS_OUT);
    CHECK(in == 3u * (uint64_t)g.rows && out == in, "rank 0 counted %llu rows in, %llu out", (unsigned long long)in,
          (unsigned long long)out);
    /* Rows above ln(vocab) are told of, the first one and then each time there are twice as many. */
    uint64_t said = 0, warned = sl_metric_get(w.feeder, 4, SL_M_WARNINGS);
    for (int high = nll_high; high; high /= 2) said++;
    CHECK(warned == said, "rank 0 warned %llu times of %d rows above ln(vocab)", (unsigned long long)warned, nll_high);
    uint64_t bytes = sl_metric_get(w.feeder, 4, SL_M_BYTES_RAW) + sl_metric_get(w.feeder, 5, SL_M_BYTES_RAW);
    CHECK(bytes == 3u * (uint64_t)(g.n + 2) * (uint64_t)(g.tokens * g.H) * 4, "ranks exported %llu bytes",
          (unsigned long long)bytes);
    close_all();
}

/* Both ranks die in the middle of batch 1; the next life starts at the cursor "gathered", with another epoch. */
static void test_restart(const char *model) {
    build(model, 0, 0, "");
    open_all();
    spawn();
    int t[6];
    for (uint64_t i = 0; i < 3; i++) publish_batch();
    take_batch(0, 1, 0, t);
    expect_clean(t, "before the kill");
    memset(t, 0, sizeof t);
    take_chunk(1, 1, 0, 0, t);
    for (int r = 0; r < TP; r++) kill(w.pid[r], SIGKILL);
    for (int r = 0; r < TP; r++) waitpid(w.pid[r], NULL, 0);
    atomic_store(&w.ctl[1].epoch, 2);
    for (int r = 0; r < TP; r++) /* the dead life's chunks are swept */
        while (next_desc(r, 0)) pass(r);
    spawn();
    for (uint64_t i = 1; i < 3; i++) {
        take_batch(i, 2, i, t);
        expect_clean(t, "after the restart");
    }
    atomic_store(&w.ctl[1].epoch, 3); /* superseded: they end quietly */
    for (int r = 0; r < TP; r++) sl_bell_ring(w.boot.procs[4 + r].bell_fd);
    reap(0);
    close_all();
}

static void test_fault(const char *model, sl_fault f) {
    build(model, f, 1, "");
    open_all();
    spawn();
    int t[6];
    for (uint64_t i = 0; i < 3; i++) publish_batch();
    take_batch(0, 1, 0, t);
    expect_clean(t, "before the fault");
    take_batch(1, 1, 1, t);
    int shape = f == SL_FAULT_FLATTEN || f == SL_FAULT_LOST_DIM || f == SL_FAULT_LAYERS_SWAPPED;
    int disagree = f == SL_FAULT_LAYERS_SWAPPED || f == SL_FAULT_DIVERGE;
    int wrong = f == SL_FAULT_WRONG_PLACE || f == SL_FAULT_WRONG_OFFSET || f == SL_FAULT_NAN || f == SL_FAULT_ZEROS ||
                f == SL_FAULT_DIVERGE || f == SL_FAULT_LAYERS_SWAPPED;
    CHECK(!t[0] == !shape, "%s: %d chunks of another shape or label", sl_fault_name(f), t[0]);
    CHECK(!t[1] == (f != SL_FAULT_MISSING_SHARD), "%s: %d chunks missing", sl_fault_name(f), t[1]);
    CHECK(!t[2] == (f != SL_FAULT_WRONG_PLACE && f != SL_FAULT_WRONG_OFFSET), "%s: %d wrong checksums",
          sl_fault_name(f), t[2]);
    CHECK(!t[3] == !disagree, "%s: ranks disagree on %d chunks", sl_fault_name(f), t[3]);
    CHECK(t[4] == (f == SL_FAULT_NAN ? TP : 0), "%s: %d chunks not finite", sl_fault_name(f), t[4]);
    CHECK(!t[5] == !wrong, "%s: %d chunks of wrong states", sl_fault_name(f), t[5]);
    take_batch(2, 1, 2, t);
    expect_clean(t, "after the fault");
    drain_and_reap();
    close_all();
}

int main(int argc, char **argv) {
    if (argc != 3) return fprintf(stderr, "usage: test_rank SLUICE_COMPUTE GOLDEN/FAMILY\n"), 2;
    w.binary = argv[1];
    if (load_golden(argv[2])) return printf("SKIP: no golden states in %s\n", argv[2]), 77;
    char config[1024];
    snprintf(config, sizeof config, "%s/config.json", argv[2]);
    json_t *j = json_load_file(config, 0, NULL);
    g.vocab = (int)json_integer_value(json_object_get(j, "vocab_size"));
    json_decref(j);
    signal(SIGPIPE, SIG_IGN);
    alarm(900);
    test_flow(argv[2]);
    test_restart(argv[2]);
    test_rows_while_draining(argv[2]);
    test_broken_promises(argv[2]);
    test_isolation(argv[2]);
    test_no_nll(argv[2]);
    for (sl_fault f = SL_FAULT_FLATTEN; f < SL_FAULT_N; f++) test_fault(argv[2], f);
    printf("rank: %s\n", failures ? "FAILED" : "OK");
    return failures ? 1 : 0;
}
