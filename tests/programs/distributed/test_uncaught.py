"""What is printed of an error that nobody caught, also where it comes from another process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_lockstep.distributed.failure.process_exit import error_from_bytes, error_to_bytes, outcome_of
from tests.helpers import run_script


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
        outcome_of(error).headline = "rank 0 of 2 failed"
        arrived = error_from_bytes(error_to_bytes(error))
    assert type(arrived) is (ValueError if type(error) is ValueError else RuntimeError)
    sys.excepthook(type(arrived), arrived, None)
    printed = capsys.readouterr().err
    assert "in test_an_error_of_another_process_is_printed_as_there" in printed
    assert f"{type(error).__name__}: boom" in printed
    assert printed.splitlines()[-1] == "rank 0 of 2 failed"


NO_THREADS = """
import threading, time
from lightning_lockstep.distributed.failure.process_exit import outcome

def refuse(thread):
    raise RuntimeError("can't start new thread")

error = ValueError("boom")
outcome.end_within(error, 30.0, 7)
threading.Thread(target=time.sleep, args=(60.0,)).start()
threading.Thread.start = refuse
raise error
"""


def test_a_process_that_cannot_start_a_thread_any_more_ends_at_once_with_its_error_printed_once(
    tmp_path: Path,
) -> None:
    program = tmp_path / "program.py"
    program.write_text(NO_THREADS)
    outcome = run_script([str(program)], cwd=tmp_path, timeout=50)
    assert outcome.returncode == 7, outcome.output
    assert outcome.stderr.count("ValueError: boom") == 1 and "excepthook" not in outcome.stderr
