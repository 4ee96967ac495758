"""A run that outlives its ranks: what is refused, how the ranks that are left divide a batch, and metrics.csv."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_lockstep import (
    AutoBatchSize,
    ConfigurationError,
    LaunchError,
    LockstepDDPStrategy,
    LockstepFSDPStrategy,
    LockstepMPIStrategy,
)
from lightning_lockstep.strategies.outliving.can_outlive import check_fit, check_loader, check_optimizers
from lightning_lockstep.strategies.outliving.log import continue_csv, row_of

TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
SRUN = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}


def start(environment: dict[str, str] | None = None, **given: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Return what makes a Trainer of two ranks; what the strategy does not take is for the Trainer."""

    def made(patch: pytest.MonkeyPatch) -> None:
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        of_trainer = {name: given.pop(name) for name in ("num_nodes", "use_distributed_sampler") if name in given}
        strategy = LockstepDDPStrategy(on_lost_rank="continue", **given)
        Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, **of_trainer)

    return made


def fit(module: Any = None, **given: Any) -> Callable[[pytest.MonkeyPatch], None]:
    def made(patch: pytest.MonkeyPatch) -> None:
        trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **given)
        trainer.strategy._lightning_module = module or BoringModel()
        check_fit(trainer)

    return made


class Stream(IterableDataset[int]):
    """Data without indices."""

    def __iter__(self) -> Any:
        return iter(())


def optimizer(kind: str, *bases: type) -> Any:
    return type(kind, bases, {"__init__": lambda self: None})()


REFUSED: dict[str, tuple[Callable[[pytest.MonkeyPatch], object], str]] = {
    "torchrun": (start(TORCHRUN), "torchrun with on_lost_rank='continue': expected one process on each host"),
    "srun": (start(SRUN), "several tasks of srun with on_lost_rank='continue': expected one process"),
    "srun on nodes": (
        start({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, num_nodes=3),
        "num_nodes=3, but srun has started one task on each of 2 nodes: expected num_nodes=2",
    ),
    "spawn": (
        start(start_method="spawn"),
        "start_method='spawn' with .* expected 'popen', because only a script",
    ),
    "join": (start(uneven_inputs="join"), "uneven_inputs='join' with .*: expected 'error'"),
    "power_sgd": (start(ddp_comm_hook="power_sgd"), "PowerSGD keeps on each rank"),
    "averaging": (start(model_averaging_period=4), "the ranks then have different weights"),
    "own division": (
        start(use_distributed_sampler=False),
        "use_distributed_sampler=False with .*: expected True",
    ),
    "manual": (
        fit(ManualOptimBoringModel()),
        "manual optimization with .*: expected automatic_optimization=True",
    ),
    "batches": (fit(check_val_every_n_epoch=None, val_check_interval=5), "check_val_every_n_epoch=None with"),
    "schedule": (fit(callbacks=GradientAccumulationScheduler({0: 2})), "GradientAccumulationScheduler with"),
    "search": (
        fit(callbacks=AutoBatchSize()),
        "AutoBatchSize with .*: expected a fixed number of micro-batches",
    ),
    "lbfgs": (lambda _: check_optimizers([optimizer("Own", torch.optim.LBFGS)]), "LBFGS makes several"),
    "zero": (
        lambda _: check_optimizers([optimizer("ZeroRedundancyOptimizer")]),
        "has a part of its state alone",
    ),
    "stream": (lambda _: check_loader(DataLoader(Stream())), "a DataLoader that is not divided here"),
    "sampler": (
        lambda _: check_loader(DataLoader(range(4), sampler=DistributedSampler(range(4), 2, 0))),  # type: ignore[arg-type]
        "expected a DataLoader of data with indices",
    ),
    "fsdp": (
        lambda _: LockstepFSDPStrategy(on_lost_rank="continue"),  # type: ignore[call-arg]
        "LockstepFSDPStrategy has no option 'on_lost_rank'",
    ),
    "mpi": (
        lambda _: LockstepMPIStrategy(backend="gloo", on_lost_rank="continue"),  # type: ignore[call-arg]
        "on_lost_rank='continue': expected 'end', because mpirun ends all ranks",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_outlives_no_rank_is_refused_with_the_reason(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, text = REFUSED[case]
    with pytest.raises((ConfigurationError, LaunchError), match=text):
        call(monkeypatch)


def test_a_new_rank_0_goes_on_in_the_csv_file_that_the_lost_one_left_within_a_line(tmp_path: Path) -> None:
    first, second = CSVLogger(tmp_path, version=0), CSVLogger(tmp_path, version=0)
    for step in range(3):
        first.log_metrics({"loss": step / 2, "epoch": 0}, step)
    first.save()
    path = tmp_path / "lightning_logs" / "version_0" / "metrics.csv"
    path.write_text(path.read_text() + "0,1.")
    given = {"loss": 1.0, "epoch": 0}
    there = continue_csv(second, {row_of(step, given): given for step in (2, 3)})
    assert there == {row_of(step, given) for step in range(3)}
    second.log_metrics({"other": 7.0}, 4)
    second.save()
    with path.open(newline="") as file:
        rows = [(row["step"], row["loss"], row["other"]) for row in csv.DictReader(file)]
    assert rows == [("0", "0.0", ""), ("1", "0.5", ""), ("2", "1.0", ""), ("3", "1.0", ""), ("4", "", "7.0")]
