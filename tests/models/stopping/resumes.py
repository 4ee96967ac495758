"""Loaders, ways to stop and other numbers of ranks: what a resumed epoch sees beside the one that was never stopped.

Each row fits once from beginning to end, with a checkpoint in mid-epoch or at the end of an epoch, and once more from
that checkpoint: what the second fit sees has to be what the first saw after it.
"""

from __future__ import annotations

import logging
import os
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_lockstep import LockstepDDPStrategy, StopTogether
from lightning_lockstep._lightning import (
    Callback,
    CombinedLoader,
    LightningModule,
    Trainer,
    seed_everything,
)
from tests.harness import QUIET, logged
from tests.models.stopping.resumed_states import quiet

SAMPLES, SIZE = 40, 2


class Numbers(Dataset[int]):
    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """The numbers of one rank."""

    def __init__(self, length: int = SAMPLES, shuffles: bool = False) -> None:
        self.length, self.shuffles = length, shuffles

    def __iter__(self) -> Iterator[int]:
        numbers = list(range(rank(), self.length, world()))
        if self.shuffles:
            random.shuffle(numbers)
        return iter(numbers)


class StatefulStream(Stream):
    """Knows where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.at = self.begin_at = 0

    def __len__(self) -> int:
        return len(range(rank(), self.length, world()))

    def __iter__(self) -> Iterator[int]:
        self.at, self.begin_at = self.begin_at, 0
        for number in list(range(rank(), self.length, world()))[self.at :]:
            self.at += 1
            yield number

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "rank": rank()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] == rank(), "the state of another rank"
        self.begin_at = state["at"]


class Wrapped:
    """A loader of one's own around a DataLoader, whose attributes it shows."""

    def __init__(self, loader: DataLoader[int]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)


class OwnBatches(BatchSampler):
    """Batches of one's own, in an order that the random numbers of Python, numpy and torch decide."""

    def __init__(self) -> None:
        self.batch_size, self.drop_last = SIZE, False

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        numbers = list(range(rank(), SAMPLES, world()))
        random.shuffle(numbers)
        np.random.shuffle(numbers)
        numbers = [numbers[place] for place in torch.randperm(len(numbers)).tolist()]
        yield from (numbers[i : i + SIZE] for i in range(0, len(numbers), SIZE))

    def __len__(self) -> int:
        return SAMPLES // SIZE // world()


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def plain(length: int = SAMPLES, **options: Any) -> DataLoader[int]:
    return DataLoader(Numbers(length), SIZE, **options)


def streamed(dataset: Stream | None = None, **options: Any) -> DataLoader[int]:
    return DataLoader(dataset or Stream(), SIZE, **options)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


#: name -> the loader, options of the Trainer (``uneven`` is the strategy's)
Made = Callable[[], Any]
LOADERS: dict[str, tuple[Made, dict[str, Any]]] = {
    "in order": (plain, {}),
    "shuffled": (lambda: plain(shuffle=True), {}),
    "shuffled by a generator": (lambda: plain(shuffle=True, generator=generator()), {}),
    "wrapped": (lambda: Wrapped(plain(shuffle=True, generator=generator())), {}),
    "workers": (lambda: plain(shuffle=True, num_workers=2), {}),
    "persistent workers": (lambda: plain(shuffle=True, num_workers=1, persistent_workers=True), {}),
    "own batch sampler": (
        lambda: DataLoader(Numbers(), batch_sampler=OwnBatches()),
        {"use_distributed_sampler": False},
    ),
    "a list": (lambda: [plain(shuffle=True), plain(3 * SIZE * world(), shuffle=True)], {}),
    "a dict": (lambda: {"a": plain(4 * SIZE * world(), shuffle=True), "b": plain(shuffle=True)}, {}),
    **{
        f"combined, {mode}": (
            lambda mode=mode: CombinedLoader([plain(shuffle=True), plain(24, shuffle=True)], mode),
            {},
        )
        for mode in ("min_size", "max_size", "max_size_cycle")
    },
    "a dict with a stream": (lambda: {"a": plain(3 * SIZE * world(), shuffle=True), "b": streamed()}, {}),
    "stream": (streamed, {}),
    "stream, shuffled": (lambda: streamed(Stream(shuffles=True)), {}),
    "stream, workers": (lambda: streamed(num_workers=1), {}),
    "stateful": (lambda: StatefulDataLoader(Numbers(), SIZE, shuffle=True), {}),
    "stateful data": (lambda: StatefulDataLoader(StatefulStream(), SIZE), {}),
    "uneven, truncate": (
        lambda: plain(SAMPLES - 4 * rank(), shuffle=True),
        {"use_distributed_sampler": False, "uneven": "truncate"},
    ),
    "uneven, join": (
        lambda: plain(SAMPLES - 6 * rank(), shuffle=True),
        {"use_distributed_sampler": False, "uneven": "join"},
    ),
    "uneven streams, join": (lambda: streamed(Stream(SAMPLES - 4 * rank())), {"uneven": "join"}),
    "accumulated": (lambda: plain(shuffle=True), {"accumulate_grad_batches": 2}),
    "made again every epoch": (lambda: plain(shuffle=True), {"reload_dataloaders_every_n_epochs": 1}),
    "limited": (lambda: plain(shuffle=True), {"limit_train_batches": 0.6}),
    "overfitted": (plain, {"overfit_batches": 4}),
}


