"""One training run: build, fit, validate, test, report."""

from __future__ import annotations

import logging
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from lightning_lockstep._application.checks import component_keys, make, names_in
from lightning_lockstep._application.masking import Mask
from lightning_lockstep._application.records import (
    LogConfiguration,
    Summary,
    finish,
    keep_unless_kept,
    places,
    read_metrics,
    remove_earlier_summary,
    show,
    write,
)
from lightning_lockstep._lightning import (
    PYTORCH,
    Callback,
    CSVLogger,
    LightningModule,
    MLFlowLogger,
    WandbLogger,
    _MultiProcessingLauncher,
    is_overridden,
    seed_everything,
)
from lightning_lockstep._registry import register_strategies
from lightning_lockstep._system import shell_exit_code
from lightning_lockstep._text import say
from lightning_lockstep._trainer import weights_as_they_are
from lightning_lockstep.distributed.failure.record import remove_earlier_report
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.launchers.mpirun import MPIRunLauncher
from lightning_lockstep.launchers.rank_supervisor import ran_elsewhere
from lightning_lockstep.loaders.loader_position import LoaderPosition
from lightning_lockstep.numerics.statistics import samples_in

# -- Leaves out of the output what is for the developers of other packages, or for nobody --

# How messages of Lightning begin that say nothing about the run.
_NOISE = (
    "💡 Tip",
    "GPU available: False",
    "TPU available: False",
    "Restoring states from the checkpoint path",
    "Restored all states from the checkpoint",
    "Loaded model weights from the checkpoint",
    "`weights_only` was not set",
    "\nDetected KeyboardInterrupt",
    "Loading `train_dataloader` to estimate",
    "Experiment with name",  # MLflow's, which is made if it is missing
)
_LOGGERS = ("utilities.rank_zero", "trainer.connectors.checkpoint_connector", "loggers.mlflow")
# Loggers that say how MLflow makes its file, and how DeepSpeed tries a compiler.
_TALKATIVE = ("mlflow.store", "alembic", "compilers")
_THEIRS = r"(lightning|pytorch_lightning|torch|hydra|omegaconf)\."


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_NOISE)


def leave_out_noise() -> None:
    """Show neither advertisements, nor deprecations inside other packages, nor messages without news."""
    for name in _LOGGERS:
        logging.getLogger(f"{PYTORCH}.{name}").addFilter(_is_news)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    for category in (DeprecationWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category, module=_THEIRS)
    warnings.filterwarnings("ignore", message=r"Checkpoint directory .* exists and is not empty")


# -- Model, data and Trainer, made from the configuration --


def build(config: DictConfig, *, own_callbacks: list[Any]) -> tuple[Any, Any, Any]:
    """Make model, data and Trainer, in the run itself; raise all that is wrong as one error."""
    try:
        parts: dict[str, Any] = {}
        faults: list[str] = []
        for key in component_keys(config)[:-1]:
            if key.startswith("logger.") and faults:
                break
            try:
                parts[key] = make(config, key)
            except ConfigurationError as error:
                faults += error.faults
        if faults:
            raise ConfigurationError(faults)
        callbacks = [parts[key] for key in parts if key.startswith(("callbacks.", "checkpoint."))]
        given = {
            "callbacks": [*callbacks, *own_callbacks],
            "logger": [parts[key] for key in parts if key.startswith("logger.")] or False,
            "strategy": parts["strategy"],
        }
        if config.trainer.get("enable_checkpointing") is None:
            given["enable_checkpointing"] = bool(names_in(config, "checkpoint"))
        return parts["model"], parts["data"], make(config, "trainer", given)
    except ConfigurationError:
        raise
    except Exception as error:
        keep_unless_kept(error, Path(config.trainer.get("default_root_dir") or ""))
        raise


# -- One training run: build, fit, validate, test, report --


