"""Components of a configuration made by their constructors, and all that is checked before any rank starts."""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
import warnings
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import hydra.utils
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_lockstep._application.signatures import (
    SPECIAL,
    mismatch,
    parts_of,
    setting_faults,
    shown,
    target_nodes,
    target_of,
    trace,
    typed_lines,
)
from lightning_lockstep._lightning import LightningEnvironment, Logger, MisconfigurationException
from lightning_lockstep._run_folder import find_checkpoint, mark_begin
from lightning_lockstep._settings import did_you_mean, is_whole
from lightning_lockstep._text import counted, first_line
from lightning_lockstep.errors import ConfigurationError, LaunchError
from lightning_lockstep.launchers.external_ranks import external_ranks
from lightning_lockstep.launchers.rank_variables import find_slurm_step

if TYPE_CHECKING:
    from lightning_lockstep.doctor.registry import CheckOptions

# -- One component made by its constructor, or what that refuses, by the keys of the configuration --

# What a user's settings lead to, as opposed to a bug, whose traceback is wanted.
_ABOUT_SETTINGS = (ConfigurationError, LaunchError, MisconfigurationException, ValueError, ImportError)
# With these Lightning's Trainer also refuses settings, such as two callbacks that keep their state under one name.
_OF_TRAINER = (TypeError, RuntimeError)
# Groups of which there may be several options, in the order in which they are made.
_SEVERAL = ("callbacks", "checkpoint", "logger")


class RefusedError(ConfigurationError):
    """What a constructor has refused: each fault with the setting that it is about, if it names one."""

    def __init__(self, faults: Sequence[str], settings: Sequence[str | None] = ()) -> None:
        super().__init__(faults)
        self.settings = settings


def component_keys(config: DictConfig) -> list[str]:
    """Return the keys of all components of a run, in the order in which they are made."""
    # Making a logger may begin a run, so it is left out if anything else is wrong.
    several = [f"{group}.{name}" for group in _SEVERAL for name in names_in(config, group)]
    return ["data", "model", "strategy", *several, "trainer"]


def names_in(config: DictConfig, group: str) -> list[str]:
    node = config.get(group)
    if not isinstance(node, DictConfig):
        return []
    return [str(name) for name in node if node[name] is not None and not str(name).startswith("_")]


def make(config: DictConfig, key: str, given: Mapping[str, Any] | None = None, *, without: Sequence[str] = ()) -> Any:
    """Make one component, with what it is given beside its settings; raise what its constructor refuses."""
    node = OmegaConf.select(config, key)
    if not isinstance(node, DictConfig):
        return node  # a name that Lightning knows
    if "_target_" not in node:
        near = did_you_mean(key, [other for other in component_keys(config) if other != key])
        raise RefusedError([f"{key} has no _target_, so no object can be created from it.{near}"], [None])
    try:
        kept = OmegaConf.masked_copy(node, [name for name in map(str, node) if name not in without])
        kept._set_parent(node._get_parent())  # which a copy lacks, and its interpolations need
        return hydra.utils.instantiate(kept, _partial_=True, _convert_="all")(**(given or {}))
    except Exception as error:
        cause = error.__cause__ if isinstance(error, HydraException) and error.__cause__ else error
        if not isinstance(cause, (*_ABOUT_SETTINGS, *_OF_TRAINER) if key == "trainer" else _ABOUT_SETTINGS):
            raise
    trace(cause)
    said = cause.faults if isinstance(cause, ConfigurationError) else (first_line(cause),)
    # The setting that an error is about: the first one that it names, such as `devices` in `Trainer(devices=0)`, or
    # whose text it names, such as that of `accelerator` in "No supported gpu backend found!".
    typed: Any = OmegaConf.to_container(node, resolve=False)
    settings = {value: name for name, value in typed.items() if isinstance(value, str) and value != "auto"}
    settings |= {name: name for name in typed if name not in SPECIAL}
    named = [next(filter(None, map(settings.get, re.findall(r"\w+", text))), None) for text in said]
    is_ours = isinstance(cause, ConfigurationError)
    faults = [_label(config, key, name, text, is_ours) for name, text in zip(named, said, strict=True)]
    raise RefusedError(faults, named) from cause


