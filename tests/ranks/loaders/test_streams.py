"""Streams on three real ranks with real workers: each sample once, in training and evaluation, and the same weights."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import ChainDataset, DataLoader, IterableDataset, TensorDataset, get_worker_info

from lightning_lockstep import ConfigurationError, LockstepDDPStrategy, ReplicaCheck
from lightning_lockstep._lightning import LightningModule, Trainer, seed_everything
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.loaders.streams import shared_stream
from tests.helpers import QUIET, on_device, run_ranks

RANKS = 3
COUNTS = (1, 5, 13, 40)  # numbers of samples


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
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1, dtype=torch.float64)
        torch.nn.init.constant_(self.layer.weight, 0.1)
        torch.nn.init.zeros_(self.layer.bias)
        self.seen: dict[str, list[list[int]]] = {"train": [], "validate": [], "test": []}

    def take(self, stage: str, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, numbers = batch
        loader = {
            "train": lambda: self.trainer.train_dataloader,
            "validate": lambda: self.trainer.val_dataloaders,
            "test": lambda: self.trainer.test_dataloaders,
        }[stage]()
        parts = getattr(loader, "batch_sampler", None)
        own = parts.sizes(batch_idx)[0] if hasattr(parts, "sizes") else len(numbers)
        self.seen[stage].append(numbers[:own].tolist())
        return loss_of(self.layer, rows, numbers)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.take("train", batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.take("validate", batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.take("test", batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def loss_of(layer: torch.nn.Linear, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return ((layer(rows).squeeze(-1) - numbers.remainder(5)) ** 2).mean()


def divided(samples: int, workers: int) -> dict[str, Any]:
    communicator = current_communicator()
    given = DataLoader(Stream(samples), 2, num_workers=workers, persistent_workers=workers > 0)
    loader = shared_stream(given, communicator.rank, RANKS)
    epochs = []
    for epoch in (0, 1):
        loader.batch_sampler.set_epoch(epoch)
        batches = [numbers.tolist() for _, numbers in loader]
        sizes = [loader.batch_sampler.sizes(number) for number in range(len(batches) + 1)]
        epochs.append({"batches": batches, "sizes": sizes})
    return {"epochs": epochs}


def fit(samples: int = 0, *, train: Any = None, strategy: Any = None, **options: Any) -> dict[str, Any]:
    seed_everything(7, verbose=False)
    net = Net()
    trainer = Trainer(
        **{**QUIET, **on_device(RANKS), "max_epochs": 2, "num_sanity_val_steps": 0, **options},
        strategy=strategy or LockstepDDPStrategy(iterable_datasets="shard", threads_per_rank=1),
    )
    train = DataLoader(Stream(samples), 2) if train is None else train
    trainer.fit(net, train, DataLoader(Stream(samples), 2, num_workers=1))
    trainer.test(
        net,
        DataLoader(TensorDataset(*map(torch.stack, zip(*map(row, range(7)), strict=True))), 2),
        verbose=False,
    )
    return {"seen": net.seen, "weights": [p.detach().flatten().tolist() for p in net.parameters()]}


def refused(make: Any) -> str:
    with pytest.raises(ConfigurationError) as raised:
        make()
    return str(raised.value)


def same_data(strategy: Any) -> list[str]:
    texts: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("lightning_lockstep.callbacks.replica_check")
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    check = ReplicaCheck(every_n_steps=2, action="warn")
    fit(40, strategy=strategy, callbacks=[check], max_epochs=1)
    logger.removeHandler(handler)
    return texts


def cases() -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    answers: dict[str, Any] = {"own": fit(train=DataLoader(ChainDataset([OfRank(12)]), 2), max_epochs=1)}
    for samples in COUNTS:
        for workers in (0, 2):
            answers[f"{workers} workers, {samples}"] = divided(samples, workers)
    answers["fit"] = fit(22, accumulate_grad_batches=3)
    answers["fit, padding"] = fit(13)
    answers["sizes differ"] = refused(lambda: fit(train=DataLoader(Stream(9), 2 + rank)))
    answers["streams differ"] = refused(lambda: fit(train=DataLoader(Stream(40, skipped=8 * rank), 2)))
    answers["same data"] = same_data(LockstepDDPStrategy(threads_per_rank=1))
    answers["divided data"] = same_data(None)
    return answers


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    return run_ranks(RANKS, cases, timeout=120, backend=None)


def test_each_sample_once_and_as_many_batches_on_all_ranks(answers: list[dict[str, Any]]) -> None:
    for workers in (0, 2):
        for samples in COUNTS:
            ranks = [answer[f"{workers} workers, {samples}"]["epochs"] for answer in answers]
            orders = []
            for of_ranks in zip(*ranks, strict=True):
                assert len({len(one["batches"]) for one in of_ranks}) == 1
                totals = {tuple(total for _, total in one["sizes"]) for one in of_ranks}
                assert len(totals) == 1
                assert sum(totals.pop()) == samples
                orders.append(in_order([(one["batches"], one["sizes"]) for one in of_ranks]))
                assert sorted(orders[-1]) == [*range(samples)]
            # Each epoch has its own order, which is the same without workers.
            assert orders[0] != orders[1] or samples < 4
            first = answers[0][f"0 workers, {samples}"]["epochs"][0]["batches"]
            assert ranks[0][0]["batches"] == first


def flat(lists: list[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def in_order(ranks: list[tuple[list[list[int]], list[tuple[int, int]]]]) -> list[int]:
    """Return the samples of all ranks in the order of the stream."""
    found = []
    for number in range(len(ranks[0][0])):
        parts = [batches[number][: sizes[number][0]] for batches, sizes in ranks]
        found += [parts[i % RANKS][i // RANKS] for i in range(sum(map(len, parts)))]
    return found


def seen(answers: list[dict[str, Any]], case: str, stage: str) -> list[list[int]]:
    """Return what each global batch of a fit had, in the order of the stream."""
    ranks = [answer[case]["seen"][stage] for answer in answers]
    return [
        [parts[i % RANKS][i // RANKS] for i in range(sum(map(len, parts)))]
        for parts in zip(*ranks, strict=True)
    ]


@pytest.mark.parametrize(("case", "samples", "steps"), [("fit", 22, 3), ("fit, padding", 13, 1)])
def test_fits_see_each_sample_once_and_step_as_one_process(
    answers: list[dict[str, Any]], case: str, samples: int, steps: int
) -> None:
    batches = seen(answers, case, "train")
    each = len(batches) // 2
    assert [sorted(flat(batches[:each])), sorted(flat(batches[each:]))] == [[*range(samples)]] * 2
    # In an evaluation a list of the module has nothing of a padding batch.
    evaluated = {
        stage: flat([*chain(*(answer[case]["seen"][stage] for answer in answers))])
        for stage in ("validate", "test")
    }
    assert sorted(evaluated["validate"]) == sorted([*range(samples)] * 2)
    assert sorted(evaluated["test"]) == [*range(7)]
    # What one process does with the same global batches, each step the mean over its samples.
    net = Net()
    optimizer = net.configure_optimizers()
    for epoch in (batches[:each], batches[each:]):
        for start in range(0, each, steps):
            rows, numbers = map(torch.stack, zip(*map(row, flat(epoch[start : start + steps])), strict=True))
            optimizer.zero_grad()
            loss_of(net.layer, rows, numbers).backward()
            optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in net.parameters()])
    for answer in answers:
        found = torch.tensor(flat(answer[case]["weights"]), dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_data_set_that_divides_itself_is_read_as_it_is(answers: list[dict[str, Any]]) -> None:
    for rank, answer in enumerate(answers):
        assert flat(answer["own"]["seen"]["train"]) == [*range(rank, 12, RANKS)]


def test_ranks_that_have_other_streams_are_told(answers: list[dict[str, Any]]) -> None:
    assert len({answer["sizes differ"] for answer in answers}) == 1
    assert "samples of a global batch: 6 on rank 0, 9 on rank 1, 12 on rank 2" in answers[0]["sizes differ"]
    assert "different numbers of training batches" in answers[0]["streams differ"]


def test_the_warning_of_same_data_names_the_option(answers: list[dict[str, Any]]) -> None:
    (text,) = answers[0]["same data"]
    assert "iterable_datasets='shard'" in text
    assert answers[0]["divided data"] == []
