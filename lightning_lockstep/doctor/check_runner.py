"""Runs checks in processes, some at a time, each with a deadline; and the process in which one runs."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from lightning_lockstep._system import end_group, end_programs, memory_file, text_of
from lightning_lockstep._text import exit_in_words
from lightning_lockstep.doctor.imitated_machine import read_machine
from lightning_lockstep.doctor.machine import Machine, ThisMachine
from lightning_lockstep.doctor.registry import (
    BUILT_IN,
    Check,
    CheckOptions,
    CheckResult,
    Finding,
    load_check,
    problem,
)

# -- The process in which one check runs: ``python -m lightning_lockstep.doctor.check_runner`` --
# It reads from standard input which check, and answers on standard output with a line of JSON: what the
# check needs. When a second line of standard input gives the deadline, it runs the check, and writes each
# finding as it comes, and a last line when there are no more. What the check prints goes to standard error.
# Standard input stays open as long as the doctor lives; when it closes, this process and all it has started
# end.


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


# -- Checks run in child processes, some at a time, each with a deadline; one that hangs or crashes is a
# finding

# Checks of others are not imported here, but in their own process: so long that may take [s].
_TO_LOAD = 60.0
_LOOK_EVERY = 0.01
# So much later than its own report of where it hangs a check is ended [s].
_GRACE = 0.5
# So long a process may take to end the programs of its check [s].
_TO_END = 2.0
# What a check waits in is of no interest, but which of its own lines called it.
_STANDARD_LIBRARY = str(Path(os.__file__).parent)
_WHAT_RUNS_PROGRAMS = ("lightning_lockstep/_system.py", "doctor/machine.py")
# Lines of a check's own output that are shown when it fails.
_SHOWN = 6

_Found = TypeVar("_Found")


class Checks:
    """The checks of one call of the doctor."""

    def __init__(
        self,
        names: Sequence[str],  # in the order in which they are started
        options: CheckOptions,
        *,
        sysroot: Path | None = None,  # the imitated machine to look at; None: this one
        at_a_time: int | None = None,  # None: as many as there are cores, at least 2
    ) -> None:
        self.names = tuple(names)
        self._options, self._sysroot = options, sysroot
        self._at_a_time = at_a_time or max(2, os.cpu_count() or 1)
        self._lock = threading.Lock()
        self._running: dict[str, float] = {}
        self._is_over = False
        self._children: list[_Child] = []

    def running(self) -> dict[str, float]:
        """Return the checks that run now, each with how long it has [s]."""
        now = time.monotonic()
        with self._lock:
            return {name: now - began for name, began in self._running.items()}

    def results(self, tick: Callable[[], None] = lambda: None) -> Iterator[CheckResult]:
        """Run the checks and yield each result when it is there."""
        # Those that start ranks or measure speed run one by one after the others. ``tick`` is called several
        # times a second meanwhile.
        alone = [name for name in self.names if name in BUILT_IN and load_check(name).needs_ranks]
        waiting: list[_Child] = []
        try:
            begun = [partial(self._begin, name) for name in self.names if name not in alone]
            for found in self._run(begun, self._at_a_time, tick):
                if isinstance(found, _Child):
                    waiting.append(found)
                else:
                    yield found
            last = [
                *(partial(self._finish, child) for child in waiting),
                *(partial(self._whole, n) for n in alone),
            ]
            yield from self._run(last, 1, tick)
        except BaseException:
            self._end_all()
            for child in waiting:
                child.close()
            raise

    def _run(
        self, calls: Sequence[Callable[[], _Found]], at_a_time: int, tick: Callable[[], None]
    ) -> Iterator[_Found]:
        with ThreadPoolExecutor(at_a_time, thread_name_prefix="lockstep-doctor") as pool:
            waiting: set[Future[_Found]] = {pool.submit(call) for call in calls}
            try:
                while waiting:
                    done, waiting = wait(waiting, timeout=0.1, return_when=FIRST_COMPLETED)
                    tick()
                    yield from (future.result() for future in done)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._end_all()
                raise

    def _begin(self, name: str) -> CheckResult | _Child:
        """Run a check; one that needs ranks, which is known when it is loaded, is returned to be run alone."""
        child = self._loaded(name)
        return child if child.needs_ranks else self._finish(child)

    def _whole(self, name: str) -> CheckResult:
        return self._finish(self._loaded(name))

    def _loaded(self, name: str) -> _Child:
        with self._lock:
            self._running[name] = time.monotonic()
            child = _Child(name, self._options, self._sysroot)
            self._children.append(child)
            is_over = self._is_over
        try:
            if not is_over:  # others may have been ended while it was started
                child.load(self._options.timeout or _TO_LOAD)
        finally:
            with self._lock:
                del self._running[name]
        return child

    def _finish(self, child: _Child) -> CheckResult:
        with self._lock:
            self._running[child.name] = time.monotonic()
        try:
            child.run(self._options.timeout)
            child.end()
            return child.result()
        finally:
            child.close()
            with self._lock:
                del self._running[child.name]
                self._children.remove(child)

    def _end_all(self) -> None:
        with self._lock:
            self._is_over = True
            left = list(self._children)
        for child in left:
            child.end()


class _Child:
    """The process of one check."""

    def __init__(self, name: str, options: CheckOptions, sysroot: Path | None) -> None:
        self.name = name
        self.needs_ranks = False  # known when it is loaded
        self._options, self._sysroot = options, sysroot
        self._results, self._output = memory_file(), memory_file()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lightning_lockstep.doctor.check_runner"],
            stdin=subprocess.PIPE,
            stdout=self._results,
            stderr=self._output,
            start_new_session=True,
        )
        self._ending = threading.Lock()
        self._limit: float | None = None  # of the check, when it is loaded
        self._passed: float | None = None  # the limit that it did not keep
        self._began = time.monotonic()

    def load(self, within: float) -> None:  # within: [s]
        """Have it load the check, and receive what that needs."""
        task = {
            "check": self.name,
            "load_until": time.time() + within,
            "sysroot": str(self._sysroot) if self._sysroot else None,
            "options": self._options.to_json(),
        }
        self._send(task)
        deadline = time.monotonic() + within + _GRACE
        while not (lines := self._lines()) and self._process.poll() is None:
            if time.monotonic() > deadline:
                self._passed = within
                return
            time.sleep(_LOOK_EVERY)
        if lines := lines or self._lines():
            self._limit, self.needs_ranks = float(lines[0]["timeout"]), bool(lines[0]["needs_ranks"])

    def run(self, timeout: float | None) -> None:  # [s]; None: that of the check
        """Have it run the check, and wait for its end."""
        if self._limit is None:
            return  # it could not be loaded
        self._began = time.monotonic()
        within = timeout or self._limit
        self._send({"deadline": time.time() + within})
        try:
            self._process.wait(within + _GRACE)
        except subprocess.TimeoutExpired:
            self._passed = within

    def end(self) -> None:
        """End it and all programs that its check has started."""
        # It ends them itself when its input closes, each with the group it has; what is left then is ended
        # from here.
        with self._ending:
            assert self._process.stdin is not None
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_TO_END)
            end_group(self._process.pid)
            self._process.wait()

    def close(self) -> None:
        """Discard its output."""
        self._results.close()
        self._output.close()

    def result(self) -> CheckResult:
        """Return what its check has found, up to where it failed if it did."""
        _, *lines = self._lines() or [None]
        is_whole = bool(lines) and lines[-1] is None and self._passed is None
        found = [Finding.from_json(line) for line in lines if line is not None]
        if not is_whole:
            found.append(self._failure())
        return CheckResult(self.name, tuple(found), time.monotonic() - self._began)

    def _failure(self) -> Finding:
        output = text_of(self._output)
        if self._passed is not None:
            at = _innermost_frame(output)
            evidence = f"It did not end within {self._passed:g} s{at}. It hangs, or needs more time."
            again = f"lockstep-doctor {self.name} --timeout {4 * self._passed:g}"
            return problem("the check itself", evidence, again)
        lines = [line.rstrip() for line in output.splitlines() if line.strip()][-_SHOWN:]
        shown = "; its last lines:\n" + "\n".join(lines) if lines else ", no output"
        return problem(
            "the check itself", f"Its process ended: {exit_in_words(self._process.returncode)}{shown}"
        )

    def _lines(self) -> list[Any]:
        """Return what it has written, a line for what the check needs and for each finding, ``None`` at the end."""
        whole, _, _ = text_of(self._results).rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def _send(self, message: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        # It may have crashed already, with the reason in its output; or been ended with all others.
        with suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()


def _innermost_frame(output: str) -> str:
    """Return where the main thread of a check was, from the stacks that it printed; that thread is the last."""
    _, _, stack = output.rpartition("most recent call first):")
    frames = re.findall(r'File "(.+?)", line (\d+) in (\S+)', stack)
    for path, line, function in frames:
        is_standard = path.startswith(_STANDARD_LIBRARY) and "site-packages" not in path
        if not is_standard and not path.endswith(_WHAT_RUNS_PROGRAMS):
            return f"; it was at {path}:{line} in {function}"
    return ""
