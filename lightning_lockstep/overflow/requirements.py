"""What the detector cannot work with, refused before training."""

from __future__ import annotations

from torch import nn

from lightning_lockstep._doors import torch_internals
from lightning_lockstep._lightning import Trainer
from lightning_lockstep._lightning.internals import averages_models, is_compiled
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.overflow.settings import OverflowSettings
from lightning_lockstep.steps.capabilities import missing_capabilities
from lightning_lockstep.steps.engines import HasEngineGradients

__all__ = ["refuse_compiled", "refuse_strategy"]


def refuse_strategy(trainer: Trainer, settings: OverflowSettings) -> None:
    """Raise where gradients differ among ranks and no engine reports them, or are not there to be checked."""
    if isinstance(trainer.strategy, HasEngineGradients):
        return
    name = type(trainer.strategy).__name__
    for why in missing_capabilities(trainer.strategy, "whole_gradients"):
        raise ConfigurationError(
            f"OverflowDetector does not work with {name}: {why}. Use a DDP or single-device strategy to find the"
            " overflow."
        )
    for why in missing_capabilities(trainer.strategy, "runs_at_once"):
        _refuse_early_answers(trainer, settings, name, why)
    if averages_models(trainer.strategy):
        raise ConfigurationError(
            f"OverflowDetector does not work with model_averaging_period on {name}: between two averages each rank"
            " has gradients of its own, so that one rank would act alone. Train without it to find the overflow."
        )


def _refuse_early_answers(trainer: Trainer, settings: OverflowSettings, name: str, why: str) -> None:
    if settings.action == "skip":
        raise ConfigurationError(
            f"OverflowDetector(action='skip') does not work with {name}: {why}, and once the answer is known the step"
            " was taken and cannot be skipped. Use action='raise', which leaves the weights as they were before the"
            " bad step, or 'warn'."
        )
    if not settings.gradients and trainer.world_size > 1:
        raise ConfigurationError(
            f"OverflowDetector(gradients=False) does not work with {name} on several ranks: {why}, so only"
            " the reduced gradients inform all ranks. Use gradients=True."
        )


def refuse_compiled(root: nn.Module) -> None:
    """Raise where hooks would not fire because ``torch.compile`` has compiled the module or part of it."""
    compiled = [
        name or type(root).__name__
        for name, module in root.named_modules()
        if torch_internals.is_compiled(module)
    ]
    if is_compiled(root):
        compiled.insert(0, type(root).__name__)
    if compiled:
        raise ConfigurationError(
            f"OverflowDetector(mode='hooks') was given a model compiled with torch.compile ({', '.join(compiled[:5])});"
            " hooks do not fire reliably inside compiled code. Use mode='replay', which replays a failing batch"
            " uncompiled, or leave torch.compile out to find the overflow."
        )
