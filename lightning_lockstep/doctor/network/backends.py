"""The test of one backend in steps on all ranks: which step failed first, on which ranks, with which error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_lockstep.doctor.network.group import AgentGroup

__all__ = ["BackendResult", "StepFault", "try_backend"]

_IMPORT = 90.0  # longest time for importing torch, or starting MPI, on a busy or cold host [s]
_STEPS = {"rendezvous": 20.0, "barrier": 20.0, "all_reduce": 20.0, "memory": 20.0, "speed": 30.0}
_MPI_STEPS = {"exchange": 20.0, "barrier": 20.0, "all_reduce": 20.0, "speed": 30.0}
# A backend's own limit is that much shorter than ours, so that its error names what it waited for [s].
_EARLIER = 3.0


@dataclass(frozen=True)
class StepFault:
    """The error of one rank in the step that failed."""

    rank: int
    kind: str  # ``ended`` (its process died), ``silent`` (its host does not answer), ``error``, or ``late``
    error: str
    debug: str = ""  # what NCCL has written
    printed: str = ""  # to standard error, by its process


@dataclass(frozen=True)
class BackendResult:
    """How the test of a backend went."""

    backend: str
    step: str = ""  # the one that failed; empty where none did
    faults: tuple[StepFault, ...] = ()
    answers: Mapping[str, Mapping[int, Mapping[str, Any]]] = field(default_factory=dict)  # by step and rank

    @property
    def passed(self) -> bool:
        """Whether every step did what it should."""
        return not self.step

    @property
    def blamed(self) -> tuple[StepFault, ...]:
        """The faults that explain the others: a dead process before an error, an error before a wait."""
        for kind in ("ended", "silent", "error", "late"):
            found = tuple(fault for fault in self.faults if fault.kind == kind)
            if found:
                return found
        return ()

    def value(self, step: str, name: str) -> dict[int, Any]:
        """Return one value of the answers to a step, by rank."""
        return {rank: answer.get(name) for rank, answer in self.answers.get(step, {}).items()}


def try_backend(
    group: AgentGroup,
    backend: str,  # what follows a ``+`` distinguishes two tests of one backend
    address: str,  # of rank 0, as the others reach it
    *,
    environ: Callable[[int], Mapping[str, str]] = lambda rank: {},
    patience: float = 1.0,  # factor for all deadlines
) -> BackendResult:
    """Take the steps of a backend on all ranks, up to the first that fails."""
    answers: dict[str, Mapping[int, Mapping[str, Any]]] = {}
    is_mpi = backend.startswith("mpi4py")

    def begin(rank: int) -> dict[str, Any]:
        return {
            "backend": backend,
            "size": group.size,
            "local_rank": group.local_rank(rank),
            "environ": dict(environ(rank)),
            "debug": backend.startswith("nccl"),
        }

    def step(name: str, seconds: float, ranks: list[int] | None = None, **given: Any) -> bool:
        within = seconds * patience
        asked = {"backend": backend, "step": name, "within": within, "given": given}
        answers[name] = group.ask("step", within, asked, ranks)
        return all(answer.get("ok") for answer in answers[name].values())

    def steps() -> str:
        answers["begin"] = group.ask("begin", 10 * patience, begin)
        if not all(answer.get("ok") for answer in answers["begin"].values()):
            return "begin"
        if not step("start", _IMPORT):
            return "start"
        place: dict[str, Any] = {}
        if not is_mpi:
            if not step("listen", 10, [0], address=address, within=_STEPS["rendezvous"] * patience):
                return "listen"
            place = {"address": address, "port": answers["listen"][0]["port"]}
        for name, seconds in (_MPI_STEPS if is_mpi else _STEPS).items():
            given = {**place, "within": seconds * patience - _EARLIER} if name == "rendezvous" else {}
            if not step(name, seconds, **given):
                return name
        return ""

    failed = steps()
    group.ask("end", 15 * patience, {"backend": backend})
    faults = tuple(_fault(rank, answer) for rank, answer in answers[failed].items()) if failed else ()
    return BackendResult(backend, failed, tuple(fault for fault in faults if fault is not None), answers)


def _fault(rank: int, answer: Mapping[str, Any]) -> StepFault | None:
    if answer.get("ok"):
        return None
    kind = next((kind for kind in ("ended", "silent", "late") if kind in answer), "error")
    texts = {name: str(answer.get(name, "")) for name in ("error", "debug", "printed")}
    return StepFault(rank, kind, **texts)
