"""The overrides of a command line checked together: composed, one that is wrong blamed and dropped, composed again."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

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

from lightning_lockstep._application.configs import Loader, Names, parts_of
from lightning_lockstep._application.values import Fault, signature_faults
from lightning_lockstep._settings import did_you_mean
from lightning_lockstep._text import first_line, say
from lightning_lockstep.launchers.hydra import without_claiming

# What comes of options and files that make no configuration.
REFUSED = (HydraException, OmegaConfBaseException, OSError, YAMLError)

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


def parse(lines: Sequence[str]) -> tuple[list[Override], list[Fault]]:
    """Parse each override by itself."""
    parser = OverridesParser.create()
    overrides: list[Override] = []
    faults: list[Fault] = []
    for line in lines:
        if line.startswith("-"):
            faults.append(
                Fault(f"{line}: there is no such flag. A setting is written key=value, without dashes.")
            )
            continue
        try:
            # As the list, not the single form: this one also explains how to quote.
            overrides.extend(parser.parse_overrides([line]))
        except HydraException as error:
            how = "Quote special characters: \"key='a, b'\"."
            if not re.search("[=:]", line):
                how = (
                    f"Give it a value: {line}=..." if line[0].isalpha() else "A setting is written key=value."
                )
            faults.append(Fault(f"{line!r} cannot be read as key=value ({first_line(error)}). {how}", error))
    return overrides, faults


# -- One job: composed, and what is wrong with it --

# A program's own checks of the configuration of one job, with its `hydra` node.
JobCheck = Callable[[DictConfig], list[Fault]]
# What to add where an option of these groups is missing: they come from other packages.
_PLUGINS = dict.fromkeys(
    ("hydra/launcher", "hydra/sweeper"),
    " More come with plugins of Hydra: pip install 'lightning-lockstep[sweeps]' brings joblib, submitit and optuna.",
)


class Job:
    """One job of a command line: what the overrides that are right lead to, with an error for each that is wrong."""

    def __init__(self, names: Names, overrides: list[Override]) -> None:
        self._names, self._loader = names, names.loader
        self.faults: list[Fault] = []
        self.config: DictConfig | None = None  # with its `hydra` node; None: Hydra could not compose it
        self._refused: dict[tuple[str, ...], BaseException] = {}  # what could not be composed before, and why
        self._given = {one.key_or_group for one in overrides}
        # Options of groups bring the keys that others are about, and a class what can be added to it.
        self._right = sorted(
            overrides,
            key=lambda one: (
                one.key_or_group != "hydra.searchpath",
                not self._is_choice_of_group(one),
                not one.key_or_group.endswith("_target_"),
            ),
        )
        self._compose()

    @property
    def _typed(self) -> dict[str, str]:
        """The overrides that have no error so far, as typed, by key."""
        return {one.key_or_group: _line(one) for one in self._right}

    def _is_choice_of_group(self, override: Override) -> bool:
        return self._loader.is_group(override.key_or_group) and not isinstance(override.value(), dict)

    def _compose(self) -> None:
        """Compose with all overrides; if that fails, with one after the other, without those that are wrong."""
        wrong = {_line(one): text for one in self._right if (text := self._wrong_choice(one))}
        if any(map(self._may_replace_keys, self._right)):
            self._try([])
            wrong |= {_line(one): text for one in self._right if (text := self._replaced_keys(one))}
        if not wrong and self._try(self._right) is None:
            return
        right: list[Override] = []
        unknown: list[str] = []  # groups with a wrong option, whose keys cannot be judged
        error = self._try([])
        for override in self._right:
            line = _line(override)
            if override.key_or_group.startswith(tuple(unknown)):
                continue
            text = wrong.get(line)
            if text is None:
                failed = self._try([*right, override])
                if (
                    failed is None or error is not None
                ):  # without it the program's own config was wrong already
                    right.append(override)
                    error = failed
                    continue
                text = self._why(override, failed)
            self.faults.append(Fault(f"{line}: {text}"))
            if self._is_choice_of_group(override):
                unknown.append(f"{override.key_or_group.replace('/', '.')}.")
        self._right = right
        if error is not None:
            self.config = None
            self.faults.append(Fault(whole_message(error), error))

    def _lines(self, overrides: list[Override]) -> list[str]:
        return [_quoted(_line(one)) if self._is_choice_of_group(one) else _line(one) for one in overrides]

    def _try(self, overrides: list[Override]) -> BaseException | None:
        """Compose with these overrides; return why that is not possible."""
        lines = tuple(self._lines(overrides))
        if lines not in self._refused:
            try:
                self.config = self._loader.compose(list(lines))
                return None
            except REFUSED as error:
                self._refused[lines] = error
        return self._refused[lines]

    def _wrong_choice(self, override: Override) -> str | None:
        """What is wrong with an override of a group."""
        group, value = override.key_or_group, override.value()
        if override.is_delete() or not self._is_choice_of_group(override):
            return None
        known = self._loader.choices(group)
        if value is None:
            hint = did_you_mean("none", known) or f" ~{group} is none of them."
            return f"expected an option of group {group!r}: {', '.join(known)}.{hint}"
        choices = list(map(str, value)) if isinstance(value, list) else [str(value)]
        wrong = [choice for choice in choices if not self._loader.is_choice(group, choice)]
        texts = [
            f"group {group!r} has no option {one!r}.{self._names.near_choice(group, one)}" for one in wrong
        ]
        return f"{'; '.join(texts)} It has: {', '.join(known)}.{_PLUGINS.get(group, '')}" if wrong else None

    def _may_replace_keys(self, override: Override) -> bool:
        plain = not isinstance(override.value(), dict) and not override.is_delete() and not override.is_add()
        return plain and "." not in override.key_or_group and not self._is_choice_of_group(override)

    def _replaced_keys(self, override: Override) -> str | None:
        """What is wrong with a plain value in the place of several keys, which Hydra takes."""
        key, config = override.key_or_group, self.config
        kept: object = None if config is None or not self._may_replace_keys(override) else config.get(key)
        names = [str(name) for name in kept] if isinstance(kept, DictConfig) else []
        how = f"Give a value to one of them, such as {key}.{names[0]}=..." if names else ""
        return f"{key!r} holds the keys {', '.join(names)}. {how}" if names else None

    def _why(self, override: Override, error: BaseException) -> str:
        """Why a configuration cannot be composed with an override that can be without."""
        line, config = _line(override), self.config
        is_added = override.is_add() or override.is_force_add()
        if is_added and self._is_choice_of_group(override):
            return f"this group has an option already. Write {line.lstrip('+')}, which takes its place."
        missing = None if is_added or config is None else self._names.missing(override, config)
        return missing or whole_message(error)

    def check(self, number: int, check: JobCheck | None, *, judged: Sequence[str], is_sweep: bool) -> None:
        """Check the values that some overrides have set, in a configuration that has no other error all of them."""
        right = [_line(one) for one in self._right]
        if self.config is None or (self.faults and not any(line in right for line in judged)):
            return  # what is left was not typed
        if self.faults and "torch" not in sys.modules:
            say("lightning-lockstep: found an error; importing torch and Lightning to check the rest ...")
        while True:
            with as_current_job(self.config, number):
                touched = self._touched(judged) if self.faults or number else None
                found = signature_faults(self.config, self._typed, touched)
                blamed = [one for one in self._right if one.key_or_group in found]
                self.faults += found.values()
                if not blamed:
                    break
            # With a class go the settings that were typed for it.
            own = [
                one.key_or_group.removesuffix("_target_")
                for one in blamed
                if one.key_or_group.endswith("._target_")
            ]
            kept = [one for one in self._right if one not in blamed]
            self._right = [one for one in kept if not one.key_or_group.startswith(tuple(own))]
            if (error := self._try(self._right)) is not None:
                self.faults.append(Fault(whole_message(error), error))
                return
        with as_current_job(self.config, number):
            if check is not None:
                # A value that is missing because the one given was wrong is no second error.
                left_out = tuple(f"{key} is required" for key in self._given - self._typed.keys())
                self.faults += [fault for fault in check(self.config) if not fault.text.startswith(left_out)]
                if self.faults or is_sweep:
                    self._construct(self._touched(judged))

    def _construct(self, touched: list[str] | None) -> None:
        """Add what constructors refuse, if a signature or a check has not refused the same."""
        from lightning_lockstep._application.build import component_keys, constructor_faults

        config = self.config
        assert config is not None
        keys = [key for key in component_keys(config) if touched is None or key.partition(".")[0] in touched]
        known = {fault.text.partition(": ")[0] for fault in self.faults}
        self.faults += [
            fault for fault in constructor_faults(config, keys) if fault.text.partition(": ")[0] not in known
        ]

    def _touched(self, judged: Sequence[str]) -> list[str] | None:
        """The keys on the first level below which overrides have set something; `None` for any."""
        found = []
        for override in self._right:
            if _line(override) not in judged:
                continue
            group, value = override.key_or_group, override.value()
            if self._is_choice_of_group(override) and not override.is_delete():
                choices = value if isinstance(value, list) else [value]
                if not all(self._loader.is_ours(group, str(choice)) for choice in choices):
                    return None  # a file of the user's, which may set any key
            else:
                found.append(parts_of(group)[0])
        return found


def _line(override: Override) -> str:
    return str(override.input_line)


def _quoted(line: str) -> str:
    """The override of a group with quotes around options that Hydra takes for numbers: `precision='32','64'`."""
    return line if "'" in line else re.sub(r"(?<=[=,])\d+(?![^,])", r"'\g<0>'", line)


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
    try:
        _note(config, {"job.id": str(number), "job.num": number, "runtime.output_dir": "."})
        with suppress(OmegaConfBaseException):  # Hydra itself reports a run folder that cannot be named
            _note(config, {"runtime.output_dir": str(OmegaConf.select(config, "hydra.run.dir"))})
        yield
    finally:
        HydraConfig.instance().cfg = before


def _note(config: DictConfig, values: dict[str, Any]) -> None:
    """Put values into Hydra's own part, which is read-only, and make that the one of the current job."""
    with flag_override(config.hydra, ["readonly", "struct"], [False, False]):
        for key, value in values.items():
            OmegaConf.update(config.hydra, key, value)
    HydraConfig.instance().set_config(config)


