"""The probes, run for real: what they print is what the checks read."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from lightning_lockstep._system import NOT_FOUND, run_program
from lightning_lockstep.doctor.machine import Limits, Machine


def test_two_processes_add_through_shared_memory() -> None:
    probed = Machine().probe("shared_memory")
    assert probed.error == "" and probed.facts["rounds"] > 100


def test_a_probe_that_fails_says_why() -> None:
    probed = Machine().probe("absent")
    assert probed.facts == {} and probed.error == "KeyError: 'absent'"


def test_this_machine() -> None:
    machine = Machine()
    assert machine.python.packages["torch"] and machine.python.executable == sys.executable
    assert isinstance(machine.limits, Limits) and machine.limits.cores >= 1
    assert machine.read_text("/absent/file") is None and not machine.exists("/absent")
    assert machine.run(["absent-program"]).returncode == NOT_FOUND
    assert machine.run([sys.executable, "-c", "print('\\xff' * 3)"]).succeeded
    assert machine.glob("/proc/self/stat*")


def test_nothing_of_a_program_is_left_when_its_time_is_over() -> None:
    script = "import subprocess, sys; subprocess.Popen(['sleep', '601']); print('up', flush=True); input()"
    began = time.monotonic()
    done = run_program(["sh", "-c", f'{sys.executable} -c "{script}"; sleep 600'], timeout=1.0)
    assert done.timed_out and time.monotonic() - began < 60
    while any(_command(process) == b"sleep\x00601\x00" for process in Path("/proc").glob("[0-9]*")):
        assert time.monotonic() - began < 60, "what the program had started runs on"
        time.sleep(0.05)


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # it has ended meanwhile
        return b""
