"""What is checked once the configuration is composed, before any rank starts."""

from __future__ import annotations

import functools
import sys
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_lockstep._application.build import component_keys, missing_package
from lightning_lockstep._application.values import Fault, mismatch, missing_faults, shown, target_of
from lightning_lockstep._run_folder import find_checkpoint, note_begin
from lightning_lockstep._settings import is_whole
from lightning_lockstep._text import counted
from lightning_lockstep.errors import ConfigurationError, LaunchError
from lightning_lockstep.launchers.external_ranks import ExternalRanks, external_ranks
from lightning_lockstep.launchers.rank_variables import find_slurm_step

if TYPE_CHECKING:
    from lightning_lockstep.doctor.registry import CheckOptions

# -- `debug=preflight`: the doctor's checks that matter for the chosen strategy, before any rank starts --

_ON_GPUS = ("cuda", "devices")
_WITHOUT_GPUS = ("cpu", "tpu")


def preflight_faults(config: DictConfig) -> list[Fault]:
    """Run the checks if the configuration asks for them, print their table, and return what stops the run."""
    # Rank 0 calls this before any other rank is started: it starts processes, and its own ranks on this host
    # where the run would start its ranks here.
    return _run(*checks_for(config)) if config.get("preflight") else []


def checks_for(config: DictConfig) -> tuple[tuple[str, ...], CheckOptions]:
    """Return the checks that matter for a configuration, and their options."""
    from lightning_lockstep.doctor.network import backends_of
    from lightning_lockstep.doctor.registry import CheckOptions

    strategy = str(OmegaConf.select(config, "hydra.runtime.choices.strategy") or "")
    accelerator = str(OmegaConf.select(config, "trainer.accelerator"))
    names: list[str] = ["packages", "kernel"]
    if accelerator not in _WITHOUT_GPUS:
        names += _ON_GPUS
    names += [name for name in ("deepspeed", "mpi", "xla") if strategy.startswith(name)]
    if find_slurm_step() is not None:
        names.append("slurm")
    ranks, backends = _ranks_here(config), backends_of(strategy, accelerator)
    # Each strategy of several ranks, Lightning's own too, says over which backend they communicate.
    communicates = hasattr(target_of(OmegaConf.select(config, "strategy")), "process_group_backend")
    if communicates and ranks > 1 and external_ranks() is None:
        names.append("network")
    hostfile = OmegaConf.select(config, "strategy.hostfile")
    ssh_args = OmegaConf.select(config, "strategy.ssh_args") or ()
    options = CheckOptions(
        nproc=ranks,
        hostfile=str(hostfile) if hostfile else None,
        ssh_args=tuple(map(str, ssh_args)),
        strategy=strategy,
        backends=backends,
    )
    return tuple(names), options


def _ranks_here(config: DictConfig) -> int:
    """Return how many ranks the run starts on this host: one for each device that the configuration names."""
    devices: Any = OmegaConf.select(config, "trainer.devices")
    if isinstance(devices, str) and "," in devices:
        return sum(part != "" for part in devices.split(","))
    if OmegaConf.is_list(devices):
        return len(devices)
    if str(devices) not in ("auto", "-1"):
        return int(devices) if str(devices).isdecimal() else 1
    if str(OmegaConf.select(config, "trainer.accelerator")) in _WITHOUT_GPUS:
        return 1
    import torch

    return max(torch.cuda.device_count(), 1)  # asks the driver, and starts nothing on the devices


@functools.cache  # the jobs of a sweep that ask for the same are checked once
def _run(names: tuple[str, ...], options: CheckOptions) -> list[Fault]:
    # Not above: a run needs them only if the configuration asks for these checks.
    from lightning_lockstep.doctor.check_runner import Checks
    from lightning_lockstep.doctor.registry import CheckResult, Status
    from lightning_lockstep.doctor.table import (
        console,
        print_fixes,
        print_heading,
        print_result,
        print_verdict,
    )

    checks, to = Checks(names, options), console(is_error=True)
    results: list[CheckResult] = []
    print_heading(to)
    for result in checks.results():
        results.append(result)
        print_result(to, result, least=Status.WARNING if result.status is not Status.OK else Status.OK)
    print_fixes(to, results, least=Status.WARNING)
    print_verdict(to, results, sum(result.seconds for result in results))
    sys.stderr.flush()
    bad = [result.check for result in results if result.status is Status.PROBLEM]
    if not bad:
        return []
    text = f"the checks above found problems ({', '.join(bad)}). Fix them, or leave out debug=preflight."
    return [Fault(f"debug=preflight: {text}")]


