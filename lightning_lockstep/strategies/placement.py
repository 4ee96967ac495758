"""Which rank runs where, shown once, and a warning that names the slowest GPU where GPUs differ."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO

import psutil
import torch
from rich.console import Console
from rich.table import Table

from lightning_lockstep._console import say
from lightning_lockstep._text import ranges, size_in_words

__all__ = ["RankPlacement", "mixed_gpus_warning", "placement_of", "show_placement"]

# Beyond this number of ranks the table names the first and the last of each host only.
_LONGEST_TABLE = 64


@dataclass(frozen=True)
class RankPlacement:
    """Where one rank runs."""

    rank: int
    host: str
    device: str  # ``cpu`` or ``cuda:0``
    device_name: str  # of the GPU, else the device's type
    memory: int  # of the GPU or, for a CPU rank, of the host [bytes]; 0: not known
    capability: tuple[int, int]  # of CUDA; (0, 0): another device
    threads: int  # on the CPU
    cores: tuple[int, ...]  # numbers of those that it may use


def placement_of(
    device: torch.device, *, rank: int, host: str, threads: int, cores: tuple[int, ...]
) -> RankPlacement:
    """Return where this rank runs; on CUDA this asks the driver."""
    name, memory, capability = device.type.upper(), 0, (0, 0)
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        name, memory, capability = gpu.name, gpu.total_memory, (gpu.major, gpu.minor)
    elif device.type == "cpu":
        memory = psutil.virtual_memory().total
    return RankPlacement(rank, host, str(device), name, memory, capability, threads, cores)


def show_placement(placements: Sequence[RankPlacement]) -> None:
    """Print the table of all ranks to standard error."""
    table = Table(title=f"{len(placements)} ranks", title_justify="left")
    for heading in ("rank", "host", "device", "memory", "threads", "cores"):
        table.add_column(heading, justify="right" if heading in ("rank", "memory", "threads") else "left")
    for place in _shortened(placements):
        device = place.device if place.capability == (0, 0) else f"{place.device} {place.device_name}"
        memory = size_in_words(place.memory or None)
        table.add_row(str(place.rank), place.host, device, memory, str(place.threads), ranges(place.cores))
    terminal = sys.stderr is not None and sys.stderr.isatty()
    text = StringIO()
    width = None if terminal else 100
    Console(file=text, force_terminal=terminal, width=width).print(table)
    say(text.getvalue())


def mixed_gpus_warning(placements: Sequence[RankPlacement]) -> str | None:
    """Return a warning that names the slowest GPU when the GPUs differ, else ``None``."""
    gpus = [place for place in placements if place.capability != (0, 0)]
    if len({(gpu.device_name, gpu.memory, gpu.capability) for gpu in gpus}) < 2:
        return None
    slowest = min(gpus, key=lambda gpu: (gpu.capability, gpu.memory))
    fastest = max(gpus, key=lambda gpu: (gpu.capability, gpu.memory))
    return (
        "This run has mixed GPUs, and every step waits for the slowest:"
        f" {_described(slowest)}, {_described(fastest)}."
    )


def _described(gpu: RankPlacement) -> str:
    major, minor = gpu.capability
    return (
        f"rank {gpu.rank} on {gpu.host} has {gpu.device_name} ({size_in_words(gpu.memory)}, compute capability"
        f" {major}.{minor})"
    )


def _shortened(placements: Sequence[RankPlacement]) -> list[RankPlacement]:
    if len(placements) <= _LONGEST_TABLE:
        return list(placements)
    ends: dict[str, list[RankPlacement]] = {}
    for place in placements:
        first_and_last = ends.setdefault(place.host, [place, place])
        first_and_last[1] = place
    return [place for pair in ends.values() for place in dict.fromkeys(pair)]
