"""What the test of a backend comes to, in words."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightning_lockstep.doctor.findings import Finding, ok, problem
from lightning_lockstep.doctor.network.backends import BackendResult, StepFault
from lightning_lockstep.doctor.network.group import AgentGroup

__all__ = ["backend_finding", "duration", "first_part", "ranks_in_words", "rate"]

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
    """Return what the test of a backend has found.

    Args:
        group: The agents.
        result: Of the test.
    """
    if not result.passed:
        return _failure(group, result)
    latency = max(result.value("speed", "latency").values())
    bandwidth = min(result.value("speed", "bandwidth").values())
    meeting = result.value("rendezvous", "seconds") or result.value("exchange", "seconds")
    barrier = max(result.value("barrier", "seconds").values())
    libraries = sorted({str(library) for library in result.value("start", "library").values() if library})
    with_what = f" with {first_part(libraries[0])}" if libraries else ""
    return ok(
        result.backend,
        f"{group.size} ranks{with_what}: rendezvous {duration(max(meeting.values()))}, barrier {duration(barrier)},"
        f" all-reduce right; 8 bytes take {duration(latency)}, 16 MB go at {rate(bandwidth)}",
    )


def _failure(group: AgentGroup, result: BackendResult) -> Finding:
    step, blamed = _STEPS[result.step], result.blamed
    ranks = [fault.rank for fault in blamed]
    everyone = len(ranks) == group.size
    waiting = sorted({fault.rank for fault in result.faults} - set(ranks))
    done = sorted(set(group.ranks) - {fault.rank for fault in result.faults})
    texts = _told_apart(group, blamed)
    lines = [
        f"the step {step!r} failed on {'all ranks' if everyone else ranks_in_words(ranks)}: {'; '.join(texts)}"
    ]
    if waiting:
        lines.append(f"{ranks_in_words(waiting)} then failed or waited")
    if done:
        lines.append(f"{ranks_in_words(done)} had no fault")
    debug = next((fault.debug for fault in blamed if fault.debug), "")
    if debug:
        lines.append(f"NCCL says: {debug}")
    return problem(f"{result.backend}: {step}", ". ".join(lines), *_fix(result, blamed))


def _told_apart(group: AgentGroup, faults: Sequence[StepFault]) -> list[str]:
    """Return what each has met, ranks with the same error together."""
    by_error: dict[tuple[str, str], list[int]] = {}
    for fault in faults:
        by_error.setdefault((group.host(fault.rank), _error(fault)), []).append(fault.rank)
    told = [f"{ranks_in_words(ranks)} on {host}: {error}" for (host, error), ranks in by_error.items()]
    return told[:_SHOWN] + ([f"and {len(told) - _SHOWN} more"] if len(told) > _SHOWN else [])


def _error(fault: StepFault) -> str:
    if fault.kind != "ended":
        return _SOURCE.sub("", fault.error)
    lines = [line for line in fault.printed.splitlines() if line.strip(" -*=")]
    return f"{fault.error} ({lines[-1].strip()})" if lines else fault.error


def _fix(result: BackendResult, blamed: Sequence[StepFault]) -> list[str]:
    texts = " ".join(fault.error for fault in blamed)
    name = result.backend.partition("+")[0]
    if "SIGKILL" in texts:
        return [
            "# the kernel or the scheduler killed it, most often for memory:",
            "dmesg | grep -i 'out of memory'",
        ]
    if "SIGBUS" in texts:
        return ["# /dev/shm is full: docker run --shm-size=8g, or sudo mount -o remount,size=8G /dev/shm"]
    if "ModuleNotFoundError" in texts or "ImportError" in texts:
        package = "'lightning-lockstep[mpi]'" if name == "mpi4py" else "lightning-lockstep"
        return [f"pip install {package}  # on each host that lacks it"]
    if "out of memory" in texts:
        return ["nvidia-smi  # who else uses these devices?"]
    if name == "nccl":
        return ["NCCL_DEBUG=INFO lockstep-doctor network  # the whole of what NCCL says"]
    return []


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks as people write them: ``rank 3``, ``ranks 0-3, 6``.

    Args:
        ranks: In rising order.
    """
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    listed = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"


def duration(seconds: float) -> str:
    """Return a time for people.

    Args:
        seconds: The time [s].
    """
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def rate(size: float) -> str:
    """Return a rate for people.

    Args:
        size: In a second [bytes].
    """
    return f"{size / 1e9:.1f} GB/s" if size >= 1e9 else f"{size / 1e6:.0f} MB/s"


def first_part(library: str) -> str:
    """Return name and version of an MPI library, without where and when it was built.

    Args:
        library: What it says of itself.
    """
    return library.partition(",")[0].partition("\t")[0].strip()
