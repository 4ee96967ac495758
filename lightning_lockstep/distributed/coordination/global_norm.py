"""Batch norm with the statistics of the whole global micro-batch, on any device and any backend.

A rank sends the mean and variance of each channel and how many values these are of, so parts may have any size. In
backward the ranks add up two sums of each channel. A rank whose batch is padding counts nothing, and nothing flows back
to it through the statistics. The running statistics are the same bits on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_lockstep.distributed.coordination.gather_uneven import (
    all_gather_rows,
    carrying_device,
)
from lightning_lockstep.distributed.process_group import process_group_exists

_HALF = (torch.bfloat16, torch.float16)


def global_batch_norm(
    x: Tensor,  # (batch, channels, ...)
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    counts: bool = True,  # False: this rank's batch is padding
) -> Tensor:
    """Do what ``torch.nn.functional.batch_norm`` does, for all ranks' batches as one. Ranks: all, in backward too."""
    # It gathers 16 bytes a channel from each rank, and reduces as many in backward.
    if not training or not process_group_exists() or dist.get_world_size() == 1:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    if x.dtype in _HALF:  # torch computes them with parameters of float32
        weight, bias = (None if one is None else one.float() for one in (weight, bias))
    return _GlobalNorm.apply(x, weight, bias, running_mean, running_var, momentum, eps, counts)  # type: ignore[no-untyped-call,no-any-return]


class _GlobalNorm(torch.autograd.Function):
    """The norm as one node of autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
        counts: bool,
    ) -> Tensor:
        group = dist.group.WORLD
        assert group is not None
        ctx.carrier, ctx.eps, ctx.counts = carrying_device(group, [x]), eps, counts
        rows = all_gather_rows(_own_statistics(x, counts).to(ctx.carrier).view(torch.uint8), group)
        mean, var, ctx.total = _of_all(_array(rows.to(x.device).view(torch.float64)), x.shape[1])
        if x.is_cpu and ctx.total == 1:  # elsewhere this would wait for the device
            raise ValueError(
                "batch norm was given a single value of each channel on all ranks together,"
                f" {tuple(x.shape)} on this one: expected more than 1 in training."
            )
        ctx.rate = (var + eps) ** -0.5
        kind = torch.float32 if x.dtype in _HALF else x.dtype
        unbiased = var * (ctx.total / (ctx.total - 1 + (ctx.total == 1)))
        for running, new in ((running_mean, mean), (running_var, unbiased)):
            if running is not None and (ctx.total or not x.is_cpu):
                running.lerp_(torch.as_tensor(new).to(running.dtype), momentum)
        mean, var = torch.as_tensor(mean).to(kind), torch.as_tensor(var).to(kind)
        ctx.save_for_backward(x, weight, mean, var)
        return _normalized(x, weight, bias, mean, var, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var = ctx.saved_tensors
        # As if the statistics were constants: for the input, and two sums over this rank's part.
        of_x, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, x, weight, mean, var, None, None, False, ctx.eps, [True, True, True]
        )
        sums = torch.stack([of_bias, of_weight]).to(ctx.carrier, torch.float64)
        if not ctx.counts:
            sums.zero_()
        dist.all_reduce(sums)
        if ctx.counts:
            # What flows back through the statistics is linear in the input, and so is one more norm.
            # A copy, because FSDP cannot free the memory of a weight that numpy has seen.
            scale = 1.0 if weight is None else _array(weight.detach().clone())
            factor = ctx.rate * scale / -ctx.total
            by_bias, by_weight = _array(sums.to(x.device)) * factor
            by_x, constant = (torch.as_tensor(one).to(mean.dtype) for one in (by_weight * ctx.rate, by_bias))
            of_x = _normalized(x, by_x, constant, mean, torch.ones_like(var), 0.0).add_(of_x)
        return (
            of_x,
            of_weight if weight is not None else None,
            of_bias if ctx.needs_input_grad[2] else None,
            *[None] * 5,
        )


def _normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> Tensor:
    return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, torch.backends.cudnn.enabled)


def _own_statistics(x: Tensor, counts: bool) -> Tensor:
    """Return mean and variance of each channel on this rank, and of how many values, in float64."""
    channels = x.shape[1]
    if not (counts and x.numel()):
        return torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
    # One pass of the kernel that torch's own batch norm uses. For half precision it computes in the dtype of running
    # statistics, if it is given some.
    like = torch.zeros(channels, device=x.device) if x.dtype in _HALF else None
    mean, var = torch.batch_norm_update_stats(x, like, like, 0.0)
    return torch.cat([mean, var, mean.new_full((1,), x.numel() // channels, dtype=torch.float64)])


def _array(tensor: Tensor) -> Any:
    """Return what numbers of a channel are computed with: on the CPU numpy, which takes a fourth of the time."""
    return tensor.detach().numpy() if tensor.is_cpu else tensor.detach()


def _of_all(table: Any, channels: int) -> tuple[Any, Any, Any]:
    """Return mean and variance of each channel over all ranks, and of how many values; a row is a rank's."""
    sizes = table[:, -1:]
    total = sizes.sum()
    shares = sizes / (
        total + (total == 0)
    )  # in a step of one rank alone, whose batch is padding, no rank counts
    both = (table * shares).sum(0)
    mean = both[:channels]
    between = ((table[:, :channels] - mean) ** 2 * shares).sum(0)
    return mean, both[channels:-1] + between, total
