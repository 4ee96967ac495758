"""The process in which one check runs: ``python -m lightning_lockstep.doctor.child_process``.

It reads from standard input what to do, and writes the result as JSON to standard output; what the check prints goes to
standard error. Standard input stays open as long as the doctor lives; when it closes, this process and all it has
started end.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from lightning_lockstep.doctor.findings import CheckResult, problem
from lightning_lockstep.doctor.imitated_machine import read_machine
from lightning_lockstep.doctor.machine import Machine
from lightning_lockstep.doctor.options import CheckOptions
from lightning_lockstep.doctor.processes import end_programs
from lightning_lockstep.doctor.registry import load_check
from lightning_lockstep.doctor.this_machine import ThisMachine

__all__ = ["main", "run_check"]


def main() -> None:
    """Run the check that standard input names, and write what it has found."""
    task = json.loads(sys.stdin.readline())
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    threading.Thread(target=_end_with_the_doctor, daemon=True).start()
    # A check that hangs says where, just before the doctor ends it.
    faulthandler.dump_traceback_later(max(0.1, task["deadline"] - time.time()))
    machine = read_machine(Path(task["sysroot"])) if task["sysroot"] else ThisMachine()
    result = run_check(task["check"], machine, CheckOptions.from_json(task["options"]))
    with results:
        json.dump(result.to_json(), results)


def run_check(name: str, machine: Machine, options: CheckOptions) -> CheckResult:
    """Run a check in this process and return its result.

    Args:
        name: Of the check.
        machine: The machine to look at.
        options: What the user has asked.

    Raises:
        ConfigurationError: There is no such check.
    """
    began = time.monotonic()
    findings = tuple(load_check(name).function(machine, options))
    if not findings:
        findings = (
            problem("the check itself", "It has found nothing at all: it has to say at least why not."),
        )
    return CheckResult(name, findings, time.monotonic() - began)


def _end_with_the_doctor() -> None:
    os.read(sys.stdin.fileno(), 1)  # nothing is ever sent: it returns when the doctor is gone
    end_programs()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
