"""The search of AutoBatchSize on two ranks: all find the same, whichever rank runs out of memory, and wherever."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_lockstep import AutoBatchSize, BatchSizeError, find_executable_batch_size
from lightning_lockstep.distributed import current_communicator
from tests.harness import run_ranks
from tests.models.batch_size.models import FULL, Mid, PassedIn, Walled, largest, of_two


def runs_out(folder: str) -> dict[str, Any]:
    """What runs out on the last rank alone, and where; the errors of searches that find nothing."""
    found: dict[str, Any] = {}
    for where in ("forward", "backward", "optimizer", "collate"):
        module = Walled(300, where=where, on_rank=1)
        callback = largest(margin=0)
        of_two(folder, callback).fit(module)
        found[where] = module.batch_size, callback.result.largest, module.sizes
    for name, settings, module in (
        ("nothing fits", {"init_val": 64}, Mid(fits=0, on_rank=1)),
        ("no attribute", {"batch_arg_name": "micro"}, Walled()),
    ):
        try:
            of_two(folder, largest(**settings)).fit(module)
        except BatchSizeError as error:  # noqa: PERF203
            found[name] = str(error)
    return found


class Gathering(Walled):
    """Gathers rows in its step; ``how``. On the last rank memory runs out before it comes to that."""

    def __init__(self, wall: int, how: str, on_rank: int) -> None:
        super().__init__(wall, on_rank=on_rank)
        self.how, self.norm = how, nn.Identity()

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        if self.how == "lightning":
            return self.all_gather(rows, sync_grads=True).flatten(0, 1)
        if self.how == "message":
            other = 1 - self.global_rank
            dist.send(rows.detach(), other) if other else dist.recv(torch.empty_like(rows), other)
        whole = rows.new_empty(2 * len(rows), rows.shape[1])
        dist.all_gather_into_tensor(whole, rows.detach())
        return whole

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (inputs,) = batch
        if self.full(len(inputs)):
            raise RuntimeError(FULL)
        rows = self.middle(self.first(inputs))
        self.log("loss", rows.mean())
        return (rows @ self.gathered(rows).T).square().mean() + 0 * self.last(rows).mean()


def gathers(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for how in ("lightning", "in place", "message"):
        module, callback = Gathering(60, how, on_rank=1), largest(margin=0)
        try:
            of_two(folder, callback).fit(module)
            found[how] = module.batch_size, module.sizes
        except BatchSizeError as error:
            found[how] = str(error)
    return found


class Uneven(PassedIn):
    """Makes loaders of which those of rank 1 are small."""

    def train_dataloader(self) -> DataLoader[Any]:
        rows = 90 if self.global_rank == 0 else 30
        return DataLoader(TensorDataset(torch.randn(rows, 20)), batch_size=self.batch_size, drop_last=True)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


class Streams(PassedIn):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Endless(), batch_size=self.batch_size)


def other_loaders(folder: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name, streams in (("uneven", Uneven()), ("stream", Streams())):
        run = of_two(folder, largest(), use_distributed_sampler=False, max_steps=1)
        try:
            run.fit(streams)
        except BatchSizeError as error:
            told[name] = str(error), streams.batch_size
        else:
            told[name] = streams.batch_size, streams.sizes
    return told


class AtMilestones(AutoBatchSize):
    """The example of Lightning's documentation."""

    def __init__(self, milestones: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.milestones, self.found = milestones, list[Any]()

    def on_fit_start(self, *args: Any, **kwargs: Any) -> None:
        return

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch in self.milestones:
            self.scale_batch_size(trainer, pl_module)
            self.found.append(self.optimal_batch_size)


class Unfreezing(Walled):
    """Has less room from its third epoch on; trains on shuffled numbers and validates."""

    def __init__(self) -> None:
        super().__init__(100)
        self.seen, self.validated = list[tuple[int, torch.Tensor]](), list[tuple[int, int]]()

    def full(self, size: int, index: int | None = None) -> bool:
        return size > (100 if self.current_epoch < 2 else 20)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append((self.current_epoch, batch[0][:, 0].clone()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append((self.current_epoch, len(batch[0])))

    def train_dataloader(self) -> DataLoader[Any]:
        data = torch.arange(256.0)[:, None].expand(256, 20)
        return DataLoader(TensorDataset(data), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(200, 20)), batch_size=self.batch_size)


def milestones(folder: str) -> dict[str, Any]:
    """A fit that searches in its first and its third epoch, and one that resumes before the third."""
    module, finder = Unfreezing(), AtMilestones((0, 2), "binsearch", 1, margin=0, global_batch_size="largest")
    of_two(folder, finder, max_steps=-1, max_epochs=4, limit_val_batches=1.0).fit(module)
    seen = [torch.cat([rows for epoch, rows in module.seen if epoch == n]).tolist() for n in range(4)]
    sizes = [len(next(rows for epoch, rows in module.seen if epoch == n)) for n in range(4)]
    validated = [next(size for epoch, size in module.validated if epoch == n) for n in range(4)]
    settings, path = {"max_steps": -1, "enable_checkpointing": True}, f"{folder}/last.ckpt"
    first = of_two(
        folder,
        AtMilestones((0,), "binsearch", 1, margin=0, global_batch_size="largest"),
        max_epochs=1,
        **settings,
    )
    first.fit(Unfreezing())
    first.save_checkpoint(path)
    again = AtMilestones((2,), "binsearch", 1, margin=0, global_batch_size="largest")
    resumed = of_two(folder, again, max_epochs=3, **settings)
    resumed.fit(Unfreezing(), ckpt_path=path, weights_only=False)
    return {
        "found": finder.found,
        "sizes": sizes,
        "validated": validated,
        "seen": seen,
        "resumed": again.found,
    }


class WithRate(Walled):
    lr = 0.1


def finds_a_rate(folder: str) -> int:
    """Lightning's search of a learning rate ends its run with an exception that is no failure."""
    rates = Tuner(of_two(folder)).lr_find(WithRate(), num_training=5, update_attr=False)
    return len(rates.results["lr"])


def decorated() -> tuple[list[int], str, str]:
    rank, tried = current_communicator().rank, []

    @find_executable_batch_size(starting_batch_size=512)
    def train(batch_size: int, name: str, *, fail: bool = False) -> str:
        tried.append(batch_size)
        if fail:
            raise KeyError("a bug on one rank") if rank == 0 else RuntimeError(FULL)
        if batch_size > 100 and rank == 1:
            raise RuntimeError(FULL)
        return f"{name}{batch_size}"

    first = train("size ")
    assert train("again ") == f"again {tried[-1]}", "a later call starts where the last ended"
    try:
        train("x", fail=True)
    except (KeyError, BatchSizeError) as error:
        return tried, first, f"{type(error).__name__}: {error}"
    return tried, first, "no error"


def cases(folder: str) -> dict[str, Any]:
    """Searches one after the other, on the same ranks."""
    return {
        **runs_out(folder),
        **gathers(folder),
        **other_loaders(folder),
        "milestones": milestones(folder),
        "rates": finds_a_rate(folder),
        "decorator": decorated(),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, cases, str(tmp_path_factory.mktemp("search")), backend=None, timeout=170)


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer", "collate"])
def test_all_ranks_find_the_same_size_whoever_runs_out(found: list[dict[str, Any]], where: str) -> None:
    for size, fitted, sizes in [told[where] for told in found]:
        assert size == found[0][where][0]
        assert 294 <= size <= 300 and fitted == size and sizes == [size] * 2


def test_a_search_that_finds_nothing_is_the_same_error_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for told in found:
        assert "1 does not fit" in told["nothing fits"]
        assert "no attribute 'micro'" in told["no attribute"]
        assert told["no attribute"] == found[0]["no attribute"]


def test_a_step_that_gathers_is_tried_on_each_rank_alone(found: list[dict[str, Any]]) -> None:
    for told in found:
        for size, run in (told["lightning"], told["in place"]):
            assert 58 <= size <= 60 and run == [size] * 2
        refused = told["message"]
        assert re.search("(send|recv) cannot be answered in a step that runs on one rank alone", refused)
        assert "Give the batch size yourself" in refused


def test_streams_are_refused_and_loaders_of_ranks_may_be_uneven(found: list[dict[str, Any]]) -> None:
    for told in found:
        assert told["stream"][1] == 4 and "IterableDataset, which has no length" in told["stream"][0]
        assert told["uneven"][0] == 30, "what every rank has"


def test_a_subclass_searches_again_at_epochs_of_its_own(found: list[dict[str, Any]]) -> None:
    for told in [each["milestones"] for each in found]:
        assert told["found"] == [100, 20] and told["sizes"] == told["validated"] == [100, 100, 20, 20]
        assert told["seen"][2] != told["seen"][0] and told["seen"][2] != told["seen"][3], "an order by epoch"
        assert told["resumed"] == [20]
    for epoch in range(4):
        rows = [row for told in found for row in told["milestones"]["seen"][epoch]]
        assert sorted(rows) == list(range(256)), "each sample once an epoch"


def test_lightnings_search_of_a_learning_rate_is_no_failure(found: list[dict[str, Any]]) -> None:
    assert all(told["rates"] >= 4 for told in found)


def test_the_decorator_tries_the_same_sizes_on_every_rank(found: list[dict[str, Any]]) -> None:
    for tried, first, _ in [told["decorator"] for told in found]:
        assert tried[:5] == [512, 256, 128, 64, 64] and first == "size 64"
    assert found[0]["decorator"][2].startswith("KeyError")
    assert all("failed on rank 0" in told["decorator"][2] for told in found[1:])
