"""The process in which one check runs: ``python -m lightning_lockstep.doctor.check_process``.

It reads from standard input which check, and answers on standard output with a line of JSON: what the check needs.
When a second line of standard input gives the deadline, it runs the check, and writes each finding as it comes, and a
last line when there are no more. What the check prints goes to standard error. Standard input stays open as long as
the doctor lives; when it closes, this process and all it has started end.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from lightning_lockstep.doctor.findings import CheckResult, Finding, problem
from lightning_lockstep.doctor.machines.imitated_machine import read_machine
from lightning_lockstep.doctor.machines.machine import Machine
from lightning_lockstep.doctor.machines.processes import end_programs
from lightning_lockstep.doctor.machines.this_machine import ThisMachine
from lightning_lockstep.doctor.options import CheckOptions
from lightning_lockstep.doctor.registry import Check, load_check

__all__ = ["main", "run_check"]


def main() -> None:
    """Run the check that standard input names, and write what it finds."""
    task = json.loads(sys.stdin.readline())
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # A check that hangs prints its stacks just before the doctor ends it.
    faulthandler.dump_traceback_later(max(0.1, task["load_until"] - time.time()))
    check = load_check(task["check"])
    _write(results, {"timeout": check.timeout, "needs_ranks": check.needs_ranks})
    faulthandler.cancel_dump_traceback_later()
    if not (start := sys.stdin.readline()):
        return  # the doctor has ended
    threading.Thread(target=_end_with_the_doctor, daemon=True).start()
    faulthandler.dump_traceback_later(max(0.1, json.loads(start)["deadline"] - time.time()))
    machine = read_machine(Path(task["sysroot"])) if task["sysroot"] else ThisMachine()
    with results:
        for finding in _found(check, machine, CheckOptions.from_json(task["options"])):
            _write(results, finding.to_json())
        _write(results, None)


def _write(results: IO[str], what: object) -> None:
    results.write(json.dumps(what) + "\n")


def run_check(name: str, machine: Machine, options: CheckOptions) -> CheckResult:
    """Run a check in this process and return its result."""
    began = time.monotonic()
    findings = tuple(_found(load_check(name), machine, options))
    return CheckResult(name, findings, time.monotonic() - began)


def _found(check: Check, machine: Machine, options: CheckOptions) -> Iterator[Finding]:
    is_empty = True
    for finding in check.function(machine, options):
        is_empty = False
        yield finding
    if is_empty:
        yield problem("the check itself", "The check returned no finding; a check must return at least one.")


def _end_with_the_doctor() -> None:
    os.read(sys.stdin.fileno(), 1)  # nothing is ever sent: it returns when the doctor has ended
    end_programs()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
