"""The overrides of a command line checked together: composed, one that is wrong blamed and dropped, composed again."""

from __future__ import annotations

import argparse
import re
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
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lightning_lockstep._application.configs import Loader, Names
from lightning_lockstep._settings import did_you_mean
from lightning_lockstep._text import first_line, say
from lightning_lockstep.launchers.hydra import without_claiming

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
    """Parse each override by itself."""
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

# A program's own check of the configuration of one job, with its `hydra` node: of the keys on the first level that
# are given, if any are; whether something is wrong already, so that nothing will run.
JobCheck = Callable[[DictConfig, list[str] | None, bool], list[str]]
# What to add if an option of these groups is missing: they come from other packages.
_PLUGINS = (
    " More come with plugins: pip install 'lightning-lockstep[sweeps]' brings joblib, submitit and optuna."
)


class Job:
    """One job of a command line: what the overrides that are right lead to, with an error for each that is wrong."""

    def __init__(self, names: Names, overrides: list[Override]) -> None:
        self._names, self._loader = names, names.loader
        self.faults: list[str] = []
        self.config: DictConfig | None = None  # with its `hydra` node; None: Hydra could not compose it
        self.given: list[str] | None = (
            None  # keys on its first level that are not as without what is wrong; None: any
        )
        # Options of groups bring the keys that others are about.
        self._right = sorted(
            overrides,
            key=lambda one: (one.key_or_group != "hydra.searchpath", not self._is_choice_of_group(one)),
        )
        if (error := self._try(self._right)) is not None:
            self._compose(error)

    def _is_choice_of_group(self, override: Override) -> bool:
        return self._loader.is_group(override.key_or_group) and not isinstance(override.value(), dict)

    def _compose(self, of_all: BaseException) -> None:
        """Compose with one override after the other, without those that are wrong, because all together fail."""
        typed, self._right = self._right, []
        unknown: list[str] = []  # groups with a wrong option, whose keys cannot be judged
        error = self._try([])  # the program's own config may lack what an override gives
        without = None if self.config is None else plain(self.config)
        for override in typed:
            if override.key_or_group.startswith(tuple(unknown)):
                continue
            tried = [*self._right, override]
            failed = of_all if tried == typed else self._try(tried)
            text = None if failed is None else self._why(override, failed)
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
        elif without is not None and self.config is not None:
            self.given = differing(plain(self.config), without)

    def _try(self, overrides: list[Override]) -> BaseException | None:
        """Compose with these overrides; return why that is not possible."""
        try:
            self.config = self._loader.compose(list(map(_line, overrides)))
        except REFUSED as error:
            return error
        return None

    def _why(self, override: Override, error: BaseException) -> str | None:
        """Which option or key there is not, if that is why a configuration cannot be composed."""
        group, value = override.key_or_group, override.value()
        if not self._is_choice_of_group(override):
            if override.is_add() or override.is_force_add() or self.config is None:
                return None
            return self._names.missing(override, self.config)
        choices = list(map(str, value)) if isinstance(value, list) else [str(value)]
        known = self._loader.choices(group)
        texts = [
            f"group {group!r} has no option {one!r}.{did_you_mean(one, known)}"
            for one in choices
            if not (override.is_delete() or self._loader.is_choice(group, one))
        ]
        plugins = _PLUGINS if group.startswith("hydra/") else ""
        return f"{'; '.join(texts)} It has: {', '.join(known)}.{plugins}" if texts else None

    def check(self, number: int, check: JobCheck, first: DictConfig | None, *, is_sweep: bool) -> None:
        """Check the values: all, or of what is wrong otherwise or came first in a sweep those that are not as there."""
        if self.config is None:
            return
        given = self.given if first is None else differing(plain(self.config), plain(first))
        if self.faults and given is not None and "torch" not in sys.modules:
            if not given:
                return  # what is left was not typed
            say("lightning-lockstep: found an error; importing torch and Lightning to check the rest ...")
        with as_current_job(self.config, number):
            self.faults += check(self.config, given, bool(self.faults) or is_sweep)


def plain(config: DictConfig) -> dict[str, Any]:
    """What a configuration holds, without Hydra's part."""
    held: Any = OmegaConf.to_container(config, resolve=False)
    return {str(key): value for key, value in held.items() if key != "hydra"}


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [key for key in one if key not in other or one[key] != other[key]]


def _line(override: Override) -> str:
    return str(override.input_line)


def whole_message(error: BaseException) -> str:
    """The texts of an exception and its causes, the first sentence of each."""
    parts: list[str] = []
    seen: BaseException | None = error
    while seen is not None:
        parts += [line.strip() for line in str(seen).splitlines() if line.strip()][:2]
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
) -> tuple[list[str], DictConfig | None]:
    """Return what is wrong with a command line, and the configuration of its first job as far as that is right."""
    setup_globals()
    overrides, faults = parse(arguments.overrides)
    if arguments.config_dir is not None and not Path(arguments.config_dir).is_dir():
        faults.append(f"--config-dir {arguments.config_dir}: there is no such folder.")
    name = arguments.config_name or config_name
    try:
        loader = Loader(search_path, name, list(map(_line, overrides)))
    except (HydraException, OSError) as error:
        return [*faults, first_line(error)], None
    if name is not None and not loader.is_choice("", name):
        known = loader.choices("")
        there_is = f"{did_you_mean(name, known)} There is: {', '.join(known)}."
        return [*faults, f"--config-name {name}: there is no such config.{there_is}"], None
    values, more = swept_values(overrides, multirun=arguments.multirun)
    faults += more
    names, first = Names(loader), None
    total = sum(len(options) for options in values if len(options) > 1)
    began, checked = time.monotonic(), 0
    for number, lines in enumerate(variants(values)):
        job = Job(names, OverridesParser.create().parse_overrides(lines))
        if check is not None:
            job.check(number, check, first, is_sweep=total > 0)
        faults += job.faults
        if first is None:
            first, began = job.config, time.monotonic()
            checked = sum(len(options) > 1 for options in values)
            launcher = None if alone or first is None else first.hydra.runtime.choices["hydra/launcher"]
            if launcher not in (None, "basic"):
                faults.append(_OTHER_LAUNCHER.format(launcher))
        else:
            checked += 1
        if time.monotonic() - began > LONGEST_CHECK:
            break
    if total and not faults:
        say(f"lightning-lockstep: checked {checked} of the {total} values of the sweep.")
    return _in_order_typed(faults, arguments.overrides), first


def swept_values(overrides: list[Override], *, multirun: bool) -> tuple[list[list[str]], list[str]]:
    """Return each override as one line for each value that a sweep gives it."""
    faults = []
    values: list[list[str]] = []
    for override in overrides:
        line = _line(override)
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


def _in_order_typed(faults: list[str], lines: list[str]) -> list[str]:
    """Each error once, in the order of the command line, those of the config files last."""
    keys = [re.sub(r"^[+~]+|[@=].*", "", line) for line in lines]
    starts = [
        (line, repr(line), f"{key}=", f"{key}:", f"{key} ") for line, key in zip(lines, keys, strict=True)
    ]
    places = {
        fault: next((place for place, start in enumerate(starts) if fault.startswith(start)), len(lines))
        for fault in faults
    }
    return sorted(places, key=lambda fault: places[fault])
