"""In-order logging between real processes."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_lockstep import CollectiveStallError, RankFailedError, get_logger, in_rank_order
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.failure.propagation import propagation_on
from lightning_lockstep.logs.logger import LineSender
from tests.harness import run_ranks, run_ranks_raw
from tests.harness.patience import wait_until


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.places: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.places.append((record.filename, record.funcName))


def prepared(name: str, timeout: float = 60.0):
    """A logger of this rank, what its handlers print here, and a way to wait for lines."""
    kept = Kept()
    logger = logging.getLogger(name)
    logger.addHandler(kept)
    logger.propagate = False
    sender = current_communicator().side_channel.get_or_create(LineSender)
    if sender.collector is not None:
        sender.collector.windows.timeout = timeout
    return get_logger(name, "INFO"), kept


def until(kept: Kept, count: int) -> list[str]:
    wait_until(lambda: len(kept.lines) >= count)
    return kept.lines


def cases() -> dict[str, Any]:
    return {
        "late channel": late_channel(),  # the first: it opens the channel
        "ordinary": ordinary_calls(),
        "odd": odd_calls(),
        "sections": rank_ordered_sections(),
    }


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return run_ranks(3, cases, timeout=90)


def ordinary_calls() -> dict[str, list]:
    rank = dist.get_rank()
    log, kept = prepared("ordinary")
    log.info("main")
    log.info("all", main_process_only=False)
    log.info("same %s", "words", in_order=True)
    store = dist.distributed_c10d._get_default_store()
    if rank < 2:
        store.wait([f"rank {rank + 1} has called"])  # the last rank calls first
    log.info("mine is %d", rank, in_order=True)
    store.set(f"rank {rank} has called", "")
    numbers = [1]
    log.info("now %s", numbers, in_order=True)
    numbers.append(2)  # too late for the line above
    if rank == 0:
        until(kept, 7)
    dist.barrier()
    return {"lines": kept.lines, "places": kept.places}


def test_who_prints_what(seen):
    values = [of_rank["ordinary"] for of_rank in seen]
    lines = values[0]["lines"]
    assert lines[:2] == ["main", "[rank 0] all"]
    assert sorted(lines[2:]) == sorted(
        [
            "[ranks 0-2] same words",
            "[ranks 0-2] now [1]",
            *[f"[rank {r}] mine is {r}" for r in range(3)],
        ]
    )
    mine = [line for line in lines if "mine" in line]
    assert mine == sorted(mine)
    assert set(values[0]["places"]) == {("test_ranks.py", "ordinary_calls")}
    assert [v["lines"] for v in values[1:]] == [[f"[rank {r}] all"] for r in (1, 2)]


def odd_calls() -> list[str]:
    rank = dist.get_rank()
    log, kept = prepared("odd", timeout=1.0)
    if rank == 1:
        logging.getLogger("odd").setLevel(logging.WARNING)
    log.info("rank 1 has another level", in_order=True)
    for count in range(2):
        if rank == 2 or count == 0:
            log.warning("rank 2 says it twice, %d", count, in_order=True)
        current_communicator().side_channel.flush()
        dist.barrier()
    if rank == 0:
        until(kept, 5)
    dist.barrier()
    return kept.lines


def test_a_rank_with_another_level_and_one_that_calls_twice(seen):
    assert sorted(line.split(" within")[0] for line in seen[0]["odd"]) == [
        "[rank 2] rank 2 says it twice, 1",
        "[ranks 0,2] rank 1 has another level",
        "[ranks 0-2] rank 2 says it twice, 0",
        "rank 1 did not log this line",
        "ranks 0-1 did not log this line",
    ]


def one_dies() -> list[str]:
    rank = dist.get_rank()
    log, kept = prepared("dies", timeout=1.0)
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank == 2:
        log.info("last line", in_order=True)
        current_communicator().side_channel.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    log.info("still here", in_order=True)
    if rank == 0:
        until(kept, 4)
        store.set("printed", "")
    store.wait(["printed"])  # the side channel is there as long
    return kept.lines


def test_a_rank_that_dies_holds_nobody_up_and_its_lines_are_printed():
    outcomes = run_ranks_raw(3, one_dies, timeout=40)
    assert outcomes[2].signal == signal.SIGKILL
    lines = outcomes[0].value
    assert "[rank 2] last line" in lines and "[ranks 0-1] still here" in lines
    assert sum("rank 2 did not log this line" in line for line in lines) == 1
    assert sum("ranks 0-1 did not log this line" in line for line in lines) == 1


def alone_and_out() -> None:
    """Rank 1 alone calls in order, and all leave at once: what is held back comes out at the exit."""
    log, _ = prepared("alone", timeout=60.0)
    logging.getLogger("alone").addHandler(logging.StreamHandler())
    dist.barrier()
    if dist.get_rank() == 1:
        log.info("only I", in_order=True)


def test_what_is_held_back_comes_out_at_the_exit():
    outcomes = run_ranks_raw(2, alone_and_out, timeout=40)
    assert all(o.ok for o in outcomes)
    assert "[rank 1] only I" in outcomes[0].stderr
    assert "rank 0 did not log this line" in outcomes[0].stderr


def rank_0_goes_first() -> list[str]:
    log, kept = prepared("orphans")
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    from lightning_lockstep.distributed.failure.process_exit import flush_everything

    log.info("after the failure", in_order=True)
    wait_until(lambda: not current_communicator().side_channel.usable)
    flush_everything()  # what the way out after a failure does
    return kept.lines


def test_when_rank_0_has_failed_the_others_print_what_it_may_not_have_printed():
    outcomes = run_ranks_raw(2, rank_0_goes_first, timeout=40)
    assert outcomes[1].value == ["[rank 1, printed here because rank 0 has failed] after the failure"]


def last_words(console: Path) -> None:
    """Rank 0 is killed, and the others write to one console; rank 2 prints its line as late as it can."""
    log, _ = prepared("last words")
    logging.getLogger("last words").addHandler(logging.StreamHandler())
    crash = propagation_on(current_communicator().side_channel)
    crash.attempt.grace_period = 20.0
    crash.enter()
    processes = [("", 0)] * 3
    dist.all_gather_object(processes, (socket.gethostname(), os.getpid()))
    crash.have_met(processes, 0)
    os.dup2(os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    log.info("my last line", in_order=True)
    try:
        dist.barrier()
    except RuntimeError as error:
        raised = crash.error_to_raise(error)
    end = time.monotonic() + 1.0
    while dist.get_rank() == 2 and time.monotonic() < end and "rank 0 of 3" not in console.read_text():
        time.sleep(0.01)
    sys.excepthook(type(raised), raised, None)  # as in a program that does not catch it


def test_when_rank_0_is_killed_the_report_of_that_stands_below_the_last_lines_of_all(tmp_path):
    run_ranks_raw(3, last_words, tmp_path / "console", timeout=60)
    console = (tmp_path / "console").read_text()
    lines = [console.rfind(f"[rank {rank}, printed here because rank 0 has failed] my") for rank in (1, 2)]
    assert -1 < max(lines) < console.rfind("lightning-lockstep: rank 0 of 3"), console


def late_channel() -> list[str]:
    """No set-up at all: rank 1 calls before rank 0 has opened anything."""
    kept = Kept()
    logging.getLogger("late").addHandler(kept)
    logging.getLogger("late").propagate = False
    log = get_logger("late", "INFO")
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["called 1", "called 2"])
    log.info("hello %d", rank, in_order=True)
    store.set(f"called {rank}", "")
    if rank == 0:
        until(kept, 3)
    dist.barrier()
    return kept.lines


def test_a_plain_process_group_needs_no_set_up(seen):
    assert seen[0]["late channel"] == [f"[rank {rank}] hello {rank}" for rank in range(3)]


def rank_ordered_sections() -> dict:
    rank, seen = dist.get_rank(), {}
    with in_rank_order() as number:
        began = time.monotonic()
        time.sleep(0.05)
        seen["first"] = (number, began, time.monotonic())
    try:
        with in_rank_order():
            seen["body"] = True
            if rank == 1:
                raise ValueError("disk full")
    except (ValueError, RankFailedError) as error:
        seen["raised"] = (type(error).__name__, str(error).splitlines()[0])
    with in_rank_order(per_node=True):
        seen["after"] = True
    try:
        if rank != 2:
            with in_rank_order(timeout=0.5):
                pass
    except CollectiveStallError as error:
        seen["stall"] = str(error)
    dist.barrier()
    return seen


def test_in_rank_order(seen):
    values = [of_rank["sections"] for of_rank in seen]
    spans = [v["first"] for v in values]
    assert [number for number, _, _ in spans] == [0, 1, 2]
    assert spans[0][2] <= spans[1][1] and spans[1][2] <= spans[2][1], "one after the other"
    text = "rank 1 failed in in_rank_order(): ValueError: disk full"
    assert [v["raised"] for v in values] == [
        ("RankFailedError", text),
        ("ValueError", "disk full"),
        ("RankFailedError", text),
    ]
    assert [("body" in v) for v in values] == [True, True, False], "ranks after the failure skip the body"
    assert all(v["after"] for v in values), "and the next block works again"
    for value in values[:2]:
        assert "in_rank_order()" in value["stall"] and "nothing from rank 2" in value["stall"]
