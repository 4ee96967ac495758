"""What watching for nan and inf costs a training step: ours, Transformers' detector, detect_anomaly."""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.engine import Comparison, Report, interleave
from lightning_lockstep import OverflowDetector

NONE, REPLAY, HOOKS, OTHER, ANOMALY = "none", "replay", "hooks", "Transformers' detector", "detect_anomaly"
EMPTY = "empty hooks"


@dataclass(frozen=True)
class Workload:
    """One row of the issue's table: a model, its batch, its optimizer and how long to measure."""

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    goals: dict[str, float]
    steps: int
    rounds: int


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
    return nn.Sequential(*[layer for _ in range(100) for layer in (nn.Linear(64, 64),)])


def tokens() -> Tensor:
    return torch.randint(0, 8000, (8, 64))


WORKLOADS = [
    Workload(
        "T5 9.4 M, batch 8 x 64, AdamW", t5, tokens, torch.optim.AdamW, {REPLAY: 1.01, HOOKS: 1.03}, 4, 8
    ),
    Workload(
        "BERT 5.4 M, batch 8 x 64, AdamW", bert, tokens, torch.optim.AdamW, {REPLAY: 1.01, HOOKS: 1.03}, 6, 10
    ),
    Workload(
        "100 linear layers of 64, batch 32, AdamW",
        linears,
        lambda: torch.randn(32, 64),
        torch.optim.AdamW,
        {REPLAY: 1.02, HOOKS: 1.07},
        30,
        14,
    ),
    Workload(
        "100 linear layers of 64, batch 32, SGD",
        linears,
        lambda: torch.randn(32, 64),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        {REPLAY: 1.03, HOOKS: 1.13},
        40,
        14,
    ),
]


class Repeated(Dataset[Any]):
    """One batch, again and again."""

    def __init__(self, batch: Any, length: int) -> None:
        self.batch, self.length = batch, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.batch


class Task(LightningModule):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.workload = workload.build(), workload
        self.language = not isinstance(self.net, nn.Sequential)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.language:
            return self.net(input_ids=batch, labels=batch).loss
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return self.workload.optimizer(self.parameters())


class Clock(Callback):
    """Times whole steps, from the end of one batch to the end of the next."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.perf_counter())

    def median(self) -> float:
        steps = [b - a for a, b in zip(self.ends[1:], self.ends[2:], strict=False)]
        return statistics.median(steps)


class Variant:
    """A model of its own, watched in one way; each call fits a few steps and returns the median step [s]."""

    def __init__(self, workload: Workload, kind: str) -> None:
        self.workload, self.kind = workload, kind
        self.task = Task(workload)
        torch.manual_seed(1)
        self.loader = DataLoader(Repeated(workload.batch(), workload.steps + 2), batch_size=None)
        if kind == OTHER:
            from transformers.debug_utils import DebugUnderflowOverflow

            self.other = DebugUnderflowOverflow(self.task.net)
        if kind == EMPTY:
            for module in self.task.modules():
                module.register_forward_hook(lambda module, args, output: None)

    def __call__(self) -> float:
        clock = Clock()
        callbacks: list[Callback] = [clock]
        if self.kind in (REPLAY, HOOKS):
            callbacks.append(OverflowDetector(mode=self.kind))  # type: ignore[arg-type]
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
            detect_anomaly=self.kind == ANOMALY,
        )
        trainer.fit(self.task, self.loader)
        return clock.median()


def run(quick: bool) -> Report:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    tables = []
    for workload in WORKLOADS:
        rounds = 2 if quick else workload.rounds
        ours = [NONE, REPLAY, HOOKS] + ([EMPTY] if "SGD" in workload.title else [])
        for kinds, goals, times in (
            (ours, workload.goals, rounds),
            ([NONE, OTHER, ANOMALY], {}, max(2, rounds // 4)),
        ):
            variants = {kind: Variant(workload, kind) for kind in kinds}
            with contextlib.redirect_stdout(None):
                samples = interleave(variants, rounds=times, warmup=1)
            tables.append(Comparison(workload.title, samples, peer=NONE, at_most=goals))
            print(f"{workload.title}: measured {', '.join(kinds)}", flush=True)
    return Report(
        "What watching for nan and inf costs a training step",
        tables,
        [
            "One process, a plain `Trainer.fit`; each sample is the median step of a short fit on a model of its own.",
            "`Transformers' detector` is `transformers.debug_utils.DebugUnderflowOverflow`; `detect_anomaly` is"
            " Lightning's `Trainer(detect_anomaly=True)`; `empty hooks` is a Python forward hook that does nothing"
            " on every module.",
        ],
    )
