"""Ranks that have different numbers of batches.

Every rank must take the same number of steps: a rank that runs out of data goes on to validation while the others
wait for its gradients, and they hang, or gradients are added to values of another collective. Here the ranks
compare the lengths of their loaders before the first batch. Loaders that have no length, or may give fewer batches
than theirs says, agree before each batch whether all still have one; that reduction runs while the batch before it
is computed.

Only batches that the loop will use are compared: a limit of the Trainer may end an epoch everywhere at the same
batch, and of several loaders a longer one may decide, which is known only once Lightning has asked for all of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.data import IterableDataset

from lightning_lockstep._doors.lightning_internals import (
    asks_for_training_loader,
    combined_training_loader,
    end_epoch_with_next_batch,
    loaders_in_use,
)
from lightning_lockstep.distributed import Communicator, PendingReduction
from lightning_lockstep.distributed.c10d_operators import ddp_of, zero_with_gradients
from lightning_lockstep.distributed.coordination.gather_uneven import gathered_entries
from lightning_lockstep.errors import CollectiveMismatchError, ConfigurationError
from lightning_lockstep.steps.patching import LoaderAround, length_of, replaced

# -- Losses of zero, with which a rank that has nothing to contribute still takes part in the reductions of
# a step


@contextmanager
def every_rank_contributes(strategy: Any, is_padding_batch: Callable[[], bool]) -> Iterator[None]:
    """Let a step that returns ``None``, or has a padding batch, take part in the reductions with zero gradients."""
    module = strategy.lightning_module
    original = module.training_step  # a callback may have put its own there, as OverflowDetector does

    def contributing(*args: Any, **kwargs: Any) -> Any:
        with gathered_entries() as entries:
            output = original(*args, **kwargs)
        if output is not None and not is_padding_batch():
            return output
        zero = zero_loss(strategy.model, entries)
        if output is None:
            return {"loss": zero, "num_items": None}  # which is none that the step has forgotten to return
        return {**output, "loss": zero} if isinstance(output, Mapping) else zero

    with replaced(module, training_step=contributing):
        yield


def zero_loss(model: Module, entries: Sequence[Tensor] = ()) -> Tensor:
    """Return a loss of zero that gives zero gradients to every parameter that the other ranks wait for."""
    # ``entries`` are what this rank has gathered with gradients: the others wait for it in the backward, from
    # where it gets the gradients of what it has given them.
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ddp = ddp_of(model)
    if ddp is not None and (ddp.find_unused_parameters or ddp.static_graph):
        # A parameter that no rank uses gets no gradient, so no weight decay: those are left out that had none in the
        # last step.
        parameters = [parameter for parameter in parameters if parameter.grad is not None] or parameters
    zero = zero_with_gradients([None] * len(parameters), parameters, model)
    return torch.stack([zero, *(entry.flatten()[:0].sum().real.to(zero) for entry in entries)]).sum()


def with_loss_of_every_rank(output: Any, is_padding_batch: bool, why: str) -> Any:
    """Return what a step gives, in a padding batch with its loss times 0; raises if it has no loss."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if loss is None:
        raise CollectiveMismatchError(
            f"training_step returned no loss: expected one on every rank, since {why}. To leave a batch out, return the"
            " loss times 0."
        )
    if not is_padding_batch:
        return output
    zero = (loss * 0.0).nan_to_num()
    return {**output, "loss": zero} if isinstance(output, Mapping) else zero


# -- Ranks that have different numbers of batches --

_log = logging.getLogger(__name__)
Policy = Literal["error", "truncate", "join"]
_NOTHING = object()
_ADVICE = (
    "Give every rank the same number of batches (a DistributedSampler does), or choose uneven_inputs='truncate'"
    " (all stop when the first rank runs out) or 'join' (a rank that has run out contributes zero gradients from"
    " padding batches until the last one is done; every rank needs at least one batch)."
)


