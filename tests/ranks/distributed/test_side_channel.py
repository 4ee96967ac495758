"""Messages that need no collective: also while one is stuck, and when a rank is gone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_lockstep.distributed import (
    Message,
    SideChannel,
    ZeroMQSideChannel,
    current_communicator,
    shut_down,
)
from lightning_lockstep.distributed.rendezvous import channel_keys
from tests.helpers import run_ranks, run_ranks_raw


def wait_until(condition: Any, seconds: float = 20.0) -> bool:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.005)
    return True


def peers(channel: SideChannel) -> int | None:
    """Return to whom a rank may post: rank 0 to all others, the others to rank 0."""
    return 0 if channel.rank else None


def heard_while_stuck() -> bool:
    """Rank 1 sits in an all-reduce that rank 0 joins only once rank 1 has confirmed a message."""
    communicator = current_communicator()
    channel, heard = communicator.side_channel, threading.Event()
    remove = channel.on("ping", lambda message: channel.post("pong", to=0))
    channel.on("pong", lambda message: heard.set())
    communicator.barrier()
    if communicator.rank == 0:
        time.sleep(0.3)  # the others sit in it by now
        channel.post("ping", to=1)
    is_heard = communicator.rank != 0 or heard.wait(20)
    dist.all_reduce(torch.ones(1))
    remove()
    return is_heard


def faulty_handler() -> list[str]:
    """A handler that raises, and one that is removed between two messages."""
    communicator = current_communicator()
    channel, got, end = communicator.side_channel, list[str](), threading.Event()

    def broken(message: Message) -> None:
        raise ValueError("handler of the user")

    channel.on("news", broken)
    remove = channel.on("news", lambda message: got.append(message.body))
    channel.on("end", lambda message: end.set())
    communicator.barrier()
    channel.post("news", "one", to=peers(channel))
    assert wait_until(lambda: got == (["one", "one"] if channel.rank == 0 else ["one"]))
    remove()
    communicator.barrier()
    channel.post("news", "two", to=peers(channel))
    channel.post("end", to=peers(channel))
    assert end.wait(20), "it comes behind the other one"
    return got


def open_with(**options: Any) -> ZeroMQSideChannel:
    """A channel beside that of the communicator, with other limits."""
    communicator = current_communicator()
    keys, given = channel_keys("of this test"), {"host": "127.0.0.1", **options}
    address = None
    if communicator.is_main:
        channel = ZeroMQSideChannel(0, communicator.world_size, keys=keys, **given)
        address = channel.address
    address = communicator.broadcast(address)
    if not communicator.is_main:
        rank, world_size = communicator.rank, communicator.world_size
        channel = ZeroMQSideChannel(rank, world_size, keys=keys, main_address=address, **given)
        assert channel.wait_for_main(20)
    communicator.barrier()
    return channel


def strangers_and_large_messages() -> tuple[list[str], list[int]]:
    """Somebody without the token, and somebody without the protocol, write to rank 0's port; then a large message."""
    channel = open_with()
    got: list[Any] = []
    sizes: list[int] = []
    channel.on("news", lambda message: got.append(message.body))
    channel.on("large", lambda message: sizes.append(len(message.body)))
    current_communicator().barrier()
    if channel.rank == 0:
        stranger = ZeroMQSideChannel(
            1, 3, host="127.0.0.1", keys=channel_keys("another"), main_address=channel.address
        )
        stranger.post("news", "forged", to=0)
        assert not stranger.wait_for_main(1.0)
        stranger.close(0.0)
        with socket.create_connection(("127.0.0.1", int(channel.address.rpartition(":")[2]))) as raw:
            raw.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(1000))
    current_communicator().barrier()
    channel.post("large", "x" * 20_000_000, to=peers(channel))
    if channel.rank == 1:
        channel.post("news", "from rank 1", to=0)
    assert channel.flush(60)
    assert wait_until(lambda: len(sizes) == 1 if channel.rank else len(sizes) == 2 and got)
    current_communicator().barrier()
    channel.close()
    return got, sizes


