"""The text of `--help`: the groups and keys of a program, each key with the comment that its config file has for it."""

from __future__ import annotations

import re
import shutil
import string
import textwrap
from collections.abc import Iterator

import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.utils import setup_globals
from omegaconf import DictConfig, OmegaConf, flag_override

from lightning_lockstep._doors.hydra_internals import Loader, node_at, plain_value

__all__ = ["comments", "help_text"]

_COLUMN = 36  # where comments begin, unless the key is longer
_WIDEST = 120  # characters, on a terminal that is wider


def help_text(
    program: str, search_path: ConfigSearchPath, config_name: str | None, overrides: list[str]
) -> str:
    """Return what `--help` prints, in the form of the program's `hydra.help.template`."""
    setup_globals()
    loader = Loader(search_path, config_name, overrides)
    config = loader.compose(overrides)  # a HydraException where they lead to none
    if config.hydra.help.app_name == config.hydra.job.name:
        with flag_override(config.hydra, ["readonly", "struct"], [False, False]):
            config.hydra.help.app_name = program
    files = loader.files(overrides)
    notes: dict[str, str] = {}
    for _, text, package in files:
        notes = {**comments(text, package), **notes}  # the file that introduces a key explains it best
    template = string.Template(str(config.hydra.help.template))
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    filled = template.safe_substitute(
        APP_CONFIG_GROUPS="\n".join(_groups(loader, config, [name for name, *_ in files], width)),
        CONFIG="\n".join(_keys(config, notes, loader.groups(), width)),
    )
    return f"{filled.rstrip()}\n"


def comments(text: str, package: str = "") -> dict[str, str]:  # package: key below which the file is put
    """Return the comment at the end of the line of each key of a config file, by the whole key."""
    lines = text.splitlines()
    return dict(_comments(yaml.compose(text, Loader=yaml.SafeLoader), lines, package))


def _comments(node: yaml.Node | None, lines: list[str], prefix: str) -> Iterator[tuple[str, str]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for name, value in node.value:
        key = f"{prefix}.{name.value}" if prefix else str(name.value)
        nested = isinstance(value, yaml.MappingNode) and not value.flow_style
        # Behind the value where it stands in the line of its key.
        mark = name.end_mark if nested or value.end_mark.line != name.end_mark.line else value.end_mark
        found = re.match(r":?\s+#\s*(.+)", lines[mark.line][mark.column :])
        if found:
            yield key, found[1].strip()
        yield from _comments(value, lines, key)


def _groups(loader: Loader, config: DictConfig, files: list[str], width: int) -> Iterator[str]:
    single = config.hydra.runtime.choices
    for group in loader.groups():
        choices = loader.choices(group)
        if group == "hydra" or not choices:
            continue
        # Hydra notes no choice for a group of which several were taken.
        several = [name.removeprefix(f"{group}/") for name in files if name.startswith(f"{group}/")]
        taken = single.get(group, several or None)
        yield from _entry(f"{group}={_plain(taken)}", ", ".join(choices), width)


def _keys(config: DictConfig, notes: dict[str, str], groups: list[str], width: int) -> Iterator[str]:
    """The program's own keys, then those of each group behind an empty line."""
    names = [str(name) for name in config if name != "hydra"]
    for name in sorted(names, key=groups.__contains__):
        lines = list(_lines(name, node_at(config, name), notes, width))
        if lines and name in groups:
            yield ""
        yield from lines


def _lines(key: str, node: object, notes: dict[str, str], width: int) -> Iterator[str]:
    if isinstance(node, DictConfig):
        if key in notes:
            yield from _entry(key, notes[key], width)
        for name in map(str, node):
            if name != "_target_":
                yield from _lines(f"{key}.{name}", node_at(node, name), notes, width)
        return
    yield from _entry(f"{key}={_plain(node)}", notes.get(key, ""), width)


def _entry(left: str, right: str, width: int) -> Iterator[str]:
    """Two columns; the right one is wrapped, and begins below a left one that is too long."""
    indent = " " * _COLUMN
    wrapped = textwrap.wrap(right, max(width - _COLUMN, 20)) or [""]
    left = f"  {left}"
    if len(left) + 2 > _COLUMN and right:
        yield left
        left = ""
    yield f"{left:<{_COLUMN}}{wrapped[0]}".rstrip()
    yield from (f"{indent}{line}" for line in wrapped[1:])


def _plain(node: object) -> str:
    """A value as it is typed on the command line; an interpolation as it is written in the config."""
    raw = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node
    value = plain_value(raw)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if value == "":
        return "''"
    if isinstance(value, list):
        return f"[{','.join(map(_plain, value))}]"
    return str(value)
