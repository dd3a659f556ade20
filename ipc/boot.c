#include "ipc/boot.h"
#include "ipc/memfd.h"
#include <errno.h>
#include <math.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_FD 65536

const char *sl_role_name(sl_role r) {
    static const char *const names[] = {"sluiced", "feeder", "rank", "gather", "writer"};
    _Static_assert(sizeof names / sizeof *names == SL_ROLE_N, "one name a role");
    return (unsigned)r < SL_ROLE_N ? names[r] : "?";
}

#define F(T, f) offsetof(T, f)
uint64_t sl_boot_layout_hash(void) {
    const uint64_t v[] = {SL_BOOT_ABI,
                          SL_MAX_GROUPS,
                          SL_MAX_RANKS,
                          SL_MAX_CAPTURES,
                          SL_ROLE_N,
                          SL_V_N,
                          SL_M_N,
                          SL_M_REJECT_BASE,
                          sizeof(sl_boot),
                          sizeof(sl_boot_proc),
                          sizeof(sl_boot_group),
                          sizeof(sl_capture),
                          sizeof(sl_ctl_page),
                          F(sl_boot_group, first_rank_proc),
                          F(sl_boot_group, chunk_fd),
                          F(sl_boot, procs),
                          F(sl_boot, groups),
                          F(sl_boot, model),
                          F(sl_boot, backend),
                          F(sl_boot, random_seed),
                          F(sl_boot, threads),
                          F(sl_boot, n_captures),
                          F(sl_boot, captures),
                          F(sl_boot, elem_size),
                          F(sl_boot, chunk_rows),
                          F(sl_boot, batch_tokens),
                          F(sl_boot, nll_every),
                          F(sl_boot, norm_eps_lora),
                          F(sl_boot, feed_addr),
                          F(sl_boot, socket_gid1),
                          F(sl_boot, overlong),
                          F(sl_boot, reasoning),
                          F(sl_boot, tokenizer),
                          F(sl_boot, store),
                          F(sl_boot, layout),
                          F(sl_boot, shard_bytes),
                          F(sl_boot, direct_io),
                          F(sl_boot, model_fingerprint),
                          F(sl_boot, sock_control),
                          F(sl_boot, log_level),
                          F(sl_boot, fault_batch),
                          F(sl_boot, crash_points),
                          F(sl_ctl_page, draining),
                          F(sl_ctl_page, poison_bpos),
                          sizeof(sl_desc_input),
                          F(sl_desc_input, batch_no),
                          F(sl_desc_input, n_rows),
                          F(sl_desc_input, crc),
                          sizeof(sl_batch_row),
                          F(sl_batch_row, t0),
                          F(sl_batch_row, id_off),
                          F(sl_batch_row, key),
                          F(sl_batch_row, mask_sum),
                          sizeof(sl_desc_chunk),
                          F(sl_desc_chunk, k),
                          F(sl_desc_chunk, c),
                          F(sl_desc_chunk, width),
                          F(sl_desc_chunk, hidx),
                          F(sl_desc_chunk, sum),
                          F(sl_desc_row, token_sum),
                          F(sl_desc_row, nll),
                          F(sl_desc_end, n_chunks),
                          F(sl_desc_end, batch_no),
                          F(sl_desc_batch, batch_no),
                          F(sl_desc_batch, rejected),
                          F(sl_desc_sample, verdict),
                          F(sl_desc_sample, token),
                          F(sl_desc_sample, nll),
                          F(sl_desc_sample, detail)};
    uint64_t h = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < sizeof v / sizeof *v; i++) h = (h ^ v[i]) * 0x100000001b3ull;
    return h;
}
#undef F

int sl_boot_create(sl_boot *b, sl_err *err) {
    b->magic = SL_BOOT_MAGIC;
    b->abi = SL_BOOT_ABI;
    b->size = sizeof *b;
    b->layout_hash = sl_boot_layout_hash();
    return sl_memfd_create("boot", (sizeof *b + 4095) / 4096 * 4096, false, b, sizeof *b, true, err);
}

/* ---- checks ---- */
static int bad(sl_err *err, const char *what, long long found, long long lo, long long hi) {
    return sl_err_set(err, SL_EINTERNAL, "boot: %s is %lld, expected %lld..%lld", what, found, lo, hi);
}

static int check_fd(int32_t fd, int32_t lo, const char *what, sl_err *err) {
    return fd < lo || fd >= MAX_FD ? bad(err, what, fd, lo, MAX_FD - 1) : 0;
}

