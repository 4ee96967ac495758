"""Which values certainly do not fit a type."""

# Both ways to write a union occur in signatures, and Python tells them apart.

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, Optional, Union

import pytest

from lightning_lockstep._application.values import mismatch


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (1, int),
        (1, float),
        (0.5, float),
        (None, Optional[int]),  # noqa: UP045  the older spelling is what is tested
        (None, int | None),
        ("auto", int | Literal["auto"]),
        ("00:01:00:00", Union[str, timedelta, dict, None]),  # noqa: UP007  likewise
        ("x", Callable[[], int]),
        (3, Any),
        ({}, int),
    ],
)
def test_these_fit_or_cannot_be_judged(value: Any, hint: Any) -> None:
    # A mapping may become an object, so it is never judged; here it stands for a config node.
    from omegaconf import OmegaConf

    given = OmegaConf.create(value) if isinstance(value, dict) else value
    assert mismatch(given, hint) is None


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        ("a", int, "a whole number"),
        (True, int, "a whole number"),
        (1.5, int, "a whole number"),
        (None, int, "a whole number"),
        ("a", int | float | None, "a number or null"),
        ("b", Literal["popen", "spawn"], "'popen' or 'spawn'"),
        (1, str | None, "text or null"),
        (2.5, Union[list[int], str, int], "a list, text or a whole number"),  # noqa: UP007
    ],
)
def test_these_do_not_and_the_expectation_is_in_words(value: Any, hint: Any, expected: str) -> None:
    assert str(mismatch(value, hint)) == expected


def test_a_default_of_none_allows_null_whatever_the_annotation_says() -> None:
    assert mismatch(None, int, default=None) is None
