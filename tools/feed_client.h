/* feed_client: the client side of the feed protocol (ipc/wire.h), for one data set whose rows are the lines of one
 * file.
 *
 * Row number = line number - 1. A blank line is no row but keeps its number, as does a row that is not of this shard.
 * Lines go out as they stand; the feeder judges them. Only {offset, length, state, parts} of a row is held (24 bytes),
 * its text is read again when it has to be sent again, so a feeder restart costs nothing but the second transmission:
 *
 *   NEW --sent within credit--> SENT --ack--> ACCEPTED --done--> DURABLE
 *    ^                           |  \--ack rej--> REJECTED <--done rej--/
 *    +--silence, new hello-------+---(ACCEPTED too: so that `done` comes again)
 *
 * A row may give several parts (per-turn rows, long rows that are split). It is DURABLE when every accepted part has
 * its answer and at least one of them is written, REJECTED when none is: so rows = durable + rejected in the end, and
 * parts_written + parts_rejected is every part that the rows gave.
 *
 * Pushing a row again is harmless by the protocol. After 10 s without any message (pings are sent every 2 s) the
 * connection is made anew. Nothing here blocks longer than the timeout of sl_feed_client_turn. */
#ifndef SL_TOOLS_FEED_CLIENT_H
#define SL_TOOLS_FEED_CLIENT_H
#include "ipc/err.h"
#include <stdbool.h>
#include <stdint.h>

typedef enum { SL_FR_BLANK, SL_FR_NEW, SL_FR_SENT, SL_FR_ACCEPTED, SL_FR_DURABLE, SL_FR_REJECTED } sl_feed_row_state;

typedef struct sl_feed_counts {
    uint64_t rows;     /* rows found so far (no blank lines, this shard, within the limit) */
    uint64_t left_out; /* rows of other shards */
    uint64_t waiting;  /* NEW */
    uint64_t sent;     /* SENT */
    uint64_t accepted; /* ACCEPTED, not yet durable */
    uint64_t durable;
    uint64_t partly;   /* of the durable ones: some parts were rejected */
    uint64_t rejected; /* by the feeder or by gather */
    uint64_t parts_written, parts_rejected;
    uint64_t known;  /* of the answered ones: pushed before */
    uint64_t tokens; /* of the rows accepted anew */
    uint64_t reconnects;
} sl_feed_counts;

/* `parts` parts of a row were rejected, from number `part` on (SL_FEED_PART_ANY: it is not known which); line is row
 * + 1. */
#define SL_FEED_PART_ANY UINT32_MAX
typedef void (*sl_feed_rejected)(void *arg, const char *dataset, uint64_t row, uint32_t part, uint32_t parts,
                                 const char *reason, const char *msg);

typedef struct sl_feed_opts {
    const char *addr;           /* ipc://... or tcp://... */
    const char *dataset;        /* 1..255 bytes of UTF-8 */
    const char *client;         /* name for the feeder's log */
    const char *curve_dir;      /* tcp: client.secret, client.pub, server.pub; NULL = none */
    uint64_t limit;             /* rows; 0: all */
    uint64_t shard, shards;     /* only rows with row % shards == shard; shards 0: all */
    sl_feed_rejected on_reject; /* may be NULL */
    void *arg;
} sl_feed_opts;

typedef struct sl_feed_client sl_feed_client;

/* The fd is read with pread and stays the caller's. SL_EUSAGE: bad dataset name; SL_ETEMP: no socket. The connection is
 * made in the background: a feeder that is not there yet is waited for. */
int sl_feed_client_open(sl_feed_client **out, const sl_feed_opts *o, int fd, sl_err *err);
void sl_feed_client_close(sl_feed_client *c);
/* Find rows in the file up to its present end; a last line without newline counts only when `final`. Call again when
 * the file has grown. A line of more than 60 MB is rejected here (TOO_BIG). */
int sl_feed_client_scan(sl_feed_client *c, bool final, sl_err *err);
/* The limit is reached: no more rows will be taken from the file. */
bool sl_feed_client_full(const sl_feed_client *c);
/* Bytes of text before this are not needed any more; bytes of rows found and not yet sent; line number of the open
 * line. */
uint64_t sl_feed_client_needed(sl_feed_client *c);
uint64_t sl_feed_client_ahead(const sl_feed_client *c);
uint64_t sl_feed_client_line(const sl_feed_client *c);
/* Send what credit allows, take answers, wait at most timeout_ms for one. 1: something happened, 0: not, or SL_E*: the
 * feeder refused the stream (SL_EDATA) or reading the file failed. */
int sl_feed_client_turn(sl_feed_client *c, int timeout_ms, sl_err *err);
/* Ask the feeder to close the open batch once everything found so far is answered. */
void sl_feed_client_flush(sl_feed_client *c);
const sl_feed_counts *sl_feed_client_counts(const sl_feed_client *c);
bool sl_feed_client_answered(const sl_feed_client *c); /* no row NEW or SENT, and the flush (if asked for) confirmed */
bool sl_feed_client_durable(const sl_feed_client *c);  /* every row DURABLE or REJECTED */
bool sl_feed_client_refused(const sl_feed_client *c);  /* the service is draining: it takes no more rows */
/* Since the feeder was last heard, or since the start. It answers every 2 s when nothing else is to be said. */
uint64_t sl_feed_client_silent_ms(const sl_feed_client *c);
int sl_feed_client_fd(const sl_feed_client *c); /* to poll; then call turn(0) until it returns 0 */
#endif
