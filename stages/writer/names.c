#include "stages/writer/xxh3.h"
#include "stages/writer/names.h"
#include "ipc/file.h"
#include "ipc/boot.h"
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void sl_store_dataset_dir(char *buf, size_t cap, uint32_t dataset, const char *name) {
    size_t n = 0;
    buf[0] = 0;
    if (!dataset) return;
    int changed = !strncmp(name, "hs_", 3) && isdigit((unsigned char)name[3]); /* a row of the first may be called so */
    for (; name[n] && n < 100; n++) {
        unsigned char ch = (unsigned char)name[n];
        int ok = ch < 0x80 && (isalnum(ch) || ch == '_' || ch == '-' || (ch == '.' && n));
        buf[n] = ok ? (char)ch : '_';
        changed |= !ok;
    }
    if (changed || name[n] || !n)
        snprintf(buf + n, cap - n, "~%u", dataset);
    else
        buf[n] = 0;
}

void sl_store_row_name(char *buf, size_t cap, uint64_t row, uint32_t part) {
    if (part)
        snprintf(buf, cap, "hs_%llu.%u", (unsigned long long)row, part);
    else
        snprintf(buf, cap, "hs_%llu", (unsigned long long)row);
}

void sl_store_shard_name(char *buf, size_t cap, uint32_t shard, int open) {
    snprintf(buf, cap, "shard-%06u.sls%s", shard, open ? ".open" : "");
}

int sl_store_folder_make(const char *path, size_t from, sl_err *err) {
    char p[SL_PATH_MAX + 256], above[SL_PATH_MAX + 256];
    int rc = 0, more = 1;
    if (snprintf(p, sizeof p, "%s", path) >= (int)sizeof p)
        return sl_err_set(err, SL_ECONFIG, "the path of folder %.100s... is too long", path);
    for (size_t at = from; more && !rc;) {
        at += strspn(p + at, "/");
        at += strcspn(p + at, "/");
        more = p[at] == '/';
        p[at] = 0;
        int made = !mkdir(p, 0755);
        if (!made && !more && errno != EEXIST)
            return sl_err_sys(err, sl_file_code(errno), errno, "cannot make folder %s", p);
        if (made) {
            strcpy(above, p);
            char *slash = strrchr(above, '/');
            if (slash) slash[slash == above] = 0;
            rc = sl_file_sync_folder(slash ? above : ".", err);
        }
        if (more) p[at] = '/';
    }
    return rc;
}

int sl_store_shard_parse(const char *name, uint32_t *shard, int *open) {
    char canon[64];
    if (strncmp(name, "shard-", 6)) return 0;
    uint32_t n = (uint32_t)strtoul(name + 6, NULL, 10); /* anything but its one right spelling is found below */
    for (*open = 0; *open < 2; ++*open) {
        sl_store_shard_name(canon, sizeof canon, n, *open);
        if (!strcmp(canon, name)) {
            *shard = n;
            return 1;
        }
    }
    return 0;
}

static int sum_file(XXH3_state_t *st, const char *path, sl_err *err) {
    enum { STEP = 64 << 10 };
    int fd = open(path, O_RDONLY | O_CLOEXEC), e = errno;
    uint8_t *b = malloc(STEP);
    ssize_t n = fd < 0 || !b ? -1 : 1;
    while (n > 0) {
        n = read(fd, b, STEP);
        e = errno;
        if (n > 0) XXH3_64bits_update(st, b, (size_t)n);
        if (n < 0 && e == EINTR) n = 1;
    }
    free(b);
    if (fd >= 0) close(fd);
    return n < 0 ? sl_err_sys(err, SL_EDATA, e, "%s", path) : 0;
}

int sl_store_quarantine_sum(const char *store, uint32_t dataset, const char *name, uint64_t row, uint32_t part,
                            uint64_t *sum, sl_err *err) {
    char dir[160], file[64], path[SL_PATH_MAX + 300];
    XXH3_state_t st;
    XXH3_64bits_reset(&st);
    sl_store_dataset_dir(dir, sizeof dir, dataset, name);
    sl_store_row_name(file, sizeof file, row, part);
    for (int json = 0; json < 2; json++) {
        snprintf(path, sizeof path, "%s/quarantine/%s%s%s%s", store, dir, *dir ? "/" : "", file,
                 json ? ".json" : ".safetensors");
        int rc = sum_file(&st, path, err);
        if (rc) return rc;
    }
    *sum = XXH3_64bits_digest(&st);
    return 0;
}

struct sl_accepted {
    char log[4200], dat[4200];
    uint64_t at, n_rows, cap_rows, rejected, tokens;
    sl_accepted_row *rows;
    char **names;
    uint32_t n_names;
};