# -- All checks of a command line together, before anything is started --

# A sweep begins after this time [s], whether all of its values are checked or not.
LONGEST_CHECK = 10.0


class Checked(NamedTuple):
    """What the checks of a command line have found."""

    faults: list[Fault]  # each once, in the order of the command line
    quoted: dict[str, str]  # overrides that Hydra must be given in another form, by the form typed
    config: DictConfig | None = None  # of the first job, with what is right


@without_claiming()
def check_command_line(
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
    try:
        loader = Loader(search_path, name, list(map(_line, overrides)))
    except (HydraException, OSError) as error:
        return Checked([*faults, Fault(first_line(error), error)], {})
    if name is not None and not loader.is_choice("", name):
        known = loader.choices("")
        there_is = f"{did_you_mean(name, known)} There is: {', '.join(known)}."
        return Checked([*faults, Fault(f"--config-name {name}: there is no such config.{there_is}")], {})
    values, more = swept_values(overrides, multirun=arguments.multirun)
    faults += more
    names, first = Names(loader), None
    total = sum(len(options) for options in values if len(options) > 1)
    began, checked = time.monotonic(), 0
    for number, (lines, judged) in enumerate(variants(values)):
        job = Job(names, OverridesParser.create().parse_overrides(lines))
        job.check(number, check, judged=judged, is_sweep=total > 0)
        faults += job.faults
        if first is None:
            first, began = job.config, time.monotonic()
            checked = sum(len(options) > 1 for options in values)
            if not alone and first is not None:
                faults += _launcher_faults(first)
        else:
            checked += 1
        if time.monotonic() - began > LONGEST_CHECK:
            break
    if total and not faults:
        say(f"lightning-lockstep: checked {checked} of the {total} values of the sweep.")
    groups = [_line(one) for one in overrides if loader.is_group(one.key_or_group)]
    quoted = {line: _quoted(line) for line in groups if _quoted(line) != line}
    return Checked(_in_order_typed(faults, arguments.overrides), quoted, first)


def swept_values(overrides: list[Override], *, multirun: bool) -> tuple[list[list[str]], list[Fault]]:
    """Return each override as one line for each value that a sweep gives it."""
    faults = []
    values: list[list[str]] = []
    for override in overrides:
        line = _line(override)
        if not override.is_sweep_override():
            values.append([line])
        elif not multirun:
            how = f"write a list as {override.key_or_group}=[{override.get_value_string()}]"
            faults.append(Fault(f"{line}: several values. Add -m to run a job for each, or {how}."))
        elif override.is_discrete_sweep():  # of an interval only the sweeper knows the values
            prefix = line.split("=", 1)[0]
            values.append([f"{prefix}={value}" for value in override.sweep_string_iterator()])
    return values, faults


def variants(values: list[list[str]]) -> Iterator[tuple[list[str], list[str]]]:
    """Divide a sweep into jobs, one at least, in which every value occurs once; with the lines that are new in each."""
    first = [options[0] for options in values]
    yield first, first
    for place, options in enumerate(values):
        yield from (([*first[:place], option, *first[place + 1 :]], [option]) for option in options[1:])


def _launcher_faults(config: DictConfig) -> list[Fault]:
    launcher = OmegaConf.select(config, "hydra.runtime.choices.hydra/launcher")
    if launcher == "basic":
        return []
    return [
        Fault(
            f"hydra/launcher={launcher}: expected basic under torchrun, srun or mpirun, whose ranks run the jobs of a"
            " sweep together. Start the program once, without them; each job then starts its own ranks."
        )
    ]


def _in_order_typed(faults: list[Fault], lines: list[str]) -> list[Fault]:
    """Each error once, in the order of the command line, those of the config files last."""

    def place(fault: Fault) -> int:
        found = (place for place, line in enumerate(lines) if fault.text.startswith((line, f"{line!r}")))
        return next(found, len(lines))

    return sorted({fault.text: fault for fault in faults}.values(), key=place)
