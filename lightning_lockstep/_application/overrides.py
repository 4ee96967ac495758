"""Overrides of a command line, all of them checked together."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lightning_lockstep._application.values import Fault, TargetChecks, entries, settings_of
from lightning_lockstep._doors.hydra_internals import Loader, get_args_parser
from lightning_lockstep._settings import did_you_mean, nearest
from lightning_lockstep._text import first_line, listed, say
from lightning_lockstep.launchers.hydra import freeze, without_claiming

# -- What is typed, as overrides --

# A sweep is checked one value at a time; beyond this many values the rest is left to Hydra.
MOST_VARIANTS = 64


def read_arguments(given: list[str]) -> argparse.Namespace:
    """Parse a command line as Hydra does; what its parser refuses is left among the overrides, for `preflight`."""
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


def as_overrides(words: list[str]) -> list[tuple[str, str]]:
    """Each argument as typed, and as an override: `--key value`, `--key=value`, `key value`, `--key` as `key=value`."""
    found: list[tuple[str, str]] = []
    rest = list(words)
    while rest:
        typed = line = rest.pop(0)
        shape = re.fullmatch(r"(-*)([^\W\d][\w./@-]*)(=.+)?", typed, re.DOTALL)
        if shape and (shape[1] or not shape[3]):
            dashes, key, value = shape.groups()
            if not value and rest and re.fullmatch(r"(?!--?[^\W\d]|[+~])[^=]*", rest[0]):
                value = f"={rest[0]}"
                typed = f"{typed} {rest.pop(0)}"
            line = f"{key}{value or ('=true' if dashes else '')}"
        found.append((typed, line))
    return found


def parse(lines: list[str]) -> tuple[list[Override], list[Fault]]:
    """Parse each override by itself."""
    parser = OverridesParser.create()
    overrides: list[Override] = []
    faults: list[Fault] = []
    for line in lines:
        try:
            # As the list, not the single form: this one also explains how to quote.
            overrides.extend(parser.parse_overrides([line]))
        except HydraException as error:  # noqa: PERF203
            how = (
                "Quote special characters: \"key='a, b'\"."
                if re.search("[=:]", line)
                else f"Give it a value: {line}=..."
            )
            faults.append(Fault(f"{line!r} cannot be read as key=value ({first_line(error)}). {how}", error))
    return overrides, faults


def variants(overrides: list[Override], *, multirun: bool) -> tuple[list[list[str]], list[Fault]]:
    """Divide a sweep into jobs, one at least, in which every swept value occurs once."""
    faults = []
    values: list[list[str]] = []
    for override in overrides:
        line = str(override.input_line)
        if not override.is_sweep_override():
            values.append([line])
        elif not multirun:
            how = f"write a list as {override.key_or_group}=[{override.get_value_string()}]"
            faults.append(Fault(f"{line}: several values. Add -m to run a job for each, or {how}."))
        elif override.is_discrete_sweep():  # of an interval only the sweeper knows the values
            prefix = line.split("=", 1)[0]
            values.append([f"{prefix}={value}" for value in override.sweep_string_iterator()])
    first = [options[0] for options in values]
    jobs = [first]
    for place, options in enumerate(values):
        jobs += [[*first[:place], option, *first[place + 1 :]] for option in options[1:]]
    return jobs[:MOST_VARIANTS], faults


# -- What could be meant by a name that is not there --


class Names:
    """All keys, those in a configuration and those that an option not selected would bring, and all options."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    @cached_property
    def _brought(self) -> list[tuple[str, str, str, str]]:
        """Each key that an option brings, its group, the option, and the class if it names one."""
        return [
            (f"{group}.{key}", group, choice, _class_in(where) if name == "_target_" else "")
            for group, choice, content in self.loader.brought()
            for key, where, name in entries(content)
            if isinstance(where, DictConfig)
        ]

    def _choices(self, config: DictConfig) -> dict[str, str]:
        """All keys, each with the option that brings it where it is not there."""
        present = [key for key, where, _ in entries(config) if isinstance(where, DictConfig)]
        found = dict.fromkeys(sorted(present, key=lambda key: key.count(".")), "")
        for key, group, choice, _ in self._brought:
            found.setdefault(key, f"{group}={choice}")
        return found

    def find(self, typed: str, config: DictConfig, *, near: bool = True) -> dict[str, str]:
        """The keys most like one: but for case and signs, by the last part, by a near one; of one group first."""
        choices = self._choices(config)
        group, last = f"{_split(typed)[0]}.", _split(typed)[-1]
        ends = {key: _split(key)[-1] for key in choices}
        likely = [end for key, end in ends.items() if not choices[key] or key.startswith(group)]
        close = nearest(last, likely) if near else None
        ranked: dict[tuple[int, bool, bool], dict[str, str]] = {}
        for key, end in ends.items():
            alike = [key == typed, _plain(key) == _plain(typed), end == last, end == close]
            if any(alike):
                rank = (alike.index(True), not key.startswith(group), bool(choices[key]))
                ranked.setdefault(rank, {})[key] = choices[key]
        return ranked[min(ranked)] if ranked else {}

    def hint(self, typed: str, config: DictConfig, *, near: bool = True) -> str:
        """Where such a key is to be had; as the end of a sentence."""
        found = self.find(typed, config, near=near)
        if not found:
            return ""
        key, choice = next(iter(found.items()))
        if not choice:
            return " Did you mean " + " or ".join(map(repr, list(found)[:2])) + "?"
        meant = "" if key == typed else f" Did you mean {key!r}?"
        return f"{meant} It comes with the option {choice}: give that too."

    def near_choice(self, group: str, choice: str) -> str:
        """The option that makes what was named by its class, in whichever group; or the nearest in this one."""
        for _, other, name, made in self._brought:
            if made == choice != "":
                return f" Did you mean {name if other == group else f'{other}={name}'!r}?"
        return did_you_mean(choice, self.loader.choices(group))

    def missing(self, override: Override, config: DictConfig) -> str | None:
        """Which part of the key of an override is not there and what is near, or `None` if it is there."""
        parts = _split(override.key_or_group)
        node: object = config
        for depth, part in enumerate(parts):
            if isinstance(node, DictConfig) and part not in node:
                where = f"in {'.'.join(parts[:depth])!r}" if depth else "in the configuration"
                left_out = depth == len(parts) - 1 and part in (settings_of(node) or ())
                if left_out and not override.is_delete():
                    return self._left_out(override, part, config)
                hint = (
                    "" if override.is_delete() else self._instead(override, parts[: depth + 1], node, config)
                )
                return f"there is no key {part!r} {where}.{hint}"
            node = OmegaConf.select(config, ".".join(parts[: depth + 1]), throw_on_missing=False)
        return None

    def _instead(self, override: Override, parts: list[str], node: DictConfig, config: DictConfig) -> str:
        """What an override can be instead that names no key of a node."""
        typed, within = override.key_or_group, len(parts) > 1
        names = [str(name) for name in node if not str(name).startswith("_") and (within or name != "hydra")]
        same = self.hint(typed, config, near=False)
        near = did_you_mean(parts[-1], names if within else [*names, *self.loader.groups()])
        if hint := same or near or self.hint(typed, config):
            return hint
        if typed == ".".join(parts) and settings_of(node) is not None:
            return f" It has: {listed(names, 12)}."
        if any(made for _, group, _, made in self._brought if group == parts[0]):
            return f" Options of {parts[0]!r}: {', '.join(self.loader.choices(parts[0]))}."
        return f" A new key is added with +{override.input_line}"

    def _left_out(self, override: Override, name: str, config: DictConfig) -> str:
        """A setting that what is configured has, but not the config."""
        if OmegaConf.select(config, f"hydra.runtime.choices.{name}") is None:
            return f"not among the settings of this config; add it with +{override.input_line}"
        choice = nearest(override.get_value_string(), self.loader.choices(name)) or "..."
        return f"the group {name!r} decides this. Did you mean '{name}={choice}'?"


