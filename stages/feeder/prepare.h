/* prepare: from a pushed row to token ids and loss masks. The feeder and `sluice tokenize` run this same code.
 *
 * A row gives one part, or several: per_turn makes one part for each assistant turn (the conversation up to that turn,
 * only that turn supervised: what the model sees when it serves), overlong = split cuts at max_length. Parts are
 * numbered 0.. in order. Every part is either accepted or refused by reason, so the counts add up.
 *
 * Which tokens are supervised: input_ids: the loss_mask as given (absent: all); text: all; prompt + completion: the
 * tokens of the completion; conversations: stages/feeder/mask.h. The mask lies on the token itself, not shifted.
 *
 * max_length: 0 truncate (the first max_length tokens; noted in flags), 1 skip (TOO_LONG), 2 split.
 * min_supervised: parts with fewer supervised tokens are refused UNSUPERVISED (0: none is).
 *
 * One sl_preparer belongs to one thread (it owns a tokenizer scratch and a template helper process). */
#ifndef SL_FEEDER_PREPARE_H
#define SL_FEEDER_PREPARE_H
#include "ipc/journal.h"
#include "stages/feeder/mask.h"
#include "stages/feeder/rows.h"
#include "stages/feeder/template.h"
#include "stages/feeder/tokenizer.h"

#define SL_MAX_PARTS 65536

enum { SL_LONG_TRUNCATE, SL_LONG_SKIP, SL_LONG_SPLIT };
enum { SL_PART_TRUNCATED = 1 };

typedef struct sl_prep_cfg {
    const sl_tokenizer *tok; /* NULL: rows of text and messages are refused FIELDS (token ids only) */
    const char *tok_why;     /* why there is no tokenizer (for that refusal), or NULL */
    const sl_template *tmpl; /* NULL: rows of messages are refused TEMPLATE */
    const char *tmpl_why;    /* why there is no template (for that refusal) */
    uint32_t vocab;          /* ids are in [0, vocab); 0: the tokenizer's */
    uint32_t max_length;     /* tokens; 0 = no limit */
    uint32_t overlong, min_supervised;
    uint32_t train_on;  /* sl_train_on */
    uint32_t per_turn;  /* 0 or 1 */
    uint32_t reasoning; /* sl_reasoning_mode */
    bool keep_text;     /* sl_part.text and off are wanted (tokenize) */
    bool text_bare;     /* rows of text: without the tokens that the post-processor adds (BOS) */
    bool text_plain;    /* rows of text: special tokens written in it stay text */
} sl_prep_cfg;

typedef struct sl_part {
    int32_t *ids;
    uint8_t *mask;
    uint32_t T, mask_sum;
    uint16_t flags;   /* SL_PART_TRUNCATED */
    sl_reason reason; /* SL_R_NONE: accepted */
    char *why;        /* sentence when refused */
    char *text;       /* keep_text: what was tokenized */
    size_t text_len;
    uint32_t *off;   /* keep_text: byte offset of each token */
    const char *how; /* how the mask was found: "given", "text", "completion", "generation tags", "template" ... */
} sl_part;

typedef struct sl_prepared {
    sl_part *parts;
    uint32_t n;
    char id[SL_ROW_ID_MAX];
    uint32_t id_len;
    char warn[256]; /* "" or something that a person should know about this row */
    char *lack;     /* while it is prepared: what the machine lacks; NULL outside */
} sl_prepared;

typedef struct sl_preparer sl_preparer;
int sl_preparer_new(sl_preparer **out, const sl_prep_cfg *cfg, sl_err *err); /* copies *cfg */
void sl_preparer_free(sl_preparer *p);

/* A JSON line, or ids (+ mask or NULL). Fills *out with at least one part. SL_ETEMP: the machine lacks something just
 * now (memory, processes or open files, for the template helper above all); *out is empty, nothing is said of the
 * row, and it is to be tried again. */
int sl_prepare_json(sl_preparer *p, const char *line, size_t n, sl_prepared *out, sl_err *err);
void sl_prepare_ids(sl_preparer *p, const int32_t *ids, uint32_t n, const uint8_t *mask, uint32_t n_mask,
                    const char *id, uint32_t id_len, sl_prepared *out);
void sl_prepared_free(sl_prepared *p);
#endif
