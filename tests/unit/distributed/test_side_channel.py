"""Messages of the side channel between ranks that are all in this process: routing, ends, strangers."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import zmq

from lightning_lockstep.distributed import SideChannel, ZeroMQSideChannel
from lightning_lockstep.distributed.failure.interrupt import connections
from lightning_lockstep.distributed.rendezvous import channel_keys
from lightning_lockstep.distributed.side_channel import zeromq
from lightning_lockstep.errors import LaunchError
from tests.harness.patience import wait_until

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
        assert all(one.wait_for(lambda one=one: one.answers(0), 20) for one in others)
        yield [main, *others]
    finally:
        for one in (*others, main):
            one.close(0.2)


def vanish(channel: ZeroMQSideChannel) -> None:
    """Let a channel end as with its process, without a word."""
    channel._closing = True
    channel._put(channel._ended.set)
    channel._sockets.join(20)
    channel._context.term()


@contextlib.contextmanager
def stranger_as(identity: bytes, main: ZeroMQSideChannel) -> Iterator[Any]:
    """A socket of somebody who knows the token."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger, peer.reconnect_ivl = 0, -1
        if identity:
            peer.identity = identity
        peer.curve_publickey, peer.curve_secretkey = zmq.curve_keypair()
        peer.curve_serverkey = KEYS[0]
        peer.connect(main.address)
        yield peer


def listen(channel: SideChannel) -> list[tuple[int, Any]]:
    got: list[tuple[int, Any]] = []
    channel.on("news", lambda message: got.append((message.sender, message.body)))
    return got


def test_rank_0_posts_to_one_to_some_and_to_all_in_order_and_the_others_to_rank_0() -> None:
    with channels(4) as ranks:
        got = [listen(one) for one in ranks]
        ranks[0].post("news", "all")
        ranks[0].post("news", "some", to=[0, 1, 3])
        ranks[0].post("news", "one", to=2)
        for rank in (1, 3):
            ranks[rank].post("news", f"from {rank}", to=0)
        wanted = [{"some", "from 1", "from 3"}, {"all", "some"}, {"all", "one"}, {"all", "some"}]
        assert wait_until(lambda: [{body for _, body in one} for one in got] == wanted)
        assert got[3] == [(0, "all"), (0, "some")]
        assert all(body == ("some" if sender == 0 else f"from {sender}") for sender, body in got[0])
        with pytest.raises(ValueError, match="can post to rank 0 alone"):
            ranks[1].post("news", "to another", to=2)


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
            one.watch_peers(on_lost=lambda gone, rank=rank: lost[rank].append(gone))  # type: ignore[misc]
        assert wait_until(lambda: all(ranks[0].answers(rank) for rank in (1, 2)))
        vanish(ranks[gone])
        expected = [[], [0], [0]] if gone == 0 else [[2], [], []]
        assert wait_until(lambda: lost == expected)
        assert not any(ranks[rank].answers(gone) for rank in ({1, 2} if gone == 0 else {0}))
        assert [ranks[1].lost, ranks[1].usable] == [gone == 0, gone != 0]


def test_what_a_rank_has_sent_before_it_ended_is_told_before_its_end() -> None:
    with channels(2) as (main, other):
        order, begun = list[str](), threading.Event()
        main.watch_peers(on_lost=lambda rank: order.append("lost"))
        main.on("slow", lambda message: (begun.set(), time.sleep(0.7), order.append(message.body))[0])
        assert wait_until(lambda: main.answers(1))
        other.post("slow", "the reason", to=0)
        assert begun.wait(20)
        vanish(other)
        assert wait_until(lambda: "lost" in order)
        assert order == ["the reason", "lost"]


