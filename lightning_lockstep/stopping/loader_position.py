"""A resumed run is the run that was never stopped: next batch of data, random numbers, schedulers, validation.

Where in an epoch it goes on is decided in :mod:`~lightning_lockstep.stopping.resume_point`. Lightning's checkpoints
count the batches of an epoch, and a resumed run counts on from there, but its loaders begin their epoch again: batches
are seen twice and the last ones never. Here every training loader begins where the checkpoint was made, before its
first batch is asked for:

- a DataLoader over data with an index: what was seen is left out by its batch sampler, and is not loaded;
- a loader that saves its own state, and has a length: Lightning gives it that state, here on each rank its own;
- any other, such as a stream: it is read from the start of the epoch to the place, since nothing else knows it.

An order that was drawn from random numbers is drawn from the same state again, which the checkpoint holds. Where an
epoch cannot go on exactly (another number of ranks, a checkpoint without these states), it is said what is repeated.
"""

from __future__ import annotations

import copy
import inspect
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from numbers import Integral
from typing import Any

import numpy
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
)

from lightning_lockstep._doors.lightning import (
    Callback,
    CombinedLoader,
    StochasticWeightAveraging,
    TrainerFn,
    _set_sampler_epoch,
)
from lightning_lockstep._doors.lightning_internals import (
    asks_for_training_loader,
    combined_training_loader,
    go_on,
    mark_as_ended,
    metrics_of,
    step_plateaus_of_resumed_epoch,
)
from lightning_lockstep._text import counted
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.loaders.global_order import parts_of
from lightning_lockstep.steps.patching import STATEFUL, LoaderAround, length_of, put_in_place
from lightning_lockstep.stopping.resume_point import ResumePoint, settle_counters

_log = logging.getLogger(__name__)
_KEY = "lockstep_loader_position"
_NOTHING = object()


