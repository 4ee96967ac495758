"""Ranks that have different numbers of batches, and steps without a loss on some ranks.

Every rank must take the same number of steps: a rank that runs out of data goes on to validation while the others
wait for its gradients, and they hang, or gradients are added to values of another collective. Here the ranks
compare the lengths of their loaders before the first batch. Where these differ, or a loader may give another number of
batches than its length says, the ranks agree before each batch whether all still have one; that reduction runs while
the batch before it is computed.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.data import IterableDataset

from lightning_lockstep._lightning import sized_len
from lightning_lockstep._trainer import limited_batches
from lightning_lockstep.distributed import Communicator
from lightning_lockstep.distributed.coordination.gather_uneven import gathered_entries
from lightning_lockstep.distributed.ddp_reducer import ddp_of, sum_of_nothing
from lightning_lockstep.errors import CollectiveMismatchError, ConfigurationError
from lightning_lockstep.steps.patching import LoaderAround, replaced

# -- Losses of zero, with which a rank whose step gave none still takes part in the reductions --


@contextmanager
def every_rank_contributes(strategy: Any) -> Iterator[None]:
    """Let a step that returns ``None`` take part in the reductions with zero gradients."""
    module = strategy.lightning_module
    original = module.training_step  # a callback may have put its own there, as OverflowDetector does

    def contributing(*args: Any, **kwargs: Any) -> Any:
        with gathered_entries() as entries:
            output = original(*args, **kwargs)
        # Without `num_items` this would look like a step that has forgotten to return the number.
        return {"loss": zero_loss(strategy.model, entries), "num_items": None} if output is None else output

    with replaced(module, training_step=contributing):
        yield


def zero_loss(model: Module, entries: Sequence[Tensor] = ()) -> Tensor:
    """Return a loss of zero that gives zero gradients to every parameter that the other ranks wait for."""
    # ``entries``: what this rank has gathered with gradients, whose backward is a collective of all ranks.
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ddp = ddp_of(model)
    if ddp is not None and (ddp.find_unused_parameters or ddp.static_graph):
        # Parameters without a gradient in the last step are left out: if no rank uses one, decay must not move it.
        parameters = [parameter for parameter in parameters if parameter.grad is not None] or parameters
    zero = sum_of_nothing(parameters, model)
    return torch.stack([zero, *(entry.flatten()[:0].sum().real.to(zero) for entry in entries)]).sum()


def check_has_loss(output: Any, why: str) -> None:
    """Raise if a training step gave no loss."""
    if (output.get("loss") if isinstance(output, Mapping) else output) is None:
        raise CollectiveMismatchError(
            f"training_step returned no loss: expected one on every rank, because {why}. To leave a batch out, return"
            " the loss times 0."
        )


# -- Ranks that have different numbers of batches --

_log = logging.getLogger(__name__)
Policy = Literal["error", "truncate", "join"]
_NOTHING = object()
_ADVICE = (
    "Give every rank the same number of batches (a DistributedSampler does), or choose uneven_inputs='truncate'"
    " (all stop when the first rank runs out) or 'join' (a rank that has run out contributes zero gradients from"
    " padding batches until the last one is done; every rank needs at least one batch)."
)


def with_even_batches(
    dataloader: Any,  # of training
    policy: Policy,
    trainer: Any,
    communicator: Communicator,
    found: Sequence[tuple[int | None, bool]],  # of all ranks, by `own_length`
) -> Any:
    """Return a loader of which every rank takes the same number of batches."""
    if communicator.world_size == 1:
        return dataloader
    lengths, trusted = zip(*found, strict=True)
    steps = None
    if None not in lengths:  # if one rank's loader has no length, the lengths of the others do not help
        if len({batches_taken(trainer, length) for length in lengths}) > 1:
            counts = ", ".join(f"rank {rank}: {length}" for rank, length in enumerate(lengths))
            if policy == "error" or (policy == "join" and min(lengths) == 0):
                raise _differ(counts)
            if communicator.is_main:
                most = min(lengths) if policy == "truncate" else max(lengths)
                _log.warning(f"uneven_inputs={policy!r}: every rank takes {most} steps an epoch ({counts}).")
        elif all(trusted):
            return dataloader
        # A loader that may end early is given no length, so that Lightning looks one batch ahead for the last one.
        if policy == "error" or all(trusted):
            steps = (max if policy == "join" else min)(lengths)
    return AgreeingLoader(dataloader, communicator, policy, trainer, steps)


def has_run_out(combined: Any, number: int) -> bool:
    """Return whether batch ``number`` comes after the last one of this rank's own, with the policy ``join``."""
    own = [getattr(loader, "own_batches", sized_len(loader)) for loader in combined.flattened]
    counts = [math.inf if count is None else count for count in own]
    return number >= (min if combined._mode == "min_size" else max)(counts)