def test_a_handler_that_fails_does_not_end_the_channel(caplog: pytest.LogCaptureFixture) -> None:
    with channels(3) as (main, other, ends):
        main.watch_peers(on_lost=lambda rank: [][rank])
        main.on("wrong", lambda message: 1 / 0)  # type: ignore[arg-type,return-value]
        got = listen(main)
        assert wait_until(lambda: main.answers(2))
        other.post("wrong", to=0)
        vanish(ends)
        told = ("topic 'wrong' failed", "topic 'lost' failed")
        assert wait_until(lambda: all(text in caplog.text for text in told))
        other.post("news", "still there", to=0)
        assert wait_until(lambda: got == [(1, "still there")])


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
        with pytest.raises(LaunchError, match=r"may open 1000 files and connections at once: it needs 1\d\d\d"):
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
        main.watch_peers(on_lost=lambda rank: lost.append(rank))
        assert wait_until(lambda: main.answers(1) and other.process_of(0)[1])
        assert main.process_of(1) == other.process_of(0) == (socket.gethostname(), os.getpid())
        other.close()
        assert main.has_closed(1) and not main.answers(1)
        time.sleep(0.5)
        assert lost == []


def test_a_goodbye_of_rank_zero_is_no_loss_and_threads_end() -> None:
    with channels(3) as (main, *others):
        lost: list[int] = []
        for one in others:
            one.watch_peers(lost.append)
        # As at the exit of Python 3.12 and later, which start no thread any more.
        with patch.object(threading.Thread, "start", side_effect=RuntimeError("interpreter shutdown")):
            main.close(0.5)
            assert wait_until(lambda: all(one.has_closed(0) for one in others))
            for one in others:
                one.close()
        assert lost == []
        assert not any(one._sockets.is_alive() for one in (main, *others))


def test_a_rank_whose_connection_broke_comes_back_and_is_watched_again() -> None:
    with channels(2) as (main, other):
        lost: list[int] = []
        main.watch_peers(on_lost=lambda rank: lost.append(rank))
        got = listen(other)
        assert wait_until(lambda: main.answers(1))
        main.processes.clear()
        for (here, _), descriptor in connections().items():
            if here.endswith(f":{main.port}"):
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
        assert wait_until(lambda: main.process_of(1)[1] and main.answers(1)), "it has said hello once more"
        for number in range(10):
            main.post("news", number)
        assert wait_until(lambda: [body for _, body in got] == list(range(10)))
        assert main.answers(1) and lost == []
        vanish(other)
        assert wait_until(lambda: lost == [1])


def test_strangers_are_not_listened_to_and_messages_may_be_large() -> None:
    """Somebody without the token, and somebody without the protocol, write to rank 0's port."""
    with channels(2, absent=1) as ranks:
        main, other = ranks
        got = [listen(one) for one in ranks]
        stranger = ZeroMQSideChannel(2, 3, keys=channel_keys("another"), main_address=main.address)
        stranger.post("news", "forged", to=0)
        assert not stranger.wait_for(lambda: stranger.answers(0), 1.0)
        stranger.close(0.0)
        with socket.create_connection(("127.0.0.1", main.port)) as raw:
            raw.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(1000))
        text = "x" * 20_000_000
        main.post("news", text)
        other.post("news", text, to=0)
        assert wait_until(lambda: got == [[(1, text)], [(0, text)]])


#: No JSON, missing parts, parts too many.
MALFORMED = [
    (b"not JSON",),
    (b"[]",),
    (b"",),
    (b'["news"]',),
    (b'["news", 1, 2]',),
    (b'["channel/hello", []]',),
    (b'["channel/hello", ["host", 1, "127.0.0.1"]]',),
    (b'["news", 1]', b"0"),
]


def test_a_message_that_makes_no_sense_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    with channels(1, absent=1) as (main,), stranger_as(b"1", main) as peer:
        got = listen(main)
        for frames in MALFORMED:
            peer.send_multipart(frames)
        peer.send(b'["news", "well-formed"]')
        assert wait_until(lambda: got == [(1, "well-formed")])
        told = ("ignored a malformed message", "topic 'channel/hello' failed")
        assert sum(map(caplog.text.count, told)) == len(MALFORMED)


def test_who_is_no_other_rank_is_not_listened_to(caplog: pytest.LogCaptureFixture) -> None:
    with channels(2) as (main, other):
        got = listen(main)
        for number, identity in enumerate((b"0", b"2", b"-1", b"x", b""), start=1):
            with stranger_as(identity, main) as peer:
                peer.send(b'["news", "forged"]')
                assert wait_until(lambda number=number: caplog.text.count("a malformed message") == number)  # type: ignore[misc]
        other.post("news", "from rank 1", to=0)
        assert wait_until(lambda: got == [(1, "from rank 1")])
