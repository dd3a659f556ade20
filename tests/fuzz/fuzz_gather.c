/* Hostile descriptors against gather: the input patches what two ranks publish for a batch (drops, repeats, changed
 * bytes), also with the group's epoch moving on. Whatever comes, gather must not crash, must not give a row that was
 * not delivered whole the verdict OK, and after a few clean batches all must be right again: one in which the damage
 * ends, and one for each descriptor that was changed, since each may look like the end of a batch. */
#include "ipc/log.h"
#include "stages/gather/gather.h"
#include <sys/mman.h>
#include <unistd.h>
#include "tests/flow_rig.h"

static const uint8_t *in;
static size_t left;
static uint8_t next(void) {
    return left ? left--, *in++ : 0;
}

static int states_changed, descs_changed;

static rig_act spoil(rig *g, uint32_t rank, sl_desc *d, uint16_t *payload) {
    (void)g, (void)rank;
    uint8_t op = next();
    if (op < 200) return ACT_KEEP;
    if (op < 206) return ACT_DROP;
    if (op < 212) return ACT_TWICE;
    if (op < 216) return ACT_NO_SLOT;
    if (op < 220) return ACT_ROW_FIRST;
    if (op < 228 && payload) {
        payload[next()] ^= (uint16_t)(next() | 1);
        states_changed = 1;
        return ACT_KEEP;
    }
    descs_changed++;
    for (int n = op & 3; n >= 0; n--) { /* pay_end stays: the rig takes it from the ring */
        uint8_t at = next() % 64, v = next();
        ((uint8_t *)d)[at] = v;
    }
    return ACT_KEEP;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const uint32_t T[] = {10, 20, 1, 5, 12, 7};
    static rig g;
    in = data;
    left = size;
    states_changed = descs_changed = 0;
    sl_log_init("fuzz", SL_ERROR);
    rig_open(&g, 2);
    rig_hooks h = {.desc = spoil};
    sl_gather *ga;
    if (sl_gather_open(&ga, &g.st, &g.e)) abort();
    bool full;
    rig_feed(&g, 6, T, NULL);
    for (uint32_t r = 0; r < 2; r++) {
        rig_rank(&g, r, &h);
        while (sl_gather_turn(ga, &full, &g.e) > 0) {}
    }
    if (next() & 1) { /* the group dies and comes back */
        g.ctl[1].epoch = ++g.epoch;
        rig_ranks(&g, NULL);
    }
    while (sl_gather_turn(ga, &full, &g.e) > 0) {}
    sl_desc_sample s[RIG_MAX_ROWS];
    sl_desc_batch b = {0};
    uint64_t last = UINT64_MAX;
    rig_take(&g, s, &b);
    for (int i = 0; i < 3 + descs_changed && (i < 3 || b.rejected); i++) {
        rig_feed(&g, 6, T, NULL);
        rig_ranks(&g, NULL);
        int rc;
        while ((rc = sl_gather_turn(ga, &full, &g.e)) > 0) {}
        if (rc < 0) abort();
        while (rig_take(&g, s, &b)) last = b.bpos;
        for (uint32_t r = 0; r < 2; r++)
            if (sl_ring_check(g.w_lane[r], &g.e)) abort();
    }
    if (last != g.now.bpos || b.rejected) abort(); /* the flow is wedged or still sick */
    sl_gather_close(ga);
    rig_close(&g);
    return 0;
}
