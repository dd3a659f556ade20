"""python3 -m sluice_reader info STORE | export STORE DIR --format F"""
import argparse
import sys

from .export import FORMATS, export
from .store import Store, StoreError


def main():
    p = argparse.ArgumentParser(prog="sluice_reader", description="read and export stores of hidden states")
    sub = p.add_subparsers(dest="cmd", required=True)
    i = sub.add_parser("info", help="what a store holds")
    i.add_argument("store")
    e = sub.add_parser("export", help="convert a store to a trainer's format")
    e.add_argument("store")
    e.add_argument("out")
    e.add_argument("--format", required=True, choices=sorted(FORMATS))
    e.add_argument("--dataset", help="only rows of this data set")
    e.add_argument("--model", help="model folder, for the final norm (default: the one in the manifest)")
    a = p.parse_args()
    try:
        if a.cmd == "info":
            s = Store(a.store)
            print(f"{len(s)} rows, {sum(r.tokens for r in s)} tokens, states {', '.join(s.labels)} of width {s.width} ({s.manifest['states']['dtype']})")
        else:
            info = export(a.store, a.format, a.out, a.dataset, a.model)
            print(f"{len(info['rows'])} rows, H {info['h_indices']}, in {a.out}", file=sys.stderr)
            if info.get("hint"):
                print(info["hint"], file=sys.stderr)
    except (StoreError, OSError) as err:
        print(f"error: {err}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
