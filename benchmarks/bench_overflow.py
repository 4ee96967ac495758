"""What watching for nan and inf costs a training step: ours, Transformers' detector, detect_anomaly."""

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

from benchmarks._fit import BARE
from benchmarks.engine import Comparison, Report, Samples
from lightning_lockstep import LockstepDDPStrategy, OverflowDetector
from tests.helpers import chosen_device, on_device, run_ranks, wait_for_device

NONE, REPLAY, HOOKS, OTHER, ANOMALY = "none", "replay", "hooks", "Transformers' detector", "detect_anomaly"
EMPTY = "empty hooks"


@dataclass(frozen=True)
class Workload:
    """One row of the issue's table: a model, its batch, its optimizer and how long to measure.

    ``threads`` are torch's; ``stretch`` the steps of one way of watching that are timed in a row, after one
    that is not; ``cycles`` how often all ways take their turn, and ``slow_cycles`` of the slow ones beside them
    (0 leaves these out). With ``ranks`` above 1, DDP trains it, one thread per rank.
    """

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    goals: Mapping[str, float]
    threads: int
    stretch: int
    cycles: int
    slow_cycles: int
    ranks: int = 1


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=8000, d_model=256, d_kv=64, d_ff=1024, num_layers=4, num_heads=4, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    return BertForMaskedLM(BertConfig(vocab_size=8000, **sizes))


def linears() -> nn.Module:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(100)])


def tokens() -> Tensor:
    return torch.randint(0, 8000, (8, 64))


def rows() -> Tensor:
    return torch.randn(32, 64)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


ADAMW = torch.optim.AdamW
WORKLOADS = [
    Workload("T5 9.4 M, batch 8 x 64, AdamW", t5, tokens, ADAMW, {REPLAY: 1.01, HOOKS: 1.03}, 2, 2, 16, 3),
    Workload(
        "BERT 5.4 M, batch 8 x 64, AdamW", bert, tokens, ADAMW, {REPLAY: 1.01, HOOKS: 1.03}, 2, 3, 22, 3
    ),
    Workload(
        "100 linear layers of 64, batch 32, AdamW",
        linears,
        rows,
        ADAMW,
        {REPLAY: 1.02, HOOKS: 1.07},
        1,
        10,
        80,
        8,
    ),
    Workload(
        "100 linear layers of 64, batch 32, SGD",
        linears,
        rows,
        sgd,
        {REPLAY: 1.03, HOOKS: 1.13},
        1,
        15,
        90,
        8,
    ),
    Workload(
        "100 linear layers of 64, batch 32 per rank, SGD, DDP on 2 ranks",
        linears,
        rows,
        sgd,
        {REPLAY: 1.03},
        1,
        15,
        60,
        0,
        ranks=2,
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
    """Has the ways of watching take turns within one fit, and times their steps.

    Model, optimizer, memory and process are the same for all; only the callbacks and hooks change. A step is
    timed from the end of one batch to the end of the next. The first step of each turn is not counted. On a GPU,
    where a step goes on behind the host, the mean of a turn counts, from when the card has nothing left to do to
    when it has again nothing left.
    """

    def __init__(self, workload: Workload, kinds: list[str], cycles: int) -> None:
        self.samples: Samples = {kind: [] for kind in kinds}
        self._stretch = workload.stretch
        self._order = [
            kind for n in range(-1, cycles) for kind in kinds[n % len(kinds) :] + kinds[: n % len(kinds)]
        ]
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
    elif kind == ANOMALY:
        with torch.autograd.set_detect_anomaly(True):
            yield
    else:
        if kind == OTHER:
            from transformers.debug_utils import DebugUnderflowOverflow

            other = DebugUnderflowOverflow(module.net)
        if kind == EMPTY:
            for each in module.modules():
                each.register_forward_hook(nothing)
        yield
        for each in module.modules():
            each._forward_hooks.clear()
        if kind == OTHER:
            del other


def nothing(module: nn.Module, args: Any, output: Any) -> None:
    """Do nothing."""


def measure(workload: Workload, kinds: list[str], cycles: int) -> Samples:
    """Fit once with all kinds in turn and return the median step of each turn [s], as rank 0 saw it."""
    if workload.ranks == 1:
        return fit(workload, kinds, cycles)
    number = WORKLOADS.index(workload)
    env = {"OMP_NUM_THREADS": str(workload.threads)}
    samples: Samples = run_ranks(
        workload.ranks, fit_rank, number, kinds, cycles, backend=None, timeout=240, env=env
    )[0]
    return samples


def fit_rank(number: int, kinds: list[str], cycles: int) -> Samples:
    """Fit a workload by its number, on each of several ranks."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    return fit(WORKLOADS[number], kinds, cycles)


def fit(workload: Workload, kinds: list[str], cycles: int) -> Samples:
    """Fit once on this rank with all kinds in turn."""
    torch.manual_seed(0)
    torch.set_num_threads(workload.threads)
    turns = Turns(workload, kinds, cycles)
    trainer = Trainer(
        **on_device(workload.ranks),
        strategy="auto" if workload.ranks == 1 else LockstepDDPStrategy(threads_per_rank=workload.threads),
        use_distributed_sampler=False,
        max_epochs=1,
        **BARE,
        callbacks=[turns],
    )
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
        title = f"{workload.title}, {workload.threads} thread{'s' * (workload.threads > 1)}"
        ours = [NONE, REPLAY, HOOKS] + ([EMPTY] if "SGD" in workload.title else [])
        cycles = (
            max(2, workload.cycles // (5 if chosen_device() == "cuda" else 10)) if quick else workload.cycles
        )
        samples = measure(workload, ours, cycles)
        tables.append(Comparison(title, samples, peer=NONE, at_most=workload.goals))
        if workload.slow_cycles:
            samples = measure(workload, [NONE, OTHER, ANOMALY], 2 if quick else workload.slow_cycles)
            tables.append(Comparison(f"{title}: what there was", samples, peer=NONE))
        print(f"{title}: measured", flush=True)
    torch.set_num_threads(threads)
    return Report(
        "What watching for nan and inf costs a training step",
        tables,
        [
            "One `Trainer.fit` per table, in one process where the title names no ranks. The ways of watching take"
            " turns of a few steps within it, so that model, optimizer and memory are the same for all; each sample is"
            " the median step of a turn.",
            "`Transformers' detector` is `transformers.debug_utils.DebugUnderflowOverflow`; `detect_anomaly` is"
            " `torch.autograd.set_detect_anomaly`, as Lightning's `Trainer(detect_anomaly=True)` sets it;"
            " `empty hooks` is a Python forward hook that does nothing on every module.",
        ],
    )
