"""Streams whose order is drawn anew, on three real ranks with real workers: each sample once, or the ranks are told.

The weights of fits of streams are those of random programs; how a stream is divided: tests/unit/loaders.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import ChainDataset, DataLoader, IterableDataset, get_worker_info

from lightning_lockstep import ConfigurationError, LockstepDDPStrategy, ReplicaCheck
from lightning_lockstep._lightning import LightningModule, Trainer, seed_everything
from tests.harness import QUIET, logged, on_device, run_ranks

RANKS = 3


class Stream(IterableDataset[Any]):
    """Rows in an order that is drawn anew in each epoch, divided among workers but not among ranks."""

    def __init__(self, samples: int, *, skipped: int = 0) -> None:
        self.samples, self.skipped = samples, skipped

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.samples).tolist()
        random.shuffle(order)
        worker = get_worker_info()
        for number in order[self.skipped :] if worker is None else order[worker.id :: worker.num_workers]:
            yield row(number)


class OfRank(Stream):
    """Gives each rank its own rows, as `datasets.distributed.split_dataset_by_node` has it."""

    _distributed = True

    def __iter__(self) -> Iterator[Any]:
        yield from (row(number) for number in range(int(os.environ["RANK"]), self.samples, RANKS))


def row(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, generator=generator, dtype=torch.float64), torch.tensor(number)


class Net(LightningModule):
    """Takes down which samples this rank has in which epoch, and in evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1, dtype=torch.float64)
        self.seen: list[tuple[int, int]] = []
        self.evaluated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, numbers = batch
        if not self.trainer.strategy.is_padding_batch():  # type: ignore[attr-defined]
            self.seen += [(self.current_epoch, int(number)) for number in numbers]
        return self.layer(rows).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated += batch[1].tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


def fit(samples: int = 0, *, train: Any = None, strategy: Any = None, **options: Any) -> dict[str, Any]:
    seed_everything(7, verbose=False)
    net = Net()
    trainer = Trainer(
        **{**QUIET, **on_device(RANKS), "max_epochs": 2, "num_sanity_val_steps": 0, **options},
        strategy=strategy or LockstepDDPStrategy(iterable_datasets="shard", threads_per_rank=1),
    )
    train = DataLoader(Stream(samples), 2, num_workers=2) if train is None else train
    trainer.fit(net, train, DataLoader(Stream(samples), 2, num_workers=1))
    return {"seen": net.seen, "evaluated": net.evaluated}


def refused(make: Any) -> str:
    with pytest.raises(ConfigurationError) as raised:
        make()
    return str(raised.value)


def same_data(strategy: Any) -> list[str]:
    check = ReplicaCheck(every_n_steps=2, action="warn")
    with logged("lightning_lockstep.callbacks.replica_check") as texts:
        fit(40, strategy=strategy, callbacks=[check], max_epochs=1)
    return texts


def cases() -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    answers: dict[str, Any] = {"own": fit(train=DataLoader(ChainDataset([OfRank(12)]), 2), max_epochs=1)}
    answers["divided"] = fit(13)
    answers["sizes differ"] = refused(lambda: fit(train=DataLoader(Stream(9), 2 + rank)))
    answers["streams differ"] = refused(lambda: fit(train=DataLoader(Stream(40, skipped=8 * rank), 2)))
    answers["same data"] = same_data(LockstepDDPStrategy(threads_per_rank=1))
    answers["divided data"] = same_data(None)
    return answers


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    return run_ranks(RANKS, cases, timeout=120, backend=None)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("seen", [(epoch, number) for epoch in (0, 1) for number in range(13)]),
        ("evaluated", [*range(13)] * 2),
    ],
)
def test_each_sample_is_seen_once_in_each_epoch(what: str, expected: list[Any], answers: list[dict[str, Any]]) -> None:
    """The last batch of 13 samples has one, so two ranks have padding there."""
    assert sorted(chain(*(answer["divided"][what] for answer in answers))) == sorted(expected)


def test_a_data_set_that_divides_itself_is_read_as_it_is(answers: list[dict[str, Any]]) -> None:
    for rank, answer in enumerate(answers):
        assert [number for _, number in answer["own"]["seen"]] == [*range(rank, 12, RANKS)]


def test_ranks_that_have_other_streams_are_told(answers: list[dict[str, Any]]) -> None:
    assert len({answer["sizes differ"] for answer in answers}) == 1
    assert "samples of a global batch: 6 on rank 0, 9 on rank 1, 12 on rank 2" in answers[0]["sizes differ"]
    assert "different numbers of training batches" in answers[0]["streams differ"]


def test_the_warning_of_same_data_names_the_option(answers: list[dict[str, Any]]) -> None:
    (text,) = answers[0]["same data"]
    assert "iterable_datasets='shard'" in text
    assert answers[0]["divided data"] == []
