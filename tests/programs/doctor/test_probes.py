"""The probes, run for real: what they print is what the checks read."""

from __future__ import annotations

import sys

from lightning_lockstep._system import NOT_FOUND
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
