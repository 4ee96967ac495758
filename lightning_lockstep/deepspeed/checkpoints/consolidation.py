"""One plain Lightning checkpoint from the folder that DeepSpeed has written, without DeepSpeed."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_lockstep._doors.torch_internals import set_versions_of_modules, versions_of_modules
from lightning_lockstep._settings import Faults
from lightning_lockstep.deepspeed.checkpoints.files import Checkpoint, read_checkpoint
from lightning_lockstep.deepspeed.checkpoints.partitions import Dtype, find_values
from lightning_lockstep.deepspeed.checkpoints.plain_data import is_plain, plain_entries
from lightning_lockstep.deepspeed.checkpoints.plain_file import (
    Allocate,
    Storage,
    in_memory,
    memory_budget,
    replacing,
    save,
)
from lightning_lockstep.errors import ConfigurationError

__all__ = ["OWN_KEYS", "consolidate", "consolidated"]

_DTYPES = ("float32", "as_saved")
#: What DeepSpeed itself puts beside Lightning's entries.
OWN_KEYS = frozenset(
    (
        *("module", "buffer_names", "optimizer", "lr_scheduler", "data_sampler", "random_ltd"),
        *("param_shapes", "shared_params", "frozen_param_shapes", "frozen_param_fragments"),
        *("skipped_steps", "global_steps", "global_samples", "ds_config", "ds_version"),
        *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "universal_checkpoint_info"),
        *("sparse_tensor_module_names", "csr_tensor_module_names"),
    )
)


def consolidated(
    folder: str | Path | Sequence[Path],  # several: of nodes that wrote to disks of their own
    *,
    tag: str | None = None,  # which checkpoint, where the folder holds several
) -> dict[str, Any]:
    """Return what a DeepSpeed checkpoint folder holds, as Lightning's own checkpoint of one file would.

    ``state_dict`` has whole tensors of float32, taken from the optimizer's float32 copies where there are
    any; parameters that share their values share them here too. The other entries are those of Lightning:
    epoch, loops, callbacks, hyperparameters and so on; those that are objects of classes are left out, with a
    warning. ``optimizer_states`` are left out: a new fit can begin with the weights, but does not go on with
    the optimizer as it was. Frozen parameters are missing where the run did not save them
    (``exclude_frozen_parameters``).

    Memory: the weights once. Files are memory-mapped, so that what is read of them need not stay in memory;
    the dictionary refers to none.
    """
    return _lightning_checkpoint(read_checkpoint(_paths(folder), tag), "float32", in_memory)


def consolidate(
    folder: str | Path | Sequence[Path],  # as for consolidated
    output: str | Path,
    *,
    tag: str | None = None,
    dtype: Dtype = "float32",  # as_saved: each tensor as the model had it; float32: widens halves
) -> Path:
    """Write what a DeepSpeed checkpoint folder holds into one file, as :func:`consolidated` describes it.

    The file loads with ``load_from_checkpoint`` and with ``torch.load(weights_only=True)``. It appears under its name
    when it is complete, in place of what was there.

    Memory: the weights once, if they take less than half of what is available; otherwise one part of a parameter
    at a time, and the disk of ``output`` needs space for the weights twice until the file is complete.
    """
    faults = Faults()
    faults.choice("dtype", dtype, _DTYPES)
    output = Path(output)
    faults.check(not output.is_dir(), "output", str(output), "a file to write, not a folder")
    faults.raise_all()
    checkpoint = read_checkpoint(_paths(folder), tag)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        content = _lightning_checkpoint(checkpoint, dtype, Storage(output.parent, memory_budget()))
        with replacing(output) as file:
            save(content, file)
    except OSError as error:
        raise ConfigurationError(
            f"output={str(output)!r}: cannot be written ({error.strerror or error})."
        ) from error
    return output


def _paths(folder: str | Path | Sequence[Path]) -> Path | Sequence[Path]:
    return Path(folder) if isinstance(folder, (str, Path)) else folder


def _lightning_checkpoint(checkpoint: Checkpoint, dtype: Dtype, allocate: Allocate) -> dict[str, Any]:
    first = checkpoint.model_states[0]
    client, dropped = plain_entries({key: value for key, value in first.items() if key not in OWN_KEYS})
    weights, no_weights = _state_dict(checkpoint, dtype, allocate)
    dropped += no_weights
    if dropped:
        warnings.warn(
            f"{checkpoint.folder}: left out what is not plain data: {', '.join(dropped)}.",
            RuntimeWarning,
            stacklevel=3,
        )
    return {**deepcopy(client), "state_dict": weights}


def _state_dict(
    checkpoint: Checkpoint, dtype: Dtype, allocate: Allocate
) -> tuple[OrderedDict[str, Any], list[str]]:
    """Return the whole tensors by name, and the names of other state that is no plain data."""
    module = checkpoint.model_states[0]["module"]
    try:
        values, aliases = find_values(checkpoint, dtype)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{checkpoint.folder}: is not laid out as DeepSpeed's checkpoints are ({error!r})."
        ) from error
    made: dict[str, Tensor] = {}
    weights: OrderedDict[str, Any] = OrderedDict()
    dropped = []
    for name, value in module.items():
        source = aliases.get(name, name)
        if source in values:
            if source not in made:
                made[source] = values[source].copy_to(allocate)
            weights[name] = made[source]
        elif is_plain(value) and not isinstance(value, Tensor):  # extra state of a module
            weights[name] = deepcopy(value)
        elif isinstance(value, Tensor):
            dropped.append(f"{name} (the run did not save its values)")
        else:
            dropped.append(name)
    metadata = versions_of_modules(module)
    if metadata is not None and is_plain(metadata):
        set_versions_of_modules(weights, metadata)
    return weights, dropped
