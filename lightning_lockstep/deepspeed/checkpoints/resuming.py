"""A fit that resumes from a checkpoint folder, on as many ranks as have written it or on others."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lockstep._console import say
from lightning_lockstep._doors.deepspeed_internals import divides_parameters, set_counters, train_batch_size
from lightning_lockstep._settings import is_whole
from lightning_lockstep.deepspeed.agreement import agreed
from lightning_lockstep.deepspeed.checkpoints.consolidation import OWN_KEYS
from lightning_lockstep.deepspeed.checkpoints.file_names import (
    check_complete,
    check_kind,
    expected_names,
    has_experts,
)
from lightning_lockstep.deepspeed.checkpoints.files import (
    Checkpoint,
    files_of,
    read_checkpoint,
    read_first,
)
from lightning_lockstep.deepspeed.checkpoints.loading import check_names, load_by_module
from lightning_lockstep.deepspeed.checkpoints.optimizer_state import OptimizerState, read_optimizer_state
from lightning_lockstep.deepspeed.checkpoints.partitions import find_values
from lightning_lockstep.deepspeed.checkpoints.plain_data import is_plain, plain_entries
from lightning_lockstep.deepspeed.checkpoints.plain_file import in_memory
from lightning_lockstep.deepspeed.checkpoints.redivision import check_same_training, redivide
from lightning_lockstep.deepspeed.checkpoints.values import Values
from lightning_lockstep.distributed import Communicator
from lightning_lockstep.errors import ConfigurationError

__all__ = ["resume_redivided", "writers_differ"]


def writers_differ(
    folder: Path,
    communicator: Communicator,
    *,
    stage: int,  # of this run
    half: str | None,  # bf16 or fp16 where this run trains in it
) -> bool:
    """Return whether a checkpoint folder was written by another number of ranks, or laid out in another way.

    DeepSpeed itself resumes it where it was not; then each rank reads its own files, and they are looked for here.
    """
    first, of_experts = agreed(communicator, lambda: _read_first(folder, communicator.world_size))
    if of_experts:
        return False  # DeepSpeed alone knows their files
    if (_stage_of(first) == 0) != (stage == 0):
        zero, other = ("this run", "the checkpoint") if stage == 0 else ("the checkpoint", "this run")
        raise ConfigurationError(
            f"{folder}: {zero} is of stage 0 of ZeRO and {other} is not: expected stage 0 in both, or in neither. Go on"
            " with the weights alone, as `lockstep-consolidate` writes them."
        )
    if stage == 0:
        return False  # nothing is divided
    return agreed(communicator, lambda: _differs(folder, first, communicator, stage, half))


def resume_redivided(
    engine: Any,
    module: nn.Module,
    folder: Path,
    communicator: Communicator,
    *,
    strict: bool = True,  # whether the names of the weights must be the same
    plain_only: bool = False,  # leaves out what else would be unpickled, as DeepSpeed does
) -> dict[str, Any]:  # what Lightning has put into it
    """Load weights, the state of the optimizer and the counters into an engine, whoever has written them.

    Every rank reads of all files what it needs, one parameter at a time.
    """

    def read() -> tuple[Checkpoint, OptimizerState, _Weights]:
        checkpoint = read_checkpoint(folder)
        state = read_optimizer_state(checkpoint)
        check_same_training(engine, state, folder)
        weights = _Weights(checkpoint)
        try:
            check_names(module, weights, strict)
        except RuntimeError as error:
            raise ConfigurationError(f"{folder}: is of another model. {error}") from error
        return checkpoint, state, weights

    checkpoint, state, weights = agreed(communicator, read)
    load_by_module(module, weights, divided=divides_parameters(engine))
    redivide(engine, state, communicator.rank)
    first = checkpoint.model_states[0]
    set_counters(
        engine,
        steps=first["global_steps"],
        skipped=first["skipped_steps"],
        samples=first.get("global_samples", first["global_steps"] * train_batch_size(engine)),
        ranks=first["dp_world_size"],
    )
    if communicator.is_main:
        say(
            f"lightning-lockstep: {folder} was written by {first['dp_world_size']} ranks; weights and the state of the"
            f" optimizer are redivided among {communicator.world_size}."
        )
    return _entries_of_lightning(folder, first, plain_only)


class _Weights(Mapping[str, Any]):
    """The whole weights of a checkpoint by their names, each put together when it is asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        values, aliases = find_values(checkpoint, "float32")
        module = checkpoint.model_states[0]["module"]
        self._sources: dict[str, Values] = {
            name: values[aliases.get(name, name)] for name in module if aliases.get(name, name) in values
        }
        self._others = {
            name: value for name, value in module.items() if not isinstance(value, Tensor) and is_plain(value)
        }

    def __getitem__(self, name: str) -> Any:
        return self._sources[name].copy_to(in_memory) if name in self._sources else self._others[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._sources
        yield from self._others

    def __len__(self) -> int:
        return len(self._sources) + len(self._others)


def _read_first(folder: Path, world_size: int) -> tuple[dict[str, Any], bool]:
    """Return the states of one file, and whether the checkpoint is of a model with experts."""
    found, files = files_of(folder)
    first, of_experts = read_first(folder), has_experts(files)
    if not of_experts:
        check_kind(found, files)
    elif first.get("dp_world_size") != world_size:
        raise ConfigurationError(
            f"{folder}: is of a model with experts of DeepSpeed, written by {first.get('dp_world_size')} ranks, and"
            f" this run has {world_size}: expected the same number, as only DeepSpeed itself reads these files."
        )
    return first, of_experts


def _stage_of(model_states: Mapping[str, Any]) -> int:
    """Return the stage that a checkpoint was written in; 1 stands for those above 0 where it is not said."""
    config = model_states.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    return stage if is_whole(stage) else int(model_states.get("param_shapes") is not None)


def _differs(
    folder: Path, first: Mapping[str, Any], communicator: Communicator, stage: int, half: str | None
) -> bool:
    found, files = files_of(folder)
    models, optimizers = expected_names(found, files, first)
    prefix = "bf16_" if half == "bf16" else ""
    same_layout = (first.get("frozen_param_fragments") is not None or len(models) > 1) == (stage == 3)
    same_names = not optimizers or optimizers[0].startswith("bf16_") == bool(prefix)
    if first["dp_world_size"] != communicator.world_size or not same_layout or not same_names:
        return True
    rank = communicator.rank
    check_complete(found, files, [models[rank if len(models) > 1 else 0]], optimizers[rank : rank + 1])
    return False


def _entries_of_lightning(folder: Path, first: dict[str, Any], plain_only: bool) -> dict[str, Any]:
    entries = {key: value for key, value in first.items() if key not in OWN_KEYS}
    if not plain_only and not is_plain(entries):
        found, files = files_of(folder)
        name = expected_names(found, files, first)[0][0]
        whole = torch.load(files[name], map_location="cpu", weights_only=False, mmap=True)
        return {key: whole[key] for key in entries}
    kept, dropped = plain_entries(entries)
    if dropped:
        warnings.warn(
            f"{folder}: left out what is not plain data: {', '.join(dropped)}.", RuntimeWarning, stacklevel=2
        )
    return kept
