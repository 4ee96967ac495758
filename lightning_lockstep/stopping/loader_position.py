"""A resumed run is the run that was never stopped: next batch of data, random numbers, schedulers, validation.

Where in an epoch it goes on is decided in :mod:`~lightning_lockstep.stopping.resume_point`. Lightning's checkpoints
count the batches of an epoch, and a resumed run counts on from there, but its loaders begin their epoch again: batches
are seen twice and the last ones never. Here every training loader begins where the checkpoint was made:

- a DataLoader over data with an index: what was seen is left out by its batch sampler, and is not loaded;
- any other, such as a stream or a loader with a state of its own: it is read from the start of the epoch to the place.

An order that was drawn from random numbers is drawn from the same state again, which the checkpoint holds. A loader
that is divided by samples goes on at the very sample, on another number of ranks too; for others a warning then says
that the order differs.
"""

from __future__ import annotations

import copy
import logging
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from lightning_lockstep._lightning import Callback, CombinedLoader, TrainerFn, _set_sampler_epoch
from lightning_lockstep._text import counted
from lightning_lockstep._trainer import asks_for_training_loader
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.loaders.global_order import parts_of
from lightning_lockstep.steps.patching import (
    LoaderAround,
    batch_size_of,
    length_of,
    loader_with,
    put_in_place,
)
from lightning_lockstep.stopping.resume_point import ResumePoint, go_on, settle_counters

_log = logging.getLogger(__name__)
_KEY = "lockstep_loader_position"
_NOTHING = object()


