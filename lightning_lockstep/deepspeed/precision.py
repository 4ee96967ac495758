"""Precision and loss scale: what the Trainer and the configuration ask for together."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_lockstep._doors.deepspeed_engines import EngineAdapter, StepOutcome, adapter_of
from lightning_lockstep._doors.lightning import DeepSpeedPrecision, Precision
from lightning_lockstep._doors.torch_internals import cpu_has_float16
from lightning_lockstep._text import say
from lightning_lockstep.deepspeed.config import section, stage_of
from lightning_lockstep.deepspeed.config_checks import PRECISIONS, precision_of
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.steps.patching import replaced

# -- Whether skipped optimizer steps are ordinary, told from the history of the loss scale --
# With 16 bits DeepSpeed multiplies the loss by a scale, skips the step when a gradient is not finite
# ("OVERFLOW! Skipping step"), and halves the scale; after a window of good steps it doubles it and so finds
# the edge again. So some skips belong to it: those by which a scale of 2^16 comes down at the start, and
# one or two for each window. Others say that the model diverges, and look the same on the screen.

# DeepSpeed's own default of loss_scale_window, for what has none [steps].
_WINDOW = 1000
# Steps that must do in a row until the scale has found its place; from then on skips are counted.
_SETTLED = 10
# At this scale a gradient in float16 overflows only from 65504 / 256 = 256 on: it is the gradient, not the scale.
_LOW_SCALE = 2.0**8
# Scales that are shown.
_SHOWN = 12


class LossScaleHistory:
    """The loss scale of the last optimizer steps, and whether the skips among them are ordinary."""

    def __init__(self, in_a_row: int = 8, *, keep: int = 1000) -> None:
        # Too many once the scale has settled: each skip but the first halves it, so in 8 the gradients would
        # have grown by a hundred times from one batch to the next.
        self.in_a_row = in_a_row
        self.steps = self.skips = self.skips_in_a_row = 0  # optimizer steps, skipped ones among them
        self.scales: deque[float | None] = deque(maxlen=keep)
        self._good_in_a_row = 0
        self._asked = False
        self._settled = False
        self._skipped_at: deque[int] = deque(maxlen=keep)  # numbers of the skipped steps since it has settled
        self._last: StepOutcome | None = None
        self._told = ""

    def expect_skip(self) -> None:
        """Take the next step for one that is skipped on request, which says nothing about the loss scale."""
        self._asked = True

    def record(self, outcome: StepOutcome) -> None:
        self.steps += 1
        asked, self._asked = self._asked, False
        if self._was_skipped(outcome) and not asked:
            self.skips += 1
            self.skips_in_a_row += 1
            self._good_in_a_row = 0
            if self._settled:
                self._skipped_at.append(self.steps)
        else:
            self.skips_in_a_row = 0
            self._good_in_a_row += 1
            self._settled = self._settled or self._good_in_a_row >= _SETTLED
        self.scales.append(outcome.scale)
        self._last = outcome

    def verdict(self) -> str | None:
        """Return what is not ordinary about the skips, with the history of the scale; ``None`` if all of it is."""
        found = self._found()
        return None if found is None else f"{found[1]} {self.history()}"

    def news(self) -> str | None:
        """Return the verdict when it is another kind than the one before, so that a run says it once."""
        kind, _ = self._found() or ("", "")
        if kind == self._told:
            return None
        self._told = kind
        return self.verdict()

    def history(self) -> str:
        """Return the last scales in words, such as ``Loss scale: 65536, 32768 (3 steps), 16384``."""
        counted = f"{self.skips} of {self.steps} steps were skipped, the last {self.skips_in_a_row} in a row."
        if not self.scales or self.scales[-1] is None:
            return counted
        return f"{counted} Loss scale: {', '.join(self._runs()[-_SHOWN:])}."

    def _runs(self) -> list[str]:
        runs: list[tuple[float | None, int]] = []
        for scale in self.scales:
            if runs and runs[-1][0] == scale:
                runs[-1] = (scale, runs[-1][1] + 1)
            else:
                runs.append((scale, 1))
        return [f"{scale:g}" + (f" ({count} steps)" if count > 1 else "") for scale, count in runs]

    def _was_skipped(self, outcome: StepOutcome) -> bool:
        if outcome.skipped is not None:
            return outcome.skipped
        before = self._last.scale if self._last is not None else None
        return before is not None and outcome.scale is not None and outcome.scale < before

    def _found(self) -> tuple[str, str] | None:
        """Return the kind of verdict and its text."""
        last = self._last
        if last is None or not self.skips:
            return None
        if last.scale is None:
            return self._unscaled()
        if last.is_dynamic and last.floor is not None and last.scale <= last.floor:
            return self._at_floor(last)
        return self._too_many_in_a_row(last) or self._too_often(last)

    def _unscaled(self) -> tuple[str, str] | None:
        if not self.skips_in_a_row:
            return None
        return "unscaled", (
            "A step was skipped though no loss scale is in use: a gradient is nan or infinite, which bf16 and"
            " float32 reach only near 3e38. Look for the loss or the batch that causes it."
        )

    def _at_floor(self, last: StepOutcome) -> tuple[str, str]:
        end = " The next overflow ends the run." if last.ends_at_floor else ""
        return "floor", (
            f"The loss scale has reached its floor, min_loss_scale={last.floor:g}: gradients overflow though"
            f" they are hardly scaled, so the model is diverging or producing nan.{end} Lower the learning rate, clip"
            " gradients, or train in bf16."
        )

    def _too_many_in_a_row(self, last: StepOutcome) -> tuple[str, str] | None:
        if self.skips_in_a_row < self.in_a_row:
            return None
        if not last.is_dynamic:
            return "in a row", (
                f"{self.in_a_row} steps in a row or more were skipped, and the loss scale is fixed at {last.scale:g}:"
                " no step will be made until it is lowered. Set fp16.loss_scale to 0 for one that adapts itself."
            )
        if last.hysteresis < self.in_a_row and len(set(list(self.scales)[-self.in_a_row :])) == 1:
            return "stuck", (
                f"{self.in_a_row} steps in a row or more were skipped, and the loss scale stays at {last.scale:g}:"
                " nothing lowers it, so no step will be made. DeepSpeed does so for torch_autocast in float16 with"
                " ZeRO; use fp16.enabled, or bfloat16."
            )
        if not self._settled and last.scale is not None and last.scale > _LOW_SCALE:
            return None  # it comes down to where it belongs
        return "in a row", (
            f"{self.in_a_row} steps in a row or more were skipped, more than a loss scale needs to settle:"
            " the loss or a gradient is nan or infinite at any scale. Look for the batch or the layer that causes it."
        )

    def _too_often(self, last: StepOutcome) -> tuple[str, str] | None:
        window = last.window or _WINDOW
        # A dynamic scale is tried out once in a window, and costs as many skips as its hysteresis then.
        most = max(self.in_a_row, 4 * last.hysteresis)
        if window < 2 * most or len(self._skipped_at) < most:
            return None
        took = self.steps - self._skipped_at[-most]
        if took >= window:
            return None
        return "often", (
            f"{most} of the last {took + 1} steps were skipped; a loss scale that fits skips"
            f" {last.hysteresis} in {window} (loss_scale_window). Gradients have outliers: clip them, or lower the"
            " learning rate."
        )


# -- The precision of a run under DeepSpeed: what the Trainer and DeepSpeed's configuration say together --


class EnginePrecision(DeepSpeedPrecision):
    """Lightning's precision plugin of DeepSpeed, whose engine steps and divides as Lightning's loop does."""

    # Lightning divides the loss by ``accumulate_grad_batches``, and DeepSpeed would divide it again: the
    # gradients were that much too small for SGD, and for clipping. Lightning also counts accumulated batches
    # from the start of each epoch and steps after its last batch, where DeepSpeed counts on over the epochs;
    # so the engine is told after which batches it steps. It also says once when DeepSpeed skips more
    # optimizer steps than its loss scale explains.

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
        _tell_boundary(adapter_of(engine), False)
        super().backward(tensor, model, optimizer, *args, **kwargs)
        engine.step()  # counts the batch
        self.has_accumulated = True

    def optimizer_step(  # type: ignore[override] # as Lightning's own plugin of DeepSpeed
        self, optimizer: Any, model: Any, closure: Any, **kwargs: Any
    ) -> Any:
        """Run the closure and the engine's step, which is skipped where gradients are not finite."""
        adapter = adapter_of(model.trainer.model)
        before = adapter.steps_made()
        # Otherwise nobody knows before a backward whether a step will follow.
        if model.automatic_optimization:
            _tell_boundary(adapter, True)
        with replaced(self, _steps=True):
            result = super().optimizer_step(optimizer, model, closure, **kwargs)
        self.has_accumulated = False
        outcome = adapter.outcome() if adapter.steps_made() != before else None
        if outcome is not None:
            self.history.record(outcome)
            news = self.history.news()
            if news and model.trainer.is_global_zero:
                say(f"lightning-lockstep: {news}")
        return result


def _tell_boundary(adapter: EngineAdapter, steps: bool) -> None:
    if not adapter.has_own_boundaries():
        adapter.engine.set_gradient_accumulation_boundary(steps)


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