int sl_accepted_new(sl_accepted **out, const char *store, sl_err *err) {
    sl_accepted *i = calloc(1, sizeof *i);
    if (!i) return sl_err_set(err, SL_ETEMP, "no memory to follow intake.log");
    snprintf(i->log, sizeof i->log, "%s/intake.log", store);
    snprintf(i->dat, sizeof i->dat, "%s/intake.dat", store);
    *out = i;
    return 0;
}

void sl_accepted_free(sl_accepted *i) {
    if (!i) return;
    for (uint32_t k = 0; k < i->n_names; k++) free(i->names[k]);
    free(i->names);
    free(i->rows);
    free(i);
}

static int add_name(sl_accepted *i, const sl_intake_rec *r, sl_err *err) {
    if (r->dataset > 1u << 20 || r->data_len > 1u << 16)
        return sl_err_set(err, SL_EDATA, "%s: data set %u with a name of %llu bytes", i->log, r->dataset,
                          (unsigned long long)r->data_len);
    if (r->dataset >= i->n_names) {
        char **p = realloc(i->names, (r->dataset + 1) * sizeof *p);
        if (!p) return sl_err_set(err, SL_ETEMP, "no memory for data set names");
        memset(p + i->n_names, 0, (r->dataset + 1 - i->n_names) * sizeof *p);
        i->names = p;
        i->n_names = r->dataset + 1;
    }
    char *s = calloc(1, r->data_len + 1);
    int fd = open(i->dat, O_RDONLY | O_CLOEXEC);
    ssize_t got = s && fd >= 0 ? pread(fd, s, r->data_len, (off_t)r->data_off) : -1;
    if (fd >= 0) close(fd);
    if (got != (ssize_t)r->data_len) {
        free(s);
        return sl_err_set(err, SL_EDATA, "%s: the name of data set %u (%llu bytes at %llu) is not there", i->dat,
                          r->dataset, (unsigned long long)r->data_len, (unsigned long long)r->data_off);
    }
    free(i->names[r->dataset]);
    i->names[r->dataset] = s;
    return 0;
}

static int each(void *arg, const void *rec, sl_err *err) {
    sl_accepted *i = arg;
    const sl_intake_rec *r = rec;
    if (r->kind == SL_IN_DATASET) return add_name(i, r, err);
    i->rejected += r->kind == SL_IN_REJECT;
    i->tokens += r->kind == SL_IN_ROW ? r->T : 0;
    if (r->kind != SL_IN_ROW) return 0;
    if (r->seq != i->n_rows)
        return sl_err_set(err, SL_EDATA, "%s: row with seq %llu where %llu was due", i->log, (unsigned long long)r->seq,
                          (unsigned long long)i->n_rows);
    if (i->n_rows == i->cap_rows) {
        uint64_t cap = i->cap_rows ? i->cap_rows * 2 : 1024;
        sl_accepted_row *p = realloc(i->rows, cap * sizeof *p);
        if (!p) return sl_err_set(err, SL_ETEMP, "no memory for %llu rows of intake.log", (unsigned long long)cap);
        i->rows = p;
        i->cap_rows = cap;
    }
    i->rows[i->n_rows++] = (sl_accepted_row){.row = r->row,
                                             .data_off = r->data_off,
                                             .data_len = r->data_len,
                                             .key = r->key,
                                             .dataset = r->dataset,
                                             .part = r->part,
                                             .T = r->T,
                                             .mask_sum = r->mask_sum,
                                             .id_len = r->id_len,
                                             .known = 1};
    return 0;
}

int sl_accepted_follow(sl_accepted *i, sl_err *err) {
    if (access(i->log, F_OK) && errno == ENOENT) return 0;
    return sl_journal_follow(i->log, SL_INTAKE_MAGIC, &i->at, each, i, err);
}

uint64_t sl_accepted_rows(const sl_accepted *i) {
    return i->n_rows;
}
uint64_t sl_accepted_tokens(const sl_accepted *i) {
    return i->tokens;
}
uint64_t sl_accepted_rejected(const sl_accepted *i) {
    return i->rejected;
}
uint32_t sl_accepted_datasets(const sl_accepted *i) {
    return i->n_names;
}
const char *sl_accepted_name(const sl_accepted *i, uint32_t d) {
    return d < i->n_names ? i->names[d] : NULL;
}
const sl_accepted_row *sl_accepted_at(const sl_accepted *i, uint64_t seq) {
    return seq < i->n_rows ? &i->rows[seq] : NULL;
}
