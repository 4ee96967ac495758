"""The ranks of the network test: how they meet, what they tell each other, and what each of them tests.

::

    lockstep-doctor network --nproc 4               mpirun, srun or torchrun ... lockstep-doctor network
    ranks_here(): one process has all ranks         join(): each process is a rank, by external_ranks()
                                    |                   |
                       rendezvous_store(), the store of the job, at rank 0
                                          |
    every rank goes through the stages of ``checks/network.py``, does its part of each, and shares the answer:
                                          |
        meet()         its host, addresses, versions
        reach_others() the first rank of a host connects to the other hosts
        test()         a process for each rank, network_rank.py, tests gloo. It writes a line for each step, and has a
                       deadline for each line:  start  meet  rendezvous  barrier  all_reduce  memory  large
           ...         the same for gloo with an interface set, nccl, nccl without peer-to-peer copies, mpi4py
        end()          the exit code of rank 0

share() gives all ranks the answers that rank 0 has received in time, so that all decide the same about the next stage;
a rank that does not answer is a finding. What can hang does so in a process of its own. Only MPI cannot, because a rank
starts it once: it runs in a thread of this process.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, TypeVar

import lightning_lockstep
from lightning_lockstep._system import memory_file, text_of
from lightning_lockstep._text import exit_in_words, first_line
from lightning_lockstep.distributed.rendezvous import (
    addresses_of,
    interface_towards,
    interfaces,
    signed,
    verified,
)
from lightning_lockstep.doctor.machine import Machine
from lightning_lockstep.doctor.probes import network_rank
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.external_ranks import external_ranks
from lightning_lockstep.launchers.rank_variables import find_mpi_rank, started_from_outside

Answer = dict[str, Any]
T = TypeVar("T")


def backends_of(strategy: str, accelerator: str) -> tuple[str, ...]:
    """Return over which backends the ranks of a strategy communicate; none if it starts one rank."""
    if not strategy or strategy.startswith(("single", "xla_spmd")):
        return ()
    is_on_gpus = accelerator not in ("cpu", "tpu") and not strategy.startswith("xla")
    own = () if strategy.startswith("mpi") else ("gloo",)  # only ranks of mpirun or srun can test MPI
    return (*own, "nccl") if is_on_gpus else own


# -- The ranks of a job, as one of its processes sees them --

_ARRIVAL = 60.0  # longest wait for ranks that another program starts [s]
_IDLE = 450.0  # longest wait of a rank for rank 0, which may have other checks and tests of its own [s]
_REPLY = 30.0  # longest wait for the store, which answers at once unless its host or a link is gone [s]
_MARGIN = 5.0  # for answers to arrive, beyond the time that they may take [s]
_LOOK_EVERY = 0.02
# What decides which interfaces and copies a backend uses.
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_P2P_DISABLE")


class Ranks:
    """The ranks of a job. Ranks: all, together, in each method."""

    def __init__(self, size: int, mine: Sequence[int], store: Any, address: str, port: int) -> None:
        self.size, self.mine = size, tuple(mine)  # mine: ranks of this process
        self.address, self.port = address, port  # where the ranks meet
        self.facts: dict[int, Answer] = {}  # of the ranks that have reported
        self._hangs = False  # a thread of this process hangs in MPI, which an orderly exit would wait for
        self._store, self._number = store, 0
        self._processes: dict[int, BackendProcess] = {}  # of the last test, which other ranks may still need
        # A restarted attempt of torchrun finds the keys of the one before.
        self._prefix = f"lockstep/doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if self.size > len(self.mine) and socket.has_dualstack_ipv6():
            self._listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            self._listener = socket.create_server(("" if self.size > len(self.mine) else "127.0.0.1", 0))

    @property
    def hosts(self) -> dict[str, list[int]]:
        """The ranks of each host, by a name that no other host has."""
        machines: dict[str, set[str]] = {}
        for facts in self.facts.values():
            machines.setdefault(facts["name"], set()).add(facts["machine"])
        found: dict[str, list[int]] = {}
        for rank, facts in sorted(self.facts.items()):
            where = f"{facts['name']} ({next(iter(facts['outside']), facts['machine'])})"
            found.setdefault(where if len(machines[facts["name"]]) > 1 else facts["name"], []).append(rank)
        return found

    def meet(self) -> None:
        facts = {**host_facts(), "port": self._listener.getsockname()[1]}
        self.facts = self.share(dict.fromkeys(self.mine, facts), _ARRIVAL)

    def share(self, answers: dict[int, Answer], limit: float) -> dict[int, Answer]:
        """Return what the ranks have answered, as far as rank 0 has received it within the limit [s]."""
        self._number += 1
        key = str(self._number)
        if 0 not in self.mine:
            for rank, answer in answers.items():
                self._put(f"{key}/{rank}", answer)
            return {int(rank): answer for rank, answer in self._of_main(f"{key}/all").items()}
        others = [rank for rank in range(self.size) if rank not in self.mine]
        found = dict(sorted({**answers, **self._answers(key, others, limit)}.items()))
        self._put(f"{key}/all", found)
        return found

    def end(self, code: int = 0) -> int:  # of rank 0
        """End the test, rank 0 last, because its host may have the store; return the exit code of rank 0."""
        if 0 in self.mine:
            with suppress(RuntimeError):  # the store may be gone
                self._put("end", {"code": code})
                self._answers("ended", [rank for rank in self.facts if rank not in self.mine], 0.0)
        else:
            code = int(self._of_main("end")["code"])
            with suppress(RuntimeError):
                self._put(f"ended/{self.mine[0]}", {})
        self._end_processes()
        self._listener.close()
        if self._hangs:
            os._exit(code)
        return code

    def _of_main(self, key: str) -> Answer:
        """Return what rank 0 has put under a key; a LaunchError if it is gone, or has ended the test."""
        deadline = time.monotonic() + _IDLE
        try:
            while True:
                # The end is asked for first: whatever rank 0 puts under the key, it does before.
                is_over, has_come = within(_REPLY, lambda: (self._has("end"), self._has(key)))
                if has_come:
                    return self._get(key)
                if is_over or time.monotonic() > deadline:
                    raise TimeoutError("it has ended the test" if is_over else f"no word in {_IDLE:.0f} s")
                time.sleep(_LOOK_EVERY)
        except (RuntimeError, TimeoutError) as error:  # of torch's store: rank 0 is gone
            here, at = socket.gethostname(), f"{self.address}:{self.port}"
            text = f"rank {self.mine[0]} on {here} no longer reaches rank 0 at {at}: {first_line(error)}"
            raise LaunchError(text) from error

    def _put(self, key: str, value: Answer | dict[int, Answer]) -> None:
        self._store.set(f"{self._prefix}/{key}", signed(json.dumps(value).encode()))

    def _get(self, key: str) -> Answer:
        return dict(json.loads(verified(self._store.get(f"{self._prefix}/{key}"))))

    def _has(self, *keys: str) -> bool:
        return bool(self._store.check([f"{self._prefix}/{key}" for key in keys]))

    def _answers(self, key: str, ranks: Sequence[int], limit: float) -> dict[int, Answer]:
        """Return what each of these ranks has put under a key within the limit [s]."""
        keys, deadline = {rank: f"{key}/{rank}" for rank in ranks}, time.monotonic() + limit + _MARGIN
        while keys and not self._has(*keys.values()) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY)
        return {rank: self._get(of_rank) for rank, of_rank in keys.items() if self._has(of_rank)}

    def test(
        self, backend: str, local_ranks: Mapping[int, int], variables: Mapping[int, Mapping[str, str]]
    ) -> dict[int, Answer]:
        """Test a backend on the ranks of this process, each with environment variables; return the answers."""
        self._end_processes()
        if backend == "mpi4py":
            return {rank: self._try_mpi() for rank in self.mine}
        prefix, timeout = f"{self._prefix}/{self._number}", STEPS["rendezvous"] - _EARLIER
        for rank in self.mine:
            place = (local_ranks.get(rank, 0), self.address, self.port)
            arguments = (backend, rank, self.size, *place, prefix, timeout)
            self._processes[rank] = BackendProcess(arguments, variables.get(rank, {}))
        is_over = is_told = False
        while not is_over:
            looked_at = [process.is_over() for process in self._processes.values()]
            is_over = all(looked_at)
            if not is_told and any(process.has_failed for process in self._processes.values()):
                is_told = True
                self._store.set(f"{prefix}/failed", b"1")  # for those that wait in `meet`
            time.sleep(_LOOK_EVERY)
        return {rank: process.answers for rank, process in self._processes.items()}

    def _try_mpi(self) -> Answer:
        rank, answers = network_rank.MPIRank(self.size), {}
        self._hangs = True  # until MPI has answered
        for step in rank.steps:
            try:
                answers[step] = within(STEPS[step], functools.partial(network_rank.take, rank, step))
            except TimeoutError as error:
                answers[step] = {"ok": False, "late": True, "error": str(error)}
                return answers
            if not answers[step]["ok"]:
                break
        self._hangs = False
        return answers

    def _end_processes(self) -> None:
        for process in self._processes.values():
            process.end()
        self._processes.clear()


def ranks_here(count: int) -> Ranks:
    from lightning_lockstep.distributed.process_group import host_rendezvous, rendezvous_store

    port = host_rendezvous("127.0.0.1")
    store = rendezvous_store(0, count, address="127.0.0.1", port=port)
    return Ranks(count, range(count), store, "127.0.0.1", port)


def join() -> Ranks | None:
    """Return the ranks of the job that torchrun, mpirun or srun has started this process for; ``None`` outside one."""
    # All of the job call this; there is a LaunchError on those that do not reach rank 0 in time.
    if not started_from_outside():
        return None
    here = socket.gethostname()
    # This imports torch, which takes long on a busy host, and is no hang.
    importlib.import_module("lightning_lockstep.launchers.environments")
    try:
        found = within(_ARRIVAL, external_ranks)  # under mpirun it starts MPI, which may hang
    except TimeoutError as error:
        raise LaunchError(
            f"a rank on {here} cannot find rank 0, because MPI has not started: {error}. Try `lockstep-doctor mpi`, or"
            " set MASTER_ADDR and MASTER_PORT to the host of rank 0 and a free port on it."
        ) from error
    if found is None or found.count is None:
        return None
    from lightning_lockstep.distributed.process_group import rendezvous_store

    rank, size, address, port = found.rank, found.count, found.address, found.port
    try:
        store = rendezvous_store(rank, size, address=address, port=port, timeout=_ARRIVAL, name=found.name)
        return Ranks(size, [rank], store, address, port)
    except RuntimeError as error:  # torch's kinds of a lost connection derive from it
        means, at = addresses_of(address), f"{address}:{port}"
        if means != [address]:
            at += f" (here {', '.join(means) or 'no address'})"
        # What the system says of the last address; torch also prints bytes of that address.
        why = re.findall(r"errno: \d+ - ([^)]+)", str(error))
        raise LaunchError(
            f"rank {rank} on {here} does not reach rank 0 at {at}, from interface"
            f" {interface_towards(address) or 'none'}: {why[-1] if why else first_line(error)}"
        ) from error


def within(seconds: float, function: Callable[[], T]) -> T:
    """Call a function that may hang; raise a TimeoutError if it takes longer."""
    future = started(function)
    if not wait([future], seconds).done:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return future.result()


def started(function: Callable[[], T]) -> Future[T]:
    """Call a function in a thread that does not keep this process from its end, also if it hangs."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="doctor", daemon=True).start()
    return future


