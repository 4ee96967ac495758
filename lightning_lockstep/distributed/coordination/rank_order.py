"""Code that must run on one rank after the other: a download, a compile cache, a file that all append to."""

from __future__ import annotations

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
        per_node: Let one rank of each node run at a time rather than one rank of all; for what is done once on
            each node's own disk.
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
    turns = communicator.side_channel.get_or_create(_Turns)
    turns.begin(timeout)
    nodes = turns.end(f"{communicator.node_rank} {communicator.host}" if per_node else "")
    turn_of = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
    own = turn_of[communicator.rank]
    for turn in range(max(turn_of) + 1):
        if turn == own:
            try:
                yield communicator.rank
            except BaseException as error:
                # The others hear of it at the end of this turn; this rank does not wait for them.
                turns.gather.post(turns.next(), "".join(traceback.format_exception(error)))
                raise
        for rank, text in enumerate(turns.end("")):
            if text:
                last = text.rstrip().splitlines()[-1]
                raise RankFailedError(f"rank {rank} failed in in_rank_order(): {last}\n\n{text.rstrip()}")


class _Turns:
    """Turns of one section after the other: at the end of each, every rank says whether its body has failed."""

    def __init__(self, channel: SideChannel) -> None:
        self.gather = Gather(channel, "in_rank_order")
        self._section = self._turn = 0

    def begin(self, timeout: float) -> None:
        self.gather.timeout, self._section, self._turn = timeout, self._section + 1, 0

    def next(self) -> str:
        self._turn += 1
        return f"{self._section}/{self._turn}"

    def end(self, text: str) -> list[str]:
        """Return what every rank says at the end of this turn."""
        gathered = self.gather.collect(self.next(), text)
        if gathered.missing:
            raise CollectiveStallError(
                f"rank {self.gather.channel.rank} waited {gathered.timeout:.0f} s in in_rank_order() for"
                f" {ranks_in_words(gathered.missing)}, which never entered the block or did not leave it. Every rank"
                " must enter the block; a longer `timeout` gives slow ranks more time."
            )
        return gathered.complete("in_rank_order()")
