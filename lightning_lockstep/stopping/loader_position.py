"""A resumed run is the run that was never stopped: next batch of data, random numbers, schedulers, validation.

Where in an epoch it goes on is decided in :mod:`~lightning_lockstep.stopping.resume_point`. Lightning's checkpoints
count the batches of an epoch, and a resumed run counts on from there, but its loaders begin their epoch again: batches
are seen twice and the last ones never. Here every training loader begins where the checkpoint was made:

- a DataLoader over data with an index: what was seen is left out by its batch sampler, and is not loaded;
- a loader that saves its own state, and has a length: Lightning gives it that state, here on each rank its own;
- any other, such as a stream: it is read from the start of the epoch to the place, because nothing else knows it.

An order that was drawn from random numbers is drawn from the same state again, which the checkpoint holds. A loader
that is divided here goes on at the very sample, on another number of ranks too; for others a warning says that the
order is another one then.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import random
import warnings
from collections.abc import Iterator, Sequence
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
from lightning_lockstep.steps.patching import STATEFUL, LoaderAround, length_of, put_in_place
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
        if isinstance(loader, _Resumable) or _saves_its_state(loader):
            return loader
        if getattr(type(loader), "__iter__", None) is not DataLoader.__iter__ or not has_index:
            return _Resumable(loader, self)
        if isinstance(batches, _Resumable):
            return loader
        made = copy.copy(loader)  # the program may use its own for something else
        # DataLoader refuses this by its own __setattr__, since it could not check what it gets.
        vars(made)["batch_sampler"] = _Resumable(batches, self)
        return made

    # -- at a checkpoint --

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add where the loaders are. Ranks: all, together; one gather, none after an exception."""
        loaders = _loaders(trainer)
        if not loaders:
            return
        communicator, accumulated = current_communicator(), trainer.accumulate_grad_batches
        progress = trainer.fit_loop.epoch_loop.batch_progress
        seen: dict[int, int | None] = {}
        if (parts := _parts(loaders)) is not None:
            # Also before each micro-batch of an optimizer step that is not complete, which comes again.
            ready = progress.current.ready
            numbers = range(ready // accumulated * accumulated, ready + 1)
            seen = {number: parts.samples_before(number) for number in numbers}
        savers = [loader for loader in loaders if _saves_its_state(loader)]
        # Where a limit has ended the epoch they are in the middle of theirs, and the next epoch begins anew.
        cut = progress.is_last_batch and any(progress.current.ready < len(loader) for loader in savers)
        # After an exception the other ranks do not come here.
        alone = trainer.state.status == "interrupted"
        mine = {
            "loaders": [_described(loader) for loader in loaders],
            "states": [] if cut else [loader.state_dict() for loader in savers],
            "device": _states(_of_device()),
            # What schedulers, early stopping and checkpoints look at after the resume.
            "metrics": {} if alone else _metrics(trainer),
        }
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
        if point.no_batches_left:
            loops["state_dict"]["combined_loader"] = []
        elif self._resume.states is not None:  # Lightning has those of rank 0, for every rank
            loops["state_dict"]["combined_loader"] = self._resume.states

    # -- in a run that is resumed --

    def begin(self, asks: Any) -> tuple[int, dict[str, Any] | None]:
        """Return how many batches of its epoch a loader leaves out now, and what was saved of it, if any."""
        resume, loaders = self._resume, _loaders(self._trainer)
        number = next((i for i, loader in enumerate(loaders) if _keeper(loader) is asks), None)
        if resume is None or number is None or asks in resume.begun:
            return 0, None
        # Workers ask for their first batches as soon as the iterator is made, before Lightning does this.
        _set_sampler_epoch(loaders[number], resume.epoch)
        if not resume.within_epoch:
            return 0, None
        resume.settle(self._trainer, loaders)
        records = resume.of_order
        return resume.batches, records[number] if number < len(records) else None

    def has_begun(self, asks: Any) -> tuple[int, int]:
        """Note that a loader gives its first batch; return the running epoch, and how many of it were taken."""
        if self._resume is not None:
            self._resume.begun.append(asks)  # if it is asked for its batches again, it has ended
        loop = self._trainer.fit_loop
        return int(loop.epoch_progress.current.processed), int(loop.epoch_loop.batch_progress.current.ready)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Go on with the random numbers and the metrics too."""
        resume, self._resume = self._resume, None
        if resume is None:
            return
        trainer.callback_metrics.update(resume.metrics)
        _set_states(_of_device(), resume.device)
        loaders = _loaders(trainer)
        if resume.within_epoch:
            resume.settle(trainer, loaders)
            combined = trainer.fit_loop._combined_loader
            if combined._mode == "max_size_cycle":
                # An epoch ends once each has ended; Lightning has not seen those that had.
                for number, loader in enumerate(loaders):
                    length, records = length_of(loader), resume.records[number : number + 1]
                    ended = (
                        any(one["began_at"] > 0 for one in records) or (length or math.inf) < resume.batches
                    )
                    combined._iterator._consumed[number] |= ended
            if resume.records:
                _set_states(_GLOBAL, resume.records[0]["now"])
            _reset_quietly(trainer.fit_loop.epoch_loop)
        elif resume.point.no_batches_left:
            for loader, record in zip(loaders, resume.records, strict=False):
                _set_states([*_GLOBAL, *_generators(loader)], record["now"])
        self._steps_plateaus = bool(resume.metrics) or not resume.point.no_batches_left
        go_on(trainer, resume.point)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Have Lightning step the ``ReduceLROnPlateau`` of the epoch that was resumed, which it leaves out."""
        if self._steps_plateaus:
            self._steps_plateaus = False
            trainer.fit_loop._restarting = False  # by this Lightning leaves it out


def _metrics(trainer: Any) -> dict[str, Any]:
    """Return the metrics that callbacks see. Ranks: all, together; values may be reduced."""
    # Within a validation the public ones would be computed before its end.
    metrics = trainer.callback_metrics if trainer.training else trainer._logger_connector._callback_metrics
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in metrics.items()}


