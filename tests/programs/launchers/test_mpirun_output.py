"""What mpirun prints, passed on: with the ranks' own lines of dashes, and where it cannot be written."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from lightning_lockstep.launchers import mpirun_command
from lightning_lockstep.launchers.mpirun_command import OutputRelay

DASHES = "-" * 74  # as many as Open MPI prints
LIMIT = 60.0  # only so that a hang ends the test


def relay(program: str, out: TextIO | None, err: TextIO | None) -> None:
    """Relay what ``program`` prints in the place of mpirun."""
    command = [sys.executable, "-I", "-c", f"import sys, time\n{program}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        passing = OutputRelay((process.stdout, out), (process.stderr, err))
        process.wait(LIMIT)
        passing.finish()


def test_lines_of_dashes_of_a_rank_pass_at_once() -> None:
    out, err = io.StringIO(), io.StringIO()
    lines = [f"[1,0]<std%s>: {DASHES}", "[1,0]<std%s>: mine", f"[1,1]<std%s>: {'-' * 50}"]
    program = f"""
for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
    stream.write({chr(10).join(lines)!r}.replace("%s", name))
"""
    relay(program, out, err)
    assert out.getvalue() == err.getvalue() == f"[rank 0] {DASHES}\n[rank 0] mine\n[rank 1] {'-' * 50}"


@contextmanager
def closed_pipe() -> Iterator[TextIO]:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        yield stream


@contextmanager
def full_pipe() -> Iterator[TextIO]:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with os.fdopen(reader), os.fdopen(writer, "w") as stream:
        with pytest.raises(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        os.set_blocking(writer, True)
        yield stream


@pytest.mark.parametrize(
    ("place", "why"),
    [(closed_pipe, "Broken pipe"), (full_pipe, "full and is not read")],
)
def test_output_that_cannot_be_written_is_said_once_and_holds_nobody_up(
    place: object, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpirun_command, "PATIENCE", 0.2)
    err = io.StringIO()
    # More than the pipe of a rank takes; in a full one it fits, since only an end lets ranks go on there.
    lines = 100 if place is full_pipe else 5000
    with place() as out:  # type: ignore[operator]
        began = time.monotonic()
        relay(f"for i in range({lines}): print('[1,0]<stdout>: line', i)", out, err)
    assert time.monotonic() - began < LIMIT
    [said] = err.getvalue().splitlines()
    assert said.startswith("lightning-lockstep: standard output cannot be written to (") and why in said
