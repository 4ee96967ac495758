"""Where the ranks listen, and how they learn that of each other."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable

from lightning_lockstep.distributed.side_channel.links import ADDRESS

__all__ = ["Addresses", "endpoint", "host_and_port"]


class Addresses:
    """The addresses that a rank knows. Belongs to the receiving thread.

    Rank 0 learns the address of each rank that connects to it, answers who asks for one, and passes all of them on
    once it knows all. From then on nobody needs rank 0 to reach another rank.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        send: Callable[[int, tuple[bytes, ...]], None],
        reached: Callable[[int, str], None],  # gets a peer and its address, where that is new
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._send, self._reached = send, reached
        self._known: dict[int, str] = {}
        self._asked: dict[int, set[int]] = defaultdict(set)

    @property
    def ranks(self) -> set[int]:
        """Peers whose address is known."""
        return set(self._known)

    def add(self, rank: int, address: str) -> None:
        """Note where a peer listens, and let those know who have asked."""
        if rank == self._rank or self._known.get(rank) == address:
            return
        self._known[rank] = address
        self._reached(rank, address)
        self._answer(rank)
        if self._rank == 0 and len(self._known) == self._world_size - 1 > 1:
            self._tell(self._known, self._known)

    def add_all(self, content: bytes) -> None:
        """Note the addresses that rank 0 has sent."""
        for rank, address in json.loads(content):
            self.add(int(rank), str(address))

    def asked(self, by: int, wanted: int) -> None:
        """Answer a rank that asks where another one listens; now, or once that is known."""
        self._asked[wanted].add(by)
        self._answer(wanted)

    def _answer(self, wanted: int) -> None:
        if wanted in self._known:
            self._tell(self._asked.pop(wanted, ()), (wanted,))

    def _tell(self, askers: Iterable[int], ranks: Iterable[int]) -> None:
        content = json.dumps([[rank, self._known[rank]] for rank in ranks]).encode()
        for asker in askers:
            self._send(asker, (ADDRESS, content))


def endpoint(host: str) -> str:
    """Return a host name or address as ZeroMQ takes it."""
    return f"tcp://[{host}]" if ":" in host else f"tcp://{host}"


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of a ZeroMQ address, without the brackets of IPv6."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)
