"""Read what Sluice wrote: hidden states of a language model, row by row, any layer on its own.

    from sluice_reader import Store
    store = Store("out")
    row = store[17]                      # a committed row; len(store) rows in the order they were accepted
    row.ids, row.mask                    # int32 [T], uint8 [T]
    row.state("18")                      # float32 [T, width]; also "final" for the final-normed state, or an index: row.state(0)
    row.state("18", raw=True)            # as stored: bf16 bits as uint16
    row.states()                         # float32 [T, K, width]

Needs numpy, and zstandard for compressed shards. The format is written down in ipc/store.h of the project; this package was written
from it. StateDataset (torch) and the exporters are in sluice_reader.dataset and sluice_reader.export.
"""
import sys

try:
    from .store import Row, Store, StoreError, bf16_to_f32
except ImportError as err:
    if sys.argv[0] != "-m":
        raise
    # (run as a program, by `sluice export` for one: a sentence instead of a traceback)
    print(f"error: {sys.executable} has no package {err.name}: install numpy, and zstandard for compressed shards, or choose "
          "another Python (sluice export --python PROGRAM)", file=sys.stderr)
    sys.exit(78)

__all__ = ["Store", "Row", "StoreError", "bf16_to_f32"]
