/* gguf: the container, read-only. Maps the file; every length, count, type, offset and string is checked against the
 * file's size before use (fuzz target: tests/fuzz/fuzz_gguf.c). Split files (-00001-of-000NN.gguf) are opened together.
 * Format: GGUF v2/v3, little-endian; header, key-values, tensor table, padding to general.alignment, data. */
#ifndef SL_COMPUTE_GGUF_H
#define SL_COMPUTE_GGUF_H
#include "ipc/err.h"
#include <stdint.h>
#include <stdbool.h>
#include <stddef.h>

/* Errors: SL_EDATA for a file that breaks the format (truncated, absurd counts, overlapping tensors, duplicate names,
 * unknown tensor type), SL_ECONFIG when it cannot be opened or is not a GGUF of version 2 or 3. Everything points into
 * a private read-only mapping that lives until sl_gguf_close. */
typedef struct sl_gguf sl_gguf;
typedef enum {
    SL_GV_U8,
    SL_GV_I8,
    SL_GV_U16,
    SL_GV_I16,
    SL_GV_U32,
    SL_GV_I32,
    SL_GV_F32,
    SL_GV_BOOL,
    SL_GV_STR,
    SL_GV_ARR,
    SL_GV_U64,
    SL_GV_I64,
    SL_GV_F64
} sl_gguf_type;

typedef struct sl_gguf_str {
    const char *s;
    uint64_t n;
} sl_gguf_str; /* into the mapping, not NUL-terminated */
typedef struct sl_gguf_tensor {
    sl_gguf_str name;
    uint32_t n_dims, type; /* ggml type id */
    uint64_t ne[4];        /* ne[0] is contiguous */
    uint32_t file;         /* which split file */
    uint64_t offset;       /* absolute in that file */
    uint64_t bytes;        /* derived from type and ne, lies inside the file */
} sl_gguf_tensor;

int sl_gguf_open(sl_gguf **out, const char *path, sl_err *err);
/* For the fuzzer and tests: parse from memory (not copied). */
int sl_gguf_open_mem(sl_gguf **out, const void *data, uint64_t n, sl_err *err);
void sl_gguf_close(sl_gguf *g);

int sl_gguf_num(const sl_gguf *g, const char *key,
                double *out); /* any numeric/bool scalar; first element of a numeric array; 0 or -1 absent */
int sl_gguf_u64(const sl_gguf *g, const char *key, uint64_t *out);
int sl_gguf_string(const sl_gguf *g, const char *key, sl_gguf_str *out); /* 0 or -1 */
/* Arrays: element count (0 when absent or no array) and typed element access; -1 when out of range or of another type.
 */
uint64_t sl_gguf_arr_len(const sl_gguf *g, const char *key);
int sl_gguf_arr_str(const sl_gguf *g, const char *key, uint64_t i,
                    sl_gguf_str *out); /* amortized O(1) when walked in order */
int sl_gguf_arr_num(const sl_gguf *g, const char *key, uint64_t i, double *out);

uint64_t sl_gguf_n_tensors(const sl_gguf *g);
const sl_gguf_tensor *sl_gguf_tensor_at(const sl_gguf *g, uint64_t i);
const sl_gguf_tensor *sl_gguf_by_name(const sl_gguf *g, uint64_t i); /* the i-th in the order of names */
const sl_gguf_tensor *sl_gguf_find(const sl_gguf *g, const char *name);
int sl_gguf_fd(const sl_gguf *g, uint32_t file);
const void *sl_gguf_data(const sl_gguf *g, const sl_gguf_tensor *t); /* in the mapping */
const char *sl_gguf_path(const sl_gguf *g, uint32_t file);
/* The bytes of the first file's metadata section (for a fingerprint). */
const void *sl_gguf_meta(const sl_gguf *g, uint64_t *n);
uint32_t sl_gguf_n_files(const sl_gguf *g);
uint64_t sl_gguf_file_bytes(const sl_gguf *g, uint32_t file);

/* ggml type ids: name ("Q4_K"), block size along ne[0] in elements and bytes. NULL / 0 for an id that this program has
 * no layout for. A name does not mean that weights of the type can be used: that is for stages/compute/weights. */
const char *sl_ggml_type_name(uint32_t type);
uint32_t sl_ggml_block_elems(uint32_t type);
uint32_t sl_ggml_block_bytes(uint32_t type);
#endif
