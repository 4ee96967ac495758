"""How much of a gradient or of an optimizer's update is lost because it is too small for its format."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_lockstep.numerics.statistics import plain_values

__all__ = ["Share", "adam_update_underflow", "gradient_underflow"]

_LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Share:
    """How many of some values are lost.

    Attributes:
        lost: Number lost.
        counted: Number of all; never 0.
    """

    lost: int
    counted: int

    @property
    def value(self) -> float:
        """The share itself, from 0 to 1."""
        return self.lost / self.counted


def gradient_underflow(named: Iterable[tuple[str, Tensor]]) -> dict[str, Share]:
    """Return, by name, the share of each gradient that was flushed to zero.

    Whole rows of zeros (rows of an embedding that the batch did not use, units that are switched off) are
    zero for another reason and do not count.

    Args:
        named: Names and gradients.

    Ranks: any rank, alone. Two passes over each gradient, and on a GPU it waits for them.
    """
    shares = {}
    for name, gradient in named:
        values = plain_values(gradient)
        if values is None or values.dim() == 0:
            continue
        rows = values.reshape(-1, values.shape[-1]) if values.dim() > 1 else values.reshape(1, -1)
        zero = rows == 0
        alive = ~zero.all(dim=1)
        count = int(alive.sum()) * rows.shape[1]
        if count:
            shares[name] = Share(int(zero[alive].sum()), count)
    return shares


def adam_update_underflow(optimizer: Optimizer, names: dict[Tensor, str]) -> dict[str, Share]:
    """Return, by name, the share of each weight that the next Adam update would leave as it is.

    Only float16 and bfloat16 weights are looked at: an update smaller than half the distance to the next
    number of that format changes nothing.

    Args:
        optimizer: An Adam-like optimizer (its state has ``exp_avg`` and ``exp_avg_sq``); others give nothing.
        names: Name of each parameter.

    Ranks: any rank, alone. A few passes over the weights, and on a GPU it waits for them.
    """
    shares = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if parameter.dtype not in _LOW or "exp_avg" not in state or "exp_avg_sq" not in state:
                continue
            update = _adam_update(state, group)
            moved = update != 0
            count = int(moved.sum())
            if count:
                weight = parameter.detach()
                stuck = ((weight.float() - update).to(weight.dtype) == weight) & moved
                shares[names.get(parameter, "?")] = Share(int(stuck.sum()), count)
    return shares


def _adam_update(state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
    first, second = group.get("betas", (0.9, 0.999))
    step = max(float(state["step"]), 1.0)
    mean: Tensor = state["exp_avg"].detach().float() / (1 - float(first) ** step)
    square: Tensor = state["exp_avg_sq"].detach().float() / (1 - float(second) ** step)
    update: Tensor = float(group["lr"]) * mean / (square.sqrt() + float(group.get("eps", 1e-8)))
    return update
