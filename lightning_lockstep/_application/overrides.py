"""Overrides of a command line, all of them checked together."""

from __future__ import annotations

import argparse
import copy
import re
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
from lightning_lockstep._doors.hydra_internals import Loader
from lightning_lockstep._settings import did_you_mean, nearest
from lightning_lockstep._text import first_line
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
            why = first_line(error)
            faults.append(
                Fault(
                    f"{line!r} cannot be read as key=value ({why})."
                    " Quote special characters: \"key='a, b'\".",
                    error,
                )
            )
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
        for override in keys:
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
    if value is None:
        names = ", ".join(loader.choices(group))
        return None, Fault(
            f"{line}: expected a choice of group {group!r}: {names}; or ~{group}, for none of them."
        )
    given = value if isinstance(value, list) else [value]
    wrong = [str(choice) for choice in given if not loader.is_choice(group, str(choice))]
    if not wrong:
        return _as_text(override, given), None
    known = loader.choices(group)
    text = "; ".join(
        f"group {group!r} has no choice {choice!r}.{did_you_mean(choice, known)}" for choice in wrong
    )
    fault = Fault(f"{line}: {text} It has: {', '.join(known)}.{_PLUGINS.get(group, '')}")
    nearby = [choice if str(choice) not in wrong else nearest(str(choice), known) for choice in given]
    if None in nearby:
        return None, fault
    return _as_text(override, nearby), fault


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
                faults.append(Fault(f"{line.replace(chr(39), '')}: {_whole_message(error)}", error))
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
    try:
        loader.apply(override, config)
    except (HydraException, OmegaConfBaseException) as error:
        if not (override.is_add() or override.is_force_add()):
            missing = _missing_key(loader, override, config)
            if missing is not None:
                return [Fault(f"{override.input_line}: {missing}", None)]
        return [Fault(f"{override.input_line}: {_whole_message(error)}", error)]
    return []


def _missing_key(loader: Loader, override: Override, config: DictConfig) -> str | None:
    """Which part of the key is not there and what is near, or `None` if it is there."""
    parts = _split(override.key_or_group)
    node: object = config
    for depth, part in enumerate(parts):
        if not isinstance(node, DictConfig) or part in node:
            node = OmegaConf.select(config, ".".join(parts[: depth + 1]), throw_on_missing=False)
            continue
        names = [str(name) for name in node if not str(name).startswith("_")]
        if depth == 0:
            names = [*[name for name in names if name != "hydra"], *loader.groups()]
        last = parts[-1]
        elsewhere = [key for key in _all_keys(config) if key.rsplit(".", 1)[-1] == last]
        hint = did_you_mean(part, names)
        if not hint and elsewhere:
            hint = " Did you mean " + " or ".join(repr(key) for key in elsewhere[:2]) + "?"
        where = f"in {'.'.join(parts[:depth])!r}" if depth else "in the configuration"
        sentence = f"there is no key {part!r} {where}.{hint}"
        if override.is_delete():
            return sentence
        settings = settings_of(node) if depth == len(parts) - 1 else None
        if settings is not None and part in settings:
            return f"not among the settings of this config; add it with +{override.input_line}"
        if not hint and settings is None:
            sentence += f" A new key is added with +{override.input_line}"
        return sentence
    return None


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
