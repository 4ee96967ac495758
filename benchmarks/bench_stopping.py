"""Time added to a 10 ms step by asking all ranks at every step whether to stop, 2 ranks."""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.engine import Comparison, Report, Samples
from tests.helpers import run_ranks

PEER = "nothing"
OURS = "ours: check_every_n_steps=1"
AGREEMENT = "ours: StopTogether, nobody asks"
BARRIER = "reduce_boolean_decision (barrier, all-reduce)"
ASYNC = "async all-reduce, read a step later"
POLL = "poll of the store"
STEP = 0.010


class Variants:
    """What each variant does at the end of a step."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        from lightning_lockstep.callbacks._step_watch import StepWatch
        from lightning_lockstep.distributed import current_communicator
        from lightning_lockstep.distributed.delayed_gather import DelayedGather
        from lightning_lockstep.distributed.step_agreement import StepAgreement

        self.torch, self.dist = torch, dist
        self.communicator = current_communicator()
        channel = self.communicator.side_channel
        self.watch = StepWatch(DelayedGather(channel, name="bench"), 1)
        self.agreement = StepAgreement(channel, name="bench")
        self.metric = torch.tensor(0.5)
        self.pending: Any = None
        self.step = 0
        store = dist.distributed_c10d._get_default_store()
        store.set("bench/flag", "0")
        self.store = store

    def nothing(self) -> None:
        pass

    def ours(self) -> None:
        self.step += 1
        self.watch.after_batch(self.step, lambda: (self.metric, []))

    def agreed(self) -> None:
        self.agreement.passed()

    def barrier(self) -> None:
        decision = self.torch.tensor(0)
        self.dist.barrier()
        self.dist.all_reduce(decision)
        bool(decision)

    def asynchronous(self) -> None:
        if self.pending is not None:
            bool(self.pending.wait())
        self.pending = self.communicator.all_reduce_async(self.torch.tensor(0, dtype=self.torch.int32), "max")

    def poll(self) -> None:
        self.store.get("bench/flag")


def busy(seconds: float) -> None:
    """Stands for a step: it sleeps, so neither the CPU nor the interpreter is in use meanwhile."""
    time.sleep(seconds)


def in_rank(rounds: int, steps: int) -> Samples:
    variants = Variants()
    ends = {
        PEER: variants.nothing,
        OURS: variants.ours,
        AGREEMENT: variants.agreed,
        BARRIER: variants.barrier,
        ASYNC: variants.asynchronous,
        POLL: variants.poll,
    }
    samples: Samples = {name: [] for name in ends}
    gradients = variants.torch.zeros(1000)
    names = list(ends)
    for number in range(-1, rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            variants.dist.barrier()
            spent = []
            for _ in range(steps):
                began = time.perf_counter()
                busy(STEP)
                variants.dist.all_reduce(gradients)  # as DDP does: the ranks meet once a step
                ends[name]()
                spent.append(time.perf_counter() - began)
            if name == OURS:
                variants.watch.drain()
            if number >= 0:
                samples[name].append(statistics.median(spent))
    return samples


def run(quick: bool) -> Report:
    rounds, steps = (2, 40) if quick else (12, 100)
    results = run_ranks(2, in_rank, rounds, steps, timeout=280, env={"OMP_NUM_THREADS": "1"})
    samples = {
        name: [max(result[name][i] for result in results) for i in range(rounds)] for name in results[0]
    }
    table = Comparison(
        "A step of 10 ms with one all-reduce of 4 kB, 2 ranks",
        samples,
        peer=PEER,
        at_most={OURS: 0.1, AGREEMENT: 0.1},
        by="difference",
    )
    notes = [
        "Each sample is the median step of a stretch of steps on the slower rank; the variants take turns.",
        "The parts are measured without a Trainer: a step sleeps, reading the metric from trainer.callback_metrics is"
        " not in it, and Lightning's reduce_boolean_decision is played by its barrier and all-reduce.",
    ]
    return Report("What it costs to ask every step whether to stop", [table], notes)
