"""Overrides of a command line, all of them checked together."""

from __future__ import annotations

import argparse
import copy
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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

from lightning_lockstep._application.values import Fault, TargetChecks, settings_of
from lightning_lockstep._doors.hydra_internals import Loader, get_args_parser
from lightning_lockstep._settings import did_you_mean, nearest
from lightning_lockstep._text import first_line, listed, say
from lightning_lockstep.launchers.hydra import freeze, inner_container

# -- Are the groups and the keys of the command line there? --

# A sweep is checked one value at a time; beyond this many values the rest is left to Hydra.
MOST_VARIANTS = 64
# What to add where a choice of these groups is missing: they come from packages of their own.
_PLUGINS = dict.fromkeys(
    ("hydra/launcher", "hydra/sweeper"),
    " More come with plugins of Hydra: pip install 'lightning-lockstep[sweeps]' brings joblib, submitit and optuna.",
)


@dataclass
class Composed:
    """What the overrides of one job lead to."""

    faults: list[Fault] = field(default_factory=list)
    config: DictConfig | None = None  # of those that are right, with its `hydra` node
    typed: dict[str, str] = field(default_factory=dict)  # the override as typed, by key
    # Groups whose wrong choice was replaced by the nearest one; faults in its files are not reported.
    guessed: list[str] = field(default_factory=list)

    def is_worth_a_check(self, faults: list[Fault]) -> bool:
        """Whether there is more to look at than the files of the configuration: an override without a fault."""
        wrong = tuple(fault.text for fault in faults)
        right = [line for line in self.typed.values() if not any(text.startswith(line) for text in wrong)]
        return bool(right) or not self.typed


def read_arguments(given: list[str]) -> argparse.Namespace:
    """Parse a command line as Hydra does; what its parser refuses is left among the overrides, for `preflight`."""
    arguments, refused = get_args_parser().parse_known_args(given)
    if refused:
        overrides = [*arguments.overrides, *refused]
        arguments.overrides = [word for word in given if word in overrides]
        # Hydra's parser will read them again, and takes overrides in one place only.
        sys.argv[1:] = [*arguments.overrides, *(word for word in given if word not in overrides)]
    return arguments


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
        if not override.is_sweep_override():
            values.append([str(override.input_line)])
        elif multirun and override.is_discrete_sweep():
            prefix = str(override.input_line).split("=", 1)[0]
            values.append([f"{prefix}={value}" for value in override.sweep_string_iterator()])
        elif multirun:
            values.append([])  # an interval: only the sweeper knows its values
        else:
            faults.append(
                Fault(
                    f"{override.input_line}: several values. Add -m to run a job for each,"
                    f" or write a list as {override.key_or_group}=[{override.get_value_string()}]."
                )
            )
    first = [options[0] for options in values if options]
    jobs = [first]
    for place, options in enumerate([options for options in values if options]):
        jobs += [[*first[:place], option, *first[place + 1 :]] for option in options[1:]]
    return jobs[:MOST_VARIANTS], faults


def compose_job(loader: Loader, lines: list[str]) -> Composed:
    """Compose one job from its overrides, with a fault for each that is wrong, and without those."""
    result = Composed()
    groups: list[str] = []
    keys: list[Override] = []
    lost: list[str] = []
    for override in OverridesParser.create().parse_overrides(lines):
        key = override.key_or_group
        result.typed[key] = str(override.input_line)
        if not loader.is_group(key) or isinstance(override.value(), dict):
            keys.append(override)
            continue
        usable, fault = _check_group(loader, override)
        if fault is not None:
            result.faults.append(fault)
            result.guessed.append(f"{key.replace('/', '.')}.")
        if usable is not None:
            groups.append(usable)
        else:
            lost.append(f"{key.replace('/', '.')}.")
    search_path = [str(o.input_line) for o in keys if o.key_or_group == "hydra.searchpath"]
    result.config, faults = _compose_groups(loader, groups, search_path)
    result.faults += faults
    if result.config is not None:
        # What a target takes says what can be added to it.
        for override in sorted(keys, key=lambda override: not override.key_or_group.endswith("_target_")):
            # The keys of a group whose choice is unknown cannot be judged.
            if not override.key_or_group.startswith(tuple(lost)):
                result.faults += _apply(loader, override, result.config)
    return result