# -- What a rank reports of its host, and how it reaches others --

_REACH = 3.0  # longest wait for one address [s]
_TRIED = 4  # addresses of a host that are tried
_AT_A_TIME = 16
REACH_ALL = 60.0  # longest wait for all hosts [s]
_BOOT = "/proc/sys/kernel/random/boot_id"


def host_facts() -> Answer:
    """Return what a rank reports about its host, and how many devices torch finds there."""
    import torch

    found, here = interfaces(), Machine()
    addresses = [ip_address(address) for own in found.values() for address in own]
    return {
        "lightning-lockstep": lightning_lockstep.__version__,
        "torch": torch.__version__,
        "name": socket.gethostname(),
        "machine": (here.read_text(_BOOT) or "").strip(),  # distinguishes it from others of the same name
        "interfaces": found,
        "outside": [str(one) for one in addresses if not (one.is_loopback or one.is_link_local)],
        "shared_memory": here.limits.shared_memory,
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "of_mpi": find_mpi_rank() is not None,
    }


def reach_others(hosts: Mapping[str, Answer], rank: int) -> Answer:
    """Connect from the first rank of a host to the others."""
    if rank not in [host["rank"] for host in hosts.values()]:
        return {}
    others = {label: host for label, host in hosts.items() if host["rank"] != rank}
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        return dict(zip(others, pool.map(_reach, others.values()), strict=True))


