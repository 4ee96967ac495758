"""The configs that a command line chooses from, and what could be meant by a name that is not there."""

from __future__ import annotations

import argparse
import difflib
import re
import string
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

# Hydra offers no public way to look at a command line without running it: `hydra.compose` knows neither `--config-dir`
# nor the folder that a program's configs are relative to, nor which options a group has.
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import (
    create_automatic_config_search_path,
    detect_calling_file_or_module_from_task_function,
    detect_task_name,
)
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobRuntime
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override
from yaml import YAMLError

from lightning_lockstep._application.values import entries
from lightning_lockstep._settings import did_you_mean, nearest
from lightning_lockstep._text import listed
from lightning_lockstep.launchers.hydra import inner_container


def search_path_of(
    program: Callable[..., Any], config_path: str | None, arguments: argparse.Namespace
) -> ConfigSearchPath:
    """Where Hydra looks for the configs of `program`; with `--config-path` and `--config-dir`."""
    file, module = detect_calling_file_or_module_from_task_function(program)
    JobRuntime.instance().set("name", detect_task_name(file, module))  # a part of the name of the run folder
    path: ConfigSearchPath = create_automatic_config_search_path(
        file, module, arguments.config_path or config_path
    )
    if arguments.config_dir is not None:
        folder = f"file://{Path(arguments.config_dir).absolute()}"
        path.prepend(provider="command-line", path=folder, anchor=SearchPathQuery(provider="schema"))
    return path


