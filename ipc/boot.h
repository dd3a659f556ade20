/* boot: what a stage process is told. sluiced parses and checks the configuration once, builds all shared memory, and
 * hands every stage the same boot block in a sealed memfd (never text), plus on its command line only
 * `--boot FD --proc INDEX`. All fds are inherited at the numbers written here; each stage closes what its role does not
 * need. Fixed-size, magic, ABI and layout hash checked at attach. */
#ifndef SL_IPC_BOOT_H
#define SL_IPC_BOOT_H
#include "ipc/flow.h"
#include "ipc/metrics.h"
#include <stdatomic.h>

#define SL_MAX_GROUPS 64
#define SL_MAX_RANKS  64 /* ranks in all groups together */
#define SL_MAX_PROCS  (SL_MAX_RANKS + 8)
#define SL_PATH_MAX   1024
#define SL_BOOT_ABI   1

typedef enum { SL_ROLE_SLUICED, SL_ROLE_FEEDER, SL_ROLE_RANK, SL_ROLE_GATHER, SL_ROLE_WRITER, SL_ROLE_N } sl_role;
const char *sl_role_name(sl_role r);

typedef struct sl_boot_proc { /* one per process, index = metrics page; [0] is sluiced, [1] feeder, [2] gather, [3]
                                 writer, [4..] ranks */
    uint32_t role;            /* sl_role */
    uint32_t group;           /* ranks only */
    uint32_t rank;            /* rank within the group */
    int32_t bell_fd;
    char name[32]; /* "feeder", "rank0.3" (group.rank), "gather", "writer" */
} sl_boot_proc;

typedef struct sl_boot_group {
    int32_t batch_fd, sample_fd;    /* rings */
    int32_t coll_fd;                /* shared memory of the host collective (ranks only), -1 when N == 1 */
    uint32_t first_rank_proc;       /* index of rank 0 of this group in procs[]; ranks are consecutive */
    int32_t chunk_fd[SL_MAX_RANKS]; /* one per rank, [0..tp) */
} sl_boot_group;

typedef struct sl_capture {
    uint32_t hidx;       /* 0..n: residual stream after hidx layers */
    uint32_t final_norm; /* 1: the final norm of H[n] (hidx == n) */
} sl_capture;

typedef enum { SL_BACKEND_CPU, SL_BACKEND_CUDA } sl_backend_id;
typedef enum { SL_PREC_BF16, SL_PREC_F32 } sl_precision;
typedef enum { SL_LAYOUT_SHARDS, SL_LAYOUT_FILES } sl_layout;
typedef enum { SL_CODEC_NONE, SL_CODEC_ZSTD, SL_CODEC_BF16 } sl_codec;
typedef enum { SL_EXPERTS_AUTO, SL_EXPERTS_EP, SL_EXPERTS_TP } sl_expert_split;
/* How ranks on GPUs of their own add up (stages/compute/collective.h). */
typedef enum { SL_SUMS_BEST, SL_SUMS_NCCL, SL_SUMS_RING } sl_sums;

typedef struct sl_boot {
    uint64_t magic;       /* SL_BOOT_MAGIC */
    uint32_t abi, size;   /* SL_BOOT_ABI, sizeof(sl_boot) */
    uint64_t layout_hash; /* of the struct layouts in flow.h/boot.h: sl_boot_layout_hash() */
    uint64_t run_id;      /* random, one per life of sluiced */

    /* topology */
    uint32_t n_procs, dp, tp; /* dp groups of tp ranks */
    sl_boot_proc procs[SL_MAX_PROCS];
    sl_boot_group groups[SL_MAX_GROUPS];
    int32_t metrics_fd, ctl_fd; /* ctl_fd: sl_ctl below */

    /* model (checked by sluiced's preflight through stages/compute/spec.h) */
    char model[SL_PATH_MAX];                                   /* folder or .gguf file */
    uint32_t backend, precision, expert_split, random_weights; /* random_weights: 0 or 1 */
    uint64_t random_seed;
    uint32_t sums;                   /* sl_sums */
    uint32_t threads;                /* CPU threads a rank */
    uint32_t n_layers, width, vocab; /* n, H, vocabulary */
    uint32_t n_captures;
    sl_capture captures[SL_MAX_CAPTURES]; /* ascending hidx; the final-normed tensor last */
    uint32_t elem_size;                   /* bytes an element in the store: 2 (bf16) or 4 (f32) */
    uint32_t chunk_rows;                  /* tokens a chunk */
    uint32_t batch_tokens, max_batch_rows, max_length, micro_tokens;
    uint32_t nll_every;   /* teacher NLL on 1 row in this many (and always the first); 0 = never */
    double norm_eps_lora; /* eps of q_a/kv_a norms (MLA), 0 = default 1e-6 */

    /* feeder */
    char feed_addr[256];         /* ZeroMQ endpoint, ipc://... */
    char curve_dir[SL_PATH_MAX]; /* CURVE keys for tcp://, or "" */
    uint32_t feeder_threads, batch_wait_ms, credit_rows;
    uint32_t socket_gid1; /* 1 + the group that may use the sockets; 0: only this user */
    uint32_t overlong;    /* 0 truncate, 1 skip (reject TOO_LONG), 2 split */
    uint32_t min_supervised;
    uint32_t train_on;               /* 0 all-assistant, 1 last-assistant, 2 all */
    uint32_t per_turn;               /* 0 one row a conversation, 1 one row an assistant turn */
    uint32_t reasoning;              /* 0 keep-last, 1 template */
    char tokenizer[SL_PATH_MAX];     /* folder/file; "" = the model's */
    char chat_template[SL_PATH_MAX]; /* file; "" = the model's own */
    char template_args[2048];        /* JSON object of extra template arguments, "{}" */

    /* writer */
    char store[SL_PATH_MAX];
    uint32_t layout, codec, zstd_level, writer_threads;
    uint64_t shard_bytes, reserve_bytes;
    uint32_t commit_ms, commit_mb; /* group commit at the latest after this */
    uint32_t direct_io;            /* O_DIRECT wanted */
    char model_fingerprint[80];    /* hex, of config and tensor table */
    char tokenizer_hash[80], template_hash[80];

    char sock_progress[256], sock_control[256];
    uint32_t log_level;
    uint32_t fault; /* test only: sl_fault of ipc/faults.h, injected by rank `fault_rank` at batch `fault_batch` */
    uint32_t fault_rank, fault_batch;
    char crash_points[512]; /* test only: "name:count,..." see ipc/crash.h */
} sl_boot;
#define SL_BOOT_MAGIC 0x31544f4f42454c53ull /* "SLEBOOT1" */