def _reset_quietly(loop: Any) -> None:
    """Have the next reset of an epoch loop not warn that a loader which saves no state begins again: it does not."""
    reset = loop.reset

    def quiet() -> None:
        undo()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch")
            reset()

    undo = put_in_place(loop, "reset", quiet)


class _Resume:
    """What a checkpoint says of the epoch in which, or after which, it was made."""

    def __init__(self, point: ResumePoint, saved: dict[str, Any]) -> None:
        self.point, self.epoch = point, point.epoch
        self.within_epoch = point.begun and not point.no_batches_left  # where the loaders go on
        self.batches = point.batches if self.within_epoch else 0  # that they leave out
        self.begun: list[Any] = []
        self._settled, self._asked, self._saved = False, 0, saved
        communicator, ranks = current_communicator(), saved.get("ranks", [])
        self._rank, self._ranks = communicator.rank, communicator.world_size
        alike = saved.get("world_size") == self._ranks and self._rank < len(ranks)
        mine, any_rank = ranks[self._rank] if alike else {}, ranks[0] if ranks else {}
        self.records: list[dict[str, Any]] = mine.get("loaders", [])  # of this rank's loaders
        self.states, self.device = mine.get("states"), mine.get("device")
        self.metrics: dict[str, Any] = (mine or any_rank).get("metrics", {})
        self._lacks_ranks = len(ranks) != self._ranks  # one alone has saved after an error
        # An order that all ranks share is drawn from the random state of any.
        self.of_order = self.records or (any_rank.get("loaders", []) if saved.get("seen") else [])

    def asked_for(self, loader: Any) -> None:
        """Take in a loader that is about to begin an epoch."""
        if self.records and not self.within_epoch:
            # The epoch draws its order from where it would have been drawn.
            record = self.records[self._asked % len(self.records)]  # Lightning asks for them in their order
            _set_states([*_GLOBAL, *_generators(loader)], record["now"])
            self._asked += 1

    def settle(self, trainer: Any, loaders: list[Any]) -> None:
        """Find the batch at which the epoch goes on, the same on all ranks, and say if the order is another one."""
        if self._settled:
            return
        self._settled, parts = True, _parts(loaders)
        sample = self._saved.get("seen", {}).get(self.batches)
        if parts is not None and sample is not None and self._saved["order"] == _order(parts):
            self.batches = parts.go_on_at(sample, self.epoch)
            progress = trainer.fit_loop.epoch_loop.batch_progress.current
            progress.ready = progress.started = progress.processed = progress.completed = self.batches
            return
        sizes = [_batch_size(loader) for loader in loaders]
        same = [record["samples"] for record in self.records] == sizes and not self._lacks_ranks
        if self._rank == 0 and not (same and (parts is None or sample is None)):
            _log.warning(
                f"The checkpoint does not have the positions of {counted(self._ranks, 'rank')} with batches of"
                f" {' and '.join(map(str, sizes))}: epoch {self.epoch} goes on at batch {self.batches} in another"
                " order, so samples may come again, and others not at all."
            )


