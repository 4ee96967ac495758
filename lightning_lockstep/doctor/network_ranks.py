"""All ranks of the network test, on this host and on others, and what each of them knows of the others.

Every process of a test takes the same stages in the same order. In each, every rank does something by itself, and
:meth:`RankGroup.all` tells all processes what all ranks answered; so all of them decide the same thing next, and no
command travels.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, TypeVar

import lightning_lockstep
from lightning_lockstep._system import memory_file, text_of
from lightning_lockstep.doctor.machine import last_line
from lightning_lockstep.doctor.network_stages import Probe, host_facts
from lightning_lockstep.doctor.registry import CheckOptions
from lightning_lockstep.launchers.mpi_hosts import (
    NO_SSH,
    SSH_FAILED,
    HostReport,
    host_fix,
    python_on,
    ssh_fault,
)

Answer = dict[str, Any]
Argument = TypeVar("Argument")
Result = TypeVar("Result")

# -- A connection between the first process of a test and another one --

_VERSION = lightning_lockstep.__version__
_SEND = 5  # longest wait for the other end to take what it is sent [s]
_LONGEST = 64_000_000  # of a message, which all ranks of a large job fill together [bytes]


class ClosedError(Exception):
    """The other process has ended."""


class Link:
    """One end of a connection: lines of JSON."""

    def __init__(self, reader: IO[bytes], writer: IO[bytes], connection: socket.socket | None = None) -> None:
        self._reader, self._writer, self._connection = reader, writer, connection

    @classmethod
    def of_socket(cls, connection: socket.socket, patience: int = 600) -> Link:
        """Return the link over a connected socket."""
        connection.settimeout(None)
        link = cls(connection.makefile("rb"), connection.makefile("wb"), connection)
        link.set_patience(patience)
        return link

    def set_patience(self, patience: int) -> None:  # longest wait for a message [s]; 0: no limit
        assert self._connection is not None
        # Not settimeout(), after which a file of the socket cannot be read any more.
        for option, seconds in ((socket.SO_SNDTIMEO, _SEND), (socket.SO_RCVTIMEO, patience)):
            self._connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))

    def send(self, **message: Any) -> None:
        try:
            self._writer.write(json.dumps(message).encode() + b"\n")
            self._writer.flush()
        except OSError as error:
            raise ClosedError(f"it does not take what it is sent: {error}") from error

    def receive(self, longest: int = _LONGEST) -> dict[str, Any]:
        """Return the next message; what a shell there prints by itself is skipped."""
        with suppress(OSError):
            while line := self._reader.readline(longest):
                with suppress(ValueError, RecursionError):
                    message = json.loads(line)
                    if isinstance(message, dict):
                        return message
        raise ClosedError("its process ended")

    def answers_to(self, stage: str) -> dict[int, Answer]:
        """Return what was answered in a stage."""
        message = self.receive()
        if message.get("stage") != stage:
            raise ClosedError(f"it takes the stage {message.get('stage')!r} when others take {stage!r}")
        if message.get("of_version", _VERSION) != _VERSION:
            raise ClosedError("the first process is of another version")
        return {int(rank): answer for rank, answer in message["answers"].items()}

    def close(self) -> None:
        with suppress(OSError):  # who reads in another thread sees the end
            if self._connection is not None:
                self._connection.shutdown(socket.SHUT_RDWR)
        for stream in (self._writer, self._reader, self._connection):
            with suppress(OSError):
                if stream is not None:
                    stream.close()


@dataclass(frozen=True)
class OtherProcess:
    """Another process, as the first one sees it: the ranks at the other end of a link, or of ssh."""

    link: Link
    ranks: Sequence[int]
    ssh: subprocess.Popen[bytes] | None = None
    printed: IO[bytes] | None = None  # by the ssh

    def close(self, patience: float = 0.0) -> str:  # so long its ssh may take to end by itself [s]
        """End it; return the last line that its ssh has printed."""
        self.link.close()
        if self.ssh is None or self.printed is None:
            return ""
        with suppress(subprocess.TimeoutExpired):
            self.ssh.wait(patience)
        self.ssh.kill()
        self.ssh.wait()
        with self.printed:
            return last_line(text_of(self.printed))


# -- All ranks of a test, as one of its processes sees them --

_MARGIN = 5.0  # for answers to arrive, beyond the time that a stage may take [s]
_FACTS = 20.0
_LOOK_EVERY = 0.1
_TO_END = 1.0  # so long an ssh may take to end whose other end has [s]


class RankGroup:
    """One process of a test: the first, to which all others are connected, or one of those."""

    def __init__(
        self,
        size: int,
        mine: Sequence[int] = (),  # ranks of this process
        others: Sequence[OtherProcess] = (),  # of the first process
        *,
        first: Link | None = None,  # to the first process, of all others
        mpi: Probe | None = None,  # MPI may have been started already, to find the first process
        absent: Mapping[int, str] | None = None,  # why ranks of no process here will not answer
        ssh_names: Mapping[int, str] | None = None,  # by which the host of a rank was named
        tick: Callable[[], None] = lambda: None,  # called while others are waited for
    ) -> None:
        self.size, self.mine, self.mpi, self.ssh_names = size, tuple(mine), mpi, dict(ssh_names or {})
        self.facts: dict[int, Answer] = {}  # about its host, as each rank has reported
        self.missing: dict[int, str] = {}  # why a rank has not
        self.fixes: dict[int, tuple[str, ...]] = {}  # lines to paste for a rank that has not
        self._others, self._first, self._tick = list(others), first, tick
        self._ended = dict(absent or {})  # why a rank answers no more
        self._unreached = set(self._ended)  # ranks to whose host ssh did not get
        self._is_closed = threading.Event()

    @property
    def ranks(self) -> list[int]:
        """The ranks that have reported."""
        return sorted(self.facts)

    @property
    def hosts(self) -> dict[str, list[int]]:
        """The ranks of each host."""
        found: dict[str, list[int]] = {}
        for rank in self.ranks:
            found.setdefault(self.host(rank), []).append(rank)
        return found

    def host(self, rank: int) -> str:
        return str(self.facts[rank]["host"])

    def local_rank(self, rank: int) -> int:
        """Return a rank's place among those of its host."""
        return self.hosts[self.host(rank)].index(rank)

    def meet(self) -> None:
        """Have every rank report about its host; those of another version of this package take no part."""
        version, here = _VERSION, socket.gethostname()
        for rank, answer in self.all("facts", _FACTS, lambda _: host_facts(), range(self.size)).items():
            if answer.get("version") == version:
                self.facts[rank] = answer
            elif "version" in answer:
                self.missing[rank] = (
                    f"lightning-lockstep is {answer['version']} on {answer['name']}, and {version} on {here}:"
                    " the test needs one version"
                )
                self.fixes[rank] = (f"pip install lightning-lockstep=={version}  # on {answer['name']}",)
            else:
                self._explain(rank, str(answer["error"]))
        for other in [other for other in self._others if other.ranks[0] in self.missing]:
            self._end(other, "")
        self.give_hosts_unique_names()

    def _explain(self, rank: int, why: str) -> None:
        """Note why a rank has not reported."""
        self.missing[rank] = why
        if rank in self.ssh_names:
            host = self.ssh_names[rank]
            if rank in self._unreached:
                self.missing[rank], fix = ssh_fault(HostReport(host, why))
            elif "No module named" in why:
                self.missing[rank] = f"the package is not installed there, or not in this Python: {why}"
                fix = host_fix(HostReport(host, "ok"))
            else:
                self.missing[rank] = f"the doctor fails there: {why}"
                fix = [f"ssh {host} true", f"# and on {host}, by this path: {sys.executable}"]
            self.fixes[rank] = tuple(fix)

    def give_hosts_unique_names(self) -> None:
        """Add an address to the names of hosts that share one, such as ``localhost``."""
        machines: dict[str, set[str]] = {}
        for facts in self.facts.values():
            machines.setdefault(str(facts.get("name")), set()).add(str(facts.get("machine")))
        for facts in self.facts.values():
            name, machine = str(facts.get("name")), str(facts.get("machine"))
            address = next(iter(facts.get("outside", [])), machine)
            facts["host"] = f"{name} ({address})" if len(machines[name]) > 1 else name

    def all(
        self,
        stage: str,
        within: float,  # that it may take [s]
        action: Callable[[int], Answer],
        ranks: Sequence[int] | None = None,  # that take part; None: all that have reported
    ) -> dict[int, Answer]:
        """Have each rank do something; return what each answered, with ``silent`` where it did not in time."""
        # Who has missed the end of a stage takes part in no other.
        asked = self.ranks if ranks is None else ranks
        own = {rank: self._in_thread(action, rank, stays=True) for rank in self.mine if rank in asked}
        theirs = [(other, self._in_thread(other.link.answers_to, stage)) for other in self._others]
        self._wait([*own.values(), *(future for _, future in theirs)], within)
        answers = {rank: _answer(future, within) for rank, future in own.items()}
        if self._first is not None:
            self._first.send(stage=stage, answers=answers)
            return self._first.answers_to(stage)
        for other, future in theirs:
            if not future.done():
                self._end(other, f"it did not answer within {within:.0f} s")
            elif (error := future.exception()) is not None:
                self._end(other, str(error))
            else:
                answers |= {rank: answer for rank, answer in future.result().items() if rank in other.ranks}
        for rank in asked:
            answers.setdefault(rank, _silent(self._ended.get(rank, "it did not answer")))
        for other in list(self._others):
            try:
                other.link.send(stage=stage, of_version=_VERSION, answers=answers)
            except ClosedError as error:  # noqa: PERF203 - one that has ended is no reason to leave out the next
                self._end(other, str(error))
        return {rank: answers[rank] for rank in sorted(answers)}

    def _in_thread(
        self, call: Callable[[Argument], Result], argument: Argument, *, stays: bool = False
    ) -> Future[Result]:
        """Call something in a thread, which no end of this process waits for."""
        # Linux ends a probe with the thread that has started it: one that may have stays until the group is closed.
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(call(argument))
            except Exception as error:
                future.set_exception(error)
            if stays:
                self._is_closed.wait()

        threading.Thread(target=run, name="doctor-rank", daemon=True).start()
        return future

    def _wait(self, futures: Sequence[Future[Any]], within: float) -> None:
        deadline = time.monotonic() + within + (_MARGIN if self._others else 0)
        while wait(futures, _LOOK_EVERY).not_done and time.monotonic() < deadline:
            self._tick()

    def _end(self, other: OtherProcess, why: str) -> None:
        """Go on without the ranks of another process."""
        self._others.remove(other)
        printed = other.close(_TO_END)
        code = None if other.ssh is None else other.ssh.returncode
        if code == SSH_FAILED:
            self._unreached |= set(other.ranks)
        if printed:  # by an ssh that was late it is a greeting, or a warning
            why = f"{why} ({printed})" if self.facts or code == -signal.SIGKILL else printed
        self._ended |= dict.fromkeys(other.ranks, why)

    def close(self) -> None:
        if self.mpi is not None:
            self.mpi.end()
        for other in self._others:
            other.close()
        if self._first is not None:
            self._first.close()
        self._is_closed.set()


