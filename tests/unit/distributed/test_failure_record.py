"""What is said of a failure: its headline, its summary, the end of a process in words."""

from __future__ import annotations

import signal

import pytest

from lightning_lockstep.distributed import FailureRecord
from lightning_lockstep.distributed.failure.record import describe_error, describe_exit, is_broken_collective

RECORD = FailureRecord(
    2,
    4,
    "node7",
    1234,
    "exception",
    "ValueError: boom",
    "Traceback ...\nValueError: boom",
    {"epoch": 1, "step": 9},
)


def test_a_record_names_rank_host_place_and_ends_with_the_traceback() -> None:
    assert RECORD.headline() == (
        "rank 2 of 4 (host node7, process 1234) failed at epoch 1, step 9: ValueError: boom"
    )
    ending = f"Traceback of rank 2:\n\nTraceback ...\nValueError: boom\n\n{RECORD.headline()}"
    assert RECORD.report().endswith(ending)
    assert FailureRecord.from_json(RECORD.to_json()) == RECORD


def test_of_a_very_long_text_the_headline_has_the_beginning_and_the_traceback_all() -> None:
    text = "x" * 9_000_000
    record = describe_error(ValueError(text), 0, 1)
    assert len(record.headline()) < 500
    assert "9,000,000 characters; all of them are in the traceback" in record.headline()
    assert record.report().count(text) == 1


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        ("boom\nmore", "ValueError: boom"),
        (
            'Error(s) in loading state_dict for Net:\n\tMissing key(s): "a".\n\tMore',
            'for Net: Missing key(s): "a".',
        ),
        ("\n\n  boom", "ValueError: boom"),
        ("", "ValueError"),
    ],
)
def test_a_summary_is_the_first_line_with_substance(text: str, summary: str) -> None:
    record = describe_error(ValueError(text), 0, 1)
    assert record.summary.endswith(summary) and record.summary.startswith("ValueError")
    assert FailureRecord.from_json(record.to_json()) == record


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (3, ("exit", "exit code 3", 3)),
        (-signal.SIGKILL, ("signal", "killed by SIGKILL", 137)),
        (-signal.SIGSEGV, ("signal", "killed by SIGSEGV", 139)),
        (-250, ("signal", "killed by signal 250", 378)),
    ],
)
def test_the_end_of_a_process_in_words(code: int, expected: tuple[str, str, int]) -> None:
    record = describe_exit(1, 2, 4711, code)
    assert (record.kind, record.summary, record.exit_code) == expected


def test_a_sigkill_comes_with_the_usual_reasons() -> None:
    record = FailureRecord(1, 2, "n", 5, "signal", "killed by SIGKILL", exit_code=137)
    assert "dmesg" in record.report()
    assert record.headline() == "rank 1 of 2 (host n, process 5) was killed by SIGKILL"


def test_a_reason_that_the_watcher_knows_better_than_the_signal_stands_behind_a_colon() -> None:
    record = FailureRecord(3, 8, "n", 5, "signal", "out of host memory", where={"epoch": 1})
    assert record.headline() == (
        "rank 3 of 8 (host n, process 5) was killed while the others were at epoch 1: out of host memory"
    )


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
