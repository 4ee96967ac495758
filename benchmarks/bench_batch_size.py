"""AutoBatchSize beside Lightning's finder, by simulated and by real memory; the cost of a step with on_oom="split"."""

from __future__ import annotations

import contextlib
import io
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._fit import BARE
from benchmarks.engine import Comparison, Report, Table, interleave
from lightning_lockstep import AutoBatchSize
from tests.harness import chosen_device, leave_memory, on_device, run_ranks

WALL = 600
FULL = "CUDA out of memory. Tried to allocate 20.00 MiB"
PEER = "Lightning binsearch"
REAL_MODELS = ("ResNet-50", "GPT-2")
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


def finder(found: dict[str, str], name: str, make: Callable[[], Any]) -> Callable[[], float]:
    """One search; notes (trials, largest size that fitted, size after the margin) under ``name``."""

    def measure() -> float:
        module, callback = Walled(), make()
        fit(module, callback)
        if isinstance(callback, AutoBatchSize):
            trials, largest = len(callback.result.trials), callback.result.largest
        else:
            trials, largest = len(callback.tried), max(size for size in callback.tried if size <= WALL)
        share = f"{largest} ({largest / WALL:.1%} of the wall)"
        found[name] = f"{trials} trials, largest run {share}, answer {module.batch_size}"
        return float(callback.seconds)

    return measure


class Turns(Callback):
    """Times the steps of one fit in which the guard is there for a stretch, then away for one, and so on."""

    # With and without it share process, weights, memory and the moment, so what is left is the guard. A
    # stretch without it has neither its closures nor its callback.

    def __init__(self, guard: AutoBatchSize, stretch: int) -> None:
        self.guard, self.stretch = guard, stretch
        self.steps: list[tuple[int, bool, float]] = []
        self.began: tuple[int, bool, float] | None = None
        self.guarded: Any = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, step: int) -> None:
        if self.began is not None:
            index, on, began = self.began
            self.steps.append((index, on, time.perf_counter() - began))
        stretch = trainer.global_step // self.stretch
        self._set(trainer, on=stretch % 2 == 1)
        self.began = (stretch, self.on, time.perf_counter())

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

    def medians(self, on: bool) -> list[float]:
        """Median step of each stretch with or without the guard, without the first two of each kind [s]."""
        stretches: dict[int, list[float]] = {}
        for step in self.steps:
            if step[1] is on:
                stretches.setdefault(step[0], []).append(step[2])
        return [statistics.median(times) for times in list(stretches.values())[2:]]


def step_cost(stretches: int, stretch: int = 10) -> dict[str, list[float]]:
    """Steps with and without the guard [s], in pairs of neighbouring stretches."""
    guard = AutoBatchSize("off", on_oom="split")
    turns = Turns(guard, stretch)
    # The guard comes first: it is what the callback that takes turns finds in place.
    fit(Walled(wall=10**9, width=1024, batch_size=64), guard, turns, steps=2 * stretches * stretch + 1)
    return {"without": turns.medians(False), "on_oom=split": turns.medians(True)}


