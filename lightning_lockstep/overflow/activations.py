"""A hook for every module that looks at its activations (`mode="hooks"`)."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from lightning_lockstep._doors.torch_internals import version_getter
from lightning_lockstep.numerics.gradients import flat_flags, fused_flags
from lightning_lockstep.numerics.statistics import NamePatterns, has_bad_values, module_names, output_values

# -- A forward hook for every module of a model, which does nothing outside of training steps --


class ModuleHooks(ABC):
    """Calls a hook for each module; a class that inherits calls this constructor last: it asks for hooks."""

    # One hook of all modules, so that nothing hangs on those of the model: a copy of the model, or what is loaded
    # from a pickle of it, has none of this.

    def __init__(self, root: nn.Module, modules: NamePatterns | None) -> None:
        self.active = False  # whether outputs are looked at now
        self._hooks = {
            module: self._hook(name)
            for module, name in module_names(root).items()
            if modules is None or modules.match(name)
        }
        self._handle = register_module_forward_hook(self._called)

    def _called(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.active and (hook := self._hooks.get(module)) is not None:
            hook(output)

    @abstractmethod
    def _hook(self, name: str) -> Callable[[Any], None]:
        """Return what is called with each output of a module."""

    def begin_step(self) -> None:
        """Forget the last step and watch from here on."""
        self.active = True

    def remove(self) -> None:
        """Take the hook away."""
        self._handle.remove()
        self._hooks.clear()
        self.active = False


# -- Checks every activation of every step: one fused reduction per tensor into a buffer on the device --

_HISTORY = 100
# Outputs up to this size [elements] wait for others, and are checked together once they have so many elements:
# a call for each costs more than reading them, and so few are still in the processor's cache.
_SMALL, _TOGETHER = 16_384, 24_576


class _Extremes:
    """Lowest and highest value of each tensor of a step, for tensors of one dtype."""

    def __init__(self, dtype: torch.dtype, device: torch.device, allow_inf: bool) -> None:
        self.dtype, self.device, self.allow_inf = dtype, device, allow_inf
        self.used = 0
        self.keys: list[tuple[str, str]] = []
        self.slots: list[tuple[Tensor, Tensor]] = []
        self.ends = torch.zeros(2, 0, dtype=dtype, device=device)

    def grow(self) -> None:
        """Make room for more tensors; what this step has stored is kept."""
        ends = torch.zeros(2, 2 * len(self.slots) + 64, dtype=self.dtype, device=self.device)
        ends[:, : self.ends.shape[1]] = self.ends
        self.ends = ends
        self.slots = list(zip(ends[0].unbind(), ends[1].unbind(), strict=True))
        self.keys += [("", "")] * (len(self.slots) - len(self.keys))

    def stored(self) -> Tensor:
        """Return what this step has stored, shape (2, tensors), without infinities that are allowed."""
        ends = self.ends[:, : self.used]
        return torch.where(torch.isinf(ends), 0, ends) if self.allow_inf else ends


class _SmallOutputs:
    """Small outputs that are checked together."""

    # An operation in place may change one before it is checked, and hide what was bad in it. The first step,
    # in which each is checked at once, finds by their version counters whose outputs are changed so; these
    # are checked at once from then on.

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.size = 0
        self.at_once: set[tuple[str, str]] = set()
        self.first_step = True
        self._versions: list[tuple[tuple[str, str], int]] = []
        self._flags: list[Tensor] = []

    def clear(self) -> None:
        """Forget what this step has stored."""
        self.tensors.clear()
        self._versions.clear()
        self._flags.clear()
        self.size = 0

    def check_at_once(self, key: tuple[str, str], tensor: Tensor) -> None:
        """Check an output, and in the first step keep it, to see whether it is changed later."""
        self._flags += _flags_of([tensor])
        if self.first_step:
            self.tensors.append(tensor)
            self._versions.append((key, version_getter()(tensor)))

    def check(self) -> None:
        """Check all that wait."""
        if self.tensors:
            self._flags += _flags_of(self.tensors)
            for tensor, (key, version) in zip(self.tensors, self._versions, strict=False):
                if version_getter()(tensor) != version:
                    self.at_once.add(key)
            self.tensors.clear()
            self._versions.clear()
            self.size = 0

    def flags(self) -> list[Tensor]:
        """Return one-element tensors; any that is not zero means that something bad was found in this step."""
        self.check()
        self.first_step = False
        return self._flags


def _flags_of(tensors: list[Tensor]) -> list[Tensor]:
    """Return one-element tensors; any that is not zero means that something bad is among the tensors."""
    with torch.no_grad():
        try:
            if tensors[0].device.type != "cpu":
                # `data` has a version counter of its own: autograd sees no operation in place.
                return fused_flags([tensor.data for tensor in tensors])
            return flat_flags(tensors[0] if len(tensors) == 1 else _concatenated(tensors))
        except (RuntimeError, NotImplementedError, TypeError):  # sparse, expanded, of several devices
            return [torch.ones(1) for tensor in tensors if has_bad_values(tensor)]


def _concatenated(tensors: list[Tensor]) -> Tensor:
    try:
        return torch.cat(tensors)
    except RuntimeError:  # of several shapes
        return torch.cat([tensor.reshape(-1) for tensor in tensors])


class ActivationWatch(ModuleHooks):
    """Forward hooks that check every output; nothing is sent, and on a GPU nothing is waited for."""

    # Without history, small outputs that are part of the graph are checked together. All others, and with
    # history every one, get an ``aminmax`` into a slot of a buffer on the device.

    def __init__(
        self,
        root: nn.Module,
        device: torch.device,
        *,
        allow_inf: NamePatterns,  # values that may be infinite
        modules: NamePatterns | None = None,  # to watch; None: all
        keep_history: bool = False,  # the magnitudes of the last 100 steps, for the picture
    ) -> None:
        self.device, self.allow_inf = device, allow_inf
        self.history: deque[tuple[int, list[tuple[list[tuple[str, str]], Tensor]]]] = deque(maxlen=_HISTORY)
        self._keep_history = keep_history
        self._extremes: dict[tuple[torch.dtype, bool], _Extremes] = {}
        self._unusual: list[tuple[str, str]] = []
        self._waiting = _SmallOutputs()
        self._version_of = version_getter()
        # A tensor that modules pass on unchanged (dropout of 0, an outer module) is checked once.
        self._checked: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        super().__init__(root, modules)

    def remove(self) -> None:
        super().remove()
        self._waiting.clear()

    def begin_step(self) -> None:
        for extremes in self._extremes.values():
            extremes.used = 0
        self._unusual.clear()
        self._waiting.clear()
        self._checked.clear()
        super().begin_step()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Check nothing within the context, and keep what was stored before."""
        active, self.active = self.active, False
        try:
            yield
        finally:
            self.active = active

    def flag(self) -> Tensor | None:
        """Return a number on the device that is zero, or nan when something bad was found in this step."""
        # Nothing is waited for; ``None`` where nothing was checked.
        parts = [
            (extremes.stored() * 0).sum(dtype=torch.float32)
            for extremes in self._extremes.values()
            if extremes.used
        ]
        # 1 where something bad was found: its logarithm times zero is nan.
        parts += [0 * torch.log1p(-flag[0]) for flag in self._waiting.flags()]
        if self._unusual:
            parts.append(torch.tensor(float("nan"), device=self.device))
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else torch.stack([p.to(self.device) for p in parts]).sum()

    def remember(self, step: int) -> None:
        """Keep the magnitudes of this step for the picture, on the device."""
        if self._keep_history:
            kept = [
                (extremes.keys[: extremes.used], extremes.ends[:, : extremes.used].abs().amax(dim=0).float())
                for extremes in self._extremes.values()
                if extremes.used
            ]
            self.history.append((step, kept))

    def magnitudes(self) -> dict[int, dict[str, float]]:
        """Return, by step, the largest magnitude of each module's outputs."""
        by_step: dict[int, dict[str, float]] = {}
        for step, kept in self.history:
            largest = by_step.setdefault(step, {})
            for keys, values in kept:
                for (name, _), value in zip(keys, values.tolist(), strict=True):
                    largest[name] = max(largest.get(name, 0.0), value) if value == value else value
        return by_step

    def _hook(self, name: str) -> Callable[[Any], None]:
        whole = (name, "output")
        waiting, together = self._waiting, not (self.allow_inf or self._keep_history)
        store = self._store_once if together else self._store

        def hook(output: Any) -> None:
            if type(output) is Tensor:
                # The usual case; each microsecond here counts a hundred times per step.
                # An output that needs a gradient is the result of a computation, so its memory may be written.
                if together and output.requires_grad and (size := output.numel()) <= _SMALL:
                    if waiting.first_step or whole in waiting.at_once:
                        waiting.check_at_once(whole, output)
                        return
                    waiting.tensors.append(output)
                    waiting.size += size
                    if waiting.size > _TOGETHER:
                        waiting.check()
                else:
                    store(whole, output)
            else:
                for label, value in output_values(output):
                    if isinstance(value, Tensor):
                        store((name, label), value)

        return hook

    def _store_once(self, key: tuple[str, str], tensor: Tensor) -> None:
        known = self._checked.get(id(tensor))
        version = -1 if tensor.is_inference() else self._version_of(tensor)
        if known is None or known[0]() is not tensor or known[1] != version:
            self._checked[id(tensor)] = (weakref.ref(tensor), version)
            self._store(key, tensor)

    def _store(self, key: tuple[str, str], tensor: Tensor) -> None:
        kind = (tensor.dtype, bool(self.allow_inf) and self.allow_inf.match(f"{key[0]}.{key[1]}"))
        extremes = self._extremes.get(kind)
        if extremes is None:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                return
            extremes = self._extremes[kind] = _Extremes(_extremes_dtype(kind[0]), self.device, kind[1])
        if extremes.used == len(extremes.slots):
            extremes.grow()
        try:
            torch.aminmax(tensor.detach(), out=extremes.slots[extremes.used])
        except (RuntimeError, NotImplementedError, TypeError):
            # Sparse, complex, empty, meta, a DTensor, or on another device: checked one by one.
            if has_bad_values(tensor, allow_inf=kind[1]):
                self._unusual.append(key)
            return
        extremes.keys[extremes.used] = key
        extremes.used += 1


def _extremes_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point and dtype.itemsize > 1 else torch.float32
