/* config: the settings of one sluiced, read from an INI file, strictly.
 *
 *     [store]
 *     path = /data/states        ; comment after a semicolon that follows a blank
 *     shard_size = 4GiB          ; bytes: plain, KiB MiB GiB TiB (powers of 1024), kB MB GB TB (powers of 1000)
 *     commit_time = 500ms        ; times: ms s m h (plain = seconds)
 *
 * ONE table of keys {section, key, type, range, unit, default, comment, offset} drives parsing, --print-default-config,
 * the written-out effective configuration and the docs. Every setting of the boot block (ipc/boot.h) has a key and
 * lands there directly; what only sluiced needs is behind it. Values left at 0 / "" that mean "choose" are resolved by
 * preflight.
 *
 * Errors are SL_ECONFIG with file:line, what was found and what is allowed: an unknown section or key (with the nearest
 * known one), a key given twice, a value of the wrong kind or out of range, a NUL byte, a line that is no key = value.
 */
#ifndef SL_DAEMON_CONFIG_H
#define SL_DAEMON_CONFIG_H
#include "ipc/boot.h"
#include <stdio.h>
#include <stdbool.h>

typedef enum { SL_FINAL_PRE, SL_FINAL_POST, SL_FINAL_BOTH } sl_final;
typedef enum { SL_BACKEND_AUTO = 2 } sl_backend_auto; /* cfg.backend beside sl_backend_id */

typedef struct sl_config {
    sl_boot boot;          /* filled in place; dp, tp, threads, chunk_rows, socket names may be 0 / "" = choose */
    uint32_t backend;      /* sl_backend_id or SL_BACKEND_AUTO; boot.backend is set by preflight */
    char layers[512];      /* --layers text of stages/compute/spec.h */
    uint32_t final;        /* sl_final */
    uint32_t batch_depth;  /* batches in flight a group */
    uint64_t ring_bytes;   /* chunk ring payload a rank, 0 = choose */
    uint32_t hugepages;    /* 0 no, 1 when the pool has room */
    uint64_t memory_limit; /* bytes the plan may use, 0 = what is available */
    char run_dir[SL_PATH_MAX];
    bool run_dir_made; /* by sl_preflight_sockets */
    char socket_group[64];
    char stage_dir[SL_PATH_MAX]; /* where the stage programs are, "" = beside sluiced */
    uint32_t pin_cpus;
    uint32_t watchdog_ms, watchdog_load_ms, watchdog_rank_ms;
    uint32_t backoff_min_ms, backoff_max_ms;
    uint32_t restart_budget, restart_window_ms, poison_deaths;
    uint32_t status_ms;
    uint64_t expect_tokens; /* forecast of the whole run, 0 = unknown: disk estimate and ETA */
    bool set[160];          /* which rows of the table were given (index = table row) */
    int line[160];
} sl_config;

typedef enum {
    SL_KEY_STR,
    SL_KEY_U32,
    SL_KEY_U64,
    SL_KEY_SIZE, /* uint64_t bytes */
    SL_KEY_MIB,  /* uint32_t MiB, written as a size */
    SL_KEY_MS,   /* uint32_t milliseconds */
    SL_KEY_BOOL,
    SL_KEY_DOUBLE,
    SL_KEY_CHOICE /* uint32_t, index of the word in `unit` */
} sl_key_type;

typedef struct sl_config_key {
    const char *section, *key;
    sl_key_type type;
    double min, max;  /* numbers (bytes, ms) */
    const char *unit; /* shown in the default file; CHOICE: words separated by | */
    const char *def;  /* as text */
    const char *comment;
    size_t offset, size; /* in sl_config */
} sl_config_key;
const sl_config_key *sl_config_keys(int *n);

void sl_config_default(sl_config *c);
/* Read a file, or text in memory (`name` stands for the file in messages). On top of what *c holds. */
int sl_config_read(sl_config *c, const char *path, sl_err *err);
int sl_config_parse(sl_config *c, const char *name, const char *text, size_t len, sl_err *err);
/* "section.key=value"; may be repeated, the last one wins. */
int sl_config_set(sl_config *c, const char *assignment, sl_err *err);
/* What must be given (model.path, store.path) and what must agree (max_length <= what a batch can hold, ...). */
int sl_config_check(const sl_config *c, sl_err *err);
/* The table with every comment. values NULL: the defaults, commented out where they mean "choose"; else the values of
 * *c, which parse back to the same configuration. */
void sl_config_print(const sl_config *values, FILE *f);
#endif
