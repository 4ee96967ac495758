"""Where the values of each parameter are in the files of all ranks, and one plain checkpoint made of them."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_lockstep.deepspeed.checkpoints.files import Checkpoint, read_checkpoint, read_file, save
from lightning_lockstep.distributed.plain_data import is_plain, plain_entries
from lightning_lockstep.distributed.sharded_state import REST, is_parts_folder, read_parts
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.numerics.statistics import LOW_PRECISION

# -- Views of the values of a parameter, which may lie in the files of several ranks --


@dataclass(frozen=True)
class Values:
    shape: Sequence[int]  # of the whole tensor
    dtype: torch.dtype  # in which it is to be written
    parts: Sequence[Tensor]  # of one dimension; one after the other they are the flat parameter

    def whole(self) -> Tensor:
        vector = torch.empty(math.prod(self.shape), dtype=self.dtype)
        self.copy_to(vector, 0)
        return vector.view(tuple(self.shape))

    def copy_to(self, vector: Tensor, start: int) -> None:
        """Write the flat parameter into a vector, from one of its values on, with zeros after its end."""
        filled = 0
        for part in _cut(self.parts, start, vector.numel()):
            vector[filled : filled + part.numel()].copy_(part)
            filled += part.numel()
        vector[filled:].zero_()


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return where the values of a tensor are: the same for names of one tensor."""
    # Parameters of stage 1 and 2 are parts of one vector; those of stage 3 are empty, each in a storage of its own.
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


def _flat(tensor: Tensor) -> Tensor:
    """Return a tensor as a vector, without a copy if it is contiguous."""
    return tensor.detach().reshape(-1)


def _count(parts: Sequence[Tensor]) -> int:
    return sum(part.numel() for part in parts)


def _cut(parts: Sequence[Tensor], start: int, length: int) -> list[Tensor]:
    """Return views of ``length`` elements from ``start`` on of vectors that follow each other."""
    found = []
    for part in parts:
        piece = part[start : start + length] if length and start < part.numel() else part[:0]
        if piece.numel():
            found.append(piece)
        length -= piece.numel()
        start = max(0, start - part.numel())
    return found


# -- Where the values of each parameter are, in the files of a checkpoint --
# - Stage 0: whole, with the model; float32 copies of half-precision ones, in the same file, have no names, so that they
#   are not used.
# - Stages 1 and 2: whole, with the model. The float32 copies of each parameter group are one flat vector, of which
#   every rank has a part; the parts of all ranks, one after the other, are the vector.
# - Stage 3: every rank has a part of each parameter, and its parts of all parameters, one after the other, are its
#   vectors. Frozen parameters are with the model states, in parts too.
#
# What an optimizer keeps for each value, such as Adam's moments, lies as the float32 copies do.

Dtype = Literal["float32", "as_saved"]
#: Which parameter each name in the weights of a checkpoint is, by its own name, if this package saved it.
NAMES = "lockstep_parameter_names"
#: What the places of values in the files depend on, if this package saved them.
LAYOUT = "lockstep_layout"


def values_of_parameters(checkpoint: Checkpoint) -> dict[str, Values]:
    """Return the values of parameters by their own names: what is trained in stages 1 to 3, and what is frozen in 3."""
    trained = put_together(checkpoint, master_vectors(checkpoint))
    return _frozen(checkpoint) | trained if checkpoint.is_divided else trained


def find_values(checkpoint: Checkpoint, dtype: Dtype) -> dict[str, Values]:
    """Return where the values of each tensor are; names of one tensor have the same object."""
    first, is_divided = checkpoint.model_states[0], checkpoint.is_divided
    saved = {name: value for name, value in first["module"].items() if isinstance(value, Tensor)}
    known = values_of_parameters(checkpoint) if checkpoint.optimizer_states else {}
    frozen = first["frozen_param_shapes"] or {}
    names = first.get(NAMES) if checkpoint.optimizer_states else None
    if names is None:
        names = {name: name for name in saved if name not in first["buffer_names"]}
    # What was one tensor when it was saved is one again in a mapped file, also the empty one of stage 3.
    at_place: dict[object, set[str]] = {}
    for name, parameter in names.items():
        if parameter in known:
            at_place.setdefault(place_of(saved[name]), set()).add(parameter)
    found: dict[object, Values] = {}  # of each parameter, or of each place in a file
    values: dict[str, Values] = {}
    lost = []
    for name, tensor in saved.items():
        parameter = names.get(name, "")
        if parameter not in known and len(others := at_place.get(place_of(tensor), set())) == 1:
            (parameter,) = others
        if parameter in known and (dtype == "float32" or is_divided):
            of = known[parameter]
            written = _written(of.parts[0].dtype if parameter in frozen else tensor.dtype, dtype)
            values[name] = found.setdefault(parameter, replace(of, dtype=written))
        elif not is_divided or tensor.numel() > 0 or not parameter:
            of = Values(tensor.shape, _written(tensor.dtype, dtype), [_flat(tensor)])
            values[name] = found.setdefault(place_of(tensor), of)
        else:
            lost.append(name)
    if lost and first["frozen_param_shapes"] is not None:
        raise ConfigurationError(
            f"{checkpoint.folder}: holds no values of {', '.join(lost)}. In stage 3 DeepSpeed saves only parameters"
            " that the optimizer has, and frozen ones, by the names of named_parameters(). If the module's state_dict()"
            " gives other names, save the checkpoint with LockstepDeepSpeedStrategy, which adds them."
        )
    return values


