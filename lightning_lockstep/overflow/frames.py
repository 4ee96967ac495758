"""What a forward and backward pass did, a frame a module, and checks at places that the user chooses."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_lockstep.numerics.statistics import (
    TensorStatistics,
    call_values,
    dotted,
    has_bad_values,
    module_names,
    output_values,
    tensor_statistics,
)
from lightning_lockstep.overflow.settings import OverflowSettings
from lightning_lockstep.steps.patching import replaced

# -- ``detect_overflow``: a tensor checked at any place inside a forward --

_log = logging.getLogger(__name__)

#: Called with (name, statistics) by :func:`detect_overflow`; a recorder adds itself while it records.
listeners: list[Callable[[str, TensorStatistics], None]] = []


def detect_overflow(tensor: Tensor, name: str = "tensor") -> bool:
    """Return whether a tensor holds a nan or an infinity; to be called anywhere in a forward.

    A bad tensor is logged as a warning with its figures. While an
    :class:`~lightning_lockstep.OverflowDetector` replays or traces a batch, the spot gets a line in the frames.

    Args:
        tensor: Any tensor, of any dtype, layout or device; anything else counts as good.
        name: What to call it.

    Returns:
        Whether a nan or inf was found. Always ``False`` inside ``torch.compile``.

    Ranks: any rank, alone; nothing is sent. One pass over the tensor; on a GPU it waits for the value.
    """
    if torch.compiler.is_compiling():
        return False
    bad = has_bad_values(tensor)
    if bad or listeners:
        statistics = tensor_statistics(tensor)
        if statistics is not None:
            for listener in listeners:
                listener(name, statistics)
            if bad and not listeners:
                _log.warning("%s: nan or inf found (%s)", name, statistics.remarks())
    return bad


# -- Frames: statistics of what went into and came out of a module; and the producer of the first bad value --

_INDENT = " " * 17


@dataclass(frozen=True)
class Value:
    """One line of a frame."""

    label: str  # ``weight``, ``input[0]``, ``output['logits']`` ...
    statistics: TensorStatistics | None = None  # None: not a tensor, or one without values
    kind: str = ""  # printed in place of statistics
    allowed: bool = False  # whether it may hold infinities

    @property
    def bad(self) -> bool:
        """Whether it holds a nan, or an infinity that is not allowed."""
        if self.statistics is None:
            return False
        return self.statistics.nan > 0 or (self.statistics.inf > 0 and not self.allowed)

    def line(self) -> str:
        if self.statistics is None:
            return f"{self.kind:>17} {self.label}"
        figures = f"{self.statistics.abs_min:8.2e} {self.statistics.abs_max:8.2e} {self.label}"
        remarks = self.statistics.remarks()
        return f"{figures:<44}  # {remarks}" if remarks else figures


@dataclass
class Frame:
    """One call of one module."""

    module: str  # name below the LightningModule
    type: str  # name of its class
    values: list[Value] = field(default_factory=list)  # weights, inputs and outputs, or gradients

    @property
    def bad(self) -> bool:
        return any(value.bad for value in self.values)

    def text(self) -> str:
        return "\n".join([f"{_INDENT} {self.module} {self.type}", *(value.line() for value in self.values)])


@dataclass(frozen=True)
class Producer:
    """What produced the first bad value."""

    # module: good inputs, bad output; code: made in its own code, just before it called `before`;
    # weight: was bad already; batch: came with the data; spot: found by detect_overflow;
    # backward: its backward was given good gradients.
    kind: Literal["module", "code", "weight", "batch", "spot", "backward"]
    module: str  # name; empty: the LightningModule itself
    type: str
    labels: tuple[str, ...] = ()  # of the bad values
    remarks: str = ""  # on the statistics of the first of them
    before: str = ""  # for code: the module called next; empty: the LightningModule's forward
    low_precision: bool = False  # it computed in float16 or bfloat16
    only_inf: bool = False  # no nan among them

    @property
    def values(self) -> list[str]:
        """Names of the bad values, as patterns of ``allow_inf``."""
        return [dotted(f"{self.before or self.module}.{label}") for label in self.labels[:4]]

    def sentence(self) -> str:
        name = _called(self.module, self.type)
        own = "forward" if self.module else "code"
        said = {
            "module": f"{name} made it from good inputs",
            "code": f"{name} made it in its own {own}, before it called {self.before or 'its forward'}",
            "weight": f"the weights of {name} are bad already",
            "batch": "it came with the batch",
            "spot": f"{name} made it, at detect_overflow",
            "backward": f"the backward of {name} made it from good gradients",
        }[self.kind]
        return f"{said}: {', '.join(self.labels[:4])}" + (f" [{self.remarks}]" if self.remarks else "")


def _called(module: str, type_: str) -> str:
    return f"{module or 'the LightningModule'} ({type_})"


# -- Hooks that record a frame for each call of each module, forward and backward, and find the first bad value --


class FrameRecorder:
    """Records frames by hooks on every module, within :meth:`recording`."""

    def __init__(
        self,
        root: nn.Module,
        settings: OverflowSettings,
        *,
        whole: bool = False,  # every frame of the forward, for a trace; else frames up to the first bad one
        # Parameters are gathered for each module, and let go by a hook of the strategy.
        divided: bool = False,
    ) -> None:
        self.root, self.settings, self.names = root, settings, module_names(root)
        self.frames: deque[Frame] = deque(maxlen=None if whole else settings.max_frames_to_save)
        self.backward_frames: dict[str, Frame] = {}
        self.producer: Producer | None = None
        self.backward_producer: Producer | None = None
        self.propagators: list[str] = []
        # Of a replay: the loss as it went into the backward, how many collectives were answered on this rank,
        # whether any are answered here, and what the replay raised.
        self.loss: Tensor | None = None
        self.answered = 0
        self.alone = True
        self.error: Exception | None = None
        self._in_backward = False
        self._whole, self.divided = whole, divided
        self._gradients = settings.gradients and not whole
        self._found = False  # whether a frame was bad
        self._stack: list[tuple[str, nn.Module, list[Value]]] = []
        self._bad_gradients: dict[str, None] = {}  # the modules that have any, as they came

    @contextmanager
    def recording(self) -> Iterator[FrameRecorder]:
        """Put the hooks in place, and take every one away on leaving the context, however it is left."""
        handles: list[Any] = []
        listeners.append(self._spot)
        try:
            for module in self.root.modules():
                if self.settings.watched.match(self.names[module]):
                    handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                    leave = module.register_forward_hook(self._leave, with_kwargs=True, prepend=self.divided)
                    handles.append(leave)
                if self._gradients:
                    own = module.named_parameters(recurse=False)
                    handles += self._watch(self.names[module], module, "grad ", own)
            yield self
        finally:
            listeners.remove(self._spot)
            for handle in handles:
                handle.remove()

    @property
    def found_bad_values(self) -> bool:
        if self.producer is not None or any(frame.bad for frame in self.backward_frames.values()):
            return True
        return has_bad_values(self.loss, allow_inf=self.settings.allowed.match("loss"))

    def check_batch(self, values: Any) -> None:
        """Check the batch itself, before the first module is given it."""
        bad = [value for value in self._values("batch", output_values(values, "batch")) if value.bad]
        if bad:
            self.producer = _producer("batch", "", type(self.root).__name__, bad)

    @contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Record no forward frames in the body: a forward that runs there is a recomputation."""
        self.loss = loss.detach()
        self._stack.clear()
        with replaced(self, _in_backward=True):
            yield

    def finish(self) -> None:
        for name in self._bad_gradients:
            frame = self.backward_frames[name]
            arrived = [v for v in frame.values if v.label.startswith("grad_output")]
            if arrived and not any(v.bad for v in arrived):
                bad = [value for value in frame.values if value.bad]
                self.backward_producer = _producer("backward", frame.module, frame.type, bad)
                return

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name = self.names.get(module, "")
        self._stack.append((name, module, []))
        inputs = list(call_values(args, kwargs))
        if self._gradients:
            self._watch(name, module, "grad_input", ((label[5:], value) for label, value in inputs))
        if self.producer is None and not self._in_backward:
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
        if self._gradients:
            self._watch(name, module, "grad_output", ((label[6:], value) for label, value in outputs))
        if self._in_backward:
            return
        if self._found and not self._whole:
            if any(True for _ in self._bad_only(name, outputs)):
                self.propagators.append(_called(name, type(module).__name__))
            return
        weights = self._values(name, module.named_parameters(recurse=False))
        results = self._values(name, outputs)
        values = [*weights, *self._values(name, call_values(args, kwargs)), *spots, *results]
        frame = Frame(name, type(module).__name__, values)
        self.frames.append(frame)
        if frame.bad and not self._found:
            self._found = True
            if self.producer is not None:
                self.propagators.append(_called(name, frame.type))
                return
            bad_weights, bad_results = ([v for v in some if v.bad] for some in (weights, results))
            bad = bad_weights or bad_results or [value for value in values if value.bad]
            self.producer = _producer("weight" if bad_weights else "module", name, frame.type, bad)

    def _spot(self, name: str, statistics: TensorStatistics) -> None:
        if self._in_backward:
            return
        where, module, found = self._stack[-1] if self._stack else ("", self.root, [])
        allowed = self.settings.allowed.match(f"{where}.{name}")
        value = Value(f"detect_overflow({name!r})", statistics, allowed=allowed)
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
        return Value(label, statistics, allowed=self.settings.allowed.match(f"{name}.{label}"))

    def _bad_only(self, name: str, pairs: list[tuple[str, Any]]) -> Iterator[Value]:
        for label, value in pairs:
            if has_bad_values(value, allow_inf=self.settings.allowed.match(f"{name}.{label}")):
                yield self._value(name, label, value)

    def _watch(self, name: str, module: nn.Module, label: str, pairs: Iterable[tuple[str, Any]]) -> list[Any]:
        return [
            value.register_hook(partial(self._gradient, name, type(module).__name__, f"{label}{place}"))  # type: ignore[no-untyped-call]
            for place, value in pairs
            if isinstance(value, Tensor) and value.requires_grad
        ]

    def _gradient(self, name: str, kind: str, label: str, gradient: Tensor) -> None:
        frame = self.backward_frames.setdefault(name, Frame(name, kind))
        value = self._value(name, label, gradient)
        frame.values.append(value)
        if value.bad:
            self._bad_gradients.setdefault(name)


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
        kind in ("module", "code", "spot") and all(v.statistics is not None and not v.statistics.nan for v in bad),
    )


def _computed_in(value: Tensor) -> torch.dtype | None:
    kind = value.device.type
    try:
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    except RuntimeError:  # a device that has no autocast
        return None
