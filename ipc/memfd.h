/* memfd: sealed anonymous files, the only kind of shared memory here. Private to ipc/. */
#ifndef SL_IPC_MEMFD_H
#define SL_IPC_MEMFD_H
#include "ipc/err.h"
#include <stdbool.h>
#include <stdint.h>

/* A memfd of exactly `bytes`, allocated in full (so that a later touch cannot fail) and sealed against SHRINK, GROW and
 * further SEALs; `seal_write` seals WRITE too (then `init`, if any, is all it will ever hold). The first `init_len`
 * bytes are taken from `init`. With `huge` it is made of 2 MiB pages (bytes must be a multiple). fd, or SL_ETEMP. */
int sl_memfd_create(const char *name, uint64_t bytes, bool huge, const void *init, uint64_t init_len, bool seal_write,
                    sl_err *err);
/* Is fd a memfd of `bytes` (0: any; *size gets it) with the seals above? SL_EINTERNAL names what differs. */
int sl_memfd_check(int fd, const char *what, uint64_t bytes, bool sealed_write, uint64_t *size, sl_err *err);
#endif
