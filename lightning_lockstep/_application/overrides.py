"""The overrides of a command line, also of a sweep, checked together: one that is wrong is blamed and dropped."""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# Hydra's own parser of flags, whose command line is looked at before Hydra runs it.
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lightning_lockstep._application.configs import Loader
from lightning_lockstep._application.masking import Mask
from lightning_lockstep._application.signatures import parts_of, typed_lines
from lightning_lockstep._run_folder import without_claiming
from lightning_lockstep._settings import did_you_mean
from lightning_lockstep._text import first_line, install_command, plain_table, say

# What comes of options and files that make no configuration.
REFUSED = (HydraException, OmegaConfBaseException, OSError, ValueError, YAMLError)

# -- What is typed --


def read_arguments(given: list[str]) -> argparse.Namespace:
    """Parse a command line as Hydra does; what its parser refuses is left among the overrides, for the check."""
    arguments, refused = get_args_parser().parse_known_args(given)
    if refused:
        overrides = [*arguments.overrides, *refused]
        arguments.overrides = [word for word in given if word in overrides]
        # Hydra's parser will read them again, and takes overrides in one place only.
        sys.argv[1:] = [*arguments.overrides, *(word for word in given if word not in overrides)]
    return arguments


def run_requested(arguments: argparse.Namespace) -> bool:
    """Whether the flags ask for a run, not for help or a look at the configuration."""
    others: tuple[Any, ...] = (arguments.help, arguments.hydra_help, arguments.cfg, arguments.info)
    return not any(others) and not arguments.shell_completion


def parse(lines: Sequence[str]) -> tuple[list[Override], list[str]]:
    parser = OverridesParser.create()
    overrides: list[Override] = []
    faults: list[str] = []
    for line in lines:
        if line.startswith("-"):
            faults.append(f"{line}: there is no such flag. A setting is written key=value, without dashes.")
            continue
        try:
            # As the list, not the single form: this one also explains how to quote.
            overrides.extend(parser.parse_overrides([line]))
        except HydraException as error:
            how = "A setting is written key=value; quote special characters: \"key='a, b'\"."
            faults.append(f"{line!r} cannot be read ({first_line(error)}). {how}")
    return overrides, faults


# -- One job: composed, and what is wrong with it --

# A program's own check of the configuration of one job, with its `hydra` node: of all of it; or, if something is wrong
# already and nothing will run, only of the keys on the first level that are given and right.
JobCheck = Callable[[DictConfig, set[str] | None], list[str]]
# What to add if a config is not found, and if it is an option of these groups: they come from other packages.
_SEARCHED = " Name its folder in hydra.searchpath; configs of this package need pkg://lightning_lockstep.conf there."
_PLUGINS = f" More (joblib, submitit, optuna) come with: {install_command('sweeps')}"


