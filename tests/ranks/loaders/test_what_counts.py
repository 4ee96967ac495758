"""What pads, is None, or was never given to a rank does not count: a table of small fits on three ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torchmetrics import Metric

from lightning_lockstep import EffectiveBatchSize, LockstepDDPStrategy, gather_uneven
from lightning_lockstep.errors import BatchSizeError, ConfigurationError
from tests.helpers import QUIET, on_device, run_ranks

RANKS = 3


class Net(LightningModule):
    """A weight for each sample, and hooks that a case gives."""

    def __init__(self, step: Callable[[Any, Any, int], Any], optimizer: Any = torch.optim.SGD) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.step, self.make, self.found = step, optimizer, dict[str, Any]()
        self.at_end: Callable[[Any], None] = lambda net: None
        self.schedule: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("count", float(len(batch[0])), reduce_fx="sum")

    def on_validation_epoch_end(self) -> None:
        self.log("total", 7.0, reduce_fx="sum")

    def on_train_epoch_end(self) -> None:
        self.at_end(self)

    def configure_optimizers(self) -> Any:
        self.schedule.append(int(self.trainer.estimated_stepping_batches))
        return self.make(self.parameters(), lr=0.1)


def rows(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(count), dtype=torch.float64)[:, None])


def fit(net: Net, train: Any, *validation: Any, **options: Any) -> Any:
    seed_everything(3, verbose=False)
    given = {"max_epochs": 1, "num_sanity_val_steps": 0, "strategy": LockstepDDPStrategy(), **options}
    trainer = Trainer(**{**QUIET, **on_device(int(os.environ["WORLD_SIZE"])), **given})
    trainer.fit(net, train, *validation)
    return trainer


def mean_of(net: Net, batch: Any, index: int) -> Any:
    return (net.weight * batch[0]).mean()


def moved(net: Net) -> float:
    return float(net.weight.detach()) - 1.0


class Boxes(Metric):
    """One element of a list for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("boxes", default=[], dist_reduce_fx=None)

    def update(self, values: torch.Tensor) -> None:
        self.boxes += [torch.full((int(v) % 3 + 1,), float(v)) for v in values]

    def compute(self) -> torch.Tensor:
        return torch.tensor([float(len(self.boxes)), sum(float(b[0]) for b in self.boxes)])


def none_everywhere(optimizer: Any) -> list[float]:
    """The weights after each batch, of which all ranks leave the third one out."""
    net = Net(lambda net, batch, index: None if index == 2 else mean_of(net, batch, index), optimizer)
    weights: list[float] = []
    net.on_train_batch_end = lambda *_: weights.append(moved(net))  # type: ignore[method-assign]
    fit(net, DataLoader(rows(5 * RANKS), 1))
    return weights


class Corrupt(Dataset[Any]):
    def __len__(self) -> int:
        return 2 * RANKS

    def __getitem__(self, number: int) -> Any:
        return None if number == 1 else torch.tensor([float(number)], dtype=torch.float64)


def without_corrupt(samples: Any) -> Any:
    kept = [one for one in samples if one is not None]
    return [torch.stack(kept)] if kept else None


def none_batch(items: bool) -> float:
    """Rank 1 has a batch that is None in the first of two steps."""

    def step(net: Net, batch: Any, index: int) -> Any:
        loss = mean_of(net, batch, index)
        return {"loss": loss, "num_items": len(batch[0])} if items else loss

    net = Net(step)
    fit(net, DataLoader(Corrupt(), 1, collate_fn=without_corrupt))
    return moved(net)


def no_items() -> float:
    """Sample 2 has no items, by a loss that divides zero by zero there."""

    def step(net: Net, batch: Any, index: int) -> Any:
        mask = batch[0] != 2
        loss = (net.weight * batch[0] * mask).sum() / mask.sum()
        return {"loss": loss, "num_items": int(mask.sum())}

    net = Net(step)
    fit(net, DataLoader(rows(RANKS), 1))
    return moved(net)


