/* Rows as they come in: any bytes. What is accepted must keep the promises of rows.h. */
#include "stages/feeder/rows.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    sl_row row;
    sl_err why = {0};
    sl_reason r = sl_row_parse(&row, (const char *)data, size, 1000, &why);
    if (r) {
        if (!why.msg[0] || row.root) abort();
        return 0;
    }
    if (row.kind == SL_ROWK_IDS) {
        if (!row.T) abort();
        for (uint32_t i = 0; i < row.T; i++)
            if (row.ids[i] < 0 || row.ids[i] >= 1000 || row.mask[i] > 1) abort();
    }
    if (row.kind == SL_ROWK_TEXT &&
        (row.prompt_len > row.text_len || sl_utf8_check(row.text, row.text_len) < row.text_len))
        abort();
    if (row.kind == SL_ROWK_CHAT) {
        size_t i;
        json_t *m;
        json_array_foreach(row.messages, i, m) {
            json_t *c = json_object_get(m, "content");
            if (!json_is_string(json_object_get(m, "role")) || !(json_is_string(c) || json_is_null(c))) abort();
        }
    }
    if (row.id_len > SL_ROW_ID_MAX) abort();
    sl_row_free(&row);
    return 0;
}
