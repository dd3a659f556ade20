/* match: the well-known pre-tokenizer patterns as plain code over a class table, several times faster than any
 * regular-expression engine. Recognised by the pattern's exact text only; every other pattern goes to pcre2 (regex.h).
 * Tests hold both equal. */
#ifndef SL_FEEDER_MATCH_H
#define SL_FEEDER_MATCH_H
#include <stddef.h>
#include <stdint.h>

/* End of the piece that starts at p (< end, valid UTF-8); always beyond p. Pieces tile the text. */
typedef const uint8_t *(*sl_match_fn)(const uint8_t *p, const uint8_t *end);

extern const char SL_PATTERN_GPT2[], SL_PATTERN_LLAMA3[], SL_PATTERN_QWEN2[], SL_PATTERN_O200K[], SL_PATTERN_KIMI[];
extern const char SL_PATTERN_DIGITS3[], SL_PATTERN_CJK[], SL_PATTERN_DEEPSEEK[]; /* DeepSeek-V3: these three in a row */

/* Matcher of one pattern that splits "Isolated"; NULL when it is none of the above (or not whole by itself). */
sl_match_fn sl_match_find(const char *pattern, size_t n);
const uint8_t *sl_match_gpt2(const uint8_t *p, const uint8_t *end);
const uint8_t *sl_match_deepseek(const uint8_t *p, const uint8_t *end); /* the sequence of the three patterns */
const uint8_t *sl_match_digits_gpt2(const uint8_t *p,
                                    const uint8_t *end); /* every digit alone, then gpt2 (SmolLM2, StarCoder) */
#endif
