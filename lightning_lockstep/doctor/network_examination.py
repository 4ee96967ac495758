"""All stages of the network test in turn, and the finding of each."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_lockstep._system import Completed
from lightning_lockstep._text import exit_in_words, ranges, ranks_in_words, size_in_words, time_in_words
from lightning_lockstep.doctor import probes
from lightning_lockstep.doctor.machine import Machine, last_line
from lightning_lockstep.doctor.network_connections import (
    BackendResult,
    Connections,
    StepFault,
    try_backend,
    try_connections,
)
from lightning_lockstep.doctor.network_links import AgentGroup
from lightning_lockstep.doctor.registry import Finding, not_applicable, ok, problem, warning
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.mpirun_command import (
    MPIRunSettings,
    find_mpirun,
    mpirun_command,
    mpirun_environ,
)

# -- The finding of a backend test --

# Where in its sources a backend writes from, which is long and of no use here.
_SOURCE = re.compile(r"\[/?[\w./-]+\.(cc|cpp|h):\d+\] ?")
_SHOWN = 4  # faults of ranks that are shown in full
_STEPS = {
    "begin": "starting a process",
    "start": "start",
    "listen": "opening the store",
    "rendezvous": "rendezvous",
    "exchange": "broadcast",
    "barrier": "barrier",
    "all_reduce": "all-reduce",
    "memory": "memory allocation",
    "speed": "large all-reduce",
}


def backend_finding(group: AgentGroup, result: BackendResult) -> Finding:
    if not result.passed:
        return _failure(group, result)
    latency = max(result.value("speed", "latency").values())
    bandwidth = min(result.value("speed", "bandwidth").values())
    first_contact = result.value("rendezvous", "seconds") or result.value("exchange", "seconds")
    connecting = max(first_contact.values())
    barrier = max(result.value("barrier", "seconds").values())
    libraries = sorted({str(library) for library in result.value("start", "library").values() if library})
    with_what = f" with {first_part(libraries[0])}" if libraries else ""
    return ok(
        result.backend,
        f"{group.size} ranks{with_what}: rendezvous {time_in_words(connecting)}, barrier {time_in_words(barrier)},"
        f" all-reduce correct; 8 bytes take {time_in_words(latency)}, 16 MB go at {rate(bandwidth)}",
    )


def _failure(group: AgentGroup, result: BackendResult) -> Finding:
    step, blamed = _STEPS[result.step], result.blamed
    ranks = [fault.rank for fault in blamed]
    everyone = len(ranks) == group.size
    waiting = sorted({fault.rank for fault in result.faults} - set(ranks))
    done = sorted(set(group.ranks) - {fault.rank for fault in result.faults})
    texts = _by_error(group, blamed)
    lines = [
        f"the step {step!r} failed on {'all ranks' if everyone else ranks_in_words(ranks)}: {'; '.join(texts)}"
    ]
    if waiting:
        lines.append(f"{ranks_in_words(waiting)} failed or timed out after that")
    if done:
        lines.append(f"{ranks_in_words(done)} completed it")
    debug = next((fault.debug for fault in blamed if fault.debug), "")
    if debug:
        lines.append(f"NCCL's own log: {debug}")
    return problem(f"{result.backend}: {step}", ". ".join(lines), *_fix(result, blamed))


def _by_error(group: AgentGroup, faults: Sequence[StepFault]) -> list[str]:
    """Return each error with its ranks and host."""
    by_error: dict[tuple[str, str], list[int]] = {}
    for fault in faults:
        by_error.setdefault((group.host(fault.rank), _error(fault)), []).append(fault.rank)
    texts = [f"{ranks_in_words(ranks)} on {host}: {error}" for (host, error), ranks in by_error.items()]
    return texts[:_SHOWN] + ([f"and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else [])


def _error(fault: StepFault) -> str:
    if fault.kind != "ended":
        return _SOURCE.sub("", fault.error)
    printed = last_line(fault.printed)
    return f"{fault.error} ({printed})" if printed else fault.error


def _fix(result: BackendResult, blamed: Sequence[StepFault]) -> list[str]:
    texts = " ".join(fault.error for fault in blamed)
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
    if name == "nccl":
        return ["NCCL_DEBUG=INFO lockstep-doctor network  # prints NCCL's whole log"]
    return []


def rate(size: float) -> str:  # size: [bytes/s]
    """Return a transfer rate such as ``3.2 GB/s``."""
    return f"{size / 1e9:.1f} GB/s" if size >= 1e9 else f"{size / 1e6:.0f} MB/s"


def first_part(library: str) -> str:
    """Return name and version of an MPI library, without where and when it was built."""
    return library.partition(",")[0].partition("\t")[0].strip()


# -- MPI tested on ranks that an mpirun of the doctor starts on this host --

_LONGEST = 90.0  # for all steps [s]
_LAST_STEP = "speed"


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
        return not_applicable("mpi4py", "no mpirun was found beside this Python or in PATH")
    command = mpirun_command(mpirun, settings, num_processes=count, num_nodes=1)
    command = [argument for argument in command if argument not in ("--output", "tag")]
    probe = str(Path(str(probes.__path__[0]), "network_mpi.py"))
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    given = [f"{name}={value}" for name, value in mpirun_environ(settings).items() if name in names]
    done = machine.run(["env", *given, *command, sys.executable, "-u", probe, "--all"], timeout=_LONGEST)
    return _finding(done, count)


def _finding(done: Completed, count: int) -> Finding:
    answers: dict[int | None, dict[str, Mapping[str, Any]]] = {}
    for line in done.output.splitlines():
        with suppress(ValueError):
            answer = json.loads(line[max(line.find("{"), 0) :])
            answers.setdefault(answer.get("answering"), {})[str(answer.get("step"))] = answer
    faults = [
        (rank, step, answer.get("error"))
        for rank, steps in answers.items()
        for step, answer in steps.items()
        if not answer.get("ok")
    ]
    if faults:
        rank, step, error = faults[0]
        return problem(f"mpi4py: {step}", f"rank {rank}: {error}")
    first = answers.get(0, {})
    sizes = {int(steps["start"].get("size", 0)) for steps in answers.values() if "start" in steps}
    if sizes - {count}:
        library = first.get("start", {}).get("library")
        return problem(
            "mpi4py: start",
            f"mpirun started {count} ranks, but MPI sees {', '.join(map(str, sorted(sizes)))}: mpi4py loads another MPI"
            f" ({library}) than the one that starts the ranks",
            "lockstep-doctor mpi",
        )
    if _LAST_STEP not in first:
        missing = [rank for rank in range(count) if "start" not in answers.get(rank, {})]
        tail = [line for line in done.error.splitlines() if line.strip(" -")]
        what = f"no answer within {_LONGEST:.0f} s" if done.timed_out else exit_in_words(done.returncode)
        which = f"; ranks that did not start: {ranges(missing)}" if missing else ""
        last = next(reversed(first), "start")
        return problem("mpi4py", f"{what}, after the step {last!r} of rank 0{which}. {' '.join(tail[-2:])}")
    speed, start = first[_LAST_STEP], first["start"]
    return ok(
        "mpi4py",
        f"{count} ranks with {first_part(start['library'])}: barrier and all-reduce correct; 8 bytes take"
        f" {time_in_words(speed['latency'])}, 16 MB go at {rate(speed['bandwidth'])}",
    )


# -- The network test from end to end: every stage in turn, and what each has found --

_SMALL_SHARED_MEMORY = 2**28  # per rank of a host, below which NCCL or loaders run out of it [bytes]


def examine(group: AgentGroup, *, mpi: bool, patience: float = 1.0) -> Iterator[Finding]:
    """Yield what each stage finds, in the order in which ranks would meet the fault."""
    # mpi: the ranks are those of an MPI job, so MPI can be tested on them; patience: factor for all deadlines
    yield from reported_ranks(group)
    if len(group.ranks) < 2:
        return
    yield from _shared_memory(group)
    connections = None
    if len(group.hosts) > 1:
        connections = try_connections(group, patience)
        yield from connections.findings(group)
    if len(group.ranks) < group.size:
        yield not_applicable("backends", "not every rank has reported, so no collective can complete")
        return
    address = "127.0.0.1" if connections is None else connections.address_of_first(group)
    if address is None:
        yield not_applicable("backends", "no address of rank 0 can be reached from all hosts")
        return
    yield from _backends(group, address, connections, mpi=mpi, patience=patience)


def reported_ranks(group: AgentGroup) -> Iterator[Finding]:
    """Yield which ranks have reported, and which have not."""
    places = "; ".join(f"{host}: {ranks_in_words(ranks)}" for host, ranks in group.hosts.items())
    if not group.missing:
        yield ok("ranks", f"all {group.size} reported ({places})")
        return
    for rank, why in sorted(group.missing.items()):
        yield problem(
            "ranks",
            f"rank {rank} of {group.size} did not report: {why}. Reported: {places or 'none'}",
            *group.fixes.get(
                rank, ("# look at the output of that rank, and at the firewall of rank 0's host",)
            ),
        )


def _shared_memory(group: AgentGroup) -> Iterator[Finding]:
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
    group: AgentGroup, address: str, connections: Connections | None, *, mpi: bool, patience: float
) -> Iterator[Finding]:
    gloo = try_backend(group, "gloo", address, patience=patience)
    yield backend_finding(group, gloo)
    if not gloo.passed and connections is not None and (own := connections.own_interfaces(group)):
        again = try_backend(
            group,
            "gloo+interface",
            address,
            environ=lambda rank: {"GLOO_SOCKET_IFNAME": own[group.host(rank)]},
            patience=patience,
        )
        yield _cure(
            again, "gloo", "with GLOO_SOCKET_IFNAME set", connections.exports(group, "GLOO_SOCKET_IFNAME")
        )
    if gloo.step not in ("begin", "start"):
        yield from _nccl(group, gloo, address, patience)
    if mpi:
        yield backend_finding(group, try_backend(group, "mpi4py", address, patience=patience))


def _nccl(group: AgentGroup, gloo: BackendResult, address: str, patience: float) -> Iterator[Finding]:
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
    nccl = try_backend(group, "nccl", address, patience=patience)
    yield backend_finding(group, nccl)
    if nccl.passed:
        return
    again = try_backend(
        group, "nccl+p2p", address, environ=lambda rank: {"NCCL_P2P_DISABLE": "1"}, patience=patience
    )
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
