"""The same checks on several hosts, by ssh or as ranks.

``python -m lightning_lockstep.doctor.hosts`` is the process of a host's ranks, at the other end of ssh.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_lockstep.doctor.check_runner import Checks
from lightning_lockstep.doctor.network_examination import examine, reported_ranks
from lightning_lockstep.doctor.network_ranks import ClosedError, Link, RankGroup, ranks_by_ssh
from lightning_lockstep.doctor.network_rendezvous import JoinedRank, RendezvousError, join_ranks
from lightning_lockstep.doctor.registry import CheckOptions, CheckResult, Finding, problem
from lightning_lockstep.doctor.table import merged
from lightning_lockstep.errors import ConfigurationError, LaunchError
from lightning_lockstep.launchers.mpi_hosts import Host, is_host_name, read_hostfile

# -- The hosts that ``--hosts`` and ``--hostfile`` name --


def hosts_of(options: CheckOptions) -> list[Host]:
    """Return the hosts that a user has named; none for this host alone."""
    wrong = [name for name in options.hosts if not is_host_name(name)]
    if wrong:
        raise ConfigurationError(
            f"--hosts: {', '.join(map(repr, wrong))}: expected names or addresses of hosts with commas between them,"
            " such as --hosts node1,node2."
        )
    hosts = [Host(name) for name in options.hosts]
    return hosts if options.hostfile is None else hosts + _listed_in(options.hostfile)


def _listed_in(hostfile: str) -> list[Host]:
    given = f"--hostfile {hostfile}"
    if not Path(hostfile).is_file():
        raise ConfigurationError(
            f"{given}: there is no such file. Expected one host per line, such as 'node1 slots=4' (Open MPI) or"
            " 'node1:4' (MPICH)."
        )
    try:
        hosts = read_hostfile(Path(hostfile), given)
    except LaunchError as error:
        raise ConfigurationError(str(error)) from error
    if not hosts:
        raise ConfigurationError(f"{given}: it names no host. Expected one host per line.")
    return hosts


# -- The same checks on each host, and the network between their ranks: what every process of a job or an ssh does --

_NETWORK = "network"
_CHECKS = 180.0  # longest time for the other checks of a host, where the user gives no limit [s]


def results_of_ranks(
    group: RankGroup, names: Sequence[str], options: CheckOptions, *, mpi: bool = False
) -> Iterator[CheckResult]:
    """Run the checks on the first rank of each host, then test the network between all ranks."""
    # The results are the same in all processes; the first one shows them. mpi: as of `examine`.
    of_host = Checks([name for name in names if name != _NETWORK], options)
    if of_host.names:
        yield from _of_hosts(group, of_host, options)
    began = time.monotonic()
    found: list[Finding] = []
    if _NETWORK in names:
        found = list(examine(group, mpi=mpi))
    elif group.missing and not group.ssh_names:  # ranks that did not connect are a finding of every check
        found = list(reported_ranks(group))
    if found:
        yield CheckResult(_NETWORK, tuple(found), time.monotonic() - began)


def _of_hosts(group: RankGroup, checks: Checks, options: CheckOptions) -> Iterator[CheckResult]:
    def run(_: int) -> dict[str, Any]:
        return {"checks": [result.to_json() for result in checks.results()]}

    answers = group.all(
        "checks", _limit(checks.names, options.timeout), run, [ranks[0] for ranks in group.hosts.values()]
    )
    by_host: dict[str, list[CheckResult]] = {}
    faults = [
        problem("host", f"{host}: {group.missing[rank]}", *group.fixes.get(rank, ()))
        for rank, host in group.ssh_names.items()
        if rank in group.missing
    ]
    for rank, answer in answers.items():
        host = group.ssh_names.get(rank, group.host(rank))
        if "checks" in answer:
            by_host[host] = [CheckResult.from_json(result) for result in answer["checks"]]
        else:
            faults.append(problem("host", f"{host}: {answer['error']}"))
    if faults:
        yield CheckResult("hosts", tuple(faults))
    if not group.ssh_names and by_host.keys() == {socket.gethostname()}:
        yield from by_host[socket.gethostname()]
    else:
        yield from merged(by_host)


def _limit(names: Sequence[str], timeout: float | None) -> float:
    """Return the longest time for these checks of a host [s]."""
    return _CHECKS if timeout is None else 30 + timeout * len(names)


class ChecksOnHosts:
    """The checks of ``--hosts``, by ssh; used as :class:`.check_runner.Checks`."""

    # Those that look at all hosts at once, from here.
    FROM_HERE = ("mpi", _NETWORK, "run")

    def __init__(self, names: Sequence[str], options: CheckOptions, hosts: Sequence[Host]) -> None:
        self.names = tuple(names)
        self._options, self._hosts = options, [host.name for host in hosts]
        self._there = [name for name in names if name not in self.FROM_HERE]
        self._here = Checks([name for name in names if name in self.FROM_HERE], options)
        self._began: float | None = None

    def running(self) -> dict[str, float]:
        there = {} if self._began is None else {f"{len(self._hosts)} hosts": time.monotonic() - self._began}
        return {**there, **self._here.running()}

    def results(self, tick: Callable[[], None] = lambda: None) -> Iterator[CheckResult]:
        if self._there:
            self._began = time.monotonic()
            group = ranks_by_ssh(self._hosts, 1, self._there, self._options, tick)
            try:
                yield from results_of_ranks(group, self._there, self._options)
            finally:
                group.close()
                self._began = None
        yield from self._here.results(tick)


class ChecksOfRanks:
    """The checks of ranks of torchrun, mpirun or srun, as :class:`.check_runner.Checks`; every rank iterates."""

    def __init__(self, names: Sequence[str], options: CheckOptions, me: JoinedRank) -> None:
        self.names = tuple(names)
        self._options, self._me, self._began = options, me, time.monotonic()

    def running(self) -> dict[str, float]:
        return {f"{self._me.size} ranks of {self._me.started_by}": time.monotonic() - self._began}

    def results(self, tick: Callable[[], None] = lambda: None) -> Iterator[CheckResult]:
        try:
            group = join_ranks(self._me, tick)
        except RendezvousError as error:
            if self._me.rank > 0:
                raise
            fix = "lockstep-doctor mpi" if self._me.by_mpi else "export MASTER_ADDR=HOST_OF_RANK_0"
            yield CheckResult(_NETWORK, (problem("ranks", str(error), fix),))
            return
        try:
            yield from results_of_ranks(group, self.names, self._options, mpi=self._me.by_mpi)
        finally:
            group.close()


# -- The process of a host's ranks, at the other end of ssh --

_LONGEST = 900  # in addition to its checks, after which it ends in any case [s]


def main() -> None:
    """Take part in a test whose first process is at the other end of standard input and output."""
    given = json.loads(sys.argv[1])
    signal.alarm(_LONGEST + int(_limit(given["checks"], given["options"]["timeout"])))
    first = Link(sys.stdin.buffer, os.fdopen(os.dup(1), "wb"))
    os.write(1, b"\n")  # ends a line that the shell there may have begun
    os.dup2(2, 1)  # what else is printed is no answer
    group = RankGroup(given["size"], given["ranks"], first=first)
    with suppress(ClosedError):
        group.meet()
        for _ in results_of_ranks(group, given["checks"], CheckOptions.from_json(given["options"])):
            pass
    group.close()


if __name__ == "__main__":
    main()
