"""Handwritten digits, and a small image classifier."""

from __future__ import annotations

import gzip
import random
from importlib import resources
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_lockstep._settings import Faults, is_number, is_whole
from lightning_lockstep.demo.data import ClassifierModule, GlobalBatchDataModule

# -- 1797 grey images of 8 x 8 pixels, in the same order as scikit-learn's `load_digits` has them --


class DigitsData(GlobalBatchDataModule):
    """The digits 0 to 9, scanned from 13 writers.

    Args:
        batch_size: Images per rank and micro-batch.
        global_batch_size: Images of all ranks in one optimizer step; when given, `batch_size` is derived.
        val_fraction: Share of the images kept for validation (0 to 1).
        test_fraction: Share of the images kept for the test (0 to 1).
        augment: Whether training images are moved by up to one pixel, and get noise.
        num_workers: Loader processes per rank.

    Raises:
        ConfigurationError: A setting is out of range; the message lists every error.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
        1998, https://doi.org/10.24432/C50P49, CC BY 4.0; here its test part, `digits.gz`.

    Ranks:
        Every rank reads the whole set (0.5 MB) and takes its share of each global batch.
    """

    def __init__(
        self,
        *,
        batch_size: int = 32,
        global_batch_size: int | None = None,
        val_fraction: float = 0.125,
        test_fraction: float = 0.125,
        augment: bool = False,
        num_workers: int = 0,
    ) -> None:
        faults = Faults()
        shares = {"val_fraction": val_fraction, "test_fraction": test_fraction}
        for name, value in shares.items():
            faults.number(name, value, what="a share of the images", above=0, below=1)
        if is_number(val_fraction) and is_number(test_fraction):
            held_out = val_fraction + test_fraction
            faults.check(held_out < 1, "val_fraction + test_fraction", held_out, "less than 1: the rest trains")
        faults.flag("augment", augment)
        super().__init__(faults, batch_size=batch_size, global_batch_size=global_batch_size, num_workers=num_workers)
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.augment = augment

    def setup(self, stage: str | None = None) -> None:
        """Read the images and divide them into `"train"`, `"val"` and `"test"`."""
        if self._splits:
            return
        images, labels = _read_digits()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        images, labels = images[order], labels[order]
        val = round(len(labels) * self.val_fraction)
        test = round(len(labels) * self.test_fraction)
        train = len(labels) - val - test
        bounds = {"train": (0, train), "val": (train, train + val), "test": (train + val, len(labels))}
        self._splits = {
            name: TensorDataset(images[start:end], labels[start:end]) for name, (start, end) in bounds.items()
        }
        if self.augment:
            self._splits["train"] = _Augmented(images[:train], labels[:train])


class _Augmented(TensorDataset):
    """Images that are moved by up to one pixel, with noise: other ones each time."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        image, label = (one[index] for one in self.tensors)
        left, top = random.randrange(3), random.randrange(3)
        moved = nn.functional.pad(image, (1, 1, 1, 1))[:, top : top + 8, left : left + 8]
        return moved + 0.1 * torch.randn(image.shape), label


def _read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images as `(sample, 1, 8, 8)` float32 in 0 to 1, and labels as `(sample,)` int64."""
    packed = resources.files("lightning_lockstep.demo").joinpath("digits.gz").read_bytes()
    # A row for each image: 64 pixels from 0 to 16, and the label.
    table = torch.frombuffer(bytearray(gzip.decompress(packed)), dtype=torch.uint8).reshape(-1, 65)
    images, labels = table[:, :64].reshape(-1, 1, 8, 8), table[:, 64]
    return images.to(torch.float32).div_(16.0), labels.to(torch.int64)


# -- A small convolutional network for small grey images --


class ConvNet(ClassifierModule):
    """Three convolutions with normalisation, then one linear layer.

    Group normalisation keeps no statistics of the batch, so that the network computes the same function of
    the global batch on any number of ranks. With batch normalisation or dropout it does so under
    ``batch_norm="of_batch"`` and ``random_numbers="of_sample"`` of the strategy.

    Args:
        width: Channels of the first convolution; a multiple of 8.
        norm: The normalisation after each convolution, ``group`` or ``batch``.
        dropout: Share of the features that are left out in front of the linear layer (0 to 1).
        learning_rate: Step size of AdamW.
        weight_decay: Decoupled weight decay of AdamW, on matrices only.
        warmup_steps: Steps over which the learning rate rises from 0 [optimizer steps].

    Raises:
        ConfigurationError: A setting is out of range; the message lists every error.

    Ranks:
        See `ClassifierModule`.
    """

    def __init__(
        self,
        *,
        width: int = 32,
        norm: Literal["group", "batch"] = "group",
        dropout: float = 0.0,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.01,
        warmup_steps: int = 0,
    ) -> None:
        faults = Faults()
        in_groups = is_whole(width) and width > 0 and width % 8 == 0
        faults.check(in_groups, "width", width, "a multiple of 8 (channels in 8 groups)")
        faults.choice("norm", norm, ("group", "batch"))
        faults.number("dropout", dropout, what="a share of the features", least=0, below=1)
        super().__init__(faults, learning_rate=learning_rate, weight_decay=weight_decay, warmup_steps=warmup_steps)
        self.save_hyperparameters()
        self.body = nn.Sequential(
            _block(1, width, norm),
            _block(width, 2 * width, norm),
            nn.MaxPool2d(2),
            _block(2 * width, 2 * width, norm),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
        )
        self.head = nn.Linear(8 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `(batch, 10)` of images `(batch, 1, height, width)`."""
        logits: Tensor = self.head(self.body(images))
        return logits


def _block(inputs: int, outputs: int, norm: str) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
    normalisation = nn.GroupNorm(8, outputs) if norm == "group" else nn.BatchNorm2d(outputs)
    return nn.Sequential(convolution, normalisation, nn.GELU())
