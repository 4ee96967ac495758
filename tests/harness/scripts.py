"""Run a user-like script or command in a session of its own, and tell what it left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from tests.harness import costs
from tests.harness._protocol import ScriptJob
from tests.harness.child_site.fork_start import FOLDER, GIVEN, READ_AT_START
from tests.harness.patience import patience, wait_until
from tests.harness.ranks import fork_of, fork_programs, forks_of_launched_ranks

# Inherited by everything the script starts, also by processes that leave its session (torchrun's do). Python
# processes that have it write whole lines (child_site/sitecustomize.py).
_MARK = "LOCKSTEP_TEST_SCRIPT"


@dataclasses.dataclass(frozen=True)
class ScriptOutcome:
    """How a script ended."""

    returncode: int
    """Exit code; negative: minus the signal that ended it."""
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool
    leftovers: tuple[str, ...]
    """Processes it had started that were still there after it ended: ``pid state command``."""

    @property
    def output(self) -> str:
        """Both streams, for searching and for failure messages."""
        return f"{self.stdout}\n{self.stderr}"


class ForkedProgram:
    """A Python program that the fork server runs; has what is used here of :class:`subprocess.Popen`."""

    def __init__(self, job: ScriptJob) -> None:
        self._conn, (self.pid,) = fork_programs([job])
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its return code, or ``None`` while it runs."""
        return self._receive(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        if self._receive(timeout) is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def _receive(self, timeout: float | None) -> int | None:
        if self.returncode is None and self._conn.poll(timeout):
            _, self.returncode = self._conn.recv()
            self._conn.close()
        return self.returncode


def _forkable(command: Sequence[str], env: Mapping[str, str | None]) -> bool:
    """Whether the command is a Python program on whose start nothing depends."""
    changed = [key for key, value in env.items() if value != os.environ.get(key) and not key.startswith(GIVEN)]
    if command[0] != sys.executable or len(command) < 2 or any(k.startswith(READ_AT_START) for k in changed):
        return False
    return command[1] in ("-c", "-m") or not command[1].startswith("-")


def _with_interpreter(command: list[str], path: str | None) -> list[str]:
    """Put this interpreter in front of a Python program: one that ends in ``.py``, or a console script beside it."""
    if command[0].endswith(".py"):
        return [sys.executable, *command]
    found = shutil.which(command[0], path=path)
    if found is not None and Path(found).parent == Path(sys.executable).parent:
        with open(found, "rb") as file:
            first = file.readline().strip()
        if first.startswith(f"#!{Path(sys.executable).parent}/python".encode()):
            return [sys.executable, found, *command[1:]]
    return command


class Script:
    """A running script. Use as a context manager: its whole process tree is gone afterwards."""

    # A first element that ends in .py runs under this interpreter; a variable that is None is removed; without `cwd` it
    # runs in an empty folder. A Python program is forked from one that has imported Lightning unless it is `fresh`.

    def __init__(
        self,
        args: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str | None] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        fresh: bool = False,
    ) -> None:
        costs.may_start("programs")
        self._mark = uuid.uuid4().hex
        self._folder = tempfile.TemporaryDirectory(prefix="script.")
        self._seen: dict[int, psutil.Process] = {}
        self._lock = threading.Lock()
        self._started = time.monotonic()
        if cwd is None:
            # Not the caller's: `python -m` there would import the source tree, and files would stay there.
            cwd = Path(self._folder.name) / "cwd"
            cwd.mkdir()
        # Unbuffered, a printed line is two writes, and the lines of ranks that share a file meet.
        # Ranks that the script starts are also forks.
        forks = None if fresh else str(forks_of_launched_ranks())
        merged = {**os.environ, "PYTHONUNBUFFERED": None, FOLDER: forks, **(env or {}), _MARK: self._mark}
        environment = {key: value for key, value in merged.items() if value is not None}
        command = _with_interpreter([os.fspath(arg) for arg in args], environment.get("PATH"))
        self.process: ForkedProgram | subprocess.Popen[bytes]
        with open(self._path("stdout"), "wb") as out, open(self._path("stderr"), "wb") as err:
            if not fresh and _forkable(command, env or {}):
                job = ScriptJob(command[1:], environment, os.fspath(cwd), out.name, err.name)
                self.process = ForkedProgram(job)
            else:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    cwd=cwd,
                    env=environment,
                    start_new_session=True,
                )
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="script-watcher", daemon=True)
        self._watcher.start()

    def _path(self, stream: str) -> Path:
        return Path(self._folder.name) / stream

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            self._look()

    def _look(self) -> None:
        """Remember every descendant while its parent is alive: an orphan cannot be traced back later."""
        todo = [self.process.pid]
        while todo:
            with self._lock, contextlib.suppress(psutil.Error):
                for process in psutil.Process(todo.pop()).children(recursive=True):
                    self._seen.setdefault(process.pid, process)
                    if (fork := fork_of(process.pid)) is not None:
                        self._seen.setdefault(fork, psutil.Process(fork))
                        todo.append(fork)

    @property
    def stdout(self) -> str:
        """Standard output so far."""
        return self._path("stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """Standard error so far."""
        return self._path("stderr").read_text(errors="replace")

    def wait_for(self, pattern: str, timeout: float = 60.0) -> re.Match[str]:
        """Wait until the output (either stream) matches, and return the match."""
        timeout = patience(timeout)
        deadline = time.monotonic() + timeout
        while True:
            ended = self.process.poll() is not None
            match = re.search(pattern, f"{self.stdout}\n{self.stderr}")
            if match:
                return match
            if ended or time.monotonic() > deadline:
                why = f"ended with {self.process.returncode}" if ended else f"{timeout:g} s passed"
                raise AssertionError(f"no {pattern!r} in the output; {why}:\n{self.stdout}\n{self.stderr}")
            time.sleep(0.05)

    def send_signal(self, sig: int) -> None:
        """Send a signal to the script's first process alone, as ``kill`` does."""
        self.process.send_signal(sig)

    def interrupt(self) -> None:
        """Send SIGINT to the whole process group, as Ctrl-C in a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def descendants(self) -> list[psutil.Process]:
        """The living processes below the script."""
        self._look()
        with self._lock:
            return [process for process in self._seen.values() if _is_there(process)]

    def finish(self, timeout: float = 60.0, settle: float = 6.0) -> ScriptOutcome:
        """Wait for the end, look for leftovers, kill them, and tell how it went."""
        timed_out = False
        try:
            self.process.wait(patience(timeout))
        except subprocess.TimeoutExpired:
            timed_out = True
        seconds = time.monotonic() - self._started
        leftovers = () if timed_out else self._leftovers(settle)
        self.kill_tree()
        return ScriptOutcome(self.process.returncode, self.stdout, self.stderr, seconds, timed_out, tuple(leftovers))

    def _leftovers(self, settle: float) -> list[str]:
        if wait_until(lambda: not self._still_there(), settle, pause=0.05):
            return []
        return [_describe(process) for process in self._still_there()]

    def _still_there(self) -> list[psutil.Process]:
        with self._lock:
            found = {process.pid: process for process in self._seen.values() if _is_there(process)}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid != self.process.pid and process.environ().get(_MARK) == self._mark:
                    found[process.pid] = process
        return list(found.values())

    def kill_tree(self) -> None:
        """Kill the script and everything it started, also what has left its session."""
        self._look()
        self._over.set()
        self._watcher.join()
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for process in self._still_there():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def __enter__(self) -> Script:
        """The script is already running."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill what is left and remove the captured output."""
        self.kill_tree()
        self._folder.cleanup()


#: For a test that acts on a script while it runs: ``with start_script(...) as script``.
start_script = Script


def run_script(
    args: Sequence[str | os.PathLike[str]],
    timeout: float = 60.0,  # seconds until the whole tree is killed (``timed_out`` is set; nothing is raised)
    env: Mapping[str, str | None] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    fresh: bool = False,
) -> ScriptOutcome:
    """Run a command to its end with no standard input; its process tree is gone afterwards."""
    with Script(args, env=env, cwd=cwd, fresh=fresh) as script:
        return script.finish(timeout)


def _is_there(process: psutil.Process) -> bool:
    # True for zombies too: is_running compares the start time and does not ask for the state.
    return process.is_running()


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"{process.pid} gone"
