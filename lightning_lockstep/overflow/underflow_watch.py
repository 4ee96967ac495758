"""Now and then, a look at what is lost because it is too small."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_lockstep._lightning import Trainer
from lightning_lockstep.overflow.settings import OverflowSettings
from lightning_lockstep.overflow.underflow import Share, adam_update_underflow, gradient_underflow

__all__ = ["UnderflowWatch"]

_log = logging.getLogger(__name__)
_LOW = (torch.float16, torch.bfloat16)
_NAMED = 5


class UnderflowWatch:
    """Warns when a large share of the gradients or of an Adam update is flushed to zero.

    Args:
        settings: What the detector was asked to do.
        module: The LightningModule.

    Ranks: rank 0 looks, since reduced gradients are the same everywhere; nothing is sent.
    """

    def __init__(self, settings: OverflowSettings, module: nn.Module) -> None:
        self._threshold = settings.underflow_threshold
        self._every = settings.underflow_every_n_steps
        self._names: dict[Tensor, str] = {p: name for name, p in module.named_parameters()}
        self._calls = 0
        self._warned: set[str] = set()

    def look(self, trainer: Trainer, optimizer: Optimizer, *, main: bool) -> None:
        """Look, if it is time to, and warn once of each kind.

        Args:
            trainer: The Trainer.
            optimizer: The one about to step.
            main: Whether this is rank 0.
        """
        self._calls += 1
        if self._threshold is None or not main or self._calls % self._every:
            return
        scaled = getattr(trainer.precision_plugin, "precision", "") == "16-mixed"
        gradients = [
            (self._names.get(p, "?"), p.grad)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and (scaled or p.grad.dtype in _LOW)
        ]
        self._warn("of the gradients is flushed to zero", gradient_underflow(gradients), _GRADIENT_ADVICE)
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


_GRADIENT_ADVICE = "Use a loss scaler (16-mixed), bf16, or float32 for these modules."
_UPDATE_ADVICE = (
    "Keep the weights in float32 (16-mixed or bf16-mixed instead of -true), or raise the learning rate."
)
