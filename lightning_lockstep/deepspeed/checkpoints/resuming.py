"""A checkpoint folder of DeepSpeed loaded, and a fit resumed from it."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_lockstep._lightning import LightningDataModule, LightningModule
from lightning_lockstep._settings import is_whole
from lightning_lockstep._text import say
from lightning_lockstep.deepspeed.checkpoints.consolidation import (
    NAMES,
    OWN_KEYS,
    consolidated,
    values_of_parameters,
)
from lightning_lockstep.deepspeed.checkpoints.files import (
    Checkpoint,
    find_folder,
    read_checkpoint,
    read_file,
)
from lightning_lockstep.deepspeed.checkpoints.redivision import SavedOptimizer
from lightning_lockstep.deepspeed.engine import agreed
from lightning_lockstep.deepspeed.engine_adapters import adapter_of
from lightning_lockstep.distributed import Communicator
from lightning_lockstep.distributed.plain_data import is_plain, plain_entries
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.steps.patching import replaced

# -- Hyperparameters that hold what the engine trains, which has hung process groups and functions on it --


def without_trained_parts(checkpoint: dict[str, Any], module: LightningModule) -> dict[str, Any]:
    """Return a checkpoint without the hyperparameters that hold a part of ``module``, which cannot be pickled."""
    parts = {id(part) for part in (*module.modules(), *module.parameters())}
    kept = dict(checkpoint)
    for key in (module.CHECKPOINT_HYPER_PARAMS_KEY, LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY):
        if values := checkpoint.get(key):
            kept[key] = {name: value for name, value in values.items() if not _holds(value, parts)}
    return kept


def _holds(value: object, parts: Collection[int]) -> bool:
    return any(id(leaf) in parts for leaf in pytree.tree_leaves(value))


#: How the name of a plain checkpoint ends that was made of a folder.
CONSOLIDATED = ".consolidated.ckpt"


def consolidated_name(folder: Path) -> Path:
    """Return the file next to a checkpoint folder that its weights go to."""
    return folder.with_name(folder.name.removesuffix(".ckpt") + CONSOLIDATED)


# -- Under which names a module saves its parameters: state_dict() may give others than named_parameters() --


def names_of_parameters(module: nn.Module, state: Mapping[str, Any]) -> dict[str, str]:
    """Return whose values a module's state has: for each name in it that is a parameter's, the parameter's own."""
    known = {_place(parameter): name for name, parameter in reversed(list(module.named_parameters()))}
    places = {name: _place(value) for name, value in state.items() if isinstance(value, Tensor)}
    return {name: known[place] for name, place in places.items() if place in known}


def _place(tensor: Tensor) -> tuple[Any, ...]:
    # Parameters of stage 1 and 2 are parts of one vector; those of stage 3 are empty, each in a storage of its own.
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


@contextmanager
def saving_as(
    module: nn.Module, checkpoint: Mapping[str, Any], *, exclude_frozen: bool
) -> Iterator[dict[str, Any]]:
    """Let DeepSpeed save the weights that a checkpoint has, as ``on_save_checkpoint`` left them, in the body."""
    # Gives what else DeepSpeed is to save. Until it asks for the weights, it divides those that are whole for now.
    weights = checkpoint["state_dict"]
    names, parameters = names_of_parameters(module, weights), dict(module.named_parameters())

    def state_dict(*args: Any, **kwargs: Any) -> OrderedDict[str, Any]:
        found = {name: parameters[names[name]] if name in names else value for name, value in weights.items()}
        left_out = {name for name in names if exclude_frozen and not found[name].requires_grad}
        return _state_like(
            weights,
            {
                name: value.detach() if name in names else value
                for name, value in found.items()
                if name not in left_out
            },
        )

    with replaced(module, state_dict=state_dict):
        # The engine has its optimizer, so what Lightning knows of that is not saved.
        others = {
            key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")
        }
        yield {**others, NAMES: names}


