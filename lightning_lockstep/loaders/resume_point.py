"""Where a fit goes on from a checkpoint, by the counters that Lightning's loops have saved.

A checkpoint can be made in any hook. What was done when it was made is kept, and the rest is done after the resume:

============================== =======================================================================================
made                           the resumed fit
============================== =======================================================================================
within a batch                 begins that batch again; with accumulation, the batches of its optimizer step
at the end of a batch          goes on with what follows it: validation if it is due, schedulers, the next batch
within a validation            begins that validation again
at the end of a validation     goes on with what follows it
at the end of the last batch   goes on with the validation and the end of the epoch
at the end of an epoch         begins the next epoch; a ``ReduceLROnPlateau`` of that epoch is stepped first
at the start of an epoch       begins that epoch
after a fit that was cut short goes on with the next batch of the epoch
============================== =======================================================================================

If a rank of a fit is lost, what was broken off is done again (`strategies/outliving/`), and the checkpoint says what:

- ``step``: the next optimizer step if all that follows a batch is done, else as above
- ``validation``: that validation, even if all of its batches are done
- ``epoch``: the end of the epoch, without its validation
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ResumePoint:
    """What is done, and what is left to do, of the epoch in which a checkpoint was made."""

    epoch: int  # the number of the epoch that goes on, or begins
    begun: bool = False  # otherwise it begins
    batches: int = 0  # how many batches of it are done
    at_epoch_end: bool = False  # all batches are done, and the end of the epoch is left
    batch_open: bool = False  # Lightning had not counted the last batch as completed
    after_batch_left: bool = False  # a validation, or what follows one, may be left of the last batch
    validation_left: bool = False  # the validation after the last batch, if it is due, is left
    plateaus_left: bool = False  # the epoch before has ended, but for its ``ReduceLROnPlateau``
    end_again: bool = False  # the end of the epoch was broken off

    @property
    def within_epoch(self) -> bool:
        """Whether the loaders go on within the epoch."""
        return self.begun and not self.at_epoch_end

    @property
    def seen(self) -> int:
        """How many batches the loaders leave out."""
        return self.batches if self.within_epoch else 0


def since_begin(batches: int, length: int | None) -> int:
    """Return how many batches a loader has given since it began; next to a longer one it begins several times."""
    return (batches - 1) % length + 1 if batches and length else batches


def point_of(
    loops: dict[str, Any], accumulated: int, broken_off: Literal["step", "validation", "epoch"] | None = None
) -> ResumePoint:
    """Return where a fit goes on, by the counters of its loops as they were saved."""
    epoch, batches = loops["epoch_progress"]["current"], loops["epoch_loop.batch_progress"]
    batch = batches["current"]
    done, ready = batch["processed"], batch["ready"]
    if broken_off == "step" and 0 < batch["completed"] == ready:
        ready += 1  # what was broken off is the step of the next batch, or, after the last one, the end of the epoch
    at_epoch_end = batches["is_last_batch"] and done == ready
    ended = epoch["completed"] if broken_off == "epoch" else epoch["processed"]
    epoch_ended = ended == epoch["started"]
    if epoch["ready"] > epoch["started"] or (epoch_ended and (at_epoch_end or not done)):
        # At the start of an epoch, or at the end of one: Lightning may not have counted that as completed yet.
        was_ending = epoch["completed"] < ended and epoch["ready"] == epoch["started"]
        return ResumePoint(ended, plateaus_left=epoch_ended and was_ending)
    # Within a batch or at its end, in a validation or at its end, or after a fit that was cut short.
    if not at_epoch_end:
        done -= done % accumulated  # the gradients of these batches are not saved
    after_batch_left = 0 < done == ready and not epoch_ended
    batch_open = after_batch_left and batch["completed"] < done
    validation = loops["epoch_loop.val_loop.batch_progress"]
    validated = validation["current"]["completed"] == validation["current"]["ready"] > 0
    validated = validated and validation["is_last_batch"] and broken_off != "validation"
    return ResumePoint(
        # A limit or a request has ended an epoch that has batches left; Lightning counts it as a whole one.
        epoch=ended - 1 if epoch_ended else ended,
        begun=True,
        batches=done,
        at_epoch_end=at_epoch_end,
        batch_open=batch_open,
        after_batch_left=after_batch_left,
        validation_left=after_batch_left and (batch_open or not validated),
        end_again=broken_off == "epoch",
    )


def settle_counters(loops: dict[str, Any], point: ResumePoint) -> None:
    """Set the counters of a fit's loops, as they were saved, to where it goes on."""
    epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
    validation = loops["epoch_loop.val_loop.batch_progress"]
    _set_all(point.epoch, epochs["total"], epochs["current"])
    repeated = batches["current"]["processed"] - point.batches if point.begun else 0
    _set_all(batches["total"]["processed"] - repeated, batches["total"])
    _set_all(point.batches, batches["current"])
    batches["is_last_batch"] = point.at_epoch_end
    _set_all(0, validation["total"], validation["current"])
    validation["is_last_batch"] = False
    if point.begun:
        for counters in (epochs["total"], epochs["current"]):
            counters["ready"] = counters["started"] = point.epoch + 1
    if point.validation_left:  # Lightning then knows that it is still to be done
        validation["total"]["ready"] = validation["total"]["started"] = 1


def _set_all(value: int, *counters: dict[str, int]) -> None:
    for one in counters:
        one.update(dict.fromkeys(("ready", "started", "processed", "completed"), value))


def begin_again(trainer: Any, point: ResumePoint, seen: int) -> None:
    """Do what is left of a batch or an epoch before the fit loop goes on."""
    # `seen`: how many batches are done, counted for this number of ranks (`point.seen` is of the saved one).
    # Lightning knows two places in an epoch from which a fit goes on, and a checkpoint can be made in any.
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    done = trainer.num_training_batches if point.at_epoch_end else seen
    if point.begun and done != math.inf:
        _set_all(done, vars(loop.batch_progress.current))
    if not point.batches:
        if point.plateaus_left:
            _step_plateaus(trainer, point.epoch)
        # With `max_steps` Lightning takes the epoch that begins for one to be continued.
        loop.restarting = False
        return
    if point.at_epoch_end:
        fetcher.done, fetcher.batches = True, []
    validates = loop._should_check_val_fx(fetcher)
    if point.end_again and validates:
        # The loop reaches this validation, leaves it out, and counts the step once more.
        loop._batches_that_stepped -= 1
    if point.batch_open and not validates:
        loop.on_advance_end(fetcher)
    elif validates and not point.after_batch_left:
        # Lightning would take the batch that is done for one whose validation has just ended.
        def validated(fetcher: Any) -> bool:
            del loop._should_check_val_fx  # asked once, before the first batch
            return False

        loop._should_check_val_fx = validated


def _step_plateaus(trainer: Any, epochs: int) -> None:
    for config in trainer.lr_scheduler_configs if trainer.lightning_module.automatic_optimization else ():
        value = trainer.callback_metrics.get(config.monitor) if config.reduce_on_plateau else None
        if value is not None and config.interval == "epoch" and epochs % config.frequency == 0:
            trainer.lightning_module.lr_scheduler_step(config.scheduler, value)
