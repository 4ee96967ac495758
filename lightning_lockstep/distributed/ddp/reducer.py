"""Finish a DDP step by hand on a rank whose backward ended early.

DDP reduces gradients in buckets while the backward runs. A rank that runs out of memory half way has sent
some buckets, and the other ranks wait for the rest. The reducer does not ask which backward a gradient comes
from: once the missing gradients have been computed in another way, a backward that touches just those
parameters makes it send the missing buckets in their usual order, and finish as if nothing had happened.
The other ranks cannot tell the difference, and no step pays for it beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_lockstep._doors.torch_internals import check_reduced, version_getter

__all__ = ["GradientMarks", "ddp_of", "deliver_gradients", "untouched_buckets", "why_not_resumable"]


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
    """Tells which parameters have got their gradient in a backward that ended early."""

    __slots__ = ("_before",)

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        # Right before the backward; about 0.1 us for each parameter.
        # A gradient is either new, or accumulated in place, which raises its version.
        version = version_getter()
        self._before = [(g, -1 if g is None else version(g)) for g in [p.grad for p in parameters]]

    def missing(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return those of the same ``parameters`` whose gradient has not arrived."""
        version_now = version_getter()
        return [
            parameter
            for parameter, (grad, version) in zip(parameters, self._before, strict=True)
            if parameter.grad is grad and (grad is None or version_now(grad) == version)
        ]


def deliver_gradients(
    ddp: DistributedDataParallel | None,  # its forward of this step was called
    gradients: dict[nn.Parameter, Tensor | None],  # that DDP still waits for; emptied, so that none is copied
    *,
    backward_began: bool,
) -> None:
    """Let gradients arrive at their parameters as at the end of a backward.

    Hooks of the parameters see each gradient once, it is added to ``.grad``, and DDP reduces it and finishes its
    step.
    """
    reduces = ddp is not None and ddp.require_backward_grad_sync
    parameters = list(gradients)
    if ddp is None or not reduces or ddp.find_unused_parameters:
        # Where nothing waits for it, and where DDP looks for unused ones, a parameter without stays without.
        with_gradient = [p for p in parameters if gradients[p] is not None]
        parameters = with_gradient or (parameters[:1] if reduces else [])
    if not parameters:
        return
    arrival: Tensor = _Arrival.apply([gradients.pop(p) for p in parameters], *parameters)  # type: ignore[no-untyped-call]
    gradients.clear()
    if ddp is not None and reduces and not backward_began:
        ddp.require_forward_param_sync = True
        ddp.reducer.prepare_for_backward([arrival] if ddp.find_unused_parameters else [])
    arrival.backward()  # type: ignore[no-untyped-call]
    if ddp is not None and reduces:
        check_reduced(ddp)  # RuntimeError: it cannot go on


class _Arrival(torch.autograd.Function):
    """Hands each input its gradient, zero where there is none."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        ctx.like = [(p.shape, p.dtype, p.device) for p in parameters]
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        # One element seen many times: no memory is needed where memory has just run out.
        return (
            None,
            *(
                torch.zeros((), dtype=dtype, device=device).expand(shape) if gradient is None else gradient
                for gradient, (shape, dtype, device) in zip(gradients, ctx.like, strict=True)
            ),
        )
