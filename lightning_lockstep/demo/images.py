"""Handwritten digits, and a small image classifier."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_lockstep._settings import Faults, is_number, is_whole
from lightning_lockstep.demo.data import LABELLED_IMAGES, ClassifierModule, GlobalBatchDataModule
from lightning_lockstep.errors import MissingExtraError

# -- Scikit-learn's handwritten digits: 1797 grey images of 8 x 8 pixels, inside the wheel of scikit-learn


class DigitsData(GlobalBatchDataModule):
    """The digits 0 to 9, scanned from 43 writers (UCI optdigits, test part).

    Args:
        batch_size: Images per rank and micro-batch.
        global_batch_size: Images of all ranks in one optimizer step; when given, `batch_size` is derived.
        val_fraction: Share of the images kept for validation (0 to 1).
        test_fraction: Share of the images kept for the test (0 to 1).
        split_seed: Seed of the division into the three parts; the same on every run unless changed.
        num_workers: Loader processes per rank.

    Raises:
        ConfigurationError: A setting is out of range; the message lists every error.
        MissingExtraError: scikit-learn, which has the images, is not installed.

    Ranks:
        Every rank reads the whole set (0.9 MB) and takes its share of each global batch.
    """

    yields = LABELLED_IMAGES

    def __init__(
        self,
        *,
        batch_size: int = 32,
        global_batch_size: int | None = None,
        val_fraction: float = 0.125,
        test_fraction: float = 0.125,
        split_seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        if importlib.util.find_spec("sklearn") is None:
            raise MissingExtraError("scikit-learn", extra="demo", needed_for="data=digits")
        faults = Faults()
        shares = {"val_fraction": val_fraction, "test_fraction": test_fraction}
        for name, value in shares.items():
            faults.number(name, value, what="a share of the images", above=0, below=1)
        if is_number(val_fraction) and is_number(test_fraction):
            held_out = val_fraction + test_fraction
            faults.check(
                held_out < 1, "val_fraction + test_fraction", held_out, "less than 1: the rest trains"
            )
        super().__init__(
            faults,
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            num_workers=num_workers,
        )
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.split_seed = split_seed

    def setup(self, stage: str | None = None) -> None:
        """Read the images and divide them into `"train"`, `"val"` and `"test"`."""
        if self._splits:
            return
        images, labels = _read_digits()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.split_seed))
        images, labels = images[order], labels[order]
        val = round(len(labels) * self.val_fraction)
        test = round(len(labels) * self.test_fraction)
        train = len(labels) - val - test
        bounds = {"train": (0, train), "val": (train, train + val), "test": (train + val, len(labels))}
        self._splits = {
            name: TensorDataset(images[start:end], labels[start:end]) for name, (start, end) in bounds.items()
        }


def _read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images as `(sample, 1, 8, 8)` float32 in 0 to 1, and labels as `(sample,)` int64."""
    table = _table_of_scikit_learn()
    images, labels = table[:, :64].reshape(-1, 1, 8, 8), table[:, 64]
    return images.to(torch.float32).div_(16.0), labels.to(torch.int64)


def _table_of_scikit_learn() -> torch.Tensor:
    """The 64 pixels and the label of each image, a row each, read from the file in scikit-learn's wheel."""
    # Importing scikit-learn takes two seconds of CPU per rank, so it is imported only where the file has
    # moved.
    spec = importlib.util.find_spec("sklearn")
    folders = spec.submodule_search_locations or () if spec else ()
    for file in (Path(folder, "datasets", "data", "digits.csv.gz") for folder in folders):
        if file.is_file():
            return torch.from_numpy(numpy.loadtxt(file, delimiter=","))
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    return torch.from_numpy(numpy.column_stack([bunch.data, bunch.target]))


# -- A small convolutional network for small grey images --


class ConvNet(ClassifierModule):
    """Three convolutions with group normalisation, then one linear layer.

    Group normalisation keeps no statistics of the batch, so that the network computes the same function of
    the global batch on any number of ranks.

    Args:
        width: Channels of the first convolution; a multiple of 8.
        num_classes: Number of classes.
        in_channels: Channels of an image.
        learning_rate: Step size of AdamW.
        weight_decay: Decoupled weight decay of AdamW, on matrices only.
        warmup_steps: Steps over which the learning rate rises from 0 [optimizer steps].
        global_train_loss: Average `train_loss` over all ranks instead of logging rank 0's own.

    Raises:
        ConfigurationError: A setting is out of range; the message lists every error.

    Ranks:
        See `ClassifierModule`.
    """

    takes = LABELLED_IMAGES

    def __init__(
        self,
        *,
        width: int = 32,
        num_classes: int = 10,
        in_channels: int = 1,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.01,
        warmup_steps: int = 0,
        global_train_loss: bool = True,
    ) -> None:
        faults = Faults()
        in_groups = is_whole(width) and width > 0 and width % 8 == 0
        faults.check(in_groups, "width", width, "a multiple of 8 (channels in 8 groups)")
        faults.whole("num_classes", num_classes, least=2)
        faults.whole("in_channels", in_channels)
        super().__init__(
            faults,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            global_train_loss=global_train_loss,
        )
        self.save_hyperparameters()
        self.body = nn.Sequential(
            _block(in_channels, width),
            _block(width, 2 * width),
            nn.MaxPool2d(2),
            _block(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(8 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `(batch, num_classes)` of images `(batch, in_channels, height, width)`."""
        logits: Tensor = self.head(self.body(images))
        return logits


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False), nn.GroupNorm(8, outputs), nn.GELU()
    )
