"""Checkpoints of a divided model: gathered to one plain file, or a folder in which each rank writes its part.

The folder has torch's distributed checkpoint of all divided tensors and, in ``lightning.pt``, the rest of Lightning's
checkpoint. Both are read on any number of ranks, and joined without any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

_REST = "lightning.pt"
_DIVIDED = ".metadata"  # what torch's distributed checkpoint calls its table of contents
_WEIGHTS, _STATES = "state_dict", "optimizer_states"


def gathered(tree: Any, *, keep: bool) -> Any:
    """Return nested dicts and lists with whole tensors in host memory in place of divided ones.

    Ranks: all, together; where ``keep`` is false a rank helps and gets ``None`` for each.
    """
    if isinstance(tree, dict):
        return {key: gathered(value, keep=keep) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(gathered(value, keep=keep) for value in tree)
    if not isinstance(tree, DTensor):
        return tree
    on_device: Any = tree.detach().to(tree.device_mesh.device_type)
    whole = on_device.full_tensor()
    return whole.cpu() if keep else None


def divided_like(value: Any, like: object) -> Any:
    """Return this rank's part of a whole tensor, divided as another one is; anything else as it is."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value.detach(), like.device_mesh, like.placements, src_data_rank=None)


def load_weights(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load weights, whole or divided, into a module, divided or not. Ranks: each, alone."""
    own = module.state_dict()
    module.load_state_dict(
        {name: divided_like(value, own.get(name)) for name, value in state.items()}, strict
    )


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load the state of an optimizer, whole or divided. Ranks: each, alone."""
    parameters = parameters_of(optimizer)

    def fitting(parameter: Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: divided_like(value, parameter) if getattr(value, "shape", None) == parameter.shape else value
            for key, value in values.items()
        }

    kept = {number: fitting(parameters[number], values) for number, values in state["state"].items()}
    optimizer.load_state_dict({**state, "state": kept})


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer in the order in which its state numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