class LoaderPosition(Callback):
    """Saves where the training loaders of every rank are, and what Lightning leaves out, and continues there."""

    def __init__(self) -> None:
        self._trainer: Any = None
        self._resume: _Resume | None = None
        self._steps_plateaus = self._validates = False

    @classmethod
    def attach(cls, trainer: Any) -> None:
        """Give a Trainer this callback, unless it has it. Ranks: all ranks; nothing is sent."""
        if not any(isinstance(callback, cls) for callback in trainer.callbacks):
            trainer.callbacks.append(cls())  # at the end: Lightning may be going through the list

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Be asked for each training loader, after what the strategy makes of it."""
        self._trainer, self._resume = trainer, None
        self._steps_plateaus = self._validates = False
        process = trainer.strategy.process_dataloader
        if stage != TrainerFn.FITTING or getattr(process, "position", None) is self:
            return

        def process_dataloader(loader: object) -> object:
            made = process(loader)
            return self._positioned(made) if asks_for_training_loader(trainer) else made

        process_dataloader.position = self  # type: ignore[attr-defined]
        put_in_place(trainer.strategy, "process_dataloader", process_dataloader)

    def _positioned(self, loader: Any) -> Any:
        made = self._with_position(loader)
        if self._resume is not None:
            self._resume.asked_for(made)
        return made

    def _with_position(self, loader: Any) -> Any:
        if isinstance(loader, _ReplayedLoader) or _saves_its_state(loader):
            return loader
        if not _chooses_batches(loader):
            return _ReplayedLoader(loader, self)
        if isinstance(loader.batch_sampler, _ResumableBatches):
            return loader
        made = copy.copy(loader)  # the program may use its own for something else
        # DataLoader refuses this by its own __setattr__, since it could not check what it gets.
        vars(made)["batch_sampler"] = _ResumableBatches(loader.batch_sampler, self)
        return made

    # -- at a checkpoint --

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Note that a validation has begun."""
        self._validates = True

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Note that a validation has ended."""
        self._validates = False

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add where the loaders are. Ranks: all, together; one gather, none after an exception."""
        averaged = checkpoint.get("current_model_state")
        if averaged is not None and self._validates:
            # WeightAveraging has exchanged the two for the validation, and loads them as if it had not.
            checkpoint["current_model_state"], checkpoint["state_dict"] = checkpoint["state_dict"], averaged
        loaders = _loaders(trainer)
        if not loaders:
            return
        communicator = current_communicator()
        progress = trainer.fit_loop.epoch_loop.batch_progress
        described = [_described(loader) for loader in loaders]
        if len(loaders) == 1 and (parts := parts_of(loaders[0])) is not None:
            # Also before each micro-batch of an optimizer step that is not complete, which comes again.
            ready, accumulated = progress.current.ready, trainer.accumulate_grad_batches
            numbers = range(ready // accumulated * accumulated, ready + 1)
            described[0]["seen"] = {number: parts.samples_before(number) for number in numbers}
        savers = [loader for loader in loaders if _saves_its_state(loader)]
        # Where a limit has ended the epoch they are in the middle of theirs, and the next epoch begins anew.
        cut = progress.is_last_batch and any(progress.current.ready < len(loader) for loader in savers)
        # After an exception the other ranks do not come here.
        alone = trainer.state.status == "interrupted"
        mine = {
            "loaders": described,
            "states": [] if cut else [loader.state_dict() for loader in savers],
            "device": _states(_of_device()),
            # What schedulers, early stopping and checkpoints look at after the resume.
            "metrics": {} if alone else metrics_of(trainer),
        }
        ranks = [mine] if alone else communicator.gather(mine)
        checkpoint[_KEY] = {
            "world_size": communicator.world_size,
            "accumulated": trainer.accumulate_grad_batches,
            "ranks": ranks,
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
        resume.settle(self._trainer, loaders)
        # Workers ask for their first batches as soon as the iterator is made, before Lightning does this.
        _set_sampler_epoch(loaders[number], resume.epoch)
        saved = resume.within_epoch and number < len(resume.records)
        return resume.batches, resume.records[number] if saved else None

    def has_begun(self, asks: Any) -> None:
        """Note that a loader has begun; if it is asked for its batches again, it has ended."""
        if self._resume is not None:
            self._resume.begun.append(asks)

    def begins_again(self) -> bool:
        """Return whether a training loader that has ended begins again while another still has batches."""
        combined = combined_training_loader(self._trainer)
        return combined is not None and combined[1] == "max_size_cycle"

    def epoch_and_batch(self) -> tuple[int, int]:
        """Return the number of the running epoch, and how many batches of it were taken."""
        loop = self._trainer.fit_loop
        return int(loop.epoch_progress.current.processed), int(loop.epoch_loop.batch_progress.current.ready)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Go on with the random numbers and the metrics too; the loaders have begun. Ranks: all, together."""
        resume, self._resume = self._resume, None
        if resume is None:
            return
        trainer.callback_metrics.update(resume.metrics)
        _set_states(_of_device(), resume.device)
        loaders = _loaders(trainer)
        if resume.within_epoch:
            resume.settle(trainer, loaders)
            if self.begins_again():
                mark_as_ended(trainer, [_passes(one, resume.batches) > 1 for one in loaders])
            if resume.records:
                _set_states(_GLOBAL, resume.records[0]["now"])
            # Lightning takes every loader that saves no state for one that starts from the beginning.
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch")
        elif resume.point.no_batches_left:
            for loader, record in zip(loaders, resume.records, strict=False):
                _set_states([*_GLOBAL, *_generators(loader)], record["now"])
        self._steps_plateaus = bool(resume.metrics) or not resume.point.no_batches_left
        _resume_averaging(trainer, pl_module)
        go_on(trainer, resume.point)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Have Lightning step the ``ReduceLROnPlateau`` of the epoch that was resumed, which it leaves out."""
        if self._steps_plateaus:
            self._steps_plateaus = False
            step_plateaus_of_resumed_epoch(trainer)


class _Resume:
    """What a checkpoint says of the epoch in which, or after which, it was made."""

    def __init__(self, point: ResumePoint, saved: dict[str, Any]) -> None:
        self.point, self.epoch = point, point.epoch
        self.within_epoch = point.begun and not point.no_batches_left  # where the loaders go on
        self.batches = point.batches if self.within_epoch else 0  # that they leave out
        self.begun: list[Any] = []
        self._settled, self._asked = False, 0
        self._communicator = current_communicator()
        self._saved = {"world_size": self._communicator.world_size, "ranks": [], **saved}
        # Of each loader that Lightning has asked for: what it is like, on each rank.
        self._now: list[list[dict[str, Any]]] = []
        ranks, rank = self._saved["ranks"], self._communicator.rank
        alike = self._saved["world_size"] == self._communicator.world_size and rank < len(ranks)
        mine = ranks[rank] if alike else {}
        self.records: list[dict[str, Any]] = mine.get("loaders", [])  # of this rank's loaders
        self.states, self.device = mine.get("states"), mine.get("device")
        self.metrics: dict[str, Any] = (mine or (ranks[0] if ranks else {})).get("metrics", {})

    def asked_for(self, loader: Any) -> None:
        """Take in a loader that is about to begin. Ranks: all, together; one gather within an epoch."""
        if self.within_epoch:
            described = {**_nature(loader), "keeps_state": _saves_its_state(loader)}
            self._now.append(self._communicator.gather(described))
            return
        if self.records:
            # The epoch that begins draws its order from where it would have been drawn.
            record = self.records[self._asked % len(self.records)]  # Lightning asks for them in their order
            _set_states([*_GLOBAL, *_generators(loader)], record["now"])
        self._asked += 1

    def settle(self, trainer: Any, loaders: list[Any]) -> None:
        """Find the batch at which the epoch goes on, and say what it repeats; all ranks with the same facts."""
        if self._settled or not self.within_epoch:
            return
        self._settled = True
        now = self._now[-len(loaders) :]
        ranks = self._saved["ranks"]
        known = bool(ranks)
        then = [list(of_ranks) for of_ranks in zip(*(one["loaders"] for one in ranks), strict=False)] or now
        pairs = list(zip(then, now, strict=False))
        # One rank alone may have saved, after an error.
        missing = self._saved["world_size"] / max(len(ranks), 1) if known else 1
        seen = [int(_samples(a) * missing) * self.batches for a, _ in pairs]
        places = {divmod(s, _samples(b)) for s, (_, b) in zip(seen, pairs, strict=True)}
        parts = parts_of(loaders[0]) if len(loaders) == 1 == len(then) else None
        before = then[0][0].get("seen", {}).get(self.batches)
        if parts is not None and before is not None:
            places = {(parts.go_on_at(before, self.epoch), 0)}
        batches = {batch for batch, _ in places}
        keep_states = any(one["keeps_state"] for of_ranks in now for one in of_ranks)
        if len(batches) == 1 and batches != {self.batches} and not keep_states:
            # A batch of all ranks has another size.
            (self.batches,) = batches
            _count_batches(trainer, self.batches)
        again = max((rest for _, rest in places), default=0)
        orders = [{one["order"] for one in (*a, *b)} for a, b in pairs]
        goes_by_epoch = len(then) == len(now) and all(len(o) == 1 and None not in o for o in orders)
        alike = all([one["samples"] for one in a] == [one["samples"] for one in b] for a, b in pairs)
        if (known and goes_by_epoch and again == 0) or (known and alike) or not self._communicator.is_main:
            return
        if not known:
            how = "The checkpoint does not say how many ranks and which random numbers gave it the order of its epoch"
        elif len(ranks) < self._saved["world_size"]:
            how = "The checkpoint was made by one rank after an error, and knows nothing of the other ranks' data"
        else:
            how = f"The checkpoint is from {_division(then)}, this run has {_division(now)}"
        if goes_by_epoch and not known:
            what = "exactly if the number of ranks and the size of the batches are the same"
        elif goes_by_epoch:
            what = f"{counted(again, 'sample')} seen before come again"
        else:
            what = f"in another order, so up to {counted(max(seen), 'sample')} come again, and as many not at all"
        _log.warning("%s: epoch %d goes on at batch %d; %s.", how, self.epoch, self.batches, what)


def _samples(of_ranks: list[dict[str, Any]]) -> int:
    """Samples of a batch of all ranks."""
    return sum(one["samples"] or 1 for one in of_ranks)


def _division(loaders: list[list[dict[str, Any]]]) -> str:
    sizes = sorted({one["samples"] or 1 for of_ranks in loaders for one in of_ranks})
    return f"{counted(len(loaders[0]), 'rank')} with batches of {' and '.join(map(str, sizes))}"


def _count_batches(trainer: Any, batches: int) -> None:
    """Let the loop go on at another batch, where a batch of all ranks has another size."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    progress.ready = progress.started = progress.processed = progress.completed = batches


def _resume_averaging(trainer: Any, pl_module: Any) -> None:
    """Let Lightning's SWA that had begun go on, at the learning rates of the checkpoint."""
    # It makes its scheduler at the start of an epoch, which a fit that goes on within one does not come to, and the
    # scheduler changes the rates as it is made.
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    for one in trainer.callbacks:
        if not isinstance(one, StochasticWeightAveraging) or trainer.current_epoch > one.swa_end:
            continue
        if one.state_dict()["latest_update_epoch"] >= 0:
            rates = [group["lr"] for group in groups]
            one.on_train_epoch_start(trainer, pl_module)
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate


# -- Loaders that can begin within their epoch --


class _Resumable(LoaderAround):
    """Keeps how an epoch of a loader, or of a batch sampler, began."""

    # Whether a pass that begins in mid-epoch, where the loader has ended, is what a resumed run begins with.
    _resumes_in_last_pass = False

    _epoch: int
    passes: int  # how often it has begun in this epoch
    drawn_from: list[Any] | None  # states of the generators then

    def __init__(self, loader: Any, position: LoaderPosition) -> None:
        super().__init__(loader, _position=position, drawn_from=None, passes=0, _epoch=-1)

    def _begin(self, record: dict[str, Any] | None, make: Callable[[], Any]) -> Any:
        """Return what ``make`` makes, from the random state that the saved epoch began with, if there is one."""
        epoch, batch = self._position.epoch_and_batch()
        again = epoch == self._epoch and batch > 0
        self._epoch, self.passes = epoch, self.passes + 1 if again else 1
        generators = [*_GLOBAL, *_generators(self)]
        if record is None or record["drawn_from"] is None:
            if not again or self._resumes_in_last_pass:
                self.drawn_from = _states(generators)
            return make()
        self.drawn_from, before = record["drawn_from"], _states(_GLOBAL)
        try:
            _set_states(generators, self.drawn_from)
            return make()
        finally:
            _set_states(_GLOBAL, before)

    def __len__(self) -> int:
        return len(self._loader)


class _ResumableBatches(_Resumable):
    """A batch sampler that leaves out the batches that were seen, which are not loaded then."""

    _resumes_in_last_pass = True

    def __iter__(self) -> Iterator[Any]:
        return self._behind(*self._position.begin(self))

    def _behind(self, seen: int, record: dict[str, Any] | None) -> Iterator[Any]:
        # Runs once the first batch is asked for, which without workers is after the start of the training.
        self._position.has_begun(self)
        first, others = self._begin(record, self._first)
        if seen and self._position.begins_again():
            self.passes = record["passes"] if record is not None else _passes(self._loader, seen)
            seen -= (self.passes - 1) * len(self._loader)
        yield from islice(chain(first, others), max(seen, 0), None)

    def _first(self) -> tuple[list[Any], Iterator[Any]]:
        batches = iter(self._loader)
        return list(islice(batches, 1)), batches  # with the first one the order is drawn

    def order_of_samples(self) -> str | None:
        """Return in which order all ranks together take the samples, or ``None`` where more than that decides."""
        if hasattr(self._loader, "global_order"):
            return str(self._loader.global_order)
        if type(self._loader) is not BatchSampler:
            return None
        sampler: Any = self._loader.sampler
        if type(sampler) is DistributedSampler:  # Lightning's own subclass divides a sampler of the user
            return f"shuffled, seed {sampler.seed}" if sampler.shuffle else "as they are"
        # With several ranks each has its own samples then.
        in_order = type(sampler) is SequentialSampler and current_communicator().world_size == 1
        return "as they are" if in_order else None

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self._loader,)  # in another process it has nothing to resume


class _ReplayedLoader(_Resumable):
    """Gives the batches of a loader; in a resumed epoch it reads and drops those that were seen."""

    def __iter__(self) -> Iterator[Any]:
        seen, record = self._position.begin(self)
        if seen:
            self._position.has_begun(self)
        batches: Iterator[Any] = self._begin(record, lambda: self._behind(seen))
        return batches

    def _behind(self, seen: int) -> Iterator[Any]:
        batches: Iterator[Any] = iter(self._loader)
        for _ in range(seen):
            if next(batches, _NOTHING) is _NOTHING and self._position.begins_again():
                self.passes += 1
                batches = iter(self._loader)
                next(batches, None)
        return batches


# -- What a loader is like --


def _loaders(trainer: Any) -> list[Any]:
    loaders = trainer.train_dataloader
    return [] if loaders is None else list(CombinedLoader(loaders).flattened)


def _chooses_batches(loader: Any) -> bool:
    return (
        type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


def _saves_its_state(loader: Any) -> bool:
    """Return whether Lightning lets this loader go on by itself, at the right batch."""
    # Without a length Lightning asks for one batch ahead, and a state is saved behind that. torchdata's loader keeps
    # a mere number of batches where its data set has no state, and no random state.
    has_state = all(inspect.getattr_static(loader, name, None) is not None for name in STATEFUL)
    counts_only = isinstance(loader, DataLoader) and not hasattr(loader.dataset, STATEFUL[0])
    return has_state and length_of(loader) is not None and not counts_only


def _keeper(loader: Any) -> Any:
    """Return what keeps how an epoch of a loader began."""
    return loader if isinstance(loader, _ReplayedLoader) else getattr(loader, "batch_sampler", None)


def _passes(loader: Any, batches: int) -> int:
    """Return how often a loader had begun in an epoch of so many batches, if it begins again where it ends."""
    known, length = getattr(_keeper(loader), "passes", 0), length_of(loader)
    return known or (1 + (batches - 1) // length if length else 1)


def _nature(loader: Any) -> dict[str, Any]:
    size, batches = getattr(loader, "batch_size", None), _keeper(loader)
    order = batches.order_of_samples() if isinstance(batches, _ResumableBatches) else None
    return {"order": order, "samples": int(size) if isinstance(size, Integral) else None}


def _described(loader: Any) -> dict[str, Any]:
    keeper = _keeper(loader)
    return {
        **_nature(loader),
        "passes": getattr(keeper, "passes", 1),
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
    found: list[Any] = []
    dataset = getattr(loader, "dataset", None)
    holders = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    holders += [dataset] if isinstance(dataset, IterableDataset) else []
    for holder in holders:  # grows meanwhile
        for name, value in getattr(holder, "__dict__", {}).items():
            if _is_generator(value) and not any(value is one for one in found):
                found.append(value)
            # Lightning divides a sampler of one's own as the data set of a sampler.
            divides = isinstance(holder, DistributedSampler) and name == "dataset" and value is not dataset
            wraps = name == "_loader"  # ours do, and those of torch-xla
            if (isinstance(value, Sampler) or divides or wraps) and not any(value is one for one in holders):
                holders.append(value)
    return found


def _is_generator(value: Any) -> bool:
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    of_numpy = hasattr(value, "bit_generator") or type(value).__name__ == "RandomState"
    return isinstance(value, torch.Generator) or of_numpy


def _states(generators: Sequence[Any]) -> list[Any]:
    return [_state_of(one) for one in generators]


def _state_of(generator: Any) -> Any:
    if hasattr(generator, "getstate"):  # Python's
        return generator.getstate()
    # torch's, and numpy's of both generations
    state = generator.get_state() if hasattr(generator, "get_state") else generator.bit_generator.state
    return apply_to_collection(state, numpy.ndarray, _as_tensor)


def _as_tensor(array: Any) -> Tensor:
    # Tensors without a sign cannot be pickled as torch gathers them.
    return torch.from_numpy(array.view(f"i{array.itemsize}"))


def _as_array(tensor: Tensor) -> Any:
    return tensor.numpy().view(f"u{tensor.itemsize}")


def _set_states(generators: Sequence[Any], states: Sequence[Any] | None) -> None:
    for one, state in zip(generators, states or (), strict=False):
        if hasattr(one, "setstate"):
            one.setstate(state)
        elif isinstance(one, torch.Generator):
            one.set_state(state)
        elif hasattr(one, "set_state"):
            one.set_state(apply_to_collection(state, Tensor, _as_array))
        else:
            one.bit_generator.state = apply_to_collection(state, Tensor, _as_array)