class Loader:
    """Looks at groups, keys and options and composes configurations, for one command line."""

    def __init__(self, search_path: ConfigSearchPath, config_name: str | None, overrides: list[str]) -> None:
        self.config_name = config_name
        self._loader = ConfigLoaderImpl(search_path)
        self._loader.ensure_main_config_source_available()
        # The only place where Hydra applies hydra.searchpath to the groups that it knows.
        self._repository = self._loader._parse_overrides_and_create_caching_repo(config_name, overrides)[1]

    def is_group(self, name: str) -> bool:
        """Whether there is a config group of this name."""
        return bool(self._repository.group_exists(name))

    def is_choice(self, group: str, choice: str) -> bool:
        """Whether `group` has this option; the group `""` holds the primary configs."""
        return bool(self._repository.config_exists(f"{group}/{choice}" if group else choice))

    def choices(self, group: str) -> list[str]:
        """The options of a group, or with `""` the primary configs."""
        return [name for name in self._repository.get_group_options(group) if not name.startswith("_")]

    def groups(self) -> list[str]:
        """The groups on the first level."""
        names = self._repository.get_group_options("", results_filter=ObjectType.GROUP)
        return [name for name in names if not name.startswith("_")]

    def compose(self, overrides: list[str]) -> DictConfig:
        """Compose the configuration of one job, with its `hydra` node."""
        config: DictConfig = self._loader.load_configuration(
            config_name=self.config_name, overrides=overrides, run_mode=RunMode.RUN, from_shell=True
        )
        return config

    def help(self, program: str, overrides: list[str]) -> str:
        """Return what `--help` prints by the program's `hydra.help.template`: groups, and the files of a job."""
        config = self.compose(overrides)
        if config.hydra.help.app_name == config.hydra.job.name:
            with flag_override(config.hydra, ["readonly", "struct"], [False, False]):
                config.hydra.help.app_name = program
        choices = {group: self.choices(group) for group in self.groups() if group != "hydra"}
        groups, files = [f"{group}: {', '.join(names)}" for group, names in choices.items() if names], []
        for part in self._loader.compute_defaults_list(self.config_name, overrides, RunMode.RUN).defaults:
            path = part.config_path
            loaded = None if path is None or path.startswith("hydra/") else self._repository.load_config(path)
            if loaded is None:
                continue
            source = loaded.path
            folder: Any = resources.files(source[6:]) if source.startswith("pkg://") else Path(source[7:])
            file = folder.joinpath(f"{path}.yaml")
            if file.is_file():  # not so what a program has put into Hydra's ConfigStore
                files.append(
                    f"## {path}.yaml, below {part.package or 'no key'}\n{_keys_of(file.read_text('utf-8'))}"
                )
        template = string.Template(str(config.hydra.help.template))
        return template.safe_substitute(APP_CONFIG_GROUPS="\n".join(groups), CONFIG="\n\n".join(files)) + "\n"

    # -- What could be meant by a name that is not there --

    @cached_property
    def _brought(self) -> dict[str, str]:
        """Each key that an option of a group would bring below the key of that group, with the option."""
        found: dict[str, str] = {}
        for group in self.groups():
            for choice in self.choices(group) if group != "hydra" else ():
                loaded = None
                with suppress(YAMLError):  # an error only if it is used
                    loaded = self._repository.load_config(f"{group}/{choice}")
                if loaded is not None and (loaded.header.get("package") or group) == group:
                    content: Any = loaded.config
                    for key in _names_in(content):
                        found.setdefault(f"{group}.{key}", f"{group}={choice}")
        return found

    def missing(self, override: Override, config: DictConfig) -> str | None:
        """Which part of the key of an override is not there and what is near, or `None` if it is there."""
        parts = parts_of(override.key_or_group)
        node: object = config
        for depth, part in enumerate(parts):
            if isinstance(node, DictConfig) and part not in node:
                where = f"in {'.'.join(parts[:depth])!r}" if depth else "in the configuration"
                text = f"there is no key {part!r} {where}."
                if override.is_delete():
                    return text
                names = [
                    str(key) for key in node if not str(key).startswith("_") and (depth or key != "hydra")
                ]
                there = f" It has: {listed(names, 12)}." if depth == len(parts) - 1 > 0 else ""
                hint = self._near(parts, names if depth else [*names, *self.groups()], config)
                return text + (hint or f"{there} A new key is added with +{override.input_line}")
            node = OmegaConf.select(config, ".".join(parts[: depth + 1]), throw_on_missing=False)
        return None

    def nearly_named(self, new: str, config: DictConfig) -> str | None:
        """A group, or a key on the first level with others below it, whose name is nearly that of a new key."""
        names = {str(key) for key in config if inner_container(config, key) is not None}
        near = difflib.get_close_matches(new, (names | set(self.groups())) - {new}, n=1, cutoff=0.8)
        return next(iter(near), None)

    def _near(self, typed: list[str], names: list[str], config: DictConfig) -> str:
        """What a key can mean that is not there, as the end of a sentence; names: those beside the wrong part."""
        group, last = f"{typed[0]}.", typed[-1].rpartition("/")[2]
        known = dict.fromkeys(_names_in(config), "")
        # A typing error in one of the keys beside it: the files of other options are not read for that.
        if difflib.get_close_matches(last, names, n=1, cutoff=0.8) and not any(
            parts_of(key)[-1] == last for key in known
        ):
            return did_you_mean(last, names)
        # A class of the user has its own settings, whatever the options of the group bring.
        if OmegaConf.select(config, f"hydra.runtime.choices.{typed[0]}") != "own":
            known = self._brought | known
        # The very key first; those that are there before those that an option brings; those of the same group.
        order = sorted(
            known,
            key=lambda key: (
                key != ".".join(typed),
                bool(known[key]),
                not key.startswith(group),
                key.count("."),
            ),
        )
        found = [key for key in order if parts_of(key)[-1] == last]
        if not found and (near := did_you_mean(last, names)):
            return near
        if not found:
            likely = [key for key in order if not known[key] or key.startswith(group)]
            end = nearest(last, [parts_of(key)[-1] for key in likely])
            found = [key for key in likely if parts_of(key)[-1] == end]
        if not found:
            return ""
        if option := known[found[0]]:
            meant = "" if found[0] == ".".join(typed) else f" Did you mean {found[0]!r}?"
            return f"{meant} It comes with the option {option}: give that too."
        return " Did you mean " + " or ".join(map(repr, [key for key in found if not known[key]][:2])) + "?"


def _names_in(config: DictConfig) -> list[str]:
    """The whole keys in a configuration, those of lists left out."""
    return [key for key, where, _ in entries(config) if isinstance(where, DictConfig)]


def _keys_of(text: str) -> str:
    """The keys of a config file with their comments, without Hydra's part and the list of defaults."""
    text = re.sub(r"^(defaults|hydra):.*\n((?: .*)?\n)*", "", f"{text}\n", flags=re.MULTILINE)
    return re.sub(r"^# @package.*\n", "", text).strip()


def parts_of(key: str) -> list[str]:
    return [part for part in re.split(r"[.\[\]]", key) if part]
