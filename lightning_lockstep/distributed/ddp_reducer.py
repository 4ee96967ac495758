"""Finish a DDP step by hand on a rank whose backward ended early.

DDP reduces gradients in buckets while the backward runs. A rank that runs out of memory half way has sent
some buckets, and the other ranks wait for the rest. The reducer does not ask which backward a gradient comes
from: once the missing gradients have been computed in another way, a backward that touches just those
parameters makes it send the missing buckets in their usual order, and finish as if nothing had happened.
The other ranks cannot tell the difference, and no step pays for it beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["GradientMarks", "ddp_of", "send_gradients", "untouched_buckets", "why_not_resumable"]


def ddp_of(model: object) -> DistributedDataParallel | None:
    """Return ``model`` where it is a DDP wrapper."""
    return model if isinstance(model, DistributedDataParallel) else None


def untouched_buckets(model: object) -> int:
    """Return how much memory the first reduction will touch that its wrapper has only reserved [bytes]."""
    ddp = ddp_of(model)
    if ddp is None:
        return 0
    return sum(p.numel() * p.element_size() for p in ddp.parameters() if p.requires_grad)


def why_not_resumable(model: object) -> str:
    """Return why a step of this wrapper cannot be finished by hand, the same on all ranks; empty when it can."""
    ddp = ddp_of(model)
    if ddp is None:
        return ""
    if ddp.static_graph:
        return "static_graph=True counts gradient hooks, which a step in micro-batches changes"
    if ddp.mixed_precision is not None:
        return "DDP's own mixed precision keeps copies of the parameters"
    if any(isinstance(module, nn.SyncBatchNorm) for module in ddp.modules()):
        return (
            "SyncBatchNorm communicates in every forward, so one rank cannot run more of them than the others"
        )
    return ""


class GradientMarks:
    """Tells which parameters have got their gradient in a backward that ended early.

    Args:
        parameters: Parameters that require a gradient, as they are right before the backward. Each costs about
            0.1 microseconds.
    """

    __slots__ = ("_before",)

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        # A gradient is either new, or accumulated in place, which raises its version.
        self._before = [(g, -1 if g is None else g._version) for g in [p.grad for p in parameters]]

    def missing(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return those of the same ``parameters`` whose gradient has not arrived."""
        return [
            parameter
            for parameter, (grad, version) in zip(parameters, self._before, strict=True)
            if parameter.grad is grad and (grad is None or grad._version == version)
        ]


def send_gradients(
    ddp: DistributedDataParallel, parameters: Iterable[nn.Parameter], *, backward_began: bool
) -> None:
    """Let DDP reduce the gradients that ``parameters`` hold now, and finish its step.

    Args:
        ddp: The wrapper, whose forward of this step was called.
        parameters: Those whose gradient DDP still waits for: all that take part when its backward has not
            begun, else those that are missing.
        backward_began: Whether its backward has begun.

    Raises:
        RuntimeError: The reducer cannot go on.

    Ranks: the rank whose backward ended early; the others are in theirs. The all-reduces are exactly those
        that this rank still owes.
    """
    zero: Tensor = _TouchGradients.apply(*parameters)  # type: ignore[no-untyped-call]
    if not backward_began:
        ddp.require_forward_param_sync = True
        ddp.reducer.prepare_for_backward([zero] if ddp.find_unused_parameters else [])
    zero.backward()  # type: ignore[no-untyped-call]
    ddp.reducer._check_reducer_finalized()


class _TouchGradients(torch.autograd.Function):
    """Adds zero to the gradient of each input, so that what hangs on its arrival happens."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.like = [(p.shape, p.dtype, p.device) for p in parameters]
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # One element seen many times: no memory is needed where memory has just run out.
        return tuple(
            torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.like
        )
