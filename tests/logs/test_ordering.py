"""Which lines are printed when, decided without threads or clocks."""

from __future__ import annotations

import json
import logging
import random

from lightning_lockstep.logs.lines import Line, Place, fold, line_of, rank_list, record_of, said_of
from lightning_lockstep.logs.ordering import LineOrdering, OnceBook


def line(rank: int, text: str = "same", *, turn: int = 0, level: int = 20, at: int = 7) -> Line:
    return Line(
        Place("lib", level, "/x/train.py", at, turn), (rank,), (f"host{rank // 2}",), text, 100.0 + rank
    )


def texts(batches) -> list[tuple[tuple[int, ...], str]]:
    return [(printed.ranks, printed.text) for batch in batches for printed in batch.lines]


def test_prints_in_rank_order_once_all_have_come():
    book = LineOrdering(range(3))
    assert book.add(line(2, "c"), 0.0) == []
    assert book.add(line(0, "a"), 0.1) == []
    assert texts(book.add(line(1, "b"), 0.2)) == [((0,), "a"), ((1,), "b"), ((2,), "c")]
    assert book.next_due() is None


def test_equal_lines_fold_and_can_be_told_not_to():
    folded, plain = LineOrdering(range(3)), LineOrdering(range(3), folding=False)
    for rank in (2, 0):
        folded.add(line(rank), 0.0)
        plain.add(line(rank), 0.0)
    assert texts(folded.add(line(1), 0.0)) == [((0, 1, 2), "same")]
    assert texts(plain.add(line(1), 0.0)) == [((0,), "same"), ((1,), "same"), ((2,), "same")]


def test_a_rank_that_never_comes_is_named_after_the_timeout():
    book = LineOrdering(range(3), timeout=5.0)
    book.add(line(2, "c"), 10.0)
    book.add(line(0, "a"), 12.0)
    assert book.due(14.9) == [] and book.next_due() == 15.0
    (batch,) = book.due(15.0)
    assert texts([batch]) == [((0,), "a"), ((2,), "c")]
    assert batch.missing == (1,) and batch.waited == 5.0


def test_a_line_that_comes_after_the_timeout_is_printed_alone_and_at_once():
    book = LineOrdering(range(2), timeout=1.0)
    book.add(line(0), 0.0)
    book.due(1.0)
    (batch,) = book.add(line(1, "slow"), 9.0)
    assert batch.late and texts([batch]) == [((1,), "slow")] and batch.missing == ()


def test_a_rank_that_calls_twice_does_not_disturb_the_first_call():
    book = LineOrdering(range(2), timeout=1.0)
    book.add(line(0, "one"), 0.0)
    book.add(line(0, "two", turn=1), 0.0)
    assert texts(book.add(line(1, "one"), 0.1)) == [((0, 1), "one")]
    (batch,) = book.due(1.0)
    assert texts([batch]) == [((0,), "two")] and batch.missing == (1,)


def test_a_rank_with_a_higher_level_is_not_waited_for():
    book = LineOrdering(range(2))
    book.hear_level(1, "lib", logging.WARNING)
    assert texts(book.add(line(0), 0.0)) == [((0,), "same")]
    assert book.add(line(0, level=logging.WARNING, at=9), 0.0) == []  # that one it would say


def test_news_of_a_level_lets_waiting_lines_go():
    book = LineOrdering(range(2))
    book.add(line(0), 0.0)
    assert texts(book.hear_level(1, "lib", logging.ERROR)) == [((0,), "same")]


def test_a_line_takes_back_what_was_said_about_the_level():
    book = LineOrdering(range(2))
    book.hear_level(1, "lib", logging.WARNING)
    book.add(line(1, at=1), 0.0)
    assert book.add(line(0, at=2), 0.0) == []


def test_flush_gives_everything_in_the_order_of_the_first_lines():
    book = LineOrdering(range(2))
    book.add(line(1, "first", at=1), 0.0)
    book.add(line(0, "second", at=2), 0.0)
    assert [t for _, t in texts(book.flush(0.5))] == ["first", "second"]
    assert book.flush(0.5) == []