def _differ(counts: str) -> ConfigurationError:
    return ConfigurationError(
        f"The ranks have different numbers of training batches ({counts}): expected the same on all. {_ADVICE}"
    )


def batches_taken(trainer: Any, length: float) -> float:
    """Return how many batches of an epoch the fit loop takes, at most, of a loader of that length."""
    length = limited_batches(trainer, length)
    if trainer.max_steps >= 0:
        steps = max(trainer.max_steps - trainer.global_step, 0)
        length = min(length, steps * trainer.accumulate_grad_batches)
    return length


class AgreeingLoader(LoaderAround):
    """Gives a batch only when the policy says so for all ranks; for loaders that may end at any batch."""

    _communicator: Communicator
    _epoch: int
    own_batches: int | None  # those after it are padding, which must contribute nothing; None: not known yet

    def __init__(
        self,
        loader: Any,
        communicator: Communicator,
        policy: Policy,
        trainer: Any,
        # Largest number of batches, the same on all ranks; None: the loader has no length, or may end before it.
        steps: int | None,
    ) -> None:
        own = {"_communicator": communicator, "_policy": policy, "_trainer": trainer, "_steps": steps}
        super().__init__(loader, **own, own_batches=None, _epoch=-1)

    def __len__(self) -> int:
        if self._steps is None:
            raise TypeError(f"{type(self._loader).__name__} has no length, or one that it may not keep to")
        return int(self._steps)

    def __iter__(self) -> Iterator[Any]:
        """Yield each batch that all ranks take."""
        if self._epoch != self._trainer.current_epoch:  # if another loader is longer, it restarts within one
            self._epoch, self.own_batches = self._trainer.current_epoch, None
        most = batches_taken(self._trainer, math.inf if self._steps is None else self._steps)
        batches, taken, current = iter(self._loader), 0, _NOTHING
        following = next(batches, _NOTHING)
        count = self._count_next(following)
        for given in itertools.count(1):
            if self._ends(int(count()), taken, following, most):
                return
            if following is not _NOTHING:
                current, taken = following, taken + 1
            elif self.own_batches is None:
                self.own_batches = taken
            if given == self._steps:  # Lightning takes no more, so no more is read or sent
                yield current
                return
            if following is not _NOTHING:
                following = next(batches, _NOTHING)
            count = self._count_next(following)
            yield current

    def _count_next(self, following: Any) -> Callable[[], Tensor]:
        """Start to count the ranks that have a next batch; the count runs while the current batch is computed."""
        has_next = torch.tensor(int(following is not _NOTHING), dtype=torch.int32)
        return self._communicator.all_reduce_async(has_next)

    def _ends(self, with_data: int, taken: int, following: Any, most: float) -> bool:
        """Return whether the epoch ends here; all ranks return the same, or all raise."""
        if with_data == self._communicator.world_size:
            return False
        if with_data == 0 or self._policy == "truncate":
            return True
        if self._policy == "join" and taken > 0:
            return False
        if taken >= most:  # and so has every other rank
            return True
        own = str(taken) if following is _NOTHING else f"more than {taken}"
        raise _differ(", ".join(f"rank {rank}: {n}" for rank, n in enumerate(self._communicator.gather(own))))


def own_length(loader: Any) -> tuple[int | None, bool]:
    """Return a loader's length, and whether it certainly gives as many batches: it has only classes of torch."""
    batches = getattr(loader, "batch_sampler", None)
    parts = (loader, batches, getattr(loader if batches is None else batches, "sampler", None))
    is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
    known = all(part is None or type(part).__module__.startswith("torch.") for part in parts)
    return sized_len(loader), known and not is_stream
