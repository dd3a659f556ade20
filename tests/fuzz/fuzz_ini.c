/* Any bytes as a configuration file: parsed or refused, never more. What is accepted prints and parses to the same
 * again. */
#include "daemon/config.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static sl_config a, b;
    sl_err e = {0};
    sl_config_default(&a);
    if (sl_config_parse(&a, "fuzz", (const char *)data, size, &e)) {
        if (!e.msg[0] || !e.code) abort();
        return 0;
    }
    char *text = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&text, &n);
    if (!f) return 0;
    sl_config_print(&a, f);
    fclose(f);
    int keys;
    const sl_config_key *k = sl_config_keys(&keys);
    bool printable =
        true; /* a value that INI cannot carry (" ;", leading blanks, quotes are kept) came from --set only */
    sl_config_default(&b);
    if (sl_config_parse(&b, "again", text, n, &e)) printable = false;
    for (int i = 0; printable && i < keys; i++)
        if (k[i].type != SL_KEY_DOUBLE && memcmp((char *)&a + k[i].offset, (char *)&b + k[i].offset, k[i].size))
            abort();
    free(text);
    return 0;
}
