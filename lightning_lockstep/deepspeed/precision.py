"""The precision of a run under DeepSpeed: what the Trainer and DeepSpeed's configuration say together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_lockstep._console import say
from lightning_lockstep._doors.deepspeed_internals import has_own_boundaries, optimizer_steps
from lightning_lockstep._doors.torch_internals import cpu_computes_in_float16
from lightning_lockstep._lightning import DeepSpeedPrecision, Precision
from lightning_lockstep.deepspeed.configuration.reading import section, stage_of
from lightning_lockstep.deepspeed.configuration.trainer_values import PRECISIONS, precision_of
from lightning_lockstep.deepspeed.loss_scale import LossScaleHistory, read_step
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.steps.patching import replaced

__all__ = ["EnginePrecision", "cpu_has_float16", "resolve_deepspeed_precision", "supported_precisions"]


class EnginePrecision(DeepSpeedPrecision):
    """Lightning's precision plugin of DeepSpeed, whose engine steps and divides as Lightning's loop does.

    Lightning divides the loss by ``accumulate_grad_batches``, and DeepSpeed would divide it again: the gradients were
    that much too small for SGD, and for clipping. Lightning also counts accumulated batches from the start of each
    epoch and steps after its last batch, where DeepSpeed counts on over the epochs; so the engine is told after which
    batches it steps. It also says once when DeepSpeed skips more optimizer steps than its loss scale explains.
    """

    def __init__(self, precision: Any) -> None:
        super().__init__(precision)
        self.history = LossScaleHistory()
        self.has_accumulated = False  # gradients of batches after which no step was made yet
        self._steps = False  # whether a backward is that of a batch after which the optimizer steps

    def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> Any:
        """Begin a run, in which nothing is accumulated yet."""
        self.has_accumulated = False
        return super().connect(model, optimizers, lr_schedulers)

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("scale_wrt_gas", not model.automatic_optimization)
        if self._steps or not model.automatic_optimization:
            super().backward(tensor, model, optimizer, *args, **kwargs)
            return
        engine = model.trainer.model
        _tell_boundary(engine, False)
        super().backward(tensor, model, optimizer, *args, **kwargs)
        engine.step()  # counts the batch
        self.has_accumulated = True

    def optimizer_step(  # type: ignore[override] # as Lightning's own plugin of DeepSpeed
        self, optimizer: Any, model: Any, closure: Any, **kwargs: Any
    ) -> Any:
        """Run the closure and the engine's step, which is skipped where gradients are not finite."""
        engine = model.trainer.model
        before = optimizer_steps(engine)
        if (
            model.automatic_optimization
        ):  # otherwise nobody knows before a backward whether a step will follow
            _tell_boundary(engine, True)
        with replaced(self, _steps=True):
            result = super().optimizer_step(optimizer, model, closure, **kwargs)
        self.has_accumulated = False
        outcome = read_step(engine) if optimizer_steps(engine) != before else None
        if outcome is not None:
            self.history.record(outcome)
            news = self.history.news()
            if news and model.trainer.is_global_zero:
                say(f"lightning-lockstep: {news}")
        return result


def _tell_boundary(engine: Any, steps: bool) -> None:
    if not has_own_boundaries(engine):
        engine.set_gradient_accumulation_boundary(steps)


def cpu_has_float16() -> bool:
    """Return whether DeepSpeed trains in float16 on this CPU; it asks torch's oneDNN for it."""
    return cpu_computes_in_float16()


def supported_precisions(device_type: str) -> tuple[str, ...]:
    """Return the names that do what they say under DeepSpeed on a device of this type here."""
    names = ["32-true"]
    if device_type != "cpu" or cpu_has_float16():
        names += ["16-true", "16-mixed"]
    if device_type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
        names += ["bf16-true", "bf16-mixed"]
    return tuple(names)


def _reason(name: str, device_type: str) -> str:
    """Return why a device does not support a precision that others do, as a sentence to add."""
    kind = PRECISIONS.get(name)
    if kind == "fp16" and device_type == "cpu":
        return " This CPU has no arithmetic in float16 that torch uses; bfloat16 works on every CPU."
    if kind == "bf16":
        return " This GPU computes in bfloat16 by emulation only."
    return ""


def resolve_deepspeed_precision(
    config: Mapping[str, Any],
    plugin: Precision,
    requested: str | None,  # None: a plugin or nothing was given
    device_type: str,
) -> Precision:
    """Return the plugin for what the Trainer or, where that says nothing, the configuration asks for."""
    name = requested or precision_of(config) or str(plugin.precision)
    supported = supported_precisions(device_type)
    if name not in supported:
        raise ConfigurationError(
            f"precision={name!r}: expected one that DeepSpeed supports on this {device_type.upper()}:"
            f" {', '.join(supported)}.{_reason(name, device_type)}"
        )
    if (
        PRECISIONS[name] == "fp16"
        and stage_of(config) == 0
        and section(config, "fp16").get("loss_scale") != 1
    ):
        raise ConfigurationError(
            f"stage=0 with precision={name!r}: expected stage 1, 2 or 3, as without ZeRO DeepSpeed divides the"
            " gradients by a loss scale that it has not multiplied the loss with. Or write fp16.loss_scale: 1 in the"
            " config, for none."
        )
    return EnginePrecision(name)
