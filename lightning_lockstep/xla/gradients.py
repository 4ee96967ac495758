"""Gradients of XLA devices, as what comes after a backward expects them."""

from __future__ import annotations

import torch

__all__ = ["own_memory"]


def own_memory(module: torch.nn.Module) -> None:
    """Give each gradient of a module memory of its own, so that it can be changed in place.

    The gradient of a sum is one number seen many times, and torch-xla does not show that by strides; autograd keeps
    it as it is, and clipping it in place would then change the one number many times.
    """
    for parameter in module.parameters():
        if parameter.grad is not None and not parameter.grad.is_sparse:
            parameter.grad = parameter.grad.clone()
