/* manifest: manifest.json, which says what the states of a store are. It is replaced atomically (temporary file, fsync,
 * rename, fsync of the folder) when the writer starts and when it ends.
 *
 * Its last member is "checksum": "xxh3:" and 16 hexadecimal digits: XXH3-64 of the file's bytes with zeros in place of
 * the digits. So a change of any bit is noticed, also one that leaves good JSON behind. */
#ifndef SL_WRITER_MANIFEST_H
#define SL_WRITER_MANIFEST_H
#include "ipc/journal.h"
#include "stages/writer/safetensors_out.h"
#include <stdbool.h>

typedef struct sl_store_stats { /* sums over commit.log */
    uint64_t rows, rejected, rejected_tokens, tokens, supervised, raw_bytes, stored_bytes;
    uint64_t nll_rows;
    double nll_sum;
    uint64_t by_verdict[SL_V_N];
} sl_store_stats;
void sl_store_stats_add(sl_store_stats *s, const sl_commit_rec *r);

typedef struct sl_manifest {
    sl_capture_set set;
    uint32_t vocab, layout, codec;
    char model_path[SL_PATH_MAX];
    char tokenizer_hash[80], template_hash[80];
    char rows_made[2600]; /* settings that decide ids and masks of a row, "key=value ..."; "": an older store */
    sl_store_stats stats;
    int complete; /* the writer ended with nothing pending */
} sl_manifest;

/* SL_ECONFIG: no manifest, or not one of ours; the sentence says which field. SL_EDATA: the checksum is missing or
 * another: it was damaged (or edited). */
int sl_manifest_read(sl_manifest *m, const char *store, sl_err *err);
int sl_manifest_write(const sl_manifest *m, const char *store, sl_err *err); /* SL_ETEMP when the disk is full */
/* A store that was begun with `old` may go on with `now`: model, states, dtype, width, layout and, where both have one,
 * tokenizer are equal. SL_ECONFIG names the setting and both values. */
int sl_manifest_same(const sl_manifest *old, const sl_manifest *now, sl_err *err);
/* A run of ids alone has no tokenizer or template: those of the rows that are there stay named. */
void sl_manifest_keep(sl_manifest *now, const sl_manifest *old);
/* Settings of rows_made that differ, "train_on all-assistant, now all; ..." in buf; false when none does, or when the
 * older store does not say. */
bool sl_manifest_rows_differ(const sl_manifest *old, const sl_manifest *now, char *buf, size_t cap);
#endif
