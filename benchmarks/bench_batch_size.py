"""AutoBatchSize beside Lightning's finder and Accelerate's decorator at a wall of 600; its cost a step."""

from __future__ import annotations

import contextlib
import io
import logging
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._fit import BARE
from benchmarks.engine import Comparison, Report, Table, interleave
from lightning_lockstep import AutoBatchSize
from lightning_lockstep.batch_size import search_run
from lightning_lockstep.batch_size.memory import MemoryMeter, MemoryUse
from tests.helpers import chosen_device, leave_memory, on_device, run_ranks

WALL = 600
FULL = "CUDA out of memory. Tried to allocate 20.00 MiB"
PEER = "Lightning binsearch"
LARGEST: Any = {"global_batch_size": "largest"}  # as Lightning's does


class Walled(LightningModule):
    """A step that runs out of memory above the wall."""

    def __init__(self, wall: int = WALL, width: int = 64, batch_size: int = 2) -> None:
        super().__init__()
        first, second = nn.Linear(width, width), nn.Linear(width, width)
        self.net = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(width, 1))
        self.wall, self.width, self.batch_size = wall, width, batch_size
        self.tried: list[int] = []
        self.loader_ = TensorDataset(torch.randn(20000, width))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        size = len(batch[0])
        if not self.tried or self.tried[-1] != size:
            self.tried.append(size)
        if size > self.wall:
            raise RuntimeError(FULL)
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.loader_, batch_size=self.batch_size)


class SimulatedMeter(MemoryMeter):
    """Memory of 1 GB and 3.7 MB a sample, and room for 600 samples."""

    source, noise = "simulated", 8e6

    def __init__(self, module: Walled) -> None:
        self.module = module

    @property
    def headroom(self) -> float:
        return 3.7e6 * (WALL + 0.5)

    def start(self) -> None:
        pass

    def stop(self) -> MemoryUse:
        return MemoryUse(1e9 + 3.7e6 * self.module.tried[-1], 1e9 + self.headroom)


def fit(module: Walled, *callbacks: Callback, steps: int = 1) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        Trainer(
            **on_device(1),
            max_steps=steps,
            **BARE,
            default_root_dir=folder,
            callbacks=list(callbacks),
        ).fit(module)


class Clocked(AutoBatchSize):
    """Ours, with the time of the search alone."""

    seconds = 0.0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        began = time.perf_counter()
        super().on_fit_start(trainer, pl_module)
        self.seconds = time.perf_counter() - began


class ClockedFinder(BatchSizeFinder):
    """Lightning's, with the time and the trials of the search alone."""

    seconds = 0.0
    tried: tuple[int, ...] = ()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        began = time.perf_counter()
        super().on_fit_start(trainer, pl_module)
        self.seconds = time.perf_counter() - began
        self.tried = tuple(pl_module.tried)


def finder(
    found: dict[str, str], name: str, make: Callable[[], Any], *, read: bool = False
) -> Callable[[], float]:
    """One search; notes (trials, largest size that fitted, size after the margin) under ``name``."""

    def measure() -> float:
        module, callback = Walled(), make()
        meter = SimulatedMeter(module) if read else None
        with mock.patch.object(search_run, "meter_for", lambda *args, **kwargs: meter):
            fit(module, callback)
        if isinstance(callback, AutoBatchSize):
            trials, largest = len(callback.result.trials), callback.result.largest
        else:
            trials, largest = len(callback.tried), max(size for size in callback.tried if size <= WALL)
        share = f"{largest} ({largest / WALL:.1%} of the wall)"
        found[name] = f"{trials} trials, largest run {share}, answer {module.batch_size}"
        return float(callback.seconds)

    return measure


def accelerate_from(found: dict[str, str], start: int) -> Callable[[], float]:
    from accelerate.utils import find_executable_batch_size

    def measure() -> float:
        module, tried = Walled(), []
        optimizer = module.configure_optimizers()

        @find_executable_batch_size(starting_batch_size=start)
        def train(batch_size: int) -> int:
            tried.append(batch_size)
            for index in range(2):
                optimizer.zero_grad()
                module.training_step((torch.randn(batch_size, module.width),), index).backward()
                optimizer.step()
            return batch_size

        began = time.perf_counter()
        size = train()
        seconds = time.perf_counter() - began
        found[f"Accelerate from {start}"] = (
            f"{len(tried)} trials, answer {size} ({size / WALL:.1%} of the wall)"
        )
        return seconds

    return measure


class Turns(Callback):
    """Times the steps of one fit in which the guard is there for a stretch, then away for one, and so on.

    With and without it share process, weights, memory and the moment, so what is left is the guard. A stretch
    without it has neither its closures nor its callback.
    """

    def __init__(self, guard: AutoBatchSize, stretch: int) -> None:
        self.guard, self.stretch = guard, stretch
        self.steps: list[tuple[int, bool, float, float]] = []
        self.began: tuple[int, bool, float, float] | None = None
        self.guarded: Any = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, step: int
    ) -> None:
        if self.began is not None:
            index, on, processor, wall = self.began
            self.steps.append((index, on, time.thread_time() - processor, time.perf_counter() - wall))
        stretch = trainer.global_step // self.stretch
        self._set(trainer, on=stretch % 2 == 1)
        self.began = (stretch, self.on, time.thread_time(), time.perf_counter())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._set(trainer, on=True)

    def _set(self, trainer: Trainer, *, on: bool) -> None:
        own = vars(trainer.fit_loop.epoch_loop.automatic_optimization)
        if self.guarded is None:
            self.guarded = own["_make_closure"]
        self.on = on
        own.pop("_make_closure", None)
        if on:
            own["_make_closure"] = self.guarded
        trainer.callbacks = [self, self.guard] if on else [self]

    def medians(self, on: bool, which: int) -> list[float]:
        """Median step of each stretch with or without the guard, without the first two of each kind [s]."""
        stretches: dict[int, list[float]] = {}
        for step in self.steps:
            if step[1] is on:
                stretches.setdefault(step[0], []).append(step[which])
        return [statistics.median(times) for times in list(stretches.values())[2:]]


