"""A step on XLA devices: 16 bits by casting, values read late."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lightning_lockstep._lightning import CPUAccelerator, HalfPrecision, MixedPrecision, Precision
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.steps.patching import replaced

# -- Gradients of XLA devices, as what comes after a backward expects them --


def own_memory(module: torch.nn.Module) -> None:
    """Give each gradient of a module its own memory, so that it can be changed in place."""
    # The gradient of a sum is one number seen many times, and torch-xla does not show that by strides;
    # autograd keeps it as it is, and clipping it in place would then change the one number many times.
    for parameter in module.parameters():
        if parameter.grad is not None and not parameter.grad.is_sparse:
            parameter.grad = parameter.grad.clone()


# -- 16 bits on XLA devices by casting or autocast, so that only what is meant to be is in 16 bits --
# The table of docs/xla.md, "16 bits", says what each setting makes of parameters, inputs and metrics.

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
        """Let ``configure_model`` make what it makes in its own dtypes; :meth:`convert_module` casts it afterwards."""
        # With bfloat16 as the default dtype, metrics that are made there would count in 16 bits.
        return nullcontext()

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
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
        return apply_to_collection(data, Tensor, self._cast)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._becomes.get(tensor.dtype, tensor.dtype))


def resolve_xla_precision(plugin: Precision, requested: str | None, *, downcast_bf16: bool) -> Precision:
    """Return the plugin that does on XLA devices what was requested, else what ``plugin`` names."""
    name = requested or str(plugin.precision)
    if name not in _SUPPORTED:
        raise ConfigurationError(f"precision={name!r}: expected one that XLA devices support: {', '.join(_SUPPORTED)}.")
    if downcast_bf16 and name != "bf16-true":
        raise ConfigurationError(
            f"downcast_bf16=True with precision={name!r}: expected precision='bf16-true'. With both, float32 becomes"
            " bfloat16, and float64 becomes float32 rather than bfloat16."
        )
    if downcast_bf16 or (name == "bf16-true" and type(plugin) is HalfPrecision):
        return CastPrecision(downcast=downcast_bf16)
    return MixedPrecision("bf16-mixed", "xla") if name == "bf16-mixed" else plugin


# -- Lightning's accelerator for XLA devices on the CPU --


class XLADevices(CPUAccelerator):
    """Virtual XLA devices on the CPU, which Lightning's accelerator for XLA takes for no devices."""

    def setup_device(self, device: torch.device) -> None:
        """Do nothing: torch-xla has the devices."""


# -- A run on XLA devices that reads values from them only where they are logged --


def begin_lazy_run(trainer: Any) -> Callable[[], None]:
    """Read values of training from the devices only if they are logged; return what ends this."""
    # Lightning reads each value of the progress bar from the device at every step, twice; the host then waits for the
    # step rather than prepare the next one. Here the bar shows what was read when values were last logged.
    undo, results = ExitStack(), trainer.fit_loop.epoch_loop._results
    undo.enter_context(replaced(results, reset=partial(_reset, results, results.reset)))
    if not trainer.fast_dev_run:
        undo.enter_context(replaced(results, metrics=partial(_read, trainer, results, results.metrics)))
    return undo.close


def _read(trainer: Any, results: Any, read_all: Callable[[bool], Any], on_step: bool) -> Any:
    """Read the values of the progress bar from the device only if they are logged, and when an epoch ends."""
    logs = trainer._logger_connector.should_update_logs
    if trainer.log_every_n_steps == 0:  # nothing is logged: every 50th step
        logs = (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % 50 == 0
    with ExitStack() as stack:
        for value in results.values() if on_step and not logs else ():
            stack.enter_context(replaced(value.meta, prog_bar=False))
        return read_all(on_step)


def _reset(results: Any, reset_all: Callable[..., None], metrics: bool | None = None, fx: str | None = None) -> None:
    """Reset what was logged, but not what is logged at training steps only and has no mean."""
    # The new epoch's first step would otherwise have another tensor, and torch-xla would compile the step anew.
    kept = [
        (each, each.value, each.cumulated_batch_size)
        for each in results.values()
        if each.is_tensor and each.meta.is_mean_reduction and not each.meta.on_epoch
    ]
    reset_all(metrics, fx)
    for each, value, count in kept:
        each.value, each.cumulated_batch_size = value, count