def _written(saved: torch.dtype, dtype: Dtype) -> torch.dtype:
    return torch.float32 if dtype == "float32" and saved in LOW_PRECISION else saved


def master_vectors(checkpoint: Checkpoint) -> list[Sequence[Tensor]]:
    """Return the float32 copies that the optimizer of each rank works on."""
    key = "fp32_flat_groups" if checkpoint.is_divided else "single_partition_of_fp32_groups"
    return [state[key] for state in checkpoint.optimizer_states]


def put_together(
    checkpoint: Checkpoint,
    vectors: Sequence[Sequence[Tensor]],  # of each rank
) -> dict[str, Values]:
    """Return the values of each parameter, by its name, in vectors that lie as the float32 copies do."""
    return (_divided_values if checkpoint.is_divided else _flat_values)(checkpoint, vectors)


def _flat_values(
    checkpoint: Checkpoint,
    vectors: Sequence[Sequence[Tensor]],  # each rank's part, a vector for each group of parameters
) -> dict[str, Values]:
    """Cut flat vectors of stages 1 and 2 into the values of each parameter."""
    found = {}
    groups = checkpoint.model_states[0]["param_shapes"]
    without = [[0] * len(group) for group in groups]
    gaps = checkpoint.optimizer_states[0].get("param_alignment_paddings") or without
    for number, group in enumerate(groups):
        parts = [_flat(of_rank[number]) for of_rank in vectors]
        held, needed = _count(parts), sum(map(math.prod, group.values())) + sum(gaps[number])
        # The vector is padded so that each rank's part has the same even length; not every optimizer saves that.
        if not needed <= held < needed + 2 * len(vectors):
            raise _mismatch(checkpoint.folder, f"parameter group {number}", held, needed)
        start = 0
        for (name, shape), gap in zip(group.items(), gaps[number], strict=True):
            found[name] = Values(shape, parts[0].dtype, _cut(parts, start, math.prod(shape)))
            start += math.prod(shape) + gap
    return found