def _label(config: DictConfig, component: str, name: str | None, text: str, is_ours: bool) -> str:
    """Put the key in front of what a constructor says, in place of the `name=value` it may open with."""
    node = OmegaConf.select(config, component)
    text = text.removeprefix(f"{str(node['_target_']).rpartition('.')[2]}: ")
    if name is not None:
        return f"{shown(config, f'{component}.{name}')}: {text.removeprefix(f'{name}={node[name]!r}: ')}"
    # Its strategy refuses something, perhaps in DeepSpeed's configuration.
    if component == "trainer" and is_ours:
        inner = f"strategy.config.{re.split('[=:]', text)[0]}"
        return text if OmegaConf.select(config, inner) is None else f"strategy.config.{text}"
    return f"{component}: {text}"


# -- `debug=preflight`: the doctor's checks that matter for the chosen strategy, before any rank starts --

_WITHOUT_GPUS = ("cpu", "tpu")


def checks_for(config: DictConfig) -> tuple[tuple[str, ...], CheckOptions]:
    from lightning_lockstep.doctor.network import backends_of
    from lightning_lockstep.doctor.registry import CheckOptions

    strategy = str(OmegaConf.select(config, "hydra.runtime.choices.strategy") or "")
    accelerator = str(OmegaConf.select(config, "trainer.accelerator"))
    names = ["packages", "kernel", *(() if accelerator in _WITHOUT_GPUS else ("cuda", "devices"))]
    names += [name for name in ("deepspeed", "mpi", "xla") if strategy.startswith(name)]
    if find_slurm_step() is not None:
        names.append("slurm")
    ranks = _ranks_here(OmegaConf.select(config, "trainer.devices"), accelerator)
    # Each strategy of several ranks, Lightning's own too, says over which backend they communicate.
    target = target_of(OmegaConf.select(config, "strategy"))
    communicates = hasattr(target, "process_group_backend") and getattr(target, "num_processes", ranks) != 1
    if communicates and ranks > 1 and external_ranks() is None:
        names.append("network")
    options = CheckOptions(
        nproc=ranks,
        hostfile=OmegaConf.select(config, "strategy.hostfile"),
        ssh_args=tuple(map(str, OmegaConf.select(config, "strategy.ssh_args") or ())),
        backends=backends_of(strategy, accelerator),
    )
    return tuple(names), options


def _ranks_here(devices: Any, accelerator: str) -> int:
    """Return how many ranks the run starts on this host: one for each device that the configuration names."""
    if OmegaConf.is_list(devices):
        return len(devices)
    if (text := str(devices).strip(",")) not in ("auto", "-1"):
        return int(text) if text.isdecimal() else text.count(",") + 1
    if accelerator in _WITHOUT_GPUS:
        return 1
    import torch

    return max(torch.cuda.device_count(), 1)  # asks the driver, and starts nothing on the devices


@functools.cache  # the jobs of a sweep that ask for the same are checked once
def _pass(names: tuple[str, ...], options: CheckOptions) -> bool:
    """Print what the doctor says of these checks; return whether there is no problem."""
    # Not above: a run needs them only if the configuration asks for these checks.
    from lightning_lockstep.doctor.command import run_checks
    from lightning_lockstep.doctor.registry import Status

    with redirect_stdout(sys.stderr):
        return run_checks(names, options, Status.WARNING, as_json=False, strict=False) == 0


# -- What `lockstep-train` checks of a configuration as a whole, beyond its components --

_SWITCHES: dict[str, Any] = {
    **dict.fromkeys(("fit", "validate", "test", "preflight"), bool),
    "seed": int,
    "ckpt_path": str | None,
    "objective.mode": Literal["min", "max"],
    "trainer.max_time": str | None,  # which Lightning's Trainer takes for a length of time, whatever it is
}


