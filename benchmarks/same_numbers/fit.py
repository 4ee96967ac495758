"""Runs programs on the ranks of a group, one after the other, and takes down what came of each."""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib
import os
import pickle
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
import torchmetrics
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

import lightning_lockstep as lockstep
from benchmarks.same_numbers import model as models
from benchmarks.same_numbers.program import BY_BATCH, STOCK, Program
from tests.harness import QUIET


@dataclass
class Outcome:
    """What a rank has seen of a program."""

    seen: list[tuple[int, int, list[int]]] = field(default_factory=list)  # epoch, batch, samples of each step
    weights: list[tuple[int, Tensor]] = field(default_factory=list)  # epoch, after each batch
    epochs: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # what is logged after each
    steps: list[tuple[int, int, dict[str, float]]] = field(default_factory=list)  # epoch, batch, what is logged
    test: dict[str, float] = field(default_factory=dict)
    error: str = ""  # type and text of what was raised
    refused: bool = False  # whether it says that the program cannot be run as it is

    @property
    def fatal(self) -> bool:
        """Whether the ranks are not asked for anything after it."""
        return bool(self.error) and not (self.refused and not self.weights)


@dataclass(frozen=True)
class Job:
    """A program, or a part of it, for a group of ranks."""

    name: str
    program: Program
    resumes: bool = False


def run_jobs(jobs: Sequence[Job], folder: str, limit: float) -> None:
    """Run each job and leave its outcome in a file; a rank that hangs is ended. Ranks: all, together."""
    warnings.simplefilter("ignore")
    rank = int(os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    for number, job in enumerate(jobs):
        # The first imports DeepSpeed, for instance.
        faulthandler.dump_traceback_later(limit if number else 3 * limit, exit=True)
        outcome = run(job, folder)
        faulthandler.cancel_dump_traceback_later()
        part = Path(folder, f"{job.name}.{rank}.part")
        part.write_bytes(pickle.dumps(outcome))
        part.rename(part.with_suffix(".pkl"))
        if outcome.fatal:
            return  # what comes after a failure is not this instrument's question


def run(job: Job, folder: str) -> Outcome:
    """Run one program, or its first or second part."""
    program, outcome = job.program, Outcome()
    checkpoint = Path(folder, f"{job.name.partition('-')[0]}.ckpt")
    try:
        seed_everything(program.seed, verbose=False)
        net, trainer = Net(program, outcome), trainer_of(program, 0 if job.resumes else program.stop)
        validation = eval_loaders(program, program.validation)
        trainer.fit(net, train_loader(program), validation, ckpt_path=checkpoint if job.resumes else None)
        net.end_epoch()
        if program.stop and not job.resumes:
            trainer.save_checkpoint(checkpoint)
        elif program.test:
            for values in trainer.test(net, eval_loaders(program, program.test), verbose=False):
                outcome.test |= {name: float(one) for name, one in values.items()}
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}"
        outcome.refused = isinstance(error, (lockstep.ConfigurationError, MisconfigurationException))
    return outcome


def trainer_of(program: Program, stop: int) -> Trainer:
    options: dict[str, Any] = {"iterable_datasets": "shard", "stall_timeout": 15.0, "grace_period": 5.0}
    strategies: dict[str, Any] = {
        "ddp": lockstep.LockstepDDPStrategy,
        "fsdp": lockstep.LockstepFSDPStrategy,
        "mpi": lockstep.LockstepMPIStrategy,
        **dict.fromkeys(("zero1", "zero2", "zero3"), lockstep.LockstepDeepSpeedStrategy),
    }
    if program.real:
        options |= {"random_numbers": "of_sample", "batch_norm": "of_batch"}
    if program.strategy[:4] == "zero":
        options["stage"] = int(program.strategy[-1])
    clip = {"gradient_clip_val": models.LARGEST, "gradient_clip_algorithm": program.clip} if program.clip else {}
    return Trainer(
        **QUIET,
        **clip,
        accelerator="cpu",
        devices=program.ranks,
        strategy=STOCK if program.strategy == STOCK else strategies[program.strategy](**options),
        precision="64-true" if program.strategy == "fsdp" else None,
        callbacks=[lockstep.EffectiveBatchSize(program.effective)] if program.effective else [],
        accumulate_grad_batches=program.accumulate,
        max_epochs=program.epochs,
        max_steps=stop or -1,
        num_sanity_val_steps=program.sanity,
    )