static int check_procs(const sl_boot *b, sl_err *err) {
    static const uint32_t fixed[] = {SL_ROLE_SLUICED, SL_ROLE_FEEDER, SL_ROLE_GATHER, SL_ROLE_WRITER};
    if (b->dp < 1 || b->dp > SL_MAX_GROUPS) return bad(err, "dp", b->dp, 1, SL_MAX_GROUPS);
    if (b->tp < 1 || b->tp > SL_MAX_RANKS / b->dp) return bad(err, "tp", b->tp, 1, SL_MAX_RANKS / b->dp);
    if (b->n_procs != 4 + b->dp * b->tp) return bad(err, "n_procs", b->n_procs, 4 + b->dp * b->tp, 4 + b->dp * b->tp);
    for (uint32_t i = 0; i < b->n_procs; i++) {
        const sl_boot_proc *p = &b->procs[i];
        uint32_t role = i < 4 ? fixed[i] : SL_ROLE_RANK;
        if (p->role != role) return bad(err, "a process's role", p->role, role, role);
        if (i >= 4 && (p->group != (i - 4) / b->tp || p->rank != (i - 4) % b->tp))
            return sl_err_set(err, SL_EINTERNAL, "boot: process %u is rank %u.%u, expected %u.%u", i, p->group, p->rank,
                              (i - 4) / b->tp, (i - 4) % b->tp);
        if (!memchr(p->name, 0, sizeof p->name))
            return sl_err_set(err, SL_EINTERNAL, "boot: process %u: name has no end", i);
        if (check_fd(p->bell_fd, 0, "a bell fd", err)) return SL_EINTERNAL;
    }
    return 0;
}

static int check_groups(const sl_boot *b, sl_err *err) {
    for (uint32_t g = 0; g < b->dp; g++) {
        const sl_boot_group *gr = &b->groups[g];
        uint32_t first = 4 + g * b->tp;
        if (gr->first_rank_proc != first) return bad(err, "first_rank_proc", gr->first_rank_proc, first, first);
        if (check_fd(gr->batch_fd, 0, "a batch ring fd", err) || check_fd(gr->sample_fd, 0, "a sample ring fd", err) ||
            check_fd(gr->coll_fd, -1, "a collective fd", err))
            return SL_EINTERNAL;
        for (uint32_t r = 0; r < b->tp; r++)
            if (check_fd(gr->chunk_fd[r], 0, "a chunk ring fd", err)) return SL_EINTERNAL;
    }
    if (check_fd(b->metrics_fd, 0, "metrics_fd", err) || check_fd(b->ctl_fd, 0, "ctl_fd", err)) return SL_EINTERNAL;
    return 0;
}

static int check_numbers(const sl_boot *b, sl_err *err) {
    const struct {
        const char *name;
        uint32_t v, lo, hi;
    } n[] = {
        {"backend", b->backend, 0, SL_BACKEND_CUDA},
        {"precision", b->precision, 0, SL_PREC_F32},
        {"expert_split", b->expert_split, 0, SL_EXPERTS_TP},
        {"random_weights", b->random_weights, 0, 1},
        {"sums", b->sums, 0, SL_SUMS_RING},
        {"threads", b->threads, 0, 4096},
        {"n_layers", b->n_layers, 1, 65534},
        {"width", b->width, 1, 1u << 24},
        {"vocab", b->vocab, 1, 1u << 30},
        {"n_captures", b->n_captures, 1, SL_MAX_CAPTURES},
        {"elem_size", b->elem_size, 2, 4},
        {"chunk_rows", b->chunk_rows, 1, 1u << 24},
        {"batch_tokens", b->batch_tokens, 1, 1u << 28},
        {"max_batch_rows", b->max_batch_rows, 1, 1u << 24},
        {"max_length", b->max_length, 1, 1u << 28},
        {"overlong", b->overlong, 0, 2},
        {"train_on", b->train_on, 0, 2},
        {"per_turn", b->per_turn, 0, 1},
        {"reasoning", b->reasoning, 0, 1},
        {"layout", b->layout, 0, SL_LAYOUT_FILES},
        {"codec", b->codec, 0, SL_CODEC_BF16},
        {"direct_io", b->direct_io, 0, 1},
        {"log_level", b->log_level, 0, 3},
    };
    for (size_t i = 0; i < sizeof n / sizeof *n; i++)
        if (n[i].v < n[i].lo || n[i].v > n[i].hi) return bad(err, n[i].name, n[i].v, n[i].lo, n[i].hi);
    if (b->elem_size == 3) return bad(err, "elem_size (2 or 4)", 3, 2, 4);
    if (!isfinite(b->norm_eps_lora) || b->norm_eps_lora < 0)
        return sl_err_set(err, SL_EINTERNAL, "boot: norm_eps_lora is %g, expected >= 0", b->norm_eps_lora);
    for (uint32_t k = 0; k < b->n_captures; k++) {
        const sl_capture *c = &b->captures[k];
        bool last = k + 1 == b->n_captures,
             final_ok = !c->final_norm || (c->final_norm == 1 && last && c->hidx == b->n_layers);
        bool rises = !k || c->hidx > b->captures[k - 1].hidx || (c->final_norm && c->hidx == b->captures[k - 1].hidx);
        if (c->hidx > b->n_layers || !final_ok || !rises)
            return sl_err_set(
                err, SL_EINTERNAL,
                "boot: capture %u (H[%u]%s) is out of order or beyond layer %u: expected ascending indices, the "
                "final-normed tensor last",
                k, c->hidx, c->final_norm ? ", final norm" : "", b->n_layers);
    }
    return 0;
}