# -- What `lockstep-train` checks of a configuration as a whole, beyond its components --

_SWITCHES: dict[str, Any] = {
    "seed": int,
    "fit": bool,
    "validate": bool,
    "test": bool,
    "preflight": bool,
    "ckpt_path": str | None,
}


def check_training(config: DictConfig) -> list[Fault]:
    """Look for what is wrong with the configuration of one training run: on rank 0, before others start."""
    faults = [*_resumed(config), *_switches(config), *_unfit(config)]
    faults += _decided_by_groups(config)
    for key in component_keys(config):
        faults += missing_faults(config, key)
        if key.startswith("logger.") and (error := missing_package(config, key)):
            faults.append(Fault(str(error), error))
    external = external_ranks()
    faults += [*_single_device(config), *_external(config, external), *_global_batch(config, external)]
    # Takes seconds, and starts ranks: not for a configuration that cannot run anyway.
    return faults or preflight_faults(config)


def prepare_training(config: DictConfig) -> None:
    """Decide on rank 0, for all ranks, what depends on this machine: the checkpoint and the devices."""
    note_begin(Path(config.hydra.runtime.output_dir))
    config.ckpt_path = _checkpoint(config)
    ranks = external_ranks()
    if ranks is None or ranks.per_node is None or ranks.count is None:
        return
    if OmegaConf.select(config, "trainer.devices") == "auto":
        config.trainer.devices = ranks.per_node
        config.trainer.num_nodes = ranks.count // ranks.per_node


def _checkpoint(config: DictConfig) -> str | None:
    runtime, given = config.hydra.runtime, config.get("ckpt_path")
    run_folder, started_in = Path(runtime.output_dir), Path(runtime.cwd)
    folders = []
    if given == "auto":
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


def _resumed(config: DictConfig) -> list[Fault]:
    """A checkpoint that is not there, or has more epochs than the run: Lightning refuses that once all ranks run."""
    try:
        path = _checkpoint(config)
    except ConfigurationError as error:
        return [Fault(text, error) for text in error.faults]
    except (OmegaConfBaseException, TypeError):
        return []  # reported where the value is wrong
    last = OmegaConf.select(config, "trainer.max_epochs")
    if config.get("fit") is not True or not is_whole(last) or last < 0:
        return []
    if path is None or not Path(path).is_file():
        return []
    from lightning_lockstep.distributed.plain_data import UNREADABLE, read_plain

    try:
        done = int(read_plain(Path(path))["loops"]["fit_loop"]["epoch_progress"]["current"]["completed"])
    except (*UNREADABLE, ConfigurationError, LookupError, TypeError, ValueError):
        return []  # what only Lightning will say about
    if done <= last:
        return []
    return [
        Fault(
            f"trainer.max_epochs={last}: {path} has {counted(done, 'epoch')}. Expected at least as many in all, such as"
            f" trainer.max_epochs={done + last}; or fit=false, to evaluate it."
        )
    ]


def _select(config: DictConfig, key: str) -> Any:
    """A value, or `None` if it is not there or refers to what is not there, which is reported as such."""
    try:
        return OmegaConf.select(config, key)
    except OmegaConfBaseException:
        return None


def _switches(config: DictConfig) -> list[Fault]:
    faults = []
    for name, hint in _SWITCHES.items():
        value = _select(config, name)
        expected = mismatch(value, hint)
        if expected is not None:
            faults.append(Fault(f"{name}={value}: expected {expected}."))
    mode = _select(config, "objective.mode")
    if mode not in ("min", "max"):
        faults.append(Fault(f"objective.mode={mode}: expected min or max."))
    return faults


def _decided_by_groups(config: DictConfig) -> list[Fault]:
    """What the Trainer is given from a group, whatever stands below `trainer`."""
    faults = []
    for group in ("strategy", "callbacks", "logger"):
        if (value := _select(config, f"trainer.{group}")) is not None:
            meant = f"{group}={value if isinstance(value, str) else '...'}"
            faults.append(
                Fault(
                    f"{shown(config, f'trainer.{group}')}: the group {group!r} decides this. Did you mean {meant!r}?"
                )
            )
    return faults