class Values(torchmetrics.Metric):
    """A metric with a list of one tensor of its own shape for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", default=[], dist_reduce_fx=None)

    def update(self, values: Tensor) -> None:
        self.seen += [one.expand(int(one) % 3 + 1) for one in values]

    def compute(self) -> Tensor:
        return torch.stack([1000 + one[0] for one in self.seen]).sum() if self.seen else torch.tensor(0.0)


class Net(LightningModule):
    """Learns as the program says, and takes down what it is given and what comes of it."""

    def __init__(self, program: Program, outcome: Outcome) -> None:
        super().__init__()
        self.program, self.outcome, self.open_epoch = program, outcome, -1
        self.automatic_optimization = program.loss != "manual"
        self.net = models.make_model(program)
        stages = [f"{stage}{n}" for stage in ("train", "val", "test") for n in range(program.eval_loaders)]
        means = {stage: torchmetrics.MeanMetric().set_dtype(torch.float64) for stage in stages}
        self.metrics = torch.nn.ModuleDict(
            {
                "metric": torch.nn.ModuleDict(means),
                "list": torch.nn.ModuleDict({stage: Values() for stage in stages}),
            }
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        program = self.program
        parts = [unpacked(one) for one in (batch if program.second else [batch]) if one is not None]
        numbers, inputs, targets = map(torch.cat, zip(*parts, strict=True))
        self.outcome.seen.append((self.current_epoch, batch_idx, numbers.tolist()))
        losses = models.losses(self.net, inputs, targets)
        self.log_values("train", 0, numbers, losses)
        if (program.loss == "none" and batch_idx % 3 == 1) or (program.loss == "skip" and int(numbers[0]) % 3 == 1):
            return None
        if program.loss == "items":
            counts = torch.tensor([models.items(int(number)) for number in numbers])
            return {"loss": (losses * counts).sum() / counts.sum(), "num_items": int(counts.sum())}
        if program.loss == "manual":
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(losses.mean())
            optimizer.step()
        return losses.mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        numbers, inputs, targets = unpacked(batch)
        self.log_values("val", dataloader_idx, numbers, models.losses(self.net, inputs, targets))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        numbers, inputs, targets = unpacked(batch)
        self.log_values("test", dataloader_idx, numbers, models.losses(self.net, inputs, targets))

    def log_values(self, stage: str, loader: int, numbers: Tensor, losses: Tensor) -> None:
        program = self.program
        values = torch.tensor([models.value(int(number)) for number in numbers], dtype=torch.float64)
        options: dict[str, Any] = {}
        if program.batch_size or program.collate == "list" or program.second:
            options["batch_size"] = len(numbers)
        means = {"mean": values.mean(), "sum": values.sum(), "max": values.max(), "min": values.min()}
        for name in program.values:
            at_step = name.startswith("step_")
            kind, _, sync = name.removeprefix("step_").partition("_")
            where = {"on_step": at_step, "on_epoch": not at_step, **options}
            if kind in self.metrics:
                metric: Any = self.metrics[kind][f"{stage}{loader}"]
                metric.update(values)
                self.log(f"{stage}_{name}", metric, **where)
            elif kind == "loss":
                self.log(f"{stage}_{name}", losses.detach().mean(), **where)
            elif stage == "train" or not at_step:
                self.log(f"{stage}_{name}", means[kind], reduce_fx=kind, sync_dist=bool(sync), **where)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.open_epoch < 0:  # of an epoch that is resumed Lightning calls no on_train_epoch_start
            self.open_epoch = self.current_epoch

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        whole: AbstractContextManager[Any] = nullcontext()
        if self.program.strategy == "zero3":
            whole = importlib.import_module("deepspeed").zero.GatheredParameters([*self.net.parameters()])
        if self.program.strategy != "fsdp":
            with whole:
                self.outcome.weights.append((self.current_epoch, models.vector(self.net)))
        metrics = self.trainer.callback_metrics
        values = {name: float(metrics[name]) for name in metrics if "step_" in name}
        self.outcome.steps.append((self.current_epoch, batch_idx, values))

    def on_train_epoch_start(self) -> None:
        self.end_epoch()
        self.open_epoch = self.current_epoch

    def end_epoch(self) -> None:
        """Take down what was logged, once the epoch is over."""
        if self.open_epoch < 0:
            return
        if self.program.strategy == "fsdp":
            self.outcome.weights.append((self.open_epoch, models.vector(self.net)))
        metrics = self.trainer.callback_metrics
        self.outcome.epochs.append((self.open_epoch, {name: float(one) for name, one in metrics.items()}))

    def configure_optimizers(self) -> Any:
        optimizer = models.optimizer(self.program, self.net)
        if not self.program.schedule:
            return optimizer
        steps = self.trainer.estimated_stepping_batches
        falls = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falls, "interval": "step"}}


# -- Loaders --


class Samples(Dataset[Any]):
    """Samples by their number."""

    def __init__(self, program: Program, samples: int, first: int = 0) -> None:
        self.program, self.numbers = program, range(first, first + samples)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        number = self.numbers[index]
        if number in self.program.corrupt:
            return None
        made, inputs, target = sample(self.program, number)
        if self.program.real:
            inputs = inputs * random.uniform(0.9, 1.1) + numpy.random.rand() + torch.randn(3).double() / 10
        return made, inputs, target


class Batches(Dataset[Any]):
    """Each item is a batch."""

    def __init__(self, program: Program, samples: int) -> None:
        self.program, self.batches = (
            program,
            models.own_batches("items", samples, program.batch, drop_last=False),
        )

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return Collate(self.program.collate)([sample(self.program, number) for number in self.batches[index]])


class Stream(IterableDataset[Any]):
    """Samples one after the other."""

    def __init__(self, data: Samples) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in range(len(self.data)))


def sample(program: Program, number: int) -> tuple[Tensor, Tensor, Tensor]:
    target = torch.tensor(models.target(number), dtype=torch.float64)
    return torch.tensor(number), models.features(program, number), target


@dataclass
class Collate:
    """Makes a batch of samples, without the corrupt ones; ``None`` if there are no others."""

    form: str  # tensors, dict, or list

    def __call__(self, samples: list[Any]) -> Any:
        good = [one for one in samples if one is not None]
        if not good or self.form == "list":
            return good or None
        batch = default_collate(good)
        return dict(zip("abc", batch, strict=True)) if self.form == "dict" else batch


def unpacked(batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers, inputs and targets of a batch."""
    if isinstance(batch, dict):
        return batch["a"], batch["b"], batch["c"]
    numbers, inputs, targets = batch if isinstance(batch[0], Tensor) else default_collate(batch)
    return numbers, inputs, targets


