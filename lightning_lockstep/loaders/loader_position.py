"""A resumed run is the run that was never stopped: next batch of data, random numbers, schedulers, validation.

Where in an epoch it goes on is decided in :mod:`~lightning_lockstep.loaders.resume_point`. Lightning's checkpoints
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
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_lockstep._lightning import Callback, CombinedLoader, TrainerFn, _set_sampler_epoch, sized_len
from lightning_lockstep._text import counted
from lightning_lockstep._trainer import asks_for_training_loader, limited_batches
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.loaders.global_order import (
    GlobalBatches,
    Share,
    divided,
    generators_of,
    parts_of,
    seed_of_run,
)
from lightning_lockstep.loaders.resume_point import ResumePoint, go_on, settle_counters
from lightning_lockstep.steps.patching import (
    STATEFUL,
    LoaderAround,
    batch_size_of,
    do_nothing,
    loader_with,
    put_in_place,
)
from lightning_lockstep.steps.snapshot import (
    gpu_state,
    kept_generators,
    random_states,
    seed_generators,
    set_random_states,
)

_log = logging.getLogger(__name__)
_KEY = "lockstep_loader_position"
_NOTHING = object()


class LoaderPosition(Callback):
    """Saves where the training loaders of every rank are, and what Lightning leaves out, and continues there."""

    def __init__(self, *, divides: bool = False) -> None:
        # `divides`: if the strategy is none of this package, a single process gets the order of several ranks.
        self._divides = divides
        self._trainer: Any = None
        self._resume: _Resume | None = None
        self._steps_plateaus, self._begins_again = False, False
        self._lengths: list[int | None] | None = None  # of the loaders in the epoch before

    @classmethod
    def attach(cls, trainer: Any) -> None:
        """Give a Trainer this callback, unless it has it. Ranks: all ranks; nothing is sent."""
        if not any(isinstance(callback, cls) for callback in trainer.callbacks):
            trainer.callbacks.append(cls())  # at the end: Lightning may be going through the list

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Be asked for each training loader, after what the strategy makes of it."""
        self._trainer, self._resume, self._steps_plateaus = trainer, None, False
        self._begins_again, self._lengths = False, None
        process = trainer.strategy.process_dataloader
        if stage == TrainerFn.FITTING and getattr(process, "func", None) != self._process_dataloader:
            # A partial, which a pickle of the Trainer can hold.
            put_in_place(trainer.strategy, "process_dataloader", partial(self._process_dataloader, process))

    def _process_dataloader(self, process: Callable[[object], object], loader: object) -> object:
        made, trainer = process(loader), self._trainer
        if asks_for_training_loader(trainer):
            if self._divides and not hasattr(trainer.strategy, "divides_loaders"):
                made = divided(made, Share(0, 1, True, trainer.accumulate_grad_batches))
            made = self._with_position(made)
            if self._resume is not None:
                self._resume.asked_for(made, trainer)
        return made

    def _with_position(self, loader: Any) -> Any:
        batches = getattr(loader, "batch_sampler", None)
        if _divided(loader) is not None:
            vars(loader).update(state_dict=dict, load_state_dict=do_nothing)
            return loader
        if _is_stateful(loader) or _resumable(loader) is not None:
            return loader
        has_index = not isinstance(getattr(loader, "dataset", None), IterableDataset) and batches is not None
        if getattr(type(loader), "__iter__", None) is not DataLoader.__iter__ or not has_index:
            return _Resumable(loader, self._trainer)
        resumable = _Resumable(batches, self._trainer)
        return loader_with(loader, batch_sampler=resumable, state_dict=dict, load_state_dict=do_nothing)

    # -- at a checkpoint --

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add where the loaders are. Ranks: all, together; one gather, none after an exception."""
        loaders = _loaders(trainer)
        if not loaders:
            return
        communicator, accumulated = current_communicator(), trainer.accumulate_grad_batches
        # After an exception the other ranks do not come here.
        alone = trainer.state.status == "interrupted"
        mine: dict[str, Any] = {
            "loaders": [_record(loader, trainer) for loader in loaders],
            # Dropout on this rank's GPU draws from its generator.
            "device": gpu_state(),
            # What schedulers, early stopping and checkpoints look at after the resume.
            "metrics": {} if alone else _metrics(trainer),
        }
        if not any("own" in one for one in mine["loaders"]):
            checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
        checkpoint[_KEY] = {
            "world_size": communicator.world_size,
            "accumulated": accumulated,
            "ranks": [mine] if alone else communicator.gather(mine),
        }

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take where the loaders were, and mend what Lightning is about to read about its loops."""
        if trainer.state.fn != TrainerFn.FITTING or "loops" not in checkpoint:
            return
        loops, saved = checkpoint["loops"]["fit_loop"], checkpoint.get(_KEY, {})
        accumulated = saved.get("accumulated", trainer.accumulate_grad_batches)
        point = settle_counters(loops, accumulated, saved.get("broken_off"))
        self._resume = _Resume(point, saved)
        # Lightning saves states of loaders of rank 0 alone.
        states = [one.get("own", {}) for one in self._resume.records]
        loops["state_dict"]["combined_loader"] = states if any(states) else []
        for loader in _loaders(trainer):  # made before the checkpoint was read, to count the steps of the fit
            self._resume.asked_for(loader, trainer)
            self._begins_again = True

    # -- in a run that is resumed --

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Go on with the random numbers and the metrics too."""
        resume, self._resume = self._resume, None
        if resume is None:
            return
        trainer.callback_metrics.update(resume.metrics)
        if resume.device is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.set_rng_state(resume.device)
        loaders = _loaders(trainer)
        self._lengths = [sized_len(loader) for loader in loaders]
        if self._begins_again:
            iter(trainer.fit_loop._data_fetcher)
        combined = trainer.fit_loop._combined_loader
        if resume.within_epoch and combined._mode == "max_size_cycle":
            for number, loader in enumerate(loaders):  # Lightning has not seen those that have ended.
                ended = (sized_len(loader) or math.inf) < resume.batches
                combined._iterator._consumed[number] |= ended
        if (resume.within_epoch or resume.point.no_batches_left) and resume.same_ranks:
            for loader, record in zip(loaders, resume.records, strict=False):
                set_random_states(record["now"], () if _divided(loader) else _generators(loader))
        batches = trainer.num_training_batches
        if resume.point.no_batches_left and batches != math.inf:  # perhaps fewer or more on other ranks
            progress = trainer.fit_loop.epoch_loop.batch_progress.current
            progress.ready = progress.started = progress.processed = progress.completed = batches
        self._steps_plateaus = bool(resume.metrics) or not resume.point.no_batches_left
        go_on(trainer, resume.point)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Let an epoch have its own length: a data set may have grown, or other batches were resumed before."""
        loop, combined = trainer.fit_loop, trainer.fit_loop._combined_loader
        for parts in filter(None, map(_divided, combined.flattened)):
            if parts.drawn_for != parts.epoch:  # workers may have asked for the first batches already
                parts.draw()
        before = list(combined.limits or ())
        lengths = [sized_len(loader) for loader in combined.flattened]
        now = [math.inf if one is None else limited_batches(trainer, one) for one in lengths]
        if self._lengths is not None and self._lengths != lengths and before:
            validates_at_end = trainer.val_check_batch == loop.max_batches
            combined.limits = now
            loop.max_batches = (min if combined._mode == "min_size" else max)(now)
            trainer.val_check_batch = loop.max_batches if validates_at_end else trainer.val_check_batch
        self._lengths = lengths

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
        self._asked, self._communicator, ranks = 0, current_communicator(), saved.get("ranks", [])
        rank, world_size = self._communicator.rank, self._communicator.world_size
        # After an error one rank alone has saved.
        self.same_ranks = saved.get("world_size") == world_size == len(ranks)
        record = ranks[rank] if self.same_ranks else ranks[0] if ranks else {}
        # An order that all ranks share is drawn from the random state of any.
        shared = self.same_ranks or any(one["units"] for one in record.get("loaders", ()))
        self.records: list[dict[str, Any]] = record.get("loaders", []) if shared else []
        self.device = record.get("device") if self.same_ranks else None
        self.metrics: dict[str, Any] = record.get("metrics", {})

    def asked_for(self, loader: Any, trainer: Any) -> None:
        """Take in a loader that is about to begin an epoch, in Lightning's order."""
        number, self._asked = self._asked, self._asked + 1
        record = self.records[number % len(self.records)] if self.records else {}
        if (resumable := _resumable(loader)) is not None:
            # Workers ask for their first batches as soon as the iterator is made, before Lightning does this.
            _set_sampler_epoch(loader, self.point.epoch)
            resumable.resumes_at = self.batches, record.get("drawn_from") if self.within_epoch else None
        if self.within_epoch:
            if not self._go_on_with(loader, record, trainer) and self._communicator.is_main:
                _log.warning(
                    "The checkpoint does not have the position of a loader for"
                    f" {counted(self._communicator.world_size, 'rank')} with batches of {batch_size_of(loader)}: epoch"
                    f" {self.point.epoch} goes on at batch {self.batches} in another order, so some samples may be"
                    " used twice, and others not at all."
                )
        elif record and self.same_ranks:
            # The epoch draws its order from the same random state as without the stop.
            set_random_states(record["now"], _generators(loader))

    def _go_on_with(self, loader: Any, record: dict[str, Any], trainer: Any) -> bool:
        """Let a loader go on with the next sample of its epoch, and return whether it is certainly that one."""
        parts, unit = _divided(loader), record.get("units", {}).get(self.point.batches)
        known = self.same_ranks and record.get("samples") == batch_size_of(loader)
        if unit is None:  # the checkpoint knows its batches alone
            return known
        if parts is None:  # it knows the samples, and this loader is not divided by samples
            return False
        alone = len(self.records) == 1
        batches = parts.go_on_at(
            unit, self.point.epoch, record["drawn_from"], trainer.accumulate_grad_batches if alone else 1
        )
        if alone:
            self.batches = batches
            progress = trainer.fit_loop.epoch_loop.batch_progress.current
            progress.ready = progress.started = progress.processed = progress.completed = batches
        return bool(parts.order_checksum() == record["order"]) and (alone or known)


