/* mask: which bytes of a rendered conversation the model itself would have produced, and which tokens those are.
 *
 * Never guessed. For each assistant turn the span runs from the first byte after the generation prompt to the end of
 * the end-of-turn marker (<|im_end|>, <|eot_id|>, ...), which the model must learn to say; reasoning and tool calls
 * that the template renders inside the turn belong to it. Found, in this order:
 *   1. generation tags of the template;
 *   2. alignment: the conversation is rendered a second time with unique marks in place of the contents. The text
 * between the marks is the template's own; the real rendering must be exactly that text with the contents in between.
 * The header and end-of-turn marker of an assistant turn are learned once from two probe conversations, and must each
 *      occur exactly once where the turn begins and ends;
 *   3. where no header stands before a turn (some templates drop it after tool results): the rendering of the messages
 *      before it with the generation prompt must be a prefix of the whole rendering, and the turn starts where it ends;
 *   4. else the row is refused MASK, saying which turn and what did not fit.
 * A template whose probe renderings do not show a header or an end marker falls to the known markers of its family,
 * which must fit the same tests.
 *
 * Bytes to tokens: a token is supervised when any of its bytes lies in a span (the same rule as character-to-token maps
 * of the HF trainers). Then the round trip is checked: the supervised tokens, decoded, are the spans' text; a token
 * that reaches over a border may bring white space along, anything else is refused MASK.
 *
 * The mask lies on the token itself: mask[i] = 1 says that token i is a target. A trainer that predicts token i+1 from
 * state i shifts it. */
#ifndef SL_FEEDER_MASK_H
#define SL_FEEDER_MASK_H
#include "ipc/journal.h"
#include "stages/feeder/template.h"
#include "stages/feeder/tokenizer.h"

typedef enum { SL_TRAIN_ALL_ASSISTANT, SL_TRAIN_LAST_ASSISTANT, SL_TRAIN_ALL } sl_train_on;
/* keep-last: the last assistant turn keeps its reasoning even where the template drops it, earlier turns follow the
 * template; template: exactly as the template has it. */
typedef enum { SL_REASONING_KEEP_LAST, SL_REASONING_TEMPLATE } sl_reasoning_mode;

typedef struct sl_span {
    size_t a, b; /* bytes [a, b) */
} sl_span;

/* What the template puts around an assistant turn, learned from probes. Strings are owned; start zeroed. */
typedef struct sl_turn_marks {
    char *head[2]; /* headers to look for, the longer first; head[1] may be NULL */
    char *end;     /* end-of-turn marker */
    bool probed;
    char why[256]; /* when head[0] or end is NULL: what the probes showed */
} sl_turn_marks;
void sl_turn_marks_free(sl_turn_marks *m);
/* Learn from renderings of the probe conversations:
 *   u: [user]   g: [user] with generation prompt   ua: [user, assistant]   uau: [user, assistant, user]
 * with the contents SL_PROBE_U, SL_PROBE_A, SL_PROBE_V. */
#define SL_PROBE_U "sluiceuserone"
#define SL_PROBE_A "sluiceanswer"
#define SL_PROBE_V "sluiceusertwo"
void sl_turn_marks_learn(sl_turn_marks *m, const sl_rendered *u, const sl_rendered *g, const sl_rendered *ua,
                         const sl_rendered *uau);

/* The conversation with marks in place of its contents: for message i the mark is `key` + i in decimal + ".". A content
 * that is empty (or null) stays; one that holds </think> keeps everything up to the last </think>; a tool response
 * wrapper stays. New reference. `marked[i]` (n messages) says which got a mark. */
json_t *sl_mask_marked(const json_t *messages, const char *key, unsigned char *marked);

/* Align `full` with `marks` (a rendering of sl_mask_marked); spans of the n assistant turns in order. start_of: for a
 * turn whose header cannot be found, asked for the byte where the generation prompt before message `i` ends (or
 * negative). SL_R_MASK with a sentence. spans must hold as many as there are assistant messages. */
typedef long (*sl_mask_start)(void *arg, size_t message, sl_err *why);
sl_reason sl_mask_align(const sl_rendered *full, const sl_rendered *marks, const json_t *messages, const char *key,
                        const unsigned char *marked, const sl_turn_marks *tm, sl_mask_start start_of, void *arg,
                        sl_span *spans, sl_err *why);

/* Byte spans to tokens. ids.off must be filled. Sets mask[0..ids.n) and checks the round trip. */
sl_reason sl_mask_tokens(const sl_tokenizer *tok, const sl_ids *ids, const char *text, size_t len, const sl_span *spans,
                         size_t n, uint8_t *mask, sl_err *why);
#endif