def stopped_for_a_while(frozen: int) -> list[int]:
    """One rank is stopped; another process lets it go on. What the others notice, none of it that it was lost."""
    communicator = current_communicator()
    channel = open_with(silence_limit=10.0)
    noticed: list[int] = []
    heard = threading.Event()
    channel.watch_peers(noticed.append)
    channel.on("awake", lambda message: (channel.rank or channel.post("awake"), heard.set()))
    communicator.barrier()
    if communicator.rank == frozen:
        goes_on = subprocess.Popen(["sh", "-c", f"sleep 1.2; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        goes_on.wait()
        channel.post("awake", to=peers(channel))
    else:
        assert heard.wait(20)
    communicator.barrier()  # a channel that is closed without waiting may leave before its goodbye
    channel.close(0.0)
    return noticed


def holds_the_gil() -> list[int]:
    communicator = current_communicator()
    channel = open_with(silence_limit=0.6)
    noticed: list[int] = []
    channel.watch_peers(noticed.append)
    communicator.barrier()
    if communicator.rank == 1:
        ctypes.PyDLL(None).usleep(2_000_000)  # with the GIL held
    communicator.barrier()
    channel.close()
    return noticed


def rank_0_leaves_first() -> tuple[list[int], list[str]]:
    """Rank 0 closes its channel, though it hosts the store; nothing is lost, and no thread is left."""
    channel, lost = watched_channel()
    if channel.rank != 0:
        assert wait_until(lambda: channel.has_closed(0))
    # As at the exit of Python 3.12 and later, which start no thread any more.
    with patch.object(threading.Thread, "start", side_effect=RuntimeError("interpreter shutdown")):
        shut_down(1.0)
    return lost, [thread.name for thread in threading.enumerate() if thread.name.startswith("lockstep")]


def cases() -> dict[str, Any]:
    return {
        "stuck": heard_while_stuck(),
        "faulty": faulty_handler(),
        "strangers": strangers_and_large_messages(),
        "left": rank_0_leaves_first(),
    }


def silent_for_a_while() -> dict[str, Any]:
    return {"stopped": [stopped_for_a_while(frozen) for frozen in (0, 1)], "gil": holds_the_gil()}


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return run_ranks(3, cases, timeout=90)


def test_a_rank_answers_while_it_sits_in_a_collective(seen: list[dict[str, Any]]) -> None:
    assert all(one["stuck"] for one in seen)


def test_a_faulty_handler_silences_nobody_and_a_removed_one_hears_nothing(seen: list[dict[str, Any]]) -> None:
    assert [one["faulty"] for one in seen] == [["one", "one"], ["one"], ["one"]]


def test_strangers_are_not_listened_to_and_messages_may_be_large(seen: list[dict[str, Any]]) -> None:
    large = 20_000_000
    assert [one["strangers"] for one in seen] == [
        (["from rank 1"], [large] * 2),
        ([], [large]),
        ([], [large]),
    ]


def test_a_goodbye_of_rank_zero_is_no_loss_and_threads_end(seen: list[dict[str, Any]]) -> None:
    assert [one["left"] for one in seen] == [([], [])] * 3


def test_a_rank_that_is_stopped_for_a_while_or_holds_the_gil_is_not_lost() -> None:
    assert run_ranks(3, silent_for_a_while, timeout=90) == [{"stopped": [[], []], "gil": []}] * 3


def watched_channel() -> tuple[SideChannel, list[int]]:
    """The channel, and who is lost; no rank goes on before all watch theirs."""
    communicator = current_communicator()
    channel = communicator.side_channel
    lost: list[int] = []
    channel.watch_peers(lost.append)
    known = range(channel.world_size) if channel.rank == 0 else (0,)
    assert wait_until(lambda: all(channel.process_of(r)[1] for r in known if r != channel.rank))
    communicator.barrier()
    return channel, lost


def lose_rank_zero() -> list[int]:
    channel, lost = watched_channel()
    if channel.rank == 0:
        os._exit(7)
    assert wait_until(lambda: bool(lost))
    assert not channel.usable and channel.lost
    shut_down(0.0)
    return lost


def test_the_end_of_rank_zero_is_noticed() -> None:
    outcomes = run_ranks_raw(3, lose_rank_zero)
    assert outcomes[0].returncode == 7
    for outcome in outcomes[1:]:
        assert outcome.ok, outcome.traceback
        assert outcome.value == [0]


def stopped_for_good(frozen: int, folder: Path) -> list[int]:
    communicator = current_communicator()
    channel = open_with(silence_limit=1.0)
    noticed: list[int] = []
    channel.watch_peers(noticed.append)
    pids, watchers = communicator.gather(os.getpid()), watchers_of(frozen)
    communicator.barrier()
    if communicator.rank == frozen:
        os.kill(os.getpid(), signal.SIGSTOP)
    if communicator.rank in watchers:
        assert wait_until(lambda: bool(noticed))
        # Not over the channel: rank 0, by way of which it would go, may be the one that is stopped.
        (folder / str(communicator.rank)).touch()
    assert wait_until(lambda: all((folder / str(watcher)).exists() for watcher in watchers))
    with contextlib.suppress(ProcessLookupError):  # another rank was faster
        os.kill(pids[frozen], signal.SIGKILL)  # nothing else would end it
    channel.close(0.0)
    return noticed[:1]  # the end of the stopped rank is noticed, too


def watchers_of(rank: int) -> set[int]:
    """Rank 0 watches all, and all watch rank 0."""
    return {1, 2} if rank == 0 else {0}


@pytest.mark.parametrize("frozen", [0, 2])
def test_a_rank_that_is_stopped_for_good_is_named(frozen: int, tmp_path: Path) -> None:
    outcomes = run_ranks_raw(3, stopped_for_good, frozen, tmp_path)
    for watcher in watchers_of(frozen):
        assert outcomes[watcher].value == [frozen]
