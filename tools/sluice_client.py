#!/usr/bin/env python3
"""A client of Sluice's feed socket, in Python: rows in, answers out. The protocol is the comment of ipc/wire.h.

Needs pyzmq and msgpack (Debian: apt install python3-zmq python3-msgpack; PyPI: pip install pyzmq msgpack).

As a module:

    from sluice_client import Feed

    with Feed("ipc:///run/sluice/feed.sock", dataset="my-set") as feed:
        feed.push(0, {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]})
        feed.push(1, {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]})
        feed.push_ids(2, [5, 6, 7], mask=[0, 1, 1], id="third")        # no JSON on the way
        for row, what, why in feed.rejected():                          # so far
            print(row, what, why)
        feed.finish()          # flush, then wait until every row is on disk or rejected
        print(feed.counts())

A row is named by the data set and its number. Pushing a row again with the same content is harmless, so after any crash, of
the client or of the service, push everything again: what was taken is answered as known, and nothing is there twice.

As a command:

    sluice_client.py push --to ipc:///run/sluice/feed.sock --dataset my-set rows.jsonl
    sluice_client.py push --to tcp://host:7700 --curve KEYS rows.jsonl
    sluice_client.py keygen KEYS      # server.secret, server.pub, client.secret, client.pub, clients.pub

The exit status is 0 when every row was written, 1 when some were rejected, 2 after wrong use, 75 when the service is gone.
"""
import argparse
import collections
import json
import os
import struct
import sys
import time

try:
    import msgpack
    import zmq
except ImportError as e:
    sys.exit("sluice_client needs pyzmq and msgpack (apt install python3-zmq python3-msgpack): %s" % e)

VERSION = 1
MAX_MESSAGE = 32 << 20  # bytes of rows put into one message; the service takes 64 MiB


class FeedError(Exception):
    """The service cannot be used: gone, draining, or of another version."""


class Feed:
    """One stream of rows of one data set. Not thread-safe. Rows are held until they are on disk."""

    def __init__(self, address, dataset, client="python", curve=None, patience=60.0):
        """patience: seconds without a sign of life after which FeedError is raised. curve: folder with keys, for tcp://."""
        self.address, self.dataset, self.client, self.curve, self.patience = address, dataset, client, curve, patience
        self.context = zmq.Context()
        self.socket = None
        self.credit = 0
        self.unsent = collections.deque()  # row numbers
        self.sent = {}                     # row number -> packed ROW, unanswered
        self.held = {}                     # row number -> packed ROW, not yet sent
        self.open = {}                     # the same, accepted and not yet durable
        self.durable = set()
        self.parts = {}                    # row number -> accepted parts, when there are several
        self.refused = []                  # (row, reason, sentence)
        self.flushed = self.flushing = False
        self._connect()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def close(self):
        if self.socket:
            self.socket.close(linger=0)
            self.socket = None
        self.context.term()

    # ---- what a user calls ----

    def push(self, row, record):
        """Queue one row: a dict, or the JSON text of one (str or bytes)."""
        if isinstance(record, dict):
            record = json.dumps(record, ensure_ascii=False)
        if isinstance(record, str):
            record = record.encode("utf-8", "surrogatepass")
        self._queue(row, {"n": row, "j": bytes(record)})

    def push_ids(self, row, ids, mask=None, id=None):
        """Queue one row of token ids, with its loss mask (0/1 on the token itself) and its own id."""
        entry = {"n": row, "ids": struct.pack("<%di" % len(ids), *ids)}
        if mask is not None:
            entry["mask"] = bytes(1 if m else 0 for m in mask)
        if id is not None:
            entry["id"] = str(id)
        self._queue(row, entry)

    def finish(self, durable=True):
        """Everything queued is sent and answered, and forms batches; durable: also written or rejected."""
        while not self.flushed or (durable and self.open) or self.sent or self.held:
            if not self.flushed and not self.flushing and self.credit and not self.sent and not self.held:
                self._send({"t": "flush"})
                self.flushing = True
            self._turn(1000)

    def rejected(self):
        """(row, reason, sentence) of every row rejected so far."""
        return list(self.refused)

    def counts(self):
        """Rows by what became of them; partly: rows of several parts of which some were rejected (durable ones)."""
        bad = {r[0] for r in self.refused}
        return {"durable": len(self.durable), "accepted": len(self.open), "partly": len(bad & self.durable),
                "rejected": len(bad - self.durable - set(self.open)),
                "unanswered": len(self.sent) + len(self.held)}

    # ---- the protocol ----

    def _queue(self, row, entry):
        self.held[row] = msgpack.packb(entry, use_bin_type=True)
        self.unsent.append(row)
        self.flushed = False
        self._fill()
        while len(self.held) > 4 * max(self.credit, 1):  # do not read a whole data set into memory
            self._turn(1000)
        self._turn(0)

    def _connect(self):
        if self.socket:
            self.socket.close(linger=0)
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0  # every message that matters is answered, and the answer waited for
        if self.curve:
            read = lambda name: open(os.path.join(self.curve, name), "rb").read().strip()
            self.socket.curve_serverkey = read("server.pub")
            self.socket.curve_publickey, self.socket.curve_secretkey = read("client.pub"), read("client.secret")
        self.socket.connect(self.address)
        # What was not answered is sent again, and what was accepted too: only so will it be reported as done.
        again = {**self.open, **self.sent}
        self.held.update(again)
        self.unsent.extendleft(reversed(list(again)))
        self.open.clear()
        self.sent.clear()
        self.flushed = self.flushing = False
        self.credit, self.last, self.silent = 0, time.monotonic(), time.monotonic()
        self._send({"t": "hello", "v": VERSION, "dataset": self.dataset, "client": self.client})

    def _send(self, message):
        self.socket.send(msgpack.packb(message, use_bin_type=True))

    def _fill(self):
        """Send as many rows as the credit allows."""
        while self.unsent and len(self.sent) < self.credit:
            rows, size = [], 0
            while self.unsent and len(self.sent) < self.credit and size < MAX_MESSAGE:
                n = self.unsent.popleft()
                if n not in self.held:
                    continue
                self.sent[n] = self.held.pop(n)
                rows.append(self.sent[n])
                size += len(self.sent[n])
            if rows:
                pk = msgpack.Packer()
                head = pk.pack_map_header(2) + pk.pack("t") + pk.pack("rows") + pk.pack("rows") + pk.pack_array_header(len(rows))
                self.socket.send(head + b"".join(rows))

    def _turn(self, timeout_ms):
        """Take one answer if there is one within timeout_ms; reconnect when the service fell silent."""
        if self.socket.poll(timeout_ms):
            self._answer(msgpack.unpackb(self.socket.recv(), raw=False, strict_map_key=False))
            self.last = self.silent = time.monotonic()
            self._fill()
            return
        now = time.monotonic()
        if timeout_ms and now - self.last > 2:
            self.last = now
            self._send({"t": "ping"})
        if now - self.silent > self.patience:
            raise FeedError("no answer from %s for %.0f s" % (self.address, self.patience))
        if timeout_ms and now - self.silent > 10 and int(now - self.silent) % 10 == 0:
            silent = self.silent
            self._connect()
            self.silent = silent

    def _answer(self, m):
        t = m.get("t")
        if t == "welcome":
            if m["v"] != VERSION:
                raise FeedError("the service speaks version %s of the protocol, this client %d" % (m["v"], VERSION))
            self.credit = m["credit"]
        elif t == "ack":
            for n, parts, _tokens in m["acc"]:
                self._taken(n, parts)
            for n, parts in m["known"]:
                self._taken(n, parts)
            for n, _part, reason, text, _count in m["rej"]:
                self.sent.pop(n, None)
                self.refused.append((n, reason, text))
        elif t == "done":
            for n in m["ok"]:
                self._closed(n)
                self.durable.add(n)
            for n, verdict, text, count in m["rej"]:
                self._closed(n)
                if count < self.parts.get(n, 1):
                    self.durable.add(n)  # the other parts of the row are written
                self.refused.append((n, verdict, text))
        elif t == "flushed":
            self.flushed, self.flushing = True, False
        elif t == "err" and m.get("code") == "order" and self.credit:
            self._connect()  # the service was restarted and does not know this stream
        elif t == "err":
            raise FeedError("%s: %s" % (m.get("code"), m.get("msg")))

    def _taken(self, n, parts):
        if parts > 1:
            self.parts[n] = parts
        entry = self.sent.pop(n, None)
        if entry is not None and n not in self.durable:
            self.open[n] = entry

    def _closed(self, n):
        self.open.pop(n, None)
        self.sent.pop(n, None)


