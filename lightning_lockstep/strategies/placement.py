"""Which rank runs where, shown once, and a word about the slowest card."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch
from rich.console import Console
from rich.table import Table

__all__ = ["RankPlacement", "mixed_cards_warning", "placement_of", "show_placement"]

_GIB = 2**30
# Beyond this number of ranks the table names the first and the last of each host only.
_LONGEST_TABLE = 64


@dataclass(frozen=True)
class RankPlacement:
    """Where one rank runs.

    Attributes:
        rank: Number of the rank.
        host: Host name.
        device: ``cpu`` or ``cuda:0``.
        device_name: Name of the card or ``CPU``.
        memory: Memory of the card, or of the host for CPU ranks [byte].
        capability: CUDA compute capability, ``(0, 0)`` for CPU ranks.
        threads: CPU threads.
        cores: Numbers of the cores it may use.
    """

    rank: int
    host: str
    device: str
    device_name: str
    memory: int
    capability: tuple[int, int]
    threads: int
    cores: tuple[int, ...]


def placement_of(
    device: torch.device, *, rank: int, host: str, threads: int, cores: tuple[int, ...]
) -> RankPlacement:
    """Return where this rank runs.

    Ranks: every rank, for itself; on CUDA it asks the driver.
    """
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        name, memory, capability = card.name, card.total_memory, (card.major, card.minor)
    else:
        name, memory, capability = "CPU", psutil.virtual_memory().total, (0, 0)
    return RankPlacement(rank, host, str(device), name, memory, capability, threads, cores)


def show_placement(placements: Sequence[RankPlacement]) -> None:
    """Print the table of all ranks to standard error.

    Args:
        placements: One for each rank, in rank order.

    Ranks: rank 0.
    """
    table = Table(title=f"{len(placements)} ranks", title_justify="left")
    for heading in ("rank", "host", "device", "memory", "threads", "cores"):
        table.add_column(heading, justify="right" if heading in ("rank", "memory", "threads") else "left")
    for place in _shortened(placements):
        device = place.device if place.capability == (0, 0) else f"{place.device} {place.device_name}"
        memory = f"{place.memory / _GIB:.1f} GiB"
        table.add_row(str(place.rank), place.host, device, memory, str(place.threads), as_ranges(place.cores))
    Console(file=sys.stderr, width=None if sys.stderr.isatty() else 100).print(table)


def mixed_cards_warning(placements: Sequence[RankPlacement]) -> str | None:
    """Return a warning that names the slowest card when the cards differ, else ``None``.

    Args:
        placements: One for each rank.
    """
    cards = [place for place in placements if place.capability != (0, 0)]
    kinds = {(card.device_name, card.memory, card.capability) for card in cards}
    if len(kinds) < 2:
        return None
    slowest = min(cards, key=lambda card: (card.capability, card.memory))
    fastest = max(cards, key=lambda card: (card.capability, card.memory))
    return (
        "The cards of this run differ, and every step waits for the slowest: rank"
        f" {slowest.rank} on {slowest.host} has {slowest.device_name} ({slowest.memory / _GIB:.1f} GiB, compute"
        f" capability {slowest.capability[0]}.{slowest.capability[1]}), rank {fastest.rank} on {fastest.host} has"
        f" {fastest.device_name} ({fastest.memory / _GIB:.1f} GiB, {fastest.capability[0]}.{fastest.capability[1]})."
    )


def as_ranges(numbers: Sequence[int]) -> str:
    """Return core numbers in short, such as ``0-3,8``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _shortened(placements: Sequence[RankPlacement]) -> list[RankPlacement]:
    if len(placements) <= _LONGEST_TABLE:
        return list(placements)
    ends: dict[str, list[RankPlacement]] = {}
    for place in placements:
        first_and_last = ends.setdefault(place.host, [place, place])
        first_and_last[1] = place
    return [place for pair in ends.values() for place in dict.fromkeys(pair)]
