"""What rooms still take from here of Lightning's private names; it goes with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from lightning_lockstep._doors.lightning import _IndexBatchSamplerWrapper
from lightning_lockstep._trainer import asks_for_training_loader as asks_for_training_loader
from lightning_lockstep._trainer import given_to_trainer as given_to_trainer


def restore_data_classes() -> None:
    """Undo what Lightning does to ``DataLoader`` and ``BatchSampler`` while it asks a program for its loaders."""
    # ``_replace_dunder_methods`` of ``lightning.fabric.utilities.data`` leaves its replacements in place when the
    # program's hook raises: the next run in the process then refuses ``predict`` with ``DataLoader(dataset, 4)``.
    for base in (DataLoader, BatchSampler):
        for cls in (base, *_subclasses(base)):
            for name in ("__init__", "__setattr__", "__delattr__"):
                method = vars(cls).get(name)
                if (own := _without_notes(method)) is not method:
                    setattr(cls, name, own)
                if f"__old{name}" in vars(cls):
                    delattr(cls, f"__old{name}")


def _subclasses(cls: type) -> Iterator[type]:
    below: list[type] = cls.__subclasses__()
    for one in below:
        yield one
        yield from _subclasses(one)


def _without_notes(method: Any) -> Any:
    """Return the class's own method; of two runs that failed, each has put a layer around it."""
    while getattr(method, "__globals__", {}).get("__name__", "").endswith("fabric.utilities.data"):
        method = method.__wrapped__
    return method


def combined_training_loader(trainer: Any) -> tuple[int, str] | None:
    """Return how many loaders the fit loop takes together, and how; ``None`` until it has asked for all."""
    combined = trainer.fit_loop._combined_loader
    return None if combined is None else (len(combined.flattened), combined._mode)


def end_epoch_with_next_batch(trainer: Any) -> None:
    """Have the fit loop do after the batch that it gets next what it does after the last one of an epoch."""
    fetcher = trainer.fit_loop._data_fetcher
    fetcher.length = fetcher.fetched + 1  # until the next epoch
    interval = trainer.val_check_interval
    if isinstance(interval, float) and interval == 1.0:
        trainer.val_check_batch = math.inf  # validate after the last batch, whatever its number


def data_source(loop: Any) -> Any:
    """Return the source of the loaders of a loop."""
    return loop._data_source


def loaders_in_use(loop: Any) -> list[Any]:
    """Return the loaders of a loop that has made them."""
    return list(loop._combined_loader.flattened)


def joins_batches(loop: Any) -> bool:
    """Return whether each batch of a loop is made of batches of several loaders."""
    combined = loop._combined_loader
    return len(combined.flattened) > 1 and combined._mode != "sequential"


def go_on(trainer: Any, point: Any) -> None:
    """Do what is left of a batch or an epoch before the fit loop goes on; ``point`` is a ``ResumePoint``."""
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    if not point.batches:
        if point.epoch_open:
            _step_plateaus(trainer, point.epoch)
        loop.restarting = (
            False  # with `max_steps` Lightning takes the epoch that begins for one to be continued
        )
        return
    if point.no_batches_left:
        fetcher.done, fetcher.batches = True, []
    validates = loop._should_check_val_fx(fetcher)
    if point.batch_open and not validates:
        loop.on_advance_end(fetcher)
    elif validates and not point.rest_open:
        # Lightning would take the batch that is done for one whose validation has just ended.
        def validated(fetcher: Any) -> bool:
            del loop._should_check_val_fx  # asked once, before the first batch
            return False

        loop._should_check_val_fx = validated


def metrics_of(trainer: Any) -> dict[str, Any]:
    """Return the metrics that callbacks see. Ranks: all, together; values may be reduced."""
    found = trainer.callback_metrics if trainer.training else trainer._logger_connector._callback_metrics
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in found.items()}


def _step_plateaus(trainer: Any, epochs: int) -> None:
    for config in trainer.lr_scheduler_configs if trainer.lightning_module.automatic_optimization else ():
        value = trainer.callback_metrics.get(config.monitor) if config.reduce_on_plateau else None
        if value is not None and config.interval == "epoch" and epochs % config.frequency == 0:
            trainer.lightning_module.lr_scheduler_step(config.scheduler, value)


def step_plateaus_of_resumed_epoch(trainer: Any) -> None:
    """Have Lightning step each ``ReduceLROnPlateau`` at the end of this epoch, as in every other one."""
    trainer.fit_loop._restarting = False


def asked_sampler(batches: Any) -> Any:
    """Return the batch sampler that Lightning's for predictions asks; any other one itself."""
    return batches._batch_sampler if type(batches) is _IndexBatchSamplerWrapper else batches


@contextmanager
def around_evaluation(
    trainer: Any,
    loop: Any,
    step: Callable[[Callable[[], None], int, int], None],
    before_reading: Callable[[bool], Any],
) -> Iterator[None]:
    """Let ``step(make, batch_idx, dataloader_idx)`` make each step, and be told before logged values are read."""
    # `before_reading` gets False at the end of a loader, True at the end of all.
    connector, predicts = trainer._logger_connector, hasattr(loop, "_predict_step")
    make_step = loop._predict_step if predicts else loop._evaluation_step
    end_loader: Any = getattr(loop, "_store_dataloader_outputs", None)
    end_all = connector.on_epoch_end
    name = "_predict_step" if predicts else "_evaluation_step"
    vars(loop)[name] = lambda *args: step(partial(make_step, *args), args[1], args[2])
    if not predicts:
        vars(loop)["_store_dataloader_outputs"] = lambda: before_reading(False) or end_loader()
        vars(connector)["on_epoch_end"] = lambda: before_reading(True) or end_all()
    try:
        yield
    finally:
        for owner, place in ((loop, name), (loop, "_store_dataloader_outputs"), (connector, "on_epoch_end")):
            vars(owner).pop(place, None)


def results_of(loop: Any) -> Any:
    """Return what was logged in a loop for evaluation; ``None`` for that of predictions."""
    return loop._results


def set_epoch_value(result: Any, value: Tensor | None) -> None:
    """Give a logged value what it is at the end of an epoch; ``None``: it is to be computed."""
    result._computed = value


def predictions_and_indices(loop: Any, dataloader_idx: int) -> list[list[Any]]:
    """Return the lists to which a loop adds a prediction and its indices; none of one that does not predict."""
    if not hasattr(loop, "_predictions"):
        return []
    return [loop._predictions[dataloader_idx], loop.epoch_batch_indices[dataloader_idx]]


def mark_as_ended(trainer: Any, ended: list[bool]) -> None:
    """Tell the fit loop which of its loaders have ended before in this epoch, and began again."""
    iterator = trainer.fit_loop._combined_loader._iterator
    iterator._consumed = [a or b for a, b in zip(iterator._consumed, ended, strict=True)]


@contextmanager
def weights_as_they_are(trainer: Any) -> Iterator[None]:
    """Have ``validate`` and ``test`` without a ``ckpt_path`` take the weights that the model has."""
    # Under Slurm Lightning loads the newest ``hpc_ckpt_<n>.ckpt`` of the run's folder instead.
    connector = trainer._checkpoint_connector
    connector._user_managed, connector._ckpt_path = True, None
    try:
        yield
    finally:
        connector._user_managed = False