class _Resumable(LoaderAround):
    """Gives the batches of a loader, or of a batch sampler; in a resumed epoch it leaves out those that were seen."""

    _epoch: int
    _given: int  # batches of the epoch, which it may begin several times next to a longer loader
    began_at: int  # how many of these it had given when it began last
    drawn_from: list[Any] | None  # states of the generators then

    def __init__(self, loader: Any, position: LoaderPosition) -> None:
        super().__init__(loader, _position=position, drawn_from=None, began_at=0, _given=0, _epoch=-1)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._behind(*self._position.begin(self))

    def _behind(self, seen: int, record: dict[str, Any] | None) -> Iterator[Any]:
        # This runs when the first batch is asked for, which without workers is after the start of the training.
        epoch, taken = self._position.has_begun(self)
        self.began_at = self._given if epoch == self._epoch and taken > 0 else 0
        self._epoch, generators, outside = epoch, [*_GLOBAL, *_generators(self)], _states(_GLOBAL)
        if record is not None and record["drawn_from"] is not None:
            self.began_at = record["began_at"]
            _set_states(generators, record["drawn_from"])
        self.drawn_from, self._given = _states(generators), max(seen, self.began_at)
        batches = iter(self._loader)
        for _ in range(seen - self.began_at):
            next(batches, None)
        batch = next(batches, _NOTHING)  # with the first one an order is drawn
        if record is not None:
            _set_states(_GLOBAL, outside)
        while batch is not _NOTHING:
            self._given += 1
            yield batch
            batch = next(batches, _NOTHING)

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self._loader,)  # in another process it has nothing to resume


# -- What a loader is like --


def _loaders(trainer: Any) -> list[Any]:
    loaders = trainer.train_dataloader
    return [] if loaders is None else list(CombinedLoader(loaders).flattened)


def _saves_its_state(loader: Any) -> bool:
    """Return whether Lightning lets this loader go on by itself, at the right batch."""
    # Without a length Lightning asks for one batch ahead, and a state is saved behind that. torchdata's loader keeps
    # a mere number of batches where its data set has no state, and no random state.
    has_state = all(inspect.getattr_static(loader, name, None) is not None for name in STATEFUL)
    counts_only = isinstance(loader, DataLoader) and not hasattr(loader.dataset, STATEFUL[0])
    return has_state and length_of(loader) is not None and not counts_only


def _keeper(loader: Any) -> Any:
    """Return what keeps how an epoch of a loader began."""
    return loader if isinstance(loader, _Resumable) else getattr(loader, "batch_sampler", None)


def _parts(loaders: list[Any]) -> Any:
    """Return what divides the only loader by samples."""
    return parts_of(loaders[0]) if len(loaders) == 1 and not _saves_its_state(loaders[0]) else None


def _order(parts: Any) -> list[Any]:
    """Return what an order of samples that all ranks share depends on, next to the epoch."""
    return [parts.sampler.seed, parts.sampler.shuffle]


def _batch_size(loader: Any) -> int | None:
    size = getattr(loader, "batch_size", None)
    return size if isinstance(size, int) else None


def _described(loader: Any) -> dict[str, Any]:
    keeper = _keeper(loader)
    return {
        "samples": _batch_size(loader),
        "began_at": getattr(keeper, "began_at", 0),
        "drawn_from": getattr(keeper, "drawn_from", None),
        "now": _states([*_GLOBAL, *_generators(loader)]),
    }


# -- Random states, as data that can be loaded without running code --

# What is drawn from without naming a generator.
_GLOBAL = (torch.default_generator, random, numpy.random)


def _of_device() -> list[Any]:
    """Return the generator of this rank's GPU, from which dropout there draws."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return [torch.cuda.default_generators[torch.cuda.current_device()]]


def _generators(loader: Any) -> list[Any]:
    """Return the random generators of a loader, of its samplers and of a stream, whichever library made them."""
    dataset = getattr(loader, "dataset", None)
    holders = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    holders += [dataset] if isinstance(dataset, IterableDataset) else []
    found: list[Any] = []
    for holder in holders:  # grows meanwhile
        for name, value in getattr(holder, "__dict__", {}).items():
            # Lightning divides a sampler of one's own as the data set of a sampler; ours and torch-xla's wrap one.
            divides = isinstance(holder, DistributedSampler) and name == "dataset" and value is not dataset
            is_holder = isinstance(value, Sampler) or divides or name == "_loader"
            into = holders if is_holder else found if _is_generator(value) else None
            if into is not None and not any(value is one for one in into):
                into.append(value)
    return found


def _is_generator(value: Any) -> bool:
    of_numpy = hasattr(value, "bit_generator") or type(value).__name__ == "RandomState"
    of_python = isinstance(value, random.Random) and not isinstance(value, random.SystemRandom)
    return isinstance(value, torch.Generator) or of_numpy or of_python


def _states(generators: Sequence[Any]) -> list[Any]:
    return [_state_of(one) for one in generators]


def _state_of(generator: Any) -> Any:
    if hasattr(generator, "getstate"):  # Python's
        return generator.getstate()
    # torch's, and numpy's of both generations
    state = generator.get_state() if hasattr(generator, "get_state") else generator.bit_generator.state
    return apply_to_collection(state, numpy.ndarray, numpy.ndarray.tolist)


def _set_states(generators: Sequence[Any], states: Sequence[Any] | None) -> None:
    for one, state in zip(generators, states or (), strict=False):
        if hasattr(one, "setstate"):
            one.setstate(state)
        elif hasattr(one, "set_state"):
            one.set_state(state)
        else:
            one.bit_generator.state = state
