"""Checkpoints of a divided model: gathered to one plain file, or a folder in which each rank writes its parts.

The folder has torch's distributed checkpoint of all divided tensors and, in ``lightning.pt``, Lightning's checkpoint
with tensors on ``meta`` in their places. It is read on any number of ranks, and by one process without any.
"""

from __future__ import annotations

import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_lockstep._text import first_line, ranks_in_words
from lightning_lockstep.distributed.plain_data import load_without_objects
from lightning_lockstep.errors import ConfigurationError

#: The file of a folder that holds what is no divided tensor.
REST = "lightning.pt"
_TABLE = ".metadata"  # what torch's distributed checkpoint calls its table of contents
Place: TypeAlias = "tuple[str | int, ...]"  # keys of nested dicts and lists

# What reads checkpoints without ranks imports this file too, so torch's modules for divided tensors (some tenths of a
# second) are imported where they are used.

# -- Whole tensors, and this rank's parts of them --


def is_divided(value: object) -> bool:
    """Return whether a value is a ``DTensor``: divided among the ranks, or kept by them in another way torch knows."""
    return isinstance(value, Tensor) and hasattr(value, "placements")


def ranks_of_part(divided: Any) -> tuple[int, ...]:
    """Return the ranks that hold what this rank holds of a ``DTensor``; none if this one is not in its mesh."""
    mesh, place = divided.device_mesh, divided.device_mesh.get_coordinate()
    if place is None:
        return ()
    index = [slice(None) if p.is_replicate() else at for p, at in zip(divided.placements, place, strict=True)]
    return tuple(sorted(mesh.mesh[tuple(index)].flatten().tolist()))


def gathered(tree: Any, *, keep: bool) -> Any:
    """Return nested dicts and lists with whole tensors on the host for divided ones, or ``None``; ranks: all."""

    def whole(value: Any, place: Place) -> Tensor | None:
        if not is_divided(value):
            return value  # type: ignore[no-any-return]
        tensor: Tensor = value.detach().to(value.device_mesh.device_type).full_tensor()
        return tensor.cpu() if keep else None

    return _mapped(tree, whole)


def _mapped(tree: Any, change: Callable[[Any, Place], Any], place: Place = ()) -> Any:
    """Return nested dicts and lists with what ``change`` makes of each tensor, told its place."""
    if isinstance(tree, list):
        return [_mapped(value, change, (*place, number)) for number, value in enumerate(tree)]
    if not isinstance(tree, dict):
        return change(tree, place) if isinstance(tree, Tensor) else tree
    inner = {key: _mapped(value, change, (*place, key)) for key, value in tree.items()}
    versions = getattr(tree, "_metadata", None)  # by which modules load what older ones have saved
    if versions is not None:
        inner = OrderedDict(inner)  # which takes attributes
        inner._metadata = versions  # type: ignore[attr-defined]
    return inner


def _divided_like(value: Any, like: Any) -> Any:
    """Return this rank's part of a whole tensor, divided like another one; a divided tensor is returned as it is."""
    if not is_divided(like) or is_divided(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.detach(), like.device_mesh, like.placements, src_data_rank=None)


