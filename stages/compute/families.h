/* families: the table of model families, for the two kinds of file that describe a model. Only stages/compute/spec.c
 * calls this. A family is a row: the names that it goes by in config.json and a function that fills the spec from keys;
 * what the keys mean stands there and nowhere else. Adding one: a row in families.c (and one in families_gguf.c, and
 * its weight names in names.c if they differ).
 *
 * Three tables guard config.json: keys that a family reads (found by reading them), keys that are known and change
 * nothing about a forward pass (ignored), keys that change the math in a way that we do not compute (refused unless
 * their value is the neutral one). Any other key is either one letter or two away from a key that should be there and
 * is not, which is refused as a misspelling, or ends up in spec.unknown for a warning. */
#ifndef SL_COMPUTE_FAMILIES_H
#define SL_COMPUTE_FAMILIES_H
#include "stages/compute/spec.h"
#include "stages/compute/gguf.h"

int sl_families_config(sl_spec *s, const char *json, size_t n, const char *file, double eps_lora, sl_err *err);
int sl_families_gguf(sl_spec *s, const sl_gguf *g, double eps_lora, sl_err *err);
/* Sanity of a filled spec: every number in range, every division whole. */
int sl_families_check(const sl_spec *s, const char *file, sl_err *err);
#endif