def _check_group(loader: Loader, override: Override) -> tuple[str | None, Fault | None]:
    """The override to go on with (the nearest choice in place of a wrong one), and what is wrong with it."""
    group, line = override.key_or_group, str(override.input_line)
    value = override.value()
    if override.is_delete():
        return line, None
    known = loader.choices(group)
    if value is None:
        hint = did_you_mean("none", known) or f" ~{group} is none of them."
        return None, Fault(f"{line}: expected a choice of group {group!r}: {', '.join(known)}.{hint}")
    given = value if isinstance(value, list) else [value]
    wrong = [str(choice) for choice in given if not loader.is_choice(group, str(choice))]
    if not wrong:
        return _as_text(override, given), None
    text = "; ".join(
        f"group {group!r} has no choice {choice!r}.{_near_choice(loader, group, choice)}" for choice in wrong
    )
    fault = Fault(f"{line}: {text} It has: {', '.join(known)}.{_PLUGINS.get(group, '')}")
    nearby = [choice if str(choice) not in wrong else nearest(str(choice), known) for choice in given]
    if None in nearby:
        return None, fault
    return _as_text(override, nearby), fault


def _near_choice(loader: Loader, group: str, choice: str) -> str:
    """The choice that makes what was named by its class, in whichever group; or the nearest in this one."""
    made = {  # of several choices that make one class the first
        str(OmegaConf.select(config, key)).rpartition(".")[2]: (other, name)
        for other, name, config in reversed(list(loader.brought()))
        for key in _all_keys(config)
        if key.rpartition(".")[2] == "_target_"
    }
    other, name = made.get(choice, (group, None))
    if name is None:
        return did_you_mean(choice, loader.choices(group))
    return f" Did you mean {name!r}?" if other == group else f" Did you mean {f'{other}={name}'!r}?"


def _as_text(override: Override, choices: list[object]) -> str:
    key = str(override.input_line).split("=", 1)[0]
    quoted = [f"'{choice}'" for choice in choices]
    return f"{key}=[{','.join(quoted)}]" if isinstance(override.value(), list) else f"{key}={quoted[0]}"


def _compose_groups(
    loader: Loader, groups: list[str], always: list[str]
) -> tuple[DictConfig | None, list[Fault]]:
    """Compose with all group choices that work together, and one fault for each that does not."""
    try:
        return loader.compose(always + groups), []
    except (HydraException, OmegaConfBaseException, OSError):
        pass
    kept: list[str] = []
    faults: list[Fault] = []
    config: DictConfig | None = None
    try:
        config = loader.compose(always)
    except (HydraException, OmegaConfBaseException, OSError) as error:
        faults.append(Fault(_whole_message(error), error))
    for line in groups:
        try:
            config = loader.compose([*always, *kept, line])
            kept.append(line)
            if len(kept) == 1 and faults and faults[0].error is not None:
                faults.clear()  # the primary config needed this choice
        except (HydraException, OmegaConfBaseException, OSError) as error:  # noqa: PERF203
            if config is not None:
                bare, shown = line.lstrip("+"), line.replace(chr(39), "")
                try:
                    config = loader.compose([*always, *kept, bare])
                except (HydraException, OmegaConfBaseException, OSError):
                    faults.append(Fault(f"{shown}: {_whole_message(error)}", error))
                else:
                    kept.append(bare)
                    how = f"Write {shown.lstrip('+')}, which takes its place"
                    faults.append(Fault(f"{shown}: this group has a choice already. {how}.", error))
    return config, faults


def _whole_message(error: BaseException) -> str:
    """The texts of an exception and its causes, the first sentence of each."""
    parts: list[str] = []
    seen: BaseException | None = error
    while seen is not None:
        parts += [line.strip() for line in str(seen).splitlines() if line.strip()][:2]
        seen = seen.__cause__
    return " ".join(dict.fromkeys(parts))


