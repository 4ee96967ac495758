"""Pure parts: dividing a global batch, cutting a batch, the decorator."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from lightning_lockstep import find_executable_batch_size
from lightning_lockstep.batch_size.recovery import merged_extra, split
from lightning_lockstep.batch_size.search import plan_effective_batch
from lightning_lockstep.errors import BatchSizeError, ConfigurationError
from lightning_lockstep.numerics.statistics import samples_in


@pytest.mark.parametrize(
    ("requested", "ranks", "largest", "expected"),
    [
        (1024, 2, 600, (512, 1, True)),
        (1024, 4, 100, (64, 4, True)),
        (1024, 1, 1024, (1024, 1, True)),
        (96, 2, 7, (6, 8, True)),
        (1000, 3, 50, (37, 9, False)),
        (1009, 1, 100, (84, 12, False)),
    ],
)
def test_a_global_batch_is_kept_or_nearly(requested, ranks, largest, expected):
    plan = plan_effective_batch(requested, ranks=ranks, largest=largest, any_size=False)
    assert (plan.micro_batch, plan.accumulate, plan.exact) == expected
    assert plan.micro_batch <= largest and abs(plan.total - requested) <= requested * 0.02


@pytest.mark.parametrize(
    ("requested", "ranks", "largest", "sizes", "text"),
    [
        (18, 7, 8, (18,), "2 or 3 per rank x 1 accumulated x 7 ranks = 18"),
        (16, 3, 2, (6, 5, 5), "1 or 2 per rank x 3 accumulated x 3 ranks = 16"),
        (1009, 1, 100, (92,) * 8 + (91,) * 3, "91 or 92 per rank x 11 accumulated x 1 rank = 1009"),
    ],
)
def test_any_global_batch_is_kept_where_parts_may_differ(requested, ranks, largest, sizes, text):
    plan = plan_effective_batch(requested, ranks=ranks, largest=largest, any_size=True)
    assert (plan.sizes, str(plan), plan.exact) == (sizes, text, True)
    assert plan.micro_batch <= largest


Pair = namedtuple("Pair", "x name")


@dataclass
class Example:
    x: torch.Tensor
    flag: bool


def test_batches_of_any_structure_are_cut():
    x = torch.arange(10).reshape(5, 2)
    batch = {
        "x": x,
        "scale": torch.tensor(2.0),
        "names": list("abcde"),
        "pair": Pair(x, "n"),
        "e": Example(x, True),
    }
    batch["user"] = UserDict({"x": x})
    parts = split(batch, 2)
    assert [samples_in(part) for part in parts] == [2, 3]
    assert torch.equal(torch.cat([part["x"] for part in parts]), x)
    assert parts[1]["names"] == ["c", "d", "e"] and parts[0]["pair"].name == "n"
    assert parts[1]["e"].x.shape == (3, 2) and parts[1]["user"]["x"].shape == (3, 2)
    assert parts[0]["scale"] == 2.0
    assert isinstance(parts[0]["user"], UserDict)


def test_outputs_of_parts_are_put_together():
    weights = [0.4, 0.6]
    extra = merged_extra([{"y": torch.zeros(2), "n": 1.0, "s": "a"}, {"y": torch.ones(3), "n": 2.0, "s": "b"}], weights)
    assert extra["y"].tolist() == [0, 0, 1, 1, 1] and extra["n"] == pytest.approx(1.6) and extra["s"] == "a"


def test_the_decorator_takes_a_reduction_and_refuses_a_batch_size():
    sizes = iter([300, 90])

    @find_executable_batch_size(starting_batch_size=500, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size):
        if batch_size > 100:
            raise MemoryError
        return batch_size

    assert train() == 90
    with pytest.raises(TypeError, match="positional argument"):
        train(64)

    @find_executable_batch_size(starting_batch_size=1)
    def never(batch_size):
        raise MemoryError

    with pytest.raises(BatchSizeError, match="no batch size fits"):
        never()
    with pytest.raises(ConfigurationError, match="starting_batch_size"):
        find_executable_batch_size(starting_batch_size=0)(train)
