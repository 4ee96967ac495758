"""Of a failure: which errors are causes, and what is said of a very long one; the rest is in tests/programs."""

from __future__ import annotations

import pytest

from lightning_lockstep.distributed.failure.record import describe_error, is_broken_collective


def test_of_a_very_long_text_the_headline_has_the_beginning_and_the_traceback_all() -> None:
    text = "x" * 9_000_000
    record = describe_error(ValueError(text), 0, 1)
    assert len(record.headline()) < 500
    assert "9,000,000 characters; all of them are in the traceback" in record.headline()
    assert record.report().count(text) == 1


@pytest.mark.parametrize(
    ("error", "broken"),
    [
        (RuntimeError("[.../gloo/transport/tcp/pair.cc:537] Connection closed by peer"), True),
        (RuntimeError("NCCL communicator was aborted"), True),
        (ConnectionResetError("reset"), True),
        (
            RuntimeError("Got the following error when running the callback: RankFailedError: rank 1 of 2"),
            True,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo"), False),
    ],
)
def test_consequences_are_told_from_causes(error: BaseException, broken: bool) -> None:
    assert is_broken_collective(error) is broken
