"""What `lockstep-train` checks of a configuration as a whole, beyond its components."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_lockstep._application.build import component_keys
from lightning_lockstep._application.checkpoints import (
    checkpoint_folders,
    find_checkpoint,
    note_begin,
)
from lightning_lockstep._application.command_line.faults import Fault
from lightning_lockstep._application.command_line.targets import TargetChecks, target_of
from lightning_lockstep._application.command_line.value_types import mismatch
from lightning_lockstep._application.config_channel import ExternalRanks, external_ranks
from lightning_lockstep._application.preflight import preflight_faults
from lightning_lockstep._lightning import LightningEnvironment
from lightning_lockstep._settings import is_whole
from lightning_lockstep._text import counted
from lightning_lockstep.demo.global_batch_sampler import batch_size_per_rank
from lightning_lockstep.errors import ConfigurationError, LaunchError
from lightning_lockstep.launchers.environments.slurm_environment import SlurmStepEnvironment, find_slurm_step

_SWITCHES: dict[str, Any] = {
    "seed": int,
    "fit": bool,
    "validate": bool,
    "test": bool,
    "preflight": bool,
    "ckpt_path": str | None,
}


def check_training(config: DictConfig, checks: TargetChecks) -> list[Fault]:
    """Look for what is wrong with the configuration of one training run: on rank 0, before others start.

    Args:
        config: The frozen configuration with its `hydra` node.
        checks: Checks of the values in it.

    Ranks: rank 0, before any other is started.
    """
    faults = [*_prepared(config), *_switches(config), *_unfit(config)]
    for key in component_keys(config):
        faults += checks.missing_faults(key)
        if key != "trainer":
            faults += checks.constructor_faults(key)
    # The Trainer checks devices, precision and loops; the ranks are not started yet.
    faults += checks.constructor_faults(
        "trainer", strategy="auto", logger=False, plugins=[LightningEnvironment()], default_root_dir=None
    )
    external = external_ranks()
    uneven = _uneven_tasks()
    counts = uneven or _external(config, external)
    faults += [*_single_device(config), *counts, *_global_batch(config, external)]
    # Takes seconds, and starts ranks: not for a configuration that cannot run anyway.
    return faults or preflight_faults(config)


def prepare_training(config: DictConfig) -> None:
    """Decide on rank 0, for all ranks, what depends on this machine: the checkpoint and the devices.

    Args:
        config: The configuration of the job that begins, with its `hydra` node; changed.

    Ranks: rank 0 only; reads environment variables and looks for files.
    """
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


def _prepared(config: DictConfig) -> list[Fault]:
    try:
        _checkpoint(config)
    except ConfigurationError as error:
        return [Fault(text, error) for text in error.faults]
    except OmegaConfBaseException:
        pass  # reported where the value is wrong
    return []


def _switches(config: DictConfig) -> list[Fault]:
    faults = []
    for name, hint in _SWITCHES.items():
        value: Any = config.get(name)
        expected = mismatch(value, hint)
        if expected is not None:
            faults.append(Fault(f"{name}={value}: expected {expected}."))
    mode = OmegaConf.select(config, "objective.mode")
    if mode not in ("min", "max"):
        faults.append(Fault(f"objective.mode={mode}: expected min or max."))
    return faults


def _unfit(config: DictConfig) -> list[Fault]:
    """A model that takes other samples than the data yields, where both classes say what."""
    model, data = (target_of(OmegaConf.select(config, key)) for key in ("model", "data"))
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
    choice = OmegaConf.select(config, f"hydra.runtime.choices.{group}")
    return f"{group}={choice}" if choice else f"{group}._target_={config[group]._target_}"


def _fitting(group: str, attribute: str, samples: str) -> list[str]:
    """The choices of this package in a group whose classes name these samples."""
    files = resources.files("lightning_lockstep.conf").joinpath(group).iterdir()
    return sorted(
        f"{group}={file.name.removesuffix('.yaml')}"
        for file in files
        if file.name.endswith(".yaml")
        and getattr(target_of(OmegaConf.create(file.read_text())), attribute, None) == samples
    )


def _single_device(config: DictConfig) -> list[Fault]:
    devices = OmegaConf.select(config, "trainer.devices")
    if _strategy_name(config) == "auto" and isinstance(devices, int) and devices > 1:
        return [
            Fault(
                f"trainer.devices={devices}: strategy=single trains on one device; several need strategy=ddp."
            )
        ]
    return []


def _strategy_name(config: DictConfig) -> Any:
    strategy = config.get("strategy")
    return strategy.get("name") if isinstance(strategy, DictConfig) else strategy


def _ranks(config: DictConfig, external: ExternalRanks | None) -> int | None:
    """How many ranks the run will have; `None` where the configuration does not say."""
    devices, nodes = (OmegaConf.select(config, f"trainer.{key}") for key in ("devices", "num_nodes"))
    if devices == "auto" and external is not None:
        return external.count
    if isinstance(devices, int) and isinstance(nodes, int) and devices > 0:
        return devices * nodes
    return None


def _uneven_tasks() -> list[Fault]:
    """Nodes of a Slurm step with different numbers of tasks, whatever the Trainer is given."""
    step = find_slurm_step()
    if step is None or len(set(step.tasks_per_node)) < 2:
        return []
    try:
        SlurmStepEnvironment(step).validate_settings(max(step.tasks_per_node), len(step.tasks_per_node))
    except LaunchError as error:
        return [Fault(str(error), error)]
    return []


def _external(config: DictConfig, external: ExternalRanks | None) -> list[Fault]:
    asked = _ranks(config, external)
    if external is None or external.count is None or asked is None:
        return []
    devices, nodes = config.trainer.devices, config.trainer.num_nodes
    started_on = external.count // external.per_node if external.per_node else None
    if devices == "auto" and started_on is not None and nodes not in (1, started_on):
        return [
            Fault(
                f"trainer.num_nodes={nodes}: {counted(external.count, 'rank')} started on"
                f" {counted(started_on, 'node')}. Leave it out, or start them on as many nodes."
            )
        ]
    if asked == external.count:
        return []
    step = find_slurm_step()
    if step is not None and step.size == external.count and isinstance(devices, int):
        try:
            SlurmStepEnvironment(step).validate_settings(devices, nodes)
        except LaunchError as error:  # with a table, and the flags of srun
            return [Fault(str(error), error)]
    return [
        Fault(
            f"trainer.devices={devices} on trainer.num_nodes={nodes} = {counted(asked, 'rank')}, but"
            f" {external.count} were started. Leave both out, or start as many."
        )
    ]


def _global_batch(config: DictConfig, external: ExternalRanks | None) -> list[Fault]:
    size = OmegaConf.select(config, "data.global_batch_size")
    accumulate = OmegaConf.select(config, "trainer.accumulate_grad_batches")
    ranks = _ranks(config, external)
    if not (is_whole(size) and is_whole(accumulate) and size > 0 and accumulate > 0 and ranks is not None):
        return []
    try:
        batch_size_per_rank(size, ranks, accumulate)
    except ConfigurationError as error:
        return [Fault(f"data.{text}", error) for text in error.faults]
    return []