def _divided_values(
    checkpoint: Checkpoint,
    vectors: Sequence[Sequence[Tensor]],  # of each rank, those that follow each other
) -> dict[str, Values]:
    """Cut vectors of stage 3, which hold a part of each parameter, into the values of each."""
    of_ranks = [[_flat(vector) for vector in of_rank] for of_rank in vectors]
    groups = checkpoint.model_states[0]["param_shapes"]
    shapes = {name: shape for group in groups for name, shape in group.items()}
    lengths = {name: -(-math.prod(shape) // len(vectors)) for name, shape in shapes.items()}
    for rank, of_rank in enumerate(of_ranks):
        if _count(of_rank) != sum(lengths.values()):
            raise _mismatch(checkpoint.folder, f"rank {rank}", _count(of_rank), sum(lengths.values()))
    found, start = {}, 0
    for name, shape in shapes.items():
        parts = [part for of_rank in of_ranks for part in _cut(of_rank, start, lengths[name])]
        found[name] = Values(shape, of_ranks[0][0].dtype, _cut(parts, 0, math.prod(shape)))
        start += lengths[name]
    return found


def _frozen(checkpoint: Checkpoint) -> dict[str, Values]:
    shapes = checkpoint.model_states[0]["frozen_param_shapes"] or {}
    frozen = {}
    for name, shape in shapes.items():
        parts = [_flat(states["frozen_param_fragments"][name]) for states in checkpoint.model_states]
        if _count(parts) < math.prod(shape):
            raise _mismatch(checkpoint.folder, name, _count(parts), math.prod(shape))
        frozen[name] = Values(shape, parts[0].dtype, _cut(parts, 0, math.prod(shape)) or parts[:1])
    return frozen


def _mismatch(folder: Path, where: str, held: int, needed: int) -> ConfigurationError:
    return ConfigurationError(
        f"{folder}: the optimizer states hold {held} values of {where}, expected {needed}. Either the files are of"
        " different runs, or the optimizer's states were moved to NVMe, which is not supported."
    )


# -- One plain Lightning checkpoint from the folder that DeepSpeed has written, without DeepSpeed --

#: What DeepSpeed itself adds to Lightning's entries.
OWN_KEYS = frozenset(
    (
        *("module", "buffer_names", "optimizer", "lr_scheduler", "data_sampler", "random_ltd"),
        *("param_shapes", "shared_params", "frozen_param_shapes", "frozen_param_fragments"),
        *("skipped_steps", "global_steps", "global_samples", "ds_config", "ds_version"),
        *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "universal_checkpoint_info"),
        *("sparse_tensor_module_names", "csr_tensor_module_names", NAMES, LAYOUT),
    )
)


def consolidated(
    folder: str | Path | Sequence[Path],  # several: of nodes that wrote to their own disks
    dtype: Dtype = "float32",
    without: Collection[str] = (),  # weights that are to have their shape alone
) -> dict[str, Any]:
    """Return what a DeepSpeed checkpoint folder holds, as Lightning's own checkpoint of one file would."""
    # Parameters that share their values share them here too; frozen ones are missing if the run did not save them
    # (``exclude_frozen_parameters``). Files are memory-mapped, and the dictionary refers to none of them.
    checkpoint = read_checkpoint(folder)
    entries = {key: value for key, value in checkpoint.model_states[0].items() if key not in OWN_KEYS}
    client, dropped = plain_entries(entries)
    weights, no_weights = _state_dict(checkpoint, dtype, without)
    _warn_of(checkpoint.folder, dropped + no_weights)
    return {**deepcopy(client), "state_dict": weights}


def consolidate(
    folder: str | Path | Sequence[Path],  # as for consolidated
    output: str | Path,
    *,
    dtype: Dtype = "float32",  # as_saved: each tensor as the model had it; float32: widens halves
) -> Path:
    """Write what a checkpoint folder holds into one file, which takes the place of ``output`` when it is complete."""
    output = Path(output)
    first, *others = [Path(folder)] if isinstance(folder, (str, Path)) else folder
    has_parts = is_parts_folder(first) and not others
    content = _of_parts(first, dtype) if has_parts else consolidated(folder, dtype)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        save(content, output)
    except (OSError, RuntimeError) as error:
        # torch's writer says only at which position it stood; the error of the system came before.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise ConfigurationError(
            f"output={str(output)!r}: expected a file that can be written ({cause.strerror or cause})."
        ) from error
    return output


def _of_parts(folder: Path, dtype: Dtype) -> dict[str, Any]:
    """Return what a folder of :class:`LockstepFSDPStrategy` holds: a plain checkpoint from which a fit can go on."""
    rest, dropped = plain_entries(read_file(folder / REST))
    _warn_of(folder, dropped)
    content = read_parts(folder, rest)
    weights = content["state_dict"]
    for name, value in weights.items():
        if isinstance(value, Tensor):
            weights[name] = value.to(_written(value.dtype, dtype))
    return content


def _warn_of(folder: Path, dropped: Sequence[str]) -> None:
    if dropped:
        warnings.warn(f"{folder}: left out what is not plain data: {', '.join(dropped)}.", RuntimeWarning, stacklevel=4)


def _state_dict(
    checkpoint: Checkpoint, dtype: Dtype, without: Collection[str]
) -> tuple[OrderedDict[str, Any], list[str]]:
    """Return the whole tensors by name, and the names of other state that is no plain data."""
    module = checkpoint.model_states[0]["module"]
    try:
        values = find_values(checkpoint, dtype)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{checkpoint.folder}: expected a checkpoint of DeepSpeed, but reading it failed ({error!r})."
        ) from error
    made: dict[int, Tensor] = {}
    weights: OrderedDict[str, Any] = OrderedDict()
    dropped = []
    for name, value in module.items():
        if name in values:
            found = values[name]
            if id(found) not in made:
                # Zeros of the same shape take no memory.
                empty = torch.zeros((), dtype=found.dtype).expand(tuple(found.shape))
                made[id(found)] = empty if name in without else found.whole()
            weights[name] = made[id(found)]
        elif is_plain(value) and not isinstance(value, Tensor):  # extra state of a module
            weights[name] = deepcopy(value)
        elif isinstance(value, Tensor):
            dropped.append(f"{name} (the run did not save its values)")
        else:
            dropped.append(name)
    metadata = getattr(module, "_metadata", None)  # the versions of the modules
    if metadata is not None and is_plain(metadata):
        weights._metadata = metadata  # type: ignore[attr-defined]
    return weights, dropped
