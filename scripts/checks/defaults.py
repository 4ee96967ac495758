"""Names and defaults of settings stand in a signature, in a settings class and in a config file: the three agree."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from repository import PACKAGE, at, module_name, trees

OBJECT = "an object, which no plain value of a file stands for"
# Settings that a file leaves out, each with the reason.
LEFT_OUT: dict[tuple[str, str], str] = {
    ("LockstepDDPStrategy", "cluster_environment"): OBJECT,
    ("LockstepDDPStrategy", "ddp_comm_state"): OBJECT,
    ("LockstepMPIStrategy", "cluster_environment"): OBJECT,
    ("LockstepMPIStrategy", "ddp_comm_state"): OBJECT,
    ("LockstepMPIStrategy", "start_method"): "mpirun starts the ranks",
    ("LockstepMPIStrategy", "least_ranks"): "mpirun ends all ranks with one",
    ("LockstepMPIStrategy", "on_lost_rank"): "mpirun ends all ranks with one",
    ("LockstepMPIStrategy", "spares"): "mpirun ends all ranks with one",
    ("LockstepXLASPMDStrategy", "checkpoint_io"): OBJECT,
    ("LockstepXLASPMDStrategy", "precision_plugin"): OBJECT,
    ("LockstepMPIStrategy", "process_group_backend"): "it is called `backend` there",
}
# Values of a file that are no default of the class, each with the reason.
OTHER_VALUE: dict[tuple[str, str], str] = {
    ("ByteGPT", "context"): "that of the data",
    ("EffectiveBatchSize", "global_batch_size"): "has to be given",
    ("StopTogether", "filename"): "`ckpt_path=last` finds this one",
    ("SyncedEarlyStopping", "monitor"): "the objective of the run",
    ("SyncedEarlyStopping", "mode"): "the objective of the run",
    ("SyncedEarlyStopping", "verbose"): "a run on the command line says why it stops",
}
OF_DDP = ("LockstepDDPStrategy", "LockstepMPIStrategy")
STRATEGIES = (*OF_DDP, "LockstepDeepSpeedStrategy", "LockstepFSDPStrategy", "LockstepXLAStrategy")
# Settings class -> the public classes that take its fields as arguments of their own.
TAKEN_BY: dict[str, tuple[str, ...]] = {
    "CheckOptions": (),  # of the doctor's command line
    "DDPSettings": OF_DDP,
    "DeepSpeedSettings": ("LockstepDeepSpeedStrategy",),
    "FSDPSettings": ("LockstepFSDPStrategy",),
    "GuardSettings": STRATEGIES,
    "LifecycleSettings": STRATEGIES,
    "MPIRunSettings": ("LockstepMPIStrategy",),
    "OverflowSettings": ("OverflowDetector",),
    "SupervisorSettings": STRATEGIES,
}
# Fields that one of them does not take, each with the reason.
NOT_TAKEN = {("LockstepXLAStrategy", "start_method"): "one process a device, which this program starts"}
# Arguments of another type than the field: any sequence, made a tuple.
OTHER_TYPE = {("LockstepMPIStrategy", "mpirun_args"), ("LockstepMPIStrategy", "ssh_args")}


def components() -> dict[str, Any]:
    rooms = [importlib.import_module(f"lightning_lockstep.{room}") for room in ("callbacks", "strategies", "demo")]
    return {name: getattr(room, name) for room in rooms for name in sorted(room.__all__)}


def problems() -> Iterator[str]:
    classes = components()
    yield from faults_of_files(classes)
    yield from faults_of_settings(classes)
    for exceptions, should_be_there in (({**LEFT_OUT, **OTHER_VALUE}, True), (NOT_TAKEN, False)):
        for owner, key in exceptions:
            if (key in arguments_of(classes[owner])) is not should_be_there:
                where = at(Path(__file__), f'("{owner}", "{key}")')
                yield f"{where}: {owner} {'has no' if should_be_there else 'takes'} {key}; delete the exception"


def faults_of_files(classes: dict[str, Any]) -> Iterator[str]:
    """A file of conf/ has the names and defaults of the class that it is about."""
    from lightning_lockstep._application.signatures import locate, target_nodes

    unlisted = {*classes}
    for path in sorted((PACKAGE / "conf").rglob("*.yaml")):
        # `debug` only changes what others list.
        for _, node in target_nodes(with_defaults(path)) if path.parent.name != "debug" else ():
            cls = locate(node["_target_"]) if str(node["_target_"]).startswith("lightning_lockstep.") else None
            name = getattr(cls, "__name__", "")
            if classes.get(name) is not cls or cls is None:
                continue
            unlisted.discard(name)
            listed: Any = OmegaConf.to_container(node, resolve=False, throw_on_missing=False)
            defaults, own = arguments_of(cls), arguments_of(cls, of_torch=False)
            for key in sorted({*own} - {*listed} - {key for owner, key in LEFT_OUT if owner == name}):
                yield f"{at(path)}: leaves out {key} of {name}, {key}={defaults[key]!r} there"
            for key, value in listed.items():
                if key == "_target_" or (name, key) in OTHER_VALUE:
                    continue
                if key not in defaults:
                    yield f"{at(path, f'{key}:')}: {name} takes no {key}"
                elif (value, type(value)) != (defaults[key], type(defaults[key])):
                    yield f"{at(path, f'{key}:')}: {key} is {value!r}; expected {defaults[key]!r}, as in {name}"
    for name in sorted(unlisted):
        yield f"{at(PACKAGE / 'conf' / '__init__.py')}: no file of conf/ is about {name}"


def faults_of_settings(classes: dict[str, Any]) -> Iterator[str]:
    """A settings class has the names, defaults and types of the signature that takes its fields."""
    for path, tree in trees().items():
        for node in tree.body:
            if not isinstance(node, ast.ClassDef) or not node.name.endswith(("Settings", "Options")):
                continue
            if node.name not in TAKEN_BY:
                yield f"{at(path, node.lineno)}: say in TAKEN_BY of scripts/checks/defaults.py who takes {node.name}"
            settings: Any = getattr(importlib.import_module(module_name(path)), node.name)
            hints = typing.get_type_hints(settings)
            for name in TAKEN_BY.get(node.name, ()):
                taken, types = arguments_of(classes[name]), types_of(classes[name])
                for field in dataclasses.fields(settings):
                    if (name, field.name) in NOT_TAKEN:
                        continue
                    where = f"{at(path, node.lineno)}: {node.name}.{field.name}"
                    if field.name not in taken or plain(taken[field.name]) != plain(field.default):
                        given = taken.get(field.name, "no such argument")
                        yield f"{where} is {field.default!r}; expected the default of {name}: {given!r}"
                    elif (name, field.name) not in OTHER_TYPE and types[field.name] != hints[field.name]:
                        yield f"{where} is a {hints[field.name]}; expected that of {name}: {types[field.name]}"


def makers_of(cls: type) -> list[type]:
    """The class and those that it hands options on to, if they are public here and have a constructor of their own."""
    makers: list[type] = []
    for base in inspect.getmro(cls):
        if base.__name__ in components() and "__init__" in vars(base):
            makers.append(base)
            parameters = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
            if not any(one.kind is one.VAR_KEYWORD for one in parameters):
                break
    return makers


def handed_on(maker: type) -> dict[str, Any]:
    """Name and type of the settings that a constructor takes among its ``options``."""
    hints = typing.get_type_hints(maker.__init__)  # type: ignore[misc]
    settings = typing.get_type_hints(maker).get("settings")
    if "options" not in hints or settings is None:
        return {}
    options = typing.get_type_hints(*typing.get_args(hints["options"]))
    return {one.name: options[one.name] for one in dataclasses.fields(settings) if one.name in options}


def arguments_of(cls: type, *, of_torch: bool = True) -> dict[str, Any]:
    """Name and default of every argument, also of those that a strategy passes on, to torch's DDP in the end."""
    makers: list[Any] = [cls]
    if cls.__name__ in importlib.import_module("lightning_lockstep.strategies").__all__:
        makers = makers_of(cls)
        makers += [importlib.import_module("torch.nn.parallel").DistributedDataParallel] if of_torch else []
    found: dict[str, Any] = {}
    for maker in makers:
        for parameter in list(inspect.signature(maker.__init__).parameters.values())[1:]:
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                found.setdefault(parameter.name, plain(parameter.default))
        for name in handed_on(maker) if maker in makers_of(cls) else ():
            found.setdefault(name, plain(getattr(typing.get_type_hints(maker)["settings"], name)))
    return found


def types_of(cls: type) -> dict[str, Any]:
    """Name and type of every argument in signatures of the package."""
    makers: list[Any] = list(reversed(makers_of(cls)))
    found: dict[str, Any] = {}
    for maker in makers:
        found |= handed_on(maker) | typing.get_type_hints(maker.__init__)
    return found


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def with_defaults(path: Path) -> Any:
    """A config file; one that names a class of its own, together with the files of its folder under `defaults`."""
    config: Any = OmegaConf.load(path)
    named = config.pop("defaults", [])
    if "_target_" in config:
        shared = [path.parent / f"{name}.yaml" for name in named if isinstance(name, str)]
        config = OmegaConf.merge(*(OmegaConf.load(one) for one in shared if one.exists()), config)
    return config
