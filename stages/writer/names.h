/* names: where things are in a store folder. Data set names come from outside; what they become as a folder is decided
 * here, once, for the writer, the readers and verify. */
#ifndef SL_WRITER_NAMES_H
#define SL_WRITER_NAMES_H
#include "ipc/journal.h"
#include <stddef.h>

/* Folder of a data set below hidden_states/ (and quarantine/): "" for data set 0; else the name with every byte but
 * letters, digits, '.', '_', '-' replaced by '_' (also a leading '.'), cut to 100 bytes and, when that changed it
 * or it begins as the name of a row's file does,
 * "~<index>" behind, so that two names never meet. cap >= 128. */
void sl_store_dataset_dir(char *buf, size_t cap, uint32_t dataset, const char *name);
/* "hs_<row>" or "hs_<row>.<part>", no suffix. cap >= 64. */
void sl_store_row_name(char *buf, size_t cap, uint64_t row, uint32_t part);
/* "shard-000000.sls" or "shard-000000.sls.open". cap >= 64. */
void sl_store_shard_name(char *buf, size_t cap, uint32_t shard, int open);
/* Parse a shard file name; 1 and *shard, *open when it is one. */
int sl_store_shard_parse(const char *name, uint32_t *shard, int *open);

/* Make a folder and those above it, from byte `from` of the path on; each name that is new is made durable. SL_ETEMP:
 * no room, or not synced; SL_ECONFIG: it cannot be made. */
int sl_store_folder_make(const char *path, size_t from, sl_err *err);

/* The two files of a rejected row: XXH3-64 of the bytes of the .safetensors, then the .json. SL_EDATA: one cannot be
 * read. */
int sl_store_quarantine_sum(const char *store, uint32_t dataset, const char *name, uint64_t row, uint32_t part,
                            uint64_t *sum, sl_err *err);

/* What intake.log says, followed as it grows: data set names, and the part of each row. */
typedef struct sl_accepted sl_accepted;
typedef struct sl_accepted_row {
    uint64_t row, data_off, data_len;
    sl_key key;
    uint32_t dataset, part, T, mask_sum, id_len;
    uint32_t known; /* 0: no such row */
} sl_accepted_row;
int sl_accepted_new(sl_accepted **out, const char *store, sl_err *err);
void sl_accepted_free(sl_accepted *i);
/* Read what was added; a missing log is an empty one. SL_EDATA: corrupt. */
int sl_accepted_follow(sl_accepted *i, sl_err *err);
uint64_t sl_accepted_rows(const sl_accepted *i);     /* highest seq + 1 */
uint64_t sl_accepted_tokens(const sl_accepted *i);   /* of all accepted rows */
uint64_t sl_accepted_rejected(const sl_accepted *i); /* rows the feeder refused */
uint32_t sl_accepted_datasets(const sl_accepted *i);
const char *sl_accepted_name(const sl_accepted *i, uint32_t dataset);      /* NULL: not defined */
const sl_accepted_row *sl_accepted_at(const sl_accepted *i, uint64_t seq); /* NULL: not accepted; valid until follow */
#endif
