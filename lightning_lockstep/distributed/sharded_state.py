"""Checkpoints of a divided model: gathered to one plain file, or a folder in which each rank writes its parts.

The folder has torch's distributed checkpoint of all divided tensors and, in ``lightning.pt``, the rest of Lightning's
checkpoint. It is read on any number of ranks, and by one process without any.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_lockstep.errors import ConfigurationError

#: The file of a folder that holds what is no divided tensor, and the entry there that says where those belong.
REST, PLACES = "lightning.pt", "lockstep_places"
_TABLE = ".metadata"  # what torch's distributed checkpoint calls its table of contents
_SEPARATOR = "/"
Place: TypeAlias = "tuple[str | int, ...]"  # keys of nested dicts and lists

# What reads checkpoints without ranks imports this file too, so torch's modules for divided tensors (some tenths of a
# second) are imported where they are used.

# -- Whole tensors, and this rank's parts of them --


def is_divided(value: object) -> bool:
    """Return whether a value is a ``DTensor``: divided among the ranks, or kept by them in another way torch knows."""
    return isinstance(value, Tensor) and hasattr(value, "placements")


def ranks_of_part(divided: Any) -> tuple[int, ...]:
    """Return the ranks that hold what this rank holds of a ``DTensor``; none where this one is not in its mesh."""
    mesh, place = divided.device_mesh, divided.device_mesh.get_coordinate()
    if place is None:
        return ()
    index = [slice(None) if p.is_replicate() else at for p, at in zip(divided.placements, place, strict=True)]
    return tuple(sorted(mesh.mesh[tuple(index)].flatten().tolist()))


def gathered(tree: Any, *, keep: bool) -> Any:
    """Return nested dicts and lists with whole tensors on the host for divided ones, or ``None``; ranks: all."""
    if isinstance(tree, dict):
        return {key: gathered(value, keep=keep) for key, value in tree.items()}
    if isinstance(tree, list):
        return [gathered(value, keep=keep) for value in tree]
    if not is_divided(tree):
        return tree
    on_device: Any = tree.detach().to(tree.device_mesh.device_type)
    whole = on_device.full_tensor()
    return whole.cpu() if keep else None


def _divided_like(value: Any, like: Any) -> Any:
    """Return this rank's part of a whole tensor, divided as another one is; anything else as it is."""
    if not is_divided(like) or not isinstance(value, Tensor) or is_divided(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.detach(), like.device_mesh, like.placements, src_data_rank=None)


def load_weights(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load weights, whole or divided, into a module. Ranks: each, alone."""
    own = module.state_dict()
    module.load_state_dict(
        {name: _divided_like(value, own.get(name)) for name, value in state.items()}, strict
    )


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load the state of an optimizer, whole or divided. Ranks: each, alone."""
    parameters = parameters_of(optimizer)
    loaded = {}
    for number, values in state["state"].items():
        parameter = parameters[number]
        loaded[number] = {key: _fitting(optimizer, value, parameter) for key, value in values.items()}
    optimizer.load_state_dict({**state, "state": loaded})


def _fitting(optimizer: torch.optim.Optimizer, value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor) or value.ndim == 0 or not is_divided(parameter):
        return value
    if value.shape != parameter.shape:
        raise ConfigurationError(
            f"The checkpoint has a tensor of shape {tuple(value.shape)} that {type(optimizer).__name__} keeps for a"
            f" parameter of shape {tuple(parameter.shape)}: expected equal shapes, which can be divided alike."
        )
    return _divided_like(value, parameter)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer in the order in which its state numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# -- A folder in which each rank writes its parts --


def is_parts_folder(path: str | Path) -> bool:
    """Return whether a path is such a folder; no file is read."""
    return (Path(path) / REST).is_file() and (Path(path) / _TABLE).is_file()


def save_parts(checkpoint: dict[str, Any], folder: Path, *, is_main: bool) -> None:
    """Write a checkpoint, each rank its parts of divided tensors and rank 0 the rest. Ranks: all, together."""
    import torch.distributed.checkpoint as dcp

    parts = dict(_divided(checkpoint, ()))
    names = {_SEPARATOR.join(map(str, place)): place for place in parts}
    dcp.save({name: parts[place] for name, place in names.items()}, checkpoint_id=folder)
    if is_main:
        rest = {
            **_without(checkpoint, parts, ()),
            PLACES: {name: list(place) for name, place in names.items()},
        }
        torch.save(rest, folder / REST)


def _divided(tree: Any, place: Place) -> Iterator[tuple[Place, Tensor]]:
    if is_divided(tree):
        yield place, tree.detach()
    elif isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _divided(value, (*place, key))


def _without(tree: Any, left_out: Mapping[Place, Any], place: Place) -> Any:
    if isinstance(tree, dict):
        kept = {key: value for key, value in tree.items() if (*place, key) not in left_out}
        return {key: _without(value, left_out, (*place, key)) for key, value in kept.items()}
    if isinstance(tree, list):
        return [_without(value, left_out, (*place, number)) for number, value in enumerate(tree)]
    return tree


def load_parts(
    folder: Path,
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],  # none: their states are left out
    *,
    weights_only: bool,  # whether only plain data may be read
) -> dict[str, Any]:
    """Return a checkpoint with this rank's parts of divided tensors. Ranks: all, together."""
    own = module.state_dict()

    def like(place: Place) -> object:
        if place[0] != "optimizer_states":
            return own.get(str(place[1]))
        number, parameter = int(place[1]), int(place[3])  # optimizer_states, 0, state, 5, exp_avg
        return parameters_of(optimizers[number])[parameter] if number < len(optimizers) else _LEFT_OUT

    return read_parts(folder, torch.load(folder / REST, map_location="cpu", weights_only=weights_only), like)


_LEFT_OUT = object()


def read_parts(
    folder: Path,
    rest: dict[str, Any],  # what the folder's file of it holds
    like: Callable[[Place], object] = lambda place: (
        None
    ),  # a divided tensor like the one at a place; else a whole one
) -> dict[str, Any]:
    """Return the checkpoint of a folder. Ranks: all, together; or a process without others."""
    import torch.distributed.checkpoint as dcp

    places = {name: tuple(place) for name, place in rest.pop(PLACES).items()}
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    wanted: dict[str, Any] = {}
    for name, place in places.items():
        known: Any = stored[name]
        example: Any = like(place)
        dtype, shape = known.properties.dtype, known.size
        if is_divided(example) and example.shape == shape:
            wanted[name] = torch.empty_like(example.detach(), dtype=dtype)
        elif example is not _LEFT_OUT:
            wanted[name] = torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled"
        )  # that there is one process alone
        dcp.load(wanted, checkpoint_id=folder)
    for name, value in wanted.items():
        *path, last = places[name]
        target: Any = rest
        for key in path:
            target = target[key]
        target[last] = value
    return rest
