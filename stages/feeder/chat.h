/* chat: a conversation becomes the text that the model sees and the byte spans that it would have said itself: the chat
 * template (template.h) and the mask rules (mask.h) put together. Belongs to one thread. */
#ifndef SL_FEEDER_CHAT_H
#define SL_FEEDER_CHAT_H
#include "stages/feeder/mask.h"
#include "stages/feeder/template.h"

typedef struct sl_chat sl_chat;
int sl_chat_new(sl_chat **out, const sl_template *t, sl_reasoning_mode reasoning, const char *helper, sl_err *err);
void sl_chat_free(sl_chat *c);

typedef struct sl_chat_text {
    char *text;
    size_t len;
    sl_span *spans; /* one an assistant turn, in order; NULL when they were not wanted */
    size_t n_spans;
    const char *how; /* how they were found */
    char warn[256];  /* "" or what a person should know */
} sl_chat_text;
void sl_chat_text_free(sl_chat_text *t);

/* Render messages[0..n_messages) (normalized by rows.h). want_spans: find the spans. SL_R_TEMPLATE or SL_R_MASK with a
 * sentence; after SL_R_MASK the text is there. The code SL_ETEMP in *why: not the row's doing, try again. */
sl_reason sl_chat_render(sl_chat *c, const json_t *messages, size_t n_messages, json_t *tools, json_t *documents,
                         bool want_spans, sl_chat_text *out, sl_err *why);
#endif
