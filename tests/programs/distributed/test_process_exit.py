"""How a process ends, with which exit code and which last line; the notes it leaves reach who started it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from lightning_lockstep.distributed.failure.record import first_failure, has_orderly_end
from tests.harness import MODELS, run_script
from tests.harness.patience import patience

PROGRAM = MODELS / "distributed" / "program_ends.py"


class End(NamedTuple):
    """How a program ended."""

    returncode: int | None
    out: str
    err: str
    folder: Path


def ends_of(codes: Mapping[str, str], folder: Path) -> dict[str, End]:
    """Run each piece of code in a process of its own; all are forks of one program."""
    (folder / "codes.json").write_text(json.dumps({name: textwrap.dedent(code) for name, code in codes.items()}))
    outcome = run_script([str(PROGRAM), str(folder), str(patience(30.0))], timeout=90)
    assert outcome.returncode == 0, outcome.output
    returncodes = json.loads((folder / "returncodes.json").read_text())
    texts = {name: [(folder / f"{name}.{stream}").read_text() for stream in ("out", "err")] for name in returncodes}
    return {name: End(code, *texts[name], folder / name) for name, code in returncodes.items()}


UNREAD = "import os; reader, writer = os.pipe(); os.close(reader)"
FORCED = """
    import os, sys, threading
    process_exit._LAST_WRITES = 0.5
    {}
    os.dup2(writer, 2)
    threading.Thread(target=process_exit.end_now, args=(7, "the message")).start()
    threading.Event().wait()
"""
HELD = """
    import sys, threading, time
    process_exit.exit_plan.install_excepthook()
    usual = sys.excepthook
    sys.excepthook = lambda *args: usual(*args)  # another library's: ours stands in front of it and behind it
    threading.Thread(target=time.sleep, args=(600,)).start()
    error = ValueError("boom")
    process_exit.set_exit_report(error, process_exit.ExitReport(deadline=0.5, exit_code=5, replaces={}))
    process_exit.exit_plan.on_force = lambda: print("children ended")
    raise error
"""
CAUGHT = """
    import sys
    atexit.register(lambda: print("leaving", process_exit.exit_plan.forced_exit is not None))
    process_exit.exit_plan.force_exit_at_shutdown(5, unless_caught=True)
    {}
"""
TAKEN = """
    error = ValueError("boom")
    process_exit.set_exit_report(error, process_exit.ExitReport("\\nlightning-lockstep: boom\\n", 137, replaces=True))
    try:
        raise error
    except {}:
        pass
"""
DROPPED = f"""
    {UNREAD}
    import sys
    os.dup2(writer, 2)
    try:
        print("lost", file=sys.stderr)
    except BrokenPipeError:
        pass
    {{}}
"""
CHAINED = """
    try:
        error = ValueError("boom")
        process_exit.set_exit_report(error, process_exit.ExitReport("rank 1 of 2 failed: ValueError: boom"))
        raise error
    except ValueError:
        raise OSError("no space left")  # as where Lightning's own handling of the failure fails in turn
"""
NO_THREADS = """
    import threading, time

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    error = ValueError("boom")
    process_exit.set_exit_report(error, process_exit.ExitReport(deadline=30.0, exit_code=7))
    threading.Thread(target=time.sleep, args=(60.0,)).start()
    threading.Thread.start = refuse
    raise error
