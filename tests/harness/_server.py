"""A process that has imported torch and Lightning once, and forks ranks and scripts from there.

Importing Lightning costs seconds of CPU a process; a fork from here costs milliseconds. It is safe because
the fork happens before any thread, process group or CUDA context exists. A fork ends without taking apart what it
has imported; a program that is to start and end as a user's does runs with ``fresh=True``.
Each caller gets a *leader* of its own session, which forks its programs, and ends them all when the caller has gone.
A rank that a launcher starts as a fresh interpreter has itself forked here too
(``child_site/fork_start.py``).

Run by ``ranks.py`` as a script: ``python _server.py <socket> <repository> <child site>``; it ends when its standard
input closes.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import json
import multiprocessing.process
import os
import random
import runpy
import select
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

# What a forked process does next; functions return it so that no frame of the server stays below a rank.
Next = Callable[[], Any]


def load_module(name: str, path: Path, package: bool = False) -> ModuleType:
    """Import a file under a given name, without searching ``sys.path``."""
    spec = importlib.util.spec_from_file_location(
        name, path, submodule_search_locations=[str(path.parent)] if package else None
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def preload() -> None:
    """Import what nearly every rank needs, leaving this process single-threaded."""
    # OpenBLAS starts its threads when numpy is imported, and those would not survive the fork.
    before = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for name in ("torch.distributed", "lightning.pytorch", "torch.utils.data", "omegaconf", "pytest", "tests.harness"):
        importlib.import_module(name)
    with contextlib.suppress(ImportError):  # DeepSpeed imports it, for most of the time that its own import takes
        importlib.import_module("mlflow")

    if before is None:
        del os.environ["OPENBLAS_NUM_THREADS"]
    else:
        os.environ["OPENBLAS_NUM_THREADS"] = before
    gc.collect()
    gc.freeze()


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def serve(jobs: socket.socket, starts: socket.socket) -> Next | None:
    """Fork a leader for each connection; returns in the leader, or with None when the caller has gone."""
    while True:
        ready, _, _ = select.select([jobs, starts, sys.stdin], [], [], 0.5)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if sys.stdin in ready:
            return None
        for listener in (jobs, starts):
            if listener not in ready:
                continue
            client, _ = listener.accept()
            if os.fork() == 0:
                folder = Path(starts.getsockname()).parent
                jobs.close()
                starts.close()
                if listener is jobs:
                    return lambda client=client: lead(Connection(client.detach()))  # type: ignore[misc]
                return lambda client=client: lead_start(client, folder)  # type: ignore[misc]
            client.close()


def lead(conn: Connection) -> Next:
    """Fork the programs of one caller; send it their process ids, and the place and return code of each that ends."""
    # A leader ends by os._exit: Python would take apart all that this process has imported, for 0.4 s of CPU.
    os.setsid()
    die_with_parent()
    pids: list[int] = []
    for program in conn.recv():
        pid = os.fork()
        if pid == 0:
            conn.close()
            return lambda program=program: run_script(program)  # type: ignore[misc]
        pids.append(pid)
    conn.send(pids)
    running = {os.pidfd_open(pid): place for place, pid in enumerate(pids)}
    while running:
        ready, _, _ = select.select([*running, conn], [], [])
        if conn in ready:  # the caller has gone
            for place in running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pids[place], signal.SIGKILL)
        for ended in running.keys() & set(ready):
            place = running.pop(ended)
            _, status = os.waitpid(pids[place], 0)
            with contextlib.suppress(ConnectionError):
                conn.send((place, os.waitstatus_to_exitcode(status)))
    os._exit(0)


def lead_start(client: socket.socket, folder: Path) -> Next:
    """Fork the rank that an interpreter stands for; tell that its process id, and how it ended."""
    os.setsid()
    die_with_parent()
    content, files, _, _ = socket.recv_fds(client, 2**20, 250)
    if not content:
        os._exit(0)
    program = json.loads(content)
    pid = os.fork()
    if pid == 0:
        client.close()
        return lambda: run_start(program, files)
    for file in files:
        os.close(file)
    note = folder / f"fork-{program['pid']}"
    note.write_text(str(pid))
    client.send(str(pid).encode())
    ended = os.pidfd_open(pid)
    ready, _, _ = select.select([ended, client], [], [])
    if ended not in ready:  # the interpreter that stands for it was killed
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    note.unlink(missing_ok=True)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        client.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def run_start(program: dict[str, Any], files: list[int]) -> None:
    """Run a rank in this fork, with the open files of the interpreter that stands for it."""
    os.setsid()
    die_with_parent()
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, 300) for file in files]
    for file in files:
        os.close(file)
    for number, file in zip(program["files"], high, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.setpriority(os.PRIO_PROCESS, 0, program["nice"])
    os.sched_setaffinity(0, program["cores"])
    stand_in, own, getppid = program["pid"], os.getpid(), os.getppid

    def parent() -> int:
        """The process that started the interpreter; children of this one have this one as theirs."""
        if os.getpid() != own:
            return getppid()
        try:
            return int(Path(f"/proc/{stand_in}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            return 1

    os.getppid = parent
    for text in program["filters"]:
        warnings._setoption(text)  # type: ignore[attr-defined]
    run_program(program["arguments"], program["environment"], program["cwd"])


def run_script(job: Any) -> None:
    """Run a program in this fork as a fresh interpreter would."""
    os.setsid()
    die_with_parent()
    redirect(job.stdout, job.stderr)
    run_program(job.arguments, job.environment, job.cwd)


def run_program(arguments: list[str], environment: dict[str, str], cwd: str) -> None:
    """Run what stands behind ``python``, as it would."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    paths_of_server = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    threads_of_server = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(environment)
    if environment.get("OMP_NUM_THREADS", threads_of_server) != threads_of_server:
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    os.chdir(cwd)
    multiprocessing.process.ORIGINAL_DIR = cwd  # type: ignore[attr-defined]
    paths = list(filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)))
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths_of_server)]
    random.seed()
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    first, *others = arguments
    try:
        if first == "-m":
            sys.path.insert(0, cwd)
            sys.argv = ["-m", *others[1:]]
            runpy._run_module_as_main(others[0])  # type: ignore[attr-defined]
        elif first == "-c":
            sys.path.insert(0, "")
            sys.argv = ["-c", *others[1:]]
            exec(compile(others[0], "<string>", "exec"), vars(main))
        else:
            sys.path.insert(0, str(Path(first).resolve().parent))
            sys.argv = [first, *others]
            main.__file__ = first
            exec(compile(Path(first).read_bytes(), first, "exec"), vars(main))
    except SystemExit as asked:
        if asked.code is not None and not isinstance(asked.code, int):
            raise
        end(asked.code or 0)
    except BaseException as error:
        # As the interpreter does, without the frames of this file.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
            trace = trace.tb_next
        error.__traceback__ = trace
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.last_exc = error  # type: ignore[attr-defined]
        sys.excepthook(type(error), error, trace)
        if isinstance(error, KeyboardInterrupt):
            sys.excepthook = lambda *_: None
            raise
        end(1)
    else:
        end(0)