def _class_in(node: DictConfig) -> str:
    return str(OmegaConf.select(node, "_target_")).rpartition(".")[2]


def _plain(key: str) -> str:
    return re.sub(r"[\W_]", "", key).lower()


def _split(key: str) -> list[str]:
    return [part for part in re.split(r"[.\[\]]", key) if part]


# -- One job: composed once, then looked at --

# A program's own checks of one job: from its configuration and its checks to what is wrong.
JobCheck = Callable[[DictConfig, TargetChecks], list[Fault]]
# What to add where an option of these groups is missing: they come from other packages.
_PLUGINS = dict.fromkeys(
    ("hydra/launcher", "hydra/sweeper"),
    " More come with plugins of Hydra: pip install 'lightning-lockstep[sweeps]' brings joblib, submitit and optuna.",
)
# What comes of options and files that make no configuration.
REFUSED = (HydraException, OmegaConfBaseException, OSError, YAMLError)


class Job:
    """One job of a command line: what the overrides that are right lead to, with an error for each that is wrong."""

    def __init__(self, names: Names, lines: list[str]) -> None:
        self._names, self._loader = names, names.loader
        self.faults: list[Fault] = []
        self.config: DictConfig | None = None  # with its `hydra` node; None: Hydra could not compose it
        self.typed: dict[str, str] = {}  # the override as typed, by key
        # Groups whose wrong option was replaced by the nearest one; errors in its files are not reported.
        self._guessed: list[str] = []
        self._compose(OverridesParser.create().parse_overrides(lines))

    def _compose(self, overrides: list[Override]) -> None:
        """Compose with the options of groups, then apply the overrides of keys one by one."""
        groups: list[str] = []
        keys: list[Override] = []
        unknown: list[str] = []  # groups whose keys cannot be judged
        for override in overrides:
            key = override.key_or_group
            self.typed[key] = str(override.input_line)
            if not self._loader.is_group(key) or isinstance(override.value(), dict):
                keys.append(override)
            elif (usable := self._choice(override)) is not None:
                groups.append(usable)
            else:
                unknown.append(f"{key.replace('/', '.')}.")
        searched = [str(one.input_line) for one in keys if one.key_or_group == "hydra.searchpath"]
        self.config = self._with_choices([*searched, *groups])
        if self.config is not None:
            # What a target takes says what can be added to it.
            for override in sorted(keys, key=lambda override: not override.key_or_group.endswith("_target_")):
                if not override.key_or_group.startswith(tuple(unknown)):
                    self._apply(override, self.config)

    def _choice(self, override: Override) -> str | None:
        """The override to go on with, the nearest option in place of a wrong one; `None` where none is near."""
        group, line, value = override.key_or_group, str(override.input_line), override.value()
        if override.is_delete():
            return line
        known = self._loader.choices(group)
        if value is None:
            hint = did_you_mean("none", known) or f" ~{group} is none of them."
            self._not_a_choice(
                group, f"{line}: expected an option of group {group!r}: {', '.join(known)}.{hint}"
            )
            return None
        choices = list(map(str, value)) if isinstance(value, list) else [str(value)]
        wrong = [choice for choice in choices if not self._loader.is_choice(group, choice)]
        if wrong:
            texts = [
                f"group {group!r} has no option {one!r}.{self._names.near_choice(group, one)}"
                for one in wrong
            ]
            has = f"It has: {', '.join(known)}.{_PLUGINS.get(group, '')}"
            self._not_a_choice(group, f"{line}: {'; '.join(texts)} {has}")
        usable = [nearest(choice, known) if choice in wrong else choice for choice in choices]
        if None in usable:
            return None
        text = ",".join(f"'{choice}'" for choice in usable)  # quoted, so that 32 stays a name
        return f"{line.split('=', 1)[0]}={f'[{text}]' if isinstance(value, list) else text}"

    def _not_a_choice(self, group: str, text: str) -> None:
        self.faults.append(Fault(text))
        self._guessed.append(f"{group.replace('/', '.')}.")

    def _with_choices(self, lines: list[str]) -> DictConfig | None:
        """What Hydra makes of the options; else its first error, or the `+` that are too many."""
        try:
            return self._loader.compose(lines)
        except REFUSED as error:
            added = [line for line in lines if line.startswith("+")]
            if added:
                with suppress(*REFUSED):
                    config = self._loader.compose([line.lstrip("+") for line in lines])
                    self.faults += [_has_a_choice(line.replace("'", ""), error) for line in added]
                    return config
            text = whole_message(error)
            named = [line for line in self.typed.values() if f"'{line.split('=')[0]}'" in text]
            self.faults.append(Fault(": ".join([*named[:1], text]), error))
            return None

    def _apply(self, override: Override, config: DictConfig) -> None:
        key, line = override.key_or_group, str(override.input_line)
        kept: object = config.get(key) if "." not in key else None
        names = [str(name) for name in kept] if isinstance(kept, DictConfig) else []
        if names and not override.is_delete() and not isinstance(override.value(), dict):
            how = f"Give a value to one of them, such as {key}.{names[0]}=..."
            self.faults.append(Fault(f"{line}: {key!r} holds the keys {', '.join(names)}. {how}"))
            return
        try:
            self._loader.apply(override, config)
        except (HydraException, OmegaConfBaseException) as error:
            added = override.is_add() or override.is_force_add()
            missing = None if added else self._names.missing(override, config)
            text = whole_message(error) if missing is None else missing
            self.faults.append(Fault(f"{line}: {text}", error if missing is None else None))

    def check(self, number: int, check: JobCheck | None) -> None:
        """Check the values, unless there is nothing to look at but the files of the configuration."""
        if self.config is None or not self._has_more():
            return
        with _as_current_job(self.config, number):
            frozen = freeze(self.config)
            checks = TargetChecks(frozen, self.typed)
            before = len(self.faults)
            self.faults += checks.signature_faults()
            if check is not None and self._has_more():
                if self.faults and "torch" not in sys.modules:
                    say(
                        "lightning-lockstep: found an error; importing torch and Lightning to check the rest ..."
                    )
                self.faults += check(frozen, checks)
        typed, guessed = tuple(self.typed.values()), tuple(self._guessed)
        self.faults[before:] = [
            fault
            for fault in self.faults[before:]
            if fault.text.startswith(typed) or not fault.text.startswith(guessed)
        ]

    def _has_more(self) -> bool:
        """Whether an override has no error so far, or there is none."""
        wrong = [fault.text for fault in self.faults]
        right = [line for line in self.typed.values() if not any(text.startswith(line) for text in wrong)]
        return bool(right) or not self.typed


