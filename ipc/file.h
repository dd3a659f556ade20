/* file: what everybody who writes our own files needs: all of the bytes or the reason, and what a reason means. */
#ifndef SL_IPC_FILE_H
#define SL_IPC_FILE_H
#include "ipc/err.h"
#include <stddef.h>

/* Writes all n bytes at the file's position, over short writes and signals. 0, or the errno. A file that takes only a
 * part and then nothing is ENOSPC: errno means nothing after a short write. */
int sl_file_write(int fd, const void *p, size_t n);

/* The SL_* code of a failed system call on a file of the store:
 *   SL_ETEMP     no room, quota, inodes, file size limit, memory or descriptors: passes when somebody makes room;
 *   SL_ECONFIG   the place is wrong: no such folder, no permission, read-only, a name that cannot be;
 *   SL_EINTERNAL the rest, above all EIO: start again from the logs, do not wait for room. */
int sl_file_code(int errnum);

/* The same of a file that somebody else made and we only read: SL_ETEMP what passes, SL_ECONFIG the rest. */
int sl_file_read_code(int errnum);

/* fsync of a folder: the names in it are durable. SL_ETEMP: it cannot be opened or synced. */
int sl_file_sync_folder(const char *path, sl_err *err);
#endif
