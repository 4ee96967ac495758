"""Precision plugins that do exactly what Lightning's precision names say.

Lightning turns ``16-mixed`` on a CPU into ``bf16-mixed`` and only warns. Here a name does what it says on the
run's device, or is refused with the names that would work.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from lightning_lockstep._lightning import (
    MixedPrecision,
    Precision,
    _convert_precision_to_unified_args,
)
from lightning_lockstep._lightning.internals import given_to_trainer
from lightning_lockstep.errors import ConfigurationError

__all__ = ["resolve_precision", "requested_precision", "supported_precisions"]

_log = logging.getLogger(__name__)


def supported_precisions(device_type: str) -> tuple[str, ...]:
    """Return the names that do what they say on a device of this type here."""
    names = ["64-true", "32-true", "16-true", "16-mixed"]
    if device_type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
        names += ["bf16-true", "bf16-mixed"]
    if device_type == "cuda":
        names += ["transformer-engine", "transformer-engine-float16"]
    return tuple(names)


def requested_precision() -> str | None:  # None: no Trainer is being made, or it was given none
    """Return the precision that was given to the Trainer under construction, in Lightning's unified form."""
    given = given_to_trainer("precision")
    return None if given is None else str(_convert_precision_to_unified_args(given))


def resolve_precision(
    plugin: Precision,
    requested: str | None,  # None: a plugin or nothing was given
    device_type: str,
) -> Precision:
    """Return ``plugin``, or another one where Lightning's does something else than its name says."""
    name = requested or str(plugin.precision)
    supported = supported_precisions(device_type)
    if name not in supported:
        raise ConfigurationError(
            f"precision={name!r}: expected one that this {device_type.upper()} supports: {', '.join(supported)}."
        )
    if requested == "16-mixed" and device_type == "cpu" and str(plugin.precision) != "16-mixed":
        _log.info(
            "precision='16-mixed' runs in float16 with loss scaling on this CPU;"
            " Lightning's warning that it uses bf16-mixed instead does not apply to this strategy."
        )
        return MixedPrecision("16-mixed", "cpu")
    # For a device that it does not know, Lightning makes autocast that of CUDA, which casts nothing there.
    if type(plugin) is MixedPrecision and plugin.device != device_type and device_type not in ("cpu", "cuda"):
        mixed: Any = plugin.precision
        return MixedPrecision(mixed, device_type)
    return plugin
