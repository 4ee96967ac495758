"""All checks of a command line together, before anything is started."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from lightning_lockstep._application.command_line.faults import Fault
from lightning_lockstep._application.command_line.overrides import (
    Composed,
    compose_job,
    parse,
    quote_numbers,
    variants,
)
from lightning_lockstep._application.command_line.targets import TargetChecks
from lightning_lockstep._doors.hydra_internals import Loader
from lightning_lockstep._settings import did_you_mean
from lightning_lockstep._text import first_line
from lightning_lockstep.launchers.hydra.rerun import freeze

# A program's own checks of one job: from its configuration and its checks to what is wrong.
JobCheck = Callable[[DictConfig, TargetChecks], list[Fault]]


class Checked(NamedTuple):
    """What the checks of a command line have found."""

    faults: list[Fault]  # each once, in the order of the command line
    quoted: dict[str, str]  # overrides that Hydra must be given in another form, by the form typed


def preflight(
    arguments: argparse.Namespace,
    search_path: ConfigSearchPath,
    config_name: str | None,
    check: JobCheck | None,
    *,
    alone: bool = True,  # no other rank has been started yet
) -> Checked:
    """Look for everything that is wrong with a command line."""
    setup_globals()
    overrides, faults = parse(arguments.overrides)
    if arguments.config_dir is not None and not Path(arguments.config_dir).is_dir():
        faults.append(Fault(f"--config-dir {arguments.config_dir}: there is no such folder."))
    name = arguments.config_name or config_name
    lines = [str(override.input_line) for override in overrides]
    try:
        loader = Loader(search_path, name, lines)
    except (HydraException, OSError) as error:
        return Checked([*faults, Fault(first_line(error), error)], {})
    if name is not None and not loader.is_choice("", name):
        known = loader.choices("")
        faults.append(
            Fault(
                f"--config-name {name}: there is no such config.{did_you_mean(name, known)}"
                f" There is: {', '.join(known)}."
            )
        )
        return Checked(faults, {})
    quoted = quote_numbers(loader, lines)
    overrides, _ = parse([quoted.get(line, line) for line in lines])
    jobs, sweep_faults = variants(overrides, multirun=arguments.multirun)
    faults += sweep_faults
    for number, job in enumerate(jobs):
        composed = compose_job(loader, job)
        faults += composed.faults
        if composed.config is not None:
            faults += check_job(composed, number, check)
            faults += [] if alone else _launcher_faults(composed.config)
    for typed, line in quoted.items():
        faults = [Fault(fault.text.replace(line, typed), fault.error) for fault in faults]
    return Checked(_in_order_typed(faults, lines), quoted)


def check_job(composed: Composed, number: int, check: JobCheck | None) -> list[Fault]:
    """Check the values of one composed job."""
    assert composed.config is not None
    with _as_current_job(composed.config, number) as config:
        frozen = freeze(config)
        checks = TargetChecks(frozen, composed.typed)
        faults = [*checks.signature_faults(), *(check(frozen, checks) if check is not None else [])]
    typed, guessed = tuple(composed.typed.values()), tuple(composed.guessed)
    return [fault for fault in faults if fault.text.startswith(typed) or not fault.text.startswith(guessed)]


def _launcher_faults(config: DictConfig) -> list[Fault]:
    launcher = OmegaConf.select(config, "hydra.runtime.choices.hydra/launcher")
    if launcher == "basic":
        return []
    return [
        Fault(
            f"hydra/launcher={launcher}: expected basic under torchrun, srun or mpirun, whose ranks run the jobs of a"
            " sweep together. Start the program once, without them; each job then starts ranks of its own."
        )
    ]


@contextmanager
def _as_current_job(config: DictConfig, number: int) -> Iterator[DictConfig]:
    """Let interpolations of Hydra's own values (`${hydra:...}`) be resolved as they will be in the job."""
    before = HydraConfig.instance().cfg
    config = copy.deepcopy(config)
    with flag_override(config.hydra, ["readonly", "struct"], [False, False]):
        config.hydra.job.id = str(number)
        config.hydra.job.num = number
        HydraConfig.instance().set_config(config)
    try:
        with flag_override(config.hydra, ["readonly", "struct"], [False, False]):
            try:
                config.hydra.runtime.output_dir = str(OmegaConf.select(config, "hydra.run.dir"))
            except OmegaConfBaseException:
                config.hydra.runtime.output_dir = (
                    "."  # Hydra itself reports a run folder that cannot be named
                )
        HydraConfig.instance().set_config(config)
        yield config
    finally:
        HydraConfig.instance().cfg = before


def _in_order_typed(faults: list[Fault], lines: list[str]) -> list[Fault]:
    """Each fault once, in the order of the command line, those of the config files last."""

    def place(fault: Fault) -> int:
        return next((place for place, line in enumerate(lines) if fault.text.startswith(line)), len(lines))

    return sorted({fault.text: fault for fault in faults}.values(), key=place)


def run_requested(arguments: argparse.Namespace) -> bool:
    """Whether the flags ask for a run, not for help or a look at the configuration."""
    others: tuple[Any, ...] = (arguments.help, arguments.hydra_help, arguments.cfg, arguments.info)
    return not any(others) and not arguments.shell_completion