class LoaderPosition(Callback):
    """Saves where the training loaders of every rank are, and what Lightning leaves out, and continues there."""

    def __init__(self) -> None:
        self._trainer: Any = None
        self._resume: _Resume | None = None
        self._steps_plateaus = False

    @classmethod
    def attach(cls, trainer: Any) -> None:
        """Give a Trainer this callback, unless it has it. Ranks: all ranks; nothing is sent."""
        if not any(isinstance(callback, cls) for callback in trainer.callbacks):
            trainer.callbacks.append(cls())  # at the end: Lightning may be going through the list

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Be asked for each training loader, after what the strategy makes of it."""
        self._trainer, self._resume, self._steps_plateaus = trainer, None, False
        process = trainer.strategy.process_dataloader
        if stage != TrainerFn.FITTING or getattr(process, "position", None) is self:
            return

        def process_dataloader(loader: object) -> object:
            made = process(loader)
            if not asks_for_training_loader(trainer):
                return made
            made = self._with_position(made)
            if self._resume is not None:
                self._resume.asked_for(made)
            return made

        process_dataloader.position = self  # type: ignore[attr-defined]
        put_in_place(trainer.strategy, "process_dataloader", process_dataloader)

    def _with_position(self, loader: Any) -> Any:
        batches = getattr(loader, "batch_sampler", None)
        has_index = not isinstance(getattr(loader, "dataset", None), IterableDataset) and batches is not None
        if isinstance(loader, _Resumable) or (has_index and isinstance(batches, _Resumable)):
            return loader
        if getattr(type(loader), "__iter__", None) is not DataLoader.__iter__ or not has_index:
            return _Resumable(loader, self)
        resumable = _Resumable(batches, self)
        return loader_with(loader, batch_sampler=resumable, state_dict=dict, load_state_dict=_nothing)

    # -- at a checkpoint --

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add where the loaders are. Ranks: all, together; one gather, none after an exception."""
        loaders = _loaders(trainer)
        if not loaders:
            return
        communicator, accumulated = current_communicator(), trainer.accumulate_grad_batches
        seen: dict[int, int | None] = {}
        if (parts := _parts(loaders)) is not None:
            # Also at each micro-batch of an optimizer step that is not complete, because that step is repeated.
            ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            numbers = range(ready // accumulated * accumulated, ready + 1)
            seen = {number: parts.samples_before(number) for number in numbers}
        # After an exception the other ranks do not come here.
        alone = trainer.state.status == "interrupted"
        mine = {
            "loaders": [
                {
                    "samples": batch_size_of(loader),
                    "drawn_from": getattr(_keeper(loader), "drawn_from", None),
                    "now": _states(loader),
                }
                for loader in loaders
            ],
            # Dropout on this rank's GPU draws from its generator.
            "device": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
            # What schedulers, early stopping and checkpoints look at after the resume.
            "metrics": {} if alone else _metrics(trainer),
        }
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
        checkpoint[_KEY] = {
            "world_size": communicator.world_size,
            "accumulated": accumulated,
            "order": None if parts is None else _order(parts),
            "seen": seen,
            "ranks": [mine] if alone else communicator.gather(mine),
        }

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take where the loaders were, and mend what Lightning is about to read about its loops."""
        if trainer.state.fn != TrainerFn.FITTING or "loops" not in checkpoint:
            return
        loops, saved = checkpoint["loops"]["fit_loop"], checkpoint.get(_KEY, {})
        point = settle_counters(loops, saved.get("accumulated", trainer.accumulate_grad_batches))
        self._resume = _Resume(point, saved)
        loops["state_dict"]["combined_loader"] = []  # Other runs save states of loaders, of rank 0 alone.

    # -- in a run that is resumed --

    def begin(self, asks: Any) -> tuple[int, list[Any] | None]:
        """Return how many batches of its epoch a loader leaves out now, and the random state that it was drawn from."""
        resume, loaders = self._resume, _loaders(self._trainer)
        number = next((i for i, loader in enumerate(loaders) if _keeper(loader) is asks), None)
        if resume is None or number is None or asks in resume.begun:
            return 0, None
        # Workers ask for their first batches as soon as the iterator is made, before Lightning does this.
        _set_sampler_epoch(loaders[number], resume.point.epoch)
        if not resume.within_epoch:
            return 0, None
        resume.settle(self._trainer, loaders)
        record = resume.records[number] if number < len(resume.records) else {}
        return resume.batches, record.get("drawn_from")

    def has_begun(self, asks: Any) -> None:
        """Note that a loader gives its first batch: if it is asked for its batches again, it has ended."""
        if self._resume is not None:
            self._resume.begun.append(asks)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Go on with the random numbers and the metrics too."""
        resume, self._resume = self._resume, None
        if resume is None:
            return
        trainer.callback_metrics.update(resume.metrics)
        if resume.device is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.set_rng_state(resume.device)
        loaders = _loaders(trainer)
        if resume.within_epoch:
            resume.settle(trainer, loaders)
            combined = trainer.fit_loop._combined_loader
            if combined._mode == "max_size_cycle":
                for number, loader in enumerate(loaders):  # Lightning has not seen those that have ended.
                    ended = (length_of(loader) or math.inf) < resume.batches
                    combined._iterator._consumed[number] |= ended
        if (resume.within_epoch or resume.point.no_batches_left) and resume.same_ranks:
            for loader, record in zip(loaders, resume.records, strict=False):
                _set_states(record["now"], loader)
        self._steps_plateaus = bool(resume.metrics) or not resume.point.no_batches_left
        go_on(trainer, resume.point)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Have Lightning step the ``ReduceLROnPlateau`` of the epoch that was resumed, which it leaves out."""
        if self._steps_plateaus:
            self._steps_plateaus = False
            trainer.fit_loop._restarting = False  # while it is set, Lightning leaves it out


def _metrics(trainer: Any) -> dict[str, Any]:
    """Return the metrics that callbacks see. Ranks: all, together; values may be reduced."""
    # Within a validation the public ones would be computed before its end.
    metrics = trainer.callback_metrics if trainer.training else trainer._logger_connector._callback_metrics
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in metrics.items()}


class _Resume:
    """What a checkpoint says of the epoch in which, or after which, it was made."""

    def __init__(self, point: ResumePoint, saved: dict[str, Any]) -> None:
        self.point = point
        self.within_epoch = point.begun and not point.no_batches_left  # where the loaders go on
        self.batches = point.batches if self.within_epoch else 0  # that they leave out
        self.begun: list[Any] = []
        self._settled, self._asked, self._saved = False, 0, saved
        self._communicator, ranks = current_communicator(), saved.get("ranks", [])
        rank, world_size = self._communicator.rank, self._communicator.world_size
        # After an error one rank alone has saved.
        self.same_ranks = saved.get("world_size") == world_size == len(ranks)
        record = ranks[rank] if self.same_ranks else ranks[0] if ranks else {}
        # An order that all ranks share is drawn from the random state of any.
        shared = self.same_ranks or bool(saved.get("seen"))
        self.records: list[dict[str, Any]] = record.get("loaders", []) if shared else []
        self.device = record.get("device") if self.same_ranks else None
        self.metrics: dict[str, Any] = record.get("metrics", {})

    def asked_for(self, loader: Any) -> None:
        """Take in a loader that is about to begin an epoch."""
        if self.records and self.same_ranks and not self.within_epoch:
            # The epoch draws its order from the same random state as without the stop.
            record = self.records[self._asked % len(self.records)]  # Lightning asks for them in their order
            _set_states(record["now"], loader)
            self._asked += 1

    def settle(self, trainer: Any, loaders: list[Any]) -> None:
        """Find the batch at which the epoch goes on, the same on all ranks, and say if the order is another one."""
        if self._settled:
            return
        self._settled, parts = True, _parts(loaders)
        sample = self._saved.get("seen", {}).get(self.batches)
        if parts is not None and sample is not None and self._saved["order"] == _order(parts):
            self.batches = parts.go_on_at(sample, self.point.epoch)
            progress = trainer.fit_loop.epoch_loop.batch_progress.current
            progress.ready = progress.started = progress.processed = progress.completed = self.batches
            return
        sizes = [batch_size_of(loader) for loader in loaders]
        known = self.same_ranks and (parts is None or sample is None)
        if known and [record["samples"] for record in self.records] == sizes:
            return
        if self._communicator.is_main:
            _log.warning(
                f"The checkpoint does not have the positions of {counted(self._communicator.world_size, 'rank')} with"
                f" batches of {' and '.join(map(str, sizes))}: epoch {self.point.epoch} goes on at batch"
                f" {self.batches} in another order, so some samples may come again, and others not at all."
            )


def _nothing(state: Any) -> None:
    """Stand for a method that loads a state."""


class _Resumable(LoaderAround):
    """Gives the batches of a loader, or of a batch sampler; in a resumed epoch it leaves out those that were seen."""

    drawn_from: list[Any] | None  # the random state when it began last

    def __init__(self, loader: Any, position: LoaderPosition) -> None:
        super().__init__(loader, _position=position, drawn_from=None)

    # With these two Lightning lets the loader continue a resumed epoch by itself, and does not warn.
    state_dict: Any = staticmethod(dict)
    load_state_dict: Any = staticmethod(_nothing)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._behind(*self._position.begin(self))

    def _behind(self, seen: int, drawn_from: list[Any] | None) -> Iterator[Any]:
        # This runs when the first batch is asked for, which without workers is after the start of the training.
        self._position.has_begun(self)
        outside = _states()
        if drawn_from is not None:
            _set_states(drawn_from, self)
        self.drawn_from, length = _states(self), length_of(self._loader)
        if length and seen:  # next to a longer loader it may have begun several times
            seen = (seen - 1) % length + 1
        batches = iter(self._loader)
        for _ in range(seen):
            next(batches, None)
        batch = next(batches, _NOTHING)  # with the first one an order is drawn
        if drawn_from is not None:
            _set_states(outside)
        if batch is not _NOTHING:
            yield batch
            yield from batches

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self._loader,)  # in another process it has nothing to resume


# -- What a loader is like --


def _loaders(trainer: Any) -> list[Any]:
    loaders = trainer.train_dataloader
    return [] if loaders is None else list(CombinedLoader(loaders).flattened)


def _keeper(loader: Any) -> Any:
    """Return what keeps how an epoch of a loader began."""
    return loader if isinstance(loader, _Resumable) else getattr(loader, "batch_sampler", None)


def _parts(loaders: list[Any]) -> Any:
    """Return what divides the only loader by samples, if it can go on at any."""
    parts = parts_of(loaders[0]) if len(loaders) == 1 else None
    return parts if hasattr(parts, "go_on_at") else None


def _order(parts: Any) -> list[Any]:
    """Return what an order of samples that all ranks share depends on, next to the epoch."""
    return [parts.sampler.seed, parts.sampler.shuffle]


# -- Random states, as data that can be loaded without running code --


def _states(loader: Any = None) -> list[Any]:
    """Return the states of what is drawn from without naming a generator, and of the generators of a loader."""
    of_numpy = apply_to_collection(numpy.random.get_state(), numpy.ndarray, numpy.ndarray.tolist)
    own = [generator.get_state() for generator in _generators(loader)]
    return [torch.get_rng_state(), random.getstate(), of_numpy, *own]


def _set_states(states: list[Any], loader: Any = None) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])
    for generator, state in zip(_generators(loader), states[3:], strict=False):
        generator.set_state(state)


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the generators of a loader, of its samplers and of a stream."""
    dataset = getattr(loader, "dataset", None)
    holders = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    holders += [dataset] if isinstance(dataset, IterableDataset) else []
    found: list[Any] = []
    for holder in holders:  # grows meanwhile
        for name, value in getattr(holder, "__dict__", {}).items():
            # Lightning makes a user's sampler the data set of a DistributedSampler; ours and torch-xla's wrap it.
            divides = isinstance(holder, DistributedSampler) and name == "dataset" and value is not dataset
            is_holder = isinstance(value, Sampler) or divides or name == "_loader"
            into = holders if is_holder else found if isinstance(value, torch.Generator) else None
            if into is not None and not any(value is one for one in into):
                into.append(value)
    return found
