"""Messages that need no collective: also while one is stuck, and when a rank is gone."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from lightning_lockstep.distributed import (
    LocalSideChannel,
    Message,
    SideChannel,
    StoreSideChannel,
    current_communicator,
    shut_down,
)
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
    communicator.barrier()
    return channel, reasons


def lose_rank_zero() -> str:
    channel, reasons = watched_channel()
    if channel.rank == 0:
        os._exit(7)
    assert wait_until(lambda: bool(reasons))
    assert channel.claim("key", "mine") == "mine", "without a store everybody's own word stands"
    assert channel.flush(0.1) is False
    shut_down(0.0)
    return reasons[0]


def test_the_end_of_rank_zero_is_noticed_at_once() -> None:
    outcomes = run_ranks_raw(3, lose_rank_zero)
    assert outcomes[0].returncode == 7
    for outcome in outcomes[1:]:
        assert outcome.ok, outcome.traceback
        assert outcome.value.startswith("0: ") and "closed" in outcome.value


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


def silent_rank() -> list[tuple[int, bool]]:
    """Rank 1's channel is made to stop beating; rank 0 must notice and name it."""
    communicator = current_communicator()
    server = (
        dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if communicator.is_main else None
    )
    port = communicator.broadcast(server.port if server else None)
    noticed: list[tuple[int, bool]] = []
    channel = StoreSideChannel(
        "127.0.0.1",
        port,
        rank=communicator.rank,
        world_size=communicator.world_size,
        server=server,
        heartbeat_interval=0.1 if communicator.rank != 1 else 3600.0,
        silence_limit=1.0,
    )
    channel.watch_peers(on_silent=lambda rank, seconds: noticed.append((rank, seconds > 1.0)))
    communicator.barrier()
    if communicator.is_main:
        wait_until(lambda: bool(noticed))
    communicator.barrier()
    channel.close()
    return noticed[:1]


def test_a_rank_without_heartbeat_is_named() -> None:
    assert run_ranks(3, silent_rank)[0] == [(1, True)]


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
