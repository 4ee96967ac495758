"""OverflowDetector where ``training_step`` itself gathers: a replay on one rank must wait for no other."""

from __future__ import annotations

import os
import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_lockstep import LockstepDDPStrategy, OverflowDetectedError, OverflowDetector
from tests.harness import run_ranks
from tests.models.overflow.models import WIDTH, Explode, Task, data, fit

# One fit on two ranks for each way to communicate, all in one fixture; test_ranks.py has the ordinary step.

BATCH = 2


class Scores(nn.Module):
    """Marked values leave the range of float16 inside it, but not that of float32."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1000 / 1000


class Contrastive(Task):
    """Compares the rows of this rank with those of all ranks; ``how`` they are gathered."""

    def __init__(self, how: str) -> None:
        super().__init__(Scores())
        self.how = how

    def gathered(self, rows: Tensor) -> Tensor:
        if self.how == "lightning":
            return self.all_gather(rows, sync_grads=True).flatten(0, 1)
        if self.how == "autograd":
            return torch.cat(dist_nn.all_gather(rows))
        whole = rows.new_empty(2 * len(rows), WIDTH)
        dist.all_gather_into_tensor(whole, rows.detach().contiguous())
        return whole

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        rows = self.suspect(self.before(batch))
        own = torch.arange(len(rows)) + self.global_rank * len(rows)
        scores = rows @ self.gathered(rows).T + 0 * self.head(rows)
        return nn.functional.cross_entropy(scores.float(), own)


class Difference(Task):
    """Explodes where this rank's rows and the other's are far apart: no rank shows it by itself."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        others = self.all_gather(batch)[1 - self.global_rank]
        return self(batch - others).square().mean()


class FailsAgain(Contrastive):
    """Rank 1 raises before its gather when a batch comes a second time, as if memory ran out in the replay."""

    seen: set[int] = set()  # noqa: RUF012  a replay puts attributes of the module back, but not this one

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_rank == 1 and batch_idx in self.seen:
            raise RuntimeError("raised in the replay only")
        self.seen.add(batch_idx)
        return super().training_step(batch, batch_idx)


class FailsAfterABadGradient(Task):
    """The loss is finite and a gradient of rank 1 is nan; the same batch raises when it comes a second time."""

    seen: set[int] = set()  # noqa: RUF012  as above

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out = self(batch)
        if self.global_rank == 1 and batch_idx == BATCH:
            if batch_idx in self.seen:
                raise RuntimeError("raised in the replay only")
            self.seen.add(batch_idx)
            out.register_hook(lambda gradient: gradient * torch.nan)
        return out.square().mean()


class Passes(Task):
    """Sends the mean of its rows to the other rank and receives that rank's: nothing to answer alone."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        theirs = torch.zeros(WIDTH)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, batch.mean(0), 1 - self.global_rank),
                dist.P2POp(dist.irecv, theirs, 1 - self.global_rank),
            ]
        )
        for work in works:
            work.wait()
        return self(batch).square().mean() + 0 * theirs.clamp(max=1.0).sum()


MODELS: dict[str, Any] = {
    "lightning": lambda: Contrastive("lightning"),
    "autograd": lambda: Contrastive("autograd"),
    "in place": lambda: Contrastive("in place"),
    "difference": lambda: Difference(Explode()),
    "fails again": lambda: FailsAgain("in place"),
    "fails after a bad gradient": lambda: FailsAfterABadGradient(),
    "messages": lambda: Passes(Explode()),
}


def outcomes(names: list[str], folder: str, strategy: Any = LockstepDDPStrategy) -> dict[str, Any]:
    """Fit each model with a marked row on rank 1 in one batch; return what each rank raised and noted."""
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name in names:
        model, detector = MODELS[name](), OverflowDetector()
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=16.0))
        rank = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
        loader = data(batches=4, marked={BATCH: 0} if rank == 1 else {}, seed=rank)
        options = {"strategy": strategy(), "devices": 2, "default_root_dir": f"{folder}/{name}"}
        if isinstance(model, Contrastive):
            options["plugins"] = [plugin]
        try:
            fit(model, loader, detector, **options)
            found[name] = {"error": ""}
        except OverflowDetectedError as error:
            found[name] = {"error": str(error), "notes": detector.reports[0].notes}
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("communicating")
    return run_ranks(2, outcomes, list(MODELS), str(folder), timeout=90)


def lines_of(error: str, rank: int) -> str:
    """The lines of a rank in the text of the error."""
    return re.split(rf"^rank {rank} ", error, flags=re.MULTILINE)[1].split("\nrank ")[0]


def check_contrastive(zero: dict[str, Any], one: dict[str, Any]) -> None:
    assert zero["error"] == one["error"]
    assert f"batch_number={BATCH} " in zero["error"]
    assert "clean; the bad value did not originate here" in lines_of(zero["error"], 0)
    assert "suspect (Scores) made it from good inputs" in lines_of(zero["error"], 1)
    assert "the batch was run again this way and passed" in zero["error"]
    assert 'FP32Modules(["suspect"])' in zero["error"]
    for each in (zero, one):
        (note,) = each["notes"]
        assert "The step communicates with other ranks." in note


@pytest.mark.parametrize("how", ["lightning", "autograd", "in place"])
def test_the_origin_and_a_tried_remedy_are_named(both: list[dict[str, Any]], how: str) -> None:
    check_contrastive(both[0][how], both[1][how])


def test_what_only_the_exchange_shows_is_replayed_by_all_ranks_together(both: list[dict[str, Any]]) -> None:
    zero, one = (each["difference"] for each in both)
    assert zero["error"] == one["error"]
    assert "clean; the bad value did not originate here" in lines_of(zero["error"], 0)
    assert "suspect (Explode) made it from good inputs" in lines_of(zero["error"], 1)
    assert zero["notes"] == one["notes"] == [], "the replay gave the same loss"


def test_a_step_of_messages_is_replayed_by_all_ranks_together(both: list[dict[str, Any]]) -> None:
    zero, one = (each["messages"] for each in both)
    assert zero["error"] == one["error"]
    assert "suspect (Explode) made it from good inputs" in lines_of(zero["error"], 1)


def test_a_replay_that_fails_on_one_rank_keeps_no_other_waiting(both: list[dict[str, Any]]) -> None:
    zero, one = (each["fails again"] for each in both)
    assert zero["error"] == one["error"]
    assert "clean; the bad value did not originate here" in lines_of(zero["error"], 0)
    assert one["notes"] == ["Replaying the batch failed: RuntimeError: raised in the replay only"]


def test_a_replay_that_fails_clears_its_rank_of_nothing(both: list[dict[str, Any]]) -> None:
    zero, one = (each["fails after a bad gradient"] for each in both)
    assert zero["error"] == one["error"]
    assert "clean; the bad value did not originate here" in lines_of(zero["error"], 0)
    assert "the batch was not replayed here, or not to its end" in lines_of(zero["error"], 1)
    assert one["notes"] == ["Replaying the batch failed: RuntimeError: raised in the replay only"]
