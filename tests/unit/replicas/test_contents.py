"""What is looked at on a rank, and what is left alone because it cannot be read or may differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep.replicas.checksums import Checksums, batch_sums, row_of
from lightning_lockstep.replicas.contents import Contents, facts

# Given once in a process, by whichever test is the first.
pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")


class Odd(LightningModule):
    """Tensors of kinds that have no plain values, and some that have."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(3)
        self.empty = nn.Parameter(torch.empty(0))
        self.complex = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("quantized", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
        self.register_buffer("nested", torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged))
        self.register_buffer("usage", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))


def trainer(**changes: Any) -> Any:
    own = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    given = {
        "strategy": own.strategy,
        "optimizers": [],
        "lr_scheduler_configs": [],
        "precision": "32-true",
        "num_training_batches": 10,
        "accumulate_grad_batches": 2,
        "max_steps": -1,
        "datamodule": None,
        "world_size": 2,
    }
    return SimpleNamespace(**{**given, **changes})


def test_tensors_without_plain_values_are_left_alone() -> None:
    module = Odd()
    contents = Contents(trainer(), module, optimizer_state=True, buffers="auto")
    named = contents.sections()
    assert list(named["parameters"]) == ["empty", "complex"]
    assert list(named["buffers"]) == ["usage", "batches"]
    assert len(Checksums(named["parameters"]).numbers()) == 2
    statistics = contents.may_be_statistics()
    assert "usage" in statistics and "batches" not in statistics, "a count of each expert, but not of steps"
    assert "lazy.weight of unknown shape" in facts(trainer(), module)["parameter 2"]


def test_batches_that_a_run_never_reaches_may_differ() -> None:
    def batches(number: int, steps: int) -> str:
        return facts(trainer(num_training_batches=number, max_steps=steps), Odd())["batches an epoch"]

    assert batches(10, -1) != batches(11, -1)
    assert batches(10, 5) == batches(11, 5)
    assert batches(10, 6) != batches(11, 6)


@pytest.mark.parametrize(
    "batch",
    [
        (torch.eye(3).to_sparse(), torch.tensor([1])),
        (numpy.ones(3), torch.tensor([1])),
        {"graph": object(), "label": torch.tensor([1])},
    ],
    ids=["sparse", "an array", "an object"],
)
def test_batches_of_which_a_part_is_unknown_are_not_compared(batch: Any) -> None:
    assert batch_sums(batch, 1) is None


def test_the_loaders_of_a_batch() -> None:
    one, two = torch.ones(2), torch.zeros(2)
    assert row_of([batch_sums([one, two], 2)]) == row_of([batch_sums({"a": one, "b": two}, 2)])
    assert batch_sums([one, {"a": one, "b": two}], 3) is None, "loaders in loaders"
    assert batch_sums((one, "text", None, 1.0), 1) is not None
