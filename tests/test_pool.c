/* pool: four threads, each with its template helper, and every row comes back once, in order. Run under TSan too.
 *   test_pool TOKENIZER_FOLDER */
#include "ipc/doorbell.h"
#include "ipc/log.h"
#include "stages/feeder/pool.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { JOBS = 600 };

static unsigned take(sl_pool *p, unsigned next) {
    for (sl_job *j; (j = sl_pool_take(p)); next++) {
        const char *why =
            j->kind != SL_JOB_FLUSH && (j->out.n != 1 || j->out.parts[0].reason) ? j->out.parts[0].why : NULL;
        if (j->row != next || why) {
            printf("FAIL: job %u came back as %llu: %s\n", next, (unsigned long long)j->row,
                   why ? why : "out of order");
            exit(1);
        }
        sl_job_free(j);
    }
    return next;
}

static sl_job *make(unsigned i) {
    static const char *const lines[] = {
        "{\"text\":\"hi ok\"}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"q\"},{\"role\":\"assistant\",\"content\":\"a\"}]}",
        "{\"input_ids\":[1,2,3]}"};
    sl_job *j = calloc(1, sizeof *j);
    if (!j) exit(1);
    j->row = i;
    j->kind = i % 50 == 49 ? SL_JOB_FLUSH : SL_JOB_JSON;
    j->data = strdup(lines[i % 3]);
    j->bytes = strlen(lines[i % 3]);
    return j;
}

int main(int argc, char **argv) {
    sl_err e;
    sl_pool *p;
    sl_prep_cfg c = {0};
    sl_tokenizer *tok;
    sl_template *t;
    if (argc != 2) return 2;
    sl_log_init("test", SL_ERROR);
    int wake = sl_bell_create(&e);
    if (wake < 0 || sl_tokenizer_load(&tok, argv[1], &e) || sl_template_load(&t, argv[1], "", "{}", &e))
        return printf("%s\n", e.msg), 1;
    c.tok = tok;
    c.tmpl = t;
    if (sl_pool_new(&p, &c, 4, wake, &e)) return printf("%s\n", e.msg), 1;
    unsigned next = 0;
    for (unsigned i = 0; i < JOBS; i++) {
        sl_pool_put(p, make(i));
        next = take(p, next);
    }
    while (next < JOBS) {
        struct pollfd f[1] = {{0}};
        if (sl_bell_wait(wake, f, 1, 30000) == 0) return printf("FAIL: the pool is silent after %u jobs\n", next), 1;
        sl_bell_drain(wake);
        next = take(p, next);
    }
    if (sl_pool_jobs(p) || sl_pool_bytes(p))
        return printf("FAIL: the pool counts %llu jobs\n", (unsigned long long)sl_pool_jobs(p)), 1;
    for (unsigned i = 0; i < 50; i++) sl_pool_put(p, make(i)); /* left in the pool: dropped, not leaked */
    sl_pool_free(p);
    sl_template_free(t);
    sl_tokenizer_free(tok);
    close(wake);
    printf("%u jobs in order\n", next);
    return 0;
}
