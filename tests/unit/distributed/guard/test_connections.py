"""Which connections of this process are ended, so that a wait in the backend breaks."""

from __future__ import annotations

import socket

from lightning_lockstep.distributed.failure.connections import connections, end_connections
from lightning_lockstep.distributed.guard.observer import connections_between_ranks


def test_of_a_silent_host_all_connections_are_ended_but_those_of_the_side_channel() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as backend,
        socket.create_server(("127.0.0.1", 0)) as channel,
        socket.create_connection(backend.getsockname()) as waits,
        socket.create_connection(channel.getsockname()) as speaks,
    ):
        peer, other = backend.accept()[0], channel.accept()[0]
        with peer, other:
            for one in (waits, speaks):
                one.settimeout(20)
            kept = (channel.getsockname()[1], other.getpeername()[1])
            ends = connections_between_ranks({0: connections()}, ["localhost"], kept)[0]
            end_connections(ends)
            assert waits.recv(1) == b"", "its wait has ended"
            other.sendall(b"x")
            assert speaks.recv(1) == b"x"


def test_only_connections_between_two_ranks_are_ended() -> None:
    here, there, elsewhere = "10.0.0.1:4000", "10.0.0.2:5000", "10.0.0.9:443"
    ends = {0: [(here, there), (here, elsewhere)], 1: [(there, here)]}
    assert connections_between_ranks(ends, (), ()) == {0: [(here, there)], 1: [(there, here)]}
    assert connections_between_ranks(ends, (), (5000,)) == {0: [], 1: []}
