"""Code that must run rank by rank: a download, a compile cache, a file that all append to."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.rank_order import rank_ordered_sections
from lightning_lockstep.errors import ConfigurationError

__all__ = ["in_rank_order"]


@contextmanager
def in_rank_order(*, per_node: bool = False, timeout: float = 1800.0) -> Iterator[int]:
    """Run the body on one rank after the other; all ranks leave together.

    When the body raises on a rank, that rank keeps its error, the ranks before it and after it raise a
    :class:`RankFailedError` that carries it, and nobody hangs. The ranks after it skip the body.

    Args:
        per_node: Let one rank of each node run at a time, in the order of their coming, rather than one rank
            of all; for what is done once on each node's own disk.
        timeout: Longest wait for one's turn, and for the end of the others' [s].

    Yields:
        This rank's number.

    Raises:
        ConfigurationError: ``timeout`` is no duration.
        RankFailedError: The body failed on another rank.
        CollectiveStallError: A rank never came, or is still in the body; it is named.

    Ranks: all, together, though not at the same time; 4 messages a rank over the side channel and no
    collective. Without a process group the body just runs.
    """
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or timeout <= 0:
        raise ConfigurationError(f"timeout={timeout!r}: expected seconds, more than 0, such as 1800.")
    communicator = current_communicator()
    if communicator.world_size == 1:
        yield communicator.rank
        return
    sections = rank_ordered_sections(communicator)
    number = sections.enter(queue="node" if per_node else "all", timeout=timeout)
    try:
        yield communicator.rank
    except BaseException as error:
        sections.leave(number, error="".join(traceback.format_exception(error)), timeout=timeout)
        raise
    sections.leave(number, error="", timeout=timeout)
