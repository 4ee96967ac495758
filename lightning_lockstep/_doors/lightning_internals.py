"""What rooms still take from here of Lightning's private names; it goes with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

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


def predictions_and_indices(loop: Any, dataloader_idx: int) -> list[list[Any]]:
    """Return the lists to which a loop adds a prediction and its indices; none of one that does not predict."""
    if not hasattr(loop, "_predictions"):
        return []
    return [loop._predictions[dataloader_idx], loop.epoch_batch_indices[dataloader_idx]]


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
