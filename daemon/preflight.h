/* preflight: everything that can be known before a process is started. It turns a configuration into a complete boot
 * block (model read, captures resolved, groups and ranks chosen, chunk and ring sizes set), prints what the run will
 * need, and refuses with the arithmetic what cannot work. Two parts:
 *
 *   resolve  choices and the memory plan: any failure is final (SL_ECONFIG, exit 78)
 *   checks   one row a property of the machine (limits, kernel, file system, sockets): a state, a sentence that says
 *            what was found, and a remedy. FAIL stops sluiced; WARN is logged and the run goes on slower. */
#ifndef SL_DAEMON_PREFLIGHT_H
#define SL_DAEMON_PREFLIGHT_H
#include "daemon/topology.h"
#include "stages/compute/weights.h"

/* What to do about keys of config.json that no family table knows (sl_spec.unknown): a WARNING, not a refusal. */
#define SL_UNKNOWN_KEYS_REMEDY "make sure that none of them changes the model's arithmetic"

typedef struct sl_preflight {
    sl_spec *spec;       /* owned */
    sl_model_plan model; /* one rank's share */
    sl_topo_need need;
    uint64_t rank_weights, rank_workspace;  /* bytes a rank; workspace is an estimate from above */
    uint64_t rings;                         /* all shared memory */
    uint64_t feeder, gather, writer, index; /* index: of the open shard, a part of writer */
    uint64_t total,
        available;        /* bytes of host memory; available: MemAvailable and the cgroup's limit, or memory.limit */
    uint64_t token_bytes; /* raw bytes of states a token */
    bool on_host;         /* weights and workspace count against host memory (cpu backend) */
    char notes[1024];     /* choices that were made, one sentence a line */
} sl_preflight;

/* Fill c->boot and the topology. SL_ECONFIG with what, where and what to do. */
int sl_preflight_resolve(sl_preflight *p, sl_config *c, sl_topo *t, sl_err *err);
void sl_preflight_free(sl_preflight *p);
/* The plan as text: model, captures, parallel layout, batch and ring arithmetic, memory by process, disk estimate. */
void sl_preflight_print(const sl_preflight *p, const sl_config *c, FILE *f);
/* With the sum when the plan does not fit: SL_ECONFIG into what is allowed or what the machine has, SL_ETEMP into what
 * others leave of it just now. */
int sl_preflight_memory(const sl_preflight *p, const sl_config *c, sl_err *err);

typedef enum { SL_CHECK_OK, SL_CHECK_WARN, SL_CHECK_FAIL, SL_CHECK_SKIP } sl_check_state;
typedef struct sl_check {
    const char *name;
    sl_check_state state;
    char found[512];
    char remedy[512]; /* "" when OK */
} sl_check;
/* Run all checks on what is configured (checks about an empty setting are SKIP). Returns how many were written. */
int sl_preflight_checks(const sl_config *c, sl_check *out, int max);
const char *sl_check_state_name(sl_check_state s);

/* Bytes this process group may still allocate: the smaller of MemAvailable and what its cgroup allows, pages of files
 * not counted as used; 0 = unknown. */
uint64_t sl_memory_available(void);
/* Disk bytes expected for `tokens`: raw, and after the codec (a conservative ratio). */
uint64_t sl_preflight_disk(const sl_preflight *p, const sl_config *c, uint64_t tokens);
/* Run folder and socket names where the configuration left them empty; makes the folder (0700). Checks the length that
 * the kernel allows for a socket path (107 bytes). */
int sl_preflight_sockets(sl_config *c, sl_err *err);
#endif
