"""A resumed run is the run that was never stopped: everything with a state, saved in every place, each strategy.

Each case is fitted once as a whole, with checkpoints in several places of its second epoch, and once more from each of
them: from there on both train on the same batches with the same losses and learning rates, validate and end epochs at
the same steps, log the same, and end alike.
"""

from __future__ import annotations

import csv
import logging
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import (
    Checkpoint,
    EMAWeightAveraging,
    OnExceptionCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_lockstep import (
    LockstepDDPStrategy,
    LockstepDeepSpeedStrategy,
    LockstepFSDPStrategy,
    SyncedEarlyStopping,
)
from lightning_lockstep._lightning import (
    Callback,
    LightningModule,
    ModelCheckpoint,
    Trainer,
    seed_everything,
)

DATA = torch.arange(40.0).reshape(40, 1) / 40
BATCHES = 5  # of an epoch, on each of two ranks
S = torch.optim.lr_scheduler


class Net(LightningModule):
    def __init__(self, schedules: int, manual: bool, dropout: float, record: Record) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(1, 2), torch.nn.Linear(2, 1)
        self.dropout, self.mean = torch.nn.Dropout(dropout), MeanMetric()
        self.schedules, self.automatic_optimization = schedules, not manual
        self.record = record

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.record.at("step", self)
        outputs = self.second(self.dropout(self.first(batch[0])))
        loss: torch.Tensor = (outputs - 1).square().mean()
        rates = [round(o.param_groups[0]["lr"], 7) for o in self.trainer.optimizers]
        samples = [round(float(x) * 40) for x in batch[0]]
        self.record.add("train", self, batch_idx, samples, round(float(loss), 5), rates)
        self.log("loss", loss, sync_dist=True)  # all ranks step their ReduceLROnPlateau alike
        if not self.automatic_optimization:
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.step()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.record.at("optimizer", self, back=1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.record.at("validation_step", self)
        self.mean.update((self.second(self.first(batch[0])) - 1).square().mean())
        self.log("val", self.mean)
        self.log("worse", 1.0 + 0.1 * self.global_step, sync_dist=True)

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.first.parameters(), 0.1, momentum=0.9)
        if not self.automatic_optimization:
            return [sgd, torch.optim.Adam(self.second.parameters(), 0.01)]
        optimizer = torch.optim.AdamW(self.parameters(), 0.02)
        if not self.schedules:
            return optimizer
        of_validation: Any = S.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
        of_loss: Any = S.ReduceLROnPlateau(optimizer, patience=0, factor=0.9, threshold=0.5)
        schedulers: list[Any] = [
            {"scheduler": of_validation, "monitor": "worse"},
            {"scheduler": S.ExponentialLR(optimizer, 0.98), "interval": "step"},
            {"scheduler": S.ExponentialLR(optimizer, 0.8), "interval": "epoch"},
            {"scheduler": of_loss, "monitor": "loss", "interval": "step"},
        ]
        return [optimizer], schedulers[: self.schedules]


class Record(Callback):
    """Notes what happens, and saves a checkpoint in each place that it is told."""

    def __init__(self, folder: Path, places: tuple[str, ...]) -> None:
        self.folder, self.places = folder, places
        self.events: list[tuple[Any, ...]] = []
        self.saved: dict[str, int] = {}  # place -> number of events that do not come again

    def add(self, what: str, module: Any, *more: Any) -> None:
        self.events.append((what, module.current_epoch, module.global_step, *more))

    def at(self, hook: str, module: Any, back: int = 0) -> None:
        progress = module.trainer.fit_loop.epoch_loop.batch_progress.current
        place = f"{hook} {progress.ready}"
        if module.current_epoch == 1 and place in self.places and place not in self.saved:
            # The batches of an optimizer step that is not complete come again.
            partial = progress.processed % module.trainer.accumulate_grad_batches
            self.saved[place] = len(self.events) - back - (partial if progress.processed < BATCHES else 0)
            module.trainer.save_checkpoint(self.folder / f"{place}.ckpt")

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.at("epoch_start", pl_module)
        self.add("epoch begins", pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.at("batch_start", pl_module)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.at("validation_start", pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.add("validated", pl_module, round(float(trainer.callback_metrics["val"]), 5))


class Late(Checkpoint):
    """Saves after the other callbacks, as a ``ModelCheckpoint`` does."""

    monitor = None

    def __init__(self, record: Record) -> None:
        self.record = record

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.record.at("batch_end", pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.record.at("validation_end", pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.record.add("epoch ends", pl_module)
        self.record.at("epoch_end", pl_module)


class Failure(Exception):
    pass


class Raises(Callback):
    """Fails within a batch, on every rank."""

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == BATCHES + 2:
            raise Failure


Made = Callable[[Path], list[Any]]
EVERY = (
    "epoch_start 5",
    *(f"{hook} {batch}" for batch in (1, 3, 5) for hook in ("batch_start", "step", "batch_end")),
    "validation_start 5",
    "validation_step 5",
    "validation_end 5",
    "epoch_end 5",
)
MOST = (
    "batch_start 1",
    "step 3",
    "batch_end 3",
    *EVERY[-5:],  # from the end of the last batch to that of the epoch
)
SOME = ("step 1", "batch_end 3", "batch_end 5", "validation_end 5")
FEW = ("batch_start 3", "batch_end 3", "validation_end 5")  # FSDP cannot save within a forward


def callbacks_with_state(folder: Path) -> list[Any]:
    return [
        EMAWeightAveraging(decay=0.5),
        SyncedEarlyStopping("worse", patience=9),
        ModelCheckpoint(folder / "best", "{step}", monitor="val", save_top_k=2, enable_version_counter=False),
    ]


def ddp() -> Any:
    return LockstepDDPStrategy(guard="off")


#: case -> strategy, places, options of the fit
CASES: dict[str, tuple[Callable[[], Any], tuple[str, ...], dict[str, Any]]] = {
    "schedulers": (ddp, MOST, {"schedules": 4}),
    "callbacks": (ddp, (*SOME, "epoch_end 5"), {"callbacks": callbacks_with_state}),
    "validates in mid-epoch": (
        ddp,
        ("batch_end 2", "validation_step 2", "validation_end 2", "step 3", "batch_end 3", "batch_end 5"),
        {"schedules": 4, "val_check_interval": 2},
    ),
    "validates across epochs": (
        ddp,
        ("step 1", "batch_end 1", "validation_step 1", "validation_end 1", "step 2", "epoch_end 5"),
        {"val_check_interval": 3, "check_val_every_n_epoch": None},
    ),
    "max_steps": (ddp, EVERY, {"max_steps": 13, "schedules": 4}),
    "no validation": (ddp, ("step 1", "batch_end 3", "batch_end 5", "epoch_end 5"), {"limit_val_batches": 0}),
    "accumulated": (
        ddp,
        ("batch_start 4", "batch_end 3", "optimizer 4", "batch_end 4", "optimizer 5", "batch_end 5"),
        # Random numbers of batches that come again are others.
        {"accumulate_grad_batches": 2, "dropout": 0.0, "schedules": 4},
    ),
    "two optimizers": (ddp, SOME, {"manual": True}),
    "FSDP": (lambda: LockstepFSDPStrategy(guard="off"), FEW, {"schedules": 4}),
    **{
        f"DeepSpeed, stage {stage}": (
            lambda stage=stage: LockstepDeepSpeedStrategy(stage=stage, guard="off"),
            FEW,
            {"schedules": 1},
        )
        for stage in (2, 3)
    },
    "DeepSpeed, accumulated": (
        lambda: LockstepDeepSpeedStrategy(stage=2, guard="off"),
        ("batch_end 3", "batch_start 3"),
        {"accumulate_grad_batches": 2, "dropout": 0.0, "limit_train_batches": 4},
    ),
}


AN_EXCEPTION = "an exception"


def fit(
    folder: Path, strategy: Any, places: tuple[str, ...] = (), ckpt_path: Any = None, **options: Any
) -> tuple[Record, dict[str, Any]]:
    """Fit, and return what happened and what a run ends with."""
    record = Record(folder, places)
    make: Made = options.pop("callbacks", lambda folder: [])
    callbacks = [record, *make(folder), Late(record)]
    seed_everything(1, verbose=False)
    net = Net(options.pop("schedules", 0), options.pop("manual", False), options.pop("dropout", 0.3), record)
    logger = CSVLogger(folder, flush_logs_every_n_steps=1000)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        callbacks=callbacks,
        logger=logger,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **{"max_epochs": 3, **options},
    )
    # Without a generator of its own a validation that is repeated draws from the global one once more.
    validation = DataLoader(TensorDataset(DATA[:12]), 2, generator=torch.Generator())
    with suppress(Failure):
        trainer.fit(net, DataLoader(TensorDataset(DATA), 4, shuffle=True), validation, ckpt_path=ckpt_path)
    rows: list[Any] = []
    path = Path(logger.log_dir, "metrics.csv")
    if trainer.is_global_zero and path.exists():
        rows = [{k: v[:7] for k, v in row.items() if v} for row in csv.DictReader(path.open())]
    states = [one.state_dict() for one in callbacks if isinstance(one, (SyncedEarlyStopping, ModelCheckpoint))]
    whole = isinstance(strategy, LockstepDDPStrategy)
    weights = [p.tolist() for p in net.parameters()] if whole else None
    return record, {"rows": rows, "states": str(states), "weights": weights, "step": trainer.global_step}


def compare(folder: Path, name: str) -> dict[str, Any]:
    """Return in which places a resumed fit differs from the whole one."""
    strategy, places, options = CASES[name]
    folder = folder / name
    record, end = fit(folder, strategy(), places, **options)
    wrong: dict[str, Any] = {place: "not saved" for place in places if place not in record.saved}
    for place, done in record.saved.items():
        resumed, its_end = fit(folder, strategy(), ckpt_path=folder / f"{place}.ckpt", **options)
        rows = its_end.pop("rows")
        if resumed.events != record.events[done:]:
            wrong[place] = record.events[done:], resumed.events
        elif rows != end["rows"][len(end["rows"]) - len(rows) :]:
            wrong[place] = end["rows"], rows
        elif its_end != {key: value for key, value in end.items() if key != "rows"}:
            wrong[place] = end, its_end
    return wrong


def quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning_lockstep").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def after_an_exception(folder: Path, name: str) -> dict[str, Any]:
    """Return which callback's checkpoint of a fit that has failed does not go on with the batch that failed."""
    folder = folder / name
    record, _ = fit(folder, ddp(), dropout=0.0)
    expected = record.events[record.events.index(next(e for e in record.events if e[:4] == ("train", 1, 7, 2))) :]
    savers: dict[str, Made] = {
        "on_exception": lambda folder: [OnExceptionCheckpoint(folder)],
        "step=7": lambda folder: [ModelCheckpoint(folder, "{step}", save_on_exception=True)],
    }
    wrong = {}
    for saver, make in savers.items():
        fit(folder, ddp(), dropout=0.0, callbacks=lambda folder, make=make: [Raises(), *make(folder)])
        torch.distributed.barrier()  # rank 0 alone writes it
        resumed, _ = fit(folder, ddp(), ckpt_path=folder / f"{saver}.ckpt", dropout=0.0)
        if resumed.events != expected:
            wrong[saver] = expected, resumed.events
    return wrong


def table(folder: str, names: list[str]) -> dict[str, Any]:
    """Return the cases that differ, and how."""
    quiet()
    found = {}
    for name in names:
        ends = after_an_exception if name == AN_EXCEPTION else compare
        if wrong := ends(Path(folder), name):
            found[name] = wrong
    return found