def _has_a_choice(line: str, error: BaseException) -> Fault:
    how = f"Write {line.lstrip('+')}, which takes its place"
    return Fault(f"{line}: this group has an option already. {how}.", error)


def whole_message(error: BaseException) -> str:
    """The texts of an exception and its causes, the first sentence of each."""
    parts: list[str] = []
    seen: BaseException | None = error
    while seen is not None:
        parts += [line.strip() for line in str(seen).splitlines() if line.strip()][:2]
        seen = seen.__cause__
    return " ".join(dict.fromkeys(parts))


@contextmanager
def _as_current_job(config: DictConfig, number: int) -> Iterator[None]:
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


class Checked(NamedTuple):
    """What the checks of a command line have found."""

    faults: list[Fault]  # each once, in the order of the command line
    quoted: dict[str, str]  # overrides that Hydra must be given in another form, by the form typed


@without_claiming()
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
    written = as_overrides(arguments.overrides)
    overrides, faults = parse([line for _, line in written])
    if arguments.config_dir is not None and not Path(arguments.config_dir).is_dir():
        faults.append(Fault(f"--config-dir {arguments.config_dir}: there is no such folder."))
    name = arguments.config_name or config_name
    try:
        loader = Loader(search_path, name, [str(override.input_line) for override in overrides])
    except (HydraException, OSError) as error:
        return Checked([*faults, Fault(first_line(error), error)], {})
    if name is not None and not loader.is_choice("", name):
        known = loader.choices("")
        there_is = f"{did_you_mean(name, known)} There is: {', '.join(known)}."
        return Checked([*faults, Fault(f"--config-name {name}: there is no such config.{there_is}")], {})
    names = Names(loader)
    if any(typed != line for typed, line in written):
        written, more = _with_right_keys(names, written)
        overrides, _ = parse([line for _, line in written])
        faults += more
    jobs, more = variants(overrides, multirun=arguments.multirun)
    faults += more
    for number, lines in enumerate(jobs):
        job = Job(names, lines)
        job.check(number, check)
        faults += job.faults
        if not alone and job.config is not None:
            faults += _launcher_faults(job.config)
    forms = [form for forms in written for form in forms]
    return Checked(_in_order_typed(faults, forms), _quoted_numbers(loader, overrides))


