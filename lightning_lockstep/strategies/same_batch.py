"""The global batch of a run stays that of its start when ranks are lost: who is left makes more micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning_lockstep._trainer import asks_for_training_loader, limited_batches, ranks_at_start
from lightning_lockstep.loaders.global_order import asked_sampler, bounds, kind_of, micro_batches, parts_of
from lightning_lockstep.steps.patching import replaced
from lightning_lockstep.strategies.can_outlive import check_loader


class GlobalBatch:
    """Divides the global batch of the start among the ranks that are left."""

    # In more micro-batches rather than in larger ones, so that memory does not grow. If batch norm follows the
    # micro-batch, that stays as it was.

    def __init__(self, strategy: Any) -> None:
        self.strategy, self.trainer = strategy, None  # type: Any, Any
        self._changed = ExitStack()  # settings of the Trainer

    def process(self, process: Callable[[Any], Any], loader: Any) -> Any:
        """Give this rank its part of a loader. Ranks: all; see ``process_dataloader`` of the strategy."""
        if not asks_for_training_loader(self.trainer):
            return process(loader)
        check_loader(loader)
        strategy, accumulated = self.strategy, self.trainer.accumulate_grad_batches
        started, ranks = ranks_at_start(self.trainer), strategy.world_size
        if ranks == started:
            return process(loader)
        unit = asked_sampler(loader.batch_sampler).batch_size if kind_of(loader) == "samples" else 1
        strategy.micro_batches = sizes = strategy.micro_batches or (unit * started,)
        if strategy.settings.batch_norm != "of_rank":
            return process(loader)
        largest, total = -(-max(sizes) // started), sum(sizes) * accumulated // len(sizes)
        strategy.micro_batches = micro_batches(total, -(-total // (ranks * largest)))
        self._set(accumulate_grad_batches=len(strategy.micro_batches))
        part = process(loader)
        parts, every = parts_of(part), self.trainer.val_check_interval
        # An epoch ends, and validations come, after as many samples as at the start.
        at_start, count = len(bounds(parts.position(len(parts)), sizes)) - 1, len(strategy.micro_batches)
        limited = limited_batches(self.trainer, at_start)
        if limited < at_start:
            self._set(limit_train_batches=int(limited * count // accumulated))
        if isinstance(every, (int, float)):  # else it is by the clock
            number = every if isinstance(every, int) else max(1, int(limited * every))
            self._set(val_check_interval=1.0 if number >= limited else int(number * count // accumulated))
        return part

    def _set(self, **values: Any) -> None:
        self._changed.enter_context(replaced(self.trainer, **values))

    def put_back(self) -> None:
        """Give the Trainer its own settings back."""
        self._changed.close()
