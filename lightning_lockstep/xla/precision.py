"""16 bits on XLA devices by casting or autocast, so that only what is meant to be is in 16 bits.

=============== =================== =================== ====================== ==================
setting         float32 parameters  float64 parameters  what a module computes logged, metrics
=============== =================== =================== ====================== ==================
``32-true``     float32             float64             as they are            as they are
``64-true``     float64             float64             float64                as they are
``bf16-mixed``  float32             float64             bfloat16 by autocast   float32
``bf16-true``   bfloat16            bfloat16            bfloat16               float32
with downcast   bfloat16            float32             bfloat16, float32      float32
=============== =================== =================== ====================== ==================

The optimizer's state has the dtype of its parameter; inputs are cast as parameters are.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lightning_lockstep._lightning import HalfPrecision, MixedPrecision, Precision
from lightning_lockstep.errors import ConfigurationError

__all__ = ["CastPrecision", "resolve_xla_precision"]

_SUPPORTED = ("32-true", "64-true", "bf16-true", "bf16-mixed")
_FLOATS = (torch.float16, torch.float32, torch.float64)


class CastPrecision(HalfPrecision):
    """16 bits by casting modules and inputs to bfloat16, all but the states of metrics."""

    def __init__(self, *, downcast: bool = False) -> None:
        super().__init__("bf16-true")
        self._becomes = dict.fromkeys(_FLOATS, torch.bfloat16)
        if downcast:
            self._becomes[torch.float64] = torch.float32

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Let ``configure_model`` make what it makes in its own dtypes; :meth:`convert_module` casts it afterwards.

        With bfloat16 as the default dtype, metrics that are made there would count in 16 bits.
        """
        return nullcontext()

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Cast the parameters and buffers of a module, each by its own dtype."""
        metrics = {part for one in module.modules() if isinstance(one, Metric) for part in one.modules()}
        for part in module.modules():  # Module.to() takes one dtype for all, and metrics with it
            if part in metrics:
                continue
            for parameter in part.parameters(recurse=False):
                parameter.data = self._cast(parameter.data)
            for name, buffer in part.named_buffers(recurse=False):
                setattr(part, name, self._cast(buffer))
        return module

    def convert_input(self, data: Any) -> Any:
        """Cast the tensors of a batch, each by its own dtype."""
        return apply_to_collection(data, Tensor, self._cast)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._becomes.get(tensor.dtype, tensor.dtype))


def resolve_xla_precision(plugin: Precision, requested: str | None, *, downcast_bf16: bool) -> Precision:
    """Return the plugin that does on XLA devices what was requested, else what ``plugin`` names."""
    name = requested or str(plugin.precision)
    if name not in _SUPPORTED:
        raise ConfigurationError(
            f"precision={name!r}: expected one that XLA devices support: {', '.join(_SUPPORTED)}."
        )
    if downcast_bf16 and name != "bf16-true":
        raise ConfigurationError(
            f"downcast_bf16=True with precision={name!r}: expected precision='bf16-true', of which it is the second"
            " level: float32 becomes bfloat16, and float64 becomes float32 rather than bfloat16."
        )
    if downcast_bf16 or (name == "bf16-true" and type(plugin) is HalfPrecision):
        return CastPrecision(downcast=downcast_bf16)
    return MixedPrecision("bf16-mixed", "xla") if name == "bf16-mixed" else plugin
