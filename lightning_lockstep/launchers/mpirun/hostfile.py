"""The hosts of a hostfile, as Open MPI and MPICH read it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_lockstep.errors import LaunchError

__all__ = ["Host", "checked_hosts", "is_host_name", "read_hostfile"]

_EXPECTED = "Expected lines such as 'node1 slots=4' (Open MPI) or 'node1:4' (MPICH)."
# ssh and mpirun would take a name that begins with a dash for an option.
_NAME = re.compile(r"[\w\[][\w.:@%\[\]-]*")


@dataclass(frozen=True)
class Host:
    """A line of a hostfile."""

    name: str
    slots: int | None = None  # how many ranks it takes; None: the file does not say


def read_hostfile(path: Path) -> list[Host]:
    """Return the hosts of a hostfile of Open MPI (``node1 slots=4``) or MPICH (``node1:4``)."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"hostfile {path}: it cannot be read ({error}). {_EXPECTED}") from error
    hosts = []
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if not words:
            continue
        name, count = _name_and_count(words[0])
        slots = re.search(r"\bslots\s*=\s*(\d+)", line)
        hosts.append(Host(name, int(slots[1]) if slots else int(count) if count.isdigit() else None))
    return hosts


def _name_and_count(word: str) -> tuple[str, str]:
    """Part ``host:slots``; an address of IPv6 has colons of its own, and is followed by slots only in brackets."""
    if word.startswith("["):
        name, _, rest = word[1:].partition("]")
        return name, rest.removeprefix(":")
    name, _, count = word.partition(":")
    return (word, "") if ":" in count else (name, count)


def is_host_name(name: str) -> bool:
    """Return whether something can be the name or address of a host."""
    return _NAME.fullmatch(name) is not None


def checked_hosts(hosts: Sequence[Host], given: str) -> list[Host]:  # given: where from, for messages
    """Return the hosts, if each has the name of one."""
    if wrong := [host.name for host in hosts if not is_host_name(host.name)]:
        raise LaunchError(
            f"{given} has lines that do not begin with the name or address of a host:"
            f" {', '.join(map(repr, wrong))}. {_EXPECTED}"
        )
    return list(hosts)
