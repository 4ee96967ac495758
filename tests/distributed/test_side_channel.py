"""Messages that need no collective: also while one is stuck, and when a rank is gone."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import subprocess
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zmq

from lightning_lockstep.distributed import (
    LocalSideChannel,
    Message,
    SideChannel,
    ZeroMQSideChannel,
    current_communicator,
    shut_down,
)
from lightning_lockstep.distributed.coordination.stop_agreement import stop_agreement
from lightning_lockstep.distributed.rendezvous import channel_keys
from lightning_lockstep.distributed.side_channel import connections
from lightning_lockstep.distributed.side_channel.connections import sender_of
from tests.helpers import run_ranks, run_ranks_raw


def wait_until(condition: Any, seconds: float = 20.0) -> bool:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.005)
    return True


def exchange() -> dict[str, Any]:
    channel = current_communicator().side_channel
    got: list[tuple[int, Any]] = []
    channel.post("early", {"from": channel.rank})  # nobody listens yet: kept
    channel.post("mine", "only me", to=channel.rank)
    channel.on("early", lambda message: got.append((message.sender, message.body)))
    own: list[str] = []
    channel.on("mine", lambda message: own.append(message.body))
    for number in range(100):
        channel.post("ordered", number, to=[0])
    ordered: list[tuple[int, int]] = []
    channel.on("ordered", lambda message: ordered.append((message.sender, message.body)))
    claimed = channel.claim("first", str(channel.rank))
    others = channel.world_size - 1
    expected = 100 * channel.world_size if channel.rank == 0 else 0
    complete = wait_until(lambda: len(got) == others and own and len(ordered) == expected)
    current_communicator().barrier()
    shut_down()
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("lockstep")]
    return {
        "complete": complete,
        "early": sorted(got, key=lambda pair: pair[0]),
        "own": own,
        "in order": all(
            [body for sender, body in ordered if sender == rank] == list(range(100))
            for rank in {sender for sender, _ in ordered}
        ),
        "claimed": claimed,
        "threads": names,
    }


def test_messages_arrive_in_order_and_threads_end() -> None:
    answers = run_ranks(4, exchange)
    for rank, answer in enumerate(answers):
        assert answer["complete"], answer
        assert answer["early"] == [(r, {"from": r}) for r in range(4) if r != rank]
        assert answer["own"] == ["only me"]
        assert answer["in order"]
        assert answer["threads"] == [], "closing ends the threads"
    assert len({answer["claimed"] for answer in answers}) == 1, "everybody sees the same winner"


def heard_while_stuck() -> bool:
    """Rank 1 sits in an all-reduce that rank 0 joins only once rank 1 has confirmed a message."""
    communicator = current_communicator()
    channel = communicator.side_channel
    heard = threading.Event()
    if communicator.rank == 1:
        channel.on("ping", lambda message: channel.post("pong", to=0))
        dist.all_reduce(torch.ones(1))
        answer = True
    else:
        channel.on("pong", lambda message: heard.set())
        time.sleep(0.5)
        channel.post("ping")
        answer = heard.wait(20)
        dist.all_reduce(torch.ones(1))
    shut_down()
    return answer


@pytest.mark.slow
def test_a_rank_answers_while_it_sits_in_a_collective() -> None:
    assert run_ranks(2, heard_while_stuck) == [True, True]


def faulty_handler() -> list[str]:
    channel = current_communicator().side_channel
    got: list[str] = []

    def broken(message: Message) -> None:
        raise ValueError("handler of the user")

    channel.on("news", broken)
    remove = channel.on("news", lambda message: got.append(message.body))
    current_communicator().barrier()
    channel.post("news", "one")
    assert wait_until(lambda: got == ["one"])
    remove()
    current_communicator().barrier()
    channel.post("news", "two")
    current_communicator().barrier()
    channel.post("end", to=channel.rank)
    ended = threading.Event()
    channel.on("end", lambda message: ended.set())
    ended.wait(10)
    current_communicator().barrier()
    shut_down()
    return got


@pytest.mark.slow
def test_a_faulty_handler_silences_nobody_and_a_removed_one_hears_nothing() -> None:
    assert run_ranks(2, faulty_handler) == [["one"], ["one"]]


def watched_channel() -> tuple[SideChannel, list[str]]:
    """The channel, and why it was lost: filled when it is; no rank goes on before all watch theirs."""
    communicator = current_communicator()
    channel = communicator.side_channel
    reasons: list[str] = []
    channel.watch_peers(on_lost=lambda rank, reason: reasons.append(f"{rank}: {reason}"))
    communicator.barrier()
    assert wait_until(lambda: len(channel._addresses.ranks) == channel.world_size - 1), (
        "all addresses have come"
    )
    communicator.barrier()
    return channel, reasons


def lose_rank_zero() -> list[str]:
    channel, reasons = watched_channel()
    if channel.rank == 0:
        os._exit(7)
    assert wait_until(lambda: bool(reasons))
    channel.on("hello", lambda message: reasons.append(message.body))
    channel.post("hello", "the others still reach each other")
    assert wait_until(lambda: len(reasons) == 2)
    assert channel.claim("key", "mine") == "mine", "without rank 0 everybody's own word stands"
    assert not channel.usable and channel.lost
    shut_down(0.0)
    return reasons


@pytest.mark.slow
def test_the_end_of_rank_zero_is_noticed_at_once() -> None:
    outcomes = run_ranks_raw(3, lose_rank_zero)
    assert outcomes[0].returncode == 7
    for outcome in outcomes[1:]:
        assert outcome.ok, outcome.traceback
        assert outcome.value[0].startswith("0: nobody listens at 127.0.0.1"), outcome.value
        assert outcome.value[1] == "the others still reach each other"


def orderly_end() -> list[str]:
    channel, reasons = watched_channel()
    if channel.rank == 0:
        shut_down(1.0)  # leaves first, though it hosts the store
    else:
        time.sleep(3.0)
        shut_down()
    return reasons


@pytest.mark.slow
def test_a_goodbye_of_rank_zero_is_no_loss() -> None:
    assert run_ranks(2, orderly_end) == [[], []]


def frozen_rank(frozen: int, for_good: bool) -> list[Any]:
    """One rank is stopped; a process beside it lets it go on after a while, or not at all."""
    communicator = current_communicator()
    channel = open_with(heartbeat_timeout=0.6, silence_limit=3.0 if not for_good else 1.0)
    noticed: list[Any] = []
    heard = threading.Event()
    channel.watch_peers(
        on_silent=lambda rank, seconds, reason: noticed.append([rank, seconds > 1.0, reason]),
        on_lost=lambda rank, reason: noticed.append([rank, "lost", reason]),
    )
    channel.on("awake", lambda message: heard.set())
    told = set[int]()
    channel.on("noticed", lambda message: told.add(message.sender))
    pids = communicator.gather(os.getpid())
    communicator.barrier()
    if communicator.rank == frozen:
        if not for_good:
            subprocess.Popen(["sh", "-c", f"sleep 1.5; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        channel.post("awake")
        channel.flush()
        time.sleep(0.5)
    elif for_good:
        watchers = watchers_of(frozen)
        if communicator.rank in watchers:
            assert wait_until(lambda: bool(noticed))
            channel.post("noticed")
            told.add(communicator.rank)
        assert wait_until(lambda: told >= watchers)
        channel.flush(1.0)
        with contextlib.suppress(ProcessLookupError):  # another rank was faster
            os.kill(pids[frozen], signal.SIGKILL)  # nothing else would end it
    else:
        assert heard.wait(20)
    channel.close(0.0)
    return noticed[:1] if for_good else noticed  # the end of the stopped rank is noticed, too


def watchers_of(rank: int) -> set[int]:
    """Rank 0 watches all, and all watch rank 0."""
    return {1, 2} if rank == 0 else {0}


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_rank_that_is_stopped_for_a_while_is_not_lost(frozen: int) -> None:
    answers = run_ranks(3, frozen_rank, frozen, False)
    assert answers == [[], [], []]


@pytest.mark.parametrize("frozen", [0, 2])
def test_a_rank_that_is_stopped_for_good_is_named(frozen: int) -> None:
    outcomes = run_ranks_raw(3, frozen_rank, frozen, True)
    for watcher in watchers_of(frozen):
        (noticed,) = outcomes[watcher].value
        assert noticed[:2] == [frozen, True] and "it was stopped" in noticed[2]


def holds_the_gil() -> list[Any]:
    communicator = current_communicator()
    channel = open_with(heartbeat_timeout=0.6, silence_limit=1.0)
    noticed: list[Any] = []
    channel.watch_peers(
        on_silent=lambda *given: noticed.append(given), on_lost=lambda *given: noticed.append(given)
    )
    communicator.barrier()
    if communicator.rank == 1:
        ctypes.PyDLL(None).usleep(4_000_000)  # with the GIL held
    else:
        time.sleep(4)
    communicator.barrier()
    channel.close()
    return noticed


@pytest.mark.slow
def test_a_rank_that_holds_the_gil_is_not_silent() -> None:
    assert run_ranks(2, holds_the_gil) == [[], []]


def open_with(**options: Any) -> ZeroMQSideChannel:
    """A channel beside that of the communicator, with other limits."""
    communicator = current_communicator()
    keys, given = channel_keys("of this test"), {"host": "127.0.0.1", "heartbeat_interval": 0.2, **options}
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


def many_and_large() -> list[Any]:
    channel = open_with()
    got: list[int] = []
    channel.on("large", lambda message: got.append(len(message.body)))
    channel.post("large", "x" * 50_000_000)
    assert channel.flush(60)
    assert wait_until(lambda: len(got) == channel.world_size - 1)
    current_communicator().barrier()
    channel.close()
    return got


@pytest.mark.slow
def test_a_message_may_be_large() -> None:
    assert run_ranks(3, many_and_large) == [[50_000_000] * 2] * 3


def strangers() -> list[Any]:
    """Somebody without the token, and somebody without the protocol, write to rank 0's port."""
    channel = open_with()
    got: list[Any] = []
    channel.on("news", lambda message: got.append(message.body))
    current_communicator().barrier()
    if channel.rank == 0:
        stranger = ZeroMQSideChannel(
            1, 2, host="127.0.0.1", keys=channel_keys("another"), main_address=channel.address
        )
        stranger.post("news", "forged", to=0)
        assert not stranger.wait_for_main(1.0)
        stranger.close(0.0)
        with socket.create_connection(("127.0.0.1", int(channel.address.rpartition(":")[2]))) as raw:
            raw.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(1000))
    else:
        time.sleep(1.5)
        channel.post("news", "from rank 1", to=0)
        channel.flush()
    current_communicator().barrier()
    channel.close()
    return got


