/* feed: the socket through which rows come in (ipc/wire.h is the protocol), and the way from there into intake.log.
 *
 * One ROUTER socket, any number of clients. Each client has a credit of `credit` rows that were sent and not yet
 * answered; a message that would exceed it is refused whole. Rows are prepared by the pool, journaled in order of
 * arrival, synced in groups (up to SL_FEED_GROUP rows or 5 ms), and only then acknowledged. A client that does not read
 * its answers costs the feeder a few bytes a row and holds up nobody.
 *
 * Addresses: ipc://PATH (the socket file gets mode 0600, or 0660 with a group), or tcp://... with CURVE only:
 * `curve_dir` holds server.secret (a 40-character Z85 secret key, mode 0600) and clients.pub (one Z85 public key of an
 * admitted client a line; # starts a comment). Without both, tcp:// is refused: the port would be open to everybody.
 *
 * A stream is open from a client's first row to its flush (or until it has been silent for SL_FEED_SILENT_S). */
#ifndef SL_FEEDER_FEED_H
#define SL_FEEDER_FEED_H
#include "stages/feeder/intake.h"
#include "stages/feeder/pool.h"

#define SL_FEED_GROUP     512
#define SL_FEED_SILENT_S  5
#define SL_FEED_MAX_BYTES (256ull << 20) /* of rows being prepared; beyond, the socket is not read */

typedef struct sl_feed_cfg {
    const char *addr, *curve_dir, *store; /* curve_dir may be "" */
    uint32_t credit;                      /* rows a client, >= 1 */
    uint32_t threads;
    uint32_t max_length, vocab;
    uint32_t socket_gid1; /* ipc://: 1 + the group that may use the socket; 0: only this user */
    uint64_t run_id;
    sl_prep_cfg prep;
    sl_intake *intake; /* borrowed */
} sl_feed_cfg;

typedef struct sl_feed_stats { /* counters since start, for the metrics page */
    uint64_t rows_in, parts_ok, parts_refused, tokens, messages, known, conflicts, errors, warned, cut, reasons[SL_R_N];
    bool paused;          /* the disk is full */
    bool lacking;         /* a row cannot be prepared just now (pool.h) */
    uint64_t queue;       /* rows being prepared or not yet durable */
    uint64_t last_row_ns; /* sl_now_ns of the last row that came */
    uint32_t open_streams;
} sl_feed_stats;

typedef struct sl_feed sl_feed;
int sl_feed_open(sl_feed **out, const sl_feed_cfg *cfg, sl_err *err); /* SL_ECONFIG: address, keys; SL_ETEMP: in use */
void sl_feed_close(sl_feed *f);
/* One turn: receive, journal, sync, answer. 1 when anything was done, 0 when not, or SL_E* when the feeder cannot go
 * on. */
int sl_feed_turn(sl_feed *f, sl_err *err);
/* From now on rows are answered with err "draining". */
void sl_feed_drain(sl_feed *f);
/* No row is being prepared or waiting for the disk. */
bool sl_feed_idle(const sl_feed *f);
/* What became durable goes to whoever pushed it: pass to sl_intake_follow with arg = the feed. */
void sl_feed_done(void *feed, sl_entry *e);
/* How long the caller may sleep before the next turn when nothing rings: milliseconds. */
int sl_feed_timeout_ms(const sl_feed *f);
/* Two fds to poll for input. */
int sl_feed_fd(const sl_feed *f);
int sl_feed_wake_fd(const sl_feed *f);
const sl_feed_stats *sl_feed_get_stats(sl_feed *f);
/* Close the open batch now (deadline, drain); buffered until the next turn. 1 when there was one. */
int sl_feed_flush(sl_feed *f, sl_err *err);

/* One message, as the socket would bring it, from client number `client`; for tests and fuzzing. */
void sl_feed_message(sl_feed *f, uint32_t client, const void *msg, size_t n);
/* The number of the client with this identity (at most 255 bytes), a new one the first time it is met; 0: not taken. */
uint32_t sl_feed_client(sl_feed *f, const void *identity, size_t n);
#endif
