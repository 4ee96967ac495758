"""Programs that catch what each fit raises and fit again: the ranks meet anew, and the next fit trains."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import LockstepDDPStrategy
from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep.launchers.rank_supervisor import RankSupervisor
from tests.harness import run_ranks
from tests.models.strategies.fsdp_models import QUIET

#: For each fit, what happens and on which rank; and what it ends with on ranks 0 and 1.
FITS: tuple[tuple[str, int, str, str], ...] = (
    ("raises", 1, "RankFailedError", "ValueError"),
    ("never evaluates", 1, "CollectiveStallError", "CollectiveStallError"),
    ("raises while the others sleep", 1, "RankFailedError", "ValueError"),
    ("raises", 0, "ValueError", "RankFailedError"),
    ("all raise", 0, "ValueError", "ValueError"),
    ("raises before the others are there", 1, "RankFailedError", "ValueError"),
    ("", 0, "fitted", "fitted"),
    ("other timeout", 0, "fitted", "fitted"),
)


class Net(LightningModule):
    def __init__(self, event: str, who: int) -> None:
        super().__init__()
        self.event, self.who, self.layer = event, who, torch.nn.Linear(2, 1)

    def configure_callbacks(self) -> list[Any]:
        if self.trainer.global_rank == self.who and self.event == "raises before the others are there":
            raise ValueError("boom")
        return []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        is_it = self.global_rank == self.who
        if index == 1 and (self.event == "all raise" or (is_it and self.event == "raises")):
            raise ValueError("boom")
        if index == 1 and self.event == "raises while the others sleep":
            if is_it:
                raise ValueError("boom")
            time.sleep(600)
        return self.layer(batch[0]).sum()

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("loss", self.layer(batch[0]).sum())

    def on_validation_epoch_end(self) -> None:
        if self.global_rank == self.who and self.event == "never evaluates":
            time.sleep(600)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fits() -> list[tuple[str, float, int]]:
    """Return what each fit ends with, how long that takes, and a sum over the ranks once the last one is over."""
    data, ended = DataLoader(TensorDataset(torch.ones(8, 2)), 1), []
    for event, who, *_ in FITS:
        timeout = 77.0 if event == "other timeout" else 1800.0
        # A rank leaves a failed fit up to two seconds after the one that has failed, which then waits for it.
        strategy = LockstepDDPStrategy(stall_timeout=0.6 if event == "never evaluates" else 20.0, timeout=timeout)
        trainer, began = Trainer(devices=2, max_epochs=1, strategy=strategy, **QUIET), time.monotonic()
        try:
            trainer.fit(Net(event, who), data, data)
            end = "fitted"
        except Exception as error:
            end = type(error).__name__
        ended.append((end, time.monotonic() - began, trainer.global_step))
    total = torch.ones(1)
    dist.all_reduce(total)
    assert dist.group.WORLD is not None
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    return [*ended, ("sum", float(total), int(backend.options._timeout.total_seconds()))]


@pytest.fixture(scope="module")
def seen() -> list[list[tuple[str, float, int]]]:
    return run_ranks(2, fits, backend=None, timeout=120)


@pytest.mark.parametrize("number", range(len(FITS)))
def test_each_fit_ends_by_itself_and_the_next_one_begins_anew(number: int, seen: list[Any]) -> None:
    event, _, *expected = FITS[number]
    assert [rank[number][0] for rank in seen] == expected, event


def test_the_last_fits_have_trained_over_a_group_with_their_own_timeout(seen: list[Any]) -> None:
    assert [rank[-3][2] for rank in seen] == [rank[-2][2] for rank in seen] == [8, 8]
    assert [rank[-1] for rank in seen] == [("sum", 2.0, 77)] * 2


def fits_in_a_group_of_the_program() -> list[str]:
    """Fit twice in the program's own process group; the first fit fails, and rank 0 is the last to leave the group."""
    forget = RankSupervisor.forget_group

    def forget_late(supervisor: RankSupervisor) -> None:
        time.sleep(1.0 if dist.get_rank() == 0 else 0.0)
        forget(supervisor)

    RankSupervisor.forget_group = forget_late  # type: ignore[method-assign]
    data, ended = DataLoader(TensorDataset(torch.ones(8, 2)), 1), []
    for event in ("raises", ""):
        try:
            trainer = Trainer(devices=2, max_epochs=1, strategy=LockstepDDPStrategy(), **QUIET)
            trainer.fit(Net(event, 1), data, data)
            ended.append("fitted")
        except Exception as error:  # noqa: PERF203
            ended.append(type(error).__name__)
    return ended


def test_ranks_that_the_program_has_connected_meet_anew_while_one_is_late() -> None:
    zero, one = run_ranks(2, fits_in_a_group_of_the_program)
    assert (zero, one) == (["RankFailedError", "fitted"], ["ValueError", "fitted"])
