"""A rank that a launcher starts runs as a fork, and nobody but a clock can tell."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers import run_script, start_script
from tests.helpers.ranks import fork_of

# The last word of what a rank prints first: whether the imports were behind it.
BEGIN = "import os, sys\nprint('fork' if 'torch' in sys.modules else 'fresh', flush=True)\n"


def as_rank(program: str, folder: Path, *, before: str = "") -> list[str]:
    """The command of a launcher that starts one rank."""
    file = folder / "program.py"
    file.write_text(BEGIN + program)
    return ["sh", "-c", f"{before} LOCAL_RANK=0 {sys.executable} {file} an argument; exit $?"]


#: What stands before the command of a rank, its program, and how it ends.
CASES = {
    "plain": ("", "", "fork", 0),
    "other limits": ("ulimit -n 200;", "", "fresh", 0),
    "other libraries": ("LD_LIBRARY_PATH=/nowhere", "", "fresh", 0),
    "read by torch": ("TORCH_LOGS=", "", "fresh", 0),
    "read by Python": ("PYTHONHASHSEED=1", "", "fresh", 0),
    "exits": ("", "sys.exit(3)", "fork", 3),
    "raises": ("", "raise ValueError", "fork", 1),
    "is killed": ("", "os.kill(os.getpid(), 9)", "fork", 128 + 9),
    "is ended": ("", "os.kill(os.getpid(), 15)", "fork", 128 + 15),
    "ends at once": ("", "os._exit(75)", "fork", 75),
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, int]]:
    """How each case began and ended, started by one shell."""
    folder, lines = tmp_path_factory.mktemp("ranks"), []
    for number, (before, program, _, _) in enumerate(CASES.values()):
        (folder / f"{number}.py").write_text(BEGIN + program)
        lines.append(f"( {before} LOCAL_RANK=0 {sys.executable} {folder}/{number}.py; exit $? ); echo $?")
    words = run_script(["sh", "-c", "\n".join(lines)]).stdout.split()
    return dict(zip(CASES, zip(words[::2], map(int, words[1::2]), strict=True), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_rank_is_a_fork_if_that_cannot_differ_and_ends_as_an_interpreter(
    case: str, ends: dict[str, tuple[str, int]]
) -> None:
    assert ends[case] == CASES[case][2:]


def test_a_fresh_interpreter_can_be_asked_for(tmp_path: Path) -> None:
    assert run_script(as_rank("", tmp_path), fresh=True).stdout == "fresh\n"


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
    outcome = run_script(as_rank(program, tmp_path, before=before))
    assert (outcome.returncode, outcome.stdout) == (0, f"fork\nan argument yes {tmp_path} 3\n"), (
        outcome.output
    )
    assert (tmp_path / "seventh").read_text() == "seventh"


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