class _Resumable(LoaderAround):
    """Gives the batches of a loader, or of a batch sampler; in a resumed epoch it leaves out those that were seen."""

    drawn_from: list[Any] | None  # the random states when it began last
    # When it begins next: how many batches it leaves out, and the random states from which they were drawn.
    resumes_at: tuple[int, list[Any] | None]

    def __init__(self, loader: Any, trainer: Any) -> None:
        super().__init__(loader, _trainer=trainer, drawn_from=None, resumes_at=(0, None))

    # With these two Lightning lets the loader continue a resumed epoch by itself, and does not warn.
    state_dict: Any = staticmethod(dict)
    load_state_dict: Any = staticmethod(do_nothing)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # This runs when the first batch is asked for, which without workers is after the start of the training.
        (seen, states), self.resumes_at = self.resumes_at, (0, None)
        several, length = current_communicator().world_size > 1, sized_len(self._loader)
        if length and seen:  # next to a longer loader it may have begun several times
            seen = (seen - 1) % length + 1
        with kept_generators() if several or states else nullcontext():
            if states:
                set_random_states(states, _generators(self))
            elif several:  # programs divide orders that they expect to be the same on all ranks
                seed_generators(seed_of_run() + int(self._trainer.fit_loop.epoch_progress.current.processed))
            self.drawn_from = random_states(_generators(self))
            batches = iter(self._loader)
            for _ in range(seen):
                next(batches, None)
            batch = next(batches, _NOTHING)  # with the first one an order is drawn
        if batch is not _NOTHING:
            yield batch
            yield from batches

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self._loader,)  # in another process it has nothing to resume


