"""The finding of a backend test."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightning_lockstep._text import ranks_in_words, time_in_words
from lightning_lockstep.doctor.findings import Finding, ok, problem
from lightning_lockstep.doctor.machines.processes import last_line
from lightning_lockstep.doctor.network.backends import BackendResult, StepFault
from lightning_lockstep.doctor.network.group import AgentGroup

__all__ = ["backend_finding", "first_part", "rate"]

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
