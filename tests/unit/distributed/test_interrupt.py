"""How what a rank waits in is ended: an error in the thread that trains, its connections, those of its forks."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import Any

import pytest

from lightning_lockstep.distributed.failure import interrupt
from lightning_lockstep.distributed.failure.interrupt import Interrupt, connections
from lightning_lockstep.errors import CollectiveStallError


@pytest.mark.parametrize("waits", [lambda: time.sleep(60), lambda: threading.Event().wait(60)])
def test_an_error_reaches_a_main_thread_that_sleeps_or_waits(waits: Any) -> None:
    before = signal.getsignal(signal.SIGURG)
    errors = Interrupt(lambda: CollectiveStallError("rank 1 never came"))
    errors.install()
    try:
        timer = threading.Timer(0.2, errors.raise_soon)
        timer.start()
        with pytest.raises(CollectiveStallError, match="rank 1 never came"):
            waits()
        timer.join()
    finally:
        errors.remove()
    assert signal.getsignal(signal.SIGURG) == before


def test_an_error_is_left_to_code_that_deals_with_errors_and_is_not_raised_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pending: list[BaseException] = [CollectiveStallError("of an earlier fit")]
    errors = Interrupt(lambda: pending[0] if pending else None)
    errors.install()
    try:
        with monkeypatch.context() as patch:
            patch.setitem(globals(), "__name__", "lightning_lockstep.distributed.failure.test")
            other = threading.Thread(target=errors.raise_soon)
            other.start()
            other.join()
            time.sleep(0.05)
        pending.clear()  # it has been raised
        signal.raise_signal(signal.SIGURG)  # as the system does for urgent data of a socket
        time.sleep(0.05)
    finally:
        errors.remove()


def test_an_error_reaches_a_thread_that_trains_with_its_text() -> None:
    raised, ready, error = list[BaseException](), threading.Event(), CollectiveStallError("rank 1 never came")
    errors = Interrupt(lambda: error)

    def train() -> None:
        errors.install()
        ready.set()
        try:
            while True:
                time.sleep(0.01)
        except CollectiveStallError as caught:
            raised.append(caught)

    thread = threading.Thread(target=train)
    thread.start()
    ready.wait()
    errors.raise_soon()
    thread.join()
    assert raised == [error], "the very error, and not in the main thread"


def test_connections_with_ranks_are_ended_but_for_those_of_channel_and_store() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as backend,
        socket.create_server(("127.0.0.1", 0)) as channel,
    ):
        pid = os.fork()
        if pid == 0:  # another rank of this host, with a connection for each
            held = [socket.create_connection(one.getsockname()) for one in (backend, channel)]
            time.sleep(60)
            os._exit(len(held))
        (waits, _), (speaks, _) = backend.accept(), channel.accept()
        with waits, speaks, socket.create_connection(backend.getsockname()) as own, backend.accept()[0]:
            waits.settimeout(20)
            ranks = [(socket.gethostname(), os.getpid()), (socket.gethostname(), pid)]
            found = interrupt.connections_with(ranks, {channel.getsockname()[1]})
            assert found == [waits.fileno()], "neither one of this process with itself"
            assert own.fileno() in connections().values()
            interrupt.end_connections(found)
            assert waits.recv(1) == b"", "its wait has ended"
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_forked_process_gives_the_connections_with_ranks_back() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        end = socket.create_connection(server.getsockname())
        peer = server.accept()[0]
        peer.settimeout(20)
        interrupt.keep_from_forks([end.fileno()])
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        time.sleep(0.1)
        end.close()  # as when the rank is killed, while its worker lives
        assert peer.recv(1) == b"", "its end is noticed at once"
        peer.close()
        interrupt.keep_from_forks([])
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
