"""Batches filled up, and sequences padded, in any structure."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from lightning_lockstep import StaticShapes
from lightning_lockstep.callbacks.static_shapes import padded
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.numerics.statistics import samples_in


class Pair(NamedTuple):
    rows: torch.Tensor
    labels: torch.Tensor


def filled(batch: Any, size: int, ignored: dict[Any, float] | None = None) -> Any:
    return padded(batch, StaticShapes(ignored=ignored), size)


def test_added_samples_are_copies_of_the_last_one_or_a_given_value() -> None:
    batch = {"rows": torch.arange(6.0).view(3, 2), "labels": torch.tensor([4, 5, 6]), "text": ["a", "b", "c"]}
    made = filled(batch, 5, {"labels": -100})
    assert made["rows"].tolist() == [[0, 1], [2, 3], [4, 5], [4, 5], [4, 5]]
    assert made["labels"].tolist() == [4, 5, 6, -100, -100] and made["labels"].dtype == torch.int64
    assert made["text"] == ["a", "b", "c"]
    assert batch["labels"].shape == (3,), "the batch itself stays"


def test_structures_stay_what_they_are() -> None:
    pair = filled(Pair(torch.ones(2, 3), torch.ones(2)), 4, {1: 9})
    assert isinstance(pair, Pair) and pair.rows.shape == (4, 3) and pair.labels.tolist() == [1, 1, 9, 9]
    nested: Any = filled([{"a": torch.ones(2)}, (torch.ones(2, 1), torch.tensor(3.0))], 3, {0: 0})
    assert nested[0]["a"].tolist() == [1, 1, 0] and nested[1][0].shape == (3, 1) and nested[1][1].shape == ()
    assert filled(torch.ones(2), 3).shape == (3,)


def test_what_is_full_or_no_sample_stays() -> None:
    assert filled([torch.ones(4, 2)], 4)[0].shape == filled([torch.ones(4, 2)], 3)[0].shape == (4, 2)
    table = filled({"rows": torch.ones(2, 3), "weights": torch.ones(7)}, 4)
    assert table["rows"].shape == (4, 3) and table["weights"].shape == (7,)
    assert samples_in({"scale": torch.tensor(1.0), "rows": torch.ones(5)}) == 5
    assert filled("text", 4) == "text"


def test_sequences_get_the_smallest_length_that_holds_them() -> None:
    batch = {"ids": torch.ones(2, 5, dtype=torch.int64), "mask": torch.ones(2, 5), "labels": torch.ones(2)}

    def lengths(*given: int) -> Any:
        return padded(batch, StaticShapes(lengths=given, pad_values={"ids": 7, "mask": 0}))

    made = lengths(4, 8, 16)
    assert made["ids"].tolist() == [[1] * 5 + [7] * 3] * 2
    assert made["mask"].sum() == 10 and made["mask"].shape == (2, 8) and made["labels"].shape == (2,)
    assert lengths(5)["ids"].shape == (2, 5)
    assert lengths(4)["ids"].shape == (2, 5), "nothing is cut off"
    along_2 = StaticShapes(lengths=[8], pad_values={0: 0}, dim=2)
    assert padded([torch.ones(2, 3, 5)], along_2, 4)[0].shape == (4, 3, 8)


def test_without_the_callback_all_samples_are_real() -> None:
    batch = [torch.ones(3, 2), torch.ones(3)]
    assert StaticShapes.real_samples(batch).tolist() == [True] * 3
    assert StaticShapes.mean(torch.tensor([1.0, 2.0, 6.0]), batch) == 3
    with pytest.raises(ConfigurationError, match="expected 3 rows, one for each sample"):
        StaticShapes.mean(torch.ones(()), batch)
    with pytest.raises(ConfigurationError, match="expected the batch of the step"):
        StaticShapes.real_samples("text")


def test_all_faults_of_the_settings_are_said_at_once() -> None:
    with pytest.raises(ConfigurationError) as raised:
        StaticShapes(lengths=[8, 4], ignored={"labels": "nothing"}, dim=0, batch_size="all")  # type: ignore
    assert [text.split(": expected")[0] for text in raised.value.faults] == [
        "lengths=[8, 4]",
        "ignored={'labels': 'nothing'}",
        "dim=0",
        "batch_size='all'",
    ]
    with pytest.raises(ConfigurationError, match="pad_values=None: expected both or neither"):
        StaticShapes(lengths=[8])
    StaticShapes(lengths=[8], ignored={"labels": -100})