"""

#: The code, with which return code it ends, and whether what it printed is right.
PROGRAMS: dict[str, tuple[str, int, Callable[[str, str], bool]]] = {
    "forced: what is held back is written, and the message last": (
        """
        import sys, threading
        atexit.register(print, "never")
        process_exit.on_flush(lambda: sys.stderr.write("held back\\n"))
        process_exit.on_flush(lambda: 1 / 0)
        print("printed", end="")
        threading.Thread(target=process_exit.end_now, args=(7, "the message\\n")).start()
        threading.Event().wait()
        """,
        7,
        lambda out, err: out == "printed" and "ZeroDivisionError" in err and err.endswith("held back\nthe message\n"),
    ),
    "forced: standard error is closed": (FORCED.format(UNREAD), 7, lambda out, err: True),
    "forced: nobody reads standard error": (
        FORCED.format(
            "reader, writer = os.pipe(); os.set_blocking(writer, False)\n"
            "    try:\n        while os.write(writer, bytes(4096)): pass\n"
            "    except BlockingIOError: os.set_blocking(writer, True)"
        ),
        7,
        lambda out, err: True,
    ),
    "forced: the disk is full": (
        FORCED.format("writer = os.open('/dev/full', os.O_WRONLY)"),
        7,
        lambda out, err: True,
    ),
    "failed: the traceback cannot be written, and a thread holds the process": (
        f"""
        {UNREAD}
        import threading
        os.dup2(writer, 2)
        error = ValueError("lost")
        process_exit.set_exit_report(error, process_exit.ExitReport(deadline=0.3, exit_code=7))
        threading.Thread(target=threading.Event().wait).start()
        raise error
        """,
        7,
        lambda out, err: True,
    ),
    "failed: exit functions run, and the code is kept": (
        """
        atexit.register(print, "tracker closed")
        process_exit.exit_plan.force_exit_at_shutdown(5)
        raise SystemExit(1)
        """,
        5,
        lambda out, err: (out, err) == ("tracker closed\n", ""),
    ),
    "failed: it says why where Python would print nothing": (
        """
        process_exit.exit_plan.force_exit_at_shutdown(5, "the report\\n")
        raise SystemExit(1)
        """,
        5,
        lambda out, err: err == "the report\n",
    ),
    "failed: the report is printed once": (
        """
        process_exit.exit_plan.say_last("the report\\nof a failure\\n")
        process_exit.exit_plan.lines_followed = True
        process_exit.end_now(5, "the report\\nof a failure\\n")
        """,
        5,
        lambda out, err: (out, err) == ("", "the report\nof a failure\n\nthe report\n"),
    ),
    "failed: nothing holds it": (
        HELD.format("False"),
        5,
        lambda out, err: (
            "children ended" in out
            and err.count("ValueError: boom") == 1
            and err.index("ValueError: boom") < err.index("ended by force")
        ),
    ),
    "failed: nothing holds it, quietly": (
        HELD.format("True"),
        5,
        lambda out, err: "children ended" in out and "boom" not in err,
    ),
    "failed: no thread starts any more": (
        NO_THREADS,
        7,
        lambda out, err: err.count("ValueError: boom") == 1 and "excepthook" not in err,
    ),
    "forced: no thread starts any more": (
        """
        import threading

        def refuse(thread):
            raise RuntimeError("can't start new thread")

        process_exit.clock.start()  # as where a fit begins
        threading.Thread.start = refuse
        process_exit.clock.after(0.2, process_exit.end_now, 7, "the message\\n")
        threading.Event().wait()
        """,
        7,
        lambda out, err: err == "the message\n",
    ),
    "failed: the headline stands also below an error that came of it": (
        CHAINED,
        1,
        lambda out, err: (
            "OSError: no space left" in err and err.rstrip().endswith("rank 1 of 2 failed: ValueError: boom")
        ),
    ),
    "interrupted: a second Ctrl-C ends by force what the exit waits for": (
        """
        import signal
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit.register(print, "never")
        atexit.register(signal.raise_signal, signal.SIGINT)  # while this process waits for its ranks, say
        process_exit.exit_plan.on_force = lambda: print("children ended", flush=True)
        process_exit.exit_plan.force_exit_at_shutdown(130)
        raise KeyboardInterrupt
        """,
        130,
        lambda out, err: out == "children ended\n" and "Exception ignored" not in err,
    ),
    "interrupted: a second Ctrl-C while held back lines are written": (
        """
        import os, signal
        signal.signal(signal.SIGINT, signal.default_int_handler)
        process_exit.on_flush(lambda: (os.write(1, b"once"), signal.raise_signal(signal.SIGINT)))
        process_exit.exit_plan.force_exit_at_shutdown(130)
        raise SystemExit(1)
        """,
        130,
        lambda out, err: (out, err) == ("once", ""),
    ),
    "caught: the program ends": (CAUGHT.format(""), 0, lambda out, err: out == "leaving False\n"),
    "caught: the program exits": (CAUGHT.format("sys.exit(3)"), 3, lambda out, err: out == "leaving False\n"),
    "caught: the program fails": (CAUGHT.format("1 / 0"), 5, lambda out, err: out == "leaving True\n"),
    "caught: before the limit": (
        """
        import time
        error = ValueError("boom")
        process_exit.set_exit_report(error, process_exit.ExitReport(deadline=0.1, exit_code=5))
        try:
            raise error
        except ValueError:
            time.sleep(0.5)
        raise SystemExit(3)
        """,
        3,
        lambda out, err: True,
    ),
    "caught: with an exit code of its own": (TAKEN.format("ValueError"), 0, lambda out, err: err == ""),
    "not caught: with an exit code of its own": (
        TAKEN.format("KeyError"),
        137,
        lambda out, err: err.strip() == "lightning-lockstep: boom",
    ),
    "nobody reads: Python's own code": (DROPPED.format(""), 120, lambda out, err: True),
    "nobody reads: no failure": (
        DROPPED.format("process_exit.drop_what_nobody_reads()"),
        0,
        lambda out, err: True,
    ),
}

RECORD = """record.FailureRecord(1, 2, "node7", 12, "exception", "ValueError: boom", exit_code=3)"""
ENDED = """
    import os
    os.environ["LOCKSTEP_RANK_NOTES_FOLDER"] = os.environ["FOLDER"]
    record.note_orderly_end()
    {}
"""
NOTES = {
    "for launchers": f"""
        import os, pathlib
        os.environ["TORCHELASTIC_ERROR_FILE"] = os.environ["FOLDER"] + "/torchrun.json"
        process_exit.exit_plan.note = pathlib.Path(os.environ["FOLDER"], "0.failed")
        record.note_failure({RECORD})
    """,
    "in order": ENDED.format("raise SystemExit(75)"),
    "in disorder": ENDED.format("raise ValueError"),
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, End]:
    codes = {name.replace(":", ""): code for name, (code, _, _) in PROGRAMS.items()}
    return ends_of(codes, tmp_path_factory.mktemp("ends"))


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, End]:
    return ends_of(NOTES, tmp_path_factory.mktemp("noted"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_process_ends_in_time_with_its_code_and_its_last_words(name: str, ends: dict[str, End]) -> None:
    _, code, is_right = PROGRAMS[name]
    end = ends[name.replace(":", "")]
    assert end.returncode == code, end
    assert is_right(end.out, end.err), end


def test_a_failure_is_noted_for_our_launcher_and_for_torchrun(noted: dict[str, End]) -> None:
    folder = noted["for launchers"].folder
    failure = first_failure(folder)
    assert failure is not None
    assert (failure.rank, failure.summary, failure.exit_code) == (1, "ValueError: boom", 3)
    assert "rank 1 of 2 (host node7" in (folder / "torchrun.json").read_text()


def test_an_orderly_end_is_noted(noted: dict[str, End]) -> None:
    assert has_orderly_end(noted["in order"].folder)
    assert not has_orderly_end(noted["in disorder"].folder)
