"""Runs checks in processes, some at a time, each with a deadline; and the process in which one runs."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from lightning_lockstep._system import end_group, end_programs, memory_file, text_of, usable_cores
from lightning_lockstep._text import exit_in_words
from lightning_lockstep.doctor.machine import Machine
from lightning_lockstep.doctor.registry import CHECKS, CheckOptions, CheckResult, Finding, problem

# -- The process in which one check runs: ``python -m lightning_lockstep.doctor.check_runner MODULE LIMIT OPTIONS`` --
# It answers on standard output with a line of JSON for each finding, as it comes, and a last one says that there are
# no more. What the check prints goes to standard error. Standard input stays open as long as the doctor lives; when
# it closes, this process and all it has started end.


def main() -> None:
    """Run the check that the command line names, and write what it finds."""
    module, limit, options = sys.argv[1:]
    # A check that hangs prints its stacks just before the doctor ends it.
    faulthandler.dump_traceback_later(float(limit))
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    threading.Thread(target=_end_with_the_doctor, daemon=True).start()
    check = importlib.import_module(module).check
    with results:
        for finding in check(Machine(), CheckOptions.from_json(json.loads(options))):
            results.write(json.dumps(finding.to_json()) + "\n")
        results.write("null\n")


def _end_with_the_doctor() -> None:
    os.read(sys.stdin.fileno(), 1)  # nothing is ever sent: it returns when the doctor has ended
    end_programs()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()


# -- The checks of one call; one that hangs or crashes is a finding --

_LOOK_EVERY = 0.02
# So much later than its own report of where it hangs a check is ended [s].
_GRACE = 0.5
# So long a process may take to end the programs of its check [s].
_TO_END = 2.0
# What a check waits in is of no interest, but which line of the check called it.
_STANDARD_LIBRARY = str(Path(os.__file__).parent)
_WHAT_RUNS_PROGRAMS = ("lightning_lockstep/_system.py", "doctor/machine.py")
# Lines of a check's own output that are shown when it fails.
_SHOWN = 6


class Checks:
    """The checks of one call of the doctor."""

    def __init__(self, names: Sequence[str], options: CheckOptions) -> None:
        self.names = tuple(names)  # in the order in which they are started
        self._options = options
        self._running: list[_Child] = []

    def running(self) -> dict[str, float]:
        """Return the checks that run now, each with how long it has [s]."""
        now = time.monotonic()
        return {child.name: now - child.began for child in self._running}

    def results(self, tick: Callable[[], None] = lambda: None) -> Iterator[CheckResult]:
        """Run the checks and yield each result when it is there; ``tick`` is called several times a second."""
        most = max(2, len(usable_cores()))
        alone = [name for name in self.names if CHECKS[name].runs_alone]
        waiting = [name for name in self.names if name not in alone]
        try:
            while waiting or alone or self._running:
                while waiting and len(self._running) < most:
                    self._running.append(_Child(waiting.pop(0), self._options))
                if not self._running:
                    self._running.append(_Child(alone.pop(0), self._options))
                for child in [child for child in self._running if child.is_over()]:
                    self._running.remove(child)
                    yield child.result()
                tick()
                time.sleep(_LOOK_EVERY)
        finally:
            for child in self._running:
                child.result()  # nobody takes it any more
            self._running.clear()


class _Child:
    """The process of one check."""

    def __init__(self, name: str, options: CheckOptions) -> None:
        self.name, self.began = name, time.monotonic()
        self._limit = options.timeout or CHECKS[name].timeout
        self._results, self._output = memory_file(), memory_file()
        module, given = "lightning_lockstep.doctor.check_runner", json.dumps(options.to_json())
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, CHECKS[name].module, str(self._limit), given],
            stdin=subprocess.PIPE,
            stdout=self._results,
            stderr=self._output,
            start_new_session=True,
        )

    def is_over(self) -> bool:
        """Return whether it has ended, or its time has."""
        return self._process.poll() is not None or self._is_late()

    def _is_late(self) -> bool:
        return time.monotonic() > self.began + self._limit + _GRACE

    def result(self) -> CheckResult:
        """End it, and return what its check has found, up to where it failed if it did."""
        is_late = self._process.poll() is None and self._is_late()
        self._end()
        with self._results, self._output:
            whole, _, _ = text_of(self._results).rpartition("\n")
            lines = [json.loads(line) for line in whole.splitlines()]
            found = [Finding.from_json(line) for line in lines if line is not None]
            if lines[-1:] != [None]:
                found.append(self._failure(is_late=is_late))
        return CheckResult(self.name, tuple(found), time.monotonic() - self.began)

    def _end(self) -> None:
        """End it and all programs that its check has started."""
        # It ends them itself when its input closes, each with the group it has; what is left then is ended from here.
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_TO_END)
        end_group(self._process.pid)
        with suppress(subprocess.TimeoutExpired):  # it may hang in a driver, where no signal ends it
            self._process.wait(_TO_END)

    def _failure(self, *, is_late: bool) -> Finding:
        output, subject = text_of(self._output), "the check itself"
        if is_late:
            at = _innermost_frame(output)
            evidence = f"It did not end within {self._limit:g} s{at}. It hangs, or needs more time."
            return problem(subject, evidence, f"lockstep-doctor {self.name} --timeout {4 * self._limit:g}")
        lines = [line.rstrip() for line in output.splitlines() if line.strip()][-_SHOWN:]
        shown = "; its last lines:\n" + "\n".join(lines) if lines else ", no output"
        return problem(subject, f"Its process ended: {exit_in_words(self._process.returncode)}{shown}")


def _innermost_frame(output: str) -> str:
    """Return where the main thread of a check was, from the stacks that it printed; that thread is the last."""
    _, _, stack = output.rpartition("most recent call first):")
    frames = re.findall(r'File "(.+?)", line (\d+) in (\S+)', stack)
    for path, line, function in frames:
        is_standard = path.startswith(_STANDARD_LIBRARY) and "site-packages" not in path
        if not is_standard and not path.endswith(_WHAT_RUNS_PROGRAMS):
            return f"; it was at {path}:{line} in {function}"
    return ""
