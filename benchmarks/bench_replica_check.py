"""ReplicaCheck on a T5: one check and one audit over a step, and what checks every 100 steps make of it."""

from __future__ import annotations

import logging
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks._fit import BARE, t5
from benchmarks.engine import Comparison, Report
from lightning_lockstep import LockstepDDPStrategy, ReplicaCheck
from tests.harness import on_device, run_ranks

NONE, WITH = "none", "every 100 steps"
STEP, CHECK, AUDIT = "a step", "a check of it, with Adam's state", "an audit"
MODEL = "T5 9.4 M, batch 8 x 64"
WARMUP = 5
NEVER = 10**6


class Task(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = t5()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Times(Callback):
    """Times each step, and after it a check and an audit by themselves."""

    def __init__(self, check: ReplicaCheck) -> None:
        self.check, self.began = check, 0.0
        self.samples: dict[str, list[float]] = {STEP: [], CHECK: [], AUDIT: []}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx < WARMUP:
            return
        self.samples[STEP].append(time.perf_counter() - self.began)
        checks, audit = self.check._checks, self.check._audit
        assert checks is not None and audit is not None
        dist.barrier()
        began = time.perf_counter()
        checks.check()
        checks._send(checks._pending.popleft())
        self.samples[CHECK].append(time.perf_counter() - began)
        dist.barrier()
        began = time.perf_counter()
        audit.run(batch, batch_idx, checks.weights_checksum())
        self.samples[AUDIT].append(time.perf_counter() - began)
        assert not audit.stopped  # it has not given up


def in_rank(rounds: int) -> dict[str, list[float]]:
    """Train on this rank; every rank runs this."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    check = ReplicaCheck(every_n_steps=10, audit_every_n_steps=NEVER)
    times = Times(check)
    trainer = Trainer(
        **on_device(2),
        strategy=LockstepDDPStrategy(threads_per_rank=1),
        max_steps=rounds + WARMUP,
        use_distributed_sampler=False,
        **BARE,
        callbacks=[check, times],
    )
    model = Task()
    torch.manual_seed(dist.get_rank())
    some = [torch.randint(0, 8000, (8, 64)) for _ in range(16)]
    batches = [some[step % len(some)] for step in range(rounds + WARMUP)]
    trainer.fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return times.samples


def run(quick: bool) -> Report:
    samples = run_ranks(2, in_rank, 5 if quick else 30, backend="gloo", timeout=900)[0]
    worked_out = {
        NONE: samples[STEP],
        WITH: [step + check / 100 for step, check in zip(samples[STEP], samples[CHECK], strict=True)],
    }
    check, audit = ({key: samples[key] for key in (STEP, other)} for other in (CHECK, AUDIT))
    tables = [
        Comparison(f"one check, {MODEL}", check, peer=STEP, at_most={CHECK: 0.1}),
        Comparison(f"one audit, {MODEL}", audit, peer=STEP),
        Comparison(
            f"step, {MODEL}, worked out: a hundredth of a check more",
            worked_out,
            peer=NONE,
            at_most={WITH: 1.005},
        ),
    ]
    notes = [
        "A check is all that a rank does for it but gradients: checksums of parameters and Adam's state, the message.",
        "An audit is all that it adds to a step: the checksum of the weights, the way of a batch to the next rank, the"
        " passes of two micro-batches forward and backward, a gather.",
    ]
    return Report("What ReplicaCheck costs, 2 ranks", tables, notes)
