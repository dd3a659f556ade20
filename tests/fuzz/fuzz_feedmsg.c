/* Messages at the feed socket: any bytes, from one client that has said hello and one that has not. Every row that was
 * taken must be answered. The store lies in a folder of its own under /dev/shm or /tmp. */
#include "ipc/log.h"
#include "stages/feeder/feed.h"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static char dir[64];
static sl_intake *in;
static sl_feed *feed;
static unsigned runs;

static void clean(void) {
    char cmd[96];
    sl_feed_close(feed);
    sl_intake_close(in);
    snprintf(cmd, sizeof cmd, "rm -rf %s", dir);
    if (dir[0] && system(cmd)) abort();
    feed = NULL;
    in = NULL;
}

/* A fresh store now and then, so that it does not grow without end. */
static void open_store(void) {
    static int registered;
    if (!registered++) atexit(clean);
    snprintf(dir, sizeof dir, "%s/sl_fuzz_XXXXXX", access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm");
    if (!mkdtemp(dir)) abort();
    sl_log_init("fuzz", SL_ERROR);
    sl_err e;
    sl_intake_cfg ic = {.store = dir, .batch_tokens = 64, .max_batch_rows = 8, .max_length = 16};
    sl_feed_cfg fc = {.addr = "",
                      .curve_dir = "",
                      .store = dir,
                      .credit = 100,
                      .threads = 1,
                      .vocab = 100,
                      .max_length = 16,
                      .prep = {.vocab = 100, .max_length = 16, .overlong = SL_LONG_SPLIT}};
    if (sl_intake_open(&in, &ic, &e)) abort();
    fc.intake = in;
    if (sl_feed_open(&feed, &fc, &e)) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char hello[] = "\x83\xa1t\xa5hello\xa1v\x01\xa7"
                                "dataset\xa1"
                                "d";
    sl_err e;
    if (runs++ % 2000 == 0) {
        if (feed) clean();
        open_store();
    }
    uint32_t a = sl_feed_client(feed, "a", 1), b = sl_feed_client(feed, "b", 1);
    sl_feed_message(feed, a, hello, sizeof hello - 1);
    sl_feed_message(feed, a, data, size);
    sl_feed_message(feed, b, data, size);
    for (int i = 0; !sl_feed_idle(feed); i++) {
        if (sl_feed_turn(feed, &e) < 0 || i > 100000) abort();
        if (!sl_feed_idle(feed)) usleep(20);
    }
    const sl_feed_stats *s = sl_feed_get_stats(feed);
    if (s->queue) abort();
    return 0;
}
