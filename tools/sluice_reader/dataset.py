"""A PyTorch data set over a store, with random access."""
import numpy as np
import torch
from torch.utils.data import Dataset

from .store import Store


def as_tensor(x):
    """numpy as stored -> torch: uint16 is bf16 bits."""
    x = np.ascontiguousarray(x)
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == np.uint16 else torch.from_numpy(x.copy())


class StateDataset(Dataset):
    """Items are dicts: input_ids int64 [T], loss_mask int64 [T], hidden_states [T, K, width] (and final_norm [T, width] when the store has
    it beside H[n]), row, dataset. `layers` keeps only these states ("18", "final"); only their bytes are read."""

    def __init__(self, store, layers=None):
        self.store = store if isinstance(store, Store) else Store(store)
        self.layers = None if layers is None else [self.store.state_index(x) for x in layers]

    def __len__(self):
        return len(self.store)

    def __getitem__(self, i):
        row, s = self.store[i], self.store
        ks = list(range(len(s.labels))) if self.layers is None else self.layers
        split = self.layers is None and s.manifest["states"]["final"] == "both"
        item = {"input_ids": torch.from_numpy(row.ids.astype(np.int64)), "loss_mask": torch.from_numpy(row.mask.astype(np.int64)),
                "hidden_states": torch.stack([as_tensor(row.state(k, raw=True)) for k in (ks[:-1] if split else ks)], 1),
                "row": row.row, "dataset": row.dataset}
        if split:
            item["final_norm"] = as_tensor(row.state(ks[-1], raw=True))
        return item