class Job:
    """One job of a command line: what the overrides that are right lead to, with an error for each that is wrong."""

    def __init__(self, loader: Loader, overrides: list[Override]) -> None:
        self._loader = loader
        self.faults: list[str] = []
        self.config: DictConfig | None = None  # with its `hydra` node; None: Hydra could not compose it
        # Options of groups bring the keys that others are about.
        self._right = sorted(
            overrides,
            key=lambda one: (one.key_or_group != "hydra.searchpath", not self._is_choice_of_group(one)),
        )
        if self._try(self._right) is not None:
            self._compose()

    def _is_choice_of_group(self, override: Override) -> bool:
        return self._loader.is_group(override.key_or_group) and not isinstance(override.value(), dict)

    def _compose(self) -> None:
        """Compose with one override after the other, without those that are wrong, because all together fail."""
        typed, self._right = self._right, []
        unknown: list[str] = []  # groups with a wrong option, whose keys cannot be judged
        error = self._try([])  # the program's own config may lack what an override gives
        for override in typed:
            if override.key_or_group.startswith(tuple(unknown)):
                continue
            failed = self._try([*self._right, override])
            text = None if failed is None else self._why(override)
            if failed is None or (error is not None and text is None):
                self._right.append(override)
                error = failed
                continue
            self.faults.append(f"{_line(override)}: {text or whole_message(failed)}")
            if self._is_choice_of_group(override):
                unknown.append(f"{override.key_or_group.replace('/', '.')}.")
        if error is not None:
            self.config = None
            self.faults.append(whole_message(error))

    def _try(self, overrides: list[Override]) -> BaseException | None:
        """Compose with these overrides; return why that is not possible."""
        try:
            self.config = self._loader.compose(list(map(_line, overrides)))
        except REFUSED as error:
            return error
        return None

    def _why(self, override: Override) -> str | None:
        """Which option or key there is not, if that is why a configuration cannot be composed."""
        group, value = override.key_or_group, override.value()
        if not self._is_choice_of_group(override):
            if override.is_add() or override.is_force_add() or self.config is None:
                return None
            return self._loader.missing(override, self.config)
        known = self._loader.choices(group)
        texts = [
            # A Trainer takes the strategies by names that begin with the package's.
            f"group {group!r} has no option {one!r}.{did_you_mean(one.removeprefix('lockstep_'), known)}"
            for one in map(str, value if isinstance(value, list) else [value])
            if not (override.is_delete() or self._loader.is_choice(group, one))
        ]
        if texts:
            plugins = _PLUGINS if group.startswith("hydra/") else ""
            return f"{'; '.join(texts)} It has{': ' if known else ' none'}{', '.join(known)}.{plugins}"
        chosen = () if self.config is None else self.config.hydra.runtime.choices
        if override.is_add() and override.get_key_element()[1:] in chosen:
            return f"the group {group!r} is in the configuration already: write {_line(override)[1:]}"
        return None

    def check(self, number: int, check: JobCheck, *, is_wrong: bool) -> None:
        """Check the values, unless nothing of what was typed is left to be checked."""
        if self.config is None or (is_wrong and not self._right):
            return
        if is_wrong and "torch" not in sys.modules:
            say("lightning-lockstep: found an error; importing torch and Lightning to check the rest ...")
        with as_current_job(self.config, number):
            given = {parts_of(one.package or one.key_or_group)[0] for one in self._right}
            self.faults += check(self.config, given if is_wrong else None)


def _line(override: Override) -> str:
    return str(override.input_line)


def whole_message(error: BaseException) -> str:
    """The texts of an exception and its causes, the first sentence of each."""
    # Without a name the folder of the primary config is missing, which the second line names.
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        name, known = str(error.missing_cfg_file).rpartition("/")[2], error.options
        has = f".{did_you_mean(name, known)} It has: {', '.join(known)}." if known else _SEARCHED
        return first_line(error) + has
    parts: list[str] = []
    seen: BaseException | None = error
    while seen is not None:
        lines = [line.strip() for line in str(seen).splitlines() if line.strip()]
        parts += lines[-2:] if isinstance(seen, YAMLError) else lines[:2]  # the last two of YAML say where
        seen = seen.__cause__
    return " ".join(dict.fromkeys(parts))


@contextmanager
def as_current_job(config: DictConfig, number: int) -> Iterator[None]:
    """Let interpolations of Hydra's own values (`${hydra:...}`) be resolved as they will be in the job."""
    before = HydraConfig.instance().cfg
    hydra = config.hydra
    # Hydra's own part is read-only, and becomes so again with `set_config`.
    with flag_override(hydra, ["readonly", "struct"], [False, False]):
        hydra.job.id, hydra.job.num, hydra.runtime.output_dir = str(number), number, "."
    HydraConfig.instance().set_config(config)
    with suppress(OmegaConfBaseException):  # Hydra itself reports a run folder that cannot be named
        folder = str(hydra.run.dir)
        with flag_override(hydra, "readonly", False):
            hydra.runtime.output_dir = folder
        HydraConfig.instance().set_config(config)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before


def _unwritable(config: DictConfig, *, multirun: bool) -> list[str]:
    """What is wrong with the place of the folder of a run, or of a sweep, if none can be made there."""
    key = "hydra.sweep.dir" if multirun else "hydra.run.dir"
    with as_current_job(config, 0), suppress(OmegaConfBaseException):
        wanted = Path(str(OmegaConf.select(config, key))).absolute()
        there = next(path for path in (wanted, *wanted.parents) if os.path.exists(path))  # noqa: PTH110 - that of Path raises
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            text = "no folder can be made there. Expected a place where you may write, such as"
            return [f"{key}={wanted}: {text} {key}='${{lockstep.run_folder:/scratch/me/run}}'."]
    return []


# -- The jobs of a sweep: which there are, what became of each, and how those that were not run are run --


