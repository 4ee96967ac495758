"""What is printed of an error that nobody caught, also where it comes from another process."""

from __future__ import annotations

import sys

import pytest

from lightning_lockstep.distributed.failure.uncaught import error_from_bytes, error_to_bytes, print_last


class Particular(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


@pytest.mark.parametrize("error", [ValueError("boom"), Particular("boom", "twice")])
def test_an_error_of_another_process_is_printed_as_there(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    try:
        raise error
    except Exception:
        print_last(error, "rank 0 of 2 failed")
        arrived = error_from_bytes(error_to_bytes(error))
    assert type(arrived) is (ValueError if type(error) is ValueError else RuntimeError)
    sys.excepthook(type(arrived), arrived, None)
    printed = capsys.readouterr().err
    assert "in test_an_error_of_another_process_is_printed_as_there" in printed
    assert f"{type(error).__name__}: boom" in printed
    assert printed.splitlines()[-1] == "rank 0 of 2 failed"
