"""When one rank fails, all stop: inside a collective, and with the first one's words."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_lockstep.distributed import FailurePropagation, FailureRecord, current_communicator
from lightning_lockstep.distributed.failure import process_exit
from lightning_lockstep.distributed.failure.propagation import propagation_on
from lightning_lockstep.distributed.failure.record import (
    describe_error,
    describe_exit,
    is_broken_collective,
    tell_place_by,
)
from lightning_lockstep.errors import BatchSizeError, ConfigurationError, RankFailedError
from tests.helpers import run_ranks, run_ranks_raw, world_size

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
    text = "ValueError: " + "x" * 9_000_000
    record = replace(RECORD, summary=text, traceback=f"Traceback ...\n{text}")
    assert (
        len(record.headline()) < 400
        and "9,000,012 characters; all of them are in the traceback" in record.headline()
    )
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
        (
            "\x1b[1;31mred\x1b[0m, a \x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\ and \x1b]0;title\x07\x1b7more\b",
            "red, a link and more",
        ),
        ("", "ValueError"),
    ],
)
def test_a_summary_is_the_first_line_with_substance_without_colours(text: str, summary: str) -> None:
    record = describe_error(ValueError(text), 0, 1)
    assert record.summary.endswith(summary) and record.summary.startswith("ValueError")
    assert "\x1b" not in record.traceback and FailureRecord.from_json(record.to_json()) == record
    colours = json.dumps(asdict(record) | {"summary": f"\x1b[31m{summary}"})
    assert FailureRecord.from_json(colours).summary == summary, "nor do they come from other ranks"


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
    assert describe_exit(code) == expected


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


def propagation(grace: float) -> FailurePropagation:
    made = propagation_on(current_communicator().side_channel)
    made.grace_period = grace
    tell_place_by(lambda: {"step": 7})
    return made


def work(fault: str, rank: int, grace: float) -> str:
    """All-reduce for ever; one rank is given a fault at step 5."""
    crash = propagation(grace)
    try:
        for step in range(100_000):
            crash.check()
            if step == 5 and dist.get_rank() == rank:
                provoke(fault)
            dist.all_reduce(torch.ones(8))
    except BaseException as error:
        raised = crash.error_to_raise(error)
        if raised is error:
            raise
        raise raised from None
    return "never"


def provoke(fault: str) -> None:
    if fault == "raise":
        raise ValueError("boom in step 5")
    if fault == "exit":
        raise SystemExit(3)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "late":
        time.sleep(1.0)
        raise ValueError("boom after a while")


@world_size(2, 4)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_ends_all(world_size: int, rank: int) -> None:
    outcomes = run_ranks_raw(world_size, work, "late" if rank else "raise", rank, 6.0, timeout=60)
    text = "boom after a while" if rank else "boom in step 5"
    for outcome in outcomes:
        assert not outcome.ok
        assert not outcome.killed_by_helper, "it ended by itself, not at the test's limit"
    assert outcomes[rank].exception == f"ValueError: {text}"
    for outcome in outcomes[:rank] + outcomes[rank + 1 :]:
        assert outcome.exception is not None
        assert outcome.exception.startswith(f"RankFailedError: rank {rank} of {world_size}")
        assert "at step 7" in outcome.exception
        assert outcome.exception.rstrip().endswith(f"ValueError: {text}")


def test_the_exit_code_of_a_rank_that_exits_is_the_jobs() -> None:
    outcomes = run_ranks_raw(2, work, "exit", 1, 6.0, timeout=60)
    assert [outcome.returncode for outcome in outcomes] == [3, 3]


@pytest.mark.parametrize("rank", [0, 1])
def test_when_a_rank_is_killed_the_others_say_which(rank: int) -> None:
    """Nobody of ours has started it, so nobody knows its exit code."""
    outcomes = run_ranks_raw(3, work, "kill", rank, 6.0, timeout=60)
    assert outcomes[rank].signal is signal.SIGKILL
    gone = rf"RankFailedError: rank {rank} of 3 \(host {re.escape(socket.gethostname())}, process [1-9]\d*\) was lost"
    for outcome in outcomes[:rank] + outcomes[rank + 1 :]:
        assert outcome.exception is not None and re.match(gone, outcome.exception), outcome.exception


def stuck(grace: float) -> str:
    """Rank 0 sits where no exception reaches it; the countdown has to end it."""
    crash = propagation(grace)
    if dist.get_rank() == 1:
        try:
            raise ValueError("boom while rank 0 sleeps")
        except ValueError as error:
            raise crash.error_to_raise(error) from None
    time.sleep(600)
    return "never"


def test_a_rank_that_cannot_be_reached_is_ended_by_force_with_the_report() -> None:
    outcomes = run_ranks_raw(2, stuck, 2.0, timeout=60)
    assert not any(outcome.killed_by_helper for outcome in outcomes)
    assert outcomes[0].returncode == 1
    report = outcomes[0].stderr.rstrip()
    assert "lightning-lockstep: rank 1 of 2" in report
    assert report.endswith("ValueError: boom while rank 0 sleeps")


def raise_alike(alone: bool) -> str:
    crash = propagation(2.0)
    for attempt in range(2):
        if alone and dist.get_rank() == 0:
            break
        error = crash.error_to_raise(ConfigurationError(f"attempt {attempt}"))
        assert isinstance(error, ConfigurationError)
    time.sleep(2.0)  # longer than the half of the grace period after which an error counts as one rank's own
    try:
        crash.check()
    except RankFailedError as error:
        return f"stopped: {error.record.summary}"  # type: ignore[attr-defined]
    return "goes on"


def test_an_error_raised_alike_leaves_every_rank_its_own() -> None:
    outcomes = run_ranks_raw(2, raise_alike, False, timeout=60)
    assert [outcome.value for outcome in outcomes] == ["goes on", "goes on"]


def test_an_error_that_only_one_rank_raises_stops_the_others() -> None:
    outcomes = run_ranks_raw(2, raise_alike, True, timeout=60)
    assert outcomes[0].value == "stopped: ConfigurationError: attempt 0"


def prune_and_go_on(slow: int) -> str:
    """Every rank raises the same error and catches it, one of them late; then all go on."""
    crash = propagation(2.0)
    for attempt in range(3):
        crash.begin_fit()
        dist.barrier()
        try:
            if dist.get_rank() == slow:
                time.sleep(0.4)
            raise ValueError(f"pruned {attempt} on rank {dist.get_rank()}")
        except ValueError as error:
            assert crash.error_to_raise(error) is error
    crash.begin_fit()
    dist.barrier()
    time.sleep(2.5)  # longer than the grace period
    crash.check()
    assert not process_exit.outcome.forced_exit_pending
    return "goes on"


@pytest.mark.parametrize("slow", [0, 2])
def test_an_error_that_all_ranks_raise_and_catch_is_survived(slow: int) -> None:
    outcomes = run_ranks_raw(3, prune_and_go_on, slow, timeout=60)
    assert [(outcome.value, outcome.returncode) for outcome in outcomes] == [("goes on", 0)] * 3, outcomes


def prune_and_end(grace: float) -> str:
    """Every rank raises the same error and catches it; the program works on, and ends without another fit."""
    crash = propagation(grace)
    crash.begin_fit()
    dist.barrier()
    error = ValueError(f"pruned on rank {dist.get_rank()}")
    assert crash.error_to_raise(error) is error
    time.sleep(1.5 * grace)
    return "works on"


def test_a_program_that_has_caught_an_error_on_all_ranks_may_do_something_else_and_end() -> None:
    outcomes = run_ranks_raw(3, prune_and_end, 1.0, timeout=60)
    assert [(outcome.value, outcome.returncode) for outcome in outcomes] == [("works on", 0)] * 3, outcomes


def raise_alike_and_hang(grace: float) -> None:
    """Nobody catches the error that every rank raises, and a thread would hold each process."""
    crash = propagation(grace)
    dist.barrier()
    error = crash.error_to_raise(ValueError(f"boom on rank {dist.get_rank()}"))
    sys.excepthook(type(error), error, None)  # as Python does before it waits for the threads
    time.sleep(600)


def test_an_error_that_nobody_catches_on_any_rank_ends_them_all_in_time() -> None:
    outcomes = run_ranks_raw(2, raise_alike_and_hang, 0.5, timeout=60)
    assert [outcome.returncode for outcome in outcomes] == [1, 1], outcomes
    assert not any(outcome.killed_by_helper for outcome in outcomes)


def not_noticed_yet() -> str:
    crash = propagation(8.0)
    dist.barrier()
    if dist.get_rank() == 1:
        raise crash.error_to_raise(ValueError("boom"))
    time.sleep(1.0)
    crash.begin_fit()  # the next fit begins
    return "never"


def test_the_failure_of_another_rank_is_not_forgotten_by_one_that_goes_on() -> None:
    outcomes = run_ranks_raw(2, not_noticed_yet, timeout=60)
    assert (outcomes[0].exception or "").startswith("RankFailedError: rank 1 of 2")


def raise_beside_a_frozen_rank(frozen: int) -> tuple[str, float, bool]:
    crash = propagation(3.0)
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == frozen:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.5)
    began = time.monotonic()
    raised = crash.error_to_raise(ValueError("boom beside a frozen rank"))
    seconds = time.monotonic() - began
    os.kill(pids[frozen], signal.SIGKILL)  # nothing waits for the limit of the test
    return str(raised), seconds, process_exit.outcome_of(raised).instead is not None


def test_a_rank_whose_rank_0_is_frozen_prints_its_own_error() -> None:
    outcomes = run_ranks_raw(2, raise_beside_a_frozen_rank, 0, timeout=60)
    text, seconds, quiet = outcomes[1].value
    assert outcomes[0].signal == signal.SIGKILL
    assert text == "boom beside a frozen rank" and seconds < 10 and not quiet


def raise_ours_and_exit() -> str:
    """Rank 1 raises an error of this package alone; the process that has started it sees its exit first."""
    crash = propagation(8.0)
    dist.barrier()
    if dist.get_rank() == 1:
        return type(crash.error_to_raise(BatchSizeError("nothing fits"))).__name__
    time.sleep(1.0)
    crash.report_child_exit(1, 1, 4711)
    try:
        crash.check()
    except RankFailedError as error:
        return error.record.summary  # type: ignore[attr-defined]
    return "goes on"


def test_what_a_rank_has_said_is_used_when_it_exits() -> None:
    outcomes = run_ranks_raw(2, raise_ours_and_exit, timeout=60)
    assert outcomes[0].value == "BatchSizeError: nothing fits"


def ours_is_printed_before_another_line() -> None:
    crash = propagation(8.0)
    tell_place_by(lambda: {"step": 5})
    error = crash.error_to_raise(ConfigurationError(["no batch", "no model"]))
    sys.excepthook(type(error), error, None)
    if dist.get_rank() == 0:
        print("a line that was under way", file=sys.stderr)
        process_exit.outcome.printed_a_line()
    process_exit.outcome.repeat_headline()


def test_where_other_lines_follow_an_error_of_ours_the_last_one_names_the_rank_and_its_place() -> None:
    printed, quiet = run_ranks_raw(2, ours_is_printed_before_another_line, timeout=60)
    *before, last = printed.stderr.rstrip().splitlines()
    assert re.match(r"rank 0 of 2 \(host .*\) failed at step 5: ConfigurationError: ", last), printed.stderr
    assert not any("rank 0 of 2" in line for line in before), "the error itself is its message alone"
    assert "rank 1 of 2" not in quiet.stderr


def slow_report() -> str:
    """Rank 1 fails; rank 0 is still writing a report when the grace period ends."""
    crash = propagation(1.0)
    dist.barrier()
    if dist.get_rank() == 1:
        raise crash.error_to_raise(ValueError("boom"))
    with process_exit.outcome.writing_report():
        time.sleep(3.0)
        print("report written", flush=True)
    time.sleep(60)
    return "never"


def test_a_forced_end_waits_for_a_report_that_is_being_written() -> None:
    outcomes = run_ranks_raw(2, slow_report, timeout=60)
    assert "report written" in outcomes[0].stdout and outcomes[0].returncode == 1
    assert not outcomes[0].killed_by_helper


def interrupted() -> str:
    crash = propagation(5.0)
    if dist.get_rank() == 1:
        raise crash.error_to_raise(KeyboardInterrupt())
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        crash.check()
        time.sleep(0.01)
    return "never"


def test_ctrl_c_on_one_rank_is_ctrl_c_on_all() -> None:
    outcomes = run_ranks_raw(2, interrupted, timeout=60)
    assert all("KeyboardInterrupt" in (outcome.exception or outcome.stderr) for outcome in outcomes)


def notes_for_torchrun() -> list[bool]:
    """Whether torchrun has a note of a common error after it ended this process, and after another did."""
    propagation = propagation_on(current_communicator().side_channel)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder, "error.json")
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(note)
        error = propagation.error_to_raise(BatchSizeError("no batch size fits"))
        follows = KeyError("as it is saved")
        follows.__context__ = error
        for other in (error, follows, ValueError("bad labels")):
            sys.excepthook(type(other), other, None)
            found.append(note.exists())
        del os.environ["TORCHELASTIC_ERROR_FILE"]
    return found


def test_torchrun_is_not_told_an_error_that_the_program_has_caught() -> None:
    for found in run_ranks(2, notes_for_torchrun):
        assert found == [True, True, False]
