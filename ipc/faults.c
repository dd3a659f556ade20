#include "ipc/faults.h"
#include <string.h>

static const struct {
    const char *name;
    sl_verdict verdict;
} table[] = {
    {"none", SL_V_OK},
    {"flatten", SL_V_SHAPE},
    {"lost-dim", SL_V_SHAPE},
    {"missing-shard", SL_V_MISSING_SHARD},
    {"wrong-place", SL_V_ORDER},
    {"layers-swapped", SL_V_ORDER},
    {"wrong-offset", SL_V_CHECKSUM},
    {"nan", SL_V_NONFINITE},
    {"zeros", SL_V_CONSTANT},
    {"previous", SL_V_CONSTANT},
    {"diverge", SL_V_RANKS_DISAGREE},
    {"changed", SL_V_CHECKSUM},
};
_Static_assert(sizeof table / sizeof *table == SL_FAULT_N, "one line a fault");

const char *sl_fault_name(sl_fault f) {
    return (unsigned)f < SL_FAULT_N ? table[f].name : "?";
}

int sl_fault_parse(const char *name, sl_fault *out) {
    for (int i = 0; i < SL_FAULT_N; i++)
        if (!strcmp(name, table[i].name)) {
            *out = (sl_fault)i;
            return 0;
        }
    return SL_EUSAGE;
}

sl_verdict sl_fault_verdict(sl_fault f) {
    return (unsigned)f < SL_FAULT_N ? table[f].verdict : SL_V_OK;
}
