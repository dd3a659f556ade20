/* Seen by clang-tidy alone, before every source: what the analyzer cannot know of another file. An error that is set is
 * returned, so a function that failed this way did not succeed. */
#include "ipc/err.h"
#define sl_err_set(err, code, ...)      (sl_err_set(err, code, __VA_ARGS__), (code))
#define sl_err_sys(err, code, num, ...) (sl_err_sys(err, code, num, __VA_ARGS__), (code))
