"""Losses of zero, with which a rank that has nothing to contribute still takes part in the reductions of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_lockstep.distributed.uneven.gather_uneven import gathered_entries
from lightning_lockstep.steps.patching import replaced

__all__ = ["every_rank_contributes", "zero_loss"]


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
    """Return a loss of zero that depends on every trainable parameter, so that all gradients are zero.

    ``entries`` are what this rank has gathered with gradients: the others wait for it in the backward, from
    where it gets the gradients of what it has given them.
    """
    parts = [p.view(-1)[:1].sum() * 0.0 for p in module.parameters() if p.requires_grad and p.numel()]
    parts += [entry.flatten()[:0].sum().real for entry in entries]  # no element, so no nan times zero
    return torch.stack([part.float() for part in parts]).sum()
