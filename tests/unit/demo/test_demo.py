"""The data and the models of the demo."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits

from lightning_lockstep.demo import ByteGPT, DigitsData, SourceTextData
from lightning_lockstep.demo.images import _read_digits
from lightning_lockstep.demo.text import read_sources
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


def test_the_source_text_is_deterministic_and_capped(tmp_path: Path) -> None:
    for name, text in {"b.py": "bb", "a/z.py": "zz", "a.py": "aa", "test/x.py": "no", "c.txt": "no"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_sources(tmp_path, 100) == b"aazzbb"
    assert read_sources(tmp_path, 3) == b"aaz"


def test_a_window_predicts_the_byte_after_each_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(bytes(range(100)))
    data = SourceTextData(root=str(tmp_path), context=4, held_out=0.2)
    data.setup()
    inputs, targets = data._splits["train"][1]
    assert inputs.tolist() == [4, 5, 6, 7]
    assert targets.tolist() == [5, 6, 7, 8]
    assert [len(data._splits[name]) for name in ("train", "val", "test")] == [14, 4, 4]  # type: ignore[arg-type]


def test_too_little_text_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no Python source file under"):
        read_sources(tmp_path, 100)
    (tmp_path / "a.py").write_text("x" * 100)
    data = SourceTextData(root=str(tmp_path))
    with pytest.raises(ConfigurationError, match="less than one window of context=128 bytes"):
        data.setup()


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


def test_a_global_batch_larger_than_the_data_is_said() -> None:
    data = DigitsData(batch_size=2000)
    data.setup()
    with pytest.raises(ConfigurationError, match=r"2000 samples .* is larger than the 1347 training samples"):
        data.train_dataloader()


def test_the_transformer_cannot_see_what_comes_later() -> None:
    model = ByteGPT(context=8, layers=2, width=8, heads=2).eval()
    window = torch.randint(256, (1, 8))
    changed = window.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    with torch.no_grad():
        before, after = model(window), model(changed)
    assert torch.allclose(before[0, :5], after[0, :5], atol=1e-6)
    assert not torch.allclose(before[0, 5:], after[0, 5:], atol=1e-6)


def test_the_digits_are_scikit_learns_and_need_nothing_that_is_not_required(monkeypatch) -> None:
    known = load_digits()
    monkeypatch.setitem(sys.modules, "sklearn", None)
    data = DigitsData()
    data.setup()
    images, labels = _read_digits()
    assert labels.tolist() == known.target.tolist()
    assert torch.equal(images[:, 0] * 16, torch.from_numpy(known.images).float())
