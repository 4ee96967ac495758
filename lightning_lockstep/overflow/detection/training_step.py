"""Where a detection sees a training step: below the distributed wrapper and inside autocast."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning_lockstep._lightning import LightningModule
from lightning_lockstep.steps.patching import put_in_place

__all__ = ["wrap_training_step"]


def wrap_training_step(
    module: LightningModule, begin: Callable[[Any, Any, Any], AbstractContextManager[Any]]
) -> Callable[[], None]:
    """Run each ``training_step``, below DDP and inside autocast, within ``begin(step, args, kwargs)``.

    Returns what undoes it.
    """
    original = module.training_step

    @functools.wraps(original)
    def training_step(*args: Any, **kwargs: Any) -> Any:
        with begin(original, args, kwargs):
            return original(*args, **kwargs)

    # Lightning and torch.compile look at the signature of what was there first.
    training_step.__wrapped__ = inspect.unwrap(original)
    return put_in_place(module, "training_step", training_step)
