"""Fits on two real ranks: precision, losses over the rows of all ranks, a rank that never comes, and placement.

The weights of one process and of Lightning alone are held by random programs, on a card by ``test_on_a_device.py``.
"""

from __future__ import annotations

import io
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_lockstep import (
    CollectiveStallError,
    LockstepDDPStrategy,
    LockstepFSDPStrategy,
    RankFailedError,
    gather_uneven,
)
from lightning_lockstep._lightning import LightningModule, Trainer, seed_everything
from tests.harness import logged, on_device, run_ranks, run_ranks_raw
from tests.models.strategies import fsdp_models

QUIET = {**fsdp_models.QUIET, "devices": 2}


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
        self.dtypes: set[str] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        outputs = self.second(self.first(inputs).relu())
        self.dtypes.add(str(outputs.dtype).removeprefix("torch."))
        return {"loss": torch.nn.functional.cross_entropy(outputs, targets)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    def digest(self) -> float:
        return sum(parameter.detach().double().abs().sum().item() for parameter in self.parameters())


class Contrastive(Net):
    """Its loss compares the rows of all ranks, of which each has another number; rank 1 may have none for a batch."""

    def __init__(self, none_at: int = -1) -> None:
        super().__init__()
        self.none_at, self.seen = none_at, list[str]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        own = self.second(self.first(batch[0][self.global_rank :]))
        everyone = gather_uneven({"rows": own, "seen": batch[1][self.global_rank :]})
        self.seen.append(str([len(rank["seen"]) for rank in everyone]))
        rows = torch.cat([rank["rows"] for rank in everyone])
        if batch_idx == self.none_at and self.global_rank == 1:
            return None
        return (rows @ rows.t()).logsumexp(1).mean()


class Stream(IterableDataset[Any]):
    def __init__(self, batches: int, rank: int) -> None:
        self.batches, self.rank = batches, rank

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.rank)
        for number in range(self.batches * 4):
            yield torch.randn(8, generator=generator), torch.tensor(number % 4)


def loader(batches: int) -> DataLoader[Any]:
    rows = list(Stream(batches, int(os.environ["RANK"])))
    return DataLoader(TensorDataset(torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])), 4)


def fit(net: Net, data: Any, *, strategy: Any = None, epochs: int = 2, **options: Any) -> Trainer:
    trainer = Trainer(
        **{**QUIET, **on_device(options.pop("devices", 2)), "max_epochs": epochs, **options},
        strategy=strategy or LockstepDDPStrategy(),
    )
    trainer.fit(net, data)
    return trainer


def seeded() -> Net:
    seed_everything(7, verbose=False)
    return Net()


def contrastive_fits() -> dict[str, Any]:
    answers = {}
    for policy in ("truncate", "join"):
        seed_everything(7, verbose=False)
        net = Contrastive()
        trainer = fit(net, loader(3 + int(os.environ["RANK"])), strategy=LockstepDDPStrategy(uneven_inputs=policy))
        answers[policy] = (trainer.global_step, set(net.seen), net.digest())
    seed_everything(7, verbose=False)
    net = Contrastive(none_at=1)
    answers["none"] = (fit(net, loader(3)).global_step, set(net.seen), net.digest())
    return answers


def test_a_loss_over_the_rows_of_all_ranks() -> None:
    """A rank whose own loss does not count (a padding batch, or none returned) takes part in backward."""
    first, second = run_ranks(2, contrastive_fits, backend=None, timeout=120)
    assert first == second
    assert first["none"][:2] == (6, {"[4, 3]"})
    assert first["truncate"][:2] == (6, {"[4, 3]"})
    assert first["join"][:2] == (8, {"[4, 3]", "[0, 3]"})  # padding gives no rows


def precision_fits() -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for name in ("64-true", "32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true"):
        net = seeded()
        with logged(level=logging.INFO) as texts:
            strategy = "lockstep_ddp" if name == "16-mixed" else None
            trainer = fit(net, loader(3), strategy=strategy, precision=name, epochs=1)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        answers[name] = (
            trainer.precision,
            sorted(net.dtypes),
            scaler is not None,
            str(net.first.weight.dtype),
            [text for text in texts if "precision" in text],
        )
    return answers


def test_each_precision_does_what_it_says(device: str) -> None:
    first, second = run_ranks(2, precision_fits, backend=None, timeout=120)
    assert first == second
    notes = {name: facts[4] for name, facts in first.items() if facts[4]}
    if device == "cpu":  # where Lightning says something else before
        (note,) = notes.pop("16-mixed")
        assert note.startswith("precision='16-mixed' runs in float16 with loss scaling")
    assert not notes, "a note without a cause"
    assert {name: facts[:4] for name, facts in first.items()} == {
        "64-true": ("64-true", ["float64"], False, "torch.float64"),
        "32-true": ("32-true", ["float32"], False, "torch.float32"),
        "16-mixed": ("16-mixed", ["float16"], True, "torch.float32"),
        "bf16-mixed": ("bf16-mixed", ["bfloat16"], False, "torch.float32"),
        "16-true": ("16-true", ["float16"], False, "torch.float16"),
        "bf16-true": ("bf16-true", ["bfloat16"], False, "torch.bfloat16"),
    }


class Waits(Net):
    """Rank 1 stays in its second step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.global_rank == 1:
            time.sleep(1000)
        return super().training_step(batch, batch_idx)


def one_never_comes() -> str:
    with pytest.raises(CollectiveStallError) as caught:
        fit(Waits(), loader(3), strategy=LockstepDDPStrategy(stall_timeout=2.0))
    return str(caught.value)


def test_the_guard_names_the_rank_that_never_comes_and_its_place(device: str) -> None:
    first, second = (outcome.value for outcome in run_ranks_raw(2, one_never_comes, backend=None))
    assert first == second and first.startswith("rank 1 never came to collective #")
    assert re.search(r"1 +- +\S*test_fits.py:\d+ in training_step, after #\d+ .*<- never came", first), first


class Raises(Net):
    """Rank 1 raises in its second step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.global_rank == 1:
            raise ValueError("boom")
        return super().training_step(batch, batch_idx)


def caught_failures() -> list[str]:
    states = []
    for kind in (LockstepDDPStrategy, LockstepFSDPStrategy):
        strategy = kind()
        with pytest.raises((ValueError, RankFailedError)):
            fit(Raises(), loader(3), strategy=strategy)
        states.append(strategy.supervisor.propagation.attempt.state)
    return states


def test_no_rank_of_which_the_program_goes_on_after_a_failure_is_ended_by_force() -> None:
    _, second = (outcome.value for outcome in run_ranks_raw(2, caught_failures, backend=None))
    assert second == ["over", "over"], "nothing counts down any more on the rank that has raised"


def placement_shown() -> str:
    shown = io.StringIO()
    with redirect_stderr(shown):
        strategy = LockstepDDPStrategy(threads_per_rank=1)
        fit(seeded(), loader(2), strategy=strategy, epochs=1)
    return f"{shown.getvalue()}|{torch.get_num_threads()}"


def test_placement_is_shown_once_in_rank_order_and_threads_are_set() -> None:
    first, second = (answer.split("|") for answer in run_ranks(2, placement_shown, backend=None))
    assert first[-1] == second[-1] == "1"
    rows = "|".join(first)
    assert rows.count("2 ranks") == 1
    assert "2 ranks" not in "|".join(second)
