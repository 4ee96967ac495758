"""16 bits by casting: which dtypes a step uses, and gradients as what follows a backward expects them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lightning_lockstep._doors.lightning import HalfPrecision, MixedPrecision, Precision
from lightning_lockstep.errors import ConfigurationError

# -- Which dtypes a run on XLA devices really uses, seen in its first training step --


class DtypeReport:
    """Notes the dtypes in a step: inputs, outputs of modules, parameters, gradients, optimizer state."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._found: dict[str, set[str]] = {"inputs": set(), "computed": set()}
        leaves = (part for part in module.modules() if next(part.children(), None) is None)
        self._hooks = [part.register_forward_hook(self._note_output) for part in leaves]

    def note_inputs(self, batch: Any) -> None:
        apply_to_collection(batch, Tensor, lambda one: self._note("inputs", [one]))

    def _note_output(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._module.training:  # a batch of the validation before training computes by its own rules
            apply_to_collection(output, Tensor, lambda one: self._note("computed", [one]))

    def _note(self, kind: str, tensors: Iterable[Tensor]) -> None:
        self._found.setdefault(kind, set()).update(_floating(tensors))

    def finish(self, optimizer: Any) -> str:
        """Return, after the first step, such as ``inputs bfloat16; computed ...``, and watch no longer."""
        parameters = list(self._module.parameters())
        self._note("parameters", parameters)
        self._note("gradients", (one.grad for one in parameters if one.grad is not None))
        states = (value for state in optimizer.state.values() for value in state.values())
        # A count of steps is a tensor too, without dimensions.
        self._note("optimizer state", (one for one in states if isinstance(one, Tensor) and one.dim()))
        self.forget()
        parts = (f"{kind} {' and '.join(sorted(found))}" for kind, found in self._found.items() if found)
        return "; ".join(parts) + "."

    def forget(self) -> None:
        """Take the forward hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _floating(tensors: Iterable[Tensor]) -> set[str]:
    return {str(one.dtype).removeprefix("torch.") for one in tensors if one.is_floating_point()}


# -- Gradients of XLA devices, as what comes after a backward expects them --


def own_memory(module: torch.nn.Module) -> None:
    """Give each gradient of a module memory of its own, so that it can be changed in place.

    The gradient of a sum is one number seen many times, and torch-xla does not show that by strides; autograd keeps
    it as it is, and clipping it in place would then change the one number many times.
    """
    for parameter in module.parameters():
        if parameter.grad is not None and not parameter.grad.is_sparse:
            parameter.grad = parameter.grad.clone()


# -- 16 bits on XLA devices by casting or autocast, so that only what is meant to be is in 16 bits --
# =============== =================== =================== ====================== ================== setting
# float32 parameters  float64 parameters  what a module computes logged, metrics ===============
# =================== =================== ====================== ================== ``32-true``     float32
# float64             as they are            as they are ``64-true``     float64             float64
# float64                as they are ``bf16-mixed``  float32             float64             bfloat16 by
# autocast   float32 ``bf16-true``   bfloat16            bfloat16            bfloat16               float32
# with downcast   bfloat16            float32             bfloat16, float32      float32 ===============
# =================== =================== ====================== ==================
#
# The optimizer's state has the dtype of its parameter; inputs are cast as parameters are.


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
