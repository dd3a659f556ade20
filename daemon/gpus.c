#include "daemon/gpus.h"
#include <ctype.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

/* The GPU that a list's entry of `len` characters names; -1: none. */
static int named(const char *s, size_t len, const char *const *uuid, int n) {
    int found = -1;
    if (len && isdigit((unsigned char)*s)) {
        char *end;
        unsigned long i = strtoul(s, &end, 10);
        return end == s + len && i < (unsigned long)n ? (int)i : -1;
    }
    if (len <= 4 || strncmp(s, "GPU-", 4) != 0) return -1;
    for (int i = 0; i < n; i++) {
        if (strncmp(uuid[i], s, len) != 0) continue;
        if (found >= 0) return -1;
        found = i;
    }
    return found;
}

int sl_gpus_visible(const char *list, const char *const *uuid, int n, int index[SL_GPUS_MAX]) {
    int got = 0;
    if (!list) {
        for (; got < n; got++) index[got] = got;
        return got;
    }
    for (const char *p = list; got < n; p++) {
        p += strspn(p, " \t");
        size_t len = strcspn(p, ", \t");
        int i = named(p, len, uuid, n);
        if (i < 0) break;
        for (int k = 0; k < got; k++)
            if (index[k] == i) return 0;
        index[got++] = i;
        p += len;
        p += strspn(p, " \t");
        if (*p != ',') break;
    }
    return got;
}

/* ---- the driver's management library (NVML), opened at run time ---- */
typedef struct memory { /* nvmlMemory_t */
    unsigned long long total, free, used;
} memory;

typedef struct nvml {
    void *lib;
    int (*init)(void);
    int (*count)(unsigned *);
    int (*handle)(unsigned, void **);
    int (*uuid)(void *, char *, unsigned);
    int (*memory)(void *, memory *);
} nvml;

static int open_nvml(nvml *m) {
    const struct {
        const char *name;
        void **at;
    } want[] = {{"nvmlInit_v2", (void **)&m->init},
                {"nvmlDeviceGetCount_v2", (void **)&m->count},
                {"nvmlDeviceGetHandleByIndex_v2", (void **)&m->handle},
                {"nvmlDeviceGetUUID", (void **)&m->uuid},
                {"nvmlDeviceGetMemoryInfo", (void **)&m->memory}};
    m->lib = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!m->lib) return -1;
    for (size_t i = 0; i < sizeof want / sizeof *want; i++)
        if (!(*want[i].at = dlsym(m->lib, want[i].name))) return -1;
    return m->init() ? -1 : 0;
}

static int count_visible(const nvml *m, uint64_t *least_bytes) {
    char text[SL_GPUS_MAX][96] = {{0}};
    const char *uuid[SL_GPUS_MAX];
    void *gpu[SL_GPUS_MAX] = {0};
    int index[SL_GPUS_MAX];
    unsigned n = 0;
    if (m->count(&n)) return 0;
    if (n > SL_GPUS_MAX) n = SL_GPUS_MAX;
    for (unsigned i = 0; i < n; i++) {
        if (m->handle(i, &gpu[i]) || m->uuid(gpu[i], text[i], sizeof text[i] - 1)) text[i][0] = 0;
        uuid[i] = text[i];
    }
    int visible = sl_gpus_visible(getenv("CUDA_VISIBLE_DEVICES"), uuid, (int)n, index);
    for (int i = 0; i < visible; i++) {
        memory is;
        if (gpu[index[i]] && !m->memory(gpu[index[i]], &is) && (!*least_bytes || is.free < *least_bytes))
            *least_bytes = is.free;
    }
    return visible;
}

int sl_gpus_count(uint64_t *least_bytes) {
    nvml m = {0};
    *least_bytes = 0;
    int n = open_nvml(&m) ? 0 : count_visible(&m, least_bytes);
    if (m.lib) dlclose(m.lib);
    return n;
}
