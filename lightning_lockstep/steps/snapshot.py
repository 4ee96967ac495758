"""Everything a trial step may change, put back bit for bit.

What the step needs to write to is replaced by an empty one where that is enough (gradients, a fresh
optimizer's state), else copied: to host memory from a device, to a file from host memory, so that the copy
does not take the memory that is being measured.
"""

from __future__ import annotations

import copy
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["ModuleAttributes", "Snapshot"]


class Snapshot:
    """Takes down the state of a run and puts it back.

    Args:
        module: The module whose parameters, buffers, gradients, modes and plain attributes are kept.
        optimizers: Optimizers whose state and settings are kept.
        scaler: Gradient scaler of the precision plugin, or ``None``.
        generators: Random generators of loaders and samplers, beside the global ones.

    Ranks: any rank, alone; nothing is sent.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Iterable[Optimizer] = (),
        *,
        scaler: object | None = None,
        generators: Iterable[torch.Generator] = (),
    ) -> None:
        self._module = module
        self._tensors = {id(t): t for t in [*module.parameters(), *module.buffers()]}
        self._values = _TensorCopies(list(self._tensors.values()))
        self._grads = [(p, p.grad) for p in module.parameters()]
        self._modes = [(m, m.training) for m in module.modules()]
        self._attributes = ModuleAttributes(module)
        self._optimizers = [_OptimizerState(optimizer) for optimizer in optimizers]
        self._scaler = None if scaler is None else (scaler, _copied(vars(scaler)))
        self._generators = [(g, g.get_state()) for g in generators]
        self._random = _random_states()
        for parameter, _ in self._grads:
            parameter.grad = None

    def restore(self) -> None:
        """Put everything back.

        Ranks: any rank, alone; nothing is sent.
        """
        for parameter, grad in self._grads:
            parameter.grad = grad
        self._attributes.restore()
        for module, training in self._modes:
            module.training = training
        self._values.restore(list(self._tensors.values()))
        for optimizer in self._optimizers:
            optimizer.restore()
        if self._scaler is not None:
            scaler, attributes = self._scaler
            vars(scaler).clear()
            vars(scaler).update(attributes)
        for generator, state in self._generators:
            generator.set_state(state)
        _set_random_states(self._random)


class _TensorCopies:
    """The values of tensors, in host memory for those of a device, in a file for the others."""

    def __init__(self, tensors: list[Tensor]) -> None:
        # It lives as long as this object; the system deletes it when it is closed.
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        torch.save([t.detach() for t in tensors if t.device.type == "cpu"], self._file)
        self._copies = [t.detach().cpu() for t in tensors if t.device.type != "cpu"]

    def restore(self, tensors: list[Tensor]) -> None:
        self._file.seek(0)
        stored = iter(torch.load(self._file, weights_only=True))
        copies = iter(self._copies)
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(next(stored) if tensor.device.type == "cpu" else next(copies))


class _OptimizerState:
    """State and settings of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._state = optimizer.state
        self._groups = [
            {key: _copied(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        self._attributes = {
            key: value for key, value in vars(optimizer).items() if isinstance(value, (bool, int, float, str))
        }
        tensors = _tensors_in(self._state)
        self._values = _TensorCopies(tensors) if tensors else None
        self._plain = None if self._values is None else _without_tensors(self._state)
        if self._values is None:
            # Nothing in it yet: the trials fill another one, and this stays as it is.
            optimizer.state = defaultdict(dict)

    def restore(self) -> None:
        optimizer = self._optimizer
        if self._values is None:
            optimizer.state = self._state
        else:
            _restore_plain(optimizer.state, self._plain)
            self._values.restore(_tensors_in(optimizer.state))
        for group, kept in zip(optimizer.param_groups, self._groups, strict=True):
            for key in [key for key in group if key != "params" and key not in kept]:
                del group[key]
            group.update(kept)
        for key in [k for k, v in vars(optimizer).items() if isinstance(v, (bool, int, float, str))]:
            if key not in self._attributes:
                delattr(optimizer, key)
        vars(optimizer).update(self._attributes)


def _tensors_in(state: Any) -> list[Tensor]:
    return [value for entry in state.values() for value in entry.values() if isinstance(value, Tensor)]


def _without_tensors(state: Any) -> dict[Any, dict[str, Any]]:
    return {
        key: {
            name: value if isinstance(value, Tensor) else copy.deepcopy(value)
            for name, value in entry.items()
        }
        for key, entry in state.items()
    }


def _restore_plain(state: Any, plain: Any) -> None:
    state.clear()
    for key, entry in plain.items():
        state[key] = dict(entry)


class ModuleAttributes:
    """Plain attributes (counters, lists, metric states) of a module's submodules.

    Args:
        module: The root module.

    Ranks: any rank, alone; nothing is sent.
    """

    _OWN = frozenset({"_parameters", "_modules", "training", "_trainer", "_fabric", "trainer"})

    def __init__(self, module: nn.Module) -> None:
        self._kept = [(m, self._attributes(m)) for m in module.modules()]

    def restore(self) -> None:
        """Put every attribute back, in place where others may hold it."""
        for module, kept in self._kept:
            attributes = vars(module)
            for name in [name for name in attributes if name not in kept and name not in self._OWN]:
                del attributes[name]
            for name, (value, contents) in kept.items():
                attributes[name] = _put_back(value, contents)

    @classmethod
    def _attributes(cls, module: nn.Module) -> dict[str, tuple[Any, Any]]:
        return {
            # The buffers' own values are kept with the parameters'; here only which tensors they are.
            name: (value, dict(value) if name == "_buffers" else _contents(value))
            for name, value in vars(module).items()
            if name not in cls._OWN
        }


def _contents(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: (_Kept(v) if isinstance(v, Tensor) else v) for k, v in value.items()}
    return copy.copy(value) if isinstance(value, (list, set)) else value


class _Kept:
    """A tensor inside a dictionary, with its value."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.value = tensor, tensor.detach().clone()


def _put_back(value: Any, contents: Any) -> Any:
    if isinstance(value, Tensor):
        if value.is_inference():
            return contents
        with torch.no_grad():
            value.copy_(contents)
    elif isinstance(value, list):
        value[:] = contents
    elif isinstance(value, dict):
        value.clear()
        for key, item in contents.items():
            value[key] = _put_back(item.tensor, item.value) if isinstance(item, _Kept) else item
    elif isinstance(value, set):
        value.clear()
        value.update(contents)
    return value


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if isinstance(value, (dict, list)) else value


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
