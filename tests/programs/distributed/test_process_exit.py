"""How a process ends is decided in one module; the notes that a rank leaves reach who started it."""

from __future__ import annotations

import ast
import sys
import textwrap
from pathlib import Path

import pytest

import lightning_lockstep
from lightning_lockstep.distributed.failure.exit_notes import (
    ended_with_error,
    first_failure,
    orderly_ends,
    preempted_exit,
)
from lightning_lockstep.distributed.failure.record import FailureRecord
from tests.helpers import run_script

PACKAGE = Path(lightning_lockstep.__file__).parent
# The end of a process, and what is printed of an exception that ends it.
THE_ONES = {
    "distributed/failure/process_exit.py": {"os._exit", "atexit.register", "sys.excepthook ="},
    # A program of the doctor, which is no rank of a run.
    "doctor/probes/network_backend.py": {"os._exit"},
}


def ways_to_end(source: str) -> list[str]:
    """What of ``os._exit``, ``sys.excepthook = `` and ``atexit`` a source uses."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name == "os._exit" or name.startswith("atexit."):
                found.append(name)
            if name == "sys.excepthook" and isinstance(node.ctx, ast.Store):
                found.append(f"{name} =")
        elif isinstance(node, ast.ImportFrom) and node.module in ("os", "sys", "atexit"):
            names = {alias.name for alias in node.names}
            found += sorted(names & {"_exit", "excepthook"} if node.module != "atexit" else names)
    return found


def test_one_module_decides_how_a_process_ends() -> None:
    elsewhere = {
        str(path.relative_to(PACKAGE)): found
        for path in sorted(PACKAGE.rglob("*.py"))
        if (found := ways_to_end(path.read_text()))
    }
    for file, ways in THE_ONES.items():
        assert set(elsewhere.pop(file)) >= ways
    assert elsewhere == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import os\ndef f(): os._exit(1)", ["os._exit"]),
        ("from os import _exit", ["_exit"]),
        ("import sys\nsys.excepthook = print", ["sys.excepthook ="]),
        ("import atexit\n@atexit.register\ndef f(): ...", ["atexit.register"]),
        ("from atexit import register", ["register"]),
        ("import sys\nusual = sys.excepthook", []),
    ],
)
def test_every_way_is_seen(source: str, found: list[str]) -> None:
    assert ways_to_end(source) == found


def end(code: str, *, fresh: bool = False, **env: str) -> tuple[int | None, str, str]:
    header = (
        "from lightning_lockstep.distributed.failure import exit_notes as exit_note, process_exit, record\n"
    )
    outcome = run_script(
        [sys.executable, "-c", header + textwrap.dedent(code)],
        env=env,
        timeout=120,
        fresh=fresh,
    )
    assert not outcome.timed_out
    return outcome.returncode, outcome.stdout, outcome.stderr


def test_a_forced_end_writes_what_is_held_back_and_prints_its_message_last() -> None:
    code = """
        import sys, threading
        process_exit.at_exit(print, "never")
        process_exit.on_flush(lambda: sys.stderr.write("held back\\n"))
        process_exit.on_flush(lambda: 1 / 0)
        print("printed", end="")
        threading.Thread(target=process_exit.end_now, args=(7, "the message\\n")).start()
        threading.Event().wait()
    """
    returncode, out, err = end(code)
    assert (returncode, out) == (7, "printed")
    assert "ZeroDivisionError" in err
    assert err.endswith("held back\nthe message\n")


@pytest.mark.parametrize(
    "reader",
    [
        "reader, writer = os.pipe(); os.close(reader)",  # a broken pipe
        "reader, writer = os.pipe(); os.set_blocking(writer, False)\n"
        "try:\n    while os.write(writer, bytes(4096)): pass\n"
        "except BlockingIOError: os.set_blocking(writer, True)",  # nobody reads
        "writer = os.open('/dev/full', os.O_WRONLY)",
    ],
)
def test_a_standard_error_that_cannot_be_written_holds_no_end(reader: str) -> None:
    code = f"""
