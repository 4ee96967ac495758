"""Which lines are printed when, decided without threads or clocks; and what a line is on its way."""

from __future__ import annotations

import json
import logging
import math
import random
import sys

import pytest

from lightning_lockstep.distributed import SideChannel
from lightning_lockstep.logs.collector import LINE, WARNING, Collector, Line, Windows, record_of
from lightning_lockstep.logs.logger import call_of

SITE = ("lib", 20, "/x/train.py", 7)


def line(rank: int, text: str = "same") -> Line:
    return Line(*SITE, text, 100.0 + rank, "f", "", {}, (rank,), (f"host{rank // 2}",))


def seen(batches) -> list[tuple[str, tuple[int, ...]]]:
    """What is printed together, as rank and text, and the ranks that are missing."""
    return [(" ".join(f"{one.ranks[0]}:{one.text}" for one in batch.lines), batch.missing) for batch in batches]


def played(calls, *, ranks: int = 2, until: float = 60.0) -> list[tuple[float, str, tuple[int, ...]]]:
    """Log `calls` of (time, rank, text) at one call site, and return what is printed when."""
    windows, printed = Windows(ranks), []
    events = sorted([*calls, *((tick / 4, -1, "") for tick in range(int(until * 4)))])
    for now, rank, text in events:
        batches = windows.due(now) if rank < 0 else windows.add(SITE, line(rank, text), now)
        printed += [(now, *one) for one in seen(batches)]
    assert not windows and windows.next_due() == math.inf
    assert sorted(f"{rank}:{text}" for _, rank, text in calls) == sorted(
        one for _, texts, _ in printed for one in texts.split()
    ), "nothing is lost or printed twice"
    return printed


def every(seconds: float, numbers, ranks=(0, 1), *, late: float = 0.01) -> list[tuple[float, int, str]]:
    """Every rank logs each of `numbers`, a little after the rank before it."""
    return [(number * seconds + rank * late, rank, str(number)) for number in numbers for rank in ranks]


def test_printed_in_rank_order_once_all_have_come():
    calls = [(0.0, 2, "c"), (0.1, 0, "a"), (0.2, 1, "b")]
    assert played(calls, ranks=3) == [(0.2, "0:a 1:b 2:c", ())]


def test_a_rank_that_never_logs_is_named_after_the_timeout():
    assert played([(10.0, 2, "c"), (12.0, 0, "a")], ranks=3) == [(15.0, "0:a 2:c", (1,))]


@pytest.mark.parametrize("seconds", [0.05, 1.0, 1.25, 2.5, 10.0])
def test_a_skipped_call_is_named_and_shifts_no_line_after_it(seconds):
    calls = [(0.0, 0, "0"), *every(seconds, range(1, 40))]
    first, *others = played(calls, until=500.0)
    assert first == (5.0, "0:0", (1,))
    assert [texts for _, texts, _ in others] == [f"0:{number} 1:{number}" for number in range(1, 40)]
    assert not any(missing for _, _, missing in others)
    prompt = [now for now, texts, _ in others if now < int(texts.split(":")[2]) * seconds + 0.3]
    assert len(prompt) >= sum(number * seconds > 5.0 for number in range(1, 40)), "only one window comes late"


def test_a_line_that_comes_after_its_window_shifts_no_line_after_it():
    calls = [(0.0, 0, "0"), (8.0, 1, "0"), *every(1.0, range(10, 30))]
    printed = played(calls)
    assert printed[:2] == [(5.0, "0:0", (1,)), (13.0, "1:0", (0,))]
    assert [texts for _, texts, _ in printed[2:]] == [f"0:{number} 1:{number}" for number in range(10, 30)]
    assert all(now < 14.0 or now == int(texts.split(":")[2]) + 0.01 for now, texts, _ in printed[2:])


def test_nothing_is_lost_or_doubled_whatever_the_order_of_arrival():
    chance = random.Random(3)
    for _ in range(50):
        ranks, calls = chance.randint(1, 6), chance.randint(1, 20)
        said = [(r, c) for r in range(ranks) for c in range(calls) if chance.random() < 0.8]
        times = sorted(chance.random() * 20 for _ in said)
        chance.shuffle(said)
        played([(now, rank, str(call)) for now, (rank, call) in zip(times, said, strict=True)], ranks=ranks)


@pytest.fixture
def printed() -> list[str]:
    """What the collector prints."""
    return []


@pytest.fixture
def collector(printed):
    """The collector of four ranks."""
    channel = SideChannel()
    channel.world_size = 4
    yield Collector(channel, emit=lambda record: printed.append(record.getMessage()))
    channel.close()


def test_equal_lines_are_merged(collector, printed):
    for rank in (2, 3, 1):
        collector.take(LINE, rank, list(line(rank))[:-2])
    collector.take(LINE, 0, line(0)[:-2])
    collector.flush()
    assert printed == ["[ranks 0-3] same"]


def test_of_equal_warnings_one_is_shown(collector, printed):
    for rank in (1, 3):
        collector.take(WARNING, rank, line(rank, "not on rank 0")[:-2])
    for rank in (1, 2):
        collector.take(WARNING, rank, line(rank, "rank 0 has printed it")[:-2])
    collector.take(WARNING, 0, line(0, "rank 0 has printed it")[:-2])
    collector.flush()
    assert printed == ["[ranks 1,3] not on rank 0"], "and no note of the ranks that are missing"


def test_a_record_survives_the_way_to_rank_0():
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        record = logging.getLogger("a.b").makeRecord(
            "a.b", 40, "/x/y.py", 12, "got %d", (5,), sys.exc_info(), "f", {"batch": 3, "odd": object()}
        )
    there = record_of(Line(*json.loads(json.dumps(call_of(record))), (4,), ("h",)))
    assert there.getMessage() == "[rank 4] got 5" and there.levelname == "ERROR" and there.batch == 3
    place = (there.name, there.filename, there.module, there.lineno, there.funcName)
    assert place == ("a.b", "y.py", "y", 12, "f")
    assert "ZeroDivisionError" in there.exc_text and "object" in there.odd


def test_a_line_that_cannot_be_formatted_is_logged_all_the_same():
    knot: list = []
    knot.append(knot)
    record = logging.getLogger("a").makeRecord(
        "a", 20, "/x.py", 1, "%d of %d", ("one",), None, "f", {"knot": knot, "pair": {(1, 2): 3}}
    )
    line = Line(*call_of(record), (0,), ("h",))
    assert line.text.startswith("'%d of %d' with ('one',), which cannot be filled in: TypeError")
    assert line.extra["knot"] == "[[...]]" and line.extra["pair"] == "{(1, 2): 3}"
