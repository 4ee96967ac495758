"""Which dtypes a run on XLA devices really uses, seen in its first training step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor

__all__ = ["DtypeReport"]


class DtypeReport:
    """Notes the dtypes in a step: inputs, outputs of modules, parameters, gradients, optimizer state."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._found: dict[str, set[str]] = {"inputs": set(), "computed": set()}
        leaves = (part for part in module.modules() if next(part.children(), None) is None)
        self._hooks = [part.register_forward_hook(self._note_output) for part in leaves]

    def note_inputs(self, batch: Any) -> None:
        apply_to_collection(batch, Tensor, lambda one: self._note("inputs", [one]))

    def _note_output(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._module.training:  # a batch of the validation before training computes by its own rules
            apply_to_collection(output, Tensor, lambda one: self._note("computed", [one]))

    def _note(self, kind: str, tensors: Iterable[Tensor]) -> None:
        self._found.setdefault(kind, set()).update(_floating(tensors))

    def finish(self, optimizer: Any) -> str:
        """Return, after the first step, such as ``inputs bfloat16; computed ...``, and watch no longer."""
        parameters = list(self._module.parameters())
        self._note("parameters", parameters)
        self._note("gradients", (one.grad for one in parameters if one.grad is not None))
        states = (value for state in optimizer.state.values() for value in state.values())
        # A count of steps is a tensor too, without dimensions.
        self._note("optimizer state", (one for one in states if isinstance(one, Tensor) and one.dim()))
        self.forget()
        parts = (f"{kind} {' and '.join(sorted(found))}" for kind, found in self._found.items() if found)
        return "; ".join(parts) + "."

    def forget(self) -> None:
        """Take the forward hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _floating(tensors: Iterable[Tensor]) -> set[str]:
    return {str(one.dtype).removeprefix("torch.") for one in tensors if one.is_floating_point()}
