/* safetensors: the tensor table of a checkpoint folder (or of one .safetensors file), read and checked; no tensor data
 * is touched. A file is: u64 N, N bytes of JSON {name: {dtype, shape, data_offsets}}, data. A sharded folder has
 * model.safetensors.index.json that maps names to files.
 *
 * Everything in the header is hostile. Checked here: N against the file's size and 512 MiB, strict JSON, known dtypes,
 * dtype * shape == bytes, offsets inside the file, no overlaps and no holes (the format forbids both), no duplicate
 * names (over all shards), shard names without a path, every name of the index present in the file that it names.
 * Errors are SL_EDATA (the file breaks the format) or SL_ECONFIG (not there, or not this kind of thing), with file and
 * tensor. Fuzz target: tests/fuzz/fuzz_safetensors.c. */
#ifndef SL_COMPUTE_SAFETENSORS_H
#define SL_COMPUTE_SAFETENSORS_H
#include "ipc/err.h"
#include <stdint.h>
#include <stddef.h>

typedef enum {
    SL_ST_F64,
    SL_ST_F32,
    SL_ST_F16,
    SL_ST_BF16,
    SL_ST_F8_E4M3,
    SL_ST_F8_E5M2,
    SL_ST_F8_E8M0,
    SL_ST_I64,
    SL_ST_U64,
    SL_ST_I32,
    SL_ST_U32,
    SL_ST_I16,
    SL_ST_U16,
    SL_ST_I8,
    SL_ST_U8,
    SL_ST_BOOL,
    SL_ST_N
} sl_st_dtype;
const char *sl_st_dtype_name(sl_st_dtype t); /* "BF16", ... */
uint32_t sl_st_dtype_size(sl_st_dtype t);    /* bytes an element */

#define SL_ST_MAX_DIMS 8
typedef struct sl_st_tensor {
    const char *name; /* NUL-terminated UTF-8 without embedded NULs, owned by the table */
    sl_st_dtype dtype;
    uint32_t n_dims;
    uint64_t shape[SL_ST_MAX_DIMS]; /* 1 beyond n_dims */
    uint32_t file;
    uint64_t offset; /* absolute in the file */
    uint64_t bytes;
} sl_st_tensor;

typedef struct sl_st sl_st;
/* `path`: a folder (model.safetensors, else model.safetensors.index.json) or one file. */
int sl_st_open(sl_st **out, const char *path, sl_err *err);
/* One file's bytes in memory (fuzzer, tests); file_bytes may be larger than n when the data part is not there. */
int sl_st_open_mem(sl_st **out, const void *data, uint64_t n, uint64_t file_bytes, sl_err *err);
/* The index alone, from memory (fuzzer): 0 when it is well formed; calls `each` for every name -> file pair. */
int sl_st_index_mem(const void *data, uint64_t n, const char *path,
                    int (*each)(void *arg, const char *name, const char *file, sl_err *err), void *arg, sl_err *err);
void sl_st_close(sl_st *s);

uint64_t sl_st_n_tensors(const sl_st *s);
const sl_st_tensor *sl_st_at(const sl_st *s, uint64_t i); /* sorted by name */
const sl_st_tensor *sl_st_find(const sl_st *s, const char *name);
uint32_t sl_st_n_files(const sl_st *s);
const char *sl_st_path(const sl_st *s, uint32_t file);
int sl_st_fd(const sl_st *s, uint32_t file);
uint64_t sl_st_file_bytes(const sl_st *s, uint32_t file);
#endif