class Net(LightningModule):
    """Notes what it sees, and uses random numbers, as dropout does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[int, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.rand(1)
        self.seen.append((self.current_epoch, numbers_of(batch)))
        return self.weight * 1.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


def numbers_of(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: numbers_of(one) for key, one in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [numbers_of(one) for one in batch]
    return batch if batch is None else batch.tolist()


class Saves(Callback):
    """Saves at the end of a batch of the second epoch, as ``ModelCheckpoint(every_n_train_steps)`` does."""

    def __init__(self, path: str, batch: int) -> None:
        self.path, self.batch = path, batch
        self.after = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
        if (trainer.current_epoch, index) == (1, self.batch):
            trainer.save_checkpoint(self.path)
            self.after = len(pl_module.seen)


def fit(
    name: str,
    *callbacks: Any,
    ckpt_path: str | None = None,
    saves_to: str | None = None,
    **options: Any,
) -> Net:
    loader, of_loader = LOADERS[name]
    settings = {"max_epochs": 3, **of_loader, **options}
    uneven = settings.pop("uneven", "error")
    callbacks = (*callbacks, *([StopTogether()] if settings.pop("stops_together", False) else []))
    strategy = settings.pop("strategy", None) or LockstepDDPStrategy(uneven_inputs=uneven, guard="off")
    seed_everything(1, verbose=False)
    net = Net()
    trainer = Trainer(
        accelerator="cpu",
        devices=world(),
        strategy=strategy,
        callbacks=list(callbacks),
        **QUIET,
        **settings,
    )
    with suppress(SystemExit):
        trainer.fit(net, loader(), ckpt_path=ckpt_path)
    if saves_to is not None:
        trainer.save_checkpoint(saves_to)
    return net


def table(folder: str, names: list[str]) -> dict[str, Any]:
    """Every loader: the second half of a fit, and the same from a checkpoint in the middle, and twice."""
    quiet()
    rows: dict[str, Any] = {}
    for name in names:
        path = str(Path(folder, name + ".ckpt"))
        saves = Saves(path, 1)
        whole = fit(name, saves).seen
        again = Saves(path + "2", 2)
        resumed = fit(name, again, ckpt_path=path).seen
        twice = fit(name, ckpt_path=path + "2").seen
        # With accumulation, the second checkpoint is in the middle of an optimizer step, whose batches come again.
        later = whole[saves.after + (name != "accumulated") :]
        expected = whole[saves.after :]
        right = saves.after > 0 and len(expected) > 1 and resumed == expected and twice == later
        rows[name] = "exact" if right else (expected, resumed, twice)
    return rows


class SavesAround(Callback):
    """Saves at the start and the end of the second epoch, and at the end of its last batch."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.after: dict[str, int] = {}  # path -> batches that do not come again

    def save(self, trainer: Any, module: Any, place: str) -> None:
        path = str(Path(self.folder, f"{place}.ckpt"))
        if trainer.current_epoch == 1 and path not in self.after:
            self.after[path] = len(module.seen)
            trainer.save_checkpoint(path)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.save(trainer, pl_module, "start")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == trainer.num_training_batches - 1:
            self.save(trainer, pl_module, "last batch")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.save(trainer, pl_module, "end")


