"""A rank that a launcher starts runs as a fork, and nobody but a clock can tell."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers import ScriptOutcome, run_script, start_script
from tests.helpers.ranks import fork_of

# The last word of what a rank prints first: whether the imports were behind it.
BEGIN = "import os, sys\nprint('fork' if 'torch' in sys.modules else 'fresh', flush=True)\n"


def as_rank(program: str, folder: Path, *, before: str = "") -> list[str]:
    """The command of a launcher that starts one rank."""
    file = folder / "program.py"
    file.write_text(BEGIN + program)
    return ["sh", "-c", f"{before} LOCAL_RANK=0 {sys.executable} {file} an argument; exit $?"]


def run(program: str, folder: Path, *, before: str = "", fresh: bool = False) -> ScriptOutcome:
    return run_script(as_rank(program, folder, before=before), fresh=fresh)


def test_a_rank_is_a_fork_unless_a_fresh_interpreter_is_asked_for(tmp_path: Path) -> None:
    assert run("", tmp_path).stdout == "fork\n"
    assert run("", tmp_path, fresh=True).stdout == "fresh\n"


@pytest.mark.parametrize(
    "before", ["ulimit -n 200;", "LD_LIBRARY_PATH=/nowhere", "TORCH_LOGS=", "PYTHONHASHSEED=1"]
)
def test_where_a_fork_would_differ_the_interpreter_goes_on(before: str, tmp_path: Path) -> None:
    assert run("", tmp_path, before=before).stdout == "fresh\n"


def test_it_has_its_own_arguments_environment_folder_files_and_parent(tmp_path: Path) -> None:
    program = """
print(*sys.argv[1:], os.environ["MINE"], os.getcwd(), os.getpriority(os.PRIO_PROCESS, 0), flush=True)
os.write(7, b"seventh")
assert open(f"/proc/{os.getppid()}/comm").read() == "sh\\n"
own = os.getpid()
child = os.fork()
if child == 0:
    os._exit(os.getppid() != own)
assert os.waitpid(child, 0)[1] == 0
"""
    before = f"cd {tmp_path}; exec 7>seventh; renice -n 3 $$ >/dev/null; MINE=yes"
    outcome = run(program, tmp_path, before=before)
    assert (outcome.returncode, outcome.stdout) == (0, f"fork\nan argument yes {tmp_path} 3\n"), (
        outcome.output
    )
    assert (tmp_path / "seventh").read_text() == "seventh"


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("sys.exit(3)", 3),
        ("raise ValueError", 1),
        ("os.kill(os.getpid(), 9)", 128 + 9),
        ("os.kill(os.getpid(), 15)", 128 + 15),
        ("os._exit(75)", 75),
    ],
)
def test_it_ends_as_its_fork_does(program: str, code: int, tmp_path: Path) -> None:
    assert run(program, tmp_path).returncode == code


WAITS = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("ready", os.getpid(), flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 5), (signal.SIGKILL, 128 + 9)])
def test_signals_reach_the_fork(number: signal.Signals, code: int, tmp_path: Path) -> None:
    with start_script(as_rank(WAITS, tmp_path)) as script:
        fork = int(script.wait_for(r"ready (\d+)").group(1))
        [stands_for_it] = [one for one in script.descendants() if fork_of(one.pid) == fork]
        assert fork in [one.pid for one in script.descendants()]
        os.kill(stands_for_it.pid, number)
        outcome = script.finish()
        deadline = time.monotonic() + 10
        while psutil.pid_exists(fork) and time.monotonic() < deadline:
            time.sleep(0.02)
    assert outcome.returncode == code and not psutil.pid_exists(fork)


def test_who_reads_what_it_prints_sees_the_end_when_it_closes_the_stream(tmp_path: Path) -> None:
    program = "os.close(1)\nos.close(2)\nimport time\ntime.sleep(3)"
    file = tmp_path / "program.py"
    file.write_text(BEGIN + program)
    reader = f"LOCAL_RANK=0 {sys.executable} {file} 2>&1 | {{ cat; echo end; date +%s; }}; date +%s"
    lines = run_script(["sh", "-c", reader]).stdout.split()
    assert lines[:2] == ["fork", "end"] and int(lines[3]) - int(lines[2]) >= 2, lines
