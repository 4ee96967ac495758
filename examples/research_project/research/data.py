"""178 wines, 13 measurements each, from three vineyards; part of scikit-learn."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule
from sklearn.datasets import load_wine
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split


class WineData(LightningDataModule):
    """Plain loaders; Lightning divides them among the ranks.

    Args:
        batch_size: Wines per rank.
    """

    def __init__(self, *, batch_size: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str | None = None) -> None:
        """Read and standardise the table; the same split on every rank."""
        rows, labels = load_wine(return_X_y=True)
        table = torch.tensor(rows, dtype=torch.float32)
        table = (table - table.mean(0)) / table.std(0)
        wines = TensorDataset(table, torch.tensor(labels))
        self.parts = random_split(wines, [0.7, 0.15, 0.15], torch.Generator().manual_seed(0))

    def _loader(self, part: Dataset[tuple[Tensor, ...]], *, shuffle: bool = False) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(part, batch_size=self.batch_size, shuffle=shuffle)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Shuffled."""
        return self._loader(self.parts[0], shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """In order."""
        return self._loader(self.parts[1])

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """In order."""
        return self._loader(self.parts[2])
