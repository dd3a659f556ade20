/* regex: a pre-tokenizer pattern, compiled by pcre2 (JIT where there is one) in UTF and UCP mode.
 *
 * Patterns come in the dialect of the engine that trained the tokenizer. What means something else to pcre2 is
 * translated (\s is exactly White_Space; a set "[A&&[^B]]" becomes a look-ahead) or refused; nothing is silently read
 * otherwise. */
#ifndef SL_FEEDER_REGEX_H
#define SL_FEEDER_REGEX_H
#include "ipc/err.h"
#include <stdbool.h>
#include <stddef.h>

typedef struct sl_regex sl_regex;
/* `pattern` is UTF-8; with `literal` it stands for itself. SL_ECONFIG: pcre2's message with the offset, or the
 * construct refused. */
int sl_regex_new(sl_regex **out, const char *pattern, size_t n, bool literal, sl_err *err);
void sl_regex_free(sl_regex *r);

typedef struct sl_regex_scratch sl_regex_scratch; /* one per thread */
sl_regex_scratch *sl_regex_scratch_new(void);
void sl_regex_scratch_free(sl_regex_scratch *s);
/* Next match in text[from..n), valid UTF-8. 1: found, [*a, *b) (may be empty); 0: none; SL_EDATA: the pattern's limits
 * were met. */
int sl_regex_next(const sl_regex *r, sl_regex_scratch *s, const char *text, size_t n, size_t from, size_t *a, size_t *b,
                  sl_err *err);
#endif
