"""Code that must run on one rank after the other: a download, a compile cache, a file that all append to."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_lockstep._settings import Faults
from lightning_lockstep._text import ranks_in_words
from lightning_lockstep.distributed.coordination.communicator import current_communicator
from lightning_lockstep.distributed.side_channel.channel import SideChannel
from lightning_lockstep.distributed.side_channel.gather import Gather
from lightning_lockstep.errors import CollectiveStallError, RankFailedError


@contextmanager
def in_rank_order(*, per_node: bool = False, timeout: float = 1800.0) -> Iterator[int]:
    """Run the body on one rank after the other; all ranks leave together.

    When the body raises on a rank, that rank keeps its error, the other ranks raise a :class:`RankFailedError`
    that carries it, and the ranks after it skip the body.

    Args:
        per_node: Let one rank of each host run at a time rather than one rank of all; for what is done once on
            each host's own disk.
        timeout: Longest time that the others wait for one rank to arrive and run the body [s].

    Yields:
        This rank's number.

    Raises:
        ConfigurationError: ``timeout`` is no duration.
        RankFailedError: The body failed on another rank.
        CollectiveStallError: A rank did not arrive, or is still in the body; it is named.

    Ranks: all, together, though not at the same time; 2 messages for each rank and turn over the side channel and no
    collective. Without a process group the body just runs.
    """
    faults = Faults()
    faults.number("timeout", timeout, what="seconds", above=0, such_as=1800)
    faults.raise_all()
    communicator = current_communicator()
    if communicator.world_size == 1:
        yield communicator.rank
        return
    gather, blocks = communicator.side_channel.get_or_create(_blocks)
    gather.timeout, block = timeout, next(blocks)

    def barrier(turn: int, text: str = "") -> list[str]:
        """Return what every rank says at the end of a turn."""
        gathered = gather.collect(f"{block}/{turn}", text)
        if gathered.missing:
            raise CollectiveStallError(
                f"rank {communicator.rank} waited {timeout:.0f} s in in_rank_order() for"
                f" {ranks_in_words(gathered.missing)}, which never entered the block or did not leave it. Every rank"
                " must enter the block; a longer `timeout` gives slow ranks more time."
            )
        return list(gathered.entries.values())

    nodes = barrier(-1, communicator.host if per_node else "")
    turn_of = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
    for turn in range(max(turn_of) + 1):
        if turn == turn_of[communicator.rank]:
            try:
                yield communicator.rank
            except BaseException as error:
                # The others hear of it at the end of this turn; this rank does not wait for them.
                gather.post(f"{block}/{turn}", "".join(traceback.format_exception(error)))
                raise
        for rank, text in enumerate(barrier(turn)):
            if text:
                last = text.rstrip().splitlines()[-1]
                raise RankFailedError(f"rank {rank} failed in in_rank_order(): {last}\n\n{text.rstrip()}")


def _blocks(channel: SideChannel) -> tuple[Gather, Iterator[int]]:
    """Return what gathers the words of all ranks at the end of a turn, and the numbers of the blocks."""
    return Gather(channel, "in_rank_order"), itertools.count()