def _answer(future: Future[Answer], within: float) -> Answer:
    if not future.done():
        return _silent(f"it did not answer within {within:.0f} s")
    try:
        return future.result()
    except (OSError, TypeError, ValueError) as error:
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}


def _silent(error: str) -> Answer:
    return {"ok": False, "silent": True, "error": error}


# -- Ranks of this process, and ranks on other hosts: one ssh for each host --

_PROGRAM = "lightning_lockstep.doctor.hosts"


def ranks_here(count: int) -> RankGroup:
    """Return ranks that are all of this process."""
    group = RankGroup(count, range(count))
    group.meet()
    return group


def ranks_by_ssh(
    hosts: Sequence[str],
    per_host: int,
    checks: Sequence[str],  # that they run
    options: CheckOptions,
    tick: Callable[[], None] = lambda: None,  # called while they are waited for
) -> RankGroup:
    """Start ranks on other hosts by ssh, and return those that answer."""
    size = len(hosts) * per_host
    others = []
    absent: dict[int, str] = {}
    for number, host in enumerate(hosts):
        ranks = range(number * per_host, (number + 1) * per_host)
        given = {"size": size, "ranks": list(ranks), "checks": list(checks), "options": options.to_json()}
        command = python_on(host, ["-m", _PROGRAM, json.dumps(given)], options.ssh_args)
        if shutil.which(command[0]) is None:
            absent |= dict.fromkeys(ranks, NO_SSH)
            continue
        ours, theirs = socket.socketpair()
        printed = memory_file()
        with theirs:
            ssh = subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=printed)
        others.append(OtherProcess(Link.of_socket(ours, patience=0), ranks, ssh, printed))
    ssh_names = {rank: hosts[rank // per_host] for rank in range(size)}
    group = RankGroup(size, others=others, absent=absent, ssh_names=ssh_names, tick=tick)
    try:
        group.meet()
    except BaseException:  # such as Ctrl-C, which these ssh do not receive
        group.close()
        raise
    return group
