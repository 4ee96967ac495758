"""Memory that really runs out: the search keeps to a limit, and a run goes on whose batch did not fit."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import AutoBatchSize
from lightning_lockstep.batch_size.memory import (
    attempt,
    limit_of_trials,
    release_memory,
    return_freed_memory,
)
from tests.harness import chosen_device, leave_memory, run_ranks
from tests.models.batch_size.models import RunPeak, largest, of_two, trainer


class Big(pl.LightningModule):
    """About 0.5 MB of activations per sample, with little to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2
        self.layers = nn.Sequential(nn.Linear(8, 16000), nn.ReLU(), nn.Linear(16000, 8))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.layers[1](self.layers[0](batch[0]))
        return self.layers[2](hidden.square().abs()).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(16000, 8)), batch_size=self.batch_size)


def real_limit(ranks: int, folder: str, kind: str) -> tuple[int, int, float]:
    # The address space of one rank has no room for the threads of others.
    run = of_two if ranks == 2 else trainer
    # What is loaded once is no part of a run's memory.
    run(folder, max_steps=1).fit(Big())
    address_space, resident = (int(n) * 4096 for n in Path("/proc/self/statm").read_text().split()[:2])
    limit = 160 * 2**20 + (resident if chosen_device() == "cpu" else 0)
    if kind == "full":
        callback = largest(margin=0.2)  # an address space also has what threads reserve
        if chosen_device() == "cuda":
            leave_memory(limit)
        else:
            resource.setrlimit(resource.RLIMIT_AS, (address_space + 300 * 2**20, -1))
    else:
        callback = largest(memory_limit=limit)
    module, peak = Big(), RunPeak()
    run(folder, callback, peak, max_steps=4).fit(module)
    assert callback.result is not None
    return module.batch_size, len(callback.result.trials), peak.peak / limit


@pytest.mark.parametrize(("ranks", "kind"), [(2, "memory_limit"), (1, "full")])
def test_a_real_limit_is_found_and_kept_to_afterwards(tmp_path: Path, ranks: int, kind: str, device: str) -> None:
    answers = run_ranks(ranks, real_limit, ranks, str(tmp_path), kind, backend=None, timeout=170)
    assert len({answer[:2] for answer in answers}) == 1, "the ranks do not agree"
    size, trials, _ = answers[0]
    assert trials <= 14 and size > 150, answers
    if kind == "memory_limit":
        # A heap that keeps what is freed would end anywhere; here only what is alive counts.
        assert (220 if device == "cpu" else 150) < size < 480  # the libraries of a card take some of it
        assert max(answer[2] for answer in answers) < 1.05


def beyond_a_limit() -> tuple[str, bool]:
    limit = limit_of_trials(torch.device("cpu"), given=psutil.Process().memory_info().rss + 64 * 2**20)
    with limit.enforced():
        failure = attempt(lambda: torch.ones(68 * 2**20 // 4))
        allowed = attempt(lambda: torch.ones(32 * 2**20 // 4)) is None
    after = attempt(lambda: torch.ones(68 * 2**20 // 4)) is None
    return failure.summary if failure else "", allowed and after


def test_an_allocation_fails_only_beyond_the_limit_and_while_it_is_enforced() -> None:
    ((summary, allowed),) = run_ranks(1, beyond_a_limit, backend=None)
    assert "DefaultCPUAllocator" in summary and allowed


def convolutions_within_a_limit() -> tuple[list[str], list[str]]:
    net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 16, 3))

    def step(size: int) -> None:
        net(torch.randn(size, 1, 28, 28)).sum().backward()

    limit = limit_of_trials(torch.device("cpu"), given=psutil.Process().memory_info().rss + 8 * 2**20)
    trials = [limit.attempt(lambda size=size: step(size), in_thread=True) for size in range(4, 1000, 40)]  # type: ignore[misc]
    afterwards = [attempt(lambda size=size: step(size)) for size in (3, 5, 7)]  # type: ignore[misc]
    errors = [failure.summary for failure in trials if failure and not failure.out_of_memory]
    return errors + ["none ran out"] * (not any(trials)), [failure.summary for failure in afterwards if failure]


def test_convolutions_can_be_run_after_trials_in_which_memory_ran_out() -> None:
    # oneDNN never again compiles an operation in a thread in which it once had no memory for that.
    assert run_ranks(1, convolutions_within_a_limit, backend=None) == [([], [])]


class Limited(pl.Callback):
    """Lets one rank have almost no more memory during one batch: a real allocation fails."""

    def __init__(self, batch: int | None, rank: int) -> None:
        self.batch, self.rank, self.before = batch, rank, (0, 0)

    def on_train_batch_start(self, run: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch and run.global_rank == self.rank:
            release_memory()
            if chosen_device() == "cuda":
                leave_memory(24 * 2**20)
                return
            data = int(Path("/proc/self/statm").read_text().split()[5]) * 4096
            self.before = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (data + 24 * 2**20, self.before[1]))

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch and run.global_rank == self.rank:
            if chosen_device() == "cuda":
                torch.cuda.set_per_process_memory_fraction(1.0)
                return
            resource.setrlimit(resource.RLIMIT_DATA, self.before)


class Regression(Big):
    """Learns a sine; a batch of 256 keeps 32 MB of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16000), nn.GELU(), nn.Linear(16000, 1))
        self.batch_size, self.losses = 256, list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = (self.layers(batch[0])[:, 0] - batch[0].sum(1).sin()).pow(2).mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def train_dataloader(self) -> DataLoader[Any]:
        data = torch.randn(256 * 80, 8, generator=torch.Generator().manual_seed(2))
        return DataLoader(TensorDataset(data), batch_size=self.batch_size)


def curves_with_and_without_room(folder: str) -> list[Any]:
    return_freed_memory()
    told: list[Any] = []
    for batch in (None, 10):
        pl.seed_everything(4)
        module, callback = Regression(), AutoBatchSize("off", on_oom="split")
        limited = Limited(batch, 1)
        of_two(folder, callback, limited, max_epochs=1, max_steps=20).fit(module)
        told.append((module.losses, callback.batches_split))
    return told


def test_a_batch_that_really_does_not_fit_and_the_curve_is_that_of_a_run_with_room(tmp_path: Path, device: str) -> None:
    answers = run_ranks(2, curves_with_and_without_room, str(tmp_path), backend=None, timeout=170)
    assert sum(count for _, (_, count) in answers) >= 1
    for (room, none), (tight, _) in answers:
        assert none == 0 and len(room) == len(tight) == 20 and room[-1] < room[0]
        assert max(abs(a - b) for a, b in zip(room, tight, strict=True)) < 1e-5
        assert room[:10] == tight[:10]