import os, sys, threading
process_exit._LAST_WRITES = 0.5
{reader}
os.dup2(writer, 2)
threading.Thread(target=process_exit.end_now, args=(7, "the message")).start()
threading.Event().wait()
"""
    assert end(code)[0] == 7


def test_a_failed_process_whose_traceback_cannot_be_written_ends_in_time() -> None:
    code = """
        import os, sys, threading
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 2)
        error = ValueError("lost")
        process_exit.outcome.end_within(error, 0.3, 7)
        threading.Thread(target=threading.Event().wait).start()  # no daemon: it would hold the process
        raise error
    """
    assert end(code)[0] == 7


def test_a_failed_process_runs_its_exit_functions_and_keeps_its_code() -> None:
    code = """
        process_exit.at_exit(print, "tracker closed")
        process_exit.outcome.force_exit_at_shutdown(5)
        assert process_exit.outcome.forced_exit_pending
        raise SystemExit(1)
    """
    assert end(code)[:2] == (5, "tracker closed\n")


@pytest.mark.parametrize(("ends", "code"), [("", 0), ("sys.exit(3)", 3), ("1 / 0", 5)])
def test_a_program_that_has_caught_a_failure_has_its_own_exit_code(ends: str, code: int) -> None:
    body = f"""
        import sys
        process_exit.at_exit(lambda: print("leaving", process_exit.outcome.forced_exit_pending))
        process_exit.outcome.force_exit_at_shutdown(5, unless_caught=True)
        {ends}
    """
    assert end(body)[:2] == (code, f"leaving {code == 5}\n")


def test_a_process_says_why_it_ends_where_python_would_print_nothing() -> None:
    code = """
        process_exit.at_exit(print, "tracker closed")
        process_exit.outcome.force_exit_at_shutdown(5, "the report\\n")
        raise SystemExit(1)
    """
    assert end(code) == (5, "tracker closed\n", "the report\n")


def test_a_report_is_printed_once_however_the_process_ends() -> None:
    code = """
        process_exit.outcome.say_last("the report\\nof a failure\\n")
        process_exit.outcome.printed_a_line()
        process_exit.end_now(5, "the report\\nof a failure\\n")
    """
    assert end(code) == (5, "", "the report\nof a failure\n\nthe report\n")


@pytest.mark.parametrize(("dropped", "code"), [(True, 0), (False, 120)])
def test_a_stream_that_nobody_reads_is_no_failure(dropped: bool, code: int) -> None:
    program = f"""
        import os, sys
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 2)
        try:
            print("lost", file=sys.stderr)
        except BrokenPipeError:
            pass
        if {dropped}:
            process_exit.drop_what_nobody_reads()
    """
    assert end(program, fresh=True)[0] == code


@pytest.mark.parametrize("quiet", [False, True])
def test_nothing_at_its_exit_holds_a_failed_process(quiet: bool) -> None:
    code = f"""
        import sys, threading, time
        process_exit.outcome.install_excepthook()
        usual = sys.excepthook
        sys.excepthook = lambda *args: usual(*args)  # another library's: ours stands in front of it and behind it
        threading.Thread(target=time.sleep, args=(600,)).start()
        error = ValueError("boom")
        if {quiet}:
            process_exit.keep_quiet(error)
        process_exit.outcome.end_within(error, 0.5, 5, on_force=lambda: print("children ended"))
        raise error
    """
    returncode, out, err = end(code)
    assert returncode == 5 and "children ended" in out
    assert err.count("ValueError: boom") == (0 if quiet else 1)
    assert quiet or err.index("ValueError: boom") < err.index("ended by force")


def test_an_error_that_the_program_has_caught_ends_nothing() -> None:
    code = """
        import time
        error = ValueError("boom")
        process_exit.outcome.end_within(error, 0.1, 5)
        try:
            raise error
        except ValueError:
            time.sleep(0.5)
        raise SystemExit(3)
    """
    assert end(code)[0] == 3


@pytest.mark.parametrize(
    ("before", "printed"),
    [
        ("", "ValueError: boom"),
        ("process_exit.keep_quiet(error)", ""),
        ("process_exit.show_plainly(error)", "lightning-lockstep: boom"),
    ],
)
def test_what_is_printed_of_an_exception(before: str, printed: str) -> None:
    code = f"""
        import sys
        process_exit.outcome.install_excepthook()
        error = ValueError("boom")
        usual = sys.excepthook
        sys.excepthook = lambda *args: usual(*args)  # another library's, in front of ours
        {before}
        raise error
    """
    returncode, _, err = end(code)
    assert returncode == 1
    assert err.strip().endswith(printed) and bool(err.strip()) is bool(printed)


@pytest.mark.parametrize(("catch", "code"), [(False, 137), (True, 0)])
def test_a_failure_that_nobody_catches_brings_its_exit_code(catch: bool, code: int) -> None:
    body = """
        error = ValueError("boom")
        process_exit.show_plainly(error, 137)
        try:
            raise error
        except KeyError if not {catch} else ValueError:
            pass
    """
    assert end(body.format(catch=catch))[0] == code


RECORD = """record.FailureRecord(1, 2, "node7", 12, "exception", "ValueError: boom", exit_code=3)"""


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("", 1),
        ("raise ValueError", 0),
        ("process_exit.outcome.force_exit_at_shutdown(1)", 0),
        ("process_exit.end_now(0)", 0),
    ],
)
def test_only_an_orderly_end_is_noted_as_one(tmp_path: Path, code: str, ended: int) -> None:
    end(f"exit_note.note_orderly_end()\n{code}", LOCKSTEP_RANK_ENDED_FOLDER=str(tmp_path))
    assert orderly_ends(tmp_path) == ended
    assert first_failure(tmp_path) is None and preempted_exit(tmp_path) is None
    assert ended_with_error(tmp_path) == (code == "raise ValueError")


def test_a_failure_is_noted_for_our_launcher_and_for_torchrun(tmp_path: Path) -> None:
    theirs = tmp_path / "torchrun.json"
    code = f"""
        import pathlib
        exit_note.keep_notes_in(pathlib.Path({str(tmp_path)!r}))
        exit_note.note_failure({RECORD})
    """
    end(code, TORCHELASTIC_ERROR_FILE=str(theirs))
    noted = first_failure(tmp_path)
    assert noted is not None and (noted.rank, noted.summary, noted.exit_code) == (1, "ValueError: boom", 3)
    assert "rank 1 of 2 (host node7" in theirs.read_text()
    assert orderly_ends(tmp_path) == 0


def test_the_report_leaves_the_traceback_to_torchrun_where_that_shows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = FailureRecord(
        1, 2, "node7", 5, "exception", "ValueError: boom", "Traceback (most recent call last): ..."
    )
    assert record.traceback in record.printed()
    last = {
        "TORCHELASTIC_ERROR_FILE": "/x",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "1",
    }
    for name, value in (last | {"GROUP_WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    assert record.traceback not in record.printed() and record.headline() in record.printed()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")  # an attempt of which torchrun shows no summary
    assert record.traceback in record.printed()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")  # the summary with the traceback may be another host's
    assert record.traceback in record.printed()


def test_the_hint_that_a_collective_broke_is_of_errors_that_say_so() -> None:
    def hint(summary: str) -> bool:
        return "A collective operation broke" in FailureRecord(1, 2, "", 0, "exception", summary).report()

    assert hint("RuntimeError: Connection closed by peer") and hint("DistStoreError: wait timeout in store")
    assert not hint("ValueError: cannot restore the checkpoint") and not hint("KeyError: 'socket'")
    assert not hint("RuntimeError: cannot restore the checkpoint")


def test_a_preempted_exit_keeps_its_reason_code_and_checkpoint(tmp_path: Path) -> None:
    code = """
        from lightning_lockstep.errors import Preempted
        exit_note.note_preempted_exit(Preempted("rank 1: SIGTERM", 75, "last.ckpt"))
    """
    end(code, LOCKSTEP_RANK_ENDED_FOLDER=str(tmp_path))
    left = preempted_exit(tmp_path)
    assert left is not None and (left.reason, left.code, left.checkpoint) == (
        "rank 1: SIGTERM",
        75,
        "last.ckpt",
    )


def test_nobody_to_tell_is_no_fault(tmp_path: Path) -> None:
    code = f"exit_note.note_orderly_end()\nexit_note.note_failure({RECORD})"
    assert end(code, LOCKSTEP_RANK_ENDED_FOLDER=str(tmp_path / "on another host"))[0] == 0