def run(config: DictConfig) -> float | None:
    """Train as the configuration says; return the final `objective.metric`, for a sweeper, if it was logged."""
    began = time.monotonic()
    register_strategies()
    leave_out_noise()
    seed_everything(config.seed, workers=True, verbose=False)
    record = RunRecord()
    # Nothing reads the command line any more but W&B, which logs it.
    sys.argv[1:] = Mask(config).masked(sys.argv[1:])
    own_callbacks = [record, LogConfiguration(config), LoaderPosition(divides=True)]
    model, data, trainer = build(config, own_callbacks=own_callbacks)
    if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        record.share()
    left_out = _left_out(config, model, data)
    if trainer.is_global_zero:
        remove_earlier_report(Path(trainer.default_root_dir))
        remove_earlier_summary(Path(trainer.default_root_dir))
        for stage, why in left_out.items():
            say(f"lightning-lockstep: {stage}=true is left out: {why}")
    loggers = list(trainer.loggers)
    try:
        metrics = _loops(config, trainer, record, left_out, model=model, datamodule=data)
    except BaseException as error:
        # Lightning makes an exit of Ctrl-C.
        left = isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt)
        if interrupted := left or isinstance(error, KeyboardInterrupt):
            error = KeyboardInterrupt()
        # What has started an mpirun only waits for it: its rank 0 says how far the run came.
        if not (interrupted and isinstance(trainer.strategy.launcher, MPIRunLauncher)):
            keep_unless_kept(error, Path(trainer.default_root_dir), trainer, record.steps)
            if interrupted and trainer.is_global_zero:
                # A whole path: with hydra.job.chdir the run is in another folder than the shell.
                resume = f"lockstep-doctor run {shlex.quote(str(Path(trainer.default_root_dir).absolute()))}"
                say(f"lightning-lockstep: interrupted after optimizer step {record.steps}; to go on: {resume}")
        # One rank may go on with the next job of a sweep; of several each ends here, and must not wait.
        if trainer.world_size == 1:
            finish(loggers, failed=True)
            if interrupted:
                sys.exit(shell_exit_code(-signal.SIGINT))  # Lightning itself ends with 1
        raise
    logs = places(loggers) if trainer.is_global_zero else {}
    finish(loggers, failed=False)
    if ran_elsewhere():
        # The ranks have done it all, and rank 0 has reported it.
        metrics = read_metrics(Path(trainer.default_root_dir))
    elif trainer.is_global_zero:
        summary = Summary(
            metrics=metrics,
            steps=record.steps,
            epochs=record.epochs,
            ranks=trainer.world_size,
            samples_per_second=record.samples_per_second(trainer.world_size),
            wall_time=time.monotonic() - began,
            files=_files(config, trainer, logs),
        )
        write(summary, Path(trainer.default_root_dir))
        show(summary)
    return metrics.get(config.objective.metric)


def _left_out(config: DictConfig, model: Any, data: Any) -> dict[str, str]:
    """Of `validate` and `test` those that are asked for and have nothing to run, with what is missing."""
    missing = {}
    for stage, step, loader in (
        ("validate", "validation_step", "val_dataloader"),
        ("test", "test_step", "test_dataloader"),
    ):
        has_loader = any(is_overridden(loader, part, LightningModule) for part in (data, model))
        lacking = loader if is_overridden(step, model, LightningModule) else step
        if config.get(stage) and (lacking == step or not has_loader):
            missing[stage] = f"{type(model).__name__} has no {lacking}."
    return missing


def _loops(
    config: DictConfig, trainer: Any, record: RunRecord, left_out: Collection[str], **given: Any
) -> dict[str, float]:
    metrics: dict[str, float] = {}
    path = config.get("ckpt_path")

    def loop(name: str, **more: Any) -> None:
        getattr(trainer, name)(**given, ckpt_path=path, **more)
        metrics.update({name: float(value) for name, value in trainer.callback_metrics.items()})

    def evaluate(name: str) -> None:
        with weights_as_they_are(trainer) if config.fit and path is None else nullcontext():
            loop(name, verbose=False)

    if not config.fit and path is None and trainer.is_global_zero:
        say("lightning-lockstep: fit=false without ckpt_path: the model keeps its initial weights.")
    if config.fit:
        loop("fit")
        path = None
        if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
            # Evaluations in separate ranks log no further: a new process would start the file or the run again.
            once = (CSVLogger, MLFlowLogger, WandbLogger)
            trainer.loggers = [logger for logger in trainer.loggers if not isinstance(logger, once)]
    if config.validate and "validate" not in left_out and record.validation_is_stale():
        evaluate("validate")
    if config.test and "test" not in left_out:
        path = _best(trainer) if config.fit else path
        evaluate("test")
    return metrics


