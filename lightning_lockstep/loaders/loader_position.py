"""A resumed run continues as if it had never stopped: next batch of data, random numbers, schedulers, validation.

Lightning's checkpoints count the batches of an epoch, and a resumed run counts on from there, but its loaders begin
their epoch again: batches are seen twice and the last ones never. Here every training loader begins where the
checkpoint was made. How each kind of loader does so is in :mod:`~lightning_lockstep.loaders.positions`, and where in an
epoch a run goes on in :mod:`~lightning_lockstep.loaders.resume_point`. If the order differs, a warning says so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from lightning_lockstep._lightning import Callback, CombinedLoader, TrainerFn, sized_len
from lightning_lockstep._text import counted
from lightning_lockstep._trainer import asks_for_training_loader, limited_batches
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.loaders.global_order import GlobalBatches, Share, divided, parts_of
from lightning_lockstep.loaders.positions import Record, go_on, of_all_ranks, record_of, with_position
from lightning_lockstep.loaders.resume_point import ResumePoint, begin_again, point_of, settle_counters
from lightning_lockstep.steps.patching import batch_size_of, put_in_place
from lightning_lockstep.steps.snapshot import generators_of, gpu_state, set_gpu_state, set_random_states

_log = logging.getLogger(__name__)
#: The key of a checkpoint that holds the position.
POSITION_KEY = "lockstep_loader_position"


class LoaderPosition(Callback):
    """Saves where the training loaders of every rank are, and what Lightning leaves out, and continues there."""

    def __init__(self, *, divides: bool = False) -> None:
        # `divides`: also with a strategy of Lightning's own, so that one process gets the order of several ranks.
        self._divides = divides
        self._trainer: Any = None
        self._resume: _Resume | None = None
        self._steps_plateaus = False

    @classmethod
    def attach(cls, trainer: Any) -> None:
        """Give a Trainer this callback, unless it has it. Ranks: all ranks; nothing is sent."""
        if not any(isinstance(callback, cls) for callback in trainer.callbacks):
            trainer.callbacks.append(cls())  # at the end: Lightning may be going through the list

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Have each training loader that the strategy makes pass through this callback."""
        self._trainer, self._resume, self._steps_plateaus = trainer, None, False
        process = trainer.strategy.process_dataloader
        if stage == TrainerFn.FITTING and getattr(process, "func", None) != self._process_dataloader:
            # A partial, which a pickle of the Trainer can hold.
            put_in_place(trainer.strategy, "process_dataloader", partial(self._process_dataloader, process))

    def _process_dataloader(self, process: Callable[[object], object], loader: object) -> object:
        made, trainer = process(loader), self._trainer
        if not asks_for_training_loader(trainer):
            return made
        if self._divides and not hasattr(trainer.strategy, "divides_loaders"):
            made = divided(made, Share(0, 1, True, trainer.accumulate_grad_batches))
        made = with_position(made, trainer)
        if self._resume is not None:
            self._resume.go_on_with(made, trainer)
        return made

    # -- at a checkpoint --

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add where the loaders are. Ranks: all, together; one gather, none after an exception."""
        loaders = _loaders(trainer)
        if not loaders:
            return
        communicator, accumulated = current_communicator(), trainer.accumulate_grad_batches
        # After an exception the other ranks do not come here.
        alone = trainer.state.status == "interrupted"
        # From the first micro-batch of an optimizer step that is not complete, because that step is repeated.
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        first = min(progress.processed, progress.ready) // accumulated * accumulated
        mine: dict[str, Any] = {
            "loaders": [record_of(one, range(first, progress.ready + 1)) for one in loaders],
            # Dropout on this rank's GPU draws from its generator.
            "device": gpu_state(),
            # What schedulers, early stopping and checkpoints look at after the resume.
            "metrics": {} if alone else _metrics(trainer),
        }
        if not any("own" in one for one in mine["loaders"]):
            checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
        checkpoint[POSITION_KEY] = {
            "world_size": communicator.world_size,
            "accumulated": accumulated,
            "ranks": [mine] if alone else communicator.gather(mine),
        }

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take where the loaders were, and mend what Lightning is about to read about its loops."""
        if trainer.state.fn != TrainerFn.FITTING or "loops" not in checkpoint:
            return
        loops, saved = checkpoint["loops"]["fit_loop"], checkpoint.get(POSITION_KEY, {})
        loops["state_dict"]["combined_loader"] = []  # states of loaders of rank 0 alone
        accumulated = saved.get("accumulated", trainer.accumulate_grad_batches)
        point = point_of(loops, accumulated, saved.get("broken_off"))
        settle_counters(loops, point)
        self._resume = _Resume(point, saved)
        for loader in _loaders(trainer):
            # It was made before the checkpoint was read, to count the steps of the fit, and has begun.
            self._resume.go_on_with(loader, trainer)
            self._resume.has_begun = True

    # -- in a run that is resumed --

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Also go on with the random numbers and the metrics."""
        resume, self._resume = self._resume, None
        if resume is None:
            return
        trainer.callback_metrics.update(resume.metrics)
        set_gpu_state(resume.device)
        loaders, combined = _loaders(trainer), trainer.fit_loop._combined_loader
        if resume.has_begun:
            iter(trainer.fit_loop._data_fetcher)  # begins the epoch again
        if resume.point.within_epoch and combined._mode == "max_size_cycle":
            for number, loader in enumerate(loaders):  # Lightning does not know which have ended.
                combined._iterator._consumed[number] |= (sized_len(loader) or math.inf) < resume.batches
        if resume.point.begun:
            for loader, record in zip(loaders, resume.records, strict=False):
                _restore_generators(loader, record)
        # The scheduler needs its metric: the checkpoint has it, or the batches that are left log it.
        self._steps_plateaus = bool(resume.metrics) or not resume.point.at_epoch_end
        begin_again(trainer, resume.point, resume.batches)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Let an epoch have its own length: a data set may have grown, or other batches were resumed before."""
        loop, combined = trainer.fit_loop, trainer.fit_loop._combined_loader
        for parts in map(parts_of, combined.flattened):
            # Workers may have asked for the first batches already.
            if isinstance(parts, GlobalBatches) and parts.drawn_for != parts.epoch:
                parts.draw()
        lengths = (sized_len(loader) for loader in combined.flattened)
        limits = [limited_batches(trainer, math.inf if one is None else one) for one in lengths]
        if limits != combined.limits:
            validates_at_end = trainer.val_check_batch == loop.max_batches
            combined.limits = limits
            loop.max_batches = (min if combined._mode == "min_size" else max)(limits)
            trainer.val_check_batch = loop.max_batches if validates_at_end else trainer.val_check_batch

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Have Lightning step the ``ReduceLROnPlateau`` of the epoch that was resumed, which it leaves out."""
        if self._steps_plateaus:
            self._steps_plateaus = False
            trainer.fit_loop._restarting = False  # while it is set, Lightning leaves it out


def _loaders(trainer: Any) -> list[Any]:
    loaders = trainer.train_dataloader
    return [] if loaders is None else list(CombinedLoader(loaders).flattened)


def _restore_generators(loader: Any, record: Record) -> None:
    """Set the global generators, and those of a loader, to the states of a record, if it is of this rank."""
    if "now" in record:
        set_random_states(record["now"], generators_of(loader))


def _metrics(trainer: Any) -> dict[str, Any]:
    """Return the metrics that callbacks see. Ranks: all, together; values may be reduced."""
    # Within a validation the public ones would be computed before its end.
    metrics = trainer.callback_metrics if trainer.training else trainer._logger_connector._callback_metrics
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in metrics.items()}


class _Resume:
    """What a checkpoint says to this rank of the epoch in which, or after which, it was made."""

    def __init__(self, point: ResumePoint, saved: dict[str, Any]) -> None:
        self._communicator = communicator = current_communicator()
        ranks = saved.get("ranks", [])
        self.point = point
        self.batches = point.seen  # how many are done, counted for this number of ranks
        self._asked = 0  # how many loaders have asked how to go on
        self.has_begun = False  # whether the loaders began before the checkpoint was read
        # After an error one rank alone has saved.
        same_ranks = saved.get("world_size") == communicator.world_size == len(ranks)
        of_rank = ranks[communicator.rank] if same_ranks else ranks[0] if ranks else {}
        records: list[Record] = of_rank.get("loaders", [])
        self.records = records if same_ranks else [of_all_ranks(one) for one in records]
        self.device = of_rank.get("device") if same_ranks else None
        self.metrics: dict[str, Any] = of_rank.get("metrics", {})

    def go_on_with(self, loader: Any, trainer: Any) -> None:
        """Let a loader go on, in Lightning's order of loaders, before it begins an epoch."""
        # Lightning may make all loaders twice before the training starts, as with reload_dataloaders_every_n_epochs.
        record = self.records[self._asked % len(self.records)] if self.records else {}
        self._asked += 1
        # An epoch that begins draws its order from the same random state as without the stop. Within an epoch the
        # states come later: what the program makes until the training starts is the same on all ranks.
        if not self.point.within_epoch:
            _restore_generators(loader, record)
        # Several loaders must stay in step, so none of them begins at a batch with another number.
        accumulated = trainer.accumulate_grad_batches if len(self.records) == 1 else None
        self.batches, is_sure = go_on(loader, record, self.point, accumulated)
        if self.point.within_epoch and not is_sure and self._communicator.is_main:
            _log.warning(
                "The checkpoint does not have the position of a loader for"
                f" {counted(self._communicator.world_size, 'rank')} with batches of {batch_size_of(loader)}: epoch"
                f" {self.point.epoch} goes on at batch {self.batches} in another order, so some samples may be"
                " used twice, and others not at all."
            )