def train_loader(program: Program) -> Any:
    first = loader(program, Samples(program, program.samples), program.order)
    if not program.second:
        return first
    other = loader(program, Samples(program, program.second, models.SECOND), "none")
    return CombinedLoader([first, other], program.mode)


def eval_loaders(program: Program, samples: int) -> Any:
    if not samples:
        return None
    of_eval = dataclasses.replace(program, corrupt=(), batch=program.eval_batch)
    made = [loader(of_eval, Samples(of_eval, samples), program.eval_order) for _ in range(program.eval_loaders)]
    return made if len(made) > 1 else made[0]


def loader(program: Program, data: Samples, order: str) -> DataLoader[Any]:
    options: dict[str, Any] = {"num_workers": program.workers, "persistent_workers": program.persistent}
    if order == "items":
        return DataLoader(Batches(program, len(data)), batch_size=None, **options)
    options["collate_fn"] = Collate(program.collate)
    if order in BY_BATCH:
        return DataLoader(data, batch_sampler=batch_sampler(program, order, data), **options)
    options |= {"batch_size": program.batch, "drop_last": program.drop_last}
    if order == "stream":
        return DataLoader(Stream(data), **options)
    if order == "part":
        return DataLoader(Subset(data, models.own_order(order, len(data), 0)), **options)
    if order in ("none", "shuffle"):
        return DataLoader(data, shuffle=order == "shuffle", **options)
    return DataLoader(data, sampler=sampler(order, data), **options)


def sampler(order: str, data: Samples) -> Any:
    count = len(data)
    if order == "weighted":
        return WeightedRandomSampler([n % 3 for n in range(1, count + 1)], count + 2)
    if order == "subset":
        return SubsetRandomSampler(range(0, count, 2))
    if order in ("num_samples", "fewer"):
        repeats = order == "num_samples"
        return RandomSampler(data, replacement=repeats, num_samples=count + 3 if repeats else count - 2)
    return models.OwnSampler(order, count)


def batch_sampler(program: Program, order: str, data: Samples) -> Any:
    if order in ("lazy", "varied"):
        return models.Lazy(models.own_batches(order, len(data), program.batch, program.drop_last))
    own: Any = RandomSampler(data) if order == "random_batches" else models.OwnSampler(order, len(data))
    classes = {"cached": models.Cached, "counted": models.Counted, "nolen": models.NoLength}
    return classes.get(order, BatchSampler)(own, program.batch, program.drop_last)
