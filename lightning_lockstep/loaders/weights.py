"""Each optimizer step is the mean over its samples, or over the items that ``training_step`` counts.

A strategy averages the gradients of the ranks and Lightning divides each loss by the micro-batches of an optimizer
step, as if each had the same number of samples. Here the loss of a micro-batch is multiplied by its share before the
backward. How many samples each rank has is known from the global order, so nothing is sent for it.

Other counts are known on their rank only: the items (``num_items`` in what ``training_step`` returns), or the samples
of a batch that a data set has made. Then a micro-batch weighs as if the optimizer step had as many as the one before,
8 bytes are reduced while its last backward runs, and at its end the gradients are multiplied by one number.

A micro-batch with nothing to count, or whose step returned ``None``, gives zero gradients. If that is so on all ranks
in the whole optimizer step, there is none: the optimizer gets no gradients, and neither momentum nor decay moves a
weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_lockstep.distributed import Communicator
from lightning_lockstep.errors import BatchSizeError, ConfigurationError
from lightning_lockstep.loaders.global_order import parts_of
from lightning_lockstep.steps.patching import do_nothing

_KEY = "num_items"
_MISSING = object()


def samples_of_batch(loop: Any, number: int, loader: int = 0) -> tuple[int, int] | None:
    """Return this rank's and all ranks' samples in a batch of a loop's epoch; ``None`` if they are not known."""
    # `loader`: its number if the loop takes its loaders one after the other; else this is the sum over their batches.
    combined = loop._combined_loader
    loaders = [] if combined is None else combined.flattened
    if combined is not None and combined._mode == "sequential":
        loaders = loaders[loader : loader + 1]
    own = total = 0
    for parts in map(parts_of, loaders):
        if parts is None:
            return None
        length, place = len(parts), number
        if combined._mode == "max_size_cycle" and length:
            place = number % length
        if 0 <= place < length:
            sizes = parts.sizes(place)
            own, total = own + sizes[0], total + sizes[1]
    return (own, total) if total else None  # there are no samples after the end of a stream


