"""All stages of the network test in turn, and the finding of each."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lightning_lockstep._text import exit_in_words, ranks_in_words, size_in_words, time_in_words
from lightning_lockstep.doctor.machine import Machine, last_line
from lightning_lockstep.doctor.network_connections import Connections, try_connections
from lightning_lockstep.doctor.network_ranks import Answer, RankGroup
from lightning_lockstep.doctor.network_stages import PROBE, Probe
from lightning_lockstep.doctor.registry import Finding, not_applicable, ok, problem, warning
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.mpirun_command import (
    MPIRunSettings,
    find_mpirun,
    mpirun_command,
    mpirun_environ,
)

# -- The test of one backend on all ranks: which step failed first, on which ranks, with which error --

# Limits of the steps [s]. The first imports torch, or starts MPI, on a busy or cold host.
_START = {"start": 90.0}
_START_OF_RANK_0 = {**_START, "listen": 10.0}
_STEPS = {"rendezvous": 20.0, "barrier": 20.0, "all_reduce": 20.0, "memory": 20.0, "speed": 30.0}
_MPI_STEPS = {"exchange": 20.0, "barrier": 20.0, "all_reduce": 20.0, "speed": 30.0}
# A backend's own limit is that much shorter than ours, so that its error names what it waited for [s].
_EARLIER = 3.0
_NAMES = {
    "start": "start",
    "listen": "opening the store",
    "rendezvous": "rendezvous",
    "exchange": "broadcast",
    "barrier": "barrier",
    "all_reduce": "all-reduce",
    "memory": "memory allocation",
    "speed": "large all-reduce",
}
# Of errors: a process that ended, a host that does not answer, an error, a step that did not end in time.
_KINDS = ("ended", "silent", "error", "late")


@dataclass(frozen=True)
class BackendResult:
    """How the test of a backend went."""

    backend: str
    answers: dict[str, dict[int, Answer]] = field(default_factory=dict)  # by step and rank

    def add(self, answers: Mapping[int, Answer], first: str) -> None:  # first: step of those that were taken
        """Add what the ranks answered; those that did not count for the step in which the others failed."""
        for rank, answer in answers.items():
            for step, taken in answer.get("steps", {}).items():
                self.answers.setdefault(step, {})[rank] = taken
        place = self.step or first
        for rank, answer in answers.items():
            if "steps" not in answer:
                self.answers.setdefault(place, {})[rank] = answer

    @property
    def step(self) -> str:
        """The first step that failed; empty where none did."""
        failed = (step for step in _NAMES if not all(a["ok"] for a in self.answers.get(step, {}).values()))
        return next(failed, "")

    @property
    def passed(self) -> bool:
        """Whether every step did what it should."""
        return not self.step

    @property
    def faults(self) -> dict[int, Answer]:
        """What the ranks answered on which that step failed."""
        answers = self.answers.get(self.step, {})
        return {rank: answer for rank, answer in sorted(answers.items()) if not answer["ok"]}

    @property
    def blamed(self) -> dict[int, Answer]:
        """The errors that explain the others: a dead process before an error, an error before a wait."""
        kinds = {rank: kind_of(fault) for rank, fault in self.faults.items()}
        first = min(kinds.values(), key=_KINDS.index, default="")
        return {rank: fault for rank, fault in self.faults.items() if kinds[rank] == first}

    def value(self, step: str, name: str) -> dict[int, Any]:
        """Return one value of the answers to a step, by rank."""
        return {rank: answer.get(name) for rank, answer in self.answers.get(step, {}).items()}


def kind_of(fault: Answer) -> str:
    return next((kind for kind in ("ended", "silent", "late") if kind in fault), "error")


def try_backend(
    group: RankGroup,
    backend: str,  # what follows a ``+`` distinguishes two tests of one backend
    address: str,  # of rank 0, as the others reach it
    *,
    environ: Callable[[int], Mapping[str, str]] = lambda rank: {},
    patience: float = 1.0,  # factor for all deadlines
) -> BackendResult:
    """Take the steps of a backend on all ranks, up to the first that fails."""
    name = backend.partition("+")[0]
    is_mpi = name == "mpi4py"
    probes: dict[int, Probe] = {}

    def start(rank: int) -> Answer:
        if is_mpi:
            probes[rank] = group.mpi or Probe(name, [group.size])
        else:
            timeout = _STEPS["rendezvous"] * patience - _EARLIER
            arguments = [rank, group.size, group.local_rank(rank), address, timeout]
            probes[rank] = Probe(name, arguments, environ(rank))
        return taken(rank, _START if is_mpi or rank > 0 else _START_OF_RANK_0)

    def go_on(rank: int) -> Answer:
        probes[rank].go_on(**({} if is_mpi else {"port": result.answers["listen"][0]["port"]}))
        return taken(rank, steps)

    def taken(rank: int, limits: Mapping[str, float]) -> Answer:
        return {"steps": probes[rank].steps({step: patience * within for step, within in limits.items()})}

    steps = _MPI_STEPS if is_mpi else _STEPS
    result = BackendResult(backend)
    try:
        started = group.all(f"{backend}: start", sum(_START_OF_RANK_0.values()) * patience, start)
        result.add(started, "start")
        if result.passed:
            result.add(group.all(backend, sum(steps.values()) * patience, go_on), next(iter(steps)))
    finally:
        for probe in probes.values():
            probe.end()
    return result


# -- The finding of a backend test --

# Where in its sources a backend writes from, which is long and of no use here.
_SOURCE = re.compile(r"\[/?[\w./-]+\.(cc|cpp|h):\d+\] ?")
_SHOWN = 4  # errors of ranks that are shown in full


def backend_finding(group: RankGroup, result: BackendResult) -> Finding:
    if not result.passed:
        return _failure(group, result)
    latency = max(result.value("speed", "latency").values())
    bandwidth = min(result.value("speed", "bandwidth").values())
    first_contact = result.value("rendezvous", "seconds") or result.value("exchange", "seconds")
    connecting = max(first_contact.values())
    barrier = max(result.value("barrier", "seconds").values())
    libraries = sorted({str(library) for library in result.value("start", "library").values() if library})
    with_what = f" with {_first_part(libraries[0])}" if libraries else ""
    return ok(
        result.backend,
        f"{group.size} ranks{with_what}: rendezvous {time_in_words(connecting)}, barrier {time_in_words(barrier)},"
        f" all-reduce correct; 8 bytes take {time_in_words(latency)}, 16 MB go at {_rate(bandwidth)}",
    )


def _failure(group: RankGroup, result: BackendResult) -> Finding:
    step, blamed, faults = _NAMES[result.step], result.blamed, result.faults
    where = "all ranks" if len(blamed) == group.size else ranks_in_words(blamed)
    lines = [f"the step {step!r} failed on {where}: {'; '.join(_by_error(group, blamed))}"]
    if waiting := faults.keys() - blamed.keys():
        lines.append(f"{ranks_in_words(waiting)} failed or timed out after that")
    if done := set(group.ranks) - faults.keys():
        lines.append(f"{ranks_in_words(done)} completed it")
    if debug := next((fault["debug"] for fault in blamed.values() if fault.get("debug")), ""):
        lines.append(f"NCCL's own log: {debug}")
    return problem(f"{result.backend}: {step}", ". ".join(lines), *_fix(result))


def _by_error(group: RankGroup, faults: Mapping[int, Answer]) -> list[str]:
    """Return each error with its ranks and host."""
    by_error: dict[tuple[str, str], list[int]] = {}
    for rank, fault in faults.items():
        error = _SOURCE.sub("", fault["error"])
        if "ended" in fault and (printed := last_line(fault["printed"])):
            error = f"{error} ({printed})"
        by_error.setdefault((group.host(rank), error), []).append(rank)
    texts = [f"{ranks_in_words(ranks)} on {host}: {error}" for (host, error), ranks in by_error.items()]
    return texts[:_SHOWN] + ([f"and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else [])


def _fix(result: BackendResult) -> list[str]:
    texts = " ".join(fault["error"] for fault in result.blamed.values())
    name = result.backend.partition("+")[0]
    if "SIGKILL" in texts:
        return [
            "# killed by the kernel or the scheduler, usually because memory ran out:",
            "dmesg | grep -i 'out of memory'",
        ]
    if "SIGBUS" in texts:
        return ["# /dev/shm is full: docker run --shm-size=8g, or sudo mount -o remount,size=8G /dev/shm"]
    if "ModuleNotFoundError" in texts or "ImportError" in texts:
        package = "'lightning-lockstep[mpi]'" if name == "mpi4py" else "lightning-lockstep"
        return [f"pip install {package}  # on each host that lacks it"]
    if "out of memory" in texts:
        return ["nvidia-smi  # lists the processes that use these devices"]
    if "loads another MPI" in texts:
        return ["lockstep-doctor mpi"]
    if name == "nccl":
        return ["export NCCL_DEBUG=INFO  # before a run: NCCL then prints its whole log"]
    return []


def _rate(size: float) -> str:  # size: [bytes/s]
    """Return a transfer rate such as ``3.2 GB/s``."""
    return f"{size / 1e9:.1f} GB/s" if size >= 1e9 else f"{size / 1e6:.0f} MB/s"


def _first_part(library: str) -> str:
    """Return name and version of an MPI library, without where and when it was built."""
    return library.partition(",")[0].partition("\t")[0].strip()


# -- MPI tested on ranks that an mpirun of the doctor starts on this host --

_LONGEST = 90.0  # for all steps [s]


def mpi_here(machine: Machine, count: int) -> Finding:
    """Return how a test with ranks of mpirun on this host went."""
    settings = MPIRunSettings()
    if "mpi4py" not in machine.python.packages:
        return not_applicable("mpi4py", "it is not installed; strategy=mpi needs it")
    try:
        mpirun = find_mpirun(settings)
    except LaunchError as error:
        return problem("mpi4py", str(error))
    if mpirun is None:
        return not_applicable("mpi4py", "no mpirun was found next to this Python or in PATH")
    command = mpirun_command(mpirun, settings, num_processes=count, num_nodes=1)
    command = [argument for argument in command if argument not in ("--output", "tag")]
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    given = [f"{name}={value}" for name, value in mpirun_environ(settings).items() if name in names]
    probe = [sys.executable, "-u", str(PROBE), "mpi4py", str(count), "--all"]
    done = machine.run(["env", *given, *command, *probe], timeout=_LONGEST)
    taken: dict[int, dict[str, Answer]] = {rank: {} for rank in range(count)}
    for line in done.output.splitlines():
        with suppress(ValueError, KeyError):  # what ranks and mpirun print
            answer = json.loads(line[max(line.find("{"), 0) :])
            taken[answer["rank"]][answer["step"]] = answer
    what = f"no answer within {_LONGEST:.0f} s" if done.timed_out else exit_in_words(done.returncode)
    tail = " ".join([line for line in done.error.splitlines() if line.strip(" -")][-2:])
    for steps in taken.values():
        for step in (*_START, *_MPI_STEPS):
            if not all(answer["ok"] for answer in steps.values()):
                break
            steps.setdefault(step, {"ok": False, "late": True, "error": f"{what}. {tail}"})
    group = RankGroup(count)
    group.facts = {rank: {"host": socket.gethostname()} for rank in range(count)}
    result = BackendResult("mpi4py")
    result.add({rank: {"steps": steps} for rank, steps in taken.items()}, "start")
    return backend_finding(group, result)


# -- The network test from end to end: every stage in turn, and what each has found --

_SMALL_SHARED_MEMORY = 2**28  # per rank of a host, below which NCCL or loaders run out of it [bytes]


def examine(group: RankGroup, *, mpi: bool) -> Iterator[Finding]:
    """Yield what each stage finds, in the order in which ranks would meet the error."""
    # mpi: the ranks are those of an MPI job, so MPI can be tested on them
    yield from reported_ranks(group)
    if len(group.ranks) < 2:
        return
    yield from _shared_memory(group)
    connections = None
    if len(group.hosts) > 1:
        connections = try_connections(group)
        yield from connections.findings()
    if len(group.ranks) < group.size:
        yield not_applicable("backends", "not every rank has reported, so no collective can complete")
        return
    address = "127.0.0.1" if connections is None else connections.address_of_first()
    if address is None:
        yield not_applicable("backends", "no address of rank 0 can be reached from all hosts")
        return
    yield from _backends(group, address, connections, mpi=mpi)


def reported_ranks(group: RankGroup) -> Iterator[Finding]:
    """Yield which ranks have reported, and which have not."""
    places = "; ".join(f"{host}: {ranks_in_words(ranks)}" for host, ranks in group.hosts.items())
    if not group.missing:
        yield ok("ranks", f"all {group.size} reported ({places})")
        return
    for rank, why in sorted(group.missing.items()):
        place = f"on {group.ssh_names[rank]}, " if rank in group.ssh_names else ""
        yield problem(
            "ranks",
            f"rank {rank} of {group.size} did not report: {place}{why}. Reported: {places or 'none'}",
            *group.fixes.get(
                rank, ("# look at the output of that rank, and at the firewall of rank 0's host",)
            ),
        )


def _shared_memory(group: RankGroup) -> Iterator[Finding]:
    for host, ranks in group.hosts.items():
        sizes = group.facts[ranks[0]].get("shared_memory")
        if not sizes:
            yield warning("shared memory", f"{host}: there is no /dev/shm; NCCL and data loaders need it")
            continue
        size, free = sizes
        if free < _SMALL_SHARED_MEMORY * len(ranks):
            yield warning(
                "shared memory",
                f"{host}: /dev/shm has {size_in_words(size)}, of which {size_in_words(free)} are free, for {len(ranks)}"
                " ranks; NCCL and data loader workers fail with a bus error when it is full",
                "# in a container: docker run --shm-size=8g (or --ipc=host); elsewhere:",
                "sudo mount -o remount,size=8G /dev/shm",
            )


def _backends(
    group: RankGroup, address: str, connections: Connections | None, *, mpi: bool
) -> Iterator[Finding]:
    gloo = try_backend(group, "gloo", address)
    yield backend_finding(group, gloo)
    if not gloo.passed and connections is not None and (own := connections.own_interfaces()):
        again = try_backend(
            group,
            "gloo+interface",
            address,
            environ=lambda rank: {"GLOO_SOCKET_IFNAME": own[group.host(rank)]},
        )
        yield _cure(again, "gloo", "with GLOO_SOCKET_IFNAME set", connections.exports("GLOO_SOCKET_IFNAME"))
    if gloo.step != "start":
        yield from _nccl(group, gloo, address)
    if mpi:
        yield backend_finding(group, try_backend(group, "mpi4py", address))


def _nccl(group: RankGroup, gloo: BackendResult, address: str) -> Iterator[Finding]:
    devices = devices_of_hosts(group.hosts, gloo)
    if not any(devices.values()):
        yield not_applicable("nccl", "torch finds no CUDA device on any rank's host")
        return
    crowded = [
        f"{host} has {devices[host]} for {len(ranks)} ranks"
        for host, ranks in group.hosts.items()
        if devices[host] < len(ranks)
    ]
    if crowded:
        yield not_applicable("nccl", f"it needs one device per rank: {'; '.join(crowded)}")
        return
    versions = gloo.value("start", "nccl")
    if len(set(versions.values())) > 1:
        listed = ", ".join(f"rank {rank}: {version}" for rank, version in versions.items())
        yield warning("nccl", f"the ranks have different versions of NCCL ({listed})")
    nccl = try_backend(group, "nccl", address)
    yield backend_finding(group, nccl)
    if nccl.passed:
        return
    again = try_backend(group, "nccl+p2p", address, environ=lambda rank: {"NCCL_P2P_DISABLE": "1"})
    yield _cure(
        again,
        "nccl",
        "with NCCL_P2P_DISABLE=1: peer-to-peer copies between GPUs fail or corrupt data on this host, most often"
        " because PCIe access control (ACS) or the IOMMU redirects them",
        [
            "export NCCL_P2P_DISABLE=1",
            "# better: switch ACS off in the BIOS, or boot with iommu=pt; `sudo lspci -vvv | grep ACSCtl` shows it",
        ],
    )
    if not again.passed and any(group.facts[rank].get("iommu") for rank in group.ranks):
        yield warning(
            "nccl", "an IOMMU is on, which can corrupt copies between GPUs: try booting with iommu=pt"
        )


def devices_of_hosts(hosts: Mapping[str, Sequence[int]], started: BackendResult) -> dict[str, int]:
    """Return how many devices the ranks of each host take, by their numbers on it."""
    # Under ``srun --gpus-per-task=1`` each rank sees one device, and each another one.
    counts, uuids = started.value("start", "devices"), started.value("start", "uuids")
    found: dict[str, int] = {}
    for host, ranks in hosts.items():
        seen = [list(uuids.get(rank) or []) for rank in ranks]
        if all(seen):
            found[host] = len({one[place % len(one)] for place, one in enumerate(seen)})
        else:
            found[host] = int(counts.get(ranks[0]) or 0)
    return found


def _cure(again: BackendResult, name: str, what: str, lines: list[str]) -> Finding:
    subject = f"{name}, second try"
    if again.passed:
        return problem(subject, f"it works {what}", *lines)
    return not_applicable(subject, f"it also fails {what.partition(':')[0]}, in the step {again.step}")
