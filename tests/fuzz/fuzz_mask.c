/* Alignment of a rendering with its marked twin: any contents, any two texts. Spans that are found must lie in the
 * text, in order, and end with the end marker. Input: contents of user and assistant, rendering, marked rendering,
 * split at 0xff. */
#include "stages/feeder/mask.h"
#include "stages/feeder/rows.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char *part[4];
    size_t len[4] = {0};
    for (int i = 0; i < 4; i++) {
        const uint8_t *end = i < 3 ? memchr(data, 0xff, size) : NULL;
        len[i] = end ? (size_t)(end - data) : size;
        part[i] = malloc(len[i] + 1);
        if (!part[i]) abort();
        memcpy(part[i], data, len[i]);
        part[i][len[i]] = 0;
        size_t used = end ? len[i] + 1 : len[i];
        data += used;
        size -= used;
    }
    json_t *u = json_stringn(part[0], len[0]), *a = json_stringn(part[1], len[1]);
    if (u && a) {
        json_t *messages = json_pack("[{s:s,s:O},{s:s,s:O},{s:s,s:s}]", "role", "user", "content", u, "role",
                                     "assistant", "content", a, "role", "assistant", "content", "");
        unsigned char marked[3];
        json_t *mm = sl_mask_marked(messages, "K", marked);
        char head[] = "<A>", end[] = "<E>";
        sl_turn_marks tm = {.head = {head}, .end = end, .probed = true};
        sl_rendered full = {.text = part[2], .len = len[2]}, marks = {.text = part[3], .len = len[3]};
        sl_span spans[2];
        sl_err why = {0};
        sl_reason r = sl_mask_align(&full, &marks, messages, "K", marked, &tm, NULL, NULL, spans, &why);
        if (r && !why.msg[0]) abort();
        for (int i = 0; !r && i < 2; i++)
            if (spans[i].a > spans[i].b || spans[i].b > full.len || (i && spans[i].a < spans[i - 1].b) ||
                spans[i].b - spans[i].a < 3 || memcmp(full.text + spans[i].b - 3, end, 3) != 0)
                abort();
        json_decref(mm);
        json_decref(messages);
    }
    json_decref(u);
    json_decref(a);
    for (int i = 0; i < 4; i++) free(part[i]);
    return 0;
}
