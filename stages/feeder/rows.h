/* rows: one pushed JSON line becomes one checked row.
 *
 * What a line may hold (the first of these that is there and not null decides; other keys are carried to the template):
 *   input_ids (+ loss_mask)    token ids as they are; loss_mask 0/1 (or booleans) of the same length, absent = all ones
 *   messages | conversations   list of {role, content} or {from, value}; see "Messages" below
 *   prompt + completion        two strings (loss on the completion only), or two lists of messages
 *   text                       plain text, loss on every token
 * tools (list, or a string holding one) and documents go to the chat template. The row's own id is `id`, else
 * `conversation_id`, else `uuid` (string or integer, cut at 256 bytes); none is fine. A UTF-8 byte order mark before
 * the line is passed over.
 *
 * Messages. Roles: system, user, assistant, tool, developer; also human = user; gpt, chatgpt, model = assistant;
 * observation, function, ipython = tool. Anything else is ROLE with the name that was found. content is a string, null,
 * or a list of {type:"text", text}: the parts are joined, as the templates that know lists do; a part of another type
 * is MEDIA. content may be missing only beside tool_calls or reasoning_content. All other keys of a message are kept as
 * they are.
 *
 * Refusals (sl_reason + a sentence that says what was found, what was expected, where):
 *   TOO_BIG    longer than SL_ROW_MAX_BYTES
 *   JSON       not one JSON object; duplicate keys; integers beyond 64 bits
 *   ENCODING   invalid UTF-8, lone surrogate escapes
 *   FIELDS     no known field, or a field of another type
 *   ROLE MEDIA EMPTY LENGTHS VOCAB   as named (VOCAB: position and value)
 *
 * Memory: the parsed tree is at most a small multiple of the line; depth is limited before the parser runs. */
#ifndef SL_FEEDER_ROWS_H
#define SL_FEEDER_ROWS_H
#include "ipc/err.h"
#include "ipc/journal.h"
#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#define SL_ROW_MAX_BYTES (32u << 20)
#define SL_ROW_MAX_DEPTH 64
#define SL_ROW_ID_MAX    256

typedef enum { SL_ROWK_IDS, SL_ROWK_TEXT, SL_ROWK_CHAT } sl_row_kind;

typedef struct sl_row {
    sl_row_kind kind;
    json_t *root; /* owns everything below */
    int32_t *ids; /* IDS */
    uint8_t *mask;
    uint32_t T;
    char *text; /* TEXT: may hold NUL bytes */
    size_t text_len;
    size_t prompt_len;         /* TEXT: bytes before this are not supervised (prompt + completion) */
    json_t *messages;          /* CHAT: normalized as above: role, content (string or null), the other keys */
    json_t *tools, *documents; /* borrowed from root or owned by `own`; NULL when absent */
    json_t *own;
    char id[SL_ROW_ID_MAX];
    uint32_t id_len;
} sl_row;

/* Parse line[0..n). vocab: ids must be in [0, vocab); 0 = not checked. SL_R_NONE, or the reason with a sentence in
 * *why; then the row is empty. The row must be zeroed or freed before; free it with sl_row_free in any case. */
sl_reason sl_row_parse(sl_row *row, const char *line, size_t n, uint32_t vocab, sl_err *why);
void sl_row_free(sl_row *row);

/* Fill *why (SL_EDATA, the sentence) and return r: how every part of the feeder refuses a row. */
sl_reason sl_refuse(sl_err *why, sl_reason r, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* The same for what says nothing about the row: no memory just now. *why gets SL_ETEMP, and the row is tried again. */
sl_reason sl_lack(sl_err *why, sl_reason r, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* First byte that is not valid UTF-8 (surrogates and overlong forms are not), or n when all is well. */
size_t sl_utf8_check(const char *s, size_t n);
#endif
