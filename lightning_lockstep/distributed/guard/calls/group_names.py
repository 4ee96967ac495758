"""What process groups are called in reports, alike on all of their ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from lightning_lockstep._doors.torch_internals import ranks_of_groups
from lightning_lockstep.distributed.process_group import process_group_exists

__all__ = ["WORLD", "group_title", "group_titles"]

#: The default process group.
WORLD = "world"


def group_title(name: str, ranks: Sequence[int]) -> str:
    """Return what a group is called in reports, such as ``1 (ranks 0, 2)``; ranks as in the default group."""
    return f"{name} (ranks {', '.join(map(str, ranks))})"


def group_titles() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return title and ranks of each process group that this rank belongs to, by its name in torch."""
    if not process_group_exists():
        return {}
    world = dist.group.WORLD
    titles: dict[str, tuple[str, tuple[int, ...]]] = {}
    for group, ranks_of in ranks_of_groups().items():
        if not isinstance(group, dist.ProcessGroup):
            continue
        ranks = tuple(sorted(ranks_of, key=ranks_of.__getitem__))
        name: str = group.group_name
        titles[name] = (WORLD if group is world else group_title(name, ranks), ranks)
    return titles
