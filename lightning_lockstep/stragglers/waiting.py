"""How long this rank waits for others in each of its steps, and where the rest of a step goes, by its own clock."""

from __future__ import annotations

import time
from typing import Any, Literal, NamedTuple

import torch

Part = Literal["data loading", "forward and backward", "callbacks"]

#: Parts of a step; the second is all that the other two are not, optimizer and Lightning's own work included.
PARTS: tuple[Part, ...] = ("data loading", "forward and backward", "callbacks")


def part_of_action(action: str) -> Part | None:
    """Return what an action belongs to, by the name that Lightning's profilers know it by."""
    if action.startswith("[Callback]"):  # such as "[Callback]ModelCheckpoint{...}.on_train_batch_end"
        return "callbacks"
    return "data loading" if action.endswith(".train_dataloader_next") else None


class RankTimes(NamedTuple):
    """Where the time of a rank's step went [s]; the parts are without the waiting in them."""

    data_loading: float
    forward_and_backward: float
    callbacks: float
    waiting: float


class _Wait(NamedTuple):
    part: Part
    begin: Any  # [s] by ``time.perf_counter()``; on a GPU an event
    end: Any


class OwnStep(NamedTuple):
    """One step as this rank has measured it [s]."""

    seconds: float
    parts: dict[Part, float]  # waiting of the host included, for the loader and the callbacks
    waits: list[_Wait]

    @property
    def is_known(self) -> bool:
        """Whether the device has got to the end of the step's last wait."""
        return not self.waits or isinstance(self.waits[-1].end, float) or bool(self.waits[-1].end.query())

    def times(self) -> RankTimes:
        parts = {**self.parts, "forward and backward": self.seconds - sum(self.parts.values())}
        waiting = 0.0
        for part, begin, end in self.waits:
            if isinstance(end, float):
                parts[part] -= end - begin
                waiting += end - begin
            else:  # the device waits, and the host goes on
                waiting += begin.elapsed_time(end) / 1000
        return RankTimes(*(round(max(0.0, each), 6) for each in (*map(parts.__getitem__, PARTS), waiting)))


class StepTimer:
    """Measures the steps of this rank with a few reads of a clock each."""

    # ``enter`` and ``leave`` are called for each action of the Trainer that belongs to a part; what runs inside another
    # such action counts for that one.

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._open = ""
        self._open_part: Part = "forward and backward"
        self._since = 0.0
        self._depth = 0  # of waits in waits
        self._wait_since: Any = 0.0
        self._begin: float | None = None
        self._clear()

    def _clear(self) -> None:
        self._parts: dict[Part, float] = {"data loading": 0.0, "callbacks": 0.0}
        self._waits: list[_Wait] = []

    def interrupt(self) -> None:
        """Measure nothing until :meth:`end`: what follows is no training step."""
        self._begin = None

    def enter(self, action: str, part: Part) -> None:
        if not self._open:
            self._open, self._open_part, self._since = action, part, time.perf_counter()

    def leave(self, action: str) -> None:
        if self._open == action:
            self._parts[self._open_part] += time.perf_counter() - self._since
            self._open, self._open_part = "", "forward and backward"

    def backward_begins(self, loss: torch.Tensor) -> None:
        """Count what comes after the backward pass itself as a wait: DDP waits there for the last reduction."""
        self._depth = 0  # also after a backward pass that has failed and is tried again

        def queue(_: torch.Tensor) -> None:
            # Callbacks run in the order in which they were queued, and DDP queues its own with its last bucket.
            torch.autograd.Variable._execution_engine.queue_callback(self.wait_begins)

        if loss.requires_grad:
            loss.register_hook(queue)  # type: ignore[no-untyped-call]

    def backward_ends(self) -> None:
        if self._depth:
            self.wait_ends()

    def wait_begins(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._wait_since = self._now()

    def wait_ends(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._waits.append(_Wait(self._open_part, self._wait_since, self._now()))

    def end(self) -> OwnStep | None:
        """Return the step that ends now, or ``None`` if its begin was not seen; the next one begins."""
        begin, self._begin = self._begin, time.perf_counter()
        own = None if begin is None else OwnStep(self._begin - begin, self._parts, self._waits)
        self._clear()
        return own

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