def step_cost(stretches: int, stretch: int = 10) -> dict[str, dict[str, list[float]]]:
    """Steps with and without the guard [s], by processor and by the wall, in pairs of neighbouring stretches."""
    guard = AutoBatchSize("off", on_oom="split")
    turns = Turns(guard, stretch)
    # The guard comes first: it is what the callback that takes turns finds in place.
    fit(Walled(wall=10**9, width=1024, batch_size=64), guard, turns, steps=2 * stretches * stretch + 1)
    return {
        kind: {"without": turns.medians(False, which), "on_oom=split": turns.medians(True, which)}
        for kind, which in (("processor", 2), ("wall", 3))
    }


REAL_SEARCHES: dict[str, Callable[[], Any]] = {
    PEER: lambda: ClockedFinder(mode="binsearch", max_trials=40),
    "Lightning power": lambda: ClockedFinder(mode="power", max_trials=40),
    "AutoBatchSize model": lambda: Clocked("model", max_val=10**6),
    "AutoBatchSize binsearch": lambda: Clocked("binsearch", max_val=10**6),
}


def real_search(name: str, room: int) -> list[str]:
    """Search with so much memory, in a process of its own: trials, seconds, size, whether a step with it fits."""
    quiet()
    module, callback = Walled(wall=10**9, width=1024), REAL_SEARCHES[name]()
    module.loader_ = TensorDataset(torch.randn(1, 1024).expand(10**6, 1024))
    if chosen_device() == "cuda":
        torch.cuda.init()
        leave_memory(room)
    else:
        in_use = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (in_use + room, -1))
    trains = "yes"
    try:
        fit(module, callback)
    except RuntimeError as error:
        trains = f"no: {type(error).__name__}"
    ours = isinstance(callback, AutoBatchSize) and callback.result is not None
    trials = len(callback.result.trials) if ours else len(callback.tried)
    return [str(trials), f"{callback.seconds:.2f}", str(module.batch_size), trains]


def real_searches(room: int) -> Table:
    """The searches where memory really runs out."""
    rows = []
    for name in REAL_SEARCHES:
        (found,) = run_ranks(1, real_search, name, room, backend=None, timeout=120)
        rows.append([name, *found])
    title = f"search with {room / 2**30:g} GiB of real memory, {chosen_device()}"
    return Table(title, ["search", "trials", "seconds", "size found", "the step after it fits"], rows)


def quiet() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)


def run(quick: bool) -> Report:
    quiet()
    if chosen_device() == "cuda":
        table = real_searches(2 * 2**30)
        return Report("Search for a batch size where memory runs out", [table])
    found: dict[str, str] = {}
    variants = {
        PEER: finder(found, PEER, lambda: ClockedFinder(mode="binsearch")),
        "Lightning power": finder(found, "Lightning power", lambda: ClockedFinder(mode="power")),
        "AutoBatchSize model": finder(
            found, "AutoBatchSize model", lambda: Clocked("model", **LARGEST), read=True
        ),
        "AutoBatchSize binsearch": finder(
            found, "AutoBatchSize binsearch", lambda: Clocked("binsearch", **LARGEST)
        ),
        "AutoBatchSize power": finder(found, "AutoBatchSize power", lambda: Clocked("power", **LARGEST)),
        "Accelerate from 1024": accelerate_from(found, 1024),
        "Accelerate from 16384": accelerate_from(found, 16384),
    }
    searches = interleave(variants, rounds=1 if quick else 2)
    cost = step_cost(stretches=6 if quick else 60)
    goals = {"AutoBatchSize model": 0.5, "AutoBatchSize binsearch": 0.5}
    return Report(
        title="Search for a batch size, and the cost of a guarded step",
        tables=[
            Comparison(f"time of a search, simulated wall at {WALL}", searches, peer=PEER, at_most=goals),
            *(
                Comparison(
                    f"step of a fit in which nothing runs out, {kind} time",
                    samples,
                    peer="without",
                    at_most={"on_oom=split": 1.01},
                )
                for kind, samples in cost.items()
            ),
        ],
        notes=[
            *(f"{name}: {text}." for name, text in found.items()),
            "A search is timed inside its callback, so the Trainer's own start is in none of them. Accelerate's"
            " decorator restarts a bare function: no Trainer, no loader, no state to keep, no margin.",
            "Memory readings of mode model are simulated too: 1 GB + 3.7 MB a sample.",
            "The step: 2.1 M parameters, batch 64, one thread, one process. The guard is taken out and put back every"
            " 10 steps of one fit; each sample is the median step of such a stretch, paired with its neighbour.",
        ],
    )
