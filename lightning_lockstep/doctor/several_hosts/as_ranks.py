"""The doctor as ranks of torchrun, mpirun or srun: one table, printed once, by rank 0."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from lightning_lockstep.doctor.check_runner import Checks
from lightning_lockstep.doctor.findings import CheckResult, Finding, problem
from lightning_lockstep.doctor.network.examination import examine, reported_ranks
from lightning_lockstep.doctor.network.group import AgentGroup
from lightning_lockstep.doctor.network.identity import JoinedRank
from lightning_lockstep.doctor.network.rendezvous import RendezvousError, gather_ranks
from lightning_lockstep.doctor.options import CheckOptions
from lightning_lockstep.doctor.several_hosts.merging import merged

__all__ = ["ChecksOfRanks", "checks_of_host"]

_NETWORK = "network"
_CHECKS = 180.0  # longest time for the other checks of a host [s]


def checks_of_host(names: Sequence[str], options: CheckOptions) -> Checks:
    """Return the checks that the first rank of a host runs there; the ranks test the network together."""
    return Checks([name for name in names if name != _NETWORK], options)


class ChecksOfRanks:
    """The checks of one call, on the hosts of a job; used as :class:`.check_runner.Checks` by rank 0."""

    def __init__(self, names: Sequence[str], options: CheckOptions, me: JoinedRank) -> None:
        self.names = tuple(names)
        self._me, self._of_host = me, checks_of_host(names, options)
        self._began = time.monotonic()

    def running(self) -> dict[str, float]:
        return {f"{self._me.size} ranks of {self._me.started_by}": time.monotonic() - self._began}

    def results(self, tick: Callable[[], None] = lambda: None) -> Iterator[CheckResult]:
        """Have one rank of each host run the checks, then test the network between all."""
        try:
            group = gather_ranks(self._me, self._of_host)
        except RendezvousError as error:
            fix = "lockstep-doctor mpi" if self._me.by_mpi else "export MASTER_ADDR=HOST_OF_RANK_0"
            yield CheckResult(_NETWORK, (problem("ranks", str(error), fix),))
            return
        try:
            tick()
            yield from self._of_hosts(group)
            tick()
            began = time.monotonic()
            # Ranks that did not connect are a finding of every check.
            found: list[Finding] = list(
                examine(group, mpi=self._me.by_mpi)
                if _NETWORK in self.names
                else (finding for finding in reported_ranks(group) if group.missing)
            )
            if found:
                yield CheckResult(_NETWORK, tuple(found), time.monotonic() - began)
        finally:
            group.close()

    def _of_hosts(self, group: AgentGroup) -> Iterator[CheckResult]:
        if not self._of_host.names:
            return
        first = [ranks[0] for ranks in group.hosts.values()]
        answers = group.ask("checks", _CHECKS, {}, first)
        by_host: dict[str, list[CheckResult]] = {}
        for rank, answer in answers.items():
            found = _results(answer)
            if found is None:
                why = str(answer.get("error", "its answer cannot be read"))
                yield CheckResult("hosts", (problem("host", f"{group.host(rank)}: {why}"),))
            else:
                by_host[group.host(rank)] = found
        if by_host.keys() == {socket.gethostname()}:
            yield from by_host[socket.gethostname()]
        else:
            yield from merged(by_host)


def _results(answer: Mapping[str, Any]) -> list[CheckResult] | None:
    with suppress(KeyError, ValueError, TypeError):
        return [CheckResult.from_json(result) for result in answer["checks"]]
    return None