def _reach(host: Answer) -> Answer:
    """Return at which address a host is reached, or what was tried."""
    tried = []
    for address in host["addresses"][:_TRIED]:
        try:
            socket.create_connection((address, host["port"]), timeout=_REACH).close()
            return {"address": address}
        except OSError as error:  # noqa: PERF203 - the next address may do
            what = f"no answer within {_REACH:.0f} s" if isinstance(error, TimeoutError) else str(error)
            own = interface_towards(address) or "none"
            tried.append(f"{address}:{host['port']} from interface {own}: {what}")
    return {"tried": tried or ["it has no address but loopback"]}


# -- The process in which a rank tests a backend of torch --

# Limits of the steps [s]. The first imports torch, or starts MPI, on a busy or cold host.
STEPS = {
    "start": 90.0,
    "meet": 95.0,
    "rendezvous": 20.0,
    "barrier": 20.0,
    "all_reduce": 20.0,
    "memory": 20.0,
    "large": 30.0,
}
# A backend's own limit is that much shorter than ours, so that its error names what it waited for [s].
_EARLIER = 3.0
_LEAVE = 5.0  # how long a killed process may take to end: in a driver it may hang, and no signal ends it [s]
_TAIL = 1_500  # of what it prints [characters]


class BackendProcess:
    """The process of one rank; it takes its steps by itself and writes a line for each."""

    def __init__(self, arguments: Sequence[object], environ: Mapping[str, str]) -> None:
        self.answers: Answer = {}  # by step
        self._left, self._began = list(network_rank.TorchRank.steps), time.monotonic()
        self._lines, self._errors, self._nccl = memory_file(), memory_file(), memory_file()
        log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"/proc/self/fd/{self._nccl.fileno()}"}
        self._process = subprocess.Popen(
            [sys.executable, "-u", network_rank.__file__, *map(str, arguments)],
            env={**os.environ, **log, **environ},
            stdin=subprocess.PIPE,  # it stays until this is closed
            stdout=self._lines,
            stderr=self._errors,
            pass_fds=[self._nccl.fileno()],
        )

    @property
    def has_failed(self) -> bool:
        return any(not answer["ok"] for answer in self.answers.values())

    def is_over(self) -> bool:
        """Read what it has answered; return whether it has taken its last step, has failed or is late."""
        code = self._process.poll()
        whole, _, _ = text_of(self._lines).rpartition("\n")
        for line in whole.splitlines()[len(self.answers) :]:
            answer = json.loads(line)
            self._note(answer.pop("step"), answer)
        if self._left and not self.has_failed:
            step, limit = self._left[0], STEPS[self._left[0]]
            if code is not None:
                why = f"its process ended: {exit_in_words(code)}"
                self._note(step, {"ok": False, "ended": True, "error": why})
            elif time.monotonic() > self._began + limit:
                why = f"no answer within {limit:.0f} s"
                self._note(step, {"ok": False, "late": True, "error": why})
        return not self._left or self.has_failed

    def _note(self, step: str, answer: Answer) -> None:
        if not answer["ok"]:
            lines = text_of(self._nccl).splitlines()
            debug = [line for line in lines if " WARN " in line or "fail" in line.lower()] or lines
            answer |= {"printed": text_of(self._errors)[-_TAIL:], "debug": "\n".join(debug[-8:])}
        self.answers[step] = answer
        self._left.remove(step)
        self._began = time.monotonic()

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE)
        for file in (self._process.stdin, self._lines, self._errors, self._nccl):
            file.close()
