"""Time added to a step of 10 ms by asking all ranks at every step whether to stop, in real fits on 2 ranks."""

from __future__ import annotations

import itertools
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from benchmarks._fit import BARE
from benchmarks.engine import Comparison, Report, Samples
from tests.helpers import run_ranks

PEER = "nothing"
OURS = "SyncedEarlyStopping(check_every_n_steps=1)"
TOGETHER = "StopTogether, nobody asks"
LIGHTNING = "Lightning's reduce_boolean_decision"
ASYNC = "async all-reduce, read a step later"
POLL = "poll of the store"
VARIANTS = (PEER, OURS, TOGETHER, LIGHTNING, ASYNC, POLL)

STEP = 0.010
STRETCH = 6
GOAL = 0.1
Measured = dict[str, Samples]


class Net(pl.LightningModule):
    """A layer for DDP to reduce, and a step that takes its time: computing, or waiting as for a device."""

    def __init__(self, step: Callable[[], None]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 32)
        self.take_time = step

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        self.take_time()
        loss = self.layer(batch).square().mean()
        self.log("now", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Turns(pl.Callback):
    """Lets one variant after the other act at the ends of the steps of a stretch, and notes what they take."""

    def __init__(self, rounds: int) -> None:
        self.order: Iterator[str] = itertools.chain.from_iterable(
            VARIANTS[number % len(VARIANTS) :] + VARIANTS[: number % len(VARIANTS)]
            for number in range(rounds + 1)  # the first round warms up
        )
        self.acts: dict[str, Callable[..., None]] = {PEER: lambda *_: None}
        self.measured: Measured = {what: {name: [] for name in VARIANTS} for what in ("step", "hook", "cpu")}
        self.now, self.left = "", 0
        self.hooks: list[float] = []
        self.marks: list[tuple[float, float]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.marks.append((time.perf_counter(), time.process_time()))
        if self.left == 0:
            self._end_stretch()
            self.now, self.left = next(self.order, PEER), STRETCH
            torch.distributed.barrier()
            self.hooks, self.marks = [], [(time.perf_counter(), time.process_time())]

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.left -= 1
        began = time.perf_counter()
        self.acts[self.now](*arguments)
        self.hooks.append(time.perf_counter() - began)

    def _end_stretch(self) -> None:
        if not self.now:
            return
        steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(self.marks)]
        # The first step of a stretch has nothing to read yet.
        self.measured["step"][self.now].append(statistics.median(wall for wall, _ in steps[1:]))
        self.measured["cpu"][self.now].append(statistics.fmean(cpu for _, cpu in steps[1:]))
        self.measured["hook"][self.now].append(statistics.median(self.hooks[1:]))


def peers(trainer: pl.Trainer) -> dict[str, Callable[..., None]]:
    """What others do to let all ranks know at every step."""
    import torch.distributed as dist

    from lightning_lockstep.distributed import current_communicator

    communicator = current_communicator()
    store = dist.distributed_c10d._get_default_store()
    store.set("bench/flag", "0")
    pending: list[Any] = []

    def asynchronous(*_: Any) -> None:
        if pending:
            bool(pending.pop().wait())
        pending.append(communicator.all_reduce_async(torch.tensor(0, dtype=torch.int32), "max"))

    return {
        LIGHTNING: lambda *_: bool(trainer.strategy.reduce_boolean_decision(False, all=False)),
        ASYNC: asynchronous,
        POLL: lambda *_: bool(store.get("bench/flag")),
    }


def computing() -> Callable[[], None]:
    """Return a step that keeps one core busy; the same work on every rank, about STEP long."""
    import torch.distributed as dist

    left, out = torch.randn(160, 160), torch.empty(160, 160)

    def work(times: int) -> None:
        with torch.no_grad():
            for _ in range(times):
                torch.mm(left, left, out=out)

    work(200)
    began = time.perf_counter()
    work(500)
    times = torch.tensor(STEP / (time.perf_counter() - began) * 500)
    dist.all_reduce(times, dist.ReduceOp.MIN)
    return lambda: work(int(times))


class _Prepare(pl.Callback):
    """Connects the variants once there is a process group."""

    def __init__(self, turns: Turns, computes: bool) -> None:
        self.turns, self.computes = turns, computes

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.turns.acts.update(peers(trainer))
        pl_module.take_time = computing() if self.computes else lambda: time.sleep(STEP)


def in_rank(rounds: int, computes: bool) -> Measured:
    """Fit on this rank; every rank runs this."""
    from lightning_lockstep import StopTogether, SyncedEarlyStopping

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    turns = Turns(rounds)
    ours: dict[str, Any] = {
        OURS: SyncedEarlyStopping("now", check_every_n_steps=1, patience=10**9),
        TOGETHER: StopTogether(),
    }
    for name, callback in ours.items():
        turns.acts[name] = callback.on_train_batch_end
        callback.on_train_batch_end = lambda *_: None  # from now on only when it is its turn
    steps = (rounds + 1) * len(VARIANTS) * STRETCH + 1
    data = [torch.randn(8, 32)] * steps
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        use_distributed_sampler=False,
        **BARE,
        callbacks=[_Prepare(turns, computes), turns, *ours.values()],
    )
    trainer.fit(Net(lambda: None), torch.utils.data.DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return {
        what: {name: values[1:] for name, values in samples.items()}
        for what, samples in turns.measured.items()
    }


def of_both(results: list[Measured], what: str, take: Callable[[list[float]], float]) -> Samples:
    """One number a stretch from those of the ranks."""
    return {
        name: [take(list(values)) for values in zip(*(r[what][name] for r in results), strict=True)]
        for name in VARIANTS
    }


def run(quick: bool) -> Report:
    rounds = 3 if quick else 200
    tables = []
    goals = {OURS: GOAL, TOGETHER: GOAL}
    for computes, step in (
        (True, "that computes, 1 thread a rank: both cores are busy"),
        (False, "that waits, as for a device: the cores are free"),
    ):
        env = {"OMP_NUM_THREADS": "1"}
        results = run_ranks(2, in_rank, rounds, computes, backend=None, timeout=280, env=env)
        for what, take, title in (
            ("step", statistics.fmean, f"A step of 10 ms {step}"),
            ("hook", max, "Of that inside the hook, on the slower rank"),
            ("cpu", statistics.fmean, "CPU time of a rank a step, all its threads"),
        ):
            table = Comparison(
                title,
                of_both(results, what, take),
                peer=PEER,
                at_most=goals if what != "cpu" else {},
                by="difference",
            )
            tables.append(table)
    notes = [
        "One `Trainer.fit` with Lightning's `ddp` on 2 ranks for each kind of step; every step logs a metric and"
        f" reduces gradients. The variants take turns in stretches of {STRETCH} steps within that fit.",
        "A sample of the step is the median of a stretch, the mean of both ranks. What is compared are stretches of"
        " the same round; their differences vary by more than the goal, so the time inside the hook is given as well.",
        "`async` and `poll` are only what it takes to learn of a request: a poll alone does not make ranks stop at the"
        " same step.",
    ]
    return Report("What it costs to ask every step whether to stop", tables, notes)