def _apply(loader: Loader, override: Override, config: DictConfig) -> list[Fault]:
    key, line = override.key_or_group, override.input_line
    kept: object = config.get(key) if "." not in key else None
    names = [str(name) for name in kept] if isinstance(kept, DictConfig) else []
    if names and not override.is_delete() and not isinstance(override.value(), dict):
        how = f"Give a value to one of them, such as {key}.{names[0]}=..."
        return [Fault(f"{line}: {key!r} holds the keys {', '.join(names)}. {how}")]
    try:
        loader.apply(override, config)
    except (HydraException, OmegaConfBaseException) as error:
        if not (override.is_add() or override.is_force_add()):
            missing = _missing_key(loader, override, config)
            if missing is not None:
                return [Fault(f"{line}: {missing}", None)]
        return [Fault(f"{line}: {_whole_message(error)}", error)]
    return []


def _missing_key(loader: Loader, override: Override, config: DictConfig) -> str | None:
    """Which part of the key is not there and what is near, or `None` if it is there."""
    parts = _split(override.key_or_group)
    node: object = config
    for depth, part in enumerate(parts):
        if not isinstance(node, DictConfig) or part in node:
            node = OmegaConf.select(config, ".".join(parts[: depth + 1]), throw_on_missing=False)
            continue
        where = f"in {'.'.join(parts[:depth])!r}" if depth else "in the configuration"
        hint = ""
        settings = settings_of(node) if depth == len(parts) - 1 else None
        if not override.is_delete():
            if settings is not None and part in settings:
                return _setting_left_out(loader, override, part, config)
            names = [str(name) for name in node if not str(name).startswith("_")]
            if depth == 0:
                names = [*[name for name in names if name != "hydra"], *loader.groups()]
            keys = Keys(loader, config)
            same, near = keys.hint(override.key_or_group, near=False), did_you_mean(part, names)
            hint = (same or near) if depth == 0 or "choice" in same else (near or same)
            hint = hint or keys.hint(override.key_or_group)
            if not hint and settings is not None:
                hint = f" It has: {listed(names, 12)}."
            elif not hint and parts[0] in keys.components:
                hint = f" Choices of {parts[0]!r}: {', '.join(loader.choices(parts[0]))}."
            elif not hint:
                hint = f" A new key is added with +{override.input_line}"
        return f"there is no key {part!r} {where}.{hint}"
    return None


def _setting_left_out(loader: Loader, override: Override, name: str, config: DictConfig) -> str:
    """A setting that what is configured has, but not the config."""
    if OmegaConf.select(config, f"hydra.runtime.choices.{name}") is None:
        return f"not among the settings of this config; add it with +{override.input_line}"
    choice = nearest(override.get_value_string(), loader.choices(name)) or "..."
    return f"the group {name!r} decides this. Did you mean '{name}={choice}'?"


class Keys:
    """All keys, those in a configuration and those that a choice which is not taken would bring."""

    def __init__(self, loader: Loader, config: DictConfig) -> None:
        # a key -> the choice that brings it, where it is not there
        self._choices = dict.fromkeys(sorted(_all_keys(config), key=lambda key: key.count(".")), "")
        self.components = set()  # groups whose choices are made into objects
        for group, choice, content in loader.brought():
            for key in _all_keys(content):
                self._choices.setdefault(f"{group}.{key}", f"{group}={choice}")
                if key.endswith("_target_"):
                    self.components.add(group)

    def find(self, typed: str, *, near: bool = True) -> list[str]:
        """The keys most like one: but for case and signs, by the last part, by a near one; of one group first."""
        group, last = f"{_split(typed)[0]}.", _split(typed)[-1]
        ends = {key: _split(key)[-1] for key in self._choices}
        likely = [end for key, end in ends.items() if not self._choices[key] or key.startswith(group)]
        close = nearest(last, likely) if near else None
        ranked: dict[tuple[int, bool, bool], list[str]] = {}
        for key, end in ends.items():
            alike = [key == typed, _plain(key) == _plain(typed), end == last, end == close]
            if any(alike):
                rank = (alike.index(True), not key.startswith(group), bool(self._choices[key]))
                ranked.setdefault(rank, []).append(key)
        return ranked[min(ranked)] if ranked else []

    def hint(self, typed: str, *, near: bool = True) -> str:
        """Where such a key is to be had; as the end of a sentence."""
        found = self.find(typed, near=near)
        if not found:
            return ""
        choice = self._choices[found[0]]
        if not choice:
            return " Did you mean " + " or ".join(map(repr, found[:2])) + "?"
        meant = "" if found[0] == typed else f" Did you mean {found[0]!r}?"
        return f"{meant} It comes with the choice {choice}: give that too."


