"""Messages that need no collective: also while one is stuck, and when a rank is gone."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

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
from lightning_lockstep.distributed.side_channel import zeromq
from lightning_lockstep.distributed.side_channel.zeromq import sender_of
from lightning_lockstep.errors import LaunchError
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
    # As at the exit of Python 3.12 and later, which start no thread any more.
    with patch.object(threading.Thread, "start", side_effect=RuntimeError("interpreter shutdown")):
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


def test_a_faulty_handler_silences_nobody_and_a_removed_one_hears_nothing() -> None:
    assert run_ranks(2, faulty_handler) == [["one"], ["one"]]


def watched_channel() -> tuple[SideChannel, list[str]]:
    """The channel, and why it was lost: filled when it is; no rank goes on before all watch theirs."""
    communicator = current_communicator()
    channel = communicator.side_channel
    reasons: list[str] = []
    channel.watch_peers(on_lost=lambda rank, reason: reasons.append(f"{rank}: {reason}"))
    known = range(channel.world_size) if channel.rank == 0 else (0,)
    assert wait_until(lambda: all(channel.process_of(r)[1] for r in known if r != channel.rank))
    communicator.barrier()
    return channel, reasons


def lose_rank_zero() -> list[str]:
    channel, reasons = watched_channel()
    if channel.rank == 0:
        os._exit(7)
    assert wait_until(lambda: bool(reasons))
    assert channel.claim("key", "mine") == "mine", "without rank 0 everybody's own word stands"
    assert not channel.usable and channel.lost
    shut_down(0.0)
    return reasons


def test_the_end_of_rank_zero_is_noticed_at_once() -> None:
    outcomes = run_ranks_raw(3, lose_rank_zero)
    assert outcomes[0].returncode == 7
    for outcome in outcomes[1:]:
        assert outcome.ok, outcome.traceback
        (reason,) = outcome.value
        assert reason.startswith("0: nothing listens at 127.0.0.1"), reason


def orderly_end() -> list[str]:
    channel, reasons = watched_channel()
    if channel.rank == 0:
        shut_down(1.0)  # leaves first, though it hosts the store
    else:
        time.sleep(3.0)
        shut_down()
    return reasons


def test_a_goodbye_of_rank_zero_is_no_loss() -> None:
    assert run_ranks(2, orderly_end) == [[], []]


def frozen_rank(frozen: int, for_good: bool, folder: Path) -> list[Any]:
    """One rank is stopped; another process lets it go on after a while, or not at all."""
    communicator = current_communicator()
    channel = open_with(heartbeat_timeout=0.6, silence_limit=1.0 if for_good else 10.0)
    noticed: list[Any] = []
    heard = threading.Event()
    channel.watch_peers(
        on_silent=lambda rank, seconds, reason: noticed.append([rank, seconds > 1.0, reason]),
        on_lost=lambda rank, reason: noticed.append([rank, "lost", reason]),
    )
    channel.on("awake", lambda message: heard.set())
    pids = communicator.gather(os.getpid())
    communicator.barrier()
    if communicator.rank == frozen:
        if not for_good:
            subprocess.Popen(["sh", "-c", f"sleep 1.5; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        for _ in range(3):  # what it posts before it has seen that its connection has ended may be lost
            channel.post("awake")
            channel.flush()
            time.sleep(0.3)
    elif for_good:
        watchers = watchers_of(frozen)
        if communicator.rank in watchers:
            assert wait_until(lambda: bool(noticed))
            # Not over the channel: rank 0, by way of which it would go, may be the one that is stopped.
            (folder / str(communicator.rank)).touch()
        assert wait_until(lambda: all((folder / str(watcher)).exists() for watcher in watchers))
        with contextlib.suppress(ProcessLookupError):  # another rank was faster
            os.kill(pids[frozen], signal.SIGKILL)  # nothing else would end it
    else:
        assert heard.wait(20)
    if not for_good:
        communicator.barrier()  # a channel that is closed without waiting may leave before its goodbye
    channel.close(0.0)
    return noticed[:1] if for_good else noticed  # the end of the stopped rank is noticed, too


def watchers_of(rank: int) -> set[int]:
    """Rank 0 watches all, and all watch rank 0."""
    return {1, 2} if rank == 0 else {0}


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_rank_that_is_stopped_for_a_while_is_not_lost(frozen: int, tmp_path: Path) -> None:
    answers = run_ranks(3, frozen_rank, frozen, False, tmp_path)
    assert answers == [[], [], []]


@pytest.mark.parametrize("frozen", [0, 2])
def test_a_rank_that_is_stopped_for_good_is_named(frozen: int, tmp_path: Path) -> None:
    outcomes = run_ranks_raw(3, frozen_rank, frozen, True, tmp_path)
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


def test_what_belongs_to_a_channel_is_made_once_and_goes_with_it() -> None:
    channel = LocalSideChannel()
    assert stop_agreement(channel) is stop_agreement(channel)
    assert stop_agreement(LocalSideChannel()) is not stop_agreement(channel)
    is_there = weakref.ref(channel)
    del channel
    gc.collect()
    assert is_there() is None


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


# ------------------------------------------------------------------ ranks of one process

KEYS = channel_keys("of this test")


@contextlib.contextmanager
def channels(number: int, *, absent: int = 0) -> Iterator[list[ZeroMQSideChannel]]:
    """The ranks of a channel, in this process, but for some of the highest that do not come."""
    main = ZeroMQSideChannel(0, number + absent, host="127.0.0.1", keys=KEYS)
    others = [
        ZeroMQSideChannel(rank, number + absent, host="127.0.0.1", keys=KEYS, main_address=main.address)
        for rank in range(1, number)
    ]
    try:
        assert all(one.wait_for_main(20) for one in others)
        yield [main, *others]
    finally:
        for one in (*others, main):
            one.close(0.2)


def vanish(channel: ZeroMQSideChannel) -> None:
    """Let a channel end as with its process, without a word."""
    channel._closing = True
    channel._put(channel._end)
    channel._sockets.join(20)
    channel._arrived.put(None)
    channel._calls.join(20)
    channel._context.term()


@contextlib.contextmanager
def stranger_as(identity: bytes, main: ZeroMQSideChannel) -> Iterator[Any]:
    """A socket of somebody who knows the token."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger, peer.reconnect_ivl = 0, -1
        if identity:
            peer.identity = identity
        peer.curve_publickey, peer.curve_secretkey = zmq.curve_keypair()
        peer.curve_serverkey = KEYS.public
        peer.connect(main.address)
        yield peer


