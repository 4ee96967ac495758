"""Figures, lists and errors as they stand in messages."""

from __future__ import annotations

import pytest

from lightning_lockstep._text import (
    counted,
    exit_in_words,
    first_line,
    listed,
    ranges,
    ranks_in_words,
    size_in_words,
    time_in_words,
)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([3], "3"), (range(8), "0-7"), ([5, 0, 2, 1, 1], "0-2,5"), ([1, 3, 5], "1,3,5"), ([], "")],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_counted() -> None:
    assert [counted(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert (
        counted(8, "epoch") == "8 epochs"
        and counted(2, "batch", "batches") == "2 batches"
        and counted(1654, "sample") == "1,654 samples"
    )


def test_ranks_in_words() -> None:
    assert ranks_in_words([1]) == ranks_in_words([1, 1]) == "rank 1"
    assert ranks_in_words({0, 1, 2, 5}) == "ranks 0-2,5"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (2048, "2 KiB"),
        (300 * 2**20, "300 MiB"),
        (1.5 * 2**30, "1.50 GiB"),
        (9.999 * 2**30, "10.0 GiB"),
        (80 * 2**30, "80.0 GiB"),
        (99.96 * 2**30, "100 GiB"),
        (2000 * 2**30, "2000 GiB"),
        (-3 * 2**20, "-3 MiB"),
    ],
)
def test_size_in_words(size: float | None, text: str) -> None:
    assert size_in_words(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (40e-6, "40 us"),
        (1.84e-3, "1.8 ms"),
        (0.25, "250.0 ms"),
        (3.46, "3.5 s"),
        (9.97, "10 s"),
        (119, "119 s"),
        (180, "3 min"),
        (5 * 3600, "5 h"),
        (2 * 86400, "2 d"),
    ],
)
def test_time_in_words(seconds: float, text: str) -> None:
    assert time_in_words(seconds) == text


def test_listed() -> None:
    assert listed(["a", "b", "c"], 3) == "a, b, c"
    assert listed(["a", "b", "c", "d"], 2) == "a, b and 2 more"
    assert listed([], 2) == ""


def test_first_line() -> None:
    assert first_line("\n  one \n two") == "one"
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError("\n")) == "ValueError"
    assert first_line("") == ""


def test_exit_in_words() -> None:
    assert exit_in_words(3) == "exit code 3"
    assert exit_in_words(-9) == "killed by SIGKILL"
    assert exit_in_words(-63) == "killed by signal 63"