def _state_like(state: Mapping[str, Any], values: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return values as a state that has the versions of modules of another one."""
    made = OrderedDict(values)
    made._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]  # of the modules
    return made


# -- Weights on their way into a model, which may be divided among the ranks --


def whole_checkpoint(
    folder: str | Path,
    module: nn.Module,
    communicator: Communicator,
    *,
    divided: bool,  # stage 3: rank 0's values go to all, the others get shapes alone
) -> dict[str, Any]:
    """Return a checkpoint folder with whole weights, for any number of ranks; on all ranks together."""
    reads = communicator.is_main or not divided
    found = agreed(communicator, lambda: consolidated(folder) if reads else {})
    if not divided:
        return found
    weights = found.pop("state_dict", {})
    parameters = names_of_parameters(module, module.state_dict())
    sent = _state_like(
        weights,
        {name: value.to("meta") if name in parameters else value for name, value in weights.items()},
    )
    others, sent = communicator.broadcast((found, sent))
    return {
        **others,
        "state_dict": weights
        or _state_like(sent, {name: _without_values(value) for name, value in sent.items()}),
    }


def _without_values(value: Any) -> Any:
    """Return a tensor that takes no memory for one that has only a shape."""
    if not isinstance(value, Tensor) or not value.is_meta:
        return value
    return torch.zeros((), dtype=value.dtype).expand(value.shape)


def load_plain_weights(
    engine: Any,
    module: nn.Module,
    state: Mapping[str, Any],  # whole tensors; in stage 3 those of rank 0 count
    *,
    strict: bool = True,
) -> None:
    """Load whole weights into an engine's module, and into the float32 copies of its optimizer."""
    with _loading(module, gathers=engine.zero_optimization_partition_weights()):
        module.load_state_dict(state, strict=strict)
    adapter_of(engine).refresh_copies()


@contextmanager
def _loading(module: nn.Module, *, gathers: bool) -> Iterator[None]:
    """Let ``load_state_dict`` gather divided parameters in the body, those of one module at a time; ranks: all."""
    with ExitStack() as stack:
        for one in module.modules() if gathers else ():
            load = partial(_load_gathered, list(one.parameters(recurse=False)), one._load_from_state_dict)
            stack.enter_context(replaced(one, _load_from_state_dict=load))
        yield


def _load_gathered(parameters: Sequence[nn.Parameter], load: Callable[..., None], *args: Any) -> None:
    with _gathered(parameters):
        load(*args)


def _gathered(parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
    """Let the body write to divided parameters, on all ranks together; what rank 0 writes counts."""
    import deepspeed

    made: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0)
    return made


@contextmanager
def _emptied(module: nn.Module) -> Iterator[None]:
    """Let all parameters be empty, as a checkpoint of stage 3 has them, in the body."""
    whole = [(parameter, parameter.data) for parameter in module.parameters()]
    try:
        for parameter, values in whole:
            parameter.data = values.new_empty(0)
        yield
    finally:
        for parameter, values in whole:
            parameter.data = values


# -- A fit that resumes from a checkpoint folder, on as many ranks as have written it or on others --

#: Loads the weights of a checkpoint, by their names, and then whatever else the engine has.
Load = Callable[[Mapping[str, Any], bool], None]


def open_folder(
    engine: Any,
    module: nn.Module,
    folder: Path,
    communicator: Communicator,
    *,
    stage: int,  # of this run
    half: str | None,  # bf16 or fp16, if this run trains in it
    plain_only: bool = False,  # on another number of ranks, leaves out what would be unpickled
) -> tuple[dict[str, Any], Load]:
    """Return the checkpoint of a folder, with what loads its weights once hooks have seen them; ranks: all."""
    # In stage 3 the weights in it are empty.
    if not writers_differ(folder, communicator, stage=stage, half=half):
        first = _unpickled(folder)
        load: Load = partial(_resume_by_deepspeed, engine, module, folder, frozenset(first["module"]))
        entries = {key: value for key, value in first.items() if key not in OWN_KEYS}
    else:
        first, load = _redivided(engine, module, folder, communicator)
        entries = _entries_of_lightning(folder, first, plain_only)
    return {**entries, "state_dict": first["module"]}, load


def _unpickled(folder: Path) -> dict[str, Any]:
    path = find_folder(folder).model_file()
    return dict(torch.load(path, map_location="cpu", weights_only=False, mmap=True))


def writers_differ(folder: Path, communicator: Communicator, *, stage: int, half: str | None) -> bool:
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
                    f" {communicator.world_size}: expected the same number, because only DeepSpeed reads these files."
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
        same_layout = models[0].startswith("zero_") == (stage == 3)
        same_names = not optimizers or optimizers[0].startswith("bf16_") == (half == "bf16")
        if ranks != communicator.world_size or not same_layout or not same_names:
            return True
        rank = communicator.rank
        found.check_complete([models[rank if len(models) > 1 else 0]], optimizers[rank : rank + 1])
        return False

    return agreed(communicator, differ)


def _resume_by_deepspeed(
    engine: Any,
    module: nn.Module,
    folder: Path,
    known: Collection[str],  # names of the weights in the file
    weights: Mapping[str, Any],
    strict: bool,
) -> None:
    """Let DeepSpeed load a folder that as many ranks have written in the same way; ranks: all, together."""

    def load(src: Mapping[str, Any], dst: nn.Module) -> None:
        experts = {name: value for name, value in src.items() if name not in known}
        _load_named(folder, module, _state_like(weights, {**experts, **weights}), strict)

    path = find_folder(folder).path
    engine.load_checkpoint(
        str(path.parent), tag=path.name, load_lr_scheduler_states=False, custom_load_fn=load
    )


def _load_named(folder: Path, module: nn.Module, weights: Mapping[str, Any], strict: bool) -> None:
    try:
        module.load_state_dict(weights, strict=strict)
    except RuntimeError as error:
        raise ConfigurationError(
            f"{folder}: is of another model. {error}\nIf the checkpoint need not have all weights of the model"
            " (exclude_frozen_parameters, or adapters alone), set `strict_loading = False` in the LightningModule."
        ) from error


def _redivided(
    engine: Any, module: nn.Module, folder: Path, communicator: Communicator
) -> tuple[dict[str, Any], Load]:
    """Return what the first file has, and what loads a folder that other ranks have written; ranks: all, together."""
    # Every rank reads of all files what it needs, one parameter at a time.
    adapter = adapter_of(engine)

    def read() -> tuple[Checkpoint, SavedOptimizer]:
        checkpoint = read_checkpoint(folder)
        saved = SavedOptimizer(checkpoint)
        saved.check(adapter)
        return checkpoint, saved

    checkpoint, saved = agreed(communicator, read)
    first = checkpoint.model_states[0]

    def load(weights: Mapping[str, Any], strict: bool) -> None:
        divides = engine.zero_optimization_partition_weights()
        with _emptied(module) if checkpoint.is_divided else _loading(module, gathers=divides):
            _load_named(folder, module, weights, strict)
        values = values_of_parameters(checkpoint)
        for name, parameter in module.named_parameters():
            if name in values:
                with _gathered([parameter]) if divides else nullcontext():
                    parameter.data.copy_(values[name].whole())
        saved.write_to(adapter, communicator.rank)
        adapter.set_counters(
            steps=first["global_steps"],
            skipped=first["skipped_steps"],
            samples=first.get("global_samples"),
            ranks=first["dp_world_size"],
        )
        if communicator.is_main:
            say(
                f"lightning-lockstep: {folder} was written by {first['dp_world_size']} ranks in stage"
                f" {_stage_of(first)}; weights and the state of the optimizer are redivided among"
                f" {communicator.world_size}."
            )

    plain = {name: value for name, value in first["module"].items() if is_plain(value)}
    return {**first, "module": _state_like(first["module"], plain)}, load


def _stage_of(model_states: Mapping[str, Any]) -> int:
    """Return the stage that a checkpoint was written in; 1 stands for those above 0 if it is not known."""
    config = model_states.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    return stage if is_whole(stage) else int(model_states.get("param_shapes") is not None)


def _entries_of_lightning(folder: Path, first: dict[str, Any], plain_only: bool) -> dict[str, Any]:
    entries = {key: value for key, value in first.items() if key not in OWN_KEYS}
    if not plain_only and not is_plain(entries):
        whole = _unpickled(folder)
        return {key: whole[key] for key in entries}
    kept, dropped = plain_entries(entries)
    if dropped:
        warnings.warn(
            f"{folder}: left out what is not plain data: {', '.join(dropped)}.", RuntimeWarning, stacklevel=2
        )
    return kept
