/* gpus: which GPUs this process and its children may use, and how much memory they have free. Without CUDA: sluiced
 * must run where there is none. */
#ifndef SL_DAEMON_GPUS_H
#define SL_DAEMON_GPUS_H
#include <stdint.h>

#define SL_GPUS_MAX 64

/* What CUDA makes of CUDA_VISIBLE_DEVICES (CUDA C++ Programming Guide, "CUDA Environment Variables"): numbers of the
 * `n` (0..SL_GPUS_MAX) GPUs present, or beginnings "GPU-..." of their identities uuid[n] that fit one GPU alone, with
 * commas between. The list ends at the first entry that names no GPU; an entry named twice empties it. `list` NULL: all
 * GPUs. Fills index[0..] and returns how many. Parts of GPUs ("MIG-...") name none here. */
int sl_gpus_visible(const char *list, const char *const *uuid, int n, int index[SL_GPUS_MAX]);

/* How many GPUs are visible, by the driver's management library and the environment; 0 also where there is no driver.
 * *least_bytes: free memory of the one that has least, 0 when unknown. */
int sl_gpus_count(uint64_t *least_bytes);
#endif
