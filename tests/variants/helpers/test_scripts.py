"""The script runner: exit codes, streams, time limit, and what a script leaves behind."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers import run_script, start_script


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(("way", "kind"), [("file", "f"), ("module", "i"), ("code", "s")])
def test_a_forked_program_ends_as_a_fresh_interpreter_would(way: str, kind: str, tmp_path: Path) -> None:
    text = (
        "import atexit, sys, threading, time\n"
        "def late(): time.sleep(0.2); print('thread')\n"
        "atexit.register(lambda: print('exit', hasattr(sys, 'last_value')))\n"
        "threading.Thread(target=late).start()\n"
        "print(__name__, sys.argv[1:], sys.modules['__main__'].late is late, flush=True)\n"
        "raise {'f': ValueError, 'i': KeyboardInterrupt, 's': SystemExit}[sys.argv[1]](4)\n"
    )
    file = script(tmp_path, text)
    how = {"file": [str(file)], "module": ["-m", file.stem], "code": ["-c", text]}[way]
    command = [sys.executable, *how, kind]
    fresh, forked = (run_script(command, cwd=tmp_path, fresh=choice) for choice in (True, False))
    assert fresh.stdout == forked.stdout and fresh.returncode == forked.returncode
    assert fresh.stderr == forked.stderr
    assert fresh.returncode == {"f": 1, "i": -signal.SIGINT, "s": 4}[kind]


def test_time_limit_kills_the_whole_tree(tmp_path: Path) -> None:
    text = (
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    outcome = run_script([script(tmp_path, text)], timeout=2)
    assert outcome.timed_out
    assert outcome.returncode == -signal.SIGKILL
    assert not _alive(int(outcome.stdout))


def test_an_orphan_is_reported_and_killed(tmp_path: Path) -> None:
    text = (
        "import subprocess\n"
        "print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)\n"
    )
    with start_script([script(tmp_path, text)]) as running:
        outcome = running.finish(timeout=30, settle=0.5)
    assert outcome.returncode == 0
    assert len(outcome.leftovers) == 1
    assert "sleep 600" in outcome.leftovers[0]
    assert not _alive(int(outcome.stdout))


def _alive(pid: int) -> bool:
    """Whether a process is still there; a killed one may take a moment to be gone."""
    try:
        process = psutil.Process(pid)
        process.wait(timeout=10)
    except psutil.NoSuchProcess:
        return False
    except psutil.TimeoutExpired:
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def test_lines_of_several_processes_do_not_meet() -> None:
    child = "for i in range(2000): print('a' * 40)"
    text = (
        "import subprocess, sys\n"
        f"children = [subprocess.Popen([sys.executable, '-c', {child!r}]) for _ in range(4)]\n"
        "sys.exit(max(child.wait() for child in children))\n"
    )
    outcome = run_script([sys.executable, "-c", text])
    assert outcome.returncode == 0, outcome.output
    assert set(outcome.stdout.splitlines()) == {"a" * 40}
    assert outcome.stdout.count("\n") == 8000