def _plain(key: str) -> str:
    return re.sub(r"[\W_]", "", key).lower()


def quote_numbers(loader: Loader, lines: list[str]) -> dict[str, str]:
    """Return, by the override as typed, how to quote a choice that Hydra takes for a number: `precision='32'`."""
    numbers = (re.fullmatch(r"(\+?)([\w/]+)=(\d+)", line) for line in lines)
    return {
        found[0]: f"{found[1]}{found[2]}='{found[3]}'"
        for found in numbers
        if found and loader.is_group(found[2])
    }


def _split(key: str) -> list[str]:
    return [part for part in re.split(r"[.\[\]]", key) if part]


def _all_keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in config:
        name = str(key)
        if name == "hydra" and not prefix:
            continue
        yield f"{prefix}{name}"
        node = inner_container(config, key)
        if isinstance(node, DictConfig):
            yield from _all_keys(node, f"{prefix}{name}.")


# -- All checks of a command line together, before anything is started --

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
    written = as_overrides(arguments.overrides)
    overrides, faults = parse([line for _, line in written])
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
    if any(typed != line for typed, line in written):
        written, more = _with_right_keys(loader, written)
        overrides, _ = parse([line for _, line in written])
        lines, faults = [str(override.input_line) for override in overrides], faults + more
    quoted = quote_numbers(loader, lines)
    overrides, _ = parse([quoted.get(line, line) for line in lines])
    jobs, sweep_faults = variants(overrides, multirun=arguments.multirun)
    faults += sweep_faults
    for number, job in enumerate(jobs):
        composed = compose_job(loader, job)
        faults += composed.faults
        if composed.config is not None and composed.is_worth_a_check(composed.faults):
            faults += check_job(composed, number, check)
            faults += [] if alone else _launcher_faults(composed.config)
    for typed, line in quoted.items():
        faults = [Fault(fault.text.replace(line, typed), fault.error) for fault in faults]
    return Checked(_in_order_typed(faults, [form for forms in written for form in forms]), quoted)


def _with_right_keys(
    loader: Loader, written: list[tuple[str, str]]
) -> tuple[list[tuple[str, str]], list[Fault]]:
    """Say of what is no `key=value` how it is written, and go on with that."""
    keys = Keys(loader, loader.compose([]))
    found, faults = [], []
    for typed, line in written:
        key, _, value = line.partition("=")
        if typed != line:
            meant = [key] if loader.is_group(key) else [*keys.find(key), key]
            line = f"{meant[0]}={value}"
            faults.append(Fault(f"{typed}: expected key=value. Did you mean {line!r}?"))
        found.append((typed, line))
    return found, faults


def check_job(composed: Composed, number: int, check: JobCheck | None) -> list[Fault]:
    """Check the values of one composed job."""
    assert composed.config is not None
    with _as_current_job(composed.config, number) as config:
        frozen = freeze(config)
        checks = TargetChecks(frozen, composed.typed)
        faults = checks.signature_faults()
        found = [*composed.faults, *faults]
        if check is not None and composed.is_worth_a_check(found):
            if found and "torch" not in sys.modules:
                say("lightning-lockstep: found a fault; importing torch and Lightning to check the rest ...")
            faults += check(frozen, checks)
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