def end(code: int) -> None:
    """End as Python does, but leave to the kernel what this process has imported: to free it takes 0.5 s of CPU."""
    # mpi4py finalizes MPI from a list of C functions that only Python itself calls, last of all.
    if "mpi4py.MPI" in sys.modules:
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stderr, sys.stdout):
            if not stream.closed:
                stream.flush()
    except Exception:
        code = 120  # Python's own for this
    os._exit(code)


def redirect(stdout: str, stderr: str) -> None:
    """Let the standard streams be these files, and standard input empty."""
    for descriptor, target, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, stdout, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        opened = os.open(target, flags, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)


def main() -> None:
    """Serve until the caller closes our standard input."""
    sys.path.pop(0)  # this file's folder: its modules are reachable as tests.harness only
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    socket_path, repository, child_site = sys.argv[1:]
    for name in ("tests", "benchmarks"):
        load_module(name, Path(repository, name, "__init__.py"), package=True)
    fork_start = load_module("fork_start", Path(child_site) / "fork_start.py")
    surroundings = fork_start.surroundings()
    preload()
    starts = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    start_path = fork_start.socket_path(str(Path(socket_path).parent))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(start_path)
    starts.bind(start_path)
    starts.listen(64)
    Path(f"{start_path}.surroundings").write_text(surroundings)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(socket_path + ".part")
    listener.listen()
    os.rename(socket_path + ".part", socket_path)
    todo: Next | None = lambda: serve(listener, starts)  # noqa: E731
    while todo is not None:
        todo = todo()


if __name__ == "__main__":
    main()
