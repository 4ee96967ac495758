"""The same checks on several hosts, by ssh or as ranks."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_lockstep._system import Completed, end_programs, run_program
from lightning_lockstep._text import exit_in_words
from lightning_lockstep.doctor.check_runner import Checks
from lightning_lockstep.doctor.machine import last_line
from lightning_lockstep.doctor.network_examination import examine, reported_ranks
from lightning_lockstep.doctor.network_links import AgentGroup
from lightning_lockstep.doctor.network_rendezvous import JoinedRank, RendezvousError, gather_ranks
from lightning_lockstep.doctor.registry import CheckOptions, CheckResult, Finding, problem
from lightning_lockstep.doctor.table import merged
from lightning_lockstep.errors import ConfigurationError, LaunchError
from lightning_lockstep.launchers.mpi_hosts import (
    Host,
    HostReport,
    host_fix,
    is_host_name,
    python_on,
    read_hostfile,
    ssh_fault,
)

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


# -- The checks of ``--hosts``: each host runs the doctor, by ssh, and one table shows them all --

# Those that look at all hosts at once, from here.
_FROM_HERE = ("mpi", "network", "run")
_LONGEST = 180.0  # for all checks of a host, where the user gives no limit [s]
_SSH_FAILED = 255
_BEGINS = "LOCKSTEP-DOCTOR"  # printed before the answer; a shell there may have printed something already


class ChecksOnHosts:
    """The checks of one call, on several hosts; used as :class:`.check_runner.Checks`."""

    def __init__(self, names: Sequence[str], options: CheckOptions, hosts: Sequence[Host]) -> None:
        self.names = tuple(names)
        self._options, self._hosts = options, hosts
        self._there = [name for name in names if name not in _FROM_HERE]
        self._here = Checks([name for name in names if name in _FROM_HERE], options)
        self._began: float | None = None

    def running(self) -> dict[str, float]:
        there = {} if self._began is None else {f"{len(self._hosts)} hosts": time.monotonic() - self._began}
        return {**there, **self._here.running()}

    def results(self, tick: Callable[[], None] = lambda: None) -> Iterator[CheckResult]:
        if self._there:
            yield from self._on_hosts(tick)
        yield from self._here.results(tick)

    def _on_hosts(self, tick: Callable[[], None]) -> Iterator[CheckResult]:
        self._began = time.monotonic()
        with ThreadPoolExecutor(len(self._hosts)) as pool:
            asked = {host.name: pool.submit(self._ask, host.name) for host in self._hosts}
            try:
                while not all(future.done() for future in asked.values()):
                    tick()
                    time.sleep(0.05)
            except BaseException:  # such as Ctrl-C, which these ssh do not receive
                end_programs()
                raise
        self._began = None
        answers = {host: future.result() for host, future in asked.items()}
        fault = [answer for answer in answers.values() if isinstance(answer, CheckResult)]
        if fault:
            yield CheckResult("hosts", tuple(finding for result in fault for finding in result.findings))
        yield from merged({host: found for host, found in answers.items() if isinstance(found, list)})

    def _ask(self, host: str) -> list[CheckResult] | CheckResult:
        """Return what a host has found, or why it was not asked."""
        given = ["-m", "lightning_lockstep.doctor", *self._there, "--json"]
        for option, value in (
            ("--model-parameters", self._options.model_parameters),
            ("--gpus", self._options.gpus),
        ):
            given += [option, f"{value:.12g}"] if value is not None else []
        limit = _LONGEST
        if self._options.timeout is not None:
            given += ["--timeout", f"{self._options.timeout:g}"]
            limit = 30 + self._options.timeout * len(self._there)
        done = run_program(python_on(host, given, self._options.ssh_args, first=_BEGINS), limit)
        if done.is_missing:
            return _not_asked(host, "there is no ssh command on this host", "sudo apt install openssh-client")
        if done.timed_out:
            return _not_asked(host, f"no answer within {limit:.0f} s", f"ssh {host} true")
        try:
            answer = done.output.rpartition(f"{_BEGINS}\n")[2]
            return [CheckResult.from_json(result) for result in json.loads(answer)["checks"]]
        except (ValueError, KeyError, TypeError):
            return _unusable(host, done)


def _unusable(host: str, done: Completed) -> CheckResult:
    last = last_line(done.error) or f"{exit_in_words(done.returncode)}, no output"
    if done.returncode == _SSH_FAILED:
        report = HostReport(host, last)
        return _not_asked(host, ssh_fault(report)[0], *host_fix(report))
    if "No module named" in last:
        why = f"the package is not installed there, or not in this Python: {last}"
        return _not_asked(host, why, *host_fix(HostReport(host, "ok")))
    return _not_asked(host, f"the doctor fails there: {last}", f"ssh {host} lockstep-doctor")


def _not_asked(host: str, why: str, *fix: str) -> CheckResult:
    return CheckResult("hosts", (problem("host", f"{host}: {why}", *fix),))


# -- The doctor as ranks of torchrun, mpirun or srun: one table, printed once, by rank 0 --

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
