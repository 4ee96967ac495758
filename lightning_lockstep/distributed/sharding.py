"""A model divided among ranks by torch's ``fully_shard``: made real, given rank 0's values, divided, part by part.

A part (torch says: a group) is what is gathered at once: a unit before its forward and again before its backward, all
that is in no unit once for the whole step. Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from lightning_lockstep._lightning import find_shared_parameters, set_shared_parameters
from lightning_lockstep.distributed.process_group import broadcast_tensors
from lightning_lockstep.distributed.sharded_state import is_divided
from lightning_lockstep.errors import ConfigurationError


def make_mesh(device_type: str, *, shard: int, replicate: int) -> DeviceMesh:
    """Return the ranks as groups that divide a model among themselves, and the copies of it. Ranks: all, together."""
    if replicate == 1:
        # Named as in Lightning's ModelParallelStrategy, for modules written for that one.
        return init_device_mesh(device_type, (shard,), mesh_dim_names=("data_parallel",))
    return init_device_mesh(device_type, (replicate, shard), mesh_dim_names=("replicate", "shard"))


def divided_parts(module: nn.Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def divide(
    roots: Sequence[nn.Module],
    units: Sequence[nn.Module],  # inner ones first
    full: Collection[nn.Module],  # of the units, those that compute in float32
    *,
    mesh: DeviceMesh,
    device: torch.device,
    reshard: bool,  # whether a unit gives its whole parameters up between its forward and its backward
    offload: bool,  # whether a rank's shards are kept in the memory of the host
    compute: torch.dtype | None,  # in which units compute; None: that of their parameters
    reduce: torch.dtype | None,  # in which gradients are reduced; None: that of the computation
) -> None:
    """Divide the units, then what is left in the roots, with the values of rank 0. Ranks: all, together."""
    for part in (*units, *roots):
        broadcast_tensors(_make_real(part, device))
        dtype = compute if part in units and part not in full else None
        fully_shard(
            part,
            mesh=mesh,
            # None: what is gathered for the whole step stays until the end of the backward.
            reshard_after_forward=reshard and (True if part in units else None),
            mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce),
            offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
        )
    for root in roots:
        _gather_around_steps(root)


def take_values(module: nn.Module, device: torch.device) -> None:
    """Give a model that is divided already the values of rank 0, and of the first copy. Ranks: all, together."""
    give_up_gathered(module)
    broadcast_tensors(_make_real(module, device))
    for parameter in filter(is_divided, module.parameters()):
        divided: Any = parameter.detach()
        for dimension, placement in enumerate(divided.placements):
            if placement.is_replicate():
                broadcast_tensors([divided.to_local()], divided.device_mesh.get_group(dimension))


def _make_real(part: nn.Module, device: torch.device) -> list[Tensor]:
    """Put what is not divided yet on the device, initialized where it was made on ``meta``; return it."""
    shared = find_shared_parameters(part) if any(p.is_meta for p in part.parameters()) else []
    for module in part.modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(tensor.is_meta for tensor in own):
            reset: Any = getattr(module, "reset_parameters", None)
            if reset is None:
                raise ConfigurationError(
                    f"{type(module).__name__} was made on the device 'meta' and has no reset_parameters: expected one"
                    " that sets the first values of parameters and buffers, or a module made without `meta`."
                )
            module.to_empty(device=device, recurse=False)
            reset()
    if shared:
        set_shared_parameters(part, shared)
    plain = [tensor for tensor in (*part.parameters(), *part.buffers()) if not is_divided(tensor)]
    for tensor in plain:
        tensor.data = tensor.data.to(device).contiguous()  # fully_shard takes no other layout (channels_last)
    return plain


def _gather_around_steps(module: Any) -> None:
    """Have what is in no unit gathered for each step of a Trainer, as it is for ``forward``."""
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        if hasattr(module, name):
            step = getattr(module, name)
            setattr(module, name, _in_forward(module, step))
            register_fsdp_forward_method(module, name)
            # Lightning reads here which arguments a step takes.
            getattr(module, name).__func__.__wrapped__ = getattr(step, "__wrapped__", step)


def _in_forward(module: FSDPModule, step: Callable[..., Any]) -> Callable[..., Any]:
    # A step calls forward. When that returns, torch takes the forward pass of the whole step as ended: it would free
    # all at the end of the step, and gather it again for the backward.
    @wraps(step)
    def whole(*args: Any, **kwargs: Any) -> Any:
        # A backward within the step (second derivatives) leaves gathered what the one after it needs too.
        module.set_reshard_after_backward(False)
        try:
            output = step(*args, **kwargs)
        finally:
            module.set_reshard_after_backward(True)
        # Torch frees what is gathered at the end of a forward method that has called forward, whatever
        # reshard_after_forward says, unless the group is still in its forward pass.
        for group in _groups(module):
            group._training_state = type(group._training_state).FORWARD
        return output

    return whole


def set_reductions(module: nn.Module, active: bool) -> None:
    """Say whether the next backwards reduce gradients, or keep whole ones on each rank."""
    for part in divided_parts(module):
        part.set_requires_gradient_sync(active, recurse=False)


def give_up_gathered(module: nn.Module) -> None:
    """Free what was gathered for steps that no backward followed."""
    for part in divided_parts(module):
        part.reshard()


def own_gradients(module: nn.Module) -> list[Tensor]:
    """Return this rank's parts of the gradients, and whole ones that wait for a reduction; nothing is sent."""
    found: list[Any] = [parameter.grad for parameter in module.parameters()]
    with torch.no_grad():
        parts: list[Tensor] = [g.to_local() if is_divided(g) else g for g in found if g is not None]
    groups = chain.from_iterable(map(_groups, divided_parts(module)))
    for holder in chain.from_iterable(group.fsdp_params for group in groups):
        # Gradients that accumulate without a reduction are kept here alone, whole ones on each rank. The public name of
        # the whole parameter fails before it is gathered for the first time.
        gathered = getattr(holder, "_unsharded_param", None)
        whole = (holder.unsharded_accumulated_grad, getattr(gathered, "grad", None))
        parts += [gradient for gradient in whole if gradient is not None]
    return parts


def _groups(part: Any) -> list[Any]:
    """Return the groups of parameters of a part of `fully_shard`; newer torch may have several."""
    state = part._get_fsdp_state()
    group = getattr(state, "_fsdp_param_group", None)
    return list(getattr(state, "_fsdp_param_groups", [] if group is None else [group]))
