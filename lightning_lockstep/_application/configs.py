"""The configs that a command line chooses from, and what could be meant by a name that is not there."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
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
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from lightning_lockstep._application.values import entries
from lightning_lockstep._settings import did_you_mean, nearest
from lightning_lockstep._text import listed

# The configs of this package, whose options its own tests have made.
_OURS = "pkg://lightning_lockstep.conf"


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
    """Looks at groups and composes configurations, for one command line."""

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

    def is_ours(self, group: str, choice: str) -> bool:
        """Whether an option is one of this package."""
        loaded = self._repository.load_config(f"{group}/{choice}")
        return loaded is not None and loaded.path == _OURS

    def choices(self, group: str) -> list[str]:
        """The options of a group, or with `""` the primary configs."""
        return [name for name in self._repository.get_group_options(group) if not name.startswith("_")]

    def groups(self) -> list[str]:
        """The groups on the first level."""
        names = self._repository.get_group_options("", results_filter=ObjectType.GROUP)
        return [name for name in names if not name.startswith("_")]

    def brought(self) -> Iterator[tuple[str, str, DictConfig]]:
        """Group, option and content of each config that is put below the key of its group."""
        for group in self.groups():
            for choice in self.choices(group) if group != "hydra" else ():
                loaded = None
                with suppress(YAMLError):  # an error only where it is taken
                    loaded = self._repository.load_config(f"{group}/{choice}")
                if loaded is not None and (loaded.header.get("package") or group) == group:
                    content: Any = loaded.config
                    yield group, choice, content

    def compose(self, overrides: list[str]) -> DictConfig:
        """Compose the configuration of one job, with its `hydra` node."""
        config: DictConfig = self._loader.load_configuration(
            config_name=self.config_name, overrides=overrides, run_mode=RunMode.RUN, from_shell=True
        )
        return config

    def files(self, overrides: list[str]) -> list[tuple[str, str, str]]:
        """Name (`group/option`), text and package of each config file of a job, in the order of composition."""
        found = []
        for part in self._loader.compute_defaults_list(self.config_name, overrides, RunMode.RUN).defaults:
            path = part.config_path
            if path is None or path.startswith("hydra/"):
                continue
            loaded = self._repository.load_config(path)
            assert loaded is not None  # it is part of what was composed
            source = loaded.path
            folder: Any = resources.files(source[6:]) if source.startswith("pkg://") else Path(source[7:])
            file = folder.joinpath(f"{path}.yaml")
            if file.is_file():  # not so what a program has put into Hydra's ConfigStore
                found.append((path, file.read_text(encoding="utf-8"), part.package or ""))
        return found


# -- What could be meant by a name that is not there --


class Names:
    """All keys, those in a configuration and those that an option not selected would bring, and all options."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    @cached_property
    def _brought(self) -> list[tuple[str, str, str, str]]:
        """Each key that an option brings, its group, the option, and the class if it names one."""
        return [
            (
                f"{group}.{key}",
                group,
                choice,
                str(where.get(name)).rpartition(".")[2] if name == "_target_" else "",
            )
            for group, choice, content in self.loader.brought()
            for key, where, name in entries(content)
            if isinstance(where, DictConfig)
        ]

    def _find(self, typed: str, config: DictConfig, *, near: bool) -> dict[str, str]:
        """The keys most like one, each with the option that brings it, empty where it is there."""
        # But for case and signs, by the last part, by a near one; those of one group first.
        present = [key for key, where, _ in entries(config) if isinstance(where, DictConfig)]
        choices = dict.fromkeys(sorted(present, key=lambda key: key.count(".")), "")
        for key, group, choice, _ in self._brought:
            choices.setdefault(key, f"{group}={choice}")
        group, last = f"{parts_of(typed)[0]}.", parts_of(typed)[-1]
        ends = {key: parts_of(key)[-1] for key in choices}
        likely = [end for key, end in ends.items() if not choices[key] or key.startswith(group)]
        close = nearest(last, likely) if near else None
        ranked: dict[tuple[int, bool, bool], dict[str, str]] = {}
        for key, end in ends.items():
            alike = [key == typed, _plain(key) == _plain(typed), end == last, end == close]
            if any(alike):
                rank = (alike.index(True), not key.startswith(group), bool(choices[key]))
                ranked.setdefault(rank, {})[key] = choices[key]
        return ranked[min(ranked)] if ranked else {}

    def _hint(self, typed: str, config: DictConfig, *, near: bool = True) -> str:
        """Where such a key is to be had; as the end of a sentence."""
        found = self._find(typed, config, near=near)
        if not found:
            return ""
        key, choice = next(iter(found.items()))
        if not choice:
            return " Did you mean " + " or ".join(map(repr, list(found)[:2])) + "?"
        meant = "" if key == typed else f" Did you mean {key!r}?"
        return f"{meant} It comes with the option {choice}: give that too."

    def near_choice(self, group: str, choice: str) -> str:
        """The option that makes what was named by its class, in whichever group; or the nearest in this one."""
        is_class = choice != choice.lower()  # else the files of all options need not be read
        for _, other, name, made in self._brought if is_class else ():
            if made == choice:
                return f" Did you mean {name if other == group else f'{other}={name}'!r}?"
        return did_you_mean(choice, self.loader.choices(group))

    def missing(self, override: Override, config: DictConfig) -> str | None:
        """Which part of the key of an override is not there and what is near, or `None` if it is there."""
        parts = parts_of(override.key_or_group)
        node: object = config
        for depth, part in enumerate(parts):
            if isinstance(node, DictConfig) and part not in node:
                where = f"in {'.'.join(parts[:depth])!r}" if depth else "in the configuration"
                hint = (
                    "" if override.is_delete() else self._instead(override, parts[: depth + 1], node, config)
                )
                return hint if hint.startswith("the group") else f"there is no key {part!r} {where}.{hint}"
            node = OmegaConf.select(config, ".".join(parts[: depth + 1]), throw_on_missing=False)
        return None

    def _instead(self, override: Override, parts: list[str], node: DictConfig, config: DictConfig) -> str:
        """What an override can be instead that names no key of a node."""
        typed, name, groups = override.key_or_group, parts[-1], self.loader.groups()
        if parts[:-1] == ["trainer"] and name in groups:
            choice = nearest(override.get_value_string(), self.loader.choices(name)) or "..."
            return f"the group {name!r} decides this. Did you mean '{name}={choice}'?"
        is_top = len(parts) == 1
        names = [str(key) for key in node if not str(key).startswith("_") and not (is_top and key == "hydra")]
        same = self._hint(typed, config, near=False)
        near = did_you_mean(name, [*names, *groups] if is_top else names)
        if hint := same or near or self._hint(typed, config):
            return hint
        if any(made for _, group, _, made in self._brought if group == name):
            return f" Options of {name!r}: {', '.join(self.loader.choices(name))}."
        there = f" It has: {listed(names, 12)}." if names and typed == ".".join(parts) and not is_top else ""
        return f"{there} A new key is added with +{override.input_line}"


def _plain(key: str) -> str:
    return re.sub(r"[\W_]", "", key).lower()


def parts_of(key: str) -> list[str]:
    return [part for part in re.split(r"[.\[\]]", key) if part]