def load_weights(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load weights, whole or divided, into a module. Ranks: each, alone."""
    # Each module divides its own values when it loads them, whatever names load_state_dict() has changed until then.

    def divide_own(part: nn.Module, values: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, like in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            if prefix + name in values:
                values[prefix + name] = _divided_like(values[prefix + name], like)

    hooks = [
        part.register_load_state_dict_pre_hook(divide_own)  # type: ignore[no-untyped-call]
        for part in module.modules()
    ]
    try:
        module.load_state_dict(state, strict)
    finally:
        for hook in hooks:
            hook.remove()


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load the state of an optimizer, whole or divided. Ranks: each, alone."""
    parameters: dict[Any, Tensor] = dict(enumerate(parameters_of(optimizer)))

    def fitting(value: Tensor, place: Place) -> Any:
        parameter = parameters.get(place[0])  # torch refuses a state for another number of parameters
        # What is kept for a parameter in another shape, such as the number of steps, is whole on each rank.
        return _divided_like(value, parameter) if value.shape == getattr(parameter, "shape", None) else value

    optimizer.load_state_dict({**state, "state": _mapped(state["state"], fitting)})


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer in the order in which its state numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# -- A folder in which each rank writes its parts --


def is_parts_folder(path: str | Path) -> bool:
    """Return whether a path is such a folder; no file is read."""
    return (Path(path) / REST).is_file() and (Path(path) / _TABLE).is_file()


def all_see_parts(path: str | Path, gather: Callable[[Any], Sequence[Any]]) -> bool:
    """Return whether a path is such a folder; raise on all ranks if they see different things. Ranks: all."""
    found, paths = zip(*gather((is_parts_folder(path), str(path))), strict=True)
    if len(set(found)) > 1:
        elsewhere = ranks_in_words(rank for rank, is_there in enumerate(found) if not is_there)
        raise ConfigurationError(
            f"{paths[0]} is a folder of parts on some ranks, but not on {elsewhere}: expected one checkpoint that all"
            " ranks see. Put it on a disk that all nodes share, and give its absolute path."
        )
    return bool(found[0])


def save_parts(checkpoint: dict[str, Any], folder: Path, *, is_main: bool) -> None:
    """Write a checkpoint, each rank its parts of divided tensors and rank 0 the rest. Ranks: all, together."""
    import torch.distributed.checkpoint as dcp

    parts: dict[str, Tensor] = {}

    def left_out(value: Tensor, place: Place) -> Tensor:
        if not is_divided(value):
            return value
        parts[_name(place)] = value.detach()
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    rest = _mapped(checkpoint, left_out)
    with _in_one_line(OSError, f"{folder} cannot be written by", _LEFT):
        dcp.save(parts, checkpoint_id=folder)
    if is_main:
        try:
            torch.save(rest, folder / REST)
        except (OSError, RuntimeError) as error:
            raise OSError(f"{folder} cannot be written by rank 0: {first_line(error)}. {_LEFT}") from error


_LEFT = "What was saved before is left as it is."


@contextmanager
def _in_one_line(kind: type[Exception], what: str, remedy: str) -> Iterator[None]:
    """Replace torch's error, which all ranks raise and which has no summary, by one that names the failed ranks."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        yield
    except CheckpointException as error:
        failed = [f"rank {rank}: {type(one).__name__}: {one}" for rank, (one, _) in error.failures.items()]
        raise kind(f"{what} {'; '.join(map(first_line, failed[:4]))}. {remedy}") from None


def _name(place: Place) -> str:
    return "/".join(map(str, place))


def load_parts(
    folder: Path,
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],  # none: their states are left out
    *,
    weights_only: bool,  # whether only plain data may be read
) -> dict[str, Any]:
    """Return a checkpoint with this rank's parts of divided tensors. Ranks: all, together."""

    def load(path: Path, weights_only: bool | None) -> Any:
        return torch.load(path, map_location="cpu", weights_only=weights_only)

    try:
        rest = load_without_objects(load, folder / REST, weights_only)
    except (EOFError, OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise ConfigurationError(f"{folder / REST} cannot be read: {first_line(error)}. {_WHOLE}") from error
    del rest.get("optimizer_states", [])[len(optimizers) :]
    own = module.state_dict()
    parameters = [dict(enumerate(parameters_of(one))) for one in optimizers]

    def like(place: Place) -> object:
        match place:
            case ("state_dict", name):
                return own.get(str(name))
            case ("optimizer_states", int(number), "state", int(parameter), _):
                return parameters[number].get(parameter)
        return None  # what the program itself has added

    return read_parts(folder, rest, like)


_WHOLE = "Expected all files as they were saved, whole: copy the folder again, or give an earlier checkpoint."


def read_parts(
    folder: Path,
    rest: dict[str, Any],  # what the folder's file of it holds
    like: Callable[[Place], object] = lambda place: None,  # a divided tensor like it; else it is read whole
) -> dict[str, Any]:
    """Return the checkpoint of a folder. Ranks: all, together; or a process without others."""
    import torch.distributed.checkpoint as dcp

    wanted: dict[str, Any] = {}

    def to_fill(value: Tensor, place: Place) -> Any:
        if not value.is_meta:
            return value
        example: Any = like(place)
        if is_divided(example) and example.shape == value.shape:
            made = torch.empty_like(example.detach(), dtype=value.dtype)
        else:
            made = torch.empty_like(value, device="cpu")
        return wanted.setdefault(_name(place), made)

    content: dict[str, Any] = _mapped(rest, to_fill)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process alone
        with _in_one_line(ConfigurationError, f"{folder} cannot be read by", _WHOLE):
            dcp.load(wanted, checkpoint_id=folder)
    return content
