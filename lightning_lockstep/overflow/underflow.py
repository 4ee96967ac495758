"""How much of the gradients, or of an optimizer's update, is lost because it is too small for its format."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_lockstep._lightning import Trainer
from lightning_lockstep.numerics.statistics import LOW_PRECISION, plain_values
from lightning_lockstep.overflow.settings import OverflowSettings

_log = logging.getLogger(__name__)
_NAMED = 5
_GRADIENT_ADVICE = "Use a loss scaler (16-mixed), bf16, or float32 for these modules."
_UPDATE_ADVICE = (
    "Keep the weights in float32 (16-mixed or bf16-mixed instead of -true), or raise the learning rate."
)


class UnderflowCheck:
    """Warns when a large share of the gradients or of an Adam update is flushed to zero."""

    def __init__(self, settings: OverflowSettings, module: nn.Module) -> None:
        self._threshold = settings.underflow_threshold
        self._every = settings.underflow_every_n_steps
        self._names: dict[Tensor, str] = {p: name for name, p in module.named_parameters()}
        self._steps = 0
        self._warned: set[str] = set()

    def __call__(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Check every so many optimizer steps, and give each kind of warning once."""
        self._steps += 1
        if self._threshold is None or self._steps % self._every:
            return
        scaled = getattr(trainer.precision_plugin, "precision", "") == "16-mixed"
        gradients = [
            (self._names.get(p, "?"), p.grad)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and (scaled or p.grad.dtype in LOW_PRECISION)
        ]
        self._warn("of the gradients are flushed to zero", gradient_underflow(gradients), _GRADIENT_ADVICE)
        shares = adam_update_underflow(optimizer, self._names)
        self._warn(
            "of the Adam update changes no weight: it is too small for their format", shares, _UPDATE_ADVICE
        )

    def _warn(self, what: str, shares: Mapping[str, Share], advice: str) -> None:
        total = sum(share.counted for share in shares.values())
        lost = sum(share.lost for share in shares.values()) / total if total else 0.0
        if self._threshold is None or lost < self._threshold or what in self._warned:
            return
        self._warned.add(what)
        worst = sorted(shares.items(), key=lambda item: -item[1].value)[:_NAMED]
        named = ", ".join(f"{name} {share.value:.0%}" for name, share in worst)
        _log.warning("underflow: %.0f%% %s (worst: %s). %s", 100 * lost, what, named, advice)


class Share(NamedTuple):
    """How many of some values are lost."""

    lost: int
    counted: int  # never 0

    @property
    def value(self) -> float:
        """The share itself, from 0 to 1."""
        return self.lost / self.counted


def gradient_underflow(named: Iterable[tuple[str, Tensor]]) -> dict[str, Share]:
    """Return, by name, the share of each gradient that was flushed to zero."""
    # Whole rows of zeros (rows of an embedding that the batch did not use, units that are switched off) are
    # zero for another reason and do not count.
    shares = {}
    for name, gradient in named:
        values = plain_values(gradient)
        if values is None or values.dim() == 0:
            continue
        zero = values.reshape(-1, values.shape[-1]) == 0
        used = zero[~zero.all(dim=1)]
        if used.numel():
            shares[name] = Share(int(used.sum()), used.numel())
    return shares


def adam_update_underflow(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Share]:
    """Return, by name, the share of each weight that the next Adam update would leave as it is."""
    # Only float16 and bfloat16 weights are checked: an update smaller than half the distance to the next
    # number of that format changes nothing.
    shares = {}
    for group in optimizer.param_groups:
        first, second = group.get("betas", (0.9, 0.999))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if parameter.dtype not in LOW_PRECISION or "exp_avg" not in state or "exp_avg_sq" not in state:
                continue
            step = max(float(state["step"]), 1.0)
            mean = state["exp_avg"].detach().float() / (1 - float(first) ** step)
            square = state["exp_avg_sq"].detach().float() / (1 - float(second) ** step)
            update = float(group["lr"]) * mean / (square.sqrt() + float(group.get("eps", 1e-8)))
            moved, weight = update != 0, parameter.detach()
            stuck = ((weight.float() - update).to(weight.dtype) == weight) & moved
            if moved.any():
                shares[names.get(parameter, "?")] = Share(int(stuck.sum()), int(moved.sum()))
    return shares
