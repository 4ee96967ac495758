"""Each optimizer step is the mean over its samples, or over the items that ``training_step`` counts.

A strategy averages the gradients of the ranks and Lightning divides each loss by the micro-batches of an optimizer
step, as if each had the same number of samples. Here the loss of a micro-batch is multiplied by its share before the
backward. How many samples each rank has is known from the global order, so nothing is sent for it. The number of items
(``num_items`` in what ``training_step`` returns) is known on its rank only: 16 bytes are reduced for each micro-batch,
and if an optimizer step has several, its gradients are multiplied by one number at its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_lockstep.distributed import Communicator
from lightning_lockstep.errors import BatchSizeError, ConfigurationError
from lightning_lockstep.loaders.global_order import parts_of

_KEY = "num_items"
_MISSING = object()


def samples_of_batch(trainer: Any, number: int) -> tuple[int, int] | None:
    """Return this rank's and all ranks' samples in a micro-batch of the epoch; ``None`` if they are not known."""
    # If several loaders are taken together, this is the sum over their batches.
    combined = trainer.fit_loop._combined_loader
    if combined is None:
        return None
    own = total = 0
    for loader in combined.flattened:
        parts = parts_of(loader)
        if parts is None:
            return None
        length, place = len(parts), number
        if combined._mode == "max_size_cycle":
            place = number % length
        if 0 <= place < length:
            sizes = parts.sizes(place)
            own, total = own + sizes[0], total + sizes[1]
    return (own, total) if total else None  # there are no samples after the end of a stream


class StepWeights:
    """How much the loss of each micro-batch counts in its optimizer step."""

    def __init__(self) -> None:
        self.weight = 1.0
        self._gives_items = False  # whether the steps of this fit count their items
        # Items of all ranks: in the first micro-batch of an optimizer step, and in the step so far.
        self._first = self._items = 0.0
        self.corrects = True  # whether gradients can be multiplied after the backward of the last micro-batch
        self.in_parts = False  # whether this rank alone runs the batch again, in parts

    def clear(self) -> None:
        """Start again for another fit."""
        self.weight, self._gives_items, self._first, self._items = 1.0, False, 0.0, 0.0

    def of_step(
        self, trainer: Any, output: Any, samples: int | None, communicator: Communicator, *, is_padding: bool
    ) -> None:
        """Find the weight of a micro-batch after its forward. Ranks: all, together, if items are counted."""
        # `samples`: those of this rank's batch if they are to be counted like items, else None.
        items: Any = output.get(_KEY, _MISSING) if isinstance(output, Mapping) else _MISSING
        # If a step returned None, a strategy has put a loss of zero and `num_items` of None in its place.
        left_out = is_padding or output is None or items is None
        self._gives_items = self._gives_items or not (items is None or items is _MISSING)
        if not self._gives_items and samples is None:
            self.weight, self._items = self._by_samples(trainer, communicator.world_size), 0.0
            return
        if self._gives_items and self.in_parts:
            raise BatchSizeError(
                f"A batch that does not fit in memory cannot be split if training_step returns {_KEY}, because its"
                " parts would count by their samples: use a smaller batch."
            )
        wrong = None
        if left_out:
            count = 0.0
        elif not self._gives_items:
            wrong, count = f"no {_KEY}", float(samples or 0)  # wrong if other ranks count items
        else:
            count = math.nan if items is _MISSING else float(items)
            if not math.isfinite(count) or count < 0:  # the sum is then nan on all ranks, and all raise
                wrong, count = f"no {_KEY}" if items is _MISSING else f"{_KEY}={count:g}", math.nan
        self.weight = self._by_counts(trainer, count, wrong, communicator)

    def _by_counts(self, trainer: Any, own: float, wrong: str | None, communicator: Communicator) -> float:
        accumulated = trainer.accumulate_grad_batches
        if self._gives_items and accumulated > 1 and not self.corrects:
            raise ConfigurationError(
                f"{_KEY} with accumulate_grad_batches={accumulated} under DeepSpeed: expected 1, because its engine"
                " reduces the gradients of a micro-batch before the items of the next are counted."
            )
        counts = torch.tensor([own, 0.0] if self._gives_items else [0.0, own], dtype=torch.float64)
        items, samples = communicator.all_reduce(counts).tolist()
        found = items + samples
        if math.isnan(found) or (items and samples):
            _refuse(wrong, communicator)
        if trainer.fit_loop.epoch_loop.batch_idx % accumulated == 0 or not self.corrects:
            self._first, self._items = found, 0.0
        self._items += found
        return own * communicator.world_size / (self._first or 1.0)

    def _by_samples(self, trainer: Any, ranks: int) -> float:
        number, accumulated = trainer.fit_loop.epoch_loop.batch_idx, trainer.accumulate_grad_batches
        mine = samples_of_batch(trainer, number)
        if mine is None:
            return 1.0
        first = number // accumulated * accumulated
        end = min(first + accumulated, trainer.num_training_batches)
        window = (mine if i == number else samples_of_batch(trainer, i) for i in range(first, int(end)))
        samples = sum(one[1] for one in window if one is not None)
        return float(mine[0] * ranks * accumulated / samples)

    def of_manual_step(self, trainer: Any, ranks: int) -> None:
        """Find the weight of a micro-batch in manual optimization, where each counts as an optimizer step."""
        mine = samples_of_batch(trainer, trainer.fit_loop.epoch_loop.batch_idx)
        self.weight = 1.0 if mine is None else mine[0] * ranks / mine[1]

    def weighted(self, loss: Tensor) -> Tensor:
        """Return the loss times its weight."""
        if self.weight == 0.0:  # a mean over no items is nan, and so is 0 times nan
            loss = loss.nan_to_num()
        return loss if self.weight == 1.0 else loss * self.weight

    def correcting(self, closure: Callable[[], Any], optimizer: Any, accumulated: int) -> Callable[[], Any]:
        """Return a closure that divides the gradients by the number of items in the whole optimizer step."""

        def corrected() -> Any:
            output = closure()
            if self._items and accumulated > 1 and self.corrects:
                factor = accumulated * (self._first or 1.0) / (self._items or 1.0)
                for parameter in (one for group in optimizer.param_groups for one in group["params"]):
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)
            return output

        return corrected


def _refuse(wrong: str | None, communicator: Communicator) -> NoReturn:
    """Raise on every rank, naming what each wrong rank has returned. Ranks: all, together; a gather."""
    told = [f"{one} on rank {rank}" for rank, one in enumerate(communicator.gather(wrong)) if one]
    raise ConfigurationError(
        f"training_step returned {', '.join(told)}: expected the number of items, 0 or more, on every rank."
    )
