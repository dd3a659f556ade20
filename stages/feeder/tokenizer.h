/* tokenizer: text to token ids, natively. HF tokenizer.json (byte-level BPE and byte-fallback BPE), tiktoken files
 * (Kimi), GGUF vocabularies (gpt2 and llama kinds). Linear-time merging. Immutable after load: any number of threads
 * may encode at once, each with its own sl_tok_scratch. */
#ifndef SL_FEEDER_TOKENIZER_H
#define SL_FEEDER_TOKENIZER_H
#include "ipc/err.h"
#include <stdint.h>
#include <stdbool.h>
#include <stddef.h>

typedef struct sl_tokenizer sl_tokenizer;
typedef struct sl_tok_scratch sl_tok_scratch;

typedef struct sl_ids { /* growable, owned by the caller: start zeroed, free(ids), free(off) */
    int32_t *ids;
    uint32_t *off; /* byte offset in the input text where token i starts (NULL = not wanted; ask with want_off) */
    size_t n, cap;
    bool want_off;
} sl_ids;

/* `path`: a model folder (tokenizer.json, else tiktoken.model + tokenizer_config.json), one of those files, or a .gguf.
 * SL_ECONFIG names file and what is not understood (a pre-tokenizer type, say): never guessed. */
int sl_tokenizer_load(sl_tokenizer **out, const char *path, sl_err *err);
void sl_tokenizer_free(sl_tokenizer *t);
sl_tok_scratch *sl_tok_scratch_new(void);
void sl_tok_scratch_free(sl_tok_scratch *s);

/* Append the ids of text[0..n) (UTF-8; invalid bytes are SL_EDATA with the offset; so are texts over 1 GiB
 * and runs over 16 MiB that the pre-tokenizer cannot split) to *out. *out is unchanged on failure. add_special:
 * prepend/append what the post-processor says (BOS); rendered chats are encoded with false. parse_special: special
 * tokens written in the text become control tokens (the reference behaviour, default true). */
int sl_tokenizer_encode(const sl_tokenizer *t, sl_tok_scratch *s, const char *text, size_t n, bool add_special,
                        bool parse_special, sl_ids *out, sl_err *err);
/* Merge look-ups so far: a measure of work that needs no clock. */
uint64_t sl_tok_scratch_work(const sl_tok_scratch *s);
/* Bytes of one token (not NUL-terminated); NULL when out of range. Special tokens give their written form. */
const char *sl_tokenizer_piece(const sl_tokenizer *t, int32_t id, size_t *len);
int32_t sl_tokenizer_vocab(const sl_tokenizer *t); /* ids are in [0, vocab) */
int32_t sl_tokenizer_special(const sl_tokenizer *t,
                             const char *written);    /* id of a special token, -1 when there is none */
const char *sl_tokenizer_hash(const sl_tokenizer *t); /* hex, of the files' bytes */
/* With want_off, off[i] is where token i begins in the text as given, and token i reaches to off[i + 1] (or the end).
 * Exact, byte for byte, for byte-level tokenizers. Where a normalizer changed the text (NFC, "▁" for a space), a token
 * that begins inside a changed stretch counts from where that stretch begins. False here: the normalizer may change
 * text, so that this can happen. */
bool sl_tokenizer_exact(const sl_tokenizer *t);
const char *sl_tokenizer_kind(
    const sl_tokenizer *t); /* "bpe-bytelevel", "bpe-bytefallback", "tiktoken", "gguf-gpt2", "gguf-llama" */
#endif
