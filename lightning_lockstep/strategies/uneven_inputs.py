"""Ranks that have different numbers of batches.

Every rank must take the same number of steps: a rank that runs out of data goes on to validation while the others
wait for its gradients, and they hang, or gradients are added to values of another collective. Here the ranks
compare the lengths of their loaders before the first batch. Loaders without a length agree before each batch
whether all still have one; that reduction runs while the batch before it is computed.

What the loop takes counts, not what the loaders have: a limit of the Trainer may end an epoch everywhere at the same
batch, and of several loaders a longer one may decide, which is known only once Lightning has asked for all of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module

from lightning_lockstep._doors.lightning_internals import asks_for_training_loader, combined_training_loader
from lightning_lockstep.distributed import Communicator, PendingReduction
from lightning_lockstep.distributed.coordination.gather_uneven import gathered_entries
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.steps.patching import replaced

# -- Losses of zero, with which a rank that has nothing to contribute still takes part in the reductions of
# a step


@contextmanager
def every_rank_contributes(module: Any, is_padding_batch: Callable[[], bool]) -> Iterator[None]:
    """Let a training step that returns ``None``, or whose batch is a padding batch, contribute gradients of zero.

    The other ranks then get the reductions that they wait for.
    """
    original = module.training_step  # a callback may have put its own there, as OverflowDetector does

    def contributing(*args: Any, **kwargs: Any) -> Any:
        with gathered_entries() as entries:
            output = original(*args, **kwargs)
        if output is not None and not is_padding_batch():
            return output
        zero = zero_loss(module, entries)
        return {**output, "loss": zero} if isinstance(output, Mapping) else zero

    with replaced(module, training_step=contributing):
        yield


def zero_loss(module: Module, entries: Sequence[Tensor] = ()) -> Tensor:
    """Return a loss of zero that depends on every trainable parameter, so that all gradients are zero."""
    # ``entries`` are what this rank has gathered with gradients: the others wait for it in the backward, from
    # where it gets the gradients of what it has given them.
    parts = [p.view(-1)[:1].sum() * 0.0 for p in module.parameters() if p.requires_grad and p.numel()]
    parts += [entry.flatten()[:0].sum().real for entry in entries]  # no element, so no nan times zero
    return torch.stack([part.float() for part in parts]).sum()


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
        self._loaders: list[EvenLoader] = []
        self._lengths: list[Sequence[int | None]] = []  # of each training loader, on each rank

    def even(self, dataloader: Any, trainer: Any, communicator: Communicator) -> Any:
        """Return a loader of which every rank takes as many batches, if it is a training loader."""
        if not asks_for_training_loader(trainer):
            return dataloader
        lengths = communicator.gather(_length(dataloader))
        self._lengths.append(lengths)
        loader = self._even(dataloader, lengths, trainer, communicator)
        if isinstance(loader, EvenLoader):
            self._loaders.append(loader)
        return loader

    def _even(
        self, loader: Any, lengths: Sequence[int | None], trainer: Any, communicator: Communicator
    ) -> Any:
        known = [length for length in lengths if length is not None]
        if len(known) == len(lengths):
            if len({batches_taken(trainer, [length]) for length in known}) == 1:
                return loader  # the loop ends everywhere at the same batch
            if self._policy == "error":
                return CheckedLoader(loader, lambda: self._check(lengths, trainer, communicator.rank))
        plan = plan_steps(lengths, communicator.rank, self._policy)
        if plan.notice and communicator.is_main:
            _log.warning(plan.notice)
        if plan.steps is not None:
            return SizedEvenLoader(loader, plan.steps, plan.own or 0)
        return AgreeingLoader(loader, communicator, self._policy, lambda: most_batches(trainer))

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
        if self._policy != "join" or not self._loaders:
            return False
        own = [loader.own_batches for loader in self._loaders]
        known = [count for count in own if count is not None]
        return len(known) == len(own) and trainer.fit_loop.epoch_loop.batch_idx >= max(known)

    def clear(self) -> None:
        self._loaders.clear()
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


class EvenLoader:
    """Behaves as the loader it wraps, except for the number of batches."""

    _ours = ("_loader", "own_batches", "_steps", "_communicator", "_policy", "_check", "_most")

    def __init__(self, loader: Any, own_batches: int | None) -> None:
        self._loader = loader
        # Those after it are padding, which must contribute nothing; None: not known yet.
        self.own_batches = own_batches

    def __getattr__(self, name: str) -> Any:
        if name in type(self)._ours or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self)._ours:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)


class CheckedLoader(EvenLoader):
    """Gives the batches of a loader that differs among the ranks, unless the epoch would."""

    def __init__(self, loader: Any, check: Callable[[], None]) -> None:
        super().__init__(loader, len(loader))
        self._check = check

    def __len__(self) -> int:
        self._check()  # Lightning asks before the first batch, on all ranks
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._check()
        return iter(self._loader)


class SizedEvenLoader(EvenLoader):
    """Gives exactly ``steps`` batches: stops early, or repeats its last one as padding batches."""

    def __init__(self, loader: Any, steps: int, own: int) -> None:
        super().__init__(loader, own)
        self._steps = steps

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


class AgreeingLoader(EvenLoader):
    """Gives a batch only when the policy says so for all ranks; for loaders without a length."""

    def __init__(
        self, loader: Any, communicator: Communicator, policy: Policy, most: Callable[[], float]
    ) -> None:
        super().__init__(loader, None)
        self._communicator, self._policy, self._most = communicator, policy, most

    def __iter__(self) -> Iterator[Any]:
        self.own_batches = None
        batches, taken, current, most = iter(self._loader), 0, _NOTHING, self._most()
        following = next(batches, _NOTHING)
        pending = self._count_next(following)
        while True:
            with_data = int(pending.wait())
            if with_data < self._communicator.world_size and self._ends(with_data, taken, following, most):
                return
            if following is not _NOTHING:
                current, taken = following, taken + 1
                following = next(batches, _NOTHING)
            elif self.own_batches is None:
                self.own_batches = taken
            pending = self._count_next(following)
            yield current

    def _count_next(self, following: Any) -> PendingReduction:
        """Start to count the ranks that have a next batch, which runs while the current one is computed."""
        return self._communicator.all_reduce_async(
            torch.tensor(int(following is not _NOTHING), dtype=torch.int32)
        )

    def _ends(self, with_data: int, taken: int, following: Any, most: float) -> bool:
        """Return whether the epoch ends here, now that some rank has no next batch; all ranks know that."""
        if with_data == 0 or self._policy == "truncate":
            return True
        if self._policy == "join" and taken > 0:
            return False
        if taken >= most:  # every rank has taken as many
            return True
        taken_by_rank = self._communicator.gather((taken, following is not _NOTHING))
        counts = ", ".join(
            f"rank {rank}: {'more than ' if more else ''}{n}" for rank, (n, more) in enumerate(taken_by_rank)
        )
        raise ConfigurationError(
            f"The ranks have different numbers of training batches ({counts}): expected the same on all."
            f" {_ADVICE}"
        )


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _counts(lengths: Sequence[int | None]) -> str:
    return ", ".join(f"rank {rank}: {'no length' if n is None else n}" for rank, n in enumerate(lengths))