def test_nothing_is_lost_or_doubled_whatever_the_order_of_arrival():
    chance = random.Random(3)
    for _ in range(50):
        ranks, calls = chance.randint(1, 6), chance.randint(1, 5)
        said = [(r, c) for r in range(ranks) for c in range(calls) if chance.random() < 0.8]
        chance.shuffle(said)
        book, out, now = LineOrdering(range(ranks), timeout=3.0), [], 0.0
        for rank, call in said:
            now += chance.random()
            out += book.due(now) + book.add(line(rank, f"{rank} {call}", at=call), now)
        out += book.flush(now)
        assert sorted(t for _, t in texts(out)) == sorted(f"{r} {c}" for r, c in said)
        for batch in out:
            assert [printed.ranks for printed in batch.lines] == sorted(p.ranks for p in batch.lines)


def test_one_of_the_ranks_equal_warnings_is_printed():
    book = OnceBook(gather_for=0.3)
    assert book.add(line(1), 0.0) == [] and book.add(line(3), 0.1) == []
    assert texts(book.due(0.3)) == [((1, 3), "same")]
    book.add(line(2), 5.0)
    assert book.next_due() is None and book.flush(9.0) == []


def test_a_warning_that_one_rank_repeats_is_printed_as_often_as_it_was_said():
    book = OnceBook(gather_for=0.0)
    for turn in range(3):
        for rank in range(4):
            book.add(line(rank, turn=turn), float(turn))
    assert texts(book.due(9.0)) == [((0, 1, 2, 3), "same")] * 3


def test_a_warning_that_rank_0_has_printed_is_not_printed_again():
    book = OnceBook()
    book.add(line(1), 0.0)
    book.add(line(0), 0.0, printed=True)
    book.add(line(2), 0.1)
    assert book.flush(1.0) == []


def test_rank_lists_read_well():
    assert rank_list([3]) == "rank 3"
    assert rank_list([5, 0, 1, 2]) == "ranks 0-2,5"
    assert rank_list(range(8)) == "ranks 0-7"


def test_a_folded_line_keeps_hosts_and_the_earliest_time():
    (folded,) = fold([line(3), line(0)])
    assert folded.ranks == (0, 3) and folded.hosts == ("host0", "host1") and folded.created == 100.0


def test_a_record_survives_the_way_to_rank_0():
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        import sys

        record = logging.getLogger("a.b").makeRecord(
            "a.b", 40, "/x/y.py", 12, "got %d", (5,), sys.exc_info(), "f", {"batch": 3, "odd": object()}
        )
    there = record_of(Line.unpack(json.loads(json.dumps(line_of(said_of(record), rank=4, host="h", turn=2)))))
    assert there.getMessage() == "[rank 4] got 5" and there.levelname == "ERROR" and there.batch == 3
    assert (there.name, there.filename, there.module, there.lineno, there.funcName) == (
        "a.b",
        "y.py",
        "y",
        12,
        "f",
    )
    assert "ZeroDivisionError" in there.exc_text and "object" in there.odd


def test_a_line_that_cannot_be_made_as_asked_is_said_all_the_same():
    knot: list = []
    knot.append(knot)
    record = logging.getLogger("a").makeRecord(
        "a", 20, "/x.py", 1, "%d of %d", ("one",), None, "f", {"knot": knot, "pair": {(1, 2): 3}}
    )
    line = line_of(said_of(record), rank=0, host="h", turn=0)
    assert line.text.startswith("'%d of %d' with ('one',), which cannot be filled in: TypeError")
    assert line.extra["knot"] == "[[...]]" and line.extra["pair"] == "{(1, 2): 3}"


def test_one_file_under_two_names_is_one_place(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    names = [tmp_path / "train.py", tmp_path / "run" / ".." / "train.py", tmp_path / "link" / "train.py"]
    lines = [
        line_of((("lib", 20, str(name), 7), "same", 0.0, "f", "", {}), rank=rank, host="h", turn=0)
        for rank, name in enumerate(names)
    ]
    book = LineOrdering(range(3))
    assert [texts(book.add(one, 0.0)) for one in lines] == [[], [], [((0, 1, 2), "same")]]
