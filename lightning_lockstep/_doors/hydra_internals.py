"""The one door to what Hydra and OmegaConf keep private, each name with its reason.

Hydra offers no public way to look at a command line without running it: `hydra.compose` stops at the first
wrong override, and knows neither `--config-dir` nor the folder that a program's configs are relative to.
Neither is imported before something of it is asked for.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib import resources
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from lightning_lockstep._doors import Door

if TYPE_CHECKING:
    from importlib.abc import Traversable

    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig


_UTILS = "hydra._internal.utils"
_LOADER = "hydra._internal.config_loader_impl.ConfigLoaderImpl"
_REPOSITORY = "hydra._internal.config_repository.ConfigRepository"
_WHY_SEARCH_PATH = "the folder of a program's own configs, and its name, found as a run of Hydra finds them"
_WHY_REPOSITORY = "which groups, options and files a command line can choose from"

HYDRA = Door(
    "hydra-core",
    {
        _LOADER: "composes a configuration without a run, step by step",
        f"{_UTILS}.get_args_parser": "the flags that every Hydra program understands",
        f"{_UTILS}.detect_calling_file_or_module_from_task_function": _WHY_SEARCH_PATH,
        f"{_UTILS}.detect_task_name": _WHY_SEARCH_PATH,
        f"{_UTILS}.create_automatic_config_search_path": _WHY_SEARCH_PATH,
        f"{_UTILS}._locate": "finds a _target_; the public hydra.utils.get_object logs each failure as an error",
        "hydra.core.utils._flush_loggers": "what a job has logged is written when it ends, as Hydra's own run does",
    },
)
OMEGACONF = Door("omegaconf")

# -- the application: command line --


def get_args_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags of every Hydra program."""
    parser: argparse.ArgumentParser = HYDRA.find(f"{_UTILS}.get_args_parser")()
    return parser


def search_path_of(
    program: Callable[..., Any], config_path: str | None, arguments: argparse.Namespace
) -> ConfigSearchPath:
    """Where Hydra looks for the configs of `program`; with `--config-path` and `--config-dir`."""
    # Also sets the program's name, which is part of the name of the run folder.
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.utils import JobRuntime

    file, module = HYDRA.find(f"{_UTILS}.detect_calling_file_or_module_from_task_function")(program)
    JobRuntime.instance().set("name", HYDRA.find(f"{_UTILS}.detect_task_name")(file, module))
    path: ConfigSearchPath = HYDRA.find(f"{_UTILS}.create_automatic_config_search_path")(
        file, module, arguments.config_path or config_path
    )
    if arguments.config_dir is not None:
        path.prepend(
            provider="command-line",
            path=f"file://{Path(arguments.config_dir).absolute()}",
            anchor=SearchPathQuery(provider="schema"),
        )
    return path


@cache
def _locate() -> Callable[[str], Any]:
    found: Callable[[str], Any] = HYDRA.find(f"{_UTILS}._locate")
    return found


def locate(path: str) -> Any:
    """Return what a `_target_` names."""
    return _locate()(path)


class Loader:
    """Looks at groups and composes configurations, for one command line."""

    def __init__(self, search_path: ConfigSearchPath, config_name: str | None, overrides: list[str]) -> None:
        self.config_name = config_name
        self._loader = HYDRA.find(_LOADER)(search_path)
        self._loader.ensure_main_config_source_available()
        self._repository = _repository(self._loader, config_name, overrides)

    @HYDRA.touches(f"{_REPOSITORY}.group_exists", why=_WHY_REPOSITORY)
    def is_group(self, name: str) -> bool:
        """Whether there is a config group of this name."""
        return bool(self._repository.group_exists(name))

    @HYDRA.touches(f"{_REPOSITORY}.config_exists", why=_WHY_REPOSITORY)
    def is_choice(self, group: str, choice: str) -> bool:
        """Whether `group` has this option; the group `""` holds the primary configs."""
        return bool(self._repository.config_exists(f"{group}/{choice}" if group else choice))

    @HYDRA.touches(f"{_REPOSITORY}.get_group_options", why=_WHY_REPOSITORY)
    def choices(self, group: str) -> list[str]:
        """The options of a group, or with `""` the primary configs."""
        return [name for name in self._repository.get_group_options(group) if not name.startswith("_")]

    def groups(self) -> list[str]:
        """The groups on the first level."""
        from hydra.core.object_type import ObjectType

        names = self._repository.get_group_options("", results_filter=ObjectType.GROUP)
        return [name for name in names if not name.startswith("_")]

    @HYDRA.touches(f"{_REPOSITORY}.load_config", why=_WHY_REPOSITORY)
    def brought(self) -> Iterator[tuple[str, str, DictConfig]]:
        """Group, option and content of each config that is put below the key of its group."""
        from yaml import YAMLError

        for group in self.groups():
            for choice in self.choices(group) if group != "hydra" else ():
                loaded = None
                with suppress(YAMLError):  # an error only where it is taken
                    loaded = self._repository.load_config(f"{group}/{choice}")
                if loaded is not None and (loaded.header.get("package") or group) == group:
                    yield group, choice, loaded.config

    def compose(self, overrides: list[str]) -> DictConfig:
        """Compose the configuration of one job, with its `hydra` node."""
        from hydra.types import RunMode

        config: DictConfig = self._loader.load_configuration(
            config_name=self.config_name, overrides=overrides, run_mode=RunMode.RUN, from_shell=True
        )
        return config

    @HYDRA.touches(f"{_REPOSITORY}.load_config", why=_WHY_REPOSITORY)
    def files(self, overrides: list[str]) -> list[tuple[str, str, str]]:
        """Name (`group/option`), text and package of each config file of a job, in the order of composition."""
        from hydra.types import RunMode

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
        """Apply the override of one key to a composed configuration."""
        _apply([override], config)


