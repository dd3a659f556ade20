/* wire: the messages on the sockets. ZeroMQ frames, one msgpack map a message, keys are short strings.
 * Version 1. Limits: a message is at most SL_WIRE_MAX bytes, nesting at most 32 deep; anything else is answered with an
 * error that names the field. This header is the protocol manual; tools/sluice_client.py is a client written from it.
 *
 * Feed (feeder ROUTER, client DEALER; ipc:// with mode 0600, 0660 with a socket_group; tcp:// only with CURVE keys):
 *  client -> feeder
 *   {t:"hello", v:1, dataset:str, client:str}
 *        answered by {t:"welcome", v:1, credit:u32, run:u64, max_length:u32, vocab:u32, store:str}
 *   {t:"rows", rows:[ROW, ...]}    at most `credit` rows outstanding (sent, not yet accepted/rejected/known)
 *        ROW = {n:u64 row number in the data set, j:bin the JSON line as it stands}   (text, messages, input_ids, ...)
 *            | {n:u64, ids:bin int32 LE, mask:bin u8 (optional), id:str (optional)}   (token ids, no parsing)
 *   {t:"flush"}                    everything sent before forms batches now; also ends a stream
 *   {t:"ping"}                     answered by {t:"pong"}; before hello by err "order", so that a client notices a
 *                                  new feeder
 *  feeder -> client
 *   {t:"ack", acc:[[n, parts, tokens]...], known:[[n, parts]...], rej:[[n, part, reason:str, message:str, count]...]}
 *                                  after intake.log is durable. parts: how many the row gave that were accepted; a row
 *                                  with refused parts beside accepted ones is in rej too. A rej entry speaks of `count`
 *                                  parts from `part` on; count is 1 but for parts refused at an earlier push, which
 *                                  are one entry from part 0 with the reason of the last.
 *   {t:"done", ok:[n...], rej:[[n, verdict:str, detail:str, count]...]}
 *                                  after commit.log is durable; rej: `count` of the accepted parts were rejected, the
 *                                  others are written
 *   {t:"flushed"}
 *   {t:"err", code:str, msg:str}   the message could not be used; the connection stays usable
 *
 * A row pushed again with the same content is `known` (and reported in `done` again when it is durable); with other
 * content it is rejected CONFLICT. When the feeder restarts the client sees silence, sends hello again and re-sends
 * what was not acked: harmless by the rule before.
 *
 * Control (sluiced REP at sock_control): {t:"status"} gives the status map, {t:"drain"} gives {ok:true}; {t:"ping"},
 * {t:"config"}. Progress (sluiced PUB at sock_progress): one status map every 250 ms, and events
 * {t:"event", lv, who, msg}. Status map: see daemon/status.h; the same map is what `sluice status --json` and
 * `sluice monitor --json` print. */
#ifndef SL_IPC_WIRE_H
#define SL_IPC_WIRE_H
#include "ipc/err.h"
#include <stdint.h>
#include <msgpack.h>
#define SL_WIRE_VERSION 1
#define SL_WIRE_MAX     (64u << 20)
#define SL_WIRE_DEPTH   32

/* Who may use the socket that was bound to `addr`: this user, and group gid1 - 1 unless gid1 is 0. Bind under umask
 * 0177, so that it is never open to others. Does nothing where there is no file. SL_ECONFIG: not allowed. */
int sl_wire_access(const char *addr, uint32_t gid1, sl_err *err);

/* Unpack one msgpack object that must fill the buffer exactly and be a map; refuses depth > SL_WIRE_DEPTH and sizes
 * that exceed the buffer. The result points into `zone`/buf; free with msgpack_unpacked_destroy. */
int sl_wire_unpack(msgpack_unpacked *out, const void *buf, size_t len, sl_err *err);
/* Field look-up in a map; NULL when absent. */
const msgpack_object *sl_wire_get(const msgpack_object *map, const char *key);
/* Typed look-ups: SL_EDATA naming the key when absent or of another type or out of range. */
int sl_wire_u64(const msgpack_object *map, const char *key, uint64_t *out, sl_err *err);
int sl_wire_str(const msgpack_object *map, const char *key, const char **s, uint32_t *len, sl_err *err);
int sl_wire_bin(const msgpack_object *map, const char *key, const void **p, uint32_t *len, sl_err *err);
/* Packing helpers for C-string keys. */
void sl_wire_key(msgpack_packer *pk, const char *key);
void sl_wire_kstr(msgpack_packer *pk, const char *key, const char *val);
void sl_wire_ku64(msgpack_packer *pk, const char *key, uint64_t val);
void sl_wire_kdbl(msgpack_packer *pk, const char *key, double val);
#endif