def swept_values(overrides: list[Override], *, multirun: bool) -> tuple[list[list[str]], list[str]]:
    """Return each override as one line for each value that a sweep gives it, and what is wrong with them."""
    faults = []
    values: list[list[str]] = []
    for override in overrides:
        line = str(override.input_line)
        if not override.is_sweep_override():
            values.append([line])
        elif not multirun:
            how = f"write a list as {override.key_or_group}=[{override.get_value_string()}]"
            faults.append(f"{line}: several values. Add -m to run a job for each, or {how}.")
        elif override.is_discrete_sweep():  # of an interval only the sweeper knows the values
            prefix = line.split("=", 1)[0]
            values.append([f"{prefix}={value}" for value in override.sweep_string_iterator()])
    return values, faults


def variants(values: list[list[str]]) -> Iterator[list[str]]:
    """Divide a sweep into jobs, one at least, in which every value occurs once."""
    first = [options[0] for options in values]
    yield first
    for place, options in enumerate(values):
        yield from ([*first[:place], option, *first[place + 1 :]] for option in options[1:])


class Sweep:
    """What became of the jobs that this process has run."""

    def __init__(self) -> None:
        self.planned: list[list[str]] = []  # lines of each job, in their order; empty if only a sweeper knows
        self.command: list[str] = []  # of the program, with its flags
        self._jobs: list[tuple[int, str, str, str]] = []

    def plan(self, values: list[list[str]], command: list[str]) -> None:
        self.planned, self.command = list(map(list, itertools.product(*values))), command

    def note(self, config: DictConfig, objective: Any, error: BaseException | None) -> None:
        lines = Mask(config).masked(typed_lines(config))
        value = f"{objective:.6g}" if isinstance(objective, (int, float)) else "-"
        if isinstance(error, SystemExit):
            end = str(error.code)
        else:
            end = "0" if error is None else f"{type(error).__name__}: {first_line(error)}"
        self._jobs.append((config.hydra.job.num, " ".join(lines), value, end))

    def report(self) -> str:
        """A table of the jobs, and the commands of those that were not run; empty if there were none."""
        if not self._jobs:
            return ""
        table = plain_table(("job", "overrides", "objective", "exit"), self._jobs)
        text = f"lightning-lockstep: the sweep\n{table}"
        left = self.planned[len(self._jobs) :]
        if not left:
            return text
        text += f"\n{len(left)} of its {len(self.planned)} jobs were not run. To run them:"
        return "\n  ".join([text, *(shlex.join([*self.command, *lines]) for lines in left)])


# -- All checks of a command line together, before anything is started --

# A sweep begins after this time [s], whether all of its values are checked or not.
LONGEST_CHECK = 10.0
_OTHER_LAUNCHER = (
    "hydra/launcher={}: expected basic under torchrun, srun or mpirun, whose ranks run the jobs of a sweep together."
    " Start the program once, without them; each job then starts its own ranks."
)


@without_claiming()
def check_command_line(
    arguments: argparse.Namespace,
    search_path: ConfigSearchPath,
    config_name: str | None,
    check: JobCheck | None,
    *,
    alone: bool = True,  # no other rank has been started yet
) -> tuple[list[str], DictConfig | None, list[list[str]]]:
    """Return what is wrong, the configuration of the first job as far as that is right, and the lines of a sweep."""
    setup_globals()
    overrides, faults = parse(arguments.overrides)
    if arguments.config_dir is not None and not Path(arguments.config_dir).is_dir():
        faults.append(f"--config-dir {arguments.config_dir}: there is no such folder.")
    name = arguments.config_name or config_name
    try:
        loader = Loader(search_path, name, list(map(_line, overrides)))
    except REFUSED as error:
        return [*faults, whole_message(error)], None, []
    if name is not None and not loader.is_choice("", name):
        known = loader.choices("")
        there_is = f"{did_you_mean(name, known)} There is: {', '.join(known)}."
        return [*faults, f"--config-name {name}: there is no such config.{there_is}"], None, []
    values, more = swept_values(overrides, multirun=arguments.multirun)
    faults += more
    first: DictConfig | None = None
    began = time.monotonic()
    for number, lines in enumerate(variants(values)):
        job = Job(loader, OverridesParser.create().parse_overrides(lines))
        if check is not None:
            job.check(number, check, is_wrong=bool(faults or job.faults))
        faults += job.faults
        if first is None:
            first, began = job.config, time.monotonic()
            faults += [] if first is None else _unwritable(first, multirun=arguments.multirun)
            launcher = None if alone or first is None else first.hydra.runtime.choices["hydra/launcher"]
            if launcher not in (None, "basic"):
                faults.append(_OTHER_LAUNCHER.format(launcher))
        if time.monotonic() - began > LONGEST_CHECK:
            break
    return list(dict.fromkeys(faults)), first, values
