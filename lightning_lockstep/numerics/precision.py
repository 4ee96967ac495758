"""Precision: modules kept in float32, and what the precision strings of Lightning mean."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_lockstep._lightning import MixedPrecision, Precision, _convert_precision_to_unified_args
from lightning_lockstep._trainer import given_to_trainer
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.numerics.statistics import LOW_PRECISION

# -- Modules that compute in float32 whatever the precision around them --

_Module = TypeVar("_Module", bound=nn.Module)


def run_in_fp32(module: _Module) -> _Module:
    """Make a module compute in float32, with autocast off, whatever the precision around it.

    Inputs of float16 or bfloat16 come in as float32; outputs go back to the dtype of the first floating-point input (of
    the parameters if there is none, such as for an embedding). Parameters that are themselves float16 or bfloat16 are
    cast for the computation only: gradients reach them, the optimizer and ``state_dict`` see no difference. An output
    too large for the dtype it is cast back to is infinite again; in that case apply this to the enclosing module.

    Args:
        module: Any module. Calling this again does nothing.

    Returns:
        The same module.

    Ranks: every rank; nothing is sent. Works below DDP.
    """
    if not runs_in_fp32(module):
        module.forward = _Float32Forward(module, module.__dict__.get("forward"))
    return module


def undo_run_in_fp32(module: nn.Module) -> None:
    """Undo :func:`run_in_fp32`; a module that was never changed stays as it is."""
    wrapper = module.__dict__.get("forward")
    if isinstance(wrapper, _Float32Forward):
        if wrapper.former is None:
            del module.__dict__["forward"]
        else:
            module.forward = wrapper.former


def runs_in_fp32(module: nn.Module) -> bool:
    """Return whether :func:`run_in_fp32` was applied to this very module."""
    return isinstance(module.__dict__.get("forward"), _Float32Forward)


class _Float32Forward:
    """Takes the place of ``module.forward``."""

    def __init__(self, module: nn.Module, former: Callable[..., Any] | None) -> None:
        self._module, self.former = module, former
        # What `functional_call` calls: a module around this one, with the original forward.
        self._around = nn.Module()
        self._around.inner = module
        self._around.forward = former if former is not None else type(module).forward.__get__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        leaves, _ = pytree.tree_flatten((args, kwargs))
        given = next((x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()), None)
        floating = (p for p in module.parameters() if p.is_floating_point())
        example = given if given is not None else next(floating, None)
        device = (example.device if example is not None else torch.device("cpu")).type
        with torch.autocast(device, enabled=False):
            args, kwargs = _cast((args, kwargs), LOW_PRECISION, torch.float32)
            output = self._compute(module, args, kwargs)
        if example is None or example.dtype not in LOW_PRECISION:
            return output
        return _cast(output, (torch.float32,), example.dtype)

    def _compute(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        named = (*module.named_parameters("inner"), *module.named_buffers("inner"))
        wide = {name: tensor.float() for name, tensor in named if tensor.dtype in LOW_PRECISION}
        if not wide:
            return self._around(*args, **kwargs)
        output = torch.func.functional_call(self._around, wide, args, kwargs)
        with torch.no_grad():
            for name, buffer in module.named_buffers("inner"):
                if name in wide:
                    buffer.copy_(wide[name])
        return output


def _cast(values: Any, given: Sequence[torch.dtype], wanted: torch.dtype) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x.to(wanted) if x.dtype in given else x, values)


# -- Precision plugins that do exactly what Lightning's precision names say --
# Lightning turns ``16-mixed`` on a CPU into ``bf16-mixed`` and only warns. Here a name does what it says on
# the run's device, or is refused with the names that would work.

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
    """Return ``plugin``, or another one if Lightning's does something else than its name says."""
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
    # For a device that Lightning does not know it takes CUDA's autocast, which casts nothing there.
    if type(plugin) is MixedPrecision and plugin.device != device_type and device_type not in ("cpu", "cuda"):
        mixed: Any = plugin.precision
        return MixedPrecision(mixed, device_type)
    return plugin
