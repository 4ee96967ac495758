"""What watching for nan and inf costs a training step: ours, and Transformers' detector."""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks._fit import BARE, t5
from benchmarks.engine import Comparison, Report, Samples
from lightning_lockstep import OverflowDetector
from tests.harness import chosen_device, on_device, wait_for_device

NONE, REPLAY, HOOKS, OTHER = "none", "replay", "hooks", "Transformers' detector"


@dataclass(frozen=True)
class Workload:
    """A model, its batch, its optimizer and how long to measure."""

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    goals: Mapping[str, float]
    threads: int  # of torch
    stretch: int  # steps of one way of watching that are timed in a row, after one that is not
    cycles: int  # how often all ways take their turn
    slow_cycles: int  # and those of the slow one beside them


def linears() -> nn.Module:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(100)])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


WORKLOADS = [
    Workload(
        "T5 9.4 M, batch 8 x 64, AdamW, 2 threads",
        t5,
        lambda: torch.randint(0, 8000, (8, 64)),
        torch.optim.AdamW,
        {REPLAY: 1.01, HOOKS: 1.03},
        threads=2,
        stretch=2,
        cycles=16,
        slow_cycles=3,
    ),
    Workload(
        "100 linear layers of 64, batch 32, SGD, 1 thread",
        linears,
        lambda: torch.randn(32, 64),
        sgd,
        {REPLAY: 1.03, HOOKS: 1.13},
        threads=1,
        stretch=15,
        cycles=90,
        slow_cycles=8,
    ),
]


class Task(LightningModule):
    """The workload's model and optimizer."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.net, self.workload = workload.build(), workload
        self.language = not isinstance(self.net, nn.Sequential)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.language:
            return self.net(input_ids=batch, labels=batch).loss
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return self.workload.optimizer(self.parameters())


class Turns(Callback):
    """Has the ways of watching take turns within one fit, and times their steps."""

    # Model, optimizer, memory and process are the same for all; only the callbacks and hooks change. A step
    # is timed from the end of one batch to the end of the next. The first step of each turn is not counted.
    # On a GPU, where a step goes on behind the host, the mean of a turn counts, from when the card has
    # nothing left to do to when it has again nothing left.

    def __init__(self, workload: Workload, kinds: list[str], cycles: int) -> None:
        self.samples: Samples = {kind: [] for kind in kinds}
        self._stretch = workload.stretch
        self._order = [kind for n in range(-1, cycles) for kind in kinds[n % len(kinds) :] + kinds[: n % len(kinds)]]
        self._warmup = len(kinds)
        self._turn = -1
        self._ends: list[float] = []
        self._watching = ExitStack()

    @property
    def steps(self) -> int:
        """Steps that the fit takes."""
        return 1 + len(self._order) * (self._stretch + 1)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if len(self._ends) in (1, self._stretch + 1):
            wait_for_device()
        self._ends.append(time.perf_counter())
        if self._turn >= 0 and len(self._ends) < self._stretch + 2:
            return
        if self._turn >= self._warmup:
            steps = [b - a for a, b in zip(self._ends[1:], self._ends[2:], strict=False)]
            middle = statistics.median if chosen_device() == "cpu" else statistics.fmean
            self.samples[self._order[self._turn]].append(middle(steps))
        self._watching.close()
        self._turn += 1
        if self._turn < len(self._order):
            self._watching.enter_context(watching(self._order[self._turn], trainer, pl_module, self))
        self._ends = [time.perf_counter()]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watching.close()


@contextmanager
def watching(kind: str, trainer: Any, module: Any, clock: Callback) -> Iterator[None]:
    """Watch in one way for as long as the context lasts; the detector's own hooks begin and end it."""
    if kind in (REPLAY, HOOKS):
        detector = OverflowDetector(mode=kind)  # type: ignore[arg-type]
        detector.setup(trainer, module, "fit")
        detector.on_train_start(trainer, module)
        trainer.callbacks = [detector, clock]
        yield
        trainer.callbacks = [clock]
        detector.on_train_end(trainer, module)
    elif kind == OTHER:
        from transformers.debug_utils import DebugUnderflowOverflow

        other = DebugUnderflowOverflow(module.net)
        yield
        for each in module.modules():
            each._forward_hooks.clear()
        del other
    else:
        yield


def fit(workload: Workload, kinds: list[str], cycles: int) -> Samples:
    """Fit once with all kinds in turn; the median step of each turn [s]."""
    torch.manual_seed(0)
    torch.set_num_threads(workload.threads)
    turns = Turns(workload, kinds, cycles)
    trainer = Trainer(**on_device(1), max_epochs=1, **BARE, callbacks=[turns])
    batch = workload.batch()
    with redirect_stdout(None):
        trainer.fit(Task(workload), DataLoader([batch] * turns.steps, batch_size=None))  # type: ignore[arg-type]
    return turns.samples


def run(quick: bool) -> Report:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    threads = torch.get_num_threads()
    tables = []
    for workload in WORKLOADS:
        title, less = workload.title, 5 if chosen_device() == "cuda" else 10
        cycles = max(2, workload.cycles // less) if quick else workload.cycles
        samples = fit(workload, [NONE, REPLAY, HOOKS], cycles)
        tables.append(Comparison(title, samples, peer=NONE, at_most=workload.goals))
        samples = fit(workload, [NONE, OTHER], 2 if quick else workload.slow_cycles)
        tables.append(Comparison(f"{title}: what there was", samples, peer=NONE))
        print(f"{title}: measured", flush=True)
    torch.set_num_threads(threads)
    return Report(
        "What watching for nan and inf costs a training step",
        tables,
        [
            "One `Trainer.fit` per table. The ways of watching take turns of a few steps within it, so that model,"
            " optimizer and memory are the same for all; each sample is the median step of a turn.",
            "`Transformers' detector` is `transformers.debug_utils.DebugUnderflowOverflow`.",
        ],
    )
