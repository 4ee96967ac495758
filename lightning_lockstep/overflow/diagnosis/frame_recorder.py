"""Hooks that record a frame for each call of each module, forward and backward, and find the first bad value."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lockstep.numerics.module_values import (
    NamePatterns,
    call_values,
    module_names,
    output_values,
)
from lightning_lockstep.numerics.statistics import (
    TensorStatistics,
    has_bad_values,
    tensor_statistics,
)
from lightning_lockstep.overflow.diagnosis.frames import Frame, Producer, Value
from lightning_lockstep.overflow.spots import listeners

__all__ = ["FrameRecorder"]


class FrameRecorder:
    """Records frames by hooks on every module, within :meth:`recording`."""

    def __init__(
        self,
        root: nn.Module,
        *,
        max_frames: int | None,  # kept up to the first bad one; None: all are, and those after it
        allow_inf: NamePatterns,  # values that may be infinite
        modules: NamePatterns | None = None,  # to record; None: all
        gradients: bool = True,
        # Parameters are gathered for each module, and let go by a hook of the strategy.
        divided: bool = False,
    ) -> None:
        self.root, self.allow_inf, self.modules, self.gradients = root, allow_inf, modules, gradients
        self.names = module_names(root)
        self.frames: deque[Frame] = deque(maxlen=max_frames)
        self.backward_frames: dict[str, Frame] = {}
        self.first_bad: Frame | None = None
        self.producer: Producer | None = None
        self.backward_producer: Producer | None = None
        self.propagators: list[str] = []
        self.calls = 0
        self.in_backward = False
        self._keep_all, self._divided = max_frames is None, divided
        self._stack: list[tuple[str, nn.Module, list[Value]]] = []
        self._first_bad_gradient: dict[str, int] = {}

    @contextmanager
    def recording(self) -> Iterator[FrameRecorder]:
        """Put the hooks in place, and take every one away on leaving the context, however it is left."""
        handles: list[Any] = []
        listeners.append(self._spot)
        try:
            for module in self.root.modules():
                if self.modules is None or self.modules.match(self.names[module]):
                    handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                    handles.append(
                        module.register_forward_hook(self._leave, with_kwargs=True, prepend=self._divided)
                    )
            if self.gradients:
                handles += list(self._watch_parameters())
            yield self
        finally:
            listeners.remove(self._spot)
            for handle in handles:
                handle.remove()

    @property
    def found_bad_values(self) -> bool:
        """Whether any value or gradient was bad."""
        return self.producer is not None or any(frame.bad for frame in self.backward_frames.values())

    def check_batch(self, values: Any) -> None:
        """Check the batch itself, before the first module is given it."""
        bad = [value for value in self._values("batch", output_values(values, "batch")) if value.bad]
        if bad:
            self.producer = _producer("batch", "", type(self.root).__name__, bad)

    def begin_backward(self) -> None:
        """Stop recording forward frames: a forward that runs now is a recomputation."""
        self.in_backward = True
        self._stack.clear()

    def finish(self) -> None:
        """Find the producer of the first bad gradient."""
        candidates = []
        for name, first in self._first_bad_gradient.items():
            frame = self.backward_frames[name]
            arrived = [v for v in frame.values if v.label.startswith("grad_output")]
            if arrived and not any(v.bad for v in arrived):
                candidates.append((first, -name.count("."), name))
        if candidates:
            frame = self.backward_frames[min(candidates)[2]]
            bad = [value for value in frame.values if value.bad]
            self.backward_producer = _producer("backward", frame.module, frame.type, bad)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name = self.names.get(module, "")
        self._stack.append((name, module, []))
        inputs = list(call_values(args, kwargs))
        if self.gradients:
            self._watch(name, module, "grad_input", ((label[5:], value) for label, value in inputs))
        if self.producer is None and not self.in_backward:
            bad = list(self._bad_only(name, inputs))
            if bad:
                outer = self._stack[-2] if len(self._stack) > 1 else ("", self.root, [])
                self.producer = _producer("code", outer[0], type(outer[1]).__name__, bad, before=name)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name = self.names.get(module, "")
        spots: list[Value] = []
        while self._stack:
            _, entered, found = self._stack.pop()
            spots += found
            if entered is module:
                break
        outputs = list(output_values(output))
        if self.gradients:
            self._watch(name, module, "grad_output", ((label[6:], value) for label, value in outputs))
        if self.in_backward:
            return
        self.calls += 1
        if self.first_bad is not None and not self._keep_all:
            if any(True for _ in self._bad_only(name, outputs)):
                self.propagators.append(f"{name} ({type(module).__name__})")
            return
        frame = Frame(name, type(module).__name__)
        weights = self._values(name, module.named_parameters(recurse=False))
        frame.values = [*weights, *self._values(name, call_values(args, kwargs)), *spots]
        results = self._values(name, outputs)
        frame.values += results
        self.frames.append(frame)
        if frame.bad and self.first_bad is None:
            self.first_bad = frame
            self._find_producer(frame, [v for v in weights if v.bad], [v for v in results if v.bad])

    def _find_producer(self, frame: Frame, weights: list[Value], results: list[Value]) -> None:
        if self.producer is not None:
            self.propagators.append(f"{frame.module} ({frame.type})")
        elif weights:
            self.producer = _producer("weight", frame.module, frame.type, weights)
        else:
            bad = results or [value for value in frame.values if value.bad]
            self.producer = _producer("module", frame.module, frame.type, bad)

    def _spot(self, name: str, statistics: TensorStatistics) -> None:
        if self.in_backward:
            return
        where, module, found = self._stack[-1] if self._stack else ("", self.root, [])
        value = Value(
            f"detect_overflow({name!r})", statistics, allowed=self.allow_inf.match(f"{where}.{name}")
        )
        found.append(value)
        if value.bad and self.producer is None:
            self.producer = _producer("spot", where, type(module).__name__, [value])

    def _values(self, name: str, pairs: Any) -> list[Value]:
        return [self._value(name, label, value) for label, value in pairs]

    def _value(self, name: str, label: str, value: Any) -> Value:
        if not isinstance(value, Tensor):
            return Value(label, kind="None" if value is None else "not a tensor")
        statistics = tensor_statistics(value, used_as=_computed_in(value))
        if statistics is None:
            return Value(label, kind="no values")
        return Value(label, statistics, allowed=self.allow_inf.match(f"{name}.{label}"))

    def _bad_only(self, name: str, pairs: list[tuple[str, Any]]) -> Iterator[Value]:
        for label, value in pairs:
            if has_bad_values(value, allow_inf=self.allow_inf.match(f"{name}.{label}")):
                yield self._value(name, label, value)

    def _watch(self, name: str, module: nn.Module, label: str, pairs: Any) -> None:
        for place, value in pairs:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(partial(self._gradient, name, type(module).__name__, f"{label}{place}"))  # type: ignore[no-untyped-call]

    def _watch_parameters(self) -> Iterator[Any]:
        for module in self.root.modules():
            for label, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    note: Callable[..., None] = partial(
                        self._gradient, self.names[module], type(module).__name__, f"grad {label}"
                    )
                    yield parameter.register_hook(note)  # type: ignore[no-untyped-call]

    def _gradient(self, name: str, kind: str, label: str, gradient: Tensor) -> None:
        frame = self.backward_frames.setdefault(name, Frame(name, kind))
        value = self._value(name, label, gradient)
        frame.values.append(value)
        if value.bad:
            self._first_bad_gradient.setdefault(
                name, sum(len(f.values) for f in self.backward_frames.values())
            )


def _producer(kind: Any, module: str, type_: str, bad: list[Value], *, before: str = "") -> Producer:
    first = bad[0].statistics if bad else None
    return Producer(
        kind,
        module,
        type_,
        tuple(value.label for value in bad),
        first.remarks() if first else "",
        before,
        any(v.statistics is not None and v.statistics.used_as in ("float16", "bfloat16") for v in bad)
        or torch.is_autocast_enabled("cuda")
        or torch.is_autocast_enabled("cpu"),
    )


def _computed_in(value: Tensor) -> torch.dtype | None:
    kind = value.device.type
    try:
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    except RuntimeError:  # a device that has no autocast
        return None