# ---- the command ----

def lines(paths):
    for path in paths or ["-"]:
        f = sys.stdin.buffer if path == "-" else open(path, "rb")
        name = "stdin" if path == "-" else os.path.basename(path)
        with f:
            for i, line in enumerate(f):
                line = line.rstrip(b"\n")
                if line:
                    yield name, i, line


def cmd_push(args):
    by_set = collections.OrderedDict()
    status, total = 0, collections.Counter()
    for name, i, line in lines(args.file):
        key = args.dataset or name
        if key not in by_set:
            by_set[key] = Feed(args.to, key, curve=args.curve)
        by_set[key].push(i, line)
    for name, feed in by_set.items():
        with feed:
            feed.finish(durable=args.wait == "durable")
            for row, reason, text in feed.rejected():
                print("%s:%d: rejected %s: %s" % (name, row + 1, reason, text), file=sys.stderr)
                status = 1
            total.update(feed.counts())
    print(json.dumps(total))
    return status


def cmd_keygen(args):
    os.makedirs(args.dir, mode=0o700, exist_ok=True)
    pairs = {"server": zmq.curve_keypair(), "client": zmq.curve_keypair()}
    files = {"clients.pub": pairs["client"][0]}
    for who, (public, secret) in pairs.items():
        files[who + ".pub"], files[who + ".secret"] = public, secret
    for name in files:
        if os.path.exists(os.path.join(args.dir, name)):
            sys.exit("%s is already there; keys are not overwritten" % os.path.join(args.dir, name))
    for name, key in files.items():
        fd = os.open(os.path.join(args.dir, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if name.endswith("secret") else 0o644)
        with os.fdopen(fd, "wb") as f:
            f.write(key + b"\n")
    print("service: server.secret, clients.pub    client: server.pub, client.pub, client.secret", file=sys.stderr)
    return 0


def main():
    ap = argparse.ArgumentParser(description="Client of Sluice's feed socket.")
    sub = ap.add_subparsers(dest="cmd", required=True)
    p = sub.add_parser("push", help="send the lines of files (JSONL) as rows")
    p.add_argument("--to", required=True, metavar="ADDRESS", help="ipc://... or tcp://...")
    p.add_argument("--dataset", metavar="NAME", help="name of the data set; default: the file's name")
    p.add_argument("--curve", metavar="DIR", help="keys for tcp://")
    p.add_argument("--wait", choices=["accepted", "durable"], default="durable")
    p.add_argument("file", nargs="*")
    k = sub.add_parser("keygen", help="make CURVE keys for tcp://")
    k.add_argument("dir")
    args = ap.parse_args()
    try:
        return cmd_push(args) if args.cmd == "push" else cmd_keygen(args)
    except FeedError as e:
        print("error: %s" % e, file=sys.stderr)
        return 75


if __name__ == "__main__":
    sys.exit(main())