def _unfit(config: DictConfig) -> list[Fault]:
    """A model that takes other samples than the data yields, where both classes say what."""
    model, data = (target_of(_select(config, key)) for key in ("model", "data"))
    takes, yields = getattr(model, "takes", None), getattr(data, "yields", None)
    if not isinstance(takes, str) or not isinstance(yields, str) or takes == yields:
        return []
    fitting = [*_fitting("model", "takes", yields), *_fitting("data", "yields", takes)]
    hint = f"Take {' or '.join(fitting)}." if fitting else "Choose two that fit each other."
    return [
        Fault(
            f"{_choice(config, 'model')} does not fit {_choice(config, 'data')}: the model takes {takes}; the"
            f" data are {yields}. {hint}"
        )
    ]


def _choice(config: DictConfig, group: str) -> str:
    choice = _select(config, f"hydra.runtime.choices.{group}")
    return f"{group}={choice}" if choice else f"{group}._target_={config[group]._target_}"


def _fitting(group: str, attribute: str, samples: str) -> list[str]:
    """The options of this package in a group whose classes name these samples."""
    files = resources.files("lightning_lockstep.conf").joinpath(group).iterdir()
    return sorted(
        f"{group}={file.name.removesuffix('.yaml')}"
        for file in files
        if file.name.endswith(".yaml")
        and getattr(target_of(OmegaConf.create(file.read_text())), attribute, None) == samples
    )


def _single_device(config: DictConfig) -> list[Fault]:
    devices, strategy = _select(config, "trainer.devices"), config.get("strategy")
    name = strategy.get("name") if isinstance(strategy, DictConfig) else strategy
    if name == "auto" and isinstance(devices, int) and devices > 1:
        text = "strategy=single trains on one device; several need strategy=ddp"
        return [Fault(f"trainer.devices={devices}: {text}.")]
    return []


def _ranks(config: DictConfig, external: ExternalRanks | None) -> int | None:
    """How many ranks the run will have; `None` where the configuration does not say."""
    devices, nodes = (_select(config, f"trainer.{key}") for key in ("devices", "num_nodes"))
    if devices == "auto" and external is not None:
        return external.count
    if isinstance(devices, int) and isinstance(nodes, int) and devices > 0:
        return devices * nodes
    return None


def _external(config: DictConfig, external: ExternalRanks | None) -> list[Fault]:
    """Other numbers of ranks and nodes than were started, as the cluster environment says it."""
    devices, nodes = _select(config, "trainer.devices"), _select(config, "trainer.num_nodes")
    if external is None or external.count is None or not isinstance(nodes, int):
        return []
    if devices == "auto":
        devices = external.per_node
        nodes = external.count // devices if devices and nodes == 1 else nodes
    if not isinstance(devices, int):
        return []
    # Not above: it imports torch and Lightning's environments.
    from lightning_lockstep.launchers.environments import detect_environment

    try:
        detect_environment().validate_settings(num_devices=devices, num_nodes=nodes)
    except LaunchError as error:
        return [Fault(str(error), error)]
    except ValueError as error:  # Lightning's own, of torchrun
        return [Fault(f"{error} Leave out trainer.devices and trainer.num_nodes, or start as many.", error)]
    return []


def _global_batch(config: DictConfig, external: ExternalRanks | None) -> list[Fault]:
    size = _select(config, "data.global_batch_size")
    accumulate = _select(config, "trainer.accumulate_grad_batches")
    ranks = _ranks(config, external)
    if not (is_whole(size) and is_whole(accumulate) and size > 0 and accumulate > 0 and ranks is not None):
        return []
    parts = f"{counted(ranks, 'rank')} x {accumulate} accumulated micro-batches = {ranks * accumulate}"
    given = f"data.global_batch_size={size}"
    if size < ranks * accumulate:
        return [Fault(f"{given}: expected at least {parts}, one sample for each.")]
    if _select(config, "strategy.name") == "auto" and size % accumulate:
        text = f"{given}: expected a multiple of trainer.accumulate_grad_batches={accumulate} under strategy=single."
        return [Fault(text)]
    return []