class UnevenInputs:
    """What a strategy does about ranks with different numbers of training batches."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lengths: list[Sequence[int | None]] = []  # of each training loader, on each rank

    def even(self, dataloader: Any, trainer: Any, communicator: Communicator) -> Any:
        """Return a loader of which every rank takes as many batches, if it is a training loader."""
        if not asks_for_training_loader(trainer) or communicator.world_size == 1:
            return dataloader
        lengths, trusted = zip(
            *communicator.gather((length_of(dataloader), _keeps_to_its_length(dataloader))), strict=True
        )
        self._lengths.append(lengths)
        keep_to_it = all(trusted)  # all ranks' loaders give what their lengths say
        known = [length for length in lengths if length is not None]
        agreeing = partial(AgreeingLoader, dataloader, communicator, self._policy, trainer)
        if len(known) == len(lengths):
            if len({batches_taken(trainer, [length]) for length in known}) == 1:
                # the loop ends everywhere at the same batch
                return dataloader if keep_to_it else agreeing(min(known))
            if self._policy == "error":
                return CheckedLoader(dataloader, lambda: self._check(lengths, trainer, communicator.rank))
        plan = plan_steps(lengths, communicator.rank, self._policy)
        if plan.notice and communicator.is_main:
            _log.warning(plan.notice)
        if plan.steps is not None and keep_to_it:
            return SizedEvenLoader(dataloader, plan.steps, plan.own or 0)
        return agreeing(plan.steps)

    def _check(self, own: Sequence[int | None], trainer: Any, rank: int) -> None:
        """Raise unless the loop takes as many batches on all ranks of the loaders that it has together."""
        combined = combined_training_loader(trainer)
        if combined is None:
            return  # Lightning still asks for the others
        number, mode = combined
        of_ranks = list(zip(*self._lengths[-number:], strict=True))
        if number > 1 and not any(None in lengths for lengths in of_ranks):
            own = [batches_taken(trainer, lengths, mode) for lengths in of_ranks]
        plan_steps(own, rank, self._policy)

    def is_padding_batch(self, trainer: Any) -> bool:
        """Return whether the current training batch comes after the last one of this rank's own."""
        combined = combined_training_loader(trainer) if self._policy == "join" else None
        if combined is None:
            return False
        own = [_own_batches(loader) for loader in loaders_in_use(trainer.fit_loop)]
        last = min(own) if combined[1] == "min_size" else max(own)
        return bool(trainer.fit_loop.epoch_loop.batch_idx >= last)

    def ends_differ(self, trainer: Any) -> bool:
        """Return whether a rank may have run out of training batches while others have not."""
        if self._policy != "join" or combined_training_loader(trainer) is None:
            return False
        return any(hasattr(loader, "own_batches") for loader in loaders_in_use(trainer.fit_loop))

    def clear(self) -> None:
        self._lengths.clear()


@dataclass(frozen=True)
class StepPlan:
    """How many batches each rank takes of one loader in an epoch."""

    steps: int | None  # batches that every rank takes; None: known at the end only
    own: int | None  # batches that this rank has itself; None: known at the end only
    notice: str | None = None  # to print once


def plan_steps(lengths: Sequence[int | None], rank: int, policy: Policy) -> StepPlan:
    """Decide how many batches every rank takes, by each rank's length (``None``: its loader has none)."""
    known = [length for length in lengths if length is not None]
    if not known:
        return StepPlan(None, None)
    if len(known) < len(lengths):
        raise ConfigurationError(
            f"The training loader has a length on some ranks only ({_counts(lengths)}): expected one on all ranks or"
            " on none. Give every rank a loader of the same kind."
        )
    if len(set(known)) == 1:
        return StepPlan(known[0], known[rank])
    if policy == "error":
        raise ConfigurationError(
            f"The ranks have different numbers of training batches ({_counts(lengths)}): expected the same on all."
            f" {_ADVICE}"
        )
    if policy == "join" and min(known) == 0:
        raise ConfigurationError(
            f"uneven_inputs='join' needs at least one batch on every rank ({_counts(lengths)}):"
            " give each rank some data, or use fewer ranks."
        )
    steps = min(known) if policy == "truncate" else max(known)
    notice = f"uneven_inputs={policy!r}: every rank takes {steps} steps an epoch ({_counts(lengths)})."
    return StepPlan(steps, known[rank], notice)