def _with_right_keys(
    names: Names, written: list[tuple[str, str]]
) -> tuple[list[tuple[str, str]], list[Fault]]:
    """Say of what is no `key=value` how it is written, and go on with that."""
    config = OmegaConf.create()
    with suppress(*REFUSED):  # reported where the job is composed
        config = names.loader.compose([])
    found, faults = [], []
    for typed, line in written:
        key, _, value = line.partition("=")
        if typed != line:
            meant = [key] if names.loader.is_group(key) else [*names.find(key, config), key]
            line = f"{meant[0]}={value}"
            faults.append(Fault(f"{typed}: expected key=value. Did you mean {line!r}?"))
        found.append((typed, line))
    return found, faults


def _quoted_numbers(loader: Loader, overrides: list[Override]) -> dict[str, str]:
    """How to quote options that Hydra takes for numbers: `precision='32'`, of a sweep `precision='32','64'`."""
    lines = [str(one.input_line) for one in overrides if loader.is_group(one.key_or_group)]
    quoted = {line: re.sub(r"(?<=[=,])\d+(?![^,])", r"'\g<0>'", line) for line in lines if "'" not in line}
    return {line: form for line, form in quoted.items() if form != line}


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
        return next((place for place, line in enumerate(lines) if fault.text.startswith(line)), len(lines))

    return sorted({fault.text: fault for fault in faults}.values(), key=place)
