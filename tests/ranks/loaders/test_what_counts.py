"""What pads, or was never given to a rank, does not count: a table of small fits on three ranks.

Losses, weights and logged values, batches and losses that are None, items and schedules: random programs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_lockstep import EffectiveBatchSize, LockstepDDPStrategy, gather_uneven
from lightning_lockstep.errors import BatchSizeError, ConfigurationError
from tests.harness import QUIET, on_device, run_ranks

RANKS = 3


class Net(LightningModule):
    """One weight, and the step that a case gives."""

    def __init__(self, step: Callable[[Any, Any, int], Any]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(count), dtype=torch.float64)[:, None])


def fit(net: Net, train: Any, **options: Any) -> None:
    seed_everything(3, verbose=False)
    given = {"max_epochs": 1, "num_sanity_val_steps": 0, "strategy": LockstepDDPStrategy(), **options}
    Trainer(**{**QUIET, **on_device(int(os.environ["WORLD_SIZE"])), **given}).fit(net, train)


def mean_of(net: Net, batch: Any, index: int) -> Any:
    return (net.weight * batch[0]).mean()


def moved(net: Net) -> float:
    return float(net.weight.detach()) - 1.0


class Normed(Net):
    """With statistics, and a sum that it keeps itself."""

    def __init__(self) -> None:
        super().__init__(lambda net, batch, index: net.forward_of(batch))
        self.norm, self.total = torch.nn.BatchNorm1d(1, momentum=None).double(), 0.0

    def forward_of(self, batch: Any) -> torch.Tensor:
        self.total += float(batch[0].sum())
        return self.norm(torch.cat([batch[0], -batch[0]])).mean() * self.weight.mean()


def statistics() -> list[float]:
    net = Normed()
    fit(net, DataLoader(rows(RANKS + 1), 1, shuffle=False))
    return [net.total, float(net.norm.num_batches_tracked)]  # type: ignore[arg-type]


def gathered() -> list[int]:
    sizes: list[int] = []

    def step(net: Net, batch: Any, index: int) -> Any:
        sizes.append(sum(map(len, gather_uneven(net.weight * batch[0]))))
        return mean_of(net, batch, index)

    fit(Net(step), DataLoader(rows(RANKS + 2), 1))
    return sizes


def refused(kind: type[Exception], make: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        make()
    return str(caught.value)


def step_by_hand(net: Net, batch: Any, index: int) -> None:
    optimizer = net.optimizers()
    optimizer.zero_grad()
    net.manual_backward(mean_of(net, batch, index))
    optimizer.step()


def joined(*, by_hand: bool) -> float:
    rank = int(os.environ["RANK"])
    net = Net(step_by_hand if by_hand else mean_of)
    net.automatic_optimization = not by_hand
    own = Subset(rows(3), [0, 1, 2] if rank == 0 else [2])
    fit(
        net,
        DataLoader(own, 1),
        strategy=LockstepDDPStrategy(uneven_inputs="join"),
        use_distributed_sampler=False,
    )
    return moved(net)


#: What rank 1 returns as num_items in a batch, and what all ranks raise; the others return 7.
WRONG: dict[str, tuple[Callable[[int], float | None], str]] = {
    "negative": (lambda batch: -1, "num_items=-1 on rank 1"),
    "nan": (lambda batch: float("nan"), "num_items=nan on rank 1"),
    "not returned": (lambda batch: 7 if batch == 0 else None, "no num_items on rank 1"),
    "never returned": (lambda batch: None, "no num_items on rank 1"),
    "never returned, join": (lambda batch: None, "no num_items on rank 1"),
}


def wrong_items(case: str) -> str:
    of_rank_1, _ = WRONG[case]

    def step(net: Net, batch: Any, index: int) -> Any:
        count = of_rank_1(index) if net.global_rank == 1 else 7
        return mean_of(net, batch, index) if count is None else {"loss": mean_of(net, batch, index), "num_items": count}

    options: dict[str, Any] = {}
    if case.endswith("join"):
        # With loaders of its own a rank may run out before the others, and samples are counted in each step.
        options = {"strategy": LockstepDDPStrategy(uneven_inputs="join"), "use_distributed_sampler": False}
    data = rows(12 - 2 * int(os.environ["RANK"]) * bool(options))
    return refused(ConfigurationError, lambda: fit(Net(step), DataLoader(data, 2), **options))


def masks() -> list[list[int]]:
    found: list[list[int]] = []

    def step(net: Net, batch: Any, index: int) -> Any:
        found.append(torch.nn.functional.dropout(torch.ones(32)).bool().int().tolist())
        return mean_of(net, batch, index)

    fit(Net(step), DataLoader(rows(6), 1))
    return found


def cases() -> dict[str, Any]:
    for name in ("lightning.pytorch", "lightning_lockstep"):
        logging.getLogger(name).setLevel(logging.ERROR)
    rank, two = int(os.environ["RANK"]), [DataLoader(rows(8), 2), DataLoader(rows(8), 4)]
    other_order = DataLoader(Subset(rows(6), [*range(6)][:: 1 - 2 * (rank == 1)]), 1)
    gathers = Net(lambda net, batch, index: net.all_gather(mean_of(net, batch, index), sync_grads=True).mean())
    return {
        "statistics": statistics(),
        "gathered": gathered(),
        "joined": joined(by_hand=False),
        "joined, manual optimization": joined(by_hand=True),
        "masks": masks(),
        "items": {case: wrong_items(case) for case in WRONG},
        "two sizes": refused(BatchSizeError, lambda: fit(Net(mean_of), two, callbacks=[EffectiveBatchSize(6)])),
        "orders": refused(ConfigurationError, lambda: fit(Net(mean_of), other_order)),
        "all_gather": refused(ConfigurationError, lambda: fit(gathers, DataLoader(rows(RANKS + 1), 1))),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(RANKS, cases, backend=None, timeout=120)


#: What one process with the global batch has.
RIGHT: dict[str, Any] = {
    **dict.fromkeys(("joined", "joined, manual optimization"), -0.1 * ((0 + 2 + 2) / 3 + 1 + 2)),
    "gathered": [3, 2],
}


@pytest.mark.parametrize("case", RIGHT)
def test_a_step_is_the_mean_over_what_counts(case: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank[case] == pytest.approx(RIGHT[case], rel=0, abs=1e-12)


@pytest.mark.parametrize("case", WRONG)
def test_a_number_of_items_that_cannot_be_is_one_error_on_all_ranks(case: str, found: list[dict[str, Any]]) -> None:
    said = f"training_step returned {WRONG[case][1]}: expected the number of items, 0 or more, on every rank."
    assert [rank["items"][case] for rank in found] == [said] * RANKS


def test_padding_leaves_nothing_in_a_module(found: list[dict[str, Any]]) -> None:
    # Sample 3 is alone in the second step, on rank 0.
    assert [rank["statistics"] for rank in found] == [[3.0, 2.0], [1.0, 1.0], [2.0, 1.0]]


def test_ranks_draw_numbers_of_their_own(found: list[dict[str, Any]]) -> None:
    first, *others = [rank["masks"] for rank in found]
    assert all(mask != other for rank in others for mask, other in zip(first, rank, strict=True))


def test_what_the_ranks_do_not_have_alike_is_one_error_on_all(found: list[dict[str, Any]]) -> None:
    for case, told in {
        "two sizes": "batch sizes of 2 and 4: expected one size",
        "orders": "indices of the Subset: ",
        "all_gather": "self.all_gather in a batch of 1 samples on 3 ranks: expected a sample on each rank",
    }.items():
        assert len({rank[case] for rank in found}) == 1
        assert told in found[0][case]
