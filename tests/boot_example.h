/* A boot block that passes every check, for tests. fds are made up; set the ones that are used. */
#ifndef SL_TESTS_BOOT_EXAMPLE_H
#define SL_TESTS_BOOT_EXAMPLE_H
#include "ipc/boot.h"
#include <stdio.h>
#include <string.h>

static inline void boot_example(sl_boot *b, uint32_t dp, uint32_t tp) {
    static const uint32_t fixed[] = {SL_ROLE_SLUICED, SL_ROLE_FEEDER, SL_ROLE_GATHER, SL_ROLE_WRITER};
    memset(b, 0, sizeof *b);
    b->magic = SL_BOOT_MAGIC;
    b->abi = SL_BOOT_ABI;
    b->size = sizeof *b;
    b->layout_hash = sl_boot_layout_hash();
    b->dp = dp;
    b->tp = tp;
    b->n_procs = 4 + dp * tp;
    for (uint32_t i = 0; i < b->n_procs; i++) {
        sl_boot_proc *p = &b->procs[i];
        p->role = i < 4 ? fixed[i] : SL_ROLE_RANK;
        p->group = i < 4 ? 0 : (i - 4) / tp;
        p->rank = i < 4 ? 0 : (i - 4) % tp;
        if (i < 4)
            snprintf(p->name, sizeof p->name, "%s", sl_role_name((sl_role)p->role));
        else
            snprintf(p->name, sizeof p->name, "rank%u.%u", p->group, p->rank);
    }
    for (uint32_t g = 0; g < dp; g++) {
        b->groups[g].first_rank_proc = 4 + g * tp;
        b->groups[g].coll_fd = -1;
    }
    b->n_layers = 8;
    b->width = 64;
    b->vocab = 1000;
    b->n_captures = 3;
    b->captures[0].hidx = 0;
    b->captures[1].hidx = 4;
    b->captures[2].hidx = 8;
    b->elem_size = 2;
    b->chunk_rows = 16;
    b->batch_tokens = 64;
    b->max_batch_rows = 16;
    b->max_length = 64;
    b->log_level = 1;
    snprintf(b->store, sizeof b->store, "/nonexistent");
}
#endif
