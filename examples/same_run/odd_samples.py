"""101 windows of bytes to train on and 13 to validate on, in plain loaders: the data of ``compare.py``."""

from __future__ import annotations

import textwrap
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class OddSamples(pl.LightningDataModule):
    """Windows of a file of Python's standard library, 8 of all ranks together in a batch.

    Args:
        context: Bytes of a window, which the model sees at once.
    """

    def __init__(self, context: int = 64) -> None:
        super().__init__()
        text = torch.frombuffer(bytearray(Path(textwrap.__file__).read_bytes()), dtype=torch.uint8).long()
        self.windows = text.unfold(0, context + 1, context)

    def _loader(self, windows: torch.Tensor, *, shuffle: bool = False) -> DataLoader[tuple[torch.Tensor, ...]]:
        samples = TensorDataset(windows[:, :-1], windows[:, 1:])
        return DataLoader(samples, 8 // self.trainer.world_size, shuffle=shuffle)  # type: ignore[union-attr]

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        """Return the loader of 101 windows."""
        return self._loader(self.windows[:101], shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        """Return the loader of 13 others."""
        return self._loader(self.windows[101:114])
