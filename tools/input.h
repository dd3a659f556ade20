/* input: where rows come from: files, folders, standard input and pipes, each as it is or compressed (gzip, zstd).
 *
 * Naming. Every file is a data set of its own, named by its file name without .gz or .zst; files of a folder are named
 * FOLDER/FILE, standard input "stdin". The same rows, compressed or not, are therefore the same rows. A folder stands
 * for its files *.jsonl, *.ndjson, *.json (also with .gz, .zst) in byte order of their names; subfolders and other
 * files are left out and counted. Two inputs of one name are refused: their rows could not be told apart.
 *
 * Reading. Compression is seen by the first bytes, not by the name. A plain regular file is read where it is. Anything
 * else goes through an unnamed spool file, because rows may have to be sent again; sl_input_forget gives its disk space
 * back. Several gzip members or zstd frames in a row are one text. Memory: a few buffers (zstd windows up to 128 MiB).
 * Text that was read before damage or an early end is kept; the error names the file and how much text there was. */
#ifndef SL_TOOLS_INPUT_H
#define SL_TOOLS_INPUT_H
#include "ipc/err.h"
#include <stdbool.h>
#include <stdint.h>

typedef struct sl_input_list {
    struct sl_input_name {
        char *path, *dataset; /* path "-": standard input */
    } * v;
    int n;
    int left_out; /* entries of folders that are no files of rows */
} sl_input_list;

/* paths[0..n): files, folders, "-". dataset: the name of the only input, or NULL. SL_EUSAGE: cannot be read, an empty
 * folder, two of one name, a name longer than 255 bytes. The list must be freed in any case. */
int sl_input_list_make(sl_input_list *out, const char *const *paths, int n, const char *dataset, sl_err *err);
void sl_input_list_free(sl_input_list *l);

typedef struct sl_input sl_input;
/* spool: folder for the spool file; NULL: $TMPDIR, or /tmp. SL_EUSAGE: cannot be opened. SL_ETEMP: no spool file. */
int sl_input_open(sl_input **out, const char *path, const char *spool, sl_err *err);
void sl_input_close(sl_input *in);
/* For pread; what is there stays where it is. */
int sl_input_fd(const sl_input *in);
/* Bring in more text, some megabytes at most, without waiting. 1: there may be more; 0: the end was reached (and stays
 * so). SL_EDATA: damaged or cut compressed data, a read error; SL_ETEMP: no room for the spool. After an error the text
 * has its end there. */
int sl_input_more(sl_input *in, sl_err *err);
/* What to poll (POLLIN) before the next sl_input_more; -1: it never has to wait. */
int sl_input_wait_fd(const sl_input *in);
/* The bytes before `below` are not needed any more. */
void sl_input_forget(sl_input *in, uint64_t below);
#endif
