"""Names and defaults of settings stand in a signature, in a settings class and in a config file: the three agree."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import typing
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from torch.nn.parallel import DistributedDataParallel

import lightning_lockstep
from lightning_lockstep import callbacks, demo, strategies
from lightning_lockstep._application.values import target_nodes
from lightning_lockstep._doors.hydra_internals import locate

PACKAGE = Path(lightning_lockstep.__file__).parent
CONF = PACKAGE / "conf"
# Public names of these rooms that no config file is about.
NO_COMPONENT = {"GlobalBatchSampler", "LifecycleSettings", "RankLifecycle"}
CLASSES: dict[str, Any] = {
    name: getattr(room, name)
    for room in (callbacks, strategies, demo)
    for name in sorted({*room.__all__} - NO_COMPONENT)
}

# Settings that a file leaves out, each with the reason.
OBJECT = "an object, which no plain value of a file stands for"
BY_MPIRUN = "mpirun starts the ranks"
LEFT_OUT: dict[tuple[str, str], str] = {
    ("LockstepDDPStrategy", "cluster_environment"): OBJECT,
    ("LockstepDDPStrategy", "ddp_comm_state"): OBJECT,
    ("LockstepDeepSpeedStrategy", "cluster_environment"): OBJECT,
    ("LockstepFSDPStrategy", "cluster_environment"): OBJECT,
    ("LockstepMPIStrategy", "cluster_environment"): OBJECT,
    ("LockstepMPIStrategy", "ddp_comm_state"): OBJECT,
    ("LockstepMPIStrategy", "start_method"): BY_MPIRUN,
    ("LockstepXLAStrategy", "checkpoint_io"): OBJECT,
    ("LockstepXLAStrategy", "cluster_environment"): OBJECT,
    ("LockstepXLAStrategy", "precision_plugin"): OBJECT,
    ("LockstepXLASPMDStrategy", "checkpoint_io"): OBJECT,
    ("LockstepXLASPMDStrategy", "precision_plugin"): OBJECT,
    ("LockstepMPIStrategy", "process_group_backend"): "it is called `backend` there",
}
# Values of a file that are no default of the class, each with the reason.
OTHER_VALUE: dict[tuple[str, str], str] = {
    ("ByteGPT", "context"): "that of the data",
    ("DigitsData", "seed"): "that of the run",
    ("SourceTextData", "seed"): "that of the run",
    ("EffectiveBatchSize", "global_batch_size"): "has to be given",
    ("StopTogether", "filename"): "`ckpt_path=last` finds this one",
    ("SyncedEarlyStopping", "monitor"): "the objective of the run",
    ("SyncedEarlyStopping", "mode"): "the objective of the run",
    ("SyncedEarlyStopping", "verbose"): "a run on the command line says why it stops",
}

# Settings class -> the public classes that take its fields as arguments of their own.
OF_DDP = ("LockstepDDPStrategy", "LockstepMPIStrategy")
STRATEGIES = (*OF_DDP, "LockstepDeepSpeedStrategy", "LockstepFSDPStrategy", "LockstepXLAStrategy")
TAKEN_BY: dict[str, tuple[str, ...]] = {
    "AutoBatchSizeSettings": ("AutoBatchSize",),
    "CheckOptions": (),  # of the doctor's command line
    "DDPSettings": OF_DDP,
    "DeepSpeedSettings": ("LockstepDeepSpeedStrategy",),
    "FSDPSettings": ("LockstepFSDPStrategy",),
    "GuardSettings": STRATEGIES,
    "GroupSettings": (),  # the MPI backend makes it for each group
    "LifecycleSettings": STRATEGIES,
    "MPIBackendOptions": ("LockstepMPIStrategy",),
    "MPIRunSettings": ("LockstepMPIStrategy",),
    "OverflowSettings": ("OverflowDetector",),
    "StaticShapesSettings": ("StaticShapes",),
    "SupervisorSettings": STRATEGIES,
}
# Fields that one of them does not take, each with the reason.
NOT_TAKEN: dict[tuple[str, str], str] = {
    (
        "LockstepXLAStrategy",
        "start_method",
    ): "torch-xla is used in one process a device, which this program starts",
}
# Arguments of another type than the field, each with the reason.
OTHER_TYPE: dict[tuple[str, str], str] = {
    ("LockstepMPIStrategy", "mpirun_args"): "any sequence, made a tuple",
    ("LockstepMPIStrategy", "ssh_args"): "any sequence, made a tuple",
}


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def defaults_of(cls: type) -> dict[str, Any]:
    """Name and default of every argument; those that a strategy passes on, to torch's DDP in the end, too."""
    makers = [cls]
    if cls.__name__ in strategies.__all__:
        makers = [*(base for base in inspect.getmro(cls) if _is_ours(base)), DistributedDataParallel]
    found: dict[str, Any] = {}
    for maker in makers:
        for parameter in list(inspect.signature(maker.__init__).parameters.values())[1:]:
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                found.setdefault(parameter.name, plain(parameter.default))
    return found