def metrics_in_training() -> dict[str, Any]:
    """Seven samples, so that in the last batch of two ranks nothing is there."""
    net, boxes = Net(mean_of), Boxes()

    def step(net: Net, batch: Any, index: int) -> Any:
        boxes.update(batch[0].flatten())
        net.log("mean", batch[0].mean(), on_step=False, on_epoch=True)
        net.log("synced", batch[0].mean(), on_step=True, on_epoch=True, sync_dist=True)
        net.log("sum", batch[0].sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        net.log("highest", batch[0].max(), on_step=True, on_epoch=False, reduce_fx="max", sync_dist=True)
        return mean_of(net, batch, index)

    net.step, net.boxes = step, boxes
    net.at_end = lambda net: net.found.update(boxes=boxes.compute().tolist())
    trainer = fit(net, DataLoader(rows(7), 1), DataLoader(rows(7), 1))
    return {**net.found, **{name: float(value) for name, value in trainer.callback_metrics.items()}}


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


def joined_by_hand() -> float:
    rank = int(os.environ["RANK"])

    def step(net: Net, batch: Any, index: int) -> None:
        optimizer = net.optimizers()
        optimizer.zero_grad()
        net.manual_backward(mean_of(net, batch, index))
        optimizer.step()

    net = Net(step)
    net.automatic_optimization = False
    own = Subset(rows(3), [0, 1, 2] if rank == 0 else [2])
    fit(
        net,
        DataLoader(own, 1),
        strategy=LockstepDDPStrategy(uneven_inputs="join"),
        use_distributed_sampler=False,
    )
    return moved(net)


def schedule() -> list[int]:
    net = Net(mean_of)
    fit(net, DataLoader(rows(24), 4), callbacks=[EffectiveBatchSize(6)], max_epochs=3)
    return [*net.schedule, net.trainer.global_step]


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
    gathers = Net(
        lambda net, batch, index: net.all_gather(mean_of(net, batch, index), sync_grads=True).mean()
    )
    return {
        "adam": none_everywhere(torch.optim.Adam),
        "None without items": none_batch(False),
        "None with items": none_batch(True),
        "no items": no_items(),
        "metrics": metrics_in_training(),
        "statistics": statistics(),
        "gathered": gathered(),
        "joined": joined_by_hand(),
        "schedule": schedule(),
        "masks": masks(),
        "two sizes": refused(
            BatchSizeError, lambda: fit(Net(mean_of), two, callbacks=[EffectiveBatchSize(6)])
        ),
        "orders": refused(ConfigurationError, lambda: fit(Net(mean_of), other_order)),
        "all_gather": refused(ConfigurationError, lambda: fit(gathers, DataLoader(rows(RANKS + 1), 1))),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(RANKS, cases, backend=None, timeout=120)


#: What one process with the global batch has.
RIGHT: dict[str, Any] = {
    "None without items": -0.1 * ((0 + 0 + 2) / 3 + 4),
    "None with items": -0.1 * ((0 + 2) / 2 + 4),
    "no items": -0.1 * (0 + 1) / 2,
    "joined": -0.1 * ((0 + 2 + 2) / 3 + 1 + 2),
    "gathered": [3, 2],
    "schedule": [12, 12],
}


@pytest.mark.parametrize("case", RIGHT)
def test_a_step_is_the_mean_over_what_counts(case: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank[case] == pytest.approx(RIGHT[case], rel=0, abs=1e-12)


def test_a_batch_that_all_ranks_leave_out_moves_no_weight(found: list[dict[str, Any]]) -> None:
    weights = found[0]["adam"]
    assert weights[2] == weights[1] != weights[3] and all(rank["adam"] == weights for rank in found)


def test_values_of_a_training_epoch_are_those_of_its_samples(found: list[dict[str, Any]]) -> None:
    expected = {
        "mean": 3.0,
        "synced_epoch": 3.0,
        "sum": 21.0,
        "count": 7.0,
        "total": 7.0,
        "boxes": [7.0, 21.0],
    }
    for rank in found:
        values = rank["metrics"]
        assert {name: values[name] for name in expected} == pytest.approx(expected)
        assert (values["synced_step"], values["highest"]) == (6.0, 6.0)  # of the last batch


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
