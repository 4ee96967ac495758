"""Figures, lists and errors as they stand in messages."""

from __future__ import annotations

import pytest

from lightning_lockstep import _text

GIB = 2**30
#: Function, argument and text.
TEXTS = [
    ("ranges", [3], "3"),
    ("ranges", [5, 0, 2, 1, 1], "0-2,5"),
    ("ranges", [], ""),
    ("ranks_in_words", [1, 1], "rank 1"),
    ("ranks_in_words", {0, 1, 2, 5}, "ranks 0-2,5"),
    ("size_in_words", None, "-"),
    ("size_in_words", 1023, "1023 B"),
    ("size_in_words", 2048, "2 KiB"),
    ("size_in_words", 1.5 * GIB, "1.50 GiB"),
    ("size_in_words", 9.999 * GIB, "10.0 GiB"),
    ("size_in_words", 99.96 * GIB, "100 GiB"),
    ("size_in_words", -0.5 * GIB, "-512 MiB"),
    ("time_in_words", 40e-6, "40 us"),
    ("time_in_words", 1.84e-3, "1.8 ms"),
    ("time_in_words", 9.97, "10 s"),
    ("time_in_words", 119, "119 s"),
    ("time_in_words", 180, "3 min"),
    ("time_in_words", 2 * 86400, "2 d"),
    ("first_line", "\n  one \n two", "one"),
    ("first_line", ValueError("\n"), "ValueError"),
    ("exit_in_words", -9, "killed by SIGKILL"),
    ("exit_in_words", -63, "killed by signal 63"),
]


@pytest.mark.parametrize(("function", "given", "text"), TEXTS)
def test_in_words(function: str, given: object, text: str) -> None:
    assert getattr(_text, function)(given) == text


def test_counts_and_lists() -> None:
    assert [_text.counted(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert _text.counted(1654, "batch", "batches") == "1,654 batches"
    assert _text.listed(["a", "b", "c"], 3) == "a, b, c"
    assert _text.listed(["a", "b", "c", "d"], 2) == "a, b and 2 more"
