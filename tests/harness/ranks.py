"""Run a function on several real processes and get each rank's answer, under a time limit."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import psutil

from tests.harness import costs
from tests.harness._protocol import STACK_SIGNAL, Call, RankOutcome, ScriptJob
from tests.harness.children import CHILD_SITE
from tests.harness.patience import patience
from tests.harness.ports import reserve_port

__all__ = ["RankOutcome", "run_ranks", "run_ranks_raw"]

_START_LIMIT = 120.0
_servers: dict[str, subprocess.Popen[bytes]] = {}  # by their interpreter
_folder: Path | None = None
_starting = threading.Lock()


class RankError(AssertionError):
    """Some ranks failed, or the time limit ran out: the traceback of each, or its Python stacks."""


def run_ranks(
    n: int,  # number of processes, all on this host
    fn: Callable[..., Any],  # A function at the top level of a module (it travels by name)
    *args: Any,
    timeout: float = 60.0,  # seconds until all ranks are killed
    env: Mapping[str, str] | None = None,
    backend: str | None = "gloo",
) -> list[Any]:
    """Call ``fn(*args)`` on n ranks and return what each returned, in rank order; else raise what went wrong."""
    # `env` is added to the variables of this process and of torchrun; a process group of `backend`, unless it is None,
    # is there around the call.
    outcomes = run_ranks_raw(n, fn, *args, timeout=timeout, env=env, backend=backend, linger=5.0)
    if not all(outcome.ok for outcome in outcomes):
        raise RankError(_describe(outcomes, f"of {n} ranks, some failed"))
    return [outcome.value for outcome in outcomes]


def run_ranks_raw(
    n: int,  # number of processes
    fn: Callable[..., Any],  # A function at the top level of a module
    *args: Any,
    timeout: float = 60.0,  # seconds until all ranks are killed
    env: Mapping[str, str] | None = None,  # more environment variables
    backend: str | None = "gloo",  # process group to initialise around the call, or None
    linger: float | None = None,  # seconds the others get to end by themselves once one rank has failed
    allow_timeout: bool = False,  # return the outcomes after a time-out too (``killed_by_helper`` is set)
) -> list[RankOutcome]:
    """As ``run_ranks``, for ranks that are expected to fail: tells how each ended, raises for none of them."""
    costs.may_start("ranks")
    folder = Path(tempfile.mkdtemp(prefix="ranks.", dir=_start_server()))
    timeout = patience(timeout)
    call = Call(pickle.dumps((fn, args)), list(sys.path), backend, timeout)
    try:
        (folder / "call").write_bytes(pickle.dumps(call))
        with reserve_port() as port:
            jobs = [_job(folder, rank, n, port, {**os.environ, **(env or {})}) for rank in range(n)]
            outcomes, timed_out = _run(jobs, folder, timeout, linger)
        for outcome in outcomes:
            _collect(outcome, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if timed_out and not allow_timeout:
        raise RankError(_describe(outcomes, f"time limit of {timeout:g} s reached; all ranks were killed"))
    return outcomes


def kill_self() -> None:
    """Kill this process: a rank that dies without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def server_pids() -> set[int]:
    """The processes that ranks are forked from (the leak check leaves them alone)."""
    return {server.pid for server in _servers.values()}


def forks_of_launched_ranks(executable: str = sys.executable) -> Path:
    """Start the fork server of an interpreter, and return the folder for the variable that brings ranks to it."""
    return _start_server(executable)


def fork_of(pid: int) -> int | None:
    """Return the process that an interpreter stands for, if it was started as a rank and runs as a fork."""
    try:
        return int((_folder / f"fork-{pid}").read_text()) if _folder is not None else None
    except (OSError, ValueError):
        return None


def fork_programs(jobs: list[ScriptJob]) -> tuple[Connection, list[int]]:
    """Have the fork server run programs, which end when the connection is closed."""
    # Returned are the connection, which brings the place and return code of each that ends, and their process ids.
    conn = Client(str(_start_server() / "socket"), "AF_UNIX")
    conn.send(jobs)
    return conn, conn.recv()


def _job(folder: Path, rank: int, world_size: int, port: int, environment: dict[str, str]) -> ScriptJob:
    """Return the program of one rank, with what torchrun would add to the environment."""
    of_rank = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    arguments = [str(Path(__file__).with_name("_rank.py")), str(folder)]
    stdout, stderr = (str(folder / f"rank{rank}.{stream}") for stream in ("stdout", "stderr"))
    return ScriptJob(arguments, {**environment, **of_rank}, os.getcwd(), stdout, stderr)


