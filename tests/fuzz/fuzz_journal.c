/* Any bytes as a log. The first byte says how many good records stand in front, the second whether the checksums of
 * whole records in the input are made good (so that their content is reached). Reader and writer must agree on what is
 * there. */
#include "ipc/journal.h"
#include "ipc/log.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <stdio.h>

static int each(void *arg, const void *rec, sl_err *err) {
    (void)err;
    const sl_commit_rec *r = rec;
    *(uint64_t *)arg += 1 + (r->seq == UINT64_MAX);
    return 0;
}

static void put(int fd, const void *p, size_t n) {
    if (write(fd, p, n) != (ssize_t)n) abort();
}

static void fix(uint8_t *rec) {
    uint32_t m = SL_COMMIT_MAGIC;
    uint16_t len = SL_JREC;
    memcpy(rec, &m, 4);
    memcpy(rec + 6, &len, 2);
    uint32_t crc = sl_crc32c(0, rec, SL_JREC - 4);
    memcpy(rec + SL_JREC - 4, &crc, 4);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 2) return 0;
    sl_log_init("fuzz", SL_ERROR);
    int fd = memfd_create("log", 0);
    if (fd < 0) abort();
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    uint8_t rec[SL_JREC];
    for (unsigned i = 0; i < data[0] % 5u; i++) {
        memset(rec, (int)i, sizeof rec);
        fix(rec);
        put(fd, rec, sizeof rec);
    }
    for (size_t at = 2; at < size; at += SL_JREC) {
        size_t n = size - at < SL_JREC ? size - at : SL_JREC;
        memcpy(rec, data + at, n);
        if (n == SL_JREC && data[1] >> (at / SL_JREC % 8) & 1) fix(rec);
        put(fd, rec, n);
    }
    sl_err e;
    uint64_t at = 0, again = 0, count = 0, in_open = 0;
    int rc = sl_journal_follow(path, SL_COMMIT_MAGIC, &at, each, &count, &e);
    if (count < at) abort();
    sl_journal *j;
    int ro = sl_journal_open(&j, path, SL_COMMIT_MAGIC, each, &in_open, &e);
    /* /proc/self/fd has no folder to sync: everything before that was done; a real open comes to the same end */
    if (!ro) {
        if (rc || sl_journal_count(j) != at) abort();
        sl_journal_close(j);
    }
    if (rc == 0 && (sl_journal_follow(path, SL_COMMIT_MAGIC, &again, NULL, NULL, &e) || again != at)) abort();
    close(fd);
    return 0;
}