def _best(trainer: Any) -> str | None:
    """The best checkpoint of this run, if one was kept by a metric."""
    for callback in trainer.checkpoint_callbacks:
        if getattr(callback, "monitor", None) and getattr(callback, "best_model_path", ""):
            return str(callback.best_model_path)
    return None


def _files(config: DictConfig, trainer: Any, logs: dict[str, str]) -> dict[str, str]:
    """Where everything of a run is, as rows of the closing table."""
    taken, best, last = config.get("ckpt_path"), _best(trainer), last_checkpoint(trainer)
    rows = {
        "run folder": trainer.default_root_dir,
        "resumed from" if config.fit else "checkpoint": taken,
        **logs,
        "best checkpoint": best,
        "last checkpoint": last if last is not None and last.exists() else None,
    }
    return {name: str(path) for name, path in rows.items() if path is not None}


def last_checkpoint(trainer: Any) -> Path | None:
    """Where this run keeps its newest checkpoint, if its settings ask for one."""
    for callback in trainer.checkpoint_callbacks:
        if getattr(callback, "filename", None) == "last" and getattr(callback, "dirpath", None):
            return Path(callback.dirpath, "last.ckpt")
    return None


class RunRecord(Callback):
    """Counts what the closing summary shows, and saves the last step of a run."""

    # A parent process reads what a spawned or forked rank has counted, once it has asked for that with :meth:`share`.
    # What decides about a further validation or checkpoint is the same on all ranks; samples and seconds are rank 0's.

    def __init__(self) -> None:
        # samples of this rank, seconds of training, steps, epochs, step of the last validation
        self._numbers = torch.tensor([0.0, 0.0, 0.0, 0.0, -1.0], dtype=torch.float64)
        self._since: float | None = None
        self._saved_at = -1

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        leave_out_noise()  # also in a rank that is spawned: it gets a copy of every callback

    def share(self) -> None:
        """Keep the numbers in memory that this process shares with those it starts."""
        self._numbers.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def steps(self) -> int:
        """Optimizer steps of the run, those before a resumed checkpoint included."""
        return int(self._numbers[2])

    @property
    def epochs(self) -> int:
        return int(self._numbers[3])

    def samples_per_second(self, world_size: int) -> float | None:
        """Training samples of all ranks per second of training, evaluation left out."""
        samples, seconds = self._numbers[:2].tolist()
        return samples * world_size / seconds if seconds > 0 else None

    def validation_is_stale(self) -> bool:
        """Whether the weights have changed since the last validation."""
        return int(self._numbers[4]) != self.steps

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.ckpt_path and trainer.is_global_zero:
            place = f"epoch {trainer.current_epoch}, optimizer step {trainer.global_step}"
            say(f"lightning-lockstep: resuming from {trainer.ckpt_path} at {place}")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start the clock, which has stood since an evaluation, or the beginning."""
        if self._since is None:
            self._since = time.monotonic()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.monotonic()
        self._numbers[2] = trainer.global_step
        if trainer.is_global_zero and self._since is not None:
            self._numbers[0] += samples_in(batch)
            self._numbers[1] += now - self._since
        self._since = now

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._since = None

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._numbers[4] = trainer.global_step

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._numbers[3] = trainer.current_epoch + 1

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Let the best checkpoint of the run that is resumed stay the best one until there is a better one."""
        for callback in trainer.checkpoint_callbacks:
            kept = checkpoint["callbacks"].get(callback.state_key, {})
            if kept.get("dirpath") in (None, callback.dirpath):
                continue
            best = Path(kept["best_model_path"] or "none")
            # A strategy that reads a file may not read a folder. Another host may not see either, so rank 0 decides.
            can_be_read = best.exists() and best.is_dir() == Path(trainer.ckpt_path).is_dir()
            if trainer.strategy.broadcast(can_be_read):
                kept["dirpath"] = callback.dirpath  # Lightning forgets the score of another folder

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._saved_at = trainer.global_step

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last step, if training ended between two regular checkpoints."""
        path = last_checkpoint(trainer)
        if path is not None and self._saved_at != trainer.global_step and not trainer.fast_dev_run:
            trainer.save_checkpoint(path)