def listen(channel: SideChannel, topic: str = "news") -> list[tuple[int, Any]]:
    got: list[tuple[int, Any]] = []
    channel.on(topic, lambda message: got.append((message.sender, message.body)))
    return got


def test_rank_0_routes_to_one_to_some_and_to_all_in_order() -> None:
    with channels(4) as ranks:
        got = [listen(one) for one in ranks]
        ranks[1].post("news", "all")
        ranks[1].post("news", "some", to=[0, 1, 3])
        ranks[1].post("news", "one", to=2)
        ranks[0].post("news", "from the middle")
        wanted = [
            {"all", "some"},
            {"some", "from the middle"},
            {"all", "one", "from the middle"},
            {"all", "some", "from the middle"},
        ]
        assert wait_until(lambda: [{body for _, body in one} for one in got] == wanted)
        assert [body for sender, body in got[3] if sender == 1] == ["all", "some"]
        assert all(sender == (0 if body == "from the middle" else 1) for one in got for sender, body in one)


def test_a_handler_that_blocks_on_rank_0_keeps_nothing_from_being_routed() -> None:
    with channels(3) as ranks:
        goes_on, blocks = threading.Event(), threading.Event()

        def block(message: Message) -> None:
            blocks.set()
            goes_on.wait(20)

        ranks[0].on("slow", block)
        got = listen(ranks[2])
        ranks[1].post("slow", to=0)
        assert blocks.wait(20)
        ranks[1].post("news", "meanwhile", to=2)
        assert wait_until(lambda: got == [(1, "meanwhile")])
        goes_on.set()


def test_what_is_posted_before_a_rank_connects_is_kept_for_it() -> None:
    main = ZeroMQSideChannel(0, 2, host="127.0.0.1", keys=KEYS)
    for number in range(100):
        main.post("news", number)
    assert main.flush(20), "nobody is there to wait for"
    other = ZeroMQSideChannel(1, 2, host="127.0.0.1", keys=KEYS, main_address=main.address)
    got = listen(other)
    assert wait_until(lambda: len(got) == 100)
    assert [body for _, body in got] == list(range(100))
    other.close()
    main.close()


