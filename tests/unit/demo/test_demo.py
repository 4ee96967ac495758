"""The data and the models of the demo."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from sklearn.datasets import load_digits

from lightning_lockstep.demo import ByteGPT, DigitsData
from lightning_lockstep.demo.images import _read_digits
from lightning_lockstep.errors import ConfigurationError


def test_the_digits_are_divided_without_overlap_and_the_same_way_every_time() -> None:
    first, second = DigitsData(), DigitsData(batch_size=5)
    for data in (first, second):
        data.setup()
    parts = {name: part[:] for name, part in first._splits.items()}  # type: ignore[misc,index]
    assert {name: len(labels) for name, (_, labels) in parts.items()} == {
        "train": 1347,
        "val": 225,
        "test": 225,
    }
    images = torch.cat([images for images, _ in parts.values()])
    assert len(torch.unique(images.flatten(1), dim=0)) == 1797, "every image is in one part only"
    assert images.min() == 0
    assert images.max() == 1
    assert torch.equal(parts["val"][0], second._splits["val"][:][0])  # type: ignore[misc,index]


def test_every_fault_of_the_settings_is_listed() -> None:
    with pytest.raises(ConfigurationError) as caught:
        DigitsData(val_fraction=2.0, test_fraction=0.1, batch_size=0, global_batch_size=-1, num_workers=-1)
    assert [re.split("[= ]", fault)[0] for fault in caught.value.faults] == [
        "val_fraction",
        "val_fraction",
        "batch_size",
        "global_batch_size",
        "num_workers",
    ]
    with pytest.raises(ConfigurationError) as caught:
        ByteGPT(width=10, heads=4, learning_rate=0.0, warmup_steps=-1)
    assert [re.split("[= ]", fault)[0] for fault in caught.value.faults] == [
        "width",
        "learning_rate",
        "warmup_steps",
    ]


def test_the_digits_are_scikit_learns_and_need_nothing_that_is_not_required(monkeypatch) -> None:
    known = load_digits()
    monkeypatch.setitem(sys.modules, "sklearn", None)
    data = DigitsData()
    data.setup()
    images, labels = _read_digits()
    assert labels.tolist() == known.target.tolist()
    assert torch.equal(images[:, 0] * 16, torch.from_numpy(known.images).float())