class RealModel(Walled):
    """ResNet-50, or a GPT-2 of 124 M parameters at 256 tokens, of Transformers; nothing is downloaded."""

    def __init__(self, kind: str) -> None:
        super().__init__(wall=10**9)
        import transformers

        labels, count = torch.zeros(1, dtype=torch.long), 10**5
        if kind == "ResNet-50":
            self.net = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000))
            inputs = torch.randn(1, 3, 224, 224)
        else:
            self.net = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=256, use_cache=False))
            inputs = labels = torch.zeros(1, 256, dtype=torch.long)
        self.loader_ = TensorDataset(*(one.expand(count, *(-1 for _ in one.shape[1:])) for one in (inputs, labels)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.tried = list(dict.fromkeys([*self.tried, len(batch[0])]))
        return self.net(batch[0], labels=batch[1]).loss


def fits_alone(kind: str, room: int, size: int) -> bool:
    """Whether two steps of a size fit into this process."""
    quiet()
    module = RealModel(kind)
    module.batch_size = size
    torch.cuda.init()
    leave_memory(room)
    try:
        fit(module, steps=2)
    except torch.OutOfMemoryError:
        return False
    return True


def on_a_real_model(kind: str, room: int) -> list[list[str]]:
    """Both searches for a real model, and the largest size that a process trains which does not search [within 1 %]."""
    rows, answer = [], 0
    for name in (PEER, "AutoBatchSize"):
        (found,) = run_ranks(1, real_search, name, room, kind, backend=None, timeout=120)
        rows.append([kind, name, *found])
        answer = int(found[2])
    fits, fails = answer, 0
    step = max(1, answer // 100)
    while not fails or fails - fits > step:
        size = fits + max(step, (fails - fits) // 2 if fails else answer // 16)
        if run_ranks(1, fits_alone, kind, room, size, backend=None, timeout=60)[0]:
            fits = size
        else:
            fails = size
    return [*rows, [kind, "the true limit", "", "", str(fits), "yes"]]


REAL_SEARCHES: dict[str, Callable[[], Any]] = {
    PEER: lambda: ClockedFinder(mode="binsearch", max_trials=40),
    "Lightning power": lambda: ClockedFinder(mode="power", max_trials=40),
    "AutoBatchSize": lambda: Clocked(max_val=10**6),
}


def real_search(name: str, room: int, kind: str = "") -> list[str]:
    """Search on a GPU that has so much memory left: trials, seconds, size, whether a step with it fits."""
    quiet()
    module, callback = RealModel(kind) if kind else Walled(wall=10**9, width=1024), REAL_SEARCHES[name]()
    if not kind:
        module.loader_ = TensorDataset(torch.randn(1, 1024).expand(10**6, 1024))
    torch.cuda.init()
    leave_memory(room)
    trains = "yes"
    try:
        fit(module, callback)
    except RuntimeError as error:
        trains = f"no: {type(error).__name__}"
    ours = isinstance(callback, AutoBatchSize) and callback.result is not None
    trials = len(callback.result.trials) if ours else len(callback.tried)
    return [str(trials), f"{callback.seconds:.2f}", str(module.batch_size), trains]


def real_searches(room: int) -> Table:
    """The searches where memory really runs out, each in a process of its own."""
    rows = []
    for name in REAL_SEARCHES:
        (found,) = run_ranks(1, real_search, name, room, backend=None, timeout=120)
        rows.append([name, *found])
    title = f"search with {room / 2**30:g} GiB of real memory, cuda"
    return Table(title, ["search", "trials", "seconds", "size found", "the step after it fits"], rows)


def quiet() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)


def run(quick: bool) -> Report:
    quiet()
    if chosen_device() == "cuda":
        rows = [row for kind in REAL_MODELS for row in on_a_real_model(kind, 16 * 2**30)]
        columns = ["model", "search", "trials", "seconds", "size found", "the step after it fits"]
        of_models = Table("real models with 16 GiB, cuda", columns, rows)
        return Report("Search for a batch size where memory runs out", [real_searches(2 * 2**30), of_models])
    found: dict[str, str] = {}
    variants = {
        PEER: finder(found, PEER, lambda: ClockedFinder(mode="binsearch")),
        "Lightning power": finder(found, "Lightning power", lambda: ClockedFinder(mode="power")),
        "AutoBatchSize": finder(found, "AutoBatchSize", lambda: Clocked(**LARGEST)),
    }
    searches = interleave(variants, rounds=1 if quick else 2)
    title, goal = f"time of a search, simulated wall at {WALL}", {"AutoBatchSize": 0.5}
    tables = [Comparison(title, searches, peer=PEER, at_most=goal)]
    title, cost = (
        "step of a fit in which nothing runs out, wall time",
        step_cost(stretches=6 if quick else 60),
    )
    tables.append(Comparison(title, cost, peer="without", at_most={"on_oom=split": 1.01}))
    notes = [
        *(f"{name}: {text}." for name, text in found.items()),
        "A search is timed inside its callback, so the Trainer's own start is in none of them.",
        "The step: 2.1 M parameters, batch 64, one thread, one process. The guard is taken out and put back every"
        " 10 steps of one fit; each sample is the median step of such a stretch, paired with its neighbour.",
    ]
    return Report("Search for a batch size, and the cost of a guarded step", tables, notes)