class StepWeights:
    """How much the loss of each micro-batch counts in its optimizer step."""

    fits = 0  # of this process, which all ranks count alike

    def __init__(self) -> None:
        self.corrects = True  # whether gradients can be multiplied after the backward of the last micro-batch
        self.splits = False  # whether a rank alone may run a batch again, in parts
        self.in_parts = False  # whether this one does so now
        self.is_apart = False  # whether steps are no part of the run
        self.clear()

    def clear(self) -> None:
        """Start again for another fit."""
        StepWeights.fits += 1
        self.weight, self._step = 1.0, ""
        self._counts: bool | None = None  # whether steps count their items; None: no step has said so yet
        self._reference = 0.0  # counted in the optimizer step before
        self._own, self._wrong, self._contributes = 0.0, "", False  # of this optimizer step so far
        self._window = -1, 0  # the first micro-batch of this optimizer step, and its samples on all ranks
        self._total: Callable[[], Tensor] | None = None
        self.left_out: Callable[[], object] = do_nothing  # called if there is no optimizer step

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Leave no trace of the steps of the body, which is no part of the run."""
        before = dict(vars(self))
        self.is_apart = True
        try:
            yield
        finally:
            vars(self).update(before)

    def of_step(
        self, trainer: Any, output: Any, samples: int | None, communicator: Communicator, *, is_padding: bool
    ) -> None:
        """Find the weight of a micro-batch after its forward. Ranks: all, together, if it is counted."""
        # `samples`: those of this rank's batch if all ranks count them, else None.
        accumulated, number = trainer.accumulate_grad_batches, trainer.fit_loop.epoch_loop.batch_idx
        items: Any = output.get(_KEY, _MISSING) if isinstance(output, Mapping) else _MISSING
        # If a step returned None, a strategy has put a loss of zero and `num_items` of None in its place.
        left_out = is_padding or output is None or items is None
        if number % accumulated == 0 or not self.corrects:
            self._own, self._wrong, self._contributes, self._total = 0.0, "", False, None
            self._window = -1, 0
            self._step = f"no loss/{StepWeights.fits}/{trainer.current_epoch}/{number}"
        if self._counts is None:
            own = None if left_out else items is not _MISSING
            self._counts = own if self.splits else _all_count(own, communicator)
        self._contributes |= not left_out
        is_last = not trainer.fit_loop._should_accumulate()
        if self._counts or samples is not None:
            # A step without a loss has no items, but its samples count, as everywhere.
            count = float(samples or 0)
            if self._counts:
                count = 0.0 if left_out else self._counted(items)
            self.weight = self._by_counts(count, accumulated, communicator, is_last)
        else:
            self.weight = 0.0 if left_out else self._by_samples(trainer, communicator.world_size)
            if not left_out and items is not _MISSING:
                raise ConfigurationError(
                    f"training_step returned {_KEY}={items} after steps without: expected it from each step or none."
                )
        if is_last and not self._contributes:
            communicator.count(self._step)

    def _counted(self, items: Any) -> float:
        if self.in_parts:
            raise BatchSizeError(
                f"A batch that does not fit in memory cannot be split if training_step returns {_KEY}, because its"
                " parts would count by their samples: use a smaller batch."
            )
        count = math.nan if items is _MISSING else float(items)
        if not math.isfinite(count) or count < 0:  # the sum is then nan on all ranks, and all raise
            self._wrong = f"no {_KEY}" if items is _MISSING else f"{_KEY}={count:g}"
            return math.nan
        return count

    def _by_counts(self, own: float, accumulated: int, communicator: Communicator, is_last: bool) -> float:
        if accumulated > 1 and not self.corrects:
            what = _KEY if self._counts else "a loader or uneven_inputs='join' whose batches are counted"
            raise ConfigurationError(
                f"{what} with accumulate_grad_batches={accumulated} under DeepSpeed: expected 1, because its engine"
                " reduces the gradients of a micro-batch before the next one is counted."
            )
        self._own += own
        if is_last:
            self._total = communicator.all_reduce_async(torch.tensor(self._own, dtype=torch.float64))
        if not self._reference or not self.corrects:  # the first one of a fit
            first = communicator.all_reduce(torch.tensor(own, dtype=torch.float64)).item()
            if math.isnan(first):
                _refuse(self._wrong, communicator)
            self._reference = first * accumulated
            if not self.corrects:
                self._total = None
                if not first:
                    raise ConfigurationError(
                        "No rank has an item in this step: expected one, because DeepSpeed's engine would step without"
                        " gradients. Leave such batches out of the data set."
                    )
        return own * communicator.world_size * accumulated / (self._reference or 1.0) if own > 0 else 0.0

    def _by_samples(self, trainer: Any, ranks: int) -> float:
        number, accumulated = trainer.fit_loop.epoch_loop.batch_idx, trainer.accumulate_grad_batches
        mine = samples_of_batch(trainer.fit_loop, number)
        if mine is None:
            return 1.0
        first = number // accumulated * accumulated
        if self._window[0] != first or trainer.num_training_batches == math.inf:
            end = min(first + accumulated, trainer.num_training_batches)
            numbers = range(first, int(end))
            window = (mine if i == number else samples_of_batch(trainer.fit_loop, i) for i in numbers)
            self._window = first, sum(one[1] for one in window if one is not None)
        return float(mine[0] * ranks * accumulated / (self._window[1] or mine[1]))

    def of_manual_step(self, trainer: Any, samples: int | None, communicator: Communicator) -> None:
        """Find the weight of a micro-batch in manual optimization, where each counts as an optimizer step."""
        # `samples`: those of this rank's batch if all ranks count them, else None. Ranks: then all, an all-reduce.
        mine = samples_of_batch(trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_idx)
        if samples is not None:
            mine = samples, int(communicator.all_reduce(torch.tensor(samples, dtype=torch.int64)))
        self.weight = 1.0 if not mine or not mine[1] else mine[0] * communicator.world_size / mine[1]

    @contextmanager
    def weighted(self, loss: Tensor) -> Iterator[Tensor]:
        """Give the loss times its weight; a weight of zero gives zero gradients, whatever the loss is."""
        if self.weight:
            yield loss if self.weight == 1.0 else loss * self.weight
            return
        # The backward of a mean over no items divides zero by zero, and nan times zero is nan.
        with ExitStack() as stack:
            for node in _own_nodes(loss):
                stack.callback(node.register_prehook(_zeros).remove)  # nodes that add up gradients stay
            yield loss

    def correcting(self, closure: Callable[[], Any], optimizer: Any, communicator: Communicator) -> Any:
        """Run a closure, then divide the gradients by what the whole optimizer step has counted. Ranks: all."""
        output, factor = closure(), 1.0
        if self._total is not None:
            total, self._total = float(self._total()), None
            if math.isnan(total):
                _refuse(self._wrong, communicator)
            factor, self._reference = (self._reference / total if total else 0.0), total or self._reference
        if not self._contributes and self._nobody_contributes(optimizer, communicator):
            factor = 0.0
        if factor == 1.0 or (factor == 0.0 and isinstance(optimizer, torch.optim.LBFGS)):
            return output  # LBFGS asks for a loss again and again
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            if parameter.grad is not None:
                parameter.grad = parameter.grad.mul_(factor) if factor else None
        self.weight *= factor
        if not factor:
            self.left_out()
            return None  # without gradients a scaler skips the step, if it is told so
        return output

    def _nobody_contributes(self, optimizer: Any, communicator: Communicator) -> bool:
        # Each rank without a loss has said so before its last backward, in which the ranks have waited for each other.
        if isinstance(optimizer, torch.optim.LBFGS):
            return False
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        return communicator.count(self._step, 0) == communicator.world_size

    def mean_loss(self, closure: Callable[[], Any], communicator: Communicator) -> Any:
        """Return a closure's loss of all samples, so that LBFGS decides the same on each rank. Ranks: all."""
        loss = closure()
        if not isinstance(loss, Tensor):
            return loss
        # In double precision, so that the mean of the losses is as exact as the loss of the whole batch.
        own = loss.detach().to("cpu", torch.float64, copy=True) * self.weight
        return (communicator.all_reduce(own) / communicator.world_size).to(loss)


