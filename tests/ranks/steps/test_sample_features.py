"""Random numbers by sample and batch norm of the batch, with the features that run steps of their own; refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from lightning_lockstep import (
    AutoBatchSize,
    LockstepDDPStrategy,
    LockstepError,
    OverflowDetector,
    ReplicaCheck,
)
from tests.harness import QUIET, on_device, run_ranks, run_ranks_raw
from tests.models.steps.sample_fits import OF_SAMPLE

# What the dropout of a fit has given. A step apart from the run would take it away again if the module had it.
_given: list[list[float]] = []


class Net(LightningModule):
    """Takes down what its dropout gives; the loss of a batch may be nan, and other things may go wrong."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.wrong, self.batch_size = wrong, 4
        self.dropout = nn.Dropout(0.5)
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        dropped = self.dropout(batch[0])
        _given.append(dropped.flatten().tolist())
        if self.wrong == "none" and self.global_rank == 1 and batch_idx == 1:
            return None
        if self.wrong == "hidden":
            nn.init.normal_(torch.empty(3))  # draws in a way that no mode sees
        loss = self.layers(dropped).square().mean()
        return loss * torch.nan if self.wrong == "nan" and batch_idx == 1 else loss

    def train_dataloader(self) -> DataLoader[Any]:
        data = torch.randn(24, 2, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(data), self.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fitted(wrong: str = "", *callbacks: Any, loader: Any = None, of_rank: bool = False, **options: Any) -> Net:
    seed_everything(1, verbose=False)
    _given.clear()
    net = Net(wrong)
    strategy = LockstepDDPStrategy(**({} if of_rank else OF_SAMPLE), stall_timeout=20, grace_period=5.0)
    trainer = Trainer(**{**QUIET, **on_device(2), "strategy": strategy, "max_epochs": 1, **options})
    trainer.fit(net, loader)
    return net


# -- Steps apart from the run --


def features(folder: str) -> dict[str, Any]:
    callbacks = {
        "plain": None,
        "replayed": OverflowDetector(action="skip", report_dir=folder),
        "audited": ReplicaCheck(every_n_steps=1, audit_every_n_steps=1),
        "searched": AutoBatchSize(max_val=8, global_batch_size="largest"),
    }
    found: dict[str, Any] = {}
    for name, callback in callbacks.items():
        net = fitted("nan" if name == "replayed" else "", callbacks=callback, default_root_dir=folder)
        found[name] = list(_given)
    return {**found, "size": net.batch_size}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: Any) -> list[dict[str, Any]]:
    return run_ranks(2, features, str(tmp_path_factory.mktemp("reports")), backend=None)


def test_a_batch_is_replayed_with_the_numbers_of_its_samples(seen: Any) -> None:
    for rank in seen:
        assert rank["replayed"].count(rank["plain"][1]) >= 2  # the step, and its replay
        assert all(one in rank["plain"] for one in rank["replayed"])


def test_an_audit_has_the_numbers_of_the_rank_whose_batch_it_is(seen: Any) -> None:
    own, other = (rank["audited"] for rank in seen)
    plain = seen[0]["plain"] + seen[1]["plain"]
    assert all(one in plain for one in own + other)
    assert any(one in seen[1]["plain"] for one in own)


def test_a_batch_size_is_searched(seen: Any) -> None:
    assert [rank["size"] for rank in seen] == [8, 8]


# -- Refusals --


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(8, 2))


DATA = TensorDataset(torch.ones(16, 2))
NOT_DIVIDED = "with a training loader that is not divided among the ranks: expected one DataLoader of a data set with"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a stream": ({"loader": DataLoader(Stream(), 4)}, NOT_DIVIDED),
    "a sampler that divides": (
        {"loader": DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 2, 0))},
        NOT_DIVIDED,
    ),
    "no sampler of ours": ({"use_distributed_sampler": False}, NOT_DIVIDED),
    "several loaders": (
        {"loader": [DataLoader(DATA, 4), DataLoader(DATA, 4)]},
        "random_numbers='of_sample' with 2 training loaders: expected one",
    ),
    "also sync_batchnorm": ({"sync_batchnorm": True}, "expected False, because batch_norm='of_batch' does the same"),
    "sync_batchnorm on CPUs": (
        {"sync_batchnorm": True, "of_rank": True},
        "because torch's layer refuses CPUs. batch_norm='of_batch' of the strategy works on any device",
    ),
    "a draw that is not seen": ({"wrong": "hidden"}, "training_step has drawn random numbers in a way that"),
}  # fmt: skip


def refused(options: dict[str, Any]) -> str:
    with pytest.raises(LockstepError) as caught:
        fitted(**options)
    return str(caught.value)


def refusals() -> dict[str, str]:
    splits = {"callbacks": [AutoBatchSize(mode="off", on_oom="split")]}
    return {name: refused(options) for name, (options, _) in {**REFUSED, "split": (splits, "")}.items()}


def test_what_cannot_be_held_is_one_error_on_all_ranks() -> None:
    texts = {name: text for name, (_, text) in REFUSED.items()}
    texts["split"] = "on_oom='split' is not possible here: with random_numbers='of_sample'"
    first, second = run_ranks(2, refusals, backend=None)
    assert first == second
    assert {name: text for name, text in texts.items() if text not in first.get(name, "")} == {}


def without_a_loss() -> str:
    with pytest.raises(Exception, match="training_step returned no loss") as caught:
        fitted("none")
    return str(caught.value)


def test_a_step_without_a_loss_ends_all_ranks_and_none_waits_in_a_norm() -> None:
    found = run_ranks_raw(2, without_a_loss, backend=None)
    reason = "because the ranks wait for each other in each batch norm with batch_norm='of_batch'"
    assert all(re.search(re.escape(reason), one.value) for one in found)
    assert "rank 1 of 2" in found[0].value