def check_training(config: DictConfig, only: Collection[str] | None) -> list[str]:
    """Look for what is wrong with the configuration of one training run: on rank 0, before others start."""
    faults = [*_resumed(config), *_read_by_nothing(config)]
    is_whole_line = only is None  # else a default may stand in place of an option that is not there
    for name, hint in _SWITCHES.items():
        if (expected := mismatch(_select(config, name), hint)) is not None:
            faults.append(f"{shown(config, name)}: {expected}")
    faults += [
        f"{shown(config, f'trainer.{group}')}: the group {group!r} sets this: write {group}=..."
        for group in ("strategy", "callbacks", "logger")
        if _select(config, f"trainer.{group}") is not None
    ]
    faults += _devices_and_batch(config)
    # only: the keys that are given, of which others than those of components may reach any component.
    keys = component_keys(config)
    if only is not None and {key.partition(".")[0] for key in keys}.issuperset(only):
        keys = [key for key in keys if key.partition(".")[0] in only]
    wrong = {key: setting_faults(config, key, references=is_whole_line) for key in keys}
    faults += [fault for found in wrong.values() for fault in found.values()]
    for key in keys:
        if f"{key}._target_" not in wrong[key] and OmegaConf.is_dict(_select(config, key)):
            faults += _refusals(config, key, wrong[key])
    # Takes seconds, and starts ranks: not for a configuration that cannot run anyway.
    if is_whole_line and not faults and config.get("preflight") and not _pass(*checks_for(config)):
        faults = ["debug=preflight: the checks above found problems. Fix them, or leave out debug=preflight."]
    return faults


def prepare_training(config: DictConfig) -> None:
    """Decide on rank 0, for all ranks, what depends on this machine: the checkpoint and the devices."""
    mark_begin(Path(config.hydra.runtime.output_dir))
    config.ckpt_path = _checkpoint(config)
    if _select(config, "trainer.devices") == "auto" and external_ranks() is not None:
        config.trainer.devices, config.trainer.num_nodes = _devices_and_nodes(config)


def _checkpoint(config: DictConfig) -> str | None:
    runtime, given = config.hydra.runtime, config.get("ckpt_path")
    run_folder, started_in = Path(runtime.output_dir), Path(runtime.cwd)
    folders = checkpoint_folders(config, run_folder=run_folder, started_in=started_in)
    return find_checkpoint(given, run_folder=run_folder, started_in=started_in, folders=folders)


def checkpoint_folders(config: DictConfig, *, run_folder: Path, started_in: Path) -> list[Path]:
    """Return where the components of a run, and Lightning after a signal of Slurm, save checkpoints."""
    parts = [key for key in component_keys(config) if key.startswith(("checkpoint.", "callbacks."))]
    given = [OmegaConf.select(config, f"{part}.dirpath") for part in parts]
    root = OmegaConf.select(config, "trainer.default_root_dir")
    given += [] if root is None else [root, f"{root}/checkpoints"]
    base = run_folder if OmegaConf.select(config, "hydra.job.chdir") else started_in
    return [Path(base, path) for path in given if path is not None and "://" not in str(path)]


def _resumed(config: DictConfig) -> list[str]:
    try:
        path = _checkpoint(config)
    except ConfigurationError as error:
        return [*error.faults]
    except (OmegaConfBaseException, TypeError):
        return []  # reported where the value is wrong
    if path is None or not Path(path).is_file() or zipfile.is_zipfile(path):
        return []
    with Path(path).open("rb") as file:
        if file.read(2) not in (b"PK", b""):  # no archive, as torch's files are now, but in its old format
            return []
    text = f"expected a whole checkpoint, but {path} is truncated, as after a full disk or an interrupted copy."
    return [f"{shown(config, 'ckpt_path')}: {text} Name another one."]


def _select(config: DictConfig, key: str) -> Any:
    """A value, or `None` if it is not there or refers to what is not there, which is reported as such."""
    try:
        return OmegaConf.select(config, key)
    except OmegaConfBaseException:
        return None


def _read_by_nothing(config: DictConfig) -> list[str]:
    """Keys on the first level that only `+` brings and that nothing refers to, such as `+optimzer.lr=1`."""
    choices = config.hydra.runtime.choices
    read = {"data", "model", "strategy", "callbacks", "checkpoint", "logger", "trainer", "unmask", "hydra"}
    read |= {name.partition(".")[0] for name in _SWITCHES} | {str(group) for group in choices}
    added = {line[1:].partition("=")[0]: line for line in typed_lines(config) if re.match(r"\+\w", line)}
    typed = {tuple(parts_of(key)[:2]) for key in added}
    faults: dict[str, str] = {}
    for key, line in added.items():
        new = parts_of(key)[0]
        node = config.get(new)
        others = [one for one in node if (new, str(one)) not in typed] if OmegaConf.is_dict(node) else []
        is_in_files = bool(others) and new not in added
        if new in read or key in choices or is_in_files:
            continue
        if not re.search(rf"\$\{{[^}}]*\b{re.escape(new)}\b", OmegaConf.to_yaml(config)):
            near = did_you_mean(new, sorted(name for name in read if not name.startswith("hydra")))
            text = f"{line}: there is no key {new!r} in the configuration, and nothing refers to it.{near}"
            faults.setdefault(new, f"{text} A key that only your own code reads is added with +{line}")
    return list(faults.values())