@HYDRA.touches(
    f"{_LOADER}._parse_overrides_and_create_caching_repo",
    why="the only place where Hydra applies hydra.searchpath to the groups it knows",
)
def _repository(loader: Any, config_name: str | None, overrides: list[str]) -> Any:
    return loader._parse_overrides_and_create_caching_repo(config_name, overrides)[1]


@HYDRA.touches(
    f"{_LOADER}._apply_overrides_to_config",
    why="applies one override to a composed configuration, so that an error can be attributed to one of them",
)
def _apply(overrides: list[Override], config: DictConfig) -> None:
    HYDRA.find(_LOADER)._apply_overrides_to_config(overrides, config)


def flush_loggers() -> None:
    """Write what has been logged."""
    HYDRA.find("hydra.core.utils._flush_loggers")()


# -- the application: what is in a configuration --


@OMEGACONF.touches(
    "omegaconf.base.Container._get_node",
    why="the node under a key as it is written; the public ways resolve an interpolation, and lose a node's type",
)
def node_at(container: Any, key: Any) -> Any:
    """Return the node under a key, whatever is in it."""
    return container._get_node(key)


@OMEGACONF.touches("omegaconf.base.Node._value", why="a value or an interpolation as it is written")
def plain_value(node: Any) -> Any:
    """Return what is written in a node; anything else as it is."""
    return node._value() if hasattr(node, "_value") else node


# -- launchers --


@OMEGACONF.touches(
    "omegaconf.base.Node._get_parent",
    why="Hydra keeps the program's part as the hidden parent of its part, for interpolations between the two",
)
def whole_config(hydra_part: Any) -> DictConfig:
    """Return the configuration of a job, the program's part and Hydra's own, of which this is Hydra's."""
    whole: DictConfig = hydra_part._get_parent()
    return whole


_WHY_IN_PLACE = "one interpolation is replaced, types are kept; OmegaConf.resolve takes all of them or raises"


@OMEGACONF.touches(
    "omegaconf.base.Node._dereference_node",
    "omegaconf.base.Node._set_parent",
    "omegaconf.base.Node._set_value",
    "omegaconf.base.Box._content",
    why=_WHY_IN_PLACE,
)
def put_value(container: Any, key: Any) -> None:
    """Put the value of the interpolation under a key in its place; one without a value stays as it is."""
    from omegaconf import Container
    from omegaconf.errors import OmegaConfBaseException

    node = node_at(container, key)
    try:
        value = node._dereference_node()
    except OmegaConfBaseException:
        return  # names a value that nobody gave; an error only where it is read
    if isinstance(value, Container):
        value = copy.deepcopy(value)
        value._set_parent(container)
        container._content[key] = value
    else:
        node._set_value(plain_value(value))


_WHY_FRAME = (
    "a job that was sent to another process is known by the function that runs it there, and nowhere else"
)


@HYDRA.touches(f"{_UTILS}._run_hydra", why=_WHY_FRAME)
def is_command_line(frame: FrameType) -> bool:
    """Return whether Hydra runs a command line in a frame."""
    return (frame.f_globals.get("__name__"), frame.f_code.co_name) == (_UTILS, "_run_hydra")


@HYDRA.touches("hydra.core.utils.run_job", why=_WHY_FRAME)
def function_of_job(frame: FrameType) -> Any:
    """Return the function of the job that Hydra runs in a frame, or ``None`` in any other frame."""
    is_job = (frame.f_globals.get("__name__"), frame.f_code.co_name) == ("hydra.core.utils", "run_job")
    return frame.f_locals["task_function"] if is_job else None