@pytest.mark.parametrize("gone", [0, 2])
def test_the_end_of_a_process_is_noticed_by_those_who_watch_it(gone: int) -> None:
    with channels(3) as ranks:
        lost: list[list[int]] = [[], [], []]
        for rank, one in enumerate(ranks):
            one.watch_peers(on_lost=lambda gone, _, rank=rank: lost[rank].append(gone))  # type: ignore[misc]
        assert wait_until(lambda: all(ranks[0].answers(rank) for rank in (1, 2)))
        vanish(ranks[gone])
        expected = [[], [0], [0]] if gone == 0 else [[2], [], []]
        assert wait_until(lambda: lost == expected)
        assert not any(ranks[rank].answers(gone) for rank in watchers_of(gone))


def test_a_peer_that_is_being_killed_and_still_answers_is_asked_again_soon() -> None:
    with channels(2) as (main, other), socket.create_server(("127.0.0.1", 0)) as listener:
        assert wait_until(lambda: main.answers(1))
        lost: list[int] = []
        main.watch_peers(on_lost=lambda rank, _: lost.append(rank))
        main._probe_at[1] = listener.getsockname()
        vanish(other)
        assert wait_until(lambda: not main.answers(1))
        time.sleep(0.2)
        assert lost == []
        listener.close()
        assert wait_until(lambda: lost == [1], seconds=2.0)


def test_a_rank_that_was_stopped_is_said_to_be_also_once_its_queue_is_full_of_probes() -> None:
    with channels(2) as (main, other), socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
        silent: list[str] = []
        main.silence_limit = 1.0
        main.watch_peers(on_silent=lambda rank, seconds, reason: silent.append(reason))
        assert wait_until(lambda: main.answers(1))
        main._probe_at[1] = listener.getsockname()
        vanish(other)
        assert wait_until(lambda: bool(silent))
        assert "it was stopped" in silent[0]


def test_what_a_rank_has_sent_before_it_ended_is_told_before_its_end() -> None:
    with channels(2) as (main, other):
        order: list[str] = []
        main.watch_peers(on_lost=lambda rank, _: order.append("lost"))
        main.on("slow", lambda message: (time.sleep(0.7), order.append(message.body))[0])
        assert wait_until(lambda: main.answers(1))
        other.post("slow", "the reason", to=0)
        assert wait_until(lambda: main._arrived.qsize() == 0)
        vanish(other)
        assert wait_until(lambda: "lost" in order)
        assert order == ["the reason", "lost"]


def test_ranks_that_do_not_answer_have_one_thread_and_are_told_whatever_the_listener_does() -> None:
    with channels(1, absent=20) as (main,), contextlib.ExitStack() as stack:
        lost: set[int] = set()

        def on_lost(rank: int, reason: str) -> None:
            lost.add(rank)
            raise RuntimeError("can't start new thread")

        main.watch_peers(on_lost=on_lost)
        for rank in range(1, 21):
            peer = stack.enter_context(stranger_as(str(rank).encode(), main))
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            peer.send_multipart((b"hello", b"", json.dumps(["", 1, *listener.getsockname()]).encode()))
        assert wait_until(lambda: all(main.answers(rank) for rank in range(1, 21)))
        for descriptor in tuple(main._connections):
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        assert wait_until(lambda: len(main._suspects) == 20)
        assert [thread.name for thread in threading.enumerate()].count("lockstep-probe") == 1
        assert lost == set()
        stack.close()
        assert wait_until(lambda: lost == set(range(1, 21)))
        assert wait_until(lambda: "lockstep-probe" not in [thread.name for thread in threading.enumerate()])


