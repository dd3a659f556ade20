/* xxh3: XXH3 with its state on the stack and, on x86-64, the widest vectors that the CPU has (chosen by libxxhash at
 * run time). */
#ifndef SL_WRITER_XXH3_H
#define SL_WRITER_XXH3_H
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>
#if defined(__x86_64__)
#include <xxh_x86dispatch.h>
#endif
#endif
