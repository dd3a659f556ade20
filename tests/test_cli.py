#!/usr/bin/env python3
"""The command line: every command has its manual page, wrong use is 2, and errors name the place. usage: test_cli.py SLUICE SLUICED"""
import json
import os
import subprocess
import sys
import tempfile

sluice, sluiced = sys.argv[1], sys.argv[2]
bad = []


def run(*args, cwd=None, env=None):
    r = subprocess.run(args, capture_output=True, text=True, timeout=900, cwd=cwd, env=dict(os.environ, **(env or {})))
    return r.returncode, r.stdout, r.stderr


def expect(what, ok, detail=""):
    if not ok:
        bad.append(what)
        print(f"FAIL {what}\n{detail}")


rc, out, err = run(sluice)
expect("no command is wrong use", rc == 2 and not out and "usage: sluice COMMAND" in err, err)
rc, out, err = run(sluice, "--help")
expect("--help is on stdout", rc == 0 and "usage: sluice COMMAND" in out and not err, out)
commands = [l.split()[0] for l in out.splitlines() if l.startswith("  ") and l.strip()]
expect("the commands of this part are there", {"extract", "push", "monitor", "status", "drain", "check"} <= set(commands), out)
for c in commands:
    rc, out, err = run(sluice, c, "--help")
    expect(f"{c} --help", rc == 0 and not err and len(out) > 200, out + err)
    expect(f"{c} --help: its last line ends, examples are set in",
           out.endswith("\n") and all(l.startswith("    ") for l in out.partition("\nEXAMPLES\n")[2].splitlines()), out[-300:])
    rc, out2, err = run(sluice, "help", c)
    expect(f"help {c}", rc == 0 and out2 == out, out2)
    rc, out, err = run(sluice, c, "--no-such-option-exists")
    expect(f"{c} with an unknown option", rc == 2 and not out and err, f"{rc} {out} {err}")
for c in ("extract", "push", "monitor", "status", "drain", "check"):
    page = run(sluice, c, "--help")[1]
    expect(f"{c}: sections", all(w in page for w in ("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXIT STATUS", "EXAMPLES")), page)
rc, out, err = run(sluice, "extrcat")
expect("unknown command", rc == 2 and "extrcat" in err, err)
rc, out, err = run(sluice, "extract", "--modle", "x")
expect("nearest option", rc == 2 and "did you mean '--model'" in err, err)
rc, out, err = run(sluice, "extract", "--model", "x")
expect("required option", rc == 2 and "--input" in err, err)
rc, out, err = run(sluice, "extract", "-m", "x", "-i", "y", "-o", "z", "--final", "maybe")
expect("choice", rc == 2 and "pre|post|both" in err, err)
rc, out, err = run(sluice, "status", "surplus")
expect("surplus argument", rc == 2 and "surplus" in err, err)
rc, out, err = run(sluice, "monitor", "--count", "x")
expect("number", rc == 2 and "whole number" in err, err)

with tempfile.TemporaryDirectory() as d:
    nowhere = {"XDG_RUNTIME_DIR": d, "RUNTIME_DIRECTORY": ""}
    for c in ("status", "drain", "monitor"):
        rc, out, err = run(sluice, c, "--at", d, env=nowhere)
        expect(f"{c} without a service", rc == 75 and "no sluiced is running" in err, f"{rc} {err}")
    rc, out, err = run(sluice, "push", "--to", f"ipc://{d}/feed.sock", "--patience", "7s", __file__)
    expect("push to a service that is not there", rc == 75 and "WARNING: no answer from ipc://" in err and "--patience" in err, f"{rc} {err}")
    rc, out, err = run(sluice, "extract", "-m", d + "/none", "-i", __file__, "-o", d + "/out")
    expect("extract without a model", rc == 78 and d + "/none" in err, f"{rc} {err}")
    rc, out, err = run(sluice, "check", "--json", "--store", d)
    c = json.loads(out)["checks"]
    expect("check --json", rc in (0, 78) and {k["name"] for k in c} >= {"memlock", "io_uring", "store", "o_direct"}, out)
    expect("each fault has a remedy", all(k["remedy"] for k in c if k["state"] in ("warn", "FAIL")), out)

    rc, default, err = run(sluiced, "--print-default-config")
    expect("default config", rc == 0 and "[store]" in default and "shard_size = 4GiB" in default, default)
    with open(d + "/ok.ini", "w") as f:
        f.write(default)
    rc, out, err = run(sluiced, "--config", d + "/ok.ini", "--print-config")
    expect("the default file is accepted", rc == 0 and out == default, err)
    rc, out, err = run(sluiced, "--config", d + "/ok.ini")
    expect("what is required is named", rc == 78 and "[model] path is required" in err, f"{rc} {err}")
    with open(d + "/bad.ini", "w") as f:
        f.write("[store]\nlayuot = files\n")
    rc, out, err = run(sluiced, "--config", d + "/bad.ini")
    expect("misspelt key", rc == 78 and "bad.ini:2" in err and "'layout' in [store]" in err, f"{rc} {err}")
    rc, out, err = run(sluiced, "--set", "store.layuot=files")
    expect("misspelt --set", rc == 78 and "'layout' in [store]" in err, f"{rc} {err}")
rc, out, err = run(sluiced)
expect("sluiced without configuration", rc == 2, err)
rc, out, err = run(sluiced, "--nonsense")
expect("sluiced with an unknown option", rc == 2, err)
print(f"{len(commands)} commands, {len(bad)} faults")
sys.exit(1 if bad else 0)
