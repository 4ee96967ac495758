"""A checkpoint folder of DeepSpeed loaded, and a fit resumed from it."""

from __future__ import annotations

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
from lightning_lockstep._text import listed, say
from lightning_lockstep.deepspeed.checkpoints.consolidation import (
    LAYOUT,
    NAMES,
    OWN_KEYS,
    consolidated,
    place_of,
    values_of_parameters,
)
from lightning_lockstep.deepspeed.checkpoints.file_names import CheckpointFolder
from lightning_lockstep.deepspeed.checkpoints.files import find_folder, read_checkpoint, read_file
from lightning_lockstep.deepspeed.checkpoints.redivision import SavedOptimizer, check_options
from lightning_lockstep.deepspeed.config_parsing import section
from lightning_lockstep.deepspeed.engine_adapters import ORDER, EngineAdapter, adapter_of
from lightning_lockstep.distributed import Communicator
from lightning_lockstep.distributed.plain_data import is_plain, plain_entries
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.steps.patching import assigned, replaced

# -- Hyperparameters that hold what the engine trains, which has hung process groups and functions on it --


def without_trained_parts(checkpoint: dict[str, Any], module: LightningModule) -> dict[str, Any]:
    """Return a checkpoint without the hyperparameters that hold a part of ``module``, which cannot be pickled."""
    parts = {id(part) for part in (*module.modules(), *module.parameters())}
    kept = dict(checkpoint)
    for key in (module.CHECKPOINT_HYPER_PARAMS_KEY, LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY):
        if values := checkpoint.get(key):
            leaves = {name: map(id, pytree.tree_leaves(value)) for name, value in values.items()}
            kept[key] = {name: values[name] for name in leaves if parts.isdisjoint(leaves[name])}
    return kept


# -- Under which names a module saves its parameters: state_dict() may give others than named_parameters() --


def names_of_parameters(module: nn.Module, state: Mapping[str, Any]) -> dict[str, str]:
    """Return whose values a module's state has: for each name in it that is a parameter's, the parameter's own."""
    known = {place_of(parameter): name for name, parameter in reversed(list(module.named_parameters()))}
    places = {name: place_of(value) for name, value in state.items() if isinstance(value, Tensor)}
    return {name: known[place] for name, place in places.items() if place in known}


@contextmanager
def saving_as(engine: Any, checkpoint: Mapping[str, Any], *, exclude_frozen: bool) -> Iterator[dict[str, Any]]:
    """Let DeepSpeed save the weights that a checkpoint has, as ``on_save_checkpoint`` left them, in the body."""
    # Gives what else DeepSpeed is to save. Until it asks for the weights, it divides those that are whole for now.
    weights, module = checkpoint["state_dict"], engine.module
    names, parameters = names_of_parameters(module, weights), dict(module.named_parameters())

    def state_dict(*args: Any, **kwargs: Any) -> OrderedDict[str, Any]:
        found = {}
        for name, value in weights.items():
            parameter = parameters[names[name]] if name in names else None
            if parameter is None:
                found[name] = value
            elif parameter.requires_grad or not exclude_frozen:
                found[name] = parameter.detach()
        return _state_like(weights, found)

    with replaced(module, state_dict=state_dict):
        # Lightning's strategy leaves out the weights and the state of the optimizer, which the engine saves itself.
        yield {**checkpoint, NAMES: names, LAYOUT: adapter_of(engine).layout()}


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
    is_other = divided and not communicator.is_main
    without = names_of_parameters(module, module.state_dict()) if is_other else {}
    return communicator.agreed(lambda: consolidated(folder, without=without))


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
    with ExitStack() as stack:
        for parameter in module.parameters():
            stack.enter_context(assigned(parameter, data=parameter.data.new_empty(0)))
        yield


# -- A fit that resumes from a checkpoint folder, on as many ranks as have written it or on others --

#: Loads the weights of a checkpoint, by their names, and then whatever else the engine has.
Load = Callable[[Mapping[str, Any], bool], None]


def open_folder(
    engine: Any,
    module: nn.Module,
    folder: Path,
    communicator: Communicator,
    *,
    plain_only: bool,  # leaves out what would be unpickled
) -> tuple[dict[str, Any], Load]:
    """Return the checkpoint of a folder, with what loads its weights once hooks have seen them; ranks: all."""
    # In stage 3 the weights in it are empty. Every rank reads of all files what it needs, one parameter at a time.
    adapter = adapter_of(engine)

    def opened() -> tuple[dict[str, Any], Load]:
        found = find_folder(folder)
        first = read_file(found.model_file())
        entries = _entries_of_lightning(found, first, plain_only)
        weights = {name: value for name, value in first["module"].items() if is_plain(value)}
        checkpoint = {**entries, "state_dict": _state_like(first["module"], weights)}
        saved_zero = section(first, "ds_config", "zero_optimization")
        why = (
            (found.has_experts and "the model has experts of DeepSpeed")
            or (0 in (stage_of(first), engine.zero_optimization_stage()) and "stage 0 of ZeRO saves no names")
            or (engine.zero_nvme_offload_optimizer() and "this run keeps the state of the optimizer on NVMe")
            or (engine.use_node_local_storage() and "checkpoint.use_node_local_storage is set")
            or (saved_zero.get("elastic_checkpoint") is True and "it is an elastic_checkpoint of DeepSpeed")
        )
        if not why:
            saved = SavedOptimizer(read_checkpoint(folder))
            why = saved.odd
        if not why:
            saved.check(adapter)
            return checkpoint, partial(_load_by_name, adapter, module, saved, communicator)
        _check_layout(adapter, found, first, why, communicator.rank)
        return checkpoint, partial(_load_by_order, adapter, module, found, frozenset(first["module"]))

    return communicator.agreed(opened)