def _devices_and_nodes(config: DictConfig) -> tuple[Any, Any]:
    """Return both as configured; for `auto` what others have started."""
    devices, nodes = _select(config, "trainer.devices"), _select(config, "trainer.num_nodes")
    ranks = external_ranks()
    if devices != "auto" or ranks is None or ranks.per_node is None or ranks.count is None:
        return devices, nodes
    return ranks.per_node, ranks.count // ranks.per_node if nodes == 1 else nodes


def _devices_and_batch(config: DictConfig) -> list[str]:
    devices, nodes = _devices_and_nodes(config)
    is_single = _select(config, "strategy.name") == "auto"
    if is_single and is_whole(devices) and devices > 1:
        text = "strategy=single trains on one device; several need strategy=ddp."
        return [f"trainer.devices={devices}: {text}"]
    size = _select(config, "data.global_batch_size")
    accumulate = _select(config, "trainer.accumulate_grad_batches")
    if is_whole(accumulate) and accumulate < 1:  # Lightning would divide by it
        text = "expected micro-batches in an optimizer step, a whole number from 1."
        return [f"trainer.accumulate_grad_batches={accumulate}: {text}"]
    if not all(is_whole(number) and number > 0 for number in (size, accumulate, devices, nodes)):
        return []
    ranks, expected = devices * nodes, ""
    if size < ranks * accumulate:
        parts = f"{counted(ranks, 'rank')} x {accumulate} accumulated micro-batches = {ranks * accumulate}"
        expected = f"at least {parts}, one sample for each"
    elif is_single and size % accumulate:
        expected = f"a multiple of trainer.accumulate_grad_batches={accumulate} under strategy=single"
    return [f"data.global_batch_size={size}: expected {expected}."] if expected else []


# -- What constructors refuse, before a run --

# Constructors of these packages check their arguments and have no other effect, but for those of loggers.
_HARMLESS = ("lightning_lockstep.", "lightning.pytorch.", "pytorch_lightning.")


def _refusals(config: DictConfig, key: str, wrong: Collection[str]) -> list[str]:
    """What a constructor of a component refuses, which is made without the settings that are known to be wrong."""
    node = OmegaConf.select(config, key)
    if not all(_is_harmless(target_of(inner)) for _, inner in target_nodes(node)):
        return []
    without = [name.removeprefix(f"{key}.") for name in wrong]
    faults: list[str] = []
    # The Trainer checks devices, precision and loops, stops at its first error, and is made again without what it has
    # refused. It is not told of ranks that others have started.
    stand_ins = {"strategy": "auto", "logger": False, "plugins": [LightningEnvironment()]}
    while set(without) <= set(map(str, node)) - SPECIAL:
        try:
            with _quiet():
                make(config, key, stand_ins if key == "trainer" else None, without=without)
            break
        except RefusedError as error:
            for name, fault in zip(error.settings, error.faults, strict=True):
                # About the default of a setting that was left out; or about a value that is judged where it was given.
                if name in without or (name is not None and OmegaConf.is_interpolation(node, name)):
                    return faults
                faults.append(fault)
            if key != "trainer" or error.settings[0] is None:
                break
            without.append(error.settings[0])
        except Exception:  # the run will show it; or it lacks what was left out
            break
    return faults


@contextmanager
def _quiet() -> Iterator[None]:
    """Make components without the logs and warnings of their constructors, for errors alone."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _is_harmless(target: object) -> bool:
    begins_a_run = inspect.isclass(target) and issubclass(target, Logger)
    return f"{getattr(target, '__module__', '')}.".startswith(_HARMLESS) and not begins_a_run