#: Modules with functions through whose backward the losses of other ranks reach this one.
_OF_ALL_RANKS = "lightning_lockstep.distributed.", "torch.distributed.", "torch.utils.checkpoint"


def _own_nodes(loss: Tensor) -> list[Any]:
    """Return the nodes of the graph of a loss that nothing but this loss flows back to."""
    nodes = _reached([] if loss.grad_fn is None else [loss.grad_fn])
    shared = [
        node for node in nodes if getattr(type(node), "_forward_cls", type(node)).__module__.startswith(_OF_ALL_RANKS)
    ]
    below = {id(node) for node in _reached([node for one in shared for node in _behind(one)])}
    return [node for node in nodes if id(node) not in below]


def _behind(node: Any) -> list[Any]:
    return [following for following, _ in node.next_functions if following is not None]


def _reached(nodes: list[Any]) -> list[Any]:
    found = {id(node): node for node in nodes}
    waiting = list(found.values())
    while waiting:
        new = {id(one): one for one in _behind(waiting.pop()) if id(one) not in found}
        found |= new
        waiting += new.values()
    return list(found.values())


def _zeros(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(None if one is None else torch.zeros_like(one) for one in gradients)


def _all_count(counts: bool | None, communicator: Communicator) -> bool | None:
    """Return whether the steps of all ranks count their items; ``None`` if no rank knows. Ranks: all, together."""
    said = communicator.all_reduce(torch.tensor([counts is True, counts is False], dtype=torch.int32), "max")
    does, does_not = said.tolist()
    if does and does_not:
        _refuse("" if counts is not False else f"no {_KEY}", communicator)
    return None if not does and not does_not else bool(does)


def _refuse(wrong: str, communicator: Communicator) -> NoReturn:
    """Raise on every rank, naming what each wrong rank has returned. Ranks: all, together; a gather."""
    told = [f"{one} on rank {rank}" for rank, one in enumerate(communicator.gather(wrong)) if one]
    raise ConfigurationError(
        f"training_step returned {', '.join(told)}: expected the number of items, 0 or more, on every rank."
    )
