#!/usr/bin/python3
"""The feeder's template helper: renders chat templates with Jinja2, and nothing else.

One request after another on stdin, answers on stdout. Every frame is a 4-byte little-endian length and that many bytes.
  before any      -> {"ready": true}: it runs; what ends it from here on is the template's doing
  first request   {"source": str, "source_tools": str|null, "vars": {...}}     -> {"ok": true, "tags": bool} | {"error": str}
  then            {"jobs": [{"messages": [...], "gen": bool, "extra": {...}}], "tools": [...]|null, "documents": ...|null}
                  -> {"out": [{"spans": [[a, b], ...]}, ...]} and one frame of UTF-8 text a job | {"error": str}
Spans are byte ranges of what the template put into {% generation %} ... {% endgeneration %}.
The process gives up what it does not need: memory, files, processes (the feeder has taken network and privileges).
"""
import json
import os
import resource
import sys

MEMORY = 2 << 30
MAX_TEXT = 64 << 20


def read_exactly(n):
    parts = []
    while n:
        b = os.read(0, min(n, 1 << 20))
        if not b:
            os._exit(0)
        parts.append(b)
        n -= len(b)
    return b"".join(parts)


def read_frame():
    return json.loads(read_exactly(int.from_bytes(read_exactly(4), "little")))


def write_frame(data):
    data = len(data).to_bytes(4, "little") + data
    while data:
        data = data[os.write(1, data[: 1 << 20]):]


def write_json(obj):
    write_frame(json.dumps(obj).encode())


try:
    import jinja2.debug  # noqa: F401  (Jinja loads it when a template raises, which is too late here)
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError as e:
    write_json({"ready": True})
    read_frame()
    write_json({"error": "Jinja2 for Python 3 is missing (Debian: apt install python3-jinja2): %s" % e})
    sys.exit(0)

# What marks a generation block in the output until the spans are taken from it: a secret of this process, so that no
# message can contain it.
SECRET = os.urandom(12).hex()
OPEN, CLOSE = "\x02<" + SECRET + "\x02", "\x02>" + SECRET + "\x02"


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}: what the model says."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller):
        return OPEN + caller() + CLOSE


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message):
    raise TemplateError(message)


def strftime_now(fmt):
    import datetime

    return datetime.datetime(2024, 7, 26).strftime(fmt)  # pinned: the same row is the same text on every day


def environment():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    return env


def take_spans(text):
    """The text without the marks, and the byte spans that they enclosed (outermost ones)."""
    if OPEN not in text:
        return text.encode(), []
    out, spans, at, depth, start = [], [], 0, 0, 0
    i, size = 0, 0
    while True:
        o, c = text.find(OPEN, i), text.find(CLOSE, i)
        j = min(x for x in (o, c, len(text)) if x >= 0)
        piece = text[i:j].encode()
        out.append(piece)
        size += len(piece)
        if j == len(text):
            return b"".join(out), spans
        if j == o:
            if depth == 0:
                start = size
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                spans.append([start, size])
        i = j + len(OPEN)


def describe(e):
    line = getattr(e, "lineno", None)
    text = str(e) or type(e).__name__
    if isinstance(e, TemplateError):
        return text if line is None else "line %d: %s" % (line, text)
    return "%s: %s" % (type(e).__name__, text)


def render(templates, variables, request):
    out, texts = [], []
    tools, documents = request.get("tools"), request.get("documents")
    template = templates[1] if tools and templates[1] else templates[0]
    for i, job in enumerate(request["jobs"]):
        args = dict(variables)
        args.update(job.get("extra") or {})
        args.update(messages=job["messages"], add_generation_prompt=job["gen"], tools=tools, documents=documents)
        text, spans = take_spans(template.render(args))
        if len(text) > MAX_TEXT:
            raise ValueError("the rendered text has %d bytes, at most %d are taken" % (len(text), MAX_TEXT))
        out.append({"spans": spans})
        texts.append(text)
    write_json({"out": out})
    for t in texts:
        write_frame(t)


def limit():
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    memory = MEMORY if most == resource.RLIM_INFINITY else min(MEMORY, most)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def main():
    limit()
    env = environment()
    write_json({"ready": True})
    first = read_frame()
    try:
        templates = [env.from_string(first["source"]), env.from_string(first["source_tools"]) if first.get("source_tools") else None]
        import datetime  # noqa: F401  (before files are given up)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    except Exception as e:
        write_json({"error": "the chat template cannot be compiled: " + describe(e)})
        return
    write_json({"ok": True, "tags": "endgeneration" in first["source"]})
    while True:
        request = read_frame()
        try:
            render(templates, first["vars"], request)
        except Exception as e:
            request = None  # the memory may be what was missing
            write_json({"error": describe(e)[:1500]})


main()
