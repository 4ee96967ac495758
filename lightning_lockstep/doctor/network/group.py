"""All agents of a test, as the coordinator sees them: one request to all, with one deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_lockstep.doctor.network.links import ClosedError, Link

__all__ = ["AgentGroup"]

_MARGIN = 5.0  # for the answer itself to arrive [s]
_LOOK_EVERY = 0.05
_END = 10.0  # longest wait for an agent of this process to end [s]


class AgentGroup:
    def __init__(
        self,
        links: Mapping[int, Link],
        size: int,
        missing: Mapping[int, str],  # why a rank has no agent, as far as known
        threads: Sequence[threading.Thread] = (),  # in which agents of this process serve
    ) -> None:
        self._threads = threads
        self.links, self.size, self.missing = dict(links), size, dict(missing)
        self.facts: dict[int, dict[str, Any]] = {}  # about its host, as each rank has reported
        self.fixes: dict[int, tuple[str, ...]] = {}  # lines to paste for a rank that has not
        self._number = 0

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
        return str(self.facts.get(rank, {}).get("host", "?"))

    def give_hosts_unique_names(self) -> None:
        """Add an address to the names of hosts that share one, such as ``localhost``."""
        machines: dict[str, set[str]] = {}
        for facts in self.facts.values():
            machines.setdefault(str(facts.get("name")), set()).add(str(facts.get("machine")))
        for facts in self.facts.values():
            name, machine = str(facts.get("name")), str(facts.get("machine"))
            address = next(iter(facts.get("outside", [])), machine)
            facts["host"] = f"{name} ({address})" if len(machines[name]) > 1 else name

    def local_rank(self, rank: int) -> int:
        """Return a rank's place among those of its host."""
        return self.hosts[self.host(rank)].index(rank)

    def ask(
        self,
        do: str,
        within: float,  # that it may take there [s]
        given: Mapping[str, Any] | Callable[[int], Mapping[str, Any]],  # the same for all, or by rank
        ranks: list[int] | None = None,
    ) -> dict[int, dict[str, Any]]:
        """Have agents do something; return the answer of each, with ``silent`` where one has ended or is late."""
        asked = self.ranks if ranks is None else ranks
        self._number += 1
        answers: dict[int, dict[str, Any]] = {}
        for rank in asked:
            wanted = given(rank) if callable(given) else given
            try:
                self.links[rank].send({"number": self._number, "do": do, "given": dict(wanted)})
            except ClosedError as error:
                answers[rank] = _silent(f"its agent has closed the connection ({error})")
        deadline = time.monotonic() + within + _MARGIN
        while (open_ranks := [rank for rank in asked if rank not in answers]) and time.monotonic() < deadline:
            for rank in open_ranks:
                self._look(rank, answers)
        for rank in asked:
            answers.setdefault(rank, _silent(f"its agent did not answer within {within + _MARGIN:.0f} s"))
        return answers

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        for thread in self._threads:
            thread.join(_END)

    def _look(self, rank: int, answers: dict[int, dict[str, Any]]) -> None:
        try:
            message = self.links[rank].receive(_LOOK_EVERY)
        except ClosedError as error:
            answers[rank] = _silent(f"its agent has closed the connection ({error})")
            return
        if message is not None and message.get("number") == self._number:
            answer = message.get("answer")
            answers[rank] = answer if isinstance(answer, dict) else {"ok": False, "error": "no answer"}


def _silent(error: str) -> dict[str, Any]:
    return {"ok": False, "silent": True, "error": error}
