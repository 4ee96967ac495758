"""The one door to what Hydra keeps private, each name with its reason.

Hydra offers no public way to look at a command line without running it: `hydra.compose` stops at the first
wrong override, and knows neither `--config-dir` nor the folder that a program's configs are relative to.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Applies one override to a composed configuration, so that a fault can be attributed to one of them.
from hydra._internal.config_loader_impl import ConfigLoaderImpl

# The flags that every Hydra program understands, the folder of a program's own configs, and the search for
# a `_target_`; the public `hydra.utils.get_object` does the same but logs each failure as an error.
from hydra._internal.utils import (
    _locate,
    create_automatic_config_search_path,
    detect_calling_file_or_module_from_task_function,
    detect_task_name,
    get_args_parser,
)
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

# Configures logging from a finished configuration, as Hydra's own rerun does.
from hydra.core.utils import JobRuntime, _flush_loggers, configure_log, env_override, setup_globals
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

if TYPE_CHECKING:
    from importlib.abc import Traversable

__all__ = [
    "HydraConfig",
    "HydraException",
    "Loader",
    "Override",
    "OverridesParser",
    "RunMode",
    "configure_log",
    "env_override",
    "flush_loggers",
    "get_args_parser",
    "locate",
    "search_path_of",
    "setup_globals",
]

flush_loggers = _flush_loggers
locate = _locate


def search_path_of(
    program: Callable[..., Any], config_path: str | None, arguments: argparse.Namespace
) -> ConfigSearchPath:
    """Where Hydra looks for the configs of `program`; with `--config-path` and `--config-dir`.

    Also sets the program's name, which is part of the name of the run folder.
    """
    file, module = detect_calling_file_or_module_from_task_function(program)
    JobRuntime.instance().set("name", detect_task_name(file, module))
    path = create_automatic_config_search_path(file, module, arguments.config_path or config_path)
    if arguments.config_dir is not None:
        path.prepend(
            provider="command-line",
            path=f"file://{Path(arguments.config_dir).absolute()}",
            anchor=SearchPathQuery(provider="schema"),
        )
    return path


class Loader:
    """Looks at groups and composes configurations, for one command line."""

    def __init__(self, search_path: ConfigSearchPath, config_name: str | None, overrides: list[str]) -> None:
        self.config_name = config_name
        # overrides: those that can be parsed; one of them may extend the search path
        self._loader = ConfigLoaderImpl(search_path)
        self._loader.ensure_main_config_source_available()
        # The only place where Hydra applies `hydra.searchpath` to the groups it knows.
        _, self._repository = self._loader._parse_overrides_and_create_caching_repo(config_name, overrides)

    def is_group(self, name: str) -> bool:
        return bool(self._repository.group_exists(name))

    def is_choice(self, group: str, choice: str) -> bool:
        """Whether `group` has this choice; the group `""` holds the primary configs."""
        return bool(self._repository.config_exists(f"{group}/{choice}" if group else choice))

    def choices(self, group: str) -> list[str]:
        """The choices of a group, or with `""` the primary configs."""
        return [name for name in self._repository.get_group_options(group) if not name.startswith("_")]

    def groups(self) -> list[str]:
        """The groups on the first level."""
        from hydra.core.object_type import ObjectType

        names = self._repository.get_group_options("", results_filter=ObjectType.GROUP)
        return [name for name in names if not name.startswith("_")]

    def compose(self, overrides: list[str]) -> DictConfig:
        """Compose the configuration of one job, with its `hydra` node."""
        config: DictConfig = self._loader.load_configuration(
            config_name=self.config_name, overrides=overrides, run_mode=RunMode.RUN, from_shell=True
        )
        return config

    def files(self, overrides: list[str]) -> list[tuple[str, str, str]]:
        """Name (`group/choice`), text and package of each config file of a job, in the order of composition."""
        found = []
        for part in self._loader.compute_defaults_list(self.config_name, overrides, RunMode.RUN).defaults:
            path = part.config_path
            if path is None or path.startswith("hydra/"):
                continue
            loaded = self._repository.load_config(path)
            assert loaded is not None  # it is part of what was composed
            source = loaded.path
            folder: Traversable = (
                resources.files(source[6:]) if source.startswith("pkg://") else Path(source[7:])
            )
            file = folder.joinpath(f"{path}.yaml")
            if file.is_file():  # not so what a program has put into Hydra's ConfigStore
                found.append((path, file.read_text(encoding="utf-8"), part.package or ""))
        return found

    @staticmethod
    def apply(override: Override, config: DictConfig) -> None:
        ConfigLoaderImpl._apply_overrides_to_config([override], config)