# -- What a loader is like --


def _loaders(trainer: Any) -> list[Any]:
    loaders = trainer.train_dataloader
    return [] if loaders is None else list(CombinedLoader(loaders).flattened)


def _resumable(loader: Any) -> _Resumable | None:
    """Return the loader, or its batch sampler, if it leaves out what was seen."""
    parts = loader, getattr(loader, "batch_sampler", None)
    return next((part for part in parts if isinstance(part, _Resumable)), None)


def _divided(loader: Any) -> Any:
    """Return what gives a rank its part of a loader, if it can go on at any unit."""
    parts = parts_of(loader)
    return parts if isinstance(parts, GlobalBatches) else None


def _is_stateful(loader: Any) -> bool:
    return all(hasattr(loader, name) for name in STATEFUL)


def _record(loader: Any, trainer: Any) -> dict[str, Any]:
    parts, accumulated = _divided(loader), trainer.accumulate_grad_batches
    found: dict[str, Any] = {
        "samples": batch_size_of(loader),
        "now": random_states(() if parts else _generators(loader)),
        "units": {},
    }
    if parts is None:
        found["drawn_from"] = getattr(_resumable(loader), "drawn_from", None)
        if _is_stateful(loader) and (own := loader.state_dict()):
            found["own"] = own
        return found
    # Also at each micro-batch of an optimizer step that is not complete, because that step is repeated.
    progress, length = trainer.fit_loop.epoch_loop.batch_progress.current, max(len(parts), 1)
    numbers = range(min(progress.processed, progress.ready) // accumulated * accumulated, progress.ready + 1)
    # Next to a longer loader it may have begun several times.
    units = {
        number: parts.position(number if number <= length else (number - 1) % length + 1)
        for number in numbers
    }
    return found | {"units": units, "order": parts.order_checksum(), "drawn_from": parts.drawn_from}


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the generators of a loader, of its samplers and of a stream."""
    dataset = getattr(loader, "dataset", None)
    holders = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    return generators_of(*holders, *([dataset] if isinstance(dataset, IterableDataset) else []))
