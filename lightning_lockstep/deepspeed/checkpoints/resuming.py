"""A checkpoint folder of DeepSpeed loaded, and a fit resumed from it."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lockstep._doors.deepspeed_engines import adapter_of
from lightning_lockstep._doors.lightning import LightningDataModule, LightningModule
from lightning_lockstep._doors.torch_internals import load_own_values
from lightning_lockstep._settings import is_whole
from lightning_lockstep._text import say
from lightning_lockstep.deepspeed.checkpoints.consolidation import OWN_KEYS, Values, consolidated, find_values
from lightning_lockstep.deepspeed.checkpoints.files import (
    find_folder,
    in_memory,
    is_plain,
    plain_entries,
    read_checkpoint,
    read_file,
)
from lightning_lockstep.deepspeed.checkpoints.redivision import SavedOptimizer
from lightning_lockstep.deepspeed.engine import agreed
from lightning_lockstep.distributed import Communicator
from lightning_lockstep.errors import ConfigurationError

# -- Hyperparameters that hold what the engine trains, which has hung process groups and functions on it --


def without_trained_parts(
    checkpoint: dict[str, Any], module: LightningModule
) -> tuple[dict[str, Any], list[str]]:
    """Return a checkpoint without the hyperparameters that hold a part of ``module``, and their names."""
    parts = {id(part) for part in (*module.modules(), *module.parameters())}
    kept, names = dict(checkpoint), []
    for key in (module.CHECKPOINT_HYPER_PARAMS_KEY, LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY):
        values = checkpoint.get(key) or {}
        held = [name for name, value in values.items() if _Finder(parts).finds(value)]
        if held:
            kept[key] = {name: value for name, value in values.items() if name not in held}
            names += held
    return kept, names


class _Finder(pickle.Pickler):
    """Goes through an object as a pickle of it would, writes nothing and copies no tensor."""

    def __init__(self, sought: Collection[int]) -> None:
        super().__init__(self)
        self._sought, self._found = sought, False

    def write(self, data: Any) -> None:
        """Drop what would be written."""

    def finds(self, value: object) -> bool:
        with suppress(Exception):  # where it cannot be pickled for another reason, torch.save says so
            self.dump(value)
        return self._found

    def persistent_id(self, value: Any) -> Any:
        self._found = self._found or id(value) in self._sought
        return "" if self._found or isinstance(value, torch.UntypedStorage | torch.TypedStorage) else None


#: How the name of a plain checkpoint ends that was made of a folder.
CONSOLIDATED = ".consolidated.ckpt"


def consolidated_name(folder: Path) -> Path:
    """Return the file next to a checkpoint folder that its weights go to."""
    return folder.with_name(folder.name.removesuffix(".ckpt") + CONSOLIDATED)


# -- Whole weights on their way into a model, which may be divided among the ranks --


def whole_checkpoint(
    folder: str | Path,
    module: nn.Module,
    communicator: Communicator,
    *,
    divided: bool,  # stage 3: rank 0's values go to all, the others get the names alone
) -> dict[str, Any]:
    """Return a checkpoint folder with whole weights, for any number of ranks; on all ranks together."""
    reads = communicator.is_main or not divided
    found = agreed(communicator, lambda: consolidated(folder) if reads else {})
    if not divided:
        return found
    weights = found.pop("state_dict", {})
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    buffers = {name: None if name in parameters else value for name, value in weights.items()}
    others, shared = communicator.broadcast((found, buffers))
    return {**others, "state_dict": weights or shared}


def load_plain_weights(
    engine: Any,
    module: nn.Module,
    state: Mapping[str, Tensor],  # whole tensors; in stage 3 those of rank 0 count
    *,
    strict: bool = True,
) -> None:
    """Load whole weights into an engine's module, and into the float32 copies of its optimizer."""
    adapter = adapter_of(engine)
    if adapter.divides_parameters():
        _check_names(module, state, strict)
        _load_by_module(module, state, divided=True)
    else:
        module.load_state_dict(state, strict=strict)
    adapter.refresh_copies()


def _load_by_module(
    module: nn.Module,
    state: Mapping[
        str, Any
    ],  # None: this rank has no values of it; Values: read from files when it is their turn
    *,
    divided: bool,  # those of rank 0 go to all ranks, which call this together
) -> None:
    """Load whole weights one module at a time."""
    import deepspeed

    prefixes = {f"{name}." if name else "": one for name, one in module.named_modules(remove_duplicate=False)}
    names: dict[str, list[str]] = {prefix: [] for prefix in prefixes}
    for name in state:
        names[_prefix_of(name, prefixes)].append(name)
    for prefix, one in prefixes.items():
        parameters = list(one.parameters(recurse=False))
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0, enabled=divided):
            _load_one(one, prefix, {name: state[name] for name in names[prefix] if state[name] is not None})