def _run(jobs: list[ScriptJob], folder: Path, timeout: float, linger: float | None) -> tuple[list[RankOutcome], bool]:
    """Wait for the ranks, and end them when time is up or a failure lingers; tell also whether time was up."""
    outcomes = [RankOutcome(rank) for rank in range(len(jobs))]
    started = time.monotonic()
    conn, pids = fork_programs(jobs)
    limit = started + timeout
    deadline: float | None = limit  # None: they are being ended
    running, timed_out = set(range(len(jobs))), False
    with conn:
        while running:
            if not conn.poll(deadline and max(deadline - time.monotonic(), 0.0)):
                timed_out, deadline = deadline == limit, None
                _end({pids[rank]: outcomes[rank] for rank in running}, folder)
                continue
            rank, outcomes[rank].returncode = conn.recv()
            running.remove(rank)
            outcomes[rank].seconds = time.monotonic() - started
            # Whatever the rank started itself (data loader workers) ends with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pids[rank], signal.SIGKILL)
            if outcomes[rank].returncode and linger is not None and deadline is not None:
                deadline = min(deadline, time.monotonic() + linger)
    return outcomes, timed_out


def _end(ranks: dict[int, RankOutcome], folder: Path) -> None:
    """Take the stacks of the ranks with these process ids, then kill each with all it started."""
    for pid, outcome in ranks.items():
        outcome.killed_by_helper = True
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                outcome.stack = "the process is stopped (SIGSTOP): no Python stack to be had"
            elif (folder / f"rank{outcome.rank}.stack").exists():
                os.kill(pid, STACK_SIGNAL)
    time.sleep(0.5)
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _collect(outcome: RankOutcome, folder: Path) -> None:
    """Add what the rank left in its files."""

    def read(suffix: str) -> str | None:
        path = folder / f"rank{outcome.rank}.{suffix}"
        return path.read_text(errors="replace") if path.exists() else None

    outcome.stdout = read("stdout") or ""
    outcome.stderr = read("stderr") or ""
    error = folder / f"rank{outcome.rank}.error"
    if error.exists():
        outcome.exception, outcome.traceback = pickle.loads(error.read_bytes())
    if outcome.killed_by_helper:
        outcome.stack = outcome.stack or read("stack") or "no stack: the rank did not answer"
    value = folder / f"rank{outcome.rank}.value"
    if value.exists():
        outcome.value = pickle.loads(value.read_bytes())


def _describe(outcomes: Sequence[RankOutcome], headline: str) -> str:
    parts = [headline]
    for outcome in outcomes:
        if outcome.ok:
            parts.append(f"--- rank {outcome.rank}: ok after {outcome.seconds:.1f} s")
            continue
        how = outcome.signal.name if outcome.signal else f"exit code {outcome.returncode}"
        if outcome.killed_by_helper:
            how = "killed by the test helper"
        parts.append(f"--- rank {outcome.rank}: {how} after {outcome.seconds:.1f} s")
        parts.append(outcome.traceback or "")
        if outcome.stack:
            parts.append(f"stacks:\n{outcome.stack}")
        said = {"stdout": outcome.stdout, "stderr": outcome.stderr}
        parts.extend(f"{name} (end):\n{text[-3000:]}" for name, text in said.items() if text.strip())
    return "\n".join(part.rstrip() for part in parts if part)


def server_command(executable: str, path: Path) -> list[str]:
    """Return what starts the fork server of an interpreter, which listens at ``path``."""
    script = Path(__file__).with_name("_server.py")
    return [executable, str(script), str(path), str(Path(__file__).resolve().parents[2]), str(CHILD_SITE)]


def _start_server(executable: str = sys.executable) -> Path:
    """Start the fork server on first use; returns its folder."""
    with _starting:  # tests call from several threads
        return _started_server(executable)


def _started_server(executable: str) -> Path:
    global _folder
    if _folder is None:
        _folder = Path(tempfile.mkdtemp(prefix="lockstep-ranks."))
        atexit.register(stop_server)
    running = _servers.get(executable)
    if running is not None and running.poll() is None:
        return _folder
    name = "socket" if executable == sys.executable else f"socket{len(_servers)}"
    log_file = _folder / f"{name}.log"
    with log_file.open("wb") as log:
        _servers[executable] = server = subprocess.Popen(
            server_command(executable, _folder / name),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            # Unbuffered, a line of a fork would be two writes.
            env={key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"},
            start_new_session=True,
        )
    deadline = time.monotonic() + _START_LIMIT
    while not (_folder / name).exists():
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the fork server did not start:\n" + log_file.read_text())
        time.sleep(0.02)
    return _folder


def stop_server() -> None:
    """End the fork servers and remove their folder; the next ``run_ranks`` starts a new one."""
    global _folder
    for server in _servers.values():
        assert server.stdin is not None
        server.stdin.close()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
    _servers.clear()
    if _folder is not None:
        shutil.rmtree(_folder, ignore_errors=True)
        _folder = None
