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

from lightning_lockstep.distributed.coordination.gather_uneven import all_gather_rows, carrying_device
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
    # It gathers 24 bytes a channel from each rank, and reduces 16 in backward.
    if not training or not process_group_exists() or dist.get_world_size() == 1:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    if x.dtype in _HALF:  # torch computes them with parameters of float32
        weight, bias = (None if one is None else one.float() for one in (weight, bias))
    return _GlobalNorm.apply(x, weight, bias, running_mean, running_var, momentum, eps, counts)  # type: ignore[no-untyped-call,no-any-return]


class _GlobalNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, *others: Any) -> Tensor:
        running_mean, running_var, momentum, eps, counts = others
        group = dist.group.WORLD
        assert group is not None
        ctx.carrier, ctx.eps, ctx.counts = carrying_device(group, [x]), eps, counts
        rows = all_gather_rows(_own_statistics(x, counts).to(ctx.carrier), group).to(x.device)
        means, variances, sizes = rows.view(-1, 3, x.shape[1]).unbind(1)
        total = sizes.sum(0)
        if x.is_cpu and total[0] == 1:  # elsewhere this would wait for the device
            raise ValueError(
                "batch norm was given a single value of each channel on all ranks together,"
                f" {tuple(x.shape)} on this one: expected more than 1 in training."
            )
        # No rank counts in a step of one rank alone, whose batch is padding: the running statistics then stay.
        of_value = 1 / total.clamp(min=1)
        mean = (means * sizes).sum(0) * of_value
        var = ((variances + (means - mean).square()) * sizes).sum(0) * of_value
        unbiased = var * (total / (total - 1).clamp(min=1))
        for running, new in ((running_mean, mean), (running_var, unbiased)):
            if running is not None:
                running.lerp_(new.to(running.dtype), (total > 0).to(running.dtype) * momentum)
        ctx.rate, ctx.of_value = (var + eps).rsqrt(), of_value * counts
        kind = torch.float32 if x.dtype in _HALF else x.dtype
        mean, var = mean.to(kind), var.to(kind)
        ctx.save_for_backward(x, weight, mean, var)
        return _normalized(x, weight, bias, mean, var, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var = ctx.saved_tensors
        # The gradients of weight and bias are this rank's part of two sums over all values of a channel.
        _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, x, weight, mean, var, None, None, False, ctx.eps, [False, True, True]
        )
        sums = torch.stack([of_weight, of_bias]).to(ctx.carrier, torch.float64)
        if not ctx.counts:
            sums.zero_()
        dist.all_reduce(sums)
        # What flows back through the statistics is linear in the normalized input, and so is one more norm.
        scale = ctx.rate if weight is None else ctx.rate * weight
        by_value, constant = (sums.to(x.device) * -(scale * ctx.of_value)).to(mean.dtype)
        of_x = _normalized(x, by_value, constant, mean, var, ctx.eps)
        of_x.addcmul_(gradient, scale.to(mean.dtype).view(-1, *[1] * (x.ndim - 2)))
        wanted = of_x, of_weight if weight is not None else None, of_bias if ctx.needs_input_grad[2] else None
        return *wanted, *[None] * 5


def _normalized(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, torch.backends.cudnn.enabled)


def _own_statistics(x: Tensor, counts: bool) -> Tensor:
    """Return, in float64, mean and variance of each channel on this rank, and of how many values they are."""
    channels = x.shape[1]
    if not (counts and x.numel()):
        return torch.zeros(3 * channels, dtype=torch.float64, device=x.device)
    # One pass of the kernel of torch's own batch norm; for half precision it computes in the running statistics' dtype.
    like = torch.zeros(channels, device=x.device) if x.dtype in _HALF else None
    mean, var = torch.batch_norm_update_stats(x, like, like, 0.0)
    size = torch.full_like(mean, x.numel() // channels, dtype=torch.float64)
    return torch.cat([mean, var, size])
