#!/usr/bin/env python3
"""What reading one state of one row of a large sealed shard costs, in bytes that the process read (rchar of /proc/PID/io: program, logs
and all), through `sluice cat` and through the Python reader.
   one_state.py SLUICE DIR [SHARD_MIB]     default 4096; less than twice the state's bytes is the bar, exit status 1 when it is missed"""
import glob, os, shutil, subprocess, sys

tools = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools")
sluice, where, mib = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 4096
PY = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy, zstandard
def rchar(): return int(open("/proc/self/io").readline().split()[1])
from sluice_reader import Store
a = rchar(); a += rchar() - a
s = Store(sys.argv[2]); s.find(int(sys.argv[3])).state(sys.argv[4], raw=True)
print(rchar() - a)
"""


def child_rchar(cmd):
    p = subprocess.Popen(cmd, stdout=subprocess.DEVNULL)
    os.waitid(os.P_PID, p.pid, os.WEXITED | os.WNOWAIT)
    n = int(open(f"/proc/{p.pid}/io").readline().split()[1])
    if p.wait():
        sys.exit(f"{cmd[0]} ended with {p.returncode}")
    return n


bad = 0
for codec, factor in (("none", 1.0), ("bf16", 1.5)):
    subprocess.run([sluice, "bench", "store", "--dir", where, "--bytes", f"{int(mib * factor)}MiB", "--shard-size", "1TiB", "--codec", codec, "--threads",
                    str(os.cpu_count()), "--keep"], check=True, stdout=subprocess.DEVNULL)
    store = max(glob.glob(os.path.join(where, "sluice-bench-*")), key=os.path.getmtime)
    try:
        shard = os.path.join(store, "shards", "shard-000000.sls")
        state = 2048 * 4096 * 2
        c = child_rchar([sluice, "cat", store, "31", "--layer", "2", "--format", "npy"])
        py = int(subprocess.run([sys.executable, "-c", PY, tools, store, "31", "2"], check=True, stdout=subprocess.PIPE).stdout)
        print(f"codec {codec}: shard of {os.path.getsize(shard) / 2**30:.2f} GiB, one state of {state} bytes: sluice cat read {c} ({c / state:.3f}), "
              f"Python reader {py} ({py / state:.3f})")
        bad |= max(c, py) >= 2 * state
    finally:
        shutil.rmtree(store)
sys.exit(int(bad))
