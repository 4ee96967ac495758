"""A hook for every module that looks at its activations (`mode="hooks"`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

from lightning_lockstep._lightning import LightningModule
from lightning_lockstep.numerics.statistics import has_bad_values, module_names, output_values
from lightning_lockstep.overflow.settings import OverflowSettings

# Steps whose magnitudes are kept for the picture.
_HISTORY = 100


class ActivationWatch:
    """Notes lowest and highest value of every output of a step; nothing is sent, and on a GPU nothing waited for."""

    # One hook of all modules, so that nothing hangs on those of the model: a copy of the model, or what is loaded
    # from a pickle of it, has none of this.

    def __init__(self, module: LightningModule, settings: OverflowSettings) -> None:
        self.active = False  # whether outputs are looked at now
        self.outputs: list[tuple[str, str]] = []  # module and label of each that was noted in this step
        self.values: list[Tensor] = []  # what was noted of them, on the device
        self._history: deque[tuple[int, list[str], Tensor]] = deque(maxlen=_HISTORY)
        self._keep_history, self._allowed = settings.report_dir is not None, settings.allowed
        self._device = torch.empty(0, device=module.device).device  # with its index
        self._names = {m: name for m, name in module_names(module).items() if settings.watched.match(name)}
        self._handle = register_module_forward_hook(self._called)

    def remove(self) -> None:
        self._handle.remove()
        self.active = False

    def begin_step(self) -> None:
        """Forget the last step and watch from here on."""
        self.outputs, self.values, self.active = [], [], True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Check nothing within the context, and keep what was noted before."""
        active, self.active = self.active, False
        try:
            yield
        finally:
            self.active = active

    def flag(self) -> Tensor | None:
        """Return a number on the device: zero, or nan when an output of this step was bad; ``None`` without any."""
        return (0 * torch.stack(self.values)).sum(dtype=torch.float32) if self.values else None

    def remember(self, step: int) -> None:
        """Keep the magnitudes of this step for the picture, on the device."""
        if self._keep_history and self.values:
            largest = torch.stack(self.values).abs().view(-1, 2).amax(dim=1).float()
            self._history.append((step, [name for name, _ in self.outputs], largest))

    def magnitudes(self) -> dict[int, dict[str, float]]:
        """Return, by step, the largest magnitude of each module's outputs."""
        by_step: dict[int, dict[str, float]] = {}
        for step, names, values in self._history:
            largest = by_step.setdefault(step, {})
            for name, value in zip(names, values.tolist(), strict=True):
                largest[name] = max(largest.get(name, 0.0), value) if value == value else value
        return by_step

    def _called(self, module: Any, args: Any, output: Any) -> None:
        if not self.active or (name := self._names.get(module)) is None:
            return
        for label, value in output_values(output):
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                self._note(name, label, value)

    def _note(self, name: str, label: str, tensor: Tensor) -> None:
        allow_inf = self._allowed.match(f"{name}.{label}")
        ends: Sequence[Tensor]
        try:
            if tensor.device != self._device or hasattr(tensor, "to_local"):
                raise NotImplementedError
            ends = torch.aminmax(tensor.detach())
        except (RuntimeError, NotImplementedError, TypeError):
            # Sparse, complex, empty, meta, a DTensor, of 8 bits, or on another device: looked at at once.
            bad = has_bad_values(tensor, allow_inf=allow_inf)
            ends = (torch.tensor(float("nan") if bad else 0.0, device=self._device),) * 2
        if allow_inf:
            ends = [torch.where(end.isinf(), 0, end) for end in ends]
        self.outputs.append((name, label))
        self.values += ends