uint64_t sl_boot_layout_hash(void);
/* Sealed memfd holding *b (fills magic, abi, size, layout hash); fd or negative. */
int sl_boot_create(sl_boot *b, sl_err *err);
/* Map read-only and check; every index and string is bounds-checked here, so stages may trust the rest. */
int sl_boot_attach(const sl_boot **out, int fd, sl_err *err);
/* The checks of sl_boot_attach on a block in memory (the supervisor runs them before it starts anything). SL_EINTERNAL.
 */
int sl_boot_check(const sl_boot *b, sl_err *err);

#define SL_ISOLATE_ROWS 8192 /* a batch with more rows is not isolated */
/* ctl: one page a group plus one global, written by sluiced only. Stages read it each turn of their loop. */
typedef struct sl_ctl_page {
    _Atomic uint32_t
        epoch; /* groups: current epoch, starts at 1; bumped after every rank of the group has been reaped */
    _Atomic uint32_t draining; /* global page: 1 = finish what is accepted, then exit 0 */
    _Atomic uint32_t deaths;   /* groups: consecutive deaths without progress (a batch gathered) */
    _Atomic uint32_t suspect;  /* groups: 1 = two deaths without progress, until what was in flight then is gathered */
    _Atomic uint64_t poison_bpos; /* groups: bpos+1 of a batch of which every row is poison (daemon/supervise.h): gather
                                     publishes its rows with verdict POISON and moves on; 0 = none */
    /* groups: bpos+1 of a batch of several rows that was in flight at two deaths in a row, 0 = none. Its rows run one
     * by one first, and SL_M_ROW_AT says which; a row that kills the group twice so is poison. Both fields change only
     * while no rank of the group lives, so all ranks of an epoch see the same. */
    _Atomic uint64_t isolate_bpos;
    _Atomic uint64_t poison_rows[SL_ISOLATE_ROWS / 64]; /* bit per row of that batch: not run, rejected POISON */
    uint8_t pad[4096 - 32 - SL_ISOLATE_ROWS / 8];
} sl_ctl_page;
_Static_assert(sizeof(sl_ctl_page) == 4096, "");
/* Pages: [0] global, [1 + g] group g. */
int sl_ctl_create(unsigned n_groups, sl_err *err);
int sl_ctl_attach(sl_ctl_page **out, int fd, unsigned n_groups, int writable, sl_err *err);
/* Is this row of the batch at position bpos poison by itself? */
static inline bool sl_ctl_poison_row(const sl_ctl_page *ctl, uint64_t bpos, uint32_t row) {
    return row < SL_ISOLATE_ROWS && atomic_load_explicit(&ctl->isolate_bpos, memory_order_acquire) == bpos + 1 &&
           (atomic_load_explicit(&ctl->poison_rows[row / 64], memory_order_acquire) >> (row % 64) & 1);
}

/* Common start of every stage's main(): parses --boot/--proc, attaches boot, metrics, ctl, names the log, dies with the
 * parent (PR_SET_PDEATHSIG), blocks SIGINT, turns SIGTERM into nothing (drain comes through ctl). */
typedef struct sl_stage {
    const sl_boot *boot;
    const sl_boot_proc *me;
    unsigned proc;
    sl_metrics *metrics;
    sl_ctl_page *ctl; /* read-only */
    int bell;
} sl_stage;
int sl_stage_open(sl_stage *s, int argc, char **argv, sl_role expect, sl_err *err);
/* Last words: logs err at ERROR, sets state FAILED, returns the exit code for main. */
int sl_stage_fail(sl_stage *s, const sl_err *err);
#endif