static int check_strings(const sl_boot *b, sl_err *err) {
    const struct {
        const char *name, *s;
        size_t n;
    } t[] = {
        {"model", b->model, sizeof b->model},
        {"feed_addr", b->feed_addr, sizeof b->feed_addr},
        {"curve_dir", b->curve_dir, sizeof b->curve_dir},
        {"tokenizer", b->tokenizer, sizeof b->tokenizer},
        {"chat_template", b->chat_template, sizeof b->chat_template},
        {"template_args", b->template_args, sizeof b->template_args},
        {"store", b->store, sizeof b->store},
        {"model_fingerprint", b->model_fingerprint, sizeof b->model_fingerprint},
        {"tokenizer_hash", b->tokenizer_hash, sizeof b->tokenizer_hash},
        {"template_hash", b->template_hash, sizeof b->template_hash},
        {"sock_progress", b->sock_progress, sizeof b->sock_progress},
        {"sock_control", b->sock_control, sizeof b->sock_control},
        {"crash_points", b->crash_points, sizeof b->crash_points},
    };
    for (size_t i = 0; i < sizeof t / sizeof *t; i++)
        if (!memchr(t[i].s, 0, t[i].n)) return sl_err_set(err, SL_EINTERNAL, "boot: string %s has no end", t[i].name);
    return 0;
}

int sl_boot_check(const sl_boot *b, sl_err *err) {
    if (b->magic != SL_BOOT_MAGIC)
        return sl_err_set(err, SL_EINTERNAL, "boot: magic %016llx: not a boot block", (unsigned long long)b->magic);
    if (b->abi != SL_BOOT_ABI || b->size != sizeof *b || b->layout_hash != sl_boot_layout_hash())
        return sl_err_set(
            err, SL_EINTERNAL,
            "boot: made by another version (ABI %u, %u bytes, layout %016llx; expected %u, %zu, %016llx): all "
            "binaries must come from one build",
            b->abi, b->size, (unsigned long long)b->layout_hash, SL_BOOT_ABI, sizeof *b,
            (unsigned long long)sl_boot_layout_hash());
    int rc = check_procs(b, err);
    if (!rc) rc = check_groups(b, err);
    if (!rc) rc = check_numbers(b, err);
    if (!rc) rc = check_strings(b, err);
    return rc;
}

int sl_boot_attach(const sl_boot **out, int fd, sl_err *err) {
    *out = NULL;
    uint64_t len = (sizeof(sl_boot) + 4095) / 4096 * 4096;
    int rc = sl_memfd_check(fd, "boot", len, true, NULL, err);
    if (rc) return rc;
    void *map = mmap(NULL, len, PROT_READ, MAP_SHARED, fd, 0);
    const sl_boot *b = map;
    if (map == MAP_FAILED) return sl_err_sys(err, SL_ETEMP, errno, "boot: map");
    if ((rc = sl_boot_check(b, err))) {
        munmap(map, len);
        return rc;
    }
    *out = b;
    return 0;
}

/* ---- ctl ---- */
int sl_ctl_create(unsigned n_groups, sl_err *err) {
    if (!n_groups || n_groups > SL_MAX_GROUPS)
        return sl_err_set(err, SL_ECONFIG, "ctl: %u groups, expected 1..%d", n_groups, SL_MAX_GROUPS);
    uint64_t bytes = (n_groups + 1) * sizeof(sl_ctl_page);
    int fd = sl_memfd_create("ctl", bytes, false, NULL, 0, false, err);
    sl_ctl_page *p;
    if (fd < 0) return fd;
    int rc = sl_ctl_attach(&p, fd, n_groups, 1, err);
    if (rc) {
        close(fd);
        return rc;
    }
    for (unsigned g = 1; g <= n_groups; g++) atomic_store_explicit(&p[g].epoch, 1, memory_order_release);
    munmap(p, bytes);
    return fd;
}

int sl_ctl_attach(sl_ctl_page **out, int fd, unsigned n_groups, int writable, sl_err *err) {
    *out = NULL;
    uint64_t bytes = (n_groups + 1) * sizeof(sl_ctl_page);
    int rc = sl_memfd_check(fd, "ctl", bytes, false, NULL, err);
    if (rc) return rc;
    void *p = mmap(NULL, bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) return sl_err_sys(err, SL_ETEMP, errno, "ctl: map");
    *out = p;
    return 0;
}