def _entries_of_lightning(found: CheckpointFolder, first: dict[str, Any], plain_only: bool) -> dict[str, Any]:
    """Return what Lightning has saved; of objects, which are not made, hyperparameters alone may be missing."""
    entries = {key: value for key, value in first.items() if key not in OWN_KEYS}
    if not plain_only and not is_plain(entries):
        whole = torch.load(found.model_file(), map_location="cpu", weights_only=False, mmap=True)
        return {key: whole[key] for key in entries}
    kept, dropped = plain_entries(entries)
    if needed := [name for name in dropped if "hyper_parameters" not in name.partition(".")[0]]:
        raise ConfigurationError(
            f"{found.path}: holds objects of classes: {', '.join(needed)}. Expected plain data, because anything else"
            " could run code when it is read. If you trust the folder, give weights_only=False to fit."
        )
    return kept


def _load_by_name(
    adapter: Any,
    module: Any,
    saved: SavedOptimizer,
    communicator: Communicator,
    weights: Mapping[str, Any],
    strict: bool,
) -> None:
    """Load weights and the state of the optimizer, each value by the name of its parameter; ranks: all, together."""
    checkpoint, divides = saved.checkpoint, adapter.engine.zero_optimization_partition_weights()
    first = checkpoint.model_states[0]
    with _emptied(module) if checkpoint.is_divided else _loading(module, gathers=divides):
        _load_named(checkpoint.folder, module, weights, strict)
    values = values_of_parameters(checkpoint)
    if checkpoint.is_divided and strict:  # in other stages load_state_dict says so
        lacking = [name for name, _ in module.named_parameters() if name not in values]
        if lacking:
            raise ConfigurationError(
                f"{checkpoint.folder}: holds no values of {', '.join(lacking)}, because in stage 3 DeepSpeed saves only"
                " what the optimizer trains and what is frozen. If these need not be loaded, set"
                " `strict_loading = False` in the LightningModule."
            )
    for name, parameter in module.named_parameters():
        if name in values:
            with _gathered([parameter]) if divides else nullcontext():
                if communicator.is_main or not divides:
                    parameter.data.copy_(values[name].whole())
    saved.write_to(adapter, communicator.rank)
    adapter.set_counters(first)
    ranks, stage = first["dp_world_size"], stage_of(first)
    current = (communicator.world_size, adapter.engine.zero_optimization_stage())
    if communicator.is_main and (ranks, stage) != current:
        say(
            f"lightning-lockstep: {checkpoint.folder} was written by {ranks} ranks in stage {stage}; weights and the"
            f" state of the optimizer are redivided among {communicator.world_size}."
        )


def _load_named(folder: Path, module: nn.Module, weights: Mapping[str, Any], strict: bool) -> None:
    try:
        module.load_state_dict(weights, strict=strict)
    except RuntimeError as error:
        raise ConfigurationError(
            f"{folder}: is of another model. {error}\nIf the checkpoint need not have all weights of the model"
            " (exclude_frozen_parameters, or adapters alone), set `strict_loading = False` in the LightningModule."
        ) from error


def stage_of(model_states: Mapping[str, Any]) -> int:
    """Return the stage in which model states were written; if it is not known, 1 stands for those above 0."""
    stage = section(model_states, "ds_config", "zero_optimization").get("stage")
    return stage if is_whole(stage) else int(model_states.get("param_shapes") is not None)


# -- What DeepSpeed itself loads: it copies vectors by the order of their values, and asks for no names --


def _check_layout(
    adapter: EngineAdapter, found: CheckpointFolder, first: Mapping[str, Any], why: str, rank: int
) -> None:
    """Refuse a checkpoint whose values do not lie as an engine's, or of which this rank's files are not whole."""
    layout = adapter.layout()
    saved = first.get(LAYOUT, {ORDER: "unknown"})
    differing = [
        key if key == ORDER else f"{key} ({saved[key]} in the checkpoint, {value} in this run)"
        for key, value in layout.items()
        if saved.get(key, value) != value
    ]
    if differing:
        instead = " Or go on with the weights, as `lockstep-consolidate` writes them."
        raise ConfigurationError(
            f"{found.path}: {why}, so that DeepSpeed goes on by the order of the values alone: expected the same"
            f" {listed(differing, len(differing))}.{'' if found.has_experts else instead}"
        )
    state: Any = first["optimizer"] if layout["stage"] == 0 else None
    if not found.has_experts:
        models, optimizers = found.expected_names(first)
        own = [models[rank if len(models) > 1 else 0], *optimizers[rank : rank + 1]]
        found.check_complete(own, [])
        files = [read_file(found.files[name]) for name in own]
        state = state or files[-1].get("optimizer_state_dict")
    if isinstance(state, Mapping):
        inner = state.get("optimizer_state_dict", state.get("base_optimizer_state", state))
        if isinstance(inner, Mapping):  # an elastic checkpoint of DeepSpeed has a list of them
            check_options(found.path, inner["param_groups"], adapter.torch_optimizer)


def _load_by_order(
    adapter: EngineAdapter,
    module: nn.Module,
    found: CheckpointFolder,
    known: Collection[str],  # names of the weights in the file
    weights: Mapping[str, Any],
    strict: bool,
) -> None:
    """Let DeepSpeed load a folder that as many ranks have written in the same way; ranks: all, together."""

    def load(src: Mapping[str, Any], dst: nn.Module) -> None:
        experts = {name: value for name, value in src.items() if name not in known}
        _load_named(found.path, module, _state_like(weights, {**experts, **weights}), strict)

    with adapter.own_settings():
        adapter.engine.load_checkpoint(
            str(found.path.parent), tag=found.path.name, load_lr_scheduler_states=False, custom_load_fn=load
        )