def around_epochs(folder: str, name: str) -> dict[str, Any]:
    """Return which of these checkpoints a resumed fit goes on from otherwise than the whole one went on."""
    quiet()
    saves = SavesAround(folder)
    whole = fit(name, saves, max_epochs=4).seen
    resumed = {path: fit(name, ckpt_path=path, max_epochs=4).seen for path in saves.after}
    return {path: seen for path, seen in resumed.items() if seen != whole[saves.after[path] :]}


def batches_by_epoch(name: str, **options: Any) -> dict[int, int]:
    quiet()
    return dict(Counter(epoch for epoch, _ in fit(name, **options).seen))


class Asks(Callback):
    """Ends the fit after a batch, as any callback may."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
        trainer.should_stop |= (trainer.current_epoch, index) == (1, 1)


def ended_by_a_callback(folder: str) -> Any:
    """Return what the first fit and the resumed one saw, and what a whole one saw."""
    quiet()
    path = str(Path(folder, "asked.ckpt"))
    first = fit("shuffled", Asks(), saves_to=path).seen
    return first, fit("shuffled", ckpt_path=path).seen, fit("shuffled").seen


# -- Another number of ranks, another size of the batches --


#: name -> the loader, options of the fit that stops, what a resumed one says; else no sample comes again or is left out
Change = tuple[str, dict[str, Any], str | None]
ONE_DEVICE: dict[str, Any] = {"strategy": "auto", "stops_together": True}
TO_FEWER: dict[str, Change] = {
    "shuffled": ("shuffled", {}, None),
    "workers": ("workers", {}, None),
    "stream": ("stream", {}, "does not have the position of a loader for 1 rank with batches of 2"),
    "stateful data": (
        "stateful data",
        {},
        "does not have the position of a loader for 1 rank with batches of 2",
    ),
}
FROM_ONE: dict[str, Change] = {
    # Lightning shuffles for training what it divides.
    "in order": (
        "in order",
        ONE_DEVICE,
        "does not have the position of a loader for 2 ranks with batches of 2",
    ),
    "stock": ("in order", {"strategy": "auto"}, "does not have the position of a loader for 2 ranks"),
    "shuffled by one": ("shuffled", {}, None),
}
Seen = tuple[list[int], list[str]]


def save_all(folder: str, cases: dict[str, Change]) -> dict[str, Seen]:
    """Fit until a checkpoint in the second epoch; what this rank saw of that epoch."""
    quiet()
    found: dict[str, Seen] = {}
    for name, (loader, options, _) in cases.items():
        saves = Saves(str(Path(folder, f"{name}.ckpt")), 1)
        found[name] = epoch_of(fit(loader, saves, **options).seen[: saves.after]), []
    return found


def resume_all(folder: str, cases: dict[str, Change]) -> dict[str, Seen]:
    quiet()
    found = {}
    for name, (loader, *_) in cases.items():
        with warnings.catch_warnings(record=True) as warned, logged(level=logging.WARNING) as said:
            warnings.simplefilter("always")
            seen = epoch_of(fit(loader, ckpt_path=str(Path(folder, f"{name}.ckpt"))).seen)
            filters = [str(one[1]) for one in warnings.filters]
        assert not any("resuming" in one for one in filters), "a resumed fit leaves no filter behind"
        assert not [one for one in warned if "You're resuming from a checkpoint" in str(one.message)]
        found[name] = seen, [text for text in said if "goes on" in text]
    return found


def epoch_of(seen: list[Any]) -> list[int]:
    return [number for epoch, batch in seen if epoch == 1 for number in batch]


def check_numbers(cases: dict[str, Change], saved: list[dict[str, Seen]], resumed: list[dict[str, Seen]]) -> None:
    """The rest of the epoch is exact, or one rank says what comes again."""
    for name, (_, _, says) in cases.items():
        texts = [text for of_rank in resumed for text in of_rank[name][1]]
        assert (texts == []) if says is None else (len(texts) == 1 and says in texts[0]), (name, texts)
        if says is None:
            numbers = sorted(number for of_rank in [*saved, *resumed] for number in of_rank[name][0])
            assert numbers == list(range(SAMPLES)), name
