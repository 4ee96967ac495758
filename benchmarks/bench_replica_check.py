"""ReplicaCheck: a step with it over none; one check against a step, and against hashes of each parameter; memory."""

from __future__ import annotations

import hashlib
import itertools
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks._fit import BARE
from benchmarks.engine import Comparison, Report, Table
from tests.helpers import on_device, run_ranks

NONE, WITH = "none", "every 100 steps"
STEP, CHECK = "a step", "a check of it, with Adam's state"
AUDIT = "an audit"
SHA, OURS = "SHA-1 of each parameter, gathered", "checksums, to rank 0"


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=8000, decoder_start_token_id=0, **sizes))


def linears() -> nn.Module:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(100)])


SMALL = "100 linear layers of 64, batch 32"
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "T5 9.4 M, batch 8 x 64": (t5, lambda: torch.randint(0, 8000, (8, 64))),
    SMALL: (linears, lambda: torch.randn(32, 64)),
}


class Task(LightningModule):
    """A model of the table with AdamW."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.net = MODELS[name][0]()
        self.language = not isinstance(self.net, nn.Sequential)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.language:
            return self.net(input_ids=batch, labels=batch).loss
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Turns(Callback):
    """Times every batch, and has the check take part in every other stretch of 100 of them."""

    def __init__(self, check: Any, stretch: int) -> None:
        self.check, self.stretch, self.ends = check, stretch, [0.0]
        self.done = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.ends.append(time.perf_counter())
        self.done += 1
        if self.done % self.stretch == 0:
            # Another list: Lightning goes over this one just now.
            others = [callback for callback in trainer.callbacks if callback is not self.check]
            is_in = len(others) < len(trainer.callbacks)
            trainer.callbacks = others if is_in else [self.check, *others]

    def seconds(self) -> tuple[list[float], list[float]]:
        """Return the mean step of each stretch without the check, and of each with it, in which it comes once."""
        times = [after - before for before, after in itertools.pairwise(self.ends[1:])]
        stretches = [
            statistics.fmean(times[start : start + self.stretch - 1])
            for start in range(self.stretch, len(times) - self.stretch + 2, self.stretch)
        ]
        pairs = len(stretches) // 2
        return stretches[0::2][:pairs], stretches[1::2][:pairs]


def trainer(strategy: Any, callbacks: list[Any], steps: int) -> Trainer:
    return Trainer(
        **on_device(2),
        strategy=strategy,
        max_steps=steps,
        use_distributed_sampler=False,
        **BARE,
        callbacks=callbacks,
    )


def quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.manual_seed(1)


def batches(name: str, steps: int) -> DataLoader[Any]:
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    some = [MODELS[name][1]() for _ in range(16)]
    return DataLoader([some[step % len(some)] for step in range(steps)], batch_size=None)  # type: ignore[arg-type]


def steps_in_turn(name: str, stretch: int, cycles: int) -> tuple[list[float], list[float]]:
    """Train on this rank; stretches with the check and without take turns in one fit."""
    from lightning_lockstep import LockstepDDPStrategy, ReplicaCheck

    quiet()
    check = ReplicaCheck(every_n_steps=100)
    turns = Turns(check, stretch)
    steps = stretch * (2 * cycles + 2)
    trainer(LockstepDDPStrategy(threads_per_rank=1), [check, turns], steps).fit(
        Task(name), batches(name, steps)
    )
    return turns.seconds()


def one_check(name: str, rounds: int) -> dict[str, list[float]]:
    """Train on this rank, then time a step, all that a check or an audit adds to it, and hashes of parameters."""
    import torch.distributed as dist

    from lightning_lockstep import LockstepDDPStrategy, ReplicaCheck

    quiet()
    check = ReplicaCheck(every_n_steps=10, audit_every_n_steps=10**6)
    samples: dict[str, list[float]] = {STEP: [], CHECK: [], AUDIT: [], SHA: [], OURS: []}

    class Times(Callback):
        """Times the check by itself, with all that it does in the batch on which it falls."""

        began = 0.0

        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.began = time.perf_counter()

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx < 5:
                return
            samples[STEP].append(time.perf_counter() - self.began)
            run = check._run
            assert run is not None
            dist.barrier()
            began = time.perf_counter()
            run._check()
            run._checks._send(run._checks._pending.popleft())
            samples[CHECK].append(time.perf_counter() - began)
            run._audit_every = run._count + 1
            dist.barrier()
            began = time.perf_counter()
            run.audit(batch, batch_idx)
            samples[AUDIT].append(time.perf_counter() - began)
            assert run._audit is not None  # it has not given up
            run._audit_every = 10**6
            only = run._contents._optimizer_state
            run._contents._optimizer_state = False
            dist.barrier()
            began = time.perf_counter()
            run._check()
            run._checks._send(run._checks._pending.popleft())
            samples[OURS].append(time.perf_counter() - began)
            run._contents._optimizer_state = only
            dist.barrier()
            began = time.perf_counter()
            digests = [
                hashlib.sha1(parameter.detach().cpu().numpy().tobytes()).digest()
                for parameter in pl_module.parameters()
            ]
            everyone: list[Any] = [None, None]
            dist.all_gather_object(everyone, digests)
            assert everyone[0] == everyone[1]
            samples[SHA].append(time.perf_counter() - began)

    steps = rounds + 5
    fitted = trainer(LockstepDDPStrategy(threads_per_rank=1), [check, Times()], steps)
    fitted.fit(Task(name), batches(name, steps))
    return samples


def memory(name: str) -> int:
    """Return the most memory that torch held during a check beyond what it held before [bytes]."""
    from torch.profiler import ProfilerActivity, profile

    from lightning_lockstep.replicas.checksums import Checksums

    quiet()
    task = Task(name)
    optimizer = task.configure_optimizers()
    task.training_step(MODELS[name][1](), 0).backward()
    optimizer.step()
    tensors = [*task.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        Checksums(tensors).numbers()
    held = most = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def run(quick: bool) -> Report:
    """Steps with and without in turn within a fit; a check, a step and the hashes in turn within another."""
    tables: list[Comparison | Table] = []
    name = SMALL
    print(f"steps: {name}", flush=True)
    without, with_it = run_ranks(
        2, steps_in_turn, name, 100, 1 if quick else 20, backend="gloo", timeout=900
    )[0]
    samples = {NONE: without, WITH: with_it}
    tables.append(Comparison(f"step, {name}, 2 ranks", samples, peer=NONE, at_most={WITH: 1.005}))
    for name in MODELS:
        print(f"checks: {name}", flush=True)
        samples = run_ranks(2, one_check, name, 5 if quick else 30, backend="gloo", timeout=900)[0]
        of_a_step = {key: samples[key] for key in (STEP, CHECK)}
        goal = {} if name == SMALL else {CHECK: 0.1}
        tables.append(Comparison(f"one check, {name}", of_a_step, peer=STEP, at_most=goal))
        of_a_step = {key: samples[key] for key in (STEP, AUDIT)}
        tables.append(Comparison(f"one audit, {name}", of_a_step, peer=STEP))
        worked_out = {
            NONE: samples[STEP],
            WITH: [step + check / 100 for step, check in zip(samples[STEP], samples[CHECK], strict=True)],
        }
        title = f"step, {name}, worked out: a hundredth of a check more"
        tables.append(Comparison(title, worked_out, peer=NONE, at_most={WITH: 1.005}))
        against = {key: samples[key] for key in (SHA, OURS)}
        goal = {} if name == SMALL else {OURS: 0.02}
        tables.append(Comparison(f"parameters alone, {name}", against, peer=SHA, at_most=goal))
    rows = [[name, f"{memory(name) / 1e6:.2f}", "<= 1"] for name in MODELS]
    tables.append(Table("memory of a check beyond the model's", ["model", "MB", "goal"], rows))
    notes = [
        "Steps with the check and without take turns in stretches of 100 within one fit; a sample is the mean step of a"
        " stretch, which has one check.",
        "A check is all that a rank does for it but gradients: checksums of parameters and Adam's state, the message."
        " The hashes are what NeMo's DdpParityChecker computes: SHA-1 of each parameter, gathered.",
        "An audit is all that it adds to a step: the checksum of the weights, the way of a batch to the next rank, the"
        " passes of two micro-batches forward and backward, a gather.",
        "On a CPU the checksums of a large model take as long as reading it from memory, so that 0.02 of the time of a"
        " hash is out of reach there; a GPU reads 100 times as fast, and the hashes are computed on the CPU.",
    ]
    return Report("What ReplicaCheck costs, 2 ranks", tables, notes)