@pytest.mark.slow
def test_strangers_are_not_listened_to() -> None:
    assert run_ranks(2, strangers) == [["from rank 1"], []]


def test_one_process_hears_itself() -> None:
    channel = LocalSideChannel()
    got: list[Any] = []
    channel.on("topic", lambda message: got.append((message.sender, message.body)))
    channel.post("topic", ("a", 1), to=0)
    channel.post("topic", "nobody else is there")
    assert got == [(0, ["a", 1])]
    assert channel.claim("key", "first") == "first"
    assert channel.claim("key", "second") == "first"
    assert channel.flush()
    channel.close()


def test_a_peer_that_is_being_killed_and_still_answers_is_asked_again_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, gone = 0.0, list[int]()
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: now))
    watch = connections.PeerWatch(
        lambda: 60.0, on_gone=lambda rank, _: gone.append(rank), on_silent=lambda *_: None
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        watch.add(1, *listener.getsockname())
        watch.disconnected(1)
        watch.look()
    for _ in range(3):
        now += 0.11
        watch.look()
    assert gone == [1]


def test_what_belongs_to_a_channel_is_made_once_and_goes_with_it() -> None:
    channel = LocalSideChannel()
    assert stop_agreement(channel) is stop_agreement(channel)
    assert stop_agreement(LocalSideChannel()) is not stop_agreement(channel)
    is_there = weakref.ref(channel)
    del channel
    gc.collect()
    assert is_there() is None


def test_a_peer_answers_heartbeats_as_long_as_its_connection_stands() -> None:
    watch = connections.PeerWatch(lambda: 60.0, on_gone=lambda *_: None, on_silent=lambda *_: None)
    watch.add(1, "127.0.0.1", 1)
    assert not watch.answers(1)
    watch.connected(1)
    assert watch.answers(1)
    watch.disconnected(1)
    assert not watch.answers(1)
    watch.connected(1)
    watch.closed(1)
    assert not watch.answers(1)


def test_what_a_peer_has_sent_before_it_connected_again_is_read_as_its_own() -> None:
    """ZeroMQ gives the former connection a name of its own; its messages still carry what the peer called itself."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as inbox, context.socket(zmq.DEALER) as peer:
        inbox.linger = peer.linger = 0
        peer.identity = b"3"
        peer.connect(f"tcp://127.0.0.1:{inbox.bind_to_random_port('tcp://127.0.0.1')}")
        peer.send(b"content")
        assert inbox.poll(20_000)
        frame, _ = inbox.recv_multipart(copy=False)
        assert sender_of(frame) == b"3"
        former: Any = SimpleNamespace(bytes=b"\0k\x8bEg", get=frame.get)
        assert sender_of(former) == b"3"
