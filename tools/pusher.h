/* pusher: the rows of a list of inputs (input.h) into one feed socket, in order: the next input is opened when every
 * row of the one before was answered, so that rows are packed in the order of the list, whatever the disk does. Up to
 * SL_PUSHER_OPEN inputs may still wait for their states to be written. Text is read at most SL_PUSHER_AHEAD bytes ahead
 * of what was sent.
 *
 * An input that cannot be read to its end (damaged compression, a read error) gives the rows before the damage and one
 * sentence (sl_pusher_fault); the other inputs go on. */
#ifndef SL_TOOLS_PUSHER_H
#define SL_TOOLS_PUSHER_H
#include "tools/feed_client.h"
#include "tools/input.h"
#include <poll.h>

#define SL_PUSHER_OPEN  64
#define SL_PUSHER_AHEAD (64u << 20)

typedef struct sl_pusher_opts {
    const char *addr, *client, *curve_dir, *spool; /* spool: see sl_input_open */
    const sl_input_list *inputs;                   /* borrowed */
    uint64_t limit;                                /* rows of all inputs together; 0: all */
    uint64_t shard, shards;                        /* see feed_client.h */
    bool accepted;                                 /* be done with an input when its rows are accepted, not durable */
    sl_feed_rejected on_reject;
    void *arg;
} sl_pusher_opts;

typedef struct sl_pusher sl_pusher;
int sl_pusher_open(sl_pusher **out, const sl_pusher_opts *o, sl_err *err);
void sl_pusher_close(sl_pusher *p);
/* One turn, never waits. 1: something was done; 0: nothing to do now; SL_E*: it cannot go on. */
int sl_pusher_turn(sl_pusher *p, sl_err *err);
/* What to poll between turns, with 100 ms at most; returns how many, at most SL_PUSHER_OPEN + 1. */
int sl_pusher_fds(sl_pusher *p, struct pollfd *fds);
bool sl_pusher_read(const sl_pusher *p);          /* every row was found: counts.rows is final */
bool sl_pusher_answered(const sl_pusher *p);      /* and answered */
bool sl_pusher_done(const sl_pusher *p);          /* and durable or rejected (accepted: answered) */
bool sl_pusher_refused(const sl_pusher *p);       /* the service is draining and rows are left */
uint64_t sl_pusher_silent_ms(const sl_pusher *p); /* since the service was last heard; 0 when nothing is open */
sl_feed_counts sl_pusher_counts(const sl_pusher *p);
const char *sl_pusher_fault(const sl_pusher *p); /* the first input that could not be read to its end, or NULL */

/* "I/N", I from 1 to N: rows whose line number is I, I + N, I + 2N ... . SL_EUSAGE. */
int sl_pusher_shard(const char *text, uint64_t *shard, uint64_t *shards, sl_err *err);

/* Rejected parts by reason, for summaries; order of appearance. Reasons beyond the table are counted as "OTHER". */
typedef struct sl_reasons {
    struct {
        char name[32];
        uint64_t n;
    } v[48];
    int n;
} sl_reasons;
void sl_reasons_add(sl_reasons *r, const char *name, uint64_t n);
#endif
