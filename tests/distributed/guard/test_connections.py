"""Which connections of this process are ended, so that a wait in the backend breaks."""

from __future__ import annotations

import socket

from lightning_lockstep.distributed.guard.activity import end_connections, ports_of


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
            assert end_connections((), hosts=["localhost"], kept_ports=kept) >= 1
            assert waits.recv(1) == b"", "its wait has ended"
            other.sendall(b"x")
            assert speaks.recv(1) == b"x"


def test_ports_of_both_ends() -> None:
    assert ports_of(("10.0.0.1:4000", "fe80::1:5000")) == {4000, 5000}
