"""Which lines are printed when, decided without threads or clocks."""

from __future__ import annotations

import json
import logging
import math
import random

import pytest

from lightning_lockstep.distributed import LocalSideChannel
from lightning_lockstep.logs.ordering import (
    CallSite,
    Line,
    LineOrdering,
    call_of,
    line_of,
    record_of,
)
from lightning_lockstep.logs.sender import Collector


def line(rank: int, text: str = "same", *, repeat: int = 0, level: int = 20, at: int = 7) -> Line:
    return Line(
        CallSite("lib", level, "/x/train.py", at, repeat), (rank,), (f"host{rank // 2}",), text, 100.0 + rank
    )


def texts(batches) -> list[tuple[tuple[int, ...], str]]:
    return [(printed.ranks, printed.text) for batch in batches for printed in batch.lines]


def test_prints_in_rank_order_once_all_have_come():
    ordering = LineOrdering(range(3))
    assert ordering.add(line(2, "c"), 0.0) == []
    assert ordering.add(line(0, "a"), 0.1) == []
    assert texts(ordering.add(line(1, "b"), 0.2)) == [((0,), "a"), ((1,), "b"), ((2,), "c")]
    assert ordering.next_due() == math.inf


def test_equal_lines_are_merged_unless_asked_not_to():
    merged, plain = LineOrdering(range(3)), LineOrdering(range(3), merging=False)
    for rank in (2, 0):
        merged.add(line(rank), 0.0)
        plain.add(line(rank), 0.0)
    assert texts(merged.add(line(1), 0.0)) == [((0, 1, 2), "same")]
    assert texts(plain.add(line(1), 0.0)) == [((0,), "same"), ((1,), "same"), ((2,), "same")]


def test_a_rank_that_never_logs_is_named_after_the_timeout():
    ordering = LineOrdering(range(3), timeout=5.0)
    ordering.add(line(2, "c"), 10.0)
    ordering.add(line(0, "a"), 12.0)
    assert ordering.due(14.9) == [] and ordering.next_due() == 15.0
    (batch,) = ordering.due(15.0)
    assert texts([batch]) == [((0,), "a"), ((2,), "c")]
    assert batch.missing == (1,) and batch.waited == 5.0


def test_a_line_that_comes_after_the_timeout_is_printed_alone_and_at_once():
    ordering = LineOrdering(range(2), timeout=1.0)
    ordering.add(line(0), 0.0)
    ordering.due(1.0)
    (batch,) = ordering.add(line(1, "slow"), 9.0)
    assert batch.late and texts([batch]) == [((1,), "slow")] and batch.missing == ()


def test_a_rank_with_a_higher_level_is_not_waited_for():
    ordering = LineOrdering(range(2))
    ordering.note_level(1, "lib", logging.WARNING)
    assert texts(ordering.add(line(0), 0.0)) == [((0,), "same")]
    assert ordering.add(line(0, level=logging.WARNING, at=9), 0.0) == []  # that one it would log


def test_nothing_is_lost_or_doubled_whatever_the_order_of_arrival():
    chance = random.Random(3)
    for _ in range(50):
        ranks, calls = chance.randint(1, 6), chance.randint(1, 5)
        said = [(r, c) for r in range(ranks) for c in range(calls) if chance.random() < 0.8]
        chance.shuffle(said)
        ordering, out, now = LineOrdering(range(ranks), timeout=3.0), [], 0.0
        for rank, call in said:
            now += chance.random()
            out += ordering.due(now) + ordering.add(line(rank, f"{rank} {call}", at=call), now)
        out += ordering.flush(now)
        assert sorted(t for _, t in texts(out)) == sorted(f"{r} {c}" for r, c in said)
        for batch in out:
            assert [printed.ranks for printed in batch.lines] == sorted(p.ranks for p in batch.lines)


@pytest.fixture
def printed() -> list[str]:
    """What the collector prints."""
    return []


@pytest.fixture
def collector(printed):
    """The collector of four ranks."""
    channel = LocalSideChannel()
    channel.world_size = 4
    yield Collector(channel, emit=lambda record: printed.append(record.getMessage()))
    channel.close()


def test_one_of_the_ranks_equal_warnings_is_printed(collector, printed):
    ordering = LineOrdering(range(4), timeout=0.3, once=True)
    assert ordering.add(line(1), 0.0) == [] and ordering.add(line(3, at=8), 0.1) == []
    assert texts(ordering.due(0.3)) == [((1, 3), "same")]
    assert ordering.add(line(2), 5.0) == [] and ordering.next_due() == math.inf
    for rank in (1, 3):
        collector.add_once(line(rank))
    collector.flush()
    collector.add_once(line(2))
    collector.flush()
    assert printed == ["[ranks 1,3] same"], "no note of the missing ranks, and rank 2 is too late"


def test_a_warning_that_rank_0_has_printed_is_not_printed_again(collector, printed):
    collector.add_once(line(1))
    collector.add_once(line(0), printed=True)
    collector.add_once(line(2))
    collector.add_once(line(2, "only here"))
    collector.flush()
    assert printed == ["[rank 2] only here"]


def test_a_record_survives_the_way_to_rank_0():
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        import sys

        record = logging.getLogger("a.b").makeRecord(
            "a.b", 40, "/x/y.py", 12, "got %d", (5,), sys.exc_info(), "f", {"batch": 3, "odd": object()}
        )
    there = record_of(
        Line.unpack(json.loads(json.dumps(line_of(call_of(record), rank=4, host="h", repeat=2))))
    )
    assert there.getMessage() == "[rank 4] got 5" and there.levelname == "ERROR" and there.batch == 3
    assert (there.name, there.filename, there.module, there.lineno, there.funcName) == (
        "a.b",
        "y.py",
        "y",
        12,
        "f",
    )
    assert "ZeroDivisionError" in there.exc_text and "object" in there.odd


def test_a_line_that_cannot_be_formatted_is_logged_all_the_same():
    knot: list = []
    knot.append(knot)
    record = logging.getLogger("a").makeRecord(
        "a", 20, "/x.py", 1, "%d of %d", ("one",), None, "f", {"knot": knot, "pair": {(1, 2): 3}}
    )
    line = line_of(call_of(record), rank=0, host="h", repeat=0)
    assert line.text.startswith("'%d of %d' with ('one',), which cannot be filled in: TypeError")
    assert line.extra["knot"] == "[[...]]" and line.extra["pair"] == "{(1, 2): 3}"
