"""Checks run in child processes, some at a time, each with a deadline; one that hangs or crashes is a finding."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_lockstep.doctor.findings import CheckResult, Finding, problem
from lightning_lockstep.doctor.options import CheckOptions
from lightning_lockstep.doctor.processes import end_group, memory_file, text_of
from lightning_lockstep.doctor.registry import BUILT_IN, load_check

__all__ = ["Checks"]

# Checks of others are not imported here, so their own limits are not known [s].
_TIMEOUT_OF_OTHERS = 60.0
# So much later than its own report of where it hangs a check is ended [s].
_GRACE = 0.5
# So long a process may take to end the programs of its check [s].
_TO_END = 2.0
# What a check waits in is of no interest, but which of its own lines called it.
_STANDARD_LIBRARY = str(Path(os.__file__).parent)
_WHAT_RUNS_PROGRAMS = ("doctor/processes.py", "doctor/this_machine.py")
# Lines of a check's own output that are shown when it fails.
_SHOWN = 6


class Checks:
    """The checks of one call of the doctor.

    Args:
        names: Of the checks, in the order in which they are started.
        options: What the user has asked.
        sysroot: The imitated machine to look at; by default this one.
        at_a_time: Checks that run at the same time; by default as many as there are cores, at least 2.
    """

    def __init__(
        self,
        names: Sequence[str],
        options: CheckOptions,
        *,
        sysroot: Path | None = None,
        at_a_time: int | None = None,
    ) -> None:
        self.names = tuple(names)
        self._options, self._sysroot = options, sysroot
        self._at_a_time = at_a_time or max(2, os.cpu_count() or 1)
        self._lock = threading.Lock()
        self._running: dict[str, float] = {}
        self._is_over = False
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def running(self) -> dict[str, float]:
        """Return the checks that run now, each with how long it has [s]."""
        now = time.monotonic()
        with self._lock:
            return {name: now - began for name, began in self._running.items()}

    def results(self, tick: Callable[[], None] = lambda: None) -> Iterator[CheckResult]:
        """Run the checks and yield each result when it is there.

        Those that start ranks or measure speed run one by one after the others.

        Args:
            tick: Called several times a second while nothing has ended.
        """
        together = [name for name in self.names if not _is_alone(name)]
        alone = [name for name in self.names if _is_alone(name)]
        yield from self._run(together, self._at_a_time, tick)
        yield from self._run(alone, 1, tick)

    def _run(self, names: Sequence[str], at_a_time: int, tick: Callable[[], None]) -> Iterator[CheckResult]:
        with ThreadPoolExecutor(at_a_time, thread_name_prefix="lockstep-doctor") as pool:
            waiting: set[Future[CheckResult]] = {pool.submit(self._run_one, name) for name in names}
            try:
                while waiting:
                    done, waiting = wait(waiting, timeout=0.1, return_when=FIRST_COMPLETED)
                    tick()
                    yield from (future.result() for future in done)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._end_all()
                raise

    def _run_one(self, name: str) -> CheckResult:
        began = time.monotonic()
        with self._lock:
            self._running[name] = began
        try:
            return self._in_a_process(name, _timeout(name, self._options))
        finally:
            with self._lock:
                del self._running[name]

    def _in_a_process(self, name: str, timeout: float) -> CheckResult:
        began = time.monotonic()
        task = {
            "check": name,
            "deadline": time.time() + timeout,
            "sysroot": str(self._sysroot) if self._sysroot else None,
            "options": self._options.to_json(),
        }
        with memory_file() as results, memory_file() as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "lightning_lockstep.doctor.child_process"],
                stdin=subprocess.PIPE,
                stdout=results,
                stderr=output,
                start_new_session=True,
            )
            in_time = self._wait(process, task, timeout + _GRACE)
            ended = _Ended(text_of(results), text_of(output), process.returncode, timeout, in_time)
        return _result(name, ended, time.monotonic() - began)

    def _wait(self, process: subprocess.Popen[bytes], task: Mapping[str, object], timeout: float) -> bool:
        """Give a process its task and wait for its end; returns whether it came in time."""
        with self._lock:
            self._processes[process.pid] = process
            is_over = self._is_over
        assert process.stdin is not None
        try:
            with suppress(BrokenPipeError):  # it has crashed already, and its output says how
                process.stdin.write(json.dumps(task).encode() + b"\n")
                process.stdin.flush()
            process.wait(0 if is_over else timeout)  # others may have been ended while it was started
            return True
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(process)
            with self._lock:
                del self._processes[process.pid]

    def _end_all(self) -> None:
        with self._lock:
            self._is_over = True
            left = list(self._processes.values())
        for process in left:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all programs that its check has started.

    It ends them itself when its input closes, each with the group it has; what is left then is ended from here.
    """
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_TO_END)
    end_group(process.pid)
    process.wait()


@dataclass(frozen=True)
class _Ended:
    """How the process of a check has ended."""

    written: str
    output: str
    returncode: int
    timeout: float
    in_time: bool


def _is_alone(name: str) -> bool:
    return name in BUILT_IN and load_check(name).needs_ranks


def _timeout(name: str, options: CheckOptions) -> float:
    if options.timeout is not None:
        return options.timeout
    return load_check(name).timeout if name in BUILT_IN else _TIMEOUT_OF_OTHERS


def _result(name: str, ended: _Ended, seconds: float) -> CheckResult:
    with suppress(ValueError, KeyError, TypeError):
        if ended.in_time:
            return replace(CheckResult.from_json(json.loads(ended.written)), seconds=seconds)
    return CheckResult(name, (_failure(name, ended),), seconds)


def _failure(name: str, ended: _Ended) -> Finding:
    if not ended.in_time:
        place = _innermost_frame(ended.output)
        evidence = (
            f"It did not end within {ended.timeout:g} s{place}. What it waits for hangs, or needs more time."
        )
        return problem(
            "the check itself", evidence, f"lockstep-doctor {name} --timeout {4 * ended.timeout:g}"
        )
    how = f"exit code {ended.returncode}" if ended.returncode >= 0 else f"signal {-ended.returncode}"
    lines = [line.rstrip() for line in ended.output.splitlines() if line.strip()][-_SHOWN:]
    said = "; its last lines:\n" + "\n".join(lines) if lines else " and no output"
    return problem("the check itself", f"It ended with {how}{said}")


def _innermost_frame(output: str) -> str:
    """Return where the main thread of a check was, from the stacks that it printed; that thread is the last."""
    _, _, stack = output.rpartition("most recent call first):")
    frames = re.findall(r'File "(.+?)", line (\d+) in (\S+)', stack)
    for path, line, function in frames:
        is_standard = path.startswith(_STANDARD_LIBRARY) and "site-packages" not in path
        if not is_standard and not path.endswith(_WHAT_RUNS_PROGRAMS):
            return f"; it was at {path}:{line} in {function}"
    return ""
