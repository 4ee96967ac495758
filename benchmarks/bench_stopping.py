"""Time that StopTogether takes at each step while nobody asks to stop, in real fits on 2 ranks."""

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

from benchmarks._fit import BARE, WIDTHS, Net
from benchmarks.engine import Comparison, Report, Samples
from tests.harness import run_ranks

PEER, TOGETHER, LIGHTNING = "nothing", "StopTogether, nobody asks", "Lightning's reduce_boolean_decision"
VARIANTS = (PEER, TOGETHER, LIGHTNING)
STRETCH = 6


class Turns(pl.Callback):
    """Lets one variant after the other act at the ends of the steps of a stretch, and notes what that takes."""

    def __init__(self, rounds: int, together: Callable[..., None]) -> None:
        self.order: Iterator[str] = itertools.chain.from_iterable(
            VARIANTS[number % len(VARIANTS) :] + VARIANTS[: number % len(VARIANTS)]
            for number in range(rounds + 1)  # the first round warms up
        )
        self.acts: dict[str, Callable[..., None]] = {PEER: lambda *_: None, TOGETHER: together}
        self.samples: Samples = {name: [] for name in VARIANTS}
        self.now = next(self.order)
        self.taken: list[float] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.acts[LIGHTNING] = lambda *_: trainer.strategy.reduce_boolean_decision(False, all=False)

    def on_train_batch_end(self, *arguments: Any) -> None:
        began = time.perf_counter()
        self.acts[self.now](*arguments)
        self.taken.append(time.perf_counter() - began)
        if len(self.taken) == STRETCH:
            self.samples[self.now].append(statistics.median(self.taken))
            self.now, self.taken = next(self.order, PEER), []


def in_rank(rounds: int) -> Samples:
    """Fit on this rank; every rank runs this."""
    from lightning_lockstep import StopTogether

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    together: Any = StopTogether()
    turns = Turns(rounds, together.on_train_batch_end)
    together.on_train_batch_end = lambda *_: None  # from now on only when it is its turn
    widths = WIDTHS["1 M"]
    data = [(torch.randn(8, widths[0]), torch.randn(8, widths[-1]))] * ((rounds + 1) * len(VARIANTS) * STRETCH)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        use_distributed_sampler=False,
        **BARE,
        callbacks=[turns, together],
    )
    trainer.fit(Net(widths), torch.utils.data.DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return {name: values[1:] for name, values in turns.samples.items()}


def run(quick: bool) -> Report:
    found = run_ranks(2, in_rank, 3 if quick else 200, backend=None, timeout=280, env={"OMP_NUM_THREADS": "1"})
    samples = {name: [max(pair) for pair in zip(*(of[name] for of in found), strict=True)] for name in VARIANTS}
    title = "Time inside the hook at the end of a step, on the slower rank"
    table = Comparison(title, samples, peer=PEER, at_most={TOGETHER: 0.1}, by="difference")
    notes = [
        "One `Trainer.fit` with Lightning's `ddp` on 2 ranks. The variants take turns in stretches of"
        f" {STRETCH} steps within it; a sample is the median of a stretch.",
    ]
    return Report("What it costs to ask every step whether to stop", [table], notes)
