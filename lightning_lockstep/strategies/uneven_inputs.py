"""Ranks that have different numbers of batches.

Under DDP every rank must take the same number of steps. A rank that runs out of data goes on to validation
while the others wait for its gradients, and they hang or, worse, add up things that do not belong together.
Here the ranks compare the lengths of their loaders before the first batch. Loaders without a length agree
before each batch whether all still have one; the answer for the next batch travels while the current one is
computed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lightning_lockstep.distributed import Communicator, PendingReduction
from lightning_lockstep.errors import ConfigurationError

__all__ = ["EvenLoader", "StepPlan", "even_loader", "plan_steps"]

_log = logging.getLogger(__name__)
Policy = Literal["error", "truncate", "join"]
_NOTHING = object()


@dataclass(frozen=True)
class StepPlan:
    """How many batches each rank takes of one loader in an epoch.

    Attributes:
        steps: Batches that every rank takes; ``None`` when only the end will tell.
        own: Batches that this rank really has; ``None`` when only the end will tell.
        notice: What to tell the user once, if anything.
    """

    steps: int | None
    own: int | None
    notice: str | None = None


def plan_steps(lengths: Sequence[int | None], rank: int, policy: Policy) -> StepPlan:
    """Decide how many batches every rank takes.

    Args:
        lengths: Length of each rank's loader in batches, ``None`` where it has none.
        rank: The rank that asks.
        policy: ``error``, ``truncate`` or ``join``.

    Returns:
        The plan of this rank.

    Raises:
        ConfigurationError: The lengths differ and the policy is ``error``, or only some have a length.

    Ranks: every rank with the same arguments but its own number; nothing is sent.
    """
    known = [length for length in lengths if length is not None]
    if not known:
        return StepPlan(None, None)
    if len(known) < len(lengths):
        raise ConfigurationError(
            f"The training loader has a length on some ranks only ({_counts(lengths)}): expected all or none."
            " Give every rank a loader of the same kind."
        )
    if len(set(known)) == 1:
        return StepPlan(known[0], known[rank])
    if policy == "error":
        raise ConfigurationError(
            f"The ranks have different numbers of training batches ({_counts(lengths)}): expected the same on all."
            " Deal the data evenly, or choose uneven_inputs='truncate' (all stop with the first) or 'join'"
            " (ranks without data contribute zero gradients until the last is done)."
        )
    if policy == "join" and min(known) == 0:
        raise ConfigurationError(
            f"uneven_inputs='join' needs at least one batch on every rank ({_counts(lengths)}):"
            " give each rank some data, or use fewer ranks."
        )
    steps = min(known) if policy == "truncate" else max(known)
    notice = f"uneven_inputs={policy!r}: every rank takes {steps} steps an epoch ({_counts(lengths)})."
    return StepPlan(steps, known[rank], notice)


def even_loader(loader: Any, communicator: Communicator, policy: Policy) -> Any:
    """Return a loader of which every rank takes the same number of batches.

    Args:
        loader: This rank's training loader.
        communicator: Communicator of the run.
        policy: ``error``, ``truncate`` or ``join``.

    Returns:
        ``loader`` itself when all ranks have the same length, else a wrapper around it.

    Raises:
        ConfigurationError: As :func:`plan_steps`, alike on every rank.

    Ranks: all, together; one gather.
    """
    plan = plan_steps(communicator.gather(_length(loader)), communicator.rank, policy)
    if plan.notice and communicator.is_main:
        _log.warning(plan.notice)
    if plan.steps is not None and plan.steps == plan.own and plan.notice is None:
        return loader
    if plan.steps is not None:
        return SizedEvenLoader(loader, plan.steps, plan.own or 0)
    return AgreeingLoader(loader, communicator, policy)


class EvenLoader:
    """Looks like the loader it wraps, but for how many batches it gives.

    Attributes:
        own_batches: Number of batches of this rank's own in this epoch, once known. Those after it are
            repeats, which must contribute nothing.
    """

    _ours = ("_loader", "own_batches", "_steps", "_communicator", "_policy")

    def __init__(self, loader: Any, own_batches: int | None) -> None:
        self._loader = loader
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


class SizedEvenLoader(EvenLoader):
    """Gives exactly ``steps`` batches: stops early, or repeats its last one.

    Args:
        loader: The loader.
        steps: Batches that every rank takes.
        own: Batches that this one has.
    """

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
    """Gives a batch only when the policy says so for all ranks; for loaders without a length.

    Args:
        loader: The loader.
        communicator: Communicator of the run.
        policy: ``error``, ``truncate`` or ``join``.
    """

    def __init__(self, loader: Any, communicator: Communicator, policy: Policy) -> None:
        super().__init__(loader, None)
        self._communicator, self._policy = communicator, policy

    def __iter__(self) -> Iterator[Any]:
        self.own_batches = None
        batches, taken, current = iter(self._loader), 0, _NOTHING
        following = next(batches, _NOTHING)
        pending = self._tell(following)
        while True:
            with_data = int(pending.wait())
            if with_data < self._communicator.world_size and self._ends(with_data, taken, following):
                return
            if following is not _NOTHING:
                current, taken = following, taken + 1
                following = next(batches, _NOTHING)
            elif self.own_batches is None:
                self.own_batches = taken
            pending = self._tell(following)
            yield current

    def _tell(self, following: Any) -> PendingReduction:
        """Count the ranks that have a next batch; the answer travels while the current one is computed."""
        return self._communicator.all_reduce_async(
            torch.tensor(int(following is not _NOTHING), dtype=torch.int32)
        )

    def _ends(self, with_data: int, taken: int, following: Any) -> bool:
        """Return whether the epoch ends here, now that some rank has no next batch; all ranks know that."""
        if with_data == 0 or self._policy == "truncate":
            return True
        if self._policy == "join" and taken > 0:
            return False
        said = self._communicator.gather((taken, following is not _NOTHING))
        counts = ", ".join(
            f"rank {rank}: {'more than ' if more else ''}{n}" for rank, (n, more) in enumerate(said)
        )
        raise ConfigurationError(
            f"The ranks have different numbers of training batches ({counts}): expected the same on all."
            " Deal the data evenly, or choose uneven_inputs='truncate', or 'join' if every rank has at least one."
        )


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _counts(lengths: Sequence[int | None]) -> str:
    return ", ".join(f"rank {rank}: {'no length' if n is None else n}" for rank, n in enumerate(lengths))
