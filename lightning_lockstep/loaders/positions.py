"""Where a training loader is in its epoch, and how a resumed run has it go on there.

============================ =========================================================================================
a loader                     goes on
============================ =========================================================================================
that is divided by samples   at the very sample, on another number of ranks and with another batch size too
with a state of its own      from that state
over data with an index      after the batches that were seen, which are not loaded again
any other, such as a stream  after the batches that were seen, which are read again
============================ =========================================================================================

An order that was drawn from random numbers is drawn from the same state again, which the checkpoint holds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from lightning_lockstep._lightning import _set_sampler_epoch, sized_len
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.loaders.global_order import GlobalBatches, parts_of, seed_of_run
from lightning_lockstep.loaders.resume_point import ResumePoint, since_begin
from lightning_lockstep.loaders.streams import is_plain_loader
from lightning_lockstep.steps.patching import STATEFUL, LoaderAround, batch_size_of, do_nothing, loader_with
from lightning_lockstep.steps.snapshot import (
    generators_of,
    kept_generators,
    random_states,
    seed_generators,
    set_random_states,
)

Record = dict[str, Any]  # what a checkpoint holds of a loader


def with_position(loader: Any, trainer: Any) -> Any:
    """Return a loader, or one in its place, that can go on within an epoch."""
    if position_of(loader) is None:
        if all(hasattr(loader, name) for name in STATEFUL):
            return loader
        batches, dataset = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
        if is_plain_loader(loader) and batches is not None and not isinstance(dataset, IterableDataset):
            loader = loader_with(loader, batch_sampler=SkipsSeen(batches, trainer))
        else:
            loader = SkipsSeen(loader, trainer)
    # Lightning takes a loader with these two for one that resumes by itself, and does not warn; `dict()` is no state.
    vars(loader).update(state_dict=dict, load_state_dict=do_nothing)
    return loader


def position_of(loader: Any) -> GlobalBatches | SkipsSeen | None:
    """Return what knows where a loader is; ``None`` if its own state does."""
    parts = parts_of(loader), getattr(loader, "batch_sampler", None), loader
    return next((one for one in parts if isinstance(one, (GlobalBatches, SkipsSeen))), None)


def record_of(loader: Any, numbers: range) -> Record:
    """Return what a checkpoint holds of a loader. ``numbers``: of the batches that may be the next of the epoch."""
    position = position_of(loader)
    record: Record = {
        "samples": batch_size_of(loader),
        "now": random_states(generators_of(loader)),
        "units": {},
    }
    if position is not None:
        record |= position.record(numbers)
    elif all(hasattr(loader, name) for name in STATEFUL) and (own := loader.state_dict()):
        record["own"] = own
    return record


def of_all_ranks(record: Record) -> Record:
    """Return what a record holds of an order that the ranks share, so that any number of ranks can use it."""
    shared = "units", "order", "draws_from"
    return {key: record[key] for key in shared if key in record} if record["units"] else {}


def go_on(loader: Any, record: Record, point: ResumePoint, accumulated: int | None) -> tuple[int, bool]:
    """Let a loader go on; return after how many batches, and whether this is certainly the next sample."""
    # `accumulated`: micro-batches of an optimizer step. None: there are other loaders, whose counts must stay equal.
    position = position_of(loader)
    was_divided = bool(record.get("units"))  # whether the checkpoint has that of a divided loader
    if isinstance(position, GlobalBatches):
        return position.go_on(record if was_divided else {}, point, accumulated)
    if position is not None:
        # Workers ask for their first batches as soon as the iterator is made, before Lightning does this.
        _set_sampler_epoch(loader, point.epoch)
        is_drawn = point.within_epoch and not was_divided
        position.resumes_at = point.seen, record.get("drawn_from") if is_drawn else None
    elif "own" in record:
        loader.load_state_dict(record["own"])
    is_sure = not was_divided and "samples" in record and record["samples"] == batch_size_of(loader)
    return point.seen, is_sure


class SkipsSeen(LoaderAround):
    """Gives the batches of a loader, or of a batch sampler; in a resumed epoch it leaves out those that were seen."""

    drawn_from: list[Any] | None  # all random states, not the sampler's alone, when it began last
    # When it begins next: how many batches it leaves out, and the random states from which they were drawn.
    resumes_at: tuple[int, list[Any] | None]

    def __init__(self, loader: Any, trainer: Any) -> None:
        super().__init__(loader, _trainer=trainer, drawn_from=None, resumes_at=(0, None))

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # This runs when the first batch is asked for, which without workers is after the start of the training.
        (seen, states), self.resumes_at = self.resumes_at, (0, None)
        several, seen = current_communicator().world_size > 1, since_begin(seen, sized_len(self._loader))
        with kept_generators() if several or states else nullcontext():
            if states:
                set_random_states(states, generators_of(self))
            elif several:  # programs divide orders that they expect to be the same on all ranks
                seed_generators(seed_of_run() + int(self._trainer.fit_loop.epoch_progress.current.processed))
            self.drawn_from = random_states(generators_of(self))
            batches = iter(self._loader)
            first = list(islice(batches, seen, seen + 1))  # with the first one an order is drawn
        if first:
            yield from first
            yield from batches

    def record(self, numbers: range) -> Record:
        return {"drawn_from": self.drawn_from}

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self._loader,)  # in another process it has nothing to resume