@pytest.mark.parametrize("hard", [5000, 1000])
def test_rank_0_may_have_a_connection_to_every_rank(monkeypatch: pytest.MonkeyPatch, hard: int) -> None:
    limits = [64, hard]

    def set_limits(_: int, to: tuple[int, int]) -> None:
        if to[0] > hard:
            raise ValueError("current limit exceeds maximum limit")
        limits[0] = to[0]

    monkeypatch.setattr(zeromq.resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(zeromq.resource, "setrlimit", set_limits)
    if hard == 1000:
        with pytest.raises(
            LaunchError, match=r"may open 1000 files and connections at once: it needs 1\d\d\d"
        ):
            zeromq.need_descriptors(1000)
    else:
        zeromq.need_descriptors(1000)
        assert 1000 < limits[0] < 2000
        zeromq.need_descriptors(10)
        assert limits[0] > 1000, "it is never lowered"
        zeromq.need_descriptors(hard - 150)
        assert limits[0] == hard, "as many to spare as there are"


def test_a_rank_that_has_closed_its_channel_is_neither_lost_nor_there() -> None:
    with channels(2) as (main, other):
        lost: list[int] = []
        main.watch_peers(on_lost=lambda rank, _: lost.append(rank))
        assert wait_until(lambda: main.answers(1) and other.process_of(0)[1])
        assert main.process_of(1) == other.process_of(0) == (socket.gethostname(), os.getpid())
        other.close()
        assert main.has_closed(1) and not main.answers(1)
        time.sleep(0.5)
        assert lost == []


def test_a_rank_whose_connection_broke_comes_back_and_is_watched_again() -> None:
    with channels(2) as (main, other):
        lost: list[int] = []
        main.watch_peers(on_lost=lambda rank, _: lost.append(rank))
        got = listen(other)
        assert wait_until(lambda: main.answers(1))
        (descriptor,) = main._connections
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
        assert wait_until(lambda: not main.answers(1))
        for number in range(10):
            main.post("news", number)
        assert wait_until(lambda: [body for _, body in got] == list(range(10)))
        assert main.answers(1) and lost == []
        vanish(other)
        assert wait_until(lambda: lost == [1])


def test_a_connection_that_was_replaced_does_not_hide_the_end_of_the_one_in_its_place() -> None:
    with channels(1, absent=1) as (main,), contextlib.ExitStack() as peers:
        lost: list[int] = []
        main.watch_peers(on_lost=lambda rank, _: lost.append(rank))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for number in (1, 2):
                peer = peers.enter_context(stranger_as(b"1", main))
                hello = json.dumps([f"host {number}", 1, *listener.getsockname()])
                peer.send_multipart((b"hello", b"", hello.encode()))
                assert wait_until(lambda number=number: main.process_of(1) == (f"host {number}", 1))  # type: ignore[misc]
            assert wait_until(lambda: main.answers(1))
        peer.close()
        assert wait_until(lambda: lost == [1])


@pytest.mark.parametrize(
    "frames",
    [
        (b"post", b"7", b'["news", 1]'),  # no such rank
        (b"post", b"1,-1", b'["news", 1]'),
        (b"post", b"x", b'["news", 1]'),
        (b"post", b"0", b"not JSON"),
        (b"post", b"0", b"[]"),
        (b"hello", b"", b"[]"),
        (b"hello", b"", b'["host", 1, "127.0.0.1"]'),
        (b"flush",),
        (b"arrived", b"", b"x"),
        (b"unknown", b"", b""),
        (b"",),
        (b"post", b"", b"", b""),
    ],
)
def test_a_message_that_makes_no_sense_is_ignored(
    frames: tuple[bytes, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with channels(1, absent=1) as (main,), stranger_as(b"1", main) as peer:
        got = listen(main)
        peer.send_multipart(frames)
        peer.send_multipart((b"post", b"0", b'["news", "well-formed"]'))
        assert wait_until(lambda: got == [(1, "well-formed")])
        assert "ignored a malformed message" in caplog.text


@pytest.mark.parametrize("identity", [b"0", b"2", b"-1", b"x", b""])
def test_who_is_no_other_rank_is_not_listened_to(identity: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with channels(2) as (main, other), stranger_as(identity, main) as peer:
        got = listen(main)
        peer.send_multipart((b"post", b"0", b'["news", "forged"]'))
        assert wait_until(lambda: "ignored a malformed message" in caplog.text)
        other.post("news", "from rank 1", to=0)
        assert wait_until(lambda: got == [(1, "from rank 1")])


def test_nothing_is_read_from_a_connection_to_another_rank_than_0() -> None:
    with channels(2) as (main, other):
        host, _, port = other.address.removeprefix("tcp://").rpartition(":")
        got = listen(other)
        for _ in range(3):
            with socket.create_connection((host, int(port)), timeout=20) as connection:
                with contextlib.suppress(OSError):
                    connection.sendall(b"x" * 1000)
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(1) == b"", "it is closed at once"
        main.post("news", "from rank 0")
        assert wait_until(lambda: got == [(0, "from rank 0")])
