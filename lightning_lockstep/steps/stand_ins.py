"""Parameters that stand in for those of a module: the same values in the same memory, without hooks and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["stand_in_parameters"]


@contextmanager
def stand_in_parameters(root: nn.Module) -> Iterator[None]:  # its parameters are whole leaves
    """Let backward passes of the body leave the parameters of ``root`` alone, and what listens to their gradients.

    Each parameter is replaced by one that shares its memory. An engine that reduces a gradient as soon as autograd
    has it (DeepSpeed) is not called, and gradients of the run stay as they are. A parameter that several modules
    share is still shared.
    """
    places = [
        (module, name, parameter)
        for module in root.modules()
        # Of the base class: a class of its own may rename them, or take no such arguments.
        for name, parameter in nn.Module.named_parameters(module, recurse=False, remove_duplicate=False)
    ]
    stand_ins = {id(parameter): _sharing(parameter) for _, _, parameter in places}
    try:
        for module, name, parameter in places:
            setattr(
                module, name, stand_ins[id(parameter)]
            )  # an LSTM keeps a list of its own up to date there
        yield
    finally:
        for module, name, parameter in places:
            setattr(module, name, parameter)


def _sharing(parameter: nn.Parameter) -> nn.Parameter:
    with torch.no_grad():
        return nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