def _check_names(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Raise if a module and some weights have different names."""
    names = set(module.state_dict())
    missing, unexpected = sorted(names - set(state)), sorted(set(state) - names)
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(module).__name__}: missing {missing}, unexpected {unexpected}"
        )


def _prefix_of(name: str, prefixes: Collection[str]) -> str:
    """Return the prefix of the innermost module that a name can belong to."""
    while name not in prefixes:
        name = name.rstrip(".").rpartition(".")[0]
        name = f"{name}." if name else ""
    return name


def _load_one(module: nn.Module, prefix: str, state: dict[str, Any]) -> None:
    errors: list[str] = []
    values = {
        name: value.copy_to(in_memory) if isinstance(value, Values) else value
        for name, value in state.items()
    }
    load_own_values(module, prefix, values, errors)
    if errors:
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(module).__name__}:\n\t" + "\n\t".join(errors)
        )


# -- A fit that resumes from a checkpoint folder, on as many ranks as have written it or on others --


def writers_differ(
    folder: Path,
    communicator: Communicator,
    *,
    stage: int,  # of this run
    half: str | None,  # bf16 or fp16 where this run trains in it
) -> bool:
    """Return whether a checkpoint folder was written by another number of ranks, or laid out in another way."""
    # If not, DeepSpeed itself resumes it; each rank then reads its own files, which are looked for here.

    def differ() -> bool:
        found = find_folder(folder)
        first = read_file(found.model_file())
        ranks = first.get("dp_world_size")
        if found.has_experts:
            if ranks != communicator.world_size:
                raise ConfigurationError(
                    f"{folder}: is of a model with experts of DeepSpeed, written by {ranks} ranks, and this run has"
                    f" {communicator.world_size}: expected the same number, as only DeepSpeed itself reads these files."
                )
            return False
        found.check_kind()
        if (_stage_of(first) == 0) != (stage == 0):
            zero, other = ("this run", "the checkpoint") if stage == 0 else ("the checkpoint", "this run")
            raise ConfigurationError(
                f"{folder}: {zero} is of stage 0 of ZeRO and {other} is not: expected stage 0 in both, or in neither."
                " Go on with the weights alone, as `lockstep-consolidate` writes them."
            )
        if stage == 0:
            return False  # nothing is divided
        models, optimizers = found.expected_names(first)
        same_layout = (first.get("frozen_param_fragments") is not None or len(models) > 1) == (stage == 3)
        same_names = not optimizers or optimizers[0].startswith("bf16_") == (half == "bf16")
        if ranks != communicator.world_size or not same_layout or not same_names:
            return True
        rank = communicator.rank
        found.check_complete([models[rank if len(models) > 1 else 0]], optimizers[rank : rank + 1])
        return False

    return agreed(communicator, differ)


def resume_redivided(
    engine: Any,
    module: nn.Module,
    folder: Path,
    communicator: Communicator,
    *,
    strict: bool = True,  # whether the names of the weights must be the same
    plain_only: bool = False,  # leaves out what else would be unpickled, as DeepSpeed does
) -> dict[str, Any]:  # what Lightning has put into it
    """Load weights, the state of the optimizer and the counters into an engine, whoever has written them."""
    # Every rank reads of all files what it needs, one parameter at a time.
    adapter = adapter_of(engine)

    def read() -> tuple[dict[str, Any], SavedOptimizer, dict[str, Any]]:
        checkpoint = read_checkpoint(folder)
        saved = SavedOptimizer(checkpoint)
        saved.check(adapter)
        first = checkpoint.model_states[0]
        weights: dict[str, Any] = {
            name: value
            for name, value in first["module"].items()
            if not isinstance(value, Tensor) and is_plain(value)  # extra state of a module
        }
        weights |= find_values(checkpoint, "float32")
        try:
            _check_names(module, weights, strict)
        except RuntimeError as error:
            raise ConfigurationError(f"{folder}: is of another model. {error}") from error
        return first, saved, weights

    first, saved, weights = agreed(communicator, read)
    _load_by_module(module, weights, divided=adapter.divides_parameters())
    saved.write_to(adapter, communicator.rank)
    adapter.set_counters(
        steps=first["global_steps"],
        skipped=first["skipped_steps"],
        samples=first.get("global_samples"),
        ranks=first["dp_world_size"],
    )
    if communicator.is_main:
        say(
            f"lightning-lockstep: {folder} was written by {first['dp_world_size']} ranks; weights and the state of the"
            f" optimizer are redivided among {communicator.world_size}."
        )
    return _entries_of_lightning(folder, first, plain_only)


def _stage_of(model_states: Mapping[str, Any]) -> int:
    """Return the stage that a checkpoint was written in; 1 stands for those above 0 where it is not said."""
    config = model_states.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    return stage if is_whole(stage) else int(model_states.get("param_shapes") is not None)


def _entries_of_lightning(folder: Path, first: dict[str, Any], plain_only: bool) -> dict[str, Any]:
    entries = {key: value for key, value in first.items() if key not in OWN_KEYS}
    if not plain_only and not is_plain(entries):
        whole = torch.load(
            find_folder(folder).model_file(), map_location="cpu", weights_only=False, mmap=True
        )
        return {key: whole[key] for key in entries}
    kept, dropped = plain_entries(entries)
    if dropped:
        warnings.warn(
            f"{folder}: left out what is not plain data: {', '.join(dropped)}.", RuntimeWarning, stacklevel=2
        )
    return kept
