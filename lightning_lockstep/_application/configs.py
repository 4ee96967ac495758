"""The configs that a command line chooses from, and what could be meant by a name that is not there."""

from __future__ import annotations

import argparse
import re
import string
from collections.abc import Callable
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

from lightning_lockstep._application.signatures import entries, parts_of, unset_settings
from lightning_lockstep._settings import did_you_mean, nearest
from lightning_lockstep._text import listed

# Groups whose options bring a key of their own name.
_WITH_OWN_KEYS = ("callbacks", "checkpoint", "logger")


def search_path_of(
    program: Callable[..., Any], config_path: str | None, arguments: argparse.Namespace
) -> ConfigSearchPath:
    """Where Hydra looks for the configs of `program`; with `--config-path` and `--config-dir`."""
    file, module = detect_calling_file_or_module_from_task_function(program)
    JobRuntime.instance().set("name", detect_task_name(file, module))  # a part of the name of the run folder
    path: ConfigSearchPath = create_automatic_config_search_path(file, module, arguments.config_path or config_path)
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
        return bool(self._repository.group_exists(name))

    def is_choice(self, group: str, choice: str) -> bool:
        """Whether `group` has this option; the group `""` holds the primary configs."""
        return bool(self._repository.config_exists(f"{group}/{choice}" if group else choice))

    def choices(self, group: str, kind: ObjectType = ObjectType.CONFIG) -> list[str]:
        """The options of a group, or with `""` the primary configs."""
        names = self._repository.get_group_options(group, results_filter=kind)
        return [name for name in names if not name.startswith("_")]

    def groups(self) -> list[str]:
        return self.choices("", ObjectType.GROUP)

    def compose(self, overrides: list[str]) -> DictConfig:
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
            if part.config_path is not None and not part.config_path.startswith("hydra/"):
                files += self._file(part.config_path, f", below {part.package or 'no key'}")
        template = string.Template(str(config.hydra.help.template))
        return template.safe_substitute(APP_CONFIG_GROUPS="\n".join(groups), CONFIG="\n\n".join(files)) + "\n"

    def help_of(self, group: str) -> str:
        if not self.choices(group):
            known = [name for name in self.groups() if name != "hydra" and self.choices(name)]
            there_are = f"{did_you_mean(group, known)} There are: {', '.join(known)}."
            raise ValueError(f"--help {group}: there is no such group.{there_are}")
        files = [text for name in self.choices(group) for text in self._file(f"{group}/{name}")]
        return "\n\n".join(files) + "\n"

    def _file(self, path: str, below: str = "") -> list[str]:
        """The keys of a config with their comments; nothing of what a program has put into Hydra's ConfigStore."""
        loaded = self._repository.load_config(path)
        if loaded is None or "://" not in loaded.path:
            return []
        source = loaded.path
        folder: Any = resources.files(source[6:]) if source.startswith("pkg://") else Path(source[7:])
        file = folder.joinpath(f"{path}.yaml")
        return [f"## {path}.yaml{below}\n{_keys_of(file.read_text('utf-8'))}"] if file.is_file() else []

    # -- What could be meant by a key that is not there --

    def missing(self, override: Override, config: DictConfig) -> str | None:
        """Which part of the key of an override is not there and what can be meant, or `None` if it is there."""
        parts = parts_of(override.key_or_group)
        for depth, part in enumerate(parts):
            above = ".".join(parts[:depth])
            node = OmegaConf.select(config, above, throw_on_missing=False) if depth else config
            if isinstance(node, DictConfig) and part not in node:
                text = f"there is no key {part!r} in {repr(above) if depth else 'the configuration'}."
                return text if override.is_delete() else text + self._meant(override, depth, node, config)
        return None

    def _meant(self, override: Override, depth: int, node: DictConfig, config: DictConfig) -> str:
        """What can be meant by a key whose part at `depth` is not in `node`, as the end of a sentence."""
        parts = parts_of(override.key_or_group)
        last, unset = parts[-1].rpartition("/")[2], unset_settings(node)
        if depth == 1 and parts[0] in _WITH_OWN_KEYS and self.is_choice(parts[0], parts[1]):
            return f" It comes with the option {parts[0]}={parts[1]}, which was not chosen."
        beside = [str(key) for key in node if not str(key).startswith("_") and (depth or key != "hydra")]
        beside += unset if depth else self.groups()
        if last not in unset:
            keys = [key for key, where, _ in entries(config) if isinstance(where, DictConfig)]
            keys.sort(key=lambda key: key.count("."))
            names = [key.rpartition(".")[2] for key in keys]
            if last not in names and (meant := did_you_mean(last, beside)):
                return meant
            near = [last] if last in names else nearest(last, names, most=1)
            if found := [key for key, name in zip(keys, names, strict=True) if name in near]:
                return f" Did you mean {' or '.join(map(repr, found[:2]))}?"
        has = f" It has: {listed(beside, 12)}." if depth == len(parts) - 1 > 0 else ""
        return f"{has} A new key is added with {'+' if depth else '++'}{override.input_line}"


def _keys_of(text: str) -> str:
    """The keys of a config file with their comments, without Hydra's part and the list of defaults."""
    text = re.sub(r"^(defaults|hydra):.*\n((?: .*)?\n)*", "", f"{text}\n", flags=re.MULTILINE)
    return re.sub(r"^# @package.*\n", "", text).strip()