# `mode` is that of CombinedLoader.
def batches_taken(trainer: Any, lengths: Sequence[int], mode: str = "max_size_cycle") -> int:
    """Return how many batches of an epoch the fit loop takes of loaders of these lengths, together."""
    limit = trainer.limit_train_batches  # fast_dev_run and overfit_batches set it
    each = [min(length, limit) if isinstance(limit, int) else int(length * limit) for length in lengths]
    return int(min(min(each) if mode == "min_size" else max(each), _until_max_steps(trainer)))


def most_batches(trainer: Any) -> float:
    """Return how many batches of an epoch the fit loop will take at most, of a loader without a length."""
    limit = trainer.limit_train_batches
    return min(limit if isinstance(limit, int) else math.inf, _until_max_steps(trainer))


def _until_max_steps(trainer: Any) -> float:
    if trainer.max_steps < 0:
        return math.inf
    return float(max((trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches, 0))


class CheckedLoader(LoaderAround):
    """Gives the batches of a loader that differs among the ranks, unless the epoch would."""

    _check: Callable[[], None]

    def __init__(self, loader: Any, check: Callable[[], None]) -> None:
        super().__init__(loader, _check=check)

    def __len__(self) -> int:
        self._check()  # Lightning asks before the first batch, on all ranks
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._check()
        return iter(self._loader)


class SizedEvenLoader(LoaderAround):
    """Gives exactly ``steps`` batches: stops early, or repeats its last one as padding batches."""

    _steps: int

    def __init__(self, loader: Any, steps: int, own: int) -> None:
        super().__init__(loader, _steps=steps, own_batches=own)

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        batch = _NOTHING
        batches = iter(self._loader)
        for _ in range(self._steps):
            batch = next(batches, batch)
            if batch is _NOTHING:
                return
            yield batch


class AgreeingLoader(LoaderAround):
    """Gives a batch only when the policy says so for all ranks; for loaders that may end at any batch."""

    _communicator: Communicator
    _epoch: int
    _has_warned: bool
    _steps: int | None  # batches at most, the same on all ranks; None: the loader has no length
    own_batches: int | None  # those after it are padding, which must contribute nothing; None: not known yet

    def __init__(
        self, loader: Any, communicator: Communicator, policy: Policy, trainer: Any, steps: int | None
    ) -> None:
        own = {"_communicator": communicator, "_policy": policy, "_trainer": trainer, "_steps": steps}
        super().__init__(loader, **own, own_batches=None, _epoch=-1, _has_warned=False)

    def __len__(self) -> int:
        if self._steps is None:
            raise TypeError(f"{type(self._loader).__name__} has no length")
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        if self._epoch != self._trainer.current_epoch:  # else it begins again while a longer one goes on
            self._epoch, self.own_batches = self._trainer.current_epoch, None
        if self._steps is None:  # Lightning looks a batch ahead itself, for the last one
            yield from self._agreed()
            return
        agreed, number = self._agreed(), 0
        ahead = next(agreed, _NOTHING)
        while ahead is not _NOTHING:
            batch, number = ahead, number + 1
            ahead = next(agreed, _NOTHING)
            if ahead is _NOTHING and number < self._steps and self._ends_epoch():
                end_epoch_with_next_batch(self._trainer)
            yield batch

    def _ends_epoch(self) -> bool:
        combined = combined_training_loader(self._trainer)
        return combined is not None and (combined[0] == 1 or combined[1] == "min_size")

    def _agreed(self) -> Iterator[Any]:
        """Yield each batch that all ranks take."""
        batches, given, taken, current = iter(self._loader), 0, 0, _NOTHING
        most = most_batches(self._trainer)
        following = next(batches, _NOTHING)
        pending = self._count_next(following)
        while True:
            with_data = int(pending.wait())
            if self._ends(with_data, given, taken, following, most):
                return
            given += 1
            has_own = following is not _NOTHING
            if has_own:
                current, taken = following, taken + 1
            elif self.own_batches is None:
                self.own_batches = taken
            if given == self._steps:  # Lightning takes no more, so no more is read or sent
                yield current
                return
            if has_own:
                following = next(batches, _NOTHING)
            pending = self._count_next(following)
            yield current

    def _count_next(self, following: Any) -> PendingReduction:
        """Start to count the ranks that have a next batch, which runs while the current one is computed."""
        return self._communicator.all_reduce_async(
            torch.tensor(int(following is not _NOTHING), dtype=torch.int32)
        )

    def _ends(self, with_data: int, given: int, taken: int, following: Any, most: float) -> bool:
        """Return whether the epoch ends here, as all ranks do with what they know."""
        if with_data == self._communicator.world_size:
            return False
        if with_data == 0 or self._policy == "truncate":
            self._warn_of_early_end(given, taken, following)
            return True
        if self._policy == "join" and taken > 0:
            return False
        if taken >= most:  # every rank has taken as many
            return True
        counts = self._gathered_counts(taken, following)
        raise ConfigurationError(
            f"The ranks have different numbers of training batches ({counts}): expected the same on all."
            f" {_ADVICE}"
        )

    def _warn_of_early_end(self, given: int, taken: int, following: Any) -> None:
        if self._steps is None or self._has_warned:
            return
        self._has_warned = True
        counts = self._gathered_counts(taken, following)
        if self._communicator.is_main:
            _log.warning(
                f"An epoch ends after {given} batches, where the length of the training loader promises {self._steps}"
                f" ({counts}). What counts by the length, such as a schedule of learning rates, does not know that:"
                " make __len__ of the loader return how many batches it gives."
            )

    def _gathered_counts(self, taken: int, following: Any) -> str:
        own = taken, following is not _NOTHING, length_of(self._loader)
        return ", ".join(
            f"rank {rank}: {_in_words(*found)}" for rank, found in enumerate(self._communicator.gather(own))
        )


def _in_words(taken: int, has_more: bool, length: int | None) -> str:
    if has_more:
        return f"more than {taken}"
    return str(taken) if length in (None, taken) else f"{taken} of the {length} that its loader promises"


# Where samplers and loaders are defined that never end before their length says.
_LIGHTNING = ("lightning.", "pytorch_lightning.", "lightning_fabric.")
_KEEPING = ("torch.", "torch_xla.", "torchdata.", *_LIGHTNING, "lightning_lockstep.demo.")


def _keeps_to_its_length(loader: Any) -> bool:
    """Return whether it is known that a loader gives as many batches as its length says."""
    batches = getattr(loader, "batch_sampler", None)
    samples = getattr(loader if batches is None else batches, "sampler", None)
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return False
    return all(_is_of_a_library(part) for part in (loader, samples if batches is None else batches, samples))


def _is_of_a_library(part: Any) -> bool:
    methods = (getattr(type(part), name, None) for name in ("__iter__", "__len__"))
    return all(getattr(method, "__module__", "").startswith(_KEEPING) for method in methods)


def _own_batches(loader: Any) -> float:
    count = loader.own_batches if hasattr(loader, "own_batches") else length_of(loader)
    return math.inf if count is None else count


def _counts(lengths: Sequence[int | None]) -> str:
    return ", ".join(f"rank {rank}: {'no length' if n is None else n}" for rank, n in enumerate(lengths))