def _is_ours(cls: type) -> bool:
    """Whether a class of the package has a constructor of its own."""
    return cls.__module__.startswith("lightning_lockstep.") and "__init__" in vars(cls)


def types_of(cls: type) -> dict[str, Any]:
    """Name and type of every argument in signatures of the package."""
    makers = [base for base in inspect.getmro(cls) if _is_ours(base)]
    return {
        name: hint
        for maker in reversed(makers)
        for name, hint in typing.get_type_hints(maker.__init__).items()
    }


def own_defaults_of(cls: type) -> dict[str, Any]:
    """Those in signatures of the package: of torch's DDP the files list some."""
    named = {
        name
        for base in inspect.getmro(cls)
        if _is_ours(base)
        for name in inspect.signature(base.__init__).parameters
    }
    return {name: default for name, default in defaults_of(cls).items() if name in named}


def with_defaults(path: Path) -> Any:
    """A config file; one that names a class of its own, together with the files of its folder under `defaults`."""
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)
    named = config.pop("defaults", [])
    if "_target_" in config:
        shared = [path.parent / f"{name}.yaml" for name in named if isinstance(name, str)]
        config = OmegaConf.merge(*(OmegaConf.load(one) for one in shared if one.exists()), config)
    return config


@functools.cache
def nodes() -> list[tuple[Path, Any]]:
    """Every node of a config file that names a class of this package; `debug` only changes what others list."""
    return [
        (path, node)
        for path in sorted(CONF.rglob("*.yaml"))
        if path.parent.name != "debug"
        for _, node in target_nodes(with_defaults(path))
        if str(node["_target_"]).startswith("lightning_lockstep.")
    ]


def nodes_with(name: str) -> list[tuple[Path, Any]]:
    """Where the files list the settings of a class."""
    return [(path, node) for path, node in nodes() if locate(node["_target_"]) is CLASSES[name]]


@pytest.mark.parametrize("name", CLASSES)
def test_a_config_file_has_the_names_and_defaults_of_the_signature(name: str) -> None:
    defaults, own = defaults_of(CLASSES[name]), own_defaults_of(CLASSES[name])
    nodes = nodes_with(name)
    assert nodes, "no file in conf/"
    for path, node in nodes:
        listed = OmegaConf.to_container(node, resolve=False, throw_on_missing=False)
        assert isinstance(listed, dict)
        del listed["_target_"]
        assert set(listed) <= set(defaults), f"{path.name} has a key that {name} does not take"
        left_out = {key for key in own if (name, key) in LEFT_OUT}
        assert set(own) - left_out <= set(listed), f"{path.name} leaves out a setting of {name}"
        differing = {
            key
            for key, value in listed.items()
            if value != defaults[key] or type(value) is not type(defaults[key])
        }
        assert differing == {key for owner, key in OTHER_VALUE if owner == name}, path.name


@functools.cache
def settings_classes() -> dict[str, Any]:
    """Every class of the package whose name ends in Settings or Options."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith(("Settings", "Options")):
                module = ".".join(["lightning_lockstep", *path.relative_to(PACKAGE).with_suffix("").parts])
                found[node.name] = getattr(importlib.import_module(module), node.name)
    return found


@pytest.mark.parametrize("settings", settings_classes())
def test_a_settings_class_has_the_names_and_defaults_of_the_signature(settings: str) -> None:
    assert settings in TAKEN_BY, "say which public class takes its fields"
    for name in TAKEN_BY[settings]:
        taken, types = defaults_of(CLASSES[name]), types_of(CLASSES[name])
        for field in dataclasses.fields(settings_classes()[settings]):
            if (name, field.name) in NOT_TAKEN:
                continue
            assert field.name in taken, f"{name} takes no {field.name}"
            assert plain(taken[field.name]) == plain(field.default), f"{settings}.{field.name}"
            if (name, field.name) not in OTHER_TYPE:
                expected = typing.get_type_hints(settings_classes()[settings])[field.name]
                assert types[field.name] == expected, f"{settings}.{field.name}"


def test_an_exception_that_is_none_any_more_is_noticed() -> None:
    for owner, key in [*LEFT_OUT, *OTHER_VALUE]:
        assert key in defaults_of(CLASSES[owner]), f"{owner} has no setting {key}"
    for owner, key in NOT_TAKEN:
        assert key not in defaults_of(CLASSES[owner]), f"{owner} takes {key}"
